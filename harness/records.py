"""What a measurement leaves behind: one record, one JSON file, written whole or not at all.

Records are the only source of every table, plot and page. Units are in the field names; ``*_samples_ms``
hold one time per round, of one launch.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

SCHEMA = 1
TOLD = (("load issued",), ("full wait ends", "mma retired"), ("epilogue begins", "results stored"))  # by a timeline
LATER_FIELDS = ("peers", "depth")  # records made before these were known are read without them
RESULTS = Path(__file__).resolve().parent.parent / "reports" / "results"


class RecordError(ValueError):
    """A results file or folder that cannot be used; the message names the path and the remedy."""


@dataclass(frozen=True)
class Timing:
    """Times of one contender, one per round, all contenders' rounds interleaved."""

    label: str
    samples_ms: tuple[float, ...]

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
    """How the output was checked before any speed was taken."""

    passed: bool
    on: str
    seeds: tuple[int, ...]
    max_error: float
    tolerance: float
    integers_exact: bool


@dataclass(frozen=True)
class Resources:
    """What the compiler says of the cubin that was measured, and what follows for an SM."""

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
    """Where a record was made."""

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


@dataclass(frozen=True)
class Method:
    """How the times were taken."""

    rounds: int
    launches_per_round: int
    operand_sets: int
    data: str
    cache: str
    launch: str
    warmup_ms: float


@dataclass(frozen=True)
class Peer:
    """What a user might take instead, asked to do the same work in the same rounds.

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
    """What the depth model said of a case before it was measured; see :mod:`harness.models.depth`.

    ``time_ms``, ``occupancy`` and ``hidden`` (the share of a load's latency that other work covers) are
    predicted for 1, 2, … stages, as far as these fit; ``fewest`` stages hide all of it, ``most`` fit a block's
    shared memory, ``recommended`` is the model's choice.
    """

    time_ms: tuple[float, ...]
    occupancy: tuple[float, ...]
    hidden: tuple[float, ...]
    fewest: int
    most: int
    recommended: int


class _Stored:
    """What all kinds of file share: a dataclass that is written as JSON, and read back whole or not at all."""

    def to_json(self) -> str:
        """The fields as JSON text."""
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, origin: str = "record") -> Any:
        """Read one; RecordError names ``origin`` and what is wrong with it."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise RecordError(f"{origin} is not whole JSON ({error}); delete it or restore it from git") from error
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            found = data.get("schema") if isinstance(data, dict) else type(data).__name__
            raise RecordError(f"{origin} is not of schema {SCHEMA} (got {found}); move it elsewhere")
        try:
            present = [f for f in dataclasses.fields(cls) if f.name in data or f.name not in LATER_FIELDS]
            return cls(**{f.name: _read(f.type, data[f.name]) for f in present})
        except (KeyError, TypeError, ValueError) as error:
            raise RecordError(f"{origin} lacks or garbles a field ({error!r}); delete it or restore it") from error

    @classmethod
    def read(cls, path: Path) -> Any:
        """Read the file of one; RecordError names the path and what is wrong with it."""
        return cls.from_json(read_text(path), origin=str(path))


@dataclass(frozen=True)
class _OfProduct(_Stored):
    """What is about a step and one product."""

    step: int
    step_name: str
    m: int
    n: int
    k: int
    layout: str
    dtype: str

    @property
    def shape(self) -> tuple[int, int, int]:
        """Rows, columns and depth of the product."""
        return (self.m, self.n, self.k)


@dataclass(frozen=True)
class _OfKernel(_OfProduct):
    """What is about one kernel of a step."""

    variant: str
    tile: str
    stages: int


@dataclass(frozen=True)
class _Measured:
    """What was compiled, how it was timed, and where."""

    source_sha256: str
    cubin_sha256: str
    arch: str
    method: Method
    environment: Environment
    command: str


@dataclass(frozen=True)
class Record(_OfKernel, _Measured):
    """One measured case: what ran, how fast, beside what, on what, checked how.

    ``kind`` is "step", or "calibration" for cuBLAS against itself. ``previous`` is the step before with
    the same tile choice, ``baseline`` cuBLAS in both forms (B as stored, B transposed), all in the same
    rounds; ratios use the faster form. ``candidates`` are the tiles that a best tile was chosen from,
    with their times in milliseconds (None where a tile is illegal for the case, with the reason).
    """

    kind: str
    default_variant: bool
    out_dtype: str
    math: str
    tile_choice: str
    timing: Timing
    baseline: tuple[Timing, ...]
    previous: Timing | None
    verification: Verification
    resources: Resources | None
    code: CodeFacts | None
    bound: str
    predicted_gain_pct: float | None
    candidates: tuple[dict[str, Any], ...]
    schema: int = SCHEMA
    notes: tuple[str, ...] = field(default=())
    peers: tuple[Peer, ...] = field(default=())
    depth: DepthForecast | None = None

    @property
    def time_ms(self) -> float:
        """Median time of one launch."""
        return self.timing.median_ms

    @property
    def gflops(self) -> float:
        """2·m·n·k operations over the median time, in 10⁹ per second."""
        return 2 * self.m * self.n * self.k / (self.time_ms * 1e6)

    @property
    def fastest_baseline(self) -> Timing:
        """The faster of cuBLAS's forms in these rounds."""
        return min(self.baseline, key=lambda timing: timing.median_ms)

    @property
    def ratio_to_cublas(self) -> float:
        """Speed relative to the faster cuBLAS form of the same rounds; above 1 is faster than cuBLAS."""
        return self.ratio_of(self.timing)

    def ratio_of(self, contender: Timing) -> float:
        """A contender's speed relative to the faster cuBLAS form of the same rounds."""
        return self.fastest_baseline.median_ms / contender.median_ms

    @property
    def improvement_over_previous_pct(self) -> float | None:
        """Speed gained over the step before, in the same rounds; None for the first step."""
        return None if self.previous is None else 100 * (self.previous.median_ms / self.time_ms - 1)

    @property
    def key(self) -> tuple[Any, ...]:
        """What identifies a row: the newest clean record of a key is the one that counts.

        A best tile brings its own slots, a tuned configuration its own slots and variant.
        """
        variant = "" if self.tile_choice == "tuned" else self.variant
        case = (self.kind, self.environment.gpu, self.step, variant, self.tile_choice, self.math)
        chosen = {"default": (self.stages, ""), "best": (0, ""), "tuned": (0, "")}
        config = chosen.get(self.tile_choice, (self.stages, self.tile))
        return (*case, *config, self.dtype, self.out_dtype, self.layout, self.m, self.n, self.k)

    def file_name(self) -> str:
        """A name that says what it is and never collides with another measurement."""
        gpu = gpu_slug(self.environment.gpu)
        case = f"{shape_text(self.shape)}-{self.layout}-{self.dtype}"
        tile = self.tile_choice if self.tile_choice != "given" else self.tile.replace("/", "_")
        stamp = _stamp(self.environment.recorded_at)
        return f"{gpu}-step{self.step}-{self.variant}-s{self.stages}-{tile}-{case}-{stamp}.json"

    def save(self, folder: Path) -> Path:
        """Write the record into ``folder`` in one step (a reader sees all of it or nothing)."""
        return write_atomically(folder / self.file_name(), self.to_json())


@dataclass(frozen=True)
class StreamRecord(_Measured, _Stored):
    """A workload that is bound by memory, measured beside a copy of as many bytes in the same rounds.

    ``variant`` is "staged" (through shared memory, ``stages`` ring slots, 1 unpipelined) or "direct" (from
    global memory to registers). ``bytes_moved`` counts every input read once and every output written once;
    ``copy`` moves as many bytes between two buffers: torch's copy or its negation, whichever is faster (its
    label says which); ``torch`` is torch's own operator for the workload, None where it has none.
    """

    workload: str
    shape: tuple[int, ...]
    dtype: str
    variant: str
    stages: int
    config: str
    bytes_moved: int
    flops: int
    timing: Timing
    copy: Timing
    torch: Timing | None
    verification: Verification
    resources: Resources
    barriers: int
    cp_async: int
    bound: str
    schema: int = SCHEMA
    notes: tuple[str, ...] = field(default=())

    @property
    def gb_s(self) -> float:
        """Bytes moved over the median time, in 10⁹ per second."""
        return self.bytes_moved / (self.timing.median_ms * 1e6)

    @property
    def ratio_to_copy(self) -> float:
        """Bandwidth relative to the copy of the same rounds."""
        return self.copy.median_ms / self.timing.median_ms

    @property
    def key(self) -> tuple[Any, ...]:
        """What identifies a row: the newest clean record of a key is the one that counts."""
        return (self.environment.gpu, self.workload, self.shape, self.dtype, self.variant, self.stages)

    def file_name(self) -> str:
        """Where it lies in a results folder: a name that never collides with another measurement."""
        case = f"{self.workload}-{self.variant}-s{self.stages}-{shape_text(self.shape)}-{self.dtype}"
        return f"streams/{gpu_slug(self.environment.gpu)}-{case}-{_stamp(self.environment.recorded_at)}.json"

    def save(self, folder: Path) -> Path:
        """Write the record under ``folder``/streams."""
        return write_atomically(folder / self.file_name(), self.to_json())


def load_streams(folder: Path = RESULTS) -> list[StreamRecord]:
    """The newest clean record of each memory-bound case of a results folder, by workload, shape and stages."""
    newest = _newest_in(folder / "streams", StreamRecord)
    return sorted(newest, key=lambda r: (r.workload, r.shape, r.variant, r.stages))


def _newest_in(folder: Path, kind: type[StreamRecord | Timeline]) -> Iterable[Any]:
    """The newest clean record of each key in a folder of records; a dirty one only where no clean one exists."""
    newest: dict[tuple[Any, ...], Any] = {}
    for path in sorted(folder.glob("[!.]*.json"), key=lambda path: path.name.rsplit("-", 1)[-1]):
        record = kind.read(path)
        rival = newest.get(record.key)
        if rival is None or rival.environment.dirty or not record.environment.dirty:
            newest[record.key] = record
    return newest.values()


@dataclass(frozen=True)
class Track:
    """When one role of a block saw one event: nanoseconds since the block began, for number ``first`` and those after.

    Numbers are those of k tiles, or of output tiles in an epilogue's events; see :mod:`kernels.stamps`.
    """

    role: str
    event: str
    first: int
    ns: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.ns or not all(isinstance(moment, (int, float)) for moment in self.ns):
            raise ValueError(f"{self.role}: {self.event} at {self.ns!r:.200}, which are no times")

    @property
    def moments(self) -> dict[int, float]:
        """The times by number."""
        return dict(enumerate(self.ns, self.first))


@dataclass(frozen=True)
class Timeline(_OfKernel, _Measured):
    """One block's life in one launch, by time stamps that its roles left (:mod:`kernels.stamps`).

    ``block`` of ``blocks`` ran on ``multiprocessor``; ``durations_ns`` are its durations in all runs, of which number
    ``kept`` is told by ``tracks``. ``clock_mhz`` is the multiprocessor's clock by ``%globaltimer``, over all
    runs. ``plain`` and ``stamped`` time launches without and with stamps in the same rounds: what
    stamping costs.
    """

    out_dtype: str
    block: int
    blocks: int
    multiprocessor: int
    room: int
    clock_mhz: float
    durations_ns: tuple[float, ...]
    kept: int
    tracks: tuple[Track, ...]
    plain: Timing
    stamped: Timing
    verification: Verification
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        if not 0 <= self.kept < len(self.durations_ns):
            raise ValueError(f"run {self.kept} is kept of {len(self.durations_ns)}")
        for events in TOLD:
            if not any(all(self.moments(role, event) for event in events) for role in self.roles):
                raise ValueError(f"no role saw {' and '.join(events)}")

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles that left stamps, in the kernel's order."""
        return tuple(dict.fromkeys(track.role for track in self.tracks))

    @property
    def duration_ns(self) -> float:
        """The block's duration in the run that was kept."""
        return self.durations_ns[self.kept]

    def moments(self, role: str, event: str) -> dict[int, float]:
        """When a role saw an event, by number; empty where it never did."""
        own = (track for track in self.tracks if (track.role, track.event) == (role, event))
        return next((track.moments for track in own), {})

    @property
    def family(self) -> tuple[Any, ...]:
        """What timelines that differ in their stage count alone have in common."""
        case = (self.environment.gpu, self.step, self.variant, self.tile)
        return (*case, self.dtype, self.out_dtype, self.layout, self.m, self.n, self.k)

    @property
    def key(self) -> tuple[Any, ...]:
        """What identifies a timeline: the newest clean one of a key is the one that counts."""
        return (*self.family, self.stages)

    def file_name(self) -> str:
        """Where it lies in a results folder: a name that never collides with another measurement."""
        case = f"{shape_text(self.shape)}-{self.layout}-{self.dtype}-{self.tile.replace('/', '_')}-s{self.stages}"
        stamp = _stamp(self.environment.recorded_at)
        return f"timelines/{gpu_slug(self.environment.gpu)}-step{self.step}-{self.variant}-{case}-{stamp}.json"

    def save(self, folder: Path) -> Path:
        """Write it under ``folder``/timelines."""
        return write_atomically(folder / self.file_name(), self.to_json())


def load_timelines(folder: Path = RESULTS) -> list[Timeline]:
    """The newest clean timeline of each case of a results folder, by step, shape and stages."""
    newest = _newest_in(folder / "timelines", Timeline)
    return sorted(newest, key=lambda t: (t.step, str(t.family), t.stages))


@dataclass(frozen=True)
class Listing(_Stored):
    """One step's schedule and generated code at a fixed shape, for the pages; made without a GPU.

    ``text`` is the step's docstring, ``tir`` the scheduled TensorIR, ``cuda`` the generated kernel,
    ``why`` one sentence on what the generated code says about the variant's speed, ``pipeline`` the
    lists annotated on the k loop (statement names, stage, order, asynchronous stages), ``aspects`` what
    a page's "what changed" table compares, by name ("shared memory", "barriers per k tile", ...).
    """

    step: int
    step_name: str
    title: str
    text: str
    variant: str
    default_variant: bool
    shape: str
    dtype: str
    layout: str
    tile: str
    stages: int
    arch: str
    tir: str
    cuda: str
    why: str
    code: CodeFacts
    resources: Resources | None
    pipeline: dict[str, Any]
    aspects: dict[str, str]
    schema: int = SCHEMA

    def save(self, folder: Path) -> Path:
        """Write the listing as ``stepN-variant.json`` under ``folder``/listings."""
        return write_atomically(folder / "listings" / f"step{self.step}-{self.variant}.json", self.to_json())


def load_listings(folder: Path = RESULTS) -> list[Listing]:
    """Every listing of a results folder, by step, default variant first."""
    found = map(Listing.read, sorted((folder / "listings").glob("*.json")))
    return sorted(found, key=lambda listing: (listing.step, not listing.default_variant, listing.variant))


@dataclass(frozen=True)
class Counters(_OfKernel):
    """Hardware counters of one launch of a case, by name; see :mod:`harness.counters`."""

    gpu: str
    values: dict[str, float]
    revision: str
    dirty: bool
    recorded_at: str
    command: str
    schema: int = SCHEMA

    def save(self, folder: Path) -> Path:
        """Write the counters under ``folder``/counters; the same case counted again replaces them."""
        case = f"{shape_text(self.shape)}-{self.layout}-{self.dtype}-{self.tile.replace('/', '_')}-s{self.stages}"
        name = f"{gpu_slug(self.gpu)}-step{self.step}-{self.variant}-{case}.json"
        return write_atomically(folder / "counters" / name, self.to_json())


def load_counters(folder: Path = RESULTS) -> list[Counters]:
    """Every set of counters of a results folder, by step, shape and tile."""
    found = map(Counters.read, sorted((folder / "counters").glob("*.json")))
    return sorted(found, key=lambda counters: (counters.step, counters.m, counters.n, counters.k, counters.tile))


@dataclass(frozen=True)
class Candidate:
    """One configuration of a tuning space, and what became of it.

    ``status`` is "timed", "illegal" (beyond the machine's limits), "not built" or "wrong" (its output is not the
    product); ``why`` says the reason of all but the first. ``times_ms`` are medians of one launch, one for each
    rung of the search that the candidate took part in, and ``ratios`` its speeds over the faster cuBLAS form of the
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
        """Variant, tile and ring slots in words."""
        return f"{self.variant} {self.tile}" + (f", {self.stages} slots" if self.stages > 1 else "")


@dataclass(frozen=True)
class TuningProgress(_Stored):
    """What an unfinished search has found so far; it counts for the same space and kernels only."""

    space_digest: str
    kernels_digest: str
    candidates: tuple[Candidate, ...]
    schema: int = SCHEMA


@dataclass(frozen=True)
class TunedConfig(_OfProduct):
    """The configuration that tuning found for one step, shape, dtype and layout on one GPU.

    ``candidates`` are those that were timed, fastest first, and then those that were not, with the reason; ``legal``
    is how many of the space may be timed. The fastest were measured again, longer and on other operands:
    ``confirmation`` holds these rounds of the winner, the runner-up, the ``default`` configuration where it is
    neither, and both cuBLAS forms, in this order. ``margin_pct`` is how much faster the winner is than the
    runner-up, the median of the rounds' ratios, ``margin_interval_pct`` that median's interval (harness.tuning says
    which). ``verdict`` is "confirmed"; or "tie" where the interval does not lie clear of 0: then the winner is the
    cheaper of the two, and the margin may be negative; or "alone" where nothing else was timed: there is no margin.

    TVM's MetaSchedule database keeps traces and their run times: neither what is illegal and why, nor a verdict,
    nor the state of GPU and tree. Hence a record, as for all that is measured here.
    """

    out_dtype: str
    math: str
    arch: str
    winner: Candidate
    runner_up: Candidate | None
    verdict: str
    margin_pct: float | None
    margin_interval_pct: tuple[float, ...]
    default: str
    confirmation: tuple[Timing, ...]
    legal: int
    candidates: tuple[Candidate, ...]
    space: dict[str, Any]
    space_digest: str
    kernels_digest: str
    budget_s: float | None
    method: Method
    environment: Environment
    command: str
    schema: int = SCHEMA

    @property
    def seen(self) -> int:
        """How many of the legal candidates were built; fewer than ``legal`` where a budget stopped the search."""
        return sum(candidate.status != "illegal" for candidate in self.candidates)

    @property
    def fastest_baseline(self) -> Timing:
        """The faster of cuBLAS's forms in the confirmation."""
        return min(self.confirmation[-2:], key=lambda timing: timing.median_ms)

    @property
    def time_ms(self) -> float:
        """The winner's median time of one launch in the confirmation."""
        return self.confirmation[0].median_ms

    @property
    def gflops(self) -> float:
        """The winner's speed in the confirmation: 2·m·n·k operations over the time, in 10⁹ per second."""
        return 2 * self.m * self.n * self.k / (self.time_ms * 1e6)

    @property
    def ratio_to_cublas(self) -> float:
        """The winner's speed relative to the faster cuBLAS form of the same rounds."""
        return self.fastest_baseline.median_ms / self.time_ms

    @property
    def gain_over_default_pct(self) -> float:
        """How much faster the winner is than the step's default configuration; 0 where that is the winner."""
        default = next(timing for timing in self.confirmation if timing.label == self.default)
        return 100 * (default.median_ms / self.time_ms - 1)

    def path_in(self, folder: Path) -> Path:
        """Where it lies in a results folder."""
        return tuned_path(folder, self.environment.gpu, self.step, self.shape, self.layout, self.dtype, self.out_dtype)

    def save(self, folder: Path) -> Path:
        """Write it under ``folder``/tuned; the same case tuned again replaces it."""
        return write_atomically(self.path_in(folder), self.to_json())


def tuned_path(
    folder: Path, gpu: str, step: int, shape: tuple[int, int, int], layout: str, dtype: str, out_dtype: str
) -> Path:
    """Where the tuned configuration of a case lies, whether or not there is one."""
    output = "" if out_dtype == dtype else f"-to-{out_dtype}"
    return folder / "tuned" / f"{gpu_slug(gpu)}-step{step}-{shape_text(shape)}-{layout}-{dtype}{output}.json"


def load_tuned(folder: Path = RESULTS) -> list[TunedConfig]:
    """Every tuned configuration of a results folder, by GPU, step and size."""
    found = map(TunedConfig.read, (folder / "tuned").glob("[!.]*.json"))
    return sorted(found, key=lambda t: (t.environment.gpu, t.dtype, t.layout, t.step, t.m * t.n * t.k, t.m, t.n))


def gpu_slug(gpu: str) -> str:
    """A GPU's name as file names have it."""
    return gpu.lower().replace("nvidia ", "").replace(" ", "-")


def shape_text(shape: Iterable[int]) -> str:
    """A shape as options, file names and tables write it: ``1024x512x256``."""
    return "x".join(map(str, shape))


def _stamp(recorded_at: str) -> str:
    """A time as file names write it."""
    return recorded_at.translate(str.maketrans("", "", "-:+")).replace(".", "")


def _read(annotation: str, value: Any) -> Any:
    """Turn a JSON value back into what the field's annotation says."""
    nested = {
        "Timing": Timing,
        "Timing | None": Timing,
        "Verification": Verification,
        "Resources | None": Resources,
        "Resources": Resources,
        "CodeFacts | None": CodeFacts,
        "CodeFacts": CodeFacts,
        "Method": Method,
        "Candidate": Candidate,
        "Candidate | None": Candidate,
        "DepthForecast | None": DepthForecast,
    }
    if annotation in nested:
        return None if value is None and annotation.endswith("| None") else _construct(nested[annotation], value)
    if annotation == "tuple[Timing, ...]":
        if not value:
            raise ValueError("no timing")
        return tuple(_construct(Timing, timing) for timing in value)
    if annotation in ("tuple[Candidate, ...]", "tuple[Track, ...]"):
        return tuple(_construct(Candidate if "Candidate" in annotation else Track, item) for item in value)
    if annotation == "tuple[Peer, ...]":
        timed = [{**peer, "timing": _read("Timing | None", peer["timing"])} for peer in value]
        return tuple(_construct(Peer, peer) for peer in timed)
    if annotation == "Environment":
        states = {moment: _construct(GpuState, value[moment]) for moment in ("before", "after")}
        return Environment(**{**value, **states})
    if annotation.startswith("tuple"):
        return tuple(value)
    return _checked(annotation, value)


def _construct(cls: type, value: dict[str, Any]) -> Any:
    """A flat dataclass from its JSON form, each field of the type its annotation names."""
    fields = {f.name: f.type for f in dataclasses.fields(cls)}
    if not isinstance(value, dict) or set(fields) != set(value):
        raise ValueError(f"{cls.__name__} has fields {value!r:.200}, expected {sorted(fields)}")
    samples = value.get("samples_ms", [1.0])
    if not samples or not all(isinstance(sample, float | int) for sample in samples):
        raise ValueError(f"samples are not numbers: {samples!r:.200}")
    return cls(
        **{
            name: tuple(item) if isinstance(item, list) else _checked(fields[name], item)
            for name, item in value.items()
        }
    )


def _checked(annotation: str, value: Any) -> Any:
    """The value, if it is of the plain type that its annotation names; else ValueError."""
    kinds = {"int": int, "float": (int, float), "str": str, "bool": bool, "float | None": (int, float, type(None))}
    kind = kinds.get(annotation)
    if kind is None or (isinstance(value, kind) and isinstance(value, bool) == (kind is bool)):
        return value
    raise ValueError(f"expected {annotation}, got {value!r}")


def write_atomically(path: Path, text: str) -> Path:
    """Write a file under a temporary name, then rename it; RecordError if the folder cannot take it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            with partial.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise RecordError(
            f"cannot write {path.name} into {path.parent} ({error.strerror}); free space or give another --out"
        ) from error
    return path


def read_text(path: Path) -> str:
    """A results file's text; RecordError names the file where it cannot be read or is not text."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"cannot read {path} ({error}); give a record's path, or restore the file") from error


def check_writable(folder: Path) -> None:
    """Raise RecordError before anything is measured if ``folder`` cannot take a record."""
    probe = folder / f".write-test-{os.getpid()}"
    write_atomically(probe, "x" * 65536)
    probe.unlink()


def load_records(folder: Path = RESULTS) -> Iterator[Record]:
    """Every record of a folder, oldest first; RecordError names the first file that is none."""
    if not folder.is_dir():
        raise RecordError(f"no results folder {folder}; measure something first or give another folder")
    for path in sorted(folder.glob("*.json"), key=lambda path: path.name.rsplit("-", 1)[-1]):
        yield Record.read(path)


def now() -> str:
    """The current time as records write it: UTC, ISO 8601, to the millisecond."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")
