"""What benchmarks share to say what they found."""

import dataclasses
import os
import platform
from collections.abc import Sequence
from typing import Any

import jax
import jaxlib
import numpy as np
import optax
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

import wusharding as wus
from benchmarks.devices import NUM_DEVICES

SHORT = {"all-reduce": "AR", "reduce-scatter": "RS", "all-gather": "AG", "all-to-all": "A2A"}


@dataclasses.dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Any) -> "Spread":
        low, median, high = np.quantile(np.asarray(values, float), (0.25, 0.5, 0.75))
        return cls(float(median), float(low), float(high))

    def __str__(self) -> str:
        return f"{ms(self.median)} [{ms(self.low)}, {ms(self.high)}]"


@dataclasses.dataclass(frozen=True)
class Sheet:
    """A table of text, for terminals and pages.

    Args:
      title: its heading.
      columns: headings of the columns; the first column is the rows' names.
      rows: the cells.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def table(self) -> Table:
        table = Table(title=self.title, title_justify="left", title_style="bold")
        for i, column in enumerate(self.columns):
            table.add_column(column, justify="right" if i else "left")
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        table = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
        return f"### {self.title}\n\n{table}\n"


def ms(x: float) -> str:
    """Milliseconds, in three digits."""
    return f"{x:.0f}" if abs(x) >= 100 else f"{x:.3g}"


def ratio(base: np.ndarray, other: np.ndarray) -> float:
    """The median of each round's ratio."""
    return float(np.median(base / other))


def console() -> Console:
    """Tables are wide; a file or a pipe has no width of its own."""
    return Console(width=None if Console().is_terminal else 220)


def progress(console: Console) -> Progress:
    """A bar that says what is being measured."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )


def environment() -> dict[str, dict[str, Any]]:
    """The machine, and the versions of what ran on it."""
    return {
        "machine": {
            "cpus": os.cpu_count(),
            "platform": platform.platform(),
            "devices": NUM_DEVICES,
            "load": os.getloadavg(),
            "xla_flags": os.environ.get("XLA_FLAGS", "").strip(),
        },
        "versions": {
            m.__name__: m.__version__
            for m in (wus, jax, jaxlib, optax)
            if hasattr(m, "__version__")
        },
    }
