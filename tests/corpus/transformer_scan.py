"""A language model: stacked layers in a `scan`, recomputed in the backward pass."""

import functools

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from tests.corpus.case import Case, integers, normal

MODES = ("auto",)

VOCAB, WIDTH, LENGTH, LAYERS = 37, 12, 7, 3

tx = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10), weight_decay=0.1),
)


def norm(scale, x):
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * scale


@jax.checkpoint
def layer(x, p):
    h = norm(p["norm1"], x)
    q, k, v = jnp.split(h @ p["qkv"], 3, axis=-1)
    scores = jnp.einsum("btd,bsd->bts", q, k) / jnp.sqrt(WIDTH)
    scores = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), scores, -1e9)
    x = x + jax.nn.softmax(scores) @ v @ p["proj"]
    h = norm(p["norm2"], x)
    return x + jax.nn.gelu(h @ p["up"]) @ p["down"], None


def loss_fn(params, tokens):
    x = params["embed"][tokens[:, :-1]] + params["position"]
    x, _ = jax.lax.scan(layer, x, params["layers"])
    logits = norm(params["norm"], x) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


@functools.partial(jax.jit, donate_argnums=(0, 1))
def train_step(params, opt_state, tokens):
    loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, {"loss": loss}


def init():
    params = {
        "embed": normal(1, VOCAB, WIDTH, scale=0.3),
        "position": normal(2, LENGTH, WIDTH, scale=0.3),
        "layers": {
            "norm1": jnp.ones((LAYERS, WIDTH)),
            "qkv": normal(3, LAYERS, WIDTH, 3 * WIDTH, scale=0.3),
            "proj": normal(4, LAYERS, WIDTH, WIDTH, scale=0.3),
            "norm2": jnp.ones((LAYERS, WIDTH)),
            "up": normal(5, LAYERS, WIDTH, 19, scale=0.3),
            "down": normal(6, LAYERS, 19, WIDTH, scale=0.3),
        },
        "norm": jnp.ones(WIDTH),
        "head": normal(7, WIDTH, VOCAB, scale=0.3),
    }
    return jax.tree.map(jnp.asarray, params)


def batch(step):
    return (integers(step, VOCAB, 16, LENGTH + 1),)


def make(mesh: Mesh) -> Case:
    params = init()
    return Case(train_step, (params, tx.init(params)), batch, all_reduced_bytes=8)
