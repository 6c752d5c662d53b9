"""Pieces of 8 x 128 tiles that TPU compilers scatter along a line as they are, and what others get.

A ring sends half of a piece each way, and a long piece in parts. What does not divide so is padded,
by the compiler or by us; what is shorter than two tiles becomes an all-reduce.
"""

from __future__ import annotations

import math

from wusharding.formats.format import LANES, SUBLANES

_RING_TILES = 3648  # that a core holds while a ring runs
_FEW_TILES = 16  # pieces of fewer are padded by us


def scattered_tiles(tiles: int, length: int) -> int:
    """The tiles that TPU compilers scatter to each device of a line for a piece of `tiles`.

    Long pieces run through the ring in parts of one size, each an even number of tiles. Where they
    do not divide so, the compiler pads them by a fusion with permutations. Read off the HLO of 28
    to 48 sizes for each of 14 lines of 2 to 128 devices of v2 to v5p, float32, without a miss. A
    core of v6e holds about twice as much, so that its parts are longer and some of these sizes are
    padded once more.

    Args:
      tiles: of a device's piece; even.
      length: devices in the line.

    >>> scattered_tiles(18_912, 2), scattered_tiles(19_008, 2), scattered_tiles(2358, 16)
    (18944, 19008, 2366)
    >>> scattered_tiles(4, 10_000), scattered_tiles(0, 16)
    (4, 0)
    """
    longest = 2 * max(_RING_TILES // (2 * (length + 4)), 1)
    parts = -(-tiles // longest)
    if tiles % (2 << (parts - 1).bit_length()) == 0:  # in as many parts as the next power of two
        return tiles
    return -(-tiles // (2 * parts)) * 2 * parts


def tile_padding(elems: int, minor: tuple[int, ...], length: int) -> int:
    """Elements to add to a piece that is scattered, so that it is tiles that go as they are.

    Where rows of 128 fill a piece of some tiles it is left to the compiler: ours is a copy of all
    pieces, and its a fusion of the padding with the ring, and a few permutations. These would add
    much to what a small piece sends. What padding would double is left as it is, for an all-reduce
    of it sends no more, and so are pieces that consist of tiles already: flattening those would
    move their data.

    Args:
      elems: elements of the piece.
      minor: its dims but the leading one.
      length: devices in the line along which it is scattered.

    >>> tile_padding(3 * 1024, (), 16), tile_padding(4 * 1024, (), 16), tile_padding(1024, (), 16)
    (1024, 0, 0)
    >>> (
    ...     tile_padding(2304, (), 16),
    ...     tile_padding(24 * 100, (100,), 16),
    ...     tile_padding(17 * 1024, (), 16),
    ... )
    (1792, 0, 0)
    >>> (tile_padding(589 * 1024 + 1, (), 4) + 1) // 1024  # to two parts of 296 tiles
    3
    """
    tile = SUBLANES * LANES
    if minor and (len(minor) > 1 or elems // math.prod(minor) % SUBLANES == 0):
        return 0
    pad = -elems % (2 * tile)
    if not 0 < pad < elems or (elems % LANES == 0 and elems >= _FEW_TILES * tile):
        return 0
    return scattered_tiles((elems + pad) // tile, length) * tile - elems
