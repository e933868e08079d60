"""Operands with unaligned rows, and functions of several kernels: results, generated text, figures, what is refused."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import tvm
from tvm.s_tir import Schedule

from support.cases import STEPS, config, make_case
from support.warpgroups import check_on_cpu
from tensorir_ladder.harness.build import Case, Kernel, compiled, executable, lower, lower_schedule
from tensorir_ladder.harness.execution import GpuBackend, compile_serial
from tensorir_ladder.harness.machines import machine_for
from tensorir_ladder.harness.verify import verify
from tensorir_ladder.kernels.codegen.toolchain import Compiler, ptxas_facts
from tensorir_ladder.schedules.cycles import Planned, planned_cycles
from tensorir_ladder.schedules.errors import IllegalSchedule
from tensorir_ladder.schedules.memory import (
    align_operands,
    pass_workspaces,
    unaligned_operands,
    workspace_bytes,
    workspaces,
)
from tensorir_ladder.schedules.plans import able_plans, choice_cost
from tensorir_ladder.schedules.recipes import stage_contraction
from tensorir_ladder.schedules.tiles import Choice, ThreadTile, TileSet, WarpgroupTile
from tensorir_ladder.schedules.workloads import Matmul, batched_matmul, conv2d_nhwc
from tensorir_ladder.steps import step10_wgmma

pytestmark = pytest.mark.filterwarnings("ignore:.*more would stay empty", "ignore:.*by a kernel in front")

MACHINE = machine_for("sm_90a").for_choices()
SMALL = WarpgroupTile(block=(64, 64, 64), warpgroups=(1, 1))


SECTORS = Planned(copied=(True, True))  # both operands to rows of whole sectors, whatever that costs


def built(
    shape: tuple[int, int, int],
    layout: str,
    variant: str = "rows",
    dtype: str = "float16",
    planned: Planned | None = None,
) -> Kernel:
    """Step 10 with a small tile."""
    case = make_case(10, shape, variant, dtype=dtype, layout=layout, tile=SMALL, stages=3)
    return lower(replace(case, planned=planned))


def computes(
    shape: tuple[int, int, int], layout: str, variant: str, dtype: str = "float16", planned: Planned | None = None
) -> None:
    """Check step 10's product on the CPU, before the instruction takes the place of loops."""
    problem, asked = Matmul(*shape, dtype, layout), replace(config(variant, SMALL, 3), planned=planned)
    check_on_cpu(step10_wgmma.schedule_for_cpu(problem, asked), problem)


@pytest.mark.parametrize(
    ("shape", "layout", "unaligned"),
    [
        ((64, 64, 64), "nn", []),
        ((7, 64, 64), "nn", []),
        ((64, 64, 63), "nt", [0, 1]),
        ((64, 64, 63), "nn", [0]),
        ((64, 63, 64), "nn", [1]),
        ((64, 63, 64), "nt", []),
        ((64, 63, 63), "nn", [0, 1]),
        ((64, 64, 68), "nt", [0, 1]),
    ],
)
def test_only_operands_with_unaligned_rows_are_copied(shape, layout, unaligned) -> None:
    sch = Schedule(Matmul(*shape, "float16", layout).prim_func())
    block = sch.get_sblock("matmul")
    assert unaligned_operands(sch, block) == unaligned
    before = sch.mod.script()
    copies = align_operands(sch, block, (64, 64, 64))
    assert [copy.operand for copy in copies] == unaligned
    assert [str(sch.get(copy.copy).writes[0].source.name) for copy in copies] == [f"{'AB'[i]}_pad" for i in unaligned]
    assert unaligned or before == sch.mod.script(), "nothing is padded where nothing is copied"


RAGGED = [
    ((63, 65, 131), "nn"),
    ((63, 65, 131), "nt"),
    ((1, 1, 1), "nn"),
    ((1, 9, 129), "nt"),
    ((130, 7, 257), "nn"),
    ((70, 64, 3), "nt"),
    ((70, 64, 3), "nn"),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("shape", "layout"), RAGGED, ids=str)
def test_products_of_odd_shapes_are_right_and_copied_in_16_bytes(shape, layout) -> None:
    computes(shape, layout, "rows")
    kernel = built(shape, layout)
    assert set(re.findall(r"cp_async_legacy(?:_pred)?_c[ag]_(\d+)", kernel.body)) == {"16"}
    assert not re.search(r"= [AB]_ptr\[", kernel.body), "nothing goes through registers"


STRADDLING = [((72, 136, 200), "nn"), ((72, 136, 200), "nt"), ((200, 8, 72), "nn"), ((63, 72, 131), "nn")]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("shape", "layout"), STRADDLING, ids=str)
def test_rows_that_straddle_cache_lines_are_copied_in_vectors(shape, layout) -> None:
    computes(shape, layout, "fitted", planned=SECTORS)
    kernel = built(shape, layout, "fitted", planned=SECTORS)
    assert kernel.launches == 2
    copying = kernel.text_of("main_kernel")
    by_vector = {name for name, row in zip("AB", (shape[2], shape[2 if layout == "nt" else 1])) if row % 8 == 0}
    for name in "AB":
        assert (f"*(uint4*)({name}_ptr" in copying) == (name in by_vector)
        assert (f"= {name}_ptr[" in copying) == (name not in by_vector)
        assert (f"*(uint4*)({name}_pad_ptr" in copying) == (name in by_vector)
    assert set(re.findall(r"cp_async_legacy_c[ag]_(\d+)", kernel.body)) == {"16"}
    assert "_pred_" not in kernel.body, "copies of padded rows need no conditions"


@pytest.mark.parametrize(("k", "loaded"), [(63, "half"), (62, "half2"), (60, "half4"), (56, "uint4")])
def test_rows_are_loaded_in_the_widest_vectors_that_begin_at_multiples_of_their_size(k: int, loaded: str) -> None:
    sch = Schedule(Matmul(64, 64, k, "float16", "nn").prim_func())
    align_operands(sch, sch.get_sblock("matmul"), (64, 64, 64), row_bytes=128, vector_bytes=16)
    stage_contraction(sch, sch.get_sblock("matmul"), ThreadTile(block=(32, 32, 16), thread=(4, 4)))
    copying = lower_schedule(sch, machine_for("sm_90a"), "copy").text_of("main_kernel")
    assert ("A_ptr[" if loaded == "half" else f"*({loaded}*)(A_ptr") in copying
    assert f"*({'half4' if loaded == 'half' else 'uint4'}*)(A_pad_ptr" in copying


WIDE = Choice(WarpgroupTile(block=(128, 256, 64), warpgroups=(2, 1)), stages=4)


@pytest.mark.parametrize(
    ("shape", "layout", "first"),
    [
        ((8, 8, 8), "nn", (False, False)),
        ((4096, 4096, 4096), "nn", (False, False)),
        ((4088, 4088, 4088), "nn", (True, True)),
        ((4096, 4088, 4096), "nn", (False, True)),
        ((4080, 4080, 4080), "nn", (False, False)),  # whole sectors, across lines
        ((4096, 4088, 4096), "nt", (False, False)),
        ((4095, 4095, 4095), "nn", (True, True)),  # no whole vectors
        ((7, 4095, 64), "nn", (False, True)),
        ((240, 7360, 5192), "nn", (True, False)),  # A is small, and brought for each of 29 tiles along n
        ((7360, 240, 5192), "nn", (False, False)),  # A is brought once
        ((64, 8184, 8184), "nn", (True, False)),
    ],
    ids=str,
)
def test_an_operand_is_copied_to_whole_sectors_where_that_pays(shape, layout, first) -> None:
    assert sectors_first(WIDE, Matmul(*shape, "float16", layout)) == first


def sectors_first(choice: Choice, problem: Matmul) -> tuple[bool, bool]:
    """Which operands' rows are copied to whole sectors, by the formula."""
    able = able_plans("warpgroups", choice, problem, MACHINE, parts=1)
    return min(able, key=lambda planned: planned_cycles(choice, problem, MACHINE, planned)).copied


def cheapest_cycles(choice: Choice, problem: Matmul) -> float:
    """What a product takes by the formula, with the copies that are best, in one part."""
    return choice_cost(TileSet.of(choice, formula="warpgroups"), choice, problem, MACHINE)


def test_what_is_copied_first_costs_least() -> None:
    """Of a product that nothing has to be copied of, rows begin inside of sectors; beside one of whole sectors."""
    problem, whole = Matmul(240, 7360, 5192, "float16"), Matmul(240, 7360, 5200, "float16")
    assert sectors_first(WIDE, problem) == (True, False)
    cycles, least = (cheapest_cycles(WIDE, each) for each in (problem, whole))
    assert least < cycles < 1.05 * least, "as they are, they would take 1.06 times as long"


def test_operands_are_copied_to_whole_sectors_by_tiles_that_make_them() -> None:
    problem = Matmul(4088, 4088, 4096, "float16")
    narrow, wide = (Choice(WarpgroupTile((128, columns, 64), (2, 1)), 4) for columns in (136, 144))
    assert sectors_first(narrow, problem) == (False, False), "272 bytes are no whole sectors"
    assert sectors_first(wide, problem) == (False, True)
    odd = Matmul(4088, 4087, 4096, "float16")
    assert sectors_first(narrow, odd) == (False, False), "copied all the same, but not to whole sectors"
    assert sectors_first(wide, odd) == (False, True)
    assert cheapest_cycles(narrow, odd) > 1.1 * cheapest_cycles(wide, odd), "to rows inside of sectors"


ODD_TILE = WarpgroupTile(block=(64, 72, 64), warpgroups=(1, 1))  # 144 bytes of a row: whole vectors, no whole sectors


@pytest.mark.parametrize("variant", ["rows", "fitted"])
@pytest.mark.parametrize("shape", [(65, 71, 131), (64, 71, 64), (1, 1, 1)], ids=str)
def test_rows_are_copied_to_whole_vectors_where_the_tile_makes_no_whole_sectors(shape, variant: str) -> None:
    problem = Matmul(*shape, "float16")
    check_on_cpu(step10_wgmma.schedule_for_cpu(problem, config(variant, ODD_TILE, 3)), problem)


def test_parts_of_a_reduction_have_operands_copied_first() -> None:
    problem = Matmul(72, 72, 2056, "float16")
    made = replace(config("fitted", SMALL, 3), planned=Planned(4, (False, True)))
    sch = step10_wgmma.schedule_for_cpu(problem, made)
    assert "B_pad" in {str(buffer.name) for buffer in workspaces(sch.mod)}
    check_on_cpu(sch, problem)


def test_each_operand_has_rows_of_its_own_length() -> None:
    sch = Schedule(Matmul(72, 136, 200, "float16").prim_func())  # rows of no whole sectors, both
    block = sch.get_sblock("matmul")
    with pytest.warns(UserWarning, match=r"copied to B_pad \(rows of whole 32 bytes\), 98304 bytes"):
        (copy,) = align_operands(sch, block, (64, 64, 64), row_bytes=(16, 32))
    assert copy.operand == 1
    stage_contraction(sch, block, ThreadTile(block=(32, 32, 16), thread=(4, 4)))
    text = lower_schedule(sch, machine_for("sm_90a"), "copy").cuda
    assert "A_pad_ptr" not in text
    assert "A_ptr[" in text


@pytest.mark.parametrize("first", [(True, False), (False, True)], ids=str)
def test_a_product_with_one_operand_copied_is_right(first: tuple[bool, bool]) -> None:
    problem = Matmul(200, 136, 200, "float16")
    asked = replace(config("fitted", SMALL, 3), planned=Planned(copied=first))
    sch = step10_wgmma.schedule_for_cpu(problem, asked)
    assert [str(buffer.name) for buffer in workspaces(sch.mod)] == ["A_pad" if first[0] else "B_pad"]
    check_on_cpu(sch, problem)


SPLIT_SHAPES = [((63, 65, 2099), "nn", Planned(2, (True, True))), ((64, 64, 2048), "nt", Planned(2))]


@pytest.mark.parametrize(("shape", "layout", "planned"), SPLIT_SHAPES, ids=str)
def test_a_split_reduction_is_right_with_and_without_aligned_rows(shape, layout, planned: Planned) -> None:
    computes(shape, layout, "fitted", "bfloat16", planned=planned)
    kernel = built(shape, layout, "fitted", "bfloat16", planned=planned)
    assert kernel.launches == 2 + any(planned.copied)
    assert "wgmma_m64n64k64" in kernel.body


def test_other_contractions_and_schedules_can_be_aligned() -> None:
    problem = Matmul(33, 35, 37, "float32", "nn")
    sch = Schedule(batched_matmul(2, problem))
    block = sch.get_sblock("matmul")
    align_operands(sch, block, (1, 32, 32, 16))
    stage_contraction(sch, block, ThreadTile(block=(32, 32, 16), thread=(4, 4)), vectorize=True)
    text = lower_schedule(sch, machine_for("sm_80"), "batched").body
    assert "(float4*)(A_pad_ptr" in text
    random = np.random.default_rng(1)
    a, b = (random.integers(-2, 3, (2, *shape)).astype("float32") for shape in ((33, 37), (37, 35)))
    result = tvm.runtime.tensor(np.full((2, 33, 35), np.nan, "float32"))
    compile_serial(sch.mod)["main"](tvm.runtime.tensor(a), tvm.runtime.tensor(b), result)
    np.testing.assert_array_equal(result.numpy(), a @ b)


@pytest.mark.parametrize("vector_bytes", [4, 8])
def test_the_copying_kernel_reads_elements_and_stores_vectors(vector_bytes: int) -> None:
    sch = Schedule(Matmul(64, 64, 63, "float16", "nn").prim_func())
    block = sch.get_sblock("matmul")
    align_operands(sch, block, (64, 64, 64), vector_bytes=vector_bytes, rounds=2)
    stage_contraction(sch, block, ThreadTile(block=(32, 32, 16), thread=(4, 4)))
    kernel = lower_schedule(sch, machine_for("sm_90a"), "copy")
    copying = kernel.text_of("main_kernel")
    assert copying.count(f"*(half{vector_bytes // 2}*)(A_pad_ptr") == 2
    assert len(re.findall(r"= A_ptr\[", copying)) == 2 * vector_bytes // 2


@pytest.mark.parametrize("rounds", [1, 3, 4])
def test_all_rounds_of_an_operand_are_loaded_before_the_first_is_stored(rounds: int) -> None:
    sch = Schedule(Matmul(130, 190, 253, "float16", "nn").prim_func())
    block = sch.get_sblock("matmul")
    align_operands(sch, block, (64, 64, 64), rounds=rounds)
    stage_contraction(sch, block, ThreadTile(block=(32, 32, 16), thread=(4, 4)))
    copying = lower_schedule(sch, machine_for("sm_90a"), "copy").text_of("main_kernel")
    stored = {}
    for name in "AB":
        loads = [found.start() for found in re.finditer(rf"= {name}_ptr\[", copying)] or [
            found.start() for found in re.finditer(rf"= \*\(half\d\*\)\({name}_ptr", copying)
        ]
        stores = [found.start() for found in re.finditer(rf"\*\(half\d\*\)\({name}_pad_ptr", copying)]
        assert loads
        assert max(loads) < min(stores)
        stored[name] = len(stores)
    assert max(stored.values()) == rounds, "the largest operand's; the other's are as many or fewer"


def test_an_unaligned_output_is_stored_row_by_row_too() -> None:
    rows, direct = (built((128, 91, 128), "nt", variant).body for variant in ("rows", "in_flight"))
    assert "round_ptr[" in rows
    assert rows.count("round_ptr[") < direct.count("round_ptr[")
    assert rows.count("__syncthreads") == direct.count("__syncthreads") + 1


def test_figures_are_those_of_the_kernel_with_the_contraction() -> None:
    kernel = built((63, 65, 2099), "nn", "fitted", planned=Planned(2, (True, True)))
    assert kernel.launches == 3
    assert kernel.main_kernel == "main_kernel_1"
    assert kernel.launch == {"blockIdx.x": 2 * 2, "threadIdx.x": 128, "threadIdx.y": 1}
    assert kernel.smem_bytes == 3 * (64 + 64) * 64 * 2
    assert kernel.local_bytes == 32 * 4
    padded_a, padded_b, partial = 64 * 2176 * 2, 2176 * 128 * 2, 2 * 64 * 128 * 4
    assert kernel.workspace_bytes == padded_a + padded_b + partial
    assert "A_pad_local" not in kernel.pipeline["statements"], "the copies' own pipeline"
    alone = built((64, 64, 512), "nn", "fitted", planned=Planned())
    assert kernel.pipeline["software_pipeline_stage"] == alone.pipeline["software_pipeline_stage"]
    assert (alone.launches, alone.workspace_bytes, alone.main_kernel) == (1, 0, "main_kernel")
    assert alone.body.startswith('extern "C" __global__')


def test_a_product_without_a_pipeline_has_none_where_copies_have() -> None:
    kernel = lower(make_case(7, (130, 190, 253), "serpentine", stages=1))
    assert kernel.launches == 2
    assert kernel.pipeline == {}


def test_workspaces_become_arguments_behind_the_others() -> None:
    sch = built((63, 65, 131), "nn").schedule
    passed = pass_workspaces(sch.mod)
    names = [str(parameter.name) for parameter in passed["main"].params]
    assert names == ["A", "B", "round", "A_pad", "B_pad"]
    assert workspaces(passed) == []
    assert workspace_bytes(sch.mod) == (64 * 192 + 192 * 128) * 2
    assert pass_workspaces(passed).same_as(passed)


def test_registers_are_those_of_the_kernel_that_is_named() -> None:
    report = (
        "ptxas info    : Compiling entry function 'main_kernel{}' for 'sm_90a'\n"
        "ptxas info    : Function properties for main_kernel\n"
        "    0 bytes stack frame, {} bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used {} registers, used 1 barriers\n"
    )
    log = report.format("_1", 0, 32) + report.format("", 8, 200)
    assert ptxas_facts(log, "main_kernel")["registers"] == 200
    assert ptxas_facts(log, "main_kernel")["spill_bytes"] == 8
    assert ptxas_facts(log, "main_kernel_1")["registers"] == 32
    assert ptxas_facts(log)["registers"] == 32


@pytest.mark.compiler
def test_resources_are_of_the_main_kernel(compiler: Compiler) -> None:
    kernel = compiled(built((63, 65, 131), "nn"), compiler)
    assert kernel.resources.threads == 128
    assert kernel.resources.registers > 32, "more than a copying kernel needs"


SHAPES = [(256, 256, 256), (1024, 1024, 14336), (4088, 4088, 4088), (3000, 1111, 777)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_step_10_s_default_copies_only_rows_of_no_whole_vectors_and_never_cuts_the_reduction(shape) -> None:
    kernel = lower(Case.default(STEPS[10], Matmul(*shape, "float16"), machine_for("sm_90a")))
    names = [str(buffer.name) for buffer in kernel.workspaces]
    assert names == [name for name, row in (("A_pad", shape[2]), ("B_pad", shape[1])) if row % 8]
    assert kernel.launches == 1 + bool(names)


def test_copies_are_made_openly() -> None:
    sch = Schedule(Matmul(64, 64, 63, "float16", "nn").prim_func())
    with pytest.warns(
        UserWarning, match=r"copied to A_pad \(rows of whole 16 bytes\), 8192 bytes, by a kernel in front"
    ):
        align_operands(sch, sch.get_sblock("matmul"), (64, 64, 64))


@pytest.mark.parametrize(
    ("tile", "asked", "message"),
    [
        ((64, 64, 64), {"vector_bytes": 32}, "limit 4 or 8 or 16"),
        ((64, 64, 3), {}, "A: 6 bytes, limit multiples of 16"),
        ((64, 64, 32), {"row_bytes": 128}, "A: 64 bytes, limit multiples of 128"),
        ((64, 64), {}, "padding needs one tile extent per loop"),
        ((64, 64, 64), {"row_bytes": (32,)}, r"row_bytes=\(32,\), limit a whole number from 1 on, or one for each"),
        ((64, 64, 64), {"row_bytes": (0, 32)}, r"row_bytes=\(0, 32\)"),
        ((64, 64, 64), {"row_bytes": -16}, "row_bytes=-16"),
    ],
)
def test_what_cannot_be_aligned_is_refused(tile, asked: dict[str, object], message: str) -> None:
    sch = Schedule(Matmul(64, 64, 63, "float16", "nn").prim_func())
    before = sch.mod.script()
    with pytest.raises(IllegalSchedule, match=message):
        align_operands(sch, sch.get_sblock("matmul"), tile, **asked)
    assert sch.mod.script() == before


def test_a_convolution_is_to_be_flattened_first() -> None:
    sch = Schedule(conv2d_nhwc(1, 6, 6, 3, 5, dtype="float16"))
    block = sch.get_sblock("conv2d")
    with pytest.raises(IllegalSchedule, match="flatten_contraction first"):
        align_operands(sch, block, (1, 8, 8, 8, 1, 1, 8))


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "layout", "planned"), [*((*case, None) for case in RAGGED), *SPLIT_SHAPES], ids=str)
def test_functions_of_several_kernels_compute_the_product_on_a_gpu(shape, layout, planned, compiler: Compiler) -> None:
    variant = "fitted" if planned else "rows"
    gpu, kernel = GpuBackend(), compiled(built(shape, layout, variant, planned=planned), compiler)
    assert len(executable(kernel).memory) == len(workspaces(kernel.schedule.mod))
    verify(kernel, gpu, seeds=(0,))


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "layout"), STRADDLING, ids=str)
def test_rows_copied_to_whole_sectors_make_the_product_on_a_gpu(shape, layout, compiler) -> None:
    verify(compiled(built(shape, layout, "fitted", planned=SECTORS), compiler), GpuBackend(), seeds=(0,))
