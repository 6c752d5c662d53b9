"""Weights are read, and their gradients made, with the padding of their shards still on."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import wusharding as wus

ROWS, WIDTH = 1023, 12  # on 8 devices 1024 rows
WIDE = ROWS + 1


def lookup(mode):
    """Rows looked up, some beyond the last; then the whole table in a sum and a product."""

    def loss(params, ids):
        rows = params["embedding"].at[ids].get(mode=mode)
        rows = jnp.where(jnp.isnan(rows), 7.0, rows)
        return jnp.mean((rows @ params["dense"]) ** 2) + jnp.mean(params["embedding"] ** 2)

    return loss


def tied(of_logits):
    """One table for what comes in and for the logits."""

    def loss(params, ids):
        table = params["embedding"]
        x = jax.nn.relu(table[ids] @ params["dense"])
        return of_logits(x @ table.T, ids)

    return loss


def log_softmax(logits, ids):
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), ids[..., None], -1)
    return -jnp.mean(picked)


def cross_entropy(logits, ids):
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, ids))


def one_hot(logits, ids):
    labels = 0.9 * jax.nn.one_hot(ids, ROWS) + 0.1 / ROWS
    return jnp.mean(optax.softmax_cross_entropy(logits, labels))


def every_reduction(logits, ids):
    terms = [
        jax.nn.logsumexp(logits, -1) ** 2,
        jnp.max(logits, -1),
        jnp.min(logits, -1),
        jnp.all(logits < 3, -1) * jnp.mean(logits, -1),
        jnp.any(logits > 3, -1) * jnp.mean(jax.nn.sigmoid(logits), -1),
    ]
    return sum(map(jnp.mean, terms))


def some_columns(logits, ids):
    """Of all rows some elements only, which a `gather` takes."""
    return cross_entropy(jnp.take(logits, jnp.array([2, 0]), axis=1), ids[:, :2])


def in_bfloat16(logits, ids):
    return cross_entropy(logits.astype(jnp.bfloat16).astype(jnp.float32), ids)


def sliced(logits, ids):
    """Reads other numbers of columns: nothing of its gradient has the padding."""
    return jnp.mean(logits[..., : ROWS // 2] ** 2) + jnp.mean(logits[..., 3])


def ordered(logits, ids):
    """Needs all logits in their order: the same."""
    return jnp.mean(jnp.sort(logits, -1)[..., -3:]) + jnp.mean(jnp.cumsum(logits, -1))


TIED = (log_softmax, cross_entropy, one_hot, every_reduction, some_columns, in_bfloat16)


def train_step(loss, mesh=None):
    """A step on global arrays, or, given a mesh, of each replica."""

    def step(params, state, ids):
        value, grads = jax.value_and_grad(loss)(params, ids)
        if mesh is not None:
            value, grads = lax.pmean((value, grads), "data")
        updates, state = optax.adamw(0.01).update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    if mesh is None:
        return step
    specs = (P(), P(), P("data"))
    return jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)


def arguments(ids_beyond=0, dtype=np.int32, rows=ROWS):
    rng = np.random.default_rng(0)
    params = {
        "embedding": rng.normal(size=(rows, WIDTH)).astype(np.float32) * 0.3,
        "dense": rng.normal(size=(WIDTH, WIDTH)).astype(np.float32),
    }
    top = min(rows + ids_beyond, np.iinfo(dtype).max)
    ids = rng.integers(0, top, size=(16, 3)).astype(dtype)
    ids[0, 0], ids[1, 1] = top - 1, 0
    return params, optax.adamw(0.01).init(params), ids


def mesh_of_8():
    return jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))


def on_mesh(args, mesh):
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    return *jax.device_put(args[:2], whole), jax.device_put(args[2], split)


def poisoned(x):
    """Rows of padding filled with what is no number."""
    if x.shape != (WIDE, WIDTH):
        return x
    held = np.arange(WIDE)[:, None] < ROWS
    return jax.device_put(np.where(held, np.asarray(x), np.nan), x.sharding)


def sharded_step(loss, form, mesh, weights="split"):
    step = train_step(loss, mesh if form == "shard_map" else None)
    return wus.shard_step(step, mesh=mesh, weights=weights, formats="dim")


def assert_equals_one_device(loss, form, args, weights="split", steps=3):
    mesh = mesh_of_8()
    sharded = sharded_step(loss, form, mesh, weights)
    alone, wanted, ids = jax.jit(train_step(loss)), args[:2], args[2]
    *state, placed_ids = sharded.shard(*on_mesh(args, mesh))
    found = jax.tree.map(poisoned, tuple(state))
    for _ in range(steps):
        *wanted, value = alone(*wanted, ids)
        *found, sharded_value = sharded(*found, placed_ids)
        np.testing.assert_allclose(sharded_value, value, rtol=1e-5)
    whole = sharded.unshard(found[0])
    for name, x in wanted[0].items():
        np.testing.assert_allclose(whole[name], x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["fill", "clip", "promise_in_bounds"])
@pytest.mark.parametrize(("dtype", "rows"), [(np.int32, ROWS), (np.int8, 127)])
def test_lookups_give_what_the_weight_itself_gives(mode, dtype, rows):
    assert_equals_one_device(lookup(mode), "global", arguments(5, dtype, rows))


@pytest.mark.parametrize("form", ["shard_map", "global"])
@pytest.mark.parametrize("of_logits", [*TIED, sliced, ordered], ids=lambda f: f.__name__)
def test_padding_counts_nowhere_whatever_it_holds(of_logits, form):
    assert_equals_one_device(tied(of_logits), form, arguments())


def program(loss, form, weights="split"):
    mesh = mesh_of_8()
    return sharded_step(loss, form, mesh, weights).lower(*on_mesh(arguments(), mesh)).as_text()


@pytest.mark.parametrize("form", ["shard_map", "global"])
@pytest.mark.parametrize("of_logits", TIED, ids=lambda f: f.__name__)
def test_no_gradient_of_a_tied_embedding_is_padded(of_logits, form):
    text = program(tied(of_logits), form)
    products = re.findall(rf"dot_general.*[<x]{WIDE}x", text)
    assert len(products) == 3  # the logits, and from them the gradients of both factors
    assert not re.search(rf"dot_general.*[<x]{ROWS}x", text)
    assert not re.search(rf"stablehlo.pad.*{ROWS}x{WIDTH}x", text)


@pytest.mark.parametrize("form", ["shard_map", "global"])
@pytest.mark.parametrize("of_logits", [cross_entropy, every_reduction], ids=lambda f: f.__name__)
def test_a_weight_that_comes_whole_is_padded_and_not_its_gradient(of_logits, form):
    loss = tied(of_logits)
    text = program(loss, form, "whole")
    assert len(re.findall(rf"dot_general.*[<x]{WIDE}x", text)) == 3
    assert not re.search(rf"dot_general.*[<x]{ROWS}x", text)
    assert_equals_one_device(loss, form, arguments(), "whole")


@pytest.mark.parametrize("form", ["shard_map", "global"])
def test_zeros_into_which_an_embedding_is_scattered_are_as_long_as_it_is_stored(form):
    def loss(params, ids):
        return jnp.mean(jnp.tanh(params["embedding"][ids] @ params["dense"]))

    text = program(loss, form)
    assert not re.search(rf"stablehlo.pad.*{ROWS}x{WIDTH}x", text)
    assert_equals_one_device(loss, form, arguments())


@pytest.mark.parametrize("form", ["shard_map", "global"])
def test_where_order_matters_the_gradient_is_padded_at_the_end(form):
    text = program(tied(ordered), form)
    assert re.search(rf"stablehlo.pad.*{ROWS}x{WIDTH}x", text)
    assert not re.search(rf"dot_general.*[<x]{WIDE}x", text)


def test_much_padding_is_cut_off():
    """Of 100 rows 104 are stored: to compute with those would cost more than a copy."""

    def loss(params, ids):
        return cross_entropy(params["table"][ids] @ params["table"].T, ids)

    mesh = mesh_of_8()
    params = {"table": jnp.ones((100, WIDTH))}
    args = on_mesh((params, optax.adamw(0.01).init(params), jnp.zeros((16, 3), jnp.int32)), mesh)
    text = sharded_step(loss, "global", mesh).lower(*args).as_text()
    assert "104x12x" in text
    assert not re.search(r"dot_general.*[<x]104x", text)


def test_the_padding_of_an_embedding_is_not_cut_off_to_read_it():
    looked_up = [
        line
        for line in program(lookup("fill"), "global").splitlines()
        if "stablehlo.gather" in line
    ]
    assert looked_up and all(f"tensor<{WIDE}x{WIDTH}xf32>" in line for line in looked_up)
