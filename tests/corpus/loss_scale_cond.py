"""Dynamic loss scaling in float16; `cond` skips the update when gradients are not finite."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from tests.corpus.case import GLOBAL, Case, mean_squares, mlp_params, regression

MODES = GLOBAL

tx = optax.sgd(0.05, momentum=0.9)


@jax.jit
def train_step(params, opt_state, scale, x, y):
    loss, grads = jax.value_and_grad(lambda p: scale * mean_squares(p, x, y))(params)
    grads = jax.tree.map(lambda g: g / scale, grads)
    finite = jax.tree.reduce(lambda ok, g: ok & jnp.isfinite(g).all(), grads, jnp.bool_(True))

    def apply(args):
        params, opt_state = args
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params, opt_state = jax.lax.cond(finite, apply, lambda args: args, (params, opt_state))
    scale = jnp.where(finite, scale, scale / 2)
    return params, opt_state, scale, loss / scale


def batch(step):
    x, y = regression(step)
    if step == 1:
        y[7] = np.nan
    return x, y


def make(mesh: Mesh) -> Case:
    params = mlp_params()
    return Case(
        train_step, (params, tx.init(params), jnp.float32(64.0)), batch, all_reduced_bytes=16
    )
