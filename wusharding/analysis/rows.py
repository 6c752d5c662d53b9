"""Single rows of arrays that a device holds a part of: looked up, and added up into zeros.

Primitives that take the place of `gather` and `scatter` in a schedule.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.lax import GatherScatterMode

# In which a lookup gives the nearest of rows that there are not: XLA does so of those that are
# promised to be there, as `table[ids]` promises.
CLAMPED_MODES = (GatherScatterMode.CLIP, GatherScatterMode.PROMISE_IN_BOUNDS)
# In which it is known what a lookup gives of them.
LOOKUP_MODES = (*CLAMPED_MODES, GatherScatterMode.FILL_OR_DROP)


class RowTile(NamedTuple):
    """The rows that a device holds of an array which mesh axes split along one dim.

    Attributes:
      dim: the dim.
      rows: of the whole array.
      axes: the mesh axes.
      num_tiles: into how many parts.
    """

    dim: int
    rows: int
    axes: tuple[str, ...]
    num_tiles: int

    def places(self, asked: Any) -> tuple[Any, Any]:
        """Where rows lie in this device's tile, and whether they do: it gives row 0 otherwise."""
        held = self.rows // self.num_tiles
        at = asked - lax.axis_index(self.axes) * held
        here = (at >= 0) & (at < held)
        return jnp.where(here, at, 0), here


def _signed(indices: Any) -> Any:
    return indices.astype(jnp.promote_types(indices.dtype, jnp.int32))


@dataclasses.dataclass(frozen=True)
class LookupInTile:
    """`gather` of single rows from a device's tile; zeros for rows that lie on other devices.

    What all devices along the tile's axes give adds up to what the whole array would give.
    """

    gather: Any
    tile: RowTile
    name: str = "gather"
    multiple_results: bool = False

    def bind(self, operand: Any, indices: Any, **params: Any) -> Any:
        mode, rows = params["mode"], self.tile.rows
        asked = _signed(indices)
        if mode in CLAMPED_MODES:
            asked = jnp.clip(asked, 0, rows - 1)
        at, here = self.tile.places(asked)
        params = params | {"mode": GatherScatterMode.PROMISE_IN_BOUNDS}
        found = self.gather.bind(operand, at, **params)

        def of_result(flags: Any) -> Any:
            """Flags of `[..., 1]` indices for each element of the result."""
            windows = params["dimension_numbers"].offset_dims
            return jnp.expand_dims(flags[..., 0], windows)

        found = jnp.where(of_result(here), found, jnp.zeros((), found.dtype))
        if mode == GatherScatterMode.FILL_OR_DROP:
            gone = ((asked < 0) | (asked >= rows)) & (lax.axis_index(self.tile.axes) == 0)
            found = jnp.where(of_result(gone), _filler(params["fill_value"], found.dtype), found)
        return found


def _filler(value: Any, dtype: Any) -> Any:
    """What a gather gives for rows that there are not."""
    if value is not None:
        return jnp.asarray(value, dtype)
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.asarray(jnp.nan, dtype)
    info = jnp.iinfo(dtype)
    return jnp.asarray(info.max if info.min == 0 else info.min, dtype)


@dataclasses.dataclass(frozen=True)
class ScatterIntoZeros:
    """A primitive that scatters into zeros of a shape and dtype: of indices and updates.

    With a `tile` the zeros are a device's own rows, and other rows are left to other devices.
    """

    scatter: Any
    shape: tuple[int, ...]
    dtype: Any
    tile: RowTile | None = None
    name: str = "scatter_into_zeros"
    multiple_results: bool = False

    def bind(self, indices: Any, updates: Any, **params: Any) -> Any:
        zeros = jnp.zeros(self.shape, self.dtype)
        if self.tile is not None:
            asked = _signed(indices)
            if params["mode"] == GatherScatterMode.CLIP:
                asked = jnp.clip(asked, 0, self.tile.rows - 1)
            at, here = self.tile.places(asked)
            indices = jnp.where(here, at, self.shape[self.tile.dim])  # that is dropped
            params = params | {"mode": GatherScatterMode.FILL_OR_DROP, "unique_indices": False}
            params = params | {"indices_are_sorted": False}
        return self.scatter.bind(zeros, indices, updates, **params)
