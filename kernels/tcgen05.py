"""Blackwell's tensor-core instruction: its descriptors, tensor memory for the sums, and how results get out of it.

One thread issues ``tcgen05.mma``, which multiplies 128 rows by n columns, 16 steps deep. It reads both operands from
shared memory through 64-bit descriptors and adds to *tensor memory*: 128 lanes of 512 columns of 32 bits in each
multiprocessor, allocated by columns. Row r of a product is in lane r, its column c in column c (data path layout D).
Nothing waits: ``tcgen05.commit`` makes an mbarrier count one arrival when all that the thread has issued is through.
Compiled for sm_100a and never run. Source: PTX ISA, "TensorCore 5th Generation Family Instructions" (tensor memory
addressing and allocation, matrix descriptors, instruction descriptor, data path layouts, memory consistency model).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tvm.ir import Expr
from tvm.script import tirx as T
from tvm.tirx import Buffer

from tensorir_ladder.kernels import tma
from tensorir_ladder.kernels.blackwell import ADDRESS_BYTES, LOADED_COLUMNS, TENSOR_ROWS
from tensorir_ladder.kernels.epilogue import pack, store_sums
from tensorir_ladder.kernels.panels import TileProduct, TmaPanels
from tensorir_ladder.kernels.wgmma import keep
from tensorir_ladder.schedules.isa import PANEL, ROW_BYTES, STEP, TCGEN05_SWIZZLE_128B

GROUP = "cta_group::1"  # one block's instruction, not a pair's
FLOAT32_SUMS = 1 << 4
FORMATS = {"float16": 0, "bfloat16": 1}  # of an operand in the instruction descriptor
A_FORMAT, B_FORMAT, B_TRANSPOSED, COLUMNS, ROWS = 7, 10, 16, 17, 24  # where its fields begin
EVERY_LANE = (0, 0, 0, 0)  # a bit for each of 128 lanes of tensor memory that are not to be written
LANE = 16  # where the lane begins in an address of tensor memory; the column is below it


@dataclass(frozen=True)
class TensorPanels(TmaPanels):
    """An operand's panels, which lie as :class:`kernels.panels.TmaPanels` do, described in tcgen05's format.

    Both distances mean the same: stride from eight rows to the next eight, leading from one panel to the next.
    """

    MODE: ClassVar[int] = TCGEN05_SWIZZLE_128B


@dataclass(frozen=True)
class TensorProduct(TileProduct):
    """The product as instructions of 128 rows × ``columns``, a multiple of 16, one after the other along k."""

    PANELS: ClassVar[type[TmaPanels]] = TensorPanels
    ROWS: ClassVar[int] = TENSOR_ROWS
    PART: ClassVar[str] = "per instruction"

    @property
    def instruction_bits(self) -> int:
        """The instruction descriptor: 16-bit operands' formats, float32 sums, whether B is transposed, the shape."""
        kind = FORMATS[self.dtype]
        shape = (self.columns >> 3) << COLUMNS | (TENSOR_ROWS >> 4) << ROWS
        return FLOAT32_SUMS | kind << A_FORMAT | kind << B_FORMAT | int(self.b.major == "n") << B_TRANSPOSED | shape

    def multiply(self, sums: Expr, a: Expr, b: Expr, stage: Expr, accumulate: Expr) -> None:
        """Emit one k tile's instructions, by one thread, which run on.

        ``sums`` is the address of the accumulators in tensor memory, ``a`` and ``b`` descriptors in stage 0;
        ``accumulate`` says whether there are sums to add to already. The k tile must have been waited for.
        """
        fence_after()  # orders what follows behind that wait
        for step in range(self.a.depth // STEP):
            added = accumulate if step == 0 else T.bool(True)
            operands = [self.moved(own, stage, panels.step_offset(step)) for own, panels in ((a, self.a), (b, self.b))]
            instruction = T.ptx[f"tcgen05.mma.{GROUP}.kind::f16"]
            T.evaluate(instruction(sums, *operands, T.uint32(self.instruction_bits), *map(T.uint32, EVERY_LANE), added))


def commit(barrier: Expr) -> None:
    """Emit the promise that an mbarrier counts one arrival when all that this thread has issued so far is through."""
    T.evaluate(T.ptx[f"tcgen05.commit.{GROUP}.mbarrier::arrive::one.shared::cluster.b64"](barrier))


def fence_after() -> None:
    """Emit the fence that a thread needs between a barrier that it has waited for and its own tcgen05 instructions."""
    T.evaluate(T.ptx["tcgen05.fence::after_thread_sync"]())


def meet() -> None:
    """Emit a barrier of the block, over which tcgen05's instructions, TMA and mbarriers see what threads did before."""
    T.evaluate(T.ptx.fence.proxy.async_.shared__cta())
    T.evaluate(T.ptx["tcgen05.fence::before_thread_sync"]())
    T.evaluate(T.cuda.cta_sync())
    fence_after()


@T.meta_class
class TensorMemory:
    """Columns of tensor memory that a block holds, a power of two from 32 on; a word in shared memory has the address.

    Allocation waits until other blocks of the multiprocessor have left enough. What is held must be released before
    the block ends.
    """

    def __init__(self, pool: T.SMEMPool, columns: int) -> None:
        self.word: Buffer = pool.alloc((1,), "uint32", align=ADDRESS_BYTES)
        self.columns = columns

    def allocate(self) -> None:
        """Emit the allocation, by one whole warp; all must :func:`meet` before others use it."""
        T.evaluate(T.ptx[f"tcgen05.alloc.{GROUP}.sync.aligned.shared::cta.b32"](self.at, T.uint32(self.columns)))
        T.evaluate(T.ptx[f"tcgen05.relinquish_alloc_permit.{GROUP}.sync.aligned"]())

    @property
    def at(self) -> Expr:
        """The address of the word."""
        return self.word.ptr_to([0])

    @property
    def address(self) -> Expr:
        """Lane 0 of the first column, as allocated."""
        return self.word[0]

    def release(self, address: Expr) -> None:
        """Emit the release, by the warp that allocated, after all have met (:func:`meet`) behind their last use."""
        T.evaluate(T.ptx[f"tcgen05.dealloc.{GROUP}.sync.aligned.b32"](address, T.uint32(self.columns)))


def columns_at_once(columns: int) -> int:
    """Return how many of a row's sums one instruction of a thread loads: a power of two that divides them, up to 64."""
    return min(columns & -columns, LOADED_COLUMNS)


def load_row(sums: Buffer, address: Expr, warp: Expr, column: int) -> None:
    """Emit a warp's loads of sums from tensor memory, each lane its own row's, and the wait for them.

    ``warp`` counts from 0 to 3 in its warpgroup and can read lanes 32 · warp to 32 · warp + 31, no others.
    """
    count = int(sums.shape[0])
    own = address + T.shift_left(T.Cast("uint32", warp * 32), T.uint32(LANE)) + T.uint32(column)
    T.evaluate(T.ptx[f"tcgen05.ld.sync.aligned.32x32b.x{count}.b32"](*(sums[i] for i in range(count)), own))
    T.evaluate(T.ptx["tcgen05.wait::ld.sync.aligned"]())
    keep(sums)  # the compiler knows nothing of loads that run on, and must use none of them before the wait


def collect_rows(address: Expr, product: TensorProduct, dtype: str, into: Buffer, warp: Expr, lane: Expr) -> None:
    """Emit the rounding of sums in tensor memory into swizzled boxes of 128 × 64 in shared memory, a row each thread.

    ``into`` are bytes, box after box along columns. 16 bytes a store: eight lanes' are in all 32 banks.
    """
    part, packed = T.alloc_local((PANEL,), "float32"), T.alloc_local((PANEL // 2,), "uint32")
    for box in range(product.columns // PANEL):
        load_row(part, address, warp, box * PANEL)
        pack(part, packed, dtype)
        for column in range(0, PANEL, 8):
            place = into.ptr_to([box * product.ROWS * ROW_BYTES + tma.swizzled(warp * 32 + lane, column)])
            T.evaluate(T.ptx["st.shared.v4.b32"](place, *(packed[column // 2 + i] for i in range(4))))


def store_rows(
    address: Expr, product: TensorProduct, output: Buffer, row: Expr, column: Expr, warp: Expr, lane: Expr
) -> None:
    """Emit each thread's stores (:func:`store_sums`) of its row of tensor memory to the output's (row, column)."""
    count = columns_at_once(product.columns)
    part = T.alloc_local((count,), "float32")
    for first in range(0, product.columns, count):
        load_row(part, address, warp, first)
        store_sums(part, output, lambda i, first=first: (row + warp * 32 + lane, column + first + i))
