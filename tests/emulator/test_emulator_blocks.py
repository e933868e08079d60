"""Blocks that wait for other blocks: sums that go from helpers to owners through device memory, whole and broken."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from support.cases import hopper, make_case
from support.ring_kernel import edited
from tensorir_ladder.emulator import EmulatedProgram, KernelFault, LaunchPlan, PlainBuffer
from tensorir_ladder.emulator.source import PREAMBLE_END
from tensorir_ladder.harness.build import Kernel, lower
from tensorir_ladder.harness.emulation import EmulatorBackend, emulated
from tensorir_ladder.harness.verify import verify, verify_launch
from tensorir_ladder.kernels.stream_k import plan_for
from tensorir_ladder.kernels.tiles import RoleTile

pytestmark = pytest.mark.emulator

SEEDS = range(8)
# Blocks 1 and 2 leave 32 numbers each, and raise the flag; block 0 waits for both, loads the numbers, and adds them.
HAND_OVER = """
extern "C" __global__ void __launch_bounds__(32) hand_over(float* __restrict__ out, float* __restrict__ in0, \
float* __restrict__ sums, int* __restrict__ flag) {
  __shared__ alignas(128) float tile[64];
  __shared__ alignas(8) uint64_t bar[1];
  if (blockIdx.x) {
    int at = (blockIdx.x - 1) * 32 + threadIdx.x;
    __stcg(sums + at, in0[at]);
    __threadfence();
    asm volatile("fence.proxy.async;" ::: "memory");
    __syncwarp();
    if (threadIdx.x == 0) asm volatile("red.release.gpu.global.add.s32 [%0], 1;" :: "l"(flag) : "memory");
  } else {
    uint b = (uint)__cvta_generic_to_shared(bar);
    if (threadIdx.x == 0) {
      asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(b), "r"(1));
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      int raised;
      do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(raised) : "l"(flag) : "memory");
      while (raised < 2);
      asm volatile("st.relaxed.gpu.global.s32 [%0], 0;" :: "l"(flag) : "memory");
      asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" :: "r"(b), "r"(256) : "memory");
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
        :: "r"((uint)__cvta_generic_to_shared(tile)), "l"(sums), "r"(256), "r"(b) : "memory");
    }
    __syncwarp();
    asm volatile("{\\n.reg .pred p;\\nAGAIN:\\nmbarrier.try_wait.parity.shared.b64 p, [%0], 0;\\n"
      "@!p bra AGAIN;\\n}" :: "r"(b));
    out[threadIdx.x] = tile[threadIdx.x] + tile[32 + threadIdx.x];
  }
}
"""


def hand_over(text: str = PREAMBLE_END + HAND_OVER, blocks: int = 3, resident: int = 3) -> list[np.ndarray]:
    """Run the kernel of that text with each of some seeds; returns the outputs."""
    names = ("out", "in0", "sums", "flag")
    launch = LaunchPlan("hand_over", tuple(map(PlainBuffer, names)), (blocks, 1, 1), (32, 1, 1))
    memory = (((64,), np.dtype(np.float32)), ((1,), np.dtype(np.int32)))
    program = EmulatedProgram("hand_over", text, (launch,), names, memory, resident)
    outputs = []
    for seed in SEEDS:
        outputs.append(np.full(32, np.nan, np.float32))
        program(outputs[-1], np.arange(64, dtype=np.float32), seed=seed)
    return outputs


def test_a_flag_hands_over_what_was_written_before_it() -> None:
    for output in hand_over():
        np.testing.assert_array_equal(output, 32 + 2 * np.arange(32))


BROKEN = {
    "the flag is raised before the sums": (r"(__stcg\(.*?\n)(.*?)(if \(threadIdx.*?;\n)", r"\3\1\2", "race"),
    "the flag is read without acquire": (r"ld\.acquire", "ld.relaxed", "race"),
    "the flag is raised without release": (r"red\.release", "red.relaxed", "race"),
    "one lane speaks for all before they have met": (r"__syncwarp\(\);", "", "race"),
    "one helper is not waited for": (r"raised < 2", "raised < 1", "race"),
    "the flag is not waited for": (r"raised < 2", "raised < 0", "race"),
    "a helper too many is waited for": (r"raised < 2", "raised < 3", "deadlock"),
    "the flag is not lowered": (r'asm volatile\("st\.relaxed.*?;" ::.*?;', "", "flag left raised"),
    "helpers leave their sums at the same place": (r"__stcg\(sums \+ at", "__stcg(sums + at % 32", "race"),
    "no proxy fence": (r'asm volatile\("fence\.proxy\.async;" ::: "memory"\);', "", "missing proxy fence"),
    "bytes that are no multiple of 16": (r'"r"\(256\), "r"\(b\)', '"r"(264), "r"(b)', "TMA"),
    "an address that is no multiple of 16": (r'"l"\(sums\)', '"l"(sums + 1)', "misaligned"),
    "sums beyond the array": (r'"l"\(sums\)', '"l"(sums + 4)', "out of bounds"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_flag_is_found(name: str) -> None:
    pattern, replacement, kind = BROKEN[name]
    text = edited(PREAMBLE_END + HAND_OVER, f"(?s){pattern}", replacement)
    with pytest.raises(KernelFault) as fault:
        hand_over(text)
    assert fault.value.kind == kind, str(fault.value)


def test_blocks_that_find_no_room_are_named() -> None:
    with pytest.raises(KernelFault) as fault:
        hand_over(resident=1)
    assert fault.value.kind == "deadlock"
    found = r"thread 0 of block \(0, 0, 0\) waits at a flag in global memory \(which is \d\) at line \d+: .*ld\.acquire"
    assert re.search(found, str(fault.value))
    assert re.search(r"and \d blocks have not begun, as no more than 1 are alive together", str(fault.value))


# Step 13 with a cut last wave


@cache
def cut_kernel(
    shape: tuple[int, int, int], tile: str, stages: int, multiprocessors: int, variant: str = "stream"
) -> Kernel:
    """Lower step 13 for a machine so small that the last wave is cut."""
    case = make_case(13, shape, variant, tile=RoleTile.parse(tile), stages=stages)
    small = replace(case.machine, multiprocessors=multiprocessors)
    assert plan_for(case.problem, case.tile, hopper(multiprocessors), 2 if variant == "multicast" else 1).helpers
    return lower(replace(case, machine=small))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("shape", "tile", "stages", "multiprocessors", "variant"),
    [
        ((64, 64, 1152), "64x64x64/1x1", 2, 5, "stream"),
        ((60, 104, 1208), "64x128x64/1x1", 4, 5, "overlapped"),
        ((192, 256, 640), "64x128x64/1x1", 3, 5, "bounded"),
        ((384, 128, 640), "64x128x64/1x1", 3, 4, "multicast"),
    ],
    ids=lambda given: str(given),
)
def test_explicit_kernels_are_right_with_a_cut_last_wave(
    shape: tuple[int, int, int], tile: str, stages: int, multiprocessors: int, variant: str
) -> None:
    assert verify(cut_kernel(shape, tile, stages, multiprocessors, variant), EmulatorBackend()).on == "emulator"


def test_a_tile_of_one_box_keeps_the_last_ones_results() -> None:
    verify(cut_kernel((192, 64, 320), "64x64x64/1x1", 2, 2), EmulatorBackend())


RAISE = r"if \(\(\(\(int\)threadIdx\.x\) % 128\) == 0\) \{\s*raise_flag\(.*?\);\s*\}\n"
BROKEN_STEP = {
    "the flag is raised before the sums": (rf"((?:hand_over|leave_sums)\(\(&.*?)({RAISE})", r"\2\1", "race"),
    "the flag is read without acquire": (r"ld\.acquire", "ld.relaxed", "race"),
    "the flag is not lowered": (r'asm volatile\("st\.relaxed.*?;" ::.*?;', "", "flag left raised"),
    "no barrier before the flag": (rf"tvm_builtin_cuda_warpgroup_sync\([^\n]*(\s*{RAISE})", r"\1", "race"),
    "the flag is not waited for": (r"await_flag\(\(&[^\n]*", "", "race"),
    "a helper stores its part, too": (r"(raise_flag\(\(&.*?)late_waiting_ptr\[0\] = 0;", r"\1", "stored twice"),
}


@pytest.mark.parametrize("name", BROKEN_STEP)
def test_a_broken_cut_is_found(name: str) -> None:
    pattern, replacement, kind = BROKEN_STEP[name]
    kernel = cut_kernel((64, 64, 1152), "64x64x64/1x1", 2, 5)
    changed, found = re.subn(f"(?s){pattern}", replacement, kernel.cuda, count=1)
    assert found, name
    program, seeds = replace(emulated(kernel), cuda=changed), iter(SEEDS)
    with pytest.raises(KernelFault) as fault:
        verify_launch(
            lambda *arrays: program(*arrays, seed=next(seeds)), kernel.case.problem, EmulatorBackend(), "broken"
        )
    assert fault.value.kind == kind, str(fault.value)
