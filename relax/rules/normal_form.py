"""Any function around one sum of products, as frameworks write it, in the one form that the compositions take.

::

    before   transpose(W);  matmul in float16;  T_add(bias);  sigmoid;  T_multiply          # int64, blocks of their own
    after    A'[row, k] = ...                                        # where an operand is no plain matrix already
             for row, column, k:  sums[row, column] += float32(A'[row, k]) * float32(W[column, k])
             for row, column:     out[...] = silu(float16(sums[row, column]) + bias[column])

The function is read as equations (:mod:`relax.rules.computations`) and written anew from these, so that it does not
matter how its loops and blocks were cut: iterators of the product become batch, rows, columns and reduction by what
they index, each group but the batch is fused into one, whatever is computed before the product becomes part of its
operand, whatever follows becomes one epilogue. The function given is never changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import tvm
import tvm_ffi
from tvm import ir, s_tir, sym, tirx
from tvm.error import InternalError
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tensorir_ladder.relax.rules.computations import (
    MOST_NODES,
    Computation,
    analyzer_for,
    check_arithmetic,
    computations_of,
    inlined,
    loads_in,
    nodes_inlined,
    replaced,
    same_number,
    simplified,
)
from tensorir_ladder.relax.rules.rule import NotTaken
from tensorir_ladder.schedules.inspection import is_constant, is_one
from tensorir_ladder.schedules.workloads import MAX_ELEMENTS

NARROW_FLOATS = ("float16", "bfloat16", "float8")  # beginnings of the dtypes whose sums are kept in float32
FEWEST_OF_A_GROUP = 8  # channels of the result: less of a tile would be used by a grouped convolution
EPILOGUE = "epilogue"
IF = "prim.if_then_else"
OWN_NAMES = ("root", "first_operand", "second_operand", EPILOGUE)  # of blocks


@dataclass(frozen=True)
class Product:
    """One sum of products in a schedule of its own: its block, and its loops by role, outermost first.

    ::

        for batch...:  for rows:  for columns:  for reduction:  sums[...] += operand 0[rows, k] * operand 1[columns, k]

    Operand 0 is indexed by rows, operand 1 by columns. An operand that is no plain matrix (a convolution's windows, a
    cast, weights that are unpacked) is computed by a block of its own, for copies to inline
    (:func:`schedules.memory.inline_data_movement`); what follows the sum is one block,
    for :func:`schedules.memory.accumulate_in_registers`. A role without an iterator (the rows of a vector) has a loop
    of one step.
    """

    sch: Schedule
    block: SBlockRV
    batch: tuple[LoopRV, ...]
    rows: LoopRV
    columns: LoopRV
    reduction: LoopRV


def narrowed(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return a function with indices, extents and symbolic shapes of int32 where Relax made them int64.

    Raises
    ------
    NotTaken : for a buffer of 2³¹ elements or more; for one that holds int64 itself.
    """
    found: list[tirx.Var] = []
    tvm_ffi.structural_walk(func, (tirx.Var, found.append))
    for buffer in dict.fromkeys(filter(_is_buffer, found)):
        if _known(buffer.shape) >= MAX_ELEMENTS:
            raise _left("a buffer is beyond 32-bit indexing", value=_known(buffer.shape), limit=f"below {MAX_ELEMENTS}")
    wide = [var for var in found if str(var.dtype if _is_buffer(var) else getattr(var.ty, "dtype", "")) == "int64"]
    for buffer in filter(_is_buffer, wide):
        raise _left("indices of 32 bits are for buffers that hold no 64-bit numbers", value=buffer.name)
    if not wide:
        return func
    try:
        return tirx.transform.ForceNarrowIndexToInt32()(tvm.IRModule({"main": func}))["main"]
    except InternalError as refused:
        raise _left("a number in its indices needs more than 32 bits") from refused


def product_of(func: tirx.PrimFunc, *, sums: str = "float32") -> Product:
    """Write a function around one sum of products in the form that the compositions take, as a new schedule.

    Parameters
    ----------
    sums : "float32" sums products of 16- and 8-bit floats in float32, whatever was written, and rounds where the
        function rounds; "as_written" keeps the function's own arithmetic. Others are summed as written.

    Raises
    ------
    NotTaken : with the reason, for any other function: no reduction or several, no product of two operands in it, a
        result that something else than one elementwise epilogue reads, a scheduled function (see
        :func:`relax.rules.computations.computations_of`).
    """
    func = narrowed(func)  # once: the equation is in terms of its variables
    return _rewritten(func, *_grouped(*equation_of(func, sums=sums)))


def equation_of(func: tirx.PrimFunc, *, sums: str = "float32") -> tuple[Computation, Factors, EpilogueEquation]:
    """Read a function around one sum of products: the reduction, what it multiplies, and what becomes of each sum.

    In terms of the variables of a function that :func:`narrowed` made. ``sums`` and what is raised are as in
    :func:`product_of`.
    """
    if sums not in ("float32", "as_written"):
        raise ValueError(f"sums are 'float32' or 'as_written', not {sums!r}")
    computations = computations_of(func)
    reduction = _the_reduction(computations)
    others = [computation for computation in computations if computation is not reduction]
    written = _the_output(func, computations)
    for computation in (reduction, written):
        if (nodes := nodes_inlined(computation, others)) > MOST_NODES:
            raise _left("too much is computed in one block", computation, value=nodes, limit=MOST_NODES)
    factors = _factors_of(reduction, others, sums)
    epilogue = _epilogue_of(reduction, factors, written, others)
    for value in (factors.first, factors.second, epilogue.value):
        check_arithmetic(value, reduction.name)
    return reduction, factors, epilogue


@dataclass(frozen=True)
class Factors:
    """Hold what is summed: ``scale * (first * second)``, multiplied in one dtype and summed in another.

    ``scale`` are factors that the reduction does not go through, which the epilogue multiplies with. ``in_any_order``:
    the iterators of the reduction may change places.
    """

    first: ir.Expr
    second: ir.Expr
    multiplied: str
    summed: str
    scale: tuple[ir.Expr, ...] = ()
    in_any_order: bool = True


@dataclass(frozen=True)
class EpilogueEquation:
    """Say what becomes of a sum: ``buffer[indices] = value``, in terms of the product's iterators and of ``total``."""

    buffer: tirx.Var
    indices: tuple[ir.Expr, ...]
    value: ir.Expr
    total: tirx.Var


def _the_reduction(computations: Sequence[Computation]) -> Computation:
    found = [computation for computation in computations if computation.start is not None or computation.reduction]
    if len(found) != 1:
        names = [computation.name for computation in found]
        raise _left("a function with other than one reduction", value=names or "none", limit="one sum of products")
    (reduction,) = found
    if reduction.start is None:
        raise _left("a sum that goes on from what its buffer holds", reduction)
    if not isinstance(reduction.start, (tirx.FloatImm, tirx.IntImm)) or float(reduction.start.value) != 0:
        raise _left("a reduction that does not begin with 0", reduction, value=reduction.start)
    return reduction


def _the_output(func: tirx.PrimFunc, computations: Sequence[Computation]) -> Computation:
    """Return the computation of the one parameter that a function writes."""
    found = [c for c in computations if any(c.buffer.same_as(parameter) for parameter in func.params)]
    if len(found) != 1:
        raise _left("a function with other than one result", value=[c.name for c in found] or "none", limit=1)
    return found[0]


def _factors_of(reduction: Computation, producers: Sequence[Computation], sums: str) -> Factors:
    """Read the sum of products, with all that is computed before inlined."""
    summand = _summand(reduction)
    analyzer = analyzer_for(reduction.iterators)
    value = simplified(inlined(summand, producers), analyzer)
    written = str(reduction.buffer.dtype)
    wide = sums == "float32" and _is_float(written)
    summed = "float32" if wide and written.startswith(NARROW_FLOATS) else written
    rounded = not wide and isinstance(value, tirx.Cast)  # products that round before they are added
    found = _split(value.value if rounded else value, reduction, wide)
    if found is None or (rounded and not _is_float(found.multiplied)):
        raise _left("the sum is not one of products of two operands", reduction, value=summand)
    first, second = (_as_stored(operand) for operand in (found.first, found.second))
    if wide:
        first, second = _of_one_dtype(first, second, summed)
    elif found.scale and _is_float(written):
        raise _left("a product of several factors has no arithmetic as written", reduction, value=summand)
    for iterator in reduction.reduction:
        if not all(_uses(operand, [iterator]) for operand in (first, second)):
            raise _left("a reduction over one operand alone", reduction, value=iterator.var.name)
    return Factors(first, second, summed if wide else found.multiplied, summed, found.scale, sums == "float32")


def _summand(reduction: Computation) -> ir.Expr:
    """Return what a reduction adds to its buffer in each step."""

    def is_own(term: ir.Expr) -> bool:
        own = isinstance(term, ir.TensorLoad) and term.source.same_as(reduction.buffer)
        return own and all(map(tvm_ffi.structural_equal, term.indices, reduction.indices))

    if isinstance(reduction.value, tirx.Add):
        for own, summand in ((reduction.value.a, reduction.value.b), (reduction.value.b, reduction.value.a)):
            if is_own(own) and not any(load.source.same_as(reduction.buffer) for load in loads_in(summand)):
                return summand
    raise _left("a reduction that is no sum", reduction, value=reduction.value)


def _split(value: ir.Expr, reduction: Computation, wide: bool) -> Factors | None:
    """Split a product into two operands, of which one is indexed by rows, one by columns; None where there are none.

    Of several factors, ``A[i, k] * (W[j, k] * s[j, k // 32])``, those that the reduction does not go through are set
    apart, and the outermost multiplication counts that separates rows from columns; without one, that which separates
    a vector from a matrix.
    """
    while wide and _widens(value):
        value = value.value
    if not isinstance(value, tirx.Mul):
        return None
    here = Factors(value.a, value.b, str(value.ty.dtype), str(value.ty.dtype))
    if _separated(here, reduction) == 2:
        return here
    sides = ((value.a, value.b), (value.b, value.a))
    for inner, factor in sides:
        if not _uses(factor, reduction.reduction):
            found = _split(inner, reduction, wide)
            return found and replace(found, scale=(*found.scale, factor))
    within = [_attached(_split(inner, reduction, wide), factor, reduction) for inner, factor in sides]
    best = max([here, *filter(None, within)], key=lambda factors: _separated(factors, reduction))
    return best if _separated(best, reduction) else None


def _separated(factors: Factors, reduction: Computation) -> int:
    """Return how many of two operands have spatial iterators that the other has not."""
    first, second = (_uses(operand, reduction.spatial) for operand in (factors.first, factors.second))
    return bool(first - second) + bool(second - first)


def _attached(found: Factors | None, factor: ir.Expr, reduction: Computation) -> Factors | None:
    """Multiply that operand by one more factor that has all of its iterators."""
    if found is None:
        return None
    for name in ("second", "first"):
        operand = getattr(found, name)
        if _uses(factor, reduction.spatial) <= _uses(operand, reduction.spatial):
            return replace(found, **{name: operand.astype(str(factor.ty.dtype)) * factor})
    return None


def _as_stored(operand: ir.Expr) -> ir.Expr:
    """Leave out what only widens an operand for the multiplication."""
    while _widens(operand):
        operand = operand.value
    return operand


def _widens(value: ir.Expr) -> bool:
    """Return whether an expression is a cast to a wider dtype of its kind, which loses nothing."""
    if not isinstance(value, tirx.Cast):
        return False
    before, after = tvm_ffi.dtype(value.value.ty.dtype), tvm_ffi.dtype(value.ty.dtype)
    kinds = [next((kind for kind in ("uint", "int", "float") if kind in str(dtype)), "") for dtype in (before, after)]
    return kinds[0] == kinds[1] != "" and before.bits < after.bits


def _of_one_dtype(first: ir.Expr, second: ir.Expr, summed: str) -> tuple[ir.Expr, ir.Expr]:
    """Give both operands the wider of their dtypes; that of the sums where neither is."""
    dtypes = [tvm_ffi.dtype(operand.ty.dtype) for operand in (first, second)]
    if str(dtypes[0]) == str(dtypes[1]):
        return first, second
    wider = max(dtypes, key=lambda dtype: dtype.bits) if dtypes[0].bits != dtypes[1].bits else summed
    return first.astype(str(wider)), second.astype(str(wider))


def _epilogue_of(
    reduction: Computation, factors: Factors, written: Computation, others: Sequence[Computation]
) -> EpilogueEquation:
    """Read what becomes of a sum, in terms of the product's iterators."""
    total = tirx.Var("total", factors.summed)
    result: ir.Expr = total
    for factor in factors.scale:
        result = result * factor.astype(factors.summed)
    result = result.astype(str(reduction.buffer.dtype))
    if written is reduction:
        return EpilogueEquation(written.buffer, written.indices, result, total)
    analyzer = analyzer_for(written.iterators)
    value = simplified(inlined(written.value, others), analyzer)
    reads = [load for load in loads_in(value) if load.source.same_as(reduction.buffer)]
    if not reads:
        raise _left("what is written does not depend on the sums", written)
    if not all(tvm_ffi.structural_equal(load, reads[0]) for load in reads):
        raise _left("an element of the result depends on several sums", written, value=reads)
    taken = _inverse(reads[0].indices, reduction, written)

    def summed(load: ir.TensorLoad) -> ir.Expr:
        return result if load.source.same_as(reduction.buffer) else load

    value = tvm_ffi.structural_map(replaced(value, taken), (ir.TensorLoad, summed))
    own = analyzer_for(reduction.iterators)
    indices = tuple(own.simplify(replaced(index, taken)) for index in written.indices)
    return EpilogueEquation(written.buffer, indices, simplified(value, own), total)


def _inverse(read: Sequence[ir.Expr], reduction: Computation, written: Computation) -> dict[tirx.Var, ir.Expr]:
    """Return which element of the result each sum goes to: the value of each of the result's iterators.

    ``read`` are the indices of the sum that an element reads, in terms of the result's iterators.

    Raises
    ------
    NotTaken : where not each sum goes to exactly one element (a part of the result, a broadcast).
    """
    analyzer = sym.Analyzer()
    extents = {iterator.var: iterator.dom.extent for iterator in (*written.spatial, *reduction.spatial)}
    taken: dict[tirx.Var, ir.Expr] = {}
    left: list[tuple[tirx.Var, ir.Expr]] = []
    for own, index in zip(reduction.indices, read):
        if own not in extents:  # along an extent of 1
            continue
        if index in extents and index not in taken and analyzer.can_prove_equal(extents[own], extents[index]):
            taken[index] = own
        else:
            left.append((own, index))
    missing = [iterator.var for iterator in written.spatial if iterator.var not in taken]
    if not left and not missing:
        return taken
    several = _left("not each sum goes to exactly one element of the result", written, value=list(read))
    counts = [
        math.prod((extents[var] for var in group), start=tirx.const(1, "int32"))
        for group in (missing, [own for own, _ in left])
    ]
    if not (left and missing and analyzer.can_prove_equal(*counts)):
        raise several
    if not all(_is_invertible(index, missing, extents) for _, index in left):
        raise several
    ranges = [ir.Range(0, extents[var]) for var in missing]
    try:
        inverse = tirx.IndexMap(missing, [index for _, index in left], None).inverse(ranges)
    except InternalError as error:  # TVM says so of a map that is not affine, or not one to one
        raise several from error
    return taken | dict(zip(missing, inverse.map_indices([own for own, _ in left])))


def _is_invertible(index: ir.Expr, iterators: Sequence[tirx.Var], extents: dict[tirx.Var, ir.Expr]) -> bool:
    """Return whether all that an index divides runs from 0 on: of ``(j + 3) % 8`` TVM 0.27 takes j for the inverse."""
    analyzer, begins = sym.Analyzer(), []
    for var in iterators:
        analyzer.bind(var, ir.Range(0, extents[var]))

    def note(division: tirx.FloorDiv | tirx.FloorMod) -> None:
        first = replaced(division.a, {var: tirx.const(0, str(var.ty.dtype)) for var in iterators})
        begins.append(analyzer.can_prove_equal(first, 0) and analyzer.can_prove(division.a >= 0))

    tvm_ffi.structural_walk(index, ((tirx.FloorDiv, tirx.FloorMod), note))
    return all(begins)


def _grouped(
    reduction: Computation, factors: Factors, epilogue: EpilogueEquation
) -> tuple[Computation, Factors, EpilogueEquation]:
    """Cut an iterator in two of which one operand uses groups alone, as heads that share their keys, or channels do.

    ::

        before   scores[h, i, j] += Q[i, h, d] * K[j, h // 4, d]                    # a batch of h products
        after    scores[g * 4 + l, i, j] += Q[i, g * 4 + l, d] * K[j, g, d]         # of g, with rows l, i
    """
    for place, iterator in enumerate(reduction.spatial):
        for size in _group_sizes(iterator, (factors.first, factors.second)):
            group, member = (tirx.Var(f"{iterator.var.name}_{part}", "int32") for part in ("group", "member"))
            count = int(iterator.dom.extent) // size
            cut = [tirx.IterVar(ir.Range(0, n), v, tirx.IterVar.DataPar) for n, v in ((count, group), (size, member))]
            spatial = (*reduction.spatial[:place], *cut, *reduction.spatial[place + 1 :])
            taken, analyzer = {iterator.var: group * size + member}, analyzer_for((*spatial, *reduction.reduction))
            first, second = (
                simplified(replaced(operand, taken), analyzer) for operand in (factors.first, factors.second)
            )
            if bool(_uses(first, cut[1:])) == bool(_uses(second, cut[1:])):
                continue
            indices = tuple(analyzer.simplify(replaced(index, taken)) for index in epilogue.indices)
            value = simplified(replaced(epilogue.value, taken), analyzer)
            return _grouped(
                replace(reduction, spatial=spatial),
                replace(factors, first=first, second=second),
                replace(epilogue, indices=indices, value=value),
            )
    return reduction, factors, epilogue


def _group_sizes(iterator: tirx.IterVar, operands: Sequence[ir.Expr]) -> set[int]:
    """Return by which constants operands divide an iterator whose extent is a multiple of them."""
    found: set[int] = set()

    def note(division: tirx.FloorDiv) -> None:
        if division.a.same_as(iterator.var) and is_constant(division.b) and is_constant(iterator.dom.extent):
            found.add(int(division.b))

    for operand in operands:
        tvm_ffi.structural_walk(operand, (tirx.FloorDiv, note))
    return {size for size in found if size > 1 and int(iterator.dom.extent) % size == 0}


def _rewritten(func: tirx.PrimFunc, reduction: Computation, factors: Factors, epilogue: EpilogueEquation) -> Product:
    """Write a function anew, as operands, product and epilogue, and schedule it."""
    one, other = (_uses(operand, reduction.spatial) for operand in (factors.first, factors.second))
    places = {v: p for p, index in reversed(list(enumerate(epilogue.indices))) for v in _variables(index)}
    order = sorted(reduction.spatial, key=lambda iterator: places[iterator.var])
    last = {iterator.var: place for place, iterator in enumerate(order)}
    if any(iterator.var not in one | other for iterator in order):
        raise _left("a result that is repeated along an iterator of no operand", reduction)
    batch = [iterator for iterator in order if iterator.var in one & other]
    rows, columns = ([i for i in order if i.var in own] for own in (one - other, other - one))
    if rows and (not columns or last[rows[-1].var] > last[columns[-1].var]):  # what is stored side by side
        rows, columns, factors = columns, rows, replace(factors, first=factors.second, second=factors.first)
    narrow = min(math.prod(_few(i.dom.extent) for i in group) for group in (rows, columns))
    if batch and narrow < FEWEST_OF_A_GROUP and any(_slides(o, reduction) for o in (factors.first, factors.second)):
        raise _left("a convolution in groups too narrow for products", reduction, value=narrow, limit=FEWEST_OF_A_GROUP)
    summed = _as_stored_order(factors, reduction) if factors.in_any_order else reduction.reduction
    axes = [_Axis.of("b", [iterator]) for iterator in batch]
    axes += [_Axis.of("i", rows), _Axis.of("j", columns), _Axis.of("k", summed)]
    *batch, i, j, k = axes
    first = _operand(factors.first, [*batch, i, k], func.params, "first")
    others = [parameter for parameter in func.params if not parameter.same_as(first.buffer)]
    operands = [first, _operand(factors.second, [*batch, j, k], others, "second")]
    result = [*batch, i, j]
    sums = epilogue.buffer
    if epilogue.value.same_as(epilogue.total) and _reads_plainly(epilogue.indices, sums, result):
        after, allocated = [], []
    else:
        sums = tirx.decl_buffer([axis.extent for axis in result], factors.summed, name=f"{reduction.name}_sums")
        after, allocated = [_epilogue_block(epilogue, sums, result)], [sums]
    before = [operand.block for operand in operands if operand.block is not None]
    allocated += [operand.buffer for operand in operands if operand.block is not None]
    name = reduction.name if reduction.name not in OWN_NAMES else f"{reduction.name}_of_products"
    blocks = [*before, _product_block(name, operands, sums, axes, factors), *after]
    body = tirx.SeqStmt(blocks) if len(blocks) > 1 else blocks[0]
    root = s_tir.SBlock([], [], [], "root", body, alloc_buffers=allocated)
    sch = Schedule(func.with_body(s_tir.SBlockRealize([], True, root)))
    block = sch.get_sblock(name)
    *batch_loops, row_loop, column_loop, reduction_loop = sch.get_loops(block)
    return Product(sch, block, tuple(batch_loops), row_loop, column_loop, reduction_loop)


@dataclass(frozen=True, eq=False)
class _Axis:
    """One loop of the form to be written: the iterators that it walks, outermost first."""

    name: str
    iterators: tuple[tirx.IterVar, ...]
    extent: ir.Expr

    @staticmethod
    def of(name: str, iterators: Sequence[tirx.IterVar]) -> _Axis:
        """Fuse iterators to one axis, of one step where there are none."""
        extent = math.prod((iterator.dom.extent for iterator in iterators), start=tirx.const(1, "int32"))
        extent = sym.Analyzer().simplify(extent)
        if _known([extent]) >= MAX_ELEMENTS:
            raise _left("an axis is beyond 32-bit indexing", value=extent, limit=f"below {MAX_ELEMENTS}")
        return _Axis(name, tuple(iterators), extent)

    def values(self, place: ir.Expr) -> dict[tirx.Var, ir.Expr]:
        """Return the value of each iterator at one place of the axis."""
        taken, inner = {}, tirx.const(1, "int32")
        for iterator in reversed(self.iterators):
            outer = place if is_one(inner) else tirx.floordiv(place, inner)
            taken[iterator.var] = outer if iterator is self.iterators[0] else tirx.floormod(outer, iterator.dom.extent)
            inner = inner * iterator.dom.extent
        return taken


@dataclass(frozen=True)
class _Operand:
    """A matrix to multiply: its buffer, the axes of its dimensions, and the block that computes it, if any."""

    buffer: tirx.Var
    axes: tuple[_Axis, ...]
    block: tirx.Stmt | None = None


def _operand(value: ir.Expr, axes: Sequence[_Axis], parameters: Sequence[tirx.Var], place: str) -> _Operand:
    """Make a matrix of what is multiplied: one of ``parameters`` that is one already, or a block that computes it.

    Of the last two axes, that one is last along which the parameter behind it is stored.
    """
    *batch, own, k = axes
    if isinstance(value, ir.TensorLoad) and any(value.source.same_as(parameter) for parameter in parameters):
        for order in ([*batch, own, k], [*batch, k, own]):
            if _reads_plainly(value.indices, value.source, order):
                return _Operand(value.source, tuple(order))
    indices = max((load.indices for load in loads_in(value)), key=lambda found: len(_variables(*found)), default=())
    last = next((_variables(index) for index in reversed(indices) if _variables(index)), set())
    order = [*batch, k, own] if last & {iterator.var for iterator in own.iterators} else [*batch, own, k]
    name = f"{place}_operand"
    buffer = tirx.decl_buffer([axis.extent for axis in order], str(value.ty.dtype), name=name)

    def store(places: Sequence[tirx.Var], taken: dict[tirx.Var, ir.Expr], analyzer: sym.Analyzer) -> tirx.Stmt:
        return tirx.BufferStore(buffer, simplified(replaced(value, taken), analyzer), places)

    return _Operand(buffer, tuple(order), _block(name, order, store))


def _product_block(
    name: str, operands: Sequence[_Operand], sums: tirx.Var, axes: Sequence[_Axis], factors: Factors
) -> tirx.Stmt:
    *_, k = axes

    def store(places: Sequence[tirx.Var], taken: dict[tirx.Var, ir.Expr], analyzer: sym.Analyzer) -> tirx.Stmt:
        at = dict(zip(axes, places))
        loads = [tirx.BufferLoad(o.buffer, [at[axis] for axis in o.axes]).astype(factors.multiplied) for o in operands]
        own = list(places[:-1])
        summed = tirx.BufferLoad(sums, own) + (loads[0] * loads[1]).astype(factors.summed)
        return tirx.BufferStore(sums, summed, own)

    return _block(name, axes, store, reduction=k, start=tirx.const(0, factors.summed))


def _epilogue_block(epilogue: EpilogueEquation, sums: tirx.Var, axes: Sequence[_Axis]) -> tirx.Stmt:
    def store(places: Sequence[tirx.Var], taken: dict[tirx.Var, ir.Expr], analyzer: sym.Analyzer) -> tirx.Stmt:
        value = _without_branches(simplified(replaced(epilogue.value, taken), analyzer))
        indices = [analyzer.simplify(replaced(index, taken)) for index in epilogue.indices]
        total = tirx.BufferLoad(sums, list(places))
        return tirx.BufferStore(epilogue.buffer, replaced(value, {epilogue.total: total}), indices)

    return _block(EPILOGUE, axes, store)


def _without_branches(value: ir.Expr) -> ir.Expr:
    """Choose by a Select where both sides can be computed anywhere: TVM makes no vectors around ``if_then_else``."""

    def chosen(call: ir.Call) -> ir.Expr:
        if call.op.name != IF or not all(map(_is_harmless, call.args[1:])):
            return call
        return tirx.Select(*call.args)

    return tvm_ffi.structural_map(value, (ir.Call, chosen))


def _is_harmless(value: ir.Expr) -> bool:
    """Return whether an expression reads no memory and divides integers by constants only."""
    divided: list[ir.Expr] = []
    divisions = (tirx.Div, tirx.Mod, tirx.FloorDiv, tirx.FloorMod)
    tvm_ffi.structural_walk(
        value, (divisions, lambda node: None if _is_float(str(node.ty.dtype)) else divided.append(node.b))
    )
    return not loads_in(value) and all(map(is_constant, divided))


def _block(
    name: str,
    axes: Sequence[_Axis],
    store: Callable[[Sequence[tirx.Var], dict[tirx.Var, ir.Expr], sym.Analyzer], tirx.BufferStore],
    reduction: _Axis | None = None,
    start: ir.Expr | None = None,
) -> tirx.Stmt:
    """Write a block and its loops: ``store`` is given its iterators, and the values of the product's at these."""
    kinds = [tirx.IterVar.CommReduce if axis is reduction else tirx.IterVar.DataPar for axis in axes]
    domains = [ir.Range(0, axis.extent) for axis in axes]
    iterators = [
        tirx.IterVar(domain, tirx.Var(f"v_{axis.name}", "int32"), kind)
        for domain, axis, kind in zip(domains, axes, kinds)
    ]
    places = [iterator.var for iterator in iterators]
    taken = {var: value for axis, place in zip(axes, places) for var, value in axis.values(place).items()}
    stored = store(places, taken, analyzer_for(iterators))
    init = None if start is None else tirx.BufferStore(stored.buffer, start, stored.indices)
    read: list[ir.TensorLoad] = []  # of regions TVM says that they are equal whatever their buffers are
    for load in loads_in(stored.value):
        if not load.source.same_as(stored.buffer) and not any(tvm_ffi.structural_equal(load, one) for one in read):
            read.append(load)
    reads = [_point(load.source, load.indices) for load in read]
    block = s_tir.SBlock(iterators, reads, [_point(stored.buffer, stored.indices)], name, stored, init)
    loops = [tirx.Var(axis.name, "int32") for axis in axes]
    stmt: tirx.Stmt = s_tir.SBlockRealize(loops, True, block)
    for loop, axis in reversed(list(zip(loops, axes))):
        stmt = tirx.For(loop, tirx.const(0, "int32"), axis.extent, tirx.ForKind.SERIAL, stmt)
    return stmt


def _point(buffer: tirx.Var, indices: Sequence[ir.Expr]) -> ir.TensorRegion:
    return tirx.BufferRegion(buffer, [ir.Range.from_min_extent(index, 1) for index in indices])


def _reads_plainly(indices: Sequence[ir.Expr], buffer: tirx.Var, axes: Sequence[_Axis]) -> bool:
    """Return whether indices are exactly what the axes walk, one axis a dimension."""

    def is_axis(index: ir.Expr, extent: ir.Expr, axis: _Axis) -> bool:
        if not axis.iterators:
            return is_one(extent)
        (*others, iterator) = axis.iterators
        return not others and index.same_as(iterator.var) and same_number(extent, iterator.dom.extent)

    return len(indices) == len(axes) and all(map(is_axis, indices, buffer.shape, axes))


def _slides(operand: ir.Expr, reduction: Computation) -> bool:
    """Return whether an operand is read through a window: at sums of a spatial iterator and one of the reduction."""
    indices = [index for load in loads_in(operand) for index in load.indices]
    return any(_uses(index, reduction.spatial) and _uses(index, reduction.reduction) for index in indices)


def _as_stored_order(factors: Factors, reduction: Computation) -> list[tirx.IterVar]:
    """Order a reduction's iterators as an operand is stored along them, so that vectors of it are consecutive."""
    iterators = {iterator.var: iterator for iterator in reduction.reduction}
    loads = [load for operand in (factors.first, factors.second) for load in loads_in(operand)]
    orders = [[index for index in load.indices if index in iterators] for load in loads]
    whole = [
        (load.indices[-1] in iterators, order) for load, order in zip(loads, orders) if len(order) == len(iterators)
    ]
    order = max(whole, key=lambda candidate: candidate[0], default=(False, list(iterators)))[1]
    return [iterators[var] for var in order]


def _uses(value: ir.Expr, iterators: Sequence[tirx.IterVar]) -> set[tirx.Var]:
    """Return which of some iterators an expression depends on."""
    return _variables(value) & {iterator.var for iterator in iterators}


def _variables(*values: ir.Expr) -> set[tirx.Var]:
    found: set[tirx.Var] = set()
    for value in values:
        tvm_ffi.structural_walk(value, (tirx.Var, found.add))
    return found


def _known(extents: Sequence[ir.Expr]) -> int:
    """Return the number of elements of a shape, symbolic extents counted as 1."""
    return math.prod(int(extent) for extent in extents if is_constant(extent))


def _few(extent: ir.Expr) -> int:
    """Return an extent, one known at run time only taken for many."""
    return int(extent) if is_constant(extent) else MAX_ELEMENTS


def _is_float(dtype: str) -> bool:
    return "float" in dtype


def _is_buffer(var: tirx.Var) -> bool:
    return hasattr(var, "shape")


def _left(
    problem: str, computation: Computation | None = None, *, value: object = None, limit: object = None
) -> NotTaken:
    block = computation.name if computation else None
    return NotTaken(problem, block=block, value=value, limit=limit, remedy="leave it to the next rule")
