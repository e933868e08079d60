"""The instructions that schedules and kernels are made for: their shapes, and where they keep and read elements.

Facts of the machine, once, as numbers and arithmetic: nothing here builds TensorIR. Functions of rows and lanes take
whole numbers and TVM's expressions alike. Source: NVIDIA's PTX ISA, sections "Data Movement and Conversion
Instructions: cp.async", "Warp Level Matrix Multiply-Accumulate Instructions" (fragments of mma.m16n8k16, ldmatrix),
"Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions" (fragments, matrix descriptor, strides, 128-byte
swizzle), "Tensor Memory Accelerator" and "TensorCore 5th Generation Family Instructions" (descriptors).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

WARP = 32  # threads
PARTITIONS = 4  # of a multiprocessor: each has a fourth of its registers, and of its warps
WARPGROUP = 128  # threads: four warps that multiply together
VECTOR_BYTES = 16  # the widest load and store of a thread, and cp.async's widest copy
CP_ASYNC_BYTES = (4, 8, 16)
LINE_BYTES = 128  # of a cache line; what the banks deliver at once
SECTOR_BYTES = 32  # of a cache line: the least that is brought from the L2 cache or from device memory
SWIZZLED_PIECES = LINE_BYTES // VECTOR_BYTES  # of 16 bytes, in what the banks deliver at once

# Shared memory that a block may ask for, by architecture (CUDA C++ programming guide, compute capabilities).
SHARED_KIB = {70: 96, 75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 101: 227, 103: 227, 120: 99, 121: 99}

PTX_TYPES = {"float16": "f16", "bfloat16": "bf16"}


def swizzled_piece(row: Any, piece: Any, pieces: int = SWIZZLED_PIECES) -> Any:
    """Return where a row of ``pieces`` pieces of 16 bytes keeps its piece ``piece``: permuted by the row's number.

    ::

        8 pieces (128 bytes) and more    piece ^ (row % 8)
        4 pieces (64 bytes)              piece ^ (row // 2 % 4)           # two rows fill the banks
    """
    width = math.gcd(pieces, SWIZZLED_PIECES)
    return piece ^ (row // (SWIZZLED_PIECES // width) % width)


# mma.sync and ldmatrix: a warp's instructions

MMA_ARCH = 80  # sm_80 is the first architecture with the shapes below
PIECE_ROWS = 8  # ldmatrix moves pieces of 8 rows of 16 bytes, each lane one register of each


@dataclass(frozen=True)
class MmaInstruction:
    """One ``mma.sync`` instruction, as two in a row: C[16, 16] += A[16, k] · B[k, 16].

    The PTX instruction is 8 columns wide; two of them use all four pieces of B that one ``ldmatrix`` brings.
    ``ptx`` is its name, ``k`` the depth of one step, ``dtype`` that of the operands (``itemsize`` bytes an element),
    ``accumulator`` that of C.
    """

    ptx: str
    k: int
    dtype: str
    itemsize: int
    accumulator: str = "float32"

    M: ClassVar[int] = 16
    N: ClassVar[int] = 16

    @property
    def packed(self) -> int:
        """Operand elements in one 32-bit register."""
        return 4 // self.itemsize

    @property
    def transposes(self) -> bool:
        """True where ``ldmatrix`` can transpose operands on their way: it moves units of 16 bits."""
        return self.packed == 2

    @property
    def operand_registers(self) -> int:
        """Elements of A, and of B, that a lane holds."""
        return self.M * self.k // WARP

    @property
    def function(self) -> str:
        """The name of the CUDA helper that issues it."""
        return "tensor_core_" + "_".join(self.ptx.split(".")[3:4] + self.ptx.split(".")[-3:-2])

    def place_in_a(self, row: Any, k: Any) -> tuple[Any, Any]:
        """Return (lane, register) of A[row, k]: pieces go down first, then to the next 16 bytes of k."""
        return self._place(row, k, lambda down, right: right * 2 + down)

    def place_in_b(self, column: Any, k: Any) -> tuple[Any, Any]:
        """Return (lane, register) of B[k, column]: pieces go along k first, then to the next 8 columns."""
        return self._place(column, k, lambda down, right: down * 2 + right)

    def place_in_c(self, row: Any, column: Any) -> tuple[Any, Any]:
        """Return (lane, register) of C[row, column]: pairs of columns, rows 8 apart, columns 8 apart."""
        lane = row % 8 * 4 + column % 8 // 2
        return lane, column % 16 // 8 * 4 + row % 16 // 8 * 2 + column % 2

    def row_address(self, lane: Any, operand: int, by_k: bool) -> tuple[Any, Any]:
        """Return (row, column), in the operand as stored, of the 16 bytes whose address a lane gives to ``ldmatrix``.

        Lanes 8·p to 8·p + 7 point at the rows of piece p; ``by_k`` says that k is the stored operand's last dimension.
        """
        first, second = lane // 8 % 2, lane // 16
        down, right = (second, first) if operand else (first, second)  # among A's rows, or B's columns; along k
        inside, width = lane % PIECE_ROWS, 4 * self.packed
        return (down * 8 + inside, right * width) if by_k else (right * 8 + inside, down * width)

    def _place(self, row: Any, k: Any, piece: Callable[[Any, Any], Any]) -> tuple[Any, Any]:
        width = 4 * self.packed
        lane = row % PIECE_ROWS * 4 + k % width // self.packed
        number = piece(row % self.M // PIECE_ROWS, k % self.k // width)
        return lane, number * self.packed + k % self.packed


MMA = {
    "float16": MmaInstruction("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", 16, "float16", 2),
    "bfloat16": MmaInstruction("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", 16, "bfloat16", 2),
}
TF32 = MmaInstruction("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32", 8, "float32", 4)


# wgmma and tcgen05.mma: what reads both operands from shared memory, as panels that descriptors describe

WGMMA_ARCH = "sm_90a"
WGMMA_ROWS = 64
WGMMA_WIDTHS = 8  # columns come in steps of it
STEP = 16  # of one wgmma or tcgen05.mma, along k
WIDEST = 256  # columns of one wgmma or tcgen05.mma; rows of one TMA box
PANEL = 64  # 16-bit elements in a swizzled row
ROW_BYTES = 128  # of a swizzled row
ATOM_BYTES = 8 * ROW_BYTES  # eight rows: the unit that the swizzle permutes
ADDRESS_MASK = 0x3FFFF  # the bits of a shared address that lie in a block's own memory; descriptors have it by 16 bytes
WGMMA_SWIZZLE_128B = 1 << 62  # in wgmma's matrix descriptor
TCGEN05_SWIZZLE_128B = 1 << 46 | 2 << 61  # in tcgen05's: the format's version, and the swizzle in bits 61 to 63


def wgmma_place(row: Any, column: Any, columns: int) -> tuple[Any, Any]:
    """Return the (lane, register) of a warpgroup that accumulates an output of instructions 64 × ``columns``.

    Each warp has 16 of an instruction's 64 rows; a lane has two neighbouring columns of each eight, in two rows
    eight apart. Registers run over the pair, the two rows, the eights of columns, the instructions below each other.
    """
    lane = row % 64 // 16 * 32 + row % 8 * 4 + column % 8 // 2
    register = row // 64 * (columns // 2) + column // 8 * 4 + row % 16 // 8 * 2 + column % 2
    return lane, register


def wgmma_element(warp: Any, lane: Any, register: Any) -> tuple[Any, Any]:
    """Return row (of 64) and column of what a warp's lane accumulates in a register: :func:`wgmma_place`, inverted."""
    row = warp * 16 + lane // 4 + register // 2 % 2 * 8
    return row, register // 4 * 8 + lane % 4 * 2 + register % 2


@dataclass(frozen=True)
class Panels:
    """One operand's k tile in shared memory: panels of rows of 64 16-bit elements, swizzled; each fits a TMA box.

    ::

        [panel][row][64]        row: A's row or B's column where a panel's rows run along k, else the step along k

    ``extent`` are A's rows or B's columns in the tile, ``depth`` steps along k. ``major`` says what a row of a
    panel runs along: "k" for A and for a B stored [n, k], "n" for a B stored [k, n], which the instruction transposes.
    """

    extent: int
    depth: int
    major: str

    MODE: ClassVar[int] = WGMMA_SWIZZLE_128B

    @property
    def count(self) -> int:
        """Panels of the tile; where they run along n, the last may have more columns than the tile."""
        return -(-(self.depth if self.major == "k" else self.extent) // PANEL)

    @property
    def rows(self) -> int:
        """Rows of a panel."""
        return self.extent if self.major == "k" else self.depth

    @property
    def panel_bytes(self) -> int:
        """Bytes of one panel."""
        return self.rows * ROW_BYTES

    @property
    def bytes(self) -> int:
        """Bytes of the tile."""
        return self.count * self.panel_bytes

    @property
    def edge(self) -> int:
        """Columns of the last panel, where panels run along n and the tile has no whole number of them; else 0."""
        return 0 if self.major == "k" else self.extent % PANEL

    @property
    def loaded_bytes(self) -> int:
        """Bytes that are loaded: of the last panel only the columns that the tile has."""
        return self.bytes - (self.rows * (PANEL - self.edge) * 2 if self.edge else 0)

    def step_offset(self, step: int) -> int:
        """Return the bytes from the tile's first element to what the ``step``-th instruction along k reads."""
        if self.major == "n":
            return step * STEP * ROW_BYTES
        panel, inside = divmod(step * STEP, PANEL)
        return panel * self.panel_bytes + inside * 2

    def extent_offset(self, first: Any) -> Any:
        """Return the bytes to row (of A) or column (of B) ``first``: a multiple of 8, or of 64 in MN-major panels."""
        return first * ROW_BYTES if self.major == "k" else first // PANEL * self.panel_bytes

    @property
    def descriptor_bits(self) -> int:
        """A matrix descriptor's bits beside the address; distances are in units of 16 bytes.

        MODE has those of the instruction's own format: which swizzle, and how that is written. Stride: from one group
        of eight rows to the next. Leading: from one panel to the next, where panels run along n; not used (1) along k.
        """
        leading = 1 if self.major == "k" else self.panel_bytes >> 4
        return self.MODE | (ATOM_BYTES >> 4) << 32 | leading << 16


def wgmma_misfits(rows: int, columns: int, steps: int) -> list[str]:
    """Return what wgmma has no form for in a warpgroup's tile, one clause each."""
    found = []
    if rows % WGMMA_ROWS:
        found.append(f"{rows} rows per warpgroup are not a multiple of {WGMMA_ROWS}")
    if columns % WGMMA_WIDTHS or columns > WIDEST:
        found.append(f"{columns} columns per warpgroup are not a multiple of {WGMMA_WIDTHS} up to {WIDEST}")
    if steps % PANEL:
        found.append(f"{steps} steps of the k tile are not a multiple of {PANEL}")
    return found


# TMA: boxes of a matrix in device memory, copied by one thread's instruction

TMA_ARCH = 90  # sm_90 is the first architecture with it, with mbarriers that count bytes, and with clusters
TMA_STRIDE_BYTES = 16  # rows must begin a multiple of it apart
TMA_LOAD = "cp.async.bulk.tensor.{}d.shared::cluster.global.mbarrier::complete_tx::bytes"  # of so many dimensions
TMA_MULTICAST = TMA_LOAD + ".multicast::cluster"
TMA_STORE = "cp.async.bulk.tensor.{}d.global.shared::cta.tile.bulk_group"
TMA_SWIZZLE_128B = 3  # CUtensorMapSwizzle
# CUtensorMapL2promotion. On an H200 23 kernels with 256 bytes were 0.97 times as fast (0.91 where memory decides), and
# 15 with 64 or none 0.99 times.
TMA_L2_PROMOTION_128B = 2
