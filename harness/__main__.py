"""``python -m harness``: see :mod:`harness.cli`."""

import sys

from tensorir_ladder.harness.cli import main

sys.exit(main())
