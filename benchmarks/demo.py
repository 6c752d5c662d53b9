"""The demonstration: one training run, its update replicated and, in two ways, sharded.

A small convolutional network learns the handwritten digits that scikit-learn ships, data-parallel
over eight virtual CPU devices, three times: as usual, with averaged gradients and the whole update
on every replica; with the optimizer in `wusharding.shard_updates`; and the usual step again, not a
line changed, through `wusharding.shard_step`. All start from the same weights, see the same batches
and take their steps in turn in one process, so their times compare.

Printed are what each run learned, holds, sends and takes; the same is drawn into a picture. The
script fails if the weights of a sharded run differ from the replicated one's by more than
`TOLERANCE`, or if its compiled step still all-reduces gradients.
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
    """One of the runs: its programs, what it holds, and what was measured.

    Args:
      name: "replicated", or what shards it: "shard_updates" or "shard_step".
      update: local gradients, state and weights to new weights and state, on one replica.
      state_specs: tree of `PartitionSpec` of the state.
      params: weights.
      state: optimizer state; for `shard_step` whole until it is compiled.
      plan: what is sharded, and how.
    """

    name: str
    update: Update
    state_specs: Tree
    params: Tree
    state: Tree
    plan: wus.Plan | wus.StepPlan | None = None
    step: Any = None
    update_alone: Any = None
    losses: list[float] = dataclasses.field(default_factory=list)
    step_seconds: list[float] = dataclasses.field(default_factory=list)
    update_seconds: list[float] = dataclasses.field(default_factory=list)
    collectives: list[hlo.Collective] = dataclasses.field(default_factory=list)
    update_flops: float = 0.0
    test_accuracy: float = 0.0

    def compile(self, mesh: Mesh, batch: Sequence[jax.Array], grads: Tree) -> None:
        """Compiles the training step, and the update by itself.

        `shard_step` takes whole steps: weights that no forward pass reads, it would not gather.
        """

        def step(params: Tree, state: Tree, images: Any, labels: Any) -> tuple[Any, ...]:
            loss, grads = loss_and_local_grads(params, images, labels)
            params, state = self.update(grads, state, params)
            return params, state, jax.lax.pmean(loss, "data")

        def update_alone(params: Tree, state: Tree, stacked: Tree) -> tuple[Tree, Tree]:
            return self.update(jax.tree.map(lambda g: g[0], stacked), state, params)

        held = (P(), self.state_specs)
        ins, outs = (*held, P("data"), P("data")), (*held, P())
        whole = jax.shard_map(step, mesh=mesh, in_specs=ins, out_specs=outs)
        alone = jax.shard_map(update_alone, mesh=mesh, in_specs=(*held, P("data")), out_specs=held)
        args = (self.params, self.state, *batch)
        if self.name == "shard_step":
            sharded = wus.shard_step(whole, mesh=mesh, donate_argnums=(0, 1))
            self.step = sharded.lower(*args).compile()
            self.plan = sharded.plan
            self.params, self.state, *_ = sharded.shard(*args)
        else:
            self.step = _compiled(whole, args)
            self.update_alone = _compiled(alone, (self.params, self.state, grads))
            self.update_flops = self.update_alone.cost_analysis()["flops"]
        self.collectives = hlo.collectives(self.step.as_text())

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


# ------------------------------------------------------------------------------------ running them


def make_runs(mesh: Mesh, steps: int, images: np.ndarray) -> list[Run]:
    """The runs, from the same weights; the replicated one first."""
    optimizer = make_optimizer(steps)
    params = jax.jit(Network().init)(jax.random.key(0), images)
    everywhere = NamedSharding(mesh, P())
    copies = [jax.device_put(jax.tree.map(jnp.copy, params), everywhere) for _ in range(3)]
    states = [jax.device_put(optimizer.init(params), everywhere) for _ in range(2)]
    sharded = wus.shard_updates(optimizer, mesh=mesh, axis="data")
    specs, plan = sharded.state_specs(copies[1]), sharded.plan(copies[1])
    usual = replicated_update(optimizer)
    return [
        Run("replicated", usual, P(), copies[0], states[0]),
        Run("shard_updates", sharded.apply, specs, copies[1], sharded.init(copies[1]), plan),
        Run("shard_step", usual, P(), copies[2], states[1]),
    ]


def stacked_local_grads(mesh: Mesh, params: Tree, batch: Sequence[jax.Array]) -> Tree:
    """Each replica's gradients, stacked along a new first dim."""

    def grads(params: Tree, images: jax.Array, labels: jax.Array) -> Tree:
        return jax.tree.map(lambda g: g[None], loss_and_local_grads(params, images, labels)[1])

    specs = (P(), P("data"), P("data"))
    return jax.jit(jax.shard_map(grads, mesh=mesh, in_specs=specs, out_specs=P("data")))(
        params, *batch
    )


def train(runs: Sequence[Run], mesh: Mesh, data: Digits, steps: int, console: Console) -> None:
    """Takes all steps, the runs in turn, another one first in every step."""
    spread = NamedSharding(mesh, P("data"))
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[losses]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=steps, losses="")
        for i in range(steps):
            batch = [jax.device_put(x, spread) for x in data.batch(i)]
            for k in range(len(runs)):
                runs[(i + k) % len(runs)].take_step(batch)
            losses = " | ".join(f"{run.losses[-1]:.4f}" for run in runs)
            progress.update(task, advance=1, losses=losses)


def time_updates(runs: Sequence[Run], grads: Tree, repeats: int) -> None:
    """Times the updates alone, in turn, on copies of what the runs hold."""
    timed = [run for run in runs if run.update_alone]
    held = [jax.tree.map(jnp.copy, (run.params, run.state)) for run in timed]
    for i in range(repeats + _WARMUP):
        for k in range(len(timed)):
            j = (i + k) % len(timed)
            held[j] = timed[j].time_update(held[j], grads)


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
        f"the step of {sharded.name} has {fault}"
        for fault in collective_faults(sharded.collectives, grad_bytes)
    ]
    # The check must see in the replicated step what it looks for in the sharded one.
    if len(collective_faults(plain.collectives, grad_bytes)) != 2:
        faults.append("the check of collectives does not see the replicated step's all-reduce")
    if not difference <= TOLERANCE:  # NaN is a fault too
        faults.append(
            f"weights of {sharded.name} differ by {difference:.1e}, more than {TOLERANCE:.0e}"
        )
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


def make_table(runs: Sequence[Run], differences: Sequence[float], num_tests: int) -> Table:
    """Everything measured, the runs side by side, the replicated one first.

    Args:
      runs: the runs.
      differences: of the others' weights from the first one's.
      num_tests: images in the test set.
    """
    table = Table(title="Weight update: replicated and sharded", title_style="bold")
    table.add_column("")
    for run in runs:
        table.add_column(run.name, justify="right", no_wrap=True)

    def add(name: str, show: Callable[[Any], str], values: Sequence[Any]) -> None:
        table.add_row(name, *map(show, values))

    def add_compared(name: str, show: Callable[[Any], str], values: Sequence[float]) -> None:
        base, *others = values
        table.add_row(name, show(base), *(f"{show(v)} (× {v / base:.3f})" for v in others))

    timed = [run for run in runs if run.update_alone]

    add("training loss, first step", "{:.6f}".format, [run.losses[0] for run in runs])
    add("training loss, last step", "{:.6f}".format, [run.losses[-1] for run in runs])
    add(f"accuracy on {num_tests} test images", "{:.2%}".format, [r.test_accuracy for r in runs])
    table.add_row("weights, largest relative difference", "", *(f"{d:.1e}" for d in differences))
    table.add_section()
    add_compared("optimizer state on each device", _bytes, [run.state_bytes for run in runs])
    add_compared("step, median", _ms, [_median(run.step_seconds) for run in runs])
    add_compared("update and collectives, median", _ms, [_median(r.update_seconds) for r in timed])
    add_compared("update, operations on each device", _mflop, [r.update_flops for r in timed])
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


def plan_summary(plan: wus.Plan | wus.StepPlan) -> str:
    """A plan without its lists of arrays."""
    sections = str(plan).split("\n\n")
    return "\n\n".join(s for i, s in enumerate(sections) if not i or s.startswith("Collectives"))


# -------------------------------------------------------------------------------------- the picture

_INK = "#333333"
_COLORS = {"replicated": "#b8b4a8", "shard_updates": "#2a6f97", "shard_step": "#c96b3b"}
# Face and text of each kind of collective that is large enough to be seen.
_KIND_COLORS = {
    "all-reduce": ("#b8b4a8", _INK),
    "reduce-scatter": ("#2a6f97", "white"),
    "all-gather": ("#89c2d9", _INK),
}


def draw(runs: Sequence[Run], path: Path) -> None:
    """The losses, and what the runs hold, take and send, as a picture."""
    figure = Figure(figsize=(13.5, 6.5), layout="constrained", dpi=150)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.08)
    grid = figure.add_gridspec(4, 4, width_ratios=(1.3, 1.3, 1, 1))
    loss = figure.add_subplot(grid[:3, :2])
    difference = figure.add_subplot(grid[3, :2], sharex=loss)
    _draw_losses(loss, runs)
    _draw_loss_difference(difference, runs)
    mib = 2.0**20
    timed = [run for run in runs if run.update_alone]
    bars = (
        ("Optimizer state on each device", "MiB", lambda run: run.state_bytes / mib),
        ("Training step, median", "ms", lambda run: 1e3 * _median(run.step_seconds)),
        ("Update and its collectives, median", "ms", lambda run: 1e3 * _median(run.update_seconds)),
    )
    places = (grid[:2, 2], grid[:2, 3], grid[2:, 2])
    for place, (title, unit, value) in zip(places, bars, strict=True):
        shown = timed if title.startswith("Update") else runs
        _draw_bars(figure.add_subplot(place), title, unit, shown, value)
    _draw_sent(figure.add_subplot(grid[2:, 3]), runs)
    weights = sum(x.size for x in jax.tree.leaves(runs[0].params))
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


def _label(run: Run) -> str:
    """Its name, to stand below a bar."""
    return run.name.replace("_", "_\n")


def _draw_losses(axes: Axes, runs: Sequence[Run]) -> None:
    _style(axes, "Training loss", "cross-entropy, smoothed labels")
    steps = range(1, len(runs[0].losses) + 1)
    for run, width in zip(runs, (7, 3.5, 1), strict=True):
        axes.plot(steps, run.losses, color=_COLORS[run.name], lw=width, label=run.name)
    axes.tick_params(labelbottom=False)
    axes.legend(frameon=False, labelcolor=_INK)


def _draw_loss_difference(axes: Axes, runs: Sequence[Run]) -> None:
    # A last bit of a float32 is 0.6 to 1.2 of this unit.
    _style(axes, "Relative difference from the replicated loss", "10⁻⁷")
    plain, *others = runs
    base = np.array(plain.losses)
    for run, size in zip(others, (6, 2), strict=True):
        difference = 1e7 * np.abs(np.array(run.losses) - base) / base
        steps = range(1, len(base) + 1)
        axes.plot(steps, difference, "o", ms=size, color=_COLORS[run.name], clip_on=False)
    axes.set_ylim(bottom=0)
    axes.margins(y=0.1)
    axes.set_xlabel("step", fontsize=9, color=_INK)


def _draw_bars(
    axes: Axes, title: str, unit: str, runs: Sequence[Run], value: Callable[[Run], float]
) -> None:
    _style(axes, title, unit)
    names, values = [_label(run) for run in runs], [value(run) for run in runs]
    bars = axes.bar(names, values, color=[_COLORS[run.name] for run in runs], width=0.8)
    base, *others = values
    labels = [f"{base:.3g}", *(f"{v:.3g}\n(× {v / base:.3g})" for v in others)]
    axes.bar_label(bars, labels, padding=2, fontsize=9, color=_INK)
    axes.margins(y=0.2)


def _draw_sent(axes: Axes, runs: Sequence[Run]) -> None:
    """Sent bytes, stacked by kind of collective; kinds too small to see get no label."""
    _style(axes, "Sent by each device in a step", "MiB, on a ring")
    for i, run in enumerate(runs):
        bottom = 0.0
        for kind, sent in sorted(run.sent_bytes.items(), key=lambda item: -item[1]):
            face, ink = _KIND_COLORS.get(kind, ("#cccccc", _INK))
            height = sent / 2**20
            axes.bar(_label(run), height, bottom=bottom, color=face, width=0.8)
            if sent > SMALL * _sent(run):
                middle = bottom + height / 2
                axes.text(
                    i,
                    middle,
                    kind.replace("-", "-\n"),
                    ha="center",
                    va="center",
                    fontsize=8,
                    color=ink,
                )
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
    plain_text: Any = {"markup": False, "highlight": False, "soft_wrap": True}
    mesh = jax.make_mesh((NUM_DEVICES,), ("data",))
    data = Digits.load()
    runs = make_runs(mesh, arguments.steps, data.train_images[:1])
    plain, *sharded = runs
    batch = [jax.device_put(x, NamedSharding(mesh, P("data"))) for x in data.batch(0)]
    grads = stacked_local_grads(mesh, plain.params, batch)
    with console.status("compiling"):
        for run in runs:
            run.compile(mesh, batch, grads)
    for run in sharded:
        console.print(f"{run.name}\n{plan_summary(run.plan)}\n", **plain_text)
    train(runs, mesh, data, arguments.steps, console)
    time_updates(runs, grads, 5 if arguments.quick else 50)
    for run in runs:
        run.test_accuracy = accuracy(run.params, data.test_images, data.test_labels)

    differences = [relative_difference(run.params, plain.params) for run in sharded]
    console.print()
    console.print(make_table(runs, differences, len(data.test_labels)))
    console.print(closing_words(), **plain_text)
    draw(runs, arguments.out)
    console.print(f"picture: {arguments.out.resolve()}", **plain_text)
    pairs = zip(sharded, differences, strict=True)
    faults = [fault for run, d in pairs for fault in find_faults(plain, run, d)]
    for fault in faults:
        console.print(f"FAULT: {fault}", style="bold red", soft_wrap=True, highlight=False)
    return 1 if faults else 0


def closing_words() -> str:
    """What the numbers mean, and what they do not."""
    return (
        f"Weights may differ by {TOLERANCE:.0e}: a sharded update adds in another order, and "
        "training\namplifies the rounding. Times are those of "
        f"{NUM_DEVICES} virtual devices that share {os.cpu_count()} cores, not\n"
        "of accelerators. Collectives are those of the compiled step; on a ring, an all-reduce\n"
        "sends as much as a reduce-scatter and an all-gather together."
    )


if __name__ == "__main__":
    sys.exit(main())
