"""Noise that is the same on all replicas is added to averaged gradients; a key goes round."""

import jax
import optax
from jax import lax
from jax.sharding import Mesh

from tests.corpus.case import Case, mean_squares, mlp_params, regression

MODES = ("unchecked", "pmap")

tx = optax.adam(1e-2)


def train_step(params, opt_state, key, x, y):
    key, noise_key = jax.random.split(key)
    loss, grads = jax.value_and_grad(mean_squares)(params, x, y)
    grads = lax.pmean(grads, "data")
    leaves, treedef = jax.tree.flatten(grads)
    keys = jax.random.split(noise_key, len(leaves))
    noisy = [g + 0.01 * jax.random.normal(k, g.shape) for g, k in zip(leaves, keys, strict=True)]
    updates, opt_state = tx.update(treedef.unflatten(noisy), opt_state, params)
    return optax.apply_updates(params, updates), opt_state, key, lax.pmean(loss, "data")


def make(mesh: Mesh) -> Case:
    params = mlp_params()
    return Case(train_step, (params, tx.init(params), jax.random.PRNGKey(3)), regression)
