"""Carries out a `Schedule` on one device: evaluates a program on pieces.

Runs where the mesh axes are bound: in `shard_map`, with replication checking on or off, and `pmap`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from wusharding.analysis.placement import Placement, Replicas
from wusharding.analysis.rules import RULES
from wusharding.analysis.rules.base import LocalView, Reduction
from wusharding.analysis.schedule import (
    Communicate,
    Compute,
    Control,
    Mask,
    Move,
    OwnedStage,
    Schedule,
)
from wusharding.analysis.wide import Widening, WideOp, padding_of, widen
from wusharding.formats import Format
from wusharding.jaxprs import (
    Aval,
    Kept,
    Op,
    Program,
    align_varying,
    as_varying,
    reduce_scatter_is_unsound,
)
from wusharding.transforms.collectives import Collectives
from wusharding.transforms.parcels import Parcels
from wusharding.transforms.wide import lengthened, neutral, wide_lookup, wide_operands

Body = Callable[..., list[Any]]


class Values(dict[int, Any]):
    """What is known so far.

    `wide` has values with their padding still on: gathered ones, and those that `widening` names.
    `leaving` are those that leave.
    """

    def __init__(
        self, values: Mapping[int, Any], widening: Widening, leaving: Collection[int] = ()
    ) -> None:
        super().__init__(values)
        self.wide: dict[int, jax.Array] = {}
        self.widening = widening
        self.leaving = leaving


@dataclasses.dataclass(frozen=True)
class Interpreter:
    """Runs schedules.

    Args:
      collectives: over the replica axes of this device.
      checked: whether JAX checks which values vary (`check_vma=True`).
    """

    collectives: Collectives
    checked: bool

    @property
    def replicas(self) -> Replicas:
        return self.collectives.replicas

    def run(
        self, schedule: Schedule, args: Sequence[Any], leaving: Collection[int] = ()
    ) -> list[Any]:
        """Outputs of the schedule, each in the placement that it states.

        Args:
          schedule: what to run.
          args: its inputs.
          leaving: values that leave the compiled program.
        """
        program = schedule.program
        held = dict(zip(program.inputs, args, strict=True))
        whole = [v for v, x in held.items() if jnp.shape(x) == program.avals[v].shape]
        widening = widen(schedule, self.replicas, whole)
        env = Values(program.consts, widening, leaving)
        env.update(held)
        for v in widening.values.keys() & held.keys():
            env.wide[v] = lengthened(held[v], *widening.values[v])
        for step in schedule.steps:
            match step:
                case Compute():
                    self._compute(step, env)
                case Move():
                    env[step.dest] = self.collectives.take_shard(
                        jnp.asarray(env[step.source]), step.before, step.after
                    )
                case Communicate():
                    self._communicate(step, env)
                case OwnedStage():
                    self._owned(step, env)
                case Control():
                    self._control(step, env)
        return [env[v] for v, _ in schedule.outputs]

    def _control(self, step: Control, env: dict[int, Any]) -> None:
        args = [self._typed(env[v], p) for v, p in zip(step.ins, step.placements, strict=True)]
        with step.op.as_traced():
            outs = reenter(step.op, args, [self._body(s) for s in step.bodies])
        env.update(zip(step.outs, outs, strict=True))

    def _body(self, schedule: Schedule) -> Body:
        """A control-flow body: what leaves it split varies, whichever branch it came from."""

        def body(*args: Any) -> list[Any]:
            outs = self.run(schedule, args)
            return [self._typed(x, p) for x, (_, p) in zip(outs, schedule.outputs, strict=True)]

        return body

    def _typed(self, x: Any, placement: Placement) -> Any:
        x = jnp.asarray(x)
        if not self.checked:
            return x
        axes = frozenset(placement.tile_axes)
        if placement.span is not None:
            axes |= frozenset(self.replicas.shard_axes)
        return as_varying(x, axes)

    # ------------------------------------------------------------------------------ local computing

    def _compute(self, step: Compute, env: Values) -> None:
        wide = env.widening.ops.get(step.outs[0]) if step.outs else None
        with step.op.as_traced():
            if wide is not None:
                self._compute_wide(step, wide, env)
            else:
                env.update(zip(step.outs, self._computed(step, env), strict=True))

    def _compute_wide(self, step: Compute, wide: WideOp, env: Values) -> None:
        (out,) = step.outs
        args = [
            env[v] if d is None else env.wide[v] for v, d in zip(step.ins, wide.ins, strict=True)
        ]
        op, args = wide_operands(wide, step.op, args)
        rule = RULES.get(op.name)
        if rule is None or (step.view is None and op.name.startswith("scatter")):
            (x,) = _bound(op, op.params, args)
        else:
            shapes = tuple(jnp.shape(x) for x in args)
            in_dims = tuple(tuple(range(len(s))) for s in shapes)
            out_dims = tuple(range(len(wide.out_shape)))
            view = LocalView(in_dims, (out_dims,), shapes, (wide.out_shape,))
            (x,) = _bound(op, *_localized(op, view, args))
        if wide.out is None:
            env[out] = x
        else:
            env.wide[out] = x
            env[out] = lax.slice_in_dim(x, 0, wide.rows, axis=wide.out)

    def _computed(self, step: Compute, env: Values) -> list[Any]:
        args = [env[v] for v in step.ins]
        for mask in step.masks:
            args[mask.operand] = self._filled(args[mask.operand], mask)
        params = step.op.params
        if step.view is not None:
            params, args = _localized(step.op, step.view, args)
        if step.op.name == "gather" and args[0] is env[step.ins[0]] and step.ins[0] in env.wide:
            wide = env.wide[step.ins[0]]
            indices = wide_lookup(params, args[0].shape, wide, jnp.asarray(args[1]))
            args = args if indices is None else [wide, indices]
        return _bound(step.op, params, args)

    def _filled(self, x: jax.Array, mask: Mask) -> jax.Array:
        """Padding replaced by what changes nothing in the reduction, whatever it held."""
        fmt = mask.format
        start = self.collectives.shard_index * fmt.chunk_elems
        index = start + lax.broadcasted_iota(jnp.int32, x.shape, fmt.lo)
        return jnp.where(fmt.is_filled(index), x, neutral(mask.reduction, x.dtype))

    # ------------------------------------------------------------------------------- communication

    def _communicate(self, step: Communicate, env: Values) -> None:
        gathers, scatters = list[Move](), list[Move]()
        sums: dict[tuple[Reduction, tuple[str, ...]], list[Move]] = {}
        for move in step.moves:
            if move.kind == "gather":
                gathers.append(move)
            elif move.after.tiles != move.before.tiles:
                env[move.dest] = self._scattered_tile(env[move.source], move)
            elif move.after.span is not None and move.before.span is None:
                scatters.append(move)
            else:
                assert move.reduction is not None
                sums.setdefault((move.reduction, move.axes), []).append(move)
        for (reduction, axes), moves in sums.items():
            xs = [jnp.asarray(env[m.source]) for m in moves]
            done = self.collectives.all_reduce(xs, reduction, axes)
            env.update(zip((m.dest for m in moves), done, strict=True))
        self._scatter_sums(scatters, env, step.weight)
        shards = [*(m.dest for m in scatters), *step.beside]
        env.update(zip(shards, self.collectives.together([env[v] for v in shards]), strict=True))
        self._gather(gathers, env)

    def _scattered_tile(self, x: Any, move: Move) -> Any:
        """The tile of a sum over the axes that make the tile, and over others."""
        tiled = [
            (d, want)
            for d, (have, want) in enumerate(zip(move.before.tiles, move.after.tiles, strict=True))
            if have != want
        ]
        rest = tuple(a for a in move.axes if all(a not in axes for _, axes in tiled))
        x = lax.psum(x, rest) if rest else x
        if reduce_scatter_is_unsound():
            x = lax.psum(x, tuple(a for _, axes in tiled for a in axes))
            return self.collectives.take_shard(x, move.before, move.after)
        for d, axes in tiled:
            x = lax.psum_scatter(x, axes, scatter_dimension=d, tiled=True)
        return x

    def _scatter_sums(self, moves: list[Move], env: Values, weight: int | None) -> None:
        """Partial sums that are wanted split: reduce-scatter, then the axes that it left out."""
        if not moves:
            return
        formats = [self._format(m.aval, m.after) for m in moves]
        sums = moves[0].sums
        assert all(m.sums == sums for m in moves)
        xs = [self._unscattered(m, env) for m in moves]
        waits = env.wide if weight in env.wide else env

        def arrived(x: jax.Array) -> jax.Array:
            if weight is not None:
                x, waits[weight] = lax.optimization_barrier((x, waits[weight]))
            return x

        done = self.collectives.reduce_scatter(xs, formats, sums, arrived)
        for move, x in zip(moves, done, strict=True):
            rest = tuple(a for a in move.axes if a not in self.replicas.shard_axes)
            (env[move.dest],) = self.collectives.sum_shards([x], rest, sums)

    def _unscattered(self, move: Move, env: Values) -> jax.Array:
        """What is to be scattered, with the padding of its shards where it was computed so."""
        wide = env.widening.values.get(move.source)
        if wide is None or wide != padding_of(move.aval, move.after, self.replicas):
            return env[move.source]
        return env.wide[move.source]

    @jax.named_scope("all_gather")
    def _gather(self, moves: list[Move], env: Values) -> None:
        split = [m for m in moves if m.before.span is not None and m.after.span is None]
        formats = [self._format(m.aval, m.before) for m in split]
        leaving = [i for i, m in enumerate(split) if m.dest in env.leaving]
        done = self.collectives.gather_wide([env[m.source] for m in split], formats, leaving)
        wholes = {}
        for move, fmt, x in zip(split, formats, done, strict=True):
            wholes[move.dest] = fmt.narrowed(x)
            if x.shape != fmt.shape and not any(move.before.tiles):
                env.wide[move.dest] = x
        for move in moves:
            x = wholes.get(move.dest, env.get(move.source))
            local = move.after.local_dims()
            for d, (have, want) in enumerate(zip(move.before.tiles, move.after.tiles, strict=True)):
                for axis in reversed(have) if have != want else ():
                    x = lax.all_gather(x, axis, axis=local[d], tiled=True, to="invarying")
            env[move.dest] = x

    def _format(self, aval: Aval, placement: Placement) -> Format:
        fmt = placement.format(aval.shape, self.replicas)
        assert fmt is not None
        return fmt

    # ---------------------------------------------------------------------------------- owned work

    def _owned(self, stage: OwnedStage, env: dict[int, Any]) -> None:
        """All-to-all to the owners, each job on its owner only, all-to-all back."""
        jobs = stage.by_owner()
        there = Parcels.of(stage.entries(), self.replicas)
        back = Parcels.of(stage.exits(), self.replicas)
        shards = {e.source: env[e.source] for e in there.items()}
        received = self._exchanged(there.by_owner(shards))

        def idle(received: dict[Any, jax.Array]) -> dict[Any, jax.Array]:
            return self._varying(back.empty())

        def work(owner: int) -> Callable[..., dict[Any, jax.Array]]:
            def run(received: dict[Any, jax.Array]) -> dict[Any, jax.Array]:
                local = env | there.open(owner, received)
                for job in jobs[owner]:
                    for step in job.steps:
                        args = [local[v] for v in step.ins]
                        outs = evaluate(step.op, step.op.params, args)
                        local.update(zip(step.outs, outs, strict=True))
                return self._varying(back.by_shard(owner, local))

            return run

        owners = sorted(jobs)
        branch = jnp.zeros((), jnp.int32)
        for k, owner in enumerate(owners):
            branch = jnp.where(self.collectives.shard_index == owner, k + 1, branch)
        done = lax.switch(branch, [idle, *(work(o) for o in owners)], self._varying(received))
        for item, x in back.cut(self._exchanged(done)):
            env[item.dest] = x if item.placement.span else self._agreed(x)

    def _exchanged(self, buffers: dict[Any, jax.Array]) -> dict[Any, jax.Array]:
        return {key: self.collectives.exchange(x) for key, x in buffers.items()}

    def _agreed(self, x: jax.Array) -> jax.Array:
        """A value that is equal on every replica, for JAX's types too."""
        if not self.checked:
            return x
        first = self.collectives.shard_index == 0
        number = x.astype(jnp.int32) if x.dtype == jnp.bool_ else x
        axes = self.replicas.shard_axes
        return lax.psum(jnp.where(first, number, jnp.zeros_like(number)), axes).astype(x.dtype)

    def _varying(self, tree: Any) -> Any:
        if not self.checked:
            return tree
        axes = frozenset(self.replicas.shard_axes)
        return jax.tree.map(lambda x: as_varying(x, axes), tree)


def _localized(op: Op, view: LocalView, args: list[Any]) -> tuple[dict[str, Any], list[Any]]:
    """The parameters and operands of an operation for one device's shapes."""
    rule = RULES[op.name]
    if rule.localize is None:
        return op.params, args
    params = rule.localize(op, view)
    if rule.operands is not None:
        args = [args[i] for i in rule.operands(op, view)]
    if rule.reshape is not None:
        shapes = rule.reshape(op, view)
        args = [a if s is None else lax.reshape(a, s) for a, s in zip(args, shapes, strict=True)]
    return params, args


# --------------------------------------------------------------------- evaluating whole operations


Visit = Callable[[Program, int, Any], Any]


def evaluate(
    op: Op, params: dict[str, Any], args: Sequence[Any], visit: Visit | None = None
) -> list[Any]:
    """One operation on the values given, under its own name: what they hold is up to the caller."""
    with op.as_traced():
        return _bound(op, params, args, visit)


def _bound(
    op: Op, params: dict[str, Any], args: Sequence[Any], visit: Visit | None = None
) -> list[Any]:
    if op.subs and not isinstance(op.primitive, Kept):
        aligned = align_varying([jnp.asarray(a) for a in args])
        return reenter(op, aligned, [_whole_body(sub, visit) for sub in op.subs])
    out = op.primitive.bind(*align_varying(args), **params)
    return list(out) if op.primitive.multiple_results else [out]


def evaluate_program(
    program: Program, args: Sequence[Any], visit: Visit | None = None
) -> list[Any]:
    """Evaluates a program on whole values.

    Args:
      program: as `trace` made it.
      args: one array for each of its inputs.
      visit: called as `visit(program, value, x)` for each value, with its number in the program
        that it belongs to, bodies of loops and branches included; what it returns takes its place.

    Returns:
      The program's outputs.

    >>> import jax.numpy as jnp
    >>> from wusharding.jaxprs import trace
    >>> program, _ = trace(lambda x: jnp.sum(2.0 * x), jnp.ones(3))
    >>> [float(x) for x in evaluate_program(program, [jnp.ones(3)])]
    [6.0]
    """
    env: dict[int, Any] = dict(program.consts)
    env.update(zip(program.inputs, args, strict=True))
    if visit is not None:
        env.update((v, visit(program, v, env[v])) for v in program.inputs)
    for op in program.ops:
        outs = evaluate(op, op.params, [env[v] for v in op.ins], visit)
        if visit is not None:
            outs = [visit(program, v, x) for v, x in zip(op.outs, outs, strict=True)]
        env.update(zip(op.outs, outs, strict=True))
    return [env[v] for v in program.outputs]


def _whole_body(program: Program, visit: Visit | None) -> Body:
    """A body on whole values; if one varies, all do, so that carries and branches agree."""

    def body(*args: Any) -> list[Any]:
        outs = [jnp.asarray(x) for x in evaluate_program(program, args, visit)]
        return align_varying(outs)

    return body


def reenter(op: Op, args: Sequence[Any], bodies: Sequence[Body]) -> list[Any]:
    """Runs a control-flow operation with other bodies in the place of its own."""
    args = [jnp.asarray(a) for a in args]
    match op.name:
        case "cond":
            index, *operands = args
            return lax.switch(index.astype(jnp.int32), bodies, *operands)
        case "scan":
            return _reenter_scan(op, args, bodies[0])
        case "while":
            return _reenter_while(op, args, bodies)
        case "checkpoint" | "remat" | "remat2":
            return jax.checkpoint(bodies[0], **op.params)(*args)
        case _:
            raise AssertionError(f"{op.name} is no control-flow operation")


def _reenter_scan(op: Op, args: list[Any], body: Body) -> list[Any]:
    n_const, n_carry = op.params["num_consts"], op.params["num_carry"]
    consts, carry, xs = args[:n_const], args[n_const : n_const + n_carry], args[n_const + n_carry :]

    def turn(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        outs = body(*consts, *carry, *x)
        return outs[:n_carry], outs[n_carry:]

    names = ("length", "reverse", "unroll")
    last, ys = lax.scan(turn, carry, xs, **{name: op.params[name] for name in names})
    return [*last, *ys]


def _reenter_while(op: Op, args: list[Any], bodies: Sequence[Body]) -> list[Any]:
    c, b = op.params["cond_nconsts"], op.params["body_nconsts"]
    for_cond, for_body, carry = args[:c], args[c : c + b], args[c + b :]
    return lax.while_loop(
        lambda carry: bodies[0](*for_cond, *carry)[0],
        lambda carry: bodies[1](*for_body, *carry),
        carry,
    )
