"""Timelines that belong in one picture, and what they say in numbers: loads, waits, multiplications, epilogue."""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from tensorir_ladder.harness.records import Timeline
from tensorir_ladder.reports.cases import grouped, shape_label, slug
from tensorir_ladder.reports.cells import NOT_MEASURED, Table, number
from tensorir_ladder.reports.selection import LAYOUTS, Results

AT_ONCE_NS = 50  # a wait that is over at once takes less: some instructions, and the stamp itself
EPILOGUE = ("epilogue begins", "results stored")
ROUNDING = ("epilogue begins", "sums free")
BOX = ("box begins", "box stored")
FULL_WAIT = ("full wait begins", "full wait ends")
EMPTY_WAIT = ("empty wait begins", "empty wait ends")


@dataclass(frozen=True)
class Span:
    """Something that lasts, of one number (of a k tile, or of an output tile): begin and end in ns.

    Where the end was not ``seen`` at once, it was no later than that.
    """

    number: int
    begin: float
    end: float
    seen: bool = True


@dataclass(frozen=True)
class Lives:
    """One step's case, a timeline per stage count, fewest first."""

    timelines: tuple[Timeline, ...]

    @property
    def first(self) -> Timeline:
        """The timeline of the fewest stages, for what all have in common."""
        return self.timelines[0]

    @property
    def title(self) -> str:
        """Say in words what is shown, GPU first."""
        own = self.first
        layout = LAYOUTS.get(own.layout, own.layout)
        size = shape_label(own.shape) + "³" * (len(set(own.shape)) == 1)
        return f"{own.environment.gpu}, {size}, {own.dtype}, {layout}, tile {own.tile}"

    @property
    def slug(self) -> str:
        """Write what is drawn as part of a file name."""
        return slug(self.first.environment.gpu, self.first.dtype, self.first.layout)

    @property
    def kind(self) -> str:
        """The kind of its picture, as part of a file name."""
        own = self.first
        return f"step{own.step}-timeline-{own.variant}-{own.tile.replace('/', '_')}-{shape_label(own.shape)}"


def lives(results: Results, step: int | None = None) -> list[Lives]:
    """Return the timelines by case, those of one step if it is given."""
    groups = grouped((t for t in results.timelines if step in (None, t.step)), lambda timeline: timeline.family)
    return [Lives(tuple(sorted(group, key=lambda timeline: timeline.stages))) for group in groups.values()]


def spans(timeline: Timeline, role: str, events: tuple[str, str]) -> list[Span]:
    """Take the time from one event of a role to another, for every number that saw both."""
    begins, ends = (timeline.moments(role, event) for event in events)
    return [Span(number, begins[number], ends[number]) for number in begins if number in ends]


def consumers(timeline: Timeline) -> list[str]:
    """Return the roles that multiply."""
    return [role for role in timeline.roles if timeline.moments(role, "mma issued")]


def waiting_roles(timeline: Timeline) -> list[str]:
    """Return the roles that a picture has a row for: those that wait or multiply, rather than only issue."""
    kinds = (FULL_WAIT, EMPTY_WAIT, EPILOGUE)
    return [role for role in timeline.roles if any(spans(timeline, role, kind) for kind in kinds)]


def loads(timeline: Timeline) -> list[Span]:
    """Return each k tile from its load's issue until the first role sees it complete."""
    issued = _first_of(timeline, timeline.roles, "load issued")
    seen = _first_of(timeline, consumers(timeline), "full wait ends")
    return [Span(number, begin, seen[number]) for number, begin in issued.items() if number in seen]


def multiplications(timeline: Timeline, role: str) -> list[Span]:
    """Return each k tile's wgmma, from when its operands are there and the one before is done until it is done itself.

    Instructions of several k tiles are in flight, and run one after the other. A role that did not have to wait for
    one came late: then its end was not seen.
    """
    stamped = sorted(moment for track in timeline.tracks if track.role == role for moment in track.ns)
    found, free = [], 0.0
    for ready in spans(timeline, role, ("full wait ends", "mma retired")):
        asked = stamped[bisect.bisect_left(stamped, ready.end) - 1]
        found.append(Span(ready.number, max(ready.begin, free), ready.end, ready.end - asked > AT_ONCE_NS))
        free = ready.end
    return found


def lives_table(group: Lives) -> Table:
    """Make a row per stage count: where the block's time goes."""
    header = ("stages", "block µs", "until the first k tile µs", "k tile ns", "load ns", "wgmma ns", "wgmma under way")
    header += ("epilogue µs", "launch with stamps")
    note = "One block. Load: from issue until a warpgroup sees it, median; k tile: from one to the next, median; wgmma "
    note += "under way: share of the time from the first k tile's arrival to the last one's end, mean of the roles "
    note += "that multiply, at most (≤) where a role asked for the end of one too late to see it."
    return Table(f"Where the time goes: {group.title}", header, tuple(map(_row, group.timelines)), note)


def _row(timeline: Timeline) -> tuple[str, ...]:
    roles = consumers(timeline)
    products = [multiplications(timeline, role) for role in roles]
    periods = [after.end - before.end for own in products for before, after in pairwise(own)]
    epilogues = [span for role in roles for span in spans(timeline, role, EPILOGUE)]
    cost = 100 * (timeline.stamped.median_ms / timeline.plain.median_ms - 1)
    return (
        str(timeline.stages),
        f"{timeline.duration_ns / 1e3:.1f}",
        _median((own[0].begin / 1e3 for own in products if own), 2),
        _median(periods, 0),
        _median(_lengths(loads(timeline)), 0),
        _median(_lengths(span for own in products for span in own if span.seen), 0),
        _share(products),
        _median((length / 1e3 for length in _lengths(epilogues)), 2),
        f"{cost:+.1f} %",
    )


def _share(products: list[list[Span]]) -> str:
    shares = [sum(_lengths(own)) / (own[-1].end - own[0].begin) for own in products if own]
    least = "" if all(span.seen for own in products for span in own) else "≤ "
    return f"{least}{statistics.mean(shares):.0%}" if shares else NOT_MEASURED


def _median(values: Iterable[float], digits: int) -> str:
    found = list(values)
    return number(statistics.median(found) if found else None, f",.{digits}f")


def _lengths(found: Iterable[Span]) -> Iterator[float]:
    return (span.end - span.begin for span in found)


def _first_of(timeline: Timeline, roles: Iterable[str], event: str) -> dict[int, float]:
    """Find when the first of some roles saw an event, by number."""
    found: dict[int, float] = {}
    for role in roles:
        for k_tile, moment in timeline.moments(role, event).items():
            found[k_tile] = min(moment, found.get(k_tile, moment))
    return found
