"""Where in a train step the weight update is, and which inputs are weights or auxiliary state.

Operations that replicas do on data of their own (`Facts.touched`), and those that only prepare for
them (a cast of the weights, a dropout key), are the forward and backward pass. All others, between
the reduction of the gradients and the new weights and state, do the same on every replica: they are
the update, and may run on shards.

Of the values that go round (an input that comes out again as an output), those that the forward
pass reads are *weights*: every device needs them whole. The others are *auxiliary state*.
Source: Xu et al. 2020 (arXiv 2004.13336, section 4).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

from wusharding.analysis.fit import tiles_of, try_fit
from wusharding.analysis.flow import body_ties, control_links
from wusharding.analysis.placement import Placement, Replicas
from wusharding.analysis.replication import SUMS, Facts, is_collective
from wusharding.analysis.rules import RULES
from wusharding.analysis.rules.base import factors_of
from wusharding.jaxprs import CROSSINGS, Op, Program

ADDS = ("add", "add_any")


@dataclasses.dataclass(frozen=True)
class Region:
    """How the operations of one program are divided.

    Args:
      forward: operations of the forward and backward pass.
      whole: values that the forward pass reads: every device needs the whole of them.
      bodies: for control-flow operations that the update may reach into, the regions of the bodies.
    """

    forward: frozenset[int]
    whole: frozenset[int]
    bodies: Mapping[int, tuple[Region, ...]]

    def update(self, program: Program) -> list[Op]:
        """The operations of the update, those of control-flow bodies included."""
        found = []
        for k, op in enumerate(program.ops):
            if k in self.bodies:
                for sub, region in zip(op.subs, self.bodies[k], strict=True):
                    found += region.update(sub)
            elif k not in self.forward:
                found.append(op)
        return found


def find_region(facts: Facts, kept: Sequence[int]) -> Region:
    """Divides a program.

    Args:
      facts: what differs between replicas.
      kept: values of the program that go round: new weights and state.
    """
    program = facts.program
    stops = _boxed(program, kept)
    forward: set[int] = set()
    whole: set[int] = set()
    bodies: dict[int, tuple[Region, ...]] = {}
    for k in reversed(range(len(program.ops))):
        op = program.ops[k]
        if k in facts.touched:
            forward.add(k)
            if op.subs and not _one_sided(k, op, facts):
                bodies[k] = tuple(
                    find_region(body, [new for _, new in ties])
                    for body, ties in zip(facts.bodies[k], body_ties(op), strict=True)
                )
                whole.update(_read_whole(op, bodies[k]))
            elif not _hands_out(op, facts):
                whole.update(op.ins)
        elif whole.intersection(op.outs) and stops.isdisjoint(op.outs):
            forward.add(k)
            whole.update(op.ins)
    return Region(frozenset(forward), frozenset(whole), bodies)


def _boxed(program: Program, kept: Sequence[int]) -> set[int]:
    """These values, and the same ones before they were wrapped up to leave."""
    made_by = {v: op for op in program.ops for v in op.outs}
    found, open_values = set[int](), list(kept)
    while open_values:
        v = open_values.pop()
        found.add(v)
        op = made_by.get(v)
        if op is None or op.name not in _WRAPPINGS:
            continue
        if program.avals[op.ins[0]].size == program.avals[v].size or op.name in CROSSINGS:
            open_values.append(op.ins[0])
    return found


_WRAPPINGS = (*CROSSINGS, "copy", "reshape", "squeeze", "expand_dims", "broadcast_in_dim")


def _hands_out(op: Op, facts: Facts) -> bool:
    """Copies of what is equal on all replicas, stacked for the caller: nothing reads them here."""
    return op.name == "leave_manual" and not facts.spreads[op.ins[0]].axes()


def _one_sided(k: int, op: Op, facts: Facts) -> bool:
    """A choice that replicas may make differently: nothing may communicate in it."""
    if op.name == "while":
        test = facts.bodies[k][0]
        return bool(test.varies(test.program.outputs[0]))
    return op.name == "cond" and bool(facts.varies(op.ins[0]))


def _read_whole(op: Op, regions: Sequence[Region]) -> set[int]:
    """Operands of a control-flow operation that a body's forward pass reads."""
    found = set()
    for sub, region, links in zip(op.subs, regions, control_links(op), strict=True):
        inputs = set(sub.inputs)
        found |= {outer for outer, inner, _ in links if inner in inputs & region.whole}
    if op.name == "cond":
        found.add(op.ins[0])
    return found


def sums_replicas(op: Op, facts: Facts, replicas: Replicas) -> bool:
    """An operation by which what differs between replicas becomes a sum over them."""
    axes = frozenset(replicas.reduce_axes)
    before = any(facts.spreads[v].axes() & axes for v in op.ins)
    after = any(facts.spreads[v].axes() & axes for v in op.outs)
    if not before or after or op.subs or op.name in CROSSINGS:
        return False
    if is_collective(op):
        return op.name in SUMS
    if op.name == "scatter-add":  # tiles that are added up into the whole
        return True
    factors = factors_of(facts.program, op)
    if factors is None:
        return False
    placements = [Placement(facts.spreads[v].tiles) for v in op.ins]
    fit = try_fit(factors, tiles_of(factors, placements, replicas), None, replicas)
    return fit is not None and fit.partial == "sum"


def only_rearranges(op: Op, program: Program) -> bool:
    """A linear operation on its first operand that hands on each element once, but for a factor.

    It may hand them to several results, as a split does.
    """
    rule = RULES.get(op.name)
    size = program.avals[op.ins[0]].size if op.ins else 0
    return (
        rule is not None
        and rule.linear is not None
        and not op.subs
        and rule.linear(op, (0,))
        and all(program.avals[v].size == 1 for v in op.ins[1:])
        and sum(program.avals[v].size for v in op.outs) == size
    )


def nearest_weights(
    program: Program, region: Region, made: Iterable[tuple[int, int]]
) -> dict[int, int]:
    """For values of the update the weight that is made from them in the fewest operations.

    Args:
      program: the step.
      region: which operations are the update.
      made: new weights and their numbers; below 0 for what is none.
    """
    made_by = {
        v: op for k, op in enumerate(program.ops) if k not in region.forward for v in op.outs
    }
    found: dict[int, int] = {}
    for v, weight in made:
        if weight >= 0:
            found.setdefault(v, weight)
    level = list(found)
    while level:
        below = []
        for v in level:
            op = made_by.get(v)
            for u in op.ins if op is not None else ():
                if u not in found:
                    found[u] = found[v]
                    below.append(u)
        level = below
    return found


def gradients(
    facts: Facts, region: Region, replicas: Replicas, made: Iterable[tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    """Sums over replicas, rearranged at most, each with the number of the nearest weight.

    Args:
      facts: what differs between replicas.
      region: which operations are the update.
      replicas: the mesh.
      made: as for `nearest_weights`.

    Yields:
      Each with its number; -1 for those that no new weight is made from, nor the forward pass
      reads: gradients of frozen weights.
    """
    program = facts.program
    weight_of = nearest_weights(program, region, made)
    sums: set[int] = set()
    statistics: set[int] = set()
    for k, op in enumerate(program.ops):
        if k in region.forward:
            if sums_replicas(op, facts, replicas):
                sums.update(op.outs)
        elif sums.intersection(op.ins[:1]) and _keeps(op, program):
            sums.update(op.outs)
            if not (region.whole | statistics).isdisjoint(op.ins[:1]):
                statistics.update(op.outs)
    for v in sums:
        if v in weight_of or v not in region.whole | statistics:
            yield v, weight_of.get(v, -1)


def _keeps(op: Op, program: Program) -> bool:
    return op.name in ("convert_element_type", "copy") or only_rearranges(op, program)
