"""A (data, model) mesh: a layer split by columns and rows, with a `psum` over `model`."""

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tests.corpus.case import Case, normal, regression

MODES = ("unchecked", "checked")
MESH = {"data": 4, "model": 2}

tx = optax.adam(1e-2)


def loss_fn(params, x, y):
    h = jnp.tanh(x @ params["up"])
    out = lax.psum(h @ params["down"], "model") + params["bias"]
    return jnp.mean((out - y) ** 2)


def train_step(params, opt_state, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    grads = lax.pmean(grads, "data")
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, lax.pmean(loss, "data")


def make(mesh: Mesh) -> Case:
    params = {
        "up": jnp.asarray(normal(1, 17, 14, scale=0.3)),
        "down": jnp.asarray(normal(2, 14, 3, scale=0.3)),
        "bias": jnp.zeros(3),
    }
    specs = {"up": P(None, "model"), "down": P("model"), "bias": P()}
    opt_state = tx.init(params)
    state_specs = optax.tree.map_params(
        tx, lambda _, spec: spec, opt_state, specs, transform_non_params=lambda _: P()
    )
    return Case(
        train_step,
        (params, opt_state),
        regression,
        state_specs=(specs, state_specs),
    )
