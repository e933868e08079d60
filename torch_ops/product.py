"""Run a product of torch tensors whose forms were checked: copies where rows need them, and the launch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tensorir_ladder.kernels.codegen.launch_plan import BIAS, MatrixRows
from tensorir_ladder.kernels.copied_rows import cutting, padding
from tensorir_ladder.schedules.isa import ROW_BYTES
from tensorir_ladder.schedules.loops.vectorization import dtype_bytes
from tensorir_ladder.torch_ops.copies import RowCopies
from tensorir_ladder.torch_ops.errors import PaddedCopy, WrongDevice
from tensorir_ladder.torch_ops.launcher import Launcher, LoadedKernel
from tensorir_ladder.torch_ops.operands import Operands, check_address, overlap, readable

if TYPE_CHECKING:
    import torch


class CallProduct:
    """A product of tensors of one form: ``product(a, b, out, bias)`` runs it in the current stream, returns the output.

    ``at_any_element``: what the kernel reads and writes may begin at any element, "A", "B" and "C" of them.
    What is copied is copied by one launch before the product's, and one behind it; each of the three may begin early.
    ``copying`` loads the kernel of these, where one is needed. Room for copies comes from torch's allocator at each
    call. It keeps freed memory for the next one, orders its reuse by streams and lets a captured graph have its own,
    all of which memory kept here would not.
    """

    def __init__(
        self,
        kernel: LoadedKernel,
        operands: Operands,
        out: MatrixRows,
        dtype: torch.dtype,
        copying: Callable[[], LoadedKernel],
        at_any_element: str = "",
    ) -> None:
        import torch

        problem = operands.problem
        # Of torch's, those without Python of their own: what torch.cuda.current_stream does takes a µs or two.
        self._device, self._current_device = kernel.device, torch._C._cuda_getDevice
        self._stream_of, self._empty_like = torch._C._cuda_getCurrentRawStream, torch.empty_like
        self._note_written = torch._C._increment_version  # so that autograd sees what it kept being overwritten
        self._itemsize, self._out_itemsize = dtype_bytes(problem.dtype), dtype_bytes(problem.out_dtype)
        self._operands, self._out, self._dtype = operands, out, dtype
        plan = kernel.together
        # What a kernel reaches by its address lies as it was made for; else TMA loads it, or a copy.
        self._a, self._b = (
            readable(matrix, self._itemsize) if plan.maps(name) else matrix
            for name, matrix in (("A", operands.a), ("B", operands.b))
        )
        self._result = operands.output(plan, out)
        narrowed = self._result is out and out.columns < problem.n  # stored without TMA
        addresses = {"A": "a", "B": "b", "C": "out"}
        free = at_any_element + "C" * narrowed
        self._aligned = tuple(name for matrix, name in addresses.items() if matrix not in free)
        # By identity: room for the result may lie as the output does, whose rows TMA must not store beyond.
        self._copies = self._a is not operands.a or self._b is not operands.b or self._result is not out
        self._extents = operands.a.extent(self._itemsize), operands.b.extent(self._itemsize)
        self._out_extent = out.extent(self._out_itemsize)
        matrices = {"A": self._a, "B": self._b, "C": self._result}
        self._bias_itemsize = plan.bias_itemsize
        if self._bias_itemsize:
            self._bias_columns = plan.columns(BIAS)
            matrices[BIAS] = MatrixRows(1, self._bias_columns, self._bias_columns * self._bias_itemsize)
        self._launch = Launcher(kernel, matrices, self._check)
        self._keeps, self._label = bool(kernel.workspaces), kernel.label
        self._plain = not (self._copies or self._keeps or self._bias_itemsize)  # three addresses are all there is
        self._like: torch.Tensor | None = None
        if self._copies:
            self._lay_out(copying())
        self._warn()

    def _lay_out(self, kernel: LoadedKernel) -> None:
        """Prepare the copies, and where in one piece of memory they lie: A's, B's and the result's, as offsets."""
        lain = ((self._operands.a, self._a), (self._operands.b, self._b), (self._out, self._result))
        ends = [0]
        for given, copy in lain:
            ends.append(ends[-1] + (0 if copy is given else _whole_lines(copy.all_rows * copy.row_bytes)))
        self._places = tuple(None if copy is given else at for (given, copy), at in zip(lain, ends))
        self._room_elements = ends[-1] // self._itemsize
        jobs = [padding(given, copy, self._itemsize) for given, copy in lain[:2] if copy is not given]
        self._copy_in = RowCopies(kernel, jobs) if jobs else None
        self._copy_out = None
        if self._result is not self._out:
            self._copy_out = RowCopies(kernel, [cutting(self._result, self._out, self._out_itemsize)])

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
            addresses = a.data_ptr(), b.data_ptr(), result.data_ptr()
            self._run(self._stream_of(self._device), result, addresses, bias)
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
        given = a.data_ptr(), b.data_ptr(), out.data_ptr()
        self._check_apart(*given, None if bias is None else bias.data_ptr())
        stream, room = self._stream_of(self._device), a.new_empty((self._room_elements,))
        if bias is not None:
            bias = _as_long_as(bias, self._bias_columns)
        begin = room.data_ptr()
        taken = [own if at is None else begin + at for own, at in zip(given, self._places)]
        if self._copy_in:
            pairs = zip(given[:2], taken[:2])
            self._copy_in(stream, *(each for pair in pairs if pair[0] != pair[1] for each in pair))
        self._run(stream, a, taken, bias)
        if self._copy_out:
            self._copy_out(stream, taken[2], given[2])

    def _run(self, stream: int, like: torch.Tensor, given: Sequence[int], bias: torch.Tensor | None) -> None:
        """Launch on these addresses; workspaces are on the GPU of ``like``."""
        if bias is not None:
            given = (*given, bias.data_ptr())
        if self._keeps:
            given = (*given, *self._launch.workspaces.of(stream, like).addresses)
        self._launch(stream, *given)

    def _check(self, a: int, b: int, c: int, *more: int) -> None:
        """Raise UnalignedOperand for addresses that TMA cannot read, OverlappingOutput for a result upon an operand."""
        addresses = {"a": a, "b": b, "out": c}
        for name in self._aligned:
            check_address(name, addresses[name])
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
            f"{name} ({copy.all_rows} rows of {given.row_bytes} bytes in {copy.all_rows * copy.row_bytes} bytes)"
            for name, given, copy in lain
            if copy is not given
        ]

    def _warn(self) -> None:
        if copied := self._copied_matrices():
            problem = self._operands.problem
            shape = "x".join(map(str, (*self._operands.shape, self._operands.a.columns)))
            warnings.warn(
                f"a product {shape} of {problem.dtype} copies "
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


def _whole_lines(size: int) -> int:
    """Round bytes up to whole cache lines, which every copy begins with."""
    return -(-size // ROW_BYTES) * ROW_BYTES
