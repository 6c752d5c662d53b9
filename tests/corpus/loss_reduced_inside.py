"""Under `check_vma=True`: the loss is averaged inside of the differentiated function."""

import jax
import optax
from jax import lax
from jax.sharding import Mesh

from tests.corpus.case import Case, mean_squares, mlp_params, regression

MODES = ("checked",)

tx = optax.rmsprop(1e-2, momentum=0.9)


def train_step(params, opt_state, x, y):
    def loss_fn(params):
        return lax.pmean(mean_squares(params, x, y), "data")

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def make(mesh: Mesh) -> Case:
    params = mlp_params()
    return Case(train_step, (params, tx.init(params)), regression)
