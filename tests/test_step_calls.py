"""Calls of a sharded step that are not like the one before, or that are wrong."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import wusharding as wus
from tests.runs import leaf, mesh_of

Tree = Any
TX = optax.adamw(0.01)
ROWS = (32, 16, 32)  # the last batch of an epoch is smaller
WHOLE = P()


def loss(params: Tree, x: jax.Array) -> jax.Array:
    return jnp.mean((x @ params["w"]) ** 2) + jnp.sum(params["b"] ** 2)


def plain(params: Tree, state: Tree, x: jax.Array) -> tuple[Tree, Tree]:
    updates, state = TX.update(jax.grad(loss)(params, x), state, params)
    return optax.apply_updates(params, updates), state


def of_replica(params: Tree, state: Tree, x: jax.Array) -> tuple[Tree, Tree]:
    grads = lax.pmean(jax.grad(loss)(params, x), "data")
    updates, state = TX.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def started(width: int) -> tuple[Tree, Tree]:
    params = {"w": leaf(width, 4), "b": leaf(16)}
    return params, jax.tree.map(np.asarray, TX.init(params))


def on(mesh: Mesh, tree: Tree, spec: P = WHOLE) -> Tree:
    return jax.device_put(tree, NamedSharding(mesh, spec))


@pytest.mark.parametrize("form", ["global", "shard_map", "pmap"])
@pytest.mark.parametrize("width", [17, 16])  # stored in other shapes, and in their own
@pytest.mark.parametrize("weights", ["whole", pytest.param("split", marks=pytest.mark.slow)])
def test_batches_of_another_size_find_the_state_as_it_is_stored(form, width, weights):
    mesh = mesh_of({"data": 8}, auto=True)
    step: Callable[..., Any] = plain
    place: Callable[[Tree], Tree] = lambda x: on(mesh, x, P("data"))  # noqa: E731
    wanted = started(width)
    args = on(mesh, wanted)
    if form == "shard_map":
        specs = (P(), P(), P("data"))
        step = jax.shard_map(of_replica, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    if form == "pmap":
        step = jax.pmap(of_replica, axis_name="data")
        args = jax.tree.map(lambda x: np.stack([x] * 8), wanted)
        place = lambda x: x.reshape(8, -1, width)  # noqa: E731
    sharded = wus.shard_step(step, mesh=mesh, weights=weights)
    for rows in ROWS:
        x = leaf(rows, width)
        wanted, args = jax.jit(plain)(*wanted, x), sharded(*args, place(x))
    found = sharded.unshard(args[0]), sharded.unshard(args[1])
    if form == "pmap":
        found = jax.tree.map(lambda x: x[0], found)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_arguments_donated_to_an_earlier_call_are_named():
    mesh = mesh_of({"data": 8}, auto=True)
    sharded = wus.shard_step(plain, mesh=mesh, donate_argnums=(0, -2))
    x = on(mesh, leaf(16, 17), P("data"))
    args = sharded.shard(*on(mesh, started(17)), x)[:2]
    sharded(*args, x)
    for call in (sharded, sharded.shard):
        with pytest.raises(ValueError, match=r"args\[0\]\['b'\]: it was donated .*returned"):
            call(*args, x)


def test_host_arrays_in_64_bits_are_taken_as_jit_takes_them():
    mesh = mesh_of({"data": 8}, auto=True)
    params, state = started(17)
    doubled = jax.tree.map(lambda x: x.astype(np.float64), params)
    x = on(mesh, leaf(16, 17), P("data"))
    sharded = wus.shard_step(plain, mesh=mesh)
    found, wanted = sharded(doubled, state, x)[0], sharded(params, state, x)[0]
    np.testing.assert_array_equal(found["w"], wanted["w"])


OPTIONS = {
    "no position": ({"donate_argnums": "a"}, r"donate_argnums='a': need the position"),
    "a fraction": ({"donate_argnums": 1.5}, r"donate_argnums=1.5: need the position"),
    "no argument": ({"donate_argnums": 3}, r"donate_argnums=\(3,\): the step has 3 arguments"),
    "lines of nothing": ({"lines": 3}, r"lines: found int, need a mapping"),
    "lines of a number": ({"lines": {"data": 3}}, r"lines\['data'\]: need, .*lines_of_grid"),
    "lines of positions": ({"lines": {"data": [[0, 1]]}}, r"lines\['data'\]: need, for each dim"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_that_are_none(name):
    options, message = OPTIONS[name]
    mesh = mesh_of({"data": 8}, auto=True)
    args = *on(mesh, started(17)), on(mesh, leaf(16, 17), P("data"))
    with pytest.raises((TypeError, ValueError), match=message):
        wus.shard_step(plain, mesh=mesh, **options)(*args)


@pytest.mark.parametrize("thing", [3, "state", jax.ShapeDtypeStruct((72,), jnp.float32)])
def test_unshard_of_what_are_no_arrays(thing):
    mesh = mesh_of({"data": 8}, auto=True)
    sharded = wus.shard_step(plain, mesh=mesh)
    x = on(mesh, leaf(16, 17), P("data"))
    _, state = sharded(*on(mesh, started(17)), x)
    with pytest.raises(TypeError, match=f"unshard: found {type(thing).__name__}, need arrays"):
        sharded.unshard({"a": thing})
    shapes = jax.eval_shape(sharded.unshard, jax.eval_shape(lambda: state))
    assert shapes[0].mu["w"].shape == (17, 4)


def test_shapes_where_arrays_are_needed():
    mesh = mesh_of({"data": 8}, auto=True)
    sharded = wus.shard_step(plain, mesh=mesh)
    args = *on(mesh, started(17)), on(mesh, leaf(16, 17), P("data"))
    shapes = sharded.shard_shapes(*args)
    for call in (sharded, sharded.shard):
        with pytest.raises(TypeError, match=r"args\[0\].*ShapeDtypeStruct.*lower\(\.\.\.\)"):
            call(*shapes)


def test_a_pmap_over_another_axis_than_the_one_named():
    def of_replica(params, state, x):
        return plain(params, state, jax.lax.pmean(x, "batch"))

    mesh = mesh_of({"data": 8}, auto=True)
    params, state = jax.tree.map(lambda a: jnp.stack([a] * 8), started(17))
    sharded = wus.shard_step(jax.pmap(of_replica, axis_name="batch"), mesh=mesh, axis="data")
    with pytest.raises(wus.ContextError, match=r"another mesh than .*'data': 8.*axis_name='data'"):
        sharded(params, state, jnp.ones((8, 2, 17)))


def test_state_of_another_sharded_step():
    """Of another shape the step itself fails; of its own one, nothing would be sharded."""
    mesh = mesh_of({"data": 8}, auto=True)
    for width in (17, 16):
        x = on(mesh, leaf(16, width), P("data"))
        one = wus.shard_step(plain, mesh=mesh, weights="split", formats="dim")
        params, state = one(*on(mesh, started(width)), x)
        other = wus.shard_step(plain, mesh=mesh)
        with pytest.raises((wus.UnsupportedStepError, TypeError, ValueError)) as caught:
            other(params, state, x)
        told = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
        assert "step.unshard(" in told
        assert width == 17 or "args[0]['w'] comes out of the step again" in told
        other(one.unshard(params), one.unshard(state), x)
