"""Steps until the loss has fallen below a bound: a `while_loop` under `jit`."""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from tests.corpus.case import Case, mean_squares, mlp_params, regression

MODES = ("auto", "explicit")

tx = optax.adam(1e-2)


@jax.jit
def train_steps(params, opt_state, x, y):
    def going_on(carry):
        _, _, n, loss = carry
        return (n < 4) & (loss > 0.9)

    def step(carry):
        params, opt_state, n, _ = carry
        loss, grads = jax.value_and_grad(mean_squares)(params, x, y)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, n + 1, loss

    start = (params, opt_state, jnp.int32(0), jnp.float32(jnp.inf))
    params, opt_state, n, loss = jax.lax.while_loop(going_on, step, start)
    return params, opt_state, {"steps": n, "loss": loss}


def make(mesh: Mesh) -> Case:
    params = mlp_params()
    return Case(train_steps, (params, tx.init(params)), regression)
