"""A mixture of experts: tokens go to the devices that have their expert, and come back."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.large_scale import training
from tests.runs import groups_of, mesh_of, of_kind

Tree = Any

TOKENS, WIDTH, HIDDEN, EXPERTS = 48, 6, 10, 4
SPECS = {"gate": P(), "in": P("expert"), "out": P("expert"), "bias": P("expert"), "head": P()}
EVERYWHERE = P(("data", "expert"))
MESHES = {"4x2": {"data": 4, "expert": 2}, "2x4": {"data": 2, "expert": 4}}


@functools.cache
def weights() -> Tree:
    rng = np.random.default_rng(5)

    def normal(*shape: int) -> np.ndarray:
        return (rng.normal(size=shape) / np.sqrt(shape[-2])).astype(np.float32)

    return {
        "gate": normal(WIDTH, EXPERTS),
        "in": normal(EXPERTS, WIDTH, HIDDEN),
        "out": normal(EXPERTS, HIDDEN, WIDTH),
        "bias": 0.1 * normal(EXPERTS, WIDTH),
        "head": normal(WIDTH, 1),
    }


@functools.cache
def batches() -> list[Tree]:
    rng = np.random.default_rng(6)
    shapes = {"x": (TOKENS, WIDTH), "y": (TOKENS,)}
    return [{k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()} for _ in range(5)]


def optimizer() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(0.5), optax.lamb(0.02))


def expert(w_in: jax.Array, w_out: jax.Array, bias: jax.Array, x: jax.Array) -> jax.Array:
    """Each expert on its own tokens: `x: f32[experts, tokens, width]`."""
    h = jnp.tanh(jnp.einsum("etw,ewh->eth", x, w_in))
    return jnp.einsum("eth,ehw->etw", h, w_out) + bias[:, None]


def chosen(gate: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Each token's best expert, and how much it counts."""
    odds = jax.nn.softmax(x @ gate)
    return jnp.argmax(odds, -1), jnp.max(odds, -1)


def square_error(params: Tree, mixed: jax.Array, batch: Tree) -> jax.Array:
    found = ((batch["x"] + mixed) @ params["head"])[:, 0]
    return jnp.mean((found - batch["y"]) ** 2)


def loss(params: Tree, batch: Tree) -> jax.Array:
    """On one device: every expert on every token, and each token takes its own."""
    best, weight = chosen(params["gate"], batch["x"])
    everything = jnp.broadcast_to(batch["x"], (EXPERTS, *batch["x"].shape))
    done = expert(params["in"], params["out"], params["bias"], everything)
    mixed = weight[:, None] * jnp.take_along_axis(done, best[None, :, None], 0)[0]
    return square_error(params, mixed, batch)


def split_loss(params: Tree, batch: Tree) -> jax.Array:
    """One replica's mean: each of its devices sends tokens to the experts and gets them back.

    Every expert has room for all of a device's tokens, so none is dropped.
    """
    params = {
        k: params[k] if SPECS[k] else lax.pcast(params[k], "expert", to="varying") for k in SPECS
    }
    best, weight = chosen(params["gate"], batch["x"])
    hot = jax.nn.one_hot(best, EXPERTS, dtype=jnp.int32)
    place = jnp.cumsum(hot, 0) * hot - 1
    slots = jax.nn.one_hot(place, batch["x"].shape[0], dtype=jnp.float32)
    sent = jnp.einsum("tec,tw->ecw", slots, batch["x"])
    there = lax.all_to_all(sent, "expert", 0, 1, tiled=True)
    done = expert(params["in"], params["out"], params["bias"], there)
    back = lax.all_to_all(done, "expert", 1, 0, tiled=True)
    mixed = jnp.einsum("tec,ecw->tw", slots, back) * weight[:, None]
    return lax.pmean(square_error(params, mixed, batch), "expert")


@functools.cache
def reference() -> tuple[Tree, Tree]:
    return training.on_one_device(loss, weights(), batches(), optimizer())


@pytest.mark.parametrize("shape", MESHES)
def test_experts_by_hand(shape):
    mesh = mesh_of(MESHES[shape])
    found = training.Setup(
        split_loss, weights(), SPECS, batches(), EVERYWHERE, optimizer(), mesh
    ).by_hand()
    assert found.error(reference()) <= 1e-5
    experts = training.along(mesh, "expert")
    # Tokens there and back; their gradients once more back, since the inputs need none.
    sent = of_kind(found.collectives, "all-to-all")
    assert len(sent) == 3
    slots = EXPERTS * TOKENS // 8
    assert {c.operand_bytes for c in sent} == {4 * slots * WIDTH}
    assert all(groups_of(c) == experts for c in sent)
    for kind in ("reduce-scatter", "all-gather"):
        moved = of_kind(found.collectives, kind)
        assert moved and all(groups_of(c) == training.along(mesh, "data") for c in moved)


def test_every_expert_has_tokens():
    """Else the tests above would say less than they seem to."""
    for batch in batches():
        best, _ = chosen(weights()["gate"], batch["x"])
        assert set(map(int, best)) == set(range(EXPERTS))


def test_experts_by_the_compiler():
    mesh = mesh_of(MESHES["4x2"], auto=True)
    found = training.Setup(
        loss, weights(), SPECS, batches(), P("data"), optimizer(), mesh
    ).by_compiler()
    assert found.error(reference()) <= 1e-5
    gathered = of_kind(found.collectives, "all-gather")
    assert gathered and all(groups_of(c) == training.along(mesh, "data") for c in gathered)
