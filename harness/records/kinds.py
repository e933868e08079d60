"""The kinds of record: what each says, and what follows from it.

Records are the only source of every table, plot and page. Units are in the field names; ``*_samples_ms``
hold one time per round, of one launch.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from tensorir_ladder.harness.records.intervals import median_interval
from tensorir_ladder.harness.records.names import gpu_slug, path_name
from tensorir_ladder.harness.records.parts import (
    Arch,
    Bound,
    Candidate,
    CaughtMutant,
    CodeFacts,
    Count,
    DepthForecast,
    Dtype,
    Energy,
    Environment,
    Extent,
    FunctionTimed,
    GpuName,
    Layout,
    LivingMutant,
    Math,
    Method,
    Name,
    Number,
    Peer,
    Resources,
    RulesTimed,
    Sentence,
    Some,
    Space,
    Stages,
    Tile,
    TileChoice,
    TileOrNone,
    TileTried,
    Timing,
    Title,
    Track,
    Verification,
    check_time,
)
from tensorir_ladder.harness.records.strict import decode
from tensorir_ladder.harness.records.writing import append, write_atomically

# What was launched early in records that do not say so themselves.
EARLY_BEFORE_IT_WAS_RECORDED = {("step13_persistent", "overlapped")}
BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}  # of an element
# A timeline without these tells nothing.
TOLD = (("load issued",), ("full wait ends", "mma retired"), ("epilogue begins", "results stored"))


class _Stored:
    """A dataclass that is written as JSON, and read back whole or not at all."""

    def to_json(self) -> str:
        """Write the fields as JSON text."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes, origin: str = "record") -> Any:
        """Read one; RecordError names ``origin`` and what is wrong with it."""
        return decode(text, cls, origin)


class Line(_Stored):
    """A record that is a line of ``<GPU>-<FILE>.jsonl``; of each ``key`` the one of the highest ``rank`` counts."""

    FILE: ClassVar[str]

    @property
    def gpu_name(self) -> str:
        """The GPU that was measured."""
        return self.environment.gpu

    @property
    def rank(self) -> tuple[bool, str]:
        """Put records of one key in order: clean ones above those of a changed tree, then by time."""
        return not self.environment.dirty, self.environment.recorded_at

    def save(self, folder: Path) -> str:
        """Append it to its file in ``folder``; returns its place, ``FILE:LINE``.

        RecordError for what could not be read back, such as a time that is no number.
        """
        self.from_json(self.to_json(), "what was measured")
        return append(folder / self.file_name, self)

    @property
    def file_name(self) -> str:
        """The name of the file that it belongs into."""
        return f"{gpu_slug(self.gpu_name)}-{self.FILE}.jsonl"


class _BesideCublas:
    """A product's ``timing`` beside ``baseline``, those of cuBLAS's forms in the same rounds."""

    @property
    def time_ms(self) -> float:
        """Median time of one launch."""
        return self.timing.median_ms

    @property
    def gflops(self) -> float:
        """2·m·n·k operations, times the products of a batch, over the median time, in 10⁹ per second."""
        return 2 * math.prod(self.shape) / (self.time_ms * 1e6)

    @property
    def fastest_baseline(self) -> Timing:
        """The faster of cuBLAS's forms in these rounds."""
        return min(self.baseline, key=lambda timing: timing.median_ms)

    @property
    def ratio_to_cublas(self) -> float:
        """Speed relative to the faster cuBLAS form of the same rounds; above 1 is faster than cuBLAS."""
        return self.ratio_of(self.timing)

    @property
    def ratio_interval(self) -> tuple[float, float]:
        """The ratio's 95 % interval; see :meth:`interval_of`."""
        return self.interval_of(self.timing)

    def ratio_of(self, contender: Timing) -> float:
        """Return a contender's speed relative to the faster cuBLAS form: the median of the rounds' ratios."""
        return statistics.median(contender.ratios_to(self.fastest_baseline))

    def interval_of(self, contender: Timing) -> tuple[float, float]:
        """Bound a contender's ratio at 95 % confidence, by the sign test; :func:`.intervals.median_interval` says how.

        A contender is faster than cuBLAS where all of it lies above 1.
        """
        return median_interval(contender.ratios_to(self.fastest_baseline))


@dataclass(frozen=True)
class _OfProduct(_Stored):
    """Name a step and one product."""

    step: Number
    step_name: Name
    m: Extent
    n: Extent
    k: Extent
    layout: Layout
    dtype: Dtype

    @property
    def shape(self) -> tuple[int, int, int]:
        """Rows, columns and depth of the product."""
        return (self.m, self.n, self.k)


@dataclass(frozen=True)
class _OfKernel(_OfProduct):
    """Name one kernel of a step."""

    variant: Name
    tile: TileOrNone  # cuBLAS has none
    stages: Stages


@dataclass(frozen=True)
class _Measured(Line):
    """Say what was compiled, how it was timed, and where."""

    source_sha256: str
    cubin_sha256: str
    arch: Arch
    method: Method
    environment: Environment
    command: str


@dataclass(frozen=True)
class Record(_OfKernel, _Measured, _BesideCublas):
    """One measured case: what ran, how fast, beside what, on what, checked how.

    ``kind`` is "step", or "calibration" for cuBLAS against itself. ``previous`` is the step before with
    the same tile choice, ``baseline`` cuBLAS in both forms (B as stored, B transposed), all in the same
    rounds; ratios use the faster form. ``candidates`` are the tiles that a best tile was chosen from,
    with their times in milliseconds (None where a tile is illegal for the case, with the reason).
    ``default_stages`` says that the stage count is the one the step takes by itself, ``early_launch`` that the kernel
    is launched while the one before it still runs (None: made before that was recorded; ask ``launched_early``).
    ``energy``: what the case, cuBLAS's forms and the peers draw, where that was asked for.
    Records made before a field with a default was known are read with that.
    """

    FILE: ClassVar[str] = "steps"

    kind: Literal["step", "calibration"]
    default_variant: bool
    out_dtype: Dtype
    math: Math
    tile_choice: TileChoice
    timing: Timing
    baseline: Some[Timing]
    previous: Timing | None
    verification: Verification
    resources: Resources | None
    code: CodeFacts | None
    bound: Bound
    predicted_gain_pct: float | None
    candidates: tuple[TileTried, ...]
    schema: Literal[1] = 1
    notes: tuple[str, ...] = ()
    peers: tuple[Peer, ...] = ()
    depth: DepthForecast | None = None
    default_stages: bool = True
    early_launch: bool | None = None
    energy: Some[Energy] | msgspec.UnsetType = msgspec.UNSET  # not written then, so that pictures stay current

    def __post_init__(self) -> None:
        if self.kind == "step" and not self.tile:
            raise ValueError("a step without a tile")
        if self.energy and not self._energy_of_cublas:
            raise ValueError("energy without cuBLAS's beside it")
        if self.energy and len({len(energy.turns) for energy in self.energy}) > 1:
            raise ValueError("energy of contenders that had not as many turns")

    @property
    def improvement_over_previous_pct(self) -> float | None:
        """Speed gained over the step before, the median of the rounds' ratios; None for the first step."""
        return None if self.previous is None else 100 * (statistics.median(self.timing.ratios_to(self.previous)) - 1)

    @property
    def energy_rows(self) -> list[dict[str, Any]]:
        """One object for each contender whose energy was measured, joules and speed beside cuBLAS's form faster there.

        ``joules`` and ``us`` are of one product, ``speed_to_cublas`` of launches without pause.
        """
        if not self.energy:
            return []
        cublas = min(self._energy_of_cublas, key=lambda energy: energy.median("us"))
        return [
            {
                "gpu": self.environment.gpu,
                "power_limit_w": self.environment.power_limit_w,
                "shape": shape_text(self.shape),
                "dtype": self.dtype,
                "layout": self.layout,
                "step": self.step,
                "variant": self.variant,
                "contender": energy.label,
                "joules": energy.median("joules"),
                "joules_to_cublas": energy.over(cublas, "joules"),
                "watts": energy.median("watts"),
                "sm_clock_mhz": energy.median("sm_clock_mhz"),
                "temperature_c": energy.median("temperature_c"),
                "us": energy.median("us"),
                "speed_to_cublas": cublas.over(energy, "us"),
                "launches": sum(turn.launches for turn in energy.turns),
                "turns": len(energy.turns),
                "recorded_at": self.environment.recorded_at,
            }
            for energy in self.energy
        ]

    @property
    def _energy_of_cublas(self) -> list[Energy]:
        forms = {timing.label for timing in self.baseline}
        return [energy for energy in self.energy if energy.label in forms]

    @property
    def previous_has_its_tile(self) -> bool:
        """True where the step before was measured with this record's tile, as its label says."""
        return self.previous is not None and self.tile in self.previous.label.split()

    @property
    def launched_early(self) -> bool:
        """True where the kernel begins while the one before it still runs, which cuBLAS's beside it do not."""
        known = self.early_launch
        return (self.step_name, self.variant) in EARLY_BEFORE_IT_WAS_RECORDED if known is None else known

    @property
    def key(self) -> tuple[Any, ...]:
        """Tell a row from others: of a key, the newest clean record is the one that counts.

        A best tile brings its own stages, a tuned configuration its own stages and variant.
        """
        variant = "" if self.tile_choice == "tuned" else self.variant
        case = (self.kind, self.environment.gpu, self.step, variant, self.tile_choice, self.math)
        chosen = {"default": (self.stages, ""), "best": (0, ""), "tuned": (0, "")}
        config = chosen.get(self.tile_choice, (self.stages, self.tile))
        return (*case, *config, self.dtype, self.out_dtype, self.layout, self.m, self.n, self.k)


@dataclass(frozen=True)
class ShapeRecord(_Measured, _BesideCublas):
    """One drawn shape: what takes products by itself, beside both forms of cuBLAS in the same rounds.

    A ``batch`` of more than one product is compared with ``torch.bmm`` on the same tensors instead.
    ``group`` says what the shape is drawn from (:mod:`harness.shapes`), and ``seed`` by which draw. ``contender`` is
    the Python call or a step, ``config`` what it chose for the shape.
    """

    FILE: ClassVar[str] = "shapes"

    group: Name
    seed: Count
    m: Extent
    n: Extent
    k: Extent
    layout: Layout
    dtype: Dtype
    contender: Title
    config: Sentence
    timing: Timing
    baseline: Some[Timing]
    verification: Verification
    schema: Literal[1] = 1
    batch: Extent = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows, columns and depth of the product; of a batch, its number of products comes first."""
        return (self.m, self.n, self.k) if self.batch == 1 else (self.batch, self.m, self.n, self.k)

    @property
    def baseline_name(self) -> str:
        """Name what its speed is relative to: "cuBLAS", or of a batch "torch.bmm"."""
        return "cuBLAS" if self.batch == 1 else "torch.bmm"

    @property
    def intensity(self) -> float:
        """Operations for each byte of operands and result, each moved once."""
        nbytes = BYTES[self.dtype] * (self.m * self.k + self.k * self.n + self.m * self.n)
        return 2 * self.m * self.n * self.k / nbytes

    @property
    def family(self) -> tuple[Any, ...]:
        """Tell the group's shapes from others: those of one GPU, dtype, group and seed."""
        return (self.environment.gpu, self.dtype, self.group, self.seed)

    @property
    def key(self) -> tuple[Any, ...]:
        """Tell a shape from others: of a key, the newest clean record is the one that counts."""
        return (*self.family, *self.shape, self.layout)


@dataclass(frozen=True)
class StreamRecord(_Measured):
    """A workload that is bound by memory, measured beside a copy of as many bytes in the same rounds.

    ``variant`` is "staged" (through shared memory, ``stages`` of a ring, 1 unpipelined) or "direct" (from
    global memory to registers). ``bytes_moved`` counts every input read once and every output written once;
    ``copy`` moves as many bytes between two buffers: torch's copy or its negation, whichever is faster (its
    label says which); ``torch`` is torch's own operator for the workload, None where it has none.
    """

    FILE: ClassVar[str] = "streams"

    workload: Name
    shape: Some[Extent]
    dtype: Dtype
    variant: Literal["staged", "direct"]
    stages: Stages
    config: str
    bytes_moved: Annotated[int, msgspec.Meta(ge=1)]
    flops: Count
    timing: Timing
    copy: Timing
    torch: Timing | None
    verification: Verification
    resources: Resources
    barriers: Count
    cp_async: Count
    bound: Bound
    schema: Literal[1] = 1
    notes: tuple[str, ...] = ()

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
        """Tell a row from others: of a key, the newest clean record is the one that counts."""
        return (self.environment.gpu, self.workload, self.shape, self.dtype, self.variant, self.stages)


@dataclass(frozen=True)
class Timeline(_OfKernel, _Measured):
    """One block's life in one launch, by time stamps that its roles left (:mod:`kernels.stamps`).

    ``block`` of ``blocks`` ran on ``multiprocessor``; ``durations_ns`` are its durations in all runs, of which number
    ``kept`` is told by ``tracks``. ``clock_mhz`` is the multiprocessor's clock by ``%globaltimer``, over all
    runs. ``plain`` and ``stamped`` time launches without and with stamps in the same rounds: what
    stamping costs.
    """

    FILE: ClassVar[str] = "timelines"

    out_dtype: Dtype
    block: Count
    blocks: Count
    multiprocessor: Count
    room: Count
    clock_mhz: float
    durations_ns: tuple[Annotated[float, msgspec.Meta(gt=0)], ...]
    kept: int
    tracks: tuple[Track, ...]
    plain: Timing
    stamped: Timing
    verification: Verification
    schema: Literal[1] = 1

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
        """Find when a role saw an event, by number; empty where it never did."""
        own = (track for track in self.tracks if (track.role, track.event) == (role, event))
        return next((track.moments for track in own), {})

    @property
    def family(self) -> tuple[Any, ...]:
        """Tell a case from others that differ in more than their stage count."""
        case = (self.environment.gpu, self.step, self.variant, self.tile)
        return (*case, self.dtype, self.out_dtype, self.layout, self.m, self.n, self.k)

    @property
    def key(self) -> tuple[Any, ...]:
        """Tell a case from others: of a key, the newest clean timeline is the one that counts."""
        return (*self.family, self.stages)


@dataclass(frozen=True)
class Listing(_Stored):
    """One step's schedule and generated code at a fixed shape; made without a GPU.

    ``text`` is the step's docstring, ``tir`` the scheduled TensorIR, ``cuda`` the generated kernel,
    ``why`` one sentence on what the generated code says about the variant's speed, ``pipeline`` the
    lists annotated on the k loop (statement names, stage, order, asynchronous stages), ``aspects`` what
    differs from step to step, by name ("shared memory", "barriers per k tile", ...).
    """

    step: Number
    step_name: Name
    title: str
    text: str
    variant: Name
    default_variant: bool
    shape: str
    dtype: Dtype
    layout: Layout
    tile: Tile
    stages: Stages
    arch: Arch
    tir: str
    cuda: str
    why: str
    code: CodeFacts
    resources: Resources | None
    pipeline: dict[str, Any]
    aspects: dict[str, str]
    schema: Literal[1] = 1

    def save(self, folder: Path) -> Path:
        """Write the listing as ``stepN-variant.json`` under ``folder``/listings."""
        name = path_name(f"step{self.step}-{self.variant}.json")
        return write_atomically(folder / "listings" / name, self.to_json())


@dataclass(frozen=True)
class Counters(_OfKernel, Line):
    """Hardware counters of one launch of a case, by name; see :mod:`harness.counters`."""

    FILE: ClassVar[str] = "counters"

    gpu: GpuName
    values: dict[Title, float]
    revision: str
    dirty: bool
    recorded_at: str
    command: str
    schema: Literal[1] = 1

    def __post_init__(self) -> None:
        check_time(self.recorded_at)

    @property
    def gpu_name(self) -> str:
        """The GPU that counted."""
        return self.gpu

    @property
    def rank(self) -> tuple[bool, str]:
        """Put counts of one key in order: by time alone."""
        return True, self.recorded_at

    @property
    def key(self) -> tuple[Any, ...]:
        """Tell a case from others: of a key, the newest counts are those that count."""
        case = (self.gpu, self.step, self.variant, self.tile, self.stages)
        return (*case, self.dtype, self.layout, self.m, self.n, self.k)


@dataclass(frozen=True)
class BadDraw(_Stored):
    """Name a draw that is neither right nor refused, by its number, and say what came of it."""

    number: int
    what: str
    text: str


@dataclass(frozen=True)
class Nests(_Stored):
    """Count what became of drawn loop nests, each run pipelined and not; see :mod:`lab.nests`.

    ``right``: the same bit for bit, ``emulated`` of them as CUDA in the emulator too; ``refused``, for ``reasons``;
    ``wrong``; ``failed`` to be lowered after they were accepted; ``lost`` with their process. ``features`` has these
    counts for each thing that makes nests hard.
    """

    command: str
    revision: str
    dirty: bool
    recorded_at: str
    seed: int
    nests: int
    right: int
    refused: int
    wrong: int
    failed: int
    lost: int
    emulated: int
    seconds: float
    features: dict[str, dict[str, int]]
    reasons: dict[str, int]
    bad: tuple[BadDraw, ...]
    schema: Literal[1] = 1


@dataclass(frozen=True)
class RuleDraws(_Stored):
    """Count what became of drawn functions and modules; see :mod:`lab.rule_draws`.

    ``right``: our rules took all functions, ``taken`` by which, and the result computes the same in the emulator;
    ``left``: they declined one for ``reasons``, and as dlight schedules it the result is right, too; ``wrong``;
    ``failed``: by an exception, or not compiled; ``lost`` with their process. ``features`` has these counts for each
    thing that draws are made of.
    """

    command: str
    revision: str
    dirty: bool
    recorded_at: str
    seed: int
    functions: int
    right: int
    left: int
    wrong: int
    failed: int
    lost: int
    seconds: float
    taken: dict[str, int]
    features: dict[str, dict[str, int]]
    reasons: dict[str, int]
    bad: tuple[BadDraw, ...]
    schema: Literal[1] = 1


@dataclass(frozen=True)
class Mutants(Line):
    """One run of ``ladder mutants``: generated CUDA, changed in one place each, in the emulator.

    ``seed`` draws the mutants, of ``steps``; one that is not caught has run in ``orders`` orders, or does the same as
    the unchanged text in some. ``subjects`` are the kernels, which mutants name by their number. ``refused`` were no
    CUDA any more and do not count. ``caught`` has what found mutants: a fault's kind, "wrong result", "hung" or
    "crashed". ``lived`` has those that nothing found, with a reason each: without one a mutant is harmful. All of them
    took ``seconds``, one after the other.
    """

    FILE: ClassVar[str] = "mutants"

    seed: Count
    steps: Some[Number]
    orders: Count
    jobs: Count
    subjects: Some[Title]
    refused: Count
    caught: dict[Title, tuple[CaughtMutant, ...]]
    lived: tuple[LivingMutant, ...]
    host_cpu: Title
    seconds: float
    revision: str
    dirty: bool
    recorded_at: str
    command: str
    schema: Literal[1] = 1

    def __post_init__(self) -> None:
        check_time(self.recorded_at)

    @property
    def gpu_name(self) -> str:
        """The emulator, in a GPU's place."""
        return "emulator"

    @property
    def rank(self) -> tuple[bool, str]:
        """Put runs of one key in order: those of a clean tree above those of a changed one, then by time."""
        return not self.dirty, self.recorded_at

    @property
    def key(self) -> tuple[Any, ...]:
        """Tell a run from others: of a key, the newest counts."""
        return (self.seed, self.steps)

    @property
    def runs(self) -> int:
        """Mutants that count."""
        return sum(map(len, self.caught.values())) + len(self.lived)

    @property
    def harmful(self) -> tuple[LivingMutant, ...]:
        """Those that lived without a reason."""
        return tuple(mutant for mutant in self.lived if not mutant.reason)


FIRST = "first"  # extent of the first input of a PyTorch model


@dataclass(frozen=True)
class ModelRecord(Line):
    """A whole model, or one layer of it, built by several sets of schedule rules and timed in the same rounds.

    ``extent`` names its free extent (tokens, a batch, rows; FIRST of a PyTorch model), ``value`` is what was given;
    ``symbolic`` says that one build took all values. ``bytes_moved`` counts input, parameters and output, each once (of
    a PyTorch model its parameters alone), ``flops`` those of its products. ``beside`` are torch's forms of it ("torch",
    "torch.compile", "torch, rest": without attention's products and softmax; of a linear layer, weights stored either
    way) and, of one layer, a copy of as many bytes.
    """

    FILE: ClassVar[str] = "models"

    model: Name
    extent: Name
    value: Extent
    symbolic: bool
    dtype: Dtype
    shape: Some[Extent]
    bytes_moved: Annotated[int, msgspec.Meta(ge=1)]
    flops: Count
    rules: Some[RulesTimed]
    beside: tuple[Peer, ...]
    method: Method
    environment: Environment
    command: str
    schema: Literal[1] = 1
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for made in self.rules:
            if (made.status == "measured") != (made.timing is not None and made.verification is not None):
                raise ValueError(f"rules {made.name} are {made.status}, with times or checks that do not fit")

    @property
    def key(self) -> tuple[Any, ...]:
        """Tell a case from others: of a key, the newest clean record is the one that counts."""
        return (self.environment.gpu, self.model, self.value, self.shape)

    @property
    def is_torchs(self) -> bool:
        """True of a PyTorch model as it came, whose case is the shape of its first input."""
        return self.extent == FIRST

    @property
    def case(self) -> str:
        """Say what was measured of the model: its free extent's value, or the shape of its first input."""
        return " × ".join(map(str, self.shape)) if self.is_torchs else f"{self.extent} {self.value}"

    def of_rules(self, name: str) -> RulesTimed | None:
        """Return what one set of rules made; None where it was not asked for."""
        return next((made for made in self.rules if made.name == name), None)

    def times(self, name: str) -> Timing | None:
        """Return the times of a set of rules, or of what stands beside; None without any."""
        made = self.of_rules(name) or next((peer for peer in self.beside if peer.name == name), None)
        return made.timing if made else None

    def ratio(self, name: str, *others: str) -> tuple[float, tuple[float, float]] | None:
        """Compare ``name``'s speed with that of the fastest of ``others``: the median of the rounds' ratios.

        With its 95 % interval, by the sign test. None where either has no times.
        """
        timings = [timing for other in others if (timing := self.times(other)) is not None]
        own = self.times(name)
        return _ratio(own, min(timings, key=lambda timing: timing.median_ms)) if own and timings else None

    def rest_ratio(self, name: str, other: str) -> tuple[float, tuple[float, float]] | None:
        """Compare what is no attention with torch's, in the same way."""
        made, beside = self.of_rules(name), self.times(other)
        return _ratio(made.rest, beside) if made and made.rest and beside else None

    def function_ratio(self, rules: str, own: FunctionTimed, other: str) -> tuple[float, tuple[float, float]] | None:
        """Compare a function's speed with that of another set of rules' function of its name; None without one."""
        made = self.of_rules(other) if other != rules else None
        found = next((each for each in made.functions if each.name == own.name), None) if made else None
        return _ratio(own.timing, found.timing) if found else None

    @property
    def gb_s(self) -> float:
        """Bytes moved in the time of our rules, in 10⁹ per second; 0 without any."""
        own = self.times("ladder")
        return self.bytes_moved / (own.median_ms * 1e6) if own else 0.0


def _ratio(own: Timing, other: Timing) -> tuple[float, tuple[float, float]]:
    ratios = own.ratios_to(other)
    return statistics.median(ratios), median_interval(ratios)


@dataclass(frozen=True)
class TunedConfig(_OfProduct, Line, _BesideCublas):
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

    FILE: ClassVar[str] = "tuned"

    out_dtype: Dtype
    math: Math
    arch: Arch
    winner: Candidate
    runner_up: Candidate | None
    verdict: Literal["confirmed", "tie", "alone"]
    margin_pct: float | None
    margin_interval_pct: tuple[float, ...]
    default: str
    confirmation: Annotated[tuple[Timing, ...], msgspec.Meta(min_length=3)]
    legal: Count
    candidates: tuple[Candidate, ...]
    space: Space
    space_digest: str
    kernels_digest: str
    budget_s: float | None
    method: Method
    environment: Environment
    command: str
    schema: Literal[1] = 1

    def __post_init__(self) -> None:
        if self.default not in [timing.label for timing in self.confirmation]:
            raise ValueError(f"the default configuration {self.default[:100]!r} is not in the confirmation")
        margins = 0 if self.verdict == "alone" else 2
        if (self.margin_pct is not None) != bool(margins) or len(self.margin_interval_pct) != margins:
            raise ValueError(f"a verdict {self.verdict!r} with {self.margin_pct} {self.margin_interval_pct} margins")

    @property
    def seen(self) -> int:
        """Count the legal candidates that were built; fewer than ``legal`` where a budget stopped the search."""
        return sum(candidate.status != "illegal" for candidate in self.candidates)

    @property
    def timing(self) -> Timing:
        """The winner's times in the confirmation."""
        return self.confirmation[0]

    @property
    def baseline(self) -> tuple[Timing, ...]:
        """Times of cuBLAS's forms in the confirmation."""
        return self.confirmation[-2:]

    @property
    def gain_over_default_pct(self) -> float:
        """Compare the winner's speed with that of the step's default configuration; 0 where that is the winner."""
        default = next(timing for timing in self.confirmation if timing.label == self.default)
        return 100 * (default.median_ms / self.time_ms - 1)

    @property
    def rank(self) -> tuple[bool, str]:
        """Put searches of one key in order: by time alone, as a search in a changed tree is what that tree uses."""
        return True, self.environment.recorded_at

    @property
    def key(self) -> tuple[Any, ...]:
        """Tell a case from others: of a key, the newest search counts."""
        case = (self.environment.gpu, self.step, self.m, self.n, self.k)
        return (*case, self.layout, self.dtype, self.out_dtype)


@dataclass(frozen=True)
class FleetRun(Line):
    """One tuning over several GPUs: how long it took, builds included, and what it was stopped by and went on from.

    ``gpu_uuids`` are those that measured; ``searches`` are steps' shapes, ``timed`` their candidates that were timed in
    this run, ``known`` those that an earlier one had timed. ``build_jobs`` processes built. ``lost``: how often a
    process ended before it answered, and its work was done again. ``wall_s`` begins with the command, of which
    ``starting_s`` are until the first measurement. Since then each GPU took ``measuring_s``, of which ``checking_s``
    were for checking outputs, and waited for something to measure for ``waiting_s``.
    """

    FILE: ClassVar[str] = "fleet"

    gpu: GpuName
    gpu_uuids: tuple[Title, ...]
    build_jobs: Count
    searches: Count
    timed: Count
    known: Count
    lost: Count
    wall_s: Annotated[float, msgspec.Meta(gt=0)]
    measuring_s: tuple[float, ...]
    versions: dict[str, str]
    revision: str
    dirty: bool
    recorded_at: str
    command: str
    schema: Literal[1] = 1
    starting_s: float = 0.0
    checking_s: tuple[float, ...] = ()
    waiting_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_time(self.recorded_at)

    @property
    def gpu_name(self) -> str:
        """The GPUs' name, which they share."""
        return self.gpu

    @property
    def rank(self) -> tuple[bool, str]:
        """Put runs of one key in order: by time."""
        return not self.dirty, self.recorded_at

    @property
    def key(self) -> tuple[Any, ...]:
        """Tell a run from others: all count."""
        return (self.gpu, self.recorded_at)


def shape_text(shape: Iterable[int]) -> str:
    """Write a shape as options, file names and tables write it: ``1024x512x256``."""
    return "x".join(map(str, shape))


def now() -> str:
    """Tell the time as records write it: UTC, ISO 8601, to the millisecond."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")
