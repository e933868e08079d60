"""A product of torch tensors whose forms were checked: copies where rows need them, and the launch."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from schedules.vectorization import dtype_bytes

from .launch_plan import Rows
from .launcher import Launcher, LoadedKernel
from .operands import Operands, check_address, check_apart, readable
from .tma import STRIDE_BYTES

if TYPE_CHECKING:
    import torch


class PaddedCopy(UserWarning):
    """A matrix is copied at each call, to or from rows that TMA can step over."""


class Product:
    """``product(a, b, out, stream)`` for tensors of one form; ``out`` may be None, and is returned.

    Room for copies comes from torch's allocator at each call. It keeps freed memory for the next one, orders its reuse
    by streams and lets a captured graph have its own, all of which memory kept here would not.
    """

    def __init__(self, kernel: LoadedKernel, operands: Operands, out: Rows, dtype: torch.dtype) -> None:
        problem = operands.problem
        self._itemsize, self._out_itemsize = dtype_bytes(problem.dtype), dtype_bytes(problem.out_dtype)
        self._operands, self._out, self._dtype = operands, out, dtype
        self._transposed = problem.layout == "nt"
        self._a, self._b = (readable(matrix, self._itemsize) for matrix in (operands.a, operands.b))
        self._result = operands.output(kernel.plan, out)
        self._launcher = Launcher(kernel, {"A": self._a, "B": self._b, "C": self._result})
        self._warn()

    def __call__(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, stream: int) -> torch.Tensor:
        if out is None:
            out = a.new_empty(self._out.shape, dtype=self._dtype)
        else:
            self._check_apart(a, b, out)
        left, right = a, b
        if self._a is not self._operands.a:
            left = _with_rows(a, self._a, self._itemsize)
        if self._b is not self._operands.b:
            right = _with_rows(b.T if self._transposed else b, self._b, self._itemsize)
        result = out if self._result is self._out else _room(out, self._result, self._out_itemsize)
        addresses = left.data_ptr(), right.data_ptr(), result.data_ptr()
        if (addresses[0] | addresses[1] | addresses[2]) % STRIDE_BYTES:
            for name, address in zip(("a", "b", "out"), addresses):
                check_address(name, address)
        if self._launcher.workspaces:
            room = self._launcher.workspaces.of(stream, left)
            self._launcher(stream, *addresses, *room.addresses)
        else:
            self._launcher(stream, *addresses)
        if result is not out:
            out.copy_(result[:, : self._out.columns])
        return out

    def _check_apart(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        """Raise OverlappingOutput where the output's bytes, from first to last, meet an operand's."""
        first = out.data_ptr()
        written = (first, first + self._out.extent(self._out_itemsize))
        for name, tensor, matrix in (("a", a, self._operands.a), ("b", b, self._operands.b)):
            begin = tensor.data_ptr()
            check_apart(written, name, (begin, begin + matrix.extent(self._itemsize)))

    def _warn(self) -> None:
        """Say once what is copied at each call."""
        lain = (("a", self._operands.a, self._a), ("b", self._operands.b, self._b), ("out", self._out, self._result))
        copied = [
            f"{name} ({copy.rows} rows of {given.row_bytes} bytes in {copy.rows * copy.row_bytes} bytes)"
            for name, given, copy in lain
            if copy is not given
        ]
        if copied:
            problem = self._operands.problem
            warnings.warn(
                f"a product {self._out.rows}x{self._out.columns}x{self._operands.a.columns} of {problem.dtype} copies "
                f"at each call what the kernel cannot reach as it lies: {', '.join(copied)}; contiguous matrices "
                "whose rows are multiples of 16 bytes are not copied",
                PaddedCopy,
                stacklevel=5,  # the caller of matmul
            )


def _room(like: torch.Tensor, matrix: Rows, itemsize: int) -> torch.Tensor:
    """Memory for a matrix with all of its rows' bytes, on the GPU and in the dtype of ``like``."""
    return like.new_empty((matrix.rows, matrix.row_bytes // itemsize))


def _with_rows(tensor: torch.Tensor, matrix: Rows, itemsize: int) -> torch.Tensor:
    """A copy of a matrix whose rows lie as ``matrix`` says; what is between them is left as it is."""
    copy = _room(tensor, matrix, itemsize)
    copy[:, : matrix.columns].copy_(tensor)
    return copy
