"""Stage sweeps as rows and tables: what each stage brings and costs, and what stands beside it."""

from __future__ import annotations

from typing import Any

from tensorir_ladder.harness.records import Record
from tensorir_ladder.reports.cells import NOT_MEASURED, NOT_VERIFIED, Table, number, occupancy_text
from tensorir_ladder.reports.judgement import is_held_out
from tensorir_ladder.reports.sweeps import CLOSE_PCT, StageSweep, StreamSweep, speed_lost_pct
from tensorir_ladder.reports.table import gflops
from tensorir_ladder.reports.templating import Markdown

USED = ("smem_bytes", "registers", "blocks_per_sm", "occupancy", "occupancy_limit")


def rows(sweep: StageSweep) -> list[dict[str, Any]]:
    """Return a sweep as rows of ``sweep --json``, one per stage count."""
    return [_row(sweep, record) for record in sweep.records]


def tradeoff_table(sweep: StageSweep) -> Table:
    """Tabulate what each stage count of one case brings and what it costs, a row each."""
    header = ("stages", "GFLOPS", "of cuBLAS", "model's GFLOPS", "shared bytes", "registers", "blocks per SM")
    header += ("occupancy", "barriers per k tile", "latency hidden (model)", "one more stage costs", "")
    grid = [
        (
            str(row["stages"]),
            f"{row['gflops']:,.0f}" if row["verified"] else NOT_VERIFIED,
            f"{row['ratio_to_cublas']:.0%}" if row["verified"] else NOT_VERIFIED,
            number(row["predicted_gflops"]),
            number(row["smem_bytes"]),
            number(row["registers"]),
            number(row["blocks_per_sm"]),
            occupancy_text(sweep.resources(row["stages"])),
            number(row["barriers"]),
            number(row["latency_hidden"], ".0%"),
            _cost_of_next(row),
            _mark(row),
        )
        for row in rows(sweep)
    ]
    return Table(f"{sweep.section.title}: {sweep.case}, {sweep.size}", header, tuple(grid), _tradeoff_note(sweep))


def streams_table(sweeps: list[StreamSweep]) -> Table:
    """Make a row per memory-bound workload and size: GB/s by stage count, the direct form and torch beside."""
    counts = sorted({record.stages for sweep in sweeps for record in sweep.records})
    grid = [
        (
            sweep.workload,
            sweep.size,
            *(_stream_cell(sweep, stages) for stages in counts),
            number(sweep.direct.gb_s if sweep.direct else None),
            number(sweep.torch_gb_s),
            number(sweep.copy_gb_s),
            f"{max(record.ratio_to_copy for record in sweep.everything if record.verification.passed):.0%}",
        )
        for sweep in sweeps
    ]
    header = ("workload", "size", *(f"{stages} stage{'s' * (stages > 1)}" for stages in counts))
    note = "GB/s, every input counted once and every output once; bold: the fastest staged form. Of the copy: the "
    note += "fastest form, staged or direct, over a copy of as many bytes in the same rounds."
    return Table("Overview", (*header, "direct", "torch", "copy", "of the copy"), tuple(grid), note, left=2)


def _row(sweep: StageSweep, record: Record) -> dict[str, Any]:
    stages, used, passed = record.stages, record.resources, record.verification.passed
    after = next((r.resources for r in sweep.records if r.stages == stages + 1), None) if used else None
    predicted, forecast = sweep.predicted_ms(stages), sweep.forecast
    return {
        **{name: getattr(record, name) for name in ("step", "variant", "tile", "m", "n", "k", "dtype", "layout")},
        "gpu": record.environment.gpu,
        "stages": stages,
        "verified": passed,
        **{name: getattr(record, name) if passed else None for name in ("time_ms", "gflops", "ratio_to_cublas")},
        "predicted_gflops": gflops(sweep.shape, predicted) if predicted else None,
        **{name: getattr(used, name) if used else None for name in USED},
        "barriers": record.code.barriers if record.code else None,
        "latency_hidden": sweep.latency_hidden(stages),
        "next_stage_smem_bytes": after.smem_bytes - used.smem_bytes if after else None,
        "next_stage_occupancy_lost": used.occupancy - after.occupancy if after else None,
        "best": stages == sweep.best,
        "held_out": is_held_out(sweep),
        "recommended": forecast is not None and stages == forecast.recommended,
        "speed_lost_to_best_pct": speed_lost_pct(record.time_ms, sweep.times_ms[sweep.best]) if passed else None,
        "bound": record.bound,
        "recorded_at": record.environment.recorded_at,
    }


def _tradeoff_note(sweep: StageSweep) -> str:
    note = f"cuBLAS: {gflops(sweep.shape, sweep.cublas_ms):,.0f} GFLOPS, "
    together = len({record.baseline for record in sweep.records}) == 1
    times = [record.fastest_baseline.median_ms for record in sweep.records]
    drift = 100 * (max(times) / min(times) - 1)  # a comparison of two of these records cannot see less
    note += "in the same rounds. " if together else f"moving by {drift:.1f} % between these records. "
    note += "One more stage: shared memory of a block, occupancy in percentage points."
    if sweep.forecast is None:
        return note + " No forecast of the depth model is stored with these records."
    note += " Latency hidden: the share of a load's round trip during which the multiprocessor has other work. By the "
    note += f"model the fewest stages that hide all of it are {sweep.forecast.fewest}; {sweep.forecast.most} fit."
    recommended = sweep.forecast.recommended
    if recommended not in sweep.times_ms:
        note += f" The recommended {recommended} stages were not measured."
    return note


def _mark(row: dict[str, Any]) -> str:
    lost = row["speed_lost_to_best_pct"]
    marks = ["best"] if row["best"] else []
    if row["recommended"] and lost is not None:
        close = f"{'within' if lost <= CLOSE_PCT else 'NOT within'} {CLOSE_PCT:g} % of the best (−{lost:.1f} %)"
        marks.append("recommended" if row["best"] else f"recommended, {close}")
    return ", ".join(marks)


def _cost_of_next(row: dict[str, Any]) -> str:
    if row["next_stage_smem_bytes"] is None:
        return NOT_MEASURED
    lost = 100 * row["next_stage_occupancy_lost"]
    return f"{row['next_stage_smem_bytes']:+,} B, {f'−{lost:.0f}' if round(lost) > 0 else f'+{abs(lost):.0f}'} points"


def _stream_cell(sweep: StreamSweep, stages: int) -> str:
    if stages not in sweep.times_ms:
        return NOT_VERIFIED if any(record.stages == stages for record in sweep.records) else NOT_MEASURED
    speed = number(sweep.bandwidth_gb_s(sweep.times_ms[stages]))
    return Markdown("**{}**").format(speed) if stages == sweep.best else speed
