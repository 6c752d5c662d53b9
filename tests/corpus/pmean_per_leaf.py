"""Gradients are averaged leaf by leaf, and clipped by their global norm afterwards."""

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh

from tests.corpus.case import Case, mean_squares, mlp_params, regression

MODES = ("unchecked", "checked", "pmap")

tx = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9))


def train_step(params, opt_state, x, y):
    loss, grads = jax.value_and_grad(mean_squares)(params, x, y)
    grads = jax.tree.map(lambda g: lax.pmean(g, axis_name="data"), grads)
    updates, opt_state = tx.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    metrics = {"loss": lax.pmean(loss, "data"), "step_norm": jnp.sqrt(optax.tree.norm(updates))}
    return params, opt_state, metrics


def make(mesh: Mesh) -> Case:
    params = mlp_params()
    return Case(train_step, (params, tx.init(params)), regression, all_reduced_bytes=12)
