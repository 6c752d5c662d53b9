"""Gradients that are scattered as they come, where a compiler would leave all of them to the end.

The compiler of v5e scatters gradients when the backward pass is over. Until then each lies there
whole, or is not computed yet, and what it is computed from lies there. So on TPU each large one is
scattered next to the operation that makes it, and the next weight that the backward pass reads
waits for that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from wusharding.analysis.placement import Replicas
from wusharding.analysis.rules import RULES
from wusharding.analysis.schedule import (
    Communicate,
    Compute,
    Control,
    Move,
    Schedule,
    Step,
    reads,
    writes,
)
from wusharding.formats.buckets import BucketSizes
from wusharding.jaxprs import Aval, Identity, Times


def scattered_as_they_come(
    schedule: Schedule, replicas: Replicas, buckets: BucketSizes
) -> Schedule:
    """The schedule with large sums scattered at once, and what comes after waiting for them.

    Sums that share buckets stay where they are, for a bucket waits for all of its arrays, and so do
    those of loop bodies.
    """
    steps = _hoisted(schedule, replicas, buckets)
    return dataclasses.replace(schedule, steps=_tied(schedule, steps, buckets.alone_bytes))


def _hoisted(schedule: Schedule, replicas: Replicas, buckets: BucketSizes) -> list[Step]:
    """The steps, large sums next to their makers, with what passes them on until they are sent."""
    makers = {v: k for k, step in enumerate(schedule.steps) for v in writes(step)}
    placed: list[tuple[int, int, Step]] = []
    moved: set[int] = set()
    for k, step in enumerate(schedule.steps):
        if not isinstance(step, Communicate):
            continue
        early = list[Move]()
        for move in step.moves:
            if move.source in makers and _goes_alone(move, replicas, buckets):
                at, path = _path(schedule, makers, move.source)
                placed += [(at, j, schedule.steps[j]) for j in path if j not in moved]
                placed.append((at, k, Communicate((move,))))
                moved.update(path)
                early.append(move)
        rest = tuple(m for m in step.moves if m not in early)
        placed.append((k, k, Communicate(rest, tuple(m.dest for m in early))))
        moved.add(k)
    placed += [(k, -1, step) for k, step in enumerate(schedule.steps) if k not in moved]
    return [step for *_, step in sorted(placed, key=lambda p: p[:2])]


def _goes_alone(move: Move, replicas: Replicas, buckets: BucketSizes) -> bool:
    if move.kind != "reduce" or move.after.span is None or move.before != move.after.without_span():
        return False
    fmt = move.after.format(move.aval.shape, replicas)
    row_bytes = replicas.num_shards * move.aval.dtype.itemsize
    return fmt is not None and buckets.goes_alone(fmt.shard_elems, row_bytes)


def _path(schedule: Schedule, makers: Mapping[int, int], v: int) -> tuple[int, list[int]]:
    """The number of the step that makes `v`, and of those that only pass it on from there.

    What these read besides is made before.
    """
    steps, at, path = schedule.steps, makers[v], list[int]()
    while True:
        source = _passed_on(steps[at], schedule.program.avals)
        if source is None or source not in makers:
            break
        path.insert(0, at)
        at = makers[source]

    def made_later(u: int) -> bool:
        return makers.get(u, -1) > at and makers[u] not in path

    while any(made_later(u) for k in path for u in reads(steps[k])):
        at = path.pop(0)
    return at, path


def _passed_on(step: Step, avals: Sequence[Aval]) -> int | None:
    """The only operand of more than one element, where the step hands it on, cast or scaled."""
    if not isinstance(step, Compute) or len(step.outs) != 1:
        return None
    rule = RULES.get(step.op.name)
    primitive = step.op.primitive
    if not isinstance(primitive, Identity | Times) and (
        rule is None or rule.family != "elementwise"
    ):
        return None
    large = [v for v in step.ins if v >= len(avals) or avals[v].size > 1]
    return large[0] if len(large) == 1 else None


def _tied(schedule: Schedule, steps: Sequence[Step], least_bytes: int) -> list[Step]:
    """The steps, and for each early scatter the large weight that is read next, if it is there.

    It is weights that wait, as they are, or cast, or gathered: they lie in memory anyway. What has
    been computed may be fused with what reads it, and would have to be written down.
    """
    avals = schedule.program.avals
    held = {v: avals[v].nbytes for v in schedule.program.inputs}
    since = dict.fromkeys(held, -1)
    for k, step in enumerate(steps):
        made = dict[int, int]()
        if isinstance(step, Communicate):
            gathers = [m for m in step.moves if m.kind == "gather" and m.source in held]
            made = {m.dest: m.aval.nbytes for m in gathers}
        elif _passed_on(step, avals) in held:
            made = {v: avals[v].nbytes for v in writes(step)}
        held |= made
        since |= dict.fromkeys(made, k)
    early = {v for step in steps if isinstance(step, Communicate) for v in step.beside}
    tied = list(steps)
    weight: int | None = None
    for k, step in reversed(list(enumerate(steps))):
        if isinstance(step, Compute | Control):
            read = [v for v in step.ins if held.get(v, 0) >= least_bytes]
            weight = read[0] if read else weight
        elif weight is None or since[weight] > k or early.isdisjoint(writes(step)):
            continue
        elif isinstance(step, Communicate):
            tied[k] = dataclasses.replace(step, weight=weight)
    return tied
