"""`large-scale aot`: what sharding the update does on a cluster, before you rent it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
from jax.sharding import AxisType

from large_scale import aot, report, shapes
from large_scale.compare import Comparison, check_writable
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
    except (ValueError, OSError, aot.MissingCompilerError, ModuleNotFoundError) as e:
        print(f"large-scale: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("large-scale: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="large-scale", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    one = commands.add_parser(
        "aot",
        help="compile a model's weight update for a topology, and report on it",
        description="Compiles the weight update of a model for a TPU topology that need not exist, "
        "and reports memory, collectives and cycles of one device. " + _explained(list(VARIANTS)),
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
    one.add_argument(
        "--html", type=Path, metavar="FILE", help="write a page, and bars beside it (.png)"
    )
    return parser


def _aot(args: argparse.Namespace) -> int:
    variants = args.compare.split(",")
    if unknown := [v for v in variants if v not in VARIANTS]:
        raise ValueError(f"--compare: unknown {unknown}; need some of {', '.join(VARIANTS)}")
    if twice := sorted({v for v in variants if variants.count(v) > 1}):
        raise ValueError(f"--compare: {', '.join(twice)} more than once; name each variant once")
    # What would fail after minutes of compiling fails now.
    for option, path in (("--json", args.json), ("--html", args.html)):
        if path is not None:
            check_writable(path, option)
    if args.html is not None:
        report.library("matplotlib")
    topology = Topology.of(args.topology)
    mesh = make_mesh(topology, devices=aot.devices(topology), axis_types=AxisType.Auto)
    weights = MODELS[args.model]()
    num_weights = sum(x.size for x in weights.values())
    found = Comparison(
        f"{args.model}, {args.optimizer}, on {topology} ({topology.num_devices:,} devices)",
        f"One update by {args.optimizer} of the {num_weights:,} weights of {args.model}, compiled "
        f"for {topology}, a cluster of {topology.num_devices:,} devices that need not exist. "
        "Gradients of each device come in, whole new weights go out; there is no forward or "
        "backward pass.\n" + _explained(variants, "\n"),
    )
    try:
        for variant in variants:
            program = update_program(variant, OPTIMIZERS[args.optimizer](), weights, mesh)
            found.compile({variant: (program.step, *program.args)})
    except BaseException:
        _save_finished(found, args)
        raise
    if not args.quiet:
        found.show()
    found.save(json=args.json, html=args.html)
    for why in found.unfit.values():
        print(f"large-scale: {why}", file=sys.stderr)
    return 1 if found.unfit else 0


def _explained(variants: Sequence[str], between: str = " ") -> str:
    return between.join(f"{name}: {VARIANTS[name]}." for name in variants)


def _save_finished(found: Comparison, args: argparse.Namespace) -> None:
    """Shows and keeps the reports that were finished before another failed, beside older files."""
    if not found.reports:
        return
    if not args.quiet:
        found.show()
    for option, path in (("json", args.json), ("html", args.html)):
        if path is not None:
            beside = path.with_name(f"{path.stem}.partial{path.suffix}")
            found.save(**{option: beside})
            names = ", ".join(r.name for r in found.reports)
            print(f"large-scale: finished so far ({names}): {beside}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
