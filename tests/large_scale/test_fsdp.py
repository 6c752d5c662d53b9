"""The two-dimensional recipe: weights split over both axes, gathered along `x` layer by layer."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from large_scale import fsdp
from large_scale.hlo import Collective, collectives
from tests.large_scale import megatron, training
from tests.runs import bytes_on_devices, groups_of, mesh_of, of_kind, relative_error

Tree = Any

CONFIG = megatron.Config(layers=3)
MESH = {"x": 4, "y": 2}
BATCH = 8


def optimizer() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(0.5), optax.lamb(0.02))


def stacked(path: Any) -> bool:
    return path[0].key == "layers"


@functools.cache
def specs() -> Tree:
    return fsdp.split_weights(
        megatron.init(CONFIG),
        megatron.specs(model="y"),
        "x",
        MESH,
        min_elems=200,
        stacked=stacked,
    )


def run(weights: Tree, x: jax.Array, split: megatron.Split) -> jax.Array:
    """A loop over layers, each of which gathers its own weights."""
    own = fsdp.layer_specs(specs()["layers"])

    @fsdp.gather_again
    def layer(x: jax.Array, w: Tree) -> tuple[jax.Array, None]:
        return megatron.layer(fsdp.gathered(w, own, "x"), x, split), None

    return lax.scan(layer, x, weights)[0]


def loss(params: Tree, tokens: jax.Array) -> jax.Array:
    """One replica's share of the mean over all."""
    rest = {k: v for k, v in params.items() if k != "layers"}
    whole = fsdp.gathered(rest, {k: specs()[k] for k in rest}, "x")
    whole["layers"] = params["layers"]
    return megatron.loss(whole, tokens, run=run) / MESH["x"]


def manual_part(tree: Tree) -> Tree:
    """Specs as a `shard_map` over `x` has them."""
    return jax.tree.map(lambda s: P(*(e if e == "x" else None for e in s)), tree)


@functools.cache
def trained() -> tuple[tuple[Tree, Tree], tuple[Tree, Tree], list[Collective]]:
    """Params and state after five steps; those of one device; collectives of a step."""
    mesh = mesh_of(MESH, auto=True)
    batches = megatron.batches(CONFIG, 5, BATCH)
    wanted = training.on_one_device(
        megatron.reference_loss, megatron.init(CONFIG), batches, optimizer()
    )
    over_x = jax.shard_map(
        jax.grad(loss),
        mesh=mesh,
        in_specs=(manual_part(specs()), P("x")),
        out_specs=manual_part(specs()),
        axis_names={"x"},
    )

    def step(params: Tree, state: Tree, tokens: jax.Array) -> tuple[Tree, Tree]:
        updates, state = optimizer().update(over_x(params, tokens), state, params)
        params = optax.apply_updates(params, updates)
        return lax.with_sharding_constraint((params, state), shardings)

    params = training.placed(megatron.init(CONFIG), specs(), mesh)
    where = jax.tree.map(lambda x: x.sharding, params)
    everywhere = NamedSharding(mesh, P())
    shardings = (
        where,
        optax.tree.map_params(
            optimizer(),
            lambda _, s: s,
            jax.eval_shape(optimizer().init, params),
            where,
            transform_non_params=lambda _: everywhere,
        ),
    )
    state = jax.jit(optimizer().init, out_shardings=shardings[1])(params)
    tokens = [training.placed(b, P("x"), mesh) for b in batches]
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, tokens[0]).compile()
    for batch in tokens:
        params, state = compiled(params, state, batch)
    return (params, state), wanted, collectives(compiled.as_text())


def test_five_steps_equal_one_device():
    found, wanted, _ = trained()
    assert relative_error(found, wanted) <= 2e-5


LARGE = ("qkv", "out", "up", "down")


def test_weights_are_gathered_along_x_only_and_gradients_scattered_along_x():
    """Each layer's four, within the loops: forward, and again backward; the embedding outside."""
    _, _, found = trained()
    x = training.along(mesh_of(MESH), "x")
    gathers, scatters = (of_kind(found, kind) for kind in ("all-gather", "reduce-scatter"))
    assert all(groups_of(c) == x for c in (*gathers, *scatters))
    weights = megatron.init(CONFIG)["layers"]
    shares = sorted(weights[k].nbytes // CONFIG.layers // MESH["y"] for k in LARGE)
    looped = [sorted(c.result_bytes for c in gathers if c.in_loop)]
    assert looped == [sorted(2 * shares)]
    assert sorted(c.operand_bytes for c in scatters if c.in_loop) == shares
    embedding = megatron.init(CONFIG)["embed"].nbytes
    assert [c.result_bytes for c in gathers if not c.in_loop] == [embedding]
    assert [c.operand_bytes for c in scatters if not c.in_loop] == [embedding]


def test_activations_are_reduced_along_y():
    """Two a layer forward and two backward: gathering again computes nothing again."""
    _, _, found = trained()
    y = training.along(mesh_of(MESH), "y")
    sums = [c for c in of_kind(found, "all-reduce") if c.in_loop and groups_of(c) == y]
    size = 4 * BATCH // MESH["x"] * CONFIG.length * CONFIG.width
    assert sum(c.operand_bytes for c in sums if c.operand_bytes >= size) == 4 * size


def test_each_device_holds_its_share():
    (params, state), _, _ = trained()
    large = {k: params["layers"][k] for k in LARGE}
    moments = {k: state[1][0].mu["layers"][k] for k in LARGE}
    total = sum(megatron.init(CONFIG)["layers"][k].nbytes for k in LARGE)
    for tree in (large, moments):
        assert set(bytes_on_devices(tree).values()) == {total // 8}


# --------------------------------------------------------------------------------- which dims


def test_which_dims_are_split():
    shapes = {
        "longest": (8, 12),
        "first of equals": (8, 8),
        "taken": (8, 12),
        "indivisible": (7, 9),
        "few": (4,),
        "stack": (16, 8, 12),
    }
    params = {k: np.zeros(s, np.float32) for k, s in shapes.items()}
    before = {k: P() for k in shapes} | {"taken": P(None, "y")}
    found = fsdp.split_weights(
        params, before, "x", MESH, min_elems=5, stacked=lambda path: path[0].key == "stack"
    )
    assert found == {
        "longest": P(None, "x"),
        "first of equals": P("x", None),
        "taken": P("x", "y"),
        "indivisible": P(),
        "few": P(),
        "stack": P(None, None, "x"),
    }


def test_what_is_split_already_is_named():
    with pytest.raises(ValueError, match=re.escape("params['w']: its spec P('x',) names 'x'")):
        fsdp.split_weights({"w": jnp.ones((8, 8))}, {"w": P("x")}, "x", MESH)
    with pytest.raises(ValueError, match=re.escape("axis='z': the mesh has axes ['x', 'y']")):
        fsdp.split_weights({}, {}, "z", MESH)
    with pytest.raises(ValueError, match=re.escape("params['w']: P(None, 'y') has more entries")):
        fsdp.split_weights({"w": jnp.ones(8)}, {"w": P(None, "y")}, "x", MESH, min_elems=0)
    with pytest.raises(TypeError, match=re.escape("found Mesh, need those of axes, as mesh.shape")):
        fsdp.split_weights({}, {}, "x", jax.make_mesh((8,), ("x",)))  # pyright: ignore[reportArgumentType]


# ------------------------------------------------------- weights split in a box, state over all


def test_weights_split_in_a_box_and_the_update_over_boxes_too():
    """Within a box of 4 weights are gathered; the 2 boxes share the update of each piece."""
    mesh = mesh_of({"replica": 2, "data": 4})
    config = megatron.Config(layers=1)
    weights = megatron.init(config)
    box = fsdp.split_weights(
        weights, jax.tree.map(lambda _: P(), weights), "data", mesh.shape, min_elems=200
    )

    def loss(params: Tree, tokens: jax.Array) -> jax.Array:
        whole = fsdp.gathered(params, box, "data")
        return megatron.loss(whole, tokens) / mesh.shape["data"]

    batches = megatron.batches(config, 5, BATCH)
    found = training.Setup(
        loss, weights, box, batches, P(("replica", "data")), optimizer(), mesh
    ).by_hand(axis="replica")
    wanted = training.on_one_device(megatron.reference_loss, weights, batches, optimizer())
    assert found.error(wanted) <= 2e-5
    boxes, replicas = training.along(mesh, "data"), training.along(mesh, "replica")
    nbytes = [
        (w.nbytes, any(spec))
        for w, spec in zip(jax.tree.leaves(weights), jax.tree.leaves(box), strict=True)
    ]
    pieces = sum(n // 4 if split else n for n, split in nbytes)
    scattered = of_kind(found.collectives, "reduce-scatter")
    within = [c for c in scattered if groups_of(c) == boxes]
    across = [c for c in scattered if groups_of(c) == replicas]
    assert len(within) + len(across) == len(scattered)
    assert sum(c.operand_bytes for c in within) == sum(n for n, split in nbytes if split)
    assert pieces <= sum(c.operand_bytes for c in across) <= 1.02 * pieces
