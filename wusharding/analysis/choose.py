"""Which format for which leaf, cheapest first for a target, and which leaves travel together.

Costs are in bytes of memory traffic per step, relative to one pass over the leaf. What they say was
measured with the compilers themselves: padding costs a copy of the gradient and one of the weight;
splitting a dim that is not the leading one costs a strided copy; on TPU, merging dims is free only
while the two minor dims, which are tiled 8 x 128, are left alone.
"""

from __future__ import annotations

import math
from typing import Literal

from wusharding.analysis.placement import Placement, Replicas, Span, Tiles
from wusharding.formats import LANES, SUBLANES, has_whole_tiles
from wusharding.formats.buckets import BucketSizes
from wusharding.formats.tiles import scattered_tiles, tile_padding

Target = Literal["cpu", "gpu", "tpu"]
FormatChoice = Literal["auto", "dim", "merged", "flat"]
TARGETS: tuple[Target, ...] = ("cpu", "gpu", "tpu")
FORMAT_CHOICES: tuple[FormatChoice, ...] = ("auto", "dim", "merged", "flat")

_MAX_ALIGNMENT_WASTE = 0.005
_MAX_ROW_WASTE = 0.0095
_ALONE_BYTES: dict[Target, int] = {"cpu": 256 * 2**10, "tpu": 256 * 2**10}


def candidates(
    shape: tuple[int, ...],
    tiles: Tiles,
    replicas: Replicas,
    target: Target,
    choice: FormatChoice = "auto",
    kept_dims: int = 0,
) -> list[tuple[float, Placement]]:
    """Placements of a leaf with their costs, cheapest first.

    Args:
      shape: the logical shape.
      tiles: mesh axes that already split its dims.
      replicas: the mesh.
      target: what the program will run on.
      choice: "auto" offers all; the others one family each.
      kept_dims: leading dims that stay whole, as that of layers which are gathered in turn.

    >>> r = Replicas((("data", 8),), ("data",), ("data",))
    >>> candidates((17, 16), ((), ()), r, "cpu")[0][1].span  # 272 elements need no padding
    Span(lo=0, hi=2, chunk=34, tiled=False)
    >>> candidates((16, 17), ((), ()), r, "cpu")[0][1].span
    Span(lo=0, hi=1, chunk=2, tiled=False)
    """
    tile = Placement(tiles).tile_shape(shape, replicas)
    ndim = len(tile)
    spans: dict[Span, float] = {}
    for lo in range(kept_dims, ndim):
        for hi in range(lo + 1, ndim + 1):
            family = _family(lo - kept_dims, hi - kept_dims, ndim - kept_dims)
            if family is None or (choice != "auto" and choice not in family):
                continue
            chunk = -(-math.prod(tile[lo:hi]) // replicas.num_shards)
            if target == "tpu" and math.prod(tile[lo:hi]) == math.prod(tile):
                chunk = _aligned(chunk)
            span = Span(lo, hi, chunk).narrowed(shape)
            spans[span] = _cost(tile, span, replicas, target)
            if target == "tpu" and (lo, hi) == (0, ndim):
                spans |= {s.narrowed(shape): cost for s, cost in _by_tiles(tile, replicas)}
    ranked = sorted(spans.items(), key=lambda item: (item[1], item[0].hi - item[0].lo, item[0].lo))
    return [(cost, Placement(tiles, span)) for span, cost in ranked]


def lanes_of(placement: Placement, shape: tuple[int, ...], target: Target) -> int | None:
    """Rows x lanes storage for flattened leaves on TPU, where whole tiles fit a shard.

    After dims of length 1 a shard is stored as it is computed on: that is the same in memory, but
    TPU compilers do not fuse what is done in the one shape with what is done in the other.
    """
    span = placement.span
    if target != "tpu" or span is None or len(shape) < 2 or 0 < span.lo < span.hi == len(shape):
        return None
    if math.prod(shape[span.lo : span.hi]) != math.prod(shape):
        return None
    return LANES if span.chunk % (SUBLANES * LANES) == 0 else None


def bucket_sizes(bucket_bytes: int, target: Target) -> BucketSizes:
    """Which arrays travel together on a target, in buckets of `bucket_bytes`.

    On CPU every array that is cut out of a bucket is a kernel of its own, and nothing is gained by
    fewer collectives: with a limit of 256 KiB a step of Adam on 25 M weights took half of the CPU
    time, and compiling it two thirds. On TPU the limit is the same, so that whole tiles travel as
    they are. On GPU, where it is not measured, an array travels alone if it fills a bucket.
    """
    alone = min(bucket_bytes, _ALONE_BYTES.get(target, bucket_bytes))
    return BucketSizes(bucket_bytes, alone, whole_tiles=target == "tpu")


def _family(lo: int, hi: int, ndim: int) -> tuple[FormatChoice, ...] | None:
    names: list[FormatChoice] = []
    if hi - lo == 1:
        names.append("dim")
    if lo == 0 and hi > 1:
        names.append("merged")
    if (lo, hi) == (0, ndim):
        names.append("flat")
    return tuple(names) or None


def _by_tiles(tile: tuple[int, ...], replicas: Replicas) -> list[tuple[Span, float]]:
    """Spans of whole arrays in the order of their tiles, with their costs.

    Where rows do not fill tiles they are padded, to as many as make scattering them cheapest.
    """
    ndim, shards = len(tile), replicas.num_shards
    elems = math.prod(tile)
    spans = []
    if has_whole_tiles(tile):
        spans.append(Span(0, ndim, -(-elems // shards), tiled=True))
    if ndim > 1 and elems and math.prod(tile[:-2]) == 1 and tile[-1] % LANES == 0:
        rows, cols = tile[-2:]
        unit = math.lcm(SUBLANES, shards // math.gcd(shards, cols))
        first = -(-rows // unit) * unit
        tried = range(first, int(rows * (1 + _MAX_ROW_WASTE)) + 1, unit)
        padded = [Span(ndim - 2, ndim, r * cols // shards, tiled=True) for r in tried]
        spans += [s for s in padded if s.chunk * shards > elems]
    costs = [_padding_cost(tile, s, shards) + _scatter_cost(s.chunk, replicas) for s in spans]
    return sorted(zip(spans, costs, strict=True), key=lambda found: found[1])[:2]


def _scatter_cost(shard_elems: int, replicas: Replicas) -> float:
    """Passes over the leaf to give the pieces of each phase a size that is scattered as it is.

    What the compiler adds to a piece costs two passes of it; what is added to small ones (see
    `tile_padding`) is a copy of all that is scattered. Pieces that are no whole tiles are moved
    once more when they are gathered.
    """
    cost, pieces = 0.0, 1
    for phase in replicas.phases:
        before, pieces = pieces, pieces * phase.size
        elems = shard_elems * replicas.num_shards // pieces
        tiles, rest = divmod(elems, SUBLANES * LANES)
        if not rest and not tiles % 2:
            cost += 2.0 / pieces if scattered_tiles(tiles, phase.size) > tiles else 0.0
        elif tile_padding(elems, (), phase.size) or rest % LANES:
            cost += 3.0 / before
        else:
            cost += 2.0 / pieces + (1.0 / before if rest else 0.0)
    return cost


def _aligned(chunk: int) -> int:
    """Whole 8 x 128 tiles, or whole lanes, where that wastes next to nothing."""
    for unit in (SUBLANES * LANES, LANES, SUBLANES):
        rounded = -(-chunk // unit) * unit
        if rounded - chunk <= _MAX_ALIGNMENT_WASTE * chunk:
            return rounded
    return chunk


def _cost(tile: tuple[int, ...], span: Span, replicas: Replicas, target: Target) -> float:
    elems = max(math.prod(tile), 1)
    cost = _padding_cost(tile, span, replicas.num_shards)
    if target != "tpu":
        return cost + (1.0 if span.lo > 0 and elems > 1 else 0.0)
    shard_elems = span.chunk * math.prod(tile[: span.lo]) * math.prod(tile[span.hi :])
    return cost + _tpu_relayout(tile, span) + _scatter_cost(shard_elems, replicas)


def _padding_cost(tile: tuple[int, ...], span: Span, num_shards: int) -> float:
    """Passes over the leaf that its padding costs: a copy going in, a slice coming out."""
    pad = num_shards * span.chunk / max(math.prod(tile[span.lo : span.hi]), 1) - 1.0
    return 2.0 + 100.0 * pad if pad > 0 else 0.0


def _tpu_relayout(tile: tuple[int, ...], span: Span) -> float:
    """Passes over the leaf that a relayout costs, given 8 x 128 tiles on its two minor dims."""
    ndim = len(tile)
    if ndim < 2:
        return 0.0
    minor, second = tile[-1], tile[-2]
    narrow = max(LANES / max(minor, 1), 1.0) * max(SUBLANES / max(second, 1), 1.0)
    # What is scattered has the split dim in front: moving it there takes its tiles apart.
    cost = 2.0 * narrow if math.prod(tile[: span.lo]) > 1 else 0.0
    if span.hi == ndim:  # the minor dim is split, alone or merged
        if span.hi - span.lo == 1:
            return cost + 2.0 * narrow * max(LANES / max(span.chunk, 1) - 1.0, 0.0)
        return cost + (narrow if minor % LANES or narrow > 1 else 1.0)
    if span.hi == ndim - 1:
        if span.hi - span.lo > 1 and second % SUBLANES:
            return cost + narrow
        return cost + (0.0 if span.chunk % SUBLANES == 0 else 0.5 * narrow)
    return cost
