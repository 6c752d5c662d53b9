"""Flax linen and `TrainState` in `jit`, with batch norm and dropout: two lines change.

    python -m examples.linen_train_state [--steps 50] [--replicated] [--whole-step]

In a global view XLA reduces the gradients where they arise, so the optimizer gets them whole and
slices them; update and state are sharded all the same. With `--whole-step` the update is found in
the step instead, the optimizer stays as it was, and the gradients are reduce-scattered.
"""

from collections.abc import Sequence
from typing import Any

import jax
import optax
from flax import linen as nn
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import wusharding as wus
from examples import common
from wusharding.integrations.flax import TrainState  # was: flax.training.train_state


class Network(nn.Module):
    @nn.compact
    def __call__(self, images: jax.Array, *, train: bool) -> jax.Array:
        x = nn.Conv(16, (3, 3), use_bias=False)(images)
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
        x = nn.relu(nn.Dense(64)(x.reshape(len(x), -1)))
        return nn.Dense(10)(nn.Dropout(0.2, deterministic=not train)(x))


class State(TrainState):
    batch_stats: Any
    dropout_key: jax.Array


def train_step(state: State, batch: Any) -> tuple[State, jax.Array]:
    def loss_fn(params: Any) -> Any:
        logits, updated = state.apply_fn(
            {"params": params, "batch_stats": state.batch_stats},
            batch["image"],
            train=True,
            mutable=["batch_stats"],
            rngs={"dropout": jax.random.fold_in(state.dropout_key, state.step)},
        )
        return common.cross_entropy(logits, batch["label"]), updated["batch_stats"]

    (loss, batch_stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads, batch_stats=batch_stats), loss


def main(argv: Sequence[str] | None = None) -> common.Report:
    parser = common.make_parser(__doc__)
    parser.add_argument("--whole-step", action="store_true", help="shard the step as a whole")
    args = parser.parse_args(argv)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    batches = (jax.device_put(batch, split) for batch in common.digits(args.steps))

    network = Network()
    images = jax.numpy.zeros((1, 8, 8, 1))
    variables = jax.device_put(network.init(jax.random.key(0), images, train=False), whole)
    tx = optax.adamw(3e-3)
    if not args.replicated and not args.whole_step:
        tx = wus.shard_updates(tx, mesh=mesh)
    state = State.create(
        apply_fn=network.apply,
        params=variables["params"],
        tx=tx,
        batch_stats=variables["batch_stats"],
        dropout_key=jax.device_put(jax.random.key(1), whole),
    )

    step = jax.jit(train_step, donate_argnums=0)
    if args.whole_step:
        step = wus.shard_step(step, mesh=mesh)
    losses = []
    for batch in batches:
        state, loss = step(state, batch)
        losses.append(loss)
    return common.report(state.params, losses, state.opt_state, step, state, batch)


if __name__ == "__main__":
    main()
