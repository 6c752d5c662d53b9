"""A weight is frozen by zeroing its update after Adam has made one: its moments go on."""

import jax
import optax
from jax.sharding import Mesh

from tests.corpus.case import Case, mean_squares, mlp_params, regression

MODES = ("auto",)

tx = optax.chain(
    optax.adam(1e-2),
    optax.masked(optax.set_to_zero(), {"w1": True, "b1": False, "w2": False}),
)


@jax.jit
def train_step(params, opt_state, x, y):
    loss, grads = jax.value_and_grad(mean_squares)(params, x, y)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def make(mesh: Mesh) -> Case:
    params = mlp_params()
    return Case(train_step, (params, tx.init(params)), regression)
