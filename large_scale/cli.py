"""`large-scale aot`: what a train step does on a cluster, before you rent it."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

import wusharding as wus
from large_scale import aot, report
from large_scale.comparison import Comparison, check_writable, is_device
from large_scale.mesh import make_mesh
from large_scale.models import MODELS
from large_scale.programs import OPTIMIZERS, VARIANTS, Program, update_program
from large_scale.steps import STEPS, step_program
from large_scale.topology import CHIPS, Topology


class _UsageError(Exception):
    """The command line asks for what there is not."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command line.

    Returns:
      The exit status: 0; 1 where not all was compiled, or could be written; 2 for wrong usage; 130
      where it was interrupted.
    """
    args = _parser().parse_args(argv)
    jax.config.update("jax_platforms", "cpu")  # no look for a TPU: nothing runs
    try:
        return _aot(args)
    except _UsageError as e:
        print(f"large-scale: {e}", file=sys.stderr)
        return 2
    except OSError as e:
        print(f"large-scale: {e.filename or 'the output'}: {e.strerror or e}", file=sys.stderr)
        return 1
    except (
        *(ValueError, ModuleNotFoundError),
        *(aot.MissingCompilerError, wus.ShardingError),
    ) as e:
        print(f"large-scale: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("large-scale: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="large-scale", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    other = {name: what for name, what in VARIANTS.items() if STEPS.get(name) != what}
    one = commands.add_parser(
        "aot",
        help="compile a model's train step for a topology, and report on it",
        description="Compiles the train step of a model for a topology that need not exist, and "
        "reports memory, collectives and cycles of one device. "
        f"{_explained(STEPS)} With --update-only there is no forward or backward pass: gradients "
        f"come in, whole weights go out. {_explained(other)}",
    )
    one.add_argument(
        "--topology",
        required=True,
        help='such as "v5e:16x16" or "2*v5p:4x4x8", two slices; the chips are ' + ", ".join(CHIPS),
    )
    one.add_argument("--model", required=True, choices=MODELS)
    one.add_argument("--optimizer", required=True, choices=OPTIMIZERS)
    one.add_argument(
        "--update-only", action="store_true", help="no forward or backward pass: the update alone"
    )
    one.add_argument(
        "--compare",
        metavar="VARIANTS",
        help=f"which of {','.join(STEPS)} (with --update-only of {','.join(VARIANTS)}), "
        "separated by commas (default: all)",
    )
    one.add_argument(
        "--examples",
        type=int,
        metavar="N",
        help="images or sequences on each device (default: 8, 2)",
    )
    one.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="what forward and backward pass compute in; weights are float32 (default: float32)",
    )
    one.add_argument("--quiet", action="store_true", help="no table on the terminal")
    one.add_argument("--json", type=Path, metavar="FILE", help="write the reports here")
    one.add_argument(
        "--html", type=Path, metavar="FILE", help="write a page, and bars beside it (.png)"
    )
    return parser


def _checked(args: argparse.Namespace) -> tuple[list[str], Topology]:
    """The variants and the topology. What would fail after minutes of compiling fails here."""
    known = VARIANTS if args.update_only else STEPS
    variants = list(known) if args.compare is None else re.split(r"\s*,\s*", args.compare.strip())
    if unknown := [v for v in variants if v not in known]:
        raise ValueError(f"--compare: unknown {unknown}; need some of {', '.join(known)}")
    if twice := sorted({v for v in variants if variants.count(v) > 1}):
        raise ValueError(f"--compare: {', '.join(twice)} more than once; name each variant once")
    if args.examples is not None and args.examples < 1:
        raise ValueError(f"--examples: found {args.examples}, need 1 or more")
    if args.update_only and (args.examples is not None or args.dtype is not None):
        option = "--dtype" if args.examples is None else "--examples"
        raise ValueError(f"{option}: the update alone computes on no examples; leave it out")
    check_writable(json=args.json, html=args.html)
    return variants, Topology.of(args.topology)


def _aot(args: argparse.Namespace) -> int:
    try:
        variants, topology = _checked(args)
    except ValueError as e:
        raise _UsageError(str(e)) from e
    if args.html is not None:
        report.library("matplotlib")
    mesh = make_mesh(topology, devices=aot.devices(topology), axis_types=AxisType.Auto)
    num_weights = sum(x.size for x in MODELS[args.model].shapes().values())
    what = "update" if args.update_only else "train step"
    size = f"{topology.num_devices:,} devices"
    meanings = VARIANTS if args.update_only else STEPS
    found = Comparison(
        f"{what} of {args.model}, {args.optimizer}, on {topology} ({size})",
        f"One {what} of {args.model}, {num_weights:,} weights, by {args.optimizer}, compiled for "
        f"{topology}, a cluster of {size} that need not exist."
        f"\n{_explained({v: meanings[v] for v in variants}, chr(10))}",
    )

    def steps() -> Iterator[tuple[str, tuple[Any, ...]]]:
        for variant in variants:
            program = _program(args, variant, mesh)
            yield variant, (program.step, *program.args)
            # Here when it is compiled: it survives if the next one fails, or takes all memory.
            found.save(json=_partial(args.json), html=_partial(args.html))

    try:
        found.compile(steps(), len(variants))
        found.save(json=args.json, html=args.html)
    except BaseException:
        _show_finished(found, args)
        raise
    for path in (_partial(args.json), _partial(args.html)):
        if path is not None:
            path.unlink(missing_ok=True)
            path.with_suffix(".png").unlink(missing_ok=True)
    for why in found.unfit.values():
        print(f"large-scale: {why}", file=sys.stderr)
    if not args.quiet:  # last: whoever reads it may have had enough, and end us
        found.show()
    return 1 if found.unfit else 0


def _program(args: argparse.Namespace, variant: str, mesh: Mesh) -> Program:
    model, optimizer = MODELS[args.model], OPTIMIZERS[args.optimizer]()
    if args.update_only:
        return update_program(variant, optimizer, model.shapes(), mesh)
    model = model.computing_in(args.dtype or "float32")
    return step_program(variant, optimizer, model, mesh, examples=args.examples)


def _explained(variants: Mapping[str, str], between: str = " ") -> str:
    return between.join(f"{name}: {what}." for name, what in variants.items())


def _partial(path: Path | None) -> Path | None:
    """Where reports are kept until all are finished: beside the file, which may be an older one."""
    if path is None or is_device(path):
        return None
    return path.with_name(f"{path.stem}.partial{path.suffix}")


def _show_finished(found: Comparison, args: argparse.Namespace) -> None:
    """Shows the reports that were finished before another failed, and says where they are."""
    if not found.reports:
        return
    names = ", ".join(r.name for r in found.reports)
    for path in (_partial(args.json), _partial(args.html)):
        if path is not None and path.exists():
            print(f"large-scale: finished so far ({names}): {path}", file=sys.stderr)
    if not args.quiet:
        found.show()


if __name__ == "__main__":
    sys.exit(main())
