"""Some of the weights are frozen, others have optimizers of their own."""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from tests.corpus.case import GLOBAL, Case, mean_squares, mlp_params, regression

MODES = GLOBAL

tx = optax.multi_transform(
    {"matrix": optax.adam(1e-2), "bias": optax.sgd(0.1, momentum=0.9), "none": optax.set_to_zero()},
    {"w1": "none", "b1": "bias", "w2": "matrix"},
)


@jax.jit
def train_step(params, opt_state, x, y):
    loss, grads = jax.value_and_grad(mean_squares)(params, x, y)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def make(mesh: Mesh) -> Case:
    params = mlp_params()
    params["w2"] = jnp.asarray(params["w2"])
    return Case(
        train_step,
        (params, tx.init(params)),
        regression,
        weights=lambda params, opt: (params["b1"], params["w2"]),
    )
