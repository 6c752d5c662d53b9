"""The text of optimized HLO, parsed: computations of instructions, their types and operands."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction; what its text does not say is empty, or None.

    Args:
      name: without the sign `%`.
      type: as the text has it, with layout.
      opcode: what it is.
      operands: as the text has them, some with their type before the name.
      attributes: by name.
      op_name: what JAX calls the operation.
      emitter: what the TPU compiler makes of it.
      cycles: that compiler's estimate.
    """

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    attributes: dict[str, str]
    op_name: str
    emitter: str
    cycles: int | None


Computation = dict[str, Instruction]

_COMMENT = re.compile(r"/\*.*?\*/")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_HEADER = re.compile(r"^(?:ENTRY\s+)?%?(?P<name>[\w.\-]+)\s.*\{$")
_ASSIGNMENT = re.compile(r"^(?:ROOT\s+)?%?(?P<name>[\w.\-]+)\s+=\s+(?P<value>.*)$")
_OPCODE = re.compile(r"\s*(?P<opcode>[a-z][a-z0-9\-]*)(?=\()")
_ARRAY = re.compile(r"\b(?P<dtype>[a-z][a-z0-9]*)\[(?P<dims>[^\]]*)\]")
_OPENING, _CLOSING = "([{", ")]}"
# Strings that are read before all strings are taken out: in an operation's metadata, in a
# collective's and in any instruction's backend configuration.
_TOLD = (
    re.compile(r'op_name="([^"]*)"'),
    re.compile(r'"emitter":"(\w+)"'),
    re.compile(r'"estimated_cycles":"(\d+)"'),
    re.compile(r'custom_call_target="([^"]*)"'),
)
# What a TPU slice sends to others goes through the host: a `send` and a `recv` that tell of what
# collective they are a part, between which slices, and which of them belong together.
_BETWEEN_SLICES = {
    name: re.compile(rf'_xla_{name}="([^"]*)"')
    for name in ("megascale_transfer_type", "megascale_target", "host_transfer_rendezvous")
}
# What the parts of one asynchronous collective on TPU have in common.
_CHAIN = re.compile(r'\bchain_id="(\d+)"')


def parse(text: str) -> dict[str, Computation]:
    """Every computation's instructions, by name."""
    computations: dict[str, Computation] = {}
    current: Computation = {}
    for raw in text.splitlines():
        # Strings hold anything, such as an operation's name with a parenthesis in it.
        line = _STRING.sub('""', _COMMENT.sub("", raw)).strip()
        if assignment := _ASSIGNMENT.match(line):
            if instruction := _instruction(assignment["name"], assignment["value"], raw):
                current[instruction.name] = instruction
        elif header := _HEADER.match(line):
            current = computations.setdefault(header["name"], {})
    return computations


def _instruction(name: str, value: str, raw: str) -> Instruction | None:
    end = _closing(value, 0) + 1 if value.startswith("(") else value.find(" ")
    opcode = _OPCODE.match(value, end)
    if end < 0 or opcode is None:
        return None
    close = _closing(value, opcode.end())
    attributes = {}
    for part in _split(value[close + 1 :]):
        key, _, text = part.partition("=")
        attributes[key] = text
    operands = tuple(_split(value[opcode.end() + 1 : close]))
    told = [found[1] if (found := pattern.search(raw)) else "" for pattern in _TOLD]
    cycles = int(told[2]) if told[2] else None
    if opcode["opcode"] in ("send", "recv"):
        between = {key: pattern.search(raw) for key, pattern in _BETWEEN_SLICES.items()}
        attributes |= {key: found[1] for key, found in between.items() if found}
    if chain := _CHAIN.search(raw):
        attributes["chain_id"] = chain[1]
    # Joins slices that were fetched one by one, which lie side by side already.
    what = "bitcast" if told[3] == "ConcatBitcast" else opcode["opcode"]
    op_name = told[0].replace("\\'", "'")
    return Instruction(name, value[:end], what, operands, attributes, op_name, told[1], cycles)


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


def in_loops(computations: dict[str, Computation]) -> set[str]:
    """Computations that a `while` runs, itself or through others."""
    todo = [
        name
        for computation in computations.values()
        for instruction in computation.values()
        if instruction.opcode == "while"
        for name in called(instruction, computations)
    ]
    looped: set[str] = set()
    while todo:
        name = todo.pop()
        if name not in looped:
            looped.add(name)
            todo += [
                inner
                for instruction in computations[name].values()
                for inner in called(instruction, computations)
            ]
    return looped


def called(instruction: Instruction, computations: dict[str, Computation]) -> Iterator[str]:
    """Computations that an instruction's attributes name."""
    for text in instruction.attributes.values():
        yield from (name for name in re.findall(r"[\w.\-]+", text) if name in computations)


def num_devices(text: str) -> int:
    """Devices that the program runs on; 0 where its first line does not say."""
    module = re.search(r"^HloModule.*$", text, re.MULTILINE)
    counts = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", module[0] if module else "")
    return math.prod(int(n) for n in counts) if counts else 0


def operand_type(operand: str, computation: Computation) -> str:
    """An operand's type: printed before its name, or that of the instruction of this name."""
    typed = operand.rpartition(" ")[0]
    return typed or computation[operand_name(operand)].type


def operand_name(operand: str) -> str:
    """The name of the instruction that makes an operand."""
    return operand.rpartition(" ")[2].removeprefix("%")


def result_type(instruction: Instruction) -> str:
    """The type of what comes out; a `-start` (`all-reduce-start` apart) has operands before it."""
    if not instruction.opcode.endswith("-start") or not instruction.type.startswith("("):
        return instruction.type
    parts = _split(instruction.type[1:-1])
    if instruction.opcode == "all-reduce-start" and not parts[0].startswith("("):
        return instruction.type
    return parts[1]


def opcodes(
    instruction: Instruction,
    computation: Computation,
    computations: dict[str, Computation],
) -> set[str]:
    """What it does; what is done in it, if it is a fusion. Asynchronous steps are what they do."""
    if instruction.opcode == "fusion":
        body = computations[instruction.attributes["calls"].removeprefix("%")]
        return {_opcode(i, body) for i in body.values()}
    return {_opcode(instruction, computation).removesuffix("-start").removesuffix("-done")}


def _opcode(instruction: Instruction, computation: Computation) -> str:
    """The opcode; a sum over dims of length 1 is a reshape."""
    if instruction.opcode == "reduce":
        before = operand_type(instruction.operands[0], computation)
        if _elements(before) == _elements(instruction.type):
            return "reshape"
    return instruction.opcode


def _elements(type_text: str) -> int:
    return sum(elements for _, elements in arrays(type_text))


def without_layout(type_text: str) -> str:
    """A type as people read it.

    >>> without_layout("(f32[8,3]{1,0:T(8,128)}, s32[]{:S(2)})")
    '(f32[8,3], s32[])'
    """
    return re.sub(r"\]\{[^{}]*\}", "]", type_text)


def arrays(type_text: str) -> Iterator[tuple[str, int]]:
    """The `(dtype, elements)` of each array in a type, tuples flattened."""
    for found in _ARRAY.finditer(type_text):
        dims: Sequence[str] = found["dims"].split(",") if found["dims"] else ()
        # `<=8` is a dim whose size is known when it runs, and is at most that.
        yield found["dtype"], math.prod(int(dim.strip().removeprefix("<=")) for dim in dims)


def nbytes(type_text: str) -> int:
    """Bytes of a type; types of less than a byte are packed.

    >>> nbytes("(f32[2,3]{1,0}, (bf16[5], s4[3]), pred[])"), nbytes("token[]")
    (37, 0)
    """
    return sum(-(-elements * _bits(dtype) // 8) for dtype, elements in arrays(type_text))


def _bits(dtype: str) -> int:
    if dtype in ("token", "opaque"):
        return 0
    if dtype == "pred":
        return 8
    width = re.search(r"\d+", dtype)
    if width is None:
        raise ValueError(f"unknown HLO element type {dtype!r}")
    return int(width[0])
