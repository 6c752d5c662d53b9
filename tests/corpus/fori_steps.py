"""Several steps on one batch: a `fori_loop` of the whole step."""

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh

from tests.corpus.case import Case, mean_squares, mlp_params, regression

MODES = ("unchecked", "checked", "pmap")

tx = optax.sgd(0.05, momentum=0.9)


def train_steps(params, opt_state, x, y):
    def step(_, carry):
        params, opt_state, _ = carry
        loss, grads = jax.value_and_grad(mean_squares)(params, x, y)
        grads = lax.pmean(grads, "data")
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, lax.pmean(loss, "data")

    return lax.fori_loop(0, 3, step, (params, opt_state, jnp.zeros(())))


def make(mesh: Mesh) -> Case:
    params = mlp_params()
    return Case(train_steps, (params, tx.init(params)), regression)
