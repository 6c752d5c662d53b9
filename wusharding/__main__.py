"""`python -m wusharding` is the command `wusharding`."""

import sys

from wusharding.cli import main

sys.exit(main())
