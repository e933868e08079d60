"""Timing kernels beside cuBLAS and the step before, in interleaved rounds on the GPU."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tvm

from tensorir_ladder.harness.execution import GpuBackend, NoGpu
from tensorir_ladder.harness.records import GpuState, Method, Timing
from tensorir_ladder.schedules.workloads import Matmul

L2_BYTES_FLUSHED = 2 * 60 * 2**20  # operand sets together exceed the H200's L2 twice over
MOST_SETS = 512  # small problems stay in the L2: their launches take no longer than the launch itself
DATA = "standard normal"
IEEE = "ieee"  # float32 products without TF32; half precision multiplies exactly and adds in float32


@dataclass(frozen=True)
class Plan:
    """How long to measure: rounds, and how much time to warm up until clocks settle."""

    rounds: int = 15
    warmup_ms: float = 250.0
    round_budget_ms: float = 150.0

    def rounds_for(self, round_ms: float) -> int:
        """Fewer rounds where one takes long, never fewer than 7."""
        return self.rounds if round_ms <= self.round_budget_ms else max(7, self.rounds // 2)


# For choosing among many candidates; then, with more rounds, among the fastest few.
TUNING, FINAL = Plan(rounds=7, warmup_ms=20.0), Plan(rounds=9, warmup_ms=50.0)


@dataclass(frozen=True)
class Rounds:
    """The outcome: one timing per contender, in the order given, and how they were taken."""

    timings: tuple[Timing, ...]
    method: Method
    before: GpuState
    after: GpuState


Contender = tuple[str, Callable[..., Any]]


def sets_needed(set_bytes: int) -> int:
    """Operand sets that together exceed the L2 twice over, as far as MOST_SETS go; two at least."""
    return min(MOST_SETS, max(2, -(-L2_BYTES_FLUSHED // set_bytes)))


class Racecourse:
    """Operand sets on the GPU, over which any callables that take one set's operands can be timed."""

    def __init__(self, backend: GpuBackend, sets: list[tuple[Any, ...]], set_bytes: int) -> None:
        self.backend, self.torch, self.sets = backend, backend.torch, sets
        self.cold = MOST_SETS * set_bytes >= L2_BYTES_FLUSHED

    def graph(self, launch: Callable[..., Any]) -> Any:
        """A CUDA graph with one launch per operand set: nothing of the host is timed."""
        stream = self.torch.cuda.Stream()
        with self.torch.cuda.stream(stream):
            launch(*self.sets[0])
        self.torch.cuda.synchronize()
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph):
            for operands in self.sets:
                launch(*operands)
        return graph

    def race(self, contenders: list[Contender], plan: Plan) -> Rounds:
        """Time contenders in interleaved rounds, each round in another order, the GPU never idle inside one."""
        graphs = [self.graph(launch) for _, launch in contenders]
        started, round_ms = time.perf_counter(), 0.0
        while (time.perf_counter() - started) * 1e3 < plan.warmup_ms:
            begun = time.perf_counter()
            for graph in graphs:
                graph.replay()
            self.torch.cuda.synchronize()
            round_ms = (time.perf_counter() - begun) * 1e3
        before, rounds = gpu_state(), plan.rounds_for(round_ms)
        graphs[0].replay()  # fills the gap that reading the state left
        samples: list[list[float]] = [[] for _ in contenders]
        for number in range(rounds):
            order = [(number + place) % len(graphs) for place in range(len(graphs))]
            events = {index: self._timed(graphs[index]) for index in order}
            self.torch.cuda.synchronize()
            for index, (start, end) in events.items():
                samples[index].append(start.elapsed_time(end) / len(self.sets))
        timings = tuple(Timing(label, tuple(times)) for (label, _), times in zip(contenders, samples))
        method = Method(
            rounds=rounds,
            launches_per_round=len(self.sets),
            operand_sets=len(self.sets),
            data=DATA,
            cache="cold: operand sets rotate, together over twice the L2" if self.cold else "warm: operands fit the L2",
            launch="CUDA graph, device events around it",
            warmup_ms=plan.warmup_ms,
        )
        return Rounds(timings, method, before, gpu_state())

    def _timed(self, graph: Any) -> tuple[Any, Any]:
        start, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        return start, end


class Arena(Racecourse):
    """Operands of one problem on the GPU, in as many sets as it takes to find the L2 cold at every launch.

    Sets are drawn from ``first_seed`` on.
    """

    def __init__(self, problem: Matmul, backend: GpuBackend, first_seed: int = 0) -> None:
        self.problem = problem
        itemsize = backend.torch.empty(0, dtype=getattr(backend.torch, problem.dtype)).element_size()
        set_bytes = (problem.m * problem.k + problem.n * problem.k) * itemsize + problem.m * problem.n * itemsize
        sets = []
        for seed in range(first_seed, first_seed + sets_needed(set_bytes)):
            a = backend.normal(2 * seed, (problem.m, problem.k), problem.dtype)
            b = backend.normal(2 * seed + 1, problem.b_shape, problem.dtype)
            sets.append((a, b, backend.poisoned((problem.m, problem.n), problem.out_dtype)))
        super().__init__(backend, sets, set_bytes)
        # The other storage order of B, for cuBLAS only: the same matrix, transposed in memory.
        self.transposed_b = [b.T.contiguous() for _, b, _ in self.sets]

    def cublas(self, math: str = IEEE) -> tuple[Contender, Contender]:
        """cuBLAS through torch with B as stored row by row (NN) and transposed (NT); TF32 only where ``math`` says."""
        self.torch.backends.cuda.matmul.allow_tf32 = math != IEEE
        stored, other = ("nn", "nt") if self.problem.layout == "nn" else ("nt", "nn")
        transposed = {id(b): t for (_, b, _), t in zip(self.sets, self.transposed_b)}

        def as_stored(a: Any, b: Any, c: Any) -> None:
            """cuBLAS on B in the problem's own layout."""
            self.torch.mm(a, b if stored == "nn" else b.T, out=c)

        def as_other(a: Any, b: Any, c: Any) -> None:
            """cuBLAS on B in the other layout."""
            self.torch.mm(a, transposed[id(b)].T if stored == "nn" else transposed[id(b)], out=c)

        return (f"cublas-{stored}", as_stored), (f"cublas-{other}", as_other)


def gpu_state() -> GpuState:
    """Clocks, power and temperature of the GPU now."""
    fields = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
    return GpuState(*(float(value) for value in _smi(fields)))


def gpu_identity() -> dict[str, Any]:
    """Name, UUID, driver and power limit of the GPU, under the names a record's environment uses."""
    name, uuid, driver, limit = _smi(("name", "uuid", "driver_version", "power.limit"))
    return {"gpu": name, "gpu_uuid": uuid, "driver": driver, "power_limit_w": float(limit)}


def versions(backend: GpuBackend, compiler: str) -> dict[str, str]:
    """Versions of everything that shapes a measurement."""
    import tvm_ffi

    return {
        "tvm": tvm.__version__,
        "tvm_ffi": tvm_ffi.__version__,
        "torch": backend.torch.__version__,
        "torch_cuda": str(backend.torch.version.cuda),
        "nvcc": compiler,
    }


def _smi(fields: tuple[str, ...]) -> list[str]:
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", "--id=0"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise NoGpu(f"nvidia-smi, which gives clocks and power, does not run here ({error})") from error
    return [value.strip() for value in text.strip().split(",")]
