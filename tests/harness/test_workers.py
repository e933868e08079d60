"""Processes side by side."""

from __future__ import annotations

import os

import pytest

from support.slow_module import blas_threads, when_imported
from tensorir_ladder.harness.workers import each_in_a_process


def test_processes_import_the_work_at_once() -> None:
    """One after the other, thirty of them would need minutes before the last of them begins."""
    begun, ended = zip(*{times for _, times in each_in_a_process(when_imported, range(4), jobs=2, limit_s=60)})
    assert len(begun) == 2
    assert max(begun) < min(ended)


@pytest.mark.parametrize("before", [None, "5"])
def test_processes_side_by_side_solve_by_one_thread_each(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "OPENBLAS_NUM_THREADS"
    monkeypatch.delenv(name, raising=False)
    if before:
        monkeypatch.setenv(name, before)
    assert [told for _, told in each_in_a_process(blas_threads, range(2), jobs=2, limit_s=60)] == ["1", "1"]
    assert os.environ.get(name) == before
