"""The command `wusharding`: what `shard_step` would do with a train step, without running it."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import inspect
import io
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import jax

import wusharding as wus
from wusharding.analysis.report import html_page
from wusharding.analysis.times import NETWORKS, Times, estimate, time_lines

CANNOT_ANALYZE, USAGE, NOTHING_SHARDED, INTERRUPTED = 1, 2, 3, 130
_MOST_DEVICES = 4096  # each takes memory, and threads
_COUNT_FLAG = "--xla_force_host_platform_device_count"
_HELP = f"""\
FUNCTION takes no arguments and returns (step, args), or (step, args, options):

  step     a train step, as it is handed to shard_step
  args     its arguments, a tuple or list; jax.ShapeDtypeStruct with a NamedSharding suffices,
           on a jax.sharding.AbstractMesh too: then no device is needed
  options  a dict of what shard_step takes, such as {{"axis": "data", "weights": "split"}}

What FILE.py prints meanwhile goes to the standard error.

Exit codes: 0 analysed; {CANNOT_ANALYZE} the step, or FUNCTION, failed or cannot be analysed,
or not all could be printed; {USAGE} wrong usage; {NOTHING_SHARDED} analysed, and nothing of it
would be sharded; {INTERRUPTED} interrupted.
"""


class _Stop(Exception):
    """Ends the command with a message and an exit code."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
      argv: arguments; None takes those of the process.

    Returns:
      The exit code.
    """
    options = _parser().parse_args(argv)
    try:
        return _analyze(options)
    except _Stop as stop:
        print(f"wusharding: {stop}", file=sys.stderr)
        return stop.code
    except KeyboardInterrupt:
        print("wusharding: interrupted", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="wusharding", description=__doc__)
    parser.add_argument("--version", action="version", version=wus.__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    analyze = commands.add_parser(
        "analyze",
        help="explain a train step: what is held and moved before and after, and findings",
        description="Explains what shard_step would do with a train step; runs nothing of it.",
        epilog=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    analyze.add_argument("source", metavar="FILE.py:FUNCTION", help="where the step is")
    analyze.add_argument("--json", action="store_true", help="print the plan as JSON")
    analyze.add_argument("--html", metavar="PATH", type=Path, help="write a page to look at")
    analyze.add_argument(
        "--target", choices=sorted(NETWORKS), help="estimate times on this network"
    )
    analyze.add_argument(
        "--devices",
        metavar="N",
        type=int,
        help=f"make N virtual CPU devices, at most {_MOST_DEVICES}, and use no others",
    )
    return parser


def _analyze(options: argparse.Namespace) -> int:
    if options.html is not None:
        _check_page(options.html, options.source)
    if options.devices is not None:
        _make_devices(options.devices)
    step, args, settings = _read(options.source)
    network = NETWORKS.get(options.target)
    if network is not None:
        settings = {"target": network.platform, **settings}
    plan = _plan(options.source, step, args, settings)
    times = None if network is None else estimate(plan, network)
    if options.html is not None:
        _write(options.html, html_page(plan, times, title=options.source))
        print(f"wrote {options.html}", file=sys.stderr)
    lines = ["", *time_lines(times)] if times is not None else []
    return _print(_as_json(plan, times) if options.json else "\n".join([str(plan), *lines]))


def _make_devices(count: int) -> None:
    """Virtual CPU devices: XLA reads their number when the first one is asked for."""
    if not 1 <= count <= _MOST_DEVICES:
        raise _Stop(
            USAGE,
            f"--devices: need 1 to {_MOST_DEVICES}, got {count}. Any number of devices may be "
            "described instead, by shapes on a jax.sharding.AbstractMesh.",
        )
    kept = [f for f in os.environ.get("XLA_FLAGS", "").split() if not f.startswith(_COUNT_FLAG)]
    os.environ["XLA_FLAGS"] = " ".join([*kept, f"{_COUNT_FLAG}={count}"])
    jax.config.update("jax_platforms", "cpu")
    if jax.device_count() != count:
        raise _Stop(
            USAGE,
            f"--devices {count}: JAX runs already, with {jax.device_count()} devices. Start the "
            "command in a process of its own.",
        )


def _read(source: str) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Imports the file, calls the function, and checks what it returns."""
    path, colon, name = source.rpartition(":")
    if not colon or not path.endswith(".py") or not name.isidentifier():
        raise _Stop(USAGE, f"{source!r}: need FILE.py:FUNCTION, such as train.py:example")
    if not Path(path).is_file():
        raise _Stop(USAGE, f"{path}: there is no such file (looked in {Path.cwd()})")
    module = _import(Path(path))
    function = getattr(module, name, None)
    if not callable(function):
        found = [n for n, f in vars(module).items() if _is_own_function(f, module)]
        raise _Stop(
            USAGE, f"{path}: has no function {name!r}. It has {', '.join(found) or 'none'}."
        )
    with _user_code(source):
        returned = function()
    shape = "need (step, args) or (step, args, options)"
    if not isinstance(returned, tuple | list) or len(returned) not in (2, 3):
        raise _Stop(CANNOT_ANALYZE, f"{source}: returned {_kind(returned)}, {shape}")
    step, args, *rest = returned
    settings = rest[0] if rest else {}
    if not callable(step):
        raise _Stop(CANNOT_ANALYZE, f"{source}: step is {_kind(step)}, need a function; {shape}")
    if not isinstance(args, tuple | list):
        raise _Stop(
            CANNOT_ANALYZE, f"{source}: args is {_kind(args)}, need a tuple of arguments; {shape}"
        )
    if not isinstance(settings, Mapping):
        raise _Stop(CANNOT_ANALYZE, f"{source}: options is {_kind(settings)}, need a dict; {shape}")
    known = [name for name in inspect.signature(wus.shard_step).parameters if name != "step"]
    if unknown := [name for name in settings if name not in known]:
        raise _Stop(
            CANNOT_ANALYZE,
            f"{source}: options: unknown {unknown}; shard_step takes {', '.join(known)}",
        )
    return step, tuple(args), dict(settings)


def _kind(x: Any) -> str:
    return f"a {type(x).__name__}" + (f" of length {len(x)}" if isinstance(x, tuple | list) else "")


def _import(path: Path) -> ModuleType:
    """The module in a file, which may import its neighbours as a script may."""
    sys.path.insert(0, str(path.resolve().parent))
    name = path.stem if path.stem not in sys.modules else f"_analyzed_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with _user_code(f"{path}, when it was imported,"):
        spec.loader.exec_module(module)
    return module


def _is_own_function(f: Any, module: ModuleType) -> bool:
    return callable(f) and getattr(f, "__module__", None) == module.__name__


@contextlib.contextmanager
def _user_code(what: str) -> Iterator[None]:
    """Runs the user's code: what it prints is no part of the output, and it does not end us."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except _Stop:
        raise
    except SystemExit as error:
        raise _Stop(
            CANNOT_ANALYZE,
            f"{what} ended the process: sys.exit({error.code!r}). Keep what a script does when it "
            'is run under `if __name__ == "__main__":`.',
        ) from error
    except Exception as error:
        _fail(f"{what} raised", error)


def _plan(
    source: str, step: Callable[..., Any], args: tuple[Any, ...], settings: dict[str, Any]
) -> wus.StepPlan:
    with _user_code(f"the step of {source}, when it was traced,"):
        return _analyzed(step, args, settings)


def _analyzed(
    step: Callable[..., Any], args: tuple[Any, ...], settings: dict[str, Any]
) -> wus.StepPlan:
    try:
        return wus.analyze(step, *args, **settings)
    except wus.ContextError as error:
        raise _Stop(
            CANNOT_ANALYZE, f"{error} FUNCTION hands it over in its options, as {{'mesh': mesh}}."
        ) from error
    except wus.UnsupportedStepError as error:
        raise _Stop(NOTHING_SHARDED, f"nothing would be sharded: {error}") from error
    except (wus.ShardingError, ValueError) as error:
        raise _Stop(CANNOT_ANALYZE, f"{error}") from error


def _fail(what: str, error: Exception) -> NoReturn:
    """Ends with the user's own frames of a traceback, and what was raised."""
    inner = (str(Path(__file__).parent), str(Path(jax.__file__).parent), contextlib.__file__)
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if not f.filename.startswith((*inner, "<frozen"))
    ]
    notes = getattr(error, "__notes__", [])
    error.__notes__ = [note for note in notes if "JAX_TRACEBACK_FILTERING" not in note]
    lines = traceback.format_list(frames) + traceback.format_exception_only(error)
    raise _Stop(CANNOT_ANALYZE, f"{what}\n{''.join(lines).rstrip()}") from error


def _check_page(path: Path, source: str) -> None:
    """Refuses at once where no page can be written, and to write over what is analysed."""
    analyzed = Path(source.rpartition(":")[0])
    if path.is_file() and analyzed.is_file() and path.samefile(analyzed):
        raise _Stop(USAGE, f"--html {path}: is what is analysed; need the name of another file")
    if path.is_dir():
        raise _Stop(USAGE, f"--html {path}: is a folder; need the name of a file")
    if not path.absolute().parent.is_dir():
        raise _Stop(USAGE, f"--html {path}: there is no folder {path.parent}; make it first")


def _write(path: Path, text: str) -> None:
    """Writes the page beside the older one, then puts it in its place; to a device as it is."""
    data, target = text.encode("utf-8", errors="backslashreplace"), path.resolve()
    plain = target.is_file() or not path.exists()
    part = target.with_name(f".{target.name}.{os.getpid()}.part") if plain else target
    try:
        try:
            part.write_bytes(data)
            if part != target:
                part.replace(target)
        finally:
            if part != target:
                part.unlink(missing_ok=True)
    except OSError as error:
        raise _Stop(USAGE, f"--html {path}: {error.strerror}; nothing was written") from error


def _print(text: str) -> int:
    """Prints the plan, on any terminal, to readers who may have had enough; the exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        print(text, flush=True)
        return 0
    except OSError as error:
        # What is left unwritten would be complained of once more, when the process ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise _Stop(CANNOT_ANALYZE, f"the output: {error.strerror}") from error
        return CANNOT_ANALYZE


def _as_json(plan: wus.StepPlan, times: Times | None) -> str:
    data = json.loads(plan.to_json())
    data["times"] = None if times is None else dataclasses.asdict(times)
    return json.dumps(data, indent=2)
