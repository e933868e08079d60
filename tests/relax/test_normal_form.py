"""The normal form computes what the function computed, or says why it is left; compositions take it as it is."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tvm
from tvm import te, tirx, topi
from tvm.s_tir import Schedule
from tvm.script import tirx as T

from support.functions import check_function
from support.schedules_on_cpu import TARGET
from support.tir_functions import FUNCTIONS, OTHERS, operands_of, run_on_llvm
from tensorir_ladder.harness.execution import compile_serial
from tensorir_ladder.relax.rules.elementwise import Elementwise
from tensorir_ladder.relax.rules.normal_form import Product, narrowed, product_of
from tensorir_ladder.relax.rules.rule import NotTaken
from tensorir_ladder.schedules.errors import IllegalSchedule
from tensorir_ladder.schedules.inspection import operand_regions
from tensorir_ladder.schedules.loops import flatten_contraction, unroll_loop
from tensorir_ladder.schedules.memory import align_operands
from tensorir_ladder.schedules.pipeline import pipeline_loop
from tensorir_ladder.schedules.pipeline.lowering import lower_ahead
from tensorir_ladder.schedules.recipes import BandwidthTile, split_reduction, spread_elements, stage_contraction
from tensorir_ladder.schedules.tensor_cores import tensorize_contraction
from tensorir_ladder.schedules.tiles import TensorCoreTile, ThreadTile

SLOW = {
    "conv1d_ncw",
    "conv2d_nhwc_dilated",
    "conv2d_transpose_nchw",
    "conv3d_ncdhw",
    "conv3d_ndhwc",
    "linear_gelu_tanh",
}
CASES = [pytest.param(name, marks=pytest.mark.emulator) if name in SLOW else name for name in FUNCTIONS]
TILE = ThreadTile(block=(32, 64, 32), thread=(4, 4))
STAGED = [  # what differs on the way to shared memory and back
    "all_any",
    "attention_scores",
    "conv2d_nchw_bias_relu",
    "dequantised_int4",
    "gathered_rows",
    "linear_one_row",
    "linear_to_heads",
    "times_its_transposed",
    "transposed_after",
]


def _check(name: str, after: tirx.PrimFunc, compiled: Callable = tvm.compile) -> None:
    """Hold a function to what it was before, on whole numbers, whose sums are exact whatever they are kept in."""
    func = FUNCTIONS[name].make()
    calls = [operands_of(func, sizes) for sizes in FUNCTIONS[name].sizes]
    for before, now in zip(run_on_llvm(func, *calls), run_on_llvm(after, *calls, compiled=compiled), strict=True):
        for want, got in zip(before, now, strict=True):
            np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=2e-3, atol=2e-3)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_computes_what_the_function_computed(name: str) -> None:
    func = FUNCTIONS[name].make()
    written = func.script()
    product = product_of(func)
    assert func.script() == written, "the function given has changed"
    sch, block = product.sch, product.sch.get(product.block)
    loops = [*product.batch, product.rows, product.columns, product.reduction]
    assert [sch.get(loop) for loop in loops] == [sch.get(loop) for loop in sch.get_loops(product.block)]
    *batch, rows, columns, reduction = (iterator.var for iterator in block.iter_vars)
    for region, own in zip(operand_regions(sch, product.block), (rows, columns), strict=True):
        indices = [dimension.min for dimension in region.region]
        assert indices in ([*batch, own, reduction], [*batch, reduction, own])
    _check(name, sch.mod["main"])


@pytest.mark.parametrize("name", OTHERS)
def test_is_left_with_the_reason(name: str) -> None:
    func = OTHERS[name].make()
    written = func.script()
    with pytest.raises(NotTaken, match=OTHERS[name].left):
        product_of(func)
    assert func.script() == written


def _staged(product: Product) -> Schedule:
    staged = stage_contraction(product.sch, product.block, TILE, vectorize=True, scope="shared.dyn")
    if isinstance(product.sch.get(staged.loops.k_outer).extent, tirx.IntImm):
        pipeline_loop(product.sch, staged.loops.k_outer, 2)
    return product.sch


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore:.*pipeline stages")
@pytest.mark.parametrize("name", STAGED)
def test_compositions_take_it(name: str) -> None:
    sch = _staged(product_of(FUNCTIONS[name].make()))
    _check(name, sch.mod["main"], compile_serial)


@pytest.mark.sampled(3)
@pytest.mark.emulator
@pytest.mark.filterwarnings("ignore:.*pipeline stages")
@pytest.mark.parametrize("name", ["conv2d_nhwc", "linear_silu_any", "linear_to_heads", "residual_first", "loops_split"])
def test_the_cuda_of_it(name: str) -> None:
    func = FUNCTIONS[name].make()
    sch = _staged(product_of(func))
    check_function(func, lower_ahead(sch.mod["main"], TARGET), TARGET, FUNCTIONS[name].sizes[-1], slack=4)


def test_the_layout_of_a_residual_stays() -> None:
    product = product_of(FUNCTIONS["residual_first"].make())
    tensorize_contraction(product.sch, product.block, TensorCoreTile(block=(32, 64, 32), warp=(32, 32)))
    assert list(product.sch.mod["main"].params[0].shape) == [20, 28]
    _check("residual_first", product.sch.mod["main"], compile_serial)


def test_sums_are_kept_in_float32_or_as_written() -> None:
    a, b = (te.placeholder(shape, "float16", name=name) for name, shape in (("A", (8, 3000)), ("B", (3000, 8))))
    k = te.reduce_axis((0, 3000), name="k")
    func = te.create_prim_func([a, b, te.compute((8, 8), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="C")])
    random = np.random.default_rng(0)
    operands = [random.random(shape).astype("float16") for shape in ((8, 3000), (3000, 8), (8, 8))]
    exact = operands[0].astype(np.float64) @ operands[1].astype(np.float64)
    before, wide, narrow = (
        run_on_llvm(made, operands)[0][-1].astype(np.float64)
        for made in (func, product_of(func).sch.mod["main"], product_of(func, sums="as_written").sch.mod["main"])
    )
    np.testing.assert_array_equal(narrow, before)
    assert abs(wide - exact).max() <= 2**-11 * exact.max() < abs(before - exact).max()


@pytest.mark.parametrize("sums", ["as_written", "float32"])
def test_what_has_no_arithmetic_as_written(sums: str) -> None:
    func = FUNCTIONS["halved_inside"].make()
    if sums == "as_written":
        with pytest.raises(NotTaken, match="as written"):
            product_of(func, sums=sums)
    else:
        product_of(func, sums=sums)


def test_vectors_begin_aligned() -> None:
    product = product_of(FUNCTIONS["columns_from_one_on"].make())
    staged = stage_contraction(product.sch, product.block, TILE, vectorize=True)
    assert [copy.width for copy in staged.copies] == [1, 8]


def test_a_reduction_runs_along_the_memory() -> None:
    product = product_of(FUNCTIONS["heads_projected"].make())
    staged = stage_contraction(product.sch, product.block, TILE, vectorize=True)
    assert [copy.width for copy in staged.copies] == [8, 8]


@pytest.mark.parametrize(
    ("name", "extents"),
    [("attention_one_query", "2 2 s 16"), ("attention_values", "2 s * 2 16 s"), ("conv2d_grouped", "2 8 n * 63 36")],
)
def test_heads_that_share_keys_are_rows_of_one_product(name: str, extents: str) -> None:
    product = product_of(FUNCTIONS[name].make())
    loops = [*product.batch, product.rows, product.columns, product.reduction]
    assert " ".join(str(product.sch.get(loop).extent) for loop in loops) == extents


def test_sums_of_8_bit_floats() -> None:
    a, b = (te.placeholder(shape, "float8_e4m3fn", name=name) for name, shape in (("A", (32, 64)), ("B", (64, 32))))
    k = te.reduce_axis((0, 64), name="k")
    element = lambda i, j: te.sum(a[i, k].astype("float16") * b[k, j].astype("float16"), axis=k)  # noqa: E731
    product = product_of(te.create_prim_func([a, b, te.compute((32, 32), element, name="C")]))
    block = product.sch.get(product.block)
    assert [str(region.source.dtype) for region in block.reads] == ["float8_e4m3fn"] * 2
    assert str(block.writes[0].source.dtype) == "float32"


def test_narrowed_indices() -> None:
    func = FUNCTIONS["linear_silu_any"].make()
    small = narrowed(func)
    assert "int64" in func.script()
    assert "int64" not in small.script()
    assert narrowed(small).same_as(small)


def test_what_cannot_be_narrowed() -> None:
    rows = tirx.Var("m", "int64")
    huge = te.placeholder((2**17, 2**14), "int8", name="A")
    with pytest.raises(NotTaken, match="32-bit indexing"):
        narrowed(te.create_prim_func([huge, te.compute(huge.shape, lambda i, j: huge[i, j] + huge[i, j], name="B")]))
    numbers = te.placeholder((rows,), "int64", name="A")
    with pytest.raises(NotTaken, match="64-bit numbers"):
        narrowed(te.create_prim_func([numbers, te.compute((rows,), lambda i: numbers[i] + 1, name="B")]))


@pytest.mark.parametrize("name", ["rows_any_i64", "loops_split", "loops_fused", "start_apart", "scheduled"])
def test_flattening_refuses_before_it_changes_anything(name: str) -> None:
    func = (FUNCTIONS | OTHERS)[name].make()
    sch = Schedule(func)
    block = next(
        block
        for block in sch.get_child_blocks(sch.get_sblock("root"))
        if any(i.iter_type == 2 for i in sch.get(block).iter_vars)
    )
    written = sch.mod.script()
    with pytest.raises(IllegalSchedule, match="product_of"):
        flatten_contraction(sch, block)
    assert sch.mod.script() == written


@pytest.mark.parametrize(
    "compose",
    [
        lambda product: align_operands(product.sch, product.block, TILE.block),
        lambda product: split_reduction(product.sch, product.block, 2, 16),
        lambda product: unroll_loop(product.sch, product.reduction),
        lambda product: pipeline_loop(product.sch, product.reduction, 2),
    ],
)
def test_what_needs_constant_extents_says_so_before_it_changes_anything(compose: Callable[[Product], object]) -> None:
    product = product_of(FUNCTIONS["all_any"].make())
    written = product.sch.mod.script()
    with pytest.raises(IllegalSchedule, match="run time only"):
        compose(product)
    assert product.sch.mod.script() == written


def test_elementwise_blocks_of_symbolic_extents_are_refused_by_name() -> None:
    x = te.placeholder((tirx.Var("m", "int64"), 8), "float32", name="x")
    sch = Schedule(te.create_prim_func([x, topi.tanh(x)]))
    (block,) = sch.get_child_blocks(sch.get_sblock("root"))
    with pytest.raises(IllegalSchedule, match="run time only"):
        spread_elements(sch, block, BandwidthTile(threads=128))


def test_elementwise_blocks_that_wrap_are_left() -> None:
    x = te.placeholder((32, 64), "int8", name="x")
    with pytest.raises(NotTaken, match="wrap inside"):
        Elementwise().take(te.create_prim_func([x, topi.nn.relu(topi.add(x, x))]), TARGET)
    Elementwise().take(te.create_prim_func([x, topi.add(topi.add(x, x), x)]), TARGET)


def test_epilogues_that_repeat_are_refused_by_name() -> None:
    sch = Schedule(OTHERS["result_repeated"].make())
    with pytest.raises(IllegalSchedule, match="repeats its elements"):
        stage_contraction(sch, sch.get_sblock("matmul"), TILE)


def test_sums_without_a_start_are_refused_by_name() -> None:
    @T.prim_func(s_tir=True)
    def accumulate(
        a: T.Buffer((32, 32), "float32"), b: T.Buffer((32, 64), "float32"), c: T.Buffer((32, 64), "float32")
    ) -> None:
        for i, j, k in T.grid(32, 64, 32):
            with T.sblock("update"):
                v_i, v_j, v_k = T.axis.remap("SSR", [i, j, k])
                c[v_i, v_j] = c[v_i, v_j] + a[v_i, v_k] * b[v_k, v_j]

    sch = Schedule(accumulate)
    with pytest.raises(IllegalSchedule, match="goes on from"):
        stage_contraction(sch, sch.get_sblock("update"), TILE)


def test_a_sum_padded_along_an_extent_of_1_is_left() -> None:
    a, b = te.placeholder((4, 1, 7, 16), "float32", "a"), te.placeholder((32, 16), "float32", "b")
    k = te.reduce_axis((0, 16), "k")
    sums = te.compute((4, 1, 7, 32), lambda n, one, i, j: te.sum(a[n, one, i, k] * b[j, k], [k]), "sums")
    with pytest.raises(NotTaken, match="exactly one element"):
        product_of(te.create_prim_func([a, b, topi.nn.pad(sums, [0, 0, 0, 0], [0, 2, 0, 0])]))
