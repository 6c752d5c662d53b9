"""Findings: each on a step that has the fault, and on one that has not."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import wusharding as wus
from large_scale.hlo import collectives
from wusharding.analysis.findings import Finding

N = 8
MESH = AbstractMesh((N,), ("data",), axis_types=(AxisType.Explicit,))
TX = optax.adam(1e-2)
BF16 = jnp.bfloat16
Step = Callable[..., Any]


def shape(dims: tuple[int, ...], spec: P, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(MESH, spec))


W = shape((17, 16), P())  # 1,088 bytes
STATE = jax.tree.map(lambda x: shape(x.shape, P(), x.dtype), jax.eval_shape(TX.init, W))
BATCH = shape((32, 17), P("data"))
MICROBATCHES = shape((2, 32, 17), P(None, "data"))


def loss(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean((x @ w) ** 2)


def half_loss(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean((x.astype(BF16) @ w.astype(BF16)).astype(jnp.float32) ** 2)


def update(grad: jax.Array, state: Any, w: jax.Array) -> tuple[jax.Array, Any]:
    updates, state = TX.update(grad, state, w)
    return optax.apply_updates(w, updates), state


def step_of(gradient: Step, *, check_vma: bool, mesh: Any = MESH) -> Step:
    """A step in `shard_map` whose gradient each replica makes so."""
    return jax.shard_map(
        lambda w, state, x: update(gradient(w, x), state, w),
        mesh=mesh,
        in_specs=(P(), P(), P("data")),
        out_specs=P(),
        check_vma=check_vma,
    )


def mean_gradient(w: jax.Array, x: jax.Array) -> jax.Array:
    return lax.pmean(jax.grad(loss)(w, x), "data")


def found(code: str, step: Step, *args: Any, **options: Any) -> list[Finding]:
    plan = wus.analyze(step, *(args or (W, STATE, BATCH)), **options)
    assert all(f.code in str(plan) and f.code in plan.to_json() for f in plan.findings)
    return [f for f in plan.findings if f.code == code]


def test_a_step_without_faults_has_no_findings_but_the_replicated_state() -> None:
    clean = step_of(mean_gradient, check_vma=False)
    plan = wus.analyze(clean, W, STATE, BATCH, donate_argnums=(0, 1))
    assert [f.code for f in plan.findings] == ["replicated-state"]


# ------------------------------------------------------------------------------------ sum-of-equals


def test_a_gradient_that_differentiation_has_summed_is_summed_again() -> None:
    (f,) = found("sum-of-equals", step_of(mean_gradient, check_vma=True))
    assert "8 times their mean" in f.what
    assert "(loss)" in f.what  # the first sum
    assert "(mean_gradient)" in f.where
    assert f.moved_bytes == 17 * 16 * 4


def test_its_traffic_is_that_of_the_hlo(mesh8_explicit: Any) -> None:
    def on_devices(x: Any) -> Any:
        return jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh8_explicit, x.sharding.spec)
        )

    step = step_of(mean_gradient, check_vma=True, mesh=mesh8_explicit)
    args = jax.tree.map(on_devices, (W, STATE, BATCH))
    sharded = wus.shard_step(step, mesh=mesh8_explicit)
    plan = sharded.plan_for(*args)
    written = collectives(jax.jit(step).lower(*args).compile().as_text())
    assert sum(t.operand_bytes for t in plan.before) == sum(c.operand_bytes for c in written)
    found = collectives(sharded.lower(*args).compile().as_text())
    assert sorted(c.kind for c in found) == ["all-gather", "reduce-scatter"]


def test_what_it_says_of_the_numbers_is_so(mesh8_explicit: Any) -> None:
    def gradient(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.shard_map(
            mean_gradient, mesh=mesh8_explicit, in_specs=(P(), P("data")), out_specs=P()
        )(w, x)

    w = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)), jnp.float32)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(16, 5)), jnp.float32)
    wrong = gradient(w, jax.device_put(x, NamedSharding(mesh8_explicit, P("data"))))
    np.testing.assert_allclose(np.asarray(wrong), N * np.asarray(jax.grad(loss)(w, x)), rtol=1e-5)


@pytest.mark.parametrize(
    ("gradient", "effect"),
    [
        (lambda w, x: lax.psum(lax.pmean(jax.grad(loss)(w, x), "data"), "data"), "multiplies"),
        (lambda w, x: lax.pmean(mean_gradient(w, x), "data"), "changes nothing"),
        (lambda w, x: lax.pmean(jnp.clip(mean_gradient(w, x), -1, 1), "data"), "changes nothing"),
        (lambda w, x: mean_gradient(lax.pmean(w, "data"), x), "changes nothing"),
        (
            lambda w, x: lax.pmean(lax.psum(jax.grad(loss)(w, x), "data"), "data"),
            "8 times their mean",
        ),
        (lambda w, x: lax.psum(lax.psum(jax.grad(loss)(w, x), "data") / N, "data"), "multiplies"),
    ],
)
def test_sums_by_hand(gradient: Step, effect: str) -> None:
    (f,) = found("sum-of-equals", step_of(gradient, check_vma=False))
    assert effect in f.what
    assert f.moved_bytes == W.size * 4


@pytest.mark.parametrize(
    ("gradient", "check_vma"),
    [
        (mean_gradient, False),
        (lambda w, x: mean_gradient(lax.pcast(w, "data", to="varying"), x), True),
        (lambda w, x: jax.grad(loss)(w, x) / N, True),
        # replicas are counted so
        (
            lambda w, x: lax.psum(jax.grad(loss)(w, x), "data") / lax.psum(jnp.ones(()), "data"),
            False,
        ),
    ],
)
def test_gradients_summed_once(gradient: Step, check_vma: bool) -> None:
    assert not found("sum-of-equals", step_of(gradient, check_vma=check_vma))


# -------------------------------------------------------------------------------------- sum-in-loop


def accumulated(w: jax.Array, x: jax.Array, inner: Step, *, of: int = 2) -> jax.Array:
    microbatches = x.reshape(of, -1, x.shape[-1])
    start = jnp.zeros_like(w)
    return lax.scan(lambda acc, xs: (acc + inner(w, xs), None), start, microbatches)[0]


@pytest.mark.parametrize(
    ("inner", "check_vma"),
    [(jax.grad(loss), True), (mean_gradient, False), (lambda w, x: mean_gradient(w, x) / 2, False)],
)
def test_a_sum_at_every_microbatch(inner: Step, check_vma: bool) -> None:
    step = step_of(lambda w, x: accumulated(w, x, inner, of=4), check_vma=check_vma)
    (f,) = found("sum-in-loop", step)
    assert "4 times" in f.what
    assert f.moved_bytes == 3 * W.size * 4
    scatters = [t for t in wus.analyze(step, W, STATE, BATCH).traffic if "reduce" in t.kind]
    assert f.mended == (sum(t.operand_bytes for t in scatters) == W.size * 4)


def test_a_sum_at_every_microbatch_of_a_global_view_step() -> None:
    def step(w: jax.Array, state: Any, x: jax.Array) -> Any:
        def body(acc: jax.Array, xs: jax.Array) -> Any:
            return acc + jax.grad(loss)(w, xs), None

        return update(lax.scan(body, jnp.zeros_like(w), x)[0], state, w)

    (f,) = found("sum-in-loop", step, W, STATE, MICROBATCHES)
    assert f.moved_bytes == W.size * 4


def test_a_sum_after_the_loop() -> None:
    step = step_of(
        lambda w, x: lax.pmean(accumulated(w, x, jax.grad(loss)), "data"), check_vma=False
    )
    assert not found("sum-in-loop", step)


def test_a_loop_over_steps_is_not_one_over_microbatches() -> None:
    def steps(w: jax.Array, state: Any, x: jax.Array) -> Any:
        def body(carry: Any, xs: jax.Array) -> Any:
            w, state = carry
            return update(mean_gradient(w, xs), state, w), None

        return lax.scan(body, (w, state), x.reshape(2, -1, x.shape[-1]))[0]

    specs = (P(), P(), P("data"))
    step = jax.shard_map(steps, mesh=MESH, in_specs=specs, out_specs=P(), check_vma=False)
    assert not found("sum-in-loop", step)


# -------------------------------------------------------------------- replicated-state, whole-state


def test_replicated_state_and_what_sharding_saves() -> None:
    (f,) = found("replicated-state", step_of(mean_gradient, check_vma=False))
    assert f.mended
    assert f.held_bytes == 2 * W.size * 4 * (N - 1) // N
    assert ".py:" in f.where


def test_no_state() -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return w - 0.1 * jax.grad(loss)(w, x)

    assert not found("replicated-state", step, W, BATCH)
    assert not found("whole-state", step, W, BATCH)


def test_state_that_stays_whole_is_named() -> None:
    def step(w: jax.Array, state: Any, seen: jax.Array, x: jax.Array) -> Any:
        return *update(jax.grad(loss)(w, x), state, w), 0.9 * seen + jnp.mean(x, axis=0)

    (f,) = found("whole-state", step, W, STATE, shape((17,), P()), BATCH)
    assert "[2]" in f.what
    assert "mu" not in f.what
    assert not found("whole-state", step_of(mean_gradient, check_vma=False))


# ---------------------------------------------------------------------------- wide-sum, wide-gather


def test_a_gradient_of_16_bits_is_summed_in_32() -> None:
    step = step_of(lambda w, x: lax.pmean(jax.grad(half_loss)(w, x), "data"), check_vma=False)
    (f,) = found("wide-sum", step)
    assert f.moved_bytes == W.size * 2
    assert not f.mended
    (f,) = found("wide-sum", step, scatter_dtype=BF16)
    assert f.mended
    plan = wus.analyze(step, W, STATE, BATCH, scatter_dtype=BF16)
    (row,) = [t for t in plan.traffic if t.kind == "reduce-scatter"]
    assert row.operand_bytes == W.size * 2


@pytest.mark.parametrize(
    "gradient",
    [
        mean_gradient,
        lambda w, x: lax.pmean(jax.grad(half_loss)(w.astype(BF16), x), "data").astype(jnp.float32),
    ],
)
def test_sums_as_wide_as_what_they_sum(gradient: Step) -> None:
    assert not found("wide-sum", step_of(gradient, check_vma=False))


def test_weights_that_are_read_in_16_bits_are_gathered_in_32() -> None:
    step = step_of(lambda w, x: lax.pmean(jax.grad(half_loss)(w, x), "data"), check_vma=False)
    (f,) = found("wide-gather", step)
    assert f.moved_bytes == W.size // N * 2
    assert not found("wide-gather", step, weights="split")


def test_weights_that_are_also_read_in_32_bits() -> None:
    both = jax.grad(lambda w, x: half_loss(w, x) + loss(w, x))
    step = step_of(lambda w, x: lax.pmean(both(w, x), "data"), check_vma=False)
    assert not found("wide-gather", step)
    assert not found("wide-sum", step)


# -------------------------------------------------------------------------------------- not-donated


def test_donation() -> None:
    step = step_of(mean_gradient, check_vma=False)
    (f,) = found("not-donated", step)
    assert "donate_argnums=(0, 1)" in f.remedy
    assert f.held_bytes >= W.size * 4 + 2 * W.size * 4 // N
    (f,) = found("not-donated", jax.jit(step, donate_argnums=0))
    assert f.where == "argument 1"
    assert not found("not-donated", jax.jit(step, donate_argnums=(0, 1)))
    assert not found("not-donated", step, donate_argnums=(0, 1))


# ------------------------------------------------------------------------------------ not-scattered


@pytest.mark.parametrize(("formats", "times"), [("flat", 1), ("dim", 0)])
def test_a_split_that_cannot_be_followed_back_to_the_sum(formats: str, times: int) -> None:
    def gradient(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.clip(mean_gradient(w.T, x), -1, 1).T

    w = shape((16, 17), P())
    args = (w, jax.eval_shape(TX.init, w), BATCH)
    faults = found("not-scattered", step_of(gradient, check_vma=False), *args, formats=formats)
    assert len(faults) == times
    assert all(f.moved_bytes == w.size * 4 for f in faults)
    assert all("(mean_gradient)" in f.where for f in faults)


@pytest.mark.parametrize("formats", ["flat", "dim"])
def test_gradients_are_called_scattered_where_the_plan_scatters_them(formats: str) -> None:
    def step(w: jax.Array, state: Any, x: jax.Array) -> Any:
        return update(jax.grad(loss)(w, x), state, w)

    w, x = shape((170, 160), P()), shape((32, 170), P("data"))
    plan = wus.analyze(step, w, jax.eval_shape(TX.init, w), x, formats=formats)
    whole = sum(t.operand_bytes for t in plan.traffic if t.kind == "all-reduce")
    assert sum(f.moved_bytes for f in plan.findings if f.code == "not-scattered") == whole


def test_statistics_of_the_batch_are_no_gradients() -> None:
    def gradient(w: jax.Array, x: jax.Array) -> jax.Array:
        def normed_loss(w: jax.Array) -> jax.Array:
            centred = x - lax.pmean(jnp.mean(x, axis=0), "data")
            return jnp.mean((centred * w) ** 2)

        return lax.pmean(jax.grad(normed_loss)(w), "data")

    w = shape((17,), P())
    step = step_of(gradient, check_vma=False)
    assert not found("not-scattered", step, w, jax.eval_shape(TX.init, w), BATCH)


def test_statistics_of_the_update_are_no_gradients() -> None:
    tx = optax.adafactor(1e-2, min_dim_size_to_factor=8)

    def step(params: Any, state: Any, x: jax.Array) -> Any:
        grads = jax.grad(lambda p: jnp.mean((x @ p["w"] + p["b"]) ** 2))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    # The statistics of columns are as large as the bias.
    params = {"w": shape((17, 33), P()), "b": shape((33,), P())}
    assert not found("not-scattered", step, params, jax.eval_shape(tx.init, params), BATCH)


@pytest.mark.parametrize(("accumulate", "times"), [("shards", 1), ("whole", 0)])
def test_parts_of_a_gradient_that_a_loop_sums(accumulate: Any, times: int) -> None:
    def chunked(w: jax.Array, x: jax.Array) -> jax.Array:
        def body(total: jax.Array, i: jax.Array) -> Any:
            return total + jnp.sum(jnp.tanh(x @ lax.dynamic_slice_in_dim(w, 4 * i, 4).T)), None

        return lax.scan(body, jnp.zeros(()), jnp.arange(4))[0]

    def step(w: jax.Array, state: Any, x: jax.Array) -> Any:
        return update(jax.grad(chunked)(w, x), state, w)

    w = shape((16, 17), P())
    args = (w, jax.eval_shape(TX.init, w), BATCH)
    faults = found("not-scattered", step, *args, accumulate=accumulate)
    assert len(faults) == times
    assert all(f.moved_bytes == w.size * 4 and "gradient of [0]" in f.what for f in faults)


# ------------------------------------------------------------------------------------- needed-whole


@pytest.mark.parametrize(
    ("metric", "what", "where"),
    [
        (lambda g: g, "A gradient", "output [2]"),
        (lambda g: jnp.sort(g.ravel())[9], "A gradient", ".py:"),
        (jnp.median, "Something made of a gradient", ".py:"),
    ],
)
def test_a_gradient_that_a_metric_needs_whole(metric: Step, what: str, where: str) -> None:
    (f,) = found("needed-whole", with_metric(metric))
    assert what in f.what
    assert f.moved_bytes >= W.size * 4 // N
    assert where in f.where


def with_metric(metric: Step) -> Step:
    def step(w: jax.Array, state: Any, x: jax.Array) -> Any:
        grad = mean_gradient(w, x)
        return *update(grad, state, w), metric(grad)

    specs = (P(), P(), P("data"))
    return jax.shard_map(step, mesh=MESH, in_specs=specs, out_specs=P(), check_vma=False)


@pytest.mark.parametrize("metric", [jnp.linalg.norm, lambda g: jnp.max(jnp.abs(g))])
def test_a_metric_of_pieces(metric: Step) -> None:
    assert not found("needed-whole", with_metric(metric))
