"""The errors and the warning of :func:`torch_ops.matmul`. An IllegalSchedule is a ValueError with its parts."""

from __future__ import annotations

from tensorir_ladder.schedules.errors import DamagedFile as DamagedFile
from tensorir_ladder.schedules.errors import IllegalSchedule


class IllegalOperand(IllegalSchedule):
    """A tensor that the kernels cannot take; its kinds are below."""


class WrongShape(IllegalOperand):
    """A tensor that is no matrix, or whose sizes do not fit the others'."""


class WrongDtype(IllegalOperand):
    """A dtype that the kernels do not multiply or do not store."""


class WrongDevice(IllegalOperand):
    """A tensor that is not on the current GPU."""

    @classmethod
    def of_another_gpu(cls, name: str, device: int, current: int) -> WrongDevice:
        """Make the error for a tensor on a GPU that is not the current one."""
        return cls(
            f"{name} is on another GPU than the current one",
            value=f"cuda:{device}",
            limit=f"cuda:{current}",
            remedy="move it, or call torch.cuda.set_device",
        )


class ScatteredRows(IllegalOperand):
    """A matrix whose rows are not side by side in memory, or lie upon each other."""


class UnalignedOperand(IllegalOperand):
    """A matrix, or a row of one, at an address that is no multiple of 16 bytes."""


class OverlappingOutput(IllegalOperand):
    """An output in the same memory as an operand."""


class UnsupportedGpu(IllegalSchedule):
    """There is no GPU, or none that has what the kernels are made of."""


class NoTorch(ImportError):
    """Torch, whose tensors are multiplied, is not installed."""


class FirstCallInCapture(RuntimeError):
    """A product's first call while a CUDA graph is captured, when nothing can be loaded."""


class PaddedCopy(UserWarning):
    """A matrix is copied at each call, to or from rows that TMA can step over."""
