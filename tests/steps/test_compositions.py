"""A step writes out what a recipe does in one call: two compositions of the same functions, held equal.

Most are compared as TensorIR, of which the CUDA text is a function; lowering each twice would take ten times as long.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import SBlockRV

from support.cases import SMALL_TILES, STEPS, config
from tensorir_ladder.harness.build import lower_schedule
from tensorir_ladder.harness.machines import DEFAULT_ARCH, machine_for
from tensorir_ladder.schedules import memory, pipeline, recipes, tensor_cores
from tensorir_ladder.schedules.cycles import Planned
from tensorir_ladder.schedules.inspection import annotated_loops
from tensorir_ladder.schedules.isa import TF32
from tensorir_ladder.schedules.loops import unroll_loop
from tensorir_ladder.schedules.tiles import TensorCoreTile, ThreadTile, WarpgroupTile, WarpTile
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.steps.step import Config

pytestmark = pytest.mark.filterwarnings("ignore:.*more would stay empty", "ignore:.*by a kernel in front")

LISTS = [f"software_pipeline_{name}" for name in ("stage", "order", "async_stages")]
WHOLE, RAGGED = (64, 128, 192), (45, 75, 90)
both_shapes = pytest.mark.parametrize("shape", [WHOLE, RAGGED], ids=["whole", "ragged"])
THREADS = SMALL_TILES[ThreadTile]
HOPPER = machine_for(DEFAULT_ARCH)


def product(
    shape: tuple[int, int, int], dtype: str = "float32", layout: str = "nn"
) -> tuple[Matmul, Schedule, SBlockRV]:
    """A problem, and its function as yet unscheduled."""
    problem = Matmul(*shape, dtype, layout)
    sch = Schedule(problem.prim_func())
    return problem, sch, sch.get_sblock("matmul")


def is_step(sch: Schedule, number: int, problem: Matmul, asked: Config) -> bool:
    """Whether a composition is what a step makes, down to its names and annotations."""
    return sch.mod.script() == STEPS[number].schedule(problem, asked).mod.script()


@both_shapes
@pytest.mark.parametrize("number", [2, 3, 4])
def test_steps_2_to_4_are_the_recipe_of_staging(number: int, shape: tuple[int, int, int]) -> None:
    problem, sch, block = product(shape)
    recipes.stage_contraction(sch, block, STEPS[number].tile_built(THREADS), vectorize=number == 4)
    assert is_step(sch, number, problem, config("default", THREADS))


def recipe_of_step_5(problem: Matmul, variant: str, stages: int) -> tuple[Schedule, pipeline.PipelinePlan]:
    """Step 4 by its recipe, pipelined by inference."""
    sch = Schedule(problem.prim_func())
    scope = THREADS.shared_scope(problem.itemsize, stages)
    staged = recipes.stage_contraction(sch, sch.get_sblock("matmul"), THREADS, vectorize=True, scope=scope)
    if variant.startswith("double_buffer"):
        for name in ("A_shared", "B_shared"):
            pipeline.double_buffer(sch, sch.get_sblock(name))
    plan = pipeline.infer_pipeline(sch, staged.loops.k_outer, stages, async_copy=variant == "async")
    pipeline.pipeline_loop(sch, staged.loops.k_outer, stages, async_copy=variant == "async")
    return sch, plan


@pytest.mark.filterwarnings("ignore:double_buffer_scope")
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("variant", ["async", "sync", "double_buffer_pipelined"])
def test_step_5_writes_the_lists_that_would_be_inferred(variant: str, stages: int) -> None:
    problem, *_ = product(WHOLE)
    inferred, plan = recipe_of_step_5(problem, variant, stages)
    sch = STEPS[5].schedule(problem, config(variant, THREADS, stages))
    written = [dict(loop.annotations) for loop in annotated_loops(sch.mod, LISTS[0])]
    planned = dict(zip(LISTS, map(list, (plan.stage, plan.order, plan.async_stages))))
    assert [{key: list(values) for key, values in each.items()} for each in written] == (
        [{key: values for key, values in planned.items() if values}] if stages > 1 else []
    )
    assert sch.mod.script() == inferred.mod.script()


@both_shapes
@pytest.mark.parametrize(("variant", "stages"), [("async", 3), ("sync", 2), ("async", 4)])
def test_step_5_is_step_4_and_pipeline_loop(variant: str, stages: int, shape: tuple[int, int, int]) -> None:
    problem, *_ = product(shape)
    sch, _ = recipe_of_step_5(problem, variant, stages)
    step = STEPS[5].schedule(problem, config(variant, THREADS, stages))
    assert lower_schedule(step, HOPPER, "step").cuda == lower_schedule(sch, HOPPER, "recipe").cuda


@both_shapes
@pytest.mark.parametrize("arch", [DEFAULT_ARCH, "sm_75"])
def test_step_6_is_step_5_unrolled(arch: str, shape: tuple[int, int, int]) -> None:
    problem, sch, block = product(shape)
    has_cp_async = machine_for(arch).has_cp_async
    staged = recipes.stage_contraction(sch, block, THREADS, vectorize=True, through_registers=not has_cp_async)
    pipeline.pipeline_loop(sch, staged.loops.k_outer, 3, async_copy=has_cp_async)
    unroll_loop(sch, staged.loops.k_inner, 4)
    assert is_step(sch, 6, problem, config("unroll4", THREADS, 3, arch))


@pytest.mark.sampled(2)
@both_shapes
@pytest.mark.parametrize(
    ("tile", "variant", "raster"),
    [
        ("16x32x16/16x32/4x4/1", "serpentine", 8),
        ("16x32x16/16x32/4x4/2", "serpentine", 8),
        ("32x128x8/32x128/8x16/1", "serpentine", 8),  # reads ahead
        ("16x32x16/16x32/4x4/1", "no_raster", 1),
    ],
)
def test_step_7_is_the_recipe_for_warps(tile: str, variant: str, raster: int, shape: tuple[int, int, int]) -> None:
    problem, sch, block = product(shape)
    warps = WarpTile.parse(tile)
    memory.align_operands(sch, block, warps.block)
    staged = recipes.stage_for_warps(sch, block, warps, scope=warps.shared_scope(4, 3), raster=raster)
    ahead = bool(warps.steps_ahead) and pipeline.pipeline_reads(sch, staged.k_inner, 3)
    unroll_loop(sch, staged.k_inner)
    pipeline.pipeline_loop(sch, staged.k_outer, 3, True, one_barrier=True, fill_ahead=ahead)
    assert is_step(sch, 7, problem, config(variant, warps))


@pytest.mark.sampled(2)
@both_shapes
@pytest.mark.parametrize(
    ("number", "variant", "dtype", "layout"),
    [
        (8, "default", "float16", "nt"),
        (8, "tf32", "float32", "nn"),
        (9, "fragments", "bfloat16", "nn"),
        (9, "shared", "float16", "nt"),
    ],
)
def test_steps_8_and_9_are_the_recipe_for_tensor_cores(
    number: int, variant: str, dtype: str, layout: str, shape: tuple[int, int, int]
) -> None:
    tile = TensorCoreTile(block=(32, 32, 32), warp=(16, 32))
    problem, sch, block = product(shape, dtype, layout)
    instruction, ring = TF32 if variant == "tf32" else None, number == 9
    scope = tile.shared_scope(problem.itemsize, 3 if ring else 1)
    made = tensor_cores.tensorize_contraction(sch, block, tile, scope=scope, hide_reads=ring, instruction=instruction)
    if ring:
        ahead = variant != "shared" and pipeline.pipeline_reads(sch, made.loops.k_step, 3)
        form = {"one_barrier": True, "unroll_ring": True, "fill_ahead": ahead}
        pipeline.pipeline_loop(sch, made.loops.k_outer, 3, True, **form)
    tensor_cores.use_instruction(sch, made.loops, made.loads, made.instruction)
    assert is_step(sch, number, problem, config(variant, tile))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("shape", "variant"),
    [
        ((64, 128, 256), "rows"),
        ((45, 75, 90), "in_flight"),  # rows that are copied first
        ((64, 128, 256), "awaited"),
    ],
    ids=str,
)
def test_step_10_is_the_recipe_for_warpgroups(shape: tuple[int, int, int], variant: str) -> None:
    tile = WarpgroupTile(block=(64, 64, 64), warpgroups=(1, 1))
    problem, sch, block = product(shape, "float16", "nt")
    memory.align_operands(sch, block, tile.block, vector_bytes=16, rounds=2)
    made = tensor_cores.stage_for_warpgroups(sch, block, tile, store_rows=variant == "rows")
    tensor_cores.pipeline_warpgroups(sch, made.loops.k_outer, 4, 0 if variant == "awaited" else 1)
    tensor_cores.multiply_by_wgmma(sch, made.loops, made.instruction)
    assert is_step(sch, 10, problem, config(variant, tile, 4))


@pytest.mark.parametrize("variant", ["fitted", "boxes"])
def test_step_10_s_forms_of_any_shape_are_the_recipe(variant: str) -> None:
    tile = WarpgroupTile(block=(64, 64, 64), warpgroups=(1, 1))
    planned = Planned(parts=2, boxes=variant == "boxes")
    problem, sch, block = product((72, 136, 264), "float16")
    recipes.multiply_by_warpgroups(sch, block, tile, 4, planned)
    assert is_step(sch, 10, problem, replace(config(variant, tile, 4), planned=planned))


@both_shapes
def test_step_7_s_form_of_any_shape_is_the_recipe(shape: tuple[int, int, int]) -> None:
    tile, planned = WarpTile.parse("16x32x16/16x32/4x4/2"), Planned(parts=2, copied=(True, True))
    problem, sch, block = product(shape)
    asked = replace(config("fitted", tile), planned=planned)
    recipes.multiply_by_warps(sch, block, tile, asked.stages, planned, asked.machine)
    assert is_step(sch, 7, problem, asked)
