"""Flax linen, `lax.scan` over steps in `shard_map`: the sharded state stays in the loop's carry.

    python -m examples.scan_steps [--steps 50] [--replicated]

One dispatch takes many steps. In each, gradients are reduce-scattered and weights are gathered.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import wusharding as wus
from examples import common
from wusharding.integrations.flax import TrainState, specs  # was: flax.training.train_state

STEPS_A_CALL = 5


def main(argv: Sequence[str] | None = None) -> common.Report:
    args = common.parse_arguments(argv, __doc__)
    if args.steps % STEPS_A_CALL:
        raise SystemExit(f"--steps {args.steps}: must be a multiple of {STEPS_A_CALL}")
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))

    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, jax.Array]:
        def loss_fn(params: Any) -> jax.Array:
            logits = state.apply_fn({"params": params}, batch["image"])
            return common.cross_entropy(logits, batch["label"])

        own = jax.lax.pcast(state.params, "data", to="varying")  # else JAX sums the gradients
        loss, grads = jax.value_and_grad(loss_fn)(own)
        if args.replicated:
            grads = jax.lax.pmean(grads, "data")
        return state.apply_gradients(grads=grads), jax.lax.pmean(loss, "data")

    def train_steps(state: TrainState, batches: Any) -> tuple[TrainState, jax.Array]:
        return jax.lax.scan(train_step, state, batches)

    network = common.Network()
    params = network.init(jax.random.key(0), np.zeros((1, 8, 8, 1)))["params"]
    params = jax.device_put(params, NamedSharding(mesh, P()))
    tx = optax.adamw(3e-3)
    if not args.replicated:
        tx = wus.shard_updates(tx, mesh=mesh)
    state = TrainState.create(apply_fn=network.apply, params=params, tx=tx)
    lies = P()
    if not args.replicated:
        lies = specs(state)

    mapped = jax.shard_map(
        train_steps, mesh=mesh, in_specs=(lies, P(None, "data")), out_specs=(lies, P())
    )
    steps = jax.jit(mapped, donate_argnums=0)

    losses: list[jax.Array] = []
    waiting: list[Any] = []
    for batch in common.digits(args.steps):
        waiting.append(batch)
        if len(waiting) == STEPS_A_CALL:
            batches = jax.tree.map(lambda *xs: np.stack(xs), *waiting)
            batches = jax.device_put(batches, NamedSharding(mesh, P(None, "data")))
            state, some = steps(state, batches)
            losses.extend(some)
            waiting.clear()
    return common.report(state.params, losses, state.opt_state, steps, state, batches)


if __name__ == "__main__":
    main()
