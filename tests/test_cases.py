"""Where users of weight-update sharding were hurt: each public report as a test of the right value.

Every test is named after the row of the collection of reports that it meets, with the addresses of
the reports above it. Rows on microbatches inside a step, on offloading and on checkpoints belong to
other parts of the library.
"""

import contextlib
import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import wusharding as wus
from tests.runs import (
    CONTEXTS,
    batches,
    bytes_on_devices,
    compiled_functions,
    entries,
    hlo_of,
    layout_of_arrays,
    leaf,
    linear,
    mean_of,
    mesh_of,
    of_kind,
    pairs,
    reference,
    relative_error,
    spec_of,
    training,
    unreduced_mean,
)

Tree = Any


def odd_params() -> Tree:
    return {"w": leaf(17, 12), "b": leaf(13)}


def same(
    context: str,
    optimizer: optax.GradientTransformation,
    params: Tree,
    tolerance: float = 1e-5,
    *,
    steps: int = 3,
    num_replicas: int = 8,
    **options: Any,
) -> Any:
    """Runs a loop, holds it against plain optax on one device, and returns it."""
    grads = batches(params, num_replicas, steps)
    loop = training(context, optimizer, params, shape={"data": num_replicas}, **options).run(grads)
    wanted = reference(optimizer, params, [mean_of(g) for g in grads])
    assert relative_error(loop.whole_params, wanted[0]) <= tolerance
    assert relative_error(loop.plain_state, wanted[1]) <= tolerance
    return loop


def on(mesh: Any, tree: Tree, *spec: Any) -> Tree:
    return jax.device_put(tree, NamedSharding(mesh, P(*spec)))


# ============================================================ A. silent replication, layout drift


# https://github.com/AI-Hypercomputer/maxtext/pull/5104
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("cause", ["axis of size 1", "all params tiny"])
def test_row_01_what_cannot_be_sharded_is_reported(context, cause):
    shape = {"data": 1 if cause == "axis of size 1" else 8}
    params = odd_params() if cause == "axis of size 1" else {"a": leaf(3), "b": leaf(5)}
    with pytest.warns(wus.ReplicatedUpdateWarning) as caught:
        training(context, optax.adam(0.1), params, shape=shape, min_shard_elems=8)
    message = str(caught[0].message)
    assert "no parameter is sharded" in message
    assert ("size 1" if cause == "axis of size 1" else "min_shard_elems=8") in message


# https://github.com/AI-Hypercomputer/maxtext/pull/5104
def test_row_01_the_plan_reports_bytes_on_each_device():
    mesh = mesh_of({"data": 8})
    params = {"w": leaf(64, 16), "b": leaf(3)}
    tx = wus.shard_updates(optax.adam(0.1), mesh=mesh, min_shard_elems=8)
    plan, state = tx.plan(params), tx.init(params)
    assert set(bytes_on_devices(state).values()) == {plan.held_bytes}
    assert plan.held_bytes == 4 + 2 * (64 * 16 // 8 + 3) * 4
    assert plan.replicated_bytes == 4 + 2 * 3 * 4
    assert plan.state_bytes == 4 + 2 * (64 * 16 + 3) * 4


# https://github.com/jax-ml/jax/issues/26946
def test_row_02_a_dim_of_17_over_8_is_padded_not_replicated():
    params = {"w": leaf(17, 16)}
    loop = same("auto", optax.adam(0.01), params, formats="dim", min_shard_elems=0)
    mu = loop.state.inner[0].mu["w"]
    shards = mu.addressable_shards
    rows = {shard.data.size // 16 for shard in shards}
    assert mu.sharding.device_set == set(jax.devices())
    assert rows == {2} if spec_of(mu) == (None, "data") else max(rows) <= math.ceil(17 / 8)


# https://github.com/google/flax/issues/5172
@pytest.mark.parametrize("context", ["explicit", "auto"])
@pytest.mark.parametrize("apply", [False, True])
def test_row_03_params_stay_where_they_were(context, apply):
    params = {"w": leaf(16, 8), "b": leaf(16)}
    loop = training(context, optax.adam(0.01), params, apply=apply)
    with compiled_functions() as compiled:
        for grads in batches(params):
            loop.run([grads])
            assert {spec_of(x) for x in loop.params.values()} == {()}
            assert all(x.is_fully_replicated for x in loop.params.values())
    assert len(compiled) == 1


# https://github.com/google-deepmind/optax/issues/548
@pytest.mark.parametrize("auto", [False, True])
def test_row_04_the_state_is_born_sharded(auto):
    """Of 128 MiB of moments a device gets 16, and makes no more of them on the way."""
    mesh = mesh_of({"data": 8}, auto=auto)
    tx = wus.shard_updates(optax.adam(0.1), mesh=mesh)
    where = NamedSharding(mesh, P())
    params = {"w": jax.ShapeDtypeStruct((4096, 4096), jnp.float32, sharding=where)}
    memory = jax.jit(tx.init).lower(params).compile().memory_analysis()
    whole = 2 * 4096 * 4096 * 4
    assert memory.output_size_in_bytes <= whole / 8 + 1024
    assert memory.temp_size_in_bytes <= whole / 8 / 100
    # Negative control: plain optax makes all of it everywhere.
    with jax.set_mesh(mesh):
        plain = jax.jit(optax.adam(0.1).init).lower(params).compile().memory_analysis()
    assert plain.output_size_in_bytes >= whole


# https://github.com/google/flax/issues/5110
@pytest.mark.parametrize("auto", [False, True])
def test_row_05_the_abstract_state_carries_shardings(auto):
    mesh = mesh_of({"data": 8}, auto=auto)
    tx = wus.shard_updates(optax.lamb(0.1), mesh=mesh)
    params = on(mesh, odd_params())
    abstract, state = tx.abstract_state(params), tx.init(params)
    for struct, x in pairs(abstract, state):
        assert struct.sharding.is_equivalent_to(x.sharding, x.ndim)
    assert any(entries(struct.sharding.spec) for struct in jax.tree.leaves(abstract))


# https://github.com/google/flax/issues/5110
def test_row_05_nnx_eval_shape_keeps_shardings_where_types_have_them():
    from flax import nnx

    mesh = mesh_of({"data": 8})
    tx = wus.shard_updates(optax.adam(0.1), mesh=mesh)

    def make() -> Any:
        model = nnx.Linear(17, 12, rngs=nnx.Rngs(0))
        return nnx.Optimizer(model, tx, wrt=nnx.Param)

    with jax.set_mesh(mesh):
        abstract, real = nnx.state(nnx.eval_shape(make)), nnx.state(make())
    specs = []
    for struct, x in pairs(abstract, real):
        assert (struct.shape, struct.dtype) == (x.shape, x.dtype)
        assert entries(struct.sharding.spec) == spec_of(x)
        specs.append(spec_of(x))
    assert ("data",) in specs


def nnx_model(metadata: dict[str, Any]) -> Any:
    from flax import nnx

    class Affine(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.asarray(leaf(17, 12)), **metadata)
            self.b = nnx.Param(jnp.asarray(leaf(12)))

        def __call__(self, x: jax.Array) -> jax.Array:
            return x @ self.w[...] + self.b[...]

    return Affine()


def nnx_losses(model: Any, optimizer: Any, steps: int = 3) -> list[float]:
    from flax import nnx

    x, y = leaf(16, 17), leaf(16, 12)

    @nnx.jit
    def step(model: Any, optimizer: Any) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - y) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    return [float(step(model, optimizer)) for _ in range(steps)]


# https://github.com/google/flax/pull/5231
@pytest.mark.parametrize("metadata", [{}, {"optimizer_sharding": ("data",)}])
@pytest.mark.parametrize("auto", [False, True])
def test_row_06_in_an_nnx_optimizer(auto, metadata):
    from flax import nnx

    plain = nnx_model({})
    wanted = nnx_losses(plain, nnx.Optimizer(plain, optax.adam(0.01), wrt=nnx.Param))
    mesh = mesh_of({"data": 8}, auto=auto)
    with jax.set_mesh(mesh):
        model = nnx_model(metadata)
        nnx.update(model, on(mesh, nnx.state(model)))
        tx = wus.shard_updates(optax.adam(0.01))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        mu = optimizer.opt_state.inner[0].mu["w"]
        assert spec_of(mu[...]) == ("data",)
        np.testing.assert_allclose(nnx_losses(model, optimizer), wanted, rtol=1e-5)
        assert spec_of(model.w[...]) == ()
        assert spec_of(optimizer.opt_state.inner[0].mu["w"][...]) == ("data",)


# https://github.com/google/flax/pull/5231
@pytest.mark.parametrize("metadata", [{}, {"optimizer_sharding": ("data",)}])
def test_row_06_on_the_state_of_an_nnx_model(metadata):
    from flax import nnx

    mesh = mesh_of({"data": 8}, auto=True)
    with jax.set_mesh(mesh):
        model = nnx_model(metadata)
        graph, variables = nnx.split(model)
        tx = wus.shard_updates(optax.adam(0.01))
        variables = on(mesh, variables)
        state = tx.init(variables)
        x, y = leaf(16, 17), leaf(16, 12)

        def loss(variables: Tree) -> jax.Array:
            return jnp.mean((nnx.merge(graph, variables)(x) - y) ** 2)

        @jax.jit
        def step(variables: Tree, state: Any) -> Any:
            return tx.apply(jax.grad(loss)(variables), state, variables)

        new, state = step(variables, state)
        mu = state.inner[0].mu["w"]
    assert spec_of(mu.get_value() if hasattr(mu, "get_value") else mu) == ("data",)
    host = jax.tree.map(np.asarray, variables)
    wanted, _ = reference(optax.adam(0.01), host, [jax.grad(loss)(host)])
    assert relative_error(new, wanted) <= 1e-5


# https://github.com/google/flax/issues/1790
def test_row_08_no_device_is_given_more_than_the_others():
    mesh = mesh_of({"data": 8})
    params = on(mesh, {"w": leaf(256, 64), "b": leaf(64)})
    tx = wus.shard_updates(optax.adam(0.1), mesh=mesh)
    before = {id(x) for x in jax.live_arrays()}
    state = tx.init(params)
    made = [x for x in jax.live_arrays() if id(x) not in before]
    held = bytes_on_devices(made)
    assert set(held) == set(range(8))
    assert len(set(held.values())) == 1
    assert max(held.values()) <= 1.01 * 2 * 4 * (256 * 64 + 64) / 8 + 64
    del state


# https://github.com/pytorch/xla/pull/6572
@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adafactor(0.01, min_dim_size_to_factor=4, momentum=0.9),
        optax.contrib.muon(0.01),
        optax.MultiSteps(optax.sgd(0.1, momentum=0.9), 2).gradient_transformation(),
        optax.inject_hyperparams(optax.lamb)(0.01),
    ],
    ids=["adafactor", "muon", "MultiSteps", "inject_hyperparams"],
)
def test_row_09_init_and_update_lay_the_state_out_alike(optimizer):
    params = odd_params()
    loop = training("auto", optimizer, params)
    born = layout_of_arrays(loop.state)
    assert layout_of_arrays(loop.run(batches(params, steps=1)).state) == born


# ===================================================== B. non-divisible shapes, padding, odd leaves


# https://github.com/marin-community/levanter/issues/429
@pytest.mark.parametrize("size", [5, 7])
def test_row_10_five_and_seven_devices(size):
    params = {"a": leaf(8, 3), "b": leaf(17), "c": leaf(1, 17), "d": leaf(8, 1)}
    same("checked", optax.adam(0.01), params, num_replicas=size)


# https://github.com/jax-ml/jax/issues/27808
@pytest.mark.parametrize("context", CONTEXTS)
def test_row_11_a_vector_of_5(context):
    same(context, optax.adam(0.01), {"v": leaf(5)}, steps=2)


# https://github.com/jax-ml/jax/issues/22073 https://github.com/jax-ml/jax/issues/14519
@pytest.mark.parametrize("context", ["unchecked", "pmap", "explicit", "auto"])
def test_row_14_scalars_need_no_spec(context):
    optimizer = optax.chain(
        optax.scale_by_adam(), optax.ema(0.9), optax.scale_by_schedule(lambda c: -0.1 / (1 + c))
    )
    params = {"w": leaf(17, 2), "s": leaf(), "none": np.zeros((0, 3), np.float32)}
    same(context, optimizer, params, steps=2)


# https://github.com/jax-ml/jax/issues/22073
def test_row_14_arrays_without_elements_with_replication_checks():
    params = {"w": leaf(17, 2), "none": np.zeros((0, 3), np.float32)}
    same("checked", optax.adam(0.01), params, steps=2)


# https://github.com/jax-ml/jax/issues/22073
def test_row_14_the_state_can_be_put_where_it_says():
    mesh = mesh_of({"data": 8})
    params = {"w": leaf(17, 2), "s": leaf(), "none": np.zeros((0, 3), np.float32)}
    tx = wus.shard_updates(optax.adam(0.1), mesh=mesh)
    state, shardings = tx.init(params), tx.state_shardings(params)
    again = jax.device_put(jax.tree.map(np.asarray, state), shardings)
    assert layout_of_arrays(again) == layout_of_arrays(state)
    assert spec_of(again.inner[0].count) == ()


# https://github.com/hpcaitech/ColossalAI/pull/6433
@pytest.mark.parametrize("formats", ["auto", "dim"])
def test_row_15_accumulators_begin_at_their_value(formats):
    optimizer, params = optax.adagrad(0.1, initial_accumulator_value=0.1), odd_params()
    loop = training("checked", optimizer, params, formats=formats)
    assert relative_error(loop.plain_state, optimizer.init(params)) == 0
    same("checked", optimizer, params, 1e-6, formats=formats)


# ============================================================== C. wrong mathematics on shards


# https://github.com/deepspeedai/DeepSpeed/issues/490
@pytest.mark.parametrize("formats", ["dim", "flat"])
@pytest.mark.parametrize("name", ["lamb", "lars"])
def test_row_17_norms_are_those_of_whole_tensors(name, formats):
    optimizer = {"lamb": optax.lamb(0.01), "lars": optax.lars(0.1)}[name]
    rows = np.arange(1, 17, dtype=np.float32).reshape(16, 1)
    params = {"w": leaf(16, 8) * rows}
    same("checked", optimizer, params, formats=formats)


# https://github.com/deepspeedai/DeepSpeed/issues/490
def test_row_17_norms_of_shards_would_be_wrong():
    """Negative control: what the report describes is far outside of the tolerance above."""
    params = {"w": leaf(16, 8) * np.arange(1, 17, dtype=np.float32).reshape(16, 1)}
    grads = [mean_of(g) for g in batches(params)]
    wanted, _ = reference(optax.lamb(0.01), params, grads)
    shards = [
        reference(
            optax.lamb(0.01),
            {"w": params["w"][2 * i : 2 * i + 2]},
            [{"w": g["w"][2 * i : 2 * i + 2]} for g in grads],
        )[0]["w"]
        for i in range(8)
    ]
    assert relative_error({"w": jnp.concatenate(shards)}, wanted) > 1e-3


# https://github.com/deepspeedai/DeepSpeed/issues/1217
@pytest.mark.parametrize("name", ["lamb", "adam"])
def test_row_18_two_hundred_steps_follow_the_same_curve(name):
    optimizer = {"lamb": optax.lamb(0.005), "adam": optax.adam(0.01)}[name]
    rng = np.random.default_rng(1)
    x = rng.normal(size=(64, 5)).astype(np.float32)
    y = np.sin(x.sum(1, keepdims=True)).astype(np.float32)
    params = {"w1": leaf(5, 17), "b1": leaf(17), "w2": leaf(17, 1), "b2": leaf(1)}

    def loss(params: Tree, x: jax.Array, y: jax.Array) -> jax.Array:
        hidden = jnp.tanh(x @ params["w1"] + params["b1"])
        return jnp.mean((hidden @ params["w2"] + params["b2"] - y) ** 2)

    def curve(step: Callable[..., Any], params: Tree, state: Any, *data: Any) -> np.ndarray:
        losses = []
        for _ in range(200):
            value, params, state = step(params, state, *data)
            losses.append(value)
        return np.asarray(jax.device_get(losses))

    @jax.jit
    def plain_step(params: Tree, state: Any, x: jax.Array, y: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x, y)
        updates, state = optimizer.update(grads, state, params)
        return value, optax.apply_updates(params, updates), state

    mesh = mesh_of({"data": 8})
    tx = wus.shard_updates(optimizer, mesh=mesh)
    state, specs = tx.init(params), tx.state_specs(params)

    @jax.jit
    @jax.shard_map(
        mesh=mesh, in_specs=(P(), specs, P("data"), P("data")), out_specs=(P(), P(), specs)
    )
    def step(params: Tree, state: Any, x: jax.Array, y: jax.Array) -> Any:
        own = jax.tree.map(lambda p: lax.pcast(p, "data", to="varying"), params)
        value, grads = jax.value_and_grad(loss)(own, x, y)
        params, state = tx.apply(grads, state, params)
        return lax.pmean(value, "data"), params, state

    wanted = curve(plain_step, params, optimizer.init(params), x, y)
    found = curve(step, on(mesh, params), state, on(mesh, x, "data"), on(mesh, y, "data"))
    assert wanted[-1] < 0.2 * wanted[0]
    np.testing.assert_allclose(found, wanted, rtol=1e-3)


# https://github.com/pytorch/xla/pull/4796
@pytest.mark.parametrize("context", ["checked", "pmap", "explicit"])
def test_row_19_clipping_by_the_norm_over_all_shards(context):
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.01))
    same(context, optimizer, odd_params())


# https://github.com/pytorch/pytorch/issues/109581
@pytest.mark.parametrize("shape", [(17, 12), (5, 9, 8)])
@pytest.mark.parametrize("formats", ["auto", "flat"])
def test_row_22_adafactor_means_over_whole_rows_and_columns(shape, formats):
    optimizer = optax.adafactor(0.01, min_dim_size_to_factor=4)
    same("checked", optimizer, {"w": leaf(*shape)}, formats=formats)


def matrices() -> Tree:
    return {"layers": [leaf(16, 8, seed=i) for i in range(4)], "b": leaf(11)}


# https://github.com/google-deepmind/optax/issues/1660
@pytest.mark.parametrize("context", ["checked", "explicit"])
def test_row_23_muon_orthogonalizes_whole_matrices(context):
    loop = same(context, optax.contrib.muon(0.01), matrices())
    with loop.within():
        jobs, owners = loop.tx.plan(loop.params).owned
    assert (jobs, owners) == (4, 4)


# https://github.com/goodfire-ai/spd/pull/978
def test_row_24_newton_schulz_communicates_once_on_each_side():
    params, counts = matrices(), {}
    for ns_steps in (2, 7):
        optimizer = optax.contrib.muon(0.01, ns_steps=ns_steps)
        loop = training("checked", optimizer, params)
        found = loop.collectives(batches(params)[0])
        assert not any(c.in_loop for c in found)
        counts[ns_steps] = sorted(c.kind for c in found)
        moved = of_kind(found, "all-to-all")
        assert len(moved) == 2
        # The matrices themselves, there and back; each device sends its eighth.
        assert all(c.operand_bytes <= 4 * 16 * 8 * 4 for c in moved)
        assert len(of_kind(found, "all-gather")) == len(of_kind(found, "reduce-scatter")) == 1
    assert counts[2] == counts[7]


# https://github.com/google-deepmind/optax/issues/1186
def test_row_25_one_transformation_serves_two_steps():
    mesh = mesh_of({"data": 8})
    params = on(mesh, matrices())
    tx = wus.shard_updates(optax.contrib.muon(0.01), mesh=mesh)
    state, specs = tx.init(params), tx.state_specs(params)

    def step(params: Tree, state: Any, grads: Tree, scale: float) -> Any:
        grads = jax.tree.map(lambda g: scale * g[0], grads)
        return tx.apply(grads, state, params)

    first, second = (
        jax.jit(
            jax.shard_map(
                functools.partial(step, scale=scale),
                mesh=mesh,
                in_specs=(P(), specs, P("data")),
                out_specs=(P(), specs),
                check_vma=check_vma,
            )
        )
        for scale, check_vma in ((1.0, True), (2.0, False))
    )
    grads = batches(matrices(), steps=2)
    for run, g in zip((first, second), grads, strict=True):
        params, state = run(params, state, on(mesh, g, "data"))
    means = [mean_of(g) for g in grads]
    means[1] = jax.tree.map(lambda g: 2 * g, means[1])
    wanted = reference(optax.contrib.muon(0.01), matrices(), means)
    assert relative_error((params, tx.unshard(state)), wanted) <= 1e-5


LOSSES = {"local": lambda x: x, "psum": lambda x: lax.psum(x, "data"), "pmean": None}
LOSSES["pmean"] = lambda x: lax.pmean(x, "data")


# https://github.com/jax-ml/jax/issues/3970
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("mode", ["varying params", "invariant params", "unchecked", "pmap"])
def test_row_26_gradients_of_local_and_of_summed_losses(mode, loss):
    """Replica `i` has the gradient `i`: the sum is 28, the mean 3.5, and no replica's own is right.

    Where replication is unchecked JAX differentiates a `psum` to a `psum`, so that local gradients
    of a summed loss are 8 times too large (0, 8, ..., 56), and their mean is the sum's gradient. A
    local loss stands for its mean, and with parameters that do not vary for its sum: then JAX has
    summed the gradients before the transform sees them, which it says.
    """
    mesh = mesh_of({"data": 8})
    combine = LOSSES[loss]
    reduced = mode == "invariant params"
    params = {"w": np.zeros((17,), np.float32)}
    x = np.arange(8, dtype=np.float32)
    tx = wus.shard_updates(optax.sgd(1.0), mesh=mesh if mode != "pmap" else None)

    def step(params: Tree, state: Any, x: jax.Array) -> Any:
        own = params
        if mode == "varying params":
            own = jax.tree.map(lambda p: lax.pcast(p, "data", to="varying"), params)
        grads = jax.grad(lambda p: combine(jnp.sum(p["w"]) * x.reshape(())))(own)
        return tx.apply(grads, state, params)

    told = pytest.warns(wus.ReducedGradientsWarning, match=r"sum \(not average\)")
    with told if reduced else contextlib.nullcontext():
        if mode == "pmap":
            params = jax.tree.map(lambda p: np.broadcast_to(p, (8, *p.shape)), params)
            state = jax.pmap(tx.init, axis_name="data")(params)
            new, _ = jax.pmap(step, axis_name="data")(params, state, x)
        else:
            state, specs = tx.init(params), tx.state_specs(params)
            new, _ = jax.jit(
                jax.shard_map(
                    step,
                    mesh=mesh,
                    in_specs=(P(), specs, P("data")),
                    out_specs=(P(), specs),
                    check_vma=mode in ("varying params", "invariant params"),
                )
            )(on(mesh, params), state, on(mesh, x, "data"))
    right = {"local": 28.0 if reduced else 3.5, "psum": 28.0, "pmean": 3.5}
    if mode == "varying params":
        # The replicas' own parameters: each sees its own term of the sum, and the mean of these is
        # that of the local losses. Of the mean each sees an eighth.
        right = {"local": 3.5, "psum": 3.5, "pmean": 3.5 / 8}
    np.testing.assert_array_equal(new["w"], np.full(new["w"].shape, -right[loss], np.float32))


# ========================================================== D. communication not as promised


def large_params() -> Tree:
    return {"w": leaf(64, 48), "v": leaf(33, 20), "b": leaf(13)}


# https://github.com/deepspeedai/DeepSpeed/issues/6463 https://github.com/karpathy/llm.c/pull/421
@pytest.mark.parametrize(
    ("context", "name"),
    [
        ("checked", "adam"),
        ("unchecked", "adam"),
        ("pmap", "adam"),
        ("explicit", "adam"),
        ("explicit", "clip"),  # one more all-reduce, of a norm
    ],
)
def test_row_30_gradients_are_scattered_never_all_reduced(context, name):
    optimizer = {
        "adam": optax.adam(0.01),
        "clip": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
    }[name]
    params = large_params()
    loop = training(context, optimizer, params, apply=True)
    found = loop.collectives(batches(params)[0])
    grad_bytes = sum(x.nbytes for x in params.values())
    assert all(c.operand_bytes <= 8 for c in of_kind(found, "all-reduce"))
    scattered = sum(c.operand_bytes for c in of_kind(found, "reduce-scatter"))
    gathered = sum(c.result_bytes for c in of_kind(found, "all-gather"))
    assert grad_bytes <= scattered == gathered <= 1.05 * grad_bytes
    assert len(of_kind(found, "reduce-scatter")) == len(of_kind(found, "all-gather")) == 1
    # Both together send what one all-reduce of the gradients sends.
    assert sum(c.sent_bytes for c in found) <= 1.06 * 2 * grad_bytes * 7 / 8


# https://github.com/openxla/xla/issues/49143
@pytest.mark.parametrize("context", ["checked", "explicit"])
def test_row_33_gradients_of_an_embedding_over_microbatches(context):
    """Integer gradients of a gather, scattered and added over two microbatches: exact."""
    mesh = mesh_of({"data": 8})
    rng = np.random.default_rng(2)
    tokens = rng.integers(0, 37, (8, 2, 6))  # replica, microbatch, tokens
    weights = rng.integers(1, 5, (8, 2, 6, 3)).astype(np.float32)
    params = {"table": np.zeros((37, 3), np.float32)}
    tx = wus.shard_updates(optax.sgd(1.0, momentum=0.5), mesh=mesh, reduce="sum")
    state, specs = tx.init(params), tx.state_specs(params)

    def loss(params: Tree, tokens: jax.Array, weights: jax.Array) -> jax.Array:
        return jnp.sum(params["table"][tokens] * weights)

    if context == "checked":

        @jax.jit
        @jax.shard_map(
            mesh=mesh, in_specs=(P(), specs, P("data"), P("data")), out_specs=(P(), specs)
        )
        def step(params: Tree, state: Any, tokens: jax.Array, weights: jax.Array) -> Any:
            own = jax.tree.map(lambda p: lax.pcast(p, "data", to="varying"), params)

            def one(total: Tree, batch: Any) -> Any:
                return jax.tree.map(jnp.add, total, jax.grad(loss)(own, *batch)), None

            zeros = jax.tree.map(jnp.zeros_like, own)
            grads, _ = lax.scan(one, zeros, (tokens[0], weights[0]))
            return tx.apply(grads, state, params)
    else:

        @jax.jit
        def step(params: Tree, state: Any, tokens: jax.Array, weights: jax.Array) -> Any:
            @jax.shard_map(in_specs=(P(), P("data"), P("data")), out_specs=P(unreduced={"data"}))
            def grads_of(params: Tree, tokens: jax.Array, weights: jax.Array) -> Tree:
                own = jax.tree.map(lambda p: lax.pcast(p, "data", to="varying"), params)
                parts = [jax.grad(loss)(own, tokens[0, i], weights[0, i]) for i in range(2)]
                return jax.tree.map(jnp.add, *parts)

            return tx.apply(grads_of(params, tokens, weights), state, params)

    total = np.zeros((37, 3), np.float32)
    np.add.at(total, tokens.reshape(-1), weights.reshape(-1, 3))
    data = (on(mesh, tokens, "data"), on(mesh, weights, "data"))
    with jax.set_mesh(mesh):
        params = on(mesh, params)
        found = hlo_of(step, params, state, *data)
        for _ in range(2):
            params, state = step(params, state, *data)
    np.testing.assert_array_equal(params["table"], -total - 1.5 * total)
    assert not any(c.in_loop for c in found)
    assert sorted(c.kind for c in found) == ["all-gather", "reduce-scatter"]


# https://github.com/marin-community/levanter/issues/325
@pytest.mark.parametrize("context", ["checked", "explicit"])
def test_row_35_params_sharded_in_a_box_and_state_over_all_replicas(context):
    """Parameters lie over `data`, and are copied over `replica`: the state lies over both."""
    mesh = mesh_of({"replica": 2, "data": 4})
    params = {"w": leaf(16, 6), "v": leaf(8, 5), "b": leaf(16)}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.lamb(0.01))
    grads = batches(params, 2)
    wanted = reference(optimizer, params, [mean_of(g) for g in grads])
    in_boxes = dict.fromkeys(params, P("data"))
    placed = on(mesh, params, "data")
    options = {"param_specs": in_boxes} if context == "checked" else {}
    tx = wus.shard_updates(optimizer, mesh=mesh, axis="replica", **options)
    state, specs = tx.init(placed), tx.state_specs(placed)
    for x in jax.tree.leaves(state.inner):
        assert x.size <= 1 or len({str(shard.index) for shard in x.addressable_shards}) == 8
    held = set(bytes_on_devices(state.inner[1][0].mu).values())
    assert held == {sum(x.nbytes for x in params.values()) // 8}

    def manual(params: Tree, state: Any, grads: Tree) -> Any:
        return tx.apply(jax.tree.map(lambda g: g[0], grads), state, params)

    def explicit(params: Tree, state: Any, grads: Tree) -> Any:
        def loss(weights: Tree) -> Any:
            return sum(jnp.sum(linear(g, w, "replica")) / 2 for g, w in pairs(grads, weights))

        whole = P("data", reduced={"replica"})
        weights = jax.tree.map(lambda w: jax.sharding.reshard(w, whole), params)
        return tx.apply(jax.grad(loss)(weights), state, params)

    step = explicit
    if context == "checked":
        ins = (in_boxes, specs, P("replica", "data"))
        step = jax.shard_map(manual, mesh=mesh, in_specs=ins, out_specs=(in_boxes, specs))
    with jax.set_mesh(mesh):
        step = jax.jit(step)
        found = hlo_of(step, placed, state, on(mesh, grads[0], "replica", "data"))
        for g in grads:
            placed, state = step(placed, state, on(mesh, g, "replica", "data"))
    assert relative_error((placed, tx.unshard(state)), wanted) <= 1e-5
    assert {spec_of(x) for x in placed.values()} == {("data",)}
    # Each device scatters and gathers its box's part, between the two replicas only.
    part = sum(x.nbytes for x in params.values()) // 4
    moved = of_kind(found, "reduce-scatter") + of_kind(found, "all-gather")
    assert [c.group_size for c in moved] == [2, 2]
    assert max(c.operand_bytes for c in moved) == part


# https://github.com/marin-community/levanter/issues/325
def test_row_35_state_in_a_box_of_the_replicas():
    """The other way round: parameters everywhere, the state within each box only."""
    params = odd_params()
    loop = training(
        "checked",
        optax.adam(0.01),
        params,
        shape={"replica": 2, "data": 4},
        axis=("replica", "data"),
        shard_axis="data",
    )
    assert spec_of(loop.state.inner[0].mu["w"]) == ("data",)
    grads = batches(params)
    wanted = reference(optax.adam(0.01), params, [mean_of(g) for g in grads])
    loop.run(grads)
    assert relative_error((loop.whole_params, loop.plain_state), wanted) <= 1e-6


# ============================================================ E. optax wrappers and state trees


# https://github.com/google-deepmind/optax/issues/320 https://github.com/google-deepmind/optax/issues/528
def test_row_37_accumulators_are_sharded_too():
    params = {"w": leaf(64, 16), "b": leaf(24)}
    optimizer = optax.MultiSteps(optax.adam(0.01), 2).gradient_transformation()
    loop = same("checked", optimizer, params, steps=4)
    whole = sum(x.nbytes for x in params.values())
    assert set(bytes_on_devices(loop.state.inner.acc_grads).values()) == {whole // 8}
    assert set(bytes_on_devices(loop.state.inner.inner_opt_state[0].mu).values()) == {whole // 8}


# https://github.com/google-deepmind/optax/issues/577
@pytest.mark.parametrize("context", ["checked", "explicit", "auto"])
def test_row_41_learning_rates_change_without_a_compile(context):
    params = odd_params()
    optimizer = optax.inject_hyperparams(optax.adam)(learning_rate=0.1)
    loop = training(context, optimizer, params)
    grads = batches(params, steps=5)
    wanted, state = params, optimizer.init(params)
    with compiled_functions() as compiled:
        for i, g in enumerate(grads):
            rate = optax.tree.get(loop.state, "learning_rate")
            rate = jax.device_put(np.float32(0.1 / (i + 1)), rate.sharding)
            loop.state = optax.tree.set(loop.state, learning_rate=rate)
            loop.run([g])
    assert len(compiled) == 1
    for i, g in enumerate(grads):
        state = optax.tree.set(state, learning_rate=jnp.float32(0.1 / (i + 1)))
        updates, state = optimizer.update(mean_of(g), state, wanted)
        wanted = optax.apply_updates(wanted, updates)
    assert relative_error(loop.whole_params, wanted) <= 1e-5


# https://github.com/google-deepmind/optax/issues/474
@pytest.mark.parametrize("context", ["pmap", "checked"])
def test_row_42_a_moving_average_is_one_logical_copy(context):
    params = {"w": leaf(64, 16), "b": leaf(24)}
    loop = same(context, optax.chain(optax.adam(0.01), optax.ema(0.99)), params)
    ema = loop.state.inner[1].ema
    whole = sum(x.nbytes for x in params.values())
    assert set(bytes_on_devices(ema).values()) == {whole // 8}


# =================================================== F. compile, donation, dtype, replication check


# https://github.com/marin-community/marin/pull/8911
@pytest.mark.parametrize("context", ["checked", "explicit", "auto"])
def test_row_44_counters_are_born_on_the_mesh(context):
    params = odd_params()
    optimizer = optax.chain(optax.adam(0.01), optax.scale_by_schedule(lambda c: 1 / (1 + c)))
    loop = training(context, optimizer, params)
    counts = [loop.state.inner[0][0].count, loop.state.inner[1].count]
    assert all(len(x.sharding.device_set) == 8 for x in counts)
    with compiled_functions() as compiled:
        loop.run(batches(params))
    assert len(compiled) == 1


# https://github.com/marin-community/marin/pull/8911
def test_row_44_a_counter_on_one_device_would_compile_twice():
    """Negative control, as in the report."""
    mesh = mesh_of({"data": 8}, auto=True)
    count, step = jnp.zeros((), jnp.int32), jax.jit(lambda c, x: (c + 1, x * c))
    x = on(mesh, leaf(8))
    with compiled_functions() as compiled:
        for _ in range(3):
            count, x = step(count, x)
    assert len(compiled) == 2


# https://github.com/jax-ml/jax/issues/9675
@pytest.mark.parametrize(
    ("context", "formats"),
    [
        ("checked", "auto"),
        ("pmap", "auto"),
        ("explicit", "auto"),
        ("explicit", "dim"),  # with padding
        ("auto", "auto"),
    ],
)
def test_row_47_every_donated_buffer_is_used(context, formats):
    params = odd_params()
    loop = training(context, optax.adam(0.01), params, donate=True, formats=formats)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for grads in batches(params, steps=2):
            given = jax.tree.leaves((loop.params, loop.state))
            loop.run([grads])
            assert all(x.is_deleted() for x in given)


# https://github.com/jax-ml/jax/issues/19175
def test_row_48_the_replication_check_is_satisfied():
    """A whole training step with checks on: loss, gradients, update, new params as `P()`."""
    mesh = mesh_of({"data": 8})
    params = {"w": leaf(6, 5), "b": leaf(5)}
    x, y = leaf(32, 6), leaf(32, 5)
    tx = wus.shard_updates(optax.chain(optax.clip_by_global_norm(0.5), optax.lamb(0.01)), mesh=mesh)
    state, specs = tx.init(params), tx.state_specs(params)

    def loss(params: Tree, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(P(), specs, P("data"), P("data")), out_specs=(P(), specs))
    def step(params: Tree, state: Any, x: jax.Array, y: jax.Array) -> Any:
        own = jax.tree.map(lambda p: lax.pcast(p, "data", to="varying"), params)
        updates, state = tx.update(jax.grad(loss)(own, x, y), state, params)
        return optax.apply_updates(params, updates), state

    new, _ = step(on(mesh, params), state, on(mesh, x, "data"), on(mesh, y, "data"))
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.lamb(0.01))
    wanted, _ = reference(optimizer, params, [jax.grad(loss)(params, x, y)])
    assert relative_error(new, wanted) <= 1e-5


# The sketches of rows 17 to 26 feed `unreduced` gradients as well: of `reduced` weights.
def test_gradients_of_reduced_weights_are_unreduced():
    mesh = mesh_of({"data": 8})
    params = on(mesh, odd_params())
    grads = on(mesh, batches(odd_params())[0], "data")
    with jax.set_mesh(mesh):
        types = jax.eval_shape(unreduced_mean, params, grads)
    assert {x.sharding.spec.unreduced for x in types.values()} == {frozenset({"data"})}
