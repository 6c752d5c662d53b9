"""One embedding for input and output, under `jit` on either mesh."""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from tests.corpus.case import Case, integers, normal

MODES = ("auto",)

tx = optax.adam(1e-2)


def loss_fn(params, tokens):
    h = jnp.tanh(params["embed"][tokens[:, :-1]] @ params["w"] + params["b"])
    logits = h @ params["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


@jax.jit
def train_step(params, opt_state, tokens):
    loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def make(mesh: Mesh) -> Case:
    params = {
        "embed": jnp.asarray(normal(1, 37, 12)),
        "w": jnp.asarray(normal(2, 12, 12)),
        "b": jnp.zeros(12),
    }
    return Case(train_step, (params, tx.init(params)), lambda step: (integers(step, 37, 16, 9),))
