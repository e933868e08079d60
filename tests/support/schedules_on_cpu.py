"""Run schedules on the CPU, and show the CUDA text of them."""

from __future__ import annotations

import numpy as np
import tvm
from tvm.s_tir import Schedule

from tensorir_ladder.harness.execution import compile_serial, run_guarded
from tensorir_ladder.harness.machines import machine_for
from tensorir_ladder.schedules.pipeline import required_pass_config

TARGET = machine_for("sm_90a").target()


def normal(*shape: int) -> np.ndarray:
    """Standard normal float32 values, the same ones at each call with the same shape."""
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def run(sch: Schedule, *inputs: np.ndarray, shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray:
    """Run a schedule on the CPU into an output full of NaN."""
    return run_guarded(compile_serial(sch.mod)["main"], *inputs, np.full(shape, np.nan, dtype))[-1]


def cuda_text(sch: Schedule) -> str:
    """The generated CUDA of a schedule."""
    with tvm.transform.PassContext(config=required_pass_config(sch.mod)):
        source = tvm.compile(sch.mod, target=TARGET).mod.imports[0].inspect_source()
    return source[source.rfind('extern "C"') :]


def convolve(data: np.ndarray, weight: np.ndarray, stride: int, padding: int) -> np.ndarray:
    """A convolution as numpy sums it, in float64."""
    around = ((0, 0), (padding, padding), (padding, padding), (0, 0))
    data, kernel = np.pad(data.astype(np.float64), around), weight.shape[0]
    height, width = ((size - kernel) // stride + 1 for size in data.shape[1:3])
    out = np.zeros((data.shape[0], height, width, weight.shape[3]))
    for y in range(kernel):
        for x in range(kernel):
            window = data[:, y : y + height * stride : stride, x : x + width * stride : stride]
            out += np.einsum("nhwc,co->nhwo", window, weight[y, x])
    return out
