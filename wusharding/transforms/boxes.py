"""Boxes around arrays that name the mesh axes of their dims, as Flax's parameters come in.

An optimizer makes its state in the boxes of its weights. What is stored is split over more axes and
may have other dims, so the boxes of a `ShardedState` name the axes of the stored array: Flax's own
functions then read the right spec off them, and shard by it. Boxes are known by what they can do;
Flax is not imported. Boxes with logical names (`nn.LogicallyPartitioned`) keep them: rules that
belong to the user give them their meaning.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from wusharding.analysis.layout import Layout

# Metadata of an nnx variable, the second for the optimizer's state alone.
_NNX_NAMES = ("out_sharding", "optimizer_sharding")


class StoredTrees(NamedTuple):
    """Trees of a state as stored: as the wrapped optimizer has them, but for what boxes say."""

    inner: Any
    master: Any


@functools.lru_cache(maxsize=64)
def stored_trees(layout: Layout) -> StoredTrees:
    """The trees in which a layout's state and master weights are handed out."""
    replicas = layout.replicas
    inner = layout.state_def.unflatten([leaf.spec(replicas) for leaf in layout.state])
    master: Any = ()
    if any(m is not None for m in layout.masters):
        kept = iter(layout.master_leaves())
        specs = [None if m is None else next(kept).spec(replicas) for m in layout.masters]
        master = layout.params_def.unflatten(specs)
    return StoredTrees(*(jax.tree.structure(_labelled(tree)) for tree in (inner, master)))


def _labelled(specs: Any) -> Any:
    """A tree of specs whose boxes name the axes of the spec in them.

    If one nnx variable names axes all of them do: Flax takes one that does not for replicated.
    """
    boxes = jax.tree.leaves(specs, is_leaf=_is_box)
    named = {n for box in boxes if _is_nnx(box) for n in _NNX_NAMES if box.has_metadata(n)}

    def label(box: Any) -> Any:
        if _is_linen(box) and isinstance(spec := box.unbox(apply_constraint=False), PartitionSpec):
            return box.replace(names=tuple(spec))
        if _is_nnx(box) and named and isinstance(spec := box.get_value(), PartitionSpec):
            return box.replace(**dict.fromkeys(named, tuple(spec)))
        return box

    return jax.tree.map(label, specs, is_leaf=_is_box)


def _is_box(x: Any) -> bool:
    return _is_linen(x) or _is_nnx(x)


def _is_linen(x: Any) -> bool:
    """A `flax.linen.Partitioned`."""
    return hasattr(x, "names") and hasattr(x, "unbox") and not hasattr(x, "rules")


def _is_nnx(x: Any) -> bool:
    """A `flax.nnx.Variable`."""
    return hasattr(x, "get_value") and hasattr(x, "has_metadata")
