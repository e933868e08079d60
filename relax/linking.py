"""Launch explicit kernels from functions of TVM's: a launch as host statements, beside what schedules made.

TVM's pipeline for scheduled functions would put block barriers into the roles of an explicit kernel. So the kernel is
lowered by itself (:func:`device_code`), and the function has the launch alone::

    a_map = tensor map of A, rows × k           # encoded at each call: addresses and rows are the call's
    c_map = ...
    launch "tma_4096x4096_..."(a_map, b_map, c_map, rows), so many blocks

``tvm.compile`` finds the kernel among the module's ``external_mods`` (:func:`linked`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import tvm
from tvm import ir, tirx
from tvm.script import tirx as T
from tvm.target import Target

from tensorir_ladder.kernels.codegen.host_code import launch_plan
from tensorir_ladder.kernels.codegen.launch_plan import (
    LaunchPlan,
    PlainBuffer,
    PlannedNumber,
    RowCount,
    TensorMap,
    UnsupportedLaunch,
)
from tensorir_ladder.kernels.codegen.lowering import brought, compile_side_by_side, generate
from tensorir_ladder.kernels.codegen.overlap import flag_overlap
from tensorir_ladder.kernels.codegen.toolchain import find_compiler
from tensorir_ladder.relax.rules import when
from tensorir_ladder.schedules.loops import flagged

TIR_PIPELINE = "tirx"
LINKED = "external_mods"  # TVM's attribute of a module: what its functions are linked with
BLOCKS, THREADS, SHARED = "blockIdx.x", "threadIdx.x", "tirx.use_dyn_shared_memory"
FLAGS = "int32"  # the dtype of workspaces that are zeros before a launch
FLAG_THREADS = 256


@dataclass(frozen=True)
class DeviceCode:
    """A kernel as it is launched, and its lowered function, the one of a module."""

    plan: LaunchPlan
    device: ir.IRModule


def device_code(kernel: tirx.PrimFunc, name: str, target: Target) -> DeviceCode:
    """Lower an explicit kernel; ``name`` is its own among all that are ever linked together.

    Raises UnsupportedLaunch as :func:`kernels.codegen.host_code.launch_plan` does.
    """
    generated = generate(ir.IRModule({name: kernel.with_attr("global_symbol", name)}), target, TIR_PIPELINE)
    plan = launch_plan(generated)
    return DeviceCode(plan, flag_overlap(generated.device) if plan.overlaps else generated.device)


class Mapped(NamedTuple):
    """A matrix at hand as a tensor map has it: ``sizes`` from the innermost, in elements; ``strides`` of all but that.

    ``strides`` are bytes; None: those of the kernel's own map.
    """

    sizes: Sequence[tirx.Expr | int]
    strides: Sequence[tirx.Expr | int] | None = None


def launch(
    plan: LaunchPlan,
    matrices: Mapping[str, tirx.Var],
    mapped: Mapping[str, Mapped],
    numbers: Mapping[str, tirx.Expr | int],
    blocks: tirx.Expr | int,
    flags: tirx.Expr | bool = False,
) -> tirx.Stmt:
    """Write a launch of so many ``blocks`` as statements of a host function, on its buffers.

    ``mapped`` says, by the kernel's names, how matrices lie whose sizes the call brings; maps of others are as the
    kernel was made for. ``numbers`` are what the kernel is told, by name. Workspaces are what TVM's runtime keeps for
    such; where ``flags`` among them are used, a kernel in front writes zeros to these.
    """
    stmts: list[tirx.Stmt] = []
    arguments: list[ir.Expr] = []
    for parameter in plan.parameters:
        if isinstance(parameter, TensorMap):
            stmts += _encode(parameter, matrices[parameter.buffer], mapped.get(parameter.buffer), arguments)
        elif isinstance(parameter, (RowCount, PlannedNumber)):
            arguments.append(numbers[parameter.buffer])
        elif isinstance(parameter, PlainBuffer) and parameter.buffer in matrices:
            arguments.append(matrices[parameter.buffer].data)
        elif isinstance(parameter, PlainBuffer):
            stmts += _allocate(parameter, flags, arguments)
        else:
            raise UnsupportedLaunch("a parameter is no matrix", value=parameter, remedy="give the kernel buffers alone")
    if plan.cluster_blocks > 1 or len(set(plan.grid[1:] + plan.block[1:])) > 1:
        raise UnsupportedLaunch(
            "a launch of clusters, or of several dimensions", value=(plan.cluster, plan.grid), remedy="launch a row"
        )
    tags = [BLOCKS, THREADS, SHARED]
    extents = (blocks, plan.block[0], plan.shared_bytes)
    params = flagged(tags) if plan.overlaps else tags
    call = tirx.Evaluate(tirx.op.call_ffi_kernel(ir.StringImm(plan.kernel), *arguments, *extents, launch_params=params))
    return tirx.SeqStmt([*stmts, call]) if stmts else call


def _encode(parameter: TensorMap, matrix: tirx.Var, mapped: Mapped | None, arguments: list[ir.Expr]) -> list[tirx.Stmt]:
    """Encode a map, and add it to the arguments."""
    tensor_map = tirx.Var(f"{parameter.buffer}_map", T.handle("tensormap").ty)
    sizes, strides = mapped or (parameter.sizes, None)
    call = tirx.op.tensormap_encode_tiled(
        tensor_map,
        matrix.data,
        *(*sizes, *(parameter.strides if strides is None else strides), *parameter.box),
        *(1 for _ in sizes),  # every element of a box
        descriptor_dtype=parameter.dtype,
        rank=len(sizes),
        swizzle=parameter.swizzle,
        l2_promotion=parameter.l2_promotion,
    )
    arguments.append(tensor_map)
    return [tirx.Bind(tensor_map, tirx.op.tvm_stack_alloca("tensormap", 1)), tirx.Evaluate(call)]


def _allocate(parameter: PlainBuffer, flags: tirx.Expr | bool, arguments: list[ir.Expr]) -> list[tirx.Stmt]:
    """Allocate a workspace, and add it to the arguments."""
    workspace = tirx.decl_buffer(parameter.shape, parameter.dtype, parameter.buffer, layout=None)
    arguments.append(workspace.data)
    if parameter.dtype != FLAGS or flags is False:
        return [tirx.AllocBuffer(workspace)]
    zeros = _zeros(workspace)
    return [tirx.AllocBuffer(workspace), zeros if flags is True else when(flags, zeros)]


def _zeros(flags: tirx.Var) -> tirx.Stmt:
    """Write a kernel of one block that lowers all flags."""
    (count,) = flags.shape
    thread = tirx.Var("thread", "int32")
    place = tirx.Var("place", "int32")
    index = place * FLAG_THREADS + thread
    store = tirx.IfThenElse(index < count, tirx.BufferStore(flags, tirx.const(0, FLAGS), [index]), None)
    body: tirx.Stmt = tirx.For(place, 0, -(-int(count) // FLAG_THREADS), tirx.ForKind.SERIAL, store)
    for tag, variable, extent in ((THREADS, thread, FLAG_THREADS), (BLOCKS, tirx.Var("block", "int32"), 1)):
        axis = tirx.IterVar(ir.Range(0, extent), variable, tirx.IterVar.ThreadIndex, tag)
        body = tirx.AttrStmt(axis, "thread_extent", extent, body)
    return body


def link_kernels(mod: ir.IRModule) -> ir.IRModule:
    """Have TVM link a module with the kernels that its functions launch, each a CUDA module, once.

    They are compiled when TVM compiles all: now where there is a GPU, side by side where there is an nvcc, too, else
    when they are loaded.
    """
    build, compiler = tvm.get_global_func("target.build.cuda"), find_compiler()
    kernels = brought(mod).functions_items()
    if not kernels:
        return mod

    def made() -> list[tvm.runtime.Module]:
        return [build(ir.IRModule({name: kernel}), kernel.attrs["target"]) for name, kernel in kernels]

    arch = str(kernels[0][1].attrs["target"].attrs["arch"])
    linked = compile_side_by_side(made, arch, compiler) if compiler else made()
    before = mod.attrs.get(LINKED, ()) if mod.attrs else ()
    return mod.with_attr(LINKED, [*before, *linked])
