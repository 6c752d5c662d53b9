"""Dynamic slices, gather and scatter: dims that are taken whole pass through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from wusharding.analysis.rules.base import (
    Factors,
    LocalView,
    OpRule,
    register,
    same_dims,
    sizes_of,
)
from wusharding.analysis.rules.shapes import same_free
from wusharding.jaxprs import Aval, Op


def _match(full: Aval, part: Aval, sizes: dict[int, int], blocked: set[int]) -> tuple[Any, Any]:
    """Labels for an operand and for a slice of it; dims of different length are blocked."""
    labels_full, labels_part = [], []
    for d, (n, m) in enumerate(zip(full.shape, part.shape, strict=True)):
        labels_full.append((d,))
        if n == m:
            labels_part.append((d,))
            continue
        fresh = len(sizes)
        sizes[fresh] = m
        labels_part.append((fresh,))
        blocked |= {d, fresh}
    return tuple(labels_full), tuple(labels_part)


def _dynamic_slice_factors(op: Op, ins: list[Aval], outs: list[Aval]) -> Factors:
    sizes, blocked = sizes_of(ins[0]), set[int]()
    full, part = _match(ins[0], outs[0], sizes, blocked)
    return Factors((full, *((),) * (len(ins) - 1)), (part,), sizes, {}, frozenset(blocked))


def _dynamic_slice_localize(op: Op, view: LocalView) -> dict[str, Any]:
    return op.params | {"slice_sizes": view.out_shapes[0]}


def _dynamic_update_slice_factors(op: Op, ins: list[Aval], outs: list[Aval]) -> Factors:
    sizes, blocked = sizes_of(ins[0]), set[int]()
    full, part = _match(ins[0], ins[1], sizes, blocked)
    return Factors((full, part, *((),) * (len(ins) - 2)), (full,), sizes, {}, frozenset(blocked))


def _gather_factors(op: Op, ins: list[Aval], outs: list[Aval]) -> Factors:
    """Window dims that are taken whole pass, and so do batch dims: those of the indices.

    Dims of length 1 pass only with others of their kind, since they may be merged with others.
    """
    numbers, slices = op.params["dimension_numbers"], op.params["slice_sizes"]
    sizes = sizes_of(ins[0])
    blocked = set(sizes)
    whole = same_dims(len(ins[0].shape))
    indices = list(same_free(ins[1], sizes))
    blocked.update(indices[-1])
    batching = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    for d, e in batching:
        indices[e] = whole[d]
    windows = len(numbers.offset_dims)
    batch = list(indices[:-1])
    for label in batch:
        longer = sizes[label[0]] > 1
        (blocked.difference_update if longer or not windows else blocked.update)(label)
    gone = set(numbers.collapsed_slice_dims) | set(numbers.operand_batching_dims)
    window = [d for d in range(len(ins[0].shape)) if d not in gone]
    out: list[tuple[int, ...]] = []
    for d in range(len(outs[0].shape)):
        if d not in numbers.offset_dims:
            out.append(batch.pop(0))
            continue
        source = window.pop(0)
        taken_whole = slices[source] == ins[0].shape[source]
        if taken_whole and source not in numbers.start_index_map and slices[source] > 1:
            blocked.discard(source)
            out.append((source,))
        else:
            fresh = len(sizes)
            sizes[fresh] = slices[source]
            blocked.add(fresh)
            out.append((fresh,))
    return Factors((whole, tuple(indices)), (tuple(out),), sizes, {}, frozenset(blocked))


def _local_numbers(op: Op, **where: tuple[int, ...]) -> dict[str, Any]:
    """The parameters with local dims in the fields `where` of `dimension_numbers`.

    Each field comes with the local position of every dim; merged ones are named once.
    """
    numbers = op.params["dimension_numbers"]
    local = {
        field: tuple(dict.fromkeys(position[d] for d in getattr(numbers, field)))
        for field, position in where.items()
    }
    return op.params | {
        "dimension_numbers": numbers._replace(**local),
        # Padding of the indices holds anything.
        "indices_are_sorted": False,
        "unique_indices": False,
    }


def _gather_localize(op: Op, view: LocalView) -> dict[str, Any]:
    numbers = op.params["dimension_numbers"]
    operand, indices = view.in_dims
    (out,) = view.out_dims

    slices = list(view.in_shapes[0])
    for d, n in enumerate(op.params["slice_sizes"]):
        # Merged dims are taken whole, or are batch dims.
        if operand.count(operand[d]) == 1 or d in numbers.operand_batching_dims:
            slices[operand[d]] = min(n, slices[operand[d]])
    params = _local_numbers(
        op,
        offset_dims=out,
        collapsed_slice_dims=operand,
        start_index_map=operand,
        operand_batching_dims=operand,
        start_indices_batching_dims=indices,
    )
    return params | {"slice_sizes": tuple(slices)}


def _scatter_factors(op: Op, ins: list[Aval], outs: list[Aval]) -> Factors:
    """Window dims that are written whole pass, and batch dims of the operand."""
    numbers = op.params["dimension_numbers"]
    operand, _, updates = ins
    sizes = sizes_of(operand)
    blocked = set(sizes)
    whole = same_dims(len(operand.shape))
    indices = list(same_free(ins[1], sizes))
    blocked.update(f for label in indices for f in label)
    batching = zip(
        numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True
    )
    for d, e in batching:
        indices[e] = whole[d]
        blocked.discard(d)
    batch = list(indices[:-1])
    gone = set(numbers.inserted_window_dims) | set(numbers.operand_batching_dims)
    window = [d for d in range(len(operand.shape)) if d not in gone]
    labels: list[tuple[int, ...]] = []
    for d in range(len(updates.shape)):
        if d not in numbers.update_window_dims:
            labels.append(batch.pop(0))
            continue
        source = window.pop(0)
        same = updates.shape[d] == operand.shape[source]
        if same and source not in numbers.scatter_dims_to_operand_dims:
            blocked.discard(source)
            labels.append((source,))
        else:
            fresh = len(sizes)
            sizes[fresh] = updates.shape[d]
            blocked.add(fresh)
            labels.append((fresh,))
    return Factors((whole, tuple(indices), tuple(labels)), (whole,), sizes, {}, frozenset(blocked))


def _scatter_localize(op: Op, view: LocalView) -> dict[str, Any]:
    operand, indices, updates = view.in_dims
    return _local_numbers(
        op,
        update_window_dims=updates,
        inserted_window_dims=operand,
        scatter_dims_to_operand_dims=operand,
        operand_batching_dims=operand,
        scatter_indices_batching_dims=indices,
    )


def _starts(first: int) -> Callable[[Op, LocalView], tuple[int, ...]]:
    """One start index for each local dim: those of merged dims, taken whole, are all zero."""

    def operands(op: Op, view: LocalView) -> tuple[int, ...]:
        where = view.in_dims[0]
        starts = tuple(first + where.index(local) for local in dict.fromkeys(where))
        return (*range(first), *starts)

    return operands


def _same_params(op: Op, view: LocalView) -> dict[str, Any]:
    return op.params


def _all_terms(op: Op, partial: tuple[int, ...]) -> bool:
    return partial == (0, 2)


register(
    "dynamic_slice",
    OpRule("indexing", _dynamic_slice_factors, _dynamic_slice_localize, operands=_starts(1)),
)
register(
    "dynamic_update_slice",
    OpRule("indexing", _dynamic_update_slice_factors, _same_params, operands=_starts(2)),
)
register("gather", OpRule("indexing", _gather_factors, _gather_localize))
register(
    "scatter scatter-mul scatter-min scatter-max",
    OpRule("indexing", _scatter_factors, _scatter_localize),
)
register(
    "scatter-add scatter-sub",
    OpRule("indexing", _scatter_factors, _scatter_localize, linear=_all_terms),
)
