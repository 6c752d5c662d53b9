"""Flax nnx and `nnx.jit`, with batch norm, dropout and metrics: two lines change.

    python -m examples.nnx_jit [--steps 50] [--replicated]

Random numbers, statistics and metrics are those of the whole batch, as on one device.
"""

from collections.abc import Sequence
from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import wusharding as wus
from examples import common
from wusharding.integrations.flax import Optimizer  # was: nnx.Optimizer


class Network(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(1, 16, (3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.hidden = nnx.Linear(16 * 64, 64, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.logits = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = nnx.relu(self.norm(self.conv(images)))
        x = nnx.relu(self.hidden(x.reshape(len(x), -1)))
        return self.logits(self.dropout(x))


@nnx.jit
def train_step(model: Network, optimizer: Any, metrics: nnx.MultiMetric, batch: Any) -> jax.Array:
    def loss_fn(model: Network) -> tuple[jax.Array, jax.Array]:
        logits = model(batch["image"])
        return common.cross_entropy(logits, batch["label"]), logits

    (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
    optimizer.update(model, grads)
    metrics.update(loss=loss, logits=logits, labels=batch["label"])
    return loss


def main(argv: Sequence[str] | None = None) -> common.Report:
    args = common.parse_arguments(argv, __doc__)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))

    model = jax.device_put(Network(nnx.Rngs(0)), whole)
    tx = optax.adamw(3e-3)
    if not args.replicated:
        tx = wus.shard_updates(tx, mesh=mesh)
    optimizer = Optimizer(model, tx, wrt=nnx.Param)
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy())
    metrics = jax.device_put(metrics, whole)

    losses = []
    for batch in common.digits(args.steps):
        batch = jax.device_put(batch, split)
        losses.append(train_step(model, optimizer, metrics, batch))
    for name, value in metrics.compute().items():
        print(f"{name:<16} {value:.4f}, mean of all steps")
    return common.report(
        nnx.to_pure_dict(nnx.state(model, nnx.Param)),
        losses,
        nnx.state(optimizer.opt_state),
        train_step,
        model,
        optimizer,
        metrics,
        batch,
    )


if __name__ == "__main__":
    main()
