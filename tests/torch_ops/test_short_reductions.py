"""When operands are read as they lie, and by which tile."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from support.cases import hopper
from tensorir_ladder.kernels.codegen.launch_plan import MatrixRows
from tensorir_ladder.kernels.unaligned import AT_ONCE, MOST_THREADS, Sharing, shared_bytes
from tensorir_ladder.kernels.wgmma import WarpgroupProduct
from tensorir_ladder.schedules.workloads import LAYOUTS, Matmul
from tensorir_ladder.torch_ops.choice import choose
from tensorir_ladder.torch_ops.operands import Form, Operands, arrange
from tensorir_ladder.torch_ops.problem import Conditions, KernelChoice, UnpaddedOperands
from tensorir_ladder.torch_ops.short_reductions import (
    MOST_STEPS,
    Unaligned,
    fastest_tile,
    microseconds,
    more_microseconds,
    reads_as_they_lie,
    tiles_for,
)

H200 = hopper(name="NVIDIA H200")


def operands_of(m: int, n: int, k: int, layout: str = "nn", apart: int = 0) -> Operands:
    """Operands of contiguous tensors, or of an A whose rows begin ``apart``."""
    strides = (n, 1) if layout == "nn" else (1, k)
    return arrange(Form("a", (m, k), (apart or k, 1), "float16"), Form("b", (k, n), strides, "float16"), "float16")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("k", [1, 64, 65, 129, 193, 256])
def test_loads_of_every_tile_are_shared_out_evenly(k: int, layout: str) -> None:
    problem = Matmul(300, 333, k, "float16", layout)
    assert tiles_for(problem)
    for tile in tiles_for(problem):
        sharing = Sharing.of(WarpgroupProduct.of(problem, tile), tile)
        assert tile.threads_per_block <= sharing.threads <= MOST_THREADS
        assert sum(sharing.counts) * sharing.threads * 16 == (tile.block_m + tile.block_n) * tile.block_k * 2
        assert sum(sharing.counts) <= AT_ONCE * sharing.rounds
        assert shared_bytes(tile) <= 227 * 1024
        assert 0 < microseconds(problem, tile, 132) < math.inf


@pytest.mark.parametrize(
    ("operands", "out", "taken"),
    [
        (operands_of(40, 95, 63), None, True),
        (operands_of(40, 96, 63), None, True),
        (operands_of(40, 95, 64, "nt"), None, True),  # the output's rows are none that TMA steps over
        (operands_of(40, 96, 64), None, False),
        (operands_of(40, 95, MOST_STEPS + 1), None, False),
        (operands_of(40, 95, 64, apart=128), None, False),
        (operands_of(40, 95, 63), MatrixRows(40, 95, 256), False),
        (operands_of(2**23 + 1, 95, 129), None, False),
    ],
)
def test_which_operands_are_read_as_they_lie(operands: Operands, out: MatrixRows | None, taken: bool) -> None:
    assert reads_as_they_lie(operands, out or operands.contiguous) == taken


def test_float32_results_are_no_reason_by_themselves() -> None:
    """No kernel stores them by TMA."""
    operands = operands_of(40, 95, 64, "nt")
    wide = replace(operands, problem=replace(operands.problem, out_dtype="float32"))
    assert not reads_as_they_lie(wide, wide.contiguous)
    assert more_microseconds(wide) == 0


def test_a_copy_counts_beside_the_product() -> None:
    """Unless copies, and rows of results, take too long, a kernel that reads copies is chosen."""
    operands = operands_of(1721, 491, 111)
    less = [operands_of(1721, 490, 111), operands_of(1721, 488, 111), operands_of(1721, 488, 112)]
    taken = [more_microseconds(each) for each in (operands, *less)]
    assert taken == sorted(taken, reverse=True)
    assert taken[0] > taken[1] > taken[2] > taken[3] == 0
    chosen = [
        choose(operands.problem, H200, Conditions(rows=operands.steps, unpadded=each))
        for each in (UnpaddedOperands(operands.exact, us) for us in (-1e6, 1e6))
    ]
    assert isinstance(chosen[0], KernelChoice)
    assert chosen[1] == Unaligned(fastest_tile(operands.exact, 132)[0])


def test_large_outputs_get_large_tiles() -> None:
    small, large = (fastest_tile(Matmul(side, side + 1, 99, "float16"), 132)[0] for side in (300, 3000))
    assert small.block_m * small.block_n < large.block_m * large.block_n
