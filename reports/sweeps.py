"""Stage sweeps: one case measured at several stage counts, and what follows from its records together.

A matrix product is swept by records whose tile was given by hand; a memory-bound workload by its staged
records, with its direct form (nothing staged at all) beside them. Both answer the same questions.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from tensorir_ladder.harness.commands.values import UsageError
from tensorir_ladder.harness.records import DepthForecast, Record, Resources, StreamRecord
from tensorir_ladder.reports.cases import Shape, grouped, natural, shape_label, shape_of, slug
from tensorir_ladder.reports.selection import Results, Section

TIE_PCT = 1.0  # speeds closer than this are a tie, which the fewer stages win
CLOSE_PCT = 2.0  # how much speed a recommended depth may lose to the best one and still be called right
MIB = 2**20


@dataclass(frozen=True)
class StreamSection:
    """Memory-bound records that may stand in one table or plot: one GPU, one dtype."""

    gpu: str
    dtype: str

    @property
    def title(self) -> str:
        """Say in words what is shown, GPU first."""
        return f"{self.gpu}, {self.dtype}"

    @property
    def slug(self) -> str:
        """Write what is drawn as part of a file name."""
        return slug(self.gpu, self.dtype)


class StagedRecords:
    """Answers that both kinds of sweep give. ``records`` are those of one case, a stage count each, fewest first."""

    records: tuple[Record, ...] | tuple[StreamRecord, ...]
    direct: StreamRecord | None = None

    @property
    def everything(self) -> tuple[Record, ...] | tuple[StreamRecord, ...]:
        """The staged records, then the direct one if it was measured."""
        return (*self.records, *([self.direct] if self.direct else []))

    @property
    def times_ms(self) -> dict[int, float]:
        """Median time by stage count, of records that passed their check."""
        return {r.stages: r.timing.median_ms for r in self.records if r.verification.passed}

    @property
    def best(self) -> int:
        """The fastest stage count."""
        return min(self.times_ms, key=lambda stages: self.times_ms[stages])

    @property
    def preferred(self) -> int:
        """The fewest stages that are as fast as the best, up to a tie."""
        return fewest_within_tie(self.times_ms)

    @property
    def gain_over_one_pct(self) -> float | None:
        """Speed gained by the preferred stage count over one stage; None where one was not measured."""
        return speed_gain_pct(self.times_ms.get(1), self.times_ms[self.preferred])

    @property
    def direct_ms(self) -> float | None:
        """The time of the form that stages nothing; None where there is none."""
        return self.direct.timing.median_ms if self.direct else None

    @property
    def gain_over_direct_pct(self) -> float | None:
        """Speed gained by the preferred stage count over the direct form; None where there is none."""
        return speed_gain_pct(self.direct_ms, self.times_ms[self.preferred])

    def resources(self, stages: int) -> Resources | None:
        """Return the resources of the kernel with that many stages; None if unknown or not measured."""
        return next((record.resources for record in self.records if record.stages == stages), None)

    def bound(self, stages: int) -> str:
        """Return the bound that the record with that many stages names."""
        return next(record.bound for record in self.records if record.stages == stages)


@dataclass(frozen=True)
class StageSweep(StagedRecords):
    """One step's variant on one shape with one tile, at several stage counts."""

    section: Section
    step: int
    variant: str
    default_variant: bool
    tile: str
    shape: Shape
    records: tuple[Record, ...]

    @property
    def size(self) -> str:
        """Write the shape in words."""
        return shape_label(self.shape)

    @property
    def case(self) -> str:
        """Step, variant and tile: what a table or figure over shapes is of."""
        return f"step {self.step}, {self.variant}, tile {self.tile}"

    @property
    def forecast(self) -> DepthForecast | None:
        """The depth model's forecast, from the newest record that carries one."""
        by_age = sorted(self.records, key=lambda record: record.environment.recorded_at, reverse=True)
        return next((record.depth for record in by_age if record.depth is not None), None)

    @property
    def cublas_ms(self) -> float:
        """cuBLAS's time: the median over the records, each with its faster form."""
        return statistics.median(record.fastest_baseline.median_ms for record in self.records)

    def predicted_ms(self, stages: int) -> float | None:
        """Return the model's time for a stage count; None without a forecast, or where it does not fit."""
        times = self.forecast.time_ms if self.forecast else ()
        return times[stages - 1] if stages <= len(times) else None

    def latency_hidden(self, stages: int) -> float | None:
        """Return the share of the load's latency that the model calls hidden, None where it says nothing."""
        shares = self.forecast.hidden if self.forecast else ()
        return shares[stages - 1] if stages <= len(shares) else None


@dataclass(frozen=True)
class StreamSweep(StagedRecords):
    """One memory-bound workload of one size, staged at several stage counts, and its direct form."""

    section: StreamSection
    workload: str
    shape: tuple[int, ...]
    bytes_moved: int
    records: tuple[StreamRecord, ...]
    direct: StreamRecord | None

    @property
    def size(self) -> str:
        """Write the shape in words."""
        return f"{'x'.join(map(str, self.shape))} ({bytes_label(self.bytes_moved)})"

    def bandwidth_gb_s(self, time_ms: float) -> float:
        """Compute the rate at which a time moves the workload's bytes."""
        return self.bytes_moved / (time_ms * 1e6)

    @property
    def copy_gb_s(self) -> float:
        """The copy's rate over as many bytes: the median over the records, same rounds as each."""
        return statistics.median(self.bandwidth_gb_s(record.copy.median_ms) for record in self.everything)

    @property
    def torch_gb_s(self) -> float | None:
        """The rate of torch's own operator, as :attr:`copy_gb_s`; None where it has none."""
        rates = [self.bandwidth_gb_s(r.torch.median_ms) for r in self.everything if r.torch]
        return statistics.median(rates) if rates else None


def has_sweeps(results: Results) -> bool:
    """Tell if anything was swept over stages."""
    return bool(stream_sweeps(results) or product_sweeps(results))


def product_sweeps(results: Results) -> list[StageSweep]:
    """Return all sweeps of products, section by section."""
    return [sweep for section in results.sections() for sweep in stage_sweeps(section)]


def stage_sweeps(section: Section) -> list[StageSweep]:
    """Return the section's sweeps: given tiles with at least two stage counts, one of them verified."""

    def order(record: Record) -> tuple:
        case = (record.step, not record.default_variant, natural(record.variant), natural(record.tile))
        return (*case, math.prod(shape_of(record)), shape_of(record), record.stages)

    given = sorted((record for record in section.records if record.tile_choice == "given"), key=order)
    cases = grouped(given, lambda r: (r.step, r.variant, r.default_variant, r.tile, shape_of(r)))
    found = [StageSweep(section, *case, tuple(records)) for case, records in cases.items()]
    return [sweep for sweep in found if len(sweep.records) > 1 and sweep.times_ms]


def stream_sweeps(results: Results) -> list[StreamSweep]:
    """Return the memory-bound workloads measured staged, by section, workload and bytes."""
    cases = grouped(results.streams, lambda r: (r.environment.gpu, r.dtype, r.workload, r.bytes_moved, r.shape))
    found = []
    for (gpu, dtype, workload, bytes_moved, shape), group in sorted(cases.items()):
        staged = tuple(sorted((r for r in group if r.variant == "staged"), key=lambda record: record.stages))
        direct = next((r for r in group if r.variant == "direct" and r.verification.passed), None)
        found.append(StreamSweep(StreamSection(gpu, dtype), workload, shape, bytes_moved, staged, direct))
    return [sweep for sweep in found if sweep.records and sweep.times_ms]


def unswept(section: Section, step: int) -> list[Record]:
    """Return a step's records that neither the ladder nor a stage sweep shows."""
    swept = {record.key for sweep in stage_sweeps(section) for record in sweep.records}
    return [record for record in section.others(step) if record.key not in swept]


def chosen_sweeps(sweeps: list[StageSweep], tile: str | None, size: str | None) -> list[StageSweep]:
    """Return the sweeps with a tile and of some sizes (``512,1024`` or ``MxNxK``); UsageError says which there are."""
    for option, wanted, known in (
        ("--tile", [tile] if tile else [], list(dict.fromkeys(sweep.tile for sweep in sweeps))),
        ("--size", size.split(",") if size else [], list(dict.fromkeys(sweep.size for sweep in sweeps))),
    ):
        if missing := [name for name in wanted if name.strip() not in known]:
            raise UsageError(f"{option} {missing[0]}: no stage sweep of it; there are {', '.join(known) or 'none'}")
    sizes = {name.strip() for name in size.split(",")} if size else {sweep.size for sweep in sweeps}
    chosen = [sweep for sweep in sweeps if sweep.tile == (tile or sweep.tile) and sweep.size in sizes]
    if not chosen:
        known = ", ".join(sweep.size for sweep in sweeps if sweep.tile == tile)
        raise UsageError(f"--tile {tile} --size {size}: no stage sweep of both; that tile was swept at {known}")
    return chosen


def fewest_within_tie(times_ms: Mapping[int, float]) -> int:
    """Return the fewest stages whose speed is within ``TIE_PCT`` of the fastest."""
    fastest = min(times_ms.values())
    return min(stages for stages, time in times_ms.items() if speed_lost_pct(time, fastest) <= TIE_PCT)


def speed_lost_pct(time_ms: float, fastest_ms: float) -> float:
    """Compute the speed lost by a time to the fastest, in percent of the fastest's speed."""
    return 100 * (1 - fastest_ms / time_ms)


def speed_gain_pct(before_ms: float | None, after_ms: float) -> float | None:
    """Compute the speed gained from one time to another in percent; None where the first was not measured."""
    return None if before_ms is None else 100 * (before_ms / after_ms - 1)


def bytes_label(count: int) -> str:
    """Write ``256 MiB``, or KiB below one MiB."""
    return f"{count / MIB:,.0f} MiB" if count >= MIB else f"{count / 1024:,.0f} KiB"
