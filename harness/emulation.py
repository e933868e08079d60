"""The emulator as a place to run kernels, beside the GPU and LLVM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from tensorir_ladder.emulator import EmulatedProgram
from tensorir_ladder.harness.build import Lowered
from tensorir_ladder.harness.execution import NumpyArrays, numpy_dtype
from tensorir_ladder.kernels.codegen.host_code import read_launches
from tensorir_ladder.schedules.memory.workspaces import pass_workspaces


class EmulatorBackend(NumpyArrays):
    """Runs generated CUDA on the CPU; see :mod:`emulator`. Each call of a kernel takes the next seed."""

    name = "emulator"

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def load(self, kernel: Lowered) -> Callable[..., None]:
        """See :class:`harness.execution.Backend`; calls raise KernelFault."""
        program, calls = emulated(kernel), 0

        def call(*arrays: np.ndarray) -> None:
            nonlocal calls
            program(*arrays, seed=self.seed + calls)
            calls += 1

        return call


def emulated(lowered: Lowered, operands: Sequence[str] | None = None) -> EmulatedProgram:
    """Make a lowered function one of this machine; ``operands`` are never written to, all but the last one by default.

    UnsupportedLaunch for launches that depend on what is known at run time; UnknownLaunch for those of a kind that the
    emulator does not know.
    """
    function = pass_workspaces(lowered.mod)["main"]
    names = tuple(str(parameter.name) for parameter in function.params)
    memory = tuple((tuple(map(int, kept.shape)), numpy_dtype(str(kept.dtype))) for kept in lowered.workspaces)
    if operands is None:
        results = 2 if lowered.roles else 1  # what a function is given last: its result, and its time stamps
        operands = names[: len(names) - len(memory) - results]
    overlaps, resident = lowered.launched_early, lowered.machine.multiprocessors
    launches = tuple(replace(launch, overlaps=overlaps) for launch in read_launches(lowered.host))
    return EmulatedProgram(lowered.label, lowered.cuda, launches, names, memory, resident, tuple(operands))
