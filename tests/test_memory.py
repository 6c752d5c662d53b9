"""What devices and the host hold while a state is made, converted, saved and restored.

Devices are watched through the buffers that live after each program (one converts one array), the
host through the size of the process.
"""

import contextlib
import gc
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import wusharding as wus
from tests.runs import mesh_of
from wusharding import checkpoint

Tree = Any

NUM_DEVICES = 8
LEAVES = 6
SHAPE = (257, 131)  # neither dim splits: every array is padded, and waits whole on one device
ARRAY_BYTES = 4 * 257 * 131
STATE_BYTES = 2 * LEAVES * ARRAY_BYTES
SLACK_BYTES = 4096  # counters and checksums
SHARE_BYTES = 1.02 * STATE_BYTES / NUM_DEVICES  # padding included


def held() -> int:
    """Bytes on the fullest device, each buffer once however many arrays share it."""
    gc.collect()
    buffers = {
        (shard.device, shard.data.unsafe_buffer_pointer()): shard.data.nbytes
        for x in jax.live_arrays()
        for shard in x.addressable_shards
    }
    bytes_on = Counter[Any]()
    for (device, _), size in buffers.items():
        bytes_on[device] += size
    return max(bytes_on.values(), default=0)


@contextlib.contextmanager
def watched(tx: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The most that a device holds after any program of the conversions, beside what it had."""
    before, most = held(), [0]
    call = tx._core._call

    def watch(*args: Any) -> Any:
        out = jax.block_until_ready(call(*args))
        most[0] = max(most[0], held() - before)
        return out

    with monkeypatch.context() as patch:
        patch.setattr(tx._core, "_call", watch)
        yield most
    most[0] = max(most[0], held() - before)


@pytest.fixture
def made() -> tuple[Any, Tree, Any]:
    mesh = mesh_of({"data": NUM_DEVICES})
    tx = wus.shard_updates(optax.adam(0.1), mesh=mesh)
    weights = {f"w{i}": np.full(SHAPE, i, np.float32) for i in range(LEAVES)}
    params = jax.device_put(weights, NamedSharding(mesh, P()))
    return tx, params, tx.init(params)


def test_logical_and_sharded_states_are_made_array_by_array(made, monkeypatch):
    tx, params, state = made
    bound = SHARE_BYTES + 2 * ARRAY_BYTES + SLACK_BYTES
    with watched(tx, monkeypatch) as most:
        logical = checkpoint.logical_state(tx, state)
    assert 2 * ARRAY_BYTES <= most[0] <= bound
    with watched(tx, monkeypatch) as most:
        again = checkpoint.sharded_state(tx, logical, params)
    assert 0 < most[0] <= bound
    del again, logical


def test_a_replicated_state_would_show(made, monkeypatch):
    """Negative control: `unshard` gives the whole state to every device, as it says."""
    tx, _, state = made
    with watched(tx, monkeypatch) as most:
        plain = tx.unshard(state)
    assert STATE_BYTES <= most[0] <= STATE_BYTES + SLACK_BYTES
    del plain


def test_saving_and_restoring_hold_no_more(made, monkeypatch, tmp_path):
    tx, params, state = made
    manager = ocp.CheckpointManager(tmp_path)
    bound = SHARE_BYTES + 2 * ARRAY_BYTES + SLACK_BYTES
    with watched(tx, monkeypatch) as most:
        checkpoint.save(manager, 1, tx, params, state)
        manager.wait_until_finished()
    assert most[0] <= bound
    params_bytes = LEAVES * ARRAY_BYTES  # restored beside those that are there
    with watched(tx, monkeypatch) as most:
        found = checkpoint.restore(manager, tx, params)
    assert params_bytes <= most[0] <= params_bytes + 2 * SHARE_BYTES + 2 * ARRAY_BYTES + SLACK_BYTES
    del found


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class Sampler(threading.Thread):
    """The most that the process had in memory meanwhile."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most_bytes = 0
        self._done = threading.Event()

    def run(self) -> None:
        while not self._done.wait(0.002):
            self.most_bytes = max(self.most_bytes, resident())

    def stop(self) -> int:
        self._done.set()
        self.join()
        return self.most_bytes


@pytest.mark.slow
def test_the_host_holds_the_state_once_more_while_it_is_saved(tmp_path):
    """Here the host is all eight devices too. The first save also holds what compiling needs."""
    mesh = mesh_of({"data": NUM_DEVICES})
    tx = wus.shard_updates(optax.adam(0.1), mesh=mesh)
    rng = np.random.default_rng(0)
    weights = {f"w{i}": rng.normal(size=(2049, 1027)).astype(np.float32) for i in range(6)}
    params = jax.device_put(weights, NamedSharding(mesh, P()))
    state = jax.block_until_ready(tx.init(params))
    state_bytes = 2 * sum(x.nbytes for x in weights.values())
    array_bytes = state_bytes // 12
    manager = ocp.CheckpointManager(tmp_path)
    most = []
    for step in range(3):
        gc.collect()
        before, sampler = resident(), Sampler()
        sampler.start()
        checkpoint.save(manager, step, tx, params, state)
        manager.wait_until_finished()
        most.append(sampler.stop() - before)
    assert min(most[1:]) <= 1.5 * state_bytes + 2 * NUM_DEVICES * array_bytes, most
