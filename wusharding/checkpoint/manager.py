"""`save` and `restore` through a `CheckpointManager` of Orbax, which stays the user's own."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from wusharding.checkpoint.fit import Fit, check_plain_state
from wusharding.checkpoint.logical import (
    Optimizer,
    abstract_state,
    as_data,
    logical_state,
    sharded_state,
)
from wusharding.checkpoint.manifest import Manifest
from wusharding.errors import (
    CheckpointError,
    CorruptCheckpointError,
    CorruptCheckpointWarning,
)
from wusharding.transforms.optimizer import ShardedOptimizer
from wusharding.transforms.trees import flatten_with_paths

PyTree = Any
MANIFEST = "wusharding"
_RESERVED = ("params", "opt_state", "master", MANIFEST)


class Restored(NamedTuple):
    """What a checkpoint held.

    Attributes:
      step: the step it was saved at.
      params: the weights, in the dtypes and shardings asked for.
      state: the state of the optimizer.
      items: what else was asked for, by name.
      plan: the plan in force when it was saved, as data; None for plain optax.
    """

    step: int
    params: PyTree
    state: PyTree
    items: Mapping[str, Any]
    plan: Any


def save(
    manager: ocp.CheckpointManager,
    step: int,
    tx: Optimizer,
    params: PyTree,
    state: PyTree,
    *,
    force: bool = False,
    **items: Any,
) -> bool:
    """Saves weights and state in logical, unpadded shapes; whatever the plan, they are the same.

    Orbax does the rest as the manager was told to: in the background, at which steps, how many are
    kept. A checkpoint is there whole or not at all. It has the items `params`, `opt_state` (the
    wrapped optimizer's own state), `master` if there are master weights, and `wusharding` (the plan
    and a checksum of each array).

    Beside params and state, a device holds what `logical_state` says while the arrays are copied to
    the host, and a host holds what its devices give it until it is written.

    Args:
      manager: of Orbax.
      step: its number.
      tx: from `shard_updates`, or a plain optax optimizer.
      params: the weights, as global arrays.
      state: the state of `tx`; of a step of `shard_step`, `step.unshard(state)` with plain optax.
      force: save even where the manager's policy would not.
      **items: what else to save with them, as arguments of Orbax: `data=ocp.args.JsonSave(...)`.

    Returns:
      Whether the manager saves at this step.

    Raises:
      StateMismatchError: `state` is not one of `tx` for `params`.
    """
    _check_names(items)
    if not force and not manager.should_save(step):
        return False
    logical = logical_state(tx, state)
    if not isinstance(tx, ShardedOptimizer):
        check_plain_state(logical.opt_state, abstract_state(tx, params).opt_state)
    trees = _with_arrays({"params": as_data(params), **logical._asdict()})
    plan = json.loads(tx.plan(params).to_json()) if isinstance(tx, ShardedOptimizer) else None
    args: dict[str, Any] = {name: ocp.args.PyTreeSave(tree) for name, tree in trees.items()}
    args[MANIFEST] = ocp.args.JsonSave(Manifest.of(trees, plan).to_data())
    return manager.save(step, args=ocp.args.Composite(**args, **items), force=force)


def restore(
    manager: ocp.CheckpointManager,
    tx: Optimizer,
    params: PyTree,
    *,
    step: int | None = None,
    **items: Any,
) -> Restored:
    """Restores what `save` saved for `tx`, which may have any other mesh and plan, or none.

    Every element is equal to the one saved. Master weights come from the weights, and weights from
    the master weights, where only the other was saved; a dtype may become wider. What would lose
    bits is refused.

    Args:
      manager: of Orbax.
      tx: from `shard_updates`, or a plain optax optimizer.
      params: the weights, or `jax.ShapeDtypeStruct`s of them, which say dtypes and shardings; where
        they have no sharding, the weights are replicated over the mesh.
      step: None for the newest step that is intact; those that are not are warned about.
      **items: what else to restore, as arguments of Orbax: `data=ocp.args.JsonRestore()`.

    Raises:
      CheckpointError: there is none, or `save` did not write it.
      CorruptCheckpointError: what was read is not what was saved; names the array.
      StateMismatchError: it is of another model or optimizer; names the array.
    """
    _check_names(items)
    manager.wait_until_finished()
    found = sorted(manager.all_steps(), reverse=True)
    steps = found if step is None else [step]
    if step not in (None, *found) or not steps:
        wanted = "a checkpoint" if step is None else f"step {step}"
        raise CheckpointError(f"{manager.directory}: need {wanted}, found steps {found[::-1]}.")
    errors = []
    for number in steps:
        try:
            return _restore(manager, number, tx, params, items)
        except CorruptCheckpointError as e:
            if step is not None:
                raise
            errors.append(str(e))
            warnings.warn(f"restore: {e} Trying the step before.", CorruptCheckpointWarning, 2)
    raise CorruptCheckpointError(" ".join(["no step is intact:", *errors]))


def _check_names(items: Mapping[str, Any]) -> None:
    for name in items:
        if name in _RESERVED:
            raise ValueError(f"{name}=: the name is taken, as are {_RESERVED}. Choose another.")


def _with_arrays(trees: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """Orbax refuses trees without arrays; their structure says all there is to say."""
    return {name: tree for name, tree in trees.items() if jax.tree.leaves(tree)}


# --------------------------------------------------------------------------------------- restoring


def _restore(
    manager: ocp.CheckpointManager,
    step: int,
    tx: Optimizer,
    params: PyTree,
    items: Mapping[str, Any],
) -> Restored:
    where = f"{manager.directory}, step {step}"
    manifest = _manifest(manager, step, where)
    fit = Fit(manifest, _structs(tx, params), abstract_state(tx, params))
    fit.check(where)
    structs = fit.structs()
    args = {name: _reading(tree) for name, tree in structs.items()}
    try:
        read = manager.restore(step, args=ocp.args.Composite(**args, **items))
    except Exception as e:
        bad = _unreadable(manager, step, structs) or "an item"
        raise CorruptCheckpointError(f"{where}: {bad}: cannot be read: {_brief(e)}") from e
    trees = {name: read[name] for name in structs}
    manifest.check(trees, where)
    weights, logical = fit.finish(trees)
    state = sharded_state(tx, logical, weights)
    return Restored(step, weights, state, {name: read[name] for name in items}, manifest.plan)


def _manifest(manager: ocp.CheckpointManager, step: int, where: str) -> Manifest:
    try:
        args = ocp.args.Composite(**{MANIFEST: ocp.args.JsonRestore()})
        data = manager.restore(step, args=args)[MANIFEST]
    except KeyError as e:
        raise CheckpointError(
            f"{where}: no item {MANIFEST!r}: wusharding.checkpoint.save did not write it. Restore "
            "it with Orbax into abstract_state(tx, params).opt_state, and convert it by "
            "sharded_state."
        ) from e
    except (OSError, ValueError) as e:
        raise CorruptCheckpointError(f"{where}: the manifest cannot be read: {_brief(e)}") from e
    return Manifest.from_data(data, where)


def _structs(tx: Optimizer, params: PyTree) -> PyTree:
    """The weights that are wanted, with shardings."""
    mesh = tx._core.mesh_of_devices() if isinstance(tx, ShardedOptimizer) else None

    def struct(x: Any) -> jax.ShapeDtypeStruct:
        where = getattr(x, "sharding", None)
        if mesh is not None and not isinstance(where, NamedSharding):
            where = NamedSharding(mesh, PartitionSpec())
        if where is None:
            where = SingleDeviceSharding(jax.local_devices()[0])
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    return jax.tree.map(struct, params)


def _reading(structs: PyTree) -> Any:
    """Orbax's arguments to read arrays as `structs` say."""
    restore_args = ocp.checkpoint_utils.construct_restore_args(structs)
    return ocp.args.PyTreeRestore(structs, restore_args=restore_args)


def _brief(error: Exception) -> str:
    """What went wrong, without the specification of the array that TensorStore appends."""
    return str(error).partition("[tensorstore_spec")[0].partition(" See full TensorStore")[0][:400]


def _unreadable(manager: ocp.CheckpointManager, step: int, structs: Mapping[str, PyTree]) -> str:
    """The arrays that cannot be read: each is tried alone."""
    bad = []
    for item, tree in structs.items():
        paths, leaves, treedef = flatten_with_paths(tree)
        for i, path in enumerate(paths):
            alone = [x if i == j else ocp.PLACEHOLDER for j, x in enumerate(leaves)]
            args = _reading(treedef.unflatten(alone))
            try:
                manager.restore(step, args=ocp.args.Composite(**{item: args}))
            except Exception:
                bad.append(f"{item}{path}")
    return ", ".join(bad)
