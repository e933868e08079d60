"""Misuses of public schedule functions: each is refused by an IllegalSchedule, and the schedule stays as it was."""

from __future__ import annotations

import inspect
import random
from collections import Counter
from typing import Any

import pytest

from tensorir_ladder.lab.draws import Draws
from tensorir_ladder.lab.misuses import (
    MisusedFunction,
    MisuseDrawing,
    draw_misuse,
    public_functions,
    run_misuses,
    try_misuse,
)
from tensorir_ladder.schedules import loops
from tensorir_ladder.schedules.arguments import hints_of

DRAWN = 260


@pytest.mark.parametrize("name", sorted(public_functions()))
def test_each_argument_of_a_public_function_can_be_drawn(name: str) -> None:
    function = public_functions()[name]
    drawing = MisuseDrawing(random.Random(name))
    for parameter in list(inspect.signature(function).parameters)[1:]:
        drawing.value(hints_of(function)[parameter])


def test_misuses_are_refused_and_change_nothing() -> None:
    found = run_misuses(Draws(56, tuple(range(DRAWN))), lambda _: None)
    assert [each.text for each in found if each.what == "failed"] == []
    counts = Counter(each.what for each in found)
    assert counts["refused"] >= 200


def test_draws_take_each_function_in_turn() -> None:
    names = [draw_misuse(1, number).name for number in range(len(public_functions()))]
    assert sorted(names) == sorted(public_functions())


@pytest.mark.parametrize(("name", "broken"), [("loops.bind_grid", KeyError), ("memory.stage_in_shared", None)])
def test_another_error_and_a_change_are_told(name: str, broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    misuse = next(m for m in (draw_misuse(2, number) for number in range(400)) if m.name == name)

    def function(sch: Any, **_: Any) -> None:
        if broken:
            raise broken("k")
        sch.annotate(MisusedFunction(sch).blocks[0], "changed", 1)
        loops.bind_grid(sch, [])

    monkeypatch.setitem(public_functions(), name, function)
    outcome = try_misuse(0, misuse)
    assert outcome.what == "failed"
    assert ("KeyError" if broken else "module") in outcome.text
