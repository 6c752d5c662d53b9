"""Flax's `TrainState` and `nnx.Optimizer`, made for sharded optimizers.

Flax's own classes work with `shard_updates` as they are. Those here do three things more: they
gather new weights instead of updates (in `gather_dtype`, made from sharded master weights where
`master_dtype` asks for them), they put the step counter on the mesh, where Flax's makes the step
compile twice, and importing them makes sharded states serializable by `flax.serialization`. With
any other optimizer they do what Flax's do, so that one line turns sharding on and off.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from wusharding.analysis.layout import Layout, Leaf
from wusharding.errors import ContextError, StateMismatchError
from wusharding.transforms.optimizer import ShardedOptimizer

try:
    from flax import nnx, serialization, struct
    from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
    from flax.training import train_state
except ImportError as e:
    raise ImportError(
        "wusharding.integrations.flax needs Flax: pip install 'wusharding[flax]'."
    ) from e

PyTree = Any


class TrainState(train_state.TrainState):
    """Flax's `TrainState` for an optimizer from `shard_updates`; subclass it in the same way.

    >>> import jax, jax.numpy as jnp, optax, wusharding as wus
    >>> mesh = jax.make_mesh((8,), ("data",))
    >>> params = jax.device_put({"w": jnp.ones((17, 16))}, NamedSharding(mesh, PartitionSpec()))
    >>> tx = wus.shard_updates(optax.adam(1e-3), mesh=mesh)
    >>> state = TrainState.create(apply_fn=lambda p, x: x @ p["w"], params=params, tx=tx)
    >>> state = state.apply_gradients(grads=params)
    >>> int(state.step), state.opt_state.inner[0].mu["w"].addressable_shards[0].data.size
    (1, 34)
    """

    tx: Any = struct.field(pytree_node=False)

    def apply_gradients(self, *, grads: PyTree, **kwargs: Any) -> TrainState:
        """New weights from `tx.apply`: they are gathered, not the updates.

        Args:
          grads: gradients in the tree of `params`, as `ShardedOptimizer.update` takes them.
          **kwargs: other attributes to replace.
        """
        if not isinstance(self.tx, ShardedOptimizer) or OVERWRITE_WITH_GRADIENT in grads:
            return super().apply_gradients(grads=grads, **kwargs)
        before: Any = self.opt_state
        params, opt_state = self.tx.apply(grads, before, self.params)
        return self.replace(step=self.step + 1, params=params, opt_state=opt_state, **kwargs)

    @classmethod
    def create(cls, *, apply_fn: Any, params: PyTree, tx: Any, **kwargs: Any) -> Any:
        """A state at step 0, counter and optimizer state on the mesh of the weights."""
        state = super().create(apply_fn=apply_fn, params=params, tx=tx, **kwargs)
        return state.replace(step=_on_mesh(jnp.zeros((), jnp.int32), state.opt_state, params))


class Optimizer(nnx.Optimizer):
    """`nnx.Optimizer` for an optimizer from `shard_updates`.

    Args:
      model: the module whose variables are optimized, placed on the mesh.
      tx: from `shard_updates`.
      wrt: which variables: usually `nnx.Param`.
      graph: as `nnx.Optimizer` has it.

    >>> import jax, optax, wusharding as wus
    >>> mesh = jax.make_mesh((8,), ("data",))
    >>> model = nnx.Linear(17, 16, rngs=nnx.Rngs(0))
    >>> model = jax.device_put(model, NamedSharding(mesh, PartitionSpec()))
    >>> optimizer = Optimizer(model, wus.shard_updates(optax.adam(1e-3), mesh=mesh), wrt=nnx.Param)
    >>> optimizer.update(model, nnx.state(model, nnx.Param))
    >>> optimizer.opt_state.inner[0].mu["kernel"][...].addressable_shards[0].data.size
    34
    """

    tx: Any

    def __init__(self, model: Any, tx: Any, *, wrt: Any, graph: bool | None = None) -> None:
        super().__init__(model, tx, wrt=wrt, graph=graph)
        self.step.set_value(_on_mesh(self.step.get_value(), nnx.state((self, model))))

    def update(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, model: Any, grads: PyTree, /, **kwargs: Any
    ) -> None:
        """New weights from `tx.apply`, written into the model: they are gathered, not updates.

        Args:
          model: the module.
          grads: gradients, as from `nnx.grad`.
          **kwargs: extra arguments of the wrapped optimizer.
        """
        if not isinstance(self.tx, ShardedOptimizer):
            super().update(model, grads, **kwargs)
            return
        params = nnx.as_pure(nnx.state(model, self.wrt, graph=self.graph))
        grads = nnx.as_pure(nnx.state(grads, self.wrt, graph=self.graph))
        before: Any = nnx.as_pure(self.opt_state)
        params, opt_state = self.tx.apply(grads, before, params, **nnx.as_pure(kwargs))
        nnx.update(model, params)
        nnx.update(self.opt_state, nnx.state(opt_state, graph=self.graph))
        self.step[...] += 1


def specs(tree: PyTree) -> PyTree:
    """How the arrays of a tree lie on their mesh, as `shard_map` asks for in `in_specs`.

    Args:
      tree: any tree of arrays on one mesh: a `TrainState`, an nnx module, an optimizer.

    Returns:
      The tree, with a `PartitionSpec` for each array.

    Raises:
      ContextError: an array is on no mesh.

    >>> mesh = jax.make_mesh((8,), ("data",))
    >>> specs({"w": jax.device_put(jnp.ones((16,)), NamedSharding(mesh, PartitionSpec("data")))})
    {'w': P('data',)}
    """

    def spec(path: Any, x: Any) -> PartitionSpec:
        sharding = getattr(x, "sharding", None)
        if not isinstance(sharding, NamedSharding):
            raise ContextError(
                f"{jax.tree_util.keystr(path)}: found {type(x).__name__} with sharding {sharding}, "
                "need an array on a mesh. Put it there: jax.device_put(x, NamedSharding(mesh, "
                "PartitionSpec()))."
            )
        return sharding.spec

    return jax.tree_util.tree_map_with_path(spec, tree)


# ---------------------------------------------------------------------------------- serialization


def _layout_to_dict(layout: Layout) -> dict[str, Any]:
    """What a stored state's shapes depend on; the layout itself is made anew by `init`."""
    replicas = layout.replicas

    def stored(leaf: Leaf) -> str:
        return f"{leaf.dtype}{list(leaf.shape)} as {leaf.format(replicas) or 'whole'}"

    order = f" in the order {list(replicas.shard_numbers)}" if replicas.shard_numbers else ""
    return {
        "mesh": f"{dict(replicas.axis_sizes)}, {replicas.num_shards} shards{order}",
        "state": {leaf.path: stored(leaf) for leaf in layout.state},
        "master": {leaf.path: stored(leaf) for leaf in layout.master_leaves()},
    }


def _layout_from_dict(layout: Layout, saved: dict[str, Any]) -> Layout:
    """The target's layout, if the saved state was stored in the same one."""
    here = _layout_to_dict(layout)
    for part, found in saved.items():
        if found != (need := here[part]):
            where = ""
            if isinstance(found, dict):
                where = min(k for k in {*found, *need} if found.get(k) != need.get(k))
                found, need = found.get(where, "missing"), need.get(where, "not there")
            raise StateMismatchError(
                f"{part}{where}: serialized as {found}, and the target has {need}. To move between "
                "layouts, serialize tx.unshard(state), and restore by tx.shard(plain, params)."
            )
    return layout


serialization.register_serialization_state(
    Layout, _layout_to_dict, _layout_from_dict, override=True
)


def _on_mesh(counter: Any, *trees: PyTree) -> Any:
    """A counter on the mesh that the trees' arrays lie on; as it is where they are traced."""
    for x in jax.tree.leaves(trees):
        if isinstance(sharding := getattr(x, "sharding", None), NamedSharding) and isinstance(
            sharding.mesh, Mesh
        ):
            return jax.device_put(counter, NamedSharding(sharding.mesh, PartitionSpec()))
    return counter
