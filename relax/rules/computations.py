"""A function as a list of equations: what each of its blocks computes, whatever its loops look like."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import tvm_ffi
from tvm import ir, s_tir, sym, tirx

from tensorir_ladder.relax.rules.rule import NotTaken
from tensorir_ladder.schedules.inspection import DEVICE_SCOPES, is_constant, is_one, is_true, is_zero

PURE = 2  # TVM's CallEffectKind up to kReadState: what may be computed again, or elsewhere
WRAPPING = (tirx.Add, tirx.Sub, tirx.Mul)
ARITHMETIC = (*WRAPPING, tirx.FloorDiv, tirx.FloorMod, tirx.Div, tirx.Mod, tirx.Min, tirx.Max)
COMPARISONS = (tirx.EQ, tirx.NE, tirx.LT, tirx.LE, tirx.GT, tirx.GE)
MOVING = ("prim.if_then_else", "tirx.reinterpret")  # calls that compute nothing
LEAVE = "leave it to the rules of TVM"
MOST_NODES = 4000  # of one expression: blocks that read a value often, one after the other, double it each time
POINTERS = ("tirx.address_of", "tirx.tvm_access_ptr")  # what is behind one is not said


@dataclass(frozen=True)
class Computation:
    """One block as an equation: ``buffer[indices] = value`` for every value of its iterators.

    ``spatial`` and ``reduction`` are the iterators of more than one step, each from 0; those of one step are a 0 in
    ``indices`` and ``value``. ``start`` is what a reduction begins with, None without one. A block of
    several buffers is an equation for each; what one's ``value`` reads of the others is what they were before.
    """

    name: str
    buffer: tirx.Var
    indices: tuple[ir.Expr, ...]
    value: ir.Expr
    start: ir.Expr | None
    spatial: tuple[tirx.IterVar, ...]
    reduction: tuple[tirx.IterVar, ...]

    @property
    def iterators(self) -> tuple[tirx.IterVar, ...]:
        """All iterators, the reduction's last."""
        return self.spatial + self.reduction

    @property
    def updates(self) -> bool:
        """True of a reduction, which reads what it has stored, whether it says by T.init what it begins with or not."""
        return bool(self.reduction or self.start is not None)

    def is_beside(self, other: Computation) -> bool:
        """Return whether both are computed by one block (equations without iterators: if they have one name)."""
        same = len(self.iterators) == len(other.iterators) and self.name == other.name
        return same and all(own.var.same_as(its.var) for own, its in zip(self.iterators, other.iterators))


def computations_of(func: tirx.PrimFunc) -> list[Computation]:
    """Read a function as equations, in program order.

    Raises
    ------
    NotTaken : for a function that was scheduled already, or does something else than to compute whole buffers: no root
        block, statements of other kinds, blocks that write parts of a buffer, several writers of one buffer, loops that
        do not run a block exactly once for each value of its iterators, calls with effects; and for parameters with
        strides or an offset, elements that are no whole bytes, or vectors.
    """
    if not isinstance(func.body, s_tir.SBlockRealize):
        raise NotTaken("a function without a root block", remedy=LEAVE)
    found: list[Computation] = []
    _read(func.body.block.body, [], found)
    _check_elements(found)
    for parameter in (parameter for parameter in func.params if hasattr(parameter.ty, "shape")):
        if len(parameter.strides) or not (parameter.elem_offset is None or is_zero(parameter.elem_offset)):
            raise NotTaken("a buffer with strides or an offset of its own", value=parameter.name, remedy=LEAVE)
    for place, computation in enumerate(found):
        if sum(other.buffer.same_as(computation.buffer) for other in found) > 1:
            raise _left("several blocks write one buffer", computation.name, "a reduction's start belongs into T.init")
        later = [other.buffer for other in found[place:] if not (computation.updates and computation.is_beside(other))]
        if any(load.source.same_as(buffer) for load in loads_in(computation.value) for buffer in later):
            raise _left("a block that reads what it changes, or what is computed later", computation.name)
    return found


def _check_elements(computations: Sequence[Computation]) -> None:
    """Raise NotTaken for elements of which TVM's CUDA reads the whole word that they lie in, and for vectors."""
    loads = [load.source for computation in computations for load in loads_in(computation.value)]
    for buffer in [*(computation.buffer for computation in computations), *loads]:
        dtype = tvm_ffi.dtype(str(buffer.dtype))
        if dtype.lanes != 1 or dtype.bits % 8:
            raise NotTaken(
                "elements that are no whole bytes, or vectors",
                value=f"{buffer.name}: {dtype}",
                remedy=LEAVE,
            )


def nodes_inlined(computation: Computation, producers: Sequence[Computation]) -> int:
    """Count the nodes of a computation's expression once all that it reads is inlined (:func:`inlined`)."""
    sizes: dict[tirx.Var, int] = {}
    for producer in [*producers, computation]:
        nodes: list[ir.Expr] = []
        tvm_ffi.structural_walk(producer.value, (ir.Expr, nodes.append))
        sizes[producer.buffer] = len(nodes) + sum(sizes.get(load.source, 0) for load in loads_in(producer.value))
    return sizes[computation.buffer]


def analyzer_for(iterators: Iterable[tirx.IterVar]) -> sym.Analyzer:
    """Return an analyzer that knows the iterators' ranges."""
    analyzer = sym.Analyzer()
    for iterator in iterators:
        analyzer.bind(iterator.var, iterator.dom)
    return analyzer


def loads_in(value: ir.Expr) -> list[ir.TensorLoad]:
    """Return every load of an expression, in order."""
    found: list[ir.TensorLoad] = []
    tvm_ffi.structural_walk(value, (ir.TensorLoad, found.append))
    return found


def replaced(value: ir.Expr, taken: Mapping[tirx.Var, ir.Expr]) -> ir.Expr:
    """Return an expression with variables replaced."""
    return tvm_ffi.structural_map(value, (tirx.Var, lambda var: taken.get(var, var)))


def step_of(index: ir.Expr, var: tirx.Var) -> int:
    """Return how far an index moves with a variable, 0 where that is no constant."""
    moved = sym.Analyzer().simplify(replaced(index, {var: var + 1}) - index)
    return int(moved) if is_constant(moved) else 0


def simplified(value: ir.Expr, analyzer: sym.Analyzer) -> ir.Expr:
    """Return an expression with the indices of its loads simplified; its arithmetic stays as it was written."""

    def shorter(load: ir.TensorLoad) -> ir.TensorLoad:
        return tirx.BufferLoad(load.source, [analyzer.simplify(index) for index in load.indices])

    return tvm_ffi.structural_map(value, (ir.TensorLoad, shorter))


def inlined(value: ir.Expr, producers: Sequence[Computation]) -> ir.Expr:
    """Return an expression with loads of what ``producers`` compute replaced by how they compute it, all the way up."""

    def computed(load: ir.TensorLoad) -> ir.Expr:
        for producer in producers:
            if producer.buffer.same_as(load.source):
                return inlined(replaced(producer.value, index_of(producer, load.indices)), producers)
        return load

    return tvm_ffi.structural_map(value, (ir.TensorLoad, computed))


def index_of(computation: Computation, indices: Sequence[ir.Expr]) -> dict[tirx.Var, ir.Expr]:
    """Return the value of each spatial iterator at which a computation writes the element at ``indices``."""
    iterators = {iterator.var for iterator in computation.spatial}
    return {own: index for own, index in zip(computation.indices, indices) if own in iterators}


def check_arithmetic(value: ir.Expr, block: str | None = None) -> None:
    """Raise NotTaken for arithmetic that does something else in CUDA, as TVM 0.27 writes it, or that CUDA lacks."""
    if _shows_carries(value):
        problem = "integers of less than 32 bits that wrap inside of an expression, not in CUDA"
        raise NotTaken(problem, block=block, remedy=LEAVE)
    computed: list[ir.Expr] = []

    def note_call(call: ir.Call) -> None:
        if str(call.op.name) not in MOVING:
            computed.extend([call, *call.args])

    noted = [((*ARITHMETIC, *COMPARISONS), lambda node: computed.extend([node.a, node.b])), (ir.Call, note_call)]
    tvm_ffi.structural_walk(value, noted)
    dtypes = [str(getattr(expression.ty, "dtype", "")) for expression in computed]
    if narrow := next((dtype for dtype in dtypes if dtype.startswith("float8")), None):
        problem, remedy = "arithmetic in 8-bit floats, which CUDA lacks", "cast to float16 or float32 before it"
        raise NotTaken(problem, block=block, value=narrow, remedy=remedy)


def _shows_carries(value: ir.Expr) -> bool:
    """Return whether narrow integers are computed, and more than their low bits are looked at before they are stored.

    In CUDA (as TVM 0.27 writes it) they are int by then, and do not wrap.
    """
    found: list[ir.Expr] = []
    tvm_ffi.structural_walk(value, (WRAPPING, lambda node: found.append(node) if _is_narrow(node) else None))

    def stored(node: ir.Expr) -> int:
        if isinstance(node, WRAPPING) and _is_narrow(node):
            return 1 + stored(node.a) + stored(node.b)
        if isinstance(node, ir.Call) and str(node.op.name).endswith("if_then_else"):
            return stored(node.args[1]) + stored(node.args[2])
        if isinstance(node, tirx.Cast) and _is_narrow(node):
            return stored(node.value)
        return 0

    return len(found) > stored(value)


def _is_narrow(value: ir.Expr) -> bool:
    """Return whether an expression is an integer of less than 32 bits."""
    return re.fullmatch(r"u?int(8|16)", str(value.ty.dtype)) is not None


def same_number(one: ir.Expr, other: ir.Expr) -> bool:
    """Return whether two extents are the same number, whatever only run time knows."""
    return tvm_ffi.structural_equal(one, other) or sym.Analyzer().can_prove_equal(one, other)


def _read(stmt: tirx.Stmt, loops: list[tirx.For], found: list[Computation]) -> None:
    if isinstance(stmt, tirx.SeqStmt):
        for part in stmt.seq:
            _read(part, loops, found)
    elif isinstance(stmt, tirx.For):
        _read(stmt.body, [*loops, stmt], found)
    elif isinstance(stmt, s_tir.SBlockRealize):
        found.extend(_computations(stmt, loops))
    else:
        raise NotTaken("a statement that is no loop and no block", value=type(stmt).__name__, remedy=LEAVE)


def _computations(realize: s_tir.SBlockRealize, loops: list[tirx.For]) -> list[Computation]:
    block = realize.block
    name = str(block.name_hint)
    stores, starts = _stores(block.body), [] if block.init is None else _stores(block.init)
    if not stores or block.alloc_buffers or block.match_buffers:
        raise _left("a block that does more than to compute an element of each of its buffers", name)
    if block.init is not None and [s.buffer for s in starts] != [s.buffer for s in stores]:
        raise _left("a reduction that starts with other stores than it goes on with", name)
    for loop in loops:
        if loop.kind == tirx.ForKind.THREAD_BINDING or loop.annotations:
            raise _left("a function that is scheduled already", name, "give the rule functions without a schedule")
    buffers = [
        buffer for store in stores for buffer in (store.buffer, *(load.source for load in loads_in(store.value)))
    ]
    if any(buffer.scope() not in DEVICE_SCOPES for buffer in buffers):
        raise _left("a function that is scheduled already", name, "give the rule functions without a schedule")
    if not _runs_once_each(realize, loops):
        raise _left("loops that do not run a block once for each value of its iterators", name)
    if not all(_is_pure(value) for store in stores for value in (store.value, *store.indices)):
        raise _left("a block whose calls have effects", name)
    unit = {i.var: tirx.const(0, i.var.ty.dtype) for i in block.iter_vars if is_one(i.dom.extent)}
    kinds: dict[int, list[tirx.IterVar]] = {tirx.IterVar.DataPar: [], tirx.IterVar.CommReduce: []}
    for iterator in block.iter_vars:
        if iterator.iter_type not in kinds or not is_zero(iterator.dom.min):
            raise _left("an iterator that is neither spatial nor a reduction's, from 0", name)
        if iterator.var not in unit:
            kinds[iterator.iter_type].append(iterator)
    computations = [
        _without_steps(
            Computation(
                name,
                store.buffer,
                tuple(replaced(index, unit) for index in store.indices),
                replaced(store.value, unit),
                start.value if start is not None else None,
                tuple(kinds[tirx.IterVar.DataPar]),
                tuple(kinds[tirx.IterVar.CommReduce]),
            )
        )
        for store, start in zip(stores, starts or [None] * len(stores))
    ]
    if not all(map(_writes_whole, computations)):
        raise _left("a block that writes a part of its buffer", name)
    return computations


def _without_steps(computation: Computation) -> Computation:
    """Return a reduction that never takes a step, having an iterator of none, as an equation of what it begins with."""
    if computation.start is not None and any(is_zero(iterator.dom.extent) for iterator in computation.iterators):
        return replace(computation, value=computation.start, start=None, reduction=())
    return computation


def _stores(body: tirx.Stmt) -> list[tirx.BufferStore]:
    """Return a block's stores, what they store written out; none if it does more, or reads what it stored."""
    bound: dict[tirx.Var, ir.Expr] = {}
    found: list[tirx.BufferStore] = []
    for part in body.seq if isinstance(body, tirx.SeqStmt) else [body]:
        read = [load.source for load in loads_in(part.value)] if isinstance(part, (tirx.Bind, tirx.BufferStore)) else []
        if any(store.buffer.same_as(buffer) for store in found for buffer in read):
            return []
        if isinstance(part, tirx.Bind):
            bound[part.var] = replaced(part.value, bound)
        elif isinstance(part, tirx.BufferStore):
            found.append(tirx.BufferStore(part.buffer, replaced(part.value, bound), part.indices))
        else:
            return []
    return found


def _runs_once_each(realize: s_tir.SBlockRealize, loops: list[tirx.For]) -> bool:
    """Return whether loops run a block exactly once for each value of its iterators."""
    ranges = {loop.loop_var: ir.Range.from_min_extent(loop.min, loop.extent) for loop in loops}
    extents = {loop.loop_var: loop.extent for loop in loops if is_zero(loop.min)}
    plain = is_true(realize.predicate) and len(loops) == len(realize.iter_values)
    if plain and len(set(realize.iter_values)) == len(loops):
        domains = [iterator.dom.extent for iterator in realize.block.iter_vars]
        if all(v in extents and same_number(extents[v], extent) for v, extent in zip(realize.iter_values, domains)):
            return True
    found = sym.detect_iter_map(
        realize.iter_values, ranges, realize.predicate, sym.iter_affine_map.IterMapLevel.Bijective
    )
    return len(found.indices) == len(realize.iter_values) and all(
        _runs_from_zero(index, iterator.dom.extent) for index, iterator in zip(found.indices, realize.block.iter_vars)
    )


def _runs_from_zero(index: sym.iter_affine_map.IterSumExpr, extent: ir.Expr) -> bool:
    """Return whether an index of loops takes each value from 0 up to ``extent``."""
    if not is_zero(index.base) or len(index.args) > 1:
        return False
    if not index.args:
        return is_one(extent)
    (split,) = index.args
    return is_one(split.scale) and sym.Analyzer().can_prove_equal(split.extent, extent)


def _writes_whole(computation: Computation) -> bool:
    """Return whether a computation writes each element of its buffer, at indices that are iterators."""
    extents = {iterator.var: iterator.dom.extent for iterator in computation.spatial}
    for index, extent in zip(computation.indices, computation.buffer.shape):
        if not (index in extents and same_number(extents.pop(index), extent)) and not (
            is_zero(index) and is_one(extent)
        ):
            return False
    return not extents


def _is_pure(value: ir.Expr) -> bool:
    effects: list[int] = []

    def note(call: ir.Call) -> None:
        known = isinstance(call.op, ir.Op) and call.op.name not in POINTERS
        kind = call.op.get_attr("TCallEffectKind") if known else None
        effects.append(PURE + 1 if kind is None else int(kind))

    tvm_ffi.structural_walk(value, (ir.Call, note))
    return all(effect <= PURE for effect in effects)


def _left(problem: str, block: str, remedy: str = LEAVE) -> NotTaken:
    return NotTaken(problem, block=block, remedy=remedy)
