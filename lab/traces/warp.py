"""Probes of a warp's instructions: ldmatrix, stmatrix, mma.sync, conversions, cp.async."""

from __future__ import annotations

from functools import partial
from itertools import product

import numpy as np

from tensorir_ladder.lab.traces.probe import OUT, Probe, halves, operands, registers, table

COUNTS, ORDERS = (1, 2, 4), ("", ".trans")
TILE_WORDS = 128  # four matrices of eight rows of 16 bytes
UNTOUCHED = 0xFFFF
# Which row of the tile a lane points at: no two the same, and not in the lanes' order.
ROW_OF_LANE = "(threadIdx.x * 5 + 3) % {rows}"
MMA = {  # shape, PTX type, bits of an element; bits of 1, 2, 3 … come from ENCODE
    "f16": ("m16n8k16", 16),
    "bf16": ("m16n8k16", 16),
    "tf32": ("m16n8k8", 32),
}
LANES, A_REGISTERS, B_REGISTERS, D_REGISTERS = 32, 4, 2, 4


def _matrix_name(instruction: str, count: int, order: str) -> str:
    return f"{instruction}_x{count}{order.replace('.', '_')}"


def _ldmatrix(count: int, order: str) -> str:
    loaded = [f"r[{i}]" for i in range(count)]
    return f"""
extern "C" __global__ void __launch_bounds__(32) {_matrix_name("ldmatrix", count, order)}(uint* __restrict__ out) {{
  __shared__ alignas(64) uint tile[{TILE_WORDS}];
  uint r[{count}];
  for (int w = threadIdx.x; w < {TILE_WORDS}; w += 32) tile[w] = (2 * w + 1) << 16 | 2 * w;
  __syncwarp();
  uint at = (uint)__cvta_generic_to_shared(tile) + {ROW_OF_LANE.format(rows=8 * count)} * 16;
  asm volatile("ldmatrix.sync.aligned.m8n8.x{count}{order}.shared.b16 {{{registers(count)}}}, [%{count}];"
    : {operands("=r", loaded)} : "r"(at) : "memory");
  for (int i = 0; i < {count}; ++i) out[threadIdx.x * {count} + i] = r[i];
}}
"""


def _stmatrix(count: int, order: str) -> str:
    stored = [f"r[{i}]" for i in range(count)]
    return f"""
extern "C" __global__ void __launch_bounds__(32) {_matrix_name("stmatrix", count, order)}(uint* __restrict__ out) {{
  __shared__ alignas(64) uint tile[{TILE_WORDS}];
  uint r[{count}];
  for (int w = threadIdx.x; w < {TILE_WORDS}; w += 32) tile[w] = 0xFFFFFFFFu;
  for (int i = 0; i < {count}; ++i) r[i] = 0x10000 + (threadIdx.x * {count} + i) * 0x20002;
  __syncwarp();
  uint at = (uint)__cvta_generic_to_shared(tile) + {ROW_OF_LANE.format(rows=8 * count)} * 16;
  asm volatile("stmatrix.sync.aligned.m8n8.x{count}{order}.shared.b16 [%0], {{{registers(count, 1)}}};"
    :: "r"(at), {operands("r", stored)} : "memory");
  __syncwarp();
  for (int w = threadIdx.x; w < {TILE_WORDS}; w += 32) out[w] = tile[w];
}}
"""


def matrices() -> list[Probe]:
    """Probe ldmatrix and stmatrix of one, two and four matrices, transposed or not."""
    forms = list(product(COUNTS, ORDERS))
    text = "".join(_ldmatrix(*form) + _stmatrix(*form) for form in forms)
    probes = []
    for count, order in forms:
        rows = ROW_OF_LANE.format(rows=8 * count).replace("threadIdx.x", "lane")
        loaded = "lanes; the two elements of each register, by their number in the tile"
        stored = f"rows of the tile; elements' numbers, 2 registers a lane; {UNTOUCHED}: untouched"
        for instruction, words, width, meaning in (
            ("ldmatrix", LANES * count, 2 * count, loaded),
            ("stmatrix", TILE_WORDS, 8, stored),
        ):
            name, out = _matrix_name(instruction, count, order), np.zeros(words, np.uint32)
            meaning = f"{meaning}; a lane points at row {rows}"
            show = partial(_halves_table, width)
            probes.append(Probe(name, name, text, (OUT,), {}, out, show, meaning))
    return probes


def _halves_table(width: int, out: np.ndarray) -> list[str]:
    return table(halves(out, width))


def _mma(dtype: str) -> str:
    shape, _ = MMA[dtype]
    d, a, b = registers(4), registers(4, 4), registers(2, 8)
    return f"""
extern "C" __global__ void __launch_bounds__(32) mma_{dtype}(uint* __restrict__ out, uint* __restrict__ a, \
uint* __restrict__ b, uint* __restrict__ c, int runs) {{
  for (int run = 0; run < runs; ++run) {{
    int at = run * 32 + threadIdx.x;
    float d[4];
    for (int i = 0; i < 4; ++i) d[i] = ((float*)c)[at * 4 + i];
    asm volatile("mma.sync.aligned.{shape}.row.col.f32.{dtype}.{dtype}.f32 {{{d}}}, {{{a}}}, {{{b}}}, {{{d}}};"
      : {operands("+f", (f"d[{i}]" for i in range(4)))}
      : {operands("r", (f"a[at * 4 + {i}]" for i in range(4)))},
        {operands("r", (f"b[at * 2 + {i}]" for i in range(2)))});
    for (int i = 0; i < 4; ++i) ((float*)out)[at * 4 + i] = d[i];
  }}
}}
"""


def _bits(values: np.ndarray, dtype: str) -> np.ndarray:
    # Small whole numbers as an operand's bits, in elements of its size.
    words = values.astype(np.float32).view(np.uint32)
    if dtype == "f16":
        return values.astype(np.float16).view(np.uint16)
    return (words >> 16).astype(np.uint16) if dtype == "bf16" else words


def _mma_probe(text: str, name: str, dtype: str, a: np.ndarray, b: np.ndarray, c: np.ndarray, **shown) -> Probe:
    # Fragments are [run, lane, element], elements in the order of registers.
    runs = len(a)
    inputs = {"a": a.view(np.uint32), "b": b.view(np.uint32), "c": c.view(np.uint32)}
    output = np.zeros((runs, LANES, D_REGISTERS), np.uint32)
    return Probe(name, f"mma_{dtype}", text, (OUT, "a", "b", "c", runs), inputs, output, **shown)


def _one_hot(text: str, dtype: str) -> Probe:
    # Each element of A alone is 1, each of B its number, from 1: sums say which met.
    packed = 32 // MMA[dtype][1]
    count_a, count_b = LANES * A_REGISTERS * packed, LANES * B_REGISTERS * packed
    a = _bits(np.eye(count_a, dtype=int), dtype).reshape(count_a, LANES, -1)
    b = np.tile(_bits(np.arange(1, count_b + 1), dtype).reshape(LANES, -1), (count_a, 1, 1))
    c = np.zeros((count_a, LANES, D_REGISTERS), np.float32)

    def show(out: np.ndarray) -> list[str]:
        sums = out.view(np.float32).reshape(count_a, -1).astype(int)
        return [" ".join(f"{d}={row[d] - 1}" for d in row.nonzero()[0]) for row in sums]

    meaning = (
        f"elements of A, {A_REGISTERS * packed} a lane; d=b: sum d, {D_REGISTERS} a lane, has it times element b of B, "
        f"{B_REGISTERS * packed} a lane"
    )
    return _mma_probe(text, f"mma_{dtype}_elements", dtype, a, b, c, show=show, meaning=meaning)


def _added(text: str, dtype: str) -> Probe:
    # Operands are 0, each element of C its number: where the sums were that come out.
    packed = 32 // MMA[dtype][1]
    a, b = (np.zeros((1, LANES, count * packed), _bits(np.zeros(1), dtype).dtype) for count in (4, 2))
    c = np.arange(LANES * D_REGISTERS, dtype=np.float32).reshape(1, LANES, D_REGISTERS)
    meaning = f"lanes; the numbers, {D_REGISTERS} a lane, of the elements of C that come out of each register"

    def show(out: np.ndarray) -> list[str]:
        return table(out.view(np.float32)[0].astype(int))

    return _mma_probe(text, f"mma_{dtype}_sums", dtype, a, b, c, show=show, meaning=meaning)


def _cut(text: str) -> Probe:
    # Operands with more bits than TF32 has, times 1.
    odd = np.array([0x3F800FFF, 0x3F801000, 0x3F801FFF, 0x3F802000, 0xBF803FFF, 0x40490FDB, 0x00801FFF], np.uint32)
    one = np.float32(1).view(np.uint32)
    a, b = (np.zeros((2 * len(odd), LANES, count), np.uint32) for count in (4, 2))
    a[:, 0, 0], b[:, 0, 0] = np.append(odd, [one] * len(odd)), np.append([one] * len(odd), odd)
    c = np.zeros((2 * len(odd), LANES, D_REGISTERS), np.float32)

    def show(out: np.ndarray) -> list[str]:
        return table(np.stack([a[:, 0, 0], b[:, 0, 0], out[:, 0, 0]], axis=1), "08x")

    meaning = "products; bits of the operand from A, of the one from B, and of the sum"
    return _mma_probe(text, "mma_tf32_bits", "tf32", a, b, c, show=show, meaning=meaning)


def multiplications() -> list[Probe]:
    """Probe mma.sync: which elements of A and B meet in which sum, and which bits of TF32 operands count."""
    text = "".join(map(_mma, MMA))
    return [made(text, dtype) for dtype in MMA for made in (_one_hot, _added)] + [_cut(text)]


CONVERSIONS = """
extern "C" __global__ void __launch_bounds__(32) conversions(uint* __restrict__ out, uint* __restrict__ in, int count) {
  const float* x = (const float*)in;
  for (int i = threadIdx.x; i < count; i += 32) {
    uint h, b, t;
    asm volatile("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(h) : "f"(x[i]), "f"(-1.0f));
    asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(b) : "f"(x[i]), "f"(-1.0f));
    asm volatile("cvt.rna.tf32.f32 %0, %1;" : "=r"(t) : "r"(in[i]));
    out[3 * i] = h;
    out[3 * i + 1] = b;
    out[3 * i + 2] = t;
  }
}
"""
# Halfway between neighbours of each format and beside it, the largest and the smallest of float16, and beyond.
CONVERTED = (
    *(1 + 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-11 + 2.0**-20, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-12),
    *(-(1 + 2.0**-11), -(1 + 3 * 2.0**-12), 0.0, -0.0, 0.1, -3.3, 65504.0, 65519.0, 65520.0, 1e9, -1e30),
    *(2.0**-14, 2.0**-15 + 2.0**-25, 2.0**-24, 2.0**-25, 3 * 2.0**-25, 2.0**-130, np.inf, -np.inf),
)
COPIES = """
extern "C" __global__ void __launch_bounds__(32) copies(uint* __restrict__ out, uint* __restrict__ in) {
  __shared__ alignas(64) uint tile[128];
  for (int i = 0; i < 4; ++i) tile[threadIdx.x * 4 + i] = 0xFFFFu;
  uint to = (uint)__cvta_generic_to_shared(tile + 4 * threadIdx.x);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
    :: "r"(to), "l"(in + 4 * threadIdx.x), "r"(threadIdx.x % 17) : "memory");
  asm volatile("cp.async.commit_group;" ::: "memory");
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncwarp();
  for (int i = 0; i < 4; ++i) out[threadIdx.x * 4 + i] = tile[threadIdx.x * 4 + i];
}
"""


def others() -> list[Probe]:
    """Probe conversions' rounding, and what cp.async fills up with zeros."""
    values = np.array(CONVERTED, np.float32).view(np.uint32)
    bytes_ = np.arange(1, 513, dtype=np.uint16).astype(np.uint8).view(np.uint32)

    def show(out: np.ndarray) -> list[str]:
        return table(np.concatenate([values[:, None], out.reshape(-1, 3)], axis=1), "08x")

    return [
        Probe(
            "conversions",
            "conversions",
            CONVERSIONS + COPIES,
            (OUT, "in", len(values)),
            {"in": values},
            np.zeros(3 * len(values), np.uint32),
            show,
            "operands; their bits, and those of (operand, -1) in f16x2 and bf16x2, of the operand rounded to TF32",
        ),
        Probe(
            "cp_async_zeros",
            "copies",
            CONVERSIONS + COPIES,
            (OUT, "in"),
            {"in": bytes_},
            np.zeros(TILE_WORDS, np.uint32),
            lambda out: table(out.view(np.uint8).reshape(LANES, 16)),
            "lanes; bytes of 16 copied, of which lane % 17 come from memory",
        ),
    ]
