"""CUDA that TVM writes and that CUDA does not take, or that does something else (docs/tvm.md)."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from unittest import mock

from tvm import ir, te, tirx
from tvm.s_tir import Schedule
from tvm.script import tirx as T

from support.stock_tvm import failure, kernel, still

NARROW = "relax/rules/normal_form.py (product_of)"
WHOLE = "relax/rules/computations.py (computations_of)"
VECTORS = "schedules/loops/vectorization.py (widest_vector)"


def by_vectors(dtype: str, lanes: int, of: Callable[[ir.Expr], ir.Expr]) -> str:
    """The CUDA of a function of 32 elements, so many a thread."""
    x = te.placeholder((32,), dtype, name="x")
    sch = Schedule(te.create_prim_func([x, te.compute((32,), lambda i: of(x[i]), name="y")]))
    threads, vector = sch.split(sch.get_loops(sch.get_sblock("y"))[0], [None, lanes])
    sch.bind(threads, "threadIdx.x")
    sch.vectorize(vector)
    return kernel(sch.mod)


def test_eight_equal_bytes_are_an_int2_of_eight_numbers() -> None:
    text = by_vectors("int8", 8, lambda _: tirx.const(3, "int8"))
    still(re.search(r"make_int2\((\(signed char\)3(, )?){8}\)", text) is not None, VECTORS)


def test_four_bytes_of_a_row_must_be_a_constant() -> None:
    """What all lanes have in common is one value, which TVM packs as the constant that it takes it for."""
    x, row = te.placeholder((8, 4), "int8", name="x"), te.placeholder((8,), "int8", name="row")
    sch = Schedule(te.create_prim_func([x, row, te.compute((8, 4), lambda i, j: x[i, j] & row[i], name="y")]))
    threads, vector = sch.get_loops(sch.get_sblock("y"))
    sch.bind(threads, "threadIdx.x")
    sch.vectorize(vector)
    still("p.has_value()" in failure(lambda: kernel(sch.mod)), VECTORS)


def test_numbers_of_four_bits_are_read_eight_at_a_time() -> None:
    text = by_vectors("int4", 1, lambda value: value.astype("int32"))
    still(re.search(r"= \(\(int\)\*\(\(\(int\*\)x_ptr\) \+ .+ / 8\)\);", text) is not None, WHOLE)


def test_a_shared_part_of_indices_takes_their_alignment_away() -> None:
    m = tirx.Var("m", "int32")
    x = te.placeholder((m, 64), "float16", name="x")
    sch = Schedule(te.create_prim_func([x, te.compute((2, 64), lambda i, j: x[m - 1 - i, j], name="y")]))
    rows, columns = sch.get_loops(sch.get_sblock("y"))
    thread, vector = sch.split(columns, [None, 8])
    sch.reorder(thread, rows, vector)
    sch.bind(thread, "threadIdx.x")
    sch.vectorize(vector)
    text = kernel(sch.mod)
    still(re.search(r"make_uint4\((x_ptr\[[^\]]*\],?){8}\)", text) is not None, "schedules/recipes/streamed_weights.py")


def test_a_choice_is_made_element_by_element() -> None:
    text = by_vectors("float32", 2, lambda value: tirx.if_then_else(value < 0, tirx.const(0, "float32"), value))
    still("condval" in text and "float2" not in text, "relax/rules/normal_form.py")
    chosen = by_vectors("float32", 2, lambda value: tirx.Select(value < 0, tirx.const(0, "float32"), value))
    assert "*(float2*)(y_ptr" in chosen


def test_divisions_by_numbers_of_tiles_mind_signs() -> None:
    m = tirx.Var("m", "int32")
    tiles = (m + 31) // 32
    x = te.placeholder((m, m), "float32", name="x")
    sch = Schedule(te.create_prim_func([x, te.compute((tiles * tiles,), lambda i: x[i // tiles, i % tiles], name="y")]))
    sch.bind(sch.get_loops(sch.get_sblock("y"))[0], "blockIdx.x")
    still("rdiv - 1" in kernel(sch.mod), "schedules/loops/quotients.py (divide_without_signs)")


def test_vectors_of_bool_are_twice_as_long() -> None:
    """Four of one byte each are copied as four of two bytes: the last thread writes past the end."""
    text = by_vectors("bool", 4, lambda value: value)
    still("*(ushort4*)(y_ptr" in text, VECTORS)


def test_eight_of_fp8_are_converted_by_a_cast_of_vectors() -> None:
    text = by_vectors("float8_e4m3fn", 8, lambda value: value.astype("float16").astype("float8_e4m3fn"))
    still("(uint2)((uint4)(*(uint2*)(x_ptr" in text, VECTORS)


def test_bytes_do_not_wrap_inside_of_an_expression() -> None:
    """C computes in int: the larger of 0 and 100 + 100, which is -56 in int8, is 200, and is stored as -56."""
    text = by_vectors("int8", 1, lambda value: tirx.max(value + value, tirx.const(0, "int8")))
    still(re.search(r"max\(\(x_ptr\[(.+)\] \+ x_ptr\[\1\]\), \(signed char\)0\)", text) is not None, NARROW)


def test_one_shared_buffer_of_two_loses_its_alignment() -> None:
    @T.prim_func(s_tir=True)
    def twice(x: T.Buffer((32,), "float32"), y: T.Buffer((32,), "float32")):
        near = T.sblock_alloc_buffer((32,), scope="shared.dyn", align=1024)
        far = T.sblock_alloc_buffer((32,), scope="shared.dyn")
        for thread in T.thread_binding(32, thread="threadIdx.x"):
            with T.sblock("near"):
                i = T.axis.spatial(32, thread)
                near[i] = x[i]
            with T.sblock("far"):
                i = T.axis.spatial(32, thread)
                far[i] = near[31 - i]
            with T.sblock("y"):
                i = T.axis.spatial(32, thread)
                y[i] = far[31 - i] + near[i]

    (alignment,) = re.findall(r"extern __shared__ __align__\((\d+)\)", kernel(twice))
    still(alignment == "64", "schedules/tensor_cores/warpgroup.py (SCOPE: tiles alone, all dynamic)")


# Explicit kernels


def test_an_attribute_in_a_function_of_python_is_lost() -> None:
    def two_blocks() -> None:
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": 2})

    @T.prim_func
    def by_function(x: T.Buffer((32,), "float32")):
        T.device_entry()
        two_blocks()
        T.cta_id([1])
        x[T.thread_id([32])] = T.float32(1)

    @T.prim_func
    def itself(x: T.Buffer((32,), "float32")):
        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": 2})
        T.cta_id([1])
        x[T.thread_id([32])] = T.float32(1)

    assert "__launch_bounds__(32, 2)" in kernel(itself, "tirx")
    still("__launch_bounds__(32)" in kernel(by_function, "tirx"), "kernels/persistent.py, kernels/warp_specialized.py")


def test_a_noop_barrier_has_no_text() -> None:
    @T.prim_func
    def fenced(x: T.Buffer((32,), "float32")):
        T.device_entry()
        T.cta_id([1])
        sums = T.alloc_buffer((1,), "float32", scope="local")
        sums[0] = T.float32(1)
        T.evaluate(T.cuda.wgmma.noop_barrier(sums[0]))
        x[T.thread_id([32])] = sums[0]

    still("no attribute 'dtype'" in failure(lambda: kernel(fenced, "tirx")), "kernels/wgmma.py")


def test_each_inlined_call_reads_every_frame_of_the_stack() -> None:
    @T.inline
    def one(x):
        x[T.thread_id([32])] = T.float32(1)

    with mock.patch.object(inspect, "getouterframes", wraps=inspect.getouterframes) as read:

        @T.prim_func
        def ones(x: T.Buffer((32,), "float32")):
            T.device_entry()
            T.cta_id([1])
            one(x)

    still(read.called, "kernels/short_stack.py")


def test_what_is_no_cuda_is_compiled_with_success() -> None:
    @T.prim_func
    def no_cuda(x: T.Buffer((32,), "float32")):
        T.device_entry()
        T.cta_id([1])
        T.evaluate(T.cuda.func_call("nothing", source_code="this is no CUDA\n"))
        x[T.thread_id([32])] = T.float32(1)

    still("nothing()" in kernel(no_cuda, "tirx"), "kernels/codegen/toolchain.py (text and compiler are ours)")
