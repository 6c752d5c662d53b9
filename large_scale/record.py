"""`Report`: what one device does in a compiled step, as figures."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence

from large_scale import hlo
from large_scale.buffers import Peak

_KEPT = 5  # of each list in the JSON, the largest


@dataclasses.dataclass(frozen=True)
class Alike:
    """Collectives of a step that differ in nothing but their sizes; bytes are those of a device.

    Args:
      kind: one of `hlo.KINDS`.
      along: in what the devices of a group differ: dims of the torus ("x", "y", "z"), "core",
        "slice"; "domain" and "chip" for GPUs; mesh axes on CPU, and beside the others where the
        mesh has several.
      phase: which step of a hierarchy, counted in its direction; see `hlo.Collective`.
      dtype: of the operands.
      group_size: devices of a group.
      emitter: the compiler's name for how it does it; empty where it does not say.
      in_loop: they lie in the body of a loop, and may run more than once.
      count: how many there are.
      operand_bytes: that a device puts in, all together.
      sent_bytes: that a device sends, all together, each done on a ring.
      largest_operand_bytes: of the largest of them.
    """

    kind: str
    along: str
    phase: int
    dtype: str
    group_size: int
    emitter: str
    in_loop: bool
    count: int
    operand_bytes: int
    sent_bytes: int
    largest_operand_bytes: int


def alike(found: Sequence[hlo.Collective]) -> list[Alike]:
    """Collectives with equal ones in one row: what reduces first, then what gathers, by phase."""
    groups: dict[tuple[str, str, int, str, int, str, bool], list[hlo.Collective]] = {}
    for c in found:
        key = (c.kind, c.along, c.phase, c.dtype, c.group_size, c.emitter, c.in_loop)
        groups.setdefault(key, []).append(c)
    rows = [
        Alike(
            *key,
            count=len(same),
            operand_bytes=sum(c.operand_bytes for c in same),
            sent_bytes=sum(c.sent_bytes for c in same),
            largest_operand_bytes=max(c.operand_bytes for c in same),
        )
        for key, same in groups.items()
    ]
    order = ("reduce-scatter", "all-reduce", "all-gather")

    def place(row: Alike) -> tuple[int, int, int]:
        direction = order.index(row.kind) // 2 if row.kind in order else len(order)
        return (direction, row.phase, -row.sent_bytes)

    return sorted(rows, key=place)


@dataclasses.dataclass(frozen=True)
class Report:
    """What one device does in a compiled step.

    Args:
      name: of the step.
      topology: that it was compiled for.
      argument_bytes: what it holds between steps, batch included.
      output_bytes: what it gives back.
      alias_bytes: the part of that which takes the place of donated arguments.
      temp_bytes: what it needs besides.
      hbm_bytes: what a device has; 0 where it has none of its own.
      collectives: as the compiler left them.
      cycles: the compiler's estimates summed by kind (`hlo.WORK`), with what it gives no estimate
        for priced by its bytes. Empty but on TPU. A loop's body counts once.
      unpriced: bytes of each kind that it gives no estimate for.
      instructions: number of instructions of the whole program.
      compile_seconds: what compiling took.
      relayouts: what moves data and computes nothing, the most cycles first; the cycles of what
        the compiler gives no estimate for are priced by its bytes.
      peak: which temporaries are alive when they take most memory; None where the compiler does
        not say.
      paper_pass: what the pass of Xu et al. 2020 in XLA's TPU compiler says of the step, in its
        own words; () on other chips, where it is off, or where its log is not to be had.
    """

    name: str
    topology: str
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    hbm_bytes: int
    collectives: tuple[hlo.Collective, ...]
    cycles: Mapping[str, float]
    unpriced: Mapping[str, int]
    instructions: int
    compile_seconds: float
    relayouts: tuple[hlo.Work, ...] = ()
    peak: Peak | None = None
    paper_pass: tuple[str, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """Memory that the step needs."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes

    @property
    def sent_bytes(self) -> int:
        """Bytes that a device sends, each collective done on a ring."""
        return sum(c.sent_bytes for c in self.collectives)

    @property
    def total_cycles(self) -> float:
        """Everything but collectives."""
        return sum(self.cycles.values())

    @property
    def update_cycles(self) -> float:
        """Everything that is neither forward, backward nor collective."""
        return sum(n for kind, n in self.cycles.items() if kind in ("update", "relayout"))

    def largest(self, kind: str) -> int:
        """Bytes of the largest operand of any collective of a kind; 0 where there is none."""
        return max((c.operand_bytes for c in self.collectives if c.kind == kind), default=0)

    def to_json(self) -> str:
        """All of it, totals included; equal collectives once, of the long lists the largest."""
        left_out = ("collectives", "relayouts", "peak")
        data = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.name not in left_out
        }
        data |= {
            "peak_bytes": self.peak_bytes,
            "sent_bytes": self.sent_bytes,
            "total_cycles": self.total_cycles,
            "collectives": [dataclasses.asdict(row) for row in alike(self.collectives)],
            "relayouts": [dataclasses.asdict(w) for w in self.relayouts[:_KEPT]],
            "peak": None,
        }
        if self.peak is not None:
            largest = dataclasses.replace(self.peak, buffers=self.peak.buffers[:_KEPT])
            data["peak"] = dataclasses.asdict(largest)
        return json.dumps(data, indent=2)


def as_bytes(n: float) -> str:
    """A number of bytes for people.

    >>> as_bytes(96), as_bytes(3 << 20)
    ('96 B', '3.00 MiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024 or unit == "GiB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.2f} {unit}"
        n /= 1024
    raise AssertionError
