import dataclasses
import re

import jax
import numpy as np
import pytest

from large_scale import CHIPS, Topology, make_mesh
from tests.large_scale.fakes import fake_devices

GRIDS = {
    # name: devices, closed dims, GiB of a device
    "v2:16x16": (512, (True, True), 8),
    "v3:32x32": (2048, (True, True), 16),
    "v3:128x32": (8192, (False, True), 16),
    "v3:8x8": (128, (False, False), 16),
    "v4:4x4x4": (128, (True, True, True), 16),
    "v4:2x2x1": (8, (False, False, False), 16),
    "v5e:16x16": (256, (True, True), 16),
    "v5e:4x16": (64, (False, True), 16),
    "v5p:4x4x8": (128, (True, True, True), 95),
    "v6e:8x16": (128, (False, True), 32),
    "2*v5e:16x16": (512, (True, True), 16),
}


@pytest.mark.parametrize("name", GRIDS)
def test_grids(name):
    topology = Topology.of(name)
    found = (topology.num_devices, topology.wraps, topology.device_hbm_bytes >> 30)
    assert found == GRIDS[name]
    assert str(topology) == name and Topology.of(str(topology)) == topology


@pytest.mark.parametrize("name", [*GRIDS, "h100:4x8"])
def test_of_devices(name):
    topology = Topology.of(name)
    if topology.chip.platform == "tpu":
        assert Topology.of(fake_devices(name)) == topology
    else:
        assert topology.num_devices == 32 and topology.wraps == (False, False)


def test_of_the_devices_of_this_machine():
    assert str(Topology.of(jax.devices())) == "cpu:8"


def test_every_row_has_sources_and_figures():
    for chip in CHIPS.values():
        if chip.platform != "cpu":
            assert chip.sources and chip.hbm_bytes and chip.link_bytes_per_second, chip.name
        assert len(chip.pod) in (0, chip.num_dims)


BAD = [
    ("v9:4x4", "no chip 'v9' is known; known are v2, v3, v4, v5e, v5p, v6e, h100, cpu"),
    ("v5e", "need CHIP:DIMS, or SLICES"),
    ("v5e:4x", "need CHIP:DIMS"),
    ("v5e:4x4x4", "v5e needs 2 dims, each at least 1, as in 'v5e:4x4'; slices are told before, as"),
    ("v5litepod-256", "such as v5litepod-256 or v4-32, does not tell the dims"),
    ("h100:16", "h100 needs 2 dims (NVLink domains, and GPUs of one), each .* as in 'h100:2x8'"),
    ("cpu:2x4", "cpu needs 1 dim, each at least 1, as in 'cpu:4'$"),
    ("v4:4x4", "v4 needs 3 dims"),
    ("v5e:0x4", "each at least 1"),
    ("2*h100:8x8", "only TPUs come in slices"),
]


@pytest.mark.parametrize(("name", "message"), BAD)
def test_bad_names(name, message):
    with pytest.raises(ValueError, match=re.sub(r"(?<!\.)([*()])", r"\\\1", message)):
        Topology.of(name)


@pytest.mark.parametrize(
    ("chip", "dims", "slices", "message"),
    [
        ("v5e", (4, 4), 1, "found str for the chip, need a row of large_scale.CHIPS"),
        (CHIPS["v5e"], (4.0, 4), 1, "need whole numbers, found dims (4.0, 4) and 1 slices"),
        (CHIPS["v5e"], (True, 4), 1, "need whole numbers"),
        (CHIPS["v5e"], (4, 4), 1.5, "and 1.5 slices"),
    ],
)
def test_what_is_no_chip_or_no_number(chip, dims, slices, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        Topology(chip, dims, slices)
    listed = Topology(CHIPS["v5e"], [4, 4])  # pyright: ignore[reportArgumentType]
    assert {listed} == {Topology.of("v5e:4x4")}


def test_names_may_have_spaces_and_capitals():
    assert Topology.of(" 2 * V5E:4x4 ") == Topology.of("2*v5e:4x4")


def test_what_is_no_topology():
    with pytest.raises(TypeError, match="found int, need a name, a Topology or devices"):
        Topology.of(8)
    with pytest.raises(TypeError, match="found list, need a name, a Topology or devices"):
        Topology.of(["v5e:4x4"])
    with pytest.raises(ValueError, match="there are no devices"):
        Topology.of([])


@dataclasses.dataclass(frozen=True)
class FakeGpu:
    id: int
    process_index: int
    device_kind: str = "NVIDIA H100 80GB HBM3"
    platform: str = "gpu"


def test_of_gpus():
    gpus = [FakeGpu(i, i // 8) for i in range(32)]
    assert str(Topology.of(gpus)) == "h100:4x8"
    mesh = make_mesh("h100:4x8", devices=gpus[::-1], model=2, split_data=True)
    assert dict(mesh.shape) == {"data_gpu": 4, "data_domain": 4, "model": 2}
    for line in np.moveaxis(mesh.devices, 2, 0).reshape(2, -1).T:  # model peers
        assert abs(line[0].id - line[1].id) == 1
    for line in mesh.devices.reshape(4, -1).T:  # data_gpu
        assert len({d.process_index for d in line}) == 1
    apart = [FakeGpu(i, i) for i in range(32)]
    mesh = make_mesh("h100:4x8", devices=apart, split_data=True)
    assert [d.id for d in mesh.devices[:, 0]] == list(range(8))
    with pytest.raises(ValueError, match="asked for h100:2x16, but the devices are h100:4x8"):
        make_mesh("h100:2x16", devices=gpus)
    with pytest.raises(ValueError, match="31 GPUs in 4 domains, uneven"):
        Topology.of(gpus[:-1])


def test_devices_that_are_no_grid():
    with pytest.raises(ValueError, match=r"15 devices are no whole grid; .* span v5e:4x4"):
        Topology.of(fake_devices("v5e:4x4")[:-1])
    mixed = [*fake_devices("v5e:2x2"), *fake_devices("v4:2x2x1")]
    with pytest.raises(ValueError, match="need devices of one kind"):
        Topology.of(mixed)
