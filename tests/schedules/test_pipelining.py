"""Pipelines on many loop nests: inferred, refused where TVM would be late or silently wrong, explained.

Each refusal stands beside what TVM 0.27 does with the same lists.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import tvm
from tvm import te
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV
from tvm.script import tirx as T

from support.schedules_on_cpu import TARGET, convolve, cuda_text, normal, run
from tensorir_ladder.harness.bandwidth import WORKLOADS
from tensorir_ladder.harness.build import main_loop
from tensorir_ladder.schedules.errors import IllegalPipeline
from tensorir_ladder.schedules.inspection import statements_under
from tensorir_ladder.schedules.loops import TiledLoops, bind_grid, bind_threads, flatten_contraction, tile_contraction
from tensorir_ladder.schedules.memory import (
    accumulate_in_registers,
    fetch_cooperatively,
    initialize_before,
    inline_data_movement,
    stage_in_shared,
)
from tensorir_ladder.schedules.passes import PIPELINE
from tensorir_ladder.schedules.pipeline import pipeline_loop
from tensorir_ladder.schedules.pipeline.checks import buffer_stages, check_pipeline
from tensorir_ladder.schedules.pipeline.explain import explain_pipeline
from tensorir_ladder.schedules.pipeline.lowering import required_tir_pipeline
from tensorir_ladder.schedules.pipeline.one_barrier import ONE_BARRIER as MARK
from tensorir_ladder.schedules.pipeline.pipelining import ASYNC, ORDER, STAGE, double_buffer, infer_pipeline
from tensorir_ladder.schedules.recipes import (
    BandwidthTile,
    Staging,
    spread_elements,
    spread_reduction,
    spread_rows,
    stage_contraction,
)
from tensorir_ladder.schedules.tiles import ThreadTile
from tensorir_ladder.schedules.workloads import (
    Matmul,
    batched_matmul,
    conv2d_nhwc,
    depthwise_conv2d_nhwc,
    gelu,
    matmul_bias_relu,
    row_sum,
    softmax,
)

TILE = ThreadTile(block=(32, 64, 16), thread=(4, 4))
M, N, K = 32, 64, 128  # eight k tiles, one block
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Nest:
    """A scheduled loop nest, the loop to pipeline, and what its function computes of which inputs."""

    sch: Schedule
    loop: LoopRV
    inputs: tuple[np.ndarray, ...]
    expected: np.ndarray

    def output(self) -> np.ndarray:
        """What the nest computes, run on the CPU."""
        return run(self.sch, *self.inputs, shape=self.expected.shape)

    def is_right(self) -> bool:
        """Whether that is what it should compute."""
        return bool(np.allclose(self.output(), self.expected, rtol=0, atol=TOLERANCE))

    def annotate(self, stage: list[int], order: list[int], asynchronous: list[int] | None = None) -> Nest:
        """Give the loop TVM's lists as they are, unchecked."""
        lists = {STAGE: stage, ORDER: order, ASYNC: asynchronous}
        for key, values in lists.items():
            if values:
                self.sch.annotate(self.loop, key, values)
        return self


def matmul(layout: str = "nn", k: int = K, **options: bool) -> Nest:
    """A matrix product, staged in shared memory."""
    problem = Matmul(M, N, k, layout=layout)
    a, b = normal(M, k), normal(*problem.b_shape)
    sch = Schedule(problem.prim_func())
    staged = stage_contraction(sch, sch.get_sblock("matmul"), TILE, vectorize=True, **options)
    return Nest(sch, staged.loops.k_outer, (a, b), a.astype(np.float64) @ (b if layout == "nn" else b.T))


def batched(k: int = K) -> Nest:
    """Two matrix products of one shape."""
    a, b = normal(2, M, k), normal(2, k, N)
    sch = Schedule(batched_matmul(2, Matmul(M, N, k)))
    staged = stage_contraction(sch, sch.get_sblock("matmul"), TILE, vectorize=True)
    return Nest(sch, staged.loops.k_outer, (a, b), a.astype(np.float64) @ b)


def convolution() -> Nest:
    """A convolution as implicit GEMM: nine k tiles of 16 channels."""
    data, weight = normal(1, 8, 8, 16), normal(3, 3, 16, 24)
    sch = Schedule(conv2d_nhwc(1, 8, 8, 16, 24))
    block = sch.get_sblock("conv2d")
    flatten_contraction(sch, block)
    staged = stage_contraction(sch, block, TILE, vectorize=True)
    return Nest(sch, staged.loops.k_outer, (data, weight), convolve(data, weight, 1, 1))


def bias_relu() -> Nest:
    """A matrix product with a fused epilogue, on ragged extents."""
    m, n, k = 33, 52, 116
    a, b, bias = normal(m, k), normal(k, n), normal(n)
    sch = Schedule(matmul_bias_relu(Matmul(m, n, k)))
    staged = stage_contraction(sch, sch.get_sblock("matmul"), TILE, vectorize=True)
    return Nest(sch, staged.loops.k_outer, (a, b, bias), np.maximum(a.astype(np.float64) @ b + bias, 0))


def row_sums() -> Nest:
    """The sum of each row: one copy, two statements, one thread to a row."""
    x, k = te.placeholder((32, K), name="x"), te.reduce_axis((0, K), name="k")
    sch = Schedule(te.create_prim_func([x, te.compute((32,), lambda i: te.sum(x[i, k], axis=k), name="sums")]))
    block = sch.get_sblock("sums")
    rows, reduction = sch.get_loops(block)
    tile, row = sch.split(rows, [None, 32])
    outer, _ = sch.split(reduction, [None, 16])
    bind_grid(sch, [tile])
    sch.bind(row, "threadIdx.x")
    accumulate_in_registers(sch, block, row)
    copy = stage_in_shared(sch, block, 0, outer)
    fetch_cooperatively(sch, copy, outer, (1, 32), vectorize=True)
    initialize_before(sch, block, outer)
    values = normal(32, K)
    return Nest(sch, outer, (values,), values.sum(axis=1, dtype=np.float64))


def depthwise() -> Nest:
    """A depthwise convolution, an output row at a time: the rows under the window are copied, padded."""
    sch = Schedule(depthwise_conv2d_nhwc(1, 8, 8, 32))
    block = sch.get_sblock("depthwise")
    _, rows, columns, channels, window_row, _ = sch.get_loops(block)
    tile, channel = sch.split(channels, [None, 16])
    sch.reorder(tile, columns, channel, rows, window_row)
    bind_grid(sch, [tile])
    bind_threads(sch, columns, channel)
    accumulate_in_registers(sch, block, rows)
    copy = stage_in_shared(sch, block, 0, rows)
    inline_data_movement(sch, copy)
    fetch_cooperatively(sch, copy, rows, (8, 16), vectorize=True)
    initialize_before(sch, block, window_row)
    data, weight = normal(1, 8, 8, 32), normal(3, 3, 32)
    padded = np.pad(data.astype(np.float64), ((0, 0), (1, 1), (1, 1), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))
    return Nest(sch, rows, (data, weight), np.einsum("nyxcij,ijc->nyxc", windows, weight))


STREAM = BandwidthTile(64, 2, 8)


def elementwise() -> Nest:
    """Gelu of a tensor of three dimensions."""
    sch, x = Schedule(gelu((4, 32, 128))), normal(4, 32, 128)
    loops = spread_elements(sch, sch.get_sblock("gelu"), STREAM, Staging())
    return Nest(sch, loops.tiles, (x,), WORKLOADS["gelu"].reference(np, x.astype(np.float64)))


def rows_across_threads() -> Nest:
    """The sum of each row, by a block of threads that combine theirs after the loop."""
    sch, x = Schedule(row_sum(3, 4096)), normal(3, 4096)
    chunks = spread_reduction(sch, sch.get_sblock("row_sum"), STREAM, Staging()).chunks
    return Nest(sch, chunks, (x,), x.sum(axis=1, dtype=np.float64))


def softmax_rows() -> Nest:
    """Softmax: a copy of the row, and two reductions across threads inside the loop."""
    sch, x = Schedule(softmax(13, 512)), normal(13, 512)
    reductions = [sch.get_sblock(name) for name in ("row_max", "exp_sum")]
    rows = spread_rows(sch, sch.get_sblock("softmax"), reductions, STREAM, Staging()).rows
    return Nest(sch, rows, (x,), WORKLOADS["softmax"].reference(np, x.astype(np.float64)))


def dequantised(vectorize: bool = False) -> Nest:
    """A matrix product whose first operand is halved on the way: copy, transform, copy, compute."""
    a, b, k = (
        te.placeholder((M, K), name="A"),
        te.placeholder((K, N), name="B"),
        te.reduce_axis((0, K), name="k"),
    )
    half = te.compute((M, K), lambda i, j: a[i, j] * te.const(0.5, "float32"), name="half")
    product = te.compute((M, N), lambda i, j: te.sum(half[i, k] * b[k, j], axis=k), name="matmul")
    sch = Schedule(te.create_prim_func([a, b, product]))
    block, transform = sch.get_sblock("matmul"), sch.get_sblock("half")
    rows, columns, reduction = sch.get_loops(block)
    tile_row, row, register_row = sch.split(rows, [None, 8, 4])
    tile_column, column, register_column = sch.split(columns, [None, 16, 4])
    outer, inner = sch.split(reduction, [None, 16])
    sch.reorder(tile_row, tile_column, row, column, outer, inner, register_row, register_column)
    bind_grid(sch, [tile_row, tile_column])
    sch.bind(row, "threadIdx.y")
    sch.bind(column, "threadIdx.x")
    accumulate_in_registers(sch, block, column)
    sch.set_scope(transform, 0, "shared")
    sch.compute_at(transform, outer, preserve_unit_loops=True)
    copies = [stage_in_shared(sch, transform, 0, outer), stage_in_shared(sch, block, 1, outer)]
    for copy in (*copies, transform):
        fetch_cooperatively(sch, copy, outer, (8, 16), vectorize=vectorize or copy is not transform)
    initialize_before(sch, block, outer)
    first, second = normal(M, K), normal(K, N)
    return Nest(sch, outer, (first, second), 0.5 * first.astype(np.float64) @ second)


def register_inner() -> tuple[Nest, LoopRV]:
    """A matrix product whose operands go on from shared memory to registers under k_inner; and that loop."""
    nest = matmul()
    update = nest.sch.get_sblock("matmul_update")
    inner = nest.sch.get_loops(update)[-3]
    for operand in (1, 2):
        nest.sch.compute_at(nest.sch.cache_read(update, operand, "local"), inner)
    return nest, inner


@T.prim_func(s_tir=True)
def running_sums(x: T.Buffer((8, 32), "float32"), y: T.Buffer((8, 32), "float32")):
    T.func_attr({"global_symbol": "main", "tirx.noalias": True})
    total = T.sblock_alloc_buffer((32,), scope="local")
    near = T.sblock_alloc_buffer((32,), scope="shared")
    for lane in range(32):
        with T.sblock("zero"):
            i = T.axis.spatial(32, lane)
            total[i] = T.float32(0)
    for step in range(8):
        for lane in range(32):
            with T.sblock("near"):
                k, i = T.axis.remap("SS", [step, lane])
                near[i] = x[k, i]
        for lane in range(32):
            with T.sblock("total"):
                i = T.axis.spatial(32, lane)
                total[i] = total[i] + near[i]
        for lane in range(32):
            with T.sblock("store"):
                k, i = T.axis.remap("SS", [step, lane])
                y[k, i] = total[i]


@T.prim_func(s_tir=True)
def last_and_double(x: T.Buffer((8, 32), "float32"), y: T.Buffer((8, 32), "float32")):
    T.func_attr({"global_symbol": "main", "tirx.noalias": True})
    near = T.sblock_alloc_buffer((32,), scope="shared")
    for step in range(8):
        for lane in range(32):
            with T.sblock("near"):
                k, i = T.axis.remap("SS", [step, lane])
                near[i] = x[k, i]
        for lane in range(32):
            with T.sblock("double"):
                k, i = T.axis.remap("SS", [step, lane])
                y[k, i] = near[i] * T.float32(2)
    for lane in range(32):
        with T.sblock("last"):
            i = T.axis.spatial(32, lane)
            y[7, i] = y[7, i] + near[i]


def outliving(function: tvm.tirx.PrimFunc, block: str, expected: Callable[[np.ndarray], np.ndarray]) -> Nest:
    """A TVMScript nest of eight steps."""
    sch, x = Schedule(function), normal(8, 32)
    return Nest(sch, sch.get_loops(sch.get_sblock(block))[0], (x,), expected(x.astype(np.float64)))


def prefix_sums() -> Nest:
    """Copy, add to a running sum, store the sum of every step."""
    return outliving(running_sums, "near", lambda x: x.cumsum(axis=0))


def doubled() -> Nest:
    """Copy, store twice the copy; after the loop the last copy is read once more."""
    return outliving(last_and_double, "near", lambda x: np.vstack([2 * x[:-1], 3 * x[-1:]]))


NESTS: dict[str, Callable[[], Nest]] = {
    "matmul nn": matmul,
    "matmul nt": lambda: matmul("nt"),
    "batched": batched,
    "conv2d": convolution,
    "bias relu": bias_relu,
    "row sums": row_sums,
    "register staged": lambda: matmul(through_registers=True),
    "product per tile": lambda: matmul(product_per_tile=True),
    "dequantised": dequantised,
    "depthwise": depthwise,
    "elementwise": elementwise,
    "rows across threads": rows_across_threads,
    "softmax": softmax_rows,
}
ROLES = {
    "matmul nn": ("copy", "copy", "compute"),
    "row sums": ("copy", "compute"),
    "register staged": ("load", "copy", "load", "copy", "compute"),
    "product per tile": ("copy", "copy", "transform", "compute", "epilogue"),
    "dequantised": ("copy", "transform", "copy", "compute"),
    "depthwise": ("copy", "transform", "compute", "epilogue"),
    "elementwise": ("copy", "compute"),
    "rows across threads": ("copy", "compute"),
    "softmax": ("copy", *["compute"] * 11),
}


@functools.cache
def unpipelined(name: str) -> tuple[np.ndarray, str]:
    """What a nest computes without a pipeline, and its CUDA."""
    plain = NESTS[name]()
    return plain.output(), cuda_text(plain.sch)


def waits(text: str) -> list[int]:
    """The counts of the wait_groups in CUDA or in an explanation, in order."""
    return [int(count) for count in re.findall(r"wait_group[_ ](\d+)", text)]


def shared_elements(text: str) -> dict[str, int]:
    """Elements of every shared buffer that a CUDA text declares."""
    return {name: int(size) for name, size in re.findall(r"__shared__ [^;]*?(\w+)_ptr\[(\d+)\]", text)}


def asynchronous_copies(text: str) -> int:
    """cp.async statements in a CUDA text."""
    return len(re.findall(r"ptx_cp_async_legacy", text))


def tvm_error(nest: Nest) -> str:
    """What TVM says when it compiles the nest for the GPU."""
    with pytest.raises(Exception) as caught:
        cuda_text(nest.sch)
    return str(caught.value)


# What is inferred, and what comes of it


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "stages"), [*((name, stages) for name in NESTS for stages in (2, 4)), ("matmul nn", 3), ("row sums", 3)]
)
def test_a_nest_is_pipelined_right(name: str, stages: int) -> None:
    (plain, plain_text), nest = unpipelined(name), NESTS[name]()
    plan = pipeline_loop(nest.sch, nest.loop, stages)
    assert plan.roles == ROLES.get(name, ("copy", "copy", "compute"))
    output = nest.output()
    assert np.array_equal(output, plain)
    assert np.allclose(output, nest.expected, rtol=0, atol=TOLERANCE)
    text = cuda_text(nest.sch)
    one_stage, elements = shared_elements(plain_text), shared_elements(text)
    kept = buffer_stages(nest.sch, nest.loop, plan.stage, plan.order)
    in_cuda = {buffer.replace(".", "_"): count for buffer, count in kept.items()}
    # Some share another's storage in one stage; some are written after the loop only.
    made = {b: elements[b] // one_stage[b] for b in elements if b in one_stage and b in in_cuda}
    assert made == {b: in_cuda[b] for b in made}
    copied = [label for label, role in zip(plan.statements, plan.roles) if role == "copy"]
    assert [kept[buffer] for buffer in copied] == [plan.stages] * len(copied)
    assert asynchronous_copies(text) == ((max(plan.stage) + 1) * len(copied) if plan.async_stages else 0)
    assert bool(plan.async_stages) == (name != "register staged")
    assert waits(explain_pipeline(nest.sch, nest.loop)) == waits(text)
    if plan.async_stages and "epilogue" not in plan.roles:
        assert waits(text) == [stages - 1, *range(stages - 2, -1, -1)]
    assert plan.pass_config == ({"tirx.use_async_copy": True} if plan.async_stages else {})


def test_a_vectorized_transform_beside_asynchronous_copies() -> None:
    """TVM fails on it, so that "auto" leaves cp.async out and True is refused."""
    nest = dequantised(vectorize=True)
    with pytest.raises(IllegalPipeline, match="vectors computed into shared memory"):
        infer_pipeline(nest.sch, nest.loop, 2, async_copy=True)
    assert pipeline_loop(nest.sch, nest.loop, 2).async_stages == ()
    assert waits(cuda_text(nest.sch)) == []
    assert nest.is_right()


def test_a_register_level_pipeline_under_k_inner() -> None:
    nest, inner = register_inner()
    plan = pipeline_loop(nest.sch, inner, 2, async_copy=False)
    assert plan.statements == ("A_shared_local", "B_shared_local", "matmul_update")
    assert (plan.roles, plan.stage) == (("copy", "copy", "compute"), (0, 0, 1))
    assert nest.is_right()
    assert re.search(r"float A_shared_local_ptr\[8\]", cuda_text(nest.sch)), "two stages of four registers"


def test_pipelines_at_two_levels() -> None:
    nest, inner = register_inner()
    pipeline_loop(nest.sch, inner, 2, async_copy=False)
    pipeline_loop(nest.sch, nest.loop, 3)
    assert nest.is_right()
    text = cuda_text(nest.sch)
    assert waits(text) == [2, 1, 0]
    assert asynchronous_copies(text) == 6


def test_the_inner_pipeline_comes_first() -> None:
    nest, inner = register_inner()
    pipeline_loop(nest.sch, nest.loop, 3)
    with pytest.raises(IllegalPipeline, match="pipeline the inner loop first"):
        pipeline_loop(nest.sch, inner, 2, async_copy=False)


def test_what_tvm_wants_for_two_levels() -> None:
    """The inner pipeline is rewritten first, to prologue, body and epilogue: three statements of the outer one."""
    nest, inner = register_inner()
    pipeline_loop(nest.sch, inner, 2, async_copy=False)
    nest.annotate([0, 0, 2, 2, 2], [0, 1, 2, 3, 4], [0])
    assert nest.is_right()
    assert waits(cuda_text(nest.sch)) == [2, 1, 0]


@pytest.mark.parametrize("name", NESTS)
def test_infer_check_and_explain_change_nothing(name: str) -> None:
    nest = NESTS[name]()
    before, script = nest.sch.mod, nest.sch.mod.script()
    for asynchronous in ("auto", False):
        plan = infer_pipeline(nest.sch, nest.loop, 3, asynchronous)
        check_pipeline(nest.sch, nest.loop, plan.stage, plan.order, plan.async_stages)
        buffer_stages(nest.sch, nest.loop, plan.stage, plan.order)
    assert "is not pipelined" in explain_pipeline(nest.sch, nest.loop)
    tvm.ir.assert_structural_equal(nest.sch.mod, before)
    assert nest.sch.mod.script() == script
    nest.annotate(list(plan.stage), list(plan.order))
    script = nest.sch.mod.script()
    explain_pipeline(nest.sch, nest.loop)
    assert nest.sch.mod.script() == script


@functools.cache
def batched_output(k: int) -> np.ndarray:
    """What two products compute without a pipeline."""
    return batched(k).output()


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_batched_matmul_pipelined_equals_unpipelined_bit_for_bit(stages: int) -> None:
    for k in [*(16 * count for count in (stages - 1, stages) if count), 16 * stages + 3]:
        nest = batched(k)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            plan = pipeline_loop(nest.sch, nest.loop, stages)
        assert plan.stages == min(stages, -(-k // 16))
        assert np.array_equal(nest.output(), batched_output(k)), f"k {k}"


@pytest.mark.parametrize("name", ["matmul nn", "row sums"])
def test_an_asynchronous_copy_that_cannot_be_is_refused(name: str) -> None:
    nest = NESTS[name]()
    assert infer_pipeline(nest.sch, nest.loop, 3, True).async_stages == (0,)
    assert infer_pipeline(nest.sch, nest.loop, 3, False).async_stages == ()
    with pytest.raises(IllegalPipeline, match="unknown async_copy"):
        infer_pipeline(nest.sch, nest.loop, 3, "perhaps")
    staged = NESTS["register staged"]()
    with pytest.raises(IllegalPipeline, match="cannot be asynchronous") as caught:
        infer_pipeline(staged.sch, staged.loop, 3, True)
    assert caught.value.block == "A_local"
    assert caught.value.loop


# Stages of buffers


@pytest.mark.parametrize(
    ("name", "stage", "order"),
    [
        ("matmul nn", [0, 0, 0], [0, 1, 2]),
        ("matmul nn", [0, 0, 1], [0, 1, 2]),
        ("matmul nn", [0, 0, 1], [1, 2, 0]),
        ("matmul nn", [0, 1, 2], [0, 1, 2]),
        ("matmul nn", [1, 1, 5], [0, 1, 2]),
        ("conv2d", [0, 0, 3], [1, 2, 0]),
        ("row sums", [0, 1], [1, 0]),
        ("row sums", [0, 1], [0, 1]),
        ("row sums", [2, 5], [1, 0]),
    ],
)
def test_buffer_stages_are_those_in_the_generated_code(name: str, stage: list[int], order: list[int]) -> None:
    plain, nest = NESTS[name](), NESTS[name]()
    check_pipeline(nest.sch, nest.loop, stage, order)
    kept = buffer_stages(nest.sch, nest.loop, stage, order)
    one_stage = shared_elements(cuda_text(plain.sch))
    elements = shared_elements(cuda_text(nest.annotate(stage, order).sch))
    assert {buffer: elements[buffer] // one_stage[buffer] for buffer in elements} == {b: kept[b] for b in elements}
    assert nest.is_right()


@pytest.mark.parametrize(("stage", "order"), [([0, 0, 0], [0, 1, 2]), ([0, 0, 1], [1, 2, 0])])
def test_stages_of_a_double_buffer(stage: list[int], order: list[int]) -> None:
    nest = matmul()
    double_buffer(nest.sch, nest.sch.get_sblock("A_shared"))
    assert shared_elements(cuda_text(nest.annotate(stage, order).sch))["A_shared"] == 2 * 32 * 16
    assert buffer_stages(nest.sch, nest.loop, stage, order)["A_shared"] == 2


# What is refused, beside what TVM does

REFUSED_BY_TVM = [
    # nest, stage, order, what TVM says, what check_pipeline says, the block it names
    (
        "matmul nn",
        [0, 0, 1, 2],
        [0, 1, 2],
        "pipeline_stages.size() == original_order.size() (4 vs. 3)",
        "one stage per",
    ),
    ("row sums", [0], [0, 1], "pipeline_stages.size() == original_order.size() (1 vs. 2)", "one stage per"),
    ("batched", [0, 0, 1], [0, 1], "pipeline_orders.size() == original_order.size() (2 vs. 3)", "one order per"),
    ("conv2d", [0, 0, 1], [0, 1, 2, 3], "pipeline_orders.size() == original_order.size() (4 vs. 3)", "one order per"),
    ("matmul nn", [0, 0, 1], [0, 1, 1], "cannot have the same order", "repeats or leaves out"),
    ("register staged", [0, 1, 0, 1, 2], [0, 0, 1, 2, 3], "cannot have the same order", "repeats or leaves out"),
    ("matmul nt", [0, 0, 1], [0, 1, 5], "out of bounds", "repeats or leaves out"),
    ("row sums", [0, 1], [0, 2], "out of bounds", "repeats or leaves out"),
    ("matmul nn", [1, 1, 0], [0, 1, 2], "src_info.stage <= dst_info.stage (1 vs. 0)", "runs in a later stage"),
    ("product per tile", [0, 0, 2, 2, 1], [0, 1, 2, 3, 4], "src_info.stage <= dst_info.stage", "runs in a later stage"),
    ("conv2d", [0, 0, 0], [1, 2, 0], "in the same stage of the software pipeline cannot be reordered", "same stage"),
    ("dequantised", [0, 0, 0, 1], [1, 0, 2, 3], "in the same stage of the software pipeline", "same stage"),
]
BLAMED = {
    "one stage per": None,
    "one order per": None,
    ("matmul nn", "repeats or leaves out"): "matmul_update",
    ("register staged", "repeats or leaves out"): "A_shared",
    ("matmul nt", "repeats or leaves out"): "matmul_update",
    ("row sums", "repeats or leaves out"): "sums_update",
    ("matmul nn", "runs in a later stage"): "matmul_update",
    ("product per tile", "runs in a later stage"): "matmul_update",
    ("conv2d", "same stage"): "conv2d_update",
    ("dequantised", "same stage"): "half",
}


@pytest.mark.parametrize(("name", "stage", "order", "late", "early"), REFUSED_BY_TVM)
def test_what_tvm_refuses_late_is_refused_by_name(
    name: str, stage: list[int], order: list[int], late: str, early: str
) -> None:
    nest = NESTS[name]()
    loop = str(nest.sch.get(nest.loop).loop_var.name)
    with pytest.raises(IllegalPipeline, match=early) as caught:
        check_pipeline(nest.sch, nest.loop, stage, order)
    assert (caught.value.loop, caught.value.block) == (loop, BLAMED.get((name, early), BLAMED.get(early)))
    assert caught.value.remedy
    said = tvm_error(nest.annotate(stage, order))
    assert late in said


ONE_STATEMENT = [(Matmul(M, N, K).prim_func(), "matmul"), (conv2d_nhwc(1, 8, 8, 4, 4), "conv2d")]


@pytest.mark.parametrize(("function", "block"), ONE_STATEMENT)
def test_a_body_of_one_statement_is_refused(function: tvm.tirx.PrimFunc, block: str) -> None:
    sch = Schedule(function)
    loop = sch.get_loops(sch.get_sblock(block))[-2]
    with pytest.raises(IllegalPipeline, match="one statement") as caught:
        check_pipeline(sch, loop, [0], [0])
    assert (caught.value.block, caught.value.loop) == (block, str(sch.get(loop).loop_var.name))
    assert "should be SeqStmt" in tvm_error(Nest(sch, loop, (), np.zeros(1)).annotate([0], [0]))


@pytest.mark.parametrize(("function", "block"), ONE_STATEMENT)
def test_a_body_of_one_block_is_refused_by_its_name(function: tvm.tirx.PrimFunc, block: str) -> None:
    sch = Schedule(function)
    with pytest.raises(IllegalPipeline, match="one statement") as caught:
        check_pipeline(sch, sch.get_loops(sch.get_sblock(block))[-1], [0], [0])
    assert caught.value.block == block


@pytest.mark.parametrize(
    ("name", "stage", "block"),
    [("matmul nn", [-1, -1, 0], "A_shared"), ("row sums", [-2, 0], "x_shared"), ("conv2d", [-1, 0, 0], None)],
)
def test_a_negative_stage_is_refused_and_wrong(name: str, stage: list[int], block: str | None) -> None:
    nest, order = NESTS[name](), list(range(len(stage)))
    with pytest.raises(IllegalPipeline, match="negative stage") as caught:
        check_pipeline(nest.sch, nest.loop, stage, order)
    assert caught.value.value == stage[0]
    assert caught.value.loop
    assert caught.value.block == (block or infer_pipeline(nest.sch, nest.loop, 2).statements[0])
    assert not nest.annotate(stage, order).is_right(), "TVM compiles it right by now"


@pytest.mark.parametrize("stages", [3, 4])
@pytest.mark.parametrize(("name", "block"), [("matmul nn", "matmul_update"), ("batched", "matmul_update")])
def test_compute_before_two_asynchronous_copies_is_refused(name: str, block: str, stages: int) -> None:
    """TVM counts two groups an iteration where it commits one: the data has not arrived."""
    nest, stage, order = NESTS[name](), [0, 0, stages - 1], [1, 2, 0]
    with pytest.raises(IllegalPipeline, match="ordered before 2 separate asynchronous copies") as caught:
        check_pipeline(nest.sch, nest.loop, stage, order, [0])
    assert caught.value.block == block
    assert caught.value.loop
    check_pipeline(nest.sch, nest.loop, stage, order)  # right without cp.async
    body, *epilogue = waits(cuda_text(nest.annotate(stage, order, [0]).sch))
    assert body == 2 * (stages - 2)  # too many: stages - 2 would be right
    assert epilogue == list(range(stages - 2, -1, -1))


@pytest.mark.parametrize("name", ["matmul nn", "conv2d"])
def test_compute_between_two_asynchronous_copies_is_refused(name: str) -> None:
    nest = NESTS[name]()
    with pytest.raises(IllegalPipeline, match="asynchronous cop"):
        check_pipeline(nest.sch, nest.loop, [0, 0, 3], [0, 2, 1], [0])


@pytest.mark.parametrize("name", ["matmul nn", "conv2d"])
def test_what_tvm_makes_of_compute_between_two_asynchronous_copies(name: str) -> None:
    """The count is right once the ring turns; before, it waits for nothing: 4 groups committed, 5 left in flight."""
    text = cuda_text(NESTS[name]().annotate([0, 0, 3], [0, 2, 1], [0]).sch)
    before_first_wait = text[: text.index("wait_group_")]
    assert before_first_wait.count("commit_group()") == 4
    assert waits(text)[0] == 5


@pytest.mark.parametrize("order", [[1, 0]])
def test_compute_before_one_asynchronous_copy_is_right(order: list[int]) -> None:
    nest = row_sums()
    check_pipeline(nest.sch, nest.loop, [0, 3], order, [0])
    assert waits(cuda_text(nest.annotate([0, 3], order, [0]).sch)) == [2, 2, 1, 0]
    assert waits(explain_pipeline(nest.sch, nest.loop)) == [2, 2, 1, 0]


@pytest.mark.parametrize(
    ("make", "stage", "order", "block"),
    [
        (prefix_sums, [0, 0, 1], [0, 1, 2], "store"),
        (prefix_sums, [0, 1, 3], [0, 1, 2], "store"),
        (doubled, [0, 1], [0, 1], "double"),
        (doubled, [0, 2], [1, 0], "double"),
    ],
)
def test_a_buffer_that_outlives_the_loop_has_one_stage(
    make: Callable[[], Nest], stage: list[int], order: list[int], block: str
) -> None:
    nest = make()
    with pytest.raises(IllegalPipeline, match="outlives the loop and has one stage") as caught:
        check_pipeline(nest.sch, nest.loop, stage, order)
    assert (caught.value.block, caught.value.loop) == (block, "step")
    assert not nest.annotate(stage, order).is_right(), "TVM compiles it right by now"


@pytest.mark.parametrize(
    ("make", "stage", "order"),
    [
        (prefix_sums, [0, 1, 1], [0, 1, 2]),
        (prefix_sums, [0, 1, 2], [0, 2, 1]),
        (prefix_sums, [0, 2, 2], [0, 1, 2]),
        (doubled, [0, 0], [0, 1]),
        (doubled, [0, 1], [1, 0]),
    ],
)
def test_a_single_stage_read_in_time_is_accepted_and_right(
    make: Callable[[], Nest], stage: list[int], order: list[int]
) -> None:
    nest = make()
    check_pipeline(nest.sch, nest.loop, stage, order)
    assert nest.annotate(stage, order).is_right()


def partitioned(name: str) -> Nest:
    """A nest whose computation is cut in two by loop_partition, which wraps the parts in blocks without regions."""
    nest = NESTS[name]()
    update = nest.sch.get_sblock("matmul_update")
    nest.sch.loop_partition(nest.sch.get_loops(update)[-3], [8, None])
    return nest


@pytest.mark.parametrize("name", ["matmul nn", "batched"])
@pytest.mark.parametrize(("stage", "order"), [([0, 0, 2], [0, 1, 2]), ([0, 0, 2, 2], [0, 1, 2, 3])])
def test_blocks_without_regions_are_refused(name: str, stage: list[int], order: list[int]) -> None:
    nest = partitioned(name)
    with pytest.raises(IllegalPipeline, match="declares no writes") as caught:
        check_pipeline(nest.sch, nest.loop, stage, order, [0])
    assert "matmul_update_k_1" in caught.value.block
    assert caught.value.loop == "k_0"


@pytest.mark.parametrize("name", ["matmul nn", "batched"])
def test_what_tvm_makes_of_blocks_without_regions(name: str) -> None:
    """It sees no dependence, and gives the copies neither stages nor waits."""
    nest = partitioned(name)
    plan = infer_pipeline(nest.sch, nest.loop, 3)
    assert "(3 vs. 4)" in tvm_error(nest.annotate(list(plan.stage), list(plan.order), [0]))
    nest = partitioned(name).annotate([0, 0, 2, 2], [0, 1, 2, 3], [0])
    text = cuda_text(nest.sch)
    assert asynchronous_copies(text) > 0
    assert waits(text) == []


@pytest.mark.parametrize(("name", "count"), [("matmul nn", 3), ("row sums", 2)])
@pytest.mark.parametrize("number", [1, 7, -1])
def test_an_asynchronous_stage_that_no_statement_has_is_refused(name: str, count: int, number: int) -> None:
    nest, stage, order = NESTS[name](), [0] * (count - 1) + [2], list(range(count))
    with pytest.raises(IllegalPipeline, match="no statement has this asynchronous stage") as caught:
        check_pipeline(nest.sch, nest.loop, stage, order, [number])
    assert caught.value.value == number
    assert caught.value.loop
    text = cuda_text(nest.annotate(stage, order, [number]).sch)
    assert (asynchronous_copies(text), waits(text)) == (0, []), "TVM ignores it"


@pytest.mark.parametrize(("name", "count"), [("matmul nn", 3), ("row sums", 2)])
def test_more_stages_than_iterations_warn(name: str, count: int) -> None:
    nest, order = NESTS[name](), list(range(count))
    with pytest.warns(UserWarning, match="21 stages of .* of 8 iterations") as caught:
        check_pipeline(nest.sch, nest.loop, [0] * (count - 1) + [20], order)
    assert len(caught) == count - 1
    assert nest.annotate([0] * (count - 1) + [20], order).is_right()


@pytest.mark.parametrize(("name", "copies"), [("matmul nn", ("A_shared", "B_shared")), ("row sums", ("x_shared",))])
def test_a_double_buffer_without_effect_warns(name: str, copies: tuple[str, ...]) -> None:
    plain, nest = NESTS[name](), NESTS[name]()
    for copy in copies:
        double_buffer(nest.sch, nest.sch.get_sblock(copy))
    with pytest.warns(UserWarning, match="double_buffer_scope on .* has no effect") as caught:
        pipeline_loop(nest.sch, nest.loop, 3)
    assert [re.search(r"'(\w+)'", str(warning.message)).group(1) for warning in caught] == list(copies)
    pipeline_loop(plain.sch, plain.loop, 3)
    assert cuda_text(nest.sch) == cuda_text(plain.sch)


# What is explained


@pytest.mark.parametrize("stages", [2, 3, 4, 5])
def test_the_explanation_matches_the_generated_code(stages: int) -> None:
    nest = matmul()
    pipeline_loop(nest.sch, nest.loop, stages)
    text, code = explain_pipeline(nest.sch, nest.loop), cuda_text(nest.sch)
    head, table, times, pseudo_code, preflight = text.split("\n\n")
    assert "8 iterations" in head
    assert head.endswith(f"0 to {stages - 1}")
    header, *rows = [re.split(r"\s{2,}", line) for line in table.splitlines()]
    assert header == ["statement", "pipeline stage", "order", "async", "writes", "stages", "bytes per iteration"]
    assert rows == [
        ["A_shared", "0", "0", "yes", "A_shared (shared)", str(stages), str(32 * 16 * 4)],
        ["B_shared", "0", "1", "yes", "B_shared (shared)", str(stages), str(16 * 64 * 4)],
        ["matmul_update", str(stages - 1), "2", "no", "matmul_local (local)", "1", "–"],
    ]
    time, first, _, compute = [line.split() for line in times.splitlines()]
    assert time == ["time", *(f"T{step + 1}" for step in range(stages + 2))]
    assert first == ["A_shared", *map(str, range(stages + 2)), "…"]
    assert compute == ["matmul_update", "0", "1", "2", "…"]
    column = times.splitlines()[0].index(f"T{stages}")
    assert times.splitlines()[3][column] == "0", "the first tile is computed once the ring is full"
    prologue, rest = pseudo_code.split("body: ")
    body, epilogue = rest.split("epilogue:")
    assert body.startswith(f"for k_0 in {stages - 1} .. 7:")
    assert (waits(prologue), waits(body)) == ([], [stages - 1])
    assert waits(epilogue) == list(range(stages - 2, -1, -1))
    assert waits(pseudo_code) == waits(code)
    assert pseudo_code.count("commit_group") == code.count("commit_group()") == stages
    assert pseudo_code.count("barrier") == code.count("__syncthreads()")
    assert len(re.findall(r"matmul_update\[", pseudo_code)) == len(re.findall(r"for \(int k_1\w* = 0", code))
    assert preflight.count("cp.async of 16 bytes") == 2


@pytest.mark.parametrize("order", [[0, 1, 2], [1, 2, 0]])
def test_barriers_of_a_synchronous_pipeline(order: list[int]) -> None:
    nest = matmul().annotate([0, 0, 3], order)
    assert explain_pipeline(nest.sch, nest.loop).count("barrier") == cuda_text(nest.sch).count("__syncthreads()")


def test_the_explanation_of_a_loop_shorter_than_the_pipeline_has_no_body() -> None:
    nest = matmul(k=32)
    assert "body: none" in explain_pipeline(nest.annotate([0, 0, 3], [0, 1, 2]).sch, nest.loop)
    assert nest.is_right()


def widened(tensor: te.Tensor) -> te.Tensor:
    """A tensor in float32."""
    return te.compute(tensor.shape, lambda i, j: tensor[i, j].astype("float32"), name=f"wide_{tensor.op.name}")


def half_precision(vectorize: bool, convert: bool) -> Nest:
    """A float16 product; ``convert`` stages operands already as float32, ``vectorize`` widens the copies."""
    a, b = te.placeholder((M, K), "float16", name="A"), te.placeholder((K, N), "float16", name="B")
    k = te.reduce_axis((0, K), name="k")
    inputs = [a, b]
    if convert:
        a, b = widened(a), widened(b)
    product = te.compute(
        (M, N), lambda i, j: te.sum(a[i, k].astype("float32") * b[k, j].astype("float32"), k), "matmul"
    )
    sch = Schedule(te.create_prim_func([*inputs, product]))
    staged = stage_contraction(sch, sch.get_sblock("matmul"), TILE, vectorize=vectorize)
    values = [normal(M, K).astype(np.float16), normal(K, N).astype(np.float16)]
    return Nest(sch, staged.loops.k_outer, tuple(values), values[0].astype(np.float64) @ values[1])


@pytest.mark.parametrize(
    ("vectorize", "convert", "because"),
    [
        (False, True, "it computes or converts on the way"),
        (True, True, "it computes or converts on the way"),
        (False, False, "2 bytes a thread is none of 4, 8, 16"),
    ],
)
def test_the_preflight_says_why_there_is_no_cp_async(vectorize: bool, convert: bool, because: str) -> None:
    nest = half_precision(vectorize, convert).annotate([0, 0, 2], [0, 1, 2], [0])
    lines = [line for line in explain_pipeline(nest.sch, nest.loop).splitlines() if "no cp.async, because" in line]
    assert len(lines) == 2
    assert all(because in line for line in lines)
    assert asynchronous_copies(cuda_text(nest.sch)) == 0
    assert nest.is_right()


def test_the_preflight_of_wide_half_precision_copies() -> None:
    nest = half_precision(True, False)
    plan = pipeline_loop(nest.sch, nest.loop, 3)
    assert plan.async_stages == (0,)
    text = explain_pipeline(nest.sch, nest.loop)
    assert "no cp.async" not in text
    widths = set(map(int, re.findall(r"cp\.async of (\d+) bytes", text)))
    assert widths == set(map(int, re.findall(r"ptx_cp_async_legacy_c[ag]_(\d+)", cuda_text(nest.sch))))


def test_a_conversion_is_never_made_asynchronous_by_itself() -> None:
    nest = half_precision(True, True)
    assert infer_pipeline(nest.sch, nest.loop, 3).async_stages == ()
    with pytest.raises(IllegalPipeline, match="cannot be asynchronous"):
        infer_pipeline(nest.sch, nest.loop, 3, True)


# One barrier instead of two, and the ring written out

TWO_BARRIERS = {  # the block that cannot do with one, and why
    "register staged": ("A_local", "needs asynchronous copies"),
    "dequantised": ("half", "takes a barrier of its own"),
    "elementwise": ("x_reindex_shared_local+gelu+gelu_reindex", "under a vectorized loop cannot be hidden"),
    "rows across threads": ("x_shared_local+row_sum_rf", "under a vectorized loop cannot be hidden"),
    "softmax": ("row_max.rf_local_shared", "takes a barrier of its own"),
}
ONE_BARRIER = [name for name in NESTS if name not in TWO_BARRIERS]
FORMS = {"one barrier": (True, False), "unrolled ring": (False, True), "both": (True, True)}  # one_barrier, unroll_ring


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "form"),
    [(name, form) for name in NESTS for form in FORMS if name in ONE_BARRIER or form == "unrolled ring"],
)
def test_the_forms_of_a_ring_compute_the_same_bits(name: str, form: str) -> None:
    (plain, _), (one_barrier, unroll_ring) = unpipelined(name), FORMS[form]
    for stages in (1, 2, 3, 5) if (name, form) == ("matmul nn", "both") else (3,):
        nest = NESTS[name]()
        plan = pipeline_loop(nest.sch, nest.loop, stages, one_barrier=one_barrier, unroll_ring=unroll_ring)
        assert plan.stages == stages
        assert np.array_equal(nest.output(), plain)


@pytest.mark.filterwarnings("ignore:.*more would stay empty")
@pytest.mark.parametrize("k", [1, 32, 48, 64, 90])
def test_the_forms_of_a_ring_at_short_and_ragged_depths(k: int) -> None:
    """1, stages − 1, stages and stages + 1 k tiles, and some that end inside a tile."""
    plain = matmul(k=k).output()
    for one_barrier, unroll_ring in FORMS.values() if k in (1, 90) else [FORMS["both"]]:
        nest = matmul(k=k)
        pipeline_loop(nest.sch, nest.loop, 3, one_barrier=one_barrier, unroll_ring=unroll_ring)
        assert np.array_equal(nest.output(), plain)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", ONE_BARRIER)
def test_one_barrier_has_one_barrier_and_as_many_copies_in_flight(name: str, stages: int) -> None:
    two, one = NESTS[name](), NESTS[name]()
    pipeline_loop(two.sch, two.loop, stages)
    plan = pipeline_loop(one.sch, one.loop, stages, one_barrier=True)
    assert plan.roles[:2] == ("copy", "gate")
    assert plan.statements[1] == "arrived"
    texts = [cuda_text(nest.sch) for nest in (two, one)]
    assert [main_loop(text).count("__syncthreads()") for text in texts] == [2, 1]
    assert asynchronous_copies(texts[0]) == asynchronous_copies(texts[1])
    assert shared_elements(texts[0]) == shared_elements(texts[1])
    body = main_loop(texts[1])
    places = [body.index(word) for word in ("wait_group", "__syncthreads", "cp_async_legacy", "pipeline_read")]
    assert places == sorted(places), "wait, barrier, copies, arithmetic"
    assert waits(body) == [stages - 2]
    explained = explain_pipeline(one.sch, one.loop)
    assert explained[explained.index("body:") : explained.index("epilogue:")].count("barrier") == 1
    assert waits(explained) == waits(texts[1])


def test_one_barrier_at_two_levels() -> None:
    nest, inner = register_inner()
    pipeline_loop(nest.sch, inner, 2, async_copy=False)
    plan = pipeline_loop(nest.sch, nest.loop, 3, one_barrier=True)
    assert plan.roles == ("copy", "gate", "compute", "compute", "compute")
    assert nest.is_right()
    text = cuda_text(nest.sch)
    assert main_loop(text).count("__syncthreads()") == 1
    assert waits(text) == [1, 1, 0]


@pytest.mark.parametrize("stages", [2, 3, 4, 6])
def test_an_unrolled_ring_has_constant_stages(stages: int) -> None:
    rolled, unrolled = matmul(k=20 * 16), matmul(k=20 * 16)
    pipeline_loop(rolled.sch, rolled.loop, stages)
    plan = pipeline_loop(unrolled.sch, unrolled.loop, stages, unroll_ring=True)
    with tvm.transform.PassContext(config=plan.pass_config):
        text = tvm.compile(unrolled.sch.mod, TARGET, tir_pipeline=plan.tir_pipeline).mod.imports[0].inspect_source()
    text = text[text.rfind('extern "C"') :]
    number = re.compile(rf"% {stages}\)|& {stages - 1}\)")
    assert number.search(main_loop(cuda_text(rolled.sch)))
    turn = main_loop(text)
    assert re.match(rf"\s*for \(int turn = 0; turn < {(20 - stages + 1) // stages};", turn)
    assert waits(turn) == [stages - 1] * stages
    shared = [line for line in turn.splitlines() if "shared_ptr" in line]
    assert not any(number.search(line) for line in shared if stages != 4), "4 lanes share a row of A: & 3 there too"
    assert len(waits(text)) == stages + (20 - stages + 1) % stages + stages - 1, "a turn, what remains, the epilogue"


def test_the_pipeline_that_unrolls_is_named_where_it_is_needed() -> None:
    nest = matmul()
    assert pipeline_loop(nest.sch, nest.loop, 3).tir_pipeline == required_tir_pipeline(nest.sch.mod) == "s_tir"
    plan = pipeline_loop(nest.sch, nest.loop, 3, unroll_ring=True)
    assert plan.tir_pipeline == required_tir_pipeline(nest.sch.mod) == PIPELINE


@pytest.mark.parametrize("name", TWO_BARRIERS)
def test_one_barrier_is_refused_where_two_are_needed(name: str) -> None:
    (block, reason), nest = TWO_BARRIERS[name], NESTS[name]()
    before = nest.sch.mod["main"].script()
    with pytest.raises(IllegalPipeline, match=f"{reason}.*'{re.escape(block)}'"):
        pipeline_loop(nest.sch, nest.loop, 3, one_barrier=True)
    assert nest.sch.mod["main"].script() == before


@pytest.mark.parametrize("name", ["matmul nn", "row sums"])
@pytest.mark.parametrize(
    ("stage", "order", "asynchronous"),
    [
        ([0, 2, 2], [0, 1, 2], [0]),  # copies first: over what slow threads still read
        ([0, 2, 2], [1, 2, 0], [0]),  # arithmetic before the gate
        ([0, 2, 2], [1, 0, 2], []),  # copies that nobody waits for
    ],
)
def test_hidden_reads_without_a_barrier_before_the_copies_are_refused(name, stage, order, asynchronous) -> None:
    """TVM compiles each of them, with no barrier between reads and copies."""
    nest = NESTS[name]()
    pipeline_loop(nest.sch, nest.loop, 3, one_barrier=True)
    reader = infer_pipeline(nest.sch, nest.loop, 3).statements[-1]
    with pytest.raises(IllegalPipeline, match=f"hidden from TVM.*'{reader}'.*one_barrier=True"):
        check_pipeline(nest.sch, nest.loop, stage, order, asynchronous)
    for key in (STAGE, ORDER, ASYNC):
        nest.sch.unannotate(nest.loop, key)
    body = main_loop(cuda_text(nest.annotate(stage, order, asynchronous).sch))
    copy = body.index("cp_async_legacy" if asynchronous else "shared_ptr +")
    if order[0] == 0:
        assert "__syncthreads" not in body[:copy]
    assert body.count("__syncthreads()") <= 1


def test_a_gate_stays_and_keeps_its_pipeline() -> None:
    nest = matmul()
    pipeline_loop(nest.sch, nest.loop, 3, one_barrier=True)
    assert pipeline_loop(nest.sch, nest.loop, 4).stage == (0, 3, 3)
    assert nest.is_right()
    for arguments in ({"stages": 1}, {"async_copy": False}):
        with pytest.raises(IllegalPipeline, match="one barrier per iteration needs asynchronous copies"):
            pipeline_loop(nest.sch, nest.loop, **arguments)


def loops_in_tiles(columns: int) -> tuple[Schedule, TiledLoops, SBlockRV, tuple[np.ndarray, np.ndarray]]:
    """A product in tiles, rows over the grid, its operands in shared memory; column tiles are an ordinary loop."""
    a, b = normal(M, K), normal(K, columns)
    sch = Schedule(Matmul(M, columns, K).prim_func())
    block = sch.get_sblock("matmul")
    loops = tile_contraction(sch, *sch.get_loops(block), TILE)
    bind_grid(sch, [loops.block_row])
    bind_threads(sch, loops.thread_row, loops.thread_column)
    write_back = accumulate_in_registers(sch, block, loops.thread_column)
    for operand in (0, 1):
        copy = stage_in_shared(sch, block, operand, loops.k_outer)
        fetch_cooperatively(sch, copy, loops.k_outer, TILE.threads, vectorize=True)
    initialize_before(sch, block, loops.k_outer)
    return sch, loops, write_back, (a, b)


def tile_after_tile() -> Nest:
    """A block computes four tiles one after the other: the k loop inside a loop that is bound to nothing."""
    sch, loops, _, (a, b) = loops_in_tiles(4 * N)
    return Nest(sch, loops.k_outer, (a, b), a.astype(np.float64) @ b)


def result_through_shared() -> Nest:
    """The result goes through shared memory, which TVM lays over an operand's."""
    sch, loops, write_back, (a, b) = loops_in_tiles(N)
    store = sch.cache_write(write_back, 0, "shared")
    sch.reverse_compute_at(store, loops.block_row)
    fetch_cooperatively(sch, store, loops.block_row, TILE.threads)
    return Nest(sch, loops.k_outer, (a, b), a.astype(np.float64) @ b)


@pytest.mark.parametrize("nest_of", [tile_after_tile, result_through_shared])
def test_threads_meet_behind_a_loop_whose_reads_are_hidden(nest_of: Callable[[], Nest]) -> None:
    """What comes next writes the memory that slow threads still read, and TVM cannot see that."""
    nest = nest_of()
    pipeline_loop(nest.sch, nest.loop, 3, one_barrier=True)
    assert nest.is_right()
    behind = cuda_text(nest.sch).rsplit("pipeline_read_float32((", 1)[1].partition(";")[2]
    stored = re.search(r"\w+_ptr\[", behind)
    assert -1 < behind.find("__syncthreads()") < stored.start(), "before anything is stored"


@pytest.mark.parametrize("name", ["matmul nn", "row sums", "conv2d"])
def test_hidden_reads_of_a_single_stage_are_refused(name: str) -> None:
    """Readers one stage behind and ordered first need one stage; then the copies fill what they still read."""
    nest = NESTS[name]()
    pipeline_loop(nest.sch, nest.loop, 2, one_barrier=True)
    stage, order = [0, 1, 1], [2, 0, 1]
    with pytest.raises(IllegalPipeline, match=r"hidden from TVM.*two stages"):
        check_pipeline(nest.sch, nest.loop, stage, order, [0])
    for key in (STAGE, ORDER, ASYNC):
        nest.sch.unannotate(nest.loop, key)
    body = main_loop(cuda_text(nest.annotate(stage, order, [0]).sch))
    between = body[body.rindex("pipeline_read_float32((") : body.rindex("cp_async_legacy")]
    assert "__syncthreads" not in between, "no barrier between the reads and the copies over them"


@pytest.mark.parametrize("nest_of", [doubled, NESTS["elementwise"]])
def test_a_refused_pipeline_leaves_the_schedule_as_it_was(nest_of: Callable[[], Nest]) -> None:
    nest = nest_of()
    if nest_of is not doubled:
        pipeline_loop(nest.sch, nest.loop, 3)
    before = nest.sch.mod["main"].script()
    with pytest.raises(IllegalPipeline):
        pipeline_loop(nest.sch, nest.loop, 3, one_barrier=True)
    assert nest.sch.mod["main"].script() == before


def test_lists_of_one_barrier_without_its_gate_are_not_lowered() -> None:
    """As a replayed trace leaves them."""
    nest = matmul()
    nest.annotate([0, 2, 2], [1, 0, 2], [0])
    nest.sch.annotate(nest.loop, MARK, 1)
    with pytest.raises(IllegalPipeline, match="has no gate"):
        required_tir_pipeline(nest.sch.mod)


@pytest.mark.parametrize("name", ["matmul nn", "row sums"])
def test_only_stage_0_can_be_asynchronous(name: str) -> None:
    nest = NESTS[name]()
    count = len(statements_under(nest.sch, nest.loop))
    stage, order = [1] * (count - 1) + [3], list(range(count))
    with pytest.raises(IllegalPipeline, match="asynchronous copies of stage 0 only"):
        check_pipeline(nest.sch, nest.loop, stage, order, [1])
    assert "async" in tvm_error(nest.annotate(stage, order, [1]))


@T.prim_func(s_tir=True)
def _rows_of_any_length(a: T.handle, b: T.handle) -> None:
    n = T.int32()
    A = T.match_buffer(a, (16, n), "float32")
    B = T.match_buffer(b, (16, n), "float32")
    for row in range(16):
        with T.sblock("row"):
            vrow = T.axis.spatial(16, row)
            staged = T.sblock_alloc_buffer((n,), "float32", scope="shared")
            for i in range(n):
                with T.sblock("copy"):
                    vi = T.axis.spatial(n, i)
                    staged[vi] = A[vrow, vi]
            for i in range(n):
                with T.sblock("twice"):
                    vi = T.axis.spatial(n, i)
                    B[vrow, vi] = staged[vi] * T.float32(2)


def test_what_an_iteration_fills_may_be_known_at_run_time_only() -> None:
    sch = Schedule(_rows_of_any_length)
    loop = sch.get_loops(sch.get_sblock("row"))[0]
    with pytest.raises(IllegalPipeline, match="'i'"):
        pipeline_loop(sch, loop, 2)
    sch.annotate(loop, STAGE, [0, 1])
    sch.annotate(loop, ORDER, [0, 1])
    assert "n * 4" in explain_pipeline(sch, loop)
