"""Optimizers that users write with `cond`, `switch`, `scan`, `while` and calls, on 8 devices."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from tests.runs import batches, reference, relative_error, training

Tree = Any
TOLERANCE = 2e-6


def params() -> Tree:
    """A leaf that needs padding, a vector, a scalar."""
    rng = np.random.default_rng(5)
    shapes = {"w": (17, 12), "b": (13,), "s": ()}
    return {k: rng.standard_normal(shape).astype(np.float32) for k, shape in shapes.items()}


def stateless(update: Callable[[Tree, Tree], Tree]) -> optax.GradientTransformation:
    return optax.stateless(update)


def each(update: Callable[[Any, Any], Any]) -> optax.GradientTransformation:
    """An update of each leaf by itself."""
    return optax.stateless(lambda grads, params: jax.tree.map(update, grads, params))


def with_history(
    update: Callable[[Any, Any], tuple[Any, Any]], length: int
) -> optax.GradientTransformation:
    """An update of each leaf that keeps its last `length` gradients, stacked."""

    def init(params: Tree) -> Tree:
        return jax.tree.map(lambda p: jnp.zeros((length, *p.shape)), params)

    def step(grads: Tree, state: Tree, params: Tree = None) -> tuple[Tree, Tree]:
        state = jax.tree.map(lambda h, g: jnp.concatenate([h[1:], g[None]]), state, grads)
        return jax.tree.map(update, grads, state), state

    return optax.GradientTransformation(init, step)


# -------------------------------------------------------------------------------- cond and switch


def clipped(grads: Tree, params: Tree) -> Tree:
    norm = optax.tree.norm(grads)
    return lax.cond(
        norm > 3.0,
        lambda g: jax.tree.map(lambda x: x * (3.0 / norm), g),
        lambda g: jax.tree.map(lambda x: -x, g),
        grads,
    )


def zeroed(grads: Tree, params: Tree) -> Tree:
    """One branch makes constants of its own."""
    return lax.cond(
        optax.tree.norm(grads) > 1e6,
        lambda: jax.tree.map(lambda x: -x, grads),
        lambda: jax.tree.map(lambda x: jnp.full_like(x, 2), grads),
    )


def norm_within(g: Any, p: Any) -> Any:
    """A branch that communicates: all devices take the same one."""
    return lax.cond(p.sum() > 0, lambda: g / (1 + jnp.linalg.norm(g)), lambda: p)


def chosen(g: Any, p: Any) -> Any:
    branches = [lambda x: x, lambda x: 2 * x, lambda x: x - x.mean()]
    return lax.switch(jnp.argmax(p.reshape(-1)) % 4, branches, g)


def sorted_within(g: Any, p: Any) -> Any:
    """A branch that needs the whole."""
    return lax.cond(
        jnp.sum(g) > 0,
        lambda: jnp.sort(g.reshape(-1)).reshape(g.shape),
        lambda: jnp.cumsum(g.reshape(-1)).reshape(g.shape),
    )


# -------------------------------------------------------------------------------------------- scan


def decayed(g: Any, history: Any) -> Any:
    """The carry starts as zeros, the same everywhere, and becomes split."""
    return lax.scan(lambda c, h: (0.5 * c + h, None), jnp.zeros_like(g), history)[0]


def averages(g: Any, history: Any) -> Any:
    """Stacked results, backwards, with a constant and a count."""

    def body(carry: Any, h: Any) -> Any:
        n, total = carry
        return (n + 1, total + h), (total + h * g) / (n + 1)

    start = (jnp.float32(0), jnp.zeros_like(g))
    (n, total), means = lax.scan(body, start, history, reverse=True, unroll=2)
    return total / n + means[0] - means[-1]


def norms_of_turns(g: Any, history: Any) -> Any:
    """A reduction in every turn."""

    def body(c: Any, h: Any) -> Any:
        norm = jnp.linalg.norm(c)
        return c / (1 + norm) + h, norm

    c, norms = lax.scan(body, g, history)
    return c * norms.sum() + norms.max()


def counted(g: Any, p: Any) -> Any:
    """No operand is scanned over."""
    return lax.scan(lambda c, _: (c - 0.1 * c**3, None), g, length=3)[0]


def rows(g: Any, p: Any) -> Any:
    """Scanned over a dim that is split."""
    if g.ndim < 2:
        return g
    total, ys = lax.scan(lambda c, row: (c + row, c * row), jnp.zeros_like(g[0]), g)
    return ys + total


def sorted_in_turn(g: Any, history: Any) -> Any:
    """A turn that needs the whole."""

    def body(c: Any, h: Any) -> Any:
        return jnp.sort((c + h).reshape(-1)).reshape(c.shape), None

    return lax.scan(body, jnp.zeros_like(g), history)[0]


# ------------------------------------------------------------------------------------------- while


def shrunk(grads: Tree, params: Tree) -> Tree:
    """Halved until the norm is small: the condition reduces."""
    return lax.while_loop(
        lambda g: optax.tree.norm(g) > 1.0, lambda g: jax.tree.map(lambda x: x / 2, g), grads
    )


def backtracked(g: Any, p: Any) -> Any:
    """A step size and a count go round with a split value; a constant is split as well."""

    def condition(carry: Any) -> Any:
        size, turns, x = carry
        return (jnp.sum((p + size * x) ** 2) > 0.9 * jnp.sum(p**2)) & (turns < 4)

    def body(carry: Any) -> Any:
        size, turns, x = carry
        return size * 0.5, turns + 1, x - size * p

    size, turns, x = lax.while_loop(condition, body, (jnp.float32(1), 0, g))
    return size * x + turns


def repeated(g: Any, p: Any) -> Any:
    return lax.fori_loop(0, 3, lambda i, x: x - 0.1 * i * p * jnp.sign(x), g)


def sorted_while(g: Any, p: Any) -> Any:
    def body(carry: Any) -> Any:
        n, x = carry
        return n + 1, jnp.sort(x.reshape(-1)).reshape(x.shape) * 0.5

    return lax.while_loop(lambda carry: carry[0] < 2, body, (0, g))[1]


# -------------------------------------------------------------------------------------- both


def cond_in_scan(g: Any, history: Any) -> Any:
    def body(c: Any, h: Any) -> Any:
        far = jnp.sum(jnp.abs(h)) > jnp.sum(jnp.abs(c))
        return lax.cond(far, lambda: c + h, lambda: c * 0.5), far

    c, fars = lax.scan(body, g, history)
    return c * (1 + fars.sum())


def scan_in_while(g: Any, history: Any) -> Any:
    def body(carry: Any) -> Any:
        n, c = carry
        return n + 1, lax.scan(lambda c, h: (c + h / n, None), c, history)[0]

    return lax.while_loop(lambda carry: carry[0] < 3, body, (1, g))[1]


# ------------------------------------------------------------------------------------------- calls


def composed(g: Any, p: Any) -> Any:
    return lax.composite(lambda x, *, k: jnp.tanh(k * x), "an.operation")(g + p, k=2.0)


@jax.custom_batching.custom_vmap
def softsign(x: Any) -> Any:
    return x / (1 + jnp.abs(x))


@softsign.def_vmap
def _(size: int, batched: Any, x: Any) -> Any:
    return softsign(x), batched[0]


def called(g: Any, p: Any) -> Any:
    """A call in a call, of rematerialized, batched and differentiated functions of one's own."""
    return jax.jit(lambda x: jax.checkpoint(jnp.sin)(softsign(x)))(g) + jax.nn.relu(p)


def held_back(grads: Tree, params: Tree) -> Tree:
    """Arrays of several shapes, a sum and a constant wait for each other."""
    norm = optax.tree.norm(grads)
    grads, norm, _ = lax.optimization_barrier((grads, norm, jnp.arange(3.0)))
    return jax.tree.map(lambda g: g / (1 + norm), grads)


OPTIMIZERS = {
    "clipped": stateless(clipped),
    "zeroed": stateless(zeroed),
    "norm_within": each(norm_within),
    "chosen": each(chosen),
    "sorted_within": each(sorted_within),
    "decayed": with_history(decayed, 3),
    "averages": with_history(averages, 3),
    "norms_of_turns": with_history(norms_of_turns, 3),
    "counted": each(counted),
    "rows": each(rows),
    "sorted_in_turn": with_history(sorted_in_turn, 3),
    "shrunk": stateless(shrunk),
    "backtracked": each(backtracked),
    "repeated": each(repeated),
    "sorted_while": each(sorted_while),
    "cond_in_scan": with_history(cond_in_scan, 3),
    "scan_in_while": with_history(scan_in_while, 3),
    "composed": each(composed),
    "called": each(called),
    "held_back": stateless(held_back),
}


# What no piece can do: gathered, or given to an owner.
NEED_THE_WHOLE = {
    "chosen": {"argmax"},
    "sorted_within": {"sort", "cumsum"},
    "sorted_in_turn": {"owner"},
    "sorted_while": {"owner"},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("context", ["checked", "unchecked"])
def test_control_flow_on_shards_equals_that_on_the_whole(name: str, context: str) -> None:
    optimizer, start = OPTIMIZERS[name], params()
    grads = batches(start, steps=2)
    loop = training(context, optimizer, start).run(grads)
    means = [jax.tree.map(lambda g: g.mean(0), g) for g in grads]
    wanted_params, wanted_state = reference(optimizer, start, means)
    assert relative_error(loop.whole_params, wanted_params) <= TOLERANCE
    assert relative_error(loop.plain_state, wanted_state) <= TOLERANCE


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_control_flow_runs_on_pieces(name: str) -> None:
    plan = training("checked", OPTIMIZERS[name], params()).tx.plan(params())
    found = {problem.primitive for problem in plan.whole}
    found |= {"owner"} if any(plan.owned) else set()
    assert found == NEED_THE_WHOLE.get(name, set())
