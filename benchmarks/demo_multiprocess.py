"""The demonstration over several processes: half a training in two, the rest in one.

Two processes of four virtual CPU devices each, joined by JAX over loopback as machines of a cluster
would be over their network, train the network of `benchmarks.demo` with a sharded update. Each
process reads its own part of every batch, and Orbax saves weights and state in logical shapes. Then
one process restores them on four devices and trains to the end. The same is done in one process, on
as many devices, without a file, and once more with the parts of each batch on other devices. The
script fails if the weights differ by more than rounding, as the last run shows it.
"""

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

import wusharding as wus
from benchmarks import demo, processes
from wusharding import checkpoint

Tree = Any

NUM_PROCESSES = 2
TIMEOUT_SECONDS = 600
# Weights may differ this much more than where only the order of sums in one process is another.
AMPLIFIED = 10


@dataclasses.dataclass
class Training:
    """A training run on one mesh: its program, and what it holds."""

    mesh: Mesh
    tx: wus.ShardedOptimizer
    step: Any
    params: Tree
    state: Tree
    losses: list[float] = dataclasses.field(default_factory=list)

    @classmethod
    def create(cls, mesh: Mesh, steps: int, images: np.ndarray) -> "Training":
        """New weights on a mesh, which may span processes."""
        tx = wus.shard_updates(demo.make_optimizer(steps), mesh=mesh)
        params = jax.device_get(jax.jit(demo.Network().init)(jax.random.key(0), images))
        params = jax.device_put(params, NamedSharding(mesh, P()))

        def step(params: Tree, state: Tree, images: Any, labels: Any) -> tuple[Any, ...]:
            loss, grads = demo.loss_and_local_grads(params, images, labels)
            params, state = tx.apply(grads, state, params)
            return params, state, jax.lax.pmean(loss, "data")

        held = (P(), tx.state_specs(params))
        mapped = jax.shard_map(
            step, mesh=mesh, in_specs=(*held, P("data"), P("data")), out_specs=(*held, P())
        )
        return cls(mesh, tx, jax.jit(mapped, donate_argnums=(0, 1)), params, tx.init(params))

    def run(self, data: demo.Digits, first: int, last: int, moved: int = 0) -> None:
        """Takes the steps; every process hands over its own part of each batch."""
        where = NamedSharding(self.mesh, P("data"))
        count, index = jax.process_count(), jax.process_index()
        for i in range(first, last):
            batch = [np.roll(x, moved * demo.BATCH // self.mesh.size, 0) for x in data.batch(i)]
            mine = [np.array_split(x, count)[index] for x in batch]
            batch = [jax.make_array_from_process_local_data(where, x) for x in mine]
            self.params, self.state, loss = self.step(self.params, self.state, *batch)
            self.losses.append(float(loss))


def whole_mesh(num_devices: int | None = None) -> Mesh:
    devices = jax.devices()[:num_devices]
    return jax.make_mesh((len(devices),), ("data",), devices=devices)


def worker(directory: Path, steps: int) -> None:
    """What each of the processes does: the first half, and a checkpoint."""
    processes.join()
    data = demo.Digits.load()
    training = Training.create(whole_mesh(), steps, data.train_images[:1])
    training.run(data, 0, steps // 2)
    with ocp.CheckpointManager(directory) as manager:  # waits for what it writes
        checkpoint.save(manager, steps // 2, training.tx, training.params, training.state)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo_multiprocess")
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--steps", type=int, default=24, help="training steps (default 24)")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.steps < 2:
        parser.error("--steps must be at least 2")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demonstration; returns the exit code."""
    arguments = parse_arguments(argv)
    steps = arguments.steps
    if arguments.worker:
        worker(arguments.worker, steps)
        return 0
    demo.use_virtual_devices()
    console = Console()
    data = demo.Digits.load()
    each = demo.NUM_DEVICES // NUM_PROCESSES
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "checkpoints"
        command = ["benchmarks.demo_multiprocess", "--worker", str(saved), "--steps", str(steps)]
        with console.status(f"{NUM_PROCESSES} processes of {each} devices train"):
            started = processes.start(command, NUM_PROCESSES, each, Path(folder))
            codes = processes.wait(started, TIMEOUT_SECONDS)
        if any(codes):
            for p in started:
                console.print(f"{p.log.name}\n{p.output}", markup=False, highlight=False)
            return 1
        with console.status("one process goes on"):
            resumed = Training.create(whole_mesh(each), steps, data.train_images[:1])
            with ocp.CheckpointManager(saved) as manager:
                found = checkpoint.restore(manager, resumed.tx, resumed.params)
            resumed.params, resumed.state = found.params, found.state
            middle = jax.device_get(found.params)
            resumed.run(data, found.step, steps)
    with console.status("one process does all of it, twice"):
        wanted_middle, wanted = in_one_process(data, steps, moved=0)
        other_middle, other = in_one_process(data, steps, moved=1)
    console.print(
        make_table(resumed, wanted, data, steps),
        "Gradients are the same sums in another order, and training amplifies the rounding.",
    )
    faults = 0
    for when, found, order, want in (
        (steps // 2, middle, other_middle, wanted_middle),
        (steps, resumed.params, other.params, wanted.params),
    ):
        difference, rounding = (demo.relative_difference(x, want) for x in (found, order))
        good = difference <= AMPLIFIED * rounding
        faults += not good
        console.print(
            f"{'' if good else 'FAULT: '}after step {when} weights differ by {difference:.1e}, and "
            f"by {rounding:.1e} where one process only adds in another order",
            style="" if good else "bold red",
        )
    return 1 if faults else 0


def in_one_process(data: demo.Digits, steps: int, moved: int) -> tuple[Tree, Training]:
    """The weights after half of the training on all devices, and all of it, without a file.

    `moved` devices further lies each part of a batch: the same sums in another order.
    """
    first = Training.create(whole_mesh(), steps, data.train_images[:1])
    first.run(data, 0, steps // 2, moved)
    middle = jax.device_get(first.params)
    each = whole_mesh(demo.NUM_DEVICES // NUM_PROCESSES)
    second = Training.create(each, steps, data.train_images[:1])
    second.params = jax.device_put(middle, NamedSharding(each, P()))
    second.state = second.tx.shard(jax.device_get(first.tx.unshard(first.state)), second.params)
    second.run(data, steps // 2, steps, moved)
    return middle, second


def make_table(resumed: Training, one: Training, data: demo.Digits, steps: int) -> Table:
    """The two ways of training, side by side."""
    each = one.mesh.size
    table = Table(title="The same training in two ways")
    for title in ("", "two processes, then one", "one process"):
        table.add_column(title, justify="right" if title else "left")
    both = f"{NUM_PROCESSES} x {each} devices", f"{demo.NUM_DEVICES} devices"
    table.add_row(f"steps 1 to {steps // 2}", *both)
    table.add_row(f"steps {steps // 2 + 1} to {steps}", *[f"{each} devices"] * 2)
    table.add_row("loss at the end", *[f"{run.losses[-1]:.5f}" for run in (resumed, one)])
    scores = [
        demo.accuracy(run.params, data.test_images, data.test_labels) for run in (resumed, one)
    ]
    table.add_row("test accuracy", *[f"{score:.2%}" for score in scores])
    return table


if __name__ == "__main__":
    sys.exit(main())
