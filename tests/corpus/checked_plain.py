"""Under `check_vma=True`: differentiation itself sums the gradients, the step only divides."""

import jax
import optax
from jax import lax
from jax.sharding import Mesh

from tests.corpus.case import Case, mean_squares, mlp_params, regression

MODES = ("checked",)

tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))


def train_step(params, opt_state, x, y):
    loss, grads = jax.value_and_grad(mean_squares)(params, x, y)
    grads = jax.tree.map(lambda g: g / lax.axis_size("data"), grads)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, lax.pmean(loss, "data")


def make(mesh: Mesh) -> Case:
    params = mlp_params()
    return Case(train_step, (params, tx.init(params)), regression, all_reduced_bytes=8)
