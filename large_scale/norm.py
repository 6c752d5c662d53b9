"""Batch normalization over groups of replicas: more examples than one has, fewer than all have.

With few examples on each replica their statistics are noise, and those of all replicas cost more to
reduce and train worse. Both `shard_map` and global arrays are served: in the first a group is some
neighbouring replicas, in the second some consecutive examples.

Source: Kumar et al. 2020 (arXiv 2011.03641), 3; Ying et al. 2018 (arXiv 1811.06992), 4.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Moments(NamedTuple):
    """Mean and (biased) variance of each channel, `f32[channels]` or `f32[groups, channels]`."""

    mean: jax.Array
    var: jax.Array


def batch_moments(
    x: jax.Array,
    *,
    axis: str | None = None,
    group_size: int | None = None,
    groups: int | None = None,
) -> Moments:
    """Moments of each channel over a group's examples and all positions, in at least float32.

    Args:
      x: `[batch, ..., channels]`.
      axis: in `shard_map`, the mesh axis along which replicas lie; None keeps to this device.
      group_size: how many neighbouring replicas along `axis` share their moments; None, all.
      groups: for global arrays: into how many equal parts, each with moments of its own, the batch
        falls.

    Returns:
      `Moments` of shape `[channels]`, or `[groups, channels]` if `groups` is given.

    Raises:
      ValueError: groups are not of equal size, or the options do not go together.

    One all-gather of two numbers a channel; pieces are merged by means and squared distances from
    them, so that a large mean costs no precision.
    """
    if groups is not None and axis is not None:
        raise ValueError("groups=: for global arrays; with axis= give group_size=.")
    if group_size is not None and axis is None:
        raise ValueError("group_size=: needs axis=; for global arrays give groups=.")
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    if groups is not None:
        x = _in_groups(x, groups)
        dims = tuple(range(1, x.ndim - 1))
        return Moments(x.mean(dims), x.var(dims))
    dims = tuple(range(x.ndim - 1))
    own = Moments(x.mean(dims), x.var(dims))
    if axis is None:
        return own
    members = _members(axis, group_size)
    if members is not None and len(members[0]) == 1:
        return own
    every = Moments(*lax.all_gather(jnp.stack(own), axis, axis=1, axis_index_groups=members))
    return _merged(every)


def merged(moments: Moments, axis: str | None = None) -> Moments:
    """The moments of all replicas along `axis`, or of all groups, from those of each.

    For running averages, which are one for the whole model.

    Args:
      moments: of this replica or its group; of groups `f32[groups, channels]` where `axis` is None.
      axis: the mesh axis, in `shard_map`.
    """
    if axis is None:
        return _merged(moments)
    mean = lax.pmean(moments.mean, axis)
    return Moments(mean, lax.pmean(moments.var + (moments.mean - mean) ** 2, axis))


def batch_norm(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    *,
    axis: str | None = None,
    group_size: int | None = None,
    groups: int | None = None,
    epsilon: float = 1e-5,
) -> tuple[jax.Array, Moments]:
    """Normalizes each channel by its group's moments.

    Args:
      x: `[batch, ..., channels]`.
      scale: `[channels]`.
      bias: `[channels]`.
      axis: as for `batch_moments`, as are `group_size` and `groups`.
      group_size: how many neighbouring replicas share their moments.
      groups: into how many parts the batch of a global array falls.
      epsilon: added to the variance.

    Returns:
      An array like `x`, and the `Moments` for running averages (see `merged`).

    Raises:
      TypeError: `x` are no floats.
      ValueError: as `batch_moments`; `scale` or `bias` is not `[channels]`.

    >>> x = jnp.array([[1.0], [3.0], [10.0], [14.0]])
    >>> y, moments = batch_norm(x, jnp.ones(1), jnp.zeros(1), groups=2)
    >>> moments.mean.tolist(), y.round(2).ravel().tolist()
    ([[2.0], [12.0]], [-1.0, 1.0, -1.0, 1.0])
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"x: found {x.dtype}, need floats: cast it, as by x.astype(jnp.float32).")
    for name, param in (("scale", scale), ("bias", bias)):
        if jnp.shape(param) != x.shape[-1:]:
            raise ValueError(
                f"{name}: found shape {list(jnp.shape(param))}, need one number for each of the "
                f"{x.shape[-1]} channels of x {list(x.shape)}."
            )
    moments = batch_moments(x, axis=axis, group_size=group_size, groups=groups)
    mean, factor = moments.mean, lax.rsqrt(moments.var + epsilon) * scale
    if groups is None:
        y = (x - mean) * factor + bias
        return y.astype(x.dtype), moments
    spread = (groups, *(1,) * (x.ndim - 1), x.shape[-1])
    y = (_in_groups(x, groups) - mean.reshape(spread)) * factor.reshape(spread) + bias
    return y.reshape(x.shape).astype(x.dtype), moments


def _merged(parts: Moments) -> Moments:
    """Of parts of equal size, along the leading dim."""
    mean = parts.mean.mean(0)
    return Moments(mean, (parts.var + (parts.mean - mean) ** 2).mean(0))


def _in_groups(x: jax.Array, groups: int) -> jax.Array:
    if groups < 1 or x.shape[0] % groups:
        raise ValueError(f"groups={groups}: a batch of {x.shape[0]} does not fall into such parts.")
    return x.reshape(groups, x.shape[0] // groups, *x.shape[1:])


def _members(axis: str, group_size: int | None) -> list[list[int]] | None:
    size = lax.axis_size(axis)
    if group_size is None or group_size == size:
        return None
    if group_size < 1 or size % group_size:
        raise ValueError(
            f"group_size={group_size}: axis {axis!r} has {size} replicas, which do not fall into "
            "groups of that size."
        )
    return [list(range(i, i + group_size)) for i in range(0, size, group_size)]
