"""The Triton peer's kernel without a GPU, each check in a process of its own: ``python -m tests.triton_checks NAME``.

``interpreted`` runs it on the CPU (TRITON_INTERPRET=1 must be set, before Triton is loaded); ``compiled`` lets
Triton compile it for sm_90 through a driver that launches nothing. ``interpreted_tma`` and ``compiled_tma`` do likewise
with the persistent kernel.
"""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from tensorir_ladder.harness.execution import LlvmBackend
from tensorir_ladder.harness.peers import triton_tma
from tensorir_ladder.harness.peers.triton import BlockConfig, compile_all, declared_configs, launch, load_kernel
from tensorir_ladder.harness.verify import verify_launch
from tensorir_ladder.schedules.isa import PTX_TYPES
from tensorir_ladder.schedules.workloads import Matmul

# Triton 3.6's interpreter multiplies the bits of bfloat16 as whole numbers: only a GPU checks those.
CASES = (("float32", None), ("float16", None), ("float16", "float32"))
TMA_KERNEL = "harness.peers.triton_tma_kernel"
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
        operands = zeros(problem)
        configs = [
            config for config in declared_configs(dtype, every_stage=True) if config.block_m == config.block_n == 32
        ]
        assert [config.stages for config in configs] == [1, 2, 3, 4, 5]
        assert compile_all(kernel, problem, configs, operands, 232448) == {}
        refused = compile_all(kernel, problem, configs, operands, 20000)
        assert configs[0] not in refused
        assert re.fullmatch(r"needs \d+ bytes of shared memory, limit 20000", refused[configs[-1]])
        for config in configs:
            ptx = ptx_of(kernel, problem, config, operands)
            assert "tf32" not in ptx
            assert ("fma.rn.f32" in ptx, "mma" in ptx) == ((True, False) if dtype == "float32" else (False, True))
            assert ("cp.async.c" in ptx) == (config.stages > 1), config
        launch(kernel, problem, configs[2])(*operands)
        if dtype != "float32":
            ptx = ptx_of(kernel, problem, LARGE, operands)
            assert re.search(r"wgmma\.mma_async\S*\.m64n256k16\.f32\." + PTX_TYPES[dtype], ptx)
    assert NoDevice.launched == [64] * 4


def interpreted_tma() -> None:
    """Outputs of fewer and of more tiles than programs, ragged ones, both layouts, whole and in halves."""
    kernel = load_kernel(TMA_KERNEL)
    for shape in ((64, 32, 48), (40, 24, 56), (8, 8, 8), (104, 24, 16)):
        for layout in ("nn", "nt"):
            for dtype, out_dtype in CASES[1:]:
                for parts in (1, 2):
                    config = triton_tma.TmaConfig(32, 16, 16, 4, 2, parts, False, 3)
                    problem = Matmul(*shape, dtype, layout, out_dtype)
                    verify_launch(on_numpy(launch(kernel, problem, config)), problem, LlvmBackend(), str(config))


def compiled_tma() -> None:
    """Declared configurations (every one in float16): what they copy and multiply with, and whose warps do."""
    driver.set_active(NoDevice())
    kernel = load_kernel(TMA_KERNEL)
    for dtype, layout, step in (("float16", "nn", 1), ("bfloat16", "nt", 4)):
        problem = Matmul(512, 512, 512, dtype, layout)
        operands = zeros(problem)
        configs = triton_tma.declared_configs(problem, 132)[::step]
        assert compile_all(kernel, problem, configs, operands, 232448) == {}
        for config in configs:
            ptx = ptx_of(kernel, problem, config, operands)
            assert "cp.async.bulk.tensor.2d.shared::cluster.global" in ptx, config
            assert "cp.async.bulk.tensor.2d.global.shared::cta" in ptx, config
            assert re.search(rf"wgmma\.mma_async\S*\.m64n{config.block_n}k16\.f32\." + PTX_TYPES[dtype], ptx), config
            assert ("setmaxnreg" in ptx) == config.specialized, config
            # Descriptors made in the kernel are what may be divided between groups of warps.
            assert ("tensormap.replace" in ptx) == config.specialized, config


def zeros(problem: Matmul) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Operands on the CPU, to compile for."""
    shapes = ((problem.m, problem.k), problem.b_shape, (problem.m, problem.n))
    return tuple(torch.zeros(shape, dtype=getattr(torch, problem.dtype)) for shape in shapes)


def ptx_of(kernel, problem: Matmul, config: BlockConfig, operands: tuple) -> str:
    """The PTX that Triton makes for a configuration."""
    call = config.call(problem, operands)
    return kernel.warmup(*call.arguments, **call.constants, grid=(1,)).asm["ptx"]


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
    checks = (interpreted, compiled, interpreted_tma, compiled_tma)
    {check.__name__: check for check in checks}[sys.argv[1]]()
