"""No library: weights in a dict, `jit` of `shard_map`. Gradients are reduce-scattered.

python -m examples.plain_pytree [--steps 50] [--replicated]
"""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import wusharding as wus
from examples import common


def make_params() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    sizes = (64, 128, 96, 10)
    params = {}
    for i, (rows, columns) in enumerate(itertools.pairwise(sizes)):
        params[f"w{i}"] = (rng.normal(size=(rows, columns)) / rows**0.5).astype(np.float32)
        params[f"b{i}"] = np.zeros(columns, np.float32)
    return params


def loss_fn(params: Any, batch: Any) -> jax.Array:
    x = batch["image"].reshape(len(batch["image"]), -1)
    x = jnp.tanh(x @ params["w0"] + params["b0"])
    x = jnp.tanh(x @ params["w1"] + params["b1"])
    return common.cross_entropy(x @ params["w2"] + params["b2"], batch["label"])


def main(argv: Sequence[str] | None = None) -> common.Report:
    args = common.parse_arguments(argv, __doc__)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    params = jax.device_put(make_params(), NamedSharding(mesh, P()))
    optimizer = optax.contrib.muon(2e-2)
    tx = wus.shard_updates(optimizer, mesh=mesh)

    def train_step(params: Any, state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        own = jax.lax.pcast(params, "data", to="varying")  # else JAX sums the gradients itself
        loss, grads = jax.value_and_grad(loss_fn)(own, batch)
        if args.replicated:
            updates, state = optimizer.update(jax.lax.pmean(grads, "data"), state, params)
            params = optax.apply_updates(params, updates)
        else:
            params, state = tx.apply(grads, state, params)
        return params, state, jax.lax.pmean(loss, "data")

    if args.replicated:
        state, specs = jax.device_put(optimizer.init(params), NamedSharding(mesh, P())), P()
    else:
        state, specs = tx.init(params), tx.state_specs(params)
        print(tx.plan(params), end="\n\n")

    ins, outs = (P(), specs, P("data")), (P(), specs, P())
    mapped = jax.shard_map(train_step, mesh=mesh, in_specs=ins, out_specs=outs)
    step = jax.jit(mapped, donate_argnums=(0, 1))
    losses = []
    for batch in common.digits(args.steps):
        batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
        params, state, loss = step(params, state, batch)
        losses.append(loss)
    return common.report(params, losses, state, step, params, state, batch)


if __name__ == "__main__":
    main()
