"""What was measured, as a lesson's charts and tables: what a step brought, its stages, and the latency model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from tensorir_ladder.harness.models.time import TilePrediction, instruction_ceiling, tile_times
from tensorir_ladder.harness.records import Record
from tensorir_ladder.reports.cases import shape_label, shape_of, slug
from tensorir_ladder.reports.cells import NOT_MEASURED, Table, own_and_cublas, percent
from tensorir_ladder.reports.selection import Results, Section
from tensorir_ladder.reports.sweeps import StageSweep, StreamSweep, stage_sweeps
from tensorir_ladder.reports.web.charts import chart
from tensorir_ladder.reports.web.lessons.facts import Facts
from tensorir_ladder.steps.step import Step

THIS, BEFORE = "this step", "the step before"


def brought_chart(results: Results, step: int, gpu: str) -> Markup | None:
    """Draw a step's ratio to cuBLAS over sizes, beside that of the step before; None where none was measured."""
    rows = []
    for section in _ladders(results, step):
        for size in section.sizes():
            for name, number in ((BEFORE, step - 1), (THIS, step)):
                record = section.pick(number, "default", size)
                if record and record.verification.passed:
                    rows.append(_ratio_row(section, name, record))
    if not any(row["of"] == THIS for row in rows):
        return None
    names = [name for name in (BEFORE, THIS) if any(row["of"] == name for row in rows)]
    shapes = {"step": {"field": "of", "type": "nominal", "title": None, "sort": names}}
    spec = {
        "data": {"values": rows},
        "height": 300,
        "encoding": {
            "x": {
                "field": "size",
                "type": "ordinal",
                "title": "m = n = k",
                "axis": {"labelAngle": 0},
            },
            "color": {
                **shapes["step"],
                "scale": {"domain": names, "range": ["var(--series-6)", "var(--series-1)"][-len(names) :]},
            },
        },
        "layer": [
            {
                "data": {"values": [{"cublas": 1}]},
                "mark": {"type": "rule", "strokeDash": [5, 4], "color": "var(--quiet)"},
                "encoding": {"y": {"field": "cublas", "type": "quantitative"}, "x": None, "color": None},
            },
            {
                "mark": {"type": "rule", "strokeWidth": 5, "opacity": 0.35},
                "encoding": {"y": {"field": "low", "type": "quantitative"}, "y2": {"field": "high"}},
            },
            {"mark": {"type": "line"}, "encoding": {"y": {"field": "ratio", "type": "quantitative"}}},
            {
                "mark": {"type": "point"},
                "encoding": {
                    "y": {"field": "ratio", "type": "quantitative", "title": "speed over cuBLAS's"},
                    "shape": {**shapes["step"], "legend": None},
                    "tooltip": [
                        {"field": "of", "title": "of"},
                        {"field": "size", "title": "m = n = k"},
                        {"field": "ratio", "title": "over cuBLAS", "format": ".3f"},
                        {"field": "tflops", "title": "TFLOPS", "format": ".1f"},
                        {"field": "cublas", "title": "cuBLAS, TFLOPS", "format": ".1f"},
                        {"field": "tile", "title": "tile"},
                    ],
                },
            },
        ],
    }
    own = [row for row in rows if row["gpu"] == slug(gpu)]
    said = ", ".join(f"{row['ratio']:.2f} at {row['size']}" for row in own if row["of"] == THIS)
    return chart(
        spec,
        title=f"What step {step} brought: speed over cuBLAS's in the same rounds",
        alt=f"Step {step} on {gpu}, of cuBLAS's speed: {said}. Beside it the step before, where it was measured.",
        note="Default tiles; thick strokes: 95 % intervals. The dashed line is cuBLAS.",
        columns={
            "of": "of",
            "size": "m = n = k",
            "ratio": "ratio",
            "tflops": "TFLOPS",
            "cublas": "cuBLAS, TFLOPS",
            "tile": "tile",
        },
        picked={"gpu": slug(gpu)},
    )


def _ladders(results: Results, step: int) -> list[Section]:
    ieee = [s for s in results.sections() if s.math == "ieee" and s.layout == "nn" and s.dtype != "bfloat16"]
    return [section for section in ieee if step in section.steps]


def _ratio_row(section: Section, name: str, record: Record) -> dict[str, Any]:
    low, high = record.ratio_interval
    ratio = record.ratio_to_cublas
    return {
        "gpu": slug(section.gpu),
        "of": name,
        "size": record.m,
        "ratio": round(ratio, 4),
        "low": round(low, 4),
        "high": round(high, 4),
        "tflops": round(record.gflops / 1e3, 3),
        "cublas": round(record.gflops / ratio / 1e3, 3),
        "tile": record.tile,
    }


def stages_chart(facts: Facts, step: int, wanted: Sequence[str] = ()) -> Markup | None:
    """Draw a step's speed over stages, in percent of cuBLAS's, a line per variant and tile; None without a sweep.

    A choice of the page, "size", says for which shape; ``wanted`` are the shapes shown, all that were swept by default.
    """
    section = facts.section(step)
    sweeps = [sweep for sweep in (stage_sweeps(section) if section else []) if sweep.step == step]
    if wanted:
        sweeps = [sweep for sweep in sweeps if sweep.size in wanted]
    if not sweeps:
        return None
    rows = [
        {
            "size": sweep.size,
            "case": f"{sweep.variant}, {sweep.tile}",
            "stages": stages,
            "percent": round(100 * record.ratio_to_cublas, 2),
            "us": round(1e3 * record.time_ms, 2),
            "blocks": used.blocks_per_sm if (used := record.resources) else None,
        }
        for sweep in sweeps
        for stages, record in _by_stages(sweep).items()
    ]
    spec = {
        "data": {"values": rows},
        "height": 280,
        "mark": {"type": "line", "point": True},
        "encoding": {
            "x": {"field": "stages", "type": "ordinal", "title": "stages", "axis": {"labelAngle": 0}},
            "y": {
                "field": "percent",
                "type": "quantitative",
                "title": "% of cuBLAS in the same rounds",
                "scale": {"zero": True},
            },
            "color": {"field": "case", "type": "nominal", "title": None, "legend": {"columns": 1}},
            "shape": {"field": "case", "type": "nominal", "legend": None},
            "tooltip": [
                {"field": "case", "title": "of"},
                {"field": "stages", "title": "stages"},
                {"field": "percent", "title": "% of cuBLAS"},
                {"field": "us", "title": "µs a launch"},
                {"field": "blocks", "title": "blocks per multiprocessor"},
            ],
        },
    }
    best = ", ".join(f"{s.size}, {s.variant}, {s.tile}: {s.best}" for s in sweeps)
    return chart(
        spec,
        title=f"Step {step} over stages, {facts.gpu}",
        alt=f"Speed over stages in percent of cuBLAS's. Fastest stages, by size and case: {best}.",
        note="torch's matmul is cuBLAS: percent of it are percent of torch, without torch's own time on the host.",
        columns={
            "size": "size",
            "case": "variant, tile",
            "stages": "stages",
            "percent": "% of cuBLAS",
            "us": "µs",
            "blocks": "blocks per multiprocessor",
        },
        picked={"size": first_size([row["size"] for row in rows])},
    )


def first_size(sizes: Iterable[str]) -> str:
    """Choose the size that a chart shows first: 1024 where it was swept."""
    found = list(sizes)
    return "1024" if "1024" in found else found[0]


def swept_sizes(facts: Facts, step: int) -> dict[str, str]:
    """Map the shapes at which a step was swept over stages to their names, for a choice of the page."""
    section = facts.section(step)
    sweeps = [sweep for sweep in (stage_sweeps(section) if section else []) if sweep.step == step]
    return {sweep.size: sweep.size + "³" * (len(set(sweep.shape)) == 1) for sweep in sweeps}


def _by_stages(sweep: StageSweep) -> dict[int, Record]:
    return {record.stages: record for record in sweep.records if record.verification.passed}


@dataclass(frozen=True)
class Latency:
    """The arithmetic of one swept case: what a k tile's load and multiplication take on one multiprocessor.

    ``resident`` blocks share it, ``rounds`` times one after the other; each goes through ``k_tiles``.
    """

    gpu: str
    sweep: StageSweep
    load_ns: float
    compute_ns: float
    resident: int
    rounds: int
    k_tiles: int

    def predicted(self, stages: int) -> TilePrediction:
        """Return the first-order prediction for a number of stages."""
        return TilePrediction(self.load_ns, self.compute_ns, self.resident, stages)

    @property
    def fewest(self) -> int:
        """The fewest stages that hide a load behind the multiplications before it, by the model alone."""
        return 1 + math.ceil(self.load_ns / (self.resident * self.compute_ns))

    @property
    def measured_ns(self) -> float:
        """The time from one k tile to the next as measured at the fastest stage count: all that a tile costs."""
        return 1e6 * self.sweep.times_ms[self.sweep.best] / (self.k_tiles * self.rounds)

    @property
    def fewest_measured(self) -> int:
        """The fewest stages that hide a load behind what a k tile was measured to cost."""
        return 1 + math.ceil(self.load_ns / self.measured_ns)


def latency_of(facts: Facts, step: Step, variant: str, tile: str, size: str) -> Latency | None:
    """Work out a swept case; None where it was not swept, or the GPU's rates were not measured."""
    sweep, rates = facts.sweep(step.number, variant, tile, size), facts.rates
    if sweep is None or rates is None:
        return None
    own, dtype = step.tile(variant, tile), sweep.section.dtype
    ceiling = instruction_ceiling(rates, type(own), sweep.section.math)
    used = next((record.resources for record in sweep.records if record.resources), None)
    if ceiling is None or used is None:
        return None
    load, compute = tile_times(own, dtype, rates, ceiling)
    resident = min(used.blocks_per_sm, -(-used.blocks // rates.sms))
    rounds = -(-used.blocks // (resident * rates.sms))
    return Latency(facts.gpu, sweep, load, compute, resident, rounds, -(-sweep.shape[2] // own.block_k))


def latency_table(latency: Latency) -> Table:
    """Make a row per stage count: textbook, n stages, the depth model and what was measured, per k tile."""
    rows = []
    for stages, time in latency.sweep.times_ms.items():
        told = latency.predicted(stages)
        textbook = told.sequential_ns if stages == 1 else max(told.load_ns, told.resident_blocks * told.compute_ns)
        with_ring = told.sequential_ns if stages == 1 else told.pipelined_ns
        first = latency.sweep.times_ms.get(1)
        forecast = latency.sweep.predicted_ms(stages)
        rows.append(
            (
                str(stages),
                f"{textbook:,.0f}",
                f"{with_ring:,.0f}",
                NOT_MEASURED if forecast is None else f"{1e3 * forecast:,.1f}",
                f"{1e3 * time:,.1f}",
                NOT_MEASURED if first is None else percent(100 * (first / time - 1), "+.0f"),
                percent(100 * (latency.predicted(1).sequential_ns / with_ring - 1), "+.0f"),
            )
        )
    header = ("stages", "max(load, compute), ns", "n stages, ns", "depth model, µs", "measured, µs")
    header += ("gain measured", "gain by n stages")
    sweep = latency.sweep
    note = f"Step {sweep.step} {sweep.variant}, {sweep.size}³ on {latency.gpu}, tile {sweep.tile}. Load "
    note += f"{latency.load_ns:,.0f} ns, compute {latency.compute_ns:,.0f} ns, {latency.resident} resident "
    note += f"block{'s' * (latency.resident > 1)}, {latency.k_tiles} k tiles; ns are per k tile, µs per launch. "
    note += "n stages: max(load / (n − 1), blocks · compute). One stage: load + compute, or the blocks' arithmetic."
    return Table(f"{sweep.size}³", header, tuple(rows), note)


def streams_table(sweeps: Sequence[StreamSweep]) -> Table:
    """Make a row per memory-bound workload and size: bandwidth by stages, and that of the form that stages nothing."""
    counts = sorted({stages for sweep in sweeps for stages in sweep.times_ms})
    rows = [
        (
            sweep.workload.replace("_", " "),
            sweep.size,
            *(f"{sweep.bandwidth_gb_s(t):,.0f}" if (t := sweep.times_ms.get(n)) else NOT_MEASURED for n in counts),
            f"{sweep.direct.gb_s:,.0f}" if sweep.direct else NOT_MEASURED,
            f"{sweep.copy_gb_s:,.0f}",
        )
        for sweep in sweeps
    ]
    header = ("workload", "size", *(f"{n} stage{'s' * (n > 1)}" for n in counts), "nothing staged", "a copy")
    return Table("Memory-bound workloads, GB/s", header, tuple(rows), "GB/s of compulsory traffic.", left=2)


def variants_rows(facts: Facts, step: Step, size: int) -> Table | None:
    """Make a row per variant of a step at a size, fastest first; None where fewer than two were measured."""
    found = [(name, facts.record(step.number, size, name)) for name in step.variant_names]
    measured = sorted(((n, r) for n, r in found if r), key=lambda pair: -pair[1].ratio_to_cublas)
    if len(measured) < 2:
        return None
    rows = tuple(
        (
            name,
            f"{r.ratio_to_cublas:.3f}",
            own_and_cublas(r),
            percent(r.improvement_over_previous_pct, "+.1f"),
            str(r.resources.registers) if r.resources else NOT_MEASURED,
            str(r.code.barriers) if r.code else NOT_MEASURED,
        )
        for name, r in measured
    )
    header = ("variant", "ratio to cuBLAS", "TFLOPS / cuBLAS's", "gain over the step before")
    header += ("registers", "barriers per k tile")
    shape = shape_label(shape_of(measured[0][1]))
    return Table(
        f"Variants at {shape}³, {facts.gpu}",
        header,
        rows,
        "Default tile and stages; each beside the cuBLAS of its own rounds.",
    )
