"""Replica axes along which gradients are equal: the batch is split over the others only."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import wusharding as wus
from large_scale.hlo import Collective, collectives
from tests.large_scale.training import along, placed
from tests.runs import groups_of, leaf, mesh_of, of_kind, reference, relative_error

Tree = Any
GRID = {"a": 4, "b": 2}
TX = optax.sgd(0.1, momentum=0.9)  # unlike Adam it does not forgive a factor
ROWS = 16


def weights() -> Tree:
    """Padded and not, small and large, read by rows and multiplied."""
    shapes = {"table": (30, 130), "first": (130, 24), "bias": (24,), "second": (24, 3, 5)}
    return {name: leaf(*shape) / 4 for name, shape in shapes.items()}


def loss_of(params: Tree, batch: Tree) -> jax.Array:
    rows, wanted = batch
    spec = jax.typeof(rows).sharding.spec
    where = P(*spec, None) if any(spec) else None  # on explicit meshes JAX asks for it
    looked_up = params["table"].at[rows].get(out_sharding=where)
    hidden = jnp.tanh(looked_up @ params["first"] + params["bias"])
    return jnp.mean((jnp.tensordot(hidden, params["second"], 1) - wanted) ** 2)


def data(seed: int) -> Tree:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 30, ROWS).astype(np.int32), leaf(ROWS, 3, 5, seed=seed)


def global_step(params: Tree, state: Tree, batch: Tree) -> tuple[Tree, Tree]:
    updates, state = TX.update(jax.grad(loss_of)(params, batch), state, params)
    return optax.apply_updates(params, updates), state


def in_shard_map(split: str, summed: tuple[str, ...], mesh: Mesh) -> Callable[..., Any]:
    """The step of one replica, which averages over `summed`: over axes where all is equal too."""

    def step(params: Tree, state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        grads = lax.pmean(jax.grad(loss_of)(params, batch), summed)
        updates, state = TX.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    specs = (P(), P(), P(split)), (P(), P())
    return jax.shard_map(step, mesh=mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False)


def run(
    step: Callable[..., Any], mesh: Mesh, split: Any, **options: Any
) -> tuple[float, list[Collective]]:
    """The error of steps whose batch is split over `split`, and the collectives of one."""
    options = {"axis": mesh.axis_names, **options}
    sharded = wus.shard_step(step, mesh=mesh, **options)
    params, state = placed(weights(), P(), mesh), TX.init(weights())
    batches = [data(seed) for seed in range(3)]
    with jax.set_mesh(mesh):
        args = sharded.shard(params, state, placed(batches[0], P(split), mesh))
        compiled = sharded.lower(*args).compile()
        params, state, _ = args
        for batch in batches:
            params, state = compiled(params, state, placed(batch, P(split), mesh))
        found = jax.tree.map(np.asarray, (sharded.unshard(params), sharded.unshard(state)))
    sent = collectives(compiled.as_text())
    if options.get("target") != "tpu" and options.get("accumulate") != "shards":
        rows = [row for row in sharded.plan.traffic if row.kind == "reduce-scatter"]
        assert sum(row.operand_bytes for row in rows) == scattered(sent)
    assert "not-scattered" not in {finding.code for finding in sharded.plan.findings}
    wanted = reference(TX, weights(), batches, jax.grad(loss_of))
    return relative_error(found, wanted), sent


def padded_bytes() -> int:
    """Of all gradients, of which each of 8 shards has as many elements as another."""
    return sum(8 * math.ceil(w.size / 8) * 4 for w in weights().values())


def scattered(found: list[Collective]) -> int:
    return sum(c.operand_bytes for c in of_kind(found, "reduce-scatter"))


def reduced(found: list[Collective]) -> int:
    """Bytes of all-reduces, without those of a loss."""
    return sum(c.operand_bytes for c in of_kind(found, "all-reduce") if c.operand_bytes > 4)


FORMS = {
    "one bucket": {},
    "each alone": {"bucket_bytes": 1},
    "many buckets": {"bucket_bytes": 512},
    "tiles": {"target": "tpu"},
    "lines": {"lines": {"a": wus.lines_of_grid((2, 2))[::-1]}},
    "other order": {"axis": ("b", "a")},
}


@pytest.mark.parametrize(
    ("form", "split"),
    [(form, "a") for form in FORMS]
    + [("each alone", "b"), ("lines", "b")]
    + [pytest.param(form, "b", marks=pytest.mark.slow) for form in ("many buckets", "other order")],
)
def test_gradients_are_scattered_over_the_axes_that_they_are_summed_over(form, split):
    mesh = mesh_of(GRID, auto=True)
    error, found = run(global_step, mesh, split, formats="flat", **FORMS[form])
    assert error <= 1e-6
    assert reduced(found) == 0
    groups = along(mesh, split)
    lines = form == "lines" and split == "a"
    for c in of_kind(found, "reduce-scatter"):
        assert c.group_size == 2 if lines else groups_of(c) == groups
    if form == "tiles":
        return  # padded to tiles
    # Each device takes its part along the other axis first: only that is sent.
    sent = padded_bytes() * GRID[split] // 8
    assert scattered(found) == (sent + sent // 2 if lines else sent)


def test_control_the_step_as_written_and_a_batch_that_is_split_over_both():
    """What the test above looks for is there where it should be."""
    mesh = mesh_of(GRID, auto=True)
    params, state = placed(weights(), P(), mesh), placed(TX.init(weights()), P(), mesh)
    args = params, state, placed(data(0), P("a"), mesh)
    plain = collectives(jax.jit(global_step).lower(*args).compile().as_text())
    assert reduced(plain) == sum(w.nbytes for w in weights().values())
    error, found = run(global_step, mesh, ("a", "b"), formats="flat")
    assert error <= 1e-6 and reduced(found) == 0
    assert scattered(found) == padded_bytes() + padded_bytes() // 4


@pytest.mark.parametrize("summed", [("a",), ("a", "b")])
def test_sums_in_shard_map(summed):
    mesh = mesh_of(GRID)
    error, found = run(in_shard_map("a", summed, mesh), mesh, "a", formats="dim")
    assert error <= 1e-6 and reduced(found) == 0
    assert all(groups_of(c) == along(mesh, "a") for c in of_kind(found, "reduce-scatter"))
    assert scattered(found)


@pytest.mark.parametrize("split", ["c", ("a", "c"), ("b", "c")])
def test_three_axes(split):
    mesh = mesh_of({"a": 2, "b": 2, "c": 2}, auto=True)
    error, found = run(global_step, mesh, split, formats="flat")
    assert error <= 1e-6 and reduced(found) == 0
    sent = padded_bytes() * 2 ** len(split) // 8
    assert scattered(found) == (sent if split == "c" else sent + sent // 2)


def test_gradients_that_are_summed_over_different_axes():
    """Rows of `x` lie on all devices, and those of `z` on four, twice."""
    mesh = mesh_of(GRID, auto=True)
    params = {"w": jnp.asarray(leaf(17, 8)), "v": jnp.asarray(leaf(16, 8, seed=1))}
    batch = leaf(ROWS, 17, seed=2), leaf(8, 16, seed=3)

    def loss(params: Tree, batch: Tree) -> jax.Array:
        x, z = batch
        return jnp.mean(jnp.tanh(x @ params["w"]) ** 2) + jnp.mean(jnp.tanh(z @ params["v"]) ** 2)

    def step(params: Tree, state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        updates, state = TX.update(jax.grad(loss)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    sharded = wus.shard_step(step, mesh=mesh, axis=("a", "b"), formats="flat")
    args = placed(params, P(), mesh), placed(TX.init(params), P(), mesh)
    args = *args, placed(batch, (P(("a", "b")), P("a")), mesh)
    found = jax.tree.map(np.asarray, sharded.unshard(sharded(*args)))
    assert relative_error(found, reference(TX, params, [batch], jax.grad(loss))) <= 1e-6
    sent = collectives(sharded.lower(*args).compile().as_text())
    assert reduced(sent) == 0
    v, w = 4 * 16 * 8, 4 * 17 * 8
    by_axis = {
        axis: sum(
            c.operand_bytes for c in of_kind(sent, "reduce-scatter") if groups_of(c) == groups
        )
        for axis in GRID
        if (groups := along(mesh, axis))
    }
    assert by_axis == {"a": w + v // 2, "b": w // 4}


def test_sums_on_an_explicit_mesh():
    mesh = mesh_of(GRID)
    error, found = run(global_step, mesh, "b")
    assert error <= 1e-6 and reduced(found) == 0
    assert all(groups_of(c) == along(mesh, "b") for c in of_kind(found, "reduce-scatter"))
    assert scattered(found)


def test_shards_are_taken_before_they_are_summed_over_another_axis():
    """With `shard_axis="b"` and a batch split over `a` nothing can be scattered."""
    mesh = mesh_of(GRID, auto=True)
    error, found = run(global_step, mesh, "a", shard_axis="b", formats="flat")
    assert error <= 1e-6 and scattered(found) == 0
    half = sum(math.ceil(w.size / 2) * 4 for w in weights().values())
    assert reduced(found) == half
    assert all(groups_of(c) == along(mesh, "a") for c in of_kind(found, "all-reduce"))


@pytest.mark.parametrize("options", [{"weights": "split"}, {"scatter_dtype": {"b": jnp.bfloat16}}])
def test_other_styles(options):
    """Of what `scatter_dtype` says only axes count that are summed over."""
    mesh = mesh_of(GRID, auto=True)
    error, found = run(global_step, mesh, "a", **options)
    assert error <= 1e-6 and reduced(found) == 0 and scattered(found)
    assert {c.dtype for c in of_kind(found, "reduce-scatter")} == {"f32"}


@pytest.mark.parametrize("accumulate", ["whole", "shards"])
def test_microbatches(accumulate):
    mesh = mesh_of(GRID, auto=True)

    def step(params: Tree, state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        def turn(total: Tree, part: Tree) -> tuple[Tree, None]:
            grads = jax.grad(loss_of)(params, part)
            return jax.tree.map(jnp.add, total, grads), None

        parts = jax.tree.map(lambda x: x.reshape(-1, 2, *x.shape[1:]).swapaxes(0, 1), batch)
        total, _ = lax.scan(turn, jax.tree.map(jnp.zeros_like, params), parts)
        updates, state = TX.update(jax.tree.map(lambda g: g / 2, total), state, params)
        return optax.apply_updates(params, updates), state

    error, found = run(step, mesh, "a", accumulate=accumulate, formats="flat")
    assert error <= 1e-6 and reduced(found) == 0
    sent = padded_bytes() // 2
    assert scattered(found) == sent
    assert {c.in_loop for c in of_kind(found, "reduce-scatter")} == {accumulate == "shards"}
