"""Read the energy that contenders draw, each launched without pause, from the GPU's own counter.

A race (:mod:`harness.race`) changes contenders every few milliseconds, too soon for a counter of energy, and for what
holds the clock: here each runs alone, until power and clock are its own.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tensorir_ladder.harness.environment import NoEnergyCounter, energy_counter, gpu_state
from tensorir_ladder.harness.race import Contender, Racecourse
from tensorir_ladder.harness.records import Energy, EnergyTurn

# Seconds: of a turn, of the same load in front of it, of one replay, of replays that wait on the GPU meanwhile (what is
# asked of NVML takes milliseconds), between two looks at the counter, and after which it stands still.
TURN_S, SETTLE_S, REPLAY_S, AHEAD_S, LOOK_S, STILL_S = 1.0, 0.5, 0.01, 0.1, 0.001, 2.0


def measure_energy(course: Racecourse, contenders: Sequence[Contender], turns: int) -> tuple[Energy, ...]:
    """Launch each contender for ``turns`` turns of a second, in turns, each time begun by another; one Energy each.

    The counter, in millijoules, is refreshed every 20 to 100 ms on data-center GPUs. So a turn begins and ends with a
    refresh, a second or more apart, under a load that began half a second before and ends after it: watts are the
    joules counted between the two over the time between them, good to a look at the counter, a millisecond. One
    launch's time is that of device events over all launches between, counted; its joules are watts times that time.
    The SM clock is read at every refresh. NoEnergyCounter where the GPU has no such counter, or it stands still.
    """
    joules = energy_counter()
    runners = [_Runner(course, launch) for _, launch in contenders]
    taken: list[list[EnergyTurn]] = [[] for _ in contenders]
    for number in range(turns):
        for place in range(len(contenders)):
            index = (number + place) % len(contenders)
            taken[index].append(runners[index].turn(joules))
    return tuple(Energy(label, tuple(own)) for (label, _), own in zip(contenders, taken))


class _Mark(NamedTuple):
    """A refresh of the counter: when it was seen, the joules, and the replay that was the last to end before."""

    at_s: float
    joules: float
    replays: int
    ended: Any


class _Runner:
    """One contender as a graph of some 10 ms, so many of which wait on the GPU that it never idles."""

    def __init__(self, course: Racecourse, launch: Callable[..., Any]) -> None:
        self._course = course
        once_s = self._seconds(course.graph(launch))
        repeats = math.ceil(REPLAY_S / once_s)
        self._graph, self._launches = course.graph(launch, repeats), repeats * len(course.sets)
        self._ahead = max(2, math.ceil(AHEAD_S / (repeats * once_s)))

    def _seconds(self, graph: Any) -> float:
        for _ in range(2):  # the first uploads it
            start, end = self._course.timed(graph)
        self._course.torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3

    def turn(self, joules: Callable[[], float]) -> EnergyTurn:
        """Run until two refreshes of the counter lie a turn apart; wait until the GPU has nothing more to do."""
        running: deque[Any] = deque()
        begun = changed = time.perf_counter()
        known, replays, ended = joules(), 0, None
        first = last = None
        states = []
        while not (first and last.at_s - first.at_s >= TURN_S and last.replays > first.replays):
            while running and running[0].query():
                ended, replays = running.popleft(), replays + 1
            while len(running) < self._ahead:
                running.append(self._course.timed(self._graph)[1])
            found, now = joules(), time.perf_counter()
            if found == known:
                if now - changed > STILL_S:
                    raise NoEnergyCounter(f"the GPU's energy counter stands still at {found} J; leave out --energy")
                time.sleep(LOOK_S)
                continue
            known, changed = found, now
            if ended is not None and now - begun >= SETTLE_S:
                last = _Mark(now, found, replays, ended)
                first = first or last
                states.append(gpu_state())
        self._course.torch.cuda.synchronize()
        launches = (last.replays - first.replays) * self._launches
        return EnergyTurn(
            watts=(last.joules - first.joules) / (last.at_s - first.at_s),
            us=first.ended.elapsed_time(last.ended) * 1e3 / launches,
            launches=launches,
            sm_clock_mhz=statistics.median(state.sm_clock_mhz for state in states),
            temperature_c=statistics.median(state.temperature_c for state in states),
        )
