"""Where the elements of a value live: `Placement`, and `Replicas`, what it knows of the mesh."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection

from jax.sharding import PartitionSpec

from wusharding.analysis.lines import Lines, Phase, shard_numbers
from wusharding.formats import Format


@dataclasses.dataclass(frozen=True)
class Replicas:
    """The mesh as the analysis sees it: its axes, and which of them the update shards over.

    Args:
      axis_sizes: name and size of every mesh axis, in mesh order.
      reduce_axes: the replica axes, over which gradients are summed.
      shard_axes: the part of `reduce_axes` over which the update is sharded.
      lines: for shard axes that lie over several dims of a torus, its lines.
    """

    axis_sizes: tuple[tuple[str, int], ...]
    reduce_axes: tuple[str, ...]
    shard_axes: tuple[str, ...]
    lines: tuple[tuple[str, Lines], ...] = ()

    @functools.cached_property
    def phases(self) -> tuple[Phase, ...]:
        """The steps of scattering over all shard axes; gathering takes them in reverse."""
        lines = dict(self.lines)
        found = []
        for axis in self.shard_axes:
            found += [Phase(axis, len(g[0]), g) for g in lines.get(axis, ())] or [
                Phase(axis, self.size((axis,)), None)
            ]
        return tuple(found)

    @functools.cached_property
    def shard_numbers(self) -> tuple[int, ...]:
        """The shard that each device along the shard axes holds; empty where it counts along."""
        if not any(axis in self.shard_axes for axis, _ in self.lines):
            return ()
        lines = dict(self.lines)
        numbers = [0]
        for axis in self.shard_axes:
            n = self.size((axis,))
            inner = shard_numbers(lines[axis]) if axis in lines else range(n)
            numbers = [outer * n + k for outer in numbers for k in inner]
        return () if numbers == list(range(len(numbers))) else tuple(numbers)

    @property
    def num_shards(self) -> int:
        return self.size(self.shard_axes)

    @property
    def num_replicas(self) -> int:
        return self.size(self.reduce_axes)

    def size(self, axes: tuple[str, ...]) -> int:
        sizes = dict(self.axis_sizes)
        return math.prod(sizes[a] for a in axes)


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """Dims `lo:hi` merged, padded and split over the shard axes, `chunk` elements on each.

    `tiled`: merged in the order of 8 x 128 tiles (see `Format`).
    """

    lo: int
    hi: int
    chunk: int
    tiled: bool = False

    def narrowed(self, shape: tuple[int, ...]) -> Span:
        """The same split without dims of length 1 at its ends: one name for equal splits."""
        lo, hi = self.lo, self.hi
        while hi - lo > 1 and shape[lo] == 1:
            lo += 1
        while hi - lo > 1 and shape[hi - 1] == 1:
            hi -= 1
        return Span(lo, hi, self.chunk, self.tiled)


Tiles = tuple[tuple[str, ...], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """`tiles[d]`: mesh axes that split dim `d` evenly (as model parallelism does, no padding).

    `span`: how what these leave is split over the shard axes; None where it is not. A placement
    with neither is replicated: every device holds the whole value.
    """

    tiles: Tiles
    span: Span | None = None

    @property
    def tile_axes(self) -> tuple[str, ...]:
        return tuple(a for axes in self.tiles for a in axes)

    @property
    def is_replicated(self) -> bool:
        return self.span is None and not any(self.tiles)

    def along(self, axes: Collection[str]) -> Tiles:
        """The tiles of some mesh axes only."""
        return tuple(tuple(a for a in tile if a in axes) for tile in self.tiles)

    def shared_tiles(self, other: Placement) -> Placement:
        """The dims that both tile alike; the others whole."""
        pairs = zip(self.tiles, other.tiles, strict=True)
        return Placement(tuple(a if a == b else () for a, b in pairs))

    def without_span(self) -> Placement:
        return Placement(self.tiles)

    def with_leading_dim(self) -> Placement:
        """The same for a stack of such values: a whole dim comes first."""
        return Placement(((), *self.tiles), self._moved_span(1))

    def without_leading_dim(self) -> Placement | None:
        """The same for one of a stack; None where the leading dim is split."""
        if self.tiles[0] or (self.span and self.span.lo == 0):
            return None
        return Placement(self.tiles[1:], self._moved_span(-1))

    def _moved_span(self, dims: int) -> Span | None:
        span = self.span
        return dataclasses.replace(span, lo=span.lo + dims, hi=span.hi + dims) if span else None

    def tile_shape(self, shape: tuple[int, ...], replicas: Replicas) -> tuple[int, ...]:
        """The part of `shape` that the tiles leave on a device."""
        if not any(self.tiles):
            return shape
        return tuple(n // replicas.size(t) for n, t in zip(shape, self.tiles, strict=True))

    def format(self, shape: tuple[int, ...], replicas: Replicas) -> Format | None:
        """The `Format` of the span."""
        if self.span is None:
            return None
        tile = self.tile_shape(shape, replicas)
        return span_format(tile, self.span, replicas.num_shards)

    def local_shape(self, shape: tuple[int, ...], replicas: Replicas) -> tuple[int, ...]:
        """The shape in which a device computes on it."""
        tile = self.tile_shape(shape, replicas)
        if self.span is None:
            return tile
        return tile[: self.span.lo] + (self.span.chunk,) + tile[self.span.hi :]

    def local_dims(self) -> tuple[int, ...]:
        """For each dim, its position in `local_shape`: merged dims share one."""
        ndim = len(self.tiles)
        if self.span is None:
            return tuple(range(ndim))
        lo, hi = self.span.lo, self.span.hi
        merged = hi - lo - 1
        return tuple(d if d < lo else lo if d < hi else d - merged for d in range(ndim))


@functools.cache
def span_format(tile: tuple[int, ...], span: Span, num_shards: int) -> Format:
    """The format that a span gives to a tile."""
    return Format(tile, span.lo, span.hi, num_shards, span.chunk, tiled=span.tiled)


@functools.cache
def replicated(ndim: int) -> Placement:
    """The placement of a value that every device holds whole."""
    return Placement(((),) * ndim)


def spec_tiles(spec: PartitionSpec, ndim: int) -> Tiles:
    """The mesh axes that a spec gives to each dim."""
    entries = (*spec, *[None] * (ndim - len(spec)))
    return tuple(
        () if e is None else (e,) if isinstance(e, str) else tuple(map(str, e)) for e in entries
    )
