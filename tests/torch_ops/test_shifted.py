"""When rows are shifted by the kernel instead of copied in front, of which operands, and by which tile."""

from __future__ import annotations

import math

import pytest

from support.cases import hopper
from tensorir_ladder.harness.commands.build import ToBuild
from tensorir_ladder.kernels.codegen.launch_plan import MatrixRows
from tensorir_ladder.kernels.fused_epilogue import PLAIN
from tensorir_ladder.kernels.shifting import room_for
from tensorir_ladder.kernels.tiles import ClusterTile
from tensorir_ladder.schedules.errors import IllegalTile
from tensorir_ladder.schedules.workloads import LAYOUTS, Matmul
from tensorir_ladder.torch_ops.choice import choose
from tensorir_ladder.torch_ops.copies import Copying
from tensorir_ladder.torch_ops.operands import Form, Operands, arrange
from tensorir_ladder.torch_ops.prepared import choose_for
from tensorir_ladder.torch_ops.problem import Conditions, KernelChoice, Setting, UnpaddedOperands
from tensorir_ladder.torch_ops.shifted import Shifting, fastest_shifting, shifts_rows

H200 = hopper(name="NVIDIA H200")
WIDE, TALL = (124, 4164, 6912), (7851, 72, 2395)  # of the first B has rows that TMA cannot step over, then A


def operands_of(m: int, n: int, k: int, layout: str = "nn", apart: int = 0, b_apart: int = 0) -> Operands:
    """Operands of contiguous tensors, or of an A or a B whose rows begin ``apart``."""
    strides = (b_apart or n, 1) if layout == "nn" else (1, b_apart or k)
    return arrange(Form("a", (m, k), (apart or k, 1), "float16"), Form("b", (k, n), strides, "float16"), "float16")


@pytest.mark.parametrize(
    ("operands", "out", "taken"),
    [
        (operands_of(*WIDE), None, True),
        (operands_of(*WIDE, "nt"), None, False),  # rows of k, which TMA steps over
        (operands_of(*TALL, "nt"), None, True),
        (operands_of(40, 96, 320), None, False),
        (operands_of(40, 95, 256), None, False),
        (operands_of(40, 95, 257), None, True),
        (operands_of(40, 95, 320, apart=640), None, True),  # A's rows have gaps, and TMA steps over them
        (operands_of(40, 95, 320), MatrixRows(40, 95, 256), False),
        (operands_of(40, 2**21 - 1, 1001), None, False),
    ],
)
def test_which_operands_are_looked_at(operands: Operands, out: MatrixRows | None, taken: bool) -> None:
    assert shifts_rows(operands, out or operands.contiguous) == taken


@pytest.mark.parametrize(("shape", "shifts"), [(WIDE, "B"), (TALL, "A")])
def test_a_large_operand_is_shifted_beside_a_few_rows(shape: tuple[int, int, int], shifts: str) -> None:
    operands = operands_of(*shape)
    choice, problem, _ = choose_for(operands, PLAIN, False, H200)
    assert isinstance(choice, Shifting)
    assert (choice.shifts, problem) == (shifts, operands.exact)
    assert room_for(problem, choice.tile, choice.shifts)
    assert f"rows of {shifts} shifted" in str(choice)
    assert not choice.copies(operands)


def test_what_many_rows_read_is_copied() -> None:
    choice, _, setting = choose_for(operands_of(3000, 3001, 3000), PLAIN, False, H200)
    assert isinstance(choice, KernelChoice)
    assert setting.columns == 3001


def test_any_number_of_rows_is_not_looked_at() -> None:
    choice, _, _ = choose_for(operands_of(*WIDE), PLAIN, True, H200)
    assert isinstance(choice, KernelChoice)


def choose_unpadded(operands: Operands, more_us: float) -> KernelChoice | Shifting:
    """Choose where copies take so many microseconds."""
    unpadded = UnpaddedOperands(operands.exact, more_us, operands.unreadable)
    return choose(operands.problem, H200, Conditions(rows=operands.steps, unpadded=unpadded))


def test_copies_decide() -> None:
    """Unless they take too long, a kernel that reads copies is chosen."""
    operands = operands_of(*WIDE)
    chosen = [choose_unpadded(operands, us) for us in (-1e6, 1e6)]
    assert isinstance(chosen[0], KernelChoice)
    assert chosen[1] == fastest_shifting(operands.exact, "B", 132)[0]


@pytest.mark.parametrize(
    ("operands", "shifted"),
    [
        (operands_of(48, 909, 1503, apart=1512), "B"),
        (operands_of(56, 1115, 2515, "nt", apart=2520), "B"),
        (operands_of(2814, 17, 1283, b_apart=24), "A"),
        (operands_of(3001, 20, 2515, "nt", b_apart=2520), "A"),
        (operands_of(1, 909, 1503), "B"),  # of a single row nothing is stepped over
    ],
)
def test_rows_with_gaps_that_tma_steps_over_are_neither_shifted_nor_copied(operands: Operands, shifted: str) -> None:
    """Whatever their own length is."""
    assert operands.unreadable == shifted
    chosen = choose_unpadded(operands, 1e6)
    assert isinstance(chosen, Shifting)
    assert chosen.shifts == shifted
    assert not chosen.copies(operands)
    called, _, _ = choose_for(operands, PLAIN, False, H200)
    assert not isinstance(called, Shifting) or called.shifts == shifted


def test_only_what_tma_cannot_read_is_counted_as_a_copy() -> None:
    problem = Matmul(1000, 1001, 9001, "float16")
    both, one = (fastest_shifting(problem, unreadable, 132) for unreadable in ("AB", "B"))
    assert one[0].shifts == "B"
    assert one[1] < both[1]


def test_a_tile_without_room_is_refused_by_its_memory() -> None:
    shifting = Shifting(ClusterTile.parse("256x128x64/2x1/1x1"), "AB")
    problem = Matmul(300, 301, 333, "float16")
    assert room_for(problem, shifting.tile, "AB") is None
    with pytest.raises(IllegalTile, match=r"bytes of shared memory, limit 232448; take another tile$"):
        shifting.build(problem, Setting(H200))


def test_the_smaller_operand_is_copied_and_that_is_built_too() -> None:
    for shape, copied in (((124, 4164, 6913), True), (WIDE, False)):
        kernels = ToBuild(Matmul(*shape, "float16"), H200.name, 132).kernels
        assert isinstance(kernels[0][0], Shifting)
        assert kernels[0][0].shifts == "B"
        assert any(isinstance(choice, Copying) for choice, _, _ in kernels) == copied


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_product_has_a_tile_that_fits(layout: str) -> None:
    for m, n, k in ((1, 1, 257), (9, 8000, 300), (8000, 9, 1001), (700, 701, 703), (65, 4001, 8191), (1, 4095, 4097)):
        problem = Matmul(m, n, k, "float16", layout)
        unreadable = operands_of(m, n, k, layout).unreadable
        if not unreadable:
            continue
        choice, us = fastest_shifting(problem, unreadable, 132)
        assert room_for(problem, choice.tile, choice.shifts)
        assert choice.tile.parts <= -(-k // 64)
        assert 0 < us < math.inf


def test_more_multiprocessors_take_no_longer() -> None:
    for shape in (WIDE, TALL, (700, 701, 703)):
        given = Matmul(*shape, "float16"), operands_of(*shape).unreadable
        assert fastest_shifting(*given, 132)[1] <= fastest_shifting(*given, 78)[1]
