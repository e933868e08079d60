"""The schedule functions on workloads they know nothing about, and what they refuse."""

from __future__ import annotations

import contextlib
import math

import numpy as np
import pytest
import tvm
from tvm import te
from tvm.s_tir import Schedule

from support.schedules_on_cpu import TARGET, convolve, cuda_text, normal, run
from tensorir_ladder.harness.execution import compile_serial
from tensorir_ladder.relax.rules import narrowed
from tensorir_ladder.relax.rules.contraction import Contraction
from tensorir_ladder.schedules.errors import IllegalPipeline, IllegalSchedule, IllegalTile, IllegalWorkload
from tensorir_ladder.schedules.inspection import loop_extent, loop_extents
from tensorir_ladder.schedules.loops import (
    bind_elements,
    bind_grid,
    bind_threads,
    end_within_tile,
    flatten_contraction,
    pad_to_tile,
    tile_contraction,
    unroll_loop,
)
from tensorir_ladder.schedules.memory import (
    accumulate_in_registers,
    fetch_cooperatively,
    initialize_before,
    stage_in_shared,
)
from tensorir_ladder.schedules.pipeline import pipeline_loop, required_pass_config, required_tir_pipeline
from tensorir_ladder.schedules.recipes import stage_contraction, stage_for_warps
from tensorir_ladder.schedules.tiles import ThreadTile, WarpTile
from tensorir_ladder.schedules.workloads import Matmul, batched_matmul, conv2d_nhwc, gemm, matmul_bias_relu

TILE = ThreadTile(block=(32, 64, 16), thread=(4, 4))


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("shape", [(100, 52, 36), (33, 17, 5), (64, 64, 64)], ids=str)
def test_batched_matmul(shape, stages):
    m, n, k = shape
    a, b = normal(3, m, k), normal(3, k, n)
    sch = Schedule(batched_matmul(3, Matmul(m, n, k)))
    staged = stage_contraction(sch, sch.get_sblock("matmul"), TILE, vectorize=True)
    with pytest.warns(UserWarning, match="pipeline stages") if stages > -(-k // 16) else contextlib.nullcontext():
        pipeline_loop(sch, staged.loops.k_outer, stages)
    np.testing.assert_allclose(run(sch, a, b, shape=(3, m, n)), a.astype(np.float64) @ b, rtol=0, atol=1e-4)


@pytest.mark.parametrize("layout", ["nn", "nt"])
def test_epilogue_is_fused(layout):
    problem = Matmul(100, 52, 36, layout=layout)
    a, b, bias = normal(100, 36), normal(*problem.b_shape), normal(52)
    sch = Schedule(matmul_bias_relu(problem))
    staged = stage_contraction(sch, sch.get_sblock("matmul"), TILE, vectorize=True)
    pipeline_loop(sch, staged.loops.k_outer, 2)
    expected = np.maximum(a.astype(np.float64) @ (b if layout == "nn" else b.T) + bias, 0)
    np.testing.assert_allclose(run(sch, a, b, bias, shape=(100, 52)), expected, rtol=0, atol=1e-4)
    assert cuda_text(sch).count("__global__") == 1, "the epilogue must not become a kernel of its own"


@pytest.mark.parametrize(("alpha", "beta"), [(1.5, -0.5), (0.25, 0.0), (1, 2)])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_gemm_is_fused_and_rounded_once(alpha: float, beta: float, dtype: str) -> None:
    problem = Matmul(100, 52, 36, dtype)
    a, b, c = (normal(*shape).astype(dtype) for shape in ((100, 36), (36, 52), (100, 52)))
    sch = Schedule(gemm(problem, alpha, beta))
    staged = stage_contraction(sch, sch.get_sblock("matmul"), TILE, vectorize=True)
    pipeline_loop(sch, staged.loops.k_outer, 2)
    operands = [a, b, c] if beta else [a, b]
    wide = a.astype(np.float64) @ b.astype(np.float64)
    expected = (alpha * wide + (beta * c.astype(np.float64) if beta else 0)).astype(dtype)
    output = run(sch, *operands, shape=(100, 52), dtype=dtype)
    # One rounding: the nearest float16, but where float32's sums lie beside the middle between two.
    off = np.abs(output.astype(np.float64) - expected.astype(np.float64))
    assert off.max() <= (1e-4 if dtype == "float32" else np.spacing(np.abs(expected).max()))
    assert np.count_nonzero(off) < 0.01 * off.size or dtype == "float32"
    assert cuda_text(sch).count("__global__") == 1


@pytest.mark.parametrize("factors", [{"alpha": math.nan}, {"beta": math.inf}, {"alpha": "2"}])
def test_factors_that_are_no_finite_numbers_are_refused(factors: dict) -> None:
    with pytest.raises(IllegalWorkload, match=rf"{next(iter(factors))} is a constant.*limit finite"):
        gemm(Matmul(4, 4, 4), **factors)
    with pytest.raises(IllegalWorkload, match="no product"):
        gemm(Matmul(4, 4, 4), alpha=0, beta=1)


@pytest.mark.parametrize(
    ("size", "channels", "stride", "padding"),
    [((2, 14, 14), (16, 24), 1, 1), ((1, 9, 7), (5, 7), 2, 1), ((1, 8, 8), (4, 4), 1, 0)],
    ids=["aligned", "ragged strided", "unpadded"],
)
def test_convolution_as_implicit_gemm(size, channels, stride, padding):
    data, weight = normal(*size, channels[0]), normal(3, 3, *channels)
    expected = convolve(data, weight, stride, padding)
    sch = Schedule(conv2d_nhwc(*size, *channels, stride=stride, padding=padding))
    block = sch.get_sblock("conv2d")
    flatten_contraction(sch, block)
    staged = stage_contraction(sch, block, TILE, vectorize=True)
    pipeline_loop(sch, staged.loops.k_outer, 2)
    np.testing.assert_allclose(run(sch, data, weight, shape=expected.shape), expected, rtol=0, atol=1e-4)
    assert cuda_text(sch).count("ptx_cp_async") > 0


def test_strided_operand_gets_no_vector():
    """TVM copies 16 consecutive bytes even where the index has a stride: such a copy must stay scalar."""
    sch = Schedule(Matmul(64, 64, 64, layout="nt").prim_func())
    block = sch.get_sblock("matmul")
    sch.transform_layout(block, ("write", 0), lambda i, j: (i, j))
    loops = tile_contraction(sch, *sch.get_loops(block), TILE)
    copy = stage_in_shared(sch, block, 1, loops.k_outer)
    sch.transform_layout(copy, ("write", 0), lambda n, k: (k, n))  # a transposing copy
    sch.reorder(*reversed(sch.get_loops(copy)[-2:]))
    assert fetch_cooperatively(sch, copy, loops.k_outer, TILE.threads, vectorize=True).width == 1


@pytest.mark.parametrize(("n", "k", "width"), [(64, 64, 4), (66, 64, 2), (65, 64, 1)])
def test_alignment_decides_the_vector_width(n, k, width):
    sch = Schedule(Matmul(64, n, k).prim_func())
    staged = stage_contraction(sch, sch.get_sblock("matmul"), TILE, vectorize=True)
    assert staged.copies[1].width == width
    a, b = normal(64, k), normal(k, n)
    np.testing.assert_allclose(run(sch, a, b, shape=(64, n)), a.astype(np.float64) @ b, rtol=0, atol=1e-4)


def test_small_functions_compose_without_the_composite():
    """The parts of stage_contraction, called one by one, on ragged extents left to predicates."""
    sch = Schedule(Matmul(50, 30, 20).prim_func())
    block = sch.get_sblock("matmul")
    loops = tile_contraction(sch, *sch.get_loops(block), TILE)
    bind_grid(sch, [loops.block_row, loops.block_column])
    bind_threads(sch, loops.thread_row, loops.thread_column)
    accumulate_in_registers(sch, block, loops.thread_column)
    for operand in (0, 1):
        copy = stage_in_shared(sch, block, operand, loops.k_outer)
        fetch_cooperatively(sch, copy, loops.k_outer, TILE.threads)
    initialize_before(sch, block, loops.k_outer)
    a, b = normal(50, 20), normal(20, 30)
    np.testing.assert_allclose(run(sch, a, b, shape=(50, 30)), a.astype(np.float64) @ b, rtol=0, atol=1e-4)


def test_bind_elements_takes_any_number_of_spatial_loops():
    for function, inputs, expected in (
        (batched_matmul(2, Matmul(5, 7, 3)), (normal(2, 5, 3), normal(2, 3, 7)), None),
        (Matmul(5, 7, 3).prim_func(), (normal(5, 3), normal(3, 7)), None),
    ):
        sch = Schedule(function)
        bind_elements(sch, sch.get_sblock("matmul"), (4, 8))
        expected = inputs[0].astype(np.float64) @ inputs[1]
        np.testing.assert_allclose(run(sch, *inputs, shape=expected.shape), expected, rtol=0, atol=1e-5)


def test_padding_is_only_done_where_needed():
    sch = Schedule(Matmul(64, 64, 64).prim_func())
    assert pad_to_tile(sch, sch.get_sblock("matmul"), (32, 64, 16)) is False
    sch = Schedule(Matmul(65, 64, 64).prim_func())
    block = sch.get_sblock("matmul")
    assert pad_to_tile(sch, block, (32, 64, 16)) is True
    assert loop_extents(sch, block) == [96, 64, 64]


@pytest.mark.parametrize(("factor", "applied"), [(None, 16), (1, 1), (3, 2), (4, 4), (16, 16), (32, 16)])
def test_unroll_factor(factor, applied):
    sch = Schedule(Matmul(8, 8, 16).prim_func())
    loop = sch.get_loops(sch.get_sblock("matmul"))[-1]
    assert loop_extent(sch, loop) == 16
    assert unroll_loop(sch, loop, factor) == applied
    a, b = normal(8, 16), normal(16, 8)
    np.testing.assert_allclose(run(sch, a, b, shape=(8, 8)), a.astype(np.float64) @ b, rtol=0, atol=1e-5)


def test_pipeline_reports_what_it_did():
    sch = Schedule(Matmul(64, 64, 64).prim_func())
    staged = stage_contraction(sch, sch.get_sblock("matmul"), TILE)
    pipeline = pipeline_loop(sch, staged.loops.k_outer, 3)
    assert pipeline.statements == ("A_shared", "B_shared", "matmul_update")
    assert (pipeline.stage, pipeline.order, pipeline.async_stages) == ((0, 0, 2), (0, 1, 2), (0,))
    assert pipeline.pass_config == required_pass_config(sch.mod) == {"tirx.use_async_copy": True}
    text = cuda_text(sch)
    assert "wait_group_2()" in text
    assert text.count("ptx_cp_async") > 0


def test_stages_are_limited_to_iterations_with_one_warning():
    sch = Schedule(Matmul(64, 64, 32).prim_func())
    staged = stage_contraction(sch, sch.get_sblock("matmul"), TILE)
    with pytest.warns(UserWarning, match="6 pipeline stages on loop 'k_0' of 2 iterations") as caught:
        pipeline = pipeline_loop(sch, staged.loops.k_outer, 6)
    assert len(caught) == 1
    assert pipeline.stages == 2


@pytest.mark.parametrize("stages", [0, -1, 2.5])
def test_illegal_stage_counts(stages):
    sch = Schedule(Matmul(64, 64, 64).prim_func())
    staged = stage_contraction(sch, sch.get_sblock("matmul"), TILE)
    with pytest.raises(IllegalPipeline, match="stage") as caught:
        pipeline_loop(sch, staged.loops.k_outer, stages)
    assert (caught.value.loop, caught.value.value) == ("k_0", stages)


def test_pipeline_needs_copies_and_their_use():
    sch = Schedule(Matmul(64, 64, 64).prim_func())
    loop = sch.get_loops(sch.get_sblock("matmul"))[-1]
    with pytest.raises(IllegalPipeline, match="one statement has nothing to overlap"):
        pipeline_loop(sch, loop, 2)


def test_refusals_name_value_limit_and_remedy():
    with pytest.raises(IllegalWorkload, match=r"m.*got 0.*at least 1"):
        Matmul(0, 1, 1)
    with pytest.raises(IllegalWorkload, match=r"2147483648.*split the product"):
        Matmul(2**16, 2**15, 1)
    with pytest.raises(IllegalWorkload, match=r"'int7'.*float32"):
        Matmul(1, 1, 1, dtype="int7")
    with pytest.raises(IllegalTile, match="not a multiple"):
        tile_contraction(*_loops(Matmul(64, 64, 64)), ThreadTile(block=(30, 64, 16), thread=(4, 4)))
    with pytest.raises(IllegalTile, match=r"4096 threads per block, limit 1024.*limit 65536.*limit 232448"):
        ThreadTile(block=(256, 256, 256), thread=(4, 4)).validate(TARGET)
    with pytest.raises(IllegalTile, match="registers per thread, limit 255"):
        ThreadTile(block=(128, 128, 16), thread=(16, 16)).validate(TARGET)
    with pytest.raises(IllegalTile, match="MxNxK/TMxTN"):
        ThreadTile.parse("64x64")
    sch = Schedule(Matmul(64, 64, 64).prim_func())
    with pytest.raises(IllegalSchedule, match="one tile extent per loop"):
        pad_to_tile(sch, sch.get_sblock("matmul"), (32,))
    row, column, _ = sch.get_loops(sch.get_sblock("matmul"))
    with pytest.raises(IllegalSchedule, match=r"got 4096, limit 1024"):
        bind_threads(sch, row, column)
    with pytest.raises(IllegalSchedule, match="unroll factor below 1"):
        unroll_loop(sch, row, 0)


def test_a_convolution_cannot_be_padded_before_it_is_flattened():
    sch = Schedule(conv2d_nhwc(1, 8, 8, 4, 4))
    block = sch.get_sblock("conv2d")
    with pytest.raises(IllegalSchedule, match="flatten_contraction first"):
        pad_to_tile(sch, block, (1, 3, 3, 3, 1, 1, 3))


def _loops(problem: Matmul):
    sch = Schedule(problem.prim_func())
    return (sch, *sch.get_loops(sch.get_sblock("matmul")))


@pytest.mark.parametrize("combine", ["exp of a sum", "sum plus one", "largest sum"])
def test_only_sums_of_products_are_padded(combine):
    """The zeros of padding would count in any other reduction, without a word."""
    a, b = te.placeholder((33, 37), name="a"), te.placeholder((37, 52), name="b")
    k = te.reduce_axis((0, 37), name="k")
    element = {
        "exp of a sum": lambda i, j: te.sum(te.exp(a[i, k] + b[k, j]), k),
        "sum plus one": lambda i, j: te.sum(a[i, k] + b[k, j] + 1, k),
        "largest sum": lambda i, j: te.max(a[i, k] + b[k, j], k),
    }[combine]
    function = te.create_prim_func([a, b, te.compute((33, 52), element, name="reduce")])
    sch = Schedule(function)
    with pytest.raises(IllegalSchedule, match="no sum of products") as caught:
        pad_to_tile(sch, sch.get_sblock("reduce"), TILE.block)
    assert caught.value.block == "reduce"
    assert Contraction().apply(function, TARGET) is None


@pytest.mark.parametrize(
    ("size", "kernel", "padding"),
    [((2, 14, 14), 1, 0), ((2, 3, 14), 3, 0), ((1, 1, 9), 1, 0)],
    ids=["1x1 kernel", "one output row", "one row"],
)
def test_convolutions_with_iterators_of_one_step(size, kernel, padding):
    data, weight = normal(*size, 16), normal(kernel, kernel, 16, 24)
    expected = convolve(data, weight, 1, padding)
    sch = Schedule(conv2d_nhwc(*size, 16, 24, kernel=kernel, padding=padding))
    block = sch.get_sblock("conv2d")
    flatten_contraction(sch, block)
    staged = stage_contraction(sch, block, TILE, vectorize=True)
    pipeline_loop(sch, staged.loops.k_outer, 1)
    np.testing.assert_allclose(run(sch, data, weight, shape=expected.shape), expected, rtol=0, atol=1e-4)


def test_a_single_row_is_refused_rather_than_summed_several_times():
    sch = Schedule(conv2d_nhwc(1, 5, 5, 16, 24, kernel=5, padding=0))
    with pytest.raises(IllegalSchedule, match="rows of one step cannot be tiled"):
        flatten_contraction(sch, sch.get_sblock("conv2d"))
    assert Contraction().apply(conv2d_nhwc(1, 1, 1, 16, 24, kernel=1, padding=0), TARGET) is None


def test_a_function_of_any_name_can_be_scheduled():
    a, b = normal(64, 64), normal(64, 64)
    functions = {"product": Matmul(64, 64, 64).prim_func(), "other": Matmul(8, 8, 8).prim_func()}
    sch = Schedule(tvm.IRModule({name: f.with_attr("global_symbol", name) for name, f in functions.items()}))
    sch.work_on("product")
    staged = stage_contraction(sch, sch.get_sblock("matmul"), TILE, vectorize=True)
    pipeline_loop(sch, staged.loops.k_outer, 3)
    output = tvm.runtime.tensor(np.full((64, 64), np.nan, np.float32))
    compile_serial(sch.mod)["product"](tvm.runtime.tensor(a), tvm.runtime.tensor(b), output)
    np.testing.assert_allclose(output.numpy(), a.astype(np.float64) @ b, rtol=0, atol=1e-4)


def test_what_cannot_be_fused_or_split_is_refused_by_name():
    a, b = te.placeholder((64, 64), name="a"), te.placeholder((64, 64), name="b")
    k = te.reduce_axis((0, 64), name="k")
    product = te.compute((64, 64), lambda i, j: te.sum(a[i, k] * b[k, j], k), name="product")
    rereads = te.compute((64, 64), lambda i, j: product[i, j] + product[i, 0], name="rereads")
    function = te.create_prim_func([a, b, rereads])
    sch = Schedule(function)
    with pytest.raises(IllegalSchedule, match="cannot be fused into its write-back") as caught:
        stage_contraction(sch, sch.get_sblock("product"), TILE)
    assert caught.value.block == "product"
    assert Contraction().apply(function, TARGET) is None
    sch = Schedule(Matmul(96, 96, 96).prim_func())
    with pytest.raises(IllegalSchedule, match="whole rows of the tile"):
        stage_contraction(
            sch, sch.get_sblock("matmul"), ThreadTile(block=(32, 48, 12), thread=(2, 3)), through_registers=True
        )
    with pytest.raises(IllegalTile, match="has an extent below 1"):
        ThreadTile(block=(32, 64, 16), thread=(0, 4))
    with pytest.raises(IllegalWorkload, match=r"4294967296.*below 2147483648"):
        batched_matmul(2**20, Matmul(64, 64, 64))
    with pytest.raises(IllegalWorkload, match="data elements"):
        conv2d_nhwc(2000, 1400, 1400, 16, 24)


def test_a_product_per_tile_of_one_step():
    a, b = normal(3, 100, 1), normal(3, 1, 52)
    sch = Schedule(batched_matmul(3, Matmul(100, 52, 1)))
    stage_contraction(
        sch, sch.get_sblock("matmul"), ThreadTile(block=(16, 16, 8), thread=(1, 1)), product_per_tile=True
    )
    np.testing.assert_allclose(run(sch, a, b, shape=(3, 100, 52)), a.astype(np.float64) @ b, rtol=0, atol=1e-5)


def test_the_last_pipeline_counts():
    sch = Schedule(Matmul(64, 64, 64).prim_func())
    staged = stage_contraction(sch, sch.get_sblock("matmul"), TILE)
    pipeline_loop(sch, staged.loops.k_outer, 3)
    plan = pipeline_loop(sch, staged.loops.k_outer, 2, async_copy=False)
    assert plan.pass_config == required_pass_config(sch.mod) == {}
    pipeline_loop(sch, staged.loops.k_outer, 1)
    assert not sch.get(staged.loops.k_outer).annotations


def cut_short() -> Schedule:
    """Sums of 112 x 32 elements, of whose columns four are kept."""
    x, part = te.placeholder((2, 112, 32), name="x"), te.reduce_axis((0, 2), name="part")
    total = te.compute((112, 32), lambda i, j: te.sum(x[part, i, j], part), name="total")
    return Schedule(te.create_prim_func([x, te.compute((112, 4), lambda i, j: total[i, j], name="kept")]))


def test_sums_are_kept_before_a_loop_is_split_that_does_not_divide() -> None:
    """Else TVM forgets which threads have none: the last 1,000 of 3,584 elements are 584."""
    x = np.random.default_rng(0).standard_normal((2, 112, 32)).astype("float32")
    sch = cut_short()
    block = sch.get_sblock("total")
    rows, columns, part = sch.get_loops(block)
    accumulate_in_registers(sch, block, columns)
    sch.split(sch.fuse(rows, columns), [None, 1000])
    np.testing.assert_allclose(run(sch, x, shape=(112, 4)), x.sum(axis=0)[:, :4], rtol=1e-6)
    sch = cut_short()
    block = sch.get_sblock("total")
    rows, columns, part = sch.get_loops(block)
    columns, outputs = sch.split(columns, [None, 4])
    _, thread = sch.split(sch.fuse(rows, columns), [None, 256])
    sch.reorder(part, outputs)
    with pytest.raises(IllegalSchedule, match=r"kept cuts the result short.*without .* < 112.*before the loop"):
        accumulate_in_registers(sch, block, thread)


# A last tile that ends early


@pytest.mark.parametrize("stages", [1, 3])
def test_a_convolution_s_last_tile_ends_where_its_reduction_does(stages: int) -> None:
    """27 steps by tiles of 16, as an implicit product by threads: no bit changes, and 5 steps are not computed."""
    data, weight = normal(1, 9, 9, 3), normal(3, 3, 3, 20)
    outputs, texts = [], []
    for ends in (True, False):
        sch = Schedule(conv2d_nhwc(1, 9, 9, 3, 20, kernel=3, stride=1, padding=1))
        block = sch.get_sblock("conv2d")
        flatten_contraction(sch, block)
        loops = stage_contraction(sch, block, TILE).loops
        if ends:
            end_within_tile(sch, loops.k_outer, loops.k_inner, 27)
        unroll_loop(sch, loops.k_inner)
        if stages > 1:
            with pytest.warns(UserWarning, match="pipeline stages"):
                pipeline_loop(sch, loops.k_outer, stages)
        outputs.append(run(sch, data, weight, shape=(1, 9, 9, 20)))
        texts.append(cuda_text(sch))
    assert np.array_equal(*outputs)
    np.testing.assert_allclose(outputs[0], convolve(data, weight, 1, 1), rtol=0, atol=1e-4)
    ended, whole = map(len, texts)
    assert ended < whole or stages == 1, "the last tile is written out by itself, and shorter"


@pytest.mark.parametrize("steps", [0, 32, 49])
def test_a_loop_does_not_end_in_another_tile_than_its_last(steps: int) -> None:
    sch = Schedule(Matmul(64, 64, 48).prim_func())
    loops = stage_contraction(sch, sch.get_sblock("matmul"), TILE).loops
    before = sch.mod.script()
    with pytest.raises(IllegalSchedule, match=f"{steps} steps of 3 tiles of 16, limit 33 to 48"):
        end_within_tile(sch, loops.k_outer, loops.k_inner, steps)
    assert sch.mod.script() == before
    end_within_tile(sch, loops.k_outer, loops.k_inner, 48)
    assert sch.mod.script() == before, "a last tile that is whole"


def test_steps_are_those_of_a_loop_s_tiles() -> None:
    sch = Schedule(Matmul(64, 64, 48).prim_func())
    loops = stage_contraction(sch, sch.get_sblock("matmul"), TILE).loops
    with pytest.raises(IllegalSchedule, match=r"not under.*pass the outer loop first"):
        end_within_tile(sch, loops.k_inner, loops.k_outer, 40)


def test_a_bound_loop_keeps_its_binding() -> None:
    sch = Schedule(Matmul(64, 64, 64).prim_func())
    rows, *_ = sch.get_loops(sch.get_sblock("matmul"))
    bind_grid(sch, [rows])
    with pytest.raises(IllegalSchedule, match=r"blockIdx.x.*serial"):
        unroll_loop(sch, rows)
    assert sch.get(rows).thread_binding is not None


def test_a_copy_by_more_threads_than_a_block_has_is_refused() -> None:
    sch = Schedule(Matmul(64, 64, 64).prim_func())
    block = sch.get_sblock("matmul")
    outer, _ = sch.split(sch.get_loops(block)[2], [None, 16])
    copy = stage_in_shared(sch, block, 0, outer)
    with pytest.raises(IllegalSchedule, match=r"64 x 32.*1024"):
        fetch_cooperatively(sch, copy, outer, (64, 32))


@pytest.mark.parametrize("recipe", [stage_contraction, stage_for_warps])
def test_symbolic_wide_extents_beside_narrow_ones_are_refused_with_what_makes_them_one(recipe) -> None:
    def function() -> tvm.tirx.PrimFunc:
        n = tvm.tirx.Var("n", "int64")
        a, b = te.placeholder((64, 64), "float32", "A"), te.placeholder((64, n), "float32", "B")
        k = te.reduce_axis((0, 64), "k")
        return te.create_prim_func([a, b, te.compute((64, n), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), "C")])

    tile = TILE if recipe is stage_contraction else WarpTile.parse("32x64x16/16x64/4x8/1")
    sch = Schedule(function())
    with pytest.raises(IllegalSchedule, match=r"n: int64.*narrowed"):
        recipe(sch, sch.get_sblock("C"), tile)
    made_one = Schedule(narrowed(function()))
    recipe(made_one, made_one.get_sblock("C"), tile)
    tvm.compile(made_one.mod, TARGET, tir_pipeline=required_tir_pipeline(made_one.mod))
