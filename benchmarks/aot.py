"""What XLA makes of a train step: replicated, ZeRO-1 by hand, and `shard_step` twice.

    python -m benchmarks.aot                      # all cases; hours on two cores
    python -m benchmarks.aot --case "v5e:16x16 resnet50 lars"
    python -m benchmarks.aot --compare ours,ours-split   # again; what is kept of the others stays
    python -m benchmarks.aot --table              # only the table, from what is kept
    python -m benchmarks.aot --update-only        # of the update alone, without the model

Compiles for clusters that need not be there (`large_scale.aot`), keeps every report in
`docs/aot.json`, and writes `docs/aot_table.md` and `docs/aot.png` from all that it holds (with
`--update-only` `aot_update.json` and so on).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from large_scale.programs import VARIANTS
from large_scale.steps import STEPS

DOCS = Path(__file__).parents[1] / "docs"
TOPOLOGIES = (
    *("v5e:16x16", "v3:32x32", "v4:4x4x4", "v5p:4x4x4", "v6e:16x16", "v3:128x32"),
    "h100:8x8",
)
MODELS = (
    ("resnet50", "lars"),
    ("transformer-big", "adam"),
    ("bert-large", "lamb"),
    ("gpt2", "adam"),
)
CASES = [f"{t} {model} {optimizer}" for model, optimizer in MODELS for t in TOPOLOGIES]

Reports = dict[str, dict[str, Any]]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--case", action="append", choices=CASES, help="default: all")
    parser.add_argument("--compare", help="compile only these variants, as in `large-scale aot`")
    parser.add_argument("--update-only", action="store_true", help="no forward, no backward pass")
    parser.add_argument("--table", action="store_true", help="compile nothing: table and plot only")
    parser.add_argument("--docs", type=Path, default=DOCS)
    args = parser.parse_args(argv)
    name = "aot_update" if args.update_only else "aot"
    kept = args.docs / f"{name}.json"
    found: dict[str, Reports] = json.loads(kept.read_text()) if kept.exists() else {}
    for case in [] if args.table else args.case or CASES:
        print(case, flush=True)
        try:
            new = compiled(case, args.compare, update_only=args.update_only)
        except subprocess.CalledProcessError as e:
            print(f"{case}: {e}; the next one follows", file=sys.stderr)
            continue
        found[case] = merged(found.get(case, {}), new, VARIANTS if args.update_only else STEPS)
        ordered = {c: found[c] for c in CASES if c in found}
        kept.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    if found:
        (args.docs / f"{name}_table.md").write_text(table(found), encoding="utf-8")
        plot(found).savefig(args.docs / f"{name}.png", dpi=110, bbox_inches="tight")


def merged(kept: Reports, new: Reports, order: Collection[str]) -> Reports:
    """Reports of one case by variant: new ones take the place of older ones.

    >>> list(merged({"ours": {}, "replicated": {}}, {"zero1": {}}, ("replicated", "zero1", "ours")))
    ['replicated', 'zero1', 'ours']
    """
    both = kept | new
    return {variant: both[variant] for variant in order if variant in both}


def compiled(case: str, compare: str | None = None, *, update_only: bool = False) -> Reports:
    """The reports of one case, from a process of its own, whose memory is given back."""
    topology, model, optimizer = case.split()
    command = [sys.executable, "-m", "large_scale.cli", "aot", "--topology", topology]
    command += ["--model", model, "--optimizer", optimizer, "--json", "/dev/stdout", "--quiet"]
    command += ["--update-only"] if update_only else []
    command += ["--compare", compare] if compare else []
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if not done.stdout:  # a step that does not fit fails too, and is in the reports
        done.check_returncode()
    return {report["name"]: report for report in json.loads(done.stdout)}


def table(found: dict[str, Reports]) -> str:
    """A row for each case, in the order of `CASES`; the GPU compiler estimates no cycles.

    The first variant in units, the others as multiples of it: what is sent, peak memory, all cycles
    without collectives and those of the update, relayouts included.
    """
    first, *others = next(iter(found.values()))
    sums = ("sent", "peak", "cycles", "update")
    head = ["topology", "model, optimizer"]
    head += [cell for sum_ in sums for cell in (sum_, *others)]
    head += [f"largest all-reduce, {v}" for v in others if v.startswith("ours")]
    lines = [head, ["---", "---", *["---:"] * (len(head) - 2)]]
    for case in CASES:
        if case not in found:
            continue
        topology, model, optimizer = case.split()
        reports = [found[case].get(v, {"name": v}) for v in (first, *others)]
        update = [_update_cycles(r) for r in reports]
        lines.append(
            [
                topology,
                f"{model}, {optimizer}",
                *_against([r.get("sent_bytes") for r in reports], 2**20, "MiB", 3),
                *_against([r.get("peak_bytes") for r in reports], 2**20, "MiB", 2),
                *_against([r.get("total_cycles") for r in reports], 1e6, "M", 2),
                *_against(update, 1e6, "M", 3),
                *(_largest(r) for r in reports if r["name"].startswith("ours")),
            ]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


_LOOKS = {
    "zero1": ("o", "#9a9a9a", "ZeRO-1 by hand"),
    "ours": ("s", "#7fb3d5", "shard_step, whole weights"),
    "ours-split": ("D", "#1a5276", "shard_step, split weights"),
}


def plot(found: dict[str, Reports]) -> Figure:
    """Each case a line, each variant a mark at its multiple of the replicated step."""
    cases = [case for case in reversed(CASES) if case in found]
    sums: dict[str, tuple[Callable[[dict[str, Any]], float | None], float | None]] = {
        "bytes sent": (lambda r: r.get("sent_bytes"), 1.02),
        "peak memory": (lambda r: r.get("peak_bytes"), None),
        "estimated cycles": (lambda r: r.get("total_cycles"), None),
        "of these, of the update": (_update_cycles, 1 / 20),
    }
    figure = Figure(figsize=(13, 1.6 + 0.27 * len(cases)), layout="constrained")
    panels = figure.subplots(1, len(sums), sharey=True, squeeze=False)[0]
    for axes, (title, (value, aim)) in zip(panels, sums.items(), strict=True):
        for variant, (marker, color, label) in _LOOKS.items():
            points = [
                (found[case][variant], found[case]["replicated"], y)
                for y, case in enumerate(cases)
                if variant in found[case]
            ]
            ratios = [(v / w, y) for r, base, y in points if (v := value(r)) and (w := value(base))]
            x, y = zip(*ratios, strict=True) if ratios else ((), ())
            axes.scatter(x, y, marker=marker, color=color, s=26, label=label, zorder=3)
        axes.axvline(1, color="black", linewidth=0.8)
        if aim is not None:
            axes.axvline(aim, color="#c0392b", linewidth=0.9, linestyle="--")
        axes.set_xscale("log")
        low, high = axes.get_xlim()
        between = [] if high > 20 * low else [0.3, 0.7, 1.4]
        ticks = sorted([0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, *between])
        axes.set_xticks([t for t in ticks if low <= t <= high])
        axes.xaxis.set_major_formatter(FuncFormatter(lambda t, _: f"{t:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_title(title, fontsize=10)
        axes.grid(axis="both", color="#e5e5e5", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(cases)), [c.rsplit(" ", 1)[0] for c in cases], fontsize=8)
    figure.suptitle("Multiples of the replicated step (black); aims in red", fontsize=11)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    return figure


def _update_cycles(report: dict[str, Any]) -> float:
    return sum(report.get("cycles", {}).get(kind, 0) for kind in ("update", "relayout"))


def _against(values: Sequence[float | None], unit: float, name: str, digits: int) -> list[str]:
    """The first in a unit, the others as a multiple of it; "-" for what there is not.

    >>> _against([2e6, 1e6, None], 1e6, "M", 2), _against([0, 0], 1e6, "M", 2)
    (['2.0 M', '0.50', '-'], ['-', '-'])
    """
    first, *others = values
    if not first:
        return ["-"] * len(values)
    return [
        f"{first / unit:.1f} {name}",
        *(f"{v / first:.{digits}f}" if v else "-" for v in others),
    ]


def _largest(report: dict[str, Any]) -> str:
    if "does_not_fit" in report:
        return "does not fit"
    if "collectives" not in report:
        return "-"
    sizes = [c["largest_operand_bytes"] for c in report["collectives"] if c["kind"] == "all-reduce"]
    return f"{max(sizes, default=0) / 2**20:.2f} MiB"


if __name__ == "__main__":
    main()
