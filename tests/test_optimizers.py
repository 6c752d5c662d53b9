"""The law over all of optax: ten sharded steps give what ten unsharded steps on one device give."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh

import wusharding as wus
from benchmarks.optimizer_cases import Case, cases, run_reference
from benchmarks.optimizers import relative_error, run_sharded

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


def test_all_state_but_scalars_is_split(mesh8_explicit: Mesh) -> None:
    """No leaf of an elementwise optimizer stays replicated in silence."""
    for case in CASES:
        if case.kind != "elementwise" or case.loop.start is not Case.loop.start:
            continue
        plan = wus.shard_updates(
            case.make(), mesh=mesh8_explicit, per_example=case.per_example
        ).plan(jax.eval_shape(case.start))
        for leaf in plan.state:
            assert leaf.why or leaf.held_bytes < leaf.logical_bytes
            if leaf.why:
                assert leaf.logical_bytes <= 1024 * 8, (case.name, leaf)
