"""Convolutions of few channels in Relax modules as launches of :func:`kernels.windows.convolve_windows`."""

from __future__ import annotations

import hashlib
import math

import tvm_ffi
from tvm import ir, te, tirx
from tvm.ir import Expr
from tvm.target import Target

from tensorir_ladder.kernels.codegen.lowering import with_kernels
from tensorir_ladder.kernels.windows import STRIDE, Pixel, Windows, convolve_windows
from tensorir_ladder.relax.linking import device_code, launch
from tensorir_ladder.relax.rules import FewChannelConvolution, NotTaken, convolution_of, kernels_of, replaced
from tensorir_ladder.relax.rules.rule import HOW, SCHEDULED
from tensorir_ladder.schedules.inspection import is_constant
from tensorir_ladder.schedules.isa import WGMMA_ARCH

LEAVE = "copy the image"
IF = "prim.if_then_else"
ROWS = 4  # of results that a block computes
DIGITS = 12  # of a digest, by which kernels are told from each other


def launched_by_windows(func: tirx.PrimFunc, target: Target, rows: int = ROWS) -> tirx.PrimFunc:
    """Return a function that is no more than a convolution of few channels as a launch, and what orders its weights.

    ``rows`` of results are a block's. It must be linked with its kernel (:func:`relax.linking.link_kernels`).

    Raises
    ------
    NotTaken : for all else: what :func:`relax.rules.convolution_of` leaves, an epilogue, a stride other than 2,
        unknown extents, what :meth:`kernels.windows.Windows.misfit` names, and targets other than sm_90a.
    """
    found = convolution_of(func)
    windows = _windows_of(found, rows)
    if (arch := str(target.attrs.get("arch", ""))) != WGMMA_ARCH:
        raise NotTaken("windows are wgmma's operands", value=arch, limit=WGMMA_ARCH, remedy=LEAVE)
    if clause := windows.misfit():
        raise NotTaken("a convolution that is not multiplied by its windows", value=clause, remedy=LEAVE)
    window = found.window

    load, inside = _read(window.pixel)

    def pixel(number: Expr, row: Expr, column: Expr, channel: int) -> Pixel:
        taken = dict(zip(window.places, (row, column))) | {each.var: number for each in window.others}
        taken[window.channel.var] = tirx.const(channel, "int32")
        indices = tuple(replaced(index, taken) for index in load.indices)
        return Pixel(indices, None if inside is None else replaced(inside, taken))

    kernel = convolve_windows(windows, tuple(map(int, window.source.shape)), pixel)
    made_of = f"{windows} {window.source.shape} {window.pixel}".encode()
    code = device_code(kernel, f"windows_{hashlib.sha256(made_of).hexdigest()[:DIGITS]}", target)
    weights, ordering = _in_order(found, windows, func, target)
    matrices = {"x": window.source, "weights": weights, "y": found.after.buffer}
    body = [tirx.AllocBuffer(weights), ordering, launch(code.plan, matrices, {}, {}, code.plan.grid[0])]
    made = func.with_body(tirx.SeqStmt(body)).with_attr(SCHEDULED, True)
    kernels = ir.IRModule(dict(code.device.functions_items()))
    return with_kernels(made, kernels).with_attr(
        HOW, f"windows of {windows.taps[0]}x{windows.taps[1]}, {rows} rows a block"
    )


def _read(pixel: Expr) -> tuple[ir.TensorLoad, Expr | None]:
    """Read a pixel as a load, and the condition without which it is 0; NotTaken for one that is computed otherwise."""
    if isinstance(pixel, ir.TensorLoad):
        return pixel, None
    chosen = pixel.args if isinstance(pixel, ir.Call) and pixel.op.name == IF else ()
    loaded = len(chosen) == 3 and isinstance(chosen[1], ir.TensorLoad) and isinstance(chosen[2], tirx.FloatImm)
    if loaded and float(chosen[2].value) == 0:
        return chosen[1], chosen[0]
    raise NotTaken("a pixel that is computed", value=pixel, remedy=LEAVE)


def _windows_of(found: FewChannelConvolution, rows: int) -> Windows:
    """Return the kernel's extents; NotTaken where it has no such."""
    window, after = found.window, found.after
    rounded = after.total.astype(str(after.buffer.dtype))
    order = [each.var for each in (*window.others, *window.across, *found.columns)]
    stored = [index for index in after.indices if isinstance(index, tirx.Var)]
    if not tvm_ffi.structural_equal(after.value, rounded) or str(after.buffer.dtype) != str(window.source.dtype):
        raise NotTaken("something else than rounding follows the sums", value=after.value, remedy=LEAVE)
    if window.strides != (STRIDE, STRIDE) or len(window.others) > 1 or len(found.columns) != 1:
        raise NotTaken("a convolution of other strides or dimensions", value=window.strides, limit=STRIDE, remedy=LEAVE)
    known = all(is_constant(extent) for extent in (*window.source.shape, *after.buffer.shape))
    if not known or len(stored) != len(order) or not all(map(tirx.Var.same_as, stored, order)):
        raise NotTaken("results are no known rows of filters", value=after.buffer.shape, remedy=LEAVE)
    images = math.prod(int(each.dom.extent) for each in window.others)
    each = (*window.across, *found.columns, *window.taps, window.channel)
    high, wide, filters, down, right, channels = (int(one.dom.extent) for one in each)
    return Windows(images, high, wide, filters, (down, right), channels, str(window.source.dtype), rows)


def _in_order(
    found: FewChannelConvolution, windows: Windows, func: tirx.PrimFunc, target: Target
) -> tuple[tirx.Var, tirx.Stmt]:
    """Return a workspace for the weights in the kernel's order, and what writes them."""
    tensors = {param: te.placeholder(param.shape, param.dtype, str(param.name)) for param in func.params}
    window, (filters,) = found.window, found.columns

    def weight(step: Expr, unit: Expr, eight: Expr, one: Expr, element: Expr) -> Expr:
        row, column, channel = windows.place_of_weight(step, unit, element)
        taken = dict(zip((*(tap.var for tap in window.taps), window.channel.var), (row, column, channel)))
        value = replaced(found.weights, {**taken, filters.var: eight * 8 + one})
        own = tvm_ffi.structural_map(value, (ir.TensorLoad, lambda load: tensors[load.source](*load.indices)))
        inside = tirx.all(column < windows.taps[1], channel < windows.channels)
        return tirx.if_then_else(inside, own, tirx.const(0, windows.dtype))

    ordered = te.compute(windows.weights, weight, "weights_in_order")
    buffer = tirx.decl_buffer(ordered.shape, windows.dtype, "weights_in_order")
    return buffer, kernels_of([*tensors.values(), ordered], [*func.params, buffer], target)
