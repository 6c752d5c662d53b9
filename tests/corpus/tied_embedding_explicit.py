"""One embedding for input and output on an explicit mesh, which asks how a gather's result lies."""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tests.corpus import tied_embedding
from tests.corpus.case import Case
from tests.corpus.tied_embedding import tx

MODES = ("explicit",)


def loss_fn(params, tokens):
    x = params["embed"].at[tokens[:, :-1]].get(out_sharding=P("data"))
    logits = jnp.tanh(x @ params["w"] + params["b"]) @ params["embed"].T
    losses = jax.nn.logsumexp(logits, axis=-1) - jnp.sum(
        logits * jax.nn.one_hot(tokens[:, 1:], logits.shape[-1]), axis=-1
    )
    return losses.mean()


@jax.jit
def train_step(params, opt_state, tokens):
    loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def make(mesh: Mesh) -> Case:
    case = tied_embedding.make(mesh)
    return Case(train_step, case.state, case.batch)
