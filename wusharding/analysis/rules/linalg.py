"""Contractions, convolutions and matrix factorisations: work that outgrows its operands."""

from __future__ import annotations

from wusharding.analysis.rules.base import DimFactors, Factors, OpRule, register
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
    """Batch and output features pass; grouped convolutions and windows need the whole."""
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
    if op.params["batch_group_count"] == 1:
        labels[2][out[0]] = labels[0][lhs[0]]
        free |= set(labels[0][lhs[0]])
        if op.params["feature_group_count"] == 1:
            labels[2][out[1]] = labels[1][rhs[0]]
            free |= set(labels[1][rhs[0]])
    a, b, c = (tuple(x) for x in labels)
    return Factors((a, b), (c,), sizes, {}, frozenset(sizes) - free)


def _matrix_factors(op: Op, ins: list[Aval], outs: list[Aval]) -> Factors:
    """Leading batch dims pass, the last two dims of everything are needed whole."""
    batch = ins[0].shape[:-2]
    sizes = dict(enumerate(batch))
    blocked: set[int] = set()

    def label(aval: Aval) -> DimFactors:
        out: list[tuple[int, ...]] = []
        for d, n in enumerate(aval.shape):
            if d < len(batch) and n == batch[d]:
                out.append((d,))
                continue
            fresh = len(sizes)
            sizes[fresh] = n
            blocked.add(fresh)
            out.append((fresh,))
        return tuple(out)

    a, b = tuple(label(x) for x in ins), tuple(label(x) for x in outs)
    return Factors(a, b, sizes, {}, frozenset(blocked))


register(
    "dot_general",
    OpRule("linalg", _dot_factors, merged_dims=False, linear=_dot_linear, matrix=True),
)
register("conv_general_dilated", OpRule("linalg", _conv_factors, merged_dims=False, matrix=True))
register(
    "cholesky eig eigh geqrf householder_product lu qr schur svd triangular_solve",
    OpRule("linalg", _matrix_factors, merged_dims=False, matrix=True),
)
