"""A completion for people: one line an array, then communication, then conflicts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any


def table(
    sizes: Mapping[str, int], values: Sequence[Any], needs: Sequence[Any], conflicts: Sequence[Any]
) -> str:
    """The report.

    Args:
      sizes: of the mesh axes.
      values: `Value`s.
      needs: `Need`s.
      conflicts: `Conflict`s.
    """
    mesh = ", ".join(f"{a}={n}" for a, n in sizes.items())
    split = sum(any(v.spec) for v in values)
    rows = Counter((_line(v.source), v.op, _shape(v.shape), _spec(v.spec), _why(v)) for v in values)
    counted = [(*row[:4], f"x{n}" if n > 1 else "", row[4]) for row, n in rows.items()]
    out = [f"mesh {mesh}: {split} of {len(values)} arrays are split", ""]
    out += _columns(("made at", "by", "shape", "split", "", "because of"), counted)
    if needs:
        sums = Counter((n.kind, ",".join(n.axes), n.op, _line(n.source), n.nbytes) for n in needs)
        found = [
            (kind, axes, f"{nbytes:,} B", f"x{n}" if n > 1 else "", f"{op} at {source}")
            for (kind, axes, op, source, nbytes), n in sums.items()
        ]
        out += ["", "communication:", *_columns(("what", "over", "of", "", "for"), found)]
    if conflicts:
        lost = [
            (_shape(c.shape), str(c.dim), ",".join(c.wanted), c.why, f"{c.op} at {_line(c.source)}")
            for c in conflicts
        ]
        out += ["", "not split so:", *_columns(("shape", "dim", "over", "because", "by"), lost)]
    return "\n".join(out)


def _columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return [
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    ]


def _line(source: str) -> str:
    return source.partition(" (")[0]


def _shape(shape: Sequence[int]) -> str:
    return f"[{','.join(map(str, shape))}]"


def _spec(spec: Any) -> str:
    return str(spec).removeprefix("PartitionSpec").removeprefix("P")


def _why(value: Any) -> str:
    said = dict.fromkeys(_line(w) for w in value.why if w)
    return ", ".join(said)
