"""On TPU large gradients are scattered as they come, which v5e's compiler would leave to the end.

What needs XLA's TPU compiler runs where it is installed (`pip install 'wusharding[tpu-aot]'`).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import wusharding as wus
from large_scale import aot, make_mesh
from tests.large_scale.compilers import needs_libtpu
from tests.runs import Tree, mesh_of, relative_error
from wusharding.transforms import step_runner

N = 256  # 256 x 256 float32 travel alone


def weights(layers: int, n: int = N) -> Tree:
    keys = jax.random.split(jax.random.key(0), layers)
    return {
        f"layer{i}": {"kernel": jax.random.normal(k, (n, n)) / n**0.5, "bias": jnp.zeros((n,))}
        for i, k in enumerate(keys)
    }


def loss(params: Tree, x: jax.Array) -> jax.Array:
    for layer in params.values():
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
    return jnp.mean(x**2)


def of_tied(params: Tree, x: jax.Array) -> jax.Array:
    """The first weight is used again at the end."""
    return loss(params, x) + jnp.mean((x @ params["layer0"]["kernel"].T) ** 2)


def of_two(params: Tree, x: jax.Array) -> jax.Array:
    """A weight of the loss is found by a backward pass of its own."""
    inner = jax.grad(loss)(params, x)
    return loss(params, x) + 1e-3 * jnp.sum(inner["layer1"]["kernel"] ** 2)


def scaled(optimizer, fun, params: Tree, state: Tree, x: jax.Array) -> tuple[Tree, Tree]:
    grads = jax.grad(lambda p: 128.0 * fun(p, x))(params)
    grads = jax.tree.map(lambda g: g / 128.0, grads)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state


@pytest.mark.parametrize("weights_are", ["whole", "split"])
@pytest.mark.parametrize("fun", [loss, of_tied, of_two])
def test_the_numbers_are_those_of_one_device(fun, weights_are):
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(1e-1, momentum=0.9))
    step = functools.partial(scaled, optimizer, fun)
    params = weights(3)
    state = optimizer.init(params)
    xs = [np.random.default_rng(i).normal(size=(16, N)).astype(np.float32) for i in range(3)]

    wanted, plain = params, state
    for x in xs:
        wanted, plain = jax.jit(step)(wanted, plain, x)

    mesh = mesh_of({"data": 8})
    sharded = wus.shard_step(step, mesh=mesh, target="tpu", weights=weights_are)
    for x in xs:
        batch = jax.device_put(x, NamedSharding(mesh, P("data")))
        params, state = sharded(params, state, batch)
    params, state = sharded.unshard((params, state))
    assert relative_error(params, wanted) < 1e-5
    assert relative_error(state, plain) < 1e-5


def unscaled(optimizer, params: Tree, state: Tree, scale: jax.Array, x: jax.Array):
    """The second of two operations on the gradients reads what is made after them."""
    grads = jax.grad(lambda p: scale * loss(p, x))(params)
    inverse = 2.0 / scale
    grads = jax.lax.pmean(jax.tree.map(lambda g: (g * 0.5) * inverse, grads), "data")
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("weights_are", ["whole", "split"])
def test_gradients_scaled_by_what_is_made_after_them(weights_are, checked):
    optimizer, mesh = optax.sgd(1e-1, momentum=0.9), mesh_of({"data": 8})
    params = weights(3)
    state, scale = optimizer.init(params), jnp.float32(8)
    x = np.random.default_rng(0).normal(size=(16, N)).astype(np.float32)
    plain = jax.shard_map(
        functools.partial(unscaled, optimizer),
        mesh=mesh,
        in_specs=(P(), P(), P(), P("data")),
        out_specs=P(),
        check_vma=checked,
    )
    batch = jax.device_put(x, NamedSharding(mesh, P("data")))
    wanted = jax.jit(plain)(params, state, scale, batch)
    sharded = wus.shard_step(plain, mesh=mesh, target="tpu", weights=weights_are)
    found = sharded.unshard(sharded(params, state, scale, batch))
    assert relative_error(found, wanted) < 1e-5


def order(mesh: Mesh, **options) -> list[str]:
    """The names of what a step does, one after the other."""
    optimizer = optax.adam(1e-2)
    step = wus.shard_step(functools.partial(scaled, optimizer, loss), mesh=mesh, **options)
    params = weights(4)
    names: list[str] = []

    def walk(jaxpr) -> None:
        for eqn in jaxpr.eqns:
            inner = [v for v in eqn.params.values() if hasattr(v, "eqns") or hasattr(v, "jaxpr")]
            for sub in inner:
                walk(getattr(sub, "jaxpr", sub))
            if not inner:
                names.append(eqn.primitive.name)

    x = jax.device_put(jnp.ones((16, N)), NamedSharding(mesh, P("data")))
    params, state = step(params, optimizer.init(params), x)
    walk(jax.make_jaxpr(step)(params, state, x).jaxpr)
    return names


def test_the_backward_pass_goes_on_when_a_gradient_is_scattered():
    names = order(mesh_of({"data": 8}), target="tpu")
    last = max(i for i, name in enumerate(names) if name == "dot_general")
    # That of the first layer comes last; after it only biases are left, in a bucket.
    assert names[:last].count("reduce_scatter") == 3
    assert names[last:].count("reduce_scatter") == 2
    # A layer hands on what it got by its weight, which waits.
    for i in (i for i, name in enumerate(names[:last]) if name == "reduce_scatter"):
        after = [n for n in names[i:last] if n in ("optimization_barrier", "dot_general")]
        assert after[:1] in (["optimization_barrier"], [])


def test_elsewhere_the_compiler_orders_them():
    names = order(mesh_of({"data": 8}), target="cpu")
    last = max(i for i, name in enumerate(names) if name == "dot_general")
    assert "reduce_scatter" not in names[:last]
    assert "optimization_barrier" not in names[:last]


@needs_libtpu
def test_on_tpu_less_lies_there_at_once(monkeypatch):
    mesh = make_mesh("v5e:4x4", devices=aot.devices("v5e:4x4"), axis_types=AxisType.Auto)
    optimizer = optax.adam(1e-3)

    def create():
        params = weights(8, 2048)
        return params, optimizer.init(params)

    params, state = aot.placed(jax.eval_shape(create), mesh)
    x = aot.placed(jax.ShapeDtypeStruct((4096, 2048), jnp.float32), mesh, P("data"))

    def temporaries():
        step = jax.jit(functools.partial(scaled, optimizer, loss), donate_argnums=(0, 1))
        return aot.compile_step(wus.shard_step(step, mesh=mesh), params, state, x)

    ours = temporaries()
    monkeypatch.setattr(step_runner, "scattered_as_they_come", lambda schedule, *_: schedule)
    left = temporaries()
    assert ours.temp_bytes < 0.7 * left.temp_bytes
