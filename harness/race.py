"""Time any callables on the GPU in interleaved rounds, over operands that find the L2 cold."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tensorir_ladder.harness.environment import gpu_state
from tensorir_ladder.harness.execution import GpuBackend, device_properties
from tensorir_ladder.harness.records import GpuState, Method, Timing, median_interval
from tensorir_ladder.harness.records.intervals import paired_ratios
from tensorir_ladder.schedules.errors import IllegalWorkload

MOST_SETS = 512  # small problems stay in the L2: their launches take no longer than the launch itself
DATA = "standard normal"
DIGITS = 7  # of a sample that are kept: events tell half a microsecond apart, of all launches between them


@dataclass(frozen=True)
class RoundPlan:
    """Rounds to measure, and time to warm up until clocks settle.

    ``sample_ms``: launches are repeated until every contender's part of a round takes so long, as far as a round of
    ``round_budget_ms`` has room for it. ``half_width``: rounds go on until the 95 % intervals of the ratios to cuBLAS
    reach no farther to either side, in parts of the ratio, or until ``most_rounds`` or ``budget_ms`` are spent; None
    for ``rounds`` alone.
    """

    rounds: int = 15
    warmup_ms: float = 250.0
    round_budget_ms: float = 150.0
    sample_ms: float = 0.0
    half_width: float | None = None
    most_rounds: int = 60
    budget_ms: float = 1000.0

    def rounds_for(self, round_ms: float) -> int:
        """Take fewer rounds where one takes long, never fewer than 7."""
        return self.rounds if round_ms <= self.round_budget_ms else max(7, self.rounds // 2)

    def repeats_for(self, times_ms: Sequence[float]) -> int:
        """Say how often contenders go through the operand sets in a round, given what once takes each of them."""
        wanted, room = math.ceil(self.sample_ms / min(times_ms)), int(self.round_budget_ms / sum(times_ms))
        return max(1, min(wanted, room))


# For what is recorded: a speed is called faster than cuBLAS's by its interval.
MEASURING = RoundPlan(sample_ms=4.0, half_width=0.005)
# For choosing among many candidates; then, with more rounds, among the fastest few.
TUNING, FINAL = RoundPlan(rounds=7, warmup_ms=20.0), RoundPlan(rounds=9, warmup_ms=50.0)


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

    CAPTURE = "global"  # no thread may allocate while a graph is captured

    def __init__(self, backend: GpuBackend, sets: list[tuple[Any, ...]], set_bytes: int) -> None:
        self.backend, self.torch, self.sets = backend, backend.torch, sets
        l2_bytes = device_properties(self.torch).L2_cache_size
        self.cold = MOST_SETS * set_bytes >= 2 * l2_bytes
        # The part of the operands that a round cannot find in the L2, in whatever order that forgets.
        self.from_memory = max(0.0, 1 - l2_bytes / (len(sets) * set_bytes))

    def graph(self, launch: Callable[..., Any], repeats: int = 1) -> Any:
        """Capture a CUDA graph with ``repeats`` launches per operand set, so that nothing of the host is timed."""
        stream = self.torch.cuda.Stream()
        with self.torch.cuda.stream(stream):
            # Twice, since a capture must not allocate: TVM's virtual machine keeps a call's output until the next has
            # its own, and takes both from what calls before gave back.
            for _ in range(2):
                launch(*self.sets[0])
        self.torch.cuda.synchronize()
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph, capture_error_mode=self.CAPTURE):
            for _ in range(repeats):
                for operands in self.sets:
                    launch(*operands)
        return graph

    def race(self, contenders: list[Contender], plan: RoundPlan, beside: Sequence[int] = ()) -> Rounds:
        """Time contenders in interleaved rounds, each round in another order, the GPU never idle inside one.

        ``beside``: the places of cuBLAS's forms among the contenders. Rounds go on until the contenders before these
        are known as precisely beside the faster of them as ``plan`` asks.
        """
        graphs = [self.graph(launch) for _, launch in contenders]
        times = self._warmed_up(graphs, plan.warmup_ms)
        if (repeats := plan.repeats_for(times)) > 1:
            graphs = [self.graph(launch, repeats) for _, launch in contenders]
        before, rounds = gpu_state(), plan.rounds_for(repeats * sum(times))
        graphs[0].replay()  # fills the gap that reading the state left
        samples: list[list[float]] = [[] for _ in contenders]
        begun, number = time.perf_counter(), 0
        while number < rounds or self._goes_on(samples, plan, beside, begun):
            for index, taken_ms in self._round(graphs, first=number).items():
                samples[index].append(float(f"{taken_ms / (repeats * len(self.sets)):.{DIGITS}g}"))
            number += 1
        timings = tuple(Timing(label, tuple(times)) for (label, _), times in zip(contenders, samples))
        method = Method(
            rounds=number,
            launches_per_round=repeats * len(self.sets),
            operand_sets=len(self.sets),
            data=DATA,
            cache="cold: operand sets rotate, together over twice the L2" if self.cold else "warm: operands fit the L2",
            launch="CUDA graph, device events around it",
            warmup_ms=plan.warmup_ms,
        )
        return Rounds(timings, method, before, gpu_state())

    def _warmed_up(self, graphs: list[Any], warmup_ms: float) -> list[float]:
        """Replay graphs in turn until clocks have settled; return the milliseconds of the last replay of each."""
        begun, times = time.perf_counter(), {}
        while not times or (time.perf_counter() - begun) * 1e3 < warmup_ms:
            times = self._round(graphs)
        return [times[index] for index in range(len(graphs))]

    @staticmethod
    def _goes_on(samples: list[list[float]], plan: RoundPlan, beside: Sequence[int], begun: float) -> bool:
        """Tell if more rounds are wanted after the fewest, and there is time for them."""
        spent = len(samples[0]) >= plan.most_rounds or (time.perf_counter() - begun) * 1e3 >= plan.budget_ms
        if spent or plan.half_width is None or not beside:
            return False
        cublas = min((samples[index] for index in beside), key=statistics.median)
        ratios = [paired_ratios(cublas, own) for own in samples[: min(beside)]]
        return any(_half_width(of_rounds) > plan.half_width for of_rounds in ratios)

    def _round(self, graphs: list[Any], first: int = 0) -> dict[int, float]:
        """Replay each graph once, the ``first`` one first; return the milliseconds that each took, by place."""
        order = [(first + place) % len(graphs) for place in range(len(graphs))]
        events = {index: self.timed(graphs[index]) for index in order}
        self.torch.cuda.synchronize()
        return {index: start.elapsed_time(end) for index, (start, end) in events.items()}

    def timed(self, graph: Any) -> tuple[Any, Any]:
        """Replay a graph between two device events; returns these without waiting for them."""
        start, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        return start, end


def _half_width(ratios: Sequence[float]) -> float:
    """Return how far a median's interval reaches to either side, in parts of the median."""
    low, high = median_interval(ratios)
    return (high - low) / (2 * statistics.median(ratios))
