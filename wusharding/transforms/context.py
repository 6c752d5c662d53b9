"""Where a call comes from: inside `shard_map` or `pmap`, or a global view under `jit` or eager.

Also reads what JAX's types tell of a value: its sharding, and which axes its sum still lacks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from wusharding.analysis.choose import Target
from wusharding.analysis.lines import Lines
from wusharding.analysis.placement import Replicas
from wusharding.errors import ContextError
from wusharding.jaxprs import bound_axis_size, checks_varying
from wusharding.transforms.torus import lines_of


@dataclasses.dataclass(frozen=True)
class Context:
    """One call's surroundings.

    Args:
      manual: the replica axes are bound (`shard_map`, `pmap`): arrays are local along them.
      checked: JAX checks which values vary (`check_vma=True`); only when manual.
      replicas: mesh axes and their sizes.
      mesh: the mesh to open a `shard_map` over; None when no axis is left for one.
      open_axes: the axes that the surrounding `shard_map` leaves to the compiler, or to types.
    """

    manual: bool
    checked: bool
    replicas: Replicas
    mesh: Mesh | AbstractMesh | None
    open_axes: tuple[str, ...] = ()

    @property
    def local_axes(self) -> frozenset[str]:
        """The axes along which arrays come as one device's piece."""
        if not self.manual:
            return frozenset()
        return frozenset(a for a, _ in self.replicas.axis_sizes) - set(self.open_axes)

    @property
    def explicit(self) -> bool:
        """The axes to open a `shard_map` over are explicit: types carry shardings."""
        if self.mesh is None:
            return False
        types = dict(zip(self.mesh.axis_names, self.mesh.axis_types, strict=True))
        asked = self.open_axes if self.manual else self.replicas.reduce_axes
        return types[asked[0]] == AxisType.Explicit


def find_context(
    mesh: Mesh | None,
    reduce_axes: tuple[str, ...],
    shard_axes: tuple[str, ...],
    lines: Mapping[str, Lines] | None,
) -> Context:
    """The context of this call.

    Args:
      mesh: the mesh that the caller named.
      reduce_axes: the replica axes.
      shard_axes: those to shard over.
      lines: torus lines of the shard axes; None finds them in the coordinates of `mesh`'s devices.

    Raises:
      ContextError: no mesh is known, or it lacks an axis.
      ValueError: lines that are not those of a grid.
    """
    bound = {a: bound_axis_size(a) for a in reduce_axes}
    if all(bound.values()):
        sizes = _manual_sizes(bound)
        found_lines = lines_of(lines, mesh, shard_axes, dict(sizes))
        replicas = Replicas(sizes, reduce_axes, shard_axes, found_lines)
        around = jax.sharding.get_abstract_mesh()
        left = _axes_left_open(around)
        return Context(
            True, checks_varying(shard_axes[0]), replicas, around if left else None, left
        )
    if any(bound.values()):
        free = [a for a, n in bound.items() if not n]
        raise ContextError(
            f"axis={reduce_axes}: called where {free} are not bound but the others are. Make the "
            f"shard_map manual over all of them."
        )
    found = current_mesh(mesh)
    if found is None:
        raise ContextError(
            f"no mesh: found neither mesh= nor an ambient mesh, nor is axis {reduce_axes} bound "
            "here. "
            f"Pass shard_updates(..., mesh=mesh), or call inside `with jax.set_mesh(mesh)`, "
            f"`shard_map` or `pmap`."
        )
    check_axes(found, reduce_axes)
    return global_context(found, reduce_axes, shard_axes, lines, placed=mesh)


def global_context(
    mesh: Mesh | AbstractMesh,
    reduce_axes: tuple[str, ...],
    shard_axes: tuple[str, ...],
    lines: Mapping[str, Lines] | None,
    *,
    placed: Mesh | AbstractMesh | None,
) -> Context:
    """The context of a global view of `mesh`; `placed` is the mesh whose devices tell the lines."""
    sizes = tuple((str(n), s) for n, s in mesh.shape.items())
    found = lines_of(lines, placed, shard_axes, dict(sizes))
    return Context(False, False, Replicas(sizes, reduce_axes, shard_axes, found), mesh)


def _manual_sizes(bound: dict[str, int | None]) -> tuple[tuple[str, int], ...]:
    ambient = jax.sharding.get_abstract_mesh()
    sizes = {str(n): s for n, s in ambient.shape.items()} if not ambient.empty else {}
    return tuple({**{a: n or 0 for a, n in bound.items()}, **sizes}.items())


def _axes_left_open(mesh: AbstractMesh) -> tuple[str, ...]:
    """Axes over which the surrounding `shard_map` is not manual."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(str(a) for a, kind in kinds if kind != AxisType.Manual)


def current_mesh(mesh: Mesh | None) -> Mesh | AbstractMesh | None:
    """The ambient mesh, else `mesh`.

    Raises:
      ContextError: both are there and differ.
    """
    ambient = jax.sharding.get_abstract_mesh()
    if ambient.empty:
        return mesh
    if mesh is not None and ambient != mesh.abstract_mesh:
        raise ContextError(
            f"mesh=: has axes {dict(mesh.shape)}, and the ambient mesh has {dict(ambient.shape)} "
            "or other kinds of axes. Call within `with jax.set_mesh(mesh)` of the same mesh, or "
            "outside of any; in pmap and shard_map, under the same names: pmap(..., axis_name=...)."
        )
    return ambient


def check_axes(mesh: Mesh | AbstractMesh, axes: tuple[str, ...]) -> None:
    """Every axis is an axis of the mesh."""
    missing = [a for a in axes if a not in mesh.axis_names]
    if missing:
        raise ContextError(
            f"axis={axes}: the mesh has no axis {missing}; its axes are {tuple(mesh.axis_names)}."
        )


def platform_of(mesh: Mesh | AbstractMesh | None) -> Target:
    """The platform that formats are chosen for: the mesh's devices, else the default backend."""
    platform = mesh.devices.flat[0].platform if isinstance(mesh, Mesh) else jax.default_backend()
    same: dict[str, Target] = {"cuda": "gpu", "rocm": "gpu", "gpu": "gpu", "tpu": "tpu"}
    return same.get(platform, "cpu")


# -------------------------------------------------------------------------------- types of a value


def sharding_of(x: Any) -> NamedSharding | None:
    """How an array, a shape or a traced value lies on a mesh, as far as it tells."""
    sharding = getattr(jax.typeof(x) if is_tracer(x) else x, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None


def spec_of(x: Any) -> PartitionSpec | None:
    """The spec of a value's sharding, where its type or its array tells; None where not."""
    sharding = sharding_of(x)
    if sharding is None or (is_tracer(x) and not _has_explicit(sharding.mesh)):
        return None
    return sharding.spec


def _has_explicit(mesh: Mesh | AbstractMesh) -> bool:
    return not mesh.empty and AxisType.Explicit in mesh.axis_types


def is_tracer(x: Any) -> bool:
    """Whether a value is being traced."""
    return isinstance(x, Tracer)


def unreduced_axes(x: Any) -> frozenset[str]:
    """Mesh axes over which an explicit value is a sum still to be made."""
    spec = spec_of(x)
    return frozenset(getattr(spec, "unreduced", ())) if spec is not None else frozenset()
