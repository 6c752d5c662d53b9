"""Stacks of copies, as `pmap` wants them, that a step treats as one value each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from wusharding.analysis.layout import Leaf
from wusharding.errors import ReplicationError
from wusharding.jaxprs import is_extended
from wusharding.transforms import checks
from wusharding.transforms.context import Context
from wusharding.transforms.mapped import mapped


def check_copies(context: Context, arguments: Sequence[tuple[Leaf, Any]]) -> None:
    """Stacks among `arguments` that count as copies of one array hold the same on every replica."""
    stacks = [(leaf, x) for leaf, x in arguments if leaf.copies and x.shape[0] > 1]
    if not stacks:
        return
    equal = _all_equal(context, [x for _, x in stacks])
    for (leaf, _), same in zip(stacks, equal, strict=True):
        if not same:
            raise ReplicationError(
                f"args{leaf.path}: its copies differ between the replicas, along dim 0, "
                "and the step treats it as one value: it goes round, and nothing makes the copies "
                "differ. Replicate one copy, as by jax.device_put_replicated."
            )


def _all_equal(context: Context, stacks: Sequence[Any]) -> list[bool]:
    """Whether every replica holds the same bits as the first one."""
    axes = context.replicas.reduce_axes
    specs = [PartitionSpec(axes)] * len(stacks)

    def body(stacks: Sequence[Any]) -> tuple[list[Any]]:
        index = jax.lax.axis_index(axes)
        return ([_equals_first(x, index, axes) for x in stacks],)

    check = mapped(context, body, [specs], [[PartitionSpec()] * len(stacks)])
    placed = checks.place([stacks], [specs], [("args", ())], checks.concrete_mesh(context.mesh))
    return jax.device_get(jax.jit(check)(*placed)[0])


def _equals_first(x: Any, index: Any, axes: tuple[str, ...]) -> Any:
    x = jax.random.key_data(x) if is_extended(x.dtype) else x
    width = x.dtype.itemsize * 8
    if jnp.iscomplexobj(x):
        x, width = jnp.stack([x.real, x.imag]), width // 2
    bits = x.astype("uint8") if x.dtype == bool else jax.lax.bitcast_convert_type(x, f"uint{width}")
    first = jax.lax.psum(jnp.where(index == 0, bits, jnp.zeros_like(bits)), axes)
    return jax.lax.pmin(jnp.all(bits == first).astype("int32"), axes)
