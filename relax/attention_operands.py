"""Operands of attention in Relax modules: where queries, keys, values and masks lie in the tensors they are views of.

::

    before   x = reshape(projection, [b, t, 3, h, d]);  k = squeeze(strided_slice(permute_dims(x), [0], [1], [2]))
    after    Operand(projection, "bshd", start=(0, h * d), row=3 * h * d)     # read in place, by a tensor map

    before   bias = where(broadcast_to(bitwise_and(all_true, padding)), 0, -inf)
    after    MaskOperand(padding, Mask("bool", along=("batch",)))             # of [b, 1, 1, keys]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import tvm
import tvm_ffi
from tvm import ir, relax, tirx

from tensorir_ladder.kernels.attention import BY_HEAD, BY_TOKEN
from tensorir_ladder.kernels.attention_mask import AXES, DTYPES, Mask
from tensorir_ladder.relax.elements import LEAVE, Elements, array_of, number_of, steps_along
from tensorir_ladder.relax.linking import Mapped
from tensorir_ladder.relax.rules import NotTaken, same_number
from tensorir_ladder.schedules.inspection import is_constant, is_one
from tensorir_ladder.schedules.isa import TMA_STRIDE_BYTES
from tensorir_ladder.schedules.loops.vectorization import dtype_bytes

BATCH, HEADS, TOKENS, HEAD = range(4)
MASKED = -6e4  # a score, of float16 nearly the least, that no weight is left of
FIRST, LAST = "first", "last"  # causal attention: the first query sees one key, or the last query sees all
EXTENTS = {name: tirx.Var(name, "int64") for name in ("batch", "queries", "keys")}  # where run time brings them


@dataclass(frozen=True)
class Operand:
    """Queries, keys or values of a batch's heads: where they lie in ``source``, a contiguous tensor.

    ``extents`` are batch, heads, tokens and the elements of a head; ``tokens`` are "queries" or "keys". ``sharing``
    neighbouring heads of the queries read one. ``row`` is the step from token to token in elements, ``matrix`` that
    from one of the batch (by tokens) or head (by heads) to the next, in terms of EXTENTS. ``start`` is the first of
    such matrices, and the first column there; elements are to be multiplied by ``factor``.
    """

    source: relax.Expr
    shape: tuple[ir.Expr, ...]
    layout: str
    extents: tuple[ir.Expr, ...]
    tokens: str
    row: ir.Expr
    matrix: ir.Expr
    sharing: int = 1
    start: tuple[int, int] = (0, 0)
    factor: float = 1.0

    def mapped(self, numbers: Mapping[tirx.Var, ir.Expr]) -> Mapped:
        """Describe it to TMA as matrices of tokens, with ``numbers`` in the place of EXTENTS."""
        batch, heads, tokens, head = self.extents
        batch = batch if is_constant(batch) else numbers[EXTENTS["batch"]]
        tokens = tokens if is_constant(tokens) else numbers[EXTENTS[self.tokens]]
        by_token = self.layout == BY_TOKEN
        columns, count = (int(heads) * int(head), batch) if by_token else (int(head), batch * int(heads))
        size = dtype_bytes(str(self.source.ty.dtype))
        wide = {name: number.astype("int64") for name, number in numbers.items()}
        steps = [with_numbers(step, wide) * size for step in (self.row, self.matrix)]
        return Mapped((columns + self.start[1], tokens, count + self.start[0]), steps)


@dataclass(frozen=True)
class MaskOperand:
    """A mask that attention reads: a contiguous tensor, of which shape in terms of EXTENTS, and what kind of mask."""

    source: relax.Expr
    shape: tuple[ir.Expr, ...]
    kind: Mask


def with_numbers(value: ir.Expr, numbers: Mapping[tirx.Var, ir.Expr]) -> ir.Expr:
    """Put numbers in the place of EXTENTS."""
    return tvm_ffi.structural_map(value, (tirx.Var, lambda var: numbers.get(var, var)))


def ways_to_read(elements: Elements, tensor: relax.Expr, order: Sequence[int], tokens: str) -> list[Operand]:
    """List where an operand can be read: in itself, then in the tensors that it is a view of.

    ``order`` says which dimensions are batch, heads, tokens and a head's elements; ``tokens`` is "queries" or "keys".
    NotTaken where there is none.
    """
    shape = tensor.ty.shape
    if not isinstance(shape, relax.ShapeExpr) or len(shape) != len(order):
        raise NotTaken("an operand is no tensor of four known dimensions", value=tensor.ty, remedy=LEAVE)
    extents = [shape[dimension] for dimension in order]
    if any(not is_constant(extents[axis]) for axis in (HEADS, HEAD)):
        said = ", ".join(str(extents[axis]) for axis in (HEADS, HEAD) if not is_constant(extents[axis]))
        raise NotTaken("heads, or their elements, are known at run time only", value=said, remedy=LEAVE)
    own = [elements.index(name, extent) for name, extent in zip(("b", "h", "t", "d"), extents)]
    at = [own[order.index(dimension)] for dimension in range(len(order))]
    found = []
    for source, place, factor in elements.places(tensor, at):
        with suppress(NotTaken):  # another tensor may do
            found.append(_operand(elements, source, place, own, extents, tokens, factor))
    if not found:
        raise NotTaken("an operand lies neither by tokens nor by heads", value=tensor, remedy=LEAVE)
    return found


def _operand(
    elements: Elements,
    source: relax.Expr,
    place: Sequence[ir.Expr],
    own: Sequence[tirx.Var],
    extents: Sequence[ir.Expr],
    tokens_name: str,
    factor: float,
) -> Operand:
    """Describe an operand as a part of a tensor, of whose element at ``place`` it has the one at ``own``."""
    (batch, heads, tokens, head), analyzer = extents, elements.analyzer
    shape = _named(source, {EXTENTS["batch"]: batch, EXTENTS[tokens_name]: tokens})
    sharing = _sharing(place, own[HEADS])
    group, member = elements.index("g", heads // sharing), elements.index("m", tirx.const(sharing, "int64"))
    shared = {own[HEADS]: group * sharing + member}
    place = [analyzer.simplify(with_numbers(index, shared)) for index in place]
    along = [own[BATCH], group, own[TOKENS], own[HEAD], member]
    first, (b, h, t, d, m) = steps_along(along, place, shape, analyzer)
    many, size = int(heads) // sharing, int(head)
    if many > 1 and is_constant(h) and int(h) == 0:  # all heads read one
        many, sharing = 1, many * sharing
    if not (_is(d, 1) and _is(m, 0) and is_constant(first)):
        raise NotTaken("elements of a head do not lie side by side", value=place, remedy=LEAVE)
    if many == 1 or _is(h, size):
        layout, columns, matrix = BY_TOKEN, many * size, b
    elif is_one(batch) or same_number(b, h * many):
        layout, columns, matrix = BY_HEAD, size, h
    else:
        raise NotTaken("heads lie unevenly", value=place, remedy=LEAVE)
    row = tirx.const(columns, "int64") if is_one(tokens) else t
    if is_one(batch) and layout == BY_TOKEN:
        matrix = row * (tokens if is_constant(tokens) else EXTENTS[tokens_name])
    start = _start(int(first), columns, row, matrix)
    by = TMA_STRIDE_BYTES // dtype_bytes(str(source.ty.dtype))
    if not all(analyzer.can_prove_equal(tirx.floormod(step, by), 0) for step in (row, matrix)) or start[1] % by:
        raise NotTaken("rows do not begin where tensor maps take them", value=place, remedy=LEAVE)
    described = (batch, tirx.const(many, "int64"), tokens, head)
    return Operand(source, tuple(shape), layout, described, tokens_name, row, matrix, sharing, start, factor)


def _start(first: int, columns: int, row: ir.Expr, matrix: ir.Expr) -> tuple[int, int]:
    """Return the matrix and the column of a first element; NotTaken where that is in a later row."""
    if is_constant(row) and first + columns <= int(row):
        return 0, first
    if is_constant(matrix) and first % int(matrix) == 0:
        return first // int(matrix), 0
    raise NotTaken("the first token is not the tensor's", value=first, remedy=LEAVE)


def _sharing(place: Sequence[ir.Expr], head: tirx.Var) -> int:
    """Return by what the number of a head is divided."""
    divisors: set[int] = set()

    def note(divided: tirx.FloorDiv) -> None:
        if divided.a.same_as(head) and is_constant(divided.b):
            divisors.add(int(divided.b))

    for index in place:
        tvm_ffi.structural_walk(index, (tirx.FloorDiv, note))
    return divisors.pop() if len(divisors) == 1 else 1


def _named(source: relax.Expr, extents: Mapping[tirx.Var, ir.Expr]) -> list[ir.Expr]:
    """Return a tensor's shape with EXTENTS in the place of what they name; NotTaken for other unknown extents."""
    shape = source.ty.shape
    if not isinstance(shape, relax.ShapeExpr):
        raise NotTaken("a tensor's extents are unknown", value=source, remedy=LEAVE)
    found = []
    for extent in shape:
        same = (name for name, value in extents.items() if not is_constant(value) and same_number(extent, value))
        named = extent if is_constant(extent) else next(same, None)
        if named is None:
            raise NotTaken("a tensor has an extent that is none of attention's", value=extent, remedy=LEAVE)
        found.append(named)
    return found


@dataclass(frozen=True)
class Masking:
    """Describe masks and biases of scores: causal from the first or last query, with a window or not; an operand."""

    causal: frozenset[str] = frozenset()
    operand: MaskOperand | None = None
    window: int | None = None

    def __and__(self, other: Masking) -> Masking:
        """Mask by both; NotTaken for two operands."""
        if self.operand and other.operand:
            raise NotTaken("two masks are operands", value=self.operand.source, remedy=LEAVE)
        window = min((each for each in (self.window, other.window) if each is not None), default=None)
        return Masking(self.causal | other.causal, self.operand or other.operand, window)


class MaskReader:
    """Masks of attention with some ``extents`` of batch, heads, queries and keys, seen through what makes them."""

    def __init__(self, elements: Elements, extents: Sequence[ir.Expr]) -> None:
        self.elements, self.extents = elements, extents
        self.own = [elements.index(name, extent) for name, extent in zip("bhij", extents)]

    def added(self, bias: relax.Expr) -> Masking:
        """Read a mask that is added to scores, whose shape is broadcast to theirs."""
        at = self.elements.broadcast(bias, self.own)
        *_, (tensor, place, _) = (found for found in self.elements.places(bias, at) if found[2] == 1)
        made = self.elements.maker(tensor)
        if isinstance(made, relax.Call) and made.op == ir.Op.get("relax.where"):
            seen, hidden = (number_of(operand) for operand in made.args[1:])
            if seen is not None and hidden is not None and seen == 0 and hidden <= MASKED:
                return self._seen(made.args[0], self.elements.broadcast(made.args[0], place))
        if (array := array_of(made)) is not None:
            return self._constant(tensor, place, array == 0, (array == 0) | (array <= MASKED))
        return Masking(operand=self._operand(bias, at))

    def kept(self, mask: relax.Expr) -> Masking:
        """Read a mask of bools, true where a query sees a key, whose shape is broadcast to that of scores."""
        return self._seen(mask, self.elements.broadcast(mask, self.own))

    def _seen(self, mask: relax.Expr, at: Sequence[ir.Expr]) -> Masking:
        """Take a mask apart: ``key <= query`` is causal, ``key > query - n`` its window, one operand may be left."""
        found, lower, left = Masking(), [], []
        for tensor, place in self.elements.parts(mask, at):
            if (array := array_of(self.elements.maker(tensor))) is not None and array.ndim >= 2:
                found &= self._constant(tensor, place, array, np.ones_like(array))
                continue
            value = self.elements.value(tensor, place)
            if isinstance(value, tirx.IntImm) and value.value:
                continue
            if (kind := self._causal(value)) is not None:
                found &= Masking(frozenset({kind}))
            elif (hidden := keys_later(value, True, self.own[2], self.own[3])) is not None:
                lower.append((hidden, tensor, place))
            else:
                left.append((tensor, place))
        for hidden, *part in lower:
            if (window := self._window(hidden, found.causal)) is not None:
                found &= Masking(window=window)
            else:
                left.append(part)
        if len(left) == 1:
            return found & Masking(operand=self._operand(*left[0]))
        return found & Masking(operand=self._operand(mask, at)) if left else found

    def _causal(self, value: ir.Expr) -> str | None:
        """Tell from which end a condition is causal; None for other conditions."""
        later = keys_later(value, False, self.own[2], self.own[3])
        same = (kind for kind, own in self._later.items() if later is not None and same_number(later, own))
        return next(same, None)

    @property
    def _later(self) -> dict[str, ir.Expr]:
        """List how many keys more than its own number a query sees, by the end from which attention is causal."""
        queries, keys = self.extents[2:]
        return {FIRST: tirx.const(0, "int64"), LAST: keys - queries}

    def _window(self, hidden: ir.Expr, causal: frozenset[str]) -> int | None:
        """Return the window of causal attention that hides ``key <= query + hidden``; None where there is none."""
        widths = [self.elements.analyzer.simplify(self._later[kind] - hidden) for kind in causal]
        return next((int(width) for width in widths if is_constant(width) and int(width) >= 1), None)

    def _constant(self, mask: relax.Expr, place: Sequence[ir.Expr], seen: np.ndarray, known: np.ndarray) -> Masking:
        """Read a constant, where a query sees a key: causal, in a window, or always true; an operand otherwise."""
        queries, keys = self.extents[2:]
        if known.all() and seen.all():
            return Masking()
        in_place = len(place) > 1 and all(index.same_as(own) for index, own in zip(place[-2:], self.own[2:]))
        if known.all() and in_place and is_constant(queries) and is_constant(keys):
            window = int(seen.sum(-1).max())  # keys that a query sees at most
            for kind, later in ((FIRST, 0), (LAST, int(keys) - int(queries))):
                causal, hidden = (np.tri(int(queries), int(keys), last, dtype=bool) for last in (later, later - window))
                if (seen == causal).all():
                    return Masking(frozenset({kind}))
                if window and (seen == causal & ~hidden).all():
                    return Masking(frozenset({kind}), window=window)
        return Masking(operand=self._operand(mask, place))

    def _operand(self, mask: relax.Expr, at: Sequence[ir.Expr]) -> MaskOperand:
        """Find the tensor that has a mask's elements side by side, as far back as may be; NotTaken where none has."""
        found = []
        for tensor, place, factor in self.elements.places(mask, at):
            with suppress(NotTaken):  # another tensor may do
                if factor == 1:
                    found.append(self._described(tensor, place))
        if not found:
            raise NotTaken("a mask does not lie by batch, heads, queries and keys", value=mask, remedy=LEAVE)
        return found[-1]

    def _described(self, tensor: relax.Expr, place: Sequence[ir.Expr]) -> MaskOperand:
        batch, _, queries, keys = self.extents
        if str(tensor.ty.dtype) not in DTYPES:
            raise NotTaken("a mask of another dtype", value=tensor.ty.dtype, limit=" | ".join(DTYPES), remedy=LEAVE)
        names = dict(zip(EXTENTS.values(), (batch, queries, keys)))
        shape = _named(tensor, names)
        first, (*steps, last) = steps_along(self.own, place, shape, self.elements.analyzer)
        along, inner = [], self._extent(keys, EXTENTS["keys"])
        extents = (self._extent(batch, EXTENTS["batch"]), self.extents[1], self._extent(queries, EXTENTS["queries"]))
        for axis, extent, step in [*zip(AXES, extents, steps)][::-1]:
            if _is(step, 0):
                continue
            if not self._same(step, inner):
                raise NotTaken("rows of a mask are apart", value=step, limit=inner, remedy=LEAVE)
            along, inner = [axis, *along], inner * extent
        if not _is(first, 0) or not (_is(last, 1) or is_one(keys)):
            raise NotTaken("a mask is a part of a tensor", value=tensor, remedy=LEAVE)
        even = is_constant(keys) and int(keys) % 2 == 0
        return MaskOperand(tensor, tuple(shape), Mask(str(tensor.ty.dtype), tuple(along), even))

    def _same(self, one: ir.Expr, other: ir.Expr) -> bool:
        """Tell whether two steps are the same, where queries and keys may be as many."""
        names = {EXTENTS["keys"]: EXTENTS["queries"]} if same_number(*self.extents[2:]) else {}
        return same_number(with_numbers(one, names), with_numbers(other, names))

    @staticmethod
    def _extent(extent: ir.Expr, name: tirx.Var) -> ir.Expr:
        return extent if is_constant(extent) else name


def keys_later(condition: ir.Expr, negated: bool, query: ir.Expr, key: ir.Expr) -> ir.Expr | None:
    """Return ``later`` where a condition, or its opposite, is ``key <= query + later``; None for other conditions."""
    if isinstance(condition, tirx.Not):
        return keys_later(condition.a, not negated, query, key)
    if not isinstance(condition, (tirx.LE, tirx.LT, tirx.GE, tirx.GT)):
        return None
    turned = isinstance(condition, (tirx.GE, tirx.GT)) != negated
    low, high = (condition.b, condition.a) if turned else (condition.a, condition.b)
    strictly = isinstance(condition, (tirx.LT, tirx.GT)) != negated
    later = tvm.sym.Analyzer().simplify(high - low - int(strictly) - (query - key))
    used: list[tirx.Var] = []
    tvm_ffi.structural_walk(later, (tirx.Var, used.append))
    return None if any(var.same_as(index) for var in used for index in (query, key)) else later


def _is(value: ir.Expr, number: int) -> bool:
    return is_constant(value) and int(value) == number
