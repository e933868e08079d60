"""Blackwell's explicit kernel: descriptors worked out by hand, the generated CUDA, its protocol, and the machine code.

No test here runs it: there is no such GPU. The protocol of loads, multiplications and barriers is taken from the
generated text and stepped through by a model, with completions as late and as early as barriers allow.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
from tvm.backend.cuda.cpp.descriptors import encode_instr_descriptor_dense_uint32, encode_smem_descriptor_base_uint64

from support.cases import STEPS, Outcome, make_case, verified_on
from support.kernels_by_hand import elements, read_by_wgmma
from support.tcgen05_model import step_through
from tensorir_ladder.harness import execution
from tensorir_ladder.harness.build import Kernel, compiled, lower
from tensorir_ladder.harness.machines import machine_for
from tensorir_ladder.kernels.blackwell import BlackwellTile
from tensorir_ladder.kernels.codegen.toolchain import Compiler, Cubin
from tensorir_ladder.kernels.panels import TmaPanels
from tensorir_ladder.kernels.tcgen05 import TensorPanels, TensorProduct, columns_at_once
from tensorir_ladder.kernels.tcgen05_ring import tcgen05_ring
from tensorir_ladder.schedules.errors import IllegalPipeline, IllegalTile, IllegalWorkload
from tensorir_ladder.schedules.workloads import Matmul

BLACKWELL = machine_for("sm_100a")
Command = Callable[..., Outcome]


@functools.cache
def ring(shape: tuple[int, int, int], tile: str = "128x64x64", variant: str = "ring", **given: Any) -> Kernel:
    """Step 14, lowered."""
    return lower(make_case(14, shape, variant, tile=BlackwellTile.parse(tile), **given))


# Tiles


def test_a_tile_says_what_it_takes_of_both_memories() -> None:
    tile = BlackwellTile.parse("128x192x64")
    assert (tile.threads, tile.group_n, tile.tensor_columns, str(tile)) == ((4, 32), 192, 256, "128x192x64")
    assert tile.smem_bytes(2, 3) == 3 * (128 + 192) * 64 * 2 + (2 * 3 + 1) * 8 + 4
    assert tile.smem_bytes(2, 1) == 128 * 192 * 2 + 3 * 8 + 4  # results need more than one stage has
    columns = {BlackwellTile(block=(128, n, 64)).tensor_columns for n in range(16, 257, 16)}
    assert columns == {32, 64, 128, 256}


@pytest.mark.parametrize(
    ("tile", "stages", "itemsize", "clauses"),
    [
        ("64x256x64", 1, 2, ["64 rows of the block, where one tcgen05.mma has 128"]),
        ("256x256x64", 1, 2, ["256 rows of the block, where one tcgen05.mma has 128"]),
        ("128x72x64", 1, 2, ["72 columns of the block are not a multiple of 16 columns"]),
        ("128x512x64", 1, 2, ["512 columns of the block, limit 256 of a TMA box"]),
        ("128x128x32", 1, 2, ["32 steps of the k tile are not a multiple of 64"]),
        ("128x256x64", 5, 2, ["245852 bytes of shared memory in 5 stage(s), limit 232448"]),
        ("128x256x64", 2, 4, ["elements of 4 bytes, where this tcgen05.mma multiplies 16-bit ones"]),
    ],
)
def test_every_limit_of_a_tile_is_named(tile: str, stages: int, itemsize: int, clauses: list[str]) -> None:
    with pytest.raises(IllegalTile) as caught:
        BlackwellTile.parse(tile).validate(BLACKWELL.target(), itemsize, stages)
    for clause in clauses:
        assert clause in str(caught.value)


def test_tiles_are_for_blackwell_alone() -> None:
    for arch in ("sm_80", "sm_90a", "sm_120"):
        missing = BlackwellTile.missing(machine_for(arch).target())
        assert missing == f"{arch} has no tcgen05.mma fed by TMA, which is sm_100a's"
    assert BlackwellTile.missing(BLACKWELL.target()) == ""


# Descriptors, by the tables of the PTX ISA: "Matrix descriptors" and "Instruction descriptor" of tcgen05


@pytest.mark.parametrize(
    ("panels", "bits"),
    [
        # swizzle 2 << 61, version 1 << 46, 1024 bytes from eight rows to the next << 32, no panel beside (1) << 16
        (TensorPanels(128, 64, "k"), 0x4000_4040_0001_0000),
        (TensorPanels(256, 128, "k"), 0x4000_4040_0001_0000),
        # 1024 bytes from eight steps to the next; 64 rows of 128 bytes from one panel of columns to the next
        (TensorPanels(256, 64, "n"), 0x4000_4040_0200_0000),
        (TensorPanels(64, 128, "n"), 0x4000_4040_0400_0000),
    ],
)
def test_matrix_descriptors(panels: TensorPanels, bits: int) -> None:
    assert panels.descriptor_bits == bits
    leading, stride = bits >> 16 & 0x3FFF, bits >> 32 & 0x3FFF
    assert encode_smem_descriptor_base_uint64(leading, stride, 3) == bits
    assert bits == TmaPanels(panels.extent, panels.depth, panels.major).descriptor_bits | 1 << 46


@pytest.mark.parametrize(("extent", "depth", "major"), [(128, 64, "k"), (80, 128, "k"), (256, 64, "n"), (64, 128, "n")])
def test_one_descriptor_reaches_all_that_tma_has_put_there(extent: int, depth: int, major: str) -> None:
    panels = TensorPanels(extent, depth, major)
    put = elements(panels)
    for step in range(depth // 16):
        for (row, inside), place in read_by_wgmma(panels, panels.step_offset(step), extent).items():
            assert place == put[row, step * 16 + inside]


@pytest.mark.parametrize(
    ("dtype", "layout", "tile", "bits"),
    [
        # float32 sums 1 << 4, n / 8 << 17, m / 16 << 24
        ("float16", "nt", "128x256x64", 0x0840_0010),
        ("float16", "nn", "128x256x64", 0x0841_0010),  # and B's transposition 1 << 16
        ("bfloat16", "nn", "128x64x64", 0x0811_0490),  # and both operands' formats, 1 << 7 and 1 << 10
        ("bfloat16", "nt", "128x16x64", 0x0804_0490),
    ],
)
def test_instruction_descriptors(dtype: str, layout: str, tile: str, bits: int) -> None:
    product = TensorProduct.of(Matmul(128, 256, 64, dtype, layout), BlackwellTile.parse(tile))
    assert product.instruction_bits == bits
    form = (128, product.columns, 16, "float32", dtype, dtype)
    assert encode_instr_descriptor_dense_uint32(*form, trans_a=False, trans_b=layout == "nn") == bits
    text = ring((128, 256, 64), tile, dtype=dtype, layout=layout).body
    assert set(re.findall(r"mma_cta_group__1_kind__f16\(.*?, \(uint\)(\d+), \(uint\)0", text)) == {str(bits)}


@pytest.mark.parametrize(
    ("dtype", "tile", "clause"),
    [
        ("float32", "128x64x64", "no tcgen05.mma does this: operands of float32, where it takes float16 or bfloat16"),
        ("float16", "128x96x64", "96 columns per instruction of a B stored [k, n] are not a multiple of 64"),
    ],
)
def test_what_the_instruction_has_no_form_for_is_refused(dtype: str, tile: str, clause: str) -> None:
    with pytest.raises(IllegalTile, match=re.escape(clause)):
        TensorProduct.of(Matmul(128, 96, 64, dtype), BlackwellTile.parse(tile))


def test_rows_of_sums_are_loaded_in_powers_of_two() -> None:
    assert [columns_at_once(columns) for columns in (256, 192, 96, 80, 64, 16)] == [64, 64, 32, 16, 64, 16]


def test_other_inputs_are_refused_with_what_takes_them() -> None:
    with pytest.raises(IllegalWorkload) as caught:
        ring((64, 64, 100), layout="nt")
    assert caught.value.remedy == "take step 9, which copies such rows to aligned ones first"
    for stages in (0, 7):
        with pytest.raises(IllegalPipeline, match="stages of a TMA ring"):
            tcgen05_ring(Matmul(64, 64, 64, "float16"), BlackwellTile.parse("128x256x64"), stages)


# The generated CUDA

CALLS = {
    "alloc": r"tcgen05_alloc\w*\(",
    "relinquish": r"tcgen05_relinquish\w*\(",
    "dealloc": r"tcgen05_dealloc\w*\(",
    "mma": r"tcgen05_mma\w*\(",
    "commit": r"tcgen05_commit\w*\(",
    "ld": r"tcgen05_ld_ld\w*\(",
    "wait::ld": r"tcgen05_wait\w*\(",
    "init": r"mbarrier_init\w*\(",
    "expect": r"expect_tx_shared_b64\(",
    "wait": r"\bmbarrier_wait\w*\(",
    "load": r"bulk_tensor_g2s\w*\(",
    "store": r"bulk_tensor_s2g\w*\(",
    "barrier": r"cuda_cta_sync\(",
    "fence before": r"fence__before_thread_sync\(",
    "fence after": r"fence__after_thread_sync\(",
}


def counts(kernel: Kernel) -> dict[str, int]:
    """Calls in the kernel's text."""
    return {name: len(re.findall(pattern, kernel.body)) for name, pattern in CALLS.items()}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("stages", "layout"), [(1, "nn"), (2, "nt"), (3, "nn"), (4, "nt"), (5, "nn"), (6, "nt")])
@pytest.mark.parametrize("variant", ["ring", "warp_specialized"])
def test_a_turn_of_the_ring_is_written_out(variant: str, stages: int, layout: str) -> None:
    kernel = ring((128, 64, 64 * 4 * stages), variant=variant, stages=stages, layout=layout)
    fills = stages + (max(stages - 1, 1) if variant == "ring" else 0)
    once = ("alloc", "relinquish", "dealloc", "ld", "wait::ld", "store")
    assert counts(kernel) == {
        **dict.fromkeys(once, 1),
        "mma": 4 * stages,
        "commit": stages + 1,  # of each stage, and of the tile
        "init": 2 * stages + 1,
        "expect": fills,
        "load": 2 * fills,
        "wait": fills + stages + 1,
        "barrier": 2,
        "fence before": 2,
        "fence after": 2 + stages + 1,
    }
    assert kernel.instructions == {"TMA loads": 2, "TMA stores": 1, "tcgen05.mma": 4, "mbarrier waits": 2}
    assert (kernel.code.barriers, kernel.code.shared_versions) == (0, stages)
    assert kernel.threads == (128 if variant == "ring" else 192)
    assert kernel.smem_bytes == max(stages * 24576, 16384) + (2 * stages + 1) * 8 + 4


@pytest.mark.parametrize("tile", [*map(str, STEPS[14].tiles.tuning)])
def test_every_tile_expects_its_boxes_and_empties_its_columns(tile: str) -> None:
    shape = BlackwellTile.parse(tile)
    kernel = ring((512, 768, 1024), tile, stages=2)
    (size,) = set(re.findall(r"expect_tx_shared_b64\(.*, \(uint\)(\d+)\);", kernel.body))
    assert int(size) == (128 + shape.block_n) * shape.block_k * 2
    for action in ("alloc", "dealloc"):
        (columns,) = re.findall(rf"tcgen05_{action}_\w*\(.*, \(uint\)(\d+)\);", kernel.body)
        assert int(columns) == shape.tensor_columns
    found = counts(kernel)
    assert found["ld"] == found["wait::ld"] == found["store"] == shape.block_n // 64
    assert kernel.blocks == 4 * -(-768 // shape.block_n)
    assert kernel.smem_bytes == shape.smem_bytes(2, 2)


@pytest.mark.parametrize(
    ("shape", "tile", "layout", "out_dtype", "store", "count"),
    [
        ((100, 72, 200), "128x64x64", "nn", "float16", "bulk_tensor_s2g", 1),
        ((100, 72, 200), "128x64x64", "nn", "bfloat16", "bulk_tensor_s2g", 1),
        ((100, 72, 200), "128x64x64", "nn", "float32", "st_vec_global_v2_f32(", 32),
        ((100, 72, 200), "128x80x64", "nt", "float16", "st_global_b32(", 36),
        ((100, 71, 200), "128x64x64", "nt", "bfloat16", "C_ptr[", 64),
    ],
)
def test_results_leave_by_tma_where_it_can_store_them(
    shape: tuple[int, int, int], tile: str, layout: str, out_dtype: str, store: str, count: int
) -> None:
    kernel = ring(shape, tile, layout=layout, out_dtype=out_dtype)
    assert len([line for line in kernel.body.splitlines() if store in line]) == count
    assert counts(kernel)["ld"] == {"128x64x64": 1, "128x80x64": 5}[tile]


def test_each_warp_reads_its_own_lanes() -> None:
    body = ring((128, 256, 64), "128x256x64").body
    lanes = r"\(sums \+ \(\(\(uint\)\(warp_id_in_cta \* 32\)\) << \(uint\)16\)\)"
    (name,) = re.findall(rf"uint (\w+) = {lanes};", body)
    loads = re.findall(r"tcgen05_ld_ld_sync_aligned_32x32b_x64_b32_f32\(.*_ptr\[63\], (.*)\);", body)
    own = [re.sub(rf"{lanes}|\b{name}\b", "own", load) for load in loads]
    assert own == ["own", *(f"(own + (uint){column})" for column in (64, 128, 192))]


def test_only_the_debug_build_bounds_its_waits() -> None:
    assert "mbarrier_wait_bounded" not in ring((128, 64, 256)).cuda
    body = ring((128, 64, 256), variant="bounded").body
    assert set(re.findall(r'mbarrier_wait_bounded\(.*"(\w+)"', body)) == {"producer", "consumer", "reader"}


# The protocol: the generated text of each elected thread, stepped through (tests/tcgen05_model.py)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("variant", ["ring", "warp_specialized"])
@pytest.mark.parametrize(
    ("k", "layout", "stages"),
    [(8, "nt", 1), (8, "nt", 3), (832, "nt", 1), (832, "nt", 2), (832, "nt", 6), (1000, "nn", 3), (1000, "nn", 6)],
)
def test_the_protocol_multiplies_every_k_tile_once_and_in_order(k: int, layout: str, stages: int, variant: str) -> None:
    kernel = ring((128, 64, k), variant=variant, stages=stages, layout=layout)
    for seed in range(12):
        found = step_through(kernel, seed, eager=(0, 0.5, 1)[seed % 3])
        assert found == [(step, step) for step in range(0, -(-k // 64) * 64, 16)]


@pytest.mark.parametrize(
    ("change", "variant"),
    [
        ((r"mbarrier_wait\(.*, \(turn & 1\)\);", "pass;"), "ring"),
        ((r"\(turn & 1\)", "((turn + 1) & 1)"), "ring"),
        ((r"\(turn_1 & 1\)", "((turn_1 + 1) & 1)"), "warp_specialized"),
        ((r"\(\(turn \+ 1\) & 1\)", "(turn & 1)"), "warp_specialized"),
        ((r"\(uint\)24576\);", "(uint)24592);"), "ring"),
        ((r"\w*tcgen05_commit\w*\(.*\[9219\].*\);", "pass;"), "ring"),
        ((r"\(b \+ \(uint64_t\)128ULL\)", "(b + (uint64_t)129ULL)"), "ring"),
    ],
    ids=["no wait", "parity in the ring", "parity when full", "parity when free", "bytes", "not freed", "descriptor"],
)
def test_broken_protocols_are_found(change: tuple[str, str], variant: str) -> None:
    kernel = ring((128, 64, 64 * 12), variant=variant, stages=3)
    expected = [(step, step) for step in range(0, 768, 16)]

    def right(seed: int) -> bool:
        """Whether the roles come to the right end in one order of events."""
        try:
            return step_through(kernel, seed, (0, 0.5, 1)[seed % 3], change) == expected
        except AssertionError:
            return False

    assert not all(map(right, range(20)))


# The machine code


@pytest.mark.sampled(4)
@pytest.mark.compiler
@pytest.mark.parametrize(
    ("variant", "tile"),
    [("ring", tile) for tile in STEPS[14].tiles.tuning]
    + [(variant, STEPS[14].tiles.default.tile) for variant in STEPS[14].variant_names[1:]],
    ids=str,
)
def test_every_declared_tile_compiles_without_spills(variant: str, tile: BlackwellTile, compiler: Compiler) -> None:
    stages = next(count for count in (6, 4, 3) if not tile.violations(BLACKWELL.target(), 2, count))
    kernel = compiled(ring((4096, 4096, 4096), str(tile), variant, stages=stages), compiler)
    assert kernel.cubin.spill_bytes == 0
    assert kernel.cubin.smem_bytes == 0  # static shared memory would move the ring off its 1024-byte boundary
    assert 64 <= kernel.resources.registers <= 168


@pytest.mark.sampled(3)
@pytest.mark.compiler
@pytest.mark.parametrize(
    ("variant", "dtype", "layout", "out_dtype", "tile"),
    [
        ("ring", "float16", "nn", "float16", "128x256x64"),
        ("ring", "bfloat16", "nt", "bfloat16", "128x128x128"),
        ("warp_specialized", "bfloat16", "nn", "bfloat16", "128x192x64"),
        ("warp_specialized", "float16", "nt", "float32", "128x80x64"),
        ("bounded", "float16", "nn", "float32", "128x64x64"),
    ],
)
def test_the_machine_code_has_the_instructions(
    variant: str,
    dtype: str,
    layout: str,
    out_dtype: str,
    tile: str,
    compiler: Compiler,
    sass: Callable[[Cubin], str],
) -> None:
    shape, given = BlackwellTile.parse(tile), {"dtype": dtype, "layout": layout, "out_dtype": out_dtype}
    kernel = compiled(ring((256, 480, 512), tile, variant, stages=2, **given), compiler)
    assert kernel.cubin.spill_bytes == 0
    code, steps = sass(kernel.cubin), 512 // shape.block_k
    assert len(re.findall(r"\bUTCHMMA\b", code)) == 512 // 16
    assert len(re.findall(r"\bUTCBAR\b", code)) == steps + 1
    assert len(re.findall(r"\bLDTM\.x\d+", code)) == shape.block_n // columns_at_once(shape.block_n)
    assert "UTCATOMSWS.FIND_AND_SET" in code  # allocation
    assert "UTMALDG.2D" in code
    assert ("UTMASTG.2D" in code) == (out_dtype == dtype)
    assert ("SR_GLOBALTIMER" in code) == (variant == "bounded")


# The step's commands


@pytest.mark.compiler
def test_the_step_says_that_it_is_compiled_and_no_more(command: Command) -> None:
    outcome = command("run", "--step", "14", "--size", "128", "--all-variants")
    assert (outcome.code, outcome.err) == (0, "")
    variants = ("ring", "warp_specialized")
    assert verified_on(outcome) == [""] * len(variants)
    assert outcome.out.count("compiled for sm_100a") == len(variants)
    for variant in variants:
        assert re.search(rf"^{variant}: .*\d+ registers and \d+ bytes of shared memory", outcome.out, re.M)
    assert STEPS[14].verified_on("ring") == ()
    assert "never run" in STEPS[14].text


@pytest.fixture
def other_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that is no sm_100a, as far as commands ask before they use it."""
    monkeypatch.setattr(execution, "gpu_present", lambda: True)
    monkeypatch.setattr(execution, "require_gpu", lambda: None)
    monkeypatch.setattr(execution, "gpu_arch", lambda: "sm_90a")
    monkeypatch.setattr(execution, "gpu_machine", lambda: machine_for("sm_90a"))


@pytest.mark.usefixtures("other_gpu")
def test_another_gpu_is_not_asked_to_run_it(command: Command) -> None:
    for verb, code in (("run", 0), ("verify", 3)):
        outcome = command(verb, "--step", "14", "--size", "128", "--variant", "ring")
        assert (outcome.code, outcome.err) == (code, "")
        assert verified_on(outcome) == [""]
        assert "never run" in outcome.out
        assert ("speed not measured: the GPU here is sm_90a" in outcome.out) == (verb == "run")


@pytest.mark.usefixtures("other_gpu")
@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("run --step 14 --on gpu", "--step 14 needs an sm_100a: the GPU here is sm_90a; compile works for any"),
        ("tune --step 14", "--step 14 needs an sm_100a: the GPU here is sm_90a"),
        ("counters --step 14", "--step 14 needs an sm_100a: the GPU here is sm_90a"),
        ("sweep --step 14", "a sweep measures, and there is no GPU here for it"),
    ],
)
def test_where_only_its_own_gpu_would_do_it_is_refused(arguments: str, why: str, command: Command) -> None:
    outcome = command(*arguments.split())
    assert (outcome.code, outcome.out) == (2, "")
    assert why in outcome.err


def test_a_gpu_of_its_own_is_tried() -> None:
    assert STEPS[14].unverified("ring", "gpu", "sm_100a") == ""
    assert STEPS[14].unverified("ring", "gpu", "sm_90a") == STEPS[14].unverified("ring", "llvm", "sm_100a") != ""
    assert STEPS[13].unverified("stream", "gpu", "sm_90a") == ""
