"""Adafactor with factored statistics, under `jit`."""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from tests.corpus.case import GLOBAL, Case, normal, regression

MODES = GLOBAL

tx = optax.adafactor(1e-2, min_dim_size_to_factor=8, momentum=0.9)


def loss_fn(params, x, y):
    for w in params["hidden"]:
        x = jax.nn.silu(x @ w)
    return jnp.mean((x @ params["out"] - y) ** 2)


@jax.jit
def train_step(params, opt_state, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def make(mesh: Mesh) -> Case:
    params = {
        "hidden": [
            jnp.asarray(normal(i, *s, scale=0.3)) for i, s in enumerate([(17, 19), (19, 11)])
        ],
        "out": jnp.asarray(normal(3, 11, 3)),
    }
    # Sums along the split dims of two arrays, means and norms, the loss.
    return Case(
        train_step,
        (params, tx.init(params)),
        regression,
        all_reduced_bytes=4 * (17 + 11 + 10),
    )
