"""Software pipelines that TVM compiles to something else than was asked for (docs/tvm.md)."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import s_tir, tirx
from tvm.s_tir import Schedule
from tvm.script import tirx as T

from support.stock_tvm import ASYNCHRONOUS, HOPPER, elements, events, failure, kernel, on_cpu, pipelined, still

CHECKS = "schedules/pipeline/checks.py"
TOUCH = "\n__forceinline__ __device__ float touch(void* address) { return 0.0f; }\n"
X = np.arange(8 * 32, dtype="float32").reshape(8, 32)


@T.prim_func(s_tir=True)
def mirrored(x: T.Buffer((8, 32), "float32"), y: T.Buffer((8, 32), "float32")):
    near = T.sblock_alloc_buffer((32,), scope="shared")
    for thread in T.thread_binding(32, thread="threadIdx.x"):
        for step in T.serial(8):
            with T.sblock("copy"):
                k, i = T.axis.remap("SS", [step, thread])
                near[i] = x[k, i]
            with T.sblock("mirror"):
                k, i = T.axis.remap("SS", [step, thread])
                y[k, i] = near[31 - i]


@T.prim_func(s_tir=True)
def products(a: T.Buffer((8, 32), "float32"), b: T.Buffer((8, 32), "float32"), c: T.Buffer((8, 32), "float32")):
    a_near = T.sblock_alloc_buffer((32,), scope="shared")
    b_near = T.sblock_alloc_buffer((32,), scope="shared")
    for thread in T.thread_binding(32, thread="threadIdx.x"):
        for step in T.serial(8):
            with T.sblock("copy_a"):
                k, i = T.axis.remap("SS", [step, thread])
                a_near[i] = a[k, i]
            with T.sblock("copy_b"):
                k, i = T.axis.remap("SS", [step, thread])
                b_near[i] = b[k, i]
            with T.sblock("product"):
                k, i = T.axis.remap("SS", [step, thread])
                c[k, i] = a_near[31 - i] * b_near[31 - i]


@T.prim_func(s_tir=True)
def running_sums(x: T.Buffer((8, 32), "float32"), y: T.Buffer((8, 32), "float32")):
    T.func_attr({"global_symbol": "main"})
    near = T.sblock_alloc_buffer((32,))
    total = T.sblock_alloc_buffer((32,))
    for lane in range(32):
        with T.sblock("zero"):
            i = T.axis.spatial(32, lane)
            total[i] = T.float32(0)
    for step in range(8):
        for lane in range(32):
            with T.sblock("copy"):
                k, i = T.axis.remap("SS", [step, lane])
                near[i] = x[k, i]
        for lane in range(32):
            with T.sblock("add"):
                i = T.axis.spatial(32, lane)
                total[i] = total[i] + near[i]
        for lane in range(32):
            with T.sblock("store"):
                k, i = T.axis.remap("SS", [step, lane])
                y[k, i] = total[i]


@T.prim_func(s_tir=True)
def first_five(x: T.Buffer((8, 32), "float32"), y: T.Buffer((8, 32), "float32")):
    T.func_attr({"global_symbol": "main"})
    near = T.sblock_alloc_buffer((32,))
    for step in T.serial(8):
        with T.sblock("row"):
            k = T.axis.spatial(8, step)
            T.where(step < 5)
            for lane in range(32):
                with T.sblock("copy"):
                    i = T.axis.spatial(32, lane)
                    near[i] = x[k, i]
            for lane in range(32):
                with T.sblock("store"):
                    i = T.axis.spatial(32, lane)
                    y[k, i] = near[i]


@T.prim_func(s_tir=True)
def row_sums(x: T.Buffer((8, 32), "float32"), y: T.Buffer((8,), "float32")):
    near = T.sblock_alloc_buffer((32,), scope="shared")
    for step in T.serial(8):
        for thread in T.thread_binding(32, thread="threadIdx.x"):
            with T.sblock("copy"):
                k, i = T.axis.remap("SS", [step, thread])
                near[i] = x[k, i]
        for thread in T.thread_binding(32, thread="threadIdx.x"):
            with T.sblock("sum"):
                k = T.axis.spatial(8, step)
                i = T.axis.reduce(32, thread)
                with T.init():
                    y[k] = T.float32(0)
                y[k] = y[k] + near[i]


@T.prim_func(s_tir=True)
def addressed(x: T.Buffer((32,), "float32"), y: T.Buffer((32,), "float32")):
    near = T.sblock_alloc_buffer((32,), scope="shared.dyn")
    other = T.sblock_alloc_buffer((32,), scope="shared.dyn")
    for thread in T.thread_binding(32, thread="threadIdx.x"):
        with T.sblock("copy"):
            i = T.axis.spatial(32, thread)
            other[i] = x[i]
        with T.sblock("touch"):
            i = T.axis.spatial(32, thread)
            T.reads(near[i], other[31 - i])
            T.writes(y[i])
            y[i] = other[31 - i] + T.cuda.func_call(
                "touch", T.address_of(near[i]), source_code=TOUCH, return_type="float32"
            )


@T.prim_func(s_tir=True)
def used_before_loaded(x: T.Buffer((8, 32), "float32"), y: T.Buffer((8, 32), "float32")):
    T.func_attr({"global_symbol": "main"})
    near = T.sblock_alloc_buffer((32,), scope="shared")
    for lane in range(32):
        with T.sblock("first"):
            i = T.axis.spatial(32, lane)
            near[i] = T.float32(0)
    for step in range(8):
        for lane in range(32):
            with T.sblock("use"):
                k, i = T.axis.remap("SS", [step, lane])
                y[k, i] = near[i]
        for lane in range(32):
            with T.sblock("load"):
                k, i = T.axis.remap("SS", [step, lane])
                near[i] = x[k, i]


@T.prim_func(s_tir=True)
def loaded_twice(x: T.Buffer((8, 32), "float32"), y: T.Buffer((8, 32), "float32")):
    T.func_attr({"global_symbol": "main"})
    near = T.sblock_alloc_buffer((32,), scope="shared")
    for step in range(8):
        for lane in range(32):
            with T.sblock("load_row"):
                k, i = T.axis.remap("SS", [step, lane])
                near[i] = x[k, i]
        for lane in range(32):
            with T.sblock("use_row"):
                k, i = T.axis.remap("SS", [step, lane])
                y[k, i] = near[i]
        for lane in range(32):
            with T.sblock("load_other"):
                k, i = T.axis.remap("SS", [step, lane])
                near[i] = x[7 - k, i]
        for lane in range(32):
            with T.sblock("add_other"):
                k, i = T.axis.remap("SS", [step, lane])
                y[k, i] = y[k, i] + near[i] * T.float32(1000)


@T.prim_func(s_tir=True)
def read_behind(x: T.Buffer((8, 32), "float32"), y: T.Buffer((9, 32), "float32")):
    T.func_attr({"global_symbol": "main"})
    near = T.sblock_alloc_buffer((32,), scope="shared")
    for step in range(8):
        for lane in range(32):
            with T.sblock("load"):
                k, i = T.axis.remap("SS", [step, lane])
                near[i] = x[k, i]
        for lane in range(32):
            with T.sblock("use"):
                k, i = T.axis.remap("SS", [step, lane])
                y[k, i] = near[i]
    for lane in range(32):
        with T.sblock("last"):
            i = T.axis.spatial(32, lane)
            y[8, i] = near[i]


@T.prim_func(s_tir=True)
def two_loops(x: T.Buffer((8, 32), "float32"), y: T.Buffer((16, 32), "float32")):
    T.func_attr({"global_symbol": "main"})
    near = T.sblock_alloc_buffer((32,), scope="shared")
    for step in range(8):
        for lane in range(32):
            with T.sblock("load"):
                k, i = T.axis.remap("SS", [step, lane])
                near[i] = x[k, i]
        for lane in range(32):
            with T.sblock("use"):
                k, i = T.axis.remap("SS", [step, lane])
                y[k, i] = near[i]
    for step_again in range(8):
        for lane in range(32):
            with T.sblock("load_again"):
                k, i = T.axis.remap("SS", [step_again, lane])
                near[i] = x[7 - k, i]
        for lane in range(32):
            with T.sblock("use_again"):
                k, i = T.axis.remap("SS", [step_again, lane])
                y[k + 8, i] = near[i]


def right_rows(mod: tvm.IRModule, wanted: np.ndarray) -> int:
    """How many rows are right."""
    return int((on_cpu(mod, X, shape=wanted.shape) == wanted).all(axis=1).sum())


# Which values are there


def test_negative_stages_are_another_program() -> None:
    wanted = X.cumsum(axis=0)
    assert right_rows(pipelined(running_sums, [0, 1, 1], [0, 1, 2]), wanted) == 8
    shifted = pipelined(running_sums, [-1, 0, 0], [0, 1, 2])
    still(right_rows(shifted, wanted) == 0, CHECKS)


def test_a_buffer_from_before_the_loop_is_not_kept_for_later_stages() -> None:
    late_store = pipelined(running_sums, [0, 0, 1], [0, 1, 2])
    still(right_rows(late_store, X.cumsum(axis=0)) == 1, CHECKS)


def test_a_tile_that_is_used_before_it_is_loaded_is_loaded_first() -> None:
    wanted = np.concatenate([np.zeros_like(X[:1]), X[:-1]])
    assert right_rows(Schedule(used_before_loaded).mod, wanted) == 8
    loaded_first = pipelined(used_before_loaded, [1, 0], [0, 1])
    still(right_rows(loaded_first, wanted) == 0, CHECKS)


def test_a_buffer_that_is_loaded_twice_an_iteration_holds_the_second_tile() -> None:
    wanted = X + X[::-1] * 1000
    assert right_rows(Schedule(loaded_twice).mod, wanted) == 8
    second_tile = pipelined(loaded_twice, [0, 1, 0, 1], [0, 1, 2, 3])
    still(right_rows(second_tile, wanted) == 0, CHECKS)


def test_a_buffer_that_is_read_behind_the_loop_has_no_ring() -> None:
    wanted = np.concatenate([X, X[-1:]])
    assert right_rows(Schedule(read_behind).mod, wanted) == 9
    no_ring = pipelined(read_behind, [0, 1], [0, 1])
    still(right_rows(no_ring, wanted) == 2, CHECKS)


def test_a_buffer_of_two_loops_has_no_ring_in_either() -> None:
    wanted = np.concatenate([X, X[::-1]])
    assert right_rows(Schedule(two_loops).mod, wanted) == 16
    no_rings = pipelined(two_loops, [0, 1], [0, 1])
    still(right_rows(no_rings, wanted) == 2, CHECKS)


def test_what_other_threads_wrote_has_one_stage_of_two() -> None:
    two_stages = kernel(pipelined(mirrored, [0, 1], [0, 1]))
    assert elements(kernel(pipelined(mirrored, [0, 2], [0, 1])), "near") == 3 * 32
    still(elements(two_stages, "near") == 32, f"{CHECKS} (buffer_stages)")


def test_a_condition_around_the_body_is_left_out() -> None:
    wanted = np.where(np.arange(8)[:, None] < 5, X, np.nan)
    plain = on_cpu(Schedule(first_five).mod, X, shape=X.shape)
    assert np.array_equal(plain, wanted, equal_nan=True)
    got = on_cpu(pipelined(first_five, [0, 1], [0, 1]), X, shape=X.shape)
    still(np.array_equal(got, X), CHECKS)


def test_a_reduction_across_threads_has_no_pipeline() -> None:
    assert "__shfl_down_sync" in kernel(Schedule(row_sums).mod)
    said = failure(lambda: kernel(pipelined(row_sums, [0, 1], [0, 1])))
    still("(red_buf0,) are used, but are not passed in" in said, "schedules/recipes/bandwidth.py")


# Waits and barriers


def until_used(text: str) -> tuple[int, list[str]]:
    """How many groups of copies are committed before the first product, and what is waited for."""
    before = events(text[: text.index("c_ptr[")])
    return before.count("commit_group("), [event for event in before if event.startswith("wait")]


def test_computing_before_two_copies_waits_for_too_few() -> None:
    """Two groups are on their way, of which the older one must be there."""
    text = kernel(pipelined(products, [0, 0, 2], [1, 2, 0], asynchronous=[0]))
    still(until_used(text) == (2, ["wait_group_2"]), CHECKS)


def test_computing_between_two_copies_waits_for_nothing_at_first() -> None:
    text = kernel(pipelined(products, [0, 0, 3], [0, 2, 1], asynchronous=[0]))
    still(until_used(text) == (4, ["wait_group_5"]), CHECKS)


def test_an_asynchronous_stage_that_nobody_has_is_ignored() -> None:
    text = kernel(pipelined(products, [0, 0, 2], [0, 1, 2], asynchronous=[7]))
    still(set(events(text)) == {"__syncthreads"}, CHECKS)


def test_parts_of_a_partitioned_loop_are_not_waited_for() -> None:
    @T.prim_func(s_tir=True)
    def vectors(x: T.Buffer((8, 32, 4), "float32"), y: T.Buffer((8, 32, 4), "float32")):
        near = T.sblock_alloc_buffer((32, 4), scope="shared")
        for thread in T.thread_binding(32, thread="threadIdx.x"):
            for step in T.serial(8):
                for lane in T.vectorized(4):
                    with T.sblock("copy"):
                        k, i, j = T.axis.remap("SSS", [step, thread, lane])
                        near[i, j] = x[k, i, j]
                for lane in T.serial(4):
                    with T.sblock("store"):
                        k, i, j = T.axis.remap("SSS", [step, thread, lane])
                        y[k, i, j] = near[31 - i, j]

    sch = Schedule(vectors)
    sch.loop_partition(sch.get_loops(sch.get_sblock("store"))[-1], [2, None])
    step = sch.get_loops(sch.get_sblock("copy"))[1]
    for name, values in (("stage", [0, 2, 2]), ("order", [0, 1, 2]), ("async_stages", [0])):
        sch.annotate(step, f"software_pipeline_{name}", values)
    text = kernel(sch.mod)
    assert "wait_group_2" in events(kernel(pipelined(vectors, [0, 2], [0, 1], asynchronous=[0])))
    waits = [event for event in events(text) if event.startswith("wait")]
    still((elements(text, "near"), waits) == (32 * 4, []), CHECKS)


def test_barriers_do_not_know_stages() -> None:
    """Reads of one stage and copies into another get a barrier between them, at every step."""
    text = kernel(pipelined(mirrored, [0, 2], [0, 1]))
    loop = text[text.index("for (int step") : text.index("\n  }")]
    still(loop.count("__syncthreads") == 2, "schedules/pipeline/one_barrier.py")


@pytest.fixture
def lowered() -> tvm.IRModule:
    """A pipeline with asynchronous copies, just before TVM places barriers."""
    s, x = s_tir.transform, tirx.transform
    passes = [
        *(s.LowerInitBlock(), s.PlanAndUpdateBufferAllocationLocation(), s.ConvertBlocksToOpaque()),
        *(s.LiftThreadBinding(), s.CompactBufferAllocation(), s.UnifyThreadBinding(), s.InjectSoftwarePipeline()),
        *(s.LowerOpaqueBlock(), x.FlattenBuffer(), x.VectorizeLoop(True), x.StorageRewrite(), s.LowerAsyncDMA()),
    ]
    module = pipelined(mirrored, [0, 2], [0, 1], asynchronous=[0])
    with tvm.transform.PassContext(config=ASYNCHRONOUS):
        return tvm.transform.Sequential([x.BindTarget(HOPPER.with_host("llvm")), *passes])(module)


def barriers(mod: tvm.IRModule) -> int:
    """How many barriers a module has."""
    return str(mod.script()).count("tvm_storage_sync")


def test_barriers_are_missing_after_cp_async_was_written_out(lowered: tvm.IRModule) -> None:
    sync, copies = s_tir.transform.ThreadSync("shared"), s_tir.transform.InjectPTXAsyncCopy()
    lost = barriers(copies(sync(lowered))) - barriers(sync(copies(lowered)))
    still(lost == 1, "schedules/pipeline/lowering.py (lower_ahead)")


def test_barriers_double_where_they_are_placed_twice(lowered: tvm.IRModule) -> None:
    sync = s_tir.transform.ThreadSync("shared")
    still(barriers(sync(sync(lowered))) > barriers(sync(lowered)), "schedules/pipeline/lowering.py (lower_ahead)")


def test_shared_memory_that_only_addresses_name_has_no_place() -> None:
    said = failure(lambda: kernel(addressed))
    still("buffer_byte_offsets" in said, "schedules/pipeline/box_rings.py")


def test_statements_of_a_block_are_counted_apart() -> None:
    lists = {"software_pipeline_stage": [0, 1], "software_pipeline_order": [0, 1]}

    @T.prim_func(s_tir=True)
    def twice(x: T.Buffer((8, 32), "float32"), y: T.Buffer((8, 32), "float32")):
        near = T.sblock_alloc_buffer((32,), scope="shared")
        for thread in T.thread_binding(32, thread="threadIdx.x"):
            for step in T.serial(8, annotations=lists):
                with T.sblock("copy"):
                    T.reads(x[step, thread])
                    T.writes(near[thread])
                    near[thread] = x[step, thread]
                with T.sblock("store"):
                    T.reads(near[31 - thread])
                    T.writes(y[step, 0:32])
                    y[step, thread] = near[31 - thread]
                    y[step, thread] = near[31 - thread]

    said = failure(lambda: kernel(twice))
    still("with different size" in said, "schedules/pipeline/box_rings.py")
