"""One GPU's server: TVM's RPC server with two functions more, which a tracker knows by a key.

TVM starts a process for each session by forking. So this process may import torch, but not touch the GPU, which a
session does.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import tvm
import tvm_ffi

from tensorir_ladder.harness import execution
from tensorir_ladder.harness.environment import ROOT, gpu_identity, host_cpu, sources_digest, versions
from tensorir_ladder.harness.execution import Backend, LlvmBackend, guarded
from tensorir_ladder.harness.fleet.messages import IDENTITY, MEASURE, PREPARE, Answer, Identity, Module, Request
from tensorir_ladder.harness.fleet.processes import end_group
from tensorir_ladder.harness.race import Contender, RoundPlan, Rounds
from tensorir_ladder.harness.records import GpuState, Method, Timing, decode
from tensorir_ladder.harness.roofline import ImpossibleTime, product_roofline
from tensorir_ladder.harness.verify import Trial, WrongResult, draw_seeds, matmul_trial, verify_launch
from tensorir_ladder.schedules.workloads import Matmul

PORTS = (9200, 9999)
LLVM_VERSIONS = {"tvm": tvm.__version__, "numpy": np.__version__}
TRIALS = 3  # of a module: normal data, whole numbers, special values
NOTHING = GpuState(0.0, 0.0, 0.0, 0.0)  # of a CPU: no clocks, no power


def start_server(place: str, host: str, tracker: tuple[str, int], key: str, address: str | None) -> int:
    """Serve in this process until it ends; return the port. ``address``: where others reach it, if not at ``host``."""
    import multiprocessing

    from tvm.rpc.server import PopenRPCServerState

    multiprocessing.set_start_method("fork", force=True)  # TVM's: a session takes over this process's functions
    tvm_ffi.register_global_func(IDENTITY, functools.partial(_identity, place), override=True)
    tvm_ffi.register_global_func(PREPARE, lambda: _place(place).prepare(), override=True)
    tvm_ffi.register_global_func(MEASURE, functools.partial(_measure, place), override=True)
    # An address that is reused may be bound by two that start at once, of which one cannot listen then.
    told = {"tracker_addr": tracker, "key": key, "custom_addr": address, "silent": True, "reuse_addr": False}
    state = PopenRPCServerState(host, *PORTS, **told)
    PopenRPCServerState.current = state
    threading.Thread(target=end_after, args=(state.thread,), daemon=True).start()
    return state.port


def end_after(thread: threading.Thread) -> None:
    """End this process when a thread of TVM's has ended: it cannot be started again, and another process can."""
    # TVM's server stops listening when a session has crashed, and stays as it is: who watches it starts another.
    thread.join()
    end_group(os.getpid())


class Place:
    """Run a session's modules: operands of the product at hand, modules loaded, and which of them were right.

    Trials of the product are kept for its next module, as far as there is room: what they must give is computed in
    float64, which takes longer than to run a module.
    """

    def __init__(self, backend: Any, identity: Identity) -> None:
        self.backend, self.identity = backend, identity
        self._arena: dict[tuple[Matmul, int], Any] = {}
        self._loaded: dict[str, Callable[..., Any]] = {}
        self._right: set[str] = set()
        self._trials: dict[tuple[int, str, str], Trial] = {}
        self._seeds: tuple[int, ...] = ()
        self.checking_s = 0.0  # of the last measurement

    def measure(self, request: Request) -> Rounds:
        """Check and time what is asked for; WrongResult names a module that is not right."""
        arena = self._arena_of(request)
        begun = time.perf_counter()
        for check in request.also:
            self._check(check.module, check.problem, request)
        for module in request.modules:
            self._check(module, request.problem, request)
        self.checking_s = time.perf_counter() - begun
        contenders: list[Contender] = [(module.label, self._run(module)) for module in request.modules]
        rounds = arena.race([*contenders, *arena.cublas(request.math)], request.plan)
        self._hold(request, arena, rounds)
        return rounds

    def _check(self, module: Module, problem: Matmul, request: Request) -> None:
        if module.file in self._right:
            return
        draw = self._trial if problem == request.problem else matmul_trial
        kept, run = bool(self._trials), self._run(module)
        try:
            verify_launch(run, problem, self.backend, module.label, self._seeds, request.math, draw)
        except WrongResult as error:
            self._trials.clear()
            if draw == matmul_trial or not kept:
                raise WrongModule(module.label, str(error)) from error
            self._check(module, problem, request)  # once more: another module may have written to what was kept
        self._right.add(module.file)

    def _trial(self, problem: Matmul, backend: Backend, seed: int, data: str, math: str) -> Trial:
        """Draw a trial of the product at hand, once."""
        wanted = seed, data, math
        if wanted in self._trials:
            return self._trials[wanted]
        trial = matmul_trial(problem, backend, seed, data, math)
        arrays = *trial.operands.values(), trial.reference, trial.limit
        if TRIALS * sum(array.nbytes for array in arrays) <= self._room():
            self._trials[wanted] = trial
        return trial

    def _room(self) -> int:
        """Return the bytes that kept trials may take."""
        return 2**30

    def _run(self, module: Module) -> Callable[..., Any]:
        if module.file not in self._loaded:
            function = tvm.runtime.load_module(str(Path(module.file).resolve()))["main"]
            memory = [self._memory(shape, dtype) for shape, dtype in module.workspaces]
            self._loaded[module.file] = self._adapted(lambda *arrays: function(*arrays, *memory))
        return self._loaded[module.file]

    def _arena_of(self, request: Request) -> Any:
        wanted = request.problem, request.first_seed
        if wanted not in self._arena:
            if all(problem != request.problem for problem, _ in self._arena):
                self._loaded.clear()  # modules, and with them the GPU's memory that is theirs
                self._right.clear()
                self._trials.clear()
                self._seeds = draw_seeds(request.seed, 1)
            self._arena.clear()
            self._arena[wanted] = self._new_arena(*wanted)
        return self._arena[wanted]

    def prepare(self) -> bool:
        """Begin what a first measurement would wait for."""
        return True

    def _new_arena(self, problem: Matmul, first_seed: int) -> Any:
        raise NotImplementedError

    def _memory(self, shape: tuple[int, ...], dtype: str) -> Any:
        raise NotImplementedError

    def _adapted(self, run: Callable[..., Any]) -> Callable[..., Any]:
        return run

    def _hold(self, request: Request, arena: Any, rounds: Rounds) -> None:
        """Raise ImpossibleTime for what cannot have done the work."""


class WrongModule(WrongResult):
    """A module whose output is not the product, by its label."""

    def __init__(self, label: str, why: str) -> None:
        super().__init__(why)
        self.label = label


class GpuPlace(Place):
    """The GPU that CUDA_VISIBLE_DEVICES leaves, by torch."""

    def __init__(self) -> None:
        backend = execution.GpuBackend()
        known = gpu_identity()
        made_by = {name: text for name, text in versions(backend, "").items() if text}
        sources = sources_digest(ROOT)
        super().__init__(backend, Identity(**known, arch=execution.gpu_arch(), versions=made_by, sources=sources))

    def prepare(self) -> bool:
        """Load cuBLAS and what checks outputs."""
        torch = self.backend.torch
        for dtype in (torch.float16, torch.float64):
            square = torch.ones((256, 256), device="cuda", dtype=dtype)
            torch.mm(square, square)
        torch.cuda.synchronize()
        return True

    def _room(self) -> int:
        return int(self.backend.torch.cuda.mem_get_info()[0]) // 4

    def _new_arena(self, problem: Matmul, first_seed: int) -> Any:
        from tensorir_ladder.harness.cublas import Arena

        self.backend.torch.cuda.empty_cache()
        return Arena(problem, self.backend, first_seed)

    def _memory(self, shape: tuple[int, ...], dtype: str) -> Any:
        return tvm.runtime.tensor(np.zeros(shape, dtype), tvm.cuda())  # zeros, which flags begin as

    def _hold(self, request: Request, arena: Any, rounds: Rounds) -> None:
        roofline = product_roofline(execution.gpu_machine(), request.problem, request.math, arena.from_memory)
        for timing in rounds.timings:
            try:
                roofline.check(timing)
            except ImpossibleTime as error:
                raise WrongModule(timing.label, str(error)) from error


class LlvmPlace(Place):
    """The CPU, through LLVM: for trying a fleet where there is no GPU. numpy stands in for cuBLAS."""

    def __init__(self) -> None:
        cpu = f"LLVM on {host_cpu()}"[:80]
        uuid = f"CPU-{os.uname().nodename}-{os.environ.get('LADDER_DEVICE', '0')}"
        super().__init__(LlvmBackend(), Identity(cpu, uuid, "none", 0.0, 0, "", LLVM_VERSIONS, sources_digest(ROOT)))

    def _new_arena(self, problem: Matmul, first_seed: int) -> CpuArena:
        return CpuArena(problem, self.backend, first_seed)

    def _memory(self, shape: tuple[int, ...], dtype: str) -> Any:
        return tvm.runtime.tensor(np.zeros(shape, dtype))

    def _adapted(self, run: Callable[..., Any]) -> Callable[..., Any]:
        return guarded(run)  # TVM takes bfloat16 of its own tensors only, and memory that is aligned


class CpuArena:
    """Operands of one product in the host's memory, and rounds by the host's clock."""

    def __init__(self, problem: Matmul, backend: LlvmBackend, first_seed: int) -> None:
        a = backend.normal(2 * first_seed, (problem.m, problem.k), problem.dtype)
        b = backend.normal(2 * first_seed + 1, problem.b_shape, problem.dtype)
        self.operands = a, b, backend.poisoned((problem.m, problem.n), problem.out_dtype)
        self.problem = problem

    def cublas(self, _math: str) -> tuple[Contender, Contender]:
        """Return numpy's product with B as stored, and transposed in memory."""
        b = self.operands[1] if self.problem.layout == "nn" else self.operands[1].T
        other = np.asfortranarray(b) if self.problem.layout == "nn" else np.ascontiguousarray(b)

        def multiply(right: np.ndarray) -> Callable[..., Any]:
            return lambda a, _, c: np.copyto(c, np.matmul(a, right).astype(c.dtype))

        return ("numpy", multiply(b)), ("numpy, B turned", multiply(other))

    def race(self, contenders: list[Contender], plan: RoundPlan) -> Rounds:
        """Time contenders in interleaved rounds, each round in another order; see :class:`harness.race.Racecourse`."""
        for _, run in contenders:
            run(*self.operands)
        samples: list[list[float]] = [[] for _ in contenders]
        for number in range(plan.rounds):
            for place in range(len(contenders)):
                index = (number + place) % len(contenders)
                begun = time.perf_counter()
                contenders[index][1](*self.operands)
                samples[index].append((time.perf_counter() - begun) * 1e3)
        timings = tuple(Timing(label, tuple(times)) for (label, _), times in zip(contenders, samples))
        method = Method(plan.rounds, 1, 1, "standard normal", "warm", "host call, host clock", 0.0)
        return Rounds(timings, method, NOTHING, NOTHING)


@functools.cache
def _place(name: str) -> Place:
    return GpuPlace() if name == "gpu" else LlvmPlace()


def _identity(place: str) -> str:
    try:
        return msgspec.json.encode(_place(place).identity).decode()
    except Exception as error:  # noqa: BLE001 - the driver is told, whatever it is
        return msgspec.json.encode({"error": f"{type(error).__name__}: {error}"}).decode()


def _measure(place: str, text: str) -> str:
    """Answer a request, as JSON; what a module does wrong, and what else goes wrong, is an answer as well."""
    begun = time.perf_counter()
    request = decode(text, Request, "a request")
    here = _place(place)
    try:
        rounds = here.measure(request)
    except WrongModule as error:
        answer = Answer("wrong", here.identity, str(error), error.label)
    except Exception as error:  # noqa: BLE001 - the driver is told, whatever it is
        answer = Answer("failed", here.identity, f"{type(error).__name__}: {error}"[:500])
    else:
        took = time.perf_counter() - begun
        state = {"before": rounds.before, "after": rounds.after}
        answer = Answer(
            "timed",
            here.identity,
            timings=rounds.timings,
            method=rounds.method,
            took_s=took,
            checking_s=here.checking_s,
            **state,
        )
    return msgspec.json.encode(asdict(answer)).decode()
