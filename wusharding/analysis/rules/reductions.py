"""Reductions over dims, cumulative operations, sorting and argmax."""

from __future__ import annotations

from typing import Any

from wusharding.analysis.rules.base import (
    Factors,
    LocalView,
    OpRule,
    Reduction,
    register,
    same_dims,
    sizes_of,
)
from wusharding.jaxprs import Aval, Op


def _reduce(reduction: Reduction | None) -> OpRule:
    """A reduction over `axes`; without a name it needs the whole of them (argmax)."""

    def factors(op: Op, ins: list[Aval], outs: list[Aval]) -> Factors:
        axes = frozenset(op.params["axes"])
        kept = tuple((d,) for d in range(len(ins[0].shape)) if d not in axes)
        reduced: dict[int, Reduction] = dict.fromkeys(axes, reduction) if reduction else {}
        blocked = frozenset() if reduction else axes
        whole = tuple(same_dims(len(a.shape)) for a in ins)
        return Factors(whole, (kept,) * len(outs), sizes_of(ins[0]), reduced, blocked)

    def localize(op: Op, view: LocalView) -> dict[str, Any]:
        axes = sorted({view.in_dims[0][d] for d in op.params["axes"]})
        return op.params | {"axes": tuple(axes)}

    def linear(op: Op, partial: tuple[int, ...]) -> bool:
        return reduction == "sum"

    return OpRule("reductions", factors, localize, linear=linear)


def _along(param: str) -> OpRule:
    """Needs all of one dim at once, and treats all others alike."""

    def factors(op: Op, ins: list[Aval], outs: list[Aval]) -> Factors:
        ndim = len(ins[0].shape)
        blocked = frozenset({op.params[param] % ndim} if ndim else ())
        return Factors(
            tuple(same_dims(ndim) for _ in ins),
            tuple(same_dims(ndim) for _ in outs),
            sizes_of(ins[0]),
            {},
            blocked,
        )

    def localize(op: Op, view: LocalView) -> dict[str, Any]:
        return op.params | {param: view.in_dims[0][op.params[param]]}

    return OpRule("reductions", factors, localize)


def _top_k_factors(op: Op, ins: list[Aval], outs: list[Aval]) -> Factors:
    ndim = len(ins[0].shape)
    last = op.params.get("axis", op.params.get("operand_axis", ndim - 1)) % ndim
    labels = same_dims(ndim)
    return Factors((labels,), (labels,) * len(outs), sizes_of(ins[0]), {}, frozenset({last}))


register("reduce_sum", _reduce("sum"))
register("reduce_max", _reduce("max"))
register("reduce_min", _reduce("min"))
register("reduce_prod", _reduce("prod"))
register("reduce_and", _reduce("and"))
register("reduce_or", _reduce("or"))
register("reduce_xor", _reduce("xor"))
register("argmax argmin", _reduce(None))
register("cumsum cumprod cummax cummin cumlogsumexp", _along("axis"))
register("sort", _along("dimension"))
register("top_k", OpRule("reductions", _top_k_factors, merged_dims=False))
