"""A (data, model) mesh under `jit`: weights lie split over `model`, the compiler does the rest."""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from tests.corpus import tensor_parallel
from tests.corpus.case import Case
from tests.corpus.tensor_parallel import tx

MODES = ("auto",)
MESH = {"data": 4, "model": 2}


def loss_fn(params, x, y):
    h = jnp.tanh(x @ params["up"])
    return jnp.mean((h @ params["down"] + params["bias"] - y) ** 2)


@jax.jit
def train_step(params, opt_state, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def make(mesh: Mesh) -> Case:
    case = tensor_parallel.make(mesh)
    return Case(train_step, case.state, case.batch, state_specs=case.state_specs)
