"""``ladder calibrate``: what a run times, writes and fits, and what it refuses."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from support.fake_gpu import Command
from tensorir_ladder.gpus import ScheduleTrees
from tensorir_ladder.harness import execution
from tensorir_ladder.harness.build import Case
from tensorir_ladder.harness.call_menus import MenuCandidate, call_menus_bytes, call_menus_path, read_call_menus
from tensorir_ladder.harness.commands import calibrate
from tensorir_ladder.harness.commands.build import ScheduleToBuild
from tensorir_ladder.harness.machines import machine_for
from tensorir_ladder.harness.records import RESULTS
from tensorir_ladder.harness.schedule_menus import menus_bytes, menus_path, read_menus
from tensorir_ladder.harness.shapes import draw_shapes
from tensorir_ladder.harness.verify import WrongResult
from tensorir_ladder.kernels.codegen import toolchain
from tensorir_ladder.torch_ops.menu import MenuFile

pytest.importorskip("sklearn", reason="calibrate fits by scikit-learn: pip install -e '.[menu]'")

H200 = machine_for("sm_90a")
CALLS, SCHEDULES = "h200-call-menus.json.xz", "h200-schedule-menus.json.xz"
FEW = "--seed", "5", "--count", "1"


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is built for a GPU on which each next kernel takes a microsecond more."""
    found: list[Any] = []

    def call(taken: Sequence[MenuCandidate], *_: Any) -> tuple[dict[str, float], float]:
        return {each.name: 1.0 + place for place, each in enumerate(taken)}, 2.0

    def schedules(cases: Sequence[Case], *_: Any) -> tuple[list[float], float]:
        return [1.0 + place for place in range(len(cases))], 2.0

    monkeypatch.setattr(calibrate, "build_ahead", lambda wanted, _jobs: found.extend(wanted))
    monkeypatch.setattr(calibrate, "time_menu", call)
    monkeypatch.setattr(calibrate, "time_schedules", schedules)
    monkeypatch.setattr(execution, "GpuBackend", lambda: None)
    monkeypatch.setattr(execution, "gpu_present", lambda: True)
    monkeypatch.setattr(execution, "gpu_machine", lambda: H200)
    monkeypatch.setattr(calibrate, "called_machine", H200.for_choices)
    monkeypatch.setattr(toolchain, "require_compiler", lambda: None)
    return found


def test_one_run_times_all_parts_and_the_next_what_is_not_timed_yet(
    built: list[Any], command: Command, tmp_path: Path
) -> None:
    outcome = command("calibrate", *FEW, "--out", str(tmp_path))
    assert outcome.code == 0, outcome
    assert {type(each) for each in built} == {MenuCandidate, ScheduleToBuild}
    calls, schedules = read_call_menus(tmp_path / CALLS), read_menus(tmp_path / SCHEDULES)
    assert len(calls.shapes) > 3
    assert (len(schedules.float16), len(schedules.float32)) == (1, 1)
    assert outcome.out.count("of cuBLAS") == len(calls.shapes) + 2
    assert "is not fitted to" in outcome.out
    again = command("calibrate", *FEW, "--out", str(tmp_path))
    assert "nothing is timed" in again.out
    more = command("calibrate", "--parts", "float32", "--seed", "6", "--count", "2", "--out", str(tmp_path))
    assert more.code == 0, more
    assert len(read_menus(tmp_path / SCHEDULES).float32) == 3
    assert read_call_menus(tmp_path / CALLS) == calls


def test_a_user_s_product_is_timed_and_its_fastest_kernel_stands(
    built: list[Any], command: Command, tmp_path: Path
) -> None:
    shapes = "1312x1128x6880,616x408x6912"
    outcome = command("calibrate", "--shape", shapes, "--layout", "nt", "--kernels", "5", "--out", str(tmp_path))
    assert outcome.code == 0, outcome
    assert len(built) == 10
    file = msgspec.json.decode((tmp_path / "nvidia-h200.json").read_bytes(), type=MenuFile)
    times = {(each.m, each.n, each.k): each for each in read_call_menus(tmp_path / CALLS).shapes}
    for shape in ((1312, 1128, 6880), (616, 408, 6912)):
        (own,) = (each for each in file.fastest if (each.m, each.n, each.k, each.layout) == (*shape, "nt"))
        assert own.us == 1.0
        assert len(times[shape].times) == 5
        names = [each.name for each in built if each.problem.shape == f"{shape[0]}x{shape[1]}x{shape[2]}"]
        assert file.kernels[own.kernel] == names[0]


def test_what_was_timed_before_a_fault_is_kept(
    built: list[Any], command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = "calibrate", "--parts", "float32", "--seed", "5", "--count", "2", "--out", str(tmp_path)
    first, _ = (one.problem for one in draw_shapes("schedules", 5, 2, "float32"))

    def timed(cases: Sequence[Case], *_: Any) -> tuple[list[float], float]:
        if cases[0].problem == first:
            raise WrongResult("made up")
        return [1.0] * len(cases), 2.0

    monkeypatch.setattr(calibrate, "time_schedules", timed)
    outcome = command(*arguments)
    assert (outcome.code, "made up; 1 shapes in all" in outcome.err) == (1, True)
    assert len(read_menus(tmp_path / SCHEDULES).float32) == 1
    monkeypatch.setattr(calibrate, "time_schedules", lambda cases, *_: ([1.0] * len(cases), 2.0))
    assert command(*arguments).code == 0, "the same command times what was wrong"
    assert len(read_menus(tmp_path / SCHEDULES).float32) == 2


def test_building_takes_none_of_the_time_for_timing(
    built: list[Any], command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]

    def build(_wanted: Any, _jobs: int) -> None:
        clock[0] += 100.0

    monkeypatch.setattr(calibrate, "build_ahead", build)
    monkeypatch.setattr(calibrate, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    arguments = "calibrate", "--parts", "float32", "--count", "2", "--time-limit", "5", "--out", str(tmp_path)
    assert "2 of 2 shapes are timed" in command(*arguments).out


@pytest.mark.parametrize("more", [("--dry-run",), ("--time-limit", "1")])
def test_without_time_for_a_shape_nothing_is_written(
    more: tuple[str, ...], built: list[Any], command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "time", SimpleNamespace(monotonic=itertools.count(step=10**6).__next__))
    outcome = command("calibrate", "--parts", "call,float32", *FEW, "--out", str(tmp_path), *more)
    assert (outcome.code, "nothing is written" in outcome.out) == (0, True)
    assert built
    assert not list(tmp_path.iterdir())


def test_fitting_writes_what_the_choice_reads(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "FEWEST_FITTED", 20)
    calls = read_call_menus(call_menus_path(RESULTS, "NVIDIA H200"))
    some = tuple([shape for shape in calls.shapes if len(shape.times) > 3][::40])
    (tmp_path / CALLS).write_bytes(call_menus_bytes(msgspec.structs.replace(calls, shapes=some)))
    schedules = read_menus(menus_path(RESULTS, "NVIDIA H200"))
    few = {dtype: getattr(schedules, dtype)[::15] for dtype in ("float16", "float32")}
    (tmp_path / SCHEDULES).write_bytes(menus_bytes(msgspec.structs.replace(schedules, **few)))
    outcome = command("calibrate", "--fit", "--out", str(tmp_path))
    assert outcome.code == 0, outcome
    assert outcome.out.count("by the formula alone") == 3
    menu = msgspec.json.decode((tmp_path / "nvidia-h200.json").read_bytes(), type=MenuFile)
    trees = msgspec.json.decode((tmp_path / "nvidia-h200-schedules.json").read_bytes(), type=ScheduleTrees)
    assert menu.gpu == trees.gpu == "NVIDIA H200"


def test_fitting_is_refused_where_there_is_nothing_to_fit_to(command: Command, tmp_path: Path) -> None:
    nothing = command("calibrate", "--fit", "--out", str(tmp_path))
    assert (nothing.code, CALLS in nothing.err) == (2, True)
    (tmp_path / SCHEDULES).write_bytes(b"not xz")
    damaged = command("calibrate", "--fit", "--out", str(tmp_path))
    assert (damaged.code, "is damaged" in damaged.err) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == [SCHEDULES]


def test_another_architecture_is_refused_before_anything_is_built(
    built: list[Any], command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "gpu_machine", lambda: machine_for("sm_80"))
    outcome = command("calibrate", *FEW, "--out", str(tmp_path))
    assert (outcome.code, "sm_80" in outcome.err, built) == (2, True, [])


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (("--parts", "call,bfloat16"), "no part 'bfloat16'"),
        (("--layout", "nt"), "--layout is that of the products of --shape"),
        (("--shape", "64x64x64", "--fit"), "leave out --fit"),
        (("--shape", "64x64x64", "--parts", "call"), "--parts"),
        (("--shape", "64x60x64"), "multiples of 8"),
        (("--fit", "--dry-run"), "leave out --dry-run"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    more: tuple[str, ...], named: str, built: list[Any], command: Command, tmp_path: Path
) -> None:
    outcome = command("calibrate", "--out", str(tmp_path), *more)
    assert (outcome.code, named in outcome.err, built) == (2, True, [])
