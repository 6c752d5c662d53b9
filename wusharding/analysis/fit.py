"""Fits placements to the factors of one operation: which results follow from which operands.

A split is carried from one value to another as the sequence of factors that it covers, major to
minor, and its chunk. Factors of size 1 are left out, for they never change where an element lies:
`[5, 1, 7]` may be split as `[35]` is. Blocked ones stay, since an operation along the middle dim
could not be told then which dim it runs along.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from wusharding.analysis.placement import Placement, Replicas, Span, Tiles
from wusharding.analysis.rules.base import DimFactors, Factors, Reduction


class Split(NamedTuple):
    """The factors that a span covers, major to minor, and its chunk of their product.

    `tiled`: they are merged in the order of 8 x 128 tiles, which only a value has that has the same
    dims: each of them one factor.
    """

    factors: tuple[int, ...]
    chunk: int
    tiled: bool = False


class Absent:
    """A value that carries none of a split's factors: every shard needs all of it."""


ABSENT = Absent()


class Fit(NamedTuple):
    """How one operation runs on pieces.

    `partial` is the reduction that its results still need, over the axes `partial_axes`; `masked`
    tells that padding of the split operands must be neutral for it.
    """

    ins: tuple[Placement, ...]
    outs: tuple[Placement, ...]
    partial: Reduction | None
    partial_axes: tuple[str, ...]
    masked: bool


def split_of(labels: DimFactors, span: Span, factors: Factors) -> Split:
    """The split that `span` makes of a value labelled `labels`."""
    covered = tuple(f for label in labels[span.lo : span.hi] for f in label)
    return Split(_telling(covered, factors), span.chunk, span.tiled)


def _telling(label: tuple[int, ...], factors: Factors) -> tuple[int, ...]:
    """The factors that a split does not pass over."""
    return tuple(f for f in label if factors.sizes[f] != 1 or f in factors.blocked)


def span_for(
    labels: DimFactors, split: Split, factors: Factors, local: Mapping[int, int]
) -> Span | Absent | None:
    """The span of a value labelled `labels` under `split`; None where no span can say it."""
    wanted = split.factors
    if not wanted:
        return None
    plain = [_telling(label, factors) for label in labels]
    present = {f for label in plain for f in label}
    if present.isdisjoint(wanted):
        return ABSENT
    for d, label in enumerate(plain):
        if label[: len(wanted)] == wanted and len(label) > len(wanted):
            if split.tiled:
                return None
            rest = math.prod(local[f] for f in label[len(wanted) :])
            return Span(d, d + 1, split.chunk * rest)
        if not label or label[0] != wanted[0]:
            continue
        run, hi = label, d + 1
        while len(run) < len(wanted) and hi < len(plain):
            run += plain[hi]
            hi += 1
        if run != wanted or (split.tiled and not _keeps_tiles(plain[d:], wanted)):
            return None
        return Span(d, hi, split.chunk, split.tiled)
    return None


def _keeps_tiles(labels: Sequence[tuple[int, ...]], wanted: tuple[int, ...]) -> bool:
    """Whether the two minor of the split factors are the two minor dims."""
    return len(labels) > 1 and tuple(labels[-2:]) == (wanted[-2:-1], wanted[-1:])


def tiles_of(
    factors: Factors, placements: Iterable[Placement], replicas: Replicas
) -> dict[int, tuple[str, ...]]:
    """The mesh axes that tile each factor: the first operand to tile it has its way."""
    return _tiles(factors, zip(factors.ins, placements, strict=False), replicas)


def tiles_of_result(
    factors: Factors, tiles: Tiles, replicas: Replicas
) -> dict[int, tuple[str, ...]]:
    """The mesh axes that tile each factor if the first result comes in `tiles`."""
    return _tiles(factors, [(factors.outs[0], Placement(tiles))], replicas)


def _tiles(
    factors: Factors, labelled: Iterable[tuple[DimFactors, Placement]], replicas: Replicas
) -> dict[int, tuple[str, ...]]:
    """Tiles that can hold: even ones, of factors that are major everywhere and not blocked."""
    tiles: dict[int, tuple[str, ...]] = {}
    used: set[str] = set()
    for labels, placement in labelled:
        for label, axes in zip(labels, placement.tiles, strict=False):
            if not axes or not label:
                continue
            major = label[0]
            if major in tiles or major in factors.blocked or used.intersection(axes):
                continue
            if factors.sizes[major] % replicas.size(axes) == 0:
                tiles[major] = axes
                used.update(axes)
    minor = {f for labels in (*factors.ins, *factors.outs) for label in labels for f in label[1:]}
    return {f: axes for f, axes in tiles.items() if f not in minor}


def try_fit(
    factors: Factors,
    tiles: Mapping[int, tuple[str, ...]],
    split: Split | None,
    replicas: Replicas,
) -> Fit | None:
    """Placements of operands and results under `tiles` and `split`; None where they cannot hold."""
    if not factors.blocked.isdisjoint(tiles):
        return None
    reductions: set[Reduction] = {factors.reduced[f] for f in tiles if f in factors.reduced}
    axes = tuple(a for f, t in tiles.items() if f in factors.reduced for a in t)
    masked = False
    if split is not None:
        kept = [f for f in split.factors if f not in factors.reduced]
        if not factors.blocked.isdisjoint(split.factors) or (
            kept and len(kept) != len(split.factors)
        ):
            return None
        if not kept:
            reductions |= {factors.reduced[f] for f in split.factors}
            axes += replicas.shard_axes
            masked = True
    if len(reductions) > 1:
        return None
    local = {f: n // replicas.size(tiles.get(f, ())) for f, n in factors.sizes.items()}
    ins = [_place(labels, tiles, split, factors, local) for labels in factors.ins]
    outs = [_place(labels, tiles, split, factors, local) for labels in factors.outs]
    if any(p is None for p in ins) or any(p is None for p in outs):
        return None
    if split is not None and not masked and any(p.span is None for p in outs if p is not None):
        return None  # a split factor vanishes without being reduced
    return Fit(
        tuple(p for p in ins if p is not None),
        tuple(p for p in outs if p is not None),
        next(iter(reductions), None),
        axes,
        masked,
    )


def _place(
    labels: DimFactors,
    tiles: Mapping[int, tuple[str, ...]],
    split: Split | None,
    factors: Factors,
    local: Mapping[int, int],
) -> Placement | None:
    tiled = tuple(tiles.get(label[0], ()) if label else () for label in labels)
    if split is None:
        return Placement(tiled)
    span = span_for(labels, split, factors, local)
    if span is None:
        return None
    return Placement(tiled, span if isinstance(span, Span) else None)
