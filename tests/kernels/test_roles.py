"""Kernels whose warpgroups have roles: their limits, their text, and on the GPU their results."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tvm.script import tirx as T

from support.cases import STEPS, hopper
from support.roles import HOPPER, STEPS_WITH_ROLES, roles
from tensorir_ladder.emulator import KernelFault
from tensorir_ladder.harness.build import compile_module, compiled, lower, lower_schedule
from tensorir_ladder.harness.emulation import EmulatorBackend
from tensorir_ladder.harness.execution import GpuBackend
from tensorir_ladder.harness.verify import verify
from tensorir_ladder.kernels.codegen.toolchain import Compiler, Cubin
from tensorir_ladder.kernels.fused_epilogue import Epilogue
from tensorir_ladder.kernels.kernel_form import KernelForm
from tensorir_ladder.kernels.persistent import persistent
from tensorir_ladder.kernels.tiles import (
    BLOCK_REGISTERS,
    PRODUCER_REGISTERS,
    RoleTile,
    most_stages,
    stages_of_one_tile,
)
from tensorir_ladder.kernels.tma import Multicast
from tensorir_ladder.kernels.warp_specialized import warp_specialized
from tensorir_ladder.schedules.errors import IllegalPipeline, IllegalTile, IllegalWorkload
from tensorir_ladder.schedules.isa import WARPGROUP
from tensorir_ladder.schedules.loops.early_launch import FLAG
from tensorir_ladder.schedules.loops.residency import KERNEL
from tensorir_ladder.schedules.workloads import Matmul

TILES = ["128x256x64/2x1", "128x128x64/2x1", "64x128x64/1x1", "64x64x64/1x1", "128x64x64/2x1", "256x128x64/2x1"]


def test_limits_name_registers_and_consumers() -> None:
    assert not RoleTile.parse("128x256x64/2x1").violations(HOPPER.target(), 2, 4)
    assert "shared memory" in " ".join(RoleTile.parse("128x256x64/2x1").violations(HOPPER.target(), 2, 5))
    assert "3 registers" not in " ".join(RoleTile.parse("64x256x64/1x1").violations(HOPPER.target(), 2, 4))
    for tile, what in (("128x256x64/1x1", "registers a consumer"), ("256x64x64/4x1", "4 consumer warpgroups")):
        assert what in " ".join(RoleTile.parse(tile).violations(HOPPER.target(), 2, 2))


def test_what_roles_hold_is_what_a_block_was_launched_with() -> None:
    """Three consumers of 160 registers beside a producer of 40 waited for 1,024 that nobody had, and hung an H200."""
    shares = {}
    for rows, columns in ((1, 1), (2, 1), (1, 2), (3, 1), (1, 3)):
        tile = RoleTile(block=(64 * rows, 64 * columns, 64), warpgroups=(rows, columns))
        assert tile.misfits() == []
        launched = tile.registers * (tile.consumers + 1)
        assert tile.consumers * tile.consumer_share + PRODUCER_REGISTERS <= launched
        assert launched * WARPGROUP <= BLOCK_REGISTERS
        assert PRODUCER_REGISTERS <= tile.registers <= tile.consumer_share
        shares[tile.consumers] = tile.consumer_share
    assert shares == {1: 240, 2: 232, 3: 152}
    for tile, what in (
        ("256x192x64/2x1", []),
        ("192x200x64/3x1", []),
        ("256x200x64/2x1", ["240 registers a consumer, limit 232"]),
        ("192x208x64/3x1", ["130 registers for one instruction, limit 128 of a thread at launch"]),
    ):
        assert RoleTile.parse(tile).misfits() == what


@pytest.mark.parametrize(
    ("blocks", "first", "apart", "bits"),
    [(4, 0, 1, 0b1111), (2, 2, 1, 0b1100), (4, 1, 2, 0b10101010), (1, 5, 1, 1 << 5)],
)
def test_a_multicast_has_a_bit_for_each_of_its_blocks(blocks: int, first: int, apart: int, bits: int) -> None:
    """Whether the first of them is known when the kernel is built, or by the block alone."""
    masks = [Multicast(blocks, place, apart).mask for place in (first, T.int32(first))]
    assert [int(mask.value) for mask in masks] == [bits, bits]
    assert {str(mask.ty) for mask in masks} == {"uint16"}


def test_results_that_leave_late_take_registers() -> None:
    """Those of the largest tiles leave at once, and take one box for each consumer instead of two."""
    for text, leaves_late in (("192x144x64/3x1", True), ("192x160x64/3x1", False), ("256x192x64/2x1", False)):
        tile = RoleTile.parse(text)
        assert tile.leaves_late == leaves_late
        assert not tile.violations(HOPPER.target(), 2, most_stages(tile, 8))
        ring = 3 * ((tile.block_m + -(-tile.block_n // 64) * 64) * 128 + 16)
        assert tile.kept_bytes(2, 3) == ring + tile.consumers * (2 if leaves_late else 1) * 64 * 128


def test_results_lie_in_the_ring_where_stages_leave_no_room_beside_it() -> None:
    """Of a block's only tile, up to six stages; of blocks that stay nowhere."""
    tile = RoleTile.parse("192x160x64/3x1/2x1")
    assert [stages_of_one_tile(tile, 16, nt) for nt in (False, True)] == [4, 5]
    assert stages_of_one_tile(RoleTile.parse("64x64x64/1x1/2x1"), 16, False) == 13  # which have room beside results
    assert stages_of_one_tile(RoleTile.parse("128x104x64/2x1/1x2"), 16, True) == 6
    assert stages_of_one_tile(RoleTile.parse("256x256x64/2x1"), 8, False) == 3
    stage = tile.stage_bytes(2)
    wait = "(uint)4, (uint)384)"  # a barrier of three warpgroups, whose own are 1 to 3
    for stages, k, waits, beside in ((3, 520, False, True), (4, 520, True, False), (4, 192, False, True)):
        kernel = roles(12, (400, 400, k), str(tile), stages=stages)
        assert (wait in kernel.body) == waits
        assert tile.boxes_in_ring(min(stages, k // 64), stage) == waits
        held = min(stages, -(-k // 64))
        assert kernel.smem_bytes == held * (stage + 16) + beside * 3 * 2 * 64 * 128


def test_a_ring_is_refused_by_what_its_operands_take() -> None:
    """Columns of a B stored [k, n] take whole panels: steps take as many stages of either form as there is room for."""
    tile, shape = "192x160x64/3x1", (400, 400, 520)
    taken = roles(12, shape, tile, layout="nt", stages=5)
    assert taken.smem_bytes == taken.case.tile.smem_bytes(2, 5) == 5 * ((192 + 160) * 128 + 16)
    with pytest.raises(IllegalTile, match=r"245840 bytes of shared memory in 5 stage\(s\) \(limit 232448\)"):
        roles(12, shape, tile, stages=5)
    with pytest.raises(IllegalTile, match="270432 bytes of shared memory in 6"):
        roles(12, shape, tile, layout="nt", stages=6)
    with pytest.raises(IllegalTile, match=r"in 5 stage.*, with results beside them"):
        persistent(Matmul(*shape, "float16"), RoleTile.parse("128x160x64/2x1"), 5, machine=hopper(4))


@pytest.mark.emulator
def test_results_written_to_a_ring_that_is_still_read_are_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorir_ladder.kernels.warp_specialized.await_all_read", lambda consumers: None)
    lower.cache_clear()
    try:
        kernel = roles(12, (390, 320, 456), "192x160x64/3x1", stages=4)
    finally:
        lower.cache_clear()
    with pytest.raises(KernelFault, match="race: shared memory"):
        verify(kernel, EmulatorBackend())


@pytest.mark.sampled(3)
@pytest.mark.emulator
@pytest.mark.parametrize(
    ("number", "tile", "shape", "given"),
    [
        (12, "192x160x64/3x1/2x1", (390, 328, 392), {"layout": "nn", "stages": 4, "dtype": "bfloat16"}),
        (12, "192x72x64/3x1/2x4", (390, 331, 456), {"layout": "nt", "stages": 6}),  # rows that TMA cannot step over
        (12, "128x152x64/2x1", (130, 155, 520), {"layout": "nt", "stages": 5, "out_dtype": "float32"}),
        (13, "192x176x64/3x1/1x2", (390, 720, 328), {"layout": "nt", "stages": 4}),
        (13, "192x168x64/3x1/2x1", (780, 340, 200), {"layout": "nt", "stages": 4}),  # by rows, a stage fewer
        (13, "256x136x64/2x1", (520, 280, 264), {"layout": "nn", "stages": 3}),
        (13, "256x192x64/2x1", (520, 392, 264), {"layout": "nn", "stages": 3, "out_dtype": "float32"}),
    ],
    ids=str,
)
def test_the_largest_tiles_are_right(
    number: int, tile: str, shape: tuple[int, int, int], given: dict[str, Any]
) -> None:
    assert verify(roles(number, shape, tile, **given), EmulatorBackend()).passed


@pytest.mark.parametrize("kernel", [warp_specialized, persistent])
def test_bad_input_is_refused(kernel: Any) -> None:
    given = {"machine": hopper()} if kernel is persistent else {}
    tile = RoleTile.parse("64x64x64/1x1")
    with pytest.raises(IllegalPipeline, match="2 to 8"):
        kernel(Matmul(64, 64, 64, "float16"), tile, 1, **given)
    with pytest.raises(IllegalWorkload, match="4095 elements"):
        kernel(Matmul(64, 64, 4095, "float16"), tile, 4, **given)
    with pytest.raises(IllegalTile, match="float32"):
        kernel(Matmul(64, 64, 64, "float32"), tile, 4, **given)


def test_step_13_leaves_a_tile_s_own_cluster_as_it_is() -> None:
    """Its rows of B lie across cache lines, for which the step pairs blocks of other tiles."""
    for tile, cluster in (("128x128x64/2x1", 2), ("128x128x64/2x1/1x2", 2), ("128x136x64/2x1", 1)):
        kernel = roles(13, (300, 264, 136), tile, layout="nn", stages=3, sms=4)
        assert kernel.launch.get("clusterCtaIdx.x", 1) == cluster


def test_a_cluster_must_be_able_to_share_b() -> None:
    problem, tile = Matmul(256, 256, 256, "float16", layout="nt"), RoleTile.parse("64x72x64/1x1")
    with pytest.raises(IllegalTile, match="a cluster cannot share"):
        persistent(problem, tile, 4, machine=hopper(4), blocks=2)
    for cluster in ("3x3", "16x1"):
        with pytest.raises(IllegalTile, match="limit 8 of a cluster"):
            warp_specialized(problem, RoleTile.parse(f"64x72x64/1x1/{cluster}"), 4)
    with pytest.raises(IllegalTile, match=r"so many blocks find no place.*4 blocks.*limit 2"):
        persistent(problem, RoleTile.parse("64x64x64/1x1/2x2"), 4, machine=hopper(4))


@pytest.mark.parametrize(
    "form", [KernelForm(any_rows=True), KernelForm(Epilogue(residual=True))], ids=["any rows", "residual"]
)
def test_clusters_have_their_own_rows_and_no_residual(form: KernelForm) -> None:
    with pytest.raises(IllegalWorkload, match="clusters add no residual"):
        warp_specialized(Matmul(256, 256, 256, "float16"), RoleTile.parse("64x128x64/1x1/2x1"), 4, form)


@pytest.mark.sampled(3)
@pytest.mark.emulator
@pytest.mark.parametrize(
    ("tile", "stages", "shape", "layout"),
    [
        ("256x192x64/2x1", 3, (300, 200, 200), "nt"),
        ("256x192x64/2x1/2x1", 3, (600, 200, 136), "nn"),  # three rows of tiles: the last cluster's second has none
        ("64x128x64/1x1/4x1", 3, (320, 264, 520), "nt"),
        ("64x64x64/1x1/2x2", 3, (100, 72, 264), "nn"),
        ("64x72x64/1x1/2x4", 3, (200, 296, 136), "nn"),  # half of the last clusters' blocks have no tile
        ("128x136x64/2x1/1x2", 3, (130, 136, 72), "nt"),
        ("192x160x64/3x1", 5, (390, 320, 456), "nt"),  # results in the ring, as below
    ],
)
def test_wide_tiles_and_clusters_are_right(tile: str, stages: int, shape: tuple[int, int, int], layout: str) -> None:
    problem = Matmul(*shape, "float16", layout=layout)
    kernel = warp_specialized(problem, RoleTile.parse(tile), stages, KernelForm(bounded=True, overlapped=True))
    run = EmulatorBackend(seed=problem.m % 7).load(lower_schedule(kernel, HOPPER, "wide"))
    draw = np.random.default_rng(0)
    a, b = (draw.normal(size=size).astype("float16") for size in ((problem.m, problem.k), problem.b_shape))
    c = np.full((problem.m, problem.n), 77, "float16")
    run(a, b, c)
    right = a.astype("float64") @ (b if layout == "nn" else b.T).astype("float64")
    np.testing.assert_allclose(c.astype("float64"), right, rtol=2**-10, atol=2**-10 * problem.k**0.5)


@pytest.mark.sampled(3)
@pytest.mark.emulator
@pytest.mark.parametrize(
    ("tile", "shape", "layout", "sms", "stream_k"),
    [
        ("64x72x64/1x1/1x2", (200, 424, 264), "nn", 4, False),  # six tiles across: three clusters, and two workers
        ("64x72x64/1x1/2x1", (330, 136, 200), "nt", 4, False),  # the last cluster's second block has no tile
        ("64x64x64/1x1/1x2", (64, 380, 1032), "nt", 4, True),  # helpers hand over sums
    ],
)
def test_blocks_that_stay_share_loads_in_turn(
    tile: str, shape: tuple[int, int, int], layout: str, sms: int, stream_k: bool
) -> None:
    """And the sums are those of blocks on their own, to the last bit, where no tile is cut."""
    m, n, k = shape
    problem = Matmul(m, -(-n // 8) * 8, k, "float16", layout=layout)
    draw = np.random.default_rng(0)
    a, b = (draw.normal(size=size).astype("float16") for size in ((problem.m, problem.k), problem.b_shape))
    results = []
    for text in (tile, tile.rpartition("/")[0]):
        form = KernelForm(bounded=True, overlapped=True)
        kernel = persistent(problem, RoleTile.parse(text), 3, form, machine=hopper(sms), stream_k=stream_k)
        c = np.full((problem.m, problem.n), 77, "float16")
        EmulatorBackend(seed=sms).load(lower_schedule(kernel, HOPPER, "stays"))(a, b, c)
        results.append(c)
    right = a.astype("float64") @ (b if layout == "nn" else b.T).astype("float64")
    np.testing.assert_allclose(results[0].astype("float64"), right, rtol=2**-10, atol=2**-10 * problem.k**0.5)
    if not stream_k:
        np.testing.assert_array_equal(*results)


def test_roles_have_their_own_instructions() -> None:
    text = roles(12, (256, 256, 512), "128x128x64/2x1", stages=4).body
    producer, consumer = text.split("} else {", 1)
    assert producer.count("cp_async_bulk_tensor_g2s") == 3  # one panel of A, two of B, stored [k, n]
    assert "setmaxnreg_dec" in producer
    assert "setmaxnreg_inc" in consumer
    assert consumer.count("wgmma_f16_ss") == 4
    assert "__syncthreads" not in consumer


def test_a_cut_last_wave_takes_memory_and_a_whole_one_none() -> None:
    cut = roles(13, (128, 128, 4096), "64x64x64/1x1", sms=8)
    assert [str(buffer.name) for buffer in cut.workspaces] == ["shared_sums", "flags"]
    assert "leave_sums(" in cut.body
    whole = roles(13, (128, 128, 4096), "64x64x64/1x1", "whole", sms=8)
    assert "leave_sums(" not in whole.body
    assert whole.workspace_bytes == 8


def test_debug_builds_name_who_waits() -> None:
    text = roles(13, (128, 128, 4096), "64x64x64/1x1", "bounded", sms=8).cuda
    for role in ("producer", "consumer"):
        assert f'"{role}"' in text
    assert "as owner waited" in text


def test_multicast_loads_half_of_b_each() -> None:
    text = roles(13, (256, 256, 512), "128x128x64/2x1", "multicast", stages=4).body
    assert text.count("multicast__cluster(") == 1
    assert "mbarrier_arrive_at(" in text


def test_overlapped_kernels_are_launched_with_the_flag_and_wait() -> None:
    kernel = roles(13, (256, 256, 512), "64x64x64/1x1", "overlapped")
    (function,) = (function for _, function in kernel.device.functions_items())
    tags = [str(tag) for tag in function.attrs[KERNEL]]
    assert tags[-2:] == [FLAG, "tirx.use_dyn_shared_memory"]
    assert "griddepcontrol" in kernel.body
    program = compile_module(kernel.mod, kernel.machine, lambda _: b"", {}, kernel.tir_pipeline)
    assert program.mod.imports[0].inspect_source() == kernel.cuda
    assert "griddepcontrol" not in roles(13, (256, 256, 512)).body


@pytest.mark.sampled(4)
@pytest.mark.compiler
@pytest.mark.parametrize(
    ("number", "tile"), [(12, STEPS[12].tiles.default.tile), *((13, tile) for tile in STEPS[13].tiles.tuning)], ids=str
)
def test_every_declared_tile_compiles_without_spills(number: int, tile: RoleTile, compiler: Compiler) -> None:
    stages = next(s for s in (6, 5, 4, 3) if not tile.violations(HOPPER.target(), 2, s))
    cubin = compiled(roles(number, (4096, 4096, 4096), str(tile), stages=stages), compiler).cubin
    assert cubin.spill_bytes == 0
    assert cubin.smem_bytes == 0  # static shared memory would move the ring off its 1024-byte boundary


@pytest.mark.compiler
def test_stages_are_released_one_k_tile_late(compiler: Compiler, sass: Callable[[Cubin], str]) -> None:
    """A variable without a first value was merged with another by the compiler: the stage just read was released."""
    code = sass(compiled(roles(12, (128, 256, 4096), "128x256x64/2x1"), compiler).cubin)
    loop = code[code.index("HGMMA") : code.rindex("HGMMA") + 800]
    assert re.search(r"SYNCS\.ARRIVE\.TRANS64\.A1T0 RZ, \[R\d+\+URZ", loop)


# On the GPU


def check(compiler: Compiler, *arguments: Any, **given: Any) -> None:
    """Compile and compare with the float64 product, twice: flags must be lowered again."""
    kernel = compiled(roles(*arguments, **given), compiler)
    assert verify(kernel, GpuBackend(), seeds=(0, 1)).passed


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("layout", ["nn", "nt"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("number", [12, 13])
def test_every_tile_layout_and_dtype_is_right(
    number: int, dtype: str, layout: str, tile: str, compiler: Compiler
) -> None:
    check(compiler, number, (512, 512, 1024), tile, dtype=dtype, layout=layout, stages=3)
    check(compiler, number, (300, 328, 200), tile, dtype=dtype, layout=layout, stages=3)


@pytest.mark.gpu
@pytest.mark.parametrize("number", [12, 13])
@pytest.mark.parametrize("stages", [2, 3, 5, 8])
@pytest.mark.parametrize("k", [8, 64, 136, 1000])
def test_every_depth_is_right_for_every_reduction(k: int, stages: int, number: int, compiler: Compiler) -> None:
    check(compiler, number, (200, 136, k), stages=stages)


@pytest.mark.gpu
@pytest.mark.parametrize("out_dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(("number", "variant"), STEPS_WITH_ROLES)
@pytest.mark.parametrize(
    ("shape", "layout"), [((1, 8, 8), "nn"), ((1, 1, 8), "nt"), ((129, 131, 72), "nt"), ((300, 264, 200), "nn")]
)
def test_results_of_any_shape_and_dtype_are_right(
    shape: tuple[int, int, int], layout: str, number: int, variant: str, out_dtype: str, compiler: Compiler
) -> None:
    check(compiler, number, shape, "128x128x64/2x1", variant, layout=layout, out_dtype=out_dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["stream", "overlapped", "multicast", "bounded"])
@pytest.mark.parametrize("tile", ["128x256x64/2x1", "128x128x64/2x1"])
@pytest.mark.parametrize("shape", [(512, 512, 8192), (1280, 1024, 4096), (1000, 1000, 4000), (640, 2304, 2048)])
@pytest.mark.parametrize("sms", [16, 30, 132])
def test_cut_last_waves_are_right(
    sms: int, shape: tuple[int, int, int], tile: str, variant: str, compiler: Compiler
) -> None:
    check(compiler, 13, shape, tile, variant, sms=sms)


@pytest.mark.gpu
@pytest.mark.parametrize("cluster", ["2x1", "1x2", "4x1", "4x2"])
@pytest.mark.parametrize("tile", ["64x72x64/1x1", "128x136x64/2x1", "192x128x64/3x1"])
@pytest.mark.parametrize("layout", ["nn", "nt"])
def test_blocks_in_clusters_are_right_on_the_gpu(layout: str, tile: str, cluster: str, compiler: Compiler) -> None:
    for shape in ((1000, 1096, 1032), (130, 72, 72)):
        check(compiler, 12, shape, f"{tile}/{cluster}", layout=layout, stages=3)
        if cluster in ("2x1", "1x2"):
            check(compiler, 13, shape, f"{tile}/{cluster}", layout=layout, stages=3)
            check(compiler, 13, shape, f"{tile}/{cluster}", "overlapped", layout=layout, stages=3, sms=30)
