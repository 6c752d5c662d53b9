"""What `benchmarks.step` times: train steps written in two ways, their updates split in three.

A step takes and returns weights and state, which are donated, and takes a batch that lies split
over the devices; the forward and backward passes are in it.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import wusharding as wus
from benchmarks.devices import NUM_DEVICES
from benchmarks.step_models import Model, Tree
from benchmarks.update_programs import (
    Split,
    Taken,
    first_divisible,
    in_stages,
    staged,
    state_specs,
    timed,
)

WRITTEN = {
    "jit": "a global-view function under `jit` on an auto mesh",
    "shard_map": "a function of one replica in `shard_map`, which averages its gradients",
}
VARIANTS = {
    "replicated": "the step as it is written; every replica updates everything",
    "ZeRO-1 by hand": "state split on the first dim that divides: under `jit` by `out_shardings`, "
    "in `shard_map` by `psum_scatter` and `all_gather` of each array",
    "shard_step": "the replicated step, untouched, through `shard_step`",
    "shard_step, split": 'the same with `weights="split"`: weights stay split between steps',
}
# Written by hand in `shard_map`, an optimizer sees pieces: LAMB's norms would be those of pieces.
ELEMENTWISE = ("adam", "sgd")


@dataclasses.dataclass
class Program:
    """A compiled step, what it holds between steps, and what it has done.

    Args:
      variant: one of `VARIANTS`.
      compiled: takes weights, state and batch, of which the first two are donated.
      params: weights.
      state: optimizer state.
      batch: the batch.
      seconds: what the stages before the first step took.
      losses: of the steps so far.
    """

    variant: str
    compiled: Any
    params: Tree
    state: Tree
    batch: Tree
    seconds: dict[str, float]
    losses: list[float] = dataclasses.field(default_factory=list)

    def run(self) -> Taken:
        out, taken = timed(self.compiled, self.params, self.state, self.batch)
        self.params, self.state, loss = out
        self.losses.append(float(loss))
        return taken


class Steps:
    """One model with one optimizer on one mesh, written in one way."""

    def __init__(
        self, model: Model, optimizer: optax.GradientTransformation, written: str, mesh: Mesh
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.written = written
        self.mesh = mesh

    # ----------------------------------------------------------------------------------- as written

    def step(self) -> Callable[..., Any]:
        """The replicated step, as users write it; `shard_step` gets the same."""

        def global_view(params: Tree, state: Tree, batch: Tree) -> tuple[Tree, Tree, jax.Array]:
            loss, grads = jax.value_and_grad(self.model.loss)(params, batch)
            return *self._updated(grads, state, params), loss

        def replica(params: Tree, state: Tree, batch: Tree) -> tuple[Tree, Tree, jax.Array]:
            found = jax.value_and_grad(self.model.loss)(params, batch)
            loss, grads = lax.pmean(found, "data")
            return *self._updated(grads, state, params), loss

        return global_view if self.written == "jit" else self._mapped(replica, P(), P())

    def _updated(self, grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        updates, state = self.optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def _mapped(self, step: Callable[..., Any], params: Tree, state: Tree) -> Callable[..., Any]:
        return jax.shard_map(
            step,
            mesh=self.mesh,
            in_specs=(params, state, P("data")),
            out_specs=(params, state, P()),
            check_vma=False,
        )

    # -------------------------------------------------------------------------------------- by hand

    def zero1(self) -> Any:
        """ZeRO-1 by hand, jitted."""
        leaves, tree = jax.tree.flatten(self.model.abstract_params())
        split = first_divisible([x.shape for x in leaves])
        specs = self._zero1_specs()
        if self.written == "jit":
            out = (self._placed(P()), jax.tree.map(self._placed, specs), self._placed(P()))
            return jax.jit(self.step(), donate_argnums=(0, 1), out_shardings=out)

        def replica(params: Tree, state: Tree, batch: Tree) -> tuple[Tree, Tree, jax.Array]:
            loss, grads = jax.value_and_grad(self.model.loss)(params, batch)
            shards = tree.unflatten(split.take(jax.tree.leaves(params)))
            grads = tree.unflatten(_each(_scatter, split, grads))
            shards, state = self._updated(grads, state, shards)
            return tree.unflatten(_each(_gather, split, shards)), state, lax.pmean(loss, "data")

        return jax.jit(self._mapped(replica, P(), specs), donate_argnums=(0, 1))

    def _zero1_specs(self) -> Tree:
        params = self.model.abstract_params()
        leaves, tree = jax.tree.flatten(params)
        specs = first_divisible([x.shape for x in leaves]).specs()
        return state_specs(self.optimizer, params, tree.unflatten(specs))

    def _placed(self, spec: P) -> NamedSharding:
        return NamedSharding(self.mesh, spec)

    # ------------------------------------------------------------------------------------- programs

    def abstract(self) -> tuple[Tree, Tree, Tree]:
        """The arguments of the step as it is written, by shapes and shardings."""
        params = self.model.abstract_params()
        state = jax.eval_shape(self.optimizer.init, params)
        return (
            self._described(params, P()),
            self._described(state, P()),
            self._described(self.model.batch, P("data")),
        )

    def _described(self, tree: Tree, spec: P) -> Tree:
        def described(x: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._placed(spec))

        return jax.tree.map(described, tree)

    def sharded(self, variant: str) -> wus.ShardedStep:
        """The step as it is written, through `shard_step`."""
        return wus.shard_step(
            self.step(),
            mesh=self.mesh,
            weights="split" if variant == "shard_step, split" else "whole",
            donate_argnums=(0, 1),
        )

    def program(self, variant: str) -> Program:
        """One of `VARIANTS`, with weights, state and batch of its own."""
        params = jax.device_put(self.model.params(), self._placed(P()))
        batch = jax.device_put(self.model.data(), self._placed(P("data")))
        specs = self._zero1_specs() if variant == "ZeRO-1 by hand" else P()
        shardings = jax.tree.map(self._placed, specs)
        state = jax.jit(self.optimizer.init, out_shardings=shardings)(params)
        args = (params, state, batch)
        if variant == "replicated":
            jitted = jax.jit(self.step(), donate_argnums=(0, 1))
        elif variant == "ZeRO-1 by hand":
            jitted = self.zero1()
        else:
            step = self.sharded(variant)
            compiled, seconds = staged_ours(step, args)
            return Program(variant, compiled, *step.shard(*args), seconds)
        compiled, seconds = staged(jitted, args, self.mesh)
        return Program(variant, compiled, *args, seconds)


def staged_ours(step: wus.ShardedStep, args: Sequence[Any]) -> tuple[Any, dict[str, float]]:
    """As `staged`. `plan` traces, analyses and decides; `lower` traces what is left and lowers."""
    stages: dict[str, Callable[[Any], Any]] = {
        "plan": lambda _: step.plan_for(*args),
        "lower": lambda _: step.lower(*args),
        "compile": lambda lowered: lowered.compile(),
    }
    return in_stages(stages)


def _each(change: Callable[..., Any], split: Split, tree: Tree) -> list[Any]:
    pairs = zip(split.formats, jax.tree.leaves(tree), strict=True)
    return [change(x, None if f is None else f.lo) for f, x in pairs]


def _scatter(grad: jax.Array, dim: int | None) -> jax.Array:
    if dim is None:
        return lax.pmean(grad, "data")
    return lax.psum_scatter(grad, "data", scatter_dimension=dim, tiled=True) / NUM_DEVICES


def _gather(shard: jax.Array, dim: int | None) -> jax.Array:
    return shard if dim is None else lax.all_gather(shard, "data", axis=dim, tiled=True)
