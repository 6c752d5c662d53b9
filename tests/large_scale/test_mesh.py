import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import wusharding as wus
from large_scale import data_axes, make_mesh, torus_lines
from tests.large_scale.fakes import fake_devices


def places(mesh):
    """The `(slice, *coords, core)` of each device of a mesh."""
    found = np.array(
        [(d.slice_index, *d.coords, d.core_on_chip) for d in mesh.devices.flat], dtype=int
    )
    return found.reshape(*mesh.devices.shape, -1)


def moving_dims(line):
    """Which of slice, coordinates and core change along a line of devices."""
    return set(np.flatnonzero(np.ptp(line, axis=0)))


def test_data_alone_goes_along_the_torus_cores_first():
    mesh = make_mesh("2*v3:4x8", devices=fake_devices("2*v3:4x8", reverse=True))
    assert dict(mesh.shape) == {"data": 128}
    found = places(mesh).reshape(2, 4, 8, 2, -1)  # core, x, y, slice
    for axis, moves in enumerate((4, 1, 2, 0)):
        line = np.moveaxis(found, axis, -2).reshape(-1, found.shape[axis], 5)
        assert all(moving_dims(one) == {moves} for one in line)


@pytest.mark.parametrize(
    ("name", "axes", "model", "data"),
    [
        ("v5e:16x16", {"model": 4}, {2}, {1, 2}),
        ("v5e:16x16", {"model": 32}, {1, 2}, {1}),
        ("v3:8x8", {"model": 2}, {4}, {1, 2}),
        ("v3:8x8", {"model": 4}, {2, 4}, {1, 2}),
        ("v5e:6x15", {"model": 9}, {1, 2}, {1, 2}),
        ("v4:4x4x4", {"model": 4, "stage": 2}, {3, 4}, {1, 2, 3}),
    ],
)
def test_model_peers_are_neighbours(name, axes, model, data):
    mesh = make_mesh(name, devices=fake_devices(name), **axes)
    found = places(mesh)
    assert list(mesh.shape) == ["data", *axes]
    for line in np.moveaxis(found, 1, -2).reshape(-1, axes["model"], 5):
        assert moving_dims(line) == model
        assert np.ptp(line, axis=0).max() < 16
    for line in np.moveaxis(found, 0, -2).reshape(-1, mesh.shape["data"], 5):
        assert moving_dims(line) <= data
    assert len({d.id for d in mesh.devices.flat}) == mesh.size


def test_neighbours_are_next_to_each_other():
    mesh = make_mesh("v5e:16x16", devices=fake_devices("v5e:16x16"), model=4)
    line = places(mesh)[0]
    assert np.array_equal(np.diff(line[:, 2]), [1, 1, 1])


def test_live_devices():
    mesh = make_mesh(model=2, axis_types=AxisType.Auto)
    assert dict(mesh.shape) == {"data": 4, "model": 2}
    assert mesh.axis_types == (AxisType.Auto,) * 2
    assert [d.id for d in mesh.devices.flat] == [d.id for d in jax.devices()]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("v3:128x32", [2, 32, 128]),  # the ring along Y before the long line along X
        ("v3:32x32", [2, 32, 32]),
        ("v5e:4x16", [16, 4]),
        ("v4:4x8x4", [2, 8, 4, 4]),
        ("2*v5e:4x4", [4, 4, 2]),
        ("v5e:1x8", []),
    ],
)
def test_rings_are_scattered_over_first(name, sizes):
    mesh = make_mesh(name, devices=fake_devices(name))
    found = torus_lines(mesh)
    assert [len(groups[0]) for groups in found.get("data", ())] == sizes


def test_what_crosses_no_torus_has_no_lines():
    assert torus_lines(make_mesh()) == {}
    assert wus.torus_lines(make_mesh(), "data") == ()


SPLIT = {
    # name, other axes: the axes of data
    ("v3:128x32", ()): {"data_core": 2, "data_y": 32, "data_x": 128},
    ("2*v5e:4x16", ()): {"data_y": 16, "data_x": 4, "data_slice": 2},
    ("v4:4x8x4", (("model", 4),)): {"data_y": 8, "data_x": 4, "data_z": 2},
    ("v5e:16x16", (("model", 32),)): {"data_x": 8},
    ("v5e:16x16", (("model", 2),)): {"data_x": 16, "data_y": 8},
    ("v5e:4x4", (("model", 16),)): {"data_x": 1},
}


@pytest.mark.parametrize(("name", "axes"), SPLIT)
def test_data_comes_as_an_axis_for_each_dim(name, axes):
    devices = fake_devices(name, reverse=True)
    mesh = make_mesh(name, devices=devices, split_data=True, **dict(axes))
    wanted = SPLIT[name, axes]
    assert dict(mesh.shape) == {**wanted, **dict(axes)}
    assert data_axes(mesh) == tuple(wanted)
    found = places(mesh)
    dims = {"slice": 0, "x": 1, "y": 2, "z": 3, "core": 4}
    for k, axis in enumerate(wanted):
        for line in np.moveaxis(found, k, -2).reshape(-1, mesh.shape[axis], 5):
            assert moving_dims(line) <= {dims[axis.removeprefix("data_")]}
    whole = make_mesh(name, devices=devices, **dict(axes))
    assert data_axes(whole) == ("data",)
    peers, others = (
        np.ravel(m.devices.reshape(-1, *whole.devices.shape[1:])[0]) for m in (whole, mesh)
    )
    assert {d.id for d in peers} == {d.id for d in others}


BAD = [
    (("v5e:4x4",), {}, "asked for v5e:4x4, but the devices are cpu:8"),
    (("cpu:8",), {"model": 3}, "do not multiply to the 8 devices of cpu:8"),
    (("cpu:8",), {"data": 8, "model": 2}, "do not multiply to the 8"),
    (("cpu:8",), {"data": 4}, r"Let the others divide 8 and leave data out, or give fewer"),
    (("cpu:8",), {"model": 0}, "need sizes of at least 1"),
    (("cpu:8",), {"model": -1}, "only data= may be -1, what the others leave"),
    (("cpu:8",), {"model": 2.0}, "need whole numbers, got data=-1, {'model': 2.0}"),
    (("cpu:8",), {"data": None}, "need whole numbers, got data=None"),
    (("cpu:8",), {"data_device": 2, "split_data": True}, "name the axis otherwise"),
    (("cpu:8",), {"devices": jax.devices()[:1] * 8}, "8 devices, of which 1 differ"),
    (("cpu:8",), {"devices": 8}, "need a list of devices"),
    (("cpu:8",), {"axis_types": (AxisType.Auto,)}, "one jax.sharding.AxisType for all axes"),
    (("v9:1",), {}, "no chip 'v9' is known"),
]


@pytest.mark.parametrize(("args", "axes", "message"), BAD)
def test_bad_requests(args, axes, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make_mesh(*args, **axes)


def test_axes_that_a_mesh_has_not():
    other = jax.make_mesh((8,), ("x",))
    with pytest.raises(ValueError, match=r"no axis of \('x',\) is named data"):
        data_axes(other)
    with pytest.raises(ValueError, match=r"has no axis 'data', it has \('x',\)"):
        torus_lines(other)
    with pytest.raises(TypeError, match="found AbstractMesh, need a Mesh of devices"):
        torus_lines(other.abstract_mesh, "x")  # pyright: ignore[reportArgumentType]
