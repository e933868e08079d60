"""Work whose module takes a while to import, as TVM does."""

from __future__ import annotations

import time

from tensorir_ladder.harness.lab.workers import Tell

BEGUN = time.monotonic()
time.sleep(1)
IMPORTED = time.monotonic()


def when_imported(number: int, _tell: Tell) -> tuple[float, float]:
    """Say when this process began to import this module, and when it had; in the middle of a piece of work."""
    time.sleep(0.5)
    return (BEGUN, IMPORTED)
