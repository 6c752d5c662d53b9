"""`large-scale aot`: what sharding the update does on a cluster, before you rent it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AxisType

from large_scale import aot, report, shapes
from large_scale.mesh import make_mesh
from large_scale.programs import OPTIMIZERS, VARIANTS, update_program
from large_scale.topology import Topology

MODELS: dict[str, Callable[[], shapes.Shapes]] = {
    "resnet50": shapes.resnet50,
    "transformer-big": shapes.transformer_big,
    "bert-large": shapes.bert_large,
    "gpt2": shapes.gpt2,
}


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns its exit status."""
    args = _parser().parse_args(argv)
    jax.config.update("jax_platforms", "cpu")  # no look for a TPU: nothing runs
    try:
        return _aot(args)
    except (ValueError, aot.MissingCompilerError, aot.DoesNotFitError, ModuleNotFoundError) as e:
        print(f"large-scale: {e}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="large-scale", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    one = commands.add_parser(
        "aot",
        help="compile a model's weight update for a topology, and report on it",
        description="Compiles the weight update of a model for a TPU topology that need not exist, "
        "and reports memory, collectives and cycles of one device. "
        + " ".join(f"{name}: {what}." for name, what in VARIANTS.items()),
    )
    one.add_argument("--topology", required=True, help='such as "v5e:16x16" or "v3:128x32"')
    one.add_argument("--model", required=True, choices=MODELS)
    one.add_argument("--optimizer", required=True, choices=OPTIMIZERS)
    one.add_argument(
        "--compare",
        default=",".join(VARIANTS),
        help="which of %(default)s, separated by commas (default: all)",
    )
    one.add_argument("--quiet", action="store_true", help="no table on the terminal")
    one.add_argument("--json", type=Path, metavar="FILE", help="write the reports here")
    one.add_argument("--html", type=Path, metavar="FILE", help="write a page, and bars beside it")
    return parser


def _aot(args: argparse.Namespace) -> int:
    variants = args.compare.split(",")
    unknown = [v for v in variants if v not in VARIANTS]
    if unknown:
        raise ValueError(f"--compare: unknown {unknown}; need some of {', '.join(VARIANTS)}")
    topology = Topology.of(args.topology)
    found = compare(topology, args.model, args.optimizer, variants)
    title = f"{args.model}, {args.optimizer}, on {topology} ({topology.num_devices} devices)"
    if not args.quiet:
        report.library("rich.console").Console().print(report.terminal_table(found, title))
    if args.json:
        data = [json.loads(r.to_json()) for r in found]
        args.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    if args.html:
        picture = args.html.with_suffix(".png")
        report.draw(found, title, picture)
        args.html.write_text(report.page(found, title, picture.name), encoding="utf-8")
    return 0


def compare(
    topology: Topology,
    model: str,
    optimizer: str,
    variants: Sequence[str],
    **options: Any,
) -> list[aot.Report]:
    """Compiles one update several ways, with a progress bar on the terminal.

    Args:
      topology: to compile for.
      model: a key of `MODELS`.
      optimizer: a key of `OPTIMIZERS`.
      variants: keys of `VARIANTS`.
      **options: for `shard_updates`.
    """
    mesh = make_mesh(topology, devices=aot.devices(topology), axis_types=AxisType.Auto)
    weights = MODELS[model]()
    progress = report.library("rich.progress")
    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
    )
    console = report.library("rich.console").Console(stderr=True)
    found = []
    with progress.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=len(variants))
        for variant in variants:
            bar.update(task, description=f"compiling {variant} for {topology}")
            program = update_program(variant, OPTIMIZERS[optimizer](), weights, mesh, **options)
            found.append(aot.compile_step(program.step, *program.args, name=variant))
            bar.advance(task)
    return found


if __name__ == "__main__":
    sys.exit(main())
