"""What several test files share: building cases, running commands, and skipping what this machine lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tvm

from harness.build import Case
from harness.cli import main
from harness.emulator import find_host_compiler
from harness.execution import gpu_present
from harness.targets import DEFAULT_ARCH, machine_for
from kernels.blackwell import BlackwellTile
from kernels.codegen import toolchain
from kernels.codegen.toolchain import Compiler, find_compiler
from kernels.config import HopperTile
from schedules.tensorization import TensorCoreTile
from schedules.tiling import BlockTile, TileConfig
from schedules.warp_tiling import WarpTile
from schedules.warpgroup import WarpgroupTile
from schedules.workloads import Matmul
from steps.registry import find_steps

ROOT = Path(__file__).resolve().parent.parent
STEPS = find_steps()
EVERY_VARIANT = [(number, variant) for number, step in STEPS.items() for variant in step.variants]
THREAD_STEPS = [number for number, step in STEPS.items() if step.tiles.kind is TileConfig]
# The smallest sensible tile of each family, for tests of what kernels compute.
SMALL_TILES: dict[type[BlockTile], BlockTile] = {
    TileConfig: TileConfig(8, 16, 16, 4, 4),
    WarpTile: WarpTile.parse("16x32x16/16x32/4x4/2"),
    TensorCoreTile: TensorCoreTile.parse("32x32x32/16x32"),
    WarpgroupTile: WarpgroupTile.parse("64x64x64/64x64"),
    HopperTile: HopperTile.parse("64x64x64/1x1"),
    BlackwellTile: BlackwellTile.parse("128x64x64"),
}
EXPLICIT_STEPS = [number for number, step in STEPS.items() if step.explicit]
SCHEDULED_VARIANTS = [(number, variant) for number, variant in EVERY_VARIANT if number not in EXPLICIT_STEPS]
NO_GPU_LINE = "verified on the CPU (TensorIR through LLVM); speed not measured: no GPU"
EXPLICIT_LINE = "not verified: an explicit kernel runs on a GPU or in the emulator; speed not measured: no GPU"
EMULATED_LINE = "verified on the CPU (generated CUDA through the emulator); speed not measured: no GPU"
# What LLVM runs only in part, the emulator verifies where there is a C++ compiler.
TENSORIZED_LINE = EMULATED_LINE if find_host_compiler() else NO_GPU_LINE.replace(";", ", before tensorization;")
NEVER_RUN_LINE = "not verified: it has been compiled and never run, for want of an sm_100a; speed not measured: no GPU"
UNOPTIMISED = {"kind": "llvm", "opt-level": 0}


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip, with the reason, what needs a compiler or a GPU that is not here."""
    if item.get_closest_marker("emulator") and find_host_compiler() is None:
        pytest.skip("no C++ compiler, which the emulator needs")
    if item.get_closest_marker("compiler") and find_compiler() is None:
        pytest.skip(f"no CUDA compiler; {toolchain.INSTALL_HINT}")
    if item.get_closest_marker("gpu") and not gpu_present():
        pytest.skip("no GPU that torch sees")


@pytest.fixture(autouse=True, scope="session")
def unoptimised_cpu_code() -> Iterator[None]:
    """What runs on the CPU is what TVM lowered, and LLVM leaves it so: optimising it took half of the tests' time."""
    compile_module = tvm.compile

    def compile_quickly(mod: tvm.IRModule, target: Any = None, **options: Any) -> tvm.runtime.Executable:
        return compile_module(mod, target=UNOPTIMISED if target == "llvm" else target, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tvm, "compile", compile_quickly)
        yield


def make_case(
    step: int,
    shape: tuple[int, int, int],
    variant: str | None = None,
    *,
    dtype: str | None = None,
    layout: str = "nn",
    out_dtype: str | None = None,
    tile: BlockTile | None = None,
    stages: int | None = None,
    arch: str = "",
) -> Case:
    """A case as the command line would make it: what is not given is the step's own default."""
    found = STEPS[step]
    machine = machine_for(arch or found.arch or DEFAULT_ARCH)
    variant = variant or found.default_variant(machine.has_cp_async)
    problem = Matmul(*shape, dtype or found.dtypes(variant)[0], layout, out_dtype)
    stages = found.default_stages if stages is None else stages
    return Case(found, problem, variant, tile or found.tiles.default, machine, stages)


def small_case(step: int, shape: tuple[int, int, int], variant: str | None = None, **given: Any) -> Case:
    """The same with the smallest sensible tile of the step's family: quick to run on the CPU."""
    return make_case(step, shape, variant, tile=SMALL_TILES[STEPS[step].tiles.kind], **given)


class Outcome(NamedTuple):
    """What a command did: exit status and both outputs."""

    code: int
    out: str
    err: str


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Run ``python -m harness ARGUMENTS`` in this process."""

    def run(*arguments: str) -> Outcome:
        capsys.readouterr()
        try:
            code = main(list(arguments))
        except SystemExit as left:  # argparse leaves this way
            code = left.code
        return Outcome(code, *capsys.readouterr())

    return run


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without any nvcc."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setattr(toolchain, "wheel_folders", list)


@pytest.fixture
def compiler() -> Compiler:
    """The compiler of this machine."""
    found = find_compiler()
    if found is None:
        pytest.skip(f"no CUDA compiler; {toolchain.INSTALL_HINT}")
    return found
