"""A MaxText-like decoder on an explicit mesh: stacked layers in a `scan`."""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tests.corpus import transformer_scan
from tests.corpus.case import Case
from tests.corpus.transformer_scan import layer, norm, tx

MODES = ("explicit",)


def loss_fn(params, tokens):
    x = params["embed"].at[tokens[:, :-1]].get(out_sharding=P("data")) + params["position"]
    x, _ = jax.lax.scan(layer, x, params["layers"])
    logits = norm(params["norm"], x) @ params["head"]
    picked = jnp.sum(logits * jax.nn.one_hot(tokens[:, 1:], logits.shape[-1]), axis=-1)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


@jax.jit
def train_step(params, opt_state, tokens):
    loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, {"loss": loss}


def make(mesh: Mesh) -> Case:
    case = transformer_scan.make(mesh)
    return Case(train_step, case.state, case.batch, all_reduced_bytes=8)
