"""What `decide` decides, as data: the steps by which a device computes its part of a program.

Values are named by integer ids. An id below `len(program.avals)` is a value of the program; each
movement of a value (a gather, a slice, a finished sum) makes a new id, so that a step reads exactly
the form that it needs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from wusharding.analysis.placement import Placement, Replicas
from wusharding.analysis.rules import LocalView
from wusharding.analysis.rules.base import Reduction
from wusharding.analysis.sum_dtypes import OWN, SumDtypes
from wusharding.formats import Format
from wusharding.jaxprs import Aval, Op, Program


class Mask(NamedTuple):
    """Padding that must not count: where the shards of an operand hold none of its elements."""

    operand: int
    format: Format
    reduction: Reduction


@dataclasses.dataclass(frozen=True, slots=True)
class Compute:
    """Runs one operation on local pieces, after filling padding that must not count.

    `split` tells that the pieces are shards, and not the whole on every replica.
    """

    op: Op
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    view: LocalView | None = None
    masks: tuple[Mask, ...] = ()
    split: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Control:
    """Runs a control-flow operation by re-entering it with its bodies' schedules."""

    op: Op
    ins: tuple[int, ...]
    placements: tuple[Placement, ...]
    outs: tuple[int, ...]
    bodies: tuple[Schedule, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Move:
    """Takes value `source` from one placement to another and calls it `dest`.

    `kind` is "slice" (no communication), "gather" (of what a span splits, of tiles, or both), or
    "reduce": a partial value, finished over `axes` with `reduction`, whole or scattered to `after`.
    A gather is `planned` where weights are meant to be whole, and not where an operation could not
    run on pieces. `sums` says in what it travels where it is a sum that is scattered.
    """

    kind: Literal["slice", "gather", "reduce"]
    source: int
    dest: int
    aval: Aval
    before: Placement
    after: Placement
    reduction: Reduction | None = None
    axes: tuple[str, ...] = ()
    planned: bool = False
    sums: SumDtypes = OWN


@dataclasses.dataclass(frozen=True, slots=True)
class Communicate:
    """Moves that are ready together, so that they may share collectives.

    `beside` are sums that were scattered before, to be updated together with those of `moves`. What
    reads `weight` afterwards waits until the large ones among `moves` are scattered.
    """

    moves: tuple[Move, ...]
    beside: tuple[int, ...] = ()
    weight: int | None = None


class Entry(NamedTuple):
    """A split value that an owner needs whole, and what it is called there.

    `leaf` is the parameter that it comes from, or -1.
    """

    source: int
    dest: int
    aval: Aval
    placement: Placement
    leaf: int


class Exit(NamedTuple):
    """A value that an owner made, and the split value that it becomes."""

    source: int
    dest: int
    aval: Aval
    placement: Placement


Parcel = Entry | Exit


def parcel_elems(parcel: Parcel, replicas: Replicas) -> int:
    """Elements of a parcel that travel between its owner and each replica."""
    fmt = parcel.placement.format(parcel.aval.shape, replicas)
    return parcel.aval.size if fmt is None else fmt.shard_elems


def row_widths(parcels: Mapping[int, Sequence[Parcel]], replicas: Replicas) -> dict[Any, int]:
    """For each dtype the elements of a row of its all-to-all: what the busiest owner takes."""
    widths: dict[Any, int] = {}
    for owned in parcels.values():
        for dtype in {p.aval.dtype for p in owned}:
            size = sum(parcel_elems(p, replicas) for p in owned if p.aval.dtype == dtype)
            widths[dtype] = max(widths.get(dtype, 0), size)
    return widths


@dataclasses.dataclass(slots=True)
class Job:
    """Operations on whole matrices that one replica does for all."""

    steps: list[Compute]
    entries: list[Entry]
    exits: list[Exit]
    flops: float = 0.0
    owner: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class OwnedStage:
    """Jobs that run at the same time, each on its owner, between two all-to-alls."""

    jobs: tuple[Job, ...]

    def by_owner(self) -> dict[int, list[Job]]:
        """The jobs of each owner."""
        owners: dict[int, list[Job]] = {}
        for job in self.jobs:
            owners.setdefault(job.owner, []).append(job)
        return owners

    def all_entries(self) -> list[Entry]:
        """What all owners get."""
        return [e for job in self.jobs for e in job.entries]

    def entries(self) -> dict[int, list[Parcel]]:
        """What each owner gets."""
        return {o: [e for j in jobs for e in j.entries] for o, jobs in self.by_owner().items()}

    def exits(self) -> dict[int, list[Parcel]]:
        """What each owner gives back."""
        return {o: [e for j in jobs for e in j.exits] for o, jobs in self.by_owner().items()}


Step = Compute | Control | Communicate | Move | OwnedStage


def reads(step: Step) -> list[int]:
    """The values that a step needs."""
    match step:
        case OwnedStage():
            made = {v for job in step.jobs for s in job.steps for v in s.outs}
            made |= {e.dest for job in step.jobs for e in job.entries}
            inner = [v for job in step.jobs for s in job.steps for v in s.ins if v not in made]
            return inner + [e.source for job in step.jobs for e in job.entries]
        case Move():
            return [step.source]
        case Communicate():
            return [*(m.source for m in step.moves), *step.beside]
        case Compute() | Control():
            return list(step.ins)


def writes(step: Step) -> list[int]:
    """The values that a step makes."""
    match step:
        case OwnedStage():
            return [e.dest for job in step.jobs for e in job.exits]
        case Move():
            return [step.dest]
        case Communicate():
            return [m.dest for m in step.moves]
        case Compute() | Control():
            return list(step.outs)


@dataclasses.dataclass(slots=True)
class Schedule:
    """A program as one device runs it.

    Args:
      program: the program that it carries out.
      steps: in the order in which they run.
      outputs: for each output, the id that holds it and its placement.
    """

    program: Program
    steps: list[Step]
    outputs: list[tuple[int, Placement]]


class Problem(NamedTuple):
    """An operation that could not run on pieces, and what was moved for it.

    `leaf` is the input from which the value came by which the operation was blocked.
    """

    leaf: int
    primitive: str
    source: str
    moved_bytes: int
    why: str


def steps_of(schedule: Schedule) -> Sequence[Any]:
    """All steps, those of control-flow bodies and jobs included, for counting."""
    found: list[Any] = []
    for step in schedule.steps:
        found.append(step)
        if isinstance(step, Control):
            for body in step.bodies:
                found.extend(steps_of(body))
        if isinstance(step, OwnedStage):
            for job in step.jobs:
                found.extend(job.steps)
    return found
