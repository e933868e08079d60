"""Take one block's timeline: build a kernel with time stamps, check it, run it, and read what its roles left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tensorir_ladder.harness.build import Case, compiled, executable, lower
from tensorir_ladder.harness.cublas import Arena
from tensorir_ladder.harness.race import Rounds
from tensorir_ladder.harness.records import Timeline, Track, Verification
from tensorir_ladder.harness.session import Session
from tensorir_ladder.harness.verify import draw_seeds, verify
from tensorir_ladder.schedules.stamps import EVENTS, HEADER, Stamps

RUNS = 5  # of which the one with the median duration is kept


class NoTimeline(ValueError):
    """Stamps that tell no timeline, or a block that is not there; the message says which."""


@dataclass(frozen=True)
class Life:
    """One launch as its stamps tell it: the block's duration, its multiprocessor, and each role's events."""

    duration_ns: float
    multiprocessor: int
    tracks: tuple[Track, ...]


def ns_per_clock(launches: Sequence[Sequence[int]]) -> float:
    """Compute how long a clock of the multiprocessor lasted, by several launches; NoTimeline for unfinished ones.

    ``%globaltimer`` may tick once a microsecond only: over all launches together that is a small part.
    """
    headers = [dict(zip(HEADER, words)) for words in launches]
    passed = {unit: [h[f"end {unit}"] - h[f"begin {unit}"] for h in headers] for unit in ("ns", "clock")}
    if not all(header["begin ns"] for header in headers) or min(*passed["ns"], *passed["clock"]) <= 0:
        raise NoTimeline(
            f"the stamped blocks took {passed['clock']} clocks in {passed['ns']} ns: not all ran to an end"
        )
    return sum(passed["ns"]) / sum(passed["clock"])


def decode(words: Sequence[int], roles: Sequence[str], room: int, clock_ns: float) -> Life:
    """Read the words that a stamped kernel left, zeros where it left none; NoTimeline where numbers are missing."""
    header, tracks = dict(zip(HEADER, words)), []
    for row, (role, event) in enumerate((role, event) for role in roles for event in EVENTS):
        begin = len(HEADER) + row * room
        stamped = {number: clock for number, clock in enumerate(words[begin : begin + room]) if clock}
        if stamped:
            tracks.append(_track(role, event, stamped, header["begin clock"], clock_ns))
    duration_ns = round((header["end clock"] - header["begin clock"]) * clock_ns, 1)
    return Life(duration_ns, header["multiprocessor"], tuple(tracks))


def _track(role: str, event: str, stamped: dict[int, int], begin: int, clock_ns: float) -> Track:
    first, last = min(stamped), max(stamped)
    if len(stamped) != last - first + 1:
        raise NoTimeline(f"{role}: {event} has no stamp between the first number, {first}, and the last, {last}")
    return Track(role, event, first, tuple(round((clock - begin) * clock_ns, 1) for clock in stamped.values()))


class StampedKernel:
    """A case built with stamps, as a callable that takes the problem's arrays and leaves its stamps in ``words``."""

    def __init__(self, session: Session, case: Case, stamps: Stamps) -> None:
        torch = session.backend.torch
        self.stamps, self.kernel = stamps, compiled(lower(case, stamps), session.compiler)
        self.roles = self.kernel.roles
        self.words = torch.zeros(stamps.words(len(self.roles)), dtype=torch.int64, device="cuda")
        self._launch = executable(self.kernel)["main"]

    def __call__(self, a: Any, b: Any, c: Any) -> None:
        self._launch(a, b, c, self.words)

    def launches(self, arena: Arena, before: Callable[..., Any]) -> list[list[int]]:
        """Return the words of RUNS launches, each right behind one of ``before``, so that the GPU is not idle."""
        found = []
        for run in range(RUNS):
            self.words.zero_()
            before(*arena.sets[2 * run % len(arena.sets)])
            self(*arena.sets[(2 * run + 1) % len(arena.sets)])
            found.append(self.words.cpu().tolist())
        return found


def take(session: Session, case: Case, block: int | None = None) -> Timeline:
    """Build a case with stamps of one block (the grid's middle one), check it, run it, and keep the median run.

    Timed beside the kernel without stamps first, which also warms the GPU up. Raises what building and verifying
    raise, and NoTimeline for a block beyond the grid.
    """
    session.check(case)
    plain_kernel, plain = session.load(case)
    stamps = Stamps(plain_kernel.blocks // 2 if block is None else block)
    if not 0 <= stamps.block < plain_kernel.blocks:
        raise NoTimeline(f"--block {stamps.block}: {case} has {plain_kernel.blocks} blocks, from 0 on")
    stamped = StampedKernel(session, case, stamps)
    checked = verify(stamped.kernel, session.backend, draw_seeds(session.seed), stamped)
    arena, contenders = session.arena(case.problem), [(str(case), plain), (f"{case} stamped", stamped)]
    rounds = session.race(case, contenders, session.plan)
    return _timeline(session, stamped, checked, rounds, stamped.launches(arena, plain))


def _timeline(
    session: Session, stamped: StampedKernel, checked: Verification, rounds: Rounds, launches: list[list[int]]
) -> Timeline:
    case, kernel = stamped.kernel.case, stamped.kernel
    clock_ns = ns_per_clock(launches)
    lives = [decode(words, stamped.roles, stamped.stamps.room, clock_ns) for words in launches]
    kept = sorted(range(RUNS), key=lambda run: lives[run].duration_ns)[RUNS // 2]
    return Timeline(
        **case.named,
        **asdict(case.problem),
        block=stamped.stamps.block,
        blocks=kernel.blocks,
        multiprocessor=lives[kept].multiprocessor,
        room=stamped.stamps.room,
        clock_mhz=round(1e3 / clock_ns, 1),
        durations_ns=tuple(life.duration_ns for life in lives),
        kept=kept,
        tracks=lives[kept].tracks,
        plain=rounds.timings[0],
        stamped=rounds.timings[1],
        verification=checked,
        **session.provenance(kernel, rounds),
    )
