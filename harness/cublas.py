"""cuBLAS through torch, the baseline of every measurement, and the operands that it shares with the kernels."""

from __future__ import annotations

from typing import Any

from tensorir_ladder.harness.execution import GpuBackend, device_properties
from tensorir_ladder.harness.race import Contender, Racecourse, require_room, sets_needed
from tensorir_ladder.harness.verify import IEEE, bytes_to_check
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
        checking = bytes_to_check(problem, itemsize)
        require_room(backend.torch, number * (set_bytes + problem.k * problem.n * itemsize) + checking)
        sets = []
        for seed in range(first_seed, first_seed + number):
            a = backend.normal(2 * seed, (problem.m, problem.k), problem.dtype)
            b = backend.normal(2 * seed + 1, problem.b_shape, problem.dtype)
            sets.append((a, b, backend.poisoned((problem.m, problem.n), problem.out_dtype)))
        super().__init__(backend, sets, set_bytes)
        # By B's id: the sets keep it alive, so that no other tensor has the same.
        self._turned = {id(b): b.T.contiguous() for _, b, _ in self.sets}

    def turned(self, b: Any) -> Any:
        """Return B transposed in memory, for who may choose how it is stored: ready for those of the sets."""
        ready = self._turned.get(id(b))
        return b.T.contiguous() if ready is None else ready

    def cublas(self, math: str = IEEE) -> tuple[Contender, Contender]:
        """Return cuBLAS with B stored row by row (NN) and transposed (NT); with TF32 only where ``math`` says so."""
        self.torch.backends.cuda.matmul.allow_tf32 = math != IEEE
        stored, other = ("nn", "nt") if self.problem.layout == "nn" else ("nt", "nn")

        def as_stored(a: Any, b: Any, c: Any) -> None:
            self.torch.mm(a, b if stored == "nn" else b.T, out=c)

        def as_other(a: Any, b: Any, c: Any) -> None:
            turned = self.turned(b)
            self.torch.mm(a, turned.T if stored == "nn" else turned, out=c)

        return (f"cublas-{stored}", as_stored), (f"cublas-{other}", as_other)
