"""Step 12 with its operands exchanged, for few rows, and tiles of widths that are no whole panels."""

from __future__ import annotations

import operator
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tvm

from support.c_expressions import value_of
from support.cases import STEPS, hopper
from support.roles import HOPPER, roles, roles_case
from tensorir_ladder.emulator import EmulatedProgram, KernelFault
from tensorir_ladder.harness import build
from tensorir_ladder.harness.build import compiled, lower
from tensorir_ladder.harness.emulation import EmulatorBackend
from tensorir_ladder.harness.execution import GpuBackend, numpy_dtype
from tensorir_ladder.harness.verify import verify
from tensorir_ladder.kernels.codegen.host_code import launch_plan
from tensorir_ladder.kernels.codegen.launch_plan import MatrixRows, TensorMap
from tensorir_ladder.kernels.codegen.lowering import generate
from tensorir_ladder.kernels.codegen.toolchain import Compiler
from tensorir_ladder.kernels.fused_epilogue import Epilogue
from tensorir_ladder.kernels.kernel_form import KernelForm
from tensorir_ladder.kernels.panels import TmaPanels
from tensorir_ladder.kernels.persistent import persistent
from tensorir_ladder.kernels.swapped import fits_at_once, fits_beside, swapped
from tensorir_ladder.kernels.tiles import HopperTile, RoleTile, SwappedTile, most_stages
from tensorir_ladder.kernels.warp_specialized import warp_specialized
from tensorir_ladder.kernels.wgmma import WarpgroupProduct
from tensorir_ladder.schedules.errors import IllegalPipeline, IllegalTile, IllegalWorkload
from tensorir_ladder.schedules.loops.early_launch import FLAG
from tensorir_ladder.schedules.stamps import Stamps
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.steps.step import Config

# The tile


def test_a_third_field_exchanges_the_operands() -> None:
    tile = RoleTile.parse("16x128x64/1x2/4")
    assert tile == SwappedTile(block=(16, 128, 64), warpgroups=(1, 2), parts=4)
    assert (str(tile), tile.swapped, tile.turned) == ("16x128x64/1x2/4", True, RoleTile.parse("128x16x64/2x1"))
    assert not RoleTile.parse("128x128x64/2x1").swapped
    for family, text in ((HopperTile, "16x128x64/1x2/4"), (SwappedTile, "16x128x64/1x2"), (RoleTile, "16x64x64/1x1/")):
        with pytest.raises(IllegalTile, match="malformed tile"):
            family.parse(text)


def test_a_fourth_field_has_blocks_share_their_loads() -> None:
    tile = RoleTile.parse("72x64x64/1x1/1/2x4")
    assert tile == SwappedTile.parse(" 72x64x64/1x1/1/2x4\n") == SwappedTile((72, 64, 64), (1, 1), 1, (2, 4))
    assert (str(tile), tile.cluster_size) == ("72x64x64/1x1/1/2x4", 8)
    alone = RoleTile.parse("16x64x64/1x1/4/1x1")
    assert (str(alone), alone.cluster, alone.cluster_size) == ("16x64x64/1x1/4", (1, 1), 4)
    assert (tile.smem_bytes(2, 5), tile.resident(2, 5)) == (replace(tile, cluster=(1, 1)).smem_bytes(2, 5), 2)
    for text in ("16x64x64/1x1/1/2", "16x64x64/1x1/2x4", "16x64x64/1x1/1/2x", "16x64x64/1x1/1/2x4/1x1"):
        with pytest.raises(IllegalTile, match=re.escape(f"'{text}'")):
            SwappedTile.parse(text)
    with pytest.raises(IllegalTile, match="extent below 1"):
        RoleTile.parse("16x64x64/1x1/1/0x2")


@pytest.mark.parametrize(
    ("tile", "clause"),
    [
        ("20x64x64/1x1/1", "20 columns per warpgroup are not a multiple of 8"),
        ("264x64x64/1x1/1", "264 rows of the block, limit 256 of a TMA box"),
        ("16x96x64/1x1/1", "96 rows per warpgroup are not a multiple of 64"),
        ("16x64x32/1x1/1", "32 steps of the k tile are not a multiple of 64"),
        ("16x64x64/1x1/9", "9 parts, limit 8 blocks of a cluster"),
        ("16x64x64/1x1/1/3x3", "9 blocks that share their loads, limit 8 of a cluster"),
        ("16x64x64/1x1/5/1x2", "5 parts of 2 blocks that share their loads, limit 8 blocks of a cluster"),
        ("16x256x64/1x4/1", "4 consumer warpgroups, limit 3"),
        ("256x128x64/1x1/1", "registers per thread, limit 255"),
        ("24x128x64/2x1/1", "12 columns per warpgroup are not a multiple of 8"),
    ],
)
def test_every_limit_of_an_exchanged_tile_is_named(tile: str, clause: str) -> None:
    assert clause in "; ".join(RoleTile.parse(tile).violations(HOPPER.target(), 2, 3))


def test_shared_memory_and_registers_say_how_many_blocks_run_together() -> None:
    small, split, wide = (RoleTile.parse(text) for text in ("8x64x64/1x1/1", "64x64x64/1x1/4", "256x64x64/1x1/1"))
    assert small.smem_bytes(2, 3) == 3 * (8 + 64) * 128 + 8 * 64 * 2 + 3 * 2 * 8
    assert split.smem_bytes(2, 3) == 3 * (64 + 64) * 128 + 3 * 2 * 8  # sums lie in the ring
    assert split.smem_bytes(2, 1) == 64 * (64 + 4) * 4 + 2 * 8  # in float32, for which one stage has no room
    assert (small.resident(2, 3), split.resident(2, 3), wide.resident(2, 3)) == (4, 2, 1)


# What is refused


def test_kernels_that_exchange_nothing_refuse_such_tiles() -> None:
    problem, tile = Matmul(64, 64, 64, "float16"), RoleTile.parse("64x64x64/1x1/1")
    for make in (
        lambda: warp_specialized(problem, tile, 3),
        lambda: persistent(problem, tile, 3, machine=hopper()),
        lambda: STEPS[13].kernel(problem, Config("stream", tile, 3, hopper())),
    ):
        with pytest.raises(IllegalTile, match=r"does not exchange the operands.*64x64x64/1x1/1.*take step 12"):
            make()


def test_bad_input_is_refused() -> None:
    tile = SwappedTile.parse("16x64x64/1x1/3")
    with pytest.raises(IllegalTile, match=r"more parts than the reduction has k tiles.*3.*2.*fewer parts"):
        swapped(Matmul(16, 64, 128, "float16"), tile, 3)
    with pytest.raises(IllegalWorkload, match=r"more columns than the product .*got 65, limit 64"):
        swapped(Matmul(16, 64, 512, "float16"), SwappedTile.parse("16x64x64/1x1/1"), 3, KernelForm(columns=65))
    with pytest.raises(IllegalWorkload, match=r"no residual.*16x64x64/1x1/3"):
        swapped(Matmul(16, 64, 512, "float16"), tile, 3, KernelForm(finish=Epilogue(residual=True)))
    for stages, text, limit in ((1, tile, "2 to 8"), (9, tile, "2 to 8"), (17, "16x64x64/1x1/1/2x1", "2 to 16")):
        with pytest.raises(IllegalPipeline, match=limit):
            swapped(Matmul(16, 64, 512, "float16"), SwappedTile.parse(str(text)), stages)
    with pytest.raises(IllegalWorkload, match="4095 elements"):
        swapped(Matmul(16, 64, 4095, "float16"), tile, 3)
    with pytest.raises(IllegalTile, match="float32"):
        swapped(Matmul(16, 64, 512, "float32"), tile, 3)
    with pytest.raises(IllegalTile, match="20 columns per warpgroup"):
        swapped(Matmul(16, 64, 512, "float16"), SwappedTile.parse("20x64x64/1x1/1"), 3)


# The code


def test_weights_are_the_rows_of_the_instruction() -> None:
    for layout, transposed in (("nt", 0), ("nn", 1)):
        kernel = roles(12, (13, 264, 520), "16x64x64/1x1/1", layout=layout, stages=3)
        assert f"m64n16k16_f32_f16_f16_1_1_{transposed}_0(" in kernel.body
        assert "x4_trans_shared_b16(" in kernel.body
        assert "cluster" not in kernel.body.replace("shared__cluster", "").replace("g2s_cluster", "")
        assert (kernel.blocks, kernel.threads, kernel.smem_bytes) == (5, 256, kernel.case.tile.smem_bytes(2, 3))


def test_parts_are_the_blocks_of_a_cluster() -> None:
    kernel = roles(12, (13, 264, 520), "16x128x64/1x2/3", layout="nt", stages=3)
    assert (kernel.blocks, kernel.threads, kernel.launch["clusterCtaIdx.x"]) == (9, 384, 3)
    assert kernel.body.count("add_1_of_3_parts(") == 1  # of its own and the other two blocks
    assert not kernel.workspaces


CLUSTERS = [(1, 2), (2, 1), (2, 2), (1, 4), (4, 1), (2, 4), (4, 2)]  # blocks that share loads: down, across
MEMBER, LANE, K_TILE = "((int)tvm_builtin_cluster_ctaid_x())", "((int)threadIdx.x)", "k_tile"


def reckoned(text: str, **values: int) -> int:
    """The value of an expression of the CUDA text in a block of a cluster, a lane, and a k tile."""
    for name, value in ((MEMBER, "member"), (LANE, "lane"), ("(ushort)", ""), ("(uint)", "")):
        text = text.replace(name, value)
    return value_of(text, values)


def place_of(member: int, cluster: tuple[int, int]) -> tuple[int, int]:
    """A block's place in its cluster, down and across: those of the longer side have numbers in a row."""
    down, across = cluster
    return (member % down, member // down) if down >= across else divmod(member, across)


def loads(body: str, operand: str) -> tuple[str, str]:
    """Whose turn it is to load an operand, and the mask of the blocks that it arrives in, as they stand in the text."""
    lines = [line.strip() for line in body.split("\n") if " cse_v" not in line]
    at = next(at for at, line in enumerate(lines) if "g2s_cluster" in line and f"(&({operand}_map))" in line)
    turn = re.fullmatch(r"if \((.*)\) \{", lines[at - 1])
    mask = lines[at].rpartition(", ")[2].removesuffix(");") if "multicast" in lines[at] else f"1 << {MEMBER}"
    return turn.group(1) if turn else "1", mask


@pytest.mark.parametrize("cluster", CLUSTERS, ids=str)
def test_blocks_load_for_those_of_their_rows_and_columns(cluster: tuple[int, int]) -> None:
    """A share of each k tile where shares are whole eights of rows, in clusters one way; else whole k tiles in turn."""
    down, across = cluster
    divided = min(cluster) == 1 and 16 % (8 * across) == 0 and 128 % (8 * down) == 0
    tile, members = f"16x128x64/1x2/1/{down}x{across}", range(down * across)
    body = roles(12, (40, 264, 520), tile, layout="nt", stages=3).body
    for operand, together in (("a", 0), ("b", 1)):
        turn, mask = loads(body, operand)
        for member in members:
            same = [
                other for other in members if place_of(other, cluster)[together] == place_of(member, cluster)[together]
            ]
            assert reckoned(mask, member=member) == sum(1 << other for other in same)
            turns = [
                [other for other in same if reckoned(turn, member=other, k_tile=k_tile)] for k_tile in range(len(same))
            ]
            assert turns == [same if divided else [other] for other in same]


@pytest.mark.parametrize("cluster", CLUSTERS, ids=str)
def test_a_stage_is_empty_when_all_that_it_was_filled_for_have_read_it(cluster: tuple[int, int]) -> None:
    """Each consumer warp arrives once at each block of the same rows or columns, and as often as is expected there."""
    down, across = cluster
    body, members = roles(12, (40, 264, 520), f"16x128x64/1x2/1/{down}x{across}", stages=3).body, range(down * across)
    arrives = re.search(r"if \((.*)\) \{\n\s*mbarrier_arrive_at\(.*, \((\(.*\) & 31)\)\);", body)
    assert arrives is not None
    expected = re.findall(r"mbarrier_init\w*\(.*, \(uint\)(\d+)\);", body)
    warps = 2 * 4
    assert expected == ["1"] * 3 + [str(warps * (down + across - 1))] * 3
    for member in members:
        at = [lane for lane in range(32) if reckoned(arrives.group(1), member=member, lane=lane)]
        own = place_of(member, cluster)
        assert at == [other for other in members if any(map(operator.eq, place_of(other, cluster), own))]


@pytest.mark.parametrize("cluster", CLUSTERS, ids=str)
def test_a_cluster_is_launched_whole_and_ends_together(cluster: tuple[int, int]) -> None:
    down, across = cluster
    kernel = roles(12, (40, 264, 520), f"16x64x64/1x1/1/{down}x{across}", stages=3)
    tiles_down, tiles_across = 3, 5
    assert kernel.launch["clusterCtaIdx.x"] == down * across
    assert kernel.blocks == -(-tiles_down // down) * -(-tiles_across // across) * down * across
    assert kernel.body.count("cluster_sync();") == 2  # when barriers are there, and behind the last arrival
    assert kernel.body.rstrip().removesuffix("}").rstrip().endswith("cluster_sync();")
    assert kernel.smem_bytes == kernel.case.tile.smem_bytes(2, 3)


@pytest.mark.parametrize("tile", ["16x128x64/1x2/3", "16x128x64/1x2/1/2x2"])
def test_its_roles_leave_time_stamps(tile: str) -> None:
    kernel = lower(roles_case(12, (13, 264, 520), tile, layout="nt", stages=3), Stamps(0))
    assert kernel.body.count("stamp(") > 9
    assert "stamp(" not in roles(12, (13, 264, 520), tile, layout="nt", stages=3).body


def test_it_can_be_launched_early() -> None:
    for tile in ("16x64x64/1x1/2", "16x64x64/1x1/1/1x2"):
        made = swapped(Matmul(16, 64, 512, "float16"), SwappedTile.parse(tile), 3, KernelForm(overlapped=True))
        assert made.attrs["overlaps_launches"]
        assert "griddepcontrol" in str(made)
    assert FLAG not in str(roles(12, (16, 64, 512), "16x64x64/1x1/2").device)


# Widths


@pytest.mark.parametrize("columns", [64, 72, 80, 104, 128, 160, 200, 208, 256])
@pytest.mark.parametrize("rows", [64, 128])
def test_boxes_of_results_cover_any_width(rows: int, columns: int) -> None:
    product = WarpgroupProduct.of(Matmul(rows, 256, 64, "float16"), RoleTile((rows, columns, 64), (1, 1)))
    covered = set()
    for box in range(product.boxes):
        row_tile, first = product.box_place(box)
        assert 0 <= first <= columns - 64
        covered |= {(row_tile, column) for column in range(first, first + 64)}
    assert covered == {(row_tile, column) for row_tile in range(rows // 64) for column in range(columns)}


def test_the_last_panel_of_a_width_has_room_and_is_loaded_in_part() -> None:
    along_n, along_k = TmaPanels(208, 64, "n"), TmaPanels(208, 64, "k")
    assert (along_n.count, along_n.bytes, along_n.edge, along_n.loaded_bytes) == (4, 4 * 64 * 128, 16, 208 * 64 * 2)
    assert (along_k.count, along_k.bytes, along_k.edge, along_k.loaded_bytes) == (1, 208 * 128, 0, 208 * 128)
    tile = RoleTile.parse("128x208x64/2x1")
    assert tile.kept_bytes(2, 4) == RoleTile.parse("128x256x64/2x1").kept_bytes(2, 4)
    assert tile.smem_bytes(2, 4) == tile.kept_bytes(2, 4) - 4 * 48 * 64 * 2  # of a B stored [n, k]
    with pytest.raises(IllegalTile, match="104 columns per warpgroup of a B stored"):
        WarpgroupProduct.of(Matmul(128, 208, 64, "float16"), RoleTile.parse("128x208x64/1x2"))


@pytest.mark.parametrize(
    ("tile", "layout", "boxes", "size", "results", "collected"),
    [
        ("64x80x64/1x1", "nn", 1 + 2, (64 + 80) * 128, 2, 8),
        ("64x80x64/1x1", "nt", 1 + 1, (64 + 80) * 128, 2, 8),
        ("64x40x64/1x1", "nn", 1 + 1, (64 + 40) * 128, 1, 3),
        ("64x8x64/1x1", "nt", 1 + 1, (64 + 8) * 128, 1, 1),
    ],
)
def test_a_b_of_any_width_is_loaded_as_wide_as_the_tile(
    tile: str, layout: str, boxes: int, size: int, results: int, collected: int
) -> None:
    kernel = roles(12, (64, 160, 512), tile, layout=layout, stages=3)
    assert kernel.body.count("cp_async_bulk_tensor_g2s") == boxes
    assert re.findall(r"expect_tx_shared_b64\(.*, \(uint\)(\d+)\);", kernel.body) == [str(size)]
    assert kernel.body.count("cp_async_bulk_tensor_s2g") == results
    assert kernel.body.count("stmatrix") == collected


# When the next launch begins


@pytest.mark.parametrize(("columns", "parts", "at_once"), [(4096, 2, True), (6144, 1, True), (6144, 2, False)])
def test_blocks_begin_early_where_each_has_a_multiprocessor(columns: int, parts: int, at_once: bool) -> None:
    tile = SwappedTile((16, 64, 64), (1, 1), parts)
    assert fits_at_once(Matmul(16, columns, 4096, "float16", "nt"), tile, hopper()) == at_once


def test_clusters_find_no_place_on_every_multiprocessor() -> None:
    """26 clusters of 5 took two waves on an H200's 132 multiprocessors, and 66 of 2 one."""
    tiles = {parts: SwappedTile((64, 64, 64), (1, 1), parts) for parts in (2, 5)}
    problems = {parts: Matmul(64, 64 * clusters, 4096, "float16") for parts, clusters in ((2, 66), (5, 26))}
    assert [fits_at_once(problems[parts], tiles[parts], hopper()) for parts in (2, 5)] == [True, False]
    assert fits_at_once(Matmul(64, 64 * 20, 4096, "float16"), tiles[5], hopper())


def test_blocks_beyond_the_output_take_places_too() -> None:
    """120 tiles have room for each to be alone, and so have 112 in clusters of 8; 113 make a cluster more."""
    alone = SwappedTile((64, 64, 64), (1, 1), 1)
    shared = replace(alone, cluster=(1, 8))
    fits = [
        fits_at_once(Matmul(64, 64 * n, 4096, "float16"), tile, hopper())
        for n, tile in ((120, alone), (112, shared), (113, shared))
    ]
    assert fits == [True, True, False]


@pytest.mark.parametrize(("k", "at_once"), [(4096, False), (128, True)])
def test_the_next_launch_may_begin_at_once_where_rings_are_short(k: int, at_once: bool) -> None:
    """A ring has no more stages than k tiles: of two, a multiprocessor holds two blocks, and of eight one."""
    tile = SwappedTile.parse("64x64x64/1x1/1")
    assert fits_beside(Matmul(64, 6400, k, "float16", "nt"), tile, 8, hopper()) == at_once


# In the emulator


@pytest.mark.sampled(3)
@pytest.mark.emulator
@pytest.mark.parametrize(
    ("shape", "tile", "given"),
    [
        ((1, 64, 8), "8x64x64/1x1/1", {"layout": "nt"}),
        ((9, 72, 200), "16x64x64/1x1/1", {"layout": "nn", "dtype": "bfloat16"}),
        ((13, 264, 520), "16x128x64/1x2/1", {"layout": "nt"}),
        ((21, 200, 520), "24x128x64/1x1/1", {"layout": "nn"}),
        ((37, 136, 1032), "40x64x128/1x1/1", {"layout": "nt"}),
        ((70, 136, 264), "64x64x64/1x1/1", {"layout": "nn"}),  # more rows than a tile has
        ((200, 72, 264), "104x64x64/1x1/1", {"layout": "nt"}),
        ((60, 136, 264), "32x64x64/2x1/1", {"layout": "nt"}),  # warpgroups beside each other along rows
        ((21, 131, 264), "24x64x64/1x1/1", {"layout": "nt"}),  # rows of the output that TMA cannot step over
        ((13, 136, 264), "16x64x64/1x1/1", {"layout": "nn", "out_dtype": "float32"}),
        ((13, 136, 520), "16x64x64/1x1/2", {"layout": "nt"}),
        ((13, 136, 1160), "16x128x64/1x2/5", {"layout": "nn"}),  # 19 k tiles, 3 or 4 of each part
        ((60, 72, 520), "64x64x64/1x1/8", {"layout": "nt"}),
        ((13, 72, 1032), "16x64x256/1x1/2", {"layout": "nn"}),
        ((37, 131, 648), "40x128x64/1x1/3", {"layout": "nt", "out_dtype": "float32"}),
    ],
    ids=str,
)
def test_few_rows_are_right(shape: tuple[int, int, int], tile: str, given: dict[str, Any]) -> None:
    assert verify(roles(12, shape, tile, stages=3, **given), EmulatorBackend()).passed


SHARED = [  # more blocks than tiles, down, across or both; a tile's rows and columns end within the output's
    ((13, 136, 264), "16x64x64/1x1/1/1x2", {"layout": "nt"}),
    ((21, 72, 264), "8x64x64/1x1/1/2x1", {"layout": "nn", "dtype": "bfloat16"}),
    ((21, 131, 264), "16x64x64/1x1/1/2x2", {"layout": "nt"}),  # rows of the output that TMA cannot step over
    ((1, 200, 136), "8x64x64/1x1/1/1x4", {"layout": "nn"}),
    ((40, 128, 64), "8x128x64/1x2/1/4x1", {"layout": "nt"}),  # one k tile: most blocks have no turn
    ((9, 72, 136), "8x64x64/1x1/1/2x4", {"layout": "nt", "dtype": "bfloat16"}),
    ((9, 72, 264), "16x64x64/1x1/1/4x2", {"layout": "nn", "out_dtype": "float32"}),
    ((13, 72, 520), "16x64x128/1x1/1/1x3", {"layout": "nt"}),  # turns of a number that does not divide the k tiles
    ((13, 72, 264), "16x64x64/1x1/1/1x2", {"layout": "nn", "variant": "bounded"}),
    ((13, 64, 1160), "16x64x64/1x1/1/2x1", {"layout": "nt", "stages": 16}),
    ((136, 72, 64), "8x64x64/1x1/1/4x1", {"layout": "nn"}),  # more rows of clusters than go down together
    # And the reduction in parts: so many blocks of each.
    ((13, 136, 520), "16x64x64/1x1/2/1x2", {"layout": "nt"}),
    ((21, 72, 648), "8x64x64/1x1/3/2x1", {"layout": "nn", "dtype": "bfloat16"}),  # 11 k tiles, 3 or 4 of each part
    ((21, 131, 520), "16x64x64/1x1/2/2x2", {"layout": "nt", "out_dtype": "float32"}),
    ((70, 136, 264), "8x64x64/1x1/2/4x1", {"layout": "nn"}),  # and tiles beyond the output, which are none
    ((9, 200, 264), "16x64x64/1x1/2/1x4", {"layout": "nt", "variant": "bounded"}),
]


@pytest.mark.sampled(3)
@pytest.mark.emulator
@pytest.mark.parametrize(("shape", "tile", "given"), SHARED, ids=str)
def test_blocks_that_share_their_loads_are_right(shape: tuple[int, int, int], tile: str, given: dict[str, Any]) -> None:
    assert verify(roles(12, shape, tile, **{"stages": 3} | given), EmulatorBackend()).passed


@pytest.mark.emulator
def test_a_ring_has_no_more_stages_than_there_are_k_tiles() -> None:
    kernel = roles(12, (9, 72, 136), "8x64x64/1x1/1/2x2", stages=5)
    assert kernel.smem_bytes == kernel.case.tile.smem_bytes(2, 3)
    assert verify(kernel, EmulatorBackend()).passed


@pytest.mark.emulator
@pytest.mark.parametrize("cluster", ["1x2", "2x1", "2x2"])
def test_who_loads_changes_no_bit_of_the_results(cluster: str) -> None:
    """Each sum adds the same products in the same order, whatever the order of the emulator's threads."""
    shape, given = (13, 136, 264), {"layout": "nn", "stages": 3, "out_dtype": "float32"}
    kernels = [roles(12, shape, f"8x64x64/1x1/1{field}", **given) for field in ("", f"/{cluster}")]
    draw = np.random.default_rng(0)
    a, b = (draw.standard_normal(sizes).astype(np.float16) for sizes in ((13, 264), (264, 136)))
    results = []
    for kernel, seed in ((kernels[0], 0), (kernels[1], 1), (kernels[1], 2)):
        got = np.full((13, 136), np.nan, np.float32)
        EmulatorBackend(seed=seed).load(kernel)(a, b, got)
        results.append(got)
    assert not np.isnan(results[0]).any()
    assert all((got == results[0]).all() for got in results)


@pytest.mark.emulator
def test_a_debug_build_of_parts_is_right() -> None:
    assert verify(roles(12, (13, 72, 520), "16x64x64/1x1/2", "bounded", stages=3), EmulatorBackend()).passed


@pytest.mark.emulator
def test_parts_are_added_in_the_same_order_each_time() -> None:
    """Whatever ends first: the order of the emulator's threads changes with the seed."""
    kernel = roles(12, (13, 72, 1160), "16x64x64/1x1/4", layout="nt", stages=3, out_dtype="float32")
    draw = np.random.default_rng(0)
    a, b = (draw.standard_normal(sizes).astype(np.float16) for sizes in ((13, 1160), (72, 1160)))
    results = []
    for seed in range(4):
        got = np.full((13, 72), np.nan, np.float32)
        EmulatorBackend(seed=seed).load(kernel)(a, b, got)
        results.append(got)
    assert all((got == results[0]).all() for got in results)
    assert not np.isnan(results[0]).any()


@pytest.mark.sampled(4)
@pytest.mark.emulator
@pytest.mark.parametrize(
    ("number", "variant", "shape", "tile", "given"),
    [
        (12, "roles", (70, 216, 264), "64x80x64/1x1", {"layout": "nn"}),
        (12, "roles", (130, 440, 264), "128x208x64/2x1", {"layout": "nt"}),
        (12, "roles", (70, 104, 264), "64x40x64/1x1", {"layout": "nn"}),  # one panel in part, stored as a narrow box
        (12, "roles", (70, 24, 264), "64x8x64/1x1", {"layout": "nt", "dtype": "bfloat16"}),
        (12, "roles", (300, 184, 264), "64x120x64/1x1/4x1", {"layout": "nn"}),  # shares of a panel in part
        (13, "overlapped", (180, 104, 392), "64x56x64/1x1", {"layout": "nn", "sms": 2}),
        (12, "roles", (130, 136, 264), "128x72x64/1x1", {"layout": "nn", "dtype": "bfloat16"}),
        (12, "bounded", (70, 201, 264), "64x72x64/1x1", {"layout": "nt", "out_dtype": "float32"}),
        (13, "stream", (130, 440, 392), "128x208x64/2x1", {"layout": "nn", "sms": 2}),
        (13, "whole", (180, 440, 392), "64x104x64/1x1", {"layout": "nn", "sms": 2}),
        (13, "stream", (180, 200, 1032), "64x88x64/1x1", {"layout": "nt", "sms": 5}),  # helpers' sums
        (13, "multicast", (250, 440, 264), "64x104x64/1x1", {"layout": "nn", "sms": 4}),
        (13, "overlapped", (250, 200, 264), "64x160x64/1x1", {"layout": "nt", "sms": 3}),
    ],
    ids=str,
)
def test_every_width_is_right(
    number: int, variant: str, shape: tuple[int, int, int], tile: str, given: dict[str, Any]
) -> None:
    assert verify(roles(number, shape, tile, variant, stages=3, **given), EmulatorBackend()).passed


# With the CUDA compiler, and on the GPU


OF_FEW_ROWS = ["8x64x64/1x1/4", "48x64x64/1x1/8", "64x128x64/1x1/2", "72x64x64/1x1/5"]


@pytest.mark.sampled(3)
@pytest.mark.compiler
@pytest.mark.parametrize("tile", [*OF_FEW_ROWS, "72x64x64/1x1/1/2x4", "64x128x64/1x2/1/1x4"])
def test_few_rows_compile_without_spills(tile: str, compiler: Compiler) -> None:
    cubin = compiled(roles(12, (300, 6144, 4096), tile, layout="nt", stages=4), compiler).cubin
    assert (cubin.spill_bytes, cubin.smem_bytes) == (0, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("parts", [1, 3, 8])
@pytest.mark.parametrize("rows", [8, 16, 24, 64, 104])
@pytest.mark.parametrize("layout", ["nn", "nt"])
@pytest.mark.parametrize("out_dtype", ["float16", "float32"])
def test_few_rows_are_right_on_the_gpu(out_dtype: str, layout: str, rows: int, parts: int, compiler: Compiler) -> None:
    given = {"layout": layout, "out_dtype": out_dtype, "stages": 4}
    for columns in ("64x64/1x1", "128x64/1x2", "128x64/1x1", "64x128/1x1"):
        case = roles_case(12, (rows - 3, 1096, 2056), f"{rows}x{columns}/{parts}", **given)
        assert verify(compiled(lower(case), compiler), GpuBackend(), seeds=(0, 1)).passed


@pytest.mark.gpu
@pytest.mark.parametrize("cluster", CLUSTERS, ids=str)
@pytest.mark.parametrize("layout", ["nn", "nt"])
@pytest.mark.parametrize("stages", [3, 9])
def test_blocks_that_share_their_loads_are_right_on_the_gpu(
    stages: int, layout: str, cluster: tuple[int, int], compiler: Compiler
) -> None:
    for tile in ("16x64x64/1x1", "72x64x64/1x1", "64x128x64/1x2"):
        shared = f"{tile}/1/{cluster[0]}x{cluster[1]}"
        case = roles_case(12, (333, 1096, 2056), shared, layout=layout, stages=stages)
        assert verify(compiled(lower(case), compiler), GpuBackend(), seeds=(0, 1)).passed


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [80, 104, 144, 208, 240])
@pytest.mark.parametrize("layout", ["nn", "nt"])
@pytest.mark.parametrize("number", [12, 13])
def test_every_width_is_right_on_the_gpu(number: int, layout: str, columns: int, compiler: Compiler) -> None:
    for rows in (1, 2):
        case = roles_case(number, (500, 1096, 1032), f"{64 * rows}x{columns}x64/{rows}x1", layout=layout, stages=3)
        assert verify(compiled(lower(case), compiler), GpuBackend(), seeds=(0, 1)).passed


# Outputs of fewer columns than the product


@pytest.mark.emulator
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("columns", "tile"), [(61, "16x64x64/1x1/1"), (130, "8x128x64/1x2/2"), (130, "8x64x64/1x1/1/2x2")]
)
def test_results_leave_for_rows_of_any_length(columns: int, tile: str, dtype: str) -> None:
    """B lies in longer rows, behind whose ends is no number; the bias is as long as the output's rows."""
    problem = Matmul(21, -(-columns // 8) * 8, 136, dtype)
    kernel = swapped(
        problem,
        SwappedTile.parse(tile),
        3,
        KernelForm(overlapped=True, finish=Epilogue(bias="float32", activation="relu"), columns=columns),
    )
    generated = generate(tvm.IRModule({"main": kernel}), HOPPER.target(), "tirx")
    plan, row = launch_plan(generated), 256
    assert not plan.maps("C")
    assert plan.columns("C") == plan.columns("bias") == columns
    lain = MatrixRows(problem.k, columns, 2 * row)
    parameters = [
        each.of(lain) if isinstance(each, TensorMap) and each.buffer == "B" else each for each in plan.parameters
    ]
    names, draw, kind = ("A", "B", "bias", "C"), np.random.default_rng(0), numpy_dtype(dtype)
    a = draw.integers(-2, 3, (problem.m, problem.k)).astype(kind)
    b = np.full((problem.k, row), np.nan, kind)
    b[:, :columns] = draw.integers(-2, 3, (problem.k, columns))
    bias, c = draw.integers(-2, 3, columns).astype("float32"), np.full((problem.m, columns), np.nan, kind)
    launch = replace(plan, parameters=tuple(parameters))
    EmulatedProgram("narrowed", generated.cuda, (launch,), names, operands=names[:3])(a, b, bias, c)
    wanted = np.maximum(a.astype("float64") @ b[:, :columns].astype("float64") + bias, 0).astype(kind)
    np.testing.assert_array_equal(c.astype("float64"), wanted.astype("float64"))


# Registers by role, and results in the ring's memory


LARGE = {  # tiles, and the stages that they have room for
    "144x192x64/1x3/1": 5,
    "168x128x64/1x2/1": 6,
    "176x128x64/1x2/1": 5,
    "200x128x64/1x2/1": 5,
    "208x192x64/1x3/1": 4,
    "256x128x64/1x2/1": 4,
}


def test_large_tiles_are_legal_with_as_many_stages_as_the_ring_has_room_for() -> None:
    for text, stages in LARGE.items():
        for tile in (RoleTile.parse(text), RoleTile.parse(text + "/1x2")):
            assert most_stages(tile, 8) == stages
            assert not tile.violations(HOPPER.target(), 2, stages)
            assert "shared memory" in " ".join(tile.violations(HOPPER.target(), 2, stages + 1))
            assert tile.results_in_ring(2, stages)
            assert tile.resident(2, stages) == 1
    tile = SwappedTile.parse("144x192x64/1x3/1")
    beside, within = (tile.smem_bytes(2, stages) for stages in (4, 5))
    assert beside == 4 * ((144 + 192) * 128 + 16) + 144 * 192 * 2
    assert within == 5 * ((144 + 192) * 128 + 16)
    assert replace(tile, parts=2).results_in_ring(2, 2)  # sums of parts always do
    assert most_stages(replace(tile, block=(16, 64, 64), warpgroups=(1, 1)), 8) == 8


def test_consumers_take_registers_only_where_an_equal_share_is_too_few() -> None:
    for text, share, exchanged in (
        ("112x192x64/1x3/1", 152, False),
        ("120x192x64/1x3/1", 152, True),
        ("224x192x64/1x3/1", 152, True),
        ("168x128x64/1x2/1", 232, False),
        ("176x128x64/1x2/1", 232, True),
        ("256x64x64/1x1/1", 240, False),
    ):
        tile = SwappedTile.parse(text)
        assert (tile.roles_exchange, tile.consumer_share) == (exchanged, share)
        changes = re.findall(r"setmaxnreg_(\w+)_sync_aligned_u32_(\d+)\(\);", roles(12, (301, 600, 264), text).body)
        assert changes == ([("dec", "40"), ("inc", str(share))] if exchanged else [])
    for text in ("232x192x64/1x3/1", "232x192x64/1x3/2"):  # more than the producer can give up
        tile = SwappedTile.parse(text)
        assert not tile.roles_exchange
        assert "registers per block, limit 65536" in "; ".join(tile.violations(HOPPER.target(), 2, 3))


def test_an_instruction_has_no_more_rows_than_registers_at_launch_hold() -> None:
    """Of 104 sums ptxas said: insufficient registers (128) to compile instruction."""
    assert SwappedTile.parse("200x192x64/1x3/1").instruction_rows == (200,)
    assert SwappedTile.parse("256x128x64/1x2/1").instruction_rows == (256,)
    assert SwappedTile.parse("208x192x64/1x3/1").instruction_rows == (104, 104)
    assert SwappedTile.parse("216x192x64/1x3/1").instruction_rows == (112, 104)
    for text, widths in (("200x192x64/1x3/1", {"200"}), ("216x192x64/1x3/1", {"112", "104"})):
        assert set(re.findall(r"_m64n(\d+)k16_\w+\(mine", roles(12, (301, 600, 264), text).body)) == widths


def test_consumers_wait_for_each_other_only_where_results_lie_in_the_ring() -> None:
    wait = "(uint)4, (uint)384)"  # a barrier of three warpgroups, whose own are 1 to 3
    for stages, k, given, waits in (
        (4, 400, {}, False),
        (5, 400, {}, True),
        (5, 256, {}, False),  # four k tiles: the ring has as many stages
        (5, 400, {"out_dtype": "float32"}, False),  # results go straight from registers
    ):
        kernel = roles(12, (301, 600, k), "144x192x64/1x3/1", layout="nt", stages=stages, **given)
        assert (wait in kernel.body) == waits
        assert kernel.smem_bytes == kernel.case.tile.smem_bytes(2, min(stages, -(-k // 64)))


@pytest.mark.sampled(3)
@pytest.mark.emulator
@pytest.mark.parametrize(
    ("shape", "tile", "given"),
    [
        ((150, 200, 400), "144x192x64/1x3/1", {"layout": "nt", "stages": 5}),
        ((150, 200, 392), "144x192x64/1x3/1/1x2", {"layout": "nn", "stages": 5}),
        ((150, 200, 72), "144x192x64/1x3/1", {"layout": "nt", "stages": 5}),  # fewer k tiles than stages
        ((190, 264, 520), "168x128x64/1x2/1/1x2", {"layout": "nt", "stages": 6}),
        ((203, 136, 328), "200x128x64/1x2/1", {"layout": "nn", "stages": 5, "out_dtype": "float32"}),
        ((203, 131, 328), "200x128x64/1x2/1", {"layout": "nt", "stages": 5}),  # rows that TMA cannot step over
        ((210, 264, 264), "208x192x64/1x3/1", {"layout": "nn", "stages": 4, "dtype": "bfloat16"}),
        ((210, 200, 328), "208x192x64/1x3/1/2x1", {"layout": "nt", "stages": 4}),
        ((37, 136, 264), "216x192x64/1x3/1", {"layout": "nn", "stages": 4}),  # instructions of 112 and 104 rows
        ((130, 200, 520), "128x192x64/1x3/2", {"layout": "nt", "stages": 3}),
    ],
    ids=str,
)
def test_large_tiles_are_right(shape: tuple[int, int, int], tile: str, given: dict[str, Any]) -> None:
    assert verify(roles(12, shape, tile, **given), EmulatorBackend()).passed


@pytest.mark.emulator
def test_results_written_to_a_ring_that_is_still_read_are_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorir_ladder.kernels.swapped.await_all_read", lambda consumers: None)
    build.lower.cache_clear()
    try:
        kernel = roles(12, (150, 200, 456), "144x192x64/1x3/1", layout="nt", stages=5)
    finally:
        build.lower.cache_clear()
    with pytest.raises(KernelFault, match="race: shared memory"):
        verify(kernel, EmulatorBackend())


@pytest.mark.sampled(4)
@pytest.mark.compiler
@pytest.mark.parametrize(
    ("tile", "layout"),
    [*((tile, "nt") for tile in LARGE), ("224x192x64/1x3/1/1x2", "nn"), ("160x192x64/1x3/5", "nn")],
)
def test_large_tiles_compile_without_spills(tile: str, layout: str, compiler: Compiler) -> None:
    case = roles_case(12, (572, 6144, 4096), tile, layout=layout, stages=most_stages(RoleTile.parse(tile), 8))
    cubin = compiled(lower(case), compiler).cubin
    assert (cubin.spill_bytes, cubin.smem_bytes) == (0, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["nn", "nt"])
@pytest.mark.parametrize("tile", [*LARGE, *(f"{tile}/1x2" for tile in LARGE), "144x192x64/1x3/2"])
def test_large_tiles_are_right_on_the_gpu(tile: str, layout: str, compiler: Compiler) -> None:
    stages = most_stages(RoleTile.parse(tile), 8)
    for k in (72, 2056):
        case = roles_case(12, (500, 1096, k), tile, layout=layout, stages=stages)
        assert verify(compiled(lower(case), compiler), GpuBackend(), seeds=(0, 1)).passed
