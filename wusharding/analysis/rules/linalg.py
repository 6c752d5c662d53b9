"""Contractions, convolutions and matrix factorisations: work that outgrows its operands."""

from __future__ import annotations

from wusharding.analysis.rules.base import (
    DimFactors,
    Factors,
    FactorsFn,
    OpRule,
    Reduction,
    register,
    same_dims,
)
from wusharding.analysis.rules.shapes import same_free
from wusharding.jaxprs import Aval, Op


def _dot_factors(op: Op, ins: list[Aval], outs: list[Aval]) -> Factors:
    (contract_a, contract_b), (batch_a, batch_b) = op.params["dimension_numbers"]
    sizes: dict[int, int] = {}
    labels: list[list[tuple[int, ...]]] = [[()] * len(a.shape) for a in ins[:2]]

    def fresh(size: int) -> int:
        sizes[len(sizes)] = size
        return len(sizes) - 1

    out: list[tuple[int, ...]] = []
    for a, b in zip(batch_a, batch_b, strict=True):
        labels[0][a] = labels[1][b] = (fresh(ins[0].shape[a]),)
        out.append(labels[0][a])
    contracted = {}
    for a, b in zip(contract_a, contract_b, strict=True):
        labels[0][a] = labels[1][b] = (fresh(ins[0].shape[a]),)
        contracted[labels[0][a][0]] = "sum"
    for side, aval in enumerate(ins[:2]):
        for d, n in enumerate(aval.shape):
            if not labels[side][d]:
                labels[side][d] = (fresh(n),)
                out.append(labels[side][d])
    return Factors((tuple(labels[0]), tuple(labels[1])), (tuple(out),), sizes, contracted)


def _dot_linear(op: Op, partial: tuple[int, ...]) -> bool:
    return len(partial) == 1


def _conv_factors(op: Op, ins: list[Aval], outs: list[Aval]) -> Factors:
    """Batch and output features pass, input features add up; windows and groups need the whole."""
    numbers = op.params["dimension_numbers"]
    lhs, rhs, out = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    sizes: dict[int, int] = {}
    labels: list[list[tuple[int, ...]]] = []
    for aval in (*ins, *outs):
        labels.append([])
        for n in aval.shape:
            sizes[len(sizes)] = n
            labels[-1].append((len(sizes) - 1,))
    free = set()
    reduced: dict[int, Reduction] = {}
    if op.params["batch_group_count"] == 1:
        labels[2][out[0]] = labels[0][lhs[0]]
        free |= set(labels[0][lhs[0]])
        if op.params["feature_group_count"] == 1:
            labels[2][out[1]] = labels[1][rhs[0]]
            labels[1][rhs[1]] = labels[0][lhs[1]]
            free |= {*labels[1][rhs[0]], *labels[0][lhs[1]]}
            reduced = dict.fromkeys(labels[0][lhs[1]], "sum")
    a, b, c = (tuple(x) for x in labels)
    windows = []
    for i, j, k in zip(lhs[2:], rhs[2:], out[2:], strict=True):
        # Where the window is the longer, as in a kernel's gradient, it moves with the operand.
        other = c[k] if ins[1].shape[j] <= outs[0].shape[k] else b[j]
        windows.append((a[i][0], other[0]))
    return Factors((a, b), (c,), sizes, reduced, frozenset(sizes) - free, tuple(windows))


def _batched(core_dims: int) -> FactorsFn:
    """All but the last `core_dims` dims of the first operand pass, first dims of all others too."""

    def factors(op: Op, ins: list[Aval], outs: list[Aval]) -> Factors:
        batch = ins[0].shape[: len(ins[0].shape) - core_dims]
        sizes = dict(enumerate(batch))
        blocked: set[int] = set()

        def label(aval: Aval) -> DimFactors:
            own = same_free(Aval(aval.shape[len(batch) :], aval.dtype), sizes)
            blocked.update(f for (f,) in own)
            return same_dims(len(batch)) + own

        a, b = tuple(label(x) for x in ins), tuple(label(x) for x in outs)
        return Factors(a, b, sizes, {}, frozenset(blocked))

    return factors


def _solve(core_dims: int) -> FactorsFn:
    """As `_batched`; right-hand sides, in the last operand, are solved for one by one."""

    def factors(op: Op, ins: list[Aval], outs: list[Aval]) -> Factors:
        found = _batched(core_dims)(op, ins, outs)
        free = -1 if op.params.get("left_side", True) else -2
        out = list(found.outs[0])
        out[free] = found.ins[-1][free]
        blocked = found.blocked - set(out[free])
        return found._replace(outs=(tuple(out),), blocked=blocked)

    return factors


def _unsplit(op: Op, ins: list[Aval], outs: list[Aval]) -> Factors:
    """Needs everything whole."""
    sizes: dict[int, int] = {}
    a, b = tuple(same_free(x, sizes) for x in ins), tuple(same_free(x, sizes) for x in outs)
    return Factors(a, b, sizes, {}, frozenset(sizes))


def _fft_factors(op: Op, ins: list[Aval], outs: list[Aval]) -> Factors:
    return _batched(len(op.params["fft_lengths"]))(op, ins, outs)


register(
    "dot_general",
    OpRule("linalg", _dot_factors, merged_dims=False, linear=_dot_linear, matrix=True),
)
register("conv_general_dilated", OpRule("linalg", _conv_factors, merged_dims=False, matrix=True))
register(
    """cholesky cholesky_update eig eigh geqp3 geqrf hessenberg householder_product lu ormqr qr
    schur svd symmetric_product tridiagonal""",
    OpRule("linalg", _batched(2), merged_dims=False, matrix=True),
)
register("triangular_solve", OpRule("linalg", _solve(2), merged_dims=False, matrix=True))
register("tridiagonal_solve", OpRule("linalg", _solve(1), merged_dims=False, matrix=True))
register("lu_pivots_to_permutation", OpRule("linalg", _batched(1), merged_dims=False))
register(
    "custom_linear_solve ragged_dot_general",
    OpRule("linalg", _unsplit, merged_dims=False, matrix=True),
)
register("fft", OpRule("linalg", _fft_factors, merged_dims=False))
