"""Stores by the tensor memory accelerator (TMA): results collected in boxes in shared memory, stored by one thread.

The way back of :mod:`schedules.memory.tensor_maps`: the host makes a tensor map of the output, and one instruction
copies a box of it from shared memory::

    before   D[i, j] = f(C_local[...])                          # each thread its own few bytes of a row
    after    host:  encode D_map
             all:   D_shared[j / 64, i, j % 64] = f(C_local[...])        # 16-byte pieces of a row permuted
                    fence.proxy.async;  barrier
             one thread:  boxes of D_shared -> D;  commit;  wait until D_shared is read
             barrier

Threads compute no addresses of the output, and each box leaves in whole rows of 128 bytes. TMA reads shared memory
through another proxy than ordinary stores write it: every thread that wrote passes the fence, then all meet, and only
then the one thread issues the stores. It waits for their reads, before which the block may not end, and all meet behind
that, before which nobody may write D_shared again: TVM sees no read there.

Until the function is lowered, D_shared has the output's rows and columns, and the copy is a loop nest that any CPU can
run. Source: PTX ISA, "cp.async.bulk.tensor", "Async proxy"; the epilogues of NVIDIA's CUTLASS store so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import tvm_ffi
from tvm import ir, s_tir, sym, tirx
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV
from tvm.script import tirx as T

from tensorir_ladder.schedules.errors import IllegalPipeline, IllegalSchedule
from tensorir_ladder.schedules.inspection import (
    DEVICE_SCOPES,
    FRAGMENT,
    SHARED_SCOPES,
    block_name,
    condition_of,
    is_constant,
    is_multiple,
    is_true,
    is_zero,
    loops_below,
    loops_of,
    realize_of,
    replaced,
    terms_of,
    thread_tag,
)
from tensorir_ladder.schedules.isa import (
    ATOM_BYTES,
    PIECE_ROWS,
    ROW_BYTES,
    TMA_STORE,
    TMA_STRIDE_BYTES,
    VECTOR_BYTES,
    WIDEST,
)
from tensorir_ladder.schedules.loops.vectorization import dtype_bytes
from tensorir_ladder.schedules.memory.staging import drop_condition
from tensorir_ladder.schedules.memory.swizzling import swizzle_rows
from tensorir_ladder.schedules.memory.tensor_maps import (
    MOST_DIMENSIONS,
    BoxMap,
    TensorMaps,
    check_tma,
    count_warps,
    hold_boxes,
    is_elected,
)
from tensorir_ladder.schedules.passes import require_pipeline, with_buffers

STORED = "rows_of_a_stored_box"  # on the loop over a tile's rows, which one thread stores
STORES = "is_elected_to_store"  # the condition of what that thread does
ITEM_BYTES = (2, 4)  # of an element


@dataclass(frozen=True)
class BoxStore:
    """Results that TMA stores: the block that collects them in shared memory, and the copy with its loop over rows."""

    results: SBlockRV
    copy: SBlockRV
    rows: LoopRV


def store_by_tma(sch: Schedule, write_back: SBlockRV, loop: LoopRV) -> BoxStore:
    """Collect a block tile's results in shared memory, and let one thread store them by TMA, box by box.

    ::

        before   for tile, bound to blockIdx.x:
                   for group, bound to threadIdx.y:  ...;  D[i, j] = f(C_local[...])
        after    for tile, bound to blockIdx.x:
                   for group, bound to threadIdx.y:  ...;  D_shared[i, j] = f(C_local[...])   # where the ring was
                   fence;  barrier
                   one thread:  for panel:  a box of D_shared, 128 bytes of each row -> D;  commit;  wait
                   barrier

    What :func:`schedules.tensor_cores.store_by_rows` is with all threads. ``write_back`` is any block that writes each
    element of a tile of the output once under ``loop`` (:func:`schedules.tensor_cores.accumulate_by_warpgroups` returns
    one), ``f`` anything elementwise: casts, a bias, a residual. Call it before its loops are spread over lanes
    (:func:`schedules.tensor_cores.spread_fragment`). ``loop`` is the grid's, or one below that all threads of the block
    run. Ragged tiles need nothing: TMA leaves out what a box has beyond the output. Where ``f`` reads nothing but a
    fragment and tiles are no larger than the output, elements beyond it are collected, too, without a condition each.

    The output is a matrix, or a batch of them, of 2 or 4 bytes an element. D_shared has the bytes of the tile, columns
    rounded up to 128 bytes; TVM puts it where buffers were that nobody reads any more. Other buffers in shared memory
    must be multiples of 1,024 bytes, which is checked when the function is lowered (:func:`lower_box_stores`).

    Raises
    ------
    IllegalSchedule : before anything is changed; for an output whose rows are no multiple of 16 bytes, of other
        elements, of 1 or more than 5 dimensions, with strides, or that is read after it is written; for a tile that is
        no rectangle of one matrix, has a single row, columns that do not begin and end at multiples of 16 bytes, or
        more than 256 rows that are no multiple of 8; for a condition that is no edge of the output; for a ``loop``
        that the block is not under, or that each thread has for itself.
    """
    whole = _check_results(sch, write_back, loop)
    copy = sch.cache_write(write_back, 0, "shared.dyn")
    sch.reverse_compute_at(copy, loop, preserve_unit_loops=True)
    if whole:
        drop_condition(sch, write_back, "store_by_tma")
    swizzle_rows(sch, write_back)
    require_pipeline(sch, "stores by TMA")
    *_, rows, _ = loops_below(sch, copy, loop)
    sch.annotate(rows, STORED, 1)
    return BoxStore(write_back, copy, rows)


def storable_by_tma(sch: Schedule, write_back: SBlockRV, loop: LoopRV) -> bool:
    """Return whether :func:`store_by_tma` takes a block's results; nothing is changed."""
    try:
        _check_results(sch, write_back, loop)
    except IllegalSchedule:
        return False
    return True


def _no_store(sch: Schedule, block: SBlockRV, problem: str, value: object, limit: object = None) -> IllegalSchedule:
    return IllegalSchedule(
        f"TMA cannot store this: {problem}",
        block=block_name(sch, block),
        value=value,
        limit=limit,
        remedy="let the block's threads store it (store_by_rows)",
    )


def _check_results(sch: Schedule, write_back: SBlockRV, loop: LoopRV) -> bool:
    """Raise IllegalSchedule for results that TMA cannot store; return whether they need no condition each."""
    block, own = sch.get(write_back), loops_below(sch, write_back, loop)
    around = sch.get_loops(write_back)
    if not own or len(own) == len(around):
        raise _no_store(sch, write_back, "it has no loops of its own under the loop", f"{len(own)} loops")
    tags = [thread_tag(sch.get(each)) for each in around[: len(around) - len(own)]]
    if of_threads := [tag for tag in tags if tag and not tag.startswith("blockIdx")]:
        raise _no_store(sch, write_back, "each thread has the loop for itself", of_threads, "a loop of all threads")
    output = _check_output(sch, write_back)
    spans = _check_tile(sch, write_back, [sch.get(each) for each in own])
    analyzer = sym.Analyzer()
    fits = all(analyzer.can_prove(size >= span) for size, span in zip(output.shape, spans))
    return fits and all(region.source.scope() == FRAGMENT for region in block.reads)


def _check_output(sch: Schedule, write_back: SBlockRV) -> tirx.Var:
    """Return the output; IllegalSchedule where no tensor map can be made of it, or somebody reads it."""
    block = sch.get(write_back)
    output = block.writes[0].source
    if len(block.writes) != 1 or not isinstance(block.body, tirx.BufferStore):
        raise _no_store(sch, write_back, "it does more than one store", len(block.writes), "one element")
    if output.scope() not in DEVICE_SCOPES:
        raise _no_store(sch, write_back, f"{output.name} is in other memory", output.scope(), "device memory")
    readers = [block_name(sch, each) for each in sch.get_consumers(write_back)]
    if readers or any(region.source.same_as(output) for region in block.reads):
        raise _no_store(sch, write_back, f"{output.name} is read again", readers or [block_name(sch, write_back)])
    itemsize = dtype_bytes(output.dtype)
    if itemsize not in ITEM_BYTES:
        raise _no_store(sch, write_back, f"bytes of an element of {output.name}", itemsize, ITEM_BYTES)
    if not 2 <= len(output.shape) <= MOST_DIMENSIONS:
        raise _no_store(sch, write_back, f"dimensions of {output.name}", len(output.shape), f"2 to {MOST_DIMENSIONS}")
    if len(output.strides) or not is_zero(output.elem_offset):
        given = list(map(str, output.strides)) or str(output.elem_offset)
        raise _no_store(sch, write_back, f"strides or an offset of {output.name}", given, "rows side by side")
    pitch = output.shape[-1] * itemsize
    if not is_multiple(pitch, TMA_STRIDE_BYTES):
        limit = f"a multiple of {TMA_STRIDE_BYTES} bytes"
        raise _no_store(sch, write_back, f"rows of {output.name} are apart", f"{pitch} bytes", limit)
    return output


def _check_tile(sch: Schedule, write_back: SBlockRV, own: list[tirx.For]) -> list[int]:
    """Return how many elements a tile has along each dimension; IllegalSchedule for no whole rectangle of a matrix."""
    if unknown := [str(loop.extent) for loop in own if not is_constant(loop.extent)]:
        raise _no_store(sch, write_back, "its loops have extents that only run time knows", unknown, "constants")
    block, realize, analyzer = sch.get(write_back), realize_of(sch, write_back), sym.Analyzer()
    for loop in map(sch.get, sch.get_loops(write_back)):
        analyzer.bind(loop.loop_var, ir.Range.from_min_extent(loop.min, loop.extent))
    values = {iterator.var: value for iterator, value in zip(block.iter_vars, realize.iter_values)}
    places = [replaced(index, values) for index in block.body.indices]
    first = {loop.loop_var: loop.min for loop in own}
    last = {loop.loop_var: loop.min + loop.extent - 1 for loop in own}
    spans = [analyzer.simplify(replaced(place, last) - replaced(place, first) + 1) for place in places]
    elements = math.prod(int(loop.extent) for loop in own)
    if not all(map(is_constant, spans)) or math.prod(map(int, spans)) != elements:
        raise _no_store(sch, write_back, "a tile that is no rectangle", list(map(str, spans)), f"{elements} elements")
    *others, rows, columns = map(int, spans)
    output, column = block.body.buffer, replaced(places[-1], first)
    vector = VECTOR_BYTES // dtype_bytes(output.dtype)
    if any(span != 1 for span in others):
        raise _no_store(sch, write_back, "tiles of several matrices", others, "one of each dimension before rows")
    if rows == 1 or any(is_constant(size) and int(size) == 1 for size in output.shape[-2:-1]):
        raise _no_store(sch, write_back, "rows of a tile", 1, "2 and more")
    if rows > WIDEST and rows % PIECE_ROWS:
        raise _no_store(sch, write_back, "rows of a tile", rows, f"at most {WIDEST}, or a multiple of {PIECE_ROWS}")
    if columns % vector or not analyzer.can_prove_equal(tirx.floormod(column, vector), 0):
        value = f"{columns} from {analyzer.simplify(column)} on"
        raise _no_store(sch, write_back, "columns of a tile", value, f"multiples of {vector}")
    for term in terms_of(condition_of(sch, write_back)):
        if not is_true(term) and not any(
            isinstance(term, tirx.LT) and analyzer.can_prove_equal(term.b - term.a, size - place)
            for size, place in zip(output.shape, places)
        ):
            raise _no_store(sch, write_back, "a condition that is no edge of the output", term)
    return list(map(int, spans))


@dataclass(frozen=True)
class _Tile:
    """Describe what one thread stores: ``rows`` by ``columns``, to ``output`` from ``first`` on.

    ``before`` and ``after`` are the buffers of the tile in shared memory: as scheduled, and as boxes.
    """

    rows: int
    columns: int
    output: tirx.Var
    first: tuple[ir.Expr, ...]
    before: tirx.Var
    after: tirx.Var

    @classmethod
    def of(cls, rows: tirx.For) -> _Tile:
        """Read it from the loop over rows."""
        at, inner, columns = {rows.loop_var: rows.min}, rows.body, 1
        while isinstance(inner, tirx.For):
            at[inner.loop_var] = inner.min
            columns *= int(inner.extent)
            inner = inner.body
        store = inner.block.body
        first = tuple(sym.Analyzer().simplify(replaced(index, at)) for index in store.indices)
        before = store.value.source
        panel = ROW_BYTES // dtype_bytes(before.dtype)
        height = -(-int(rows.extent) // PIECE_ROWS) * PIECE_ROWS
        shape = (*before.shape[:-2], -(-columns // panel), height, panel)
        after = tirx.decl_buffer(shape, before.dtype, before.name, scope=before.scope(), layout=None)
        return cls(int(rows.extent), columns, store.buffer, first, before, after)

    def placed(self, indices: Sequence[ir.Expr]) -> list[ir.Expr]:
        """Return where an element of the tile as it was lies in its panels."""
        *outer, row, column = indices
        panel = int(self.after.shape[-1])
        return [*outer, tirx.floordiv(column, panel), row, tirx.floormod(column, panel)]

    def _divides_into(self, boxes: int) -> bool:
        """Tell whether rows are so many boxes, of which each begins where the swizzle does."""
        return self.rows <= boxes * WIDEST and (boxes == 1 or self.rows % (boxes * PIECE_ROWS) == 0)

    def stored(self, maps: TensorMaps) -> tirx.Stmt:
        """Write the fence and the barriers of all threads, and between these what one of them does."""
        panel, outer = int(self.after.shape[-1]), [0] * (len(self.after.shape) - 3)
        boxes = next(count for count in range(1, self.rows) if self._divides_into(count))
        together = self.rows // boxes
        issued = []
        for number in range(-(-self.columns // panel)):
            box = BoxMap(self.output, together, min(panel, self.columns - number * panel), swizzled=True)
            for row in range(0, self.rows, together):
                *matrix, first_row, first_column = self.first
                place = first_column + number * panel, first_row + row, *matrix[::-1]
                source = tirx.address_of(self.after[(*outer, number, row, 0)])
                issued.append(T.ptx[TMA_STORE.format(len(place))](tirx.address_of(maps.of(box)), *place, source))
        bulk = T.ptx.cp.async_.bulk
        issued += [bulk.commit_group(), bulk.wait_group.read(0)]
        last = self.after[tuple(int(extent) - 1 for extent in self.after.shape)]  # which small outputs leave unwritten
        issue = tirx.SeqStmt([hold_boxes(tirx.address_of(last)), *map(tirx.Evaluate, issued)])
        fence, barrier = T.ptx.fence.proxy.async_.shared__cta(), T.tvm_storage_sync("shared")
        by_one = tirx.IfThenElse(is_elected(STORES), issue, None)
        parts = tirx.SeqStmt([tirx.Evaluate(fence), tirx.Evaluate(barrier), by_one, tirx.Evaluate(barrier)])
        return s_tir.SBlockRealize([], True, s_tir.SBlock([], [], [], "stored", parts))


def lower_box_stores(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Have one thread store what :func:`store_by_tma` marked; part of the lowering pipeline, once buffers are compact.

    Raises
    ------
    IllegalPipeline : for results of no grid's blocks; for threads beside each other that are no whole warps; for other
        buffers in the same shared memory that are no multiples of 1,024 bytes; for a target older than sm_90.
    """
    marked = _marked(function.body)
    if not marked:
        return function
    check_tma(function)
    grids = [loop for loop in loops_of(function.body) if thread_tag(loop).startswith("blockIdx") and _marked(loop)]
    of_blocks = [loop for grid in grids for loop in _marked(grid)]
    if left := [loop for loop in marked if not any(loop.same_as(other) for other in of_blocks)]:
        raise IllegalPipeline(
            "a store by TMA stands in no grid's blocks",
            loop=str(left[0].loop_var.name),
            remedy="bind the loop over tiles to blockIdx.x",
        )
    maps, tiles = TensorMaps("results_map"), list(map(_Tile.of, marked))
    places = {tile.before: tile.placed for tile in tiles}
    for grid in grids:
        count_warps(grid)
        _check_neighbours(grid, list(places))

    def stored(loop: tirx.For) -> tirx.Stmt:
        found = [tile for rows, tile in zip(marked, tiles) if rows.same_as(loop)]
        return found[0].stored(maps) if found else loop

    body = tvm_ffi.structural_map(function.body, (tirx.For, stored))
    body = with_buffers(
        body, {tile.before: tile.after for tile in tiles}, lambda buffer, indices: places[buffer](indices)
    )
    return maps.encoded_in(function.with_body(body))


def _check_neighbours(grid: tirx.For, tiles: list[tirx.Var]) -> None:
    """Raise IllegalPipeline for shared memory behind which boxes would begin elsewhere than their swizzle does.

    TVM lays buffers behind each other, whatever their alignment.
    """
    found: list[tirx.Var] = []
    tvm_ffi.structural_walk(grid, (s_tir.SBlock, lambda block: found.extend(block.alloc_buffers)))
    for buffer in found:
        size = math.prod(map(int, buffer.shape)) * dtype_bytes(buffer.dtype) if buffer.scope() in SHARED_SCOPES else 0
        if size % ATOM_BYTES and not any(buffer.same_as(tile) for tile in tiles):
            raise IllegalPipeline(
                f"{buffer.name} in shared memory, behind which a box that TMA stores would begin anywhere",
                value=f"{size} bytes",
                limit=f"multiples of {ATOM_BYTES} bytes",
                remedy="stage larger tiles or none, or let the block's threads store results (store_by_rows)",
            )


def _marked(stmt: tirx.Stmt) -> list[tirx.For]:
    """Find the loops in a statement that :func:`store_by_tma` marked."""
    return [loop for loop in loops_of(stmt) if STORED in loop.annotations]
