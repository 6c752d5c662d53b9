"""How the arrays of a program are split over a mesh: from names of dims, and from a few hints."""

from large_scale.sharding.completion import Completion as Completion
from large_scale.sharding.completion import complete as complete
from large_scale.sharding.logical import logical_to_specs as logical_to_specs
