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
      tiled: elements are merged tile by tile, each 8 x 128 of the two minor dims; only where those
        are merged and whole tiles fill them.

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
            self.hi == len(self.shape) > self.lo + 1 and has_whole_tiles(self.shape)
        ):
            raise ValueError(
                f"Format: tiled=True needs the two minor dims merged and filled with whole tiles "
                f"of {SUBLANES} x {LANES}, got dims {self.lo}:{self.hi} of {self.shape}"
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
        """`x: [*shape] -> [*padded_shape]`; padding is zero. Takes numpy arrays and JAX values."""
        return self._merged(x, np if isinstance(x, np.ndarray) else jnp).reshape(self.padded_shape)

    def _merged(self, x: Any, xp: Any) -> Any:
        """`x` with dims `lo:hi` merged and padded."""
        if self.tiled:
            x = xp.swapaxes(x.reshape(self._by_tiles), -3, -2)
        merged = x.reshape(self.shape[: self.lo] + (self.merged_elems,) + self.shape[self.hi :])
        pad = self.num_shards * self.chunk_elems - self.merged_elems
        if pad:
            widths = [(0, 0)] * merged.ndim
            widths[self.lo] = (0, pad)
            merged = xp.pad(merged, widths)
        return merged

    @property
    def _by_tiles(self) -> tuple[int, ...]:
        """The shape with its two minor dims taken apart."""
        rows, cols = self.shape[-2:]
        return (*self.shape[:-2], rows // SUBLANES, SUBLANES, cols // LANES, LANES)

    def unpack(self, stored: Any) -> Any:
        """`stored: [*padded_shape] -> [*shape]`; whatever the padding holds is dropped."""
        merged = stored.reshape(self._store_plain())
        if merged.shape[self.lo] != self.merged_elems:
            index = (slice(None),) * self.lo + (slice(0, self.merged_elems),)
            merged = merged[index]
        if self.tiled:
            *lead, rows, sublanes, cols, lanes = self._by_tiles
            merged = merged.reshape(*lead, rows, cols, sublanes, lanes).swapaxes(-3, -2)
        return merged.reshape(self.shape)

    def _store_plain(self) -> tuple[int, ...]:
        length = self.num_shards * self.chunk_elems
        return self.shape[: self.lo] + (length,) + self.shape[self.hi :]

    def shard_of(self, x: jax.Array, index: jax.Array | int) -> jax.Array:
        """Shard `index` of the whole `x: [*shape]`, in `local_shape`; padding is zero."""
        merged = self._merged(x, jnp)
        if self.tiled and self.is_flat and self.chunk_elems % LANES == 0:
            # In this shape a shard's tiles can be read where they lie.
            rows = merged.reshape(self.num_shards, -1, LANES)
            return lax.dynamic_index_in_dim(rows, index, keepdims=False).reshape(self.local_shape)
        return lax.dynamic_slice_in_dim(merged, index * self.chunk_elems, self.chunk_elems, self.lo)

    def to_local(self, stored: jax.Array) -> jax.Array:
        """One shard from its stored to its computing shape."""
        return stored.reshape(self.local_shape)

    def to_stored(self, local: jax.Array) -> jax.Array:
        """One shard from its computing to its stored shape."""
        return local.reshape(self.shard_shape)


def has_whole_tiles(shape: tuple[int, ...]) -> bool:
    """Whether 8 x 128 tiles fill the two minor dims.

    >>> has_whole_tiles((3, 16, 256)), has_whole_tiles((3, 16, 64)), has_whole_tiles((128,))
    (True, False, False)
    """
    return len(shape) > 1 and shape[-1] % LANES == 0 and shape[-2] % SUBLANES == 0
