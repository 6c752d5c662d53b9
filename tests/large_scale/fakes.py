"""Devices of TPU slices that nobody needs to have, as JAX describes them."""

import dataclasses
import itertools

from large_scale import Topology
from large_scale.topology import CHIPS


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    id: int
    coords: tuple[int, ...]
    core_on_chip: int
    slice_index: int
    device_kind: str
    platform: str = "tpu"
    process_index: int = 0


def fake_devices(name: str, *, reverse: bool = False) -> list[FakeDevice]:
    """All devices of a topology; the coordinates start at 2, as in a part of a larger grid."""
    topology = Topology.of(name)
    places = itertools.product(
        range(topology.num_slices),
        *(range(2, 2 + n) for n in topology.dims),
        range(topology.chip.cores),
    )
    made = [
        FakeDevice(
            i, (*place[1:-1], 0)[:3], place[-1], place[0], CHIPS[topology.chip.name].kinds[0]
        )
        for i, place in enumerate(places)
    ]
    return made[::-1] if reverse else made
