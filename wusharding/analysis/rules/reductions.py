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


def _adds(op: Op, partial: tuple[int, ...]) -> bool:
    return True


def _reduce(reduction: Reduction | None) -> OpRule:
    """A reduction over `axes`; without a name it needs the whole of them (argmax).

    Where kept and reduced dims are merged, those of one kind have length 1, and it is not the kind
    of the first dim: a split begins with a dim that is longer.
    """

    def factors(op: Op, ins: list[Aval], outs: list[Aval]) -> Factors:
        axes = frozenset(op.params["axes"])
        kept = tuple((d,) for d in range(len(ins[0].shape)) if d not in axes)
        reduced: dict[int, Reduction] = dict.fromkeys(axes, reduction) if reduction else {}
        blocked = frozenset() if reduction else axes
        whole = tuple(same_dims(len(a.shape)) for a in ins)
        return Factors(whole, (kept,) * len(outs), sizes_of(ins[0]), reduced, blocked)

    def localize(op: Op, view: LocalView) -> dict[str, Any]:
        runs = _runs(view)
        axes, at = [], 0
        for run in runs:
            if run[0] in op.params["axes"]:
                axes.append(at)
                at += len(set(run) - set(op.params["axes"]))
            at += 1
        return op.params | {"axes": tuple(axes)}

    def reshape(op: Op, view: LocalView) -> tuple[tuple[int, ...] | None, ...]:
        shape: list[int] = []
        for run, n in zip(_runs(view), view.in_shapes[0], strict=True):
            shape.append(n)
            if run[0] in op.params["axes"]:
                shape += [1] * len(set(run) - set(op.params["axes"]))
        return (tuple(shape) if len(shape) > len(view.in_shapes[0]) else None,)

    return OpRule(
        "reductions", factors, localize, reshape, linear=_adds if reduction == "sum" else None
    )


def _runs(view: LocalView) -> list[list[int]]:
    """The dims of the operand that each of its local dims stands for."""
    runs: list[list[int]] = [[] for _ in view.in_shapes[0]]
    for d, at in enumerate(view.in_dims[0]):
        runs[at].append(d)
    return runs


def _along(param: str, *, linear: bool = False) -> OpRule:
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

    return OpRule("reductions", factors, localize, linear=_adds if linear else None)


def _general_factors(op: Op, ins: list[Aval], outs: list[Aval]) -> Factors:
    """Operands, then as many start values of rank 0; how they combine is not known."""
    axes = frozenset(op.params["dimensions"])
    whole = same_dims(len(ins[0].shape))
    kept = tuple((d,) for d in range(len(whole)) if d not in axes)
    starts = ((),) * len(outs)
    sizes = sizes_of(ins[0])
    return Factors((whole,) * len(outs) + starts, (kept,) * len(outs), sizes, {}, axes)


def _general_localize(op: Op, view: LocalView) -> dict[str, Any]:
    dimensions = sorted(view.in_dims[0][d] for d in op.params["dimensions"])
    return op.params | {"dimensions": tuple(dimensions)}


_WINDOW = {
    "window_dimensions": 1,
    "window_strides": 1,
    "padding": (0, 0),
    "base_dilation": 1,
    "window_dilation": 1,
}


_SCATTER_PARAMS = ("window_dimensions", "window_strides", "padding")


def _window_factors(op: Op, ins: list[Aval], outs: list[Aval]) -> Factors:
    """Dims along which the window is one element pass."""
    arrays = len(outs)
    label_in, label_out, blocked = list[tuple[int]](), list[tuple[int]](), set[int]()
    sizes = sizes_of(ins[0])
    for d, n in enumerate(outs[0].shape):
        label_in.append((d,))
        if all(_plain(op.params[p][d]) == plain for p, plain in _WINDOW.items()):
            label_out.append((d,))
            continue
        fresh = len(sizes)
        sizes[fresh] = n
        label_out.append((fresh,))
        blocked |= {d, fresh}
    starts = ((),) * (len(ins) - arrays)
    a, b = tuple(label_in), tuple(label_out)
    windows = tuple((i, j) for (i,), (j,) in zip(a, b, strict=True) if i != j)
    return Factors((a,) * arrays + starts, (b,) * arrays, sizes, {}, frozenset(blocked), windows)


def _scatter_factors(op: Op, ins: list[Aval], outs: list[Aval]) -> Factors:
    """Source and operand, as max pooling differentiates: dims along which the window is one."""
    source, operand = ins
    sizes = sizes_of(operand)
    labels, blocked = list[tuple[int]](), set[int]()
    for d, n in enumerate(source.shape):
        if all(_plain(op.params[p][d]) == _WINDOW[p] for p in _SCATTER_PARAMS):
            labels.append((d,))
            continue
        fresh = len(sizes)
        sizes[fresh] = n
        labels.append((fresh,))
        blocked |= {d, fresh}
    whole = same_dims(len(operand.shape))
    return Factors((tuple(labels), whole), (whole,), sizes, {}, frozenset(blocked))


def _plain(x: Any) -> Any:
    return tuple(x) if isinstance(x, (tuple, list)) else x


def _window_localize(op: Op, view: LocalView) -> dict[str, Any]:
    local: dict[str, Any] = {}
    for param, plain in _WINDOW.items():
        values = [plain] * len(view.in_shapes[0])
        for d, at in enumerate(view.in_dims[0]):
            if view.in_dims[0].count(at) == 1:
                values[at] = op.params[param][d]
        local[param] = tuple(values)
    return op.params | local


register("reduce_sum", _reduce("sum"))
register("reduce_max", _reduce("max"))
register("reduce_min", _reduce("min"))
register("reduce_prod", _reduce("prod"))
register("reduce_and", _reduce("and"))
register("reduce_or", _reduce("or"))
register("reduce_xor", _reduce("xor"))
register("argmax argmin", _reduce(None))
register("cumsum", _along("axis", linear=True))
register("cumprod cummax cummin cumlogsumexp top_k", _along("axis"))
register("sort", _along("dimension"))
register("approx_top_k", _along("reduction_dimension"))
register("reduce", OpRule("reductions", _general_factors, _general_localize))
register(
    "reduce_window reduce_window_sum reduce_window_max reduce_window_min",
    OpRule("reductions", _window_factors, _window_localize),
)
register("select_and_scatter_add", OpRule("reductions", _scatter_factors, merged_dims=False))
