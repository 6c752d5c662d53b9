"""The laws of `tests/laws.py` over every rule: a table of operations, and families at random."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import hypothesis
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax import lax
from jax.extend import core as extend_core
from jax.extend.core import primitives

from tests import laws
from tests.laws import LawBroken, applications, check_linear, check_rule, numbers
from tests.rule_cases import CASES, F32, Case, below, flags
from wusharding.analysis.decide import Value, decide
from wusharding.analysis.placement import Placement, Span
from wusharding.analysis.propagate import Propagation
from wusharding.analysis.rules import RULES, Factors, OpRule
from wusharding.analysis.rules.base import register
from wusharding.analysis.schedule import Communicate, Compute
from wusharding.jaxprs import trace
from wusharding.transforms.wide import neutral

# ---------------------------------------------------------------------------------- what is refused

# Splits that the rules refuse although they would work, each with the reason why that is well.
REFUSED_WELL = {
    "conv_general_dilated": "input features of grouped batches: in an update as good as never",
    "ormqr": "part of a factorisation, which its owner does as a whole",
    "scatter-max": "split updates meet the whole operand on each shard: of no use for sums",
    "scatter-min": "as scatter-max",
    "symmetric_product": "adds up over columns only where beta is 0",
}
# What is made whole by design, and not tried on pieces.
WHOLE_BY_DESIGN = {
    "custom_linear_solve": "its functions are traced for whole shapes",
    "ragged_dot_general": "groups of rows may have any size: no optimizer of optax uses it",
    "threefry2x32": "found only within `random_bits`",
    **dict.fromkeys(
        (p for p, rule in RULES.items() if rule.family == "random"),
        "one key for all elements: the noise is that of one device",
    ),
}
# Primitives that may occur in an update without a rule, and what happens to them.
NO_RULE = {
    "cond": "control flow",
    "scan": "control flow",
    "while": "control flow",
    "call": "call",
    "closed_call": "call",
    "custom_jvp_call": "call",
    "custom_lin": "call",
    "custom_vjp_call": "call",
    "jit": "call",
    "remat2": "call",
    "after_all": "token",
    "create_token": "token",
    "all_gather": "collective",
    "all_to_all": "collective",
    "axis_index": "collective",
    "pmax": "collective",
    "pmin": "collective",
    "ppermute": "collective",
    "psum": "collective",
    "ragged_all_to_all": "collective",
    "get": "mutable reference",
    "swap": "mutable reference",
    "device_put": "placement",
    "sharding_constraint": "placement",
    "empty2": "without values until it is lowered",
    "select_and_gather_add": "gradient of pooling",
    "select_and_scatter": "gradient of pooling",
}


@functools.cache
def applied(primitive: str) -> list[tuple[Case, laws.Application]]:
    """The applications of a primitive in its rows of the table."""
    found = []
    for c in CASES:
        if c.primitive == primitive:
            apps = applications(primitive, c.fun, *c.args)
            assert apps, f"{primitive} does not occur in its row with operands {c.args}"
            found += [(c, app) for app in apps]
    return found


def test_every_rule_has_a_row_and_every_row_a_rule():
    assert {c.primitive for c in CASES} == set(RULES)


def test_primitives_without_a_rule_are_reviewed():
    public = {p for p in vars(primitives).values() if isinstance(p, extend_core.Primitive)}
    assert {p.name for p in public} - set(RULES) == set(NO_RULE)


@pytest.mark.parametrize("primitive", sorted(RULES))
def test_split_run_join_equals_run(primitive: str):
    rule = RULES[primitive]
    tiled = rule.family != "elementwise" or primitive == "add"
    for k, (c, app) in enumerate(applied(primitive)):
        if not c.dull:
            laws.refuse_dull_data(app.args)
        check_rule(app, rule, tolerance=c.tolerance, num_tiled=2 if tiled and k % 2 == 0 else 0)


def test_no_capability_is_missed():
    found: set[str] = set()
    for primitive, rule in RULES.items():
        if primitive in WHOLE_BY_DESIGN:
            continue
        for c, app in applied(primitive)[:6]:
            if not c.dull:
                missed = laws.missed(app, rule, c.tolerance)
                assert not missed or primitive in REFUSED_WELL, (missed, app.ins, app.op.params)
                found |= {m.primitive for m in missed}
    assert found == set(REFUSED_WELL)


def linear_operands(app: laws.Application, rule: OpRule) -> list[tuple[int, ...]]:
    """The sets of operands in which the rule calls the application linear."""
    # Sums of integers are never left in parts: they may be divided, and that is not linear.
    numeric = [i for i, a in enumerate(app.ins) if jnp.issubdtype(a.dtype, jnp.inexact)]
    return [
        partial
        for n in range(1, len(numeric) + 1)
        for partial in itertools.combinations(numeric, n)
        if rule.linear is not None and rule.linear(app.op, partial)
    ]


MAYBE_LINEAR = sorted(p for p, r in RULES.items() if r.linear is not None)


@pytest.mark.parametrize("primitive", MAYBE_LINEAR)
def test_linear_operations_commute_with_sums(primitive: str):
    checked = 0
    for c, app in applied(primitive):
        for partial in linear_operands(app, RULES[primitive]):
            check_linear(app, partial, c.tolerance)
            checked += 1
    assert checked


@pytest.mark.parametrize(("dtype", "last"), [(np.int32, Compute), (np.float32, Communicate)])
def test_sums_of_integers_are_finished_before_they_are_divided(dtype: Any, last: type):
    program, _ = trace(lambda x: lax.div(jnp.sum(x), x.dtype.type(3)), numbers((5,), dtype))
    propagation = Propagation(program, laws.replicas_of(2))
    schedule, _ = decide(propagation, [Value(Placement(((),), Span(0, 1, 3)))], [None])
    assert isinstance(schedule.steps[-1], last)


WHOLE: dict[str, Callable[[Any, int], Any]] = {
    "sort": lambda x, d: lax.sort(x, dimension=d),
    "cumsum": lax.cumsum,
    "cumprod": lax.cumprod,
    "cummax": lax.cummax,
    "cumlogsumexp": lax.cumlogsumexp,
    "argmax": lambda x, d: lax.argmax(x, d, np.int32),
    "argmin": lambda x, d: lax.argmin(x, d, np.int32),
    "top_k": lambda x, d: lax.top_k(x, 2, axis=d),
    "rev": lambda x, d: lax.rev(x, (d,)),
    "reduce": lambda x, d: lax.reduce(x, F32(0), lambda a, b: a - b, (d,)),
}


@pytest.mark.parametrize("primitive", WHOLE)
@pytest.mark.parametrize("dim", range(3))
def test_what_needs_a_dim_whole_blocks_that_dim_only(primitive: str, dim: int):
    (app,) = applications(primitive, lambda x: WHOLE[primitive](x, dim), numbers((2, 5, 3)))
    rule, replicas = RULES[primitive], laws.replicas_of(2)
    for (value, lo, hi), _, fit in laws.splits(app, rule, app.factors(rule), {}, replicas):
        if value == 0:
            assert (fit is None) == (lo <= dim < hi)


@pytest.mark.parametrize("primitive", sorted(RULES))
def test_decide_makes_the_step_that_the_law_runs(primitive: str):
    rule, replicas = RULES[primitive], laws.replicas_of(3)
    for _, app in applied(primitive)[:4]:
        factors = app.factors(rule)
        for _, _, fit in laws.splits(app, rule, factors, {}, replicas):
            if fit is None or not any(p.span for p in fit.ins):
                continue
            nothing: list[Placement | None] = [None] * len(app.outs)
            propagation = Propagation(app.alone(), replicas)
            propagation.hints.update(zip(app.alone().outputs, fit.outs, strict=True))
            schedule, _ = decide(propagation, list(map(Value, fit.ins)), nothing)
            wanted = laws.step_of(app, rule, fit, replicas)
            steps = [s for s in schedule.steps if isinstance(s, Compute) and s.ins == wanted.ins]
            assert steps or rule.matrix
            for step in steps:
                assert step.masks == wanted.masks
                assert step.view in (None, wanted.view)


# -------------------------------------------------------------------------------- negative controls


def whole_app(primitive: str, fun: Callable[..., Any], *args: Any) -> laws.Application:
    (app,) = applications(primitive, fun, *args)
    return app


def relabelled(rule: OpRule, change: Callable[[Factors], Factors]) -> OpRule:
    return dataclasses.replace(rule, factors=lambda *a: change(rule.factors(*a)))


SUM = functools.partial(lax.reduce_sum, axes=(0,))


def test_finds_a_reduction_labelled_as_passing():
    app = whole_app("reduce_sum", SUM, numbers((3, 3)))
    wrong = relabelled(
        RULES["reduce_sum"], lambda f: f._replace(outs=(((0,),),), reduced={1: "sum"})
    )
    with pytest.raises(LawBroken, match="reduce_sum"):
        check_rule(app, wrong)


def test_finds_another_reduction():
    app = whole_app("reduce_max", functools.partial(lax.reduce_max, axes=(0,)), numbers((5, 3)))
    wrong = relabelled(RULES["reduce_max"], lambda f: f._replace(reduced={0: "sum"}))
    with pytest.raises(LawBroken, match="is not the whole's"):
        check_rule(app, wrong)


def test_finds_a_wrong_permutation():
    app = whole_app("transpose", lambda x: lax.transpose(x, (1, 2, 0)), numbers((3, 3, 3)))
    wrong = relabelled(RULES["transpose"], lambda f: f._replace(outs=(((2,), (0,), (1,)),)))
    with pytest.raises(LawBroken, match="is not the whole's"):
        check_rule(app, wrong)


def test_finds_a_dim_that_should_be_blocked():
    app = whole_app("cumsum", lax.cumsum, numbers((5, 3)))
    wrong = relabelled(RULES["cumsum"], lambda f: f._replace(blocked=frozenset()))
    with pytest.raises(LawBroken, match="is not the whole's"):
        check_rule(app, wrong)


def test_finds_padding_that_is_read(monkeypatch: pytest.MonkeyPatch):
    app = whole_app("reduce_sum", SUM, numbers((5, 3)))
    made = laws.step_of
    monkeypatch.setattr(laws, "step_of", lambda *a: dataclasses.replace(made(*a), masks=()))
    check_rule(app, RULES["reduce_sum"], (5,))  # nothing is padded
    with pytest.raises(LawBroken, match="nan"):
        check_rule(app, RULES["reduce_sum"], (3,))


def test_finds_parameters_that_are_not_localized():
    app = whole_app("slice", lambda x: x[:, 1:], numbers((5, 3)))
    wrong = dataclasses.replace(RULES["slice"], localize=lambda op, view: op.params)
    with pytest.raises(LawBroken, match="the pieces do not run"):
        check_rule(app, wrong)


def test_finds_labels_that_do_not_fit_the_shape():
    app = whole_app("neg", lax.neg, numbers((5, 3)))
    wrong = relabelled(RULES["neg"], lambda f: f._replace(outs=(((1,), (0,)),)))
    with pytest.raises(LawBroken, match="factors of 3 label a dim of 5"):
        check_rule(app, wrong)


def test_finds_a_split_of_other_elements():
    """Dims without factors, which a split passes over, must have length 1."""
    app = whole_app("reshape", lambda x: x.reshape(3, 4, 5), numbers((2, 6, 5)))

    def factors(op: Any, ins: Any, outs: Any) -> Factors:
        sizes = {0: 12, 1: 5}
        return Factors((((0,), (), (1,)),), (((0,), (), (1,)),), sizes, {}, frozenset({0}))

    wrong = dataclasses.replace(RULES["reshape"], factors=factors)
    with pytest.raises(LawBroken, match="which are other elements"):
        check_rule(app, wrong)


def test_finds_a_missed_reduction():
    app = whole_app("dot_general", jnp.dot, numbers((5, 3)), numbers((3, 7)))
    rule = RULES["dot_general"]
    assert not laws.missed(app, rule)
    timid = relabelled(rule, lambda f: f._replace(reduced={}, blocked=frozenset(f.reduced)))
    assert laws.missed(app, timid) == {laws.Missed("dot_general", 0, 1, "sum")}


def test_finds_a_missed_dim():
    app = whole_app("mul", lax.mul, numbers((5, 3)), numbers((5, 3), high=5))
    timid = relabelled(RULES["mul"], lambda f: f._replace(blocked=frozenset({1})))
    assert laws.missed(app, timid) == {laws.Missed("mul", 0, 1, "pass")}


def test_finds_what_is_not_linear():
    app = whole_app("abs", lax.abs, numbers((5, 3)))
    with pytest.raises(LawBroken, match="abs is not linear"):
        check_linear(app, (0,))
    app = whole_app("mul", lax.mul, numbers((5, 3)), numbers((5, 3), high=5))
    check_linear(app, (1,))
    with pytest.raises(LawBroken, match="mul is not linear"):
        check_linear(app, (0, 1))


def test_refuses_dull_data():
    with pytest.raises(ValueError, match="operand 1 is all zero"):
        laws.refuse_dull_data([numbers((5, 3)), np.zeros((5, 3))])
    with pytest.raises(ValueError, match="operand 0 is constant"):
        laws.refuse_dull_data([np.ones((5, 3))])


def test_two_rules_for_one_primitive_are_refused():
    with pytest.raises(ValueError, match="'neg' has a rule already"):
        register("neg", RULES["neg"])


# ---------------------------------------------------------------------------------------- at random

examples = hypothesis.settings(max_examples=10, derandomize=True, deadline=None)
lengths = st.sampled_from((1, 2, 3, 5, 7))
shapes = st.lists(lengths, min_size=1, max_size=4).map(tuple).filter(lambda s: math.prod(s) <= 300)
counts = st.sampled_from(laws.NUM_SHARDS)


def check(primitive: str, n: int, fun: Callable[..., Any], *args: Any) -> None:
    for app in applications(primitive, fun, *args):
        check_rule(app, RULES[primitive], (n,))


@examples
@hypothesis.given(shapes, counts, st.data())
def test_elementwise_at_random(shape: tuple[int, ...], n: int, data: st.DataObject):
    stretched = tuple(data.draw(st.sampled_from((m, 1))) for m in shape)
    check("sub", n, lax.sub, numbers(shape), numbers(stretched, low=-3))
    check("select_n", n, lax.select_n, flags(shape), numbers(shape), numbers(shape, low=-3))


@examples
@hypothesis.given(shapes, counts, st.data())
def test_reductions_at_random(shape: tuple[int, ...], n: int, data: st.DataObject):
    axes = tuple(sorted(data.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))))
    name = data.draw(st.sampled_from(("reduce_sum", "reduce_max", "reduce_min")))
    check(name, n, lambda x: getattr(lax, name)(x, axes), numbers(shape))


@examples
@hypothesis.given(shapes, counts, st.data())
def test_broadcast_at_random(shape: tuple[int, ...], n: int, data: st.DataObject):
    kept = sorted(data.draw(st.sets(st.integers(0, len(shape) - 1))))
    operand = tuple(data.draw(st.sampled_from((shape[d], 1))) for d in kept)
    params = {"shape": shape, "broadcast_dimensions": tuple(kept)}
    check(
        "broadcast_in_dim", n, functools.partial(lax.broadcast_in_dim, **params), numbers(operand)
    )


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two shapes of the same size, from factors of it put together at random."""
    factors = draw(st.lists(st.sampled_from((2, 3, 5)), min_size=1, max_size=4))
    both = []
    for _ in range(2):
        order = draw(st.permutations(factors)) if draw(st.booleans()) else factors
        shape = [1]
        for f in order:
            if draw(st.booleans()):
                shape.append(f)
            else:
                shape[-1] *= f
        both.append(tuple(shape))
    return both[0], both[1]


@examples
@hypothesis.given(reshapes(), counts)
def test_reshape_at_random(pair: tuple[tuple[int, ...], tuple[int, ...]], n: int):
    check("reshape", n, lambda x: lax.reshape(x, pair[1]), numbers(pair[0]))


@examples
@hypothesis.given(shapes, counts, st.data())
def test_transpose_at_random(shape: tuple[int, ...], n: int, data: st.DataObject):
    order = tuple(data.draw(st.permutations(range(len(shape)))))
    check("transpose", n, lambda x: lax.transpose(x, order), numbers(shape))


@examples
@hypothesis.given(shapes, counts, st.data())
def test_slice_at_random(shape: tuple[int, ...], n: int, data: st.DataObject):
    start = [data.draw(st.integers(0, m - 1)) if data.draw(st.booleans()) else 0 for m in shape]
    limit = [
        data.draw(st.integers(a + 1, m)) if data.draw(st.booleans()) else m
        for a, m in zip(start, shape, strict=True)
    ]
    strides = [data.draw(st.sampled_from((1, 1, 2))) for _ in shape]
    check("slice", n, lambda x: lax.slice(x, start, limit, strides), numbers(shape))


@examples
@hypothesis.given(shapes, counts, st.data())
def test_pad_at_random(shape: tuple[int, ...], n: int, data: st.DataObject):
    edges = st.sampled_from(((0, 0, 0), (0, 0, 0), (1, 0, 0), (0, 2, 1), (1, -1, 0), (0, 0, 1)))
    config = [data.draw(edges) for _ in shape]
    check("pad", n, lambda x: lax.pad(x, F32(8), config), numbers(shape))


@examples
@hypothesis.given(shapes, counts, st.data())
def test_concatenate_at_random(shape: tuple[int, ...], n: int, data: st.DataObject):
    dim = data.draw(st.integers(0, len(shape) - 1))
    other = shape[:dim] + (data.draw(lengths),) + shape[dim + 1 :]
    args = numbers(shape), numbers(other, low=-3)
    check("concatenate", n, lambda *xs: lax.concatenate(xs, dim), *args)
    check("stack", n, lambda *xs: jnp.stack(xs, dim), args[0], args[0] + 20)


@examples
@hypothesis.given(st.permutations((2, 3, 5, 6)), counts, st.data())
def test_dot_general_at_random(sizes: list[int], n: int, data: st.DataObject):
    """Dims of both operands are letters: `b` batch, `c` contracted, `m` and `n` free."""
    letters = dict(zip("bcmn", sizes, strict=True))
    lhs = data.draw(st.permutations("bcm"))
    rhs = data.draw(st.permutations("bcn"))
    dims = ((lhs.index("c"),), (rhs.index("c"),)), ((lhs.index("b"),), (rhs.index("b"),))
    a, b = (numbers(tuple(letters[x] for x in side)) for side in (lhs, rhs))
    check("dot_general", n, lambda x, y: lax.dot_general(x, y, dims), a, b)


@examples
@hypothesis.given(shapes, counts, st.data())
def test_gather_and_scatter_at_random(shape: tuple[int, ...], n: int, data: st.DataObject):
    dim = data.draw(st.integers(0, len(shape) - 1))
    index = below(shape[dim] + 1, data.draw(st.sampled_from(((4,), (2, 3), (4, 1), ()))))
    at = (slice(None),) * dim
    mode = data.draw(st.sampled_from(("fill", "clip")))
    check("gather", n, lambda x, i: x.at[(*at, i)].get(mode=mode), numbers(shape), index)
    update = numbers(shape[:dim] + index.shape + shape[dim + 1 :], low=-3)
    add = lambda x, i, u: x.at[(*at, i)].add(u, mode=mode)  # noqa: E731
    check("scatter-add", n, add, numbers(shape), index, update)


@examples
@hypothesis.given(shapes, counts, st.data())
def test_take_along_axis_at_random(shape: tuple[int, ...], n: int, data: st.DataObject):
    dim = data.draw(st.integers(0, len(shape) - 1))
    index = below(shape[dim], shape[:dim] + (4,) + shape[dim + 1 :])
    check("gather", n, lambda x, i: jnp.take_along_axis(x, i, dim), numbers(shape), index)


@examples
@hypothesis.given(shapes, counts, st.data())
def test_dynamic_slices_at_random(shape: tuple[int, ...], n: int, data: st.DataObject):
    part = tuple(data.draw(st.sampled_from((m, max(m - 2, 1)))) for m in shape)
    start = tuple(np.int32(data.draw(st.integers(0, m))) for m in shape)
    check("dynamic_slice", n, lambda x, *s: lax.dynamic_slice(x, s, part), numbers(shape), *start)
    check(
        "dynamic_update_slice",
        n,
        lambda x, y, *s: lax.dynamic_update_slice(x, y, s),
        numbers(shape),
        numbers(part, low=-3),
        *start,
    )


@examples
@hypothesis.given(shapes, counts, st.data())
def test_cumulative_and_sort_at_random(shape: tuple[int, ...], n: int, data: st.DataObject):
    dim = data.draw(st.integers(0, len(shape) - 1))
    check("cumsum", n, lambda x: lax.cumsum(x, dim), numbers(shape))
    check("sort", n, lambda x: lax.sort(x, dimension=dim), numbers(shape))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8"])
def test_what_fills_padding_changes_no_extreme(dtype: str):
    x = jnp.asarray([-3, 1, 2]).astype(dtype)
    for reduction, reduce in (("max", jnp.max), ("min", jnp.min)):
        padded = jnp.append(x, neutral(reduction, x.dtype))
        assert float(reduce(padded.astype(jnp.float32))) == float(reduce(x.astype(jnp.float32)))
