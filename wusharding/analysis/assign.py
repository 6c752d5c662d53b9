"""Assigns a placement to every weight and every array of auxiliary state of one optimizer.

Weights get candidates from `choose`; the update is then decided with them, and a weight whose
format made operations gather moves on to its next candidate. State follows by propagation.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from wusharding.analysis.choose import FormatChoice, Target, candidates
from wusharding.analysis.decide import Value, decide, flat_placement
from wusharding.analysis.placement import Placement, Replicas, Tiles, replicated
from wusharding.analysis.propagate import Hints, Propagation
from wusharding.analysis.schedule import OwnedStage, Problem, Schedule, steps_of
from wusharding.jaxprs import Aval, Program, is_extended

MIN_ORPHAN_ELEMS = 1024  # of state that nothing splits: smaller ones are not worth a gather
_UNTILED_COST = 10.0  # passes that holding and updating a weight along all other axes costs
_GATHER_PENALTY = 50.0  # passes over the leaf that gathering it and working on the whole costs


@dataclasses.dataclass(frozen=True)
class Update:
    """A program that updates weights, and which of its values are what.

    Args:
      program: the traced program.
      grads: inputs that are gradients; none where the program makes them itself.
      grads_of: for each of these the parameter that it is the gradient of.
      params: inputs that are weights; none where an update does not read them.
      new_params: outputs that are new weights, or updates to them.
      state: inputs that are auxiliary state.
      new_state: outputs that are the new auxiliary state.
      per_example_axes: mesh axes over which gradients carry examples.
    """

    program: Program
    grads: tuple[int, ...]
    grads_of: tuple[int, ...]
    params: tuple[int, ...]
    new_params: tuple[int, ...]
    state: tuple[int, ...]
    new_state: tuple[int, ...]
    per_example_axes: tuple[str, ...] = ()

    @classmethod
    def of_optimizer(
        cls,
        program: Program,
        grads_of: tuple[int, ...],
        num_params: int,
        num_state: int,
        *,
        has_params: bool,
        per_example_axes: tuple[str, ...],
    ) -> Update:
        """An optimizer's own update: inputs are gradients, state, weights, extra arguments."""
        ends = len(grads_of), len(grads_of) + num_state
        return cls(
            program,
            program.inputs[: ends[0]],
            grads_of,
            program.inputs[ends[1] : ends[1] + num_params] if has_params else (),
            program.outputs[:num_params],
            program.inputs[ends[0] : ends[1]],
            program.outputs[num_params:],
            per_example_axes,
        )

    splits_orphans = True

    def kept_dims(self, param: int) -> int:
        return 0

    @property
    def has_params(self) -> bool:
        return bool(self.params)

    def shared(self, replicas: Replicas) -> Propagation:
        return Propagation(self.program, replicas)

    def propagate(
        self, shared: Propagation, params: Sequence[Placement], state: Mapping[int, Placement]
    ) -> Propagation:
        ties = zip(self.state, self.new_state, strict=True)
        propagation = shared.fresh([*ties, *zip(self.params, self.new_params, strict=False)])
        hints = propagation.hints
        for v, i in zip(self.grads, self.grads_of, strict=True):
            if not params[i].is_replicated:
                hints[v] = self._grad_placement(params[i])
        hint_arrays(hints, self, params, state)
        propagation.run()
        return propagation

    def schedule(
        self, propagation: Propagation, params: Sequence[Placement], state: Sequence[Placement]
    ) -> tuple[Schedule, list[Problem]]:
        program = self.program
        values = {v: Value(replicated(len(program.avals[v].shape))) for v in program.inputs}
        for v, i in zip(self.grads, self.grads_of, strict=True):
            values[v] = Value(self._grad_placement(params[i]), leaf=i)
        values |= {v: Value(p) for v, p in zip(self.state, state, strict=True)}
        for i, (v, p) in enumerate(zip(self.params, params, strict=False)):
            values[v] = Value(p, leaf=i)
        return decide(propagation, [values[v] for v in program.inputs], [*params, *state])

    def _grad_placement(self, param: Placement) -> Placement:
        """The placement of a gradient: its weight's, or that of one gradient per example."""
        if not self.per_example_axes:
            return param
        return Placement((self.per_example_axes, *param.tiles))


@dataclasses.dataclass(frozen=True)
class Assignment:
    """Placements of weights and state, what is decided with them, and the bytes that move for it.

    `moved_bytes` are those of each weight that was gathered or sent to an owner.
    """

    params: tuple[Placement, ...]
    state: tuple[Placement, ...]
    moved_bytes: Mapping[int, int]
    schedule: Schedule
    problems: list[Problem]


class Updating(Protocol):
    """What `assign` asks of a program that updates weights; see `Update` and `StepUpdate`."""

    @property
    def program(self) -> Program: ...
    @property
    def params(self) -> tuple[int, ...]: ...
    @property
    def new_params(self) -> tuple[int, ...]: ...
    @property
    def state(self) -> tuple[int, ...]: ...
    @property
    def new_state(self) -> tuple[int, ...]: ...
    @property
    def splits_orphans(self) -> bool:
        """Whether state that no weight's split reaches is split nevertheless."""
        ...

    def kept_dims(self, param: int) -> int:
        """How many of a weight's leading dims are not split."""
        ...

    def shared(self, replicas: Replicas) -> Propagation:
        """What all propagations through the program have in common."""
        ...

    def propagate(
        self, shared: Propagation, params: Sequence[Placement], state: Mapping[int, Placement]
    ) -> Propagation:
        """Hints for all values, from the placements of the weights and of some of the state."""
        ...

    def schedule(
        self, propagation: Propagation, params: Sequence[Placement], state: Sequence[Placement]
    ) -> tuple[Schedule, list[Problem]]:
        """The steps of one device, given all placements."""
        ...


def decided(
    update: Updating, replicas: Replicas, params: Sequence[Placement], state: Sequence[Placement]
) -> tuple[Schedule, list[Problem]]:
    """The steps of one device, and what could not run on pieces, for placements as assigned."""
    shared = update.shared(replicas)
    return update.schedule(update.propagate(shared, params, dict(enumerate(state))), params, state)


def assign(
    update: Updating,
    params: Sequence[Aval],
    tiles: Sequence[Tiles],
    replicas: Replicas,
    *,
    target: Target,
    choice: FormatChoice,
    min_shard_elems: int,
    other_axes: tuple[str, ...] = (),
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
      other_axes: mesh axes to tile weights over as well, where they do not split them already.
    """
    options: list[list[tuple[float, Placement]]] = []
    for i, (aval, t) in enumerate(zip(params, tiles, strict=True)):
        splits = aval.size >= max(min_shard_elems, 2) and replicas.num_shards > 1
        found: list[tuple[float, Placement]] = []
        for more in (*_more_tiles(aval.shape, t, other_axes, replicas), t) if splits else ():
            cost = _UNTILED_COST if other_axes and more == t else 0.0
            kept = update.kept_dims(i)
            ranked = candidates(aval.shape, more, replicas, target, choice, kept)
            found += [(cost + c, p) for c, p in ranked]
        options.append(sorted(found, key=lambda option: option[0]) or [(0.0, Placement(t))])
    trial = [0] * len(params)
    tried = [0] * len(params)
    best: list[tuple[float, int]] = [(float("inf"), 0)] * len(params)
    propagation = update.shared(replicas)
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


def _more_tiles(
    shape: tuple[int, ...], tiles: Tiles, axes: tuple[str, ...], replicas: Replicas
) -> list[Tiles]:
    """Tiles over those of `axes` that a weight is the same along, one dim that they divide each."""
    used = {a for t in tiles for a in t}
    free = tuple(a for a in axes if a not in used)
    if not free:
        return []
    size = replicas.size(free)
    if math.prod(shape) < size * replicas.num_shards:
        return []
    fits = [d for d, n in enumerate(shape) if not tiles[d] and n and n % size == 0]
    return [(*tiles[:d], free, *tiles[d + 1 :]) for d in fits]


def _evaluate(
    update: Updating, shared: Propagation, params: Sequence[Placement], min_shard_elems: int
) -> Assignment:
    """The state's placements that follow from the weights', and what moves for them."""
    propagation = update.propagate(shared, params, {})
    state = []
    orphans = False
    for v, out in zip(update.state, update.new_state, strict=True):
        aval = update.program.avals[v]
        hint = propagation.hints.get(v)
        if hint is None and aval.shape == update.program.avals[out].shape:
            hint = propagation.hints.get(out)
        worth = update.splits_orphans and aval.size >= max(min_shard_elems, MIN_ORPHAN_ELEMS)
        if hint is None and worth and shared.replicas.num_shards > 1:
            hint, orphans = flat_placement(aval.shape, shared.replicas), True
        state.append(hint or replicated(len(aval.shape)))
    if orphans:
        propagation = update.propagate(shared, params, dict(enumerate(state)))
    steps, problems = update.schedule(propagation, params, state)
    moved = _moved_bytes(steps, problems)
    return Assignment(tuple(params), tuple(state), moved, steps, problems)


def _moved_bytes(steps: Schedule, problems: Sequence[Problem]) -> dict[int, int]:
    """Bytes that were gathered, or sent to an owner, for each weight."""
    moved: dict[int, int] = {}
    for problem in problems:
        moved[problem.leaf] = moved.get(problem.leaf, 0) + problem.moved_bytes
    for step in steps_of(steps):
        for entry in step.all_entries() if isinstance(step, OwnedStage) else ():
            moved[entry.leaf] = moved.get(entry.leaf, 0) + entry.aval.nbytes
    return moved


def why_whole(
    aval: Aval, placement: Placement, replicas: Replicas, min_shard_elems: int, otherwise: str
) -> str:
    """The reason why an array is not split, or nothing."""
    if placement.span is not None:
        return ""
    if replicas.num_shards == 1:
        return "the axes to shard over have size 1"
    if is_extended(aval.dtype):
        return "a PRNG key is not data to split"
    if aval.size < 2:
        return "has fewer than 2 elements"
    if aval.size < min_shard_elems:
        return f"smaller than min_shard_elems={min_shard_elems}"
    return otherwise


def hint_arrays(
    hints: Hints, update: Updating, params: Sequence[Placement], state: Mapping[int, Placement]
) -> None:
    """Says how weights are split, as they come and as they leave, and some of the state."""
    for i, p in enumerate(params):
        if p.is_replicated:
            continue
        if update.params:
            hints[update.params[i]] = p
        if update.new_params[i] not in update.program.consts:
            hints.setdefault(update.new_params[i], p)
    for i, p in state.items():
        if not p.is_replicated:
            hints[update.state[i]] = p
