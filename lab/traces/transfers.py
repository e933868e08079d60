"""Probes of TMA: where a box's bytes go in shared memory, where from there, and what lies beyond a tensor's edge."""

from __future__ import annotations

import numpy as np

from tensorir_ladder.emulator import TensorMap
from tensorir_ladder.lab.traces.probe import OUT, Probe, table

COLUMNS, ROWS = 72, 18  # of the tensors; 144 bytes a row are no multiple of any swizzle's width
BOX_ROWS = 10  # more than the eight that a swizzle permutes
WIDTHS = {"none": 48, "32": 32, "64": 64, "128": 128}  # bytes of a box's row
NUMBERS = {"none": 0, "32": 1, "64": 2, "128": 3}  # as CUDA has the swizzles
POOL_BYTES, BARRIER, UNTOUCHED = 4096, 2048, 0xAAAA
# Column and row of a box's first element. Columns are multiples of 16 bytes: an H200 takes no others.
INSIDE, BEYOND_END, BEFORE_START = (8, 3), (64, 14), (-8, -3)
CORNERS = {"inside": INSIDE, "beyond_the_end": BEYOND_END, "before_the_start": BEFORE_START}
STORED = ("inside", "beyond_the_end")  # a store before the start is an illegal instruction on an H200
RAGGED = 69  # columns that end within 16 bytes, in the same rows
SHIFT = 256  # a destination that no wider swizzle's pattern begins at

LOADS = f"""
DEVICE void begin(uint barrier) {{
  if (threadIdx.x == 0) {{
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(barrier), "r"(1) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }}
  asm volatile("fence.proxy.async;" ::: "memory");
}}
DEVICE void expect(uint barrier, int bytes) {{
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}}
DEVICE void wait(uint barrier) {{
  asm volatile("{{\\n.reg .pred P1;\\nAGAIN:\\nmbarrier.try_wait.parity.shared.b64 P1, [%0], 0;\\n"
               "@P1 bra.uni DONE;\\nbra.uni AGAIN;\\nDONE:\\n}}" :: "r"(barrier) : "memory");
}}
extern "C" __global__ void __launch_bounds__(32) tma_load(const __grid_constant__ CUtensorMap map, \
uint* __restrict__ out, int x, int y, int shift, int bytes) {{
  extern __shared__ __align__(1024) uchar pool[];
  uint start = (uint)__cvta_generic_to_shared(pool), barrier = start + {BARRIER};
  for (int i = threadIdx.x; i < {BARRIER // 4}; i += 32) ((uint*)pool)[i] = 0xAAAAAAAAu;
  begin(barrier);
  __syncthreads();
  if (threadIdx.x == 0) {{
    expect(barrier, bytes);
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {{%2, %3}}], [%4];"
      :: "r"(start + shift), "l"(&map), "r"(x), "r"(y), "r"(barrier) : "memory");
  }}
  wait(barrier);
  for (int i = threadIdx.x; i < {BARRIER // 4}; i += 32) out[i] = ((uint*)pool)[i];
}}
extern "C" __global__ void __launch_bounds__(32) tma_multicast(const __grid_constant__ CUtensorMap map, \
uint* __restrict__ out, int x, int y, int shift, int bytes) {{
  extern __shared__ __align__(1024) uchar pool[];
  uint rank, start = (uint)__cvta_generic_to_shared(pool), barrier = start + {BARRIER};
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  for (int i = threadIdx.x; i < {BARRIER // 4}; i += 32) ((uint*)pool)[i] = 0xAAAAAAAAu;
  begin(barrier);
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  if (threadIdx.x == 0) {{
    expect(barrier, bytes);
    if (rank == 1) {{
      asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {{%2, %3}}], [%4], %5;"
        :: "r"(start + shift), "l"(&map), "r"(x), "r"(y), "r"(barrier), "h"((unsigned short)3) : "memory");
    }}
  }}
  wait(barrier);
  for (int i = threadIdx.x; i < {BARRIER // 4}; i += 32) out[rank * {BARRIER // 4} + i] = ((uint*)pool)[i];
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}}
"""


def _store_kernel(name: str, opcode: str, operation: str = "") -> str:
    return f"""
extern "C" __global__ void __launch_bounds__(32) {name}(const __grid_constant__ CUtensorMap map, \
uint* __restrict__ memory, int x, int y, int words) {{
  extern __shared__ __align__(1024) uchar pool[];
  uint start = (uint)__cvta_generic_to_shared(pool);
  for (int i = threadIdx.x; i < words; i += 32) ((uint*)pool)[i] = memory[i];
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  if (threadIdx.x == 0) {{
    asm volatile("{opcode}.2d.global.shared::cta{operation}.bulk_group [%0, {{%1, %2}}], [%3];"
      :: "l"(&map), "r"(x), "r"(y), "r"(start) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }}
}}
"""


ADDRESSES = """
extern "C" __global__ void __launch_bounds__(32) addresses(uint* __restrict__ out) {
  extern __shared__ __align__(1024) uchar pool[];
  uint rank, start = (uint)__cvta_generic_to_shared(pool), own, other;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(own) : "r"(start + 64), "r"(rank));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(other) : "r"(start + 64), "r"(rank ^ 1));
  if (threadIdx.x == 0) {
    out[4 * rank] = start & 0xFFFFFF;
    out[4 * rank + 1] = own & 0xFFFFFF;
    out[4 * rank + 2] = other & 0xFFFFFF;
    out[4 * rank + 3] = own != other;
  }
}
"""
STORES = _store_kernel("tma_store", "cp.async.bulk.tensor")
ADDS = _store_kernel("tma_add", "cp.reduce.async.bulk.tensor", ".add")
TEXT = LOADS + STORES + ADDS + ADDRESSES


def _map(array: str, swizzle: str, dtype: str = "float16", columns: int = COLUMNS) -> TensorMap:
    size = 2 if dtype == "float16" else 4
    columns = columns * 2 // size
    box = (WIDTHS[swizzle] // size, BOX_ROWS)
    return TensorMap(array, dtype, (columns, ROWS), (COLUMNS * 2,), box, NUMBERS[swizzle])


def _numbered(count: int, dtype: type = np.uint16) -> np.ndarray:
    # From 1; 0 is what a load puts beyond the edges.
    return np.arange(1, count + 1).astype(dtype)


def _load(
    swizzle: str, where: str, shift: int = 0, dtype: str = "float16", cluster: int = 1, columns: int = COLUMNS
) -> Probe:
    kind = np.uint16 if dtype == "float16" else np.uint32
    tensor = _numbered(COLUMNS * ROWS * 2 // np.dtype(kind).itemsize, kind)
    size = BOX_ROWS * WIDTHS[swizzle]
    end = (shift + size + 15) // 16 * 16 + 16  # and what must stay as it was

    def show(out: np.ndarray) -> list[str]:
        # Pieces of 16 bytes, up to behind the box; "-" for what nobody wrote.
        pieces = [block.view(kind)[: end // kind().itemsize] for block in out.reshape(cluster, -1)]
        untouched = np.full(1, 0xAAAAAAAA, np.uint32).view(kind)[0]
        lines = table(np.concatenate(pieces).reshape(-1, 16 // kind().itemsize))
        return [line.replace(str(untouched), "-") for line in lines]

    column, row = CORNERS[where]
    corner = (column * 2 // np.dtype(kind).itemsize, row)
    kernel = "tma_multicast" if cluster > 1 else "tma_load"
    extra = "_shifted" * bool(shift) + "_float32" * (dtype != "float16") + "_ragged" * (columns != COLUMNS)
    return Probe(
        f"{kernel}_{swizzle}_{where}{extra}",
        kernel,
        TEXT,
        (_map("tensor", swizzle, dtype, columns), OUT, *corner, shift, size),
        {"tensor": tensor},
        np.zeros(cluster * BARRIER // 4, np.uint32),
        show,
        "pieces of 16 bytes of shared memory, of each block; elements of the tensor by number from 1, row after row; "
        f"0: filled, -: not written; the box begins at column, row {corner}, byte {shift}",
        cluster=cluster,
        dynamic_bytes=POOL_BYTES,
    )


def _store(swizzle: str, where: str, columns: int = COLUMNS) -> Probe:
    return Probe(
        f"tma_store_{swizzle}_{where}" + "_ragged" * (columns != COLUMNS),
        "tma_store",
        TEXT,
        (_map(OUT, swizzle, columns=columns), "memory", *CORNERS[where], POOL_BYTES // 4),
        {"memory": _numbered(POOL_BYTES // 2).view(np.uint32)},
        np.zeros((ROWS, COLUMNS), np.uint16),
        table,
        "rows of the tensor; elements of shared memory by number from 1, 0: not written; the box begins at column, row "
        f"{CORNERS[where]}",
        dynamic_bytes=POOL_BYTES,
    )


def _add() -> Probe:
    return Probe(
        "tma_add_128_beyond_the_end",
        "tma_add",
        TEXT,
        (_map(OUT, "128", "float32"), "memory", 28, 14, POOL_BYTES // 4),
        {"memory": _numbered(POOL_BYTES // 4, np.float32).view(np.uint32)},
        np.full((ROWS, COLUMNS // 2), 5000, np.float32),
        lambda out: table(out.astype(int)),
        "rows of the tensor; 5000, and where the box is the number from 1 of the element of shared memory added to it",
        dynamic_bytes=POOL_BYTES,
    )


def _addresses() -> Probe:
    meaning = "blocks of a cluster; where dynamic shared memory begins, byte 64 of it by mapa in this block and in the "
    return Probe(
        "addresses",
        "addresses",
        TEXT,
        (OUT,),
        {},
        np.zeros(8, np.uint32),
        lambda out: table(out.reshape(2, 4)),
        meaning + "other, each without the upper byte, and whether these two differ",
        cluster=2,
        dynamic_bytes=POOL_BYTES,
    )


def loads() -> list[Probe]:
    """Probe loads with each swizzle: inside and over even and ragged edges, shifted, in 32 bits, into two blocks."""
    each = [_load(swizzle, where) for swizzle in WIDTHS for where in CORNERS]
    shifted = [_load(swizzle, "inside", SHIFT) for swizzle in WIDTHS]
    ragged = [_load(swizzle, "beyond_the_end", columns=RAGGED) for swizzle in ("none", "128")]
    others = [_load("128", "beyond_the_end", dtype="float32"), _load("128", "inside", cluster=2)]
    return [*each, *shifted, *ragged, *others]


def stores() -> list[Probe]:
    """Probe stores with each swizzle: inside and over the edges; one that adds; and addresses in a cluster."""
    ragged = [_store(swizzle, "beyond_the_end", RAGGED) for swizzle in ("none", "128")]
    return [*(_store(swizzle, where) for swizzle in WIDTHS for where in STORED), *ragged, _add(), _addresses()]
