"""Losses and predictions per example are returned beside the mean."""

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tests.corpus.case import MANUAL, Case, mlp, mlp_params, regression

MODES = MANUAL

tx = optax.adam(1e-2)


def train_step(params, opt_state, x, y):
    def loss_fn(params):
        predicted = mlp(params, x)
        losses = jnp.mean((predicted - y) ** 2, axis=-1)
        return jnp.mean(losses), (losses, predicted)

    (loss, (losses, predicted)), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    grads = lax.pmean(grads, "data")
    updates, opt_state = tx.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    return params, opt_state, lax.pmean(loss, "data"), losses, predicted


def make(mesh: Mesh) -> Case:
    params = mlp_params()
    return Case(
        train_step,
        (params, tx.init(params)),
        regression,
        metrics_specs=(P(), P("data"), P("data")),
    )
