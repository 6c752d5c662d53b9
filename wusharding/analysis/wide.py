"""Which values of a train step keep the padding that a gathered weight comes with.

A weight whose rows do not split evenly is stored with a few more, and its gradient is scattered
with as many. Cutting them off costs nothing where the weight is read, but adding them to the
gradient is a copy of it, and on a TPU that copy can cost more than the update. Where all that lies
between the two can be computed at the padded length, as the logits of a tied embedding and their
gradient can, it is: sums and maxima leave out what padding holds, and nothing is padded.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from wusharding.analysis.placement import Placement, Replicas
from wusharding.analysis.rows import LOOKUP_MODES, ScatterIntoZeros
from wusharding.analysis.rules import RULES, Factors
from wusharding.analysis.rules.base import DimFactors, Reduction, same_dims, sizes_of
from wusharding.analysis.rules.shapes import same_free
from wusharding.analysis.schedule import Communicate, Compute, Move, Schedule
from wusharding.jaxprs import Aval, Identity, Op

_MOST = 64  # one row of padding in so many: what reads it is computed for padding too
_MADE = ("broadcast_in_dim", "iota", "scatter_into_zeros")  # of any length, at no cost


class Wide(NamedTuple):
    """A value with padding: `length` elements along `dim`."""

    dim: int
    length: int


class WideOp(NamedTuple):
    """An operation on values with padding.

    Attributes:
      ins: for each operand the dim along which it is padded, or None.
      out: the same for the result.
      out_shape: the result's shape, on a device.
      rows: elements along the padded dims that count.
      reduction: how these are combined, where they are.
    """

    ins: tuple[int | None, ...]
    out: int | None
    out_shape: tuple[int, ...]
    rows: int
    reduction: Reduction | None


class Widening(NamedTuple):
    """What keeps padding: values, and the operations on them by the number of their result."""

    values: dict[int, Wide]
    ops: dict[int, WideOp]


def padding_of(aval: Aval, placement: Placement, replicas: Replicas) -> Wide | None:
    """How long a value is with the padding of its shards, where that lengthens one dim only."""
    fmt = placement.format(aval.shape, replicas)
    if fmt is None or fmt.wide_dim is None or any(placement.tiles):
        return None
    return Wide(fmt.wide_dim, fmt.wide_length)


def widen(schedule: Schedule, replicas: Replicas, whole: Collection[int]) -> Widening:
    """Finds what can stay padded between weights and scattered gradients.

    Only what leads to a gradient that wants the padding is computed with it, and what reads that.
    Weights that are gathered come with padding. To a weight that comes whole it is added, rather
    than to its gradient: of the two only one is there at a time.

    Args:
      schedule: of a step; bodies of its control flow have schedules of their own.
      replicas: the mesh.
      whole: the inputs of which a device holds all.
    """
    search = _Search(schedule, replicas, whole)
    if search.goals:
        for step in schedule.steps:
            search.visit(step)
    return search.found()


class _Known(NamedTuple):
    """An operation that may be widened: its labels, and which blocked factors may grow."""

    step: Compute
    factors: Factors
    growing: frozenset[int]

    def can_grow(self, factor: int) -> bool:
        labels = (*self.factors.ins, *self.factors.outs)
        alone = all(label == (factor,) for dims in labels for label in dims if factor in label)
        once = all(sum(factor in label for label in dims) <= 1 for dims in labels)
        return alone and once and factor not in self.factors.blocked - self.growing

    def dims(self, factor: int) -> tuple[int | None, ...]:
        """Where each operand has the factor."""
        return tuple(_dim_of(labels, factor) for labels in self.factors.ins)

    def grown(self, factor: int, length: int, shape: tuple[int, ...]) -> WideOp:
        """The operation with `length` elements of a factor; `shape` is its result's without."""
        out = _dim_of(self.factors.outs[0], factor)
        local = shape if self.step.view is None else self.step.view.out_shapes[0]
        if out is not None:
            local = (*local[:out], length, *local[out + 1 :])
        rows, reduction = self.factors.sizes[factor], self.factors.reduced.get(factor)
        return WideOp(self.dims(factor), out, local, rows, reduction)


class _Search:
    """Goes through a schedule once, forward.

    Attributes:
      goals: values that are scattered, and how their shards want them.
      wide: values that can be had with padding.
      ops: how these are computed, and what reads them, by their results.
      made: what made the values of `free`.
      free: the dims along which a value can be made of any length.
    """

    def __init__(self, schedule: Schedule, replicas: Replicas, whole: Collection[int]) -> None:
        self.replicas = replicas
        moves = [m for s in schedule.steps for m in _moves(s)]
        self.avals = dict(enumerate(schedule.program.avals)) | {m.dest: m.aval for m in moves}
        self.goals = {
            m.source: goal
            for m in moves
            if m.kind == "reduce" and (goal := padding_of(m.aval, m.after, replicas)) is not None
        }
        goals = {(self.avals[v].shape, goal) for v, goal in self.goals.items()}
        self.wide: dict[int, Wide] = {
            v: goal
            for v in whole
            for shape, goal in goals
            if self.avals[v].shape == shape and _is_short(goal, self.avals[v])
        }
        self.ops: dict[int, tuple[Compute, WideOp]] = {}
        self.made: dict[int, _Known] = {}
        self.free: dict[int, frozenset[int]] = {}

    def visit(self, step: object) -> None:
        if isinstance(step, Compute):
            self._compute(step)
        for move in _moves(step):
            wide = padding_of(move.aval, move.before, self.replicas)
            gathered = move.kind == "gather" and move.after.span is None
            if wide is not None and gathered and _is_short(wide, move.aval):
                self.wide[move.dest] = wide

    def found(self) -> Widening:
        """What leads to the goals, and what reads that."""
        for v, goal in self.goals.items():
            claims: dict[int, Wide] = {}
            if self._claim(v, goal, claims) and claims and _is_short(goal, self.avals[v]):
                self._make(claims)
        needed = {v for v, goal in self.goals.items() if v in self.ops and self.wide.get(v) == goal}
        for out in reversed(self.ops):
            if out in needed:
                needed.update(_padded(*self.ops[out]))
        ops = {
            out: op
            for out, (step, op) in self.ops.items()
            if needed.issuperset(_padded(step, op)) and (op.out is None or out in needed)
        }
        return Widening({v: self.wide[v] for v in needed}, ops)

    def _compute(self, step: Compute) -> None:
        known = self._known(step)
        if known is None:
            return
        grown = {
            (labels[self.wide[v].dim], self.wide[v].length)
            for v, labels in zip(step.ins, known.factors.ins, strict=True)
            if v in self.wide
        }
        (out,) = step.outs
        if not grown:
            self.made[out] = known
            self.free[out] = self._free_dims(known)
        elif len(grown) == 1:
            ((label, length),) = grown
            if len(label) == 1 and known.can_grow(label[0]):
                self._grow(known, label[0], length)

    def _grow(self, known: _Known, factor: int, length: int) -> None:
        """Notes how an operation is computed with `length` elements of a factor, if it can be."""
        (out,) = known.step.outs
        grown = known.grown(factor, length, self.avals[out].shape)
        claims: dict[int, Wide] = {}
        if grown.out is None and grown.reduction is None:
            return
        if not self._claim_all(known, factor, length, claims):
            return
        self._make(claims)
        if grown.out is not None:
            self.wide[out] = Wide(grown.out, length)
        self.ops[out] = (known.step, grown)

    def _make(self, claims: dict[int, Wide]) -> None:
        """Notes that values which can have any length are made longer."""
        for v in sorted(claims):
            maker, wide = self.made[v], claims[v]
            (label,) = maker.factors.outs[0][wide.dim]
            self.wide[v] = wide
            self.ops[v] = (maker.step, maker.grown(label, wide.length, self.avals[v].shape))

    def _claim_all(self, known: _Known, factor: int, length: int, claims: dict[int, Wide]) -> bool:
        """Whether all operands that have a factor can have that much of it; adds to `claims`."""
        dims = zip(known.step.ins, known.dims(factor), strict=True)
        return all(self._claim(v, Wide(d, length), claims) for v, d in dims if d is not None)

    def _claim(self, v: int, want: Wide, claims: dict[int, Wide]) -> bool:
        if v in self.wide or v in claims:
            return self.wide.get(v, claims.get(v)) == want
        if want.dim not in self.free.get(v, ()):
            return False
        claims[v] = want
        (label,) = self.made[v].factors.outs[0][want.dim]
        return self._claim_all(self.made[v], label, want.length, claims)

    def _free_dims(self, known: _Known) -> frozenset[int]:
        """Dims along which an operation's result can have any length, because its operands can."""

        def is_free(factor: int) -> bool:
            dims = zip(known.step.ins, known.dims(factor), strict=True)
            found = [d in self.free.get(v, ()) for v, d in dims if d is not None]
            return all(found) and (bool(found) or known.step.op.name in _MADE)

        return frozenset(
            d
            for d, label in enumerate(known.factors.outs[0])
            if len(label) == 1 and known.can_grow(label[0]) and is_free(label[0])
        )

    def _known(self, step: Compute) -> _Known | None:
        """What is known of an operation on whole values, or on tiles."""
        if step.split or step.masks or step.op.subs or len(step.outs) != 1:
            return None
        if step.view is not None:
            dims = (*step.view.in_dims, *step.view.out_dims)
            if any(d != tuple(range(len(d))) for d in dims):
                return None
        op = step.op
        if isinstance(op.primitive, Identity) and step.ins[0] in self.avals:
            self.avals.setdefault(step.outs[0], self.avals[step.ins[0]])
        if any(v not in self.avals for v in (*step.ins, *step.outs)):
            return None
        ins, outs = [self.avals[v] for v in step.ins], [self.avals[v] for v in step.outs]
        if isinstance(op.primitive, Identity):
            same = same_dims(len(outs[0].shape))
            return _Known(step, Factors((same,), (same,), sizes_of(outs[0])), frozenset())
        if isinstance(op.primitive, ScatterIntoZeros):
            if op.primitive.shape != outs[0].shape:
                return None
            sizes = sizes_of(outs[0])
            labels = tuple(same_free(a, sizes) for a in ins)
            factors = Factors(labels, (same_dims(len(outs[0].shape)),), sizes)
            window = frozenset(range(len(outs[0].shape))) - _written_singly(op)
            return _Known(step, factors._replace(blocked=window), frozenset())
        rule = RULES.get(op.name)
        if rule is None:
            return None
        return _Known(step, rule.factors(op, ins, outs), _growing(op))


def _is_short(wide: Wide, aval: Aval) -> bool:
    """Whether there is so little padding that it costs next to nothing to compute with it."""
    rows = aval.shape[wide.dim]
    return (wide.length - rows) * _MOST <= rows


def _growing(op: Op) -> frozenset[int]:
    """Blocked factors of a result along which more elements change nothing of the others."""
    if op.name == "iota":
        return frozenset({op.params["dimension"]})
    return _written_singly(op) if op.name.startswith("scatter") else frozenset()


def _written_singly(op: Op) -> frozenset[int]:
    """Dims of a scatter's operand to which its indices say where single elements go."""
    numbers, mode = op.params["dimension_numbers"], op.params["mode"]
    if mode not in LOOKUP_MODES:
        return frozenset()
    inserted = frozenset(numbers.inserted_window_dims)
    return inserted & frozenset(numbers.scatter_dims_to_operand_dims)


def _dim_of(labels: DimFactors, factor: int) -> int | None:
    return next((d for d, label in enumerate(labels) if factor in label), None)


def _padded(step: Compute, op: WideOp) -> list[int]:
    """The operands with padding."""
    return [v for v, d in zip(step.ins, op.ins, strict=True) if d is not None]


def _moves(step: object) -> Sequence[Move]:
    if isinstance(step, Communicate):
        return step.moves
    return (step,) if isinstance(step, Move) else ()
