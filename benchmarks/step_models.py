"""The models of `benchmarks.step`: weights as plain trees of arrays, losses as plain functions."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.update_programs import decoder_shapes, is_shape

Tree = Any


@dataclasses.dataclass(frozen=True)
class Model:
    """What is trained.

    Args:
      name: for reports.
      shapes: tree of the weights' shapes.
      loss: weights and a batch to the mean over the batch.
      batch: shapes and dtypes of the batch, its examples along the first dim.
    """

    name: str
    shapes: Tree
    loss: Callable[[Tree, Tree], jax.Array]
    batch: Tree

    def params(self) -> Tree:
        """Weights to start from."""
        leaves, tree = jax.tree.flatten(self.shapes, is_leaf=is_shape)
        keys = jax.random.split(jax.random.key(0), len(leaves))
        pairs = zip(keys, leaves, strict=True)
        # A bias and a norm's scale (less one) start at zero.
        return tree.unflatten(
            jax.random.normal(k, s) / math.sqrt(s[0]) if len(s) > 1 else jnp.zeros(s)
            for k, s in pairs
        )

    def abstract_params(self) -> Tree:
        return jax.tree.map(
            lambda s: jax.ShapeDtypeStruct(s, jnp.float32), self.shapes, is_leaf=is_shape
        )

    def data(self) -> Tree:
        """A batch."""

        def fill(x: jax.ShapeDtypeStruct) -> jax.Array:
            if jnp.issubdtype(x.dtype, jnp.integer):
                return jax.random.randint(jax.random.key(1), x.shape, 0, _VOCABULARY, x.dtype)
            return jax.random.normal(jax.random.key(1), x.shape, x.dtype)

        return jax.tree.map(fill, self.batch)


_VOCABULARY = 64  # of the tokens in batches; embeddings may have more rows


def mlp(width: int, *, layers: int, examples: int) -> Model:
    """Dense layers with residuals, each a kernel and a bias, that learn to return their input."""
    shapes = [{"kernel": (width, width), "bias": (width,)}] * layers

    def loss(params: Tree, x: jax.Array) -> jax.Array:
        y = x
        for layer in params:
            y = y + jnp.tanh(y @ layer["kernel"] + layer["bias"])
        return jnp.mean((y - x) ** 2)

    batch = jax.ShapeDtypeStruct((examples, width), jnp.float32)
    return Model("MLP", shapes, loss, batch)


def decoder(d: int, *, layers: int, examples: int, length: int, vocabulary: int = 64) -> Model:
    """A Transformer that predicts the next token; its layers are written out, not scanned."""
    batch = jax.ShapeDtypeStruct((examples, length + 1), jnp.int32)
    shapes = decoder_shapes(d, layers=layers, vocabulary=vocabulary)
    return Model("Transformer", shapes, decoder_loss, batch)


def decoder_loss(params: Tree, tokens: jax.Array) -> jax.Array:
    """Cross-entropy of each next token; tokens: i32[examples, length + 1]."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    x = params["embedding"][inputs] + params["positions"][: inputs.shape[1]]
    for layer in params["layers"]:
        x = x + _attention(layer["attention"], _norm(layer["norm1"], x))
        h = _norm(layer["norm2"], x)
        up, down = layer["mlp"]["up"], layer["mlp"]["down"]
        x = x + jax.nn.gelu(h @ up["kernel"] + up["bias"]) @ down["kernel"] + down["bias"]
    logits = _norm(params["norm"], x) @ params["embedding"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def _attention(p: Tree, x: jax.Array) -> jax.Array:
    q, k, v = (
        jnp.einsum("ntd,dhe->nthe", x, p[name]["kernel"]) + p[name]["bias"]
        for name in ("query", "key", "value")
    )
    scores = jnp.einsum("nthe,nshe->nhts", q, k) / math.sqrt(q.shape[-1])
    past = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(past, scores, -1e9))
    mixed = jnp.einsum("nhts,nshe->nthe", weights, v)
    return jnp.einsum("nthe,hed->ntd", mixed, p["out"]["kernel"]) + p["out"]["bias"]


def _norm(p: Tree, x: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
    return scaled * (1 + p["scale"]) + p["bias"]
