"""The Triton peer's kernel without a GPU, each check in a process of its own: ``python -m tests.triton_checks NAME``.

``interpreted`` runs it on the CPU (TRITON_INTERPRET=1 must be set, before Triton is loaded); ``compiled`` lets
Triton compile it for sm_90 through a driver that launches nothing.
"""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from harness.execution import LlvmBackend
from harness.peers.triton import BlockConfig, compile_all, declared_configs, launch, launch_arguments, load_kernel
from harness.verify import verify_launch
from schedules.wgmma import PTX_TYPES
from schedules.workloads import Matmul

# Triton 3.6's interpreter multiplies the bits of bfloat16 as whole numbers: only a GPU checks those.
CASES = (("float32", None), ("float16", None), ("float16", "float32"))
LARGE = BlockConfig(128, 256, 64, 8, 3)


def interpreted() -> None:
    """Outputs at whole and ragged shapes, both layouts, with the very launch that is measured."""
    config, shapes = BlockConfig(32, 16, 16, 4, 2), ((64, 32, 48), (33, 17, 50), (1, 1, 1), (300, 20, 17))
    for shape in shapes:
        for layout in ("nn", "nt"):
            for dtype, out_dtype in CASES:
                problem = Matmul(*shape, dtype, layout, out_dtype)
                verify_launch(on_numpy(launch(load_kernel(), problem, config)), problem, LlvmBackend(), str(problem))


def on_numpy(run):
    """A launch on torch tensors as one on numpy arrays, whose memory they share."""

    def call(*arrays: np.ndarray) -> None:
        run(*map(torch.from_numpy, arrays))

    return call


def compiled() -> None:
    """Declared configurations side by side, what is refused, and what the code multiplies and copies with."""
    driver.set_active(NoDevice())
    kernel = load_kernel()
    for dtype, layout in (("float32", "nn"), ("float32", "nt"), ("float16", "nn"), ("bfloat16", "nt")):
        problem = Matmul(256, 256, 256, dtype, layout)
        shapes = ((problem.m, problem.k), problem.b_shape, (problem.m, problem.n))
        operands = tuple(torch.zeros(shape, dtype=getattr(torch, dtype)) for shape in shapes)
        configs = [
            config for config in declared_configs(dtype, every_stage=True) if config.block_m == config.block_n == 32
        ]
        assert [config.stages for config in configs] == [1, 2, 3, 4, 5]
        assert compile_all(kernel, problem, configs, operands, 232448) == {}
        refused = compile_all(kernel, problem, configs, operands, 20000)
        assert configs[0] not in refused
        assert re.fullmatch(r"needs \d+ bytes of shared memory, limit 20000", refused[configs[-1]])
        for config in configs:
            numbers, constants = launch_arguments(problem, config)
            ptx = kernel.warmup(*operands, *numbers, **constants, grid=(1,)).asm["ptx"]
            assert "tf32" not in ptx
            assert ("fma.rn.f32" in ptx, "mma" in ptx) == ((True, False) if dtype == "float32" else (False, True))
            assert ("cp.async.c" in ptx) == (config.stages > 1), config
        launch(kernel, problem, configs[2])(*operands)
        if dtype != "float32":
            numbers, constants = launch_arguments(problem, LARGE)
            ptx = kernel.warmup(*operands, *numbers, **constants, grid=(1,)).asm["ptx"]
            assert re.search(r"wgmma\.mma_async\S*\.m64n256k16\.f32\." + PTX_TYPES[dtype], ptx)
    assert NoDevice.launched == [64] * 4


class NoDevice:
    """What Triton asks of a driver, without a GPU."""

    launched: list[int] = []  # noqa: RUF012 - shared by purpose
    utils = SimpleNamespace(
        get_device_properties=lambda _device: {"max_shared_mem": 232448, "multiprocessor_count": 132},
        load_binary=lambda *_arguments: (0, 0, 40, 0, 1024),
    )

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    @staticmethod
    def launcher_cls(_source, _metadata):
        return lambda programs, *_rest: NoDevice.launched.append(programs)


if __name__ == "__main__":
    {"interpreted": interpreted, "compiled": compiled}[sys.argv[1]]()
