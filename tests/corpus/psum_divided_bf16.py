"""Gradients travel in bfloat16, are summed, and divided by the number of replicas by hand."""

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh

from tests.corpus.case import Case, mean_squares, mlp_params, regression

MODES = ("unchecked", "pmap")

tx = optax.sgd(0.05, momentum=0.9, nesterov=True)


def train_step(params, opt_state, x, y):
    loss, grads = jax.value_and_grad(mean_squares)(params, x, y)
    grads = jax.tree.map(lambda g: g.astype(jnp.bfloat16), grads)
    grads = lax.psum(grads, "data")
    replicas = lax.psum(1, "data")
    grads = jax.tree.map(lambda g: g.astype(jnp.float32) / replicas, grads)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, lax.pmean(loss, "data")


def make(mesh: Mesh) -> Case:
    params = mlp_params()
    return Case(train_step, (params, tx.init(params)), regression)
