"""The same language model as one replica's function, its gradients averaged by hand."""

import jax
import optax
from jax import lax
from jax.sharding import Mesh

from tests.corpus.case import MANUAL, Case
from tests.corpus.transformer_scan import batch, init, loss_fn, tx

MODES = MANUAL


def train_step(params, opt_state, tokens):
    local = jax.tree.map(lambda p: lax.pcast(p, "data", to="varying"), params)
    loss, grads = jax.value_and_grad(loss_fn)(local, tokens)
    grads = lax.pmean(grads, "data")
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, lax.pmean(loss, "data")


def make(mesh: Mesh) -> Case:
    params = init()
    return Case(train_step, (params, tx.init(params)), batch, all_reduced_bytes=8)
