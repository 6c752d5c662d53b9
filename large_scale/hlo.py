"""The collectives and the work of a compiled program, read off its optimized HLO text.

`compiled.as_text()` is what XLA will run, so what is counted here is what is sent: collectives that
XLA merged, moved or made asynchronous appear as it left them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

Groups = tuple[tuple[int, ...], ...]
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
      groups: the devices that take part together, by their number in the program, which is that
        in `mesh.devices.flat`; source and target of a permutation; () where the text does not say.
      in_loop: it lies in the body or the condition of a `while`, and may run more than once.
      emitter: what XLA's TPU compiler says that it makes of it; empty where it does not say.
      phase: which step of a hierarchy it is: 2 where it takes in the result of a like collective,
        of phase 1, that was moved and cast only; so the second reduce-scatter or all-reduce of a
        gradient, the second all-gather of a weight. 1 where it is the first or the only one.
      along: in what the devices of a group differ, such as a dim of the torus; empty where only
        the text is known (`large_scale.aot` knows the devices).
    """

    kind: str
    dtype: str
    operand_bytes: int
    result_bytes: int
    replica_groups: str
    groups: Groups
    in_loop: bool
    emitter: str = ""
    phase: int = 1
    along: str = ""

    @property
    def group_size(self) -> int:
        """Devices of one group; 0 where they are not known."""
        return len(self.groups[0]) if self.groups else 0

    def crossed_axes(self, axis_sizes: Mapping[str, int]) -> frozenset[str]:
        """The mesh axes along which devices of one group differ.

        Args:
          axis_sizes: the mesh, as `mesh.shape` gives it.

        >>> text = "[4,2]<=[8]"
        >>> found = Collective("all-reduce", "f32", 4, 4, text, groups_of(text, 8), False)
        >>> sorted(found.crossed_axes({"data": 4, "model": 2}))
        ['model']
        """
        self._check_groups()
        sizes = tuple(axis_sizes.values())
        found = set[str]()
        for group in self.groups:
            places = np.stack(np.unravel_index(group, sizes))
            differ = (places != places[:, :1]).any(axis=1)
            found.update(a for a, d in zip(axis_sizes, differ, strict=True) if d)
        return frozenset(found)

    def _check_groups(self) -> None:
        if not self.groups:
            raise ValueError(f"{self.kind} of {self.replica_groups!r}: unknown groups")

    @property
    def sent_bytes(self) -> int:
        """Bytes that one device sends, were the collective done on a ring."""
        if self.kind in ("collective-permute", "collective-broadcast"):
            return self.operand_bytes
        self._check_groups()
        others = self.group_size - 1
        if self.kind == "all-gather":
            return self.operand_bytes * others
        passes = 2 if self.kind == "all-reduce" else 1
        return passes * self.operand_bytes * others // self.group_size


def collectives(hlo_text: str) -> list[Collective]:
    """All collectives of a program, in the order of the text.

    An asynchronous one counts once, by its `-start` or its channel. On TPU an all-reduce inside of
    a fusion that keeps a slice of it only is a reduce-scatter, of an operand that was padded.

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
    callers = {
        i.attributes["calls"].removeprefix("%"): i
        for computation in computations.values()
        for i in computation.values()
        if i.opcode in ("fusion", "async-start")
    }
    fused_channels: dict[str, int] = {}
    carriers: dict[str, int] = {}
    found: list[Collective] = []
    for name, computation in computations.items():
        for instruction in computation.values():
            kind = instruction.opcode.removesuffix("-start")
            if kind not in KINDS:
                continue
            if name in callers and (channel := instruction.attributes.get("channel_id")):
                # The start, the steps and the end of an asynchronous one are fusions on TPU, each
                # with the collective in it.
                carriers[callers[name].name] = fused_channels.setdefault(channel, len(found))
                if (seen := fused_channels[channel]) < len(found):
                    if not found[seen].emitter:
                        found[seen] = dataclasses.replace(found[seen], emitter=_SPREAD)
                    continue
            one = _collective(instruction, kind, computation, name in looped, devices)
            if (fusion := callers.get(name)) and "AllReduceScatter" in fusion.emitter:
                one = dataclasses.replace(
                    one,
                    kind="reduce-scatter",
                    result_bytes=_nbytes(fusion.type),
                    emitter=f"fusion, {fusion.emitter}",
                )
            carriers[callers[name].name if name in callers else instruction.name] = len(found)
            found.append(one)
    return _with_phases(found, carriers, computations)


_SPREAD = "asynchronous fusions"  # which is not a name of the compiler's
# Where what a collective makes goes: into shards, or out to all.
DIRECTIONS = {"all-reduce": "in", "reduce-scatter": "in", "all-gather": "out"}


def _with_phases(
    found: list[Collective], carriers: dict[str, int], computations: dict[str, _Computation]
) -> list[Collective]:
    """Counts, for each collective, those of its direction that its operand has just come from.

    Args:
      found: the collectives.
      carriers: which of them an instruction is, or is a part of.
      computations: of the whole program, each in an order in which it can run.
    """
    phases = [1] * len(found)
    for computation in computations.values():
        near: dict[str, frozenset[int]] = {}  # the collectives that a value has just come from
        for i in computation.values():
            before = frozenset[int]().union(*(near.get(_operand_name(o), ()) for o in i.operands))
            this = carriers.get(i.name)
            if this is None:
                near[i.name] = before if _passes_on(i, computation, computations) else frozenset()
                continue
            same = [
                phases[other]
                for other in before
                if other != this
                and DIRECTIONS.get(found[other].kind, "") == DIRECTIONS.get(found[this].kind)
            ]
            phases[this] = max([phases[this], *(n + 1 for n in same)])
            near[i.name] = frozenset((this,))
    return [dataclasses.replace(one, phase=phase) for one, phase in zip(found, phases, strict=True)]


def _passes_on(
    instruction: _Instruction, computation: _Computation, computations: dict[str, _Computation]
) -> bool:
    """Whether what it gives is what it takes, moved or cast."""
    if instruction.opcode.endswith(("-done", "-update")):  # of what its `-start` does
        return True
    return _opcodes(instruction, computation, computations) - _STILL <= _MOVES | {"convert"}


# -------------------------------------------------------------------------------------------- work

WORK = ("forward", "backward", "update", "relayout")


@dataclasses.dataclass(frozen=True)
class Work:
    """One instruction that a TPU core spends time on; collectives are none.

    Args:
      name: its name in the text.
      opcode: what it is.
      kind: one of `WORK`: "relayout" moves data and computes nothing, "update" is all that is
        neither of a differentiated function nor relayout.
      cycles: XLA's estimate; None where it gives none.
      nbytes: bytes that it reads and writes.
      type: what it makes: dtype and shape, layout left out.
      op_name: what JAX calls the operation; empty where the compiler made it up.
    """

    name: str
    opcode: str
    kind: str
    cycles: float | None
    nbytes: int
    type: str = ""
    op_name: str = ""


# What moves data, and what may stand beside that in a fusion that computes nothing.
_MOVES = frozenset(
    (
        *("copy", "reshape", "transpose", "concatenate", "pad", "gather"),
        *("slice", "dynamic-slice", "dynamic-update-slice"),
    )
)
_STILL = frozenset(
    (
        *("parameter", "constant", "bitcast", "tuple", "get-tuple-element"),
        *("broadcast", "iota", "partition-id"),
    )
)
_VECTOR_BYTES = 4096  # one register tile


def work(hlo_text: str) -> list[Work]:
    """What a TPU core does between collectives, from optimized and scheduled HLO.

    The body of a loop counts once. Prefetches between memories (`copy-start`, `slice-start`) run
    beside the rest and are left out.
    """
    computations = _parse(hlo_text)
    found = []
    for name in _scheduled(hlo_text, computations):
        for i in computations[name].values():
            kind = i.opcode.removesuffix("-start").removesuffix("-done")
            if kind in KINDS or "AllReduceScatter" in i.emitter:
                continue
            if i.cycles is None and (i.opcode not in _MOVES or _nbytes(i.type) < _VECTOR_BYTES):
                continue  # XLA prices all that computes; the rest is scalars and names
            types = [*(_operand_type(o, computations[name]) for o in i.operands), i.type]
            if i.cycles is None and i.opcode == "copy" and _plain(types[0]) == _plain(types[1]):
                # From one memory to another, as it lies: that takes what the main memory takes.
                types = [t for t in types if t == _plain(t)]
                if not types:
                    continue
            found.append(
                Work(
                    i.name,
                    i.opcode,
                    _work_kind(i, computations[name], computations),
                    i.cycles,
                    sum(map(_nbytes, types)),
                    without_layout(i.type),
                    i.op_name,
                )
            )
    return found


def _plain(type_text: str) -> str:
    """A type without the memory spaces `S(n)`, which all but the main memory have."""
    return re.sub(r"S\(\d+\)", "", type_text)


def _scheduled(hlo_text: str, computations: dict[str, _Computation]) -> list[str]:
    """The entry, and what it runs instruction by instruction."""
    entry = re.search(r"^ENTRY\s+%?([\w.\-]+)", hlo_text, re.MULTILINE)
    todo = [entry[1]] if entry else []
    found: list[str] = []
    while todo:
        name = todo.pop()
        if name in found:
            continue
        found.append(name)
        for i in computations[name].values():
            if i.opcode in ("while", "conditional", "call"):
                todo += _called(i, computations)
    return found


def _work_kind(
    instruction: _Instruction, computation: _Computation, computations: dict[str, _Computation]
) -> str:
    if "transpose(jvp" in instruction.op_name:
        return "backward"
    if "jvp(" in instruction.op_name:
        return "forward"
    moves = _opcodes(instruction, computation, computations) - _STILL <= _MOVES
    return "relayout" if moves else "update"


def _opcodes(
    instruction: _Instruction,
    computation: _Computation,
    computations: dict[str, _Computation],
) -> set[str]:
    """What it does; what is done in it, if it is a fusion. Asynchronous steps are what they do."""
    if instruction.opcode == "fusion":
        body = computations[instruction.attributes["calls"].removeprefix("%")]
        return {_opcode(i, body) for i in body.values()}
    return {_opcode(instruction, computation).removesuffix("-start").removesuffix("-done")}


def _opcode(instruction: _Instruction, computation: _Computation) -> str:
    """The opcode; a sum over dims of length 1 is a reshape."""
    if instruction.opcode == "reduce":
        before = _operand_type(instruction.operands[0], computation)
        if _elements(before) == _elements(instruction.type):
            return "reshape"
    return instruction.opcode


def _elements(type_text: str) -> int:
    return sum(elements for _, elements in _arrays(type_text))


def without_layout(type_text: str) -> str:
    """A type as people read it.

    >>> without_layout("(f32[8,3]{1,0:T(8,128)}, s32[]{:S(2)})")
    '(f32[8,3], s32[])'
    """
    return re.sub(r"\]\{[^{}]*\}", "]", type_text)


# ----------------------------------------------------------------------------------------- parsing


@dataclasses.dataclass(frozen=True)
class _Instruction:
    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    attributes: dict[str, str]
    op_name: str
    emitter: str
    cycles: int | None


_Computation = dict[str, _Instruction]

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


def _parse(text: str) -> dict[str, _Computation]:
    """Every computation's instructions, by name."""
    computations: dict[str, _Computation] = {}
    current: _Computation = {}
    for raw in text.splitlines():
        # Strings hold anything, such as an operation's name with a parenthesis in it.
        line = _STRING.sub('""', _COMMENT.sub("", raw)).strip()
        if assignment := _ASSIGNMENT.match(line):
            if instruction := _instruction(assignment["name"], assignment["value"], raw):
                current[instruction.name] = instruction
        elif header := _HEADER.match(line):
            current = computations.setdefault(header["name"], {})
    return computations


def _instruction(name: str, value: str, raw: str) -> _Instruction | None:
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
    # Joins slices that were fetched one by one, which lie side by side already.
    what = "bitcast" if told[3] == "ConcatBitcast" else opcode["opcode"]
    op_name = told[0].replace("\\'", "'")
    return _Instruction(name, value[:end], what, operands, attributes, op_name, told[1], cycles)


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
    groups = attributes.get("source_target_pairs", attributes.get("replica_groups", ""))
    if "device_ids" in attributes:  # of a mesh: the comma before them has cut the text in two
        groups += f", device_ids={attributes['device_ids']}"
    dtypes = dict.fromkeys(dtype for dtype, _ in _arrays(operands))
    return Collective(
        kind,
        "+".join(dtypes),
        _nbytes(operands),
        _nbytes(_result_type(instruction)),
        groups,
        groups_of(groups, devices),
        in_loop,
        instruction.emitter,
    )


def _operand_type(operand: str, computation: _Computation) -> str:
    """An operand's type: printed before its name, or that of the instruction of this name."""
    typed = operand.rpartition(" ")[0]
    return typed or computation[_operand_name(operand)].type


def _operand_name(operand: str) -> str:
    return operand.rpartition(" ")[2].removeprefix("%")


def _result_type(instruction: _Instruction) -> str:
    """The type of what comes out; a `-start` (`all-reduce-start` apart) has operands before it."""
    if not instruction.opcode.endswith("-start") or not instruction.type.startswith("("):
        return instruction.type
    parts = _split(instruction.type[1:-1])
    if instruction.opcode == "all-reduce-start" and not parts[0].startswith("("):
        return instruction.type
    return parts[1]


@functools.cache
def groups_of(text: str, devices: int) -> Groups:
    """The groups that `replica_groups` or `source_target_pairs` mean; () where it is not known.

    Args:
      text: listed groups, a reshaped and transposed range, or axes of a mesh; nothing means all.
      devices: devices of the program; 0 where that is not known.

    >>> groups_of("{{0,2},{1,3}}", 4) == groups_of("[2,2]<=[2,2]T(1,0)", 4)
    True
    >>> groups_of("mesh['a'=2,'b'=2] {'a'}", 4)
    ((0, 2), (1, 3))
    >>> groups_of("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a':(2)2,'b'}", 8)
    ((0, 4, 1, 5), (2, 6, 3, 7))
    >>> groups_of("{}", 3), groups_of("{}", 0)
    (((0, 1, 2),), ())
    """
    if text in ("", "{}"):
        return (tuple(range(devices)),) if devices else ()
    if text.startswith("{{"):
        return tuple(_numbers(group) for group in re.findall(r"\{([\d,\s]*)\}", text))
    if tiled := re.fullmatch(r"\[(?P<shape>[\d,]+)\]<=(?P<order>.*)", text):
        ids = _ordered_range(tiled["order"])
        return _rows(ids.reshape(-1, _numbers(tiled["shape"])[-1])) if ids is not None else ()
    if mesh := _MESH.fullmatch(text):
        return _mesh_groups(mesh["axes"], mesh["ids"], mesh["along"])
    return ()


_MESH = re.compile(r"mesh\[(?P<axes>.*?)\](?:, device_ids=\((?P<ids>.*)\))? \{(?P<along>.*)\}")
_AXIS = re.compile(r"'?(?P<name>[^',=:]+)'?=(?P<size>\d+)")
_PART = re.compile(r"'?(?P<name>[^',=:]+)'?(?::\((?P<before>\d+)\)(?P<size>\d+))?(?:,|$)")


def _mesh_groups(axes: str, ids: str | None, along: str) -> Groups:
    """Groups along axes of a mesh, or along parts of axes: `'a':(2)4` splits `'a'` in 2, 4, rest.

    Within a group the axis that is named last changes fastest.
    """
    sizes = {axis["name"]: int(axis["size"]) for axis in _AXIS.finditer(axes)}
    shape = tuple(sizes.values())
    devices = np.arange(math.prod(shape)) if ids is None else _ordered_range(ids)
    if devices is None:
        return ()
    place = dict(zip(sizes, np.indices(shape).reshape(len(shape), -1), strict=True))
    other = dict(place)
    within = np.zeros_like(devices)
    group_size = 1
    for part in _PART.finditer(along):
        name = part["name"]
        before, size = int(part["before"] or 1), int(part["size"] or sizes[name])
        stride = sizes[name] // (before * size)
        step = place[name] // stride % size
        other[name] = other[name] - step * stride
        within = within * size + step
        group_size *= size
    group = np.ravel_multi_index(tuple(other.values()), shape)
    order = np.lexsort((within, group))
    return _rows(devices[order].reshape(-1, group_size))


def _ordered_range(text: str) -> np.ndarray | None:
    """`[2,4]T(1,0)`: a range in that shape, transposed, flat; or the numbers themselves."""
    if re.fullmatch(r"[\d,]+", text):
        return np.array(_numbers(text))
    found = re.fullmatch(r"\[(?P<shape>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?", text)
    if found is None:
        return None
    shape = _numbers(found["shape"])
    ids = np.arange(math.prod(shape)).reshape(shape)
    return (ids.transpose(_numbers(found["order"])) if found["order"] else ids).reshape(-1)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n.strip())


def _rows(ids: np.ndarray) -> Groups:
    return tuple(tuple(row) for row in ids.tolist())


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
