"""From a few annotations to all: by hand-checked programs, by numbers, by HLO, and by XLA's own."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import wusharding as wus
from large_scale.hlo import collectives
from large_scale.sharding import complete
from tests.large_scale import megatron, test_spatial
from tests.large_scale.training import along
from tests.runs import entries, groups_of, mesh_of, of_kind, relative_error

Tree = Any
OPEN = P.UNCONSTRAINED
MESH = {"data": 4, "model": 2}


def arrays(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def mesh() -> Any:
    return mesh_of(MESH, auto=True)


def split(plan: Any, op: str) -> list[P]:
    """The specs of what operations of this name made."""
    return [v.spec for v in plan.values() if v.op == op]


# --------------------------------------------------------------------------- small programs


def mlp(x: jax.Array, w: jax.Array, b: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w + b) @ v


MLP = arrays((8, 6), (6, 10), (10,), (10, 6))


def test_two_annotations_split_everything():
    plan = complete(mlp, *MLP, mesh=mesh(), specs=(P("data"), P(None, "model"), None, None))
    assert plan.in_specs == (P("data"), P(None, "model"), P("model"), P("model"))
    assert plan.out_specs == P("data")
    assert split(plan, "dot_general") == [P("data", "model"), P("data")]
    assert split(plan, "tanh") == [P("data", "model")]
    assert [(n.kind, n.axes, n.nbytes) for n in plan.needs] == [
        ("all-reduce", ("model",), 8 * 6 * 4)
    ]
    assert plan.conflicts == ()


def test_propagation_runs_backward_from_a_result():
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return checkpoint_name(jnp.exp(x @ w).T, "out")

    plan = complete(f, *arrays((8, 6), (6, 10)), mesh=mesh(), names={"out": P("model", "data")})
    assert plan.in_specs == (P("data"), P(None, "model"))


def test_an_axis_that_splits_nothing_leaves_copies():
    """Partial tiling: tiled over `data`, the same on both devices of `model`."""
    plan = complete(mlp, *MLP, mesh=mesh(), specs=(P("data"), None, None, None))
    found = jax.jit(plan.apply())(*MLP)
    assert plan.in_specs == (P("data"), P(), P(), P())
    assert found.sharding.is_equivalent_to(NamedSharding(mesh(), P("data")), 2)
    shards = {s.device.id: s.index for s in found.addressable_shards}
    assert all(shards[2 * i] == shards[2 * i + 1] for i in range(4))
    assert len({str(index) for index in shards.values()}) == 4


def test_constraints_within_the_function_are_annotations():
    where = NamedSharding(mesh(), P("data", OPEN))

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.with_sharding_constraint(x @ w, where) * 2

    plan = complete(f, *arrays((8, 6), (6, 10)), mesh=mesh(), specs=(None, P(None, "model")))
    assert plan.in_specs == (P("data"), P(None, "model"))
    assert plan.out_specs == P("data", "model")
    closed = complete(
        lambda x, w: lax.with_sharding_constraint(x @ w, NamedSharding(mesh(), P("data"))) * 2,
        *arrays((8, 6), (6, 10)),
        mesh=mesh(),
        specs=(None, P(None, "model")),
    )
    assert closed.out_specs == P("data")


def test_elementwise_goes_before_products_and_broadcasts_come_last():
    """The sum's dim is split as what is added is, before the product has its say."""

    def f(x: jax.Array, w: jax.Array, y: jax.Array) -> jax.Array:
        return (x @ w) + y

    x, w, y = arrays((8, 6), (6, 8), (8, 8))
    plan = complete(f, x, w, y, mesh=mesh(), specs=(P("model"), P(), P("data")))
    assert plan.out_specs == P("data")
    found = {(c.op, c.wanted, c.kept, c.why) for c in plan.conflicts}
    assert found == {("dot_general", ("data",), ("model",), "it is split over model by args[0]")}


def test_conflicts_are_resolved_and_reported():
    def f(x: jax.Array, y: jax.Array) -> jax.Array:
        return x + y

    x, y = arrays((8, 8), (8, 8))
    plan = complete(f, x, y, mesh=mesh(), specs=(P("model"), P("data")))
    assert plan.out_specs == P("data")  # the finer of both
    (conflict,) = plan.conflicts
    assert (conflict.wanted, conflict.kept, conflict.dim) == (("data",), ("model",), 0)
    assert conflict.why == "it is split over model by args[0]"
    assert "test_completion.py" in conflict.source
    assert [(n.kind, n.axes) for n in plan.needs] == [("gather", ("model",))]
    assert relative_error(jax.jit(plan.apply())(x, y), x + y) == 0


def test_one_axis_cannot_split_two_dims():
    plan = complete(
        lambda x, w: x @ w, *arrays((8, 6), (6, 8)), mesh=mesh(), specs=(P("data"), P(None, "data"))
    )
    assert plan.out_specs == P("data")
    assert {c.why for c in plan.conflicts} == {"data splits dim 0 already"}
    assert [(n.kind, n.axes) for n in plan.needs] == [("gather", ("data",))]


# ----------------------------------------------------------------------------- uneven dims


@pytest.mark.parametrize("length", [10, 17])
def test_uneven_dims_are_split_within_the_program(length):
    """10 rows over 8 devices: the compiler gives two to each, and the last devices have none."""
    line = mesh_of({"data": 8}, auto=True)
    (x,) = arrays((length, 6))

    def f(x: jax.Array) -> jax.Array:
        rows = checkpoint_name(jnp.tanh(x) * 2, "rows")
        return jnp.sum(jnp.exp(rows) * rows, axis=0)

    plan = complete(f, x, mesh=line, names={"rows": P("data")})
    assert plan.in_specs == (P(),)
    assert split(plan, "exp") == [P("data")]
    compiled = jax.jit(plan.apply()).lower(x).compile()
    assert relative_error(compiled(x), f(x)) <= 1e-6
    assert f"f32[{-(-length // 8)},6]" in compiled.as_text()
    assert of_kind(collectives(compiled.as_text()), "all-reduce")
    whole = complete(f, x, mesh=line, specs=(P(),), uneven=False)
    assert split(whole, "exp") == [P()]


# ------------------------------------------------------------------------ loops and branches


def test_splits_go_round_loops_and_through_branches():
    def f(x: jax.Array, ws: jax.Array, flag: jax.Array) -> jax.Array:
        def turn(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
            return jnp.tanh(x @ w), jnp.sum(x, 0)

        x, sums = lax.scan(turn, x, ws)
        x = lax.while_loop(lambda x: jnp.sum(x) > 100, lambda x: x / 2, x)
        return lax.cond(flag, lambda x: x + 1, lambda x: x * 2, x), sums

    x, ws = arrays((8, 6), (3, 6, 6))
    plan = complete(f, x, ws, True, mesh=mesh(), specs=(P("data", "model"), None, None))
    assert plan.out_specs == (P("data", "model"), P(None, "model"))
    # The carry is split alike at every turn, so the weights' contracted dim is too.
    assert plan.in_specs[1] in (P(None, "model"), P(None, None, "model"))
    assert split(plan, "tanh") == [P("data", "model")]
    found = jax.jit(plan.apply())(x, ws, True)
    assert relative_error(found, jax.jit(f)(x, ws, True)) <= 1e-6


def test_reshapes_keep_what_is_split_along_the_major_part():
    def f(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(8, 6, 4, 5), 2, 1).reshape(8, 4, 30)

    plan = complete(f, *arrays((8, 6, 20)), mesh=mesh(), specs=(P("data", None, "model"),))
    assert plan.out_specs == P("data", "model")


# ------------------------------------------------------------------------- known layouts


@functools.cache
def transformer(layers: int) -> tuple[Any, Tree, np.ndarray]:
    """Two weights of a Transformer annotated, and the batch."""
    params = megatron.init(megatron.Config(layers=layers))
    hints = jax.tree.map(lambda _: None, params)
    hints["layers"]["qkv"] = P(None, None, None, "model")
    hints["layers"]["up"] = P(None, None, "model")
    tokens = megatron.batches(megatron.Config(), 1, 8)[0]
    plan = complete(jax.grad(megatron.loss), params, tokens, mesh=mesh(), specs=(hints, P("data")))
    return plan, params, tokens


def test_two_weights_of_a_transformer_make_it_megatrons():
    plan, _, _ = transformer(3)
    wanted = jax.tree.map(lambda spec: P(*entries(spec)), megatron.specs())
    assert plan.in_specs == (wanted, P("data"))
    assert plan.out_specs == wanted
    sums = [n for n in plan.needs if n.axes == ("model",)]
    assert {n.kind for n in sums} == {"all-reduce"}
    assert len(sums) == 4 * 3
    assert plan.conflicts == ()


def test_applied_the_compiler_does_what_was_planned():
    plan, params, tokens = transformer(1)
    shardings = jax.tree.map(lambda s: NamedSharding(mesh(), s), plan.in_specs)
    step = jax.jit(plan.apply(), in_shardings=shardings).lower(params, tokens).compile()
    placed = jax.device_put((params, tokens), shardings)
    wanted = jax.jit(jax.grad(megatron.loss))(params, tokens)
    assert relative_error(step(*placed), wanted) <= 1e-5
    found = collectives(step.as_text())
    assert {c.kind for c in found} == {"all-reduce"}
    sums = [c for c in found if groups_of(c) == along(mesh(), "model")]
    planned = [n for n in plan.needs if n.axes == ("model",)]
    replicas = MESH["data"]  # each sums its own part of the batch
    assert sum(c.operand_bytes for c in sums) == sum(n.nbytes for n in planned) // replicas


def test_convolutions_split_in_space():
    """Only the image is annotated; halos are exchanged, nothing is gathered."""
    space = mesh_of(test_spatial.MESH, auto=True)
    params, batch = test_spatial.weights(), test_spatial.batches()[0]
    plan = complete(
        jax.grad(test_spatial.loss),
        params,
        batch,
        mesh=space,
        specs=(None, {"image": P("data", "space"), "label": None}),
    )
    assert plan.in_specs[1]["label"] == P("data", "space")
    assert all(spec == P() for spec in plan.in_specs[0].values())
    assert all(s == P("data", "space") for s in split(plan, "tanh"))
    kinds = {n.kind for n in plan.needs}
    assert kinds == {"all-reduce", "halo"}
    shardings = jax.tree.map(lambda s: NamedSharding(space, s), plan.in_specs)
    step = jax.jit(plan.apply(), in_shardings=shardings).lower(params, batch).compile()
    found = collectives(step.as_text())
    assert of_kind(found, "collective-permute") and not of_kind(found, "all-gather")
    wanted = jax.jit(jax.grad(test_spatial.loss))(params, batch)
    assert relative_error(step(*jax.device_put((params, batch), shardings)), wanted) <= 1e-5


# ---------------------------------------------------------------------- beside XLA's partitioner


def attention(x: jax.Array, w: jax.Array, o: jax.Array) -> jax.Array:
    q, k, v = jnp.einsum("bse,ethd->tbhsd", x, w)
    odds = jax.nn.softmax(jnp.einsum("bhsd,bhtd->bhst", q, k), -1)
    return jnp.einsum("bhst,bhtd,hde->bse", odds, v, o)


def experts(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.einsum("etf,efw->etw", jax.nn.relu(jnp.einsum("etw,ewf->etf", x, w)), v)


def conv(x: jax.Array, k: jax.Array) -> jax.Array:
    return jax.nn.relu(test_spatial.conv(x, k)).mean(2)


def normed(x: jax.Array, w: jax.Array, scale: jax.Array) -> jax.Array:
    x = x - x.mean(-1, keepdims=True)
    return (x * lax.rsqrt((x * x).mean(-1, keepdims=True)) * scale) @ w


PROGRAMS: dict[str, tuple[Callable[..., Any], list[np.ndarray], tuple[Any, ...]]] = {
    "mlp": (mlp, MLP, (P("data"), P(None, "model"), None, None)),
    "gradient of an mlp": (
        jax.grad(lambda *a: jnp.sum(mlp(*a) ** 2), (1, 2, 3)),
        MLP,
        (P("data"), P(None, "model"), None, None),
    ),
    "attention": (
        attention,
        arrays((8, 5, 6), (6, 3, 4, 7), (4, 7, 6)),
        (P("data"), P(None, None, "model"), None),
    ),
    "experts": (experts, arrays((4, 6, 5), (4, 5, 7), (4, 7, 5)), (None, P("data"), None)),
    "convolution in space": (
        conv,
        arrays((8, 12, 10, 3), (3, 3, 3, 6)),
        (P("data", "model"), None),
    ),
    "norms": (normed, arrays((8, 5, 6), (6, 10), (6,)), (P("data"), P(None, "model"), None)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_xlas_partitioner_chooses_the_same(name):
    fun, args, specs = PROGRAMS[name]
    plan = complete(fun, *args, mesh=mesh(), specs=specs)
    # What is made from constants costs nothing anywhere, and XLA leaves it whole.
    differences = [d for d in plan.compare() if d.value.op != "broadcast_in_dim"]
    assert differences == []


def test_without_annotations_there_is_nothing_to_compare():
    plan = complete(mlp, *MLP, mesh=mesh())
    assert plan.compare() == []
    assert {v.spec for v in plan.values()} == {P()}


def test_the_comparison_sees_a_difference():
    """Negative control."""
    fun, args, specs = PROGRAMS["mlp"]
    plan = complete(fun, *args, mesh=mesh(), specs=specs)
    tanh = next(op for op in plan.graph.program.ops if op.name == "tanh")
    plan.graph.known[tanh.outs[0]][1] = None
    (found,) = plan.compare()
    assert found.value.op == "tanh"
    assert found.compiler == P("data", "model")


# ------------------------------------------------------------------------------- what is said


def test_the_report_names_lines_roots_costs_and_conflicts():
    plan = complete(mlp, *MLP, mesh=mesh(), specs=(P("model"), P(None, "model"), None, None))
    text = str(plan)
    assert text.startswith("mesh data=4, model=2: ")
    assert re.search(r"test_completion.py:\d+\S* +tanh +\[8,10\] +\('model',\)  +args\[0\]", text)
    assert re.search(r"input +args\[1\] +\[6,10\] +\(None, 'model'\) +args\[1\]", text)
    assert "communication:" in text and "not split so:" in text
    for conflict in plan.conflicts:
        assert conflict.why in text


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no such axis": ({"specs": (P("pipe"), None, None, None)}, "args[0]: the mesh has no axis"),
    "an axis twice": (
        {"specs": (P("data", "data"), None, None, None)},
        "args[0]: P('data', 'data') names axis ['data'] for two dims",
    ),
    "an uneven argument": (
        {"specs": (None, P("data"), None, None)},
        "args[1]: P('data',) cannot split dim 0 of [6, 10]: 6 is not divisible by 4. Pad the dim",
    ),
    "more entries than dims": (
        {"specs": (None, None, P(None, "data"), None)},
        "args[2]: P(None, 'data') has more entries than the array has dims, [10]",
    ),
    "a sharding": (
        {"specs": (NamedSharding(mesh(), P()), None, None, None)},
        "specs: args[0]: found a NamedSharding, need a PartitionSpec or None",
    ),
    "a name that nothing has": (
        {"names": {"hiden": P("data")}},
        "names: ['hiden']: the function names no array so",
    ),
    "another tree": ({"specs": (P(), P())}, "specs: their tree does not fit the arguments'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_annotations_that_do_not_fit_are_named(case):
    options, message = WRONG[case]
    with pytest.raises(ValueError, match=re.escape(message)):
        complete(mlp, *MLP, mesh=mesh(), **options)


def test_arguments_of_other_shapes_are_refused():
    """The number of examples is in the program: half of them would have half of their mean."""
    x = jnp.arange(8.0)
    plan = complete(jnp.mean, x, mesh=mesh(), specs=(P("data"),))
    mean = jax.jit(plan.apply())
    assert mean(x) == mean(np.arange(8.0)) == 3.5
    for other in (x[:4], x.astype(jnp.int32)):
        with pytest.raises(ValueError, match=re.escape("completed for float32[8]")):
            mean(other)


def test_what_is_no_mesh_is_refused():
    with pytest.raises(TypeError, match=re.escape("mesh: found dict, need a jax.sharding.Mesh")):
        complete(mlp, *MLP, mesh={"data": 8})  # pyright: ignore[reportArgumentType]


def test_explicit_axes_are_refused():
    explicit = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    with pytest.raises(ValueError, match=re.escape("axes ['data'] are not Auto")):
        complete(mlp, *MLP, mesh=explicit)


@jax.custom_vjp
def ten_times_steeper(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


ten_times_steeper.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (10 * g * jnp.cos(x),))


@jax.custom_jvp
def straight_through(x: jax.Array) -> jax.Array:
    return jnp.round(x)


straight_through.defjvp(lambda x, t: (jnp.round(x[0]), t[0]))


def test_derivative_rules_survive_being_applied():
    def f(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        @jax.checkpoint
        def layer(x: jax.Array, w: jax.Array) -> jax.Array:
            return straight_through(3 * ten_times_steeper(x @ w))

        h, _ = jax.lax.scan(lambda h, _: (ten_times_steeper(h), None), layer(x, w), None, length=2)
        return jnp.sum(jax.nn.relu(h @ v) ** 2)

    args = arrays((8, 6), (6, 10), (10, 6))
    plan = complete(f, *args, mesh=mesh(), specs=(P("data"), P(None, "model"), None))
    assert plan.in_specs[2] == P("model")  # through rules, loops and what is computed again
    found, wanted = (jax.jit(jax.grad(g, (0, 1, 2)))(*args) for g in (plan.apply(), f))
    for a, b in zip(found, wanted, strict=True):
        assert np.any(b)
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())
    text = str(jax.make_jaxpr(jax.grad(plan.apply()))(*args))
    assert "remat" in text or "checkpoint" in text
    assert plan.compare() == []


def test_a_shard_map_stays_and_says_how_its_operands_lie():
    grid = mesh()

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        by_rows = jax.shard_map(
            lambda x: x + jax.lax.psum(x.sum(), "data"),
            mesh=grid,
            in_specs=P("data"),
            out_specs=P("data"),
            axis_names={"data"},
        )
        return by_rows(jnp.sin(x)) @ w

    x, w = MLP[:2]
    plan = complete(f, x, w, mesh=grid, specs=(None, P(None, "model")))
    assert plan.in_specs == (P("data"), P(None, "model"))
    assert plan.out_specs == P("data", "model")
    assert any("the shard_map at" in why for value in plan.values() for why in value.why)
    np.testing.assert_allclose(jax.jit(plan.apply())(x, w), jax.jit(f)(x, w), rtol=1e-5)
    whole = jax.shard_map(jnp.sin, mesh=grid, in_specs=P("data"), out_specs=P("data"))
    assert complete(lambda x: whole(x) + 1, x, mesh=grid).out_specs == P("data")


# -------------------------------------------------------------------------- windows, the facts


def pooled(x: jax.Array) -> jax.Array:
    return lax.reduce_window(x, -np.inf, lax.max, (1, 2, 3), (1, 2, 2), "SAME")


WINDOWS: dict[str, tuple[Callable[..., Any], tuple[int, ...], list[int]]] = {
    "convolution": (lambda x: test_spatial.conv(x, jnp.ones((5, 3, 2, 3))), (1, 12, 10, 2), [1, 2]),
    "pooling": (pooled, (2, 12, 13), [1, 2]),
    "pad": (lambda x: jnp.pad(x, ((0, 0), (1, 2))), (3, 12), [1]),
    "slice": (lambda x: x[:, 2:], (3, 12), [1]),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_what_moves_along_depends_on_neighbours_only(name):
    """A result's place along a window depends on the operand's places near the same fraction."""
    fun, shape, moving = WINDOWS[name]
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    program, _ = wus.trace(fun, x)
    found = [f for op in program.ops if (f := wus.factors_of(program, op)).windows]
    (factors,) = found
    operand, result = factors.ins[0], factors.outs[0]
    dims = [
        (operand.index((a,)), result.index((b,)))
        for a, b in factors.windows
        if (a,) in operand and (b,) in result
    ]
    assert [d for d, _ in dims] == moving
    jacobian = np.asarray(jax.jacobian(fun)(x)) != 0
    for d, e in dims:
        axes = tuple(i for i in range(jacobian.ndim) if i not in (e, d + len(result)))
        places, sources = np.nonzero(jacobian.any(axes))
        n, m = x.shape[d], jacobian.shape[e]
        assert np.max(np.abs(sources / n - places / m)) <= 0.25
