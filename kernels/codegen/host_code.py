"""Reading what is launched from the host function that TVM lowers a function to.

That function encodes tensor maps from its arguments and calls its kernels with them, at every call anew. What it does
is written in two intrinsics: ``tensormap_encode_tiled(map, buffer.data, sizes..., strides..., box..., element
strides...)``, and ``call_ffi_kernel(name, arguments..., extents...)`` with the names of its extents. What it launches
may depend on extents and numbers that only a call brings: :func:`read_host` takes them by name, and goes through the
function as that call would.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import tvm
from tvm import tirx
from tvm.ir import Call, Expr, PrimType, Var

from tensorir_ladder.kernels.codegen.arithmetic import evaluate
from tensorir_ladder.kernels.codegen.launch_plan import (
    COPIED,
    COUNTED,
    PLANNED,
    ROWS_PARAMETER,
    LaunchPlan,
    PlainBuffer,
    PlannedNumber,
    Real,
    RowCount,
    TensorMap,
    UnsupportedLaunch,
)
from tensorir_ladder.kernels.codegen.lowering import Generated
from tensorir_ladder.schedules.loops.early_launch import FLAG

SHARED_BYTES = "tirx.use_dyn_shared_memory"
EXTENTS = {kind: tuple(f"{kind}.{axis}" for axis in "xyz") for kind in ("blockIdx", "threadIdx", "clusterCtaIdx")}
KNOWN = {SHARED_BYTES, *(tag for tags in EXTENTS.values() for tag in tags)}
HELD_AS = {"uint16": "bfloat16"}  # memory of the host's functions, whose own code has no bfloat16
WAITS_FOR_PREVIOUS = "griddepcontrol.wait"  # in the text of a kernel that may begin before the one before it is done


def launch_plan(generated: Generated) -> LaunchPlan:
    """Read the launch of a lowered module whose one function launches one kernel of matrices.

    Raises
    ------
    UnsupportedLaunch : for several kernels, and what :func:`launch_plans` refuses.
    """
    launches = launch_plans(generated)
    if len(launches) != 1:
        raise UnsupportedLaunch(
            "the function launches several kernels", value=len(launches), limit=1, remedy="launch each by a function"
        )
    return launches[0]


def launch_plans(generated: Generated) -> tuple[LaunchPlan, ...]:
    """Read the launches of a lowered module whose functions launch kernels of matrices, in their order.

    Raises
    ------
    UnsupportedLaunch : for parameters that are no matrices, and what :func:`read_launches` refuses.
    """
    launches = read_launches(generated.host)
    for parameter in (parameter for launch in launches for parameter in launch.parameters):
        if isinstance(parameter, (int, Real)):
            raise _no_matrix(parameter)
        if isinstance(parameter, PlainBuffer) and None in parameter.shape:
            raise _at_run_time(parameter.buffer)
    return tuple(replace(launch, overlaps=WAITS_FOR_PREVIOUS in generated.cuda) for launch in launches)


def read_launches(host: tvm.IRModule) -> tuple[LaunchPlan, ...]:
    """Read the launches of a lowered module's host functions, in their order; see :func:`read_host`."""
    return read_host(host).launches


@dataclass(frozen=True)
class HostRun:
    """A call's kernels, in the order of their launches; and ``kept``, device memory that the function allocates."""

    launches: tuple[LaunchPlan, ...]
    kept: tuple[PlainBuffer, ...] = ()


def read_host(host: tvm.IRModule, given: Mapping[str, float] | None = None) -> HostRun:
    """Go through a lowered module's host functions as a call with these extents and numbers, by name, would.

    Raises
    ------
    UnsupportedLaunch : for extents or tensor maps that depend on what is not given, an assertion that does not hold,
        arithmetic that leaves its integers' range, arguments that are neither buffers nor numbers, two buffers of one
        name, and what launches or host functions have that is not known here.
    """
    readings = [_Reading(given or {}) for _ in host.functions]
    for reading, function in zip(readings, host.functions.values()):
        reading.run(function)
    launches, kept = ([getattr(reading, what) for reading in readings] for what in ("launches", "kept"))
    return HostRun(tuple(itertools.chain(*launches)), tuple(itertools.chain(*kept)))


class _Returned(Exception):
    """The host function has returned."""


class _Reading:
    """A host function on its way: what its variables are, what it has allocated and launched."""

    def __init__(self, given: Mapping[str, float]) -> None:
        self.given = given
        self.values: dict[Var, float] = {}
        self.buffers: dict[Var, PlainBuffer] = {}  # a view of a buffer is that buffer
        self.maps: dict[Var, TensorMap] = {}
        self.kept: list[PlainBuffer] = []
        self.launches: list[LaunchPlan] = []

    def run(self, function: tirx.PrimFunc) -> None:
        """Go through a function's body."""
        with contextlib.suppress(_Returned):
            self._do(function.body)

    def _do(self, stmt: tirx.Stmt) -> None:
        match stmt:
            case tirx.SeqStmt():
                for one in stmt.seq:
                    self._do(one)
            case tirx.AttrStmt():
                self._do(stmt.body)
            case tirx.IfThenElse():
                self._choose(stmt)
            case tirx.For():
                first = self._number(stmt.min)
                for step in range(self._number(stmt.extent)):
                    self.values[stmt.loop_var] = first + step
                    self._do(stmt.body)
            case tirx.Bind():
                value = self.given.get(stmt.var.name)
                value = evaluate(stmt.value, self.values) if value is None else value
                if value is not None:
                    self.values[stmt.var] = value
            case tirx.AssertStmt():
                self._check(stmt)
            case tirx.AllocBuffer():
                self._allocate(stmt.buffer)
            case tirx.DeclBuffer():
                self._declare(stmt)
            case tirx.Evaluate():
                self._call(stmt.value)
            case tirx.Return():
                raise _Returned
            case _:
                raise UnsupportedLaunch(
                    "the host function does something itself", value=type(stmt).__name__, remedy="let kernels do it"
                )

    def _choose(self, stmt: tirx.IfThenElse) -> None:
        condition = evaluate(stmt.condition, self.values)
        cases = [case for case in (stmt.then_case, stmt.else_case) if case is not None]
        if condition is not None:
            taken = stmt.then_case if condition else stmt.else_case
            if taken is not None:
                self._do(taken)
        elif not all(isinstance(case, tirx.AssertStmt) for case in cases):
            raise _at_run_time(stmt.condition)

    def _check(self, stmt: tirx.AssertStmt) -> None:
        # TVM's own checks are of arguments' types and addresses, which have no value here.
        if evaluate(stmt.condition, self.values) == 0:
            said = "".join(str(part.value) for part in stmt.message_parts)
            raise UnsupportedLaunch(
                "the host function refuses the call", value=said, remedy="call it with other extents"
            )

    def _allocate(self, buffer: Var) -> None:
        taken = {known.buffer for known in self.buffers.values()}
        names = itertools.chain([str(buffer.name)], (f"{buffer.name}_{number}" for number in itertools.count(1)))
        name = next(name for name in names if name not in taken)
        shape, dtype = tuple(self._number(extent) for extent in buffer.shape), str(buffer.dtype)
        if lanes := re.fullmatch(r"(\w+?)x(\d+)", dtype):  # TVM makes vectors of what is only used so
            shape, dtype = (*shape[:-1], shape[-1] * int(lanes.group(2))), lanes.group(1)
        dtype = HELD_AS.get(dtype, dtype)
        self.buffers[buffer] = PlainBuffer(name, dtype, shape)
        self.kept.append(self.buffers[buffer])

    def _declare(self, stmt: tirx.DeclBuffer) -> None:
        buffer = stmt.buffer
        if isinstance(stmt.data, Call) and stmt.data.op.name == "tirx.buffer_data":
            self.buffers[buffer] = self.buffers[stmt.data.args[0]]
            return
        if any(known.buffer == buffer.name for known in self.buffers.values()):
            raise UnsupportedLaunch("two parameters have one name", value=buffer.name, remedy="give each its own")
        shape = tuple(evaluate(extent, self.values) for extent in buffer.shape)
        self.buffers[buffer] = PlainBuffer(str(buffer.name), str(buffer.dtype), shape)

    def _call(self, call: Expr) -> None:
        name = call.op.name if isinstance(call, Call) else ""
        if name == "tirx.tensormap_encode_tiled":
            self.maps[call.args[0]] = self._tensor_map(call)
        elif name == "tirx.call_ffi_kernel":
            self.launches.append(self._launch(call))
        elif name and str(getattr(call.args[0], "value", "")) != "__tvm_set_device":
            raise UnsupportedLaunch("the host function calls another", value=str(call), remedy="let it launch kernels")

    def _launch(self, call: Call) -> LaunchPlan:
        # The flag of launches that overlap has no value; whoever launches decides by the kernel's text.
        tags = [tag for tag in map(str, call.attrs.launch_params) if tag != FLAG]
        if unknown := set(tags) - KNOWN:
            raise UnsupportedLaunch(
                "a launch with unknown attributes", value=", ".join(sorted(unknown)), remedy="teach host_code.py these"
            )
        name, *values = call.args
        given, values = values[: len(values) - len(tags)], values[len(values) - len(tags) :]
        extents = dict(zip(tags, map(self._number, values)))
        grid, block, cluster = (tuple(extents.get(tag, 1) for tag in tags) for tags in EXTENTS.values())
        parameters = tuple(self.maps.get(value) or self._parameter(value) for value in given)
        return LaunchPlan(str(name.value), parameters, grid, block, cluster, extents.get(SHARED_BYTES, 0))

    def _tensor_map(self, call: Call) -> TensorMap:
        attributes, (_, data, *values), rank = call.attrs, call.args, int(call.attrs.rank)
        numbers = iter([self._number(value) for value in values])
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
        buffer = self._buffer_of(data).buffer
        return TensorMap(buffer, str(attributes.descriptor_dtype), sizes, strides, box, *enumerators)

    def _parameter(self, value: Expr) -> PlainBuffer | RowCount | PlannedNumber | Real | int:
        if isinstance(value.ty, PrimType):
            number = evaluate(value, self.values)
            if number is None and isinstance(value, Var) and value.name == ROWS_PARAMETER:
                return RowCount()
            if number is None and isinstance(value, Var) and value.name in (*PLANNED, *COUNTED, *COPIED):
                return PlannedNumber(str(value.name))
            if number is None:
                raise _no_matrix(value)
            return Real(number, str(value.ty.dtype)) if "float" in str(value.ty.dtype) else int(number)
        return self._buffer_of(value)

    def _buffer_of(self, data: Expr) -> PlainBuffer:
        """Find the buffer whose address an argument is."""
        if not isinstance(data, Call) or data.op.name != "tirx.buffer_data":
            raise _no_matrix(data)
        return self.buffers[data.args[0]]

    def _number(self, expression: Expr) -> int:
        found = evaluate(expression, self.values)
        if found is None:
            raise _at_run_time(expression)
        return int(found)


def _no_matrix(value: object) -> UnsupportedLaunch:
    return UnsupportedLaunch("a parameter is no matrix", value=str(value), remedy="give the kernel buffers alone")


def _at_run_time(value: object) -> UnsupportedLaunch:
    return UnsupportedLaunch(
        "a launch depends on what is known only at run time", value=str(value), remedy="give constants"
    )
