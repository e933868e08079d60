"""``python -m harness`` from the root of the tree: the same as ``ladder``."""

import sys

from tensorir_ladder.harness.cli import main

sys.exit(main())
