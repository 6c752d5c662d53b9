"""`Plan`: what was decided for one optimizer, as data that prints, and what it holds and moves."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from wusharding.analysis.layout import Layout, Leaf, travel_dtype
from wusharding.analysis.placement import Placement, Replicas
from wusharding.analysis.schedule import (
    OwnedStage,
    Problem,
    Schedule,
    steps_of,
)
from wusharding.analysis.sum_dtypes import OWN, SumDtypes
from wusharding.analysis.traffic import Traffic, traffic_of
from wusharding.formats.buckets import BucketSizes
from wusharding.formats.tiles import tile_padding
from wusharding.jaxprs import Aval


@dataclasses.dataclass(frozen=True)
class LeafPlan:
    """One array: how it is stored and what a device holds of it.

    Args:
      path: where it is in its tree.
      shape: logical shape.
      dtype: its name.
      format: how it is split, in words, or "replicated".
      logical_bytes: bytes of the whole array.
      held_bytes: bytes on one device, padding included.
      why: why it is not split; empty where it is.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    format: str
    logical_bytes: int
    held_bytes: int
    why: str


@dataclasses.dataclass(frozen=True)
class Explained:
    """What every kind of plan has and says in the same way.

    `print(plan)` explains it; `plan.to_json()` is the same as data, with the properties that
    `_totals` names.

    Args:
      num_shards: N.
      num_replicas: replicas that hold the same weights; more than N with a subgroup.
      axes: mesh axes that are sharded over.
      state: one entry an array of auxiliary state, masters included.
      traffic: collectives of one sharded step.
      whole: operations that needed a split value whole, with their source lines.
      owned: matrix jobs that one replica does for all: their number, and that of the replicas.
    """

    num_shards: int
    num_replicas: int
    axes: tuple[str, ...]
    state: tuple[LeafPlan, ...]
    traffic: tuple[Traffic, ...]
    whole: tuple[Problem, ...]
    owned: tuple[int, int]
    _totals: ClassVar[tuple[str, ...]]

    @property
    def state_bytes(self) -> int:
        """Bytes of the whole state, unpadded: what each device holds of it if nothing is split."""
        return sum(leaf.logical_bytes for leaf in self.state)

    @property
    def held_bytes(self) -> int:
        """Bytes of state on one device."""
        return sum(leaf.held_bytes for leaf in self.state)

    def to_json(self) -> str:
        """The plan as JSON, totals included."""
        totals = {name: getattr(self, name) for name in self._totals}
        return json.dumps(dataclasses.asdict(self) | totals, indent=2, default=str)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> list[str]:
        raise NotImplementedError

    def _title(self) -> str:
        replicas = (
            f" ({self.num_replicas} replicas)" if self.num_replicas != self.num_shards else ""
        )
        return f"Weight update sharded {self.num_shards} ways over {', '.join(self.axes)}{replicas}"

    def _last_lines(self, when: str) -> list[str]:
        lines, (jobs, owners) = [], self.owned
        if jobs:
            lines += ["", f"Matrix work: {jobs} jobs, each done once, shared by {owners} replicas"]
        if self.whole:
            lines += ["", f"Gathered{when}, because an operation could not run on the pieces"]
            lines += problem_lines(self.whole)
        return lines


@dataclasses.dataclass(frozen=True)
class Plan(Explained):
    """What is sharded, how, what it saves and moves, and what is not and why.

    Its `traffic` is that of a step whose gradients arrive local or unreduced; `Explained` has the
    fields that every plan has.

    Args:
      params: one entry a weight.
      reduced_hint: what is different for gradients that arrive already reduced.
    """

    params: tuple[LeafPlan, ...]
    reduced_hint: str

    _totals = ("state_bytes", "held_bytes", "replicated_bytes", "storage_factor")

    @property
    def replicated_bytes(self) -> int:
        """Bytes of state that every device holds whole."""
        return sum(leaf.held_bytes for leaf in self.state if leaf.why)

    @property
    def storage_factor(self) -> float:
        """Bytes held on one device over its fair share, state / N; 1 is perfect."""
        return self.held_bytes * self.num_shards / self.state_bytes if self.state_bytes else 1.0

    def _lines(self) -> list[str]:
        lines = [
            self._title(),
            f"  state      {bytes_text(self.state_bytes)} in all, "
            f"{bytes_text(self.held_bytes)} on each device, "
            f"{self.storage_factor:.4f} of a fair share",
            f"  replicated {bytes_text(self.replicated_bytes)} of it on every device",
        ]
        lines += ["", "Weights"] + leaf_lines(self.params)
        lines += ["", "State"] + leaf_lines(self.state)
        lines += ["", "Collectives of a step (bytes that one device puts in)"]
        lines += traffic_lines(self.traffic)
        lines += [f"  {self.reduced_hint}"]
        return lines + self._last_lines(" during the update")


def make_plan(
    layout: Layout,
    schedule: Schedule,
    problems: Sequence[Problem],
    buckets: BucketSizes,
    *,
    sum_dtypes: SumDtypes,
    gather_dtype: Any,
    reduced: bool,
) -> Plan:
    """The plan of one optimizer, from what was decided.

    Args:
      layout: how everything is stored.
      schedule: the steps of one update.
      problems: what could not run on pieces.
      buckets: which arrays travel together.
      sum_dtypes: in which gradients are scattered.
      gather_dtype: dtype in which weights or updates are gathered; None leaves it to them.
      reduced: gradients are known to arrive reduced.
    """
    replicas = layout.replicas
    masters = tuple(
        dataclasses.replace(leaf, path=f".master{leaf.path}") for leaf in layout.master_leaves()
    )
    return Plan(
        num_shards=replicas.num_shards,
        num_replicas=replicas.num_replicas,
        axes=replicas.shard_axes,
        params=tuple(leaf_plan(leaf, replicas) for leaf in layout.params),
        state=tuple(leaf_plan(leaf, replicas) for leaf in (*layout.state, *masters)),
        traffic=tuple(
            _traffic(
                layout,
                schedule,
                buckets,
                sum_dtypes=sum_dtypes,
                gather_dtype=gather_dtype,
                reduced=reduced,
            )
        ),
        whole=tuple(problems),
        owned=owned_jobs(schedule),
        reduced_hint=(
            "gradients arrive reduced: each device slices its share, without a collective"
            if reduced
            else "gradients that arrive reduced (in a global view on an auto mesh, always) are "
            "sliced instead, without a reduce-scatter"
        ),
    )


def owned_jobs(schedule: Schedule) -> tuple[int, int]:
    """The number of matrix jobs, and of the replicas that do them."""
    jobs = [j for s in steps_of(schedule) if isinstance(s, OwnedStage) for j in s.jobs]
    return len(jobs), len({j.owner for j in jobs})


def leaf_plan(leaf: Leaf, replicas: Replicas) -> LeafPlan:
    """How one array is stored, for people."""
    tile = leaf.whole.tile_shape(leaf.shape, replicas)
    logical = math.prod(tile) * Aval((), leaf.dtype).nbytes
    return LeafPlan(
        leaf.path,
        leaf.shape,
        str(leaf.dtype),
        describe(leaf.placement, leaf.shape, replicas, leaf.lanes),
        logical,
        leaf.held_bytes(replicas),
        leaf.why,
    )


def describe(
    placement: Placement, shape: tuple[int, ...], replicas: Replicas, lanes: int | None = None
) -> str:
    """A placement in words.

    >>> r = Replicas((("data", 8),), ("data",), ("data",))
    >>> from wusharding.analysis.placement import Span
    >>> describe(Placement(((), ()), Span(0, 2, 34)), (17, 16), r)
    'all dims merged, 34 each'
    >>> describe(Placement(((), ()), Span(0, 1, 3)), (17, 16), r)
    'dim 0, 3 each, 7 of padding'
    """
    words = []
    if placement.tile_axes:
        words.append(f"tiled over {', '.join(placement.tile_axes)}")
    fmt = placement.format(shape, replicas)
    if fmt is not None:
        if fmt.hi - fmt.lo == 1:
            dims = f"dim {fmt.lo}"
        elif fmt.is_flat:
            dims = "all dims merged"
        else:
            dims = f"dims {fmt.lo}-{fmt.hi - 1} merged"
        rows = " tile by tile" if fmt.tiled else ""
        rows += f" as rows x {lanes}" if lanes else ""
        words.append(f"{dims}{rows}, {fmt.chunk_elems} each")
        pad = fmt.chunk_elems * fmt.num_shards - fmt.merged_elems
        if pad:
            words.append(f"{pad} of padding")
    return ", ".join(words) or "replicated"


def _traffic(
    layout: Layout,
    schedule: Schedule,
    buckets: BucketSizes,
    *,
    sum_dtypes: SumDtypes,
    gather_dtype: Any,
    reduced: bool,
) -> list[Traffic]:
    replicas = layout.replicas
    split = [leaf for leaf in layout.params if leaf.placement.span is not None]
    rest = [leaf for leaf in layout.params if leaf.placement.span is None]
    gathered = [
        dataclasses.replace(leaf, dtype=travel_dtype(leaf.dtype, gather_dtype)) for leaf in split
    ]
    rows = []
    if split and not reduced:
        rows += _scattered(split, replicas, buckets, sum_dtypes)
        rows += _between_subgroups(split, replicas, sum_dtypes)
    if rest and not reduced and replicas.num_replicas > 1:
        rows.append(
            Traffic(
                "all-reduce", "gradients that stay whole", 1, sum(leaf.aval.nbytes for leaf in rest)
            )
        )
    rows += traffic_of(schedule, replicas, buckets)
    if split:
        rows += _gathered(gathered, replicas, buckets)
    return rows + _untiled(gathered, replicas, buckets)


def _untiled(leaves: Sequence[Leaf], replicas: Replicas, buckets: BucketSizes) -> list[Traffic]:
    """The gathers of weights whose update is split over more axes than they are."""
    rows = []
    tiled = [leaf for leaf in leaves if leaf.tiles is not None]
    lost = [tuple(a for a in x.placement.tile_axes if a not in x.whole.tile_axes) for x in tiled]
    for axes in dict.fromkeys(lost):
        mine = [leaf for leaf, other in zip(tiled, lost, strict=True) if other == axes]
        sizes = [
            math.prod(leaf.placement.tile_shape(leaf.shape, replicas)) * Aval((), leaf.dtype).nbytes
            for leaf in mine
        ]
        alone = [n * replicas.size(axes) >= buckets.alone_bytes for n in sizes]
        together = {leaf.dtype for leaf, a in zip(mine, alone, strict=True) if not a}
        purpose = f"updates or new weights, along {', '.join(axes)}"
        rows.append(Traffic("all-gather", purpose, sum(alone) + len(together), sum(sizes)))
    return rows


def _between_subgroups(
    leaves: Sequence[Leaf], replicas: Replicas, sums: SumDtypes
) -> Iterator[Traffic]:
    """The all-reduces of shards over axes that they are not split over."""
    rest = tuple(a for a in replicas.reduce_axes if a not in replicas.shard_axes)
    sizes: dict[tuple[str, ...], int] = {}
    for leaf in leaves:
        elems = math.prod(leaf.local_stored_shape(replicas))
        for dtype, over in sums.by_dtype(leaf.dtype, rest):
            sizes[over] = sizes.get(over, 0) + elems * Aval((), dtype).nbytes
    for size in sizes.values():
        yield Traffic("all-reduce", "gradient shards, between subgroups", 1, size)


def _scattered(
    leaves: Sequence[Leaf], replicas: Replicas, buckets: BucketSizes, sums: SumDtypes = OWN
) -> list[Traffic]:
    """The reduce-scatters of the gradients, a row for each phase."""
    travelling = _travelling(leaves, replicas, buckets, sums)
    rows = []
    shards = replicas.num_shards
    for phase in replicas.phases:
        shards //= phase.size
        where = f" along {phase.axis}" if len(replicas.phases) > 1 else ""
        if phase.groups is not None:
            where += f", in lines of {phase.size}"
        size = 0
        for (first, *minor), dtype in travelling:
            elems = shards * first * math.prod(minor)
            pad = 0
            if buckets.whole_tiles:
                pad = tile_padding(elems, tuple(minor), phase.size)
            size += phase.size * (elems + pad) * Aval((), sums.of(dtype, phase.axis)).nbytes
        rows.append(Traffic("reduce-scatter", f"gradients{where}", len(travelling), size))
    return rows


def _gathered(leaves: Sequence[Leaf], replicas: Replicas, buckets: BucketSizes) -> list[Traffic]:
    """The all-gathers of the new weights: the phases in reverse, and nothing padded."""
    rows = []
    size = _padded(leaves, replicas) // replicas.num_shards
    for scattered, phase in zip(
        reversed(_scattered(leaves, replicas, buckets)), reversed(replicas.phases), strict=True
    ):
        purpose = scattered.purpose.replace("gradients", "updates or new weights")
        rows.append(Traffic("all-gather", purpose, scattered.count, size))
        size *= phase.size
    return rows


def _travelling(
    leaves: Sequence[Leaf], replicas: Replicas, buckets: BucketSizes, sums: SumDtypes
) -> list[tuple[tuple[int, ...], Any]]:
    """What is scattered and gathered: the shape of a shard of it, and its dtype."""
    found = []

    def sent(leaf: Leaf) -> tuple[Any, ...]:
        return tuple(sums.of(leaf.dtype, phase.axis) for phase in replicas.phases)

    for dtypes in dict.fromkeys(map(sent, leaves)):
        alike = [leaf for leaf in leaves if sent(leaf) == dtypes]
        elems = [math.prod(leaf.local_stored_shape(replicas)) for leaf in alike]
        dtype = alike[0].dtype
        size = Aval((), dtypes[0]).nbytes
        for bucket in buckets.fill(elems, size * replicas.num_shards):
            if len(bucket) == 1 and bucket[0].stop - bucket[0].start == elems[bucket[0].array]:
                fmt = alike[bucket[0].array].format(replicas)
                assert fmt is not None
                lead = 0 if math.prod(fmt.shape[: fmt.lo]) > 1 else fmt.lo
                found.append((fmt.local_shape[lead:], dtype))
            else:
                found.append(((sum(p.stop - p.start for p in bucket),), dtype))
    return found


def _padded(leaves: Sequence[Leaf], replicas: Replicas) -> int:
    return sum(leaf.held_bytes(replicas) for leaf in leaves) * replicas.num_shards


# ---------------------------------------------------------------------------------------- printing

_MAX_ROWS = 60


def leaf_lines(leaves: Sequence[LeafPlan], *, before: bool = False) -> list[str]:
    """A line for each array, as far as a reader may want.

    Args:
      leaves: the arrays.
      before: also say how many bytes each device held before.
    """
    rows = [
        (
            leaf.path or "(root)",
            f"{leaf.dtype}{list(leaf.shape)}",
            leaf.format,
            *([f"{bytes_text(leaf.logical_bytes)} before,"] if before else []),
            bytes_text(leaf.held_bytes) + (" now" if before else ""),
            leaf.why,
        )
        for leaf in leaves[:_MAX_ROWS]
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    lines = [
        "  " + "  ".join(cell.ljust(w) for cell, w in zip(r, [*widths, 0], strict=True)).rstrip()
        for r in rows
    ]
    if len(leaves) > _MAX_ROWS:
        lines.append(f"  ... and {len(leaves) - _MAX_ROWS} more (all of them in to_json())")
    return lines or ["  none"]


def traffic_lines(rows: Sequence[Traffic]) -> list[str]:
    """A line for each kind of collective."""
    return [
        f"  {t.kind:<15}{t.count:>5}  {bytes_text(t.operand_bytes):>12}  {t.purpose}" for t in rows
    ] or ["  none"]


def problem_lines(problems: Sequence[Problem]) -> list[str]:
    """A line for each operation that gathers, with its source line."""
    seen: dict[tuple[str, str, str], int] = {}
    for p in problems:
        key = (p.primitive, p.why, p.source)
        seen[key] = seen.get(key, 0) + p.moved_bytes
    return [
        f"  {prim:<16} {bytes_text(n):>12}  {why}{f'  [{src}]' if src else ''}"
        for (prim, why, src), n in seen.items()
    ]


def bytes_text(n: float) -> str:
    """A size in the unit that suits it.

    >>> bytes_text(1536)
    '1.50 KiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024 or unit == "GiB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.2f} {unit}"
        n /= 1024
    raise AssertionError
