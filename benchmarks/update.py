"""Time, memory and traffic of the weight update, replicated and sharded.

    python -m benchmarks.update --params 25 50 --optimizers adam lamb sgd --json out.json

Eight virtual CPU devices share this machine's cores, so work that every replica repeats is really
done eight times, and a collective is a copy in memory. `benchmarks.update_programs` says what is
timed. All programs of a case run in this one process, one after the other, shuffled anew in every
round; a round's times give its ratios.
"""

import argparse
import ctypes
import dataclasses
import gc
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.progress import Progress
from rich.table import Table

from benchmarks import report
from benchmarks.devices import NUM_DEVICES, use_virtual_devices
from benchmarks.report import SHORT, Spread, ms, ratio
from benchmarks.update_programs import (
    OPTIMIZERS,
    VARIANTS,
    Bench,
    Program,
    Taken,
    many_shapes,
    num_elems,
    stage_seconds,
    transformer_shapes,
)
from large_scale.hlo import collectives

# The local update and the collectives that a variant consists of, as programs of their own.
PARTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "replicated": ("update:replicated", ("all-reduce",)),
    "zero1-auto": ("update:zero1", ("all-reduce", "gather:zero1")),
    "ours-manual": ("update:ours", ("reduce-scatter", "gather:ours")),
    "ours-explicit": ("update:ours", ("reduce-scatter", "gather:ours")),
    "ours-auto": ("update:ours-sliced", ("all-reduce", "gather:ours")),
}
HOW = """\
step         gradients' reduction, update and gather, from local gradients that lie on the
             devices; no forward or backward pass; weights and state donated
update       the update phase, as a program of its own without collectives: plain optax on each
             device's pieces, cut out of the whole weights (for zero1-auto and ours-auto out of
             whole gradients too). Norms are those of the pieces: what LAMB adds are small
             all-reduces, which `step` has
collectives  programs of their own without an update, on the step's own buffers; ours with packing
             into buckets and unpacking. ours-explicit has the programs of ours-manual. From these
             and from `update` an empty program's time on the same buffers is taken off
rest         step - collectives: what the step's update really takes, with the start of the
             program and what its phases cost each other
cpu          of all cores during a step, and of that in the system: mostly page faults, because
             XLA's CPU client takes temporaries from malloc at every call; not with --allocator keep
x            times faster than replicated, by the clock, and by the seconds of all cores (cpu).
             Sharding eight ways saves no more than 8: an update ratio above that is page faults
             of replicated's temporaries, or other load on the machine
sent         bytes that one device sends per step were collectives rings, read off the optimized
             HLO; beside it as a multiple of one all-reduce (AR) of the gradients
differs      largest difference of a weight from replicated's after one step, over the largest
             change of a weight
Allocator: {allocator}. XLA_FLAGS: {flags}.
Of these flags, the one that keeps XLA from cutting kernels for several threads helps small kernels
more, so it favours the sharded update (25 M, Adam, by cpu: 5.4 times without it, 5.9 with it).
Times are medians of {rounds} rounds, quartiles in brackets; ratios are medians of each round's."""


@dataclasses.dataclass(frozen=True)
class Row:
    """What is reported of one variant; times in milliseconds.

    Args:
      variant: its name.
      step_ms: the whole step.
      update_ms: the update phase, as a program of its own, without the start of a program.
      collectives_ms: the collectives, likewise.
      rest_ms: step less collectives, round by round.
      step_cpu_ms: of all cores, during the step.
      step_system_ms: of these, in the system.
      ratios: of replicated over this one: "step", "update", "rest", and "step_cpu", "update_cpu" by
        the seconds of all cores; "zero1" is zero1-auto's step over this one's.
      state_bytes: optimizer state on one device.
      collectives: instructions of each kind in the optimized HLO.
      sent_bytes: by one device, on a ring.
      sent_ratio: `sent_bytes` over those of one all-reduce of the gradients.
      temp_bytes: temporaries of the step on one device.
      max_difference: of the weights from replicated's after a step, as a part of the step.
      compile_s: seconds to compile.
    """

    variant: str
    step_ms: Spread
    update_ms: Spread
    collectives_ms: Spread
    rest_ms: Spread
    step_cpu_ms: Spread
    step_system_ms: Spread
    ratios: dict[str, float]
    state_bytes: int
    collectives: dict[str, int]
    sent_bytes: int
    sent_ratio: float
    temp_bytes: int
    max_difference: float
    compile_s: float


@dataclasses.dataclass(frozen=True)
class Case:
    """One optimizer on weights of one size.

    `phases_ms` and `phases_cpu_ms` are of the programs other than steps, their starts included.
    """

    optimizer: str
    num_elems: int
    num_leaves: int
    rounds: int
    rows: list[Row]
    phases_ms: dict[str, Spread]
    phases_cpu_ms: dict[str, Spread]


@dataclasses.dataclass(frozen=True)
class Stages:
    """Seconds of one step's tracing, lowering and compiling, plain and sharded; medians.

    `transform_s` is what the sharded one takes more until it can be compiled, deciding how to store
    everything included; `share` is that over the seconds of its compiling.
    """

    name: str
    num_leaves: int
    plain: dict[str, float]
    ours: dict[str, float]
    transform_s: float
    share: float


# --------------------------------------------------------------------------------------- measuring


def measure(name: str, elems: int, rounds: int, progress: Progress) -> Case:
    """Times every program of one case."""
    shapes = transformer_shapes(elems)
    label = f"{name}, {num_elems(shapes) / 1e6:.4g} M"
    num_phases = len({p for u, c in PARTS.values() for p in (u, *c)})
    num_programs = len(VARIANTS) + 2 * num_phases
    task = progress.add_task(f"{label}: filling", total=num_programs * (rounds + 2))
    bench = Bench(shapes, OPTIMIZERS[name]())
    bench.fill()
    steps: list[Program] = []
    phases: list[Program] = []
    for source, found in ((bench.steps(), steps), (bench.phases(), phases)):
        for program in source:
            progress.update(task, advance=1, description=f"{label}: compiling {program.name}")
            found.append(program)
    twins = [bench.empty(program) for program in phases]
    programs = [*steps, *phases, *twins]
    progress.update(task, advance=len(twins), description=f"{label}: warming up")
    differences = bench.max_differences(steps)
    for program in programs[len(steps) :]:
        bench.run(program)
    progress.advance(task, len(programs))
    taken: dict[str, list[Taken]] = {p.name: [] for p in programs}
    for i in range(rounds):
        # What a program leaves in the caches and in malloc's hands serves the next one.
        for k in np.random.default_rng(i).permutation(len(programs)):
            program = programs[k]
            progress.update(task, description=f"{label}: {program.name}")
            taken[program.name].append(bench.run(program))
            progress.advance(task)
    progress.update(task, description=label)
    return _case(name, bench, steps, taken, differences)


def _case(
    name: str,
    bench: Bench,
    steps: Sequence[Program],
    taken: dict[str, list[Taken]],
    differences: dict[str, float],
) -> Case:
    wall, cpu, system = (
        {p: 1e3 * np.array([getattr(t, kind) for t in ts]) for p, ts in taken.items()}
        for kind in ("wall", "cpu", "system")
    )
    one_all_reduce = 2 * bench.grad_bytes * (NUM_DEVICES - 1) // NUM_DEVICES

    def net(ms: dict[str, np.ndarray], program: str) -> np.ndarray:
        # No phase takes no time, however noisy its twin was.
        return np.maximum(ms[program] - ms[f"empty:{program}"], 1e-3)

    def update(v: str, ms: dict[str, np.ndarray]) -> np.ndarray:
        return net(ms, PARTS[v][0])

    moved = {v: sum(net(wall, c) for c in PARTS[v][1]) for v in VARIANTS}
    rows = []
    for program in steps:
        v = program.name
        found = collectives(program.compiled.as_text())
        sent = sum(c.sent_bytes for c in found)
        ratios = {
            "step": ratio(wall["replicated"], wall[v]),
            "step_cpu": ratio(cpu["replicated"], cpu[v]),
            "update": ratio(update("replicated", wall), update(v, wall)),
            "update_cpu": ratio(update("replicated", cpu), update(v, cpu)),
            "rest": ratio(wall["replicated"] - moved["replicated"], wall[v] - moved[v]),
            "zero1": ratio(wall["zero1-auto"], wall[v]),
        }
        rows.append(
            Row(
                v,
                Spread.of(wall[v]),
                Spread.of(update(v, wall)),
                Spread.of(moved[v]),
                Spread.of(wall[v] - moved[v]),
                Spread.of(cpu[v]),
                Spread.of(system[v]),
                ratios,
                bench.state_bytes(v),
                dict(Counter(c.kind for c in found)),
                sent,
                sent / one_all_reduce,
                program.compiled.memory_analysis().temp_size_in_bytes,
                differences[v],
                program.seconds["compile"],
            )
        )
    phases = [p for p in taken if p not in VARIANTS]
    return Case(
        name,
        num_elems(bench.shapes),
        len(bench.shapes),
        len(wall["replicated"]),
        rows,
        {p: Spread.of(wall[p]) for p in phases},
        {p: Spread.of(cpu[p]) for p in phases},
    )


def measure_stages(
    trees: dict[str, Any], optimizer: str, repeats: int, progress: Progress
) -> list[Stages]:
    """Times tracing against compiling."""
    task = progress.add_task("tracing and compiling", total=len(trees))
    out = []
    for name, shapes in trees.items():
        progress.update(task, description=f"tracing and compiling {name}")
        found = stage_seconds(shapes, OPTIMIZERS[optimizer], repeats)
        medians = {
            kind: {stage: float(np.median(s)) for stage, s in stages.items()}
            for kind, stages in found.items()
        }
        before = {k: sum(s for n, s in m.items() if n != "compile") for k, m in medians.items()}
        more = before["ours"] - before["plain"]
        leaves = len(jax.tree.leaves(shapes, is_leaf=lambda x: isinstance(x, tuple)))
        share = more / medians["ours"]["compile"]
        out.append(Stages(name, leaves, medians["plain"], medians["ours"], more, share))
        progress.advance(task)
    return out


# --------------------------------------------------------------------------------------- reporting


def case_table(case: Case) -> Table:
    title = f"{case.optimizer}, {case.num_elems / 1e6:.4g} M weights in {case.num_leaves} arrays"
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("ms")
    columns = (
        *("step", "update", "collectives", "rest", "cpu (system)"),
        *("step×, cpu", "update×, cpu", "rest×", "over zero1"),
        *("state/device", "sent", "in AR", "in the HLO", "differs"),
    )
    for column in columns:
        table.add_column(column, justify="right")
    for row in case.rows:
        x = row.ratios
        table.add_row(
            row.variant,
            *(str(s) for s in (row.step_ms, row.update_ms, row.collectives_ms)),
            ms(row.rest_ms.median),
            f"{ms(row.step_cpu_ms.median)} ({ms(row.step_system_ms.median)})",
            f"{x['step']:.2f}, {x['step_cpu']:.2f}",
            f"{x['update']:.1f}, {x['update_cpu']:.1f}",
            f"{x['rest']:.1f}",
            f"{x['zero1']:.2f}",
            f"{row.state_bytes / 1e6:.4g} MB",
            f"{row.sent_bytes / 1e6:.4g} MB",
            f"{row.sent_ratio:.3f}",
            ", ".join(f"{n} {SHORT.get(kind, kind)}" for kind, n in row.collectives.items()),
            f"{row.max_difference:.0e}",
        )
    return table


def stages_table(stages: Sequence[Stages]) -> Table:
    table = Table(title="Seconds before the first step (manual mode)", title_justify="left")
    table.add_column("weights")
    for column in ("plan", "trace", "lower", "compile"):
        table.add_column(f"{column}\nplain / ours", justify="right")
    table.add_column("more than plain\nbefore compiling", justify="right")
    table.add_column("over compile", justify="right")
    for s in stages:
        pairs = [(s.plain.get(n), s.ours[n]) for n in ("plan", "trace", "lower", "compile")]
        table.add_row(
            f"{s.name} ({s.num_leaves} arrays)",
            *(f"{'-' if p is None else f'{p:.3g}'} / {o:.3g}" for p, o in pairs),
            f"{s.transform_s:.3g}",
            f"{100 * s.share:.1f} %",
        )
    return table


def plot(cases: Sequence[Case], path: Path) -> None:
    """Bars of each variant's step: collectives, then the rest; the update alone beside it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    sizes = sorted({c.num_elems for c in cases})
    names = list(dict.fromkeys(c.optimizer for c in cases))
    figure, axes = plt.subplots(
        len(sizes),
        len(names),
        figsize=(4.6 * len(names) + 1, 2.7 * len(sizes) + 0.8),
        squeeze=False,
        layout="constrained",
    )
    for case in cases:
        ax = axes[sizes.index(case.num_elems)][names.index(case.optimizer)]
        y = np.arange(len(case.rows))
        moved = np.array([r.collectives_ms.median for r in case.rows])
        rest = np.array([max(r.step_ms.median - r.collectives_ms.median, 0) for r in case.rows])
        ax.barh(y - 0.15, moved, 0.45, color="#9aa7b8", label="step: collectives alone")
        ax.barh(y - 0.15, rest, 0.45, moved, color="#c96b3b", label="step: rest")
        update = [r.update_ms.median for r in case.rows]
        ax.barh(y + 0.25, update, 0.25, color="#5b3b8c", label="update phase alone")
        for i, row in enumerate(case.rows):
            text = f" {row.step_ms.median:.0f} ms, {row.ratios['step']:.2f}×"
            ax.text(max(moved[i] + rest[i], moved[i]), i - 0.15, text, va="center", fontsize=8)
            text = f" {row.update_ms.median:.0f} ms, {row.ratios['update']:.1f}×"
            ax.text(row.update_ms.median, i + 0.27, text, va="center", fontsize=7)
        ax.set_yticks(y, [r.variant for r in case.rows])
        ax.invert_yaxis()
        ax.set_xlim(0, 1.35 * max(*(r.step_ms.median for r in case.rows), *update))
        ax.set_title(f"{case.optimizer}, {case.num_elems / 1e6:.3g} M weights", fontsize=10)
        ax.spines[["top", "right"]].set_visible(False)
    for ax in axes[-1]:
        ax.set_xlabel("ms; × = times faster than replicated")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


# --------------------------------------------------------------------------------------------- main


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m benchmarks.update", description=__doc__)
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    p.add_argument("--params", type=float, nargs="+", default=[25, 50], help="millions of weights")
    p.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    p.add_argument("--steps", type=int, default=9, help="rounds to measure")
    p.add_argument("--leaves", type=int, default=2000, help="arrays of the tree for tracing times")
    p.add_argument(
        "--repeats", type=int, default=3, help="of tracing and compiling; 0 leaves it out"
    )
    p.add_argument(
        "--allocator",
        choices=("system", "keep"),
        default="system",
        help="keep: malloc gives no memory back, so that temporaries cost no page faults",
    )
    p.add_argument("--json", type=Path, metavar="PATH")
    p.add_argument("--plot", type=Path, metavar="PATH")
    return p


def keep_memory() -> None:
    """Makes glibc's malloc keep what is freed, from one arena, as devices' allocators do."""
    arena_max, mmap_max, trim_threshold, top_pad = -8, -4, -1, -2
    mallopt = ctypes.CDLL(None).mallopt
    options = {arena_max: 1, mmap_max: 0, trim_threshold: 2**31 - 1, top_pad: 2**26}
    if not all(mallopt(option, value) for option, value in options.items()):
        raise OSError("--allocator keep: mallopt refused; it needs glibc")


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measures, prints and returns what `--json` writes."""
    args = parser().parse_args(argv)
    if args.allocator == "keep":
        keep_memory()
    console = report.console()
    cases: list[Case] = []
    stages: list[Stages] = []
    with report.progress(console) as progress:
        for millions in args.params:
            for name in args.optimizers:
                cases.append(measure(name, round(millions * 1e6), args.steps, progress))
                gc.collect()  # before the next case fills its buffers
                progress.console.print(case_table(cases[-1]))
        if args.repeats:
            trees = {
                f"{args.params[0]:g} M": transformer_shapes(round(args.params[0] * 1e6)),
                "many small": many_shapes(args.leaves),
            }
            stages = measure_stages(trees, args.optimizers[0], args.repeats, progress)
            progress.console.print(stages_table(stages))
    found = report.environment()
    found["machine"]["allocator"] = args.allocator
    flags = found["machine"]["xla_flags"]
    how = HOW.format(rounds=args.steps, allocator=args.allocator, flags=flags)
    console.print(how, highlight=False)
    data = {
        **found,
        "variants": VARIANTS,
        "parts": PARTS,
        "cases": [dataclasses.asdict(c) for c in cases],
        "stages": [dataclasses.asdict(s) for s in stages],
    }
    if args.json:
        args.json.write_text(json.dumps(data, indent=2) + "\n")
    if args.plot:
        plot(cases, args.plot)
    return data


if __name__ == "__main__":
    # NPROC also makes XLA cut every kernel for that many threads' queues. With eight devices on
    # fewer cores that only adds hand-overs, to small kernels most.
    use_virtual_devices("--xla_disable_hlo_passes=cpu-parallel-task-assigner")
    main()
