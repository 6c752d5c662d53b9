"""`Layout`: how the weights and the auxiliary state of one optimizer are stored, leaf by leaf.

It travels inside the state as static data, so that a state can be read without anything else.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from wusharding.analysis.placement import Placement, Replicas, Tiles
from wusharding.formats import Format
from wusharding.jaxprs import Aval


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array: its path for messages, its logical shape, and how it is stored.

    `lanes` stores flattened shards as rows x lanes. `why` says why it is not split, if it is not.
    `copies` are mesh axes along which equal copies are stacked in dim 0, as `pmap` wants them:
    `shape` is that of one copy, with a leading dim of 1. `tiles` are the mesh axes that split it
    where its owner has it, if the update splits it over more; None where it does not.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    placement: Placement
    lanes: int | None = None
    why: str = ""
    copies: tuple[str, ...] = ()
    tiles: Tiles | None = None

    @property
    def whole(self) -> Placement:
        """Where its elements are as its owner has it."""
        return Placement(self.placement.tiles if self.tiles is None else self.tiles)

    @property
    def aval(self) -> Aval:
        return Aval(self.shape, self.dtype)

    def logical_shape(self, replicas: Replicas) -> tuple[int, ...]:
        """The shape that its owner knows."""
        if not self.copies:
            return self.shape
        return (self.shape[0] * replicas.size(self.copies), *self.shape[1:])

    def format(self, replicas: Replicas) -> Format | None:
        """The format in which its tile is stored; None where it is not split."""
        fmt = self.placement.format(self.shape, replicas)
        if fmt is None or self.lanes is None:
            return fmt
        return dataclasses.replace(fmt, lanes=self.lanes)

    def local_stored_shape(self, replicas: Replicas) -> tuple[int, ...]:
        """Shape of one device's stored piece."""
        fmt = self.format(replicas)
        if fmt is None:
            return self.placement.tile_shape(self.shape, replicas)
        return fmt.shard_shape

    def spec(self, replicas: Replicas) -> PartitionSpec:
        """How the stored array lies on the mesh."""
        tiles = self.placement.tiles
        span = self.placement.span
        if span is None:
            return self._copied(tiles)
        # Shards are major: a `shard_map` over the replica axes alone then sees its own pieces.
        inside = tuple(a for axes in tiles[span.lo : span.hi] for a in axes)
        axes = [*tiles[: span.lo], replicas.shard_axes + inside, *tiles[span.hi :]]
        return _spec([axes[span.lo], ()] if self.lanes is not None else axes)

    def stored_shape(self, replicas: Replicas, local_axes: Collection[str] = ()) -> tuple[int, ...]:
        """Shape of the stored array as one array; of its piece along `local_axes`."""
        local = self.local_stored_shape(replicas)
        spec = [[a for a in _axes(e) if a not in local_axes] for e in self.spec(replicas)]
        counts = [replicas.size(tuple(axes)) for axes in spec]
        counts += [1] * (len(local) - len(counts))
        return tuple(n * c for n, c in zip(local, counts, strict=True))

    def logical_spec(self) -> PartitionSpec:
        """How the whole array lies on the mesh, as far as model parallelism splits it."""
        return self._copied(self.whole.tiles)

    def _copied(self, tiles: Tiles) -> PartitionSpec:
        return _spec([self.copies + tiles[0], *tiles[1:]] if self.copies else [*tiles])

    def unnamed(self) -> Leaf:
        """The same without what does not change the program that stores it."""
        return dataclasses.replace(self, path="", why="")

    def held_bytes(self, replicas: Replicas) -> int:
        """Bytes that one device stores."""
        return math.prod(self.local_stored_shape(replicas)) * Aval((), self.dtype).nbytes


def restricted(spec: PartitionSpec, axes: Collection[str]) -> PartitionSpec:
    """A spec without the axes that are not among `axes`.

    >>> restricted(PartitionSpec(("data", "model"), None, "stage"), {"data"})
    P('data',)
    """
    return _spec([tuple(a for a in _axes(entry) if a in axes) for entry in spec])


def _axes(entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _spec(axes: list[tuple[str, ...]]) -> PartitionSpec:
    while axes and not axes[-1]:
        axes.pop()
    return PartitionSpec(*(a[0] if len(a) == 1 else a or None for a in axes))


def travel_dtype(dtype: Any, gather_dtype: Any) -> Any:
    """The dtype in which an array of `dtype` is gathered: floating ones in `gather_dtype`, if any.

    >>> travel_dtype(jnp.dtype("float32"), jnp.dtype("bfloat16"))
    dtype(bfloat16)
    """
    if gather_dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        return dtype
    return gather_dtype


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Layout:
    """How one optimizer's weights and state are stored.

    Args:
      replicas: mesh axes and sizes.
      params: one `Leaf` a parameter, in flattening order.
      state: one `Leaf` an array of the wrapped optimizer's state.
      params_def: tree of the parameters.
      state_def: tree of the wrapped optimizer's state.
      masters: for each parameter, the dtype of its master weight, or None.
      grads_def: tree of the gradients, which is that of the parameters but for `optax.lookahead`.
      grads_of: for each gradient, the parameter that it is the gradient of.
    """

    replicas: Replicas
    params: tuple[Leaf, ...]
    state: tuple[Leaf, ...]
    params_def: Any
    state_def: Any
    masters: tuple[Any, ...]
    grads_def: Any
    grads_of: tuple[int, ...]

    def __repr__(self) -> str:
        """Short: it lies in every state that is printed."""
        return (
            f"<Layout of {len(self.params)} parameters and {len(self.state)} state arrays in "
            f"{self.replicas.num_shards} shards over {self.replicas.shard_axes}>"
        )

    def _key(self) -> tuple[Any, ...]:
        return (
            self.replicas,
            self.params,
            self.state,
            self.params_def,
            self.state_def,
            self.masters,
            self.grads_def,
        )

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return (
            isinstance(other, Layout) and hash(self) == hash(other) and self._key() == other._key()
        )

    def __hash__(self) -> int:
        cached = self.__dict__.get("_hash")
        if cached is None:
            cached = hash(self._key())
            object.__setattr__(self, "_hash", cached)
        return cached

    @property
    def grads(self) -> tuple[Leaf, ...]:
        """The parameters that gradients come for, in the order of the gradients."""
        return tuple(self.params[i] for i in self.grads_of)

    @property
    def grad_masters(self) -> tuple[Any, ...]:
        """`masters` in the order of the gradients."""
        return tuple(self.masters[i] for i in self.grads_of)

    def master_leaves(self) -> Iterator[Leaf]:
        """The masters as leaves, for those parameters that have one."""
        for leaf, dtype in zip(self.params, self.masters, strict=True):
            if dtype is not None:
                yield dataclasses.replace(leaf, dtype=dtype)
