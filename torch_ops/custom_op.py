"""Register the product as an operator of torch's, ``tensorir_ladder::matmul``, for autograd and torch.compile.

:func:`torch_ops.matmul` calls it where more than a launch is asked for: gradients, or tensors that are traced. A graph
that was exported needs ``import tensorir_ladder.torch_ops.custom_op`` where it is loaded. This module imports torch.

With dC the gradient of the result, dA = alpha · dC · Bᵀ is a product of ours: B as it lies is Bᵀ in the other layout.
dB = alpha · Aᵀ · dC is torch's, since our kernels read their left operand by rows. Where dC has another dtype than the
operands both are torch's, in the wider of the two, which loses neither range nor digits. A relu's derivative is taken
from the result; before gelu or silu the sums are computed once more, which costs time and no memory. All of it is made
of differentiable operators, so that gradients of gradients are right too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tensorir_ladder.kernels.fused_epilogue import Epilogue
from tensorir_ladder.schedules.isa import TMA_STRIDE_BYTES
from tensorir_ladder.torch_ops.errors import WrongDtype, WrongShape
from tensorir_ladder.torch_ops.prepared import multiply

NAMESPACE = "tensorir_ladder"
# Their arguments have no defaults: torch would leave out, before backward sees them, those that are the default.


@torch.library.custom_op(f"{NAMESPACE}::matmul", mutates_args=())
def matmul(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    activation: str | None,
    alpha: float,
    out_dtype: torch.dtype | None,
    any_m: bool,
) -> Tensor:
    """Compute what :func:`torch_ops.matmul` does; operands that begin at no multiple of 16 bytes are copied first.

    Most kernels refuse those. Here nobody chose the addresses: a gradient may be a part of another, and a compiler lays
    out what is between two operators.
    """
    return multiply(_aligned(a), _aligned(b), None, bias, activation, alpha, out_dtype, any_m)


@torch.library.custom_op(f"{NAMESPACE}::matmul_out", mutates_args=("out",))
def matmul_out(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    bias: Tensor | None,
    activation: str | None,
    alpha: float,
    out_dtype: torch.dtype | None,
    any_m: bool,
) -> None:
    """Compute the product into ``out``. It records no gradients."""
    multiply(_aligned(a), _aligned(b), out, bias, activation, alpha, out_dtype, any_m)


@matmul.register_fake
def _result(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    activation: str | None,
    alpha: float,
    out_dtype: torch.dtype | None,
    any_m: bool,
) -> Tensor:
    """Make a result without its values. Sizes and strides that the kernels refuse are refused when they run."""
    if min(a.dim(), b.dim()) < 2:
        raise WrongShape(
            "a and b are neither matrices nor batches of them",
            value=f"{a.dim()} and {b.dim()} dimensions",
            limit="2 or more",
            remedy="reshape them",
        )
    if a.dtype != b.dtype:
        raise WrongDtype("a and b differ", value=f"{a.dtype} and {b.dtype}", remedy="convert one of them with .to()")
    Epilogue(activation=activation or "")  # refuses what it does not know
    torch._check(a.shape[-1] == b.shape[-2], lambda: f"inner sizes differ: {a.shape[-1]} of a, {b.shape[-2]} of b")
    outer = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    if bias is not None:
        torch._check(bias.shape[-1] == b.shape[-1], lambda: f"{bias.shape[-1]} biases, {b.shape[-1]} columns")
    return a.new_empty((*outer, a.shape[-2], b.shape[-1]), dtype=out_dtype or a.dtype)


@matmul_out.register_fake
def _nothing(a: Tensor, b: Tensor, out: Tensor, *how: Any) -> None:
    """Check what the operator without ``out`` checks."""
    _result(a, b, *how)


def _keep(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    """Keep for backward what the derivatives are made of."""
    a, b, bias, ctx.activation, ctx.alpha, ctx.out_dtype, ctx.any_m = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype
    again = ctx.activation not in (None, "", "relu")
    ctx.save_for_backward(a, b, bias if again else None, output if ctx.activation == "relu" else None)


def _differentiate(ctx, gradient: Tensor):  # type: ignore[no-untyped-def]
    """Return the gradients of a, b and bias, and None for all else."""
    a, b, bias, result = ctx.saved_tensors
    if ctx.activation == "relu":
        gradient = torch.ops.aten.threshold_backward(gradient, result, 0)
    elif ctx.activation:
        sums = matmul(a, b, bias, None, ctx.alpha, ctx.out_dtype, ctx.any_m)
        gradient = (torch.ops.aten.gelu_backward if ctx.activation == "gelu" else _before_silu)(gradient, sums)
    gradient = gradient.contiguous()
    of_a = of_b = of_bias = None
    if ctx.needs_input_grad[0]:
        of_a = _times_rows(gradient, b.mT, ctx.alpha, ctx.any_m).sum_to_size(a.shape)
    if ctx.needs_input_grad[1]:
        if b.dim() == 2:  # of all rows: one product
            a, gradient = a.flatten(0, -2), gradient.flatten(0, -2)
        # The way round in which the gradient lies as b does, so that nobody has to copy it.
        by_columns = b.stride(-1) != 1
        of_b = _by_torch(gradient.mT, a, ctx.alpha).mT if by_columns else _by_torch(a.mT, gradient, ctx.alpha)
        of_b = of_b.sum_to_size(b.shape).to(b.dtype)
    if ctx.needs_input_grad[2]:
        wide = torch.promote_types(gradient.dtype, ctx.bias_dtype)
        of_bias = gradient.sum(tuple(range(gradient.dim() - 1)), dtype=wide).to(ctx.bias_dtype)
    return of_a, of_b, of_bias, None, None, None, None


matmul.register_autograd(_differentiate, setup_context=_keep)


def _before_silu(gradient: Tensor, sums: Tensor) -> Tensor:
    """Differentiate x · sigmoid(x): as torch does, whose quick operator has no derivative of its own."""
    if not torch.is_grad_enabled():
        return torch.ops.aten.silu_backward(gradient, sums)
    wide = sums.to(torch.promote_types(sums.dtype, torch.float32))
    share = wide.sigmoid()
    return (gradient * share * (1 + wide * (1 - share))).to(gradient.dtype)


def _times_rows(gradient: Tensor, right: Tensor, alpha: float, any_m: bool) -> Tensor:
    """Multiply a gradient by an operand, in the operand's dtype: by our kernels where both have it."""
    if gradient.dtype == right.dtype:
        return matmul(gradient, right, None, None, alpha, None, any_m)
    return _by_torch(gradient, right, alpha).to(right.dtype)


def _by_torch(left: Tensor, right: Tensor, alpha: float) -> Tensor:
    """Multiply matrices or batches of them in the wider of their dtypes; the factor is applied before rounding."""
    wide = torch.promote_types(left.dtype, right.dtype)
    left, right = left.to(wide), right.to(wide)
    if alpha == 1.0:
        return left @ right
    if left.dim() == right.dim() == 2:
        return torch.addmm(left.new_zeros((1, 1)), left, right, beta=0, alpha=alpha)
    outer = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    left, right = (each.expand(*outer, *each.shape[-2:]).flatten(0, -3) for each in (left, right))
    return torch.baddbmm(left.new_zeros((1, 1, 1)), left, right, beta=0, alpha=alpha).unflatten(0, outer)


def _aligned(operand: Tensor) -> Tensor:
    """Return an operand at an address that TMA can read: itself, or a copy."""
    return operand.clone() if operand.data_ptr() % TMA_STRIDE_BYTES else operand
