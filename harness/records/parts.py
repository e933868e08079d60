"""The parts that records are made of."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Literal, NotRequired, TypedDict, TypeVar

import msgspec

from tensorir_ladder.harness.records.intervals import paired_ratios
from tensorir_ladder.harness.records.names import NAME
from tensorir_ladder.harness.records.strict import text_like

# A record that is otherwise is refused when it is read: :mod:`.strict`.
Item = TypeVar("Item")
Some = Annotated[tuple[Item, ...], msgspec.Meta(min_length=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Extent = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]  # of a product or another workload
Stages = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
Number = Annotated[int, msgspec.Meta(ge=0, lt=1000)]  # of a step
Milliseconds = Annotated[float, msgspec.Meta(ge=1e-7, le=1e9)]  # a launch takes a microsecond at least
Amount = Annotated[float, msgspec.Meta(ge=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
Name = text_like(NAME, "a name of letters, digits, _, . and - that does not begin with . or -")  # part of a path
INVISIBLE = r"\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff"  # or turning the direction of text
Title = text_like(rf"^[^{INVISIBLE}]{{1,200}}\Z", "1 to 200 characters that can be seen")
Sentence = text_like(rf"^[^{INVISIBLE}]{{1,400}}\Z", "1 to 400 characters that can be seen")
GpuName = text_like(rf"^[^{INVISIBLE}]{{1,80}}\Z", "1 to 80 characters that can be seen")
Run = text_like(r"^[A-Za-z0-9_.-]{0,50}\Z", "a run's name, of letters, digits, _, . and -, or none")
Arch = text_like(r"^(sm_\d{1,4}[af]?)?\Z", "an architecture such as sm_90a")  # none for cuBLAS alone
EXTENTS = r"[1-9]\d{0,4}(x[1-9]\d{0,4}){0,2}"
# A word behind the block tells families of the same numbers apart: "swapped", "rows" (:mod:`schedules.tiles`).
TILE = rf"{EXTENTS}([a-z]{{1,16}})?(/{EXTENTS}){{0,3}}"
Tile = text_like(rf"^{TILE}\Z", "a tile such as 64x64x16/4x4")
TileOrNone = text_like(rf"^({TILE})?\Z", "a tile such as 64x64x16/4x4")
Dtype = Literal["float32", "float16", "bfloat16", "float64"]
Layout = Literal["nn", "nt"]
Math = Literal["ieee", "tf32"]
Bound = Literal["compute", "memory", "latency", "unknown"]
TileChoice = Literal["default", "best", "tuned", "given"]


def check_time(text: str) -> None:
    """Raise ValueError for what is no time as records write it: ISO 8601, in UTC."""
    try:
        known = datetime.fromisoformat(text).isoformat(timespec="milliseconds") == text and text.endswith("+00:00")
    except ValueError:
        known = False
    if not known:
        raise ValueError(f"recorded_at {text[:40]!a} is no time such as 2026-11-20T10:00:00.000+00:00")


@dataclass(frozen=True)
class Timing:
    """Times of one contender, one per round, all contenders' rounds interleaved."""

    label: str
    samples_ms: Some[Milliseconds]

    @property
    def median_ms(self) -> float:
        """The time reported: the median over rounds."""
        return statistics.median(self.samples_ms)

    def ratios_to(self, other: Timing) -> list[float]:
        """Return the speeds relative to another contender's of the same rounds, one per round."""
        return paired_ratios(other.samples_ms, self.samples_ms)

    @property
    def spread_pct(self) -> float:
        """Interquartile range in percent of the median; 0 for a single round."""
        if len(self.samples_ms) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.samples_ms, n=4)
        return 100 * (high - low) / self.median_ms


@dataclass(frozen=True)
class Verification:
    """Say how the output was checked before any speed was taken.

    ``max_error`` and ``tolerance`` are of the element that came nearest to its own limit. ``special_values``: NaN,
    infinities, denormals and tiny rows arrived where IEEE 754 says. ``large_k``: the shape of a long reduction that
    the same configuration was checked with, or a clause that says why it was not. Both are empty in records made
    before these were checked.
    """

    passed: bool
    on: str
    seeds: tuple[int, ...]
    max_error: float
    tolerance: float
    integers_exact: bool
    special_values: bool = False
    large_k: str = ""


@dataclass(frozen=True)
class Resources:
    """Give what the compiler says of the cubin that was measured, and what follows for an SM."""

    registers: Count
    spill_bytes: Count
    smem_bytes: Count
    threads: Count
    blocks: Count
    blocks_per_sm: Count
    occupancy: Amount
    occupancy_limit: Title


@dataclass(frozen=True)
class CodeFacts:
    """Counts in the generated CUDA, each of the k loop's body unless named otherwise."""

    barriers: Count
    cp_async: Count
    cp_async_bytes: Count
    commit_groups: Count
    wait_groups: tuple[int, ...]
    vector_loads: Count
    vector_stores_kernel: Count
    shared_versions: Count
    kernel_lines: Count


@dataclass(frozen=True)
class GpuState:
    """The GPU at one moment, as nvidia-smi gives it."""

    sm_clock_mhz: float
    memory_clock_mhz: float
    power_w: float
    temperature_c: float


@dataclass(frozen=True)
class Environment:
    """Name GPU, versions and revision that a record was made with, and when.

    ``run`` is drawn once a command: records that share it were made by one command on one GPU, and their absolute
    figures may stand side by side. Empty in records made before there was one.
    """

    gpu: GpuName
    gpu_uuid: Title
    driver: Title
    power_limit_w: float
    before: GpuState
    after: GpuState
    versions: dict[str, str]
    revision: str
    dirty: bool
    recorded_at: str
    run: Run = ""
    multiprocessors: int = 0  # of the GPU, by its driver; 0 in records made before it was noted

    def __post_init__(self) -> None:
        check_time(self.recorded_at)


@dataclass(frozen=True)
class Method:
    """Say how the times were taken."""

    rounds: Count
    launches_per_round: Count
    operand_sets: Count
    data: str
    cache: str
    launch: str
    warmup_ms: float


@dataclass(frozen=True)
class Peer:
    """Time a program that a user might take instead, asked to do the same work in the same rounds.

    ``status`` is "measured", "missing" (not installed here) or "failed" (installed, but it did not do the
    work); ``why`` says what is missing, how it failed, or what the peer's own tuning went through, ``config`` what
    that tuning chose.
    """

    name: Title
    status: Literal["measured", "missing", "failed"]
    why: str
    config: str
    timing: Timing | None


@dataclass(frozen=True)
class EnergyTurn:
    """Give what one turn drew, of a contender that was launched without pause; :mod:`harness.energy` says how.

    ``us`` is one launch's time, over ``launches``; the SM clock is the median over the turn.
    """

    watts: Positive
    us: Positive
    launches: Stages
    sm_clock_mhz: Amount
    temperature_c: float

    @property
    def joules(self) -> float:
        """One launch's energy."""
        return self.watts * self.us / 1e6


@dataclass(frozen=True)
class Energy:
    """Give what one contender draws, turn by turn, all contenders' turns interleaved."""

    label: str
    turns: Some[EnergyTurn]

    def median(self, field: str) -> float:
        """Return a turn's field, the median over turns."""
        return statistics.median(getattr(turn, field) for turn in self.turns)

    def over(self, other: Energy, field: str) -> float:
        """Return a field over that of another contender: the median of the turns' ratios."""
        own, others = ([getattr(turn, field) for turn in energy.turns] for energy in (self, other))
        return statistics.median(paired_ratios(own, others))


@dataclass(frozen=True)
class DepthForecast:
    """Keep what the depth model said of a case before it was measured; see :mod:`harness.models.depth`.

    ``time_ms``, ``occupancy`` and ``hidden`` (the share of a load's latency that other work covers) are
    predicted for 1, 2, … stages, as far as these fit; ``fewest`` stages hide all of it, ``most`` fit a block's
    shared memory, ``recommended`` is the model's choice.
    """

    time_ms: Some[Milliseconds]
    occupancy: tuple[float, ...]
    hidden: tuple[float, ...]
    fewest: Stages
    most: Stages
    recommended: Stages


@dataclass(frozen=True)
class Track:
    """Tell when one role of a block saw one event, in nanoseconds since the block began.

    ``ns`` are the times of number ``first`` and those after. Numbers are those of k tiles, or of output tiles in an
    epilogue's events; see :mod:`kernels.stamps`.
    """

    role: Title
    event: Title
    first: Count
    ns: Some[float]

    @property
    def moments(self) -> dict[int, float]:
        """The times by number."""
        return dict(enumerate(self.ns, self.first))


@dataclass(frozen=True)
class MeasuredOn:
    """The GPU that timed a candidate of a search over several, and its state before and after."""

    gpu_uuid: Title
    before: GpuState
    after: GpuState


@dataclass(frozen=True)
class Candidate:
    """One configuration of a tuning space, and what became of it.

    ``status`` is "timed", "illegal" (beyond the machine's limits), "not built" or "wrong" (its output is not the
    product); ``why`` says the reason of all but the first. ``times_ms`` are medians of one launch, one for each
    round of the search that the candidate took part in, and ``ratios`` its speeds over the faster cuBLAS form of the
    same rounds: only these compare candidates of different races. ``measured_on`` is None where one GPU timed all.
    """

    variant: Name
    tile: Tile
    stages: Stages
    status: Literal["timed", "illegal", "not built", "wrong"]
    times_ms: tuple[Milliseconds, ...] = ()
    ratios: tuple[Amount, ...] = ()
    why: str = ""
    measured_on: MeasuredOn | None = None

    @property
    def name(self) -> str:
        """Variant, tile and stages in words."""
        return f"{self.variant} {self.tile}" + (f", {self.stages} stages" if self.stages > 1 else "")


class TileTried(TypedDict):
    """A tile that a best tile was chosen from, and its time in milliseconds; None with ``why`` where it is illegal."""

    tile: Tile
    time_ms: Milliseconds | None
    stages: NotRequired[Stages]
    why: NotRequired[str]


@dataclass(frozen=True)
class CaughtMutant:
    """A mutant that was found: its subject's number, its rule, the line of CUDA text, and the order that found it."""

    subject: Count
    rule: Title
    line: Count
    order: Count


@dataclass(frozen=True)
class LivingMutant:
    """A mutant that was not: how its line read before and after, and why that is harmless; "" where it is not."""

    subject: Count
    rule: Title
    line: Count
    before: str
    after: str
    reason: str


@dataclass(frozen=True)
class FunctionTimed:
    """One function of a model, called by itself with what the model gives it: who scheduled it, and one call's times.

    ``calls`` of it are in one run of the model. ``attention``: it reads or writes the scores of attention, or is all
    of it.
    """

    name: Title
    rule: Title
    attention: bool
    calls: Stages
    timing: Timing

    @property
    def share_ms(self) -> float:
        """Its part of a run of the model."""
        return self.calls * self.timing.median_ms


@dataclass(frozen=True)
class RulesTimed:
    """A model as one set of schedule rules makes it, for the architecture named; or why it does not.

    ``status`` is "measured", "wrong" (its output is not the model's) or "failed" (it is not built or does not run).
    ``sums`` is the dtype that ``verification`` allows products to be added up in. ``timing`` is the whole model's,
    ``rest`` that of its calls without attention's, where it has attention. ``build_s``: to build it, with what was
    compiled before from the cache.
    """

    name: Title
    arch: Arch
    status: Literal["measured", "wrong", "failed"]
    why: str
    sums: Dtype
    build_s: Amount
    source_sha256: str
    verification: Verification | None
    timing: Timing | None
    rest: Timing | None
    functions: tuple[FunctionTimed, ...]


class Space(TypedDict):
    """List what a tuning may choose among, as text."""

    tiles: list[Tile]
    stages: list[Stages]
    variants: list[Name]
