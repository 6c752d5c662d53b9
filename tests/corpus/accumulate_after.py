"""Gradients are added over microbatches in a `scan`, and averaged once after it."""

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh

from tests.corpus.case import MANUAL, Case, mean_squares, mlp_params, regression

MODES = MANUAL

MICROBATCHES = 2

tx = optax.adam(1e-2)


def train_step(params, opt_state, x, y):
    local = jax.tree.map(lambda p: lax.pcast(p, "data", to="varying"), params)

    def add(total, micro):
        found = jax.value_and_grad(mean_squares)(local, *micro)
        return jax.tree.map(jnp.add, total, found), None

    start = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
    start = jax.tree.map(lambda z: lax.pcast(z, "data", to="varying"), start)
    micros = [a.reshape(MICROBATCHES, -1, *a.shape[1:]) for a in (x, y)]
    total, _ = lax.scan(add, start, micros)
    loss, grads = lax.pmean(jax.tree.map(lambda t: t / MICROBATCHES, total), "data")
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def make(mesh: Mesh) -> Case:
    params = mlp_params()
    return Case(train_step, (params, tx.init(params)), regression)
