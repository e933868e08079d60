"""CUDA text of a few lines, run in the emulator, and operands laid out as instructions read them."""

from __future__ import annotations

from itertools import product

import numpy as np

from tensorir_ladder.emulator import EmulatedProgram, LaunchPlan, PlainBuffer
from tensorir_ladder.emulator.source import PREAMBLE_END


def run_text(
    body: str, output: np.ndarray, *inputs: np.ndarray, threads: int = 32, helpers: str = "", dynamic: int = 0, **launch
) -> np.ndarray:
    """Run a kernel ``(uint* out, uint* in...)`` with this body; returns the output."""
    parameters = ", ".join(["uint* __restrict__ out", *(f"uint* __restrict__ in{i}" for i in range(len(inputs)))])
    kernel = f'extern "C" __global__ void __launch_bounds__({threads}) probe({parameters}) {{\n{body}\n}}\n'
    names = ("out", *(f"in{i}" for i in range(len(inputs))))
    blocks = (launch.get("cluster", 1), 1, 1)
    made = LaunchPlan("probe", tuple(map(PlainBuffer, names)), blocks, (threads, 1, 1), blocks, dynamic)
    program = EmulatedProgram("probe", PREAMBLE_END + helpers + kernel, (made,), names, operands=names[1:])
    program(
        output.view(np.uint32), *(array.reshape(-1).view(np.uint32) for array in inputs), seed=launch.get("seed", 0)
    )
    return output


def words(count: int) -> np.ndarray:
    """An output of so many 32-bit words."""
    return np.zeros(count, np.uint32)


def bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """bfloat16 of whole numbers, as bits."""
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def place_operand(matrix: np.ndarray, memory: np.ndarray, start: int, width: int, major: str) -> tuple[int, int]:
    """Put an operand [other, 16] into memory as rows of ``width`` bytes, swizzled; (leading, stride) in 16 bytes.

    Rows along the major dimension; eight of them are an atom, atoms follow each other, first along the other dimension
    (k-major: down; mn-major: down along k), then along the major one.
    """
    contiguous = matrix if major == "k" else matrix.T  # rows, each along the major dimension
    rows, length = contiguous.shape
    per_row = width // 2
    stack = rows // 8 * 8 * width  # bytes of all atoms of one column of atoms
    for row, at in product(range(rows), range(length)):
        place = start + at // per_row * stack + row * width + at % per_row * 2
        place ^= (place >> 3) & (width - 16) & 0x70
        memory[place : place + 2] = contiguous[row, at : at + 1].view(np.uint8)
    down, across = 8 * width // 16, stack // 16
    swapped = major == "mn" and width == 16
    return (down, across) if swapped else (across, down)
