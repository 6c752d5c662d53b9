"""Whole train steps: replicated, ZeRO-1 by hand, and untouched through `shard_step`.

    python -m benchmarks.step --page docs/step_benchmark.md

Eight virtual CPU devices share this machine's cores, so work that every replica repeats is really
done eight times, and a collective is a copy in memory. `benchmarks.step_programs` says what is
timed. All programs of a case run in this one process, one after the other, shuffled anew in every
round; a round's times give its ratios. Then the time that `shard_step` takes before XLA compiles is
set beside that of compiling, for more and more arrays and layers.
"""

import argparse
import dataclasses
import gc
import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.progress import Progress

from benchmarks import report
from benchmarks.devices import NUM_DEVICES, device_bytes, use_virtual_devices
from benchmarks.report import SHORT, Sheet, Spread, ms, ratio
from benchmarks.step_models import Model, decoder, mlp
from benchmarks.step_programs import ELEMENTWISE, VARIANTS, WRITTEN, Program, Steps, staged_ours
from benchmarks.update_programs import OPTIMIZERS, Taken, leaf_shapes, num_elems, staged
from large_scale.hlo import collectives

CASES = {
    "mlp-adam": ("MLP", "adam"),
    "transformer-adam": ("Transformer", "adam"),
    "transformer-lamb": ("Transformer", "lamb"),
}
HOW = """\
* step: forward and backward pass, reduction, update and gather; weights and state are donated.
  Medians of {rounds} rounds, quartiles in brackets.
* CPU: of all cores during a step. Other load on the machine stretches the clock, and this hardly.
* faster: times faster than the replicated step that is written in the same way, by the clock and by
  CPU time; medians of each round's ratio.
* state, weights: on each device, between steps, read off the arrays.
* sent: by one device in a step, were collectives rings, read off the optimized HLO.
* loss: largest relative difference from the replicated step's, over all rounds.
* before compiling, compile: seconds before the first step. Before compiling are tracing, analysis
  and lowering."""


@dataclasses.dataclass(frozen=True)
class Row:
    """What is reported of one variant; times of steps in milliseconds.

    Args:
      written: one of `WRITTEN`.
      variant: one of `VARIANTS`.
      step_ms: the whole step.
      cpu_ms: of all cores, during the step.
      faster: replicated over this one, round by round.
      cpu_faster: the same by `cpu_ms`.
      state_bytes: optimizer state on one device.
      weight_bytes: weights on one device, between steps.
      sent_bytes: by one device, on a ring.
      collectives: instructions of each kind in the optimized HLO.
      loss_difference: the largest, relative to the replicated step's loss.
      seconds: of the stages before the first step.
    """

    written: str
    variant: str
    step_ms: Spread
    cpu_ms: Spread
    faster: float
    cpu_faster: float
    state_bytes: int
    weight_bytes: int
    sent_bytes: int
    collectives: dict[str, int]
    loss_difference: float
    seconds: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Case:
    """One model with one optimizer."""

    model: str
    optimizer: str
    num_elems: int
    num_leaves: int
    rows: list[Row]

    @property
    def title(self) -> str:
        millions = f"{self.num_elems / 1e6:.3g} M weights in {self.num_leaves} arrays"
        return f"{self.model}, {self.optimizer.upper()}, {millions}"


@dataclasses.dataclass(frozen=True)
class Growth:
    """Seconds of each stage before the first step under `jit`, replicated and by `shard_step`.

    Args:
      model: its name.
      layers: how many it has.
      num_leaves: arrays of weights.
      plain: of the step as it is written.
      ours: of `shard_step`.
    """

    model: str
    layers: int
    num_leaves: int
    plain: dict[str, float]
    ours: dict[str, float]

    @property
    def transform_s(self) -> float:
        """What `shard_step` takes until XLA can compile, beyond tracing and lowering the step."""
        return before_compiling(self.ours) - before_compiling(self.plain)

    @property
    def share(self) -> float:
        """`transform_s` over the seconds that its compiling takes."""
        return self.transform_s / self.ours["compile"]


def before_compiling(seconds: dict[str, float]) -> float:
    return sum(s for stage, s in seconds.items() if stage != "compile")


# --------------------------------------------------------------------------------------- measuring


def models(width: int, depth: int) -> dict[str, Model]:
    """What is timed; the batch is small, as it is where the update weighs most."""
    return {
        "MLP": mlp(2 * width, layers=2 * depth, examples=8 * NUM_DEVICES),
        "Transformer": decoder(
            width, layers=depth, examples=NUM_DEVICES, length=min(32, width // 2), vocabulary=1024
        ),
    }


def measure(model: Model, name: str, rounds: int, mesh: Mesh, progress: Progress) -> Case:
    """Times every program of one case."""
    label = f"{model.name}, {name}"
    chosen = [
        (written, variant)
        for written in WRITTEN
        for variant in VARIANTS
        if (written, variant) != ("shard_map", "ZeRO-1 by hand") or name in ELEMENTWISE
    ]
    task = progress.add_task(label, total=len(chosen) * (rounds + 2))
    programs: dict[tuple[str, str], Program] = {}
    for written, variant in chosen:
        progress.update(task, description=f"{label}: compiling {written}, {variant}")
        steps = Steps(model, OPTIMIZERS[name](), written, mesh)
        programs[written, variant] = steps.program(variant)
        progress.advance(task)
    taken: dict[tuple[str, str], list[Taken]] = {key: [] for key in chosen}
    for i in range(rounds + 1):
        for k in np.random.default_rng(i).permutation(len(chosen)):
            progress.update(task, description=f"{label}: {', '.join(chosen[k])}")
            found = programs[chosen[k]].run()
            if i:  # the first round warms up
                taken[chosen[k]].append(found)
            progress.advance(task)
    progress.update(task, description=label)
    rows = [_row(key, programs[key], programs[key[0], "replicated"], taken) for key in chosen]
    return Case(model.name, name, num_elems(model.shapes), len(leaf_shapes(model.shapes)), rows)


def _row(
    key: tuple[str, str],
    program: Program,
    base: Program,
    taken: dict[tuple[str, str], list[Taken]],
) -> Row:
    def of(kind: str, who: tuple[str, str]) -> np.ndarray:
        return 1e3 * np.array([getattr(t, kind) for t in taken[who]])

    written, variant = key
    replicated = (written, "replicated")
    found = collectives(program.compiled.as_text())
    losses, wanted = np.array(program.losses), np.array(base.losses)
    return Row(
        written=written,
        variant=variant,
        step_ms=Spread.of(of("wall", key)),
        cpu_ms=Spread.of(of("cpu", key)),
        faster=ratio(of("wall", replicated), of("wall", key)),
        cpu_faster=ratio(of("cpu", replicated), of("cpu", key)),
        state_bytes=device_bytes(program.state),
        weight_bytes=device_bytes(program.params),
        sent_bytes=sum(c.sent_bytes for c in found),
        collectives=dict(Counter(c.kind for c in found)),
        loss_difference=float(np.max(np.abs(losses - wanted) / np.abs(wanted))),
        seconds=program.seconds,
    )


def measure_growth(
    leaves: Sequence[int], layers: Sequence[int], mesh: Mesh, progress: Progress
) -> list[Growth]:
    """Times the stages before the first step, with Adam, of narrow models; each once."""
    found = [mlp(32, layers=max(n // 2, 1), examples=NUM_DEVICES) for n in leaves]
    found += [decoder(32, layers=n, examples=NUM_DEVICES, length=8) for n in layers]
    task = progress.add_task("growth", total=len(found))
    out = []
    for model in found:
        num_leaves = len(leaf_shapes(model.shapes))
        progress.update(task, description=f"growth: {model.name}, {num_leaves} arrays")
        steps = Steps(model, OPTIMIZERS["adam"](), "jit", mesh)
        args = steps.abstract()
        plain = staged(jax.jit(steps.step()), args, mesh)[1]
        ours = staged_ours(steps.sharded("shard_step"), args)[1]
        out.append(Growth(model.name, _depth(model), num_leaves, plain, ours))
        gc.collect()
        jax.clear_caches()
        progress.advance(task)
    progress.update(task, description="growth")
    return out


def _depth(model: Model) -> int:
    return len(model.shapes if model.name == "MLP" else model.shapes["layers"])


def exponent(first: Growth, last: Growth) -> float:
    """p, if what `shard_step` does before compiling grows as the number of arrays to the p."""
    more = before_compiling(last.ours) / before_compiling(first.ours)
    return math.log(more) / math.log(last.num_leaves / first.num_leaves)


# --------------------------------------------------------------------------------------- reporting


def case_sheet(case: Case) -> Sheet:
    columns = (
        *("written as", "update", "step, ms", "CPU, ms", "faster", "by CPU"),
        *("state", "weights", "sent", "collectives", "loss", "before compiling, s", "compile, s"),
    )
    rows = [
        (
            *(r.written, r.variant, str(r.step_ms), ms(r.cpu_ms.median)),
            *(f"{r.faster:.2f}", f"{r.cpu_faster:.2f}"),
            *(f"{n / 1e6:.3g} MB" for n in (r.state_bytes, r.weight_bytes, r.sent_bytes)),
            ", ".join(f"{n} {SHORT.get(kind, kind)}" for kind, n in r.collectives.items()),
            f"{r.loss_difference:.0e}",
            f"{before_compiling(r.seconds):.2f}",
            f"{r.seconds['compile']:.2f}",
        )
        for r in case.rows
    ]
    return Sheet(case.title, columns, rows)


def growth_sheet(growth: Sequence[Growth]) -> Sheet:
    columns = (
        *("model", "layers", "arrays", "trace and lower", "compile"),
        *("`shard_step`: plan", "lower", "compile", "more before compiling", "over its compiling"),
    )
    rows = [
        (
            *(g.model, str(g.layers), str(g.num_leaves)),
            *(f"{before_compiling(g.plain):.2f}", f"{g.plain['compile']:.2f}"),
            *(f"{g.ours[stage]:.2f}" for stage in ("plan", "lower", "compile")),
            *(f"{g.transform_s:.2f}", f"{100 * g.share:.0f} %"),
        )
        for g in growth
    ]
    return Sheet("Seconds before the first step, `jit`, Adam", columns, rows)


def page(cases: Sequence[Case], growth: Sequence[Growth], how: str, picture: str) -> str:
    """The whole report in Markdown."""
    found = report.environment()
    machine = found["machine"]
    versions = ", ".join(f"{name} {v}" for name, v in found["versions"].items())
    parts = [
        "# Whole train steps, measured\n",
        "Written by `python -m benchmarks.step`; what it prints stands here unedited.\n",
        f"{NUM_DEVICES} virtual CPU devices on {machine['cpus']} cores, fp32; {versions}; load of "
        f"the machine at the end {machine['load'][0]:.1f}.\n",
        "The steps:\n",
        "\n".join(f"* `{name}`: {text};" for name, text in WRITTEN.items()),
        "\n".join(f"* {name}: {text}." for name, text in VARIANTS.items()) + "\n",
        "By hand in `shard_map` there is no LAMB: the norms would be those of pieces.\n",
        f"![steps and growth]({picture})\n",
        *(case_sheet(case).markdown() for case in cases),
        f"What the columns mean:\n\n{how}\n",
    ]
    if growth:
        parts += [
            "## Before the first step\n",
            "Narrow models (32 wide), so that XLA has arrays and operations to handle, not data. "
            "`plan` traces, analyses and decides; `lower` traces the sharded step and lowers it. "
            "Each was done once.\n",
            growth_sheet(growth).markdown(),
            "\n".join(growth_words(growth)) + "\n",
        ]
    return "\n".join(parts)


def growth_words(growth: Sequence[Growth]) -> list[str]:
    """How the time before compiling grows, from the second largest model to the largest."""
    out = []
    for model, found in _series(growth).items():
        if len(found) > 1:
            a, b = found[-2:]
            out.append(
                f"* {model}: from {a.num_leaves} to {b.num_leaves} arrays, `shard_step` "
                f"takes {before_compiling(b.ours) / before_compiling(a.ours):.2f} times as long "
                f"before compiling (arrays to the {exponent(a, b):.2f}), and compiling "
                f"{b.ours['compile'] / a.ours['compile']:.2f} times."
            )
    return out


def _series(growth: Sequence[Growth]) -> dict[str, list[Growth]]:
    out: dict[str, list[Growth]] = {}
    for g in sorted(growth, key=lambda g: g.num_leaves):
        out.setdefault(g.model, []).append(g)
    return out


_COLORS = dict(zip(VARIANTS, ("#b8b4a8", "#9a6a8f", "#2a6f97", "#89c2d9"), strict=True))
_LINES = {
    "replicated: compile": ("#b8b4a8", lambda g: g.plain["compile"]),
    "shard_step: compile": ("#2a6f97", lambda g: g.ours["compile"]),
    "shard_step: before compiling": ("#c96b3b", lambda g: before_compiling(g.ours)),
    "replicated: before compiling": ("#e0b69f", lambda g: before_compiling(g.plain)),
}


def plot(cases: Sequence[Case], growth: Sequence[Growth], path: Path) -> None:
    """Bars of the steps' times; below, seconds before the first step over the number of arrays."""
    columns = max(len(cases), 2)
    figure = Figure(figsize=(4.6 * columns, 9 if growth else 4), layout="constrained", dpi=130)
    top, *below = figure.subfigures(2 if growth else 1, 1, squeeze=False)[:, 0]
    for ax, case in zip(top.subplots(1, len(cases), squeeze=False)[0], cases, strict=True):
        _draw_case(ax, case)
    top.suptitle("Whole step: ms, and times faster than replicated", fontsize=12)
    for part in below:
        series = _series(growth)
        axes = part.subplots(1, len(series), squeeze=False)[0]
        for ax, (name, found) in zip(axes, series.items(), strict=True):
            _draw_growth(ax, name, found)
        part.suptitle("Seconds before the first step (`jit`, Adam)", fontsize=12)
        axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(path)


def _draw_case(ax: Axes, case: Case) -> None:
    names = [f"{r.written}\n{r.variant}" for r in case.rows]
    places = range(len(case.rows))
    bars = ax.barh(
        places, [r.step_ms.median for r in case.rows], color=[_COLORS[r.variant] for r in case.rows]
    )
    labels = [f" {ms(r.step_ms.median)}, {r.faster:.2f}×" for r in case.rows]
    ax.bar_label(bars, labels, fontsize=8)
    ax.set_yticks(places, names, fontsize=8)
    ax.invert_yaxis()
    ax.margins(x=0.3)
    ax.set_title(case.title, fontsize=9, loc="left")
    ax.spines[["top", "right"]].set_visible(False)


def _draw_growth(ax: Axes, name: str, growth: Sequence[Growth]) -> None:
    arrays = [g.num_leaves for g in growth]
    for label, (color, value) in _LINES.items():
        seconds = [value(g) for g in growth]
        ax.plot(arrays, seconds, marker="o", ms=4, color=color, label=label)
    ax.set_title(f"{name}: {growth[0].layers} to {growth[-1].layers} layers", fontsize=10)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xticks(arrays, [str(n) for n in arrays])
    ax.minorticks_off()
    ax.set_xlabel("arrays of weights")
    ax.set_ylabel("seconds")
    ax.grid(alpha=0.3)
    ax.spines[["top", "right"]].set_visible(False)


# --------------------------------------------------------------------------------------------- main


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m benchmarks.step", description=__doc__)
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    p.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    p.add_argument("--depth", type=int, default=4, help="of the Transformer; the MLP's is twice")
    p.add_argument("--width", type=int, default=256, help="of the Transformer; the MLP's is twice")
    p.add_argument("--rounds", type=int, default=15, help="to measure")
    p.add_argument("--leaves", type=int, nargs="*", default=[10, 30, 100], help="growth: arrays")
    p.add_argument("--layers", type=int, nargs="*", default=[12], help="growth: layers")
    p.add_argument("--json", type=Path, metavar="PATH")
    p.add_argument(
        "--page", type=Path, metavar="PATH", help="Markdown; its picture lies beside it as .png"
    )
    return p


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measures, prints and returns what `--json` writes."""
    args = parser().parse_args(argv)
    console = report.console()
    mesh = jax.make_mesh((NUM_DEVICES,), ("data",), axis_types=(AxisType.Auto,))
    cases: list[Case] = []
    with report.progress(console) as progress:
        for name in args.cases:
            model, optimizer = CASES[name]
            chosen = models(args.width, args.depth)[model]
            cases.append(measure(chosen, optimizer, args.rounds, mesh, progress))
            gc.collect()  # before the next case fills its buffers
            progress.console.print(case_sheet(cases[-1]).table())
        growth = measure_growth(args.leaves, args.layers, mesh, progress)
        progress.console.print(growth_sheet(growth).table())
    how = HOW.format(rounds=args.rounds)
    console.print("\n".join([*growth_words(growth), how]), highlight=False, markup=False)
    data = {
        **report.environment(),
        "cases": [dataclasses.asdict(c) for c in cases],
        "growth": [dataclasses.asdict(g) for g in growth],
    }
    if args.json:
        args.json.write_text(json.dumps(data, indent=2) + "\n")
    if args.page:
        picture = args.page.with_suffix(".png")
        plot(cases, growth, picture)
        args.page.write_text(page(cases, growth, how, picture.name))
    return data


if __name__ == "__main__":
    use_virtual_devices()
    main()
