"""Carries placements through a program, both ways, until nothing more is known.

From the weights and gradients this finds how the auxiliary state wants to be stored: not from the
shape of a state leaf, but from what it meets in the update. The result is a hint for each value;
`decide` makes the decision.

Source: sharding propagation in GSPMD (arXiv 2105.04663), with one split instead of a mesh of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from wusharding.analysis.fit import ABSENT, span_for, split_of
from wusharding.analysis.placement import Placement, Replicas, Span
from wusharding.analysis.rules import RULES, Factors
from wusharding.jaxprs import Op, Program

Hints = dict[int, Placement]
_MAX_SWEEPS = 6


def factors_of(program: Program, op: Op) -> Factors | None:
    """The labels of `op`, or None where its primitive has no rule."""
    rule = RULES.get(op.name)
    if rule is None:
        return None
    avals = program.avals
    return rule.factors(op, [avals[i] for i in op.ins], [avals[i] for i in op.outs])


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
    """

    def __init__(
        self, program: Program, replicas: Replicas, ties: Iterable[tuple[int, int]] = ()
    ) -> None:
        self.program = program
        self.replicas = replicas
        self.ties = tuple(ties)
        self.hints: Hints = {}
        self.uniform = [is_uniform(program, op) for op in program.ops]
        self.factors = Labels(program)
        self.bodies: dict[int, tuple[Propagation, ...]] = {}
        for k, op in enumerate(program.ops):
            if op.subs:
                body_ties = _body_ties(op)
                self.bodies[k] = tuple(
                    Propagation(sub, replicas, ties)
                    for sub, ties in zip(op.subs, body_ties, strict=True)
                )

    def fresh(self, ties: Iterable[tuple[int, int]] = ()) -> Propagation:
        """The same program with no hints; the labels of its operations are shared."""
        other = object.__new__(Propagation)
        other.program, other.replicas = self.program, self.replicas
        other.uniform, other.factors = self.uniform, self.factors
        other.ties = tuple(ties) or self.ties
        other.hints = {}
        other.bodies = {k: tuple(b.fresh() for b in bs) for k, bs in self.bodies.items()}
        return other

    def run(self) -> Hints:
        """Sweeps forward and back until stable."""
        ops = list(enumerate(self.program.ops))
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

    def _visit(self, k: int, op: Op) -> bool:
        hints = self.hints
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


def control_links(op: Op) -> list[list[tuple[int, int, int]]]:
    """For each body of a control-flow operation: (outer value, inner value, dim shift)."""
    if op.name == "cond":
        return [
            [(a, b, 0) for a, b in zip(op.ins[1:], sub.inputs, strict=True)]
            + [(a, b, 0) for a, b in zip(op.outs, sub.outputs, strict=True)]
            for sub in op.subs
        ]
    if op.name == "scan":
        (body,) = op.subs
        fixed = op.params["num_consts"] + op.params["num_carry"]
        carry = op.params["num_carry"]
        ins = [
            (a, b, -(i >= fixed)) for i, (a, b) in enumerate(zip(op.ins, body.inputs, strict=True))
        ]
        outs = [
            (a, b, -(i >= carry))
            for i, (a, b) in enumerate(zip(op.outs, body.outputs, strict=True))
        ]
        return [ins + outs]
    cond, body = op.subs
    c, b = op.params["cond_nconsts"], op.params["body_nconsts"]
    carry = op.ins[c + b :]
    return [
        [(x, y, 0) for x, y in zip((*op.ins[:c], *carry), cond.inputs, strict=True)],
        [(x, y, 0) for x, y in zip((*op.ins[c : c + b], *carry), body.inputs, strict=True)]
        + [(x, y, 0) for x, y in zip(op.outs, body.outputs, strict=True)],
    ]


def _body_ties(op: Op) -> list[list[tuple[int, int]]]:
    """Values of a body that go round its loop."""
    if op.name == "scan":
        (body,) = op.subs
        start, n = op.params["num_consts"], op.params["num_carry"]
        return [list(zip(body.inputs[start : start + n], body.outputs[:n], strict=True))]
    if op.name == "while":
        body = op.subs[1]
        start = op.params["body_nconsts"]
        return [[], list(zip(body.inputs[start:], body.outputs, strict=True))]
    return [[] for _ in op.subs]
