"""Flax linen under `jit`: a `TrainState`, dropout with a key that is split in each step."""

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training import train_state
from jax.sharding import Mesh

from tests.corpus.case import Case, integers, normal

MODES = ("auto",)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.relu(nn.LayerNorm()(nn.Dense(13)(x)))
        return nn.Dense(5)(nn.Dropout(0.25, deterministic=not train)(x))


@jax.jit
def train_step(state, key, batch):
    key, dropout = jax.random.split(key)

    def loss_fn(params):
        logits = state.apply_fn(
            {"params": params}, batch["image"], train=True, rngs={"dropout": dropout}
        )
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), key, {"loss": loss}


def batch(step):
    return ({"image": normal(step, 32, 17), "label": integers(step, 5, 32)},)


def make(mesh: Mesh) -> Case:
    net = Net()
    params = net.init(jax.random.key(0), jnp.zeros((1, 17)), train=False)["params"]
    state = train_state.TrainState.create(apply_fn=net.apply, params=params, tx=optax.adamw(1e-2))
    return Case(
        train_step,
        (state, jax.random.key(1)),
        batch,
        weights=lambda state, key: state.params,
        aux=lambda state, key: state.opt_state,
    )
