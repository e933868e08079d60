"""Tensor cores: a warp's share of a contraction as ``mma.sync`` instructions on fragments.

An instruction is data (:class:`MmaInstruction`): its name, shape and dtypes, from which one builder each makes
TVM's intrinsics to load operands (``ldmatrix``) and to multiply. Where its fragments keep an element is said by three
functions of (row, column), which are the tables of the PTX ISA ("Matrix fragments for mma.m16n8k16") as
arithmetic. The schedule functions are one per idea, and :func:`tensorize_contraction` composes them::

    tile_to_warps          loops: block tile, warp tile, k tile, k step, instruction
    stage_in_swizzled      operands in shared memory, rows swizzled
    load_fragments         operands in registers, in the layout the instruction wants
    accumulate_fragment    the result in registers, its zeroing and write-back as ordinary loops over lanes
    use_instruction        the innermost loops replaced

Before the last one, :func:`use_instruction`, the schedule is ordinary TensorIR, which runs on a CPU: that is how
tiles, fragment layouts and the pipeline are checked where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tvm import ir, tirx
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tensorir_ladder.schedules.arguments import Operand, Positive, SharedScope, Threads
from tensorir_ladder.schedules.errors import IllegalPipeline, IllegalSchedule
from tensorir_ladder.schedules.inspection import block_name, loop_name, loops_below
from tensorir_ladder.schedules.isa import MMA, MmaInstruction
from tensorir_ladder.schedules.loops.layout import check_product, check_sums, contraction_loops, pad_to_tile
from tensorir_ladder.schedules.loops.tiling import bind_batched_grid, k_tiles_together, pipelined_k_tiles, raster_blocks
from tensorir_ladder.schedules.loops.vectorization import vectorize_inner, widest_vector
from tensorir_ladder.schedules.memory.staging import (
    CooperativeFetch,
    accumulate_in_registers,
    fetch_cooperatively,
    initialize_before,
    inline_data_movement,
    stage_in_shared,
)
from tensorir_ladder.schedules.memory.swizzling import swizzle_rows
from tensorir_ladder.schedules.passes import require_pipeline
from tensorir_ladder.schedules.pipeline.one_barrier import HIDES_READS, ONE_BARRIER
from tensorir_ladder.schedules.pipeline.one_barrier import hide_reads as mark_hidden
from tensorir_ladder.schedules.tensor_cores.fragments import FRAGMENT
from tensorir_ladder.schedules.tensor_cores.intrinsics import load_intrinsic, multiply_intrinsic, tile_size
from tensorir_ladder.schedules.tiles import TensorCoreTile

RASTER_ROWS = 2048  # as many as 132 blocks of 128 x 128 have columns beside them: about a square


def instruction_for(dtype: str) -> MmaInstruction:
    """Return the instruction for operands of a dtype; IllegalSchedule lists the dtypes that have one."""
    if dtype not in MMA:
        raise IllegalSchedule(
            "no tensor core instruction for operands of this dtype",
            value=dtype,
            limit=" | ".join(MMA),
            remedy="use one of these; for float32 rounded to TF32 (11 bits), ask for it: instruction=TF32",
        )
    return MMA[dtype]


@dataclass(frozen=True)
class WarpLoops:
    """The loops of a contraction cut for warps, by role, outermost first.

    ``block_*`` walk the grid's tiles, ``warp`` the warps of a block, ``k_outer`` the k tiles, ``k_step`` the
    instruction's steps inside one, ``fragment_*`` a warp's fragments, ``element_*`` the elements of one instruction.
    """

    block_row: LoopRV
    block_column: LoopRV
    warp: LoopRV
    k_outer: LoopRV
    k_step: LoopRV
    fragment_row: LoopRV
    fragment_column: LoopRV
    element_row: LoopRV
    element_column: LoopRV
    element_k: LoopRV


def tile_to_warps(
    sch: Schedule,
    rows: LoopRV,
    columns: LoopRV,
    reduction: LoopRV,
    tile: TensorCoreTile,
    instruction: MmaInstruction,
) -> WarpLoops:
    """Cut a contraction's three loops into block, warp and instruction tiles, and reorder them.

    ::

        before   for i < M:  for j < N:  for k < K:  C[i, j] += ...
        after    for block_row:  for block_column:  for warp < warps, bound to threadIdx.y:
                   for k_outer < K / block_k:  for k_step < block_k / 16:
                     for fragment_row < warp_m / 16:  for fragment_column < warp_n / 16:
                       for element_row < 16:  for element_column < 16:  for element_k < 16:  C[...] += ...

    Extents must be multiples of the tile's (:func:`schedules.loops.pad_to_tile`).

    Raises
    ------
    IllegalTile : for a tile of another family; if warp tiles do not divide the block tile, or instructions these.
    """
    TensorCoreTile.check_family(tile)
    tile.check_sound()
    m, n = tile.warps
    block_row, warp_row, fragment_row, element_row = sch.split(
        rows, [None, m, tile.warp[0] // instruction.M, instruction.M]
    )
    block_column, warp_column, fragment_column, element_column = sch.split(
        columns, [None, n, tile.warp[1] // instruction.N, instruction.N]
    )
    k_outer, k_step, element_k = sch.split(reduction, [None, tile.block_k // instruction.k, instruction.k])
    inner = (k_outer, k_step, fragment_row, fragment_column, element_row, element_column, element_k)
    sch.reorder(block_row, block_column, warp_row, warp_column, *inner)
    warp = sch.fuse(warp_row, warp_column)
    sch.bind(warp, "threadIdx.y")
    return WarpLoops(block_row, block_column, warp, *inner)


def stage_in_swizzled(
    sch: Schedule,
    block: SBlockRV,
    operand: Operand,
    loop: LoopRV,
    threads: Threads,
    scope: SharedScope = "shared",
    k_last: bool = False,
) -> CooperativeFetch:
    """Copy an operand's tile to shared memory by all threads, in the widest vectors, its rows swizzled.

    :func:`schedules.memory.stage_in_shared`, :func:`schedules.memory.fetch_cooperatively` and
    :func:`schedules.memory.swizzle_rows` in one; errors are theirs. ``k_last`` transposes a tile on its way
    that has not k as its last dimension, element by element, for instructions that cannot.
    """
    copy = stage_in_shared(sch, block, operand, loop, scope)
    inline_data_movement(sch, copy)
    if k_last and not _ends_with_k(sch, block, operand):
        sch.transform_layout(copy, ("write", 0), lambda *index: [*index[:-2], index[-1], index[-2]])
    fetch = fetch_cooperatively(sch, copy, loop, threads, vectorize=True)
    swizzle_rows(sch, copy)
    return fetch


@dataclass(frozen=True)
class FragmentLoad:
    """A copy of an operand into fragments: its block, the outer loop over one fragment's elements, its intrinsic."""

    load: SBlockRV
    elements: LoopRV
    intrinsic: str


def load_fragments(
    sch: Schedule,
    block: SBlockRV,
    operand: Operand,
    loop: LoopRV,
    instruction: MmaInstruction,
    hide_reads: bool = False,
) -> FragmentLoad:
    """Copy what one iteration of ``loop`` reads of an operand to registers, in the instruction's layout.

    ::

        before   for k_step:  C[i, j] += A_shared[i, k] * ...
        after    for k_step:
                   for fragment:  for r < 16:  for k < 16:  A_frag[fragment, lane(r, k), register(r, k)] = A_shared[...]
                   C[i, j] += A_frag[...] * ...

    ``hide_reads`` makes the later intrinsic read in a way that TVM's pass for barriers cannot see, for loops with
    one barrier (:mod:`schedules.pipeline.one_barrier`). ``operand`` counts from 0; either may be stored with k as its
    last dimension, or with k as the one before.
    """
    by_k = _ends_with_k(sch, block, operand)
    require_pipeline(sch, FRAGMENT)
    load = sch.cache_read(block, operand, FRAGMENT)
    sch.compute_at(load, loop)
    place = instruction.place_in_b if operand else instruction.place_in_a
    size = tile_size(instruction, by_k)

    def layout(*index: tirx.Var) -> list[ir.Expr]:
        *outer, down, right = index
        return [*outer, down // size[0], right // size[1], *place(*((down, right) if by_k else (right, down)))]

    first, second = loops_below(sch, load, loop)[-2:]
    first_outer, first_inner = sch.split(first, [None, size[0]])
    second_outer, second_inner = sch.split(second, [None, size[1]])
    sch.reorder(first_outer, second_outer, first_inner, second_inner)
    for unrolled in (first_outer, second_outer):
        sch.unroll(unrolled)
    sch.transform_layout(load, ("write", 0), layout)
    scope = str(sch.get(load).reads[0].source.scope())
    if hide_reads:
        mark_hidden(sch, load)
    return FragmentLoad(load, first_inner, load_intrinsic(instruction, operand, by_k, scope, hide_reads))


def accumulate_fragment(sch: Schedule, block: SBlockRV, loops: WarpLoops, instruction: MmaInstruction) -> SBlockRV:
    """Keep a warp's results in registers, in the instruction's layout, and write them back once, lane by lane.

    ::

        before   for warp:  for k_outer:  ... C[i, j] += ...
        after    for warp:
                   for k_outer:  ... C_frag[fragment, lane(i, j), register(i, j)] += ...
                   for fragment, row % 16 // 8, column % 16 // 8:
                     for lane < 32, bound to threadIdx.x:  D[2 columns] = f(C_frag[fragment, lane, 2 registers])

    The write-back is an ordinary block: predicated where the result is ragged, with what follows elementwise fused
    (:func:`schedules.memory.accumulate_in_registers`), two columns a store where their alignment allows.
    Returns it.
    """
    write_back = accumulate_in_registers(sch, block, loops.warp, FRAGMENT)
    sch.transform_layout(block, ("write", 0), _accumulator_layout(instruction))
    pair = _spread_over_lanes(sch, write_back, loops.warp)
    vectorize_inner(sch, pair, widest_vector(sch, write_back, pair))
    return write_back


def zero_fragment(sch: Schedule, block: SBlockRV, loops: WarpLoops) -> SBlockRV:
    """Zero a warp's results before the k loop, each lane its own; returns the block that does it.

    ::

        before   for warp:  for k_outer:  if first: C_frag = 0;  ...
        after    for warp:  for lane < 32, bound to threadIdx.x:  C_frag[..., lane, registers] = 0
                   for k_outer:  ...
    """
    zeroing = initialize_before(sch, block, loops.k_outer)
    _spread_over_lanes(sch, zeroing, loops.warp)
    return zeroing


def use_instruction(
    sch: Schedule, loops: WarpLoops, loads: Sequence[FragmentLoad], instruction: MmaInstruction
) -> None:
    """Replace the loops over one instruction's elements by the instruction, and fragment copies by ``ldmatrix``.

    ::

        before   for r < 16:  for k < 16:  A_frag[lane(r, k), register(r, k)] = A_shared[r, k]
                 for r < 16:  for c < 16:  for k < 16:  C_frag[...] += A_frag[...] * B_frag[...]
        after    ldmatrix(A_frag[lane], A_shared[...])
                 mma(C_frag[lane, 0:4], A_frag[lane], B_frag[lane, 0:4]);  mma(C_frag[lane, 4:8], ...)

    The last step of a schedule: a schedule with instructions cannot be copied (TVM 0.27), and so not pipelined.

    Raises
    ------
    IllegalPipeline : for loads that hide their reads, where no loop with one barrier is around them.
    """
    k_outer = loops.k_outer
    hiding = [load.load for load in loads if HIDES_READS in sch.get(load.load).annotations]
    if hiding and ONE_BARRIER not in sch.get(k_outer).annotations:
        raise IllegalPipeline(
            "its reads are hidden from TVM, which would put no barrier between them and the copies",
            block=block_name(sch, hiding[0]),
            loop=loop_name(sch, k_outer),
            remedy="call pipeline_loop(sch, k_outer, one_barrier=True) first, or leave hide_reads out",
        )
    for load in loads:
        sch.tensorize(load.elements, load.intrinsic)
    sch.tensorize(loops.element_row, multiply_intrinsic(instruction))


@dataclass(frozen=True)
class TensorizedContraction:
    """A contraction on tensor cores: its loops, its copies to shared memory and to fragments, its write-back."""

    loops: WarpLoops
    copies: tuple[CooperativeFetch, ...]
    loads: tuple[FragmentLoad, ...]
    write_back: SBlockRV
    instruction: MmaInstruction


def tensorize_contraction(
    sch: Schedule,
    block: SBlockRV,
    tile: TensorCoreTile,
    *,
    scope: SharedScope = "shared",
    raster_rows: Positive = RASTER_ROWS,
    hide_reads: bool = False,
    instruction: MmaInstruction | None = None,
) -> TensorizedContraction:
    """Compute a (batched) matrix product on tensor cores: tiles to blocks and warps, operands in shared memory.

    ::

        before   for (batch,) i, j, k:  C[i, j] += A[i, k] * B[k, j]
        after    for tile, bound to blockIdx.x:  for warp, bound to threadIdx.y:
                   C_frag = 0
                   for k_outer:
                     A_shared = A[tile];  B_shared = B[tile]                   # by all threads together, swizzled
                     for k_step:
                       A_frag = A_shared[...];  B_frag = B_shared[...]         # ldmatrix
                       for fragment_row, fragment_column:  C_frag += A_frag * B_frag    # mma.sync
                   C = C_frag

    ``block`` has the loops rows, columns, reduction, and maybe more outside, which join the grid. Ragged extents are
    padded with zeros on their way (:func:`schedules.loops.pad_to_tile`). ``scope`` holds the shared tiles;
    ``raster_rows`` are the rows of the result whose blocks run together (:func:`schedules.loops.raster_blocks`; 1 for
    row order); ``hide_reads`` is for loops with one barrier. ``instruction`` is that of the operands' dtype where none
    is given; float32 operands have none of their own, because :data:`TF32` rounds them to 11 bits. Instructions
    come last, after the loops were pipelined: :func:`use_instruction`.

    Raises
    ------
    IllegalSchedule : for a block with fewer than three loops, or that is no sum of products A * B; for operands in a
        dtype without an instruction, or not the one of the instruction asked for.
    IllegalTile : for tiles that do not divide.
    """
    loops_of_block = contraction_loops(sch, block)
    TensorCoreTile.check_family(tile)
    tile.check_sound()
    instruction = fitting_instruction(sch, block, instruction)
    *batch, rows, columns, reduction = loops_of_block
    k_tile = tile.block_k * k_tiles_together(sch, reduction)
    if pad_to_tile(sch, block, [*(1 for _ in batch), tile.block_m, tile.block_n, k_tile]):
        *batch, rows, columns, reduction = sch.get_loops(block)
    loops = tile_to_warps(sch, rows, columns, reduction, tile, instruction)
    group = max(1, raster_rows // tile.block_m)
    bind_batched_grid(sch, batch, raster_blocks(sch, loops.block_row, loops.block_column, group))
    write_back = accumulate_fragment(sch, block, loops, instruction)
    copies = tuple(
        stage_in_swizzled(sch, block, operand, loops.k_outer, tile.threads, scope, not instruction.transposes)
        for operand in (0, 1)
    )
    loads = tuple(load_fragments(sch, block, operand, loops.k_step, instruction, hide_reads) for operand in (0, 1))
    for loop in (loops.k_step, loops.fragment_row, loops.fragment_column):
        sch.unroll(loop)
    zero_fragment(sch, block, loops)
    loops = replace(loops, k_outer=pipelined_k_tiles(sch, loops.k_outer))
    return TensorizedContraction(loops, copies, loads, write_back, instruction)


def fitting_instruction(sch: Schedule, block: SBlockRV, instruction: MmaInstruction | None = None) -> MmaInstruction:
    """Return the instruction asked for, or that of the dtype of a block's operands.

    Raises
    ------
    IllegalSchedule : for operands in a dtype without an instruction, or not the one of the instruction asked for; for a
        block that is no sum of A[rows, k] * B[k, columns], each widened before they are multiplied.
    """
    check_product(sch, block)
    dtype = str(sch.get(block).reads[0].source.dtype)
    if instruction and instruction.dtype != dtype:
        raise IllegalSchedule(
            f"the instruction multiplies {instruction.dtype}",
            value=f"{dtype} operands",
            limit=instruction.dtype,
            remedy="leave the instruction out to get the one of the operands' dtype",
        )
    found = instruction or instruction_for(dtype)
    check_sums(sch, block, found.accumulator)
    return found


def _ends_with_k(sch: Schedule, block: SBlockRV, operand: int) -> bool:
    """Return whether the last index of an operand is the reduction's."""
    stmt = sch.get(block)
    return bool(stmt.reads[operand].region[-1].min.same_as(stmt.iter_vars[-1].var))


def _accumulator_layout(instruction: MmaInstruction) -> Callable[..., list[ir.Expr]]:
    def layout(*index: tirx.Var) -> list[ir.Expr]:
        *outer, row, column = index
        return [*outer, row // instruction.M, column // instruction.N, *instruction.place_in_c(row, column)]

    return layout


def _spread_over_lanes(sch: Schedule, block: SBlockRV, warp: LoopRV) -> LoopRV:
    """Bind the lanes that hold a warp's results to threadIdx.x, all else unrolled; returns the loop over a pair.

    ::

        before   for row < warp_m:  for column < warp_n:  ... C_frag[lane(row, column), register(row, column)]
        after    for 16 rows, 8 of these, 16 columns, 8 of these:
                   for lane < 32, bound to threadIdx.x:  for pair < 2:  ...
    """
    loops = loops_below(sch, block, warp)
    rows, columns = loops[-2:] if len(loops) == 2 else _fused_sides(sch, loops)
    rows_16, rows_8, row = sch.split(rows, [None, 2, 8])
    columns_16, columns_8, quad, pair = sch.split(columns, [None, 2, 4, 2])
    sch.reorder(rows_16, rows_8, columns_16, columns_8, row, quad, pair)
    for loop in (rows_16, rows_8, columns_16, columns_8, pair):
        sch.unroll(loop)
    sch.bind(sch.fuse(row, quad), "threadIdx.x")
    return pair


def _fused_sides(sch: Schedule, loops: list[LoopRV]) -> tuple[LoopRV, LoopRV]:
    """Fuse the loops (rows 16, columns 16, row, column) of a zeroed tile to rows and columns."""
    rows_outer, columns_outer, row, column = loops
    sch.reorder(rows_outer, row, columns_outer, column)
    return sch.fuse(rows_outer, row), sch.fuse(columns_outer, column)
