"""Which step's kernel, tile and stages to take for a product: by what each would cost, or by what was measured.

The cost is a count of clock cycles on one multiprocessor (:mod:`schedules.cost`), good enough to put choices into
order, no prediction. Where a GPU's measurements contradict it, ``tuned/`` has what was faster; each line there is a
record's (``reports/results``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec
from tvm import tirx
from tvm.target import Target

from tensorir_ladder.kernels.fused_epilogue import PLAIN, Epilogue
from tensorir_ladder.kernels.persistent import cluster_blocks, persistent
from tensorir_ladder.kernels.stream_k import plan_cost, plan_for
from tensorir_ladder.kernels.tiles import RING_CHOICES, ROLE_CHOICES, HopperTile, RoleTile
from tensorir_ladder.kernels.tma_ring import tma_ring
from tensorir_ladder.kernels.warp_specialized import warp_specialized
from tensorir_ladder.schedules import tiles
from tensorir_ladder.schedules.cost import Machine
from tensorir_ladder.schedules.errors import IllegalTile, IllegalWorkload
from tensorir_ladder.schedules.workloads import MAX_ELEMENTS, Matmul
from tensorir_ladder.torch_ops.rates import read

ITEMSIZE = 2
Extent = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
TUNED = Path(__file__).parent / "tuned"


@dataclass(frozen=True)
class Setting:
    """Circumstances that a kernel is made for, beside its product.

    ``straddles``: rows of B lie across cache lines; ``finish``: what is done to sums before they are rounded;
    ``batch``: so many such products; ``any_rows``: the kernel takes any number of rows up to the product's. Both only
    where the kernel is ``flexible``.
    """

    machine: Machine
    straddles: bool = False
    finish: Epilogue = PLAIN
    batch: int = 1
    any_rows: bool = False


@dataclass(frozen=True)
class StepKernel:
    """A step's kernel, its tiles with their stages, and what it costs beside its tiles' work.

    ``build(problem, tile, stages, setting)`` makes the kernel. ``cuts``: the last wave of tiles may be cut.
    ``waits``: its launch begins only when the kernel before it has ended; ``meets``: its threads meet at a block
    barrier in each k tile. ``flexible``: it takes batches of products, and any number of rows.
    """

    step: int
    tiles: tuple[tiles.Choice, ...]
    build: Callable[[Matmul, HopperTile, int, Setting], tirx.PrimFunc]
    cuts: bool = False
    waits: bool = True
    meets: bool = False
    flexible: bool = False

    def cost(self, problem: Matmul, tile: HopperTile, machine: Machine, batch: int = 1) -> float:
        """Return the clock cycles of a batch of products: :func:`kernels.stream_k.plan_cost`, and the kernel's own."""
        plan, rates = plan_for(problem, tile, machine, cuts=self.cuts, batch=batch), machine.rates
        k_tiles = -(-plan.tiles // plan.workers) * plan.k_tiles
        own = self.waits * rates.launch_cycles + self.meets * k_tiles * rates.barrier_cycles
        return plan_cost(plan, tile, rates) + own


def _ring(problem: Matmul, tile: HopperTile, stages: int, setting: Setting) -> tirx.PrimFunc:
    return tma_ring(problem, tile, stages, finish=setting.finish)


def _roles(problem: Matmul, tile: RoleTile, stages: int, setting: Setting) -> tirx.PrimFunc:
    more = {"batch": setting.batch, "any_rows": setting.any_rows}
    return warp_specialized(problem, tile, stages, finish=setting.finish, **more)


def _persistent(problem: Matmul, tile: RoleTile, stages: int, setting: Setting) -> tirx.PrimFunc:
    """Its overlapped form: it waits for what is before it in the stream before it touches memory."""
    blocks = cluster_blocks(problem, tile, setting.straddles)
    sharing = {"machine": setting.machine, "blocks": blocks}
    return persistent(problem, tile, stages, **sharing, overlapped=True, finish=setting.finish)


KERNELS = {
    kernel.step: kernel
    for kernel in (
        StepKernel(13, ROLE_CHOICES, _persistent, cuts=True, waits=False),
        StepKernel(12, ROLE_CHOICES, _roles, flexible=True),
        StepKernel(11, RING_CHOICES, _ring, meets=True),
    )
}


@dataclass(frozen=True)
class Choice:
    """A step's kernel with a tile and stages."""

    kernel: StepKernel
    tile: HopperTile
    stages: int

    def __str__(self) -> str:
        early = "" if self.kernel.waits else ", launched early"
        return f"step {self.kernel.step}, {self.tile}, {self.stages} stages{early}"

    def build(self, problem: Matmul, setting: Setting) -> tirx.PrimFunc:
        """Make the kernel for a problem."""
        return self.kernel.build(problem, self.tile, self.stages, setting)


def choices() -> Iterator[Choice]:
    """Yield every kernel with each of its tiles."""
    for kernel in KERNELS.values():
        yield from (Choice(kernel, each.tile, each.stages) for each in kernel.tiles)


def choose(problem: Matmul, machine: Machine, batch: int = 1, any_rows: bool = False) -> Choice:
    """Return what was measured to be fastest on this GPU; or else the choice of least cost that it can hold.

    What the user measured (:mod:`.tuned_here`) goes before what we did.
    ``batch`` and ``any_rows`` are those of :class:`Setting`; nothing of theirs was measured. Raises IllegalTile where
    the GPU can hold no choice, with what is wrong with the first.
    """
    measured = tuned(machine.name).get((problem.m, problem.n, problem.k, problem.dtype, problem.layout))
    flexible = batch > 1 or any_rows
    if not flexible and problem.out_dtype == problem.dtype:
        from tensorir_ladder.torch_ops.tuned_here import tuned_here  # which needs the choices

        measured = tuned_here(problem, machine.name, machine.multiprocessors) or measured
    if measured and not flexible:
        return measured
    legal = _legal(machine.target, flexible)
    return min(legal, key=lambda each: each.kernel.cost(problem, each.tile, machine, batch))


@functools.cache
def _legal(target: Target, flexible: bool) -> list[Choice]:
    """List what a target can hold, whatever the product is; see :func:`choose`."""
    able = [each for each in choices() if each.kernel.flexible or not flexible]
    violations = {each: each.tile.violations(target, ITEMSIZE, each.stages) for each in able}
    legal = [each for each, found in violations.items() if not found]
    if not legal:
        raise IllegalTile(
            "no kernel fits this target: " + "; ".join(next(iter(violations.values()))),
            remedy="run on an sm_90a GPU",
        )
    return legal


def of_any_rows(problem: Matmul, tile: HopperTile) -> Matmul:
    """Return the product of the same n and k with the most rows, in whole tiles, that a kernel for any number takes.

    Raises IllegalWorkload where ``problem`` has more.
    """
    most = (MAX_ELEMENTS - 1) // max(problem.n, problem.k) // tile.block_m * tile.block_m
    if problem.m > most:
        raise IllegalWorkload(
            "more rows than a kernel for any number takes", value=problem.m, limit=most, remedy="do without any_m"
        )
    return replace(problem, m=most)


class Tuned(msgspec.Struct, forbid_unknown_fields=True):
    """A line of a GPU's file: a product, and what was fastest."""

    m: Extent
    n: Extent
    k: Extent
    dtype: str
    layout: str
    step: int
    tile: str
    stages: Extent

    def __post_init__(self) -> None:
        if self.step not in KERNELS:
            raise ValueError(f"no kernel of step {self.step}")
        self.choice  # noqa: B018 - a tile that does not parse is an error of the file

    @property
    def choice(self) -> Choice:
        """The kernel, tile and stages."""
        kernel = KERNELS[self.step]
        return Choice(kernel, type(kernel.tiles[0].tile).parse(self.tile), self.stages)


@functools.cache
def tuned(gpu: str) -> dict[tuple[int, int, int, str, str], Choice]:
    """Read what was measured to be faster on a GPU than what costs least, by m, n, k, dtype and layout."""
    wanted = gpu.lower().replace(" ", "-")
    lines = [line for path in TUNED.glob("*.json") if path.stem == wanted for line in read(path, list[Tuned])]
    return {(line.m, line.n, line.k, line.dtype, line.layout): line.choice for line in lines}
