"""Weights that the model lays side by side before it uses them: by rows, by columns, stacked, and
pieces of one vector that hold several.
"""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from tests.corpus.case import Case, normal, regression

MODES = ("auto", "explicit")

tx = optax.adam(1e-2)


def loss_fn(params, x, y):
    q, k, v = params["qkv"]
    h = jnp.tanh(x @ jnp.concatenate([q, k, v]).T)  # outputs of three layers, by rows
    h = h + jnp.concatenate(params["bias"])
    h = jnp.tanh(h @ jnp.concatenate([params["up"], params["down"]], axis=0))  # inputs, by rows
    h = jnp.tanh(h @ jnp.concatenate(params["wide"], axis=1))  # by columns
    h = h + jnp.einsum("lbi,lio->bo", jnp.stack([h, h * h]), jnp.stack(params["stack"]))
    a, b = params["flat"][:35].reshape(5, 7), params["flat"][35:].reshape(4, 7)
    out = h @ jnp.concatenate([a, b]).T
    return jnp.mean((out[:, :3] - y) ** 2)


@jax.jit
def train_step(params, opt_state, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def make(mesh: Mesh) -> Case:
    def weight(seed, *shape):
        return jnp.asarray(normal(seed, *shape, scale=0.3))

    params = {
        "qkv": (weight(1, 5, 17), weight(2, 3, 17), weight(3, 6, 17)),
        "bias": (weight(4, 5), weight(5, 9)),
        "up": weight(6, 9, 11),
        "down": weight(7, 5, 11),
        "wide": (weight(8, 11, 3), weight(9, 11, 4)),
        "stack": (weight(10, 7, 7), weight(11, 7, 7)),
        "flat": weight(12, 63),
    }
    return Case(train_step, (params, tx.init(params)), regression)
