"""All weights in one vector, as `ravel_pytree` makes it; a part of one of them is used."""

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh

from tests.corpus.case import Case, mlp, mlp_params, regression

MODES = ("auto",)

tx = optax.adam(1e-2)


def make(mesh: Mesh) -> Case:
    flat, unravel = ravel_pytree(mlp_params())

    @jax.jit
    def train_step(flat, opt_state, x, y):
        def loss_fn(flat):
            params = unravel(flat)
            skip = x[:, :9] @ params["w1"][:9, :3]
            return jnp.mean((mlp(params, x) + skip - y) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(flat)
        updates, opt_state = tx.update(grads, opt_state, flat)
        return optax.apply_updates(flat, updates), opt_state, loss

    return Case(train_step, (flat, tx.init(flat)), regression)
