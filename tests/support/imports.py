"""What a process imports, told by itself."""

from __future__ import annotations

import sys

from tensorir_ladder.harness.build import Case, lower


def imported_to_lower(case: Case) -> list[str]:
    """Lower a case; list the modules that had to be imported for that."""
    before = set(sys.modules)
    lower(case)
    return sorted(set(sys.modules) - before - {"concurrent.futures.thread"})
