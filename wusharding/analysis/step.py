"""A whole train step as a program that updates weights: what goes round in it, and in what role."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import jax.numpy as jnp

from wusharding.analysis.assign import hint_arrays
from wusharding.analysis.decide import Value
from wusharding.analysis.decide_step import Style, decide_step
from wusharding.analysis.flow import body_ties, control_links
from wusharding.analysis.placement import Placement, Replicas, spec_tiles
from wusharding.analysis.propagate import Propagation
from wusharding.analysis.replication import Facts, Spread, analyse
from wusharding.analysis.schedule import Problem, Schedule
from wusharding.analysis.update import Region, find_region, gradients
from wusharding.jaxprs import Op, Program


def _hint_gradients(
    propagation: Propagation,
    facts: Facts,
    region: Region,
    pairs: Sequence[tuple[int, int, int]],
    params: Sequence[Placement],
) -> bool:
    """Says of gradients that they are split as their weights, where nothing else said it.

    A gradient that no new weight is made from is taken for that of a frozen weight of its shape:
    the state that it makes may be split in any way.

    `pairs` are old and new weights with their numbers. Returns whether anything was said.
    """
    program, hints, changed = facts.program, propagation.hints, False
    shapes = {weight: program.avals[old].shape for old, _, weight in pairs}
    found = list(gradients(facts, region, propagation.replicas, [(b, i) for _, b, i in pairs]))
    frozen = shapes.keys() - {weight for _, weight in found}
    for v, weight in found:
        shape, tiles = program.avals[v].shape, facts.spreads[v].tiles
        like = [weight] if weight >= 0 else sorted(frozen)
        placements = [_of_gradient(shape, shapes[i], params[i]) for i in like]
        placements = [p for p in placements if p and p.span and (weight >= 0 or p.tiles == tiles)]
        if v not in hints and placements:
            hints[v] = placements[0]
            changed = True
    numbers = {old: weight for old, _, weight in pairs}
    for op in program.ops:
        weight = numbers.get(op.ins[0], -1) if op.name == "enter_manual" else -1
        if weight >= 0 and not any(params[weight].tiles):
            numbers[op.outs[0]] = weight
    for k, regions in region.bodies.items():
        for i, inside in enumerate(regions):
            inner = _pairs_inside(program.ops[k], i, numbers)
            body = propagation.bodies[k][i]
            changed |= _hint_gradients(body, facts.bodies[k][i], inside, inner, params)
    return changed


def _of_gradient(
    shape: tuple[int, ...], weight: tuple[int, ...], placement: Placement
) -> Placement | None:
    """The placement of a gradient that is split as its weight; None where it has another shape."""
    if weight[:1] == (1,) and shape == weight[1:]:  # a copy of a stack, as `pmap` hands it over
        return placement.without_leading_dim()
    return placement if shape == weight else None


def _pairs_inside(op: Op, body: int, weights: Mapping[int, int]) -> list[tuple[int, int, int]]:
    """Old and new weights in the body of a loop that carries weights, with their numbers."""
    outside = {inner: outer for outer, inner, _ in reversed(control_links(op)[body])}
    return [
        (old, new, weights[outside[old]])
        for old, new in body_ties(op)[body]
        if outside[old] in weights
    ]


@dataclasses.dataclass(frozen=True)
class StepUpdate:
    """A train step, and which of its inputs and outputs are weights and auxiliary state.

    Args:
      program: the traced step.
      facts: what differs between replicas.
      region: which operations are the update.
      weights: positions of weights among the inputs, and of the new ones among the outputs.
      aux: the same for auxiliary state.
      style: what the user chose.
      layered: numbers of weights that the forward pass goes over layer by layer.
      copied: of these, the pairs that come and leave as stacks of equal copies, as with `pmap`; the
        program has a single copy in their place.
    """

    program: Program
    facts: Facts
    region: Region
    weights: tuple[tuple[int, int], ...]
    aux: tuple[tuple[int, int], ...]
    style: Style
    layered: frozenset[int]
    copied: frozenset[tuple[int, int]]

    splits_orphans = False

    @property
    def params(self) -> tuple[int, ...]:
        return tuple(self.program.inputs[i] for i, _ in self.weights)

    @property
    def new_params(self) -> tuple[int, ...]:
        return tuple(self.program.outputs[o] for _, o in self.weights)

    @property
    def state(self) -> tuple[int, ...]:
        return tuple(self.program.inputs[i] for i, _ in self.aux)

    @property
    def new_state(self) -> tuple[int, ...]:
        return tuple(self.program.outputs[o] for _, o in self.aux)

    def kept_dims(self, param: int) -> int:
        """One for a weight whose layers are gathered in turn, and are more than a number each."""
        layered = self.style.weights == "layers" and param in self.layered
        return int(layered and len(self.program.avals[self.params[param]].shape) > 1)

    def shared(self, replicas: Replicas) -> Propagation:
        return Propagation(self.program, replicas, region=self.region)

    def propagate(
        self, shared: Propagation, params: Sequence[Placement], state: Mapping[int, Placement]
    ) -> Propagation:
        ties = zip((*self.state, *self.params), (*self.new_state, *self.new_params), strict=True)
        propagation = shared.fresh(ties)
        hint_arrays(propagation.hints, self, params, state)
        propagation.run()
        pairs = zip(self.params, self.new_params, strict=True)
        numbered = [(a, b, i) for i, (a, b) in enumerate(pairs)]
        if _hint_gradients(propagation, self.facts, self.region, numbered, params):
            propagation.run()
        return propagation

    def schedule(
        self, propagation: Propagation, params: Sequence[Placement], state: Sequence[Placement]
    ) -> tuple[Schedule, list[Problem]]:
        inputs = [Value(Placement(self.facts.spreads[v].tiles)) for v in self.program.inputs]
        outputs: list[Placement | None] = [None] * len(self.program.outputs)
        for leaf, ((i, o), p) in enumerate(zip(self.weights, params, strict=True)):
            stored = self.stored(p)
            inputs[i], outputs[o] = Value(stored, leaf=leaf), stored
        for (i, o), p in zip(self.aux, state, strict=True):
            inputs[i], outputs[o] = Value(p), p
        kept = (*self.weights, *self.aux)
        return decide_step(propagation, self.facts, self.region, inputs, outputs, kept, self.style)

    def stored(self, weight: Placement) -> Placement:
        """How a weight whose update is split as `weight` is kept between steps."""
        return weight.without_span() if self.style.weights == "whole" else weight


def find_update(
    program: Program,
    replicas: Replicas,
    inputs: Sequence[Spread],
    matched: Sequence[tuple[int, int]],
    style: Style,
    results: Sequence[str] = (),
) -> StepUpdate:
    """Finds the weight update of a step.

    Args:
      program: the traced step.
      replicas: the mesh.
      inputs: where each input lies.
      matched: inputs and outputs that may belong together, by position: their trees agree.
      style: what the user chose.
      results: names of the step's results, for errors.

    Raises:
      ReplicationError: a value is declared replicated, but may differ between replicas.
    """
    axes = frozenset(replicas.reduce_axes)
    copied = _stacks(program, replicas, matched)
    while True:
        single = _with_one_copy(program, copied)
        spreads = [
            spread if v == stack else Spread.same(len(single.avals[v].shape))
            for v, stack, spread in zip(single.inputs, program.inputs, inputs, strict=True)
        ]
        facts = analyse(single, replicas, spreads, results=results)
        own = {(i, o) for i, o in copied if facts.spreads[single.outputs[o]].axes() & axes}
        if not own:
            break
        copied -= own  # each replica keeps its own
    program = single
    sources = _sources(facts)
    kept = [
        (i, o)
        for i, o in matched
        if program.inputs[i] != program.outputs[o] and sources[program.outputs[o]] >> i & 1
    ]
    region = find_region(facts, [program.outputs[o] for _, o in kept])
    weights, aux = [], []
    for i, o in kept:
        a, b = program.inputs[i], program.outputs[o]
        if (facts.spreads[a].axes() | facts.spreads[b].axes()) & axes:
            continue  # each replica keeps its own
        is_weight = a in region.whole and jnp.issubdtype(program.avals[a].dtype, jnp.inexact)
        if is_weight:
            weights.append((i, o))
        elif a not in region.whole:
            aux.append((i, o))
    return StepUpdate(
        program,
        facts,
        region,
        tuple(weights),
        tuple(aux),
        style,
        _layered(program, region, [program.inputs[i] for i, _ in weights]),
        frozenset(copied),
    )


def _layered(program: Program, region: Region, weights: Sequence[int]) -> frozenset[int]:
    """Numbers of weights that the forward pass scans over, maybe cast before."""
    made_by = {v: op for op in program.ops for v in op.outs}
    scanned = set()
    for k in region.bodies:
        op = program.ops[k]
        if op.name != "scan":
            continue
        for v in op.ins[op.params["num_consts"] + op.params["num_carry"] :]:
            while v in made_by and made_by[v].name in ("convert_element_type", "copy"):
                v = made_by[v].ins[0]
            scanned.add(v)
    return frozenset(n for n, v in enumerate(weights) if v in scanned)


def _stacks(
    program: Program, replicas: Replicas, matched: Sequence[tuple[int, int]]
) -> set[tuple[int, int]]:
    """Pairs that may be stacks of equal copies: one for each replica, going in and coming out."""
    entered = {op.ins[0]: op for op in program.ops if op.name == "enter_manual"}
    left = {op.outs[0]: op for op in program.ops if op.name == "leave_manual"}
    found = set()
    for i, o in matched:
        a, b = entered.get(program.inputs[i]), left.get(program.outputs[o])
        if a is None or b is None or not program.avals[a.outs[0]].shape:
            continue
        tiles = spec_tiles(a.params["spec"], len(program.avals[a.outs[0]].shape))
        alone = not any(tiles[1:]) and tiles[0] == replicas.reduce_axes
        if alone and program.avals[a.outs[0]].shape[0] == 1 and a.params == b.params:
            found.add((i, o))
    return found


def _with_one_copy(program: Program, copied: Collection[tuple[int, int]]) -> Program:
    """The program with one copy in the place of each of these stacks."""
    entered = {op.ins[0]: op for op in program.ops if op.name == "enter_manual"}
    left = {op.outs[0]: op for op in program.ops if op.name == "leave_manual"}
    inputs, outputs, gone = list(program.inputs), list(program.outputs), set[int]()
    for i, o in copied:
        gone |= {id(entered[inputs[i]]), id(left[outputs[o]])}
        inputs[i], outputs[o] = entered[inputs[i]].outs[0], left[outputs[o]].ins[0]
    ops = [op for op in program.ops if id(op) not in gone]
    return dataclasses.replace(program, inputs=tuple(inputs), outputs=tuple(outputs), ops=ops)


def _sources(facts: Facts) -> list[int]:
    """For each value the inputs that it is made from, other than by the forward pass, as bits."""
    program = facts.program
    found = [0] * len(program.avals)
    for i, v in enumerate(program.inputs):
        found[v] |= 1 << i
    for k, op in enumerate(program.ops):
        if k in facts.touched and not op.subs:
            continue
        bits = 0
        for v in op.ins:
            bits |= found[v]
        for v in op.outs:
            found[v] = bits
    return found
