"""Which rung's kernel, tile and stage count to take for a product: by what each would cost, or by what was measured.

The cost is a count of clock cycles on one multiprocessor, good enough to put choices into order, no prediction. Where a
GPU's measurements contradict it, ``tuned/`` has what was faster; each line there is a record's (``reports/results``).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tvm import tirx
from tvm.target import Target

from tensorir_ladder.kernels.fused_epilogue import PLAIN, Epilogue
from tensorir_ladder.kernels.persistent import cluster_blocks, persistent
from tensorir_ladder.kernels.stream_k import plan_for, reckoned_cycles
from tensorir_ladder.kernels.tiles import RING_CHOICES, ROLE_CHOICES, HopperTile, RoleTile
from tensorir_ladder.kernels.tma_ring import tma_ring
from tensorir_ladder.kernels.warp_specialized import warp_specialized
from tensorir_ladder.schedules import tiles
from tensorir_ladder.schedules.errors import IllegalTile, IllegalWorkload
from tensorir_ladder.schedules.workloads import MAX_ELEMENTS, Matmul

ITEMSIZE = 2
# What a launch costs that begins only when the kernel before it has ended: 0.7 µs, the difference of rung 13's variants
# from 256³ to 1024³ on an H200.
LAUNCH_CYCLES = 1200
BARRIER_CYCLES = 100  # of a k tile: a block barrier that nothing else on the multiprocessor hides
TUNED = Path(__file__).parent / "tuned"


@dataclass(frozen=True)
class Machine:
    """The GPU that a kernel is chosen for: what it can hold, its multiprocessors, and its name, if known."""

    target: Target
    multiprocessors: int
    name: str = ""


@dataclass(frozen=True)
class Setting:
    """What a kernel is made for beside its product.

    ``straddles``: whether rows of B lie across cache lines; ``finish``: what is done to sums before they are rounded;
    ``batch``: how many such products; ``any_rows``: the kernel takes any number of rows up to the product's. Both only
    where the rung is ``flexible``.
    """

    multiprocessors: int
    straddles: bool = False
    finish: Epilogue = PLAIN
    batch: int = 1
    any_rows: bool = False


@dataclass(frozen=True)
class Rung:
    """A rung's kernel, its tiles with their ring slots (``tile@slots``), and what it costs beside its tiles' work.

    ``build(problem, tile, stages, setting)`` makes the kernel. ``cuts``: whether the last wave of tiles is cut.
    ``launch_cycles`` are a product's, ``step_cycles`` a k tile's. ``flexible``: it takes batches of products, and any
    number of rows.
    """

    number: int
    tiles: tuple[tiles.Choice, ...]
    build: Callable[[Matmul, HopperTile, int, Setting], tirx.PrimFunc]
    cuts: bool = False
    launch_cycles: int = LAUNCH_CYCLES
    step_cycles: int = 0
    flexible: bool = False

    def cost(self, problem: Matmul, tile: HopperTile, multiprocessors: int, batch: int = 1) -> float:
        """Clock cycles of a batch of products: :func:`kernels.stream_k.reckoned_cycles`, and the rung's own."""
        plan = plan_for(problem, tile, multiprocessors, cuts=self.cuts, batch=batch)
        steps = -(-plan.tiles // plan.workers) * plan.k_tiles
        worked = reckoned_cycles(problem, tile, multiprocessors, self.cuts, batch)
        return worked + steps * self.step_cycles + self.launch_cycles


def _ring(problem: Matmul, tile: HopperTile, stages: int, setting: Setting) -> tirx.PrimFunc:
    return tma_ring(problem, tile, stages, finish=setting.finish)


def _roles(problem: Matmul, tile: RoleTile, stages: int, setting: Setting) -> tirx.PrimFunc:
    more = {"batch": setting.batch, "any_rows": setting.any_rows}
    return warp_specialized(problem, tile, stages, finish=setting.finish, **more)


def _persistent(problem: Matmul, tile: RoleTile, stages: int, setting: Setting) -> tirx.PrimFunc:
    """Its overlapped form: it waits for what is before it in the stream before it touches memory."""
    sharing = {
        "multiprocessors": setting.multiprocessors,
        "blocks": cluster_blocks(problem, tile, setting.straddles),
    }
    return persistent(problem, tile, stages, **sharing, overlapped=True, finish=setting.finish)


RUNGS = {
    rung.number: rung
    for rung in (
        Rung(13, ROLE_CHOICES, _persistent, cuts=True, launch_cycles=0),
        Rung(12, ROLE_CHOICES, _roles, flexible=True),
        Rung(11, RING_CHOICES, _ring, step_cycles=BARRIER_CYCLES),
    )
}


@dataclass(frozen=True)
class Choice:
    """A rung's kernel with a tile and ring slots."""

    rung: Rung
    tile: HopperTile
    stages: int

    def __str__(self) -> str:
        return f"rung {self.rung.number}, {self.tile}, {self.stages} stages"

    def build(self, problem: Matmul, setting: Setting) -> tirx.PrimFunc:
        """The kernel for a problem."""
        return self.rung.build(problem, self.tile, self.stages, setting)


def choices() -> Iterator[Choice]:
    """Every rung with each of its tiles."""
    for rung in RUNGS.values():
        yield from (Choice(rung, each.tile, each.stages) for each in rung.tiles)


def choose(problem: Matmul, machine: Machine, batch: int = 1, any_rows: bool = False) -> Choice:
    """What was measured to be fastest on this GPU; or else the choice of least cost that it can hold.

    ``batch`` and ``any_rows`` are those of :class:`Setting`; nothing of theirs was measured. Raises IllegalTile where
    the GPU can hold no choice, with what is wrong with the first.
    """
    measured = tuned(machine.name).get((problem.m, problem.n, problem.k, problem.dtype, problem.layout))
    flexible = batch > 1 or any_rows
    if measured and not flexible:
        return measured
    able = [each for each in choices() if each.rung.flexible or not flexible]
    violations = {each: each.tile.violations(machine.target, ITEMSIZE, each.stages) for each in able}
    legal = [each for each, found in violations.items() if not found]
    if not legal:
        raise IllegalTile(
            "no kernel fits this target: " + "; ".join(next(iter(violations.values()))),
            remedy="run on an sm_90a GPU",
        )
    return min(legal, key=lambda each: each.rung.cost(problem, each.tile, machine.multiprocessors, batch))


def of_any_rows(problem: Matmul, tile: HopperTile) -> Matmul:
    """The product of the same n and k that has the most rows, whole tiles of them, for a kernel that takes any number.

    Raises IllegalWorkload where ``problem`` has more.
    """
    most = (MAX_ELEMENTS - 1) // max(problem.n, problem.k) // tile.block_m * tile.block_m
    if problem.m > most:
        raise IllegalWorkload(
            "more rows than a kernel for any number takes", value=problem.m, limit=most, remedy="do without any_m"
        )
    return replace(problem, m=most)


@functools.cache
def tuned(gpu: str) -> dict[tuple[int, int, int, str, str], Choice]:
    """By m, n, k, dtype and layout: what was measured to be faster on a GPU of that name than what costs least."""
    path = TUNED / f"{gpu.lower().replace(' ', '-')}.json"
    if not path.exists():
        return {}
    return {
        (line["m"], line["n"], line["k"], line["dtype"], line["layout"]): _measured(line)
        for line in json.loads(path.read_text(encoding="utf-8"))
    }


def _measured(line: dict[str, Any]) -> Choice:
    rung = RUNGS[line["rung"]]
    return Choice(rung, type(rung.tiles[0].tile).parse(line["tile"]), line["stages"])
