"""What to read of a checkpoint for the weights and the optimizer that are there now, and its loss.

Weights and master weights stand for each other where only one of them was saved, and a dtype may
become wider. What would lose bits is refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from wusharding.checkpoint.logical import LogicalState
from wusharding.checkpoint.manifest import Entry, Manifest
from wusharding.errors import StateMismatchError
from wusharding.transforms.trees import flatten_with_paths

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Fit:
    """A checkpoint's arrays beside those that are wanted.

    Args:
      saved: what the checkpoint has.
      weights: `jax.ShapeDtypeStruct`s, with shardings, of the weights that are wanted.
      state: the same of the state that is wanted, in logical shapes.
    """

    saved: Manifest
    weights: PyTree
    state: LogicalState

    def check(self, where: str) -> None:
        """It is of this model and optimizer, and no bit would be lost.

        Raises:
          StateMismatchError: it is not; names the arrays.
        """
        problems = [
            *_differences("params", self._saved("params"), self.weights),
            *_differences("opt_state", self._saved("opt_state"), self.state.opt_state),
        ]
        problems = problems or [*self._losses()]
        if problems:
            raise StateMismatchError(
                f"{where}: it is not of these weights and this optimizer: {'; '.join(problems)}. "
                "Restore it for those that it was saved with; mesh and formats may be any others."
            )

    def structs(self) -> dict[str, PyTree]:
        """What to read, by item: with the dtypes that were saved and shardings that are wanted."""
        params, masters = self._saved("params"), self._saved("master")
        keeps = _by_path(self.state.master)

        def master(path: str, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct | None:
            if path not in masters:
                return None
            made_from = path not in keeps or params[path].dtype != str(x.dtype)
            return _struct(masters[path], x if made_from else keeps[path])

        found = {
            "params": _map(lambda path, x: _struct(params[path], x), self.weights),
            "opt_state": _map(
                lambda path, x: _struct(self._saved("opt_state")[path], x), self.state.opt_state
            ),
            "master": _map(master, self.weights),
        }
        return {item: tree for item, tree in found.items() if jax.tree.leaves(tree)}

    def finish(self, read: Mapping[str, PyTree]) -> tuple[PyTree, LogicalState]:
        """The weights and the state in logical shapes, from what `structs` made Orbax read."""
        params, masters = _by_path(read["params"]), _by_path(read.get("master", ()))
        keeps = _by_path(self.state.master)

        def weight(path: str, want: jax.ShapeDtypeStruct) -> jax.Array:
            x = params[path]
            if path in masters and (path not in keeps or x.dtype != want.dtype):
                x = masters[path]
            return _as_dtype(x, want.dtype)

        def master(path: str, want: jax.ShapeDtypeStruct) -> jax.Array:
            return _as_dtype(masters.get(path, params[path]), want.dtype)

        state = read.get("opt_state", self.state.opt_state)
        state = jax.tree.map(lambda x, want: _as_dtype(x, want.dtype), state, self.state.opt_state)
        return _map(weight, self.weights), LogicalState(state, _map(master, self.state.master))

    def _saved(self, item: str) -> Mapping[str, Entry]:
        return self.saved.entries.get(item, {})

    def _losses(self) -> Iterator[str]:
        masters, keeps = self._saved("master"), _by_path(self.state.master)
        for path, want in _by_path(self.weights).items():
            best = masters.get(path, self._saved("params")[path])
            need = keeps.get(path, want)
            if not _widens(best.dtype, need.dtype):
                yield (
                    f"params{path}: found a {'master ' * (path in masters)}weight of {best.dtype}, "
                    f"and a {'master ' * (path in keeps)}weight of {need.dtype} does not hold it"
                )
        for path, want in _by_path(self.state.opt_state).items():
            found = self._saved("opt_state")[path].dtype
            if not _widens(found, want.dtype):
                yield f"opt_state{path}: found {found}, and {want.dtype} does not hold it"


def check_plain_state(state: PyTree, wanted: PyTree) -> None:
    """A state to be saved is one of plain optax, in logical shapes.

    Args:
      state: arrays.
      wanted: `jax.ShapeDtypeStruct`s of the optimizer's own state for the weights.

    Raises:
      StateMismatchError: it is not, as what `shard_step` returns.
    """
    problems = list(_differences("state", _by_path(state), wanted))
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise StateMismatchError(
            f"save: found no state of this optimizer for these weights: {'; '.join(problems[:3])}"
            f"{more}. State that a step of shard_step returns, save as step.unshard(state)."
        )


def _differences(item: str, saved: Mapping[str, Any], wanted: PyTree) -> Iterator[str]:
    named = _by_path(wanted)
    for path in sorted({*saved, *named}):
        if path not in named:
            yield f"{item}{path}: not wanted"
        elif path not in saved:
            yield f"{item}{path}: missing"
        elif saved[path].shape != named[path].shape:
            need = list(named[path].shape)
            yield f"{item}{path}: found shape {list(saved[path].shape)}, need {need}"


def _widens(found: str, need: Any) -> bool:
    """Every value of one dtype is one of the other, of the same kind."""
    a, b = jnp.dtype(found), jnp.dtype(need)
    kinds = (jnp.integer, jnp.floating, jnp.complexfloating)
    alike = any(jnp.issubdtype(a, k) and jnp.issubdtype(b, k) for k in kinds)
    return a == b or (alike and jnp.promote_types(a, b) == b)


def _struct(entry: Entry, like: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(entry.shape, jnp.dtype(entry.dtype), sharding=like.sharding)


def _as_dtype(x: jax.Array, dtype: Any) -> jax.Array:
    if x.dtype == dtype:
        return x
    # It may lie on another mesh than the one around this call.
    own = x.sharding.mesh if isinstance(x.sharding, NamedSharding) else None
    with jax.set_mesh(own) if isinstance(own, Mesh) else contextlib.nullcontext():
        return x.astype(dtype)


def _by_path(tree: PyTree) -> dict[str, Any]:
    paths, leaves, _ = flatten_with_paths(tree)
    return dict(zip(paths, leaves, strict=True))


def _map(fun: Any, tree: PyTree) -> PyTree:
    paths, leaves, treedef = flatten_with_paths(tree)
    return treedef.unflatten([fun(path, x) for path, x in zip(paths, leaves, strict=True)])
