"""Rows are looked up in weights whose padding is still on, with the numbers of the weights."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import wusharding as wus

ROWS, WIDTH = 101, 3  # on 8 devices 104 rows


def lookup(mode):
    def loss(params, ids):
        rows = params["embedding"].at[ids].get(mode=mode)
        rows = jnp.where(jnp.isnan(rows), 7.0, rows)
        return jnp.mean((rows @ params["dense"]) ** 2) + jnp.mean(params["embedding"] ** 2)

    def step(params, state, ids):
        loss_value, grads = jax.value_and_grad(loss)(params, ids)
        updates, state = optax.adam(0.1).update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss_value

    return step


@pytest.mark.parametrize("mode", ["fill", "clip", "promise_in_bounds"])
@pytest.mark.parametrize("dtype", [np.int32, np.int8])
def test_lookups_give_what_the_weight_itself_gives(mode, dtype):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    rng = np.random.default_rng(0)
    params = {
        "embedding": rng.normal(size=(ROWS, WIDTH)).astype(np.float32),
        "dense": rng.normal(size=(WIDTH, 8)).astype(np.float32),
    }
    beyond = 0 if mode == "promise_in_bounds" else 5
    ids = rng.integers(0, ROWS + beyond, size=(16, 3)).astype(dtype)
    step = lookup(mode)
    args = (params, optax.adam(0.1).init(params), ids)
    wanted = args
    sharded = wus.shard_step(step, mesh=mesh, weights="split", formats="dim")
    found = (
        *jax.device_put(args[:2], NamedSharding(mesh, P())),
        jax.device_put(ids, NamedSharding(mesh, P("data"))),
    )
    for _ in range(3):
        *state, loss = jax.jit(step)(*wanted)
        wanted = (*state, ids)
        *state, sharded_loss = sharded(*found)
        found = (*state, found[2])
        np.testing.assert_allclose(sharded_loss, loss, rtol=1e-5)
    whole = sharded.unshard(found[0])
    for name, x in wanted[0].items():
        np.testing.assert_allclose(whole[name], x, rtol=1e-4, atol=1e-5)


def test_the_padding_of_an_embedding_is_not_cut_off_to_read_it():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    params = {"embedding": jnp.ones((ROWS, WIDTH)), "dense": jnp.ones((WIDTH, 8))}
    args = (params, optax.adam(0.1).init(params), jnp.zeros((16, 3), jnp.int32))
    shardings = NamedSharding(mesh, P()), NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    args = tuple(map(jax.device_put, args, shardings))
    sharded = wus.shard_step(lookup("fill"), mesh=mesh, weights="split", formats="dim")
    text = sharded.lower(*args).as_text()
    looked_up = [line for line in text.splitlines() if "stablehlo.gather" in line]
    assert looked_up and all("tensor<104x3xf32>" in line for line in looked_up)
