"""Time any callables on the GPU in interleaved rounds, over operands that find the L2 cold."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tensorir_ladder.harness.environment import gpu_state
from tensorir_ladder.harness.execution import GpuBackend, device_properties
from tensorir_ladder.harness.records import GpuState, Method, Timing
from tensorir_ladder.schedules.errors import IllegalWorkload

MOST_SETS = 512  # small problems stay in the L2: their launches take no longer than the launch itself
DATA = "standard normal"


@dataclass(frozen=True)
class Plan:
    """Rounds to measure, and time to warm up until clocks settle."""

    rounds: int = 15
    warmup_ms: float = 250.0
    round_budget_ms: float = 150.0

    def rounds_for(self, round_ms: float) -> int:
        """Take fewer rounds where one takes long, never fewer than 7."""
        return self.rounds if round_ms <= self.round_budget_ms else max(7, self.rounds // 2)


# For choosing among many candidates; then, with more rounds, among the fastest few.
TUNING, FINAL = Plan(rounds=7, warmup_ms=20.0), Plan(rounds=9, warmup_ms=50.0)


@dataclass(frozen=True)
class Rounds:
    """Timings, one per contender in the order given, and how they were taken."""

    timings: tuple[Timing, ...]
    method: Method
    before: GpuState
    after: GpuState


Contender = tuple[str, Callable[..., Any]]


def sets_needed(set_bytes: int, l2_bytes: int) -> int:
    """Count the operand sets that together exceed the L2 twice over, as far as MOST_SETS go; two at least."""
    return min(MOST_SETS, max(2, -(-2 * l2_bytes // set_bytes)))


def require_room(torch: Any, nbytes: int) -> None:
    """Raise IllegalWorkload where the GPU has less memory free than that."""
    if nbytes > (free := torch.cuda.mem_get_info()[0]):
        raise IllegalWorkload(
            "operands and what checks them do not fit the GPU's memory",
            value=f"{nbytes / 2**30:.1f} GiB",
            limit=f"{free / 2**30:.1f} GiB free",
            remedy="give a smaller shape, or end what else runs on the GPU",
        )


class Racecourse:
    """Operand sets on the GPU, over which any callables that take one set's operands can be timed."""

    def __init__(self, backend: GpuBackend, sets: list[tuple[Any, ...]], set_bytes: int) -> None:
        self.backend, self.torch, self.sets = backend, backend.torch, sets
        self.cold = MOST_SETS * set_bytes >= 2 * device_properties(self.torch).L2_cache_size

    def graph(self, launch: Callable[..., Any]) -> Any:
        """Capture a CUDA graph with one launch per operand set, so that nothing of the host is timed."""
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
