"""The collectives of a schedule, counted as the interpreter will make them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp

from wusharding.analysis.flow import turns_of
from wusharding.analysis.lines import Phase
from wusharding.analysis.placement import Placement, Replicas
from wusharding.analysis.schedule import (
    Communicate,
    Control,
    Move,
    OwnedStage,
    Schedule,
    row_widths,
)
from wusharding.formats.buckets import BucketSizes
from wusharding.jaxprs import Aval


@dataclasses.dataclass(frozen=True)
class Traffic:
    """One kind of collective of a step: how many, and the bytes that one device puts into them."""

    kind: str
    purpose: str
    count: int
    operand_bytes: int


def traffic_of(schedule: Schedule, replicas: Replicas, buckets: BucketSizes) -> list[Traffic]:
    """The collectives of one run of a schedule; a `while` loop counts as one turn."""
    return _merged(_walk(schedule, replicas, buckets))


def _walk(schedule: Schedule, replicas: Replicas, buckets: BucketSizes) -> Iterable[Traffic]:
    for step in schedule.steps:
        if isinstance(step, Communicate):
            yield from _moves(step.moves, replicas, buckets)
        elif isinstance(step, OwnedStage):
            for parcels in (step.entries(), step.exits()):
                for dtype, width in row_widths(parcels, replicas).items():
                    size = width * replicas.num_shards * Aval((), dtype).nbytes
                    yield Traffic("all-to-all", "matrices to and from their owners", 1, size)
        elif isinstance(step, Control):
            turns = turns_of(step.op)
            for body in step.bodies:
                for row in _walk(body, replicas, buckets):
                    yield dataclasses.replace(
                        row, count=row.count * turns, operand_bytes=row.operand_bytes * turns
                    )


def _moves(moves: Sequence[Move], replicas: Replicas, buckets: BucketSizes) -> Iterable[Traffic]:
    scattered = [m for m in moves if m.kind == "reduce" and _is_split(m.after, m.before)]
    gathered = [m for m in moves if m.kind == "gather"]
    tiled = [m for m in moves if m.kind == "reduce" and m.after.tiles != m.before.tiles]
    summed = [m for m in moves if m.kind == "reduce" and not _is_split(m.after, m.before)]
    summed = [m for m in summed if m not in tiled]
    for move in tiled:
        size = _local(move, move.before, replicas).nbytes
        yield Traffic("reduce-scatter", "sums, into tiles", 1, size)
    for axes in dict.fromkeys((m.reduction, m.axes) for m in summed):
        rows = [_local(m, m.before, replicas) for m in summed if (m.reduction, m.axes) == axes]
        for dtype in dict.fromkeys(a.dtype for a in rows):
            same = [a for a in rows if a.dtype == dtype]
            count = len(buckets.fill([a.size for a in same], Aval((), dtype).nbytes))
            size = sum(a.nbytes for a in same)
            yield Traffic("all-reduce", "norms, losses and other sums", count, size)
    yield from _phases("reduce-scatter", "gradients", scattered, replicas, buckets)
    for move in scattered:
        rest = tuple(a for a in move.axes if a not in replicas.shard_axes)
        shard = _local(move, move.after, replicas)
        for dtype, _ in move.sums.by_dtype(shard.dtype, rest):
            size = Aval(shard.shape, dtype).nbytes
            yield Traffic("all-reduce", "gradient shards, between subgroups", 1, size)
    for planned, purpose in ((True, "weights"), (False, "values needed whole")):
        split = [m for m in gathered if m.planned == planned and m.before.span != m.after.span]
        yield from _phases("all-gather", purpose, split, replicas, buckets)
        for move in gathered:
            if move.planned == planned and move.before.tiles != move.after.tiles:
                tile = Placement(move.before.tiles, move.after.span)
                yield Traffic("all-gather", purpose, 1, _local(move, tile, replicas).nbytes)


def _phases(
    kind: str, purpose: str, moves: Sequence[Move], replicas: Replicas, buckets: BucketSizes
) -> Iterable[Traffic]:
    """Rows for what is scattered or gathered together, one for each phase."""
    gathers = kind == "all-gather"

    def sent(move: Move) -> tuple[tuple[Phase, Any], ...]:
        own = _dtype(move)
        if gathers:
            return tuple((p, own) for p in replicas.phases)
        phases = [p for p in replicas.phases if p.axis not in move.sums.equal]
        return tuple((p, move.sums.of(own, p.axis)) for p in phases)

    for hops in dict.fromkeys(map(sent, moves)):
        if not hops:
            continue
        same = [m for m in moves if sent(m) == hops]
        elems = [_local(m, m.before if gathers else m.after, replicas).size for m in same]
        _, first = hops[0]
        size = Aval((), first).nbytes * replicas.num_shards
        count = len(buckets.fill([n for n in elems if n], size))
        left = sum(elems) * math.prod(phase.size for phase, _ in hops)
        rows = []
        for phase, dtype in hops:
            item = Aval((), dtype).nbytes
            where = f" along {phase.axis}" if len(replicas.phases) > 1 else ""
            before, left = left, left // phase.size
            rows.append(Traffic(kind, purpose + where, count, (left if gathers else before) * item))
        yield from reversed(rows) if gathers else rows


def _is_split(after: Placement, before: Placement) -> bool:
    return after.span is not None and before.span is None


def _local(move: Move, placement: Placement, replicas: Replicas) -> Aval:
    return Aval(placement.local_shape(move.aval.shape, replicas), _dtype(move))


def _dtype(move: Move) -> Any:
    own = move.aval.dtype
    if move.reduction in ("and", "or") and own == jnp.bool_:
        return jnp.dtype(jnp.int32)  # what devices agree on by a minimum or maximum
    return own


def _merged(rows: Iterable[Traffic]) -> list[Traffic]:
    totals: dict[tuple[str, str], tuple[int, int]] = {}
    for row in rows:
        count, size = totals.get((row.kind, row.purpose), (0, 0))
        totals[row.kind, row.purpose] = (count + row.count, size + row.operand_bytes)
    return [Traffic(kind, purpose, *total) for (kind, purpose), total in totals.items()]
