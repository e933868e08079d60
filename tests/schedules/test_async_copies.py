"""What TVM would lower to a wrong cp.async, or to nothing that CUDA has, is copied synchronously or refused."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
from tvm import te, tirx
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV
from tvm.script import tirx as T

from support.schedules_on_cpu import cuda_text
from tensorir_ladder.harness.build import compiled, executable, lower_schedule
from tensorir_ladder.harness.emulation import EmulatorBackend
from tensorir_ladder.harness.execution import gpu_arch
from tensorir_ladder.harness.machines import machine_for
from tensorir_ladder.kernels.codegen.toolchain import Compiler, require_compiler
from tensorir_ladder.schedules.errors import IllegalPipeline
from tensorir_ladder.schedules.loops import widest_vector
from tensorir_ladder.schedules.pipeline import check_pipeline, explain_pipeline, pipeline_loop
from tensorir_ladder.schedules.recipes import stage_contraction
from tensorir_ladder.schedules.tiles import ThreadTile

HOPPER = machine_for("sm_90a")
TILE = ThreadTile(block=(32, 64, 32), thread=(4, 4))
Nest = tuple[Schedule, LoopRV]


def product(a: te.Tensor, n: int, inputs: list[te.Tensor], through_registers: bool = False) -> Nest:
    """A times a B of its dtype, summed in 32 bits and staged in shared memory; its k loop."""
    (m, k), dtype = map(int, a.shape), str(a.dtype)
    wide = "float32" if "float" in dtype else "int32"
    b, r = te.placeholder((k, n), dtype, "B"), te.reduce_axis((0, k), "k")
    c = te.compute((m, n), lambda i, j: te.sum(a[i, r].astype(wide) * b[r, j].astype(wide), r), "matmul")
    sch = Schedule(te.create_prim_func([*inputs, b, c]))
    staged = stage_contraction(sch, sch.get_sblock("matmul"), TILE, vectorize=True, through_registers=through_registers)
    return sch, staged.loops.k_outer


def gathered(m: int = 50, k: int = 96) -> Nest:
    """Rows of a table, picked by an array of indices, times B."""
    table, picked = te.placeholder((40, k), "float32", "table"), te.placeholder((m,), "int32", "picked")
    rows = te.compute((m, k), lambda i, j: table[picked[i], j], "take")
    return product(rows, 64, [table, picked])


def doubled(arrange: Callable[[Schedule, LoopRV], None], bind: str = "threadIdx.x") -> Nest:
    """``y = 2 x``, a thread for each matrix, a row at a time through shared memory; ``arrange`` cuts the copy's row."""
    x = te.placeholder((4, 8, 64), "float32", "x")
    sch = Schedule(te.create_prim_func([x, te.compute(x.shape, lambda *i: x(*i) * 2, "y")]))
    block = sch.get_sblock("y")
    matrix, row, _ = sch.get_loops(block)
    if bind:
        sch.bind(matrix, bind)
    copy = sch.cache_read(block, 0, "shared")
    sch.compute_at(copy, row)
    arrange(sch, sch.get_loops(copy)[-1])
    return sch, row


def vectorized(sch: Schedule, row: LoopRV) -> None:
    """Four neighbours at once."""
    _, vector = sch.split(row, [None, 4])
    sch.vectorize(vector)


def strided(sch: Schedule, row: LoopRV) -> None:
    """Four elements at once, 16 apart."""
    vector, place = sch.split(row, [4, None])
    sch.reorder(place, vector)
    sch.vectorize(vector)


def one_by_one(sch: Schedule, row: LoopRV) -> None:
    """Each element by itself, in the loop as it is."""


def written_out(sch: Schedule, row: LoopRV) -> None:
    """The same without a loop."""
    sch.unroll(row)


@T.prim_func(s_tir=True)
def under_an_if(x: T.Buffer((8, 64), "float32"), y: T.Buffer((8, 64), "float32")) -> None:
    """``y = 2 x``, whose copy is strided and stands under a condition."""
    x_shared = T.sblock_alloc_buffer((8, 64), scope="shared")
    for thread in T.thread_binding(16, thread="threadIdx.x"):
        for row in range(8):
            if row < 8:
                for lane in T.vectorized(4):
                    with T.sblock("x_shared"):
                        i, j = T.axis.remap("SS", [row, thread])
                        k = T.axis.spatial(4, lane)
                        x_shared[i, k * 16 + j] = x[i, k * 16 + j]
            for lane in range(4):
                with T.sblock("y"):
                    i = T.axis.spatial(8, row)
                    j = T.axis.spatial(64, lane * 16 + thread)
                    y[i, j] = x_shared[i, j] * 2.0


def conditional() -> Nest:
    """The schedule of that, and its loop over rows."""
    sch = Schedule(under_an_if)
    return sch, sch.get_loops(sch.get_sblock("y"))[1]


HAZARDS = {
    "strided vectors under a condition": (conditional, "x_shared", "consecutive bytes"),
    "gathered rows": (gathered, "table|take", "past their end"),
    "strided vectors": (lambda: doubled(strided), "x_shared", "consecutive bytes"),
    "element by element": (lambda: doubled(one_by_one), "x_shared", "one after the other by one thread"),
    "unrolled": (lambda: doubled(written_out), "x_shared", "one after the other by one thread"),
    "by blocks": (lambda: doubled(one_by_one, "blockIdx.x"), "x_shared", "one after the other by one thread"),
    "by nobody": (lambda: doubled(vectorized, ""), "x_shared", "no thread runs the copy"),
}


@pytest.mark.parametrize(("make", "block", "problem"), HAZARDS.values(), ids=HAZARDS)
def test_what_cp_async_gets_wrong_is_synchronous_or_refused_by_name(make: Callable[[], Nest], block, problem) -> None:
    sch, loop = make()
    before = sch.mod["main"].script()
    with pytest.raises(IllegalPipeline, match=f"{problem}.*block '({block}).*async_copy='auto'"):
        pipeline_loop(sch, loop, 3, True)
    assert sch.mod["main"].script() == before
    plan = pipeline_loop(sch, loop, 3)
    assert plan.async_stages == ()
    with pytest.raises(IllegalPipeline, match=problem):
        check_pipeline(sch, loop, plan.stage, plan.order, [0])
    assert re.search(rf"must be synchronous:\n  ({block})\S*: .*{problem}", explain_pipeline(sch, loop))
    sch.annotate(loop, "software_pipeline_async_stages", [0])  # as a hand would, unchecked
    assert re.search(rf"({block})\S*: must be synchronous: .*{problem}", explain_pipeline(sch, loop))


ALLOWED = {
    "whole tiles of gathered rows": (lambda: gathered(m=64), 4),
    "gathered rows, ragged along k alone": (lambda: gathered(m=64, k=100), 4),
    "vectors by one thread": (lambda: doubled(vectorized), 16),
    "vectors by one block": (lambda: doubled(vectorized, "blockIdx.x"), 16),
}


@pytest.mark.parametrize(("make", "width"), ALLOWED.values(), ids=ALLOWED)
def test_what_cp_async_gets_right_stays_asynchronous(make: Callable[[], Nest], width: int) -> None:
    sch, loop = make()
    assert pipeline_loop(sch, loop, 3, True).async_stages == (0,)
    assert f": cp.async of {width} bytes" in explain_pipeline(sch, loop)
    assert re.search(rf"cp_async_legacy(_pred)?_c[ag]_{width}_", cuda_text(sch))


@pytest.mark.emulator
def test_gathered_rows_are_read_where_they_are() -> None:
    """Indices were read past their end, which the emulator calls a fault."""
    sch, loop = gathered()
    pipeline_loop(sch, loop, 3)
    run, random = EmulatorBackend().load(lower_schedule(sch, HOPPER, "take")), np.random.default_rng(0)
    table, b = (random.integers(-2, 3, shape).astype("float32") for shape in ((40, 96), (96, 64)))
    picked, out = random.integers(0, 40, 50).astype("int32"), np.full((50, 64), np.nan, "float32")
    run(table, picked, b, out)
    assert np.array_equal(out, table[picked] @ b)


@pytest.mark.emulator
def test_strided_vectors_are_copied_element_by_element() -> None:
    sch, loop = doubled(strided, "blockIdx.x")
    pipeline_loop(sch, loop, 3)
    x = np.random.default_rng(0).standard_normal((4, 8, 64)).astype("float32")
    out = np.full_like(x, np.nan)
    EmulatorBackend().load(lower_schedule(sch, HOPPER, "strided"))(x, out)
    assert np.array_equal(out, 2 * x)


# Small dtypes

SMALL = ("int8", "uint8", "int16", "uint16", "bool", "float8_e4m3fn", "float8_e5m2")


def ragged(dtype: str, k: int = 100, n: int = 104, through_registers: bool = False) -> Nest:
    """A product whose last tiles are cut off."""
    a = te.placeholder((60, k), dtype, "A")
    return product(a, n, [a], through_registers)


@pytest.mark.parametrize("dtype", SMALL)
def test_ragged_tiles_of_small_elements_are_copied_in_vectors_that_cuda_has(dtype: str) -> None:
    """TVM wrote zeros as make_int2 of eight numbers."""
    sch, loop = ragged(dtype)
    pipeline_loop(sch, loop, 3)
    text = lower_schedule(sch, HOPPER, dtype).body
    calls = re.findall(r"make_(\w+?)(\d)\(([^()]*(?:\([^()]*\)[^()]*)*)\)", text)
    assert all(len(re.findall(r",(?![^(]*\))", arguments)) + 1 <= int(count) for _, count, arguments in calls)
    assert not re.search(r"\*\(u?int[24]\*\)\((A|B)_shared", text), "vectors of 8 and more"


@pytest.mark.sampled(4)
@pytest.mark.compiler
@pytest.mark.parametrize("dtype", ["int8", "int16", "bool", "float8_e4m3fn"])
def test_nvcc_takes_ragged_products_of_small_elements(dtype: str, compiler: Compiler) -> None:
    for k, n, through_registers in ((100, 104, False), (104, 128, True)):
        sch, loop = ragged(dtype, k, n, through_registers)
        pipeline_loop(sch, loop, 2, False if through_registers else "auto")
        assert compiled(lower_schedule(sch, HOPPER, dtype), compiler).cubin.data


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16"])
def test_ragged_products_of_small_integers_are_right_on_the_gpu(dtype: str) -> None:
    torch, random = pytest.importorskip("torch"), np.random.default_rng(0)
    a, b = (random.integers(-100, 100, shape).astype(dtype) for shape in ((60, 100), (100, 104)))
    for through_registers in (False, True):
        sch, loop = ragged(dtype, through_registers=through_registers)
        pipeline_loop(sch, loop, 3, False if through_registers else "auto")
        kernel = compiled(lower_schedule(sch, machine_for(gpu_arch()), dtype), require_compiler())
        left, right, out = (torch.from_numpy(x).cuda() for x in (a, b, np.full((60, 104), -1, "int32")))
        executable(kernel)["main"](left, right, out)
        assert np.array_equal(out.cpu().numpy(), a.astype("int32") @ b.astype("int32"))


def test_a_padded_copy_of_integers_is_no_cp_async_and_is_explained_so() -> None:
    """TVM looks for a zero that is a float."""
    a = te.placeholder((60, 100), "int32", "A")
    sch, loop = product(a, 128, [a])
    pipeline_loop(sch, loop, 3)
    told = explain_pipeline(sch, loop)
    assert "A_pad_shared: cp.async of 16 bytes, but ordinary copies where it pads" in told
    assert (
        re.findall(r"cp_async_legacy_(?:pred_)?", cuda_text(sch).rpartition("extern")[2]).count("cp_async_legacy_pred_")
        == 0
    )


ELEMENTWISE = {
    "moved": (lambda x, dtype: x, 16, 16),
    "added to itself": (lambda x, dtype: x + x, 16, 4),
    "with a constant": (lambda x, dtype: te.max(x, tirx.const(0, dtype)), 4, 4),
    "widened": (lambda x, dtype: x.astype("float32"), 4, 4),
    "to halves": (lambda x, dtype: x.astype("float16"), 8, 4),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_vectors_are_as_wide_as_tvm_can_write_them(name: str) -> None:
    change, *widths = ELEMENTWISE[name]

    def width(dtype: str) -> int:
        x = te.placeholder((8, 64), dtype, "x")
        sch = Schedule(te.create_prim_func([x, te.compute(x.shape, lambda *i: change(x(*i), dtype), "y")]))
        block = sch.get_sblock("y")
        return widest_vector(sch, block, sch.get_loops(block)[-1])

    assert [width(dtype) for dtype in ("int8", "float8_e4m3fn")] == widths


def test_rows_that_a_thread_copies_in_blocks_without_iterators_stay_synchronous() -> None:
    @T.prim_func(s_tir=True)
    def rows(x: T.Buffer((16, 64, 8), "float32"), y: T.Buffer((64,), "float32")):
        T.func_attr({"global_symbol": "main", "tirx.noalias": True})
        near = T.sblock_alloc_buffer((64, 8), "float32", scope="shared")
        for t in T.thread_binding(64, "threadIdx.x"):
            for k in range(16):
                for j in range(8):
                    with T.sblock("copy"):
                        T.reads(x[k, t, j])
                        T.writes(near[t, j])
                        near[t, j] = x[k, t, j]
                with T.sblock("use"):
                    T.reads(near[t, 0:8])
                    T.writes(y[t])
                    y[t] = near[t, 0] + near[t, 7]

    sch = Schedule(rows)
    loop = sch.get_loops(sch.get_sblock("copy"))[1]
    with pytest.raises(IllegalPipeline, match="one after the other by one thread"):
        pipeline_loop(sch, loop, 3, True)
    assert pipeline_loop(sch, loop, 3).async_stages == ()
    assert "cp.async" not in cuda_text(sch)
