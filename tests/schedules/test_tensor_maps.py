"""Copies by TMA: products and other nests in the emulator, what the kernels ask for, and all that is refused."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import tvm
from tvm import tirx
from tvm.s_tir import Schedule
from tvm.script import tirx as T
from tvm.target import Target

from support.boxes import ALONE, BELOW, BESIDE, HOPPER, kernel_of
from support.functions import check_function
from support.warpgroups import SMALL, check_on_cpu, product_of_any_rows
from tensorir_ladder.harness.build import lower_schedule
from tensorir_ladder.harness.emulation import EmulatorBackend
from tensorir_ladder.harness.machines import machine_for
from tensorir_ladder.harness.verify import verify_launch
from tensorir_ladder.schedules.cycles import Planned, planned_cycles
from tensorir_ladder.schedules.errors import IllegalSchedule
from tensorir_ladder.schedules.memory import fetch_by_tma, fetch_cooperatively, stage_in_shared
from tensorir_ladder.schedules.pipeline import lower_ahead, pipeline_loop
from tensorir_ladder.schedules.plans import able_plans, cheapest_plan, choose
from tensorir_ladder.schedules.tensor_cores import (
    multiply_by_wgmma,
    pipeline_warpgroups,
    stage_for_warpgroups,
)
from tensorir_ladder.schedules.tiles import Choice, WarpgroupTile
from tensorir_ladder.schedules.workloads import Matmul, batched_matmul, matmul_bias_relu
from tensorir_ladder.steps import any_shape

TARGET = Target({"kind": "cuda", "arch": "sm_90a"})


RIGHT = [
    (Matmul(136, 152, 200, "float16"), "128x80x64/2x1", 3, ALONE, 1, (False, False)),  # a panel of 16 columns
    (Matmul(72, 136, 1096, "float16", "nt"), "64x64x64/1x1", 4, ALONE, 1, (False, False)),
    (Matmul(136, 520, 328, "bfloat16"), "64x176x64/1x2", 3, ALONE, 1, (False, False)),  # panels of two warpgroups each
    (Matmul(264, 152, 648, "float16"), "128x64x64/2x1", 4, BELOW, 2, (False, False)),
    (Matmul(136, 152, 520, "float16"), "64x80x64/1x1", 4, BESIDE, 1, (False, False)),
    (Matmul(200, 264, 584, "bfloat16", "nt"), "64x80x64/1x1", 3, BELOW, 1, (False, False)),
    (Matmul(200, 264, 584, "float16", "nt"), "64x64x64/1x1", 3, BESIDE, 3, (False, False)),
    (Matmul(72, 150, 131, "float16"), "64x64x64/1x1", 4, BELOW, 1, (True, True)),  # rows of no whole 16 bytes
    (Matmul(136, 152, 328, "float16"), "64x64x64/1x1", 4, ALONE, 1, (True, False)),
    (Matmul(64, 64, 64, "float16"), "64x64x64/1x1", 3, ALONE, 1, (False, False)),  # one k tile
    (Matmul(136, 136, 712, "float16"), "64x64x64/1x1", 6, BELOW, 1, (False, False)),  # a long ring
    (Matmul(264, 264, 184, "float16", "nt"), "64x64x64/1x1", 3, (2, 2), 1, (False, False)),  # as many stages as k tiles
    (Matmul(200, 136, 520, "float16"), "64x72x64/1x1", 6, (4, 1), 1, (False, False)),
    (Matmul(136, 328, 520, "float16", "nt"), "128x64x64/2x1", 4, (1, 4), 1, (False, False)),
    (Matmul(264, 264, 520, "float16"), "64x80x64/1x1", 6, (2, 2), 1, (False, False)),
    (Matmul(136, 392, 328, "bfloat16", "nt"), "64x64x64/1x1", 3, (2, 4), 1, (False, False)),
    (Matmul(392, 136, 648, "float16"), "64x64x64/1x1", 5, (4, 2), 2, (False, False)),
    (Matmul(88, 200, 392, "float16"), "88x64x64swapped/1x1", 4, (1, 4), 1, (False, False)),  # shares of 24, 24, 24, 16
    (Matmul(150, 200, 392, "float16"), "24x64x64swapped/1x1", 8, (4, 2), 1, (False, False)),
    (Matmul(120, 136, 264, "bfloat16", "nt"), "40x128x64swapped/1x2", 6, (2, 2), 1, (False, False)),
    (Matmul(200, 136, 264, "float16"), "112x64x64swapped/2x1", 4, BESIDE, 1, (False, False)),
    (Matmul(200, 264, 328, "float16"), "80x128x64swapped/1x1", 4, BELOW, 1, (False, False)),
    (Matmul(5, 136, 1160, "float16"), "16x64x64swapped/1x1", 12, BESIDE, 2, (False, False)),
    (Matmul(104, 137, 264, "float16"), "56x64x64swapped/1x1", 4, BELOW, 1, (False, True)),
    (Matmul(392, 200, 264, "float16"), "40x64x64swapped/1x1", 6, (1, 4), 1, (False, False)),  # the last one has none
]


@pytest.mark.sampled(2)
@pytest.mark.emulator
@pytest.mark.filterwarnings("ignore:copied to")
@pytest.mark.parametrize(("problem", "tile", "stages", "cluster", "parts", "copied"), RIGHT, ids=str)
@pytest.mark.parametrize("own_warp", [True, False])
def test_products_by_boxes_are_right(own_warp, problem, tile, stages, cluster, parts, copied) -> None:
    kernel = kernel_of(problem, tile, stages, cluster, parts, copied, own_warp=own_warp)
    backend = EmulatorBackend()
    assert kernel.launches == 1 + any(copied) + (parts > 1)
    verify_launch(backend.load(kernel), problem, backend, kernel.label, seeds=(1, 2))


@pytest.mark.emulator
@pytest.mark.parametrize("cluster", [ALONE, BELOW, BESIDE, (2, 2)], ids=str)
@pytest.mark.parametrize("layout", ["nn", "nt"])
def test_results_are_those_of_cp_async_bit_for_bit(layout, cluster) -> None:
    problem, results = Matmul(200, 168, 712, "float16", layout), []
    random = np.random.default_rng(3)
    a, b = (random.standard_normal(shape).astype("float16") for shape in ((problem.m, problem.k), problem.b_shape))
    for variant, blocks in (("boxes", cluster), ("fitted", ALONE)):
        kernel = kernel_of(problem, "64x80x64/1x1", 4, blocks, variant=variant)
        results.append(np.full((problem.m, problem.n), np.nan, "float16"))
        EmulatorBackend().load(kernel)(a, b, results[-1])
    np.testing.assert_array_equal(results[0].view("uint16"), results[1].view("uint16"))


@pytest.mark.emulator
@pytest.mark.parametrize("variant", ["rows", "fitted", "boxes"])
@pytest.mark.parametrize("layout", ["nn", "nt"])
def test_swapped_operands_change_no_bit(layout, variant) -> None:
    problem, results = Matmul(200, 168, 712, "float16", layout), []
    random = np.random.default_rng(5)
    a, b = (random.standard_normal(shape).astype("float16") for shape in ((problem.m, problem.k), problem.b_shape))
    for tile in ("64x64x64/1x1", "104x64x64swapped/1x1"):
        kernel = kernel_of(problem, tile, 4, variant=variant)
        results.append(np.full((problem.m, problem.n), np.nan, "float16"))
        EmulatorBackend().load(kernel)(a, b, results[-1])
    np.testing.assert_array_equal(results[0].view("uint16"), results[1].view("uint16"))


def by_boxes(function: tirx.PrimFunc, tile: WarpgroupTile = SMALL, stages: int = 3, wgmma: bool = True) -> Schedule:
    """Any contraction by warpgroups, whose operands TMA brings."""
    sch = Schedule(function)
    staged = stage_for_warpgroups(sch, sch.get_sblock("matmul"), tile, by_tma=True)
    pipeline_warpgroups(sch, staged.loops.k_outer, stages)
    if wgmma:
        multiply_by_wgmma(sch, staged.loops, staged.instruction)
    return sch


@pytest.mark.emulator
def test_batches_and_epilogues_are_carried_along() -> None:
    problem = Matmul(72, 136, 264, "float16")
    for function in (batched_matmul(3, problem), matmul_bias_relu(problem)):
        for tile in (SMALL, WarpgroupTile.parse("40x64x64swapped/1x1")):
            sch = by_boxes(function, tile)
            assert "complete_tx__bytes" in lower_schedule(sch, HOPPER, "boxes").body
            check_function(function, lower_ahead(sch.mod["main"], TARGET), TARGET)
    batched = lower_schedule(by_boxes(batched_matmul(3, problem)), HOPPER, "batch").cuda
    assert "bulk_tensor_3d" in batched


def test_until_it_is_lowered_the_copy_is_a_loop_nest_that_any_cpu_runs() -> None:
    problem = Matmul(70, 72, 136, "float16")
    check_on_cpu(by_boxes(problem.prim_func(), wgmma=False), problem)


@pytest.mark.emulator
@pytest.mark.parametrize("m", [1, 77, 130])
def test_of_rows_whose_number_only_the_call_knows_the_tensor_map_is_made_at_each_call(m: int) -> None:
    main = product_of_any_rows()
    check_function(main, lower_ahead(by_boxes(main).mod["main"], TARGET), TARGET, sizes={"m": m})


def row_sums(rows: int = 96, columns: int = 264, dtype: str = "float32") -> tirx.PrimFunc:
    """Sums of pairs of matrices along rows: no product, and no tensor cores."""

    @T.prim_func(s_tir=True)
    def main(a: T.handle, b: T.handle, c: T.handle) -> None:
        A = T.match_buffer(a, (rows, columns), dtype)
        B = T.match_buffer(b, (rows, columns), dtype)
        C = T.match_buffer(c, (rows,), dtype)
        for i, k in T.grid(rows, columns):
            with T.sblock("sum"):
                vi, vk = T.axis.remap("SR", [i, k])
                with T.init():
                    C[vi] = T.Cast(dtype, 0)
                C[vi] = C[vi] + A[vi, vk] * B[vi, vk]

    return main


def staged_sums(function: tirx.PrimFunc, tile: int = 24, again: int = 1) -> tuple[Schedule, list, object]:
    """The sums in tiles of 32 rows, a thread each, both operands staged in shared memory; copies, and their loop.

    A block has a tile, or ``again`` of them.
    """
    sch = Schedule(function)
    block = sch.get_sblock("sum")
    local = sch.cache_write(block, 0, "local")
    i, k = sch.get_loops(block)
    grid, tiles, row = sch.split(i, [None, again, 32])
    k_outer, k_inner = sch.split(k, [None, tile])
    sch.reorder(grid, tiles, k_outer, row, k_inner)
    sch.bind(grid, "blockIdx.x")
    sch.reverse_compute_at(local, tiles, preserve_unit_loops=True)
    copies = [stage_in_shared(sch, block, operand, k_outer, "shared.dyn") for operand in (0, 1)]
    sch.bind(row, "threadIdx.x")
    sch.bind(sch.get_loops(local)[-1], "threadIdx.x")
    init = sch.decompose_reduction(block, k_outer)
    sch.bind(sch.get_loops(init)[-1], "threadIdx.x")
    return sch, copies, k_outer


def brought_sums(again: int = 1) -> Schedule:
    """The sums, both operands brought by TMA, in a ring of three stages."""
    sch, copies, k_outer = staged_sums(row_sums(), again=again)
    for copy in copies:
        fetch_by_tma(sch, copy, k_outer)
    pipeline_loop(sch, k_outer, 3, one_barrier=True)
    return sch


@pytest.mark.emulator
def test_a_nest_without_tensor_cores_has_its_operands_brought_too() -> None:
    """Rows of 96 bytes, not swizzled, read element by element: all threads meet before a stage is filled again."""
    sch = brought_sums()
    lowered = lower_schedule(sch, HOPPER, "sums")
    assert lowered.body.count("bulk_tensor_2d") > 2
    assert "cp_async_legacy" not in lowered.cuda
    check_function(row_sums(), lower_ahead(sch.mod["main"], TARGET), TARGET)


@T.prim_func(s_tir=True)
def running_sums(a: T.Buffer((64, 264), "float32"), y: T.Buffer((11, 64), "float32")):
    near = T.sblock_alloc_buffer((64, 264), scope="shared.dyn")
    total = T.sblock_alloc_buffer((64,), scope="local")
    for block in range(2):
        for row in range(32):
            with T.sblock("zero"):
                i = T.axis.spatial(64, block * 32 + row)
                total[i] = T.float32(0)
        for step in range(11):
            for row, column in T.grid(32, 24):
                with T.sblock("copy"):
                    i = T.axis.spatial(64, block * 32 + row)
                    j = T.axis.spatial(264, step * 24 + column)
                    near[i, j] = a[i, j]
            for row in range(32):
                with T.sblock("add"):
                    i = T.axis.spatial(64, block * 32 + row)
                    k = T.axis.reduce(11, step)
                    total[i] = total[i] + near[i, k * 24] * near[i, k * 24 + 23]
            for row in range(32):
                with T.sblock("store"):
                    i = T.axis.spatial(64, block * 32 + row)
                    k = T.axis.spatial(11, step)
                    y[k, i] = total[i]


def by_threads(function: tirx.PrimFunc) -> str:
    """A function's text, its loops over blocks and rows bound."""
    text = function.script().replace("for block in range(2)", 'for block in T.thread_binding(2, thread="blockIdx.x")')
    return text.replace("for row in range(32)", 'for row in T.thread_binding(32, thread="threadIdx.x")')


@pytest.mark.emulator
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_statements_behind_the_last_use_of_a_tile_make_the_ring_no_longer(stages: int) -> None:
    """What only uses results runs a pipeline stage later: the tiles' ring has none for it, nor have its mbarriers."""
    sch = Schedule(tvm.script.from_source(by_threads(running_sums)))
    copy = sch.get_sblock("copy")
    step = sch.get_loops(copy)[1]
    fetch_by_tma(sch, copy, step)
    plan = pipeline_loop(sch, step, stages, one_barrier=True)
    assert "epilogue" in plan.roles
    check_function(running_sums, lower_ahead(sch.mod["main"], TARGET), TARGET)


def test_a_second_ring_of_a_block_is_refused() -> None:
    """Its mbarriers would be made where those of the first are, which the emulator and PTX forbid."""
    text = by_threads(running_sums)
    first = text[text.index("        for step in") :]
    again = first.replace('")', '_again")').replace("near", "far")
    near = next(line for line in text.splitlines() if "near = " in line)
    text = text.replace(near, f"{near}\n{near.replace('near', 'far')}")
    sch = Schedule(tvm.script.from_source(f"{text.rstrip()}\n{again}"))
    for name in ("copy", "copy_again"):
        copy = sch.get_sblock(name)
        step = sch.get_loops(copy)[1]
        fetch_by_tma(sch, copy, step)
        pipeline_loop(sch, step, 3, one_barrier=True)
    for lower in (lambda: lower_schedule(sch, HOPPER, "two"), lambda: lower_ahead(sch.mod["main"], TARGET)):
        with pytest.raises(RuntimeError, match="2 rings of boxes"):
            lower()


@pytest.mark.parametrize("layout", ["nn", "nt"])
@pytest.mark.parametrize(("tile", "parts"), [("64x64x64/1x1", 12), ("64x64x128/1x1", 6), ("64x80x64/1x1", 12)])
def test_the_end_of_a_part_is_no_edge_of_the_source(tile: str, parts: int, layout: str) -> None:
    """Of a part of one k tile the second, which a ring needs, is zeros: TMA would bring the next part's first."""
    with pytest.raises(IllegalSchedule, match="a condition that is no edge of the source"):
        kernel_of(Matmul(130, 72, 712, "float16", layout), tile, 3, parts=parts)


def test_one_thread_asks_for_each_box_and_nobody_meets_at_a_barrier() -> None:
    kernel = kernel_of(Matmul(136, 152, 1224, "float16"), "128x80x64/2x1", 3, own_warp=False)
    ring = kernel.body[kernel.body.index("for (int turn") :]
    ring = ring[: ring.index("\n  }")]
    assert "__syncthreads" not in ring
    assert ring.count("wgmma_m64n80k64") == 3  # a turn, written out
    assert ring.count("expect_tx_shared") == 3
    assert ring.count("bulk_tensor_2d") == 3 * 3  # A's panel, B's whole panel and its rest
    assert len(set(re.findall(r"&\(([AB]_map_?)\)", kernel.body))) == 3
    sizes = {int(size) for size in re.findall(r"expect_tx\w*\([^;]*\(uint\)(\d+)\)", kernel.body)}
    assert sizes == {(128 * 64 + 64 * 80) * 2}


@pytest.mark.parametrize(("stages", "sooner"), [(4, True), (5, False)])
def test_a_short_ring_is_filled_as_soon_as_a_tile_is_retired(stages, sooner) -> None:
    kernel = kernel_of(Matmul(136, 152, 1224, "float16"), "64x80x64/1x1", stages, own_warp=False)
    turn = kernel.body[kernel.body.index("for (int turn") :]
    done = re.findall(r"(wgmma_m64|pipeline_retire_1|expect_tx_shared)", turn)[: 3 * stages]
    order = ["wgmma_m64", "pipeline_retire_1", "expect_tx_shared"]
    assert done == (order if sooner else [order[0], order[2], order[1]]) * stages
    before = kernel.body[: kernel.body.index("wgmma_m64")]
    assert before.count("expect_tx_shared") == stages - (0 if sooner else 1)  # before the first multiplication


@pytest.mark.parametrize("cluster", [ALONE, BELOW, (2, 2)], ids=str)
@pytest.mark.parametrize(("k", "stages"), [(104, 3), (184, 3), (184, 4), (320, 6), (328, 3)])
def test_boxes_of_empty_stages_are_asked_for_before_any_is_waited_for(k, stages, cluster) -> None:
    body = kernel_of(Matmul(264, 264, k, "float16"), "64x64x64/1x1", stages, cluster, own_warp=False).body
    steps = re.findall(r"(mbarrier_wait|expect_tx_shared|wgmma_m64)\w*\(", body[body.index("is_elected()") :])
    k_tiles = -(-k // 64)
    filled = min(stages, k_tiles)
    assert steps[:filled] == ["expect_tx_shared"] * filled
    refilled = k_tiles - filled  # each behind a wait of its own, for a free stage
    assert (steps.count("expect_tx_shared"), steps.count("wgmma_m64")) == (k_tiles, k_tiles)
    assert steps.count("mbarrier_wait") == k_tiles + refilled


@pytest.mark.parametrize(("cluster", "shared"), [(BELOW, "B"), (BESIDE, "A")], ids=str)
def test_what_a_cluster_has_in_common_is_asked_for_once_by_all_of_it(cluster, shared) -> None:
    kernel = kernel_of(Matmul(264, 264, 648, "float16"), "64x64x64/1x1", 3, cluster)
    loads = re.findall(r"bulk_tensor_2d\w*\(.*?&\((\w)_map\).*", kernel.body)
    multicast = re.findall(r"bulk_tensor_2d\w*multicast__cluster\w*\(.*?&\((\w)_map\).*\(ushort\)3\)", kernel.body)
    assert set(loads) == {"A", "B"}
    assert set(multicast) == {shared}
    assert len(multicast) == loads.count(shared)
    assert "[64, 32]" in str(kernel.host) or "64, 32, 1, 1" in str(kernel.host)  # half of a box's rows each


def test_blocks_of_a_cluster_share_rows_of_one_operand_and_columns_of_the_other() -> None:
    """Two below and four beside each other: A goes to the four of a row, B to the two that are four apart."""
    kernel = kernel_of(Matmul(264, 520, 648, "float16", "nt"), "128x64x64/2x1", 4, (2, 4))
    masks = dict(re.findall(r"multicast__cluster\w*\(.*?&\((\w)_map\).*\(\(?ushort\)\((\d+) <<", kernel.body))
    assert masks == {"A": str(0b1111), "B": str(0b10001)}
    assert "32, 1, 1" in str(kernel.host)  # a box of A's 128 rows, shared out to four; B's 64 to two
    told, counted = 4 + 2 - 1, 8  # blocks that share with one, and the warps of a block
    assert f"{told * counted}" in re.findall(r"mbarrier_init\w*\(.*, \(?u?i?n?t?\)?(\d+)u?\)", kernel.body)


def test_tvm_s_own_pipeline_refuses_a_copy_by_tma() -> None:
    sch = by_boxes(Matmul(64, 64, 256, "float16").prim_func())
    with pytest.raises(Exception, match="copies by TMA"):
        tvm.compile(sch.mod, TARGET)


def sums_refused(
    message: str, function: tirx.PrimFunc, blocks: int = 1, tile: int = 24, change=None, apart: int = 1
) -> None:
    """Hold that a copy is refused with a message, and that nothing is changed before."""
    sch, copies, k_outer = staged_sums(function, tile=tile)
    copy = (change(sch, copies, k_outer) if change else None) or copies[0]
    before = sch.mod.script()
    with pytest.raises(IllegalSchedule, match=message):
        fetch_by_tma(sch, copy, k_outer, blocks, apart)
    assert sch.mod.script() == before


def test_what_is_no_box_is_refused_by_name() -> None:
    sums_refused(r"rows of A are apart .*1060 bytes.*multiple of 16", row_sums(columns=265))
    sums_refused(r"bytes of a box's rows .*8, limit a multiple of 16", row_sums(), tile=2)
    sums_refused(r"a box's rows and columns .*\(32, 264\).*256 of both", row_sums(), tile=264)
    sums_refused(r"blocks that share it .*16, limit 1 to 8", row_sums(), blocks=16)
    sums_refused(r"2 blocks, 1 apart, copy something else each", row_sums(rows=128), blocks=2)
    sums_refused(r"the grid's extents .*multiple of 2 blocks", row_sums(), blocks=2)
    sums_refused(r"the grid's extents .*multiple of 8 blocks", row_sums(), blocks=2, apart=4)
    sums_refused(r"blocks of a cluster, 4 of them 3 apart .*12, limit 1 to 8", row_sums(), blocks=4, apart=3)
    sums_refused(r"blocks of a cluster, 4 of them 0 apart .*0, limit 1 to 8", row_sums(), blocks=4, apart=0)

    def transposed(sch: Schedule, copies: list, loop: object) -> None:
        sch.reorder(*sch.get_loops(copies[0])[-2:][::-1])

    sums_refused(r"innermost loops do not run along", row_sums(), change=transposed)

    def fused(sch: Schedule, copies: list, loop: object) -> None:
        sch.fuse(*sch.get_loops(copies[0])[-2:])

    sums_refused(r"no loops over rows and columns of its own", row_sums(), change=fused)


def test_boxes_that_begin_inside_of_16_bytes_are_refused() -> None:
    """A GPU calls that an illegal instruction, after which the process can use it no more."""

    @T.prim_func(s_tir=True)
    def shifted(A: T.Buffer((32, 264), "float32"), C: T.Buffer((32, 240), "float32")):
        for i, k in T.grid(32, 240):
            with T.sblock("doubled"):
                vi, vk = T.axis.remap("SS", [i, k])
                C[vi, vk] = A[vi, vk + 3] * T.float32(2)

    sch = Schedule(shifted)
    block = sch.get_sblock("doubled")
    rows, columns = sch.get_loops(block)
    outer, inner = sch.split(columns, [None, 24])
    sch.reorder(outer, rows, inner)
    copy = stage_in_shared(sch, block, 0, outer, "shared.dyn")
    before = sch.mod.script()
    with pytest.raises(IllegalSchedule, match=r"column of A that it begins at .*multiples of 4"):
        fetch_by_tma(sch, copy, outer)
    assert sch.mod.script() == before


def test_a_copy_to_registers_is_refused() -> None:
    sch = Schedule(row_sums())
    block = sch.get_sblock("sum")
    rows, k = sch.get_loops(block)
    k_outer, k_inner = sch.split(k, [None, 24])
    sch.reorder(k_outer, rows, k_inner)
    copy = sch.cache_read(block, 0, "local")
    sch.compute_at(copy, k_outer)
    with pytest.raises(IllegalSchedule, match="from and to other memory"):
        fetch_by_tma(sch, copy, k_outer)


def test_what_a_copy_computes_or_pads_with_is_refused() -> None:
    @T.prim_func(s_tir=True)
    def main(a: T.handle, c: T.handle) -> None:
        A = T.match_buffer(a, (64, 256), "float16")
        C = T.match_buffer(c, (64, 256), "float16")
        S = T.sblock_alloc_buffer((64, 256), "float16", scope="shared.dyn")
        R = T.sblock_alloc_buffer((64, 256), "float16", scope="shared.dyn")
        P = T.sblock_alloc_buffer((64, 256), "float16", scope="shared.dyn")
        for k in range(4):
            for i, j in T.grid(64, 64):
                with T.sblock("doubled"):
                    vi, vj = T.axis.spatial(64, i), T.axis.spatial(256, k * 64 + j)
                    S[vi, vj] = A[vi, vj] * T.float16(2)
            for i, j in T.grid(64, 64):
                with T.sblock("ones"):
                    vi, vj = T.axis.spatial(64, i), T.axis.spatial(256, k * 64 + j)
                    R[vi, vj] = T.if_then_else(vj < 256, A[vi, vj], T.float16(1))
            for i, j in T.grid(64, 64):
                with T.sblock("part"):
                    vi, vj = T.axis.spatial(64, i), T.axis.spatial(256, k * 64 + j)
                    P[vi, vj] = T.if_then_else(vj < 200, A[vi, vj], T.float16(0))
            for i, j in T.grid(64, 64):
                with T.sblock("use"):
                    vi, vj = T.axis.spatial(64, i), T.axis.spatial(256, k * 64 + j)
                    C[vi, vj] = S[vi, vj] + R[vi, vj] + P[vi, vj]

    sch = Schedule(main)
    loop = sch.get_loops(sch.get_sblock("doubled"))[0]
    for name, message in (
        ("doubled", "it moves no elements as they are"),
        ("ones", "beyond the source's edges .*1"),
        ("part", r"a condition that is no edge of the source .*vj < 200"),
    ):
        with pytest.raises(IllegalSchedule, match=message):
            fetch_by_tma(sch, sch.get_sblock(name), loop)


def test_copies_of_two_kinds_in_one_loop_are_refused() -> None:
    sch, copies, k_outer = staged_sums(row_sums())
    fetch_by_tma(sch, copies[0], k_outer)
    fetch_cooperatively(sch, copies[1], k_outer, (1, 32), vectorize=True)
    pipeline_loop(sch, k_outer, 3, one_barrier=True)
    with pytest.raises(RuntimeError, match="a copy of another kind stands beside one by TMA"):
        lower_schedule(sch, HOPPER, "both")


def test_a_copy_that_nobody_waits_for_is_refused() -> None:
    sch, copies, k_outer = staged_sums(row_sums())
    for copy in copies:
        fetch_by_tma(sch, copy, k_outer)
    with pytest.raises(RuntimeError, match="stands in no pipelined loop"):
        lower_schedule(sch, HOPPER, "alone")
    pipeline_loop(sch, k_outer, 3)
    with pytest.raises(RuntimeError, match="nobody waits in this loop"):
        lower_schedule(sch, HOPPER, "no gate")


@pytest.mark.emulator
def test_a_block_may_go_through_its_ring_again() -> None:
    """A loop around the ring, whose mbarriers go on: stages are filled again without being readied again."""
    sch = brought_sums(again=3)
    assert lower_schedule(sch, HOPPER, "again").body.count("mbarrier_init") == 3
    check_function(row_sums(), lower_ahead(sch.mod["main"], TARGET), TARGET)


def test_a_cluster_whose_computations_nothing_retires_is_refused() -> None:
    """All blocks read the same rows of A, but plain loops do not say when they have."""

    @T.prim_func(s_tir=True)
    def main(a: T.handle, c: T.handle) -> None:
        A = T.match_buffer(a, (32, 96), "float32")
        C = T.match_buffer(c, (4, 32), "float32")
        for b, i, k in T.grid(4, 32, 96):
            with T.sblock("sum"):
                vb, vi, vk = T.axis.remap("SSR", [b, i, k])
                with T.init():
                    C[vb, vi] = T.float32(0)
                C[vb, vi] = C[vb, vi] + A[vi, vk] * T.Cast("float32", vb)

    sch = Schedule(main)
    block = sch.get_sblock("sum")
    grid, row, k = sch.get_loops(block)
    k_outer, _ = sch.split(k, [None, 24])
    sch.reorder(grid, k_outer, row)
    sch.bind(grid, "blockIdx.x")
    copy = stage_in_shared(sch, block, 0, k_outer, "shared.dyn")
    sch.bind(row, "threadIdx.x")
    sch.bind(sch.get_loops(sch.decompose_reduction(block, k_outer))[-1], "threadIdx.x")
    fetch_by_tma(sch, copy, k_outer, blocks=2)
    pipeline_loop(sch, k_outer, 3, one_barrier=True)
    with pytest.raises(RuntimeError, match="do not hear when computations of others are done"):
        lower_schedule(sch, HOPPER, "cluster")


def test_threads_that_are_no_whole_warps_are_refused() -> None:
    sch = brought_sums()
    narrow = sch.mod.script().replace("T.thread_binding(32", "T.thread_binding(16")
    assert narrow != sch.mod.script()
    with pytest.raises(RuntimeError, match=r"threads beside each other.*16, limit a multiple of 32"):
        lower_schedule(Schedule(tvm.script.from_source(narrow)), HOPPER, "narrow")


def test_a_gpu_without_tma_is_refused() -> None:
    sch = brought_sums()
    older = Target({"kind": "cuda", "arch": "sm_80"})
    with pytest.raises(RuntimeError, match=r"a GPU without TMA.*sm_80, limit sm_90 and newer"):
        lower_ahead(sch.mod["main"], older)
    with pytest.raises(RuntimeError, match=r"a GPU without TMA.*sm_80, limit sm_90 and newer"):
        lower_schedule(sch, machine_for("sm_80"), "older")


MACHINE = HOPPER.for_choices()
WIDE = Choice(WarpgroupTile.parse("128x128x64/2x1"), 6)


def cycles(tile: WarpgroupTile | str, problem: Matmul, cluster: tuple[int, int] = ALONE, parts: int = 1) -> float:
    """What the model says of a product by boxes, in clusters of so many blocks."""
    choice = Choice(WarpgroupTile.parse(tile), 4) if isinstance(tile, str) else tile
    return planned_cycles(choice, problem, MACHINE, Planned(parts, boxes=True, cluster=cluster))


def cluster_of(choice: Choice, problem: Matmul) -> tuple[int, int]:
    """The cluster that the formula puts first."""
    return cheapest_plan("boxes", choice, problem, replace(MACHINE, corrections=None)).cluster


def test_rows_astride_cache_lines_cost_more_and_a_cluster_less() -> None:
    aligned, astride = (Matmul(2048, 1024, k, "float16", "nt") for k in (4096, 4104))
    assert cycles(WIDE, astride) > 1.15 * cycles(WIDE, aligned)
    assert cycles(WIDE, astride, BESIDE) < 0.95 * cycles(WIDE, astride)
    assert cluster_of(WIDE, astride) != ALONE


def test_a_cluster_that_would_work_for_nothing_is_not_made() -> None:
    """A row of tiles that fills the GPU: a second one below would be zeros, and a second wave."""
    assert cluster_of(WIDE, Matmul(120, 128 * 132, 4104, "float16"))[0] == 1
    assert cluster_of(WIDE, Matmul(128 * 132, 120, 4104, "float16", "nt"))[1] == 1


def test_clusters_of_more_than_two_leave_some_multiprocessors_empty() -> None:
    """132 tiles are one wave of blocks alone or in pairs, and two of blocks in fours: 120 find a place at once."""
    full, less = Matmul(128 * 12, 128 * 11, 4096, "float16"), Matmul(128 * 12, 128 * 10, 4096, "float16")
    for problem, dearer in ((full, True), (less, False)):
        assert (cycles(WIDE, problem, (4, 1)) > 1.3 * cycles(WIDE, problem, BELOW)) is dearer


@pytest.mark.parametrize(
    ("rows", "problem"), [(8, Matmul(8, 4096, 512, "float16")), (16, Matmul(512, 4096, 512, "float16"))]
)
def test_blocks_without_eight_rows_of_a_box_each_share_none(rows: int, problem: Matmul) -> None:
    choice = Choice(WarpgroupTile.parse(f"{rows}x64x64swapped/1x1"), 4)
    assert {plan.cluster[1] for plan in able_plans("boxes", choice, problem, MACHINE, 1)} == {1, rows // 8}


def test_swapped_operands_are_chosen_where_rows_fit_them_better() -> None:
    """104 rows are one tile of 104, and two of 64 or one of 128 otherwise."""
    problem = Matmul(104, 64 * 120, 4096, "float16")
    assert cycles("104x64x64swapped/1x1", problem) < min(
        cycles("64x64x64/1x1", problem), cycles("128x64x64/2x1", problem)
    )
    chosen = choose(any_shape.BOX_TILES, problem, MACHINE, plans=True)
    assert chosen.tile.swapped
    assert chosen.tile.block_m == 104
