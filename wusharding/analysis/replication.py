"""What differs between replicas: for every value of a step, where its elements lie and vary.

A *global* value means the same on every device; replicas may hold different tiles of it. A *local*
value, inside `shard_map` or `pmap`, is whatever one device holds, and may vary over mesh axes. What
neither is tiled nor varies over the replica axes is replicated: only its computation is repeated on
every replica, and may be sharded.

Never optimistic: what cannot be followed counts as varying, and control flow is followed to a
fixpoint. Source: replication analysis in Xu et al. 2020 (arXiv 2004.13336, section 4).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from wusharding.analysis.constraints import constrained_tiles
from wusharding.analysis.fit import tiles_of, tiles_of_result, try_fit
from wusharding.analysis.placement import Placement, Replicas, Tiles, spec_tiles
from wusharding.analysis.rules.base import factors_of
from wusharding.errors import ReplicationError
from wusharding.jaxprs import CROSSINGS, Op, Program

NONE: frozenset[str] = frozenset()

# What a collective leaves equal on the devices that it ran over.
SUMS = frozenset({"psum", "psum_invariant", "psum2"})
MAXIMA: Mapping[str, str] = {"pmax": "max", "pmin": "min"}
_EQUALIZING = SUMS | MAXIMA.keys() | {"all_gather", "all_gather_invariant"}
_VARYING = frozenset({"ppermute", "pshuffle", "all_to_all", "reduce_scatter", "psum_scatter"})
_IMPURE = frozenset({"io_callback", "infeed", "rng_uniform"})


class Spread(NamedTuple):
    """Where one value lies: `tiles` of a global value, `varies` of a local one."""

    tiles: Tiles
    varies: frozenset[str] = NONE

    @classmethod
    def same(cls, ndim: int) -> Spread:
        """Equal on all devices."""
        return cls(((),) * ndim)

    def axes(self) -> frozenset[str]:
        """Mesh axes over which devices hold different contents."""
        return self.varies.union(a for axes in self.tiles for a in axes)


@dataclasses.dataclass
class Facts:
    """What is known of a program's values, and of those of its control-flow bodies.

    Args:
      program: the program.
      spreads: one `Spread` a value.
      touched: operations whose work or result differs between replicas.
      bodies: for control-flow operations, the facts of each body.
      tileable: operations on equal values of which only tiles are read, and these tiles.
    """

    program: Program
    spreads: list[Spread]
    touched: set[int]
    bodies: dict[int, tuple[Facts, ...]]
    tileable: dict[int, Tiles] = dataclasses.field(default_factory=dict)

    def varies(self, v: int) -> frozenset[str]:
        return self.spreads[v].varies


def collective_axes(op: Op) -> tuple[str, ...]:
    """The named mesh axes that an operation runs over; none if it is no collective."""
    axes = op.params.get("axes", op.params.get("axis_name", ()))
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    return tuple(a for a in names if isinstance(a, str))


def is_collective(op: Op) -> bool:
    """Whether an operation makes devices talk."""
    return op.name in _EQUALIZING or op.name in _VARYING


def needing_whole(facts: Facts, replicas: Replicas) -> Iterator[Op]:
    """The operations that need all tiles of an operand that replicas hold tiles of."""
    for k, op in enumerate(facts.program.ops):
        if _needs_whole(op, facts, replicas):
            yield op
        for body in facts.bodies.get(k, ()):
            yield from needing_whole(body, replicas)


def _needs_whole(op: Op, facts: Facts, replicas: Replicas) -> bool:
    ins = [facts.spreads[v].tiles for v in op.ins]
    if op.name == "scan":
        first_x = op.params["num_consts"] + op.params["num_carry"]
        return any(set(tiles[0]) & set(replicas.reduce_axes) for tiles in ins[first_x:])
    tiled = any(a in replicas.reduce_axes for tiles in ins for axes in tiles for a in axes)
    if not tiled or op.subs or op.name in CROSSINGS:
        return False
    factors = factors_of(facts.program, op)
    if factors is None:
        return True
    tiles = tiles_of(factors, [Placement(t) for t in ins], replicas)
    return not tiles or try_fit(factors, tiles, None, replicas) is None


def analyse(
    program: Program,
    replicas: Replicas,
    inputs: Sequence[Spread],
    *,
    casts_vary: bool = False,
    results: Sequence[str] = (),
) -> Facts:
    """Follows `inputs` through a program.

    Args:
      program: the step.
      replicas: the mesh and which of its axes are replicas.
      inputs: where each input lies.
      casts_vary: count a cast to a varying type as varying, as JAX's types do, though the values
        stay equal.
      results: names of the program's outputs, for errors.

    Raises:
      ReplicationError: a value is declared replicated, but may differ between replicas.
    """
    return _Analysis(replicas, casts_vary, tuple(results)).run(program, inputs)


@dataclasses.dataclass(frozen=True)
class _Analysis:
    replicas: Replicas
    casts_vary: bool
    results: tuple[str, ...]

    @property
    def axes(self) -> frozenset[str]:
        return frozenset(self.replicas.reduce_axes)

    def run(self, program: Program, inputs: Sequence[Spread]) -> Facts:
        spreads = [Spread.same(len(a.shape)) for a in program.avals]
        facts = Facts(program, spreads, set(), {})
        for v, spread in zip(program.inputs, inputs, strict=True):
            spreads[v] = spread
        left: list[Op] = []
        for k, op in enumerate(program.ops):
            outs = self._control(k, op, facts) if op.subs else self._op(op, facts)
            for v, spread in zip(op.outs, outs, strict=True):
                spreads[v] = spread
            if op.name == "leave_manual" and self._open_axes(op, facts):
                left.append(op)
            body_touched = any(body.touched for body in facts.bodies.get(k, ()))
            if body_touched or any(spreads[v].axes() & self.axes for v in (*op.ins, *op.outs)):
                facts.touched.add(k)
        if left:
            raise ReplicationError(self._may_differ(left, facts))
        self._read_backwards(facts)
        return facts

    # --------------------------------------------------------------------------- what tiles suffice

    def _read_backwards(self, facts: Facts) -> None:
        """Finds values, such as dropout masks, of which each replica reads its tile only."""
        program = facts.program
        wanted: dict[int, Tiles] = {v: () for v in program.outputs}

        def read(v: int, tiles: Tiles) -> None:
            tiles = tiles if any(tiles) else ()
            wanted[v] = tiles if wanted.get(v, tiles) == tiles else ()

        for k in reversed(range(len(program.ops))):
            op = program.ops[k]
            tiles: dict[int, tuple[str, ...]] = {}
            first = (*op.ins, *op.outs)[:1]  # `jax.debug.print("here")` has neither
            if op.subs or any(map(facts.varies, first)):
                for v, t in zip(op.ins, self._read_by_loop(k, op, facts), strict=True):
                    read(v, t)
                continue
            factors = factors_of(program, op)
            if k in facts.touched and factors is not None:
                placements = [Placement(facts.spreads[v].tiles) for v in op.ins]
                tiles = tiles_of(factors, placements, self.replicas)
            elif len(op.outs) == 1 and wanted.get(op.outs[0]):
                want = wanted[op.outs[0]]
                if op.name == "random_bits":
                    facts.tileable[k] = want
                elif factors is not None:
                    tiles = tiles_of_result(factors, want, self.replicas)
            fit = try_fit(factors, tiles, None, self.replicas) if factors and tiles else None
            if fit is not None and k not in facts.touched:
                if fit.partial is not None or fit.outs[0].tiles != wanted[op.outs[0]]:
                    fit = None
                else:
                    facts.tileable[k] = wanted[op.outs[0]]
            for i, v in enumerate(op.ins):
                read(v, fit.ins[i].tiles if fit is not None else ())

    def _read_by_loop(self, k: int, op: Op, facts: Facts) -> list[Tiles]:
        """The tiles that a scan reads of its operands; other operations read the whole."""
        if op.name != "scan" or k not in facts.bodies:
            return [()] * len(op.ins)
        (body,) = facts.bodies[k]
        first_x = op.params["num_consts"] + op.params["num_carry"]
        inner = [body.spreads[v].tiles for v in body.program.inputs]
        return [t if i < first_x else ((), *t) for i, t in enumerate(inner)]

    # ------------------------------------------------------------------------- single operations

    def _op(self, op: Op, facts: Facts) -> list[Spread]:
        ins = [facts.spreads[v] for v in op.ins]
        ndims = [len(facts.program.avals[v].shape) for v in op.outs]
        varies = NONE.union(*(s.varies for s in ins))
        if op.name == "enter_manual":
            unreduced = getattr(op.params["spec"], "unreduced", None) or ()
            axes = self._spec_axes(op, ndims[0]) | (self.axes & {*map(str, unreduced)})
            return [Spread.same(ndims[0])._replace(varies=varies | axes)]
        if op.name == "leave_manual":
            return [Spread(spec_tiles(op.params["spec"], ndims[0]))]
        is_cast = op.params.get("annotation") in ("pvary", "pcast")
        if op.name == "axis_index" or is_cast:
            cast = not is_cast or self.casts_vary
            varies |= self.axes.intersection(collective_axes(op)) if cast else NONE
        elif op.name in _IMPURE and op.ins and varies:
            varies = self.axes
        elif is_collective(op):
            named = self.axes.intersection(collective_axes(op))
            whole = op.name in _EQUALIZING and op.params.get("axis_index_groups") is None
            whole = whole and not (self.casts_vary and op.name == "all_gather")
            varies = varies - named if whole else varies | named
        elif any(any(s.tiles) for s in ins):
            shape = facts.program.avals[op.ins[0]].shape
            said = constrained_tiles(op, ins[0].tiles, shape, self.replicas)
            return self._tiled(op, facts, ins) if said is None else [Spread(said)]
        return [Spread.same(n)._replace(varies=varies) for n in ndims]

    def _spec_axes(self, op: Op, ndim: int) -> frozenset[str]:
        tiles = spec_tiles(op.params["spec"], ndim)
        return self.axes.intersection(a for axes in tiles for a in axes)

    def _open_axes(self, op: Op, facts: Facts) -> frozenset[str]:
        """Along which axes what leaves a `shard_map` may differ, though its spec says not."""
        ndim = len(facts.program.avals[op.outs[0]].shape)
        return facts.spreads[op.ins[0]].varies - self._spec_axes(op, ndim)

    def _may_differ(self, left: Sequence[Op], facts: Facts) -> str:
        made = {op.outs[0] for op in left}
        named = zip(self.results, facts.program.outputs, strict=False)
        names = [name for name, v in named if v in made]
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        what = f"results {', '.join(names[:5])}{more}"
        if not names:
            what = f"{left[0].source}: an output of shard_map"
        axes = frozenset[str]().union(*(self._open_axes(op, facts) for op in left))
        grouped = any(op.params.get("axis_index_groups") for op in facts.program.ops)
        return (
            f"{what}: declared equal over {sorted(axes)} by out_specs, but may differ between "
            "replicas: made of data, random numbers or an index of one replica. Reduce first what "
            "it is made of, gradients by jax.lax.pmean, or name the axis in out_specs."
            + (" Sums over axis_index_groups are those of a group only." if grouped else "")
        )

    def _tiled(self, op: Op, facts: Facts, ins: Sequence[Spread]) -> list[Spread]:
        """A global operation on tiles: as its rule says, or on the whole."""
        avals = facts.program.avals
        same = [Spread.same(len(avals[v].shape)) for v in op.outs]
        factors = factors_of(facts.program, op)
        if factors is None:
            return same
        tiles = tiles_of(factors, [Placement(s.tiles) for s in ins], self.replicas)
        fit = try_fit(factors, tiles, None, self.replicas) if tiles else None
        return same if fit is None else [Spread(p.tiles) for p in fit.outs]

    # ------------------------------------------------------------------------------ control flow

    def _control(self, k: int, op: Op, facts: Facts) -> list[Spread]:
        ins = [facts.spreads[v] for v in op.ins]
        inner = dataclasses.replace(self, results=())
        run = {"cond": inner._cond, "scan": inner._scan, "while": inner._while}[op.name]
        facts.bodies[k], outs = run(op, ins)
        return outs

    def _cond(self, op: Op, ins: Sequence[Spread]) -> tuple[tuple[Facts, ...], list[Spread]]:
        bodies = tuple(self.run(sub, ins[1:]) for sub in op.subs)
        outs = [
            _join(body.spreads[body.program.outputs[i]] for body in bodies)
            for i in range(len(op.outs))
        ]
        return bodies, [_also(s, ins[0].varies) for s in outs]

    def _scan(self, op: Op, ins: Sequence[Spread]) -> tuple[tuple[Facts, ...], list[Spread]]:
        (sub,) = op.subs
        n_const, n_carry = op.params["num_consts"], op.params["num_carry"]
        consts, carry = list(ins[:n_const]), list(ins[n_const : n_const + n_carry])
        xs = [_unstacked(s) for s in ins[n_const + n_carry :]]
        while True:
            body = self.run(sub, [*consts, *carry, *xs])
            outs = [body.spreads[v] for v in sub.outputs]
            after = [_join(pair) for pair in zip(carry, outs[:n_carry], strict=True)]
            if after == carry:
                return (body,), [
                    *carry,
                    *(Spread(((), *s.tiles), s.varies) for s in outs[n_carry:]),
                ]
            carry = after

    def _while(self, op: Op, ins: Sequence[Spread]) -> tuple[tuple[Facts, ...], list[Spread]]:
        test, turn = op.subs
        c, b = op.params["cond_nconsts"], op.params["body_nconsts"]
        carry = list(ins[c + b :])
        while True:
            cond = self.run(test, [*ins[:c], *carry])
            body = self.run(turn, [*ins[c : c + b], *carry])
            varies = cond.spreads[test.outputs[0]].varies
            outs = [_also(body.spreads[v], varies) for v in turn.outputs]
            after = [_join(pair) for pair in zip(carry, outs, strict=True)]
            if after == carry:
                return (cond, body), carry
            carry = after


def _join(spreads: Iterable[Spread]) -> Spread:
    """What holds of a value that may be any of these: a tile wins over the whole."""
    found = list(spreads)
    tiled = next((s.tiles for s in found if any(s.tiles)), found[0].tiles)
    return Spread(tiled, NONE.union(*(s.varies for s in found)))


def _also(spread: Spread, varies: frozenset[str]) -> Spread:
    return spread._replace(varies=spread.varies | varies)


def _unstacked(spread: Spread) -> Spread:
    """One of the slices that a scan takes: where its leading dim is tiled it is gathered."""
    if spread.tiles[0]:
        return Spread.same(len(spread.tiles) - 1)
    return Spread(spread.tiles[1:], spread.varies)
