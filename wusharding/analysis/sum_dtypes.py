"""How sums over replicas travel, mesh axis by mesh axis: in which dtype, and where not at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class SumDtypes:
    """Dtypes for sums of values of a longer floating dtype; shorter ones travel as they are.

    Args:
      everywhere: along all axes; None leaves it to `along`.
      along: mesh axes, each with the dtype of what is summed along it.
      equal: mesh axes along which what is summed is equal already: devices take their parts there.

    >>> half = SumDtypes(along=(("dcn", jnp.dtype("bfloat16")),))
    >>> half.of(jnp.dtype("float32"), "dcn").name, half.of(jnp.dtype("float32"), "data").name
    ('bfloat16', 'float32')
    >>> half.of(jnp.dtype("int32"), "dcn").name
    'int32'
    """

    everywhere: Any = None
    along: tuple[tuple[str, Any], ...] = ()
    equal: tuple[str, ...] = ()

    @property
    def is_own(self) -> bool:
        """Everything travels as it is."""
        return self.everywhere is None and not self.along

    def equal_along(self, axes: tuple[str, ...]) -> SumDtypes:
        """The same for what is equal along `axes`."""
        return dataclasses.replace(self, equal=axes)

    def of(self, own: Any, axis: str) -> Any:
        """The dtype in which values of dtype `own` travel along a mesh axis."""
        told = dict(self.along).get(axis, self.everywhere)
        return told if told is not None and is_narrower(told, own) else own

    def by_dtype(self, own: Any, axes: Sequence[str]) -> list[tuple[Any, tuple[str, ...]]]:
        """Axes that can be summed over at once, with the dtype; the longest dtype first."""
        groups: dict[Any, tuple[str, ...]] = {}
        for axis in axes:
            dtype = self.of(own, axis)
            groups[dtype] = (*groups.get(dtype, ()), axis)
        return sorted(groups.items(), key=lambda group: -jnp.dtype(group[0]).itemsize)


OWN = SumDtypes()


def is_narrower(dtype: Any, than: Any) -> bool:
    """Whether both are floats and the first has fewer bits."""
    floats = jnp.issubdtype(dtype, jnp.floating) and jnp.issubdtype(than, jnp.floating)
    return bool(floats and jnp.dtype(dtype).itemsize < jnp.dtype(than).itemsize)
