"""Float32 weights, read in bfloat16 by the forward pass, under `jit`."""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from tests.corpus.case import GLOBAL, Case, mean_squares, mlp_params, regression

MODES = GLOBAL

tx = optax.sgd(0.05, momentum=0.9)


@jax.jit
def train_step(params, opt_state, x, y):
    def loss_fn(params):
        half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        return mean_squares(half, x.astype(jnp.bfloat16), y).astype(jnp.float32)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def make(mesh: Mesh) -> Case:
    params = mlp_params()
    # The compiler sums products over the batch in another order, and rounds sums to bfloat16.
    return Case(train_step, (params, tx.init(params)), regression, tolerance=2**-6)
