"""A rule for functions that compute each element by itself: arithmetic, casts, gathers, reshapes, concatenations."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import tvm_ffi
from tvm import ir, te, tirx
from tvm.target import Target

from tensorir_ladder.relax.rules import vectors as v
from tensorir_ladder.relax.rules.computations import LEAVE, Computation, loads_in
from tensorir_ladder.relax.rules.rule import HOW, NotTaken, Rule
from tensorir_ladder.relax.rules.transposes import transposing_kernel
from tensorir_ladder.schedules.inspection import is_constant, is_zero
from tensorir_ladder.schedules.isa import VECTOR_BYTES
from tensorir_ladder.schedules.loops.vectorization import dtype_bytes

THREADS = 256
MANY_VECTORS = 2**18  # from so many on, each thread takes several


class Elementwise(Rule):
    """Schedules functions all of whose blocks compute each element by itself, in one kernel for each shape of output.

    ::

        before   for i, j:  t[i, j] = x[i, j] * w[j];   for i, j:  y[i, j] = f(t[i, j])
        after    for vector, over all threads:                     # along y as it lies in memory
                   x_local = x[vector];  w_local = w[...]          # 16 bytes each, of what is narrowest
                   y_local = f(x_local * w_local), lane by lane;   y[vector] = y_local

    Whatever is computed on the way is computed where it is used. Loads that are not consecutive are single. Symbolic
    extents are extents of one more body where they are multiples of a vector. Outputs without elements have no kernel.
    """

    name = "elementwise"
    numbers_elements = True

    def schedule(self, func: tirx.PrimFunc, target: Target) -> tirx.PrimFunc:
        """Return the function with kernels of its own; NotTaken for one with reductions."""
        source = v.read_source(func, self.numbers_elements)
        reducing = [c.name for c in source.computations if v.is_reduction(c)]
        if reducing or not source.outputs:
            raise NotTaken("a function that does not only compute elementwise", value=reducing, remedy=LEAVE)
        some = tuple(output for output in source.outputs if not any(map(is_zero, output.buffer.shape)))
        if not some:
            return func.with_body(tirx.Evaluate(0)).with_attr(HOW, "no kernels: there is nothing to compute")
        source = dataclasses.replace(source, outputs=some)
        return source.with_body(v.for_whole_vectors(source, lambda extents: elementwise_kernels(source, extents)))


def kernels_of(tensors: Sequence[te.Tensor], buffers: Sequence[tirx.Var], target: Target) -> tirx.Stmt:
    """Write kernels that compute tensors, elementwise, on the buffers that stand for them, one for each."""
    made = Elementwise().schedule(te.create_prim_func([*tensors]), target)
    taken = dict(zip(made.params, buffers, strict=True))
    return tvm_ffi.structural_map(made.body, (tirx.Var, lambda var: taken.get(var, var)))


def elementwise_kernels(source: v.Source, extents: v.Values) -> tuple[tirx.Stmt, bool]:
    """Return one kernel for each shape of output; and whether all its accesses are in vectors."""
    expressions = v.Expressions(source, extents)
    alike: list[list[Computation]] = []
    for output in source.outputs:
        shape = expressions.shape(output.buffer)
        for group in alike:
            if tvm_ffi.structural_equal(expressions.shape(group[0].buffer), shape):
                group.append(output)
                break
        else:
            alike.append([output])
    kernels, whole = [], True
    for group in alike:
        made = transposing_kernel(expressions, group[0]) if len(group) == 1 else None
        if made is None:
            view = _best_view(expressions, group)
            made = _kernel(view), min(view.widths) > 1
        kernels.append(made[0])
        whole &= made[1]
    return v.sequence(kernels), whole


@dataclass
class _View:
    """Outputs of one shape, in vectors: what is stored, and what each lane reads."""

    lanes: v.Lanes
    total: ir.Expr
    outputs: tuple[tuple[tirx.Var, list[ir.Expr], ir.Expr], ...]  # buffer, indices, value
    accesses: list[v.VectorAccess]
    stored: int  # elements of the widest stores

    @property
    def widths(self) -> list[int]:
        """Elements of each load and store."""
        return [*(access.width for access in self.accesses), *([self.stored] * len(self.outputs))]

    @property
    def cost(self) -> float:
        """Loads and stores for an element."""
        return sum(1 / width for width in self.widths)

    @property
    def divisions(self) -> int:
        """Count the divisions that addresses take."""
        found: list[ir.Expr] = []
        for access in self.accesses:
            for index in access.load.indices:
                tvm_ffi.structural_walk(index, ((tirx.FloorDiv, tirx.FloorMod), found.append))
        return len(found)


def _best_view(expressions: v.Expressions, outputs: Sequence[Computation]) -> _View:
    """Return the view with the fewest loads and stores an element, then with the fewest divisions."""
    read = [load.source for c in expressions.computations for load in loads_in(c.value) if load.source.shape]
    bytes_of = [dtype_bytes(str(b.dtype)) for b in (*read, *(o.buffer for o in outputs)) if str(b.dtype) != "bool"]
    lanes, views = min(v.MOST_LANES, VECTOR_BYTES // min(bytes_of, default=1)), []
    while lanes >= 1:
        views += [_view(expressions, outputs, lanes, flat) for flat in (True, False)]
        lanes //= 2
    return min((view for view in views if view), key=lambda view: (view.cost, view.divisions, view.lanes.lanes))


def _view(expressions: v.Expressions, outputs: Sequence[Computation], lanes: int, flat: bool) -> _View | None:
    """Number the elements in memory's order, in one piece (``flat``) or with vectors of the last dimension's own."""
    shape = expressions.shape(outputs[0].buffer)
    taken = v.Lanes(lanes, expressions)
    total = v.product(shape)
    if flat:
        taken.bind(taken.vector, v.ceil_div(total, lanes))
        indices = v.digits(taken.vector * lanes + taken.lane, shape)
    else:
        last = shape[-1] if shape else tirx.const(1, "int32")
        if len(shape) < 2 or not v.is_multiple(last, lanes):
            return None
        vectors = v.divided(last, lanes)
        taken.bind(taken.vector, v.product([*shape[:-1], vectors]))
        *outer, inner = v.digits(taken.vector, [*shape[:-1], vectors])
        indices = [*outer, inner * lanes + taken.lane]
    stored = []
    for output in outputs:
        at = {own: index for own, index in zip(output.indices, indices) if isinstance(own, tirx.Var)}
        stored.append((output.buffer, indices, taken.simplified(expressions.value(output.value, at))))
    accesses = taken.accesses(value for _, _, value in stored)
    width = min(taken.width(buffer, at) for buffer, at, _ in stored)
    return _View(taken, total, tuple(stored), accesses, width)


def _kernel(view: _View) -> tirx.Stmt:
    lanes = view.lanes.lanes
    vectors = v.divided(view.total, lanes)
    ragged = not v.is_multiple(view.total, lanes)
    each = _vectors_of_a_thread(vectors, len(view.accesses))
    blocks = v.ceil_div(vectors + (1 if ragged else 0), THREADS * each)

    def thread(block: ir.Expr, lane: ir.Expr) -> tirx.Stmt:
        first = block * (THREADS * each) + lane
        statement = _vectors(view, first, each)
        if ragged or not v.is_multiple(vectors, THREADS * each):
            statement = _as_many_as_there_are(view, statement, first, each, vectors)
        if ragged:
            statement = v.sequence([statement, _last_elements(view, first, each, vectors)])
        return statement

    def of_block(block: ir.Expr) -> tirx.Stmt:
        return v.threads("threadIdx.x", THREADS, lambda lane: thread(block, lane))

    kernel = v.threads("blockIdx.x", blocks, of_block)
    return kernel if is_constant(view.total) else tirx.IfThenElse(view.total > 0, kernel, None)


def _vectors(view: _View, first: ir.Expr, each: int) -> tirx.Stmt:
    """Compute ``each`` vectors from ``first`` on, all of which are there: all loads come first."""
    take = v.Take(view.lanes, each, lambda number: {view.lanes.vector: first + number * THREADS})
    accesses = [dataclasses.replace(access) for access in view.accesses]
    allocations, loads = take.fill(accesses)
    results = [v.registers(f"{b.name}_local", each * view.lanes.lanes, str(b.dtype)) for b, _, _ in view.outputs]

    def lane(read: v.Read, slot: ir.Expr, _place: ir.Expr) -> tirx.Stmt:
        stores = [tirx.BufferStore(to, read(value), [slot]) for to, (_, _, value) in zip(results, view.outputs)]
        return v.sequence(stores)

    stores = [(buffer, indices, local) for (buffer, indices, _), local in zip(view.outputs, results)]
    return v.sequence([*allocations, *map(tirx.AllocBuffer, results), *loads, take.compute(accesses, lane, stores)])


def _as_many_as_there_are(view: _View, whole: tirx.Stmt, first: ir.Expr, each: int, vectors: ir.Expr) -> tirx.Stmt:
    """Run ``whole`` where all of a thread's vectors are there, else one vector after the other."""

    def one(number: ir.Expr) -> tirx.Stmt:
        vector = first + number * THREADS
        return tirx.IfThenElse(vector < vectors, _vectors(view, vector, 1), None)

    last = first + (each - 1) * THREADS
    return tirx.IfThenElse(last < vectors, whole, v.loop("number", each - 1, one) if each > 1 else None)


def _last_elements(view: _View, first: ir.Expr, each: int, vectors: ir.Expr) -> tirx.Stmt:
    """Let one thread compute what is left beyond the last whole vector."""
    lanes = view.lanes

    def element(lane: ir.Expr) -> tirx.Stmt:
        values = {lanes.vector: vectors, lanes.lane: lane}
        return v.sequence(
            [
                tirx.BufferStore(buffer, lanes.at(value, values), [lanes.at(index, values) for index in indices])
                for buffer, indices, value in view.outputs
            ]
        )

    left = v.loop("left", tirx.FloorMod(view.total, tirx.const(lanes.lanes, "int32")), element)
    own = [first + number * THREADS == vectors for number in range(each)]
    condition = own[0]
    for other in own[1:]:
        condition = tirx.Or(condition, other)
    return tirx.IfThenElse(condition, left, None)


def _vectors_of_a_thread(vectors: ir.Expr, loads: int) -> int:
    """Return how many vectors a thread takes: as many bytes on their way as keep memory busy, but blocks for all."""
    if is_constant(vectors) and int(vectors) < MANY_VECTORS:
        return 1
    return 4 if loads <= 1 and is_constant(vectors) else 2
