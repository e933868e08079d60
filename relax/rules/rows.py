"""A rule for functions that reduce rows and go on with the results: softmax, norms, sums, means, argmax."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import tvm_ffi
from tvm import ir, tirx
from tvm.target import Target

from tensorir_ladder.relax.rules import vectors as v
from tensorir_ladder.relax.rules.computations import LEAVE, Computation, index_of, loads_in
from tensorir_ladder.relax.rules.long_rows import in_parts
from tensorir_ladder.relax.rules.needed_rows import with_needed_rows
from tensorir_ladder.relax.rules.reductions import ZERO, Reduction, cast, reductions_of, stands_along_rows
from tensorir_ladder.relax.rules.rule import NotTaken, Rule
from tensorir_ladder.schedules.inspection import is_constant
from tensorir_ladder.schedules.isa import VECTOR_BYTES, WARP
from tensorir_ladder.schedules.loops.vectorization import dtype_bytes

MOST_THREADS = 1024
BLOCK_THREADS = 128  # of a block that takes several rows
STREAM_THREADS = 512  # of a row that registers do not hold
STREAMED = 0  # vectors that a thread holds of a row that it reads again in each pass
STREAM_VECTORS = 4  # that a thread has on their way then
ELEMENTS = 16  # of a row that a thread holds, where there are many rows
MANY_BLOCKS = 128
RANGES_OF_THREADS = (256, 64, WARP)  # of a row of symbolic length, each for rows up to so many times what one holds
FEW_THREADS = 2**17  # with fewer in all, rows are given more
KEPT_BYTES = {512: 256, 1024: 128}  # of registers that a thread of a block up to so many may hold rows in
LONGEST_ALONE = 64  # elements of a row that one thread adds up where neighbours are of other rows


class Rows(Rule):
    """Schedules functions that reduce rows and may use the results elementwise, in one kernel that reads rows once.

    ::

        before   for i, k:  m[i] = max(m[i], x[i, k])
                 for i, k:  s[i] += exp(x[i, k] - m[i])
                 for i, j:  y[i, j] = exp(x[i, j] - m[i]) / s[i]
        after    for row, over blocks (short ones: several a block):
                   for thread along the row:  x_local = x[row, its vectors]          # 16 bytes each
                                              m_local = max(x_local), then by shuffles over the threads
                                              e_local = exp(x_local - m_local);  s_local = sum, by shuffles
                                              y[row, its vectors] = e_local / s_local

    Rows that registers do not hold are read again for each reduction. Where elements of a row are apart and those of
    neighbouring rows together, threads stand along the rows, and sums are taken over threads of one row through shared
    memory. Sums of 16-bit floats are kept in float32. The order of additions is not the plain loop's.
    """

    name = "rows"

    def schedule(self, func: tirx.PrimFunc, target: Target) -> tirx.PrimFunc:
        """Return the function with a kernel of its own; NotTaken for one that is no chain over the same rows."""
        source = with_needed_rows(v.read_source(func, self.numbers_elements))
        reductions = reductions_of(source.computations)
        if not reductions:
            raise NotTaken("a function without a reduction", remedy=LEAVE)
        cut = in_parts(source, reductions, _best_kernels)
        if cut is None:
            cut = v.for_whole_vectors(source, lambda extents: _best_kernels(source, reductions, extents))
        return source.with_body(cut)


@dataclass
class _Phase:
    """One pass over a row: a reduction, or (None) what is stored, as expressions of a position in it.

    ``values`` are a reduction's terms, or what is stored to ``stores`` (buffer, indices). ``columns`` is the length of
    the row, None where something is computed once for all of it.
    """

    reduction: Reduction | None
    values: list[ir.Expr]
    stores: list[tuple[tirx.Var, list[ir.Expr]]]
    columns: ir.Expr | None
    accesses: list[v.VectorAccess] = field(default_factory=list)
    computes: list[tuple[tirx.Var, ir.Expr]] = field(default_factory=list)  # what is kept in registers from here on


@dataclass
class _Form:
    """A function as passes over rows, for vectors of so many lanes along the row (or, ``across``, along the rows).

    ``row`` and ``column`` number rows and elements: what lanes do not stand along is a variable, the other one is
    ``lanes.vector * lanes.lanes + lanes.lane``.
    """

    expressions: v.Expressions
    lanes: v.Lanes
    across: bool
    row: ir.Expr
    column: ir.Expr
    other: tirx.Var  # the row or column that is a variable of its own
    rows: ir.Expr
    columns: ir.Expr
    phases: list[_Phase]

    @property
    def cost(self) -> float:
        """Loads and stores for an element."""
        widths = [access.width for phase in self.phases for access in phase.accesses]
        widths += [
            self.lanes.width(*store) for phase in self.phases if phase.columns is not None for store in phase.stores
        ]
        return sum(1 / width for width in widths)

    @property
    def is_whole(self) -> bool:
        """Tell if every load and store is a vector."""
        accesses = [access for phase in self.phases for access in phase.accesses]
        stores = [store for phase in self.phases if phase.columns is not None for store in phase.stores]
        return min([*(a.width for a in accesses), *(self.lanes.width(*store) for store in stores)], default=1) > 1


def _best_kernels(source: v.Source, reductions: Sequence[Reduction], extents: v.Values) -> tuple[tirx.Stmt, bool]:
    """Return the kernels, and whether all accesses are in vectors."""
    names: dict[tirx.Var, ir.Expr] = {
        i.var: tirx.Var(str(i.var.name), "int32") for c in source.computations for i in c.iterators
    }
    expressions = v.Expressions(source, extents)
    for reduction in reductions:
        _check_rows(expressions, reduction, names)
    across = stands_along_rows(expressions, reductions[0], names)
    buffers = [b for b in source.buffers() if b.shape and str(b.dtype) != "bool"]
    narrowest = min((dtype_bytes(str(buffer.dtype)) for buffer in buffers), default=VECTOR_BYTES)
    lanes = min(VECTOR_BYTES // narrowest, v.MOST_LANES)
    forms = []
    while lanes >= 1:
        form = _form(source, reductions, extents, lanes, across, ())
        forms += [form] if form else []
        lanes //= 2
    if across and is_constant(forms[0].rows):  # narrower vectors where wide ones leave too few blocks
        rows = int(forms[0].rows)
        forms = [form for form in forms if rows // (form.lanes.lanes * WARP) >= MANY_BLOCKS] or forms[-2:]
    form = min(forms, key=lambda form: (form.cost, form.lanes.lanes))

    def keeping(kept: Sequence[tirx.Var]) -> _Form:
        return _form(source, reductions, extents, form.lanes.lanes, across, kept) or form

    return _kernels(form, keeping), form.is_whole


def _check_rows(expressions: v.Expressions, reduction: Reduction, names: v.Values) -> None:
    """Raise NotTaken for a reduction each of whose operands is used for several results, as a matmul's are."""
    needed = [names[iterator.var] for iterator in reduction.computations[0].iterators]
    for term in reduction.terms:
        loads = loads_in(expressions.value(term, names))
        if loads and not any(all(v.uses(load, [variable]) for variable in needed) for load in loads):
            name = reduction.computations[0].name
            raise NotTaken("each operand is used for several results: a contraction", block=name, remedy=LEAVE)


def _form(
    source: v.Source,
    reductions: Sequence[Reduction],
    extents: v.Values,
    count: int,
    across: bool,
    kept: Sequence[tirx.Var],
) -> _Form | None:
    """Write a function as passes over rows; None where vectors of so many lanes do not divide what they stand along."""
    expressions = v.Expressions(source, extents, kept)
    lanes = v.Lanes(count, expressions)
    first = reductions[0].computations[0]
    shape = [expressions.extent(i.dom.extent) for i in first.spatial]
    lengths = [expressions.extent(i.dom.extent) for i in first.reduction]
    rows, columns = v.product(shape), v.product(lengths)
    placed = lanes.place(rows, columns, across)
    if placed is None:
        return None
    row, column, other = placed
    form = _Form(expressions, lanes, across, row, column, other, rows, columns, [])
    place = v.digits(row, shape)
    lanes.inside += [*zip(place, shape), *zip(v.digits(column, lengths), lengths)]
    for reduction in reductions:
        form.phases.append(_reducing_phase(form, reduction))
    results = [c for c in source.outputs if not v.is_reduction(c)]
    for result in results:
        form.phases.append(_storing_phase(form, result, reductions, shape, lengths, place))
    for phase in form.phases:
        _check_results(form, phase, reductions)
    _plan_registers(form, source, kept)
    return form


def _reducing_phase(form: _Form, reduction: Reduction) -> _Phase:
    first = reduction.computations[0]
    own = _extents(form, first)
    lengths = [form.expressions.extent(i.dom.extent) for i in first.reduction]
    columns = v.product(lengths)
    analyzer = form.lanes.analyzer
    alike = analyzer.can_prove_equal(v.product(own), form.rows)
    if not alike or not analyzer.can_prove_equal(columns, form.columns):
        raise NotTaken("reductions of rows that are not the same", block=first.name, value=f"{own}", remedy=LEAVE)
    at = dict(zip([i.var for i in first.spatial], v.digits(form.row, own)))
    at.update(zip([i.var for i in first.reduction], v.digits(form.column, lengths)))
    values = [form.lanes.simplified(form.expressions.value(term, at)) for term in reduction.terms]
    return _Phase(reduction, values, [], columns)


def _storing_phase(
    form: _Form,
    result: Computation,
    reductions: Sequence[Reduction],
    shape: list[ir.Expr],
    lengths: list[ir.Expr],
    place: list[ir.Expr],
) -> _Phase:
    """Find out which of a result's iterators number rows: those that index what was reduced, else the first ones."""
    names = {i.var: tirx.Var(str(i.var.name), "int32") for i in result.spatial}
    plain = form.lanes.simplified(form.expressions.value(result.value, names))
    at: dict[tirx.Var, tuple[ir.Expr, ir.Expr]] = {}  # a digit of the row, and how many values it has
    for load in loads_in(plain):
        for reduction in reductions:
            for computation in reduction.computations:
                if load.source.same_as(computation.buffer):
                    axes = [index for own, index in zip(computation.indices, load.indices) if isinstance(own, tirx.Var)]
                    at.update((var, one) for var, one in zip(axes, zip(place, shape)) if isinstance(var, tirx.Var))
    numbered = {own: at[narrow][0] for own, narrow in names.items() if narrow in at}
    left = [i for i in result.spatial if i.var not in numbered]
    own = [form.expressions.extent(i.dom.extent) for i in left]
    analyzer = form.lanes.analyzer
    for iterator, narrow in zip(result.spatial, names.values()):
        extent = form.expressions.extent(iterator.dom.extent)
        if narrow in at and not analyzer.can_prove_equal(extent, at[narrow][1]):
            raise NotTaken(
                "a result that is of a part of the rows that were reduced",
                block=result.name,
                value=extent,
                limit=at[narrow][1],
                remedy=LEAVE,
            )
    extents = [*shape, *lengths]
    if not numbered and len(own) == len(extents) and all(map(analyzer.can_prove_equal, own, extents)):
        indices = [*place, *v.digits(form.column, lengths)]
        numbered = dict(zip([i.var for i in left], indices))
        columns: ir.Expr | None = form.columns
    elif len(numbered) == len(shape) and not left:
        columns = None
    elif len(numbered) == len(shape) and analyzer.can_prove_equal(v.product(own), form.columns):
        numbered.update(zip([i.var for i in left], v.digits(form.column, own)))
        columns = form.columns
    elif analyzer.can_prove_equal(v.product(every := _extents(form, result)), form.rows * form.columns):
        flat = form.row * form.columns + form.column  # a reshape, say: rows in the order in which they lie in memory
        numbered = dict(zip([i.var for i in result.spatial], v.digits(flat, every)))
        columns = form.columns
    else:
        raise NotTaken("a result that is not of the rows that were reduced", block=result.name, remedy=LEAVE)
    indices = [numbered[index] if isinstance(index, tirx.Var) else ZERO for index in result.indices]
    value = form.lanes.simplified(form.expressions.value(result.value, numbered))
    return _Phase(None, [value], [(result.buffer, indices)], columns)


def _extents(form: _Form, computation: Computation) -> list[ir.Expr]:
    """Return the extents of what a computation makes."""
    return [form.expressions.extent(iterator.dom.extent) for iterator in computation.spatial]


def _check_results(form: _Form, phase: _Phase, reductions: Sequence[Reduction]) -> None:
    """Raise NotTaken where a pass reads the result of a row that is not its own."""
    results = {c.buffer: c for reduction in reductions for c in reduction.computations}
    for load in [load for value in phase.values for load in loads_in(value) if load.source in results]:
        own = _place(form, results[load.source])
        if not all(map(form.lanes.analyzer.can_prove_equal, load.indices, own)):
            raise NotTaken("results of other rows are read", block=results[load.source].name, remedy=LEAVE)


def _plan_registers(form: _Form, source: v.Source, kept: Sequence[tirx.Var]) -> None:
    """Note what each pass loads, and where what is kept is computed: by the first pass that reads it."""
    made: list[tirx.Var] = []
    for phase in form.phases:
        expressions = list(phase.values)
        for computation in reversed(source.computations):
            loads = [load for e in expressions for load in loads_in(e) if load.source.same_as(computation.buffer)]
            if computation.buffer in kept and computation.buffer not in made and loads:
                at = index_of(computation, loads[0].indices)
                value = form.lanes.simplified(form.expressions.value(computation.value, at))
                phase.computes.insert(0, (computation.buffer, value))
                made.append(computation.buffer)
                expressions.append(value)
        if phase.columns is not None:
            parameters = form.lanes.accesses(expressions)
            phase.accesses = [access for access in parameters if form.expressions.is_parameter(access.load.source)]


def _kernels(form: _Form, make: Callable[[Sequence[tirx.Var]], _Form]) -> tirx.Stmt:
    """Choose threads and registers by the lengths of rows, and make a kernel, or one for each range of lengths."""
    held = _with_kept_values(form, make)
    if form.across:
        kernel = _across_kernel(form, held)
    elif is_constant(form.columns):
        kernel = _row_kernel(form, held)
    else:
        kernel = _Kernel(form, STREAM_THREADS, STREAMED).statement()
        each = max(1, 2 * ELEMENTS // form.lanes.lanes)
        while each > 1 and _kept_bytes(held, each) > KEPT_BYTES[512]:
            each //= 2
        for threads in RANGES_OF_THREADS:
            short = _Kernel(held, threads, each).statement()
            kernel = tirx.IfThenElse(form.columns <= threads * each * form.lanes.lanes, short, kernel)
    return kernel if is_constant(form.rows) else tirx.IfThenElse(form.rows > 0, kernel, None)


def _row_kernel(form: _Form, held: _Form) -> tirx.Stmt:
    lanes, columns = form.lanes.lanes, int(form.columns)
    most = min(MOST_THREADS, _power_of_two(-(-columns // lanes)))
    rows = int(form.rows) if is_constant(form.rows) else None
    threads = min(most, _power_of_two(-(-columns // (ELEMENTS if rows is None else 2 * ELEMENTS))))
    while rows is not None and rows * threads < FEW_THREADS and threads < most:
        threads *= 2
    while threads <= most:
        each = -(-columns // (lanes * threads))
        if _kept_bytes(held, each) <= KEPT_BYTES[512 if threads <= 512 else 1024]:
            return _Kernel(held, threads, each).statement()
        threads *= 2
    streams = MOST_THREADS if rows is None or rows < 2 * MANY_BLOCKS else STREAM_THREADS
    return _Kernel(form, min(most, streams), STREAMED).statement()


def _across_kernel(form: _Form, held: _Form) -> tirx.Stmt:
    """Let few threads share a row, none where there are rows enough: their sums go through shared memory."""
    threads = 8
    if is_constant(form.columns):
        columns = int(form.columns)
        rows = int(form.rows) // form.lanes.lanes if is_constant(form.rows) else FEW_THREADS // threads
        most = min(STREAM_THREADS // _width(form), _power_of_two(-(-columns // 2)))
        threads = 1
        while threads < most and (rows * threads < FEW_THREADS or columns > threads * LONGEST_ALONE):
            threads *= 2
        each = -(-columns // threads)
        if _kept_bytes(held, each) <= KEPT_BYTES[512]:
            return _Kernel(held, threads, each).statement()
    return _Kernel(form, threads, STREAMED).statement()


def _width(form: _Form) -> int:
    """Return how many threads stand along the rows: a warp, or as many as there are vectors of rows."""
    return min(WARP, _power_of_two(int(form.rows) // form.lanes.lanes)) if is_constant(form.rows) else WARP


def _with_kept_values(form: _Form, make: Callable[[Sequence[tirx.Var]], _Form]) -> _Form:
    """Keep in registers what several passes compute and what costs more than to keep it: exp, divisions."""
    kept: list[tirx.Var] = []
    for computation in reversed(form.expressions.computations):
        size = v.product(_extents(form, computation))
        is_whole = form.lanes.analyzer.can_prove_equal(size, form.rows * form.columns)
        if v.is_reduction(computation) or not is_whole or not _is_costly(computation.value):
            continue
        try:
            trial = make([*kept, computation.buffer])
        except NotTaken:  # what is stored is of these rows only as far as what would be kept is
            continue
        loads: list[ir.TensorLoad] = []
        passes, once = 0, False  # by how many it is read, and if by one that goes over no columns
        for phase in trial.phases:
            read = [*phase.values, *(value for _, value in phase.computes)]
            here = [load for value in read for load in loads_in(value) if load.source.same_as(computation.buffer)]
            loads += here
            passes += bool(here)
            once = once or (bool(here) and phase.columns is None)
        same = all(tvm_ffi.structural_equal(load, loads[0]) for load in loads)
        if passes > 1 and not once and same and all(trial.lanes.varies(index) for index in loads[0].indices[-1:]):
            kept.append(computation.buffer)
            form = trial
    return form


def _is_costly(value: ir.Expr) -> bool:
    found: list[ir.Expr] = []
    tvm_ffi.structural_walk(value, ((ir.Call, tirx.Div), found.append))
    return any(not isinstance(node, ir.Call) or node.op.name != v.IF for node in found)


def _kept_bytes(form: _Form, each: int) -> int:
    """Return the bytes of registers that hold all that a thread loads and keeps, with ``each`` vectors of it."""
    loads: list[v.VectorAccess] = []
    for phase in form.phases:
        new = [a for a in phase.accesses if not any(tvm_ffi.structural_equal(a.load, b.load) for b in loads)]
        loads += new
    dtypes = [access.load.source.dtype for access in loads]
    dtypes += [buffer.dtype for phase in form.phases for buffer, _ in phase.computes]
    return sum(dtype_bytes(str(dtype)) for dtype in dtypes) * each * form.lanes.lanes


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


_Store = tuple[tirx.Var, list[ir.Expr], tirx.Var]  # a buffer, the indices of a lane, the registers that are stored
_Part = tuple[list[tirx.Var], Callable[[v.Read, ir.Expr, ir.Expr], tirx.Stmt], list[_Store]]
_Work = Callable[[int], _Part]


class _Kernel:
    """One kernel of a form: ``threads`` to a row, each of which holds ``each`` vectors of it, or streams it.

    A block is of one row, of several short ones, or, across, of a warp's vectors of rows.
    """

    def __init__(self, form: _Form, threads: int, each: int) -> None:
        self.form, self.threads, self.each = form, threads, each
        self.rows = BLOCK_THREADS // threads if threads <= WARP else 1
        if form.across:
            self.rows = max(_width(form), BLOCK_THREADS // threads)
        self.lanes = form.lanes
        self.row_count = v.divided(form.rows, self.lanes.lanes) if form.across else form.rows
        self.length = form.columns if form.across else v.divided(form.columns, self.lanes.lanes)
        self.sums = self.lanes.lanes if form.across else 1  # that a thread adds up side by side
        self.totals: dict[tirx.Var, tirx.Var] = {}
        self.held: list[v.VectorAccess] = []
        self.has_passed = False

    def statement(self) -> tirx.Stmt:
        """Return the kernel."""
        blocks = v.ceil_div(self.row_count, self.rows)
        along, beside = ("threadIdx.y", "threadIdx.x") if self.form.across else ("threadIdx.x", "threadIdx.y")

        def of_block(block: ir.Expr) -> tirx.Stmt:
            def of_row(row: ir.Expr) -> tirx.Stmt:
                return v.threads(along, self.threads, lambda thread: self._thread(block * self.rows + row, row, thread))

            return v.threads(beside, self.rows, of_row) if self.rows > 1 else of_row(ZERO)

        return v.threads("blockIdx.x", blocks, of_block)

    def _thread(self, row: ir.Expr, row_of_block: ir.Expr, thread: ir.Expr) -> tirx.Stmt:
        self.thread, self.row_of_block = thread, row_of_block
        exact = v.is_multiple(self.row_count, self.rows)
        self.row = row if exact else tirx.Min(row, self.row_count - 1)
        self.is_row = None if exact else row < self.row_count
        self.totals, self.held, self.has_passed = {}, [], False
        statements: list[tirx.Stmt] = []
        if self.each != STREAMED:
            for phase in self.form.phases:
                statements += self._hold(phase)
        for phase in self.form.phases:
            statements += self._reduced(phase, phase.reduction) if phase.reduction else self._stored(phase)
        return v.sequence(statements)

    def _hold(self, phase: _Phase) -> list[tirx.Stmt]:
        """Load what a pass reads to registers, and make room for what it computes."""
        new = [
            dataclasses.replace(access)
            for access in phase.accesses
            if not any(tvm_ffi.structural_equal(access.load, held.load) for held in self.held)
        ]
        allocations, loads = self._take(ZERO, self.each, self._is_in_row(self.each)).fill(new)
        self.held += new
        return [*allocations, *loads]

    def _take(
        self, first: ir.Expr, count: int, holds: Callable[[ir.Expr], ir.Expr | None] = lambda number: None
    ) -> v.Take:
        form = self.form

        def place(number: ir.Expr) -> v.Values:
            index = (first + number) * self.threads + self.thread
            row, along = (form.lanes.vector, form.other) if form.across else (form.other, form.lanes.vector)
            return {row: self.row, along: index}

        return v.Take(self.lanes, count, place, holds)

    def _is_in_row(self, count: int) -> Callable[[ir.Expr], ir.Expr | None]:
        if is_constant(self.length) and int(self.length) == count * self.threads:
            return lambda number: None
        return lambda number: number * self.threads + self.thread < self.length

    def _pass(self, phase: _Phase, work: _Work) -> list[tirx.Stmt]:
        """Go over the row once: what is held, or all of it by and by, several vectors of a thread at a time.

        ``work(count)`` are the registers, the statement of a lane and the stores of a thread's ``count`` vectors.
        """
        if self.each != STREAMED:
            room, lane, stores = work(self.each)
            take = self._take(ZERO, self.each, self._is_in_row(self.each))
            return [*map(tirx.AllocBuffer, room), take.compute(self.held, lane, stores)]

        def several(first: ir.Expr, count: int) -> tirx.Stmt:
            take = self._take(first, count)
            accesses = [dataclasses.replace(access) for access in phase.accesses]
            allocations, loads = take.fill(accesses)
            room, lane, stores = work(count)
            return v.sequence(
                [*allocations, *map(tirx.AllocBuffer, room), *loads, take.compute(accesses, lane, stores)]
            )

        whole = v.divided(self.length, self.threads * STREAM_VECTORS)

        def one(number: ir.Expr) -> tirx.Stmt:
            index = whole * STREAM_VECTORS + number
            return v.where([index * self.threads + self.thread < self.length], several(index, 1))

        statements = [v.loop("tile", whole, lambda tile: several(tile * STREAM_VECTORS, STREAM_VECTORS))]
        if not v.is_multiple(self.length, self.threads * STREAM_VECTORS):
            statements.append(v.loop("rest", STREAM_VECTORS, one))
        return statements

    def _with_totals(self, expression: ir.Expr) -> ir.Expr:
        """Return an expression with results of reductions read from registers."""
        at = self.lanes.lane if self.form.across else ZERO

        def total(load: ir.TensorLoad) -> ir.TensorLoad:
            return tirx.BufferLoad(self.totals[load.source], [at]) if load.source in self.totals else load

        return tvm_ffi.structural_map(expression, (ir.TensorLoad, total))

    def _computed(self, phase: _Phase) -> tuple[list[tirx.Stmt], Callable[[v.Read, ir.Expr], list[tirx.Stmt]]]:
        """Make registers for what a pass keeps; returns the allocations, and what fills them lane by lane."""
        made = []
        for buffer, value in phase.computes:
            load = _load_of(self.form, buffer)
            local = v.registers(f"{buffer.name}_local", self.each * self.lanes.lanes, str(buffer.dtype))
            made.append((v.VectorAccess(load, 1, None, local), self._with_totals(value)))
        self.held += [access for access, _ in made]

        def fill(read: v.Read, slot: ir.Expr) -> list[tirx.Stmt]:
            return [tirx.BufferStore(access.local, read(value), [slot]) for access, value in made]

        return [tirx.AllocBuffer(access.local) for access, _ in made], fill

    def _reduced(self, phase: _Phase, reduction: Reduction) -> list[tirx.Stmt]:
        sums = [v.registers(f"{b.name}_sum", self.sums, d) for b, d in zip(reduction.buffers, reduction.dtypes)]
        others = [v.registers(f"{b.name}_other", self.sums, d) for b, d in zip(reduction.buffers, reduction.dtypes)]
        statements: list[tirx.Stmt] = [tirx.AllocBuffer(buffer) for buffer in (*sums, *others)]

        def begin(at: ir.Expr) -> tirx.Stmt:
            return v.sequence([tirx.BufferStore(s, b, [at]) for s, b in zip(sums, reduction.begins)])

        statements.append(v.unrolled("lane", self.sums, begin))
        allocations, fill = self._computed(phase)
        terms = [self._with_totals(value) for value in phase.values]

        def lane(read: v.Read, slot: ir.Expr, place: ir.Expr) -> tirx.Stmt:
            at = place if self.form.across else ZERO
            return v.sequence(
                [*fill(read, slot), *_combined(reduction, sums, others, at, [read(term) for term in terms])]
            )

        statements += [*allocations, *self._pass(phase, lambda _count: ([], lane, []))]
        statements += self._over_threads(reduction, sums, others)
        totals = [v.registers(f"{b.name}_total", self.sums, str(b.dtype)) for b in reduction.buffers]
        self.totals.update(zip(reduction.buffers, totals))

        def finish(at: ir.Expr) -> tirx.Stmt:
            whole = [tirx.BufferLoad(s, [at]) for s in sums]
            started = [whole[n] if start is None else start for n, start in enumerate(reduction.starts)]
            both = reduction.combine(started, whole)
            ends = [one if start is None else two for one, two, start in zip(whole, both, reduction.starts)]
            return v.sequence([tirx.BufferStore(t, cast(end, str(t.dtype)), [at]) for t, end in zip(totals, ends)])

        statements += [*map(tirx.AllocBuffer, totals), v.unrolled("lane", self.sums, finish)]
        stored = [c for c in reduction.computations if self.form.expressions.is_parameter(c.buffer)]
        return [*statements, *(self._store_total(c, self.totals[c.buffer]) for c in stored)]

    def _store_total(self, computation: Computation, total: tirx.Var) -> tirx.Stmt:
        first = _place(self.form, computation)
        take = self._take(ZERO, 1)
        if self.form.across:
            stored = take.compute((), None, [(computation.buffer, first, total)])
        else:
            indices = [take.at(index, ZERO, ZERO) for index in first]
            stored = tirx.BufferStore(computation.buffer, tirx.BufferLoad(total, [ZERO]), indices)
        return v.where([tirx.EQ(self.thread, 0), self.is_row], stored)

    def _stored(self, phase: _Phase) -> list[tirx.Stmt]:
        allocations, fill = self._computed(phase)
        value = self._with_totals(phase.values[0])
        buffer, indices = phase.stores[0]
        if phase.columns is None and not self.form.across:
            take = self._take(ZERO, 1)
            at = [take.at(index, ZERO, ZERO) for index in indices]
            stored = tirx.BufferStore(buffer, take.at(value, ZERO, ZERO), at)
            return [v.where([tirx.EQ(self.thread, 0), self.is_row], stored)]

        def work(count: int) -> _Part:
            local = v.registers(f"{buffer.name}_local", count * self.lanes.lanes, str(buffer.dtype))

            def lane(read: v.Read, slot: ir.Expr, _place: ir.Expr) -> tirx.Stmt:
                return v.sequence([*fill(read, slot), tirx.BufferStore(local, read(value), [slot])])

            return [local], lane, [(buffer, indices, local)]

        if phase.columns is None:
            (local,), lane, stores = work(1)
            stored = self._take(ZERO, 1).compute((), lane, stores)
            return [tirx.AllocBuffer(local), v.where([tirx.EQ(self.thread, 0), self.is_row], stored)]
        return [*allocations, v.where([self.is_row], v.sequence(self._pass(phase, work)))]

    def _over_threads(
        self, reduction: Reduction, sums: Sequence[tirx.Var], others: Sequence[tirx.Var]
    ) -> list[tirx.Stmt]:
        """Put the partial results of a row's threads together, so that each thread has all of it."""
        if self.threads == 1:
            return []
        if self.form.across:
            return self._over_columns(reduction, sums, others)
        statements = _by_shuffles(reduction, sums, others, min(self.threads, WARP))
        warps = self.threads // WARP
        if warps > 1:
            warp, lane = (kind(self.thread, tirx.const(WARP, "int32")) for kind in (tirx.FloorDiv, tirx.FloorMod))
            part = tirx.FloorMod(self.thread, tirx.const(warps, "int32"))
            passed, statements = self._room(sums, warps), list(statements)
            put = [tirx.BufferStore(p, tirx.BufferLoad(s, [ZERO]), [warp]) for p, s in zip(passed, sums)]
            get = [tirx.BufferStore(s, tirx.BufferLoad(p, [part]), [ZERO]) for p, s in zip(passed, sums)]
            statements += self._passed_on(passed, [v.where([tirx.EQ(lane, 0)], v.sequence(put))], get)
            statements += _by_shuffles(reduction, sums, others, warps)
        return statements

    def _over_columns(
        self, reduction: Reduction, sums: Sequence[tirx.Var], others: Sequence[tirx.Var]
    ) -> list[tirx.Stmt]:
        width = self.rows * self.sums
        passed = self._room(sums, self.threads * width)

        def put(lane: ir.Expr) -> tirx.Stmt:
            place = self.thread * width + self.row_of_block * self.sums + lane
            return v.sequence([tirx.BufferStore(p, tirx.BufferLoad(s, [lane]), [place]) for p, s in zip(passed, sums)])

        def get(lane: ir.Expr) -> tirx.Stmt:
            own = self.row_of_block * self.sums + lane
            first = [tirx.BufferStore(s, tirx.BufferLoad(p, [own]), [lane]) for p, s in zip(passed, sums)]

            def add(number: ir.Expr) -> tirx.Stmt:
                parts = [tirx.BufferLoad(p, [(number + 1) * width + own]) for p in passed]
                return v.sequence(_combined(reduction, sums, others, lane, parts))

            return v.sequence([*first, v.unrolled("part", self.threads - 1, add)])

        stores, loads = ([v.unrolled("lane", self.sums, one)] for one in (put, get))
        return self._passed_on(passed, stores, loads)

    def _room(self, sums: Sequence[tirx.Var], count: int) -> list[tirx.Var]:
        """Return shared memory for ``count`` partial results of each sum."""
        return [tirx.decl_buffer((count,), str(s.dtype), f"{s.name}_shared", scope="shared") for s in sums]

    def _passed_on(
        self, passed: Sequence[tirx.Var], stores: Sequence[tirx.Stmt], loads: Sequence[tirx.Stmt]
    ) -> list[tirx.Stmt]:
        """Store to shared memory and load from it, with barriers: one more where it may lie where the last one lay."""
        before = [v.barrier()] if self.has_passed else []
        self.has_passed = True
        return [*map(tirx.AllocBuffer, passed), *before, *stores, v.barrier(), *loads]


def _combined(
    reduction: Reduction, sums: Sequence[tirx.Var], others: Sequence[tirx.Var], at: ir.Expr, right: Sequence[ir.Expr]
) -> list[tirx.Stmt]:
    """Add one element or partial result to the sums at ``at``; all of it is read before any is written."""
    made = reduction.combine([tirx.BufferLoad(buffer, [at]) for buffer in sums], right)
    if len(sums) == 1:
        return [tirx.BufferStore(sums[0], made[0], [at])]
    kept = [tirx.BufferStore(buffer, value, [at]) for buffer, value in zip(others, made)]
    return [*kept, *(tirx.BufferStore(s, tirx.BufferLoad(o, [at]), [at]) for s, o in zip(sums, others))]


def _by_shuffles(
    reduction: Reduction, sums: Sequence[tirx.Var], others: Sequence[tirx.Var], threads: int
) -> list[tirx.Stmt]:
    """Put the partial results of so many neighbouring threads together, in each of them."""
    statements: list[tirx.Stmt] = []
    distance = threads // 2
    while distance:
        every = tirx.const(0xFFFFFFFF, "uint32")
        received = [
            tirx.BufferStore(
                o, tirx.op.tvm_warp_shuffle_xor(every, tirx.BufferLoad(s, [ZERO]), distance, WARP, WARP), [ZERO]
            )
            for s, o in zip(sums, others)
        ]
        values = reduction.combine(
            [tirx.BufferLoad(s, [ZERO]) for s in sums], [tirx.BufferLoad(o, [ZERO]) for o in others]
        )
        statements += received
        if len(sums) > 1:
            # The last one is changed last: a place is compared by its element.
            temporary = [v.registers(f"{s.name}_new", 1, str(s.dtype)) for s in sums]
            statements += [tirx.AllocBuffer(t) for t in temporary]
            statements += [tirx.BufferStore(t, value, [ZERO]) for t, value in zip(temporary, values)]
            values = [tirx.BufferLoad(t, [ZERO]) for t in temporary]
        statements += [tirx.BufferStore(s, value, [ZERO]) for s, value in zip(sums, values)]
        distance //= 2
    return statements


def _load_of(form: _Form, buffer: tirx.Var) -> ir.TensorLoad:
    """Return how passes read what is kept in registers; all of them read it alike."""
    values = [e for phase in form.phases for e in (*phase.values, *(value for _, value in phase.computes))]
    return next(load for value in values for load in loads_in(value) if load.source.same_as(buffer))


def _place(form: _Form, computation: Computation) -> list[ir.Expr]:
    """Return where a row's result is stored."""
    at = dict(zip([i.var for i in computation.spatial], v.digits(form.row, _extents(form, computation))))
    return [at[index] if isinstance(index, tirx.Var) else ZERO for index in computation.indices]
