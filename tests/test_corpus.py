"""Train steps as users write them, untouched and through `shard_step`."""

import collections
import contextlib
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
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
from wusharding.jaxprs import CROSSINGS

Tree = Any
STEPS = 5

FILES = sorted(
    p.stem for p in (Path(__file__).parent / "corpus").glob("*.py") if p.stem not in ("case",)
)


# What the models of the corpus compute, and what of it some updates do as well: the matrix work of
# an optimizer, and putting rows of a gradient that is summed where they belong.
FORWARD_ONLY = frozenset(
    (
        "dot_general",
        "conv_general_dilated",
        "gather",
        "scatter-add",
        "tanh",
        "exp",
        "erf",
        "logistic",
    )
)
IN_UPDATES = {"muon": {"dot_general"}, "chunked_loss": {"scatter-add"}}

TYPED = ("explicit", "checked")  # modes in which types tell how arrays lie


class Setting:
    """A case in one mode: the step as its user calls it, and its arguments on a mesh."""

    def __init__(self, name: str, mode: str, sizes: Mapping[str, int] | None = None) -> None:
        self.mesh: Mesh = mesh_of(sizes or mesh_sizes(name), auto=mode not in TYPED)
        self.mode = mode
        self.case: Case = importlib.import_module(f"tests.corpus.{name}").make(self.mesh)
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


def mesh_sizes(name: str) -> Mapping[str, int]:
    """The axes of the mesh that a case is for."""
    module = importlib.import_module(f"tests.corpus.{name}")
    return getattr(module, "MESH", {"data": 8})


@functools.cache
def modes_of(name: str) -> tuple[str, ...]:
    module = importlib.import_module(f"tests.corpus.{name}")
    return module.MODES


# Steps that take long to compile: of these `make test` runs the first mode alone.
LONG = (
    "lamb_bert",
    "lars_resnet",
    "linen_train_state",
    "muon",
    "transformer_manual",
    "gan",
    "frozen_after",
    "side_by_side",
)

PAIRS = [
    pytest.param(name, mode, marks=[pytest.mark.slow] if name in LONG and i else [])
    for name in FILES
    for i, mode in enumerate(modes_of(name))
]


@pytest.mark.parametrize(("name", "mode"), PAIRS)
def test_a_step_and_its_sharded_form_agree(name: str, mode: str) -> None:
    setting = Setting(name, mode)
    step, state, sent = agreeing(setting, STEPS)
    # Of typed keys `jit` counts those that it is given and those that it returns, in any step.
    assert step._last.fun._cache_size() == 1 + any(map(is_key, jax.tree.leaves(state)))
    assert FORWARD_ONLY & update_ops(step).keys() <= IN_UPDATES.get(name, set())
    check_pieces(setting, state)
    sizes = setting.mesh.shape
    found = [c for c in sent if "data" in c.crossed_axes(sizes)]
    check_collectives(setting.case, state, found)
    if not any(c.in_loop for c in found) and len(sizes) == 1:
        check_plan(step.plan, found, widened=name in SIXTEEN_BITS)


# Those that a second replica axis is added to: all of one data axis; the first few in `make test`.
WITH_COPIES = [
    pytest.param(
        name,
        mode,
        marks=[]
        if name in ("accumulate_jit", "scan_steps", "tied_embedding")
        else pytest.mark.slow,
    )
    for name in FILES
    for mode in modes_of(name)
    if mode not in ("pmap", "wrapped") and mesh_sizes(name) == {"data": 8}
]


@pytest.mark.parametrize(("name", "mode"), WITH_COPIES)
def test_a_second_replica_axis_along_which_all_is_equal(name: str, mode: str) -> None:
    """Each device takes its part of a gradient there, and scatters it along the first axis."""
    setting = Setting(name, mode, {"data": 4, "copies": 2})
    _, state, sent = agreeing(setting, 2, axis=("data", "copies"))
    check_collectives(setting.case, state, sent, copies=2)
    for c in of_kind(sent, "reduce-scatter"):
        assert c.crossed_axes(setting.mesh.shape) == {"data"}


def agreeing(
    setting: Setting, steps: int, **options: Any
) -> tuple[Any, tuple[Tree, ...], list[Collective]]:
    """The sharded step, which does what the step as written does, its state, and what it sends."""
    with setting.within():
        jitted = setting.step if hasattr(setting.step, "lower") else jax.jit(setting.step)
        wanted = setting.run(jitted, steps)
        step = wus.shard_step(setting.step, mesh=setting.mesh, **options)
        state, metrics = setting.run(step, steps)
        plain = tuple(step.unshard(part) for part in state)
        text = step.lower(*state, *setting.batch(steps)).compile().as_text()
    assert (
        relative_error(without_nans((plain, metrics)), without_nans(wanted))
        < setting.case.tolerance
    )
    return step, state, collectives(text)


# Gradients of these are scattered in bfloat16, which the CPU backend widens to float32.
SIXTEEN_BITS = ("psum_divided_bf16", "mixed_precision")


def check_plan(plan: wus.StepPlan, found: Sequence[Collective], *, widened: bool) -> None:
    """What the plan says of the bytes of each kind of collective is what is compiled."""
    for kind in ("reduce-scatter", "all-gather", "all-reduce", "all-to-all"):
        planned = sum(row.operand_bytes for row in plan.traffic if row.kind == kind)
        real = sum(c.operand_bytes for c in of_kind(found, kind))
        if widened and kind == "reduce-scatter":
            planned *= 2
        assert abs(planned - real) <= 0.01 * real, (kind, planned, real)


def update_ops(step: Any) -> collections.Counter[str]:
    """The operations of the update that was found in the step last called, by name.

    The crossings of `shard_map` and annotations compute nothing.
    """
    update = step._last.update
    names = (op.name for op in update.region.update(update.program))
    return collections.Counter(n for n in names if n not in (*CROSSINGS, "copy"))


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


def check_collectives(
    case: Case, state: tuple[Tree, ...], found: Sequence[Collective], copies: int = 1
) -> None:
    """Gradients are reduce-scattered and weights gathered; nothing of their size is all-reduced.

    Of a gradient that `copies` devices have alike each one sends its part.
    """
    sent = {
        kind: sum(c.operand_bytes for c in of_kind(found, kind))
        for kind in ("all-reduce", "reduce-scatter")
    }
    gathered = sum(c.result_bytes for c in of_kind(found, "all-gather"))
    weights = held(case, case.weights, state)
    grads = held(case, case.scattered or case.weights, state)
    assert case.all_reduced_bytes < weights / 4
    assert sent["all-reduce"] <= case.all_reduced_bytes, sent
    assert sent["reduce-scatter"] >= grads / copies, sent
    assert gathered >= weights


# ------------------------------------------------------------------------------- what is the update

# Written by hand from the steps' own lines: what is done to each array, or once.
_MEAN = {"div": 1}  # what is left of `pmean`
_MOMENTUM = {"mul": 1, "add": 1}  # decay * trace + gradient
_MOVE = {"mul": 1, "add": 1}  # params + -rate * direction
_ADAM = {
    # Moments 0.9 * m + 0.1 * g and 0.999 * v + 0.001 * g**2; m / c1 / (sqrt(v / c2 + 0) + eps).
    "mul": 4,
    "add": 2 + 2,
    "integer_pow": 2,
    "div": 3,
    "sqrt": 1,
}
_ADAM_ONCE = {"lt": 1, "add": 1, "select_n": 1, "pow": 2, "sub": 2}  # the counter, 1 - decay**count

UPDATES = {
    # Two weights and their biases, which are not decayed, in each of three layers; the loss.
    ("handwritten_momentum", "unchecked"): [
        (3, {"div": 1, "mul": 3, "add": 2, "sub": 1}),
        (3, {"div": 1, "mul": 2, "add": 1, "sub": 1}),
        (1, _MEAN),
    ],
    # The backward pass ends in two transposed matrices, and a bias's sum, which drops dims.
    ("handwritten_adam", "auto"): [
        (3, {"mul": 5 + 1, "add": 2 + 1, "sqrt": 1, "div": 1, "sub": 1}),
        (1, {"add": 1, "convert_element_type": 1, "pow": 2, "sub": 2, "sqrt": 1, "mul": 1}),
        (1, {"div": 1}),
        (2, {"transpose": 1}),
        (1, {"reshape": 1, "reduce_sum": 1}),
        (1, _MEAN),
    ],
    # A cast back, the division by hand, Nesterov's momentum.
    ("psum_divided_bf16", "unchecked"): [
        (3, {"convert_element_type": 1, "div": 1}),
        (3, _MOMENTUM),
        (3, _MOMENTUM),
        (3, _MOVE),
        (1, _MEAN),
    ],
    ("pmean_fused", "unchecked"): [(3, _MEAN), (3, _ADAM), (1, _ADAM_ONCE), (3, _MOVE), (1, _MEAN)],
    # Adam for the student, and the teacher's average of it.
    ("ema_in_loss", "unchecked"): [
        (3, _MEAN),
        (3, _ADAM),
        (1, _ADAM_ONCE),
        (3, _MOVE),
        (3, {"mul": 2, "add": 1}),
        (1, _MEAN),
    ],
    # Two arrays of the head; the backbone is in no update.
    ("frozen_outside", "unchecked"): [
        (2, _MEAN),
        (2, {"mul": 2, "add": 1, "sign": 1}),
        (2, {"integer_pow": 1, "mul": 2, "add": 1}),
        (1, {"lt": 1, "add": 1, "select_n": 1}),
        (2, {"mul": 1, "add": 1}),
        (2, _MOVE),
        (1, _MEAN),
    ],
    # In the loop's body, which also counts.
    ("fori_steps", "unchecked"): [
        (3, _MEAN),
        (3, _MOMENTUM),
        (3, _MOVE),
        (1, _MEAN),
        (1, {"add": 1}),
    ],
}


@pytest.mark.parametrize(("name", "mode"), UPDATES)
def test_the_update_is_what_is_written_after_the_gradients(name: str, mode: str) -> None:
    setting = Setting(name, mode)
    step = wus.shard_step(setting.step, mesh=setting.mesh)
    step.shard_shapes(*setting.state(), *setting.batch(0))
    wanted = collections.Counter[str]()
    for count, names in UPDATES[name, mode]:
        for op, times in names.items():
            wanted[op] += count * times
    assert update_ops(step) == wanted


# -------------------------------------------------------------------------------- negative controls


def test_the_checks_find_what_is_not_sharded() -> None:
    setting = Setting("pmean_fused", "unchecked")
    jitted = jax.jit(setting.step)
    state, _ = setting.run(jitted, 1)
    with pytest.raises(AssertionError):
        check_pieces(setting, state)
    text = jitted.lower(*state, *setting.batch(0)).compile().as_text()
    with pytest.raises(AssertionError, match="all-reduce"):
        check_collectives(setting.case, state, collectives(text))
