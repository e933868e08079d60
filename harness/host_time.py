"""Measure the host time of a launch: the CPU's, for a call that puts one kernel into a stream and returns."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

from tensorir_ladder.harness.build import Kernel, compiled, executable
from tensorir_ladder.harness.execution import GpuBackend
from tensorir_ladder.kernels.codegen.launch_plan import MatrixRows
from tensorir_ladder.kernels.codegen.toolchain import Compiler
from tensorir_ladder.schedules.loops.vectorization import dtype_bytes
from tensorir_ladder.torch_ops import matmul
from tensorir_ladder.torch_ops.driver import cuda_driver
from tensorir_ladder.torch_ops.launcher import Launcher, compile_kernel, load_kernel

LAUNCHES = 500  # in a row: fewer than a stream takes before a launch waits for the GPU
ROUNDS = 9


def host_time_us(call: Callable[[], object], synchronize: Callable[[], object]) -> float:
    """Measure a call on the host, in µs: the median of rounds, each of LAUNCHES calls on an idle GPU."""
    call()
    times = []
    for _ in range(ROUNDS):
        synchronize()
        begin = time.perf_counter()
        for _ in range(LAUNCHES):
            call()
        times.append((time.perf_counter() - begin) / LAUNCHES * 1e6)
    synchronize()
    return median(times)


def ways_to_launch(kernel: Kernel, compiler: Compiler, backend: GpuBackend) -> dict[str, Callable[[], object]]:
    """Name calls that multiply the same tensors: by TVM's executable, the launcher, the whole Python call, torch.

    The first two run this kernel; :func:`torch_ops.matmul` takes the one that it chooses itself.
    """
    problem, torch = kernel.case.problem, backend.torch
    a = backend.normal(0, (problem.m, problem.k), problem.dtype)
    b = backend.normal(1, problem.b_shape, problem.dtype)
    c = backend.poisoned((problem.m, problem.n), problem.out_dtype)
    run = executable(compiled(kernel, compiler))["main"]
    launcher = own_launcher(kernel, compiler, torch.cuda.current_device())
    stream = torch.cuda.current_stream().cuda_stream
    room = launcher.workspaces.of(stream, a)
    addresses = [*(tensor.data_ptr() for tensor in (a, b, c)), *room.addresses]
    seen = b if problem.layout == "nn" else b.T
    ways: dict[str, Callable[[], Any]] = {
        "TVM's executable": lambda: run(a, b, c),
        "the launcher": lambda: launcher(stream, *addresses),
        "torch_ops.matmul": lambda: matmul(a, seen, out=c),
        "torch_ops.matmul, new output": lambda: matmul(a, seen, out_dtype=c.dtype),
    }
    if problem.dtype == problem.out_dtype:
        ways |= {"torch.mm": lambda: torch.mm(a, seen, out=c), "torch.mm, new output": lambda: torch.mm(a, seen)}
    return ways


def own_launcher(kernel: Kernel, compiler: Compiler, device: int) -> Launcher:
    """Load an explicit kernel into a launcher for contiguous matrices."""
    problem = kernel.case.problem
    loaded = load_kernel(compile_kernel(kernel.source, kernel.machine.target(), compiler), cuda_driver(), device)
    shapes = {"A": (problem.m, problem.k), "B": problem.b_shape, "C": (problem.m, problem.n)}
    dtypes = {"A": problem.dtype, "B": problem.dtype, "C": problem.out_dtype}
    return Launcher(
        loaded, {name: MatrixRows(*shape, shape[1] * dtype_bytes(dtypes[name])) for name, shape in shapes.items()}
    )
