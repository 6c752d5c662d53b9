"""As `frozen_after_jit`, in a loop over steps whose gradients are averaged by hand."""

import jax
import optax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tests.corpus.case import Case, mean_squares, mlp_params, regression, stacked
from tests.corpus.frozen_after_jit import tx

MODES = ("unchecked", "checked")


def train_steps(params, opt_state, xs, ys):
    def step(carry, batch):
        params, opt_state = carry
        varying = lax.pcast(params, "data", to="varying")
        loss, grads = jax.value_and_grad(mean_squares)(varying, *batch)
        updates, opt_state = tx.update(lax.pmean(grads, "data"), opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), lax.pmean(loss, "data")

    (params, opt_state), losses = lax.scan(step, (params, opt_state), (xs, ys))
    return params, opt_state, losses


def make(mesh: Mesh) -> Case:
    params = mlp_params()
    return Case(
        train_steps,
        (params, tx.init(params)),
        lambda step: stacked(regression, 2 * step, 2),
        batch_specs=(P(None, "data"), P(None, "data")),
        all_reduced_bytes=8,
    )
