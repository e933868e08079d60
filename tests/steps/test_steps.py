"""The ladder: each step right at every shape, pipelines equal to the plain loop, and what is generated."""

from __future__ import annotations

import functools
import re
import warnings
from dataclasses import replace

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm.s_tir import Schedule

from support.bindings import stray_blocks
from support.cases import (
    EVERY_VARIANT,
    SCHEDULED_VARIANTS,
    SMALL_TILES,
    STEPS,
    THREAD_STEPS,
    config,
    make_case,
    small_case,
)
from tensorir_ladder.harness.build import Case, Kernel, lower
from tensorir_ladder.harness.emulation import EmulatorBackend
from tensorir_ladder.harness.execution import LlvmBackend
from tensorir_ladder.harness.verify import verify
from tensorir_ladder.schedules.cycles import Planned
from tensorir_ladder.schedules.errors import IllegalPipeline, IllegalSchedule
from tensorir_ladder.schedules.tiles import ThreadTile
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.steps.thread_tiles import DEFAULT

CPU = LlvmBackend()
SMALL_TILE = SMALL_TILES[ThreadTile]
SMALL_M, SMALL_N = 8, 16
RING_VARIANTS = [form.name for form in STEPS[5].variants if form.name not in ("writeback", "double_buffer")]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("variant", "k"),
    [
        ("rows", 64),
        ("in_flight", 128),
        ("in_flight", 192),
        ("rows", 256),
        ("awaited", 64),
        ("awaited", 128),
        ("awaited", 192),
    ],
)
def test_a_case_is_refused_for_the_stage_counts_that_its_schedule_refuses(variant: str, k: int) -> None:
    refused, unbuilt = [], []
    for stages in (1, 2, 3, 4):
        case = small_case(10, (64, 64, k), variant, stages=stages)
        for attempt, found in (
            (case.validate, refused),
            (lambda c=case: c.step.schedule(c.problem, c.config), unbuilt),
        ):
            try:
                attempt()
            except IllegalPipeline:
                found.append(stages)
    assert refused == unbuilt == list(range(1, min(k // 64, 2 if variant == "awaited" else 3)))


# Right outputs, through LLVM


THREAD_VARIANTS = [(step, variant) for step, variant in EVERY_VARIANT if step in THREAD_STEPS]
OTHER_VARIANTS = [(step, variant) for step, variant in SCHEDULED_VARIANTS if step not in THREAD_STEPS]
FIRST_AND_TF32 = [
    (step, variant) for step, variant in OTHER_VARIANTS if variant in (STEPS[step].variant_names[0], "tf32")
]
shape_names = {"ids": lambda value: "x".join(map(str, value)) if isinstance(value, tuple) else str(value)}


@pytest.mark.parametrize(("shape", "layout"), [((33, 17, 50), "nt"), ((16, 32, 48), "nn")], **shape_names)
@pytest.mark.parametrize(("step", "variant"), THREAD_VARIANTS)
def test_every_step_and_variant_is_right(step: int, variant: str, shape: tuple[int, int, int], layout: str) -> None:
    result = verify(lower(small_case(step, shape, variant, layout=layout)), CPU, seeds=(0,))
    assert result.passed
    assert result.max_error <= result.tolerance


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("shape", "layout"), [((5, 70, 16), "nn"), ((64, 64, 33), "nt"), ((1, 1, 1), "nn")], **shape_names
)
@pytest.mark.parametrize("step", THREAD_STEPS)
def test_every_step_is_right_with_its_own_tile(step: int, shape: tuple[int, int, int], layout: str) -> None:
    assert verify(lower(make_case(step, shape, layout=layout)), CPU, seeds=(0,)).passed


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("step", "variant", "shape", "layout", "dtype"),
    [
        *((*each, (34, 33, 161), "nt", 1) for each in OTHER_VARIANTS),  # no row a whole vector
        *((*each, (35, 70, 24), "nt", 0) for each in FIRST_AND_TF32),  # rows that are whole vectors
        *((*each, (32, 64, 320), "nn", 0) for each in FIRST_AND_TF32),  # more k tiles than stages
    ],
    **shape_names,
)
def test_every_tile_of_warps_is_right_in_every_dtype(
    step: int, variant: str, shape: tuple[int, int, int], layout: str, dtype: int
) -> None:
    taken = STEPS[step].variant(variant).dtypes  # in turn, shape by shape
    case = small_case(step, shape, variant, dtype=taken[dtype % len(taken)], layout=layout)
    result = verify(lower(case), CPU, seeds=(0,))
    assert result.passed
    assert result.max_error <= result.tolerance


@pytest.mark.sampled(3)
@pytest.mark.parametrize("shape", [(1, 1, 1), (33, 17, 50)], **shape_names)
@pytest.mark.parametrize("step", [7, 8, 9, 10])
def test_a_tile_of_warps_may_be_larger_than_the_product(step: int, shape: tuple[int, int, int]) -> None:
    assert verify(lower(small_case(step, shape)), CPU, seeds=(0,)).passed


@pytest.mark.parametrize("step", [8, 9, 10])
def test_what_the_cpu_runs_of_a_tensorized_step_is_its_schedule_before_that(step: int) -> None:
    kernel = lower(small_case(step, (64, 64, 128)))
    instruction = "wgmma.mma_async" if step == 10 else "mma.sync"
    assert instruction in kernel.cuda
    texts = [schedule.mod["main"].script() for schedule in (kernel.schedule, kernel.schedule_for_cpu)]
    assert ["tensor_core_m16n8k16" in text or "wgmma_m64n64k64" in text for text in texts] == [True, False]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("variant", STEPS[10].variant_names)
@pytest.mark.parametrize("k", [64, 128])
def test_a_short_reduction_may_be_asked_for_by_the_stages_that_it_fills(variant: str, k: int) -> None:
    case = small_case(10, (64, 64, k), variant)
    assert case.stages_built == k // 64
    assert lower(replace(case, stages=case.stages_built)).body == lower(case).body


@pytest.mark.parametrize("step", [8, 9, 10])
def test_half_precision_results_may_be_stored_in_float32(step: int) -> None:
    case = small_case(step, (33, 34, 100), dtype="bfloat16", out_dtype="float32", layout="nt")
    result = verify(lower(case), CPU, seeds=(0,))
    assert result.tolerance < 1e-3  # that of float32, not of bfloat16


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("dtype", "step", "variant"),
    [
        *(("float16", step, variant) for step, variant in ((1, None), (4, None), (5, "async"), (6, "unroll8"))),
        *(("bfloat16", step, variant) for step, variant in ((3, None), (5, "async"), (5, "register_staged"))),
        *(("float64", step, variant) for step, variant in ((1, None), (4, None), (5, "async"))),
    ],
)
def test_other_dtypes_are_right(step: int, variant: str | None, dtype: str) -> None:
    case = make_case(step, (20, 18, 50), variant, dtype=dtype, layout="nt", tile=SMALL_TILE, stages=3)
    assert verify(lower(case), CPU, seeds=(0,)).passed


def test_half_precision_operands_may_have_a_float32_output() -> None:
    case = make_case(5, (20, 18, 50), dtype="float16", out_dtype="float32", tile=SMALL_TILE)
    result = verify(lower(case), CPU, seeds=(0,))
    assert result.tolerance < 1e-3  # that of float32, not of float16


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "tile",
    [
        "16x16x8/1x1",
        "8x8x4/8x1",
        "24x40x12/3x5",
        "16x32x16/4x8",
    ],
)
def test_tiles_of_every_form_are_right(tile: str) -> None:
    for step, variant in ((2, None), (5, "async"), (5, "writeback"), (6, "unroll32")):
        case = make_case(step, (35, 44, 31), variant, tile=ThreadTile.parse(tile), stages=2)
        assert verify(lower(case), CPU, seeds=(0,)).passed


# Pipelines


@functools.cache
def output_of(step: int, variant: str, k: int, stages: int) -> tuple[np.ndarray, Kernel]:
    """The output of a variant on fixed data, and its kernel."""
    kernel = lower(make_case(step, (SMALL_M, SMALL_N, k), variant, tile=SMALL_TILE, stages=stages))
    a, b = CPU.normal(0, (SMALL_M, k), "float32"), CPU.normal(1, (k, SMALL_N), "float32")
    output = CPU.poisoned((SMALL_M, SMALL_N), "float32")
    CPU.load(kernel)(a, b, output)
    assert not np.isnan(output).any()
    return output, kernel


def k_extents(stages: int) -> list[int]:
    """Lengths of the reduction in tiles of 16: one fewer than stages, as many, and one more, which is ragged."""
    return [16 * count for count in (stages - 1, stages) if count] + [16 * stages + 3]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("variant", RING_VARIANTS)
def test_a_pipelined_loop_equals_the_plain_one_bit_for_bit(variant: str, stages: int) -> None:
    for k in k_extents(stages):
        plain, _ = output_of(4, "default", k, 1)
        pipelined, kernel = output_of(5, variant, k, stages)
        assert np.array_equal(plain, pipelined), f"k {k}"
        filled = min(stages, -(-k // 16))
        assert kernel.code.shared_versions == filled, f"k {k}"
        useless = [text for text in kernel.warnings if text.startswith("double_buffer_scope")]
        assert len(useless) == (2 if variant == "double_buffer_pipelined" and filled > 1 else 0), f"k {k}"
        assert len(kernel.warnings) - len(useless) == (1 if filled < stages else 0), f"k {k}"
        assert bool(kernel.pipeline) == (filled > 1), f"k {k}"


@pytest.mark.parametrize("k", [16, 33, 64])
def test_double_buffer_alone_equals_the_plain_loop_bit_for_bit(k: int) -> None:
    assert np.array_equal(output_of(4, "default", k, 1)[0], output_of(5, "double_buffer", k, 4)[0])


@pytest.mark.parametrize("variant", STEPS[6].variant_names)
def test_unrolling_changes_no_bit(variant: str) -> None:
    assert np.array_equal(output_of(4, "default", 51, 1)[0], output_of(6, variant, 51, 3)[0])


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_write_back_as_a_stage_of_its_own_is_right(stages: int) -> None:
    for k in k_extents(stages):
        kernel = lower(make_case(5, (20, 18, k), "writeback", tile=SMALL_TILE, stages=stages))
        assert verify(kernel, CPU, seeds=(0,)).passed


def test_more_stages_than_k_tiles_warns_once_and_uses_as_many_as_tiles() -> None:
    kernel = lower(make_case(5, (64, 64, 32), "async", stages=6))
    (warning,) = kernel.warnings
    assert "6 pipeline stages" in warning
    assert "2 iterations" in warning
    assert kernel.smem_bytes == DEFAULT.tile.smem_bytes(4, 2)
    assert verify(kernel, CPU, seeds=(0,)).passed


def test_far_more_stages_than_k_tiles_is_not_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kernel = lower(make_case(5, (64, 64, 64), "async", stages=64))
    assert kernel.smem_bytes == DEFAULT.tile.smem_bytes(4, 4)


@pytest.mark.parametrize("stages", [0, -1])
def test_a_stage_count_below_one_is_refused(stages: int) -> None:
    with pytest.raises(IllegalPipeline, match="stage count below 1") as caught:
        STEPS[5].schedule(Matmul(64, 64, 64), config("async", DEFAULT.tile, stages))
    assert caught.value.value == stages


def planned(step: int, variant: str, plan: Planned, shape: tuple[int, int, int] = (130, 72, 712)) -> Case:
    """A product whose schedule is asked to do more or less than the cost model would, by a small tile."""
    return replace(small_case(step, shape, variant, stages=3), planned=plan)


def test_blocks_that_leave_their_domains_are_found() -> None:
    sch = Schedule(Matmul(30, 8, 8).prim_func())
    row, column, _ = sch.get_loops(sch.get_sblock("matmul"))
    sch.split(sch.fuse(row, column), [None, 100])
    assert stray_blocks(sch.mod["main"]) == [], "TVM guards the last ones"
    guard = re.search(r"\n *T.where\(.*\)", text := sch.mod.script())
    unguarded = tvm.script.from_source(text.replace(guard.group(), ""))
    assert stray_blocks(unguarded["main"]) == ["matmul: v_i of 30 goes from 0 to 37"]


@pytest.mark.filterwarnings("ignore:copied to")
@pytest.mark.parametrize(
    ("step", "variant", "plan", "shape"),
    [
        (7, "fitted", Planned(3, (True, False)), (33, 35, 131)),
        (7, "fitted", Planned(1, (False, True)), (33, 35, 131)),
        (7, "fitted", Planned(4), (32, 32, 512)),
        (10, "fitted", Planned(2, (True, False)), (130, 72, 712)),
        (10, "fitted", Planned(5), (130, 72, 712)),
        (10, "boxes", Planned(2, (True, True), True, (2, 1)), (130, 72, 712)),
        (10, "boxes", Planned(1, (False, False), True, (1, 2), own_warp=True), (130, 72, 712)),
    ],
)
def test_a_schedule_does_what_it_is_asked_to_plan(
    step: int, variant: str, plan: Planned, shape: tuple[int, int, int]
) -> None:
    kernel = lower(planned(step, variant, plan, shape))
    names = {str(buffer.name): tuple(map(int, buffer.shape)) for buffer in kernel.workspaces}
    assert [f"{operand}_pad" in names for operand in "AB"] == list(plan.copied)
    assert [extents[0] for extents in names.values() if len(extents) == 3] == [plan.parts] * (plan.parts > 1)
    assert kernel.launch.get("clusterCtaIdx.x", 1) == plan.cluster[0] * plan.cluster[1]
    assert kernel.threads == (160 if plan.own_warp else 128 if step == 10 else 64)
    assert str(plan) in str(kernel.case)
    verify(kernel, CPU, seeds=(1,))


# Of few outputs, so that the last block of those that add parts up has threads without any.
FEW_OUTPUTS = [
    (7, "fitted", "16x32x64/16x32/4x4/8", (112, 4, 365)),
    (7, "fitted", "16x32x64/16x32/4x4/8", (48, 12, 200)),
    (7, "fitted", "32x64x32/32x64/8x8/4", (32, 63, 131)),
    (10, "boxes", "24x64x64swapped/1x1", (24, 40, 648)),
    (10, "boxes", "40x64x64swapped/1x1", (120, 24, 648)),
]


def few_outputs(step: int, variant: str, tile: str, shape: tuple[int, int, int], layout: str = "nn") -> Kernel:
    """A product in two parts."""
    parsed = type(STEPS[step].tiles.default.tile).parse(tile)
    case = make_case(step, shape, variant, layout=layout, tile=parsed, stages=3)
    usual = STEPS[step].plan(case.problem, case.config)
    return lower(replace(case, planned=usual._replace(parts=2)))


@pytest.mark.parametrize("layout", ["nn", "nt"])
@pytest.mark.parametrize("asked", FEW_OUTPUTS, ids=str)
def test_no_thread_stores_sums_of_parts_beyond_the_output(asked: tuple, layout: str) -> None:
    """Rows that no tile cuts short, and columns that one does: TVM left a condition on both out."""
    kernel = few_outputs(*asked, layout)
    assert stray_blocks(kernel.mod["main"]) == []
    verify(kernel, CPU, seeds=(1,))


@pytest.mark.emulator
@pytest.mark.parametrize("asked", FEW_OUTPUTS, ids=str)
def test_the_emulator_sees_no_store_beyond_the_output_either(asked: tuple) -> None:
    verify(few_outputs(*asked), EmulatorBackend(), seeds=(1,))


PLANNING = [(step, name) for step, name in SCHEDULED_VARIANTS if STEPS[step].variant(name).plans]
EXTENTS = st.integers(1, 96)


@pytest.mark.filterwarnings("ignore:copied to", "ignore:.*more would stay empty")
@settings(max_examples=25, deadline=None)
@given(
    form=st.sampled_from(PLANNING),
    shape=st.tuples(EXTENTS, EXTENTS, st.integers(1, 250)),
    layout=st.sampled_from(["nn", "nt"]),
    parts=st.integers(1, 8),
)
def test_blocks_stay_in_their_domains(
    form: tuple[int, str], shape: tuple[int, int, int], layout: str, parts: int
) -> None:
    """TVM takes on trust that no iteration of a loop leaves a block's domain."""
    step, variant = form
    case = small_case(step, shape, variant, layout=layout, stages=3)
    most = max(1, case.k_tiles // case.stages)
    usual = STEPS[step].plan(case.problem, case.config)
    asked = replace(case, planned=usual._replace(parts=min(parts, most)))
    assert stray_blocks(asked.step.schedule(asked.problem, asked.config).mod["main"]) == []


@pytest.mark.parametrize(
    ("step", "variant", "plan", "message"),
    [
        (5, "async", Planned(1), r"step5_pipelining\[async\] plans nothing .*leave planned out"),
        (7, "serpentine", Planned(2), "plans nothing"),
        (7, "fitted", Planned(0), r"got 0, limit 1 to 45\)"),
        (10, "fitted", Planned(13), r"of 12 k tiles in such parts \(got 13, limit 1 to 12\)"),
        (10, "rows", Planned(2), "plans nothing"),
        (7, "fitted", Planned(1, own_warp=True), r"got own_warp True, limit False\)"),
        (10, "fitted", Planned(1, boxes=True), r"got boxes True, limit False\)"),
        (10, "fitted", Planned(1, cluster=(2, 1)), r"got cluster \(2, 1\), limit \(1, 1\)\)"),
        (10, "fitted", Planned(1, own_warp=True), r"got own_warp True, limit False\)"),
        (10, "boxes", Planned(2), r"got boxes False, limit True\)"),
        (10, "boxes", Planned(1, boxes=True, cluster=(4, 1)), r"got cluster \(4, 1\), limit \(1, 1\) or \(2, 1\)"),
        (10, "boxes", Planned(1, boxes=True, cluster=(3, 1)), r"got cluster \(3, 1\), limit"),
    ],
)
def test_what_a_schedule_cannot_do_is_no_plan_of_it(step: int, variant: str, plan: Planned, message: str) -> None:
    with pytest.raises(IllegalSchedule, match=message):
        lower(planned(step, variant, plan))


def test_the_annotations_are_those_of_the_variant() -> None:
    def lists(variant: str, stages: int = 4) -> dict[str, list[int]]:
        found = lower(make_case(5, (128, 128, 256), variant, stages=stages)).pipeline
        return {key: values for key, values in found.items() if key.startswith("software_pipeline")}

    stage, order, asynchronous = (f"software_pipeline_{name}" for name in ("stage", "order", "async_stages"))
    assert lists("async") == {stage: [0, 0, 3], order: [0, 1, 2], asynchronous: [0]}
    assert lists("sync") == {stage: [0, 0, 3], order: [0, 1, 2]}
    assert lists("double_buffer") == {}
    assert sorted(lists("register_staged")[stage]) == [0, 0, 1, 1, 4]
    assert asynchronous not in lists("register_staged")
    assert lists("writeback", stages=2)[stage] == [
        0,
        0,
        1,
        1,
        2,
    ]  # two copies, zeroing and summing a product, adding it
    assert lists("async", stages=1) == {}


def test_the_pass_configuration_is_what_the_schedule_says() -> None:
    configurations = {
        variant: lower(make_case(5, (64, 64, 128), variant)).pass_config for variant in STEPS[5].variant_names
    }
    asynchronous = {variant for variant, configuration in configurations.items() if configuration}
    assert asynchronous == {"async", "one_barrier", "unrolled_ring", "one_barrier_unrolled", "writeback"}
    assert all(configurations[variant] == {"tirx.use_async_copy": True} for variant in asynchronous)


# The generated code


@pytest.mark.parametrize("shape", [(128, 128, 128), (33, 17, 50)], ids=str)
def test_double_buffer_scope_changes_nothing(shape: tuple[int, int, int]) -> None:
    def body(step: int, variant: str) -> str:
        return lower(make_case(step, shape, variant)).body

    assert body(5, "double_buffer") == body(4, "default")
    assert body(5, "double_buffer_pipelined") == body(5, "sync")
    assert body(5, "sync") != body(4, "default")


def test_every_other_variant_generates_code_of_its_own() -> None:
    bodies = {variant: lower(make_case(5, (128, 128, 256), variant)).body for variant in STEPS[5].variant_names}
    assert len(set(bodies.values())) == len(bodies) - 1  # double_buffer_pipelined is sync
    factors = {variant: lower(make_case(6, (128, 128, 256), variant)).body for variant in STEPS[6].variant_names}
    # A k tile of 16 is fully unrolled by 16, by 32 and by "full".
    assert factors["full"] == factors["unroll16"] == factors["unroll32"]
    assert len({factors[name] for name in ("full", "none", "unroll4", "unroll8")}) == 4
    assert factors["none"] == bodies["async"]


def test_neighbouring_steps_differ() -> None:
    kernels = {number: lower(make_case(number, (128, 128, 128))) for number in STEPS}
    assert len({kernel.body for kernel in kernels.values()}) == len(STEPS)
    shared = [kernels[number].smem_bytes for number in THREAD_STEPS]
    assert shared[0] == 0
    assert shared[1] == DEFAULT.tile.one_output_per_thread().smem_bytes(4)
    assert shared[2:4] == [DEFAULT.tile.smem_bytes(4)] * 2
    assert shared[4:] == [DEFAULT.tile.smem_bytes(4, DEFAULT.stages)] * 2
    names = ("mma.sync", "wgmma.mma_async", "ldmatrix", "cp.async.c", "cp.async.bulk.tensor", "tcgen05.mma")
    found = {number: {name for name in names if name in kernels[number].cuda} for number in STEPS}
    assert not any(found[number] for number in range(1, 5))
    assert [found[number] for number in (5, 6, 7)] == [{"cp.async.c"}] * 3
    assert found[8] == {"mma.sync", "ldmatrix"}
    assert found[9] == {"mma.sync", "ldmatrix", "cp.async.c"}
    assert found[10] == {"wgmma.mma_async", "cp.async.c"}
    assert found[11] == {"wgmma.mma_async", "cp.async.bulk.tensor"}
    assert found[14] == {"tcgen05.mma", "cp.async.bulk.tensor"}


def test_vector_stores_appear_with_step_4() -> None:
    codes = {number: lower(make_case(number, (128, 128, 128))).code for number in (3, 4)}
    assert codes[3].vector_loads == codes[3].vector_stores_kernel == 0
    assert codes[4].vector_loads == 2
    assert codes[4].vector_stores_kernel > 0


def test_shared_memory_beyond_48_kib_becomes_dynamic_and_stays_right() -> None:
    tile = ThreadTile.parse("64x64x32/8x8")
    kernel = lower(make_case(5, (64, 64, 160), "async", tile=tile, stages=4))
    assert kernel.smem_bytes == 64 * 1024
    assert "extern __shared__" in kernel.cuda
    assert verify(kernel, CPU, seeds=(0,)).passed


def test_a_thread_tile_of_one_column_is_stored_as_scalars() -> None:
    kernel = lower(make_case(4, (64, 64, 32), tile=ThreadTile.parse("16x16x8/8x1")))
    assert "int4 v_" not in kernel.body  # a vector of addresses


@pytest.mark.parametrize("shape", [(65537, 2, 1), (2, 65537 * 64, 1)], ids=str)
def test_grids_beyond_65535_rows_are_launched_along_x(shape: tuple[int, int, int]) -> None:
    kernel = lower(make_case(4, shape))
    assert set(kernel.launch) == {"blockIdx.x", "threadIdx.x", "threadIdx.y"}
    assert kernel.blocks == -(-shape[0] // 32) * -(-shape[1] // 64)


def test_scheduling_leaves_no_trace_in_the_process() -> None:
    before = tvm.get_global_func("tvm_callback_cuda_compile")
    first = lower(make_case(5, (64, 64, 64)))
    assert lower(make_case(5, (64, 64, 64))).cuda == first.cuda
    assert tvm.get_global_func("tvm_callback_cuda_compile").same_as(before)
