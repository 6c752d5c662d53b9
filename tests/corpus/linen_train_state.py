"""Flax linen: a `TrainState` with batch statistics, and dropout keyed by the step."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training import train_state
from jax import lax
from jax.sharding import Mesh

from tests.corpus.case import Case, integers, normal

MODES = ("unchecked", "pmap")


class TrainState(train_state.TrainState):
    batch_stats: Any
    key: jax.Array


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.Dense(13, use_bias=False)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9, axis_name="data")(x)
        x = nn.relu(x)
        x = nn.Dropout(0.25, deterministic=not train)(x)
        return nn.Dense(5)(x)


def train_step(state, batch):
    key = jax.random.fold_in(jax.random.fold_in(state.key, state.step), lax.axis_index("data"))

    def loss_fn(params):
        logits, updates = state.apply_fn(
            {"params": params, "batch_stats": state.batch_stats},
            batch["image"],
            train=True,
            rngs={"dropout": key},
            mutable=["batch_stats"],
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses.mean(), (updates, logits)

    (loss, (updates, logits)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    grads = lax.pmean(grads, axis_name="data")
    state = state.apply_gradients(grads=grads, batch_stats=updates["batch_stats"])
    accuracy = jnp.mean(jnp.argmax(logits, -1) == batch["label"])
    return state, lax.pmean({"loss": loss, "accuracy": accuracy}, axis_name="data")


def batch(step):
    return ({"image": normal(step, 32, 17), "label": integers(step, 5, 32)},)


def make(mesh: Mesh) -> Case:
    net = Net()
    variables = net.init(jax.random.key(0), jnp.zeros((1, 17)), train=False)
    state = TrainState.create(
        apply_fn=net.apply,
        params=variables["params"],
        tx=optax.adamw(1e-2),
        batch_stats=variables["batch_stats"],
        key=jax.random.key(1),
    )
    return Case(
        train_step,
        (state,),
        batch,
        weights=lambda state: state.params,
        aux=lambda state: state.opt_state,
        all_reduced_bytes=4 * (2 + 4 * 13),  # the metrics; moments of the batch and their gradients
    )
