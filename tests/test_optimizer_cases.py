"""The table of optimizers is complete and honest, and its gradients sum exactly in any order."""

import importlib
import itertools

import jax
import numpy as np
import optax
import optax.contrib
import pytest

from benchmarks import optimizer_cases
from benchmarks.optimizer_cases import (
    EXCLUDED,
    Case,
    cases,
    default_params,
    exported,
    exported_constructors,
    local_grads,
    mean_grads,
    resolve,
    run_reference,
)

CASES = cases()


def identities(names) -> set[int]:
    """What the names stand for; aliases of one object count as one."""
    return {id(resolve(name)) for name in names}


def covered(table: list[Case]) -> set[int]:
    return identities(name for case in table for name in case.exports)


def missing(table: list[Case], excluded: dict[str, str]) -> list[str]:
    accounted = covered(table) | identities(excluded)
    return [name for name, value in exported_constructors().items() if id(value) not in accounted]


def test_every_constructor_has_a_case_or_a_reason():
    assert missing(CASES, EXCLUDED) == []


@pytest.mark.parametrize(
    "name", ["optax.adam", "optax.contrib.dog", "optax.monitor", "optax.MultiSteps"]
)
def test_a_constructor_without_a_case_is_noticed(name):
    table = [case for case in CASES if name not in case.exports]
    assert name in missing(table, EXCLUDED)


def test_a_constructor_without_a_reason_is_noticed():
    excluded = {name: reason for name, reason in EXCLUDED.items() if "WrappedSchedule" not in name}
    assert missing(CASES, excluded) == ["optax.WrappedSchedule"]


def test_a_new_export_is_noticed(monkeypatch):
    def brand_new(learning_rate: float) -> optax.GradientTransformation:
        return optax.sgd(learning_rate)

    monkeypatch.setattr(optax, "brand_new", brand_new, raising=False)
    assert missing(CASES, EXCLUDED) == ["optax.brand_new"]


def test_constructors_are_told_from_other_functions():
    constructors = exported_constructors()
    annotated = {"optax.adam", "optax.contrib.muon", "optax.transforms.clip"}
    bare = {"optax.contrib.dog", "optax.monitor", "optax.scale_by_factored_rms"}
    indirect = {"optax.inject_hyperparams", "optax.MultiSteps", "optax.GradientTransformation"}
    assert annotated | bare | indirect <= constructors.keys()
    others = {"optax.global_norm", "optax.huber_loss", "optax.linear_schedule", "optax.microbatch"}
    assert others <= dict(exported()).keys() - constructors.keys()


def test_all_that_is_no_constructor_has_a_reason():
    accounted = covered(CASES) | identities(EXCLUDED)
    assert [name for name, value in exported() if id(value) not in accounted] == []


def test_nothing_both_has_a_case_and_is_excluded():
    assert not covered(CASES) & identities(EXCLUDED)
    assert all(EXCLUDED.values())
    assert EXCLUDED.keys() <= dict(exported()).keys()


def test_names_are_unique():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)


def recording(monkeypatch, name: str, calls: set[str]) -> None:
    """Puts in the export's place what notes that it is called."""
    module_name, _, attribute = name.rpartition(".")
    original = resolve(name)

    def call(*args, **kwargs):
        calls.add(name)
        return original(*args, **kwargs)

    call.__wrapped__ = original  # `inject_hyperparams` looks at the signature
    monkeypatch.setattr(importlib.import_module(module_name), attribute, call)


def uncalled(case: Case, monkeypatch) -> set[str]:
    calls: set[str] = set()
    with monkeypatch.context() as patch:
        for name in case.exports:
            recording(patch, name, calls)
        case.make()
    return set(case.exports) - calls


def test_cases_build_what_they_claim_to(monkeypatch):
    assert {case.name: left for case in CASES if (left := uncalled(case, monkeypatch))} == {}


def test_a_false_claim_is_noticed(monkeypatch):
    case = Case("liar", ("optax.sgd", "optax.adam"), lambda: optax.sgd(0.1))
    assert uncalled(case, monkeypatch) == {"optax.adam"}


def sums(stacked: np.ndarray) -> list[np.ndarray]:
    """The sum over the first axis, one by one in every order of up to four, then pairwise."""
    count = min(len(stacked), 4)
    orders = [
        (*order, *range(count, len(stacked))) for order in itertools.permutations(range(count))
    ]
    one_by_one = [np.add.accumulate(stacked[list(order)])[-1] for order in orders]
    halves = stacked
    while len(halves) > 1:
        halves = halves[::2] + halves[1::2]
    return [*one_by_one, np.add.accumulate(stacked[::-1])[-1], halves[0]]


def is_exact(stacked: np.ndarray) -> bool:
    total = stacked.astype(np.float64).sum(axis=0)
    return all(one.dtype == np.float32 and np.array_equal(one, total) for one in sums(stacked))


@pytest.mark.parametrize("num_replicas", [1, 2, 4, 8])
def test_local_gradients_sum_exactly_in_any_order(num_replicas):
    params = default_params()
    for step in range(3):
        for leaf in jax.tree.leaves(local_grads(params, step, num_replicas)):
            assert is_exact(np.asarray(leaf))


def test_an_inexact_sum_is_noticed():
    grads = np.asarray(local_grads(default_params(), 0, 8)["w"])
    assert not is_exact(grads / np.float32(3))


@pytest.mark.parametrize("num_replicas", [1, 2, 4, 8])
def test_the_mean_is_exact_and_never_zero(num_replicas):
    params = default_params()
    local = jax.tree.leaves(local_grads(params, 1, num_replicas))
    for stacked, mean in zip(
        local, jax.tree.leaves(mean_grads(params, 1, num_replicas)), strict=True
    ):
        exact = np.asarray(stacked, np.float64).sum(axis=0) / num_replicas
        assert np.array_equal(np.asarray(mean, np.float64), exact)
        assert np.all(exact != 0)
        assert np.all(np.asarray(stacked) != 0)


def test_gradients_differ_by_step_replica_and_element_but_not_by_count():
    params = default_params()
    first, second = local_grads(params, 0, 8), local_grads(params, 1, 8)
    assert not np.array_equal(first["w"], second["w"])
    assert len({np.asarray(one).tobytes() for one in first["w"]}) == 8
    assert np.array_equal(first["w"][:2], local_grads(params, 0, 2)["w"])
    assert not np.array_equal(first["w"], first["w"][:, ::-1])
    assert np.array_equal(first["w"], local_grads(params, 0, 8)["w"])


def test_gradients_of_the_objective_have_it_as_their_mean():
    params = default_params()
    expected = jax.grad(optimizer_cases.objective)(params)
    for num_replicas in (1, 2, 4, 8):
        local = optimizer_cases.objective_local_grads(params, 0, num_replicas)
        mean = jax.tree.map(lambda g: np.mean(g, axis=0), local)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), mean, expected)


def test_the_reference_is_optax_on_mean_gradients():
    case = next(case for case in CASES if case.name == "scale")
    params, _ = run_reference(case, steps=2, num_replicas=4)
    start = case.params()
    total = jax.tree.map(np.add, *[mean_grads(start, step, 4) for step in range(2)])
    expected = jax.tree.map(lambda p, g: p - 0.01 * g, start, total)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), params, expected)


def test_examples_of_all_replicas_reach_a_transformation_that_wants_them():
    case = next(case for case in CASES if case.name == "contrib.dpsgd")
    params = case.start()
    local, joined = case.local_grads(params, 0, 4), case.global_grads(params, 0, 4)
    assert local["w"].shape == (4, 2, 17, 12)
    assert np.array_equal(joined["w"], local["w"].reshape(8, 17, 12))
