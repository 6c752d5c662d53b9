"""Torus lines on meshes with further axes: subgroups, several replica axes, model parallelism."""

import itertools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import wusharding as wus
from large_scale import aot, make_mesh
from tests.large_scale import test_model_parallel as parallel
from tests.large_scale.compilers import needs_libtpu
from tests.runs import (
    assert_same_bits,
    batches,
    layout_of_arrays,
    leaf,
    mean_of,
    of_kind,
    reference,
    relative_error,
    training,
)

SQUARE = (((3, 1), (2, 0)), ((3, 2), (1, 0)))  # 4 positions, in an order of its own
PARAMS = {"w": leaf(17, 5), "m": leaf(48, 33), "t": leaf(16, 128), "b": leaf(3), "s": leaf(1)[0]}
OPTIMIZERS = {
    "lamb": optax.chain(optax.clip_by_global_norm(1.0), optax.lamb(0.01)),
    "adafactor": optax.adafactor(0.01, min_dim_size_to_factor=8),
    "muon": optax.contrib.muon(0.01),
}
SUBGROUPS = {
    "slices first": {"shape": {"dcn": 2, "data": 4}, "axis": ("dcn", "data")},
    "slices last": {"shape": {"data": 4, "dcn": 2}, "axis": ("data", "dcn")},
}


def check(loop, grads, optimizer, tolerance=2e-5):
    """Weights and state are those of one device, and survive going to plain optax and back."""
    wanted, state = reference(optimizer, PARAMS, [mean_of(g) for g in grads])
    loop.run(grads)
    assert relative_error(loop.whole_params, wanted) < tolerance
    assert relative_error(loop.plain_state, state) < tolerance
    with loop.within():
        again = loop.tx.shard(loop.tx.unshard(loop.state), loop.whole_params)
        assert_same_bits(loop.tx.unshard(again), loop.plain_state)
        assert layout_of_arrays(again.inner) == layout_of_arrays(loop.state.inner)


def sweep(*values, quick):
    """All combinations; those that are not `quick` run with the slow tests."""
    return [
        pytest.param(*case, marks=() if case in quick else pytest.mark.slow)
        for case in itertools.product(*values)
    ]


@pytest.mark.parametrize(
    ("context", "form", "name", "target"),
    sweep(
        ("checked", "unchecked", "explicit", "auto", "eager"),
        SUBGROUPS,
        OPTIMIZERS,
        ("cpu", "tpu"),
        quick=[("checked", "slices first", "lamb", "tpu")],
    ),
)
def test_subgroups(context, form, name, target):
    options = {**SUBGROUPS[form], "shard_axis": "data", "lines": {"data": SQUARE}}
    loop = training(context, OPTIMIZERS[name], PARAMS, target=target, **options)
    check(loop, batches(PARAMS, steps=2), OPTIMIZERS[name])


@pytest.mark.parametrize(
    ("context", "order", "name"),
    sweep(
        ("checked", "unchecked", "explicit", "auto"),
        (("data", "dcn"), ("dcn", "data")),
        OPTIMIZERS,
        quick=[],
    ),
)
def test_several_axes(context, order, name):
    options = {"shape": {"dcn": 2, "data": 4}, "axis": order, "lines": {"data": SQUARE}}
    loop = training(context, OPTIMIZERS[name], PARAMS, **options)
    check(loop, batches(PARAMS, steps=2), OPTIMIZERS[name])


@pytest.mark.parametrize(
    ("context", "both", "name"),
    sweep(
        ("checked", "unchecked", "open", "explicit", "auto"),
        (True, False),
        ("lamb", "adamw"),
        quick=[],
    ),
)
def test_model_axes(context, both, name):
    """`both`: weights that the model axis does not split are updated over it too."""
    options = {"lines": {"data": SQUARE}, **(parallel.BOTH if both else {})}
    train = parallel.training(context, "4x2", parallel.OPTIMIZERS[name](), **options)
    train.run()
    plain = train.tx.unshard(train.state)
    wanted, state = parallel.reference(name)
    assert relative_error(train.params, wanted) < 2e-5
    assert relative_error(plain, state) < 2e-5
    assert_same_bits(train.tx.unshard(train.tx.shard(plain, train.params)), plain)


@pytest.mark.parametrize(
    ("kind", "form", "weights"),
    sweep(
        (AxisType.Auto, AxisType.Explicit),
        SUBGROUPS,
        ("whole", "split"),
        quick=[(AxisType.Auto, "slices first", "split")],
    ),
)
def test_whole_steps(kind, form, weights):
    options = SUBGROUPS[form]
    mesh = jax.make_mesh(tuple(options["shape"].values()), options["axis"], axis_types=(kind,) * 2)
    tx = optax.adamw(0.01, eps=1e-4)

    def step(params, state, x):
        grads = jax.grad(lambda p: jnp.mean(jnp.tanh(x @ p["w"]) @ p["v"]))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = {"w": leaf(17, 40), "v": leaf(40, 8)}
    params = jax.device_put(params, NamedSharding(mesh, P()))
    x = jax.device_put(leaf(16, 17), NamedSharding(mesh, P(options["axis"])))
    args = (params, tx.init(params))
    given = {"axis": options["axis"], "shard_axis": "data", "lines": {"data": SQUARE}}
    sharded = wus.shard_step(step, mesh=mesh, weights=weights, **given)
    found, wanted = args, args
    for _ in range(3):
        found, wanted = sharded(*found, x), jax.jit(step)(*wanted, x)
    found = sharded.unshard(found)
    assert relative_error(found, jax.tree.map(jnp.asarray, wanted)) < 2e-5
    assert_same_bits(sharded.unshard(sharded.shard(*args, x)[:2]), args)


@needs_libtpu
def test_lines_that_are_found_on_a_mesh_with_a_model_axis():
    mesh = make_mesh("v5e:4x8", devices=aot.devices("v5e:4x8"), axis_types=AxisType.Auto, model=2)
    tx = wus.shard_updates(optax.adam(1e-3), mesh=mesh, shard_axis=("data", "model"))

    def struct(*shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

    params = {"w": struct(4096, 1024, spec=P()), "m": struct(4096, 1024, spec=P(None, "model"))}
    grads = {
        "w": struct(16, 4096, 1024, spec=P("data")),
        "m": struct(16, 4096, 1024, spec=P("data", None, "model")),
    }
    state = tx.abstract_state(params)
    weights, local = (
        {"w": P(), "m": P(None, "model")},
        {"w": P("data"), "m": P("data", None, "model")},
    )
    specs = tx.state_specs(params)
    step = jax.shard_map(
        lambda p, s, g: tx.apply(jax.tree.map(lambda x: x[0], g), s, p),
        mesh=mesh,
        in_specs=(weights, specs, local),
        out_specs=(weights, specs),
    )
    found = aot.compile_step(step, params, state, grads).collectives
    scattered = [(c.group_size, c.operand_bytes) for c in of_kind(found, "reduce-scatter")]
    # A half of each, along one dim of the torus and then along the other.
    assert sorted(scattered) == sorted(2 * [(4, 2**23), (4, 2**21)])
    assert not [c for c in of_kind(found, "all-reduce") if c.operand_bytes > 64]
