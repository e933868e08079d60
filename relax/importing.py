"""Import PyTorch modules to Relax, with corrections of what TVM 0.27's importer gets wrong.

- Products and convolutions keep their operands' dtype. TVM's importer asks for float32 results, and then refuses to
  add a float16 bias.
- Attention that stays an operator takes masks of bools or of fewer than four axes, a scale, and fewer heads of keys
  than of queries. TVM's importer refuses the first two and ignores the others.
- ``any`` over all axes is imported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import tvm
from tvm import relax

ATTENTION = "scaled_dot_product_attention"
KEPT = (ATTENTION, "linear", "silu")  # operators that stay whole
CONVOLUTIONS = [f"conv{rank}d{kind}" for rank in (1, 2, 3) for kind in ("", "_transpose")]


def from_torch(
    module: Any, args: Sequence[Any], dynamic_shapes: Any = None, *, keep_attention: bool = False
) -> tuple[tvm.IRModule, list[tvm.runtime.Tensor]]:
    """Export a PyTorch module and import it as a Relax module, whose ``main`` takes the inputs, then the weights.

    ::

        mod, weights = from_torch(model.eval(), (x,))
        mod = tvm.relax.get_pipeline("tensorir_ladder", target=target)(mod)
        vm = tvm.relax.VirtualMachine(tvm.compile(mod, target), tvm.cuda())
        y = vm["main"](x, *weights)                        # all of them tensors on the GPU

    Parameters
    ----------
    module : a ``torch.nn.Module`` in evaluation mode.
    args : example inputs, a tuple of tensors.
    dynamic_shapes : symbolic extents, as ``torch.export.export`` takes them.
    keep_attention : leave ``scaled_dot_product_attention`` as an operator, for :class:`FuseAttention`, instead of
        products and a softmax.

    Returns the Relax module and the weights, tensors on the CPU in the order of ``main``'s parameters.

    Raises
    ------
    ModuleNotFoundError : without torch.
    TypeError : for ``args`` that are no tuple or list.
    ValueError : for a module in training mode, whose dropout and batch norms differ.
    And what ``torch.export`` and TVM's importer raise for a module that they do not take.
    """
    try:
        import torch
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("from_torch needs torch: pip install torch") from error
    from tvm.relax.frontend.torch import from_exported_program  # which imports torch

    if not isinstance(args, (tuple, list)):
        raise TypeError(f"args is a {type(args).__name__}, not a tuple of inputs; write (x,) for a single one")
    if module.training:
        raise ValueError("the module is in training mode; call module.eval() first")
    with torch.no_grad():
        program = torch.export.export(module, tuple(args), dynamic_shapes=dynamic_shapes)
    table = torch.export.default_decompositions()
    for name in KEPT:
        for overload in getattr(torch.ops.aten, name).overloads():
            table.pop(getattr(getattr(torch.ops.aten, name), overload), None)
    program = program.run_decompositions(table)
    with _operands_dtypes():
        mod = from_exported_program(
            program,
            custom_convert_map={f"{ATTENTION}.default": _attention, "any.default": _any_of_all},
            keep_params_as_input=True,
            unwrap_unit_return_tuple=True,
            run_ep_decomposition=False,
        )
    mod, weights = relax.frontend.detach_params(mod)
    return mod, list(weights.get("main", []))


def _attention(node: Any, importer: Any) -> Any:
    """Import attention: a mask of bools as one that is added, the scale in the queries, heads of keys repeated."""
    arguments = dict(zip(("query", "key", "value", "attn_mask"), node.args)) | node.kwargs
    emit, known = importer.block_builder.emit, dict(importer.env)
    query, mask = arguments["query"], arguments.get("attn_mask")
    dtype, heads = known[query].ty.dtype, known[query].ty.shape[1]
    try:
        if mask is not None:
            added = known[mask]
            if str(added.ty.dtype) == "bool":
                zero, never = relax.const(0, dtype), relax.const(float("-inf"), dtype)
                added = emit(relax.op.where(added, zero, never))
            if missing := len(known[query].ty.shape) - len(added.ty.shape):
                added = emit(relax.op.expand_dims(added, list(range(missing))))
            importer.env[mask] = added
        if arguments.get("scale") is not None:
            factor = arguments["scale"] * int(known[query].ty.shape[-1]) ** 0.5
            importer.env[query] = emit(relax.op.multiply(known[query], relax.const(factor, dtype)))
        if arguments.get("enable_gqa"):
            for each in dict.fromkeys((arguments["key"], arguments["value"])):
                shared = int(heads) // int(known[each].ty.shape[1])
                importer.env[each] = emit(relax.op.repeat(known[each], shared, axis=1))
        return importer._scaled_dot_product_attention(node)
    finally:
        importer.env.update(known)


def _any_of_all(node: Any, importer: Any) -> Any:
    """Import ``any`` over all axes, as the maximum of integers."""
    values = importer.env[node.args[0]]
    if str(values.ty.dtype) == "bool":
        values = relax.op.astype(values, "int8")
    else:
        values = relax.op.astype(relax.op.not_equal(values, relax.const(0, values.ty.dtype)), "int8")
    return importer.block_builder.emit(relax.op.astype(relax.op.max(values), "bool"))


@contextlib.contextmanager
def _operands_dtypes() -> Iterator[None]:
    """Have products and convolutions that are made meanwhile return their operands' dtype."""

    def keeping(operator: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given, out_dtype=None, **named: operator(*given, **named)

    linear = relax.op.linear
    with contextlib.ExitStack() as patches:
        for place, name in [(relax.op.linear_algebra, "matmul"), *((relax.op.nn, name) for name in CONVOLUTIONS)]:
            patches.enter_context(mock.patch.object(place, name, keeping(getattr(place, name))))
        patches.enter_context(mock.patch.object(relax.op, "linear", lambda x, w, b=None, _dtype=None: linear(x, w, b)))
        yield
