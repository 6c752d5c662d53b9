"""A frozen backbone that the step only reads, and a trained head."""

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh

from tests.corpus.case import MANUAL, Case, normal, regression

MODES = MANUAL

tx = optax.lion(1e-2)


def train_step(head, opt_state, backbone, x, y):
    def loss_fn(head):
        features = lax.stop_gradient(jnp.tanh(x @ backbone))
        return jnp.mean((features @ head["w"] + head["b"] - y) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(head)
    grads = lax.pmean(grads, "data")
    updates, opt_state = tx.update(grads, opt_state, head)
    return optax.apply_updates(head, updates), opt_state, backbone, lax.pmean(loss, "data")


def make(mesh: Mesh) -> Case:
    head = {"w": jnp.asarray(normal(1, 19, 3)), "b": jnp.zeros(3)}
    backbone = jnp.asarray(normal(2, 17, 19, scale=0.2))
    return Case(train_step, (head, tx.init(head), backbone), regression)
