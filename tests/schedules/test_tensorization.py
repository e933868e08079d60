"""Tensor cores through schedules: fragment layouts, generated code, and the schedule before its instructions."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import te
from tvm.s_tir import Schedule

from support.cases import STEPS, config, make_case
from support.tensor_cores import TILE, stack_bytes, tensorize_pipelined
from tensorir_ladder.harness.build import Kernel, compiled, executable, lower, lower_schedule, main_loop
from tensorir_ladder.harness.execution import GpuBackend, compile_serial, gpu_arch, numpy_dtype
from tensorir_ladder.harness.machines import machine_for
from tensorir_ladder.harness.verify import verify
from tensorir_ladder.kernels.codegen.toolchain import Compiler, require_compiler
from tensorir_ladder.schedules.errors import IllegalPipeline, IllegalSchedule, IllegalTile
from tensorir_ladder.schedules.isa import MMA, TF32, swizzled_piece
from tensorir_ladder.schedules.loops import flatten_contraction, raster_blocks
from tensorir_ladder.schedules.memory import swizzle_rows
from tensorir_ladder.schedules.pipeline import check_pipeline, pipeline_loop
from tensorir_ladder.schedules.tensor_cores import (
    FRAGMENT,
    stage_for_warpgroups,
    tensorize_contraction,
    use_instruction,
)
from tensorir_ladder.schedules.tiles import TensorCoreTile, ThreadTile, WarpgroupTile
from tensorir_ladder.schedules.workloads import Matmul, batched_matmul, conv2d_nhwc, gemm, matmul_bias_relu
from tensorir_ladder.steps import step8_tensor_cores as step8
from tensorir_ladder.steps import step9_async_ring as step9

LARGE = TensorCoreTile(block=(128, 256, 32), warp=(64, 64))
MACHINE = machine_for("sm_90a")
SHAPES = [
    ((128, 64, 128), "nt"),
    ((100, 52, 100), "nn"),
    ((65, 41, 51), "nt"),
    ((64, 72, 16), "nn"),
    ((1, 1, 1), "nn"),
    ((64, 64, 1), "nt"),
]


@functools.cache
def build(step: int, shape: tuple[int, int, int], variant: str | None = None, **options) -> Kernel:
    """A tensor core kernel, lowered."""
    options = {"dtype": "float16", "tile": TILE, **options}
    return lower(make_case(step, shape, variant, **options))


def reference(a: np.ndarray, b: np.ndarray, layout: str) -> np.ndarray:
    """The product in float64."""
    return a.astype(np.float64) @ (b if layout == "nn" else b.T).astype(np.float64)


def normal(seed: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Standard normal values."""
    return np.random.default_rng(seed).standard_normal(shape).astype(numpy_dtype(dtype))


def run_serial(sch: Schedule, *inputs: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Run a schedule on the CPU into ``out``."""
    tensors = [tvm.runtime.tensor(array) for array in (*inputs, out)]
    compile_serial(sch.mod)["main"](*tensors)
    return tensors[-1].numpy()


# The PTX ISA's tables for mma.m16n8k16 with 16-bit operands: (row, column) of register i in a lane.
def ptx_a(lane: int, i: int) -> tuple[int, int]:
    group, quad = lane >> 2, lane % 4
    row = group if 0 <= i < 2 or 4 <= i < 6 else group + 8
    return row, quad * 2 + (i & 1) + (8 if i >= 4 else 0)


def ptx_b(lane: int, i: int) -> tuple[int, int]:
    group, quad = lane >> 2, lane % 4
    return quad * 2 + (i & 1) + (8 if i >= 2 else 0), group


def ptx_c(lane: int, i: int) -> tuple[int, int]:
    group, quad = lane >> 2, lane % 4
    return group + (8 if i >= 2 else 0), quad * 2 + (i & 1)


@pytest.mark.parametrize("dtype", MMA)
def test_fragments_are_where_the_ptx_isa_has_them(dtype: str) -> None:
    instruction = MMA[dtype]
    for lane in range(32):
        for i in range(8):
            assert instruction.place_in_a(*ptx_a(lane, i)) == (lane, i)
            half, register = divmod(i, 4)  # two instructions side by side, 8 columns each
            k, column = ptx_b(lane, register)
            assert instruction.place_in_b(column + 8 * half, k) == (lane, i)
            row, column = ptx_c(lane, register)
            assert instruction.place_in_c(row, column + 8 * half) == (lane, i)


def test_tf32_fragments_are_where_the_ptx_isa_has_them() -> None:
    for lane in range(32):
        group, quad = lane >> 2, lane % 4
        for i in range(4):
            row, k = group + 8 * (i % 2), quad + 4 * (i // 2)  # the table of A for m16n8k8
            assert TF32.place_in_a(row, k) == (lane, i)
            half, register = divmod(i, 2)
            assert TF32.place_in_b(group + 8 * half, quad + 4 * register) == (lane, i)


@pytest.mark.parametrize("by_k", [True, False])
@pytest.mark.parametrize("operand", [0, 1])
def test_ldmatrix_brings_each_element_to_its_place(operand: int, by_k: bool) -> None:
    """A model of ldmatrix.x4: lane l gets elements 2·(l % 4), + 1 of row l // 4 of each piece, or of its transpose."""
    instruction = MMA["float16"]
    place = instruction.place_in_b if operand else instruction.place_in_a
    addresses = [instruction.row_address(lane, operand, by_k) for lane in range(32)]
    for piece in range(4):
        rows = [[(row, column + e) for e in range(8)] for row, column in addresses[8 * piece : 8 * piece + 8]]
        for lane in range(32):
            for e in range(2):
                at = lane % 4 * 2 + e
                row, column = rows[lane // 4][at] if by_k else rows[at][lane // 4]
                assert place(*((row, column) if by_k else (column, row))) == (lane, 2 * piece + e)


@pytest.mark.parametrize("pieces", [2, 4, 8, 12, 16, 32])
def test_a_swizzled_column_touches_every_bank_once(pieces: int) -> None:
    for row in range(32):
        assert sorted(swizzled_piece(row, piece, pieces) for piece in range(pieces)) == list(range(pieces))
    for first in range(0, 32, 8):
        for piece in range(pieces):
            banks = {(row * pieces + swizzled_piece(row, piece, pieces)) % 8 for row in range(first, first + 8)}
            assert len(banks) == 8


@pytest.mark.parametrize(
    ("variant", "stages"), [("fragments", 2), ("fragments", 3), ("fragments", 6), ("shared", 3), ("shared", 4)]
)
def test_a_k_tile_of_the_ring_costs_one_barrier(variant: str, stages: int) -> None:
    loop = main_loop(build(9, (128, 128, 1024), variant, stages=stages).body)
    steps, fragments = TILE.block_k // 16, 2 * 2
    assert loop.count("__syncthreads()") == stages
    assert loop.count("commit_group();") == stages
    assert loop.count("tensor_core_load_hidden") == stages * steps * (2 + 2)
    assert loop.count("tensor_core_m16n8k16_f16(") == stages * steps * fragments * 2
    assert re.findall(r"wait_group_(\d)\(", loop) == [str(stages - 2)] * stages
    assert "%" not in loop  # stages are constants


@pytest.mark.parametrize(
    ("tile", "layout"),
    [
        ("128x192x32/64x96", "nn"),
        ("64x96x32/32x48", "nt"),
        ("64x96x32/32x48", "nn"),
        ("128x160x32/64x80", "nt"),
        ("64x64x16/32x32", "nn"),
    ],
)
def test_every_copy_is_of_sixteen_bytes(tile: str, layout: str) -> None:
    """Also where a tile's rows do not divide among the threads: a swizzled vector stays a vector."""
    text = build(9, (384, 480, 256), "shared", tile=TensorCoreTile.parse(tile), layout=layout).body
    assert set(re.findall(r"cp_async_legacy(?:_pred)?_(\w\w_\d+)_", text)) == {"cg_16"}
    assert "uint4*" not in text


def test_without_a_pipeline_threads_meet_before_and_after_each_k_tile() -> None:
    loop = main_loop(build(8, (128, 128, 256)).body)
    assert loop.count("__syncthreads()") == 2
    assert loop.count("tensor_core_load") == 2 * (2 + 2)
    assert "cp_async" not in loop


@pytest.mark.parametrize("layout", ["nn", "nt"])
def test_only_the_layout_across_k_is_transposed(layout: str) -> None:
    text = build(9, (128, 128, 128), layout=layout).body
    assert ("load_hidden_transposed(" in text) == (layout == "nn")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_both_halves_are_the_same_code(dtype: str) -> None:
    text = build(9, (128, 128, 128), dtype=dtype).cuda
    short = {"float16": "f16", "bfloat16": "bf16"}[dtype]
    assert f"mma.sync.aligned.m16n8k16.row.col.f32.{short}.{short}.f32" in text
    assert "ldmatrix.sync.aligned.m8n8.x4" in text


def test_a_thread_keeps_the_registers_of_its_lane_only() -> None:
    text = build(9, (128, 128, 128)).body
    assert f"float matmul_local_fragment_ptr[{32 * 32 // 32}]" in text
    assert build(9, (128, 128, 128)).local_bytes == 4 * 32 + 2 * 2 * (2 * 2 * 8)  # two sets of A and B


@pytest.mark.sampled(3)
@pytest.mark.compiler
@pytest.mark.parametrize(
    ("step", "tile", "layout", "arch"),
    [
        (8, STEPS[8].tiles.default.tile, "nt", "sm_90a"),
        (9, LARGE, "nt", "sm_90a"),
        (9, LARGE, "nn", "sm_90a"),
        (9, TensorCoreTile(block=(128, 128, 64), warp=(64, 64)), "nn", "sm_80"),
        (9, TILE, "nt", "sm_120"),
    ],
    ids=str,
)
def test_fragments_stay_in_registers(
    step: int, tile: TensorCoreTile, layout: str, arch: str, compiler: Compiler
) -> None:
    kernel = compiled(build(step, (1024, 1024, 1024), tile=tile, layout=layout, arch=arch), compiler)
    assert kernel.cubin.spill_bytes == 0
    assert stack_bytes(kernel.cubin.data) in (0, None)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("step", "variant", "dtype", "shape", "layout"),
    [
        (step8, "default", "float16", (100, 52, 100), "nn"),
        (step8, "default", "float16", (64, 64, 1), "nt"),
        (step9, "fragments", "bfloat16", (128, 64, 128), "nt"),
        (step9, "fragments", "bfloat16", (64, 72, 16), "nn"),
        (step9, "fragments", "bfloat16", (1, 1, 1), "nn"),
        (step9, "tf32", "float32", (65, 41, 51), "nt"),
        (step9, "tf32", "float32", (100, 52, 100), "nn"),
    ],
)
def test_the_schedule_before_its_instructions_is_right(
    step, variant: str, dtype: str, shape: tuple[int, int, int], layout: str
) -> None:
    problem = Matmul(*shape, dtype, layout, "float32")
    sch = step.schedule_for_cpu(problem, config(variant, TILE, 3))
    a, b = normal(0, (problem.m, problem.k), dtype), normal(1, problem.b_shape, dtype)
    out = run_serial(sch, a, b, out=np.full((problem.m, problem.n), np.nan, np.float32))
    np.testing.assert_allclose(out, reference(a, b, layout), atol=1e-4)


@pytest.mark.parametrize("stages", [1, 2])
def test_epilogues_are_fused_and_batches_join_the_grid(stages: int) -> None:
    problem = Matmul(40, 24, 72, "float16", "nn", "float32")
    sch = Schedule(matmul_bias_relu(problem))
    tensorize_pipelined(sch, stages, instruct=False)
    a, b, bias = normal(0, (40, 72), "float16"), normal(1, (72, 24), "float16"), normal(2, (24,), "float32")
    out = run_serial(sch, a, b, bias, out=np.full((40, 24), np.nan, np.float32))
    np.testing.assert_allclose(out, np.maximum(reference(a, b, "nn") + bias, 0), atol=1e-4)

    sch = Schedule(gemm(problem, alpha=0.5, beta=-2.0))
    tensorize_pipelined(sch, stages, instruct=False)
    c = normal(3, (40, 24), "float32")
    out = run_serial(sch, a, b, c, out=np.full((40, 24), np.nan, np.float32))
    np.testing.assert_allclose(out, 0.5 * reference(a, b, "nn") - 2 * c, atol=1e-4)

    sch = Schedule(batched_matmul(2, Matmul(40, 24, 72, "bfloat16", "nt", "float32")))
    tensorize_pipelined(sch, stages, instruct=False)
    a, b = normal(0, (2, 40, 72), "bfloat16"), normal(1, (2, 24, 72), "bfloat16")
    out = run_serial(sch, a, b, out=np.full((2, 40, 24), np.nan, np.float32))
    np.testing.assert_allclose(out, np.einsum("bik,bjk->bij", a.astype(float), b.astype(float)), atol=1e-4)


@pytest.mark.compiler
def test_a_convolution_is_an_implicit_product(compiler: Compiler) -> None:
    sch = Schedule(conv2d_nhwc(1, 9, 7, 16, 24, dtype="float16"))
    flatten_contraction(sch, sch.get_sblock("conv2d"))
    contraction = tensorize_pipelined(sch, 3, "conv2d", instruct=False)
    data, weight = normal(0, (1, 9, 7, 16), "float16"), normal(1, (3, 3, 16, 24), "float16")
    out = run_serial(sch, data, weight, out=np.full((1, 9, 7, 24), np.nan, np.float16))
    around = np.pad(data.astype(float), ((0, 0), (1, 1), (1, 1), (0, 0)))
    windows = [(around[:, y : y + 9, x : x + 7], weight[y, x].astype(float)) for y in range(3) for x in range(3)]
    np.testing.assert_allclose(out, sum(window @ part for window, part in windows), atol=0.03)
    use_instruction(sch, contraction.loops, contraction.loads, contraction.instruction)
    assert compiled(lower_schedule(sch, MACHINE, "conv2d"), compiler).cubin.spill_bytes == 0


@pytest.mark.compiler
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_fused_and_ragged_kernels_compile(dtype: str, compiler: Compiler) -> None:
    for function in (
        matmul_bias_relu(Matmul(100, 51, 77, dtype, "nn")),
        matmul_bias_relu(Matmul(100, 52, 76, dtype, "nt", "float32")),
        batched_matmul(3, Matmul(100, 60, 90, dtype, "nn")),
    ):
        sch = Schedule(function)
        tensorize_pipelined(sch, 3)
        assert compiled(lower_schedule(sch, MACHINE, "fused"), compiler).cubin.spill_bytes == 0


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_operands_without_an_instruction_are_refused(dtype: str) -> None:
    with pytest.raises(IllegalSchedule, match=rf"dtype.*{dtype}.*float16"):
        step8.schedule(Matmul(64, 64, 64, dtype), config("default", TILE))


@pytest.mark.parametrize(
    ("tile", "message"),
    [
        (TensorCoreTile(block=(64, 64, 32), warp=(48, 32)), "64 rows of the block are not a multiple of 48"),
        (TensorCoreTile(block=(64, 64, 32), warp=(32, 8)), "8 columns per warp are not a multiple of 16"),
        (TensorCoreTile(block=(64, 64, 24), warp=(32, 32)), "24 steps of a k tile"),
        (ThreadTile(block=(64, 64, 16), thread=(4, 4)), "not a TensorCoreTile"),
    ],
    ids=str,
)
def test_tiles_that_do_not_divide_are_refused(tile: TensorCoreTile, message: str) -> None:
    sch = Schedule(Matmul(64, 64, 64, "float16").prim_func())
    before = sch.mod
    with pytest.raises(IllegalTile, match=message):
        tensorize_contraction(sch, sch.get_sblock("matmul"), tile)
    assert tvm_ffi.structural_equal(sch.mod, before)


def test_too_many_stages_are_refused() -> None:
    with pytest.raises(IllegalTile, match=r"bytes of shared memory in 12 stage"):
        build(9, (1024, 1024, 1024), tile=LARGE, stages=12)


def test_too_large_warp_tiles_are_refused() -> None:
    with pytest.raises(IllegalTile, match="registers per thread"):
        build(9, (1024, 1024, 1024), tile=TensorCoreTile(block=(128, 128, 32), warp=(64, 128)))


def test_hidden_reads_need_a_gate() -> None:
    sch = Schedule(Matmul(64, 64, 64, "float16").prim_func())
    contraction = tensorize_contraction(sch, sch.get_sblock("matmul"), TILE, hide_reads=True)
    with pytest.raises(IllegalPipeline, match="hidden"):
        use_instruction(sch, contraction.loops, contraction.loads, contraction.instruction)
    with pytest.raises(IllegalPipeline, match="hidden"):
        pipeline_loop(sch, contraction.loops.k_outer, 2)


@pytest.mark.parametrize(
    ("order", "right"),
    [
        ([3, 1, 2, 0, 4], True),  # body, gate, fill, copies, epilogue
        ([0, 2, 3, 1, 4], False),  # copies fill a stage that a slow thread still reads
        ([1, 2, 3, 0, 4], False),
        ([3, 2, 1, 0, 4], False),  # fragments are filled from a tile nobody waited for
    ],
)
def test_the_gate_stands_where_it_must(order: list[int], right: bool) -> None:
    sch = Schedule(Matmul(128, 64, 256, "float16").prim_func())
    contraction = tensorize_pipelined(sch, 3, instruct=False)
    with contextlib.nullcontext() if right else pytest.raises(IllegalPipeline, match="no barrier"):
        check_pipeline(sch, contraction.loops.k_outer, [0, 2, 2, 3, 3], order, [0])


def test_filling_ahead_needs_an_even_inner_pipeline() -> None:
    sch = Schedule(Matmul(64, 64, 256, "float16").prim_func())
    contraction = tensorize_contraction(sch, sch.get_sblock("matmul"), TILE, hide_reads=True)
    with pytest.raises(IllegalPipeline, match="ahead"):
        pipeline_loop(sch, contraction.loops.k_outer, 3, True, one_barrier=True, fill_ahead=True)


def test_a_fragment_is_its_own_lanes_only() -> None:
    sch = Schedule(Matmul(64, 64, 64, "float16").prim_func())
    contraction = tensorize_contraction(sch, sch.get_sblock("matmul"), TILE)
    # The loops over elements are not lanes. TVM hands on what a pass raises as RuntimeError.
    with pytest.raises(RuntimeError, match=r"another lane.*threadIdx.x modulo 32"):
        lower_schedule(sch, MACHINE, "not tensorized")
    use_instruction(sch, contraction.loops, contraction.loads, contraction.instruction)
    assert FRAGMENT not in lower_schedule(sch, MACHINE, "tensorized").cuda


def test_swizzles_and_rasters_check_what_they_get() -> None:
    sch = Schedule(Matmul(64, 64, 64).prim_func())
    block = sch.get_sblock("matmul")
    with pytest.raises(IllegalSchedule, match="shared memory"):
        swizzle_rows(sch, block)
    rows, columns, _ = sch.get_loops(block)
    with pytest.raises(IllegalSchedule, match="fewer than one"):
        raster_blocks(sch, rows, columns, 0)
    assert [int(sch.get(loop).extent) for loop in raster_blocks(sch, rows, columns, 7)] == [16, 64, 4]


def test_tf32_has_to_be_asked_for() -> None:
    with pytest.raises(IllegalSchedule, match="instruction=TF32"):
        step9.schedule(Matmul(64, 64, 64), config("fragments", TILE))
    with pytest.raises(IllegalSchedule, match=r"multiplies float32.*float16 operands"):
        step9.schedule(Matmul(64, 64, 64, "float16"), config("tf32", TILE))
    text = build(9, (128, 128, 128), "tf32", dtype="float32", layout="nn").cuda
    assert ".m16n8k8.row.col.f32.tf32.tf32.f32" in text
    assert "cvt.rna.tf32.f32" in text
    assert ".trans" not in text  # the copy to shared memory transposes


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "layout"), SHAPES, ids=str)
@pytest.mark.parametrize("step", [8, 9])
def test_tf32_rounds_to_eleven_bits(step: int, shape: tuple[int, int, int], layout: str) -> None:
    backend = GpuBackend()
    kernel = compiled(build(step, shape, "tf32", layout=layout, dtype="float32", arch=gpu_arch()), require_compiler())
    problem = kernel.case.problem
    a, b = backend.normal(0, (problem.m, problem.k), "float32"), backend.normal(1, problem.b_shape, "float32")
    c = backend.poisoned((problem.m, problem.n), "float32")
    executable(kernel)["main"](a, b, c)
    error = backend.worst_error(c, backend.reference(problem, a, b))
    assert error < 2**-11 * 8 * problem.k**0.5  # both operands' rounding, over k terms of order 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("shape", "layout"), [*SHAPES, ((512, 384, 1000), "nn"), ((33, 17, 129), "nt")], ids=str)
@pytest.mark.parametrize(("step", "variant"), [(8, "default"), *((9, variant) for variant in ("fragments", "shared"))])
def test_kernels_are_right(step: int, variant: str, shape: tuple[int, int, int], layout: str, dtype: str) -> None:
    compiler = require_compiler()
    for stages in (2, 3, 4) if step == 9 else (1,):
        kernel = build(step, shape, variant, layout=layout, dtype=dtype, stages=stages, arch=gpu_arch())
        assert verify(compiled(kernel, compiler), GpuBackend()).passed


def summed(product: Callable[..., Any], reducer: Callable[..., Any] = te.sum, dtype: str = "float16") -> Schedule:
    """A function that reduces ``product(A, B, i, j, k)`` over k in the block "C"."""
    a, b, k = te.placeholder((64, 64), dtype, "A"), te.placeholder((64, 64), dtype, "B"), te.reduce_axis((0, 64), "k")
    c = te.compute((64, 64), lambda i, j: reducer(product(a, b, i, j, k), axis=k), "C")
    return Schedule(te.create_prim_func([a, b, c]))


def wide(value: Any) -> Any:
    return value.astype("float32")


OTHER_SUMS: dict[str, tuple[Callable[[], Schedule], str]] = {
    "B·A": (lambda: summed(lambda a, b, i, j, k: wide(b[k, j]) * wide(a[i, k])), "other order"),
    "A·B·0.5": (lambda: summed(lambda a, b, i, j, k: wide(a[i, k]) * wide(b[k, j]) * 0.5), r"C \+= A \* B"),
    "max-plus": (lambda: summed(lambda a, b, i, j, k: wide(a[i, k]) + wide(b[k, j]), te.max), r"C \+= A \* B"),
    "products of halves": (lambda: summed(lambda a, b, i, j, k: wide(a[i, k] * b[k, j])), "products in float16"),
    "sums of halves": (lambda: summed(lambda a, b, i, j, k: a[i, k] * b[k, j]), "sums in float16"),
}


@pytest.mark.parametrize("name", OTHER_SUMS)
def test_what_tensor_cores_do_not_compute_is_refused_at_once(name: str) -> None:
    make, reason = OTHER_SUMS[name]
    sch = make()
    with pytest.raises(IllegalSchedule, match=reason):
        tensorize_contraction(sch, sch.get_sblock("C"), TILE)
    with pytest.raises(IllegalSchedule, match=reason):
        stage_for_warpgroups(sch, sch.get_sblock("C"), WarpgroupTile.parse("64x64x64/1x1"))


def test_one_barrier_takes_fragments_that_are_loaded_by_hidden_reads() -> None:
    sch = Schedule(Matmul(128, 128, 128, "float16").prim_func())
    tensorized = tensorize_contraction(sch, sch.get_sblock("matmul"), TILE)
    with pytest.raises(IllegalPipeline, match="hide_reads=True"):
        pipeline_loop(sch, tensorized.loops.k_outer, 3, one_barrier=True)
    pipeline_loop(sch, tensorized.loops.k_outer, 3)  # with TVM's own barriers
    use_instruction(sch, tensorized.loops, tensorized.loads, tensorized.instruction)
