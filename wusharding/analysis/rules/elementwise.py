"""Elementwise primitives: every dim passes through; operands of rank 0 belong to all elements."""

from __future__ import annotations

from typing import Any

from wusharding.analysis.rules.base import (
    DimFactors,
    Factors,
    LocalView,
    OpRule,
    register,
    same_dims,
    sizes_of,
)
from wusharding.jaxprs import Aval, Op

_SUMS = "add sub add_any"
_UNARY = """abs acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil clz cos cosh
    digamma erf erf_inv erfc exp exp2 expm1 floor integer_pow is_finite lgamma log log1p logistic
    not population_count reduce_precision round rsqrt sign sin sinh sqrt square tan tanh"""
_NARY = """and atan2 clamp complex eq eq_to ge gt igamma igamma_grad_a igammac le le_to lt lt_to
    max min mulhi ne nextafter or polygamma pow regularized_incomplete_beta rem select_n shift_left
    shift_right_arithmetic shift_right_logical xor zeta"""


def _factors(op: Op, ins: list[Aval], outs: list[Aval]) -> Factors:
    shape = outs[0].shape
    full = same_dims(len(shape))
    if all(a.shape == shape or not a.shape for a in ins):
        labels = tuple(full if a.shape else () for a in ins)
        return Factors(labels, (full,) * len(outs), sizes_of(outs[0]))
    sizes = sizes_of(outs[0])
    return Factors(tuple(_stretched(a, shape, sizes) for a in ins), (full,) * len(outs), sizes)


def _stretched(aval: Aval, shape: tuple[int, ...], sizes: dict[int, int]) -> DimFactors:
    """Labels of an operand whose dims of length 1 are stretched: each a factor of its own."""
    labels = []
    for d, n in enumerate(aval.shape):
        if n == shape[d]:
            labels.append((d,))
        else:
            sizes[len(sizes)] = 1
            labels.append((len(sizes) - 1,))
    return tuple(labels)


def _localize(op: Op, view: LocalView) -> dict[str, Any]:
    return op.params


def _reshape(op: Op, view: LocalView) -> tuple[tuple[int, ...] | None, ...]:
    """Operands of length 1 along a merged run of the result get its rank."""
    rank = len(view.out_shapes[0])
    shapes: list[tuple[int, ...] | None] = []
    for dims, local in zip(view.in_dims, view.in_shapes, strict=True):
        if len(local) in (0, rank):
            shapes.append(None)
            continue
        merged = [1] * rank
        for d, at in enumerate(view.out_dims[0]):
            merged[at] *= local[dims[d]]
        shapes.append(tuple(merged))
    return tuple(shapes)


def _always(op: Op, partial: tuple[int, ...]) -> bool:
    return True


def _one_factor(op: Op, partial: tuple[int, ...]) -> bool:
    return len(partial) == 1


def _numerator(op: Op, partial: tuple[int, ...]) -> bool:
    return partial == (0,)


def _all_terms(op: Op, partial: tuple[int, ...]) -> bool:
    return len(partial) == len(op.ins)


register(
    "neg copy real imag conj stop_gradient name optimization_barrier",
    OpRule("elementwise", _factors, _localize, _reshape, linear=_always),
)
register(_SUMS, OpRule("elementwise", _factors, _localize, _reshape, linear=_all_terms))
register("mul", OpRule("elementwise", _factors, _localize, _reshape, linear=_one_factor))
register("div", OpRule("elementwise", _factors, _localize, _reshape, linear=_numerator))
register("convert_element_type", OpRule("elementwise", _factors, _localize, _reshape))
register(_UNARY, OpRule("elementwise", _factors, _localize, _reshape))
register(_NARY, OpRule("elementwise", _factors, _localize, _reshape))
