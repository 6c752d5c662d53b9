"""Adam written by hand in a dataclass, with an integer step counter; the learning rate is given."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tests.corpus.case import GLOBAL, Case, mean_squares, mlp_params, regression

MODES = GLOBAL


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    step: jax.Array
    params: dict
    mu: dict
    nu: dict


def train_step(state: State, x, y, lr):
    loss, grads = jax.value_and_grad(mean_squares)(state.params, x, y)
    step = state.step + 1
    mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state.mu, grads)
    nu = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, state.nu, grads)
    t = step.astype(jnp.float32)
    scale = lr * jnp.sqrt(1 - 0.999**t) / (1 - 0.9**t)
    params = jax.tree.map(
        lambda p, m, v: p - scale * m / (jnp.sqrt(v) + 1e-8), state.params, mu, nu
    )
    return State(step, params, mu, nu), loss, lr


def make(mesh: Mesh) -> Case:
    params = mlp_params()
    zeros = jax.tree.map(jnp.zeros_like, params)
    state = State(jnp.int32(0), params, zeros, zeros)
    return Case(
        train_step,
        (state,),
        lambda step: (*regression(step), np.float32(0.01 / (1 + step))),
        weights=lambda s: s.params,
        aux=lambda s: (s.mu, s.nu),
    )
