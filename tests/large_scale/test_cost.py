"""What reductions cost on links: by hand, against compiled programs, and what is chosen from it."""

import dataclasses
import inspect
import itertools
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import wusharding as wus
from large_scale import (
    CHIPS,
    Topology,
    aot,
    cost,
    data_axes,
    hlo,
    make_mesh,
    programs,
    torus_lines,
)
from tests.large_scale.compilers import needs_libtpu
from tests.large_scale.fakes import fake_devices
from tests.runs import batches, of_kind, training

DOCS = Path(__file__).parents[2] / "docs"
W = CHIPS["v5e"].link_bytes_per_second
HOP = 1e-6


def phases(found, *kinds):
    return [(p.kind, p.over, p.operand_bytes) for p in found.phases if p.kind in kinds]


def seconds(found, kind):
    return [p.seconds for p in found.phases if p.kind == kind]


# ----------------------------------------------------------------------------------------- by hand


def test_a_ring_sends_both_ways_and_a_line_one_way():
    y, x = cost.links("v5e:4x16")
    assert (y.name, x.name) == ("y", "x")
    assert y.seconds(16e6) == pytest.approx(15e6 / (2 * W) + 8 * HOP)
    assert x.seconds(16e6) == pytest.approx(12e6 / W + 3 * HOP)


def test_cores_of_a_chip_share_its_links():
    core, y, _ = cost.links("v3:32x32")
    chip = CHIPS["v3"]
    assert y.bytes_per_second == pytest.approx(2 * chip.link_bytes_per_second / 2)
    assert core.bytes_per_second == pytest.approx(chip.hbm_bytes_per_second / 4)


def test_all_reduce_uses_all_dims_at_once_and_scattering_one_at_a_time():
    size = 2**28
    (whole,) = seconds(cost.scheme("v5e:16x16", size // 4, ()), "all-reduce")
    assert whole == pytest.approx(2 * size * (255 / 256) / (4 * W) + 4 * 8 * HOP)
    first, second = seconds(cost.scheme("v5e:16x16", size // 4), "reduce-scatter")
    assert first == pytest.approx(size * (15 / 16) / (2 * W) + 8 * HOP)
    assert second - 8 * HOP == pytest.approx((first - 8 * HOP) / 16)


def test_domains_of_gpus():
    gpu, domain = cost.links("h100:4x8")
    assert (gpu.name, gpu.size, gpu.bytes_per_second) == ("gpu", 8, 450e9)
    assert (domain.name, domain.size, domain.bytes_per_second) == ("domain", 4, 50e9)


def test_subgroups_all_reduce_the_shard_and_slices_come_last():
    found = cost.scheme("2*v5e:16x16", 2**20, ("x", "y"), scatter_dtype={"slice": "bfloat16"})
    assert phases(found, "reduce-scatter", "all-reduce", "all-gather") == [
        ("reduce-scatter", ("x",), 2**22),
        ("reduce-scatter", ("y",), 2**18),
        ("all-reduce", ("slice",), 2**13),  # half of 2**14: two bytes each
        ("all-gather", ("y",), 2**14),
        ("all-gather", ("x",), 2**18),
    ]
    assert [p.dtype for p in found.phases if p.kind == "all-reduce"] == ["bfloat16"]
    assert found.num_shards == 256 and found.scattered == ("x", "y")


def test_the_update_touches_weights_thrice_and_state_twice():
    """Gradients and weights are read and weights written; state is read and written."""
    for state_bytes in (0, 4, 8):
        found = cost.scheme("v5e:16x16", 2**20, state_bytes_per_elem=state_bytes)
        (update,) = [p for p in found.phases if p.kind == "update"]
        assert update.operand_bytes == 2**20 // 256 * (3 * 4 + 2 * state_bytes)


# ------------------------------------------------------------------------------------ the cheapest


@pytest.mark.parametrize("name", ["v3:128x32", "v5e:4x16", "v4:4x8x4", "2*v5p:4x4x8", "h100:4x8"])
def test_links_come_in_the_cheapest_order(name):
    order = [link.name for link in cost.links(name)]
    times = {
        other: cost.scheme(name, 10**7, other).seconds for other in itertools.permutations(order)
    }
    assert times[tuple(order)] == pytest.approx(min(times.values()))
    assert max(times.values()) > 1.2 * min(times.values())


def test_the_multipod_scatters_along_y_first():
    found = cost.choose("v3:128x32", 25_000_000, min_shards=8192)
    assert found.best.scattered == ("core", "y", "x")


def test_constraints_rule_schemes_out():
    free = cost.choose("v5p:16x16x16", 10**8)
    assert free.best.scattered == ()  # three dims at once beat the update that is saved
    split = cost.choose("v5p:16x16x16", 10**8, min_shards=16)
    assert split.best.num_shards >= 16 and split.best.seconds > free.best.seconds
    assert any("1 shards, needs 16" in why for _, why in split.refused)
    tight = cost.choose("v5p:16x16x16", 10**8, memory_bytes=9 * 10**8)
    assert tight.best.num_shards >= 8
    with pytest.raises(ValueError, match=r"v5e:4x4: no scheme splits the state 17 times"):
        cost.choose("v5e:4x4", 10**6, min_shards=17)
    with pytest.raises(ValueError, match=r"needs 1 times .*|holds .* GiB of"):
        cost.choose("v5e:4x4", 10**10)


def test_it_explains_itself():
    text = str(cost.choose("v5e:4x16", 10**6, min_shards=64))
    assert re.search(r"reduce-scatter +y +16 +float32 +3\.815", text)
    assert "one all-reduce: 1 shards, needs 64" in text


def test_the_page_shows_what_it_says():
    page = " ".join((DOCS / "aot.md").read_text().split())
    (elems,) = re.findall(r'large_scale\.choose\("v3:128x32", ([\d_]+), min_shards=64\)', page)
    text = str(cost.choose("v3:128x32", int(elems), min_shards=64))
    assert " ".join(text.partition("\nscattered")[0].split()) in page
    for name, words in {
        "v5e:16x16": "takes {:.1f} ms instead of {:.1f} on v5e:16x16",
        "v5p:16x16x16": "{:.1f} instead of {:.1f} on v5p:16x16x16",
        "v3:128x32": "on v3:128x32 it is {:.1f} instead of {:.1f}",
        "h100:8x8": "on h100:8x8 {:.1f} instead of {:.1f}",
    }.items():
        ms = [1e3 * cost.scheme(name, 210_000_000, over).seconds for over in (None, ())]
        assert words.format(*ms) in page


def test_links_that_cannot_be_told():
    with pytest.raises(ValueError, match="no public page states what v2 sends between slices"):
        cost.links("2*v2:4x4")
    told = dataclasses.replace(CHIPS["v2"], far_bytes_per_second=3e9)
    assert cost.links(Topology(told, (4, 4), 2))[-1].name == "slice"
    with pytest.raises(ValueError, match="virtual devices of a CPU have no links"):
        cost.links("cpu:8")
    with pytest.raises(ValueError, match=r"v5e:4x4: no link 'z'; it has x, y"):
        cost.scheme("v5e:4x4", 8, ("z",))
    with pytest.raises(ValueError, match=r"v5e:1x1: no link 'x'; it has none"):
        cost.scheme("v5e:1x1", 8, ("x",))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scatter": ("x", "x")}, "names a link twice"),
        ({"scatter": "core"}, "need it for each link, as ('core',); it has x, y"),
        ({"scatter_dtype": "bfloat16"}, "as {link: 'bfloat16'}; it has x, y"),
        ({"elems": -1}, "elems: found -1, need a number of at least 0"),
        ({"elems": math.nan}, "elems: found nan"),
        ({"elems": "8"}, "elems: found '8'"),
        ({"state_bytes_per_elem": -8}, "state_bytes_per_elem: found -8"),
        ({"min_shards": math.nan}, "min_shards: found nan"),
        ({"min_shards": -1}, "min_shards: found -1"),
        ({"memory_bytes": math.nan}, "memory_bytes: found nan"),
        ({"memory_bytes": "16GiB"}, "memory_bytes: found '16GiB'"),
    ],
    ids=str,
)
def test_figures_that_are_none(options, message):
    """Each would be counted with: a link twice, or a constraint that nothing fails."""
    elems = options.get("elems", 10**6)
    options = {name: x for name, x in options.items() if name != "elems"}
    for call in (cost.scheme, cost.choose):
        if options.keys() <= set(inspect.signature(call).parameters):
            with pytest.raises((ValueError, TypeError), match=re.escape(message)):
                call("v5e:4x4", elems, **options)


# ---------------------------------------------------------------------------------- lines of meshes


def test_a_dim_whose_links_others_share_comes_later():
    mesh = make_mesh("v5e:16x16", devices=fake_devices("v5e:16x16"), model=2)
    lines = torus_lines(mesh)["data"]
    assert [len(groups[0]) for groups in lines] == [16, 8]
    mesh = make_mesh("v5e:8x16", devices=fake_devices("v5e:8x16"), model=4)
    # Y closes, but every fourth device of it is of one group; X does not close.
    assert [len(groups[0]) for groups in torus_lines(mesh)["data"]] == [8, 4]
    assert [len(groups[0]) for groups in wus.torus_lines(mesh, "data")] == [8, 4]


# ------------------------------------------------------------------------------- bytes as compiled

WEIGHTS = {"w": jnp.ones((64, 1024)) / 2, "v": jnp.ones((256, 256)) / 4}
ELEMS = 2 * 2**16


def operands(found, kind):
    """The bytes that a device puts in, by size of the group; those of scalars are left out."""
    sizes = {}
    for c in of_kind(found, kind):
        if c.operand_bytes > 64:
            sizes.setdefault(c.groups, []).append(c.operand_bytes)
    return [(len(groups[0]), sum(each)) for groups, each in sizes.items()]


def planned(found, kind):
    return [(p.size, p.operand_bytes) for p in found.phases if p.kind == kind]


def run_of(name, **options):
    """The collectives of a step on this machine's devices, along the lines of a slice."""
    mesh = make_mesh(name, devices=fake_devices(name))
    (stacked, *_) = batches(WEIGHTS)
    loop = training("checked", optax.adam(0.01), WEIGHTS, lines=torus_lines(mesh), **options)
    return loop.collectives(stacked)


@pytest.mark.parametrize("name", ["v4:2x2x1", pytest.param("v5e:2x4", marks=pytest.mark.slow)])
def test_bytes_are_those_of_the_program(name):
    found, wanted = run_of(name), cost.scheme(name, ELEMS)
    for kind in ("reduce-scatter", "all-gather", "all-reduce"):
        assert operands(found, kind) == planned(wanted, kind)


def test_bytes_of_subgroups_are_those_of_the_program():
    shape = {"slice": 2, "data": 4}
    found = run_of("v5e:2x2", shape=shape, axis=tuple(shape), shard_axis="data")
    wanted = cost.scheme("2*v5e:2x2", ELEMS, ("x", "y"))
    for kind in ("reduce-scatter", "all-gather", "all-reduce"):
        assert operands(found, kind) == planned(wanted, kind)


@needs_libtpu
@pytest.mark.parametrize(
    "name", ["v5e:4x4", "v3:8x8", pytest.param("v4:4x4x4", marks=pytest.mark.slow)]
)
def test_bytes_are_those_of_the_tpu_program(name):
    mesh = make_mesh(name, devices=aot.devices(name), axis_types=AxisType.Auto)
    shapes = {"w": jax.ShapeDtypeStruct((4096, 1024), jnp.float32)}
    reports = {}
    for variant in ("ours", "replicated"):
        program = programs.update_program(variant, optax.adam(1e-3), shapes, mesh)
        reports[variant] = aot.compile_step(program.step, *program.args).collectives
    ours, whole = cost.scheme(name, 2**22), cost.scheme(name, 2**22, ())
    for kind in ("reduce-scatter", "all-gather"):
        assert operands(reports["ours"], kind) == planned(ours, kind)
    assert operands(reports["ours"], "all-reduce") == []
    assert operands(reports["replicated"], "all-reduce") == planned(whole, "all-reduce")


# ----------------------------------------------------------------- against the compiler's scheduler


def scheduled_seconds(name, send, tmp_path):
    """What the TPU compiler's scheduler counts on for the one asynchronous collective of `send`.

    It is in no HLO; a compiler option writes the scheduler's timeline to a file.
    """
    mesh = make_mesh(name, devices=aot.devices(name), axis_types=AxisType.Auto)
    groups = torus_lines(mesh)["data"][0]
    sharding = NamedSharding(mesh, P("data"))
    x = jax.ShapeDtypeStruct((mesh.size, 2**14, 128), jnp.float32, sharding=sharding)

    def step(x):
        return send(x[0], groups)

    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False
    )
    options = {"xla_dump_latency_hiding_schedule": True, "xla_dump_to": str(tmp_path)}
    jax.jit(mapped).lower(x).compile(compiler_options=options)
    (path,) = tmp_path.glob("*.schedule.txt")
    timeline = path.read_text()
    clock = float(re.search(r"cycles_per_microsecond: (\d+)", timeline)[1]) * 1e6
    times = [float(t) for t in re.findall(r"start_timestamp_cycles: ([\d.e+]+)", timeline)]
    return max(b - a for a, b in itertools.pairwise(times)) / clock


def gather(x, groups):
    return lax.all_gather(x, "data", axis_index_groups=groups, tiled=True)


def pass_on(x, groups):
    ring = [(a, b) for g in groups for a, b in zip(g, (*g[1:], g[0]), strict=True)]
    return lax.ppermute(x, "data", ring)


@needs_libtpu
@pytest.mark.parametrize("name", ["v5e:4x4", "v5p:4x4x4", "v6e:16x16"])
def test_a_link_carries_what_the_compiler_counts_on(name, tmp_path):
    found = scheduled_seconds(name, pass_on, tmp_path)
    nbytes = 2**14 * 128 * 4
    # It counts on 14/15 of what the pages state.
    assert nbytes / found == pytest.approx(
        CHIPS[name[:3]].link_bytes_per_second * 14 / 15, rel=0.001
    )


@needs_libtpu
def test_a_gather_along_a_ring_takes_what_the_compiler_counts_on(tmp_path):
    found = scheduled_seconds("v5e:16x16", gather, tmp_path)
    link, _ = cost.links("v5e:16x16")
    whole = 16 * 2**14 * 128 * 4
    # It counts a device's own part and no hops, and 14/15 of a link.
    moved = (link.seconds(whole) - link.hops * HOP) * (16 / 15) * (15 / 14)
    assert found == pytest.approx(moved, rel=0.001)
    assert link.seconds(whole) == pytest.approx(found, rel=0.15)


@needs_libtpu
def test_the_compiler_counts_a_line_as_a_ring(tmp_path):
    """Which a line is not: one link carries all that its last device sends."""
    found = scheduled_seconds("v5e:4x4", gather, tmp_path)
    link, _ = cost.links("v5e:4x4")
    assert link.seconds(4 * 2**14 * 128 * 4) == pytest.approx(
        2 * found * (3 / 4) * (14 / 15), rel=0.05
    )


@needs_libtpu
def test_the_compiler_goes_over_all_dims_at_once_only_in_one_all_reduce():
    mesh = make_mesh("v5e:16x16", devices=aot.devices("v5e:16x16"), axis_types=AxisType.Auto)
    groups = torus_lines(mesh)["data"][0]
    sharding = NamedSharding(mesh, P("data"))
    x = jax.ShapeDtypeStruct((mesh.size, 16, 1024, 128), jnp.float32, sharding=sharding)

    def colors(send):
        mapped = jax.shard_map(
            send, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False
        )
        text = jax.jit(mapped).lower(x).compile().as_text()
        return set(re.findall(r"{colors:(\d+)", text))

    assert colors(lambda x: lax.psum(x, "data")) == {"2"}
    scattered = colors(
        lambda x: lax.psum_scatter(x[0], "data", axis_index_groups=groups, tiled=True)[None]
    )
    assert scattered == {"1"}


@needs_libtpu
@pytest.mark.parametrize("name", ["v5e:4x4", "2*v5e:4x4"])
def test_axes_of_the_dims_scatter_natively_each_in_its_dtype(name):
    mesh = make_mesh(name, devices=aot.devices(name), axis_types=AxisType.Auto, split_data=True)
    axes, elems = data_axes(mesh), 2**22
    last = {axes[-1]: jnp.bfloat16}
    tx = wus.shard_updates(optax.adam(1e-3), mesh=mesh, axis=axes, scatter_dtype=last)

    def struct(*shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

    params = {"w": struct(4096, elems // 4096, spec=P())}
    grads = {"w": struct(mesh.size, 4096, elems // 4096, spec=P(axes))}
    specs = tx.state_specs(params)
    step = jax.shard_map(
        lambda p, s, g: tx.apply(jax.tree.map(lambda x: x[0], g), s, p),
        mesh=mesh,
        in_specs=(P(), specs, P(axes)),
        out_specs=(P(), specs),
    )
    text = jax.jit(step).lower(params, tx.abstract_state(params), grads).compile().as_text()
    found = hlo.collectives(text)
    order = [axis.removeprefix("data_") for axis in axes]
    wanted = cost.scheme(name, elems, order, scatter_dtype={order[-1]: jnp.bfloat16})
    for kind in ("reduce-scatter", "all-gather"):
        assert sorted(operands(found, kind)) == sorted(planned(wanted, kind))
    assert operands(found, "all-reduce") == []
    scatters = sorted(of_kind(found, "reduce-scatter"), key=lambda c: c.phase)
    assert [c.dtype for c in scatters] == ["f32"] * (len(axes) - 1) + ["bf16"]
