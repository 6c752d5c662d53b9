"""A moving average of the weights, which is only kept."""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from tests.corpus.case import GLOBAL, Case, mean_squares, mlp_params, regression

MODES = GLOBAL

tx = optax.adam(1e-2)


@jax.jit
def train_step(params, state, x, y):
    loss, grads = jax.value_and_grad(mean_squares)(params, x, y)
    updates, opt_state = tx.update(grads, state["opt"], params)
    params = optax.apply_updates(params, updates)
    ema = optax.incremental_update(params, state["ema"], 0.1)
    return params, {"opt": opt_state, "ema": ema}, loss


def make(mesh: Mesh) -> Case:
    params = mlp_params()
    state = {"opt": tx.init(params), "ema": jax.tree.map(jnp.copy, params)}
    return Case(train_step, (params, state), regression)
