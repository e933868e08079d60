"""Step 9 for any number of rows: one kernel, right for each, and launched with as many blocks as each takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.cases import make_case
from tensorir_ladder.harness.any_rows import takes_any_rows
from tensorir_ladder.harness.build import Kernel, compiled, executable, lower
from tensorir_ladder.harness.emulation import EmulatorBackend
from tensorir_ladder.harness.execution import GpuBackend, LlvmBackend
from tensorir_ladder.harness.verify import verify, verify_launch
from tensorir_ladder.schedules.errors import IllegalSchedule
from tensorir_ladder.schedules.tiles import TensorCoreTile
from tensorir_ladder.schedules.workloads import Matmul

TILE = TensorCoreTile.parse("64x64x64/32x32")
ROWS = (1, 63, 64, 200)


def lowered(m: int, n: int = 128, k: int = 192, variant: str = "any_m", **changes: object) -> Kernel:
    """The kernel for a product of so many rows."""
    return lower(make_case(9, (m, n, k), variant, tile=TILE, stages=3, **{"dtype": "float16", **changes}))


@pytest.mark.parametrize("layout", ["nn", "nt"])
def test_one_text_serves_any_number_of_rows(layout: str) -> None:
    kernels = {m: lowered(m, layout=layout) for m in (*ROWS, 2**20)}
    assert len({kernel.source_sha256 for kernel in kernels.values()}) == 1
    assert all(takes_any_rows(kernel.device) for kernel in kernels.values())
    assert not takes_any_rows(lowered(200, variant="fragments").device)
    assert {m: kernel.blocks for m, kernel in kernels.items()} == {1: 2, 63: 2, 64: 2, 200: 8, 2**20: 2**15}


def test_its_loop_is_that_of_a_fixed_number_of_rows() -> None:
    any_rows, fixed = lowered(200).code, lowered(200, variant="fragments").code
    assert any_rows.cp_async_bytes == fixed.cp_async_bytes == 16
    for name in ("barriers", "cp_async", "commit_groups", "wait_groups", "shared_versions"):
        assert getattr(any_rows, name) == getattr(fixed, name)


def test_columns_run_side_by_side_in_the_place_of_rows() -> None:
    """Groups of 24 of 48: the most that divide them, of 32 that 2048 columns are."""
    kernel = lowered(200, n=64 * 48)
    assert kernel.blocks == 4 * 48
    assert "blockIdx.x) % 24" in kernel.body


@pytest.mark.parametrize(("tile", "k"), [("32x96x32/32x32", 40), ("48x48x32/16x16", 300), ("160x160x32/32x32", 300)])
def test_three_or_five_warps_side_by_side_are_refused_where_tvm_knows_no_extent(tile: str, k: int) -> None:
    case = make_case(9, (46, 27, k), "any_m", dtype="float16", tile=TensorCoreTile.parse(tile), stages=3)
    with pytest.raises(IllegalSchedule, match=r"an extent that TVM 0\.27 takes .*choose another tile"):
        lower(case)


@pytest.mark.parametrize("m", [1, 200])
def test_its_schedule_for_cpu_is_right(m: int) -> None:
    verify(lowered(m, n=72, k=136), LlvmBackend(), seeds=(0,))


@pytest.mark.emulator
@pytest.mark.parametrize(("m", "n", "k", "layout"), [*((m, 72, 136, "nn") for m in ROWS), (100, 64, 64, "nt")])
def test_its_cuda_is_right_for_each_number_of_rows(m: int, n: int, k: int, layout: str) -> None:
    verify(lowered(m, n, k, layout=layout), EmulatorBackend(), seeds=(0,))


@pytest.mark.gpu
@pytest.mark.compiler
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_program_is_compiled_once_and_right_for_each_number_of_rows(dtype: str, compiler) -> None:
    kernel, backend = compiled(lowered(64, 512, 512, dtype=dtype), compiler), GpuBackend()
    run = executable(kernel)["main"]
    for m in (*ROWS, 4096):
        problem = replace(Matmul(64, 512, 512, dtype), m=m)
        verify_launch(run, problem, backend, f"{m} rows", seeds=(0,))
