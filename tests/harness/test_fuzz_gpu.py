"""Drawn cases on the GPU: compiled, run with poisoned outputs, and compared with the reference."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from support.cases import Outcome

pytestmark = [pytest.mark.gpu, pytest.mark.compiler]


def test_drawn_cases_are_right_on_the_gpu(command: Callable[..., Outcome], tmp_path: Path) -> None:
    out = tmp_path / "fuzz.jsonl"
    outcome = command(
        "fuzz", "--on", "gpu", "--step", "11-13", "--kernels", "12", "--runs", "60", "--jobs", "4", "--out", str(out)
    )
    record = json.loads(out.read_text())
    assert (outcome.code, record["bad"]) == (0, []), outcome.out
    assert record["executed"] + record["refused"] == 60
    assert record["executed"] >= 30
    assert record["gpu"]
