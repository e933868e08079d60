"""Convolutions of pixels with few channels: of an image that a kernel in front copies to whole vectors.

Three channels of 16 bits are 6 bytes: no asynchronous copy brings a pixel, so that each of the 147 elements of a window
of 7 x 7 goes by itself, with its own place in the image to compute and its own edges to compare. With a fourth channel
of zeros, and the zeros around the image written down, a row of a window is one run of vectors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import tvm_ffi
from tvm import ir, te, tirx
from tvm.target import Target

from tensorir_ladder.relax.rules.computations import Computation, analyzer_for, loads_in, replaced, step_of
from tensorir_ladder.relax.rules.elementwise import kernels_of
from tensorir_ladder.relax.rules.normal_form import EpilogueEquation, equation_of
from tensorir_ladder.relax.rules.rule import NotTaken
from tensorir_ladder.schedules.cost import CLOCK_GHZ, Machine
from tensorir_ladder.schedules.inspection import is_constant, is_one
from tensorir_ladder.schedules.isa import PTX_TYPES
from tensorir_ladder.schedules.loops.vectorization import dtype_bytes
from tensorir_ladder.schedules.workloads import MAX_ELEMENTS

VECTOR = 4  # channels that are copied together: 8 bytes of 16-bit elements
MOST_CHANNELS = 2 * VECTOR
FEW_IMAGES = 8
ELEMENTS_PER_CYCLE = 1.1  # a multiprocessor brings by themselves: 32 x 224 x 224 x 3, 7 x 7, took 0.212 ms on an H200

Tensors = Mapping[tirx.Var, te.Tensor]


@dataclass(frozen=True)
class WidePixels:
    """A convolution of a copied image: ``function`` takes the copies, ``own``, behind the parameters of ``written``."""

    written: tirx.PrimFunc
    function: tirx.PrimFunc
    own: tuple[tirx.Var, ...]
    copying: tirx.Stmt

    def joined(self, lowered: tirx.PrimFunc) -> tirx.PrimFunc:
        """Return ``written`` as ``function``, lowered, behind the kernels that make the copies, in workspaces."""
        taken = dict(zip(lowered.params, (*self.written.params, *self.own), strict=True))
        body = tvm_ffi.structural_map(lowered.body, (tirx.Var, lambda var: taken.get(var, var)))
        made = self.written.with_body(tirx.SeqStmt([*map(tirx.AllocBuffer, self.own), self.copying, body]))
        for name, value in lowered.attrs.items():
            if name not in self.function.attrs:  # its own name, say
                made = made.with_attr(name, value)
        return made


@dataclass(frozen=True)
class Window:
    """An image as a convolution reads it: at ``others``, rows, columns and a channel, each an iterator or more.

    Rows and columns are ``across * strides + taps``, less what ``pixel`` says: the value at ``places``, which count
    from the edge of the image with its zeros. ``source`` is the parameter.
    """

    source: tirx.Var
    others: tuple[tirx.IterVar, ...]
    across: tuple[tirx.IterVar, ...]
    taps: tuple[tirx.IterVar, ...]
    channel: tirx.IterVar
    strides: tuple[int, ...]
    places: tuple[tirx.Var, ...]
    pixel: ir.Expr

    @property
    def channels(self) -> int:
        """Channels of a pixel of the copy: whole vectors."""
        return -(-_extent(self.channel) // VECTOR) * VECTOR

    @property
    def shape(self) -> list[ir.Expr]:
        """The copy's: ``others``, rows and columns with both edges, channels."""
        sides = zip(self.across, self.strides, self.taps)
        sizes = ((_extent(own) - 1) * stride + _extent(tap) for own, stride, tap in sides)
        return [*(each.dom.extent for each in self.others), *sizes, self.channels]


@dataclass(frozen=True)
class Convolution:
    """A convolution of few channels: its equation, the window, and the weights in terms of its iterators.

    ``columns`` are the iterators that weights have and windows have not, ``after`` is what becomes of a sum.
    """

    reduction: Computation
    window: Window
    weights: ir.Expr
    columns: tuple[tirx.IterVar, ...]
    after: EpilogueEquation


def convolution_of(func: tirx.PrimFunc) -> Convolution:
    """Read a function, its indices narrowed, as a convolution of 2 to 7 channels of 16 bits; NotTaken for all else."""
    reduction, factors, after = equation_of(func)
    operands = factors.first, factors.second
    found = [(made, other) for one, other in (operands, operands[::-1]) if (made := _window_of(one, reduction))]
    if not found or factors.scale:
        raise _left("no operand is a window of an image of few channels")
    window, weights = found[0]
    inside = [*window.others, *window.across]
    columns = tuple(each for each in reduction.spatial if not any(each.var.same_as(own.var) for own in inside))
    known = all(is_constant(each.dom.extent) for each in columns)
    if any(_reads(weights, each) for each in inside) or not columns or not known:
        raise _left("weights are not those of all places, or of unknown columns")
    if not all(
        isinstance(index, tirx.Var) or is_one(extent) for index, extent in zip(after.indices, after.buffer.shape)
    ):
        raise _left("results are not stored by places and columns")
    return Convolution(reduction, window, weights, columns, after)


def with_wide_pixels(func: tirx.PrimFunc, machine: Machine, target: Target) -> WidePixels:
    """Write a convolution of few channels as copies, and the convolution of these.

    ::

        before   sums[n, h, w, o] += x[n, 2·h + r − 3, 2·w + s − 3, c] · weight[r, s, c, o]     # 0 beyond the edges
        after    image_wide[n, y, u, c] = x[n, y − 3, u − 3, c]         # a kernel; 0 beyond the edges, and for c = 3
                 weights_wide[r, s, c, o] = weight[r, s, c, o]          # another
                 sums[n, h, w, o] += image_wide[n, 2·h + r, 2·w + s, c] · weights_wide[r, s, c, o]

    Raises
    ------
    NotTaken : for all else: operands that are not of 16 bits, extents that are not known (but those in front of rows),
        dilated windows, results that are stored otherwise than by places and columns; and where copies would take
        longer than it takes to bring elements one by one.
    """
    found = convolution_of(func)
    window = found.window
    _check_worthwhile(window, machine)
    tensors = {param: te.placeholder(param.shape, param.dtype, str(param.name)) for param in func.params}
    copies = _copies(found, tensors)
    own = tuple(tirx.decl_buffer(copy.shape, copy.dtype, str(copy.op.name)) for copy in copies)
    copying = tirx.SeqStmt(
        [kernels_of([*tensors.values(), copy], [*func.params, buffer], target) for copy, buffer in zip(copies, own)]
    )
    read = [te.placeholder(copy.shape, copy.dtype, str(copy.op.name)) for copy in copies]
    made = _convolved(found, read, tensors)
    given = [made if param.same_as(found.after.buffer) else tensors[param] for param in func.params]
    return WidePixels(func, te.create_prim_func([*given, *read]), own, copying)


def _window_of(operand: ir.Expr, reduction: Computation) -> Window | None:
    """Read an operand as a window of an image of few channels; None where it is none."""
    loads = loads_in(operand)
    if len(loads) != 1 or len(loads[0].indices) < 3 or str(loads[0].source.dtype) not in PTX_TYPES:
        return None
    *_, row, column, last = loads[0].indices
    indices = row, column
    groups = reduction.spatial, reduction.reduction
    read = [[each for each in group if _reads(index, each)] for group in groups for index in indices]
    channels = [each for each in reduction.reduction if each.var.same_as(last)]
    if any(len(each) != 1 for each in (*read, channels)) or len(reduction.reduction) != 3:
        return None
    high, wide, down, right = (each for (each,) in read)
    across, taps, (channel,) = (high, wide), (down, right), channels
    if len({each.var for each in (*across, *taps, channel)}) < 5:
        return None
    if not all(is_constant(each.dom.extent) for each in (*across, *taps, channel)):
        return None
    strides, steps = (tuple(step_of(i, each.var) for i, each in zip(indices, group)) for group in (across, taps))
    gaps = any(not 0 < stride <= _extent(tap) for stride, tap in zip(strides, taps))
    if gaps or steps != (1, 1) or not 1 < _extent(channel) < MOST_CHANNELS or _extent(channel) % VECTOR == 0:
        return None
    places = tuple(tirx.Var(name, "int32") for name in ("row", "column"))
    moved = {tap.var: place - own.var * stride for tap, place, own, stride in zip(taps, places, across, strides)}
    pixel = analyzer_for(reduction.iterators).simplify(replaced(operand, moved))
    if any(_reads(pixel, each) for each in across):
        return None  # a dilated window, or one whose edges lie elsewhere in each of its places
    others = tuple(e for e in reduction.spatial if _reads(operand, e) and not any(e.var.same_as(a.var) for a in across))
    return Window(loads[0].source, others, across, taps, channel, strides, places, pixel)


def _copies(found: Convolution, tensors: Tensors) -> list[te.Tensor]:
    """Compute the copy of the image, and that of the weights in the order of a window's elements."""
    window, columns = found.window, found.columns
    channel = window.channel
    pixels = [*(each.var for each in window.others), *window.places, channel.var]
    steps = [*(tap.var for tap in window.taps), channel.var, *(each.var for each in columns)]

    def copied(value: ir.Expr, order: Sequence[tirx.Var]) -> Callable[..., ir.Expr]:
        def element(*at: tirx.Var) -> ir.Expr:
            taken = dict(zip(order, at))
            own = of_tensors(replaced(value, taken), tensors)
            return tirx.if_then_else(taken[channel.var] < channel.dom.extent, own, tirx.const(0, str(value.ty.dtype)))

        return element

    shape = [*map(_extent, window.taps), window.channels, *(each.dom.extent for each in columns)]
    return [
        te.compute(window.shape, copied(window.pixel, pixels), "image_wide"),
        te.compute(shape, copied(found.weights, steps), "weights_wide"),
    ]


def _convolved(found: Convolution, copies: Sequence[te.Tensor], tensors: Tensors) -> te.Tensor:
    """Compute the convolution of the copies, and what follows it."""
    (image, weights), reduction, window, after = copies, found.reduction, found.window, found.after
    steps = [te.reduce_axis((0, int(extent))) for extent in weights.shape[:3]]
    summed = str(after.total.ty.dtype)

    def total(*at: tirx.Var) -> ir.Expr:
        taken = {each.var: index for each, index in zip(reduction.spatial, at)}
        places = [taken[own.var] * stride + tap for own, stride, tap in zip(window.across, window.strides, steps)]
        pixel = image(*(taken[each.var] for each in window.others), *places, steps[-1])
        weight = weights(*steps, *(taken[each.var] for each in found.columns))
        return te.sum(pixel.astype(summed) * weight.astype(summed), axis=steps)

    sums = te.compute([each.dom.extent for each in reduction.spatial], total, f"{reduction.name}_sums")

    def result(*at: tirx.Var) -> ir.Expr:
        taken = {own: index for own, index in zip(after.indices, at) if isinstance(own, tirx.Var)}
        value = of_tensors(replaced(after.value, taken), tensors)
        return replaced(value, {after.total: sums(*(taken[each.var] for each in reduction.spatial))})

    return te.compute(after.buffer.shape, result, str(after.buffer.name))


def _check_worthwhile(window: Window, machine: Machine) -> None:
    """Raise NotTaken where the kernels that copy take longer than to bring elements one by one, and not by vectors."""
    places = math.prod(_known(each.dom.extent) for each in (*window.others, *window.across))
    elements = places * math.prod(map(_extent, window.taps)) * _extent(window.channel)
    saved = elements * (1 - 1 / VECTOR) / (ELEMENTS_PER_CYCLE * machine.multiprocessors)
    size, rates = math.prod(map(_known, window.shape)) * dtype_bytes(str(window.source.dtype)), machine.rates
    copying = (2 * size / rates.copying_gb_s + 2e3 * rates.copying_us) * CLOCK_GHZ
    if saved <= copying:
        raise _left("a copy of the image takes longer than to bring it as it is", round(copying), round(saved))
    if math.prod(map(_known, window.shape)) >= MAX_ELEMENTS:
        raise _left("the image's copy is beyond 32-bit indexing")


def of_tensors(value: ir.Expr, tensors: Tensors) -> ir.Expr:
    """Return an expression that reads tensors in the place of the parameters that they stand for."""
    return tvm_ffi.structural_map(value, (ir.TensorLoad, lambda load: tensors[load.source](*load.indices)))


def _reads(value: ir.Expr, iterator: tirx.IterVar) -> bool:
    found: list[tirx.Var] = []
    tvm_ffi.structural_walk(value, (tirx.Var, lambda var: found.append(var) if var.same_as(iterator.var) else None))
    return bool(found)


def _extent(iterator: tirx.IterVar) -> int:
    return int(iterator.dom.extent)


def _known(extent: ir.Expr) -> int:
    """Return an extent, one known at run time only taken for a few images."""
    return int(extent) if is_constant(extent) else FEW_IMAGES


def _left(problem: str, value: object = None, limit: object = None) -> NotTaken:
    return NotTaken(problem, value=value, limit=limit, remedy="multiply the image as it is")
