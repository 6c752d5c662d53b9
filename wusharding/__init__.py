"""Weight-update sharding for JAX: each replica updates its share of the weights and state."""

from wusharding.analysis.flow import body_ties as body_ties
from wusharding.analysis.flow import control_links as control_links
from wusharding.analysis.lines import lines_of_grid as lines_of_grid
from wusharding.analysis.plan import Plan as Plan
from wusharding.analysis.rules.base import Factors as Factors
from wusharding.analysis.rules.base import factors_of as factors_of
from wusharding.analysis.step_plan import StepPlan as StepPlan
from wusharding.errors import CheckpointError as CheckpointError
from wusharding.errors import ContextError as ContextError
from wusharding.errors import CorruptCheckpointError as CorruptCheckpointError
from wusharding.errors import CorruptCheckpointWarning as CorruptCheckpointWarning
from wusharding.errors import ReducedGradientsWarning as ReducedGradientsWarning
from wusharding.errors import ReplicatedUpdateWarning as ReplicatedUpdateWarning
from wusharding.errors import ReplicationError as ReplicationError
from wusharding.errors import ShardingError as ShardingError
from wusharding.errors import StateMismatchError as StateMismatchError
from wusharding.errors import UnsupportedOptimizerError as UnsupportedOptimizerError
from wusharding.errors import UnsupportedStepError as UnsupportedStepError
from wusharding.errors import UnsupportedStepWarning as UnsupportedStepWarning
from wusharding.jaxprs import Op as Op
from wusharding.jaxprs import Program as Program
from wusharding.jaxprs import trace as trace
from wusharding.transforms.interpret import evaluate_program as evaluate_program
from wusharding.transforms.optimizer import ShardedOptimizer as ShardedOptimizer
from wusharding.transforms.optimizer import ShardedState as ShardedState
from wusharding.transforms.optimizer import shard_updates as shard_updates
from wusharding.transforms.step import ShardedStep as ShardedStep
from wusharding.transforms.step import analyze as analyze
from wusharding.transforms.step import shard_step as shard_step
from wusharding.transforms.torus import torus_lines as torus_lines

__version__ = "0.1.0"
