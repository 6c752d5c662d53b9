"""What one of several processes does in `test_processes.py`; run as `python -m`.

It trains on a mesh over all processes, with gradients that differ from device to device and come
from the process that has the device. The same functions run in one process give the wanted values.
"""

import argparse
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import wusharding as wus
from benchmarks import processes
from large_scale import hlo
from tests.runs import batches, hlo_of, mesh_of, pairs, unreduced_mean
from wusharding import checkpoint

Tree = Any

STEPS = 3
OPTIMIZERS = {
    "adam": functools.partial(optax.adamw, 0.01),
    "lamb": functools.partial(optax.lamb, 0.01),
}
CASES = [("adam", "manual"), ("adam", "explicit"), ("lamb", "manual")]


def weights() -> Tree:
    shapes = {"large": (501, 512), "w": (17, 13), "even": (8, 16), "b": (11,), "few": (2,), "s": ()}
    rng = np.random.default_rng(3)
    return {k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}


def split_over(mesh: Mesh, stacked: Tree) -> Tree:
    """Global arrays of what differs from device to device, each process giving its own rows."""
    sharding = NamedSharding(mesh, P("data"))

    def array(x: np.ndarray) -> jax.Array:
        rows = sharding.addressable_devices_indices_map(x.shape).values()
        mine = np.concatenate([x[index] for index in rows])
        return jax.make_array_from_process_local_data(sharding, mine, x.shape)

    return jax.tree.map(array, stacked)


class Training:
    """A loop over all devices there are, in `shard_map` or in `jit` on an explicit mesh."""

    def __init__(self, name: str, mode: str, num_devices: int) -> None:
        self.mesh = mesh_of({"data": num_devices})
        self.num_devices = num_devices
        self.tx = wus.shard_updates(OPTIMIZERS[name](), mesh=self.mesh)
        self.params = jax.device_put(weights(), NamedSharding(self.mesh, P()))
        self.state = self.tx.init(self.params)
        specs = self.tx.state_specs(self.params)

        def manual(params: Tree, state: Any, grads: Tree) -> tuple[Tree, Any]:
            return self.tx.apply(jax.tree.map(lambda g: g[0], grads), state, params)

        def explicit(params: Tree, state: Any, grads: Tree) -> tuple[Tree, Any]:
            return self.tx.apply(unreduced_mean(params, grads), state, params)

        if mode == "manual":
            ins, outs = (P(), specs, P("data")), (P(), specs)
            self.step = jax.jit(jax.shard_map(manual, mesh=self.mesh, in_specs=ins, out_specs=outs))
        else:
            self.step = jax.jit(explicit)

    def run(self, first: int, last: int) -> None:
        grads = batches(weights(), self.num_devices, last)
        with jax.set_mesh(self.mesh):
            for step in range(first, last):
                given = split_over(self.mesh, grads[step])
                self.params, self.state = self.step(self.params, self.state, given)

    def collectives(self) -> list[hlo.Collective]:
        grads = split_over(self.mesh, batches(weights(), self.num_devices, 1)[0])
        with jax.set_mesh(self.mesh):
            return hlo_of(self.step, self.params, self.state, grads)

    def seen(self) -> dict[str, np.ndarray]:
        """Weights and state in logical shapes, as this process sees them."""
        return arrays_of({"params": self.params, "state": self.tx.unshard(self.state)})


def arrays_of(tree: Tree) -> dict[str, np.ndarray]:
    """By path, what the first device of this process holds."""
    return {
        jax.tree_util.keystr(path): np.asarray(x.addressable_data(0))
        for path, x in jax.tree.leaves_with_path(tree)
    }


class WholeStep:
    """The loop of one global-view step through `shard_step`; its optimizer is plain optax."""

    def __init__(self, num_devices: int) -> None:
        self.mesh = mesh_of({"data": num_devices}, auto=True)
        self.tx = OPTIMIZERS["lamb"]()
        self.params = jax.device_put(weights(), NamedSharding(self.mesh, P()))
        self.state = self.tx.init(self.params)

        def loss_of(params: Tree, grads: Tree) -> Any:
            """Products of weights with each replica's gradients, averaged: it has their mean."""
            return sum(jnp.sum(g * w) / num_devices for g, w in pairs(grads, params))

        def step(params: Tree, state: Any, grads: Tree) -> tuple[Tree, Any, Any]:
            loss, grads = jax.value_and_grad(loss_of)(params, grads)
            updates, state = self.tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, loss

        self.step = wus.shard_step(step, mesh=self.mesh)

    def run(self, first: int, last: int) -> None:
        grads = batches(weights(), self.mesh.size, last)
        for step in range(first, last):
            given = split_over(self.mesh, grads[step])
            self.params, self.state, _ = self.step(self.params, self.state, given)

    def seen(self) -> dict[str, np.ndarray]:
        """The weights, as this process sees them."""
        return arrays_of(self.params)


def train(directory: Path) -> None:
    """Trains with each optimizer in each mode, and saves all of it."""
    for name, mode in CASES:
        loop = Training(name, mode, jax.device_count())
        assert not loop.state.inner[0].mu["w"].is_fully_addressable
        loop.run(0, STEPS)
        kinds = {c.kind for c in loop.collectives()}
        assert {"all-to-all", "all-gather"} <= kinds and "reduce-scatter" not in kinds, kinds
        write(directory / f"{name}_{mode}", loop)
        plain = loop.tx.unshard(loop.state)
        check_equal_pieces(loop.tx.shard(plain, loop.params), loop.state)
        logical = checkpoint.logical_state(loop.tx, loop.state)
        check_equal_pieces(checkpoint.sharded_state(loop.tx, logical, loop.params), loop.state)
    train_whole(directory / "whole")


def train_whole(directory: Path) -> None:
    """Trains by a whole step, saves it in the middle, and goes on from what was saved."""
    loop = WholeStep(jax.device_count())
    loop.run(0, 2)
    assert not loop.state[0].mu["w"].is_fully_replicated
    manager = ocp.CheckpointManager(directory.absolute())
    checkpoint.save(manager, 2, loop.tx, *loop.step.unshard((loop.params, loop.state)))
    _, loop.params, loop.state, *_ = checkpoint.restore(manager, loop.tx, loop.params)
    loop.run(2, STEPS)
    np.savez(directory / f"seen_by_{jax.process_index()}.npz", **loop.seen())


def resume(directory: Path) -> None:
    """Goes on from what another number of processes saved."""
    for name in OPTIMIZERS:
        loop = Training(name, "manual", jax.device_count())
        manager = ocp.CheckpointManager((directory / f"{name}_manual").absolute())
        _, loop.params, loop.state, *_ = checkpoint.restore(manager, loop.tx, loop.params)
        write(directory / f"{name}_resumed", loop)


def endless(directory: Path) -> None:
    """Trains and saves every step, until something happens."""
    loop = Training("adam", "manual", jax.device_count())
    manager = ocp.CheckpointManager(directory.absolute())
    for step in range(10**6):
        loop.run(step, step + 1)
        checkpoint.save(manager, step + 1, loop.tx, loop.params, loop.state)


def write(directory: Path, loop: Training) -> None:
    """What this process sees, and a checkpoint of it."""
    directory.mkdir(exist_ok=True)
    np.savez(directory / f"seen_by_{jax.process_index()}.npz", **loop.seen())
    manager = ocp.CheckpointManager(directory.absolute())
    checkpoint.save(manager, STEPS, loop.tx, loop.params, loop.state)
    manager.wait_until_finished()


def check_equal_pieces(found: Tree, wanted: Tree) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
        for mine, other in zip(a.addressable_shards, b.addressable_shards, strict=True):
            np.testing.assert_array_equal(mine.data, other.data)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["train", "resume", "endless"])
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    processes.join()
    globals()[arguments.command](arguments.directory)
    print("done", flush=True)


if __name__ == "__main__":
    main()
