"""Dynamic slices, gather and scatter: dims that are taken whole pass through."""

from __future__ import annotations

from typing import Any

from wusharding.analysis.rules.base import Factors, LocalView, OpRule, register, sizes_of
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
    numbers, slices = op.params["dimension_numbers"], op.params["slice_sizes"]
    sizes = sizes_of(ins[0])
    blocked = set(sizes)
    indices = same_free(ins[1], sizes)
    gone = set(numbers.collapsed_slice_dims) | set(numbers.operand_batching_dims)
    window = [d for d in range(len(ins[0].shape)) if d not in gone]
    batch = list(indices[:-1])
    out: list[tuple[int, ...]] = []
    for d in range(len(outs[0].shape)):
        if d not in numbers.offset_dims:
            out.append(batch.pop(0))
            continue
        source = window.pop(0)
        if slices[source] == ins[0].shape[source] and source not in numbers.start_index_map:
            blocked.discard(source)
            out.append((source,))
        else:
            fresh = len(sizes)
            sizes[fresh] = slices[source]
            blocked.add(fresh)
            out.append((fresh,))
    blocked |= {f for label in indices for f in label}
    whole = tuple((d,) for d in range(len(ins[0].shape)))
    return Factors((whole, indices), (tuple(out),), sizes, {}, frozenset(blocked))


def _gather_localize(op: Op, view: LocalView) -> dict[str, Any]:
    # Only a dim that is taken whole can be split, and then its slice is the local piece of it.
    sizes = zip(op.params["slice_sizes"], view.in_shapes[0], strict=True)
    return op.params | {"slice_sizes": tuple(min(n, local) for n, local in sizes)}


def _scatter_factors(op: Op, ins: list[Aval], outs: list[Aval]) -> Factors:
    numbers = op.params["dimension_numbers"]
    operand, _, updates = ins
    sizes = sizes_of(operand)
    blocked = set(sizes)
    indices = same_free(ins[1], sizes)
    gone = set(numbers.inserted_window_dims) | set(numbers.operand_batching_dims)
    window = [d for d in range(len(operand.shape)) if d not in gone]
    labels: list[tuple[int, ...]] = []
    for d in range(len(updates.shape)):
        source = window.pop(0) if d in numbers.update_window_dims else None
        free = source is not None and source not in numbers.scatter_dims_to_operand_dims
        if source is not None and free and updates.shape[d] == operand.shape[source]:
            blocked.discard(source)
            labels.append((source,))
        else:
            fresh = len(sizes)
            sizes[fresh] = updates.shape[d]
            blocked.add(fresh)
            labels.append((fresh,))
    blocked |= {f for label in indices for f in label}
    whole = tuple((d,) for d in range(len(operand.shape)))
    return Factors((whole, indices, tuple(labels)), (whole,), sizes, {}, frozenset(blocked))


register(
    "dynamic_slice",
    OpRule("indexing", _dynamic_slice_factors, _dynamic_slice_localize, merged_dims=False),
)
register(
    "dynamic_update_slice",
    OpRule("indexing", _dynamic_update_slice_factors, merged_dims=False),
)
register("gather", OpRule("indexing", _gather_factors, _gather_localize, merged_dims=False))
register(
    "scatter scatter-add scatter_add scatter-mul scatter_mul scatter-min scatter_min scatter-max "
    "scatter_max scatter-sub scatter_sub",
    OpRule("indexing", _scatter_factors, merged_dims=False),
)
