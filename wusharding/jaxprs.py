"""The one file that touches JAX's program representation and what changes between its versions.

Everything else works on `Program`, a flat list of `Op`s over integer value ids:

* call-like equations (`jit`, `remat`, `custom_jvp_call`, ...) are inlined, so that they cannot hide
  an operation from the analysis;
* `cond`, `scan` and `while` keep their bodies, each a `Program` of its own;
* an `optimization_barrier` over several values becomes one for each: they need not be split alike,
  and what they hold is the same;
* literals and captured constants are values like any other, listed in `Program.consts`;
* what only says how a value lies on a mesh is a `copy` with its name as `annotation`;
* a `shard_map` (`pmap` is one too) is inlined between operations `enter_manual` and `leave_manual`,
  which mark where values change from global arrays to what one device holds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend import core as jex
from jax.extend import random as extend_random
from jax.extend import source_info_util
from jax.interpreters import mlir
from jax.sharding import AbstractMesh


class Aval(NamedTuple):
    """Shape and dtype of one value."""

    shape: tuple[int, ...]
    dtype: Any

    @property
    def size(self) -> int:
        size = 1
        for n in self.shape:
            size *= n
        return size

    @property
    def nbytes(self) -> int:
        return self.size * itemsize(self.dtype)


def is_extended(dtype: Any) -> bool:
    """A dtype that is no number: a PRNG key."""
    return jnp.issubdtype(dtype, jax.dtypes.extended)


def itemsize(dtype: Any) -> int:
    """Bytes of one element; a PRNG key counts as the words of its key data."""
    if is_extended(dtype):
        return 8
    return dtype.itemsize


@dataclasses.dataclass(slots=True, eq=False)
class Op:
    """One operation: `outs = primitive(*ins, **params)`, ids into the `Program` that holds it.

    `source_infos` tell where it came from: itself, then the calls that it was inlined from. Name
    scopes of the calls are part of its own.
    """

    primitive: Any
    params: dict[str, Any]
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    subs: tuple[Program, ...]
    source_infos: tuple[Any, ...]

    @property
    def name(self) -> str:
        return self.primitive.name

    @property
    def source(self) -> str:
        """The user's line that made this operation, `file.py:12 (function)`."""
        lines = map(source_info_util.summarize, self.source_infos)
        text = next((line for line in lines if ":" in line), "unknown line")
        path, _, rest = text.partition(":")
        return f"{'/'.join(path.split('/')[-2:])}:{rest}" if rest else text

    def as_traced(self) -> Any:
        """A context in which operations get the name scopes and the source line of this one."""
        info = self.source_infos[0]
        names = source_info_util.current_name_stack() + info.name_stack
        return source_info_util.user_context(info.traceback, name_stack=names)


@dataclasses.dataclass(slots=True, eq=False)
class Program:
    """A straight line of operations. `avals[i]` describes value `i`."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    ops: list[Op]
    avals: list[Aval]
    consts: dict[int, Any]


# ---------------------------------------------------------------------------------------- tracing

_INLINED: Mapping[str, str] = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "custom_vmap_call": "call",
    "composite": "jaxpr",
    "checkpoint": "jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
    "custom_lin": "jaxpr",
}
# What differentiates, or maps, in a way of its own, where a program is to stay differentiable.
_CUSTOM = frozenset({"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"})
_REMAT = frozenset({"checkpoint", "remat", "remat2"})
_ONE_BY_ONE = frozenset({"optimization_barrier"})
_CONTROL: Mapping[str, tuple[str, ...]] = {
    "scan": ("jaxpr",),
    "while": ("cond_jaxpr", "body_jaxpr"),
}


@dataclasses.dataclass(frozen=True)
class Identity:
    """A primitive that hands its operand on: what it says matters to the analysis only."""

    name: str
    multiple_results: bool = False

    def bind(self, x: Any, **params: Any) -> Any:
        return x


@dataclasses.dataclass(frozen=True)
class Times:
    """A primitive that multiplies by a number in the operand's dtype."""

    factor: int
    name: str = "times"
    multiple_results: bool = False

    def bind(self, x: Any, **params: Any) -> Any:
        return x * jnp.asarray(self.factor, x.dtype)


@dataclasses.dataclass(frozen=True)
class SumOver:
    """`psum` under a name that JAX binds only where it checks which values vary."""

    name: str
    multiple_results: bool = False

    def bind(self, x: Any, *, axes: Any, **params: Any) -> Any:
        return lax.psum(x, axes)


@dataclasses.dataclass(frozen=True)
class Zeros:
    """A primitive without operands that makes zeros of a shape and dtype."""

    shape: tuple[int, ...]
    dtype: Any
    name: str = "zeros"
    multiple_results: bool = False

    def bind(self, **params: Any) -> Any:
        return jnp.zeros(self.shape, self.dtype)


@dataclasses.dataclass(frozen=True)
class RandomTile:
    """One device's tile of `random_bits`: the same bits that the whole has there.

    With partitionable Threefry the bits of an element follow from the key and its index alone, so a
    tile costs no more than its own elements.

    Args:
      shape: of the whole.
      bit_width: bits of an element.
      dim: the dim that is tiled.
      axes: the mesh axes that tile it, and into how many parts.
      num_tiles: into how many parts.
    """

    shape: tuple[int, ...]
    bit_width: int
    dim: int
    axes: tuple[str, ...]
    num_tiles: int
    name: str = "random_tile"
    multiple_results: bool = False

    @classmethod
    def of(
        cls, op: Op, tiles: Sequence[tuple[str, ...]], axis_sizes: Sequence[tuple[str, int]]
    ) -> RandomTile | None:
        """The tile of an operation's result; None where it must be made whole."""
        shape, sizes = op.params["shape"], dict(axis_sizes)
        tiled = [d for d, axes in enumerate(tiles) if axes]
        if len(tiled) != 1 or math.prod(shape) >= 2**32:
            return None
        if len(tiles) != len(shape) or not jax.config.jax_threefry_partitionable:  # type: ignore[attr-defined]
            return None
        axes = tiles[tiled[0]]
        num_tiles = math.prod(sizes[a] for a in axes)
        return cls(tuple(shape), op.params["bit_width"], tiled[0], axes, num_tiles)

    def bind(self, key: Any, **params: Any) -> Any:
        n = self.shape[self.dim] // self.num_tiles
        local = (*self.shape[: self.dim], n, *self.shape[self.dim + 1 :])
        start = lax.axis_index(self.axes) * n
        if key.shape or "fry" not in str(key.dtype):  # another generator: the whole, cut
            whole = jax.random.bits(key, self.shape, f"uint{self.bit_width}")
            return lax.dynamic_slice_in_dim(whole, start, n, self.dim)
        index = jnp.zeros(local, jnp.uint32)
        for d in range(len(local)):
            stride = math.prod(self.shape[d + 1 :])
            place = lax.broadcasted_iota(jnp.uint32, local, d)
            place = place + start.astype(jnp.uint32) if d == self.dim else place
            index = index + place * np.uint32(stride)
        words = jax.random.key_data(key)
        high, low = extend_random.threefry2x32_p.bind(
            *(jnp.broadcast_to(words[i], local) for i in (0, 1)), jnp.zeros_like(index), index
        )
        if self.bit_width == 64:
            return (high.astype(jnp.uint64) << 32) | low.astype(jnp.uint64)
        return (high ^ low).astype(f"uint{self.bit_width}")


@dataclasses.dataclass(frozen=True, eq=False)
class Kept:
    """One equation as it is, with what it says of its own derivative or mesh.

    Args:
      name: of its primitive.
      closed: the equation alone, as a function of the variables that it reads.
      reads: which operands these are; the others are numbers in it.
    """

    name: str
    closed: jex.ClosedJaxpr
    reads: tuple[int, ...]
    multiple_results: bool = True

    @classmethod
    def of(cls, eqn: Any, jaxpr: Any) -> Kept:
        first: dict[Any, int] = {}
        for i, var in enumerate(eqn.invars):
            if not isinstance(var, jex.Literal):
                first.setdefault(var, i)
        alone = jaxpr.replace(
            constvars=[], invars=list(first), outvars=list(eqn.outvars), eqns=[eqn]
        )
        return cls(eqn.primitive.name, jex.ClosedJaxpr(alone, []), tuple(first.values()))

    def bind(self, *args: Any, **params: Any) -> Any:
        return jex.jaxpr_as_fun(self.closed)(*(args[i] for i in self.reads))


CROSSINGS = ("enter_manual", "leave_manual")

# What only tells JAX how a value lies on a mesh: inside one `shard_map` it has nothing to do.
_ANNOTATIONS = frozenset(
    {"pvary", "pcast", "reshard", "mesh_cast", "sharding_constraint", "layout_constraint"}
)
_SHARDING_PARAMS = ("out_sharding", "sharding")


def trace(
    fun: Callable[..., Any],
    *args: Any,
    mesh: AbstractMesh | None = None,
    keep_calls: bool = False,
) -> tuple[Program, Any]:
    """Traces `fun` at global shapes, outside of any mesh.

    Args:
      fun: a function of pytrees of arrays.
      *args: pytrees of anything with `shape` and `dtype`.
      mesh: the mesh that `fun` finds around it; None hides any.
      keep_calls: keep functions with derivatives of their own (`jax.custom_vjp`, `jax.custom_jvp`),
        `jax.checkpoint` and `shard_map` as operations, so that what is evaluated can be
        differentiated as `fun` can. The first have their body as `subs`, to look at.

    Returns:
      The program, whose inputs are the leaves of `args` in order, and the output as a pytree of
      `jax.ShapeDtypeStruct`.
    """
    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    with no_mesh() if mesh is None else jax.sharding.use_abstract_mesh(mesh):
        closed, out_shape = jax.make_jaxpr(fun, return_shape=True)(*structs)
    return from_jaxpr(closed, keep_calls=keep_calls), out_shape


@contextlib.contextmanager
def no_mesh() -> Iterator[None]:
    """Hides the ambient mesh, so that traced values carry no sharding."""
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        yield


def trace_step(fun: Callable[..., Any], *args: Any) -> tuple[Program, Any, tuple[bool, ...]]:
    """Traces a train step as its caller would run it, types and mesh included.

    Args:
      fun: a function of pytrees of arrays.
      *args: pytrees of anything with `shape` and `dtype`; shardings are kept.

    Returns:
      The program, the output as a pytree of `jax.ShapeDtypeStruct`, and for each input whether the
      step, being jitted already, donates it.
    """
    closed, out_shape = jax.make_jaxpr(fun, return_shape=True)(*args)
    donated = [False] * len(closed.jaxpr.invars)
    eqns = closed.jaxpr.eqns
    if len(eqns) == 1 and "donated_invars" in eqns[0].params:
        given = dict(zip(map(id, eqns[0].invars), eqns[0].params["donated_invars"], strict=True))
        donated = [given.get(id(v), False) for v in closed.jaxpr.invars]
    return from_jaxpr(closed), out_shape, tuple(donated)


def from_jaxpr(closed: jex.ClosedJaxpr, *, keep_calls: bool = False) -> Program:
    """Flattens a closed jaxpr into a `Program`; `keep_calls` as for `trace`."""
    build = _Builder(keep_calls)
    env: dict[Any, int] = {}
    for var, value in zip(closed.jaxpr.constvars, closed.consts, strict=True):
        env[var] = build.const(value, var.aval)
    inputs = tuple(build.new(v.aval, env, v) for v in closed.jaxpr.invars)
    outputs = build.inline(closed.jaxpr, env)
    return Program(inputs, outputs, build.ops, build.avals, build.consts)


class _Builder:
    """Appends equations to one flat program."""

    def __init__(self, keep_calls: bool = False) -> None:
        self.keep_calls = keep_calls
        self.ops: list[Op] = []
        self.avals: list[Aval] = []
        self.consts: dict[int, Any] = {}
        self._literals: dict[Any, int] = {}

    def new(self, aval: Any, env: dict[Any, int] | None = None, var: Any = None) -> int:
        self.avals.append(Aval(tuple(aval.shape), aval.dtype))
        index = len(self.avals) - 1
        if env is not None:
            env[var] = index
        return index

    def const(self, value: Any, aval: Any) -> int:
        index = self.new(aval)
        self.consts[index] = value
        return index

    def atom(self, atom: Any, env: dict[Any, int]) -> int:
        if not isinstance(atom, jex.Literal):
            return env[atom]
        value, aval = atom.val, array_aval(atom.aval)
        if getattr(value, "shape", ()) != () or is_extended(aval.dtype):
            return self.const(value, atom.aval)
        number = value if isinstance(value, bool | int | float) else value.item()
        sign = math.copysign(1.0, number) if isinstance(number, float) else 1.0
        weak = getattr(atom.aval, "weak_type", False)
        key = (type(value), aval.dtype, weak, number, sign)
        if key not in self._literals:
            self._literals[key] = self.const(value, atom.aval)
        return self._literals[key]

    def inline(
        self, jaxpr: Any, env: dict[Any, int], callers: tuple[Any, ...] = ()
    ) -> tuple[int, ...]:
        for eqn in jaxpr.eqns:
            sources = (_within(eqn.source_info, callers), *callers)
            ins = tuple(self.atom(a, env) for a in eqn.invars)
            if self.keep_calls and (kept := self._kept(eqn, jaxpr)) is not None:
                outs = tuple(self.new(v.aval, env, v) for v in eqn.outvars)
                self.ops.append(dataclasses.replace(kept, ins=ins, outs=outs, source_infos=sources))
                continue
            sub = _INLINED.get(eqn.primitive.name)
            if sub is not None and sub in eqn.params:
                if eqn.params.get("differentiated") and eqn.params.get("prevent_cse"):
                    ins = self._kept_apart(ins, sources)
                outs = self._call(eqn.params[sub], ins, _entered(eqn, sources))
                env.update(zip(eqn.outvars, outs, strict=True))
                continue
            if eqn.primitive.name == "shard_map":
                outs = self._manual(eqn, ins, sources)
                env.update(zip(eqn.outvars, outs, strict=True))
                continue
            outs = tuple(self.new(v.aval, env, v) for v in eqn.outvars)
            if eqn.primitive.name in _ONE_BY_ONE:
                for i, o in zip(ins, outs, strict=True):
                    self.ops.append(Op(eqn.primitive, eqn.params, (i,), (o,), (), sources))
                continue
            subs = _bodies(eqn, self.keep_calls)
            primitive, params = eqn.primitive, _without_shardings(eqn.params)
            if primitive.name == "while" and subs[0].avals[subs[0].outputs[0]].shape:
                first = params["cond_nconsts"]
                subs, params = _as_one_loop(subs[0], subs[1], params)
                ins = (*ins[:first], *ins)
            if primitive.name == "psum_invariant":
                primitive = SumOver(primitive.name)
            if primitive.name in _ANNOTATIONS:
                sharding = eqn.params.get("sharding", eqn.params.get("dst_sharding"))
                said = {"annotation": primitive.name, "said": sharding}
                primitive, params = Identity("copy"), params | said
            self.ops.append(Op(primitive, params, ins, outs, subs, sources))
        return tuple(self.atom(a, env) for a in jaxpr.outvars)

    def _kept(self, eqn: Any, jaxpr: Any) -> Op | None:
        """An equation that is to stay an operation; None for others."""
        name = eqn.primitive.name
        if name == "shard_map":
            params = {
                "in_specs": eqn.params["in_specs"],
                "out_specs": eqn.params["out_specs"],
                "axes": frozenset(map(str, eqn.params["newly_manual_axes"])),
            }
            return Op(Kept.of(eqn, jaxpr), params, (), (), (), ())
        if name not in _CUSTOM | _REMAT or eqn.params.get("differentiated"):
            return None
        body = eqn.params[_INLINED[name]]
        closed = body if hasattr(body, "consts") else jex.ClosedJaxpr(body, [])
        subs = (from_jaxpr(closed, keep_calls=True),)
        if name in _CUSTOM:
            return Op(Kept.of(eqn, jaxpr), {}, (), (), subs, ())
        chosen = {key: eqn.params[key] for key in ("prevent_cse", "policy")}
        return Op(eqn.primitive, chosen, (), (), subs, ())

    def _kept_apart(self, ins: tuple[int, ...], sources: tuple[Any, ...]) -> tuple[int, ...]:
        """What `jax.checkpoint` computes again must not be merged with the first time."""
        outs = tuple(self.new(self.avals[v]) for v in ins)
        for i, o in zip(ins, outs, strict=True):
            self.ops.append(Op(lax.optimization_barrier_p, {}, (i,), (o,), (), sources))
        return outs

    def _manual(self, eqn: Any, ins: tuple[int, ...], sources: tuple[Any, ...]) -> tuple[int, ...]:
        """The body of a `shard_map` between marks of what enters and leaves it."""
        body, params = eqn.params["jaxpr"], eqn.params
        axes = frozenset(map(str, params["newly_manual_axes"]))

        def cross(name: str, v: int, aval: Any, spec: Any) -> int:
            out = self.new(aval)
            marks = {"spec": spec, "axes": axes, "checked": params["check_vma"]}
            self.ops.append(Op(Identity(name), marks, (v,), (out,), (), sources))
            return out

        inner = zip(ins, body.invars, params["in_specs"], strict=True)
        local = tuple(cross("enter_manual", v, var.aval, spec) for v, var, spec in inner)
        outs = self._call(body, local, sources)
        outer = zip(outs, eqn.outvars, params["out_specs"], strict=True)
        return tuple(cross("leave_manual", v, var.aval, spec) for v, var, spec in outer)

    def splice(self, program: Program, ins: Sequence[int]) -> tuple[int, ...]:
        """Appends the operations of a program; returns its outputs."""
        env = dict(zip(program.inputs, ins, strict=True))
        env |= {v: self.const(x, program.avals[v]) for v, x in program.consts.items()}
        for op in program.ops:
            outs = tuple(self.new(program.avals[v]) for v in op.outs)
            read = tuple(env[v] for v in op.ins)
            self.ops.append(dataclasses.replace(op, ins=read, outs=outs))
            env.update(zip(op.outs, outs, strict=True))
        return tuple(env[v] for v in program.outputs)

    def _call(self, jaxpr: Any, ins: tuple[int, ...], callers: tuple[Any, ...]) -> tuple[int, ...]:
        env: dict[Any, int] = {}
        if hasattr(jaxpr, "consts"):
            jaxpr, consts = jaxpr.jaxpr, jaxpr.consts
            for var, value in zip(jaxpr.constvars, consts, strict=True):
                env[var] = self.const(value, var.aval)
        env.update(zip(jaxpr.invars, ins, strict=True))
        return self.inline(jaxpr, env, callers)


def _within(info: Any, callers: tuple[Any, ...]) -> Any:
    """Where an equation came from, its name scopes within those of the calls around it."""
    if not callers or not len(callers[0].name_stack):
        return info
    return info.replace(name_stack=callers[0].name_stack + info.name_stack)


def _entered(eqn: Any, sources: tuple[Any, ...]) -> tuple[Any, ...]:
    """Sources for what a call holds, in a scope of the name that the call has in a profile."""
    if eqn.primitive.name in ("jit", "pjit"):
        name = f"jit({eqn.params['name']})"
    elif "differentiated" in eqn.params:
        name = "checkpoint"
    else:
        return sources
    call, *callers = sources
    # As text, so that `jvp()` does not close around the name, which is how JAX writes it.
    names = source_info_util.new_name_stack("/".join(filter(None, (str(call.name_stack), name))))
    return call.replace(name_stack=names), *callers


def _without_shardings(params: dict[str, Any]) -> dict[str, Any]:
    """Parameters of an operation that is evaluated on one device's piece: they name no mesh."""
    if all(params.get(name) is None for name in _SHARDING_PARAMS):
        return params
    return params | {name: None for name in _SHARDING_PARAMS if name in params}


def _bodies(eqn: Any, keep_calls: bool) -> tuple[Program, ...]:
    if eqn.primitive.name == "cond":
        bodies = eqn.params["branches"]
    else:
        bodies = [eqn.params[n] for n in _CONTROL.get(eqn.primitive.name, ())]
    return tuple(from_jaxpr(b, keep_calls=keep_calls) for b in bodies)


def _as_one_loop(
    test: Program, turn: Program, params: dict[str, Any]
) -> tuple[tuple[Program, Program], dict[str, Any]]:
    """Loops that `jax.vmap` put side by side, whose test is one element for each, as one loop.

    It runs while any of them does; those that have ended keep what they carry. The turn needs the
    test's constants too: they come first among its own.
    """
    first, second = params["cond_nconsts"], params["body_nconsts"]
    pred = test.avals[test.outputs[0]]

    def helper(fun: Callable[..., Any], *avals: Aval) -> Program:
        structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
        with no_mesh():
            return from_jaxpr(jax.make_jaxpr(fun)(*structs))

    build = _Builder()
    ins = [build.new(test.avals[v]) for v in test.inputs]
    outs = build.splice(helper(jnp.any, pred), build.splice(test, ins))
    any_left = Program(tuple(ins), outs, build.ops, build.avals, build.consts)

    def chosen(pred: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(jnp.expand_dims(pred, range(pred.ndim, new.ndim)), new, old)

    build = _Builder()
    fixed = [build.new(test.avals[v]) for v in test.inputs[:first]]
    ins = [build.new(turn.avals[v]) for v in turn.inputs]
    carry = ins[second:]
    (left,) = build.splice(test, [*fixed, *carry])
    done = []
    for new, old in zip(build.splice(turn, ins), carry, strict=True):
        aval = build.avals[old]
        done += build.splice(helper(chosen, pred, aval, aval), [left, new, old])
    one = Program((*fixed, *ins), tuple(done), build.ops, build.avals, build.consts)
    return (any_left, one), params | {"body_nconsts": first + second}


def prune(program: Program) -> Program:
    """The same program without operations that no output needs; effects are kept."""
    needed = set(program.outputs)
    kept = []
    for op in reversed(program.ops):
        if needed.intersection(op.outs) or _has_effects(op):
            kept.append(op)
            needed.update(op.ins)
    return dataclasses.replace(program, ops=kept[::-1])


def _has_effects(op: Op) -> bool:
    """Whether an operation is there for more than its results, as `jax.debug.print` is."""
    if not op.outs or op.name == "io_callback":
        return True
    return any(_has_effects(inner) for sub in op.subs for inner in sub.ops)


# ------------------------------------------------------------------------------- manual-mode types


def varying_axes(x: Any) -> frozenset[str]:
    """The mesh axes over which JAX's types say that `x` varies; empty where types are unchecked."""
    aval = jax.typeof(x)
    manual = getattr(aval, "mat", None)
    return manual.varying if manual is not None else getattr(aval, "vma", frozenset())


def align_varying(args: Sequence[Any]) -> list[Any]:
    """Casts `args` so that all vary over the same axes, which `bind` asks for."""
    axes = [varying_axes(a) for a in args]
    union = frozenset().union(*axes)
    if not union:
        return list(args)
    return [as_varying(a, union - have) for a, have in zip(args, axes, strict=True)]


def as_varying(x: Any, axes: frozenset[str]) -> Any:
    """Casts `x` to vary over `axes` as well."""
    missing = axes - varying_axes(x)
    return lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x


def row_major(x: jax.Array) -> jax.Array:
    """`x`, which the compiler has to lay out row by row where it is read here."""
    return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))


def as_invarying(x: Any, axes: Sequence[str]) -> Any:
    """`x` with the type of a value that is equal along `axes`, which the caller vouches for.

    JAX has no such cast, and its gather within groups returns a varying value: several of them
    may together have covered an axis, which types cannot tell.
    """
    found = varying_axes(x).intersection(axes)
    return _invarying_p.bind(x, axes=tuple(sorted(found))) if found else x


def _invarying_aval(aval: Any, *, axes: tuple[str, ...]) -> Any:
    if hasattr(aval, "mat"):
        mat = aval.mat.update(varying=aval.mat.varying.difference(axes))
        return aval.update(manual_axis_type=mat)
    return aval.update(vma=aval.vma.difference(axes))


_invarying_p = jex.Primitive("as_invarying")
_invarying_p.def_abstract_eval(_invarying_aval)
mlir.register_lowering(_invarying_p, lambda ctx, x, *, axes: [x])


def bound_axis_size(axis: str) -> int | None:
    """The size of a mesh axis that is bound here (in `shard_map` or `pmap`), or None."""
    try:
        return lax.axis_size(axis)
    except NameError:
        return None


def checks_varying(axis: str) -> bool:
    """True inside a `shard_map` with `check_vma=True`."""
    return axis in varying_axes(lax.axis_index(axis))


def is_of_other_mesh(error: Exception) -> bool:
    """Whether JAX raised it because a `shard_map` or `pmap` is over another mesh than the ambient.

    JAX has no type for it; its message says so.
    """
    return "should match the mesh passed to shard_map" in str(error)


def array_aval(x: Any) -> Aval:
    """Shape and dtype of an array, a tracer, a numpy value or a `ShapeDtypeStruct`."""
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return Aval(tuple(x.shape), x.dtype if is_extended(x.dtype) else jnp.dtype(x.dtype))
    value = jnp.asarray(x)
    return Aval(value.shape, value.dtype)


def reduce_scatter_is_unsound() -> bool:
    """Whether this backend's reduce-scatter may return wrong numbers.

    Gloo, which XLA's CPU backend uses as soon as `jax.distributed` is initialized, now and then
    adds a part of shard 0 twice where shards have some hundred KiB (jax-ml/jax issue 40830).
    """
    return jax.default_backend() == "cpu" and jax.distributed.is_initialized()
