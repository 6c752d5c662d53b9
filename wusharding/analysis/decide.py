"""Decides how each operation of a program runs on one device, and orders the steps.

What happens to an operation, in this order:

1. its operands are split in a way that its rule can follow: it runs on the pieces;
2. nothing is split but a hint says that its result will be: operands are sliced first;
3. it is linear and an operand is a partial sum: it runs on the parts, the sum waits;
4. it is matrix work (`OpRule.matrix`, or a loop around such work): it is given to one owner;
5. anything else runs on the whole value on every replica, after a gather, and is reported.

Steps are then ordered so that communication waits until nothing else can run: all norms of a step
share one all-reduce, all gathers share buckets, and all jobs of matrix work start together.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp

from wusharding.analysis.fit import Fit, Split, split_of, tiles_of, try_fit
from wusharding.analysis.placement import Placement, Replicas, Span, replicated
from wusharding.analysis.propagate import Propagation
from wusharding.analysis.rules import RULES, Factors, LocalView, OpRule
from wusharding.analysis.rules.base import DimFactors, Reduction
from wusharding.analysis.schedule import (
    Communicate,
    Compute,
    Control,
    Entry,
    Exit,
    Job,
    Mask,
    Move,
    OwnedStage,
    Problem,
    Schedule,
    Step,
    reads,
    writes,
)
from wusharding.analysis.sum_dtypes import OWN
from wusharding.jaxprs import Aval, Identity, Op, Program

_MAX_LINEAR_PARTIAL_ELEMS = 1024
_LOOPS = ("scan", "while")


class Value(NamedTuple):
    """What is known of one value while deciding."""

    placement: Placement
    partial: Reduction | None = None
    partial_axes: tuple[str, ...] = ()
    job: int = -1
    depth: int = 0
    leaf: int = -1


class Case(NamedTuple):
    """An operation for which a fit is sought, with the tiles that its factors will have."""

    op: Op
    rule: OpRule
    factors: Factors
    tiles: dict[int, tuple[str, ...]]
    ins: list[int]

    def takes(self, span: Span) -> bool:
        """Whether the rule works on a value that is split so."""
        return self.rule.merged_dims or span.hi - span.lo == 1

    def split(self, labels: DimFactors, placement: Placement | None) -> Split | None:
        """The split of a value, if it has one that the operation may follow.

        A split is of what the tiles leave, so it counts only where the tiles can stay.
        """
        if placement is None or placement.span is None or not self.takes(placement.span):
            return None
        tiled = (self.tiles.get(label[0], ()) if label else () for label in labels)
        if any(a != b for a, b in zip(tiled, placement.tiles, strict=True)):
            return None
        return split_of(labels, placement.span, self.factors)


class NeedsWhole(Exception):
    """Raised in a loop body: an operation needs a split value whole at every turn."""


def flat_placement(shape: tuple[int, ...], replicas: Replicas) -> Placement:
    """All dims merged and split; replicated where there is nothing to split."""
    size = 1
    for n in shape:
        size *= n
    if not shape or size == 0:
        return replicated(len(shape))
    chunk = -(-size // replicas.num_shards)
    return Placement(((),) * len(shape), Span(0, len(shape), chunk).narrowed(shape))


def decide(
    propagation: Propagation,
    inputs: Sequence[Value],
    outputs: Sequence[Placement | None],
) -> tuple[Schedule, list[Problem]]:
    """Decides for a whole program.

    Args:
      propagation: hints, already run.
      inputs: what is known of each input: its placement, and the parameter that it belongs to.
      outputs: the placement asked of each output; None takes it as it comes.

    Returns:
      The schedule and what could not run on pieces.
    """
    decider = Decider(propagation, outputs)
    return decider.run(inputs), decider.problems


class Decider:
    """Decides one program; bodies of control flow get deciders of their own."""

    sum_dtypes = OWN  # in which sums are scattered

    def __init__(
        self,
        propagation: Propagation,
        outputs: Sequence[Placement | None],
        *,
        in_loop: bool = False,
    ) -> None:
        self.propagation = propagation
        self.program: Program = propagation.program
        self.replicas = propagation.replicas
        self.hints = propagation.hints
        self.wanted = outputs
        self.in_loop = in_loop
        self.values: dict[int, Value] = {}
        self.steps: list[Compute | Control | Move] = []
        self.jobs: list[Job] = []
        self.job_parent: list[int] = []
        self.job_depth: list[int] = []
        self.moved: dict[tuple[int, Placement], int] = {}
        self.entered: dict[tuple[int, int], int] = {}
        self.problems: list[Problem] = []
        self.deferred: set[int] = set()  # sums of any size that stay open
        self.avals: list[Aval] = list(self.program.avals)
        self.feeds_matrix = _feeds_matrix(self.program)

    # -------------------------------------------------------------------------------- the walk

    def run(self, inputs: Sequence[Value]) -> Schedule:
        program = self.program
        for i, value in zip(program.inputs, inputs, strict=True):
            self.values[i] = value
        for i in program.consts:
            self.values[i] = Value(replicated(len(self.avals[i].shape)))
        for k, op in enumerate(program.ops):
            if op.subs:
                self._control(k, op)
            else:
                self._op(k, op)
        outputs = [
            self._output(v, want) for v, want in zip(program.outputs, self.wanted, strict=True)
        ]
        return Schedule(program, self._ordered(), outputs)

    def _output(self, v: int, want: Placement | None) -> tuple[int, Placement]:
        v = self._settled(v)
        if want is None:
            return v, self.values[v].placement
        return self._placed(v, want, "the output is stored otherwise"), want

    def _op(self, k: int, op: Op) -> None:
        if self.propagation.uniform[k] and self._uniform(op):
            return
        rule, factors = RULES.get(op.name), self.propagation.factors[k]
        ins = list(op.ins)
        if rule is None or factors is None:
            self._whole(op, ins, "has no rule")
            return
        if any(self.values[v].partial for v in ins):
            if self._linear(op, rule, factors):
                return
            ins = [self._finished(v) for v in ins]
        if any(self.values[v].job >= 0 for v in ins):
            split = [v for v in ins if not self.values[v].placement.is_replicated]
            if rule.matrix or not split:
                self._own(op, ins)
                return
            ins = [self._left_job(v) for v in ins]
        fit = self._fit(op, rule, factors, ins)
        if fit is not None:
            self._compute(op, rule, fit, ins, uniform=self.propagation.uniform[k])
        elif all(self.values[v].placement.is_replicated for v in ins):
            self._replicated(op, ins)
        elif rule.matrix or self.feeds_matrix.issuperset(op.outs):
            self._own(op, ins)
        else:
            self._whole(op, ins, "needs the whole of a split dim")

    def _uniform(self, op: Op) -> bool:
        """The common case at once: an elementwise operation on operands that are split alike."""
        placement, depth, leaf = None, 0, -1
        for v in op.ins:
            value = self.values[v]
            if value.partial is not None or value.job >= 0:
                return False
            depth = max(depth, value.depth)
            if not self.avals[v].shape:
                continue
            leaf = max(leaf, value.leaf)
            if placement is None:
                placement = value.placement
            elif placement != value.placement:
                return False
        if placement is None or placement.span is None:
            return False
        for out in op.outs:
            self.values[out] = Value(placement, depth=depth, leaf=leaf)
        self.steps.append(Compute(op, op.ins, op.outs, split=True))
        return True

    # ------------------------------------------------------------------------- running on pieces

    def _fit(self, op: Op, rule: OpRule, factors: Factors, ins: list[int]) -> Fit | None:
        values = [self.values[v] for v in ins]
        tiles = tiles_of(factors, [v.placement for v in values], self.replicas)
        case = Case(op, rule, factors, tiles, ins)
        axes = {a for t in tiles.values() for a in t}
        may_split = axes.isdisjoint(self.replicas.shard_axes)
        splits = self._splits(case) if may_split else []
        fits = [self._accepted(case, s) for s in splits]
        found = [f for f in fits if f is not None]
        if found:
            return min(found, key=lambda f: self._misplaced(op, f, ins))
        if any(v.placement.span for v in values):
            return None if may_split or not tiles else self._accepted(case, None)
        fit = self._hinted(case) if may_split and not rule.matrix else None
        if fit is None and tiles:
            fit = self._accepted(case, None)
        return fit

    def _splits(self, case: Case) -> list[Split]:
        """The splits that operands come in and, if any comes split, those that results hint at."""
        placements = [self.values[v].placement for v in case.ins]
        if not any(p.span for p in placements):
            return []
        found = [case.split(f, p) for f, p in zip(case.factors.ins, placements, strict=True)]
        hints = map(self.hints.get, case.op.outs)
        found += [case.split(f, p) for f, p in zip(case.factors.outs, hints, strict=True)]
        return list(dict.fromkeys(s for s in found if s is not None))

    def _misplaced(self, op: Op, fit: Fit, ins: list[int]) -> int:
        """Elements that a fit makes move: operands that come, results that are wanted otherwise."""
        moved = 0
        for v, want in zip(ins, fit.ins, strict=True):
            have = self.values[v].placement
            if have.span is not None and have.span != want.span:
                moved += self.avals[v].size
        for v, have in zip(op.outs, fit.outs, strict=True):
            hint = self.hints.get(v)
            if hint is not None and fit.partial is None and hint.span != have.span:
                moved += self.avals[v].size
        return moved

    def _hinted(self, case: Case) -> Fit | None:
        """Nothing is split yet: follows the hint of a result, unless that needs a reduction."""
        for label, out in zip(case.factors.outs, case.op.outs, strict=True):
            split = case.split(label, self.hints.get(out))
            if split is not None:
                fit = self._accepted(case, split)
                return fit if fit is not None and fit.partial is None else None
        return None

    def _accepted(self, case: Case, split: Split | None) -> Fit | None:
        """A fit, unless it is worse than running on the whole."""
        fit = try_fit(case.factors, case.tiles, split, self.replicas)
        if fit is None:
            return None
        if not all(case.takes(p.span) for p in (*fit.ins, *fit.outs) if p.span):
            return None
        if case.rule.matrix and split is not None:
            if fit.masked and self._outgrows(case):
                return None
            for v, want in zip(case.ins, fit.ins, strict=True):
                have = self.values[v].placement
                if have.span is not None and have.span != want.span:
                    return None  # a gather for it: rather give the work to an owner
        return fit

    def _outgrows(self, case: Case) -> bool:
        """A contraction whose partial results cost more to add up than its operands to move."""
        size = 1
        for label in case.factors.outs[0]:
            for f in label:
                size *= case.factors.sizes[f]
        largest = max(self.avals[v].size for v in case.ins)
        return size * self.replicas.num_shards > max(largest, self.replicas.num_shards)

    def _compute(self, op: Op, rule: OpRule, fit: Fit, ins: list[int], *, uniform: bool) -> None:
        why = f"{op.name} splits it otherwise"
        moved = tuple(self._placed(v, p, why, op) for v, p in zip(ins, fit.ins, strict=True))
        depth = max((self.values[v].depth for v in moved), default=0)
        leaf = self._leaf(ins)
        for out, placement in zip(op.outs, fit.outs, strict=True):
            self.values[out] = Value(
                placement, fit.partial, fit.partial_axes, depth=depth, leaf=leaf
            )
        masks = self._masks(ins, fit) if fit.masked else ()
        view = None
        if rule.localize is not None and not uniform:
            view = LocalView(
                tuple(p.local_dims() for p in fit.ins),
                tuple(p.local_dims() for p in fit.outs),
                tuple(
                    p.local_shape(self.avals[v].shape, self.replicas)
                    for v, p in zip(ins, fit.ins, strict=True)
                ),
                tuple(
                    p.local_shape(self.avals[v].shape, self.replicas)
                    for v, p in zip(op.outs, fit.outs, strict=True)
                ),
            )
        split = any(p.span is not None for p in (*fit.ins, *fit.outs))
        self.steps.append(Compute(op, moved, op.outs, view, masks, split))

    def _masks(self, ins: Sequence[int], fit: Fit) -> tuple[Mask, ...]:
        assert fit.partial is not None
        masks = []
        for i, (v, placement) in enumerate(zip(ins, fit.ins, strict=True)):
            fmt = placement.format(self.avals[v].shape, self.replicas)
            if fmt is not None and fmt.pad_elems:
                masks.append(Mask(i, fmt, fit.partial))
        return tuple(masks)

    def _replicated(self, op: Op, ins: Sequence[int]) -> None:
        depth = max((self.values[v].depth for v in ins), default=0)
        for out in op.outs:
            ndim = len(self.avals[out].shape)
            self.values[out] = Value(replicated(ndim), depth=depth, leaf=self._leaf(ins))
        self.steps.append(Compute(op, tuple(ins), op.outs))

    def _linear(self, op: Op, rule: OpRule, factors: Factors) -> bool:
        """Runs a linear operation on the parts of a sum, if its other operands allow that."""
        values = [self.values[v] for v in op.ins]
        partial = tuple(i for i, v in enumerate(values) if v.partial)
        axes = {values[i].partial_axes for i in partial} - {()}
        alike = len(axes) == 1 and all(
            values[i].partial == "sum" and jnp.issubdtype(self.avals[op.ins[i]].dtype, jnp.inexact)
            for i in partial
        )
        free = isinstance(op.primitive, Identity) or self.deferred.issuperset(op.outs)
        small = free or all(
            self.avals[v].size <= _MAX_LINEAR_PARTIAL_ELEMS for v in (*op.ins, *op.outs)
        )
        whole = all(v.placement.is_replicated for v in values)
        fit = None if whole or not free else self._tile_fit(factors, values)
        plain = (whole or fit is not None) and all(v.job < 0 for v in values)
        if not (alike and small and plain and self._is_linear(op, rule, partial)):
            return False
        if fit is not None:
            self._compute(op, rule, fit, list(op.ins), uniform=False)
        else:
            self._replicated(op, op.ins)
        (over,), leaf = axes, values[partial[0]].leaf
        for out in op.outs:
            self.values[out] = self.values[out]._replace(
                partial="sum", partial_axes=over, leaf=leaf
            )
        return True

    def _is_linear(self, op: Op, rule: OpRule, partial: tuple[int, ...]) -> bool:
        """Whether the results for the parts of these operands, added up, are those for the sums."""
        others = [v for i, v in enumerate(op.ins) if i not in partial]
        if op.name in ("add", "add_any", "pad") and all(map(self._is_zero, others)):
            return True
        alone = len(partial) == 1 or not others
        return alone and rule.linear is not None and rule.linear(op, partial)

    def _tile_fit(self, factors: Factors, values: Sequence[Value]) -> Fit | None:
        """How an operation runs on the tiles of sums just as they come, and on others cut alike."""
        placements = tuple(v.placement for v in values)
        tiles = tiles_of(factors, placements, self.replicas)
        fit = try_fit(factors, tiles, None, self.replicas)
        if fit is None or fit.partial:
            return None
        for value, have, want in zip(values, placements, fit.ins, strict=True):
            if have != want and (value.partial or have.shared_tiles(want) != have):
                return None
        return fit

    def _is_zero(self, v: int) -> bool:
        const = self.program.consts.get(v)
        return const is not None and not self.avals[v].shape and bool(const == 0)

    # ---------------------------------------------------------------------- running on the whole

    def _whole(self, op: Op, ins: Sequence[int], why: str) -> None:
        """Gathers every operand, runs on every replica, and says so."""
        settled = [self._settled(v) for v in ins]
        whole = [
            self._placed(v, replicated(len(self.avals[v].shape)), f"{op.name} {why}", op)
            for v in settled
        ]
        self._replicated(op, whole)

    def _leaf(self, ins: Sequence[int]) -> int:
        leaves = [self.values[v].leaf for v in ins if self.avals[v].size > 1]
        return max(leaves, default=-1)

    # --------------------------------------------------------------------------- moving values

    def _fresh(self, like: int, value: Value) -> int:
        self.avals.append(self.avals[like])
        self.values[len(self.avals) - 1] = value
        return len(self.avals) - 1

    def _settled(self, v: int) -> int:
        """The value with no pending reduction and no owner."""
        return self._left_job(self._finished(v))

    def _finished(self, v: int) -> int:
        """Finishes a partial value: scattered if its hint says so, else whole."""
        value = self.values[v]
        if value.partial is None:
            return v
        hint = self._wanted(v)
        if hint is not None and value.partial == "sum":
            v = self._cut(v, hint)
            value = self.values[v]
            if value.partial is None:
                return v
        after = value.placement
        if (
            hint is not None
            and hint.span is not None
            and value.partial == "sum"
            and not set(self.replicas.reduce_axes).isdisjoint(value.partial_axes)
            and hint.tiles == after.tiles
            and after.span is None
        ):
            after = hint
        return self._move("reduce", v, after, value.partial, value.partial_axes)

    def _cut(self, v: int, want: Placement) -> int:
        """The tile of a sum that is still open, where `want` splits what this has whole.

        Along axes over which it is summed too, tiles are scattered, and the rest stays open.
        """
        value = self.values[v]
        have, tiles = value.placement, want.without_span()
        if have.span is not None or have == tiles or have.shared_tiles(want) != have:
            return v
        new = set(tiles.tile_axes) - set(have.tile_axes)
        over = tuple(a for a in value.partial_axes if a in new)
        if over and len(over) < len(new):
            return v
        rest = tuple(a for a in value.partial_axes if a not in new)
        if over:
            part = self._move("reduce", v, tiles, value.partial, over)
        else:
            part = self._move("slice", v, tiles)
        partial = None if over and not rest else value.partial
        self.values[part] = value._replace(placement=tiles, partial=partial, partial_axes=rest)
        return part

    def _wanted(self, v: int) -> Placement | None:
        """How a sum is wanted."""
        return self.hints.get(v)

    def _placed(self, v: int, want: Placement, why: str, op: Op | None = None) -> int:
        """The value in placement `want`; a gather is a problem, unless it has no `why`."""
        have = self.values[v].placement
        if have == want:
            return v
        shared = have.shared_tiles(want)
        if have.span is None and have.tiles == shared.tiles:
            return self._move("slice", v, want)
        aval = self.avals[v]
        if self.in_loop and aval.size > 1:
            raise NeedsWhole
        if why:
            self.problems.append(
                Problem(
                    self.values[v].leaf,
                    op.name if op else "output",
                    op.source if op else "",
                    aval.nbytes,
                    why,
                )
            )
        if have.tiles == want.tiles:
            return self._regroup(v, want, planned=not why)
        whole = self._move("gather", v, shared, planned=not why)
        return whole if want == shared else self._move("slice", whole, want)

    def _regroup(self, v: int, want: Placement, *, planned: bool) -> int:
        """Same tiles: gathers the split, and splits anew."""
        whole = self._move("gather", v, want.without_span(), planned=planned)
        return whole if want.span is None else self._move("slice", whole, want)

    def _move(
        self,
        kind: str,
        v: int,
        after: Placement,
        reduction: Reduction | None = None,
        axes: tuple[str, ...] = (),
        *,
        planned: bool = False,
    ) -> int:
        key = (v, after)
        if key not in self.moved:
            value = self.values[v]
            dest = self._fresh(v, Value(after, depth=value.depth, leaf=value.leaf))
            self.moved[key] = dest
            sums = OWN
            if kind == "reduce" and after.span:
                equal = tuple(a for a in self.replicas.shard_axes if a not in axes)
                sums = self.sum_dtypes.equal_along(equal)
            self.steps.append(
                Move(
                    kind,  # type: ignore[arg-type]
                    v,
                    dest,
                    self.avals[v],
                    value.placement,
                    after,
                    reduction,
                    axes,
                    planned,
                    sums,
                )
            )
        return self.moved[key]

    # ------------------------------------------------------------------------------- owned work

    def _find(self, job: int) -> int:
        while self.job_parent[job] != job:
            job = self.job_parent[job]
        return job

    def _own(self, op: Op, ins: Sequence[int]) -> None:
        """Gives an operation to an owner, with the work that its operands came from."""
        if self.in_loop:
            raise NeedsWhole
        ins = [self._finished(v) for v in ins]
        outside = max((self.values[v].depth for v in ins if self.values[v].job < 0), default=0)
        inside = max((self.values[v].depth for v in ins if self.values[v].job >= 0), default=0)
        depth = max(outside + 1, inside)
        jobs = {
            self._find(self.values[v].job)
            for v in ins
            if self.values[v].job >= 0 and self.values[v].depth == depth
        }
        if jobs:
            job = min(jobs)
            for other in jobs - {job}:
                self._absorb(job, other)
        else:
            job = len(self.jobs)
            self.jobs.append(Job([], [], []))
            self.job_parent.append(job)
            self.job_depth.append(depth)
        names = [self._entered(v, job, depth, op) for v in ins]
        for out in op.outs:
            ndim = len(self.avals[out].shape)
            self.values[out] = Value(replicated(ndim), job=job, depth=depth, leaf=self._leaf(ins))
        self.jobs[job].steps.append(Compute(op, tuple(names), op.outs))
        self.jobs[job].flops += _flops(op, self.program.avals)

    def _absorb(self, job: int, other: int) -> None:
        self.job_parent[other] = job
        a, b = self.jobs[job], self.jobs[other]
        a.steps += b.steps
        a.entries += b.entries
        a.exits += b.exits
        a.flops += b.flops
        b.steps, b.entries, b.exits = [], [], []
        for (v, owner), dest in list(self.entered.items()):
            if owner == other:
                self.entered.setdefault((v, job), dest)

    def _entered(self, v: int, job: int, depth: int, op: Op) -> int:
        value = self.values[v]
        if value.job >= 0:
            if value.depth == depth:
                return v
            v = self._left_job(v)
            value = self.values[v]
        if value.placement.is_replicated:
            return v
        if any(value.placement.tiles):
            untiled = replicated(len(value.placement.tiles))
            v = self._placed(v, untiled, f"{op.name} works on whole matrices", op)
            return v
        key = (v, job)
        if key not in self.entered:
            dest = self._fresh(v, Value(replicated(len(self.avals[v].shape)), job=job, depth=depth))
            self.entered[key] = dest
            self.jobs[job].entries.append(
                Entry(v, dest, self.avals[v], value.placement, value.leaf)
            )
        return self.entered[key]

    def _left_job(self, v: int) -> int:
        """An owned value, split over all replicas again."""
        value = self.values[v]
        if value.job < 0:
            return v
        aval, hint = self.avals[v], self.hints.get(v)
        if aval.size <= self.replicas.num_shards:
            placement = replicated(len(aval.shape))  # too small to split: everyone gets it
        elif hint is not None and hint.span is not None and not any(hint.tiles):
            placement = hint
        else:
            placement = flat_placement(aval.shape, self.replicas)
        key = (v, placement)
        if key not in self.moved:
            self.moved[key] = self._fresh(v, Value(placement, depth=value.depth, leaf=value.leaf))
            job = self.jobs[self._find(value.job)]
            job.exits.append(Exit(v, self.moved[key], aval, placement))
        return self.moved[key]

    # ----------------------------------------------------------------------------- control flow

    def _control(self, k: int, op: Op) -> None:
        ins = [self._settled(v) if self.values[v].partial else v for v in op.ins]
        owned = any(self.values[v].job >= 0 for v in ins)
        if owned and op.name in _LOOPS:
            self._own(op, ins)
            return
        ins = [self._left_job(v) for v in ins]
        split = any(not self.values[v].placement.is_replicated for v in ins)
        hinted = any(h.span for body in self.propagation.bodies[k] for h in body.hints.values())
        if not split and not hinted:
            self._replicated(op, ins)
            return
        try:
            self._enter(k, op, ins)
        except NeedsWhole:
            if self.in_loop:
                raise
            if split:
                self._own(op, ins)
            else:
                self._replicated(op, ins)

    def _enter(self, k: int, op: Op, ins: list[int]) -> None:
        enter = {"cond": self._enter_cond, "scan": self._enter_scan, "while": self._enter_while}
        enter[op.name](k, op, ins)

    def _body(
        self,
        k: int,
        i: int,
        ins: Sequence[Value],
        outs: Sequence[Placement | None],
        *,
        loop: bool,
    ) -> tuple[Schedule, list[Problem]]:
        """Decides body `i` of operation `k`."""
        decider = self._inner(k, i, outs, loop=loop)
        inner = [Value(v.placement, leaf=v.leaf) for v in ins]
        return decider.run(inner), decider.problems

    def _inner(self, k: int, i: int, outs: Sequence[Placement | None], *, loop: bool) -> Decider:
        """The decider of body `i` of operation `k`."""
        return Decider(self.propagation.bodies[k][i], outs, in_loop=loop or self.in_loop)

    def _finish_control(
        self,
        op: Op,
        ins: Sequence[int],
        outs: Sequence[Placement],
        bodies: Sequence[tuple[Schedule, list[Problem]]],
    ) -> None:
        depth = max((self.values[v].depth for v in ins), default=0)
        leaf = self._leaf(ins)
        for out, placement in zip(op.outs, outs, strict=True):
            self.values[out] = Value(placement, depth=depth, leaf=leaf)
        for _, problems in bodies:
            self.problems.extend(problems)
        placements = tuple(self.values[v].placement for v in ins)
        schedules = tuple(s for s, _ in bodies)
        self.steps.append(Control(op, tuple(ins), placements, op.outs, schedules))

    def _enter_cond(self, k: int, op: Op, ins: list[int]) -> None:
        predicate = self._placed(ins[0], replicated(0), "a predicate must be whole", op)
        args = [self.values[v] for v in ins[1:]]
        nothing: list[Placement | None] = [None] * len(op.outs)
        branches = range(len(op.subs))
        found = [self._body(k, i, args, nothing, loop=False)[0] for i in branches]
        outs = []
        for i, out in enumerate(op.outs):
            options = [s.outputs[i][1] for s in found]
            hint = self.hints.get(out)
            split = [p for p in options if not p.is_replicated]
            outs.append(hint if hint in options else (split or options)[0])
        final = [self._body(k, i, args, outs, loop=False) for i in branches]
        self._finish_control(op, [predicate, *ins[1:]], outs, final)

    def _enter_scan(self, k: int, op: Op, ins: list[int]) -> None:
        (body,) = self.propagation.bodies[k]
        n_const, n_carry = op.params["num_consts"], op.params["num_carry"]
        ins = [v if i < n_const + n_carry else self._unstacked(v, op) for i, v in enumerate(ins)]
        carry = self._carry(
            body.program.inputs[n_const : n_const + n_carry], body, ins[n_const : n_const + n_carry]
        )
        inner = [self.values[v] for v in ins[:n_const]]
        inner += [Value(p) for p in carry]
        for v in ins[n_const + n_carry :]:
            placement = self.values[v].placement.without_leading_dim()
            assert placement is not None, "scanned operands are unstacked"
            inner.append(Value(placement))
        ys: list[Placement | None] = [None] * (len(op.outs) - n_carry)
        schedule, problems = self._body(k, 0, inner, [*carry, *ys], loop=True)
        outs = [*carry, *(p.with_leading_dim() for _, p in schedule.outputs[n_carry:])]
        start = [
            self._placed(v, p, "it goes round a loop", op)
            for v, p in zip(ins[n_const : n_const + n_carry], carry, strict=True)
        ]
        moved = [*ins[:n_const], *start, *ins[n_const + n_carry :]]
        self._finish_control(op, moved, outs, [(schedule, problems)])

    def _enter_while(self, k: int, op: Op, ins: list[int]) -> None:
        body = self.propagation.bodies[k][1]
        c, b = op.params["cond_nconsts"], op.params["body_nconsts"]
        carry = self._carry(body.program.inputs[b:], body, ins[c + b :])
        looped = [Value(p) for p in carry]
        test = self._body(
            k, 0, [*(self.values[v] for v in ins[:c]), *looped], [replicated(0)], loop=True
        )
        fixed = [self.values[v] for v in ins[c : c + b]]
        turn = self._body(k, 1, [*fixed, *looped], carry, loop=True)
        start = [
            self._placed(v, p, "it goes round a loop", op)
            for v, p in zip(ins[c + b :], carry, strict=True)
        ]
        self._finish_control(op, [*ins[: c + b], *start], carry, [test, turn])

    def _carry(
        self, inner: Sequence[int], body: Propagation, outer: Sequence[int]
    ) -> list[Placement]:
        """The placement in which each value goes round a loop: as it comes, or as hinted."""
        carry = []
        for i, v in zip(inner, outer, strict=True):
            have, hint = self.values[v].placement, body.hints.get(i)
            carry.append(hint if have.is_replicated and hint is not None else have)
        return carry

    def _unstacked(self, v: int, op: Op) -> int:
        """A scanned operand whose leading dim is whole."""
        placement = self.values[v].placement
        if (placement.span and placement.span.lo == 0) or (placement.tiles and placement.tiles[0]):
            return self._placed(v, replicated(len(placement.tiles)), "it is scanned over", op)
        return v

    # ---------------------------------------------------------------------------------- ordering

    def _ordered(self) -> list[Step]:
        stages: dict[int, list[Job]] = {}
        for j, job in enumerate(self.jobs):
            if self.job_parent[j] == j and job.steps:
                order = {id(op): k for k, op in enumerate(self.program.ops)}
                job.steps.sort(key=lambda s: order[id(s.op)])
                stages.setdefault(self.job_depth[j], []).append(job)
        for jobs in stages.values():
            _assign_owners(jobs, self.replicas.num_shards)
        owned = [OwnedStage(tuple(jobs)) for _, jobs in sorted(stages.items())]
        ready = set(self.program.inputs) | set(self.program.consts)
        return _order([*self.steps, *owned], ready)


def _is_matrix_work(op: Op) -> bool:
    """A matrix operation, or a loop around one."""
    if op.subs:
        return op.name in _LOOPS and any(_is_matrix_work(o) for sub in op.subs for o in sub.ops)
    rule = RULES.get(op.name)
    return rule is not None and rule.matrix


def _feeds_matrix(program: Program) -> set[int]:
    """Values that matrix work reads, directly or through operations that only rearrange them."""
    found: set[int] = set()
    for op in reversed(program.ops):
        rule = RULES.get(op.name)
        through = rule is not None and rule.family in ("elementwise", "shapes")
        if _is_matrix_work(op) or (through and found.issuperset(op.outs)):
            found.update(op.ins)
    return found


def _can_wait(move: Move) -> bool:
    """Gradients to scatter and weights to gather: more of them will come, to share buckets."""
    return move.planned or (move.kind == "reduce" and move.after.span is not None)


def _order(steps: list[Step], ready: set[int]) -> list[Step]:
    """Topological order in which communication waits until nothing local can run.

    Sums that others wait for, as of a batch norm, go before gradients, so that these go together.
    """
    readers: dict[int, list[int]] = {}
    missing = [0] * len(steps)
    local: list[int] = []
    moves: list[int] = []
    patient: list[int] = []
    stages: list[int] = []

    def queue(k: int) -> None:
        step = steps[k]
        if isinstance(step, OwnedStage):
            heapq.heappush(stages, k)
        elif isinstance(step, Move) and step.kind != "slice":
            (patient if _can_wait(step) else moves).append(k)
        else:
            heapq.heappush(local, k)

    for k, step in enumerate(steps):
        needs = {v for v in reads(step) if v not in ready}
        missing[k] = len(needs)
        for v in needs:
            readers.setdefault(v, []).append(k)
        if not needs:
            queue(k)

    ordered: list[Step] = []

    def done(step: Step) -> None:
        ordered.append(step)
        for v in writes(step):
            for k in readers.get(v, ()):
                missing[k] -= 1
                if missing[k] == 0:
                    queue(k)

    while local or moves or patient or stages:
        if local:
            done(steps[heapq.heappop(local)])
        elif moves or patient:
            queued = moves or patient
            batch = [steps[k] for k in queued]
            queued.clear()
            for together in _travelling_alike(batch):  # type: ignore[arg-type]
                done(Communicate(together))
        else:
            done(steps[heapq.heappop(stages)])
    assert not any(missing), "the steps of an update depend on each other in a circle"
    return ordered


def _travelling_alike(moves: Sequence[Move]) -> list[tuple[Move, ...]]:
    """Moves that may share collectives: sums that travel otherwise than the first ones go alone."""
    kinds = dict.fromkeys(m.sums for m in moves if m.kind == "reduce" and m.after.span is not None)
    later = list(kinds)[1:]
    return [
        tuple(m for m in moves if m.sums not in later),
        *(tuple(m for m in moves if m.sums == sums) for sums in later),
    ]


def _assign_owners(jobs: list[Job], num_shards: int) -> None:
    """Spreads jobs by their cost: the dearest first, each to the replica with least to do."""
    load = [(0.0, owner) for owner in range(num_shards)]
    heapq.heapify(load)
    for job in sorted(jobs, key=lambda j: -j.flops):
        busy, owner = heapq.heappop(load)
        job.owner = owner
        heapq.heappush(load, (busy + job.flops, owner))


def _flops(op: Op, avals: list[Aval]) -> float:
    """A rough count of multiplications, good enough to balance owners."""
    if op.subs:
        turns = op.params.get("length", 10)
        return turns * sum(_flops(o, sub.avals) for sub in op.subs for o in sub.ops)
    size = float(sum(avals[v].size for v in op.outs))
    rule = RULES.get(op.name)
    if rule is None or not rule.matrix:
        return size
    if op.name == "dot_general":
        (contracted, _), _ = op.params["dimension_numbers"]
        for d in contracted:
            size *= avals[op.ins[0]].shape[d]
        return size
    shape = avals[op.ins[0]].shape
    return size * 10.0 * (shape[-1] if shape else 1)
