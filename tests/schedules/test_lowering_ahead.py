"""Functions lowered when they are scheduled, and compiled by TVM's stock pipeline, are those of ours."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tvm
from tvm import relax, te, tirx
from tvm.s_tir import Schedule
from tvm.target import Target

from support.cases import SCHEDULED_VARIANTS, small_case
from support.functions import check_function
from tensorir_ladder.emulator import EmulatedProgram
from tensorir_ladder.harness.build import lower
from tensorir_ladder.harness.emulation import emulated
from tensorir_ladder.harness.execution import numpy_dtype
from tensorir_ladder.kernels.codegen.host_code import read_host
from tensorir_ladder.kernels.codegen.lowering import Generated, generate
from tensorir_ladder.relax.rules import by_extent
from tensorir_ladder.schedules import pipeline, recipes
from tensorir_ladder.schedules.errors import IllegalPipeline, IllegalSchedule
from tensorir_ladder.schedules.pipeline.lowering import lower_ahead
from tensorir_ladder.schedules.pipeline.one_barrier import HIDES_READS
from tensorir_ladder.schedules.tiles import ThreadTile
from tensorir_ladder.schedules.workloads import Matmul

TARGET = Target({"kind": "cuda", "arch": "sm_90a"})
TILE = ThreadTile(block=(32, 64, 16), thread=(4, 4))
RAGGED = (130, 66, 200)
FORMS = [(5, v) for v in ("async", "unrolled_ring", "one_barrier_unrolled", "register_staged")]
FORMS += [(7, "serpentine"), (8, "default"), (9, "fragments"), (10, "rows")]


def stock(function: tirx.PrimFunc) -> Generated:
    """Lower a function by TVM's stock pipeline, without configuration."""
    return generate(tvm.IRModule({"main": function}), TARGET, "s_tir")


def counts(cuda: str) -> dict[str, int]:
    """Count what kernels call and must be the same: barriers, copies, their groups and waits, matrix instructions."""
    words = ("__syncthreads", "ptx_cp_async_legacy", "commit_group_", "wait_group_", "wgmma_", "tensor_core_")
    kernels = cuda[cuda.index('extern "C" __global__') :]
    kernels = re.sub(r"\bmeet_\d+\(\)", "__syncthreads()", kernels)  # of all threads but a producer warp's
    return {word: kernels.count(word) for word in words}


def pipelined(problem: Matmul, **form: bool) -> Schedule:
    """A product on ordinary cores, in three stages."""
    sch = Schedule(problem.prim_func())
    staged = recipes.stage_contraction(sch, sch.get_sblock("matmul"), TILE, vectorize=True)
    pipeline.pipeline_loop(sch, staged.loops.k_outer, 3, **form)
    return sch


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("number", "variant"),
    [both if both in FORMS else pytest.param(*both, marks=pytest.mark.emulator) for both in SCHEDULED_VARIANTS],
)
def test_barriers_and_copies_are_those_of_our_own_pipeline(number: int, variant: str) -> None:
    made = lower(small_case(number, RAGGED, variant, stages=3))
    assert counts(stock(lower_ahead(made.mod["main"], TARGET)).cuda) == counts(made.cuda)


@pytest.mark.sampled(4)
@pytest.mark.emulator
@pytest.mark.parametrize(("number", "variant"), SCHEDULED_VARIANTS)
def test_results_are_those_of_our_own_pipeline_bit_for_bit(number: int, variant: str) -> None:
    case = small_case(number, (70, 66, 200), variant, stages=3)
    problem, made = case.problem, lower(case)
    got = stock(lower_ahead(made.mod["main"], TARGET))
    run = read_host(got.host, {"m": problem.m})
    names = tuple(str(parameter.name) for parameter in made.mod["main"].params)
    memory = tuple((kept.shape, numpy_dtype(kept.dtype)) for kept in run.kept)
    every = (*names, *(kept.buffer for kept in run.kept))
    ahead = EmulatedProgram("ahead", got.cuda, run.launches, every, memory, 132, names[:2])
    draw, dtype = np.random.default_rng(0), numpy_dtype(problem.dtype)
    a, b = (draw.standard_normal(shape).astype(dtype) for shape in ((problem.m, problem.k), problem.b_shape))
    one, other = (np.full((problem.m, problem.n), np.nan, numpy_dtype(problem.out_dtype)) for _ in range(2))
    for seed in range(3):
        ahead(a, b, one, seed=seed)
        emulated(made)(a, b, other, seed=seed)
        assert not np.isnan(one.astype(np.float32)).any()
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("form", [{}, {"async_copy": False}, {"unroll_ring": True}, {"one_barrier": True}], ids=str)
def test_a_pipeline_is_right_without_any_configuration(form: dict[str, bool]) -> None:
    problem = Matmul(45, 75, 90)
    check_function(problem.prim_func(), lower_ahead(pipelined(problem, **form).mod["main"], TARGET), TARGET)


def test_forms_of_pipelines_stand_beside_each_other_in_one_function() -> None:
    """Two barriers, one, and none asynchronous, each for a range of rows that only run time knows."""
    before = Matmul(45, 72, 96).prim_func(any_m=True)
    forms: list[dict[str, bool]] = [
        {"async_copy": True},
        {"one_barrier": True, "unroll_ring": True},
        {"async_copy": False},
    ]
    lowered = []
    for form in forms:
        sch = Schedule(before)
        staged = recipes.stage_contraction(sch, sch.get_sblock("matmul"), TILE, vectorize=True)
        pipeline.pipeline_loop(sch, staged.loops.k_outer, 3, **form)
        lowered.append(lower_ahead(sch.mod["main"], TARGET))
    chosen = by_extent(list(zip((8, 40, None), lowered)))
    alone, together = [counts(stock(one).cuda) for one in lowered], counts(stock(chosen).cuda)
    assert together == {word: sum(one[word] for one in alone) for word in together}
    kernels = [check_function(before, chosen, TARGET, {"m": m}, runs=2).kernels for m in (5, 33, 45)]
    assert len(set(kernels)) == 3


def test_lowered_twice_it_is_the_same() -> None:
    once = lower_ahead(pipelined(Matmul(64, 64, 64)).mod["main"], TARGET)
    assert lower_ahead(once, TARGET).same_as(once)


def test_what_has_no_root_block_is_left_to_the_stock_pipeline() -> None:
    by_hand = tvm.script.from_source("""@T.prim_func(s_tir=True)
def main(A: T.Buffer((64,), "float32"), B: T.Buffer((64,), "float32")):
    with T.launch_thread("blockIdx.x", 2) as block:
        thread = T.launch_thread("threadIdx.x", 32)
        B[block * 32 + thread] = A[block * 32 + thread] * T.float32(2)
""")
    assert lower_ahead(by_hand, TARGET).same_as(by_hand)
    a = te.placeholder((64,), "float32", "A")
    before = te.create_prim_func([a, te.compute((64,), lambda i: a[i] * 2.0, "B")])
    check_function(before, lower_ahead(by_hand, TARGET), TARGET)


@pytest.mark.parametrize("target", ["llvm", "vulkan", "metal"])
def test_other_targets_are_refused(target: str) -> None:
    with pytest.raises(IllegalSchedule, match=f"CUDA alone .got {target}, limit cuda"):
        lower_ahead(pipelined(Matmul(64, 64, 64)).mod["main"], Target(target))


def test_hidden_reads_without_a_gate_are_refused() -> None:
    sch = pipelined(Matmul(64, 64, 64), async_copy=False)
    sch.annotate(sch.get_sblock("matmul_update"), HIDES_READS, 1)
    with pytest.raises(IllegalPipeline, match=r"hidden from TVM.*one_barrier=True"):
        lower_ahead(sch.mod["main"], TARGET)


def test_a_function_that_relax_calls_needs_no_name_either() -> None:
    """The CUDA of relax.build and tvm.compile is that of the function alone."""
    function = lower_ahead(pipelined(Matmul(64, 64, 64)).mod["main"], TARGET)
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((64, 64), "float32"))
    called = builder.add_func(function.with_attr("global_symbol", "product"), "product")
    with builder.function("main", [x]):
        with builder.dataflow():
            made = builder.emit(relax.call_tir(called, [x, x], relax.TensorType((64, 64), "float32")))
            out = builder.emit_output(made)
        builder.emit_func_output(out)
    alone = counts(stock(function).cuda)
    assert alone["ptx_cp_async_legacy"]
    assert alone["__syncthreads"]
    for build in (relax.build, tvm.compile):
        text = build(builder.get(), TARGET).mod.imports[0].imports[0].inspect_source()
        assert counts(text) == alone
