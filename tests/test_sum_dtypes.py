"""Gradients that are summed in a shorter dtype: along all axes, or along some of them."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import wusharding as wus
from tests.runs import batches, host, leaf, mesh_of, reference, relative_error, training

BF16 = jnp.bfloat16
GRID = {"dcn": 2, "data": 4}
PARAMS = {"w": jnp.asarray(leaf(17, 5)), "m": jnp.asarray(leaf(48, 33)), "s": jnp.ones(())}
FORMS = {
    "slices last": {"axis": ("data", "dcn")},
    "between subgroups": {"axis": ("dcn", "data"), "shard_axis": "data"},
    "lines": {"axis": ("data", "dcn"), "lines": {"data": wus.lines_of_grid((2, 2))}},
    "tiles": {"axis": ("data", "dcn"), "target": "tpu"},
    "many buckets": {"axis": ("data", "dcn"), "bucket_bytes": 512},
}


def rounded(x):
    return np.asarray(jnp.asarray(x).astype(BF16).astype(jnp.float32))


def gradients(seed=0):
    """Of 8 replicas, `[slices x places, *shape]`; bfloat16 does not hold them."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda p: rng.normal(size=(8, *p.shape)).astype(np.float32), jax.device_get(PARAMS)
    )


def over_slices_in_bf16(g, axis):
    """The mean of 8 gradients, summed in float32 within a slice and in bfloat16 between two."""
    places = g.reshape(*(GRID[a] for a in axis), *g.shape[1:])
    within = places.sum(axis.index("data"), dtype=np.float32)
    first, second = rounded(within)
    return rounded(first + second) / 8


@pytest.mark.parametrize(
    ("form", "context"),
    [
        *((form, "checked") for form in FORMS),
        ("slices last", "explicit"),
        pytest.param("slices last", "unchecked", marks=pytest.mark.slow),
        pytest.param("between subgroups", "explicit", marks=pytest.mark.slow),
    ],
)
def test_between_slices_in_bfloat16(form, context):
    options = {"shape": GRID, "scatter_dtype": {"dcn": BF16}, **FORMS[form]}
    loop = training(context, optax.sgd(1.0), PARAMS, **options)
    g = gradients()
    found = loop.run([g]).whole_params
    for name, p in PARAMS.items():
        wanted = over_slices_in_bf16(g[name], options["axis"])
        moved = host(p) - host(found[name])
        if p.size < 2:  # is not split, and summed in its own dtype
            wanted = g[name].mean(0, dtype=np.float32)
        np.testing.assert_allclose(moved, wanted, atol=2e-6, err_msg=name)
    # Exactly summed, they would be elsewhere: the shorter dtype was used.
    assert np.max(np.abs(host(PARAMS["m"]) - host(found["m"]) - g["m"].mean(0))) > 1e-4


@pytest.mark.parametrize(
    "context", ["pmap", *(pytest.param(c, marks=pytest.mark.slow) for c in ("checked", "explicit"))]
)
def test_everywhere_in_bfloat16(context):
    adam = optax.adam(0.01)
    grads = batches(PARAMS)
    loop = training(context, adam, PARAMS, scatter_dtype=BF16).run(grads)
    wanted, state = reference(adam, PARAMS, [jax.tree.map(lambda g: g.mean(0), g) for g in grads])
    assert relative_error(loop.plain_state[0].mu, state[0].mu) < 2**-7
    assert relative_error(loop.whole_params, wanted) < 2**-7


def test_master_weights_stay_float32():
    params = jax.tree.map(lambda p: p.astype(BF16), PARAMS)
    options = {"shape": GRID, "axis": ("data", "dcn"), "master_dtype": jnp.float32}
    loop = training("checked", optax.sgd(1.0), params, scatter_dtype={"dcn": BF16}, **options)
    grads = jax.tree.map(lambda g: g.astype(BF16), gradients())
    plain = training("checked", optax.sgd(1.0), params, **options)
    # Gradients of bfloat16 travel as they are: there is nothing to shorten.
    for a, b in zip(
        *(jax.tree.leaves(x.run([grads]).state.master) for x in (loop, plain)), strict=True
    ):
        assert a.dtype == jnp.float32
        np.testing.assert_array_equal(host(a), host(b))


def scatters(text):
    """Dtype and shape of what each reduce-scatter and all-reduce takes, and its axes."""
    found = re.findall(
        r":(\w+)\[([\d,]*)\]\S* = (?:reduce_scatter|psum\w*)\[(.*?)\] ", text, re.DOTALL
    )
    return [
        (dtype, re.search(r"ax(?:is_name|es)=\(([^)]*)\)", params)[1].replace("'", "").strip(","))
        for dtype, shape, params in found
        if shape not in ("", "1")
    ]


def test_each_phase_has_its_dtype_in_the_program():
    """On CPU XLA widens collectives of bfloat16, so the program is read before it compiles."""
    mesh = mesh_of(GRID, auto=True)
    tx = wus.shard_updates(
        optax.sgd(1.0), mesh=mesh, axis=("data", "dcn"), scatter_dtype={"dcn": BF16}
    )
    specs = tx.state_specs(PARAMS)
    step = jax.shard_map(
        lambda p, s, g: tx.apply(jax.tree.map(lambda x: x[0], g), s, p),
        mesh=mesh,
        in_specs=(P(), specs, P(("data", "dcn"))),
        out_specs=(P(), specs),
    )
    text = str(jax.make_jaxpr(step)(PARAMS, tx.init(PARAMS), gradients()))
    assert scatters(text) == [("f32", "data"), ("bf16", "dcn")]
    rows = {t.purpose: t.operand_bytes for t in tx.plan(PARAMS).traffic if "scatter" in t.kind}
    first, second = rows["gradients along data"], rows["gradients along dcn"]
    assert first == 4 * 2 * second
    plain = wus.shard_updates(optax.sgd(1.0), mesh=mesh, axis=("data", "dcn")).plan(PARAMS)
    assert [t.operand_bytes for t in plain.traffic if "scatter" in t.kind] == [first, 2 * second]


def test_shards_between_subgroups_count_in_their_dtype():
    options = {"mesh": mesh_of(GRID), "axis": ("dcn", "data"), "shard_axis": "data"}

    def between(**more):
        plan = wus.shard_updates(optax.sgd(1.0), **options, **more).plan(PARAMS)
        (row,) = (t for t in plan.traffic if "between subgroups" in t.purpose)
        return row.operand_bytes

    assert between() == 2 * between(scatter_dtype={"dcn": BF16}) == 2 * between(scatter_dtype=BF16)
    assert between() == between(scatter_dtype={"data": BF16})


# ------------------------------------------------------------------------------------- whole steps


def global_step(tx, params, state, x):
    grads = jax.grad(lambda p: jnp.mean(jnp.sin(x @ p["w"]) @ p["v"]))(params)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


@pytest.mark.parametrize(
    ("kind", "shard_axis"),
    [
        (AxisType.Auto, ("data", "dcn")),
        pytest.param(AxisType.Explicit, ("data", "dcn"), marks=pytest.mark.slow),
        pytest.param(AxisType.Auto, ("data",), marks=pytest.mark.slow),
        pytest.param(AxisType.Explicit, ("data",), marks=pytest.mark.slow),
    ],
)
def test_a_whole_step_sums_between_slices_in_bfloat16(kind, shard_axis):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "dcn"), axis_types=(kind,) * 2)
    tx = optax.adam(0.01)
    params = {"w": jnp.asarray(leaf(17, 40)), "v": jnp.asarray(leaf(40, 8))}
    params = jax.device_put(params, NamedSharding(mesh, P()))
    x = jnp.asarray(leaf(16, 17) * 1.37)
    x = jax.device_put(x, NamedSharding(mesh, P(("data", "dcn"))))
    step = functools.partial(global_step, tx)
    options = {"mesh": mesh, "axis": ("data", "dcn"), "shard_axis": shard_axis}
    moments = []
    for dtypes in (None, {"dcn": BF16}, BF16):
        sharded = wus.shard_step(step, scatter_dtype=dtypes, **options)
        _, state = sharded(params, tx.init(params), x)
        moments.append(sharded.unshard(state)[0].mu)
        if dtypes == {"dcn": BF16}:
            rows = [t for t in sharded.plan.traffic if "gradient" in t.purpose]
            assert 8 * sum(t.operand_bytes for t in rows[1:]) == rows[0].operand_bytes
    exact, between, everywhere = moments
    assert 0 < relative_error(between, exact) < 2**-7
    assert relative_error(between, everywhere) > 0


# ---------------------------------------------------------------------------------------- refusals


def test_where_nothing_is_summed_it_is_refused():
    for context in ("auto", "eager"):
        loop = training(context, optax.sgd(1.0), PARAMS, scatter_dtype=BF16)
        with pytest.raises(wus.ContextError, match="scatter_dtype: all gradients arrive reduced"):
            loop.run(batches(PARAMS))
    loop = training("unchecked", optax.sgd(1.0), PARAMS, scatter_dtype=BF16, reduce=None)
    with pytest.raises(wus.ContextError, match="scatter_dtype: all gradients arrive reduced"):
        loop.run(batches(PARAMS))


BAD = [
    ({"scatter_dtype": jnp.int8}, "scatter_dtype=int8: need a floating dtype"),
    ({"scatter_dtype": {"dcn": jnp.int8}}, r"scatter_dtype\['dcn'\]=int8: need a floating dtype"),
    ({"scatter_dtype": {"model": BF16}}, r"scatter_dtype: found 'model', need axes among axis="),
    ({"scatter_dtype": BF16, "per_example": True}, "the optimizer sums gradients per example"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_bad_requests(options, message):
    with pytest.raises(ValueError, match=message):
        wus.shard_updates(optax.sgd(1.0), axis=("data", "dcn"), **options)
    if "per_example" not in options:
        with pytest.raises(ValueError, match=message):
            wus.shard_step(lambda x: x, axis=("data", "dcn"), **options)
