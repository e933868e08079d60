"""A product as its kernel is chosen and made for it: conditions, setting, and the choice among steps' kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from tensorir_ladder.kernels.fused_epilogue import PLAIN, Epilogue
from tensorir_ladder.kernels.stream_k import plan_for
from tensorir_ladder.torch_ops.launcher import TIR_PIPELINE

if TYPE_CHECKING:
    from tvm import tirx

    from tensorir_ladder.kernels.tiles import RoleTile
    from tensorir_ladder.schedules.cost import Machine
    from tensorir_ladder.schedules.workloads import Matmul


class UnpaddedOperands(NamedTuple):
    """Operands whose rows TMA cannot step over, with the product of their exact sizes.

    ``more_us``: microseconds that kernels which TMA loads for spend on copies and on results stored row by row.
    ``unreadable``: the operands that TMA cannot read, as :attr:`.operands.Operands.unreadable`.
    """

    problem: Matmul
    more_us: float
    unreadable: str = ""


@dataclass(frozen=True)
class Conditions:
    """Hold what the choice of a kernel depends on besides the product and the GPU.

    ``batch``: number of such products in one launch. ``any_rows``: the kernel takes any number of rows up to the
    product's. ``dense``: operands have no gaps between rows, so that a kernel may stream one of them. ``gaps``: the
    output has gaps between its rows, which rules out partial sums, stored without TMA. ``rows``: the elements from one
    row of A and B to the next where the kernel reads them; without gaps if None. ``unpadded``: operands that a kernel
    may read unaligned instead.
    """

    batch: int = 1
    any_rows: bool = False
    dense: bool = False
    gaps: bool = False
    rows: tuple[int, int] | None = None
    unpadded: UnpaddedOperands | None = None


@dataclass(frozen=True)
class Setting:
    """Hold what a kernel is made for besides its product.

    ``straddles``: rows of B lie across cache lines; ``finish``: the epilogue, applied before sums are rounded;
    ``batch``: the number of products, with operands that are ``broadcast``, "A" or "B"; ``any_rows``: the kernel takes
    any number of rows up to the product's (only step 12's upright kernel of whole tiles). ``columns``: the output's
    columns where they are fewer than the product's, else 0.
    """

    machine: Machine
    straddles: bool = False
    finish: Epilogue = PLAIN
    batch: int = 1
    any_rows: bool = False
    columns: int = 0
    broadcast: str = ""


@dataclass(frozen=True)
class StepKernel:
    """A step's kernel, the family of its tiles, and what its time depends on.

    ``build(problem, tile, stages, setting)`` makes the kernel. ``early``: its blocks begin before the kernel in front
    has ended (PDL); ``stays``: blocks are persistent; ``cuts``: their last wave of tiles may be cut (stream-K).
    ``blocks``: of a cluster, None where the setting decides.
    """

    step: int
    family: type[RoleTile]
    build: Callable[[Matmul, RoleTile, int, Setting], tirx.PrimFunc]
    early: bool = False
    stays: bool = False
    cuts: bool = False
    blocks: int | None = 1

    def takes(self, problem: Matmul, tile: RoleTile, machine: Machine, batch: int = 1) -> bool:
        """Return whether the kernel differs from that of whole tiles for this product."""
        return not self.cuts or plan_for(problem, tile, machine, self.blocks or 1, batch=batch).helpers > 0


@dataclass(frozen=True)
class KernelChoice:
    """A step's kernel with a tile and stages."""

    PIPELINE: ClassVar[str] = TIR_PIPELINE

    kernel: StepKernel
    tile: RoleTile
    stages: int

    def __str__(self) -> str:
        kernel = self.kernel
        said = [f"step {kernel.step}", str(self.tile), f"{self.stages} stages"]
        said += ["launched early"] if kernel.early else []
        if kernel.stays and kernel.blocks is not None:
            said.append("last wave cut" if kernel.cuts else "whole tiles")
            said += [f"clusters of {kernel.blocks}"] if kernel.blocks > 1 else []
        return ", ".join(said)

    def build(self, problem: Matmul, setting: Setting) -> tirx.PrimFunc:
        """Make the kernel for a problem."""
        return self.kernel.build(problem, self.tile, self.stages, setting)

    def takes(self, problem: Matmul, machine: Machine, batch: int = 1) -> bool:
        """Return whether this is another kernel for the product than one of whole tiles."""
        return self.kernel.takes(problem, self.tile, machine, batch)
