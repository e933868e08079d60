"""The ladder: found by reading a folder, each step right at every shape, pipelines equal to the plain loop."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tvm

from support.cases import (
    EVERY_VARIANT,
    EXPLICIT_STEPS,
    ROOT,
    SCHEDULED_VARIANTS,
    SMALL_TILES,
    STEPS,
    THREAD_STEPS,
    config,
    make_case,
    small_case,
)
from tensorir_ladder.harness.build import Kernel, lower
from tensorir_ladder.harness.execution import LlvmBackend
from tensorir_ladder.harness.verify import verify
from tensorir_ladder.kernels.tiles import HopperTile
from tensorir_ladder.schedules.errors import IllegalPipeline, IllegalTile
from tensorir_ladder.schedules.loops.vectorization import dtype_bytes
from tensorir_ladder.schedules.tiles import TensorCoreTile, ThreadTile, WarpgroupTile
from tensorir_ladder.schedules.workloads import DTYPES, Matmul
from tensorir_ladder.steps.registry import MalformedStep, find_steps, get_step
from tensorir_ladder.steps.step import Step, UnknownStep, UnsupportedDtype
from tensorir_ladder.steps.thread_tiles import DEFAULT

CPU = LlvmBackend()
SMALL_TILE = SMALL_TILES[ThreadTile]
SMALL_M, SMALL_N = 8, 16
RING_VARIANTS = (*STEPS[5].module.RING_FORMS, "sync", "register_staged", "double_buffer_pipelined")
GOOD_STEP = '''"""A step."""
VARIANTS = ("default",)


def schedule(problem, config):
    """Never called."""
'''


# The registry


def test_the_registry_finds_the_ladder_by_reading_its_folder() -> None:
    files = sorted(path.stem for path in (ROOT / "steps").glob("step*_*.py"))
    assert sorted(step.name for step in find_steps().values()) == files
    assert list(find_steps()) == list(STEPS) == list(range(1, 15))


def test_an_explicit_step_has_a_kernel_in_the_place_of_a_schedule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = GOOD_STEP.replace("def schedule", "def kernel")
    steps = find_steps(package(tmp_path, monkeypatch, "ladder_explicit", step1_a=GOOD_STEP, step2_b=text))
    assert [step.explicit for step in steps.values()] == [False, True]
    assert steps[2].verified_on == ("gpu", "emulator")
    assert not steps[2].tensorized
    assert [number for number, step in STEPS.items() if step.explicit] == EXPLICIT_STEPS == [11, 12, 13, 14]


def test_a_new_step_is_one_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = package(tmp_path, monkeypatch, "ladder_new", step9_b=GOOD_STEP, step10_c=GOOD_STEP, step2_a=GOOD_STEP)
    steps = find_steps(folder)
    assert [(number, step.name) for number, step in steps.items()] == [(2, "step2_a"), (9, "step9_b"), (10, "step10_c")]
    assert steps[9].title == "A step"
    assert steps[9].verified_on == ("gpu", "llvm", "emulator")
    assert not steps[9].pipelined


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        (GOOD_STEP.replace('"""A step."""\n', ""), "docstring"),
        (GOOD_STEP.replace('VARIANTS = ("default",)', ""), "VARIANTS"),
        (GOOD_STEP.replace('("default",)', "()"), "VARIANTS"),
        (GOOD_STEP.replace("def schedule", "def something_else"), "schedule"),
        ("", "docstring, VARIANTS, a non-empty tuple of names, either schedule"),
        (GOOD_STEP + GOOD_STEP.replace("def schedule", "def kernel"), "either schedule(problem, config) or kernel"),
        (GOOD_STEP.replace("def schedule(problem, config):", "kernel = 1\nif True:"), "or kernel(problem, config)"),
        (GOOD_STEP.replace('("default",)', '"default"'), "VARIANTS"),
        (GOOD_STEP + "\nthis is no Python\n", "invalid syntax"),
        (GOOD_STEP + "\nimport no_such_module\n", "no_such_module"),
    ],
    ids=[
        "docstring",
        "variants",
        "empty variants",
        "schedule",
        "empty file",
        "both",
        "no function",
        "string",
        "syntax",
        "import",
    ],
)
def test_a_malformed_step_is_refused_by_name(
    text: str, missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    name = re.sub(r"\W", "_", request.node.name)
    folder = package(tmp_path, monkeypatch, name, step1_good=GOOD_STEP, step2_bad=text)
    with pytest.raises(MalformedStep, match=r"step2_bad\.py") as caught:
        find_steps(folder)
    assert missing in str(caught.value)


@pytest.mark.parametrize("stem", ["step_3", "stepper", "step3", "stepX_name", "step3-name"])
def test_a_file_that_only_looks_like_a_step_is_refused(
    stem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = package(tmp_path, monkeypatch, f"ladder_{re.sub('-', '_', stem)}", **{stem: GOOD_STEP})
    with pytest.raises(MalformedStep, match=rf"^{stem}\.py is not named stepN_name\.py"):
        find_steps(folder)


def test_two_steps_of_one_number_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = package(tmp_path, monkeypatch, "ladder_twice", step3_a=GOOD_STEP, step3_b=GOOD_STEP)
    with pytest.raises(MalformedStep, match=r"step3_b\.py lacks a number of its own"):
        find_steps(folder)


def test_unknown_steps_and_variants_are_named_with_those_there_are() -> None:
    with pytest.raises(UnknownStep, match=f"no step 99; there are {', '.join(map(str, STEPS))}$"):
        get_step(99)
    with pytest.raises(UnknownStep, match="step5_pipelining has no variant 'turbo'; it has: async, one_barrier"):
        get_step(5).schedule(Matmul(16, 16, 16), config("turbo", DEFAULT.tile))


# The files


def test_importing_a_step_runs_nothing() -> None:
    lines = [f"import steps.{step.name}" for step in STEPS.values()]
    lines += ["import sys", "assert not any(name.split('.')[0] in ('harness', 'reports') for name in sys.modules)"]
    result = subprocess.run([sys.executable, "-c", "\n".join(lines)], cwd=ROOT, capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.parametrize("step", STEPS.values(), ids=lambda step: step.name)
def test_a_step_is_short_says_what_changes_and_defines_no_primitive(step) -> None:
    source = Path(step.module.__file__).read_text()
    assert len(source.splitlines()) < 80
    assert f"Step {step.number}, " in step.title
    assert re.search(r"\bBefore(, | \(step \d+\), )|\bWhat is slow:", step.text)
    assert "::" in step.text  # the loop nest
    assert "run_step(__file__)" in source
    used = set(re.findall(r"\bsch\.(\w+)\(", source))
    assert used <= {"get_sblock", "get_loops"}, f"{step.name} schedules by itself: {used}"


@pytest.mark.parametrize("step", STEPS.values(), ids=lambda step: step.name)
def test_defaults_and_declared_tiles_are_legal(step: Step) -> None:
    family, machine = step.tiles, make_case(step.number, (64, 64, 64)).machine
    itemsize = dtype_bytes(step.variant(step.default_variant()).dtypes[0])
    assert family.default in family.best
    assert len(set(family.best)) == len(family.best) >= 3
    assert not any(tile.violations(machine.target(), itemsize, 1) for tile in family.best)
    assert not any(tile.violations(machine.target(), itemsize, slots) for tile, slots in family.choices)
    assert not family.default.violations(machine.target(), itemsize, step.stages)
    assert all(family.kind.parse(str(tile)) == tile for tile in family.tuning)


def test_steps_that_are_tiled_alike_share_their_tiles() -> None:
    families = [step.tiles for step in STEPS.values()]
    assert THREAD_STEPS == [1, 2, 3, 4, 5, 6]
    assert len(set(map(id, families[:6]))) == 1
    assert len(set(map(id, families))) == 8
    assert STEPS[8].tiles is STEPS[9].tiles
    assert [STEPS[number].stages for number in (5, 6, 7, *range(9, 15))] == [3, 3, 3, 4, 4, 4, 4, 4, 4]


def test_each_variant_says_which_operands_it_takes() -> None:
    taken = {(number, variant): STEPS[number].variant(variant).dtypes for number, variant in EVERY_VARIANT}
    assert {taken[number, variant] for number, variant in EVERY_VARIANT if number in THREAD_STEPS} == {DTYPES}
    assert {taken[7, variant] for variant in STEPS[7].variant_names} == {("float32",)}
    halves = ("float16", "bfloat16")
    assert [taken[8, variant] for variant in STEPS[8].variant_names] == [halves, ("float32",)]
    assert [taken[9, variant] for variant in STEPS[9].variant_names] == [halves, halves, halves, ("float32",)]
    assert {taken[number, variant] for number in (10, 11, 14) for variant in STEPS[number].variant_names} == {halves}
    tf32 = [(number, variant) for number, variant in EVERY_VARIANT if STEPS[number].variant(variant).math == "tf32"]
    assert tf32 == [(8, "tf32"), (9, "tf32")]
    assert {number for number, step in STEPS.items() if step.tensorized} == {8, 9, 10}


@pytest.mark.parametrize(
    ("step", "own", "other", "form"),
    [
        (5, "64x64x16/4x4", "128x128x32/64x64", "MxNxK/TMxTN"),
        (7, "128x128x32/32x64/8x8/1", "64x64x16/4x4", "MxNxK/WMxWN/TMxTN/S"),
        (8, "128x128x32/64x64", "64x64x64/64x64", "MxNxK/WMxWN"),
        (10, "128x256x64/64x256", "128x128x32/64x64", "MxNxK/GMxGN"),
        (11, "128x256x64/2x1", "128x256x64/64x256", "MxNxK/WGMxWGN"),
        (14, "128x256x64", "128x256x64/2x1", "MxNxK"),
    ],
)
def test_a_tile_of_another_family_is_refused_by_name(step: int, own: str, other: str, form: str) -> None:
    kinds = {5: TensorCoreTile, 7: ThreadTile, 8: WarpgroupTile, 10: TensorCoreTile, 11: WarpgroupTile, 14: HopperTile}
    tile = kinds[step].parse(other)
    with pytest.raises(IllegalTile) as caught:
        make_case(step, (64, 64, 64), tile=tile).validate()
    assert str(caught.value).startswith(f"{STEPS[step].name} takes other tiles (got {other}, limit {form})")
    assert caught.value.remedy == f"write e.g. {STEPS[step].tiles.kind.EXAMPLE}"
    make_case(step, (64, 64, 64), tile=STEPS[step].tiles.kind.parse(own)).validate()


@pytest.mark.parametrize(
    ("step", "variant", "dtype", "message"),
    [
        (
            8,
            "default",
            "float32",
            "[default] takes operands in float16 or bfloat16, not float32; --variant tf32 takes it",
        ),
        (9, "tf32", "bfloat16", "[tf32] takes operands in float32, not bfloat16; --variant fragments takes it"),
        (7, "serpentine", "float16", "[serpentine] takes operands in float32, not float16"),
        (10, "rows", "float32", "[rows] takes operands in float16 or bfloat16, not float32"),
    ],
)
def test_a_dtype_is_refused_with_the_variant_that_takes_it(step: int, variant: str, dtype: str, message: str) -> None:
    with pytest.raises(UnsupportedDtype) as caught:
        make_case(step, (64, 64, 64), variant, dtype=dtype).validate()
    assert str(caught.value) == f"{STEPS[step].name}{message}"


@pytest.mark.parametrize("variant", STEPS[10].variant_names)
@pytest.mark.parametrize("k", [64, 128, 192, 256])
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


def test_the_default_variant_depends_on_cp_async() -> None:
    for arch, variant in (("sm_80", "async"), ("sm_90a", "async"), ("sm_75", "register_staged")):
        assert make_case(5, (64, 64, 64), arch=arch).variant == variant
    assert make_case(4, (64, 64, 64), arch="sm_75").variant == "default"


# Right outputs, through LLVM


THREAD_VARIANTS = [(step, variant) for step, variant in EVERY_VARIANT if step in THREAD_STEPS]
OTHER_VARIANTS = [(step, variant) for step, variant in SCHEDULED_VARIANTS if step not in THREAD_STEPS]
shape_names = {"ids": lambda value: "x".join(map(str, value)) if isinstance(value, tuple) else str(value)}


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((33, 17, 50), "nn"),
        ((1, 1, 1), "nn"),
        ((5, 70, 16), "nn"),
        ((64, 64, 1), "nt"),
        ((128, 64, 64), "nn"),
    ],
    **shape_names,
)
@pytest.mark.parametrize(("step", "variant"), THREAD_VARIANTS)
def test_every_step_and_variant_is_right(step: int, variant: str, shape: tuple[int, int, int], layout: str) -> None:
    result = verify(lower(make_case(step, shape, variant, layout=layout)), CPU, seeds=(0,))
    assert result.passed
    assert result.max_error <= result.tolerance


@pytest.mark.parametrize(
    ("shape", "layout", "dtype"),
    [
        ((33, 17, 50), "nn", 0),  # one or two k tiles, none of them whole
        ((1, 1, 1), "nn", 1),
        ((35, 70, 24), "nt", 0),  # rows that are whole vectors
        ((34, 33, 161), "nt", 1),  # no row a whole vector
        ((32, 64, 320), "nn", 0),  # more k tiles than slots
    ],
    **shape_names,
)
@pytest.mark.parametrize(("step", "variant"), OTHER_VARIANTS)
def test_every_tile_of_warps_is_right_in_every_dtype(
    step: int, variant: str, shape: tuple[int, int, int], layout: str, dtype: int
) -> None:
    taken = STEPS[step].variant(variant).dtypes  # in turn, shape by shape
    case = small_case(step, shape, variant, dtype=taken[dtype % len(taken)], layout=layout)
    result = verify(lower(case), CPU, seeds=(0,))
    assert result.passed
    assert result.max_error <= result.tolerance


@pytest.mark.parametrize("step", [8, 9, 10])
def test_what_the_cpu_runs_of_a_tensorized_step_is_its_schedule_before_that(step: int) -> None:
    kernel = lower(small_case(step, (64, 64, 128)))
    instruction = "wgmma.mma_async" if step == 10 else "mma.sync"
    assert instruction in kernel.cuda
    texts = [schedule.mod["main"].script() for schedule in (kernel.schedule, kernel.schedule_for_cpu)]
    assert ["tensor_core_m16n8k16" in text or "wgmma_m64n64k64" in text for text in texts] == [True, False]


@pytest.mark.parametrize("variant", STEPS[10].variant_names)
@pytest.mark.parametrize("k", [64, 128])
def test_a_short_reduction_may_be_asked_for_by_the_slots_that_it_has(variant: str, k: int) -> None:
    case = small_case(10, (64, 64, k), variant)
    assert case.slots == k // 64
    assert lower(replace(case, stages=case.slots)).body == lower(case).body


@pytest.mark.parametrize("step", [8, 9, 10])
def test_half_precision_results_may_be_stored_in_float32(step: int) -> None:
    case = small_case(step, (33, 34, 100), dtype="bfloat16", out_dtype="float32", layout="nt")
    result = verify(lower(case), CPU, seeds=(0,))
    assert result.tolerance < 1e-3  # that of float32, not of bfloat16


@pytest.mark.parametrize(("step", "variant"), THREAD_VARIANTS)
def test_a_transposed_operand_of_ragged_shape_is_right(step: int, variant: str) -> None:
    case = small_case(step, (33, 17, 50), variant, layout="nt")
    assert verify(lower(case), CPU, seeds=(0,)).passed


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize(
    ("step", "variant"), [(1, None), (3, None), (4, None), (5, "async"), (5, "register_staged"), (6, "unroll8")]
)
def test_other_dtypes_are_right(step: int, variant: str | None, dtype: str) -> None:
    case = make_case(step, (20, 18, 50), variant, dtype=dtype, layout="nt", tile=SMALL_TILE, stages=3)
    assert verify(lower(case), CPU, seeds=(0,)).passed


def test_half_precision_operands_may_have_a_float32_output() -> None:
    case = make_case(5, (20, 18, 50), dtype="float16", out_dtype="float32", tile=SMALL_TILE)
    result = verify(lower(case), CPU, seeds=(0,))
    assert result.tolerance < 1e-3  # that of float32, not of float16


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
    for step, variant in ((1, None), (2, None), (4, None), (5, "async"), (5, "writeback"), (6, "unroll32")):
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
    """Lengths of the reduction around the stage count, in tiles of 16, and two ragged ones."""
    tiles = {stages - 1, stages, stages + 1} - {0}
    return sorted({16 * count for count in tiles} | {16 * stages + 3, 7})


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("variant", RING_VARIANTS)
def test_a_pipelined_loop_equals_the_plain_one_bit_for_bit(variant: str, stages: int) -> None:
    for k in k_extents(stages):
        plain, _ = output_of(4, "default", k, 1)
        pipelined, kernel = output_of(5, variant, k, stages)
        assert np.array_equal(plain, pipelined), f"k {k}"
        slots = min(stages, -(-k // 16))
        assert kernel.code.shared_versions == slots, f"k {k}"
        useless = [text for text in kernel.warnings if text.startswith("double_buffer_scope")]
        assert len(useless) == (2 if variant == "double_buffer_pipelined" and slots > 1 else 0), f"k {k}"
        assert len(kernel.warnings) - len(useless) == (1 if slots < stages else 0), f"k {k}"
        assert bool(kernel.pipeline) == (slots > 1), f"k {k}"


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


def test_more_stages_than_k_tiles_warns_once_and_uses_as_many_slots_as_tiles() -> None:
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


def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, **files: str) -> Path:
    """A package of steps in a temporary folder that Python can import."""
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").touch()
    for stem, text in files.items():
        (folder / f"{stem}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    return folder
