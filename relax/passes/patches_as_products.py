"""Convolutions whose windows lie side by side become products."""

from __future__ import annotations

import tvm
from tvm import ir, relax
from tvm.ir.transform import PassContext

from tensorir_ladder.relax.graphs import is_call, rewrite_functions
from tensorir_ladder.schedules.inspection import is_constant


@tvm.transform.module_pass(opt_level=0, name="PatchesAsProducts")
class PatchesAsProducts:
    """Make a product of a convolution whose stride is its window: each pixel is read by one window.

    ::

        before   y = conv2d(x, w, strides=(s, s))        # w: s x s windows of c channels; x: h x w pixels, NHWC
        after    p = permute_dims(reshape(x, (n, h / s, s, w / s, s * c)), (0, 1, 3, 2, 4))
                 y = matmul(reshape(p, (n, h / s, w / s, s * s * c)), reshape(w, (s * s * c, o)))

    So begin vision transformers (16x16 pixels of 3 channels) and ConvNeXt, which also halves its images so. A product
    has kernels that no convolution of few channels reaches; the patches are copied once. Taken are convolutions of one
    group with channels last, without padding or dilation, of windows that divide the image.
    """

    def transform_module(self, mod: ir.IRModule, _context: PassContext) -> ir.IRModule:
        """Rewrite each Relax function of a module."""
        rewriter = _Products(mod)
        return rewrite_functions(mod, rewriter, rewriter.visit_expr)


@relax.expr_functor.mutator
class _Products(relax.PyExprMutator):
    def visit_call_(self, call: relax.Call) -> relax.Expr:  # what the mutator's base class calls it
        call = super().visit_call_(call)
        if not is_call(call, "nn.conv2d") or not _is_of_patches(call):
            return call
        x, weight = call.args
        (batch, *pixels, channels), (rows, columns, _, outputs) = x.ty.shape.values, map(int, weight.ty.shape.values)
        down, across = int(pixels[0]) // rows, int(pixels[1]) // columns
        emit = self.builder_.emit
        split = emit(relax.op.reshape(x, (batch, down, rows, across, columns * int(channels))))
        moved = emit(relax.op.permute_dims(split, (0, 1, 3, 2, 4)))
        length = rows * columns * int(channels)
        patches = emit(relax.op.reshape(moved, (batch, down, across, length)))
        matrix = emit(relax.op.reshape(weight, (length, outputs)))
        return relax.op.matmul(patches, matrix, out_dtype=str(call.ty.dtype))


def _is_of_patches(call: relax.Call) -> bool:
    attrs, shapes = call.attrs, [operand.ty.shape for operand in call.args]
    layouts = (attrs.data_layout, attrs.kernel_layout, attrs.out_layout)
    if tuple(map(str, layouts)) != ("NHWC", "HWIO", "NHWC") or int(attrs.groups) != 1:
        return False
    known = all(isinstance(shape, relax.ShapeExpr) for shape in shapes)
    if not known or not all(map(is_constant, (*shapes[0].values[1:], *shapes[1].values))):
        return False
    image, window = ([int(extent) for extent in part] for part in (shapes[0].values[1:3], shapes[1].values[:2]))
    fits = all(pixels % size == 0 for pixels, size in zip(image, window))
    alone = not any(map(int, attrs.padding)) and all(int(one) == 1 for one in attrs.dilation)
    return fits and alone and [*map(int, attrs.strides)] == window and max(window) > 1
