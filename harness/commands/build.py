"""``build``: build the kernels that :func:`torch_ops.matmul` takes for a file of shapes, before they are called for."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tensorir_ladder.harness import execution
from tensorir_ladder.harness.batches import stored_shapes
from tensorir_ladder.harness.build import Case
from tensorir_ladder.harness.built_schedules import SCHEDULES, build_schedule, find_schedule
from tensorir_ladder.harness.commands.options import UsageError, add_jobs
from tensorir_ladder.harness.commands.printing import progress
from tensorir_ladder.harness.commands.values import whole
from tensorir_ladder.harness.machines import DEFAULT_ARCH, MACHINES, choosing_machine, machine_for
from tensorir_ladder.harness.workers import Lost, Tell, each_in_a_process
from tensorir_ladder.kernels.codegen import toolchain
from tensorir_ladder.kernels.codegen.build_cache import cache_folder
from tensorir_ladder.kernels.codegen.launch_plan import MatrixRows
from tensorir_ladder.kernels.codegen.toolchain import Compiler
from tensorir_ladder.kernels.fused_epilogue import PLAIN
from tensorir_ladder.schedules.cost import Machine
from tensorir_ladder.schedules.workloads import LAYOUTS, Matmul
from tensorir_ladder.torch_ops.batches import Batches
from tensorir_ladder.torch_ops.choice import AnyChoice
from tensorir_ladder.torch_ops.copies import Copying
from tensorir_ladder.torch_ops.few_rows import Streamed
from tensorir_ladder.torch_ops.kept import KERNELS, Chosen, are_kept, build_kernels
from tensorir_ladder.torch_ops.operands import OPERANDS, Form, Operands
from tensorir_ladder.torch_ops.prepared import choose_for, gpu_machine
from tensorir_ladder.torch_ops.problem import Setting
from tensorir_ladder.torch_ops.scheduled import ByWarps, Scheduled
from tensorir_ladder.torch_ops.shifted import Shifting
from tensorir_ladder.torch_ops.short_reductions import Unaligned

CALLED = tuple(arch for arch in MACHINES if arch not in ("sm_75", "sm_100a"))  # as the call names them
SHAPE = re.compile(r"(\d+)x(\d+)x(\d+)")
LIMIT_S = 600.0  # for one kernel


class NothingBuilt(RuntimeError):
    """A kernel that could not be built, or could not be kept."""


class Ahead(Protocol):
    """Build and find again what is wanted ahead; it can be sent to another process, and its text names it."""

    def is_kept(self, compiler: Compiler) -> bool:
        """Tell whether it was built before."""

    def build(self, compiler: Compiler) -> None:
        """Build it, and keep what was built."""


@dataclass(frozen=True)
class ToBuild:
    """A product of contiguous tensors, or a batch, and all that its kernel is made for.

    It can be sent to another process.
    """

    problem: Matmul
    gpu: str
    multiprocessors: int
    arch: str = DEFAULT_ARCH

    @classmethod
    def on(cls, machine: Machine, problem: Matmul) -> ToBuild:
        """Build for a machine."""
        return cls(problem, machine.name, machine.multiprocessors, str(machine.target.attrs["arch"]))

    @property
    def made_for(self) -> tuple[AnyChoice, Matmul, Setting]:
        """The kernel's choice, its product and its setting.

        The product's rows are as TMA takes them, or the operands' own where a kernel reads some of these as they lie.
        """
        operands, out = self._arranged
        return choose_for(operands, PLAIN, False, self._machine, out)

    @property
    def kernels(self) -> list[tuple[Chosen, Matmul | None, Setting]]:
        """All that a call loads: the product's kernel, and the one that copies rows where some are copied."""
        made_for = self.made_for
        choice, (operands, _) = made_for[0], self._arranged
        copies = operands.are_copied and not isinstance(choice, Unaligned | Streamed | Scheduled | ByWarps)
        if isinstance(choice, Shifting):
            copies = choice.copies(operands)
        return [made_for, *([(Copying(), None, Setting(self._machine))] if copies else [])]

    def is_kept(self, compiler: Compiler) -> bool:
        """Tell whether all that is loaded is kept."""
        return are_kept(self.kernels, compiler)

    def build(self, compiler: Compiler) -> None:
        """Build all that is loaded, and keep it."""
        build_kernels(self.kernels, compiler)

    @property
    def _arranged(self) -> tuple[Operands, MatrixRows]:
        m, n, k, dtype = self.problem.m, self.problem.n, self.problem.k, self.problem.dtype
        outer = stored_shapes(self.problem)[0][:-2]
        b_strides = (n, 1) if self.problem.layout == "nn" else (1, k)
        a = Form("a", (*outer, m, k), (*(m * k for _ in outer), k, 1), dtype)
        b = Form("b", (*outer, k, n), (*(k * n for _ in outer), *b_strides), dtype)
        return Batches.of(a, b, None, dtype).arranged()

    @property
    def _machine(self) -> Machine:
        return choosing_machine(self.gpu, self.multiprocessors, self.arch)

    def __str__(self) -> str:
        return f"{self.problem.shape} {self.problem.layout} {self.problem.dtype}"


@dataclass(frozen=True)
class ScheduleToBuild:
    """A schedule of a product; it can be sent to another process."""

    case: Case

    def is_kept(self, compiler: Compiler) -> bool:
        """Tell whether its kernels are kept."""
        return find_schedule(self.case, compiler) is not None

    def build(self, compiler: Compiler) -> None:
        """Build its kernels, and keep them."""
        build_schedule(self.case, compiler)

    def __str__(self) -> str:
        return str(self.case)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the file, the GPU and how many processes."""
    text = f"a line for each product: MxNxK [{' | '.join(LAYOUTS)}] [{' | '.join(OPERANDS)}] (nn, float16)"
    parser.add_argument("--shapes", type=Path, required=True, metavar="FILE", help=text)
    parser.add_argument("--arch", help=f"one of {', '.join(CALLED)} (the GPU's, else {DEFAULT_ARCH})")
    parser.add_argument("--gpu", metavar="NAME", help="as its driver names it (the one here; else the architecture's)")
    add_jobs(parser)


def run(options: argparse.Namespace, _command: str) -> int:
    """Build what is not kept yet, side by side."""
    wanted = read_shapes(options.shapes)
    if options.arch not in (None, *CALLED):
        raise UsageError(f"--arch {options.arch}: the call has kernels for {', '.join(CALLED)}")
    machine = called_machine(options.gpu, options.arch)
    build_ahead([ToBuild.on(machine, problem) for problem in wanted], options.jobs)
    arch = machine.target.attrs["arch"]
    unmeasured = "" if arch == DEFAULT_ARCH else f" ({arch}, on which nothing was measured)"
    print(f"{len(wanted)} products of {options.shapes} are built for the {machine.name}{unmeasured}")
    return 0


def build_ahead(wanted: Sequence[Ahead], jobs: int) -> None:
    """Build kernels in processes side by side; those that are kept already are left.

    Raises UsageError where nothing can be kept, NothingBuilt with the first kernel that was not; NoCompiler.
    """
    compiler = toolchain.require_compiler()
    if None in (KERNELS.cache.folder(), SCHEDULES.cache.folder()):
        raise UsageError("what is built ahead would not be found again: the build cache is not used, see above")
    waiting = [one for one in wanted if not one.is_kept(compiler)]
    if not waiting:
        return
    print(f"{len(wanted) - len(waiting)} of {len(wanted)} kernels are built already", flush=True)
    with progress() as bar, closing(each_in_a_process(_build, waiting, jobs, LIMIT_S)) as built:
        for one, result in bar.track(built, len(wanted), len(wanted) - len(waiting), description="building"):
            if isinstance(result, Lost):
                raise NothingBuilt(f"{one}: {result.reason}; what was built before it is kept")
            if not one.is_kept(compiler):
                raise NothingBuilt(f"{one} was built and is not kept: {cache_folder()} takes no file; free space there")


def read_shapes(path: Path) -> list[Matmul]:
    """Read a file of products, each once; UsageError names the line that is none. Empty lines and ``#`` are passed."""
    found = {}
    for number, line in enumerate(path.read_bytes().decode(errors="replace").splitlines(), 1):
        if words := line.partition("#")[0].split():
            found[_product(words, f"{path}:{number}")] = None
    if not found:
        raise UsageError(f"{path} names no product; write a line for each, for example 1024x512x256 nt bfloat16")
    return list(found)


def _product(words: Sequence[str], place: str) -> Matmul:
    shape, *more = words
    match = SHAPE.fullmatch(shape)
    layouts, dtypes = ([word for word in more if word in known] for known in (LAYOUTS, OPERANDS))
    if not match or len(more) != len(layouts) + len(dtypes) or max(len(layouts), len(dtypes)) > 1:
        written = " ".join(words)
        raise UsageError(
            f"{place}: {written!r:.60} is not MxNxK [{' | '.join(LAYOUTS)}] [{' | '.join(OPERANDS)}]; write for "
            "example 1024x512x256 nt bfloat16"
        )
    sizes = [whole(size, place) for size in match.groups()]
    try:
        return Matmul(*sizes, *(dtypes or ["float16"]), *(layouts or ["nn"]))
    except ValueError as refused:
        raise UsageError(f"{place}: {refused}") from None


def called_machine(gpu: str | None = None, arch: str | None = None) -> Machine:
    """Describe the GPU here, or the one named, as the choice sees it; else the one that stands for an architecture."""
    if gpu is None and arch is None and execution.gpu_present():
        return gpu_machine(execution.require_gpu().cuda.current_device())
    machine = machine_for(arch or DEFAULT_ARCH)
    return machine.of_gpu(gpu or machine.gpu).for_choices()


def _build(one: Ahead, tell: Tell) -> None:
    tell(str(one))
    one.build(toolchain.require_compiler())
