"""Which schedules ``ladder calibrate`` times, and the file of their times."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tensorir_ladder.harness import execution, schedule_menus
from tensorir_ladder.harness.build import Case, lower
from tensorir_ladder.harness.built_schedules import build_schedule
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


@pytest.mark.gpu
@pytest.mark.parametrize("problem", PRODUCTS[1::2], ids=str)
def test_schedules_are_checked_and_timed(problem: Matmul, compiler: Compiler) -> None:
    cases = [*scheduled_candidates(problem, execution.gpu_machine())[::5]]
    for case in cases:
        build_schedule(case, compiler)
    own, cublas_us = time_schedules(cases, GpuBackend(), compiler)
    assert len(own) == len(cases)
    assert min(*own, cublas_us) > 0
