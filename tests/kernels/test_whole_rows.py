"""Whole rows of B, loaded as they lie in memory and multiplied from registers."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm

from support.broken_texts import hold_caught
from support.cases import hopper
from support.roles import roles, roles_case
from tensorir_ladder.harness.build import compiled, lower
from tensorir_ladder.harness.emulation import EmulatorBackend
from tensorir_ladder.harness.execution import GpuBackend
from tensorir_ladder.harness.verify import verify
from tensorir_ladder.kernels.codegen.host_code import launch_plan
from tensorir_ladder.kernels.codegen.launch_plan import MatrixRows, UnsupportedLaunch
from tensorir_ladder.kernels.codegen.lowering import Generated, generate
from tensorir_ladder.kernels.codegen.toolchain import Compiler, arch_flags, ptxas_facts, run_nvcc
from tensorir_ladder.kernels.kernel_form import KernelForm
from tensorir_ladder.kernels.swapped import swapped
from tensorir_ladder.kernels.tiles import RoleTile, RowsTile, most_stages
from tensorir_ladder.kernels.whole_rows import WholeRows
from tensorir_ladder.schedules.errors import IllegalTile
from tensorir_ladder.schedules.workloads import Matmul


def overlapped(shape: tuple[int, int, int], tile: str, stages: int = 3) -> Generated:
    """Lower the call's form of a tile's kernel."""
    function = swapped(Matmul(*shape, "float16"), RoleTile.parse(tile), stages, KernelForm(overlapped=True))
    return generate(tvm.IRModule({"main": function}), hopper().target, "tirx")


# Tiles


def test_a_tile_is_written_with_the_columns_that_it_loads() -> None:
    tile = RoleTile.parse("88x152x64rows/1x3/3")
    assert (type(tile), str(tile)) == (RowsTile, "88x152x64rows/1x3/3")
    assert str(RoleTile.parse("16x56x64rows/1x1/1/2x1")) == "16x56x64rows/1x1/1/2x1"
    assert (tile.in_rows, tile.swapped, tile.multiplied_n, tile.group_n) == (True, True, 192, 64)
    assert not RoleTile.parse("88x192x64/1x3/3").in_rows
    with pytest.raises(IllegalTile, match="malformed"):
        RoleTile.parse("88x152x64rows/1x3")


def test_shared_memory_has_room_for_the_columns_that_there_are() -> None:
    """And for results of those that are multiplied, which leave in whole boxes, or as sums in rows of so many."""
    rows, boxes = RoleTile.parse("16x152x64rows/1x3/1"), RoleTile.parse("16x192x64/1x3/1")
    assert boxes.smem_bytes(2, 3) - rows.smem_bytes(2, 3) == 3 * (192 - 152) * 128
    assert rows.result_bytes == boxes.result_bytes
    parts = RoleTile.parse("16x152x64rows/1x3/3")
    assert (parts.sum_pitch, parts.results_in_ring(2, 3)) == (192 + 4, True)
    assert most_stages(RoleTile.parse("88x152x64rows/1x3/3"), 8) > most_stages(RoleTile.parse("88x192x64/1x3/3"), 8)


@pytest.mark.parametrize(
    ("tile", "clause"),
    [
        ("16x60x64rows/1x1/1", "60 columns, no multiple of 8"),
        ("16x56x128rows/1x1/1", "128 k steps of whole rows, which have 64"),
        ("16x56x64rows/1x1/1/1x2", "2 blocks beside each other, limit 1"),
        ("16x264x64rows/1x2/1", "264 columns of the block, limit 256"),
        ("200x184x64rows/1x3/1", "156 registers a consumer, limit 152"),
        ("168x248x64rows/1x2/1", "240 registers a consumer, limit 232"),
        ("16x56x64rows/1x1/9", "9 parts, limit 8"),
    ],
)
def test_every_limit_of_such_a_tile_is_named(tile: str, clause: str) -> None:
    assert clause in "; ".join(RoleTile.parse(tile).misfits())


@pytest.mark.parametrize(("n", "layout"), [(64, "nn"), (48, "nn"), (56, "nt")])
def test_other_rows_are_refused(n: int, layout: str) -> None:
    with pytest.raises(IllegalTile, match=rf"whole rows of a B stored \[k, n\].*of {n} columns, layout {layout}"):
        swapped(Matmul(16, n, 264, "float16", layout), RoleTile.parse("16x56x64rows/1x1/1"), 3)


@pytest.mark.compiler
@pytest.mark.parametrize(
    "tile", ["24x200x64rows/1x2/1", "24x240x64rows/1x2/1", "24x216x64rows/1x2/3", "8x8x64rows/1x1/1"]
)
def test_few_rows_have_registers_for_both_halves(tile: str, compiler: Compiler, tmp_path: Path) -> None:
    """Else ptxas has each instruction wait for the one before, and says so."""
    parsed = RoleTile.parse(tile)
    assert parsed.registers >= parsed.consumer_registers
    generated = overlapped((2646, parsed.block_n, 520), tile)
    log = run_nvcc(compiler, generated.cuda, tmp_path, "kernel.cubin", "-cubin", *arch_flags("sm_90a"))
    assert "serialized" not in log
    assert ptxas_facts(log)["spill_bytes"] == 0


# The code


def test_a_k_tile_is_one_load_of_lines() -> None:
    """No box is in front of another; columns come to registers by ldmatrix, eight rows from other banks each."""
    generated = overlapped((40, 152, 264), "16x152x64rows/1x3/1")
    loads = [line for line in generated.cuda.splitlines() if "g2s" in line and "(&(b_map))" in line]
    assert len(loads) == 1
    (b_map,) = (each for each in launch_plan(generated).parameters if each.buffer == "B")
    assert (b_map.sizes, b_map.strides, b_map.box, b_map.swizzle) == ((64, 264 * 152 // 64), (128,), (64, 152), 0)
    assert (
        generated.cuda.count("ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(") == 1 + 4
    )  # defined, and for 16 k each


@pytest.mark.parametrize("columns", range(8, 257, 16))
def test_eight_rows_lie_in_eight_parts_of_the_banks(columns: int) -> None:
    rows = WholeRows(columns, 64)
    places = [int(rows.lane_offset(lane, 0)) for lane in range(8)]
    assert len({place // 16 % 8 for place in places}) == 8


@pytest.mark.parametrize(("columns", "first"), [(152, 16), (152, 144), (56, 48), (200, 0)])
def test_lanes_address_rows_of_the_tile_alone(columns: int, first: int) -> None:
    """Where 16 columns are not there, lanes read others: their results are nobody's."""
    rows = WholeRows(columns, 64)
    for lane in range(32):
        square, row = divmod(lane, 8)
        k, column = row + square // 2 * 8, first + square % 2 * 8
        got, inside = divmod(int(rows.lane_offset(lane, first)), columns * 2)
        assert got == k
        assert inside == min(column, columns - 8) * 2
        assert inside <= columns * 2 - 16


def test_only_matrices_that_lie_as_the_kernel_was_made_for_are_lines() -> None:
    (b_map,) = (
        each for each in launch_plan(overlapped((40, 56, 264), "16x56x64rows/1x1/1")).parameters if each.buffer == "B"
    )
    assert b_map.in_lines
    assert b_map.of(MatrixRows(264, 56, 112)) == b_map
    for other in (
        MatrixRows(264, 56, 128),
        MatrixRows(256, 56, 112),
        MatrixRows(264, 48, 112),
        MatrixRows(264, 56, 112, 2, 264 * 112),
    ):
        with pytest.raises(UnsupportedLaunch, match=r"reads B as lines.*limit 14784 elements side by side"):
            b_map.of(other)
    (a_map,) = (
        each for each in launch_plan(overlapped((40, 56, 264), "16x56x64rows/1x1/1")).parameters if each.buffer == "A"
    )
    assert not a_map.in_lines


# In the emulator


@pytest.mark.sampled(3)
@pytest.mark.emulator
@pytest.mark.parametrize(
    ("shape", "tile", "given"),
    [
        ((9, 8, 8), "16x8x64rows/1x1/1", {}),  # fewer k steps than a tile has
        ((40, 56, 264), "16x56x64rows/1x1/1", {"dtype": "bfloat16"}),
        ((21, 152, 200), "24x152x64rows/1x3/1", {}),
        ((37, 104, 328), "16x104x64rows/1x1/1", {}),  # two row tiles, the last 40 columns of which exist
        ((19, 216, 136), "8x216x64rows/1x2/1", {"out_dtype": "float32"}),
        ((40, 256, 72), "24x256x64rows/1x2/1", {}),  # whole lines
        ((70, 88, 520), "72x88x64rows/1x2/3", {}),
        ((13, 120, 1160), "16x120x64rows/1x2/5", {"out_dtype": "float32"}),
        ((60, 24, 520), "32x24x64rows/1x1/8", {"dtype": "bfloat16"}),
        ((100, 152, 264), "24x152x64rows/1x3/1/2x1", {}),
        ((70, 200, 136), "8x200x64rows/1x2/1/4x1", {"stages": 6}),
        ((9, 40, 264), "16x40x64rows/1x1/2", {"variant": "bounded"}),
        ((20, 56, 136), "16x56x64rows/2x1/1", {}),  # warpgroups beside each other along rows
        ((30, 24, 136), "24x24x64rows/3x1/1", {"out_dtype": "float32"}),
    ],
    ids=str,
)
def test_whole_rows_are_right(shape: tuple[int, int, int], tile: str, given: dict[str, Any]) -> None:
    assert verify(roles(12, shape, tile, **{"stages": 3} | given), EmulatorBackend()).passed


@pytest.mark.emulator
@pytest.mark.parametrize(("boxes", "rows"), [("16x64x64/1x1/1", "16x56x64rows/1x1/1"), ("8x64x64/1x1/3",) * 2])
def test_how_rows_are_loaded_changes_no_bit_of_the_results(boxes: str, rows: str) -> None:
    """Each sum adds the same products in the same order."""
    rows = rows.replace("64x64/", "56x64rows/")
    given = {"layout": "nn", "stages": 3, "out_dtype": "float32"}
    draw = np.random.default_rng(0)
    a, b = (draw.standard_normal(sizes).astype(np.float16) for sizes in ((37, 520), (520, 56)))
    results = []
    for tile, seed in ((boxes, 0), (rows, 1), (rows, 2)):
        got = np.full((37, 56), np.nan, np.float32)
        EmulatorBackend(seed=seed).load(roles(12, (37, 56, 520), tile, **given))(a, b, got)
        results.append(got)
    assert not np.isnan(results[0]).any()
    assert all((got == results[0]).all() for got in results)


LOADED = "tvm_builtin_ptx_ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16("
RETIRED = "tvm_builtin_ptx_wgmma_wait_group_wait_group_sync_aligned_1();"


def where_loaded(what: str, put: str, text: str) -> str:
    """Replace something where rows go to registers."""
    lines = [line.replace(what, put) if LOADED in line else line for line in text.split("\n")]
    return "\n".join(lines)


FENCE = "tvm_builtin_ptx_wgmma_fence_fence_sync_aligned();"
BROKEN: dict[str, tuple[Callable[[str], str], str]] = {
    "a stage is said to be empty before all lanes have read it": (
        lambda text: text.replace("tvm_builtin_cuda_warp_sync();", ";", 1),
        "race",
    ),
    "registers are overwritten that an instruction reads": (
        lambda text: text.replace(RETIRED, ";"),
        "register in flight: a register that wgmma still reads is written",
    ),
    "registers are read before they are the instruction's": (
        lambda text: ";".join(text.rsplit(FENCE, 1)),
        "missing wgmma.fence",
    ),
    "the second eight rows are the first": (
        lambda text: where_loaded("& 31) >> 4)", "& 31) >> 5)", text),
        "Mismatched",
    ),
    "columns are the neighbours'": (lambda text: where_loaded("& 15) >> 3)", "& 15) >> 4)", text), "Mismatched"),
    "lines of the k tile before": (lambda text: re.sub(r"\(k_tile \* 56\)", "(k_tile * 48)", text), "Mismatched"),
}


@pytest.mark.sampled(2)
@pytest.mark.emulator
@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_caught(name: str) -> None:
    change, fault = BROKEN[name]
    shape = (40, 56, 520)
    found = overlapped(shape, "16x56x64rows/1x1/1")
    assert LOADED in found.cuda
    hold_caught(found, change, Matmul(*shape, "float16"), fault, right=5, orders=40)


@pytest.mark.gpu
@pytest.mark.parametrize("out_dtype", ["float16", "float32"])
@pytest.mark.parametrize(
    ("rows", "columns", "groups"), [(8, 8, 1), (72, 56, 1), (256, 40, 1), (40, 120, 2), (104, 152, 3), (160, 248, 2)]
)
@pytest.mark.parametrize("fields", ["1", "3", "8", "1/2x1", "1/4x1"])
def test_whole_rows_are_right_on_the_gpu(
    fields: str, rows: int, columns: int, groups: int, out_dtype: str, compiler: Compiler
) -> None:
    tile = f"{rows}x{columns}x64rows/1x{groups}/{fields}"
    stages = most_stages(RoleTile.parse(tile), 8)
    for shape in ((1001, columns, 2056), (rows - 3, columns, 584)):
        case = roles_case(12, shape, tile, out_dtype=out_dtype, stages=stages)
        assert verify(compiled(lower(case), compiler), GpuBackend(), seeds=(0, 1)).passed
