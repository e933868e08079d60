"""Predicated copies that fill with zeros by themselves: one instruction each, the same results, where asked for."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tvm
from tvm.s_tir import Schedule
from tvm.target import Target

from support.cases import STEPS, make_case
from tensorir_ladder.harness.build import lower, lower_schedule
from tensorir_ladder.harness.emulation import EmulatorBackend, emulated
from tensorir_ladder.harness.machines import machine_for
from tensorir_ladder.harness.verify import verify
from tensorir_ladder.kernels.codegen.lowering import generate
from tensorir_ladder.relax.rules import Contraction
from tensorir_ladder.schedules import pipeline
from tensorir_ladder.schedules.passes import needs_of
from tensorir_ladder.schedules.pipeline.lowering import lower_ahead
from tensorir_ladder.schedules.recipes import stage_contraction
from tensorir_ladder.schedules.tiles import ThreadTile
from tensorir_ladder.schedules.workloads import Matmul

TARGET = Target({"kind": "cuda", "arch": "sm_90a"})
TILE = ThreadTile(block=(16, 16, 16), thread=(2, 2))
OTHERWISE = "@!p st.shared"


def ragged(columns: int, fills: bool) -> Schedule:
    """A pipelined product of ragged extents, its copies filled with zeros by one instruction or two."""
    sch = Schedule(Matmul(20, columns, 70).prim_func())
    staged = stage_contraction(sch, sch.get_sblock("matmul"), TILE, vectorize=True)
    if fills:
        pipeline.fill_with_zeros(sch, staged.loops.k_inner)
    pipeline.pipeline_loop(sch, staged.loops.k_outer, 3, async_copy=True)
    return sch


@pytest.mark.parametrize("columns", [19, 22, 24], ids=lambda columns: f"rows of {columns} floats")
def test_copies_are_one_instruction_where_asked_for(columns: int) -> None:
    filled, usual = (lower_schedule(ragged(columns, fills), machine_for("sm_90a"), "ragged") for fills in (True, False))
    assert OTHERWISE in usual.cuda
    assert OTHERWISE not in filled.cuda
    assert filled.cuda.count("_zero_fill(") > 2
    assert needs_of(filled.mod)
    assert not needs_of(usual.mod)


def test_what_rounds_add_to_an_address_and_to_a_limit_stands_by_itself() -> None:
    """A thread copies two elements of each tile, by one address and a constant that rounds add, once written out."""
    cuda = lower_schedule(ragged(19, fills=True), machine_for("sm_90a"), "ragged").cuda
    copies = re.findall(r"_below_(\d)_zero_fill\(.*(\b[AB]_ptr\[[^\]]*\])\)\), (.*)\);", cuda)
    assert len(copies) == 6, "two operands, in two tiles ahead of the loop and in it"
    assert {limits for limits, _, _ in copies} == {"0", "1"}
    for limits, element, rest in copies:
        assert "ax" not in element
        assert re.search(r"\(int64_t\)ax\w+\) \* \(int64_t\)\d+", rest)
        assert rest.count("ax") == 1 + int(limits), "besides, a round is in nothing but a limit"
        assert limits == "0" or re.search(r"\(\d+ - \(ax\w+ \* \d+\)\)$", rest)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", [7, 10])
def test_of_the_steps_only_the_fitted_forms_ask_for_it(number: int) -> None:
    shape = (40, 72, 200)
    for variant in STEPS[number].variants:
        cuda = lower(make_case(number, shape, variant.name, stages=3)).cuda
        by_threads = variant.name != "boxes"  # which TMA brings, zeros included
        expected = variant.plans and by_threads, not variant.plans
        assert ("_zero_fill(" in cuda, OTHERWISE in cuda) == expected


def test_the_rules_kernels_ask_for_it() -> None:
    made = Contraction().apply(Matmul(200, 4096, 1032, "float16", "nt").prim_func(), TARGET, False)
    cuda = generate(tvm.IRModule({"main": lower_ahead(made.mod["main"], TARGET)}), TARGET, "s_tir").cuda
    assert "_zero_fill(" in cuda
    assert OTHERWISE not in cuda


@pytest.mark.emulator
@pytest.mark.parametrize("columns", [19, 22, 24])
def test_what_is_filled_is_the_same_bit_for_bit(columns: int) -> None:
    rng = np.random.default_rng(5)
    a, b = (rng.standard_normal(shape, dtype=np.float32) for shape in ((20, 70), (70, columns)))
    outputs = []
    for fills in (True, False):
        output = np.full((20, columns), np.nan, np.float32)
        emulated(lower_schedule(ragged(columns, fills), machine_for("sm_90a"), "ragged"))(a, b, output, seed=1)
        outputs.append(output)
    assert np.array_equal(*outputs)


@pytest.mark.emulator
@pytest.mark.parametrize(("number", "shape"), [(7, (37, 41, 83)), (10, (72, 72, 136))])
def test_fitted_forms_are_right_on_ragged_shapes(number: int, shape: tuple[int, int, int]) -> None:
    verify(lower(make_case(number, shape, "fitted", stages=3)), EmulatorBackend(), [3])
