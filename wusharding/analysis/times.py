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


def _seconds(rows: Iterable[Traffic], plan: StepPlan, network: Network) -> float:
    total = 0.0
    for row in _phases_joined(rows, plan.num_shards):
        members = plan.num_shards
        if row.kind == "all-reduce":
            members = plan.num_replicas
            if "between subgroups" in row.purpose:
                members //= plan.num_shards
        if row.kind == "all-to-all":
            total += _all_to_all(row.operand_bytes, members, network)
        else:
            passes = 2 if row.kind == "all-reduce" else 1
            total += passes * _ring(row.operand_bytes, members, row.count, network)
    return total


def _phases_joined(rows: Iterable[Traffic], num_shards: int) -> Iterable[Traffic]:
    """One row, with the bytes of the whole arrays, for what goes along several axes in turn."""
    found: dict[tuple[str, str], Traffic] = {}
    for row in rows:
        purpose = row.purpose.partition(" along ")[0]
        gathers = row.kind == "all-gather"
        size = row.operand_bytes * num_shards if gathers else row.operand_bytes
        old = found.get((row.kind, purpose))
        if old is not None:  # the phase next to the shards has the least to gather
            size = (min if gathers else max)(size, old.operand_bytes)
        found[row.kind, purpose] = Traffic(row.kind, purpose, row.count, size)
    return found.values()


def _ring(nbytes: float, members: int, count: int, network: Network) -> float:
    """Seconds in which each member gets, or gives away, all but its own share of `nbytes`."""
    near = min(members, network.domain or members)
    far = members // near
    seconds = nbytes * (near - 1) / near / network.bytes_per_second
    if far > 1:
        seconds += nbytes / near * (far - 1) / far / network.far_bytes_per_second
    return seconds + count * (network.hop_seconds or 0.0) * (members // 2)


def _all_to_all(nbytes: float, members: int, network: Network) -> float:
    """Seconds in which each member sends a share of its `nbytes` to each other one."""
    if network.domain is None:  # a quarter of the ring is the average way, both ways round
        return nbytes * members / 4 / network.bytes_per_second
    near = min(members, network.domain)
    inside = nbytes * (near - 1) / members / network.bytes_per_second
    beyond = nbytes * (members - near) / members
    return inside + (beyond / network.far_bytes_per_second if beyond else 0.0)
