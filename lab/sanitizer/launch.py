"""Runs the kernel prepared in a folder on the GPU, once, and says what came out: ``python -m ….launch FOLDER``.

A process of its own: a kernel that faults spoils its process for others, and one that hangs has to be killed.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tensorir_ladder.lab.sanitizer.preparation import Prepared
from tensorir_ladder.torch_ops.driver import DriverError

SEED = 0
RIGHT, WRONG, STOPPED = "the output is right", "elements of the output are wrong", "the GPU stopped the kernel"


def launched(prepared: Prepared) -> str:
    """Run the kernel; one line that says how that went."""
    arrays, program = prepared.subject.arrays(SEED), prepared.on_gpu()
    product = prepared.subject.product(*arrays[:2])
    try:
        program(*arrays)
    except DriverError as error:
        return f"{STOPPED}: {error}"
    wrong = int((arrays[-1] != product).sum())
    return f"{wrong} of {arrays[-1].size} {WRONG}" if wrong else RIGHT


if __name__ == "__main__":
    print(launched(Prepared(Path(sys.argv[1]))), flush=True)
