"""Losses per example are returned, under `jit`."""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from tests.corpus.case import GLOBAL, Case, mlp, mlp_params, regression

MODES = GLOBAL

tx = optax.adam(1e-2)


@jax.jit
def train_step(params, opt_state, x, y):
    def loss_fn(params):
        losses = jnp.mean((mlp(params, x) - y) ** 2, axis=-1)
        return jnp.mean(losses), losses

    (loss, losses), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, {"loss": loss, "losses": losses}


def make(mesh: Mesh) -> Case:
    params = mlp_params()
    return Case(train_step, (params, tx.init(params)), regression)
