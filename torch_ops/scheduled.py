"""Kernels by the ladder's schedules: for GPUs without wgmma, and for float32.

They run on sm_80 and newer. 16-bit operands are multiplied by mma.sync, as :class:`rules.Contraction` takes them,
float32 by ordinary cores, exactly, by step 7's form for any shape (:func:`schedules.recipes.multiply_by_warps`). They
reach their operands by their addresses: these are contiguous, with rows of any length.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from tvm.s_tir import Schedule

from tensorir_ladder.gpus import schedule_corrections
from tensorir_ladder.schedules.cost import Machine, assumed_machine
from tensorir_ladder.schedules.cycles import Planned
from tensorir_ladder.schedules.errors import IllegalWorkload
from tensorir_ladder.schedules.isa import WGMMA_ARCH
from tensorir_ladder.schedules.loops.vectorization import dtype_bytes
from tensorir_ladder.schedules.pipeline import lower_ahead
from tensorir_ladder.schedules.plans import candidates, choice_cost
from tensorir_ladder.schedules.recipes import WARP_TILES, multiply_by_warps
from tensorir_ladder.schedules.tiles import Choice, WarpTile
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.torch_ops.few_rows import Streamed, finished_matmul, is_of_vectors, streams
from tensorir_ladder.torch_ops.problem import Setting

if TYPE_CHECKING:
    from tvm import tirx

    from tensorir_ladder.kernels.fused_epilogue import Epilogue
    from tensorir_ladder.relax.rules.contraction import ContractionPlan, Shape
    from tensorir_ladder.torch_ops.operands import Operands


@dataclass(frozen=True)
class Scheduled:
    """The choice of such a kernel: the shape of its product, and plans, of which the first that can be built is taken.

    The plans are those of the engines of :mod:`relax.rules.contraction`, the fastest by its estimates first. A long
    reduction may be cut in parts, which a second kernel adds up.
    """

    PIPELINE: ClassVar[str] = "s_tir"

    shape: Shape
    plans: tuple[ContractionPlan, ...]

    def __str__(self) -> str:
        return str(self.plans[0])

    @classmethod
    def of(cls, problem: Matmul, batch: int, machine: Machine) -> Scheduled:
        """Choose for a product, or a batch of them."""
        from tensorir_ladder.relax.rules.contraction import Shape, plans_of  # here: most calls take other kernels

        sizes = batch, problem.m, problem.n, problem.k
        moved, by_k = dtype_bytes(problem.out_dtype), problem.layout == "nt"
        shape = Shape(*sizes, problem.dtype, True, by_k, result_bytes=moved)
        return cls(shape, tuple(plans_of(shape, problem.m, machine)))

    def build(self, problem: Matmul, setting: Setting) -> tirx.PrimFunc:
        """Schedule and lower the product."""
        from tensorir_ladder.relax.rules.contraction import first_lowered

        function = finished_matmul(problem, setting)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # more stages than a short reduction fills, which the plans know
            return first_lowered(function, self.shape, None, self.plans, setting.machine.target).lowered


# Step 7's own tile, which is the fastest of large products of whole tiles.
WHOLE = Choice(WarpTile(block=(128, 128, 16), warp=(32, 128), thread=(8, 16)), stages=3)


@dataclass(frozen=True)
class ByWarps:
    """The choice of step 7's kernel for float32: a tile with stages, and what goes with it.

    Operands with rows of no whole vectors may be copied by a kernel in front, and parts be added up by one behind.
    """

    PIPELINE: ClassVar[str] = "s_tir"

    choice: Choice
    planned: Planned

    def __str__(self) -> str:
        parts = f", {self.planned.parts} parts" if self.planned.parts > 1 else ""
        return f"step 7, {self.choice.tile}, {self.choice.stages} stages{parts}"

    @classmethod
    def of(cls, problem: Matmul, batch: int, machine: Machine) -> ByWarps:
        """Choose for a product, or a batch of them, which counts as one with all their rows and is not cut in parts."""
        known = replace(machine, corrections=schedule_corrections(machine.name))
        found = candidates(WARP_TILES, replace(problem, m=batch * problem.m), known)
        best = next((each for each in found if each.planned.parts == 1), found[0]) if batch > 1 else found[0]
        sizes = zip((problem.m, problem.n, problem.k), WHOLE.tile.block)
        is_whole = problem.layout == "nn" and not any(size % extent for size, extent in sizes)
        if is_whole and choice_cost(WARP_TILES, WHOLE, problem, machine) < best.cycles:
            return cls(WHOLE, Planned())
        return cls(best.choice, best.planned if batch == 1 else best.planned._replace(parts=1))

    def build(self, problem: Matmul, setting: Setting) -> tirx.PrimFunc:
        """Schedule and lower the product."""
        sch, machine = Schedule(finished_matmul(problem, setting)), setting.machine
        block = sch.get_sblock("matmul")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # more stages than a short reduction fills
            multiply_by_warps(sch, block, self.choice.tile, self.choice.stages, self.planned, machine)
        return lower_ahead(sch.mod["main"], machine.target)


def is_scheduled(dtype: str, machine: Machine) -> bool:
    """Tell whether the explicit kernels do not multiply such operands on a machine, and schedules do."""
    return dtype == "float32" or machine.target.attrs["arch"] != WGMMA_ARCH


def schedule_for(
    operands: Operands, finish: Epilogue, any_m: bool, machine: Machine
) -> tuple[Streamed | Scheduled | ByWarps, Matmul, Setting]:
    """Choose a kernel for contiguous operands, and say for which product and in which setting it is made.

    It is made for the machine's architecture, so that all GPUs of it share what was built. IllegalWorkload for any_m.
    """
    problem, batch, broadcast = operands.exact, operands.batch, operands.broadcast
    if any_m:
        raise IllegalWorkload(
            "kernels for any number of rows are Hopper's, of 16-bit operands",
            value=f"any_m for {problem.dtype} on {machine.target.attrs['arch']}",
            limit=f"float16 or bfloat16 on {WGMMA_ARCH}",
            remedy="do without any_m",
        )
    setting = Setting(_any_of(machine), finish=finish, batch=batch, broadcast=broadcast)
    streaming = is_of_vectors(problem) or (streams(problem) and not broadcast)
    if streaming:
        return Streamed(), problem, setting
    way = ByWarps if problem.dtype == "float32" else Scheduled
    return way.of(problem, batch, machine), problem, setting


@functools.cache  # one object for all kernels: TVM's targets are equal to themselves alone
def _any_of(machine: Machine) -> Machine:
    """Return a machine of the same architecture."""
    return assumed_machine(machine.target)
