"""What reports say, as tables of texts: side by side, and the largest of each kind."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from large_scale.buffers import Buffer
from large_scale.hlo import DIRECTIONS, Work
from large_scale.record import Alike, Report, alike, as_bytes

_SHOWN = 5  # rows of the lists of the largest


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of texts.

    Args:
      title: above it.
      note: what a reader has to know who has never seen it.
      head: the headings.
      groups: rows, each as long as the head, under the name of the step that they are of; the name
        is empty where rows tell of all steps.
      texts: so many columns at the left are words, the others figures.
      meanings: what each row is about; () where the rows say it themselves.
    """

    title: str
    note: str
    head: tuple[str, ...]
    groups: tuple[tuple[str, tuple[tuple[str, ...], ...]], ...]
    texts: int = 1
    meanings: tuple[str, ...] = ()


# ---------------------------------------------------------------------------------------- contents


@dataclasses.dataclass(frozen=True)
class _Row:
    label: str
    tell: Callable[[Report], str]
    meaning: str


_ROWS = (
    _Row(
        "arguments",
        lambda r: as_bytes(r.argument_bytes),
        "what a device holds between steps: weights, optimizer state, and the batch or gradients",
    ),
    _Row(
        "outputs beside them",
        lambda r: as_bytes(r.output_bytes - r.alias_bytes),
        "results that do not take the place of arguments; donate the old state to have them do so",
    ),
    _Row(
        "temporaries",
        lambda r: as_bytes(r.temp_bytes),
        "memory that the step needs while it runs; the largest are listed below",
    ),
    _Row("peak memory", lambda r: as_bytes(r.peak_bytes), "the sum of these three"),
    _Row(
        "of a device's",
        lambda r: f"{r.peak_bytes / r.hbm_bytes:.1%}" if r.hbm_bytes else "-",
        "of the memory that one device has",
    ),
    _Row(
        "sent by a device",
        lambda r: as_bytes(r.sent_bytes),
        "in one step, every collective done on a ring of its group",
    ),
    _Row(
        "largest all-reduce",
        lambda r: as_bytes(r.largest("all-reduce")),
        "its operand; where this is as large as the gradients, nothing was reduce-scattered",
    ),
    _Row("collectives", lambda r: _kinds(r), "how many of each kind are in the program"),
    *(
        _Row(f"{kind} cycles", lambda r, kind=kind: _thousands(r.cycles.get(kind)), meaning)
        for kind, meaning in (
            ("forward", "the compiler's estimate for the forward pass, collectives left out"),
            ("backward", "the compiler's estimate for the backward pass, collectives left out"),
            ("update", "its estimate for what else computes; here the optimizer's update"),
            ("relayout", "its estimate for what moves data and computes nothing: copies, pads"),
        )
    ),
    _Row("instructions", lambda r: f"{r.instructions:,}", "of the whole program"),
    _Row("compile time", lambda r: f"{r.compile_seconds:.0f} s", "on this machine"),
    _Row(
        "the paper's own pass",
        lambda r: " ".join(r.paper_pass) or "says nothing",
        "what XLA's TPU compiler says of weight-update sharding by its own pass (Xu et al. 2020), "
        "in its words",
    ),
)


def _kinds(report: Report) -> str:
    counts: dict[str, int] = {}
    for c in report.collectives:
        counts[c.kind] = counts.get(c.kind, 0) + 1
    return ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items())) or "none"


def _thousands(cycles: float | None) -> str:
    return "-" if cycles is None else f"{cycles / 1e3:,.0f} k"


def against(reports: Sequence[Report]) -> list[str]:
    """Each report as a multiple of the first one, in a sentence."""

    def ratio(a: float, b: float) -> str:
        return f"{a / b:.3g}" if b else "-"

    found = []
    for r in reports[1:]:
        first = reports[0]
        parts = [
            f"{ratio(r.peak_bytes, first.peak_bytes)} times the peak memory",
            f"{ratio(r.sent_bytes, first.sent_bytes)} times the bytes sent",
        ]
        if first.cycles and r.cycles:
            parts.append(f"{ratio(r.total_cycles, first.total_cycles)} times the estimated cycles")
        found.append(f"{r.name} against {first.name}: {', '.join(parts)}.")
    return found


def summary(reports: Sequence[Report]) -> Table:
    """What each report says, a row a question."""
    # Rows that nobody has an answer to are left out, but for those that all programs have.
    tpu = any(r.cycles for r in reports)
    told = [
        (row, tuple(row.tell(r) for r in reports))
        for row in _ROWS
        if tpu or row.label != "the paper's own pass"
    ]
    told = [(row, cells) for row, cells in told if set(cells) != {"-"}]
    return Table(
        "On each device",
        "All bytes are those of one device, and all figures what the compiler made of the program; "
        "nothing has run.",
        ("on each device", *(r.name for r in reports)),
        (("", tuple((row.label, *cells) for row, cells in told)),),
        meanings=tuple(row.meaning for row, _ in told),
    )


def collectives(reports: Sequence[Report]) -> Table:
    """Every collective, equal ones in one row."""

    def row(c: Alike, found: Sequence[Alike]) -> tuple[str, ...]:
        along = f" along {c.along}" if c.along else ""
        way = DIRECTIONS.get(c.kind)
        several = any(o.phase > 1 and DIRECTIONS.get(o.kind) == way for o in found)
        phase = f", {_ordinal(c.phase)}" if several else ""
        loop = ", in a loop" if c.in_loop else ""
        return (
            f"{c.kind}{along}{phase}{loop}",
            c.emitter or "-",
            c.dtype,
            f"{c.group_size:,}",
            f"{c.count:,}",
            as_bytes(c.operand_bytes),
            as_bytes(c.sent_bytes),
        )

    found = [(r, alike(r.collectives)) for r in reports]
    return Table(
        "Collectives",
        'Equal ones in one row, with their number and the sum of their bytes. "Along" says in '
        "what the devices of a group differ: x, y and z are the dims of the torus, a core is one "
        "of a chip's. 1st, 2nd, 3rd are the phases of a hierarchy: a gradient is scattered along "
        "one dim first, what is left of it along the next, and weights are gathered the same way "
        "back. The emitter is the compiler's name for how it sends.",
        ("collective", "emitter", "dtype", "group", "number", "operands", "sent"),
        tuple((r.name, tuple(row(c, rows) for c in rows)) for r, rows in found),
        texts=3,
    )


def temporaries(reports: Sequence[Report]) -> Table:
    """The largest temporaries of each report at its peak, equal ones in one row."""

    def row(same: Sequence[Buffer]) -> tuple[str, ...]:
        first = same[0]
        size = as_bytes(sum(b.nbytes for b in same))
        return (_short(first.name), _short(first.type), *_made_by(first, same), size)

    def key(b: Buffer) -> tuple[str, str, str]:
        return (re.sub(r"[.\d]*(\{.*\})?$", "", b.name), b.type, b.op_name)

    def worth(r: Report) -> list[Buffer]:
        least = r.peak_bytes / 10_000
        return [b for b in r.peak.buffers if b.nbytes >= least] if r.peak else []

    peaks = [
        f"{r.name}: {as_bytes(r.peak.live_bytes)} of {as_bytes(r.peak.allocated_bytes)}, while "
        f"{r.peak.instruction} runs"
        for r in reports
        if r.peak is not None
    ]
    return Table(
        "Largest temporaries at the peak",
        f"The {_SHOWN} kinds that take most memory at the moment when temporaries take most, by "
        "the compiler's own assignment. No operation: the compiler put it in. Alive at the peak, "
        f"of what is set aside: {'; '.join(peaks)}.",
        ("instruction", "result", "operation", "number", "bytes"),
        tuple((r.name, _largest(worth(r), key, lambda b: b.nbytes, row)) for r in reports),
        texts=3,
    )


def relayouts(reports: Sequence[Report]) -> Table:
    """The largest copies and relayouts of each report, equal ones in one row."""

    def row(same: Sequence[Work]) -> tuple[str, ...]:
        first = same[0]
        moved = as_bytes(sum(w.nbytes for w in same))
        cycles = _thousands(sum(w.cycles or 0 for w in same))
        return (_short(first.name), _short(first.type), *_made_by(first, same), moved, cycles)

    def key(w: Work) -> tuple[str, str, str]:
        return (w.opcode, w.type, w.op_name)

    return Table(
        "Largest copies and relayouts",
        f"The {_SHOWN} kinds that take most cycles in each step: instructions that move data and "
        "compute nothing. Bytes are read and written. No operation: the compiler put it in.",
        ("instruction", "result", "operation", "number", "moved", "cycles"),
        tuple((r.name, _largest(r.relayouts, key, lambda w: w.cycles or 0, row)) for r in reports),
        texts=3,
    )


def tables(reports: Sequence[Report]) -> list[Table]:
    """All of them; groups and tables without rows are left out."""
    if not reports:
        return []
    made = [make(reports) for make in (summary, collectives, temporaries, relayouts)]
    full = [
        dataclasses.replace(t, groups=tuple(group for group in t.groups if group[1])) for t in made
    ]
    return [t for t in full if t.groups]


_T = TypeVar("_T")


def _largest(
    items: Iterable[_T],
    key: Callable[[_T], tuple[str, str, str]],
    size: Callable[[_T], float],
    row: Callable[[Sequence[_T]], tuple[str, ...]],
) -> tuple[tuple[str, ...], ...]:
    """The largest kinds of items, those with an equal key together."""
    kinds: dict[tuple[str, str, str], list[_T]] = {}
    for item in items:
        kinds.setdefault(key(item), []).append(item)
    ordered = sorted(kinds.values(), key=lambda same: -sum(size(item) for item in same))
    return tuple(row(same) for same in ordered[:_SHOWN])


def _made_by(first: Buffer | Work, same: Sequence[Any]) -> tuple[str, str]:
    return _short(first.op_name) or "-", f"{len(same):,}"


def _ordinal(n: int) -> str:
    return f"{n}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(n, 'th') }"


def _short(text: str, length: int = 60) -> str:
    return text if len(text) <= length else f"{text[: length - 3]}..."
