"""Batches of products: in every kernel of the call as many products, and nothing of one in another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm

from support.cases import hopper
from support.emulated_kernels import TARGET, emulate
from support.exact_products import NUMPY
from tensorir_ladder.kernels.codegen.host_code import launch_plan
from tensorir_ladder.kernels.codegen.lowering import generate
from tensorir_ladder.kernels.fused_epilogue import Epilogue
from tensorir_ladder.kernels.kernel_form import KernelForm
from tensorir_ladder.kernels.persistent import persistent
from tensorir_ladder.kernels.shifting import room_for, shifting
from tensorir_ladder.kernels.stream_k import plan_for
from tensorir_ladder.kernels.swapped import swapped
from tensorir_ladder.kernels.tiles import ClusterTile, HopperTile, RoleTile
from tensorir_ladder.kernels.unaligned import unaligned
from tensorir_ladder.kernels.warp_specialized import warp_specialized
from tensorir_ladder.schedules.errors import IllegalWorkload
from tensorir_ladder.schedules.workloads import Matmul

BIASED = Epilogue(bias="float16")


def one_tile(tile: str, columns: int = 0, overlapped: bool = True) -> Callable[..., Any]:
    """Step 12's kernel, or the one with exchanged operands."""
    parsed = RoleTile.parse(tile)
    make = swapped if parsed.swapped else warp_specialized
    form = KernelForm(BIASED, columns, overlapped=overlapped)
    return lambda problem, **batch: make(problem, parsed, 3, form, **batch)


def stays(tile: str, multiprocessors: int, columns: int = 0, blocks: int = 1, cuts: bool = False) -> Callable[..., Any]:
    """Step 13's kernel."""
    form = KernelForm(BIASED, columns, overlapped=True)
    how = {"machine": hopper(multiprocessors), "blocks": blocks, "stream_k": cuts}
    return lambda problem, **batch: persistent(problem, RoleTile.parse(tile), 3, form, **how, **batch)


def as_they_lie(tile: str) -> Callable[..., Any]:
    """The kernel of rows that begin anywhere."""
    return lambda problem, **batch: unaligned(problem, HopperTile.parse(tile), overlapped=True, finish=BIASED, **batch)


def shifted(tile: str, shifts: str) -> Callable[..., Any]:
    """The kernel whose blocks shift rows."""
    parsed = ClusterTile.parse(tile)

    def make(problem: Matmul, **batch: Any) -> Any:
        room = room_for(problem, parsed, shifts)
        return shifting(problem, parsed, shifts, *room, overlapped=True, finish=BIASED, **batch)

    return make


# Kernel, products, their sizes and layout, columns of the output, its dtype, and operands that are one matrix for all.
CASES: dict[str, tuple[Callable[..., Any], tuple[int, int, int, int], str, int, str, str]] = {
    "one tile": (one_tile("64x128x64/1x1"), (3, 70, 136, 72), "nn", 136, "float16", ""),
    "not early": (one_tile("64x128x64/1x1", overlapped=False), (2, 130, 72, 200), "nt", 72, "float16", ""),
    "a last panel of B in part": (one_tile("64x72x64/1x1"), (2, 70, 152, 72), "nn", 152, "float16", ""),
    "a panel of B in part": (one_tile("64x40x64/1x1"), (2, 70, 88, 72), "nn", 88, "float16", "B"),
    "one A": (one_tile("64x64x64/1x1"), (3, 70, 104, 72), "nn", 104, "float16", "A"),
    "one B": (one_tile("64x64x64/1x1"), (3, 70, 104, 72), "nt", 104, "float16", "B"),
    "rows of any length": (one_tile("64x64x64/1x1"), (3, 70, 131, 72), "nt", 131, "float16", ""),
    "fewer columns": (one_tile("64x64x64/1x1", 131), (2, 70, 136, 72), "nn", 131, "float16", ""),
    "float32": (one_tile("64x64x64/1x1"), (2, 70, 136, 72), "nn", 136, "float32", ""),
    "parts": (one_tile("64x64x64/1x1/1x1/3"), (2, 70, 104, 264), "nn", 104, "float16", ""),
    "parts of clusters, rows of any length": (
        one_tile("64x64x64/1x1/2x1/2"),
        (2, 70, 101, 264),
        "nt",
        101,
        "float16",
        "",
    ),
    "clusters": (one_tile("64x64x64/1x1/2x2"), (3, 150, 104, 136), "nn", 104, "float16", "A"),
    "blocks that stay": (stays("64x64x64/1x1", 4), (3, 180, 136, 200), "nn", 136, "float16", ""),
    "blocks that stay, one A": (stays("64x104x64/1x1", 5), (3, 180, 136, 72), "nt", 136, "float16", "A"),
    "blocks that stay, rows of any length": (stays("64x104x64/1x1", 5), (3, 180, 131, 72), "nt", 131, "float16", "B"),
    "blocks that stay, fewer columns": (stays("64x64x64/1x1", 5, 133), (3, 180, 136, 72), "nn", 133, "float16", ""),
    "blocks that stay, float32": (stays("64x64x64/1x1", 5), (3, 180, 136, 72), "nn", 136, "float32", ""),
    "blocks that stay, cut": (stays("64x88x64/1x1", 5, cuts=True), (3, 150, 200, 1032), "nt", 200, "float16", ""),
    "blocks that stay, pairs": (stays("64x64x64/1x1", 6, blocks=2), (3, 250, 200, 264), "nt", 200, "float16", ""),
    "results that leave at once": (stays("192x176x64/3x1", 3), (2, 390, 360, 200), "nt", 360, "float16", ""),
    "exchanged": (one_tile("16x128x64/1x2/1"), (3, 13, 264, 520), "nt", 264, "float16", ""),
    "exchanged, parts": (one_tile("16x64x64/1x1/3"), (3, 13, 131, 520), "nt", 131, "float16", "A"),
    "exchanged, clusters": (one_tile("16x64x64/1x1/1/2x2"), (2, 40, 264, 264), "nn", 264, "float16", "B"),
    "exchanged, rows of any length": (one_tile("24x64x64/1x1/1"), (2, 21, 131, 264), "nt", 131, "float16", ""),
    "exchanged, side by side": (one_tile("24x192x64/1x3/1"), (2, 40, 331, 264), "nt", 331, "float16", ""),
    "exchanged, float32": (one_tile("24x64x64/1x1/1"), (2, 21, 136, 264), "nn", 136, "float32", ""),
    "as they lie": (as_they_lie("64x64x128/1x1"), (3, 70, 99, 117), "nn", 99, "float16", ""),
    "as they lie, one A": (as_they_lie("128x128x64/2x1"), (3, 70, 99, 61), "nt", 99, "float16", "A"),
    "rows of both shifted": (shifted("64x64x64/1x1/1x1", "AB"), (3, 70, 99, 197), "nn", 99, "float16", ""),
    "rows of B shifted, parts": (shifted("128x128x64/2x1/1x1/3", "B"), (2, 150, 131, 328), "nn", 131, "float16", "A"),
    "rows of B shifted, one A": (shifted("64x64x64/1x1/1x1", "B"), (3, 70, 99, 328), "nn", 99, "float16", "A"),
    "rows of A shifted": (shifted("192x64x64/3x1/1x1", "A"), (2, 250, 136, 261), "nn", 136, "float16", ""),
    "rows along k shifted": (shifted("64x64x64/1x1/1x1", "AB"), (2, 70, 136, 197), "nt", 136, "float16", "B"),
    "rows shifted, float32": (shifted("64x64x64/1x1/1x1", "AB"), (2, 70, 99, 197), "nt", 99, "float32", ""),
    "as they lie, float32": (as_they_lie("64x64x64/1x1"), (2, 70, 99, 61), "nn", 99, "float32", "B"),
}


@pytest.mark.sampled(3)
@pytest.mark.emulator
@pytest.mark.parametrize("name", CASES)
def test_a_batch_is_as_many_products(name: str) -> None:
    """Ragged edges: a tile's rows, columns and k steps beyond its product are not the next one's."""
    make, (batch, m, n, k), layout, columns, out_dtype, broadcast = CASES[name]
    problem, draw = Matmul(m, n, k, "float16", layout, out_dtype), np.random.default_rng(0)
    shapes = {"A": (m, k), "B": problem.b_shape}
    a, b = (
        draw.integers(-2, 3, shape if matrix in broadcast else (batch, *shape)).astype(np.float16)
        for matrix, shape in shapes.items()
    )
    got = np.full((batch, m, columns), np.nan, NUMPY[out_dtype])
    bias = draw.integers(-9, 9, columns).astype(np.float16)
    emulate(make(problem, batch=batch, broadcast=broadcast), {"A": a, "B": b, "C": got, "bias": bias})
    wide = b.astype(np.float64)
    wanted = a.astype(np.float64) @ (wide if layout == "nn" else wide.swapaxes(-1, -2))
    assert (got == wanted[..., :columns] + bias).all()


def test_the_last_wave_of_all_tiles_is_cut() -> None:
    problem, tile = Matmul(150, 200, 1032, "float16", "nt"), RoleTile.parse("64x88x64/1x1")
    one, three = (plan_for(problem, tile, hopper(5), batch=batch) for batch in (1, 3))
    assert (one.tiles, three.tiles) == (9, 27)
    assert three.helpers > 0


def test_places_beyond_31_bits_are_counted_in_64() -> None:
    problem, tile = Matmul(4096, 4099, 64, "float16", "nt"), RoleTile.parse("64x64x64/1x1")
    texts = [
        generate(
            tvm.IRModule({"main": warp_specialized(problem, tile, 2, KernelForm(overlapped=True), batch=batch)}),
            TARGET,
            "tirx",
        ).cuda
        for batch in (2, 200)
    ]
    assert ["(int64_t)held_matrix" in text for text in texts] == [False, True]


@pytest.mark.parametrize("form", [KernelForm(any_rows=True), KernelForm(Epilogue(residual=True))], ids=str)
def test_a_batch_has_a_fixed_number_of_rows_and_no_residual(form: KernelForm) -> None:
    problem, tile = Matmul(64, 64, 64, "float16"), RoleTile.parse("64x64x64/1x1")
    for make in (
        lambda: warp_specialized(problem, tile, 2, form, batch=2),
        lambda: persistent(problem, tile, 2, form, machine=hopper(2), batch=2),
    ):
        with pytest.raises(IllegalWorkload, match=r"a batch has .*got batch 2"):
            make()


def test_rings_hold_k_tiles_of_several_products() -> None:
    """Where a product has one k tile, the next one's is loaded meanwhile."""
    problem, tile = Matmul(128, 128, 64, "float16", "nt"), RoleTile.parse("64x64x64/1x1")
    form = KernelForm(overlapped=True)
    held = [
        launch_plan(
            generate(
                tvm.IRModule({"main": persistent(problem, tile, 6, form, machine=hopper(4), batch=batch)}),
                TARGET,
                "tirx",
            )
        ).shared_bytes
        for batch in (1, 8)
    ]
    stage_bytes = 2 * 64 * 64 * 2
    assert held[1] - held[0] > 3 * stage_bytes
