"""See batches of matrices as one batch, or as one matrix, and find those that have to be copied for it.

Dimensions before the last two are broadcast as ``torch.matmul`` does. A kernel takes one batch, whose matrices begin
equal distances apart, or for an operand one matrix that all products of the batch have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

from tensorir_ladder.kernels.codegen.launch_plan import MatrixRows
from tensorir_ladder.schedules.isa import ROW_BYTES, TMA_STRIDE_BYTES
from tensorir_ladder.schedules.workloads import MAX_ELEMENTS
from tensorir_ladder.torch_ops.errors import ScatteredRows, WrongShape
from tensorir_ladder.torch_ops.operands import Form, Operands, arrange, check_dtypes, is_turned


@dataclass(frozen=True)
class Batches:
    """Operands and output with the same dimensions before the last two, ``outer``; a broadcast one has a stride of 0.

    The last ``folded`` of these are rows of A and of the output: all their products have the same B. ``dense``: the
    kernel reaches contiguous matrices alone, and a batch of at least one of the operands.
    """

    outer: tuple[int, ...]
    a: Form
    b: Form
    out: Form
    folded: int = 0
    dense: bool = False

    @classmethod
    def of(cls, a: Form, b: Form, out: Form | None, out_dtype: str, dense: bool = False) -> Batches:
        """Broadcast two tensors, and fold dimensions into rows where that can be; without an ``out`` it is contiguous.

        ::

            a (8, 512, 64), b (64, 96)                       one product of 4096 rows
            a (2, 8, 512, 64), b (2, 1, 64, 96)              2 products of 4096 rows
            a (512, 64), b (8, 64, 96)                       8 products, all with the same a

        Raises
        ------
        WrongShape : for tensors of fewer than 2 dimensions, inner sizes that differ, dimensions that cannot be
            broadcast or have no products, and an ``out`` of other sizes.
        WrongDtype : as :func:`torch_ops.operands.arrange`.
        ScatteredRows : for an ``out`` that was expanded.
        """
        for form in (a, b):
            if len(form.sizes) < 2:
                raise WrongShape(
                    f"{form.name} is no matrix", value=f"shape {form.sizes}", limit="2 dimensions", remedy="reshape it"
                )
        check_dtypes(a.dtype, b.dtype, out_dtype)
        (m, k), (inner, n) = a.sizes[-2:], b.sizes[-2:]
        if k != inner:
            raise WrongShape(
                "the inner sizes of a and b differ", value=f"{a.sizes} and {b.sizes}", remedy="give (m, k) and (k, n)"
            )
        outer = _broadcast(a, b)
        shape = (*outer, m, n)
        out = out or Form("out", shape, _contiguous(shape), out_dtype)
        if out.sizes != shape:
            raise WrongShape("out has another shape than the product", value=out.sizes, limit=shape, remedy="give that")
        if any(size > 1 and stride == 0 for size, stride in zip(outer, out.strides)):
            raise ScatteredRows(
                "out has matrices that lie upon each other", value=f"strides {out.strides}", remedy="do not expand it"
            )
        found = cls(outer, _expanded(a, outer), _expanded(b, outer), out, dense=dense)
        while found._folds_more():
            found = replace(found, folded=found.folded + 1)
        return found

    @property
    def copies(self) -> dict[str, tuple[Form, Form]]:
        """Return the tensors that must be copied first, by name: the form of each, and of its copy."""
        return {
            each.name: (each, self._copy_of(each)) for each in (self.a, self.b, self.out) if self._as_one(each) is None
        }

    def arranged(self) -> tuple[Operands, MatrixRows]:
        """Pair the operands, of which none needs a copy that is not a kernel's, and describe the output's rows.

        Raises what :func:`torch_ops.operands.arrange` and :meth:`torch_ops.operands.Form.rows` raise.
        """
        a, b, out = (self._as_one(each) for each in (self.a, self.b, self.out))
        one = arrange(_matrix(a), _matrix(b), self.out.dtype)
        batch = prod(out.sizes[:-2])
        operands = replace(one, a=_rows(a, one.a), b=_rows(b, one.b), batch=batch, outer=self.outer)
        return operands, _rows(out, _matrix(out).rows())

    @property
    def _left(self) -> int:
        """Dimensions that are not folded."""
        return len(self.outer) - self.folded

    def _folds_more(self) -> bool:
        """Tell whether the last dimension that is not folded can be one of rows, too."""
        if not self._left:
            return False
        more, last = replace(self, folded=self.folded + 1), self._left - 1
        rows = prod(self.a.sizes[last:-1])
        if rows * max(self.a.sizes[-1], self.b.sizes[-1]) >= MAX_ELEMENTS or self.b.strides[last] != 0:
            return False
        return more._row_step(self.a) is not None and more._row_step(self.out) is not None

    def _row_step(self, form: Form) -> int | None:
        """Return the elements from one row of A or of the output to the next, None where these differ."""
        return _step(form.sizes[self._left : -1], form.strides[self._left : -1])

    def _as_one(self, form: Form) -> Form | None:
        """See an operand or the output as a matrix or as one batch of them; None where that cannot be."""
        count, apart = prod(self.outer[: self._left]), _step(self.outer[: self._left], form.strides[: self._left])
        (rows, columns), (row, step) = form.sizes[-2:], form.strides[-2:]
        if form is not self.b:
            rows, row = prod(form.sizes[self._left : -1]), self._row_step(form)
        one = Form(form.name, (rows, columns), (row, step), form.dtype)
        if self.dense and self._has_gaps(form, one, count, apart):
            return None
        if count == 1 or apart == 0:
            return one if not self.outer or _is_stepped_over(self._stored(one)) else None
        if apart is None or not _is_reached(self._stored(one), count, apart, form is self.out):
            return None
        return Form(form.name, (count, rows, columns), (apart, row, step), form.dtype)

    def _has_gaps(self, form: Form, one: Form, count: int, apart: int | None) -> bool:
        """Tell whether a kernel of contiguous matrices needs a copy; what has no rows is refused elsewhere."""
        stored = self._stored(one)
        (rows, columns), row = stored.sizes, stored.strides[0]
        if not stored.has_rows or (rows > 1 and row < columns):
            return False
        if count > 1 and apart == 0:
            alone = form is self.a and not any(self.b.strides[: self._left])  # nothing else would be a batch
            return alone or (rows > 1 and row != columns)
        return (rows > 1 and row != columns) or (count > 1 and apart != rows * columns)

    def _stored(self, one: Form) -> Form:
        """Return a matrix as its rows lie in memory."""
        return one.transposed if one.name == self.b.name and is_turned(one) else one

    def _copy_of(self, form: Form) -> Form:
        """Lay out a copy: a batch without gaps, operands' rows whole cache lines where TMA could not step over them.

        B's rows in memory stay its columns where they are.
        """
        outer = self.outer
        if form is self.b:
            outer = (*outer[: self._left], *(1,) * self.folded)
        rows, columns = form.sizes[-2:]
        stored = self._stored(_matrix(form)).sizes
        turned = form is self.b and is_turned(_matrix(form))
        as_it_is = self.dense or form is self.out or stored[1] * form.itemsize % TMA_STRIDE_BYTES == 0
        padding = 0 if as_it_is else -stored[1] % (ROW_BYTES // form.itemsize)
        *apart, row, step = _contiguous((*outer, stored[0], stored[1] + padding))
        strides = (*apart, step, row) if turned else (*apart, row, step)
        return Form(form.name, (*outer, rows, columns), strides, form.dtype)


def _broadcast(a: Form, b: Form) -> tuple[int, ...]:
    """Return the dimensions before the last two that two tensors have together."""
    left, right = a.sizes[:-2], b.sizes[:-2]
    rank = max(len(left), len(right))
    pairs = list(zip(*((1,) * (rank - len(each)) + each for each in (left, right))))
    if any(one != other and 1 not in (one, other) for one, other in pairs) or any(0 in pair for pair in pairs):
        raise WrongShape(
            "a and b are not batches of as many matrices",
            value=f"{a.sizes} and {b.sizes}",
            remedy="give as many, 1 or more, or one matrix for all",
        )
    return tuple(max(pair) for pair in pairs)


def _expanded(form: Form, outer: tuple[int, ...]) -> Form:
    """Broadcast a tensor: its new dimensions, and those of size 1, have a stride of 0."""
    more = len(outer) + 2 - len(form.sizes)
    own = zip(form.sizes[:-2], form.strides[:-2])
    strides = (0,) * more + tuple(0 if size == 1 else stride for size, stride in own)
    return Form(form.name, (*outer, *form.sizes[-2:]), (*strides, *form.strides[-2:]), form.dtype)


def _contiguous(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a tensor without gaps."""
    return tuple(prod(sizes[place + 1 :]) for place in range(len(sizes)))


def _step(sizes: Sequence[int], strides: Sequence[int]) -> int | None:
    """Return the stride of the one dimension that these are together; None where they are none."""
    own = [(size, stride) for size, stride in zip(sizes, strides) if size > 1]
    if any(stride != size * inner for (_, stride), (size, inner) in pairwise(own)):
        return None
    return own[-1][1] if own else 0


def _is_stepped_over(stored: Form) -> bool:
    """Tell whether a matrix has no gaps between its rows, or TMA steps over them.

    Matrices whose rows are not contiguous are refused elsewhere.
    """
    (rows, columns), (row, _) = stored.sizes, stored.strides
    return not stored.has_rows or rows == 1 or row == columns or row * stored.itemsize % TMA_STRIDE_BYTES == 0


def _is_reached(stored: Form, count: int, apart: int, is_out: bool) -> bool:
    """Tell whether a kernel reaches ``count`` matrices that begin ``apart``: without gaps, or by TMA.

    Results must not overlap, and TMA stores those of 16 bits, in rows of multiples of 16 bytes.
    """
    if not stored.has_rows:
        return True
    (rows, columns), whole = stored.sizes, TMA_STRIDE_BYTES // stored.itemsize
    row = stored.strides[0] if rows > 1 else apart
    if row == columns and apart == rows * columns:
        return True
    if row % whole or apart % whole:
        return False
    behind = apart >= (rows - 1) * row + columns or row >= (count - 1) * apart + columns  # or rows of all in turn
    return not is_out or (columns % whole == 0 and stored.itemsize == 2 and behind)


def _matrix(form: Form) -> Form:
    """Return one matrix of a batch, or the matrix itself."""
    return Form(form.name, form.sizes[-2:], form.strides[-2:], form.dtype)


def _rows(form: Form, one: MatrixRows) -> MatrixRows:
    """Describe a batch of matrices of which ``one`` is described, or the matrix itself; rows of one each are rows."""
    if len(form.sizes) == 2:
        return one
    apart = form.strides[0] * form.itemsize
    return replace(one, row_bytes=one.row_bytes if one.rows > 1 else apart, batch=form.sizes[0], batch_bytes=apart)
