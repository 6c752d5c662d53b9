"""`StepPlan`: what was found in a train step and decided for it, as data that prints."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Sequence

from wusharding.analysis.findings import Finding, find_faults, finding_lines, made_at
from wusharding.analysis.flow import turns_of
from wusharding.analysis.layout import Leaf
from wusharding.analysis.placement import Placement, Replicas
from wusharding.analysis.plan import (
    Explained,
    LeafPlan,
    bytes_text,
    leaf_lines,
    leaf_plan,
    owned_jobs,
    traffic_lines,
)
from wusharding.analysis.replication import SUMS, Facts
from wusharding.analysis.schedule import Compute, Problem, Schedule, steps_of
from wusharding.analysis.step import StepUpdate
from wusharding.analysis.sums import Sums
from wusharding.analysis.traffic import Traffic, traffic_of
from wusharding.formats.buckets import BucketSizes


@dataclasses.dataclass(frozen=True)
class StepPlan(Explained):
    """What is sharded in a train step, what it saves and moves, and what is not and why.

    Its `state` are the arrays that go round and that the forward pass does not read; `Explained`
    has the fields that every plan has.

    Args:
      weights: arrays that go round and that the forward pass reads.
      update_ops: operations of the update, and how many of them run on shards.
      before: sums over replicas in the step as it is written.
      findings: faults of the step as written that cost money; those that cost most first.
      updates: the weights again, as each device updates its share of them.
    """

    weights: tuple[LeafPlan, ...]
    update_ops: tuple[int, int]
    before: tuple[Traffic, ...]
    findings: tuple[Finding, ...] = ()
    updates: tuple[LeafPlan, ...] = ()

    _totals = ("state_bytes", "held_bytes", "weight_bytes")

    @property
    def weight_bytes(self) -> tuple[int, int]:
        """Bytes of the weights on each device, before and between sharded steps."""
        return (
            sum(leaf.logical_bytes for leaf in self.weights),
            sum(leaf.held_bytes for leaf in self.weights),
        )

    def weight_rows(self) -> list[LeafPlan]:
        """The weights, with the format of their update: between steps they may be whole."""
        return [
            dataclasses.replace(held, format=update.format)
            for held, update in zip(self.weights, self.updates, strict=True)
        ]

    def _lines(self) -> list[str]:
        total, split = self.update_ops
        before, after = self.weight_bytes
        lines = [
            self._title(),
            f"  update     {split} of {total} operations on shards",
            f"  state      {bytes_text(self.state_bytes)} on each device before, "
            f"{bytes_text(self.held_bytes)} now",
            f"  weights    {bytes_text(before)} on each device before, {bytes_text(after)} now",
        ]
        lines += ["", "Weights, and how their update is split"] + leaf_lines(
            self.weight_rows(), before=True
        )
        lines += ["", "State"] + leaf_lines(self.state, before=True)
        lines += ["", "Sums over replicas in the step as written (bytes that one device puts in)"]
        lines += traffic_lines(self.before)
        lines += ["", "Collectives of the sharded step"]
        lines += traffic_lines(self.traffic)
        lines += self._last_lines("")
        return [*lines, "", "Findings", *finding_lines(self.findings)]


def make_step_plan(
    update: StepUpdate,
    ins: Sequence[Leaf],
    outs: Sequence[Leaf],
    schedule: Schedule,
    problems: Sequence[Problem],
    replicas: Replicas,
    buckets: BucketSizes,
    donated: Collection[int],
    splits: Sequence[Placement],
) -> StepPlan:
    """The plan of one step, from what was found and decided.

    Args:
      update: the step and what in it is what.
      ins: how each argument array is stored.
      outs: the same of each array that it returns.
      schedule: the steps of one device.
      problems: what could not run on pieces.
      replicas: the mesh.
      buckets: which arrays travel together.
      donated: the numbers of the arguments that are donated.
      splits: how the update of each weight is split.
    """
    steps = steps_of(schedule)
    found = {id(op) for op in update.region.update(update.program)}
    split = sum(1 for s in steps if isinstance(s, Compute) and id(s.op) in found and s.split)
    return StepPlan(
        num_shards=replicas.num_shards,
        num_replicas=replicas.num_replicas,
        axes=replicas.shard_axes,
        weights=tuple(leaf_plan(ins[i], replicas) for i, _ in update.weights),
        state=tuple(_with_line(leaf_plan(ins[i], replicas), update, o) for i, o in update.aux),
        update_ops=(len(found), split),
        before=tuple(sums_as_written(update.facts, replicas)),
        traffic=tuple(traffic_of(schedule, replicas, buckets)),
        whole=tuple(problems),
        owned=owned_jobs(schedule),
        findings=find_faults(update, ins, outs, schedule, replicas, donated, splits),
        updates=tuple(
            leaf_plan(dataclasses.replace(ins[i], placement=p, lanes=None), replicas)
            for (i, _), p in zip(update.weights, splits, strict=True)
        ),
    )


def _with_line(leaf: LeafPlan, update: StepUpdate, output: int) -> LeafPlan:
    """Names the line that makes an array that stays whole, unless its size alone is the reason."""
    if not leaf.why or math.prod(leaf.shape) < 2:
        return leaf
    return dataclasses.replace(leaf, why=f"{leaf.why} [{made_at(update, output)}]")


def sums_as_written(facts: Facts, replicas: Replicas) -> list[Traffic]:
    """The sums over replicas of a step as its author wrote it, one all-reduce each."""
    rows: dict[str, list[int]] = {}
    for purpose, nbytes in _sums(Sums(facts, replicas), 1, ""):
        total = rows.setdefault(purpose, [0, 0])
        total[0] += 1
        total[1] += nbytes
    return [Traffic("all-reduce", purpose, *total) for purpose, total in rows.items()]


def _sums(sums: Sums, turns: int, where: str) -> Iterable[tuple[str, int]]:
    program, facts = sums.facts.program, sums.facts
    axes = frozenset(sums.replicas.reduce_axes)
    for k, op in enumerate(program.ops):
        if op.subs:
            inside = " in a loop" if op.name in ("scan", "while") else where
            for body, _ in sums.inside(k, {}):
                yield from _sums(body, turns * turns_of(op), inside)
            continue
        before = any(facts.spreads[v].axes() & axes for v in op.ins)
        after = any(facts.spreads[v].axes() & axes for v in op.outs)
        if k in facts.touched and before and not after:
            size = sum(program.avals[v].nbytes for v in op.outs) * turns
            yield ("sums" if op.name in SUMS else "sums of the batch") + where, size
        elif not before and sums.repeats(k):
            size = sum(program.avals[v].nbytes for v in op.ins if v in sums.data) * turns
            if size:
                yield "sums of what is equal already" + where, size
