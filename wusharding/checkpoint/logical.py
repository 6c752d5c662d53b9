"""The state of an optimizer as checkpoints hold it: logical shapes, whatever the plan."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from wusharding.errors import StateMismatchError
from wusharding.jaxprs import is_extended
from wusharding.transforms.optimizer import ShardedOptimizer, ShardedState

PyTree = Any
Optimizer = ShardedOptimizer | optax.GradientTransformation


class LogicalState(NamedTuple):
    """A state in logical, unpadded shapes; PRNG keys are their key data.

    Attributes:
      opt_state: the wrapped optimizer's own state.
      master: master weights in the tree of the parameters (None where a weight has none), or `()`.
    """

    opt_state: PyTree
    master: PyTree


def logical_state(tx: Optimizer, state: PyTree) -> LogicalState:
    """The state in logical shapes, each array split over the devices as evenly as it goes.

    Arrays are converted one by one: beside the result, no device holds more than one whole array.
    The result holds each array once, or once on each process where no dim of it splits evenly over
    the processes; arrays that need no padding are not copied at all.

    Args:
      tx: from `shard_updates`, or a plain optax optimizer, whose state is returned as it is.
      state: of `tx`; not inside of `shard_map` or `pmap`.

    Raises:
      StateMismatchError: `state` is not one of `tx`.

    >>> import jax.numpy as jnp, optax, wusharding as wus
    >>> mesh = jax.make_mesh((8,), ("data",))
    >>> tx = wus.shard_updates(optax.adam(1e-3), mesh=mesh)
    >>> logical = logical_state(tx, tx.init({"w": jnp.ones((17, 3))}))
    >>> logical.opt_state[0].mu["w"].shape
    (17, 3)
    """
    if isinstance(tx, ShardedOptimizer):
        inner, master = tx._core.spread(state)
        return LogicalState(as_data(inner), as_data(master))
    if isinstance(state, ShardedState):
        raise StateMismatchError(
            "state: it is sharded, and the optimizer is plain optax. Pass the wrapped optimizer "
            "that made it."
        )
    return LogicalState(as_data(state), ())


def abstract_state(tx: Optimizer, params: PyTree) -> LogicalState:
    """`jax.ShapeDtypeStruct`s, with shardings, of what `logical_state` returns.

    For those who restore with Orbax themselves: restore into this, then call `sharded_state`.

    Args:
      tx: from `shard_updates`, or a plain optax optimizer; its state is then replicated over the
        mesh of `params`.
      params: the weights, or `jax.ShapeDtypeStruct`s of them.
    """
    found = _abstract(tx, params)
    return LogicalState(_data_structs(found.opt_state), _data_structs(found.master))


def sharded_state(tx: Optimizer, logical: LogicalState, params: PyTree) -> PyTree:
    """The state of `tx` from one in logical shapes; the inverse of `logical_state`.

    Arrays are converted one by one, as there. They may lie as in `abstract_state`, as in
    `logical_state`, on one device, or be NumPy arrays.

    Args:
      tx: as for `logical_state`.
      logical: from `logical_state` of an optimizer with any other plan, or restored.
      params: the weights, or `jax.ShapeDtypeStruct`s of them.

    Raises:
      StateMismatchError: it is not a state of this optimizer; names the leaf.
    """
    wanted = _abstract(tx, params)
    opt_state = _as_keys(logical.opt_state, wanted.opt_state)
    if not isinstance(tx, ShardedOptimizer):
        return opt_state
    return tx.shard(opt_state, params, logical.master)


def _abstract(tx: Optimizer, params: PyTree) -> LogicalState:
    """As `abstract_state`, with PRNG keys as such."""
    if isinstance(tx, ShardedOptimizer):
        found = tx._core.abstract_spread(params)
        return LogicalState(found.inner, found.master)
    given = [getattr(x, "sharding", None) for x in jax.tree.leaves(params)]
    meshes = [s.mesh for s in given if isinstance(s, NamedSharding)]
    where = (
        NamedSharding(meshes[0], PartitionSpec())
        if meshes
        else SingleDeviceSharding(jax.local_devices()[0])
    )
    state = jax.eval_shape(tx.init, params)
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), state)
    return LogicalState(placed, ())


def as_data(tree: PyTree) -> PyTree:
    """A tree with the key data of its PRNG keys in their place."""
    return jax.tree.map(
        lambda x: jax.random.key_data(x) if is_extended(jnp.result_type(x)) else x, tree
    )


def _data_structs(tree: PyTree) -> PyTree:
    def struct(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if not is_extended(x.dtype):
            return x
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(x.shape, x.dtype))
        # A key is replicated, and so are its words.
        return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=x.sharding)

    return jax.tree.map(struct, tree)


def _as_keys(tree: PyTree, wanted: PyTree) -> PyTree:
    """A tree with PRNG keys where `wanted` has them; other trees are left for others to refuse."""
    if jax.tree.structure(tree) != jax.tree.structure(wanted):
        return tree

    def key(x: Any, like: jax.ShapeDtypeStruct) -> Any:
        if not is_extended(like.dtype) or is_extended(x.dtype):
            return x
        return jax.random.wrap_key_data(x, impl=jax.random.key_impl(jnp.empty((), like.dtype)))

    return jax.tree.map(key, tree, wanted)
