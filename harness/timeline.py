"""One block's life: a kernel built with time stamps, checked, run, and what its roles left made a record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from harness.build import Case, compiled, executable, lower
from harness.measure import Arena, Rounds
from harness.records import Timeline, Track, Verification
from harness.session import Session
from harness.verify import verify
from kernels.stamps import EVENTS, HEADER, Stamps, roles_of

RUNS = 5  # of which the one with the median duration is kept


class NoTimeline(ValueError):
    """Stamps that tell no timeline, or a block that is not there; the message says which."""


@dataclass(frozen=True)
class Life:
    """What the words of one launch tell: the block's duration, its multiprocessor and its clock, each role's events."""

    duration_ns: float
    clock_mhz: float
    multiprocessor: int
    tracks: tuple[Track, ...]


def decode(words: Sequence[int], roles: Sequence[str], room: int) -> Life:
    """Read the words that a stamped kernel left, zeros where it left none; NoTimeline where they make no sense."""
    header = dict(zip(HEADER, words))
    duration_ns = header["end ns"] - header["begin ns"]
    clocks = header["end clock"] - header["begin clock"]
    if not header["begin ns"] or duration_ns <= 0 or clocks <= 0:
        raise NoTimeline(f"the stamped block took {clocks} clocks in {duration_ns} ns: it did not run to its end")
    tracks = []
    for row, (role, event) in enumerate((role, event) for role in roles for event in EVENTS):
        begin = len(HEADER) + row * room
        stamped = {number: clock for number, clock in enumerate(words[begin : begin + room]) if clock}
        if stamped:
            tracks.append(_track(role, event, stamped, header["begin clock"], duration_ns / clocks))
    return Life(float(duration_ns), round(1e3 * clocks / duration_ns, 1), header["multiprocessor"], tuple(tracks))


def _track(role: str, event: str, stamped: dict[int, int], begin: int, ns_per_clock: float) -> Track:
    first, last = min(stamped), max(stamped)
    if len(stamped) != last - first + 1:
        raise NoTimeline(f"{role}: {event} has no stamp between the first number, {first}, and the last, {last}")
    return Track(role, event, first, tuple(round((clock - begin) * ns_per_clock, 1) for clock in stamped.values()))


class StampedKernel:
    """A case built with stamps, as a callable that takes the problem's arrays and leaves its stamps in ``words``."""

    def __init__(self, session: Session, case: Case, stamps: Stamps) -> None:
        torch = session.backend.torch
        self.stamps, self.kernel = stamps, compiled(lower(case, stamps), session.compiler)
        self.roles = roles_of(self.kernel.source)
        self.words = torch.zeros(stamps.words(len(self.roles)), dtype=torch.int64, device="cuda")
        self._launch = executable(self.kernel)["main"]

    def __call__(self, a: Any, b: Any, c: Any) -> None:
        """Launch it."""
        self._launch(a, b, c, self.words)

    def lives(self, arena: Arena, before: Callable[..., Any]) -> list[Life]:
        """The block's life in each of RUNS launches, each right behind one of ``before``: the GPU is not idle then."""
        found = []
        for run in range(RUNS):
            self.words.zero_()
            before(*arena.sets[2 * run % len(arena.sets)])
            self(*arena.sets[(2 * run + 1) % len(arena.sets)])
            found.append(decode(self.words.cpu().tolist(), self.roles, self.stamps.room))
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
    checked, arena = verify(stamped.kernel, session.backend, run=stamped), session.arena(case.problem)
    rounds = arena.race([(str(case), plain), (f"{case} stamped", stamped)], session.plan)
    lives = stamped.lives(arena, plain)
    return _timeline(session, stamped, checked, rounds, lives)


def _timeline(
    session: Session, stamped: StampedKernel, checked: Verification, rounds: Rounds, lives: list[Life]
) -> Timeline:
    case, kernel = stamped.kernel.case, stamped.kernel
    kept = sorted(range(RUNS), key=lambda run: lives[run].duration_ns)[RUNS // 2]
    return Timeline(
        step=case.step.number,
        step_name=case.step.name,
        variant=case.variant,
        **asdict(case.problem),
        tile=str(case.tile),
        stages=case.slots,
        block=stamped.stamps.block,
        blocks=kernel.blocks,
        multiprocessor=lives[kept].multiprocessor,
        room=stamped.stamps.room,
        clock_mhz=lives[kept].clock_mhz,
        durations_ns=tuple(life.duration_ns for life in lives),
        kept=kept,
        tracks=lives[kept].tracks,
        plain=rounds.timings[0],
        stamped=rounds.timings[1],
        verification=checked,
        source_sha256=kernel.source_sha256,
        cubin_sha256=kernel.cubin.sha256,
        arch=case.machine.arch,
        method=rounds.method,
        environment=session.environment(rounds),
        command=session.command,
    )
