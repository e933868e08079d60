"""A kernel's launch as data: its parameters, and how many threads in how many blocks.

:mod:`.host_code` reads it from a lowered function; the launcher puts it into a stream, the emulator runs it on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Literal

import ml_dtypes
import msgspec
import numpy as np

from tensorir_ladder.schedules.errors import IllegalSchedule
from tensorir_ladder.schedules.isa import TMA_L2_PROMOTION_128B, TMA_STRIDE_BYTES, WIDEST

BIAS = "bias"
SECOND = "second"  # vector like a bias
RESIDUAL = "R"  # a matrix like C, which is added to the results
ROWS_PARAMETER = "rows"  # of a kernel that takes any number of rows
PLANNED = (ROWS_PARAMETER, "helpers", "cut")  # of one whose work is shared out for each number of rows
COUNTED = ("batch", "queries", "keys")  # of attention over any number of tokens
# Of a kernel that copies rows (:mod:`kernels.copied_rows`): jobs, each one's numbers, and where the second begins.
JOBS, JOB_NUMBERS = 2, ("rows", "width", "columns", "source_step", "target_step", "extent")
FIRST_BLOCKS = "first_blocks"
COPIED = (FIRST_BLOCKS, *(f"{name}_{job}" for job in range(JOBS) for name in JOB_NUMBERS))
# Buffers of a kernel that a caller gives; all others are its workspaces.
GIVEN = ("A", "B", "C", BIAS, SECOND, RESIDUAL)


def _bytes_of(dtype: str) -> int:
    return np.dtype(getattr(ml_dtypes, dtype, dtype)).itemsize


class UnsupportedLaunch(IllegalSchedule):
    """A host function that launches in a way that is not known here, or a launch that no GPU could make."""


@dataclass(frozen=True)
class MatrixRows:
    """A matrix in memory: ``rows`` of ``columns`` adjacent elements, ``row_bytes`` from one row to the next.

    Or a ``batch`` of them, ``batch_bytes`` from one to the next.
    """

    rows: int
    columns: int
    row_bytes: int
    batch: int = 1
    batch_bytes: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.rows, self.columns

    @property
    def all_rows(self) -> int:
        """Rows of all matrices."""
        return self.rows * self.batch

    def extent(self, itemsize: int) -> int:
        """Bytes from the first element to behind the last."""
        one = (self.rows - 1) * self.row_bytes + self.columns * itemsize
        return (self.batch - 1) * self.batch_bytes + one


@dataclass(frozen=True)
class TensorMap:
    """A kernel's tensor map of a buffer, as cuTensorMapEncodeTiled takes it: sizes from the innermost, in elements.

    ``strides`` are bytes, of every dimension but the innermost; ``swizzle`` (0 none, 1 to 3 of 32, 64 and 128 bytes)
    and ``l2_promotion`` are the driver's numbers. Maps leave no elements out, are not interleaved, and fill with zeros.
    """

    buffer: str
    dtype: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0
    l2_promotion: int = TMA_L2_PROMOTION_128B

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return _bytes_of(self.dtype)

    def __post_init__(self) -> None:
        row, unit = self.box[0] * self.itemsize, TMA_STRIDE_BYTES
        found = [f"a stride of {stride} bytes, no multiple of {unit}" for stride in self.strides if stride % unit]
        found += [f"a box of {extent} elements, not 1 to {WIDEST}" for extent in self.box if not 1 <= extent <= WIDEST]
        found += [f"rows of a box of {row} bytes, no multiple of {unit}"] if row % unit else []
        if self.swizzle and row > 16 << self.swizzle:
            found.append(f"rows of a box of {row} bytes, with a swizzle of {16 << self.swizzle}")
        if found:
            raise UnsupportedLaunch(
                f"no tensor map of {self.buffer} can be so", value="; ".join(found), remedy="choose what TMA takes"
            )

    def of(self, matrix: MatrixRows) -> TensorMap:
        """Map a matrix at hand instead, whose rows may be shorter or further apart than those this was made for.

        A kernel still loads zeros beyond the matrix's edges. UnsupportedLaunch for a map of other rank.
        """
        rank = 2 if matrix.batch == 1 else 3
        if len(self.sizes) != rank:
            raise UnsupportedLaunch(
                f"the tensor map of {self.buffer} is none of what is given",
                value=f"rank {len(self.sizes)}",
                limit=f"rank {rank}",
                remedy="give a matrix where the kernel takes one, and a batch where it takes that",
            )
        sizes, strides = (matrix.columns, matrix.rows, matrix.batch), (matrix.row_bytes, matrix.batch_bytes)
        return replace(self, sizes=sizes[:rank], strides=strides[: rank - 1])


@dataclass(frozen=True)
class PlainBuffer:
    """A kernel's pointer to a buffer whose shape is written into the kernel; ``dtype`` is that of its host code.

    An extent is None where it is known at run time only. Neither is needed to emulate a launch written by hand.
    """

    buffer: str
    dtype: str = ""
    shape: tuple[int | None, ...] = ()

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return _bytes_of(self.dtype)

    def check(self, matrix: MatrixRows) -> None:
        """Raise UnsupportedLaunch for a matrix, or a batch, that lies otherwise than the kernel was written for."""
        batch, *one = (1, 1, *self.shape)[-3:]
        gaps = matrix.all_rows > 1 and matrix.row_bytes != matrix.columns * self.itemsize
        gaps |= matrix.batch > 1 and matrix.batch_bytes != matrix.rows * matrix.row_bytes
        if (matrix.batch, *matrix.shape) != (batch, *one) or gaps:
            raise UnsupportedLaunch(
                f"the kernel reaches {self.buffer} by its address",
                value=f"{matrix.rows} rows of {matrix.columns}, {matrix.row_bytes} bytes apart",
                limit=f"{' x '.join(map(str, self.shape))}, side by side",
                remedy="give a contiguous matrix of that shape",
            )


@dataclass(frozen=True)
class RowCount:
    """A kernel's whole number that says how many rows A and C have, which who launches fills in."""

    buffer: str = ROWS_PARAMETER


@dataclass(frozen=True)
class PlannedNumber:
    """A kernel's whole number that says how its work is shared out, or of how much, which who launches fills in."""

    buffer: str


@dataclass(frozen=True)
class Real:
    """A kernel's floating-point number."""

    value: float
    dtype: str


@dataclass(frozen=True)
class LaunchPlan:
    """One kernel's launch: its parameters in order, and extents along x, y, z; blocks are counted, not clusters.

    Parameters are tensor maps, pointers, and numbers, a count of rows known or not. ``shared_bytes`` is dynamic shared
    memory.
    ``overlaps``: the kernel waits itself for the one before it in the stream, so that it may begin earlier.
    """

    kernel: str
    parameters: tuple[TensorMap | PlainBuffer | RowCount | PlannedNumber | Real | int, ...]
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int] = (1, 1, 1)
    shared_bytes: int = 0
    overlaps: bool = False

    def to_json(self) -> bytes:
        """Write the plan as one line of JSON, each parameter behind its kind."""
        kinds = [(type(parameter).__name__, parameter) for parameter in self.parameters]
        return msgspec.json.encode({**vars(self), "parameters": kinds})

    @classmethod
    def from_json(cls, text: bytes) -> LaunchPlan:
        """Read what :meth:`to_json` wrote; ValueError for all else."""
        found = msgspec.json.decode(text, type=_Written)
        parameters = [msgspec.json.decode(written, type=_KINDS[kind]) for kind, written in found.parameters]
        return cls(**{**vars(found), "parameters": tuple(parameters)})

    def of_rows(self, rows: int) -> LaunchPlan:
        """Launch for an A of so many rows, where the kernel takes any number: a block for each of their tiles.

        UnsupportedLaunch beyond the number that the kernel was made for.
        """
        if RowCount() not in self.parameters:
            return self
        a = next(parameter for parameter in self.parameters if parameter.buffer == "A")
        (_, most), (_, tile) = a.sizes, a.box
        if rows > most:
            raise UnsupportedLaunch(
                "more rows than the kernel was made for", value=rows, limit=most, remedy="multiply them in parts"
            )
        return replace(self, grid=(self.grid[0] // -(-most // tile) * -(-rows // tile), 1, 1))

    @property
    def workspaces(self) -> tuple[PlainBuffer, ...]:
        """Buffers that the kernel keeps in device memory between launches, beside those it is given.

        Whole numbers there are flags: zeros before the first launch, and after each.
        """
        return tuple(plain for plain in self._plain if plain.buffer not in GIVEN)

    @property
    def _plain(self) -> list[PlainBuffer]:
        return [parameter for parameter in self.parameters if isinstance(parameter, PlainBuffer)]

    @property
    def bias_itemsize(self) -> int:
        """Bytes of an element of the kernel's bias; 0 where it takes none."""
        return next((plain.itemsize for plain in self._plain if plain.buffer == BIAS), 0)

    def columns(self, buffer: str) -> int:
        """Count the columns of a buffer that the kernel reaches by its address."""
        return next(plain.shape[-1] for plain in self._plain if plain.buffer == buffer)

    @property
    def cluster_blocks(self) -> int:
        """Blocks of a cluster."""
        return prod(self.cluster)

    def maps(self, buffer: str) -> bool:
        """Tell if the kernel reaches a buffer by tensor maps alone, so that its rows may lie anyhow."""
        return all(plain.buffer != buffer for plain in self._plain)


_KINDS = {kind.__name__: kind for kind in (TensorMap, PlainBuffer, RowCount, PlannedNumber, Real, int)}


@dataclass(frozen=True)
class _Written:
    """A plan as JSON, its parameters not read yet: each is of the type that its kind names."""

    kernel: str
    parameters: tuple[
        tuple[Literal["TensorMap", "PlainBuffer", "RowCount", "PlannedNumber", "Real", "int"], msgspec.Raw], ...
    ]
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared_bytes: int
    overlaps: bool
