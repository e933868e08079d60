"""Elements of Relax tensors as expressions of their indices, through the operators that make the tensors.

::

    x    = reshape(projection, [8, 197, 3, 12, 64])       # of [8, 197, 2304]
    q    = squeeze(strided_slice(permute_dims(x, [2, 0, 3, 1, 4]), [0], [1], [2]), [0])
    q[b, h, t, d]  is  projection[b, t, 768 + 64 * h + d]

    mask = arange(n)[None, :] <= arange(n)[:, None]
    mask[i, j]     is  j <= i
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import ir, relax, sym, tirx

from tensorir_ladder.relax.graphs import is_call
from tensorir_ladder.relax.rules import NotTaken, same_number
from tensorir_ladder.schedules.inspection import is_constant, is_one
from tensorir_ladder.schedules.workloads import MAX_ELEMENTS

Index = Sequence[ir.Expr]
ZERO = tirx.const(0, "int64")
LEAVE = "leave it to schedules"
BINARY: dict[str, Callable[[ir.Expr, ir.Expr], ir.Expr]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "less": tirx.LT,
    "less_equal": tirx.LE,
    "greater": tirx.GT,
    "greater_equal": tirx.GE,
    "equal": tirx.EQ,
    "not_equal": tirx.NE,
    "bitwise_and": tirx.And,  # of bools alone
    "logical_and": tirx.And,
    "bitwise_or": tirx.Or,
    "logical_or": tirx.Or,
}
OF_BOOLS = ("bitwise_and", "bitwise_or", "bitwise_not")
NEGATIONS = ("logical_not", "bitwise_not")


class Elements:
    """Elements of the tensors that a block of Relax's makes; ``made`` says by which expression each variable is."""

    def __init__(self, made: Mapping[relax.Var, relax.Expr]) -> None:
        self.made = made
        self.analyzer = sym.Analyzer()
        self.loaded: dict[tirx.Var, relax.Expr] = {}  # tensors by the buffers that stand for them
        self.extents: set[tirx.Var] = set()  # that only run time knows, and that are at least 1

    def index(self, name: str, extent: ir.Expr) -> tirx.Var:
        """Make a variable from 0 to below an extent."""
        made = tirx.Var(name, "int64")
        self.analyzer.bind(made, ir.Range(ZERO, extent))
        return made

    def places(self, tensor: relax.Expr, at: Index) -> Iterator[tuple[relax.Expr, list[ir.Expr], float]]:
        """List where an element lies: in the tensor itself, then in each one that it is a view of.

        With the number by which the element there is to be multiplied.
        """
        factor = 1.0
        while True:
            yield tensor, list(at), factor
            made = self.maker(tensor)
            if (scaled := self._scaled(made)) is not None:
                tensor, factor = scaled[0], factor * scaled[1]
                continue
            viewed = self._viewed(made, at)
            if viewed is None:
                return
            tensor, at = viewed

    def parts(self, mask: relax.Expr, at: Index) -> Iterator[tuple[relax.Expr, list[ir.Expr]]]:
        """List the tensors of bools whose conjunction a mask is, with the place of its element at ``at`` in each."""
        made = self.maker(mask)
        if (viewed := self._viewed(made, at)) is not None:
            yield from self.parts(*viewed)
        elif is_call(made, "bitwise_and") or is_call(made, "logical_and"):
            for operand in made.args:
                yield from self.parts(operand, self.broadcast(operand, at))
        else:
            yield mask, list(at)

    def value(self, tensor: relax.Expr, at: Index) -> ir.Expr:
        """Return an element's value, simplified; what other operators make is a load of theirs (:attr:`loaded`)."""
        if (number := number_of(tensor)) is not None:
            return tirx.const(number.item(), str(number.dtype))
        if (array := array_of(tensor)) is not None and (even := _evenly(array, at)) is not None:
            return self.analyzer.simplify(even)
        made = self.maker(tensor)
        if (viewed := self._viewed(made, at)) is not None:
            return self.value(*viewed)
        computed = self._computed(made, at)
        return self._load(tensor, at) if computed is None else self.analyzer.simplify(computed)

    def maker(self, tensor: relax.Expr) -> relax.Expr | None:
        """Return the expression that makes a tensor; None for a parameter."""
        return self.made.get(tensor) if isinstance(tensor, relax.Var) else tensor

    def _shape(self, tensor: relax.Expr) -> list[ir.Expr]:
        """Return a tensor's extents, simplified as those that are at least 1; NotTaken where nothing says them."""
        shape, made = tensor.ty.shape, self.maker(tensor)
        if isinstance(shape, relax.ShapeExpr):
            return [self._extent(extent) for extent in shape]
        if tensor.ty.ndim == 0:
            return []
        name = made.op.name.removeprefix("relax.") if isinstance(made, relax.Call) else ""
        if name in ("cumsum", "astype", *NEGATIONS):
            return self._shape(made.args[0])
        if name == "index_tensor":
            indices = self._fields(made.args[1])
            return [*self._common(indices), *self._shape(made.args[0])[len(indices) :]]
        if name in (*BINARY, "where"):
            return self._common(made.args)
        raise NotTaken("a tensor's extents are unknown", value=tensor, remedy=LEAVE)

    def _common(self, operands: Sequence[relax.Expr]) -> list[ir.Expr]:
        """Return the shape that operands are broadcast to."""
        shapes = [self._shape(operand) for operand in operands]
        made = []
        for place in range(-max(map(len, shapes)), 0):
            own = [shape[place] for shape in shapes if len(shape) >= -place]
            made.append(next((extent for extent in own if not is_one(extent)), own[0]))
        return made

    def _extent(self, extent: ir.Expr) -> ir.Expr:
        def note(var: tirx.Var) -> None:
            if var not in self.extents:
                self.extents.add(var)
                self.analyzer.update(var, sym.ConstIntBound(1, MAX_ELEMENTS))

        if is_constant(extent):
            return extent
        tvm_ffi.structural_walk(extent, (tirx.Var, note))
        return self.analyzer.simplify(extent)

    def broadcast(self, operand: relax.Expr, at: Index) -> list[ir.Expr]:
        """Return where an operand's element lies that is broadcast to a place."""
        shape = self._shape(operand)
        return [ZERO if is_one(extent) else index for extent, index in zip(shape, list(at)[len(at) - len(shape) :])]

    def _load(self, tensor: relax.Expr, at: Index) -> ir.Expr:
        buffer = tirx.decl_buffer(self._shape(tensor), str(tensor.ty.dtype))
        self.loaded[buffer] = tensor
        return buffer[tuple(at)] if at else buffer[()]

    def _scaled(self, call: relax.Expr | None) -> tuple[relax.Expr, float] | None:
        """Return what a call multiplies by a number above 0, and that number; None for other calls."""
        if not (is_call(call, "multiply") or is_call(call, "divide")):
            return None
        one, other = call.args if is_call(call, "divide") or number_of(call.args[0]) is None else call.args[::-1]
        number = number_of(other)
        if number is None or one.ty.ndim != call.ty.ndim or not float(number) > 0:
            return None
        return one, 1 / float(number) if is_call(call, "divide") else float(number)

    # Views

    def _viewed(self, made: relax.Expr | None, at: Index) -> tuple[relax.Expr, list[ir.Expr]] | None:
        """Return the tensor that an operator only moves elements of, and the place there; None for other operators."""
        if isinstance(made, relax.TupleGetItem):
            return self._split(made, at)
        if not isinstance(made, relax.Call) or not isinstance(made.op, ir.Op):
            return None
        view = getattr(self, f"_{made.op.name.removeprefix('relax.')}", None)
        if view is None:
            return None
        found = view(made, list(at))
        return None if found is None else (made.args[0], [self.analyzer.simplify(index) for index in found])

    def _permute_dims(self, call: relax.Call, at: list[ir.Expr]) -> list[ir.Expr]:
        axes = [*range(len(at))][::-1] if call.attrs.axes is None else [int(axis) % len(at) for axis in call.attrs.axes]
        return [at[axes.index(dimension)] for dimension in range(len(at))]

    def _expand_dims(self, call: relax.Call, at: list[ir.Expr]) -> list[ir.Expr]:
        new = {int(axis) % len(at) for axis in call.attrs.axis}
        return [index for axis, index in enumerate(at) if axis not in new]

    def _squeeze(self, call: relax.Call, at: list[ir.Expr]) -> list[ir.Expr] | None:
        if call.attrs.axis is None:
            return None
        count, left = call.args[0].ty.ndim, iter(at)
        gone = {int(axis) % count for axis in call.attrs.axis}
        return [ZERO if axis in gone else next(left) for axis in range(count)]

    def _broadcast_to(self, call: relax.Call, at: list[ir.Expr]) -> list[ir.Expr]:
        return self.broadcast(call.args[0], at)

    def _repeat(self, call: relax.Call, at: list[ir.Expr]) -> list[ir.Expr] | None:
        if call.attrs.axis is None:
            return None
        axis = int(call.attrs.axis) % len(at)
        return [*at[:axis], tirx.floordiv(at[axis], tirx.const(int(call.attrs.repeats), "int64")), *at[axis + 1 :]]

    def _take(self, call: relax.Call, at: list[ir.Expr]) -> list[ir.Expr] | None:
        if call.attrs.axis is None or call.args[1].ty.ndim != 0 or (number := number_of(call.args[1])) is None:
            return None
        axis = int(call.attrs.axis) % call.args[0].ty.ndim
        return [*at[:axis], tirx.const(int(number), "int64"), *at[axis:]] if number >= 0 else None

    def _index_tensor(self, call: relax.Call, at: list[ir.Expr]) -> list[ir.Expr] | None:
        """Read at the places that integers say, one tensor of them for each of the first axes."""
        indices = self._fields(call.args[1])
        most = len(self._common(indices))
        places = [_wide(self.value(index, self.broadcast(index, at[:most]))) for index in indices]
        if not all(self.analyzer.can_prove(place >= tirx.const(0, str(place.ty.dtype))) for place in places):
            return None
        return [*places, *at[most:]]

    def _strided_slice(self, call: relax.Call, at: list[ir.Expr]) -> list[ir.Expr] | None:
        axes, begins, _ends, *steps = [
            [each.value if hasattr(each, "value") else each for each in arg.fields] for arg in call.args[1:]
        ]
        if not all(isinstance(number, int) for numbers in (axes, begins, *steps) for number in numbers):
            return None
        for place, (axis, begin) in enumerate(zip(axes, begins)):
            step = steps[0][place] if steps else 1
            if step < 1 or begin < 0:
                return None
            at[axis] = at[axis] * step + begin
        return at

    def _split(self, item: relax.TupleGetItem, at: Index) -> tuple[relax.Expr, list[ir.Expr]] | None:
        made = self.maker(item.tuple_value)
        if not is_call(made, "split"):
            return None
        axis, parts, at = int(made.attrs.axis) % len(at), made.attrs.indices_or_sections, list(at)
        if hasattr(parts, "value") or isinstance(parts, int):
            first = made.ty.fields[0].shape[axis] * item.index  # the last part may be shorter
        else:
            first = [0, *parts][item.index]
        at[axis] = self.analyzer.simplify(at[axis] + first)
        return made.args[0], at

    def _reshape(self, call: relax.Call, at: list[ir.Expr]) -> list[ir.Expr] | None:
        """Split and join axes of known extents; axes whose extent is unknown must stay, or be joined."""
        if not isinstance(call.ty.shape, relax.ShapeExpr):
            return None
        old, new = self._shape(call.args[0]), [*call.ty.shape]
        found: list[ir.Expr] = []
        while old or new:
            from_old, from_new = [], []
            while not from_old or not from_new or not same_number(_product(from_old), _product(from_new)):
                grow_old = bool(old) and (not from_old or not new or _is_smaller(from_old, from_new))
                if not (old if grow_old else new):
                    break
                (from_old if grow_old else from_new).append((old if grow_old else new).pop(0))
            if not same_number(_product(from_old), _product(from_new)):
                return None
            own, at = at[: len(from_new)], at[len(from_new) :]
            place = ZERO
            for index, extent in zip(own, from_new):
                place = place * extent + index
            if len(from_old) == 1:
                found.append(place)
            elif not all(map(is_constant, from_old[1:])):
                return None
            else:
                inner = [prod(map(int, from_old[axis + 1 :])) for axis in range(len(from_old))]
                for axis, (extent, step) in enumerate(zip(from_old, inner)):
                    index = tirx.floordiv(place, tirx.const(step, "int64"))
                    found.append(index if axis == 0 else tirx.floormod(index, extent))
        return found

    # Computations

    def _computed(self, made: relax.Expr | None, at: Index) -> ir.Expr | None:
        """Return what an operator computes; None for operators that are not known here."""
        if not isinstance(made, relax.Call) or not isinstance(made.op, ir.Op):
            return None
        name = made.op.name.removeprefix("relax.")
        if name == "arange":
            start, _end, step = made.args
            return self._cast(start + at[0] * step, made)
        if name == "full":
            return self._cast(self.value(made.args[1], []), made)
        if name in ("zeros", "ones"):
            return self._cast(tirx.const(int(name == "ones"), "int64"), made)
        if name == "astype":
            return self._cast(self.value(made.args[0], at), made)
        if name == "concat":
            return self._joined([*self._fields(made.args[0])], list(at), int(made.attrs.axis) % len(at))
        if name == "cumsum":
            return self._summed(made, at)
        if name == "where":
            return self._each(tirx.Select, *(self.value(operand, self.broadcast(operand, at)) for operand in made.args))
        if name in OF_BOOLS and str(made.ty.dtype) != "bool":
            return None
        if name in NEGATIONS:
            return self._each(tirx.Not, self.value(made.args[0], at))
        if name in BINARY:
            operands = [self.value(operand, self.broadcast(operand, at)) for operand in made.args]
            return self._each(BINARY[name], *operands)
        return None

    def _cast(self, value: ir.Expr, made: relax.Call) -> ir.Expr:
        dtype = str(made.ty.dtype)
        return value if str(value.ty.dtype) == dtype else tirx.Cast(dtype, value)

    def _fields(self, operands: relax.Expr) -> Sequence[relax.Expr]:
        made = self.maker(operands)
        return made.fields if isinstance(made, relax.Tuple) else ()

    def _joined(self, parts: list[relax.Expr], at: list[ir.Expr], axis: int) -> ir.Expr | None:
        """Choose among concatenated tensors by a place along their axis."""
        if not parts:
            return None
        first, *others = parts
        extent = self._shape(first)[axis]
        inside = self.analyzer.simplify(at[axis] < extent)
        later = [*at[:axis], at[axis] - extent, *at[axis + 1 :]]
        if not others or _is(inside, True):
            return self.value(first, at)
        if _is(inside, False):
            return self._joined(others, later, axis)
        with self.analyzer.constraint_scope(inside):
            one = self.value(first, [self.analyzer.simplify(index) for index in at])
        with self.analyzer.constraint_scope(tirx.Not(inside)):
            other = self._joined(others, [self.analyzer.simplify(index) for index in later], axis)
        return tirx.Select(inside, one, other)

    def _each(self, compute: Callable[..., ir.Expr], *values: ir.Expr) -> ir.Expr:
        """Compute an expression of values, one of which may be a choice: of both its sides, which may be equal."""
        chosen = next((place for place, value in enumerate(values) if isinstance(value, tirx.Select)), None)
        if chosen is None:
            return compute(*values)
        choice, sides = values[chosen], []
        for condition, side in (
            (choice.condition, choice.true_value),
            (tirx.Not(choice.condition), choice.false_value),
        ):
            with self.analyzer.constraint_scope(condition):
                made = self._each(compute, *values[:chosen], side, *values[chosen + 1 :])
                sides.append(self.analyzer.simplify(made))
        return sides[0] if tvm_ffi.structural_equal(*sides) else tirx.Select(choice.condition, *sides)

    def _summed(self, call: relax.Call, at: Index) -> ir.Expr | None:
        """Sum up nothing but zeros; other sums have no expression."""
        value = self.value(call.args[0], at)
        return self._cast(tirx.const(0, "int64"), call) if isinstance(value, tirx.IntImm) and not value.value else None


def array_of(tensor: relax.Expr | None) -> np.ndarray | None:
    """Return the array of a constant; None for other tensors."""
    constant = isinstance(tensor, ir.GenericConst) and isinstance(tensor.value, tvm.runtime.Tensor)
    return tensor.value.numpy() if constant else None


def number_of(tensor: relax.Expr) -> Any | None:
    """Return the number, of NumPy's, that a constant has as its one element; None for other tensors."""
    array = array_of(tensor)
    return array.reshape(-1)[0] if array is not None and array.size == 1 else None


def _evenly(array: np.ndarray, at: Index) -> ir.Expr | None:
    """Return the element of an array whose integers rise evenly along each axis, or are all one; None for others."""
    if array.dtype.kind not in "iub" or not array.size or array.ndim != len(at):
        return None
    first, whole = int(array.reshape(-1)[0]), array.astype("int64")
    steps = [
        int(whole.take(1, axis).reshape(-1)[0]) - first if size > 1 else 0 for axis, size in enumerate(array.shape)
    ]
    if array.dtype.kind == "b" and any(steps):
        return None
    places = np.ogrid[tuple(map(slice, array.shape))]
    if not np.array_equal(whole, sum((step * place for step, place in zip(steps, places)), np.full_like(whole, first))):
        return None
    value = tirx.const(first, "int64")
    for step, index in zip(steps, at):
        value = value + index * step
    dtype = str(array.dtype)
    return tirx.const(bool(first), dtype) if dtype == "bool" else value if dtype == "int64" else tirx.Cast(dtype, value)


def _wide(place: ir.Expr) -> ir.Expr:
    """Return a place in int64, from which it may have been cast."""
    while isinstance(place, tirx.Cast) and str(place.value.ty.dtype) == "int64":
        place = place.value
    return place if str(place.ty.dtype) == "int64" else tirx.Cast("int64", place)


def steps_along(
    of: Sequence[tirx.Var], place: Index, shape: Sequence[ir.Expr], analyzer: sym.Analyzer
) -> tuple[ir.Expr, list[ir.Expr]]:
    """Return an element's number in a contiguous tensor where some variables are 0, and its step along each of them.

    NotTaken where the number is not linear in them.
    """
    first, steps, inner = ZERO, [ZERO for _ in of], tirx.const(1, "int64")
    for index, extent in [*zip(place, shape)][::-1]:
        own_first, own_steps = _linear(index, of, analyzer)
        first = first + own_first * inner
        steps = [step + own * inner for step, own in zip(steps, own_steps)]
        inner = inner * extent
    return analyzer.simplify(first), [analyzer.simplify(step) for step in steps]


def _linear(index: ir.Expr, of: Sequence[tirx.Var], analyzer: sym.Analyzer) -> tuple[ir.Expr, list[ir.Expr]]:
    """Return an expression's value where variables are 0, and its steps along them."""

    def at(values: Sequence[int]) -> ir.Expr:
        numbers = {var: tirx.const(value, "int64") for var, value in zip(of, values)}
        return analyzer.simplify(tvm_ffi.structural_map(index, (tirx.Var, lambda var: numbers.get(var, var))))

    first = at([0] * len(of))
    steps = [analyzer.simplify(at([int(var.same_as(one)) for var in of]) - first) for one in of]
    linear = first
    for var, step in zip(of, steps):
        linear = linear + var * step
    if not analyzer.can_prove_equal(index, linear):
        raise NotTaken("an operand's elements do not lie evenly", value=index, remedy=LEAVE)
    return first, steps


def _is(value: ir.Expr, truth: bool) -> bool:
    return isinstance(value, tirx.IntImm) and bool(value.value) == truth


def _product(extents: Sequence[ir.Expr]) -> ir.Expr:
    made = tirx.const(1, "int64")
    for extent in extents:
        made = made * extent
    return made


def _is_smaller(one: Sequence[ir.Expr], other: Sequence[ir.Expr]) -> bool:
    """Tell which of two lists of extents to prolong: the one whose known product is smaller."""
    known, others = (prod(int(extent) for extent in extents if is_constant(extent)) for extents in (one, other))
    unknown, more = (sum(not is_constant(extent) for extent in extents) for extents in (one, other))
    return (unknown, known) < (more, others)
