"""Flax's training states, optimizers and metadata with sharded updates, as users write them."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import jax_utils, nnx, serialization
from flax import linen as nn
from flax.training import train_state
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import wusharding as wus
from tests.runs import (
    assert_same_bits,
    bytes_on_devices,
    compiled_functions,
    hlo_of,
    layout_of_arrays,
    mesh_of,
    of_kind,
    relative_error,
    spec_of,
)
from wusharding.integrations import flax as wus_flax

Tree = Any

STEPS = 3
_RNG = np.random.default_rng(7)
X = _RNG.normal(size=(16, 17)).astype(np.float32)
Y = _RNG.normal(size=(16, 3)).astype(np.float32)


def on(mesh: Any, tree: Tree, *spec: Any) -> Tree:
    return jax.device_put(tree, NamedSharding(mesh, P(*spec)))


class Network(nn.Module):
    """Two dense layers of odd sizes."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(3)(nn.tanh(nn.Dense(13)(x)))


NETWORK = Network()
PARAMS = jax.tree.map(np.asarray, NETWORK.init(jax.random.key(0), X)["params"])


def mean_squares(apply_fn: Any, params: Tree, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((apply_fn({"params": params}, x) - y) ** 2)


def take_step(state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
    """A training step as it is written for one device and for global views."""
    loss, grads = jax.value_and_grad(functools.partial(mean_squares, state.apply_fn))(
        state.params, x, y
    )
    return state.apply_gradients(grads=grads), loss


def take_local_step(
    state: Any, x: jax.Array, y: jax.Array, *, checked: bool = False
) -> tuple[Any, jax.Array]:
    """The step of one replica, in `shard_map` (with replication checks or not) and `pmap`."""
    own = lax.pcast(state.params, "data", to="varying") if checked else state.params
    loss, grads = jax.value_and_grad(functools.partial(mean_squares, state.apply_fn))(own, x, y)
    return state.apply_gradients(grads=grads), lax.pmean(loss, "data")


@functools.cache
def reference(name: str = "adamw") -> tuple[Tree, list[float]]:
    """Weights and losses of Flax's own `TrainState` and plain optax on one device."""
    state = train_state.TrainState.create(
        apply_fn=NETWORK.apply, params=PARAMS, tx=OPTIMIZERS[name]
    )
    step, losses = jax.jit(take_step), []
    for _ in range(STEPS):
        state, loss = step(state, X, Y)
        losses.append(float(loss))
    return state.params, losses


OPTIMIZERS = {
    "adamw": optax.adamw(0.01),
    "clipped lamb": optax.chain(optax.clip_by_global_norm(0.5), optax.lamb(0.01)),
    "adam and ema": optax.chain(optax.adam(0.01), optax.ema(0.9)),
}


def assert_trains_alike(state: Any, losses: Sequence[Any], name: str = "adamw") -> None:
    params, wanted = reference(name)
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    assert relative_error(state.params, params) <= 1e-5


def run(step: Callable[..., Any], state: Any, *batch: Any) -> tuple[Any, list[Any]]:
    losses = []
    for _ in range(STEPS):
        state, loss = step(state, *batch)
        losses.append(loss)
    return state, losses


# -------------------------------------------------------------------------------------- TrainState

STATES = [train_state.TrainState, wus_flax.TrainState]


@pytest.mark.parametrize(
    ("name", "auto", "cls"),
    [
        ("adamw", True, train_state.TrainState),
        ("adamw", False, train_state.TrainState),
        ("adamw", True, wus_flax.TrainState),
        ("clipped lamb", False, wus_flax.TrainState),
        ("adam and ema", True, wus_flax.TrainState),
    ],
)
def test_train_state_in_jit(name, auto, cls):
    mesh = mesh_of({"data": 8}, auto=auto)
    tx = wus.shard_updates(OPTIMIZERS[name], mesh=mesh)
    state = cls.create(apply_fn=NETWORK.apply, params=on(mesh, PARAMS), tx=tx)
    whole = sum(x.nbytes for x in jax.tree.leaves(tx.unshard(state.opt_state)))
    assert max(bytes_on_devices(state.opt_state).values()) <= 1.1 * whole / 8 + 64
    step = jax.jit(lambda *args: take_step(*args))
    with jax.set_mesh(mesh), compiled_functions() as compiled:
        state, losses = run(step, state, on(mesh, X, "data"), on(mesh, Y, "data"))
    assert_trains_alike(state, losses, name)
    # Flax's own counter is a Python number first, and then an array: one more compile.
    assert len(compiled) == (1 if cls is wus_flax.TrainState else 2)


@pytest.mark.parametrize(
    ("check_vma", "cls"), [(True, train_state.TrainState), (False, wus_flax.TrainState)]
)
def test_train_state_in_shard_map(check_vma, cls):
    mesh = mesh_of({"data": 8}, auto=True)
    tx = wus.shard_updates(OPTIMIZERS["adamw"], mesh=mesh)
    state = cls.create(apply_fn=NETWORK.apply, params=on(mesh, PARAMS), tx=tx)
    state = state.replace(step=on(mesh, state.step))
    specs = wus_flax.specs(state)
    assert specs.step == P() and specs.opt_state == tx.state_specs(PARAMS)
    step = jax.jit(
        jax.shard_map(
            functools.partial(take_local_step, checked=check_vma),
            mesh=mesh,
            in_specs=(specs, P("data"), P("data")),
            out_specs=(specs, P()),
            check_vma=check_vma,
        ),
        donate_argnums=0,
    )
    batch = on(mesh, X, "data"), on(mesh, Y, "data")
    found = hlo_of(step, state, *batch)
    state, losses = run(step, state, *batch)
    assert_trains_alike(state, losses)
    grad_bytes = sum(x.nbytes for x in jax.tree.leaves(PARAMS))
    assert all(c.operand_bytes <= 8 for c in of_kind(found, "all-reduce"))
    assert sum(c.operand_bytes for c in of_kind(found, "reduce-scatter")) >= grad_bytes
    assert step._cache_size() == 1


@pytest.mark.parametrize("cls", STATES, ids=["flax", "ours"])
def test_train_state_in_pmap(cls):
    tx = wus.shard_updates(OPTIMIZERS["adamw"])

    def create(params: Tree) -> Any:
        return cls.create(apply_fn=NETWORK.apply, params=params, tx=tx)

    state = jax.pmap(create, axis_name="data")(jax_utils.replicate(PARAMS))
    step = jax.pmap(take_local_step, axis_name="data", donate_argnums=0)
    with compiled_functions() as compiled:
        state, losses = run(step, state, X.reshape(8, 2, 17), Y.reshape(8, 2, 3))
    assert len(compiled) == 1
    assert_trains_alike(jax_utils.unreplicate(state), [loss[0] for loss in losses])
    assert int(jax_utils.unreplicate(state).step) == STEPS


# https://github.com/jax-ml/jax/issues/9675 https://github.com/marin-community/marin/pull/8911
@pytest.mark.parametrize("auto", [True, False], ids=["auto", "explicit"])
def test_all_of_a_state_can_be_donated(auto):
    """Warnings are errors here: a buffer that could not be reused would be one."""
    mesh = mesh_of({"data": 8}, auto=auto)
    tx = wus.shard_updates(optax.adamw(0.01), mesh=mesh)
    state = wus_flax.TrainState.create(apply_fn=NETWORK.apply, params=on(mesh, PARAMS), tx=tx)
    given = jax.tree.leaves(state)
    step = jax.jit(lambda *args: take_step(*args), donate_argnums=0)
    with jax.set_mesh(mesh), compiled_functions() as compiled:
        state, losses = run(step, state, on(mesh, X, "data"), on(mesh, Y, "data"))
    assert all(x.is_deleted() for x in given)
    assert len(compiled) == 1
    assert_trains_alike(state, losses)


@pytest.mark.parametrize("cls", STATES, ids=["flax", "ours"])
def test_low_precision_weights_with_sharded_masters(cls):
    """bf16 weights of both classes are those of float32 masters, cast."""
    mesh = mesh_of({"data": 8})
    tx = wus.shard_updates(optax.adamw(0.01), mesh=mesh, master_dtype=jnp.float32)
    low = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), PARAMS)
    state = cls.create(apply_fn=NETWORK.apply, params=on(mesh, low), tx=tx)
    step = jax.jit(lambda *args: take_step(*args))
    with jax.set_mesh(mesh):
        state, _ = run(step, state, on(mesh, X, "data"), on(mesh, Y, "data"))
        master = tx.master(state.opt_state)
    for weight, full in zip(jax.tree.leaves(state.params), jax.tree.leaves(master), strict=True):
        assert (weight.dtype, full.dtype) == (jnp.bfloat16, jnp.float32)
        np.testing.assert_array_equal(weight, full.astype(jnp.bfloat16))
    assert any(np.any(x != x.astype(jnp.bfloat16)) for x in jax.tree.leaves(master))


@pytest.mark.parametrize("make", [wus_flax.TrainState.create, wus_flax.Optimizer])
def test_optimizers_that_are_not_sharded_are_refused(make):
    message = "found GradientTransformationExtraArgs, need an optimizer from wusharding"
    with pytest.raises(TypeError, match=message):
        if make is wus_flax.Optimizer:
            make(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), optax.adam(0.1), wrt=nnx.Param)
        else:
            make(apply_fn=NETWORK.apply, params=PARAMS, tx=optax.adam(0.1))


def test_specs_of_what_is_on_no_mesh():
    with pytest.raises(wus.ContextError, match=r"\['step'\]: found int with sharding None, need"):
        wus_flax.specs({"step": 0})


# ---------------------------------------------------------------------------------- serialization


def made_state(num_devices: int = 8, **options: Any) -> Any:
    """A state after one step, of weights in bf16 with masters."""
    mesh = mesh_of({"data": num_devices}, auto=True)
    tx = wus.shard_updates(optax.adamw(0.01), mesh=mesh, master_dtype=jnp.float32, **options)
    low = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), PARAMS)
    state = wus_flax.TrainState.create(apply_fn=NETWORK.apply, params=on(mesh, low), tx=tx)
    grads = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16) / 4, PARAMS)
    return state.apply_gradients(grads=on(mesh, grads))


def test_a_sharded_state_goes_through_bytes():
    state = made_state()
    data = serialization.to_bytes(state)
    restored = serialization.from_bytes(jax.tree.map(jnp.zeros_like, state), data)
    # What comes back lies on the host; where it belongs the target knows.
    restored = jax.device_put(restored, jax.tree.map(lambda x: x.sharding, state))
    assert_same_bits(restored, state)
    assert layout_of_arrays(restored) == layout_of_arrays(state)
    grads = jax.tree.map(jnp.ones_like, state.params)
    assert_same_bits(restored.apply_gradients(grads=grads), state.apply_gradients(grads=grads))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: made_state(6), r"mesh: serialized as .*8 shards, and the target has .*6 shards"),
        (lambda: made_state(formats="dim"), r"state\[0\].mu\['Dense_0'\]\['kernel'\]: serialized"),
    ],
)
def test_bytes_of_another_layout_are_refused(other, message):
    data = serialization.to_bytes(made_state())
    with pytest.raises(wus.StateMismatchError, match=message) as caught:
        serialization.from_bytes(other(), data)
    assert "serialize tx.unshard(state), and restore by tx.shard" in str(caught.value)


def test_bytes_move_between_device_counts_as_plain_state():
    old, new = made_state(), made_state(6)
    parts = (old.tx.unshard(old.opt_state), old.tx.master(old.opt_state))
    data = serialization.to_bytes(parts)
    plain, masters = serialization.from_bytes(parts, data)
    state = new.tx.shard(plain, new.params, masters)
    assert_same_bits((new.tx.unshard(state), new.tx.master(state)), parts)


# -------------------------------------------------------------------------------------------- nnx


class Affine(nnx.Module):
    """A dense layer, a batch norm, dropout and another dense layer."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(17, 13, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(13, rngs=rngs)
        self.dropout = nnx.Dropout(0.25, rngs=rngs)
        self.second = nnx.Linear(13, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(self.dropout(nnx.relu(self.norm(self.first(x)))))


def nnx_step(model: Any, optimizer: Any, metrics: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - y) ** 2))(model)
    optimizer.update(model, grads)
    metrics.update(loss=loss)
    return loss


def nnx_metrics() -> nnx.MultiMetric:
    return nnx.MultiMetric(loss=nnx.metrics.Average("loss"))


@functools.cache
def nnx_reference() -> tuple[Tree, list[float], float]:
    """Model state, losses and their mean, with plain optax on one device."""
    model, metrics = Affine(nnx.Rngs(0)), nnx_metrics()
    optimizer = nnx.Optimizer(model, optax.adamw(0.01), wrt=nnx.Param)
    step = nnx.jit(nnx_step)
    losses = [float(step(model, optimizer, metrics, X, Y)) for _ in range(STEPS)]
    return nnx.state(model), losses, float(metrics.compute()["loss"])


@pytest.mark.parametrize("cls", [nnx.Optimizer, wus_flax.Optimizer], ids=["flax", "ours"])
@pytest.mark.parametrize("auto", [True, False], ids=["auto", "explicit"])
def test_nnx_optimizer_with_batch_norm_dropout_and_metrics(auto, cls):
    """Statistics, random numbers and metrics are those of the whole batch, as on one device."""
    mesh = mesh_of({"data": 8}, auto=auto)
    tx = wus.shard_updates(optax.adamw(0.01), mesh=mesh)
    with jax.set_mesh(mesh):
        model, metrics = on(mesh, (Affine(nnx.Rngs(0)), nnx_metrics()))
        optimizer = cls(model, tx, wrt=nnx.Param)
        step = nnx.jit(lambda *args: nnx_step(*args))
        batch = on(mesh, X, "data"), on(mesh, Y, "data")
        with compiled_functions() as compiled:
            losses = [step(model, optimizer, metrics, *batch) for _ in range(STEPS)]
        mean = metrics.compute()["loss"]
    state, wanted, wanted_mean = nnx_reference()
    np.testing.assert_allclose([*losses, mean], [*wanted, wanted_mean], rtol=1e-5)
    found, needed = (nnx.to_pure_dict(s) for s in (nnx.state(model), state))
    assert relative_error(found, needed) <= 1e-5
    assert int(optimizer.step[...]) == STEPS
    assert spec_of(optimizer.opt_state.inner[0].mu["first"]["kernel"][...]) == ("data",)
    assert len(compiled) == 1
