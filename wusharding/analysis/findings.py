"""`Finding`: a fault of a train step that costs money, where it is, and what to do about it.

Each is read off the step as it is written, and says whether its sharded form still has it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from wusharding.analysis.flow import control_links, turns_of
from wusharding.analysis.layout import Leaf
from wusharding.analysis.placement import Placement, Replicas
from wusharding.analysis.plan import bytes_text
from wusharding.analysis.replication import SUMS, Facts
from wusharding.analysis.schedule import Communicate, Compute, Control, Move, Schedule
from wusharding.analysis.step import StepUpdate
from wusharding.analysis.sum_dtypes import is_narrower
from wusharding.analysis.sums import Origin, Sums
from wusharding.analysis.update import Region, nearest_weights
from wusharding.jaxprs import CROSSINGS, Op, is_extended

_WORTH_NAMING = 100  # state that stays whole is a finding from 1/100 of all state on, sums likewise


@dataclasses.dataclass(frozen=True)
class Finding:
    """One fault.

    Args:
      code: its short name; docs/analyze.md lists them.
      what: a sentence or two.
      where: the source line, or the arguments that it is about.
      moved_bytes: bytes that one device puts into collectives in a step, and need not.
      held_bytes: bytes that each device holds, and need not.
      mended: the sharded step does not have it.
      remedy: what to do.
    """

    code: str
    what: str
    where: str
    moved_bytes: int
    held_bytes: int
    mended: bool
    remedy: str

    @property
    def cost(self) -> str:
        """What it costs, in words."""
        moved = f"{bytes_text(self.moved_bytes)} a step" if self.moved_bytes else ""
        held = f"{bytes_text(self.held_bytes)} on each device" if self.held_bytes else ""
        return ", ".join(filter(None, (moved, held))) or "0 B"


def find_faults(
    update: StepUpdate,
    ins: Sequence[Leaf],
    outs: Sequence[Leaf],
    schedule: Schedule,
    replicas: Replicas,
    donated: Collection[int],
    splits: Sequence[Placement],
) -> tuple[Finding, ...]:
    """The faults of a step, those that cost most first.

    Args:
      update: the step and what in it is what.
      ins: how each argument array is stored.
      outs: the same of each array that it returns.
      schedule: the sharded step.
      replicas: the mesh.
      donated: the numbers of the arguments that are donated.
      splits: how the update of each weight is split.
    """
    step = _Step(update, ins, schedule, replicas, splits)
    found = [
        *_sums_of_equals(step),
        *_sums_in_loops(step),
        *_replicated_state(step),
        *_whole_state(step),
        *_wide_sums(step),
        *_wide_gathers(step),
        *_not_scattered(step),
        *_needed_whole(step, outs),
        *_not_donated(step, donated),
    ]
    return tuple(sorted(found, key=lambda f: -(f.moved_bytes + f.held_bytes)))


def finding_lines(findings: Sequence[Finding]) -> list[str]:
    """What a reader needs of each finding, on lines of their own."""
    lines = []
    for f in findings:
        mended = " (mended by the sharded step)" if f.mended else ""
        lines += [f"  {f.code}: {f.cost}{mended}  [{f.where}]", f"    {f.what}", f"    {f.remedy}"]
    return lines or ["  none"]


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" + "s" * (n != 1)


@dataclasses.dataclass(frozen=True)
class _Step:
    update: StepUpdate
    ins: Sequence[Leaf]
    schedule: Schedule
    replicas: Replicas
    splits: Sequence[Placement]

    @property
    def sums(self) -> Sums:
        return Sums(self.update.facts, self.replicas)

    def split_weights(self) -> list[int]:
        """The inputs that are weights whose new values are made split."""
        gathered = _Moves(self.schedule).sources(kind="gather", planned=True)
        return [
            i
            for i, o in self.update.weights
            if self.update.program.outputs[o] in gathered or self.ins[i].placement.span is not None
        ]

    @property
    def axes(self) -> str:
        return ", ".join(map(repr, self.replicas.reduce_axes))


class _At(NamedTuple):
    """A program, or the body of a loop in it, and how often it runs in a step."""

    sums: Sums
    origins: Mapping[int, Origin]
    turns: int


def _programs(sums: Sums, known: Mapping[int, Origin], turns: int = 1) -> Iterator[_At]:
    found = sums.origins(known)
    yield _At(sums, found, turns)
    for k, op in enumerate(sums.facts.program.ops):
        if op.subs:
            for body, inner in sums.inside(k, found):
                yield from _programs(body, inner, turns * turns_of(op))


# ------------------------------------------------------------------------------------ sum-of-equals


class _Again(NamedTuple):
    where: str
    scales: bool
    was_divided: bool


def _sums_of_equals(step: _Step) -> Iterator[Finding]:
    n = step.replicas.num_replicas
    costs: dict[_Again, int] = {}
    firsts: dict[_Again, dict[str, None]] = {}
    for at in _programs(step.sums, {}):
        for k, op in enumerate(at.sums.facts.program.ops):
            if not at.sums.repeats(k):
                continue
            for v, out in zip(op.ins, op.outs, strict=False):
                if v not in at.sums.data:
                    continue  # a constant: how replicas are counted
                origin = at.origins.get(v)
                was_divided = origin is None or origin.divided
                again = _Again(op.source, not at.sums.is_divided_after(out), was_divided)
                size = at.sums.facts.program.avals[v].nbytes * at.turns
                costs[again] = costs.get(again, 0) + size
                lines = firsts.setdefault(again, {})
                lines |= {} if origin is None else {origin.op.source: None}
    for again, cost in costs.items():
        if again.scales:
            effect = f"The sum multiplies them by {n}."
        elif again.was_divided:
            effect = f"With the division by {n} after it, the sum changes nothing."
        else:
            effect = (
                f"The division by {n} after it only undoes that: the result is the sum over "
                f"replicas, {n} times their mean."
            )
        lines = [*firsts[again]]
        more = f" and {_count(len(lines) - 1, 'other line')}" if len(lines) > 1 else ""
        why = f": they were summed in {lines[0]}{more}" if lines else ""
        yield Finding(
            "sum-of-equals",
            f"Summed over {step.axes}, but equal on all {n} replicas already{why}. {effect}",
            again.where,
            cost,
            0,
            True,
            "Remove this sum, or the one before. Differentiating with respect to weights that do "
            f"not vary over {step.axes} (check_vma=True) sums by itself: divide by {n} in place of "
            "the pmean, or differentiate with respect to jax.lax.pcast(weights, ..., "
            "to='varying'). The sharded step sends nothing for it, and keeps the numbers.",
        )


# -------------------------------------------------------------------------------------- sum-in-loop


def _sums_in_loops(step: _Step) -> Iterator[Finding]:
    bodies = dict(_scheduled(step.schedule))
    for at in _programs(step.sums, {}):
        for k, op in enumerate(at.sums.facts.program.ops):
            if op.name in ("scan", "while"):
                yield from _sums_in_loop(step, at, k, op, bodies.get(id(op)))


def _sums_in_loop(
    step: _Step, at: _At, k: int, op: Op, schedules: Sequence[Schedule] | None
) -> Iterator[Finding]:
    body, _ = list(at.sums.inside(k, at.origins))[-1]
    program = body.facts.program
    first = op.params["num_consts"] if op.name == "scan" else op.params["body_nconsts"]
    carries = op.params["num_carry"] if op.name == "scan" else len(op.outs)
    found = [s for i in range(carries) for s in body.added_to(first + i, i)]
    if not found:
        return
    turns = turns_of(op)
    sizes = {v: program.avals[v].nbytes for s, way in found for v in s.outs if v in way}
    inside = _Moves(schedules[-1]).sources(kind="reduce") if schedules else set()
    stay = [s for s, way in found if schedules is None or inside.intersection(way)]
    size = sum(sizes.values())
    count = f"{turns} times" if op.name == "scan" else "at every turn"
    cost = size * (turns - 1) if op.name == "scan" else size
    biggest = max(found, key=lambda s: max(program.avals[v].nbytes for v in s[0].outs))
    yield Finding(
        "sum-in-loop",
        f"A loop that accumulates ({op.source}) sums over {step.axes} {count}, "
        f"{bytes_text(size)} each: one sum of what was accumulated would do.",
        biggest[0].source,
        cost * at.turns,
        0,
        not stay,
        "Accumulate each replica's own values and sum after the loop: in shard_map with "
        "check_vma=True differentiate with respect to jax.lax.pcast(weights, ..., to='varying')."
        if stay
        else "Nothing, if you run the sharded step: it sums once, after the loop.",
    )


def _scheduled(schedule: Schedule) -> Iterator[tuple[int, Sequence[Schedule]]]:
    for step in schedule.steps:
        if isinstance(step, Control):
            yield id(step.op), step.bodies
            for body in step.bodies:
                yield from _scheduled(body)


class _Moves:
    """The moves of a schedule, bodies left out."""

    def __init__(self, schedule: Schedule) -> None:
        self.all: list[Move] = []
        for step in schedule.steps:
            if isinstance(step, Communicate):
                self.all += step.moves
            elif isinstance(step, Move):
                self.all.append(step)
        self._came_from = {m.dest: m.source for m in self.all}

    def sources(self, **want: Any) -> set[int]:
        """The values of the program that moves of a kind began with."""
        return {self.first(m) for m in self.all if all(getattr(m, k) == w for k, w in want.items())}

    def first(self, move: Move) -> int:
        """The value of the program that a move began with."""
        v = move.source
        while v in self._came_from:
            v = self._came_from[v]
        return v


# -------------------------------------------------------------------- replicated-state, whole-state


def _replicated_state(step: _Step) -> Iterator[Finding]:
    pairs = [(i, o) for i, o in step.update.aux if step.ins[i].placement.span is not None]
    whole = sum(_tile_bytes(step.ins[i], step.replicas) for i, _ in pairs)
    held = sum(step.ins[i].held_bytes(step.replicas) for i, _ in pairs)
    if whole <= held:
        return
    largest = max(pairs, key=lambda pair: step.ins[pair[0]].aval.nbytes)
    yield Finding(
        "replicated-state",
        f"{_count(len(pairs), 'array')} of state held whole by each of "
        f"{step.replicas.num_replicas} replicas, which all do the same update.",
        made_at(step.update, largest[1]),
        0,
        whole - held,
        True,
        "Run the sharded step: it keeps and updates a share on each replica.",
    )


def _whole_state(step: _Step) -> Iterator[Finding]:
    rows = [(step.ins[i], o) for i, o in step.update.aux]
    rows = [
        (leaf, o)
        for leaf, o in rows
        if leaf.why and leaf.aval.size > 1 and not is_extended(leaf.dtype)
    ]
    total = sum(leaf.aval.nbytes for leaf, _ in rows)
    if total * _WORTH_NAMING < sum(step.ins[i].aval.nbytes for i, _ in step.update.aux):
        return
    for why in dict.fromkeys(leaf.why for leaf, _ in rows):
        same = [(leaf, o) for leaf, o in rows if leaf.why == why]
        same.sort(key=lambda row: -row[0].aval.nbytes)
        held = sum(leaf.held_bytes(step.replicas) for leaf, _ in same)
        names = ", ".join(leaf.path for leaf, _ in same[:3])
        more = f" and {len(same) - 3} more" if len(same) > 3 else ""
        yield Finding(
            "whole-state",
            f"State that stays whole on every replica: {names}{more}; {why}.",
            made_at(step.update, same[0][1]),
            0,
            held - held // step.replicas.num_shards,
            False,
            "The plan lists what was gathered, and for which operation.",
        )


def _tile_bytes(leaf: Leaf, replicas: Replicas) -> int:
    whole = dataclasses.replace(leaf, placement=leaf.placement.without_span(), lanes=None)
    return whole.held_bytes(replicas)


def made_at(update: StepUpdate, output: int) -> str:
    """The line that makes an output of a step."""
    makers = {v: op for op in update.program.ops for v in op.outs}
    op = makers.get(update.program.outputs[output])
    while op is not None and (op.name in CROSSINGS or ":" not in op.source):
        op = makers.get(op.ins[0]) if op.ins else None
    return "unknown line" if op is None else op.source


# ---------------------------------------------------------------------------- wide-sum, wide-gather


def _wide_sums(step: _Step) -> Iterator[Finding]:
    costs: dict[str, tuple[int, int]] = {}
    for at in _programs(step.sums, {}):
        program = at.sums.facts.program
        for k, op in enumerate(program.ops):
            if op.name in SUMS and at.sums.is_sum(k):
                size = sum(program.avals[v].nbytes for v in op.ins if at.sums.is_cast_up(v))
                if size:
                    count, total = costs.get(op.source, (0, 0))
                    costs[op.source] = (count + 1, total + size * at.turns)
    for where, (_, size) in costs.items():
        yield Finding(
            "wide-sum",
            f"Summed over {step.axes} in 32 bits, though each replica's values were made in 16 and "
            "only cast: half of the bytes say nothing.",
            where,
            size // 2,
            0,
            not step.update.style.sum_dtypes.is_own,
            "shard_step(..., scatter_dtype=...), or sum before the cast: differentiate with "
            "respect to 16-bit weights, reduce, cast. That rounds the sum: compare loss curves.",
        )


def _wide_gathers(step: _Step) -> Iterator[Finding]:
    update = step.update
    if update.style.weights != "whole":
        return  # gathered where they are read, in the dtype that is read
    found: dict[Any, list[Leaf]] = {}
    where: dict[Any, str] = {}
    reads_of = _Reads()
    for i in step.split_weights():
        reads = reads_of.forward(update.facts, update.region, update.program.inputs[i])
        dtypes = {op.params.get("new_dtype") for op in reads}
        if len(dtypes) == 1 and all(op.name == "convert_element_type" for op in reads):
            (dtype,) = dtypes
            if is_narrower(dtype, step.ins[i].dtype):
                found.setdefault(jnp.dtype(dtype), []).append(step.ins[i])
                where.setdefault(jnp.dtype(dtype), reads[0].source)
    for dtype, leaves in found.items():
        size = sum(-(-leaf.aval.size // step.replicas.num_shards) for leaf in leaves)
        wide = sum(leaf.aval.nbytes for leaf in leaves) // sum(leaf.aval.size for leaf in leaves)
        yield Finding(
            "wide-gather",
            f"{_count(len(leaves), 'weight')} gathered in {leaves[0].dtype} after the update, "
            f"though the forward pass reads nothing but a cast to {dtype}.",
            where[dtype],
            size * (wide - dtype.itemsize),
            0,
            False,
            "shard_step(..., weights='split') keeps them split and gathers them in the dtype that "
            "is read.",
        )


class _Reads:
    """Who reads a value first, but for what hands it on."""

    def __init__(self) -> None:
        self._readers: dict[int, dict[int, list[int]]] = {}

    def forward(self, facts: Facts, region: Region, v: int) -> list[Op]:
        """The operations of the forward pass that do."""
        found: list[Op] = []
        for k in self._of(facts).get(v, ()):
            op = facts.program.ops[k]
            if op.name in CROSSINGS or op.name in ("copy", "optimization_barrier"):
                found += self.forward(facts, region, op.outs[op.ins.index(v)])
            elif op.subs and k in region.bodies:
                links = control_links(op)
                for body, inner, link in zip(facts.bodies[k], region.bodies[k], links, strict=True):
                    inputs = set(body.program.inputs)
                    for outer, name, _ in link:
                        if outer == v and name in inputs:
                            found += self.forward(body, inner, name)
            elif k in region.forward:
                found.append(op)
        return found

    def _of(self, facts: Facts) -> dict[int, list[int]]:
        if id(facts) not in self._readers:
            readers: dict[int, list[int]] = {}
            for k, op in enumerate(facts.program.ops):
                for v in dict.fromkeys(op.ins):
                    readers.setdefault(v, []).append(k)
            self._readers[id(facts)] = readers
        return self._readers[id(facts)]


# ------------------------------------------------------------------------------------ not-scattered


class _Level(NamedTuple):
    """A program or the body of a loop, its part of the sharded step, and whose its values are."""

    sums: Sums
    region: Region
    schedule: Schedule
    weight_of: Mapping[int, int]
    turns: int

    def inside(self) -> Iterator[_Level]:
        """The bodies of control flow that the update reaches into."""
        facts = self.sums.facts
        positions = {id(op): k for k, op in enumerate(facts.program.ops)}
        for s in self.schedule.steps:
            k = positions.get(id(s.op), -1) if isinstance(s, Control) else -1
            if not isinstance(s, Control) or k not in self.region.bodies:
                continue
            parts = (facts.bodies[k], self.region.bodies[k], s.bodies, control_links(s.op))
            for body, region, schedule, links in zip(*parts, strict=True):
                outs = set(body.program.outputs)
                made = [(v, self.weight_of.get(u, -1)) for u, v, _ in links if v in outs]
                weight_of = nearest_weights(body.program, region, made)
                sums = Sums(body, self.sums.replicas)
                yield _Level(sums, region, schedule, weight_of, self.turns * turns_of(s.op))


def _levels(step: _Step) -> Iterator[_Level]:
    program, region = step.update.program, step.update.region
    made = [(program.outputs[o], i) for i, o in step.update.weights]
    weight_of = nearest_weights(program, region, made)
    found = [_Level(step.sums, region, step.schedule, weight_of, 1)]
    while found:
        level = found.pop()
        yield level
        found += level.inside()


def _not_scattered(step: _Step) -> Iterator[Finding]:
    """Gradients of weights whose update is split, that each device makes whole."""
    pairs = zip(step.update.weights, step.splits, strict=True)
    split = {i for (i, _), placement in pairs if placement.span is not None}
    costs: dict[int, dict[str, int]] = {}
    for level in _levels(step):
        sums, moves = level.sums, _Moves(level.schedule)
        reduced = [m for m in moves.all if m.kind == "reduce" and m.reduction == "sum"]
        scattered = {sums.chain(moves.first(m))[-1] for m in reduced if m.after.span is not None}
        for m in reduced:
            first = moves.first(m)
            weight, chain = level.weight_of.get(first, -1), sums.chain(first)
            if weight not in split or m.after.span is not None or chain[-1] in scattered:
                continue
            # What the forward pass reads is no gradient: statistics of the batch, say.
            if not level.region.whole.isdisjoint(chain) or not sums.is_over_replicas(first):
                continue
            maker = sums.maker(chain[-1])
            where = "unknown line" if maker is None else maker.source
            lines = costs.setdefault(weight, {})
            lines[where] = lines.get(where, 0) + m.aval.nbytes * level.turns
    total = sum(step.ins[i].aval.nbytes for i in split)
    for weight, lines in costs.items():
        cost = sum(lines.values())
        if cost * _WORTH_NAMING < total:
            continue
        where, leaf = max(lines, key=lambda line: lines[line]), step.ins[weight]
        yield Finding(
            "not-scattered",
            f"The gradient of {leaf.path}, {bytes_text(leaf.aval.nbytes)}, or a part of it, is "
            "all-reduced in the sharded step though its update runs on shards: a reduce-scatter "
            "would move half of that.",
            where,
            cost,
            0,
            False,
            "Between this sum and the update something needs the whole gradient, or rearranges it "
            "in a way that its split cannot follow. Where it is only a transposition, "
            "shard_step(..., formats='dim') may do; in a loop that adds up, accumulate='whole', "
            "with a carry that is zero at first and read by nothing else; on a mesh with a model "
            "axis, a weight with the tiles in which its gradient is made, or none.",
        )


# ------------------------------------------------------------------------------------- needed-whole


def _needed_whole(step: _Step, outs: Sequence[Leaf]) -> Iterator[Finding]:
    """What is split, and something other than the next forward pass needs whole."""
    sums, schedule = step.sums, step.schedule
    origins, moves = sums.origins(), _Moves(schedule)
    readers: dict[int, str] = {v: outs[o].path for o, (v, _) in enumerate(schedule.outputs)}
    for s in schedule.steps:
        if isinstance(s, Compute | Control):
            readers |= dict.fromkeys(s.ins, s.op.source)
    reduced = [m for m in moves.all if m.kind == "reduce"]
    scattered = {sums.chain(moves.first(m))[-1] for m in reduced if m.after.span is not None}
    costs: dict[tuple[str, str, str], int] = {}
    for move in moves.all:
        first = moves.first(move)
        if move.kind == "gather" and not move.planned and move.after.span is None:
            cost = -(-move.aval.nbytes // step.replicas.num_shards)
        elif (
            move.kind == "reduce" and move.after.span is None and sums.chain(first)[-1] in scattered
        ):
            cost = move.aval.nbytes
        else:
            continue
        origin = origins.get(first)
        what = "A value of the update"
        if origin is not None:
            what = "A gradient" if origin.linear else "Something made of a gradient"
        key = (readers.get(move.dest, "unknown line"), move.kind, what)
        costs[key] = costs.get(key, 0) + cost
    returned = {leaf.path for leaf in outs}
    for (where, kind, what), cost in costs.items():
        yield Finding(
            "needed-whole",
            f"{what} is needed whole"
            + (": the step returns it." if where in returned else ": this takes no pieces.")
            + (
                " It is gathered." if kind == "gather" else " It is all-reduced, and scattered too."
            ),
            f"output {where}" if where in returned else where,
            cost,
            0,
            False,
            "Return what you read of it, such as a norm or another sum: these need no gather."
            if where in returned
            else "Compute it from sums and elementwise operations, or not in every step.",
        )


# -------------------------------------------------------------------------------------- not-donated


def _not_donated(step: _Step, donated: Collection[int]) -> Iterator[Finding]:
    rounds = [step.ins[i] for i, _ in (*step.update.weights, *step.update.aux)]
    held: dict[int, int] = {}
    for leaf in rounds:
        number = re.match(r"\[(\d+)\]", leaf.path)
        if number and int(number[1]) not in donated:
            held[int(number[1])] = held.get(int(number[1]), 0) + leaf.held_bytes(step.replicas)
    if not held:
        return
    numbers = tuple(sorted({*donated, *held}))
    names = ", ".join(map(str, sorted(held)))
    yield Finding(
        "not-donated",
        "What goes in here comes out anew, and is not donated: each device holds the old arrays "
        "and the new ones at the same time.",
        f"argument{'s' * (len(held) > 1)} {names}",
        0,
        sum(held.values()),
        False,
        f"shard_step(..., donate_argnums={numbers}), or jax.jit(step, donate_argnums={numbers}).",
    )
