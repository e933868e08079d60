"""Loops that a pipeline would break are refused: dependences of every kind, content that stays, and bad arguments."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import pytest

from support.nests import ATTACKS, BROKEN, nest
from tensorir_ladder.harness.lab.nests import Nest, Outcome, draw, run_nests
from tensorir_ladder.schedules.errors import IllegalPipeline

DRAWN = 200


def outcomes(nests: Sequence[Nest]) -> list[Outcome]:
    """What became of nests; those that are neither right nor refused fail the test, with their text."""
    found = list(run_nests(nests))
    bad = [(outcome, one) for outcome, one in zip(found, nests) if outcome.what not in ("right", "refused")]
    assert not bad, "\n\n".join(f"{outcome}\n{one}\n{one.text}" for outcome, one in bad)
    return found


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("name", BROKEN)
def test_a_loop_that_a_pipeline_breaks_is_refused_by_the_names_of_its_statements(name: str, stages: int) -> None:
    statements, around = BROKEN[name]
    for async_copy in (False, "auto"):
        one = nest(*statements, **around, stages=stages, async_copy=async_copy)
        with pytest.raises(IllegalPipeline) as caught:
            one.pipelined()
        assert len(set(re.findall(r"'(s\d)'", caught.value.problem))) == 2, "both statements are named"
        assert caught.value.loop == "step"


def test_loops_of_many_kinds_are_right_or_refused() -> None:
    hows = [{"stages": 2}, {"stages": 3, "async_copy": "auto"}, {"stages": 4}]
    nests = [
        nest(*statements, **around, **hows[number % len(hows)], number=number)
        for number, (statements, around) in enumerate(ATTACKS)
    ]
    counts = Counter(outcome.what for outcome in outcomes(nests))
    assert counts["right"] >= len(ATTACKS) // 3, counts


@pytest.mark.emulator
def test_drawn_loops_are_right_or_refused_and_most_are_accepted() -> None:
    counts = Counter(outcome.what for outcome in outcomes([draw(7, number) for number in range(DRAWN)]))
    assert counts["right"] >= DRAWN / 2, counts
    assert counts["refused"] >= DRAWN / 10, "nothing hard was drawn"
