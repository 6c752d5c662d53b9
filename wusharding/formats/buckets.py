"""Many small arrays in few buffers: which pieces of which arrays travel together.

A bucket holds whole arrays or runs of one; an array may continue in the next bucket, so buckets are
full whatever the sizes are. Positions are in elements *per shard*.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Piece(NamedTuple):
    """Elements `start:stop` (of one shard) of array number `array`."""

    array: int
    start: int
    stop: int


Bucket = tuple[Piece, ...]


def fill_buckets(elems: Sequence[int], bucket_elems: int) -> list[Bucket]:
    """Distributes arrays over buckets of at most `bucket_elems`.

    An array that alone fills a bucket travels alone and unsplit: it needs no copy into a buffer.

    Args:
      elems: length of each array, in elements per shard.
      bucket_elems: capacity of a bucket, at least 1.

    >>> for bucket in fill_buckets([3, 2, 9], 4):
    ...     print([tuple(piece) for piece in bucket])
    [(2, 0, 9)]
    [(0, 0, 3), (1, 0, 1)]
    [(1, 1, 2)]
    """
    capacity = max(bucket_elems, 1)
    alone = [(Piece(i, 0, n),) for i, n in enumerate(elems) if n >= capacity]
    shared: list[Bucket] = []
    current: list[Piece] = []
    room = capacity
    for i, n in enumerate(elems):
        if n >= capacity or n == 0:
            continue
        start = 0
        while start < n:
            stop = min(n, start + room)
            current.append(Piece(i, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                shared.append(tuple(current))
                current, room = [], capacity
    if current:
        shared.append(tuple(current))
    return alone + shared
