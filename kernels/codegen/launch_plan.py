"""What it takes to launch an explicit kernel, as data: its parameters, and how many threads in how many blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from tensorir_ladder.schedules.errors import IllegalSchedule
from tensorir_ladder.schedules.loops.vectorization import dtype_bytes

BIAS = "bias"
ROWS_PARAMETER = "rows"  # of a kernel that takes any number of rows
GIVEN = ("A", "B", "C", BIAS)  # buffers of a kernel that a caller gives; all others are its workspaces


class UnsupportedLaunch(IllegalSchedule):
    """A host function that does something else than launching one kernel with tensor maps and plain pointers."""


@dataclass(frozen=True)
class Rows:
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

    def extent(self, itemsize: int) -> int:
        """Bytes from the first element to behind the last."""
        one = (self.rows - 1) * self.row_bytes + self.columns * itemsize
        return (self.batch - 1) * self.batch_bytes + one


@dataclass(frozen=True)
class TensorMap:
    """A kernel's tensor map of a buffer, as cuTensorMapEncodeTiled takes it: sizes from the innermost, in elements.

    ``strides`` are bytes, of every dimension but the innermost. The last four are the driver's enumerators.
    """

    buffer: str
    dtype: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    interleave: int
    swizzle: int
    l2_promotion: int
    oob_fill: int

    def of(self, matrix: Rows) -> TensorMap:
        """The same map of a matrix at hand, whose rows may be shorter or further apart than those it was made for.

        What a kernel loads beyond the matrix's edges are zeros still. UnsupportedLaunch for a map of other rank.
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
    """A kernel's pointer to a buffer whose shape is written into the kernel; ``dtype`` is that of its host code."""

    buffer: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return dtype_bytes(self.dtype)

    def check(self, matrix: Rows) -> None:
        """Raise UnsupportedLaunch for a matrix that lies otherwise than the kernel was written for."""
        if matrix.shape != (1, *self.shape)[-2:] or (
            matrix.rows > 1 and matrix.row_bytes != matrix.columns * self.itemsize
        ):
            raise UnsupportedLaunch(
                f"the kernel reaches {self.buffer} by its address",
                value=f"{matrix.rows} rows of {matrix.columns}, {matrix.row_bytes} bytes apart",
                limit=f"{' x '.join(map(str, self.shape))}, side by side",
                remedy="give a contiguous matrix of that shape",
            )


@dataclass(frozen=True)
class RowCount:
    """A kernel's whole number that says how many rows A and C have."""

    buffer: str = ROWS_PARAMETER


@dataclass(frozen=True)
class LaunchPlan:
    """One kernel's launch: its parameters in order, and extents along x, y, z; blocks are counted, not clusters.

    ``overlaps``: the kernel waits itself for the one before it in the stream, so that it may begin earlier.
    """

    kernel: str
    parameters: tuple[TensorMap | PlainBuffer | RowCount, ...]
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared_bytes: int
    overlaps: bool = False

    def of_rows(self, rows: int) -> LaunchPlan:
        """The launch for an A of so many rows, where the kernel takes any number: a block for each of their tiles.

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
        """What the kernel keeps in device memory between launches, beside what it is given.

        Whole numbers there are flags: zeros before the first launch, and after each.
        """
        plain = (parameter for parameter in self.parameters if isinstance(parameter, PlainBuffer))
        return tuple(buffer for buffer in plain if buffer.buffer not in GIVEN)

    @property
    def bias_itemsize(self) -> int:
        """Bytes of an element of the kernel's bias; 0 where it takes none."""
        return next((parameter.itemsize for parameter in self.parameters if parameter.buffer == BIAS), 0)

    @property
    def cluster_blocks(self) -> int:
        """Blocks of a cluster."""
        return prod(self.cluster)

    def maps(self, buffer: str) -> bool:
        """Whether the kernel reaches a buffer by tensor maps alone, so that its rows may lie anyhow."""
        return all(isinstance(parameter, TensorMap) for parameter in self.parameters if parameter.buffer == buffer)
