"""Weight-update sharding on meshes with model and stage axes, under a Megatron-like Transformer."""

import contextlib
import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import wusharding as wus
from large_scale.hlo import Collective, collectives
from tests.large_scale import megatron
from tests.large_scale.training import along, on_one_device, placed
from tests.runs import (
    assert_same_bits,
    bytes_on_devices,
    groups_of,
    layout_of_arrays,
    mesh_of,
    relative_error,
)

Tree = Any

CONFIG = megatron.Config()
BATCH = 8
MESHES = {
    "4x2": {"data": 4, "model": 2},
    "2x4": {"data": 2, "model": 4},
    "2x2x2": {"data": 2, "model": 2, "stage": 2},
}
OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "adamw": lambda: optax.adamw(0.01, eps=1e-4),
    "lamb": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.lamb(0.02)),
}


@functools.cache
def weights() -> Tree:
    return megatron.init(CONFIG)


@functools.cache
def reference(name: str) -> tuple[Tree, Tree]:
    """Params and state after the steps on one device, by another text of the loss."""
    tokens = megatron.batches(CONFIG, 5, BATCH)
    return on_one_device(megatron.reference_loss, weights(), tokens, OPTIMIZERS[name]())


@dataclasses.dataclass
class Training:
    """A Transformer on a mesh, ready to train: the step, and the update alone."""

    mesh: Mesh
    specs: Tree
    tx: Any
    params: Tree
    state: Any
    step: Callable[..., Any]
    within: Callable[[], Any]

    def run(self) -> "Training":
        tokens = NamedSharding(self.mesh, P("data"))
        with self.within():
            for batch in megatron.batches(CONFIG, 5, BATCH):
                batch = jax.device_put(batch, tokens)
                self.params, self.state = self.step(self.params, self.state, batch)
        return self

    def collectives(self) -> list[Collective]:
        """The collectives of one step, which is compiled for good: it takes no other layout."""
        batch = megatron.batches(CONFIG, 1, BATCH)[0]
        batch = jax.device_put(batch, NamedSharding(self.mesh, P("data")))
        with self.within():
            self.step = self.step.lower(self.params, self.state, batch).compile()
        return collectives(self.step.as_text())


def training(context: str, shape: str, optimizer: Any, **options: Any) -> Training:
    """The Transformer on a mesh of `MESHES`, in one of five contexts.

    `open` is a `shard_map` over `data` that leaves the other axes to the compiler.
    """
    mesh = mesh_of(MESHES[shape], auto=context in ("auto", "open"))
    stage = "stage" if "stage" in mesh.shape else None
    manual = context in ("checked", "unchecked")
    specs = megatron.specs(stage=stage, vocab="model" if manual else None)
    params = placed(weights(), specs, mesh)
    tx = wus.shard_updates(optimizer, mesh=mesh, **options)
    within: Callable[[], Any] = contextlib.nullcontext
    if context == "explicit":
        within = functools.partial(jax.set_mesh, mesh)
    with within():
        state = tx.init(params)
    make = {
        "checked": _manual,
        "unchecked": _manual,
        "open": _open,
        "explicit": _explicit,
        "auto": _auto,
    }
    step = make[context](tx, params, specs, mesh, context == "checked")
    return Training(mesh, specs, tx, params, state, jax.jit(step), within)


def _manual(tx: Any, params: Tree, specs: Tree, mesh: Mesh, checked: bool) -> Callable[..., Any]:
    split = megatron.over("model") if checked else megatron.over_unchecked("model")
    stages = mesh.shape.get("stage")
    run = megatron.staged("stage", stages) if stages else megatron.layers

    def step(params: Tree, state: Any, tokens: jax.Array) -> tuple[Tree, Any]:
        own = jax.lax.pcast(params, "data", to="varying") if checked else params
        loss = functools.partial(megatron.loss, split=split, vocab=split, run=run)
        return tx.apply(jax.grad(loss)(own, tokens), state, params)

    state_specs = tx.state_specs(params)
    return jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(specs, state_specs, P("data")),
        out_specs=(specs, state_specs),
        check_vma=checked,
    )


def _open(tx: Any, params: Tree, specs: Tree, mesh: Mesh, _: bool) -> Callable[..., Any]:
    def step(params: Tree, state: Any, tokens: jax.Array) -> tuple[Tree, Any]:
        own = jax.lax.pcast(params, "data", to="varying")
        return tx.apply(jax.grad(megatron.loss)(own, tokens), state, params)

    state_specs = tx.state_specs(params, axis_names={"data"})
    return jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(P(), state_specs, P("data")),
        out_specs=(P(), state_specs),
        axis_names={"data"},
    )


def _explicit(tx: Any, params: Tree, specs: Tree, mesh: Mesh, _: bool) -> Callable[..., Any]:
    """Weights of products are `reduced`, so their gradients come `unreduced`; JAX sums the rest.

    Layers that are split over `stage` are gathered along it.
    """
    split = megatron.Split(einsum=functools.partial(jnp.einsum, out_sharding=P("data")))

    def step(params: Tree, state: Any, tokens: jax.Array) -> tuple[Tree, Any]:
        def own(w: jax.Array, spec: P) -> jax.Array:
            multiplies = w.ndim > 2 or w.shape == (CONFIG.vocab, CONFIG.width)
            tag = {"reduced": {"data"}} if multiplies else {}
            return jax.sharding.reshard(w, P(*(None if a == "stage" else a for a in spec), **tag))

        grads = jax.grad(megatron.loss)(jax.tree.map(own, params, specs), tokens, split)
        return tx.apply(grads, state, params)

    return step


def _auto(tx: Any, params: Tree, specs: Tree, mesh: Mesh, _: bool) -> Callable[..., Any]:
    def step(params: Tree, state: Any, tokens: jax.Array) -> tuple[Tree, Any]:
        return tx.apply(jax.grad(megatron.loss)(params, tokens), state, params)

    return step


CASES = [
    *(
        (c, m, o)
        for c in ("checked", "explicit", "auto")
        for m in ("4x2", "2x4")
        for o in ("lamb",)
    ),
    ("unchecked", "4x2", "lamb"),
    ("checked", "4x2", "adamw"),
    ("open", "4x2", "lamb"),
    ("checked", "2x2x2", "lamb"),
    ("explicit", "2x2x2", "lamb"),
    ("auto", "2x2x2", "lamb"),
]


@dataclasses.dataclass
class Record:
    """What five steps left behind, and the collectives of each."""

    trained: Training
    born: tuple[Any, Any]
    collectives: list[Collective]


@functools.cache
def record(context: str, shape: str, name: str) -> Record:
    train = training(context, shape, OPTIMIZERS[name]())
    born = layout_of_arrays(train.state), layout_of_arrays(train.params)
    found = train.collectives()
    return Record(train.run(), born, found)


@pytest.mark.parametrize(("context", "shape", "name"), CASES)
def test_five_steps_equal_one_device(context, shape, name):
    seen = record(context, shape, name)
    train = seen.trained
    params, state = reference(name)
    assert relative_error(train.params, params) <= 2e-5
    assert relative_error(train.tx.unshard(train.state), state) <= 2e-5
    assert (layout_of_arrays(train.state), layout_of_arrays(train.params)) == seen.born


def test_the_reference_itself_agrees_with_the_split_text():
    """Both texts of the loss, on one device."""
    tokens = megatron.batches(CONFIG, 1, BATCH)[0]
    one, two = (f(weights(), tokens) for f in (megatron.loss, megatron.reference_loss))
    assert abs(one - two) <= 1e-6 * abs(two)


# ------------------------------------------------------------------------- what the step sends


def activation_bytes(mesh: Mesh) -> int:
    """Of what one device holds of `x: f32[batch, length, width]`."""
    return BATCH // mesh.shape["data"] * CONFIG.length * CONFIG.width * 4


@pytest.mark.parametrize(
    ("context", "shape", "name"), [case for case in CASES if case[1] != "2x2x2"]
)
def test_all_reduces_of_activations_are_megatrons(context, shape, name):
    """Two a layer forward and two backward; the embedding's rows, where split, cost two more."""
    seen = record(context, shape, name)
    mesh = seen.trained.mesh
    size = activation_bytes(mesh)
    found = [c for c in seen.collectives if groups_of(c) == along(mesh, "model")]
    assert {c.kind for c in found} == {"all-reduce"}
    large = [c.operand_bytes for c in found if c.operand_bytes >= size]
    split_rows = context in ("checked", "unchecked")
    assert sum(large) == size * (4 * CONFIG.layers + 2 * split_rows)


@pytest.mark.parametrize(("context", "shape", "name"), CASES)
def test_weights_and_gradients_travel_along_data_only(context, shape, name):
    """What crosses other axes is an activation, or smaller than any norm's worth of numbers."""
    seen = record(context, shape, name)
    mesh = seen.trained.mesh
    data = along(mesh, "data")
    moved = [c for c in seen.collectives if c.kind in ("reduce-scatter", "all-gather")]
    assert {c.kind for c in moved} == (
        {"all-gather"} if context == "auto" else {"reduce-scatter", "all-gather"}
    )
    scattered = [c for c in moved if c.kind == "reduce-scatter"]
    assert all(groups_of(c) == data for c in scattered)
    # On the explicit mesh the model itself gathers its layers, along `stage`.
    own = along(mesh, "stage") if (context, shape) == ("explicit", "2x2x2") else data
    assert all(groups_of(c) in (data, own) for c in moved)


# -------------------------------------------------------------------------- the update, by itself


def update_alone(context: str, shape: str, optimizer: Any, **options: Any) -> Training:
    """`step(params, state, grads)` is `apply`; in `shard_map`, on gradients stacked by replica."""
    train = training(context, shape, optimizer, **options)

    def step(params: Tree, state: Any, grads: Tree) -> tuple[Tree, Any]:
        return train.tx.apply(grads, state, params)

    if context in ("checked", "unchecked"):
        state_specs = train.tx.state_specs(train.params)
        stacked = jax.tree.map(lambda s: P("data", *s), train.specs)
        step = jax.shard_map(
            lambda p, s, g: train.tx.apply(jax.tree.map(lambda x: x[0], g), s, p),
            mesh=train.mesh,
            in_specs=(train.specs, state_specs, stacked),
            out_specs=(train.specs, state_specs),
            check_vma=context == "checked",
        )
    train.step = jax.jit(step)
    return train


def ones(train: Training, context: str) -> Tree:
    """Gradients of ones as `update_alone` takes them."""
    if context == "auto":
        return jax.tree.map(jnp.ones_like, train.params)
    count = train.mesh.shape["data"]
    return jax.tree.map(
        lambda w, s: jax.device_put(
            np.ones((count, *w.shape), w.dtype), NamedSharding(train.mesh, P("data", *s))
        ),
        train.params,
        train.specs,
    )


@pytest.mark.parametrize("context", ["checked", "auto"])
@pytest.mark.parametrize("shape", MESHES)
def test_an_update_without_norms_stays_on_the_data_axis(context, shape):
    train = update_alone(context, shape, optax.adamw(0.01))
    lowered = train.step.lower(train.params, train.state, ones(train, context))
    found = collectives(lowered.compile().as_text())
    wanted = {"all-gather"} if context == "auto" else {"reduce-scatter", "all-gather"}
    assert {c.kind for c in found} == wanted
    assert all(groups_of(c) == along(train.mesh, "data") for c in found)


@pytest.mark.parametrize("shape", MESHES)
def test_norms_cross_the_other_axes_as_a_few_numbers(shape):
    """Negative control of the test before, and the size of what crosses."""
    train = update_alone("checked", shape, OPTIMIZERS["lamb"]())
    lowered = train.step.lower(train.params, train.state, ones(train, "checked"))
    found = collectives(lowered.compile().as_text())
    across = [c for c in found if groups_of(c) != along(train.mesh, "data")]
    assert across and {c.kind for c in across} == {"all-reduce"}
    # For each weight its norm and its update's, for which optax takes two sums each, and its part
    # of the norm of all gradients.
    assert sum(c.operand_bytes for c in across) <= 5 * 4 * len(jax.tree.leaves(weights()))


def squares() -> optax.GradientTransformation:
    """Keeps each gradient's sum of squares, and that of all."""

    def update(grads: Tree, state: Tree, params: Tree = None) -> tuple[Tree, Tree]:
        each = jax.tree.map(lambda g: jnp.sum(g * g), grads)
        return grads, (each, sum(jax.tree.leaves(each)))

    def init(params: Tree) -> Tree:
        return jax.tree.map(lambda _: jnp.zeros(()), params), jnp.zeros(())

    return optax.GradientTransformation(init, update)


@pytest.mark.parametrize("context", ["checked", "unchecked", "auto"])
@pytest.mark.parametrize("shape", MESHES)
def test_each_element_is_counted_once(context, shape):
    train = update_alone(context, shape, squares())
    _, state = train.step(train.params, train.state, ones(train, context))
    each, total = train.tx.unshard(state)
    sizes = jax.tree.map(lambda w: w.size, weights())
    assert jax.tree.map(int, each) == sizes
    assert int(total) == sum(jax.tree.leaves(sizes))


@pytest.mark.parametrize("shape", MESHES)
def test_each_device_holds_its_share_of_the_state(shape):
    train = training("auto", shape, optax.adam(0.01))

    def share(w: np.ndarray, spec: P) -> int:
        tile = w.size // math.prod(train.mesh.shape[a] for a in spec if a)
        return 2 * 4 * -(-tile // train.mesh.shape["data"])

    wanted = sum(jax.tree.leaves(jax.tree.map(share, weights(), train.specs)))
    count = 4  # of the steps
    assert set(bytes_on_devices(train.state.inner).values()) == {wanted + count}


# ------------------------------------------------ replicated weights updated over all the devices

BOTH = {"shard_axis": ("data", "model")}


@pytest.mark.parametrize("context", ["checked", "unchecked", "open", "explicit", "auto"])
def test_weights_that_model_does_not_split_are_updated_over_it_too(context):
    train = training(context, "4x2", OPTIMIZERS["lamb"](), **BOTH)
    before = layout_of_arrays(train.params)
    held = bytes_on_devices(train.state.inner)
    found = train.collectives()
    train.run()
    assert relative_error(train.params, reference("lamb")[0]) <= 2e-5
    assert relative_error(train.tx.unshard(train.state), reference("lamb")[1]) <= 2e-5
    assert layout_of_arrays(train.params) == before
    fair = 2 * sum(w.nbytes for w in jax.tree.leaves(weights())) / 8
    assert max(held.values()) <= 1.02 * fair
    # Nothing is gathered at once along both, and no gradient is reduced along `model` for it.
    gathers = [c for c in found if c.kind == "all-gather"]
    model, data = along(train.mesh, "model"), along(train.mesh, "data")
    assert {frozenset(groups_of(c)) for c in gathers} == {frozenset(data), frozenset(model)}


def test_without_it_they_are_held_on_each_model_device():
    """Negative control."""
    held = bytes_on_devices(training("auto", "4x2", OPTIMIZERS["lamb"]()).state.inner)
    fair = 2 * sum(w.nbytes for w in jax.tree.leaves(weights())) / 8
    assert max(held.values()) >= 1.1 * fair


@pytest.mark.parametrize("context", ["checked", "auto"])
def test_their_state_goes_to_plain_optax_and_back(context):
    train = training(context, "2x2x2", optax.adafactor(0.01, min_dim_size_to_factor=4), **BOTH)
    plain = train.tx.unshard(train.state)
    assert_same_bits(train.tx.unshard(train.tx.shard(plain, train.params)), plain)
    own = training(context, "2x2x2", optax.adafactor(0.01, min_dim_size_to_factor=4))
    assert layout_of_arrays(plain) == layout_of_arrays(own.tx.unshard(own.state))


@pytest.mark.parametrize("shape", MESHES)
def test_the_plan_counts_their_gathers(shape):
    train = update_alone("unchecked", shape, optax.adamw(0.01), **BOTH)
    lowered = train.step.lower(train.params, train.state, ones(train, "unchecked"))
    found = Counter((c.kind, c.operand_bytes) for c in collectives(lowered.compile().as_text()))
    planned = train.tx.plan(train.params).traffic
    assert sum(t.count for t in planned) == found.total()
    assert sum(t.operand_bytes for t in planned) == sum(n * k for (_, n), k in found.items())


# ----------------------------------------------------- explicit types around a manual computation


def two_layers(params: Tree, x: jax.Array) -> jax.Array:
    return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"]) ** 2)


@pytest.mark.parametrize("tagged", [True, False])
def test_unreduced_gradients_of_a_manual_part_are_scattered(tagged):
    """The tag changes no number, only the traffic: so the HLO is asked, not the weights."""
    mesh = mesh_of(MESHES["4x2"])
    rng = np.random.default_rng(0)
    whole = {k: rng.normal(size=s).astype(np.float32) for k, s in two_layer_shapes().items()}
    specs = {"up": P(None, "model"), "down": P("model")}
    params = placed(whole, specs, mesh)
    x = placed(rng.normal(size=(16, 6)).astype(np.float32), P("data"), mesh)
    tag = {"reduced": {"data"}} if tagged else {}
    tagged_specs = {k: P(*s, **tag) for k, s in specs.items()}
    tx = wus.shard_updates(optax.lamb(0.01), mesh=mesh)
    split = megatron.over("model")

    def part(w: Tree, x: jax.Array) -> jax.Array:
        h = jnp.tanh(split.enter(x) @ w["up"])
        return jnp.mean(split.leave(h @ w["down"]) ** 2, keepdims=True)

    def loss(params: Tree, x: jax.Array) -> jax.Array:
        ins, outs = (tagged_specs, P("data")), P("data")
        return jnp.mean(jax.shard_map(part, mesh=mesh, in_specs=ins, out_specs=outs)(params, x))

    @jax.jit
    def step(params: Tree, state: Any, x: jax.Array) -> tuple[Tree, Any]:
        own = jax.tree.map(jax.sharding.reshard, params, tagged_specs)
        return tx.apply(jax.grad(loss)(own, x), state, params)

    with jax.set_mesh(mesh):
        compiled = step.lower(params, tx.init(params), x).compile()
        new, _ = compiled(params, tx.init(params), x)
    wanted = on_one_device(two_layers, whole, [np.asarray(x)], optax.lamb(0.01))[0]
    assert relative_error(new, wanted) <= 1e-6
    found = collectives(compiled.as_text())
    gradient = sum(w.nbytes for w in whole.values()) // 2  # what one device has of it
    along_data = [c for c in found if groups_of(c) == along(mesh, "data")]
    scattered = sum(c.operand_bytes for c in along_data if c.kind == "reduce-scatter")
    reduced = sum(c.operand_bytes for c in along_data if c.kind == "all-reduce")
    assert (scattered, reduced) == ((gradient, 0) if tagged else (0, gradient))


def two_layer_shapes() -> dict[str, tuple[int, ...]]:
    return {"up": (6, 8), "down": (8, 6)}
