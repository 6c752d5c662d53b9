"""The law over all of optax: ten sharded steps give what ten unsharded steps on one device give."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import Mesh

import wusharding as wus
from benchmarks.optimizer_cases import Case, cases, run_reference
from benchmarks.optimizers import relative_error, run_sharded
from tests.runs import batches, leaf, mean_of, reference, training

CASES = cases()


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_sharded_steps_equal_unsharded_ones(case: Case, mesh8_explicit: Mesh) -> None:
    params, state = run_reference(case)
    run = run_sharded(case, mesh8_explicit)
    assert relative_error(run.params, params) <= case.tolerance
    assert relative_error(run.state, state) <= case.tolerance


def test_per_example_optimizers_refuse_reduced_gradients(mesh8_explicit: Mesh) -> None:
    for case in CASES:
        if case.per_example:
            with pytest.raises(wus.ShardingError, match=r"shape|traced"):
                wus.shard_updates(case.make(), mesh=mesh8_explicit).init(case.start())


def test_the_comparison_sees_a_difference() -> None:
    a = {"w": jnp.ones((3, 2)), "n": jnp.arange(3)}
    assert relative_error(a, a) == 0.0
    assert relative_error({**a, "w": a["w"].at[0, 0].add(1e-3)}, a) > 1e-4
    assert relative_error({**a, "n": a["n"] + 1}, a) == 1.0
    assert relative_error({**a, "w": a["w"].at[0, 0].set(jnp.nan)}, a) == float("inf")
    assert relative_error({**a, "w": jnp.ones((2, 3))}, a) == float("inf")


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_unchecked_shard_map_gives_the_same(case: Case, mesh8_explicit: Mesh) -> None:
    params, state = run_reference(case)
    run = run_sharded(case, mesh8_explicit, check_vma=False)
    assert relative_error(run.params, params) <= case.tolerance
    assert relative_error(run.state, state) <= case.tolerance


def preconditioned() -> optax.GradientTransformation:
    """Shampoo without its extras: fourth roots of the sums of `g g'` and `g' g`."""

    def init(params):
        return jax.tree.map(lambda p: tuple(jnp.eye(n) for n in p.shape), params)

    def inverse_root(a):
        values, vectors = jnp.linalg.eigh(a)
        return (vectors * values**-0.25) @ vectors.T

    def update(grads, state, params=None):
        leaves, treedef = jax.tree.flatten(grads)
        pairs = zip(leaves, treedef.flatten_up_to(state), strict=True)
        new = [(left + g @ g.T, right + g.T @ g) for g, (left, right) in pairs]
        steps = [
            -0.1 * inverse_root(left) @ g @ inverse_root(right)
            for g, (left, right) in zip(leaves, new, strict=True)
        ]
        return treedef.unflatten(steps), treedef.unflatten(new)

    return optax.GradientTransformation(init, update)


def test_a_matrix_preconditioner_is_computed_once_and_its_state_is_split() -> None:
    params = {"a": leaf(40, 36), "b": leaf(33, 45)}
    steps = batches(params, steps=2)
    loop = training("checked", preconditioned(), params).run(steps)
    wanted = reference(preconditioned(), params, [mean_of(g) for g in steps])
    assert relative_error((loop.whole_params, loop.plain_state), wanted) <= 1e-5
    assert relative_error(loop.whole_params, params) > 0.01
    plan = loop.tx.plan(loop.params)
    assert not plan.whole and plan.replicated_bytes == 0 and plan.storage_factor < 1.01
    jobs, owners = plan.owned
    assert jobs == 5 * len(params) and owners > 1  # two sums, two roots and the step of each


def test_all_state_but_scalars_is_split(mesh8_explicit: Mesh) -> None:
    """No leaf of an elementwise optimizer stays replicated in silence."""
    for case in CASES:
        if case.kind != "elementwise" or case.loop.start is not Case.loop.start:
            continue
        plan = wus.shard_updates(
            case.make(), mesh=mesh8_explicit, per_example=case.per_example
        ).plan(jax.eval_shape(case.start))
        for planned in plan.state:
            assert planned.why or planned.held_bytes < planned.logical_bytes
            if planned.why:
                assert planned.logical_bytes <= 1024 * 8, (case.name, planned)
