"""One whole train step written four ways, as shapes on a mesh of devices that may not exist.

`step(params, state, batch)` returns new weights, new state and the mean of the loss. All four take
the same batch, and batch norm sees what one device holds of it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import wusharding as wus
from large_scale.mesh import torus_lines
from large_scale.models import Model
from large_scale.programs import Program, on_mesh, split_by_hand, updated

Tree = Any

STEPS = {
    "replicated": "optax in shard_map: gradients lax.pmean'ed, every replica updates everything",
    "zero1": "jit on an auto mesh: state split by NamedSharding on the first dim that divides, "
    "weights replicated by out_shardings; as users write it today",
    "ours": "shard_step of the replicated step, with whole weights between steps",
    "ours-split": "the same with weights that stay split between steps",
}


def step_program(
    variant: str,
    optimizer: optax.GradientTransformation,
    model: Model,
    mesh: Mesh,
    *,
    examples: int | None = None,
    **options: Any,
) -> Program:
    """One of `STEPS`.

    Args:
      variant: its name.
      optimizer: the plain optax one.
      model: what to train.
      mesh: with an axis `data`, of automatic kind.
      examples: on each device; None takes the model's.
      **options: for `shard_step`, where that is used.
    """
    if variant not in STEPS:
        raise ValueError(f"variant {variant!r}: need one of {', '.join(STEPS)}")
    if mesh.axis_types[mesh.axis_names.index("data")] != AxisType.Auto:
        raise ValueError("step_program: needs a mesh with axis_types=AxisType.Auto")
    params = on_mesh(model.shapes(), mesh, P())
    state = on_mesh(jax.eval_shape(optimizer.init, params), mesh, P())
    batch = model.batch((examples or model.examples) * mesh.shape["data"])
    args = (params, state, on_mesh(batch, mesh, P("data")))
    if variant == "zero1":
        args = (params, split_by_hand(state, mesh), args[2])
        return Program(variant, _by_hand(optimizer, model, mesh, args), args)
    step = _replicated(optimizer, model, mesh)
    if variant == "replicated":
        return Program(variant, jax.jit(step, donate_argnums=(0, 1)), args)
    weights = "split" if variant == "ours-split" else "whole"
    given = {"mesh": mesh, "lines": torus_lines(mesh), "weights": weights, **options}
    sharded = wus.shard_step(step, donate_argnums=(0, 1), **given)
    return Program(variant, sharded, sharded.shard_shapes(*args))


def _replicated(optimizer: optax.GradientTransformation, model: Model, mesh: Mesh) -> Any:
    def step(params: Tree, state: Tree, batch: Tree) -> tuple[Tree, Tree, jax.Array]:
        loss, grads = jax.value_and_grad(model.loss)(params, batch)
        loss, grads = lax.pmean((loss, grads), "data")
        return *updated(optimizer, grads, state, params), loss

    specs = (P(), P(), P("data"))
    return jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)


def _by_hand(
    optimizer: optax.GradientTransformation, model: Model, mesh: Mesh, args: tuple[Tree, ...]
) -> Any:
    n = mesh.shape["data"]

    def mean_loss(params: Tree, batch: Tree) -> jax.Array:
        parts = jax.tree.map(lambda x: x.reshape(n, x.shape[0] // n, *x.shape[1:]), batch)
        return jnp.mean(jax.vmap(model.loss, in_axes=(None, 0))(params, parts))

    def step(params: Tree, state: Tree, batch: Tree) -> tuple[Tree, Tree, jax.Array]:
        loss, grads = jax.value_and_grad(mean_loss)(params, batch)
        return *updated(optimizer, grads, state, params), loss

    out = jax.tree.map(lambda x: x.sharding, args[:2])
    shardings = (*out, NamedSharding(mesh, P()))
    return jax.jit(step, donate_argnums=(0, 1), out_shardings=shardings)
