"""Probes of wgmma: where its sums are, which addresses descriptors mean, what a first operand's registers hold."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np

from tensorir_ladder.lab.traces.probe import OUT, Probe, operands, registers, table

ROWS, STEPS, THREADS = 64, 16, 128
POOL_BYTES, OTHER_OPERAND = 20480, 16384  # shared memory; what is probed comes first, the other operand there
FIRST_BITS = 0x0400  # the smallest normal float16: from there on every number of elements is another exact value
COLUMNS = (8, 32, 64, 128, 256)
WHOLE = 32  # columns up to which all threads' sums are recorded; of more, those of
SOME_THREADS = (0, 1, 31, 37, 64, 127)
MODES = {"none": 0, "128": 1, "64": 2, "32": 3}  # as wgmma's descriptor has them


@dataclass(frozen=True)
class ElementPlace:
    """A descriptor's fields, in bytes: an operand's beginning, both offsets, and its swizzle."""

    swizzle: str
    start: int
    leading: int
    stride: int

    @property
    def bits(self) -> int:
        """The descriptor, to which the address of the memory it points into is added in units of 16 bytes."""
        return (self.start >> 4) + (self.leading >> 4 << 16) + (self.stride >> 4 << 32) + (MODES[self.swizzle] << 62)


# Offsets that fit into the memory whichever of them a dimension takes; rows of k begin inside a swizzled row, too.
K_MAJOR = (
    ElementPlace("none", 0, 4096, 384),
    ElementPlace("32", 0, 16, 512),
    ElementPlace("64", 32, 16, 512),
    ElementPlace("128", 0, 16, 1024),
    ElementPlace("128", 96, 16, 1024),
)
MN_MAJOR = (
    ElementPlace("none", 0, 896, 768),
    ElementPlace("32", 0, 1024, 512),
    ElementPlace("64", 0, 2048, 1024),
    ElementPlace("128", 2048, 4096, 1024),
)
CANONICAL = ElementPlace(
    "none", OTHER_OPERAND, 128, 256
)  # without a swizzle, k-major, pieces of 8 × 16 bytes side by side


def _name(dtype: str, columns: int, transposed: tuple[int, int]) -> str:
    return f"wgmma_{dtype}_n{columns}_{transposed[0]}{transposed[1]}"


def _kernel(dtype: str, columns: int, transposed: tuple[int, int]) -> str:
    count = columns // 2
    sums = [f"c[{i}]" for i in range(count)]
    keep = f'asm volatile("" : {operands("+f", sums)} :: "memory");'
    return f"""
extern "C" __global__ void __launch_bounds__(128) {_name(dtype, columns, transposed)}(uint* __restrict__ out, \
uint* __restrict__ memory, uint* __restrict__ descriptors) {{
  extern __shared__ __align__(1024) uchar pool[];
  alignas(64) float c[{count}];
  for (int i = threadIdx.x; i < {POOL_BYTES // 4}; i += 128) ((uint*)pool)[i] = memory[i];
  #pragma unroll
  for (int i = 0; i < {count}; ++i) c[i] = 0;
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  uint64_t base = ((uint)__cvta_generic_to_shared(pool) & 0x3FFFF) >> 4;
  uint64_t a = base + ((uint64_t)descriptors[1] << 32 | descriptors[0]);
  uint64_t b = base + ((uint64_t)descriptors[3] << 32 | descriptors[2]);
  {keep}
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  asm volatile("wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{dtype}.{dtype} "
    "{{{registers(count)}}}, %{count}, %{count + 1}, 1, 1, 1, {transposed[0]}, {transposed[1]};"
    : {operands("+f", sums)} : "l"(a), "l"(b));
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  {keep}
  #pragma unroll
  for (int i = 0; i < {count}; ++i) ((float*)out)[threadIdx.x * {count} + i] = c[i];
}}
"""


def _words(*places: ElementPlace) -> np.ndarray:
    return np.array([place.bits for place in places], np.uint64).view(np.uint32)


def _put(memory: np.ndarray, matrix: np.ndarray, place: ElementPlace) -> None:
    # An operand [other, 16], as bits, k-major and without a swizzle.
    for other, k in zip(*matrix.nonzero()):
        at = place.start + other // 8 * place.stride + other % 8 * 16 + k // 8 * place.leading + k % 8 * 2
        memory[at // 2] = matrix[other, k]


def _as_bits(values: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "f16":
        return values.astype(np.float16).view(np.uint16)
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def _sums(dtype: str, columns: int) -> Probe:
    # Sum (i, j) is 256 i + j: i · 256 of one step along k, and 1 · j of the next.
    a, b = np.zeros((ROWS, STEPS)), np.zeros((columns, STEPS))
    a[:, 0], a[:, 1], b[:, 0], b[:, 1] = np.arange(ROWS), 1, 256, np.arange(columns)
    memory = np.zeros(POOL_BYTES // 2, np.uint16)
    at = ElementPlace("none", 0, 128, 256), ElementPlace("none", ROWS * 32, 128, 256)
    for matrix, place in zip((a, b), at):
        _put(memory, _as_bits(matrix, dtype), place)
    threads = range(THREADS) if columns <= WHOLE else SOME_THREADS

    def show(out: np.ndarray) -> list[str]:
        rows = out.view(np.float32).reshape(THREADS, -1).astype(int)
        return [f"{thread}: " + " ".join(f"{sum_ >> 8},{sum_ & 255}" for sum_ in rows[thread]) for thread in threads]

    name, meaning = f"wgmma_{dtype}_n{columns}_sums", "thread: row,column of the sum in each register"
    return _probe(name, (dtype, columns, (0, 0)), memory, at, show, meaning)


def _probe(
    name: str, form: tuple, memory: np.ndarray, at: tuple[ElementPlace, ElementPlace], show, meaning: str
) -> Probe:
    columns = form[1]
    return Probe(
        name,
        _name(*form),
        TEXT,
        (OUT, "memory", "descriptors"),
        {"memory": memory, "descriptors": _words(*at)},
        np.zeros(THREADS * columns // 2, np.uint32),
        show,
        meaning,
        THREADS,
        dynamic_bytes=POOL_BYTES,
    )


def _operand(which: str, major: str, place: ElementPlace) -> Probe:
    # Each 16-bit element of the memory is a number of its own, and the other operand the identity: each sum is one
    # element of the operand, and its bits say at which address that was read.
    columns = {"a": STEPS, "b": 64 if major == "k" else 128}[which]
    memory = np.zeros(POOL_BYTES // 2, np.uint16)
    memory[: OTHER_OPERAND // 2] = FIRST_BITS + np.arange(OTHER_OPERAND // 2)
    _put(memory, _as_bits(np.eye(STEPS), "f16"), CANONICAL)
    transposed = int(major == "mn")
    form = ("f16", columns, (transposed, 0) if which == "a" else (0, transposed))
    at = (place, CANONICAL) if which == "a" else (CANONICAL, place)
    threads = THREADS if which == "a" else 32  # the identity's rows are the first warp's

    def show(out: np.ndarray) -> list[str]:
        sums = out.view(np.float32).reshape(THREADS, -1)[:threads]
        return table(sums.astype(np.float16).view(np.uint16).astype(int) - FIRST_BITS)

    meaning = "threads; the place in shared memory, in 16-bit elements, that each sum's operand was read from; "
    meaning += f"start {place.start}, leading {place.leading}, stride {place.stride}"
    return _probe(f"wgmma_{which}_{major}_{place.swizzle}_{place.start}", form, memory, at, show, meaning)


SUM_FORMS = [("f16", columns, (0, 0)) for columns in COLUMNS] + [("bf16", 64, (0, 0))]
OPERAND_FORMS = [("f16", 16, (0, 0)), ("f16", 16, (1, 0)), ("f16", 128, (0, 1))]
TEXT = "".join(_kernel(*form) for form in SUM_FORMS + OPERAND_FORMS)


def sums() -> list[Probe]:
    """Probe which thread and register has each sum of a 64 × n product."""
    return [_sums(dtype, columns) for dtype, columns, _ in SUM_FORMS]


def descriptors() -> list[Probe]:
    """Probe which element each address of an operand is, by swizzle and by what runs along its rows."""
    places = [("k", place) for place in K_MAJOR] + [("mn", place) for place in MN_MAJOR]
    return [_operand(which, *place) for which, place in product("ab", places)]


A_REGISTERS = 4  # of a thread, two elements in each


def _kernel_of_registers(dtype: str) -> str:
    count = STEPS // 2
    sums, given = ([f"{name}[{i}]" for i in range(size)] for name, size in (("c", count), ("a", A_REGISTERS)))
    keep = f'asm volatile("" : {operands("+f", sums)}, {operands("+r", given)} :: "memory");'
    return f"""
extern "C" __global__ void __launch_bounds__(128) wgmma_{dtype}_registers(uint* __restrict__ out, \
uint* __restrict__ memory, uint* __restrict__ elements, uint* __restrict__ descriptor) {{
  extern __shared__ __align__(1024) uchar pool[];
  alignas(64) float c[{count}];
  alignas(64) uint a[{A_REGISTERS}];
  for (int i = threadIdx.x; i < {STEPS * STEPS // 2}; i += 128) ((uint*)pool)[i] = memory[i];
  #pragma unroll
  for (int i = 0; i < {count}; ++i) c[i] = 0;
  #pragma unroll
  for (int i = 0; i < {A_REGISTERS}; ++i) a[i] = elements[threadIdx.x * {A_REGISTERS} + i];
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  uint64_t base = ((uint)__cvta_generic_to_shared(pool) & 0x3FFFF) >> 4;
  uint64_t b = base + ((uint64_t)descriptor[1] << 32 | descriptor[0]);
  {keep}
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  asm volatile("wgmma.mma_async.sync.aligned.m64n{STEPS}k16.f32.{dtype}.{dtype} "
    "{{{registers(count)}}}, {{{registers(A_REGISTERS, count)}}}, %{count + A_REGISTERS}, 1, 1, 1, 0;"
    : {operands("+f", sums)} : {operands("r", given)}, "l"(b));
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  {keep}
  #pragma unroll
  for (int i = 0; i < {count}; ++i) ((float*)out)[threadIdx.x * {count} + i] = c[i];
}}
"""


def _registers(dtype: str) -> Probe:
    # Each element of the registers is a number of its own, and B the identity: each sum is one of them.
    memory, place = np.zeros(STEPS * STEPS, np.uint16), ElementPlace("none", 0, 128, 256)
    _put(memory, _as_bits(np.eye(STEPS), dtype), place)
    elements = np.arange(THREADS * A_REGISTERS * 2, dtype=np.uint16) + np.uint16(FIRST_BITS)

    def show(out: np.ndarray) -> list[str]:
        bits = _as_bits(out.view(np.float32), dtype).astype(int).reshape(THREADS, -1) - FIRST_BITS
        return [" ".join(f"{at // 8}:{at // 2 % 4},{at % 2}" for at in row) for row in bits.tolist()]

    return Probe(
        f"wgmma_{dtype}_registers",
        f"wgmma_{dtype}_registers",
        TEXT_OF_REGISTERS,
        (OUT, "memory", "elements", "descriptor"),
        {"memory": memory, "elements": elements, "descriptor": _words(place)},
        np.zeros(THREADS * STEPS // 2, np.uint32),
        show,
        "threads; the thread:register,half that each sum's element of the first operand came from",
        THREADS,
        dynamic_bytes=POOL_BYTES,
    )


TEXT_OF_REGISTERS = "".join(map(_kernel_of_registers, ("f16", "bf16")))


def first_operands() -> list[Probe]:
    """Probe which element of the first operand each thread's registers hold, where it is in registers."""
    return [_registers(dtype) for dtype in ("f16", "bf16")]
