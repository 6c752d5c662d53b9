"""One device's body as a function of global arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from wusharding.analysis.layout import restricted
from wusharding.transforms import checks
from wusharding.transforms.context import Context


def mapped(
    context: Context,
    body: Callable[..., Any],
    in_specs: Sequence[Sequence[PartitionSpec]],
    out_specs: Sequence[Sequence[PartitionSpec]],
) -> Callable[..., Any]:
    """`body` in a `shard_map` that makes every axis of the mesh manual."""
    if context.manual:
        in_specs, out_specs = (
            [[restricted(s, context.open_axes) for s in group] for group in groups]
            for groups in (in_specs, out_specs)
        )
    inside = jax.shard_map(
        body,
        mesh=context.mesh,
        in_specs=tuple(list(g) for g in in_specs),
        out_specs=tuple(list(g) for g in out_specs),
        check_vma=context.checked,
        axis_names=set(context.open_axes),
    )

    def call(*args: Any) -> Any:
        if context.explicit:
            args = tuple(
                [checks.resharded(x, s, context) for x, s in zip(group, specs, strict=True)]
                for group, specs in zip(args, in_specs, strict=True)
            )
        return inside(*(list(g) for g in args))

    return call
