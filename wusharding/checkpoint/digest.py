"""Checksums of arrays that do not depend on how they are split: computed where the pieces lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

_WORD = jnp.uint32


def digests(arrays: Sequence[jax.Array]) -> list[str]:
    """A checksum of 64 bits for each array: of its bits and where in the array they are.

    Each element is mixed with its index and the results are summed modulo 2**32, twice. The sum
    does not depend on the order, so every device sums over its own piece.

    >>> a, b, c = digests([jnp.arange(3.0), jnp.arange(3.0) * 1, jnp.arange(3.0)[::-1]])
    >>> a == b, a == c
    (True, False)
    """
    sums = jax.device_get([_whole(at_home(_digest, x)) for x in arrays])
    return [f"{int(a):08x}{int(b):08x}" for a, b in sums]


@jax.jit
def _digest(x: jax.Array) -> jax.Array:
    bits = _words(x)
    index = jnp.zeros((), _WORD)
    for dim, length in enumerate(bits.shape):
        index = index * _WORD(length & 0xFFFFFFFF) + lax.broadcasted_iota(_WORD, bits.shape, dim)
    once = _mixed(bits ^ _mixed(index + _WORD(0x9E3779B9)))
    twice = _mixed(once + _WORD(0x7F4A7C15))
    return jnp.stack([jnp.sum(once, dtype=_WORD), jnp.sum(twice, dtype=_WORD)])


def _words(x: jax.Array) -> jax.Array:
    """The bits of each element, in words of at most 32 bits."""
    narrow = jnp.issubdtype(x.dtype, jnp.integer) and _bits(x.dtype) < 8
    if narrow or x.dtype == jnp.bool_:
        return x.astype(jnp.int32).astype(_WORD)
    if jnp.iscomplexobj(x):
        return _words(jnp.stack([jnp.real(x), jnp.imag(x)], axis=-1))
    size = _bits(x.dtype)
    if size < 8:
        return _words(x.astype(jnp.float32))
    word = {8: jnp.uint8, 16: jnp.uint16}.get(size, _WORD)
    return lax.bitcast_convert_type(x, word).astype(_WORD)


def _bits(dtype: Any) -> int:
    info = jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo
    return info(dtype).bits


def _mixed(h: jax.Array) -> jax.Array:
    """A bijection of words in which every bit of the input reaches every bit of the output."""
    h = (h ^ (h >> 16)) * _WORD(0x85EBCA6B)
    h = (h ^ (h >> 13)) * _WORD(0xC2B2AE35)
    return h ^ (h >> 16)


def at_home(fun: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """`fun(x)` on the devices where `x` lies, whatever mesh is around.

    The compiler splits the work: types of explicit meshes would ask how.
    """
    x = jnp.asarray(x)
    sharding = x.sharding
    if isinstance(sharding, SingleDeviceSharding):
        mesh, spec = Mesh(np.array([*sharding.device_set]), ("device",)), PartitionSpec()
    elif isinstance(sharding, NamedSharding):
        assert isinstance(sharding.mesh, Mesh)
        mesh, spec = Mesh(sharding.mesh.devices, sharding.mesh.axis_names), sharding.spec
    else:
        return fun(x)
    where = NamedSharding(mesh, spec, memory_kind=sharding.memory_kind)
    pieces = [shard.data for shard in x.addressable_shards]
    with jax.set_mesh(mesh):
        return fun(jax.make_array_from_single_device_arrays(x.shape, where, pieces))


def _whole(x: jax.Array) -> np.ndarray | jax.Array:
    """A replicated result, of which this process sees a copy."""
    return x if x.is_fully_addressable else x.addressable_data(0)
