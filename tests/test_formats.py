"""Formats: the round trip is bitwise for every shape, and padding never comes back."""

import dataclasses
import itertools
import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wusharding.formats import LANES, SUBLANES, Format, has_whole_tiles
from wusharding.formats.buckets import fill_buckets

SHAPES = [(), (0,), (1,), (3,), (7,), (13,), (4, 0, 2), (1, 5), (17, 12), (3, 3, 5, 7), (5, 1, 2)]
SHAPES += [(16, 256), (1, 3, 8, 128)]  # whole tiles
SHAPES += [(9, 128), (57, 256)]  # rows do not fill tiles
SHARDS = [*range(1, 9), 256, 2048]


def bits(shape: tuple[int, ...]) -> np.ndarray:
    """Floats of every kind: NaNs with payloads, infinities and negative zero among them."""
    words = np.arange(1, math.prod(shape) + 1, dtype=np.uint32) * np.uint32(2654435761)
    words[::5] = 0x7FC12345
    words[1::7] = 0x80000000
    return words.view(np.float32).reshape(shape)


def formats(shape: tuple[int, ...], num_shards: int) -> list[Format]:
    ndim = max(len(shape), 1)
    runs = [(lo, hi) for lo, hi in itertools.combinations(range(ndim + 1), 2)]
    made = [Format.split(shape, lo, hi, num_shards=num_shards) for lo, hi in runs]
    made += [
        dataclasses.replace(fmt, tiled=True)
        for fmt in made
        if has_whole_tiles(shape) and fmt.hi == ndim and fmt.hi - fmt.lo > 1
    ]
    if len(shape) == 2 and shape[1] and shape[1] % LANES == 0:
        unit = math.lcm(SUBLANES, num_shards)
        rows = -(-shape[0] // unit) * unit
        made.append(Format(shape, 0, 2, num_shards, rows * shape[1] // num_shards, tiled=True))
    return made


@pytest.mark.parametrize("num_shards", SHARDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_round_trip_is_bitwise(shape: tuple[int, ...], num_shards: int) -> None:
    x = bits(shape)
    for fmt in formats(shape, num_shards):
        stored = fmt.pack(x)
        assert stored.shape == fmt.padded_shape
        assert stored.size == math.prod(shape) + fmt.pad_elems
        assert fmt.unpack(stored).view(np.uint32).tolist() == x.view(np.uint32).tolist()


@pytest.mark.parametrize("num_shards", [1, 3, 8, 256])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_round_trip_of_jax_arrays_is_bitwise(shape: tuple[int, ...], num_shards: int) -> None:
    x = bits(shape)
    for fmt in formats(shape, num_shards):
        found = np.asarray(fmt.unpack(fmt.pack(jnp.asarray(x))))
        assert found.view(np.uint32).tolist() == x.view(np.uint32).tolist()


@pytest.mark.parametrize("dtype", [bool, np.int8, np.complex64, jnp.bfloat16, np.float16])
def test_round_trip_of_every_dtype(dtype: np.dtype) -> None:
    x = np.arange(17 * 12).reshape(17, 12).astype(dtype)
    for fmt in formats((17, 12), 5):
        stored = fmt.pack(x)
        assert stored.dtype == x.dtype
        np.testing.assert_array_equal(fmt.unpack(stored), x)


@given(
    st.lists(st.sampled_from((1, 2, 3, 5, 7, 11)), max_size=4).map(tuple),
    st.integers(1, 9),
    st.integers(1, 5),
    st.data(),
)
def test_round_trip_of_longer_chunks(
    shape: tuple[int, ...], num_shards: int, multiple_of: int, data: st.DataObject
) -> None:
    lo = data.draw(st.integers(0, max(len(shape) - 1, 0)))
    hi = data.draw(st.integers(lo + 1, max(len(shape), 1)))
    fmt = Format.split(shape, lo, hi, num_shards=num_shards, multiple_of=multiple_of)
    assert fmt.chunk_elems % multiple_of == 0
    x = bits(shape)
    stored = np.where(fmt.pack(np.ones(shape)) == 0, np.float32(np.inf), fmt.pack(x))
    assert fmt.unpack(stored).view(np.uint32).tolist() == x.view(np.uint32).tolist()


def test_tiles_lie_one_after_the_other() -> None:
    x = np.arange(16 * 256).reshape(16, 256)
    fmt = dataclasses.replace(Format.split((16, 256), 0, 2, num_shards=4), tiled=True)
    packed = fmt.pack(x).reshape(4, 8, 128)
    for i, (row, col) in enumerate([(0, 0), (0, 128), (8, 0), (8, 128)]):
        np.testing.assert_array_equal(packed[i], x[row : row + 8, col : col + 128])


@pytest.mark.parametrize("shape", [(13,), (17, 12), (3, 3, 5, 7), (16, 256), (3, 8, 128)], ids=str)
def test_a_shard_is_its_piece_of_the_packed_array(shape: tuple[int, ...]) -> None:
    x = np.arange(1, math.prod(shape) + 1, dtype=np.float32).reshape(shape)
    for num_shards in (1, 3, 8):
        for fmt in formats(shape, num_shards):
            pieces = np.split(fmt.pack(x), num_shards, axis=fmt.storage_dim)
            for i, piece in enumerate(pieces):
                assert piece.shape == fmt.shard_shape
                found = fmt.to_stored(fmt.shard_of(jnp.asarray(x), i))
                np.testing.assert_array_equal(found, piece)
            np.testing.assert_array_equal(fmt.pack(jnp.asarray(x)), fmt.pack(x))


@pytest.mark.parametrize("num_shards", [1, 3, 8, 64])
@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_filled_is_what_packing_fills(shape: tuple[int, ...], num_shards: int) -> None:
    for fmt in formats(shape, num_shards):
        packed = fmt.pack(np.ones(shape or (), np.float32))
        along = np.moveaxis(packed.reshape(fmt.padded_shape), fmt.lo, -1)
        filled = fmt.is_filled(np.arange(fmt.num_shards * fmt.chunk_elems))
        assert (along == filled).all()


def test_padding_does_not_come_back() -> None:
    x = np.arange(1, 17 * 12 + 1, dtype=np.float32).reshape(17, 12)
    for fmt in formats((17, 12), 8):
        stored = fmt.pack(x)
        poisoned = np.where(fmt.pack(np.ones_like(x)) == 0, np.nan, stored)
        assert np.isnan(poisoned).sum() == fmt.pad_elems
        np.testing.assert_array_equal(fmt.unpack(poisoned), x)


def test_rows_and_lanes_hold_the_same_elements() -> None:
    x = np.arange(4096, dtype=np.float32).reshape(16, 256)
    fmt = Format.split((16, 256), 0, 2, num_shards=4, multiple_of=1024, lanes=128)
    assert (fmt.shard_shape, fmt.padded_shape) == ((8, 128), (32, 128))
    np.testing.assert_array_equal(fmt.pack(x).reshape(-1), x.reshape(-1))
    np.testing.assert_array_equal(fmt.unpack(fmt.pack(x)), x)
    local = fmt.to_local(jnp.asarray(fmt.pack(x)[:8]))
    assert local.shape == fmt.local_shape == (1024,)


@pytest.mark.parametrize("shape", [(1,), (5,), (17, 12), (3, 3, 5, 7), (0,)], ids=str)
def test_lanes_drop_their_padding(shape: tuple[int, ...]) -> None:
    x = bits(shape)
    lo, hi = 0, len(shape)
    fmt = Format.split(shape, lo, hi, num_shards=3, multiple_of=16, lanes=8)
    assert fmt.padded_shape == (3 * fmt.shard_shape[0], 8)
    stored = np.where(fmt.pack(np.ones(shape)) == 0, np.float32(np.nan), fmt.pack(x))
    assert fmt.unpack(stored).view(np.uint32).tolist() == x.view(np.uint32).tolist()
    assert fmt.to_stored(fmt.shard_of(jnp.asarray(x), 1)).shape == fmt.shard_shape


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((3, 5), 0, 3, 2, 8), "do not lie in shape"),
        (((3, 5), 1, 1, 2, 8), "do not lie in shape"),
        (((3, 5), 0, 2, 4, 3), "do not hold 15 elements"),
        (((3, 5), 0, 2, 0, 15), "do not hold"),
        (((3, 5), 0, 1, 3, 1, 128), "needs flattened storage"),
        (((3, 5), 0, 2, 3, 5, 128), "a chunk that it divides"),
        (((16, 256), 0, 1, 2, 8, None, True), "needs the two minor dims merged"),
        (((16, 64), 0, 2, 2, 512, None, True), "filled with whole tiles of 8 x 128"),
        (((2, 8, 128), 0, 2, 2, 8, None, True), "needs the two minor dims merged"),
    ],
)
def test_bad_formats_are_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Format(*arguments)


@given(st.lists(st.integers(0, 40), max_size=30), st.integers(1, 50), st.integers(0, 50))
def test_buckets_cover_every_element_once(elems: list[int], capacity: int, alone: int) -> None:
    buckets = fill_buckets(elems, capacity, alone)
    large = max(min(capacity, alone), 1)
    covered: dict[int, list[tuple[int, int]]] = {}
    for bucket in buckets:
        size = sum(p.stop - p.start for p in bucket)
        assert size <= capacity or (len(bucket) == 1 and elems[bucket[0].array] >= large)
        for p in bucket:
            covered.setdefault(p.array, []).append((p.start, p.stop))
    for i, n in enumerate(elems):
        ends = [0, *(stop for _, stop in covered.get(i, []))]
        starts = [start for start, _ in covered.get(i, [])]
        assert starts == ends[:-1] and ends[-1] == n
    small = sum(n for n in elems if n < large)
    assert len(buckets) == sum(n >= large for n in elems) + -(-small // capacity)


def test_the_edge_of_a_bucket_may_lie_inside_an_array() -> None:
    buckets = fill_buckets([3, 0, 2, 9, 1], 4, 4)
    assert [[tuple(piece) for piece in bucket] for bucket in buckets] == [
        [(3, 0, 9)],
        [(0, 0, 3), (2, 0, 1)],
        [(2, 1, 2), (4, 0, 1)],
    ]
    assert fill_buckets([0, 0], 4, 4) == fill_buckets([], 4, 4) == []
