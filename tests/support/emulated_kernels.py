"""Kernels of TIR, run whole in the emulator."""

from __future__ import annotations

from math import prod

import numpy as np
import tvm

from tensorir_ladder.emulator import EmulatedProgram
from tensorir_ladder.harness.execution import numpy_dtype
from tensorir_ladder.harness.machines import machine_for
from tensorir_ladder.kernels.codegen.host_code import launch_plan
from tensorir_ladder.kernels.codegen.lowering import generate
from tensorir_ladder.torch_ops.launcher import TIR_PIPELINE

TARGET = machine_for("sm_90a").target()


def emulate(function: tvm.tirx.PrimFunc, given: dict[str, np.ndarray]) -> None:
    """Run a kernel in the emulator on arrays by name; workspaces are its own."""
    made = generate(tvm.IRModule({"main": function}), TARGET, TIR_PIPELINE)
    launch = launch_plan(made)
    kept = {each.buffer: (each.shape, numpy_dtype(each.dtype)) for each in launch.workspaces}
    names, operands = (*given, *kept), tuple(name for name in given if name != "C")
    memory, resident = tuple(kept.values()), prod(launch.grid)
    EmulatedProgram("kernel", made.cuda, (launch,), names, memory, resident, operands)(*given.values())
