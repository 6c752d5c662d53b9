"""Five steps on one device and on a mesh, for losses whose splitting is written by hand or left."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import wusharding as wus
from large_scale.hlo import Collective, collectives
from tests.runs import reference, relative_error

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

    return reference(optimizer, params, batches, jax.grad(loss))


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


@dataclasses.dataclass(frozen=True)
class Setup:
    """What is trained, and how it lies on a mesh.

    Args:
      loss: of weights and a batch.
      params: the weights, and `specs` of them.
      batches: one a step, and `batch_specs` of each.
      optimizer: plain optax.
      mesh: all of whose devices train.
    """

    loss: Loss
    params: Tree
    specs: Tree
    batches: Sequence[Any]
    batch_specs: Tree
    optimizer: optax.GradientTransformation
    mesh: Mesh

    def by_hand(self, axis: str | tuple[str, ...] = "data", **options: Any) -> Trained:
        """`shard_map` over all axes; `loss` is that of one replica, on its weights and batch.

        Gradients are local along `axis`, over which replicas lie. Along other axes the weights stay
        unvarying where they are not split, so that JAX adds up their gradients there.
        """
        tx = wus.shard_updates(self.optimizer, mesh=self.mesh, axis=axis, **options)
        params = self._placed_params()
        state = tx.init(params)

        def step(params: Tree, state: Any, batch: Any) -> tuple[Tree, Any]:
            own = jax.lax.pcast(params, axis, to="varying")
            return tx.apply(jax.grad(self.loss)(own, batch), state, params)

        state_specs = tx.state_specs(params)
        mapped = jax.shard_map(
            step,
            mesh=self.mesh,
            in_specs=(self.specs, state_specs, self.batch_specs),
            out_specs=(self.specs, state_specs),
        )
        return self._run(mapped, tx, params, state)

    def by_compiler(self, **options: Any) -> Trained:
        """`jit` on an auto mesh: `loss` is that of all, and the compiler splits it."""
        tx = wus.shard_updates(self.optimizer, mesh=self.mesh, **options)
        params = self._placed_params()
        state = tx.init(params)

        def step(params: Tree, state: Any, batch: Any) -> tuple[Tree, Any]:
            return tx.apply(jax.grad(self.loss)(params, batch), state, params)

        return self._run(step, tx, params, state)

    def by_step(self, **options: Any) -> Trained:
        """`shard_step` of the step that `on_one_device` runs, its arguments donated."""

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def step(params: Tree, state: Tree, batch: Any) -> tuple[Tree, Tree]:
            grads = jax.grad(self.loss)(params, batch)
            updates, state = self.optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        params = self._placed_params()
        state = self.optimizer.init(params)
        sharded = wus.shard_step(step, mesh=self.mesh, **options)
        batches = self._placed_batches()
        with jax.set_mesh(self.mesh):
            params, state, first = sharded.shard(params, state, batches[0])
            compiled = sharded.lower(params, state, first).compile()
            for batch in batches:
                params, state = compiled(params, state, batch)
        plain = jax.tree.map(np.asarray, (sharded.unshard(params), sharded.unshard(state)))
        return Trained(*plain, collectives(compiled.as_text()))

    def _placed_params(self) -> Tree:
        return placed(self.params, self.specs, self.mesh)

    def _placed_batches(self) -> list[Any]:
        return [placed(b, self.batch_specs, self.mesh) for b in self.batches]

    def _run(self, step: Any, tx: Any, params: Tree, state: Any) -> Trained:
        batches = self._placed_batches()
        compiled = jax.jit(step).lower(params, state, batches[0]).compile()
        for batch in batches:
            params, state = compiled(params, state, batch)
        params = jax.tree.map(np.asarray, params)
        return Trained(params, tx.unshard(state), collectives(compiled.as_text()))
