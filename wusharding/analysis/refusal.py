"""Why nothing of a train step can be sharded, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from wusharding.analysis.placement import Replicas
from wusharding.analysis.replication import needing_whole
from wusharding.analysis.step import StepUpdate

# What to do where all that follows needs the whole batch.
_REMEDY = (
    "Let each replica's rows stay together: of [batch, ...] take [rows, microbatches, ...] and "
    "swap these, rather than [microbatches, rows, ...]."
)
_ROWS_AT_ONCE = (
    "Let all rows run at once, as by jax.vmap, or loop over microbatches, [microbatches, rows, "
    "...] with the rows split."
)
_REMEDIES: Mapping[str, str] = {
    "scan": _ROWS_AT_ONCE,
    "dynamic_slice": _ROWS_AT_ONCE,
    "dynamic_update_slice": _ROWS_AT_ONCE,
    "pure_callback": (
        "Call it within jax.shard_map, on the rows of one replica, or on what is no batch."
    ),
    "concatenate": (
        "Lay parts of the batch side by side within each replica's rows: jnp.stack(parts, 1), "
        "reshaped, rather than jnp.concatenate(parts)."
    ),
}


def why_nothing(
    update: StepUpdate,
    replicas: Replicas,
    paths: Sequence[str],
    pairs: Sequence[tuple[int, int]],
) -> str:
    """Why nothing of a step is sharded.

    Args:
      update: what was found in it.
      replicas: the mesh.
      paths: names of its arguments.
      pairs: positions of arguments that come out again, and of the results that they are.
    """
    axes = replicas.reduce_axes
    if replicas.num_shards == 1:
        return f"the axes {replicas.shard_axes} to shard over have size 1."
    if not update.facts.touched:
        return (
            f"nothing in the step differs between the replicas of axis={axes}: no argument is "
            "split over it. Place the batch there first: jax.device_put(batch, "
            f"NamedSharding(mesh, PartitionSpec({', '.join(map(repr, axes))}))), or, for shapes, "
            "give them that sharding. Inside of jit on an auto mesh it cannot be seen how they "
            "are split: call the step outside of jit."
        )
    if not update.weights and not update.aux:
        return (
            "no weights or state were found: no argument comes out of the step again, in the same "
            "tree, shapes and dtypes, equal on all replicas. Let the step return its new state."
        )
    whole = next(needing_whole(update.facts, replicas), None)
    if not update.weights and whole is not None:
        return (
            f"no weights were found, for {whole.name} at {whole.source} needs the whole of "
            f"the batch, which is split over {axes}: what follows is the same on every replica. "
            + _REMEDIES.get(whole.name, _REMEDY)
        )
    split = [
        paths[i]
        for i in sorted(i for i, _ in pairs)
        if not set(axes).isdisjoint(update.facts.spreads[update.program.inputs[i]].axes())
    ]
    if not update.weights and split:
        return (
            f"no weights were found: args{split[0]} comes out of the step again, and comes in "
            f"split over {axes}, so that its update differs between replicas. Hand weights and "
            "state over whole: jax.device_put(x, NamedSharding(mesh, PartitionSpec())), or, of "
            "what another sharded step returned, step.unshard(x)."
        )
    if not update.weights:
        return (
            "no weights were found: of what goes round nothing is read by the forward pass and "
            "made anew. An update that differs between replicas is left alone."
        )
    return "every weight is too small to split; see min_shard_elems."
