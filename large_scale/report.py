"""Reports side by side, for the terminal, as Markdown, as bars, and as a page with all of it."""

from __future__ import annotations

import html
import importlib
import io
from collections.abc import Sequence
from typing import Any

from large_scale.record import Report
from large_scale.tables import Table, against, tables


def markdown(reports: Sequence[Report]) -> str:
    """The tables as Markdown."""
    ratios = "".join(f"- {line}\n" for line in against(reports))
    return "\n".join(part for part in (ratios, *map(_markdown, tables(reports))) if part)


def _markdown(table: Table) -> str:
    named = any(name for name, _ in table.groups)
    rule = ["---"] * table.texts + ["---:"] * (len(table.head) - table.texts)
    lines = [table.head, rule, *(row for _, rows in table.groups for row in rows)]
    if named:
        first = ["step", "---", *(name for name, rows in table.groups for _ in rows)]
        lines = [(name, *line) for name, line in zip(first, lines, strict=True)]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{table.title}:\n\n{text}\n"


def terminal(reports: Sequence[Report], title: str) -> list[Any]:
    """The tables for the terminal, of the `rich` library, under a title."""
    rich = library("rich.table")
    text = library("rich.text").Text
    made: list[Any] = [text(title, style="bold"), *map(text, against(reports))]
    for table in tables(reports):
        one = rich.Table(
            title=f"\n{table.title}",
            title_justify="left",
            title_style="bold",
            box=library("rich.box").SIMPLE_HEAD,
            padding=(0, 1),
            pad_edge=False,
        )
        for i, name in enumerate(table.head):
            # Side by side the columns are steps, whose names and words may be long.
            figures = i >= table.texts
            cells = [name, *(row[i] for _, rows in table.groups for row in rows)]
            words = [w for cell in cells for w in cell.split()]
            whole = figures and not table.meanings
            # A figure that is cut, or loses its unit, is read as another one.
            kept = cells if whole else [w for w in words if not figures or w[:1].isdigit()]
            least = max(map(len, kept), default=1)
            one.add_column(
                name,
                justify="right" if figures else "left",
                overflow="fold",
                min_width=least if figures else min(least, 8 if i else 14),
                no_wrap=whole,
            )
        for name, rows in table.groups:
            if name:
                one.add_section()
                one.add_row(text(name, style="bold"))
            for row in rows:
                one.add_row(*(text(cell) for cell in row))
        made.append(one)
    return made


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


_COLORS = {
    "arguments": "#8d6a9f",
    "outputs": "#c9b3d4",
    "temporaries": "#dd8452",
    "all-reduce": "#bc4749",
    "reduce-scatter": "#2a6f97",
    "all-gather": "#7fb7d6",
    "all-to-all": "#5b8e7d",
    "ragged-all-to-all": "#86b8a5",
    "collective-permute": "#b5b35c",
    "collective-broadcast": "#8a8a8a",
    "forward": "#a7c957",
    "backward": "#5b8e7d",
    "update": "#2a6f97",
    "relayout": "#f4a259",
}


def _bars(reports: Sequence[Report]) -> list[tuple[str, float, list[dict[str, float]]]]:
    """Title, unit and parts of each group of bars."""
    memory = [
        {
            "arguments": r.argument_bytes,
            "outputs": r.output_bytes - r.alias_bytes,
            "temporaries": r.temp_bytes,
        }
        for r in reports
    ]
    sent = [
        {
            kind: sum(c.sent_bytes for c in r.collectives if c.kind == kind)
            for kind in dict.fromkeys(c.kind for c in r.collectives)
        }
        for r in reports
    ]
    groups: list[tuple[str, float, list[dict[str, float]]]] = [
        ("peak memory, MiB", 2**20, [dict(m) for m in memory]),
        ("sent by a device, MiB", 2**20, [dict(s) for s in sent]),
    ]
    if any(r.cycles for r in reports):
        groups.append(("estimated cycles, thousands", 1e3, [dict(r.cycles) for r in reports]))
    return groups


def draw(reports: Sequence[Report], title: str) -> bytes:
    """Groups of bars as a PNG: a device's memory, what it sends, and its cycles, by kind."""
    library("matplotlib").use("Agg")
    plt = library("matplotlib.pyplot")
    groups = _bars(reports)
    width = max(3.4, 1.0 + 0.9 * len(reports))
    figure, axes = plt.subplots(
        1, len(groups), figsize=(width * len(groups), 4), layout="constrained"
    )
    names = [r.name for r in reports]
    for ax, (label, unit, values) in zip(axes, groups, strict=True):
        totals = [sum(v.values()) / unit for v in values]
        top = max(totals) or 1
        bottom = [0.0] * len(reports)
        for kind, color in _COLORS.items():
            heights = [v.get(kind, 0) / unit for v in values]
            if max(heights) < top / 1000:  # nobody could see it
                bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
                continue
            ax.bar(range(len(names)), heights, bottom=bottom, color=color, label=kind, width=0.62)
            bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
        for x, total in enumerate(totals):
            ax.annotate(
                f"{total:,.0f}" if top >= 10 else f"{total:.2g}",
                (x, total),
                xytext=(0, 2),
                textcoords="offset points",
                ha="center",
                va="bottom",
                fontsize=9,
            )
        ax.set_xticks(range(len(names)), names)
        ax.set_title(label, fontsize=10, loc="left")
        ax.set_ylim(0, top * 1.12)
        ax.spines[["top", "right"]].set_visible(False)
        ax.tick_params(labelsize=9)
        ax.tick_params(axis="x", length=0)
        ax.legend(
            frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=2
        )
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    file = io.BytesIO()
    figure.savefig(file, dpi=150, format="png")
    plt.close(figure)
    return file.getvalue()


_STYLE = """
body{font:15px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:75rem;padding:0 1rem;
color:#222}
table{border-collapse:collapse;margin:.5rem 0 1rem}
caption,h2{text-align:left;font-size:1.15rem;margin:2rem 0 .3rem}
th,td{padding:.3rem .7rem;border-bottom:1px solid #ddd;text-align:right;vertical-align:top}
th.w,td.w{text-align:left}
thead th{border-bottom:2px solid #888}
td{font-variant-numeric:tabular-nums}
small,p.note{color:#666;font-weight:normal}
small{display:block;max-width:28rem}
p.note{max-width:50rem;margin:.2rem 0}
img{max-width:100%}
div{overflow-x:auto}
"""


def page(reports: Sequence[Report], title: str, picture: str, about: str = "") -> str:
    """The bars and the tables as one HTML page.

    Args:
      reports: side by side.
      title: of the page.
      picture: where the bars are, relative to the page; empty where there are none.
      about: what is compared here; each line becomes a paragraph.
    """
    escape = html.escape
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width'>"
        f"<title>{escape(title)}</title><style>{_STYLE}</style><h1>{escape(title)}</h1>",
        *(f"<p>{escape(line)}" for line in about.splitlines()),
        *(f"<p><b>{escape(line)}</b>" for line in against(reports)),
        f'<p><img src="{escape(picture)}" alt="bars: memory, bytes sent, cycles">'
        if picture
        else "",
        *(_html(t) for t in tables(reports)),
    ]
    return "\n".join(p for p in parts if p) + "\n"


def _html(table: Table) -> str:
    escape = html.escape

    def line(tag: str, cells: Sequence[str], meaning: str = "") -> str:
        told = [
            f"<{tag}{' class=w' if i < table.texts else ''}>{escape(cell)}"
            + (f"<small>{escape(meaning)}</small>" if meaning and not i else "")
            + f"</{tag}>"
            for i, cell in enumerate(cells)
        ]
        return f"<tr>{''.join(told)}</tr>"

    lines = []
    for name, rows in table.groups:
        if name:
            lines.append(f"<tr><th class=w colspan={len(table.head)}>{escape(name)}</th></tr>")
        meanings = table.meanings or ("",) * len(rows)
        lines += [line("td", row, told) for row, told in zip(rows, meanings, strict=True)]
    body = "\n".join(lines)
    return (
        f"<h2>{escape(table.title)}</h2><p class=note>{escape(table.note)}</p>"
        f"<div><table><thead>{line('th', table.head)}</thead>"
        f"<tbody>\n{body}\n</tbody></table></div>"
    )
