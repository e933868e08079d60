"""Products of few rows: the weights stream past once, at the bandwidth of the memory, and sums stay in registers.

A product of at most some eight rows does too little with each weight for tiles in shared memory to pay: what limits
it are the bytes of weights on their way at any moment, threads x vectors x 16. So every thread loads vectors of weights
straight to registers, several before it uses the first; rows of the other operand come through the first-level cache,
which all columns share. What the threads have summed is added up through shared memory.

Weights run along the reduction (``[columns, k]``) or along the columns (``[k, columns]``), and so do their vectors::

    along the reduction     threads side by side take vectors of one column; a thread has some columns
    along the columns       threads side by side take vectors of one k; a thread has the columns of one vector

Packed weights (int4, int8) are loaded as they are stored, and unpacked in registers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import tvm_ffi
from tvm import ir, s_tir, sym, tirx
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tensorir_ladder.schedules.arguments import Operand
from tensorir_ladder.schedules.errors import IllegalSchedule, IllegalTile
from tensorir_ladder.schedules.inspection import block_name, is_constant, loop_extent, loops_below
from tensorir_ladder.schedules.isa import VECTOR_BYTES
from tensorir_ladder.schedules.loops.layout import contraction_loops, index_map, pad_to_tile
from tensorir_ladder.schedules.loops.tiling import bind_batched_grid
from tensorir_ladder.schedules.loops.vectorization import dtype_bytes, vectorize_inner
from tensorir_ladder.schedules.memory.staging import accumulate_in_registers, initialize_before, inline_data_movement

MOST_UNROLLED = 32
MOST_ZEROS = 4  # whole numbers of a vector that is zero outside a bound: TVM 0.27 cannot write more of them


@dataclass(frozen=True)
class WeightsTile:
    """Tile of a product that streams its weights.

    A thread has ``rows`` x ``columns`` sums, and walks the reduction in iterations of ``steps`` vectors of each of its
    columns. A step covers ``unit`` of the reduction: whole vectors of weights, in vectors of the rows, in elements that
    are packed together. ``column_threads`` x ``reduction_threads`` are a block. ``along`` is what vectors of weights
    run along, "reduction" or "columns".
    """

    rows: int
    columns: int
    steps: int
    unit: tuple[int, int, int]
    column_threads: int
    reduction_threads: int
    along: str = "reduction"

    @property
    def block_columns(self) -> int:
        """Columns of a thread block."""
        return self.column_threads * self.columns

    @property
    def block_k(self) -> int:
        """Steps of the reduction that a block takes in one iteration."""
        return self.steps * self.reduction_threads * math.prod(self.unit)

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.column_threads * self.reduction_threads

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory for what the threads, and groups of them, have summed."""
        padded = self.reduction_threads + (self.along == "reduction")
        return 4 * self.rows * self.block_columns * (padded + (self.groups if self.groups > 1 else 0))

    @property
    def groups(self) -> int:
        """Sums of groups of reduction threads, between those of threads and the total; 1 for none.

        Each has a thread of its own; where the threads are few, one adds them all up.
        """
        most = self.reduction_threads // (self.rows * self.columns)
        if self.reduction_threads <= MOST_UNROLLED:
            return 1
        fitting = [groups for groups in range(2, most + 1) if self.reduction_threads % groups == 0]
        return min(fitting, key=lambda groups: groups + self.reduction_threads // groups, default=1)

    @property
    def shares_out(self) -> bool:
        """True where what the threads have summed is shared out among them in whole rounds, or in one."""
        return self.reduction_threads % self.columns == 0 or self.rows * self.columns <= self.reduction_threads

    def check(self) -> None:
        """Raise IllegalTile for a tile whose threads cannot add up its sums."""
        if not self.shares_out:
            raise IllegalTile(
                "the threads of a tile that streams weights cannot share out its sums",
                value=f"{self.rows} x {self.columns} sums of each of {self.reduction_threads} reduction threads",
                limit="a multiple of a thread's columns as reduction threads, or as many as a thread has sums",
                remedy="take powers of two",
            )


@dataclass(frozen=True)
class Load:
    """Elements that an operand is computed from: their buffer, and how they lie along one of the product's extents.

    ``along`` is "reduction", "columns" (of the result; rows where the weights are the operand of the rows), or empty
    where neighbours in memory are neighbours in neither. ``width`` elements can be loaded as one vector, and each holds
    ``packed`` steps of the reduction.
    """

    buffer: tirx.Var
    along: str
    width: int
    packed: int

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole buffer; an extent known at run time only counts as 1024."""
        shape = [int(extent) if is_constant(extent) else 1024 for extent in self.buffer.shape]
        return math.prod(shape) * dtype_bytes(self.buffer.dtype)


@dataclass(frozen=True)
class StreamedWeights:
    """A product that streams its weights: the loop over iterations, each thread's sums, their total, and its store."""

    iterations: LoopRV
    partial: SBlockRV
    total: SBlockRV
    write_back: SBlockRV


def product_roles(block: s_tir.SBlock) -> list[str]:
    """Return the roles of a product's iterators: any number of "batch", then "rows", "columns", "reduction"."""
    return ["batch"] * (len(block.iter_vars) - 3) + ["rows", "columns", "reduction"]


def operand_loads(sch: Schedule, block: SBlockRV, operand: Operand) -> list[Load]:
    """Return what an operand of a product is computed from, largest first, once its producers are inlined.

    ``block`` is a product of (batch, rows, columns, reduction). Nothing is changed.
    """
    scratch = Schedule(sch.mod[sch.func_working_on])
    block = scratch.get_sblock(block_name(sch, block))
    copy = _reindexed(scratch, block, product_roles(scratch.get(block)), operand)
    stmt = scratch.get(copy.block)
    roles = [(iterator.var, role) for iterator, role in zip(stmt.iter_vars, copy.roles)]
    found = [_described(load, roles) for load in _loads(stmt.body.value)]
    return sorted(found, key=lambda load: load.total_bytes, reverse=True)


def stream_weights(sch: Schedule, block: SBlockRV, tile: WeightsTile, weights: int = 1) -> StreamedWeights:
    """Schedule a product of few rows for its weights to be read once, in vectors, many on their way at a time.

    ::

        before   for i < m:  for j < n:  for k:  C[i, j] += A[i, k] * W[j, k];      D[i, j] = f(C[i, j])
        after    for row tile, column tile, bound to blockIdx.x:
                   for column thread, for reduction thread, bound to threadIdx.y and .x (x and y, along columns):
                     for iterations:
                       W_local[steps, columns, vector] = W[...]                  # all loads before the first use
                       for steps:  A_local[rows, vector] = A[...];  P[rows, columns] += A_local * W_local
                   P_shared = P;  C[i, j] = sum of P_shared over reduction threads;  D[i, j] = f(C[i, j])

    The block's loops are (batch, rows, columns, reduction), of whatever extents; ``weights`` is the operand that is
    streamed: the one of the columns (1), or that of the rows, which then take the part of the columns (0). Ragged
    extents are filled up with zeros in registers. What unpacks or casts an operand is computed there.

    Raises
    ------
    IllegalSchedule : for a block with fewer than three loops, or one that is no einsum and would have to be padded; for
        an epilogue that cannot be fused into the store.
    """
    tile.check()
    few, many = (-3, -2) if weights else (-2, -3)
    extents = [1] * len(contraction_loops(sch, block))
    extents[few], extents[many], extents[-1] = tile.rows, tile.block_columns, tile.block_k
    pad_to_tile(sch, block, extents)
    nest = _tile(sch, block, tile, few, many)
    role = "columns" if weights else "rows"
    operands = [_to_registers(sch, nest, operand, role, tile.columns) for operand in (0, 1)]
    sums = _sums_of_threads(sch, block, tile)
    grid = nest.bind(sch, tile)
    for place, operand in enumerate(operands):
        _place(sch, operand, nest, streamed=place == weights)
    nest.unroll(sch)
    for loop in loops_below(sch, initialize_before(sch, nest.partial, nest.outer), nest.thread):
        sch.unroll(loop)
    write_back = _add_up(sch, sums, grid, tile, many)
    return StreamedWeights(nest.outer, nest.partial, block, write_back)


@dataclass(frozen=True)
class _Nest:
    """Loops of the block in which each thread sums its part, and the roles of the block's iterators."""

    partial: SBlockRV
    roles: list[str]
    batch: list[LoopRV]
    row_tile: LoopRV
    column_tile: LoopRV
    column_thread: LoopRV
    column: LoopRV
    row: LoopRV
    outer: LoopRV
    thread: LoopRV
    cut: dict[str, LoopRV]

    @property
    def before_columns(self) -> list[LoopRV]:
        """Loops over steps, and over vectors of weights in one and of rows in these."""
        return [self.cut[name] for name in ("step", "unit0", "unit1") if name in self.cut]

    @property
    def for_rows(self) -> LoopRV:
        """The loop whose iterations load vectors of the rows."""
        return next((self.cut[name] for name in ("unit0", "step") if name in self.cut), self.outer)

    def bind(self, sch: Schedule, tile: WeightsTile) -> LoopRV:
        """Put the loops in order, spread them over blocks and threads, and return the loop over blocks."""
        packed = [self.cut["unit2"]] if "unit2" in self.cut else []
        threads = [self.column_thread, self.thread]
        sch.reorder(
            *[*self.batch, self.row_tile, self.column_tile, *threads, self.outer],
            *[*self.before_columns, self.column, self.row, *packed],
        )
        for loop, axis in zip(threads, _thread_axes(tile)):
            sch.bind(loop, axis)
        return bind_batched_grid(sch, self.batch, [self.row_tile, self.column_tile])

    def unroll(self, sch: Schedule) -> None:
        """Write out what a thread does in one iteration."""
        for loop in (*self.cut.values(), self.column, self.row):
            sch.unroll(loop)


def _thread_axes(tile: WeightsTile) -> tuple[str, str]:
    """Return what column threads and reduction threads are bound to: .x is what vectors run along."""
    return ("threadIdx.y", "threadIdx.x") if tile.along == "reduction" else ("threadIdx.x", "threadIdx.y")


def _tile(sch: Schedule, block: SBlockRV, tile: WeightsTile, few: int, many: int) -> _Nest:
    """Cut a product's loops, and let each reduction thread have sums of its own."""
    roles = product_roles(sch.get(block))[:-1]
    loops = sch.get_loops(block)
    row_tile, row = sch.split(loops[few], [None, tile.rows], preserve_unit_iters=True)
    factors = [None, tile.column_threads, tile.columns]
    column_tile, column_thread, column = sch.split(loops[many], factors, preserve_unit_iters=True)
    named = {"step": tile.steps, "thread": tile.reduction_threads}
    named |= {f"unit{place}": factor for place, factor in enumerate(tile.unit)}
    named = {name: factor for name, factor in named.items() if factor > 1 or name == "thread"}
    outer, *cut = sch.split(loops[-1], [None, *named.values()], preserve_unit_iters=True)
    thread = cut[list(named).index("thread")]
    sch.reorder(*loops[:-3], row_tile, column_tile, column_thread, column, row, outer, *cut)
    # What a thread sums lies last where threads side by side share a column, so that they store side by side.
    partial = sch.rfactor(thread, len(roles) if tile.along == "reduction" else 0)
    sch.set_scope(partial, 0, "local")
    *batch, row_tile, column_tile, column_thread, column, row, outer = sch.get_loops(partial)[: -len(cut)]
    cut = dict(zip(named, sch.get_loops(partial)[-len(cut) :]))
    thread = cut.pop("thread")
    roles = ["thread", *roles, "outer", *(name.rstrip("012") for name in cut)]
    return _Nest(partial, roles, batch, row_tile, column_tile, column_thread, column, row, outer, thread, cut)


@dataclass(frozen=True)
class _Copy:
    """A block that brings an operand, or what it is computed from, to registers; the roles of its iterators.

    ``width`` elements along those at ``places`` are one vector; ``sources`` are copies that it reads.
    """

    block: SBlockRV
    roles: list[str]
    width: int = 1
    places: tuple[int, ...] = ()
    sources: tuple[_Copy, ...] = ()


def _reindexed(sch: Schedule, consumer: SBlockRV, roles: list[str], read: int) -> _Copy:
    """Let a block read a copy in registers, with a dimension for each iterator that its index uses."""
    block = sch.reindex(consumer, ("read", read))
    sch.set_scope(block, 0, "local")
    inline_data_movement(sch, block)
    iterators = [iterator.var for iterator in sch.get(consumer).iter_vars]
    region = sch.get(consumer).reads[read].region
    places = [next((p for p, var in enumerate(iterators) if var.same_as(dim.min)), None) for dim in region]
    return _Copy(block, [roles[place] if place is not None else "one" for place in places])


def _to_registers(sch: Schedule, nest: _Nest, operand: int, many: str, columns: int) -> _Copy:
    """Let the threads' sums read an operand from registers, and what unpacks it read registers as well."""
    value = _reindexed(sch, nest.partial, nest.roles, operand)
    body = sch.get(value.block).body.value
    loads, inside = _loads(body), _inside(body)
    if isinstance(inside, ir.TensorLoad):
        return _in_vectors(sch, nest.partial, operand, value, many, columns)
    sources: list[_Copy] = []
    if inside is not body:  # no loads outside the bound
        return value
    for load in loads:
        reads = [region.source for region in sch.get(value.block).reads]
        if sum(other.source.same_as(load.source) for other in loads) == 1 and load.indices:
            (read,) = [place for place, source in enumerate(reads) if source.same_as(load.source)]
            copy = _reindexed(sch, value.block, value.roles, read)
            sources.append(_in_vectors(sch, value.block, read, copy, many, columns))
    return _Copy(value.block, value.roles, sources=tuple(sources))


def _in_vectors(sch: Schedule, consumer: SBlockRV, read: int, copy: _Copy, many: str, columns: int) -> _Copy:
    """Find the widest vectors that a copy can be made in, and lay out its registers for them."""
    if len(_loads(sch.get(copy.block).body.value)) > 1:  # an index that is read itself
        return copy
    for role, extent in (("unit", None), (many, columns)):
        places = tuple(place for place, own in enumerate(copy.roles) if own == role)
        width = _widest(sch.get(copy.block), places, extent) if places else 1
        if width > 1:
            rank = len(copy.roles)
            order = [*(place for place in range(rank) if place not in places), *places]
            if order != list(range(rank)):
                laid_out = index_map(rank, lambda *index, order=order: [index[place] for place in order])
                sch.transform_layout(consumer, ("read", read), laid_out)
            return _Copy(copy.block, copy.roles, width, places)
    return copy


def _widest(stmt: s_tir.SBlock, places: Sequence[int], extent: int | None) -> int:
    """Return the most elements of a copy's one load that lie side by side along its iterators at ``places``.

    These walk from 0 to their extents, or from any multiple of ``extent`` on.
    """
    (load,) = _loads(stmt.body.value)
    last = load.source.shape[-1]
    iterators = [stmt.iter_vars[place] for place in places]
    extents = [extent] if extent else [int(iterator.dom.extent) for iterator in iterators]
    width = VECTOR_BYTES // dtype_bytes(load.source.dtype)
    if "int" in str(load.source.dtype) and not isinstance(stmt.body.value, ir.TensorLoad):
        width = min(width, MOST_ZEROS)
    if not is_constant(last) or width < 1:
        return 1
    first = tirx.Var("first", "int32")

    def index_at(lane: int) -> list[tirx.PrimExpr]:
        digits: list[int] = []
        for size in reversed(extents):
            lane, digit = divmod(lane, size)
            digits.insert(0, digit)
        values = [first * extent + digits[0]] if extent else [tirx.const(digit, "int32") for digit in digits]
        taken = {iterator.var: value for iterator, value in zip(iterators, values)}
        return [tvm_ffi.structural_map(i, (tirx.Var, lambda var: taken.get(var, var))) for i in load.indices]

    analyzer = sym.Analyzer()
    while width > 1:
        start = index_at(0)
        aligned = analyzer.modular_set(analyzer.simplify(start[-1]))
        fits = math.prod(extents) % width == 0 and int(last) % width == 0
        if fits and aligned.coeff % width == 0 and aligned.base % width == 0:
            steps = [[analyzer.simplify(a - b) for a, b in zip(index_at(lane), start)] for lane in range(1, width)]
            if all(
                all(is_constant(s) for s in step) and [int(s) for s in step] == [0] * (len(step) - 1) + [lane]
                for lane, step in enumerate(steps, 1)
            ):
                return width
        width //= 2
    return 1


def _place(sch: Schedule, copy: _Copy, nest: _Nest, streamed: bool) -> None:
    """Put the copies of an operand under the loop whose iterations they are for, in vectors, written out."""
    first = nest.outer if streamed else nest.for_rows
    _copy_at(sch, copy, nest.column if streamed and copy.sources else first)
    for source in copy.sources:
        _copy_at(sch, source, first)


def _copy_at(sch: Schedule, copy: _Copy, loop: LoopRV) -> None:
    sch.compute_at(copy.block, loop, preserve_unit_loops=True)
    own = loops_below(sch, copy.block, loop)
    if copy.width > 1:
        lanes = [own[place] for place in copy.places]
        own = [other for place, other in enumerate(own) if place not in copy.places]
        sch.reorder(*own, *lanes)
        lane = sch.fuse(*lanes) if len(lanes) > 1 else lanes[0]
        if loop_extent(sch, lane) > copy.width:
            own.append(vectorize_inner(sch, lane, copy.width))
        else:
            sch.vectorize(lane)
    for other in own:
        sch.unroll(other)


@dataclass(frozen=True)
class _Sums:
    """Blocks that add up what the threads have summed: its copy to shared memory, sums of groups if any, the total."""

    shared: SBlockRV
    groups: SBlockRV | None
    total: SBlockRV


def _sums_of_threads(sch: Schedule, block: SBlockRV, tile: WeightsTile) -> _Sums:
    """Let the threads' sums be added up in one step, or in two where they are many, from shared memory."""
    groups = None
    if tile.groups > 1:
        _, group = sch.split(sch.get_loops(block)[-1], [None, tile.groups], preserve_unit_iters=True)
        groups = sch.rfactor(group, len(sch.get(block).iter_vars) - 1 if tile.along == "reduction" else 0)
        sch.set_scope(groups, 0, "shared")
    return _Sums(sch.cache_read(groups or block, 0, "shared"), groups, block)


def _add_up(sch: Schedule, sums: _Sums, grid: LoopRV, tile: WeightsTile, many: int) -> SBlockRV:
    """Add up what the threads have summed, through shared memory, and store it; returns what stores."""
    along_k, groups = tile.along == "reduction", sums.groups
    stored = sch.cache_write(groups, 0, "local") if groups is not None else None
    # All are put where they belong before any is spread: TVM 0.27 forgets, silently, that a block's outputs may be
    # fewer than its threads, and lets whatever is put behind it go on to as many.
    for block in filter(None, (sums.shared, groups, stored, sums.total)):
        sch.reverse_compute_at(block, grid, preserve_unit_loops=True)
    write_back = accumulate_in_registers(sch, sums.total, grid)
    sums_of_block = tile.rows * tile.block_columns
    _check_outputs(sch, sums.total, grid, sums_of_block)
    _check_outputs(sch, write_back, grid, sums_of_block)
    own = loops_below(sch, sums.shared, grid)
    if along_k:
        sch.storage_align(sums.shared, 0, len(own) - 2, 2, 1)  # odd: columns, read side by side, meet each bank once
    thread = own.pop(-1 if along_k else 0)
    column_thread, own[many + 1] = sch.split(own[many + 1], [tile.column_threads, tile.columns])
    for loop, axis in zip((column_thread, thread), _thread_axes(tile)):
        sch.bind(loop, axis)
    for loop in own:
        sch.unroll(loop)
    if groups is not None:
        _check_outputs(sch, stored, grid, sums_of_block * tile.groups)
        (group, *outputs), k = _outputs_and_reduction(sch, groups, grid)
        _spread(sch, [*outputs, group] if along_k else [group, *outputs], tile, k)
        initialize_before(sch, groups, k)
        _spread(sch, loops_below(sch, stored, grid), tile)
    outputs, k = _outputs_and_reduction(sch, sums.total, grid)
    _spread(sch, outputs, tile, k)
    initialize_before(sch, sums.total, k)
    _spread(sch, loops_below(sch, write_back, grid) or [sch.add_unit_loop(write_back)], tile)
    return write_back


def _outputs_and_reduction(sch: Schedule, block: SBlockRV, grid: LoopRV) -> tuple[list[LoopRV], LoopRV]:
    """Return the loops of a sum, its one reduction last."""
    kinds = [iterator.iter_type for iterator in sch.get(block).iter_vars]
    loops = dict(enumerate(loops_below(sch, block, grid)))
    k = loops.pop(kinds.index(tirx.IterVar.CommReduce))
    return list(loops.values()), k


def _check_outputs(sch: Schedule, block: SBlockRV, grid: LoopRV, count: int) -> None:
    """Raise IllegalSchedule where TVM lets a block compute more than a tile has, which others do as well."""
    kinds = [iterator.iter_type for iterator in sch.get(block).iter_vars]
    loops = loops_below(sch, block, grid)
    spatial = [loop for loop, kind in zip(loops, kinds) if kind == tirx.IterVar.DataPar] if loops else []
    found = math.prod(loop_extent(sch, loop) for loop in spatial)
    if found > count:
        raise IllegalSchedule(
            "TVM cannot tell what a tile's part of the result is",
            block=block_name(sch, block),
            value=f"{found} elements",
            limit=count,
            remedy="schedule the product with stage_contraction",
        )


def _spread(sch: Schedule, outputs: list[LoopRV], tile: WeightsTile, reduction: LoopRV | None = None) -> None:
    """Give each output to a thread, the last loop's to threads side by side; the sum of one is its thread's."""
    if reduction is not None:
        sch.reorder(*outputs, reduction)
        if loop_extent(sch, reduction) <= MOST_UNROLLED:
            sch.unroll(reduction)
    extents = dict(zip(_thread_axes(tile), (tile.column_threads, tile.reduction_threads)))
    every = sch.fuse(*outputs) if len(outputs) > 1 else outputs[0]
    outer, *threads = sch.split(every, [None, extents["threadIdx.y"], extents["threadIdx.x"]], preserve_unit_iters=True)
    for loop, axis in zip(threads, ("threadIdx.y", "threadIdx.x")):
        sch.bind(loop, axis)
    sch.unroll(outer)


def _loads(value: tirx.PrimExpr) -> list[ir.TensorLoad]:
    """Return the elements that an expression reads."""
    found: list[ir.TensorLoad] = []
    tvm_ffi.structural_walk(value, (ir.TensorLoad, lambda load: found.append(load)))
    return found


def _inside(value: tirx.PrimExpr) -> tirx.PrimExpr:
    """Return what an expression is inside the bounds outside which it is zero; itself where it has none."""
    while isinstance(value, ir.Call) and str(value.op.name).endswith("if_then_else"):
        value = value.args[1]
    return value


def _described(load: ir.TensorLoad, roles: list[tuple[tirx.Var, str]]) -> Load:
    """Say how the elements of a load lie."""
    index, packed = load.indices[-1] if load.indices else None, 1
    if isinstance(index, tirx.FloorDiv) and is_constant(index.b):
        index, packed = index.a, int(index.b)
    along = next((role for var, role in roles if index is not None and var.same_as(index)), "")
    if along != "reduction":
        divided: list[int] = []
        for other in load.indices[:-1]:
            if isinstance(other, tirx.FloorDiv) and is_constant(other.b):
                divided += [int(other.b) for var, role in roles if role == "reduction" and var.same_as(other.a)]
        along, packed = ("" if packed > 1 else along), max(divided, default=1)
    last = load.source.shape[-1] if load.indices else tirx.const(1, "int32")
    width = math.gcd(VECTOR_BYTES // dtype_bytes(load.source.dtype), int(last)) if is_constant(last) else 1
    return Load(load.source, along, width, packed)
