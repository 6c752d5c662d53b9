"""`shard_step`: the whole step, found as it is written."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import wusharding as wus
from large_scale.hlo import collectives
from tests.runs import hlo_of, leaf
from wusharding.jaxprs import RandomTile
from wusharding.transforms.step_storage import converter

TX = optax.adam(1e-2)


def loss_fn(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    hidden = jnp.tanh(x @ params["w1"] + params["b1"])
    return jnp.mean((hidden @ params["w2"] - y) ** 2)


def global_step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    updates, state = TX.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


def replica_step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    loss, grads = lax.pmean((loss, grads), "data")
    updates, state = TX.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


def in_shard_map(
    mesh: Mesh, step: Callable[..., Any] = replica_step, *, check_vma: bool = False
) -> Callable[..., Any]:
    return jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(P(), P(), P("data"), P("data")),
        out_specs=P(),
        check_vma=check_vma,
    )


def arguments(mesh: Mesh) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    params = {
        "w1": jnp.asarray(rng.normal(size=(17, 16)), jnp.float32),
        "b1": jnp.zeros(16),
        "w2": jnp.asarray(rng.normal(size=(16, 3)), jnp.float32),
    }
    x = jnp.asarray(rng.normal(size=(32, 17)), jnp.float32)
    y = jnp.asarray(rng.normal(size=(32, 3)), jnp.float32)
    params = jax.device_put(params, NamedSharding(mesh, P()))
    return (params, TX.init(params), *jax.device_put((x, y), NamedSharding(mesh, P("data"))))


def run(step: Callable[..., Any], args: tuple[Any, ...], turns: int = 3) -> Any:
    params, state, *batch = args
    for _ in range(turns):
        params, state, loss = step(params, state, *batch)
    return params, state, loss


def assert_close(found: Any, wanted: Any, tolerance: float = 1e-6) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=tolerance, atol=tolerance)


@pytest.fixture(params=["explicit", "auto"])
def mesh(request: pytest.FixtureRequest, mesh8_explicit: Mesh, mesh8_auto: Mesh) -> Mesh:
    return mesh8_explicit if request.param == "explicit" else mesh8_auto


KINDS = ["global", "shard_map, checked", "shard_map, unchecked"]


def written(kind: str, mesh: Mesh) -> Callable[..., Any]:
    if kind == "global":
        return global_step
    return in_shard_map(mesh, check_vma=kind == "shard_map, checked")


@pytest.mark.parametrize("weights", ["whole", "split"])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_step_as_written(kind: str, weights: Any, mesh: Mesh) -> None:
    args = arguments(mesh)
    wanted = run(jax.jit(written(kind, mesh)), args)
    step = wus.shard_step(written(kind, mesh), mesh=mesh, weights=weights)
    params, state, loss = run(step, args)
    mu = state[0].mu["w1"]
    assert mu.addressable_shards[0].data.size == 34  # of 272
    assert_close((step.unshard(params), step.unshard(state), loss), wanted)


def test_a_function_of_one_replica_is_given_its_specs(mesh: Mesh) -> None:
    args = arguments(mesh)
    specs: Any = {"in_specs": (P(), P(), P("data"), P("data")), "out_specs": P()}
    step = wus.shard_step(replica_step, mesh=mesh, **specs)
    assert_close(step.unshard(run(step, args)), run(jax.jit(in_shard_map(mesh)), args))
    kinds = [c.kind for c in collectives(step.lower(*args).compile().as_text())]
    assert sorted(kinds) == ["all-gather", "all-reduce", "reduce-scatter"]
    with pytest.raises(ValueError, match="in_specs, out_specs: give both, or neither"):
        wus.shard_step(replica_step, mesh=mesh, in_specs=specs["in_specs"])


@pytest.mark.parametrize(
    ("options", "split", "scatters"),
    [
        ({"min_shard_elems": 49}, ["w1"], 1),
        ({"bucket_bytes": 512}, ["b1", "w1", "w2"], 2),  # `w1` alone
        ({"target": "tpu", "bucket_bytes": 512}, ["b1", "w1", "w2"], 2),
    ],
    ids=str,
)
def test_small_arrays_and_buckets_are_as_for_an_optimizer(
    options: Any, split: list[str], scatters: int, mesh8_auto: Mesh
) -> None:
    args = arguments(mesh8_auto)
    step = wus.shard_step(global_step, mesh=mesh8_auto, **options)
    found = run(step, args)
    mu = found[1][0].mu
    assert sorted(name for name, x in mu.items() if not x.is_fully_replicated) == split
    assert_close(step.unshard(found), run(jax.jit(global_step), args))
    kinds = [c.kind for c in collectives(step.lower(*args).compile().as_text())]
    assert kinds.count("reduce-scatter") == kinds.count("all-gather") == scatters


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_scattered_and_nothing_else_is_large(kind: str, mesh: Mesh) -> None:
    args = arguments(mesh)
    step = wus.shard_step(written(kind, mesh), mesh=mesh)
    found = collectives(step.lower(*args).compile().as_text())
    kinds = sorted(c.kind for c in found)
    assert kinds == ["all-gather", "all-reduce", "reduce-scatter"]
    for planned in step.plan.traffic:
        (real,) = [c for c in found if c.kind == planned.kind]
        assert real.operand_bytes == planned.operand_bytes


@pytest.mark.parametrize("formats", ["auto", "dim", "flat"])
def test_large_gradients_are_scattered_whatever_the_split(formats: Any, mesh: Mesh) -> None:
    """The gradient of `x @ w` is a transposed product: a split of `w` need not be one of that."""

    def step(w: jax.Array, state: Any, x: jax.Array) -> Any:
        grads = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        updates, state = TX.update(grads, state, w)
        return optax.apply_updates(w, updates), state

    rng = np.random.default_rng(0)
    w = jax.device_put(rng.normal(size=(85, 33)).astype(np.float32), NamedSharding(mesh, P()))
    x = rng.normal(size=(32, 85)).astype(np.float32)
    args = (w, TX.init(w), jax.device_put(x, NamedSharding(mesh, P("data"))))
    sharded = wus.shard_step(step, mesh=mesh, formats=formats)
    found = collectives(sharded.lower(*args).compile().as_text())
    assert sorted(c.kind for c in found) == ["all-gather", "reduce-scatter"]
    assert_close(sharded(*args)[0], jax.jit(step)(*args)[0])


def test_the_second_call_compiles_nothing_and_moves_nothing(mesh: Mesh) -> None:
    step = wus.shard_step(global_step, mesh=mesh)
    args = arguments(mesh)
    params, state, _ = run(step, args, turns=1)
    with jax.transfer_guard("disallow"), jax.log_compiles(False):
        params, state, _ = step(params, state, *args[2:])
        params, state, _ = step(params, state, *args[2:])
    assert step._last is not None
    assert step._last.fun._cache_size() == 1


def test_arguments_are_donated_as_the_user_said(mesh: Mesh) -> None:
    step = wus.shard_step(jax.jit(global_step, donate_argnums=(0, 1)), mesh=mesh)
    args = arguments(mesh)
    params, state, *batch = step.shard(*args)
    step(params, state, *batch)
    assert all(x.is_deleted() for x in jax.tree.leaves((params, state)))
    assert not any(x.is_deleted() for x in batch)


def test_copies_stacked_for_pmap_are_stored_once_and_checked(mesh8_auto: Mesh) -> None:
    params, state, x, y = jax.device_get(arguments(mesh8_auto))
    params, state = jax.tree.map(lambda v: np.stack([v] * 8), (params, state))
    args = (params, state, x.reshape(8, 4, 17), y.reshape(8, 4, 3))
    with_pmap = jax.pmap(replica_step, axis_name="data")
    step = wus.shard_step(with_pmap, mesh=mesh8_auto)
    new_params, new_state, loss = run(step, args)
    assert new_state[0].mu["w1"].addressable_shards[0].data.size == 34
    assert_close((new_params, step.unshard(new_state), loss), run(with_pmap, args))
    params["w2"][3, 0, 0] += 1.0
    with pytest.raises(wus.ReplicationError, match=r"\[0\]\['w2'\]: its copies differ"):
        wus.shard_step(with_pmap, mesh=mesh8_auto)(params, *args[1:])


@pytest.mark.parametrize("weights", ["whole", "split"])
@pytest.mark.parametrize("kind", [*KINDS, "loop inside of shard_map"])
def test_loops_over_steps_keep_state_split_in_the_carry(
    kind: str, weights: Any, mesh8_explicit: Mesh
) -> None:
    def loop(step: Callable[..., Any], params: Any, state: Any, xs: Any, ys: Any) -> Any:
        def turn(carry: Any, batch: Any) -> Any:
            params, state, loss = step(*carry, *batch)
            return (params, state), loss

        (params, state), losses = lax.scan(turn, (params, state), (xs, ys))
        return params, state, losses

    if kind == "loop inside of shard_map":
        many = jax.shard_map(
            functools.partial(loop, replica_step),
            mesh=mesh8_explicit,
            in_specs=(P(), P(), P(None, "data"), P(None, "data")),
            out_specs=P(),
            check_vma=False,
        )
    else:
        many = functools.partial(loop, written(kind, mesh8_explicit))
    params, state, x, y = arguments(mesh8_explicit)
    placed = NamedSharding(mesh8_explicit, P(None, "data"))
    batches = jax.device_put((jnp.stack([x, x + 1]), jnp.stack([y, y])), placed)
    args = (params, state, *batches)
    step = wus.shard_step(many, mesh=mesh8_explicit, weights=weights)
    found = run(step, args)
    assert found[1][0].mu["w1"].addressable_shards[0].data.size == 34
    assert_close(step.unshard(found), run(jax.jit(many), args))
    looped = [c for c in collectives(step.lower(*args).compile().as_text()) if c.in_loop]
    assert sorted(c.kind for c in looped if c.operand_bytes > 8) == ["all-gather", "reduce-scatter"]


def test_conversions_compile_once_for_arrays_of_one_form(mesh8_auto: Mesh) -> None:
    args = arguments(mesh8_auto)
    step = wus.shard_step(global_step, mesh=mesh8_auto)
    stored = step.shard(*args)
    step.unshard(stored)
    before = converter.cache_info()
    again = step.shard(*args)
    step.unshard(again)
    assert converter.cache_info().misses == before.misses
    assert_close(again, stored, 0.0)


def test_a_value_of_one_replica_is_not_taken_for_replicated(mesh8_explicit: Mesh) -> None:
    def noisy(params: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
        params, state, loss = replica_step(params, state, x, y)
        noise = lax.axis_index("data").astype(jnp.float32)
        return jax.tree.map(lambda p: p + noise, params), state, loss

    step = in_shard_map(mesh8_explicit, noisy)
    with pytest.raises(wus.ReplicationError, match="may differ between replicas"):
        wus.shard_step(step, mesh=mesh8_explicit)(*arguments(mesh8_explicit))


def test_what_a_forgotten_reduction_makes_differ_is_named(mesh8_auto: Mesh) -> None:
    def forgetful(params: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        loss, grads["w1"], grads["w2"] = lax.pmean((loss, grads["w1"], grads["w2"]), "data")
        updates, state = TX.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    step = in_shard_map(mesh8_auto, forgetful)
    with pytest.raises(wus.ReplicationError) as refused:
        wus.shard_step(step, mesh=mesh8_auto)(*arguments(mesh8_auto))
    assert str(refused.value).startswith(
        "results [0]['b1'], [1][0].mu['b1'], [1][0].nu['b1']: declared equal over ['data'] by "
        "out_specs, but may differ"
    )


def accumulating(params: Any, state: Any, x: jax.Array, y: jax.Array, *, inside: bool) -> Any:
    """Two microbatches; the sum over replicas after the loop, or, by mistake, inside of it."""

    def turn(total: Any, batch: Any) -> tuple[Any, None]:
        found = jax.value_and_grad(loss_fn)(params, *batch)
        found = lax.pmean(found, "data") if inside else found
        return jax.tree.map(jnp.add, total, found), None

    start = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
    halves = (x.reshape(2, -1, x.shape[-1]), y.reshape(2, -1, y.shape[-1]))
    total, _ = lax.scan(turn, start, halves)
    loss, grads = total if inside else lax.pmean(total, "data")
    updates, state = TX.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


@pytest.mark.parametrize("accumulate", ["whole", "shards"])
@pytest.mark.parametrize("inside", [False, True])
def test_microbatches_are_scattered_once_or_add_up_shards(
    inside: bool, accumulate: Any, mesh8_auto: Mesh
) -> None:
    written = in_shard_map(mesh8_auto, functools.partial(accumulating, inside=inside))
    args = arguments(mesh8_auto)
    step = wus.shard_step(written, mesh=mesh8_auto, accumulate=accumulate)
    assert_close(step.unshard(run(step, args)), run(jax.jit(written), args))
    scattered = [
        c.in_loop
        for c in collectives(step.lower(*args).compile().as_text())
        if c.kind == "reduce-scatter"
    ]
    assert scattered == [inside and accumulate == "shards"]


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32"])
@pytest.mark.parametrize(("shape", "dim"), [((16, 3), 0), ((3, 24), 1), ((8,), 0)])
def test_a_tile_of_random_bits_is_that_of_the_whole(
    dtype: str, shape: tuple[int, ...], dim: int, mesh8_auto: Mesh
) -> None:
    key = jax.random.key(3)
    width = jnp.dtype(dtype).itemsize * 8
    tile = RandomTile(shape, width, dim, ("data",), 8)
    spec = P(*(None,) * dim, "data")
    tiles = jax.shard_map(
        lambda: tile.bind(key), mesh=mesh8_auto, in_specs=(), out_specs=spec, check_vma=False
    )
    np.testing.assert_array_equal(jax.jit(tiles)(), jax.random.bits(key, shape, dtype))


def stacked_loss(params: Any, x: jax.Array) -> jax.Array:
    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ w.astype(jnp.bfloat16)).astype(x.dtype), None

    out, _ = lax.scan(layer, x.astype(jnp.bfloat16), params["layers"])
    return jnp.mean(out.astype(jnp.float32) ** 2)


def stacked_step(params: Any, state: Any, x: jax.Array) -> Any:
    loss, grads = jax.value_and_grad(stacked_loss)(params, x)
    updates, state = TX.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


def test_layers_are_gathered_and_scattered_one_at_a_time(mesh8_auto: Mesh) -> None:
    rng = np.random.default_rng(0)
    params = {"layers": jnp.asarray(rng.normal(size=(3, 16, 16)), jnp.float32)}
    params = jax.device_put(params, NamedSharding(mesh8_auto, P()))
    x = jnp.asarray(rng.normal(size=(32, 16)), jnp.float32)
    args = (params, TX.init(params), jax.device_put(x, NamedSharding(mesh8_auto, P("data"))))
    step = wus.shard_step(stacked_step, mesh=mesh8_auto, weights="layers")
    found = run(step, args)
    assert found[0]["layers"].addressable_shards[0].data.size == 3 * 16 * 16 // 8
    assert_close(step.unshard(found), run(jax.jit(stacked_step), args), 2e-3)  # bf16 products
    large = [c for c in collectives(step.lower(*args).compile().as_text()) if c.operand_bytes > 8]
    assert all(c.in_loop for c in large)
    assert {c.kind for c in large} == {"all-gather", "reduce-scatter"}
    assert max(c.result_bytes for c in large) <= 16 * 16 * 4  # never more than a layer


@pytest.mark.parametrize(
    "formats",
    ["auto", "flat", *(pytest.param(f, marks=pytest.mark.slow) for f in ("dim", "merged"))],
)
def test_layers_of_odd_sizes_are_gathered_one_at_a_time_whatever_the_split(
    formats: Any, mesh8_auto: Mesh
) -> None:
    """A split that merges dims merges those of a layer; a number a layer goes as it can."""

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
            return jnp.tanh(x @ p["up"]) @ p["down"] * p["scale"], None

        return jnp.mean(lax.scan(layer, x, params)[0] ** 2)

    def step(params: Any, state: Any, x: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, x)
        updates, state = TX.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    shapes = {"up": (3, 17, 13), "down": (3, 13, 17), "scale": (3,)}
    params = {name: jnp.asarray(leaf(*shape)) for name, shape in shapes.items()}
    params = jax.device_put(params, NamedSharding(mesh8_auto, P()))
    x = jax.device_put(leaf(32, 17), NamedSharding(mesh8_auto, P("data")))
    args = (params, TX.init(params), x)
    sharded = wus.shard_step(step, mesh=mesh8_auto, weights="layers", formats=formats)
    assert_close(sharded.unshard(run(sharded, args)), run(jax.jit(step), args))
    large = [c for c in hlo_of(sharded, *args) if c.operand_bytes > 8 * 4]
    assert {c.kind for c in large if c.in_loop} == {"all-gather", "reduce-scatter"}
    assert [c.kind for c in large if not c.in_loop] == []


def test_gradients_travel_in_a_shorter_dtype(mesh8_auto: Mesh) -> None:
    args = arguments(mesh8_auto)
    wanted = run(jax.jit(global_step), args, turns=1)
    step = wus.shard_step(global_step, mesh=mesh8_auto, scatter_dtype=jnp.bfloat16)
    _, state, _ = run(step, args, turns=1)
    mu, nu = (jax.tree.map(np.asarray, step.unshard(t[0].mu)) for t in (state, wanted[1]))
    error = max(np.max(np.abs(a - b)) for a, b in zip(*map(jax.tree.leaves, (mu, nu)), strict=True))
    assert 0 < error < 1e-2
    row = next(t for t in step.plan.traffic if t.kind == "reduce-scatter")
    plain = wus.shard_step(global_step, mesh=mesh8_auto).plan_for(*args).traffic
    assert row.operand_bytes * 2 == next(
        t.operand_bytes for t in plain if t.kind == "reduce-scatter"
    )


def test_the_loss_falls_as_with_sums_in_float32(mesh8_auto: Mesh) -> None:
    args = arguments(mesh8_auto)
    curves = []
    for dtype in (None, jnp.bfloat16):
        step = wus.shard_step(global_step, mesh=mesh8_auto, scatter_dtype=dtype)
        params, state, *batch = args
        losses = []
        for _ in range(100):
            params, state, loss = step(params, state, *batch)
            losses.append(loss)
        curves.append(np.asarray(jax.device_get(losses)))
    wide, short = curves
    assert wide[-1] < 0.2 * wide[0]
    assert 0 < np.max(np.abs(short - wide)) < 0.02 * wide[0]


def test_what_cannot_be_sharded_is_refused_or_runs_as_written(mesh8_auto: Mesh) -> None:
    params, state, x, y = arguments(mesh8_auto)
    whole = jax.device_put((x, y), NamedSharding(mesh8_auto, P()))
    with pytest.raises(wus.UnsupportedStepError, match="no argument is split over it"):
        wus.shard_step(global_step, mesh=mesh8_auto)(params, state, *whole)

    def regrouped(params: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
        return global_step(params, state, x.reshape(2, 16, -1)[0], y.reshape(2, 16, -1)[0])

    with pytest.raises(wus.UnsupportedStepError, match=r"reshape at .*test_step.py:\d+"):
        wus.shard_step(regrouped, mesh=mesh8_auto)(params, state, x, y)
    with pytest.raises(wus.UnsupportedStepError, match="no weights or state were found"):
        wus.shard_step(loss_fn, mesh=mesh8_auto)(params, x, y)
    step = wus.shard_step(global_step, mesh=mesh8_auto, on_unsupported="warn")
    with pytest.warns(wus.UnsupportedStepWarning, match="no argument is split over it"):
        found = step(params, state, *whole)
    assert_close(found, jax.jit(global_step)(params, state, *whole))
    assert_close(step(params, state, *whole), found)


@pytest.mark.parametrize("weights", ["whole", "split"])
def test_shards_along_torus_lines_keep_their_own_order(weights: Any, mesh: Mesh) -> None:
    args = arguments(mesh)
    lines = {"data": (((6, 1, 0, 3), (2, 5, 4, 7)), ((6, 2), (1, 5), (0, 4), (3, 7)))}
    step = wus.shard_step(global_step, mesh=mesh, weights=weights, lines=lines)
    found = run(step, args)
    assert_close(step.unshard(found), run(jax.jit(global_step), args))
    assert_close(step.unshard(step.shard(*args)[:2]), args[:2])
    sizes = [len(c.groups[0]) for c in collectives(step.lower(*args).compile().as_text())]
    assert sorted(sizes) == [2, 2, 4, 4, 8]


@pytest.mark.parametrize("weights", ["whole", "split"])
def test_nothing_communicates_where_replicas_choose_differently(
    weights: Any, mesh8_auto: Mesh
) -> None:
    def ragged_loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        turns, scale = lax.while_loop(
            lambda c: c[1] < jnp.abs(lax.stop_gradient(x)).max(),
            lambda c: (c[0] + 1, c[1] + jnp.exp(-(lax.stop_gradient(params["w2"]) ** 2)).sum()),
            (0, 0.0),
        )
        del turns
        half = lax.cond(x[0, 0] > 0, lambda p: p["w2"].sum(), lambda p: -p["w2"].sum(), params)
        return loss_fn(params, x, y) + 0.01 * half / (1 + scale)

    def ragged(params: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
        loss, grads = lax.pmean(jax.value_and_grad(ragged_loss)(params, x, y), "data")
        updates, state = TX.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    written = in_shard_map(mesh8_auto, ragged)
    args = arguments(mesh8_auto)
    step = wus.shard_step(written, mesh=mesh8_auto, weights=weights)
    assert_close(step.unshard(run(step, args)), run(jax.jit(written), args))


def test_is_called_by_name_and_inside_of_jit(mesh8_auto: Mesh) -> None:
    params, state, x, y = arguments(mesh8_auto)
    step = wus.shard_step(global_step, mesh=mesh8_auto)
    wanted = step(params, state, x, y)
    assert_close(step(params, state, y=y, x=x), wanted)
    mapped = wus.shard_step(in_shard_map(mesh8_auto, check_vma=False), mesh=mesh8_auto)

    @jax.jit
    def outer(params: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
        return mapped(*mapped(params, state, x, y)[:2], x, y)

    assert_close(mapped.unshard(outer(params, state, x, y)), step.unshard(step(*wanted[:2], x, y)))

    def named(params: Any, state: Any, x: jax.Array, *, y: jax.Array) -> Any:
        return global_step(params, state, x, y)

    with pytest.raises(TypeError, match="y: a keyword-only argument"):
        wus.shard_step(named, mesh=mesh8_auto)(params, state, x, y=y)


def _turn(carry: Any) -> Any:
    return carry[0] + 1, carry[1] * 1.3


ALONG_THE_BATCH: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "picked by an iota": lambda h, y: jax.nn.log_softmax(h)[jnp.arange(h.shape[0]), y].mean(),
    "a mask of padding": lambda h, y: jnp.where(
        jnp.arange(h.shape[0]) < 13, (h**2).sum(1), 0
    ).sum(),
    "weights in a row": lambda h, y: (h**2).sum(1) @ jnp.linspace(0.0, 1.0, h.shape[0]),
    "negatives in the batch": lambda h, y: optax.softmax_cross_entropy(
        h @ h.T, jnp.eye(h.shape[0])
    ).mean(),
    "a triangle": lambda h, y: jnp.triu(h @ h.T).sum(),
    "rows and columns in one": lambda h, y: (h.reshape(-1) * jnp.arange(h.size)).mean(),
    "cumsum": lambda h, y: (jnp.cumsum(h, 0) ** 2).mean(),
    "sort": lambda h, y: (jnp.sort(h, 0) ** 2 * jnp.arange(h.shape[0])[:, None]).mean(),
    "reversed": lambda h, y: (h[::-1] * jnp.arange(h.shape[0])[:, None]).mean(),
    "the largest": lambda h, y: (h[h[:, 0].argmax()] ** 2).sum(),
    "shifted": lambda h, y: (jnp.diff(h, axis=0) ** 2).mean(),
    "padded": lambda h, y: (jnp.pad(h, ((1, 1), (0, 0))) ** 3).mean(),
    "rolled": lambda h, y: (jnp.roll(h, 1, 0) * h).mean(),
    "loops of their own length": lambda h, y: (
        jax.vmap(lambda n: lax.while_loop(lambda c: c[0] < n, _turn, (0, 1.0)))(y)[1][:, None] * h
    ).mean(),
    "a scan over it": lambda h, y: lax.scan(lambda c, row: (0.9 * c + row, c), h[0], h)[1].var(),
}


@pytest.mark.parametrize("name", ALONG_THE_BATCH)
def test_operations_along_the_batch_are_those_of_the_whole(name: str, mesh8_auto: Mesh) -> None:
    rng = np.random.default_rng(3)
    params = {"w": jnp.asarray(rng.normal(size=(6, 16)), jnp.float32) / 4}
    params = jax.device_put(params, NamedSharding(mesh8_auto, P()))
    x = jnp.asarray(rng.normal(size=(16, 6)), jnp.float32)
    batch = jax.device_put((x, jnp.arange(16) % 5), NamedSharding(mesh8_auto, P("data")))
    sgd = optax.sgd(0.1, momentum=0.9)

    def written(params: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            h = jnp.tanh(x @ p["w"])
            return ALONG_THE_BATCH[name](h, y) + (h**2).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = sgd.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    args = (params, sgd.init(params), *batch)
    step = wus.shard_step(written, mesh=mesh8_auto)
    found = step.unshard(step(*args))
    assert_close(found, jax.jit(written)(*args), 1e-5)


WHOLE_BATCH = {
    "scan": (
        lambda p, x: lax.map(lambda row: jnp.tanh(row @ p).sum(), x).mean(),
        "jax.vmap",
    ),
    "dynamic_slice": (
        lambda p, x: lax.fori_loop(0, 16, lambda i, c: c + jnp.tanh(x[i] @ p).sum(), 0.0),
        "jax.vmap",
    ),
    "concatenate": (
        lambda p, x: jnp.tanh(jnp.concatenate([x, -x]) @ p).mean(),
        r"jnp.stack\(parts, 1\)",
    ),
    "reshape": (
        lambda p, x: jnp.tanh(x.reshape(2, 8, 6) @ p).mean(),
        r"take \[rows, microbatches, ...\]",
    ),
}


@pytest.mark.parametrize("op", WHOLE_BATCH)
def test_what_needs_the_whole_batch_is_named(op: str, mesh8_auto: Mesh) -> None:
    loss, remedy = WHOLE_BATCH[op]
    rows = NamedSharding(mesh8_auto, P("data"))
    x = jax.device_put(jnp.ones((16, 6)), rows)

    def written(p: jax.Array, x: jax.Array) -> jax.Array:
        return p - 0.1 * jax.grad(loss)(p, x)

    step = wus.shard_step(written, mesh=mesh8_auto)
    with pytest.raises(wus.UnsupportedStepError, match=rf"{op} at .*test_step.py.*{remedy}"):
        step.plan_for(jnp.ones((6, 16)), x)
