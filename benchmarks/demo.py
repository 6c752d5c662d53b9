"""The demonstration: one training run with a replicated update beside one with a sharded update.

A small convolutional network learns the handwritten digits that scikit-learn ships, data-parallel
over eight virtual CPU devices, twice: once as usual, with averaged gradients and the whole update
on every replica, and once with `wusharding.shard_updates`. Both start from the same weights, see
the same batches and take their steps alternately in one process, so their times compare.

Printed are what each run learned, holds, sends and takes; the same is drawn into a picture. The
script fails if the weights of the two runs differ by more than `TOLERANCE`, or if the compiled
sharded step still all-reduces gradients.
"""

import argparse
import collections
import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import sklearn.datasets
import sklearn.model_selection
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import wusharding as wus
from benchmarks.devices import NUM_DEVICES, device_bytes, use_virtual_devices
from large_scale import hlo

Tree = Any

BATCH = 256  # images of one step, over all devices
# Largest relative difference of a weight tensor (2-norms) between the runs after training. Only the
# order in which sums are made differs: of gradients over replicas, of norms over shards. That is
# float32 rounding, about 1e-7, which training amplifies; how much was seen by training twice with
# the replicated update, once from weights that are one last bit larger. With the shifted images
# and smoothed labels below the two stay 1e-6 apart. Without them the loss falls to 1e-6, LAMB
# scales gradients that are themselves rounding up to full steps, and the two end 6e-2 apart.
TOLERANCE = 1e-4
SMOOTHING = 0.1  # of the labels
# Share of the gradients' bytes that all-reduces of the sharded step may have: norms are sums too.
SMALL = 0.01
_WARMUP = 3  # runs that are not timed


# ------------------------------------------------------------------------------- data and training


class Network(nn.Module):
    """Two convolutions and two dense layers, with layer norms, for images of 8 x 8 pixels."""

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = images
        for features, stride in ((32, 1), (64, 2)):
            x = nn.Conv(features, (3, 3), strides=stride)(x)
            x = nn.gelu(nn.LayerNorm()(x))
        x = x.reshape(len(x), -1)
        for features in (768, 512):
            x = nn.gelu(nn.LayerNorm()(nn.Dense(features)(x)))
        return nn.Dense(10)(x)


@dataclasses.dataclass(frozen=True)
class Digits:
    """Images of shape (n, 8, 8, 1) in [0, 1], and their labels."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray

    @classmethod
    def load(cls) -> "Digits":
        data = sklearn.datasets.load_digits()
        images = (data.images[..., None] / 16).astype(np.float32)
        a, b, c, d = sklearn.model_selection.train_test_split(
            images, data.target, test_size=0.2, random_state=0, stratify=data.target
        )
        return cls(a, c, b, d)

    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """The step's training batch, drawn at random: a function of the step alone."""
        rng = np.random.default_rng((0, step))
        chosen = rng.choice(len(self.train_labels), BATCH, replace=False)
        return _shifted(self.train_images[chosen], rng), self.train_labels[chosen]


def _shifted(images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Each image moved by at most one pixel along each dim, black where nothing came."""
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)))
    rows, columns = rng.integers(0, 3, (2, len(images), 1)) + np.arange(8)
    return padded[np.arange(len(images))[:, None, None], rows[:, :, None], columns[:, None, :]]


def make_optimizer(steps: int) -> optax.GradientTransformation:
    """LAMB behind a clipped norm: both need norms of whole tensors, which shards do not have."""
    warmup_steps = max(1, steps // 10)
    rate = optax.warmup_cosine_decay_schedule(0.0, 5e-3, warmup_steps, max(steps, 2))
    return optax.chain(optax.clip_by_global_norm(1.0), optax.lamb(rate, weight_decay=1e-4))


def loss_and_local_grads(params: Tree, images: jax.Array, labels: jax.Array) -> tuple[Any, Tree]:
    """The loss of one replica's part of the batch, and its gradients, not averaged."""

    def loss(params: Tree) -> jax.Array:
        logits = Network().apply(params, images)
        targets = optax.smooth_labels(jax.nn.one_hot(labels, 10), SMOOTHING)
        return optax.softmax_cross_entropy(logits, targets).mean()

    # JAX would sum the gradients of weights that are the same on all replicas over these.
    return jax.value_and_grad(loss)(jax.lax.pcast(params, "data", to="varying"))


def accuracy(params: Tree, images: np.ndarray, labels: np.ndarray) -> float:
    logits = jax.jit(Network().apply)(jax.device_get(params), images)
    return float(np.mean(np.argmax(logits, axis=-1) == labels))


# --------------------------------------------------------------------------------- the two updates

Update = Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]


def replicated_update(optimizer: optax.GradientTransformation) -> Update:
    """Data parallelism as usual: average the gradients, then update everything everywhere."""

    def update(grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        grads = jax.lax.pmean(grads, "data")
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return update


@dataclasses.dataclass
class Run:
    """One of the two runs: its programs, what it holds, and what was measured.

    Args:
      name: "replicated" or "sharded".
      update: local gradients, state and weights to new weights and state, on one replica.
      state_specs: tree of `PartitionSpec` of the state.
      params: weights.
      state: optimizer state.
    """

    name: str
    update: Update
    state_specs: Tree
    params: Tree
    state: Tree
    step: Any = None
    update_alone: Any = None
    losses: list[float] = dataclasses.field(default_factory=list)
    step_seconds: list[float] = dataclasses.field(default_factory=list)
    update_seconds: list[float] = dataclasses.field(default_factory=list)
    collectives: list[hlo.Collective] = dataclasses.field(default_factory=list)
    update_flops: float = 0.0
    test_accuracy: float = 0.0

    def compile(self, mesh: Mesh, batch: Sequence[jax.Array], grads: Tree) -> None:
        """Compiles the training step, and the update by itself."""

        def step(params: Tree, state: Tree, images: Any, labels: Any) -> tuple[Any, ...]:
            loss, grads = loss_and_local_grads(params, images, labels)
            params, state = self.update(grads, state, params)
            return params, state, jax.lax.pmean(loss, "data")

        def update_alone(params: Tree, state: Tree, stacked: Tree) -> tuple[Tree, Tree]:
            return self.update(jax.tree.map(lambda g: g[0], stacked), state, params)

        held = (P(), self.state_specs)
        self.step = _compiled(
            jax.shard_map(
                step, mesh=mesh, in_specs=(*held, P("data"), P("data")), out_specs=(*held, P())
            ),
            (self.params, self.state, *batch),
        )
        self.update_alone = _compiled(
            jax.shard_map(update_alone, mesh=mesh, in_specs=(*held, P("data")), out_specs=held),
            (self.params, self.state, grads),
        )
        self.collectives = hlo.collectives(self.step.as_text())
        self.update_flops = self.update_alone.cost_analysis()["flops"]

    def take_step(self, batch: Sequence[jax.Array]) -> None:
        start = time.perf_counter()
        out = jax.block_until_ready(self.step(self.params, self.state, *batch))
        self.step_seconds.append(time.perf_counter() - start)
        self.params, self.state, loss = out
        self.losses.append(float(loss))

    def time_update(self, held: tuple[Tree, Tree], grads: Tree) -> tuple[Tree, Tree]:
        start = time.perf_counter()
        out = jax.block_until_ready(self.update_alone(*held, grads))
        self.update_seconds.append(time.perf_counter() - start)
        return out

    @property
    def state_bytes(self) -> int:
        """Bytes of optimizer state on the fullest device, as they lie there."""
        return device_bytes(self.state)

    @property
    def sent_bytes(self) -> dict[str, int]:
        """Bytes that a device sends in one step, by kind of collective, on a ring."""
        sent = collections.Counter[str]()
        for c in self.collectives:
            sent[c.kind] += c.sent_bytes
        return dict(sent)


def _compiled(fun: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """`fun` compiled for these arguments, the first two of which it may overwrite."""
    return jax.jit(fun, donate_argnums=(0, 1)).lower(*args).compile()


def _median(seconds: Sequence[float]) -> float:
    return statistics.median(seconds[_WARMUP:] or seconds)


# ---------------------------------------------------------------------------------- running the two


def make_runs(mesh: Mesh, steps: int, images: np.ndarray) -> tuple[list[Run], wus.Plan]:
    """The two runs from the same weights, and the plan of the sharded one."""
    optimizer = make_optimizer(steps)
    params = jax.jit(Network().init)(jax.random.key(0), images)
    everywhere = NamedSharding(mesh, P())
    copies = [jax.device_put(jax.tree.map(jnp.copy, params), everywhere) for _ in range(2)]

    plain_state = jax.device_put(optimizer.init(params), everywhere)
    sharded = wus.shard_updates(optimizer, mesh=mesh, axis="data")
    sharded_state = sharded.init(copies[1])
    specs = sharded.state_specs(copies[1])
    runs = [
        Run("replicated", replicated_update(optimizer), P(), copies[0], plain_state),
        Run("sharded", sharded.apply, specs, copies[1], sharded_state),
    ]
    return runs, sharded.plan(copies[1])


def stacked_local_grads(mesh: Mesh, params: Tree, batch: Sequence[jax.Array]) -> Tree:
    """Each replica's gradients, stacked along a new first dim."""

    def grads(params: Tree, images: jax.Array, labels: jax.Array) -> Tree:
        return jax.tree.map(lambda g: g[None], loss_and_local_grads(params, images, labels)[1])

    specs = (P(), P("data"), P("data"))
    return jax.jit(jax.shard_map(grads, mesh=mesh, in_specs=specs, out_specs=P("data")))(
        params, *batch
    )


def train(runs: Sequence[Run], mesh: Mesh, data: Digits, steps: int, console: Console) -> None:
    """Takes all steps, the runs in turn, each first in every other step."""
    spread = NamedSharding(mesh, P("data"))
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[losses]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training both", total=steps, losses="")
        for i in range(steps):
            batch = [jax.device_put(x, spread) for x in data.batch(i)]
            for run in runs if i % 2 else reversed(runs):
                run.take_step(batch)
            losses = " | ".join(f"{run.losses[-1]:.4f}" for run in runs)
            progress.update(task, advance=1, losses=losses)


def time_updates(runs: Sequence[Run], grads: Tree, repeats: int) -> None:
    """Times the updates alone, in turn, on copies of what the runs hold."""
    held = [jax.tree.map(jnp.copy, (run.params, run.state)) for run in runs]
    for i in range(repeats + _WARMUP):
        for j in (0, 1) if i % 2 else (1, 0):
            held[j] = runs[j].time_update(held[j], grads)


# ------------------------------------------------------------------------------------ what to check


def relative_difference(a: Tree, b: Tree) -> float:
    """The largest relative difference of a tensor, in 2-norms."""

    def of_tensor(x: Any, y: Any) -> float:
        difference = float(np.linalg.norm(np.ravel(x) - np.ravel(y)))
        norm = float(np.linalg.norm(np.ravel(y)))
        if not difference:
            return 0.0
        return difference / norm if norm else difference * np.inf

    differences = jax.tree.map(of_tensor, jax.device_get(a), jax.device_get(b))
    return float(np.max(jax.tree.leaves(differences)))  # NaN if any is


def collective_faults(found: Sequence[hlo.Collective], grad_bytes: int) -> list[str]:
    """What a sharded step's collectives should not be.

    Args:
      found: the collectives of the compiled step.
      grad_bytes: bytes of all gradients.
    """
    faults = []
    reduced = sum(c.operand_bytes for c in found if c.kind == "all-reduce")
    scattered = sum(c.operand_bytes for c in found if c.kind == "reduce-scatter")
    if reduced > SMALL * grad_bytes:
        faults.append(f"all-reduces of {_bytes(reduced)}, gradients are {_bytes(grad_bytes)}")
    if scattered < (1 - SMALL) * grad_bytes:
        faults.append(f"reduce-scatters of {_bytes(scattered)}, gradients are {_bytes(grad_bytes)}")
    return faults


def find_faults(plain: Run, sharded: Run, difference: float) -> list[str]:
    """All that must not be, in words; empty for a good demonstration."""
    grad_bytes = sum(x.nbytes for x in jax.tree.leaves(plain.params))
    faults = [
        f"the sharded step has {fault}"
        for fault in collective_faults(sharded.collectives, grad_bytes)
    ]
    # The check must see in the replicated step what it looks for in the sharded one.
    if len(collective_faults(plain.collectives, grad_bytes)) != 2:
        faults.append("the check of collectives does not see the replicated step's all-reduce")
    if not difference <= TOLERANCE:  # NaN is a fault too
        faults.append(f"weights differ by {difference:.1e}, more than {TOLERANCE:.0e}")
    return faults


# --------------------------------------------------------------------------------------- the report


def _bytes(n: float) -> str:
    """`n` bytes, in the unit that suits.

    >>> _bytes(292), _bytes(1207636)
    ('292 B', '1.15 MiB')
    """
    power = min(max(0, int(n).bit_length() - 1) // 10, 3)
    if not power:
        return f"{n:.0f} B"
    return f"{n / 1024**power:.2f} {('KiB', 'MiB', 'GiB')[power - 1]}"


def _ratio(sharded: float, plain: float) -> str:
    return f"{sharded / plain:.3f}"


def make_table(plain: Run, sharded: Run, difference: float, num_tests: int) -> Table:
    """Everything measured, the runs side by side."""
    table = Table(title="Weight update: replicated and sharded", title_style="bold")
    table.add_column("")
    for heading in ("replicated", "sharded", "ratio"):
        table.add_column(heading, justify="right", no_wrap=True)
    runs = (plain, sharded)

    def add(name: str, show: Callable[[Any], str], values: Sequence[Any], ratio: str = "") -> None:
        table.add_row(name, *(show(v) for v in values), ratio)

    def add_compared(name: str, show: Callable[[Any], str], values: Sequence[float]) -> None:
        add(name, show, values, _ratio(values[1], values[0]))

    add("training loss, first step", "{:.6f}".format, [run.losses[0] for run in runs])
    add("training loss, last step", "{:.6f}".format, [run.losses[-1] for run in runs])
    add(f"accuracy on {num_tests} test images", "{:.2%}".format, [r.test_accuracy for r in runs])
    table.add_row("weights, largest relative difference", "", f"{difference:.1e}", "")
    table.add_section()
    add_compared("optimizer state on each device", _bytes, [run.state_bytes for run in runs])
    add_compared("step, median", _ms, [_median(run.step_seconds) for run in runs])
    add_compared(
        "update and its collectives, median", _ms, [_median(run.update_seconds) for run in runs]
    )
    add_compared("update, operations on each device", _mflop, [run.update_flops for run in runs])
    table.add_section()
    for kind in sorted({c.kind for run in runs for c in run.collectives}, key=hlo.KINDS.index):
        add(f"{kind}, put in", str, [_collectives(run, kind) for run in runs])
    add_compared("sent by each device, on a ring", _bytes, [_sent(run) for run in runs])
    return table


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


def _mflop(flops: float) -> str:
    return f"{flops / 1e6:.2f} MFLOP"


def _sent(run: Run) -> int:
    return sum(run.sent_bytes.values())


def _collectives(run: Run, kind: str) -> str:
    """How many of a kind, and the bytes that a device puts in."""
    found = [c for c in run.collectives if c.kind == kind]
    if not found:
        return "none"
    return f"{len(found)} × {_bytes(sum(c.operand_bytes for c in found) / len(found))}"


def plan_summary(plan: wus.Plan) -> str:
    """The plan without its lists of arrays."""
    sections = str(plan).split("\n\n")
    return "\n\n".join(s for i, s in enumerate(sections) if not i or s.startswith("Collectives"))


# -------------------------------------------------------------------------------------- the picture

_INK = "#333333"
_COLORS = {"replicated": "#b8b4a8", "sharded": "#2a6f97"}
# Face and text of each kind of collective that is large enough to be seen.
_KIND_COLORS = {
    "all-reduce": ("#b8b4a8", _INK),
    "reduce-scatter": ("#2a6f97", "white"),
    "all-gather": ("#89c2d9", _INK),
}


def draw(plain: Run, sharded: Run, path: Path) -> None:
    """The losses, and what the runs hold, take and send, as a picture."""
    figure = Figure(figsize=(12, 6), layout="constrained", dpi=150)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.08)
    grid = figure.add_gridspec(4, 4, width_ratios=(1.3, 1.3, 1, 1))
    loss = figure.add_subplot(grid[:3, :2])
    difference = figure.add_subplot(grid[3, :2], sharex=loss)
    _draw_losses(loss, plain, sharded)
    _draw_loss_difference(difference, plain, sharded)
    mib = 2.0**20
    bars = (
        ("Optimizer state on each device", "MiB", lambda run: run.state_bytes / mib),
        ("Training step, median", "ms", lambda run: 1e3 * _median(run.step_seconds)),
        ("Update and its collectives, median", "ms", lambda run: 1e3 * _median(run.update_seconds)),
    )
    places = (grid[:2, 2], grid[:2, 3], grid[2:, 2])
    for place, (title, unit, value) in zip(places, bars, strict=True):
        _draw_bars(figure.add_subplot(place), title, unit, [value(plain), value(sharded)])
    _draw_sent(figure.add_subplot(grid[2:, 3]), plain, sharded)
    weights = sum(x.size for x in jax.tree.leaves(plain.params))
    figure.suptitle(
        f"The same training with a replicated and with a sharded update: {weights / 1e6:.2f} M "
        f"weights, LAMB, {NUM_DEVICES} virtual CPU devices",
        fontsize=13,
        fontweight="bold",
        color=_INK,
    )
    figure.savefig(path)


def _style(axes: Axes, title: str, unit: str) -> None:
    axes.set_title(title, fontsize=10, loc="left", color=_INK)
    axes.set_ylabel(unit, fontsize=9, color=_INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=_INK, labelsize=9)


def _draw_losses(axes: Axes, plain: Run, sharded: Run) -> None:
    _style(axes, "Training loss", "cross-entropy, smoothed labels")
    steps = range(1, len(plain.losses) + 1)
    axes.plot(steps, plain.losses, color=_COLORS["replicated"], lw=5, label="replicated")
    axes.plot(steps, sharded.losses, color=_COLORS["sharded"], lw=1.2, label="sharded")
    axes.tick_params(labelbottom=False)
    axes.legend(frameon=False, labelcolor=_INK)


def _draw_loss_difference(axes: Axes, plain: Run, sharded: Run) -> None:
    # A last bit of a float32 is 0.6 to 1.2 of this unit.
    _style(axes, "Relative difference of the two losses", "10⁻⁷")
    a, b = np.array(plain.losses), np.array(sharded.losses)
    steps, difference = range(1, len(a) + 1), 1e7 * np.abs(a - b) / a
    axes.plot(steps, difference, ".", ms=3, color=_COLORS["sharded"], clip_on=False)
    axes.set_ylim(bottom=0)
    axes.margins(y=0.1)
    axes.set_xlabel("step", fontsize=9, color=_INK)


def _draw_bars(axes: Axes, title: str, unit: str, values: Sequence[float]) -> None:
    _style(axes, title, unit)
    bars = axes.bar(list(_COLORS), values, color=list(_COLORS.values()), width=0.8)
    labels = [f"{values[0]:.3g}", f"{values[1]:.3g}\n(× {values[1] / values[0]:.3g})"]
    axes.bar_label(bars, labels, padding=2, fontsize=9, color=_INK)
    axes.margins(y=0.2)


def _draw_sent(axes: Axes, plain: Run, sharded: Run) -> None:
    """Sent bytes, stacked by kind of collective; kinds too small to see get no label."""
    _style(axes, "Sent by each device in a step", "MiB, on a ring")
    for i, run in enumerate((plain, sharded)):
        bottom = 0.0
        for kind, sent in sorted(run.sent_bytes.items(), key=lambda item: -item[1]):
            face, ink = _KIND_COLORS.get(kind, ("#cccccc", _INK))
            height = sent / 2**20
            axes.bar(run.name, height, bottom=bottom, color=face, width=0.8)
            if sent > SMALL * _sent(run):
                middle = bottom + height / 2
                axes.text(i, middle, kind, ha="center", va="center", fontsize=8, color=ink)
            bottom += height
        axes.text(i, bottom, f"{bottom:.3g}", ha="center", va="bottom", fontsize=9, color=_INK)
    axes.margins(y=0.2)


# --------------------------------------------------------------------------------------------- main


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--steps", type=int, help="training steps of each run (default 300)")
    parser.add_argument("--quick", action="store_true", help="12 steps, to see that all works")
    parser.add_argument("--out", type=Path, default=Path("demo.png"), help="where the picture goes")
    arguments = parser.parse_args(argv)
    if arguments.steps is None:
        arguments.steps = 12 if arguments.quick else 300
    if arguments.steps < 1:
        parser.error("--steps must be at least 1")
    if not arguments.out.resolve().parent.is_dir():
        parser.error(f"--out: there is no folder {arguments.out.resolve().parent}")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demonstration; returns the exit code."""
    arguments = parse_arguments(argv)
    use_virtual_devices()
    console = Console()
    mesh = jax.make_mesh((NUM_DEVICES,), ("data",))
    data = Digits.load()
    runs, plan = make_runs(mesh, arguments.steps, data.train_images[:1])
    plain, sharded = runs
    console.print(plan_summary(plan), markup=False, highlight=False, soft_wrap=True)
    console.print()

    batch = [jax.device_put(x, NamedSharding(mesh, P("data"))) for x in data.batch(0)]
    grads = stacked_local_grads(mesh, plain.params, batch)
    with console.status("compiling"):
        for run in runs:
            run.compile(mesh, batch, grads)
    train(runs, mesh, data, arguments.steps, console)
    time_updates(runs, grads, 5 if arguments.quick else 50)
    for run in runs:
        run.test_accuracy = accuracy(run.params, data.test_images, data.test_labels)

    difference = relative_difference(sharded.params, plain.params)
    console.print()
    console.print(make_table(plain, sharded, difference, len(data.test_labels)))
    console.print(closing_words(), soft_wrap=True, highlight=False)
    draw(plain, sharded, arguments.out)
    console.print(f"picture: {arguments.out.resolve()}", soft_wrap=True, highlight=False)
    faults = find_faults(plain, sharded, difference)
    for fault in faults:
        console.print(f"FAULT: {fault}", style="bold red", soft_wrap=True, highlight=False)
    return 1 if faults else 0


def closing_words() -> str:
    """What the numbers mean, and what they do not."""
    return (
        f"Weights may differ by {TOLERANCE:.0e}: the sharded update adds in another order, and "
        "training\namplifies the rounding. Times are those of "
        f"{NUM_DEVICES} virtual devices that share {os.cpu_count()} cores, not\n"
        "of accelerators. Collectives are those of the compiled step; on a ring, an all-reduce\n"
        "sends as much as a reduce-scatter and an all-gather together."
    )


if __name__ == "__main__":
    sys.exit(main())
