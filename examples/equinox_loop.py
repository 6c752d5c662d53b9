"""Equinox and `filter_jit`: the arrays of the model are the weights.

python -m examples.equinox_loop [--steps 50] [--replicated]
"""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import wusharding as wus
from examples import common


def loss_fn(model: eqx.nn.MLP, batch: Any) -> jax.Array:
    images = batch["image"].reshape(len(batch["image"]), -1)
    return common.cross_entropy(jax.vmap(model)(images), batch["label"])


def main(argv: Sequence[str] | None = None) -> common.Report:
    args = common.parse_arguments(argv, __doc__)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    model = eqx.nn.MLP(64, 10, width_size=96, depth=2, key=jax.random.key(0))
    model = eqx.filter_shard(model, NamedSharding(mesh, P()))
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3))
    if not args.replicated:
        tx = wus.shard_updates(tx, mesh=mesh)
    state = tx.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit(donate="all-except-first")
    def train_step(batch: Any, model: Any, state: Any) -> tuple[Any, Any, jax.Array]:
        loss, grads = eqx.filter_value_and_grad(loss_fn)(model, batch)
        weights, rest = eqx.partition(model, eqx.is_inexact_array)
        if args.replicated:
            updates, state = tx.update(grads, state, weights)
            weights = optax.apply_updates(weights, updates)
        else:
            weights, state = tx.apply(grads, state, weights)
        return eqx.combine(weights, rest), state, loss

    losses = []
    for batch in common.digits(args.steps):
        batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
        model, state, loss = train_step(batch, model, state)
        losses.append(loss)
    weights = eqx.filter(model, eqx.is_inexact_array)
    return common.report(weights, losses, state, train_step, batch, model, state)


if __name__ == "__main__":
    main()
