"""Who may store where in global memory: nobody to an operand, one thread of a launch to an element of an output."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tensorir_ladder.emulator import EmulatedProgram, KernelFault, LaunchPlan, PlainBuffer, TensorMap, UnknownLaunch
from tensorir_ladder.emulator.source import PREAMBLE_END

pytestmark = pytest.mark.emulator

HELPERS = """
#define DEVICE __forceinline__ __device__
DEVICE void store(float* to, float x) { asm volatile("st.global.f32 [%0], %1;" :: "l"(to), "f"(x) : "memory"); }
DEVICE void store4(float* to, float x) {
  asm volatile("st.global.v4.f32 [%0], {%1, %1, %1, %1};" :: "l"(to), "f"(x) : "memory");
}
DEVICE void add(float* to, float x) { asm volatile("red.global.add.f32 [%0], %1;" :: "l"(to), "f"(x) : "memory"); }
DEVICE void send(const void* map, uint from, int row) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];"
               :: "l"(map), "r"(0), "r"(row), "r"(from) : "memory");
  asm volatile("cp.async.bulk.commit_group;");
  asm volatile("cp.async.bulk.wait_group.read 0;");
}
DEVICE void send_sum(const void* map, uint from, int row) {
  asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%1, %2}], [%3];"
               :: "l"(map), "r"(0), "r"(row), "r"(from) : "memory");
  asm volatile("cp.async.bulk.commit_group;");
  asm volatile("cp.async.bulk.wait_group.read 0;");
}
"""
KERNEL = """
extern "C" __global__ void __launch_bounds__(32) stores(float* __restrict__ out, float* __restrict__ in, \
const __grid_constant__ CUtensorMap out_map, const __grid_constant__ CUtensorMap in_map) {
  extern __shared__ __align__(64) uchar pool[];
  uint box = (uint)__cvta_generic_to_shared(pool);
  int thread = (int)threadIdx.x, block = (int)blockIdx.x, here = block * 32 + thread;
  if (thread == 0) for (int i = 0; i < 32; ++i) ((float*)pool)[i] = 1;
  asm volatile("fence.proxy.async;" ::: "memory");
  __syncwarp();
  BODY
}
"""
ROWS, COLUMNS = 4, 8


def run_stores(body: str, seed: int = 0) -> np.ndarray:
    """Run two blocks of 32 threads with this body, on an output of zeros and an operand of 64 elements."""
    maps = [TensorMap(name, "float32", (COLUMNS, 2 * ROWS), (4 * COLUMNS,), (COLUMNS, ROWS)) for name in ("out", "in")]
    parameters = (PlainBuffer("out"), PlainBuffer("in"), *maps)
    launch = LaunchPlan("stores", parameters, (2, 1, 1), (32, 1, 1), shared_bytes=1024)
    text = PREAMBLE_END + HELPERS + KERNEL.replace("BODY", body)
    out = np.zeros((2 * ROWS, COLUMNS), np.float32)
    program = EmulatedProgram("stores", text, (launch,), ("out", "in"), operands=("in",))
    program(out, np.ones((2 * ROWS, COLUMNS), np.float32), seed=seed)
    return out


@pytest.mark.parametrize(
    ("body", "sums"),
    [
        ("out[here] = in[here]; out[here] += in[here];", 2),
        ("if (here < 16) { store4(out + 4 * here, 1); out[4 * here] = 1; }", 1),
        ("for (int i = thread; i < 64; i += 32) add(out + i, 1);", 2),
        ("if (thread == 0) send(&out_map, box, 4 * block);", 1),
        ("if (thread < 2) send_sum(&out_map, box, 4 * thread);", 2),
        ("if (thread == 0) send_sum(&out_map, box, 4 * block); add(out + here, 1);", 2),
    ],
    ids=["again by itself", "a vector", "added to by many", "by TMA", "sums by TMA", "sums both ways"],
)
def test_an_element_is_stored_by_one_or_added_to_by_many(body: str, sums: int) -> None:
    for seed in range(3):
        assert (run_stores(body, seed) == sums).all()


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("out[thread] = 1;", r"out\[thread\]"),
        ("store(out + thread, 1);", r"store\(out"),
        ("if (thread < 2) store4(out + 4 * block, 1);", r"store4\(out"),
        ("if (thread == 0) send(&out_map, box, 2 * block);", r"send\(&out"),
        ("if (thread == block) send(&out_map, box, 4);", r"send\(&out"),
        ("out[here] = 1; __syncwarp(); out[here ^ 1] = 1;", r"out\[here \^ 1\]"),
        ("if (thread == 0) send(&out_map, box, 4 * block); else out[here] = 1;", r"out"),
        ("if (thread) add(out + here, 1); out[here & ~1] = 1;", r"out"),
    ],
    ids=[
        "by two blocks",
        "by PTX",
        "by vectors",
        "by two blocks' TMA",
        "by two boxes",
        "one after the other",
        "by TMA and by a thread",
        "added to and stored",
    ],
)
def test_an_element_stored_by_two_threads_is_a_fault(body: str, line: str) -> None:
    for seed in range(3):
        with pytest.raises(KernelFault) as fault:
            run_stores(body, seed)
        assert fault.value.kind == "stored twice", str(fault.value)
        assert re.search(rf"element \d+ of argument 0 .* by thread .* at line \d+: .*{line}", str(fault.value))
        assert re.search(r"\n  after it was .* at line \d+: ", str(fault.value))


@pytest.mark.parametrize(
    "body",
    [
        "in[here] = in[here] + 1;",
        "store(in + here, 0);",
        "if (here < 16) store4(in + 4 * here, 0);",
        "add(in + here, 0);",
        "if (here == 0) send(&in_map, box, 0);",
        "if (here == 0) send_sum(&in_map, box, 0);",
    ],
    ids=["itself", "PTX", "vectors", "additions", "TMA", "sums by TMA"],
)
def test_an_operand_that_is_written_is_a_fault(body: str) -> None:
    for seed in range(3):
        with pytest.raises(KernelFault) as fault:
            run_stores("out[here] = 1; " + body, seed)
        assert fault.value.kind == "operand written", str(fault.value)
        assert re.search(r"bytes 0x\w+ to 0x\w+ of argument 1.* at line \d+: ", str(fault.value))


def test_tensor_maps_lie_within_their_arrays() -> None:
    maps = tuple(TensorMap(name, "float32", (8, 9), (32,), (8, 4)) for name in ("out", "in"))
    launch = LaunchPlan(
        "stores", (PlainBuffer("out"), PlainBuffer("in"), *maps), (1, 1, 1), (32, 1, 1), shared_bytes=1024
    )
    text = PREAMBLE_END + HELPERS + KERNEL.replace("BODY", "if (thread == 0) send(&out_map, box, 0);")
    program = EmulatedProgram("stores", text, (launch,), ("out", "in"), operands=("in",))
    with pytest.raises(KernelFault, match="out of bounds"):
        program(np.zeros((8, 8), np.float32), np.zeros((8, 8), np.float32))


def test_operands_are_among_what_is_given() -> None:
    with pytest.raises(UnknownLaunch, match="operands sums of stores, not among out, in"):
        EmulatedProgram("stores", "", (), ("out", "in", "sums"), (((1,), np.dtype("float32")),), operands=("sums",))
