"""Find a kernel that was built before by what it was made for, without making, lowering and compiling it again.

A kernel follows from its choice, its product, their setting, and the versions of TVM, of nvcc and of this project's
sources: of all these it is kept, its launch and its cubin in one file (:mod:`kernels.codegen.build_cache`).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec
import tvm
import tvm_ffi

from tensorir_ladder.kernels.codegen.build_cache import BuildCache, digest_sources
from tensorir_ladder.kernels.codegen.launch_plan import LaunchPlan
from tensorir_ladder.kernels.codegen.toolchain import Compiler
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.torch_ops.choice import AnyChoice, Setting
from tensorir_ladder.torch_ops.copies import Copying
from tensorir_ladder.torch_ops.launcher import CompiledKernel, compile_kernel

KERNELS, SUFFIX, PLAN_END = BuildCache("kernels"), ".kernel", b"\n"  # a line of the launch, then the cubin
ROOT = Path(__file__).parents[1]
SOURCES = ("schedules/**/*.py", "kernels/**/*.py", "torch_ops/*.py")
LOADED = digest_sources(ROOT, SOURCES)  # of what this process runs


Chosen = AnyChoice | Copying  # what makes a kernel


def build_kernel(choice: Chosen, problem: Matmul | None, setting: Setting, compiler: Compiler) -> CompiledKernel:
    """Return the choice's kernel for a problem: the one that is kept, or else a new one, which then is kept.

    Of a kernel for all products the problem is None.

    Nothing is kept where sources were edited since this process loaded them: it may have made the kernel of both.
    Raises what :func:`torch_ops.launcher.compile_kernel` raises.
    """
    recent = digest_sources(ROOT, SOURCES) == LOADED
    found = find_kernel(choice, problem, setting, compiler) if recent else None
    if found is None:
        found = compile_kernel(choice.build(problem, setting), setting.machine.target, compiler, choice.PIPELINE)
        if recent:
            KERNELS.put(
                _recipe(choice, problem, setting, compiler), SUFFIX, found.plan.to_json() + PLAN_END + found.cubin
            )
    return found


def find_kernel(choice: Chosen, problem: Matmul | None, setting: Setting, compiler: Compiler) -> CompiledKernel | None:
    """Return the kernel that is kept; None where there is none, or none that can be read."""
    kept = KERNELS.find(_recipe(choice, problem, setting, compiler), SUFFIX)
    if kept is None:
        return None
    plan, _, cubin = kept.content.partition(PLAN_END)
    try:
        return CompiledKernel(LaunchPlan.from_json(plan), cubin)
    except ValueError:
        return None


def build_kernels(wanted: Iterable[tuple[Chosen, Matmul | None, Setting]], compiler: Compiler) -> None:
    """Build what a call loads, and keep it."""
    for each in wanted:
        build_kernel(*each, compiler)


def are_kept(wanted: Iterable[tuple[Chosen, Matmul | None, Setting]], compiler: Compiler) -> bool:
    """Tell whether all that a call loads is kept."""
    return all(find_kernel(*each, compiler) is not None for each in wanted)


def _recipe(choice: Chosen, problem: Matmul | None, setting: Setting, compiler: Compiler) -> str:
    made_for = [str(choice), problem, setting]
    versions = [tvm.__version__, tvm_ffi.__version__, compiler.version, LOADED]
    return msgspec.json.encode([*made_for, *versions], enc_hook=str).decode()  # a target is its text
