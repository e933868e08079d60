"""Building: what the compiler says, what the generated code contains, and the cache of builds."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from support.cases import SCHEDULED_VARIANTS, THREAD_STEPS, Outcome, make_case, small_case, verified_on
from tensorir_ladder.harness import execution
from tensorir_ladder.harness.build import Case, UnsupportedCase, compiled, executable, lower, lower_schedule, main_loop
from tensorir_ladder.harness.cli import main
from tensorir_ladder.harness.explain import aspects, why
from tensorir_ladder.harness.machines import MACHINES, UnknownTarget, machine_for
from tensorir_ladder.harness.models.depth import NoForecast, forecast
from tensorir_ladder.harness.models.time import bound, predict_tile
from tensorir_ladder.kernels.codegen import toolchain
from tensorir_ladder.kernels.codegen.toolchain import (
    CompileError,
    Compiler,
    Cubin,
    NoCompiler,
    arch_flags,
    compile_cubin,
    compile_ptx,
    find_compiler,
    ptxas_facts,
    require_compiler,
)
from tensorir_ladder.schedules.errors import IllegalSchedule, IllegalTile
from tensorir_ladder.schedules.loops.vectorization import dtype_bytes
from tensorir_ladder.schedules.tiles import ThreadTile, WarpTile
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.steps.registry import find_steps
from tensorir_ladder.steps.thread_tiles import DEFAULT

STEPS = find_steps()
KERNEL = 'extern "C" __global__ void main_kernel(float* x) { x[threadIdx.x] *= 2.0f; }\n'


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty build cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "tensorir-ladder" / "cubins"


# Machines


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "smem_bytes", "expected"),
    [
        # 39 registers: 1280 per warp, 51 warps, in fours 48; 4 warps a block.
        ("sm_90a", 128, 39, 12288, (12, "registers")),
        # 64 registers: 2048 per warp, 32 warps; a block is 32.
        ("sm_90a", 1024, 64, 0, (1, "registers")),
        # 32 registers: 1024 per warp, 64 warps, as many as threads allow.
        ("sm_90a", 256, 32, 0, (8, "threads")),
        ("sm_86", 256, 32, 0, (6, "threads")),
        # 48 KiB + 1 KiB reserved: 164 KiB hold 3.
        ("sm_80", 128, 32, 48 * 1024, (3, "shared memory")),
        # The largest block takes all: 227 + 1 KiB.
        ("sm_90a", 128, 32, 227 * 1024, (1, "shared memory")),
        # Nothing is reserved before sm_80: 64 KiB hold two of 32 KiB.
        ("sm_75", 64, 32, 32 * 1024, (2, "shared memory")),
        ("sm_90a", 32, 16, 0, (32, "blocks")),
        ("sm_86", 32, 16, 0, (16, "blocks")),
        # Threads are counted in whole warps: 33 threads are 2 warps.
        ("sm_75", 33, 16, 0, (16, "threads")),
        ("sm_90a", 128, 255, 0, (2, "registers")),
    ],
)
def test_blocks_resident(arch: str, threads: int, registers: int, smem_bytes: int, expected: tuple[int, str]) -> None:
    assert machine_for(arch).blocks_resident(threads, registers, smem_bytes) == expected


def test_machines_are_consistent_and_unknown_ones_are_refused() -> None:
    for arch, machine in MACHINES.items():
        assert machine.arch == arch
        assert machine.smem_per_block_bytes <= machine.smem_per_sm_bytes
        assert machine.has_cp_async == (int(re.sub(r"\D", "", arch)) >= 80)
        assert str(machine.target().attrs["arch"]) == arch
    with pytest.raises(UnknownTarget, match=r"unknown arch 'sm_999'; known: .*sm_90a"):
        machine_for("sm_999")


# Cases


@pytest.mark.parametrize(
    ("tile", "clause"),
    [
        ("64x64x16/1x1", "4096 threads per block, limit 1024"),
        ("128x128x64/8x8", "bytes of shared memory in 4 stage"),
        ("64x64x16/5x4", "64 rows of the block are not a multiple of 5"),
        ("64x64x16/4x3", "64 columns of the block are not a multiple of 3"),
        ("256x256x8/16x16", "registers per thread, limit 255"),
        ("0x64x16/4x4", "got 0, limit at least 1"),
    ],
)
def test_illegal_tiles_are_refused_with_value_limit_and_remedy(tile: str, clause: str) -> None:
    with pytest.raises(IllegalTile, match=re.escape(clause)) as caught:
        lower(make_case(5, (64, 64, 256), tile=ThreadTile.parse(tile), stages=4))
    assert tile in str(caught.value)
    assert caught.value.remedy


def test_async_is_refused_where_there_is_no_cp_async() -> None:
    with pytest.raises(UnsupportedCase, match=r"needs cp\.async, which sm_75 lacks; use --variant register_staged"):
        lower(make_case(5, (64, 64, 64), "async", arch="sm_75"))
    kernel = lower(make_case(5, (64, 64, 64), arch="sm_75"))
    assert kernel.case.variant == "register_staged"
    assert "cp_async" not in kernel.body
    assert "cp_async" not in lower(make_case(6, (64, 64, 64), arch="sm_75")).body


def test_stages_are_those_that_the_case_really_has() -> None:
    built = {
        variant: make_case(5, (64, 64, 64), variant, stages=4).stages_built for variant in ("async", "double_buffer")
    }
    assert built == {"async": 4, "double_buffer": 1}
    assert make_case(4, (64, 64, 64), stages=4).stages_built == 1
    assert make_case(6, (64, 64, 64), stages=4).stages_built == 4
    assert "4 stages" in str(make_case(5, (64, 64, 64), stages=4))
    assert "stages" not in str(make_case(5, (64, 64, 64), "double_buffer", stages=4))


RINGS = [(step, "") for step in (5, 9, 11, 12, 13)] + [(10, variant.name) for variant in STEPS[10].variants]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("step", "variant"), RINGS)
@pytest.mark.parametrize("k_tiles", [1, 3])
def test_shared_memory_is_never_more_than_was_checked(step: int, variant: str, k_tiles: int) -> None:
    case = make_case(step, (64, 64, 1), variant or None, stages=3)
    case = replace(case, problem=replace(case.problem, k=k_tiles * case.tile.block_k))
    itemsize = dtype_bytes(case.problem.dtype)
    assert lower(case).smem_bytes <= case.tile.smem_bytes(itemsize, case.stages_held)


@pytest.mark.parametrize("step", [10, 12, 13])
def test_a_ring_of_one_k_tile_that_fits_only_once_is_refused(step: int) -> None:
    """On a GPU such kernels failed at their launch: they have two stages, and one was checked."""
    tile = STEPS[step].tiles.kind((64, 256, 192), (1, 2))
    with pytest.raises(IllegalTile, match=r"in 2 stage\(s\), limit 232448"):
        lower(make_case(step, (256, 256, 64), tile=tile, stages=4))


def test_a_block_with_more_shared_memory_than_the_machine_has_is_refused() -> None:
    case = small_case(5, (64, 64, 64))
    tight = replace(case.machine, smem_per_block_bytes=1024)
    with pytest.raises(IllegalSchedule, match="limit 1024"):
        lower_schedule(case.step.schedule(case.problem, case.config), tight, "tight")


def test_launch_and_shared_memory_are_read_off_the_lowered_kernel() -> None:
    kernel = lower(make_case(5, (100, 200, 64), stages=3))
    assert kernel.launch == {"blockIdx.x": 4 * 4, "threadIdx.y": 8, "threadIdx.x": 16}
    assert (kernel.threads, kernel.blocks) == (128, 16)
    assert kernel.smem_bytes == (32 + 64) * 16 * 4 * 3
    assert kernel.resources is None
    with pytest.raises(ValueError, match="is not compiled"):
        executable(kernel)


# The generated code


@pytest.mark.parametrize("stages", [2, 3, 4, 5])
def test_async_copies_are_cp_async_of_16_bytes_with_n_minus_1_groups_in_flight(stages: int) -> None:
    code = lower(make_case(5, (128, 128, 256), "async", stages=stages)).code
    assert (code.cp_async, code.cp_async_bytes) == (2, 16)
    assert code.wait_groups == (stages - 1,)
    assert code.commit_groups == 1
    assert code.shared_versions == stages
    assert code.barriers == 2


@pytest.mark.parametrize("variant", ["sync", "register_staged", "double_buffer", "double_buffer_pipelined"])
def test_the_other_variants_have_no_cp_async_at_all(variant: str) -> None:
    kernel = lower(make_case(5, (128, 128, 256), variant, stages=4))
    assert "cp_async" not in kernel.body
    assert (kernel.code.cp_async, kernel.code.wait_groups, kernel.code.commit_groups) == (0, (), 0)
    assert kernel.code.shared_versions == (1 if variant == "double_buffer" else 4)


def test_ragged_rows_fall_back_to_narrower_copies_openly() -> None:
    def widths(n: int, dtype: str = "float32") -> set[int]:
        body = lower(make_case(5, (64, n, 256), "async", dtype=dtype)).body
        return set(map(int, re.findall(r"ptx_cp_async_legacy(?:_pred)?_c[ag]_(\d+)", body)))

    assert widths(64) == {16}
    assert widths(20) == {16}
    assert widths(66) == {16, 8}
    assert widths(17) == {16, 4}
    assert widths(64, "float16") == {16}
    assert 2 not in widths(17, "float16")  # cp.async has no 2-byte form: those copies go through the thread


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_steps_before_the_pipeline_have_one_slot_or_none(number: int) -> None:
    code = lower(make_case(number, (128, 128, 128))).code
    assert code.shared_versions == (0 if number == 1 else 1)
    assert code.barriers == (0 if number == 1 else 2)
    assert code.cp_async == 0


def test_the_main_loop_is_the_one_over_k_tiles() -> None:
    kernel = lower(make_case(5, (128, 128, 256), "async", stages=3))
    loop = main_loop(kernel.body)
    assert loop.lstrip().startswith("for (int k_0 = 0; k_0 < 14;")
    assert loop in kernel.body
    assert main_loop("extern void f() {\n  x = 1;\n}\n") == "extern void f() {\n  x = 1;\n}\n"


def test_why_says_what_the_generated_code_shows() -> None:
    texts = {
        v: why(lower(make_case(5, (128, 128, 256), v, stages=4))) for v in make_case(5, (1, 1, 1)).step.variant_names
    }
    assert "the same, character for character, as that of step4_vectorization[default]" in texts["double_buffer"]
    assert "as that of step5_pipelining[sync]" in texts["double_buffer_pipelined"]
    assert "4 stages, wait_group 3: up to 3 k tiles stay in flight" in texts["async"]
    assert "nothing is in flight" in texts["sync"]
    assert "loads go to registers" in texts["register_staged"]
    assert "a statement of its own" in texts["writeback"]
    assert why(lower(make_case(1, (64, 64, 64)))).startswith("No shared memory")
    assert why(lower(make_case(4, (64, 64, 64)))).startswith("One stage")


@pytest.mark.parametrize("variant", ["async", "register_staged"])
def test_why_is_true_where_the_k_loop_is_written_out(variant: str) -> None:
    text = why(lower(make_case(5, (64, 64, 64), variant, stages=4)))
    assert "up to 0 k tiles" not in text
    assert " 0 barriers" not in text
    if variant == "register_staged":
        assert "nothing is in flight" not in text


def test_aspects_show_what_changes_from_step_to_step() -> None:
    rows = {number: aspects(lower(make_case(number, (128, 128, 128), stages=3))) for number in range(1, 7)}
    assert rows[1]["operands come from"] != rows[2]["operands come from"]
    assert (rows[2]["outputs per thread"], rows[3]["outputs per thread"]) == ("1", "4 × 4")
    assert (rows[3]["global loads"], rows[4]["global loads"]) == ("scalars", "vectors")
    assert (rows[4]["waits"], rows[5]["waits"]) == ("none", "wait_group 2")
    assert rows[5]["shared memory"] == f"{3 * DEFAULT.tile.smem_bytes(4)} bytes, 3 stage(s)"
    assert rows[6]["k loop"].endswith("k_inner unrolled: full")


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("step", "variant"), [(step, variant) for step, variant in SCHEDULED_VARIANTS if step not in THREAD_STEPS]
)
def test_what_is_said_of_tiles_of_warps_is_read_off_their_code(step: int, variant: str) -> None:
    kernel = lower(small_case(step, (2048, 2048, 1024), variant))
    assert kernel.launches == 1
    code, ring = kernel.code, step != 8
    assert code.shared_versions == kernel.case.stages_built == (kernel.case.step.stages if ring else 1)
    copied = (0, 0, 0) if kernel.meets_at_mbarriers else (1, 2, 16) if ring else (2, 0, 0)
    assert (code.barriers, code.cp_async, code.cp_async_bytes) == copied
    assert len(code.wait_groups) == code.commit_groups == (1 if ring and not kernel.meets_at_mbarriers else 0)
    assert kernel.meets_at_mbarriers == (step > 10 or variant == "boxes")
    assert not kernel.written_out
    rows = aspects(kernel)
    assert rows["barriers per k tile"] == str(code.barriers)
    assert rows["outputs per thread"] == kernel.case.tile.outputs
    assert f"tile {kernel.case.tile}" in rows["parameters"]
    assert "per k tile." in why(kernel) or "the same, character for character" in why(kernel)


@pytest.mark.parametrize("tile", ["16x32x64/16x32/4x4/4", "16x32x16/16x32/4x4/1"])
@pytest.mark.parametrize("stages", [2, 5])
def test_stages_of_padded_and_sliced_tiles_are_told_apart_from_their_sums(tile: str, stages: int) -> None:
    case = make_case(7, (32, 32, 1024), tile=WarpTile.parse(tile), stages=stages)
    assert lower(case).code.shared_versions == stages


def test_counts_of_a_loop_that_is_written_out_are_said_to_be_of_all_of_it() -> None:
    kernel = lower(small_case(9, (64, 64, 64)))
    assert kernel.written_out
    assert why(kernel).startswith("4 cp.async statements of 16 bytes a thread in all, the k loop being written out, 2 ")
    assert "stay in flight" not in why(kernel)
    assert aspects(kernel)["barriers per k tile"] == "3 in all, the k loop being written out"


def test_a_twin_is_sought_among_what_takes_the_case() -> None:
    assert "tf32" not in why(lower(small_case(8, (64, 64, 128), "tf32")))  # the default takes no float32
    few = small_case(10, (64, 64, 1024), "awaited", stages=2)  # the default needs 3 stages
    assert why(lower(few)).startswith("2 cp.async statements")
    short = small_case(10, (64, 64, 64), "awaited")
    assert "as that of step10_wgmma[in_flight]" in why(lower(short))


# The compiler


@pytest.mark.compiler
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_a_cubin_and_its_resources(arch: str, compiler: Compiler) -> None:
    kernel = compiled(lower(make_case(5, (128, 128, 256), arch=arch, stages=3)), compiler)
    assert kernel.cubin.data[:4] == b"\x7fELF"
    figures = kernel.resources
    assert 16 <= figures.registers <= 255
    assert figures.spill_bytes == 0
    assert figures.smem_bytes == 3 * DEFAULT.tile.smem_bytes(4)
    assert kernel.cubin.smem_bytes - figures.smem_bytes in (0, 1024)  # ptxas may count the system's KiB
    assert (figures.threads, figures.blocks) == (128, 8)
    assert figures.occupancy == figures.blocks_per_sm * 128 / kernel.case.machine.threads_per_sm
    resident = kernel.case.machine.blocks_resident(128, figures.registers, figures.smem_bytes)
    assert (figures.blocks_per_sm, figures.occupancy_limit) == resident


@pytest.mark.compiler
def test_the_model_needs_a_measured_machine(compiler: Compiler) -> None:
    case = make_case(5, (128, 128, 256), stages=3)
    assert predict_tile(lower(case)) is None
    prediction = predict_tile(compiled(lower(case), compiler))
    assert prediction.stages == 3
    assert prediction.gain_pct == pytest.approx(100 * (prediction.sequential_ns / prediction.pipelined_ns - 1))
    assert prediction.gain_pct > 0
    unmeasured = compiled(lower(make_case(5, (128, 128, 256), arch="sm_80")), compiler)
    assert predict_tile(unmeasured) is None
    assert bound(unmeasured, 1.0) == "unknown"
    assert bound(lower(case), 1000.0) == "latency"
    assert bound(lower(case), 1e-9) in ("compute", "memory")


@pytest.mark.compiler
def test_ptx_contains_what_the_variant_promises(compiler: Compiler) -> None:
    texts = {
        v: compile_ptx(lower(make_case(5, (128, 128, 256), v)).cuda, "sm_90a", compiler) for v in ("async", "sync")
    }
    assert "cp.async.cg.shared.global" in texts["async"]
    assert "cp.async" not in texts["sync"]
    assert ".target sm_90a" in texts["async"]


@pytest.mark.compiler
def test_sass_is_of_the_same_cubin(compiler: Compiler, sass: Callable[[Cubin], str]) -> None:
    text = sass(compiled(lower(make_case(5, (128, 128, 256), "async")), compiler).cubin)
    assert "LDGSTS" in text
    assert "main_kernel" in text


@pytest.mark.compiler
def test_nvcc_makes_a_cubin(cache: Path, compiler: Compiler) -> None:
    assert compile_cubin(KERNEL, "sm_80", compiler).data[:4] == b"\x7fELF"


def test_the_same_content_is_compiled_once(
    cache: Path, recorded_nvcc: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = compile_cubin(KERNEL, "sm_90a", made_up_compiler())
    assert [path.suffix for path in cache.iterdir()] == [".cubin"]
    assert compile_cubin(KERNEL, "sm_90a", made_up_compiler()) == first
    assert len(recorded_nvcc) == 1
    for times, (source, arch) in enumerate(((KERNEL + " ", "sm_90a"), (KERNEL, "sm_80")), 2):
        compile_cubin(source, arch, made_up_compiler())
        assert len(recorded_nvcc) == times
    monkeypatch.setattr(toolchain, "FLAGS", (*toolchain.FLAGS, "-lineinfo"))
    compile_cubin(KERNEL, "sm_90a", made_up_compiler())
    assert len(recorded_nvcc) == 4


@pytest.fixture
def recorded_nvcc(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The flags of each run of a made-up nvcc."""
    seen: list[tuple[str, ...]] = []

    def nvcc(_compiler: Compiler, _source: str, folder: Path, output: str, *flags: str) -> str:
        seen.append(flags)
        (folder / output).write_bytes(b"\x7fELF")
        return "Used 8 registers"

    monkeypatch.setattr(toolchain, "run_nvcc", nvcc)
    return seen


def made_up_compiler() -> Compiler:
    """A compiler of version 0, which nobody asks for it."""
    compiler = Compiler(Path("/bin/true"), "toolkit")
    vars(compiler)["version"] = "0"
    return compiler


def test_options_of_ptxas_reach_nvcc_and_make_another_cache_entry(
    cache: Path, recorded_nvcc: list[tuple[str, ...]]
) -> None:
    for options in ((), ("-O1",), ("-O1",), ("-O2",), ()):
        compile_cubin(KERNEL, "sm_80", made_up_compiler(), options)
    assert [[flag for flag in flags if "Xptxas" in flag] for flags in recorded_nvcc] == [
        [],
        ["-Xptxas=-O1"],
        ["-Xptxas=-O2"],
    ]
    assert len(list(cache.glob("*.cubin"))) == 3


def test_a_kernel_says_what_ptxas_must_be_told(cache: Path, recorded_nvcc: list[tuple[str, ...]]) -> None:
    kernels = [lower(small_case(7, (32, 32, 64), variant)) for variant in ("serpentine", "row_order")]
    assert [compiled(kernel, made_up_compiler()).ptxas_options for kernel in kernels] == [("-O1",), ()]
    assert [[flag for flag in flags if "Xptxas" in flag] for flags in recorded_nvcc] == [["-Xptxas=-O1"], []]


@pytest.mark.compiler
def test_refused_code_gives_one_line(cache: Path, compiler: Compiler) -> None:
    with pytest.raises(CompileError, match="error") as caught:
        compile_cubin("this is no CUDA\n", "sm_90a", compiler)
    assert "\n" not in str(caught.value)
    assert str(compiler.nvcc) in str(caught.value)
    with pytest.raises(CompileError, match="compute_10") as caught:
        compile_cubin(KERNEL, "sm_10", compiler)
    assert "\n" not in str(caught.value)
    assert not list(cache.iterdir())


def test_what_ptxas_says_is_read() -> None:
    log = (
        "ptxas info    : Function properties for main_kernel\n"
        "    16 bytes stack frame, 24 bytes spill stores, 28 bytes spill loads\n"
        "ptxas info    : Used 56 registers, used 1 barriers, 24576 bytes smem\n"
    )
    assert ptxas_facts(log) == {"registers": 56, "spill_bytes": 24, "smem_bytes": 24576}
    assert ptxas_facts("") == {"registers": 0, "spill_bytes": 0, "smem_bytes": 0}
    assert arch_flags("sm_90a") == ("-gencode", "arch=compute_90a,code=sm_90a")


# Finding a compiler


def fake_nvcc(folder: Path) -> Path:
    """An executable called nvcc."""
    folder.mkdir(parents=True)
    path = folder / "nvcc"
    path.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
    path.chmod(0o755)
    return path


@pytest.mark.usefixtures("no_compiler")
def test_compilers_are_found_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "g++").write_text("#!/bin/sh\n")
    (tmp_path / "g++").chmod(0o755)
    assert find_compiler() is None
    with pytest.raises(NoCompiler, match="pip install"):
        require_compiler()
    wheel = fake_nvcc(tmp_path / "cu13" / "bin")
    monkeypatch.setattr(toolchain, "wheel_folders", lambda: [tmp_path / "cu13"])
    assert find_compiler() == Compiler(wheel, "pip wheels")
    for variable in ("CUDA_PATH", "CUDA_HOME"):
        home = fake_nvcc(tmp_path / variable / "bin")
        monkeypatch.setenv(variable, str(tmp_path / variable))
        assert find_compiler() == Compiler(home, "toolkit")
    on_path = fake_nvcc(tmp_path / "first")
    monkeypatch.setenv("PATH", f"{tmp_path / 'first'}:{tmp_path}:/bin")
    assert find_compiler() == Compiler(on_path, "toolkit")
    assert require_compiler().version == "13.0.88"


@pytest.mark.usefixtures("no_compiler")
def test_an_nvcc_without_a_host_compiler_is_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvcc(tmp_path / "home" / "bin")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert find_compiler() is None
    with pytest.raises(NoCompiler, match=r"no g\+\+ on PATH"):
        require_compiler()


@pytest.mark.usefixtures("no_compiler")
def test_a_missing_disassembler_is_named(tmp_path: Path) -> None:
    cubin = Cubin(b"", 0, 0, 0)
    with pytest.raises(NoCompiler, match=r"no cuobjdump found.*pip install"):
        toolchain.disassemble(cubin)
    (tmp_path / "cuobjdump").write_text("#!/bin/sh\n")
    (tmp_path / "cuobjdump").chmod(0o755)
    with pytest.raises(NoCompiler, match=r"no nvdisasm found.*pip install"):
        toolchain.disassemble(cubin)


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_a_step_is_verified_and_one_line_says_how_to_get_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["run", "--step", "4", "--size", "32"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert verified_on(Outcome(0, out, err)) == ["llvm"]
    (line,) = [line for line in lines if line.startswith("not compiled: ")]
    assert "pip install" in line
    assert err == ""


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize(
    "arguments",
    ["compile --step 4 --size 32", "run --step 4 --size 32 --show ptx", "run --step 4 --size 32 --show sass"],
)
def test_without_a_compiler_what_demands_one_fails(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: no CUDA compiler found")
    assert "pip install" in line


def test_rates_belong_to_one_gpu() -> None:
    """An H100 shares the H200's limits, and none of its measured rates: nothing may be predicted from them."""
    h200 = machine_for("sm_90a")
    h100 = h200.of_gpu("NVIDIA H100 PCIe", 114)
    assert h200.of_gpu("NVIDIA H200") == h200
    assert (h100.multiprocessors, h100.rates) == (114, None)
    assert h100.smem_per_block_bytes == h200.smem_per_block_bytes
    kernel = lower(replace(make_case(5, (256, 256, 256)), machine=h100))
    assert (predict_tile(kernel), bound(kernel, 1.0)) == (None, "unknown")


def driver_of(name: str, multiprocessors: int) -> SimpleNamespace:
    """Stand in for torch on a GPU of compute capability 9.0."""
    properties = SimpleNamespace(name=name, multi_processor_count=multiprocessors)
    cuda = {"get_device_capability": lambda: (9, 0), "current_device": lambda: 0}
    return SimpleNamespace(cuda=SimpleNamespace(**cuda, get_device_properties=lambda _device: properties))


@pytest.mark.parametrize("step", [10, 11, 12, 13])
def test_a_gpu_without_rates_chooses_by_its_own_multiprocessors(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An H100 has the H200's chip, and is to have its tiles and blocks; a smaller one others."""
    for size in (1024, 8192, 4096):
        problem = Matmul(size, size, size, "float16")
        expected = Case.default(STEPS[step], problem, machine_for("sm_90a"))
        monkeypatch.setattr(execution, "require_gpu", lambda: driver_of("NVIDIA H100 80GB HBM3", 132))
        case = Case.default(STEPS[step], problem, execution.gpu_machine())
        assert (case.tile, case.stages) == (expected.tile, expected.stages)
    assert lower(case).cuda == lower(expected).cuda
    monkeypatch.setattr(execution, "require_gpu", lambda: driver_of("NVIDIA H100 PCIe", 114))
    assert execution.gpu_machine().for_choices().multiprocessors == 114


def test_multiprocessors_that_nobody_knows_are_not_guessed() -> None:
    with pytest.raises(UnknownTarget, match="ladder microbench"):
        machine_for("sm_90a").of_gpu("NVIDIA Unheard-Of")


def test_the_depth_model_names_the_gpu_without_rates_and_what_to_run() -> None:
    h100 = machine_for("sm_90a").of_gpu("NVIDIA H100 PCIe", 114)
    case = replace(make_case(5, (256, 256, 256)), machine=h100)
    with pytest.raises(NoForecast, match=r"H100 PCIe.*ladder microbench"):
        forecast(case, lambda _: None)
