"""Warp tiling: right at every shape, one barrier per k tile, no bank met twice, multiply-adds that share operands."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import tvm_ffi
from hypothesis import given
from hypothesis import strategies as st
from tvm import tirx
from tvm.s_tir import Schedule

from support.c_expressions import value_of
from support.cases import STEPS, config, make_case
from support.schedules_on_cpu import convolve, normal, run
from support.tensor_cores import stack_bytes
from support.warps import AHEAD, SLICED, SMALL, staged
from tensorir_ladder.harness.build import Kernel, Lowered, compiled, lower, lower_schedule, main_loop
from tensorir_ladder.harness.emulation import EmulatorBackend, emulated
from tensorir_ladder.harness.execution import GpuBackend, gpu_arch
from tensorir_ladder.harness.machines import machine_for
from tensorir_ladder.harness.verify import verify
from tensorir_ladder.kernels.codegen.toolchain import Compiler, require_compiler
from tensorir_ladder.schedules.cost import resident_blocks
from tensorir_ladder.schedules.cycles import Planned
from tensorir_ladder.schedules.errors import IllegalSchedule, IllegalTile
from tensorir_ladder.schedules.inspection import annotated_loops
from tensorir_ladder.schedules.loops import (
    flatten_contraction,
    interleave_lanes,
    keep_resident,
    lower_serpentines,
    required_ptxas_options,
    walk_serpentine,
)
from tensorir_ladder.schedules.loops.serpentine import SERPENTINE
from tensorir_ladder.schedules.memory import stage_transposed
from tensorir_ladder.schedules.recipes import multiply_by_warps, stage_for_warps, warp_tiling
from tensorir_ladder.schedules.tiles import Choice, ThreadTile, WarpTile
from tensorir_ladder.schedules.workloads import (
    Matmul,
    batched_matmul,
    conv2d_nhwc,
    gemm,
    matmul_bias_relu,
    row_sum,
    scale_shift,
)
from tensorir_ladder.steps import step7_warp_tiling as step7

LARGE, MIDDLE, QUARTERS, NARROW = map(
    WarpTile.parse,
    ("128x128x32/32x64/8x8/1", "64x128x32/32x64/8x8/1", "32x64x32/32x64/8x8/4", "32x32x32/32x32/8x4/4"),
)
LAYOUTS = ["nn", "nt"]
SHAPES = [
    ((33, 35, 50), "nn"),
    ((33, 35, 50), "nt"),
    ((17, 40, 5), "nt"),
    ((1, 1, 1), "nn"),
    ((5, 64, 1), "nt"),
]


@functools.cache
def build(shape: tuple[int, int, int], variant: str | None = None, tile: WarpTile = SMALL, **options) -> Kernel:
    """Step 7, lowered."""
    return lower(make_case(7, shape, variant, tile=tile, **{"stages": 2, **options}))


def operands(shape: tuple[int, int, int], layout: str = "nn", batch: tuple[int, ...] = ()) -> list[np.ndarray]:
    """Both operands as stored, and their product in float64."""
    m, n, k = shape
    a, b = normal(*batch, m, k), normal(*batch, k, n)
    return [a, b if layout == "nn" else np.ascontiguousarray(np.swapaxes(b, -1, -2)), a.astype(np.float64) @ b]


@functools.cache
def product(shape: tuple[int, int, int], tile: WarpTile, layout: str = "nn", stages: int = 2, variant="serpentine"):
    """What step 7 computes on the CPU, and what is right."""
    a, b, expected = operands(shape, layout)
    sch = step7.schedule(Matmul(*shape, layout=layout), config(variant, tile, stages))
    return run(sch, a, b, shape=shape[:2]), expected


def close(output: np.ndarray, expected: np.ndarray) -> None:
    """Equal but for the rounding of a short sum."""
    np.testing.assert_allclose(output, expected, rtol=0, atol=1e-4)


# Results, on the CPU


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("shape", "layout"), SHAPES, ids=str)
@pytest.mark.parametrize("tile", [SLICED[1], SLICED[4], AHEAD], ids=str)
def test_products_are_right(tile: WarpTile, shape: tuple[int, int, int], layout: str) -> None:
    close(*product(shape, tile, layout))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "tile",
    [
        *map(str, (SLICED[2], SLICED[8])),
        "4x128x8/4x128/4x4/1",
        "64x4x8/64x4/2x4/1",
        "64x8x8/32x8/1x8/1",
        "32x64x6/16x32/4x4/2",
        "24x16x8/8x16/1x4/2",
    ],
)
def test_lanes_in_one_row_or_column_and_odd_depths(tile: str) -> None:
    for layout in LAYOUTS:
        close(*product((35, 70, 20), WarpTile.parse(tile), layout))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("tile", "layout"), [(SLICED[1], "nt"), (SLICED[4], "nn"), (AHEAD, "nn")], ids=str)
def test_a_pipeline_changes_no_bit(tile: WarpTile, layout: str) -> None:
    outputs = [product((33, 35, 70), tile, layout, stages)[0] for stages in (1, 2, 4)]
    assert all(np.array_equal(outputs[0], other) for other in outputs[1:])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("tile", [SLICED[2], AHEAD], ids=str)
@pytest.mark.parametrize("variant", [each.name for each in STEPS[7].variants[1:] if not each.plans])
def test_variants_add_in_the_same_order(variant: str, tile: WarpTile) -> None:
    default, other = (product((33, 70, 50), tile, "nt", 2, name)[0] for name in ("serpentine", variant))
    assert np.array_equal(default, other)


WAYS = [(True, True), (True, False), (False, True), (False, False)]  # to copy operands first
PLANS = [Planned(parts, copied) for parts in (1, 3) for copied in WAYS]
MACHINE = machine_for("sm_90a").for_choices()


def multiplied(problem: Matmul, tile: WarpTile, planned: Planned) -> Schedule:
    """A product of any shape by warps, with a plan of the test's own."""
    sch = Schedule(problem.prim_func())
    multiply_by_warps(sch, sch.get_sblock("matmul"), tile, 2, planned, MACHINE)
    return sch


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore:copied to")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tile", [SMALL, SLICED[4], AHEAD], ids=str)
@pytest.mark.parametrize("planned", PLANS, ids=str)
def test_a_product_is_right_however_it_is_planned(planned: Planned, tile: WarpTile, layout: str) -> None:
    """A B stored [n, k] is transposed on its way, and never copied in front."""
    shape = (33, 35, 6 * tile.block_k + 1)
    a, b, expected = operands(shape, layout)
    sch = multiplied(Matmul(*shape, layout=layout), tile, planned)
    of_a, of_b = planned.copied
    assert [name in workspaces_of(sch) for name in ("A_pad", "B_pad")] == [of_a, of_b and layout == "nn"]
    close(run(sch, a, b, shape=shape[:2]), expected)


@pytest.mark.filterwarnings("ignore:copied to")
@pytest.mark.parametrize("copied", [(False, False), (True, True)])
def test_products_of_a_batch_are_right_in_any_shape(copied: tuple[bool, bool]) -> None:
    a, b, expected = operands((33, 35, 41), batch=(2,))
    sch = Schedule(batched_matmul(2, Matmul(33, 35, 41)))
    multiply_by_warps(sch, sch.get_sblock("matmul"), SLICED[2], 3, Planned(1, copied), MACHINE)
    close(run(sch, a, b, shape=expected.shape), expected)


def test_an_epilogue_is_fused_behind_a_product_of_any_shape() -> None:
    sch = Schedule(matmul_bias_relu(Matmul(33, 35, 41)))
    multiply_by_warps(sch, sch.get_sblock("matmul"), SMALL, 2, Planned(), MACHINE)
    a, b, expected = operands((33, 35, 41))
    bias = normal(35)
    close(run(sch, a, b, bias, shape=(33, 35)), np.maximum(expected + bias, 0))


@pytest.mark.parametrize(
    ("function", "parts", "message"),
    [
        (Matmul(33, 35, 70).prim_func(), 0, "one part or more"),
        (batched_matmul(2, Matmul(33, 35, 70)), 2, "without batch"),
    ],
    ids=["none", "of a batch"],
)
def test_parts_that_no_reduction_has_are_refused(function: tirx.PrimFunc, parts: int, message: str) -> None:
    sch = Schedule(function)
    before = sch.mod
    with pytest.raises(IllegalSchedule, match=message):
        multiply_by_warps(sch, sch.get_sblock("matmul"), SMALL, 2, Planned(parts), MACHINE)
    assert tvm_ffi.structural_equal(sch.mod, before)


def reads_of_a_step(kernel: Kernel) -> int:
    """How often a thread's first element of A is read: once for each step that stands in the kernel."""
    return len(re.findall(r"A\w*_local_ptr\w*\[0\] = ", kernel.body))


@pytest.mark.parametrize(
    ("tile", "k", "parts", "last"),
    [
        (SMALL, 50, 1, 2),  # of 16 steps
        (SMALL, 48, 1, 16),
        (NARROW, 70, 1, 4),  # 6 steps of 32 are left, and each of 4 slices has a vector's
        (NARROW, 70, 2, 4),  # 35 steps are 48, of which 16 are left
        (SMALL, 100, 3, 4),  # 34 steps are 36
    ],
    ids=str,
)
def test_a_last_k_tile_has_only_the_steps_that_are_left(tile: WarpTile, k: int, parts: int, last: int) -> None:
    """Written out behind the loop; its loop has all steps of a k tile, and no condition."""
    case = make_case(7, (33, 36, k), "fitted", tile=tile, stages=2)
    kernel = lower(replace(case, planned=Planned(parts, (False, False))))
    assert reads_of_a_step(kernel) == tile.block_k // tile.slices + last
    assert "if (" not in main_loop(kernel.body), "no step asks whether it is one"


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore:copied to")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("tile", [SMALL, SLICED[4], AHEAD], ids=str)
def test_steps_beyond_the_reduction_change_no_bit(
    tile: WarpTile, parts: int, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = (33, 35, 5 * tile.block_k + 7)
    a, b, _ = operands(shape, layout)

    def output() -> np.ndarray:
        sch = multiplied(Matmul(*shape, layout=layout), tile, Planned(parts, (parts == 1, parts == 1)))
        return run(sch, a, b, shape=shape[:2])

    ended = output()
    monkeypatch.setattr(warp_tiling, "end_within_tile", lambda *_: None)
    assert np.array_equal(ended, output())


@given(st.integers(1, 5000), st.integers(1, 16), st.sampled_from([SMALL, *SLICED.values(), AHEAD]))
def test_parts_have_all_steps_and_hardly_more(k: int, parts: int, tile: WarpTile) -> None:
    steps = tile.steps_of_part(k, parts)
    turn = tile.slices * tile.steps_in_turn
    assert k <= steps * parts < k + tile.block_k * parts
    assert steps % tile.slices == 0
    assert -(-steps // tile.block_k) == -(-k // (tile.block_k * parts)), "as many k tiles as whole ones"
    if parts == 1:
        assert steps < k + (turn if tile.slices > 1 else 1)
    else:
        assert steps % turn == 0, "so that the next part's rows begin with a vector"


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore:copied to")
@pytest.mark.parametrize("copied", [True, False])
@pytest.mark.parametrize("tile", [SMALL, SLICED[2], AHEAD], ids=str)
def test_a_transposed_tile_changes_no_bit(tile: WarpTile, copied: bool) -> None:
    """Of a B that is stored [n, k], in parts too: the sums are those of the same B stored [k, n]."""
    shape = (33, 35, 6 * tile.block_k + 1)
    a, b, expected = operands(shape)
    for parts in (1, 3):
        across, along = (
            multiplied(Matmul(*shape, layout=layout), tile, Planned(parts, (copied, copied))) for layout in LAYOUTS
        )
        found = run(across, a, b, shape=shape[:2])
        close(found, expected)
        assert np.array_equal(found, run(along, a, np.ascontiguousarray(b.T), shape=shape[:2]))


def test_any_product_s_tile_may_be_transposed_and_what_has_none_is_refused() -> None:
    """A product in plain loops, not dealt out to lanes: its columns are one dimension."""
    shape = (32, 48, 40)
    a, b, expected = operands(shape, "nt")
    sch = Schedule(Matmul(*shape, layout="nt").prim_func())
    block = sch.get_sblock("matmul")
    i, j, k = sch.get_loops(block)
    grid, row = sch.split(i, [None, 8])
    k_outer, k_inner = sch.split(k, [None, 20])
    sch.reorder(grid, k_outer, row, j, k_inner)
    sch.bind(grid, "blockIdx.x")
    sch.bind(row, "threadIdx.y")
    before = sch.mod.script()
    across = Schedule(Matmul(*shape, layout="nn").prim_func())
    product_of_rows = across.get_sblock("matmul")
    with pytest.raises(IllegalSchedule, match="run across the reduction already"):
        stage_transposed(across, product_of_rows, 1, across.get_loops(product_of_rows)[2], (8, 4))
    assert sch.mod.script() == before
    copy = stage_transposed(sch, block, 1, k_outer, (8, 4)).copy
    written = sch.get(copy).writes[0].source
    assert list(map(int, written.shape)) == [40, 48]
    close(run(sch, a, b, shape=shape[:2]), expected)


def test_columns_between_which_batches_lie_are_not_turned() -> None:
    sch = Schedule(batched_matmul(2, Matmul(32, 48, 40, layout="nt")))
    block = sch.get_sblock("matmul")
    sch.transform_layout(block, ("read", 1), lambda batch, j, k: (j, batch, k))
    *_, k = sch.get_loops(block)
    k_outer, _ = sch.split(k, [None, 20])
    before = sch.mod.script()
    with pytest.raises(IllegalSchedule, match="dimension 1 of operand 1, which the other one has too"):
        stage_transposed(sch, block, 1, k_outer, (8, 4))
    assert sch.mod.script() == before


@pytest.mark.parametrize("columns", [1, 8, 31, 32])
@pytest.mark.parametrize("parts", [1, 2])
def test_one_tile_of_columns_may_be_turned(columns: int, parts: int) -> None:
    """TVM leaves out dimensions of one element: such columns are two dimensions, not three."""
    shape = (33, columns, 131)
    a, b, expected = operands(shape, "nt")
    asked = replace(config("fitted", SMALL, 2), planned=Planned(parts, (False, False)))
    close(run(step7.schedule(Matmul(*shape, layout="nt"), asked), a, b, shape=shape[:2]), expected)


@pytest.mark.parametrize(("batch", "shape"), [((), (33, 70, 50)), ((2,), (33, 70, 50)), ((2,), (33, 8, 50))], ids=str)
def test_a_staged_contraction_may_turn_its_second_operand(batch: tuple[int, ...], shape: tuple[int, int, int]) -> None:
    """To the same bits; one that lies across the reduction already is refused before anything is changed."""
    problem, (a, b, expected) = Matmul(*shape, layout="nt"), operands(shape, "nt", batch)
    found = []
    for transposed in (False, True):
        sch = Schedule(batched_matmul(*batch, problem) if batch else problem.prim_func())
        staged(sch, name="matmul", transposed=transposed)
        found.append(run(sch, a, b, shape=(*batch, *shape[:2])))
        close(found[-1], expected)
    assert np.array_equal(*found)
    sch = Schedule(Matmul(*shape).prim_func())
    before = sch.mod
    with pytest.raises(IllegalSchedule, match="run across the reduction already"):
        stage_for_warps(sch, sch.get_sblock("matmul"), SMALL, transposed=True)
    assert tvm_ffi.structural_equal(sch.mod, before)


def workspaces_of(sch: Schedule) -> str:
    """Name the buffers in device memory that a schedule's kernels leave each other."""
    return " ".join(str(buffer.name) for buffer in lower_schedule(sch, machine_for("sm_90a"), "fitted").workspaces)


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("shape", "tile"), [((70, 133, 101), "64x64x32/32x64/8x8/2"), ((33, 96, 136), "128x96x32/64x32/8x8/2")], ids=str
)
def test_transposed_tiles_are_right_in_the_emulator(shape: tuple[int, int, int], tile: str) -> None:
    kernel = build(shape, "fitted", WarpTile.parse(tile), layout="nt", stages=2)
    widths = set(re.findall(r"cp_async_legacy_(?:pred_)?c[ag]_(\d+)_", kernel.cuda))
    assert widths == ({"4"} if shape[2] % 4 else {"4", "16"})
    verify(kernel, EmulatorBackend(), [3])


def test_parts_are_added_by_a_second_kernel_and_elements_copied_without_one_in_front() -> None:
    few, long = build((33, 35, 50), "fitted"), build((16, 32, 4000), "fitted")
    assert (few.launches, long.launches) == (1, 2)
    assert few.workspaces == []
    (parts,) = long.workspaces
    assert int(parts.shape[0]) == long.blocks > 1  # of one tile
    # From rows of 50 floats two at a time, of 35 one; four from whole vectors.
    widths = [set(re.findall(r"cp_async_legacy_(?:pred_)?c[ag]_(\d+)_", each.cuda)) for each in (few, long)]
    assert widths == [{"4", "8"}, {"16"}]


def test_a_thread_that_adds_parts_keeps_its_own_results_alone() -> None:
    """Also of rows that are longer than what a block of them adds, and cut short when they are stored."""
    kernel = build((144, 1997, 2130), "fitted", WarpTile.parse("64x128x32/32x64/8x8/1"))
    assert kernel.launches == 2
    assert kernel.most_local_bytes <= 1024


@pytest.mark.sampled(3)
@pytest.mark.compiler
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("choice", STEPS[7].tiles_of("fitted").choices[:8:3], ids=lambda choice: str(choice.tile))
def test_fitted_blocks_leave_each_other_the_registers_that_their_cost_counts(choice: Choice, layout: str) -> None:
    """Also where single elements are copied, whose addresses would otherwise be kept in registers; nothing spills."""
    case = make_case(7, (201, 203, 507), "fitted", tile=choice.tile, stages=choice.stages, layout=layout)
    kernel = compiled(lower(case), require_compiler())
    counted = resident_blocks(choice, case.config.machine, 4)
    assert f"__launch_bounds__({choice.tile.threads_per_block}, {counted})" in kernel.cuda
    assert kernel.resources.blocks_per_sm >= counted
    assert kernel.resources.spill_bytes <= 64


@pytest.mark.sampled(2)
@pytest.mark.compiler
@pytest.mark.parametrize(
    ("text", "blocks"), [("96x128x32/32x64/8x8/1", 2), ("192x96x32/64x32/8x8/1", 1), ("96x64x32/32x64/8x8/1", 5)]
)
def test_blocks_of_an_odd_number_of_warps_share_a_multiprocessor_without_spilling(text: str, blocks: int) -> None:
    """A fourth of its registers has room for four warps of 104: 16 in all, of which blocks of six fit twice."""
    case = make_case(7, (960, 1280, 1024), "fitted", tile=WarpTile.parse(text), stages=2)
    assert resident_blocks(Choice(case.config.tile, 2), case.config.machine, 4) == blocks
    assert compiled(lower(case), require_compiler()).cubin.spill_bytes == 0


def test_one_block_at_least_is_kept_resident() -> None:
    sch = Schedule(Matmul(16, 16, 16).prim_func())
    with pytest.raises(IllegalSchedule, match=r"got 0, limit at least 1"):
        keep_resident(sch, sch.get_loops(sch.get_sblock("matmul"))[0], 0)


@pytest.mark.parametrize("tile", [SMALL, SLICED[4]], ids=str)
def test_neighbours_are_stored_side_by_side(tile: WarpTile) -> None:
    """Lanes store single elements beside each other, where rows are no whole vectors; else a vector each."""
    stores = {}
    for columns in (33, 36):
        lines = build((16, columns, 40), "fitted", tile).body.splitlines()
        (stores[columns],) = (
            line.partition(" = ")[0]
            for line in lines
            if line.strip().startswith(("matmul_ptr[", "*(float4*)(matmul_ptr"))
        )
    assert stores[33].endswith("((int)threadIdx.x))]")
    assert "float4" in stores[36]


def test_reads_are_a_step_ahead_where_few_warps_fit() -> None:
    """A step's operands have two stages then; not with one stage, nor with an odd number of steps in a k tile."""
    odd = replace(AHEAD, block=(32, 128, 5))
    cases = [(AHEAD, 2, "serpentine"), (AHEAD, 2, "in_turn"), (AHEAD, 1, "serpentine"), (odd, 2, "serpentine")]
    kept = []
    for tile, stages, variant in cases:
        text = build((64, 128, 60), variant, tile, stages=stages).cuda
        kept.append({int(count) // 16 for count in re.findall(r"float B_\w*local_ptr\w*\[(\d+)\];", text)})
    assert kept == [{2}, {1}, {1}, {1}]
    assert [tile.steps_ahead for tile in (AHEAD, LARGE)] == [1, 0]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("slices", [1, 4])
@pytest.mark.parametrize("batch", [1, 3])
def test_batches_join_the_grid(batch: int, slices: int, layout: str) -> None:
    a, b, expected = operands((33, 35, 40), layout, (batch,))
    sch = Schedule(batched_matmul(batch, Matmul(33, 35, 40, layout=layout)))
    staged(sch, SLICED[slices])
    close(run(sch, a, b, shape=expected.shape), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("slices", [1, 2])
def test_epilogues_are_fused(slices: int, layout: str) -> None:
    a, b, expected = operands((33, 35, 40), layout)
    bias = normal(35)
    sch = Schedule(matmul_bias_relu(Matmul(33, 35, 40, layout=layout)))
    staged(sch, SLICED[slices])
    close(run(sch, a, b, bias, shape=(33, 35)), np.maximum(expected + bias, 0))
    assert lower_schedule(sch, machine_for("sm_90a"), "fused").body.count("__global__") == 1


@pytest.mark.parametrize("slices", [1, 2])
def test_a_scaled_sum_with_another_operand_is_fused(slices: int) -> None:
    sch = Schedule(gemm(Matmul(33, 35, 40), alpha=1.5, beta=-0.5))
    staged(sch, SLICED[slices])
    a, b, expected = operands((33, 35, 40))
    c = normal(33, 35)
    close(run(sch, a, b, c, shape=c.shape), 1.5 * expected - 0.5 * c)
    assert lower_schedule(sch, machine_for("sm_90a"), "fused").body.count("__global__") == 1


def test_a_convolution_is_an_implicit_product() -> None:
    data, weight = normal(1, 9, 7, 8), normal(3, 3, 8, 24)
    sch = Schedule(conv2d_nhwc(1, 9, 7, 8, 24))
    flatten_contraction(sch, sch.get_sblock("conv2d"))
    staged(sch, SLICED[2], 3, "conv2d")
    expected = convolve(data, weight, 1, 1)
    close(run(sch, data, weight, shape=expected.shape), expected)


# The CUDA text, run by the emulator

THREADED = [
    ("16x32x64/16x32/4x4/8", (40, 32, 200), "nn", 2),  # more warps than vectors of outputs per lane
    ("32x64x32/32x64/8x8/4", (33, 72, 132), "nt", 3),
    ("32x64x16/16x32/4x4/1", (50, 72, 60), "nn", 3),
    ("96x128x32/32x64/8x8/2", (97, 131, 70), "nn", 2),  # threads that are no power of two
    ("64x160x32/64x32/8x8/2", (65, 163, 98), "nt", 2),
]


def emulate(kernel: Lowered, a: np.ndarray, b: np.ndarray, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """What a kernel's CUDA text computes."""
    output = np.full(shape, np.nan, np.float32)
    emulated(kernel)(a, b, output, seed=seed)
    return output


@pytest.mark.emulator
@pytest.mark.parametrize(("tile", "shape", "layout", "stages"), THREADED, ids=str)
def test_threads_compute_what_they_store(tile: str, shape: tuple[int, int, int], layout: str, stages: int) -> None:
    kernel = build(shape, tile=WarpTile.parse(tile), layout=layout, stages=stages)
    a, b, expected = operands(shape, layout)
    outputs = [emulate(kernel, a, b, shape[:2], seed) for seed in range(3)]
    close(outputs[0], expected)
    assert all(np.array_equal(outputs[0], other) for other in outputs[1:])


@pytest.mark.emulator
def test_threads_of_a_batch_add_their_own_slices() -> None:
    a, b, expected = operands((33, 35, 40), batch=(3,))
    sch = Schedule(batched_matmul(3, Matmul(33, 35, 40)))
    staged(sch, SLICED[4])
    kernel = lower_schedule(sch, machine_for("sm_90a"), "batched")
    assert (kernel.launch["threadIdx.x"], kernel.launch["threadIdx.y"]) == (32, 4)
    close(emulate(kernel, a, b, expected.shape), expected)


# What the text shows


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("tile", "stages"), [(LARGE, 2), (QUARTERS, 3), (SMALL, 4)], ids=str)
def test_a_k_tile_costs_one_barrier_and_copies_of_sixteen_bytes(tile: WarpTile, stages: int, layout: str) -> None:
    loop = main_loop(build((256, 256, 1024), tile=tile, stages=stages, layout=layout).body)
    assert loop.count("__syncthreads()") == 1
    assert re.findall(r"wait_group_(\d)\(\)", loop) == [str(stages - 2)]
    assert set(re.findall(r"cp_async_legacy(?:_pred)?_(\w\w_\d+)_", loop)) == {"cg_16"}
    copied = (tile.block_m + tile.block_n) * tile.block_k * 4
    rounds = re.findall(r"for \(int \w+ = 0; \w+ < (\d+); \+\+\w+\) \{\n\s*ptx_cp_async", loop)
    assert sum(map(int, rounds)) * 16 * tile.threads_per_block == copied


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("tile", "stages", "layout"),
    [
        *((tile, stages, "nt") for tile in (AHEAD, STEPS[7].tiles.default.tile) for stages in (1, 2, 4)),
        *((tile, 3, "nt") for tile in (SLICED[1], SLICED[2], QUARTERS, NARROW)),
        *((tile, stages, "nn") for tile in (SLICED[1], QUARTERS, AHEAD) for stages in (1, 3)),
    ],
    ids=str,
)
def test_shared_memory_is_what_the_tile_says(tile: WarpTile, stages: int, layout: str) -> None:
    kernel = build((256, 256, 240), tile=tile, layout=layout, stages=stages)
    assert kernel.smem_bytes <= tile.smem_bytes(4, stages)
    assert kernel.smem_bytes == tile.smem_bytes(4, stages) or layout == "nn"  # whose B has no padding
    assert (kernel.launch["threadIdx.y"], kernel.launch["threadIdx.x"]) == tile.threads


def c_value(expression: str, names: dict[str, int]) -> int:
    """The value of an index in the text; none is negative there."""
    text = re.sub(r"\(int\)|\(float\*\)", "", expression).replace("threadIdx.x", "tx").replace("threadIdx.y", "ty")
    return value_of(text, names)


MULTIPLY_ADD = (  # three loops, or two; definitions; sum += A * B
    r"for \(int (\w+) = 0; \w+ < (\d+);.*\{\n\s*for \(int (\w+) = 0; \w+ < (\d+);.*\{\n"
    r"(?:\s*for \(int (\w+) = 0; \w+ < (\d+);.*\{\n)?((?:\s*int cse.*\n)*)"
    r"\s*\w+_local_ptr\[(.*?)\] = \(\w+_local_ptr\[.*?\] \+ "
    r"\(A\w*_local_ptr\w*\[(.*?)\] \* B\w*_local_ptr\w*\[(.*)\]\)\);"
)


def multiply_adds(kernel: Kernel) -> list[tuple[int, int, int]]:
    """The multiply-adds of a thread's first step, in order: (sum, element of A, element of B)."""
    found = re.search(MULTIPLY_ADD, main_loop(kernel.body))
    assert found, "no nest of multiply-adds"
    *loops, definitions, total, a, b = found.groups()
    names, extents = [name for name in loops[::2] if name], [int(extent) for extent in loops[1::2] if extent]
    order = []
    for place in np.ndindex(*extents):
        known = dict(zip(names, place))
        for name, value in re.findall(r"int (cse\w+) = (.*);", definitions):
            known[name] = c_value(value, known)
        order.append(tuple(c_value(index, known) for index in (total, a, b)))
    return order


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tile", [MIDDLE, NARROW, SMALL], ids=str)
def test_each_multiply_add_shares_an_operand_with_the_one_before(tile: WarpTile, layout: str) -> None:
    rows, columns = tile.thread_m, tile.thread_n
    for variant, changes in (("serpentine", 0), ("row_order", rows - 1)):
        order = multiply_adds(build((256, 256, 256), variant, tile, layout=layout))
        assert sorted(order) == [
            (row * columns + column, row, column) for row in range(rows) for column in range(columns)
        ]
        both = [before[1] != after[1] and before[2] != after[2] for before, after in pairwise(order)]
        assert sum(both) == changes


def test_only_a_serpentine_order_needs_an_option() -> None:
    for variant in STEPS[7].variant_names:
        expected = () if variant == "row_order" else ("-O1",)
        kernel = build((16, 32, 16), variant)
        assert required_ptxas_options(kernel.schedule.mod) == kernel.ptxas_options == expected


def wavefronts(kernel: Kernel, operand: str) -> int:
    """The most that one 16-byte load of a half warp takes, 128 bytes each from 32 banks of 4 bytes."""
    read = rf"{operand}\w*_local_ptr\w*\[(\d+)\] = pipeline_read_float32\(\(&\(.*?_ptr\)?\[(.*)\]\)\)\);"
    loop = main_loop(kernel.body)
    counter = re.match(r"\s*for \(int (\w+)", loop).group(1)
    most = 0
    for index in dict(re.findall(read, loop)[: kernel.case.tile.thread_m + kernel.case.tile.thread_n]).values():
        for first in (0, 16):
            lanes = [c_value(index, {"tx": lane, "ty": 1, counter: 1}) // 4 for lane in range(first, first + 16)]
            groups = [vector % 8 for vector in set(lanes)]
            most = max(most, max(groups.count(group) for group in groups))
    return most


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tile", [LARGE, QUARTERS, NARROW], ids=str)
def test_padded_rows_meet_no_bank_twice(tile: WarpTile, layout: str) -> None:
    padded, unpadded = (build((256, 256, 1024), variant, tile, layout=layout) for variant in ("serpentine", "unpadded"))
    assert wavefronts(padded, "A") == wavefronts(padded, "B") == 1
    assert wavefronts(unpadded, "A") > 1
    assert (wavefronts(unpadded, "B") > 1) == (layout == "nt")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_default_tile_meets_no_bank_twice(layout: str) -> None:
    kernel = build((256, 256, 1024), tile=STEPS[7].tiles.default.tile, layout=layout)
    assert wavefronts(kernel, "A") == wavefronts(kernel, "B") == 1


@pytest.mark.sampled(3)
@pytest.mark.compiler
@pytest.mark.parametrize(
    ("tile", "layout"), [(STEPS[7].tiles.default.tile, "nn"), (LARGE, "nn"), (QUARTERS, "nt")], ids=str
)
def test_sums_and_operands_stay_in_registers(tile: WarpTile, layout: str, compiler: Compiler) -> None:
    kernel = compiled(build((1024, 1024, 1024), tile=tile, layout=layout), compiler)
    assert kernel.cubin.spill_bytes == 0
    assert stack_bytes(kernel.cubin.data) in (0, None)
    assert kernel.cubin.registers <= 255


# What is refused


@pytest.mark.parametrize(
    ("tile", "message"),
    [
        (WarpTile(block=(96, 128, 32), warp=(64, 64), thread=(8, 16)), "96 rows of the block are not a multiple of 64"),
        (WarpTile(block=(128, 128, 32), warp=(32, 64), thread=(8, 4)), r"4 x 16 threads of a warp, which has 32"),
        (
            WarpTile(block=(128, 128, 32), warp=(4, 64), thread=(8, 8)),
            r"4 rows of a warp are not a multiple of 8.*0 x 8 threads",
        ),
        (
            WarpTile(block=(32, 64, 32), warp=(32, 32), thread=(16, 2)),
            "2 columns per thread|2 columns of a thread are not a multiple of 4",
        ),
        (
            WarpTile(block=(32, 64, 32), warp=(32, 64), thread=(8, 8), slices=3),
            "32 steps of the k tile are not a multiple of 3",
        ),
        (
            WarpTile(block=(8, 16, 8), warp=(8, 16), thread=(1, 4), slices=8),
            r"128 outputs.*256 threads that add its slices up",
        ),
        (
            ThreadTile(block=(64, 64, 16), thread=(4, 4)),
            r"not a WarpTile.*MxNxK/WMxWN/TMxTN/S.*128x128x32/32x64/8x8/1",
        ),
    ],
    ids=str,
)
def test_tiles_that_do_not_divide_are_refused(tile: WarpTile, message: str) -> None:
    sch = Schedule(Matmul(64, 64, 64).prim_func())
    before = sch.mod
    with pytest.raises(IllegalTile, match=message):
        stage_for_warps(sch, sch.get_sblock("matmul"), tile)
    assert tvm_ffi.structural_equal(sch.mod, before)


@pytest.mark.parametrize(
    ("function", "name", "message"),
    [
        (row_sum(64, 64), "row_sum", r"one reduction.*got 2 loops.*flatten_contraction"),
        (conv2d_nhwc(1, 8, 8, 4, 4), "conv2d", r"one reduction.*got 7 loops, 3 of them.*flatten_contraction"),
        (scale_shift((8, 8, 8)), "scale_shift", r"one reduction.*got 3 loops, 0 of them"),
        (Matmul(64, 64, 64, "float16").prim_func(), "matmul", r"4 bytes an element.*float16 and float16.*float32"),
        (Matmul(64, 64, 64, "bfloat16").prim_func(), "matmul", r"bfloat16 and bfloat16.*tensorize_contraction"),
        (Matmul(64, 64, 64, "float64").prim_func(), "matmul", r"float64 and float64.*stage_contraction"),
    ],
    ids=["two loops", "convolution", "no reduction", "float16", "bfloat16", "float64"],
)
def test_blocks_that_are_no_float32_products_are_refused(function, name: str, message: str) -> None:
    sch = Schedule(function)
    before = sch.mod
    for refuse in (
        lambda: stage_for_warps(sch, sch.get_sblock(name), SMALL),
        lambda: interleave_lanes(sch, sch.get_sblock(name), (4, 8)),
    ):
        with pytest.raises(IllegalSchedule, match=message) as caught:
            refuse()
        assert caught.value.block == name
    assert tvm_ffi.structural_equal(sch.mod, before)


@pytest.mark.parametrize("lanes", [(5, 8), (4, 7), (0, 8)])
def test_lanes_that_do_not_divide_are_refused(lanes: tuple[int, int]) -> None:
    sch = Schedule(Matmul(64, 64, 64).prim_func())
    with pytest.raises(IllegalSchedule, match=r"dealt out evenly.*64 x 64.*pad_to_tile"):
        interleave_lanes(sch, sch.get_sblock("matmul"), lanes)


def test_a_raster_of_no_rows_is_refused() -> None:
    sch = Schedule(Matmul(64, 64, 64).prim_func())
    with pytest.raises(IllegalSchedule, match="fewer than one row"):
        stage_for_warps(sch, sch.get_sblock("matmul"), SMALL, raster=0)


def test_limits_of_the_machine_are_refused() -> None:
    with pytest.raises(IllegalTile, match=r"bytes of shared memory in 8 stage"):
        build((1024, 1024, 1024), tile=LARGE, stages=8)
    with pytest.raises(IllegalTile, match=r"registers per thread, limit 255"):
        build((1024, 1024, 1024), tile=WarpTile(block=(128, 128, 16), warp=(64, 128), thread=(16, 16)))
    with pytest.raises(IllegalTile, match=r"2048 threads per block"):
        build((1024, 1024, 1024), tile=WarpTile(block=(64, 128, 64), warp=(16, 32), thread=(4, 4), slices=4))


def test_every_declared_tile_is_legal() -> None:
    for tile in STEPS[7].tiles.tuning:
        assert not tile.violations(machine_for("sm_90a").target(), 4, STEPS[7].stages), tile


def test_only_independent_outputs_are_walked_in_another_order() -> None:
    sch = Schedule(Matmul(8, 8, 8).prim_func())
    row, column, k = sch.get_loops(sch.get_sblock("matmul"))
    for loop in (row, column, k):  # a sum inside, or nothing
        with pytest.raises(IllegalSchedule, match=r"independent outputs.*reorder reductions"):
            walk_serpentine(sch, loop)
    sch.reorder(k, row, column)
    walk_serpentine(sch, row)
    assert SERPENTINE in sch.get(row).annotations
    lowered = lower_serpentines(sch.mod["main"])
    assert not list(annotated_loops(lowered, SERPENTINE))
    a, b, expected = operands((8, 8, 8))
    close(run(sch, a, b, shape=(8, 8)), expected)


def test_a_statement_between_its_loops_does_not_straighten_a_serpentine() -> None:
    i, j = tirx.Var("i", "int32"), tirx.Var("j", "int32")
    column = tirx.For(j, 0, 8, tirx.ForKind.SERIAL, tirx.Evaluate(j))
    body = tirx.SeqStmt([tirx.Evaluate(i), column])
    row = tirx.For(i, 0, 8, tirx.ForKind.SERIAL, body, None, {SERPENTINE: 1})
    empty = tirx.For(i, 0, 8, tirx.ForKind.SERIAL, tirx.Evaluate(i), None, {SERPENTINE: 1})
    text = lower_serpentines(tirx.PrimFunc([], row)).script()
    assert "i % 2" in text
    assert "serpentine" not in text
    assert "% 2" not in lower_serpentines(tirx.PrimFunc([], empty)).script()


# On the GPU


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tile", STEPS[7].tiles.tuning, ids=str)
def test_every_tile_is_right_on_the_gpu(tile: WarpTile, layout: str) -> None:
    for shape in ((512, 384, 1000), (257, 131, 100), (33, 17, 129), (1, 1, 1)):
        for stages in (2, 3):
            kernel = build(shape, tile=tile, layout=layout, stages=stages, arch=gpu_arch())
            assert verify(compiled(kernel, require_compiler()), GpuBackend()).passed


@pytest.mark.gpu
@pytest.mark.parametrize("variant", STEPS[7].variant_names)
def test_every_variant_is_right_on_the_gpu(variant: str) -> None:
    for tile in (LARGE, QUARTERS):
        kernel = build((512, 384, 1000), variant, tile, arch=gpu_arch())
        assert verify(compiled(kernel, require_compiler()), GpuBackend()).passed
