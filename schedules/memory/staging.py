"""Bringing operands closer: shared memory for a block's threads, registers for one thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV, ScheduleError

from tensorir_ladder.schedules.arguments import Operand, RegisterScope, SharedScope, SomeAtLeast, Threads
from tensorir_ladder.schedules.errors import IllegalSchedule
from tensorir_ladder.schedules.inspection import (
    FRAGMENT,
    block_name,
    condition_of,
    innermost_iterator,
    is_constant,
    is_one,
    iterators_of,
    loop_extent,
    loop_name,
    loops_below,
    operand_regions,
    terms_of,
)
from tensorir_ladder.schedules.isa import ROW_BYTES, SECTOR_BYTES, VECTOR_BYTES, WARP
from tensorir_ladder.schedules.loops.layout import index_map
from tensorir_ladder.schedules.loops.vectorization import dtype_bytes, vectorize_inner, widest_vector
from tensorir_ladder.schedules.passes import replace_untraced, require_pipeline, with_loop_body

# On a copy that is not inlined: a kernel of its own (schedules.memory.alignment), or out of rows in shared memory
# (schedules.tensor_cores.warpgroup).
KEPT = "kept_in_memory"
ADDS_PARTS = "adds_parts"  # on the block that adds up what schedules.recipes.split_reduction has summed in parts


def stage_in_shared(
    sch: Schedule, block: SBlockRV, operand: Operand, loop: LoopRV, scope: SharedScope = "shared"
) -> SBlockRV:
    """Copy the part of an operand that one iteration of ``loop`` reads to shared memory, and read it there.

    ::

        before   for k_outer:  ... C[i, j] += A[i, k] * ...
        after    for k_outer:
                   A_shared[tile] = A[tile]           # the new block
                   ... C[i, j] += A_shared[i, k] * ...

    ``operand`` counts the block's reads from 0; ``scope`` is "shared" (static, at most 48 KiB in all) or
    "shared.dyn". Returns the copy block, which each thread still executes whole:
    :func:`fetch_cooperatively` spreads it. Where the operand is padded or re-indexed on its way, follow
    with :func:`inline_data_movement`.
    """
    copy = sch.cache_read(block, operand, scope)
    sch.compute_at(copy, loop, preserve_unit_loops=True)
    return copy


def inline_data_movement(sch: Schedule, block: SBlockRV) -> int:
    """Inline every producer of ``block`` that has no reduction, up to the function's inputs.

    ::

        before   A_pad[i, k] = if i < M then A[i, k] else 0;   A_shared[i, k] = A_pad[i, k]
        after    A_shared[i, k] = if i < M then A[i, k] else 0

    Returns how many blocks were inlined.
    """
    inlined = 0
    while producers := [p for p in sch.get_producers(block) if _is_data_movement(sch, p)]:
        sch.compute_inline(producers[0])
        inlined += 1
    return inlined


@dataclass(frozen=True)
class CooperativeFetch:
    """A copy that a block's threads share: vectors of ``width`` elements, and its loops by role."""

    copy: SBlockRV
    rounds: LoopRV
    thread_row: LoopRV
    thread_column: LoopRV
    width: int


def longest_rounds(sch: Schedule, copies: Annotated[Sequence[CooperativeFetch], SomeAtLeast()]) -> LoopRV:
    """Return the rounds of the copy that takes most: a place for marks that are read when functions are lowered.

    Loops of one iteration are lowered away together with their marks: pipelined ones of few k tiles, too.
    """
    return max((copy.rounds for copy in copies), key=lambda rounds: loop_extent(sch, rounds))


def fetch_cooperatively(
    sch: Schedule,
    copy: SBlockRV,
    loop: LoopRV,
    threads: Threads,
    vectorize: bool = False,
    load: SBlockRV | None = None,
) -> CooperativeFetch:
    """Spread a copy under ``loop`` over the threads (rows, columns) of the block, neighbours side by side.

    ::

        before   for i < 64:  for k < 16:  A_shared[i, k] = A[i, k]
        after    for rounds < 1:
                   for row < 16, bound to threadIdx.y:  for column < 16, bound to threadIdx.x:
                     A_shared[vector] = A[vector]      # 4 floats, where rows are multiples of 4

    ``vectorize`` makes each access as wide as is legal (:func:`schedules.loops.widest_vector`);
    the width is in the result, 1 where only scalars are legal. Where the elements do not divide evenly
    among the threads the last round is predicated. ``load`` is the register load in front of the copy
    (:func:`stage_through_registers`): it is spread alike, with the same width, because a thread can store
    only what it loaded itself.
    """
    chain = [copy] if load is None else [load, copy]
    own_loops = [loops_below(sch, block, loop) for block in chain]
    if not all(own_loops):
        raise IllegalSchedule(
            "the copy is not under the loop it should be spread in",
            block=block_name(sch, copy),
            remedy="pass the loop that stage_in_shared was given",
        )
    width = min(widest_vector(sch, block, loops[-1]) for block, loops in zip(chain, own_loops)) if vectorize else 1
    if load is not None and not all(_rows_fit(sch, loops, threads, width) for loops in own_loops):
        raise IllegalSchedule(
            "register loads need whole rows of the tile in each round, or a thread would keep a whole tile",
            block=block_name(sch, copy),
            value=f"rows of {loop_extent(sch, own_loops[0][-1])} elements, {threads[0] * threads[1]} threads",
            remedy="choose a tile whose rows divide among the threads, or leave through_registers out",
        )
    for loops in own_loops:
        rounds, row, column, vector = _rounds_and_threads(sch, loops, threads, width)
        sch.bind(row, "threadIdx.y")
        sch.bind(column, "threadIdx.x")
        vectorize_inner(sch, vector, width)
    return CooperativeFetch(copy, rounds, row, column, width)


def stage_through_registers(sch: Schedule, copy: SBlockRV, loop: LoopRV) -> SBlockRV:
    """Make a copy to shared memory go through registers, so that load and store can be pipelined apart.

    ::

        before   for k_outer:  A_shared[tile] = A[tile]
        after    for k_outer:
                   A_local[tile] = A[tile]            # the returned block: the load waits for nobody
                   A_shared[tile] = A_local[tile]     # the store runs an iteration later, once pipelined

    For targets without cp.async, or to keep loads in flight across a barrier. Follow with
    ``inline_data_movement(sch, load)`` and ``fetch_cooperatively(..., load=load)``, which spreads both
    blocks alike: a thread's part of A_local is then a few registers. (TVM's annotation
    ``tirx.manifest_shared_memory_local_stage`` does the same where threads are bound outside ``loop``, and fails here,
    where they are bound inside.)
    """
    load = sch.cache_read(copy, 0, "local")
    sch.compute_at(load, loop, preserve_unit_loops=True)
    return load


def pad_rows(sch: Schedule, copy: SBlockRV) -> None:
    """Make each row of a tile in shared memory an odd number of 16 bytes long, so that rows begin in other banks.

    ::

        before   A_shared[rows, 32 floats]
        after    A_shared[rows, 32 floats], a row every 36

    For operands whose innermost index is the reduction: lanes that load 16 bytes each from rows side by side then
    meet no bank twice.
    """
    region = sch.get(copy).writes[0]
    extra = VECTOR_BYTES // dtype_bytes(region.source.dtype)
    sch.storage_align(copy, 0, len(region.region) - 2, 2 * extra, extra)


def read_through_registers(sch: Schedule, block: SBlockRV, operand: Operand, loop: LoopRV) -> SBlockRV:
    """Load what one iteration of ``loop`` reads of an operand to registers first, as statements of its own.

    ::

        before   for k:  for row, column:  C[...] += A_shared[row, k] * ...
        after    for k:
                   A_local[rows] = A_shared[rows, k]                   # the returned block, written out
                   for row, column:  C[...] += A_local[row] * ...
    """
    cached = sch.cache_read(block, operand, "local")
    sch.compute_at(cached, loop, preserve_unit_loops=True)
    for own in loops_below(sch, cached, loop):
        sch.unroll(own)
    return cached


def stage_in_padded(
    sch: Schedule,
    block: SBlockRV,
    operand: Operand,
    loop: LoopRV,
    threads: Threads,
    scope: SharedScope = "shared",
    pad: bool = True,
) -> CooperativeFetch:
    """Copy an operand's tile to shared memory by all threads, in the widest vectors, its rows padded where along k.

    :func:`stage_in_shared`, :func:`inline_data_movement`, :func:`pad_rows` (unless ``pad`` is off, or rows run along
    columns) and :func:`fetch_cooperatively` in one.
    """
    along_k = innermost_iterator(sch, block, operand) == len(sch.get(block).iter_vars) - 1
    copy = stage_in_shared(sch, block, operand, loop, scope)
    inline_data_movement(sch, copy)
    if pad and along_k:
        pad_rows(sch, copy)
    return fetch_cooperatively(sch, copy, loop, threads, vectorize=True)


def stage_transposed(
    sch: Schedule,
    block: SBlockRV,
    operand: Operand,
    loop: LoopRV,
    threads: Threads,
    scope: SharedScope = "shared",
) -> CooperativeFetch:
    """Copy an operand's tile, whose rows run along the reduction, to shared memory with rows that run across it.

    ::

        before   for k_outer:  C[i, j] += ... * B[j, k]                     # a thread reads 4 k of each of its columns
        after    for k_outer:
                   for rounds, threads:  B_shared[k, j] = B[j, k]            # element by element, by all threads
                   C[i, j] += ... * B_shared[k, j]                           # or one k of 4 of its columns

    Threads then read vectors along columns, and keep one step's elements of them in registers, not four: with 64 sums
    and four steps of both operands, more than the 128 registers of which 16 warps fit are in use. Columns are the
    operand's dimensions before k that the other operand does not have, be they one or several
    (:func:`schedules.loops.interleave_lanes` with ``transposed`` makes three). Eight threads side by side read 32 bytes
    of a row, and four such groups rows next to each other; rows of the tile are longer by 16 bytes than a multiple of
    128, so that what 32 threads store lies in 32 banks. Elements of 4 bytes can be copied asynchronously so, shorter
    ones not.

    Source: measured on an H200, float32, B stored [n, k], 2048 x 2048 x 4096 by 128 x 128 x 32: 726 us; with rows along
    k 1,010 us, since its threads keep registers in memory; cuBLAS 674 us.

    Raises
    ------
    IllegalSchedule : for an operand whose rows do not run along the reduction, or whose columns are not its innermost
        dimensions but for that.
    """
    check_runs_along_reduction(sch, block, operand)
    batch, rank = _first_column(sch, block, operand), len(operand_regions(sch, block)[operand].region)
    copy = stage_in_shared(sch, block, operand, loop, scope)
    inline_data_movement(sch, copy)
    itemsize = dtype_bytes(sch.get(copy).writes[0].source.dtype)
    across = index_map(rank, lambda *index: [*index[:batch], index[-1], *index[batch:-1]])
    sch.transform_layout(copy, ("write", 0), across)
    sch.storage_align(copy, 0, batch, ROW_BYTES // itemsize, VECTOR_BYTES // itemsize)
    *of_columns, k = loops_below(sch, copy, loop)
    of_sector = SECTOR_BYTES // itemsize
    apart, column = sch.split(sch.fuse(*of_columns), [None, WARP // of_sector])
    steps, step = sch.split(k, [None, of_sector])
    sch.reorder(apart, steps, column, step)
    return fetch_cooperatively(sch, copy, loop, threads)


def _first_column(sch: Schedule, block: SBlockRV, operand: int) -> int:
    """Return the first dimension of an operand that is a column's; IllegalSchedule where one behind it is no column's.

    Columns are what the other operand does not have; a dimension of one element, whose index is a constant, may be any.
    """
    *before_k, _ = iterators_of(sch, block, operand)
    others = (at for at in range(len(operand_regions(sch, block))) if at != operand)
    elsewhere = set().union(*(used for other in others for used in iterators_of(sch, block, other)))
    first = next((at for at, used in enumerate(before_k) if used - elsewhere), len(before_k) - 1)
    if shared := [at for at, used in enumerate(before_k) if at >= first and used & elsewhere]:
        raise IllegalSchedule(
            "an operand's columns are not its innermost dimensions before the reduction",
            block=block_name(sch, block),
            value=f"dimension {shared[0]} of operand {operand}, which the other one has too",
            limit=f"dimensions before {first}",
            remedy="store batches outside of columns",
        )
    return first


def check_runs_along_reduction(sch: Schedule, block: SBlockRV, operand: int) -> None:
    """Raise IllegalSchedule for an operand whose rows do not run along the block's reduction."""
    rows_along = sch.get(block).iter_vars[innermost_iterator(sch, block, operand)]
    if rows_along.iter_type != tirx.IterVar.CommReduce:
        raise IllegalSchedule(
            "a tile whose rows run across the reduction already",
            block=block_name(sch, block),
            value=f"operand {operand}, whose rows run along {rows_along.var.name}",
            remedy="stage it as it is (stage_in_padded)",
        )


def accumulate_in_registers(sch: Schedule, block: SBlockRV, loop: LoopRV, scope: RegisterScope = "local") -> SBlockRV:
    """Keep a reduction's outputs in registers under ``loop`` and write them back once, after it.

    ::

        before   for thread:  for k:  C[i, j] += ...                 epilogue: D[i, j] = f(C[i, j])
        after    for thread:
                   for k:  C_local[i, j] += ...
                   D[i, j] = f(C_local[i, j])                        # the returned block

    Whatever follows elementwise (cropping a padded result, a cast, a bias, an activation) is fused into
    the write-back; IllegalSchedule where TVM would forget which iterations have outputs. Pair it with
    :func:`initialize_before`, or the zeroing stays inside the k loop. ``scope`` is "local", one thread's registers, or
    :data:`schedules.inspection.FRAGMENT`, those of a warp.
    """
    try:
        if scope == FRAGMENT:
            require_pipeline(sch, FRAGMENT)
        write_back = sch.cache_write(block, 0, scope)
        sch.reverse_compute_at(write_back, loop)
        _inline_consumers(sch, block, write_back)
    except ScheduleError as error:
        raise IllegalSchedule(
            "what follows the block cannot be fused into its write-back",
            block=block_name(sch, block),
            remedy="write the function anew, its epilogue in one block (relax.rules.normal_form.product_of)",
        ) from error
    return write_back


def _inline_consumers(sch: Schedule, block: SBlockRV, write_back: SBlockRV) -> None:
    while consumers := [other for other in sch.get_consumers(write_back) if not _stands_apart(sch, other)]:
        if len(consumers) > 1:
            raise IllegalSchedule(
                "the result has several consumers, which one write-back cannot serve",
                block=block_name(sch, block),
                value=[block_name(sch, consumer) for consumer in consumers],
                limit="one chain of elementwise blocks",
                remedy="write the function anew, its epilogue in one block (relax.rules.normal_form.product_of)",
            )
        _check_reads_each_once(sch, write_back, consumers[0])
        before, consumer = terms_of(condition_of(sch, write_back)), block_name(sch, consumers[0])
        sch.reverse_compute_inline(consumers[0])
        if lost := _lost(sch, write_back, before):
            raise IllegalSchedule(
                f"{consumer} cuts the result short, and some iterations have none of it: TVM 0.27 forgets the latter's "
                "condition when it fuses both",
                block=block_name(sch, block),
                value=f"{condition_of(sch, write_back)} without {lost[0]}",
                remedy="call this before the loop is split, or split it into parts of one length",
            )


def _lost(sch: Schedule, block: SBlockRV, before: list[ir.Expr]) -> list[ir.Expr]:
    """Return the terms that a block's condition no more has, nor a lower bound of the same value.

    Of loops of constant extents: beside others TVM has conditions, too, that always hold.
    """
    loops: list[tirx.For] = []  # of all blocks: get_loops would become a part of the schedule's trace
    tvm_ffi.structural_walk(sch.mod, (tirx.For, loops.append))
    known = {loop.loop_var for loop in loops if is_constant(loop.extent)}
    terms, lost = terms_of(condition_of(sch, block)), []
    for term in before:
        used: set[tirx.Var] = set()
        tvm_ffi.structural_walk(term, (tirx.Var, used.add))
        kept = any(tvm_ffi.structural_equal(term, other) or _is_lower(other, term) for other in terms)
        if used and used <= known and not kept:
            lost.append(term)
    return lost


def _is_lower(bound: ir.Expr, than: ir.Expr) -> bool:
    return (
        isinstance(bound, tirx.LT)
        and isinstance(than, tirx.LT)
        and tvm_ffi.structural_equal(bound.a, than.a)
        and is_constant(bound.b)
        and is_constant(than.b)
        and int(bound.b) <= int(than.b)
    )


def _check_reads_each_once(sch: Schedule, producer: SBlockRV, consumer: SBlockRV) -> None:
    """Require that no iterator of a consumer repeats the producer's elements, which TVM 0.27 does not survive."""
    result, stmt = sch.get(producer).writes[0].source, sch.get(consumer)
    used: set[tirx.Var] = set()
    for region in stmt.reads:
        if region.source.same_as(result):
            for dimension in region.region:
                tvm_ffi.structural_walk(dimension.min, (tirx.Var, used.add))
    repeated = [i.var.name for i in stmt.iter_vars if not is_one(i.dom.extent) and i.var not in used]
    if repeated:
        raise IllegalSchedule(
            "what follows the block repeats its elements, which one write-back cannot",
            block=block_name(sch, consumer),
            value=f"iterators {', '.join(map(str, repeated))}",
            remedy="schedule it as a function of its own",
        )


def store_through_shared(
    sch: Schedule, block: SBlockRV, grid: LoopRV, threads: Threads, scope: SharedScope = "shared"
) -> CooperativeFetch:
    """Collect a block tile's results in shared memory, and store them from there, neighbours side by side.

    ::

        before   for k:  C[i, j] += ...                          epilogue: D[i, j] = f(C[i, j])
        after    for k:  C_shared[i, j] += ...                   # accumulate_in_registers: in registers until the end
                 D[i, j] = f(C_shared[i, j])                     # by all ``threads`` of the block together

    For outputs whose rows are no whole vectors: the single elements that lanes have, a vector apart from each other,
    would be written in four times as many pieces. Whatever follows elementwise is fused into what is returned. ``grid``
    is the loop over block tiles. Call it before :func:`accumulate_in_registers`; ``scope`` is "shared.dyn" where the
    operands' tiles should make room for the results.
    """
    rows = sch.cache_write(block, 0, scope)
    sch.reverse_compute_at(rows, grid, preserve_unit_loops=True)
    _inline_consumers(sch, block, rows)
    sch.annotate(rows, KEPT, 1)
    return fetch_cooperatively(sch, rows, grid, threads, vectorize=True)


def accumulate_per_tile(sch: Schedule, block: SBlockRV, k_outer: LoopRV) -> SBlockRV:
    """Finish each k tile's product in registers of its own, and add it to the result as a second step.

    ::

        before   for k_outer:  for k_inner:  C[i, j] += A[i, k] * B[k, j]
        after    for k_outer:
                   P[i, j] = sum over k_inner of A[i, k] * B[k, j]   # the returned block, P in registers
                   C[i, j] += P[i, j]                                # ``block``, with k_outer and no k_inner

    The arithmetic order changes (partial sums are added), so results differ from the plain loop by
    rounding. Call it after tiling and before binding; ``block`` and its loops stay valid, less k_inner.
    Follow with ``initialize_before(sch, partial, its k_inner)`` once loops are bound, which makes the
    zeroing of P a statement, instead of a condition in the inner loop that keeps it from being unrolled.
    """
    try:
        partial = sch.rfactor(k_outer, factor_axis=0)
    except ScheduleError as error:
        raise IllegalSchedule(
            "this reduction has no partial products",
            block=block_name(sch, block),
            loop=loop_name(sch, k_outer),
            remedy="leave product_per_tile out; a reduction of one step needs none",
        ) from error
    sch.set_scope(partial, 0, "local")
    sch.compute_at(partial, k_outer)
    own_loops = loops_below(sch, partial, k_outer)
    if not own_loops:
        raise IllegalSchedule(
            "a k tile of one step has no product of its own to sum up",
            block=block_name(sch, block),
            loop=loop_name(sch, k_outer),
            remedy="choose a deeper k tile, or leave product_per_tile out",
        )
    *outputs, k_inner = own_loops
    sch.reorder(k_inner, *outputs)
    return partial


def initialize_before(sch: Schedule, block: SBlockRV, loop: LoopRV) -> SBlockRV:
    """Zero a reduction's accumulators before ``loop`` instead of in its first iteration.

    ::

        before   for k:  if k == 0: C[i, j] = 0;  C[i, j] += ...
        after    C[i, j] = 0                                         # the returned block
                 for k:  C[i, j] += ...
    """
    return sch.decompose_reduction(block, loop)


def drop_condition(sch: Schedule, block: SBlockRV, by: str) -> None:
    """Let a block run in every iteration of its loops, of which some are beyond what they were cut from.

    ``by`` is the function that does so, for a replay's message.
    """
    stmt = sch.get(block)
    inner = sch.get(sch.get_loops(block)[-1])
    always = s_tir.SBlockRealize(inner.body.iter_values, True, stmt)
    changed = with_loop_body(inner, always)
    replace_untraced(sch, sch.get_sref(sch.get_loops(block)[-1]), changed, by, {stmt: stmt})


def _rounds_and_threads(sch: Schedule, loops: list[LoopRV], threads: tuple[int, int], width: int) -> list[LoopRV]:
    """Cut a tile's loops into (round, thread row, thread column, lane), neighbouring threads side by side.

    Where whole rows fit the threads, rounds are made of whole rows, and where whole rounds fit a row, rows of
    whole rounds: a thread's place is then the same in every round but for a constant, so that its part of a
    register buffer is small (TVM cannot see that in the flattened form). Otherwise all rows are one sequence of
    vectors.
    """
    *outer, last = loops
    if not _rows_fit(sch, loops, threads, width):
        if not outer:
            return sch.split(last, [None, *threads, width])
        column, vector = sch.split(last, [None, width])
        return [*sch.split(sch.fuse(*outer, column), [None, *threads]), vector]
    vectors = -(-loop_extent(sch, last) // width)
    if vectors > threads[0] * threads[1]:  # several rounds to a row
        return sch.split(last, [None, *threads, width])
    rows = sch.fuse(*outer) if len(outer) > 1 else outer[0]
    rounds, row = sch.split(rows, [None, threads[0] * threads[1] // vectors])
    column, vector = sch.split(last, [None, width])
    thread_row, thread_column = sch.split(sch.fuse(row, column), [None, threads[1]])
    return [rounds, thread_row, thread_column, vector]


def _rows_fit(sch: Schedule, loops: list[LoopRV], threads: tuple[int, int], width: int) -> bool:
    """Return whether a round of all threads is a number of whole rows, or a row a number of whole rounds."""
    vectors, all_threads = -(-loop_extent(sch, loops[-1]) // width), threads[0] * threads[1]
    return len(loops) > 1 and max(vectors, all_threads) % min(vectors, all_threads) == 0


def _stands_apart(sch: Schedule, block: SBlockRV) -> bool:
    """Return whether a block is the second step of a split reduction, or a copy that is not to be inlined."""
    return any(mark in sch.get(block).annotations for mark in (ADDS_PARTS, KEPT))


def _is_data_movement(sch: Schedule, block: SBlockRV) -> bool:
    stmt = sch.get(block)
    if KEPT in stmt.annotations or any(iterator.iter_type != tirx.IterVar.DataPar for iterator in stmt.iter_vars):
        return False
    calls: list[object] = []
    tvm_ffi.structural_walk(stmt.body, (tirx.For, lambda loop: calls.append(loop)))
    return not calls
