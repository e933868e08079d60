"""Batches of products as ``torch.bmm`` takes them: of one shape, matrix after matrix."""

from __future__ import annotations

from dataclasses import dataclass

from tensorir_ladder.schedules.workloads import Matmul


@dataclass(frozen=True)
class Batch(Matmul):
    """``C[i] = A[i] · B[i]`` for each ``i`` of a ``batch``; sizes and layout are those of one product."""

    batch: int = 1

    @property
    def one(self) -> Matmul:
        """One of the products."""
        return Matmul(self.m, self.n, self.k, self.dtype, self.layout, self.out_dtype)

    @property
    def flops(self) -> int:
        """Floating-point operations of all products: 2·batch·m·n·k."""
        return self.batch * super().flops

    @property
    def shape(self) -> str:
        """The sizes as text, ``BATCHxMxNxK``."""
        return f"{self.batch}x{super().shape}"


def stored_shapes(problem: Matmul) -> list[tuple[int, ...]]:
    """Return the shapes of A, of B as stored, and of C: of a :class:`Batch` (batch, m, k) and so on."""
    outer = (problem.batch,) if isinstance(problem, Batch) else ()
    return [(*outer, *shape) for shape in ((problem.m, problem.k), problem.b_shape, (problem.m, problem.n))]
