"""Convolutions of few channels without an operand of windows: wgmma reads overlapping rows where the image lies.

With four channels and a stride of two, windows that are neighbours begin 16 bytes apart: two pixels, a *unit*. In
wgmma's operands without a swizzle, rows of eight elements along k lie 16 bytes apart as well, and a descriptor says how
far apart the next eight elements along k are: here one unit, so that what a row has as its second unit is what the
next row has as its first::

    image, a row of it in shared memory     unit 0 | unit 1 | unit 2 | unit 3 | unit 4 | ...
    windows                    row 0        [k 0..7  k 8..15  ...            ]
                               row 1                [k 0..7  k 8..15  ...            ]

Each pixel is loaded once by a block, its fourth channel and what is beyond the image's edges zeros, and no kernel in
front copies anything but the weights. A window of an odd number of columns ends within a unit, whose other pixel must
not be multiplied, not even by zero: such units are read from a second copy of the image, which has zeros there. Source:
PTX ISA, "Asynchronous warpgroup level matrix instructions" (matrix descriptor, no swizzle: leading and stride offsets).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from tvm import tirx
from tvm.ir import Expr
from tvm.script import tirx as T
from tvm.tirx import Buffer

from tensorir_ladder.kernels.epilogue import round_pair
from tensorir_ladder.kernels.short_stack import on_a_short_stack
from tensorir_ladder.kernels.wgmma import keep, retire
from tensorir_ladder.schedules.errors import IllegalWorkload
from tensorir_ladder.schedules.isa import (
    ADDRESS_MASK,
    PTX_TYPES,
    STEP,
    VECTOR_BYTES,
    WARPGROUP,
    WGMMA_ROWS,
    wgmma_element,
)

UNIT = 8  # elements: two pixels
CHANNELS = 4  # of a pixel in shared memory
STRIDE = 2  # pixels from one window to the next
GROUPS = 2  # warpgroups of a block
CORE_BYTES = 8 * VECTOR_BYTES  # of eight rows by eight elements
WIDEST_ROW = 256  # results of a row of an image
MOST_FILTERS = 128


class Pixel(NamedTuple):
    """An element of an image at a row and a column counted from its zeros: its indices, and whether it is no such zero.

    ``inside`` is None where an image has no zeros around it.
    """

    indices: tuple[Expr, ...]
    inside: Expr | None


@dataclass(frozen=True)
class Windows:
    """A convolution with a stride of 2: images, results of each, filters, the window, channels, and the image's dtype.

    ``rows`` are those of results that a block computes, an even number.
    """

    images: int
    high: int
    wide: int
    filters: int
    taps: tuple[int, int]
    channels: int
    dtype: str = "float16"
    rows: int = 4

    def misfit(self) -> str:
        """Say in a clause what the kernel does not take; empty where it takes all."""
        sizes = (
            (self.dtype in PTX_TYPES, f"pixels of {self.dtype}, not {' or '.join(PTX_TYPES)}"),
            (1 <= self.channels <= CHANNELS, f"{self.channels} channels, limit {CHANNELS}"),
            (self.units % 2 == 0, f"windows of {self.taps[1]} columns, {self.units} units, which must be even"),
            (self.wide <= WIDEST_ROW, f"rows of {self.wide} results, limit {WIDEST_ROW}"),
            (
                self.filters % 8 == 0 and 8 <= self.filters <= MOST_FILTERS,
                f"{self.filters} filters, not 8, 16, ... 128",
            ),
            (self.rows % GROUPS == 0, f"{self.rows} rows of a block, not shared by {GROUPS} warpgroups"),
        )
        return next((clause for fits, clause in sizes if not fits), "")

    @property
    def units(self) -> int:
        """Units of a window's row."""
        return -(-self.taps[1] * CHANNELS // UNIT)

    @property
    def tiles(self) -> int:
        """Instructions' rows, 64 each, that a row of results takes."""
        return -(-self.wide // WGMMA_ROWS)

    @property
    def row_units(self) -> int:
        """Units of an image's row in shared memory, those of rows that are not there counted."""
        return self.tiles * WGMMA_ROWS + self.units - 1

    @property
    def image_rows(self) -> int:
        """Rows of an image that a block needs."""
        return (self.rows - 1) * STRIDE + self.taps[0]

    @property
    def blocks_of_image(self) -> int:
        """Blocks that share an image."""
        return -(-self.high // self.rows)

    @property
    def steps(self) -> int:
        """Instructions along k for a tile."""
        return self.taps[0] * self.units // 2

    @property
    def weights(self) -> tuple[int, ...]:
        """The shape of the weights as they are given: by step, its unit, eight filters, filter, element of the unit."""
        return self.steps, STEP // UNIT, self.filters // 8, 8, UNIT

    def place_of_weight(self, step: Expr, unit: Expr, element: Expr) -> tuple[Expr, Expr, Expr]:
        """Return row and column of the window, and the channel, of an element of the weights as they are given."""
        steps_of_row = self.units // 2
        column = (step % steps_of_row * 2 + unit) * (UNIT // CHANNELS) + element // CHANNELS
        return step // steps_of_row, column, element % CHANNELS


@on_a_short_stack
def convolve_windows(
    windows: Windows, image: tuple[int, ...], pixel: Callable[[Expr, Expr, Expr, int], Pixel]
) -> tirx.PrimFunc:
    """``main(x, weights, y)``: each block multiplies all windows of a few rows of one image.

    ``image`` is the shape of x; ``pixel(number, row, column, channel)`` says where it has that element, rows and
    columns counted from the edge of its zeros. ``weights`` are in the order of :attr:`Windows.weights`, zeros where a
    window has none; y has a row for each window, and a column for each filter.

    ::

        threads: units of the image, their fourth channels and edges zeros, -> shared memory, twice
                 weights -> shared memory;  a block barrier
        each warpgroup, for each of its rows, for 64 windows at a time:
          wgmma for each two units of the window;  wait;  sums -> y

    Raises
    ------
    IllegalWorkload : for what :meth:`Windows.misfit` names.
    """
    if clause := windows.misfit():
        raise IllegalWorkload("a convolution by its windows", value=clause, remedy="copy the image")
    w, dtype = windows, windows.dtype
    ptx = PTX_TYPES[dtype]
    instruction = f"wgmma.mma_async.sync.aligned.m64n{w.filters}k{STEP}.f32.{ptx}.{ptx}"
    threads, units, registers = GROUPS * WARPGROUP, w.image_rows * w.row_units, WGMMA_ROWS * w.filters // WARPGROUP
    copy_bytes, weight_count = units * VECTOR_BYTES, w.steps * STEP * w.filters
    vectors, rows_of_group = weight_count // UNIT, w.rows // GROUPS
    edge_rows, edge_columns = (w.high - 1) * STRIDE + w.taps[0], (w.wide - 1) * STRIDE + w.taps[1]
    halves = w.taps[1] % 2 == 1  # a window's last unit has one pixel only

    def descriptor(address: Expr, leading: int, stride: int) -> Expr:
        window = T.bitwise_and(T.cuda.cvta_generic_to_shared(address), T.uint32(ADDRESS_MASK))
        distances = T.uint64((leading >> 4) << 16 | (stride >> 4) << 32)
        return T.bitwise_or(distances, T.Cast("uint64", T.shift_right(window, T.uint32(4))))

    def load_unit(own: Buffer, x: Buffer, number: Expr, row: Expr, column: Expr) -> None:
        """Emit the loads of two pixels, zeros for channels and places that there are none of.

        No load is conditional, but for where it loads from: branches would keep them from being on their way together.
        """
        zero = T.Cast(dtype, T.float32(0))
        inside = []
        for e in range(UNIT):
            at, channel = column + e // CHANNELS, e % CHANNELS
            if channel >= w.channels:
                T.buffer_store(own, zero, [e])
                continue
            found = pixel(number, row, at, channel)
            near = [T.max(T.min(index, extent - 1), 0) for index, extent in zip(found.indices, image)]
            T.buffer_store(own, x[tuple(near)], [e])
            within = T.And(row < edge_rows, at < edge_columns)
            inside.append((e, within if found.inside is None else T.And(within, found.inside)))
        for e, condition in inside:
            T.buffer_store(own, T.Select(condition, own[e], zero), [e])

    def leave_out_second(own: Buffer) -> None:
        """Emit zeros in the place of the second of two pixels."""
        for e in range(CHANNELS, UNIT):
            T.buffer_store(own, T.Cast(dtype, T.float32(0)), [e])

    def multiply(sums: Buffer, image_at: Expr, weights_at: Expr) -> None:
        """Emit all steps of 64 windows, whose first row's first unit is at ``image_at``, as one group."""
        keep(sums)
        T.evaluate(T.ptx.wgmma.fence.sync.aligned())
        own = [sums[i] for i in range(registers)]
        for step in range(w.steps):
            row, pair = divmod(step, w.units // 2)
            unit = row * w.row_units + pair * 2
            ends = halves and pair == w.units // 2 - 1
            leading = VECTOR_BYTES + (copy_bytes if ends else 0)
            a = descriptor(image_at, leading, CORE_BYTES) + T.uint64(unit)
            b = descriptor(weights_at, w.filters * VECTOR_BYTES, CORE_BYTES) + T.uint64(step * w.filters * 2)
            T.evaluate(T.ptx[instruction](*own, a, b, T.bool(step > 0), 1, 1, 0, 0))
        T.evaluate(T.ptx.wgmma.commit_group.sync.aligned())
        keep(sums)

    @T.inline
    def store(y, sums, packed, first, column, warp, lane):
        """Store two neighbouring results at once, of windows that the row of results has."""
        for pair in T.unroll(registers // 2):
            place = T.meta_var(wgmma_element(warp, lane, pair * 2))
            if column + place[0] < w.wide:
                round_pair(packed[0], sums[pair * 2], sums[pair * 2 + 1], dtype)
                T.ptx["st.global.b32"](y.ptr_to([first + column + place[0], place[1]]), packed[0])

    @T.prim_func
    def main(x_ptr: T.handle, weights_ptr: T.handle, y_ptr: T.handle):
        x = T.match_buffer(x_ptr, image, dtype, align=2)
        weights = T.match_buffer(weights_ptr, (weight_count,), dtype, align=VECTOR_BYTES)
        y = T.match_buffer(y_ptr, (w.images * w.high * w.wide, w.filters), dtype, align=VECTOR_BYTES)
        T.device_entry()
        block = T.cta_id([w.images * w.blocks_of_image])
        warpgroup = T.warpgroup_id([GROUPS])
        warp = T.warp_id_in_wg([4])
        lane = T.lane_id([32])
        thread = T.thread_id([threads])
        pool = T.SMEMPool()
        pixels = pool.alloc(((1 + halves) * units * UNIT,), dtype, align=128)
        filters = pool.alloc((weight_count,), dtype, align=128)
        pool.commit()
        sums = T.alloc_local((registers,), "float32")
        packed = T.alloc_local((1,), "uint32")
        own = T.alloc_local((UNIT,), dtype)
        number: T.let = block // w.blocks_of_image
        high: T.let = block % w.blocks_of_image * w.rows
        for i in T.unroll(-(-vectors // threads)):  # written out, their loads are on their way together
            if i * threads + thread < vectors:
                for e in T.vectorized(UNIT):
                    filters[(i * threads + thread) * UNIT + e] = weights[(i * threads + thread) * UNIT + e]
        for i in T.unroll(-(-units // threads)):
            unit: T.let = i * threads + thread
            if unit < units:
                row: T.let = high * STRIDE + unit // w.row_units
                column: T.let = unit % w.row_units * 2
                load_unit(own, x, number, row, column)
                for e in T.vectorized(UNIT):
                    pixels[unit * UNIT + e] = own[e]
                if halves:
                    leave_out_second(own)
                    for e in T.vectorized(UNIT):
                        pixels[(units + unit) * UNIT + e] = own[e]
        T.ptx.fence.proxy.async_.shared__cta()
        T.cuda.cta_sync()
        for i in T.serial(rows_of_group):
            own_row: T.let = warpgroup * rows_of_group + i
            if high + own_row < w.high:
                for tile in T.serial(w.tiles):
                    at: T.let = own_row * (STRIDE * w.row_units) + tile * WGMMA_ROWS
                    multiply(sums, pixels.ptr_to([at * UNIT]), filters.ptr_to([0]))
                    retire(sums, 0)
                    first: T.let = (number * w.high + high + own_row) * w.wide
                    store(y, sums, packed, first, tile * WGMMA_ROWS, warp, lane)

    return main
