"""Operands whose rows do not begin where they should, copied once to rows that do.

Asynchronous copies move 4, 8 or 16 bytes, from an address that is a multiple of as much. A row of 4095 16-bit elements
begins at such an address by chance only, so that each element is moved by itself, through a register, every time that a
block needs it. A kernel in front, which brings the operand to aligned rows, moves each element by itself *once*.

Rows that are whole 16-byte vectors, but no whole 32-byte sectors, can be copied asynchronously as they are: then the
128 bytes that eight threads bring together begin and end inside of sectors, and to wgmma's panels such copies take
nearly twice as long (``_by_threads`` in :mod:`schedules.cycles` says why). Where each element is brought often enough,
moving these rows once pays, too, of one operand or of both.

Copies through the L1 cache (``cp.async.ca``, for 16 bytes too) are no way out. A kernel that only copies such rows has
about twice the bandwidth so, as the halves of a sector arrive together; but with them 11 products took step 10 1.09
times as long (geometric mean, H200), whose rings leave that cache too little room. Nor does it help to have
neighbouring threads share each sector.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tensorir_ladder.schedules.arguments import Operand, Positive, ThreadCount
from tensorir_ladder.schedules.errors import IllegalSchedule, warn
from tensorir_ladder.schedules.inspection import (
    block_name,
    constant_shape,
    is_multiple,
    loop_extent,
    loops_below,
    operand_regions,
)
from tensorir_ladder.schedules.isa import VECTOR_BYTES
from tensorir_ladder.schedules.loops.layout import pad_to_tile
from tensorir_ladder.schedules.loops.tiling import bind_grid
from tensorir_ladder.schedules.loops.vectorization import dtype_bytes
from tensorir_ladder.schedules.memory.staging import KEPT, inline_data_movement
from tensorir_ladder.schedules.pipeline.pipelining import pipeline_loop

# What a thread stores at once. 16 only where the caller passes workspaces in: TVM takes memory that a function
# allocates itself, and only accesses in vectors of one width, for an array of these, and then fails on cp.async.
STORED_BYTES = (4, 8, 16)
MOST_LOADS = 4  # for one store


@dataclass(frozen=True)
class AlignedOperand:
    """A copy with aligned rows: which operand of the contraction, and the block that stores it."""

    operand: int
    copy: SBlockRV


def unaligned_operands(sch: Schedule, block: SBlockRV, row_bytes: Positive = VECTOR_BYTES) -> list[int]:
    """Return which of a contraction's operands (0, 1) have rows that need not be multiples of ``row_bytes``."""
    operands = [region.source for region in operand_regions(sch, block)]
    unit = [math.lcm(row_bytes, dtype_bytes(operand.dtype)) // dtype_bytes(operand.dtype) for operand in operands]
    return [position for position, operand in enumerate(operands) if not is_multiple(operand.shape[-1], unit[position])]


def align_operands(
    sch: Schedule,
    block: SBlockRV,
    tile: Sequence[Positive],
    *,
    row_bytes: int | Sequence[int] = VECTOR_BYTES,
    threads: ThreadCount = 256,
    vector_bytes: Positive = 8,
    rounds: Positive = 4,
) -> tuple[AlignedOperand, ...]:
    """Copy a contraction's unaligned operands to aligned rows in device memory, all by one kernel in front.

    ::

        before   for i, j, k:  C[i, j] += A[i, k] * B[k, j]            # rows of 4095 elements of 2 bytes
        after    for tile, bound to blockIdx.x:  for thread < 256, bound to threadIdx.x:
                   for round < 4:                                       # written out; threads side by side in each
                     for element < 4:  A_local[round, element] = A[i, k + element] if inside, else 0
                   for round < 4:
                     A_pad[i, k : k + 4] = A_local[round, ...]          # 8 bytes; rows of 4096 elements
                   B_pad = B, alike
                 for i, j, k:  C[i, j] += A_pad[i, k] * B_pad[k, j]

    Rows of 4088 elements are loaded in vectors, too, of the widest that begin at multiples of their size, 16 bytes
    here. A thread gathers at most 4 loads for a store. Rows, columns and reduction are rounded up to multiples of
    ``tile`` (one extent per loop of the block, 1 for a batch), so that what copies tiles of A_pad later needs no
    conditions. An aligned operand stays where it is, padded on its way. Call it before the block is tiled, and let what
    follows tile it alike. The function then allocates A_pad itself. Returns the copies, none where all rows are
    aligned: then nothing changes. Otherwise a UserWarning names the copies and their bytes, since they cost time and
    memory.

    Parameters
    ----------
    row_bytes : what an aligned row's bytes are a multiple of, of each operand or of both: 16, so that each can be
        copied asynchronously, 32 or 128, so that each begins with a sector or a cache line.
    threads : threads of a block of the copying kernel.
    vector_bytes : what a thread stores at once, an element at least. With 16, lower the module as
        :func:`schedules.memory.pass_workspaces` returns it: TVM fails on cp.async otherwise.
    rounds : how many vectors of the largest operand each thread copies; all its loads are on their way together.

    Raises
    ------
    IllegalSchedule : for a tile whose rows are unaligned, too; for vectors or rows of no legal size; and what
        :func:`schedules.loops.pad_to_tile` raises.
    """
    wanted = _of_each_operand(sch, block, row_bytes)
    units = {each: unit for each, unit in enumerate(wanted) if each in unaligned_operands(sch, block, unit)}
    if not units:
        return ()
    _check(sch, block, units, tile, vector_bytes)
    unaligned = list(units)
    widths = [_widths(operand_regions(sch, block)[operand].source, vector_bytes) for operand in unaligned]
    pad_to_tile(sch, block, tile)
    copies = _copy_together(sch, block, dict(zip(unaligned, widths)), threads, rounds)
    written = [sch.get(copied.copy).writes[0].source for copied in copies]
    named = [f"{padded.name} (rows of whole {unit} bytes)" for padded, unit in zip(written, units.values())]
    size = sum(map(_bytes, written))
    warn(f"copied to {' and '.join(named)}, {size} bytes, by a kernel in front")
    return copies


def compute_operand(sch: Schedule, block: SBlockRV, operand: Operand, threads: ThreadCount = 256) -> SBlockRV:
    """Compute an operand once, by a kernel in front, in the place of computing its tiles wherever they are copied.

    ::

        before   B'[j, k] = f(W[j, k // 8]);   for i, j, k:  C[i, j] += A[i, k] * B'[j, k]
        after    for tile, bound to blockIdx.x:  for thread < 256, bound to threadIdx.x:
                   for element < 8:  B_local[element] = f(W[...]);   B'[j, k : k + 8] = B_local[...]
                 for i, j, k:  C[i, j] += A[i, k] * B'[j, k]

    The function allocates B' itself, and the product copies it as any matrix. ``operand`` counts from 0; extents are
    known. Returns the block that stores B'.

    Raises
    ------
    IllegalSchedule : for an operand that no block computes.
    """
    source = operand_regions(sch, block)[operand].source
    found = [p for p in sch.get_producers(block) if sch.get(p).writes[0].source.same_as(source)]
    if not found:
        raise IllegalSchedule(
            "the operand is a parameter, and computed by no block",
            block=block_name(sch, block),
            value=source.name,
            remedy="take its product as it is",
        )
    (producer,) = found
    inline_data_movement(sch, producer)
    copy = sch.cache_write(producer, 0, "local")
    *outer, row = sch.get_loops(copy)
    width = math.gcd(loop_extent(sch, row), VECTOR_BYTES // dtype_bytes(source.dtype))
    piece, vector = sch.split(row, [None, width])
    tile, thread = sch.split(sch.fuse(*outer, piece), [None, threads])
    bind_grid(sch, [tile])
    sch.bind(thread, "threadIdx.x")
    sch.vectorize(vector)
    sch.annotate(copy, KEPT, 1)
    sch.compute_at(producer, thread, preserve_unit_loops=True)
    for loop in loops_below(sch, producer, thread):
        sch.unroll(loop)
    return copy


def _row_bytes(operand: tirx.Var) -> int:
    return constant_shape(operand)[-1] * dtype_bytes(operand.dtype)


def _bytes(operand: tirx.Var) -> int:
    return math.prod(constant_shape(operand)) * dtype_bytes(operand.dtype)


def _widths(operand: tirx.Var, vector_bytes: int) -> tuple[int, int]:
    """Return how many elements a thread may load at once from an operand's rows, and how many it stores at once."""
    itemsize = dtype_bytes(operand.dtype)
    loaded = max(itemsize, math.gcd(_row_bytes(operand), vector_bytes))
    return loaded // itemsize, max(1, min(vector_bytes, MOST_LOADS * loaded) // itemsize)


def _of_each_operand(sch: Schedule, block: SBlockRV, row_bytes: int | Sequence[int]) -> Sequence[int]:
    """Return the bytes of both operands' rows; IllegalSchedule for others than two whole numbers from 1 on."""
    wanted = (row_bytes, row_bytes) if isinstance(row_bytes, int) else row_bytes
    if len(wanted) != 2 or any(not isinstance(each, int) or each < 1 for each in wanted):
        raise IllegalSchedule(
            "no bytes that rows could be multiples of",
            block=block_name(sch, block),
            value=f"row_bytes={row_bytes!r}",
            limit="a whole number from 1 on, or one for each of both operands",
            remedy="give 16, 32 or 128, or for example (16, 32)",
        )
    return wanted


def _check(sch: Schedule, block: SBlockRV, unaligned: dict[int, int], tile: Sequence[int], vector_bytes: int) -> None:
    """Raise IllegalSchedule where aligned rows cannot be had; ``unaligned`` operands each with its bytes."""
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
    for position, row_bytes in unaligned.items():
        region = operand_regions(sch, block)[position]
        walked = [size for size, iterator in zip(tile, iterators) if region.region[-1].min.same_as(iterator.var)]
        padded_bytes = math.prod(walked) * dtype_bytes(region.source.dtype)
        if padded_bytes % row_bytes:
            raise IllegalSchedule(
                "rows that are rounded up to the tile would still be unaligned",
                block=block_name(sch, block),
                value=f"{region.source.name}: {padded_bytes} bytes",
                limit=f"multiples of {row_bytes}",
                remedy=f"give a tile of whole {row_bytes}-byte rows, or call flatten_contraction first",
            )


def _copy_together(
    sch: Schedule, block: SBlockRV, widths: dict[int, tuple[int, int]], threads: int, rounds: int
) -> tuple[AlignedOperand, ...]:
    """Make what pads operands a kernel of its own, each operand spread over the whole of one grid."""
    padded = {operand: operand_regions(sch, block)[operand].source for operand in widths}
    pieces = [_bytes(source) // dtype_bytes(source.dtype) // widths[o][1] for o, source in padded.items()]
    tiles = max(-(-count // (rounds * threads)) for count in pieces)
    copies, by_thread = [], []
    for (operand, source), count in zip(padded.items(), pieces):
        producer = next(p for p in sch.get_producers(block) if sch.get(p).writes[0].source.same_as(source))
        copy = sch.cache_write(producer, 0, "local")
        thread = _spread(sch, copy, widths[operand][1], [tiles, -(-count // (tiles * threads)), threads])
        copies.append((operand, producer, copy))
        by_thread.append(thread)
    thread = sch.merge(*by_thread) if len(by_thread) > 1 else by_thread[0]
    bind_grid(sch, sch.get_loops(copies[0][2])[:1])
    sch.bind(thread, "threadIdx.x")
    for operand, producer, copy in copies:
        _load_before_storing(sch, producer, copy, widths[operand][0])
    return tuple(AlignedOperand(operand, copy) for operand, _, copy in copies)


def _spread(sch: Schedule, copy: SBlockRV, width: int, grid: Sequence[int]) -> LoopRV:
    """Cut a copy into vectors, and these into tiles, rounds and threads; returns the loop over threads."""
    *outer, row = sch.get_loops(copy)
    piece, vector = sch.split(row, [None, width])
    tile, step, thread = sch.split(sch.fuse(*outer, piece), list(grid))
    sch.reorder(tile, thread, step)
    sch.vectorize(vector)
    sch.annotate(copy, KEPT, 1)
    return thread


def _load_before_storing(sch: Schedule, producer: SBlockRV, copy: SBlockRV, width: int) -> None:
    """Let all rounds be loaded, in vectors of ``width``, before the first is stored; they are written out."""
    *_, step, _ = sch.get_loops(copy)
    sch.compute_at(producer, step, preserve_unit_loops=True)
    loads, vector = sch.split(sch.get_loops(producer)[-1], [None, width])
    sch.vectorize(vector)
    if (rounds := loop_extent(sch, step)) > 1:
        pipeline_loop(sch, step, rounds, async_copy=False)  # the compiler moves no load over a store's condition
    for loop in (loads, step):
        sch.unroll(loop)
