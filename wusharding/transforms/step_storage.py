"""Arguments of a train step whole, as their owner has them, and as it stores them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from wusharding.analysis.layout import Leaf
from wusharding.analysis.placement import Replicas, spec_tiles
from wusharding.errors import ContextError
from wusharding.formats.buckets import BucketSizes
from wusharding.transforms import checks
from wusharding.transforms.collectives import Collectives
from wusharding.transforms.context import Context, is_tracer, sharding_of, spec_of
from wusharding.transforms.mapped import mapped
from wusharding.transforms.storage import Storage

# ------------------------------------------------------------------------------------ telling which


def shapes(leaf: Leaf, replicas: Replicas) -> tuple[tuple[int, ...], ...]:
    """The shapes in which an array may come: its owner's, and as it is stored."""
    return leaf.logical_shape(replicas), leaf.stored_shape(replicas)


def unstored(replicas: Replicas, leaves: Sequence[Leaf], arrays: Sequence[Any]) -> list[int]:
    """The arrays, by position, that come whole and are stored in another shape or order."""
    return [
        i
        for i, (leaf, x) in enumerate(zip(leaves, arrays, strict=True))
        if tuple(x.shape) != leaf.stored_shape(replicas)
        or (_may_be_reordered(leaf, replicas) and not _is_reordered(leaf, replicas, x))
    ]


def is_stored_otherwise(leaf: Leaf, replicas: Replicas, x: Any) -> bool:
    """Whether an array comes as it is stored, and that is not as its owner knows it."""
    return tuple(x.shape) != leaf.logical_shape(replicas) or _is_reordered(leaf, replicas, x)


def is_stored(leaf: Leaf, replicas: Replicas, x: Any) -> bool:
    """Whether an array comes as it is stored, where that is split."""
    stored, logical = leaf.stored_shape(replicas), leaf.logical_shape(replicas)
    if leaf.placement.span is None or x.dtype != leaf.dtype or tuple(x.shape) != stored:
        return False
    return stored != logical or _lies_as_stored(leaf, replicas, x)


def is_split(leaf: Leaf, replicas: Replicas, x: Any) -> bool:
    """Whether an array comes as it is stored, if only in that it is split."""
    return is_stored_otherwise(leaf, replicas, x) or is_stored(leaf, replicas, x)


def _may_be_reordered(leaf: Leaf, replicas: Replicas) -> bool:
    """Whether shards lie in an order of their own, though the shape may be the same.

    So they do along torus lines, and where another axis tiles a dim that is split.
    """
    span = leaf.placement.span
    if span is None:
        return False
    return bool(replicas.shard_numbers) or any(leaf.placement.tiles[span.lo : span.hi])


def _is_reordered(leaf: Leaf, replicas: Replicas, x: Any) -> bool:
    """Whether an array in that case comes as it is stored: split so already."""
    if not _may_be_reordered(leaf, replicas):
        return False
    if is_tracer(x) and not _tells(x, leaf.placement.tile_axes + replicas.shard_axes):
        raise ContextError(
            f"args{leaf.path}: in a call that is being traced it cannot be seen whether this is "
            "state in the step's own logical order or as the step returned it, in pieces: both "
            f"have shape {tuple(x.shape)}. Call the step outside of jit, or make the mesh with "
            "axis_types=(jax.sharding.AxisType.Explicit, ...)."
        )
    return _lies_as_stored(leaf, replicas, x)


def _lies_as_stored(leaf: Leaf, replicas: Replicas, x: Any) -> bool:
    spec, ndim = spec_of(x), len(x.shape)  # typed ones name every dim
    return spec is not None and spec_tiles(spec, ndim) == spec_tiles(leaf.spec(replicas), ndim)


def _tells(x: Any, axes: Iterable[str]) -> bool:
    """Whether the type of a traced value says how it lies along these axes."""
    sharding = sharding_of(x)
    if sharding is None:
        return False
    kinds = dict(zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True))
    return all(kinds.get(a) == AxisType.Explicit for a in axes)


# --------------------------------------------------------------------------------------- converting


def stored(
    context: Context, leaves: Sequence[Leaf], arrays: Sequence[Any], whole: Sequence[int]
) -> list[Any]:
    """The arrays as they are stored, of which those at `whole` are not yet."""
    out = list(arrays)
    done = convert(context, [leaves[i] for i in whole], [arrays[i] for i in whole])
    for i, x in zip(whole, done, strict=True):
        out[i] = x
    return out


def convert(
    context: Context, leaves: Sequence[Leaf], arrays: Sequence[Any], *, back: bool = False
) -> list[Any]:
    """Whole arrays as they are stored, or `back`; one by one, so that few are there twice."""
    done = []
    for leaf, x in zip(leaves, arrays, strict=True):
        conversion, spec = converter(context, leaf.unnamed(), back)
        if not is_tracer(x):
            mesh = checks.concrete_mesh(context.mesh)
            ((x,),) = checks.place([[x]], [[spec]], [("args", (leaf,))], mesh)
        done.append(conversion([x])[0][0])
    return done


@functools.lru_cache(maxsize=1024)
def converter(context: Context, leaf: Leaf, back: bool) -> tuple[Any, PartitionSpec]:
    """Converts arrays of one form, and the spec in which it takes them."""
    replicas = context.replicas

    def body(xs: Sequence[Any]) -> tuple[list[Any]]:
        storage = Storage(Collectives.here(replicas, BucketSizes(0, 0)))
        return (storage.unshard([leaf], xs) if back else storage.shard([leaf], xs),)

    kept, logical = leaf.spec(replicas), leaf.logical_spec()
    into, out = (kept, logical) if back else (logical, kept)
    return jax.jit(mapped(context, body, [[into]], [[out]])), into


def as_whole(context: Context, leaf: Leaf, x: Any) -> Any:
    """The array, or, where it comes as stored, the shape that it has whole."""
    if not is_stored(leaf, context.replicas, x):
        return x
    assert context.mesh is not None, "a step is built for a mesh"
    sharding = NamedSharding(context.mesh, leaf.logical_spec())
    shape = leaf.logical_shape(context.replicas)
    return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)


def check_alive(leaves: Sequence[Leaf], arrays: Sequence[Any]) -> None:
    """No array was donated before: XLA's CPU client may end the process where one was."""
    for leaf, x in zip(leaves, arrays, strict=True):
        if isinstance(x, jax.Array) and not is_tracer(x) and x.is_deleted():
            raise ValueError(
                f"args{leaf.path}: it was donated to an earlier call, and is gone. Go on with what "
                "that call returned, or donate less (donate_argnums)."
            )


def placed(context: Context, leaves: Sequence[Leaf], arrays: Sequence[Any]) -> list[Any]:
    """Arrays in their stored shapes, where they are stored; only those that are not there move."""
    out = list(arrays)
    for i, x in enumerate(out):
        if getattr(x, "weak_type", False):  # what a step returns is not: one form, one program
            out[i] = jax.lax.convert_element_type(x, x.dtype)
    mesh = checks.concrete_mesh(context.mesh)
    wanted = [NamedSharding(mesh, leaf.spec(context.replicas)) for leaf in leaves]
    move = [i for i, x in enumerate(out) if getattr(x, "sharding", None) != wanted[i]]
    if move:
        (moved,) = checks.place(
            [[out[i] for i in move]],
            [[wanted[i].spec for i in move]],
            [("args", tuple(leaves[i] for i in move))],
            mesh,
        )
        for i, x in zip(move, moved, strict=True):
            out[i] = x
    return out
