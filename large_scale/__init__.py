"""Training on large clusters: topologies, meshes, compiling for machines you do not have."""

from large_scale.comparison import Comparison as Comparison
from large_scale.comparison import compare as compare
from large_scale.cost import choose as choose
from large_scale.cost import links as links
from large_scale.cost import scheme as scheme
from large_scale.mesh import data_axes as data_axes
from large_scale.mesh import make_mesh as make_mesh
from large_scale.mesh import torus_lines as torus_lines
from large_scale.topology import CHIPS as CHIPS
from large_scale.topology import Chip as Chip
from large_scale.topology import Topology as Topology
