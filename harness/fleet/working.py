"""Be a process of a fleet: ``python -m tensorir_ladder.harness.fleet.working``, as :mod:`.processes` starts it.

It is TVM's worker, but begins by what TVM's would begin too late with: TVM imports torch, which takes seconds of every
core's time, and only servers need it.
"""

import os
import sys
from contextlib import suppress

NICENESS = 10  # of who builds, beside who measures


def main() -> None:
    """Work for who holds the other ends of two pipes, whose numbers come first; "behind" others, with "torch"."""
    how = sys.argv[3:]
    del sys.argv[3:]
    os.nice(NICENESS if "behind" in how else 0)
    if "torch" not in how:
        sys.modules["torch"] = None  # type: ignore[assignment]  # to import it fails, as where there is none
    from tvm.exec import popen_worker

    with suppress(OSError, KeyboardInterrupt):
        popen_worker.main()


if __name__ == "__main__":
    main()
