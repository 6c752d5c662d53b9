"""What the examples share: arguments, data, and a report at the end. No sharding is in here."""

import argparse
import collections
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import optax
import sklearn.datasets
from flax import linen as nn

from large_scale import hlo

BATCH = 128


def make_parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--steps", type=int, default=50, help="training steps (default 50)")
    parser.add_argument("--replicated", action="store_true", help="the loop before the change")
    return parser


def parse_arguments(argv: Sequence[str] | None, description: str | None) -> argparse.Namespace:
    return make_parser(description).parse_args(argv)


def digits(steps: int) -> Iterator[dict[str, np.ndarray]]:
    """Batches of handwritten digits, each of a step: `f32[BATCH, 8, 8, 1]` and `i32[BATCH]`."""
    data = sklearn.datasets.load_digits()
    images = (data.images[..., None] / 16).astype(np.float32)
    for step in range(steps):
        chosen = np.random.default_rng(step).choice(len(images), BATCH, replace=False)
        yield {"image": images[chosen], "label": data.target[chosen].astype(np.int32)}


class Network(nn.Module):
    """A convolution and two dense layers, for the linen examples."""

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = nn.relu(nn.Conv(16, (3, 3))(images))
        x = nn.relu(nn.LayerNorm()(nn.Dense(64)(x.reshape(len(x), -1))))
        return nn.Dense(10)(x)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean over `f32[batch, classes]` and `i32[batch]`."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@dataclasses.dataclass(frozen=True)
class Report:
    """What an example did.

    Args:
      params: the trained weights.
      losses: of each step.
      state_bytes: of the optimizer's state, on the device that holds most of it.
      collectives: of the compiled step.
    """

    params: Any
    losses: list[float]
    state_bytes: int
    collectives: list[hlo.Collective]


def report(
    params: Any, losses: Sequence[Any], opt_state: Any, step: Any, *arguments: Any
) -> Report:
    """Prints what a training run did, and returns it.

    Args:
      params: the trained weights.
      losses: of each step.
      opt_state: the optimizer's state.
      step: the step, jitted.
      *arguments: what it is called with.
    """
    compiled = step.lower(*arguments).compile()
    compiled = getattr(compiled, "compiled", compiled)  # Equinox has JAX's inside of its own
    held = collections.Counter[Any]()
    for x in jax.tree.leaves(opt_state):
        for shard in x.addressable_shards:
            held[shard.device] += shard.data.nbytes
    done = Report(
        params, [float(x) for x in losses], max(held.values()), hlo.collectives(compiled.as_text())
    )
    moved = collections.Counter[str]()
    for c in done.collectives:
        moved[c.kind] += c.operand_bytes
    print(f"loss             {done.losses[0]:.4f} in the first step, {done.losses[-1]:.4f} last")
    print(f"optimizer state  {done.state_bytes:,} B on each device")
    for kind, nbytes in sorted(moved.items()):
        print(f"{kind:<16} {nbytes:,} B put in by each device in a step")
    return done
