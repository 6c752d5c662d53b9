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


class BucketSizes(NamedTuple):
    """Which arrays travel together, in bytes of the buffer that a device puts in or gets out.

    Args:
      bucket_bytes: capacity of a bucket.
      alone_bytes: an array that takes this many or more travels alone.
      whole_tiles: what is scattered is shaped, and padded, as TPU compilers want it.
    """

    bucket_bytes: int
    alone_bytes: int
    whole_tiles: bool = False

    def fill(self, elems: Sequence[int], elem_bytes: int) -> list[Bucket]:
        """Distributes arrays over buckets.

        Args:
          elems: length of each array, in elements per shard.
          elem_bytes: what an element per shard takes of a buffer.
        """
        return fill_buckets(elems, self.bucket_bytes // elem_bytes, self.alone_bytes // elem_bytes)

    def goes_alone(self, elems: int, elem_bytes: int) -> bool:
        """Whether `fill` lets an array of so many elements per shard travel alone.

        >>> sizes = BucketSizes(bucket_bytes=4096, alone_bytes=1024)
        >>> sizes.goes_alone(16, 64), sizes.goes_alone(15, 64)
        (True, False)
        """
        return elems >= _large(self.bucket_bytes // elem_bytes, self.alone_bytes // elem_bytes)


def fill_buckets(elems: Sequence[int], bucket_elems: int, alone_elems: int) -> list[Bucket]:
    """Distributes arrays over buckets of at most `bucket_elems`.

    A large array travels alone and unsplit: it needs no copy into a buffer, nor out of it.

    Args:
      elems: length of each array, in elements per shard.
      bucket_elems: capacity of a bucket; one element fits at least.
      alone_elems: arrays of this length travel alone, and so do those that fill a bucket.

    >>> for bucket in fill_buckets([3, 2, 9, 5], 4, 8):
    ...     print([tuple(piece) for piece in bucket])
    [(2, 0, 9)]
    [(3, 0, 5)]
    [(0, 0, 3), (1, 0, 1)]
    [(1, 1, 2)]
    """
    capacity = max(bucket_elems, 1)
    large = _large(bucket_elems, alone_elems)
    alone = [(Piece(i, 0, n),) for i, n in enumerate(elems) if n >= large]
    shared: list[Bucket] = []
    current: list[Piece] = []
    room = capacity
    for i, n in enumerate(elems):
        if n >= large or n == 0:
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


def _large(bucket_elems: int, alone_elems: int) -> int:
    return max(min(bucket_elems, alone_elems), 1)
