"""The collectives of a compiled program, read off its optimized HLO text.

`compiled.as_text()` is what XLA will run, so what is counted here is what is sent: collectives that
XLA merged, moved or made asynchronous appear as it left them.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction; the bytes are those of one device.

    Args:
      kind: one of `KINDS`.
      dtype: element types of what it takes in, joined by "+" where they differ.
      operand_bytes: bytes that the device puts in.
      result_bytes: bytes that the device gets out.
      replica_groups: the attribute's text; the source-target pairs of a permutation.
      group_size: devices of one group; 0 where the text does not say, and for permutations.
      in_loop: it lies in the body or the condition of a `while`, and may run more than once.
    """

    kind: str
    dtype: str
    operand_bytes: int
    result_bytes: int
    replica_groups: str
    group_size: int
    in_loop: bool

    @property
    def sent_bytes(self) -> int:
        """Bytes that one device sends, were the collective done on a ring."""
        if self.kind in ("collective-permute", "collective-broadcast"):
            return self.operand_bytes
        if not self.group_size:
            raise ValueError(f"{self.kind} of {self.replica_groups!r}: unknown group size")
        others = self.group_size - 1
        if self.kind == "all-gather":
            return self.operand_bytes * others
        passes = 2 if self.kind == "all-reduce" else 1
        return passes * self.operand_bytes * others // self.group_size


def collectives(hlo_text: str) -> list[Collective]:
    """All collectives of a program, in the order of the text.

    An asynchronous pair counts once, by its `-start`.

    Args:
      hlo_text: optimized HLO, as `jax.jit(f).lower(...).compile().as_text()` gives it.

    >>> found = collectives('''
    ... HloModule m, num_partitions=4
    ... ENTRY %main (p: f32[8,3]) -> f32[2,3] {
    ...   %p = f32[8,3]{1,0} parameter(0)
    ...   ROOT %r = f32[2,3]{1,0} reduce-scatter(%p), replica_groups={{0,1,2,3}}, dimensions={0}
    ... }''')
    >>> [(c.kind, c.operand_bytes, c.result_bytes, c.group_size) for c in found]
    [('reduce-scatter', 96, 24, 4)]
    """
    computations = _parse(hlo_text)
    looped = _looped(computations)
    devices = _num_devices(hlo_text)
    return [
        _collective(instruction, kind, computation, name in looped, devices)
        for name, computation in computations.items()
        for instruction in computation.values()
        if (kind := instruction.opcode.removesuffix("-start")) in KINDS
    ]


# ----------------------------------------------------------------------------------------- parsing


@dataclasses.dataclass(frozen=True)
class _Instruction:
    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    attributes: dict[str, str]


_Computation = dict[str, _Instruction]

_COMMENT = re.compile(r"/\*.*?\*/")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_HEADER = re.compile(r"^(?:ENTRY\s+)?%?(?P<name>[\w.\-]+)\s.*\{$")
_ASSIGNMENT = re.compile(r"^(?:ROOT\s+)?%?(?P<name>[\w.\-]+)\s+=\s+(?P<value>.*)$")
_OPCODE = re.compile(r"\s*(?P<opcode>[a-z][a-z0-9\-]*)(?=\()")
_ARRAY = re.compile(r"\b(?P<dtype>[a-z][a-z0-9]*)\[(?P<dims>[^\]]*)\]")
_OPENING, _CLOSING = "([{", ")]}"


def _parse(text: str) -> dict[str, _Computation]:
    """Every computation's instructions, by name."""
    computations: dict[str, _Computation] = {}
    current: _Computation = {}
    for raw in text.splitlines():
        # Strings hold anything, such as an operation's name with a parenthesis in it.
        line = _STRING.sub('""', _COMMENT.sub("", raw)).strip()
        if assignment := _ASSIGNMENT.match(line):
            if instruction := _instruction(assignment["name"], assignment["value"]):
                current[instruction.name] = instruction
        elif header := _HEADER.match(line):
            current = computations.setdefault(header["name"], {})
    return computations


def _instruction(name: str, value: str) -> _Instruction | None:
    end = _closing(value, 0) + 1 if value.startswith("(") else value.find(" ")
    found = _OPCODE.match(value, end)
    if end < 0 or found is None:
        return None
    close = _closing(value, found.end())
    attributes = {}
    for part in _split(value[close + 1 :]):
        key, _, text = part.partition("=")
        attributes[key] = text
    operands = tuple(_split(value[found.end() + 1 : close]))
    return _Instruction(name, value[:end], found["opcode"], operands, attributes)


def _closing(text: str, start: int) -> int:
    """Where the bracket that opens at `start` closes."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] in _OPENING) - (text[i] in _CLOSING)
        if not depth:
            return i
    raise ValueError(f"unbalanced brackets in HLO: {text[start : start + 80]}")


def _split(text: str) -> list[str]:
    """The parts of `text` between commas that lie in no bracket."""
    parts, depth, start = [], 0, 0
    for i, char in enumerate(text):
        depth += (char in _OPENING) - (char in _CLOSING)
        if char == "," and not depth:
            parts.append(text[start:i].strip())
            start = i + 1
    return [part for part in (*parts, text[start:].strip()) if part]


def _looped(computations: dict[str, _Computation]) -> set[str]:
    """Computations that a `while` runs, itself or through others."""
    todo = [
        name
        for computation in computations.values()
        for instruction in computation.values()
        if instruction.opcode == "while"
        for name in _called(instruction, computations)
    ]
    looped: set[str] = set()
    while todo:
        name = todo.pop()
        if name not in looped:
            looped.add(name)
            todo += [
                called
                for instruction in computations[name].values()
                for called in _called(instruction, computations)
            ]
    return looped


def _called(instruction: _Instruction, computations: dict[str, _Computation]) -> Iterator[str]:
    """Computations that an instruction's attributes name."""
    for text in instruction.attributes.values():
        yield from (name for name in re.findall(r"[\w.\-]+", text) if name in computations)


def _num_devices(text: str) -> int:
    """Devices that the program runs on; 0 where its first line does not say."""
    module = re.search(r"^HloModule.*$", text, re.MULTILINE)
    counts = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", module[0] if module else "")
    return math.prod(int(n) for n in counts) if counts else 0


# ------------------------------------------------------------------------------------ instructions


def _collective(
    instruction: _Instruction, kind: str, computation: _Computation, in_loop: bool, devices: int
) -> Collective:
    operands = " ".join(_operand_type(o, computation) for o in instruction.operands)
    attributes = instruction.attributes
    pairs = attributes.get("source_target_pairs")
    groups = attributes.get("replica_groups", "") if pairs is None else pairs
    dtypes = dict.fromkeys(dtype for dtype, _ in _arrays(operands))
    return Collective(
        kind,
        "+".join(dtypes),
        _nbytes(operands),
        _nbytes(_result_type(instruction)),
        groups,
        _group_size(groups, devices) if pairs is None else 0,
        in_loop,
    )


def _operand_type(operand: str, computation: _Computation) -> str:
    """An operand's type: printed before its name, or that of the instruction of this name."""
    typed, _, name = operand.rpartition(" ")
    return typed or computation[name.removeprefix("%")].type


def _result_type(instruction: _Instruction) -> str:
    """The type of what comes out; a `-start` (`all-reduce-start` apart) has operands before it."""
    if not instruction.opcode.endswith("-start") or not instruction.type.startswith("("):
        return instruction.type
    parts = _split(instruction.type[1:-1])
    if instruction.opcode == "all-reduce-start" and not parts[0].startswith("("):
        return instruction.type
    return parts[1]


def _group_size(groups: str, devices: int) -> int:
    if listed := re.match(r"\{\{([\d,\s]*)\}", groups):
        return len(_split(listed[1]))
    if tiled := re.match(r"\[(?:\d+,)*(\d+)\]<=", groups):
        return int(tiled[1])
    return devices if groups in ("", "{}") else 0


def _arrays(type_text: str) -> Iterator[tuple[str, int]]:
    """The `(dtype, elements)` of each array in a type, tuples flattened."""
    for found in _ARRAY.finditer(type_text):
        dims: Sequence[str] = found["dims"].split(",") if found["dims"] else ()
        # `<=8` is a dim whose size is known when it runs, and is at most that.
        yield found["dtype"], math.prod(int(dim.strip().removeprefix("<=")) for dim in dims)


def _nbytes(type_text: str) -> int:
    """Bytes of a type; types of less than a byte are packed.

    >>> _nbytes("(f32[2,3]{1,0}, (bf16[5], s4[3]), pred[])"), _nbytes("token[]")
    (37, 0)
    """
    return sum(-(-elements * _bits(dtype) // 8) for dtype, elements in _arrays(type_text))


def _bits(dtype: str) -> int:
    if dtype in ("token", "opaque"):
        return 0
    if dtype == "pred":
        return 8
    width = re.search(r"\d+", dtype)
    if width is None:
        raise ValueError(f"unknown HLO element type {dtype!r}")
    return int(width[0])
