"""Checks of what users hand over; messages say where, what was found, and what to do."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from wusharding.analysis.choose import FORMAT_CHOICES as FORMAT_CHOICES
from wusharding.analysis.choose import TARGETS as TARGETS
from wusharding.analysis.layout import Layout, Leaf
from wusharding.analysis.placement import Placement, Tiles
from wusharding.analysis.sum_dtypes import SumDtypes
from wusharding.errors import (
    ContextError,
    ReducedGradientsWarning,
    ReplicatedUpdateWarning,
    ReplicationError,
    StateMismatchError,
)
from wusharding.jaxprs import Aval, array_aval, varying_axes
from wusharding.transforms.boxes import stored_trees
from wusharding.transforms.context import Context, check_axes, is_tracer, spec_of, unreduced_axes
from wusharding.transforms.programs import Options
from wusharding.transforms.runner import Arrival
from wusharding.transforms.trees import flatten_with_paths

T = TypeVar("T")

# ------------------------------------------------------------------------- arguments of the wrapper


def as_transformation(optimizer: Any) -> optax.GradientTransformation:
    """The optimizer as a pair of `init` and `update`."""
    if isinstance(optimizer, optax.MultiSteps):
        return optimizer.gradient_transformation()
    if not isinstance(optimizer, optax.GradientTransformation):
        raise TypeError(
            f"optimizer: found {type(optimizer).__name__}, need an optax.GradientTransformation."
        )
    return optimizer


def axis_tuple(name: str, axis: Any) -> tuple[str, ...]:
    """One mesh axis or several, as a tuple."""
    several = isinstance(axis, Iterable) and not isinstance(axis, str)
    axes: tuple[Any, ...] = tuple(axis) if several else (axis,)
    if not axes or not all(isinstance(a, str) for a in axes) or len(set(axes)) != len(axes):
        raise ValueError(f"{name}={axis!r}: need a mesh axis name, or several different ones.")
    return axes


def divide_axes(
    shard_axes: tuple[str, ...], reduce_axes: tuple[str, ...], *, per_example: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """`shard_axis` as axes among `axis`, and others: for weights that are the same along those."""
    own = tuple(a for a in shard_axes if a in reduce_axes)
    others = tuple(a for a in shard_axes if a not in reduce_axes)
    if not own:
        check_subset(shard_axes, reduce_axes)
    if others and per_example:
        raise ValueError(
            f"shard_axis={shard_axes}: with per_example=True it must be among axis={reduce_axes}."
        )
    return own, others


def check_subset(shard_axes: tuple[str, ...], reduce_axes: tuple[str, ...]) -> tuple[str, ...]:
    """`shard_axis` names a part of `axis`."""
    if not set(shard_axes) <= set(reduce_axes):
        raise ValueError(
            f"shard_axis={shard_axes}: must be among axis={reduce_axes}, over which gradients are "
            f"reduced."
        )
    return shard_axes


def check_choice(name: str, value: T, allowed: Sequence[Any]) -> T:
    """`value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: must be one of {tuple(allowed)}.")
    return value


def check_count(name: str, value: Any, least: int) -> int:
    """`value` is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ValueError(f"{name}={value!r}: need an integer of at least {least}.")
    return int(value)


def check_argnums(name: str, value: Any) -> tuple[int, ...] | None:
    """`value` is the position of an argument, or several, or None."""
    if value is None:
        return None
    several = isinstance(value, Iterable) and not isinstance(value, str)
    found: tuple[Any, ...] = tuple(value) if several else (value,)
    if not all(isinstance(i, int | np.integer) and not isinstance(i, bool) for i in found):
        raise ValueError(f"{name}={value!r}: need the position of an argument, or several.")
    return tuple(int(i) for i in found)


def check_positions(name: str, numbers: Sequence[int], count: int) -> tuple[int, ...]:
    """Each number is the position of one of `count` arguments, from the end if it is negative."""
    for i in numbers:
        if not -count <= i < count:
            raise ValueError(
                f"{name}={tuple(numbers)}: the step has {count} arguments, and no {i}."
            )
    return tuple(sorted({i % count for i in numbers}))


def check_float_dtype(name: str, dtype: Any) -> Any:
    """`dtype` is a floating dtype or None."""
    if dtype is None:
        return None
    try:
        found = jnp.dtype(dtype)
    except TypeError as e:
        raise ValueError(f"{name}={dtype!r}: need a floating dtype or None.") from e
    if not jnp.issubdtype(found, jnp.floating):
        raise ValueError(f"{name}={found}: need a floating dtype or None.")
    return found


def check_sum_dtypes(name: str, given: Any, axes: tuple[str, ...]) -> SumDtypes:
    """One dtype for all sums, or a mapping from some of the replica axes to dtypes."""
    if not isinstance(given, Mapping):
        return SumDtypes(check_float_dtype(name, given))
    unknown = [axis for axis in given if axis not in axes]
    if unknown:
        raise ValueError(
            f"{name}: found {unknown[0]!r}, need axes among axis={axes}, over which gradients are "
            "summed."
        )
    found = {a: check_float_dtype(f"{name}[{a!r}]", dtype) for a, dtype in given.items()}
    return SumDtypes(along=tuple((a, d) for a, d in found.items() if d is not None))


def check_something_summed(sums: SumDtypes, arrivals: Sequence[Arrival]) -> None:
    """Where gradients arrive reduced, `scatter_dtype` would change nothing."""
    if not sums.is_own and arrivals and all(arrival == "reduced" for arrival in arrivals):
        raise ContextError(
            "scatter_dtype: all gradients arrive reduced, so that none is summed here. Hand over "
            "local gradients (in shard_map or pmap, with reduce='mean' or 'sum'), unreduced ones "
            "(on an explicit mesh), or the whole step (shard_step); or leave scatter_dtype out."
        )


def check_mesh(mesh: Any, axes: tuple[str, ...]) -> None:
    """`mesh` is a mesh that has the axes."""
    if mesh is None:
        return
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(f"mesh: found {type(mesh).__name__}, need a jax.sharding.Mesh or None.")
    check_axes(mesh, axes)


def broadcast_specs(specs: Any, treedef: Any) -> list[PartitionSpec]:
    """One spec a weight, from a tree (or a prefix of one) of specs."""
    template = treedef.unflatten([0] * treedef.num_leaves)
    try:
        full = jax.tree.map(
            lambda s, sub: [s] * len(jax.tree.leaves(sub)),
            specs,
            template,
            is_leaf=lambda x: x is None or isinstance(x, PartitionSpec),
        )
    except (ValueError, TypeError) as e:
        raise ValueError(f"param_specs: its tree does not fit the parameters': {e}") from e
    flat = jax.tree.leaves(full, is_leaf=lambda x: isinstance(x, PartitionSpec) or x is None)
    return [PartitionSpec() if s is None else s for s in flat]


# -------------------------------------------------------------------------------------- parameters


def check_params(paths: Sequence[str], leaves: Sequence[Any]) -> None:
    """Every weight is a floating or complex array."""
    for path, x in zip(paths, leaves, strict=True):
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            raise TypeError(
                f"params{path}: found {type(x).__name__}, need an array. Keep settings and other "
                f"non-arrays out of the parameter tree."
            )
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            raise TypeError(
                f"params{path}: found dtype {x.dtype}, need a floating or complex one: gradients "
                "of "
                f"integer parameters do not exist. Take it out of the tree that is optimized."
            )


def check_spec(path: str, spec: PartitionSpec, ndim: int) -> None:
    """A spec has no more entries than the array has dims."""
    if len(tuple(spec)) > ndim:
        raise ValueError(f"params{path}: its spec {spec} has more entries than its {ndim} dims.")


def check_tiles(path: str, aval: Aval, tiles: Tiles, context: Context) -> None:
    """Model-parallel splits are even and do not use the replica axes."""
    replicas = context.replicas
    sizes = dict(replicas.axis_sizes)
    for d, axes in enumerate(tiles):
        shared = [a for a in axes if a in replicas.reduce_axes]
        if shared:
            raise ContextError(
                f"params{path}: dim {d} is already split over {shared}, which axis="
                f"{replicas.reduce_axes} names as replicas holding the same weights. Name only "
                "axes "
                f"over which the weights are replicated."
            )
        unknown = [a for a in axes if a not in sizes]
        if unknown:
            raise ContextError(f"params{path}: the mesh has no axis {unknown}.")
        n = replicas.size(tuple(a for a in axes if a not in context.local_axes))
        if aval.shape[d] % n:
            raise ContextError(
                f"params{path}: dim {d} of length {aval.shape[d]} is split over {axes} in {n} "
                "uneven "
                f"parts. Pad it, or replicate it."
            )


def check_splits_told(context: Context, treedef: Any, leaves: Sequence[Any]) -> None:
    """In `shard_map` the type of a weight tells over which axes it is split, but not which dim."""
    for i, x in enumerate(leaves):
        others = varying_axes(x) - set(context.replicas.reduce_axes)
        if others:
            path = flatten_with_paths(treedef.unflatten(leaves))[0][i]
            raise ContextError(
                f"params{path}: it varies over {sorted(others)}, and it cannot be seen which of "
                "its dims is split over them, as norms of whole tensors must know. Call init "
                "outside of shard_map, or pass shard_updates(..., param_specs=...); where each "
                "device along that axis trains weights of its own, they are PartitionSpec()."
            )


def check_spec_known(context: Context, axes: tuple[str, ...], leaves: Sequence[Any]) -> None:
    """In `jit` on an auto mesh nothing tells how weights are split over other axes."""
    other = [a for a, n in context.replicas.axis_sizes if a not in axes and n > 1]
    if other and any(is_tracer(x) for x in leaves):
        raise ContextError(
            f"the mesh has further axes {other}, and under jit on an auto mesh it cannot be seen "
            "how "
            "the parameters are split over them. Call init eagerly once on placed parameters, or "
            "pass shard_updates(..., param_specs=...): their specs, or a function that tells them "
            "from the parameters, such as get_partition_spec of flax.linen and of flax.nnx."
        )


def check_replicated(context: Context, layout: Layout, leaves: Sequence[Any]) -> None:
    """In checked manual mode weights must not vary over the replica axes."""
    if not context.checked:
        return
    for leaf, x in zip(layout.params, leaves, strict=True):
        shared = varying_axes(x) & set(layout.replicas.reduce_axes)
        if shared:
            raise ReplicationError(
                f"params{leaf.path}: it may differ between replicas (it varies over "
                f"{sorted(shared)}), so its update is not replicated. Pass it into shard_map "
                "with a "
                f"spec that does not name {sorted(shared)}."
            )


def warn_if_nothing_sharded(layout: Layout) -> None:
    """A wrapper that shards nothing says so."""
    if any(leaf.placement.span is not None for leaf in layout.params):
        return
    if layout.replicas.num_shards == 1:
        why = f"the axes {layout.replicas.shard_axes} have size 1"
    else:
        why = "; ".join(sorted({leaf.why for leaf in layout.params})) or "there are no parameters"
    warnings.warn(
        f"shard_updates: no parameter is sharded ({why}); every replica does the whole update.",
        ReplicatedUpdateWarning,
        stacklevel=3,
    )


def concrete_mesh(mesh: Any) -> Mesh:
    """The mesh with devices, needed outside of any trace."""
    if isinstance(mesh, Mesh):
        return mesh
    found = jax.sharding.get_mesh()
    if isinstance(found, Mesh) and not found.empty:
        return found
    raise ContextError(
        "no mesh with devices: pass shard_updates(..., mesh=mesh), or call inside "
        "`with jax.set_mesh(mesh)`."
    )


def check_arrays(name: str, leaves: Sequence[Leaf], arrays: Sequence[Any], instead: str) -> None:
    """No shape without data where data is needed; `instead` says what takes shapes."""
    for i, x in enumerate(arrays):
        if isinstance(x, jax.ShapeDtypeStruct):
            raise TypeError(
                f"{name}{leaves[i].path if leaves else ''}: found a ShapeDtypeStruct, "
                f"{x.dtype}{list(x.shape)} without data; need an array. For shapes of the results "
                f"{instead}."
            )


def place(
    groups: Sequence[Sequence[Any]],
    specs: Sequence[Sequence[PartitionSpec]],
    names: Sequence[tuple[str, Sequence[Leaf]]],
    mesh: Mesh,
) -> list[list[Any]]:
    """Eager arrays put on the mesh; those committed to other devices are refused.

    `names` gives each group a name, and the leaves whose paths its arrays have.
    """
    devices = set(mesh.devices.flat)
    for group, (name, leaves) in zip(groups, names, strict=True):
        check_arrays(
            name, leaves, group, "call it under jax.eval_shape, or ask abstract_state(...)"
        )
        for i, x in enumerate(group):
            sharding = getattr(x, "sharding", None)
            if sharding is None or not getattr(x, "committed", False):
                continue
            if set(sharding.device_set) != devices and len(sharding.device_set) > 1:
                raise ContextError(
                    f"{name}{leaves[i].path if leaves else ''}: found an array of shape "
                    f"{list(x.shape)} on another mesh, on devices "
                    f"{sorted(d.id for d in sharding.device_set)}; this optimizer's mesh has "
                    f"devices {sorted(d.id for d in devices)}. Move it first: jax.device_put(x, "
                    "NamedSharding(mesh, PartitionSpec()))."
                )
    wanted = [
        [
            getattr(x, "sharding", None) if unreduced_axes(x) else NamedSharding(mesh, s)
            for x, s in zip(group, group_specs, strict=True)
        ]
        for group, group_specs in zip(groups, specs, strict=True)
    ]
    return jax.device_put([list(g) for g in groups], wanted)


def resharded(x: Any, spec: PartitionSpec, context: Context) -> Any:
    """An explicit-mode operand in the sharding that `shard_map` expects."""
    have = spec_of(x)
    if have is None:
        return x
    want = _explicit_part(spec, context.mesh)
    if sums := unreduced_axes(x):  # they stay so: their pieces are moved, not added up
        want = PartitionSpec(*want, *[None] * (x.ndim - len(want)), unreduced=sums)
    if have == want:
        return x
    return jax.sharding.reshard(x, NamedSharding(context.mesh, want))  # type: ignore[arg-type]


def _explicit_part(spec: PartitionSpec, mesh: Any) -> PartitionSpec:
    """A spec without the axes that the compiler partitions: types do not name those."""
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    entries = []
    for entry in spec.partitions:
        axes = () if entry is None else (entry,) if isinstance(entry, str) else entry
        kept = tuple(a for a in axes if kinds[a] == AxisType.Explicit)
        entries.append(kept or None)
    return PartitionSpec(*entries)


# -------------------------------------------------------------------------------- state, gradients


def check_state(state: Any, context: Context) -> Layout:
    """The state is one of ours, for this mesh, and stored as its layout says."""
    layout = getattr(state, "layout", None)
    if not isinstance(layout, Layout):
        raise StateMismatchError(
            f"state: found {type(state).__name__}, need the ShardedState that init of "
            "shard_updates "
            f"returns. A plain optax state becomes one by tx.shard(state, params)."
        )
    have, need = layout.replicas, context.replicas
    if (have.shard_axes, have.reduce_axes) != (need.shard_axes, need.reduce_axes) or (
        dict(have.axis_sizes) != dict(need.axis_sizes) or have.shard_numbers != need.shard_numbers
    ):
        raise StateMismatchError(
            f"state: belongs to another plan: {have.num_shards} shards over {have.shard_axes} of "
            "mesh "
            f"{dict(have.axis_sizes)}; here it is {need.num_shards} over {need.shard_axes} of "
            f"{dict(need.axis_sizes)}. Convert it: other.unshard(state), then tx.shard(plain, "
            "params)."
        )
    trees = stored_trees(layout)
    leaves = _flatten_like(state.inner, trees.inner, "state")
    for leaf, x in zip(layout.state, leaves, strict=True):
        check_stored("state", leaf, x, layout, context)
    masters = _flatten_like(state.master, trees.master, "master")
    for leaf, x in zip(layout.master_leaves(), masters, strict=True):
        check_stored("master", leaf, x, layout, context)
    return layout


def _masters_def(layout: Layout) -> Any:
    """The tree of the master weights: None for weights that have none, `()` if none has."""
    if not any(m is not None for m in layout.masters):
        return jax.tree.structure(())
    marks = [None if m is None else 0 for m in layout.masters]
    return jax.tree.structure(layout.params_def.unflatten(marks))


def check_stored(name: str, leaf: Leaf, x: Any, layout: Layout, context: Context) -> None:
    """A state array has the shape and dtype in which it is stored."""
    replicas = layout.replicas
    need = leaf.stored_shape(replicas, context.local_axes)
    if tuple(x.shape) != need:
        where = "on each device" if context.manual else "as a global array"
        hint = (
            "Pass the state into shard_map with tx.state_specs(params); for pmap make it inside: "
            "jax.pmap(tx.init, axis_name=...)(params)."
        )
        if context.open_axes:
            axes = set(context.local_axes)
            hint = f"Pass the state into shard_map with tx.state_specs(params, axis_names={axes})."
        local = leaf.local_stored_shape(replicas)
        if not context.manual and tuple(x.shape[1:]) == local:
            hint = "It looks stacked by pmap: convert it inside pmap, where it was made."
        elif not context.manual and tuple(x.shape) == local:
            hint = (
                "It looks like one device's part, as unreplicate takes it: convert the state "
                "inside pmap, where it was made."
            )
        raise StateMismatchError(
            f"{name}{leaf.path}: found shape {list(x.shape)}, need {list(need)} {where} (logical "
            "shape "
            f"{list(leaf.shape)}). {hint}"
        )
    if x.dtype != leaf.dtype:
        raise StateMismatchError(f"{name}{leaf.path}: found dtype {x.dtype}, need {leaf.dtype}.")


def _tile_shape(leaf: Leaf, layout: Layout, context: Context) -> tuple[int, ...]:
    local = Placement(leaf.whole.along(context.local_axes))
    return local.tile_shape(leaf.shape, layout.replicas)


def check_grads(grads: Any, layout: Layout, context: Context, *, per_example: bool) -> list[Any]:
    """Gradients have the tree, shapes and kinds of the weights."""
    leaves = _flatten_like(grads, layout.grads_def, "gradients")
    for leaf, x in zip(layout.grads, leaves, strict=True):
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            raise TypeError(f"gradients{leaf.path}: found {type(x).__name__}, need an array.")
        if x.dtype == jax.dtypes.float0 or not jnp.issubdtype(x.dtype, jnp.inexact):
            raise TypeError(
                f"gradients{leaf.path}: found dtype {x.dtype}, need a floating or complex one."
            )
        need, found = _tile_shape(leaf, layout, context), tuple(x.shape)
        if per_example:
            if found[1:] != need or len(found) != len(need) + 1:
                raise StateMismatchError(
                    f"gradients{leaf.path}: found shape {list(found)}, need one gradient per "
                    "example, "
                    f"[examples, *{list(need)}], as per_example=True says."
                )
            continue
        if found != need:
            hint = ""
            if found[1:] == need and found and found[0] == layout.replicas.num_replicas:
                hint = (
                    " It has a leading dim of the number of replicas, as arrays for pmap have: "
                    "call "
                    "update inside pmap, or drop that dim."
                )
            raise StateMismatchError(
                f"gradients{leaf.path}: found shape {list(found)}, need {list(need)}.{hint}"
            )
        if jnp.iscomplexobj(x) != jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            raise TypeError(
                f"gradients{leaf.path}: found dtype {x.dtype} for a weight of {leaf.dtype}."
            )
    return leaves


def check_same_params(params: Any, layout: Layout, context: Context) -> list[Any]:
    """The weights are those that the state was made for."""
    leaves = _flatten_like(params, layout.params_def, "params")
    for leaf, x in zip(layout.params, leaves, strict=True):
        aval = array_aval(x)
        need = _tile_shape(leaf, layout, context)
        if aval.shape != need or aval.dtype != leaf.dtype:
            raise StateMismatchError(
                f"params{leaf.path}: found {aval.dtype}{list(aval.shape)}, the state was made for "
                f"{leaf.dtype}{list(need)}."
            )
    check_replicated(context, layout, leaves)
    return leaves


def check_grads_vary_as_params(layout: Layout, grads: Sequence[Any], params: Sequence[Any]) -> None:
    """In checked manual mode a gradient varies over no more axes than its weight and replicas."""
    for leaf, g, i in zip(layout.grads, grads, layout.grads_of, strict=True):
        more = varying_axes(g) - varying_axes(params[i]) - set(layout.replicas.reduce_axes)
        if more:
            raise ReplicationError(
                f"gradients{leaf.path}: vary over {sorted(more)}, over which the weight does not. "
                "Each device there holds a part of the gradient: add them up, as by jax.lax.psum."
            )


def _flatten_like(tree: Any, treedef: Any, name: str) -> list[Any]:
    leaves, found = jax.tree.flatten(tree)
    if found == treedef:
        return leaves
    paths, _, _ = flatten_with_paths(tree)
    needed = flatten_with_paths(treedef.unflatten([0] * treedef.num_leaves))[0]
    have, need = list(map(_unboxed, paths)), list(map(_unboxed, needed))
    if have == need:
        return leaves
    missing, extra = sorted(set(need) - set(have)), sorted(set(have) - set(need))
    detail = f"missing {missing}, unexpected {extra}" if missing or extra else f"found {found}"
    raise StateMismatchError(
        f"{name}: their tree is not that of the parameters the state was made for: {detail}."
    )


def _unboxed(path: str) -> str:
    """A path without boxes around arrays: Flax hands a tree with its variables and without."""
    return re.sub(r"\.value(?=$|[.\[])", "", path)


def trees_as_given(layout: Layout, state: Any, grads: Any, params: Any) -> Layout:
    """The layout in the trees of this call, which may box their arrays or not."""
    grads_def = jax.tree.structure(grads)
    params_def = layout.params_def if params is None else jax.tree.structure(params)
    if params is None and grads_def.num_leaves == params_def.num_leaves:
        params_def = grads_def
    state_def = plain_state_def(layout, state.inner)
    if (grads_def, params_def, state_def) == (
        layout.grads_def,
        layout.params_def,
        layout.state_def,
    ):
        return layout
    return dataclasses.replace(
        layout, grads_def=grads_def, params_def=params_def, state_def=state_def
    )


def plain_state_def(layout: Layout, inner: Any) -> Any:
    """The tree of the wrapped optimizer's own state, in boxes if the stored `inner` is."""
    given = jax.tree.structure(inner)
    return layout.state_def if given == stored_trees(layout).inner else given


def check_master_params(layout: Layout, params: Any) -> None:
    """With master weights updates are made relative to the weights."""
    if params is None and any(m is not None for m in layout.masters):
        raise ValueError(
            "params: with master_dtype, update needs the parameters: update(grads, state, params)."
        )


def arrivals(
    grads: Sequence[Any], layout: Layout, context: Context, reduce: str | None
) -> list[Arrival]:
    """How each gradient arrives: still local, unreduced, or reduced."""
    if not context.manual:
        return [
            _global_arrival(leaf, g, layout) for leaf, g in zip(layout.grads, grads, strict=True)
        ]
    if not context.checked:
        return ["local" if reduce is not None else "reduced"] * len(grads)
    axes = set(layout.replicas.reduce_axes)
    out: list[Arrival] = []
    for leaf, g in zip(layout.grads, grads, strict=True):
        varying = varying_axes(g) & axes
        if varying and varying != axes:
            raise ReplicationError(
                f"gradients{leaf.path}: vary over {sorted(varying)} but not over "
                f"{sorted(axes - varying)}: reduced over a part of "
                f"axis={layout.replicas.reduce_axes}. "
                f"Leave the whole reduction to shard_updates, or do all of it and pass reduce=None."
            )
        if varying and reduce is None:
            raise ReplicationError(
                f"gradients{leaf.path}: reduce=None says that they are already reduced, but they "
                "vary "
                f"over {sorted(varying)}. Pass reduce='mean' or 'sum'."
            )
        out.append("local" if varying else "reduced")
    if reduce is not None and "local" not in out and out:
        warnings.warn(
            f"shard_updates: no gradient varies over {layout.replicas.reduce_axes}: they arrive "
            "reduced, by an all-reduce where a reduce-scatter was possible. Differentiating with "
            "respect to weights that do not vary makes JAX sum (not average) their gradients: "
            "take gradients with respect to jax.lax.pcast(params, axis, to='varying'). If they "
            "are meant to be reduced, say reduce=None.",
            ReducedGradientsWarning,
            stacklevel=4,
        )
    return out


def _global_arrival(leaf: Leaf, grad: Any, layout: Layout) -> Arrival:
    axes = set(layout.replicas.reduce_axes)
    open_axes = unreduced_axes(grad) & axes
    if not open_axes:
        return "reduced"
    if open_axes != axes:
        raise ReplicationError(
            f"gradients{leaf.path}: unreduced over {sorted(open_axes)} but not over "
            f"{sorted(axes - open_axes)}. Leave all of axis={layout.replicas.reduce_axes} "
            "unreduced, "
            f"or none."
        )
    return "unreduced"


def grad_spec(logical: PartitionSpec, arrival: Arrival, options: Options) -> PartitionSpec:
    """How a gradient enters `shard_map`."""
    if options.per_example:
        return PartitionSpec(options.reduce_axes, *logical)
    if arrival == "unreduced":
        return PartitionSpec(*logical, unreduced=frozenset(options.reduce_axes))
    return logical


def check_extra(extra: Mapping[str, Any], context: Context) -> None:
    """Extra arguments are equal on all replicas, as far as types tell."""
    for name, value in extra.items():
        for x in jax.tree.leaves(value):
            if not hasattr(x, "shape"):
                continue
            if context.checked and varying_axes(x) & set(context.replicas.reduce_axes):
                raise ReplicationError(
                    f"{name}=: it differs between replicas (it varies over "
                    f"{sorted(varying_axes(x))}). Reduce it first, as by jax.lax.pmean."
                )
            if not context.manual and unreduced_axes(x):
                raise ReplicationError(f"{name}=: it is unreduced. Reduce it first.")


# ------------------------------------------------------------------------------------- conversions


def check_inner(inner: Any, layout: Layout, context: Context) -> list[Any]:
    """A plain state has the tree and logical shapes of the wrapped optimizer's."""
    if isinstance(getattr(inner, "layout", None), Layout):
        raise StateMismatchError(
            "shard: the state is sharded already; it takes the wrapped optimizer's own state, as "
            "unshard returns it."
        )
    leaves = _flatten_like(inner, layout.state_def, "state")
    for leaf, x in zip(layout.state, leaves, strict=True):
        aval = array_aval(x)
        need = _tile_shape(leaf, layout, context)
        if aval.shape != need:
            raise StateMismatchError(
                f"state{leaf.path}: found shape {list(aval.shape)}, need {list(need)}."
            )
        if aval.dtype != leaf.dtype:
            raise StateMismatchError(
                f"state{leaf.path}: found dtype {aval.dtype}, need {leaf.dtype}."
            )
    return leaves


def check_masters(master: Any, layout: Layout, params: Sequence[Any]) -> list[Any]:
    """Master weights for those weights that have them; made from the weights if not given."""
    if not any(m is not None for m in layout.masters):
        if master is not None and jax.tree.leaves(master):
            raise ValueError("master: given, but no weight has a master (see master_dtype).")
        return []
    if master is None:
        return [p for p, m in zip(params, layout.masters, strict=True) if m is not None]
    leaves = _flatten_like(master, _masters_def(layout), "master")
    kept = tuple(layout.master_leaves())
    for leaf, x in zip(kept, leaves, strict=True):
        if tuple(x.shape) != leaf.shape:
            raise StateMismatchError(
                f"master{leaf.path}: found shape {list(x.shape)}, need {list(leaf.shape)}."
            )
    return leaves
