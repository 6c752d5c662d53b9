"""One replica's step; all gradients are averaged in one call."""

import jax
import optax
from jax import lax
from jax.sharding import Mesh

from tests.corpus.case import MANUAL, Case, mean_squares, mlp_params, regression

MODES = MANUAL

tx = optax.adam(1e-2)


def train_step(params, opt_state, x, y):
    loss, grads = jax.value_and_grad(mean_squares)(params, x, y)
    loss, grads = lax.pmean((loss, grads), "data")
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def make(mesh: Mesh) -> Case:
    params = mlp_params()
    return Case(train_step, (params, tx.init(params)), regression)
