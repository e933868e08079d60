"""Find a kernel that was built before by what it was made for, without making, lowering and compiling it again.

A kernel follows from its choice, its product and their setting: by these it is kept, its launches and its cubin in one
file (:mod:`kernels.codegen.kept_builds`).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from tensorir_ladder.kernels.codegen.build_cache import BuildCache
from tensorir_ladder.kernels.codegen.kept_builds import KeptBuilds, Sources
from tensorir_ladder.kernels.codegen.launch_plan import LaunchPlan
from tensorir_ladder.kernels.codegen.toolchain import Compiler
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.torch_ops.choice import AnyChoice
from tensorir_ladder.torch_ops.copies import Copying
from tensorir_ladder.torch_ops.launcher import CompiledKernel, compile_kernel
from tensorir_ladder.torch_ops.problem import Setting

SOURCES = Sources(
    Path(__file__).parents[1], ("schedules/**/*.py", "kernels/**/*.py", "relax/rules/*.py", "torch_ops/*.py")
)
PLANS_END = b"\n"  # a line of the launches, then the cubin

Chosen = AnyChoice | Copying  # what makes a kernel


def _written(kernel: CompiledKernel) -> bytes:
    plans = [msgspec.Raw(plan.to_json()) for plan in (kernel.plan, *kernel.behind)]
    return msgspec.json.encode(plans) + PLANS_END + kernel.cubin


def _read(content: bytes) -> CompiledKernel:
    plans, _, cubin = content.partition(PLANS_END)
    plan, *behind = (LaunchPlan.from_json(bytes(each)) for each in msgspec.json.decode(plans, type=list[msgspec.Raw]))
    return CompiledKernel(plan, cubin, tuple(behind))


KERNELS = KeptBuilds(BuildCache("kernels"), ".kernel", SOURCES, _written, _read)


def build_kernel(choice: Chosen, problem: Matmul | None, setting: Setting, compiler: Compiler) -> CompiledKernel:
    """Return the choice's kernel for a problem: the one that is kept, or else a new one, which then is kept.

    Of a kernel for all products the problem is None.
    Raises what :func:`torch_ops.launcher.compile_kernel` raises.
    """

    def compiled() -> CompiledKernel:
        return compile_kernel(choice.build(problem, setting), setting.machine.target, compiler, choice.PIPELINE)

    return KERNELS.get(_made_for(choice, problem, setting), compiler, compiled)


def find_kernel(choice: Chosen, problem: Matmul | None, setting: Setting, compiler: Compiler) -> CompiledKernel | None:
    """Return the kernel that is kept; None where there is none, or none that can be read."""
    return KERNELS.find(_made_for(choice, problem, setting), compiler)


def build_kernels(wanted: Iterable[tuple[Chosen, Matmul | None, Setting]], compiler: Compiler) -> None:
    """Build what a call loads, and keep it."""
    for each in wanted:
        build_kernel(*each, compiler)


def are_kept(wanted: Iterable[tuple[Chosen, Matmul | None, Setting]], compiler: Compiler) -> bool:
    """Tell whether all that a call loads is kept."""
    return all(find_kernel(*each, compiler) is not None for each in wanted)


def _made_for(choice: Chosen, problem: Matmul | None, setting: Setting) -> list[object]:
    return [str(choice), problem, setting]
