"""Processes side by side."""

from __future__ import annotations

from support.slow_module import when_imported
from tensorir_ladder.harness.lab.workers import each_in_a_process


def test_processes_import_the_work_at_once() -> None:
    """One after the other, thirty of them would need minutes before the last of them begins."""
    begun, ended = zip(*{times for _, times in each_in_a_process(when_imported, range(4), jobs=2, limit_s=60)})
    assert len(begun) == 2
    assert max(begun) < min(ended)
