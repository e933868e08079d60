"""What kernels bound by memory are made of: expressions in 32-bit indices, and vectors that threads load and store.

A rule that writes a function's loops anew puts them together here. Each of its expressions is one of a position:
``row``, and ``vector`` and ``lane`` along the elements that neighbouring threads take, ``lanes`` of them at a time. All
that is read at a position is loaded to registers first, in vectors of up to 16 bytes where elements are proven to be
consecutive and aligned; then each lane is computed by itself, and what was computed is stored in such vectors again.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import tvm_ffi
from tvm import ir, sym, tirx
from tvm.sym.analyzer import ProofStrength

from tensorir_ladder.relax.rules.computations import (
    ARITHMETIC,
    COMPARISONS,
    LEAVE,
    MOST_NODES,
    Computation,
    check_arithmetic,
    computations_of,
    index_of,
    loads_in,
    replaced,
    simplified,
)
from tensorir_ladder.relax.rules.limits import limit_of
from tensorir_ladder.relax.rules.rule import HOW, NotTaken
from tensorir_ladder.schedules.inspection import is_constant
from tensorir_ladder.schedules.isa import VECTOR_BYTES
from tensorir_ladder.schedules.loops.vectorization import dtype_bytes

MOST_ELEMENTS = 2**31 - 1
MOST_LANES = 16
WHOLE = 8  # elements of which an extent must be a multiple for vectors that are proven aligned
IF = "prim.if_then_else"
LOGIC = (tirx.And, tirx.Or)

Values = Mapping[tirx.Var, ir.Expr]
Read = Callable[[ir.Expr], ir.Expr]  # an expression as one lane computes it, from registers


@dataclass(frozen=True)
class Source:
    """A function as it is read: its equations, in order, its results, and its symbolic extents in 32 bits.

    ``extents`` has what stands for each symbolic extent; ``prologue`` are the host's statements that make it so.
    ``workspaces`` are in global memory, too, and live from one kernel to another.
    """

    function: tirx.PrimFunc
    computations: tuple[Computation, ...]
    outputs: tuple[Computation, ...]
    extents: dict[tirx.Var, ir.Expr]
    prologue: tuple[tirx.Stmt, ...]
    workspaces: tuple[tirx.Var, ...] = ()

    def with_body(self, body: tirx.Stmt) -> tirx.PrimFunc:
        """Return the function with what the host does before its kernels, and these; what they are is its attribute."""
        sizes: list[int] = []

        def note(loop: tirx.For) -> None:
            if loop.thread_binding is not None:
                tag = str(loop.thread_binding.thread_tag)
                sizes.append(1) if tag.startswith("blockIdx") else sizes.append(sizes.pop() * int(loop.extent))

        tvm_ffi.structural_walk(body, (tirx.For, note), order="pre")
        made = f"{len(sizes)} kernel{'s' * (len(sizes) > 1)} of {', '.join(map(str, sizes))} threads"
        return self.function.with_body(sequence([*self.prologue, body])).with_attr(HOW, made)

    def buffers(self) -> list[tirx.Var]:
        """Return the buffers in global memory: parameters and workspaces."""
        parameters = [parameter for parameter in self.function.params if hasattr(parameter.ty, "shape")]
        return [*parameters, *self.workspaces]


def read_source(function: tirx.PrimFunc, numbered: bool = True) -> Source:
    """Read a function that is not scheduled yet; ``numbered`` is :func:`relax.rules.limits.limit_of`'s.

    Raises
    ------
    NotTaken : as :func:`relax.rules.computations.computations_of`, and for a buffer with more elements than 32 bits
        can number.
    """
    computations = computations_of(function)
    buffers = [parameter for parameter in function.params if hasattr(parameter.ty, "shape")]
    for buffer in buffers:
        count = math.prod(int(extent) for extent in buffer.shape if is_constant(extent))
        if count > MOST_ELEMENTS:
            raise NotTaken("a buffer is beyond 32-bit indexing", value=count, limit=MOST_ELEMENTS, remedy=LEAVE)
    outputs = tuple(c for c in computations if c.buffer in buffers)
    extents, prologue = _narrow_extents(buffers, numbered)
    return Source(function, tuple(computations), outputs, extents, prologue)


def _narrow_extents(
    buffers: Sequence[tirx.Var], numbered: bool
) -> tuple[dict[tirx.Var, ir.Expr], tuple[tirx.Stmt, ...]]:
    """Return what stands for each symbolic extent in 32 bits, and what binds it, once these suffice."""
    extents: dict[tirx.Var, ir.Expr] = {}
    wide = [buffer for buffer in buffers if any(str(e.ty.dtype) != "int32" and variables_in(e) for e in buffer.shape)]
    bound: list[tirx.Stmt] = [limit_of(buffer, numbered) for buffer in wide]
    for symbol in [symbol for buffer in buffers for extent in buffer.shape for symbol in variables_in(extent)]:
        if symbol not in extents and str(symbol.ty.dtype) != "int32":
            extents[symbol] = tirx.Var(str(symbol.name), "int32")
            bound.append(tirx.Bind(extents[symbol], tirx.Cast("int32", symbol)))
        extents.setdefault(symbol, symbol)
    return extents, tuple(bound)


class Expressions:
    """A function's expressions with 32-bit indices, and what it computes elementwise written out where it is read.

    ``extents`` are the symbolic extents with what stands for them in 32 bits. What is in ``kept`` is read, not written
    out: results of reductions, and what a kernel keeps in registers.
    """

    def __init__(self, source: Source, extents: Values, kept: Sequence[tirx.Var] = ()) -> None:
        self.extents, computations = dict(extents), source.computations
        self.computations, self.parameters, self.workspaces = computations, source.buffers(), source.workspaces
        self._computed = {c.buffer: c for c in computations if not is_reduction(c) and c.buffer not in kept}
        self._nodes = 0

    def is_parameter(self, buffer: tirx.Var) -> bool:
        """Return whether a buffer is the function's parameter, and not memory of its own."""
        return any(buffer.same_as(parameter) for parameter in self.parameters)

    def value(self, expression: ir.Expr, at: Values) -> ir.Expr:
        """Return an expression where the iterators are ``at``; NotTaken where it is too long, or would not wrap."""
        self._nodes = 0
        value = self._value(expression, at)
        check_arithmetic(value)
        return value

    def extent(self, expression: ir.Expr) -> ir.Expr:
        """Return an extent in 32 bits."""
        return sym.Analyzer().simplify(self._index(expression, {}))

    def shape(self, buffer: tirx.Var) -> list[ir.Expr]:
        """Return a buffer's extents in 32 bits."""
        return [self.extent(extent) for extent in buffer.shape]

    def address(self, buffer: tirx.Var, indices: Sequence[ir.Expr]) -> ir.Expr:
        """Return where in its buffer an element is, counted in elements."""
        address: ir.Expr = tirx.const(0, "int32")
        for index, extent in zip(indices, self.shape(buffer)):
            address = address * extent + index
        return address

    def load(self, load: ir.TensorLoad, at: Values) -> ir.Expr:
        """Return what a load reads where the iterators are ``at``: a load, or how it is computed."""
        indices = [self._index(index, at) for index in load.indices]
        if load.source in self._computed:
            computation = self._computed[load.source]
            return self._value(computation.value, index_of(computation, indices))
        return tirx.BufferLoad(load.source, indices)

    def _value(self, expression: ir.Expr, at: Values) -> ir.Expr:
        self._nodes += 1
        if self._nodes > MOST_NODES:
            raise NotTaken(
                "an expression that grows with each block it reads through",
                value=f"more than {MOST_NODES} terms",
                remedy=LEAVE,
            )
        if isinstance(expression, ir.TensorLoad):
            return self.load(expression, at)
        if isinstance(expression, tirx.Var):
            narrow = at.get(expression, self.extents.get(expression))
            return expression if narrow is None else tirx.Cast(str(expression.ty.dtype), narrow)
        if isinstance(expression, (tirx.IntImm, tirx.FloatImm)):
            return expression
        if isinstance(expression, tirx.Cast):
            return tirx.Cast(str(expression.ty.dtype), self._value(expression.value, at))
        if isinstance(expression, COMPARISONS) and all(_is_index(side) for side in (expression.a, expression.b)):
            return type(expression)(self._index(expression.a, at), self._index(expression.b, at))
        if isinstance(expression, (*ARITHMETIC, *COMPARISONS, *LOGIC)):
            return type(expression)(self._value(expression.a, at), self._value(expression.b, at))
        if isinstance(expression, tirx.Not):
            return tirx.Not(self._value(expression.a, at))
        if isinstance(expression, tirx.Select):
            parts = (expression.condition, expression.true_value, expression.false_value)
            return tirx.Select(*(self._value(part, at) for part in parts))
        if isinstance(expression, ir.Call):
            arguments = [self._value(argument, at) for argument in expression.args]
            return ir.Call(expression.op, arguments, expression.attrs, expression.ty_args, ret_ty=expression.ty)
        raise NotTaken("an expression of a kind that is not known here", value=type(expression).__name__, remedy=LEAVE)

    def _index(self, expression: ir.Expr, at: Values) -> ir.Expr:
        if isinstance(expression, tirx.Var):
            narrow = at.get(expression, self.extents.get(expression))
            return tirx.Cast("int32", expression) if narrow is None else narrow
        if isinstance(expression, tirx.IntImm):
            if abs(int(expression)) > MOST_ELEMENTS:
                raise NotTaken("an index beyond 32 bits", value=int(expression), limit=MOST_ELEMENTS, remedy=LEAVE)
            return tirx.const(int(expression), "int32")
        if isinstance(expression, ARITHMETIC) and not _is_unsigned(expression):
            return type(expression)(self._index(expression.a, at), self._index(expression.b, at))
        if isinstance(expression, tirx.Cast) and _is_index(expression.value):
            return self._index(expression.value, at)
        if isinstance(expression, tirx.Select):
            sides = (self._index(side, at) for side in (expression.true_value, expression.false_value))
            return tirx.Select(self._value(expression.condition, at), *sides)
        value = self._value(expression, at)
        return value if str(value.ty.dtype) == "int32" else tirx.Cast("int32", value)


@dataclass
class VectorAccess:
    """Load at each position: ``load`` at (row, vector, lane) into ``local``, ``width`` elements at a time.

    ``guard`` is what must hold for it to be inside its buffer, None where it always is.
    """

    load: ir.TensorLoad
    width: int
    guard: ir.Expr | None
    local: tirx.Var | None = None


@dataclass
class Lanes:
    """The vectors that threads take: their variables, their ``lanes``, and what is known of all of these.

    ``inside`` has indices that are below an extent by what they number, which no analysis of them alone would find.
    """

    lanes: int
    expressions: Expressions
    inside: list[tuple[ir.Expr, ir.Expr]] = field(default_factory=list)
    vector: tirx.Var = field(default_factory=lambda: tirx.Var("vector", "int32"))
    lane: tirx.Var = field(default_factory=lambda: tirx.Var("lane", "int32"))
    analyzer: sym.Analyzer = field(default_factory=sym.Analyzer)

    def __post_init__(self) -> None:
        self.analyzer.bind(self.lane, ir.Range(0, self.lanes))
        for symbol in {symbol for extent in self.expressions.extents.values() for symbol in variables_in(extent)}:
            self.bind(symbol, tirx.const(MOST_ELEMENTS, "int32"))

    def bind(self, var: tirx.Var, extent: ir.Expr | int) -> None:
        """Note that a variable runs from 0 to ``extent``."""
        self.analyzer.bind(var, ir.Range.from_min_extent(tirx.const(0, "int32"), extent))

    def place(self, rows: ir.Expr, columns: ir.Expr, across: bool) -> tuple[ir.Expr, ir.Expr, tirx.Var] | None:
        """Lay vectors along the columns, or ``across`` them along the rows.

        Returns the row and the column of a lane, and the variable of the other axis; None if the lanes do not divide
        the extent that they lie along.
        """
        along = rows if across else columns
        if not is_multiple(along, self.lanes):
            return None
        other = tirx.Var("column" if across else "row", "int32")
        self.bind(other, columns if across else rows)
        self.bind(self.vector, divided(along, self.lanes))
        number = self.vector * self.lanes + self.lane
        return (number, other, other) if across else (other, number, other)

    def simplified(self, expression: ir.Expr) -> ir.Expr:
        """Return an expression with indices and conditions on them simplified, its arithmetic as it was."""

        def branch(call: ir.Call) -> ir.Call:
            if call.op.name != IF:
                return call
            condition, *values = call.args
            return ir.Call(call.op, [self._for_all_lanes(condition), *values], ret_ty=call.ty)

        def select(node: tirx.Select) -> tirx.Select:
            return tirx.Select(self._for_all_lanes(node.condition), node.true_value, node.false_value)

        short = simplified(expression, self.analyzer)
        return tvm_ffi.structural_map(short, [(ir.Call, branch), (tirx.Select, select)])

    def _for_all_lanes(self, condition: ir.Expr) -> ir.Expr:
        """Return a condition simplified, and without the lane where it holds for all lanes or none."""
        if loads_in(condition):
            return condition
        condition = self.analyzer.simplify(condition)
        first = self.analyzer.simplify(replaced(condition, {self.lane: tirx.const(0, "int32")}))
        same = tirx.EQ(condition, first)
        return first if self.analyzer.can_prove(same, ProofStrength.SYMBOLIC_BOUND) else condition

    def at(self, expression: ir.Expr, values: Values) -> ir.Expr:
        """Return an expression at these values of its variables, divided by symbolic extents as CUDA divides.

        TVM would correct each such division for numbers below 0, which indices are not.
        """

        def division(node: tirx.FloorDiv | tirx.FloorMod) -> ir.Expr:
            is_known = isinstance(node.b, tirx.IntImm)
            if is_known or any(self.analyzer.const_int_bound(side).min_value < 0 for side in (node.a, node.b)):
                return node
            return (tirx.Div if isinstance(node, tirx.FloorDiv) else tirx.Mod)(node.a, node.b)

        plain = tvm_ffi.structural_map(expression, ((tirx.FloorDiv, tirx.FloorMod), division))
        return replaced(plain, values)

    def varies(self, expression: ir.Expr) -> bool:
        """Return whether an expression depends on the vector or the lane."""
        return uses(expression, (self.vector, self.lane))

    def accesses(self, expressions: Iterable[ir.Expr]) -> list[VectorAccess]:
        """List what is to be loaded before lanes are computed, each load once; all else is read in its place."""
        found: list[VectorAccess] = []
        for expression in expressions:
            self._collect(expression, [], found)
        return found

    def width(self, buffer: tirx.Var, indices: Sequence[ir.Expr]) -> int:
        """Return the elements of the widest vectors that lanes are consecutive and aligned in; 1 for none."""
        dtype = str(buffer.dtype)
        width = 1 if dtype == "bool" or buffer.scope() not in ("global", "") else VECTOR_BYTES // dtype_bytes(dtype)
        width = math.gcd(width, self.lanes)
        address = self.analyzer.simplify(self.expressions.address(buffer, indices))
        if dtype_bytes(dtype) < 4 and self._has_common_part(address):
            return 1
        while width > 1 and not self._is_consecutive(address, width):
            width //= 2
        return width

    def _has_common_part(self, address: ir.Expr) -> bool:
        """Return whether a part of an address is made of symbolic extents alone, which several addresses share.

        TVM computes it once, forgets what it is a multiple of, and gathers vectors: of 16-bit elements in a way that
        nvcc refuses, of 8-bit ones by more indices than CUDA has in a vector (docs/tvm.md, "Indices with a common
        part").
        """
        symbols = [symbol for extent in self.expressions.extents.values() for symbol in variables_in(extent)]
        parts = [address]
        while parts:
            part = parts.pop()
            if isinstance(part, tirx.Add | tirx.Sub):
                parts += [part.a, part.b]
            elif (found := variables_in(part)) and all(uses(variable, symbols) for variable in found):
                return True
        return False

    def _is_consecutive(self, address: ir.Expr, width: int) -> bool:
        piece, inside, analyzer = tirx.Var("piece", "int32"), tirx.Var("inside", "int32"), self.analyzer
        analyzer.bind(piece, ir.Range(0, self.lanes // width), allow_override=True)
        analyzer.bind(inside, ir.Range(0, width), allow_override=True)
        first = replaced(address, {self.lane: piece * width})
        other = replaced(address, {self.lane: piece * width + inside})
        aligned = analyzer.can_prove_equal(tirx.FloorMod(first, tirx.const(width, "int32")), 0)
        return aligned and analyzer.can_prove_equal(other - first, inside)

    def _collect(self, expression: ir.Expr, guard: list[ir.Expr], found: list[VectorAccess]) -> None:
        if isinstance(expression, ir.TensorLoad):
            self._note(expression, guard, found)
        elif isinstance(expression, ir.Call) and expression.op.name == IF:
            condition, then, otherwise = expression.args
            self._branch(condition, then, otherwise, guard, found)
        elif isinstance(expression, tirx.Select):
            self._branch(expression.condition, expression.true_value, expression.false_value, guard, found)
        elif isinstance(expression, tirx.And):
            self._branch(expression.a, expression.b, None, guard, found)
        elif isinstance(expression, tirx.Or):
            self._branch(expression.a, None, expression.b, guard, found)
        elif isinstance(expression, ir.Call):
            for argument in expression.args:
                self._collect(argument, guard, found)
        elif isinstance(expression, tirx.Cast):
            self._collect(expression.value, guard, found)
        elif isinstance(expression, tirx.Not):
            self._collect(expression.a, guard, found)
        elif hasattr(expression, "a"):
            self._collect(expression.a, guard, found)
            self._collect(expression.b, guard, found)

    def _branch(
        self,
        condition: ir.Expr,
        then: ir.Expr | None,
        otherwise: ir.Expr | None,
        guard: list[ir.Expr],
        found: list[VectorAccess],
    ) -> None:
        self._collect(condition, guard, found)
        if then is not None:
            self._collect(then, [*guard, condition], found)
        if otherwise is not None:
            self._collect(otherwise, [*guard, tirx.Not(condition)], found)

    def _note(self, load: ir.TensorLoad, guard: list[ir.Expr], found: list[VectorAccess]) -> None:
        if not any(self.varies(index) for index in load.indices) or load.source.scope() not in ("global", ""):
            return
        needed = functools.reduce(tirx.And, guard) if guard and not self._is_inside(load) else None
        if needed is not None and uses(needed, (self.lane,)):
            return
        for access in found:
            if tvm_ffi.structural_equal(access.load, load):
                same = needed is not None and access.guard is not None
                if access.guard is None or (same and tvm_ffi.structural_equal(access.guard, needed)):
                    return
                access.guard = None if needed is None else tirx.Or(access.guard, needed)
                return
        found.append(VectorAccess(load, self.width(load.source, load.indices), needed))

    def _is_inside(self, load: ir.TensorLoad) -> bool:
        return all(
            self._is_below(index, extent) for index, extent in zip(load.indices, self.expressions.shape(load.source))
        )

    def _is_below(self, index: ir.Expr, extent: ir.Expr) -> bool:
        """Return whether an index is one of an axis of this extent."""
        if loads_in(index):
            return False
        if self.analyzer.can_prove(tirx.And(index >= 0, index < extent)):
            return True
        return any(
            self.analyzer.can_prove_equal(extent, limit)
            and tvm_ffi.structural_equal(self.simplified(index), self.simplified(known))
            for known, limit in self.inside
        )


@dataclass
class Take:
    """Give a thread ``count`` vectors at a time, the i-th at ``place(i)``, if ``holds(i)``.

    A place is a value for each variable that expressions have beside the lane.
    """

    lanes: Lanes
    count: int
    place: Callable[[ir.Expr], Values]
    holds: Callable[[ir.Expr], ir.Expr | None] = lambda number: None

    def at(self, expression: ir.Expr, number: ir.Expr, lane: ir.Expr) -> ir.Expr:
        """Return an expression at a lane of the vector with this number."""
        return self.lanes.at(expression, {**self.place(number), self.lanes.lane: lane})

    def fill(self, accesses: Sequence[VectorAccess]) -> tuple[list[tirx.Stmt], list[tirx.Stmt]]:
        """Return the allocations of registers for accesses that have none, and the loads that fill them."""
        allocations, loads = [], []
        for access in accesses:
            if access.local is not None:
                continue
            load, lanes = access.load, self.lanes.lanes
            access.local = registers(f"{load.source.name}_local", self.count * lanes, str(load.source.dtype))
            allocations.append(tirx.AllocBuffer(access.local))
            loads.append(self._filled(access))
        return allocations, loads

    def _filled(self, access: VectorAccess) -> tirx.Stmt:
        def vector(number: ir.Expr) -> tirx.Stmt:
            def piece(place: ir.Expr, inside: ir.Expr) -> tirx.Stmt:
                slot = number * self.lanes.lanes + place + inside
                return tirx.BufferStore(access.local, self._read(access.load, number, place, inside), [slot])

            loaded = pieces(self.lanes.lanes, access.width, piece)
            conditions = [self.holds(number)]
            if access.guard is not None:
                conditions.append(self.at(access.guard, number, tirx.const(0, "int32")))
            return where(conditions, loaded)

        return repeated(self.count, vector)

    def _read(self, load: ir.TensorLoad, number: ir.Expr, place: ir.Expr, inside: ir.Expr) -> ir.Expr:
        return tirx.BufferLoad(load.source, self._flat(load.source, load.indices, number, place, inside))

    def compute(
        self,
        accesses: Sequence[VectorAccess],
        lane: Callable[[Read, ir.Expr, ir.Expr], tirx.Stmt] | None,
        stores: Sequence[tuple[tirx.Var, Sequence[ir.Expr], tirx.Var]] = (),
    ) -> tirx.Stmt:
        """Return the loop over vectors that computes each lane, then stores what was computed.

        ``lane(read, slot, place)`` makes the statement of one lane: ``read(expression)`` is an expression there, with
        what was loaded in the place of its loads, ``slot`` numbers the thread's lanes, ``place`` those of a vector.
        ``stores`` are buffers, the indices of a lane, and the registers that hold one element a slot.
        """

        def vector(number: ir.Expr) -> tirx.Stmt:
            def one(place: ir.Expr) -> tirx.Stmt:
                slot = number * self.lanes.lanes + place

                def read(expression: ir.Expr) -> ir.Expr:
                    return self.at(loaded(expression, accesses, slot), number, place)

                return lane(read, slot, place) if lane else tirx.Evaluate(place)

            statements = [unrolled("lane", self.lanes.lanes, one)] if lane else []
            for buffer, indices, local in stores:
                statements.append(self._stored(buffer, indices, local, number))
            return where([self.holds(number)], sequence(statements))

        return repeated(self.count, vector)

    def _stored(self, buffer: tirx.Var, indices: Sequence[ir.Expr], local: tirx.Var, number: ir.Expr) -> tirx.Stmt:
        def piece(place: ir.Expr, inside: ir.Expr) -> tirx.Stmt:
            slot = number * self.lanes.lanes + place + inside
            return tirx.BufferStore(
                buffer, tirx.BufferLoad(local, [slot]), self._flat(buffer, indices, number, place, inside)
            )

        return pieces(self.lanes.lanes, self.lanes.width(buffer, indices), piece)

    def _flat(
        self, buffer: tirx.Var, indices: Sequence[ir.Expr], number: ir.Expr, place: ir.Expr, inside: ir.Expr
    ) -> list[ir.Expr]:
        """Return the indices of an element: its address, as short as it can be made here, in the last.

        Not so for workspaces: TVM makes them as small as the indices let it, dimension by dimension.
        """
        if any(buffer.same_as(workspace) for workspace in self.lanes.expressions.workspaces):
            own = [self.at(self.lanes.analyzer.simplify(index), number, place) for index in indices]
            return [*own[:-1], own[-1] + inside]
        address = self.lanes.analyzer.simplify(self.lanes.expressions.address(buffer, indices))
        zeros = [tirx.const(0, "int32")] * (len(indices) - 1)
        return [*zeros, self.at(address, number, place) + inside] if indices else []


def loaded(expression: ir.Expr, accesses: Sequence[VectorAccess], slot: ir.Expr) -> ir.Expr:
    """Return an expression with what was loaded to registers in the place of its loads."""

    def from_registers(load: ir.TensorLoad) -> ir.TensorLoad:
        for access in accesses:
            if access.local is not None and tvm_ffi.structural_equal(access.load, load):
                return tirx.BufferLoad(access.local, [slot])
        return load

    return tvm_ffi.structural_map(expression, (ir.TensorLoad, from_registers))


def is_reduction(computation: Computation) -> bool:
    """Return whether an equation adds up, or is of one step of such a sum."""
    return bool(computation.reduction) or computation.start is not None


def digits(number: ir.Expr, extents: Sequence[ir.Expr]) -> list[ir.Expr]:
    """Return the indices of the element with this number, in row-major order."""
    found: list[ir.Expr] = []
    for extent in reversed(extents[1:]):
        found.insert(0, tirx.FloorMod(number, extent))
        number = tirx.FloorDiv(number, extent)
    return [number, *found] if extents else []


def product(extents: Iterable[ir.Expr]) -> ir.Expr:
    """Return how many elements have these extents."""
    count: ir.Expr = tirx.const(1, "int32")
    for extent in extents:
        count = count * extent
    return sym.Analyzer().simplify(count)


def is_multiple(extent: ir.Expr, of: int) -> bool:
    """Return whether an extent is proven to be a multiple of a number."""
    return sym.Analyzer().can_prove_equal(tirx.FloorMod(extent, tirx.const(of, "int32")), 0)


def ceil_div(extent: ir.Expr, by: int) -> ir.Expr:
    """Return an extent divided by a number, rounded up."""
    return sym.Analyzer().simplify(tirx.FloorDiv(extent + (by - 1), tirx.const(by, "int32")))


def divided(extent: ir.Expr, by: int) -> ir.Expr:
    """Return an extent divided by a number, rounded down."""
    return sym.Analyzer().simplify(tirx.FloorDiv(extent, tirx.const(by, "int32")))


def for_whole_vectors(source: Source, body: Callable[[Values], tuple[tirx.Stmt, bool]]) -> tirx.Stmt:
    """Return a body for any extents; and in front of it, where it has no whole vectors, one for multiples of them.

    ::

        before   body(n)
        after    if n % 8 == 0:  body(8 * (n // 8));  else:  body(n)

    ``body(extents)`` returns kernels and whether all their accesses are vectors. Multiples are of the symbolic extents
    that are some parameter's last.
    """
    plain, whole = body(source.extents)
    inner = {buffer.shape[-1] for buffer in source.buffers() if len(buffer.shape)} & set(source.extents)
    if whole or not inner:
        return plain
    multiples: dict[tirx.Var, ir.Expr] = dict(source.extents)
    bound, condition = [], None
    for symbol in inner:
        extent, part = source.extents[symbol], tirx.Var(f"{symbol.name}_vectors", "int32")
        bound.append(tirx.Bind(part, tirx.FloorDiv(extent, tirx.const(WHOLE, "int32"))))
        multiples[symbol] = part * WHOLE
        is_whole = tirx.EQ(tirx.FloorMod(extent, tirx.const(WHOLE, "int32")), tirx.const(0, "int32"))
        condition = is_whole if condition is None else tirx.And(condition, is_whole)
    return tirx.IfThenElse(condition, sequence([*bound, body(multiples)[0]]), plain)


def registers(name: str, count: int, dtype: str) -> tirx.Var:
    """Return a buffer of a thread's own."""
    return tirx.decl_buffer((count,), dtype, name, scope="local")


def variables_in(expression: ir.Expr) -> list[tirx.Var]:
    """Return the variables of an expression."""
    found: list[tirx.Var] = []
    tvm_ffi.structural_walk(expression, (tirx.Var, found.append))
    return found


def uses(expression: ir.Expr, variables: Sequence[tirx.Var]) -> bool:
    """Return whether an expression depends on one of these variables."""
    return any(var.same_as(other) for var in variables_in(expression) for other in variables)


def sequence(statements: Sequence[tirx.Stmt]) -> tirx.Stmt:
    """Return statements as one."""
    return statements[0] if len(statements) == 1 else tirx.SeqStmt(list(statements))


def where(conditions: Iterable[ir.Expr | None], statement: tirx.Stmt) -> tirx.Stmt:
    """Return a statement under all conditions that are not None."""
    for condition in reversed([c for c in conditions if c is not None]):
        statement = tirx.IfThenElse(condition, statement, None)
    return statement


def loop(
    name: str, extent: ir.Expr | int, body: Callable[[ir.Expr], tirx.Stmt], kind: tirx.ForKind = tirx.ForKind.SERIAL
) -> tirx.Stmt:
    """Return a loop from 0 to ``extent``; of one iteration, its body."""
    if isinstance(extent, int) and extent == 1:
        return body(tirx.const(0, "int32"))
    var = tirx.Var(name, "int32")
    return tirx.For(var, tirx.const(0, "int32"), _expr(extent), kind, body(var))


def unrolled(name: str, extent: int, body: Callable[[ir.Expr], tirx.Stmt]) -> tirx.Stmt:
    """Return a loop that is written out."""
    return loop(name, extent, body, tirx.ForKind.UNROLLED)


def repeated(count: int, body: Callable[[ir.Expr], tirx.Stmt]) -> tirx.Stmt:
    """Return a body for each number below ``count``.

    Not as a loop: from its conditions TVM would conclude that fewer registers do, as many as only run time knows.
    """
    return sequence([body(tirx.const(number, "int32")) for number in range(count)])


def pieces(lanes: int, width: int, body: Callable[[ir.Expr, ir.Expr], tirx.Stmt]) -> tirx.Stmt:
    """Return the accesses of all lanes in vectors of ``width``: ``body(first lane, lane inside)``."""

    def piece(number: ir.Expr) -> tirx.Stmt:
        return loop("inside", width, lambda inside: body(number * width, inside), tirx.ForKind.VECTORIZED)

    return unrolled("piece", lanes // width, piece)


def barrier() -> tirx.Stmt:
    """Return a barrier: TVM would place it, but not in a function whose host chooses among kernels."""
    return tirx.Evaluate(tirx.op.tvm_storage_sync("shared"))


def threads(tag: str, extent: ir.Expr | int, body: Callable[[ir.Expr], tirx.Stmt]) -> tirx.Stmt:
    """Return a loop bound to the blocks or threads of ``tag``."""
    var = tirx.Var(tag.replace(".", "_"), "int32")
    axis = tirx.IterVar(None, tirx.Var(tag, "int32"), tirx.IterVar.ThreadIndex, tag)
    return tirx.For(var, tirx.const(0, "int32"), _expr(extent), tirx.ForKind.THREAD_BINDING, body(var), axis)


def _expr(extent: ir.Expr | int) -> ir.Expr:
    return tirx.const(extent, "int32") if isinstance(extent, int) else extent


def _is_index(expression: ir.Expr) -> bool:
    """Return whether an expression is of whole numbers, and made of iterators and extents only."""
    return str(expression.ty.dtype) in ("int32", "int64") and not loads_in(expression) and not _calls(expression)


def _is_unsigned(expression: ir.Expr) -> bool:
    return "uint" in str(expression.ty.dtype)


def _calls(expression: ir.Expr) -> bool:
    found: list[ir.Call] = []
    tvm_ffi.structural_walk(expression, (ir.Call, found.append))
    return bool(found)
