"""What holds in every context: one core, the same numbers, layouts that stay, promised traffic."""

import contextlib
import dataclasses
import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import wusharding as wus
from benchmarks.optimizer_cases import factored_params
from tests.runs import (
    CONTEXTS,
    Loop,
    assert_same_bits,
    batches,
    compiled_functions,
    entries,
    groups_of,
    hlo_of,
    layout_of_arrays,
    leaf,
    linear,
    mean_of,
    mesh_of,
    of_kind,
    pairs,
    poisoned,
    reference,
    relative_error,
    spec_of,
    training,
    unreduced_mean,
)

Tree = Any


def params_of_all_kinds() -> Tree:
    """A leaf that needs padding, one that needs none, one that stays replicated."""
    return {"w": leaf(17, 12), "b": leaf(13), "s": leaf(), "even": leaf(16, 3)}


def norms() -> optax.GradientTransformation:
    """Counts, moments, norms of each tensor and of all."""
    return optax.chain(optax.clip_by_global_norm(3.0), optax.lamb(0.01))


def everything() -> optax.GradientTransformation:
    """The same with a random key: all that a state is made of."""
    return optax.chain(optax.add_noise(0.01, 0.55, 7), norms())


# ---------------------------------------------------------------- three steps, in all contexts


@dataclasses.dataclass
class Record:
    """What three steps with donated buffers left behind, warnings being errors."""

    loop: Loop
    born: dict[str, tuple[Any, ...]]
    placed: dict[str, tuple[Any, ...]]
    later: list[dict[str, tuple[Any, ...]]]
    moved: list[dict[str, tuple[Any, ...]]]
    kept_buffers: list[str]
    compiled: list[str]


@functools.cache
def reference_of_record() -> tuple[Tree, Tree]:
    params = params_of_all_kinds()
    return reference(norms(), params, [mean_of(g) for g in batches(params)])


@functools.cache
def record(context: str, apply: bool) -> Record:
    params = params_of_all_kinds()
    loop = training(context, norms(), params, apply=apply, donate=True)
    born, placed = layout_of_arrays(loop.state), layout_of_arrays(loop.params)
    later, moved, kept = [], [], []
    with warnings.catch_warnings(), compiled_functions() as compiled:
        warnings.simplefilter("error")
        for grads in batches(params):
            before = {"params": loop.params, "state": loop.state}
            loop.run([grads])
            later.append(layout_of_arrays(loop.state))
            moved.append(layout_of_arrays(loop.params))
            for path, x in jax.tree.leaves_with_path(before):
                if not x.is_deleted():
                    kept.append(jax.tree_util.keystr(path))
    return Record(loop, born, placed, later, moved, kept, compiled)


in_all_contexts = pytest.mark.parametrize("context", CONTEXTS)
in_compiled_contexts = pytest.mark.parametrize("context", [c for c in CONTEXTS if c != "eager"])
both_ways = pytest.mark.parametrize("apply", [False, True], ids=["update", "apply"])


@in_all_contexts
@both_ways
def test_equals_plain_optax(context, apply):
    wanted = reference_of_record()
    loop = record(context, apply).loop
    assert relative_error(loop.whole_params, wanted[0]) <= 1e-5
    assert relative_error(loop.plain_state, wanted[1]) <= 1e-5


@in_all_contexts
def test_update_and_apply_give_equal_params(context):
    updated, applied = (record(context, apply).loop.whole_params for apply in (False, True))
    assert relative_error(updated, applied) <= 1e-7


@in_all_contexts
@both_ways
def test_init_makes_the_layout_that_steps_keep(context, apply):
    seen = record(context, apply)
    assert any(spec for _, _, spec in seen.born.values())
    for later in seen.later:
        assert later == seen.born


@in_all_contexts
@both_ways
def test_params_leave_as_they_came(context, apply):
    seen = record(context, apply)
    for moved in seen.moved:
        assert moved == seen.placed


@in_compiled_contexts
@both_ways
def test_donation_takes_every_buffer(context, apply):
    assert record(context, apply).kept_buffers == []


@in_compiled_contexts
@both_ways
def test_three_steps_compile_once(context, apply):
    compiled = record(context, apply).compiled
    assert len(compiled) == 1, compiled


def test_the_compile_count_sees_a_second_compile():
    """Negative control."""
    step = jax.jit(lambda x: x + 1)
    with compiled_functions() as compiled:
        for size in (3, 5):
            step(np.ones(size, np.float32))
    assert len(compiled) == 2


def test_eager_steps_compile_nothing_after_the_first():
    params = params_of_all_kinds()
    loop = training("eager", optax.adam(0.01), params)
    first, *others = batches(params)
    loop.run([first])
    with compiled_functions() as compiled:
        loop.run(others)
    assert compiled == []


# ---------------------------------------------------------------------------------------- init


@pytest.mark.parametrize("context", ["explicit", "auto"])
def test_init_is_one_thing_eager_jitted_and_abstract(context):
    mesh = mesh_of({"data": 8}, auto=context == "auto")
    tx = wus.shard_updates(everything(), mesh=mesh)
    params = jax.device_put(params_of_all_kinds(), NamedSharding(mesh, P()))
    eager, jitted = tx.init(params), jax.jit(tx.init)(params)
    assert_same_bits(jitted, eager)
    assert layout_of_arrays(jitted) == layout_of_arrays(eager)
    abstract = jax.eval_shape(tx.init, params)
    assert jax.tree.structure(abstract) == jax.tree.structure(eager)
    for found, wanted in pairs(abstract, eager):
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
        if context == "explicit":
            assert entries(found.sharding.spec) == spec_of(wanted)


@pytest.mark.parametrize("check_vma", [True, False])
def test_init_inside_shard_map_is_that_outside(check_vma):
    mesh = mesh_of({"data": 8})
    tx = wus.shard_updates(everything(), mesh=mesh)
    params = jax.device_put(params_of_all_kinds(), NamedSharding(mesh, P()))
    specs = tx.state_specs(params)
    inside = jax.jit(
        jax.shard_map(tx.init, mesh=mesh, in_specs=P(), out_specs=specs, check_vma=check_vma)
    )(params)
    outside = tx.init(params)
    assert_same_bits(inside, outside)
    assert layout_of_arrays(inside) == layout_of_arrays(outside)


def test_init_inside_pmap_holds_the_shards_of_that_outside():
    params = params_of_all_kinds()
    mesh = mesh_of({"data": 8})
    outside = wus.shard_updates(optax.adam(0.1), mesh=mesh).init(params)
    inside = training("pmap", optax.adam(0.1), params).state
    for found, wanted in pairs(inside, outside):
        for device in range(8):
            np.testing.assert_array_equal(found[device], wanted.addressable_shards[device].data)


@pytest.mark.parametrize("auto", [False, True])
@pytest.mark.parametrize("master", [None, jnp.float32])
def test_descriptions_of_the_state_agree_with_it(auto, master):
    mesh = mesh_of({"data": 8}, auto=auto)
    params = params_of_all_kinds()
    if master is not None:
        params = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), params)
    tx = wus.shard_updates(everything(), mesh=mesh, master_dtype=master)
    state = tx.init(params)
    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    for given in (params, structs):
        shardings, abstract = tx.state_shardings(given), tx.abstract_state(given)
        specs = jax.tree.leaves(tx.state_specs(given), is_leaf=lambda x: isinstance(x, P))
        assert jax.tree.structure(shardings) == jax.tree.structure(state)
        assert jax.tree.structure(abstract) == jax.tree.structure(state)
        rows = zip(specs, *map(jax.tree.leaves, (shardings, abstract, state)), strict=True)
        for spec, sharding, struct, x in rows:
            assert entries(spec) == entries(sharding.spec) == spec_of(x)
            assert sharding.is_equivalent_to(x.sharding, x.ndim)
            assert struct.sharding.is_equivalent_to(x.sharding, x.ndim)
            assert (struct.shape, struct.dtype) == (x.shape, x.dtype)


def test_a_mesh_given_is_a_mesh_around():
    mesh = mesh_of({"data": 8})
    params = params_of_all_kinds()
    given = wus.shard_updates(everything(), mesh=mesh).init(params)
    with jax.set_mesh(mesh):
        around = wus.shard_updates(everything()).init(params)
    assert_same_bits(around, given)
    assert layout_of_arrays(around) == layout_of_arrays(given)


# ----------------------------------------------------------------------------- to and from plain


@in_all_contexts
def test_unshard_and_shard_are_lossless(context):
    loop = record(context, False).loop
    mesh = mesh_of({"data": 8}, auto=context in ("auto", "eager"))
    tx, state, params = loop.tx, loop.state, loop.params
    unshard, shard = tx.unshard, tx.shard
    if context == "pmap":
        unshard, shard = loop.unshard, jax.pmap(tx.shard, axis_name="data")
    elif context in ("checked", "unchecked"):
        specs = tx.state_specs(params)
        mapped = functools.partial(jax.shard_map, mesh=mesh, check_vma=context == "checked")
        unshard = jax.jit(mapped(tx.unshard, in_specs=(specs,), out_specs=P()))
        shard = jax.jit(mapped(tx.shard, in_specs=(P(), P()), out_specs=specs))
    elif context == "auto":
        unshard, shard = jax.jit(unshard), jax.jit(shard)
    with loop.within():
        plain = unshard(state)
        again = shard(plain, params)
        assert_same_bits(unshard(again), plain)
    assert layout_of_arrays(again) == layout_of_arrays(state)
    if context == "pmap":
        plain = jax.tree.map(lambda x: x[0], plain)
    own = jax.eval_shape(norms().init, params_of_all_kinds())
    assert jax.tree.structure(plain) == jax.tree.structure(own)
    for found, wanted in pairs(plain, own):
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)


def test_unshard_and_shard_keep_random_keys():
    params = params_of_all_kinds()
    tx = wus.shard_updates(everything(), mesh=mesh_of({"data": 8}))
    plain = everything().init(params)
    assert_same_bits(tx.unshard(tx.shard(plain, params)), plain)
    assert_same_bits(tx.unshard(tx.init(params)), plain)


def test_shard_takes_the_state_of_plain_optax():
    """A run that began with plain optax goes on sharded."""
    params, optimizer = params_of_all_kinds(), optax.lamb(0.01)
    steps = batches(params, steps=4)
    means = [mean_of(g) for g in steps]
    wanted = reference(optimizer, params, means)
    half, plain = reference(optimizer, params, means[:2])
    loop = training("auto", optimizer, half)
    loop.state = loop.tx.shard(plain, loop.params)
    loop.run(steps[2:])
    assert relative_error((loop.whole_params, loop.plain_state), wanted) <= 1e-5


# --------------------------------------------------------------------------- ways to call a step


@pytest.mark.parametrize("context", ["checked", "unchecked", "explicit", "auto"])
def test_steps_inside_a_scan(context):
    """The state that a step returns has the very type of the one that it takes."""
    mesh = mesh_of({"data": 8}, auto=context == "auto")
    params = params_of_all_kinds()
    tx = wus.shard_updates(norms(), mesh=mesh)
    state, specs = tx.init(params), tx.state_specs(params)
    grads = jax.tree.map(lambda *steps: np.stack(steps), *batches(params))
    arrived = {"explicit": unreduced_mean, "auto": lambda _, g: mean_of(g)}

    def train(params: Tree, state: Any, grads: Tree) -> tuple[Tree, Any]:
        def step(carry: tuple[Tree, Any], g: Tree) -> tuple[tuple[Tree, Any], None]:
            params, state = carry
            g = arrived[context](params, g) if context in arrived else jax.tree.map(first, g)
            return tx.apply(g, state, params), None

        return jax.lax.scan(step, (params, state), grads)[0]

    if context not in arrived:
        train = jax.shard_map(
            train,
            mesh=mesh,
            in_specs=(P(), specs, P(None, "data")),
            out_specs=(P(), specs),
            check_vma=context == "checked",
        )
    with jax.set_mesh(mesh):
        params = jax.device_put(params, NamedSharding(mesh, P()))
        grads = jax.device_put(grads, NamedSharding(mesh, P(None, "data")))
        found, state = jax.jit(train)(params, state, grads)
    assert relative_error((found, tx.unshard(state)), reference_of_record()) <= 1e-5


def first(x: jax.Array) -> jax.Array:
    return x[0]


@pytest.mark.parametrize("auto", [False, True])
def test_the_abstract_state_is_enough_to_compile_ahead(auto):
    mesh = mesh_of({"data": 8}, auto=auto)
    tx = wus.shard_updates(optax.adam(0.01), mesh=mesh)
    params = jax.device_put(params_of_all_kinds(), NamedSharding(mesh, P()))
    structs = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params
    )
    with jax.set_mesh(mesh):
        step = jax.jit(tx.apply).lower(structs, tx.abstract_state(structs), structs).compile()
        new, _ = step(params, tx.init(params), params)
    wanted, _ = reference(optax.adam(0.01), params_of_all_kinds(), [params_of_all_kinds()])
    assert relative_error(new, wanted) <= 1e-6


@pytest.mark.parametrize("auto", [False, True])
def test_params_may_be_left_out_where_the_optimizer_needs_none(auto):
    mesh = mesh_of({"data": 8}, auto=auto)
    params = params_of_all_kinds()
    tx = wus.shard_updates(optax.adam(0.01), mesh=mesh)
    with jax.set_mesh(mesh):
        grads = jax.device_put(params, NamedSharding(mesh, P()))
        found, _ = jax.jit(tx.update)(grads, tx.init(params))
    wanted, _ = optax.adam(0.01).update(params, optax.adam(0.01).init(params))
    assert relative_error(found, wanted) <= 1e-6


def test_one_wrapper_serves_several_trees():
    tx = wus.shard_updates(optax.lamb(0.01), mesh=mesh_of({"data": 8}, auto=True))
    trees = [params_of_all_kinds(), {"x": params_of_all_kinds()["w"], "frozen": None}]
    states = [tx.init(tree) for tree in trees]
    for tree, state in zip(trees, states, strict=True):
        new, _ = tx.apply(tree, state, tree)
        assert relative_error(new, reference(optax.lamb(0.01), tree, [tree])[0]) <= 1e-6


@pytest.mark.parametrize("auto", [False, True])
def test_reduced_gradients_may_come_split_over_the_replicas(auto):
    """As a user's own reduce-scatter, or the compiler, leaves them."""
    mesh = mesh_of({"data": 8}, auto=auto)
    params = {"w": params_of_all_kinds()["even"]}
    grads = jax.device_put(params, NamedSharding(mesh, P("data")))
    with jax.set_mesh(mesh):
        tx = wus.shard_updates(optax.adam(0.01))
        placed = jax.device_put(params, NamedSharding(mesh, P()))
        new, _ = jax.jit(tx.apply)(grads, tx.init(placed), placed)
    assert relative_error(new, reference(optax.adam(0.01), params, [params])[0]) <= 1e-6
    assert spec_of(new["w"]) == ()


def test_numbers_as_extra_arguments_compile_once():
    tx = wus.shard_updates(optax.contrib.reduce_on_plateau(), mesh=mesh_of({"data": 8}, auto=True))
    params = {"w": params_of_all_kinds()["even"]}
    state = tx.init(params)
    with compiled_functions() as compiled:
        for loss in (3.0, 2.0, 1.0):
            _, state = tx.update(params, state, params, value=loss)
    assert len(compiled) == 1


LARGE = {"w": (64, 128), "v": (40, 257), "b": (13,), "c": (3, 64, 128)}


@pytest.mark.parametrize(
    ("target", "formats"),
    [("tpu", "auto"), ("tpu", "merged"), ("tpu", "flat"), ("gpu", "auto")],
)
def test_the_target_and_the_format_change_no_number(target, formats):
    params = {
        name: np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape) % 31 / 32
        for name, shape in LARGE.items()
    }
    steps = batches(params, steps=2)
    optimizer = optax.lamb(0.01)
    loop = training("checked", optimizer, params, target=target, formats=formats)
    if (target, formats) == ("tpu", "flat"):
        stored = {name: x.shape for name, x in loop.state.inner[0].mu.items()}
        assert stored["w"] == (64, 128) and stored["c"] == (192, 128)  # rows x lanes
    loop.run(steps)
    wanted = reference(optimizer, params, [mean_of(g) for g in steps])
    assert relative_error((loop.whole_params, loop.plain_state), wanted) <= 1e-5


# ------------------------------------------------------------------------------- several mesh axes

ALONG_A = {frozenset({i, i + 4}) for i in range(4)}
ALONG_B = {frozenset(range(4)), frozenset(range(4, 8))}


def of_bytes(found: list[Any], least: int) -> list[Any]:
    """Collectives of at least this many bytes: those of gradients and weights, not of norms."""
    return [c for c in found if max(c.operand_bytes, c.result_bytes) >= least]


@pytest.mark.parametrize(
    ("context", "axis"),
    [
        ("checked", ("a", "b")),
        ("checked", ("b", "a")),
        ("explicit", ("b", "a")),
        ("auto", ("a", "b")),
    ],
)
def test_replicas_over_two_axes(context, axis):
    params = params_of_all_kinds()
    steps = batches(params)
    loop = training(context, optax.lamb(0.01), params, shape={"a": 2, "b": 4}, axis=axis)
    assert spec_of(loop.state.inner[0].mu["w"]) == (axis,)
    wanted = reference(optax.lamb(0.01), params, [mean_of(g) for g in steps])
    loop.run(steps)
    assert relative_error((loop.whole_params, loop.plain_state), wanted) <= 1e-5
    assert spec_of(loop.state.inner[0].mu["w"]) == (axis,)
    if context != "checked":
        return
    found = of_bytes(loop.collectives(steps[0]), 200)
    along = {"a": ALONG_A, "b": ALONG_B}
    kinds = [(c.kind, groups_of(c)) for c in found]
    assert kinds == [
        *(("reduce-scatter", along[a]) for a in axis),
        *(("all-gather", along[a]) for a in reversed(axis)),
    ]
    first, second, gather, last = found
    size = {"a": 2, "b": 4}[axis[0]]
    assert second.operand_bytes == first.result_bytes == first.operand_bytes // size
    assert last.operand_bytes == gather.result_bytes == last.result_bytes // size


@pytest.mark.parametrize(
    ("context", "shard_axis"),
    [("checked", "b"), ("unchecked", "b"), ("explicit", "b"), ("auto", "b"), ("checked", ("a",))],
)
def test_shards_over_a_part_of_the_replicas(context, shard_axis):
    params = params_of_all_kinds()
    steps = batches(params)
    loop = training(
        context,
        optax.lamb(0.01),
        params,
        shape={"a": 2, "b": 4},
        axis=("a", "b"),
        shard_axis=shard_axis,
    )
    shards = {"b": 4, ("a",): 2}[shard_axis]
    mu = loop.state.inner[0].mu["even"]
    assert spec_of(mu) == (("b",) if shard_axis == "b" else ("a",))
    assert mu.addressable_shards[0].data.size == 48 // shards
    wanted = reference(optax.lamb(0.01), params, [mean_of(g) for g in steps])
    loop.run(steps)
    assert relative_error((loop.whole_params, loop.plain_state), wanted) <= 1e-5
    if context == "auto":
        return
    found = of_bytes(loop.collectives(steps[0]), 200)
    inside, across = (ALONG_B, ALONG_A) if shard_axis == "b" else (ALONG_A, ALONG_B)
    assert [(c.kind, groups_of(c)) for c in found] == [
        ("reduce-scatter", inside),
        ("all-reduce", across),
        ("all-gather", inside),
    ]
    scatter, reduce, _ = found
    assert reduce.operand_bytes == scatter.result_bytes == scatter.operand_bytes // shards


@pytest.mark.parametrize(
    ("context", "size"),
    [("checked", 3), ("auto", 3), ("pmap", 5), ("checked", 6), ("unchecked", 7), ("auto", 7)],
)
def test_any_number_of_replicas(context, size):
    params = params_of_all_kinds()
    steps = batches(params, size)
    loop = training(context, optax.lamb(0.01), params, shape={"data": size}).run(steps)
    wanted = reference(optax.lamb(0.01), params, [mean_of(g) for g in steps])
    assert relative_error((loop.whole_params, loop.plain_state), wanted) <= 1e-5


@pytest.mark.parametrize("context", ["checked", "pmap", "explicit", "eager"])
def test_a_single_replica_is_reported_and_right(context):
    params = params_of_all_kinds()
    steps = batches(params, 1, steps=2)
    with pytest.warns(wus.ReplicatedUpdateWarning, match="size 1"):
        loop = training(context, optax.adam(0.01), params, shape={"data": 1})
    loop.run(steps)
    wanted = reference(optax.adam(0.01), params, [mean_of(g) for g in steps])
    assert relative_error((loop.whole_params, loop.plain_state), wanted) <= 1e-6


def test_an_axis_of_size_1_beside_a_larger_one():
    params = params_of_all_kinds()
    steps = batches(params)
    loop = training(
        "checked", optax.adam(0.01), params, shape={"a": 1, "b": 8}, axis=("a", "b")
    ).run(steps)
    wanted = reference(optax.adam(0.01), params, [mean_of(g) for g in steps])
    assert relative_error((loop.whole_params, loop.plain_state), wanted) <= 1e-6


# ------------------------------------------------------------------------------------- gradients


SILENT = contextlib.nullcontext()


def reduced_before(check_vma: bool, reduce: str | None) -> tuple[Any, Any, Any, Any]:
    """A step in `shard_map` whose gradients are the same on every replica."""
    mesh = mesh_of({"data": 8})
    params = jax.device_put(params_of_all_kinds(), NamedSharding(mesh, P()))
    tx = wus.shard_updates(optax.adam(0.01), mesh=mesh, reduce=reduce)
    specs = tx.state_specs(params)

    @jax.jit
    @jax.shard_map(
        mesh=mesh, in_specs=(P(), specs, P()), out_specs=(P(), specs), check_vma=check_vma
    )
    def step(params, state, grads):
        return tx.apply(grads, state, params)

    return tx, step, params, tx.init(params)


@pytest.mark.parametrize(
    ("check_vma", "reduce"), [(True, "mean"), (True, "sum"), (True, None), (False, None)]
)
def test_reduced_gradients_are_sliced_without_a_collective(check_vma, reduce):
    tx, step, params, state = reduced_before(check_vma, reduce)
    grads = mean_of(batches(params_of_all_kinds())[0])
    # The type says that they are reduced; whoever does not say so as well is told.
    told = pytest.warns(wus.ReducedGradientsWarning, match="reduce=None") if reduce else SILENT
    with told:
        found = hlo_of(step, params, state, grads)
    assert {c.kind for c in found} == {"all-gather"}
    wanted = reference(optax.adam(0.01), params, [grads])
    new, state = step(params, state, grads)
    assert relative_error((new, tx.unshard(state)), wanted) <= 1e-6


@pytest.mark.parametrize("context", ["explicit", "auto"])
def test_reduced_gradients_under_jit_are_sliced_without_a_collective(context):
    mesh = mesh_of({"data": 8}, auto=context == "auto")
    params = jax.device_put(params_of_all_kinds(), NamedSharding(mesh, P()))
    grads = jax.device_put(mean_of(batches(params)[0]), NamedSharding(mesh, P()))
    with jax.set_mesh(mesh):
        tx = wus.shard_updates(optax.adam(0.01))
        state = tx.init(params)
        step = jax.jit(tx.apply)
        assert {c.kind for c in hlo_of(step, grads, state, params)} == {"all-gather"}
        new, state = step(grads, state, params)
        plan = tx.plan(params)
    wanted = reference(optax.adam(0.01), params, [grads])
    assert relative_error(new, wanted[0]) <= 1e-6
    if context == "auto":
        assert "arrive reduced" in str(plan)


def test_the_plan_says_that_gradients_arrive_reduced():
    params = params_of_all_kinds()
    for auto, reduce, reduced in (
        (True, "mean", False),
        (False, None, True),
        (False, "sum", False),
    ):
        mesh = mesh_of({"data": 8}, auto=auto)
        plan = wus.shard_updates(optax.adam(0.01), mesh=mesh, reduce=reduce).plan(params)
        assert ("without a collective" in str(plan)) == reduced
        assert ("reduce-scatter" in {t.kind for t in plan.traffic}) == (not reduced)


@pytest.mark.parametrize("context", ["checked", "unchecked", "pmap"])
def test_local_gradients_can_be_summed(context):
    params = params_of_all_kinds()
    steps = batches(params)
    sums = [jax.tree.map(lambda g: np.sum(g, 0), step) for step in steps]
    loop = training(context, optax.adagrad(0.01), params, reduce="sum").run(steps)
    wanted = reference(optax.adagrad(0.01), params, sums)
    assert relative_error((loop.whole_params, loop.plain_state), wanted) <= 1e-6
    # Negative control: the mean gives another result.
    other = reference(optax.adagrad(0.01), params, [mean_of(g) for g in steps])
    assert relative_error(loop.plain_state, other[1]) > 0.5


@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_unreduced_gradients_are_summed_once_whatever_reduce_says(reduce):
    params = params_of_all_kinds()
    steps = batches(params)
    loop = training("explicit", optax.adagrad(0.01), params, reduce=reduce).run(steps)
    wanted = reference(optax.adagrad(0.01), params, [mean_of(g) for g in steps])
    assert relative_error((loop.whole_params, loop.plain_state), wanted) <= 1e-6


def test_gradients_may_be_partly_reduced_by_leaf():
    """With replication types each gradient goes the way that its type says."""
    mesh = mesh_of({"data": 8})
    params = params_of_all_kinds()
    tx = wus.shard_updates(optax.adagrad(0.01), mesh=mesh)
    state, specs = tx.init(params), tx.state_specs(params)
    grads = jax.device_put(batches(params)[0], NamedSharding(mesh, P("data")))

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(P(), specs, P("data")), out_specs=(P(), specs))
    def step(params, state, grads):
        grads = jax.tree.map(lambda g: g[0], grads)
        grads["w"] = jax.lax.pmean(grads["w"], "data")
        return tx.apply(grads, state, params)

    new, state = step(params, state, grads)
    wanted = reference(optax.adagrad(0.01), params, [mean_of(batches(params)[0])])
    assert relative_error((new, tx.unshard(state)), wanted) <= 1e-6


# --------------------------------------------------------------------------------------- buckets


def many_small_params() -> Tree:
    rng = np.random.default_rng(5)
    sizes = rng.integers(2, 40, 200)
    out = {f"f{i:03d}": np.full((n,), 1 + i / 8, np.float32) for i, n in enumerate(sizes)}
    halves = {f"h{i:02d}": jnp.full((n, 3), 1.0, jnp.bfloat16) for i, n in enumerate(sizes[:20])}
    return {**out, **halves}


def test_two_hundred_small_tensors_cost_one_collective_a_dtype():
    params = many_small_params()
    loop = training("checked", optax.sgd(0.125, momentum=0.5), params, apply=True)
    grads = jax.tree.map(lambda p: np.ones((8, *p.shape), p.dtype), params)
    found = loop.collectives(grads)
    counts = {kind: len(of_kind(found, kind)) for kind in ("reduce-scatter", "all-gather")}
    assert counts == {"reduce-scatter": 2, "all-gather": 2}
    assert not of_kind(found, "all-reduce")
    with loop.within():
        planned = {t.kind: t.count for t in loop.tx.plan(loop.params).traffic}
    assert planned == counts
    loop.run([grads])
    for name, x in loop.params.items():
        np.testing.assert_array_equal(x, np.asarray(params[name]) - np.asarray(0.125, x.dtype))


@pytest.mark.parametrize("bucket_bytes", [1, 40, 100, 700, 2**30])
def test_bucket_edges_inside_leaves_change_no_bit(bucket_bytes):
    """The momentum of exact sums is exact, so every bucket size gives the very bits of optax."""
    params = {"a": np.ones((5,)), "b": np.ones((7, 3)), "c": np.ones((2, 3)), "d": np.ones((9,))}
    params = jax.tree.map(lambda x: x.astype(np.float32), params)
    steps = batches(params)
    optimizer = optax.sgd(0.125, momentum=0.5)
    loop = training("checked", optimizer, params, bucket_bytes=bucket_bytes).run(steps)
    wanted = reference(optimizer, params, [mean_of(g) for g in steps])
    assert_same_bits((loop.whole_params, loop.plain_state), wanted)
    scatters = len(of_kind(loop.collectives(steps[0]), "reduce-scatter"))
    planned = {t.kind: t.count for t in loop.tx.plan(loop.params).traffic}["reduce-scatter"]
    assert scatters == planned
    # One shard holds 1 + 3 + 1 + 2 elements, and a bucket of 100 bytes 3 of each of 8 shards.
    assert scatters == {1: 4, 40: 4, 100: 3, 700: 1, 2**30: 1}[bucket_bytes]


# ----------------------------------------------------------------------------------------- dtypes


def rounded(tree: Tree, dtype: Any) -> Tree:
    return jax.tree.map(lambda x: jnp.asarray(x).astype(dtype).astype(x.dtype), tree)


@pytest.mark.parametrize("context", ["checked", "explicit", "auto"])
@both_ways
def test_gather_dtype_rounds_what_travels_and_nothing_else(context, apply):
    params = params_of_all_kinds()
    steps = batches(params)
    optimizer = optax.sgd(0.125, momentum=0.75)
    loop = training(context, optimizer, params, apply=apply, gather_dtype=jnp.bfloat16)
    loop.run(steps)
    wanted, state = params, optimizer.init(params)
    for g in steps:
        updates, state = optimizer.update(mean_of(g), state, wanted)
        if apply:
            wanted = rounded(optax.apply_updates(wanted, updates), jnp.bfloat16)
        else:
            wanted = optax.apply_updates(wanted, rounded(updates, jnp.bfloat16))
    assert_same_bits(loop.whole_params, jax.tree.map(jnp.asarray, wanted))
    assert relative_error(loop.plain_state, state) <= 1e-6


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_gather_dtype_is_what_the_gather_carries(dtype):
    """Read before XLA optimizes: on CPU it computes, and gathers, bfloat16 as float32."""
    params = params_of_all_kinds()
    loop = training("checked", optax.adam(0.01), params, apply=True, gather_dtype=dtype)
    grads = loop.place(batches(params)[0])
    text = loop.step.lower(loop.params, loop.state, grads).as_text()
    gathers = [line for line in text.splitlines() if "stablehlo.all_gather" in line]
    assert gathers
    assert all(("bf16" in line) == (dtype is not None) for line in gathers)


def in_bf16(tree: Tree) -> Tree:
    return jax.tree.map(lambda x: np.asarray(x, jnp.bfloat16), tree)


def coarse_grads(params: Tree, steps: int = 3) -> list[Tree]:
    """Local gradients of few bits, whose sums are exact in bfloat16."""

    rng = np.random.default_rng(6)

    def scaled(x: Any) -> Any:
        return (rng.integers(-3, 4, (8, *x.shape)) / 32).astype(x.dtype)

    return [jax.tree.map(scaled, params) for _ in range(steps)]


def master_run(
    optimizer: optax.GradientTransformation, params: Tree, steps: list[Tree]
) -> tuple[Tree, Tree]:
    """The oracle: fp32 masters on one device; also the state."""
    master = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    means = [
        jax.tree.map(lambda g: jnp.sum(jnp.asarray(g, jnp.float32), 0) / g.shape[0], step)
        for step in steps
    ]
    return reference(optimizer, master, means)


@pytest.mark.parametrize(
    ("context", "apply"), [*((c, False) for c in CONTEXTS), ("checked", True), ("auto", True)]
)
def test_masters_are_fp32_training_and_params_their_cast(context, apply):
    params = in_bf16(params_of_all_kinds())
    steps = coarse_grads(params)
    optimizer = optax.sgd(0.125, momentum=0.75)
    master, state = master_run(optimizer, params, steps)
    loop = training(context, optimizer, params, apply=apply, master_dtype=jnp.float32)
    loop.run(steps)
    assert_same_bits(loop.whole_params, jax.tree.map(lambda x: x.astype(jnp.bfloat16), master))
    assert_same_bits(loop.plain_state, state)
    if context != "pmap":
        with loop.within():
            assert_same_bits(loop.tx.master(loop.state), master)
    # Negative control: training in bfloat16 alone ends elsewhere.
    alone, _ = reference(optimizer, params, [mean_of(g) for g in steps])
    assert relative_error(loop.whole_params, alone) > 0


@both_ways
def test_masters_under_adam_land_on_their_cast(apply):
    rng = np.random.default_rng(0)
    params = in_bf16({"w": rng.normal(size=(300, 70)), "b": rng.normal(size=(41,))})
    steps = coarse_grads(params)
    master, state = master_run(optax.adamw(1e-3), params, steps)
    loop = training("checked", optax.adamw(1e-3), params, apply=apply, master_dtype=jnp.float32)
    loop.run(steps)
    found = loop.tx.master(loop.state)
    assert_same_bits(loop.whole_params, jax.tree.map(lambda x: x.astype(jnp.bfloat16), found))
    assert relative_error((found, loop.plain_state), (master, state)) <= 1e-6


def test_masters_are_sharded_and_only_for_weights_of_other_dtypes():
    params = {"half": jnp.ones((16, 3), jnp.bfloat16), "full": jnp.ones((16, 3), jnp.float32)}
    tx = wus.shard_updates(optax.adam(0.1), mesh=mesh_of({"data": 8}), master_dtype=jnp.float32)
    state = tx.init(params)
    assert state.master["full"] is None
    assert state.master["half"].dtype == jnp.float32
    assert state.master["half"].addressable_shards[0].data.size == 6
    assert state.inner[0].mu["half"].dtype == jnp.float32


def test_shard_brings_masters_back():
    params = in_bf16(params_of_all_kinds())
    loop = training("auto", optax.adam(0.01), params, master_dtype=jnp.float32)
    loop.run(coarse_grads(params))
    tx, state = loop.tx, loop.state
    again = tx.shard(tx.unshard(state), loop.params, tx.master(state))
    assert_same_bits(tx.master(again), tx.master(state))
    assert_same_bits(tx.unshard(again), tx.unshard(state))
    # Without them they are made from the params, and what the params had lost is lost.
    made = tx.shard(tx.unshard(state), loop.params)
    casts = jax.tree.map(lambda x: x.astype(jnp.float32), loop.params)
    assert_same_bits(tx.master(made), casts)
    assert relative_error(tx.master(made), tx.master(state)) > 0


# ----------------------------------------------------------------------------- what is not sharded


@pytest.mark.parametrize("least", [0, 2, 14, 60])
def test_small_leaves_stay_whole_and_the_plan_says_why(least):
    params = params_of_all_kinds()
    steps = batches(params)
    loop = training("checked", optax.lamb(0.01), params, min_shard_elems=least)
    plan = loop.tx.plan(loop.params)
    for planned in plan.params:
        elems = int(np.prod(planned.shape))
        whole = elems < max(least, 2)
        assert (planned.format == "replicated") == whole
        assert bool(planned.why) == whole
        if whole and elems > 1:
            assert f"min_shard_elems={least}" in planned.why
    specs = {name: spec_of(x) for name, x in loop.state.inner[0].mu.items()}
    assert {name for name, spec in specs.items() if not spec} == {
        name for name, x in params.items() if x.size < max(least, 2)
    }
    loop.run(steps)
    wanted = reference(optax.lamb(0.01), params, [mean_of(g) for g in steps])
    assert relative_error((loop.whole_params, loop.plain_state), wanted) <= 1e-5


# ---------------------------------------------------------------------------------------- padding


def padded_params() -> Tree:
    """Matrices, a stack and a vector none of whose dims 8 divides."""
    return jax.tree.map(np.asarray, factored_params())


def odd_params() -> Tree:
    """Four odd dims, fewer elements than devices, one, none."""
    shapes = {"deep": (3, 3, 5, 13), "few": (7,), "one": (1,), "s": (), "none": (0, 3)}
    return {k: np.zeros(s, np.float32) if 0 in s else leaf(*s) for k, s in shapes.items()}


POISONED = {
    "lamb": lambda: optax.lamb(0.01, weight_decay=0.1),
    "adafactor": lambda: optax.adafactor(
        0.01, min_dim_size_to_factor=3, multiply_by_parameter_scale=True, momentum=0.9
    ),
    "novograd": lambda: optax.novograd(0.01),
    "clip adagrad": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adagrad(0.1)),
    "centralize sgd": lambda: optax.chain(optax.centralize(), optax.sgd(0.1, momentum=0.9)),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(0.01), 3),
    "MultiSteps": lambda: optax.MultiSteps(optax.lars(0.1), 2).gradient_transformation(),
    "muon": lambda: optax.contrib.muon(0.01),
}


@pytest.mark.parametrize(
    ("name", "value"),
    [*((name, np.nan) for name in POISONED), ("lamb", np.inf), ("apply_if_finite", np.inf)],
)
def test_what_the_padding_holds_changes_nothing(name, value):
    params = padded_params()
    if name == "clip adagrad":
        params |= odd_params()
    steps = batches(params, steps=2)
    loop = training("unchecked", POISONED[name](), params, formats="dim")
    start = (loop.params, loop.state)
    clean = loop.run(steps)
    wanted = (clean.whole_params, clean.plain_state)
    plain = reference(POISONED[name](), params, [mean_of(g) for g in steps])
    assert relative_error(wanted, plain) <= 1e-4
    loop.params, (loop.state, count) = start[0], poisoned(start[1], value)
    assert count > 50
    for grads in steps:
        loop.run([grads])
        loop.state, _ = poisoned(loop.state, value)
    assert_same_bits((loop.whole_params, loop.plain_state), wanted)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(loop.whole_params))


def test_padding_of_masters_changes_nothing():
    params = in_bf16(padded_params())
    steps = coarse_grads(params)
    options = {"formats": "dim", "master_dtype": jnp.float32}
    loop = training("unchecked", optax.lamb(0.01), params, **options)
    start = (loop.params, loop.state)
    clean = loop.run(steps)
    wanted = (clean.whole_params, clean.plain_state)
    loop.params, (loop.state, count) = start[0], poisoned(start[1], np.nan)
    assert count > 50
    loop.run(steps)
    assert_same_bits((loop.whole_params, loop.plain_state), wanted)


def test_poison_would_show():
    """Negative control: the same poison beside the padding is seen."""
    params = padded_params()
    loop = training("unchecked", optax.adam(0.01), params, formats="dim")

    def with_one_nan(x: jax.Array) -> jax.Array:
        values = np.array(x)
        values.flat[0] = np.nan
        return jax.device_put(values, x.sharding)

    inner = jax.tree.map(lambda x: with_one_nan(x) if x.ndim else x, loop.state.inner)
    loop.state = loop.state._replace(inner=inner)
    loop.run(batches(params, steps=1))
    assert not all(np.isfinite(x).all() for x in jax.tree.leaves(loop.whole_params))


# ----------------------------------------------------------------------------- model parallelism

MODEL_SPECS = {"w": P(None, "model"), "v": P("model"), "b": P(), "deep": P(None, "model", None)}
MODEL_OPTIMIZERS = {
    "clip": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.01)),
    "lamb": lambda: optax.lamb(0.01),
    "adafactor": lambda: optax.adafactor(0.01, min_dim_size_to_factor=2),
}


def model_params() -> Tree:
    rng = np.random.default_rng(4)
    shapes = {"w": (17, 6), "v": (10, 7), "b": (13,), "deep": (3, 4, 5)}
    return {
        name: ((2 * rng.integers(-20, 20, shape) + 1) / 32).astype(np.float32)
        for name, shape in shapes.items()
    }


@pytest.mark.parametrize(
    ("context", "name"),
    [
        *((c, n) for n in MODEL_OPTIMIZERS for c in ("checked", "explicit", "auto")),
        ("unchecked", "adafactor"),
        ("open auto", "adafactor"),
        ("open auto unchecked", "lamb"),
        ("open explicit", "lamb"),
        ("open explicit", "adafactor"),
        ("open explicit unchecked", "clip"),
    ],
)
def test_model_parallel_weights(context, name):
    """Open: in a `shard_map` over `data` that leaves `model` to the compiler or to types."""
    mesh = mesh_of({"data": 4, "model": 2}, auto="auto" in context)
    params = model_params()
    steps = batches(params, 4)
    optimizer = MODEL_OPTIMIZERS[name]()
    wanted = reference(optimizer, params, [mean_of(g) for g in steps])

    def on_mesh(tree: Tree, *before: Any) -> Tree:
        return {
            k: jax.device_put(x, NamedSharding(mesh, P(*before, *MODEL_SPECS[k])))
            for k, x in tree.items()
        }

    params = on_mesh(params)
    manual, opened = context in ("checked", "unchecked"), context.startswith("open")
    tx = wus.shard_updates(optimizer, mesh=mesh, **({"param_specs": MODEL_SPECS} if manual else {}))
    state = tx.init(params)
    within = jax.set_mesh(mesh) if "explicit" in context else contextlib.nullcontext()

    def step(params: Tree, state: Any, grads: Tree) -> tuple[Tree, Any]:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    if manual:
        specs = tx.state_specs(params)
        whole = step
        step = jax.shard_map(
            lambda p, s, g: whole(p, s, jax.tree.map(lambda x: x[0], g)),
            mesh=mesh,
            in_specs=(MODEL_SPECS, specs, {k: P("data", *s) for k, s in MODEL_SPECS.items()}),
            out_specs=(MODEL_SPECS, specs),
            check_vma=context == "checked",
        )
    elif opened:
        specs = tx.state_specs(params, axis_names={"data"})
        whole = step
        step = jax.shard_map(
            lambda p, s, g: whole(p, s, jax.tree.map(lambda x: x[0], g)),
            mesh=mesh,
            in_specs=(P(), specs, P("data")),
            out_specs=(P(), specs),
            axis_names={"data"},
            check_vma="unchecked" not in context,
        )
    elif context == "explicit":
        inner = step

        def step(params: Tree, state: Any, grads: Tree) -> tuple[Tree, Any]:
            def loss(weights: Tree) -> Any:
                return sum(jnp.sum(linear(g, w, "data")) / 4 for g, w in pairs(grads, weights))

            weights = {
                k: jax.sharding.reshard(w, P(*MODEL_SPECS[k], reduced={"data"}))
                for k, w in params.items()
            }
            return inner(params, state, jax.grad(loss)(weights))

    else:
        inner = step

        def step(params: Tree, state: Any, grads: Tree) -> tuple[Tree, Any]:
            return inner(params, state, mean_of(grads))

    born, placed = layout_of_arrays(state), layout_of_arrays(params)
    with within, compiled_functions() as compiled:
        step = jax.jit(step)
        for g in steps:
            params, state = step(params, state, on_mesh(g, "data"))
    assert relative_error(params, wanted[0]) <= 1e-5
    assert relative_error(tx.unshard(state), wanted[1]) <= 1e-5
    assert layout_of_arrays(state) == born
    assert layout_of_arrays(params) == placed
    assert len(compiled) == 1, compiled
    if name == "lamb":
        assert spec_of(state.inner[0].mu["v"])[0] in (("data", "model"), "model")
        assert state.inner[0].mu["v"].addressable_shards[0].data.size <= 10 * 7 / 8 + 7


def placed_on(mesh: Any, params: Tree) -> Tree:
    return {k: jax.device_put(x, NamedSharding(mesh, MODEL_SPECS[k])) for k, x in params.items()}


@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ({"data": 4}, {"target": "tpu", "formats": "flat"}),
        ({"data": 4}, {"formats": "dim"}),
        ({"data": 4}, {"min_shard_elems": 65}),
        ({"a": 2, "b": 2}, {"shard_axis": "b"}),
        ({"a": 2, "b": 2}, {"shard_axis": ("b", "a")}),
        ({"data": 4}, {"shard_axis": ("data", "model")}),
    ],
    ids=lambda value: "-".join(map(str, value.values())),
)
def test_model_parallel_weights_in_every_storage(axes, options):
    mesh = mesh_of({**axes, "model": 2}, auto=True)
    params = {**model_params(), "w": np.tile(model_params()["w"][:16], (4, 64))}
    tx = wus.shard_updates(optax.lamb(0.01), mesh=mesh, axis=tuple(axes), **options)
    placed = placed_on(mesh, params)
    new, state = tx.apply(placed, tx.init(placed), placed)
    wanted = reference(optax.lamb(0.01), params, [params])
    plain = tx.unshard(state)
    assert relative_error((new, plain), wanted) <= 1e-5
    assert_same_bits(tx.unshard(tx.shard(plain, placed)), plain)
    assert {k: spec_of(x) for k, x in new.items()} == {
        k: entries(s) for k, s in MODEL_SPECS.items()
    }


def test_model_parallel_weights_with_masters():
    mesh = mesh_of({"data": 4, "model": 2}, auto=True)
    params = in_bf16(model_params())
    tx = wus.shard_updates(optax.sgd(0.125, momentum=0.5), mesh=mesh, master_dtype=jnp.float32)
    placed = placed_on(mesh, params)
    new, state = tx.apply(placed, tx.init(placed), placed)
    master = tx.master(state)
    wanted = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32) * (1 - 0.125), params)
    assert_same_bits(master, wanted)
    assert_same_bits(new, jax.tree.map(lambda x: x.astype(jnp.bfloat16), master))
    assert {k: spec_of(x) for k, x in master.items()} == {
        k: entries(s) for k, s in MODEL_SPECS.items()
    }


def test_model_parallel_weights_that_the_update_flattens():
    """As `jnp.vdot` does in prodigy, dadapt_adamw and mechanize."""

    def update(grads: Tree, state: Any, params: Tree = None) -> tuple[Tree, Any]:
        total = sum(jnp.vdot(g, g) for g in jax.tree.leaves(grads))
        return jax.tree.map(lambda g: -g / total, grads), state

    optimizer = optax.GradientTransformation(optax.init_empty_state, update)
    mesh = mesh_of({"data": 4, "model": 2}, auto=True)
    params = model_params()
    placed = placed_on(mesh, params)
    tx = wus.shard_updates(optimizer, mesh=mesh)
    new, _ = tx.apply(placed, tx.init(placed), placed)
    assert relative_error(new, reference(optimizer, params, [params])[0]) <= 1e-5


@pytest.mark.parametrize(("data", "model"), [("Auto", "Explicit"), ("Explicit", "Auto")])
def test_model_parallel_weights_on_axes_of_two_kinds(data, model):
    kinds = (getattr(AxisType, data), getattr(AxisType, model))
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=kinds)
    params = {"w": model_params()["w"]}
    placed = jax.device_put(params, NamedSharding(mesh, P(None, "model")))
    tx = wus.shard_updates(optax.lamb(0.01), mesh=mesh)
    state = tx.init(placed)
    with jax.set_mesh(mesh):
        new, state = jax.jit(tx.apply)(placed, state, placed)
    wanted = reference(optax.lamb(0.01), params, [params])
    assert relative_error((new, tx.unshard(state)), wanted) <= 1e-5
    assert spec_of(new["w"]) == (None, "model")


# -------------------------------------------------------------------------- gradients per example


@pytest.mark.parametrize("context", ["checked", "pmap", "explicit", "auto"])
def test_private_aggregation_of_gradients_per_example(context):
    params = {"w": np.ones((7, 5), np.float32), "b": np.ones((13,), np.float32)}
    optimizer = optax.chain(
        optax.contrib.differentially_private_aggregate(2.0, 0.1, key=9), optax.sgd(0.1)
    )
    steps = batches(params, 16, steps=1)  # two examples on each of 8 replicas
    wanted = reference(optimizer, params, steps)
    mesh = mesh_of({"data": 8}, auto=context == "auto")
    given = {} if context == "pmap" else {"mesh": mesh}
    tx = wus.shard_updates(optimizer, per_example=True, **given)

    def step(params: Tree, state: Any, grads: Tree) -> tuple[Tree, Any]:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    if context == "pmap":
        loop_params = jax.tree.map(lambda x: np.broadcast_to(x, (8, *x.shape)), params)
        state = jax.pmap(tx.init, axis_name="data")(loop_params)
        pmapped = jax.pmap(step, axis_name="data")
        for g in steps:
            g = jax.tree.map(lambda x: x.reshape(8, 2, *x.shape[1:]), g)
            loop_params, state = pmapped(loop_params, state, g)
        found = (loop_params, jax.pmap(tx.unshard, axis_name="data")(state))
        assert relative_error(jax.tree.map(lambda x: x[0], found), wanted) <= 1e-5
        return
    state = tx.init(params)
    specs = tx.state_specs(params)
    if context == "checked":
        ins = (P(), specs, P("data"))
        step = jax.shard_map(step, mesh=mesh, in_specs=ins, out_specs=(P(), specs))
    step = jax.jit(step)
    params = jax.device_put(params, NamedSharding(mesh, P()))
    for g in steps:
        params, state = step(params, state, jax.device_put(g, NamedSharding(mesh, P("data"))))
    assert relative_error((params, tx.unshard(state)), wanted) <= 1e-5
