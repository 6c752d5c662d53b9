"""`OpRule`: what one primitive does to dims, as data, and the registry of rules.

A rule labels every dim of every operand and result with *factors*, as an einsum does with letters.
Splitting a factor splits every dim that carries it. A factor may be

* passed through: it labels a dim of each result, and each device computes its own piece;
* reduced: it labels no result, and the pieces combine by a reduction;
* blocked: the operation needs all of it at once.

Rules are written for one split dim, never see a mesh or an array, and are proven by the
split-run-join law in `tests/laws.py`. A primitive without a rule is not shardable: it runs on the
whole value, and the plan names it with its source line. Nothing is guessed.

Source of the idea: the op-sharding rules of Shardy and the dim rules of GSPMD (arXiv 2105.04663).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

from wusharding.jaxprs import Aval, Op, Program

DimFactors = tuple[tuple[int, ...], ...]
Reduction = Literal["sum", "prod", "max", "min", "and", "or", "xor"]


class Factors(NamedTuple):
    """The labels of one operation: `ins[i][d]` are the factors of dim `d`, major to minor.

    Attributes:
      ins: for each operand the factors of its dims.
      outs: the same for each result.
      sizes: elements along each factor.
      reduced: factors that label no result, and how their pieces combine.
      blocked: factors of which the operation needs all at once.
      windows: pairs of blocked factors that move along each other, as the rows of an image and of
        its convolution: a piece of one needs the same piece of the other, and a few elements beyond
        its ends.
    """

    ins: tuple[DimFactors, ...]
    outs: tuple[DimFactors, ...]
    sizes: Mapping[int, int]
    reduced: Mapping[int, Reduction] = {}
    blocked: frozenset[int] = frozenset()
    windows: tuple[tuple[int, int], ...] = ()


class LocalView(NamedTuple):
    """What a rule needs to rewrite an operation's parameters for one device.

    `in_dims[i][d]` is where dim `d` of operand `i` lies in its local shape (merged dims share a
    position), likewise `out_dims`; `in_shapes` and `out_shapes` are the local shapes.
    """

    in_dims: tuple[tuple[int, ...], ...]
    out_dims: tuple[tuple[int, ...], ...]
    in_shapes: tuple[tuple[int, ...], ...]
    out_shapes: tuple[tuple[int, ...], ...]


FactorsFn = Callable[[Op, list[Aval], list[Aval]], Factors]
LocalizeFn = Callable[[Op, LocalView], dict[str, Any]]
ReshapeFn = Callable[[Op, LocalView], tuple[tuple[int, ...] | None, ...]]
OperandsFn = Callable[[Op, LocalView], tuple[int, ...]]
LinearFn = Callable[[Op, tuple[int, ...]], bool]


@dataclasses.dataclass(frozen=True)
class OpRule:
    """What one primitive does to dims.

    Args:
      family: the file of `rules/` that it lives in.
      factors: labels the dims of one operation.
      localize: rewrites the parameters for local shapes; None where they name no shape or dim.
      reshape: for each operand the shape to give it before, or None: dims of length 1 that do not
        fit the local result.
      operands: which operands the local operation takes, where merged dims make some superfluous.
      merged_dims: whether it also works on operands whose split dims were merged into one.
      linear: given the operands that hold partial sums, whether applying the operation to the
        parts and adding up gives the same as adding up first. None means never.
      matrix: the work grows faster than its operands do, so it is worth doing once and not on
        each replica: such work is given to one owner.
    """

    family: str
    factors: FactorsFn
    localize: LocalizeFn | None = None
    reshape: ReshapeFn | None = None
    operands: OperandsFn | None = None
    merged_dims: bool = True
    linear: LinearFn | None = None
    matrix: bool = False


RULES: dict[str, OpRule] = {}


def register(names: str | Iterable[str], rule: OpRule) -> None:
    """Adds `rule` for each primitive of `names`, a string of names between spaces."""
    for name in names.split() if isinstance(names, str) else names:
        if name in RULES:
            raise ValueError(f"primitive {name!r} has a rule already")
        RULES[name] = rule


def same_dims(ndim: int) -> DimFactors:
    """Factor `d` for dim `d`."""
    return tuple((d,) for d in range(ndim))


def sizes_of(aval: Aval) -> dict[int, int]:
    """Sizes of the factors that `same_dims` names."""
    return dict(enumerate(aval.shape))


def factors_of(program: Program, op: Op) -> Factors | None:
    """The labels of `op`, or None where its primitive has no rule.

    >>> import jax.numpy as jnp
    >>> from wusharding.jaxprs import trace
    >>> program, _ = trace(lambda x, w: x @ w, jnp.ones((8, 6)), jnp.ones((6, 3)))
    >>> found = factors_of(program, program.ops[0])
    >>> [len(dims) for dims in found.outs], sorted(found.sizes.values()), len(found.reduced)
    ([2], [3, 6, 8], 1)
    """
    rule = RULES.get(op.name)
    if rule is None:
        return None
    avals = program.avals
    return rule.factors(op, [avals[i] for i in op.ins], [avals[i] for i in op.outs])
