"""A made-up GPU: kernels that numpy computes, races with given times, and sessions on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from support.cases import Outcome
from tensorir_ladder.harness import execution, large_k, roofline, session
from tensorir_ladder.harness.batches import Batch, stored_shapes
from tensorir_ladder.harness.build import Kernel
from tensorir_ladder.harness.execution import LlvmBackend, numpy_dtype
from tensorir_ladder.harness.machines import machine_for
from tensorir_ladder.harness.measure import Measurer
from tensorir_ladder.harness.race import RoundPlan, Rounds
from tensorir_ladder.harness.records import GpuState, Method, Timing
from tensorir_ladder.harness.session import Session
from tensorir_ladder.harness.verify import IEEE
from tensorir_ladder.kernels.codegen import toolchain
from tensorir_ladder.kernels.codegen.toolchain import Cubin
from tensorir_ladder.schedules.workloads import Matmul

Command = Callable[..., Outcome]


SHAPE = (64, 64, 64)


TIMES = {
    "step1": 8.0,
    "step2": 7.0,
    "step3": 4.0,
    "step4": 3.0,
    "step5": 2.0,
    "step6": 1.5,
    "step7": 1.25,
    "step8": 0.75,
    "step9": 0.5,
    "step10": 0.25,
    "cublas": 1.0,
    "cublas-nt": 1.2,
}


class FakeGpu:
    """Times by label, for tests to set; and what was raced, loaded and drawn, for them to look at."""

    def __init__(self) -> None:
        self.times: dict[str, float] = dict(TIMES)
        self.races: list[list[str]] = []
        self.besides: list[tuple[int, ...]] = []
        self.loaded: list[str] = []
        self.seeds: list[int] = []
        self.cublas_math: list[str] = []
        self.jitter: Callable[[str, int], float] = lambda label, number: 1.0
        self.before_race: Callable[[list[str]], None] = lambda labels: None
        self.corrupt: Callable[[str, np.ndarray], None] = lambda label, output: None

    def time_of(self, label: str) -> float:
        """The time of the longest name in the table that the label contains."""
        known = [name for name in self.times if name in label]
        return self.times[max(known, key=len)] if known else 2.5


class FakeBackend(LlvmBackend):
    """Numpy in the place of torch on a GPU."""

    name = "gpu"

    def __init__(self) -> None:
        self.torch = SimpleNamespace(
            __version__="0.0",
            version=SimpleNamespace(cuda="0.0"),
            cuda=SimpleNamespace(empty_cache=lambda: None, mem_get_info=lambda: (2**30, 2**31)),
            empty=lambda _count, dtype: SimpleNamespace(element_size=lambda: numpy_dtype(dtype).itemsize),
            float32="float32",
        )


class FakeArena:
    """Operands, and races with given times."""

    gpu: FakeGpu
    from_memory = 1.0

    def __init__(self, problem: Matmul, backend: FakeBackend, first_seed: int = 0) -> None:
        self.gpu.seeds.append(first_seed)
        self.problem, self.backend = problem, backend
        of_a, of_b, _ = stored_shapes(problem)
        a, b = backend.normal(0, of_a, problem.dtype), backend.normal(1, of_b, problem.dtype)
        self.sets = [(a, b, backend.reference(problem, a, b).astype(numpy_dtype(problem.out_dtype)))]

    def cublas(self, math: str = IEEE) -> tuple[Any, Any]:
        self.gpu.cublas_math.append(math)

        def multiply(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
            with np.errstate(invalid="ignore"):
                c[...] = self.backend.reference(self.problem, a, b).astype(c.dtype)

        return ("cublas-nn", multiply), ("cublas-nt", multiply)

    def baseline(self) -> tuple[Any, ...]:
        forms = self.cublas()
        return (("torch.bmm", forms[0][1]),) if isinstance(self.problem, Batch) else forms

    def graph(self, launch: Callable[..., Any]) -> None:
        launch(*self.sets[0])

    def race(self, contenders: list[Any], plan: RoundPlan, beside: tuple[int, ...] = ()) -> Rounds:
        labels = [label for label, _ in contenders]
        self.gpu.before_race(labels)
        self.gpu.races.append(labels)
        self.gpu.besides += [beside] if beside else []
        timings = tuple(Timing(label, self.samples(label, plan.rounds)) for label in labels)
        state = GpuState(1980.0, 3201.0, 200.0, 40.0)
        method = Method(plan.rounds, 1, 1, "standard normal", "cold", "none", plan.warmup_ms)
        return Rounds(timings, method, state, state)

    def samples(self, label: str, rounds: int) -> tuple[float, ...]:
        return tuple(self.gpu.time_of(label) * self.gpu.jitter(label, number) for number in range(rounds))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """A machine with a GPU, a compiler and a clean tree, all made up."""
    fake = FakeGpu()

    def executable(kernel: Kernel) -> dict[str, Any]:
        problem, backend = kernel.case.problem, LlvmBackend()
        fake.loaded.append(str(kernel.case))

        def run(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
            with np.errstate(invalid="ignore"):
                c[...] = backend.reference(problem, a, b).astype(c.dtype)
            fake.corrupt(str(kernel.case), c)

        return {"main": run}

    identity = {"gpu": "NVIDIA Fake", "gpu_uuid": "GPU-1", "driver": "1.0", "power_limit_w": 700.0}
    cubin = Cubin(b"\x7fELF", 40, 0, 0)
    monkeypatch.setattr(FakeArena, "gpu", fake, raising=False)
    monkeypatch.setattr(session, "Arena", FakeArena)
    monkeypatch.setattr(roofline, "max_clocks", lambda: (1980.0, 4900.0))
    monkeypatch.setattr(large_k, "LARGE_K", 1)  # every shape's own is as large: tests of it say another
    monkeypatch.setattr(session, "executable", executable)
    monkeypatch.setattr(session, "gpu_identity", lambda: identity)
    monkeypatch.setattr(session, "compiled", lambda kernel, _compiler: replace(kernel, cubin=cubin))
    monkeypatch.setattr(session, "git_state", lambda _root: ("abc123", False))
    monkeypatch.setattr(toolchain, "require_compiler", lambda: SimpleNamespace(version="13.0"))
    monkeypatch.setattr(toolchain, "find_compiler", lambda: None)
    monkeypatch.setattr(execution, "GpuBackend", FakeBackend)
    monkeypatch.setattr(execution, "gpu_present", lambda: True)
    monkeypatch.setattr(execution, "require_gpu", lambda: None)
    monkeypatch.setattr(execution, "gpu_arch", lambda: "sm_90a")
    monkeypatch.setattr(execution, "gpu_machine", lambda: machine_for("sm_90a"))
    return fake


def stop_at(race: int) -> Callable[[list[str]], None]:
    """Ctrl-C in the n-th race."""
    seen: list[int] = []

    def stop(_labels: list[str]) -> None:
        seen.append(1)
        if len(seen) == race:
            raise KeyboardInterrupt

    return stop


def interrupted(command: Command, *arguments: str) -> Outcome:
    """The outcome of a command that is interrupted; 130 where the interrupt came through."""
    try:
        return command(*arguments)
    except KeyboardInterrupt:
        return Outcome(130, "", "")


@pytest.fixture
def made(gpu: FakeGpu, tmp_path: Path) -> Session:
    """A session on the made-up GPU."""
    return Session(SimpleNamespace(version="13.0"), FakeBackend(), tmp_path, "a command")


@pytest.fixture
def measurer(made: Session) -> Measurer:
    """Measures steps on the made-up GPU."""
    return Measurer(made)
