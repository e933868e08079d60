"""Copies of a product's matrices, where their rows are none that its kernel can reach: our own kernel, and its launch.

One kernel takes matrices of all sizes (:mod:`kernels.copied_rows`), so that it is compiled once for all products.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from tensorir_ladder.kernels.codegen.launch_plan import PlainBuffer
from tensorir_ladder.kernels.copied_rows import BUFFERS, LONG, Job, blocks_of, copied_rows, numbers_of
from tensorir_ladder.torch_ops.launcher import TIR_PIPELINE, KeptLaunches, LoadedKernel

if TYPE_CHECKING:
    from tvm import tirx

    from tensorir_ladder.schedules.workloads import Matmul
    from tensorir_ladder.torch_ops.problem import Setting


@dataclass(frozen=True)
class Copying:
    """The choice of this kernel, beside those that multiply: it is the same for all products."""

    PIPELINE: ClassVar[str] = TIR_PIPELINE

    def __str__(self) -> str:
        return "rows copied"

    def build(self, _problem: Matmul | None, _setting: Setting) -> tirx.PrimFunc:
        """Make the kernel."""
        return copied_rows()


class RowCopies(KeptLaunches):
    """Launches one or two copies together: ``copies(stream, source, target, ...)``, addresses in the jobs' order.

    Nothing is checked but the driver's status: what is copied lies apart from what it is copied to.
    """

    def __init__(self, loaded: LoadedKernel, jobs: Sequence[Job]) -> None:
        super().__init__(loaded, replace(loaded.plan, grid=(blocks_of(jobs), 1, 1)))
        self._numbers = numbers_of(jobs)

    def _bind(self, stream: int, *addresses: int) -> Callable[[], int]:
        # Without a second matrix its pointers are the first's, through which nobody reaches.
        by_name = dict(zip(BUFFERS, (*addresses, *addresses)))
        return self._prepared(stream, [self._value(each, by_name) for each in self._plan.parameters])

    def _value(self, parameter: Any, addresses: dict[str, int]) -> Any:
        if isinstance(parameter, PlainBuffer):
            return ctypes.c_void_p(addresses[parameter.buffer])
        kind = ctypes.c_int64 if parameter.buffer.startswith(LONG) else ctypes.c_uint32
        return kind(self._numbers[parameter.buffer])
