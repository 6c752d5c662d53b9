"""`shard_step` on meshes with a model axis: global steps, and nothing said but how arrays lie."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
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
from tests.large_scale import megatron, test_embedding, test_moe, test_spatial, training
from tests.runs import groups_of, mesh_of, of_kind, relative_error
from wusharding.errors import ContextError

Tree = Any
CONFIG = megatron.Config()


@dataclasses.dataclass(frozen=True)
class Model:
    """A loss of global arrays, and how its arrays lie along data and one more axis.

    Attributes:
      loss: of weights and a batch.
      weights: makes the weights.
      specs: of each weight.
      batches: five of them.
      axis: the axis beside `data`.
      rows: how a batch lies.
      small: bytes of the largest sum along `data` that is no gradient to scatter.
    """

    loss: Callable[..., Any]
    weights: Callable[[], Tree]
    specs: Tree
    batches: Callable[[], Sequence[Tree]]
    axis: str = "model"
    rows: P = P("data")  # noqa: RUF009
    small: int = 64


MODELS = {
    "transformer": Model(
        megatron.reference_loss,
        lambda: megatron.init(CONFIG),
        megatron.specs(),
        lambda: megatron.batches(CONFIG, 5, 8),
    ),
    "experts": Model(
        test_moe.loss, test_moe.weights, test_moe.SPECS, test_moe.batches, axis="expert"
    ),
    "images": Model(
        test_spatial.loss,
        test_spatial.weights,
        test_spatial.specs(),
        test_spatial.batches,
        axis="space",
        rows=test_spatial.ROWS,
    ),
    "embedding": Model(
        test_embedding.loss, test_embedding.weights, test_embedding.SPECS, test_embedding.batches
    ),
}


def optimizer() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.01, eps=1e-4))


@functools.cache
def reference(name: str) -> tuple[Tree, Tree]:
    model = MODELS[name]
    return training.on_one_device(model.loss, model.weights(), model.batches(), optimizer())


def share(model: Model, split: int) -> int:
    """Bytes of the weights that one device of the further axis has."""
    parts = jax.tree.map(
        lambda w, s: w.nbytes // (split if any(s) else 1), model.weights(), model.specs
    )
    return sum(jax.tree.leaves(parts))


CASES = [
    pytest.param("transformer", (4, 2)),
    pytest.param("transformer", (2, 4), marks=pytest.mark.slow),
    pytest.param("experts", (4, 2), marks=pytest.mark.slow),
    pytest.param("experts", (2, 4)),
    pytest.param("images", (4, 2)),
    pytest.param("embedding", (4, 2)),
    pytest.param("embedding", (2, 4), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_five_steps_equal_one_device(name: str, shape: tuple[int, int]) -> None:
    model = MODELS[name]
    mesh = mesh_of({"data": shape[0], model.axis: shape[1]}, auto=True)
    found = training.Setup(
        model.loss, model.weights(), model.specs, model.batches(), model.rows, optimizer(), mesh
    ).by_step()
    assert found.error(reference(name)) <= 2e-5
    data, across = training.along(mesh, "data"), training.along(mesh, model.axis)
    along_data = [c for c in found.collectives if groups_of(c) == data]
    # Each gradient is scattered once, each weight gathered once; of the batch nothing travels.
    gradients = share(model, shape[1])
    padding = 4 * shape[0] * len(jax.tree.leaves(model.weights()))
    scattered = sum(c.operand_bytes for c in of_kind(along_data, "reduce-scatter"))
    gathered = sum(c.result_bytes for c in of_kind(along_data, "all-gather"))
    assert gradients - model.small <= scattered <= gradients + padding
    assert gradients - model.small <= gathered <= gradients + padding
    assert all(c.operand_bytes <= model.small for c in of_kind(along_data, "all-reduce"))
    # What goes over all devices are norms; the rest of the other axis' traffic is the model's own.
    others = [c for c in found.collectives if groups_of(c) not in (data, across)]
    assert all(c.kind == "all-reduce" and c.operand_bytes <= model.small for c in others)


def test_activations_of_a_transformer_are_reduced_four_times_a_layer() -> None:
    """Twice forward and twice backward in each layer, as the types of its weights ask for."""
    model = MODELS["transformer"]
    mesh = mesh_of({"data": 4, "model": 2}, auto=True)
    found = training.Setup(
        model.loss,
        model.weights(),
        model.specs,
        model.batches()[:1],
        model.rows,
        optax.sgd(0.1),
        mesh,
    ).by_step()
    over_model = [c for c in found.collectives if groups_of(c) == training.along(mesh, "model")]
    activation = np.float32().nbytes * 8 // 4 * CONFIG.length * CONFIG.width
    assert {c.kind for c in over_model} == {"all-reduce"}
    assert [c.operand_bytes for c in over_model] == 4 * CONFIG.layers * [activation]


# ------------------------------------------------------------- two products, split in every manner


def products() -> Tree:
    rng = np.random.default_rng(0)
    shapes = {"up": (6, 8), "down": (8, 6)}
    return {k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}


def product_loss(params: Tree, x: jax.Array) -> jax.Array:
    return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] - x[..., ::-1]) ** 2)


def sequences(count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.normal(size=(8, 4, 6)).astype(np.float32) for _ in range(count)]


COLUMNS_ROWS = {"up": P(None, "model"), "down": P("model")}
ROWS_COLUMNS = {"up": P("model"), "down": P(None, "model")}


@pytest.mark.parametrize("rows", [P("data"), P("data", "model"), P("model", "data")])
@pytest.mark.parametrize("specs", [COLUMNS_ROWS, ROWS_COLUMNS], ids=["columns", "rows"])
def test_however_batch_and_weights_lie(specs: Tree, rows: P) -> None:
    """Gradients summed over `model` of weights that `model` tiles are scattered there too."""
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.lamb(0.02))
    mesh = mesh_of({"data": 4, "model": 2}, auto=True)
    found = training.Setup(product_loss, products(), specs, sequences(3), rows, tx, mesh).by_step()
    assert found.error(training.on_one_device(product_loss, products(), sequences(3), tx)) <= 1e-6
    gradients = sum(w.nbytes for w in products().values())
    assert all(c.operand_bytes < gradients / 8 for c in found.collectives if crosses(c, mesh))


def crosses(c: Collective, mesh: Mesh) -> bool:
    """Whether it is an all-reduce among replicas."""
    return c.kind == "all-reduce" and "data" in c.crossed_axes(mesh.shape)


MOMENTUM = optax.sgd(0.1, momentum=0.9)


def momentum_step(params: Tree, state: Tree, x: jax.Array) -> tuple[Tree, Tree]:
    updates, state = MOMENTUM.update(jax.grad(product_loss)(params, x), state, params)
    return optax.apply_updates(params, updates), state


def test_state_in_pieces_is_told_from_plain_state_of_the_same_shape() -> None:
    """A tile's pieces lie shard by shard: the stored array has its shape, and another order."""
    mesh = mesh_of({"data": 4, "model": 2}, auto=True)
    first, second, third = sequences(3)
    plain = training.on_one_device(product_loss, products(), [first], MOMENTUM)
    wanted = training.on_one_device(product_loss, products(), [first, second, third], MOMENTUM)
    params = training.placed(plain[0], COLUMNS_ROWS, mesh)
    step = wus.shard_step(momentum_step, mesh=mesh)
    rest = [training.placed(x, P("data"), mesh) for x in (second, third)]
    state = plain[1]
    assert np.any(jax.tree.leaves(state)[0])
    for x in rest:
        params, state = step(params, state, x)
    stored = state[0].trace["down"]
    assert stored.shape == (8, 6) and stored.sharding.spec == P(("data", "model"))
    assert relative_error((params, step.unshard(state)), wanted) <= 1e-6
    assert relative_error(step.unshard({"a": state}), {"a": wanted[1]}) <= 1e-6
    assert relative_error(step.unshard(step.shard(params, wanted[1], rest[0]))[1], wanted[1]) == 0


def test_where_it_cannot_be_told_it_is_refused() -> None:
    mesh = mesh_of({"data": 4, "model": 2}, auto=True)

    def replica(params: Tree, state: Tree, x: jax.Array) -> tuple[Tree, Tree]:
        own = jax.lax.pcast(params, ("data",), to="varying")
        split = megatron.over("model")

        def loss(w: Tree) -> jax.Array:
            done = split.leave(jnp.tanh(split.enter(x) @ w["up"]) @ w["down"])
            return jnp.mean((done - x[..., ::-1]) ** 2)

        grads = jax.lax.pmean(jax.grad(loss)(own), "data")
        updates, state = MOMENTUM.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = training.placed(products(), COLUMNS_ROWS, mesh)
    state = MOMENTUM.init(params)
    specs = jax.tree.map(lambda x: x.sharding.spec, state)
    ins = (COLUMNS_ROWS, specs, P("data"))
    mapped = jax.shard_map(replica, mesh=mesh, in_specs=ins, out_specs=ins[:2])
    step = wus.shard_step(mapped, mesh=mesh)
    x = training.placed(sequences(1)[0], P("data"), mesh)
    with pytest.raises(ContextError, match=r"trace\['down'\].*cannot be seen.*outside of jit"):
        jax.jit(lambda *args: step(*args))(params, state, x)
    found = step.unshard(step(params, state, x))
    wanted = training.on_one_device(product_loss, products(), sequences(1), MOMENTUM)
    assert relative_error(found, wanted) <= 1e-6


def test_microbatches_add_up_tiles_and_are_scattered_once() -> None:
    mesh = mesh_of({"data": 4, "model": 2}, auto=True)

    def step(params: Tree, state: Tree, x: jax.Array) -> tuple[Tree, Tree]:
        def turn(total: Tree, part: jax.Array) -> tuple[Tree, None]:
            grads = jax.grad(product_loss)(params, part)
            return jax.tree.map(jnp.add, total, grads), None

        parts = x.reshape(4, 2, 4, 6).swapaxes(0, 1)
        total, _ = jax.lax.scan(turn, jax.tree.map(jnp.zeros_like, params), parts)
        updates, state = MOMENTUM.update(jax.tree.map(lambda g: g / 2, total), state, params)
        return optax.apply_updates(params, updates), state

    args = (training.placed(products(), COLUMNS_ROWS, mesh),)
    args += (MOMENTUM.init(*args), training.placed(sequences(1)[0], P("data"), mesh))
    sharded = wus.shard_step(step, mesh=mesh)
    found = collectives(sharded.lower(*args).compile().as_text())
    (scattered,) = of_kind(found, "reduce-scatter")
    assert not scattered.in_loop
    assert scattered.operand_bytes == sum(w.nbytes for w in products().values()) // 2
    wanted = training.on_one_device(product_loss, products(), sequences(1), MOMENTUM)
    assert relative_error(sharded.unshard(sharded(*args)), wanted) <= 1e-6


def test_constraints_on_activations_are_followed() -> None:
    """Sequence parallelism: rows are split over `model`, and gathered for the products."""
    mesh = mesh_of({"data": 4, "model": 2}, auto=True)

    def constrained(x: jax.Array, *spec: str | None) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    def loss(params: Tree, x: jax.Array, split: Callable[..., Any] = constrained) -> jax.Array:
        x = split(jnp.sin(x), "data", "model")
        h = jnp.tanh(split(x * params["scale"], "data", None) @ params["up"])
        out = split(h @ params["down"], "data", "model") + x
        return jnp.mean((out - x[..., ::-1]) ** 2)

    weights = {**products(), "scale": np.linspace(1, 2, 6, dtype=np.float32)}
    specs = {**COLUMNS_ROWS, "scale": P()}
    found = training.Setup(loss, weights, specs, sequences(3), P("data"), MOMENTUM, mesh).by_step()
    plain = functools.partial(loss, split=lambda x, *spec: x)
    assert found.error(training.on_one_device(plain, weights, sequences(3), MOMENTUM)) <= 1e-6
    # The second product's sum is scattered where rows are to be split, and not reduced for all.
    rows = 4 * 8 // 4 * 4 * 6  # bytes of one replica's activation
    assert over_model(found, mesh, "reduce-scatter", rows)
    as_it_comes = training.Setup(
        plain, weights, specs, sequences(1), P("data"), MOMENTUM, mesh
    ).by_step()
    assert not over_model(as_it_comes, mesh, "reduce-scatter", rows)


def over_model(found: training.Trained, mesh: Mesh, kind: str, nbytes: int) -> list[Collective]:
    groups = training.along(mesh, "model")
    return [
        c
        for c in of_kind(found.collectives, kind)
        if groups_of(c) == groups and c.operand_bytes == nbytes
    ]


def test_tiles_of_layers_are_gathered_one_layer_at_a_time() -> None:
    """GSPMD's two-dimensional recipe: over `data` for each layer, over `model` sums alone."""
    mesh = mesh_of({"data": 4, "model": 2}, auto=True)
    rng = np.random.default_rng(2)
    shapes = {"up": (3, 12, 8), "down": (3, 8, 12)}
    weights = {k: rng.normal(size=s).astype(np.float32) / 4 for k, s in shapes.items()}
    specs = {"up": P(None, None, "model"), "down": P(None, "model")}
    batches = [rng.normal(size=(8, 12)).astype(np.float32) for _ in range(3)]

    def loss(params: Tree, x: jax.Array) -> jax.Array:
        def layer(h: jax.Array, w: Tree) -> tuple[jax.Array, None]:
            return h + jnp.tanh(h @ w["up"]) @ w["down"], None

        return jnp.mean((jax.lax.scan(layer, x, params)[0] - x[:, ::-1]) ** 2)

    found = training.Setup(loss, weights, specs, batches, P("data"), MOMENTUM, mesh).by_step(
        weights="layers"
    )
    assert found.error(training.on_one_device(loss, weights, batches, MOMENTUM)) <= 1e-6
    data = training.along(mesh, "data")
    moved = [c for c in found.collectives if c.kind in ("all-gather", "reduce-scatter")]
    layers = sum(w.nbytes for w in weights.values()) // 3 // 2  # a device's tiles of a layer
    assert moved and all(c.in_loop and groups_of(c) == data for c in moved)
    assert max(c.result_bytes for c in of_kind(moved, "all-gather")) <= layers
    assert sum(c.operand_bytes for c in of_kind(moved, "reduce-scatter")) == layers
