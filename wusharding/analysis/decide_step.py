"""Decides a whole train step: the forward and backward pass as they are, the update on shards.

The update is decided as that of an optimizer is (`decide`). Around it, what replicas do on data of
their own runs as it is written, on whole weights; the sum that makes a gradient stays open until
the update asks for it, which is where it becomes a reduce-scatter.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import jax.numpy as jnp

from wusharding.analysis.constraints import constrained_tiles
from wusharding.analysis.decide import Case, Decider, Value
from wusharding.analysis.fit import tiles_of, tiles_of_result, try_fit
from wusharding.analysis.flow import carries
from wusharding.analysis.placement import Placement, Tiles, replicated, spec_tiles
from wusharding.analysis.propagate import Propagation
from wusharding.analysis.replication import (
    MAXIMA,
    SUMS,
    Facts,
    collective_axes,
    is_collective,
)
from wusharding.analysis.rows import LOOKUP_MODES, LookupInTile, RowTile, ScatterIntoZeros
from wusharding.analysis.rules import RULES, Factors, OpRule
from wusharding.analysis.rules.base import Reduction
from wusharding.analysis.schedule import Compute, Problem, Schedule
from wusharding.analysis.sum_dtypes import OWN, SumDtypes
from wusharding.analysis.update import (
    ADDS,
    Region,
    nearest_weights,
    only_rearranges,
    sums_replicas,
)
from wusharding.jaxprs import (
    CROSSINGS,
    Identity,
    Op,
    Program,
    RandomTile,
    Times,
    Zeros,
)


@dataclasses.dataclass(frozen=True)
class Style:
    """What the user chose of a step.

    Args:
      weights: "whole" between steps, or "split", or "layers": split, and those that a loop goes
        over are gathered one layer at a time.
      accumulate: loops that add up gradients add "whole" ones, or scatter each and add "shards".
      sum_dtypes: in which gradients are summed.
    """

    weights: Literal["whole", "split", "layers"] = "whole"
    accumulate: Literal["whole", "shards"] = "whole"
    sum_dtypes: SumDtypes = OWN


def decide_step(
    propagation: Propagation,
    facts: Facts,
    region: Region,
    inputs: Sequence[Value],
    outputs: Sequence[Placement | None],
    kept: Sequence[tuple[int, int]],
    style: Style,
) -> tuple[Schedule, list[Problem]]:
    """Decides for a whole step.

    Args:
      propagation: hints, already run.
      facts: what differs between replicas.
      region: which operations are the update.
      inputs: the placement of each input.
      outputs: the placement asked of each output; None delivers it whole, in the tiles it has.
      kept: positions of inputs and of the outputs that take their place.
      style: what the user chose.

    Returns:
      The schedule and what could not run on pieces.
    """
    decider = _StepDecider(propagation, facts, region, outputs, kept, style, deliver=True)
    return decider.run(inputs), decider.problems


class _StepDecider(Decider):
    def __init__(
        self,
        propagation: Propagation,
        facts: Facts,
        region: Region,
        outputs: Sequence[Placement | None],
        kept: Sequence[tuple[int, int]],
        style: Style,
        *,
        deliver: bool = False,
        open_outputs: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__(propagation, outputs)
        self.facts = facts
        self.region = region
        self.kept = kept
        self.style = style
        self.sum_dtypes = style.sum_dtypes
        self.deliver = deliver
        self.open_outputs = open_outputs
        self.replica_axes = frozenset(self.replicas.reduce_axes)
        self.readers = Counter(v for op in self.program.ops for v in op.ins)
        self.readers.update(self.program.outputs)
        self.made_by = {v: op for op in self.program.ops for v in op.outs}

    def run(self, inputs: Sequence[Value]) -> Schedule:
        made = [(self.program.outputs[o], inputs[i].leaf) for i, o in self.kept]
        self.weight_of = nearest_weights(self.program, self.region, made)
        for i in self.open_outputs:
            self._defer(self.program.outputs[i])
        for k, op in enumerate(self.program.ops):
            if k in self.region.forward:
                continue
            terms = self._terms(op)
            if terms and all(map(self._is_open_sum, terms)):
                for v in terms:
                    self._defer(v)
                self.deferred.update(op.outs)
            elif self._reshapes_a_sum(op):
                # What is a split of the result may be none of the operand: scatter the result.
                for v in op.outs:
                    self._defer(v)
        schedule = super().run(inputs)
        self.final = [self.values[v] for v, _ in schedule.outputs]
        return schedule

    def _name(self, op: Op) -> None:
        """Says of what the forward and backward pass make for which weight it is."""
        for v in op.outs:
            self.values[v] = self.values[v]._replace(leaf=self.weight_of.get(v, -1))

    def _defer(self, v: int) -> None:
        """Lets the sums that make `v` stay open through the linear operations between."""
        if v in self.deferred:
            return
        self.deferred.add(v)
        op = self.made_by.get(v)
        if op is None or op.subs:
            return
        if terms := self._terms(op):
            for u in terms:
                self._defer(u)
        elif (u := self._carried(op)) is not None:
            self._defer(u)

    def _terms(self, op: Op) -> tuple[int, ...]:
        """The sums that an operation makes one of: adds up, or lays side by side."""
        if op.name == "scatter-add" and not self._is_zeros(op.ins[0]):
            return (op.ins[0], op.ins[2])
        alone = all(self.readers[v] == 1 for v in op.ins)
        joins = op.name in ADDS or (op.name in ("concatenate", "stack") and alone)
        return op.ins if joins else ()

    def _carried(self, op: Op) -> int | None:
        """The operand each of whose elements an operation hands on once, among zeros maybe."""
        if op.name == "pad" and self._is_zero(op.ins[1]):
            return op.ins[0]
        if op.name == "dynamic_update_slice" and self._is_zeros(op.ins[0]):
            return op.ins[1]
        if op.name == "scatter-add" and self._is_zeros(op.ins[0]):
            return op.ins[2]
        if op.name == "slice" and self._is_cut_up(op.ins[0]):
            return op.ins[0]
        return op.ins[0] if only_rearranges(op, self.program) else None

    def _is_cut_up(self, v: int) -> bool:
        """Whether only pieces of a value are read, and no element twice by their count."""
        pieces = [op for op in self.program.ops if v in op.ins]
        elems = sum(self.avals[op.outs[0]].size for op in pieces)
        alone = self.readers[v] == len(pieces) and all(op.name == "slice" for op in pieces)
        return alone and elems <= self.avals[v].size

    def _is_linear(self, op: Op, rule: OpRule, partial: tuple[int, ...]) -> bool:
        put = {"dynamic_update_slice": (1,), "scatter-add": (2,)}.get(op.name)
        among_zeros = partial == put and self._is_zeros(op.ins[0])
        return among_zeros or super()._is_linear(op, rule, partial)

    def _reshapes_a_sum(self, op: Op) -> bool:
        """Puts a sum that nothing else reads into other dims, as a transposition does.

        Where zeros come beside it, it stays open if it cannot be scattered without them, and
        scattering all is no more than reducing it. Where it is cut, as the sum for weights is that
        the model has laid side by side, it stays open unless it can be scattered as all of its
        pieces are wanted.
        """
        v = self._carried(op)
        if v is None or RULES[op.name].family == "elementwise":
            return False
        hint, elems = self._wanted(v), self.avals[op.outs[0]].size
        if elems > 2 * self.avals[v].size:
            return False
        if hint is not None and hint.span is not None and elems != self.avals[v].size:
            wanted = (self._wanted(out) for out in op.outs)
            if elems > self.avals[v].size or all(h is None or h.span == hint.span for h in wanted):
                return False
        while self._is_read_once(v) and (maker := self.made_by.get(v)) is not None:
            if sums_replicas(maker, self.facts, self.replicas):
                return True
            if (carried := self._carried(maker)) is None:
                return False
            v = carried
        return False

    def _is_read_once(self, v: int) -> bool:
        return self.readers[v] == 1 or self._is_cut_up(v)

    def _is_open_sum(self, v: int) -> bool:
        """Whether a value is a sum over replicas, but for linear operations."""
        while (op := self.made_by.get(v)) is not None:
            if op.subs:
                return op.outs.index(v) in self._open_carries(op) or self._is_stacked(op, v)
            if sums_replicas(op, self.facts, self.replicas):
                return True
            if terms := self._terms(op):
                return all(map(self._is_open_sum, terms))
            if (carried := self._carried(op)) is None:
                return False
            v = carried
        return False

    # ------------------------------------------------------------------------------ each operation

    def _output(self, v: int, want: Placement | None) -> tuple[int, Placement]:
        if self.values[v].partial == "sum" and v in self._open():
            return v, self.values[v].placement
        if want is not None:
            v = self._settled(v)
            return self._placed(v, want, ""), want
        v, have = super()._output(v, None)
        if self.deliver and have.span is not None:
            v = self._placed(v, have.without_span(), "the step returns it")
        return v, self.values[v].placement

    def _open(self) -> set[int]:
        return {self.program.outputs[i] for i in self.open_outputs}

    def _op(self, k: int, op: Op) -> None:
        if op.name in CROSSINGS:
            self._cross(op)
        elif is_collective(op):
            self._collective(op)
        elif any(self.facts.varies(v) for v in (*op.ins, *op.outs)):
            self._local(op)
        elif k not in self.region.forward or not self._forward(k, op):
            super()._op(k, op)
            return
        self._name(op)

    def _cross(self, op: Op) -> None:
        """From global arrays to what a device holds, or back: the same array on each device."""
        (v,), (out,) = op.ins, op.outs
        spec = op.params["spec"]
        unreduced = frozenset(getattr(spec, "unreduced", None) or ())
        if not (self.values[v].partial == "sum" and unreduced & self.replica_axes):
            v = self._settled(v)
        ndim = len(self.avals[v].shape)
        tiles = spec_tiles(spec, ndim)
        used = self.replica_axes.intersection(a for axes in tiles for a in axes)
        entering = op.name == "enter_manual"
        have = self.values[v].placement
        span = have.span if not used else None
        if entering:
            span = span if have.tiles == tiles else None
            v = self._placed(v, Placement(tiles, span), f"{op.name} splits it otherwise", op)
            after = Placement(((),) * ndim, span)
        else:
            v = self._placed(v, Placement(((),) * ndim, span), f"{op.name} needs it whole", op)
            after = Placement(tiles, span)
        self.values[out] = Value(after, depth=self.values[v].depth, leaf=self.values[v].leaf)
        self.steps.append(Compute(op, (v,), (out,)))

    def _local(self, op: Op) -> None:
        """Runs as it is written, on whole operands."""
        whole = []
        for v in op.ins:
            v = self._settled(v)
            whole.append(self._placed(v, replicated(len(self.avals[v].shape)), ""))
        self._replicated(op, whole)

    def _forward(self, k: int, op: Op) -> bool:
        """A part of the forward or backward pass, on tiles; False to run it as the update runs."""
        rule, factors = RULES.get(op.name), self.propagation.factors[k]
        if op.name == "copy" and self._constrained(op):
            return True
        open_sum = any(self.values[v].partial for v in op.ins)
        if open_sum and rule and factors and self._linear(op, rule, factors):
            return True
        ins = [self._settled(v) for v in op.ins]
        split = any(self.values[v].placement.span for v in ins)
        if (
            split
            and rule is not None
            and rule.family == "elementwise"
            and k not in self.facts.touched
        ):
            return False
        ins = [self._placed(v, self.values[v].placement.without_span(), "") for v in ins]
        if op.name == "scatter-add" and self._scattered_sum(op, ins):
            return True
        if op.name == "gather" and self._looked_up(k, op, ins):
            return True
        want = self.facts.tileable.get(k)
        if want is not None and self._on_tile(op, rule, factors, ins, want):
            return True
        if all(self.values[v].placement.is_replicated for v in ins):
            self._replicated(op, ins)
        elif rule is None or factors is None:
            self._whole(op, ins, "has no rule")
        else:
            tiles = tiles_of(factors, [self.values[v].placement for v in ins], self.replicas)
            fit = self._accepted(Case(op, rule, factors, tiles, ins), None)
            if fit is None:
                self._whole(op, ins, "needs the whole of a dim that is split over replicas")
            else:
                self._compute(op, rule, fit, ins, uniform=False)
        return True

    def _constrained(self, op: Op) -> bool:
        """An activation is split as the program says; False where it says nothing new."""
        (v,), (out,) = op.ins, op.outs
        have, shape = self.values[v].placement, self.avals[v].shape
        tiles = constrained_tiles(op, have.tiles, shape, self.replicas)
        if tiles is None or (tiles == have.tiles and self.values[v].partial is None):
            return False
        if self.values[v].partial == "sum":
            v = self._cut(v, Placement(tiles))
        v = self._placed(self._settled(v), Placement(tiles), "a constraint says so", op)
        self.values[out] = self.values[v]
        self.steps.append(Compute(op, (v,), (out,)))
        return True

    def _looked_up(self, k: int, op: Op, ins: list[int]) -> bool:
        """Single rows of an array that a model axis splits: each device gives those that it holds.

        Source: the embedding of Megatron-LM (arXiv 1909.08053), section 3.
        """
        table, indices = (self.values[v].placement for v in ins)
        numbers, mode = op.params["dimension_numbers"], op.params["mode"]
        if len(numbers.start_index_map) != 1 or mode not in LOOKUP_MODES:
            return False
        (dim,) = numbers.start_index_map
        axes, aval = table.tiles[dim], self.avals[ins[0]]
        if not axes or op.params["slice_sizes"][dim] != 1 or not self.replica_axes.isdisjoint(axes):
            return False
        rule, factors = RULES[op.name], self.propagation.factors[k]
        if factors is None or not jnp.issubdtype(aval.dtype, jnp.number):
            return False
        others = _with_tile(table, dim, ())
        tiles = tiles_of(factors, [others, indices], self.replicas)
        fit = try_fit(factors, tiles, None, self.replicas)
        if fit is None or fit.partial or any(set(axes) & set(t) for t in tiles.values()):
            return False
        fit = fit._replace(
            ins=(_with_tile(fit.ins[0], dim, axes), fit.ins[1]), partial="sum", partial_axes=axes
        )
        lookup = LookupInTile(op.primitive, self._row_tile(dim, aval.shape, axes))
        self._compute(dataclasses.replace(op, primitive=lookup), rule, fit, ins, uniform=False)
        return True

    def _row_tile(self, dim: int, shape: tuple[int, ...], axes: tuple[str, ...]) -> RowTile:
        return RowTile(dim, shape[dim], axes, self.replicas.size(axes))

    def _scattered_sum(self, op: Op, ins: Sequence[int]) -> bool:
        """Tiles added up into zeros, as the gradient of an embedding is: a sum over replicas.

        Of rows that a model axis splits each device makes its own, and of columns likewise.
        """
        _, indices, updates = ins
        (out,) = op.outs
        aval = self.avals[out]
        tiles = self.values[updates].placement.tiles
        numbers = op.params["dimension_numbers"]
        free = [d for d in range(len(tiles)) if d not in numbers.update_window_dims]
        used = [d for d, axes in enumerate(tiles) if axes]
        placement, tile = self._columns(op, updates), self._wanted_rows(op)
        if placement is None or not self._is_zeros(op.ins[0]):
            return False
        if tile is not None and set(tile.axes).isdisjoint(a for d in used for a in tiles[d]):
            placement = _with_tile(placement, tile.dim, tile.axes)
        else:
            tile = None
        if not used and tile is None:
            return False
        if numbers.scatter_indices_batching_dims:
            return False
        of_indices = Placement((*(tiles[d] for d in free), ()))
        if len(of_indices.tiles) != len(self.avals[indices].shape):
            return False
        why = f"{op.name} splits it otherwise"
        moved = (self._placed(indices, of_indices, why, op), updates)
        axes = tuple(a for d in free for a in tiles[d])
        self.values[out] = Value(placement, "sum" if axes else None, axes)
        shape = placement.tile_shape(aval.shape, self.replicas)
        primitive = ScatterIntoZeros(op.primitive, shape, aval.dtype, tile)
        self.steps.append(
            Compute(
                Op(primitive, op.params, op.ins[1:], op.outs, (), op.source_infos), moved, (out,)
            )
        )
        return True

    def _columns(self, op: Op, updates: int) -> Placement | None:
        """How a scatter's result is tiled along the dims of which it writes all: by columns, say.

        None where it is split over replicas along such a dim, or writes a part of it.
        """
        numbers, (out,) = op.params["dimension_numbers"], op.outs
        shape, tiles = self.avals[out].shape, self.values[updates].placement.tiles
        gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
        written = [d for d in range(len(shape)) if d not in gone]
        placement = replicated(len(shape))
        for d, dim in zip(numbers.update_window_dims, written, strict=True):
            whole = self.avals[updates].shape[d] == shape[dim]
            if tiles[d] and not (whole and self.replica_axes.isdisjoint(tiles[d])):
                return None
            placement = _with_tile(placement, dim, tiles[d])
        return placement

    def _wanted_rows(self, op: Op) -> RowTile | None:
        """The rows of a scatter's result that a model axis leaves to this device."""
        numbers, (out,) = op.params["dimension_numbers"], op.outs
        hint, indexed = self._wanted(out), numbers.scatter_dims_to_operand_dims
        if hint is None or len(indexed) != 1 or indexed[0] not in numbers.inserted_window_dims:
            return None
        (dim,) = indexed
        axes, shape = hint.tiles[dim], self.avals[out].shape
        if not axes or op.params["mode"] not in LOOKUP_MODES:
            return None
        if not self.replica_axes.isdisjoint(axes) or shape[dim] % self.replicas.size(axes):
            return None
        return self._row_tile(dim, shape, axes)

    def _wanted(self, v: int) -> Placement | None:
        return None if v in self.region.whole else self.hints.get(v)

    def _on_tile(
        self,
        op: Op,
        rule: OpRule | None,
        factors: Factors | None,
        ins: list[int],
        want: Tiles,
    ) -> bool:
        """Makes only the tile that is read of a value that is equal on all replicas."""
        (out,) = op.outs
        if op.name == "random_bits":
            tile = RandomTile.of(op, want, self.replicas.axis_sizes)
            if tile is None or not self.values[ins[0]].placement.is_replicated:
                return False
            self.values[out] = Value(Placement(want), depth=self.values[ins[0]].depth)
            self.steps.append(Compute(_pseudo(op, tile), tuple(ins), (out,)))
            return True
        assert rule is not None and factors is not None
        tiles = tiles_of_result(factors, want, self.replicas)
        fit = self._accepted(Case(op, rule, factors, tiles, ins), None)
        if fit is None or fit.outs[0].tiles != want:
            return False
        self._compute(op, rule, fit, ins, uniform=False)
        return True

    def _finished(self, v: int) -> int:
        """As in an update; but a gradient leaves tiles that its weight has not.

        It is scattered in its tiles, and the shards are gathered; where the tiles are of the dims
        that are split, or the weight has others, it is summed, gathered and cut.
        """
        value, want = self.values[v], self._wanted(v)
        have = value.placement
        of_replicas = not self.replica_axes.isdisjoint(value.partial_axes)
        if value.partial != "sum" or not of_replicas or have.span is not None:
            return super()._finished(v)
        if want is None or want.span is None or have.shared_tiles(want) == have:
            return super()._finished(v)
        tiled = [d for d, axes in enumerate(have.tiles) if axes != want.tiles[d]]
        within = have.shared_tiles(want) == want.without_span()
        if within and not any(want.span.lo <= d < want.span.hi for d in tiled):
            part = Placement(have.tiles, want.span)
            part = self._move("reduce", v, part, value.partial, value.partial_axes)
            return self._move("gather", part, want)
        whole = self._move("reduce", v, have, value.partial, value.partial_axes)
        why = "makes a gradient in other tiles than its weight's"
        return self._placed(whole, want, why, self.made_by.get(v))

    def _linear(self, op: Op, rule: OpRule, factors: Factors) -> bool:
        """As in an update; but a sum that is wanted split is made where it is first read."""
        stays = isinstance(op.primitive, Identity) or self.deferred.issuperset(op.outs)
        largest = max(self.avals[v].size for v in op.ins if self.values[v].partial)
        if not stays and any(self.avals[v].size > largest for v in op.outs):
            return False  # sums are made before they are spread
        if not stays and any(self.readers[v] > 1 for v in op.ins if self.values[v].partial):
            return False  # or before they are read in several ways
        wanted = (self._wanted(v) for v in op.ins if self.values[v].partial)
        if not stays and any(h is not None and h.span for h in wanted):
            return False
        want = self._wanted(op.outs[0]) if op.name in ADDS else None
        open_axes = {a for v in op.ins for a in self.values[v].partial_axes}
        if want is not None and open_axes.isdisjoint(want.tile_axes):
            parts = [self._cut(v, want) if self.values[v].partial else v for v in op.ins]
            op = dataclasses.replace(op, ins=tuple(parts))
        return super()._linear(op, rule, factors)

    # --------------------------------------------------------------------------------- collectives

    def _collective(self, op: Op) -> None:
        named = frozenset(collective_axes(op))
        over = named & self.replica_axes
        sums, reduction = op.name in SUMS, _reduction(op)
        differs = frozenset().union(*(self.facts.varies(v) for v in op.ins)) & self.replica_axes
        grouped = op.params.get("axis_index_groups") is not None
        if reduction is not None and not over and not differs:
            self._elementwise(op)
            return
        if reduction is None or grouped or not over or (differs - over):
            self._local(op)
            return
        again = sums and not differs  # a sum of what is summed already may stay open
        ins = [v if again and self.values[v].partial else self._settled(v) for v in op.ins]
        others = named - over
        for v, out in zip(ins, op.outs, strict=True):
            varies = self.facts.varies(v) if v < len(self.facts.spreads) else frozenset()
            axes = tuple(a for a in collective_axes(op) if a in (varies & over) | others)
            times = self.replicas.size(tuple(over - varies)) if sums else 1
            v = self._placed(v, replicated(len(self.avals[v].shape)), "") if varies else v
            if times > 1:
                v = self._times(v, times, op)
            value = self.values[v]
            if axes and value.partial:
                v = self._settled(v)
                value = self.values[v]
            if axes:
                self.values[out] = value._replace(partial=reduction, partial_axes=axes)
            else:
                self.values[out] = value
            self.steps.append(Compute(_pseudo(op, Identity("open_sum")), (v,), (out,)))

    def _elementwise(self, op: Op) -> None:
        """Over other axes than those of the replicas each element is combined by itself."""
        ins = [self._settled(v) for v in op.ins]
        for v, out in zip(ins, op.outs, strict=True):
            self.values[out] = self.values[v]
        split = any(self.values[v].placement.span for v in ins)
        self.steps.append(Compute(op, tuple(ins), op.outs, split=split))

    def _times(self, v: int, n: int, op: Op) -> int:
        """A sum over replicas of what is equal on them."""
        out = self._fresh(v, self.values[v])
        self.steps.append(Compute(_pseudo(op, Times(n)), (v,), (out,)))
        return out

    # -------------------------------------------------------------------------------- control flow

    def _control(self, k: int, op: Op) -> None:
        if k not in self.region.forward:
            super()._control(k, op)
        elif k not in self.region.bodies:
            self._local(op)
        else:
            ins = [self._settled(v) for v in op.ins]
            self._enter(k, op, ins)

    def _inner(self, k: int, i: int, outs: Sequence[Placement | None], *, loop: bool) -> Decider:
        reached = k in self.region.bodies
        return self._reaching(k, i, outs) if reached else super()._inner(k, i, outs, loop=loop)

    def _reaching(
        self,
        k: int,
        i: int,
        outs: Sequence[Placement | None],
        open_outputs: frozenset[int] = frozenset(),
    ) -> _StepDecider:
        """The decider of a body that the update may reach into."""
        return _StepDecider(
            self.propagation.bodies[k][i],
            self.facts.bodies[k][i],
            self.region.bodies[k][i],
            outs,
            carries(self.program.ops[k])[i],
            self.style,
            open_outputs=open_outputs,
        )

    def _enter_scan(self, k: int, op: Op, ins: list[int]) -> None:
        if k not in self.region.bodies:
            super()._enter_scan(k, op, ins)
            return
        body, facts = self.propagation.bodies[k][0], self.facts.bodies[k][0]
        region, program = self.region.bodies[k][0], self.propagation.bodies[k][0].program
        n_const, n_carry = op.params["num_consts"], op.params["num_carry"]
        first_x = n_const + n_carry
        open_sums = {n_const + i for i in self._open_carries(op)}
        tiles: dict[int, Placement] = {}  # in which these sums begin: as the body makes them
        ys = [o for o, v in enumerate(op.outs) if self._is_stacked(op, v)]
        while True:
            placed, start = [], []
            for i, (v, inner) in enumerate(zip(ins, program.inputs, strict=True)):
                carried, stacked = n_const <= i < first_x, i >= first_x
                if i in open_sums:
                    placed.append(self._zeros(v, tiles.get(i), op))
                else:
                    want = self._entering(
                        v, inner, body, facts, region, carried=carried, stacked=stacked
                    )
                    placed.append(self._placed(v, want, _why_in(region, inner, want), op))
                value = self.values[placed[-1]]
                if i in open_sums:
                    # Zeros are a sum over any axes: the body says over which.
                    value = value._replace(partial="sum", partial_axes=())
                if stacked:
                    placement = value.placement.without_leading_dim()
                    assert placement is not None, "scanned operands are unstacked"
                    value = value._replace(placement=placement)
                start.append(value)
            outs = [*(v.placement for v in start[n_const:first_x])]
            outs += [None] * (len(op.outs) - n_carry)
            open_outputs = frozenset({*(i - n_const for i in open_sums), *ys})
            decider = self._reaching(k, 0, outs, open_outputs)
            schedule = decider.run(start)
            final = {i: decider.final[i - n_const] for i in open_sums}
            closed = {i for i, value in final.items() if value.partial is None}
            moved = {i for i in open_sums if final[i].placement != start[i].placement}
            if not closed and not moved:
                break
            open_sums -= closed | (moved & tiles.keys())  # made otherwise again: it is made whole
            tiles |= {i: final[i].placement for i in moved}
        self._finish_control(
            op, placed, [p for _, p in schedule.outputs], [(schedule, decider.problems)]
        )
        for i, (out, final) in enumerate(zip(op.outs, decider.final, strict=True)):
            placement = final.placement if i < n_carry else final.placement.with_leading_dim()
            self.values[out] = self.values[out]._replace(
                placement=placement, partial=final.partial, partial_axes=final.partial_axes
            )

    def _open_carries(self, op: Op) -> set[int]:
        """The positions in a loop's carry of what may stay a sum: it is added to, from zero on."""
        if op.name != "scan" or self.style.accumulate != "whole":
            return set()
        first = op.params["num_consts"]
        return {
            i
            for i in range(op.params["num_carry"])
            if self._is_zeros(op.ins[first + i]) and _accumulates(op.subs[0], first + i, i)
        }

    def _enter_while(self, k: int, op: Op, ins: list[int]) -> None:
        if k not in self.region.bodies:
            super()._enter_while(k, op, ins)
            return
        test, turn = self.propagation.bodies[k]
        c, b = op.params["cond_nconsts"], op.params["body_nconsts"]
        turn_facts, turn_region = self.facts.bodies[k][1], self.region.bodies[k][1]
        names = [*test.program.inputs[:c], *turn.program.inputs]
        placed = []
        for i, (v, inner) in enumerate(zip(ins, names, strict=True)):
            if i < c:
                want = self.values[v].placement.without_span()
            else:
                want = self._entering(v, inner, turn, turn_facts, turn_region, carried=i >= c + b)
            placed.append(self._placed(v, want, "it goes into a loop", op))
        values = [self.values[v] for v in placed]
        carry = [v.placement for v in values[c + b :]]
        tested = self._body(k, 0, [*values[:c], *values[c + b :]], [replicated(0)], loop=False)
        turned = self._body(k, 1, values[c:], carry, loop=False)
        self._finish_control(op, placed, carry, [tested, turned])

    def _entering(
        self,
        v: int,
        inner: int,
        body: Propagation,
        facts: Facts,
        region: Region,
        *,
        carried: bool,
        stacked: bool = False,
    ) -> Placement:
        """The placement in which an operand enters a loop."""
        have, spread = self.values[v].placement, facts.spreads[inner]
        tiles = ((), *spread.tiles) if stacked else spread.tiles
        if stacked and have.tiles[0]:
            return Placement(tiles)  # it goes over the tiled dim
        own = any(a in self.replica_axes for axes in tiles for a in axes)
        if own or spread.varies or have.tiles != tiles:
            return Placement(tiles)
        hint = body.hints.get(inner)
        layered = stacked and self.style.weights == "layers" and have.span and have.span.lo > 0
        if inner in region.whole and not layered and not (have.span and carried):
            return have.without_span()
        if carried and have.span is None and hint is not None and inner not in region.whole:
            return hint if hint.tiles == tiles else have
        if stacked and have.span is not None and have.span.lo == 0:
            return have.without_span()
        return have

    def _zeros(self, like: int, placement: Placement | None, op: Op) -> int:
        """Zeros that every device makes for itself, whatever became of those of the program."""
        aval = self.avals[like]
        placement = placement or replicated(len(aval.shape))
        out = self._fresh(like, Value(placement))
        shape = placement.local_shape(aval.shape, self.replicas)
        fill = Op(Zeros(shape, aval.dtype), {}, (), (out,), (), op.source_infos)
        self.steps.append(Compute(fill, (), (out,)))
        return out

    def _is_stacked(self, op: Op, v: int) -> bool:
        """A result that a loop stacks, which may stay a sum."""
        stacked = op.name == "scan" and op.outs.index(v) >= op.params["num_carry"]
        return stacked and not self._scattered_by_layer(v)

    def _scattered_by_layer(self, v: int) -> bool:
        """Gradients that a loop over layers stacks, each of which is scattered where it is made."""
        hint = self.hints.get(v)
        by_layer = self.style.weights == "layers" and hint is not None and hint.span is not None
        return by_layer and hint.span.lo > 0  # type: ignore[union-attr]

    def _is_zeros(self, v: int) -> bool:
        through = ("broadcast_in_dim", "convert_element_type", "copy")
        while (op := self.made_by.get(v)) is not None and op.name in through:
            v = op.ins[0]
        const = self.program.consts.get(v)
        return const is not None and bool(jnp.all(jnp.asarray(const) == 0))


def _why_in(region: Region, inner: int, want: Placement) -> str:
    """Why an operand is placed so for a loop; nothing where the forward pass in it reads it."""
    return "" if want.span is None and inner in region.whole else "it goes into a loop"


def _reduction(op: Op) -> Reduction | None:
    if op.name in SUMS:
        return "sum"
    return {"max": "max", "min": "min"}.get(MAXIMA.get(op.name, ""))  # type: ignore[return-value]


def _pseudo(op: Op, primitive: Identity | RandomTile | Times) -> Op:
    return Op(primitive, {}, op.ins[:1], op.outs[:1], (), op.source_infos)


def _accumulates(body: Program, carry_in: int, carry_out: int) -> bool:
    """Whether a loop only adds to the value that it carries."""
    v, out = body.inputs[carry_in], body.outputs[carry_out]
    readers = [op for op in body.ops if v in op.ins]
    return (
        len(readers) == 1
        and (readers[0].name in ADDS or (readers[0].name, readers[0].ins[0]) == ("scatter-add", v))
        and readers[0].outs == (out,)
        and readers[0].ins.count(v) == 1
        and body.outputs.count(v) == 0
    )


def _with_tile(placement: Placement, dim: int, axes: tuple[str, ...]) -> Placement:
    """The same with one dim split over other axes; what the tiles leave is whole."""
    tiles = placement.tiles
    return Placement((*tiles[:dim], axes, *tiles[dim + 1 :]))
