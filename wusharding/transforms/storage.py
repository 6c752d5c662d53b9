"""Arrays as a device stores them, as it computes with them, and whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from wusharding.analysis.layout import Leaf
from wusharding.analysis.placement import Replicas
from wusharding.transforms.collectives import Collectives


@dataclasses.dataclass(frozen=True)
class Storage:
    """Converts where the mesh axes are bound; `collectives` are those of this device."""

    collectives: Collectives

    def load(self, leaf: Leaf, stored: jax.Array) -> jax.Array:
        """This device's piece in computing shape, from the stored one."""
        fmt = leaf.format(self.collectives.replicas)
        return stored if fmt is None else fmt.to_local(stored)

    def store(self, leaf: Leaf, local: Any) -> jax.Array:
        """This device's stored piece, from the one in computing shape."""
        fmt = leaf.format(self.collectives.replicas)
        x = jnp.asarray(local)
        return x if fmt is None else fmt.to_stored(x)

    def take(self, leaf: Leaf, x: jax.Array) -> jax.Array:
        """This device's piece of a whole array (or of its tile), in computing shape."""
        return self.collectives.take_shard(x, leaf.whole, leaf.placement)

    def tile(self, leaf: Leaf, x: jax.Array) -> jax.Array:
        """What the tiles leave this device of an array as its owner has it."""
        return self.collectives.take_shard(x, leaf.whole, leaf.placement.without_span())

    @jax.named_scope("all_gather")
    def gathered(self, leaves: Sequence[Leaf], shards: Sequence[jax.Array]) -> list[jax.Array]:
        """Whole arrays from pieces in computing shape."""
        replicas = self.collectives.replicas
        formats = {
            i: f for i, leaf in enumerate(leaves) if (f := leaf.format(replicas)) is not None
        }
        done = self.collectives.all_gather([shards[i] for i in formats], list(formats.values()))
        out = list(shards)
        for i, x in zip(formats, done, strict=True):
            out[i] = x
        tiled = [i for i, leaf in enumerate(leaves) if leaf.tiles is not None]
        moves = [(leaves[i].placement.tiles, leaves[i].whole.tiles) for i in tiled]
        for i, x in zip(
            tiled, self.collectives.untiled([out[i] for i in tiled], moves), strict=True
        ):
            out[i] = x
        return out

    def unshard(self, leaves: Sequence[Leaf], stored: Sequence[jax.Array]) -> list[jax.Array]:
        """Whole arrays from stored pieces."""
        local = [self.load(leaf, s) for leaf, s in zip(leaves, stored, strict=True)]
        return self.gathered(leaves, local)

    def shard(self, leaves: Sequence[Leaf], whole: Sequence[jax.Array]) -> list[jax.Array]:
        """Stored pieces of whole arrays."""
        return [
            self.store(leaf, self.take(leaf, jnp.asarray(x)).astype(leaf.dtype))
            for leaf, x in zip(leaves, whole, strict=True)
        ]


def stored_struct(leaf: Leaf, replicas: Replicas, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """The stored array as a global one: its shape, dtype and sharding."""
    sharding = NamedSharding(mesh, leaf.spec(replicas))
    return jax.ShapeDtypeStruct(leaf.stored_shape(replicas), leaf.dtype, sharding=sharding)
