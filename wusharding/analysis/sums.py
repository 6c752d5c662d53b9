"""Sums over replicas in a step as its author wrote it: where they are, and what becomes of them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from wusharding.analysis.flow import control_links
from wusharding.analysis.placement import Replicas
from wusharding.analysis.replication import SUMS, Facts, collective_axes
from wusharding.analysis.rules import RULES
from wusharding.analysis.sum_dtypes import is_narrower
from wusharding.analysis.update import ADDS, sums_replicas
from wusharding.jaxprs import CROSSINGS, Op

_PASSING = ("copy", "optimization_barrier", *CROSSINGS)
_JOINING = (*ADDS, "concatenate", "stack", "pad", "dynamic_update_slice", "scatter-add")
_NO_ORIGINS: Mapping[int, Origin] = {}


class Origin(NamedTuple):
    """The last sum over replicas that a value comes from.

    Args:
      op: that sum.
      linear: the value is it, but for scaling, casts and the order of elements.
      divided: it was divided by the number of replicas, before or since.
    """

    op: Op
    linear: bool
    divided: bool


@dataclasses.dataclass(frozen=True)
class Sums:
    """The sums over replicas of one program.

    Args:
      facts: what differs between replicas in it.
      replicas: the mesh.
    """

    facts: Facts
    replicas: Replicas

    @functools.cached_property
    def _made_by(self) -> dict[int, Op]:
        return {v: op for op in self.facts.program.ops for v in op.outs}

    @functools.cached_property
    def _positions(self) -> dict[int, int]:
        return {id(op): k for k, op in enumerate(self.facts.program.ops)}

    def is_sum(self, k: int) -> bool:
        """Whether operation `k` makes a sum over replicas of what differs between them."""
        op = self.facts.program.ops[k]
        return op.name not in _PASSING and sums_replicas(op, self.facts, self.replicas)

    def repeats(self, k: int) -> tuple[str, ...]:
        """The replica axes over which a collective sums what is equal along them already."""
        op = self.facts.program.ops[k]
        if op.name not in SUMS or op.params.get("axis_index_groups") is not None:
            return ()
        differs = frozenset().union(*(self.facts.varies(v) for v in op.ins))
        over = set(self.replicas.reduce_axes) - differs
        return tuple(a for a in collective_axes(op) if a in over)

    # ------------------------------------------------------------------------------------ backwards

    def maker(self, v: int) -> Op | None:
        """The operation that makes `v`; None for an input or a constant."""
        return self._made_by.get(v)

    def chain(self, v: int) -> list[int]:
        """`v` and what it was scaled, cast or rearranged from, back to where that ends."""
        found = [v]
        while (op := self._made_by.get(v)) is not None and (source := _carrier(self, op)) >= 0:
            v = source
            found.append(v)
        return found

    def is_over_replicas(self, v: int) -> bool:
        """Whether `v` is made of sums over replicas: no norm, which shards are summed for."""
        found, open_values = set[int](), [v]
        while open_values:
            end = self.chain(open_values.pop())[-1]
            op = self._made_by.get(end)
            if op is None or end in found:
                continue
            found.add(end)
            if op.subs or self.is_sum(self._positions[id(op)]):
                return True
            if op.name in _JOINING:
                open_values += op.ins
        return False

    def ending_in(self, v: int) -> list[tuple[Op, list[int]]]:
        """The sums that `v` is, or is an addition of, each with the values on the way to it."""
        chain = self.chain(v)
        op = self._made_by.get(chain[-1])
        if op is None:
            return []
        if op.name in ADDS:
            return [(s, [*chain, *way]) for u in op.ins for s, way in self.ending_in(u)]
        return [(op, chain)] if self.is_sum(self._positions[id(op)]) else []

    def added_to(self, carry_in: int, carry_out: int) -> list[tuple[Op, list[int]]]:
        """The sums of a loop's body that it does nothing with but add them to what it carries."""
        program = self.facts.program
        v, out = program.inputs[carry_in], program.outputs[carry_out]
        readers = [op for op in program.ops if v in op.ins]
        op = self._made_by.get(self._unpassed(out))
        if len(readers) != 1 or op is None or op.name not in ADDS or v in program.outputs:
            return []
        for mine, other in (op.ins, op.ins[::-1]):
            if self._unpassed(mine) == v:
                return self.ending_in(other)
        return []

    def _unpassed(self, v: int) -> int:
        while (op := self._made_by.get(v)) is not None and op.name in _PASSING:
            v = op.ins[0]
        return v

    def is_cast_up(self, v: int) -> bool:
        """Whether a value is a cast of one with fewer bits: it holds no more than that did."""
        for u in self.chain(v):
            op = self._made_by.get(u)
            if op is not None and op.name == "convert_element_type":
                avals = self.facts.program.avals
                return is_narrower(avals[op.ins[0]].dtype, avals[u].dtype)
        op = self._made_by.get(self.chain(v)[-1])
        return op is not None and op.name == "concatenate" and all(map(self.is_cast_up, op.ins))

    # ------------------------------------------------------------------------------------- forwards

    def origins(self, inputs: Mapping[int, Origin] = _NO_ORIGINS) -> dict[int, Origin]:
        """The last sum that each value comes from; none for what no sum is in.

        Args:
          inputs: the same for the program's inputs.
        """
        found = dict(inputs)
        for k, op in enumerate(self.facts.program.ops):
            if op.subs:
                found |= self._through(k, op, found)
            elif self.is_sum(k):
                for v, out in zip(op.ins, op.outs, strict=False):
                    found[out] = Origin(op, True, any(map(self._is_divided, self.chain(v))))
            else:
                before = next((found[v] for v in op.ins if v in found), None)
                if before is not None:
                    linear = before.linear and _carrier(self, op) in found
                    divided = before.divided or self._divides(op)
                    found |= dict.fromkeys(op.outs, Origin(before.op, linear, divided))
        return found

    @functools.cached_property
    def data(self) -> frozenset[int]:
        """The values that an input is in: all but constants and what is made of these alone."""
        found = set(self.facts.program.inputs)
        for op in self.facts.program.ops:
            if found.intersection(op.ins):
                found.update(op.outs)
        return frozenset(found)

    def _through(self, k: int, op: Op, found: Mapping[int, Origin]) -> dict[int, Origin]:
        new: dict[int, Origin] = {}
        for (body, inner), links in zip(self.inside(k, found), control_links(op), strict=True):
            program, origins = body.facts.program, body.origins(inner)
            for outer, v, _ in links:
                if outer in op.outs and v in program.outputs and v in origins:
                    new[outer] = origins[v]
        return new

    def inside(
        self, k: int, found: Mapping[int, Origin]
    ) -> Iterator[tuple[Sums, dict[int, Origin]]]:
        """The bodies of a control-flow operation, and what is known of their inputs."""
        op = self.facts.program.ops[k]
        for facts, links in zip(self.facts.bodies[k], control_links(op), strict=True):
            inputs = set(facts.program.inputs)
            known = {v: found[u] for u, v, _ in links if v in inputs and u in found}
            yield Sums(facts, self.replicas), known

    def is_divided_after(self, v: int) -> bool:
        """Whether a value is next scaled by one over the number of replicas."""
        seen = {v}
        for op in self.facts.program.ops:
            if _carrier(self, op) in seen:
                if self._divides(op):
                    return True
                seen.update(op.outs)
        return False

    def _is_divided(self, v: int) -> bool:
        op = self._made_by.get(v)
        return op is not None and self._divides(op)

    def _divides(self, op: Op) -> bool:
        if op.name not in ("div", "mul") or _carrier(self, op) < 0:
            return False
        n = self.replicas.num_replicas
        numbers = [self._number(v) for v in op.ins]
        if op.name == "div":
            return numbers[1] == n
        return any(x is not None and math.isclose(x, 1 / n, rel_tol=1e-3) for x in numbers)

    def _number(self, v: int) -> float | None:
        through = (*_PASSING, "convert_element_type", "broadcast_in_dim")
        while (op := self._made_by.get(v)) is not None and op.name in through:
            v = op.ins[0]
        const = self.facts.program.consts.get(v)
        if (
            const is None
            or np.size(const) != 1
            or not jnp.issubdtype(jnp.asarray(const).dtype, "f")
        ):
            return None
        return float(np.reshape(np.asarray(const), ()))


def _carrier(sums: Sums, op: Op) -> int:
    """The operand that an operation scales, casts or rearranges; -1 if it does anything else."""
    if op.name in (*_PASSING, "convert_element_type"):
        return op.ins[0]
    rule = RULES.get(op.name)
    if rule is None or rule.linear is None or rule.family not in ("elementwise", "shapes"):
        return -1
    sizes: Sequence[int] = [sums.facts.program.avals[v].size for v in op.ins]
    for i, v in enumerate(op.ins):
        if all(n == 1 for n in (*sizes[:i], *sizes[i + 1 :])) and rule.linear(op, (i,)):
            return v
    return -1
