"""Flax nnx: the module and its optimizer are split into a graph and a state, and merged."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from tests.corpus.case import Case, regression

MODES = ("auto", "explicit")


class Net(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(17, 13, rngs=rngs)
        self.norm = nnx.LayerNorm(13, rngs=rngs)
        self.out = nnx.Linear(13, 3, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.gelu(self.norm(self.hidden(x))))


def make(mesh: Mesh) -> Case:
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
    graphdef, state = nnx.split((model, optimizer))

    @jax.jit
    def train_step(state, x, y):
        model, optimizer = nnx.merge(graphdef, state)

        def loss_fn(model):
            return jnp.mean((model(x) - y) ** 2)

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), loss

    return Case(
        train_step,
        (state,),
        regression,
        weights=lambda state: state[0],
        aux=lambda state: state[1]["opt_state"],
    )
