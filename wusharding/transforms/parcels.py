"""How split values travel to the replicas that own a job, and back: the layout of two all-to-alls.

Row `r` of a buffer `[num_shards, elems]` goes to replica `r`. What an owner gets from (or sends to)
each replica lies at the same offset of every row, so one static layout serves all replicas.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from wusharding.analysis.placement import Replicas
from wusharding.analysis.schedule import Parcel, parcel_elems, row_widths
from wusharding.formats import Format
from wusharding.transforms.collectives import by_shard, from_shards


@dataclasses.dataclass(frozen=True)
class Parcels:
    """Where each item of each owner lies in the buffers, one buffer a dtype.

    Args:
      slots: for each owner its items, each with its offset.
      widths: elements of a row, for each dtype.
      replicas: the mesh axes.
    """

    slots: Mapping[int, Sequence[tuple[Parcel, int]]]
    widths: Mapping[Any, int]
    replicas: Replicas

    @classmethod
    def of(cls, items: Mapping[int, Sequence[Parcel]], replicas: Replicas) -> Parcels:
        """Lays out the items of each owner."""
        slots: dict[int, list[tuple[Parcel, int]]] = {}
        for owner, owned in items.items():
            at: dict[Any, int] = {}
            slots[owner] = []
            for item in owned:
                dtype = item.aval.dtype
                slots[owner].append((item, at.get(dtype, 0)))
                at[dtype] = at.get(dtype, 0) + parcel_elems(item, replicas)
        return cls(slots, row_widths(items, replicas), replicas)

    def items(self) -> Iterator[Parcel]:
        """All items, owner by owner."""
        for slots in self.slots.values():
            yield from (item for item, _ in slots)

    def empty(self) -> dict[Any, jax.Array]:
        """Buffers of zeros."""
        n = self.replicas.num_shards
        return {dtype: jnp.zeros((n, width), dtype) for dtype, width in self.widths.items()}

    def by_owner(self, shards: Mapping[int, jax.Array]) -> dict[Any, jax.Array]:
        """Buffers whose row `r` holds this replica's shards of what replica `r` owns."""
        out = {}
        for dtype, width in self.widths.items():
            rows = []
            for owner in range(self.replicas.num_shards):
                mine = [i for i, _ in self.slots.get(owner, ()) if i.aval.dtype == dtype]
                rows.append(_padded([shards[i.source].reshape(-1) for i in mine], width, dtype, 0))
            out[dtype] = jnp.stack(rows)
        return out

    def open(self, owner: int, received: Mapping[Any, jax.Array]) -> dict[int, jax.Array]:
        """The whole values of `owner`, from the shards that all replicas sent."""
        out = {}
        for item, at in self.slots[owner]:
            fmt = _format(item, self.replicas)
            rows = received[item.aval.dtype][:, at : at + fmt.shard_elems]
            out[item.dest] = fmt.unpack(from_shards(rows, fmt))
        return out

    def by_shard(self, owner: int, values: Mapping[int, Any]) -> dict[Any, jax.Array]:
        """Buffers whose row `r` holds replica `r`'s shards of the whole values of `owner`."""
        n = self.replicas.num_shards
        out = {}
        for dtype, width in self.widths.items():
            columns = []
            for item, _ in self.slots[owner]:
                if item.aval.dtype != dtype:
                    continue
                x = jnp.asarray(values[item.source])
                if item.placement.span is None:
                    columns.append(jnp.broadcast_to(x.reshape(1, -1), (n, x.size)))
                else:
                    fmt = _format(item, self.replicas)
                    columns.append(by_shard(fmt.pack(x), fmt).reshape(n, -1))
            out[dtype] = _padded(columns, width, dtype, 1, n)
        return out

    def cut(self, received: Mapping[Any, jax.Array]) -> Iterator[tuple[Parcel, jax.Array]]:
        """This replica's piece of every item, from the rows that the owners sent."""
        for owner, slots in self.slots.items():
            for item, at in slots:
                row = received[item.aval.dtype][owner]
                shape = item.placement.local_shape(item.aval.shape, self.replicas)
                yield item, row[at : at + parcel_elems(item, self.replicas)].reshape(shape)


def _format(item: Parcel, replicas: Replicas) -> Format:
    fmt = item.placement.format(item.aval.shape, replicas)
    assert fmt is not None
    return fmt


def _padded(
    parts: list[jax.Array], width: int, dtype: Any, axis: int, rows: int | None = None
) -> jax.Array:
    """Parts side by side, filled up to `width` with zeros."""
    used = sum(p.shape[axis] for p in parts)
    if used < width:
        shape = (width - used,) if rows is None else (rows, width - used)
        parts = [*parts, jnp.zeros(shape, dtype)]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis)
