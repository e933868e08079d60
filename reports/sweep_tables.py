"""Stage sweeps as rows and tables: what each stage brings and costs, and what stands beside it."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from tensorir_ladder.harness.records import Record, Resources, StreamRecord
from tensorir_ladder.reports.judgement import is_held_out
from tensorir_ladder.reports.sweeps import (
    CLOSE_PCT,
    TIE_PCT,
    StagedRecords,
    StageSweep,
    StreamSweep,
    speed_gain_pct,
    speed_lost_pct,
)
from tensorir_ladder.reports.table import NOT_MEASURED, NOT_VERIFIED, Table, gflops, percent

USED = ("smem_bytes", "registers", "blocks_per_sm", "occupancy", "occupancy_limit")


def rows(sweep: StageSweep) -> list[dict[str, Any]]:
    """A sweep as rows of ``sweep --json``, one per stage count."""
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
            _number(row["predicted_gflops"]),
            _number(row["smem_bytes"]),
            _number(row["registers"]),
            _number(row["blocks_per_sm"]),
            _occupancy(sweep.resources(row["stages"])),
            _number(row["barriers"]),
            NOT_MEASURED if row["latency_hidden"] is None else f"{row['latency_hidden']:.0%}",
            _cost_of_next(row),
            _mark(row),
        )
        for row in rows(sweep)
    ]
    return Table(f"{sweep.section.title}: {sweep.case}, {sweep.size}", header, tuple(grid), _tradeoff_note(sweep))


def overview_table(sweeps: list[StageSweep]) -> Table:
    """One case over shapes: GFLOPS by stage count, the best in bold, the model's choice marked."""
    counts = sorted({record.stages for sweep in sweeps for record in sweep.records})
    grid = [
        (
            sweep.size,
            *(_overview_cell(sweep, stages) for stages in counts),
            str(sweep.preferred),
            percent(sweep.gain_over_one_pct),
            f"{sweep.record(sweep.best).ratio_to_cublas:.0%}",
        )
        for sweep in sweeps
    ]
    header = ("size", *_stage_headers(counts), "fewest as fast")
    note = f"GFLOPS; bold: the fastest; †: recommended by the model. Fewest as fast: within {TIE_PCT:g} % of the "
    note += "fastest. Gain: of those over 1 stage. Of cuBLAS: the fastest, over the faster cuBLAS form."
    return Table(sweeps[0].case, (*header, "gain over 1 stage", "of cuBLAS"), tuple(grid), note)


def variant_gains_table(sweeps: list[StageSweep]) -> Table | None:
    """Tabulate each variant's gain over the default one with the same tile and stages; None without a pair."""
    pairs = _variant_pairs(sweeps)
    if not pairs:
        return None
    counts = sorted({stages for _, own in pairs for stages in own.times_ms})
    grid = [
        (
            f"{own.step} {own.variant}",
            own.tile,
            own.size,
            *(percent(_gain_at(before, own, stages)) for stages in counts),
            percent(speed_gain_pct(before.times_ms[before.best], own.times_ms[own.best])),
        )
        for before, own in pairs
    ]
    header = ("step, variant", "tile", "size", *_stage_headers(counts))
    note = "Speed gained over the step's default variant with as many stages; last, each at its own best. "
    apart = [abs(gain) for gain in _identical_gains(pairs)]
    if apart:
        note += f"Where both are the same kernel, as without a pipeline, they differ by up to {max(apart):.1f} %. "
    together = all(_same_rounds(before, own) for before, own in pairs)
    note += "Measured in the same rounds." if together else "Not all of them were measured in the same rounds."
    return Table("Variants", (*header, "best to best"), tuple(grid), note, left=3)


def variant_sentences(sweeps: list[StageSweep]) -> list[str]:
    """For each variant that is not the default: its average gain, and where it is slower by more than a tie."""
    compared: dict[tuple[int, str], list[tuple[StageSweep, dict[int, float]]]] = {}
    for before, own in _variant_pairs(sweeps):
        gains = {
            stages: gain
            for stages in own.times_ms
            if not _same_kernel(before, own, stages) and (gain := _gain_at(before, own, stages)) is not None
        }
        if gains:
            compared.setdefault((own.step, own.variant), []).append((own, gains))
    return [_variant_sentence(step, variant, found) for (step, variant), found in compared.items()]


def _identical_gains(pairs: list[tuple[StageSweep, StageSweep]]) -> list[float]:
    """Differences between two measurements of the same kernel, wherever two variants are one."""
    return [
        gain
        for before, own in pairs
        for stages in own.times_ms
        if _same_kernel(before, own, stages) and (gain := _gain_at(before, own, stages)) is not None
    ]


def _same_kernel(before: StageSweep, own: StageSweep, stages: int) -> bool:
    cubins = {r.cubin_sha256 for sweep in (before, own) for r in sweep.records if r.stages == stages}
    return len(cubins) == 1 and stages in before.times_ms


def _same_rounds(before: StageSweep, own: StageSweep) -> bool:
    return len({record.baseline for sweep in (before, own) for record in sweep.records}) == 1


def streams_overview(sweeps: list[StreamSweep]) -> Table:
    """Memory-bound workloads by size: GB/s by stage count, the best in bold, the direct form and torch beside."""
    counts = sorted({record.stages for sweep in sweeps for record in sweep.records})
    grid = [
        (
            sweep.workload,
            sweep.size,
            *(_speed_cell(sweep, stages, sweep.bandwidth_gb_s) for stages in counts),
            _number(sweep.direct.gb_s if sweep.direct else None),
            _number(sweep.torch_gb_s),
            _number(sweep.copy_gb_s),
            f"{sweep.best_ratio_to_copy:.0%}",
        )
        for sweep in sweeps
    ]
    header = ("workload", "size", *_stage_headers(counts))
    note = "GB/s, every input counted once and every output once; bold: the fastest staged form. Of the copy: the "
    note += "fastest form, staged or direct, over a copy of as many bytes in the same rounds."
    return Table("Overview", (*header, "direct", "torch", "copy", "of the copy"), tuple(grid), note, left=2)


def stream_table(sweep: StreamSweep) -> Table:
    """One memory-bound workload of one size: a row per stage count, the direct form last."""
    header = ("stages", "GB/s", "of the copy", "shared bytes", "registers", "occupancy", "barriers", "bound by", "")
    grid = [_stream_row(sweep, record) for record in sweep.everything]
    torch = f" torch's own operator: {sweep.torch_gb_s:,.0f} GB/s." if sweep.torch_gb_s else ""
    note = f"The copy of as many bytes: {sweep.copy_gb_s:,.0f} GB/s (median over these records' rounds).{torch}"
    return Table(f"{sweep.section.title}: {sweep.workload}, {sweep.size}", header, tuple(grid), note)


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
    note += "in the same rounds. " if together else f"moving by {sweep.drift_pct:.1f} % between these records. "
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


def _overview_cell(sweep: StageSweep, stages: int) -> str:
    recommended = sweep.forecast is not None and sweep.forecast.recommended == stages
    dagger = " †" if recommended and stages in sweep.times_ms else ""
    return _speed_cell(sweep, stages, lambda time: gflops(sweep.shape, time)) + dagger


def _speed_cell(sweep: StagedRecords, stages: int, speed_of: Callable[[float], float]) -> str:
    """The speed with so many stages, from the time in milliseconds; the fastest in bold."""
    time = sweep.times_ms.get(stages)
    if time is None:
        return NOT_VERIFIED if any(record.stages == stages for record in sweep.records) else NOT_MEASURED
    speed = f"{speed_of(time):,.0f}"
    return f"**{speed}**" if stages == sweep.best else speed


def _stage_headers(counts: list[int]) -> list[str]:
    return [f"{stages} stage{'s' * (stages > 1)}" for stages in counts]


def _gain_at(before: StageSweep, own: StageSweep, stages: int) -> float | None:
    return speed_gain_pct(before.times_ms.get(stages), own.times_ms[stages]) if stages in own.times_ms else None


def _variant_pairs(sweeps: list[StageSweep]) -> list[tuple[StageSweep, StageSweep]]:
    """(default variant, another variant) of the same step, tile and shape."""
    defaults = {(sweep.step, sweep.tile, sweep.shape): sweep for sweep in sweeps if sweep.default_variant}
    others = [sweep for sweep in sweeps if not sweep.default_variant]
    return [(before, own) for own in others if (before := defaults.get((own.step, own.tile, own.shape)))]


def _variant_sentence(step: int, variant: str, found: list[tuple[StageSweep, dict[int, float]]]) -> str:
    gains = [gain for _, own in found for gain in own.values()]
    slower = {sweep: [n for n, gain in own.items() if gain < -TIE_PCT] for sweep, own in _by_place(found).items()}
    places = [f"{place} with {', '.join(map(str, counts))}" for place, counts in slower.items() if counts]
    text = f"Step {step}, {variant}: {percent(statistics.mean(gains))} on average over {len(gains)} pairs of tile, "
    text += f"shape and stages; slower by more than {TIE_PCT:g} % in {sum(map(len, slower.values()))} of them"
    return f"{text}{', by up to ' + percent(min(gains)) + ': ' + '; '.join(places) if places else ''}."


def _by_place(found: list[tuple[StageSweep, dict[int, float]]]) -> dict[str, dict[int, float]]:
    return {f"{sweep.tile} at {sweep.size}": gains for sweep, gains in found}


def _stream_row(sweep: StreamSweep, record: StreamRecord) -> tuple[str, ...]:
    used = record.resources
    passed = record.verification.passed
    staged = record.variant == "staged"
    marks = ["best"] if staged and record.stages == sweep.best else []
    marks += ["fewest as fast"] if staged and record.stages == sweep.preferred != sweep.best else []
    return (
        str(record.stages) if staged else record.variant,
        f"{record.gb_s:,.0f}" if passed else NOT_VERIFIED,
        f"{record.ratio_to_copy:.0%}" if passed else NOT_VERIFIED,
        f"{used.smem_bytes:,}",
        str(used.registers),
        _occupancy(used),
        str(record.barriers),
        record.bound,
        ", ".join(marks),
    )


def _occupancy(used: Resources | None) -> str:
    return NOT_MEASURED if used is None else f"{used.occupancy:.0%} ({used.occupancy_limit})"


def _number(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{value:,.0f}"
