"""Stores by TMA: products and another nest in the emulator, what one thread issues, what breaks them, all refusals."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import tvm
from tvm import tirx
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV
from tvm.script import tirx as T
from tvm.target import Target

from support.boxes import ALONE, BELOW, BESIDE, HOPPER, kernel_of
from support.broken_kernels import WRONG
from support.functions import check_function
from support.warpgroups import SMALL, check_on_cpu, product_of_any_rows
from tensorir_ladder.emulator import KernelFault
from tensorir_ladder.harness.build import lower_schedule
from tensorir_ladder.harness.emulation import EmulatorBackend, emulated
from tensorir_ladder.harness.verify import WrongResult, verify_launch
from tensorir_ladder.schedules.errors import IllegalSchedule
from tensorir_ladder.schedules.loops import bind_batched_grid, contraction_loops, pad_to_tile
from tensorir_ladder.schedules.memory import initialize_before, stage_in_shared, storable_by_tma, store_by_tma
from tensorir_ladder.schedules.pipeline import hide_reads, lower_ahead
from tensorir_ladder.schedules.tensor_cores import (
    accumulate_by_warpgroups,
    bind_warpgroups,
    instruction_for,
    multiply_by_wgmma,
    pipeline_warpgroups,
    spread_fragment,
    stage_by_tma,
    stage_in_panels,
    tile_for_warpgroups,
)
from tensorir_ladder.schedules.tiles import WarpgroupTile
from tensorir_ladder.schedules.workloads import Matmul, batched_matmul, gemm, matmul_bias_relu

TARGET = Target({"kind": "cuda", "arch": "sm_90a"})
BY_ONE = "is_elected_to_store()"


def stored(
    function: tirx.PrimFunc, tile: WarpgroupTile = SMALL, *, by_tma: bool = True, wgmma: bool = True
) -> Schedule:
    """A contraction by warpgroups whose results leave by TMA; operands come by TMA, too, or by cp.async."""
    sch = Schedule(function)
    block = sch.get_sblock("matmul")
    instruction = instruction_for(sch, block, tile)
    batch = [1] * (len(contraction_loops(sch, block)) - 3)
    pad_to_tile(sch, block, [*batch, *tile.block])
    *batch, rows, columns, reduction = sch.get_loops(block)
    loops = tile_for_warpgroups(sch, rows, columns, reduction, tile)
    grid = bind_batched_grid(sch, batch, [loops.block_row, loops.block_column])
    group = bind_warpgroups(sch, loops)
    write_back = accumulate_by_warpgroups(sch, block, group, instruction)
    store_by_tma(sch, write_back, grid)
    spread_fragment(sch, write_back, group, vectorize=True)
    for operand, run in enumerate(instruction.run_lengths):
        if by_tma:
            stage_by_tma(sch, block, operand, loops.k_outer, run)
        else:
            stage_in_panels(sch, block, operand, loops.k_outer, tile.threads, run)
    spread_fragment(sch, initialize_before(sch, block, loops.k_outer), group)
    hide_reads(sch, block)
    pipeline_warpgroups(sch, loops.k_outer, 3)
    if wgmma:
        multiply_by_wgmma(sch, loops, instruction)
    return sch


PRODUCTS = [
    (Matmul(256, 256, 256, "float16", "nt"), "128x128x64/2x1", ALONE),
    (Matmul(200, 264, 584, "bfloat16"), "128x80x64/2x1", ALONE),  # a last panel of 16 columns
    (Matmul(136, 520, 328, "float16"), "64x176x64/1x2", ALONE),  # panels that two warpgroups fill
    (Matmul(264, 264, 520, "bfloat16", "nt"), "64x80x64/1x1", (2, 2)),
    (Matmul(270, 72, 256, "bfloat16"), "256x64x64/4x1", ALONE),  # the most rows of a box
    (Matmul(200, 264, 328, "float16"), "80x128x64swapped/1x1", BELOW),
    (Matmul(150, 200, 392, "bfloat16", "nt"), "24x64x64swapped/1x1", BESIDE),
    (Matmul(7, 72, 256, "float16"), "64x128x64/1x1", ALONE),  # smaller than a tile
    (Matmul(2, 8, 256, "float16"), "16x64x64swapped/1x1", ALONE),
    (Matmul(200, 36, 256, "float16", "nt", out_dtype="float32"), "128x64x64/2x1", ALONE),
]


@pytest.mark.emulator
@pytest.mark.parametrize(("problem", "tile", "cluster"), PRODUCTS, ids=str)
@pytest.mark.parametrize("own_warp", [True, False])
def test_products_stored_by_tma_are_right(own_warp: bool, problem: Matmul, tile: str, cluster: tuple[int, int]) -> None:
    kernel = kernel_of(problem, tile, 3, cluster, own_warp=own_warp)
    assert BY_ONE in kernel.body
    backend = EmulatorBackend()
    verify_launch(backend.load(kernel), problem, backend, kernel.label, seeds=(1, 2))


@pytest.mark.emulator
def test_nothing_beyond_the_output_is_written_and_all_of_it_is() -> None:
    problem = Matmul(72, 72, 264, "float16", "nt")
    a, b = (np.ones((count, problem.k), np.float16) for count in (problem.m, problem.n))
    memory = np.full((2 * problem.m, problem.n), np.nan, np.float16)
    EmulatorBackend().load(kernel_of(problem, "64x64x64/1x1", 3))(a, b, memory[: problem.m])
    assert (memory[: problem.m] == problem.k).all()
    assert np.isnan(memory[problem.m :]).all()


@pytest.mark.emulator
@pytest.mark.parametrize("by_tma", [True, False])
@pytest.mark.parametrize("tile", ["64x64x64/1x1", "40x64x64swapped/1x1"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_epilogues_and_batches_are_stored_too(dtype: str, tile: str, by_tma: bool) -> None:
    problem = Matmul(72, 136, 264, dtype)
    for function in (matmul_bias_relu(problem), gemm(problem, 1.5, 0.5), batched_matmul(3, problem)):
        sch = stored(function, WarpgroupTile.parse(tile), by_tma=by_tma)
        assert BY_ONE in lower_schedule(sch, HOPPER, "stored").body
        check_function(function, lower_ahead(sch.mod["main"], TARGET), TARGET)


@pytest.mark.emulator
@pytest.mark.parametrize("m", [1, 77, 130])
def test_of_rows_whose_number_only_the_call_knows_the_tensor_map_is_made_at_each_call(m: int) -> None:
    main = product_of_any_rows()
    check_function(main, lower_ahead(stored(main).mod["main"], TARGET), TARGET, sizes={"m": m})


def test_until_it_is_lowered_the_store_is_a_loop_nest_that_any_cpu_runs() -> None:
    problem = Matmul(70, 72, 136, "float16")
    check_on_cpu(stored(problem.prim_func(), wgmma=False), problem)


def scaled(rows: int = 100, columns: int = 136, dtype: str = "float16", batch: int = 2) -> tirx.PrimFunc:
    """Rows of matrices times a factor each: no product, and no tensor cores."""

    @T.prim_func(s_tir=True)
    def main(a: T.handle, s: T.handle, c: T.handle) -> None:
        A = T.match_buffer(a, (batch, rows, columns), dtype)
        S = T.match_buffer(s, (rows,), "float32")
        C = T.match_buffer(c, (batch, rows, columns), dtype)
        for b, i, j in T.grid(batch, rows, columns):
            with T.sblock("scaled"):
                vb, vi, vj = T.axis.remap("SSS", [b, i, j])
                C[vb, vi, vj] = T.Cast(dtype, T.Cast("float32", A[vb, vi, vj]) * S[vi])

    return main


def tiled(
    function: tirx.PrimFunc, rows: int = 24, columns: int = 40, again: int = 1
) -> tuple[Schedule, object, object]:
    """The scaled rows in tiles, a warp for each or for ``again`` of them; the block, and the loop around a tile."""
    sch = Schedule(function)
    block = sch.get_sblock("scaled")
    matrix, i, j = sch.get_loops(block)
    (i, row), (j, tile, column) = sch.split(i, [None, rows]), sch.split(j, [None, again, columns])
    sch.reorder(matrix, i, j, tile, row, column)
    sch.bind(sch.fuse(matrix, i, j), "blockIdx.x")
    return sch, block, tile


def spread(sch: Schedule, block: SBlockRV, threads: int = 32) -> None:
    """Spread a tile's elements over a block's threads."""
    *_, row, column = sch.get_loops(block)
    sch.bind(sch.split(sch.fuse(row, column), [None, threads])[1], "threadIdx.x")


@pytest.mark.emulator
@pytest.mark.parametrize("again", [1, 3])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_nest_without_tensor_cores_is_stored_tile_after_tile(dtype: str, again: int) -> None:
    """The same shared memory is written again once the stores of the tile before have read it."""
    function = scaled(dtype=dtype)
    sch, block, loop = tiled(function, again=again)
    store_by_tma(sch, block, loop)
    spread(sch, block)
    assert "bulk_tensor_3d_global" in lower_schedule(sch, HOPPER, "scaled").body
    check_function(function, lower_ahead(sch.mod["main"], TARGET), TARGET)


@pytest.mark.emulator
def test_of_more_rows_than_a_box_has_several_boxes_are_stored() -> None:
    function = scaled(rows=300, columns=72, batch=1)
    sch, block, loop = tiled(function, rows=264, columns=72)
    store_by_tma(sch, block, loop)
    spread(sch, block)
    lowered = lower_schedule(sch, HOPPER, "scaled")
    assert "72, 300, 1, 144, 43200, 64, 132" not in str(lowered.host)  # 132 rows would begin within the swizzle
    assert lowered.body.count("bulk_tensor_s2g") == 2 * 3  # 64 and 8 columns, 88 rows each
    check_function(function, lower_ahead(sch.mod["main"], TARGET), TARGET)


def test_one_thread_stores_between_a_fence_and_barriers() -> None:
    body = kernel_of(Matmul(264, 264, 520, "float16"), "128x80x64/2x1", 3, own_warp=False).body
    names = r"(fence_proxy|__syncthreads|is_elected_to_store|s2g|bulk_commit_group|bulk_wait_group)\w*\("
    by_one = ["is_elected_to_store", "s2g", "s2g", "bulk_commit_group", "bulk_wait_group"]  # 64 columns, and 16
    assert re.findall(names, body)[-8:] == ["fence_proxy", "__syncthreads", *by_one, "__syncthreads"]
    assert "round_ptr" not in body  # the output is reached by its tensor maps alone


FENCE = r"tvm_builtin_ptx_fence_proxy\w+\(\);\s*(?=meet)"
BROKEN = {
    "no proxy fence": (FENCE, "", "missing proxy fence"),
    "no barrier": (r"meet_\d+\(\);\s*(?=if \(is_elected_to_store)", "", "race"),
    "a store before the fence": (
        r"(tvm_builtin_ptx_fence_proxy\w+\(\);\s*meet_\d+\(\);)\s*(if \(is_elected_to_store\(\)\) {.*?\n    })",
        r"\2 \1",
        "race|missing proxy fence",
    ),
    "a box too far": (r"(results_map[^\n]*>> 1\) \* )64", r"\g<1>128", WRONG),
    "a box of the next rows": (r"(results_map[^\n]*buf_dyn_shmem_ptr\)\[)(\d+)", r"\g<1>512 + \2", WRONG),
    "not awaited": (r"tvm_builtin_ptx_cp_async_bulk_wait_group\w+\(\);", "", "unawaited"),
}


@pytest.mark.emulator
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_store_is_found(name: str) -> None:
    pattern, replacement, found = BROKEN[name]
    problem, backend = Matmul(128, 128, 256, "float16", "nt"), EmulatorBackend()
    kernel = kernel_of(problem, "64x64x64/1x1", 3)
    text = re.sub(pattern, replacement, kernel.cuda, count=1, flags=re.S)
    assert text != kernel.cuda
    program = replace(emulated(kernel), cuda=text)

    def run(orders: int) -> None:
        for seed in range(orders):
            verify_launch(partial(program, seed=seed), problem, backend, name)

    with pytest.raises((KernelFault, WrongResult)) as caught:
        run(20)
    assert re.fullmatch(found, getattr(caught.value, "kind", WRONG)), str(caught.value)


def refused(message: str, sch: Schedule, block: SBlockRV, loop: LoopRV) -> None:
    """Hold that a store is refused with a message, and that nothing is changed before."""
    before = sch.mod.script()
    assert not storable_by_tma(sch, block, loop)
    with pytest.raises(IllegalSchedule, match=message):
        store_by_tma(sch, block, loop)
    assert sch.mod.script() == before


def test_what_no_box_holds_is_refused_by_name() -> None:
    refused(
        r"rows of C are apart .*274 bytes, limit a multiple of 16 bytes.*store_by_rows", *tiled(scaled(columns=137))
    )
    refused(r"columns of a tile .*12 from .*multiples of 8", *tiled(scaled(), columns=12))
    refused(r"rows of a tile .*1, limit 2 and more", *tiled(scaled(), rows=1))
    refused(r"rows of a tile .*258, limit at most 256, or a multiple of 8", *tiled(scaled(rows=600), rows=258))
    refused(r"bytes of an element of C .*8", *tiled(scaled(dtype="float64")))


def test_loops_that_are_no_tile_of_all_threads_are_refused() -> None:
    sch, block, loop = tiled(scaled())
    *_, row, column = sch.get_loops(block)
    refused("no loops of its own under the loop", sch, block, column)
    sch.bind(row, "threadIdx.x")
    refused("each thread has the loop for itself .*threadIdx.x", sch, block, row)
    sch, block, loop = tiled(scaled(), again=2)
    *_, row, _ = sch.get_loops(block)
    sch.reorder(row, loop)
    refused("a tile that is no rectangle|rows of a tile .*1, limit 2", sch, block, row)


def test_results_that_are_read_again_are_refused() -> None:
    @T.prim_func(s_tir=True)
    def main(A: T.Buffer((64, 64), "float16"), C: T.Buffer((64, 64), "float16"), D: T.Buffer((64, 64), "float16")):
        for i, j in T.grid(64, 64):
            with T.sblock("scaled"):
                vi, vj = T.axis.remap("SS", [i, j])
                C[vi, vj] = A[vi, vj] * T.float16(2)
        for i, j in T.grid(64, 64):
            with T.sblock("again"):
                vi, vj = T.axis.remap("SS", [i, j])
                D[vi, vj] = C[vi, vj] + T.float16(1)

    sch = Schedule(main)
    block = sch.get_sblock("scaled")
    rows, _ = sch.get_loops(block)
    outer, _ = sch.split(rows, [None, 16])
    sch.bind(outer, "blockIdx.x")
    refused("C is read again .*again", sch, block, outer)


def test_an_output_with_strides_is_refused() -> None:
    @T.prim_func(s_tir=True)
    def main(a: T.handle, c: T.handle) -> None:
        A = T.match_buffer(a, (64, 64), "float16")
        C = T.match_buffer(c, (64, 64), "float16", strides=[128, 1])
        for i, j in T.grid(64, 64):
            with T.sblock("copied"):
                vi, vj = T.axis.remap("SS", [i, j])
                C[vi, vj] = A[vi, vj]

    sch = Schedule(main)
    block = sch.get_sblock("copied")
    outer, _ = sch.split(sch.get_loops(block)[0], [None, 16])
    sch.bind(outer, "blockIdx.x")
    refused("strides or an offset of C .*128.*rows side by side", sch, block, outer)


def test_a_condition_that_is_no_edge_of_the_output_is_refused() -> None:
    @T.prim_func(s_tir=True)
    def main(A: T.Buffer((64, 64), "float16"), C: T.Buffer((64, 64), "float16")):
        for i, j in T.grid(64, 64):
            with T.sblock("scaled"):
                T.where(i + j < 100)
                vi, vj = T.axis.remap("SS", [i, j])
                C[vi, vj] = A[vi, vj] * T.float16(2)

    sch = Schedule(main)
    block = sch.get_sblock("scaled")
    outer, _ = sch.split(sch.get_loops(block)[0], [None, 16])
    sch.bind(outer, "blockIdx.x")
    refused("a condition that is no edge of the output .*100", sch, block, outer)


def test_a_store_without_blocks_or_whole_warps_is_refused() -> None:
    sch, block, loop = tiled(scaled())
    store_by_tma(sch, block, loop)
    spread(sch, block, threads=24)
    with pytest.raises(RuntimeError, match=r"threads beside each other.*24, limit a multiple of 32"):
        lower_schedule(sch, HOPPER, "24 threads")
    text = sch.mod.script()
    grid = next(line for line in text.splitlines() if "blockIdx.x" in line)
    serial = re.sub(r"T\.thread_binding\((\d+).*", r"range(\1):", grid)
    with pytest.raises(RuntimeError, match="stands in no grid's blocks"):
        lower_ahead(tvm.script.from_source(text.replace(grid, serial))["main"], TARGET)


def test_shared_memory_that_moves_boxes_off_their_swizzle_is_refused() -> None:
    """TVM lays buffers behind each other: 96 bytes in front, and each row's pieces lie as another row's should."""
    sch, block, loop = tiled(scaled())
    store_by_tma(sch, block, loop)
    copy = stage_in_shared(sch, block, 1, loop, "shared.dyn")
    sch.bind(sch.split(sch.get_loops(copy)[-1], [None, 32])[1], "threadIdx.x")
    spread(sch, block)
    with pytest.raises(RuntimeError, match=r"S_shared.dyn in shared memory.*96 bytes, limit multiples of 1024"):
        lower_schedule(sch, HOPPER, "moved")


def test_older_gpus_and_tvm_s_own_pipeline_refuse_it() -> None:
    sch = stored(Matmul(64, 64, 256, "float16").prim_func(), by_tma=False, wgmma=False)
    with pytest.raises(RuntimeError, match=r"a GPU without TMA.*sm_80, limit sm_90 and newer"):
        lower_ahead(sch.mod["main"], Target({"kind": "cuda", "arch": "sm_80"}))
    with pytest.raises(Exception, match="stores by TMA"):
        tvm.compile(sch.mod, TARGET)
