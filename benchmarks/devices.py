"""Virtual CPU devices for scripts; under pytest the root's conftest.py makes them."""

import collections
import os
from typing import Any

import jax

NUM_DEVICES = 8
_COUNT = "--xla_force_host_platform_device_count"


def use_virtual_devices(*xla_flags: str) -> None:
    """Makes JAX see `NUM_DEVICES` CPU devices; to be called before it looks for any.

    Args:
      *xla_flags: further flags for XLA.
    """
    kept = [f for f in os.environ.get("XLA_FLAGS", "").split() if not f.startswith(_COUNT)]
    os.environ["XLA_FLAGS"] = " ".join([*kept, f"{_COUNT}={NUM_DEVICES}", *xla_flags])
    os.environ["NPROC"] = str(8 * NUM_DEVICES)  # threads of XLA's: see CONTRIBUTING.md
    jax.config.update("jax_platforms", "cpu")


def device_bytes(tree: Any) -> int:
    """Bytes of these arrays on the fullest device, as they lie there."""
    held = collections.Counter[Any]()
    for x in jax.tree.leaves(tree):
        for shard in x.addressable_shards:
            held[shard.device] += shard.data.nbytes
    return max(held.values())
