"""An explicit mesh: weights `reduced`, so gradients come out `unreduced`, and are resharded."""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, reshard
from jax.sharding import PartitionSpec as P

from tests.corpus.case import Case, mlp_params, regression

MODES = ("explicit",)

tx = optax.adamw(1e-2)


def loss_fn(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["w1"]) @ params["w2"] - y) ** 2)


def train_step(params, opt_state, x, y):
    local = jax.tree.map(lambda p: reshard(p, P(reduced={"data"})), params)
    loss, grads = jax.value_and_grad(loss_fn)(local, x, y)
    grads = jax.tree.map(lambda g: reshard(g, P()), grads)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def make(mesh: Mesh) -> Case:
    params = mlp_params()
    del params["b1"]
    return Case(train_step, (params, tx.init(params)), regression)
