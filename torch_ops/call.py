"""Multiply torch tensors by the explicit kernels: checked and compiled once, launched in torch's current stream.

A call first looks up its tensors' forms (sizes, strides, dtypes), for which everything was checked and built before,
then the launch on their addresses. Torch is imported when it is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensorir_ladder.torch_ops.prepared import check_factor, check_tensors, import_torch, prepared, prepared_for

if TYPE_CHECKING:
    import torch


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    alpha: float = 1.0,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    any_m: bool = False,
) -> torch.Tensor:
    """Compute ``activation(alpha · a @ b + bias)`` of an (m, k) and a (k, n) tensor on the current GPU, sm_80 or newer.

    Or of batches of them, whose dimensions before the last two are broadcast as ``torch.matmul`` does, by one launch:
    (b, m, k) by (k, n) is one product of b · m rows (:mod:`torch_ops.batches`). Returns the (m, n) or (…, m, n)
    product. Both operands are float16, both bfloat16 or both float32; sums are float32, rounded once
    to ``out_dtype`` (float16, bfloat16 or float32; by default the operands' dtype, or that of ``out``). Rows of ``a``
    are contiguous, and either rows or columns of ``b``, so that ``w.T`` of an (n, k) tensor is multiplied as it lies.
    Rows may be parts of longer ones (a slice of a matrix) where they begin multiples of 16 bytes apart. Contiguous
    matrices whose rows do not are copied to padded rows at each call, or read as they lie, where k is short
    (:mod:`torch_ops.short_reductions`) or few rows meet a large matrix (:mod:`torch_ops.shifted`); to an output whose
    rows do not, results are copied only where these have gaps, or a kernel stores by TMA alone. Matrices of batches
    that do not begin equal distances apart, multiples of 16 bytes, are copied by torch first. A warning,
    :class:`torch_ops.errors.PaddedCopy`, names copies once, with the bytes.

    ``bias`` has n elements side by side, of the output's dtype or float32, one for each column. ``activation`` is
    "relu", "gelu" (the exact form, by erf) or "silu". All three are done to the float32 sums before they are rounded;
    factor and activation are written into the kernel, so that each pair of them is a kernel of its own.

    All this is so for 16-bit operands on Hopper. Other GPUs, and float32 on all of them, have kernels by schedules
    (:mod:`torch_ops.scheduled`): they multiply float32 exactly, not as TF32, take contiguous matrices with rows of any
    length, to which torch copies slices, and have no ``any_m``. On GPUs other than Hopper's nothing was measured.

    With ``any_m`` kernels take any m: there is one for each n, k and tile, four at most, instead of one for each m.
    They are step 12's, with whole tiles, and store 16 bits in rows of multiples of 16 bytes; batches that are not one
    product they do not take. Up to 8 rows of matrices without gaps may have kernels of their own, which stream ``b``.

    The first call with tensors of some sizes, strides and dtypes compiles a kernel, which takes seconds; cubins are
    kept on disk, loaded kernels for the life of the process. Calls run in torch's current stream, may be captured in
    CUDA graphs after a first call outside.

    Where gradients are recorded, and where torch traces (``torch.compile``, ``torch.export``, tensors that are fake or
    have a dispatch of their own), the call is the operator ``tensorir_ladder::matmul`` (:mod:`torch_ops.custom_op`),
    which has gradients of all orders. With ``out`` it records none, as torch's own: that is refused.

    Raises
    ------
    TypeError : for what is no tensor. WrongShape, WrongDtype, WrongDevice, ScatteredRows, UnalignedOperand,
    OverlappingOutput, UnsupportedGpu (:mod:`torch_ops.errors`), IllegalWorkload : ValueErrors that say what, the limit,
    and what to do; an output overlaps an operand where their first to last bytes do.
    NoCompiler, CompileError : from nvcc. FirstCallInCapture, DriverError : RuntimeErrors. NoTorch : an ImportError.
    RuntimeError : for gradients of a product with ``out``, and for derivatives in forward mode.
    """
    try:
        left = a.shape, a.stride(), a.dtype, a.get_device()
        right = b.shape, b.stride(), b.dtype, b.get_device()
        result = out if out is None else (out.shape, out.stride(), out.dtype, out.get_device())
        added = bias if bias is None else (bias.shape, bias.stride(), bias.dtype, bias.get_device())
        learned = a.requires_grad or b.requires_grad or (bias is not None and bias.requires_grad)
    except AttributeError:
        check_tensors(a=a, b=b, out=out, bias=bias)
        raise
    import torch

    if (
        torch.compiler.is_compiling()
        or (learned and torch.is_grad_enabled())
        or torch._C._len_torch_dispatch_stack()
        or torch.autograd.forward_ad._current_level >= 0
        or not (type(a).__torch_dispatch__ is type(b).__torch_dispatch__ is torch.Tensor.__torch_dispatch__)
    ):
        return _by_operator(a, b, out, bias, activation, alpha, out_dtype, any_m, learned)
    return prepared(left, right, result, out_dtype, added, activation, alpha, any_m)(a, b, out, bias)


def describe(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None, any_m: bool = False) -> str:
    """Say what :func:`matmul` takes for tensors that lie like these: step, tile, stages, and what each call copies.

    For kernels by schedules it names the engine instead of a step, and says where nothing was measured::

        mma 128x64x64/64x32, 4 stages, not measured on sm_86

    Builds and loads the kernel where that has not been done; raises what :func:`matmul` raises.
    """
    check_tensors(a=a, b=b, out=out)
    return prepared_for(a, b, out, None, None, 1.0, None, any_m).description


def _by_operator(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str | None,
    alpha: float,
    out_dtype: torch.dtype | None,
    any_m: bool,
    learned: bool,
) -> torch.Tensor:
    """Call torch's operator, which autograd records and a compiler traces; ``learned`` where operands need gradients.

    Raises RuntimeError for derivatives that it does not have.
    """
    torch = import_torch()
    check_tensors(a=a, b=b, out=out, bias=bias)
    check_factor(alpha)
    if learned and out is not None and torch.is_grad_enabled():
        raise RuntimeError(
            "matmul with out records no gradients, and an operand requires them; call it without out, or under "
            "torch.no_grad()"
        )
    forward_ad = torch.autograd.forward_ad
    if forward_ad._current_level >= 0 and any(
        each is not None and forward_ad.unpack_dual(each).tangent is not None for each in (a, b, bias)
    ):
        raise RuntimeError("matmul has no derivative in forward mode, and an operand has a tangent; call torch.matmul")
    from tensorir_ladder.torch_ops import custom_op  # here, since it imports torch, and what is above

    if out is None:
        return custom_op.matmul(a, b, bias, activation, alpha, out_dtype, any_m)
    custom_op.matmul_out(a, b, out, bias, activation, alpha, out_dtype, any_m)
    return out
