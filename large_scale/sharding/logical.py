"""From logical names of dims to mesh axes, by a table of rules."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

PyTree = Any
Rules = Mapping[str, str | Sequence[str] | None]


def logical_to_specs(
    logical: PyTree,
    rules: Rules,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    shapes: PyTree = None,
) -> PyTree:
    """Mesh axes for arrays whose dims are named.

    Args:
      logical: for each array the names of its dims: a tuple of names, a `PartitionSpec` of names
        (as Flax's `nn.get_partition_spec` and `nnx.get_partition_spec` return them), or a box that
        has `names` (as `nn.with_logical_partitioning` makes). None, as a name, is a dim that is not
        split; None in the place of an array, one without names.
      rules: for each name the mesh axis, or axes, that split such dims; None for none.
      mesh: to check axes, and with `shapes` lengths, against.
      shapes: the arrays, or anything with their `shape`, in the same tree.

    Returns:
      The same tree of `PartitionSpec`s of mesh axes.

    Raises:
      ValueError: a name has no rule, an axis would split two dims of one array, the mesh lacks an
        axis, or a dim is not divisible.

    Source: GSPMD (arXiv 2105.04663), 3; the names are Flax's logical axes.

    >>> rules = {"batch": "data", "embed": None, "mlp": "model"}
    >>> logical_to_specs({"up": ("embed", "mlp"), "bias": ("mlp",)}, rules)
    {'bias': P('model',), 'up': P(None, 'model')}
    """
    if not isinstance(rules, Mapping):
        raise TypeError(
            f"rules: found {type(rules).__name__}, need a mapping from names to mesh axes; of "
            "pairs, where each name has one rule, dict(rules) is that."
        )
    table = {name: _axes(name, axes) for name, axes in rules.items()}
    sizes = dict(mesh.shape) if mesh is not None else None
    if sizes is not None:
        for name, axes in table.items():
            missing = [a for a in axes if a not in sizes]
            if missing:
                raise ValueError(
                    f"rules[{name!r}]: the mesh has no axis {missing}; its axes are {list(sizes)}."
                )
    named, treedef = jax.tree_util.tree_flatten_with_path(logical, is_leaf=_is_names)
    if shapes is None:
        lengths: list[tuple[int, ...] | None] = [None] * len(named)
    else:
        boxes = jax.tree.leaves(shapes, is_leaf=lambda x: hasattr(x, "names"))
        arrays = [getattr(x, "value", x) if hasattr(x, "names") else x for x in boxes]
        if len(arrays) != len(named):
            raise ValueError(
                f"shapes: has {len(arrays)} arrays, and logical names {len(named)}. Give both in "
                "one tree."
            )
        paths = jax.tree_util.tree_leaves_with_path(shapes, is_leaf=lambda x: hasattr(x, "names"))
        for (path, _), (wanted, _) in zip(paths, named, strict=True):
            alike = [*map(type, path)] == [*map(type, wanted)]
            if alike and path != wanted:
                raise ValueError(
                    f"shapes: has array{jax.tree_util.keystr(path)} where the logical names have "
                    f"array{jax.tree_util.keystr(wanted)}. Give both in one tree."
                )
        lengths = [tuple(x.shape) for x in arrays]
    specs = [
        _spec(jax.tree_util.keystr(path), _names(x), table, shape, sizes)
        for (path, x), shape in zip(named, lengths, strict=True)
    ]
    return treedef.unflatten(specs)


def _spec(
    path: str,
    names: tuple[Any, ...],
    table: Mapping[str, tuple[str, ...]],
    shape: tuple[int, ...] | None,
    sizes: Mapping[str, int] | None,
) -> PartitionSpec:
    where = f"array{path}"
    if shape is not None and len(names) != len(shape) and names:
        raise ValueError(
            f"{where}: has {len(shape)} dims, shape {list(shape)}, and {len(names)} names {names}."
        )
    used: dict[str, int] = {}
    entries: list[Any] = []
    for d, name in enumerate(names):
        if name is None:
            entries.append(None)
            continue
        if name not in table:
            raise ValueError(
                f"{where}: dim {d} is named {name!r}, for which there is no rule; rules are for "
                f"{sorted(table)}. Add rules[{name!r}] = None if it is not to be split."
            )
        for axis in table[name]:
            if axis in used:
                e = used[axis]
                raise ValueError(
                    f"{where}: dims {e} ({names[e]!r}) and {d} ({name!r}) would both be split over "
                    f"{axis!r}. One array has room for an axis once: give one of the names another "
                    "rule."
                )
            used[axis] = d
        if shape is not None and sizes is not None:
            parts = math.prod(sizes[a] for a in table[name])
            if shape[d] % parts:
                raise ValueError(
                    f"{where}: dim {d} ({name!r}) of length {shape[d]} is not divisible by "
                    f"{parts}, the size of {table[name]}. Pad it to "
                    f"{-(-shape[d] // parts) * parts}, or give it another name or rule."
                )
        axes = table[name]
        entries.append(axes[0] if len(axes) == 1 else axes or None)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def _axes(name: str, axes: str | Sequence[str] | None) -> tuple[str, ...]:
    if axes is None:
        return ()
    found = (axes,) if isinstance(axes, str) else axes
    if not isinstance(found, tuple | list) or not all(isinstance(a, str) for a in found):
        raise TypeError(
            f"rules[{name!r}]: found {axes!r}, need a mesh axis, a tuple of them or None."
        )
    return tuple(found)


def _is_names(x: Any) -> bool:
    if isinstance(x, PartitionSpec) or x is None or hasattr(x, "names"):
        return True
    return isinstance(x, tuple) and all(n is None or isinstance(n, str) for n in x)


def _names(x: Any) -> tuple[Any, ...]:
    if x is None:
        return ()
    return tuple(x.names if hasattr(x, "names") else x)
