"""Reading a kernel's launch from the host function that TVM lowers it to.

That function encodes tensor maps from its arguments and calls the kernel with them, at every call anew. What it does
is written in two intrinsics: ``tensormap_encode_tiled(map, buffer.data, sizes..., strides..., box..., element
strides...)``, and ``call_ffi_kernel(name, arguments..., extents...)`` with the names of its extents.
"""

from __future__ import annotations

import itertools

import tvm_ffi
from tvm import tirx
from tvm.ir import Call, Expr, Var

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
    """The plan of a lowered module whose one function launches one kernel.

    Raises
    ------
    UnsupportedLaunch : for several kernels, extents known only at run time, or parameters that are no matrices.
    """
    ((_, host),) = generated.host.functions_items()
    launches, shapes = _calls(host, "tirx.call_ffi_kernel"), _shapes(host)
    if len(launches) != 1:
        raise UnsupportedLaunch(
            "the function launches several kernels", value=len(launches), limit=1, remedy="launch each by a function"
        )
    (launch,) = launches
    tags = [str(tag) for tag in launch.attrs.launch_params]
    if unknown := set(tags) - KNOWN:
        raise UnsupportedLaunch(
            "a launch with unknown attributes", value=", ".join(sorted(unknown)), remedy="teach the launcher these"
        )
    name, *given = launch.args
    extents = dict(zip(tags, map(_number, given[len(given) - len(tags) :])))
    maps = {call.args[0]: _tensor_map(call) for call in _calls(host, "tirx.tensormap_encode_tiled")}
    grid, block, cluster = (tuple(extents.get(tag, 1) for tag in tags) for tags in EXTENTS.values())
    return LaunchPlan(
        str(name.value),
        tuple(maps.get(argument) or _plain(argument, shapes) for argument in given[: len(given) - len(tags)]),
        grid,
        block,
        cluster,
        extents.get(SHARED_BYTES, 0),
        WAITS_FOR_PREVIOUS in generated.cuda,
    )


def _calls(host: tirx.PrimFunc, name: str) -> list[Call]:
    """A function's calls of an intrinsic, in order."""
    found: list[Call] = []

    def note(call: Call) -> None:
        """Keep a call of that name."""
        if getattr(call.op, "name", "") == name:
            found.append(call)

    tvm_ffi.structural_walk(host.body, (Call, note))
    return found


def _shapes(host: tirx.PrimFunc) -> dict[str, tuple[int, ...]]:
    """The shapes of the function's buffers by name, as they were before they are flattened."""
    found: dict[str, tuple[int, ...]] = {}

    def note(declared: tirx.DeclBuffer) -> None:
        """Keep the first of that name."""
        found.setdefault(declared.buffer.name, tuple(map(_number, declared.buffer.shape)))

    tvm_ffi.structural_walk(host.body, (tirx.DeclBuffer, note))
    return found


def _number(expression: Expr) -> int:
    """A constant's value; UnsupportedLaunch for what is known only at run time."""
    if not isinstance(expression, tirx.IntImm):
        raise UnsupportedLaunch(
            "a launch depends on what is known only at run time", value=str(expression), remedy="give constants"
        )
    return int(expression)


def _buffer_of(data: Expr) -> Var:
    """The buffer whose address an argument is."""
    if not isinstance(data, Call) or data.op.name != "tirx.buffer_data":
        raise UnsupportedLaunch("a parameter is no matrix", value=str(data), remedy="give the kernel buffers alone")
    return data.args[0]


def _tensor_map(call: Call) -> TensorMap:
    """The tensor map that a call encodes."""
    attributes, rank = call.attrs, int(call.attrs.rank)
    numbers = iter([_number(argument) for argument in call.args[2:]])
    parts = [tuple(itertools.islice(numbers, count)) for count in (rank, rank - 1, rank, rank)]
    enumerators = (attributes.interleave, attributes.swizzle, attributes.l2_promotion, attributes.oob_fill)
    buffer = _buffer_of(call.args[1]).name
    return TensorMap(buffer, str(attributes.descriptor_dtype), *parts, *map(int, enumerators))


def _plain(argument: Expr, shapes: dict[str, tuple[int, ...]]) -> PlainBuffer | RowCount:
    """The plain pointer that an argument is, or the number of rows."""
    if isinstance(argument, Var) and argument.name == ROWS_PARAMETER:
        return RowCount()
    buffer = _buffer_of(argument)
    return PlainBuffer(buffer.name, str(buffer.dtype), shapes[buffer.name])
