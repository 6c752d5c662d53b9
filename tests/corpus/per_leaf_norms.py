"""The norm of each gradient and of each update is logged."""

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh

from tests.corpus.case import Case, mean_squares, mlp_params, regression

MODES = ("unchecked", "checked", "pmap")

tx = optax.adam(1e-2)


def train_step(params, opt_state, x, y):
    loss, grads = jax.value_and_grad(mean_squares)(params, x, y)
    grads = lax.pmean(grads, "data")
    updates, opt_state = tx.update(grads, opt_state, params)
    metrics = {
        "loss": lax.pmean(loss, "data"),
        "grad_norm": jax.tree.map(jnp.linalg.norm, grads),
        "update_norm": jax.tree.map(jnp.linalg.norm, updates),
        "grad_max": jax.tree.map(lambda g: jnp.max(jnp.abs(g)), grads),
    }
    return optax.apply_updates(params, updates), opt_state, metrics


def make(mesh: Mesh) -> Case:
    params = mlp_params()
    return Case(train_step, (params, tx.init(params)), regression, all_reduced_bytes=40)
