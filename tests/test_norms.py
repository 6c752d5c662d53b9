"""Norms that keep clear of zero: one pass, one all-reduce, and the numbers that two would give."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from tests.runs import (
    assert_same_bits,
    batches,
    leaf,
    mean_of,
    of_kind,
    reference,
    relative_error,
    training,
)
from wusharding.analysis.norms import norms_once
from wusharding.jaxprs import prune, trace
from wusharding.transforms.interpret import evaluate_program

OPTIMIZERS = {
    "lamb": lambda: optax.lamb(0.01, weight_decay=0.01),
    "lars": lambda: optax.lars(0.1, weight_decay=1e-4),
    "at least": lambda: optax.scale_by_trust_ratio(min_norm=2.0),
}


def sums(program) -> int:
    return sum(op.name == "reduce_sum" for op in program.ops)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_update_is_the_same_with_half_the_sums(name, dtype):
    """Also where a norm is too small: of weights, of updates, of both."""
    params = {"a": leaf(5, 3), "w": np.zeros((4, 7)), "g": leaf(3), "both": np.zeros(6)}
    grads = {"a": leaf(5, 3, seed=1), "w": leaf(4, 7), "g": np.zeros(3), "both": np.zeros(6)}
    params, grads = jax.tree.map(lambda x: jnp.asarray(x, dtype), (params, grads))
    tx = OPTIMIZERS[name]()
    args = grads, tx.init(params), params
    program, _ = trace(tx.update, *args)
    once = prune(norms_once(program))
    assert sums(prune(program)) == 4 * len(params)
    assert sums(once) == 2 * len(params)
    flat = jax.tree.leaves(args)
    found = jax.jit(lambda *xs: evaluate_program(once, xs))(*flat)
    wanted = jax.jit(lambda *xs: evaluate_program(program, xs))(*flat)
    assert_same_bits(found, wanted)


def chosen(pred, x):
    return jnp.sum(jnp.square(jnp.where(pred, 1.0, x)))


def by_row(x):
    small = jnp.sum(x**2, 1, keepdims=True) <= 0
    return jnp.sum(jnp.where(small, 1.0, x) ** 2, 1)


UNLIKE = {
    "one truth value for each row": by_row,
    "one sum only": lambda x: chosen(x[0, 0] > 0, x),
    "no number": lambda x: jnp.sum(x**2) + jnp.sum(jnp.where(x[0, 0] > 0, x[:1], x) ** 2),
    "other axes": lambda x: jnp.sum(x**2, 0).sum() + chosen(x[0, 0] > 0, x),
    "no squares": lambda x: jnp.sum(x) + jnp.sum(jnp.where(x[0, 0] > 0, 1.0, x)),
    "integers": lambda x: chosen(x[0, 0] > 0, x.astype(int)) + jnp.sum(jnp.square(x.astype(int))),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_what_only_looks_alike_stays(name):
    program, _ = trace(UNLIKE[name], jnp.asarray(leaf(4, 3)))
    assert [op.name for op in norms_once(program).ops] == [op.name for op in program.ops]


def test_what_is_alike_otherwise_is_found():
    """Squares are written in three ways, and the truth value may be an argument."""
    ways = [jnp.square, lambda x: x * x, lambda x: lax.integer_pow(x, 2)]
    for way in ways:
        program, _ = trace(
            lambda x, p, way=way: jnp.sum(way(x)) + jnp.sum(way(jnp.where(p, 3.0, x))),
            *(jnp.asarray(leaf(4, 3)), jnp.asarray(True)),
        )
        assert sums(norms_once(program)) == 1
        args = jnp.asarray(leaf(4, 3)), jnp.asarray(True)
        (found,) = evaluate_program(norms_once(program), args)
        np.testing.assert_allclose(found, np.sum(np.square(args[0])) + 9 * 12, rtol=1e-6)


@pytest.mark.parametrize("name", ["lamb", "lars", "clip"])
def test_all_norms_of_a_step_share_one_all_reduce(name):
    params = {"a": leaf(16, 8), "b": leaf(8, 24)}
    (grads,) = batches(params, steps=1)
    clip = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.01))
    loop = training("checked", clip if name == "clip" else OPTIMIZERS[name](), params)
    (norms,) = of_kind(loop.collectives(grads), "all-reduce")
    # Of each weight and of its update; for a clip the sum over all gradients.
    assert norms.operand_bytes == 4 * (1 if name == "clip" else 2 * len(params))


def by_layer():
    """A trust ratio for each layer of the weights that are stacked by layer."""

    def scaled(u, p):
        dims = tuple(range(1, p.ndim))
        weight, update = (jnp.sqrt(jnp.sum(x**2, dims, keepdims=True)) for x in (p, u))
        return -0.01 * weight / update * u

    def update(updates, state, params):
        return jax.tree.map(scaled, updates, params), state

    return optax.chain(
        optax.scale_by_adam(),
        optax.GradientTransformation(lambda params: optax.EmptyState(), update),
    )


@pytest.mark.parametrize("formats", ["auto", "flat"])
@pytest.mark.parametrize("shape", [(24, 5, 7), (3, 16, 5)])
def test_stacked_layers_have_norms_of_their_own(shape, formats):
    params = {"layers": leaf(*shape) * np.arange(1, shape[0] + 1).reshape(-1, 1, 1)}
    params = jax.tree.map(lambda x: x.astype(np.float32), params)
    steps = batches(params)
    loop = training("checked", by_layer(), params, formats=formats).run(steps)
    wanted = reference(by_layer(), params, [mean_of(g) for g in steps])
    assert relative_error((loop.whole_params, loop.plain_state), wanted) <= 1e-5
    sums = of_kind(loop.collectives(steps[0]), "all-reduce")
    assert sum(c.operand_bytes for c in sums) <= 4 * 2 * shape[0]
