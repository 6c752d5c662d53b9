"""One weight update written three ways, as shapes on a mesh of devices that may not exist.

Each starts from local gradients and ends with whole new weights on every device. There is no
forward or backward pass: what these do is what sharding the update is about. The gradients of all
replicas lie one after the other along dim 0, split over `data`, so that each device holds an array
of the weight's own shape: of another shape, as with a dim of length 1 before it, the compiler may
lay it out differently and then copy it, which no train step does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import wusharding as wus
from large_scale.mesh import torus_lines
from large_scale.shapes import Shapes

Tree = Any

OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "adam": lambda: optax.adam(1e-3),
    "lamb": lambda: optax.lamb(1e-3, weight_decay=0.01),
    "lars": lambda: optax.lars(1e-1, weight_decay=1e-4),
    "sgd": lambda: optax.sgd(1e-2, momentum=0.9),
}
VARIANTS = {
    "replicated": "optax in shard_map: gradients lax.pmean'ed, every replica updates everything",
    "zero1": "jit on an auto mesh: state split by NamedSharding on the first dim that divides, "
    "weights replicated by out_shardings; as users write it today",
    "ours": "shard_updates in shard_map: local gradients into tx.apply",
}


@dataclasses.dataclass(frozen=True)
class Program:
    """A step to compile: `step(params, state, grads or batch)`, which donates the first two."""

    name: str
    step: Any
    args: tuple[Tree, Tree, Tree]


def update_program(
    variant: str,
    optimizer: optax.GradientTransformation,
    shapes: Shapes,
    mesh: Mesh,
    **options: Any,
) -> Program:
    """One of `VARIANTS`.

    Args:
      variant: its name.
      optimizer: the plain optax one.
      shapes: of the weights.
      mesh: with an axis `data`, of automatic kind.
      **options: for `shard_updates`, where that is used.
    """
    make = {"replicated": _replicated, "zero1": _zero1, "ours": _ours}.get(variant)
    if make is None:
        raise ValueError(f"variant {variant!r}: need one of {', '.join(VARIANTS)}")
    if mesh.axis_types[mesh.axis_names.index("data")] != AxisType.Auto:
        raise ValueError("update_program: needs a mesh with axis_types=AxisType.Auto")
    params = on_mesh(shapes, mesh, P())
    n = mesh.shape["data"]
    grads = {
        k: jax.ShapeDtypeStruct(
            (n * x.shape[0], *x.shape[1:]) if x.shape else (n,),
            x.dtype,
            sharding=NamedSharding(mesh, P("data")),
        )
        for k, x in shapes.items()
    }
    step, state = make(optimizer, params, mesh, options)
    return Program(variant, step, (params, state, grads))


def on_mesh(tree: Tree, mesh: Mesh, spec: P) -> Tree:
    """Shapes of arrays that lie on a mesh, all in the same way."""
    sharding = NamedSharding(mesh, spec)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def _local(grads: Tree, params: Tree) -> Tree:
    """What a device holds of the gradients; of those of scalars it holds one-element vectors."""
    return jax.tree.map(lambda g, p: g.reshape(p.shape), grads, params)


def updated(
    optimizer: optax.GradientTransformation, grads: Tree, state: Tree, params: Tree
) -> tuple[Tree, Tree]:
    """New weights and state, as users write it."""
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def _replicated(
    optimizer: optax.GradientTransformation, params: Tree, mesh: Mesh, options: Any
) -> tuple[Any, Tree]:
    del options

    def step(params: Tree, state: Tree, grads: Tree) -> tuple[Tree, Tree]:
        mean = lax.pmean(_local(grads, params), "data")
        return updated(optimizer, mean, state, params)

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=(P(), P()))
    state = on_mesh(jax.eval_shape(optimizer.init, params), mesh, P())
    return jax.jit(mapped, donate_argnums=(0, 1)), state


def _zero1(
    optimizer: optax.GradientTransformation, params: Tree, mesh: Mesh, options: Any
) -> tuple[Any, Tree]:
    del options
    n = mesh.shape["data"]
    state = split_by_hand(jax.eval_shape(optimizer.init, params), mesh)

    def step(params: Tree, state: Tree, grads: Tree) -> tuple[Tree, Tree]:
        mean = jax.tree.map(lambda g, p: jnp.mean(g.reshape(n, *p.shape), axis=0), grads, params)
        return updated(optimizer, mean, state, params)

    out = jax.tree.map(lambda x: x.sharding, (params, state))
    return jax.jit(step, donate_argnums=(0, 1), out_shardings=out), state


def split_by_hand(state: Tree, mesh: Mesh) -> Tree:
    """Shapes of state, each array split over `data` on the first dim that divides, if one does."""
    n = mesh.shape["data"]

    def split(x: Any) -> jax.ShapeDtypeStruct:
        dims = [d for d, size in enumerate(x.shape) if size and size % n == 0]
        spec = P(*([None] * dims[0]), "data") if dims else P()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(split, state)


def _ours(
    optimizer: optax.GradientTransformation, params: Tree, mesh: Mesh, options: Any
) -> tuple[Any, Tree]:
    tx = wus.shard_updates(optimizer, **{"mesh": mesh, "lines": torus_lines(mesh), **options})

    def step(params: Tree, state: Tree, grads: Tree) -> tuple[Tree, Tree]:
        return tx.apply(_local(grads, params), state, params)

    specs = tx.state_specs(params)
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(P(), specs, P("data")), out_specs=(P(), specs)
    )
    return jax.jit(mapped, donate_argnums=(0, 1)), tx.abstract_state(params)
