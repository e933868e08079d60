"""cuBLAS through torch, the baseline of every measurement, and the operands that it shares with the kernels."""

from __future__ import annotations

from math import prod
from typing import Any

from tensorir_ladder.harness.batches import Batch, stored_shapes
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
        of_a, of_b, of_c = stored_shapes(problem)
        set_bytes = itemsize * (prod(of_a) + prod(of_b) + prod(of_c))
        number = sets_needed(set_bytes, device_properties(backend.torch).L2_cache_size)
        checking = bytes_to_check(problem, itemsize)
        require_room(backend.torch, number * (set_bytes + prod(of_b) * itemsize) + checking)
        sets = []
        for seed in range(first_seed, first_seed + number):
            a = backend.normal(2 * seed, of_a, problem.dtype)
            b = backend.normal(2 * seed + 1, of_b, problem.dtype)
            sets.append((a, b, backend.poisoned(of_c, problem.out_dtype)))
        super().__init__(backend, sets, set_bytes)
        # By B's id: the sets keep it alive, so that no other tensor has the same.
        self._turned = {id(b): b.mT.contiguous() for _, b, _ in self.sets}

    def turned(self, b: Any) -> Any:
        """Return B transposed in memory, for who may choose how it is stored: ready for those of the sets."""
        ready = self._turned.get(id(b))
        return b.mT.contiguous() if ready is None else ready

    def baseline(self) -> tuple[Contender, ...]:
        """Return both forms of cuBLAS, or for a batch ``torch.bmm`` with B as it is stored."""
        if not isinstance(self.problem, Batch):
            return self.cublas()
        transposed = self.problem.layout == "nt"

        def bmm(a: Any, b: Any, c: Any) -> None:
            self.torch.bmm(a, b.mT if transposed else b, out=c)

        return (("torch.bmm", bmm),)

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
