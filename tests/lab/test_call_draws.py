"""``ladder fuzz --calls``: products as the call takes them without wgmma, right, or said to be wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from support.cases import Outcome
from tensorir_ladder.emulator import find_host_compiler
from tensorir_ladder.kernels.fused_epilogue import PLAIN, Epilogue
from tensorir_ladder.lab import call_draws
from tensorir_ladder.lab.call_draws import ON_HOPPER, DrawnCall, draw_call, emulated_error
from tensorir_ladder.schedules.workloads import Matmul

Command = Callable[..., Outcome]
EMULATED = pytest.mark.skipif(find_host_compiler() is None, reason="no C++ compiler, which the emulator needs")


@EMULATED
def test_a_few_draws_are_right(command: Command) -> None:
    outcome = command("fuzz", "--calls", "2", "--jobs", "1")
    assert outcome.code == 0
    assert "2 calls: 0 refused, 2 done, 0 wrong, 0 raised something, 0 ended their process" in outcome.out


def test_no_record_is_written(command: Command) -> None:
    assert command("fuzz", "--calls", "2", "--out", "x.jsonl").code == 2


@EMULATED
def test_a_wrong_result_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = DrawnCall(Matmul(16, 16, 16, "float32"), Epilogue(2.0), 1, "", "sm_80")
    without = call_draws.made_for(replace(drawn, finish=PLAIN))
    monkeypatch.setattr(call_draws, "made_for", lambda _: without)
    assert emulated_error(drawn).startswith("an error of")


def test_draws_follow_from_their_number() -> None:
    drawn = [draw_call(0, number, True) for number in range(100)]
    assert drawn == [draw_call(0, number, True) for number in range(100)]
    assert {each.arch for each in drawn} == {*call_draws.ARCHES, ON_HOPPER}
    assert all(each.problem.dtype == "float32" for each in drawn if each.arch == ON_HOPPER)
