"""A small ResNet whose batch statistics are synchronized by `pmean`, trained by LARS."""

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh

from tests.corpus.case import Case, integers, normal

MODES = ("unchecked", "pmap")

tx = optax.lars(0.1, weight_decay=1e-4, momentum=0.9)


def conv(x, w, stride=1):
    return lax.conv_general_dilated(
        x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def batch_norm(p, running, x):
    mean = lax.pmean(jnp.mean(x, (0, 1, 2)), "data")
    var = lax.pmean(jnp.mean(x**2, (0, 1, 2)), "data") - mean**2
    running = jax.tree.map(lambda r, v: 0.9 * r + 0.1 * v, running, {"mean": mean, "var": var})
    return (x - mean) * lax.rsqrt(var + 1e-5) * p["scale"] + p["bias"], running


def forward(params, running, x):
    x = conv(x, params["stem"])
    shortcut = x
    x, first = batch_norm(params["norm1"], running["norm1"], x)
    x = conv(jax.nn.relu(x), params["conv1"])
    x, second = batch_norm(params["norm2"], running["norm2"], x)
    x = conv(jax.nn.relu(x), params["conv2"]) + shortcut
    x = jnp.mean(x, (1, 2))
    return x @ params["head"], {"norm1": first, "norm2": second}


def train_step(params, running, opt_state, images, labels):
    def loss_fn(params):
        logits, new_running = forward(params, running, images)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), new_running

    (loss, running), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    grads = lax.pmean(grads, "data")
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), running, opt_state, lax.pmean(loss, "data")


def batch(step):
    return normal(step, 16, 6, 5, 3), integers(step, 5, 16)


def make(mesh: Mesh) -> Case:
    width = 7
    norm = {"scale": jnp.ones(width), "bias": jnp.zeros(width)}
    stats = {"mean": jnp.zeros(width), "var": jnp.ones(width)}
    params = {
        "stem": normal(1, 3, 3, 3, width, scale=0.3),
        "norm1": norm,
        "conv1": normal(2, 3, 3, width, width, scale=0.2),
        "norm2": norm,
        "conv2": normal(3, 3, 3, width, width, scale=0.2),
        "head": normal(4, width, 5, scale=0.3),
    }
    params = jax.tree.map(jnp.asarray, params)
    return Case(
        train_step,
        (params, {"norm1": stats, "norm2": stats}, tx.init(params)),
        batch,
        aux=lambda params, running, opt: opt,
        # Two moments of two norms, their gradients, two norms for each of 8 arrays
        # (each twice, see optax's `safe_norm`), the loss.
        all_reduced_bytes=4 * (2 * 2 * width * 2 + 4 * 8 + 1),
    )
