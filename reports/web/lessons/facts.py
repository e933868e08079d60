"""Figures in a lesson's text: each is looked up in the records of one GPU, and says where it comes from."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from markupsafe import Markup

from tensorir_ladder.harness.models.rate_files import Rates, rates_of
from tensorir_ladder.harness.records import Counters, Record, Timeline
from tensorir_ladder.reports.advice import size_class
from tensorir_ladder.reports.cases import shape_label, shape_of
from tensorir_ladder.reports.selection import Results, Section
from tensorir_ladder.reports.sweeps import StageSweep, StreamSweep, stage_sweeps, stream_sweeps

NOT_MEASURED = "not measured"
HALF_FROM = 8  # the step from which the ladder is float16's


@dataclass(frozen=True)
class Facts:
    """Give what the records of one GPU say, by step and size, as marked-up numbers for a text.

    A size is the side of a square product. What nobody has measured reads "not measured" in its place.
    """

    results: Results
    gpu: str

    @cached_property
    def sections(self) -> list[Section]:
        """The GPU's ladders with B as stored."""
        return [s for s in self.results.sections() if s.gpu == self.gpu and s.layout == "nn"]

    def section(self, step: int, math: str = "ieee") -> Section | None:
        """Return the records among which a step's are, float32 for the first steps; None where there are none."""
        wanted = "float16" if step >= HALF_FROM and math == "ieee" else "float32"
        return next((s for s in self.sections if s.dtype == wanted and s.math == math), None)

    def record(self, step: int, size: int, variant: str | None = None, math: str = "ieee") -> Record | None:
        """Return a step's record with its default tile at a size."""
        section = self.section(step, math)
        found = section.pick(step, "default", (size, size, size), variant) if section else None
        return found if found and found.verification.passed else None

    def ratio(self, step: int, size: int, variant: str | None = None, math: str = "ieee") -> Markup:
        """Write a step's speed over cuBLAS's."""
        record = self.record(step, size, variant, math)
        return figure(record and record.ratio_to_cublas, ".2f", record_source(record))

    def gain(self, step: int, size: int, variant: str | None = None) -> Markup:
        """Write the speed gained over the step before, with the same tile and in the same rounds."""
        record = self.record(step, size, variant)
        gain = record.improvement_over_previous_pct if record else None
        return figure(gain, "+.0f" if gain is None or abs(gain) >= 5 else "+.1f", record_source(record), " %")

    def us(self, step: int, size: int, variant: str | None = None) -> Markup:
        """Write a launch's median time."""
        record = self.record(step, size, variant)
        return figure(record and 1e3 * record.time_ms, ",.1f", record_source(record), " µs")

    def tflops(self, step: int, size: int, variant: str | None = None) -> Markup:
        """Write a step's speed."""
        record = self.record(step, size, variant)
        return figure(record and record.gflops / 1e3, ",.1f", record_source(record), " TFLOPS")

    def over(self, step: int, size: int, variant: str, other: str) -> Markup:
        """Write the speed gained by one variant over another, each by its own ratio to cuBLAS."""
        pair = [self.record(step, size, name) for name in (variant, other)]
        if None in pair:
            return figure(None, "", "")
        own, base = pair
        gain = 100 * (own.ratio_to_cublas / base.ratio_to_cublas - 1)
        return figure(gain, "+.1f", f"{record_source(own)}; beside {base.variant}, by ratios to cuBLAS", " %")

    def counters(self, step: int, size: int, variant: str = "", tile: str = "") -> Counters | None:
        """Find the counters of a step at a size, of its default variant and whatever tile if none are named."""
        wanted = variant or self.results.default_variant(step)
        found = [
            c
            for c in self.results.counters
            if (c.gpu, c.step, c.variant) == (self.gpu, step, wanted) and shape_of(c) == (size, size, size)
        ]
        return next((c for c in found if tile in ("", c.tile)), None)

    def count(
        self, step: int, size: int, name: str, variant: str = "", tile: str = "", form: str = "", scale: float = 1
    ) -> Markup:
        """Write a hardware counter; ``scale`` divides it first."""
        found = self.counters(step, size, variant, tile)
        value = found.values.get(name) if found else None
        source = f"{name}: {found.gpu}, {found.command}, revision {found.revision[:12]}" if found else ""
        shown = None if value is None else value / scale
        return figure(shown, form or (",.0f" if shown and abs(shown) >= 100 else ".2f"), source)

    def sweep(self, step: int, variant: str, tile: str, size: str) -> StageSweep | None:
        """Find a sweep over stages; ``size`` is the shape in words, as ``1024`` or ``512x4096x1024``."""
        section = self.section(step)
        found = stage_sweeps(section) if section else []
        return next((s for s in found if (s.step, s.variant, s.tile, s.size) == (step, variant, tile, size)), None)

    def staged_us(self, step: int, variant: str, tile: str, size: str, stages: int) -> Markup:
        """Write the time at a number of stages."""
        sweep = self.sweep(step, variant, tile, size)
        time = sweep.times_ms.get(stages) if sweep else None
        return figure(
            None if time is None else 1e3 * time,
            ",.1f",
            f"{self.gpu}, step {step} {variant}, {tile}, {size}, {stages} stages",
            " µs",
        )

    def staged_gain(self, step: int, variant: str, tile: str, size: str, of: int, over: int) -> Markup:
        """Write the speed gained by a number of stages over another."""
        sweep = self.sweep(step, variant, tile, size)
        times = sweep.times_ms if sweep else {}
        gain = 100 * (times[over] / times[of] - 1) if {of, over} <= set(times) else None
        source = f"{self.gpu}, step {step} {variant}, {tile}, {size}: {of} stages against {over}"
        return figure(gain, "+.1f", source, " %")

    def resident(self, step: int, variant: str, tile: str, size: str, stages: int) -> Markup:
        """Write how many blocks a multiprocessor holds at a number of stages."""
        sweep = self.sweep(step, variant, tile, size)
        used = sweep.resources(stages) if sweep else None
        source = f"{self.gpu}, step {step} {variant}, {tile}, {stages} stages: registers and shared memory as compiled"
        return figure(used and used.blocks_per_sm, "d", source)

    @cached_property
    def streams(self) -> list[StreamSweep]:
        """The memory-bound workloads swept over stages."""
        return [sweep for sweep in stream_sweeps(self.results) if sweep.section.gpu == self.gpu]

    def streams_of(self, size: str) -> list[StreamSweep]:
        """Return the memory-bound sweeps of a class: small, medium or large."""
        return [sweep for sweep in self.streams if size_class(sweep) == size]

    @cached_property
    def rates(self) -> Rates | None:
        """Return what microbenchmarks measured of the GPU; None where none were kept."""
        arch = next((r.arch for s in self.sections for r in s.records if r.arch), "")
        return rates_of(arch, self.gpu) if arch else None

    def rate(self, name: str, form: str = ",.0f", unit: str = "", scale: float = 1) -> Markup:
        """Write one of the GPU's measured rates; ``scale`` divides it first."""
        value = getattr(self.rates, name, None)
        source = f"{self.gpu}: {name}, by ladder microbench"
        return figure(None if value is None else value / scale, form, source, unit)

    def timelines(self, step: int) -> list[Timeline]:
        """Return a step's timelines, fewest stages first."""
        found = [t for t in self.results.timelines if t.step == step and t.environment.gpu == self.gpu]
        return sorted(found, key=lambda timeline: timeline.stages)


def figure(value: float | None, form: str, source: str, unit: str = "") -> Markup:
    """Write a measured number with its unit; where it comes from shows on demand."""
    if value is None or not math.isfinite(value):
        return Markup('<span class="missing">{}</span>').format(NOT_MEASURED)
    shown = f"{value:{form}}".replace("-", "−")
    return Markup('<data class="figure" value="{}" title="{}">{}{}</data>').format(
        value, source, shown, unit.replace(" ", "\u202f")
    )


def record_source(record: Record | None) -> str:
    """Say what a record is of and where it was made."""
    if record is None:
        return ""
    made = record.environment
    size = shape_label(shape_of(record))
    return f"{made.gpu}, {size}, {record.variant}, tile {record.tile}, {record.stages} stages, {made.recorded_at[:10]}"


def reference_gpu(results: Results) -> str:
    """Name the GPU of which most kinds of records were made: the one that lessons speak of; empty without any."""
    kinds: Iterable[Iterable[str]] = (
        {c.gpu for c in results.counters},
        {t.environment.gpu for t in results.timelines},
        {s.environment.gpu for s in results.streams},
        {r.environment.gpu for r in results.records},
    )
    found = [gpu for kind in kinds for gpu in kind]
    return max(dict.fromkeys(found), key=found.count, default="")
