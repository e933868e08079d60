"""The composition most contractions start from: tiles, shared memory and registers in one call."""

from __future__ import annotations

from dataclasses import dataclass

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import SBlockRV

from tensorir_ladder.schedules.arguments import SharedScope
from tensorir_ladder.schedules.inspection import loops_below
from tensorir_ladder.schedules.loops.layout import contraction_loops, pad_to_tile
from tensorir_ladder.schedules.loops.tiling import TiledLoops, bind_batched_grid, bind_threads, tile_contraction
from tensorir_ladder.schedules.loops.vectorization import vectorize_write_back
from tensorir_ladder.schedules.memory.staging import (
    CooperativeFetch,
    accumulate_in_registers,
    accumulate_per_tile,
    fetch_cooperatively,
    initialize_before,
    inline_data_movement,
    stage_in_shared,
    stage_through_registers,
)
from tensorir_ladder.schedules.tiles import ThreadTile


@dataclass(frozen=True)
class StagedContraction:
    """A contraction in tiles: its loops by role, and its blocks.

    ``copies`` fill shared memory, one per operand; ``write_back`` stores a thread's results. ``k_inner``
    and the ``register_*`` loops are gone where products are kept per tile.
    """

    loops: TiledLoops
    copies: tuple[CooperativeFetch, ...]
    write_back: SBlockRV


def stage_contraction(
    sch: Schedule,
    block: SBlockRV,
    tile: ThreadTile,
    *,
    vectorize: bool = False,
    scope: SharedScope = "shared",
    through_registers: bool = False,
    product_per_tile: bool = False,
) -> StagedContraction:
    """Tile a contraction over the grid, stage its operands in shared memory, accumulate in registers.

    ::

        before   for (batch,) i, j, k:  C[i, j] += A[i, k] * B[k, j]
        after    for tile, bound to blockIdx.x:  for thread_row, thread_column, bound to threadIdx:
                   C_local = 0
                   for k_outer:
                     A_shared = A[tile];  B_shared = B[tile]          # by all threads together
                     for k_inner, register_row, register_column:  C_local += A_shared * B_shared
                   C = C_local

    The block's loops are, outermost first: any number of batch loops, rows, columns, one reduction loop
    (:func:`schedules.loops.flatten_contraction` brings other contractions to this form). Ragged extents
    are padded on the fly (:func:`schedules.loops.pad_to_tile`). Every part is a function of its own in
    this package; this one only calls them in the order that works.

    Parameters
    ----------
    tile : the tile; its thread tile may be 1×1.
    vectorize : make copies and write-back as wide as alignment allows.
    scope : "shared" or "shared.dyn" (:meth:`schedules.tiles.ThreadTile.shared_scope` chooses).
    through_registers : split each copy into a load to registers and a store to shared memory.
    product_per_tile : keep each k tile's product apart and add it as a statement of its own.
    """
    *batch, rows, columns, reduction = contraction_loops(sch, block)
    if pad_to_tile(sch, block, [1] * len(batch) + list(tile.block)):
        *batch, rows, columns, reduction = sch.get_loops(block)
    loops = tile_contraction(sch, rows, columns, reduction, tile)
    computing = accumulate_per_tile(sch, block, loops.k_outer) if product_per_tile else block
    bind_batched_grid(sch, batch, [loops.block_row, loops.block_column])
    bind_threads(sch, loops.thread_row, loops.thread_column)
    write_back = accumulate_in_registers(sch, block, loops.thread_column)
    if vectorize:
        vectorize_write_back(sch, write_back, loops.thread_column)
    copies = []
    for operand in (0, 1):
        copy = stage_in_shared(sch, computing, operand, loops.k_outer, scope)
        load = stage_through_registers(sch, copy, loops.k_outer) if through_registers else None
        inline_data_movement(sch, load or copy)
        copies.append(fetch_cooperatively(sch, copy, loops.k_outer, tile.threads, vectorize, load))
    initialize_before(sch, block, loops.k_outer)
    if product_per_tile:
        initialize_before(sch, computing, loops_below(sch, computing, loops.k_outer)[0])
    return StagedContraction(loops, tuple(copies), write_back)
