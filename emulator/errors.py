"""Errors of the emulator: launches and text that it cannot run, and faults of kernels."""

from __future__ import annotations


class EmulatorError(RuntimeError):
    """A kernel that the emulator cannot run here."""


class NoHostCompiler(EmulatorError):
    """There is no C++ compiler to compile emulated kernels with."""


class UnknownText(EmulatorError):
    """CUDA text that the emulator does not understand."""


class UnknownInstruction(UnknownText):
    """Inline PTX that the emulator has no instruction for."""


class UnknownLaunch(EmulatorError):
    """A launch of a kind the emulator does not know."""


class WrongArray(EmulatorError):
    """An array of a call that a kernel's parameter cannot take: its dtype, size or layout, or that it is missing."""


class KernelFault(RuntimeError):
    """A kernel did what CUDA does not define, or came to a standstill; ``kind`` names it, ``seed`` repeats it."""

    def __init__(self, kernel: str, kind: str, text: str, seed: int) -> None:
        super().__init__(f"{kernel} on emulator, {kind}: {text}\n  (seed {seed} repeats it)")
        self.kernel, self.kind, self.text, self.seed = kernel, kind, text, seed

    def __reduce__(self) -> tuple[type[KernelFault], tuple[str, str, str, int]]:
        """Say how it is made again in another process: a pool's worker may find it."""
        return type(self), (self.kernel, self.kind, self.text, self.seed)
