"""The ground that all other tests stand on: the devices that conftest.py sets up."""

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P


def test_eight_virtual_cpu_devices(mesh8_explicit, mesh8_auto):
    assert [device.platform for device in jax.devices()] == ["cpu"] * 8
    assert mesh8_explicit.shape == mesh8_auto.shape == {"data": 8}
    assert mesh8_explicit.axis_types == (AxisType.Explicit,)
    assert mesh8_auto.axis_types == (AxisType.Auto,)


def test_steps_started_without_waiting_do_not_lock_each_other_out(mesh8_explicit):
    @jax.jit
    @jax.shard_map(mesh=mesh8_explicit, in_specs=P("data"), out_specs=P("data"))
    def step(x):
        for _ in range(5):
            x = x + jax.lax.all_gather(jax.lax.psum_scatter(x, "data", tiled=True), "data").mean()
        return x

    x = jax.device_put(np.zeros((64, 7), np.float32), NamedSharding(mesh8_explicit, P("data")))
    for _ in range(300):
        x = step(x)
    np.testing.assert_array_equal(x, 0)
