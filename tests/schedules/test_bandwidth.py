"""Schedule functions for workloads bound by memory: right at any shape and depth, and refused by name."""

from __future__ import annotations

import re
import warnings

import numpy as np
import pytest
import tvm
from tvm import te
from tvm.s_tir import Schedule

from support.schedules_on_cpu import cuda_text
from tensorir_ladder.harness.bandwidth import WORKLOADS, Workload
from tensorir_ladder.harness.execution import compile_serial
from tensorir_ladder.harness.machines import machine_for
from tensorir_ladder.kernels.codegen.toolchain import Compiler, compile_cubin
from tensorir_ladder.schedules import workloads
from tensorir_ladder.schedules.errors import IllegalSchedule, IllegalWorkload
from tensorir_ladder.schedules.pipeline import infer_pipeline, pipeline_loop, required_pass_config
from tensorir_ladder.schedules.recipes import BandwidthTile, Staging, spread_elements, spread_reduction, spread_rows
from tensorir_ladder.schedules.workloads import Matmul

TILE = BandwidthTile(threads=32, vectors=2, tiles=3)
DEPTHS = (None, 1, 2, 4)  # None: direct, without shared memory
FEW = (None, 1, 3)
# Blocks with fewer tiles than others, rows of no whole vectors, less than a tile, one row, one column.
SHAPES = {
    "scale_shift": [((5, 6, 20), DEPTHS), ((33, 17), FEW), ((7,), FEW)],
    "gelu": [((500,), DEPTHS), ((5, 6, 6), FEW)],
    "row_sum": [((3, 1001), DEPTHS), ((5, 3), FEW), ((1, 1), FEW)],
    "softmax": [((7, 130), DEPTHS), ((1, 1001), FEW), ((5, 3), FEW)],
}


def scheduled(name: str, shape: tuple[int, ...], stages: int | None, dtype: str = "float32") -> Schedule:
    """A workload, direct or staged and pipelined; fewer tiles than stages are no reason to warn here."""
    kind = WORKLOADS[name]
    sch = Schedule(kind.function(shape, dtype))
    loop = kind.schedule(sch, TILE, Staging(stages) if stages else None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        if stages:
            pipeline_loop(sch, loop, stages)
    return sch


def output(sch: Schedule, kind: Workload, x: np.ndarray) -> np.ndarray:
    """What a schedule computes on the CPU, into an output full of NaN."""
    y = tvm.runtime.tensor(np.full(x.shape[: kind.output_dimensions], np.nan, x.dtype))
    compile_serial(sch.mod)["main"](tvm.runtime.tensor(x), y)
    return y.numpy()


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "shape", "depths", "dtype"),
    [(name, *case, "float32") for name, cases in SHAPES.items() for case in cases]
    + [(name, cases[0][0], (None, 1, 2), "float16") for name, cases in SHAPES.items()],
    ids=str,
)
def test_a_stream_is_right_and_the_same_at_every_depth(
    name: str, shape: tuple[int, ...], depths: tuple[int | None, ...], dtype: str
) -> None:
    kind = WORKLOADS[name]
    x = (2 * np.random.default_rng(1).standard_normal(shape)).astype(dtype)
    outputs = [output(scheduled(name, shape, stages, dtype), kind, x) for stages in depths]
    exact = kind.reference(np, x.astype(np.float64))
    unit = np.finfo(dtype).eps
    np.testing.assert_allclose(outputs[0], exact, rtol=2 * unit, atol=unit * max(1.0, np.abs(exact).max()) * 8)
    if name == "softmax":
        np.testing.assert_allclose(outputs[-1].astype(np.float64).sum(1), 1, atol=unit + 1e-6)
    for staged in outputs[2:]:
        np.testing.assert_array_equal(staged, outputs[1])


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize(
    ("name", "shape"), [("scale_shift", (12288,)), ("row_sum", (2, 2048)), ("softmax", (12, 512))], ids=str
)
def test_the_generated_code_has_the_stages_and_waits(name: str, shape: tuple[int, ...], stages: int) -> None:
    kind, tile = WORKLOADS[name], BandwidthTile(64, 2, 6)
    sch = Schedule(kind.function(shape, "float32"))
    loop = kind.schedule(sch, tile, Staging(stages))
    plan = pipeline_loop(sch, loop, stages)
    text = cuda_text(sch)
    made = min(stages, {"row_sum": 4}.get(name, 6))
    assert plan.stages == made
    assert plan.stage[0] == 0
    assert set(plan.stage[1:]) == {made - 1}
    assert len(re.findall(r"ptx_cp_async_legacy_c[ag]_16", text)) == made
    waits = [int(count) for count in re.findall(r"wait_group_(\d+)", text)]
    assert waits == list(range(made - 1, -1, -1))[: len(waits)]
    assert waits[-1] == 0


def test_softmax_reads_its_row_in_one_stage() -> None:
    """The maximum is a result, but the row is read after it: a later stage would hold each tile for longer."""
    sch = Schedule(workloads.softmax(8, 256))
    reductions = [sch.get_sblock(name) for name in ("row_max", "exp_sum")]
    rows = spread_rows(sch, sch.get_sblock("softmax"), reductions, BandwidthTile(32, 1, 8), Staging(3)).rows
    plan = infer_pipeline(sch, rows, 3)
    assert plan.roles == ("copy", *["compute"] * (len(plan.roles) - 1))
    assert plan.order == tuple(range(len(plan.roles)))


def test_vectors_of_16_bytes_where_rows_allow() -> None:
    for shape, width in (((64, 64), 4), ((64, 6), 2), ((64, 7), 1)):
        sch = Schedule(workloads.scale_shift(shape))
        spread = spread_elements(sch, sch.get_sblock("scale_shift"), TILE, Staging(2))
        assert (spread.width, spread.copies[0].width) == (width, width)
    sch = Schedule(workloads.gelu((4096,), "float16"))
    assert spread_elements(sch, sch.get_sblock("gelu"), TILE).width == 8
    assert "uint4" in cuda_text(sch)


def test_two_operands_and_several_row_dimensions() -> None:
    a, b = (te.placeholder((6, 40), name=name) for name in "ab")
    total = te.compute((6, 40), lambda i, j: a[i, j] + b[i, j], name="total")
    sch = Schedule(te.create_prim_func([a, b, total]))
    spread = spread_elements(sch, sch.get_sblock("total"), TILE, Staging(2))
    assert len(spread.copies) == 2
    pipeline_loop(sch, spread.tiles, 1)
    x, y = (np.random.default_rng(seed).standard_normal((6, 40)).astype(np.float32) for seed in (0, 1))
    out = tvm.runtime.tensor(np.full((6, 40), np.nan, np.float32))
    compile_serial(sch.mod)["main"](tvm.runtime.tensor(x), tvm.runtime.tensor(y), out)
    np.testing.assert_array_equal(out.numpy(), x + y)
    cube, k = te.placeholder((3, 4, 640), name="cube"), te.reduce_axis((0, 640), name="k")
    largest = te.compute((3, 4), lambda i, j: te.max(cube[i, j, k], axis=k), name="largest")
    sch = Schedule(te.create_prim_func([cube, largest]))
    pipeline_loop(sch, spread_reduction(sch, sch.get_sblock("largest"), TILE, Staging(2)).chunks, 2)
    values = np.random.default_rng(0).standard_normal((3, 4, 640)).astype(np.float32) - 9  # a 0 would win
    out = tvm.runtime.tensor(np.full((3, 4), np.nan, np.float32))
    compile_serial(sch.mod)["main"](tvm.runtime.tensor(values), out)
    np.testing.assert_array_equal(out.numpy(), values.max(2))


def test_softmax_of_large_values_does_not_overflow() -> None:
    x = np.array([[1e4, 1e4 - 1, -1e4, 0.0] * 64], np.float32)
    y = output(scheduled("softmax", x.shape, 2), WORKLOADS["softmax"], x)
    np.testing.assert_allclose(y, WORKLOADS["softmax"].reference(np, x.astype(np.float64)), atol=1e-6)


# What is refused


def test_what_is_no_stream_is_refused_by_name() -> None:
    def blocks(function: tvm.tirx.PrimFunc, *names: str) -> tuple[Schedule, list]:
        sch = Schedule(function)
        return sch, [sch.get_sblock(name) for name in names]

    sch, (product,) = blocks(Matmul(8, 8, 8).prim_func(), "matmul")
    with pytest.raises(IllegalSchedule, match=r"no elementwise block.*'matmul'"):
        spread_elements(sch, product, TILE)
    sch, (scaled,) = blocks(workloads.scale_shift((64, 64)), "scale_shift")
    with pytest.raises(IllegalSchedule, match=r"no reduction over the last axis.*'scale_shift'"):
        spread_reduction(sch, scaled, TILE)
    with pytest.raises(IllegalSchedule, match=r"no chain over rows.*'scale_shift'"):
        spread_rows(sch, scaled, [], TILE)
    x, k = te.placeholder((8, 64), name="x"), te.reduce_axis((0, 8), name="k")
    columns = te.create_prim_func([x, te.compute((64,), lambda j: te.sum(x[k, j], axis=k), name="columns")])
    sch, (block,) = blocks(columns, "columns")
    with pytest.raises(IllegalSchedule, match=r"no reduction over the last axis.*'columns'"):
        spread_reduction(sch, block, TILE)


def test_a_chain_over_several_operands_is_refused() -> None:
    x, z, k, j = (*(te.placeholder((8, 64), name=name) for name in "xz"), *(te.reduce_axis((0, 64)) for _ in "kj"))
    first = te.compute((8,), lambda i: te.sum(x[i, k], axis=k), name="first")
    second = te.compute((8,), lambda i: te.sum(z[i, j], axis=j), name="second")
    both = te.compute((8, 64), lambda i, c: x[i, c] * first[i] * second[i], name="both")
    sch = Schedule(te.create_prim_func([x, z, both]))
    before, reductions = sch.mod, [sch.get_sblock("first"), sch.get_sblock("second")]
    with pytest.raises(IllegalSchedule, match=r"reading what all others reduce at block 'both'"):
        spread_rows(sch, sch.get_sblock("both"), reductions, TILE)
    tvm.ir.assert_structural_equal(sch.mod, before)


def test_a_row_too_long_for_shared_memory_is_refused_before_anything_changes() -> None:
    sch = Schedule(workloads.softmax(4, 32768))
    reductions = [sch.get_sblock(name) for name in ("row_max", "exp_sum")]
    before = sch.mod
    with pytest.raises(IllegalSchedule, match=r"2 stage\(s\) of 131072 bytes.*'softmax'.*262144 bytes, limit 232448"):
        spread_rows(sch, sch.get_sblock("softmax"), reductions, TILE, Staging(2))
    tvm.ir.assert_structural_equal(sch.mod, before)
    spread_rows(sch, sch.get_sblock("softmax"), reductions, TILE, Staging(1))


@pytest.mark.parametrize("values", [(0, 1, 1), (32, 0, 1), (32, 1, 0), (48, 1, 1), (2048, 1, 1)], ids=str)
def test_illegal_tiles(values: tuple[int, int, int]) -> None:
    with pytest.raises(IllegalSchedule, match=r"illegal tile of a workload bound by memory.*whole warps up to 1024"):
        BandwidthTile(*values)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: workloads.scale_shift((0,)), "illegal size of extent 0"),
        (lambda: workloads.gelu(()), "without extents"),
        (lambda: workloads.gelu((2**31,)), "beyond 32-bit"),
        (lambda: workloads.row_sum(4, -1), "illegal size of extent 1"),
        (lambda: workloads.softmax(4, 4, "int8"), "unknown dtype"),
        (lambda: workloads.scale_shift((4, 2.5)), "illegal size"),
        (lambda: workloads.depthwise_conv2d_nhwc(1, 2, 2, 4, kernel=7), "illegal size output height"),
        (lambda: workloads.depthwise_conv2d_nhwc(1, 8, 8, 0), "illegal size channels"),
        (lambda: workloads.depthwise_conv2d_nhwc(1, 8, 8, 4, padding=-1), "illegal size padding"),
    ],
)
def test_illegal_workloads(make, message: str) -> None:
    with pytest.raises(IllegalWorkload, match=message):
        make()


@pytest.mark.sampled(4)
@pytest.mark.compiler
@pytest.mark.parametrize("stages", [None, 2])
@pytest.mark.parametrize("name", WORKLOADS)
def test_compiled_streams_keep_to_registers(name: str, stages: int | None, compiler: Compiler) -> None:
    shape = (2**20,) if name in ("scale_shift", "gelu") else (64, 4096)
    sch = scheduled(name, shape, stages)
    with tvm.transform.PassContext(config=required_pass_config(sch.mod)):
        target = machine_for("sm_90a").target()
        source = tvm.compile(sch.mod, target=target).mod.imports[0].inspect_source()
    cubin = compile_cubin(source, "sm_90a", compiler)
    assert cubin.spill_bytes == 0
    assert cubin.registers <= 96


@pytest.mark.parametrize(("columns", "static"), [(4060, False), (4096, True)])
def test_stages_just_below_48_kib_leave_nothing_static_beside_them(columns: int, static: bool) -> None:
    """TVM asks the driver for more than 48 KiB where the dynamic part alone has them: else all must be dynamic."""
    sch = Schedule(workloads.softmax(12, columns))
    block = sch.get_sblock("softmax")
    reductions = [sch.get_sblock(name) for name in ("row_max", "exp_sum")]
    spread = spread_rows(sch, block, reductions, BandwidthTile(256, 1, 5), Staging(3))
    pipeline_loop(sch, spread.rows, 3)
    text = cuda_text(sch)
    assert bool(re.search(r"^\s*__shared__", text, re.M)) == static


def test_a_stencil_is_no_elementwise_block() -> None:
    x, n = te.placeholder((10**6,), "float32", "x"), 10**6

    def element(i: tvm.tirx.Var) -> tvm.tirx.PrimExpr:
        before, behind = (
            tvm.tirx.if_then_else(inside, x[at], tvm.tirx.const(0, "float32"))
            for inside, at in ((i > 0, i - 1), (i < n - 1, i + 1))
        )
        return before + x[i] + behind

    sch = Schedule(te.create_prim_func([x, te.compute((n,), element, "y")]))
    with pytest.raises(IllegalSchedule, match=r"v_i - 1.*one element"):  # or each thread keeps all of them
        spread_elements(sch, sch.get_sblock("y"), TILE)
