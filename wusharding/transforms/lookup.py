"""Rows looked up in a weight whose padding is still on: without the copy that would cut it off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import GatherScatterMode


def wide_lookup(
    params: Mapping[str, Any], shape: tuple[int, ...], wide: jax.Array, indices: jax.Array
) -> jax.Array | None:
    """Indices with which `gather` gives of `wide` what it gives of the array itself.

    A gathered weight comes with its padding; an embedding is read one row at a time, and never
    from there. Where the array itself would be asked for a row that it lacks, so is `wide`.

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
    if mode == GatherScatterMode.CLIP:
        moved = jnp.minimum(indices, rows - 1)
    elif mode == GatherScatterMode.FILL_OR_DROP:
        moved = jnp.where(indices < rows, indices, longest)
    elif mode == GatherScatterMode.PROMISE_IN_BOUNDS:
        moved = indices
    else:
        return None
    if indices.shape[-1] > 1:
        here = jnp.arange(indices.shape[-1]) == column
        moved = jnp.where(here, moved, indices)
    return moved.astype(indices.dtype)
