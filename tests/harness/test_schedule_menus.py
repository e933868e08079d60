"""``ladder menu --shapes schedules``: which schedules are timed, and the file that trees are grown over."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from support.cases import Outcome
from support.fake_gpu import Command
from tensorir_ladder.harness import execution, schedule_menus
from tensorir_ladder.harness.build import Case, lower
from tensorir_ladder.harness.built_schedules import build_schedule
from tensorir_ladder.harness.commands import menu as menu_command
from tensorir_ladder.harness.commands.build import ScheduleToBuild
from tensorir_ladder.harness.execution import GpuBackend
from tensorir_ladder.harness.machines import machine_for
from tensorir_ladder.harness.records import RESULTS
from tensorir_ladder.harness.schedule_menus import (
    ScheduleMenus,
    as_planned,
    as_row,
    menus_bytes,
    menus_in,
    menus_path,
    read_menus,
    scheduled_candidates,
    time_schedules,
    with_schedule_times,
)
from tensorir_ladder.harness.shapes import draw_shapes
from tensorir_ladder.harness.verify import WrongResult
from tensorir_ladder.kernels.codegen import toolchain
from tensorir_ladder.kernels.codegen.toolchain import Compiler
from tensorir_ladder.schedules.errors import DamagedFile, IllegalSchedule
from tensorir_ladder.schedules.tiles import Choice
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.steps.choice import choose_step

H200 = machine_for("sm_90a")
PRODUCTS = [
    Matmul(513, 1001, 4097),
    Matmul(77, 491, 1292),
    Matmul(1000, 1000, 1000, "float16"),
    Matmul(104, 168, 3912, "float16"),
    Matmul(327, 1553, 3922, "float16"),
]


@pytest.fixture(scope="module", params=PRODUCTS, ids=str)
def taken(request: pytest.FixtureRequest) -> list[Case]:
    """A product's candidates."""
    return scheduled_candidates(request.param, H200)


def test_what_is_chosen_is_timed_first(taken: list[Case]) -> None:
    step, config = choose_step(taken[0].problem, H200.for_choices())
    first = taken[0]
    assert (first.step, first.variant, first.tile, first.stages) == (step, config.variant, config.tile, config.stages)
    assert first.planned == step.plan(first.problem, config)


def test_every_candidate_is_another_schedule_that_can_be_built(taken: list[Case]) -> None:
    rows = {msgspec.json.encode(as_row(case.config, case.planned)) for case in taken}
    assert 12 <= len(rows) == len(taken) <= 18
    for case in taken[::6]:
        assert lower(case).cuda
    for case in taken:
        case.validate()
        assert as_planned(as_row(case.config, case.planned), case.problem.dtype) == (
            Choice(case.tile, case.stages),
            case.planned,
        )


def test_the_cheapest_tiles_are_timed_in_plans_that_differ_in_one_thing(taken: list[Case]) -> None:
    likeliest, otherwise = taken[: schedule_menus.LIKELIEST], taken[schedule_menus.LIKELIEST :]
    usual = {(case.variant, case.tile, case.stages): case.planned for case in likeliest}
    assert otherwise
    for case in otherwise:
        planned = usual[case.variant, case.tile, case.stages]
        assert sum(one != other for one, other in zip(case.planned, planned)) == 1


MENUS = ScheduleMenus("NVIDIA H200", "made up")


def test_times_of_a_product_that_was_timed_before_are_on_the_scale_of_its_baseline_then(taken: list[Case]) -> None:
    dtype, problem = taken[0].problem.dtype, taken[0].problem
    first = with_schedule_times(MENUS, taken[:3], [1.0, 2.0, 3.0], 4.0)
    again = with_schedule_times(first, taken[2:4], [6.0, 5.0], 8.0)  # a GPU half as fast
    (*sizes, cublas_us, rows) = getattr(again, dtype)[0]
    assert (tuple(sizes), cublas_us) == ((problem.m, problem.n, problem.k), 4.0)
    assert [us for *_, us in rows] == [1.0, 2.0, 3.0, 2.5]
    assert [list(row[:-1]) for row in rows] == [list(as_row(case.config, case.planned)) for case in taken[:4]]
    other = with_schedule_times(again, scheduled_candidates(Matmul(64, 64, 64, dtype), H200)[:1], [1.0], 1.0)
    assert len(getattr(other, dtype)) == 2


def test_a_file_is_read_as_it_was_written(taken: list[Case], tmp_path: Path) -> None:
    menus = with_schedule_times(MENUS, taken[:3], [1.0, 2.0, 3.0], 4.0)
    (path := menus_path(tmp_path, menus.gpu)).write_bytes(menus_bytes(menus))
    assert menus_in(tmp_path) == [path]
    read = read_menus(path)
    assert msgspec.json.encode(read) == msgspec.json.encode(menus)
    more = with_schedule_times(read, taken[2:4], [3.0, 4.0], 4.0)
    assert [len(rows) for *_, rows in getattr(more, taken[0].problem.dtype)] == [4]


def test_a_file_of_another_gpu_or_none_is_damaged(tmp_path: Path) -> None:
    (path := menus_path(tmp_path, "NVIDIA H100")).write_bytes(menus_bytes(MENUS))
    with pytest.raises(DamagedFile, match=r"times of the NVIDIA H200, whose name"):
        read_menus(path)
    path.write_bytes(b"not xz")
    with pytest.raises(DamagedFile, match="is damaged"):
        read_menus(path)


def test_the_committed_times_are_of_schedules_that_can_be_asked_for() -> None:
    """Rows say what a case is; but for a few of before, when other rows could be copied first."""
    (path,) = menus_in(RESULTS)
    menus, refused, count = read_menus(path), 0, 0
    for dtype in schedule_menus.DTYPES:
        for *sizes, _, rows in getattr(menus, dtype)[::60]:
            problem = Matmul(*sizes, dtype)
            step, _ = choose_step(problem, H200.for_choices())
            for row in rows:
                choice, planned = as_planned(row[:-1], dtype)
                count += 1
                try:
                    Case(step, problem, row[0], choice.tile, H200, choice.stages, planned=planned).validate()
                except IllegalSchedule:
                    refused += 1
    assert count > 250
    assert refused < 0.05 * count


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> list[ScheduleToBuild]:
    """A GPU on which each next schedule takes a microsecond more; what is built for it."""
    built: list[ScheduleToBuild] = []

    def timed(cases: Sequence[Case], *_: Any) -> tuple[list[float], float]:
        return [1.0 + place for place in range(len(cases))], 2.0

    monkeypatch.setattr(menu_command, "build_ahead", lambda wanted, _jobs: built.extend(wanted))
    monkeypatch.setattr(menu_command, "time_schedules", timed)
    monkeypatch.setattr(menu_command, "_grow_schedules", lambda *_: None)
    monkeypatch.setattr(execution, "GpuBackend", lambda: None)
    monkeypatch.setattr(execution, "gpu_present", lambda: True)
    monkeypatch.setattr(execution, "gpu_machine", lambda: H200)
    monkeypatch.setattr(toolchain, "require_compiler", lambda: None)
    return built


def measure(command: Command, folder: Path, *more: str) -> Outcome:
    """Time the schedules of few shapes."""
    arguments = "--shapes", "schedules", "--dtype", "float32", "--seed", "5", "--count", "2"
    return command("menu", *arguments, "--out", str(folder), *more)


def test_a_run_leaves_a_file_that_the_next_one_adds_to(
    made_up: list[ScheduleToBuild], command: Command, tmp_path: Path
) -> None:
    outcome = measure(command, tmp_path)
    assert outcome.code == 0, outcome
    products = [one.problem for one in draw_shapes("schedules", 5, 2, "float32")]
    wanted = [scheduled_candidates(problem, H200) for problem in products]
    assert made_up == [ScheduleToBuild(case) for cases in wanted for case in cases]
    assert outcome.out.count("2.000 of cuBLAS") == 2
    menus = read_menus(menus_path(tmp_path, "NVIDIA H200"))
    assert [tuple(each[:3]) for each in menus.float32] == [(each.m, each.n, each.k) for each in products]
    assert [len(each[4]) for each in menus.float32] == [len(cases) for cases in wanted]
    assert measure(command, tmp_path, "--seed", "6").code == 0
    more = read_menus(menus_path(tmp_path, "NVIDIA H200"))
    assert more.float32[:2] == menus.float32
    assert len(more.float32) == 4
    assert more.origin.count("medians of interleaved rounds") == 2


def test_an_interrupted_run_goes_on(
    made_up: list[ScheduleToBuild], command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[Matmul] = []

    def once(cases: Sequence[Case], *_: Any) -> tuple[list[float], float]:
        timed.append(cases[0].problem)
        return [1.0] * len(cases), 2.0

    clock = iter([0.0, 0.0, 10.0])
    monkeypatch.setattr(menu_command, "time", SimpleNamespace(monotonic=lambda: next(clock, 20.0)))
    monkeypatch.setattr(menu_command, "time_schedules", once)
    outcome = measure(command, tmp_path, "--time-limit", "5")
    assert (outcome.code, len(timed)) == (0, 1)
    assert "1 of 2 shapes are timed" in outcome.out
    built = len(made_up)
    again = measure(command, tmp_path)
    assert "1 of 2 shapes are done" in again.out
    assert len({*timed}) == len(timed) == 2
    assert {each.case.problem for each in made_up[built:]} == {timed[1]}
    menus = read_menus(menus_path(tmp_path, "NVIDIA H200"))
    assert len(menus.float32) == 2
    assert menus.origin.count("medians of") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["h200-schedule-menus.json.xz"]


def test_what_was_timed_before_a_fault_is_kept(
    made_up: list[ScheduleToBuild], command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = (one.problem for one in draw_shapes("schedules", 5, 2, "float32"))

    def timed(cases: Sequence[Case], *_: Any) -> tuple[list[float], float]:
        if cases[0].problem != first:
            raise WrongResult("made up")
        return [1.0] * len(cases), 2.0

    monkeypatch.setattr(menu_command, "time_schedules", timed)
    outcome = measure(command, tmp_path)
    assert (outcome.code, "made up; 1 shapes in all" in outcome.err) == (1, True)
    (kept,) = read_menus(menus_path(tmp_path, "NVIDIA H200")).float32
    assert tuple(kept[:3]) == (first.m, first.n, first.k)
    monkeypatch.setattr(menu_command, "time_schedules", lambda cases, *_: ([1.0] * len(cases), 2.0))
    assert measure(command, tmp_path).code == 0, "the same command times what was wrong"
    assert len(read_menus(menus_path(tmp_path, "NVIDIA H200")).float32) == 2


def test_building_takes_none_of_the_time_for_timing(
    made_up: list[ScheduleToBuild], command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]

    def build(_wanted: Any, _jobs: int) -> None:
        clock[0] += 100.0

    monkeypatch.setattr(menu_command, "build_ahead", build)
    monkeypatch.setattr(menu_command, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    assert "2 of 2 shapes are timed" in measure(command, tmp_path, "--time-limit", "5").out


def test_trees_of_few_shapes_take_nobodys_place(
    made_up: list[ScheduleToBuild], command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    grow = menu_command._grow_schedules
    menus = msgspec.structs.replace(MENUS, float32=((8, 8, 8, 1.0, ()),) * (menu_command.FEWEST_GROWN - 1))
    grow(menus, "float32", tmp_path)
    assert not list(tmp_path.iterdir())


def test_another_architecture_is_refused_before_anything_is_built(
    made_up: list[ScheduleToBuild], command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "gpu_machine", lambda: machine_for("sm_80"))
    outcome = measure(command, tmp_path)
    assert (outcome.code, "sm_80" in outcome.err, made_up) == (2, True, [])


@pytest.mark.parametrize("more", [("--dry-run",), ("--time-limit", "1")])
def test_without_time_for_a_shape_nothing_is_written(
    more: tuple[str, ...],
    made_up: list[ScheduleToBuild],
    command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(menu_command, "time", SimpleNamespace(monotonic=itertools.count(step=10**6).__next__))
    outcome = measure(command, tmp_path, *more)
    assert outcome.code == 0, outcome
    assert made_up
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (("--drawn", "50"), "--drawn: schedules"),
        (("--shapes", "schedules,llm"), "by themselves"),
        (("--dtype", "bfloat16"), "bfloat16"),
        (("--grow",), "leave out --shapes schedules"),
        (("--shapes", "llm"), "--dtype float32: of --shapes schedules alone"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    more: tuple[str, ...], named: str, made_up: list[ScheduleToBuild], command: Command, tmp_path: Path
) -> None:
    outcome = measure(command, tmp_path, *more)
    assert (outcome.code, named in outcome.err, made_up) == (2, True, [])


@pytest.mark.gpu
@pytest.mark.parametrize("problem", PRODUCTS[1::2], ids=str)
def test_schedules_are_checked_and_timed(problem: Matmul, compiler: Compiler) -> None:
    cases = [*scheduled_candidates(problem, execution.gpu_machine())[::5]]
    for case in cases:
        build_schedule(case, compiler)
    own, cublas_us = time_schedules(cases, GpuBackend(), compiler)
    assert len(own) == len(cases)
    assert min(*own, cublas_us) > 0
