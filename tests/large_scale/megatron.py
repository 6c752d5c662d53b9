"""A Transformer whose features are split over a `model` axis: one text for one device and for many.

What splitting adds are two operations. `enter` stands where an activation that all devices of a
model group hold meets a weight of which each holds a part; backward its gradients add up. `leave`
stands where each holds a part of a sum. On one device both do nothing.

Source of the layout: Megatron-LM (arXiv 1909.08053), 3.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

Tree = Any
Activation = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes; `width`, `heads * head_dim` and `hidden` differ, so that none is taken for another."""

    layers: int = 2
    vocab: int = 24
    width: int = 12
    heads: int = 4
    head_dim: int = 5
    hidden: int = 28
    length: int = 6


@dataclasses.dataclass(frozen=True)
class Split:
    """What the devices of a model group do for each other; the default is one device.

    Args:
      enter: where an activation meets a weight of which each device holds a part.
      leave: the sum of the parts.
      einsum: for products that contract what is split.
      highest: the largest of the parts' values.
      index: number of this device in its group.
    """

    enter: Activation = lambda x: x
    leave: Activation = lambda x: x
    einsum: Callable[..., jax.Array] = jnp.einsum
    highest: Activation = lambda x: x
    index: Callable[[], Any] = lambda: 0

    def join(self, subscripts: str, x: jax.Array, w: jax.Array) -> jax.Array:
        """An einsum over what is split, and the sum of its parts."""
        return self.leave(self.einsum(subscripts, x, w))


def over(axis: str) -> Split:
    """In `shard_map` with `check_vma=True`: what a cast leaves, its transpose adds up."""
    return Split(
        enter=lambda x: lax.pcast(x, axis, to="varying"),
        leave=lambda x: lax.psum(x, axis),
        highest=lambda x: lax.pmax(lax.stop_gradient(x), axis),
        index=lambda: lax.axis_index(axis),
    )


def over_unchecked(axis: str) -> Split:
    """With `check_vma=False` the two operations are each other's transpose by declaration."""

    @jax.custom_vjp
    def enter(x: jax.Array) -> jax.Array:
        return x

    @jax.custom_vjp
    def leave(x: jax.Array) -> jax.Array:
        return lax.psum(x, axis)

    enter.defvjp(lambda x: (x, None), lambda _, g: (lax.psum(g, axis),))
    leave.defvjp(lambda x: (lax.psum(x, axis), None), lambda _, g: (g,))
    return dataclasses.replace(over(axis), enter=enter, leave=leave)


def init(config: Config, seed: int = 0) -> Tree:
    """Weights, numpy float32; those of the layers are stacked along dim 0."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int, fan_in: int) -> np.ndarray:
        return (rng.normal(size=shape) / np.sqrt(fan_in)).astype(np.float32)

    n, e, f = config.layers, config.width, config.hidden
    h, d = config.heads, config.head_dim
    return {
        "embed": normal(config.vocab, e, fan_in=1),
        "position": normal(config.length, e, fan_in=4),
        "layers": {
            "norm1": 1 + normal(n, e, fan_in=100),
            "qkv": normal(n, e, 3, h, d, fan_in=e),
            "out": normal(n, h, d, e, fan_in=h * d),
            "out_bias": normal(n, e, fan_in=100),
            "norm2": 1 + normal(n, e, fan_in=100),
            "up": normal(n, e, f, fan_in=e),
            "up_bias": normal(n, f, fan_in=100),
            "down": normal(n, f, e, fan_in=f),
            "down_bias": normal(n, e, fan_in=100),
        },
        "norm": 1 + normal(e, fan_in=100),
    }


def specs(*, model: str = "model", stage: str | None = None, vocab: str | None = None) -> Tree:
    """How each weight is split: heads and hidden features over `model`, layers over `stage`."""
    return {
        "embed": P(vocab),
        "position": P(),
        "layers": {
            "norm1": P(stage),
            "qkv": P(stage, None, None, model),
            "out": P(stage, model),
            "out_bias": P(stage),
            "norm2": P(stage),
            "up": P(stage, None, model),
            "up_bias": P(stage, model),
            "down": P(stage, model),
            "down_bias": P(stage),
        },
        "norm": P(),
    }


def layer(w: Tree, x: jax.Array, split: Split) -> jax.Array:
    """One layer on `x: f32[batch, length, width]`, with this device's heads and hidden features."""
    q, k, v = jnp.einsum("bse,ethd->tbhsd", split.enter(_norm(x, w["norm1"])), w["qkv"])
    scores = jnp.einsum("bhsd,bhtd->bhst", q, k) / np.sqrt(q.shape[-1])
    visible = np.tril(np.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(visible, scores, -1e9), axis=-1)
    mixed = jnp.einsum("bhst,bhtd->bshd", weights, v)
    x = x + split.join("bshd,hde->bse", mixed, w["out"]) + w["out_bias"]
    up = jnp.einsum("bse,ef->bsf", split.enter(_norm(x, w["norm2"])), w["up"]) + w["up_bias"]
    return x + split.join("bsf,fe->bse", jax.nn.gelu(up), w["down"]) + w["down_bias"]


def layers(stacked: Tree, x: jax.Array, split: Split) -> jax.Array:
    """All layers of a stack, one after the other."""
    for i in range(stacked["norm1"].shape[0]):
        x = layer(
            jax.tree.map(functools.partial(lax.index_in_dim, index=i, keepdims=False), stacked),
            x,
            split,
        )
    return x


def loss(
    params: Tree,
    tokens: jax.Array,
    split: Split | None = None,
    *,
    vocab: Split | None = None,
    run: Callable[[Tree, jax.Array, Split], jax.Array] = layers,
) -> jax.Array:
    """Mean loss of predicting each next one of `tokens: i32[batch, length + 1]`.

    Args:
      params: weights, or this device's parts of them.
      tokens: this replica's.
      split: of heads and hidden features.
      vocab: of the embedding's rows.
      run: how the layers run.
    """
    split, vocab = split or Split(), vocab or Split()
    seen, wanted = tokens[:, :-1], tokens[:, 1:]
    x = embed(params["embed"], seen, vocab) + params["position"]
    x = _norm(run(params["layers"], x, split), params["norm"])
    return cross_entropy(params["embed"], x, wanted, vocab)


def embed(rows: jax.Array, tokens: jax.Array, vocab: Split) -> jax.Array:
    """Rows of a table of which this device holds a part: those that it has not count zero."""
    at = tokens - vocab.index() * rows.shape[0]
    return vocab.join("bsv,ve->bse", jax.nn.one_hot(at, rows.shape[0], dtype=rows.dtype), rows)


def cross_entropy(rows: jax.Array, x: jax.Array, wanted: jax.Array, vocab: Split) -> jax.Array:
    """Mean of `-log softmax(x @ rows.T)[wanted]`; no device holds all logits."""
    logits = jnp.einsum("bse,ve->bsv", vocab.enter(x), rows)
    top = vocab.highest(lax.stop_gradient(logits.max(-1)))
    total = vocab.leave(jnp.exp(logits - top[..., None]).sum(-1))
    at = wanted - vocab.index() * rows.shape[0]
    hit = jax.nn.one_hot(at, rows.shape[0], dtype=logits.dtype)
    return jnp.mean(jnp.log(total) + top - vocab.leave((logits * hit).sum(-1)))


def staged(stage: str, size: int) -> Callable[[Tree, jax.Array, Split], jax.Array]:
    """Each device of `stage` has some of the layers; all work at each turn, one turn counts."""

    def run(stacked: Tree, x: jax.Array, split: Split) -> jax.Array:
        for turn in range(size):
            done = layers(stacked, lax.pcast(x, stage, to="varying"), split)
            x = lax.psum(jnp.where(lax.axis_index(stage) == turn, done, 0), stage)
        return x

    return run


def batches(config: Config, count: int, size: int, seed: int = 1) -> list[np.ndarray]:
    """`count` batches of tokens, `i32[size, length + 1]`."""
    rng = np.random.default_rng(seed)
    shape = (size, config.length + 1)
    return [rng.integers(0, config.vocab, shape).astype(np.int32) for _ in range(count)]


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def reference_loss(params: Tree, tokens: jax.Array) -> jax.Array:
    """The loss on one device, written without any of the above's splitting."""
    logits = (
        _norm(
            functools.reduce(
                lambda x, w: layer(w, x, Split()),
                [
                    jax.tree.map(lambda w, i=i: w[i], params["layers"])
                    for i in range(params["layers"]["norm1"].shape[0])
                ],
                params["embed"][tokens[:, :-1]] + params["position"],
            ),
            params["norm"],
        )
        @ params["embed"].T
    )
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1)
    return -jnp.mean(picked)
