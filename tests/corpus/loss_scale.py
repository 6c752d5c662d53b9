"""Dynamic loss scaling; a step whose gradients are not finite is skipped."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh

from tests.corpus.case import MANUAL, Case, mean_squares, mlp_params, regression

MODES = MANUAL

tx = optax.adam(1e-2)


def train_step(params, state, x, y):
    opt_state, scale, good_steps = state

    def loss_fn(params):
        return scale * mean_squares(params, x, y)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    grads = jax.tree.map(lambda g: lax.pmean(g, "data") / scale, grads)
    finite = jnp.all(jnp.array([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]))
    updates, new_opt_state = tx.update(grads, opt_state, params)
    new_params = optax.apply_updates(params, updates)
    params, opt_state = jax.tree.map(
        lambda new, old: jnp.where(finite, new, old),
        (new_params, new_opt_state),
        (params, opt_state),
    )
    good_steps = jnp.where(finite, good_steps + 1, 0)
    scale = jnp.where(finite, jnp.where(good_steps % 2 == 0, scale * 2, scale), scale / 2)
    metrics = {"loss": lax.pmean(loss, "data") / scale, "scale": scale, "finite": finite}
    return params, (opt_state, scale, good_steps), metrics


def batch(step):
    x, y = regression(step)
    if step == 2:
        x[5] = np.inf
    return x, y


def make(mesh: Mesh) -> Case:
    params = mlp_params()
    state = (tx.init(params), jnp.float32(1024.0), jnp.int32(0))
    return Case(
        train_step, (params, state), batch, aux=lambda params, state: state[0], all_reduced_bytes=16
    )
