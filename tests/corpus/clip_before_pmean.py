"""Each replica clips its own gradients before they are averaged."""

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh

from tests.corpus.case import MANUAL, Case, mean_squares, mlp_params, regression

MODES = MANUAL

tx = optax.adam(1e-2)


def clip(grads, limit):
    norm = optax.tree.norm(grads)
    return jax.tree.map(lambda g: g * jnp.minimum(1.0, limit / norm), grads), norm


def train_step(params, opt_state, x, y):
    loss, grads = jax.value_and_grad(mean_squares)(params, x, y)
    grads, norm = clip(grads, 0.5)
    grads = lax.pmean(grads, "data")
    updates, opt_state = tx.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    return params, opt_state, (lax.pmean(loss, "data"), lax.pmax(norm, "data"))


def make(mesh: Mesh) -> Case:
    params = mlp_params()
    return Case(train_step, (params, tx.init(params)), regression, all_reduced_bytes=8)
