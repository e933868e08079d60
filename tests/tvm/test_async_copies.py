"""Copies that TVM lowers to a wrong cp.async, or to none (docs/tvm.md)."""

from __future__ import annotations

import numpy as np
import tvm
from tvm.script import tirx as T

from support.stock_tvm import ASYNCHRONOUS, failure, kernel, on_cpu, pipelined, still

COPIES = "schedules/pipeline/async_copies.py"


def test_strided_vectors_are_copied_as_consecutive_bytes() -> None:
    @T.prim_func(s_tir=True)
    def strided(x: T.Buffer((8, 128), "float32"), y: T.Buffer((8, 128), "float32")):
        near = T.sblock_alloc_buffer((128,), scope="shared")
        for thread in T.thread_binding(32, thread="threadIdx.x"):
            for step in T.serial(8):
                for lane in T.vectorized(4):
                    with T.sblock("copy"):
                        k = T.axis.spatial(8, step)
                        i = T.axis.spatial(128, lane * 32 + thread)
                        near[i] = x[k, i]
                for lane in T.serial(4):
                    with T.sblock("store"):
                        k = T.axis.spatial(8, step)
                        i = T.axis.spatial(128, lane * 32 + thread)
                        y[k, i] = near[i]

    first_copy = "cp_async_legacy_cg_16_4_4(near_ptr, ((int)threadIdx.x), x_ptr, ((int)threadIdx.x));"
    still(first_copy in kernel(pipelined(strided, [0, 2], [0, 1], asynchronous=[0])), COPIES)


def test_indices_of_gathered_rows_are_read_past_their_end() -> None:
    @T.prim_func(s_tir=True)
    def gathered(
        table: T.Buffer((40, 32), "float32"), picked: T.Buffer((20,), "int32"), y: T.Buffer((24, 32), "float32")
    ):
        near = T.sblock_alloc_buffer((32,), scope="shared")
        for thread in T.thread_binding(32, thread="threadIdx.x"):
            for step in T.serial(24):
                with T.sblock("copy"):
                    k, i = T.axis.remap("SS", [step, thread])
                    near[i] = T.if_then_else(k < 20, table[picked[k], i], T.float32(0))
                with T.sblock("store"):
                    k, i = T.axis.remap("SS", [step, thread])
                    y[k, i] = near[i]

    text = kernel(pipelined(gathered, [0, 2], [0, 1], asynchronous=[0]))
    guarded = [line for line in text.splitlines() if "cp_async_legacy_pred" in line]
    still(any("picked_ptr[(step + 2)]" in line and "(step < 18)" in line for line in guarded), COPIES)


def test_neighbours_copied_one_by_one_are_no_transfer() -> None:
    @T.prim_func(s_tir=True)
    def neighbours(x: T.Buffer((8, 96), "float32"), y: T.Buffer((8, 96), "float32")):
        near = T.sblock_alloc_buffer((96,), scope="shared")
        for thread in T.thread_binding(32, thread="threadIdx.x"):
            for step in T.serial(8):
                for lane in T.serial(3):
                    with T.sblock("copy"):
                        k = T.axis.spatial(8, step)
                        i = T.axis.spatial(96, thread * 3 + lane)
                        near[i] = x[k, i]
                with T.sblock("store"):
                    k, i = T.axis.remap("SS", [step, thread])
                    y[k, i] = near[i]

    said = failure(lambda: kernel(pipelined(neighbours, [0, 2], [0, 1], asynchronous=[0])))
    still("Unresolved call" in said and "dma_start_group" in said, COPIES)


def test_copies_that_no_thread_runs_call_what_is_not_there() -> None:
    @T.prim_func(s_tir=True)
    def copied(x: T.Buffer((8, 32), "float32"), y: T.Buffer((8, 32), "float32")):
        T.func_attr({"global_symbol": "main"})
        near = T.sblock_alloc_buffer((32,), scope="shared")
        for step in T.serial(8):
            for lane in range(32):
                with T.sblock("copy"):
                    k, i = T.axis.remap("SS", [step, lane])
                    near[i] = x[k, i]
            for lane in range(32):
                with T.sblock("store"):
                    k, i = T.axis.remap("SS", [step, lane])
                    y[k, i] = near[i]

    mod, x = pipelined(copied, [0, 2], [0, 1], asynchronous=[0]), np.ones((8, 32), "float32")
    with tvm.transform.PassContext(config=ASYNCHRONOUS):
        said = failure(lambda: on_cpu(mod, x, shape=x.shape))
    still("Cannot find function device_api.cpu.dma_start_group" in said, COPIES)


def test_reads_as_wide_as_the_copies_fail() -> None:
    @T.prim_func(s_tir=True)
    def by_vectors(x: T.Buffer((8, 32, 4), "float32"), y: T.Buffer((8, 32, 4), "float32")):
        near = T.sblock_alloc_buffer((32, 4), scope="shared")
        for thread in T.thread_binding(32, thread="threadIdx.x"):
            for step in T.serial(8):
                for lane in T.vectorized(4):
                    with T.sblock("copy"):
                        k, i, j = T.axis.remap("SSS", [step, thread, lane])
                        near[i, j] = x[k, i, j]
                for lane in T.vectorized(4):
                    with T.sblock("store"):
                        k, i, j = T.axis.remap("SSS", [step, thread, lane])
                        y[k, i, j] = near[i, j]

    assert "float4" in kernel(pipelined(by_vectors, [0, 2], [0, 1]))
    said = failure(lambda: kernel(pipelined(by_vectors, [0, 2], [0, 1], asynchronous=[0])))
    still("load->indices[0].ty().lanes() == store->indices[0]" in said, "schedules/recipes/bandwidth.py")
