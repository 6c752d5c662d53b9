"""`Spread`: where whole arrays wait, each split over many devices, to be written or sharded.

JAX splits dims evenly or not at all, so an array of 17 rows cannot lie on 8 devices in pieces. Its
stored form can, since it is padded; its logical form takes what even split there is, and the least
number of copies: one on each process at most, taken in turn by the devices of that process.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from wusharding.analysis.layout import Leaf
from wusharding.analysis.placement import Replicas

_SHARD, _COPY = "shard of a whole array", "copy of a shard"


@dataclasses.dataclass(frozen=True)
class Spread:
    """How one whole array lies while it waits.

    Args:
      narrow: while it waits: every piece once on each process that can hold it.
      wide: on all devices of the mesh, as programs need it; the same pieces, more copies.
    """

    narrow: NamedSharding
    wide: NamedSharding

    def moved(self, x: jax.Array) -> jax.Array:
        """`x` on all devices of the mesh, from wherever on them it is."""
        mesh = self.wide.mesh
        assert isinstance(mesh, Mesh)
        # JAX refuses to move to devices that are in another order than those of the ambient mesh.
        with jax.set_mesh(mesh):
            return jax.device_put(x, self.wide)

    def narrowed(self, x: jax.Array) -> jax.Array:
        """`x` without the copies that need not wait; moves nothing."""
        if self.narrow == self.wide:
            return x
        pieces = {shard.device: shard.data for shard in x.addressable_shards}
        kept = [pieces[d] for d in _devices(self.narrow).flat if d in pieces]
        return jax.make_array_from_single_device_arrays(x.shape, self.narrow, kept)

    def widened(self, x: jax.Array) -> jax.Array:
        """`x` on all devices of the mesh; a process copies what it has, to its own devices only."""
        if self.narrow == self.wide:
            return x
        here = jax.process_index()
        pieces = {shard.device: shard.data for shard in x.addressable_shards}
        out = []
        for held, wanted in zip(_devices(self.narrow), _devices(self.wide), strict=True):
            own = [pieces[d] for d in held if d in pieces]
            out += [jax.device_put(own[0], d) for d in wanted if d.process_index == here]
        return jax.make_array_from_single_device_arrays(x.shape, self.wide, out)


def _devices(sharding: NamedSharding) -> np.ndarray:
    mesh = sharding.mesh
    assert isinstance(mesh, Mesh)
    return mesh.devices


class Spreader:
    """Gives each array of a state its `Spread`, so that all devices hold about as much.

    Args:
      replicas: mesh axes and sizes.
      mesh: the mesh with its devices.
    """

    def __init__(self, replicas: Replicas, mesh: Mesh) -> None:
        self._replicas = replicas
        self._mesh = mesh
        self._held_bytes = {device: 0 for device in mesh.devices.flat}

    def of(self, leaf: Leaf) -> Spread:
        """The spread of the next array; the same arrays in the same order get the same."""
        if is_stored_whole(leaf, self._replicas):
            where = NamedSharding(self._mesh, leaf.spec(self._replicas))
            return Spread(where, where)
        tile_axes = leaf.placement.tile_axes
        free_axes = tuple(a for a in self._mesh.axis_names if a not in tile_axes)
        dim, pieces = _even_split(leaf, self._replicas, math.prod(self._sizes(free_axes)))
        order = [self._mesh.axis_names.index(a) for a in (*tile_axes, *free_axes)]
        devices = self._mesh.devices.transpose(order)
        entries = [*leaf.placement.tiles]
        entries[dim] = (*entries[dim], _SHARD)
        spec = PartitionSpec(*(e or None for e in entries))

        def sharding(devices: np.ndarray) -> NamedSharding:
            return NamedSharding(Mesh(devices, (*tile_axes, _SHARD, _COPY)), spec)

        wide = devices.reshape(*self._sizes(tile_axes), pieces, -1)
        narrow = wide if tile_axes else self._fewest_copies(wide)
        size = leaf.aval.nbytes // pieces
        for device in narrow.flat:
            self._held_bytes[device] += size
        return Spread(sharding(narrow), sharding(wide))

    def _sizes(self, axes: Sequence[str]) -> list[int]:
        return [self._mesh.shape[a] for a in axes]

    def _fewest_copies(self, devices: np.ndarray) -> np.ndarray:
        """Of `devices[piece, copy]` one copy on each process: on the device that holds least."""
        rows = []
        for row in devices:
            least = dict[int, jax.Device]()
            for d in row:
                best = least.setdefault(d.process_index, d)
                if self._held_bytes[d] < self._held_bytes[best]:
                    least[d.process_index] = d
            rows.append(list(least.values()))
        if len({len(row) for row in rows}) > 1:  # processes lie unevenly in the mesh
            return devices
        return np.array(rows)


def is_stored_whole(leaf: Leaf, replicas: Replicas) -> bool:
    """The stored array is the logical one: no padding, no merged dims, shards in their order."""
    in_order = leaf.placement.span is None or not replicas.shard_numbers
    return in_order and leaf.stored_shape(replicas) == leaf.shape


def _even_split(leaf: Leaf, replicas: Replicas, most: int) -> tuple[int, int]:
    """The dim that splits evenly into most pieces, and their number, which divides `most`."""
    shape = leaf.placement.tile_shape(leaf.shape, replicas)
    pieces = [math.gcd(n, most) for n in shape]
    dim = max(range(len(shape)), key=lambda d: pieces[d])
    return dim, pieces[dim]
