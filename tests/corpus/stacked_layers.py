"""Layers whose weights lie stacked, taken one by one: in a Python loop, and by a traced index."""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from tests.corpus.case import Case, normal, regression

MODES = ("auto", "explicit")

tx = optax.adam(1e-2)


def loss_fn(params, x, y):
    h = x @ params["in"]
    for i in range(3):
        h = h + jnp.tanh(h @ params["layers"][i] + params["bias"][i])
    h = jax.lax.fori_loop(0, 2, lambda i, h: h + jnp.sin(h @ params["loop"][i]), h)
    return jnp.mean((h[:, :3] - y) ** 2)


@jax.jit
def train_step(params, opt_state, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def make(mesh: Mesh) -> Case:
    params = {
        "in": jnp.asarray(normal(1, 17, 5, scale=0.3)),
        "layers": jnp.asarray(normal(2, 3, 5, 5, scale=0.3)),
        "bias": jnp.asarray(normal(3, 3, 5, scale=0.3)),
        "loop": jnp.asarray(normal(4, 2, 5, 5, scale=0.3)),
    }
    return Case(train_step, (params, tx.init(params)), regression)
