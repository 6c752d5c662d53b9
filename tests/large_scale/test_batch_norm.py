"""Batch norm over groups of replicas: the reference's numbers, gradients, and collectives."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from large_scale.hlo import collectives
from large_scale.norm import Moments, batch_moments, batch_norm, merged
from tests.large_scale import training
from tests.runs import mesh_of, of_kind, relative_error

Tree = Any

BATCH, WIDTH, CHANNELS = 24, 5, 3
MESH = {"data": 8}


@functools.cache
def image() -> np.ndarray:
    rng = np.random.default_rng(4)
    x = rng.normal(size=(BATCH, WIDTH, CHANNELS)) * (1 + np.arange(BATCH)[:, None, None])
    return (x + np.arange(CHANNELS)).astype(np.float32)


SCALE, BIAS = np.array([1, 2, -1], np.float32), np.array([3, 0, 1], np.float32)


def reference(x: jax.Array, scale: jax.Array, bias: jax.Array, size: int) -> jax.Array:
    """Groups of `size` of 8 replicas, with two passes over each group's examples."""
    parts = []
    for part in jnp.split(x, 8 // size):
        mean = part.mean((0, 1))
        var = ((part - mean) ** 2).mean((0, 1))
        parts.append((part - mean) / jnp.sqrt(var + 1e-5) * scale + bias)
    return jnp.concatenate(parts)


def weighted(y: jax.Array) -> jax.Array:
    """A loss in which every element counts differently."""
    return jnp.sin(y) * (1 + jnp.arange(y.shape[-1]))


def on_mesh(size: int, check_vma: bool) -> Any:
    def f(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
        return weighted(batch_norm(x, scale, bias, axis="data", group_size=size)[0])

    return jax.shard_map(
        f,
        mesh=mesh_of(MESH, auto=True),
        in_specs=(P("data"), P(), P()),
        out_specs=P("data"),
        check_vma=check_vma,
    )


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("check_vma", [True, False])
def test_values_and_gradients_are_the_references(size, check_vma):
    args = (image(), SCALE, BIAS)
    ours = on_mesh(size, check_vma)
    theirs = lambda *a: weighted(reference(*a, size))  # noqa: E731
    assert relative_error(jax.jit(ours)(*args), theirs(*args)) <= 1e-5
    found, wanted = (
        jax.jit(jax.grad(lambda *a, f=f: f(*a).sum(), (0, 1, 2)))(*args) for f in (ours, theirs)
    )
    assert relative_error(found, wanted) <= 1e-4


def test_groups_differ():
    """Negative control: the group's size is not without effect."""
    whole, half = (reference(image(), SCALE, BIAS, size) for size in (8, 4))
    assert relative_error(half, whole) > 0.1


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_one_gather_of_two_numbers_a_channel(size):
    loss = lambda *a: on_mesh(size, True)(*a).sum()  # noqa: E731
    lowered = jax.jit(jax.value_and_grad(loss)).lower(image(), SCALE, BIAS)
    found = collectives(lowered.compile().as_text())
    gathers = of_kind(found, "all-gather")
    assert [c.operand_bytes for c in gathers] == ([2 * CHANNELS * 4] if size > 1 else [])
    assert all(c.group_size == size for c in gathers)
    assert all(set(g) == set(range(g[0], g[0] + size)) for c in gathers for g in c.groups)


def test_a_large_mean_costs_no_precision():
    far = image() + np.float32(20000)

    def f(x: jax.Array) -> jax.Array:
        return batch_moments(x, axis="data").var

    mapped = jax.shard_map(
        f, mesh=mesh_of(MESH, auto=True), in_specs=P("data"), out_specs=P("data")
    )
    found = np.asarray(mapped(far)).reshape(8, CHANNELS)
    wanted = np.var(far.astype(np.float64), axis=(0, 1))
    np.testing.assert_allclose(found, np.broadcast_to(wanted, found.shape), rtol=1e-4)


@pytest.mark.parametrize("size", [1, 2, 8])
def test_merged_moments_are_those_of_all_examples(size):
    def f(x: jax.Array) -> Moments:
        return merged(batch_moments(x, axis="data", group_size=size), "data")

    found = jax.shard_map(f, mesh=mesh_of(MESH, auto=True), in_specs=P("data"), out_specs=P())(
        image()
    )
    wanted = batch_moments(jnp.asarray(image()))
    assert relative_error(found, wanted) <= 1e-5
    assert relative_error(merged(batch_moments(image(), groups=8 // size)), wanted) <= 1e-5


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_global_arrays_have_the_same_groups(size):
    """And the compiler reduces within them."""
    mesh = mesh_of(MESH, auto=True)
    x = training.placed(image(), P("data"), mesh)
    f = jax.jit(lambda x: batch_norm(x, SCALE, BIAS, groups=8 // size)[0])
    compiled = f.lower(x).compile()
    assert relative_error(compiled(x), reference(image(), SCALE, BIAS, size)) <= 1e-5
    sums = of_kind(collectives(compiled.as_text()), "all-reduce")
    assert {c.group_size for c in sums} == ({size} if size > 1 else set())


def test_epsilon_is_added_to_the_variance():
    x = jnp.asarray(image())
    y, moments = batch_norm(x, jnp.asarray(SCALE), jnp.asarray(BIAS), epsilon=0.5)
    wanted = (x - moments.mean) / jnp.sqrt(moments.var + 0.5) * SCALE + BIAS
    np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-6)


def test_low_precision_is_normalized_in_float32():
    x = jnp.asarray(image(), jnp.bfloat16)
    y, moments = batch_norm(x, jnp.asarray(SCALE), jnp.asarray(BIAS))
    assert y.dtype == jnp.bfloat16
    assert moments.mean.dtype == moments.var.dtype == jnp.float32


# ---------------------------------------------------------------------------------- in training


def weights() -> Tree:
    rng = np.random.default_rng(9)
    shapes = {"in": (3, 3, 3, 6), "out": (6, 4)}
    made = {k: (rng.normal(size=s) / 4).astype(np.float32) for k, s in shapes.items()}
    return {**made, "scale": np.ones(6, np.float32), "bias": np.zeros(6, np.float32)}


def loss(params: Tree, batch: Tree, norm: Any) -> jax.Array:
    x = jax.lax.conv_general_dilated(
        batch["x"], params["in"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    x = jax.nn.relu(norm(x, params["scale"], params["bias"]))
    x = x.mean((1, 2)) @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(x, batch["y"]).mean()


def reference_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    """Four groups of two replicas each."""
    parts = [
        (part - part.mean((0, 1, 2))) / jnp.sqrt(part.var((0, 1, 2)) + 1e-5)
        for part in jnp.split(x, 4)
    ]
    return jnp.concatenate(parts) * scale + bias


def test_five_steps_with_groups_of_two_equal_one_device():
    rng = np.random.default_rng(10)
    batches = [
        {
            "x": rng.normal(size=(16, 6, 5, 3)).astype(np.float32),
            "y": rng.integers(0, 4, 16).astype(np.int32),
        }
        for _ in range(5)
    ]
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.lars(0.05))
    wanted = training.on_one_device(
        functools.partial(loss, norm=reference_norm), weights(), batches, optimizer
    )
    grouped = lambda x, s, b: batch_norm(x, s, b, axis="data", group_size=2)[0]  # noqa: E731
    found = training.Setup(
        functools.partial(loss, norm=grouped),
        weights(),
        jax.tree.map(lambda _: P(), weights()),
        batches,
        P("data"),
        optimizer,
        mesh_of(MESH),
    ).by_hand()
    assert found.error(wanted) <= 1e-5
    assert of_kind(found.collectives, "reduce-scatter")


# ----------------------------------------------------------------------------------- bad input


def test_groups_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=re.escape("group_size=3: axis 'data' has 8 replicas")):
        on_mesh(3, True)(image(), SCALE, BIAS)
    with pytest.raises(ValueError, match=re.escape("groups=7: a batch of 24")):
        batch_norm(image(), SCALE, BIAS, groups=7)
    with pytest.raises(ValueError, match=re.escape("group_size=: needs axis=")):
        batch_norm(image(), SCALE, BIAS, group_size=2)
    with pytest.raises(ValueError, match=re.escape("groups=: for global arrays")):
        batch_norm(image(), SCALE, BIAS, axis="data", groups=2)


def test_arrays_that_do_not_fit_are_named():
    with pytest.raises(TypeError, match=re.escape("x: found int32, need floats")):
        batch_norm(image().astype(jnp.int32), SCALE, BIAS)
    for given in ((SCALE[:-1], BIAS), (SCALE, BIAS[:1])):
        with pytest.raises(ValueError, match="need one number for each of the"):
            batch_norm(image(), *given)
