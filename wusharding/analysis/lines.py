"""Lines of a torus: the devices that one collective runs over, one dim of the torus at a time.

A mesh axis may lie over several dims of a torus. Scattering along one dim after the other then
needs no second mesh: each step runs within groups of devices that differ in one coordinate only.
Lines are plain data, positions along the mesh axis, so that any devices can stand for a torus.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

Groups = tuple[tuple[int, ...], ...]
Lines = tuple[Groups, ...]


class Phase(NamedTuple):
    """One step of a reduction: over `axis`, within each of `groups` (None: all of the axis)."""

    axis: str
    size: int
    groups: Groups | None


def lines_of_grid(shape: Sequence[int]) -> Lines:
    """The lines of an axis whose positions count through a grid, the last dim fastest.

    >>> lines_of_grid((2, 3))
    (((0, 3), (1, 4), (2, 5)), ((0, 1, 2), (3, 4, 5)))
    """
    places = np.indices(tuple(shape)).reshape(len(shape), -1).T
    return find_lines(places[:, None, :], range(len(shape)))


def find_lines(places: np.ndarray, order: Sequence[int]) -> Lines:
    """The lines of one mesh axis.

    Args:
      places: `i[axis, others, dims]`, the coordinates of each device: its position along the axis
        first, those along all other axes as one.
      order: the dims, in the order in which they are to be scattered over.

    Returns:
      Groups of positions, one set of them a dim that the axis moves along; empty where it moves
      along fewer than two, or where it is no grid, so that all of it is one group.
    """
    size, _, _ = places.shape
    here = places[:, 0]
    dims = [d for d in order if np.ptp(here[:, d])]
    values = [np.unique(here[:, d]) for d in dims]
    if len(dims) < 2 or math.prod(map(len, values)) != size:
        return ()
    lines = []
    for d in dims:
        others = [e for e in dims if e != d]
        groups: dict[tuple[int, ...], list[int]] = {}
        for i in np.argsort(here[:, d], kind="stable"):
            groups.setdefault(tuple(here[i, others]), []).append(int(i))
        lines.append(tuple(sorted(map(tuple, groups.values()))))
        rest = [e for e in range(places.shape[2]) if e != d]
        for group in lines[-1]:
            # Devices that lie elsewhere along the other axes have to see the same line.
            if np.ptp(places[list(group)][:, :, rest], axis=0).any():
                return ()
    found = tuple(lines)
    return found if _is_grid(found, size) else ()


def check_lines(axis: str, size: int, lines: Lines) -> None:
    """Lines that the caller gives are those of a grid of all positions.

    Raises:
      ValueError: they are not.
    """
    try:
        flat = [int(i) for groups in lines for group in groups for i in group]
    except (TypeError, ValueError):
        flat = []
    if not flat or min(flat) < 0 or max(flat) >= size or not _is_grid(lines, size):
        raise ValueError(
            f"lines[{axis!r}]: need, for each dim of a grid of the {size} positions along "
            f"{axis!r}, the groups of positions that differ in that dim only; as "
            "wusharding.lines_of_grid((2, 4)) makes them."
        )


def _is_grid(lines: Lines, size: int) -> bool:
    """Whether positions in the groups number a grid, and each group holds all but one of them."""
    shape = tuple(len(groups[0]) for groups in lines)
    for n, groups in zip(shape, lines, strict=True):
        if {len(group) for group in groups} != {n} or len(groups) * n != size:
            return False
    if math.prod(shape) != size:
        return False
    places = np.full((size, len(lines)), -1)
    for k, groups in enumerate(lines):
        for group in groups:
            places[list(group), k] = range(len(group))
    if (places < 0).any() or len(np.unique(np.ravel_multi_index(tuple(places.T), shape))) != size:
        return False
    others = [[j for j in range(len(lines)) if j != k] for k in range(len(lines))]
    return not any(
        np.ptp(places[list(group)][:, rest], axis=0).any()
        for rest, groups in zip(others, lines, strict=True)
        for group in groups
    )


def shard_numbers(lines: Lines) -> tuple[int, ...]:
    """For each position along the axis, the number of the shard that scattering leaves there.

    >>> shard_numbers(lines_of_grid((2, 3)))
    (0, 1, 2, 3, 4, 5)
    >>> shard_numbers(lines_of_grid((2, 3))[::-1])
    (0, 2, 4, 1, 3, 5)
    """
    numbers = [0] * sum(map(len, lines[0]))
    for groups in lines:
        for group in groups:
            for k, position in enumerate(group):
                numbers[position] = numbers[position] * len(group) + k
    return tuple(numbers)
