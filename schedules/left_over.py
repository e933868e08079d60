"""What a schedule takes relative to its formula (:mod:`.cost`): features that trees ask, and what they say.

A formula has a few constants for all shapes; what it leaves of measured times depends on how a shape's tiles, rounds of
blocks and k tiles end. The trees (:mod:`.trees`) come with the machine.
"""

from __future__ import annotations

import math
from typing import Any

from tensorir_ladder.schedules.cost import Machine, Planned, block_count, resident_blocks, unaligned_rows
from tensorir_ladder.schedules.isa import PANEL, SECTOR_BYTES, VECTOR_BYTES, WARP
from tensorir_ladder.schedules.tiles import Choice, WarpgroupTile, WarpTile
from tensorir_ladder.schedules.workloads import Matmul


def left_over(choice: Choice, problem: Matmul, machine: Machine, planned: Planned, cycles: float) -> float:
    """Return how many times its formula's ``cycles`` a product takes, scheduled as ``planned``.

    1 on a machine without corrections.
    """
    if machine.corrections is None:
        return 1.0
    of_warps, of_warpgroups = machine.corrections
    trees = of_warps if isinstance(choice.tile, WarpTile) else of_warpgroups
    return math.exp(trees.predict(features(choice, problem, machine, planned, cycles))[0])


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
