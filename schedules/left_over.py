"""What a tile takes beside its formula (:mod:`.cost`), as times of schedules on drawn shapes have it, told by trees.

A formula has a few constants for all shapes; what it leaves depends on how a shape's tiles, rounds of blocks and k
tiles end. Trees (:mod:`.trees`) are grown over the times that the formulas are fitted to
(``ladder menu --shapes schedules``); ``grown/`` has them, of a GPU a file for tiles of warps and one for those of
warpgroups. Those of an H200 are taken to say the same of GPUs without their own, as the formulas' constants are.

Of 356 shapes in float16, left out in five turns, what is chosen has 0.984 of the speed of the fastest that was timed,
by the formulas alone 0.974; of 639 in float32 0.990 instead of 0.979.
"""

from __future__ import annotations

import functools
import math
import re
from pathlib import Path
from typing import Any

from tensorir_ladder.schedules.cost import Machine, Planned, block_count, resident_blocks, unaligned_rows
from tensorir_ladder.schedules.isa import PANEL, SECTOR_BYTES, VECTOR_BYTES, WARP
from tensorir_ladder.schedules.tiles import Choice, WarpgroupTile, WarpTile
from tensorir_ladder.schedules.trees import Trees, read_trees
from tensorir_ladder.schedules.workloads import Matmul

FOLDER = Path(__file__).parent / "grown"
WARPS, WARPGROUPS = "warps", "warpgroups"  # families of tiles
MEASURED_ON = "NVIDIA H200"  # the GPU whose trees others take that have none


def left_by_warps(choice: Choice, problem: Matmul, machine: Machine, planned: Planned, cycles: float) -> float:
    """Return how many times as long as its formula's ``cycles`` a product takes by a tile of warps, as planned."""
    return _left(WARPS, choice, problem, machine, planned, cycles)


def left_by_warpgroups(choice: Choice, problem: Matmul, machine: Machine, planned: Planned, cycles: float) -> float:
    """Return the same of a tile of warpgroups, whoever brings its operands."""
    return _left(WARPGROUPS, choice, problem, machine, planned, cycles)


def _left(family: str, choice: Choice, problem: Matmul, machine: Machine, planned: Planned, cycles: float) -> float:
    trees = trees_of(machine.name, family)
    return math.exp(trees.told(trees.named(features(choice, problem, machine, planned, cycles)))[0])


@functools.cache
def trees_of(gpu: str, family: str) -> Trees:
    """Read a GPU's trees of WARPS or WARPGROUPS, or those of MEASURED_ON where it has none."""
    path = path_of(gpu, family)
    return read_trees(path if path.exists() else path_of(MEASURED_ON, family))


def path_of(gpu: str, family: str) -> Path:
    """Return where the trees of a GPU lie."""
    return FOLDER / f"{re.sub(r'[^a-z0-9]+', '-', gpu.lower())}-{family}.json"


def features(choice: Choice, problem: Matmul, machine: Machine, planned: Planned, cycles: float) -> dict[str, Any]:
    """Return by name what trees may ask of a product and a tile, scheduled as ``planned``; the formula's ``cycles``."""
    tile, itemsize = choice.tile, problem.itemsize
    (m, n, k), (block_m, block_n, block_k) = (problem.m, problem.n, problem.k), tile.block
    a_bytes, b_bytes = (row * itemsize for row in (k, problem.b_shape[1]))
    down, across = -(-m // block_m), -(-n // block_n)
    resident = resident_blocks(choice, machine, itemsize, int(planned.own_warp))
    of_each = block_count(problem, tile) * planned.parts / machine.multiprocessors
    rounds = of_each / resident
    busiest, warps = math.ceil(of_each), tile.threads_per_block // WARP
    multiplied = busiest * block_m * block_n * math.ceil(k / planned.parts)  # by the busiest multiprocessor
    apart = unaligned_rows(problem, VECTOR_BYTES)
    a_straight, b_straight = (rows and not first for rows, first in zip(apart, planned.copied))
    return {
        "m": m,
        "n": n,
        "k": k,
        "a_apart": math.gcd(a_bytes, 2 * SECTOR_BYTES) // itemsize,
        "b_apart": math.gcd(b_bytes, 2 * SECTOR_BYTES) // itemsize,
        "b_panels": n % PANEL,
        "k_panels": k % PANEL,
        "results": m * n,
        "operands": (m + n) * k,
        "block_m": block_m,
        "block_n": block_n,
        "block_k": block_k,
        "block": block_m * block_n,
        "threads": tile.threads_per_block,
        "slices": tile.slices if isinstance(tile, WarpTile) else 1,
        "swapped": isinstance(tile, WarpgroupTile) and tile.swapped,
        "stages": choice.stages,
        "parts": planned.parts,
        "a_copied": planned.copied[0],
        "b_copied": planned.copied[1],
        "boxes": planned.boxes,
        "down": planned.cluster[0],
        "across": planned.cluster[1],
        "own_warp": planned.own_warp,
        "resident": resident,
        "blocks": of_each,
        "last_blocks": of_each % 1,
        "rounds": rounds,
        "last_round": rounds % 1,
        "unfilled": math.ceil(rounds) / rounds,
        "busiest": busiest,
        "uneven": busiest / of_each,
        "warps": min(busiest, resident) * warps,
        "last_warps": ((busiest - 1) % resident + 1) * warps,
        "multiplied": multiplied,
        "beside_multiplying": cycles / multiplied,
        "intensity": m * n * k / ((m + n) * k + m * n),
        "straight": a_straight + 2 * b_straight,
        "k_tiles": math.ceil(math.ceil(k / block_k) / planned.parts),
        "rows_of_last": m % block_m,
        "columns_of_last": n % block_n,
        "rows_beyond": down * block_m / m,
        "columns_beyond": across * block_n / n,
        "last_down": down % planned.cluster[0],
        "last_across": across % planned.cluster[1],
        "cycles": cycles,
    }
