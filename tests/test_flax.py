"""Flax's training states, optimizers and metadata with sharded updates, as users write them."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
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
    entries,
    hlo_of,
    layout_of_arrays,
    mesh_of,
    of_kind,
    pairs,
    relative_error,
    spec_of,
)
from wusharding import checkpoint
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
    assert {spec_of(x) for x in jax.tree.leaves(state.params)} == {()}  # where they were


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


def test_states_of_one_place_in_another_are_refused():
    """Each would be silently wrong: one device's part for all, or all parts for each device."""
    mesh, batch = mesh_of({"data": 8}), (X.reshape(8, 2, 17), Y.reshape(8, 2, 3))
    tx = wus.shard_updates(optax.adamw(0.01), mesh=mesh)
    step = jax.pmap(take_local_step, axis_name="data")
    made_outside = train_state.TrainState.create(
        apply_fn=NETWORK.apply, params=on(mesh, PARAMS), tx=tx
    )
    with pytest.raises(wus.StateMismatchError, match=r"for pmap make it inside: jax\.pmap\(tx"):
        step(jax_utils.replicate(made_outside), *batch)
    made_inside = jax.pmap(tx.init, axis_name="data")(jax_utils.replicate(PARAMS))
    with pytest.raises(wus.StateMismatchError, match="one device's part, as unreplicate takes it"):
        tx.unshard(jax_utils.unreplicate(made_inside))
    plain = jax.pmap(tx.unshard, axis_name="data")(made_inside)
    assert_same_bits(jax_utils.unreplicate(plain), optax.adamw(0.01).init(PARAMS))


# https://github.com/google-deepmind/optax/issues/577
def test_learning_rates_of_an_nnx_optimizer_change_without_a_compile():
    mesh = mesh_of({"data": 8}, auto=True)
    optimizer, plain = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1), optax.sgd(0.05)
    model, wanted = (on(mesh, nnx.Linear(17, 3, rngs=nnx.Rngs(0))) for _ in range(2))
    sharded = wus_flax.Optimizer(model, wus.shard_updates(optimizer, mesh=mesh), wrt=nnx.Param)
    grads = nnx.state(on(mesh, nnx.Linear(17, 3, rngs=nnx.Rngs(1))))
    step = nnx.jit(lambda model, optimizer: optimizer.update(model, grads))
    with compiled_functions() as compiled:
        for rate in (0.1, 0.05, 0.05):
            sharded.opt_state.inner.hyperparams["learning_rate"][...] = rate
            step(model, sharded)
    assert [f for f in compiled if "reshard" not in f] == ["jit(<lambda>)"]
    other = nnx.Optimizer(wanted, plain, wrt=nnx.Param)
    for _ in range(4):  # 0.1 + 0.05 + 0.05
        other.update(wanted, grads)
    assert relative_error(*map(nnx.to_pure_dict, (nnx.state(model), nnx.state(wanted)))) <= 1e-6


class Normed(nn.Module):
    """A batch norm over the replicas that `axis_name` names, if it does, and dropout."""

    axis_name: str | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(13, use_bias=False)(x)
        x = nn.BatchNorm(use_running_average=False, axis_name=self.axis_name)(x)
        return nn.Dense(3)(nn.Dropout(0.25, deterministic=False)(nn.tanh(x)))


class NormedState(wus_flax.TrainState):
    """Flax's way to hold what is trained by other means than gradients."""

    batch_stats: Any
    key: jax.Array


def normed_step(state: NormedState, x: jax.Array, y: jax.Array) -> tuple[NormedState, jax.Array]:
    key = jax.random.fold_in(state.key, state.step)
    key = jax.random.fold_in(key, lax.axis_index("data"))
    own = lax.pcast(state.params, "data", to="varying")

    def loss_fn(params: Tree) -> tuple[jax.Array, Tree]:
        variables = {"params": params, "batch_stats": state.batch_stats}
        found, updated = state.apply_fn(variables, x, mutable="batch_stats", rngs={"dropout": key})
        return jnp.mean((found - y) ** 2), updated["batch_stats"]

    (loss, batch_stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(own)
    return state.apply_gradients(grads=grads, batch_stats=batch_stats), lax.pmean(loss, "data")


def test_batch_norm_over_replicas_and_dropout_in_shard_map():
    """Statistics are those of the whole batch; each replica drops its own."""
    mesh = mesh_of({"data": 8}, auto=True)
    variables = Normed().init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, X)
    variables = jax.tree.map(np.asarray, variables)

    def create(mesh: Any, tx: Any) -> NormedState:
        return NormedState.create(
            apply_fn=Normed("data").apply,
            params=on(mesh, variables["params"]),
            tx=tx,
            batch_stats=on(mesh, variables["batch_stats"]),
            key=on(mesh, jax.random.key(2)),
        )

    state = create(mesh, wus.shard_updates(optax.sgd(0.1, momentum=0.9), mesh=mesh))
    specs = wus_flax.specs(state)
    step = jax.jit(
        jax.shard_map(
            normed_step,
            mesh=mesh,
            in_specs=(specs, P("data"), P("data")),
            out_specs=(specs, P()),
        ),
        donate_argnums=0,
    )
    with compiled_functions() as compiled:
        state, losses = run(step, state, on(mesh, X, "data"), on(mesh, Y, "data"))
    assert len(compiled) == 1

    # The oracle: one device, replicas as a mapped dim, plain optax.
    def oracle_step(state: NormedState, x: jax.Array, y: jax.Array) -> Any:
        def loss_fn(params: Tree) -> Any:
            def replica(i: jax.Array, x: jax.Array, y: jax.Array) -> Any:
                key = jax.random.fold_in(jax.random.fold_in(state.key, state.step), i)
                found, updated = state.apply_fn(
                    {"params": params, "batch_stats": state.batch_stats},
                    x,
                    mutable="batch_stats",
                    rngs={"dropout": key},
                )
                return jnp.mean((found - y) ** 2), updated["batch_stats"]

            losses, stats = jax.vmap(replica, axis_name="data")(jnp.arange(8), x, y)
            return losses.mean(), jax.tree.map(lambda s: s[0], stats)

        (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads, batch_stats=stats), loss

    one = mesh_of({"data": 1}, auto=True)
    wanted = create(one, optax.sgd(0.1, momentum=0.9))
    wanted, wanted_losses = run(
        jax.jit(oracle_step), wanted, X.reshape(8, 2, 17), Y.reshape(8, 2, 3)
    )
    np.testing.assert_allclose(losses, wanted_losses, rtol=1e-5)
    found = (state.params, state.batch_stats)
    assert relative_error(found, (wanted.params, wanted.batch_stats)) <= 1e-5


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


@pytest.mark.parametrize("cls", STATES, ids=["flax", "ours"])
def test_ours_gathers_weights_and_flax_gathers_updates(cls):
    """What travels in bfloat16 is one or the other, and has lost the bits beyond it."""
    mesh = mesh_of({"data": 8}, auto=True)
    tx = wus.shard_updates(optax.adamw(0.01), mesh=mesh, gather_dtype=jnp.bfloat16)
    state = cls.create(apply_fn=NETWORK.apply, params=on(mesh, PARAMS), tx=tx)
    new = state.apply_gradients(grads=on(mesh, jax.tree.map(lambda x: x / 2, PARAMS))).params
    kernel = np.asarray(new["Dense_1"]["kernel"])
    lost = np.asarray(kernel.astype(jnp.bfloat16), np.float32)
    assert np.array_equal(kernel, lost) == (cls is wus_flax.TrainState)


def test_other_optimizers_do_what_they_do_in_flax():
    """One line turns sharding on and off."""
    tx, grads = OPTIMIZERS["adamw"], jax.tree.map(np.ones_like, PARAMS)
    states = [cls.create(apply_fn=NETWORK.apply, params=PARAMS, tx=tx) for cls in STATES]
    theirs, ours = [state.apply_gradients(grads=grads) for state in states]
    assert_same_bits((ours.params, ours.opt_state), (theirs.params, theirs.opt_state))
    found = []
    for cls in (nnx.Optimizer, wus_flax.Optimizer):
        model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        optimizer = cls(model, tx, wrt=nnx.Param)
        optimizer.update(model, nnx.state(model))
        found.append(nnx.to_pure_dict(nnx.state((model, optimizer))))
    assert_same_bits(*found)


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
        (
            lambda: made_state(lines={"data": wus.lines_of_grid((2, 4))[::-1]}),
            "8 shards, and the target has .*in the order",
        ),
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


def test_nnx_in_shard_map():
    """What nnx splits off and merges again is a tree as any other, and scatters its gradients."""
    mesh = mesh_of({"data": 8}, auto=True)
    model, metrics = nnx.Linear(17, 3, rngs=nnx.Rngs(0)), nnx_metrics()
    plain = nnx.Linear(17, 3, rngs=nnx.Rngs(0))
    tx = wus.shard_updates(optax.adamw(0.01), mesh=mesh)
    model, metrics = on(mesh, (model, metrics))
    optimizer = wus_flax.Optimizer(model, tx, wrt=nnx.Param)
    graph, state = nnx.split((model, optimizer, metrics))
    specs = wus_flax.specs(state)

    @functools.partial(jax.jit, donate_argnums=0)
    @jax.shard_map(mesh=mesh, in_specs=(specs, P("data"), P("data")), out_specs=(specs, P()))
    def step(state: Tree, x: jax.Array, y: jax.Array) -> tuple[Tree, jax.Array]:
        model, optimizer, metrics = nnx.merge(graph, state)
        structure, params, rest = nnx.split(model, nnx.Param, ...)

        def loss_fn(params: Tree) -> jax.Array:
            return jnp.mean((nnx.merge(structure, params, rest)(x) - y) ** 2)

        own = lax.pcast(params, "data", to="varying")
        loss, grads = jax.value_and_grad(loss_fn)(own)
        loss = lax.pmean(loss, "data")
        optimizer.update(model, grads)
        metrics.update(loss=loss)
        return nnx.state((model, optimizer, metrics)), loss

    batch = on(mesh, X, "data"), on(mesh, Y, "data")
    found = hlo_of(step, state, *batch)
    with compiled_functions() as compiled:
        state, losses = run(step, state, *batch)
    assert len(compiled) <= 1  # looking at its collectives may have compiled it
    nnx.update((model, optimizer, metrics), state)
    plain_optimizer = nnx.Optimizer(plain, optax.adamw(0.01), wrt=nnx.Param)
    plain_metrics = nnx_metrics()
    wanted = [nnx_step(plain, plain_optimizer, plain_metrics, X, Y) for _ in range(STEPS)]
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    np.testing.assert_allclose(metrics.compute()["loss"], np.mean(wanted), rtol=1e-5)
    assert relative_error(*map(nnx.to_pure_dict, (nnx.state(model), nnx.state(plain)))) <= 1e-5
    assert len(of_kind(found, "reduce-scatter")) == 1
    assert all(c.operand_bytes <= 8 for c in of_kind(found, "all-reduce"))


# ------------------------------------------------------------------------------ the step as a whole


def test_a_whole_step_of_replicated_states_in_pmap():
    """`replicate` puts arrays on a mesh of its own, with another axis."""
    state = train_state.TrainState.create(
        apply_fn=NETWORK.apply, params=PARAMS, tx=OPTIMIZERS["adamw"]
    )

    def reduced_step(state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
        loss_fn = functools.partial(mean_squares, state.apply_fn)
        loss, grads = jax.value_and_grad(loss_fn)(state.params, x, y)
        return state.apply_gradients(grads=lax.pmean(grads, "data")), lax.pmean(loss, "data")

    mapped, batch = (
        jax.pmap(reduced_step, axis_name="data"),
        (X.reshape(8, 2, 17), Y.reshape(8, 2, 3)),
    )
    with pytest.raises(wus.ContextError, match=r"nor an argument on one with axis=\('data',\)"):
        wus.shard_step(mapped)(jax_utils.replicate(state), *batch)
    step = wus.shard_step(mapped, mesh=mesh_of({"data": 8}, auto=True))
    state, losses = run(step, jax_utils.replicate(state), *batch)
    assert_trains_alike(jax_utils.unreplicate(step.unshard(state)), [loss[0] for loss in losses])
    held = bytes_on_devices(state.opt_state)
    whole = 2 * sum(x.nbytes for x in jax.tree.leaves(PARAMS))
    assert max(held.values()) <= 1.1 * whole / 8 + 64


def test_a_whole_step_of_nnx():
    """Nothing is wrapped: a step of what nnx splits off is a step of trees."""
    mesh = mesh_of({"data": 8}, auto=True)
    model, plain = (nnx.Linear(17, 3, rngs=nnx.Rngs(0)) for _ in range(2))
    optimizer = nnx.Optimizer(model, optax.adamw(0.01), wrt=nnx.Param)
    graph, state = nnx.split((model, optimizer, nnx_metrics()))

    def split_step(state: Tree, x: jax.Array, y: jax.Array) -> tuple[Tree, jax.Array]:
        modules = nnx.merge(graph, state)
        loss = nnx_step(*modules, x, y)
        return nnx.state(modules), loss

    step = wus.shard_step(split_step, mesh=mesh)
    state, losses = run(step, on(mesh, state), on(mesh, X, "data"), on(mesh, Y, "data"))
    metrics = nnx_metrics()
    plain_optimizer = nnx.Optimizer(plain, optax.adamw(0.01), wrt=nnx.Param)
    wanted = [nnx_step(plain, plain_optimizer, metrics, X, Y) for _ in range(STEPS)]
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    found = nnx.to_pure_dict(step.unshard(state))
    needed = nnx.to_pure_dict(nnx.state((plain, plain_optimizer, metrics)))
    assert relative_error(found, needed) <= 1e-5
    assert [t.kind for t in step.plan.traffic if t.kind == "reduce-scatter"]


# ------------------------------------------------------------------------- metadata, logical axes

WIDE = _RNG.normal(size=(16, 16)).astype(np.float32)
RULES = (("embed", None), ("hidden", "model"), ("batch", "data"))


class LinenSplit(nn.Module):
    """Two dense layers, the hidden dim of which is split over `model`; one bias has no box."""

    logical: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        split = nn.with_logical_partitioning if self.logical else nn.with_partitioning
        embed, hidden = ("embed", "hidden") if self.logical else (None, "model")
        kernel, zeros = nn.initializers.lecun_normal(), nn.initializers.zeros
        x = nn.Dense(
            12, kernel_init=split(kernel, (embed, hidden)), bias_init=split(zeros, (hidden,))
        )(x)
        return nn.Dense(3, kernel_init=split(kernel, (hidden, embed)))(nn.tanh(x))


class NnxSplit(nnx.Module):
    """The same; `metadata` is put on every kernel."""

    def __init__(self, rngs: nnx.Rngs, **metadata: Any) -> None:
        kernel, zeros = nnx.initializers.lecun_normal(), nnx.initializers.zeros_init()
        split = functools.partial(nnx.with_partitioning, **metadata)
        self.first = nnx.Linear(
            16,
            12,
            kernel_init=split(kernel, (None, "model")),
            bias_init=nnx.with_partitioning(zeros, ("model",)),
            rngs=rngs,
        )
        self.second = nnx.Linear(12, 3, kernel_init=split(kernel, ("model", None)), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(nnx.tanh(self.first(x)))


def data_and_model(*, auto: bool = True) -> Any:
    return mesh_of({"data": 4, "model": 2}, auto=auto)


def logical_specs(params: Tree) -> Tree:
    return nn.logical_to_mesh(nn.get_partition_spec(params), RULES)


@functools.cache
def split_reference(logical: bool = False) -> tuple[Tree, Tree, Tree]:
    """Boxed first weights, and whole weights and moments after training on one device."""
    network = LinenSplit(logical)
    # On the host, so that donation takes no array of the caller's.
    params = jax.tree.map(np.asarray, network.init(jax.random.key(0), WIDE)["params"])
    state = train_state.TrainState.create(
        apply_fn=network.apply, params=nn.unbox(params), tx=optax.adamw(0.01)
    )
    step = jax.jit(lambda *args: take_step(*args))
    state, _ = run(step, state, WIDE, Y)
    return params, state.params, state.opt_state


@pytest.mark.parametrize("names", ["mesh axes", "logical axes"])
@pytest.mark.parametrize("where", ["eager", "jit"])
def test_boxed_weights_keep_model_axes_and_state_gains_the_data_axis(where, names):
    logical = names == "logical axes"
    mesh, network = data_and_model(), LinenSplit(logical)
    params, wanted, wanted_state = split_reference(logical)
    specs_of = logical_specs if logical else nn.get_partition_spec

    def create(tx: Any, params: Tree) -> Any:
        return wus_flax.TrainState.create(apply_fn=network.apply, params=params, tx=tx)

    if where == "eager":
        tx = wus.shard_updates(optax.adamw(0.01), mesh=mesh)
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs_of(params))
        state = create(tx, jax.device_put(params, shardings))
    else:
        # As in Flax's guides, but for the optimizer's state: it knows its own shardings.
        tx = wus.shard_updates(optax.adamw(0.01), mesh=mesh, param_specs=specs_of)
        make = functools.partial(create, tx)
        abstract = jax.eval_shape(make, params)
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs_of(abstract))
        shardings = shardings.replace(opt_state=tx.state_shardings(abstract.params))
        state = jax.jit(make, out_shardings=shardings)(params)
    mu = state.opt_state.inner[0].mu
    lies = jax.tree.map(lambda x: x.sharding.spec, nn.unbox(mu))
    assert lies["Dense_0"]["kernel"] == P("data", "model")
    assert set(lies["Dense_0"]["bias"][0]) == {"data", "model"}
    if not logical:
        told = nn.get_partition_spec(mu)
        assert (told["Dense_0"], told["Dense_1"]["kernel"]) == (
            lies["Dense_0"],
            lies["Dense_1"]["kernel"],
        )
    step = jax.jit(lambda *args: take_step(*args), donate_argnums=0)
    with compiled_functions() as compiled:
        state, _ = run(step, state, on(mesh, WIDE, "data"), on(mesh, Y, "data"))
    assert len(compiled) == 1
    assert jax.tree.structure(state.params) == jax.tree.structure(params)
    assert spec_of(state.params["Dense_0"]["kernel"].value) == (None, "model")
    plain = tx.unshard(state.opt_state)
    assert jax.tree.structure(plain[0].mu) == jax.tree.structure(params)
    found = nn.unbox((state.params, plain))
    assert relative_error(found, (wanted, wanted_state)) <= 1e-5


@pytest.mark.parametrize("metadata", [{}, {"optimizer_sharding": ("data", "model")}])
@pytest.mark.parametrize("where", ["eager", "jit"])
@pytest.mark.parametrize("cls", [nnx.Optimizer, wus_flax.Optimizer], ids=["flax", "ours"])
def test_nnx_variables_keep_model_axes_and_state_gains_the_data_axis(cls, where, metadata):
    mesh = data_and_model()
    params, wanted, _ = split_reference()
    linen = nn.unbox(params)

    def make() -> tuple[Any, Any]:
        model = NnxSplit(nnx.Rngs(0), **metadata)
        return model, cls(model, tx, wrt=nnx.Param)

    with jax.set_mesh(mesh):
        tx = wus.shard_updates(optax.adamw(0.01), param_specs=nnx.get_partition_spec)
        model, optimizer = make() if where == "eager" else nnx.jit(make)()
        for layer, name in ((model.first, "Dense_0"), (model.second, "Dense_1")):
            layer.kernel[...] = jax.device_put(linen[name]["kernel"], layer.kernel.sharding)
        state = nnx.state(optimizer.opt_state)
        # What Flax reads off the metadata is where the arrays lie, one and all.
        told, lie = nnx.get_partition_spec(state), wus_flax.specs(state)
        assert [*map(entries, jax.tree.leaves(told))] == [*map(entries, jax.tree.leaves(lie))]
        assert optimizer.opt_state.inner[0].mu["first"]["kernel"].out_sharding == ("data", "model")
        assert spec_of(optimizer.opt_state.inner[0].mu["second"]["bias"][...]) == ("data",)

        @nnx.jit
        def step(model: Any, optimizer: Any, x: jax.Array, y: jax.Array) -> jax.Array:
            loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - y) ** 2))(model)
            optimizer.update(model, grads)
            return loss

        for _ in range(STEPS):
            step(model, optimizer, on(mesh, WIDE, "data"), on(mesh, Y, "data"))
        assert spec_of(model.first.kernel[...]) == (None, "model")
        assert model.first.kernel.out_sharding == (None, "model")
        again = nnx.state(optimizer.opt_state)
        assert jax.tree.map(spec_of, again) == jax.tree.map(spec_of, state)
    found = {"Dense_0": model.first, "Dense_1": model.second}
    for name, layer in found.items():
        found[name] = {"kernel": layer.kernel[...], "bias": layer.bias[...]}
    assert relative_error(found, wanted) <= 1e-5


def test_nnx_modules_go_through_a_checkpoint(tmp_path):
    """Within the mesh that annotated variables need; the devices of a spread state are permuted."""
    tx = wus.shard_updates(optax.adamw(0.01), param_specs=nnx.get_partition_spec)

    def make(seed: int) -> tuple[Any, Any]:
        model = NnxSplit(nnx.Rngs(seed))
        return model, wus_flax.Optimizer(model, tx, wrt=nnx.Param)

    def weights(model: Any) -> Tree:
        return nnx.as_pure(nnx.state(model, nnx.Param))

    with jax.set_mesh(data_and_model()), ocp.CheckpointManager(tmp_path) as manager:
        model, optimizer = make(0)
        optimizer.update(model, nnx.state(model, nnx.Param))
        checkpoint.save(manager, 1, tx, weights(model), nnx.as_pure(optimizer.opt_state))
        manager.wait_until_finished()
        again, its_optimizer = make(1)
        found = checkpoint.restore(manager, tx, weights(again))
        nnx.update(again, found.params)
        nnx.update(its_optimizer.opt_state, nnx.state(found.state))
        pairs_of_states = [
            (nnx.state(again), nnx.state(model)),
            (nnx.state(its_optimizer.opt_state), nnx.state(optimizer.opt_state)),
        ]
        for restored, saved in pairs_of_states:
            assert_same_bits(*map(nnx.to_pure_dict, (restored, saved)))
            assert jax.tree.map(spec_of, restored) == jax.tree.map(spec_of, saved)


# https://github.com/google/flax/issues/5110
@pytest.mark.parametrize("auto", [True, False], ids=["auto", "explicit"])
def test_abstract_nnx_optimizers_carry_the_shardings_of_real_ones(auto):
    mesh = data_and_model(auto=auto)

    def make() -> tuple[Any, Any]:
        model = NnxSplit(nnx.Rngs(0))
        tx = wus.shard_updates(optax.adamw(0.01), param_specs=nnx.get_partition_spec)
        return model, wus_flax.Optimizer(model, tx, wrt=nnx.Param)

    with jax.set_mesh(mesh):
        abstract = nnx.eval_shape(make)
        if auto:  # types carry no shardings there; Flax reads them off the metadata
            abstract = nnx.as_abstract(abstract)
        abstract, real = nnx.state(abstract), nnx.state(make())
    for struct, x in pairs(abstract, real):
        assert (struct.shape, struct.dtype) == (x.shape, x.dtype)
        spec = P() if struct.sharding is None else struct.sharding.spec
        assert entries(spec) == spec_of(x)


def test_model_axes_that_cannot_be_seen_are_asked_for():
    mesh = data_and_model()
    tx = wus.shard_updates(optax.adamw(0.01), mesh=mesh)
    with pytest.raises(wus.ContextError, match=r"such as get_partition_spec of flax\.linen"):
        jax.jit(tx.init)(split_reference()[0])
