"""Which devices take part in a collective together, from the attribute's text."""

from __future__ import annotations

import functools
import math
import re

import numpy as np

Groups = tuple[tuple[int, ...], ...]


@functools.cache
def groups_of(text: str, devices: int) -> Groups:
    """The groups that `replica_groups` or `source_target_pairs` mean; () where it is not known.

    Args:
      text: listed groups, a reshaped and transposed range, or axes of a mesh; nothing means all.
        Slices, and the devices of each that send, where the transfer is between slices.
      devices: devices of the program, which is one slice; 0 where that is not known. Those of
        further slices are numbered on.

    >>> groups_of("{{0,2},{1,3}}", 4) == groups_of("[2,2]<=[2,2]T(1,0)", 4)
    True
    >>> groups_of("mesh['a'=2,'b'=2] {'a'}", 4)
    ((0, 2), (1, 3))
    >>> groups_of("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a':(2)2,'b'}", 8)
    ((0, 4, 1, 5), (2, 6, 3, 7))
    >>> groups_of("{1,2}x{0:1}", 2)
    ((0, 2), (1, 3))
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
    if between := _SLICES.fullmatch(text):
        slices = [n - 1 for n in _numbers(between["slices"])]
        here = range(int(between["first"]), int(between["last"]) + 1)
        return tuple(tuple(s * devices + i for s in slices) for i in here)
    return ()


_SLICES = re.compile(r"\{(?P<slices>[\d,]+)\}x\{(?P<first>\d+):(?P<last>\d+)\}")
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
