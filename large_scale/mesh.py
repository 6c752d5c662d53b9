"""Meshes whose axes follow the torus: `data` along its dims, the peers of other axes neighbours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

import wusharding as wus
from large_scale.cost import Link, by_speed, torus_link
from large_scale.topology import Topology, is_count, slice_of


def make_mesh(
    topology: str | Topology | None = None,
    *,
    devices: Sequence[Any] | None = None,
    axis_types: AxisType = AxisType.Explicit,
    split_data: bool = False,
    data: int = -1,
    **axes: int,
) -> Mesh:
    """A mesh over all devices of a topology.

    Axes other than `data` take the nearest neighbours, in the order in which they are named: first
    the cores of a chip, then chips along the last dims of the torus. `data` gets what is left, in
    the order of cores, torus dims, slices, so that its rings follow the torus and what crosses
    slices comes last. It is one axis, in which `wusharding` finds the torus lines by itself, or,
    with `split_data`, an axis for each dim, named after it, in the order in which to scatter over
    them. Both send the same; the axes allow more: `shard_axis=` takes some of them,
    `scatter_dtype=` tells them apart.

    Args:
      topology: a name such as "v5e:16x16" or a `Topology`; None is that of the devices. Name it
        where each GPU has a process of its own.
      devices: the devices; None takes `jax.devices()`, which must be such a topology.
      axis_types: the kind of all axes.
      split_data: `data` comes as axes `data_core`, `data_x`, `data_y`, `data_z`, `data_slice` (of
        GPUs `data_gpu`, `data_domain`), those of size 1 left out; see `data_axes`.
      data: size of the `data` axis; -1 takes what the others leave.
      **axes: name and size of the other axes, nearest neighbours first.

    Raises:
      ValueError: sizes that do not multiply to the number of devices, or other devices than asked.

    >>> dict(make_mesh("cpu:8", model=2).shape)
    {'data': 4, 'model': 2}
    >>> dict(make_mesh("cpu:8", model=2, split_data=True).shape)
    {'data_device': 4, 'model': 2}
    """
    if isinstance(devices, str | int) or not isinstance(axis_types, AxisType):
        raise TypeError(
            f"make_mesh: found devices={devices!r}, axis_types={axis_types!r}; need a list of "
            "devices and one jax.sharding.AxisType for all axes."
        )
    found = list(jax.devices() if devices is None else devices)
    if len(set(found)) < len(found):
        raise ValueError(f"make_mesh: {len(found)} devices, of which {len(set(found))} differ.")
    have = Topology.of(found)
    want = have if topology is None else Topology.of(topology)
    if have != want and not _is_process_a_gpu(have, want):
        raise ValueError(
            f"make_mesh: asked for {want}, but the devices are {have}. Give devices of that "
            f"topology, as large_scale.aot.devices({str(want)!r}) makes them for compiling."
        )
    if not all(map(is_count, (data, *axes.values()))):
        raise TypeError(f"make_mesh: need whole numbers, got data={data!r}, {axes}")
    if any(n < 1 for n in axes.values()):
        raise ValueError(
            f"make_mesh: need sizes of at least 1, got {axes}; only data= may be -1, what the "
            "others leave"
        )
    rest = math.prod(axes.values())
    if want.num_devices % rest or data not in (-1, want.num_devices // rest):
        raise ValueError(
            f"make_mesh: axes data={data}, {axes} do not multiply to the {want.num_devices} "
            f"devices of {want}. Let the others divide {want.num_devices} and leave data out, or "
            "give fewer devices, as devices=jax.devices()[:4]."
        )
    taken = [name for name in axes if name in {f"data_{dim}" for dim in want.grid_names}]
    if split_data and taken:
        raise ValueError(
            f"make_mesh: {taken}: with split_data these are names of parts of data; name the axis "
            "otherwise"
        )
    grid = _grid(found, want)
    # Each dim of the grid is cut in parts, outer to inner; inner parts are neighbours.
    parts = [[("data", n)] for n in grid.shape]
    for name, size in axes.items():
        need = size
        for d in _nearest_first(grid.ndim):
            left = parts[d][0][1]
            take = math.gcd(left, need)
            if take > 1:
                parts[d] = [("data", left // take), (name, take), *parts[d][1:]]
                need //= take
        assert need == 1, "a divisor of a product is a product of divisors"
    mesh = _laid(grid, parts, ("data", *axes), axis_types)
    if not split_data:
        return mesh
    for name, cut in zip(want.grid_names, parts, strict=True):
        cut[0] = (f"data_{name}", cut[0][1])
    sizes = dict(cut[0] for cut in parts)
    order = [f"data_{name}" for name in _scatter_order(mesh, want)]
    split = [name for name in order if sizes[name] > 1] or [f"data_{want.grid_names[1]}"]
    return _laid(grid, parts, (*split, *axes), axis_types)


def _is_process_a_gpu(have: Topology, want: Topology) -> bool:
    """Whether each GPU has a process of its own, so that only the name tells the domains."""
    same = (have.chip, have.num_devices) == (want.chip, want.num_devices)
    return same and have.chip.platform == "gpu" and have.dims[1] == 1


def _scatter_order(mesh: Mesh, topology: Topology) -> list[str]:
    """Names of the dims along which `data` lies, in the order in which to scatter over them."""
    if topology.chip.platform != "tpu":
        return list(reversed(topology.dim_names))
    torus = [link.name for link in by_speed(_torus_links(mesh, "data", topology))]
    return ["core", *torus, "slice"]


def data_axes(mesh: Mesh) -> tuple[str, ...]:
    """The axes of the replicas in a mesh of `make_mesh`, in the order in which to scatter.

    For `shard_updates(..., axis=data_axes(mesh))`, and in a `PartitionSpec` for the batch.

    Raises:
      ValueError: the mesh has none.

    >>> data_axes(make_mesh("cpu:8")), data_axes(make_mesh("cpu:8", split_data=True))
    (('data',), ('data_device',))
    """
    found = tuple(a for a in mesh.axis_names if a == "data" or a.startswith("data_"))
    if not found:
        raise ValueError(f"data_axes: no axis of {mesh.axis_names} is named data, or data_...")
    return found


def torus_lines(mesh: Mesh, axis: str = "data") -> dict[str, Any]:
    """The lines of an axis for `shard_updates(..., lines=...)`, the fastest first.

    `wusharding` finds lines by itself, the longest first, for it knows coordinates only. What is
    scattered first carries the most bytes, and a dim that closes to a ring carries twice as many a
    second as one that does not: on the multipod, which is a ring along Y and none along X, Y comes
    first. Where other axes take every second device of a dim, its links are shared, and it comes
    later. See `large_scale.cost`. Source: Kumar et al. 2020 (arXiv 2011.03641).

    >>> torus_lines(make_mesh("cpu:8"))
    {}
    """
    if not isinstance(mesh, Mesh):
        raise TypeError(f"torus_lines: found {type(mesh).__name__}, need a Mesh of devices.")
    if axis not in mesh.axis_names:
        raise ValueError(f"torus_lines: the mesh has no axis {axis!r}, it has {mesh.axis_names}.")
    topology = Topology.of(list(mesh.devices.flat))
    if topology.chip.platform != "tpu":
        return {}
    ordered = by_speed(_torus_links(mesh, axis, topology))
    order = [topology.dim_names.index(link.name) - 1 for link in ordered]
    rest = [d for d in range(3) if d not in order]  # coordinates are three, whatever the torus
    lines = wus.torus_lines(mesh, axis, (*order, *rest))
    return {axis: lines} if lines else {}


def _torus_links(mesh: Mesh, axis: str, topology: Topology) -> list[Link]:
    """The parts of torus dims that one axis moves along."""
    line = np.moveaxis(mesh.devices, mesh.axis_names.index(axis), 0).reshape(mesh.shape[axis], -1)
    places = np.array([d.coords for d in line[:, 0]])
    found = []
    for d in range(len(topology.dims)):
        values = np.unique(places[:, d])
        stride = int(np.diff(values).min()) if len(values) > 1 else 1
        found.append(torus_link(topology, d, len(values), stride))
    return found


def _nearest_first(ndim: int) -> list[int]:
    """Cores, then torus dims from the last to the first, then slices."""
    return [ndim - 1, *range(ndim - 2, 0, -1), 0]


def _grid(devices: Sequence[Any], topology: Topology) -> np.ndarray:
    """The devices as `[slices, *dims, cores]`."""
    grid = np.empty((topology.num_slices, *topology.dims, topology.chip.cores), dtype=object)
    for place, device in zip(places(devices, topology), devices, strict=True):
        grid[tuple(place)] = device
    return grid


def places(devices: Sequence[Any], topology: Topology) -> np.ndarray:
    """Where each device is, `int[devices, dims]`: its slice, its place in the torus, its core.

    `place_names` names the columns.

    >>> places(jax.devices()[:3], Topology.of("cpu:3")).tolist()
    [[0, 0, 0], [0, 1, 0], [0, 2, 0]]
    """
    if topology.chip.platform == "tpu":
        slices = sorted({slice_of(d) for d in devices})
        dims = len(topology.dims)
        found = np.array(
            [(slices.index(slice_of(d)), *tuple(d.coords)[:dims], d.core_on_chip) for d in devices]
        )
        return found - found.min(axis=0)
    order = sorted(range(len(devices)), key=lambda i: (devices[i].process_index, devices[i].id))
    shape = (topology.num_slices, *topology.dims, topology.chip.cores)
    found = np.empty((len(devices), len(shape)), int)
    found[order] = np.stack(np.unravel_index(np.arange(len(devices)), shape), axis=1)
    return found


def place_names(topology: Topology) -> tuple[str, ...]:
    """What the columns of `places` are.

    >>> place_names(Topology.of("v4:4x4x4")), place_names(Topology.of("h100:8x8"))
    (('slice', 'x', 'y', 'z', 'core'), ('slice', 'domain', 'chip', 'core'))
    """
    dims = {"tpu": ("x", "y", "z"), "gpu": ("domain", "chip"), "cpu": ("device",)}
    return ("slice", *dims[topology.chip.platform][: len(topology.dims)], "core")


def _laid(
    grid: np.ndarray,
    parts: Sequence[Sequence[tuple[str, int]]],
    names: tuple[str, ...],
    axis_types: AxisType,
) -> Mesh:
    """The grid's parts, gathered by axis: cores, torus dims, slices."""
    flat = [(d, name, size) for d, cut in enumerate(parts) for name, size in cut if size > 1]
    split = grid.reshape([size for _, _, size in flat])
    order = [grid.ndim - 1, *range(1, grid.ndim - 1), 0]
    places = {
        axis: [i for d in order for i, (e, name, _) in enumerate(flat) if (e, name) == (d, axis)]
        for axis in names
    }
    shape = [math.prod(flat[i][2] for i in places[axis]) for axis in names]
    laid = split.transpose([i for axis in names for i in places[axis]]).reshape(shape)
    return Mesh(laid, names, axis_types=(axis_types,) * len(names))
