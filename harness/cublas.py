"""cuBLAS through torch, the baseline of every measurement, and the operands that it shares with the kernels."""

from __future__ import annotations

from typing import Any

from tensorir_ladder.harness.execution import GpuBackend, device_properties
from tensorir_ladder.harness.race import Contender, Racecourse, require_room, sets_needed
from tensorir_ladder.harness.verify import IEEE
from tensorir_ladder.schedules.workloads import Matmul


class Arena(Racecourse):
    """Operands of one problem on the GPU, in as many sets as it takes to find the L2 cold at every launch.

    Sets are drawn from ``first_seed`` on.
    """

    def __init__(self, problem: Matmul, backend: GpuBackend, first_seed: int = 0) -> None:
        self.problem = problem
        itemsize = backend.torch.empty(0, dtype=getattr(backend.torch, problem.dtype)).element_size()
        set_bytes = (problem.m * problem.k + problem.n * problem.k) * itemsize + problem.m * problem.n * itemsize
        number = sets_needed(set_bytes, device_properties(backend.torch).L2_cache_size)
        in_float64 = 8 * (problem.m * problem.k + problem.k * problem.n + 2 * problem.m * problem.n)
        require_room(backend.torch, number * (set_bytes + problem.k * problem.n * itemsize) + in_float64)
        sets = []
        for seed in range(first_seed, first_seed + number):
            a = backend.normal(2 * seed, (problem.m, problem.k), problem.dtype)
            b = backend.normal(2 * seed + 1, problem.b_shape, problem.dtype)
            sets.append((a, b, backend.poisoned((problem.m, problem.n), problem.out_dtype)))
        super().__init__(backend, sets, set_bytes)
        # The other storage order of B, for cuBLAS only: the same matrix, transposed in memory.
        self.transposed_b = [b.T.contiguous() for _, b, _ in self.sets]

    def cublas(self, math: str = IEEE) -> tuple[Contender, Contender]:
        """Return cuBLAS with B stored row by row (NN) and transposed (NT); with TF32 only where ``math`` says so."""
        self.torch.backends.cuda.matmul.allow_tf32 = math != IEEE
        stored, other = ("nn", "nt") if self.problem.layout == "nn" else ("nt", "nn")
        transposed = {id(b): t for (_, b, _), t in zip(self.sets, self.transposed_b)}

        def as_stored(a: Any, b: Any, c: Any) -> None:
            self.torch.mm(a, b if stored == "nn" else b.T, out=c)

        def as_other(a: Any, b: Any, c: Any) -> None:
            self.torch.mm(a, transposed[id(b)].T if stored == "nn" else transposed[id(b)], out=c)

        return (f"cublas-{stored}", as_stored), (f"cublas-{other}", as_other)
