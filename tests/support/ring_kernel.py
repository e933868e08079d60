"""A warp-specialized kernel for Hopper in CUDA text, to be run and broken in tests: TMA ring, wgmma, clusters.

C[m, n] = A[m, k] · B[n, k]ᵀ in float16, m a multiple of 64 · cluster, n and k of 64. A block computes 64 × 64. Warps
0 to 3 multiply; warp 4 brings tiles, of B only its share of the rows, for all blocks of the cluster.
"""

from __future__ import annotations

import re

import numpy as np

from tensorir_ladder.emulator import EmulatedProgram, LaunchPlan, TensorMap
from tensorir_ladder.emulator.source import PREAMBLE_END

REGISTERS = ", ".join(f"%{i}" for i in range(32))
ACCUMULATORS = ", ".join(f'"+f"(c[{i}])' for i in range(32))
HELPERS = f"""
typedef unsigned long long ull;
#define DEVICE __forceinline__ __device__
DEVICE uint shared(const void* p) {{ return (uint)__cvta_generic_to_shared(p); }}
DEVICE void init(uint a, uint n) {{ asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(a), "r"(n) : "memory"); }}
DEVICE void expect(uint a, uint bytes) {{
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" :: "r"(a), "r"(bytes) : "memory");
}}
DEVICE void arrive(uint a, uint rank) {{
  asm volatile("{{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;\\n"
               "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there]; }}" :: "r"(a), "r"(rank) : "memory");
}}
DEVICE void wait(uint a, uint parity) {{
  asm volatile("{{\\n.reg .pred P1;\\nAGAIN:\\nmbarrier.try_wait.parity.shared.b64 P1, [%0], %1;\\n"
               "@P1 bra.uni DONE;\\nbra.uni AGAIN;\\nDONE:\\n}}" :: "r"(a), "r"(parity) : "memory");
}}
DEVICE void load(uint to, const void* map, int x, int y, uint barrier, unsigned short mask) {{
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
               " [%0], [%1, {{%2, %3}}], [%4], %5;"
               :: "r"(to), "l"(map), "r"(x), "r"(y), "r"(barrier), "h"(mask) : "memory");
}}
DEVICE void store(const void* map, int x, int y, uint from) {{
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {{%1, %2}}], [%3];"
               :: "l"(map), "r"(x), "r"(y), "r"(from) : "memory");
}}
DEVICE ull descriptor(uint a) {{ return 1ull << 62 | 64ull << 32 | 1ull << 16 | (a & 0x3FFFF) >> 4; }}
DEVICE void multiply(float* c, ull a, ull b, int add) {{
  asm volatile("{{ .reg .pred p; setp.ne.b32 p, %34, 0;"
               " wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {{{REGISTERS}}}, %32, %33, p, 1, 1, 0, 0; }}"
               : {ACCUMULATORS} : "l"(a), "l"(b), "r"(add));
}}
"""
KERNEL = """
extern "C" __global__ void __launch_bounds__(160) ring(const __grid_constant__ CUtensorMap A_map, \
const __grid_constant__ CUtensorMap B_map, const __grid_constant__ CUtensorMap C_map, int tiles) {
  extern __shared__ __align__(64) uchar pool[];
  uint rank, start = shared(pool), full = start + STAGES * 16384, empty = full + 8 * STAGES;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      init(full + 8 * s, 1);
      init(empty + 8 * s, 4 * CLUSTER);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  asm volatile("barrier.cluster.arrive.aligned;");
  asm volatile("barrier.cluster.wait.aligned;");
  if (threadIdx.x >= 128) {
    if (threadIdx.x == 128) {
      uint phase = 1;
      for (int k = 0; k < tiles; ++k) {
        int s = k % STAGES;
        wait(empty + 8 * s, phase);
        expect(full + 8 * s, 16384);
        load(start + s * 16384, &A_map, k * 64, blockIdx.x * 64, full + 8 * s, 1 << rank);
        load(start + s * 16384 + 8192 + rank * (8192 / CLUSTER), &B_map, k * 64,
             blockIdx.y * 64 + rank * (64 / CLUSTER), full + 8 * s, (1 << CLUSTER) - 1);
        if (s == STAGES - 1) phase ^= 1;
      }
    }
  } else {
    alignas(64) float c[32];
    uint phase = 0;
    for (int k = 0; k < tiles; ++k) {
      int s = k % STAGES;
      wait(full + 8 * s, phase);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
      ull a = descriptor(start + s * 16384), b = descriptor(start + s * 16384 + 8192);
      for (int step = 0; step < 4; ++step) multiply(c, a + 2 * step, b + 2 * step, k + step != 0);
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
      if (k && threadIdx.x % 32 == 0)
        for (int r = 0; r < CLUSTER; ++r) arrive(empty + 8 * ((k - 1) % STAGES), r);
      if (s == STAGES - 1) phase ^= 1;
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    uint out = start + STAGES * 16384 + 1024, row = threadIdx.x / 32 * 16 + threadIdx.x % 16;
    for (int piece = 0; piece < 8; piece += 2) {
      uint h[4], at = piece + threadIdx.x % 32 / 16;
      for (int r = 0; r < 4; ++r)
        asm volatile("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(h[r]) : "f"(c[piece * 4 + 2 * r + 1]), \
"f"(c[piece * 4 + 2 * r]));
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                   :: "r"(out + row * 128 + (at ^ row % 8) * 16), "r"(h[0]), "r"(h[1]), "r"(h[2]), "r"(h[3]));
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("bar.sync 1, 128;" ::: "memory");
    if (threadIdx.x == 0) {
      store(&C_map, blockIdx.y * 64, blockIdx.x * 64, out);
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
      asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    }
  }
  asm volatile("barrier.cluster.arrive.aligned;");
  asm volatile("barrier.cluster.wait.aligned;");
}
"""


def ring_text(stages: int = 3, cluster: int = 1) -> str:
    """Write the kernel's text with a ring of so many stages, for clusters of so many blocks."""
    text = KERNEL.replace("STAGES", str(stages)).replace("CLUSTER", str(cluster))
    return PREAMBLE_END + HELPERS + text


def ring_program(
    shape: tuple[int, int, int] = (128, 64, 320), stages: int = 3, cluster: int = 1, text: str = ""
) -> EmulatedProgram:
    """Make the kernel, or another text of it, a program for products of one shape."""
    m, n, k = shape
    parameters = (
        TensorMap("A", "float16", (k, m), (2 * k,), (64, 64), 3),
        TensorMap("B", "float16", (k, n), (2 * k,), (64, 64 // cluster), 3),
        TensorMap("C", "float16", (n, m), (2 * n,), (64, 64), 3),
        -(-k // 64),
    )
    grid = (-(-m // 64 // cluster) * cluster, -(-n // 64), 1)
    launch = LaunchPlan("ring", parameters, grid, (160, 1, 1), (cluster, 1, 1), stages * 16384 + 1024 + 8192)
    return EmulatedProgram("ring", text or ring_text(stages, cluster), (launch,), ("A", "B", "C"), operands=("A", "B"))


def run_ring(program: EmulatedProgram, shape: tuple[int, int, int], seed: int = 0) -> float:
    """Multiply small whole numbers; returns the largest error, which is 0 where the kernel is right."""
    m, n, k = shape
    generator = np.random.default_rng(seed)
    a, b = (generator.integers(-2, 3, (rows, k)).astype(np.float16) for rows in (m, n))
    c = np.full((m, n), np.nan, np.float16)
    program(a, b, c, seed=seed)
    return float(np.max(np.abs(c.astype(np.float64) - a.astype(np.float64) @ b.T.astype(np.float64))))


def edited(text: str, pattern: str, replacement: str, count: int = 1) -> str:
    """Replace the first matches of a pattern in the kernel, not in the helpers."""
    at = text.index('extern "C"')
    changed, found = re.subn(pattern, replacement, text[at:], count=count)
    assert found, pattern
    return text[:at] + changed
