"""Gives every test and doctest eight virtual CPU devices.

It lies at the root so that it is read before any test or module under test imports JAX, whichever
of them pytest is pointed at. Each xdist worker is a process of its own and reads it as well.
"""

import os
import sys

NUM_DEVICES = 8
_COUNT_FLAG = "--xla_force_host_platform_device_count"


def _with_device_count(xla_flags: str, num_devices: int) -> str:
    """`xla_flags` with the device count set, whatever it was; all other flags are kept."""
    kept = [flag for flag in xla_flags.split() if not flag.startswith(_COUNT_FLAG)]
    return " ".join([*kept, f"{_COUNT_FLAG}={num_devices}"])


# JAX reads JAX_PLATFORMS when it is imported, XLA reads the others once, at the first device.
assert "jax" not in sys.modules, "jax was imported before conftest.py could set its devices"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = _with_device_count(os.environ.get("XLA_FLAGS", ""), NUM_DEVICES)
# XLA's CPU client has max(cores, devices) threads, and a device that waits in a collective holds
# one. With fewer cores than devices, some 50 steps started without waiting for their results then
# lock each other out, and XLA ends the process after 40 s; turning asynchronous dispatch off does
# not help. NPROC is the one knob for the number of threads; it costs no time that we could
# measure. See tests/test_devices.py.
os.environ["NPROC"] = str(8 * NUM_DEVICES)
