"""Several steps on the device: a `scan` of the whole step over stacked batches."""

import jax
import optax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tests.corpus.case import Case, mean_squares, mlp_params, regression, stacked

MODES = ("unchecked", "checked")

tx = optax.adam(1e-2)


def train_steps(params, opt_state, xs, ys):
    def step(carry, batch):
        params, opt_state = carry
        loss, grads = jax.value_and_grad(mean_squares)(params, *batch)
        grads = lax.pmean(grads, "data")
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), lax.pmean(loss, "data")

    (params, opt_state), losses = lax.scan(step, (params, opt_state), (xs, ys))
    return params, opt_state, losses


def make(mesh: Mesh) -> Case:
    params = mlp_params()
    return Case(
        train_steps,
        (params, tx.init(params)),
        lambda step: stacked(regression, 3 * step, 3),
        batch_specs=(P(None, "data"), P(None, "data")),
        all_reduced_bytes=12,
    )
