"""Steps whose updates use what one replica has: refused, or left alone, never taken for equal."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import wusharding as wus
from tests.corpus.case import mean_squares, mlp_params, regression, sharded_rows
from tests.runs import bytes_on_devices, mesh_of, relative_error
from wusharding.errors import ReplicationError, UnsupportedStepError

Tree = Any

tx = optax.adam(1e-2)


def step_with(change: Callable[..., Tree]) -> Callable[..., Any]:
    """A step of one replica; `change(grads, local gradients, loss, key)` is what it applies."""

    def train_step(params: Tree, opt_state: Tree, key: jax.Array, x: Any, y: Any) -> Any:
        loss, local = jax.value_and_grad(mean_squares)(params, x, y)
        grads = change(lax.pmean(local, "data"), local, loss, key)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, lax.pmean(loss, "data")

    return train_step


def own_noise(grads: Tree, local: Tree, loss: Any, key: jax.Array) -> Tree:
    key = jax.random.fold_in(key, lax.axis_index("data"))
    return jax.tree.map(lambda g: g + 0.1 * jax.random.normal(key, g.shape), grads)


def not_reduced(grads: Tree, local: Tree, loss: Any, key: jax.Array) -> Tree:
    return local


def one_leaf_not_reduced(grads: Tree, local: Tree, loss: Any, key: jax.Array) -> Tree:
    return {**grads, "b1": local["b1"]}


def reduced_over_halves(grads: Tree, local: Tree, loss: Any, key: jax.Array) -> Tree:
    return lax.psum(local, "data", axis_index_groups=[[0, 1, 2, 3], [4, 5, 6, 7]])


def scaled_by_own_loss(grads: Tree, local: Tree, loss: Any, key: jax.Array) -> Tree:
    return jax.tree.map(lambda g: g / (1 + loss), grads)


def skipped_by_own_loss(grads: Tree, local: Tree, loss: Any, key: jax.Array) -> Tree:
    return lax.cond(loss < 1, lambda g: g, lambda g: jax.tree.map(jnp.zeros_like, g), grads)


def repeated_by_own_loss(grads: Tree, local: Tree, loss: Any, key: jax.Array) -> Tree:
    def more(carry: Any) -> Any:
        left, g = carry
        return left - 1, jax.tree.map(lambda a: 1.1 * a, g)

    return lax.while_loop(lambda c: c[0] > 0, more, (loss, grads))[1]


def rolled(grads: Tree, local: Tree, loss: Any, key: jax.Array) -> Tree:
    ring = [(i, (i + 1) % 8) for i in range(8)]
    return jax.tree.map(lambda g: lax.ppermute(g, "data", ring), local)


CHANGES = (
    own_noise,
    not_reduced,
    one_leaf_not_reduced,
    reduced_over_halves,
    scaled_by_own_loss,
    skipped_by_own_loss,
    repeated_by_own_loss,
    rolled,
)


def arguments(mesh: Mesh) -> tuple[Any, ...]:
    params = mlp_params()
    whole = jax.device_put(
        (params, tx.init(params), jax.random.PRNGKey(0)), NamedSharding(mesh, P())
    )
    return *whole, *jax.device_put(regression(0), NamedSharding(mesh, P("data")))


def mapped(change: Callable[..., Tree], mesh: Mesh) -> Callable[..., Any]:
    return jax.shard_map(
        step_with(change),
        mesh=mesh,
        in_specs=(P(), P(), P(), P("data"), P("data")),
        out_specs=(P(), P(), P()),
        check_vma=False,
    )


@pytest.mark.parametrize("change", CHANGES)
def test_weights_that_would_differ_are_refused(change: Callable[..., Tree]) -> None:
    mesh = mesh_of({"data": 8})
    step = mapped(change, mesh)
    with pytest.raises(ReplicationError, match=r"declared equal over \['data'\].*pmean"):
        wus.shard_step(step, mesh=mesh)(*arguments(mesh))


def test_the_same_step_is_taken_where_replicas_agree() -> None:
    """Noise from one key for all: the control of the refusals above."""
    mesh = mesh_of({"data": 8})

    def shared_noise(grads: Tree, local: Tree, loss: Any, key: jax.Array) -> Tree:
        return jax.tree.map(lambda g: g + 0.1 * jax.random.normal(key, g.shape), grads)

    step = mapped(shared_noise, mesh)
    wanted = jax.jit(step)(*arguments(mesh))
    sharded = wus.shard_step(step, mesh=mesh)
    found = sharded(*arguments(mesh))
    assert relative_error(tuple(map(sharded.unshard, found)), wanted) < 1e-5
    assert max(bytes_on_devices(found[1]).values()) < max(bytes_on_devices(wanted[1]).values()) / 4


def pmapped(change: Callable[..., Tree]) -> tuple[Any, Any, Any, Any]:
    """A sharded step and the plain one, in `pmap`; its state and keys, stacked."""
    mesh = mesh_of({"data": 8}, auto=True)
    params = mlp_params()
    state = jax.tree.map(lambda x: jnp.stack([x] * 8), (params, tx.init(params)))
    keys = jnp.stack([jax.random.PRNGKey(0)] * 8)
    step = jax.pmap(step_with(change), axis_name="data", devices=list(mesh.devices.flat))
    return wus.shard_step(step, mesh=mesh), step, state, keys


@pytest.mark.parametrize("change", (own_noise, skipped_by_own_loss))
def test_replicas_that_all_drift_apart_in_pmap_are_refused(change: Callable[..., Tree]) -> None:
    sharded, _, state, keys = pmapped(change)
    with pytest.raises(UnsupportedStepError, match=r"split over .*update differs between replicas"):
        sharded(*state, keys, *sharded_rows(regression(0)))


def test_an_array_that_drifts_apart_in_pmap_is_left_alone() -> None:
    """`pmap` declares nothing: each replica's bias is its own, and stays what it was."""
    sharded, step, wanted, keys = pmapped(one_leaf_not_reduced)
    found = wanted
    for n in range(2):
        batch = sharded_rows(regression(n))
        *wanted, loss = step(*wanted, keys, *batch)
        *found, found_loss = sharded(*found, keys, *batch)
        plain = tuple(map(sharded.unshard, found))
        assert relative_error((plain, found_loss), (tuple(wanted), loss)) < 1e-5


def test_a_step_whose_replicas_have_weights_of_their_own_is_refused() -> None:
    """Local SGD: weights are split over the replicas, and nothing is taken for a copy."""
    mesh = mesh_of({"data": 8}, auto=True)

    def train_step(params: Tree, opt_state: Tree, x: Any, y: Any) -> Any:
        own, own_state = jax.tree.map(lambda a: a[0], (params, opt_state))
        loss, grads = jax.value_and_grad(mean_squares)(own, x, y)
        updates, own_state = tx.update(grads, own_state, own)
        own = optax.apply_updates(own, updates)
        new = jax.tree.map(lambda a: a[None], (own, own_state))
        return *new, lax.pmean(loss, "data")

    step = jax.shard_map(
        train_step,
        mesh=mesh,
        in_specs=(P("data"), P("data"), P("data"), P("data")),
        out_specs=(P("data"), P("data"), P()),
    )
    params = mlp_params()
    state = jax.tree.map(lambda x: jnp.stack([x] * 8), (params, tx.init(params)))
    state = jax.device_put(state, NamedSharding(mesh, P("data")))
    batch = jax.device_put(regression(0), NamedSharding(mesh, P("data")))
    with pytest.raises(UnsupportedStepError, match=r"split over .*update differs between replicas"):
        wus.shard_step(step, mesh=mesh)(*state, *batch)
