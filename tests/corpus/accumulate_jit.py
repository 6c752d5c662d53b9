"""Gradients are added over microbatches in a `scan`, under `jit`."""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tests.corpus.case import Case, mean_squares, mlp_params, regression

MODES = ("auto", "explicit")

tx = optax.adam(1e-2)


@jax.jit
def train_step(params, opt_state, xs, ys):
    def add(total, micro):
        found = jax.value_and_grad(mean_squares)(params, *micro)
        return jax.tree.map(jnp.add, total, found), None

    start = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
    (loss, grads), _ = jax.lax.scan(add, start, (xs, ys))
    loss, grads = jax.tree.map(lambda t: t / len(xs), (loss, grads))
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def batch(step):
    x, y = regression(step, 32)
    return x.reshape(2, 16, -1), y.reshape(2, 16, -1)


def make(mesh: Mesh) -> Case:
    params = mlp_params()
    return Case(
        train_step,
        (params, tx.init(params)),
        batch,
        batch_specs=(P(None, "data"), P(None, "data")),
    )
