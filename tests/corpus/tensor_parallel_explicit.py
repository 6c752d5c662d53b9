"""An explicit (data, model) mesh: weights lie split over `model`."""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.corpus.case import Case, normal, regression

MODES = ("explicit",)
MESH = {"data": 4, "model": 2}

tx = optax.adam(1e-2)


def make_step(rows):
    def loss_fn(params, x, y):
        h = jnp.tanh(x @ params["up"])
        out = jnp.dot(h, params["down"], out_sharding=rows) + params["bias"]
        return jnp.mean((out - y) ** 2)

    @jax.jit
    def train_step(params, opt_state, x, y):
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return train_step


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
    rows = NamedSharding(mesh, P("data"))
    return Case(make_step(rows), (params, opt_state), regression, state_specs=(specs, state_specs))
