"""Traces a train step on a mesh, from arguments or their shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from wusharding.analysis.norms import norms_once
from wusharding.analysis.placement import Tiles, spec_tiles
from wusharding.analysis.replication import Spread
from wusharding.jaxprs import Program, prune, trace_step
from wusharding.transforms.context import sharding_of, spec_of


@dataclasses.dataclass(frozen=True)
class Traced:
    """A step as it was traced.

    Args:
      program: its operations.
      inputs: how each input is split.
      args: the arguments as shapes on the mesh.
      out_shape: the shapes of what it returns.
      donated: the arguments that the step, if it is jitted, donates.
    """

    program: Program
    inputs: list[Spread]
    args: tuple[Any, ...]
    out_shape: Any
    donated: tuple[int, ...]


def traced(
    step: Callable[..., Any], mesh: Mesh | AbstractMesh, leaves: Sequence[Any], treedef: Any
) -> Traced:
    """Traces `step` for arguments of tree `treedef`, as it would be called under `mesh`."""
    structs = [_struct(x, mesh) for x in leaves]
    args = treedef.unflatten(structs)
    with _under(mesh):
        program, out_shape, donated = trace_step(step, *args)
    program = prune(norms_once(program))
    inputs = [Spread(t) for t in _input_tiles(program, structs)]
    return Traced(program, inputs, args, out_shape, _donated_arguments(args, donated))


def _struct(x: Any, mesh: Mesh | AbstractMesh) -> jax.ShapeDtypeStruct:
    own = sharding_of(x)
    spec = PartitionSpec() if own is None else own.spec
    # Arrays on a mesh of other axes, as Flax's `replicate` makes them, are moved to this one.
    if own is None or not set(own.mesh.axis_names) <= set(mesh.axis_names):
        spec = PartitionSpec()
    sharding = NamedSharding(mesh, spec)
    return jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=sharding, weak_type=getattr(x, "weak_type", False)
    )


def _under(mesh: Any) -> AbstractContextManager[Any]:
    if not jax.sharding.get_abstract_mesh().empty:
        return jax.sharding.use_abstract_mesh(jax.sharding.get_abstract_mesh())
    return jax.sharding.use_abstract_mesh(getattr(mesh, "abstract_mesh", mesh))


def _input_tiles(program: Program, structs: Sequence[jax.ShapeDtypeStruct]) -> list[Tiles]:
    """How each input is split: as `shard_map` takes it, else as it comes."""
    entered = {}
    for op in program.ops:
        if op.name == "enter_manual":
            entered.setdefault(op.ins[0], op.params["spec"])
    return [
        spec_tiles(entered.get(v) or spec_of(x) or PartitionSpec(), len(x.shape))
        for v, x in zip(program.inputs, structs, strict=True)
    ]


def _donated_arguments(args: Sequence[Any], donated: Sequence[bool]) -> tuple[int, ...]:
    """The positions of arguments all of whose arrays are donated."""
    rest = iter(donated)
    flags = [[next(rest) for _ in jax.tree.leaves(a)] for a in args]
    return tuple(k for k, found in enumerate(flags) if found and all(found))
