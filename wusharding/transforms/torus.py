"""Finds the torus lines of a mesh in the coordinates of its devices."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from wusharding.analysis.lines import Lines, check_lines, find_lines


def lines_of(
    given: Mapping[str, Lines] | None,
    mesh: Mesh | AbstractMesh | None,
    shard_axes: tuple[str, ...],
    sizes: Mapping[str, int],
) -> tuple[tuple[str, Lines], ...]:
    """The lines of each shard axis that has any: those given, else those of the mesh's devices.

    Raises:
      ValueError: given for another axis, or not those of a grid.
    """
    if given is None:
        return _lines_of_mesh(mesh, shard_axes) if isinstance(mesh, Mesh) else ()
    if not isinstance(given, Mapping):
        raise TypeError(f"lines: found {type(given).__name__}, need a mapping from axes to lines.")
    for axis, lines in given.items():
        if axis not in shard_axes:
            raise ValueError(f"lines: {axis!r} is not among the axes to shard over, {shard_axes}.")
        check_lines(axis, sizes[axis], lines)
    return tuple((axis, given[axis]) for axis in shard_axes if axis in given)


@functools.lru_cache(maxsize=16)
def _lines_of_mesh(mesh: Mesh, axes: tuple[str, ...]) -> tuple[tuple[str, Lines], ...]:
    found = tuple((axis, torus_lines(mesh, axis)) for axis in axes if axis in mesh.axis_names)
    return tuple((axis, lines) for axis, lines in found if lines)


def torus_lines(mesh: Mesh, axis: str, order: Sequence[int] | None = None) -> Lines:
    """The lines of a TPU torus along which a mesh axis lies.

    Args:
      mesh: any mesh; its devices may lie in any order.
      axis: one of its axes.
      order: the torus dims in the order in which to scatter over them. None takes the longest
        first. The cores of a chip always come before all of them, and slices after them, since
        links between those are the fastest and the slowest.

    Returns:
      For each torus dim that the axis moves along the groups of positions that differ in it only;
      empty where one collective over the whole axis is as good: on other machines, along one dim
      only, or where the axis is no grid of the torus.
    """
    devices = list(mesh.devices.flat)
    if not all(d.platform == "tpu" and hasattr(d, "coords") for d in devices):
        return ()
    places = np.array(
        [(getattr(d, "slice_index", None) or 0, *d.coords, d.core_on_chip) for d in devices]
    )
    places = places.reshape(*mesh.devices.shape, -1)
    along = np.moveaxis(places, mesh.axis_names.index(axis), 0)
    along = along.reshape(along.shape[0], -1, along.shape[-1])
    dims = along.shape[2] - 2
    lengths = [len(np.unique(along[:, 0, 1 + d])) for d in range(dims)]
    inner = sorted(range(dims), key=lambda d: -lengths[d]) if order is None else order
    return find_lines(along, [dims + 1, *(1 + d for d in inner), 0])
