"""Exact metrics over replicas whose last batches are padded: sums and counts, reduced together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

PyTree = Any


class Mean(NamedTuple):
    """A mean as a sum of values and a sum of weights, which can be added up.

    >>> a, b = Mean.of(jnp.array([1.0, 2.0])), Mean.of(jnp.array([6.0, 9.0]), jnp.array([1, 0]))
    >>> float((a + b).value)
    3.0
    """

    total: jax.Array
    weight: jax.Array

    @classmethod
    def of(cls, values: jax.Array, weights: jax.Array | None = None) -> Mean:
        """The mean of `values: [n]`, each counted `weights: [n]` times; padding counts 0 times.

        What padding holds does not matter, NaN and infinity included.
        """
        values = values.astype(jnp.promote_types(values.dtype, jnp.float32))
        if weights is None:
            return cls(values.sum(), jnp.asarray(values.size, values.dtype))
        try:
            counted = jnp.broadcast_to(weights, values.shape).astype(values.dtype)
        except ValueError as e:
            raise ValueError(
                f"weights: found shape {list(jnp.shape(weights))}, need one for each of the values "
                f"{list(values.shape)}."
            ) from e
        kept = jnp.where(counted != 0, values, 0)
        return cls((kept * counted).sum(), counted.sum())

    def __add__(self, other: object) -> Mean:
        assert isinstance(other, Mean)
        return Mean(self.total + other.total, self.weight + other.weight)

    @property
    def value(self) -> jax.Array:
        """The mean; NaN of nothing."""
        return self.total / self.weight


def reduced(sums: PyTree, axis: str | Sequence[str]) -> PyTree:
    """Sums over replicas of a whole tree (of `Mean`s, counts, confusion matrices), sent as one.

    Args:
      sums: arrays that add up, in `shard_map` or `pmap`; one all-reduce for each of their dtypes.
      axis: the mesh axis, or axes, along which replicas lie.
    """
    leaves, treedef = jax.tree.flatten(sums)
    leaves = [jnp.asarray(x) for x in leaves]
    out: dict[int, jax.Array] = {}
    for dtype in dict.fromkeys(x.dtype for x in leaves):
        mine = [i for i, x in enumerate(leaves) if x.dtype == dtype]
        done = lax.psum(jnp.concatenate([leaves[i].ravel() for i in mine]), axis)
        ends = np.cumsum([leaves[i].size for i in mine])
        for i, part in zip(mine, jnp.split(done, ends[:-1]), strict=True):
            out[i] = part.reshape(leaves[i].shape)
    return treedef.unflatten([out[i] for i in range(len(leaves))])


def padded(batch: PyTree, size: int) -> tuple[PyTree, np.ndarray]:
    """A batch filled up to `size` examples, and which of them count.

    Args:
      batch: host arrays `[n, ...]`, with `n <= size`.
      size: how many examples the compiled step takes.

    Returns:
      Arrays `[size, ...]`, filled with the first example, and `f32[size]`, 1 for true examples.

    Raises:
      ValueError: there are none, more than `size`, or different numbers of them.

    >>> filled, counts = padded({"x": np.array([7, 8, 9])}, 4)
    >>> filled["x"].tolist(), counts.tolist()
    ([7, 8, 9, 7], [1.0, 1.0, 1.0, 0.0])
    """
    for path, x in jax.tree_util.tree_leaves_with_path(batch):
        if not np.ndim(x):
            raise ValueError(
                f"batch{jax.tree_util.keystr(path)}: is one number, need arrays of examples; hand "
                "over what all examples share by itself."
            )
    lengths = {len(x) for x in jax.tree.leaves(batch)}
    if len(lengths) != 1:
        raise ValueError(f"batch: its arrays have {sorted(lengths)} examples, need one number.")
    (n,) = lengths
    if not 0 < n <= size:
        raise ValueError(f"batch: has {n} examples, need 1 to {size}, the size of a full one.")

    def filled(x: Any) -> np.ndarray:
        x = np.asarray(x)
        return np.concatenate([x, np.repeat(x[:1], size - n, axis=0)])

    return jax.tree.map(filled, batch), (np.arange(size) < n).astype(np.float32)
