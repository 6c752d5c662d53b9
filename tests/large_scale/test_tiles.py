"""Which pieces TPU compilers scatter as they are, by the compiler itself; what the others cost."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from large_scale import aot, make_mesh, torus_lines
from large_scale.hlo import collectives, work
from tests.large_scale.compilers import needs_libtpu
from wusharding.formats.tiles import scattered_tiles, tile_padding
from wusharding.transforms import collectives as ours

TILE = 8 * 128


def scattered(topology, scatter, elems, phase=0):
    """The collectives of `scatter(x, groups)` along a line, and the program, compiled."""
    mesh = make_mesh(topology, devices=aot.devices(topology), axis_types=AxisType.Auto)
    groups = torus_lines(mesh)["data"][phase]
    run = functools.partial(scatter, groups=groups)
    run = jax.shard_map(run, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    shape = (mesh.size * len(groups[0]) * elems // 128, 128)
    (x,) = aot.placed([jax.ShapeDtypeStruct(shape, jnp.float32)], mesh, P("data"))
    text = jax.jit(run).lower(x).compile().as_text()
    return collectives(text), text


def kinds(found):
    return Counter(c.kind for c in found)


def moved_bytes(text):
    return sum(w.nbytes for w in work(text) if w.kind == "relayout")


def as_it_is(x, groups):
    pieces = x.reshape(len(groups[0]), -1, 128)
    return 2 * lax.psum_scatter(pieces, "data", axis_index_groups=groups, tiled=True)


def by_us(x, groups):
    size = len(groups[0])
    pieces, pad = ours._in_tiles(x.reshape(size, -1))
    done = lax.psum_scatter(pieces, "data", axis_index_groups=groups, tiled=True).reshape(-1)
    return 2 * done[: done.size - pad]


@needs_libtpu
@pytest.mark.parametrize(
    ("topology", "phase", "sizes"),
    [
        ("v5e:4x4", 0, (452, 900, 906, 2400, 1352, 9432)),
        ("v3:4x4", 0, (604, 1216, 18_912, 19_008)),
        ("v3:4x4", 1, (594, 4728, 4736)),
        ("v5p:4x4x4", 2, (594, 596)),
    ],
)
def test_the_compiler_pads_to_the_same_size(topology, phase, sizes):
    for tiles in sizes:
        found, _ = scattered(topology, as_it_is, tiles * TILE, phase)
        (scatter,) = [c for c in found if c.kind == "reduce-scatter"]
        wanted = scattered_tiles(tiles, scatter.group_size)
        assert scatter.operand_bytes == wanted * scatter.group_size * TILE * 4, tiles
        assert kinds(found)["collective-permute"] == (wanted != tiles), tiles


@needs_libtpu
@pytest.mark.parametrize("rows", [27 * 8, 147, 1179, 4716])  # odd tiles, and rows that fill none
def test_long_pieces_are_padded_by_the_compiler_within_the_ring(rows):
    """Padding them first is a copy of all pieces, and may become an all-reduce."""

    def padded_first(x, groups):
        pieces = jnp.pad(x.reshape(4, -1, 128), ((0, 0), (0, -rows % 16), (0, 0)))
        done = lax.psum_scatter(pieces, "data", axis_index_groups=groups, tiled=True)
        return 2 * done[0, :rows]

    assert tile_padding(rows * 128, (), 4) == 0
    found, text = scattered("v5e:4x4", by_us, rows * 128)
    assert set(kinds(found)) == {"reduce-scatter", "collective-permute"}
    whole = 4 * rows * 128 * 4
    assert sum(c.sent_bytes for c in found) < 1.2 * whole * 3 / 4
    _, copied = scattered("v5e:4x4", padded_first, rows * 128)
    assert moved_bytes(text) < moved_bytes(copied)


@needs_libtpu
def test_short_pieces_are_padded_first():
    """The compiler's permutations would add as much as they hold."""
    assert tile_padding(3 * TILE, (), 4) == TILE
    found, _ = scattered("v5e:4x4", by_us, 3 * TILE)
    assert set(kinds(found)) == {"reduce-scatter"}
    left, _ = scattered("v5e:4x4", as_it_is, 3 * TILE)
    assert sum(c.sent_bytes for c in left) > sum(c.sent_bytes for c in found)
