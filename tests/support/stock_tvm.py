"""What TVM makes of a function by its own passes alone, none of ours: as CUDA text, or run on the CPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
import tvm
from tvm import tirx
from tvm.s_tir import Schedule

HOPPER = tvm.target.Target({"kind": "cuda", "arch": "sm_90a"})
ASYNCHRONOUS = {"tirx.use_async_copy": True}
EVENTS = r"wait_group_\d+|commit_group\(|__syncthreads|cp_async_legacy"


def still(wrong: bool, way_around: str) -> None:
    """Fail as soon as TVM does something else than it did; ``way_around`` is where we avoid what it did."""
    assert wrong, f"mended in TVM {tvm.__version__}: remove the way around in {way_around}, the test and its entry"


def failure(call: Callable[[], object]) -> str:
    """What a call fails with, "" where it does not."""
    try:
        call()
    except (RuntimeError, ValueError, AttributeError, IndexError, AssertionError) as error:  # TVM's own are among these
        return str(error)
    return ""


def pipelined(
    function: tirx.PrimFunc, stage: Sequence[int], order: Sequence[int], asynchronous: Sequence[int] | None = None
) -> tvm.IRModule:
    """The function with TVM's lists at its loops ``step``; copies in ``asynchronous`` stages are cp.async."""
    sch = Schedule(function)
    lists = {"stage": stage, "order": order, "async_stages": asynchronous}
    for block in sch.get_child_blocks(sch.get_sblock("root")):
        for loop in (each for each in sch.get_loops(block) if str(sch.get(each).loop_var.name).startswith("step")):
            for name, values in lists.items():
                if values is not None and f"software_pipeline_{name}" not in sch.get(loop).annotations:
                    sch.annotate(loop, f"software_pipeline_{name}", list(values))
    return sch.mod


def kernel(mod: tvm.IRModule | tirx.PrimFunc, tir_pipeline: str | None = None) -> str:
    """The kernel's CUDA text, with cp.async where a pipeline asks for it; no compiler sees it."""
    module = tvm.IRModule({"main": mod}) if isinstance(mod, tirx.PrimFunc) else mod
    with tvm.transform.PassContext(config=ASYNCHRONOUS):
        source = tvm.compile(module, target=HOPPER, tir_pipeline=tir_pipeline).mod.imports[0].inspect_source()
    return source[source.rindex('extern "C" __global__') :]


def events(text: str) -> list[str]:
    """Copies, commits, waits and barriers of a CUDA text, in order."""
    return re.findall(EVENTS, text)


def elements(text: str, buffer: str) -> int:
    """How many elements a kernel declares of a shared buffer."""
    (count,) = re.findall(rf"__shared__ [^;]*\b{buffer}_ptr\[(\d+)\]", text)
    return int(count)


def on_cpu(mod: tvm.IRModule, *inputs: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """What the function computes on the CPU, into an output full of NaN."""
    output = tvm.runtime.tensor(np.full(shape, np.nan, "float32"))
    tvm.compile(mod, target="llvm")["main"](*map(tvm.runtime.tensor, inputs), output)
    return output.numpy()
