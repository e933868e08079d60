"""Tiles that no step tunes over, each of which something was once wrong with: right now, or refused."""

from __future__ import annotations

import pytest

from support.cases import STEPS, make_case
from tensorir_ladder.harness.build import lower
from tensorir_ladder.harness.emulation import EmulatorBackend
from tensorir_ladder.harness.verify import verify

pytestmark = pytest.mark.emulator


@pytest.mark.parametrize(
    ("number", "variant", "shape", "tile", "stages"),
    [
        (13, "whole", (69, 16, 456), "64x16x64/1x2", 3),  # fewer columns than a box has, of a warpgroup
        (13, "stream", (88, 112, 264), "64x112x64/1x2", 3),
    ],
    ids=str,
)
def test_tiles_beyond_the_menu_are_right(
    number: int, variant: str, shape: tuple[int, int, int], tile: str, stages: int
) -> None:
    kind = STEPS[number].tiles.kind
    verify(
        lower(make_case(number, shape, variant, layout="nt", tile=kind.parse(tile), stages=stages)), EmulatorBackend()
    )
