"""Random bits: made whole on every replica from the same key, then sliced: the same noise."""

from __future__ import annotations

from wusharding.analysis.rules.base import DimFactors, Factors, OpRule, register
from wusharding.jaxprs import Aval, Op


def _whole(op: Op, ins: list[Aval], outs: list[Aval]) -> Factors:
    sizes: dict[int, int] = {}

    def label(aval: Aval) -> DimFactors:
        start = len(sizes)
        sizes.update({start + d: n for d, n in enumerate(aval.shape)})
        return tuple((start + d,) for d in range(len(aval.shape)))

    a, b = tuple(label(x) for x in ins), tuple(label(x) for x in outs)
    return Factors(a, b, sizes, {}, frozenset(sizes))


register(
    """random_bits random_seed random_wrap random_unwrap random_fold_in random_split random_clone
    random_gamma threefry2x32 rng_bit_generator rng_uniform""",
    OpRule("random", _whole),
)
