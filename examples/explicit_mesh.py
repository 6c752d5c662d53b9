"""Flax linen on an explicit mesh: unreduced gradients, low-precision weights with float32 masters.

    python -m examples.explicit_mesh [--steps 50] [--replicated] [--bfloat16]

Each replica's gradients leave `shard_map` unreduced, which their type says, and the optimizer
reduce-scatters them. With `--bfloat16` weights, gradients and gathers have half the bytes, and the
optimizer keeps its own float32 weights, each replica a part of them.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import wusharding as wus
from examples import common
from wusharding.integrations.flax import TrainState  # was: flax.training.train_state


def parse_arguments(argv: Sequence[str] | None) -> Any:
    parser = common.make_parser(__doc__)
    parser.add_argument("--bfloat16", action="store_true", help="weights in bfloat16")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> common.Report:
    args = parse_arguments(argv)
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))

    network = common.Network()
    params = network.init(jax.random.key(0), jnp.zeros((1, 8, 8, 1)))["params"]
    if args.bfloat16:
        params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        logits = network.apply({"params": params}, batch["image"].astype(params_dtype))
        return common.cross_entropy(logits.astype(jnp.float32), batch["label"])

    params_dtype = jnp.bfloat16 if args.bfloat16 else jnp.float32

    def unreduced_grads(params: Any, batch: Any) -> tuple[jax.Array, Any]:
        own = jax.lax.pcast(params, "data", to="varying")  # else JAX sums the gradients itself
        loss, grads = jax.value_and_grad(loss_fn)(own, batch)
        mean = jax.tree.map(lambda g: g / jax.lax.axis_size("data"), grads)
        return jax.lax.pmean(loss, "data"), mean

    @jax.jit(donate_argnums=0)
    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, jax.Array]:
        if args.replicated:
            loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        else:
            loss, grads = jax.shard_map(
                unreduced_grads,
                in_specs=(P(), P("data")),
                out_specs=(P(), P(unreduced={"data"})),
            )(state.params, batch)
        return state.apply_gradients(grads=grads), loss

    with jax.set_mesh(mesh):
        tx = optax.adamw(3e-3)
        if not args.replicated:
            tx = wus.shard_updates(tx, master_dtype=jnp.float32)
        params = jax.device_put(params, whole)
        state = TrainState.create(apply_fn=network.apply, params=params, tx=tx)
        losses = []
        for batch in common.digits(args.steps):
            batch = jax.device_put(batch, split)
            state, loss = train_step(state, batch)
            losses.append(loss)
        return common.report(state.params, losses, state.opt_state, train_step, state, batch)


if __name__ == "__main__":
    main()
