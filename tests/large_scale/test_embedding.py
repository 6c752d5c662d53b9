"""An embedding whose rows are split over a `model` axis: looked up, and multiplied by, in place."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import wusharding as wus
from large_scale.hlo import Collective, collectives
from tests.large_scale import megatron, training
from tests.runs import groups_of, mesh_of

Tree = Any

VOCAB, WIDTH, BATCH, LENGTH = 204, 6, 8, 5
SPECS = {"rows": P("model"), "mix": P()}


@functools.cache
def weights() -> Tree:
    rng = np.random.default_rng(7)
    shapes = {"rows": (VOCAB, WIDTH), "mix": (WIDTH, WIDTH)}
    return {k: (rng.normal(size=s) / 2).astype(np.float32) for k, s in shapes.items()}


@functools.cache
def batches() -> list[np.ndarray]:
    rng = np.random.default_rng(8)
    return [rng.integers(0, VOCAB, (BATCH, LENGTH + 1)).astype(np.int32) for _ in range(5)]


def optimizer() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(0.5), optax.lamb(0.02))


def loss(params: Tree, tokens: jax.Array) -> jax.Array:
    x = jnp.tanh(params["rows"][tokens[:, :-1]] @ params["mix"])
    odds = jax.nn.log_softmax(x @ params["rows"].T)
    return -jnp.mean(jnp.take_along_axis(odds, tokens[:, 1:, None], -1))


def split_loss(params: Tree, tokens: jax.Array) -> jax.Array:
    split, rows = megatron.over("model"), params["rows"]
    at = tokens[:, :-1] - split.index() * rows.shape[0]
    here = (at >= 0) & (at < rows.shape[0])
    found = jnp.where(here[..., None], rows[jnp.clip(at, 0, rows.shape[0] - 1)], 0)
    x = jnp.tanh(split.leave(found) @ params["mix"])
    return megatron.cross_entropy(rows, x, tokens[:, 1:], split)


@functools.cache
def reference() -> tuple[Tree, Tree]:
    return training.on_one_device(loss, weights(), batches(), optimizer())


def assert_only_rows_move(found, mesh):
    assert found.error(reference()) <= 1e-5
    moved = [c for c in found.collectives if groups_of(c) == training.along(mesh, "model")]
    assert {c.kind for c in moved} == {"all-reduce"}
    # The rows that were looked up, what comes back to them, and of each token the largest logit
    # and the sum of exponentials; the value of the loss itself is not asked for.
    numbers = BATCH // mesh.shape["data"] * LENGTH
    assert sum(c.operand_bytes for c in moved) == 4 * numbers * (2 * WIDTH + 2)


@pytest.mark.parametrize("shape", [{"data": 4, "model": 2}, {"data": 2, "model": 4}])
def test_rows_are_found_where_they_lie(shape):
    mesh = mesh_of(shape)
    found = training.Setup(
        split_loss, weights(), SPECS, batches(), P("data"), optimizer(), mesh
    ).by_hand()
    assert_only_rows_move(found, mesh)


def test_rows_split_by_the_compiler():
    mesh = mesh_of({"data": 4, "model": 2}, auto=True)
    found = training.Setup(
        loss, weights(), SPECS, batches(), P("data"), optimizer(), mesh
    ).by_compiler()
    assert found.error(reference()) <= 1e-5
    logits = 4 * BATCH // 4 * LENGTH * VOCAB // 2
    table = 4 * VOCAB * WIDTH // 2
    for c in found.collectives:
        if groups_of(c) == training.along(mesh, "model"):
            assert c.result_bytes < min(logits, table)


@pytest.mark.parametrize("shape", [{"data": 4, "model": 2}, {"data": 2, "model": 4}])
def test_a_whole_step_finds_rows_where_they_lie(shape):
    """Nothing says how, and what moves along `model` is what moves where it is written by hand."""
    mesh = mesh_of(shape, auto=True)
    found = training.Setup(
        loss, weights(), SPECS, batches(), P("data"), optimizer(), mesh
    ).by_step()
    assert_only_rows_move(found, mesh)


def looked_up(params: Tree, tokens: jax.Array) -> jax.Array:
    return jnp.mean(jnp.tanh(params["rows"][tokens] @ params["mix"]) ** 2)


def across_data(mix: P) -> list[Collective]:
    """Trains with a table that `model` splits by columns; what goes along `data`."""
    specs = {"rows": P(None, "model"), "mix": mix}
    mesh = mesh_of({"data": 4, "model": 2}, auto=True)
    found = training.Setup(
        looked_up, weights(), specs, batches(), P("data"), optimizer(), mesh
    ).by_step()
    wanted = training.on_one_device(looked_up, weights(), batches(), optimizer())
    assert found.error(wanted) <= 1e-5
    return [c for c in found.collectives if groups_of(c) == training.along(mesh, "data")]


@pytest.mark.parametrize(("columns", "times"), [(None, 0), ("model", 1)])
def test_a_gradient_that_is_made_in_other_tiles_than_its_weight_leaves_them(columns, times):
    """What a table split by columns is multiplied by has its gradient made in tiles of rows."""
    across = across_data(P(None, columns))
    tile = 4 * WIDTH * WIDTH // 2
    summed = [c for c in across if c.kind == "all-reduce" and c.operand_bytes >= tile]
    assert len(summed) == times


def test_columns_of_a_table_are_scattered_where_they_lie():
    """Of a table that `model` splits by columns each device makes its own part of the gradient."""
    across = across_data(P("model"))
    weight_bytes = 4 * (VOCAB * WIDTH + WIDTH * WIDTH) // 2
    padded = 4 * 4 * 2 * WIDTH  # at most a row for each of 4 shards, of both
    scattered = sum(c.operand_bytes for c in across if c.kind == "reduce-scatter")
    assert weight_bytes <= scattered <= weight_bytes + padded
    gathered = sum(c.result_bytes for c in across if c.kind == "all-gather")
    assert weight_bytes <= gathered <= weight_bytes + padded  # new weights, and no activations


@pytest.mark.parametrize("mode", ["clip", "fill", "promise_in_bounds"])
def test_rows_that_there_are_not_are_what_the_whole_array_gives(mode):
    """Looked up in the table, in its products and in a table of integers; and what comes back."""
    mesh = mesh_of({"data": 4, "model": 2}, auto=True)
    optimizer = optax.sgd(0.1, momentum=0.9)

    def step(params, state, ranks, ids):
        def loss(params):
            x = params["rows"].at[ids].get(mode=mode)
            odds = jax.nn.log_softmax(jnp.nan_to_num(x, nan=0.5) @ params["rows"].T)
            own = ids % VOCAB
            picked = jnp.take_along_axis(odds, own[..., None], -1, mode=mode)
            return jnp.sum(jnp.where(jnp.isnan(x), 3.0, x) ** 2) / 100 - jnp.mean(picked)

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        found = ranks.at[ids].get(mode=mode)
        return optax.apply_updates(params, updates), state, value, jnp.sum(found % 1000)

    ids = np.random.default_rng(9).integers(0, VOCAB, (BATCH, LENGTH))
    ids[0], ids[-1] = VOCAB, VOCAB + 77
    ids[1] = -VOCAB - 5
    params, ranks = {"rows": weights()["rows"]}, np.arange(VOCAB, dtype=np.int32) ** 2
    rest = (ranks, ids.astype(np.int32))
    wanted = (params, optimizer.init(params), *rest)
    split = training.placed(params, {"rows": P("model")}, mesh)
    split_rest = training.placed(rest, (P("model"), P("data")), mesh)
    found = (split, optimizer.init(split), *split_rest)
    sharded = wus.shard_step(step, mesh=mesh)
    for _ in range(3):
        *kept, value, ranked = jax.jit(step)(*wanted)
        wanted = (*kept, *rest)
        *kept, sharded_value, sharded_ranked = sharded(*found)
        found = (*kept, *split_rest)
        np.testing.assert_allclose(sharded_value, value, rtol=1e-5)
        assert sharded_ranked == ranked
    np.testing.assert_allclose(found[0]["rows"], wanted[0]["rows"], rtol=1e-4, atol=1e-6)
    largest = 4 * VOCAB * WIDTH
    for c in collectives(sharded.lower(*found).compile().as_text()):
        if groups_of(c) == training.along(mesh, "model"):
            assert c.kind == "all-reduce" and c.operand_bytes < largest
