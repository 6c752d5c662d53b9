"""Gradients are averaged in each microbatch: a reduction in the loop, where one would do."""

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh

from tests.corpus.case import Case, mean_squares, mlp_params, regression

MODES = ("unchecked", "pmap")

MICROBATCHES = 2

tx = optax.adam(1e-2)


def train_step(params, opt_state, x, y):
    def add(total, micro):
        found = lax.pmean(jax.value_and_grad(mean_squares)(params, *micro), "data")
        return jax.tree.map(jnp.add, total, found), None

    start = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
    micros = [a.reshape(MICROBATCHES, -1, *a.shape[1:]) for a in (x, y)]
    total, _ = lax.scan(add, start, micros)
    loss, grads = jax.tree.map(lambda t: t / MICROBATCHES, total)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def make(mesh: Mesh) -> Case:
    params = mlp_params()
    return Case(train_step, (params, tx.init(params)), regression)
