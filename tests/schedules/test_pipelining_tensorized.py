"""Loops that TVM users tensorized first, with TVM's own intrinsics and scopes, are pipelined all the same."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import tvm
from tvm import te, tirx
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV
from tvm.target import Target
from tvm.testing.tir import mma_schedule

from support.functions import check_function
from support.intrinsics import tvm_intrinsics
from tensorir_ladder.kernels.codegen.lowering import generate
from tensorir_ladder.schedules.errors import IllegalPipeline
from tensorir_ladder.schedules.pipeline import pipeline_loop
from tensorir_ladder.schedules.pipeline.lowering import lower_ahead

# For their time: TVM parses the texts of all its intrinsics when these are imported.
pytestmark = pytest.mark.emulator
TARGET = Target({"kind": "cuda", "arch": "sm_80"})


def product(m: int, n: int, k: int) -> tirx.PrimFunc:
    """C = A·B of float16, summed in float32."""
    a, b = te.placeholder((m, k), "float16", "A"), te.placeholder((k, n), "float16", "B")
    step = te.reduce_axis((0, k), "k")
    c = te.compute(
        (m, n), lambda i, j: te.sum(a[i, step].astype("float32") * b[step, j].astype("float32"), [step]), "C"
    )
    return te.create_prim_func([a, b, c])


def by_mma(before: tirx.PrimFunc, steps: int = 1) -> Schedule:
    """TVM's own test schedule: fragments in scope "warp", loaded by ldmatrix."""
    intrinsics = tvm_intrinsics()

    def laid_out(i: tirx.Expr, j: tirx.Expr) -> tuple[tirx.Expr, ...]:
        return (i // 16, j // 16, *intrinsics.shared_16x16_to_ldmatrix_32x8_layout(i % 16, j % 16))

    names = ("LDMATRIX_f16_A", "LDMATRIX_f16_B", "MMA_f16f16f32", "MMA_fill_16x16_f32", "MMA_store_16x16_f32_global")
    factors = ([1, 1, 2, 1, 1], [1, 1, 1, 2, 1], [None, steps, 1])
    intrins = [getattr(intrinsics, f"{name}_INTRIN") for name in names]
    return mma_schedule(before, 16, "float16", False, *factors, *[laid_out] * 3, *intrins)


def by_wmma(before: tirx.PrimFunc) -> Schedule:
    """A block of one warp, fragments in scopes "wmma.*"."""
    group = tvm_intrinsics().get_wmma_intrin_group(
        load_scope="shared", store_scope="global", in_dtype="float16", out_dtype="float32", trans_b=False
    )
    sch = Schedule(before)
    block = sch.get_sblock("C")
    i, j, k = sch.get_loops(block)
    (i, ii), (j, jj), (k, kk) = (sch.split(loop, [None, 16]) for loop in (i, j, k))
    k, steps = sch.split(k, [None, 2])
    sch.reorder(i, j, k, steps, ii, jj, kk)
    outer = sch.blockize(ii)
    sch.bind(sch.fuse(i, j), "blockIdx.x")
    for operand, name in ((0, "load_a"), (1, "load_b")):
        shared = sch.cache_read(outer, operand, "shared")
        sch.compute_at(shared, k)
        _, lanes, vector = sch.split(sch.fuse(*sch.get_loops(shared)[-2:]), [None, 32, 8])
        sch.bind(lanes, "threadIdx.x")
        sch.vectorize(vector)
        fragment = sch.cache_read(outer, operand, f"wmma.matrix_{'ab'[operand]}")
        sch.compute_at(fragment, steps)
        sch.tensorize(sch.blockize(sch.get_loops(fragment)[-2]), group[name])
    stored = sch.cache_write(outer, 0, "wmma.accumulator")
    sch.reverse_compute_at(stored, sch.get_loops(outer)[0])
    sch.tensorize(sch.blockize(sch.get_loops(stored)[-2]), group["store"])
    init = sch.decompose_reduction(outer, k)
    sch.tensorize(sch.get_loops(sch.get_child_blocks(init)[0])[-2], group["init"])
    sch.tensorize(sch.get_loops(sch.get_child_blocks(outer)[0])[-3], group["compute"])
    return sch


def tile_loop(sch: Schedule) -> LoopRV:
    """The loop that the copies to shared memory stand in."""
    (found,) = (loop for loop in sch.get_loops(sch.get_sblock("A_shared")) if name(sch, loop) == "k_0_0")
    return found


def name(sch: Schedule, loop: LoopRV) -> str:
    """Name a loop."""
    return str(sch.get(loop).loop_var.name)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("async_copy", [True, False])
def test_tiles_are_copied_ahead_of_their_instructions(async_copy: bool) -> None:
    before = product(32, 32, 128)
    sch = by_mma(before)
    plan = pipeline_loop(sch, tile_loop(sch), 3, async_copy)
    assert plan.roles == ("copy", "copy", "compute")
    assert plan.async_stages == ((0,) if async_copy else ())
    check_function(before, lower_ahead(sch.mod["main"], TARGET), TARGET)


def test_fragments_of_warps_are_read_ahead() -> None:
    """A loop over registers: ldmatrix of the coming step beside this one's mma."""
    before = product(32, 32, 64)
    sch = by_mma(before, steps=2)
    (inner,) = (loop for loop in sch.get_loops(sch.get_sblock("A_shared_warp_o")) if name(sch, loop) == "k_0_1")
    plan = pipeline_loop(sch, inner, 2, False)
    assert plan.roles == ("copy", "copy", "compute")
    pipeline_loop(sch, tile_loop(sch), 2, True)
    check_function(before, lower_ahead(sch.mod["main"], TARGET), TARGET)


def test_wmma_is_fed_by_a_ring_too() -> None:
    sch = by_wmma(product(32, 32, 128))
    plan = pipeline_loop(sch, tile_loop(sch), 3, True)
    assert plan.roles == ("copy", "copy", "compute")
    cuda = generate(tvm.IRModule({"main": lower_ahead(sch.mod["main"], TARGET)}), TARGET, "s_tir").cuda
    body = cuda[cuda.rindex('extern "C"') :]
    assert "__shared__ alignas(64) half A_shared_ptr[1536]" in body  # three stages of 16 x 32
    assert body.count("ptx_cp_async_legacy") == 2 * 3  # of two operands: two tiles ahead of the loop, and one in it
    assert re.findall(r"wait_group_(\d)\(\)", body) == ["2", "1", "0"]
    assert body.count("__syncthreads") == 4


@pytest.mark.parametrize("make", [by_mma, by_wmma])
def test_one_barrier_is_refused_for_reads_that_cannot_be_hidden(make: Callable[..., Schedule]) -> None:
    sch = make(product(32, 32, 128))
    before = sch.mod
    with pytest.raises(IllegalPipeline, match=r"seen by ThreadSync.*A_shared.*leave one_barrier out"):
        pipeline_loop(sch, tile_loop(sch), 3, True, one_barrier=True)
    assert sch.mod.same_as(before)


@pytest.mark.parametrize("options", [{"stages": 0}, {"stages": 3, "one_barrier": True, "async_copy": False}], ids=str)
def test_a_refusal_changes_nothing(options: dict[str, Any]) -> None:
    sch = by_mma(product(32, 32, 128))
    before = sch.mod
    with pytest.raises(IllegalPipeline):
        pipeline_loop(sch, tile_loop(sch), **options)
    assert sch.mod.same_as(before)
