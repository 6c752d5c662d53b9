"""Carries placements through a program, both ways, until nothing more is known.

From the weights and gradients this finds how the auxiliary state wants to be stored: not from the
shape of a state leaf, but from what it meets in the update. The result is a hint for each value;
`decide` makes the decision.

Source: sharding propagation in GSPMD (arXiv 2105.04663), with one split instead of a mesh of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from wusharding.analysis.fit import ABSENT, span_for, split_of
from wusharding.analysis.flow import body_ties, control_links
from wusharding.analysis.placement import Placement, Replicas, Span, spec_tiles
from wusharding.analysis.replication import MAXIMA, SUMS
from wusharding.analysis.rules import RULES, Factors
from wusharding.analysis.rules.base import factors_of
from wusharding.analysis.update import Region
from wusharding.jaxprs import CROSSINGS, Op, Program

Hints = dict[int, Placement]
_MAX_SWEEPS = 6


def is_uniform(program: Program, op: Op) -> bool:
    """An elementwise operation whose operands and results all have one shape, or rank 0."""
    rule = RULES.get(op.name)
    if rule is None or rule.family != "elementwise":
        return False
    avals = program.avals
    shape = avals[op.outs[0]].shape
    return bool(shape) and all(avals[v].shape in (shape, ()) for v in op.ins)


class Labels:
    """The labels of each operation of a program, made when first asked for."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._found: dict[int, Factors | None] = {}

    def __getitem__(self, k: int) -> Factors | None:
        if k not in self._found:
            self._found[k] = factors_of(self._program, self._program.ops[k])
        return self._found[k]


class Propagation:
    """Hints for the values of a program and of its control-flow bodies.

    Args:
      program: what to propagate through.
      replicas: the mesh.
      ties: pairs of values that must be stored alike (a state leaf going in and coming out).
      region: of a whole train step, what is its update: hints stay inside of that.
    """

    def __init__(
        self,
        program: Program,
        replicas: Replicas,
        ties: Iterable[tuple[int, int]] = (),
        region: Region | None = None,
    ) -> None:
        self.program = program
        self.replicas = replicas
        self.ties = tuple(ties)
        self.closed = region.forward - region.bodies.keys() if region else frozenset()
        self.hints: Hints = {}
        self.uniform = [is_uniform(program, op) for op in program.ops]
        self.factors = Labels(program)
        self.bodies: dict[int, tuple[Propagation, ...]] = {}
        for k, op in enumerate(program.ops):
            if op.subs and k not in self.closed:
                regions = region.bodies.get(k) if region else None
                self.bodies[k] = tuple(
                    Propagation(sub, replicas, ties, inside)
                    for sub, ties, inside in zip(
                        op.subs, body_ties(op), regions or [None] * len(op.subs), strict=True
                    )
                )

    def fresh(self, ties: Iterable[tuple[int, int]] = ()) -> Propagation:
        """The same program with no hints; the labels of its operations are shared."""
        other = object.__new__(Propagation)
        other.program, other.replicas = self.program, self.replicas
        other.uniform, other.factors, other.closed = self.uniform, self.factors, self.closed
        other.ties = tuple(ties) or self.ties
        other.hints = {}
        other.bodies = {k: tuple(b.fresh() for b in bs) for k, bs in self.bodies.items()}
        return other

    def run(self) -> Hints:
        """Sweeps forward and back until stable."""
        ops = [(k, op) for k, op in enumerate(self.program.ops) if k not in self.closed]
        for sweep in range(_MAX_SWEEPS):
            changed = self._tie()
            for k, op in ops if sweep % 2 == 0 else reversed(ops):
                changed |= self._visit_control(k, op) if op.subs else self._visit(k, op)
            if not changed and sweep:
                break
        return self.hints

    def _tie(self) -> bool:
        changed = False
        for a, b in self.ties:
            changed |= self._link(self.hints, a, self.hints, b)
        return changed

    @staticmethod
    def _link(left: Hints, a: int, right: Hints, b: int, shift: int = 0) -> bool:
        """Copies a hint between two values; dim `d` on the left is `d + shift` on the right."""
        if a in left and b not in right:
            moved = _shifted(left[a], shift)
            if moved is not None:
                right[b] = moved
                return True
        elif b in right and a not in left:
            moved = _shifted(right[b], -shift)
            if moved is not None:
                left[a] = moved
                return True
        return False

    def _visit_crossing(self, op: Op) -> bool:
        """Where a value enters or leaves manual mode, what its tiles leave is split alike."""
        (a,), (b,) = op.ins, op.outs
        outer, inner = (a, b) if op.name == "enter_manual" else (b, a)
        ndim = len(self.program.avals[outer].shape)
        tiles = spec_tiles(op.params["spec"], ndim)
        if any(axis in self.replicas.reduce_axes for axes in tiles for axis in axes):
            return False
        hints = self.hints
        if outer in hints and inner not in hints and hints[outer].tiles == tiles:
            hints[inner] = Placement(((),) * ndim, hints[outer].span)
        elif inner in hints and outer not in hints:
            hints[outer] = Placement(tiles, hints[inner].span)
        else:
            return False
        return True

    def _visit(self, k: int, op: Op) -> bool:
        if op.name in CROSSINGS:
            return self._visit_crossing(op)
        hints = self.hints
        if op.name in SUMS | MAXIMA.keys():  # of what is equal on the replicas
            linked = [self._link(hints, a, hints, b) for a, b in zip(op.ins, op.outs, strict=True)]
            return any(linked)
        values = (*op.ins, *op.outs)
        known = [v for v in values if v in hints]
        if not known or len(known) == len(values):
            return False
        if self.uniform[k]:
            return self._spread(values, hints[known[0]])
        factors = self.factors[k]
        if factors is None:
            return False
        labels = (*factors.ins, *factors.outs)
        at = next(i for i, v in enumerate(values) if v in hints)
        placement = hints[values[at]]
        tiles = {
            label[0]: axes
            for label, axes in zip(labels[at], placement.tiles, strict=True)
            if axes and label and label[0] not in factors.blocked
        }
        if len(tiles) != sum(map(bool, placement.tiles)):
            return False  # a tile is lost on the way, and the split is of what the tiles leave
        span = placement.span
        split = split_of(labels[at], span, factors) if span else None
        if split is None and not tiles:
            return False
        if split is not None and not factors.blocked.isdisjoint(split.factors):
            return False
        local = {f: n // self.replicas.size(tiles.get(f, ())) for f, n in factors.sizes.items()}
        changed = False
        for value, label in zip(values, labels, strict=True):
            if value in hints or value in self.program.consts:
                continue
            if any(f in tiles for run in label for f in run[1:]):
                continue
            tiled = tuple(tiles.get(f[0], ()) if f else () for f in label)
            found = span_for(label, split, factors, local) if split else ABSENT
            if isinstance(found, Span):
                hints[value] = Placement(tiled, found)
                changed = True
            elif split is None and any(tiled):
                hints[value] = Placement(tiled)
                changed = True
        return changed

    def _spread(self, values: Sequence[int], placement: Placement) -> bool:
        """One placement for all values of an elementwise operation."""
        changed = False
        for v in values:
            if v not in self.hints and self.program.avals[v].shape and v not in self.program.consts:
                self.hints[v] = placement
                changed = True
        return changed

    def _visit_control(self, k: int, op: Op) -> bool:
        changed = False
        for body, pairs in zip(self.bodies[k], control_links(op), strict=True):
            for outer, inner, shift in pairs:
                changed |= self._link(self.hints, outer, body.hints, inner, shift)
            before = len(body.hints)
            body.run()
            changed |= len(body.hints) != before
            for outer, inner, shift in pairs:
                changed |= self._link(self.hints, outer, body.hints, inner, shift)
        return changed


def _shifted(placement: Placement, shift: int) -> Placement | None:
    """Drops (-1) or adds (+1) a leading dim."""
    if shift == 0:
        return placement
    return placement.with_leading_dim() if shift > 0 else placement.without_leading_dim()
