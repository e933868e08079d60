"""Probes: small kernels, what they are given, and how their output reads as places.

Each element of a probe's data is a number of its own, so that the output says where every one of them went. The same
CUDA text runs on the GPU, which is recorded, and in the emulator, which is compared with the record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from tensorir_ladder.emulator import EmulatedProgram, LaunchPlan, PlainBuffer, TensorMap
from tensorir_ladder.emulator.source import PREAMBLE_END

PREAMBLE = f"""#include <cstdint>
#include <cuda.h>
#ifndef uint
#define uint unsigned int
#define uchar unsigned char
{PREAMBLE_END}
#define DEVICE __forceinline__ __device__
"""
OUT = "out"


@dataclass(frozen=True, eq=False)
class Probe:
    """One kernel of a CUDA text, launched once.

    ``arguments`` are the kernel's, in order: OUT, names of ``inputs``, tensor maps of them, whole numbers. ``output``
    is OUT as it is before the launch; ``show`` makes lines of words of what it is after, and ``meaning`` says in words
    what a line and a word are.
    """

    name: str
    kernel: str
    text: str
    arguments: tuple[str | TensorMap | int, ...]
    inputs: dict[str, np.ndarray]
    output: np.ndarray
    show: Callable[[np.ndarray], list[str]]
    meaning: str
    threads: int = 32
    cluster: int = 1
    dynamic_bytes: int = 0

    @property
    def program(self) -> EmulatedProgram:
        """The probe as a function of the output and the inputs, in their order."""
        blocks, block = (self.cluster, 1, 1), (self.threads, 1, 1)
        parameters = tuple(PlainBuffer(given) if isinstance(given, str) else given for given in self.arguments)
        launch = LaunchPlan(self.kernel, parameters, blocks, block, blocks, self.dynamic_bytes)
        return EmulatedProgram(
            self.name, PREAMBLE + self.text, (launch,), (OUT, *self.inputs), operands=tuple(self.inputs)
        )

    def lines(self, run: Callable[..., None]) -> list[str]:
        """Launch it by ``run(output, *inputs)``, and read the output."""
        output = self.output.copy()
        run(output, *(array.copy() for array in self.inputs.values()))
        return self.show(output)


def table(values: np.ndarray, form: str = "d") -> list[str]:
    """Write a line for each row, its numbers in a format, divided by blanks."""
    return [" ".join(format(value, form) for value in row) for row in values.tolist()]


def halves(words: np.ndarray, width: int) -> np.ndarray:
    """Cut 32-bit words into rows of so many 16-bit numbers, the lower one of a word first."""
    return np.ascontiguousarray(words).view(np.uint16).reshape(-1, width)


def registers(count: int, first: int = 0) -> str:
    """Name so many PTX operands, ``%first, ...``."""
    return ", ".join(f"%{first + i}" for i in range(count))


def operands(constraint: str, names: Iterable[str]) -> str:
    """Write an asm statement's operands of one constraint."""
    return ", ".join(f'"{constraint}"({name})' for name in names)
