"""Several steps on the device under `jit`; clipping and a schedule are inside of the `scan`."""

import functools

import jax
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tests.corpus.case import Case, mean_squares, mlp_params, regression, stacked

MODES = ("auto", "explicit")

tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(1e-2, 1e-3, 10)))


def step(carry, batch):
    params, opt_state = carry
    loss, grads = jax.value_and_grad(mean_squares)(params, *batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss


@functools.partial(jax.jit, donate_argnums=(0,))
def train_steps(state, xs, ys):
    state, losses = jax.lax.scan(step, state, (xs, ys))
    return state, {"loss": losses.mean()}


def make(mesh: Mesh) -> Case:
    params = mlp_params()
    return Case(
        train_steps,
        ((params, tx.init(params)),),
        lambda step: stacked(regression, 3 * step, 3),
        weights=lambda state: state[0],
        aux=lambda state: state[1],
        batch_specs=(P(None, "data"), P(None, "data")),
        all_reduced_bytes=8,
    )
