"""Work whose module takes a while to import, as TVM does."""

from __future__ import annotations

import os
import time

from tensorir_ladder.harness.workers import Tell

BEGUN = time.monotonic()
time.sleep(1)
IMPORTED = time.monotonic()


def when_imported(number: int, _tell: Tell) -> tuple[float, float]:
    """Say when this process began to import this module, and when it had; in the middle of a piece of work."""
    time.sleep(0.5)
    return (BEGUN, IMPORTED)


def blas_threads(number: int, _tell: Tell) -> str | None:
    """Say how many threads NumPy is told to solve by in this process."""
    return os.environ.get("OPENBLAS_NUM_THREADS")
