"""A step under `jit` with no collective in sight; it donates its state."""

import functools

import jax
import optax
from jax.sharding import Mesh

from tests.corpus.case import GLOBAL, Case, mean_squares, mlp_params, regression

MODES = GLOBAL

tx = optax.adamw(1e-2, weight_decay=1e-2)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def train_step(params, opt_state, x, y):
    loss, grads = jax.value_and_grad(mean_squares)(params, x, y)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def make(mesh: Mesh) -> Case:
    params = mlp_params()
    return Case(train_step, (params, tx.init(params)), regression)
