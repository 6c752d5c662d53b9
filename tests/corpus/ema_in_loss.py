"""A mean teacher: the loss reads the moving average of the weights as well."""

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh

from tests.corpus.case import MANUAL, Case, mean_squares, mlp, mlp_params, regression

MODES = MANUAL

tx = optax.adam(1e-2)


def train_step(student, teacher, opt_state, x, y):
    def loss_fn(params):
        agreement = jnp.mean((mlp(params, x) - lax.stop_gradient(mlp(teacher, x))) ** 2)
        return mean_squares(params, x, y) + 0.5 * agreement

    loss, grads = jax.value_and_grad(loss_fn)(student)
    grads = lax.pmean(grads, "data")
    updates, opt_state = tx.update(grads, opt_state, student)
    student = optax.apply_updates(student, updates)
    teacher = jax.tree.map(lambda t, s: 0.9 * t + 0.1 * s, teacher, student)
    return student, teacher, opt_state, lax.pmean(loss, "data")


def make(mesh: Mesh) -> Case:
    params, teacher = mlp_params(), mlp_params(0.2)
    return Case(
        train_step,
        (params, teacher, tx.init(params)),
        regression,
        weights=lambda student, teacher, opt: (student, teacher),
        aux=lambda student, teacher, opt: opt,
        scattered=lambda student, teacher, opt: student,
    )
