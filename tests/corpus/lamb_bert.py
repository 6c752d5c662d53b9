"""A small BERT: masked tokens, tied embeddings, LAMB with clipped gradients."""

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh

from tests.corpus.case import Case, integers, normal

MODES = ("unchecked", "checked", "pmap")

VOCAB, WIDTH, LENGTH, HEADS = 37, 12, 7, 3

tx = optax.chain(optax.clip_by_global_norm(1.0), optax.lamb(1e-2, weight_decay=0.01))


def layer_norm(p, x):
    x = x - jnp.mean(x, -1, keepdims=True)
    return x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * p["scale"] + p["bias"]


def attention(p, x):
    q, k, v = (jnp.einsum("btd,dhk->bthk", x, p[n]) for n in ("q", "k", "v"))
    scores = jnp.einsum("bthk,bshk->bhts", q, k) / jnp.sqrt(q.shape[-1])
    return jnp.einsum("bhts,bshk,hkd->btd", jax.nn.softmax(scores), v, p["o"])


def forward(params, tokens):
    x = params["embed"][tokens] + params["position"]
    for p in params["layers"]:
        x = layer_norm(p["norm1"], x + attention(p["attention"], x))
        x = layer_norm(p["norm2"], x + jax.nn.gelu(x @ p["in"]) @ p["out"])
    return x @ params["embed"].T


def train_step(params, opt_state, tokens, mask, targets):
    def loss_fn(params):
        logits = forward(params, jnp.where(mask, 0, tokens))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return jnp.sum(losses * mask), jnp.sum(mask)

    (loss, count), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    loss, count, grads = lax.psum((loss, count, grads), "data")
    grads = jax.tree.map(lambda g: g / count, grads)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss / count


def batch(step):
    tokens = integers(step, VOCAB, 16, LENGTH)
    return tokens, normal(step, 16, LENGTH) > 0, tokens


def init():
    def norm():
        return {"scale": jnp.ones(WIDTH), "bias": jnp.zeros(WIDTH)}

    head = WIDTH // HEADS
    layers = [
        {
            "attention": {
                **{n: normal(i, WIDTH, HEADS, head, scale=0.3) for i, n in enumerate("qkv")},
                "o": normal(4, HEADS, head, WIDTH, scale=0.3),
            },
            "norm1": norm(),
            "in": normal(5, WIDTH, 19, scale=0.3),
            "out": normal(6, 19, WIDTH, scale=0.3),
            "norm2": norm(),
        }
        for _ in range(2)
    ]
    params = {
        "embed": normal(7, VOCAB, WIDTH, scale=0.3),
        "position": normal(8, LENGTH, WIDTH, scale=0.3),
        "layers": layers,
    }
    return jax.tree.map(jnp.asarray, params)


def make(mesh: Mesh) -> Case:
    params = init()
    # Two norms for each of 22 arrays, each twice (optax's `safe_norm`); of all, loss, count.
    return Case(train_step, (params, tx.init(params)), batch, all_reduced_bytes=4 * (4 * 22 + 3))
