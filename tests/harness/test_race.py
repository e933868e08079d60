"""Races: how many rounds and launches it takes until a ratio is known, with a clock of their own instead of a GPU."""

from __future__ import annotations

import contextlib
import random
import statistics
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tensorir_ladder.harness import race
from tensorir_ladder.harness.race import MEASURING, Racecourse, RoundPlan, Rounds
from tensorir_ladder.harness.records import GpuState, median_interval

NO_WARMUP = RoundPlan(warmup_ms=0.0)


class Clock:
    """Stands in for torch's CUDA and for the host's clock: launches take the time that they add to it."""

    def __init__(self) -> None:
        self.now_ms, self.captured = 0.0, None
        self.cuda = SimpleNamespace(
            Stream=object,
            stream=contextlib.nullcontext,
            synchronize=lambda: None,
            CUDAGraph=lambda: self.Graph(self),
            graph=self.capture,
            Event=lambda enable_timing: self.Event(self),
            current_device=lambda: 0,
            get_device_properties=lambda _device: SimpleNamespace(L2_cache_size=60 * 2**20),
        )

    class Graph:
        def __init__(self, clock: Clock) -> None:
            self.clock, self.launches = clock, []

        def replay(self) -> None:
            self.clock.now_ms += sum(take() for take in self.launches)

    class Event:
        def __init__(self, clock: Clock) -> None:
            self.clock = clock

        def record(self) -> None:
            self.at = self.clock.now_ms

        def elapsed_time(self, end: Any) -> float:
            return end.at - self.at

    @contextlib.contextmanager
    def capture(self, graph: Graph, capture_error_mode: str) -> Any:
        self.captured = graph
        yield
        self.captured = None

    def launch(self, take: Callable[[], float]) -> Callable[[Any], None]:
        """Make a launch that takes what ``take`` says each time it runs."""
        return lambda _operands: self.captured.launches.append(take) if self.captured else None


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(race.time, "perf_counter", lambda: made.now_ms / 1e3)
    monkeypatch.setattr(race, "gpu_state", lambda: GpuState(1980.0, 2619.0, 300.0, 40.0))
    return made


def run(clock: Clock, plan: RoundPlan, *takes: Callable[[], float], sets: int = 2) -> Rounds:
    """Race launches; the first is ours, the next two are cuBLAS's."""
    course = Racecourse(SimpleNamespace(torch=clock), [(number,) for number in range(sets)], 2**20)
    return course.race([(str(place), clock.launch(take)) for place, take in enumerate(takes)], plan, beside=(1, 2))


def noisy(mean_ms: float, spread: float, seed: int) -> Callable[[], float]:
    """A launch whose time scatters evenly about its mean, ``spread`` of it to either side."""
    draws = random.Random(seed)
    return lambda: mean_ms * (1 + spread * draws.uniform(-1, 1))


def steady(mean_ms: float) -> Callable[[], float]:
    return lambda: mean_ms


def half_width(rounds: Rounds) -> float:
    """How far the interval of our ratio reaches to either side, in parts of it."""
    own, *cublas = rounds.timings
    ratios = own.ratios_to(min(cublas[:2], key=lambda timing: timing.median_ms))
    low, high = median_interval(ratios)
    return (high - low) / 2 / statistics.median(ratios)


def test_steady_times_are_known_after_the_fewest_rounds(clock: Clock) -> None:
    rounds = run(clock, MEASURING, steady(1.0), steady(2.0), steady(3.0))
    assert rounds.method.rounds == MEASURING.rounds == len(rounds.timings[0].samples_ms)


def test_rounds_go_on_until_the_ratio_is_known(clock: Clock) -> None:
    plan = RoundPlan(warmup_ms=0.0, half_width=0.01, most_rounds=400, budget_ms=1e9)
    noise = (noisy(1.0, 0.05, 1), noisy(1.0, 0.05, 2), noisy(1.5, 0.05, 3))
    fixed = run(clock, NO_WARMUP, *noise)
    assert half_width(fixed) > 0.01
    rounds = run(clock, plan, *noise)
    assert half_width(rounds) <= 0.01
    assert NO_WARMUP.rounds < rounds.method.rounds < plan.most_rounds


@pytest.mark.parametrize(("most_rounds", "budget_ms"), [(22, 1e9), (10**6, 300.0)])
def test_what_stays_unknown_stops_at_its_budget(clock: Clock, most_rounds: int, budget_ms: float) -> None:
    plan = RoundPlan(warmup_ms=0.0, half_width=1e-6, most_rounds=most_rounds, budget_ms=budget_ms)
    rounds = run(clock, plan, *(noisy(1.0, 0.3, seed) for seed in range(3)))
    assert NO_WARMUP.rounds < rounds.method.rounds <= min(most_rounds, 1 + budget_ms / 3)
    assert clock.now_ms < 2 * budget_ms


def test_peers_need_not_be_known_as_precisely(clock: Clock) -> None:
    plan = RoundPlan(warmup_ms=0.0, half_width=0.01)
    rounds = run(clock, plan, steady(1.0), steady(1.0), steady(1.0), noisy(1.0, 0.9, 7))
    assert rounds.method.rounds == plan.rounds


def test_short_launches_are_repeated_until_a_sample_is_long(clock: Clock) -> None:
    plan = RoundPlan(warmup_ms=0.0, sample_ms=4.0)
    rounds = run(clock, plan, steady(0.2), steady(0.25), steady(0.3))
    assert rounds.method.launches_per_round == 20  # ten times through two sets
    assert rounds.method.operand_sets == 2
    assert [timing.median_ms for timing in rounds.timings] == pytest.approx([0.2, 0.25, 0.3])


def test_a_slow_contender_limits_the_repeats(clock: Clock) -> None:
    plan = RoundPlan(warmup_ms=0.0, sample_ms=4.0)
    assert plan.repeats_for([0.4, 0.5, 40.0]) == 3
    assert plan.repeats_for([0.4, 0.5, 400.0]) == 1
    rounds = run(clock, plan, steady(0.2), steady(0.2), steady(100.0))
    assert (rounds.method.launches_per_round, rounds.method.rounds) == (2, 7)
