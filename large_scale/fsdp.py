"""Weights that stay split over the replicas and are gathered layer by layer, where they are used.

The two-dimensional recipe of GSPMD: weights are split over `x` and `y`, activations over `x` by
examples and over `y` by features. Before its use a weight is gathered along `x` only; its gradient
is reduce-scattered along `x`, by differentiation. What is left between layers is 1/(x y) of it.

Source: GSPMD (arXiv 2105.04663), 4; weight-update sharding as in Xu et al. 2020 (arXiv 2004.13336).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType, PartitionSpec

PyTree = Any


def split_weights(
    params: PyTree,
    specs: PyTree,
    axis: str,
    sizes: Mapping[str, int],
    *,
    min_elems: int = 2**12,
    stacked: Callable[[Any], bool] = lambda path: False,
) -> PyTree:
    """Specs in which each weight is split over `axis` too.

    The first of its longest dims that `axis` divides and that nothing splits is split; a weight
    that has none, or few elements, is left as it is.

    Args:
      params: weights, or anything with their `shape`.
      specs: how model parallelism splits them, in the same tree.
      axis: the axis along which the weights were the same.
      sizes: of the mesh axes, as `mesh.shape`.
      min_elems: of a weight that is worth a gather.
      stacked: tells from a weight's path whether its leading dim counts layers, which a loop over
        layers cannot have split.

    Raises:
      ValueError: a weight is split over `axis` already, or has fewer dims than its spec.

    >>> w = {"up": jax.ShapeDtypeStruct((12, 64, 256), "float32")}
    >>> specs = {"up": PartitionSpec(None, None, "y")}
    >>> split_weights(w, specs, "x", {"x": 4, "y": 2}, stacked=lambda path: True)
    {'up': P(None, 'x', 'y')}
    """
    if not isinstance(sizes, Mapping):
        raise TypeError(f"sizes: found {type(sizes).__name__}, need those of axes, as mesh.shape.")
    if axis not in sizes:
        raise ValueError(f"axis={axis!r}: the mesh has axes {list(sizes)}.")

    def split(path: Any, x: Any, spec: PartitionSpec) -> PartitionSpec:
        where = jax.tree_util.keystr(path)
        if len(spec) > len(x.shape):
            raise ValueError(
                f"params{where}: {spec} has more entries than it has dims, {list(x.shape)}."
            )
        entries = [*spec, *[None] * (len(x.shape) - len(spec))]
        if any(axis == e or (isinstance(e, tuple) and axis in e) for e in entries):
            raise ValueError(f"params{where}: its spec {spec} names {axis!r} already.")
        free = [
            d
            for d, n in enumerate(x.shape)
            if entries[d] is None and n % sizes[axis] == 0 and n and not (d == 0 and stacked(path))
        ]
        if not free or math.prod(x.shape) < min_elems:
            return spec
        entries[max(free, key=lambda d: (x.shape[d], -d))] = axis
        return PartitionSpec(*entries)

    return jax.tree_util.tree_map_with_path(split, params, specs)


def gathered(params: PyTree, specs: PyTree, axis: str) -> PyTree:
    """This device's pieces, whole along `axis`; within a `shard_map` that is manual over it.

    Differentiated, it is a reduce-scatter along `axis`; of weights that are not split over it, an
    all-reduce. Gradients so are sums over replicas.

    Args:
      params: weights as the `shard_map` hands them in.
      specs: how they lie on the mesh, in the same tree; of what a loop over layers hands on, those
        of `layer_specs`.
      axis: the axis along which to gather.
    """
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    left = {name for name, kind in kinds if kind != AxisType.Manual}

    def whole(x: jax.Array, spec: PartitionSpec) -> jax.Array:
        if axis not in spec:
            return lax.pcast(x, axis, to="varying")
        gather = functools.partial(
            lax.all_gather, axis_name=axis, axis=spec.index(axis), tiled=True
        )
        if left:
            # A collective on pieces of pieces: else the compiler gathers along these axes as well.
            inner = PartitionSpec(*(e if e in left else None for e in spec))
            gather = jax.shard_map(gather, in_specs=inner, out_specs=inner, axis_names=left)
        return gather(x)

    return jax.tree.map(whole, params, specs)


def layer_specs(specs: PyTree) -> PyTree:
    """Specs of one layer's weights, from those of weights stacked by layer."""
    return jax.tree.map(
        lambda s: PartitionSpec(*s[1:]), specs, is_leaf=lambda s: isinstance(s, PartitionSpec)
    )


def gather_again(layer: Callable[..., Any]) -> Callable[..., Any]:
    """A layer that keeps everything for its backward pass but what it gathered.

    Weights are gathered again there, so that no more than a layer's are whole at any time. What a
    `shard_map` within the layer gave is computed again too.
    """

    def kept(primitive: Any, *_: Any, **params: Any) -> bool:
        return primitive.name not in ("all_gather", "shard_map")

    return jax.checkpoint(layer, policy=kept)
