"""A rule for scans: cumulative sums, products, minima and maxima along one axis."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tvm_ffi
from tvm import ir, tirx
from tvm.target import Target

from tensorir_ladder.relax.rules import vectors as v
from tensorir_ladder.relax.rules.computations import LEAVE, Computation, loads_in
from tensorir_ladder.relax.rules.reductions import ZERO, Reduction, cast, reductions_of
from tensorir_ladder.relax.rules.rule import NotTaken, Rule
from tensorir_ladder.schedules.inspection import is_constant
from tensorir_ladder.schedules.isa import VECTOR_BYTES, WARP
from tensorir_ladder.schedules.loops.vectorization import dtype_bytes

MOST_THREADS = 512  # threads along a row
BLOCK_THREADS = 128  # threads of a block that scans several rows
EACH = 4  # elements of a tile that a thread scans, or the elements of one vector where these are more
ACROSS_ROWS = 2**12  # from this many rows on, one thread for each row keeps the GPU busy
SHORT = 256  # elements of a row that one thread scans, however few rows there are
FEW_THREADS = 2**14  # long rows are cut into parts where a launch would have fewer threads
LEAST_TILES = {True: 32, False: 4}  # of a part, by `across`; a row's threads scan one tile at a time
MOST_PARTS = {True: 32, False: MOST_THREADS}  # of a row, by `across`, where one thread sums the parts before its own
EVERY = tirx.const(0xFFFFFFFF, "uint32")


class Scan(Rule):
    """Schedules a scan, with the elementwise computations before and behind it, in a kernel that reads once.

    ::

        before   for i, j, k:  y[i, j] += x[i, k] if k <= j else 0        # k < j: an exclusive scan
        after    for row, over blocks (short ones: several a block):
                   for tile:  for thread along the row:
                       x_local = x[row, its vectors];  total = sum(x_local)
                       before = carry + sum of totals of the threads before     # by shuffles, then shared memory
                       y[row, its vectors] = before + running sums of x_local
                       carry += sum of all totals

    The axis may be any. Where neighbours in memory belong to different rows, a thread scans one row or a vector of
    rows. Few long rows are cut into parts: a first kernel computes the total of each part. Sums of 16-bit floats are
    float32, those of integers narrower than 32 bits int32. The order of additions is not the plain loop's.
    """

    name = "scan"

    def schedule(self, func: tirx.PrimFunc, target: Target) -> tirx.PrimFunc:
        """Return the function with its kernels; NotTaken for a function without exactly one scan."""
        source = v.read_source(func, self.numbers_elements)
        scan = _scan_of(source)
        return source.with_body(v.for_whole_vectors(source, lambda extents: _best_kernels(source, scan, extents)))


@dataclass(frozen=True)
class _Scan:
    """A scan: at each place of ``axis``, the reduction of ``term`` over the ``step``s up to that place."""

    reduction: Reduction
    axis: tirx.IterVar
    step: tirx.IterVar
    term: ir.Expr
    exclusive: bool

    @property
    def computation(self) -> Computation:
        """The block that is the scan."""
        return self.reduction.computations[0]

    @property
    def others(self) -> list[tirx.IterVar]:
        """The iterators that number rows."""
        return [iterator for iterator in self.computation.spatial if iterator is not self.axis]


def _scan_of(source: v.Source) -> _Scan:
    """Recognize a function with one scan; NotTaken for any other."""
    reducing = [computation.name for computation in source.computations if v.is_reduction(computation)]
    if len(reducing) != 1:
        raise NotTaken("a function without exactly one scan", value=reducing, remedy=LEAVE)
    (reduction,) = reductions_of(source.computations)
    (computation,), (term,) = reduction.computations, reduction.terms
    term = term.value if isinstance(term, tirx.Cast) else term
    element, condition = None, None
    if isinstance(term, ir.Call) and term.op.name == v.IF:
        condition, element, other = term.args
    elif isinstance(term, tirx.Select):
        condition, element, other = term.condition, term.true_value, term.false_value
    found = _scanned_axis(computation, condition)
    if element is None or found is None or v.uses(element, [found[0].var]) or reduction.starts != (None,):
        problem = "a reduction whose elements are not those up to the result's place"
        raise NotTaken(problem, block=computation.name, remedy=LEAVE)
    if not tvm_ffi.structural_equal(other, computation.start):
        problem = "elements behind the result's place that are not the reduction's start"
        raise NotTaken(problem, block=computation.name, remedy=LEAVE)
    axis, exclusive = found
    return _Scan(reduction, axis, computation.reduction[0], element, exclusive)


def _scanned_axis(computation: Computation, condition: ir.Expr | None) -> tuple[tirx.IterVar, bool] | None:
    """Return the axis of step <= axis or step < axis, and whether it is the latter (exclusive); None for the rest."""
    if len(computation.reduction) != 1 or not isinstance(condition, (tirx.LE, tirx.LT, tirx.GE, tirx.GT)):
        return None
    (step,) = computation.reduction
    swapped = isinstance(condition, (tirx.GE, tirx.GT))
    low, high = (condition.b, condition.a) if swapped else (condition.a, condition.b)
    for axis in computation.spatial:
        same = tvm_ffi.structural_equal(axis.dom.extent, step.dom.extent)
        if same and low.same_as(step.var) and high.same_as(axis.var):
            return axis, isinstance(condition, (tirx.LT, tirx.GT))
    return None


@dataclass
class _Form:
    """A scan in vectors of ``lanes`` along the row, or of neighbouring rows (``across``).

    ``term`` and ``stores`` (buffer, indices, value) are expressions of ``other``, ``lanes.vector`` and ``lanes.lane``:
    the row and the vectors along it, or the place in the row and the vectors of rows.
    """

    scan: _Scan
    lanes: v.Lanes
    across: bool
    other: tirx.Var
    rows: ir.Expr
    columns: ir.Expr
    term: ir.Expr
    stores: list[tuple[tirx.Var, list[ir.Expr], ir.Expr]]
    read: list[v.VectorAccess]  # loads of ``term``
    accesses: list[v.VectorAccess]  # loads of ``term`` and ``stores``

    @property
    def widths(self) -> list[int]:
        """Elements of each load and store."""
        return [*(access.width for access in self.accesses), *(self.lanes.width(*store[:2]) for store in self.stores)]

    @property
    def cost(self) -> float:
        """Load and store instructions per element."""
        return sum(1 / width for width in self.widths)


def _best_kernels(source: v.Source, scan: _Scan, extents: v.Values) -> tuple[tirx.Stmt, bool]:
    """Return the kernels, and whether all accesses are in vectors."""
    buffers = [b for b in source.buffers() if b.shape and str(b.dtype) != "bool"]
    lanes = min(VECTOR_BYTES // min((dtype_bytes(str(b.dtype)) for b in buffers), default=1), v.MOST_LANES)
    across, forms = _stands_across(v.Expressions(source, extents), scan), []
    while lanes >= 1:
        form = _form(source, scan, extents, lanes, across)
        forms += [form] if form else []
        lanes //= 2
    if across and is_constant(forms[0].rows):  # wide vectors of rows leave fewer threads
        forms = [one for one in forms if int(one.rows) // one.lanes.lanes >= FEW_THREADS] or forms[-1:]
    form = min(forms, key=lambda form: (form.cost, form.lanes.lanes))
    return _kernels(form), min(form.widths) > 1


def _stands_across(expressions: v.Expressions, scan: _Scan) -> bool:
    """Return whether each thread scans a row by itself, next to threads whose rows interleave with it in memory."""
    extents = {iterator.var: expressions.extent(iterator.dom.extent) for iterator in scan.computation.spatial}
    order = [index for index in scan.computation.indices if isinstance(index, tirx.Var)]
    inner = v.product(extents[var] for var in order[[var.same_as(scan.axis.var) for var in order].index(True) + 1 :])
    rows, columns = v.product(extents[iterator.var] for iterator in scan.others), extents[scan.axis.var]
    if is_constant(inner) and int(inner) < WARP:
        return False
    many = not is_constant(rows) or int(rows) >= ACROSS_ROWS
    return many or (is_constant(columns) and int(columns) <= SHORT)


def _form(source: v.Source, scan: _Scan, extents: v.Values, count: int, across: bool) -> _Form | None:
    """Write a scan in vectors of ``count`` lanes; None where ``count`` does not divide the extent along them."""
    expressions = v.Expressions(source, extents)
    lanes = v.Lanes(count, expressions)
    shape = [expressions.extent(iterator.dom.extent) for iterator in scan.others]
    rows, columns = v.product(shape), expressions.extent(scan.axis.dom.extent)
    placed = lanes.place(rows, columns, across)
    if placed is None:
        return None
    row, column, other = placed
    place = dict(zip([iterator.var for iterator in scan.others], v.digits(row, shape)))
    term = lanes.simplified(expressions.value(scan.term, {**place, scan.step.var: column}))
    place[scan.axis.var] = column
    lanes.inside += [
        (place[iterator.var], expressions.extent(iterator.dom.extent)) for iterator in scan.computation.spatial
    ]
    own = [place[index] if isinstance(index, tirx.Var) else ZERO for index in scan.computation.indices]
    stores = [_stored(expressions, lanes, scan, output, place, own) for output in source.outputs]
    read = [access for access in lanes.accesses([term]) if expressions.is_parameter(access.load.source)]
    result = scan.computation.buffer
    accesses = [
        access
        for access in lanes.accesses([term, *(value for _, _, value in stores)])
        if expressions.is_parameter(access.load.source) and not access.load.source.same_as(result)
    ]
    return _Form(scan, lanes, across, other, rows, columns, term, stores, read, accesses)


def _stored(
    expressions: v.Expressions,
    lanes: v.Lanes,
    scan: _Scan,
    output: Computation,
    place: v.Values,
    own: Sequence[ir.Expr],
) -> tuple[tirx.Var, list[ir.Expr], ir.Expr]:
    """Return an output's buffer, indices and value; the value may read the scan's result at the same place only."""
    result = scan.computation
    if output is result:
        return output.buffer, list(own), tirx.BufferLoad(output.buffer, list(own))
    alike = len(output.spatial) == len(result.spatial) and all(
        tvm_ffi.structural_equal(one.dom.extent, other.dom.extent) for one, other in zip(output.spatial, result.spatial)
    )
    if not alike:
        raise NotTaken("an output of another shape than the scan's", block=output.name, remedy=LEAVE)
    at = {its.var: place[iterator.var] for its, iterator in zip(output.spatial, result.spatial)}
    value = lanes.simplified(expressions.value(output.value, at))
    for load in loads_in(value):
        if load.source.same_as(result.buffer) and not all(map(lanes.analyzer.can_prove_equal, load.indices, own)):
            raise NotTaken("an output that reads the scan at another place", block=output.name, remedy=LEAVE)
    return output.buffer, [at[index] if isinstance(index, tirx.Var) else ZERO for index in output.indices], value


def _kernels(form: _Form) -> tirx.Stmt:
    """Choose a row's threads by its length; a symbolic length gets a kernel for short rows and one for long rows."""
    each = max(1, EACH if form.across else EACH // form.lanes.lanes)
    taken = each if form.across else each * form.lanes.lanes
    if form.across:
        kernel = _in_parts(form, 1, each)
    elif is_constant(form.columns):
        kernel = _in_parts(form, min(MOST_THREADS, _power_of_two(-(-int(form.columns) // taken))), each)
    else:
        short, long = (_Kernel(form, threads, each).statement() for threads in (WARP, MOST_THREADS))
        kernel = tirx.IfThenElse(form.columns <= WARP * taken, short, long)
    return kernel if is_constant(form.rows) else tirx.IfThenElse(form.rows > 0, kernel, None)


def _in_parts(form: _Form, threads: int, each: int) -> tirx.Stmt:
    """Cut few long rows into parts: one kernel stores their totals, the next scans each part from the sum before it."""
    whole = _Kernel(form, threads, each)
    if not is_constant(form.rows) or not is_constant(form.columns):
        return whole.statement()
    rows = int(form.rows) // (form.lanes.lanes if form.across else 1)
    tiles = -(-int(whole.length) // (threads * each))
    parts = min(FEW_THREADS // (rows * threads), tiles // LEAST_TILES[form.across], MOST_PARTS[form.across])
    if parts < 2:
        return whole.statement()
    tiles_each = -(-tiles // parts)
    parts = -(-tiles // tiles_each)
    (dtype,) = form.scan.reduction.dtypes
    totals = tirx.decl_buffer((int(form.rows), parts), dtype, f"{form.scan.computation.buffer.name}_totals")
    cut = [_Kernel(form, threads, each, _Parts(parts, tiles_each, totals, adds)).statement() for adds in (True, False)]
    return v.sequence([tirx.AllocBuffer(totals), *cut])


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


@dataclass(frozen=True)
class _Parts:
    """Rows cut into ``count`` parts of ``tiles`` each; a kernel that ``adds`` only stores the parts' ``totals``."""

    count: int
    tiles: int
    totals: tirx.Var
    adds: bool


class _Kernel:
    """One kernel of a form: a row has ``threads``, each of which scans ``each`` consecutive vectors of a tile.

    A block scans one row, several rows, or several vectors of rows (across); with ``parts``, one part of these.
    """

    def __init__(self, form: _Form, threads: int, each: int, parts: _Parts | None = None) -> None:
        self.form, self.threads, self.each, self.parts, self.lanes = form, threads, each, parts, form.lanes
        self.rows = BLOCK_THREADS // threads if threads <= WARP else 1
        self.row_count = v.divided(form.rows, self.lanes.lanes) if form.across else form.rows
        self.length = form.columns if form.across else v.divided(form.columns, self.lanes.lanes)
        self.sums = self.lanes.lanes if form.across else 1  # of a thread, one for each of its rows
        (self.dtype,) = form.scan.reduction.dtypes
        (self.begin,) = form.scan.reduction.begins

    def statement(self) -> tirx.Stmt:
        """Return the kernel."""
        parts = self.parts.count if self.parts else 1
        along, beside = ("threadIdx.y", "threadIdx.x") if self.form.across else ("threadIdx.x", "threadIdx.y")

        def of_block(block: ir.Expr) -> tirx.Stmt:
            count = tirx.const(parts, "int32")
            rows, part = (block, ZERO) if parts == 1 else (tirx.FloorDiv(block, count), tirx.FloorMod(block, count))

            def of_row(row: ir.Expr) -> tirx.Stmt:
                if self.threads == 1:
                    return self._thread(rows * self.rows + row, part, ZERO)
                return v.threads(along, self.threads, lambda t: self._thread(rows * self.rows + row, part, t))

            return v.threads(beside, self.rows, of_row) if self.rows > 1 else of_row(ZERO)

        return v.threads("blockIdx.x", v.ceil_div(self.row_count, self.rows) * parts, of_block)

    def _thread(self, row: ir.Expr, part: ir.Expr, thread: ir.Expr) -> tirx.Stmt:
        exact = v.is_multiple(self.row_count, self.rows)
        self.row = row if exact else tirx.Min(row, self.row_count - 1)
        self.is_row = None if exact else row < self.row_count
        self.part, self.thread = part, thread
        self.carry = v.registers("carry", self.sums, self.dtype)
        statements: list[tirx.Stmt] = [tirx.AllocBuffer(self.carry)]
        statements.append(self._for_sums(lambda at: self._set(self.carry, self.begin, at)))
        if self.threads > WARP:
            self.shared = tirx.decl_buffer((self.threads // WARP,), self.dtype, "totals_shared", scope="shared")
            statements.append(tirx.AllocBuffer(self.shared))
        tile = self.threads * self.each
        parts = self.parts
        if parts is None:
            return v.sequence([*statements, v.loop("tile", v.ceil_div(self.length, tile), self._tile)])
        first = part * parts.tiles
        if not parts.adds:
            statements += self._before(parts)

        def inside(number: ir.Expr) -> tirx.Stmt:
            return v.where([(first + number) * tile < self.length], self._tile(first + number))

        statements.append(v.loop("tile", parts.tiles, inside))
        if parts.adds:
            statements += self._total(parts)
        return v.sequence(statements)

    def _tile(self, tile: ir.Expr) -> tirx.Stmt:
        """Scan a tile from the carry, and add its total to the carry; a kernel that ``adds`` only does the latter."""
        first = (tile * self.threads + self.thread) * self.each
        take = v.Take(self.lanes, self.each, lambda number: self._place(first + number), self._is_in_row(first))
        only_adds = self.parts is not None and self.parts.adds
        accesses = [dataclasses.replace(access) for access in (self.form.read if only_adds else self.form.accesses)]
        allocations, loads = take.fill(accesses)
        statements = [*allocations, *loads]
        if only_adds:
            return v.sequence([*statements, take.compute(accesses, self._adding(self.carry))])
        if self.threads == 1:
            return v.sequence([*statements, *self._scanned(take, accesses, self.carry)])
        total = v.registers("total", 1, self.dtype)
        statements += [tirx.AllocBuffer(total), self._set(total, self.begin, ZERO)]
        statements.append(take.compute(accesses, self._adding(total)))
        moved, before, whole = self._over_threads(total)
        statements += [*moved, self._add(before, tirx.BufferLoad(self.carry, [ZERO]), ZERO)]
        statements += self._scanned(take, accesses, before)
        return v.sequence([*statements, self._add(self.carry, tirx.BufferLoad(whole, [ZERO]), ZERO)])

    def _place(self, number: ir.Expr) -> v.Values:
        row, along = self.form.other, self.lanes.vector
        return {along: self.row, row: number} if self.form.across else {row: self.row, along: number}

    def _is_in_row(self, first: ir.Expr) -> Callable[[ir.Expr], ir.Expr | None]:
        exact = v.is_multiple(self.length, self.threads * self.each)
        return lambda number: None if exact else first + number < self.length

    def _adding(self, total: tirx.Var) -> Callable[[v.Read, ir.Expr, ir.Expr], tirx.Stmt]:
        """Return what adds each lane's element to a total."""
        term = cast(self.form.term, self.dtype)
        return lambda read, _slot, lane: self._add(total, read(term), lane if self.form.across else ZERO)

    def _scanned(self, take: v.Take, accesses: Sequence[v.VectorAccess], running: tirx.Var) -> list[tirx.Stmt]:
        """Scan a thread's elements from the sum ``running``, and store the results."""
        result, count = self.form.scan.computation.buffer, self.each * self.lanes.lanes
        scanned = v.registers(f"{result.name}_local", count, str(result.dtype))
        results = [
            scanned if buffer.same_as(result) else v.registers(f"{buffer.name}_local", count, str(buffer.dtype))
            for buffer, _, _ in self.form.stores
        ]
        adding = self._adding(running)

        def lane(read: v.Read, slot: ir.Expr, place: ir.Expr) -> tirx.Stmt:
            at = place if self.form.across else ZERO
            stored = tirx.BufferStore(scanned, cast(tirx.BufferLoad(running, [at]), str(result.dtype)), [slot])
            added = adding(read, slot, place)

            def own(load: ir.TensorLoad) -> ir.TensorLoad:
                return tirx.BufferLoad(scanned, [slot]) if load.source.same_as(result) else load

            made = [
                tirx.BufferStore(to, tvm_ffi.structural_map(read(value), (ir.TensorLoad, own)), [slot])
                for to, (_, _, value) in zip(results, self.form.stores)
                if to is not scanned
            ]
            return v.sequence([*((stored, added) if self.form.scan.exclusive else (added, stored)), *made])

        stores = [(buffer, indices, to) for to, (buffer, indices, _) in zip(results, self.form.stores)]
        allocations = [tirx.AllocBuffer(buffer) for buffer in {id(b): b for b in (scanned, *results)}.values()]
        return [*allocations, v.where([self.is_row], take.compute(accesses, lane, stores))]

    def _before(self, parts: _Parts) -> list[tirx.Stmt]:
        """Set the carry to the sum of the row's parts before the block's own."""

        def one(number: ir.Expr) -> tirx.Stmt:
            place = number * self.threads + self.thread
            add = self._for_sums(
                lambda at: self._add(self.carry, tirx.BufferLoad(parts.totals, [self._row(at), place]), at)
            )
            return v.where([place < self.part], add)

        statements = [v.loop("before", -(-parts.count // self.threads), one)]
        if self.threads > 1:
            moved, _, whole = self._over_threads(self.carry)
            statements += [*moved, self._set(self.carry, tirx.BufferLoad(whole, [ZERO]), ZERO)]
        return statements

    def _total(self, parts: _Parts) -> list[tirx.Stmt]:
        """Store the total of the block's part of a row."""
        statements: list[tirx.Stmt] = []
        total = self.carry
        if self.threads > 1:
            statements, _, total = self._over_threads(self.carry)
        store = self._for_sums(
            lambda at: tirx.BufferStore(parts.totals, tirx.BufferLoad(total, [at]), [self._row(at), self.part])
        )
        return [*statements, v.where([tirx.EQ(self.thread, 0), self.is_row], store)]

    def _row(self, lane: ir.Expr) -> ir.Expr:
        return self.row * self.lanes.lanes + lane if self.form.across else self.row

    def _over_threads(self, total: tirx.Var) -> tuple[list[tirx.Stmt], tirx.Var, tirx.Var]:
        """Scan the totals of a row's threads; return statements, the sum before each thread, and the sum of all."""
        width, warps = min(self.threads, WARP), self.threads // WARP
        warp, lane = (kind(self.thread, tirx.const(WARP, "int32")) for kind in (tirx.FloorDiv, tirx.FloorMod))
        lane = lane if warps > 1 else self.thread
        names = ("inclusive", "other", "before", "whole")
        inclusive, other, before, whole = (v.registers(name, 1, self.dtype) for name in names)
        statements: list[tirx.Stmt] = [tirx.AllocBuffer(buffer) for buffer in (inclusive, other, before, whole)]
        statements.append(self._set(inclusive, tirx.BufferLoad(total, [ZERO]), ZERO))
        distance, value = 1, tirx.BufferLoad(inclusive, [ZERO])
        while distance < width:
            moved = tirx.op.tvm_warp_shuffle_up(EVERY, value, distance, width, WARP)
            statements.append(self._set(other, moved, ZERO))
            statements.append(v.where([lane >= distance], self._add(inclusive, tirx.BufferLoad(other, [ZERO]), ZERO)))
            distance *= 2
        statements += [
            self._set(other, tirx.op.tvm_warp_shuffle_up(EVERY, value, 1, width, WARP), ZERO),
            self._set(before, tirx.Select(lane > 0, tirx.BufferLoad(other, [ZERO]), self.begin), ZERO),
        ]
        if warps <= 1:
            last = tirx.op.tvm_warp_shuffle(EVERY, value, width - 1, width, WARP)
            return [*statements, self._set(whole, last, ZERO)], before, whole

        def of_warp(number: ir.Expr) -> tirx.Stmt:
            part = tirx.BufferLoad(self.shared, [number])
            return v.sequence([v.where([number < warp], self._add(before, part, ZERO)), self._add(whole, part, ZERO)])

        put = tirx.BufferStore(self.shared, value, [warp])
        statements += [v.where([tirx.EQ(lane, WARP - 1)], put), v.barrier(), self._set(whole, self.begin, ZERO)]
        return [*statements, v.unrolled("warp", warps, of_warp), v.barrier()], before, whole

    def _for_sums(self, body: Callable[[ir.Expr], tirx.Stmt]) -> tirx.Stmt:
        return v.unrolled("lane", self.sums, body)

    def _set(self, buffer: tirx.Var, value: ir.Expr, at: ir.Expr) -> tirx.Stmt:
        return tirx.BufferStore(buffer, value, [at])

    def _add(self, buffer: tirx.Var, value: ir.Expr, at: ir.Expr) -> tirx.Stmt:
        (both,) = self.form.scan.reduction.combine([tirx.BufferLoad(buffer, [at])], [value])
        return tirx.BufferStore(buffer, both, [at])
