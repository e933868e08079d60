"""The depth model judged: its recommendations and its times against all that was swept.

Held-out shapes set no constant of the model; how blind they were, harness/models/depth.py says.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tensorir_ladder.reports.selection import Section
from tensorir_ladder.reports.sweeps import CLOSE_PCT, TIE_PCT, StageSweep, speed_lost_pct, stage_sweeps
from tensorir_ladder.reports.table import NOT_MEASURED, Table, gflops

HELD_OUT_CUBES = (768, 1536, 3072)


def is_held_out(sweep: StageSweep) -> bool:
    """Tell if a sweep only judges the model: float32 at 768, 1536 and 3072 cubed, or at a shape that is no cube.

    The model of 16-bit products was settled on all that was swept of them.
    """
    shape = sweep.shape
    return sweep.section.dtype == "float32" and (len(set(shape)) > 1 or shape[0] in HELD_OUT_CUBES)


@dataclass(frozen=True)
class Verdict:
    """One sweep's forecast against its measurements.

    ``lost_pct`` is the speed lost by taking the recommended stages instead of the best measured, None where
    the recommended ones were not measured; ``correlation`` the rank correlation of predicted and measured
    times over the stage counts that have both, None where it is undefined.
    """

    sweep: StageSweep
    lost_pct: float | None
    correlation: float | None

    @property
    def held_out(self) -> bool:
        """The shape was held out."""
        return is_held_out(self.sweep)

    @property
    def right(self) -> bool:
        """The recommended stages are as good as the best, up to ``CLOSE_PCT``."""
        return self.lost_pct is not None and self.lost_pct <= CLOSE_PCT


@dataclass(frozen=True)
class Setback:
    """A case in which three stages were measured slower than two."""

    sweep: StageSweep
    lost_pct: float

    @property
    def occupancies(self) -> tuple[float, float] | None:
        """Occupancy with two and with three stages; None where the compiler's figures are missing."""
        used = [self.sweep.resources(stages) for stages in (2, 3)]
        return None if None in used else (used[0].occupancy, used[1].occupancy)


def summary(sections: Sequence[Section]) -> str:
    """Judge the model's recommendations in one sentence; empty without a forecast."""
    found = verdicts([sweep for section in sections for sweep in stage_sweeps(section)])
    if not found:
        return ""
    held_out = [verdict for verdict in found if verdict.held_out]
    text = f"The depth model's recommendation is within {CLOSE_PCT:g} % of the best swept depth in "
    return f"{text}{_right(found)} sweeps" + (f", {_right(held_out)} of them on shapes held out." if held_out else ".")


def verdicts(sweeps: Sequence[StageSweep]) -> list[Verdict]:
    """A verdict on every sweep that carries a forecast."""
    return [_verdict(sweep) for sweep in sweeps if sweep.forecast]


def setbacks(sweeps: Sequence[StageSweep]) -> list[Setback]:
    """Every sweep in which 3 stages were slower than 2 by more than a tie."""
    found = []
    for sweep in sweeps:
        times = sweep.times_ms
        if 2 in times and 3 in times and (lost := speed_lost_pct(times[3], times[2])) > TIE_PCT:
            found.append(Setback(sweep, lost))
    return found


def spearman(left: Sequence[float], right: Sequence[float]) -> float | None:
    """Spearman's rank correlation, ties sharing their mean rank; None for fewer than 2 values or all equal.

    Pearson's correlation of the ranks, a few lines of numpy: scipy would be a heavy dependency for them.
    """
    if len(set(left)) < 2 or len(set(right)) < 2:
        return None
    return float(np.corrcoef(_ranks(left), _ranks(right))[0, 1])


def points(sweeps: Sequence[StageSweep]) -> list[tuple[float, float]]:
    """(predicted, measured) times in milliseconds, wherever both are known."""
    pairs = [(sweep.predicted_ms(stages), time) for sweep in sweeps for stages, time in sweep.times_ms.items()]
    return [(predicted, measured) for predicted, measured in pairs if predicted is not None]


def judgement_tables(sweeps: Sequence[StageSweep]) -> list[Table]:
    """Judge the forecasts, list every miss, and where a third stage hurts; only the tables there is matter for."""
    found = verdicts(sweeps)
    tables = [judgement_table(found) if found else None, misses_table(found), setbacks_table(setbacks(sweeps))]
    return [table for table in tables if table is not None]


def judgement_table(found: Sequence[Verdict]) -> Table:
    """Shares of right recommendations and rank correlations: by shapes, of the steps as they are, and by case."""
    groups = {
        "development shapes": [verdict for verdict in found if not verdict.held_out],
        "held-out shapes": [verdict for verdict in found if verdict.held_out],
        "all": list(found),
        "the steps' default variants": [v for v in found if all(r.default_variant for r in v.sweep.records)],
    }
    for verdict in found:
        groups.setdefault(", ".join(_case(verdict.sweep)[:2]), []).append(verdict)
    grid = [(name, *_judged(group)) for name, group in groups.items()]
    header = ("sweeps", "with a forecast", f"recommended within {CLOSE_PCT:g} % of the best")
    header += ("rank correlation in a sweep, median", "over all points", "error of the time, median")
    cubes = ", ".join(map(str, HELD_OUT_CUBES))
    note = f"A sweep: one step, variant, tile and shape. Held out: {cubes} cubed, and every shape that is no cube; "
    note += "they set no constant, but were seen before the model's form was final (harness/models/depth.py). Rank "
    note += "correlation (Spearman) of predicted and measured times; over all points it is mostly the sizes' order."
    return Table("The depth model judged", header, tuple(grid), note)


def misses_table(found: Sequence[Verdict]) -> Table | None:
    """Every sweep whose recommended stages lose more than ``CLOSE_PCT``, or were not measured; None without any."""
    missed = [verdict for verdict in found if not verdict.right]
    if not missed:
        return None
    header = ("step, variant", "tile", "size", "recommended", "GFLOPS", "best measured", "GFLOPS", "lost", "held out")
    return Table("Recommendations that miss", header, tuple(_miss(verdict) for verdict in missed), left=3)


def correlations_table(found: Sequence[Verdict]) -> Table:
    """Every sweep's recommendation and rank correlation."""
    header = ("step, variant", "tile", "size", "recommended", "best measured", "fewest as fast", "lost", "correlation")
    grid = [
        (
            *_case(verdict.sweep),
            str(verdict.sweep.forecast.recommended),
            str(verdict.sweep.best),
            str(verdict.sweep.preferred),
            _lost(verdict),
            _decimal(verdict.correlation),
        )
        for verdict in found
    ]
    return Table("Every sweep", header, tuple(grid), left=3)


def setbacks_table(found: Sequence[Setback]) -> Table | None:
    """Cases where 3 stages are slower than 2, with the occupancy that goes with it; None without any."""
    if not found:
        return None
    header = ("step, variant", "tile", "size", "2 stages", "3 stages", "lost", "shared bytes", "blocks per SM")
    grid = [_setback(setback) for setback in found]
    note = "GFLOPS; shared memory per block, resident blocks and occupancy with 2 → 3 stages."
    return Table("Three stages slower than two", (*header, "occupancy"), tuple(grid), note, left=3)


def setbacks_sentence(sweeps: Sequence[StageSweep]) -> str:
    """Count the cases that got slower from 2 to 3 stages, and those of them that lost occupancy."""
    compared = [sweep for sweep in sweeps if 2 in sweep.times_ms and 3 in sweep.times_ms]
    if not compared:
        return "No sweep has both 2 and 3 stages."
    found = setbacks(compared)
    if not found:
        return f"None was measured: in none of {len(compared)} sweeps are 3 stages slower than 2 by {TIE_PCT:g} %."
    lower = [s for s in found if s.occupancies and s.occupancies[1] < s.occupancies[0]]
    text = f"In {len(found)} of {len(compared)} sweeps 3 stages are slower than 2 by more than {TIE_PCT:g} %; "
    return f"{text}in {len(lower)} of these {len(found)} the third stage lowers the occupancy."


def _verdict(sweep: StageSweep) -> Verdict:
    recommended = sweep.times_ms.get(sweep.forecast.recommended)
    lost = None if recommended is None else speed_lost_pct(recommended, sweep.times_ms[sweep.best])
    pairs = points([sweep])
    return Verdict(sweep, lost, spearman([predicted for predicted, _ in pairs], [measured for _, measured in pairs]))


def _ranks(values: Sequence[float]) -> np.ndarray:
    """1-based ranks; equal values share the mean of theirs."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[places.reshape(len(values))]


def _judged(group: Sequence[Verdict]) -> tuple[str, ...]:
    if not group:
        return ("0", *(NOT_MEASURED,) * 4)
    right = sum(verdict.right for verdict in group)
    own = [verdict.correlation for verdict in group if verdict.correlation is not None]
    pairs = points([verdict.sweep for verdict in group])
    overall = spearman([predicted for predicted, _ in pairs], [measured for _, measured in pairs])
    share = f"{right} of {len(group)} ({right / len(group):.0%})"
    errors = [abs(100 * (predicted / measured - 1)) for predicted, measured in pairs]
    error = f"{statistics.median(errors):.1f} %" if errors else NOT_MEASURED
    return (str(len(group)), share, _decimal(statistics.median(own) if own else None), _decimal(overall), error)


def _miss(verdict: Verdict) -> tuple[str, ...]:
    sweep, recommended = verdict.sweep, verdict.sweep.forecast.recommended
    speeds = {stages: f"{gflops(sweep.shape, time):,.0f}" for stages, time in sweep.times_ms.items()}
    own = speeds.get(recommended, "not measured")
    held_out = "yes" if verdict.held_out else "no"
    return (*_case(sweep), str(recommended), own, str(sweep.best), speeds[sweep.best], _lost(verdict), held_out)


def _setback(setback: Setback) -> tuple[str, ...]:
    sweep = setback.sweep
    speeds = [f"{gflops(sweep.shape, sweep.times_ms[stages]):,.0f}" for stages in (2, 3)]
    used = [sweep.resources(stages) for stages in (2, 3)]
    if None in used:
        costs = [NOT_MEASURED] * 3
    else:
        costs = [
            " → ".join(f"{item.smem_bytes:,}" for item in used),
            " → ".join(str(item.blocks_per_sm) for item in used),
            " → ".join(f"{item.occupancy:.0%} ({item.occupancy_limit})" for item in used),
        ]
    return (*_case(sweep), *speeds, f"−{setback.lost_pct:.1f} %", *costs)


def _case(sweep: StageSweep) -> tuple[str, str, str]:
    return (f"{sweep.step} {sweep.variant}", sweep.tile, sweep.size)


def _right(found: Sequence[Verdict]) -> str:
    return f"{sum(verdict.right for verdict in found)} of {len(found)}"


def _lost(verdict: Verdict) -> str:
    return NOT_MEASURED if verdict.lost_pct is None else f"{verdict.lost_pct:.1f} %"


def _decimal(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{value:.2f}"
