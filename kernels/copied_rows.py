"""Copies of matrices to rows that lie otherwise: to ones that TMA can step over, or back to ones that it cannot.

A row of 4095 elements begins at a multiple of 16 bytes by chance only. Each thread writes 16 aligned bytes of what it
copies to, and reads the two aligned pieces in which these lie, shifted against each other; the second is its
neighbour's first, and in the cache. Elements have 16 bits; longer ones are several.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tvm import tirx
from tvm.ir import Expr
from tvm.script import tirx as T

from tensorir_ladder.kernels.codegen.launch_plan import FIRST_BLOCKS, JOB_NUMBERS, JOBS, MatrixRows
from tensorir_ladder.kernels.roles import OVERLAPS

THREADS = 256
UNIT = 2  # bytes of what is counted
PIECE = 8  # units that a thread writes
BUFFERS = ("source_0", "target_0", "source_1", "target_1")
LONG = ("source_step", "target_step", "extent")  # numbers of 64 bits; others have 32
MOST_BLOCKS = 2**22  # that the kernel is lowered for; a launch has as many as it needs
_COPY = """
__forceinline__ __device__ void copy_piece(
    const unsigned short* from, unsigned short* to, unsigned piece,
    unsigned rows, unsigned width, unsigned columns, long long from_step, long long to_step, long long extent) {
  const unsigned first = piece * 8u, row = first / width, column = first - row * width;
  if (row >= rows) return;
  const long long begin = row * from_step + column;
  const unsigned skew = (unsigned)((unsigned long long)(from + begin) >> 1) & 7u;
  unsigned words[8] = {}, found = 0u;
  if (column + 8u <= columns && begin >= skew && begin - skew + (skew ? 16 : 8) <= extent) {
    const uint4* pieces = (const uint4*)(from + begin - skew);
    const uint4 low = pieces[0], high = skew ? pieces[1] : low;
    words[0] = low.x; words[1] = low.y; words[2] = low.z; words[3] = low.w;
    words[4] = high.x; words[5] = high.y; words[6] = high.z; words[7] = high.w;
#pragma unroll
    for (int i = 0; i < 6; ++i) words[i] = skew & 4u ? words[i + 2] : words[i];
#pragma unroll
    for (int i = 0; i < 5; ++i) words[i] = skew & 2u ? words[i + 1] : words[i];
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = skew & 1u ? words[i] >> 16 | words[i + 1] << 16 : words[i];
    found = 255u;
  } else {
    unsigned own_row = row, own_column = column;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const long long place = own_row * from_step + own_column;
      if (own_row < rows && own_column < columns && place < extent) {
        words[i / 2] |= (unsigned)from[place] << 16 * (i % 2);
        found |= 1u << i;
      }
      if (++own_column == width) { own_column = 0u; ++own_row; }
    }
  }
  unsigned short* into = to + (row * to_step + column);
  if (found == 255u && ((unsigned long long)into & 15u) == 0u) {
    *(uint4*)into = make_uint4(words[0], words[1], words[2], words[3]);
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (found >> i & 1u) into[i] = (unsigned short)(words[i / 2] >> 16 * (i % 2));
}
"""


class Job(NamedTuple):
    """A matrix's copy in numbers, in units of 16 bits.

    ``width`` units of each of ``rows`` rows are gone through in pieces of eight, which lie in one row, or cross rows
    that have no gaps where they are copied to. Of these ``columns`` are copied, where they are within ``extent``.
    Rows begin ``source_step`` and ``target_step`` units apart.
    """

    rows: int
    width: int
    columns: int
    source_step: int
    target_step: int
    extent: int

    @property
    def blocks(self) -> int:
        """Thread blocks, each thread of which writes one piece."""
        return -(-self.rows * self.width // (THREADS * PIECE))


NOTHING = Job(0, 1, 0, 0, 0, 0)


def padding(source: MatrixRows, target: MatrixRows, itemsize: int) -> Job:
    """Describe the copy of a matrix to padded rows, multiples of 16 bytes long; the padding stays undefined.

    Or of a batch whose matrices follow each other without gaps, in the source and in the target.
    """
    width = -(-source.columns * itemsize // (PIECE * UNIT)) * PIECE
    extent = source.extent(itemsize) // UNIT
    return Job(source.all_rows, width, width, source.row_bytes // UNIT, target.row_bytes // UNIT, extent)


def cutting(source: MatrixRows, target: MatrixRows, itemsize: int) -> Job:
    """Describe the copy of the first columns of a matrix to rows between which nothing is written."""
    columns, extent = target.columns * itemsize // UNIT, source.extent(itemsize) // UNIT
    step = target.row_bytes // UNIT if target.rows > 1 else columns
    width = columns if step == columns else -(-columns // PIECE) * PIECE
    return Job(target.rows, width, columns, source.row_bytes // UNIT, step, extent)


def numbers_of(jobs: Sequence[Job]) -> dict[str, int]:
    """Name the whole numbers that the kernel takes for one job, or two."""
    both = (*jobs, NOTHING)[:JOBS]
    numbers = {f"{name}_{place}": getattr(job, name) for place, job in enumerate(both) for name in JOB_NUMBERS}
    return {FIRST_BLOCKS: both[0].blocks, **numbers}


def blocks_of(jobs: Sequence[Job]) -> int:
    """Count the thread blocks of a launch."""
    return sum(job.blocks for job in jobs)


def copied_rows() -> tirx.PrimFunc:
    """``main(source_0, target_0, source_1, target_1, ...)``: copy one matrix, or two, of any sizes, by one launch.

    The numbers of :class:`Job` follow for each, then how many blocks the first has; blocks behind these have the
    second. It waits for the kernel before it in the stream, and then lets the one behind it begin, before it touches
    memory.
    """

    @T.prim_func
    def main(
        source_0_ptr: T.handle,
        target_0_ptr: T.handle,
        source_1_ptr: T.handle,
        target_1_ptr: T.handle,
        rows_0: T.int32,
        width_0: T.int32,
        columns_0: T.int32,
        source_step_0: T.int64,
        target_step_0: T.int64,
        extent_0: T.int64,
        rows_1: T.int32,
        width_1: T.int32,
        columns_1: T.int32,
        source_step_1: T.int64,
        target_step_1: T.int64,
        extent_1: T.int64,
        first_blocks: T.int32,
    ):
        source_0 = T.match_buffer(source_0_ptr, (1,), "uint16")  # of any length: reached by its address alone
        target_0 = T.match_buffer(target_0_ptr, (1,), "uint16")
        source_1 = T.match_buffer(source_1_ptr, (1,), "uint16")
        target_1 = T.match_buffer(target_1_ptr, (1,), "uint16")
        T.device_entry()
        block = T.cta_id([MOST_BLOCKS])
        thread = T.thread_id([THREADS])
        T.ptx.griddepcontrol.wait()
        T.ptx.griddepcontrol.launch_dependents()  # not before: blocks of the product would lie beside the last one's
        if block < first_blocks:
            _copy(
                (source_0.ptr_to([0]), target_0.ptr_to([0]), block * THREADS + thread),
                (rows_0, width_0, columns_0, source_step_0, target_step_0, extent_0),
            )
        else:
            _copy(
                (source_1.ptr_to([0]), target_1.ptr_to([0]), (block - first_blocks) * THREADS + thread),
                (rows_1, width_1, columns_1, source_step_1, target_step_1, extent_1),
            )

    return main.with_attr(OVERLAPS, True)


def _copy(place: tuple[Expr, Expr, Expr], job: tuple[Expr, ...]) -> None:
    """Emit one thread's piece of a job."""
    T.evaluate(T.cuda.func_call("copy_piece", *place, *job, source_code=_COPY))
