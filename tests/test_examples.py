"""Every example, a few steps of it: equal to the loop before the change, with less state."""

import ast
import contextlib
import functools
import importlib
import io
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import common
from tests.runs import compiled_functions, of_kind, relative_error

ROOT = Path(__file__).parents[1]
# The functions that each compiles, and whether its gradients are reduce-scattered.
EXAMPLES = {
    "linen_train_state": (["jit(train_step)"], False),
    "nnx_jit": (["jit(train_step)"], False),
    # What pmap maps has one name: the first makes the state, the second takes the steps.
    "pmap_replicate": (["jit(_fun)", "jit(_fun)"], True),
    "explicit_mesh": (["jit(train_step)"], True),
    "scan_steps": (["jit(train_steps)"], True),
    "plain_pytree": (["jit(train_step)"], True),
    "equinox_loop": (["jit(train_step)"], False),
}
STEPS = 5
PAGE = (ROOT / "docs" / "flax.md").read_text()
# Of each loop on the page: what becomes of its gradients, and bytes of state, now and before.
TABLE = {
    name: (gradients, int(now.replace(",", "")), int(was.replace(",", "")))
    for name, gradients, now, was in re.findall(
        r"\| `(\w+)` \| ([^|]*) \| ([\d,]+) B, was ([\d,]+) B \|", PAGE
    )
}


@functools.cache
def run(name: str, *arguments: str) -> tuple[common.Report, list[str], str]:
    """What an example returns, compiled before its report compiled the step again, and printed."""
    example = importlib.import_module(f"examples.{name}")
    report, seen, printed = common.report, [], io.StringIO()

    def watched(*args: Any) -> common.Report:
        seen.extend(compiled)
        return report(*args)

    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(printed),
        compiled_functions() as compiled,
    ):
        patch.setattr(common, "report", watched)
        done = example.main(["--steps", str(STEPS), *arguments])
    return done, seen, printed.getvalue()


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_equals_the_loop_before(name):
    functions, scatters = EXAMPLES[name]
    sharded, compiled, printed = run(name)
    plain, _, _ = run(name, "--replicated")
    np.testing.assert_allclose(sharded.losses, plain.losses, rtol=1e-4)
    assert len(sharded.losses) == STEPS
    assert relative_error(sharded.params, plain.params) <= 1e-4
    assert sharded.state_bytes <= 1.1 * plain.state_bytes / jax.device_count()
    if name in TABLE:
        gradients, now, was = TABLE[name]
        assert gradients.startswith("reduce-scattered") == scatters
        assert (sharded.state_bytes, plain.state_bytes) == (now, was)
    assert f"optimizer state  {sharded.state_bytes:,} B on each device" in printed
    assert [f for f in compiled if f in functions] == functions
    grad_bytes = sum(x.nbytes for x in jax.tree.leaves(sharded.params))
    reduced, scattered = (
        sum(c.operand_bytes for c in of_kind(sharded.collectives, kind))
        for kind in ("all-reduce", "reduce-scatter")
    )
    if scatters:
        assert scattered >= grad_bytes > 10 * reduced
    else:
        assert reduced >= grad_bytes and not scattered
    assert sum(c.operand_bytes for c in of_kind(plain.collectives, "all-reduce")) >= grad_bytes


def test_a_whole_step_scatters_what_xla_reduces():
    done, compiled, _ = run("linen_train_state", "--whole-step")
    plain, _, _ = run("linen_train_state", "--replicated")
    np.testing.assert_allclose(done.losses, plain.losses, rtol=1e-4)
    assert relative_error(done.params, plain.params) <= 1e-4
    assert (done.state_bytes, plain.state_bytes) == TABLE["linen_train_state"][1:]
    assert f"`linen_train_state --whole-step` | reduce-scattered | {done.state_bytes:,} B" in PAGE
    assert compiled.count("jit(train_step)") == 1  # the name of the user's own function
    grad_bytes = sum(x.nbytes for x in jax.tree.leaves(done.params))
    scattered = sum(c.operand_bytes for c in of_kind(done.collectives, "reduce-scatter"))
    reduced = sum(c.operand_bytes for c in of_kind(done.collectives, "all-reduce"))
    assert scattered + reduced >= grad_bytes > 100 * reduced


def test_low_precision_weights_train_as_full_ones_do():
    done, _, _ = run("explicit_mesh", "--bfloat16")
    assert {x.dtype for x in jax.tree.leaves(done.params)} == {jnp.dtype(jnp.bfloat16)}
    full, _, _ = run("explicit_mesh")
    np.testing.assert_allclose(done.losses, full.losses, rtol=0.05)


def test_the_page_has_a_row_and_a_change_for_each_loop():
    assert len(TABLE) == 5 and TABLE.keys() < EXAMPLES.keys()
    assert set(re.findall(r"```diff (\w+)", PAGE)) == TABLE.keys()


def test_all_examples_are_run_here_and_say_how_they_are_started():
    scripts = {p.stem: p for p in (ROOT / "examples").glob("*.py")}
    scripts = {n: p for n, p in scripts.items() if n not in ("__init__", "common")}
    assert scripts.keys() == EXAMPLES.keys()
    for name, path in scripts.items():
        text = ast.get_docstring(ast.parse(path.read_text()))
        assert f"python -m examples.{name} [--steps 50] [--replicated]" in text


# --------------------------------------------------------------------------------- docs/flax.md


@pytest.mark.parametrize(("name", "diff"), re.findall(r"```diff (\w+)\n(.*?)```", PAGE, re.DOTALL))
def test_what_the_page_changes_is_in_the_example(name, diff):
    """Kept and added lines; of an example's comments only those that the page shows."""
    script = (ROOT / "examples" / f"{name}.py").read_text().splitlines()
    script = [text.strip() for line in script for text in (line, line.split("  #")[0])]
    lines = [line for line in diff.splitlines() if line]
    assert {line[0] for line in lines} <= set("+- ")
    assert [line for line in lines if line[0] != "-" and line[1:].strip() not in script] == []
