"""Which temporaries a compiled step holds at its peak, as the compiler assigned them.

Memory statistics give sums only. XLA also writes down which value lies where in the memory for
temporaries, and from which to which instruction it lives; `Dump` makes it do so.
"""

from __future__ import annotations

import atexit
import dataclasses
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A temporary that is alive when temporaries need most memory.

    Args:
      name: of the instruction that makes it; of one of them where several share its place.
      type: its dtype and shape, without layout.
      nbytes: that it takes, padding included.
      op_name: what JAX calls the operation; empty where the compiler made it up.
    """

    name: str
    type: str
    nbytes: int
    op_name: str


@dataclasses.dataclass(frozen=True)
class Peak:
    """The moment at which the temporaries of a step take most memory.

    Args:
      instruction: that runs then.
      live_bytes: of the temporaries that are alive.
      allocated_bytes: of the memory that is set aside for temporaries; more than `live_bytes` by
        what lies idle between them.
      buffers: those alive, the largest first.
    """

    instruction: str
    live_bytes: int
    allocated_bytes: int
    buffers: tuple[Buffer, ...]


class Dump:
    """A folder that the compiler writes its notes to, removed at the end.

    `options` are those for `lowered.compile(compiler_options=...)`; then `read()` reads.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(
            prefix="large-scale-", ignore_cleanup_errors=True
        )
        self.options: dict[str, str | bool] = {
            "xla_dump_to": self._folder.name,
            "xla_dump_hlo_as_text": True,
        }

    def __enter__(self) -> Dump:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._folder.cleanup()
        if Path(self._folder.name).exists():
            atexit.register(shutil.rmtree, self._folder.name, ignore_errors=True)

    def read(self) -> Peak | None:
        """The peak; None where the compiler has written nothing down."""
        texts = [self._text(f"after_optimizations{end}.txt") for end in _ENDS]
        assignment, lives, program = texts
        if assignment is None or lives is None:
            return None
        return peak(assignment, lives, op_names(program or ""))

    def _text(self, end: str) -> str | None:
        # Small programs that JAX compiles by the way write their notes here as well.
        found = max(
            Path(self._folder.name).glob(f"*{end}"), key=lambda p: p.stat().st_size, default=None
        )
        return None if found is None else found.read_text(encoding="utf-8", errors="replace")


_ENDS = ("-buffer-assignment", "-live-range", "")
_ALLOCATION = re.compile(r"^allocation \d+: size (?P<size>\d+),(?P<rest>.*)$")
_VALUE = re.compile(
    r"^ value: <\d+ (?P<name>\S+) @\d+> \(size=(?P<size>\d+),offset=(?P<offset>\d+)\): "
    r"(?P<type>.*)$"
)
_LIFE = re.compile(r"^ +(?P<name>\S+):(?P<start>\d+)-(?P<end>\d+)$")
_STEP = re.compile(r"^ +(?P<at>\d+):(?P<name>\S+)$")


@dataclasses.dataclass(frozen=True)
class _Value:
    name: str
    type: str
    size: int
    offset: int
    start: int
    end: int


def peak(assignment: str, lives: str, names: Mapping[str, str]) -> Peak | None:
    """The peak of the temporaries in a device's main memory.

    Values that share a place, such as what is updated in place, count once.

    Args:
      assignment: XLA's note that ends in "-buffer-assignment.txt".
      lives: that which ends in "-live-range.txt".
      names: JAX's name of the operation behind each instruction.
    """
    spans = {m["name"]: (int(m["start"]), int(m["end"])) for m in _lines(_LIFE, lives)}
    steps = {int(m["at"]): m["name"] for m in _lines(_STEP, lives)}
    allocated = base = 0
    values: list[_Value] = []
    main = False
    for line in assignment.splitlines():
        if allocation := _ALLOCATION.match(line):
            # Other memories, such as those on the chip, have a color.
            main = "preallocated-temp" in line and " color " not in allocation["rest"]
            base = allocated
            allocated += int(allocation["size"]) if main else 0
        elif main and (v := _VALUE.match(line)):
            name = v["name"] if v["name"] in spans else f"{v['name']}{{}}"
            if name in spans:
                place = base + int(v["offset"])
                values.append(_Value(v["name"], v["type"], int(v["size"]), place, *spans[name]))
    if not allocated:
        return None
    at, live = 0, -1
    for time in sorted({v.start for v in values}):
        if (held := sum(hi - lo for lo, hi in _covered(_alive(values, time)))) > live:
            at, live = time, held
    buffers = [
        Buffer(
            v.name,
            re.sub(r"(\])\{[^{}]*\}", r"\1", v.type),
            v.size,
            names.get(re.sub(r"\{.*\}$", "", v.name), ""),
        )
        for v in _places(_alive(values, at))
    ]
    return Peak(steps.get(at, ""), max(live, 0), allocated, tuple(buffers))


def _lines(pattern: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
    return (m for line in text.splitlines() if (m := pattern.match(line)))


def _alive(values: list[_Value], time: int) -> list[_Value]:
    return [v for v in values if v.start <= time <= v.end]


def _covered(values: list[_Value]) -> Iterator[tuple[int, int]]:
    """The parts of memory that values take, none twice."""
    done = 0
    for v in sorted(values, key=lambda v: v.offset):
        lo, hi = max(done, v.offset), v.offset + v.size
        if hi > lo:
            yield lo, hi
            done = hi


def _places(values: list[_Value]) -> list[_Value]:
    """The largest first; of those that lie in the place of another, the other only."""
    found: list[_Value] = []
    for v in sorted(values, key=lambda v: (-v.size, v.start)):
        if not any(f.offset <= v.offset and v.offset + v.size <= f.offset + f.size for f in found):
            found.append(v)
    return found


_OP_NAME = re.compile(r'^\s+(?:ROOT )?%?(?P<name>[\w.\-]+) = .*?op_name="(?P<op>[^"]*)"')


def op_names(program: str) -> dict[str, str]:
    """JAX's name of the operation behind each instruction of an HLO text.

    >>> op_names('  %f.1 = f32[8] fusion(%p), metadata={op_name="jit(step)/mul"}')
    {'f.1': 'jit(step)/mul'}
    """
    return {m["name"]: m["op"].replace("\\'", "'") for m in _lines(_OP_NAME, program)}
