"""Five steps on one device and on a mesh, for losses whose splitting is written by hand or left."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import wusharding as wus
from large_scale.hlo import Collective, collectives
from tests.runs import relative_error

Tree = Any
Loss = Callable[[Tree, Any], jax.Array]


@dataclasses.dataclass
class Trained:
    """What steps on a mesh left: weights, the plain state, and each step's collectives."""

    params: Tree
    state: Tree
    collectives: list[Collective]

    def error(self, wanted: tuple[Tree, Tree]) -> float:
        return relative_error((self.params, self.state), wanted)


def on_one_device(
    loss: Loss, params: Tree, batches: Sequence[Any], optimizer: optax.GradientTransformation
) -> tuple[Tree, Tree]:
    """Params and state of plain optax after a step on each batch."""

    @jax.jit
    def step(params: Tree, state: Tree, batch: Any) -> tuple[Tree, Tree]:
        updates, state = optimizer.update(jax.grad(loss)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    params = jax.tree.map(jnp.asarray, params)
    state = optimizer.init(params)
    for batch in batches:
        params, state = step(params, state, batch)
    return params, state


def placed(tree: Tree, specs: Tree, mesh: Mesh) -> Tree:
    """A tree on a mesh; `specs` is a tree of specs, or one for all."""
    if isinstance(specs, P):
        specs = jax.tree.map(lambda _: specs, tree)
    return jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), tree, specs)


def along(mesh: Mesh, *axes: str) -> set[frozenset[int]]:
    """The groups of devices that differ along `axes` only."""
    ids = np.vectorize(lambda d: d.id)(mesh.devices)
    where = [mesh.axis_names.index(a) for a in axes]
    rest = [d for d in range(ids.ndim) if d not in where]
    rows = ids.transpose(*rest, *where).reshape(-1, math.prod(mesh.shape[a] for a in axes))
    return {frozenset(map(int, row)) for row in rows}


def by_hand(
    loss: Loss,
    params: Tree,
    specs: Tree,
    batches: Sequence[Any],
    batch_specs: Tree,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    axis: str | tuple[str, ...] = "data",
    **options: Any,
) -> Trained:
    """`shard_map` over all axes; `loss` is that of one replica, on its parts of weights and batch.

    Gradients are local along `axis`, over which replicas lie. Along other axes the weights stay
    unvarying where they are not split, so that JAX adds up their gradients there.
    """
    tx = wus.shard_updates(optimizer, mesh=mesh, axis=axis, **options)
    params = placed(params, specs, mesh)
    state = tx.init(params)

    def step(params: Tree, state: Any, batch: Any) -> tuple[Tree, Any]:
        own = jax.lax.pcast(params, axis, to="varying")
        return tx.apply(jax.grad(loss)(own, batch), state, params)

    state_specs = tx.state_specs(params)
    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(specs, state_specs, batch_specs),
        out_specs=(specs, state_specs),
    )
    return _run(mapped, tx, params, state, [placed(b, batch_specs, mesh) for b in batches])


def by_compiler(
    loss: Loss,
    params: Tree,
    specs: Tree,
    batches: Sequence[Any],
    batch_specs: Tree,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    **options: Any,
) -> Trained:
    """`jit` on an auto mesh: `loss` is that of all, and the compiler splits it."""
    tx = wus.shard_updates(optimizer, mesh=mesh, **options)
    params = placed(params, specs, mesh)
    state = tx.init(params)

    def step(params: Tree, state: Any, batch: Any) -> tuple[Tree, Any]:
        return tx.apply(jax.grad(loss)(params, batch), state, params)

    return _run(step, tx, params, state, [placed(b, batch_specs, mesh) for b in batches])


def by_step(
    loss: Loss,
    params: Tree,
    specs: Tree,
    batches: Sequence[Any],
    batch_specs: Tree,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    **options: Any,
) -> Trained:
    """`shard_step` of the step that `on_one_device` runs, its arguments donated."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Tree, state: Tree, batch: Any) -> tuple[Tree, Tree]:
        updates, state = optimizer.update(jax.grad(loss)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    params = placed(params, specs, mesh)
    state = optimizer.init(params)
    sharded = wus.shard_step(step, mesh=mesh, **options)
    with jax.set_mesh(mesh):
        params, state, first = sharded.shard(params, state, placed(batches[0], batch_specs, mesh))
        compiled = sharded.lower(params, state, first).compile()
        for batch in batches:
            params, state = compiled(params, state, placed(batch, batch_specs, mesh))
    plain = jax.tree.map(np.asarray, (sharded.unshard(params), sharded.unshard(state)))
    return Trained(*plain, collectives(compiled.as_text()))


def _run(step: Any, tx: Any, params: Tree, state: Any, batches: Sequence[Any]) -> Trained:
    compiled = jax.jit(step).lower(params, state, batches[0]).compile()
    for batch in batches:
        params, state = compiled(params, state, batch)
    params = jax.tree.map(np.asarray, params)
    return Trained(params, tx.unshard(state), collectives(compiled.as_text()))
