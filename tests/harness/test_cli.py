"""The command line: one grammar, whoever asks; what it prints where there is no GPU."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from support.cases import EXPLICIT_STEPS, ROOT, SMALL_TILES, STEPS, Outcome, make_case, redeclare, verified_on
from tensorir_ladder import emulator
from tensorir_ladder.emulator import KernelFault
from tensorir_ladder.harness import cli, execution
from tensorir_ladder.harness.build import Case
from tensorir_ladder.harness.commands.options import CPU_SIZES, GPU_SIZES, LISTING_SIZES, cases_of
from tensorir_ladder.harness.machines import DEFAULT_ARCH, MACHINES, machine_for
from tensorir_ladder.harness.records import Listing
from tensorir_ladder.harness.timeline import NoTimeline
from tensorir_ladder.harness.verify import WrongResult
from tensorir_ladder.kernels.codegen import toolchain
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.steps import registry
from tensorir_ladder.steps.thread_tiles import THREAD_TILES

Command = Callable[..., Outcome]


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same behaviour everywhere: no GPU is seen."""
    monkeypatch.setitem(sys.modules, "torch", None)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without compilers, which most tests do not need: what LLVM can run, it does."""

    def missing() -> None:
        raise toolchain.NoCompiler("no CUDA compiler found; pip install one")

    monkeypatch.setattr(toolchain, "require_compiler", missing)
    monkeypatch.setattr(toolchain, "find_compiler", lambda: None)
    monkeypatch.setattr(emulator, "find_host_compiler", lambda: None)


def process(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A file run by a Python process in the project's root, which sees no GPU."""
    code = "import sys, runpy; sys.modules['torch'] = None; sys.argv = sys.argv[1:]; sys.path.insert(0, '.'); "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    return subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True)


def test_a_step_run_by_itself_is_the_run_command(command: Command) -> None:
    options = ("--size", "64", "--variant", "async,double_buffer_pipelined", "--seed", "7")
    alone = process("steps/step5_pipelining.py", *options)
    useless = [line for line in alone.stderr.splitlines() if "double_buffer_scope" in line and "no effect" in line]
    assert (alone.returncode, len(useless)) == (0, 2)  # once for each operand, of double_buffer_pipelined
    assert alone.stderr.splitlines() == useless
    outcome = command("run", "--step", "5", *options)
    assert outcome == (alone.returncode, alone.stdout, alone.stderr)
    assert verified_on(outcome) == ["llvm", "llvm"]
    if toolchain.find_compiler():
        assert re.search(r"^predicted for .*gain \+\d+ %", outcome.out, re.M)


def test_a_step_file_is_run_as_the_readme_says(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, str(ROOT / "steps" / "step1_naive.py"), "--size", "16", "--on", "llvm", "--show", "tir"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert "def main(" in result.stdout


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("number", [number for number in STEPS if number not in EXPLICIT_STEPS])
def test_every_step_is_verified_and_says_so_on_a_line_of_its_own(number: int, command: Command) -> None:
    small = str(SMALL_TILES[STEPS[number].tiles.kind])
    outcome = command("run", "--step", str(number), "--size", "32", "--variant", "default", "--tile", small)
    assert outcome.code == 0
    assert verified_on(outcome) == ["llvm"]
    assert re.search(rf"^step{number}_\w+\[\w+\] 32x32x32 .*worst error .*tolerance", outcome.out, re.M)
    assert "GFLOPS" not in outcome.out
    assert " ms" not in outcome.out


@pytest.mark.emulator
@pytest.mark.parametrize("number", [number for number, step in STEPS.items() if step.tensorized])
def test_the_emulator_comes_before_llvm_for_tensorized_steps(number: int, command: Command) -> None:
    small = str(SMALL_TILES[STEPS[number].tiles.kind])
    outcome = command("verify", "--step", str(number), "--size", "32", "--variant", "default", "--tile", small)
    assert (outcome.code, verified_on(outcome)) == (0, ["emulator"])


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("number", EXPLICIT_STEPS)
def test_an_explicit_step_is_verified_by_the_emulator_only(number: int, command: Command) -> None:
    arguments = ("--step", str(number), "--size", "64", "--variant", "default")
    ran, verified = command("run", *arguments), command("verify", *arguments)
    assert (ran.code, verified.code) == (0, 3)
    assert verified_on(ran) == verified_on(verified) == [""]
    assert ("emulator" if STEPS[number].verified_on(STEPS[number].variants[0].name) else "never run") in ran.out
    assert "worst error" not in ran.out + verified.out
    assert ("install g++" in verified.out) == bool(STEPS[number].verified_on(STEPS[number].variants[0].name))


@pytest.mark.compiler
def test_an_explicit_step_is_compiled_without_a_gpu(command: Command) -> None:
    arguments = ("--step", "11", "--size", "64", "--variant", "tma_store", "--arch", "sm_90a")
    outcome = command("run", *arguments, "--on", "llvm")
    assert outcome.code == 0
    assert verified_on(outcome) == [""]
    assert "compiled for sm_90a" in outcome.out
    for what, text in (
        ("tir", "tensormap_encode_tiled"),
        ("cuda", "cp.async.bulk.tensor"),
        ("ptx", "mbarrier.try_wait"),
    ):
        assert text in command("compile", *arguments, "--show", what).out


@pytest.mark.usefixtures("quick")
def test_one_step_compares_its_variants_by_their_code(command: Command) -> None:
    outcome = command("run", "--step", "5", "--shape", "64x64x128", "--stages", "3", "--all-variants")
    assert outcome.code == 0
    assert verified_on(outcome) == ["llvm"] * len(STEPS[5].variant_names)
    for variant in STEPS[5].variant_names:
        assert re.search(rf"^{variant}: \S", outcome.out, re.M), variant
    assert re.search(r"^double_buffer: .*step4_vectorization\[default\]", outcome.out, re.M), "the same code"
    # Of async: stages, cp.async, the wait's count, barriers.
    assert re.search(r"\basync\W+3\W+2\W+2\W+2\b", outcome.out)


@pytest.mark.usefixtures("quick")
def test_several_steps_take_their_default_variants(command: Command) -> None:
    outcome = command("verify", "--step", "1-3,5", "--shape", "17x5x9,8x8x8")
    assert outcome.code == 0
    checked = re.findall(r"^(\w+\[\w+\]) (\w+) .*worst error", outcome.out, re.M)
    names = ["step1_naive[default]", "step2_shared_tiling[default]", "step3_register_tiling[default]"]
    names.append("step5_pipelining[async]")
    assert checked == [(name, shape) for shape in ("17x5x9", "8x8x8") for name in names]
    assert verified_on(outcome) == ["llvm"] * len(checked)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--step 6 --variant unroll4 --stages 2", "step6_unrolling[unroll4] 8x8x8 float32 32x64x16/4x4"),
        ("--step 4 --tile 16x16x8/2x4 --dtype float16", "step4_vectorization[default] 8x8x8 float16 16x16x8/2x4"),
        ("--step 5 --variant default --arch sm_75", "step5_pipelining[register_staged] 8x8x8 float32"),
        ("--step 4 --dtype bfloat16 --out-dtype float32 --layout nt", "step4_vectorization[default] 8x8x8 bfloat16"),
    ],
)
def test_options_reach_the_case(options: str, expected: str, command: Command) -> None:
    outcome = command("verify", "--size", "8", "--on", "llvm", *options.split())
    assert outcome.code == 0
    assert expected in outcome.out


def cases(*arguments: str) -> list[str]:
    """The cases that a command line names."""
    return list(map(str, cases_of(cli.parse(arguments), CPU_SIZES)))


def test_each_step_has_its_own_default_dtype_tile_and_stages() -> None:
    named = cases("verify", "--step", "6-13", "--size", "512")
    assert [case.rsplit(" ", 3)[0] if "stages" in case else case.rsplit(" ", 1)[0] for case in named] == [
        "step6_unrolling[full] 512x512x512 float32",
        "step7_warp_tiling[serpentine] 512x512x512 float32",
        "step8_tensor_cores[default] 512x512x512 float16",
        "step9_async_ring[fragments] 512x512x512 float16",
        "step10_wgmma[rows] 512x512x512 float16",
        "step11_tma_ring[boxes] 512x512x512 float16",
        "step12_warp_specialization[own_warp] 512x512x512 float16",
        "step13_persistent[stream] 512x512x512 float16",
    ]
    problems = [Matmul(512, 512, 512, step.variant(step.default_variant()).dtypes[0]) for step in STEPS.values()]
    defaults = [
        Case.default(step, problem, machine_for(DEFAULT_ARCH)) for step, problem in zip(STEPS.values(), problems)
    ]
    assert named == list(map(str, defaults[5:13]))


def test_small_and_large_products_get_tiles_of_their_own() -> None:
    for number in (7, 9, 10, 11, 12, 13):
        (small,), (large,) = (
            cases("verify", "--step", str(number), "--variant", "default", "--size", size) for size in ("128", "8192")
        )
        assert small.split()[3] != large.split()[3] == str(STEPS[number].tiles.default.tile)


def test_without_a_step_all_are_meant() -> None:
    able = [number for number, step in STEPS.items() if step.arch in ("", DEFAULT_ARCH)]
    assert [case.split("_")[0] for case in cases("verify")] == [f"step{number}" for number in able]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--step 9 --dtype bfloat16 --all-variants", ["fragments", "shared", "any_m"]),
        ("--step 9 --variant all --dtype float32", ["tf32"]),
        ("--step 9 --all-variants", ["fragments", "shared", "any_m"]),
        ("--step 9", ["fragments"]),
        ("--step 8-9 --dtype bfloat16", ["default", "fragments"]),
        ("--step 8-9 --variant tf32", ["tf32", "tf32"]),
        ("--step 10 --variant all", list(STEPS[10].variant_names)),
    ],
)
def test_variants_that_take_the_dtype_are_meant(options: str, expected: list[str]) -> None:
    assert [re.search(r"\[(\w+)\]", case).group(1) for case in cases("verify", *options.split())] == expected


def test_a_variant_brings_its_own_default_dtype() -> None:
    (case,) = cases("verify", "--step", "8", "--variant", "tf32", "--stages", "2")
    assert case.startswith("step8_tensor_cores[tf32] 256x256x256 float32 ")


@pytest.mark.usefixtures("quick")
def test_variants_with_operands_of_their_own_are_compared_by_their_code(command: Command) -> None:
    tile = str(SMALL_TILES[STEPS[9].tiles.kind])
    outcome = command("run", "--step", "9", "--variant", "fragments,tf32", "--size", "64", "--tile", tile)
    assert outcome.code == 0
    assert verified_on(outcome) == ["llvm"] * 2
    assert re.search(r"^tf32: 4 cp\.async .*16 bytes", outcome.out, re.M)
    assert "predicted" not in outcome.out, "no prediction for tiles of warps"


@pytest.mark.usefixtures("quick")
def test_all_variants_of_a_machine_without_cp_async(command: Command) -> None:
    outcome = command("verify", "--step", "5", "--size", "8", "--arch", "sm_75", "--variant", "all")
    assert outcome.code == 0
    left_out = [variant.name for variant in STEPS[5].variants if variant.needs_async_copy]
    assert not any(f"[{variant}]" in outcome.out for variant in left_out)
    assert outcome.out.count("worst error") == len(STEPS[5].variant_names) - len(left_out)


@pytest.mark.parametrize(
    ("arch", "left_out"),
    [
        ("sm_75", {7: "cp.async", 8: "mma", 9: "cp.async", 10: "cp.async", 11: "wgmma", 14: "tcgen05"}),
        ("sm_80", {10: "wgmma", 11: "wgmma", 12: "wgmma", 13: "wgmma", 14: "tcgen05"}),
        ("sm_90a", {14: "tcgen05"}),
        ("sm_100a", {10: "wgmma", 11: "wgmma", 12: "wgmma", 13: "wgmma"}),
    ],
)
def test_without_a_step_those_are_left_out_that_the_machine_cannot_run(
    arch: str, left_out: dict[int, str], capsys: pytest.CaptureFixture[str]
) -> None:
    named = {int(re.match(r"step(\d+)", case).group(1)) for case in cases("verify", "--arch", arch, "--size", "64,128")}
    out, err = capsys.readouterr()
    (warning,) = err.splitlines()
    assert out == ""
    reasons = dict(re.findall(r"step(\d+)_\w+, since ([^;]*)", warning))
    assert named == set(STEPS) - set(map(int, reasons))
    for number, instruction in left_out.items():
        assert instruction in reasons[str(number)]
        assert arch in reasons[str(number)]


def test_of_several_steps_those_are_left_out_that_the_machine_cannot_run(
    capsys: pytest.CaptureFixture[str], command: Command
) -> None:
    named = cases("run", "--step", "8-13", "--arch", "sm_86", "--size", "64")
    (warning,) = capsys.readouterr().err.splitlines()
    assert {case.partition("[")[0] for case in named} == {"step8_tensor_cores", "step9_async_ring"}
    assert set(re.findall(r"step(\d+)_\w+, since", warning)) == {"10", "11", "12", "13"}
    outcome = command("run", "--step", "11,12", "--arch", "sm_86")
    assert (outcome.code, outcome.out) == (2, "")
    assert all(word in outcome.err for word in ("step11_tma_ring", "step12_warp_specialization", "sm_86", "--arch"))


def test_without_a_step_those_are_left_out_that_refuse_a_shape(capsys: pytest.CaptureFixture[str]) -> None:
    named = cases("verify", "--arch", "sm_90a", "--shape", "33x17x50,32x16x48")
    elsewhere = sum(STEPS[number].arch not in ("", "sm_90a") for number in EXPLICIT_STEPS)
    assert len(named) == 2 * len(STEPS) - len(EXPLICIT_STEPS) - elsewhere
    assert re.search(r"step13_persistent, since TMA .*16 bytes.* 50", capsys.readouterr().err)


@pytest.mark.usefixtures("quick")
def test_more_stages_than_k_tiles_warns_on_stderr_once(command: Command) -> None:
    outcome = command("run", "--step", "5", "--variant", "async", "--shape", "8x8x32", "--stages", "5")
    assert outcome.code == 0
    assert verified_on(outcome) == ["llvm"]
    (warning,) = outcome.err.splitlines()
    assert re.match(r"warning: .*\b5 pipeline stages", warning)
    assert "warning" not in outcome.out


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("tir", ["def main(", "software_pipeline_stage", "threadIdx.x", 'T.sblock("matmul']),
        ("lowered", ["def main_kernel", "threadIdx"]),
        ("cuda", ['extern "C" __global__', "__syncthreads()", "ptx_cp_async", "main_kernel"]),
    ],
)
def test_show_prints_code(what: str, expected: list[str], command: Command) -> None:
    outcome = command("run", "--step", "5", "--variant", "async", "--shape", "32x64x64", "--show", what)
    assert outcome.code == 0
    for text in expected:
        assert text in outcome.out
    assert verified_on(outcome) == ["llvm"]


@pytest.mark.compiler
@pytest.mark.parametrize(("what", "expected"), [("ptx", "cp.async.cg.shared.global"), ("sass", "LDGSTS")])
def test_show_prints_compiled_code(what: str, expected: str, command: Command) -> None:
    outcome = command("compile", "--step", "5", "--variant", "async", "--shape", "32x64x64", "--show", what)
    if what == "sass" and re.search("no (cuobjdump|nvdisasm) found", outcome.err):
        pytest.skip(outcome.err.strip())
    assert outcome.code == 0
    assert expected in outcome.out


@pytest.mark.compiler
def test_compile_says_what_the_compiler_found(command: Command) -> None:
    outcome = command("compile", "--step", "4-5", "--size", "64", "--arch", "sm_80")
    assert outcome.code == 0
    assert re.search(r"nvcc [\d.]+ .*sm_80", outcome.out)
    for text in ("step4_vectorization", "step5_pipelining", "6144"):
        assert text in outcome.out
    assert "verified" not in outcome.out


@pytest.mark.compiler
def test_compile_writes_listings(command: Command, tmp_path: Path) -> None:
    arguments = ["compile", "--step", "5", "--variant", "async", "--shape", "64x64x128", "--stages", "3"]
    outcome = command(*arguments, "--out", str(tmp_path))
    assert outcome.code == 0
    path = tmp_path / "listings" / "step5-async.json"
    assert f"wrote {path}" in outcome.out
    listing = Listing.from_json(path.read_text(), origin=str(path))
    assert (listing.step, listing.variant, listing.default_variant, listing.shape) == (5, "async", True, "64x64x128")
    assert (listing.stages, listing.arch, listing.tile) == (3, "sm_90a", str(make_case(5, (1, 1, 1)).tile))
    assert "software_pipeline_stage" in listing.tir
    assert listing.cuda.startswith('extern "C" __global__')
    assert listing.code.wait_groups == (2,)
    assert listing.resources.registers > 0
    assert listing.pipeline["software_pipeline_async_stages"] == [0]
    assert listing.text == STEPS[5].text
    assert listing.why
    assert listing.aspects["waits"] == "wait_group 2"


@pytest.mark.usefixtures("quick")
def test_a_step_that_nothing_here_can_verify(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    redeclare(monkeypatch, 4, never_run=True)
    verified = command("verify", "--step", "4", "--size", "8")
    assert (verified.code, verified_on(verified)) == (3, [""])
    ran = command("run", "--step", "4", "--size", "8")
    assert (ran.code, verified_on(ran)) == (0, [""])
    assert "never run" in ran.out
    both = command("verify", "--step", "4,3", "--size", "8")
    assert (both.code, verified_on(both)) == (3, ["", "llvm"]), "one that can be verified does not hide one that cannot"


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("verb", ["run", "verify"])
def test_a_wrong_kernel_exits_1_and_claims_nothing(
    verb: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution.LlvmBackend, "load", lambda _self, _kernel: lambda a, b, c: c.fill(0))
    outcome = command(verb, "--step", "4", "--size", "8")
    assert outcome.code == 1
    (line,) = outcome.err.splitlines()
    assert line.startswith("error: wrong result: step4_vectorization[default] 8x8x8")
    assert "verified" not in outcome.out


def test_list_shows_what_there_is(command: Command) -> None:
    outcome = command("list")
    assert (outcome.code, outcome.err) == (0, "")
    for step in STEPS.values():
        assert step.name in outcome.out
    flat = re.sub(r"[\s│]+", " ", outcome.out)
    for name in (*MACHINES, *map(str, THREAD_TILES.best), "register_staged", "unroll32", "tf32", "rows"):
        assert name in flat
    for step in STEPS.values():
        assert all(str(tile) in flat for tile in step.tiles.tuning)
        assert f"tiles {step.tiles.kind.FORM}, default {step.tiles.default.tile}" in flat
        assert f"{step.stages} stages" in flat or not step.pipelined


def test_help_names_every_command_and_imports_nothing_heavy() -> None:
    heavy = ("tvm", "torch", "numpy", "matplotlib", "rich")
    code = "import sys; from tensorir_ladder.harness.cli import main; main(['--help'])\n"
    code += f"print('loaded', [name for name in {heavy} if name in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.splitlines()[-1] == "loaded []"
    for name in cli.COMMANDS:
        assert re.search(rf"^  {name} +\w", shown, re.M), name


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_options_and_a_help_of_its_own(name: str, command: Command) -> None:
    outcome = command(name, "--help")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith(cli.as_typed(f"usage: ladder {name}"))
    assert "Needs:" in outcome.out


def test_run_offers_what_names_a_case(command: Command) -> None:
    shown = command("run", "--help").out
    for option in ("--size", "--shape", "--variant", "--stages", "--tile", "--arch", "--on", "--show", "--out"):
        assert option in shown


def test_the_examples_of_the_help_are_understood() -> None:
    examples = [re.split(r"\s{2,}", line.strip())[0].split() for line in cli.EXAMPLES.splitlines()]
    assert len(examples) >= 5
    for program, *words in examples:
        if program == "python":
            assert (ROOT / words[0]).is_file()
        else:
            options = cli.parse(words)
            if words[0] in ("run", "verify", "compile", "depth", "launch", "tune"):
                assert cases_of(options, CPU_SIZES, tunes=True)


def test_every_error_is_one_line_with_an_exit_status_of_its_own(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(error: BaseException) -> Callable[..., int]:
        def run(_options: object, _command: str) -> int:
            raise error

        return run

    module = import_module("tensorir_ladder.harness.commands.list")
    fault = KernelFault("a kernel", "a race", "in shared memory", seed=7)
    for error, code in ((NoTimeline("no stamps"), 2), (WrongResult("off by 1"), 1), (fault, 1)):
        monkeypatch.setattr(module, "run", fail(error))
        outcome = command("list")
        assert (outcome.code, outcome.out) == (code, "")
        assert outcome.err.startswith("error: ")
        assert str(error).splitlines()[0] in outcome.err.splitlines()[0]
        assert ("--emulator-seed 7" in outcome.err) == (error is fault)
    for error, code in (
        (ZeroDivisionError("a bug\nof two lines"), 4),
        (SystemExit(0), 4),
        (RecursionError("x" * 10_000), 4),
        (ModuleNotFoundError("No module named 'rich'", name="rich"), 2),
        (ModuleNotFoundError("No module named 'tensorir_ladder.gone'", name="tensorir_ladder.gone"), 4),
        (PermissionError(13, "Permission denied", "/a/place"), 2),
        (MemoryError(), 2),
        (KeyboardInterrupt(), 130),
    ):
        monkeypatch.setattr(module, "run", fail(error))
        outcome = command("list")
        assert (outcome.code, outcome.out) == (code, "")
        (line,) = outcome.err.splitlines()
        assert len(line) < 1100
        assert ("a defect of this program" in line) == (code == 4)
        if code == 4:
            assert type(error).__name__ in line


@pytest.mark.parametrize("arguments", [("--debug", "list"), ("list", "--debug"), ("table", "--debug"), ("list",)])
def test_debug_shows_where_an_error_was_raised(
    arguments: tuple[str, ...], command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "--debug" not in arguments:
        monkeypatch.setenv("LADDER_DEBUG", "1")
    for name in ("harness.commands.list", "reports.__main__"):
        module = import_module(f"tensorir_ladder.{name}")
        monkeypatch.setattr(module, "run", lambda *_: [][0])
    outcome = command(*arguments)
    assert outcome.code == 4
    assert outcome.err.startswith("Traceback")
    assert outcome.err.splitlines()[-1].startswith("error: a defect of this program: IndexError")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("redirected", "arguments", "said"),
    [
        ("> /dev/full", "--help", "error: .*No space left"),
        ("> /dev/full", "table --json", "error: .*No space left"),
        (">&-", "--help", "error: .*closed"),
        ("2> /dev/full", "fly", ""),
    ],
)
def test_output_that_cannot_be_written_is_refused(redirected: str, arguments: str, said: str) -> None:
    command = f"{sys.executable} -m harness {arguments} {redirected}"
    result = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True)
    assert (result.returncode, len(result.stderr.splitlines())) == (2, bool(said))
    assert re.match(said, result.stderr)


def test_a_reader_that_leaves_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "harness", "--help"]
    result = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (result.returncode, result.stderr) == (141, "")


@pytest.mark.parametrize("name", ["list", "verify"])
def test_output_in_ascii(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True) for _ in range(2))
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    code = cli.main([name, *([] if name == "list" else ["--tile", "128×64"])])
    text = {"list": out, "verify": err}[name].buffer.getvalue().decode("ascii")
    assert (code, "×" in text) == ({"list": 0, "verify": 2}[name], False)
    assert re.search(r"\dx\d", text)


def test_a_step_file_with_an_error_leaves_the_others(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "step4_broken.py").write_text('"""A step."""\n\n1 / 0\n')
    find = registry._find
    good, _ = find(registry.HERE)
    _, malformed = find(tmp_path)
    left = {number: step for number, step in good.items() if number != 4}
    monkeypatch.setattr(registry, "_find", lambda _folder: (left, malformed))
    outcome = command("verify", "--step", "3", "--size", "8", "--on", "llvm")
    assert (outcome.code, outcome.err) == (0, "")
    outcome = command("verify", "--step", "4", "--size", "8")
    assert outcome.code == 2
    (line,) = outcome.err.splitlines()
    assert line.startswith("error: step4_broken.py, line 3,")
    assert "ZeroDivisionError" in line


@pytest.mark.parametrize(
    ("arguments", "named", "not_said"),
    [
        ("compile --step 10 --arch sm_80", ("sm_80 has no wgmma", "--arch"), "smaller"),
        ("run --step 5 --tile tuned", ("--tile tuned", "takes a GPU", "no torch"), "only run"),
        ("run --step 5 --tile best --on llvm", ("--tile best", "takes a GPU"), "only run"),
        ("verify --step 5 --tile tuned", ("--tile tuned", "only run"), "GPU"),
        ("verify --step 5 --tile 1x1x2147483647/1x1", ("2147483647", "shared memory", "smaller tiles"), "malformed"),
        ("show 5 --tile 30x64x16/4x4", ("30 rows", "multiple of 4", "choose multiples"), "smaller"),
        ("explain 5 --stages 200", ("200 stages", "64", "k tile", "393216 bytes", "fewer stages"), "multiples"),
        ("verify --step 1 --size 16 --out /proc/x", ("--out /proc/x", "ladder verify --help"), "verified"),
        ("verify --step 13 --out-dtype float64", ("float64", "float16 | bfloat16 | float32"), "defect"),
        ("verify --step 5 --shape 46340x46340x1", ("46340x46340x1", "32-bit", "2147483648"), "defect"),
    ],
)
def test_a_refusal_names_its_cause(arguments: str, named: tuple[str, ...], not_said: str, command: Command) -> None:
    if arguments.startswith("compile") and toolchain.find_compiler() is None:
        pytest.skip("no CUDA compiler")
    outcome = command(*arguments.split())
    assert (outcome.code, outcome.out) == (2, "")
    (line,) = outcome.err.splitlines()
    assert all(word in line for word in named), line
    assert not_said not in line


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("compile", LISTING_SIZES),
        ("depth", LISTING_SIZES),
        ("launch", "512"),
        ("timeline", "4096"),
        ("counters", GPU_SIZES),
        ("run", f"{GPU_SIZES} on a GPU, {CPU_SIZES} without"),
    ],
)
def test_the_help_names_the_sizes_that_are_taken(name: str, size: str) -> None:
    (text,) = [action.help for action in cli.parser_of(name)._actions if "--size" in action.option_strings]
    assert text == f"square sizes: 256,512 ({size})"
    if name == "compile":
        assert {case.problem.m for case in cases_of(cli.parse(["compile", "--step", "5"]), LISTING_SIZES)} == {1024}


def test_reports_are_commands_too(command: Command, tmp_path: Path) -> None:
    assert command("table", "--json", "--results", str(tmp_path)) == (0, "[]\n", "")
    outcome = command("table", "--results", str(tmp_path))
    assert outcome.code == 2
    assert str(tmp_path) in outcome.err


@pytest.mark.usefixtures("quick")
def test_without_a_size_one_small_problem_is_verified(command: Command) -> None:
    outcome = command("verify", "--step", "4")
    assert re.findall(r"\b(\d+x\d+x\d+) float32", outcome.out) == ["256x256x256"]
