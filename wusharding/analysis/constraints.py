"""What a program says itself of how its arrays are split: constraints, and `reshard`.

A step that runs per device follows what is said of the axes beside the replicas', for what differs
between replicas: activations and their gradients. How a batch is split among replicas, and how
weights and state are stored, follows from the arguments.
"""

from __future__ import annotations

from jax.sharding import PartitionSpec

from wusharding.analysis.placement import Replicas, Tiles, spec_tiles
from wusharding.jaxprs import Op

_SAYING = ("sharding_constraint", "reshard")


def constrained_tiles(
    op: Op, tiles: Tiles, shape: tuple[int, ...], replicas: Replicas
) -> Tiles | None:
    """The tiles of an operation's result, where it says them; None where it says nothing.

    Args:
      op: any operation.
      tiles: of its operand.
      shape: of both.
      replicas: the mesh.
    """
    spec = getattr(op.params.get("said"), "spec", None)
    if op.params.get("annotation") not in _SAYING or spec is None:
        return None
    mine = [tuple(a for a in axes if a in replicas.reduce_axes) for axes in tiles]
    if not any(mine):
        return None
    free = set(op.params.get("unconstrained_dims") or ())
    free |= {d for d, entry in enumerate(spec) if entry is PartitionSpec.UNCONSTRAINED}
    entries = PartitionSpec(*(None if d in free else entry for d, entry in enumerate(spec)))
    found = []
    for d, said in enumerate(spec_tiles(entries, len(shape))):
        others = tuple(a for a in said if a not in replicas.reduce_axes)
        found.append(tiles[d] if d in free else mine[d] + others)
    used = [a for axes in found for a in axes]
    uneven = any(n % replicas.size(axes) for n, axes in zip(shape, found, strict=True))
    return None if uneven or len(set(used)) < len(used) else tuple(found)
