"""Explicit kernels: their building blocks one by one, the generated CUDA, and right outputs on the GPU.

The models here are written from the ISA's tables alone, in Python integers, and share nothing with the kernels.
"""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import tvm
from tvm.script import tirx as T

from support.cases import ROOT, STEPS, make_case
from support.kernels_by_hand import HOPPER, elements, read_by_wgmma, run_waiting_kernel, waiting_kernel
from tensorir_ladder.harness.build import Kernel, Lowered, compile_module, compiled, lower, lower_schedule
from tensorir_ladder.harness.execution import GpuBackend
from tensorir_ladder.harness.machines import machine_for
from tensorir_ladder.harness.verify import verify
from tensorir_ladder.kernels import tma
from tensorir_ladder.kernels.codegen.toolchain import Compiler, Cubin
from tensorir_ladder.kernels.epilogue import can_store_by_tma
from tensorir_ladder.kernels.panels import TmaPanels
from tensorir_ladder.kernels.raster import grouped
from tensorir_ladder.kernels.tiles import HopperTile, RoleTile
from tensorir_ladder.kernels.tma_ring import tma_ring
from tensorir_ladder.kernels.wgmma import WarpgroupProduct
from tensorir_ladder.schedules.errors import IllegalPipeline, IllegalTile, IllegalWorkload
from tensorir_ladder.schedules.isa import wgmma_element
from tensorir_ladder.schedules.workloads import Matmul

TILES = ("64x64x64/1x1", "128x128x64/2x1", "128x256x64/2x1", "128x256x64/1x2", "256x128x64/2x1", "128x128x128/1x2")


KERNELS = [name for name in STEPS[11].variant_names if STEPS[11].is_explicit(name)]


@functools.cache
def ring(shape: tuple[int, int, int], tile: str = "64x64x64/1x1", variant: str = "tma_store", **given: Any) -> Kernel:
    """Step 11, lowered."""
    return lower(make_case(11, shape, variant, tile=HopperTile.parse(tile), **given))


def value(expression: Any) -> int:
    """An expression of constants as a number."""
    return int(tvm.sym.Analyzer().simplify(expression)) if isinstance(expression, tvm.ir.Expr) else expression


# The folder


@pytest.mark.parametrize(
    ("folder", "rooms"), [("", {"kernels", "schedules"}), ("codegen", {"kernels.codegen", "schedules"})]
)
def test_kernels_import_nothing_from_above(folder: str, rooms: set[str]) -> None:
    for path in (ROOT / "kernels" / folder).glob("*.py"):
        imported = re.findall(r"^\s*from tensorir_ladder\.([\w.]+)", path.read_text(encoding="utf-8"), re.M)
        assert all(any(f"{name}.".startswith(f"{room}.") for room in rooms) for name in imported), path.name


# Tiles


def test_a_tile_says_how_its_warpgroups_share_it() -> None:
    tile = HopperTile.parse("128x256x64/2x1")
    assert (tile.group_m, tile.group_n, tile.threads, tile.registers) == (64, 256, (2, 128), 168)
    assert str(tile) == "128x256x64/2x1"
    assert tile.smem_bytes(2, 4) == 4 * (128 + 256) * 64 * 2 + 4 * 8
    assert tile.smem_bytes(2, 1) == 128 * 256 * 2 + 8  # results need more than one stage has


@pytest.mark.parametrize(
    ("tile", "stages", "itemsize", "clauses"),
    [
        ("96x256x64/2x1", 1, 2, ["48 rows per warpgroup are not a multiple of 64"]),
        ("128x20x64/2x1", 1, 2, ["20 columns per warpgroup are not a multiple of 8"]),
        (
            "64x512x64/1x1",
            1,
            2,
            ["512 columns per warpgroup are not a multiple of 8 up to 256", "512 columns of the block, limit 256 of"],
        ),
        ("128x128x32/2x1", 1, 2, ["32 steps of the k tile are not a multiple of 64"]),
        ("128x256x64/1x1", 1, 2, ["about 296 registers per thread, limit 255"]),
        ("128x256x64/2x1", 5, 2, ["245800 bytes of shared memory in 5 stage(s), limit 232448"]),
        ("128x256x64/2x1", 2, 4, ["elements of 4 bytes, where this wgmma multiplies 16-bit ones"]),
        ("130x256x64/4x1", 1, 2, ["130 rows of the block are not a multiple of 4", "32 rows per warpgroup"]),
        ("64x64x320/1x1", 1, 2, ["320 k steps of the block, limit 256 of a TMA box"]),
    ],
)
def test_every_limit_of_a_tile_is_named(tile: str, stages: int, itemsize: int, clauses: list[str]) -> None:
    with pytest.raises(IllegalTile) as caught:
        HopperTile.parse(tile).validate(HOPPER.target(), itemsize, stages)
    for clause in clauses:
        assert clause in str(caught.value)


def test_tiles_are_for_hopper_alone() -> None:
    for arch in ("sm_80", "sm_90", "sm_100a"):
        assert HopperTile.missing(machine_for(arch).target()) == f"{arch} has no wgmma fed by TMA, which is sm_90a's"
    assert HopperTile.missing(HOPPER.target()) == ""


# Operands in shared memory


@pytest.mark.parametrize("major", ["k", "n"])
@pytest.mark.parametrize(("extent", "depth"), [(64, 64), (128, 64), (256, 64), (128, 128), (192, 192)])
def test_wgmma_reads_what_tma_has_put_there(extent: int, depth: int, major: str) -> None:
    panels = TmaPanels(extent, depth, major)
    assert panels.bytes == extent * depth * 2
    put = elements(panels)
    assert sorted(put.values()) == list(range(0, panels.bytes, 2))
    for first in range(0, extent, 64):
        for step in range(depth // 16):
            start = panels.extent_offset(first) + panels.step_offset(step)
            for (row, inside), place in read_by_wgmma(panels, start, 64).items():
                assert place == put[first + row, step * 16 + inside]


def test_boxes_are_where_their_panels_are() -> None:
    assert TmaPanels(128, 128, "k").coordinates(1, 256, 512) == (576, 256)
    assert TmaPanels(128, 64, "n").coordinates(1, 256, 512) == (320, 512)


def test_the_fragments_of_a_warpgroup_cover_its_tile_once() -> None:
    places = {wgmma_element(warp, lane, i) for warp in range(4) for lane in range(32) for i in range(64)}
    assert places == {(row, column) for row in range(64) for column in range(128)}
    assert [wgmma_element(0, 0, i) for i in range(5)] == [(0, 0), (0, 1), (8, 0), (8, 1), (0, 8)]
    assert wgmma_element(3, 31, 127) == (63, 255)


@pytest.mark.parametrize(
    ("dtype", "layout", "tile", "clause"),
    [
        ("float32", "nn", "64x64x64/1x1", "operands of float32, where it takes float16 or bfloat16"),
        ("float16", "nn", "64x96x64/1x1", "96 columns per warpgroup of a B stored [k, n] are not a multiple of 64"),
    ],
)
def test_what_wgmma_has_no_form_for_is_refused(dtype: str, layout: str, tile: str, clause: str) -> None:
    with pytest.raises(IllegalTile, match=re.escape(clause)):
        WarpgroupProduct.of(Matmul(64, 96, 64, dtype, layout), HopperTile.parse(tile))


@pytest.mark.parametrize("layout", ["nn", "nt"])
@pytest.mark.parametrize("tile", ["64x72x64/1x1", "64x40x64/1x1", "128x144x64/1x2"])
def test_a_ring_without_roles_refuses_parts_of_panels(tile: str, layout: str) -> None:
    """It would load whole ones, more bytes than its barriers count; such a tile is made for kernels with roles."""
    with pytest.raises(IllegalTile, match="whole panels") as caught:
        tma_ring(Matmul(128, 288, 256, "float16", layout), RoleTile.parse(tile), 3)
    assert tile in str(caught.value)


# The order of blocks


@pytest.mark.parametrize(("rows", "columns", "group"), [(4, 4, 2), (5, 3, 2), (1, 7, 8), (9, 2, 8), (3, 3, 1)])
def test_grouped_blocks_take_every_tile_once(rows: int, columns: int, group: int) -> None:
    order = [tuple(map(value, grouped(block, rows, columns, group))) for block in range(rows * columns)]
    assert sorted(order) == [(row, column) for row in range(rows) for column in range(columns)]
    height = min(group, rows)
    assert order[: height + 1][:height] == [(row, 0) for row in range(height)]


# Rings


def test_a_wait_is_bounded_only_on_request() -> None:
    plain, bounded = (lower_schedule(waiting_kernel(wanted), HOPPER, "ring").cuda for wanted in (False, True))
    assert "__trap" not in plain
    assert "globaltimer" not in plain
    assert "printf" not in plain
    assert re.search(r'\bmbarrier_wait_bounded\(.*phase_ptr\[0\], "tester", \w*slot_ptr\[0\], 2\);', bounded)
    assert "block %d: thread %d as %s waited %d s for barrier %d, phase %d" in bounded
    assert "__trap();" in bounded


@pytest.mark.gpu
def test_a_bounded_wait_names_who_waits_and_traps() -> None:
    text = "from support.kernels_by_hand import run_waiting_kernel as run; run(bounded=True, arrives=False)"
    # In a process of its own: a trap leaves its process without a GPU.
    result = subprocess.run(
        [sys.executable, "-c", text], cwd=ROOT / "tests", capture_output=True, text=True, timeout=120
    )
    assert result.returncode != 0
    assert "block 0: thread 0 as tester waited 2 s for barrier 0, phase 0" in result.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("bounded", [False, True])
def test_a_ring_state_flips_its_phase_on_wrap_around(bounded: bool) -> None:
    assert run_waiting_kernel(bounded) == 2  # eight steps in three stages: stage 2, phase 0: wrapped around twice


# Launches


def test_a_cluster_does_not_multiply_the_blocks() -> None:
    @T.prim_func
    def main(A_ptr: T.handle):
        A = T.match_buffer(A_ptr, (64,), "int32")
        T.device_entry()
        block = T.cta_id([12])
        rank = T.cta_id_in_cluster([2])
        thread = T.thread_id([32])
        if thread == 0:
            A[block] = rank

    kernel = lower_schedule(main, HOPPER, "cluster")
    assert (kernel.blocks, kernel.threads, kernel.launch["clusterCtaIdx.x"]) == (12, 32, 2)
    assert kernel.smem_bytes == 0
    with pytest.raises(TypeError, match="cluster is an explicit kernel and has no schedule"):
        _ = kernel.schedule


# Step 11


def counts(kernel: Lowered) -> dict[str, int]:
    """Calls in the kernel's text, less those that TVM writes to describe them."""
    patterns = {
        "expect": r"expect_tx_shared_b64\(",
        "init": r"mbarrier_init\w*\(",
        "load": r"bulk_tensor_g2s\w*\(",
        "store": r"bulk_tensor_s2g\w*\(",
        "wgmma": r"mma_async\w*\(",
        "wait": r"\bmbarrier_wait\w*\(",
        "stmatrix": r"stmatrix\w*\(",
    }
    return {name: len(re.findall(pattern, kernel.body)) for name, pattern in patterns.items()}


@pytest.mark.parametrize(("stages", "layout"), [(1, "nn"), (2, "nt"), (3, "nn"), (4, "nt"), (5, "nn"), (6, "nt")])
def test_a_turn_of_the_ring_is_written_out(stages: int, layout: str) -> None:
    kernel = ring((128, 128, 64 * 4 * stages), stages=stages, layout=layout)
    ahead = max(stages - 1, 1)
    found = counts(kernel)
    assert found["init"] == found["wait"] == stages
    assert found["expect"] == stages + ahead
    assert found["load"] == 2 * (stages + ahead)
    assert found["wgmma"] == 4 * stages
    assert (found["store"], found["stmatrix"]) == (1, 4)
    assert "for (int turn = 0; turn < 4; ++turn)" in kernel.body
    assert kernel.body.count("phase_ptr[0] = (phase_ptr[0] ^ 1)") == 1
    assert kernel.code.barriers == 1
    assert kernel.code.shared_versions == stages
    assert kernel.instructions == {"TMA loads": 2, "TMA stores": 1, "wgmma": 4, "mbarrier waits": 1}
    assert kernel.smem_bytes == stages * (16384 + 8)


def test_one_stage_awaits_its_own_multiplication() -> None:
    waits = [
        re.findall(r"wgmma_wait_group_wait_group_sync_aligned_(\d)\(", ring((64, 64, 1024), stages=n).body)
        for n in (1, 2)
    ]
    assert waits[0] == ["0", "0"]
    assert waits[1] == ["1", "1", "0"]


def test_k_tiles_that_make_no_whole_turn_follow_it() -> None:
    kernel = ring((64, 64, 64 * 11), stages=4)
    assert counts(kernel)["wait"] == 4 + 3
    short = ring((64, 64, 104), stages=6)
    assert counts(short)["init"] == 2
    assert short.case.stages_built == 2


@pytest.mark.parametrize("tile", TILES)
def test_expected_bytes_are_those_of_the_boxes(tile: str) -> None:
    shape = HopperTile.parse(tile)
    kernel = ring((512, 512, 1024), tile, stages=2)
    (size,) = set(re.findall(r"expect_tx_shared_b64\(.*, \(uint\)(\d+)\);", kernel.body))
    assert int(size) == (shape.block_m + shape.block_n) * shape.block_k * 2
    assert (kernel.threads, kernel.blocks) == (shape.threads_per_block, 512 // shape.block_m * (512 // shape.block_n))
    assert kernel.smem_bytes == shape.smem_bytes(2, 2)


@pytest.mark.parametrize(
    ("shape", "layout", "out_dtype", "by_tma"),
    [
        ((100, 72, 200), "nn", "float16", True),
        ((100, 72, 200), "nn", "bfloat16", True),
        ((100, 72, 200), "nn", "float32", False),
        ((100, 71, 200), "nt", "float16", False),
    ],
)
def test_results_leave_by_tma_where_it_can_store_them(
    shape: tuple[int, int, int], layout: str, out_dtype: str, by_tma: bool
) -> None:
    kernel = ring(shape, layout=layout, out_dtype=out_dtype)
    assert can_store_by_tma(kernel.case.problem, kernel.case.tile) == by_tma
    assert (counts(kernel)["store"] > 0) == by_tma
    assert counts(ring(shape, variant="direct", layout=layout, out_dtype=out_dtype))["store"] == 0


@pytest.mark.parametrize(
    ("shape", "layout", "out_dtype", "store", "count"),
    [
        ((100, 72, 200), "nn", "float32", "st_vec_global_v2_f32(", 16),
        ((100, 72, 200), "nn", "float16", "st_global_b32(", 16),
        ((100, 71, 200), "nt", "bfloat16", "C_ptr[", 32),
        ((100, 71, 200), "nt", "float32", "C_ptr[", 32),
    ],
)
def test_other_results_leave_in_pairs_where_rows_keep_them_aligned(
    shape: tuple[int, int, int], layout: str, out_dtype: str, store: str, count: int
) -> None:
    body = ring(shape, variant="direct", layout=layout, out_dtype=out_dtype).body
    lines = [line for line in body.splitlines() if store in line]
    assert len(lines) == count


@pytest.mark.parametrize(
    ("shape", "layout", "operand", "size"),
    [((64, 64, 100), "nt", "A", 200), ((64, 60, 64), "nn", "B", 120), ((64, 64, 1), "nn", "A", 2)],
)
def test_rows_that_tma_cannot_step_over_are_refused(
    shape: tuple[int, int, int], layout: str, operand: str, size: int
) -> None:
    with pytest.raises(IllegalWorkload) as caught:
        ring(shape, layout=layout)
    assert f"TMA cannot read {operand}, whose rows have {size // 2} elements of float16" in str(caught.value)
    assert (caught.value.value, caught.value.limit) == (f"{size} bytes", "a multiple of 16 bytes")
    assert caught.value.remedy == "take step 10, which copies such rows to aligned ones first"


@pytest.mark.parametrize("stages", [0, 7])
def test_a_ring_of_no_or_too_many_stages_is_refused(stages: int) -> None:
    with pytest.raises(IllegalPipeline, match="stages of a TMA ring"):
        tma_ring(Matmul(64, 64, 64, "float16"), HopperTile.parse("64x64x64/1x1"), stages)


def test_the_text_that_runs_is_the_text_that_was_compiled() -> None:
    kernel = ring((300, 264, 200), "128x128x64/2x1")
    assert (kernel.tir_pipeline, kernel.pass_config, kernel.ptxas_options) == ("tirx", {}, ())
    program = compile_module(kernel.mod, kernel.machine, lambda _: b"", kernel.pass_config, kernel.tir_pipeline)
    assert program.mod.imports[0].inspect_source() == kernel.cuda


def test_swizzled_pieces_are_a_permutation_of_each_row() -> None:
    for row in range(16):
        places = [tma.swizzled(row, column) for column in range(0, 64, 8)]
        assert sorted(places) == [row * 128 + piece * 16 for piece in range(8)]


@pytest.mark.sampled(4)
@pytest.mark.compiler
@pytest.mark.parametrize("tile", [*map(str, STEPS[11].tiles_of("tma_store").tuning)])
def test_every_declared_tile_compiles_without_spills(tile: str, compiler: Compiler) -> None:
    stages = 4 if not HopperTile.parse(tile).violations(HOPPER.target(), 2, 4) else 3
    cubin = compiled(ring((4096, 4096, 4096), tile, stages=stages), compiler).cubin
    assert cubin.spill_bytes == 0
    assert cubin.smem_bytes == 0  # static shared memory would move the ring off its 1024-byte boundary


@pytest.mark.compiler
@pytest.mark.parametrize("variant", KERNELS)
def test_the_machine_code_has_the_instructions(variant: str, compiler: Compiler, sass: Callable[[Cubin], str]) -> None:
    code = sass(compiled(ring((256, 256, 1024), "128x128x64/2x1", variant, stages=4), compiler).cubin)
    assert len(re.findall(r"\bHGMMA\.64x128x16", code)) == 16
    assert "UTMALDG.2D" in code
    assert ("UTMASTG" in code) == (variant != "direct")
    assert ("BPT.TRAP" in code) == (variant == "bounded")


# On the GPU


def check(compiler: Compiler, *arguments: Any, **given: Any) -> None:
    """Compile step 11 and compare with the float64 product."""
    assert verify(compiled(ring(*arguments, **given), compiler), GpuBackend(), seeds=(0,)).passed


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("layout", ["nn", "nt"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_tile_layout_and_dtype_is_right(dtype: str, layout: str, tile: str, compiler: Compiler) -> None:
    check(compiler, (512, 512, 1024), tile, dtype=dtype, layout=layout, stages=3)
    check(compiler, (300, 328, 200), tile, dtype=dtype, layout=layout, stages=3)


@pytest.mark.gpu
@pytest.mark.parametrize("stages", range(1, 7))
@pytest.mark.parametrize("k", [8, 64, 72, 136, 320, 1000])
def test_every_depth_is_right_for_every_reduction(k: int, stages: int, compiler: Compiler) -> None:
    check(compiler, (200, 136, k), stages=stages)


@pytest.mark.gpu
@pytest.mark.parametrize("out_dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("variant", KERNELS)
@pytest.mark.parametrize(
    ("shape", "layout"), [((1, 8, 8), "nn"), ((1, 1, 8), "nt"), ((129, 131, 72), "nt"), ((300, 264, 200), "nn")]
)
def test_results_of_any_shape_and_dtype_are_right(
    shape: tuple[int, int, int], layout: str, variant: str, out_dtype: str, compiler: Compiler
) -> None:
    check(compiler, shape, "128x128x64/2x1", variant, layout=layout, out_dtype=out_dtype)
