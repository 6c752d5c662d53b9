"""Carries splits of a few values through a program, both ways, until nothing more follows.

Operations take their turn by how surely they say what a split becomes: those that keep every dim
first (elementwise, transposes, reshapes), then those that contract, reduce or shift dims, and last
those that make new ones (broadcasts). What is decided stays; what then disagrees is a conflict,
reported with the line that it comes from.

Source: GSPMD (arXiv 2105.04663), 3.5.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import wusharding as wus

Axes = tuple[str, ...]
KEEPS, MIXES, MAKES = range(3)
PRIORITIES = (KEEPS, MIXES, MAKES)


class Decision(NamedTuple):
    """How one dim is split: over `axes`, () for not at all.

    Attributes:
      axes: mesh axes.
      root: the annotation that it follows from.
      annotated: it is that annotation itself.
    """

    axes: Axes
    root: str
    annotated: bool = False


class Conflict(NamedTuple):
    """A split that an operation would carry to a dim, and why it was not made.

    Attributes:
      source: the operation's line.
      op: its name.
      shape: of the value.
      dim: of the value.
      wanted: the axes that the operation would split it over.
      kept: what the dim is split over.
      why: in words.
    """

    source: str
    op: str
    shape: tuple[int, ...]
    dim: int
    wanted: Axes
    kept: Axes
    why: str


class Need(NamedTuple):
    """Communication that follows from the splits of an operation's values.

    Attributes:
      kind: "all-reduce" of a sum over what is split, "gather" of an operand, or "halo".
      source: the operation's line.
      op: its name.
      axes: the mesh axes.
      nbytes: of the whole value that is reduced, gathered or whose ends are exchanged.
    """

    kind: str
    source: str
    op: str
    axes: Axes
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Labels:
    """An operation's factors, blocked ones that move along each other made one."""

    ins: tuple[tuple[tuple[int, ...], ...], ...]
    outs: tuple[tuple[tuple[int, ...], ...], ...]
    sizes: Mapping[int, int]
    blocked: frozenset[int]
    reduced: frozenset[int]
    halos: frozenset[int]
    priority: int

    @classmethod
    def of(cls, program: wus.Program, op: wus.Op) -> Labels | None:
        """The labels of an operation; None where its primitive has no rule."""
        found = wus.factors_of(program, op)
        if found is None:
            return None
        one = {b: a for a, b in found.windows}

        def renamed(
            values: tuple[tuple[tuple[int, ...], ...], ...],
        ) -> tuple[tuple[tuple[int, ...], ...], ...]:
            return tuple(tuple(tuple(one.get(f, f) for f in dim) for dim in v) for v in values)

        ins, outs = renamed(found.ins), renamed(found.outs)
        halos = frozenset(a for a, _ in found.windows)
        blocked = found.blocked - halos - frozenset(one)
        reduced = frozenset(found.reduced)
        return cls(
            ins, outs, found.sizes, blocked, reduced, halos, _priority(ins, outs, found, blocked)
        )


def _priority(
    ins: tuple[tuple[tuple[int, ...], ...], ...],
    outs: tuple[tuple[tuple[int, ...], ...], ...],
    found: wus.Factors,
    blocked: frozenset[int],
) -> int:
    def long(values: tuple[tuple[tuple[int, ...], ...], ...]) -> list[set[int]]:
        return [{f for dim in v for f in dim if found.sizes[f] > 1} for v in values if v]

    given, made = long(ins), long(outs)
    if set().union(*made) - set().union(*given):
        return MAKES
    alike = all(g == given[0] for g in given) and all(m == given[0] for m in made if given)
    return KEEPS if alike and not found.reduced and not found.windows and not blocked else MIXES


class Graph:
    """What is known of the values of a program and of its control-flow bodies.

    Args:
      program: to propagate through.
      sizes: of the mesh axes.
      uneven: also split dims that the axes do not divide.
    """

    def __init__(self, program: wus.Program, sizes: Mapping[str, int], *, uneven: bool) -> None:
        self.program = program
        self.sizes = sizes
        self.uneven = uneven
        self.known: dict[int, list[Decision | None]] = {}
        self.even: set[int] = set()
        self.labels = [None if op.subs else Labels.of(program, op) for op in program.ops]
        self.bodies = {
            k: tuple(Graph(sub, sizes, uneven=uneven) for sub in op.subs)
            for k, op in enumerate(program.ops)
            if op.subs
        }

    def dims(self, value: int) -> list[Decision | None]:
        """What is known of each dim of a value."""
        if value not in self.known:
            self.known[value] = [None] * len(self.program.avals[value].shape)
        return self.known[value]

    def keep_even(self, value: int) -> None:
        """An argument or result: JAX splits those evenly or not at all."""
        self.even.add(value)

    def graphs(self) -> Iterator[Graph]:
        """This program's and its bodies'."""
        yield self
        for bodies in self.bodies.values():
            for body in bodies:
                yield from body.graphs()

    def run(self) -> None:
        """Propagates to the fixpoint, priority by priority."""
        for priority in PRIORITIES:
            while self.sweep(priority):
                pass

    def sweep(self, priority: int) -> bool:
        """Visits all operations of at most this priority, forward and back."""
        ops = list(enumerate(self.program.ops))
        changed = False
        for k, op in (*ops, *reversed(ops)):
            if op.subs:
                changed |= self._control(k, op, priority)
            else:
                labels = self.labels[k]
                if labels is not None and labels.priority <= priority:
                    changed |= self._visit(op, labels)
        return changed

    # ------------------------------------------------------------------------------ one operation

    def wanted(self, op: wus.Op, labels: Labels) -> dict[int, Decision]:
        """The split of each factor: of those that its values have, the finest, and the first."""
        found: dict[int, Decision] = {}
        values = (*zip(op.ins, labels.ins, strict=True), *zip(op.outs, labels.outs, strict=True))
        for value, dims in values:
            for decision, dim in zip(self.dims(value), dims, strict=True):
                if decision is None or not decision.axes or not dim:
                    continue
                factor = dim[0]
                if factor in labels.blocked or labels.sizes[factor] == 1:
                    continue
                if len(dim) > 1 and labels.sizes[factor] % self.parts(decision.axes):
                    continue
                if factor not in found or self.parts(found[factor].axes) < self.parts(
                    decision.axes
                ):
                    found[factor] = decision
        return found

    def parts(self, axes: Axes) -> int:
        """Into how many parts axes split."""
        return math.prod(self.sizes[a] for a in axes)

    def refused(self, value: int, dim: int, axes: Axes) -> str:
        """Why a dim cannot be split over axes; empty where it can."""
        for d, decision in enumerate(self.dims(value)):
            shared = set(decision.axes) & set(axes) if decision is not None and d != dim else ()
            if shared:
                return f"{', '.join(sorted(shared))} splits dim {d} already"
        length, parts = self.program.avals[value].shape[dim], self.parts(axes)
        may = self.uneven and value not in self.even and length > parts
        if length % parts and not may:
            return f"{length} is not divisible by {parts}"
        return ""

    def _visit(self, op: wus.Op, labels: Labels) -> bool:
        wanted = self.wanted(op, labels)
        if not wanted:
            return False
        changed = False
        for value, d, factors in self._places(op, labels):
            dims = self.dims(value)
            if dims[d] is not None or factors[0] not in wanted:
                continue
            if any(f in wanted for f in factors[1:]):
                continue
            axes, root, _ = wanted[factors[0]]
            if self.refused(value, d, axes):
                continue
            dims[d] = Decision(axes, root)
            changed = True
        return changed

    def _places(self, op: wus.Op, labels: Labels) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        """Each dim of each operand and result, with its factors."""
        values = (*zip(op.ins, labels.ins, strict=True), *zip(op.outs, labels.outs, strict=True))
        for value, dims in values:
            for d, factors in enumerate(dims):
                if factors:
                    yield value, d, factors

    # -------------------------------------------------------------------------------- control flow

    def _control(self, k: int, op: wus.Op, priority: int) -> bool:
        changed = False
        links = wus.control_links(op)
        for body, pairs, ties in zip(self.bodies[k], links, wus.body_ties(op), strict=True):
            for _ in range(2):
                for outer, inner, shift in pairs:
                    changed |= _link(self.dims(outer), body.dims(inner), shift)
                for a, b in ties:
                    changed |= _link(body.dims(a), body.dims(b), 0)
                while body.sweep(priority):
                    changed = True
        return changed

    # ------------------------------------------------------------------------------ what is left

    def conflicts(self) -> Iterator[Conflict]:
        """Splits that an operation would carry and that were not made."""
        for k, op in enumerate(self.program.ops):
            labels = self.labels[k]
            for body in self.bodies.get(k, ()):
                yield from body.conflicts()
            if labels is None:
                continue
            wanted = self.wanted(op, labels)
            for value, d, factors in self._places(op, labels):
                if factors[0] not in wanted or factors[0] in labels.blocked:
                    continue
                axes = wanted[factors[0]].axes
                have = self.dims(value)[d]
                kept = have.axes if have is not None else ()
                if kept == axes:
                    continue
                why = self.refused(value, d, axes)
                if have is not None:
                    why = f"it is {_split(kept)} by {have.root}"
                if why:
                    shape = self.program.avals[value].shape
                    yield Conflict(op.source, op.name, shape, d, axes, kept, why)

    def needs(self) -> Iterator[Need]:
        """What operations have to communicate, given the splits."""
        for k, op in enumerate(self.program.ops):
            labels = self.labels[k]
            for body in self.bodies.get(k, ()):
                yield from body.needs()
            if labels is None:
                continue
            done = self._performed(op, labels)
            summed = tuple(a for f, axes in done.items() if f in labels.reduced for a in axes)
            avals = self.program.avals
            if summed:
                nbytes = sum(avals[v].nbytes for v in op.outs)
                yield Need("all-reduce", op.source, op.name, summed, nbytes)
            for value, dims in zip(op.ins, labels.ins, strict=True):
                gathered = tuple(
                    a
                    for decision, dim in zip(self.dims(value), dims, strict=True)
                    if decision is not None
                    for a in decision.axes
                    if not dim or a not in done.get(dim[0], ())
                )
                if gathered:
                    yield Need("gather", op.source, op.name, gathered, avals[value].nbytes)
            ends = tuple(a for f, axes in done.items() if f in labels.halos for a in axes)
            if ends:
                yield Need("halo", op.source, op.name, ends, avals[op.ins[0]].nbytes)

    def _performed(self, op: wus.Op, labels: Labels) -> dict[int, Axes]:
        """The axes over which the operation runs in parallel, for each factor; each axis once.

        Results come first: a contracted dim is gathered where its axis splits a result.
        """
        done: dict[int, Axes] = {}
        used: set[str] = set()
        values = (*zip(op.outs, labels.outs, strict=True), *zip(op.ins, labels.ins, strict=True))
        for value, dims in values:
            for decision, dim in zip(self.dims(value), dims, strict=True):
                if decision is None or not dim or dim[0] in labels.blocked or dim[0] in done:
                    continue
                if decision.axes and used.isdisjoint(decision.axes):
                    done[dim[0]] = decision.axes
                    used.update(decision.axes)
        return done


def _link(left: list[Decision | None], right: list[Decision | None], shift: int) -> bool:
    """Makes two names of one value agree; with `shift` -1 the right one lacks the leading dim."""
    changed = False
    start = -min(shift, 0)
    for d in range(len(right)):
        a, b = left[d + start], right[d]
        if a is not None and b is None and not _uses(right, a.axes):
            right[d], changed = a._replace(annotated=False), True
        elif b is not None and a is None and not _uses(left, b.axes):
            left[d + start], changed = b._replace(annotated=False), True
    return changed


def _uses(dims: list[Decision | None], axes: Axes) -> bool:
    return any(set(axes) & set(decision.axes) for decision in dims if decision is not None)


def _split(axes: Axes) -> str:
    return f"split over {', '.join(axes)}" if axes else "kept whole"
