"""Operands whose rows are no whole 16-byte vectors, copied once to rows that are.

Asynchronous copies move 4, 8 or 16 bytes, from an address that is a multiple of as much. A row of 4095 16-bit elements
begins at such an address by chance only, so that each element is moved by itself, through a register, every time that a
block needs it. A kernel in front, which brings the operand to aligned rows, moves each element by itself *once*.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import SBlockRV

from .caching import KEPT
from .errors import IllegalSchedule
from .inspection import block_name, operand_regions
from .layout import pad_to_tile
from .tiling import bind_grid
from .vectorization import VECTOR_BYTES, dtype_bytes

# What a thread stores at once. Not 16, as the copies to shared memory load: TVM takes memory that is only accessed in
# vectors of one width for an array of these, and then fails on cp.async.
STORED_BYTES = (4, 8)


@dataclass(frozen=True)
class AlignedOperand:
    """A copy with aligned rows: which operand of the contraction, and the block that stores it."""

    operand: int
    copy: SBlockRV


def unaligned_operands(sch: Schedule, block: SBlockRV) -> list[int]:
    """Which of a contraction's operands (0, 1) have rows that are no whole 16-byte vectors."""
    operands = [region.source for region in operand_regions(sch, block)]
    row_bytes = [int(operand.shape[-1]) * dtype_bytes(operand.dtype) for operand in operands]
    return [position for position, size in enumerate(row_bytes) if size % VECTOR_BYTES]


def align_operands(
    sch: Schedule,
    block: SBlockRV,
    tile: Sequence[int],
    *,
    threads: int = 256,
    vector_bytes: int = 8,
    rounds: int = 4,
) -> tuple[AlignedOperand, ...]:
    """Copy a contraction's unaligned operands to aligned rows in device memory, each by a kernel in front.

    ::

        before   for i, j, k:  C[i, j] += A[i, k] * B[k, j]            # A's rows: 4095 elements of 2 bytes
        after    for tile, bound to blockIdx.x:  for thread < 256, bound to threadIdx.x:
                   for round < 4:                                       # written out; threads side by side in each
                     for element < 4:  A_local[element] = A[i, k + element] if inside, else 0
                     A_pad[i, k : k + 4] = A_local[...]                 # 8 bytes; rows of 4096 elements
                 for i, j, k:  C[i, j] += A_pad[i, k] * B[k, j]

    Rows, columns and reduction are rounded up to multiples of ``tile`` (one extent per loop of the block, 1 for a
    batch), so that what copies tiles of A_pad later needs no conditions. An aligned operand stays where it is, padded
    on its way. Call it before the block is tiled, and let what follows tile it alike. The function then allocates
    A_pad itself. Returns the copies, none where all rows are aligned: then nothing changes. Otherwise a UserWarning
    names the copies and their bytes, since they cost time and memory.

    Parameters
    ----------
    threads : threads of a block of the copying kernel.
    vector_bytes : what a thread stores at once, an element at least.
    rounds : how many vectors each thread copies, one after the other, whose loads are on their way together.

    Raises
    ------
    IllegalSchedule : for a tile whose rows are unaligned, too; for vectors of no legal size; and what
        :func:`schedules.layout.pad_to_tile` raises.
    """
    unaligned = unaligned_operands(sch, block)
    if not unaligned:
        return ()
    _check(sch, block, unaligned, tile, vector_bytes)
    pad_to_tile(sch, block, tile)
    copies = tuple(_copy_aligned(sch, block, operand, threads, vector_bytes, rounds) for operand in unaligned)
    written = [sch.get(copied.copy).writes[0].source for copied in copies]
    size = sum(math.prod(map(int, padded.shape)) * dtype_bytes(padded.dtype) for padded in written)
    names = " and ".join(str(padded.name) for padded in written)
    warnings.warn(
        f"rows of no whole {VECTOR_BYTES}-byte vectors: copied to {names}, {size} bytes, by kernels in front",
        stacklevel=2,
    )
    return copies


def _check(sch: Schedule, block: SBlockRV, unaligned: list[int], tile: Sequence[int], vector_bytes: int) -> None:
    """Raise IllegalSchedule where aligned rows cannot be had."""
    if vector_bytes not in STORED_BYTES:
        raise IllegalSchedule(
            "no vectors for a thread to store",
            block=block_name(sch, block),
            value=f"{vector_bytes} bytes",
            limit=" or ".join(map(str, STORED_BYTES)),
            remedy="choose one of these",
        )
    iterators = sch.get(block).iter_vars
    if len(tile) != len(iterators):
        return  # pad_to_tile says so
    for region in (operand_regions(sch, block)[position] for position in unaligned):
        walked = [size for size, iterator in zip(tile, iterators) if region.region[-1].min.same_as(iterator.var)]
        row_bytes = math.prod(walked) * dtype_bytes(region.source.dtype)
        if row_bytes % VECTOR_BYTES:
            raise IllegalSchedule(
                "rows that are rounded up to the tile would still be unaligned",
                block=block_name(sch, block),
                value=f"{region.source.name}: {row_bytes} bytes",
                limit=f"multiples of {VECTOR_BYTES}",
                remedy=f"give a tile of whole {VECTOR_BYTES}-byte rows, or call flatten_contraction first",
            )


def _copy_aligned(
    sch: Schedule, block: SBlockRV, operand: int, threads: int, vector_bytes: int, rounds: int
) -> AlignedOperand:
    """Make what pads an operand a kernel of its own."""
    padded = operand_regions(sch, block)[operand].source
    producer = next(p for p in sch.get_producers(block) if sch.get(p).writes[0].source.same_as(padded))
    copy = sch.cache_write(producer, 0, "local")
    *outer, row = sch.get_loops(copy)
    piece, vector = sch.split(row, [None, max(1, vector_bytes // dtype_bytes(padded.dtype))])
    tile, step, thread = sch.split(sch.fuse(*outer, piece), [None, rounds, threads])
    sch.reorder(tile, thread, step)
    bind_grid(sch, [tile])
    sch.bind(thread, "threadIdx.x")
    sch.compute_at(producer, step, preserve_unit_loops=True)
    for loop in (sch.get_loops(producer)[-1], step):
        sch.unroll(loop)
    sch.vectorize(vector)
    sch.annotate(copy, KEPT, 1)
    return AlignedOperand(operand, copy)
