"""Steps, shapes and configurations drawn at random: each right, or refused with a reason; and how a run is kept."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.cases import SMALL_TILES, STEPS
from support.cases import Outcome as Printed
from tensorir_ladder.harness.cli import parse
from tensorir_ladder.harness.records.writing import is_alive
from tensorir_ladder.harness.workers import Lost, Tell, _sweep, each_in_a_process
from tensorir_ladder.kernels.tiles import RoleTile, SwappedTile
from tensorir_ladder.lab.commands import fuzz
from tensorir_ladder.lab.drawn_tiles import DRAWN, draw_tile
from tensorir_ladder.lab.fuzzing import PLACES, Bad, Draw, FuzzOutcome, draw_case, run_case, run_draw
from tensorir_ladder.schedules.tiles import BlockTile, SwappedWarpgroupTile, WarpgroupTile
from tensorir_ladder.steps.step import Step

pytestmark = pytest.mark.emulator
SMALL = {kind: [tile] for kind, tile in SMALL_TILES.items()} | {
    RoleTile: [
        RoleTile.parse(text)
        for text in ("64x64x64/1x1", "64x128x64/1x1", "16x64x64/1x1/1", "24x64x64/1x1/2", "8x64x64/1x1/1/2x2")
    ]
}


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("steps", [(1, 2, 3, 4), (5,), (6, 7), (8, 9), (10,), (11, 12), (13,)], ids=str)
@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data(), seed=st.integers(0, 1 << 20))
def test_what_is_not_refused_is_right(steps: tuple[int, ...], data: st.DataObject, seed: int) -> None:
    def choose(choices: Sequence[Any]) -> Any:
        return data.draw(st.sampled_from(choices))

    def small_tile(_: Any, step: Step, variant: str) -> BlockTile:
        """Choose one that is quick to compile (``ladder fuzz`` takes them all)."""
        return choose(SMALL[step.tiles_of(variant).kind])

    step = choose([STEPS[number] for number in steps])
    variant = choose(step.variant_names)
    place, outcome = PLACES["emulator"], FuzzOutcome(0, step.number, variant)
    run_case(draw_case(choose, step, variant, place, small_tile), place, [seed, seed + 1], outcome)
    assert not outcome.bad, outcome.bad[0]
    assert outcome.right == 2 or len(outcome.refused) == 1


@pytest.mark.parametrize("kind", DRAWN, ids=lambda kind: kind.__name__)
def test_tiles_are_drawn_beyond_the_menu(kind: type[BlockTile]) -> None:
    """Most of them divide as they must, none is drawn that its family cannot express, and a seed repeats them."""
    numbers = range(300)
    tiles = [draw_tile(random.Random(number).choice, kind) for number in numbers]
    assert tiles == [draw_tile(random.Random(number).choice, kind) for number in numbers]
    assert all(isinstance(tile, kind) and kind.parse(str(tile)) == tile for tile in tiles)
    menu = {tile for step in STEPS.values() for tile in step.tiles.tuning}
    assert len(set(tiles) - menu) > 150
    sound = [tile for tile in tiles if not tile.misfits()]
    assert 100 < len(sound) < 300
    if kind is RoleTile:
        for swapped in (False, True):
            assert {tile.consumers for tile in sound if tile.swapped == swapped} == {1, 2, 3}
        clusters = {tile.cluster for tile in sound if isinstance(tile, SwappedTile)}
        assert (1, 1) in clusters
        assert {min(cluster) > 1 for cluster in clusters} == {False, True}
    else:
        both = {SwappedWarpgroupTile} if kind is WarpgroupTile else set()
        assert {type(tile) for tile in tiles} == {kind} | both


def test_all_of_a_draw_follows_from_its_number() -> None:
    all_kinds = sorted([(1, "default"), (4, "default"), *((6, name) for name in STEPS[6].variant_names)])
    draws = [Draw(3, number, 2, (1, 4, 6)) for number in range(2 * len(all_kinds))]
    kinds = [draw.kind for draw in draws]
    assert sorted(kinds[: len(all_kinds)]) == all_kinds
    assert kinds[len(all_kinds) :] == kinds[: len(all_kinds)]
    told: list[str] = []
    first, again = (run_draw(draws[5], told.append) for _ in range(2))
    assert first.case == again.case == told[-1]
    assert (first.right + len(first.refused), first.bad) == (2, [])


# The command


def newest(out: Path) -> dict[str, Any]:
    """The last record that was appended to a file."""
    return json.loads(out.read_text().splitlines()[-1])


def arguments(out: Path, *more: str) -> list[str]:
    """Ask for a run of four draws in two processes."""
    return ["fuzz", "--step", "1,2", "--kernels", "4", "--runs", "8", "--jobs", "2", "--out", str(out), *more]


def test_a_run_is_counted_and_goes_on(command: Callable[..., Printed], tmp_path: Path) -> None:
    out = tmp_path / "fuzz.jsonl"
    assert command(*arguments(out)).code == 0
    record = newest(out)
    assert record["executed"] + record["refused"] == 8
    assert record["kernels"] == 4
    assert {step: counts["executed"] for step, counts in record["steps"].items()} == {"1": 4, "2": 4}
    assert list(tmp_path.iterdir()) == [out]
    # As a run left it that was killed while it wrote its second draw: the first is not run again.
    options = parse(arguments(out))
    with fuzz._journal(options, fuzz._draws(options)) as journal:
        journal.add(FuzzOutcome(0, 1, "default", "kept", right=700))
    with journal.path.open("a") as file:
        file.write('{"number": 1, "st')
    assert "fuzzing" not in command(*arguments(out)).out
    assert newest(out)["executed"] == 706
    assert newest(out)["slots_of_earlier_runs"] == 1
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize(
    "given",
    [("--kernels", "9"), ("--jobs", "0"), ("--limit-s", "0"), ("--only", "1"), ("--step", "14")],
    ids=lambda given: given[0],
)
def test_what_cannot_be_fuzzed_is_refused(
    given: tuple[str, str], command: Callable[..., Printed], tmp_path: Path
) -> None:
    outcome = command(*arguments(tmp_path / "fuzz.jsonl", *given))
    assert outcome.code == 2
    assert all(word in outcome.err for word in given)


def test_bad_runs_are_named_smallest_first(
    command: Callable[..., Printed], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def results(_work: Any, draws: Sequence[Draw], _jobs: int, _limit: float) -> Any:
        step, variant = draws[0].kind
        yield draws[0], FuzzOutcome(0, step, variant, "large", 1, bad=[Bad("wrong", "large", "error 3", 900)])
        yield draws[1], FuzzOutcome(1, step, variant, "small", 0, bad=[Bad("fault", "small", "race", 30)])
        yield draws[2], Lost("took more than 9 s", "slow", hung=True)
        yield draws[3], FuzzOutcome(3, step, variant, "right", 2)

    monkeypatch.setattr(fuzz, "each_in_a_process", results)
    outcome = command(*arguments(tmp_path / "fuzz.jsonl"))
    assert outcome.code == 1
    bad = [line for line in outcome.out.splitlines() if line.startswith(("wrong", "fault", "hung"))]
    assert bad == ["fault: small: race", "wrong: large: error 3", "hung: slow: took more than 9 s"]
    assert "ladder fuzz --on emulator --step 1,2 --kernels 4 --runs 8 --seed 0 --only 1" in outcome.out
    record = newest(tmp_path / "fuzz.jsonl")
    assert {what: record[what] for what in ("executed", "right", "wrong", "fault", "hung")} == {
        "executed": 6,
        "right": 3,
        "wrong": 1,
        "fault": 1,
        "hung": 1,
    }


def test_a_kernel_that_hangs_on_the_gpu_ends_the_run_which_can_go_on(
    command: Callable[..., Printed], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def results(_work: Any, draws: Sequence[Draw], _jobs: int, _limit: float) -> Any:
        for draw in draws:
            assert draw.on == "gpu"
            yield (
                draw,
                Lost("took more than 9 s", "slow", hung=True)
                if draw.number == 1
                else FuzzOutcome(0, 12, "roles", right=2),
            )

    monkeypatch.setattr(fuzz, "each_in_a_process", results)
    monkeypatch.setattr(fuzz, "_check_place", lambda _on: None)
    monkeypatch.setattr(fuzz, "_gpu_name", lambda: "a GPU")
    out = tmp_path / "fuzz.jsonl"
    outcome = command(*arguments(out, "--on", "gpu", "--step", "12"))
    assert outcome.code == 1
    assert "hung: slow: took more than 9 s" in outcome.out
    assert "ended after 2 of 4 draws" in outcome.out
    assert [newest(out)[name] for name in ("slots", "hung", "gpu")] == [2, 1, "a GPU"]
    again = command(*arguments(out, "--on", "gpu", "--step", "12"))
    assert again.code == 1
    assert newest(out)["slots_of_earlier_runs"] == 2


@pytest.mark.parametrize("name", ["", "fuzz.json", ".unfinished-fuzz.jsonl", "others.jsonl", "file/fuzz.jsonl"])
def test_a_place_for_the_record_is_refused_before_anything_runs(
    name: str, command: Callable[..., Printed], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("it ran")

    monkeypatch.setattr(fuzz, "each_in_a_process", never)
    (tmp_path / "others.jsonl").write_text('{"gpu": "H200"}\n')
    (tmp_path / "file").touch()
    outcome = command(*arguments(tmp_path / name))
    assert outcome.code == 2
    assert str(tmp_path / name) in outcome.err or str((tmp_path / name).parent) in outcome.err
    assert (tmp_path / "others.jsonl").read_text() == '{"gpu": "H200"}\n'
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "others.jsonl"]


# Processes


def misbehave(what: str, tell: Tell) -> str:
    """End as the name of the work says."""
    tell(f"about to {what}")
    if what == "hang":
        time.sleep(600)
    if what == "exit":
        os._exit(7)
    if what == "raise":
        raise KeyError("lost")
    return what.upper()


def test_work_that_hangs_or_crashes_is_named_and_the_rest_is_done() -> None:
    items = ["a", "hang", "b", "exit", "c", "raise", "d"]
    found = dict(each_in_a_process(misbehave, items, 2, 10))
    assert {item: found[item] for item in "abcd"} == {"a": "A", "b": "B", "c": "C", "d": "D"}
    assert found["hang"] == Lost("took more than 10 s", "about to hang", hung=True)
    assert found["exit"] == Lost("its process ended with status 7", "about to exit")
    assert found["raise"] == Lost("KeyError: 'lost'", "about to raise")


def test_no_process_outlives_one_that_is_killed_and_its_folder_is_swept(tmp_path: Path) -> None:
    work = (
        "import sys; from support.forever import announce; from tensorir_ladder.harness.workers import *\n"
        "places = [sys.argv[1] + '/' + name for name in 'ab']\n"
        "if __name__ == '__main__': list(each_in_a_process(announce, places, 2, 60))"
    )
    (tmp_path / "parent.py").write_text(work)
    place = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[1])}
    parent = subprocess.Popen([sys.executable, str(tmp_path / "parent.py"), str(tmp_path)], env=place)
    try:
        workers = [int(wait_for(tmp_path / name)) for name in "ab"]
    finally:
        parent.kill()
        parent.wait()
    (left,) = tmp_path.glob("tensorir-ladder-*")
    for _ in range(100):
        alive = [worker for worker in workers if is_alive(worker) and not is_zombie(worker)]
        if not alive:
            break
        time.sleep(0.1)
    assert not alive
    _sweep(tmp_path)
    assert not left.exists()


def is_zombie(process: int) -> bool:
    """Tell if a process has ended, and nobody has asked how."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_for(path: Path) -> str:
    """The text of a file, once there is some."""
    for _ in range(600):
        if path.exists() and (text := path.read_text()):
            return text
        time.sleep(0.1)
    raise AssertionError(f"no {path}")
