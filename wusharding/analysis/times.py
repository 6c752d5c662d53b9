"""Estimated times of a step's collectives and update on a named network.

`NETWORKS` is a table: one row a network, each with the pages that state its figures. The estimate
is that of a ring: bandwidth and hops, as if nothing else ran and nothing overlapped. It is for
comparing a step with itself, and not for promising a speed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Literal

from wusharding.analysis.step_plan import StepPlan
from wusharding.analysis.traffic import Traffic


@dataclasses.dataclass(frozen=True)
class Network:
    """How devices of a kind are joined.

    Args:
      name: as it is asked for.
      platform: JAX's name of the platform.
      bytes_per_second: what a device sends along one ring, all its directions together.
      hop_seconds: time of a small message to a neighbour; None where nobody states it.
      domain: devices of a domain that this holds within; None where it holds for all.
      far_bytes_per_second: what a device sends beyond its domain.
      memory_bytes_per_second: bandwidth of a device's own memory.
      sources: the pages that state the figures.
    """

    name: str
    platform: Literal["tpu", "gpu"]
    bytes_per_second: float
    hop_seconds: float | None
    domain: int | None
    far_bytes_per_second: float
    memory_bytes_per_second: float
    sources: tuple[str, ...]


_BOOK = "https://jax-ml.github.io/scaling-book/tpus/"
_CLOUD = "https://cloud.google.com/tpu/docs/"
_H100 = "https://www.nvidia.com/en-us/data-center/h100/"
_DGX = "https://docs.nvidia.com/dgx/dgxh100-user-guide/"

# TPUs: a ring along one torus dim that closes, its links used both ways.
NETWORKS: dict[str, Network] = {
    network.name: network
    for network in (
        Network("v5e", "tpu", 2 * 50e9, 1e-6, None, 0.0, 819e9, (_BOOK, _CLOUD + "v5e")),
        Network("v5p", "tpu", 2 * 100e9, 1e-6, None, 0.0, 2765e9, (_BOOK, _CLOUD + "v5p")),
        Network("v6e", "tpu", 2 * 100e9, 1e-6, None, 0.0, 1638e9, (_BOOK, _CLOUD + "v6e")),
        Network("h100", "gpu", 450e9, None, 8, 50e9, 3.35e12, (_H100, _DGX)),
    )
}


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of one step on one network, before and in the sharded step.

    Args:
      network: its name.
      collectives: of sums over replicas, and of what takes their place.
      update: reading and writing the update's arrays once.
    """

    network: str
    collectives: tuple[float, float]
    update: tuple[float, float]

    @property
    def total(self) -> tuple[float, float]:
        return (
            self.collectives[0] + self.update[0],
            self.collectives[1] + self.update[1],
        )


def seconds_text(seconds: float) -> str:
    """A time in the unit that suits it.

    >>> seconds_text(0.00012)
    '120 us'
    """
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1 or unit == "us":
            return f"{seconds * factor:.3g} {unit}"
    raise AssertionError


def time_lines(times: Times) -> list[str]:
    """The times as text."""
    rows = (("collectives", times.collectives), ("update", times.update), ("both", times.total))
    return [
        f"Estimated on {times.network}, each step (see docs/analyze.md for what is left out)"
    ] + [
        f"  {name:<12}{seconds_text(before):>10} before, {seconds_text(after)} sharded"
        for name, (before, after) in rows
    ]


def estimate(plan: StepPlan, network: Network) -> Times:
    """Estimates a plan's collectives, and its update by the bytes that it reads and writes.

    The update reads gradients and weights, writes weights, and reads and writes state. Forward and
    backward pass are the same before and after, and left out.
    """
    weights = sum(leaf.logical_bytes for leaf in plan.weights)
    shares = sum(leaf.held_bytes for leaf in plan.updates)
    touched = (3 * weights + 2 * plan.state_bytes, 3 * shares + 2 * plan.held_bytes)
    speed = network.memory_bytes_per_second
    return Times(
        network.name,
        (_seconds(plan.before, plan, network), _seconds(plan.traffic, plan, network)),
        (touched[0] / speed, touched[1] / speed),
    )


@dataclasses.dataclass(frozen=True)
class Flow:
    """Collectives of one kind and purpose, along all axes together.

    Args:
      kind: of collective.
      purpose: what for.
      count: how many.
      whole_bytes: of the arrays before they are scattered, or after they are gathered; what one
        device puts into an all-to-all.
      members: devices that take part.
    """

    kind: str
    purpose: str
    count: int
    whole_bytes: int
    members: int

    @property
    def passes(self) -> int:
        """How often all but a share goes round: an all-reduce is a scatter and a gather."""
        return 2 if self.kind == "all-reduce" else 1

    @property
    def sent_bytes(self) -> int:
        """Bytes that each device sends, the least that can be."""
        return self.passes * self.whole_bytes * (self.members - 1) // self.members


def flows(rows: Iterable[Traffic], plan: StepPlan) -> list[Flow]:
    """The collectives of a plan, one entry for what goes along several axes in turn."""
    found: dict[tuple[str, str], Flow] = {}
    for row in rows:
        purpose, members, size = (
            row.purpose.partition(" along ")[0],
            plan.num_shards,
            row.operand_bytes,
        )
        if row.kind == "all-gather":
            size *= plan.num_shards
        if row.kind == "all-reduce":
            members = plan.num_replicas
            if "between subgroups" in purpose:
                members //= plan.num_shards
        old = found.get((row.kind, purpose))
        if old is not None:  # the phase next to the shards has the least to gather
            size = (min if row.kind == "all-gather" else max)(size, old.whole_bytes)
        found[row.kind, purpose] = Flow(row.kind, purpose, row.count, size, members)
    return list(found.values())


def _seconds(rows: Iterable[Traffic], plan: StepPlan, network: Network) -> float:
    return sum(
        _all_to_all(flow, network) if flow.kind == "all-to-all" else _ring(flow, network)
        for flow in flows(rows, plan)
    )


def _ring(flow: Flow, network: Network) -> float:
    near = min(flow.members, network.domain or flow.members)
    far = flow.members // near
    seconds = flow.whole_bytes * (near - 1) / near / network.bytes_per_second
    if far > 1:
        seconds += flow.whole_bytes / near * (far - 1) / far / network.far_bytes_per_second
    hops = flow.count * (network.hop_seconds or 0.0) * (flow.members // 2)
    return flow.passes * (seconds + hops)


def _all_to_all(flow: Flow, network: Network) -> float:
    if network.domain is None:  # a quarter of the ring is the average way, both ways round
        hops = flow.count * (network.hop_seconds or 0.0) * (flow.members // 2)
        return flow.whole_bytes * flow.members / 4 / network.bytes_per_second + hops
    near = min(flow.members, network.domain)
    inside = flow.whole_bytes * (near - 1) / flow.members / network.bytes_per_second
    beyond = flow.whole_bytes * (flow.members - near) / flow.members
    return inside + (beyond / network.far_bytes_per_second if beyond else 0.0)
