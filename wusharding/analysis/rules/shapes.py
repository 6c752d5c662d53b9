"""Primitives that move dims: broadcast, reshape, transpose, slice, pad, concatenate, stack."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

from wusharding.analysis.rules.base import (
    DimFactors,
    Factors,
    LocalView,
    OpRule,
    register,
    same_dims,
    sizes_of,
)
from wusharding.jaxprs import Aval, Op


def _linear(op: Op, partial: tuple[int, ...]) -> bool:
    return partial == (0,)


def _all_linear(op: Op, partial: tuple[int, ...]) -> bool:
    return len(partial) == len(op.ins)


# ------------------------------------------------------------------------------ broadcast, reshape


def _broadcast_factors(op: Op, ins: list[Aval], outs: list[Aval]) -> Factors:
    shape = outs[0].shape
    sizes = sizes_of(outs[0])
    labels = []
    for d, out_d in enumerate(op.params["broadcast_dimensions"]):
        if ins[0].shape[d] == shape[out_d]:
            labels.append((out_d,))
        else:  # a dim of 1 that is stretched: a factor of its own, of size 1
            fresh = len(shape) + d
            sizes[fresh] = 1
            labels.append((fresh,))
    dynamic = tuple(() for _ in ins[1:])
    return Factors((tuple(labels), *dynamic), (same_dims(len(shape)),), sizes)


def _kept_dims(op: Op, view: LocalView) -> dict[int, int]:
    """Local dims of the operand that are not stretched, and the result's that they become."""
    mapping: dict[int, int] = {}
    for d, out_d in enumerate(op.params["broadcast_dimensions"]):
        local, out_local = view.in_dims[0][d], view.out_dims[0][out_d]
        if view.in_shapes[0][local] != 1 or view.out_shapes[0][out_local] == 1:
            mapping.setdefault(local, out_local)
    return mapping if len(set(mapping.values())) == len(mapping) else _unique(mapping, view)


def _unique(mapping: dict[int, int], view: LocalView) -> dict[int, int]:
    """Of dims of length 1 that fall together in a merged dim, only one is kept."""
    kept: dict[int, int] = {}
    for local in sorted(mapping, key=lambda d: -view.in_shapes[0][d]):
        if mapping[local] not in kept.values():
            kept[local] = mapping[local]
    return kept


def _broadcast_localize(op: Op, view: LocalView) -> dict[str, Any]:
    mapping = _kept_dims(op, view)
    dimensions = tuple(mapping[d] for d in sorted(mapping))
    return op.params | {"shape": view.out_shapes[0], "broadcast_dimensions": dimensions}


def _broadcast_reshape(op: Op, view: LocalView) -> tuple[tuple[int, ...] | None, ...]:
    kept = tuple(view.in_shapes[0][d] for d in sorted(_kept_dims(op, view)))
    return (kept, *(None for _ in view.in_shapes[1:]))


def _reshape_factors(op: Op, ins: list[Aval], outs: list[Aval]) -> Factors:
    if op.params.get("dimensions") is not None:
        a = same_dims(len(ins[0].shape))
        b = tuple((len(a) + d,) for d in range(len(outs[0].shape)))
        sizes = dict(enumerate(ins[0].shape + outs[0].shape))
        return Factors((a,), (b,), sizes, {}, frozenset(sizes))
    return _regroup(ins[0].shape, outs[0].shape)


def _regroup(a: tuple[int, ...], b: tuple[int, ...]) -> Factors:
    """Factors common to two shapes of the same size, such as 5, 3, 4 of `[5, 12]` and `[15, 4]`.

    Dims are cut where dims of the other shape end; where that would cut one unevenly, as `[2, 6]`
    and `[3, 4]` do, the dims from there to the next common end are blocked.
    """
    sizes: dict[int, int] = {}
    labels: tuple[list[tuple[int, ...]], ...] = ([], [])
    blocked: set[int] = set()

    def fresh(size: int) -> int:
        sizes[len(sizes)] = size
        return len(sizes) - 1

    def block(side: list[tuple[int, ...]], shape: tuple[int, ...]) -> None:
        own = [fresh(n) for n in shape]
        side.extend((f,) for f in own)
        blocked.update(own)

    if math.prod(a) == 0:
        block(labels[0], a)
        block(labels[1], b)
        return Factors((tuple(labels[0]),), (tuple(labels[1]),), sizes, {}, frozenset(blocked))
    i = j = 0
    while i < len(a) or j < len(b):
        i2, j2 = _group(a, b, i, j)
        parts = (a[i:i2], b[j:j2])
        i, j = i2, j2
        cuts = sorted({1, *_strides(parts[0]), *_strides(parts[1])}, reverse=True)
        if any(m % n for m, n in itertools.pairwise(cuts)):
            for side, part in zip(labels, parts, strict=True):
                block(side, part)
            continue
        between = {(m, n): fresh(m // n) for m, n in itertools.pairwise(cuts)}
        for side, part in zip(labels, parts, strict=True):
            for outer, n in zip(_strides(part), part, strict=True):
                inner = outer // n
                side.append(tuple(f for (m, k), f in between.items() if outer >= m and k >= inner))
    return Factors((tuple(labels[0]),), (tuple(labels[1]),), sizes, {}, frozenset(blocked))


def _strides(part: tuple[int, ...]) -> list[int]:
    """Of each dim, the elements that it spans, those within it included."""
    return [math.prod(part[d:]) for d in range(len(part))]


def _group(a: tuple[int, ...], b: tuple[int, ...], i: int, j: int) -> tuple[int, int]:
    """Ends of the shortest runs from `i` and `j` with equal products."""
    if i == len(a) or j == len(b):
        return len(a), len(b)
    i2, j2, pa, pb = i + 1, j + 1, a[i], b[j]
    while pa != pb:
        if pa < pb:
            pa *= a[i2]
            i2 += 1
        else:
            pb *= b[j2]
            j2 += 1
    return i2, j2


def _reshape_localize(op: Op, view: LocalView) -> dict[str, Any]:
    return op.params | {"new_sizes": view.out_shapes[0], "dimensions": None}


def _squeeze_factors(op: Op, ins: list[Aval], outs: list[Aval]) -> Factors:
    gone = {d % len(ins[0].shape) for d in op.params["dimensions"]}
    kept = tuple((d,) for d in range(len(ins[0].shape)) if d not in gone)
    return Factors((same_dims(len(ins[0].shape)),), (kept,), sizes_of(ins[0]))


def _squeeze_localize(op: Op, view: LocalView) -> dict[str, Any]:
    gone = {d % len(view.in_dims[0]) for d in op.params["dimensions"]}
    kept = {view.in_dims[0][d] for d in range(len(view.in_dims[0])) if d not in gone}
    dimensions = tuple(d for d in range(len(view.in_shapes[0])) if d not in kept)
    return op.params | {"dimensions": dimensions}


def _transpose_factors(op: Op, ins: list[Aval], outs: list[Aval]) -> Factors:
    out = tuple((d,) for d in op.params["permutation"])
    return Factors((same_dims(len(out)),), (out,), sizes_of(ins[0]))


def _transpose_order(op: Op, view: LocalView) -> list[int]:
    """For each local dim of the result, the first dim of the operand that it holds.

    The first of merged dims is longer than 1; others may be 1 and merged on one side only, and lie
    anywhere.
    """
    first: dict[int, int] = {}
    for source, at in zip(op.params["permutation"], view.out_dims[0], strict=True):
        first.setdefault(at, source)
    return [first[at] for at in range(len(view.out_shapes[0]))]


def _transpose_localize(op: Op, view: LocalView) -> dict[str, Any]:
    order = _transpose_order(op, view)
    rank = {d: at for at, d in enumerate(sorted(order))}
    return op.params | {"permutation": tuple(rank[d] for d in order)}


def _transpose_reshape(op: Op, view: LocalView) -> tuple[tuple[int, ...] | None, ...]:
    order = _transpose_order(op, view)
    sizes = dict(zip(order, view.out_shapes[0], strict=True))
    return (tuple(sizes[d] for d in sorted(order)),)


# -------------------------------------------------------------------------- dims kept whole or not


def _kept(
    touched: Callable[[Op, tuple[int, ...]], set[int]], arrays: int = 1, *, shifts: bool = False
) -> Callable[..., Factors]:
    """Factors where the first `arrays` operands share dims; `touched` dims are blocked.

    `shifts`: along touched dims elements keep their order, and move by a few places if most stay.
    """

    def factors(op: Op, ins: list[Aval], outs: list[Aval]) -> Factors:
        blocked = touched(op, ins[0].shape)
        sizes = sizes_of(ins[0])
        ndim = len(ins[0].shape)
        labels: dict[tuple[int, ...], DimFactors] = {}

        def label(aval: Aval) -> DimFactors:
            if aval.shape not in labels:
                out: list[tuple[int, ...]] = []
                for d in range(ndim):
                    if d in blocked:  # its length may differ, so each array has its own factor
                        fresh = len(sizes)
                        sizes[fresh] = aval.shape[d]
                        out.append((fresh,))
                    else:
                        out.append((d,))
                labels[aval.shape] = tuple(out)
            return labels[aval.shape]

        first = tuple(label(a) for a in ins[:arrays])
        rest = tuple(same_free(a, sizes) for a in ins[arrays:])
        result = tuple(label(a) for a in outs)
        free = frozenset(f for f in sizes if f >= ndim)
        pairs = zip(first[0], result[0], strict=True) if shifts else ()
        windows = tuple(
            (i, j) for (i,), (j,) in pairs if i in free and _most_stay(sizes[i], sizes[j])
        )
        return Factors(first + rest, result, sizes, {}, free, windows)

    return factors


def _most_stay(before: int, after: int) -> bool:
    return max(before, after) <= 1.5 * min(before, after)


def same_free(aval: Aval, sizes: dict[int, int]) -> DimFactors:
    """Fresh factors for an operand, such as indices, that shares no dim with the others."""
    start = len(sizes)
    sizes.update({start + d: n for d, n in enumerate(aval.shape)})
    return tuple((start + d,) for d in range(len(aval.shape)))


def _sliced(op: Op, shape: tuple[int, ...]) -> set[int]:
    strides = op.params["strides"] or (1,) * len(shape)
    bounds = zip(op.params["start_indices"], op.params["limit_indices"], strides, strict=True)
    return {d for d, (a, b, s) in enumerate(bounds) if (a, b, s) != (0, shape[d], 1)}


def _slice_localize(op: Op, view: LocalView) -> dict[str, Any]:
    starts, limits = [0] * len(view.in_shapes[0]), list(view.in_shapes[0])
    strides = [1] * len(view.in_shapes[0])
    shape_known = view.in_dims[0]
    for d, local in enumerate(shape_known):
        if shape_known.count(local) == 1 and view.out_shapes[0][local] != view.in_shapes[0][local]:
            starts[local] = op.params["start_indices"][d]
            limits[local] = op.params["limit_indices"][d]
            strides[local] = (op.params["strides"] or (1,) * len(shape_known))[d]
    return op.params | {
        "start_indices": tuple(starts),
        "limit_indices": tuple(limits),
        "strides": tuple(strides) if op.params["strides"] else None,
    }


def _padded(op: Op, shape: tuple[int, ...]) -> set[int]:
    return {d for d, c in enumerate(op.params["padding_config"]) if tuple(c) != (0, 0, 0)}


def _pad_localize(op: Op, view: LocalView) -> dict[str, Any]:
    config = [(0, 0, 0)] * len(view.in_shapes[0])
    for d, c in enumerate(op.params["padding_config"]):
        if tuple(c) != (0, 0, 0):
            config[view.in_dims[0][d]] = tuple(c)
    return op.params | {"padding_config": tuple(config)}


def _one_dim(param: str) -> Callable[[Op, tuple[int, ...]], set[int]]:
    return lambda op, shape: {op.params[param]}


def _one_dim_localize(param: str) -> Callable[[Op, LocalView], dict[str, Any]]:
    return lambda op, view: op.params | {param: view.in_dims[0][op.params[param]]}


def _concatenate_factors(op: Op, ins: list[Aval], outs: list[Aval]) -> Factors:
    return _kept(_one_dim("dimension"), len(ins))(op, ins, outs)


def _reversed(op: Op, shape: tuple[int, ...]) -> set[int]:
    return {d for d in op.params["dimensions"] if shape[d] > 1}


def _rev_localize(op: Op, view: LocalView) -> dict[str, Any]:
    dims = view.in_dims[0]  # a merged dim holds reversed dims only where they have length 1
    alone = sorted({dims[d] for d in op.params["dimensions"] if dims.count(dims[d]) == 1})
    return op.params | {"dimensions": tuple(alone)}


def _iota_factors(op: Op, ins: list[Aval], outs: list[Aval]) -> Factors:
    blocked = frozenset({op.params["dimension"]})
    label = same_dims(len(outs[0].shape))
    return Factors(tuple(() for _ in ins), (label,), sizes_of(outs[0]), {}, blocked)


def _iota_localize(op: Op, view: LocalView) -> dict[str, Any]:
    dimension = view.out_dims[0][op.params["dimension"]]
    return op.params | {"shape": view.out_shapes[0], "dimension": dimension}


def _tiled(op: Op, shape: tuple[int, ...]) -> set[int]:
    return {d for d, n in enumerate(op.params["reps"]) if n != 1}


def _tile_localize(op: Op, view: LocalView) -> dict[str, Any]:
    reps = [1] * len(view.in_shapes[0])
    for n, at in zip(op.params["reps"], view.in_dims[0], strict=True):
        reps[at] *= n
    return op.params | {"reps": tuple(reps)}


def _stack_factors(op: Op, ins: list[Aval], outs: list[Aval]) -> Factors:
    ndim, at = len(ins[0].shape), op.params["axis"]
    one = same_dims(ndim)
    sizes = sizes_of(ins[0]) | {ndim: len(ins)}
    whole = (*one[:at], (ndim,), *one[at:])
    return Factors((one,) * len(ins), (whole,), sizes, {}, frozenset({ndim}))


def _stack_localize(op: Op, view: LocalView) -> dict[str, Any]:
    return op.params | {"axis": view.out_dims[0][op.params["axis"]]}


def _unstack_factors(op: Op, ins: list[Aval], outs: list[Aval]) -> Factors:
    at = op.params["axis"]
    whole = same_dims(len(ins[0].shape))
    one = whole[:at] + whole[at + 1 :]
    return Factors((whole,), (one,) * len(outs), sizes_of(ins[0]), {}, frozenset({at}))


def _bitcast_factors(op: Op, ins: list[Aval], outs: list[Aval]) -> Factors:
    """Elements of another size make a last dim, or take one, that holds the parts of each."""
    longer = max(ins[0], outs[0], key=lambda aval: len(aval.shape))
    whole = same_dims(len(longer.shape))
    one, two = (whole[: len(aval.shape)] for aval in (ins[0], outs[0]))
    blocked = frozenset(f for label in whole[min(len(one), len(two)) :] for f in label)
    return Factors((one,), (two,), sizes_of(longer), {}, blocked)


register(
    "broadcast_in_dim",
    OpRule(
        "shapes",
        _broadcast_factors,
        _broadcast_localize,
        reshape=_broadcast_reshape,
        linear=_linear,
    ),
)
register("reshape", OpRule("shapes", _reshape_factors, _reshape_localize, linear=_linear))
register("squeeze", OpRule("shapes", _squeeze_factors, _squeeze_localize, linear=_linear))
register(
    "transpose",
    OpRule("shapes", _transpose_factors, _transpose_localize, _transpose_reshape, linear=_linear),
)
register("slice", OpRule("shapes", _kept(_sliced, shifts=True), _slice_localize, linear=_linear))
register("pad", OpRule("shapes", _kept(_padded, shifts=True), _pad_localize))
register(
    "concatenate",
    OpRule("shapes", _concatenate_factors, _one_dim_localize("dimension"), linear=_all_linear),
)
register(
    "split", OpRule("shapes", _kept(_one_dim("axis")), _one_dim_localize("axis"), linear=_linear)
)
register("stack", OpRule("shapes", _stack_factors, _stack_localize, linear=_all_linear))
register("unstack", OpRule("shapes", _unstack_factors, _one_dim_localize("axis"), linear=_linear))
register("tile", OpRule("shapes", _kept(_tiled), _tile_localize, linear=_linear))
register("rev", OpRule("shapes", _kept(_reversed), _rev_localize, linear=_linear))
register("iota", OpRule("shapes", _iota_factors, _iota_localize))
register("bitcast_convert_type", OpRule("shapes", _bitcast_factors))
