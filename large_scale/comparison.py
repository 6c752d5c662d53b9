"""Several steps compiled and reported on side by side: on the terminal, as JSON, as a page."""

from __future__ import annotations

import contextlib
import json as jsonlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from large_scale import aot, report
from large_scale.record import Report

_LEAST_COLUMNS = 80  # in which the tables of four steps fit


def compare(
    steps: Mapping[str, tuple[Any, ...]], *, title: str = "", about: str = ""
) -> Comparison:
    """Compiles steps for the devices of their arguments, and puts the reports side by side.

    Args:
      steps: name to `(step, *args)`, as `aot.compile_step` takes them. Give a step that `jax.jit`
        has wrapped where arguments are to be donated.
      title: of the tables and the page.
      about: what is compared, in a few lines, for the page.

    Raises:
      TypeError: a step without its arguments.
      ValueError: as `aot.compile_step`.

    >>> import jax, jax.numpy as jnp
    >>> from jax.sharding import NamedSharding, PartitionSpec as P
    >>> from large_scale import make_mesh
    >>> where = NamedSharding(make_mesh("cpu:8", axis_types=jax.sharding.AxisType.Auto), P("data"))
    >>> x = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=where)
    >>> found = compare({"sum": (lambda x: x.sum(0), x), "max": (lambda x: x.max(0), x)})
    >>> [(r.name, r.largest("all-reduce")) for r in found.reports]
    [('sum', 128), ('max', 128)]
    """
    if not isinstance(steps, Mapping):
        raise TypeError(
            f"compare: found {type(steps).__name__}, need a mapping from names to (step, *args)."
        )
    for name, given in steps.items():
        if not isinstance(given, tuple | list) or not given or not callable(given[0]):
            kind = type(given).__name__
            raise TypeError(
                f"compare: {name!r}: found a {kind}, need a tuple of the step and its arguments: "
                "(step, *args), the arguments as aot.placed makes them."
            )
    found = Comparison(title, about)
    found.compile(steps.items(), len(steps))
    return found


class Comparison:
    """Reports side by side; `print` shows them as Markdown.

    Args:
      title: of the tables and the page.
      about: what is compared, for the page.
    """

    def __init__(self, title: str = "", about: str = "") -> None:
        self.title = title
        self.about = about
        self.reports: list[Report] = []
        self.unfit: dict[str, str] = {}  # name of a step that does not fit, and why

    def compile(self, steps: Iterable[tuple[str, tuple[Any, ...]]], total: int) -> None:
        """Compiles steps and adds their reports, with a progress bar if this is a terminal.

        A step that no device can hold is noted in `unfit`. What is finished when another one fails,
        or when the user has waited long enough, is kept.

        Args:
          steps: pairs of a name and `(step, *args)`; each is asked for when the one before it is
            compiled.
          total: how many.
        """
        progress = report.library("rich.progress")
        columns = (
            progress.SpinnerColumn(),
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
        )
        console = report.library("rich.console").Console(stderr=True)
        with progress.Progress(
            *columns, console=console, transient=True, disable=not console.is_terminal
        ) as bar:
            task = bar.add_task("tracing", total=total)
            for name, (step, *args) in steps:
                bar.update(task, description=f"compiling {name}")
                try:
                    self.reports.append(aot.compile_step(step, *args, name=name))
                except aot.DoesNotFitError as e:
                    self.unfit[name] = str(e)
                bar.advance(task)

    def __str__(self) -> str:
        parts = [self.title, report.markdown(self.reports), *self.unfit.values()]
        return "\n\n".join(p for p in parts if p)

    def show(self) -> None:
        """Prints the tables for the terminal."""
        console = report.library("rich.console").Console()
        # A narrower terminal breaks lines itself; the library would leave out columns.
        console.width = max(console.width, _LEAST_COLUMNS)
        for part in report.terminal(self.reports, self.title):
            console.print(part, crop=False)

    def save(self, *, json: str | Path | None = None, html: str | Path | None = None) -> None:
        """Writes files, each whole or not at all: an older one stays until the new one is there.

        Args:
          json: where to write the reports as a list; steps that do not fit have `does_not_fit`.
          html: where to write a page. Bars are put beside it, with the ending `.png`, unless it
            goes to a pipe.

        Raises:
          OSError: one cannot be written; it has its name, and older files are as they were.
        """
        if json is not None:
            data = [jsonlib.loads(r.to_json()) for r in self.reports]
            data += [{"name": name, "does_not_fit": why} for name, why in self.unfit.items()]
            write(Path(json), (jsonlib.dumps(data, indent=1) + "\n").encode())
        if html is not None:
            drawn = self.reports and not is_device(Path(html))
            bars = _picture(Path(html)) if drawn else None
            if bars is not None:
                write(bars, report.draw(self.reports, self.title))
            about = "\n".join((self.about, *self.unfit.values()))
            link = quote(os.fsencode(bars.name)) if bars is not None else ""
            page = report.page(self.reports, self.title, link, about)
            write(Path(html), page.encode())


def _picture(page: Path) -> Path:
    """Where the bars of a page are put."""
    return page.with_suffix(".png")


def write(path: Path, data: bytes) -> None:
    """Writes a file beside the older one, then puts it in its place."""
    if is_device(path):
        with _named(path):
            path.write_bytes(data)
        return
    target = path.resolve()
    with _named(path), _part_of(target) as part:
        part.write_bytes(data)
        if target.exists():
            shutil.copymode(target, part)
        part.replace(target)


@contextlib.contextmanager
def _part_of(target: Path) -> Iterator[Path]:
    """A file beside another one, to be put in its place; what is left of it at the end goes."""
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        yield part
    finally:
        with contextlib.suppress(OSError):  # a folder that is not there, a name that is too long
            part.unlink()


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Errors name the file that was asked for, not the one beside it."""
    try:
        yield
    except OSError as e:
        raise type(e)(e.errno, e.strerror or str(e), str(path)) from e


def is_device(path: Path) -> bool:
    """Whether it is a pipe or a device, which is written to as it is."""
    return path.parts[:2] == ("/", "dev") or (path.exists() and not path.is_file())


def check_writable(*, json: Path | None, html: Path | None) -> None:
    """Finds out before minutes of compiling whether files can be written after them.

    Raises:
      ValueError: one cannot, or is to hold two things; the message says why.
    """
    paths = {"--json": json, "--html": html}
    if html is not None and not is_device(html):
        paths["--html, its bars:"] = _picture(html)
    taken: set[Path] = set()
    for option, path in paths.items():
        if path is None:
            continue
        _check_writable(path, option)
        if path.resolve() in taken:
            raise ValueError(
                f"{option} {path}: is written already; give each file a name of its own, the page "
                "one that ends in .html"
            )
        taken.add(path.resolve())


def _check_writable(path: Path, option: str) -> None:
    folder = path.resolve().parent
    if path.is_dir():
        raise ValueError(f"{option} {path}: is a folder; need the name of a file")
    if is_device(path):
        return
    if not folder.is_dir():
        raise ValueError(f"{option} {path}: there is no folder {folder}; make it first")
    if path.exists() and not os.access(path, os.W_OK):
        raise ValueError(f"{option} {path}: {path} cannot be written by this user")
    try:
        with _part_of(path.resolve()) as part:
            part.touch()
    except OSError as e:
        raise ValueError(
            f"{option} {path}: nothing can be written in {folder}: {e.strerror}"
        ) from e
