"""Muon for matrices, Adam for the rest."""

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh

from tests.corpus.case import Case, normal, regression

MODES = ("unchecked", "checked", "pmap")

tx = optax.contrib.muon(1e-2)


def loss_fn(params, x, y):
    h = jnp.tanh(x @ params["w1"] + params["b1"])
    return jnp.mean((jnp.tanh(h @ params["w2"]) @ params["w3"] - y) ** 2)


def train_step(params, opt_state, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    grads = lax.pmean(grads, "data")
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, lax.pmean(loss, "data")


def make(mesh: Mesh) -> Case:
    params = {
        "w1": jnp.asarray(normal(1, 17, 61, scale=0.2)),
        "b1": jnp.asarray(normal(2, 61)),
        "w2": jnp.asarray(normal(3, 61, 35, scale=0.2)),
        "w3": jnp.asarray(normal(4, 35, 3, scale=0.2)),
    }
    # The loss, two norms, and the products of three columns in five Newton-Schulz iterations.
    return Case(
        train_step,
        (params, tx.init(params)),
        regression,
        all_reduced_bytes=4 * (1 + 2 + 5 * 3 * 3 * 3),
    )
