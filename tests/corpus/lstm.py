"""A recurrent cell in a `scan` over time, its gradients clipped by value."""

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh

from tests.corpus.case import Case, normal

MODES = ("unchecked", "pmap")

UNITS = 9

tx = optax.chain(optax.clip(0.05), optax.rmsprop(1e-2, momentum=0.9))


def cell(params, carry, x):
    c, h = carry
    gates = jnp.concatenate([x, h], -1) @ params["w"] + params["b"]
    i, f, g, o = jnp.split(gates, 4, -1)
    c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return (c, h), h


def loss_fn(params, xs, y):
    start = (jnp.zeros((len(xs), UNITS)), jnp.zeros((len(xs), UNITS)))
    (_, h), _ = lax.scan(lambda c, x: cell(params, c, x), start, xs.swapaxes(0, 1))
    return jnp.mean((h @ params["out"] - y) ** 2)


def train_step(params, opt_state, xs, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, xs, y)
    grads = lax.pmean(grads, "data")
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, lax.pmean(loss, "data")


def init():
    params = {
        "w": normal(1, 5 + UNITS, 4 * UNITS, scale=0.3),
        "b": normal(2, 4 * UNITS, scale=0.3),
        "out": normal(3, UNITS, 3),
    }
    return jax.tree.map(jnp.asarray, params)


def batch(step):
    return normal(step, 16, 6, 5), normal(step, 16, 3)


def make(mesh: Mesh) -> Case:
    params = init()
    return Case(train_step, (params, tx.init(params)), batch)
