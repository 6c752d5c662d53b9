"""A whole train step as a program that updates weights: what goes round in it, and in what role."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax.numpy as jnp

from wusharding.analysis.assign import hint_weights
from wusharding.analysis.decide import Value
from wusharding.analysis.decide_step import decide_step
from wusharding.analysis.placement import Placement, Replicas
from wusharding.analysis.propagate import Propagation
from wusharding.analysis.replication import Facts, Spread, analyse
from wusharding.analysis.schedule import Problem, Schedule
from wusharding.analysis.update import Region, find_region
from wusharding.jaxprs import Program


@dataclasses.dataclass(frozen=True)
class StepUpdate:
    """A train step, and which of its inputs and outputs are weights and auxiliary state.

    Args:
      program: the traced step.
      facts: what differs between replicas.
      region: which operations are the update.
      weights: positions of weights among the inputs, and of the new ones among the outputs.
      aux: the same for auxiliary state.
      split_weights: weights stay split between steps, and are gathered where they are read.
    """

    program: Program
    facts: Facts
    region: Region
    weights: tuple[tuple[int, int], ...]
    aux: tuple[tuple[int, int], ...]
    split_weights: bool

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

    def shared(self, replicas: Replicas) -> Propagation:
        return Propagation(self.program, replicas, region=self.region)

    def propagate(
        self, shared: Propagation, params: Sequence[Placement], state: Mapping[int, Placement]
    ) -> Propagation:
        ties = zip((*self.state, *self.params), (*self.new_state, *self.new_params), strict=True)
        propagation = shared.fresh(ties)
        hint_weights(propagation.hints, self.program, self.params, self.new_params, params)
        for i, p in state.items():
            if not p.is_replicated:
                propagation.hints[self.state[i]] = p
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
        return decide_step(propagation, self.facts, self.region, inputs, outputs, kept)

    def stored(self, weight: Placement) -> Placement:
        """How a weight whose update is split as `weight` is kept between steps."""
        return weight if self.split_weights else weight.without_span()


def find_update(
    program: Program,
    replicas: Replicas,
    inputs: Sequence[Spread],
    matched: Sequence[tuple[int, int]],
    *,
    split_weights: bool,
) -> StepUpdate:
    """Finds the weight update of a step.

    Args:
      program: the traced step.
      replicas: the mesh.
      inputs: where each input lies.
      matched: inputs and outputs that may belong together, by position: their trees agree.
      split_weights: keep weights split between steps.

    Raises:
      ReplicationError: a value is declared replicated, but may differ between replicas.
    """
    facts = analyse(program, replicas, inputs)
    axes = frozenset(replicas.reduce_axes)
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
    return StepUpdate(program, facts, region, tuple(weights), tuple(aux), split_weights)


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
