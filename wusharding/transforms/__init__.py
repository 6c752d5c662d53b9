"""Rewrites programs as a plan says; decides nothing.

The two ways in, and what each has of its own:

| | `shard_updates` | `shard_step` |
|---|---|---|
| the public names | `optimizer.py` | `step.py` |
| tracing what the user hands over | `programs.py` | `step_trace.py` |
| what was decided, kept for later calls | `programs.py` | `step_programs.py` |
| one device's part | `runner.py` | `step_runner.py` |
| arrays as users have them | `spread.py`, `boxes.py` | `step_storage.py`, `copies.py` |

What both use: `checks.py` of what users hand over; `context.py` and `mapped.py`, where a call comes
from and how a device's body runs there; `torus.py`, the lines of a mesh; `trees.py`; `storage.py`,
arrays as a device stores them; and `interpret.py`, which runs a schedule, with `collectives.py`,
`parcels.py`, `wide.py` and `side_by_side.py`.
"""
