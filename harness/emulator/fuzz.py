"""Fuzzing: products, steps and configurations drawn at random, each right or refused with a reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from harness.build import Case, UnsupportedCase, lower
from harness.targets import DEFAULT_ARCH, Machine, machine_for
from harness.verify import WrongResult, check_output
from schedules.errors import IllegalSchedule
from schedules.workloads import LAYOUTS, Matmul
from steps.registry import Step

from .backend import EmulatorBackend
from .errors import KernelFault

Choice = TypeVar("Choice")
Choose = Callable[[Sequence[Choice]], Choice]
REFUSALS = (IllegalSchedule, UnsupportedCase)
SIZES, DEPTHS, STAGES = range(1, 97), range(1, 129), range(1, 7)


@dataclass(frozen=True)
class SmallMachine(Machine):
    """A machine with as many multiprocessors as one likes, so that small products fill it several times."""

    multiprocessors: int = 1

    @property
    def sms(self) -> int:
        """Multiprocessors."""
        return self.multiprocessors

    @classmethod
    def of(cls, machine: Machine, multiprocessors: int) -> SmallMachine:
        """Another machine with so many."""
        return cls(
            **{part.name: getattr(machine, part.name) for part in fields(Machine)}, multiprocessors=multiprocessors
        )


@dataclass
class Tally:
    """What became of runs: right, refused (nothing was run), or bad, with a line for each of these."""

    kernels: int = 0
    right: int = 0
    refused: int = 0
    bad: list[str] = field(default_factory=list)

    @property
    def runs(self) -> int:
        """All of them."""
        return self.right + self.refused + len(self.bad)


def draw_case(choose: Choose[Any], steps: Sequence[Step]) -> Case:
    """A case of which every part is chosen by ``choose(choices)``: step, variant, dtype, layout, shape, tile, slots."""
    step = choose(steps)
    variant = choose(step.variants)
    problem = Matmul(choose(SIZES), choose(SIZES), choose(DEPTHS), choose(step.dtypes(variant)), choose(LAYOUTS))
    tile = choose((step.tiles.default, *step.tiles.tuning))
    return Case(step, problem, variant, tile, machine_for(DEFAULT_ARCH), choose(STAGES), "given")


def run_case(case: Case, seeds: Sequence[int], tally: Tally) -> None:
    """Run a case once for each seed, which draws data and the order of threads; a refusal is one run."""
    try:
        kernel = lower(case)
    except REFUSALS:
        tally.refused += 1
        return
    tally.kernels += 1
    problem, backend = case.problem, EmulatorBackend(seeds[0])
    run = backend.load(kernel)
    for seed in seeds:
        a = backend.normal(seed, (problem.m, problem.k), problem.dtype)
        b = backend.normal(seed + 1000, problem.b_shape, problem.dtype)
        output = backend.poisoned((problem.m, problem.n), problem.out_dtype)
        try:
            run(a, b, output)
            check_output(problem, backend, output, backend.reference(problem, a, b), exact=False, math=case.math)
        except (KernelFault, WrongResult) as found:
            tally.bad.append(f"{case} {problem.layout}, {case.stages} stages asked for, seed {seed}: {found}")
        else:
            tally.right += 1
