"""Operations on arrays whose padding is still on: they give what they give without it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.lax import GatherScatterMode

from wusharding.analysis.rows import CLAMPED_MODES, ScatterIntoZeros
from wusharding.analysis.rules.base import Reduction
from wusharding.analysis.wide import WideOp
from wusharding.jaxprs import Op


def neutral(reduction: Reduction, dtype: Any) -> jax.Array:
    """The element that changes nothing: 0 for a sum, the lowest value for a maximum."""
    if reduction in ("sum", "or", "xor"):
        return jnp.zeros((), dtype)
    if reduction == "prod":
        return jnp.ones((), dtype)
    if reduction == "and":
        return jnp.array(-1).astype(dtype) if dtype != jnp.bool_ else jnp.array(True)
    if dtype == jnp.bool_:
        return jnp.array(reduction == "min")
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        return jnp.array(info.min if reduction == "max" else info.max, dtype)
    sign = -1 if reduction == "max" else 1
    limit = jnp.array(sign * jnp.inf, dtype)  # some 8-bit floats have no infinity, and give NaN
    return jnp.where(jnp.isnan(limit), jnp.array(sign * jnp.finfo(dtype).max, dtype), limit)


def lengthened(x: jax.Array, dim: int, length: int) -> jax.Array:
    """An array with zeros at the end of one dim."""
    return jnp.pad(x, [(0, length - n if d == dim else 0) for d, n in enumerate(x.shape)])


def wide_operands(wide: WideOp, op: Op, args: Sequence[Any]) -> tuple[Op, list[Any]]:
    """An operation as it is done with padding, and its operands.

    Args:
      wide: how it is padded.
      op: the operation without padding.
      args: its operands, padded as `wide` says.
    """
    out = list(args)
    if wide.reduction is not None:
        for i, dim in enumerate(wide.ins):
            if dim is not None:
                counts = lax.broadcasted_iota(jnp.int32, out[i].shape, dim) < wide.rows
                out[i] = jnp.where(counts, out[i], neutral(wide.reduction, out[i].dtype))
    if isinstance(op.primitive, ScatterIntoZeros):
        op = dataclasses.replace(
            op, primitive=dataclasses.replace(op.primitive, shape=wide.out_shape)
        )
    if op.name == "gather" and wide.ins[0] is not None:
        slices = list(op.params["slice_sizes"])
        if slices[wide.ins[0]] == wide.rows:  # all of the dim; 1 where indices go along with it
            slices[wide.ins[0]] = out[0].shape[wide.ins[0]]
            op = dataclasses.replace(op, params=op.params | {"slice_sizes": tuple(slices)})
    if op.name.startswith("scatter"):
        indexed = op.params["dimension_numbers"].scatter_dims_to_operand_dims
        at = len(out) - 2  # indices, then updates
        if wide.out in indexed and op.params["mode"] == GatherScatterMode.CLIP:
            # In other modes what is dropped without padding may well be written there.
            out[at] = _clipped(jnp.asarray(out[at]), indexed.index(wide.out), wide.rows)
    return op, out


def wide_lookup(
    params: Mapping[str, Any], shape: tuple[int, ...], wide: jax.Array, indices: jax.Array
) -> jax.Array | None:
    """Indices with which `gather` gives of `wide` what it gives of the array itself.

    Where the array itself would be asked for a row that it lacks, so is `wide`; where that is
    promised not to be, it is given the row that XLA gives, the last one.

    Args:
      params: those of the `gather` that reads an array of `shape`.
      shape: of the array itself.
      wide: the array, longer along one dim.
      indices: what is looked up.

    Returns:
      None where the operation reads more than single rows.
    """
    (dim,) = (d for d, n in enumerate(shape) if wide.shape[d] != n)
    numbers = params["dimension_numbers"]
    if dim not in numbers.start_index_map or params["slice_sizes"][dim] != 1:
        return None
    mode = params["mode"]
    rows, longest = shape[dim], wide.shape[dim]
    if jnp.iinfo(indices.dtype).max < longest:
        return None
    column = numbers.start_index_map.index(dim)
    if mode in CLAMPED_MODES:
        return _clipped(indices, column, rows)
    if mode == GatherScatterMode.FILL_OR_DROP:
        return _moved(indices, jnp.where(indices < rows, indices, longest), column)
    return None


def _clipped(indices: jax.Array, column: int, rows: int) -> jax.Array:
    if jnp.iinfo(indices.dtype).max < rows:
        return indices
    return _moved(indices, jnp.minimum(indices, rows - 1), column)


def _moved(indices: jax.Array, moved: jax.Array, column: int) -> jax.Array:
    """`moved` in one column of the indices, the others as they are."""
    if indices.shape[-1] > 1:
        moved = jnp.where(jnp.arange(indices.shape[-1]) == column, moved, indices)
    return moved.astype(indices.dtype)
