"""Dropout: a typed key is split in each step and folded with the replica's index."""

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh

from tests.corpus.case import Case, mlp_params, regression

MODES = ("unchecked", "pmap")

tx = optax.adam(1e-2)


def train_step(state, x, y):
    key, dropout_key = jax.random.split(state["key"])
    dropout_key = jax.random.fold_in(dropout_key, lax.axis_index("data"))

    def loss_fn(params):
        h = jnp.tanh(x @ params["w1"] + params["b1"])
        keep = jax.random.bernoulli(dropout_key, 0.8, h.shape)
        return jnp.mean((jnp.where(keep, h / 0.8, 0) @ params["w2"] - y) ** 2)

    loss, grads = lax.pmean(jax.value_and_grad(loss_fn)(state["params"]), "data")
    updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
    new = {
        "step": state["step"] + 1,
        "key": key,
        "params": optax.apply_updates(state["params"], updates),
        "opt_state": opt_state,
    }
    return new, loss


def make(mesh: Mesh) -> Case:
    params = mlp_params()
    state = {
        "step": jnp.int32(0),
        "key": jax.random.key(5),
        "params": params,
        "opt_state": tx.init(params),
    }
    return Case(
        train_step,
        (state,),
        regression,
        weights=lambda s: s["params"],
        aux=lambda s: s["opt_state"],
    )
