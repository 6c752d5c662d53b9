"""What a file of the corpus hands over: a train step as its user writes it, and its arguments.

Each file has `make(mesh) -> Case` and `MODES`: those of `GLOBAL` in which its step is one of global
arrays, those of `MANUAL` in which it is one replica's, to be put into `shard_map` or `pmap`;
"wrapped" where it is a `pmap` already. `MESH` are the mesh's axes, where not `{"data": 8}`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

Tree = Any

GLOBAL = ("auto", "explicit")
MANUAL = ("unchecked", "checked", "pmap")


@dataclasses.dataclass(frozen=True)
class Case:
    """A step `(*state, *batch) -> (*state, *metrics)`.

    Attributes:
        step: as its user writes it.
        state: what goes round: weights, auxiliary state and whatever else.
        batch: the other arguments of the n-th step, as numpy arrays.
        weights: picks from the state what each step renews and the next one's forward pass reads.
        aux: picks from the state what each device should hold a piece of.
        scattered: picks from the state what gradients are made of; None takes `weights`.
        batch_specs: of `batch`; None splits leading dims over `data`.
        metrics_specs: of the results after the state, for `shard_map`.
        tolerance: of results, relative to the largest element of an array.
        all_reduced_bytes: what the step may all-reduce: losses, norms, batch statistics.
        state_specs: of `state`; None replicates it.
    """

    step: Callable[..., Any]
    state: tuple[Tree, ...]
    batch: Callable[[int], tuple[Tree, ...]]
    weights: Callable[..., Tree] = lambda *state: state[0]
    aux: Callable[..., Tree] = lambda *state: state[1]
    scattered: Callable[..., Tree] | None = None
    batch_specs: tuple[Any, ...] | None = None
    metrics_specs: tuple[Any, ...] = (P(),)
    tolerance: float = 1e-5
    all_reduced_bytes: int = 4
    state_specs: tuple[Any, ...] | None = None


def normal(seed: int, *shape: int, scale: float = 1.0) -> np.ndarray:
    """Random numbers, the same for the same seed and shape."""
    return scale * np.random.default_rng((seed, *shape)).normal(size=shape).astype(np.float32)


def integers(seed: int, high: int, *shape: int) -> np.ndarray:
    """Random integers below `high`."""
    return np.random.default_rng((seed, *shape)).integers(0, high, size=shape, dtype=np.int32)


def regression(step: int, rows: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """Inputs f32[rows, 17] and targets f32[rows, 3]."""
    return normal(2 * step, rows, 17), normal(2 * step + 1, rows, 3)


def sharded_rows(tree: Tree, n: int = 8) -> Tree:
    """Arrays of n equal parts, stacked, as `pmap` takes them."""
    return jax.tree.map(lambda x: x.reshape(n, len(x) // n, *x.shape[1:]), tree)


def stacked(batch: Callable[[int], Tree], first: int, count: int) -> Tree:
    """Several batches along a new first dim."""
    batches = [batch(first + n) for n in range(count)]
    return jax.tree.map(lambda *xs: np.stack(xs), *batches)


def mlp_params(scale: float = 0.3) -> Tree:
    """Weights of an MLP of odd sizes."""
    return {
        "w1": jnp.asarray(normal(100, 17, 13, scale=scale)),
        "b1": jnp.asarray(normal(101, 13, scale=scale)),
        "w2": jnp.asarray(normal(102, 13, 3, scale=scale)),
    }


def mlp(params: Tree, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ params["w1"] + params["b1"]) @ params["w2"]


def mean_squares(params: Tree, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((mlp(params, x) - y) ** 2)
