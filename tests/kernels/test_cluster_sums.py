"""Reductions in parts, a block of a cluster each: each of these adds up and stores a share of the results."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tvm

from support.cases import STEPS, hopper
from support.roles import HOPPER, roles, roles_case
from tensorir_ladder.emulator import EmulatedProgram, KernelFault
from tensorir_ladder.harness.build import compiled, lower
from tensorir_ladder.harness.emulation import EmulatorBackend
from tensorir_ladder.harness.execution import GpuBackend
from tensorir_ladder.harness.verify import verify
from tensorir_ladder.kernels.codegen.host_code import launch_plan
from tensorir_ladder.kernels.codegen.lowering import generate
from tensorir_ladder.kernels.codegen.toolchain import Compiler
from tensorir_ladder.kernels.fused_epilogue import Epilogue
from tensorir_ladder.kernels.kernel_form import KernelForm
from tensorir_ladder.kernels.persistent import persistent
from tensorir_ladder.kernels.swapped import swapped
from tensorir_ladder.kernels.tiles import ClusterTile, RoleTile, most_stages
from tensorir_ladder.kernels.warp_specialized import warp_specialized
from tensorir_ladder.schedules.errors import IllegalTile, IllegalWorkload
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.steps.step import Config

# The tile


def test_a_fourth_field_has_the_reduction_in_parts() -> None:
    tile = RoleTile.parse("64x88x64/1x1/1x1/7")
    assert tile == ClusterTile((64, 88, 64), (1, 1), (1, 1), 7)
    assert (str(tile), tile.cluster_size, tile.shared_by, tile.swapped) == ("64x88x64/1x1/1x1/7", 7, 1, False)
    whole = RoleTile.parse("64x88x64/1x1/1x1/1")
    assert (whole, str(whole)) == (ClusterTile((64, 88, 64), (1, 1)), "64x88x64/1x1/1x1")
    assert (RoleTile.parse("64x88x64/1x1").parts, RoleTile.parse("16x64x64/1x1/3").parts) == (1, 3)
    with pytest.raises(IllegalTile, match="malformed tile"):
        RoleTile.parse("64x88x64/1x1/1x1/7/1")


@pytest.mark.parametrize(
    ("tile", "clause"),
    [
        ("64x88x64/1x1/1x1/9", "9 parts, limit 8 blocks of a cluster"),
        ("64x88x64/1x1/2x2/3", "3 parts of 4 blocks that share their loads, limit 8 blocks of a cluster"),
        ("256x256x64/2x1/1x1/2", "registers"),
    ],
)
def test_every_limit_of_upright_parts_is_named(tile: str, clause: str) -> None:
    assert clause in "; ".join(RoleTile.parse(tile).violations(HOPPER.target(), 2, 3))


def test_sums_of_parts_lie_in_the_ring() -> None:
    tile = RoleTile.parse("64x88x64/1x1/1x1/7")
    rows, panels = (64 + 88) * 128, (64 + 128) * 128  # of a stage, of a B stored [n, k], and [k, n] in whole panels
    assert tile.sum_bytes == 64 * 88 * 4
    assert [tile.smem_bytes(2, 3), tile.kept_bytes(2, 3)] == [3 * each + 3 * 2 * 8 for each in (rows, panels)]
    assert most_stages(tile, 8) == 8 > most_stages(replace(tile, block=(128, 184, 64), warpgroups=(2, 1)), 8)
    large = RoleTile.parse("128x248x64/2x1/1x1/2")
    assert large.smem_bytes(2, 2) == large.sum_bytes + 2 * 2 * 8  # two stages are less


@pytest.mark.parametrize("text", ["64x88x64/1x1/1x1/7", "64x96x64/1x1/1x1/2", "8x64x64/1x1/3", "16x192x64/1x3/2"])
def test_no_two_threads_of_a_warp_store_sums_to_one_bank(text: str) -> None:
    """A pair of neighbours a thread, half a warp at once; of exchanged operands one, the whole warp."""
    tile = RoleTile.parse(text)
    lanes = range(32) if tile.swapped else range(16)
    banks: list[int] = []
    for lane in lanes:
        down, across = lane // 4, lane % 4 * 2
        row, column = (across, down) if tile.swapped else (down, across)
        banks += [(row * tile.sum_pitch + column + i) % 32 for i in range(1 if tile.swapped else 2)]
    assert sorted(banks) == list(range(32))
    assert tile.sum_pitch % 4 == 0  # rows are read by four


# What is refused


def test_kernels_that_divide_no_reduction_refuse_such_tiles() -> None:
    problem, tile = Matmul(64, 64, 512, "float16"), RoleTile.parse("64x64x64/1x1/1x1/2")
    for make in (
        lambda: persistent(problem, tile, 3, machine=hopper()),
        lambda: STEPS[13].kernel(problem, Config("stream", tile, 3, hopper())),
    ):
        with pytest.raises(IllegalTile, match=r"does not divide the reduction.*64x64x64/1x1/1x1/2.*take step 12"):
            make()


def test_bad_input_is_refused() -> None:
    tile = RoleTile.parse("64x64x64/1x1/1x1/3")
    with pytest.raises(IllegalTile, match=r"more parts than the reduction has k tiles.*3.*2.*fewer parts"):
        warp_specialized(Matmul(64, 64, 128, "float16"), tile, 3)
    problem = Matmul(64, 64, 512, "float16")
    for form in (KernelForm(any_rows=True), KernelForm(Epilogue(residual=True))):
        with pytest.raises(IllegalWorkload, match=r"clusters add no residual.*got 3 blocks"):
            warp_specialized(problem, tile, 3, form)
    for text in ("64x64x64/1x1/1x1/9", "64x64x64/1x1/2x4/2"):
        with pytest.raises(IllegalTile, match="parts"):
            warp_specialized(problem, RoleTile.parse(text), 3)


# The code


def test_upright_parts_are_the_blocks_of_a_cluster() -> None:
    kernel = roles(12, (70, 176, 520), "64x88x64/1x1/1x1/3", layout="nt", stages=3)
    assert (kernel.blocks, kernel.threads, kernel.launch["clusterCtaIdx.x"]) == (12, 256, 3)
    assert kernel.body.count("add_4_of_3_parts(") == 1
    assert not kernel.workspaces


# In the emulator

CASES = [
    ((70, 176, 520), "64x88x64/1x1/1x1/3", {"layout": "nn"}),
    ((150, 440, 520), "128x208x64/2x1/1x1/2", {"layout": "nt"}),
    ((70, 179, 712), "64x56x128/1x1/1x1/4", {"layout": "nt", "out_dtype": "float32"}),  # rows of odd lengths
    ((70, 201, 776), "64x72x64/1x1/1x1/8", {"layout": "nt", "dtype": "bfloat16"}),
    ((130, 132, 520), "128x128x64/1x2/1x1/2", {"layout": "nt"}),  # rows by the four, which TMA cannot step over
    ((130, 136, 328), "192x136x64/3x1/1x1/5", {"layout": "nn", "out_dtype": "float32"}),
    ((1, 8, 520), "64x8x64/1x1/1x1/8", {"layout": "nt"}),  # two places for eight blocks
    ((13, 264, 520), "16x128x64/1x2/3", {"layout": "nt"}),
    ((130, 200, 520), "128x192x64/1x3/2", {"layout": "nn", "dtype": "bfloat16"}),
    ((21, 131, 520), "24x64x64/1x1/5", {"layout": "nt", "out_dtype": "float32"}),
    # Each of several blocks, which share their loads.
    ((150, 440, 520), "64x208x64/1x1/2x1/2", {"layout": "nn"}),
    ((70, 179, 712), "64x56x128/1x1/1x2/4", {"layout": "nt", "out_dtype": "float32"}),
    ((70, 201, 776), "64x72x64/1x1/2x2/2", {"layout": "nt", "dtype": "bfloat16"}),
    ((70, 104, 648), "64x56x64/1x1/4x1/2", {"layout": "nt"}),  # and two have none
    ((130, 136, 328), "192x72x64/3x1/1x2/3", {"layout": "nn", "variant": "bounded"}),
]


@pytest.mark.sampled(2)
@pytest.mark.emulator
@pytest.mark.parametrize(("shape", "tile", "given"), CASES, ids=str)
def test_parts_are_right(shape: tuple[int, int, int], tile: str, given: dict[str, Any]) -> None:
    assert verify(roles(12, shape, tile, stages=3, **given), EmulatorBackend()).passed


@pytest.mark.emulator
@pytest.mark.parametrize("tile", ["64x72x64/1x1/1x1/4", "72x64x64/1x1/4"])
def test_parts_are_added_in_the_same_order_each_time(tile: str) -> None:
    """Bit for bit what adding the parts' own products in their order makes, whatever ends first."""
    m, n, k = 70, 72, 1160
    kernel = roles(12, (m, n, k), tile, layout="nt", stages=3, out_dtype="float32")
    draw = np.random.default_rng(0)
    a, b = (draw.standard_normal(sizes).astype(np.float16) for sizes in ((m, k), (n, k)))
    expected = np.zeros((m, n), np.float32)
    edges = [part * math.ceil(k / 64) // 4 * 64 for part in range(5)]
    for low, high in itertools.pairwise(edges):
        own = roles(
            12, (m, n, min(high, k) - low), tile.rsplit("/", 1)[0] + "/1", layout="nt", stages=3, out_dtype="float32"
        )
        got = np.full((m, n), np.nan, np.float32)
        EmulatorBackend().load(own)(a[:, low:high].copy(), b[:, low:high].copy(), got)
        expected = got if low == 0 else expected + got
    for seed in range(3):
        got = np.full((m, n), np.nan, np.float32)
        EmulatorBackend(seed=seed).load(kernel)(a, b, got)
        np.testing.assert_array_equal(got, expected)


MEETING = "tvm_builtin_cuda_cluster_sync();"
CONSUMERS = re.compile(r"tvm_builtin_ptx_bar_sync_count_sync\(\(uint\)\d, \(uint\)\d+\);")


def lose_meeting(number: int, text: str) -> str:
    """Take out what the producer's warps and the consumers meet by, the first or the last time."""
    head, *tails = text.split(MEETING)
    assert len(tails) == 4  # two of either role
    lost = {number, 2 + number}
    return head + "".join((";" if place in lost else MEETING) + tail for place, tail in enumerate(tails))


BROKEN: dict[str, tuple[Callable[[str], str], str]] = {
    "consumers do not wait for each other": (lambda text: CONSUMERS.sub(";", text), "race: shared memory"),
    "sums are read before they are there": (functools.partial(lose_meeting, 0), "race: shared memory"),
    "a block ends while its sums are read": (functools.partial(lose_meeting, 1), "cluster"),
    "a part is left out": (lambda text: text.replace("part = 1; part < 3", "part = 2; part < 3"), "Mismatched"),
    "rows are looked for elsewhere": (lambda text: re.sub(r"(at / \d+ \* \d+)", r"\1 + 16", text), "Mismatched|bounds"),
    "all parts are the first": (lambda text: text.replace('"r"(first + part * 1)', '"r"(first)'), "Mismatched"),
}
# Of blocks that share their loads, two of each part; both rows of tiles are theirs.
FIRST_OF_PART = r"\(3 << \(\(\(\(int\)tvm_builtin_cluster_ctaid_x\(\)\) >> 1\) \* 2\)\)"
BROKEN_SHARED: dict[str, tuple[Callable[[str], str], str]] = {
    "loads arrive in the first part's blocks": (
        lambda text: re.sub(rf", \(\(ushort\){FIRST_OF_PART}\)\)", ", (ushort)3)", text),
        "hang|wait|bytes|race",
    ),
    "stages are said to be empty to the first part's blocks": (
        lambda text: re.sub(rf"\| \(\(uint\)\(\(ushort\){FIRST_OF_PART}\)\)", "| (uint)3", text),
        "hang|wait|arriv|race",
    ),
    "sums are of the tile above": (
        lambda text: text.replace('"r"(first + part * 2)', '"r"(part * 2)'),
        "Mismatched|race",
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.emulator
@pytest.mark.parametrize(
    ("tile", "name"),
    [
        *itertools.product(["128x72x64/2x1/1x1/3", "72x128x64/1x2/3"], BROKEN),
        *itertools.product(["64x72x64/1x1/2x1/2", "40x128x64/1x2/2/2x1"], BROKEN_SHARED),
    ],
)
def test_what_is_broken_is_caught(tile: str, name: str) -> None:
    parsed, problem = RoleTile.parse(tile), Matmul(70, 72, 520, "float16", "nt")
    made = (swapped if parsed.swapped else warp_specialized)(problem, parsed, 3)
    found = generate(tvm.IRModule({"main": made}), hopper().target, "tirx")
    a, b = (np.random.default_rng(7).integers(-3, 4, sizes).astype(np.float16) for sizes in ((70, 520), (72, 520)))
    wanted = (a.astype(np.float64) @ b.T.astype(np.float64)).astype(np.float16)

    def run(text: str) -> None:
        program = EmulatedProgram("parts", text, (launch_plan(found),), ("A", "B", "C"), operands=("A", "B"))
        for seed in range(4):  # orders of threads: a block may end before or after it is read
            c = np.full(wanted.shape, np.nan, np.float16)
            program(a, b, c, seed=seed)
            np.testing.assert_array_equal(c, wanted)

    change, fault = (BROKEN | BROKEN_SHARED)[name]
    assert change(found.cuda) != found.cuda
    run(found.cuda)
    with pytest.raises((KernelFault, AssertionError), match=fault):
        run(change(found.cuda))


# With the CUDA compiler, and on the GPU

ON_GPU = [
    "192x152x64/3x1/2x1/2",
    "64x88x64/1x1/2x2/2",
    "64x88x64/1x1/1x1/7",
    "128x184x64/2x1/1x1/3",
    "64x56x128/1x1/1x1/2",
    "192x128x64/3x1/1x1/5",
    "64x8x64/1x1/1x1/8",
]


@pytest.mark.sampled(3)
@pytest.mark.compiler
@pytest.mark.parametrize("tile", [*ON_GPU, "88x192x64/1x3/8", "256x128x64/1x2/4", "8x64x256/1x1/2"])
def test_parts_compile_without_spills(tile: str, compiler: Compiler) -> None:
    stages = most_stages(RoleTile.parse(tile), 8)
    for layout, out_dtype in (("nt", "float16"), ("nn", "float32")):
        case = roles_case(12, (300, 6144, 4096), tile, layout=layout, stages=stages, out_dtype=out_dtype)
        assert compiled(lower(case), compiler).cubin.spill_bytes == 0


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["nn", "nt"])
@pytest.mark.parametrize("out_dtype", ["float16", "float32"])
@pytest.mark.parametrize("tile", ON_GPU)
def test_upright_parts_are_right_on_the_gpu(tile: str, out_dtype: str, layout: str, compiler: Compiler) -> None:
    stages = most_stages(RoleTile.parse(tile), 8)
    for shape in ((301, 1096, 2056), (64, 200, 1032)):
        case = roles_case(12, shape, tile, layout=layout, out_dtype=out_dtype, stages=stages)
        assert verify(compiled(lower(case), compiler), GpuBackend(), seeds=(0, 1)).passed
