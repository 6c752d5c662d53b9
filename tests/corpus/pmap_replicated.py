"""The Flax examples' loop of old: `jax_utils.replicate` and `pmap`."""

import functools

import jax
import optax
from flax import jax_utils
from flax.training import train_state
from jax import lax
from jax.sharding import Mesh

from tests.corpus.case import Case, mlp, mlp_params, regression, sharded_rows

MODES = ("wrapped",)


@functools.partial(jax.pmap, axis_name="data", donate_argnums=(0,))
def train_step(state, batch):
    def loss_fn(params):
        x, y = batch
        return ((state.apply_fn(params, x) - y) ** 2).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    grads = lax.pmean(grads, axis_name="data")
    return state.apply_gradients(grads=grads), lax.pmean({"loss": loss}, axis_name="data")


def make(mesh: Mesh) -> Case:
    state = train_state.TrainState.create(apply_fn=mlp, params=mlp_params(), tx=optax.adam(1e-2))
    return Case(
        train_step,
        (jax_utils.replicate(state),),
        lambda step: (sharded_rows(regression(step)),),
        weights=lambda state: state.params,
        aux=lambda state: state.opt_state,
    )
