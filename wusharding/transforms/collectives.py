"""Reduce-scatter, all-gather, all-reduce and all-to-all over the replica axes, in buckets.

Every function runs on one device, where the mesh axes are bound. Scattering runs axis by axis in
the order in which they are named, and gathering in reverse, so that shard `i` is that of
`PartitionSpec((axes))`. An axis that lies over several dims of a torus is scattered along its
lines, one dim at a time; `Replicas.shard_numbers` says which shard each device then holds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from wusharding.analysis.lines import Phase, shard_numbers
from wusharding.analysis.placement import Placement, Replicas, Tiles, span_format
from wusharding.analysis.rules.base import Reduction
from wusharding.analysis.sum_dtypes import OWN, SumDtypes
from wusharding.formats import LANES, SUBLANES, Format
from wusharding.formats.buckets import Bucket, BucketSizes
from wusharding.formats.tiles import tile_padding
from wusharding.jaxprs import as_invarying, reduce_scatter_is_unsound, row_major, varying_axes
from wusharding.transforms.side_by_side import side_by_side

Hops = tuple[tuple[Phase, Any], ...]  # the phases of a sum, and in which dtype it travels in each


@dataclasses.dataclass(frozen=True)
class Collectives:
    """The collectives of one update.

    Args:
      replicas: the mesh axes.
      buckets: which arrays travel together.
      shard_index: number of this device's shard, `i32[]`.
    """

    replicas: Replicas
    buckets: BucketSizes
    shard_index: jax.Array

    @classmethod
    def here(cls, replicas: Replicas, buckets: BucketSizes) -> Collectives:
        """The collectives of the device that this runs on."""
        index = lax.axis_index(replicas.shard_axes)
        if replicas.shard_numbers:
            index = jnp.asarray(replicas.shard_numbers, jnp.int32)[index]
        return cls(replicas, buckets, index)

    @property
    def axes(self) -> tuple[str, ...]:
        return self.replicas.shard_axes

    # ------------------------------------------------------------------- one leaf, no communication

    def take_shard(self, x: jax.Array, before: Placement, after: Placement) -> jax.Array:
        """The piece that `after` gives this device, of a value that it holds as `before` says."""
        for d, (have, want) in enumerate(zip(before.tiles, after.tiles, strict=True)):
            if have != want:
                n = x.shape[d] // self.replicas.size(want)
                x = lax.dynamic_slice_in_dim(x, lax.axis_index(want) * n, n, d)
        if after.span is None:
            return x
        fmt = span_format(x.shape, after.span, self.replicas.num_shards)
        return fmt.shard_of(x, self.shard_index)

    def together(self, shards: Sequence[jax.Array]) -> list[jax.Array]:
        """Shards of gradients or of new weights, small ones to be updated several at a time."""
        return side_by_side(shards) if self.buckets.whole_tiles else list(shards)

    # --------------------------------------------------------------------------------- collectives

    @jax.named_scope("reduce_scatter")
    def reduce_scatter(
        self,
        xs: Sequence[jax.Array],
        formats: Sequence[Format],
        sums: SumDtypes = OWN,
        arrived: Callable[[jax.Array], jax.Array] = lambda x: x,
    ) -> list[jax.Array]:
        """Sums each `x: [*shape]` over the shard axes; returns shards in `local_shape`.

        Along axes where they are equal already (`sums.equal`) nothing is sent: each device takes
        its part first. `arrived` is called on each large array as the last collective gives it.
        """
        out: list[Any] = [None] * len(xs)
        phases = [phase for phase in self.replicas.phases if phase.axis not in sums.equal]
        if not phases:
            pairs = zip(xs, formats, strict=True)
            return [self._padded(x, fmt, ()).reshape(fmt.local_shape) for x, fmt in pairs]
        sent = [tuple((phase, sums.of(x.dtype, phase.axis)) for phase in phases) for x in xs]
        for hops in dict.fromkeys(sent):
            group = [i for i, other in enumerate(sent) if other == hops]
            _, first = hops[0]
            done = self._scattered(
                [xs[i].astype(first) for i in group], [formats[i] for i in group], hops, arrived
            )
            for i, x in zip(group, done, strict=True):
                out[i] = x.astype(xs[i].dtype)
        return out

    def sum_shards(
        self, xs: Sequence[jax.Array], axes: tuple[str, ...], sums: SumDtypes
    ) -> list[jax.Array]:
        """Sums shards over replica axes that they are not split over."""
        out = list(xs)
        for own in dict.fromkeys(x.dtype for x in xs):
            group = [i for i, x in enumerate(xs) if x.dtype == own]
            for dtype, over in sums.by_dtype(own, axes):
                done = self.all_reduce([out[i].astype(dtype) for i in group], "sum", over)
                for i, x in zip(group, done, strict=True):
                    out[i] = x.astype(own)
        return out

    def _scattered(
        self,
        xs: Sequence[jax.Array],
        formats: Sequence[Format],
        hops: Hops,
        arrived: Callable[[jax.Array], jax.Array],
    ) -> list[jax.Array]:
        """`reduce_scatter` of arrays that travel alike, phase by phase."""
        phases = [phase for phase, _ in hops]

        def alone(i: int) -> jax.Array:
            x, fmt = xs[i], formats[i]
            if self.buckets.whole_tiles:
                # Tiles are taken as they lie row by row: in another layout that is a copy.
                x = row_major(x) if x.ndim > 1 else x
                rows = by_shard(self._padded(x, fmt, phases), fmt)
                return self._scatter_tiles(rows, hops, arrived).reshape(fmt.local_shape)
            return arrived(self._scatter(self._padded(x, fmt, phases), fmt.lo, hops))

        def packed(alike: Sequence[jax.Array], fmt: Format) -> jax.Array:
            def rows_of(x: jax.Array) -> jax.Array:
                rows = by_shard(self._padded(x, fmt, phases), fmt)
                return rows.reshape(rows.shape[0], -1)

            if len(alike) == 1 or fmt.shard_elems > 1:
                return _concatenate([rows_of(x) for x in alike], 1)
            # As rows these fill the lanes of a TPU, and as columns one lane in 128.
            stacked = _concatenate([x.reshape(-1) for x in alike]).reshape(len(alike), *fmt.shape)
            return jax.vmap(rows_of, out_axes=1)(stacked)[:, :, 0]

        def scatter(bucket: jax.Array) -> jax.Array:
            return (
                self._scatter_tiles(bucket, hops)
                if self.buckets.whole_tiles
                else self._scatter(bucket, 0, hops)[0]
            )

        def opened(done: jax.Array, fmt: Format, number: int) -> Sequence[jax.Array]:
            return [x.reshape(fmt.local_shape) for x in jnp.split(done, number)]

        return self._bucketed(xs, formats, alone, packed, scatter, opened)

    def all_gather(self, shards: Sequence[jax.Array], formats: Sequence[Format]) -> list[jax.Array]:
        """Whole arrays `[*shape]` from shards in `local_shape`, equal on every device.

        They are taken to leave the program, as new weights do; see `gather_wide`.
        """
        done = self.gather_wide(shards, formats, leaving=range(len(shards)))
        return [fmt.narrowed(x) for fmt, x in zip(formats, done, strict=True)]

    def gather_wide(
        self,
        shards: Sequence[jax.Array],
        formats: Sequence[Format],
        leaving: Collection[int],
    ) -> list[jax.Array]:
        """As `all_gather`, but padding along `Format.wide_dim` is left on.

        What TPU compilers gather is never an output: they copy it to one, and all copies come last,
        when all weights have been gathered. So what leaves is written to its output by a selection,
        and the next gather but one waits for it.

        Args:
          shards: in `local_shape`.
          formats: of each.
          leaving: numbers of those that leave the program; their padding is cut off.
        """
        shards = list(shards)
        for i, x in zip(leaving, self.together([shards[i] for i in leaving]), strict=True):
            shards[i] = x
        always: Any = lax.optimization_barrier(jnp.bool_(True)) if leaving else None
        written: list[jax.Array] = []

        def alone(i: int) -> jax.Array:
            x, fmt = shards[i], formats[i]
            if not self.buckets.whole_tiles:
                return _plain(fmt).widened(self._gather(x, fmt.lo))
            leaves = i in leaving
            if leaves and len(written) > 1:
                x, _ = lax.optimization_barrier((x, written[-2]))
            x = _plain(fmt).widened(from_shards(self._gather_tiles(x, fmt.lo), fmt))
            if leaves:
                x = fmt.narrowed(x)
                x = jnp.where(always, x, jnp.zeros_like(x))
                written.append(x)
            return x if leaves or x.ndim < 2 else row_major(x)

        def packed(alike: Sequence[jax.Array], fmt: Format) -> jax.Array:
            return _concatenate([x.reshape(1, -1) for x in alike], 1)

        def opened(done: jax.Array, fmt: Format, number: int) -> Sequence[jax.Array]:
            if number == 1:
                return [_plain(fmt).widened(from_shards(done, fmt))]
            # Laid out array by array at once: taken out of the columns, each would be a copy.
            rows = jnp.moveaxis(done.reshape(done.shape[0], number, -1), 1, 0)
            rows = row_major(rows.reshape(number, -1))
            return list(jax.vmap(lambda x: _plain(fmt).widened(from_shards(x, fmt)))(rows))

        return self._bucketed(shards, formats, alone, packed, lambda b: self._gather(b, 0), opened)

    def untiled(
        self, xs: Sequence[jax.Array], moves: Sequence[tuple[Tiles, Tiles]]
    ) -> list[jax.Array]:
        """Gathers tiles along the axes that `before` has and `after` lacks, small ones together.

        Args:
          xs: this device's tiles.
          moves: for each the tiles `before` and `after`; where they differ, `after` is whole.
        """
        out = list(xs)
        small: dict[Any, list[tuple[int, int]]] = {}
        for i, (before, after) in enumerate(moves):
            for d, (axes, kept) in enumerate(zip(before, after, strict=True)):
                if axes == kept:
                    continue
                if xs[i].nbytes * self.replicas.size(axes) >= self.buckets.alone_bytes:
                    out[i] = lax.all_gather(out[i], axes, axis=d, tiled=True, to="invarying")
                    continue
                key = (axes, xs[i].dtype, varying_axes(xs[i]))
                small.setdefault(key, []).append((i, d))
        for (axes, _, _), members in small.items():
            size, start = self.replicas.size(axes), 0
            tiles = [jnp.moveaxis(out[i], d, 0) for i, d in members]
            rows = lax.all_gather(
                _concatenate([x.reshape(-1) for x in tiles]), axes, to="invarying"
            )
            for (i, d), x in zip(members, tiles, strict=True):
                part = rows[:, start : start + x.size]
                whole = part.reshape(size * x.shape[0], *x.shape[1:])
                out[i], start = jnp.moveaxis(whole, 0, d), start + x.size
        return out

    @jax.named_scope("all_reduce")
    def all_reduce(
        self, xs: Sequence[jax.Array], reduction: Reduction, axes: tuple[str, ...]
    ) -> list[jax.Array]:
        """Combines each `x` over `axes`, small ones together."""
        reduce = _ALL_REDUCE[reduction]
        out: list[Any] = [None] * len(xs)
        for group in _alike(xs):
            elems = [xs[i].size for i in group]
            pieces: dict[int, list[jax.Array]] = {}
            for bucket in self.buckets.fill(elems, xs[group[0]].dtype.itemsize):
                if len(bucket) == 1 and bucket[0].stop - bucket[0].start == elems[bucket[0].array]:
                    i = group[bucket[0].array]
                    out[i] = reduce(xs[i], axes)
                    continue
                flat = [xs[group[p.array]].reshape(-1)[p.start : p.stop] for p in bucket]
                done = reduce(_concatenate(flat), axes)
                _deal(bucket, done, pieces)
            for k, parts in pieces.items():
                out[group[k]] = _concatenate(parts).reshape(xs[group[k]].shape)
            for k in group:
                if out[k] is None:  # no elements, but JAX's types want it reduced
                    out[k] = reduce(xs[k], axes)
        return out

    @jax.named_scope("exchange")
    def exchange(self, x: jax.Array) -> jax.Array:
        """All-to-all of `x: [num_shards, ...]`: row `r` goes to the device with shard `r`."""
        numbers = self.replicas.shard_numbers
        if not numbers:
            return lax.all_to_all(x, self.axes, 0, 0, tiled=True)
        places = jnp.asarray(np.argsort(numbers))
        return lax.all_to_all(x[jnp.asarray(numbers)], self.axes, 0, 0, tiled=True)[places]

    # ----------------------------------------------------------------------------------- internals

    def _padded(self, x: jax.Array, fmt: Format, phases: Sequence[Phase]) -> jax.Array:
        """The padded array; of its shards only those among which `phases` divide it further."""
        x = _plain(fmt).pack(x)
        if len(phases) == len(self.replicas.phases):
            return x
        sizes = [phase.size for phase in self.replicas.phases]
        before, after = x.shape[: fmt.lo], x.shape[fmt.lo + 1 :]
        x = x.reshape(*before, *sizes, fmt.chunk_elems, *after)
        for d, phase in enumerate(self.replicas.phases):
            if phase not in phases:
                x = lax.dynamic_slice_in_dim(x, _position(phase), 1, fmt.lo + d)
        shards = math.prod(phase.size for phase in phases)
        return x.reshape(*before, shards * fmt.chunk_elems, *after)

    def _scatter(self, x: jax.Array, dim: int, hops: Hops) -> jax.Array:
        for phase, dtype in hops:
            x = _psum_scatter(x.astype(dtype), phase, dim)
        return x

    def _scatter_tiles(
        self, x: jax.Array, hops: Hops, arrived: Callable[[jax.Array], jax.Array] = lambda x: x
    ) -> jax.Array:
        """Scatters `x: [num_shards, *shard]` in the one shape that TPU compilers scatter as it is.

        The scattered dim leads and is as long as the group, and each piece holds an even number of
        8 x 128 tiles (see `tile_padding`). After the first phase there is little left to pad.
        """
        shards, first, *rest = x.shape
        for phase, dtype in hops:
            shards //= phase.size
            x = x.astype(dtype)
            pieces, pad = _in_tiles(x.reshape(phase.size, shards * first, *rest))
            done = _psum_scatter(pieces, phase, 0)
            done = arrived(done) if shards == 1 else done
            x = done.reshape(-1)[: done.size - pad] if pad else done
        return x.reshape(first, *rest)

    def _gather(self, x: jax.Array, dim: int) -> jax.Array:
        for phase in reversed(self.replicas.phases):
            x = _all_gather(x, phase, dim)
        return as_invarying(x, self.axes)

    def _gather_tiles(self, x: jax.Array, lo: int) -> jax.Array:
        """The elements of all shards, in their order, from one shard in its `local_shape`.

        Shards that are no whole tiles are laid side by side after each phase, not at the end, where
        there is more to move.
        """
        lead = 0 if math.prod(x.shape[:lo]) > 1 else lo
        x = _lanes(x.reshape(x.shape[lead:]))
        first, *rest = reversed(self.replicas.phases)
        if x.ndim > 1 and x.shape[0] % SUBLANES == 0:
            # In one shape new weights and new state come out of one kernel.
            x = _all_gather(x, first, 0)
        else:
            rest = [first, *rest]
        for phase in rest:
            x = _lanes(x)
            x = _all_gather(x[None], phase, 0).reshape(-1, *x.shape[1:])
        return as_invarying(x, self.axes)

    def _bucketed(
        self,
        xs: Sequence[jax.Array],
        formats: Sequence[Format],
        alone: Callable[[int], jax.Array],
        packed: Callable[[Sequence[jax.Array], Format], jax.Array],
        collective: Callable[[jax.Array], jax.Array],
        opened: Callable[[jax.Array, Format, int], Sequence[jax.Array]],
    ) -> list[jax.Array]:
        """Large leaves go through `alone`; the rest as columns of `[num_shards or 1, elems]`.

        `packed` makes columns of arrays of one format, and `opened` makes so many arrays of them.
        """
        out: list[Any] = [None] * len(xs)
        for group in _alike(xs):
            for i in group:
                if formats[i].shard_elems == 0:
                    nothing = jnp.zeros((self.replicas.num_shards, 0), xs[i].dtype)
                    (out[i],) = opened(nothing, formats[i], 1)
            row_bytes = self.replicas.num_shards * xs[group[0]].dtype.itemsize
            rest = [i for i in group if formats[i].shard_elems]
            columns: dict[int, jax.Array] = {}
            pieces: dict[int, list[jax.Array]] = {}
            for bucket in self.buckets.fill([formats[i].shard_elems for i in rest], row_bytes):
                runs = self._runs(bucket, [formats[i] for i in rest])
                if len(bucket) == 1 and runs[0].whole:
                    (i,) = (rest[k] for k in runs[0].arrays)
                    out[i] = alone(i)
                    continue
                beside = []
                for run in runs:
                    members = [rest[k] for k in run.arrays]
                    i = members[0]
                    if run.whole:
                        beside.append(packed([xs[i] for i in members], formats[i]))
                        continue
                    if i not in columns:
                        columns[i] = packed([xs[i]], formats[i])
                    beside.append(columns[i][:, run.start : run.stop])
                done = collective(_concatenate(beside, 1))
                at = 0
                for run, part in zip(runs, beside, strict=True):
                    members = [rest[k] for k in run.arrays]
                    n = part.shape[1]
                    part = lax.slice_in_dim(done, at, at + n, axis=done.ndim - 1)
                    at += n
                    if not run.whole:
                        pieces.setdefault(members[0], []).append(part)
                        continue
                    found = opened(part, formats[members[0]], len(members))
                    for i, x in zip(members, found, strict=True):
                        out[i] = x
            for i, parts in pieces.items():
                (out[i],) = opened(_concatenate(parts, parts[0].ndim - 1), formats[i], 1)
        return out

    def _runs(self, bucket: Bucket, formats: Sequence[Format]) -> list[_Run]:
        """What a bucket holds. On TPU whole arrays of one format, which are one operation there."""
        runs: dict[Any, _Run] = {}
        for p in bucket:
            fmt = formats[p.array]
            whole = p.stop - p.start == fmt.shard_elems
            key = fmt if whole and self.buckets.whole_tiles else p
            before = runs[key].arrays if key in runs else ()
            runs[key] = _Run((*before, p.array), p.start, p.stop, whole)
        return list(runs.values())


class _Run(NamedTuple):
    """Arrays that lie in a bucket one after the other: whole ones of one format, or a part of one.

    Args:
      arrays: their numbers.
      start: in each of them, the first element of a shard.
      stop: one past the last.
      whole: whether those are all.
    """

    arrays: tuple[int, ...]
    start: int
    stop: int
    whole: bool


def _position(phase: Phase) -> jax.Array:
    """Which part this device gets of what a phase divides."""
    index = lax.axis_index(phase.axis)
    if phase.groups is None:
        return index
    return jnp.asarray(shard_numbers((phase.groups,)), jnp.int32)[index]


def _psum_scatter(x: jax.Array, phase: Phase, dim: int) -> jax.Array:
    axis, size, groups = phase
    if reduce_scatter_is_unsound():
        x = lax.all_to_all(x, axis, dim, dim, axis_index_groups=groups, tiled=True)
        rows = x.shape[dim] // size
        return jnp.sum(x.reshape(*x.shape[:dim], size, rows, *x.shape[dim + 1 :]), dim)
    return lax.psum_scatter(x, axis, scatter_dimension=dim, axis_index_groups=groups, tiled=True)


def _all_gather(x: jax.Array, phase: Phase, dim: int) -> jax.Array:
    axis, _, groups = phase
    if groups is None:
        return lax.all_gather(x, axis, axis=dim, tiled=True, to="invarying")
    # JAX's types cannot tell of groups that they together cover the axis.
    return lax.all_gather(x, axis, axis=dim, axis_index_groups=groups, tiled=True)


def _prod(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return jnp.prod(lax.all_gather(x, axes, to="invarying"), axis=0)


def _xor(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    parts = lax.all_gather(x, axes, to="invarying")
    return lax.reduce(parts, jnp.zeros((), x.dtype), lax.bitwise_xor, (0,))


def _and(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    if x.dtype != jnp.bool_:
        parts = lax.all_gather(x, axes, to="invarying")
        return lax.reduce(parts, jnp.full((), -1, x.dtype), lax.bitwise_and, (0,))
    return lax.pmin(x.astype(jnp.int32), axes).astype(jnp.bool_)


def _or(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    if x.dtype != jnp.bool_:
        parts = lax.all_gather(x, axes, to="invarying")
        return lax.reduce(parts, jnp.zeros((), x.dtype), lax.bitwise_or, (0,))
    return lax.pmax(x.astype(jnp.int32), axes).astype(jnp.bool_)


_ALL_REDUCE: dict[Reduction, Callable[[jax.Array, tuple[str, ...]], jax.Array]] = {
    "sum": lax.psum,
    "max": lax.pmax,
    "min": lax.pmin,
    "prod": _prod,
    "and": _and,
    "or": _or,
    "xor": _xor,
}


def _lanes(x: jax.Array) -> jax.Array:
    """A vector as rows of 128 where it fills them; others as they are."""
    return x.reshape(-1, LANES) if x.ndim == 1 and x.size % LANES == 0 else x


def _in_tiles(x: jax.Array) -> tuple[jax.Array, int]:
    """`x: [size, rows, ...]` with pieces shaped and padded to TPU tiles; the padding of each.

    Pieces that rows of 128 fill, but not whole tiles, follow each other without a dim of their own:
    with one, each of them would have to be moved to where a tile begins.
    """
    size, _, *minor = x.shape
    elems = x.size // size
    pad = tile_padding(elems, tuple(minor), size)
    if minor and not pad:
        return x, 0
    if elems % LANES:
        x = jnp.pad(x.reshape(size, -1), ((0, 0), (0, pad))) if pad else x
        return (x.reshape(size, -1, LANES) if pad else x), pad
    if not pad and elems % (SUBLANES * LANES):
        return x.reshape(-1, LANES), 0
    x = x.reshape(size, -1, LANES)
    return (jnp.pad(x, ((0, 0), (0, pad // LANES), (0, 0))) if pad else x), pad


def _plain(fmt: Format) -> Format:
    """The same format stored in its computing shape."""
    return dataclasses.replace(fmt, lanes=None)


def by_shard(padded: jax.Array, fmt: Format) -> jax.Array:
    """`[shards, *local_shape]` from the padded array, or from some shards of it."""
    lo = fmt.lo
    shards = padded.shape[lo] // fmt.chunk_elems
    split = padded.reshape(*padded.shape[:lo], shards, fmt.chunk_elems, *padded.shape[lo + 1 :])
    if math.prod(padded.shape[:lo]) == 1:  # dims of length 1 would bind the array's layout
        return split.reshape(shards, fmt.chunk_elems, *padded.shape[lo + 1 :])
    return jnp.moveaxis(split, lo, 0)


def from_shards(rows: jax.Array, fmt: Format) -> jax.Array:
    """The padded array from the elements of all shards, in their order."""
    split = rows.reshape(fmt.num_shards, *fmt.local_shape)
    return jnp.moveaxis(split, 0, fmt.lo).reshape(_plain(fmt).padded_shape)


def _alike(xs: Sequence[jax.Array]) -> list[list[int]]:
    """Numbers of the arrays that may share a buffer: of one dtype, varying over the same axes."""
    groups: dict[Any, list[int]] = {}
    for i, x in enumerate(xs):
        groups.setdefault((x.dtype, varying_axes(x)), []).append(i)
    return list(groups.values())


def _deal(bucket: Bucket, done: jax.Array, pieces: dict[int, list[jax.Array]]) -> None:
    """Cuts a finished buffer into the pieces that its bucket lists."""
    at = 0
    for p in bucket:
        n = p.stop - p.start
        pieces.setdefault(p.array, []).append(
            lax.slice_in_dim(done, at, at + n, axis=done.ndim - 1)
        )
        at += n


def _concatenate(xs: Sequence[jax.Array], axis: int = 0) -> jax.Array:
    return xs[0] if len(xs) == 1 else jnp.concatenate(xs, axis)
