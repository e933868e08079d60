"""Reductions as a rule takes them: what each element adds, and how two partial results become one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tvm_ffi
from tvm import ir, sym, tirx

from tensorir_ladder.relax.rules import vectors as v
from tensorir_ladder.relax.rules.computations import LEAVE, Computation, loads_in, replaced
from tensorir_ladder.relax.rules.rule import NotTaken

ZERO = tirx.const(0, "int32")
PLAIN = (tirx.Add, tirx.Mul, tirx.Max, tirx.Min, tirx.And, tirx.Or)
OF_FLAGS: dict[type, type] = {tirx.And: tirx.Min, tirx.Or: tirx.Max}  # of 0 and 1
IDENTITY = {tirx.Add: 0, tirx.Mul: 1}
NARROW = {  # and what partial results of these are kept in
    "float16": "float32",
    "bfloat16": "float32",
    "bool": "int32",
    "int8": "int32",
    "uint8": "int32",
    "int16": "int32",
    "uint16": "int32",
}


Combine = Callable[[Sequence[ir.Expr], Sequence[ir.Expr]], list[ir.Expr]]


@dataclass(frozen=True)
class Reduction:
    """Equations that one block adds up together, and how two partial results become one.

    ``terms`` are what one element adds to each; ``combine(left, right)`` works on all of them. Sums in 16 bits are
    added up in 32 (``dtypes``) and rounded when they are complete.
    """

    computations: tuple[Computation, ...]
    terms: tuple[ir.Expr, ...]
    dtypes: tuple[str, ...]
    combine: Combine
    begins: tuple[ir.Expr, ...]  # what each thread begins with
    starts: tuple[ir.Expr | None, ...]  # what is added once, in the end

    @property
    def buffers(self) -> list[tirx.Var]:
        """List the buffers that the results are stored in."""
        return [computation.buffer for computation in self.computations]


def reductions_of(computations: Sequence[Computation]) -> list[Reduction]:
    """Return a function's reductions, in order; NotTaken for one whose parts nobody can tell how to put together."""
    blocks: list[list[Computation]] = []
    for computation in filter(v.is_reduction, computations):
        if blocks and blocks[-1][0].is_beside(computation):
            blocks[-1].append(computation)
        else:
            blocks.append([computation])
    return [_reduction(block) for block in blocks]


def _reduction(block: Sequence[Computation]) -> Reduction:
    sums = [tirx.Var(f"sum_{number}", str(c.buffer.dtype)) for number, c in enumerate(block)]

    def own(load: ir.TensorLoad) -> ir.Expr:
        for computation, variable in zip(block, sums):
            if load.source.same_as(computation.buffer):
                return variable
        return load

    for computation in block:
        for load in [load for other in block for load in loads_in(other.value)]:
            same = all(map(tvm_ffi.structural_equal, load.indices, computation.indices))
            if load.source.same_as(computation.buffer) and not same:
                raise NotTaken("a sum that reads others of its buffer", block=computation.name, remedy=LEAVE)
    values = [tvm_ffi.structural_map(computation.value, (ir.TensorLoad, own)) for computation in block]
    starts = [computation.start for computation in block]
    if any(start is None or loads_in(start) for start in starts):
        raise NotTaken("a sum that goes on from what its buffer holds", block=block[0].name, remedy=LEAVE)
    added = [_plain_term(value, variable, sums) for value, variable in zip(values, sums)]
    if all(term is not None for term in added):
        return _plain(block, [type(value) for value in values], added, starts)
    if len(block) == 2:
        for index, best in ((0, 1), (1, 0)):
            found = _largest(values, sums, index, best)
            if found:
                dtypes = tuple(_wide(c) for c in block)
                terms, begins = (tuple(map(cast, parts, dtypes)) for parts in (found[0], starts))
                return Reduction(tuple(block), terms, dtypes, found[1], begins, (None, None))
    raise NotTaken("a reduction that is no sum, product, extremum or place of one", block=block[0].name, remedy=LEAVE)


def _plain_term(value: ir.Expr, variable: tirx.Var, sums: Sequence[tirx.Var]) -> ir.Expr | None:
    if not isinstance(value, PLAIN):
        return None
    for one, other in ((value.a, value.b), (value.b, value.a)):
        if one.same_as(variable) and not v.uses(other, sums):
            return other
    return None


def _wide(computation: Computation) -> str:
    """Return the dtype of partial results: one that shuffles move."""
    written = str(computation.buffer.dtype)
    if written.startswith("float8"):
        return "float32"
    return NARROW.get(written, written)


def _plain(
    block: Sequence[Computation], kinds: Sequence[type], terms: Sequence[ir.Expr], starts: Sequence[ir.Expr]
) -> Reduction:
    dtypes = [_wide(computation) for computation in block]
    kinds = [OF_FLAGS.get(kind, kind) for kind in kinds]
    wide = [cast(term, dtype) for term, dtype in zip(terms, dtypes)]
    begins = [
        tirx.const(IDENTITY[kind], dtype) if kind in IDENTITY else cast(start, dtype)
        for kind, dtype, start in zip(kinds, dtypes, starts)
    ]
    added = [
        None if kind not in IDENTITY or _is_number(start, IDENTITY[kind]) else cast(start, dtype)
        for kind, dtype, start in zip(kinds, dtypes, starts)
    ]

    def combine(left: Sequence[ir.Expr], right: Sequence[ir.Expr]) -> list[ir.Expr]:
        return [kind(one, other) for kind, one, other in zip(kinds, left, right)]

    return Reduction(tuple(block), tuple(wide), tuple(dtypes), combine, tuple(begins), tuple(added))


def _largest(
    values: Sequence[ir.Expr], sums: Sequence[tirx.Var], index: int, best: int
) -> tuple[tuple[ir.Expr, ...], Combine] | None:
    """Recognise the place of the largest or smallest element, the first of equal ones, with the element itself."""
    chosen, place = values[best], values[index]
    if not isinstance(chosen, tirx.Select) or not isinstance(place, tirx.Select):
        return None
    compare, term, number = chosen.condition, chosen.false_value, place.false_value
    if v.uses(term, sums) or v.uses(number, sums) or not isinstance(compare, (tirx.GT, tirx.LT, tirx.GE, tirx.LE)):
        return None
    strictly = tirx.GT if isinstance(compare, (tirx.GT, tirx.GE)) else tirx.LT

    def is_kept(left: Sequence[ir.Expr], right: Sequence[ir.Expr]) -> ir.Expr:
        first = tirx.And(tirx.EQ(left[best], right[best]), tirx.LT(left[index], right[index]))
        return tirx.Or(strictly(left[best], right[best]), first)

    terms: list[ir.Expr] = [ZERO, ZERO]
    terms[index], terms[best] = number, term
    same = tvm_ffi.structural_equal
    as_expected = (
        same(place.condition, is_kept(sums, terms), map_free_vars=False)
        and same(compare, type(compare)(sums[best], term), map_free_vars=False)
        and chosen.true_value.same_as(sums[best])
        and place.true_value.same_as(sums[index])
    )
    if not as_expected:
        return None

    def combine(left: Sequence[ir.Expr], right: Sequence[ir.Expr]) -> list[ir.Expr]:
        made: list[ir.Expr] = [ZERO, ZERO]
        made[index] = tirx.Select(is_kept(left, right), left[index], right[index])
        made[best] = tirx.Select(strictly(left[best], right[best]), left[best], right[best])
        return made

    return tuple(terms), combine


def cast(expression: ir.Expr, dtype: str) -> ir.Expr:
    """Convert an expression to a dtype, unless it has that."""
    return expression if str(expression.ty.dtype) == dtype else tirx.Cast(dtype, expression)


def _is_number(expression: ir.Expr, number: int) -> bool:
    return isinstance(expression, (tirx.IntImm, tirx.FloatImm)) and float(expression.value) == number


def stands_along_rows(expressions: v.Expressions, first: Reduction, names: v.Values) -> bool:
    """Return whether neighbours in memory are of neighbouring rows, and not of one row."""
    along = across = 0
    for term in first.terms:
        for load in loads_in(expressions.value(term, names)):
            iterators = first.computations[0]
            along += _is_innermost(expressions, load, iterators.reduction, names)
            across += _is_innermost(expressions, load, iterators.spatial, names)
    return across > along


def _is_innermost(
    expressions: v.Expressions, load: ir.TensorLoad, iterators: Sequence[tirx.IterVar], names: v.Values
) -> bool:
    if not iterators:
        return False
    analyzer = sym.Analyzer()
    for iterator in iterators:
        analyzer.bind(names[iterator.var], ir.Range.from_min_extent(ZERO, expressions.extent(iterator.dom.extent)))
    last = names[iterators[-1].var]
    address = analyzer.simplify(expressions.address(load.source, load.indices))
    return analyzer.can_prove_equal(replaced(address, {last: last + 1}) - address, 1)
