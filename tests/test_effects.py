"""What a step does besides its results, as `jax.debug.callback` does, is done: once a device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import wusharding as wus

ROWS = np.arange(8 * 16, dtype=np.float32).reshape(8, 16) / 100


def told(seen, tx):
    """`tx`, which tells the norm of the updates that it makes."""

    def update(updates, state, params=None):
        updates, state = tx.update(updates, state, params)
        jax.debug.callback(lambda n: seen.append(float(n)), optax.tree.norm(updates))
        return updates, state

    return optax.GradientTransformation(tx.init, update)


def loss_of(seen, *, in_loop):
    def loss(params, x):
        value = jnp.mean((x @ params["w"]) ** 2)

        def turn(total, i):
            jax.debug.callback(lambda v: seen.append(float(v)), total)
            return total + i, None

        if in_loop:
            return lax.scan(turn, value, jnp.zeros(3))[0]
        return turn(value, 0)[0]

    return loss


@pytest.mark.parametrize("in_loop", [False, True])
@pytest.mark.parametrize("form", ["global", "shard_map"])
def test_callbacks_of_a_step_run_once_a_device(form, in_loop):
    losses, norms, calls = [], [], []
    loss, tx = loss_of(losses, in_loop=in_loop), told(norms, optax.adam(0.1))
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def step(params, state, x):
        jax.debug.callback(lambda: calls.append(None))  # of nothing
        grads = jax.grad(loss)(params, x)
        if form == "shard_map":
            grads = lax.pmean(grads, "data")
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = {"w": jnp.ones((16, 8))}
    args = (params, tx.init(params), ROWS)
    specs = (P(), P(), P("data"))
    whole = step
    if form == "shard_map":
        whole = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    placed = jax.device_put(args, tuple(NamedSharding(mesh, s) for s in specs))
    sharded = wus.shard_step(whole, mesh=mesh)(*placed)
    jax.block_until_ready(sharded)
    jax.effects_barrier()
    assert len(calls) == 8
    assert len(losses) == 8 * (3 if in_loop else 1)
    parts = [np.mean((row @ np.ones((16, 8))) ** 2) for row in ROWS]
    wanted = parts if form == "shard_map" else [np.mean(parts)] * 8
    np.testing.assert_allclose(sorted(set(losses)), sorted(set(np.float32(wanted))), rtol=1e-5)
    np.testing.assert_allclose(norms, [0.1 * 128**0.5] * 8, rtol=1e-5)


def test_callbacks_of_an_optimizer_run_once_a_device():
    norms = []
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    tx = wus.shard_updates(told(norms, optax.adam(0.1)), mesh=mesh)
    params = {"w": jnp.ones((16, 8))}
    state = tx.init(params)
    specs = tx.state_specs(params)

    def step(grads, state, params):
        return tx.apply(grads, state, params)

    run = jax.shard_map(
        step, mesh=mesh, in_specs=(P(), specs, P()), out_specs=(P(), specs), check_vma=False
    )
    jax.block_until_ready(jax.jit(run)(params, state, params))
    jax.effects_barrier()
    np.testing.assert_allclose(norms, [0.1 * 128**0.5] * 8, rtol=1e-5)
