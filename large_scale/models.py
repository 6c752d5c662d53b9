"""The models whose shapes are in `shapes.py`: what a device computes from its part of a batch.

Plain functions of a dict of weights. How many layers there are is read off its keys and how wide
they are off its shapes, so a cut-down model is the same code on smaller shapes. Dropout is left
out, and so are running batch statistics, which no weight's update reads.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from large_scale import shapes
from large_scale.shapes import Shapes

Params = dict[str, jax.Array]
Batch = dict[str, jax.Array]

_HEAD = 64  # width of an attention head in all of them


@dataclasses.dataclass(frozen=True)
class Model:
    """A model to train.

    Args:
      shapes: makes the shapes of its weights.
      loss: `loss(params, batch)`, the mean over a device's examples; f32[].
      batch: `batch(examples)`, the shapes of what the loss reads.
      examples: on a device, where nothing else is said: few, as where there are many devices.
    """

    shapes: Callable[[], Shapes]
    loss: Callable[[Params, Batch], jax.Array]
    batch: Callable[[int], Shapes]
    examples: int

    def computing_in(self, dtype: Any) -> Model:
        """The same with weights and images cast to `dtype` before the forward pass."""

        def loss(params: Params, batch: Batch) -> jax.Array:
            def cast(x: jax.Array) -> jax.Array:
                return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

            return self.loss(jax.tree.map(cast, params), jax.tree.map(cast, batch))

        return dataclasses.replace(self, loss=loss)


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)
    return jnp.mean(losses)


# --------------------------------------------------------------------------------------- ResNet-50


def resnet50_loss(params: Params, batch: Batch) -> jax.Array:
    """ResNet version 1.5: a block strides in its 3 x 3 convolution.

    Args:
      params: of `shapes.resnet50`.
      batch: `images` float[examples, height, width, 3] and `labels` i32[examples]. Batch norm
        takes the statistics of these examples.

    Source: He et al. 2015 (arXiv 1512.03385).
    """
    x = jax.nn.relu(_conv_norm(params, "stem", batch["images"], stride=2))
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    for name in _blocks(params):
        strides = name.endswith("block0") and not name.startswith("stage0/")
        x = _residual(params, name, x, stride=2 if strides else 1)
    x = jnp.mean(x, (1, 2))
    return _cross_entropy(_dense(params, "head", x), batch["labels"])


def _blocks(params: Params) -> list[str]:
    """`stage0/block0`, ..., in order."""
    return [k.removesuffix("/conv0/kernel") for k in params if k.endswith("/conv0/kernel")]


def _residual(params: Params, name: str, x: jax.Array, stride: int) -> jax.Array:
    y = jax.nn.relu(_conv_norm(params, f"{name}/conv0", x))
    y = jax.nn.relu(_conv_norm(params, f"{name}/conv1", y, stride))
    y = _conv_norm(params, f"{name}/conv2", y)
    if f"{name}/shortcut/kernel" in params:
        x = _conv_norm(params, f"{name}/shortcut", x, stride)
    return jax.nn.relu(x + y)


def _conv_norm(params: Params, name: str, x: jax.Array, stride: int = 1) -> jax.Array:
    kernel = params[f"{name}/kernel"]
    layout = ("NHWC", "HWIO", "NHWC")
    x = lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=layout)
    return _normalized(params, name, x, over=(0, 1, 2))


def _normalized(params: Params, name: str, x: jax.Array, over: Any) -> jax.Array:
    """Batch norm or layer norm: over all dims but channels, or over channels. In float32."""
    wide = x.astype(jnp.float32)
    wide = wide - jnp.mean(wide, over, keepdims=True)
    wide = wide * lax.rsqrt(jnp.mean(wide**2, over, keepdims=True) + 1e-5)
    return wide.astype(x.dtype) * params[f"{name}/scale"] + params[f"{name}/bias"]


# ------------------------------------------------------------------------------------ Transformers


def transformer_loss(params: Params, batch: Batch) -> jax.Array:
    """The first Transformer: encoder and decoder, one embedding for both and for the logits.

    Args:
      params: of `shapes.transformer_big`.
      batch: `source` and `target`, i32[examples, length].

    Source: Vaswani et al. 2017 (arXiv 1706.03762).
    """
    table = params["embedding"]
    x = _with_places(table, batch["source"])
    for name in _layers(params, "encoder"):
        x = _norm(params, f"{name}/norm0", x + _attention(params, f"{name}/attention0", x, x))
        x = _norm(params, f"{name}/norm", x + _mlp(params, f"{name}/mlp", x, jax.nn.relu))
    y = _with_places(table, batch["target"][:, :-1])
    for name in _layers(params, "decoder"):
        own = _attention(params, f"{name}/attention0", y, y, causal=True)
        y = _norm(params, f"{name}/norm0", y + own)
        y = _norm(params, f"{name}/norm1", y + _attention(params, f"{name}/attention1", y, x))
        y = _norm(params, f"{name}/norm", y + _mlp(params, f"{name}/mlp", y, jax.nn.relu))
    return _cross_entropy(y @ table.T, batch["target"][:, 1:])


def _with_places(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Embedded tokens plus sines and cosines of their places."""
    width, length = table.shape[1], tokens.shape[1]
    wave = np.arange(length)[:, None] / 10_000 ** (np.arange(0, width, 2) / width)
    places = np.concatenate([np.sin(wave), np.cos(wave)], axis=1)
    return table[tokens] * width**0.5 + jnp.asarray(places, table.dtype)


def bert_loss(params: Params, batch: Batch) -> jax.Array:
    """BERT's two losses: words that are masked, and whether the second segment follows the first.

    The weights have no head of their own: logits of words are tied to the words' embedding, those
    of the next segment to the segments'.

    Args:
      params: of `shapes.bert_large`.
      batch: `tokens` and `segments` i32[examples, length]; `places` i32[examples, masked] of the
        masked words and `words` i32[examples, masked]; `follows` i32[examples].

    Source: Devlin et al. 2018 (arXiv 1810.04805).
    """
    words, segments = params["embedding/word"], params["embedding/type"]
    x = words[batch["tokens"]] + segments[batch["segments"]]
    x = x + params["embedding/position"][: x.shape[1]]
    x = _norm(params, "embedding/norm", x)
    for name in _layers(params, "layer"):
        x = _norm(params, f"{name}/norm0", x + _attention(params, f"{name}/attention", x, x))
        x = _norm(params, f"{name}/norm1", x + _mlp(params, f"{name}/mlp", x, jax.nn.gelu))
    masked = jnp.take_along_axis(x, batch["places"][..., None], axis=1)
    pooled = jnp.tanh(_dense(params, "pooler", x[:, 0]))
    of_words = _cross_entropy(masked @ words.T, batch["words"])
    return of_words + _cross_entropy(pooled @ segments.T, batch["follows"])


def gpt2_loss(params: Params, batch: Batch) -> jax.Array:
    """GPT-2: norms before, causal attention, logits tied to the tokens' embedding.

    Args:
      params: of `shapes.gpt2`.
      batch: `tokens` i32[examples, length].

    Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
    """
    table, tokens = params["embedding/token"], batch["tokens"][:, :-1]
    x = table[tokens] + params["embedding/position"][: tokens.shape[1]]
    for name in _layers(params, "layer"):
        y = _norm(params, f"{name}/norm0", x)
        q, k, v = jnp.split(_dense(params, f"{name}/attention/qkv", y), 3, axis=-1)
        x = x + _dense(params, f"{name}/attention/out", _attended(q, k, v, causal=True))
        x = x + _mlp(params, f"{name}/mlp", _norm(params, f"{name}/norm1", x), jax.nn.gelu)
    return _cross_entropy(_norm(params, "norm", x) @ table.T, batch["tokens"][:, 1:])


def _layers(params: Params, prefix: str) -> list[str]:
    """`prefix0`, `prefix1`, ... of the keys, in order."""
    found = (k.partition("/")[0] for k in params)
    return list(dict.fromkeys(k for k in found if k.removeprefix(prefix).isdecimal()))


def _dense(params: Params, name: str, x: jax.Array) -> jax.Array:
    return x @ params[f"{name}/kernel"] + params[f"{name}/bias"]


_norm = functools.partial(_normalized, over=-1)


def _mlp(params: Params, name: str, x: jax.Array, activation: Any) -> jax.Array:
    return _dense(params, f"{name}/down", activation(_dense(params, f"{name}/up", x)))


def _attention(
    params: Params, name: str, x: jax.Array, memory: jax.Array, *, causal: bool = False
) -> jax.Array:
    """Attention of `x` to `memory`; its matrices have biases, or none."""

    def project(matrix: str, x: jax.Array) -> jax.Array:
        key = f"{name}/{matrix}"
        return x @ params[key] if key in params else _dense(params, key, x)

    q, k, v = project("query", x), project("key", memory), project("value", memory)
    return project("out", _attended(q, k, v, causal=causal))


def _attended(q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool) -> jax.Array:
    """Values `[examples, length, width]` weighted by queries and keys, head by head."""
    q, k, v = (x.reshape(*x.shape[:2], -1, _HEAD) for x in (q, k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) * _HEAD**-0.5
    if causal:
        scores = jnp.where(np.tri(*scores.shape[-2:], dtype=bool), scores, -1e9)
    weights = jax.nn.softmax(scores).astype(v.dtype)
    out = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
    return out.reshape(*out.shape[:2], -1)


# ----------------------------------------------------------------------------------------- batches


def _array(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _images(examples: int, size: int = 224) -> Shapes:
    images = _array(examples, size, size, 3, dtype=jnp.float32)
    return {"images": images, "labels": _array(examples)}


def _pairs(examples: int, length: int = 256) -> Shapes:
    return {"source": _array(examples, length), "target": _array(examples, length + 1)}


def _masked(examples: int, length: int = 256, masked: int = 40) -> Shapes:
    return {
        "tokens": _array(examples, length),
        "segments": _array(examples, length),
        "places": _array(examples, masked),
        "words": _array(examples, masked),
        "follows": _array(examples),
    }


def _sequences(examples: int, length: int = 256) -> Shapes:
    return {"tokens": _array(examples, length + 1)}


MODELS = {
    "resnet50": Model(shapes.resnet50, resnet50_loss, _images, 8),
    "transformer-big": Model(shapes.transformer_big, transformer_loss, _pairs, 2),
    "bert-large": Model(shapes.bert_large, bert_loss, _masked, 2),
    "gpt2": Model(shapes.gpt2, gpt2_loss, _sequences, 2),
}
