"""Logits of a part of the vocabulary at a time: rows of a tied embedding, sliced out or taken in a
loop, or gone over by it.
"""

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh

from tests.corpus.case import Case, integers, normal

MODES = ("auto",)
CHUNK, COUNT = 7, 3

tx = optax.adam(1e-2)


def longer_sum(sums, logits):
    highest, total = sums
    new = jnp.maximum(highest, jnp.max(logits, axis=-1))
    logits = jnp.exp(logits - new[:, None])
    return new, total * jnp.exp(highest - new) + jnp.sum(logits, axis=-1)


def loss_fn(params, tokens, targets):
    h = jnp.tanh(params["sliced"][tokens] @ params["w"])
    sliced, stacked = params["sliced"], params["stacked"].reshape(COUNT, CHUNK, -1)

    def by_slice(sums, i):
        return longer_sum(sums, h @ lax.dynamic_slice_in_dim(sliced, CHUNK * i, CHUNK).T), None

    def by_index(sums, i):
        return longer_sum(sums, h @ params["taken"][CHUNK * i + jnp.arange(CHUNK)].T), None

    def by_rows(sums, rows):
        return longer_sum(sums, h @ rows.T), None

    loss = jnp.zeros(())
    heads = [(by_slice, jnp.arange(COUNT)), (by_index, jnp.arange(COUNT)), (by_rows, stacked)]
    for body, over in heads:
        start = jnp.zeros(len(tokens)), jnp.zeros(len(tokens))
        (highest, total), _ = lax.scan(jax.checkpoint(body), start, over)
        loss += jnp.mean(highest + jnp.log(total))
    own = sum(params[k][targets] for k in ("sliced", "taken", "stacked"))
    return loss - jnp.mean(jnp.sum(h * own, axis=-1))


@jax.jit
def train_step(params, opt_state, tokens, targets):
    loss, grads = jax.value_and_grad(loss_fn)(params, tokens, targets)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def make(mesh: Mesh) -> Case:
    rows = CHUNK * COUNT
    params = {
        k: jnp.asarray(normal(n, rows, 6, scale=0.3))
        for n, k in enumerate(("sliced", "taken", "stacked"))
    }
    params["w"] = jnp.asarray(normal(3, 6, 6, scale=0.3))
    return Case(
        train_step,
        (params, tx.init(params)),
        lambda step: (integers(2 * step, rows, 32), integers(2 * step + 1, rows, 32)),
    )
