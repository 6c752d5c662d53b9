"""Norms that keep clear of zero take one pass over what they are of, not two.

`optax.safe_norm`, which the trust ratios of LARS and LAMB are made of, takes a norm, puts ones in
the place of an array whose norm is too small, and takes the norm of that: so that derivatives are
no NaN, which an update has no need of. Sharded, that is a further sum over all replicas, which
waits for the first one.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from wusharding.jaxprs import Aval, Op, Program


class _Squares(NamedTuple):
    """A sum of squares: of `x`, over `axes`, the squares cast to `dtypes` one after the other."""

    x: int
    axes: tuple[int, ...]
    dtypes: tuple[Any, ...]


class _Choice(NamedTuple):
    """`where(pred, number, other)`, with one number and one truth value for all elements."""

    pred: int
    number: Any
    other: int


def norms_once(program: Program) -> Program:
    """The same program, where a sum of squares is not taken twice for the sake of a choice.

    `sum(where(p, c, x) ** 2)`, with one number `c` and one `p` for all of `x`, is
    `where(p, c ** 2 * size, sum(x ** 2))`, and that is what it becomes where `sum(x ** 2)` is taken
    before. What nothing needs any more is left in place; see `prune`.

    >>> import jax, optax
    >>> from wusharding.jaxprs import prune, trace
    >>> norm, x = optax.safe_norm, jax.ShapeDtypeStruct((4, 3), jnp.float32)
    >>> program, _ = trace(lambda x: norm(x, 0.0), x)
    >>> once = prune(norms_once(program))
    >>> [sum(op.name == "reduce_sum" for op in p.ops) for p in (program, once)]
    [2, 1]
    """
    made = {v: op for op in program.ops for v in op.outs}
    build = _Builder([], list(program.avals), dict(program.consts))
    sums: dict[_Squares, int] = {}  # that are taken so far
    kept: dict[int, int] = {}  # the same with dims of length 1, as they are read: not summed twice
    for op in program.ops:
        squares = _squares(op, made)
        choice = None if squares is None else _choice(squares.x, program, made)
        if squares is not None and choice is not None:
            taken = sums.get(squares._replace(x=choice.other))
            if taken is not None:
                _choose(build, op, squares, choice, kept.get(taken, taken))
                continue
        build.ops.append(op)
        if squares is not None:
            sums.setdefault(squares, op.outs[0])
        elif op.name == "broadcast_in_dim" and program.avals[op.outs[0]].size == 1:
            kept.setdefault(op.ins[0], op.outs[0])
    return dataclasses.replace(program, ops=build.ops, avals=build.avals, consts=build.consts)


class _Builder(NamedTuple):
    ops: list[Op]
    avals: list[Aval]
    consts: dict[int, Any]

    def const(self, value: np.ndarray) -> int:
        self.avals.append(Aval(value.shape, value.dtype))
        self.consts[len(self.avals) - 1] = value
        return len(self.avals) - 1

    def put(self, like: Op, primitive: Any, ins: tuple[int, ...], out: Aval, **params: Any) -> int:
        """Appends an operation that comes from where `like` does."""
        self.avals.append(out)
        outs = (len(self.avals) - 1,)
        op = dataclasses.replace(like, primitive=primitive, params=params, ins=ins, outs=outs)
        self.ops.append(op)
        return outs[0]


def _choose(build: _Builder, op: Op, squares: _Squares, choice: _Choice, taken: int) -> None:
    """What takes the place of `op`: the choice between a number and the sum that is `taken`."""
    out, aval, pred = build.avals[op.outs[0]], build.avals[taken], choice.pred
    dims = tuple(range(len(build.avals[pred].shape)))
    if dims and build.avals[pred].shape != aval.shape:
        scalar = Aval((), build.avals[pred].dtype)
        pred = build.put(op, lax.squeeze_p, (pred,), scalar, dimensions=dims)
    count = build.avals[squares.x].size // max(out.size, 1)
    number = build.const(np.full(aval.shape, _summed(squares, choice.number, count)))
    done = build.put(op, lax.select_n_p, (pred, taken, number), aval)
    if aval.shape != out.shape:
        done = build.put(op, lax.squeeze_p, (done,), out, dimensions=tuple(range(len(aval.shape))))
    build.ops[-1] = dataclasses.replace(build.ops[-1], outs=op.outs)


def _summed(squares: _Squares, number: Any, count: int) -> Any:
    """The sum of the squares of `count` equal numbers."""
    square = np.square(number)
    for dtype in squares.dtypes:
        square = square.astype(dtype)
    return square * np.asarray(count, square.dtype)


def _squares(op: Op, made: dict[int, Op]) -> _Squares | None:
    """The sum of squares that an operation takes; None for all else."""
    if op.name != "reduce_sum":
        return None
    dtypes: list[Any] = []
    square = made.get(op.ins[0])
    while square is not None and square.name == "convert_element_type":
        dtypes.append(square.params["new_dtype"])
        square = made.get(square.ins[0])
    if square is None:
        return None
    product = square.name == "mul" and square.ins[0] == square.ins[1]
    power = square.name == "integer_pow" and square.params["y"] == 2
    if not (product or power or square.name == "square"):
        return None
    return _Squares(square.ins[0], op.params["axes"], tuple(dtypes[::-1]))


def _choice(v: int, program: Program, made: dict[int, Op]) -> _Choice | None:
    """The choice that a value is; None for all else."""
    select = made.get(v)
    if select is None or select.name != "select_n" or len(select.ins) != 3:
        return None
    pred, other, number = select.ins
    if pred in made and made[pred].name == "broadcast_in_dim":
        (pred,) = made[pred].ins
    floats = jnp.issubdtype(program.avals[v].dtype, jnp.floating)
    alone = program.avals[pred].size == 1 and program.avals[pred].dtype == jnp.bool_
    found = _number(number, program, made) if floats and alone else None
    return None if found is None else _Choice(pred, found, other)


def _number(v: int, program: Program, made: dict[int, Op]) -> Any:
    """The number that a value repeats, in its dtype; None for all else."""
    if v in program.consts:
        found = np.asarray(program.consts[v], program.avals[v].dtype)
        return found if not found.shape else None
    op = made.get(v)
    if op is None or op.name not in ("broadcast_in_dim", "convert_element_type"):
        return None
    found = _number(op.ins[0], program, made)
    return None if found is None else found.astype(program.avals[v].dtype)
