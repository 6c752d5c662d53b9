"""Checkpoints hold logical arrays: they move between device counts, plans, modes, plain optax."""

import functools
import importlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import wusharding as wus
from tests.runs import (
    assert_same_bits,
    batches,
    bytes_on_devices,
    layout_of_arrays,
    mean_of,
    mesh_of,
    poisoned,
    reference,
    relative_error,
    training,
)
from wusharding import checkpoint
from wusharding.checkpoint.digest import digests

Tree = Any

COUNTS = (8, 6, 5, 7, 1, 3)
MESHES = {6: {"a": 2, "b": 3}, 8: {"a": 2, "b": 4}}
OPTIONS: dict[int, dict[str, Any]] = {
    1: {},
    3: {"formats": "dim"},
    5: {"formats": "merged"},
    6: {"axis": ("a", "b"), "shard_axis": "b"},
    7: {"formats": "flat"},
    8: {"axis": ("a", "b"), "bucket_bytes": 64},
}


def weights(dtype: Any = np.float32) -> Tree:
    """Dims of which no count divides all, one that 8 divides, and less than there are devices."""
    shapes = {"w": (17, 13), "stack": (3, 7, 6), "even": (8, 16), "b": (11,), "few": (2,), "s": ()}
    rng = np.random.default_rng(3)
    return {k: rng.normal(size=s).astype(dtype) for k, s in shapes.items()}


def random_like(tree: Tree) -> Tree:
    """Other values of the same shapes and dtypes."""
    rng = np.random.default_rng(7)
    return jax.tree.map(lambda x: (100 * rng.normal(size=x.shape)).astype(x.dtype), tree)


@functools.cache
def on_devices(count: int, optimizer: Any, **more: Any) -> tuple[Any, Any]:
    """An optimizer with a plan of its own for each count, and its mesh."""
    mesh = mesh_of(MESHES.get(count, {"data": count}), auto=count % 2 == 0)
    return wus.shard_updates(optimizer, mesh=mesh, **OPTIONS[count], **more), mesh


def placed(tree: Tree, mesh: Any) -> Tree:
    return jax.device_put(tree, NamedSharding(mesh, P()))


LAMB = optax.lamb(0.1)


# ------------------------------------------------------------------------------- logical and stored


@pytest.mark.parametrize("count", COUNTS)
def test_logical_and_back_is_lossless_whatever_the_padding_holds(count):
    tx, mesh = on_devices(count, LAMB)
    params = placed(weights(), mesh)
    plain = random_like(LAMB.init(weights()))
    state, padding = poisoned(tx.shard(plain, params), np.nan)
    assert (padding > 0) == (count > 1)
    logical = checkpoint.logical_state(tx, state)
    assert_same_bits(logical.opt_state, plain)
    wanted = checkpoint.abstract_state(tx, params)
    assert jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), logical) == jax.tree.map(
        lambda x: (x.shape, x.dtype, x.sharding), wanted
    )
    again = checkpoint.sharded_state(tx, logical, params)
    assert_same_bits(tx.unshard(again), plain)
    assert layout_of_arrays(again) == layout_of_arrays(state)


@pytest.mark.parametrize("count", [8, 6])
def test_logical_arrays_are_held_once_and_evenly(count):
    tx, mesh = on_devices(count, optax.adam(0.1))
    params = placed({f"w{i}": np.ones((16 * count, 24), np.float32) for i in range(2)}, mesh)
    params |= placed({f"odd{i}": np.ones((17, 19, 23), np.float32) for i in range(count)}, mesh)
    logical = checkpoint.logical_state(tx, tx.init(params))
    held = bytes_on_devices(logical)
    total = sum(x.nbytes for x in jax.tree.leaves(logical))
    largest = max(x.nbytes for x in jax.tree.leaves(logical))
    assert max(held.values()) <= total / count + largest + 64
    copies = OPTIONS[count].get("shard_axis") and 2
    assert sum(held.values()) <= (copies or 1) * total + 64


def test_model_parallel_states_keep_their_axes():
    mesh = mesh_of({"data": 4, "model": 2}, auto=True)
    params = {"w": np.ones((17, 6), np.float32), "even": np.ones((8, 6), np.float32)}
    specs = {"w": P(None, "model"), "even": P(None, "model")}
    params = jax.device_put(params, {k: NamedSharding(mesh, s) for k, s in specs.items()})
    tx = wus.shard_updates(optax.adam(0.1), mesh=mesh)
    plain = random_like(optax.adam(0.1).init(params))
    logical = checkpoint.logical_state(tx, tx.shard(plain, params))
    assert_same_bits(logical.opt_state, plain)
    assert logical.opt_state[0].mu["w"].sharding.spec[1] == "model"
    assert_same_bits(tx.unshard(checkpoint.sharded_state(tx, logical, params)), plain)


def test_random_keys_travel_as_their_data():
    tx, mesh = on_devices(8, optax.noisy_sgd(0.1, key=jax.random.key(5)))
    params = placed(weights(), mesh)
    state = tx.init(params)
    logical = checkpoint.logical_state(tx, state)
    assert {x.dtype for x in jax.tree.leaves(logical)} >= {jnp.dtype("uint32")}
    assert_same_bits(checkpoint.sharded_state(tx, logical, params).inner, state.inner)


# --------------------------------------------------------------------------------- through a file


@functools.cache
def saved_from(count: int, directory: Any) -> tuple[Any, Tree]:
    tx, mesh = on_devices(count, LAMB)
    params = placed(weights(), mesh)
    plain = random_like(LAMB.init(weights()))
    state, _ = poisoned(tx.shard(plain, params), np.inf)
    manager = ocp.CheckpointManager(directory / str(count))
    assert checkpoint.save(manager, count, tx, params, state)
    manager.wait_until_finished()
    return manager, plain


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tmp_path_factory.mktemp("checkpoints")


def check_pair(source: int, target: int, directory: Any) -> None:
    manager, plain = saved_from(source, directory)
    tx, mesh = on_devices(target, LAMB)
    params = placed(jax.tree.map(np.zeros_like, weights()), mesh)
    found = checkpoint.restore(manager, tx, params)
    assert found.step == source
    assert found.plan["axes"] == list(OPTIONS[source].get("axis", ["data"])) or source == 6
    assert_same_bits(found.params, weights())
    assert_same_bits(tx.unshard(found.state), plain)
    assert layout_of_arrays(found.state) == layout_of_arrays(tx.init(params))
    for x in jax.tree.leaves(found.params):
        assert x.sharding == NamedSharding(mesh, P())


# https://github.com/NVIDIA/Megatron-LM/issues/659 (16 to 24 devices fails, 16 to 32 works)
# https://github.com/deepspeedai/DeepSpeed/pull/5105 (another alignment: the state is wrong)
# https://github.com/deepspeedai/DeepSpeed/issues/2898 (another number of devices is refused)
@pytest.mark.filterwarnings("ignore::wusharding.ReplicatedUpdateWarning")
@pytest.mark.parametrize("source", COUNTS)
def test_saved_on_one_count_restored_on_the_next(source, directory):
    target = COUNTS[(COUNTS.index(source) + 1) % len(COUNTS)]
    check_pair(source, target, directory)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::wusharding.ReplicatedUpdateWarning")
@pytest.mark.parametrize("target", COUNTS)
@pytest.mark.parametrize("source", COUNTS)
def test_all_pairs_of_counts(source, target, directory):
    check_pair(source, target, directory)


# ------------------------------------------------------------------------- plain optax, other modes


def manager_at(path: Any) -> Any:
    return ocp.CheckpointManager(path)


def test_plain_optax_goes_in_and_out(tmp_path):
    params, plain = weights(), random_like(LAMB.init(weights()))
    manager = manager_at(tmp_path)
    checkpoint.save(manager, 1, LAMB, params, plain)
    tx, mesh = on_devices(5, LAMB)
    found = checkpoint.restore(manager, tx, placed(params, mesh))
    assert found.plan is None
    assert_same_bits(tx.unshard(found.state), plain)
    checkpoint.save(manager, 2, tx, found.params, found.state)
    back = checkpoint.restore(manager, LAMB, params)
    assert back.step == 2
    assert_same_bits((back.params, back.state), (params, plain))


def test_orbax_alone_reads_and_writes_them(tmp_path):
    """An old checkpoint of plain optax is adopted, and one of ours is read without this library."""
    params, plain = weights(), random_like(LAMB.init(weights()))
    manager = manager_at(tmp_path)
    args = ocp.args.Composite(opt=ocp.args.StandardSave(plain))
    manager.save(1, args=args)
    tx, mesh = on_devices(8, LAMB)
    params = placed(params, mesh)
    abstract = checkpoint.abstract_state(tx, params)
    args = ocp.args.Composite(opt=ocp.args.StandardRestore(abstract.opt_state))
    old = manager.restore(1, args=args)["opt"]
    state = checkpoint.sharded_state(tx, abstract._replace(opt_state=old), params)
    assert_same_bits(tx.unshard(state), plain)
    with pytest.raises(wus.CheckpointError, match=r"step 1: no item 'wusharding'.*abstract_state"):
        checkpoint.restore(manager, tx, params)

    checkpoint.save(manager, 2, tx, params, state)
    manager.wait_until_finished()
    like = jax.eval_shape(LAMB.init, weights())
    args = ocp.args.Composite(opt_state=ocp.args.StandardRestore(like))
    assert_same_bits(ocp.CheckpointManager(tmp_path).restore(2, args=args)["opt_state"], plain)


MODES = ("checked", "explicit", "auto", "unchecked", "pmap", "eager")


@pytest.mark.parametrize("mode", MODES)
def test_a_step_saved_in_one_mode_goes_on_in_the_next(mode, tmp_path):
    params = {"w": weights()["w"], "b": weights()["b"]}
    grads = batches(params, steps=3)
    optimizer = optax.lamb(0.01)
    loop = training(mode, optimizer, params).run(grads[:2])
    manager = manager_at(tmp_path)
    if mode == "pmap":  # its state is stacked: what pmap unshards is the plain one
        checkpoint.save(manager, 2, optimizer, loop.whole_params, loop.plain_state)
    else:
        checkpoint.save(manager, 2, loop.tx, loop.params, loop.state)
    following = MODES[(MODES.index(mode) + 1) % len(MODES)]
    after = training(following, optimizer, params)
    if following == "pmap":
        found = checkpoint.restore(manager, optimizer, params)
        assert_same_bits((found.params, found.state), (loop.whole_params, loop.plain_state))
        copies = jax.tree.map(lambda x: np.broadcast_to(x, (8, *x.shape)), found[1:3])
        after.params, after.state = copies[0], jax.pmap(after.tx.shard, "data")(*copies[::-1])
    else:
        with after.within():
            _, after.params, after.state, *_ = checkpoint.restore(manager, after.tx, after.params)
        assert_same_bits(after.plain_state, loop.plain_state)
    after.run(grads[2:])
    wanted = reference(optimizer, params, [mean_of(g) for g in grads])
    assert relative_error((after.whole_params, after.plain_state), wanted) <= 1e-5


# ------------------------------------------------------------------------------ dtypes and masters


def halves(tree: Tree) -> Tree:
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)


def saved_with_masters(path: Any) -> tuple[Any, Any, Tree]:
    """A checkpoint of weights in bfloat16, with masters that they are the casts of."""
    tx, mesh = on_devices(8, LAMB, master_dtype=jnp.float32)
    masters = weights()
    params = placed(halves(masters), mesh)
    plain = random_like(LAMB.init(masters))
    state, _ = poisoned(tx.shard(plain, params, masters), np.nan)
    manager = manager_at(path)
    checkpoint.save(manager, 1, tx, params, state)
    return manager, plain, masters


def test_masters_are_saved_and_become_weights_of_their_own_dtype(tmp_path):
    manager, plain, masters = saved_with_masters(tmp_path)
    other, mesh = on_devices(5, LAMB, master_dtype=jnp.float32)
    found = checkpoint.restore(manager, other, placed(halves(masters), mesh))
    assert_same_bits(found.params, halves(masters))
    assert_same_bits(other.master(found.state), masters)
    assert_same_bits(other.unshard(found.state), plain)

    tx, mesh = on_devices(5, LAMB)
    found = checkpoint.restore(manager, tx, placed(masters, mesh))
    assert_same_bits((found.params, tx.unshard(found.state)), (masters, plain))

    third, mesh = on_devices(3, LAMB, master_dtype=jnp.float32)
    wanted = placed(jax.tree.map(lambda x: x.astype(np.float16), masters), mesh)
    found = checkpoint.restore(manager, third, wanted)
    assert_same_bits((found.params, third.master(found.state)), (wanted, masters))


def test_weights_become_masters_of_narrower_ones(tmp_path):
    masters = weights()
    tx, mesh = on_devices(8, LAMB)
    plain = random_like(LAMB.init(masters))
    params = placed(masters, mesh)
    manager = manager_at(tmp_path)
    checkpoint.save(manager, 1, tx, params, tx.shard(plain, params))
    other, mesh = on_devices(7, LAMB, master_dtype=jnp.float32)
    found = checkpoint.restore(manager, other, placed(halves(masters), mesh))
    assert_same_bits(found.params, halves(masters))
    assert_same_bits((other.master(found.state), other.unshard(found.state)), (masters, plain))


def test_what_would_lose_bits_is_refused(tmp_path):
    manager, _, masters = saved_with_masters(tmp_path)
    tx, mesh = on_devices(5, LAMB)
    lost = (
        r"params\['b'\]: found a master weight of float32, and a weight of bfloat16 does not hold"
    )
    with pytest.raises(wus.StateMismatchError, match=lost):
        checkpoint.restore(manager, tx, placed(halves(masters), mesh))
    with pytest.raises(wus.StateMismatchError, match=r"opt_state\[0\]\.mu\['w'\]: found float32"):
        checkpoint.restore(manager, tx, placed(halves(masters), mesh))


def test_a_wider_dtype_holds_what_was_saved(tmp_path):
    tx, mesh = on_devices(8, LAMB)
    params = placed(halves(weights()), mesh)
    state = tx.init(params)
    manager = manager_at(tmp_path)
    checkpoint.save(manager, 1, tx, params, state)
    other, mesh = on_devices(5, LAMB)
    wide = jax.tree.map(lambda x: x.astype(np.float32), halves(weights()))
    found = checkpoint.restore(manager, other, placed(jax.tree.map(np.zeros_like, wide), mesh))
    assert_same_bits(found.params, wide)


# ---------------------------------------------------------------------------------- wrong requests


def test_another_tree_is_refused_and_names_the_leaves(directory):
    manager, _ = saved_from(8, directory)
    tx, mesh = on_devices(8, LAMB)
    for change, message in [
        (lambda p: p.pop("b"), r"params\['b'\]: not wanted.*opt_state\[0\]\.mu\['b'\]: not wanted"),
        (lambda p: p.update(new=np.ones(3, np.float32)), r"params\['new'\]: missing"),
        (
            lambda p: p.update(w=np.ones((17, 14), np.float32)),
            r"params\['w'\]: found shape \[17, 13\], need \[17, 14\]",
        ),
    ]:
        params = weights()
        change(params)
        with pytest.raises(wus.StateMismatchError, match=message):
            checkpoint.restore(manager, tx, placed(params, mesh))
    other, _ = on_devices(8, optax.sgd(0.1, momentum=0.9))
    with pytest.raises(wus.StateMismatchError, match=r"opt_state\[0\]\.mu\['b'\]: not wanted"):
        checkpoint.restore(manager, other, placed(weights(), mesh))


def test_a_step_that_is_not_there(directory, tmp_path):
    manager, _ = saved_from(8, directory)
    tx, mesh = on_devices(8, LAMB)
    with pytest.raises(wus.CheckpointError, match=r"need step 3, found steps \[8\]"):
        checkpoint.restore(manager, tx, placed(weights(), mesh), step=3)
    with pytest.raises(wus.CheckpointError, match=r"need a checkpoint, found steps \[\]"):
        checkpoint.restore(manager_at(tmp_path), tx, placed(weights(), mesh))


def test_states_of_others_are_refused(tmp_path):
    tx, mesh = on_devices(8, LAMB)
    params = placed(weights(), mesh)
    manager = manager_at(tmp_path)
    with pytest.raises(wus.StateMismatchError, match="need the ShardedState"):
        checkpoint.save(manager, 1, tx, params, LAMB.init(params))
    with pytest.raises(wus.StateMismatchError, match="the optimizer is plain optax"):
        checkpoint.save(manager, 1, LAMB, params, tx.init(params))
    stored = tx.init(params).inner  # as a whole step returns it
    with pytest.raises(wus.StateMismatchError, match=r"mu\['b'\]: found .*need .*step.unshard"):
        checkpoint.save(manager, 1, LAMB, params, stored)
    with pytest.raises(ValueError, match="master=: the name is taken"):
        checkpoint.save(manager, 1, tx, params, tx.init(params), master=1)
    assert manager.all_steps() == []


def test_other_items_and_the_managers_own_policy(tmp_path):
    options = ocp.CheckpointManagerOptions(save_interval_steps=2, max_to_keep=2)
    manager = ocp.CheckpointManager(tmp_path, options=options)
    tx, mesh = on_devices(8, LAMB)
    params = placed(weights(), mesh)
    state = tx.init(params)
    for step in range(6):
        data = ocp.args.JsonSave({"batch": step})
        assert checkpoint.save(manager, step, tx, params, state, data=data) == (step % 2 == 0)
    manager.wait_until_finished()
    assert manager.all_steps() == [2, 4]
    found = checkpoint.restore(manager, tx, params, data=ocp.args.JsonRestore())
    assert (found.step, found.items) == (4, {"data": {"batch": 4}})
    assert not checkpoint.save(manager, 7, tx, params, state)
    assert checkpoint.save(manager, 7, tx, params, state, force=True)
    manager.wait_until_finished()
    assert manager.latest_step() == 7


def test_weights_are_donated_while_a_save_runs(tmp_path):
    params = {"w": np.ones((512, 513), np.float32)}
    grads = batches(params, steps=2)
    loop = training("auto", optax.adam(0.1), params, donate=True).run(grads[:1])
    wanted = jax.tree.map(np.array, (loop.whole_params, loop.plain_state))
    manager = manager_at(tmp_path)
    checkpoint.save(manager, 1, loop.tx, loop.params, loop.state)
    loop.run(grads[1:])
    found = checkpoint.restore(manager, loop.tx, loop.params)
    assert_same_bits((found.params, loop.tx.unshard(found.state)), wanted)


def test_without_orbax_the_extra_is_named(monkeypatch):
    for name in [n for n in sys.modules if n.startswith("wusharding.checkpoint")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(ImportError, match=r"pip install 'wusharding\[checkpoint\]'"):
        importlib.import_module("wusharding.checkpoint")


# ---------------------------------------------------------------------------------------- checksums


@pytest.mark.parametrize(
    "dtype",
    ["float32", "bfloat16", "float16", "int8", "uint32", "bool", "complex64", "float8_e4m3fn"],
)
def test_checksums_see_every_bit_and_no_sharding(dtype):
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(24, 5)) * 8).astype(dtype)
    mesh = mesh_of({"data": 8})
    split = [jax.device_put(x, NamedSharding(mesh, P(*s))) for s in [(), ("data",)]]
    assert len(set(digests([x, *split, jax.device_put(x, jax.devices()[3])]))) == 1
    data = np.asarray(x).tobytes()
    changed = []
    for bit in range(0, 8 * len(data), 37):
        other = bytearray(data)
        other[bit // 8] ^= 1 << bit % 8
        changed.append(np.frombuffer(bytes(other), np.asarray(x).dtype).reshape(x.shape))
    if dtype == "bool":
        changed = [c.view(np.uint8) & 1 for c in changed[::8]]
        changed = [jnp.asarray(c.astype(bool)) for c in changed if (c != np.asarray(x)).any()]
    found = digests([x, *map(jnp.asarray, changed)])
    assert len(set(found)) == len(found)


def test_checksums_see_where_an_element_is():
    x = jnp.arange(1.0, 21.0).reshape(4, 5)
    others = [x, x.at[0].set(x[1]).at[1].set(x[0]), x.T, x.reshape(20), jnp.zeros(4), jnp.zeros(5)]
    found = digests(others)
    assert len(set(found)) >= 5  # a shape is compared as such: x and its flat form may agree


def test_signs_of_zero_and_payloads_of_nan_are_bits():
    words = np.array([0x7FC00000, 0x7FC00001, 0x80000000, 0], np.uint32)
    found = digests([jnp.asarray(w[None].view(np.float32)) for w in words.reshape(4, 1)])
    assert len(set(found)) == 4


# ------------------------------------------------------------------------------------ exact resume


def scheduled(learning_rate: float) -> Any:
    return optax.warmup_cosine_decay_schedule(0.0, learning_rate, 2, 6)


RESUMED: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "adam": (lambda: optax.adamw(scheduled(0.1)), np.float32, {}),
    "lamb": (lambda: optax.lamb(scheduled(0.1)), np.float32, {}),
    "muon": (lambda: optax.contrib.muon(0.1), np.float32, {}),
    "schedule-free": (lambda: optax.contrib.schedule_free_adamw(0.1), np.float32, {}),
    "bf16 with masters": (
        lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.01)),
        jnp.bfloat16,
        {"master_dtype": jnp.float32},
    ),
    "MultiSteps": (lambda: optax.MultiSteps(optax.adam(0.1), 2), np.float32, {}),
}


# https://github.com/NVIDIA/Megatron-LM/pull/6920 (Muon goes on from another state, unnoticed)
# https://github.com/pytorch/xla/pull/6862 (master weights are not saved)
@pytest.mark.parametrize(
    "apply", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["apply", "update"]
)
@pytest.mark.parametrize("name", RESUMED)
def test_three_steps_a_save_and_three_more_are_six(name, apply, tmp_path):
    make, dtype, options = RESUMED[name]
    params = {"w": weights(dtype)["w"], "b": weights(dtype)["b"]}
    grads = batches(params, steps=6)
    mode = "checked" if apply else "explicit"
    whole = training(mode, make(), params, apply=apply, **options).run(grads)
    first = training(mode, make(), params, apply=apply, **options).run(grads[:3])
    manager = manager_at(tmp_path)
    checkpoint.save(manager, 3, first.tx, first.params, first.state)
    second = training(mode, make(), params, apply=apply, **options)
    with second.within():
        found = checkpoint.restore(manager, second.tx, second.params)
    second.params, second.state = found.params, found.state
    second.run(grads[3:])
    assert_same_bits((second.params, second.state.inner), (whole.params, whole.state.inner))
    assert_same_bits(second.state.master, whole.state.master)
