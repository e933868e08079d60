"""Check every configuration with one long reduction too, whatever the shape it is asked for.

Errors that grow with k, and rings that go wrong when they have turned often, do not show at small shapes. Kernels are
built for one shape, so that this is another build of the same variant, tile and stages: one block of output, and many
k tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from tensorir_ladder.harness.build import Case, UnsupportedCase
from tensorir_ladder.harness.execution import Backend
from tensorir_ladder.harness.verify import WrongResult, check_run
from tensorir_ladder.schedules.errors import IllegalSchedule

LARGE_K = 8192
# Where a CPU runs kernels: as many multiply-adds, and k tiles at least.
WORK_ON_CPU, FEWEST_K_TILES = 2**22, 16


@dataclass(frozen=True)
class LargeK:
    """Checks cases with a large k on one backend, each configuration once.

    ``load(case)`` builds a case and returns it as ``run(a, b, c)``; ``known`` is what was found of configurations.
    """

    backend: Backend
    load: Callable[[Case], Callable[..., Any]]
    known: dict[Case, str] = field(default_factory=dict)

    def check(self, case: Case, seed: int) -> str:
        """Check a case's configuration; return the shape that did it, or a clause that says why none did.

        Raise WrongResult, which names the case that is wrong.
        """
        long = large_k_case(case, self.backend.name)
        if isinstance(long, str):
            return long
        if long not in self.known:
            self.known[long] = self._check(long, seed)
        return self.known[long]

    def _check(self, long: Case, seed: int) -> str:
        try:
            run = self.load(long)
        except (IllegalSchedule, UnsupportedCase) as refused:
            return f"no large k: {refused}"
        try:
            check_run(run, long.problem, self.backend, seed, math=long.math)
        except WrongResult as wrong:
            raise WrongResult(f"{long} on {self.backend.name}, seed {seed}: {wrong}") from None
        return long.problem.shape


def large_k_case(case: Case, on: str) -> Case | str:
    """Give a case a block of output and a large k; its own shape where its k is as large, or a clause for why not."""
    if on == "llvm" and case.step.tensorized:
        return "no large k: through LLVM a tensorized step runs in part, and takes minutes to build"
    tile = case.tile_built
    outputs = tile.block_m * tile.block_n
    k = LARGE_K if on == "gpu" else min(LARGE_K, max(WORK_ON_CPU // outputs, FEWEST_K_TILES * tile.block_k))
    k = -(-k // tile.block_k) * tile.block_k
    if case.problem.k >= k:
        return case.problem.shape
    problem = replace(case.problem, m=tile.block_m, n=tile.block_n, k=k)
    stages = max(case.stages_built, case.form.fewest_stages)
    long = replace(case, problem=problem, stages=stages, tile_choice="given", planned=None)
    return f"no large k: {long.lacks}" if long.lacks else long
