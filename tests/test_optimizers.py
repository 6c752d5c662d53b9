"""The law over all of optax: ten sharded steps give what ten unsharded steps on one device give."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import wusharding as wus
from benchmarks.optimizer_cases import STEPS, Case, cases, run_reference

CASES = cases()


def relative_error(found: Any, wanted: Any) -> float:
    """The largest difference of two trees, each leaf's relative to its largest magnitude."""
    worst = 0.0
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    for a, b in pairs:
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        a, b = np.asarray(a), np.asarray(b)
        assert a.shape == b.shape and a.dtype == b.dtype
        if a.dtype.kind not in "fc":
            worst = max(worst, float(np.any(a != b)))
        elif a.size:
            scale = np.max(np.abs(b)) or 1.0
            worst = max(worst, float(np.max(np.abs(a - b)) / scale))
    return worst


@dataclasses.dataclass
class Run:
    """A sharded run: its result, and the HLO of one step."""

    params: Any
    state: Any
    stored: Any
    plan: Any


def run_manual(
    case: Case, mesh: Mesh, *, check_vma: bool, steps: int = STEPS, **options: Any
) -> Run:
    """Runs a case in `shard_map` on local gradients."""
    n = mesh.shape["data"]
    tx = wus.shard_updates(case.make(), mesh=mesh, per_example=case.per_example, **options)
    params = jax.device_put(case.start(), NamedSharding(mesh, P()))
    state = tx.init(params)
    specs = tx.state_specs(params)
    steps_by_functions: dict[Any, Any] = {}

    def make(functions: tuple[tuple[str, Any], ...]) -> Any:
        def step(grads: Any, state: Any, params: Any, arrays: Any) -> Any:
            local = jax.tree.map(lambda g: g[0], grads)
            updates, state = tx.update(local, state, params, **arrays, **dict(functions))
            return optax.apply_updates(params, updates), state

        return jax.jit(
            jax.shard_map(
                step,
                mesh=mesh,
                in_specs=(P("data"), specs, P(), P()),
                out_specs=(P(), specs),
                check_vma=check_vma,
            )
        )

    for i in range(steps):
        local = case.local_grads(params, i, n)
        args = case.update_args(i, case.global_grads(params, i, n), params)
        functions = tuple((k, v) for k, v in args.items() if callable(v))
        arrays = {k: v for k, v in args.items() if not callable(v)}
        if functions not in steps_by_functions:
            steps_by_functions[functions] = make(functions)
        grads = jax.device_put(local, NamedSharding(mesh, P("data")))
        arrays = jax.device_put(arrays, NamedSharding(mesh, P()))
        params, state = steps_by_functions[functions](grads, state, params, arrays)
    return Run(params, tx.unshard(state), state, tx.plan(params))


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_sharded_steps_equal_unsharded_ones(case: Case, mesh8_explicit: Mesh) -> None:
    if case.refuse:
        pytest.skip(case.refuse)
    params, state = run_reference(case)
    run = run_manual(case, mesh8_explicit, check_vma=True)
    assert relative_error(run.params, params) <= case.tolerance
    assert relative_error(run.state, state) <= case.tolerance
    assert jax.tree.all(jax.tree.map(lambda x: bool(jnp.all(x == x)), run.params))
