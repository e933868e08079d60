"""wgmma whose first operand is in registers, as TVM writes it, and the rules that its registers are under."""

from __future__ import annotations

from itertools import product

import ml_dtypes
import numpy as np
import pytest

from support.emulated_text import place_operand, run_text, words
from tensorir_ladder.emulator import KernelFault

pytestmark = pytest.mark.emulator

SEEDS = range(6)  # each completion twice: early, late, drawn
DTYPES = {"f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
STEPS, DEPTH, WIDTH = 2, 32, 32  # instructions, elements along k, bytes of a swizzled row
FENCE = 'asm volatile("wgmma.fence.sync.aligned;");'
COMMIT = 'asm volatile("wgmma.commit_group.sync.aligned;");'
AWAIT = 'asm volatile("wgmma.wait_group.sync.aligned 0;");'


def helper(columns: int, dtype: str, transposed: int) -> str:
    """Write the function that TVM 0.27 prints of the instruction: A's registers are taken by value."""
    sums = columns // 2
    numbers = [f"%{i}" for i in range(sums + 4)]
    taken = [*(f"float& __d{i}" for i in range(sums)), *(f"uint32_t __a{i}" for i in range(4))]
    given = [*(f'"r"(__a{i})' for i in range(4)), '"l"(__b_desc)', '"r"(__scale_d)']
    return f"""
__forceinline__ __device__ void multiply({", ".join(taken)}, uint64_t __b_desc, uint32_t __scale_d) {{
  asm volatile("{{ .reg .pred ps0; setp.ne.b32 ps0, %{sums + 5}, 0; \
wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{dtype}.{dtype} \
{{{", ".join(numbers[:sums])}}}, {{{", ".join(numbers[sums:])}}}, %{sums + 4}, ps0, 1, 1, {transposed}; }}" : \
{", ".join(f'"+f"(__d{i})' for i in range(sums))} : {", ".join(given)});
}}
"""


def call(columns: int, step: int, sums: str = "c") -> str:
    """Multiply by one step's four registers of p."""
    given = [*(f"{sums}[{i}]" for i in range(columns // 2)), *(f"p[{4 * step + r}]" for r in range(4))]
    return f"multiply({', '.join(given)}, b + {step * columns * 2}, add);"


def kernel(columns: int, transposed: int, steps: str) -> str:
    """Write a body: B to shared memory, a thread's part of A to p, ``steps``, and the sums c to the output."""
    down, across = 8 * WIDTH // 16, columns // 8 * 8 * WIDTH // 16
    if transposed:
        down, across = 8 * WIDTH // 16, 16 // 8 * 8 * WIDTH // 16
    return f"""
  extern __shared__ __align__(64) uchar pool[];
  alignas(64) float c[{columns // 2}];
  alignas(64) float other[{columns // 2}];
  alignas(64) uint p[{4 * STEPS}];
  int add = 1, row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  for (int i = threadIdx.x; i < {STEPS * columns * 8}; i += 128) ((uint*)pool)[i] = in1[i];
  for (int i = 0; i < {columns // 2}; ++i) c[i] = other[i] = 1;
  for (int r = 0; r < {4 * STEPS}; ++r)
    p[r] = in0[(row + r % 2 * 8) * {DEPTH // 2} + r / 2 * 4 + threadIdx.x % 4];
  asm volatile("fence.proxy.async.shared::cta;");
  __syncthreads();
  unsigned long long b = (__cvta_generic_to_shared(pool) >> 4) + {(3 << 62) + (down << 32) + (across << 16)}ull;
  {steps}
  for (int i = 0; i < {columns // 2}; ++i)
    ((float*)out)[(row + i / 2 % 2 * 8) * {columns} + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2] = c[i];
"""


def wrong_by(columns: int, steps: str, seed: int, dtype: str = "f16", transposed: int = 0) -> float:
    """Run it on small whole numbers; returns the largest difference from 1 + A · Bᵀ, 0 where it is right."""
    generator = np.random.default_rng(seed)
    a, b = (generator.integers(-3, 4, (rows, DEPTH)).astype(DTYPES[dtype]) for rows in (64, columns))
    memory, size = np.zeros(STEPS * columns * WIDTH, np.uint8), columns * WIDTH
    for step in range(STEPS):
        part = np.ascontiguousarray(b[:, 16 * step : 16 * step + 16])
        place_operand(part, memory, step * size, WIDTH, "mn" if transposed else "k")
    body, functions = kernel(columns, transposed, steps), helper(columns, dtype, transposed)
    out = words(64 * columns)
    run_text(body, out, a, memory, threads=128, helpers=functions, dynamic=memory.size, seed=seed)
    expected = 1 + a.astype(np.float32) @ b.T.astype(np.float32)
    return float(np.abs(out.view(np.float32).reshape(expected.shape) - expected).max())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "transposed"), [(8, 0), *product((64, 128, 256), (0, 1))])
def test_the_first_operand_is_read_from_registers(columns: int, dtype: str, transposed: int) -> None:
    steps = f"{FENCE} {call(columns, 0)} {call(columns, 1)} {COMMIT} {AWAIT}"
    for seed in SEEDS:
        assert wrong_by(columns, steps, seed, dtype, transposed) == 0


MULTIPLIED = f"{FENCE} {call(16, 0)} {call(16, 1)}"
OTHERS = call(16, 1, "other")
LEGAL = {
    "read in flight": f"{MULTIPLIED} {COMMIT} if (p[3] == 1) __trap(); {AWAIT}",
    "written after the wait": f"{MULTIPLIED} {COMMIT} {AWAIT} p[3] = 0;",
    "written, and fenced": f"p[0] ^= 1; p[0] ^= 1; {MULTIPLIED} {COMMIT} {AWAIT}",
    "one group of two awaited": f"{FENCE} {call(16, 0)} {COMMIT} {call(16, 1)} {COMMIT} "
    f'asm volatile("wgmma.wait_group.sync.aligned 1;"); p[3] = 0; {AWAIT}',
    "read by two in flight": f"{MULTIPLIED} {OTHERS} {COMMIT} {AWAIT}",
}
IN_FLIGHT, NO_FENCE = "register in flight", "missing wgmma.fence"
FAULTS = {
    "written in flight": (f"{MULTIPLIED} {COMMIT} p[3] = 0; {AWAIT}", IN_FLIGHT, "still reads is written by"),
    "written before the commit": (f"{MULTIPLIED} p[7] = 0; {COMMIT} {AWAIT}", IN_FLIGHT, "still reads is written by"),
    "written though a group is left": (
        f"{FENCE} {call(16, 0)} {COMMIT} {call(16, 1)} {COMMIT} "
        f'asm volatile("wgmma.wait_group.sync.aligned 1;"); p[4] = 0; {AWAIT}',
        IN_FLIGHT,
        "still reads is written by",
    ),
    "given to be added to": (
        f"{MULTIPLIED} {call(16, 1, '((float*)p)')} {COMMIT} {AWAIT}",
        IN_FLIGHT,
        "still reads is added to by another one",
    ),
    "sums in flight as an operand": (
        f"{MULTIPLIED} {OTHERS.replace('p[', '((uint*)c)[')} {COMMIT} {AWAIT}",
        IN_FLIGHT,
        "still adds to is read by another one",
    ),
    "sums used in flight": (
        f"{MULTIPLIED} {COMMIT} if (c[3] == 0.5f) __trap(); {AWAIT}",
        IN_FLIGHT,
        "still adds to is used by",
    ),
    "no fence": (f"{call(16, 0)} {COMMIT} {AWAIT}", NO_FENCE, "or there was none"),
    "written after the fence": (f"{FENCE} p[1] = 0; {call(16, 0)} {COMMIT} {AWAIT}", NO_FENCE, "written since"),
    "written between two": (
        f"{FENCE} {call(16, 0)} p[7] = 0; {call(16, 1)} {COMMIT} {AWAIT}",
        NO_FENCE,
        "written since",
    ),
    "computed in the call": (
        f"{FENCE} {call(16, 0).replace('p[2]', 'p[2] + 1')} {COMMIT} {AWAIT}",
        NO_FENCE,
        "written since",
    ),
    "loaded in the call": (
        f"{FENCE} {call(16, 0).replace('p[2]', 'in0[2]')} {COMMIT} {AWAIT}",
        NO_FENCE,
        "written since",
    ),
    "other sums written after the fence": (
        f"{MULTIPLIED} {OTHERS} {COMMIT} {AWAIT} {FENCE} c[0] = 1; {OTHERS} {call(16, 0)} {COMMIT} {AWAIT}",
        NO_FENCE,
        "written since",
    ),
    "not awaited": (f"{MULTIPLIED} {COMMIT} return;", "unawaited", "a wgmma is not awaited"),
}


@pytest.mark.parametrize("name", LEGAL)
def test_registers_may_be_used(name: str) -> None:
    for seed in SEEDS:
        assert np.isfinite(wrong_by(16, LEGAL[name], seed))


@pytest.mark.parametrize("name", FAULTS)
def test_registers_that_must_not_be_used_are_a_fault(name: str) -> None:
    steps, kind, said = FAULTS[name]
    for seed in SEEDS:
        with pytest.raises(KernelFault, match=said) as fault:
            wrong_by(16, steps, seed)
        assert fault.value.kind == kind


def test_each_block_begins_with_registers_of_its_own() -> None:
    """What the block before has written or lent says nothing of this one's."""
    body = kernel(16, 0, f"{MULTIPLIED} {COMMIT} {AWAIT} for (int r = 0; r < 8; ++r) p[r] = 0;")
    functions, memory = helper(16, "f16", 0), np.zeros(STEPS * 16 * WIDTH, np.uint8)
    out = words(64 * 16)
    body = body.replace("((float*)out)", "if (blockIdx.x == 0) ((float*)out)")
    a = np.ones((64, DEPTH), np.float16)
    run_text(body, out, a, memory, threads=128, helpers=functions, dynamic=memory.size, cluster=2)
    assert set(out.view(np.float32)) == {1.0}
