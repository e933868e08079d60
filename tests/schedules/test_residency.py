"""Blocks that stay: right for every kind of kernel, however many tiles there are for each."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV

from support.boxes import BELOW, HOPPER
from support.cases import small_case
from tensorir_ladder.harness.build import Case, lower_schedule
from tensorir_ladder.harness.emulation import EmulatorBackend
from tensorir_ladder.harness.verify import verify_launch
from tensorir_ladder.schedules.cycles import Planned
from tensorir_ladder.schedules.errors import IllegalSchedule
from tensorir_ladder.schedules.loops import launch_early, stay_resident
from tensorir_ladder.schedules.pipeline import lower_ahead

pytestmark = pytest.mark.emulator


def scheduled(case: Case, **given: object) -> tuple[Schedule, LoopRV]:
    """A case's schedule, and its loop over the grid."""
    sch = case.step.maker(case.variant)(case.problem, replace(case.config, **given))
    root = sch.get_sblock("root")
    blocks = [sch.get_loops(block)[0] for block in sch.get_child_blocks(root)]
    return sch, next(loop for loop in blocks if sch.get(loop).thread_binding is not None)


def is_right(sch: Schedule, case: Case) -> str:
    """Check results in the emulator, by three orders of threads; return the kernel's text."""
    backend = EmulatorBackend()
    kernel = lower_schedule(sch, HOPPER, "resident")
    for seed in range(3):
        verify_launch(backend.load(kernel), case.problem, backend, "resident", seeds=(seed,))
    return kernel.cuda


CASES = [
    (2, None, (70, 60, 36)),
    (5, None, (70, 60, 36)),
    (9, None, (130, 70, 100)),
    (10, "rows", (200, 136, 264)),
    (10, "boxes", (200, 136, 264)),
    (11, "boxes", (200, 136, 264)),
    (12, "own_warp", (200, 136, 264)),
    (12, "own_warp", (200, 136, 64)),
]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("blocks", [1, 3, 5000])
@pytest.mark.parametrize(("step", "variant", "shape"), CASES)
def test_results_are_right_for_any_number_of_blocks(step, variant, shape, blocks) -> None:
    case = small_case(step, shape, variant, arch="sm_90a")
    sch, grid = scheduled(case)
    stay_resident(sch, grid, blocks)
    assert ("piece" in is_right(sch, case)) == (blocks < 5000)


@pytest.mark.parametrize("own_warp", [False, True])
def test_clusters_stay_together(own_warp: bool) -> None:
    case = small_case(10, (512, 128, 264), "boxes", arch="sm_90a")
    planned = Planned(1, (False, False), True, BELOW, own_warp)
    sch, grid = scheduled(case, planned=planned)
    stay_resident(sch, grid, 4)
    is_right(sch, case)
    sch, grid = scheduled(case, planned=planned)
    stay_resident(sch, grid, 3)
    with pytest.raises(RuntimeError, match="of which 3 stay"):
        lower_schedule(sch, HOPPER, "resident")


def test_blocks_that_begin_early_stay() -> None:
    case = small_case(12, (200, 136, 264), arch="sm_90a")
    sch, grid = scheduled(case)
    launch_early(sch)
    stay_resident(sch, grid, 3)
    is_right(sch, case)


def test_lowered_ahead_it_is_the_same() -> None:
    case = small_case(9, (130, 70, 100), arch="sm_90a")
    sch, grid = scheduled(case)
    stay_resident(sch, grid, 3)
    assert "piece" in lower_ahead(sch.mod["main"], HOPPER.target()).script()


def test_other_loops_and_no_blocks_are_refused() -> None:
    sch, grid = scheduled(small_case(5, (70, 60, 36)))
    with pytest.raises(IllegalSchedule, match="0 blocks"):
        stay_resident(sch, grid, 0)
    inner = sch.get_loops(sch.get_sblock("matmul_update"))[-1]
    with pytest.raises(IllegalSchedule, match="bound to nothing"):
        stay_resident(sch, inner, 3)
