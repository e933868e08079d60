"""Import what processes of a fleet have in common: the source of processes does so once, and is copied for each.

Nothing of it may start a thread, which no copy would have, or touch a GPU.
"""

import tvm.rpc.tracker  # noqa: F401

from tensorir_ladder.harness.fleet import asking, building, tracking  # noqa: F401
from tensorir_ladder.harness.tuning import kernels_digest  # noqa: F401
from tensorir_ladder.steps.registry import find_steps
from tensorir_ladder.torch_ops.tuned_here import kernel_digest  # noqa: F401

find_steps()  # imports all of them
