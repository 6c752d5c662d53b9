"""Checkpoints that move between device counts, plans and plain optax; Orbax writes and reads them.

On disk every array has its logical, unpadded shape, in the tree of the wrapped optimizer's own
state, so that Orbax alone can read it. Beside them lie the plan and a checksum of every array.
"""

try:
    import orbax.checkpoint as _orbax
except ImportError as e:
    raise ImportError(
        "wusharding.checkpoint needs Orbax: pip install 'wusharding[checkpoint]'."
    ) from e

from wusharding.checkpoint.logical import LogicalState as LogicalState
from wusharding.checkpoint.logical import abstract_state as abstract_state
from wusharding.checkpoint.logical import logical_state as logical_state
from wusharding.checkpoint.logical import sharded_state as sharded_state
from wusharding.checkpoint.manager import Restored as Restored
from wusharding.checkpoint.manager import restore as restore
from wusharding.checkpoint.manager import save as save

del _orbax
