"""The recurrent cell under `jit`."""

import jax
import optax
from jax.sharding import Mesh

from tests.corpus import lstm
from tests.corpus.case import Case

MODES = ("auto",)


@jax.jit
def train_step(params, opt_state, xs, y):
    loss, grads = jax.value_and_grad(lstm.loss_fn)(params, xs, y)
    updates, opt_state = lstm.tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def make(mesh: Mesh) -> Case:
    params = lstm.init()
    return Case(train_step, (params, lstm.tx.init(params)), lstm.batch)
