"""The parts that records are made of."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Annotated, TypeVar

import msgspec

Item = TypeVar("Item")
# A record that is otherwise is refused when it is read.
Some = Annotated[tuple[Item, ...], msgspec.Meta(min_length=1)]
Milliseconds = Annotated[float, msgspec.Meta(gt=0)]
Stages = Annotated[int, msgspec.Meta(ge=1)]


@dataclass(frozen=True)
class Timing:
    """Times of one contender, one per round, all contenders' rounds interleaved."""

    label: str
    samples_ms: Some[Milliseconds]

    @property
    def median_ms(self) -> float:
        """The time reported: the median over rounds."""
        return statistics.median(self.samples_ms)

    @property
    def spread_pct(self) -> float:
        """Interquartile range in percent of the median; 0 for a single round."""
        if len(self.samples_ms) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.samples_ms, n=4)
        return 100 * (high - low) / self.median_ms


@dataclass(frozen=True)
class Verification:
    """Say how the output was checked before any speed was taken."""

    passed: bool
    on: str
    seeds: tuple[int, ...]
    max_error: float
    tolerance: float
    integers_exact: bool


@dataclass(frozen=True)
class Resources:
    """Give what the compiler says of the cubin that was measured, and what follows for an SM."""

    registers: int
    spill_bytes: int
    smem_bytes: int
    threads: int
    blocks: int
    blocks_per_sm: int
    occupancy: float
    occupancy_limit: str


@dataclass(frozen=True)
class CodeFacts:
    """Counts in the generated CUDA, each of the k loop's body unless named otherwise."""

    barriers: int
    cp_async: int
    cp_async_bytes: int
    commit_groups: int
    wait_groups: tuple[int, ...]
    vector_loads: int
    vector_stores_kernel: int
    shared_versions: int
    kernel_lines: int


@dataclass(frozen=True)
class GpuState:
    """The GPU at one moment, as nvidia-smi gives it."""

    sm_clock_mhz: float
    memory_clock_mhz: float
    power_w: float
    temperature_c: float


@dataclass(frozen=True)
class Environment:
    """Name GPU, versions and revision that a record was made with, and when."""

    gpu: str
    gpu_uuid: str
    driver: str
    power_limit_w: float
    before: GpuState
    after: GpuState
    versions: dict[str, str]
    revision: str
    dirty: bool
    recorded_at: str
    multiprocessors: int = 0  # of the GPU, by its driver; 0 in records made before it was noted


@dataclass(frozen=True)
class Method:
    """Say how the times were taken."""

    rounds: int
    launches_per_round: int
    operand_sets: int
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

    name: str
    status: str
    why: str
    config: str
    timing: Timing | None


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

    role: str
    event: str
    first: int
    ns: Some[float]

    @property
    def moments(self) -> dict[int, float]:
        """The times by number."""
        return dict(enumerate(self.ns, self.first))


@dataclass(frozen=True)
class Candidate:
    """One configuration of a tuning space, and what became of it.

    ``status`` is "timed", "illegal" (beyond the machine's limits), "not built" or "wrong" (its output is not the
    product); ``why`` says the reason of all but the first. ``times_ms`` are medians of one launch, one for each
    round of the search that the candidate took part in, and ``ratios`` its speeds over the faster cuBLAS form of the
    same rounds: only these compare candidates of different races.
    """

    variant: str
    tile: str
    stages: int
    status: str
    times_ms: tuple[float, ...] = ()
    ratios: tuple[float, ...] = ()
    why: str = ""

    @property
    def name(self) -> str:
        """Variant, tile and stages in words."""
        return f"{self.variant} {self.tile}" + (f", {self.stages} stages" if self.stages > 1 else "")
