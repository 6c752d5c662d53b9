"""`Format`: one logical array stored as N equal shards, padding included.

A format merges a run of adjacent dims into one, pads it at the end and splits it in N equal chunks.
That one idea covers whole dims (a run of one), merged leading dims, and flattened storage (a run of
all dims); flattened storage may also be kept as rows x 128 lanes, which is how TPU tiles like it,
and in the order of its 8 x 128 tiles, which is how they lie in a TPU's memory: then flattening and
splitting move no data.

Law: `unpack(pack(x)) == x`, bitwise, for every shape, `()`, zero-size and size < N included.
Source: Xu et al. 2020 (arXiv 2004.13336), data formatting.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

SUBLANES, LANES = 8, 128


@dataclasses.dataclass(frozen=True)
class Format:
    """Dims `lo:hi` of `shape` merged, padded to `num_shards * chunk_elems` and split.

    Args:
      shape: the logical shape.
      lo: first of the merged dims.
      hi: one past the last of them.
      num_shards: N.
      chunk_elems: length of one shard along the merged dim; at least `ceil(merged / N)`.
      lanes: store flattened shards as `(rows, lanes)`; only where all dims are merged and `lanes`
        divides the chunk.
      tiled: elements are merged tile by tile, each 8 x 128 of the two minor dims. Those have to be
        merged, and whole tiles have to fill them: as they are, or, where nothing else is merged,
        once the rows are padded to `num_shards * chunk_elems` elements.

    >>> f = Format.split((3, 5), 0, 2, num_shards=4)
    >>> f.shard_shape, f.padded_shape, f.pad_elems
    ((4,), (16,), 1)
    >>> Format.split((17, 16), 0, 1, num_shards=8).shard_shape
    (3, 16)
    """

    shape: tuple[int, ...]
    lo: int
    hi: int
    num_shards: int
    chunk_elems: int
    lanes: int | None = None
    tiled: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.lo < self.hi <= max(len(self.shape), 1):
            raise ValueError(f"Format: dims {self.lo}:{self.hi} do not lie in shape {self.shape}")
        if self.num_shards < 1 or self.num_shards * self.chunk_elems < self.merged_elems:
            raise ValueError(
                f"Format: {self.num_shards} shards of {self.chunk_elems} do not hold "
                f"{self.merged_elems} elements (dims {self.lo}:{self.hi} of {self.shape})"
            )
        if self.lanes is not None and (not self.is_flat or self.chunk_elems % self.lanes):
            raise ValueError(
                f"Format: lanes={self.lanes} needs flattened storage and a chunk that it divides, "
                f"got dims {self.lo}:{self.hi} of {self.shape}, chunk {self.chunk_elems}"
            )
        if self.tiled and not (
            self.hi == len(self.shape) > self.lo + 1
            and (has_whole_tiles(self.shape) or self.padded_rows)
        ):
            raise ValueError(
                f"Format: tiled=True needs the two minor dims merged and filled with whole tiles "
                f"of {SUBLANES} x {LANES}, got dims {self.lo}:{self.hi} of {self.shape}, "
                f"{self.num_shards} shards of {self.chunk_elems}"
            )

    @classmethod
    def split(
        cls,
        shape: tuple[int, ...],
        lo: int,
        hi: int,
        *,
        num_shards: int,
        multiple_of: int = 1,
        lanes: int | None = None,
    ) -> Format:
        """The smallest format over dims `lo:hi` whose chunk is a multiple of `multiple_of`."""
        merged = math.prod(shape[lo:hi])
        chunk = -(-merged // num_shards)
        return cls(shape, lo, hi, num_shards, -(-chunk // multiple_of) * multiple_of, lanes)

    @property
    def is_flat(self) -> bool:
        """All elements are in the merged dims."""
        return self.merged_elems == math.prod(self.shape)

    @property
    def merged_elems(self) -> int:
        """Length of the merged dim, without padding."""
        return math.prod(self.shape[self.lo : self.hi])

    @property
    def padded_rows(self) -> int:
        """Rows of the two minor dims with their padding, where that fills whole tiles; else 0."""
        cols = self.shape[-1] if self.tiled and self.hi - self.lo == 2 else 0
        if not cols or cols % LANES:
            return 0
        rows, rest = divmod(self.num_shards * self.chunk_elems, cols)
        return 0 if rest or rows % SUBLANES else rows

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape in which one shard is computed on."""
        return self.shape[: self.lo] + (self.chunk_elems,) + self.shape[self.hi :]

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """Shape in which one shard is stored."""
        return self._store(self.chunk_elems)

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """Shape of all shards together, as one global array."""
        return self._store(self.chunk_elems * self.num_shards)

    @property
    def storage_dim(self) -> int:
        """The dim of `padded_shape` that is split."""
        return self.lo if self.lanes is None else 0

    @property
    def shard_elems(self) -> int:
        return math.prod(self.shard_shape)

    @property
    def pad_elems(self) -> int:
        """Elements of `padded_shape` that hold no value."""
        return math.prod(self.padded_shape) - math.prod(self.shape)

    def _store(self, length: int) -> tuple[int, ...]:
        if self.lanes is not None:
            return (length // self.lanes, self.lanes)
        return self.shape[: self.lo] + (length,) + self.shape[self.hi :]

    def pack(self, x: Any) -> Any:
        """`x: [*shape] -> [*padded_shape]`; padding is zero. Takes numpy arrays and JAX values.

        An array that has its padding along `wide_dim` already keeps what that holds.
        """
        return self._merged(x, np if isinstance(x, np.ndarray) else jnp).reshape(self.padded_shape)

    def _merged(self, x: Any, xp: Any) -> Any:
        """`x` with dims `lo:hi` merged and padded."""
        more = self._more_rows
        if more and x.shape[-2] == self.shape[-2]:
            x = xp.pad(x, [*[(0, 0)] * (x.ndim - 2), (0, more), (0, 0)])
        length = math.prod(x.shape[self.lo : self.hi])
        if self.tiled:
            x = _tile_by_tile(x, xp)
        merged = x.reshape(*self.shape[: self.lo], length, *self.shape[self.hi :])
        pad = self.num_shards * self.chunk_elems - length
        if pad:
            widths = [(0, 0)] * merged.ndim
            widths[self.lo] = (0, pad)
            merged = xp.pad(merged, widths)
        return merged

    @property
    def _more_rows(self) -> int:
        """Rows that are added before elements are taken tile by tile."""
        return self.padded_rows - self.shape[-2] if self.padded_rows else 0

    @property
    def _by_tiles(self) -> tuple[int, ...]:
        """The shape, rows padded, with its two minor dims taken apart."""
        rows, cols = self.shape[-2] + self._more_rows, self.shape[-1]
        return (*self.shape[:-2], rows // SUBLANES, SUBLANES, cols // LANES, LANES)

    def is_filled(self, index: Any) -> Any:
        """Whether positions along the merged dim of all shards hold an element, or padding.

        >>> f = Format((9, 128), 0, 2, num_shards=2, chunk_elems=1024, tiled=True)
        >>> [bool(f.is_filled(i)) for i in (0, 1151, 1152, 2047)]
        [True, True, False, False]
        """
        if not self._more_rows:
            return index < self.merged_elems
        tile, within = index // (SUBLANES * LANES), index % (SUBLANES * LANES)
        row = tile // (self.shape[-1] // LANES) * SUBLANES + within // LANES
        return row < self.shape[-2]

    def unpack(self, stored: Any) -> Any:
        """`stored: [*padded_shape] -> [*shape]`; whatever the padding holds is dropped."""
        return self.narrowed(self.widened(stored)).reshape(self.shape)

    @property
    def wide_dim(self) -> int | None:
        """The dim that only grows longer by padding; None where there is none such."""
        if self._more_rows:
            return len(self.shape) - 2
        grows = self.num_shards * self.chunk_elems > self.merged_elems
        return self.lo if self.hi - self.lo == 1 and self.shape and grows else None

    @property
    def wide_length(self) -> int:
        """Elements along `wide_dim`, padding included."""
        return self.padded_rows if self._more_rows else self.num_shards * self.chunk_elems

    def widened(self, stored: Any) -> Any:
        """`stored: [*padded_shape] -> [*shape]` but for `wide_dim`, along which padding is left."""
        merged = stored.reshape(self._store_plain())
        if self.wide_dim is None:
            merged = merged[(slice(None),) * self.lo + (slice(0, self.merged_elems),)]
        if not self.tiled:
            return merged if self.wide_dim is not None else merged.reshape(self.shape)
        *lead, rows, sublanes, cols, lanes = self._by_tiles
        merged = merged.reshape(*lead, rows, cols, sublanes, lanes).swapaxes(-3, -2)
        return merged.reshape(*lead, rows * sublanes, cols * lanes)

    def narrowed(self, wide: Any) -> Any:
        """`widened` without its padding."""
        if self.wide_dim is None:
            return wide
        return wide[(slice(None),) * self.wide_dim + (slice(0, self.shape[self.wide_dim]),)]

    def _store_plain(self) -> tuple[int, ...]:
        length = self.num_shards * self.chunk_elems
        return self.shape[: self.lo] + (length,) + self.shape[self.hi :]

    def shard_of(self, x: jax.Array, index: jax.Array | int) -> jax.Array:
        """Shard `index` of the whole `x: [*shape]`, in `local_shape`; padding is zero."""
        start, length = index * self.chunk_elems, self.chunk_elems
        if self._more_rows and self.is_flat:
            x, first = self._rows_around(x.reshape(self.shape[-2:]), start)
            return lax.dynamic_slice_in_dim(x, start - first, length).reshape(self.local_shape)
        merged = self._merged(x, jnp)
        if self.tiled and self.is_flat and merged.size % LANES == 0:
            # In this shape a shard's tiles can be read where they lie.
            rows = merged.reshape(-1, LANES)
            if not length % LANES:
                count = length // LANES
                found = lax.dynamic_slice_in_dim(rows, index * count, count)
                return found.reshape(self.local_shape)
            count = min(length // LANES + 2, rows.shape[0])
            first = jnp.minimum(start // LANES, rows.shape[0] - count)
            merged = lax.dynamic_slice_in_dim(rows, first, count).reshape(-1)
            start = start - first * LANES
            return lax.dynamic_slice_in_dim(merged, start, length).reshape(self.local_shape)
        return lax.dynamic_slice_in_dim(merged, start, length, self.lo)

    def _rows_around(self, x: jax.Array, start: jax.Array | int) -> tuple[jax.Array, Any]:
        """Whole tiles of `x: [rows, cols]` that hold the shard at `start`, flat, and where they do.

        The whole array would have to be padded, a copy, before a shard could be cut out of it.
        """
        rows, cols = x.shape
        strip = SUBLANES * cols  # a row of tiles
        count = SUBLANES * (-(-self.chunk_elems // strip) + 1)
        row = start // strip * SUBLANES
        if count < rows:
            first = jnp.minimum(row, rows - count)
            x = lax.dynamic_slice_in_dim(x, first, count)
        else:
            first = 0
        x = jnp.pad(x, ((0, count), (0, 0)))
        x = lax.dynamic_slice_in_dim(x, row - first, count)
        return _tile_by_tile(x, jnp).reshape(-1), row * cols

    def to_local(self, stored: jax.Array) -> jax.Array:
        """One shard from its stored to its computing shape."""
        return stored.reshape(self.local_shape)

    def to_stored(self, local: jax.Array) -> jax.Array:
        """One shard from its computing to its stored shape."""
        return local.reshape(self.shard_shape)


def _tile_by_tile(x: Any, xp: Any) -> Any:
    """`[..., rows, cols] -> [..., rows / 8, cols / 128, 8, 128]`."""
    *lead, rows, cols = x.shape
    split = x.reshape(*lead, rows // SUBLANES, SUBLANES, cols // LANES, LANES)
    return xp.swapaxes(split, -3, -2)


def has_whole_tiles(shape: tuple[int, ...]) -> bool:
    """Whether 8 x 128 tiles fill the two minor dims.

    >>> has_whole_tiles((3, 16, 256)), has_whole_tiles((3, 16, 64)), has_whole_tiles((128,))
    (True, False, False)
    """
    return len(shape) > 1 and shape[-1] % LANES == 0 and shape[-2] % SUBLANES == 0
