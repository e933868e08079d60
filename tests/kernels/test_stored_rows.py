"""Results whose rows TMA cannot step over, and outputs of fewer columns than the product: stored row by row."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import tvm

from support.cases import hopper
from tensorir_ladder.emulator import EmulatedProgram, KernelFault
from tensorir_ladder.kernels.codegen.host_code import launch_plan
from tensorir_ladder.kernels.codegen.lowering import Generated, generate
from tensorir_ladder.kernels.fused_epilogue import PLAIN, Epilogue
from tensorir_ladder.kernels.kernel_form import KernelForm
from tensorir_ladder.kernels.persistent import persistent
from tensorir_ladder.kernels.swapped import swapped
from tensorir_ladder.kernels.tiles import RoleTile
from tensorir_ladder.kernels.warp_specialized import warp_specialized
from tensorir_ladder.schedules.errors import IllegalWorkload
from tensorir_ladder.schedules.workloads import Matmul

MACHINE = hopper(multiprocessors=3)
UPRIGHT, STAYS, EXCHANGED = "upright", "stays", "exchanged"


@cache
def lowered(kernel: str, tile: str, problem: Matmul, columns: int = 0, finish: Epilogue = PLAIN) -> Generated:
    """A kernel's text and launch."""
    parsed, form = RoleTile.parse(tile), KernelForm(finish, columns)
    if kernel == STAYS:
        made = persistent(problem, parsed, 3, form, machine=MACHINE, stream_k=False)
    else:
        made = (swapped if parsed.swapped else warp_specialized)(problem, parsed, 3, form)
    return generate(tvm.IRModule({"main": made}), MACHINE.target, "tirx")


def run(found: Generated, problem: Matmul, columns: int = 0, text: str = "", bias: np.ndarray | None = None) -> None:
    """Multiply small whole numbers in the emulator, whose memory beside an output is watched, and compare."""
    numbers = np.random.default_rng(7)
    a, b = (numbers.integers(-3, 4, shape).astype(np.float16) for shape in ((problem.m, problem.k), problem.b_shape))
    wide = a.astype(np.float64) @ (b if problem.layout == "nn" else b.T).astype(np.float64)
    wanted = wide[:, : columns or problem.n] + (0 if bias is None else bias)
    c = np.full(wanted.shape, np.nan, np.float16)
    plan = launch_plan(found)
    given = {"A": a, "B": b, "C": c} | ({} if bias is None else {"bias": bias})
    names = (*given, *(each.buffer for each in plan.workspaces))
    rooms = [np.zeros(each.shape, each.dtype) for each in plan.workspaces]
    program = EmulatedProgram("rows", text or found.cuda, (plan,), names, resident=3, operands=("A", "B"))
    program(*given.values(), *rooms, seed=1)
    np.testing.assert_array_equal(c, wanted.astype(np.float16))


FORMS = [  # widths of less than a box, of boxes that share columns, of several warpgroups
    (UPRIGHT, "64x40x64/1x1"),
    (UPRIGHT, "64x80x64/1x1"),
    (UPRIGHT, "128x128x64/2x1"),
    (UPRIGHT, "64x72x64/1x1/1x1/2"),
    (STAYS, "64x40x64/1x1"),
    (STAYS, "64x136x64/1x1"),
    (STAYS, "128x64x64/2x1"),
    (EXCHANGED, "24x64x64/1x1/1"),
    (EXCHANGED, "40x128x64/1x2/1"),
    (EXCHANGED, "16x64x64/1x1/2"),
]


@pytest.mark.emulator
@pytest.mark.sampled(2)
@pytest.mark.parametrize("n", [131, 130])
@pytest.mark.parametrize(("kernel", "tile"), FORMS)
def test_rows_of_any_length_are_stored(kernel: str, tile: str, n: int) -> None:
    problem = Matmul(141, n, 136, "float16", "nt")
    run(lowered(kernel, tile, problem), problem)


@pytest.mark.emulator
@pytest.mark.sampled(2)
@pytest.mark.parametrize("columns", [129, 134])
@pytest.mark.parametrize(("kernel", "tile"), FORMS)
def test_outputs_may_have_fewer_columns(kernel: str, tile: str, columns: int) -> None:
    problem = Matmul(75, 136, 72, "float16", "nn")
    run(lowered(kernel, tile, problem, columns), problem, columns)


@pytest.mark.emulator
@pytest.mark.parametrize(("kernel", "tile"), [FORMS[1], FORMS[3], FORMS[5], FORMS[8], FORMS[9]])
def test_their_bias_has_as_many(kernel: str, tile: str) -> None:
    problem, columns = Matmul(75, 136, 72, "float16", "nn"), 131
    bias = np.random.default_rng(1).integers(-5, 6, columns).astype(np.float32)
    run(lowered(kernel, tile, problem, columns, Epilogue(bias="float32")), problem, columns, bias=bias)


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("tile", "broken", "instead"),
    [
        ("64x40x64/1x1", "min(40 - 64 * box, 64)", "64"),
        ("64x80x64/1x1", "min(80 - 64 * box, 64)", "64"),
        ("64x80x64/1x1", "at > 0 && at < left", "at < left"),
        ("64x80x64/1x1", "at + 1 < left", "at < left"),
        ("64x80x64/1x1", "|| row + own >= rows", ""),
        ("64x136x64/1x1", "begins + 8 <= left", "begins < left"),
        ("64x136x64/1x1", "at < before ? at : left", "at"),
        ("64x136x64/1x1", "&& row + own < rows", ""),
        ("64x136x64/1x1", "|| beside >= 1", ""),
    ],
)
def test_what_another_stores_is_not_stored_twice(tile: str, broken: str, instead: str) -> None:
    problem = Matmul(141, 131, 72, "float16", "nt")
    found = lowered(UPRIGHT, tile, problem)
    assert broken in found.cuda
    with pytest.raises(KernelFault, match=r"stored twice|out of bounds"):
        run(found, problem, text=found.cuda.replace(broken, instead))


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("broken", "instead"),
    [
        ("before & 4 ?", "before & 8 ?"),
        ("before & 2 ?", "false ?"),
        ("before % 2 * 16", "0"),
        ("next % 8 ^ own % 8", "next % 8"),
        ("element / 8 % 8 ^ own % 8", "element / 8 % 8"),
        ("behind + at - 8", "left"),
        ("begins + 8 <= left", "begins + 16 <= left"),
    ],
)
def test_pieces_are_put_together_of_neighbours(broken: str, instead: str) -> None:
    problem = Matmul(64, 131, 72, "float16", "nt")
    found = lowered(UPRIGHT, "64x136x64/1x1", problem)
    assert broken in found.cuda
    with pytest.raises(AssertionError, match="not equal"):
        run(found, problem, text=found.cuda.replace(broken, instead))


@pytest.mark.emulator
@pytest.mark.parametrize("columns", [0, 122, 157])
@pytest.mark.parametrize("tile", ["24x192x64/1x3/1", "16x256x64/1x2/1", "40x128x64/1x2/1/1x2"])
def test_warpgroups_side_by_side_store_whole_rows(tile: str, columns: int) -> None:
    problem = Matmul(53, 336 if columns else 333, 72, "float16", "nt")
    run(lowered(EXCHANGED, tile, problem, columns), problem, columns)


@pytest.mark.emulator
def test_a_strip_is_written_after_all_lanes_have_read_it() -> None:
    problem, barrier = Matmul(64, 197, 72, "float16", "nt"), "__syncwarp();"
    found = lowered(UPRIGHT, "64x200x64/1x1", problem)
    start = found.cuda.index("main_kernel")
    text = found.cuda[:start] + found.cuda[start:].replace("tvm_builtin_cuda_warp_sync();", "")
    assert text != found.cuda, barrier
    with pytest.raises(KernelFault, match="race"):
        run(found, problem, text=text)


@pytest.mark.parametrize(("kernel", "tile"), [FORMS[0], FORMS[4], FORMS[7]])
def test_more_columns_than_the_product_has_are_refused(kernel: str, tile: str) -> None:
    with pytest.raises(IllegalWorkload, match="more columns than the product"):
        lowered(kernel, tile, Matmul(64, 64, 64, "float16"), 72)
