"""Reading what is launched from the host function that TVM lowers a function to.

That function encodes tensor maps from its arguments and calls its kernels with them, at every call anew. What it does
is written in two intrinsics: ``tensormap_encode_tiled(map, buffer.data, sizes..., strides..., box..., element
strides...)``, and ``call_ffi_kernel(name, arguments..., extents...)`` with the names of its extents.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Call, Expr, Var

from tensorir_ladder.kernels.codegen import overlap
from tensorir_ladder.kernels.codegen.launch_plan import (
    ROWS_PARAMETER,
    LaunchPlan,
    PlainBuffer,
    RowCount,
    TensorMap,
    UnsupportedLaunch,
)
from tensorir_ladder.kernels.codegen.lowering import Generated

SHARED_BYTES = "tirx.use_dyn_shared_memory"
EXTENTS = {kind: tuple(f"{kind}.{axis}" for axis in "xyz") for kind in ("blockIdx", "threadIdx", "clusterCtaIdx")}
KNOWN = {SHARED_BYTES, *(tag for tags in EXTENTS.values() for tag in tags)}
WAITS_FOR_PREVIOUS = "griddepcontrol.wait"  # in the text of a kernel that may begin before the one before it is done


def launch_plan(generated: Generated) -> LaunchPlan:
    """Read the launch of a lowered module whose one function launches one kernel of matrices.

    Raises
    ------
    UnsupportedLaunch : for several kernels, parameters that are no matrices, and what :func:`read_launches` refuses.
    """
    launches = read_launches(generated.host)
    if len(launches) != 1:
        raise UnsupportedLaunch(
            "the function launches several kernels", value=len(launches), limit=1, remedy="launch each by a function"
        )
    (launch,) = launches
    for parameter in launch.parameters:
        if isinstance(parameter, int):
            raise _no_matrix(parameter)
        if isinstance(parameter, PlainBuffer) and None in parameter.shape:
            raise _at_run_time(parameter.buffer)
    return replace(launch, overlaps=WAITS_FOR_PREVIOUS in generated.cuda)


def read_launches(host: tvm.IRModule) -> tuple[LaunchPlan, ...]:
    """Read the launches of a lowered module's host functions, in their order.

    Raises
    ------
    UnsupportedLaunch : for extents or tensor maps that are known only at run time, arguments that are neither buffers
        nor whole numbers, and what launches have that is not known here.
    """
    launches: list[LaunchPlan] = []
    maps: dict[Var, TensorMap] = {}
    for function in host.functions.values():
        shapes = _shapes(function)
        for call in _found(function, Call):
            name = getattr(call.op, "name", "")
            if name == "tirx.tensormap_encode_tiled":
                maps[call.args[0]] = _tensor_map(call)
            elif name == "tirx.call_ffi_kernel":
                launches.append(_launch(call, maps, shapes))
    return tuple(launches)


def _found(function: tirx.PrimFunc, kind: type) -> list[Any]:
    """List all nodes of a kind, in order; exceptions raised during TVM's walk would lose their types."""
    nodes: list[Any] = []
    tvm_ffi.structural_walk(function.body, (kind, nodes.append))
    return nodes


def _shapes(function: tirx.PrimFunc) -> dict[str, tuple[int | None, ...]]:
    """Collect the function's buffers' shapes by name, as they are before they are flattened: the first of each."""
    return {
        declared.buffer.name: tuple(int(e) if isinstance(e, tirx.IntImm) else None for e in declared.buffer.shape)
        for declared in reversed(_found(function, tirx.DeclBuffer))
    }


def _launch(call: Call, maps: Mapping[Var, TensorMap], shapes: Mapping[str, tuple[int | None, ...]]) -> LaunchPlan:
    # The flag of launches that overlap has no value; whoever launches decides by the kernel's text.
    tags = [tag for tag in map(str, call.attrs.launch_params) if tag != overlap.FLAG]
    if unknown := set(tags) - KNOWN:
        raise UnsupportedLaunch(
            "a launch with unknown attributes", value=", ".join(sorted(unknown)), remedy="teach host_code.py these"
        )
    name, *values = call.args
    given, extents = values[: len(values) - len(tags)], dict(zip(tags, map(_number, values[len(values) - len(tags) :])))
    grid, block, cluster = (tuple(extents.get(tag, 1) for tag in tags) for tags in EXTENTS.values())
    parameters = tuple(maps.get(value) or _parameter(value, shapes) for value in given)
    return LaunchPlan(str(name.value), parameters, grid, block, cluster, extents.get(SHARED_BYTES, 0))


def _tensor_map(call: Call) -> TensorMap:
    attributes, (_, data, *values), rank = call.attrs, call.args, int(call.attrs.rank)
    numbers = iter([_number(value) for value in values])
    sizes, strides, box, steps = (tuple(itertools.islice(numbers, count)) for count in (rank, rank - 1, rank, rank))
    unusual = {
        "interleave": int(attributes.interleave),
        "oob_fill": int(attributes.oob_fill),
        "steps": set(steps) - {1},
    }
    if any(unusual.values()):
        raise UnsupportedLaunch(
            "a tensor map that is interleaved, fills with NaN, or leaves elements out",
            value=unusual,
            remedy="teach launch_plan.py these",
        )
    enumerators = int(attributes.swizzle), int(attributes.l2_promotion)
    return TensorMap(_buffer_of(data).name, str(attributes.descriptor_dtype), sizes, strides, box, *enumerators)


def _parameter(value: Expr, shapes: Mapping[str, tuple[int | None, ...]]) -> PlainBuffer | RowCount | int:
    if isinstance(value, tirx.IntImm):
        return int(value)
    if isinstance(value, Var) and value.name == ROWS_PARAMETER:
        return RowCount()
    buffer = _buffer_of(value)
    return PlainBuffer(buffer.name, str(buffer.dtype), shapes[buffer.name])


def _buffer_of(data: Expr) -> Var:
    """Find the buffer whose address an argument is."""
    if not isinstance(data, Call) or data.op.name != "tirx.buffer_data":
        raise _no_matrix(data)
    return data.args[0]


def _number(expression: Expr) -> int:
    if not isinstance(expression, tirx.IntImm):
        raise _at_run_time(expression)
    return int(expression)


def _no_matrix(value: object) -> UnsupportedLaunch:
    return UnsupportedLaunch("a parameter is no matrix", value=str(value), remedy="give the kernel buffers alone")


def _at_run_time(value: object) -> UnsupportedLaunch:
    return UnsupportedLaunch(
        "a launch depends on what is known only at run time", value=str(value), remedy="give constants"
    )
