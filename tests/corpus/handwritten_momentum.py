"""SGD with momentum and weight decay written by hand, in a plain tuple of lists."""

import itertools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from tests.corpus.case import MANUAL, Case, normal, regression

MODES = MANUAL


def predict(params, x):
    for w, b in params[:-1]:
        x = jax.nn.gelu(x @ w + b)
    w, b = params[-1]
    return x @ w + b


def loss_fn(params, x, y):
    return jnp.mean(jnp.square(predict(params, x) - y))


def train_step(params, velocity, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    grads = [(lax.pmean(gw, "data"), lax.pmean(gb, "data")) for gw, gb in grads]
    new_params, new_velocity = [], []
    for (w, b), (gw, gb), (vw, vb) in zip(params, grads, velocity, strict=True):
        vw = 0.9 * vw + gw + 1e-3 * w
        vb = 0.9 * vb + gb
        new_velocity.append((vw, vb))
        new_params.append((w - 0.05 * vw, b - 0.05 * vb))
    return new_params, new_velocity, lax.pmean(loss, "data")


def make(mesh: Mesh) -> Case:
    sizes = [17, 11, 5, 3]
    params = [
        (jnp.asarray(normal(i, m, n, scale=0.3)), jnp.zeros(n))
        for i, (m, n) in enumerate(itertools.pairwise(sizes))
    ]
    velocity = jax.tree.map(jnp.zeros_like, params)
    return Case(train_step, (params, velocity), regression)
