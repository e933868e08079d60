"""Lower a module to its CUDA text: by TVM's passes, and its code generator without its compiler."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import tvm
import tvm_ffi
from tvm import ir, tirx
from tvm.target import Target
from tvm.tirx.build import split_host_device_mods

from tensorir_ladder.kernels.codegen.toolchain import Compiler, compile_cubin
from tensorir_ladder.schedules.errors import IllegalSchedule, IllegalWorkload
from tensorir_ladder.schedules.workloads import MAX_ELEMENTS

Made = TypeVar("Made")
KERNELS = "tensorir_ladder.kernels"  # attribute of a function: the names of lowered kernels that it launches too
# What TVM says where it has named a part of an array's extent behind the array.
EXTENT_USED = re.compile(r"variable cse_v\d+ has been used before definition")
_lowered: dict[str, tuple[ir.GlobalVar, tirx.PrimFunc]] = {}
_one_compiler = threading.RLock()  # TVM has one such function for all threads


class UnknownKernel(IllegalSchedule):
    """A kernel that a function launches and that nobody made here."""


@dataclass(frozen=True)
class Generated:
    """A lowered module: the host's functions, which launch kernels, the kernels, and these as CUDA text."""

    host: tvm.IRModule
    device: tvm.IRModule
    cuda: str


def generate(
    mod: tvm.IRModule, target: Target, tir_pipeline: str, pass_config: Mapping[str, bool] | None = None
) -> Generated:
    """Lower a module for one CUDA target by the passes of that name; needs neither a compiler nor a GPU.

    IllegalWorkload where an index of the kernel, with whole tiles and groups of blocks, does not fit into 32 bits;
    IllegalSchedule where a kernel's own array has an extent that TVM takes for one known at run time only.
    """
    module = tirx.transform.BindTarget(target.with_host("llvm"))(mod)
    pipeline, _, finalize_device = tirx.get_tir_pipeline(tir_pipeline)
    with tvm.transform.PassContext(config=dict(pass_config or {})):
        try:
            host, devices = split_host_device_mods(pipeline(module))
        except ValueError as error:
            beyond = re.search(r"Literal value (-?\d+) exceeds range of int32", str(error))
            if not beyond:
                raise
            raise IllegalWorkload(
                "an index of the kernel does not fit into 32 bits",
                value=beyond.group(1),
                limit=f"below {MAX_ELEMENTS}",
                remedy="split the product along one of its extents",
            ) from error
        except tvm.error.InternalError as error:
            if not EXTENT_USED.search(str(error)):
                raise
            raise _unknown_extent("an expression") from error
    device_target, device = next(iter(devices.items()), (target, tvm.IRModule()))  # one target's, or none
    device = finalize_device()(device)
    for array in _arrays(device):
        if not all(isinstance(extent, tirx.IntImm) for extent in array.shape):
            raise _unknown_extent(f"{array.name}: {list(array.shape)}")
    device.update(brought(mod))
    return Generated(host, device, _cuda_text(device, device_target))


def _arrays(device: tvm.IRModule) -> list[tirx.Var]:
    """List the arrays that kernels allocate."""
    found: list[tirx.Var] = []
    for function in device.functions.values():
        tvm_ffi.structural_walk(function.body, (tirx.AllocBuffer, lambda array: found.append(array.buffer)))
    return found


def _unknown_extent(value: str) -> IllegalSchedule:
    return IllegalSchedule(
        "an array of a thread or a block has an extent that TVM 0.27 takes for one of run time",
        value=value,
        limit="numbers",
        remedy="choose another tile (of 1, 2, 4 or 8 warps side by side), or give the function constant shapes",
    )


def with_kernels(function: tirx.PrimFunc, kernels: tvm.IRModule) -> tirx.PrimFunc:
    """Return a function that says which kernels, lowered already, it launches beside its own; their names are unique.

    This process keeps them by name: TVM prints no function that has a module in its attributes.
    """
    names = [name.name_hint for name in kernels.functions]
    _lowered.update({name.name_hint: (name, kernel) for name, kernel in kernels.functions_items()})
    return function.with_attr(KERNELS, names)


def brought(mod: tvm.IRModule) -> tvm.IRModule:
    """Return the lowered kernels that functions of a module launch beside their own."""
    functions = [function for function in mod.functions.values() if function.attrs and KERNELS in function.attrs]
    names = dict.fromkeys(str(name) for function in functions for name in function.attrs[KERNELS])
    if missing := [name for name in names if name not in _lowered]:
        raise UnknownKernel(
            "a function launches kernels that another process made",
            value=", ".join(missing),
            remedy="schedule the module in the process that compiles it",
        )
    return tvm.IRModule(dict(_lowered[name] for name in names))


class _TextOnly(Exception):
    """Stops TVM where it would compile the CUDA text, once the text is known."""


def _cuda_text(device: tvm.IRModule, target: Target) -> str:
    """Generate the text. With a driver present TVM compiles at once: then the text is caught on its way."""
    texts: list[str] = []

    def catch(source: str) -> bytes:
        """Keep the text and stop TVM before it compiles."""
        texts.append(source)
        raise _TextOnly

    with cuda_compiler(catch):
        try:
            return tvm.get_global_func("target.build.cuda")(device, target).inspect_source()
        except Exception:
            if not texts:
                raise
            return texts[0]


def compile_side_by_side(make: Callable[[], Made], arch: str, compiler: Compiler) -> Made:
    """Return what ``make`` returns; CUDA texts that TVM compiles in it are compiled on all cores, and kept on disk.

    It is called twice: TVM compiles one text after the other, so the first call learns what there is to compile. On
    a machine without a GPU TVM compiles nothing, and one call is enough.
    """
    texts: list[str] = []

    def note(source: str) -> bytes:
        texts.append(source)
        return b""

    def compiled(source: str) -> bytes:
        return compile_cubin(source, arch, compiler).data

    with cuda_compiler(note):
        made = make()
    if not texts:
        return made
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compiled, dict.fromkeys(texts)))
    with cuda_compiler(compiled):
        return make()


@contextlib.contextmanager
def cuda_compiler(callback: Callable[[str], bytes]) -> Iterator[None]:
    """Let ``callback(source) -> cubin`` stand in for TVM's own way of compiling CUDA text."""
    name = "tvm_callback_cuda_compile"
    with _one_compiler:
        before = tvm.get_global_func(name)
        tvm_ffi.register_global_func(name, lambda source: bytearray(callback(source)), override=True)
        try:
            yield
        finally:
            tvm_ffi.register_global_func(name, before, override=True)
