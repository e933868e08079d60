"""A rule for depthwise convolutions with channels last: a thread sums the windows of neighbouring pixels of a row."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tvm_ffi
from tvm import ir, tirx
from tvm.target import Target

from tensorir_ladder.relax.rules import vectors as v
from tensorir_ladder.relax.rules.computations import Computation, analyzer_for, loads_in, replaced, step_of
from tensorir_ladder.relax.rules.normal_form import IF, EpilogueEquation, equation_of, narrowed
from tensorir_ladder.relax.rules.rule import HOW, NotTaken, Rule
from tensorir_ladder.schedules.cost import Machine, assumed_machine
from tensorir_ladder.schedules.inspection import is_constant, is_true
from tensorir_ladder.schedules.isa import VECTOR_BYTES, WARP
from tensorir_ladder.schedules.loops.vectorization import dtype_bytes

MOST_PIXELS = 8  # of a thread, neighbours in a row
MOST_ROWS = 8  # of a block, neighbours in a column: they share what they load, in L1
BLOCK_THREADS = 256
RESIDENT_WARPS = 32  # of a multiprocessor
ISSUED = 4  # instructions of warps that a multiprocessor issues in a cycle
LINE_BYTES = 128  # that it loads from L1 in a cycle
LATENCY = 300  # cycles of a load, which a row of the window costs each thread
FEW_IMAGES = 8  # what an extent is taken for that only run time knows
MOST_REGISTERS = 160  # of 32 bits, for sums and what is loaded of a row


class Depthwise(Rule):
    """Schedules sums over windows of an image with channels last, each channel multiplied by weights of its own.

    ::

        before   for n, h, w, c, r, s:  y[n, h, w, c] += x[n, 2·h + r − 1, 2·w + s − 1, c] · weight[r, s, 0, c]
                 for n, h, w, c:        z[n, h, w, c] = min(max(y[n, h, w, c] + bias[c], 0), 6)
        after    for blocks of rows, columns and channels; for thread = (one row, some pixels, 2 channels):
                     for r:                                          # of the window
                         x_row = x[n, 2·h + r − 1, ..., channels]    # registers; 0 beyond the edges
                         taps = weight[r, ..., channels]
                         sums[pixel, channel] += x_row[2·pixel + s, channel] · taps[s, channel]      # float32
                     z[n, h, pixels, channels] = min(max(sums + bias, 0), 6)

    Neighbouring pixels share what is loaded of the image and the weights; how many a thread takes, and of how many
    channels, is what should take the fewest cycles. Not taken: several channels of the result for one of the image,
    strides along with dilation, rows or columns of symbolic extent.
    """

    name = "depthwise"

    def schedule(self, func: tirx.PrimFunc, target: Target) -> tirx.PrimFunc:
        """Return the function with a kernel of its own; NotTaken for all but depthwise convolutions."""
        func = narrowed(func)
        window = window_of(func)
        tile = min(_tiles(window), key=lambda tile: tile.cycles(window, assumed_machine(target)))
        made = f"{tile.pixels} pixels of {tile.channels} channels a thread, blocks of {tile.threads} threads"
        return func.with_body(_Kernel(window, tile).body()).with_attr(HOW, made)


@dataclass(frozen=True)
class Window:
    """A sum over a window: what is read of the image and of the weights, and the iterators by what they index.

    ``column`` and ``tap`` index a row of the image, ``stride`` and ``dilation`` pixels for a step; ``channel`` is last
    in image, weights and result; ``others`` are the further iterators of the result, ``taps`` those of the window.
    """

    reduction: Computation
    image: ir.Expr
    weight: ir.TensorLoad
    after: EpilogueEquation
    others: tuple[tirx.IterVar, ...]
    column: tirx.IterVar
    channel: tirx.IterVar
    taps: tuple[tirx.IterVar, ...]
    tap: tirx.IterVar
    stride: int
    dilation: int

    def pixel(self, first: ir.Expr, offset: ir.Expr | int) -> ir.Expr:
        """Return the pixel that is ``offset`` behind where the window of column ``first`` begins."""
        if self.stride == 1:
            return replaced(self.image, {self.column.var: first + offset, self.tap.var: tirx.const(0, "int32")})
        return replaced(self.image, {self.column.var: first, self.tap.var: tirx.const(offset, "int32")})

    def offsets(self, pixels: int) -> list[int]:
        """List the places in a row of the image that the windows of so many columns have."""
        steps = range(_extent(self.tap))
        return sorted({place * self.stride + step * self.dilation for place in range(pixels) for step in steps})


@dataclass(frozen=True)
class Tile:
    """Pixels and channels of a thread, rows and vectors of channels of a block."""

    pixels: int
    channels: int
    rows: int
    vectors: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.rows * self.vectors

    def blocks(self, window: Window) -> list[ir.Expr]:
        """List how many blocks there are of each further iterator, of rows, of columns and of channels."""
        *outer, rows = [each.dom.extent for each in window.others] or [_constant(1)]
        vectors = _extent(window.channel) // self.channels
        counts = (-(-_extent(window.column) // self.pixels), -(-vectors // self.vectors))
        return [*outer, v.ceil_div(rows, self.rows), *map(_constant, counts)]

    def cycles(self, window: Window, machine: Machine) -> float:
        """Return about how many cycles the convolution takes.

        ::

            blocks of a multiprocessor · max(instructions, lines from L1, bytes from L2) + waves · loads' latency
        """
        steps, offsets, lanes = _extent(window.tap), len(window.offsets(self.pixels)), self.channels
        rows, itemsize = math.prod(map(_extent, window.taps)), dtype_bytes(str(window.image.ty.dtype))
        lines = max(1, lanes * itemsize * WARP / LINE_BYTES)
        instructions = (offsets + steps) * (2 + lanes) + self.pixels * steps * lanes
        warp = rows * max(instructions / ISSUED, (offsets + steps) * lines)
        read = (self.rows - 1 + rows) * offsets * self.vectors * lanes * itemsize
        warps = -(-self.threads // WARP)
        count = math.prod(int(count) if is_constant(count) else FEW_IMAGES for count in self.blocks(window))
        blocks = math.ceil(count / machine.multiprocessors)
        busy = blocks * max(warps * warp, read / machine.rates.load_bytes_per_cycle)
        waves = math.ceil(blocks * warps / RESIDENT_WARPS)
        return max(busy, warp * ISSUED) + waves * rows * LATENCY


def window_of(func: tirx.PrimFunc) -> Window:
    """Read a function, its indices narrowed, as a depthwise convolution with channels last; NotTaken for all else."""
    reduction, factors, after = equation_of(func)
    for image, weight in ((factors.first, factors.second), (factors.second, factors.first)):
        window = _window(reduction, image, weight, after)
        if window and not factors.scale:
            return window
    raise _left("a sum that is no depthwise convolution")


def _window(reduction: Computation, image: ir.Expr, weight: ir.Expr, after: EpilogueEquation) -> Window | None:
    loads = loads_in(image)
    if len(loads) != 1 or not isinstance(weight, ir.TensorLoad) or len(loads[0].indices) < 2:
        return None
    *_, place, last = loads[0].indices
    spatial, taps = reduction.spatial, reduction.reduction
    channels = [each for each in spatial if each.var.same_as(last)]
    columns = [each for each in spatial if v.uses(place, [each.var])]
    along = [each for each in taps if v.uses(place, [each.var])]
    if [len(channels), len(columns), len(along)] != [1, 1, 1]:
        return None
    (channel,), (column,), (tap,) = channels, columns, along
    others = tuple(each for each in spatial if not each.var.same_as(channel.var) and not each.var.same_as(column.var))
    rest = tuple(each for each in taps if not each.var.same_as(tap.var))
    ends = [one.indices[-1] if one.indices else None for one in (weight, after)]
    known = [channel, column, *taps, *others[-1:]]
    taken = (
        (image.same_as(loads[0]) or (_is_branch(image) and image.args[1].same_as(loads[0])))
        and not any(v.uses(index, [channel.var]) for index in _places(image))
        and not any(v.uses(index, [each.var for each in (*others, column)]) for index in weight.indices)
        and all(end is not None and end.same_as(channel.var) for end in ends)
        and all(is_constant(each.dom.extent) for each in known)
    )
    stride, dilation = step_of(place, column.var), step_of(place, tap.var)
    if not taken or min(stride, dilation) != 1:
        return None
    window = Window(reduction, image, weight, after, others, column, channel, rest, tap, stride, dilation)
    return window if _is_of_places(window) else None


def _is_of_places(window: Window) -> bool:
    """Tell whether pixels depend on the sum of column and tap alone."""
    simplify, first = analyzer_for(window.reduction.iterators).simplify, window.column.var
    for place, step in ((1, 1), (2, _extent(window.tap) - 1)):
        taken = {first: first + place, window.tap.var: tirx.const(step, "int32")}
        found = window.pixel(first, place * window.stride + step * window.dilation)
        pairs = zip(_places(replaced(window.image, taken)), _places(found))
        if not all(tvm_ffi.structural_equal(simplify(one), simplify(other)) for one, other in pairs):
            return False
    return True


def _places(image: ir.Expr) -> list[ir.Expr]:
    """List the indices of an image but for that of channels, and the condition under which it is read."""
    return [*loads_in(image)[0].indices[:-1], *([image.args[0]] if _is_branch(image) else [])]


class _Kernel:
    """Writes the kernel of a window by a tile."""

    def __init__(self, window: Window, tile: Tile) -> None:
        self.window, self.tile = window, tile
        self.steps, self.offsets = _extent(window.tap), window.offsets(tile.pixels)
        self.row, self.columns, self.vector = (tirx.Var(name, "int32") for name in ("row", "columns", "vector"))
        self.first, self.channel = self.columns * tile.pixels, self.vector * tile.channels
        self.at: v.Values = {}
        self.analyzer = analyzer_for(window.reduction.iterators)
        self.sums = v.registers("sums", tile.pixels * tile.channels, "float32")

    def body(self) -> tirx.Stmt:
        counts = self.tile.blocks(self.window)
        return v.threads(
            "blockIdx.x",
            v.product(counts),
            lambda block: v.threads("threadIdx.x", self.tile.threads, lambda thread: self._thread(block, thread)),
        )

    def _thread(self, block: ir.Expr, thread: ir.Expr) -> tirx.Stmt:
        window, tile = self.window, self.tile
        *outer, rows, columns, vectors = v.digits(block, tile.blocks(window))
        inside = v.digits(thread, [_constant(tile.rows), _constant(tile.vectors)])
        numbers = {self.row: rows * tile.rows + inside[0], self.columns: columns}
        numbers[self.vector] = vectors * tile.vectors + inside[1]
        height = window.others[-1].dom.extent if window.others else _constant(1)
        width, depth = _extent(window.column), _extent(window.channel) // tile.channels
        limits = {self.row: height, self.columns: _constant(-(-width // tile.pixels)), self.vector: _constant(depth)}
        for var, limit in limits.items():
            self.analyzer.bind(var, ir.Range.from_min_extent(_constant(0), limit))
        self.at = dict(zip((each.var for each in window.others), [*outer, self.row] if window.others else []))
        ragged = [
            var < limit
            for var, limit, size in ((self.row, height, tile.rows), (self.vector, limits[self.vector], tile.vectors))
            if not v.is_multiple(limit, size)
        ]
        made = v.sequence([tirx.AllocBuffer(self.sums), self._zeros(), self._summed(), self._finished()])
        return v.sequence([*(tirx.Bind(var, value) for var, value in numbers.items()), v.where(ragged, made)])

    def _zeros(self) -> tirx.Stmt:
        zero = tirx.const(0, "float32")
        return v.unrolled("slot", int(self.sums.shape[0]), lambda slot: tirx.BufferStore(self.sums, zero, [slot]))

    def _summed(self) -> tirx.Stmt:
        """Add up the window's rows, one after the other."""
        window, tile = self.window, self.tile
        pixels = v.registers("pixels", (self.offsets[-1] + 1) * tile.channels, str(window.image.ty.dtype))
        weights = v.registers("weights", self.steps * tile.channels, str(window.weight.source.dtype))
        lanes = tile.channels

        def product(place: ir.Expr, step: ir.Expr, lane: ir.Expr) -> tirx.Stmt:
            slot = place * lanes + lane
            pixel = pixels[(place * window.stride + step * window.dilation) * lanes + lane].astype("float32")
            value = self.sums[slot] + pixel * weights[step * lanes + lane].astype("float32")
            return tirx.BufferStore(self.sums, value, [slot])

        def row(at: v.Values) -> tirx.Stmt:
            taps = [replaced(window.weight, {**at, window.tap.var: _constant(step)}) for step in range(self.steps)]
            loads = [self._pixel(pixels, offset, at) for offset in self.offsets]
            loads += [self._loaded(weights, step, tap) for step, tap in enumerate(taps)]
            return v.sequence([*loads, _nest((tile.pixels, self.steps, lanes), product)])

        rows = _over(window.taps, row, self.at)
        return v.sequence([tirx.AllocBuffer(pixels), tirx.AllocBuffer(weights), rows])

    def _pixel(self, registers: tirx.Var, offset: int, at: v.Values) -> tirx.Stmt:
        """Load the channels of a pixel, or what is beyond the edges."""
        window, lanes = self.window, self.tile.channels
        value = replaced(window.pixel(self.first, offset), at)
        conditions, outside = [], tirx.const(0, str(value.ty.dtype))
        if _is_branch(value):
            condition, value, outside = value.args
            conditions.append(condition)
        width = _extent(window.column)
        if width % self.tile.pixels:
            last = (width - 1) * window.stride + (self.steps - 1) * window.dilation
            conditions.append(self.first * window.stride + offset <= last)
        conditions = [one for one in map(self.analyzer.simplify, conditions) if not is_true(one)]
        loaded = self._loaded(registers, offset, value)
        if not conditions:
            return loaded
        filled = _vectorized(lanes, lambda lane: tirx.BufferStore(registers, outside, [offset * lanes + lane]))
        return tirx.IfThenElse(functools.reduce(tirx.And, conditions), loaded, filled)

    def _loaded(self, registers: tirx.Var, place: int, load: ir.TensorLoad) -> tirx.Stmt:
        lanes, indices = self.tile.channels, [self.analyzer.simplify(index) for index in load.indices[:-1]]

        def element(lane: ir.Expr) -> tirx.Stmt:
            value = tirx.BufferLoad(load.source, [*indices, self.channel + lane])
            return tirx.BufferStore(registers, value, [place * lanes + lane])

        return _vectorized(lanes, element)

    def _finished(self) -> tirx.Stmt:
        """Make results of sums, and store them."""
        after, lanes = self.window.after, self.tile.channels
        results = v.registers("results", lanes, str(after.buffer.dtype))
        operands = [(load, v.registers("operand", lanes, str(load.source.dtype))) for load in self._by_channels()]
        width = _extent(self.window.column)

        def pixel(place: int) -> tirx.Stmt:
            at = {**self.at, self.window.column.var: self.first + place}

            def of_registers(load: ir.TensorLoad, lane: ir.Expr) -> ir.TensorLoad:
                found = (local for own, local in operands if tvm_ffi.structural_equal(load, own))
                return next((tirx.BufferLoad(local, [lane]) for local in found), load)

            def result(lane: ir.Expr) -> tirx.Stmt:
                taken = {
                    **at,
                    self.window.channel.var: self.channel + lane,
                    after.total: self.sums[place * lanes + lane],
                }
                value = tvm_ffi.structural_map(after.value, (ir.TensorLoad, lambda load: of_registers(load, lane)))
                return tirx.BufferStore(results, replaced(value, taken), [lane])

            def stored(lane: ir.Expr) -> tirx.Stmt:
                indices = [self.analyzer.simplify(replaced(index, at)) for index in after.indices[:-1]]
                return tirx.BufferStore(after.buffer, tirx.BufferLoad(results, [lane]), [*indices, self.channel + lane])

            loads = [self._loaded(local, 0, replaced(load, at)) for load, local in operands]
            made = v.sequence([*loads, v.unrolled("lane", lanes, result), _vectorized(lanes, stored)])
            return v.where([self.first + place < width if width % self.tile.pixels else None], made)

        allocations = [tirx.AllocBuffer(buffer) for buffer in (results, *(local for _, local in operands))]
        return v.sequence([*allocations, *map(pixel, range(self.tile.pixels))])

    def _by_channels(self) -> list[ir.TensorLoad]:
        """List what a result reads an element of for each channel, unless something is read under a condition."""
        value, channel = self.window.after.value, self.window.channel.var
        branches: list[ir.Call] = []
        tvm_ffi.structural_walk(value, (ir.Call, lambda call: branches.append(call) if _is_branch(call) else None))
        found: list[ir.TensorLoad] = []
        for load in loads_in(value) if not branches else []:
            known = any(tvm_ffi.structural_equal(load, other) for other in found)
            along = load.indices and load.indices[-1].same_as(channel)
            if along and not known and not any(v.uses(index, [channel]) for index in load.indices[:-1]):
                found.append(load)
        return found


def _tiles(window: Window) -> list[Tile]:
    """List tiles: pixels that registers hold; rows and vectors of channels that leave the fewest threads idle."""
    size = max(dtype_bytes(str(load.source.dtype)) for load in (*loads_in(window.image), window.weight))
    height, tiles = _extent(window.others[-1]) if window.others else 1, []
    for channels in (1, 2, 4, 8):
        if _extent(window.channel) % channels or channels * size > VECTOR_BYTES:
            continue
        depth = _extent(window.channel) // channels
        vectors = _parts(depth, WARP)
        most = _parts(height, min(MOST_ROWS, BLOCK_THREADS // vectors))
        for pixels in range(1, min(MOST_PIXELS, _extent(window.column)) + 1):
            held = (window.offsets(pixels)[-1] + 1 + _extent(window.tap) + 2 * pixels) * channels
            if pixels == 1 or held <= MOST_REGISTERS:
                few = [rows for rows in (4, 2, 1) if rows < most]
                tiles += [Tile(pixels, channels, rows, vectors) for rows in (most, *few)]
    return tiles


def _parts(extent: int, most: int) -> int:
    """Return how many of an extent's elements a block takes: up to ``most``, as few idle ones as can be, then more."""
    return min(range(min(extent, most), 0, -1), key=lambda count: -(-extent // count) * max(count, most // 2))


def _nest(extents: Sequence[int], body: Callable[..., tirx.Stmt], *outer: ir.Expr) -> tirx.Stmt:
    """Return loops inside each other that are written out."""
    if not extents:
        return body(*outer)
    return v.unrolled("step", extents[0], lambda index: _nest(extents[1:], body, *outer, index))


def _over(iterators: Sequence[tirx.IterVar], body: Callable[[v.Values], tirx.Stmt], at: v.Values) -> tirx.Stmt:
    """Return loops over iterators, inside each other."""
    if not iterators:
        return body(at)
    first, *rest = iterators
    return v.loop(str(first.var.name), _extent(first), lambda index: _over(rest, body, {**at, first.var: index}))


def _vectorized(lanes: int, body: Callable[[ir.Expr], tirx.Stmt]) -> tirx.Stmt:
    return v.loop("lane", lanes, body, tirx.ForKind.VECTORIZED)


def _is_branch(value: ir.Expr) -> bool:
    return isinstance(value, ir.Call) and str(getattr(value.op, "name", "")) == IF


def _constant(extent: ir.Expr | int) -> ir.Expr:
    return tirx.const(extent, "int32") if isinstance(extent, int) else extent


def _extent(iterator: tirx.IterVar) -> int:
    return int(iterator.dom.extent)


def _left(problem: str) -> NotTaken:
    return NotTaken(problem, remedy="leave it to the rule for rows")
