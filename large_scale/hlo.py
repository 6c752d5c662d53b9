"""The collectives and the work of a compiled program, read off its optimized HLO text.

`compiled.as_text()` is what XLA will run, so what is counted here is what is sent: collectives that
XLA merged, moved or made asynchronous appear as it left them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

import numpy as np

from large_scale.hlo_groups import Groups
from large_scale.hlo_groups import groups_of as groups_of
from large_scale.hlo_text import (
    Computation,
    Instruction,
    arrays,
    called,
    in_loops,
    nbytes,
    num_devices,
    opcodes,
    operand_name,
    operand_type,
    parse,
    result_type,
    without_layout,
)

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

    An asynchronous one counts once, by its `-start`, its chain or its channel. On TPU an all-reduce
    inside of a fusion that keeps a slice of it only is a reduce-scatter, of an operand that was
    padded.

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
    computations = parse(hlo_text)
    looped = in_loops(computations)
    devices = num_devices(hlo_text)
    callers = {
        i.attributes["calls"].removeprefix("%"): i
        for computation in computations.values()
        for i in computation.values()
        if i.opcode in ("fusion", "async-start")
    }
    fused: dict[tuple[str | int, ...], int] = {}
    carriers: dict[str, int] = {}
    sent: dict[str, int] = {}
    received: dict[str, str] = {}
    found: list[Collective] = []
    for name, computation in computations.items():
        for instruction in computation.values():
            kind = _kind(instruction)
            if instruction.opcode == "recv" and kind in KINDS:
                received[instruction.attributes["host_transfer_rendezvous"]] = instruction.name
                continue
            if kind not in KINDS:
                continue
            scatters = name in callers and "AllReduceScatter" in callers[name].emitter
            channel = instruction.attributes.get("channel_id")
            if name in callers and channel and not scatters:
                # The start, the steps and the end of an asynchronous one are fusions on TPU, each
                # with the collective in it. Others may have the same channel, but not the chain.
                groups = instruction.attributes.get("replica_groups", "")
                same = (channel, kind, groups, nbytes(instruction.type))
                if chain := instruction.attributes.get("chain_id"):
                    same = (kind, chain)
                carriers[callers[name].name] = fused.setdefault(same, len(found))
                if (seen := fused[same]) < len(found):
                    if not found[seen].emitter:
                        found[seen] = dataclasses.replace(found[seen], emitter=_SPREAD)
                    continue
            one = _collective(instruction, kind, computation, name in looped, devices)
            if scatters:
                fusion = callers[name]
                one = dataclasses.replace(
                    one,
                    kind="reduce-scatter",
                    result_bytes=nbytes(fusion.type),
                    emitter=f"fusion, {fusion.emitter}",
                )
            carriers[callers[name].name if name in callers else instruction.name] = len(found)
            if instruction.opcode == "send":
                sent[instruction.attributes["host_transfer_rendezvous"]] = len(found)
            found.append(one)
    carriers |= {name: sent[key] for key, name in received.items() if key in sent}
    return _with_phases(found, carriers, computations)


def _kind(instruction: Instruction) -> str:
    """What collective an instruction is, or begins; its opcode where it is none."""
    between_slices = instruction.attributes.get("megascale_transfer_type")
    if between_slices is not None:
        return between_slices.lower().replace("_", "-")
    return instruction.opcode.removesuffix("-start")


_SPREAD = "asynchronous fusions"  # which is not a name of the compiler's
# Where what a collective makes goes: into shards, or out to all.
DIRECTIONS = {"all-reduce": "in", "reduce-scatter": "in", "all-gather": "out"}


def _with_phases(
    found: list[Collective], carriers: dict[str, int], computations: dict[str, Computation]
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
            before = frozenset[int]().union(*(near.get(operand_name(o), ()) for o in i.operands))
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
    instruction: Instruction, computation: Computation, computations: dict[str, Computation]
) -> bool:
    """Whether what it gives is what it takes, moved or cast."""
    if instruction.opcode.endswith(("-done", "-update")):  # of what its `-start` does
        return True
    return opcodes(instruction, computation, computations) - _STILL <= _MOVES | {"convert"}


def _collective(
    instruction: Instruction, kind: str, computation: Computation, in_loop: bool, devices: int
) -> Collective:
    attributes = instruction.attributes
    if instruction.opcode == "send":
        return _between_slices(instruction, kind, computation, in_loop, devices)
    operands = " ".join(operand_type(o, computation) for o in instruction.operands)
    groups = attributes.get("source_target_pairs", attributes.get("replica_groups", ""))
    if "device_ids" in attributes:  # of a mesh: the comma before them has cut the text in two
        groups += f", device_ids={attributes['device_ids']}"
    dtypes = dict.fromkeys(dtype for dtype, _ in arrays(operands))
    return Collective(
        kind,
        "+".join(dtypes),
        nbytes(operands),
        nbytes(result_type(instruction)),
        groups,
        groups_of(groups, devices),
        in_loop,
        instruction.emitter,
    )


def _between_slices(
    instruction: Instruction, kind: str, computation: Computation, in_loop: bool, devices: int
) -> Collective:
    """One that a TPU slice does with others, from its `send`."""
    what = operand_type(instruction.operands[0], computation)
    target = instruction.attributes.get("megascale_target", "")
    groups = groups_of(target, devices)
    size = len(groups[0]) if groups else 1
    times = {"all-gather": size, "reduce-scatter": 1 / size}.get(kind, 1)
    (dtype, _), *_ = arrays(what)
    nbytes_in = nbytes(what)
    result = int(nbytes_in * times)
    return Collective(kind, dtype, nbytes_in, result, target, groups, in_loop, "between slices")


# -------------------------------------------------------------------------------------------- work

WORK = ("forward", "backward", "update", "relayout")


@dataclasses.dataclass(frozen=True)
class Work:
    """One instruction that a TPU core spends time on; collectives are none.

    Args:
      name: its name in the text.
      opcode: what it is.
      kind: one of `WORK`: "forward" and "backward" are told by JAX's names, and beside these what
        only reads arguments that are not donated, where others are, is forward too: the batch. Of
        the rest, "relayout" moves data and computes nothing, and "update" is all else.
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
        *("select", "copy", "reshape", "transpose", "concatenate", "pad", "gather"),
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
    computations = parse(hlo_text)
    # Where nothing was differentiated there is no forward pass: what comes in are gradients.
    batch = _not_donated(hlo_text, computations) if "jvp(" in hlo_text else set()
    found = []
    for name in _scheduled(hlo_text, computations):
        for i in computations[name].values():
            kind = i.opcode.removesuffix("-start").removesuffix("-done")
            if kind in KINDS or "AllReduceScatter" in i.emitter:
                continue
            if i.cycles is None and (i.opcode not in _MOVES or nbytes(i.type) < _VECTOR_BYTES):
                continue  # XLA prices all that computes; the rest is scalars and names
            types = [*(operand_type(o, computations[name]) for o in i.operands), i.type]
            if i.cycles is None and i.opcode == "copy" and _plain(types[0]) == _plain(types[1]):
                # From one memory to another, as it lies: that takes what the main memory takes.
                types = [t for t in types if t == _plain(t)]
                if not types:
                    continue
            found.append(
                Work(
                    i.name,
                    i.opcode,
                    _work_kind(i, computations[name], computations, batch),
                    i.cycles,
                    sum(map(nbytes, types)),
                    without_layout(i.type),
                    i.op_name,
                )
            )
    return found


def _plain(type_text: str) -> str:
    """A type without the memory spaces `S(n)`, which all but the main memory have."""
    return re.sub(r"S\(\d+\)", "", type_text)


def _scheduled(hlo_text: str, computations: dict[str, Computation]) -> list[str]:
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
                todo += called(i, computations)
    return found


def _not_donated(hlo_text: str, computations: dict[str, Computation]) -> set[str]:
    """The batch: parameters whose place no result takes, in a program where some are taken."""
    entry = re.search(r"^ENTRY\s+%?([\w.\-]+)", hlo_text, re.MULTILINE)
    head = re.search(r"^HloModule.*?input_output_alias=\{(.*?) \}", hlo_text)
    if entry is None or head is None:
        return set()
    taken = set(re.findall(r"\((\d+), \{", head[1]))
    parameters = (i for i in computations[entry[1]].values() if i.opcode == "parameter")
    return {i.name for i in parameters if i.operands[0] not in taken}


def _work_kind(
    instruction: Instruction,
    computation: Computation,
    computations: dict[str, Computation],
    batch: set[str],
) -> str:
    if "transpose(jvp" in instruction.op_name:
        return "backward"
    if "jvp(" in instruction.op_name:
        return "forward"
    if batch and {o.rpartition("%")[2] for o in instruction.operands} <= batch:
        return "forward"  # images on their way into the layout of the first convolution
    moves = opcodes(instruction, computation, computations) - _STILL <= _MOVES
    return "relayout" if moves else "update"
