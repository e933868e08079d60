"""Steps, shapes and configurations drawn at random: each right, or refused with a reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.emulator.fuzz import Tally, draw_case, run_case
from tests.conftest import SMALL_TILES, STEPS

pytestmark = pytest.mark.emulator


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("steps", [(1, 2, 3, 4), (5,), (6, 7), (8, 9), (10,)], ids=str)
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data(), seed=st.integers(0, 1 << 20))
def test_what_is_not_refused_is_right(steps: tuple[int, ...], data: st.DataObject, seed: int) -> None:
    def choose(choices: Sequence[Any]) -> Any:
        """One of the choices; of tiles the small one, which is quick to compile (``harness fuzz`` takes them all)."""
        small = [tile for kind, tile in SMALL_TILES.items() if isinstance(choices[0], kind)]
        return data.draw(st.sampled_from(small or choices))

    case, tally = draw_case(choose, [STEPS[number] for number in steps]), Tally()
    run_case(case, [seed], tally)
    assert not tally.bad, tally.bad[0]
    assert tally.right + tally.refused == 1
