"""Flax linen in `pmap`, with `replicate` and `unreplicate`: gradients are reduce-scattered.

    python -m examples.pmap_replicate [--steps 50] [--replicated]

The state is made inside of `pmap`, where each device makes its own part of it; `replicate` would
copy one device's state to all. Gradients stay local: the optimizer averages them.
"""

from collections.abc import Sequence
from typing import Any

import jax
import optax
from flax import jax_utils

import wusharding as wus
from examples import common
from wusharding.integrations.flax import TrainState  # was: flax.training.train_state


def main(argv: Sequence[str] | None = None) -> common.Report:
    args = common.parse_arguments(argv, __doc__)
    network = common.Network()
    params = network.init(jax.random.key(0), jax.numpy.zeros((1, 8, 8, 1)))["params"]
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.lamb(1e-2))

    def create(params: Any) -> TrainState:
        return TrainState.create(apply_fn=network.apply, params=params, tx=tx)

    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, jax.Array]:
        def loss_fn(params: Any) -> jax.Array:
            logits = state.apply_fn({"params": params}, batch["image"])
            return common.cross_entropy(logits, batch["label"])

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        if args.replicated:
            grads = jax.lax.pmean(grads, "data")
        return state.apply_gradients(grads=grads), jax.lax.pmean(loss, "data")

    if args.replicated:
        state = jax_utils.replicate(create(params))
    else:
        tx = wus.shard_updates(tx)
        state = jax.pmap(create, axis_name="data")(jax_utils.replicate(params))

    step = jax.pmap(train_step, axis_name="data", donate_argnums=0)
    losses = []
    for batch in common.digits(args.steps):
        batch = jax.tree.map(lambda x: x.reshape(jax.device_count(), -1, *x.shape[1:]), batch)
        state, loss = step(state, batch)
        losses.append(loss[0])
    params = jax_utils.unreplicate(state.params)
    return common.report(params, losses, state.opt_state, step, state, batch)


if __name__ == "__main__":
    main()
