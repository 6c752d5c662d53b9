"""Train steps as users write them, untouched and through `shard_step`."""

import contextlib
import functools
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import wusharding as wus
from large_scale.hlo import Collective, collectives
from tests.corpus.case import Case, sharded_rows
from tests.runs import bytes_on_devices, mesh_of, of_kind, relative_error

Tree = Any
STEPS = 5
TOLERANCE = 1e-5

FILES = sorted(
    p.stem for p in (Path(__file__).parent / "corpus").glob("*.py") if p.stem not in ("case",)
)


class Setting:
    """A case in one mode: the step as its user calls it, and its arguments on the mesh."""

    def __init__(self, name: str, mode: str) -> None:
        module = importlib.import_module(f"tests.corpus.{name}")
        sizes = getattr(module, "MESH", {"data": 8})
        self.mesh: Mesh = mesh_of(sizes, auto=mode not in ("explicit", "checked"))
        self.mode = mode
        self.case: Case = module.make(self.mesh)
        self.step = self._wrapped(mode)

    def _wrapped(self, mode: str) -> Callable[..., Any]:
        case = self.case
        if mode == "pmap":
            return jax.pmap(case.step, axis_name="data", devices=list(self.mesh.devices.flat))
        if mode in ("auto", "explicit", "wrapped"):
            return case.step
        return jax.shard_map(
            case.step,
            mesh=self.mesh,
            in_specs=(*self.state_specs, *self.batch_specs),
            out_specs=(*self.state_specs, *case.metrics_specs),
            check_vma=mode == "checked",
        )

    @property
    def state_specs(self) -> tuple[Any, ...]:
        return self.case.state_specs or tuple(P() for _ in self.case.state)

    @property
    def batch_specs(self) -> tuple[Any, ...]:
        return self.case.batch_specs or tuple(
            P("data") if np.ndim(jax.tree.leaves(x)[0]) else P() for x in self.case.batch(0)
        )

    def state(self) -> tuple[Tree, ...]:
        """The first state, in memory of its own, since a step may donate it."""
        state = jax.tree.map(_copied, self.case.state)
        if self.mode == "pmap":
            return jax.tree.map(lambda x: jax.numpy.stack([x] * self.mesh.size), state)
        if self.mode == "wrapped":
            return jax.pmap(lambda s: s)(state)
        return self._put(state, self.state_specs)

    def batch(self, step: int) -> tuple[Tree, ...]:
        batch = self.case.batch(step)
        if self.mode == "pmap":
            return sharded_rows(batch, self.mesh.size)
        if self.mode == "wrapped":
            return batch
        return self._put(batch, self.batch_specs)

    def _put(self, trees: Sequence[Tree], specs: Sequence[Any]) -> tuple[Tree, ...]:
        return tuple(
            jax.device_put(
                tree,
                jax.tree.map(
                    lambda s: NamedSharding(self.mesh, s), spec, is_leaf=lambda s: isinstance(s, P)
                ),
            )
            for tree, spec in zip(trees, specs, strict=True)
        )

    def within(self) -> Any:
        return jax.set_mesh(self.mesh) if self.mode == "explicit" else contextlib.nullcontext()

    def run(self, step: Callable[..., Any], steps: int = STEPS) -> tuple[tuple[Tree, ...], list]:
        """The last state, and the metrics of all steps."""
        state, metrics = self.state(), []
        for n in range(steps):
            state, rest = self.advance(step, state, n)
            metrics.append(jax.device_get(rest))
        return state, metrics

    def advance(self, step: Any, state: tuple[Tree, ...], n: int) -> tuple[Any, Any]:
        out = step(*state, *self.batch(n))
        return out[: len(state)], out[len(state) :]


def is_key(x: Any) -> bool:
    return hasattr(x, "dtype") and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def _copied(x: Any) -> Any:
    return x if is_key(x) else np.asarray(x)


@functools.cache
def modes_of(name: str) -> tuple[str, ...]:
    module = importlib.import_module(f"tests.corpus.{name}")
    return module.MODES


PAIRS = [(name, mode) for name in FILES for mode in modes_of(name)]


@pytest.mark.parametrize(("name", "mode"), PAIRS)
def test_a_step_and_its_sharded_form_agree(name: str, mode: str) -> None:
    setting = Setting(name, mode)
    with setting.within():
        jitted = setting.step if hasattr(setting.step, "lower") else jax.jit(setting.step)
        wanted = setting.run(jitted)
        step = wus.shard_step(setting.step, mesh=setting.mesh)
        state, metrics = setting.run(step)
        # Of typed keys `jit` counts those that it is given and those that it returns, in any step.
        assert step._last.fun._cache_size() == 1 + any(map(is_key, jax.tree.leaves(state)))
        plain = tuple(step.unshard(part) for part in state)
        text = step.lower(*state, *setting.batch(STEPS)).compile().as_text()
    assert relative_error(without_nans((plain, metrics)), without_nans(wanted)) < TOLERANCE
    check_pieces(setting, state)
    sizes = setting.mesh.shape
    found = [c for c in collectives(text) if "data" in c.crossed_axes(sizes)]
    check_collectives(setting.case, state, found)


def without_nans(tree: Tree) -> Tree:
    """Arrays as (numbers, where they are no numbers)."""

    def split(x: Any) -> tuple[Any, Any]:
        if not jax.numpy.issubdtype(x.dtype, np.floating):
            return x, np.zeros(())
        nans = np.isnan(np.asarray(x))
        return np.where(nans, 0, x), nans

    return jax.tree.map(split, tree)


def held(case: Case, pick: Callable[..., Tree], state: tuple[Tree, ...]) -> int:
    """Bytes that a device holds of the arrays of more than one element."""
    arrays, plain = jax.tree.leaves(pick(*state)), jax.tree.leaves(pick(*case.state))
    several = [x for x, like in zip(arrays, plain, strict=True) if like.size > 1]
    return max(bytes_on_devices(several).values(), default=0)


def check_pieces(setting: Setting, state: tuple[Tree, ...]) -> None:
    """Each device holds 1/N of the auxiliary state, but for padding of a few elements an array."""
    case = setting.case
    before = held(case, case.aux, setting.state())
    limit = before / setting.mesh.shape["data"] + 16 * len(jax.tree.leaves(case.aux(*state)))
    after = held(case, case.aux, state)
    assert after <= limit < before / 2, (before, after)


def check_collectives(case: Case, state: tuple[Tree, ...], found: Sequence[Collective]) -> None:
    """Gradients are reduce-scattered and weights gathered; nothing of their size is all-reduced."""
    sent = {
        kind: sum(c.operand_bytes for c in of_kind(found, kind))
        for kind in ("all-reduce", "reduce-scatter")
    }
    gathered = sum(c.result_bytes for c in of_kind(found, "all-gather"))
    weights = held(case, case.weights, state)
    grads = held(case, case.scattered or case.weights, state)
    assert case.all_reduced_bytes < weights / 4
    assert sent["all-reduce"] <= case.all_reduced_bytes, sent
    assert sent["reduce-scatter"] >= grads, sent
    assert gathered >= weights
