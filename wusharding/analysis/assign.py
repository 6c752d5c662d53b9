"""Assigns a placement to every weight and every array of auxiliary state of one optimizer.

Weights get candidates from `choose`; the update is then decided with them, and a weight whose
format made operations gather moves on to its next candidate. State follows by propagation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from wusharding.analysis.choose import FormatChoice, Target, candidates
from wusharding.analysis.decide import decide, flat_placement
from wusharding.analysis.placement import Placement, Replicas, Tiles, replicated
from wusharding.analysis.propagate import Propagation
from wusharding.analysis.schedule import OwnedStage, Problem, Schedule, steps_of
from wusharding.jaxprs import Aval, Program

MIN_ORPHAN_ELEMS = 1024  # of state that nothing splits: smaller ones are not worth a gather
_GATHER_PENALTY = 50.0  # passes over the leaf that gathering it and working on the whole costs


@dataclasses.dataclass(frozen=True)
class Update:
    """A traced `update`: inputs are gradients, state, weights and extra arguments, in that order.

    Outputs are the updates (or new weights), then the new state. `grads_of[i]` is the parameter
    that gradient `i` is the gradient of.
    """

    program: Program
    grads_of: tuple[int, ...]
    num_params: int
    num_state: int
    has_params: bool
    per_example_axes: tuple[str, ...] = ()

    @property
    def grads(self) -> tuple[int, ...]:
        return self.program.inputs[: len(self.grads_of)]

    @property
    def state(self) -> tuple[int, ...]:
        start = len(self.grads_of)
        return self.program.inputs[start : start + self.num_state]

    @property
    def params(self) -> tuple[int, ...]:
        start = len(self.grads_of) + self.num_state
        return self.program.inputs[start : start + self.num_params] if self.has_params else ()

    @property
    def new_params(self) -> tuple[int, ...]:
        return self.program.outputs[: self.num_params]

    @property
    def new_state(self) -> tuple[int, ...]:
        return self.program.outputs[self.num_params :]

    def grad_placement(self, param: Placement) -> Placement:
        """The placement of a gradient: its weight's, or that of one gradient per example."""
        if not self.per_example_axes:
            return param
        return Placement((self.per_example_axes, *param.tiles))


@dataclasses.dataclass(frozen=True)
class Assignment:
    """Placements of weights and state, and the bytes of each weight that moved for them."""

    params: tuple[Placement, ...]
    state: tuple[Placement, ...]
    moved_bytes: Mapping[int, int]


def assign(
    update: Update,
    params: Sequence[Aval],
    tiles: Sequence[Tiles],
    replicas: Replicas,
    *,
    target: Target,
    choice: FormatChoice,
    min_shard_elems: int,
) -> Assignment:
    """Chooses placements.

    Args:
      update: the traced update.
      params: shape and dtype of each weight.
      tiles: mesh axes that already split each weight.
      replicas: the mesh.
      target: what the program will run on.
      choice: which formats to consider.
      min_shard_elems: weights and state arrays with fewer elements stay replicated.
    """
    options: list[list[tuple[float, Placement]]] = []
    for aval, t in zip(params, tiles, strict=True):
        splits = aval.size >= max(min_shard_elems, 2) and replicas.num_shards > 1
        found = candidates(aval.shape, t, replicas, target, choice) if splits else []
        options.append(found or [(0.0, Placement(t))])
    trial = [0] * len(params)
    tried = [0] * len(params)
    best: list[tuple[float, int]] = [(float("inf"), 0)] * len(params)
    propagation = Propagation(update.program, replicas)
    while True:
        chosen = [o[k][1] for o, k in zip(options, trial, strict=True)]
        result = _evaluate(update, propagation, chosen, min_shard_elems)
        moved = result.moved_bytes
        again = False
        for i, aval in enumerate(params):
            cost = options[i][trial[i]][0] + _GATHER_PENALTY * moved.get(i, 0) / max(aval.nbytes, 1)
            best[i] = min(best[i], (cost, trial[i]))
            if i in moved and trial[i] == tried[i] and tried[i] + 1 < len(options[i]):
                trial[i] = tried[i] = tried[i] + 1
                again = True
            else:
                trial[i] = best[i][1]
        if not again:
            break
    final = [o[k][1] for o, (_, k) in zip(options, best, strict=True)]
    return result if final == chosen else _evaluate(update, propagation, final, min_shard_elems)


def _evaluate(
    update: Update, shared: Propagation, params: Sequence[Placement], min_shard_elems: int
) -> Assignment:
    """The state's placements that follow from the weights', and what moves for them."""
    propagation = propagate(update, shared, params, {})
    state = []
    orphans = False
    for v, out in zip(update.state, update.new_state, strict=True):
        aval = update.program.avals[v]
        hint = propagation.hints.get(v)
        if hint is None and aval.shape == update.program.avals[out].shape:
            hint = propagation.hints.get(out)
        worth = aval.size >= max(min_shard_elems, MIN_ORPHAN_ELEMS)
        if hint is None and worth and shared.replicas.num_shards > 1:
            hint, orphans = flat_placement(aval.shape, shared.replicas), True
        state.append(hint or replicated(len(aval.shape)))
    if orphans:
        propagation = propagate(update, shared, params, dict(enumerate(state)))
    steps, problems = schedule(update, propagation, params, state)
    return Assignment(tuple(params), tuple(state), _moved_bytes(steps, problems))


def _moved_bytes(steps: Schedule, problems: Sequence[Problem]) -> dict[int, int]:
    """Bytes that were gathered, or sent to an owner, for each weight."""
    moved: dict[int, int] = {}
    for problem in problems:
        moved[problem.leaf] = moved.get(problem.leaf, 0) + problem.moved_bytes
    for step in steps_of(steps):
        for entry in step.all_entries() if isinstance(step, OwnedStage) else ():
            moved[entry.leaf] = moved.get(entry.leaf, 0) + entry.aval.nbytes
    return moved


def propagate(
    update: Update,
    shared: Propagation,
    params: Sequence[Placement],
    state: dict[int, Placement],
) -> Propagation:
    """Hints for all values, from placements of the weights and of what is known of the state."""
    ties = zip(update.state, update.new_state, strict=True)
    propagation = shared.fresh([*ties, *zip(update.params, update.new_params, strict=False)])
    hints = propagation.hints
    for v, i in zip(update.grads, update.grads_of, strict=True):
        if not params[i].is_replicated:
            hints[v] = update.grad_placement(params[i])
    for i, p in enumerate(params):
        if p.is_replicated:
            continue
        if update.has_params:
            hints[update.params[i]] = p
        if update.new_params[i] not in update.program.consts:
            hints.setdefault(update.new_params[i], p)
    for i, p in state.items():
        if not p.is_replicated:
            hints[update.state[i]] = p
    propagation.run()
    return propagation


def schedule(
    update: Update,
    propagation: Propagation,
    params: Sequence[Placement],
    state: Sequence[Placement],
) -> tuple[Schedule, list[Problem]]:
    """The steps of one device, given all placements."""
    avals = update.program.avals
    inputs = [update.grad_placement(params[i]) for i in update.grads_of]
    inputs += state
    owners = [*update.grads_of, *[-1] * update.num_state]
    if update.has_params:
        inputs += params
        owners += range(update.num_params)
    extra = update.program.inputs[len(inputs) :]
    inputs += [replicated(len(avals[v].shape)) for v in extra]
    owners += [-1] * len(extra)
    return decide(propagation, inputs, [*params, *state], owners)
