"""Collectives along the lines of a torus: the same numbers, in less traffic at each later step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh

import wusharding as wus
from large_scale import data_axes, make_mesh
from tests.large_scale.fakes import fake_devices
from tests.runs import assert_same_bits, batches, of_kind, reference, relative_error, training
from wusharding import checkpoint

GRIDS = {
    "2x4": wus.lines_of_grid((2, 4)),
    "4x2": wus.lines_of_grid((4, 2)),
    "2x2x2": wus.lines_of_grid((2, 2, 2)),
    "last dim first": wus.lines_of_grid((2, 4))[::-1],
    "any order": (
        ((6, 1, 0, 3), (2, 5, 4, 7)),
        ((6, 2), (1, 5), (0, 4), (3, 7)),
    ),
}
PARAMS = {
    "w": jnp.arange(17 * 5.0).reshape(17, 5) / 64,
    "m": jnp.ones((48, 33)) * 0.5,
    "b": jnp.arange(3.0),
    "s": jnp.ones(()),
}


@pytest.mark.parametrize("context", ["checked", "unchecked", "pmap", "explicit", "auto", "eager"])
def test_lines_change_no_bit(context):
    grads = batches(PARAMS)
    lines = {"data": GRIDS["any order"]}
    plain = training(context, optax.adam(0.01), PARAMS, bucket_bytes=1024).run(grads)
    found = training(context, optax.adam(0.01), PARAMS, bucket_bytes=1024, lines=lines).run(grads)
    assert_same_bits(found.whole_params, plain.whole_params)
    assert_same_bits(found.plain_state, plain.plain_state)


@pytest.mark.parametrize("grid", GRIDS)
def test_every_grid_moves_what_the_plan_says(grid):
    lines = GRIDS[grid]
    grads = batches(PARAMS)
    loop = training("checked", optax.adam(0.01), PARAMS, lines={"data": lines})
    plan = loop.tx.plan(PARAMS)
    found = loop.collectives(grads[0])
    params, _ = reference(optax.adam(0.01), PARAMS, [np_mean(g) for g in grads])
    assert relative_error(loop.run(grads).whole_params, params) < 1e-6
    for kind, order in (("reduce-scatter", lines), ("all-gather", lines[::-1])):
        moved = of_kind(found, kind)
        rows = [row for row in plan.traffic if row.kind == kind]
        assert [c.operand_bytes for c in moved] == [row.operand_bytes for row in rows]
        assert all(
            row.purpose.endswith(f"in lines of {len(g[0])}")
            for row, g in zip(rows, order, strict=True)
        )
        for c, groups in zip(moved, order, strict=True):
            assert c.group_size == len(groups[0])
            assert set(map(frozenset, c.groups)) == set(map(frozenset, groups))
    first, *rest = of_kind(found, "reduce-scatter")
    for c, groups in zip(rest, lines, strict=False):
        assert c.operand_bytes * len(groups[0]) == first.operand_bytes
        first = c


def np_mean(stacked):
    return jax.tree.map(lambda g: np.sum(g, axis=0) / g.shape[0], stacked)


@pytest.mark.parametrize("context", ["checked", "auto"])
def test_matrices_reach_their_owners_and_come_back(context):
    params = {f"w{i}": jnp.eye(16, 8) + i / 8 for i in range(3)}
    grads = batches(params)
    optimizer = optax.contrib.muon(0.01)
    loop = training(context, optimizer, params, lines={"data": GRIDS["any order"]}).run(grads)
    wanted, state = reference(optimizer, params, [np_mean(g) for g in grads])
    assert relative_error(loop.whole_params, wanted) < 1e-5
    assert relative_error(loop.plain_state, state) < 1e-5


def test_norms_and_a_second_axis():
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.lamb(0.01))
    grads = batches(PARAMS)
    lines = {"b": (((3, 1), (2, 0)), ((3, 2), (1, 0)))}
    loop = training(
        "checked", optimizer, PARAMS, shape={"a": 2, "b": 4}, axis=("a", "b"), lines=lines
    ).run(grads)
    wanted, state = reference(optimizer, PARAMS, [np_mean(g) for g in grads])
    assert relative_error(loop.whole_params, wanted) < 1e-5
    assert relative_error(loop.plain_state, state) < 1e-5


@pytest.mark.parametrize("grid", ["2x4", "last dim first", "any order"])
def test_state_goes_to_plain_optax_and_back(grid):
    """Also where it is stored in its logical shape: shards still lie in an order of their own."""
    params = {
        "even": jnp.arange(48 * 33.0).reshape(48, 33),
        "odd": jnp.arange(17 * 5.0).reshape(17, 5),
    }
    mesh = jax.make_mesh((8,), ("data",))
    tx = wus.shard_updates(optax.trace(0.9), mesh=mesh, lines={"data": GRIDS[grid]})
    plain = optax.TraceState(trace=params)
    state = tx.shard(plain, params)
    assert state.inner.trace["even"].shape == (48, 33)
    assert_same_bits(tx.unshard(state), plain)
    saved = checkpoint.logical_state(tx, state)
    assert_same_bits(saved.opt_state, plain)
    assert_same_bits(checkpoint.sharded_state(tx, saved, params).inner, state.inner)


def test_state_of_other_lines_is_refused():
    loop = training("auto", optax.adam(0.01), PARAMS, lines={"data": GRIDS["last dim first"]})
    other = wus.shard_updates(optax.adam(0.01), mesh=loop.tx._core.mesh)
    with pytest.raises(wus.StateMismatchError, match="belongs to another plan"):
        other.update(PARAMS, loop.state, PARAMS)


BAD = {
    "not all positions": (((0, 1), (2, 3)), ((0, 2), (1, 3))),
    "uneven groups": (((0, 1, 2), (3, 4, 5, 6, 7)),),
    "the same lines twice": wus.lines_of_grid((2, 4))[:1] * 3,
    "a position twice": (((0, 1, 2, 3), (4, 5, 6, 6)), ((0, 4), (1, 5), (2, 6), (3, 6))),
    "no grid": (((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 1), (2, 3), (4, 5), (6, 7))),
    "crossed": (((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 5), (1, 4), (2, 6), (3, 7))),
    "none": (),
}


@pytest.mark.parametrize("case", BAD)
def test_lines_that_are_no_grid_are_refused(case):
    mesh = jax.make_mesh((8,), ("data",))
    tx = wus.shard_updates(optax.adam(0.01), mesh=mesh, lines={"data": BAD[case]})
    with pytest.raises(ValueError, match=r"lines\['data'\]: need, for each dim of a grid of the 8"):
        tx.init(PARAMS)


def test_crossed_groups_that_are_still_right_are_taken():
    """Within a line positions may be in any order, and differ from line to line."""
    lines = (((0, 1, 2, 3), (5, 4, 7, 6)), ((0, 5), (1, 4), (2, 7), (3, 6)))
    mesh = jax.make_mesh((8,), ("data",))
    wus.shard_updates(optax.adam(0.01), mesh=mesh, lines={"data": lines}).init(PARAMS)


def test_lines_for_an_axis_that_is_not_sharded_over():
    mesh = jax.make_mesh((8,), ("data",))
    tx = wus.shard_updates(optax.adam(0.01), mesh=mesh, lines={"model": GRIDS["2x4"]})
    with pytest.raises(ValueError, match="'model' is not among the axes to shard over"):
        tx.init(PARAMS)


# ------------------------------------------------------------------------------- whole TPU tiles

# Whole tiles; some, and an odd number; lanes that are not full; one dim; no dim.
TILES = {
    "tiles": jnp.sin(jnp.arange(64 * 256.0)).reshape(64, 256),
    "conv": jnp.cos(jnp.arange(3 * 8 * 128.0)).reshape(3, 1, 8, 128),
    "odd": jnp.sin(jnp.arange(24 * 384.0)).reshape(24, 384) / 2,
    "embedding": jnp.sin(jnp.arange(1015 * 256.0)).reshape(1015, 256),  # 9 rows of padding
    "narrow": jnp.cos(jnp.arange(3 * 3 * 16 * 64.0)).reshape(3, 3, 16, 64),
    "rows": jnp.sin(jnp.arange(64 * 100.0)).reshape(64, 100),
    "bias": jnp.arange(100.0) / 64,
    "scale": jnp.ones(()),
}
OPTIMIZERS = {
    "adam": optax.adam(0.01),
    "lamb": optax.chain(optax.clip_by_global_norm(1.0), optax.lamb(0.01)),
    "adafactor": optax.adafactor(0.01, min_dim_size_to_factor=8),
    "muon": optax.contrib.muon(0.01),
    "prodigy": optax.contrib.prodigy(0.1),  # takes dot products of flattened weights
    # Padding that counted would add ones to the sum.
    "softmax": optax.stateless(lambda g, _: jax.tree.map(lambda x: x / jnp.exp(x).sum(), g)),
}


@pytest.mark.parametrize(
    ("name", "bucket_bytes"),
    [
        ("adam", 1),
        ("adam", 1 << 22),
        ("lamb", 1 << 16),
        ("prodigy", 1 << 16),
        ("softmax", 1 << 16),
        pytest.param("adafactor", 1, marks=pytest.mark.slow),
        pytest.param("muon", 1, marks=pytest.mark.slow),
    ],
)
def test_tpu_shapes_change_no_number(name, bucket_bytes):
    context = "checked" if bucket_bytes == 1 else "auto"
    optimizer = OPTIMIZERS[name]
    grads = batches(TILES, steps=2)
    lines = {"data": GRIDS["any order"]}
    loop = training(
        context, optimizer, TILES, target="tpu", lines=lines, bucket_bytes=bucket_bytes
    ).run(grads)
    wanted, state = reference(optimizer, TILES, [np_mean(g) for g in grads])
    assert relative_error(loop.whole_params, wanted) < 2e-5
    assert relative_error(loop.plain_state, state) < 2e-5


def test_whole_tiles_are_split_tile_by_tile():
    mesh = jax.make_mesh((8,), ("data",))
    tx = wus.shard_updates(optax.adam(0.01), mesh=mesh, target="tpu")
    formats = {leaf.path: leaf.format for leaf in tx.plan(TILES).params}
    assert formats["['odd']"] == "all dims merged tile by tile, 1152 each"
    assert "tile by tile as rows x 128, 32768 each" in formats["['embedding']"]
    assert formats["['tiles']"] == formats["['rows']"] == "dim 0, 8 each"  # whole tiles already
    assert "tile" not in formats["['narrow']"] + formats["['bias']"]
    # Dims that an optimizer tells apart are not merged.
    factored = wus.shard_updates(OPTIMIZERS["adafactor"], mesh=mesh, target="tpu").plan(TILES)
    assert not factored.whole
    assert "tile" not in {leaf.path: leaf.format for leaf in factored.params}["['odd']"]


# ----------------------------------------------------------------------- lines found in coordinates


def coordinates(mesh, axis):
    """For each position along an axis, at the first position along the others: its place."""
    line = np.moveaxis(mesh.devices, mesh.axis_names.index(axis), 0)
    line = line.reshape(line.shape[0], -1)[:, 0]
    return np.array([(d.slice_index, *d.coords, d.core_on_chip) for d in line])


@pytest.mark.parametrize(
    ("name", "model", "dims"),
    [
        ("v5e:4x8", 1, [2, 1]),  # the longest first
        ("v3:4x4", 1, [4, 1, 2]),  # cores first
        ("2*v4:2x2x4", 1, [4, 3, 1, 2, 0]),  # slices last
        ("v5e:4x8", 4, [1, 2]),
        ("v5e:4x8", 8, []),  # one dim only: the whole axis is a line
        ("v3:4x4", 2, [1, 2]),
    ],
)
def test_lines_follow_the_torus(name, model, dims):
    devices = fake_devices(name, reverse=True)
    mesh = make_mesh(name, devices=devices, model=model, axis_types=AxisType.Auto)
    lines = wus.torus_lines(mesh, "data")
    places = coordinates(mesh, "data")
    assert len(lines) == len(dims)
    for groups, dim in zip(lines, dims, strict=True):
        for group in groups:
            line = places[list(group)]
            assert set(np.flatnonzero(np.ptp(line, axis=0))) == {dim}
            assert (np.diff(line[:, dim]) > 0).all()


@pytest.mark.parametrize(
    "name",
    ["v4:2x2x1", *(pytest.param(n, marks=pytest.mark.slow) for n in ("v5e:2x4", "2*v5e:2x2"))],
)
def test_axes_of_the_dims_send_what_lines_of_one_axis_send(name):
    devices = fake_devices(name)
    one, split = (make_mesh(name, devices=devices, split_data=s) for s in (False, True))
    grads = batches(PARAMS)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.01))
    lines = {"data": wus.torus_lines(one, "data")}
    loops = [
        training("checked", optimizer, PARAMS, lines=lines),
        training("checked", optimizer, PARAMS, shape=dict(split.shape), axis=data_axes(split)),
    ]
    sent = [
        [(c.kind, c.operand_bytes, c.group_size) for c in loop.collectives(grads[0])]
        for loop in loops
    ]
    scattered = [c for c in sent[0] if c[0] in ("reduce-scatter", "all-gather")]
    assert scattered == [c for c in sent[1] if c[0] in ("reduce-scatter", "all-gather")]
    assert len(scattered) == 2 * len(split.shape)
    assert {c[0] for c in sent[0]} == {c[0] for c in sent[1]}
    a, b = (loop.run(grads) for loop in loops)
    assert relative_error(a.whole_params, b.whole_params) < 1e-6
    assert relative_error(a.plain_state, b.plain_state) < 1e-6


def test_order_can_be_given():
    mesh = make_mesh("v3:4x8", devices=fake_devices("v3:4x8"))
    assert [len(g[0]) for g in wus.torus_lines(mesh, "data")] == [2, 8, 4]
    assert [len(g[0]) for g in wus.torus_lines(mesh, "data", (0, 1, 2))] == [2, 4, 8]


def test_devices_in_any_order():
    devices = fake_devices("v5e:4x4")
    shuffled = np.random.default_rng(0).permutation(len(devices))
    mesh = Mesh(np.array([devices[i] for i in shuffled]), ("data",))
    lines = wus.torus_lines(mesh, "data")
    assert [len(g[0]) for g in lines] == [4, 4]
    assert sorted(i for g in lines[0] for i in g) == list(range(16))


def test_what_is_no_grid_has_no_lines():
    diagonal = [d for d in fake_devices("v5e:4x4") if d.coords[0] == d.coords[1]]
    assert wus.torus_lines(Mesh(np.array(diagonal), ("data",)), "data") == ()
    twisted = np.array(fake_devices("v5e:4x4")).reshape(8, 2)
    twisted[0] = twisted[0, ::-1]
    mesh = Mesh(twisted, ("data", "model"))
    assert wus.torus_lines(mesh, "data") == ()
    assert wus.torus_lines(jax.make_mesh((8,), ("data",)), "data") == ()
