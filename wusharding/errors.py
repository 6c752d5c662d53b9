"""The library's own exceptions; bad arguments raise `ValueError` or `TypeError`."""


class ShardingError(Exception):
    """Base class: the request is well formed, and this library cannot carry it out."""


class UnsupportedOptimizerError(ShardingError):
    """The optimizer's own `init` or `update` could not be traced."""


class UnsupportedStepError(ShardingError):
    """Nothing in a train step can be sharded; the message says why."""


class StateMismatchError(ShardingError, ValueError):
    """A state, or a tree of gradients or parameters, that belongs to another plan."""


class ReplicationError(ShardingError, ValueError):
    """A value that must be equal on every replica may differ, or the other way round."""


class ContextError(ShardingError, ValueError):
    """No mesh, an unknown mesh axis, or a call from a context where it cannot work."""


class CheckpointError(ShardingError):
    """There is no such checkpoint, or another program wrote it."""


class CorruptCheckpointError(CheckpointError):
    """What was read of a checkpoint is not what was saved."""


class CorruptCheckpointWarning(UserWarning):
    """A newer checkpoint is not intact, and an older one is restored."""


class ReplicatedUpdateWarning(UserWarning):
    """Nothing will be sharded: every leaf of the state stays replicated."""


class ReducedGradientsWarning(UserWarning):
    """Gradients arrive already reduced where local ones were expected: no reduce-scatter."""


class UnsupportedStepWarning(UserWarning):
    """A train step runs as it is written, and the message says why."""
