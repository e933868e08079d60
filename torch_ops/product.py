"""Run a product of torch tensors whose forms were checked: copies where rows need them, and the launch."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from tensorir_ladder.kernels.codegen.launch_plan import BIAS, Rows
from tensorir_ladder.schedules.loops.vectorization import dtype_bytes
from tensorir_ladder.torch_ops.errors import PaddedCopy, WrongDevice
from tensorir_ladder.torch_ops.launcher import Launcher, LoadedKernel
from tensorir_ladder.torch_ops.operands import Operands, check_address, overlap, readable

if TYPE_CHECKING:
    import torch


class Product:
    """A product of tensors of one form: ``product(a, b, out, bias)`` runs it in the current stream, returns the output.

    Room for copies comes from torch's allocator at each call. It keeps freed memory for the next one, orders its reuse
    by streams and lets a captured graph have its own, all of which memory kept here would not.
    """

    def __init__(self, kernel: LoadedKernel, operands: Operands, out: Rows, dtype: torch.dtype) -> None:
        import torch

        problem = operands.problem
        # Of torch's, those without Python of their own: what torch.cuda.current_stream does takes a µs or two.
        self._device, self._current_device = kernel.device, torch._C._cuda_getDevice
        self._stream_of, self._empty_like = torch._C._cuda_getCurrentRawStream, torch.empty_like
        self._note_written = torch._C._increment_version  # so that autograd sees what it kept being overwritten
        self._itemsize, self._out_itemsize = dtype_bytes(problem.dtype), dtype_bytes(problem.out_dtype)
        self._operands, self._out, self._dtype = operands, out, dtype
        self._transposed = problem.layout == "nt"
        self._a, self._b = (readable(matrix, self._itemsize) for matrix in (operands.a, operands.b))
        self._result = operands.output(kernel.plan, out)
        # By identity: room for the result may lie as the output does, whose rows TMA must not store beyond.
        self._copies = self._a is not operands.a or self._b is not operands.b or self._result is not out
        self._extents = operands.a.extent(self._itemsize), operands.b.extent(self._itemsize)
        self._out_extent = out.extent(self._out_itemsize)
        matrices = {"A": self._a, "B": self._b, "C": self._result}
        self._bias_itemsize = kernel.plan.bias_itemsize
        if self._bias_itemsize:
            matrices[BIAS] = Rows(1, problem.n, problem.n * self._bias_itemsize)
        self._launch = Launcher(kernel, matrices, self._check)
        self._keeps, self._label = bool(kernel.workspaces), kernel.label
        self._plain = not (self._copies or self._keeps or self._bias_itemsize)  # three addresses are all there is
        self._like: torch.Tensor | None = None
        self._warn()

    def __call__(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, bias: torch.Tensor | None
    ) -> torch.Tensor:
        if (current := self._current_device()) != self._device:
            raise WrongDevice.of_another_gpu("a", self._device, current)
        result = self._new(a) if out is None else out
        if self._plain:
            self._launch(self._stream_of(self._device), a.data_ptr(), b.data_ptr(), result.data_ptr())
        elif self._copies:
            self._copied(a, b, result, bias)
        else:
            self._run(a, b, result, bias)
        if out is not None:
            self._note_written((out,))
        return result

    def _new(self, a: torch.Tensor) -> torch.Tensor:
        """Make a contiguous result; from one kept element seen as the whole matrix, which torch is quickest with."""
        if self._like is None:
            self._like = a.new_empty(1, dtype=self._dtype).expand(self._operands.shape)
        return self._empty_like(self._like)

    def _copied(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Multiply by way of copies in rows that the kernel can reach."""
        self._check_apart(a.data_ptr(), b.data_ptr(), out.data_ptr(), None if bias is None else bias.data_ptr())
        left, right, result = a, b, out
        if self._a is not self._operands.a:
            left = _with_rows(a, self._a, self._itemsize)
        if self._b is not self._operands.b:
            right = _with_rows(b.T if self._transposed else b, self._b, self._itemsize)
        if self._result is not self._out:
            result = _room(out, self._result, self._out_itemsize)
        if bias is not None:
            bias = _as_long_as(bias, self._operands.problem.n)
        self._run(left, right, result, bias)
        if result is not out:
            out.copy_(result[:, : self._out.columns])

    def _run(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Launch on these tensors' addresses; workspaces are on the same GPU."""
        stream, given = self._stream_of(self._device), (a.data_ptr(), b.data_ptr(), c.data_ptr())
        if bias is not None:
            given += (bias.data_ptr(),)
        if self._keeps:
            given += self._launch.workspaces.of(stream, c).addresses
        self._launch(stream, *given)

    def _check(self, a: int, b: int, c: int, *more: int) -> None:
        """Raise UnalignedOperand for addresses that TMA cannot read, OverlappingOutput for a result upon an operand."""
        for name, address in (("a", a), ("b", b), ("out", c)):
            check_address(name, address)
        if not self._copies:
            self._check_apart(a, b, c, more[0] if self._bias_itemsize else None)

    def _check_apart(self, a: int, b: int, first: int, bias: int | None) -> None:
        """Raise OverlappingOutput where the output's bytes, from first to last, meet an operand's."""
        end, (a_extent, b_extent) = first + self._out_extent, self._extents
        if first < a + a_extent and a < end:
            raise overlap("a", (first, end), (a, a + a_extent))
        if first < b + b_extent and b < end:
            raise overlap("b", (first, end), (b, b + b_extent))
        if bias is not None:
            behind = bias + self._operands.columns * self._bias_itemsize
            if first < behind and bias < end:
                raise overlap("bias", (first, end), (bias, behind))

    @property
    def description(self) -> str:
        """Name the kernel, and what each call copies."""
        return "; ".join([self._label, *(f"copies {copied}" for copied in self._copied_matrices())])

    def _copied_matrices(self) -> list[str]:
        lain = (("a", self._operands.a, self._a), ("b", self._operands.b, self._b), ("out", self._out, self._result))
        return [
            f"{name} ({copy.rows} rows of {given.row_bytes} bytes in {copy.rows * copy.row_bytes} bytes)"
            for name, given, copy in lain
            if copy is not given
        ]

    def _warn(self) -> None:
        if copied := self._copied_matrices():
            problem = self._operands.problem
            warnings.warn(
                f"a product {self._out.rows}x{self._out.columns}x{self._operands.a.columns} of {problem.dtype} copies "
                f"at each call what the kernel cannot reach as it lies: {', '.join(copied)}; contiguous matrices "
                "whose rows are multiples of 16 bytes are not copied",
                PaddedCopy,
                stacklevel=5,  # the caller of matmul
            )


def _as_long_as(bias: torch.Tensor, columns: int) -> torch.Tensor:
    """Lengthen a bias to a kernel's rows, where it is shorter; what is behind it goes to columns that nobody sees."""
    if bias.shape[0] == columns:
        return bias
    copy = bias.new_empty((columns,))
    copy[: bias.shape[0]].copy_(bias)
    return copy


def _room(like: torch.Tensor, matrix: Rows, itemsize: int) -> torch.Tensor:
    """Make room for a matrix with all of its rows' bytes, on the GPU and in the dtype of ``like``."""
    return like.new_empty((matrix.rows, matrix.row_bytes // itemsize))


def _with_rows(tensor: torch.Tensor, matrix: Rows, itemsize: int) -> torch.Tensor:
    """Copy a matrix to rows that lie as ``matrix`` says; what is between them is left as it is."""
    copy = _room(tensor, matrix, itemsize)
    copy[:, : matrix.columns].copy_(tensor)
    return copy
