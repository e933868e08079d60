"""Choices that an earlier process made are found again, and only these."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.cases import hopper
from tensorir_ladder.kernels.tiles import ClusterTile, HopperTile
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.torch_ops import choice, estimates
from tensorir_ladder.torch_ops.choice import EXCHANGED, choices, choose, of_one_tile
from tensorir_ladder.torch_ops.few_rows import Streamed
from tensorir_ladder.torch_ops.kept_choices import CHOICES, OFFERED, SHIFTING, SUFFIX, _recipe, find_choice, keep_choice
from tensorir_ladder.torch_ops.one_tile import all_tiles
from tensorir_ladder.torch_ops.shifted import Shifting
from tensorir_ladder.torch_ops.short_reductions import Unaligned

H200 = hopper(name="NVIDIA H200")
PROBLEM = Matmul(200, 3000, 1000, "float16", "nt")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is kept yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_every_kind_of_choice_is_found_as_it_was() -> None:
    tiles = all_tiles()
    some = [of_one_tile(tiles.tile(place), 4) for place in range(0, len(tiles.width), 97)]
    others = [
        Streamed(),
        Unaligned(HopperTile.parse("64x128x128/1x2")),
        Shifting(ClusterTile.parse("64x128x64/1x1/1x1/3"), "AB"),
        Shifting(ClusterTile.parse("128x128x64/2x1/1x1"), "B"),
    ]
    for number, kept in enumerate([*list(choices())[::7], *some, *others]):
        keep_choice(kept, "made up", number)
        found = find_choice("made up", number)
        assert found == kept
        assert str(found) == str(kept)
    assert find_choice("made up", -1) is None


def test_what_was_chosen_once_is_not_estimated_again(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = choose(PROBLEM, H200)

    def estimated(*_: Any) -> None:
        raise LookupError("estimated anew")

    monkeypatch.setattr(choice, "_cheapest", estimated)
    assert choose(PROBLEM, H200) == chosen
    others: list[tuple[Matmul, Any, dict[str, Any]]] = [
        (replace(PROBLEM, m=208), H200, {}),
        (replace(PROBLEM, layout="nn"), H200, {}),
        (PROBLEM, hopper(name="NVIDIA Other"), {}),
        (PROBLEM, replace(H200, multiprocessors=100), {}),
        (PROBLEM, H200, {"batch": 2}),
        (PROBLEM, H200, {"any_rows": True}),
        (PROBLEM, H200, {"dense": True}),
        (PROBLEM, H200, {"narrows": True}),
        (PROBLEM, H200, {"rows": (PROBLEM.k + 8, PROBLEM.k)}),
        (PROBLEM, H200, {"lain": choice.Lain(replace(PROBLEM, k=99), 1.0)}),
        (PROBLEM, H200, {"lain": choice.Lain(replace(PROBLEM, k=99), 1.0, "A")}),
    ]
    for problem, machine, given in others:
        with pytest.raises(LookupError):
            choose(problem, machine, **given)


def test_choices_for_batches_and_any_rows_are_found() -> None:
    for given in ({"batch": 2}, {"any_rows": True}):
        first, again = (choose(PROBLEM, H200, **given) for _ in range(2))
        assert first == again


def test_other_files_of_costs_choose_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_choice(Streamed(), PROBLEM)
    other = tmp_path / "costs"
    other.mkdir()
    (other / "nvidia-h200.json").write_bytes((estimates.FOLDER / "nvidia-h200.json").read_bytes() + b"\n")
    monkeypatch.setattr(estimates, "FOLDER", other)
    assert find_choice(PROBLEM) is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b'{"kernel": "0"}',
        b'{"kernel": -1}',
        b'{"kernel": 0, "tile": "64x64x64/1x1", "stages": 1000}',
        b'{"kernel": 0, "tile": "no tile", "stages": 4}',
        b'{"kernel": %d, "tile": "no tile", "stages": 4}' % OFFERED.index(EXCHANGED),
        b'{"kernel": %d}' % (len(OFFERED) + 1),
        b'{"kernel": %d, "tile": "64x64x64/1x1/1x1"}' % SHIFTING,
        b'{"kernel": %d, "tile": "64x64x64/1x1/1x1", "shifts": "BA"}' % SHIFTING,
        b'{"kernel": %d, "tile": "no tile", "shifts": "A"}' % SHIFTING,
        b'{"kernel": 0, "more": 1}',
        b"\xff",
    ],
)
def test_a_line_that_is_no_choice_is_left(content: bytes) -> None:
    CHOICES.put(_recipe((PROBLEM,)), SUFFIX, content)
    assert find_choice(PROBLEM) is None
