"""Training loops with sharded updates, each a script: `python -m examples.NAME --steps 50`.

With `--replicated` each is the loop that it was before. Unless you say otherwise by `JAX_PLATFORMS`
or `XLA_FLAGS`, they run on eight virtual CPU devices.
"""

import os

if not {"JAX_PLATFORMS", "XLA_FLAGS"} & os.environ.keys():
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    os.environ["NPROC"] = "64"  # threads of XLA's: see CONTRIBUTING.md
