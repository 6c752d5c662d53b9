"""`with_sharding_constraint` on the activations and on the gradients."""

import jax
import jax.numpy as jnp
import optax
from jax.lax import with_sharding_constraint
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.corpus.case import Case, mlp_params, regression

MODES = ("auto", "explicit")

tx = optax.chain(optax.clip(0.1), optax.adam(1e-2))


def make_step(mesh):
    rows = NamedSharding(mesh, P("data"))
    whole = NamedSharding(mesh, P())

    def loss_fn(params, x, y):
        h = jnp.tanh(x @ params["w1"] + params["b1"])
        h = with_sharding_constraint(h, rows)
        out = with_sharding_constraint(h @ params["w2"], rows)
        return jnp.mean((out - y) ** 2)

    @jax.jit
    def train_step(params, opt_state, x, y):
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        grads = with_sharding_constraint(grads, whole)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return train_step


def make(mesh: Mesh) -> Case:
    params = mlp_params()
    return Case(make_step(mesh), (params, tx.init(params)), regression)
