"""What each primitive does to dims, one file a family. Importing it fills the registry."""

from wusharding.analysis.rules import elementwise as elementwise
from wusharding.analysis.rules import indexing as indexing
from wusharding.analysis.rules import linalg as linalg
from wusharding.analysis.rules import random as random
from wusharding.analysis.rules import reductions as reductions
from wusharding.analysis.rules import shapes as shapes
from wusharding.analysis.rules.base import RULES as RULES
from wusharding.analysis.rules.base import Factors as Factors
from wusharding.analysis.rules.base import LocalView as LocalView
from wusharding.analysis.rules.base import OpRule as OpRule
