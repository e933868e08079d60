"""Import PyTorch modules to Relax, with corrections of what TVM 0.27's importer gets wrong.

- Products and convolutions keep their operands' dtype. TVM's importer asks for float32 results, and then refuses to
  add a float16 bias.
- Attention that stays an operator takes masks of bools or of fewer than four axes, a scale, and fewer heads of keys
  than of queries. TVM's importer refuses the first two and ignores the others.
- ``any`` over all axes is imported; running sums of bools are numbers; bounds of ``clamp`` may be of another dtype.

Linear layers, attention and silu stay operators, where torch's decompositions write reshapes, float32 products and
more around them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import tvm
from tvm import relax
from tvm.tirx import FloatImm

ATTENTION = "scaled_dot_product_attention"
KEPT = (ATTENTION, "linear", "matmul", "silu")  # operators that stay whole
TOKENS_FIRST = [0, 2, 1, 3]
CONVOLUTIONS = [f"conv{rank}d{kind}" for rank in (1, 2, 3) for kind in ("", "_transpose")]


def from_torch(
    module: Any, args: Sequence[Any], dynamic_shapes: Any = None
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

    Returns the Relax module and the weights, tensors on the CPU in the order of ``main``'s parameters.

    Raises
    ------
    ModuleNotFoundError : without torch.
    TypeError : for ``args`` that are no tuple or list.
    ValueError : for a module in training mode, whose dropout and batch norms differ, and one that changes its inputs or
        buffers in place.
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
    changed = [
        *program.graph_signature.buffers_to_mutate.values(),
        *program.graph_signature.user_inputs_to_mutate.values(),
    ]
    if changed:
        raise ValueError(f"the module changes {', '.join(changed)} in place; return what it makes instead")
    for tensors in (program.state_dict, program.constants):
        for name, each in tensors.items():
            if isinstance(each, torch.Tensor) and each.device.type != "cpu":  # which TVM's constants have to be
                tensors[name] = each.detach().cpu()
    with _operands_dtypes():
        mod = from_exported_program(
            program,
            custom_convert_map={
                f"{ATTENTION}.default": _attention,
                "any.default": _any_of_all,
                "clamp.Tensor": _clamp_by_tensors,
                "cumsum.default": _running_sum,
            },
            keep_params_as_input=True,
            unwrap_unit_return_tuple=program.call_spec.out_spec.is_leaf(),  # the module returns a tensor, not a tuple
            run_ep_decomposition=False,
        )
    mod, weights = relax.frontend.detach_params(mod)
    return mod, list(weights.get("main", []))


def _attention(node: Any, importer: Any) -> Any:
    """Import attention of two to four axes, with tokens before heads as TVM's operator has them."""
    arguments = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), node.args)) | node.kwargs
    emit = importer.block_builder.emit
    query, key, value = (importer.env[arguments[name]] for name in ("query", "key", "value"))
    axes, dtype = query.ty.ndim, query.ty.dtype
    if not axes == key.ty.ndim == value.ty.ndim <= len(TOKENS_FIRST):
        raise NotImplementedError(f"attention of operands of {axes} axes, not up to 4: batch, heads, tokens, a head")

    def with_four_axes(each: Any) -> Any:
        missing = [1] if each.ty.ndim == axes == 3 else [*range(len(TOKENS_FIRST) - each.ty.ndim)]
        return emit(relax.op.expand_dims(each, missing)) if missing else each

    operands = [with_four_axes(each) for each in (query, key, value)]
    if arguments.get("enable_gqa"):
        heads = [int(each.ty.shape[1]) for each in operands]
        shared = [(each, heads[0] // own) for each, own in zip(operands, heads)]
        operands = [emit(relax.op.repeat(each, times, axis=1)) if times > 1 else each for each, times in shared]
    mask = None
    if arguments.get("attn_mask") is not None:
        mask = importer.env[arguments["attn_mask"]]
        if str(mask.ty.dtype) == "bool":
            mask = emit(relax.op.where(mask, relax.const(0, dtype), relax.const(float("-inf"), dtype)))
        mask = with_four_axes(mask)
    by_token = [emit(relax.op.permute_dims(each, TOKENS_FIRST)) for each in operands]
    head = int(query.ty.shape[axes - 1])
    given = arguments.get("scale")
    usual = given is None or math.isclose(given * head**0.5, 1, rel_tol=1e-6)
    scale = None if usual else FloatImm("float32", given)
    result = relax.op.nn.attention(*by_token, mask, scale, "TopLeft" if arguments.get("is_causal") else None)
    result = emit(relax.op.permute_dims(emit(result), TOKENS_FIRST))
    return result if axes == len(TOKENS_FIRST) else emit(relax.op.squeeze(result, [[0, 1], [1]][axes - 2]))


def _clamp_by_tensors(node: Any, importer: Any) -> Any:
    """Import bounds that are tensors, in the dtype that torch gives the result."""
    arguments = dict(zip(("input", "min", "max"), node.args)) | node.kwargs
    emit, dtype = importer.block_builder.emit, importer._convert_data_type(str(node.meta["val"].dtype))
    values = emit(relax.op.astype(importer.env[arguments["input"]], dtype))
    for name, operator in (("min", relax.op.maximum), ("max", relax.op.minimum)):
        if arguments.get(name) is not None:
            values = emit(operator(values, emit(relax.op.astype(importer.env[arguments[name]], dtype))))
    return values


def _running_sum(node: Any, importer: Any) -> Any:
    """Import a running sum; that of bools or short integers is of int64."""
    values, axis = importer.env[node.args[0]], node.args[1]
    whole = "float" not in str(values.ty.dtype)
    dtype = importer._convert_data_type(str(node.kwargs["dtype"])) if node.kwargs.get("dtype") else None
    return importer.block_builder.emit(relax.op.cumsum(values, axis, dtype or ("int64" if whole else None)))


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
