"""One replica's function: float32 weights are read in bfloat16, gradients averaged in float32."""

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh

from tests.corpus.case import Case, mean_squares, mlp_params, regression

MODES = ("unchecked", "pmap")

tx = optax.sgd(0.05, momentum=0.9)


def train_step(params, opt_state, x, y):
    half, x = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (params, x))
    loss, grads = jax.value_and_grad(mean_squares)(half, x, y)
    loss, grads = lax.pmean(jax.tree.map(lambda g: g.astype(jnp.float32), (loss, grads)), "data")
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def make(mesh: Mesh) -> Case:
    params = mlp_params()
    return Case(train_step, (params, tx.init(params)), regression)
