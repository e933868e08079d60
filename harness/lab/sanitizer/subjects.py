"""A kernel that is looked at: a program, its data, and what the emulator says of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tensorir_ladder.emulator import EmulatedProgram, KernelFault
from tensorir_ladder.harness.execution import NumpyArrays
from tensorir_ladder.schedules.workloads import Matmul

SEEDS = range(6)
WRONG = "wrong result"


@dataclass(frozen=True)
class Finding:
    """What is wrong with a kernel: a kind, as the emulator names it, and how it says so; both empty for nothing.

    ``always`` says whether every order of threads that was tried comes to a fault.
    """

    kind: str = ""
    text: str = ""
    always: bool = False


@dataclass(frozen=True)
class Subject:
    """A kernel of a product ``program(a, b, c)``; ``whole`` where nothing is broken in it."""

    name: str
    program: EmulatedProgram
    problem: Matmul
    whole: bool = False

    def arrays(self, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Both operands, small whole numbers of which every sum is exact, and an output of NaN."""
        problem, made = self.problem, NumpyArrays()
        a = made.integers(seed, (problem.m, problem.k), problem.dtype)
        b = made.integers(seed + 1000, problem.b_shape, problem.dtype)
        return a, b, made.poisoned((problem.m, problem.n), problem.out_dtype)

    def wrong_elements(self, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> int:
        """How many elements of an output are not the product's."""
        return int(np.sum(c != NumpyArrays().reference(self.problem, a, b).astype(c.dtype)))


def emulated_finding(subject: Subject) -> Finding:
    """The first fault, or the first wrong output, of some seeds."""
    found = [finding for seed in SEEDS if (finding := _of_seed(subject, seed))]
    return replace(found[0], always=len(found) == len(SEEDS)) if found else Finding()


def _of_seed(subject: Subject, seed: int) -> Finding | None:
    arrays = subject.arrays(seed)
    try:
        subject.program(*arrays, seed=seed)
    except KernelFault as fault:
        return Finding(fault.kind, str(fault))
    if wrong := subject.wrong_elements(*arrays):
        return Finding(WRONG, f"{wrong} of {arrays[-1].size} elements (--emulator-seed {seed} repeats it)")
    return None
