"""An encoder and a head with an optimizer each; the head's learning rate is part of the state."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from tests.corpus.case import Case, normal, regression

MODES = ("auto", "explicit")

encoder_tx = optax.adamw(1e-2)
head_tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.05, momentum=0.9)


class State(NamedTuple):
    step: jax.Array
    encoder: dict
    head: jax.Array
    encoder_opt: optax.OptState
    head_opt: optax.OptState


def loss_fn(encoder, head, x, y):
    h = jax.nn.relu(x @ encoder["w"]) + jnp.tanh(x @ encoder["v"])
    return jnp.mean(jnp.abs(h @ head - y))


@jax.jit
def train_step(state, x, y):
    loss, (g_encoder, g_head) = jax.value_and_grad(loss_fn, (0, 1))(state.encoder, state.head, x, y)
    updates, encoder_opt = encoder_tx.update(g_encoder, state.encoder_opt, state.encoder)
    encoder = optax.apply_updates(state.encoder, updates)
    updates, head_opt = head_tx.update(g_head, state.head_opt, state.head)
    head = optax.apply_updates(state.head, updates)
    head_opt.hyperparams["learning_rate"] = head_opt.hyperparams["learning_rate"] * 0.9
    return State(state.step + 1, encoder, head, encoder_opt, head_opt), loss


def make(mesh: Mesh) -> Case:
    encoder = {"w": jnp.asarray(normal(1, 17, 13)), "v": jnp.asarray(normal(2, 17, 13))}
    head = jnp.asarray(normal(3, 13, 3))
    state = State(jnp.int32(0), encoder, head, encoder_tx.init(encoder), head_tx.init(head))
    return Case(
        train_step,
        (state,),
        regression,
        weights=lambda s: (s.encoder, s.head),
        aux=lambda s: (s.encoder_opt, s.head_opt),
    )
