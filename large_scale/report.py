"""Reports side by side: a table for the terminal, one for documents, bars, and a page with both."""

from __future__ import annotations

import html
import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from large_scale.aot import Report, as_bytes

_ROWS: dict[str, Callable[[Report], str]] = {
    "arguments": lambda r: as_bytes(r.argument_bytes),
    "temporaries": lambda r: as_bytes(r.temp_bytes),
    "peak memory": lambda r: as_bytes(r.peak_bytes),
    "of a device's": lambda r: f"{r.peak_bytes / r.hbm_bytes:.1%}" if r.hbm_bytes else "-",
    "sent by a device": lambda r: as_bytes(r.sent_bytes),
    "largest all-reduce": lambda r: as_bytes(r.largest("all-reduce")),
    "collectives": lambda r: _kinds(r),
    "update cycles": lambda r: _thousands(r.cycles.get("update")),
    "relayout cycles": lambda r: _thousands(r.cycles.get("relayout")),
    "forward and backward": lambda r: _thousands(
        sum(r.cycles.get(kind, 0) for kind in ("forward", "backward")) or None
    ),
    "instructions": lambda r: f"{r.instructions:,}",
    "compile time": lambda r: f"{r.compile_seconds:.0f} s",
}


def _kinds(report: Report) -> str:
    counts: dict[str, int] = {}
    for c in report.collectives:
        counts[c.kind] = counts.get(c.kind, 0) + 1
    return ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items())) or "none"


def _thousands(cycles: float | None) -> str:
    return "-" if cycles is None else f"{cycles / 1e3:,.0f} k"


def rows(reports: Sequence[Report]) -> list[list[str]]:
    """What each report says, a row a question; the first row and column are headings."""
    return [
        ["on each device", *(r.name for r in reports)],
        *([label, *(tell(r) for r in reports)] for label, tell in _ROWS.items()),
    ]


def markdown(reports: Sequence[Report]) -> str:
    """The table as Markdown."""
    head, *body = rows(reports)
    lines = [head, ["---", *["---:"] * len(reports)], *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def terminal_table(reports: Sequence[Report], title: str) -> Any:
    """The table for the terminal, of the `rich` library."""
    table = library("rich.table").Table(title=title, title_justify="left")
    head, *body = rows(reports)
    table.add_column(head[0])
    for name in head[1:]:
        table.add_column(name, justify="right", overflow="fold")
    for line in body:
        table.add_row(*line)
    return table


def library(name: str) -> Any:
    """An optional library.

    Raises:
      ModuleNotFoundError: it is not installed; the message names the extra to install.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as e:
        raise ModuleNotFoundError(
            f"{name.partition('.')[0]} is not installed: pip install 'wusharding[bench]'"
        ) from e


_COLORS = {"update": "#2a6f97", "relayout": "#f4a259", "sent": "#5b8e7d", "peak": "#8d6a9f"}


def draw(reports: Sequence[Report], title: str, path: Path) -> None:
    """Three groups of bars: what a device sends, its peak memory, and its cycles."""
    library("matplotlib").use("Agg")
    plt = library("matplotlib.pyplot")
    figure, axes = plt.subplots(1, 3, figsize=(10, 3.4), layout="constrained")
    names = [r.name for r in reports]
    series: list[tuple[str, list[Mapping[str, float]]]] = [
        ("sent by a device, MiB", [{"sent": r.sent_bytes / 2**20} for r in reports]),
        ("peak memory, MiB", [{"peak": r.peak_bytes / 2**20} for r in reports]),
        (
            "estimated cycles, thousands",
            [
                {kind: r.cycles.get(kind, 0) / 1e3 for kind in ("update", "relayout")}
                for r in reports
            ],
        ),
    ]
    for ax, (label, values) in zip(axes, series, strict=True):
        bottom = [0.0] * len(reports)
        for kind in values[0]:
            heights = [v[kind] for v in values]
            ax.bar(names, heights, bottom=bottom, color=_COLORS[kind], label=kind, width=0.6)
            bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
        for x, total in enumerate(bottom):
            ax.annotate(f"{total:,.0f}", (x, total), ha="center", va="bottom", fontsize=9)
        ax.set_title(label, fontsize=9, loc="left")
        ax.set_ylim(0, max(bottom) * 1.15 or 1)
        ax.spines[["top", "right"]].set_visible(False)
        ax.tick_params(labelsize=9)
        if len(values[0]) > 1:
            ax.legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def page(reports: Sequence[Report], title: str, picture: str) -> str:
    """The table and the bars as one HTML page.

    Args:
      reports: side by side.
      title: of the page.
      picture: where the bars are, relative to the page.
    """
    head, *body = rows(reports)
    cells = [
        "<tr>" + "".join(f"<th>{html.escape(x)}</th>" for x in head) + "</tr>",
        *(
            f"<tr><th>{html.escape(label)}</th>"
            + "".join(f"<td>{html.escape(x)}</td>" for x in rest)
            + "</tr>"
            for label, *rest in body
        ),
    ]
    return (
        f"<!doctype html><meta charset=utf-8><title>{html.escape(title)}</title>"
        "<style>body{font:15px system-ui;margin:2rem}table{border-collapse:collapse}"
        "th,td{padding:.3rem .8rem;border-bottom:1px solid #ddd;text-align:right}"
        "th:first-child{text-align:left}</style>"
        f"<h1>{html.escape(title)}</h1><table>{''.join(cells)}</table>"
        f'<p><img src="{html.escape(picture)}" alt="bars" width="1000">\n'
    )
