"""Warpgroups: the instruction's data against a model of the PTX ISA, the kernels' text, and what is refused.

The model here is written from the ISA's tables alone, in Python integers, and shares nothing with the schedules.
"""

from __future__ import annotations

import functools
import re
from dataclasses import replace

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import tirx
from tvm.s_tir import Schedule

from support.cases import STEPS, config, make_case
from support.warpgroups import SMALL, check_on_cpu, scheduled
from tensorir_ladder.harness.build import Kernel, Lowered, compiled, lower, lower_schedule, main_loop
from tensorir_ladder.harness.execution import GpuBackend, compile_serial
from tensorir_ladder.harness.machines import machine_for
from tensorir_ladder.kernels.codegen.toolchain import Compiler, arch_flags, run_nvcc
from tensorir_ladder.schedules.cycles import Planned
from tensorir_ladder.schedules.errors import IllegalPipeline, IllegalSchedule, IllegalTile
from tensorir_ladder.schedules.isa import swizzled_piece
from tensorir_ladder.schedules.loops import bind_grid
from tensorir_ladder.schedules.loops.layout import flatten_contraction
from tensorir_ladder.schedules.memory import accumulate_in_registers
from tensorir_ladder.schedules.recipes import multiply_by_warpgroups
from tensorir_ladder.schedules.recipes.split_reduction import add_parts, split_reduction
from tensorir_ladder.schedules.tensor_cores.warpgroup import (
    _region_of,
    bind_warpgroups,
    multiply_by_wgmma,
    pipeline_warpgroups,
    stage_for_warpgroups,
    store_by_rows,
    tile_for_warpgroups,
)
from tensorir_ladder.schedules.tensor_cores.wgmma import Wgmma
from tensorir_ladder.schedules.tiles import WarpgroupTile
from tensorir_ladder.schedules.workloads import Matmul, batched_matmul, conv2d_nhwc, gemm, matmul_bias_relu
from tensorir_ladder.steps import step10_wgmma
from tensorir_ladder.steps.thread_tiles import DEFAULT

pytestmark = pytest.mark.filterwarnings("ignore:.*more would stay empty")  # short reductions are wanted here

HOPPER = machine_for("sm_90a")


def instruction(columns: int = 128, rows: int = 64, steps: int = 64, b_major: str = "k", groups: int = 2) -> Wgmma:
    """A warpgroup's multiplication in a block of ``groups`` warpgroups along the rows."""
    return Wgmma(rows, columns, steps, "float16", b_major, rows * groups, columns if b_major == "k" else steps)


@functools.cache
def lowered(problem: Matmul, tile: WarpgroupTile = SMALL, stages: int = 4, in_flight: int = 1) -> Lowered:
    """The same, lowered."""
    return lower_schedule(scheduled(problem, tile, stages, in_flight), HOPPER, f"{problem.shape} {tile}")


@pytest.mark.parametrize("columns", [64, 96, 128, 160, 192, 224, 256])
@pytest.mark.parametrize("rows", [64, 128])
def test_accumulators_are_where_the_isa_puts_them(rows: int, columns: int) -> None:
    made = instruction(columns, rows)
    seen = set()
    for thread in range(128):
        for register in range(columns // 2):  # d[i] of a thread, in the ISA's figure of the D fragment
            row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (register // 2 % 2)
            column = 8 * (register // 4) + 2 * (thread % 4) + register % 2
            for tile in range(rows // 64):
                assert made.fragment(64 * tile + row, column) == (thread, tile * columns // 2 + register)
                seen.add((64 * tile + row, column))
    assert len(seen) == rows * columns


def panel_address(contiguous: int, row: int, rows: int) -> int:
    """Where the copies put an element of a tile whose panels have ``rows`` rows: its byte in shared memory."""
    panel, element = divmod(contiguous, 64)
    piece, inside = divmod(element, 8)
    return (panel * rows + row) * 128 + swizzled_piece(row, piece, 8) * 16 + inside * 2


def isa_address(descriptor: int, outer: int, k: int, transposed: bool) -> int:
    """Where the instruction looks for element (outer, k) of a 128-byte-swizzled operand."""
    start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    assert descriptor >> 62 == 1, "128-byte swizzle"
    if transposed:
        linear = start + outer // 64 * leading + k // 8 * stride + k % 8 * 128 + outer % 64 * 2
    else:
        linear = start + outer // 8 * stride + outer % 8 * 128 + k * 2
    return linear ^ (linear >> 7 & 7) << 4


@pytest.mark.parametrize("steps", [64, 128])
@pytest.mark.parametrize("b_major", ["k", "n"])
@pytest.mark.parametrize("columns", [64, 88, 128, 176, 192, 256])
def test_descriptors_find_what_was_copied(columns: int, b_major: str, steps: int) -> None:
    made = instruction(columns, 128, steps, b_major)
    stored_a, stored_b = made.operands["a"], made.operands["b"]
    for step in range(steps // 16):
        a, b = (panels.descriptor_bits | panels.step_offset(step) >> 4 for panels in (stored_a, stored_b))
        for k in range(16):
            for row in range(64):
                assert isa_address(a, row, k, False) == panel_address(step * 16 + k, row, made.a_rows)
            for column in range(columns):
                place = (step * 16 + k, column) if b_major == "k" else (column, step * 16 + k)
                assert isa_address(b, column, k, b_major == "n") == panel_address(*place, made.b_rows)


@pytest.mark.parametrize("b_major", ["k", "n"])
@pytest.mark.parametrize("rows", [8, 88, 256])
def test_swapped_operands_are_the_instructions_other_ones(rows: int, b_major: str) -> None:
    """64 columns of B are its rows, transposed on their way where they lie side by side; rows of A its columns."""
    made = Wgmma(64, rows, 64, "float16", b_major, rows, 128 if b_major == "k" else 64, swapped=True)
    assert made.outputs == (rows, 64)
    assert [made.fragment(row, column) for row, column in ((0, 0), (1, 0), (0, 1), (rows - 1, 63))] == [
        (0, 0),
        (0, 1),
        (4, 0),
        (127, rows // 2 - 1),
    ]
    issued = re.findall(r'1, 1, 1, (\d), (\d);" : .* : "l"\((d.) \+ \d+\), "l"\((d.) \+', made.source())
    assert issued == [("1" if b_major == "n" else "0", "0", "db", "da")] * 4
    for step in range(4):
        a, b = (panels.descriptor_bits | panels.step_offset(step) >> 4 for panels in made.operands.values())
        for k in range(16):
            for row in range(rows):
                assert isa_address(a, row, k, False) == panel_address(step * 16 + k, row, made.a_rows)
            for column in range(64):
                place = (step * 16 + k, column) if b_major == "k" else (column, step * 16 + k)
                assert isa_address(b, column, k, b_major == "n") == panel_address(*place, made.b_rows)


def test_the_cuda_function_issues_every_instruction_once_and_commits() -> None:
    made = instruction(128, 128, 64, "n")
    source = made.source()
    issued = re.findall(r'"l"\(da \+ (\d+)\), "l"\(db \+ (\d+)\)', source)
    rows_apart = 64 * 128 // 16
    assert [(int(a), int(b)) for a, b in issued] == [
        (step * 2 + tile * rows_apart, step * 128) for step in range(4) for tile in range(2)
    ]
    assert source.count("m64n128k16.f32.f16.f16") == 8
    assert source.count(', 1, 1, 1, 0, 1;"') == 8  # add; no negation; A as it is, B transposed
    assert source.index("fence.proxy.async") < source.index("wgmma.fence") < source.index("wgmma.mma_async")
    assert source.count("commit_group") == 1
    assert "bf16.bf16" in replace(made, dtype="bfloat16").source()


@pytest.mark.parametrize(("in_flight", "ahead"), [(1, 2), (0, 3)])
@pytest.mark.parametrize("layout", ["nt", "nn"])
def test_the_loop_has_one_barrier_per_tile_and_everything_in_order(layout: str, in_flight: int, ahead: int) -> None:
    kernel = lowered(
        Matmul(128, 128, 1024, "float16", layout), WarpgroupTile(block=(128, 128, 64), warpgroups=(2, 1)), 4, in_flight
    )
    loop = main_loop(kernel.body)
    events = re.findall(
        r"(?:async_)?wait_group_\d|__syncthreads|arrived|wgmma_m|cp_async_legacy|commit_group\(|retire_\d", loop
    )
    copied = ["cp_async_legacy"] * 2  # loops over rounds, one per operand
    tile = [
        f"async_wait_group_{ahead - 1}",
        "__syncthreads",
        "arrived",
        "wgmma_m",
        *copied,
        "commit_group(",
        f"retire_{in_flight}",
    ]
    assert events == tile * 4, "four stages, a turn of the ring"
    assert kernel.body.count("wgmma_m64n128k64") == 4 + 4  # the loop, and what is peeled off both ends
    assert kernel.body.count("pipeline_retire_all") == 1
    assert kernel.smem_bytes == 4 * (128 + 128) * 64 * 2
    assert kernel.local_bytes == 64 * 4
    assert kernel.launch == {"blockIdx.x": 1, "threadIdx.x": 128, "threadIdx.y": 2}


def test_the_last_multiplication_is_retired_before_its_results_are_used() -> None:
    body = lowered(Matmul(64, 64, 512, "float16", "nt")).body
    assert body.index("pipeline_retire_all") > body.rindex("wgmma_m")
    assert body.index("pipeline_retire_all") < body.index("*(half2*)(round_ptr")


def test_stores_are_pairs_where_rows_are_even_and_predicated_where_ragged() -> None:
    even, odd = (lowered(Matmul(60, n, 128, "float16", "nt")).body for n in (50, 51))
    assert "*(half2*)(round_ptr" in even
    assert "*(half2*)(round_ptr" not in odd
    assert re.search(r"if \(.*\) \{\n\s+round_ptr\[", odd)


@pytest.mark.parametrize(
    ("k", "bytes_of_a_piece"), [(128, 16), (132, 8), (130, 4)], ids=["multiple of 8", "of 4", "of 2"]
)
def test_copies_are_as_wide_as_rows_allow(k: int, bytes_of_a_piece: int) -> None:
    assert f"cp_async_legacy_c{'g' if bytes_of_a_piece == 16 else 'a'}_{bytes_of_a_piece}" in re.sub(
        "_pred", "", lowered(Matmul(64, 64, k, "float16", "nt")).body
    )


def test_odd_rows_are_copied_element_by_element_through_registers() -> None:
    assert "cp_async_legacy" not in lowered(Matmul(64, 64, 131, "float16", "nt")).body


def test_blocks_of_a_band_of_rows_run_together() -> None:
    kernel = lowered(Matmul(1024, 256, 128, "float16", "nt"))
    assert kernel.blocks == 16 * 4
    assert "blockIdx.x) & 7" in kernel.body


@pytest.mark.sampled(3)
@pytest.mark.compiler
@pytest.mark.parametrize(
    ("tile", "stages", "layout"),
    [
        ("128x256x64/2x1", 4, "nt"),
        ("128x256x64/2x1", 4, "nn"),
        ("256x128x64/2x1", 4, "nt"),
        ("128x128x64/2x1", 3, "nn"),
    ],
)
def test_accumulators_stay_in_registers_and_instructions_run_on(
    tile: str, stages: int, layout: str, compiler: Compiler, tmp_path
) -> None:
    kernel = lowered(Matmul(4096, 4096, 4096, "float16", layout), WarpgroupTile.parse(tile), stages)
    log = run_nvcc(compiler, kernel.cuda, tmp_path, "kernel.cubin", "-cubin", *arch_flags("sm_90a"))
    assert "0 bytes spill stores" in log
    assert not re.search("C75[0-9]+", log), "ptxas serializes instructions, or waits for them"


def test_results_are_stored_row_by_row_where_rows_are_aligned() -> None:
    tile, variant = WarpgroupTile(block=(128, 128, 64), warpgroups=(2, 1)), "rows"
    bodies = []
    for n in (256, 250):
        case = make_case(10, (256, n, 512), variant, dtype="float16", layout="nt", tile=tile, stages=4)
        kernel = lower(case)
        assert kernel.smem_bytes == 4 * (128 + 128) * 64 * 2, "results lie where the ring was"
        bodies.append(kernel.body[kernel.body.index("pipeline_retire_all") :])
    aligned, unaligned = bodies
    assert aligned.count("__syncthreads") == 2  # all multiplications are retired; all results are collected
    assert aligned.count("*(uint4*)(round_ptr") == 1
    assert "*(half2*)(round_ptr" not in aligned
    assert "*(half2*)(round_ptr" in unaligned


RAGGED = [
    (Matmul(64, 64, 256, "float16", "nt"), SMALL, 3, "in_flight"),
    (Matmul(100, 72, 200, "float16", "nn"), SMALL, 4, "rows"),
    (Matmul(50, 91, 131, "bfloat16", "nt"), WarpgroupTile(block=(64, 96, 64), warpgroups=(1, 1)), 4, "awaited"),
    (Matmul(33, 50, 40, "bfloat16", "nn", "float32"), SMALL, 4, "rows"),  # a single k tile
    (Matmul(130, 128, 160, "float16", "nn"), WarpgroupTile(block=(128, 128, 128), warpgroups=(2, 2)), 2, "awaited"),
    (Matmul(70, 200, 136, "float16", "nn"), WarpgroupTile(block=(64, 88, 64), warpgroups=(1, 1)), 3, "fitted"),
    (Matmul(70, 72, 70, "bfloat16", "nn"), WarpgroupTile(block=(64, 80, 64), warpgroups=(1, 1)), 3, "rows"),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("problem", "tile", "stages", "variant"), RAGGED, ids=lambda value: str(value))
def test_the_schedule_for_cpu_computes_the_product(problem, tile, stages, variant) -> None:
    asked = config(variant, tile, stages)
    check_on_cpu(step10_wgmma.schedule_for_cpu(problem, asked), problem)


ANY_SHAPE = Matmul(70, 88, 331, "float16", "nt")


@pytest.mark.filterwarnings("ignore:.*by a kernel in front")
@pytest.mark.parametrize("planned", [Planned(), Planned(3), Planned(2, (True, True))], ids=str)
def test_an_epilogue_is_fused_behind_a_product_of_any_shape(planned: Planned) -> None:
    sch = Schedule(matmul_bias_relu(ANY_SHAPE))
    multiply_by_warpgroups(sch, sch.get_sblock("matmul"), SMALL, 3, planned, tensorize=False)
    check_on_cpu(sch, ANY_SHAPE, bias=True)


@pytest.mark.filterwarnings("ignore:.*by a kernel in front")
def test_products_of_a_batch_are_right_in_any_shape() -> None:
    sch = Schedule(batched_matmul(3, ANY_SHAPE))
    multiply_by_warpgroups(sch, sch.get_sblock("matmul"), SMALL, 4, Planned(), tensorize=False)
    check_on_cpu(sch, ANY_SHAPE, batch=3)


@pytest.mark.parametrize(
    ("function", "planned", "message"),
    [
        (ANY_SHAPE.prim_func(), Planned(0), "one part or more"),
        (Matmul(64, 64, 320, "float16").prim_func(), Planned(6), "limit 2 to 5"),
        (batched_matmul(3, Matmul(64, 64, 320, "float16")), Planned(2), "without batch"),
    ],
    ids=["none", "more than k tiles", "of a batch"],
)
def test_parts_that_no_reduction_has_are_refused(function: tirx.PrimFunc, planned: Planned, message: str) -> None:
    sch = Schedule(function)
    before = sch.mod
    with pytest.raises(IllegalSchedule, match=message):
        multiply_by_warpgroups(sch, sch.get_sblock("matmul"), SMALL, 4, planned)
    assert tvm_ffi.structural_equal(sch.mod, before)


def test_columns_that_are_no_whole_panels_are_carried_along_in_batches_parts_and_several_warpgroups() -> None:
    problem, tile = Matmul(70, 120, 136, "float16", "nn"), WarpgroupTile(block=(64, 80, 64), warpgroups=(1, 1))
    batched = scheduled(problem, tile, function=batched_matmul(2, problem), wgmma=False)
    check_on_cpu(batched, problem, batch=2)
    wide = WarpgroupTile(block=(64, 176, 64), warpgroups=(1, 2))
    check_on_cpu(scheduled(problem, wide, wgmma=False), problem)
    sch = Schedule(problem.prim_func())
    split = split_reduction(sch, sch.get_sblock("matmul"), 2, 64)
    add_parts(sch, split)
    staged = stage_for_warpgroups(sch, split.partial, tile)
    pipeline_warpgroups(sch, staged.loops.k_outer, 3)
    check_on_cpu(sch, problem)


def test_copies_of_such_columns_are_single_instructions_of_which_none_reads_beyond_the_tile() -> None:
    """Three panels of 176 columns: each copy is one cp.async of 16 bytes, of 0 behind the tile's last column."""
    tile = WarpgroupTile(block=(64, 176, 64), warpgroups=(1, 1))
    kernel = lower(make_case(10, (136, 352, 1024), "fitted", tile=tile, stages=3))
    copies = re.findall(r"zero_fill\(.*B_ptr\[.*;", kernel.body)
    assert copies
    assert all("< 11)" in copy for copy in copies)  # vectors of two, of the last panel
    assert tile.smem_bytes(2, 3) == 3 * (64 + 192) * 64 * 2


def test_epilogues_and_batches_are_carried_along() -> None:
    problem = Matmul(70, 66, 136, "float16", "nn")
    check_on_cpu(scheduled(problem, function=matmul_bias_relu(problem), wgmma=False), problem, bias=True)
    check_on_cpu(scheduled(problem, function=batched_matmul(2, problem), wgmma=False), problem, batch=2)
    check_on_cpu(scheduled(problem, function=gemm(problem, 0.5, -2.0), wgmma=False), problem, factors=(0.5, -2.0))
    for function in (matmul_bias_relu(problem), batched_matmul(2, problem), gemm(problem, 0.5, -2.0)):
        assert "wgmma_m64n64k64" in lower_schedule(scheduled(problem, function=function), HOPPER, "epilogue").body


@pytest.mark.parametrize("wgmma", [False, True])
def test_a_convolution_is_a_product_for_warpgroups_too(wgmma: bool) -> None:
    sch = Schedule(conv2d_nhwc(1, 6, 6, 16, 72, kernel=3, padding=1, dtype="float16"))
    block = sch.get_sblock("conv2d")
    flatten_contraction(sch, block)
    staged = stage_for_warpgroups(sch, block, SMALL)
    pipeline_warpgroups(sch, staged.loops.k_outer, 3)
    if wgmma:
        multiply_by_wgmma(sch, staged.loops, staged.instruction)
        assert "wgmma_m64n64k64_f16_n" in lower_schedule(sch, HOPPER, "conv2d").body
        return
    random = np.random.default_rng(1)
    data, weight = (random.integers(-2, 3, shape).astype("float16") for shape in ((1, 6, 6, 16), (3, 3, 16, 72)))
    result = tvm.runtime.tensor(np.full((1, 6, 6, 72), np.nan, "float16"))
    compile_serial(sch.mod)["main"](tvm.runtime.tensor(data), tvm.runtime.tensor(weight), result)
    padded = np.pad(data.astype(np.float32), ((0, 0), (1, 1), (1, 1), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))
    np.testing.assert_array_equal(result.numpy(), np.einsum("nyxcij,ijco->nyxo", windows, weight.astype(np.float32)))


@pytest.mark.parametrize(("n", "parts", "k", "layout"), [(66, 2, 512, "nt"), (66, 3, 500, "nn"), (63, 2, 512, "nt")])
def test_a_long_reduction_is_split_over_blocks_and_added_by_another_kernel(
    n: int, parts: int, k: int, layout: str
) -> None:
    problem = Matmul(70, n, k, "float16", layout)
    check_on_cpu(split(problem, parts, wgmma=False), problem)
    cuda = lower_schedule(split(problem, parts), HOPPER, "split").cuda
    kernels = re.findall(r'extern "C" __global__ [^{;]*\{.*?\n}', cuda, re.S)
    assert ["wgmma_m" in kernel for kernel in kernels].count(True) == 1
    assert len(kernels) == 2
    assert f"k_0 < {parts}" in next(kernel for kernel in kernels if "wgmma_m" not in kernel)


def split(problem: Matmul, parts: int, wgmma: bool = True) -> Schedule:
    """A product whose reduction is split in parts."""
    sch = Schedule(problem.prim_func())
    steps = split_reduction(sch, sch.get_sblock("matmul"), parts, SMALL.block_k)
    add_parts(sch, steps)
    staged = stage_for_warpgroups(sch, steps.partial, SMALL)
    pipeline_warpgroups(sch, staged.loops.k_outer, 3)
    if wgmma:
        multiply_by_wgmma(sch, staged.loops, staged.instruction)
    return sch


@pytest.mark.parametrize("parts", [1, 5])
def test_parts_of_nothing_are_refused(parts: int) -> None:
    with pytest.raises(IllegalSchedule, match="limit 2 to 4"):
        split(Matmul(128, 128, 256, "float16"), parts)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_other_dtypes_are_refused_by_name(dtype: str) -> None:
    with pytest.raises(IllegalTile, match=f"operands of {dtype}.*float16 and bfloat16"):
        step10_wgmma.schedule(Matmul(128, 128, 128, dtype), config("in_flight", SMALL, 4))


@pytest.mark.parametrize(
    ("tile", "layout", "message"),
    [
        ("128x64x64/4x1", "nt", "32 rows per warpgroup are not a multiple of 64"),
        ("64x100x64/1x1", "nt", "100 columns per warpgroup are not a multiple of 8 up to 256"),
        ("64x512x64/1x1", "nt", "512 columns"),
        ("64x64x32/1x1", "nt", "32 steps of the k tile are not a multiple of 64"),
        ("64x100x64/1x1", "nn", "100 columns per warpgroup are not a multiple of 8 up to 256"),
        ("64x8x64/1x1", "nn", r"8 columns of a B stored \[k, n\], limit 64 columns or more"),
        ("128x96x64/1x2", "nn", r"48 columns of a B stored \[k, n\]"),
    ],
)
def test_tiles_without_an_instruction_are_refused(tile: str, layout: str, message: str) -> None:
    with pytest.raises(IllegalTile, match=message):
        scheduled(Matmul(128, 128, 128, "float16", layout), WarpgroupTile.parse(tile))


def test_few_columns_of_a_transposed_b_have_an_instruction() -> None:
    """Its rows are those of columns: as many as there are, each of whole panels."""
    assert scheduled(Matmul(128, 128, 128, "float16", "nt"), WarpgroupTile.parse("64x8x64/1x1"))


def test_a_tile_says_what_a_target_cannot_do() -> None:
    tile = WarpgroupTile(block=(128, 256, 64), warpgroups=(2, 1))
    assert tile.violations(HOPPER.target(), 2, 4) == []
    assert "196608 bytes" not in str(tile.violations(HOPPER.target(), 2, 4))
    assert "5 stage(s), limit 232448" in str(tile.violations(HOPPER.target(), 2, 5))
    assert "sm_80 has no wgmma" in str(tile.violations(machine_for("sm_80").target(), 2, 1))
    assert "elements of 4 bytes" in str(tile.violations(HOPPER.target(), 4, 1))
    assert "96 rows per warpgroup are not a multiple of 64" in str(
        WarpgroupTile(block=(96, 64, 64), warpgroups=(1, 1)).misfits()
    )
    assert "registers" in str(WarpgroupTile(block=(128, 256, 64), warpgroups=(1, 1)).violations(HOPPER.target(), 2, 1))
    assert WarpgroupTile.parse(str(tile)) == tile
    assert (tile.threads, tile.group_m, tile.group_n, tile.threads_per_block) == ((2, 128), 64, 256, 256)


def test_the_wrong_family_of_tiles_is_refused() -> None:
    with pytest.raises(IllegalTile) as caught:
        STEPS[10].schedule(Matmul(128, 128, 128, "float16"), config("in_flight", DEFAULT.tile, 4))
    assert (caught.value.value, caught.value.limit) == (str(DEFAULT.tile), WarpgroupTile.FORM)


@pytest.mark.parametrize(
    ("stages", "in_flight", "message"),
    [(2, 1, "at least 3 stages"), (1, 0, "at least 2 stages"), (4, 2, "limit 0 or 1")],
)
def test_rings_that_are_too_small_are_refused(stages: int, in_flight: int, message: str) -> None:
    with pytest.raises(IllegalPipeline, match=message):
        scheduled(Matmul(128, 128, 1024, "float16", "nt"), SMALL, stages, in_flight)


def test_more_stages_than_shared_memory_holds_are_refused_by_the_case() -> None:
    with pytest.raises(IllegalTile, match="limit 232448"):
        lower(
            make_case(
                10,
                (512, 512, 1024),
                dtype="float16",
                tile=WarpgroupTile(block=(128, 256, 64), warpgroups=(2, 1)),
                stages=5,
            )
        )


def test_an_elementwise_block_is_no_contraction() -> None:
    sch = Schedule(Matmul(128, 128, 128, "float16").prim_func())
    with pytest.raises(IllegalSchedule, match="a contraction has rows, columns and a reduction"):
        stage_for_warpgroups(sch, sch.get_sblock("round"), SMALL)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", STEPS[10].variant_names)
@pytest.mark.parametrize(
    ("shape", "dtype", "layout", "out", "tile", "stages"),
    [
        ((512, 512, 1024), "float16", "nt", None, "128x256x64/2x1", 4),
        ((512, 512, 1024), "float16", "nn", None, "128x256x64/2x1", 4),
        ((512, 512, 1024), "bfloat16", "nn", "float32", "256x128x64/2x1", 4),
        ((300, 200, 456), "bfloat16", "nt", None, "128x128x64/2x1", 3),
        ((300, 192, 40), "float16", "nn", None, "128x192x64/2x1", 5),
        ((77, 91, 131), "float16", "nt", "float32", "64x96x64/1x1", 6),
        ((129, 65, 1000), "float16", "nn", None, "128x64x128/2x1", 4),
        ((300, 400, 456), "bfloat16", "nn", None, "192x176x64/3x1", 4),
        ((300, 184, 136), "float16", "nn", "float32", "128x96x64/2x1", 5),
    ],
)
def test_kernels_compute_the_product(shape, dtype, layout, out, tile, stages, variant, compiler: Compiler) -> None:
    gpu = GpuBackend()
    case = make_case(
        10, shape, variant, dtype=dtype, layout=layout, out_dtype=out, tile=WarpgroupTile.parse(tile), stages=stages
    )
    kernel: Kernel = compiled(lower(case), compiler)
    problem = case.problem
    a, b = gpu.integers(1, (problem.m, problem.k), dtype), gpu.integers(2, problem.b_shape, dtype)
    output = gpu.poisoned((problem.m, problem.n), problem.out_dtype)
    gpu.load(kernel)(a, b, output)
    reference = gpu.reference(problem, a, b)
    assert gpu.worst_error(output, reference) <= (
        0 if problem.out_dtype != "bfloat16" else 2**-8 * float(abs(reference).max())
    )


@pytest.mark.parametrize("width", [64, 72, 80, 88, 96, 104, 176, 192])
def test_neighbouring_threads_store_neighbouring_pieces_of_a_row(width: int) -> None:
    sch = Schedule(Matmul(256, 4 * width, 128, "float16").prim_func())
    block, tile = sch.get_sblock("matmul"), WarpgroupTile(block=(64, width, 64), warpgroups=(1, 1))
    loops = tile_for_warpgroups(sch, *sch.get_loops(block), tile)
    grid, group = bind_grid(sch, [loops.block_row, loops.block_column]), bind_warpgroups(sch, loops)
    stored = store_by_rows(sch, accumulate_in_registers(sch, block, group), grid, tile.threads)
    assert stored is not None
    assert stored.width == 8
    written, thread = _region_of(sch, stored.copy).region, sch.get(stored.thread_column).loop_var

    def first_element(number: int) -> tuple[int, ...]:
        """Of what a thread stores in the first round of the first block."""
        places = {sch.get(loop).loop_var: 0 for loop in sch.get_loops(stored.copy)} | {thread: number}
        indices = (
            tvm_ffi.structural_map(dimension.min, (tvm.tirx.Var, lambda var: tvm.tirx.const(places[var], "int32")))
            for dimension in written
        )
        return tuple(int(tvm.sym.Analyzer().simplify(index)) for index in indices)

    pieces = (width if width % 64 else 64) // 8
    assert [first_element(number) for number in range(64)] == [
        (row, 8 * piece) for row, piece in (divmod(number, pieces) for number in range(64))
    ]


@pytest.mark.parametrize(("k", "stages"), [(64, 4), (256, 3)])
def test_a_schedule_is_lowered_for_the_target_that_has_its_instruction_alone(k: int, stages: int) -> None:
    sch = Schedule(Matmul(64, 64, k, "float16").prim_func())
    staged = stage_for_warpgroups(sch, sch.get_sblock("matmul"), SMALL)
    plan = pipeline_warpgroups(sch, staged.loops.k_outer, stages)
    assert plan.stages == (stages if k > 64 else 1)  # a single k tile is no pipeline
    multiply_by_wgmma(sch, staged.loops, staged.instruction)
    with tvm.transform.PassContext(config=plan.pass_config):
        made = tvm.compile(sch.mod, HOPPER.target(), tir_pipeline=plan.tir_pipeline)
        assert "wgmma.mma_async" in made.mod.imports[0].inspect_source()
        with pytest.raises(RuntimeError, match=r"sm_86.*sm_90a"):
            tvm.compile(sch.mod, machine_for("sm_86").target(), tir_pipeline=plan.tir_pipeline)
