"""Steps are found by reading a folder, and a step is one declaration."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from support.cases import EVERY_VARIANT, EXPLICIT_STEPS, ROOT, STEPS, THREAD_STEPS, make_case
from tensorir_ladder.harness.build import lower
from tensorir_ladder.kernels.tiles import HopperTile
from tensorir_ladder.schedules.errors import IllegalTile, IllegalWorkload
from tensorir_ladder.schedules.loops.vectorization import dtype_bytes
from tensorir_ladder.schedules.tiles import TensorCoreTile, ThreadTile, WarpgroupTile
from tensorir_ladder.schedules.workloads import DTYPES
from tensorir_ladder.steps.registry import MalformedStep, find_steps, get_step, malformed_steps
from tensorir_ladder.steps.step import Step, UnknownStep, UnsupportedDtype

HALVES = ("float16", "bfloat16")


def step_text(number: int, topic: str) -> str:
    """The file of a step that nobody runs."""
    return f'''"""A step."""
from tensorir_ladder.steps.step import Step, Variant
from tensorir_ladder.steps.thread_tiles import THREAD_TILES


def schedule(problem, config):
    raise NotImplementedError


STEP = Step(
    number={number}, topic="{topic}", text=__doc__, tiles=THREAD_TILES, variants=(Variant("default"),),
    schedule=schedule,
)
'''


GOOD = step_text(2, "bad")


def write(folder: Path, **files: str) -> Path:
    """A folder of steps."""
    for stem, text in files.items():
        (folder / f"{stem}.py").write_text(text)
    return folder


def test_the_registry_finds_the_ladder_by_reading_its_folder() -> None:
    files = sorted(path.stem for path in (ROOT / "steps").glob("step*_*.py"))
    assert sorted(step.name for step in find_steps().values()) == files
    assert list(find_steps()) == list(range(1, 15))
    assert find_steps() == STEPS
    assert not malformed_steps()
    assert all(pickle.loads(pickle.dumps(step)) is step for step in STEPS.values())


def test_a_new_step_is_one_new_file(tmp_path: Path) -> None:
    files = {f"step{number}_{topic}": step_text(number, topic) for number, topic in ((9, "b"), (10, "c"), (1, "naive"))}
    steps = find_steps(write(tmp_path, **files))
    assert [(number, step.name) for number, step in steps.items()] == [
        (1, "step1_naive"),
        (9, "step9_b"),
        (10, "step10_c"),
    ]
    assert steps[9].title == "A step"
    assert steps[9].verified_on(steps[9].variants[0].name) == ("gpu", "llvm", "emulator")
    assert not steps[9].pipelined
    assert get_step(1) is STEPS[1], "another folder's step 1 is not the ladder's"


def test_an_explicit_step_has_a_kernel_in_the_place_of_a_schedule(tmp_path: Path) -> None:
    kernel = GOOD.replace("schedule=schedule", "kernel=schedule")
    (step,) = find_steps(write(tmp_path, step2_bad=kernel)).values()
    assert step.explicit
    assert not step.tensorized
    assert step.verified_on(step.variants[0].name) == ("gpu", "emulator")
    assert EXPLICIT_STEPS == [13, 14]
    assert STEPS[14].verified_on("ring") == ()


MALFORMED = {
    "docstring": (GOOD.replace('"""A step."""\n', ""), "docstring"),
    "no STEP": (GOOD.replace("STEP =", "OTHER ="), "STEP"),
    "empty file": ("", "STEP"),
    "another class": (GOOD[: GOOD.index("STEP =")] + "STEP = Variant('default')\n", "Variant"),
    "another topic": (step_text(2, "good"), "step2_good"),
    "another number": (step_text(3, "bad"), "step3_bad"),
    "no variants": (GOOD.replace('(Variant("default"),)', "()"), "variants"),
    "twice a variant": (GOOD.replace('(Variant("default"),)', '(Variant("a"), Variant("a"))'), "name of its own"),
    "strings": (GOOD.replace('(Variant("default"),)', '("default",)'), "name"),
    "no function": (GOOD.replace("schedule=schedule,", ""), "give one of them"),
    "both": (GOOD.replace("schedule=schedule,", "schedule=schedule, kernel=schedule,"), "give one of them"),
    "unknown field": (GOOD.replace("topic=", "subject='', topic="), "subject"),
    "syntax": (GOOD + "\nthis is no Python\n", "invalid syntax"),
    "import": (GOOD + "\nimport no_such_module\n", "no_such_module"),
    "name": (GOOD + "\nno_such_name\n", "no_such_name"),
}


@pytest.mark.parametrize(("text", "said"), MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_step_is_refused_by_name(
    text: str, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write(tmp_path, step1_good=step_text(1, "good"), step2_bad=text)
    assert list(find_steps(folder)) == [1], "others go on"
    with pytest.raises(MalformedStep, match=r"step2_bad\.py") as caught:
        get_step(2, folder)
    assert said in str(caught.value)
    (logged,) = caplog.messages
    assert logged == f"left out: {caught.value}"
    assert "\n" not in logged


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('"""A step."""\n\n1 / 0\n', "line 3,"),
        ('"""A step."""\ndef broken(:\n', "line 2,"),
        ('"""A step."""\nimport sys\n\n\nsys.exit(7)\n', "line 5,"),
        ('"""A step."""\nfrom tensorir_ladder.steps import no_such_step\n', "line 2,"),
    ],
)
def test_an_error_in_a_steps_file_is_named_with_its_line(text: str, line: str, tmp_path: Path) -> None:
    folder = write(tmp_path, step1_good=step_text(1, "good"), step2_bad=text)
    assert [step.name for step in find_steps(folder).values()] == ["step1_good"]
    with pytest.raises(MalformedStep, match=rf"step2_bad\.py, {line}"):
        get_step(2, folder)


@pytest.mark.parametrize("stem", ["step_3", "stepper", "step3", "stepX_name", "step3-name"])
def test_a_file_that_only_looks_like_a_step_is_refused(stem: str, tmp_path: Path) -> None:
    folder = write(tmp_path, **{stem: GOOD})
    assert not find_steps(folder)
    assert re.match(rf"{stem}\.py .*stepN_topic", str(malformed_steps(folder)[stem]))


def test_a_step_stands_without_its_docstring_where_python_keeps_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tensorir_ladder.steps.step.sys", SimpleNamespace(flags=SimpleNamespace(optimize=2)))
    (step,) = find_steps(write(tmp_path, step2_bad=MALFORMED["docstring"][0])).values()
    assert step.title == "Step 2, bad"


def test_two_steps_of_one_number_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, step3_a=step_text(3, "a"), step3_b=step_text(3, "b"), step4_c=step_text(4, "c"))
    assert list(find_steps(folder)) == [4]
    with pytest.raises(MalformedStep, match=r"step3_b\.py .*step3_a\.py"):
        get_step(3, folder)


def test_unknown_steps_and_variants_are_named_with_those_there_are() -> None:
    with pytest.raises(UnknownStep, match=f"99.*{', '.join(map(str, STEPS))}"):
        get_step(99)
    for ask in (STEPS[5].variant, lambda name: make_case(5, (16, 16, 16), name).validate()):
        with pytest.raises(UnknownStep, match=r"step5_pipelining.*turbo.*async, one_barrier"):
            ask("turbo")


@pytest.mark.parametrize("number", STEPS)
def test_a_function_that_is_called_directly_refuses_what_its_step_does_not_take(number: int) -> None:
    step, case = STEPS[number], make_case(number, (64, 64, 64))
    module = sys.modules[f"tensorir_ladder.steps.{step.name}"]
    functions = [step.schedule, step.schedule_for_cpu, step.kernel]
    functions += [getattr(module, name, None) for name in ("schedule", "schedule_for_cpu", "kernel")]
    asked = filter(None, functions)
    for make in asked:
        with pytest.raises(UnknownStep, match=f"{step.name}.*turbo"):
            make(case.problem, replace(case.config, variant="turbo"))
        with pytest.raises(IllegalTile, match=step.name):
            make(case.problem, replace(case.config, tile=STEPS[14 if number < 14 else 1].tiles.default.tile))


# Near 32 bits: one that the sizes allow and the padding does not, and one of them below.
@pytest.mark.parametrize("shape", [(46340, 46340, 1), (2**31 - 1, 1, 1), (1, 2**31 - 1, 1), (1, 1, 2**31 - 1)])
@pytest.mark.parametrize("number", [number for number in STEPS if number not in EXPLICIT_STEPS])
def test_a_product_that_tiles_pad_beyond_32_bits_is_refused(number: int, shape: tuple[int, int, int]) -> None:
    case = make_case(number, shape)
    for ask in (case.validate, lambda: case.step.schedule(case.problem, case.config)):
        with pytest.raises(IllegalWorkload, match=r"whole tiles of \d+x\d+x\d+") as caught:
            ask()
        assert caught.value.value >= 2**31


def test_an_index_of_an_explicit_kernel_beyond_32_bits_is_refused() -> None:
    with pytest.raises(IllegalWorkload, match="32 bits") as caught:
        lower(make_case(11, (45060, 47100, 64), "tma_store", layout="nt"))
    assert int(caught.value.value) >= 2**31


@pytest.mark.parametrize("number", EXPLICIT_STEPS)
def test_an_explicit_kernel_refuses_results_that_it_does_not_store(number: int) -> None:
    case = make_case(number, (128, 128, 64), out_dtype="float64")
    with pytest.raises(IllegalWorkload, match=r"float64.*float16 \| bfloat16 \| float32"):
        lower(case)
    assert "float64" in case.lacks


# What imports load


def loaded_by(*modules: str) -> list[str]:
    """The project's modules that a fresh interpreter has loaded after importing some."""
    lines = ["import importlib, sys", f"for name in {modules!r}: importlib.import_module('tensorir_ladder.' + name)"]
    lines += ["print(*(name for name in sys.modules if name.startswith('tensorir_ladder.')))"]
    result = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    (names,) = result.stdout.splitlines()  # importing prints nothing
    return [name.removeprefix("tensorir_ladder.") for name in names.split()]


def test_step_5_stands_on_few_files() -> None:
    loaded = loaded_by("steps.step5_pipelining")
    assert len(loaded) + 1 <= 22, loaded  # and the project's own __init__
    assert {name.partition(".")[0] for name in loaded} == {"steps", "schedules"}
    assert [name for name in loaded if name.startswith("steps.step") and name != "steps.step"] == [
        "steps.step5_pipelining"
    ]


def test_importing_steps_runs_nothing_and_loads_nothing_above_them() -> None:
    loaded = loaded_by(*(f"steps.{step.name}" for step in STEPS.values()))
    assert {"harness", "reports", "emulator"}.isdisjoint(name.partition(".")[0] for name in loaded)


def test_step_5_spells_its_annotations_out() -> None:
    text = (ROOT / "steps" / "step5_pipelining.py").read_text(encoding="utf-8")
    pipeline = {
        f'sch.annotate(loops.k_outer, "software_pipeline_{name}"' for name in ("stage", "order", "async_stages")
    }
    assert all(call in text for call in {*pipeline, 'sch.annotate(copy, "double_buffer_scope"'})


# What steps declare


@pytest.mark.parametrize("step", STEPS.values(), ids=lambda step: step.name)
def test_defaults_and_declared_tiles_are_legal(step: Step) -> None:
    tiles, target = step.tiles, make_case(step.number, (64, 64, 64)).machine.target()
    itemsize = dtype_bytes(step.variant(step.default_variant()).dtypes[0])
    assert tiles.default.tile in tiles.best
    assert len(set(tiles.best)) == len(tiles.best) >= 3
    assert set(tiles.best) <= set(tiles.tuning)
    assert {type(tile) for tile in tiles.tuning} == {tiles.kind}
    assert not any(tile.violations(target, itemsize, 1) for tile in tiles.tuning)
    assert not any(choice.tile.violations(target, itemsize, choice.stages) for choice in tiles.choices)
    assert not tiles.default.tile.violations(target, itemsize, step.stages)
    assert step.pipelined == (step.tuning_stages != (1,))


def test_steps_that_are_tiled_alike_share_their_tiles() -> None:
    families = [step.tiles for step in STEPS.values()]
    assert THREAD_STEPS == [1, 2, 3, 4, 5, 6]
    assert len(set(map(id, families[:6]))) == 1
    assert len(set(map(id, families))) == 6
    assert STEPS[10].tiles is STEPS[11].tiles is STEPS[12].tiles
    assert STEPS[8].tiles is STEPS[9].tiles
    assert [STEPS[number].stages for number in (5, 6, 7, *range(9, 15))] == [3, 3, 3, 4, 4, 4, 4, 4, 4]


def test_each_variant_says_which_operands_it_takes() -> None:
    taken = {(number, name): STEPS[number].variant(name).dtypes for number, name in EVERY_VARIANT}
    floats = {(7, name) for name in STEPS[7].variant_names} | {(8, "tf32"), (9, "tf32")}
    for (number, name), dtypes in taken.items():
        expected = ("float32",) if (number, name) in floats else DTYPES if number in THREAD_STEPS else HALVES
        assert dtypes == expected, (number, name)
    tf32 = [(number, name) for number, name in EVERY_VARIANT if STEPS[number].variant(name).math == "tf32"]
    assert tf32 == [(8, "tf32"), (9, "tf32")]
    assert {number for number, step in STEPS.items() if step.tensorized} == {8, 9, 10, 11, 12}


@pytest.mark.parametrize(
    ("step", "own", "other"),
    [
        (5, "64x64x16/4x4", TensorCoreTile(block=(128, 128, 32), warp=(64, 64))),
        (7, "128x128x32/32x64/8x8/1", ThreadTile(block=(64, 64, 16), thread=(4, 4))),
        (8, "128x128x32/64x64", WarpgroupTile(block=(64, 64, 64), warpgroups=(1, 1))),
        (10, "128x256x64/2x1", TensorCoreTile(block=(128, 128, 32), warp=(64, 64))),
        (13, "128x256x64/2x1", WarpgroupTile(block=(128, 256, 64), warpgroups=(2, 1))),
        (14, "128x256x64", HopperTile(block=(128, 256, 64), warpgroups=(2, 1))),
    ],
)
def test_a_tile_of_another_family_is_refused_by_name(step: int, own: str, other) -> None:
    kind = STEPS[step].tiles.kind
    with pytest.raises(IllegalTile, match=STEPS[step].name) as caught:
        make_case(step, (64, 64, 64), tile=other).validate()
    assert (caught.value.value, caught.value.limit) == (str(other), kind.FORM)
    assert kind.EXAMPLE in caught.value.remedy
    make_case(step, (64, 64, 64), tile=kind.parse(own)).validate()


@pytest.mark.parametrize(
    ("step", "variant", "dtype", "remedy"),
    [
        (8, "default", "float32", "--variant tf32"),
        (9, "tf32", "bfloat16", "--variant fragments"),
        (7, "serpentine", "float16", ""),
        (10, "rows", "float32", ""),
    ],
)
def test_a_dtype_is_refused_with_the_variant_that_takes_it(step: int, variant: str, dtype: str, remedy: str) -> None:
    with pytest.raises(UnsupportedDtype, match=rf"{STEPS[step].name}\[{variant}\].*not {dtype}") as caught:
        make_case(step, (64, 64, 64), variant, dtype=dtype).validate()
    said = str(caught.value)
    assert all(taken in said for taken in STEPS[step].variant(variant).dtypes)
    assert remedy in said
    assert ("--variant" in said) == bool(remedy)


def test_the_default_variant_depends_on_cp_async() -> None:
    for arch, variant in (("sm_80", "async"), ("sm_90a", "async"), ("sm_75", "register_staged")):
        assert make_case(5, (64, 64, 64), arch=arch).variant == variant
    assert make_case(4, (64, 64, 64), arch="sm_75").variant == "default"
