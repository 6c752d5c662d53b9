"""Convolutions split in space: neighbours exchange rows, and the weights belong to all devices."""

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
from tests.runs import mesh_of, of_kind

Tree = Any

HEIGHT, WIDTH, CHANNELS, CLASSES, BATCH = 12, 10, 3, 7, 8
MESH = {"data": 4, "space": 2}
KERNELS = {"conv1": (3, 3, 3, 6), "conv2": (5, 3, 6, 4)}
ROWS = P("data", "space")


@functools.cache
def weights() -> Tree:
    rng = np.random.default_rng(2)
    shapes = {**KERNELS, "bias": (6,), "head": (4, CLASSES)}
    return {
        name: (rng.normal(size=shape) / np.sqrt(np.prod(shape[:-1]))).astype(np.float32)
        for name, shape in shapes.items()
    }


@functools.cache
def batches() -> list[Tree]:
    rng = np.random.default_rng(3)
    return [
        {
            "image": rng.normal(size=(BATCH, HEIGHT, WIDTH, CHANNELS)).astype(np.float32),
            "label": rng.integers(0, CLASSES, (BATCH, HEIGHT)).astype(np.int32),
        }
        for _ in range(5)
    ]


def optimizer() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(0.5), optax.lars(0.05))


def conv(x: jax.Array, kernel: jax.Array, rows: Any = "SAME") -> jax.Array:
    """`x: f32[batch, height, width, channels]`, width padded; height as `rows` says."""
    half = (kernel.shape[1] - 1) // 2
    if rows == "SAME":
        rows = ((kernel.shape[0] - 1) // 2,) * 2
    return lax.conv_general_dilated(
        x, kernel, (1, 1), (rows, (half, half)), dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def with_halo(x: jax.Array, rows: int) -> jax.Array:
    """Rows of the neighbours above and below; zeros at the image's edge, as padding has them."""
    size = lax.axis_size("space")
    above = lax.ppermute(x[:, -rows:], "space", [(i, i + 1) for i in range(size - 1)])
    below = lax.ppermute(x[:, :rows], "space", [(i + 1, i) for i in range(size - 1)])
    return jnp.concatenate([above, x, below], 1)


def split_conv(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return conv(with_halo(x, (kernel.shape[0] - 1) // 2), kernel, (0, 0))


def loss(params: Tree, batch: Tree, conv: Any = conv) -> jax.Array:
    """Each row of an image has a class."""
    x = jax.nn.relu(conv(batch["image"], params["conv1"]) + params["bias"])
    x = jnp.tanh(conv(x, params["conv2"])).mean(2) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(x, batch["label"]).mean()


@functools.cache
def reference() -> tuple[Tree, Tree]:
    return training.on_one_device(loss, weights(), batches(), optimizer())


def specs() -> Tree:
    return jax.tree.map(lambda _: P(), weights())


AXES = {
    "both": {"axis": ("data", "space")},
    "part": {"axis": ("data", "space"), "shard_axis": "data"},
}


@pytest.mark.parametrize("axes", AXES)
def test_halos_by_hand(axes):
    """The replicas of a weight are all devices: `axis` names both."""
    found = training.Setup(
        functools.partial(loss, conv=split_conv),
        weights(),
        specs(),
        batches(),
        ROWS,
        optimizer(),
        mesh_of(MESH),
    ).by_hand(**AXES[axes])
    assert found.error(reference()) <= 1e-5
    # Up and down for each convolution, and back for the second: the image has no gradient.
    halo = 4 * BATCH // MESH["data"] * WIDTH
    moved = [c.operand_bytes for c in of_kind(found.collectives, "collective-permute")]
    assert sorted(moved) == sorted(2 * [halo * 3 * 1] + 4 * [halo * 6 * 2])
    no_activation_moves_otherwise(found)
    assert of_kind(found.collectives, "reduce-scatter")


def no_activation_moves_otherwise(found: training.Trained) -> None:
    """What is not a halo is smaller than one device's part of an activation."""
    activation = 4 * BATCH // MESH["data"] * HEIGHT // MESH["space"] * WIDTH * 6
    others = [c for c in found.collectives if c.kind != "collective-permute"]
    assert others and max(c.result_bytes for c in others) < activation


def test_halos_by_the_compiler():
    found = training.Setup(
        loss, weights(), specs(), batches(), ROWS, optimizer(), mesh_of(MESH, auto=True)
    ).by_compiler()
    assert found.error(reference()) <= 1e-5
    assert of_kind(found.collectives, "collective-permute")
    no_activation_moves_otherwise(found)
