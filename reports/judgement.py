"""The depth model judged: its recommendations and its times against all that was swept.

Held-out shapes set no constant of the model; how blind they were, harness/models/depth.py says.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from tensorir_ladder.reports.cases import grouped
from tensorir_ladder.reports.cells import NOT_MEASURED, Table, number, occupancy_text, percent
from tensorir_ladder.reports.sweeps import CLOSE_PCT, TIE_PCT, StageSweep, speed_lost_pct
from tensorir_ladder.reports.table import gflops

HELD_OUT_CUBES = (768, 1536, 3072)


def is_held_out(sweep: StageSweep) -> bool:
    """Tell if a sweep only judges the model: float32 at 768, 1536 and 3072 cubed, or at a shape that is no cube.

    The model of 16-bit products was settled on all that was swept of them.
    """
    shape = sweep.shape
    return sweep.section.dtype == "float32" and (len(set(shape)) > 1 or shape[0] in HELD_OUT_CUBES)


def lost_pct(sweep: StageSweep, stages: int) -> float | None:
    """Compare a stage count with the best measured: speed lost; None where it was not measured."""
    time_ms = sweep.times_ms.get(stages)
    return None if time_ms is None else speed_lost_pct(time_ms, sweep.times_ms[sweep.best])


def is_right(sweep: StageSweep) -> bool:
    """Tell if the recommended stages are as good as the best, up to ``CLOSE_PCT``."""
    return _is_right_with(sweep, sweep.forecast.recommended)


def points(sweeps: Sequence[StageSweep]) -> list[tuple[float, float]]:
    """Return (predicted, measured) times in milliseconds, wherever both are known."""
    pairs = [(sweep.predicted_ms(stages), time) for sweep in sweeps for stages, time in sweep.times_ms.items()]
    return [(predicted, measured) for predicted, measured in pairs if predicted is not None]


def spearman(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Compute Spearman's rank correlation, ties sharing their mean rank; None for fewer than 2 values or all equal.

    Pearson's correlation of the ranks, a few lines of numpy: scipy would be a heavy dependency for them.
    """
    columns = list(zip(*pairs))
    if not columns or any(len(set(column)) < 2 for column in columns):
        return None
    return float(np.corrcoef(*map(_ranks, columns))[0, 1])


def setbacks(sweeps: Sequence[StageSweep]) -> list[StageSweep]:
    """Return every sweep in which 3 stages were slower than 2 by more than a tie."""
    both = [sweep for sweep in sweeps if {2, 3} <= set(sweep.times_ms)]
    return [sweep for sweep in both if speed_lost_pct(sweep.times_ms[3], sweep.times_ms[2]) > TIE_PCT]


def constant_depth(sweeps: Sequence[StageSweep]) -> int:
    """Return the one stage count that is right for the most sweeps: what a forecast has to be better than."""
    counts = sorted({stages for sweep in sweeps for stages in sweep.times_ms})
    return max(counts, key=lambda stages: sum(_is_right_with(sweep, stages) for sweep in sweeps))


def summary(sweeps: Sequence[StageSweep]) -> str:
    """Judge the model's recommendations in a few words, beside one stage count for all; empty without a forecast."""
    found = [sweep for sweep in sweeps if sweep.forecast]
    if not found:
        return ""
    held_out = [sweep for sweep in found if is_held_out(sweep)]
    all_right, held_out_right = (f"{sum(map(is_right, own))} of {len(own)}" for own in (found, held_out))
    text = f"The depth model's recommendation is within {CLOSE_PCT:g} % of the best swept depth in {all_right} sweeps"
    constant = constant_depth(found)
    always = [f"{sum(_is_right_with(s, constant) for s in own)} of {len(own)}" for own in (found, held_out)]
    if not held_out:
        return f"{text}; always {constant} stages in {always[0]}."
    text += f"; always {constant} stages, the best of one count for all, in {always[0]}. On shapes held out: "
    return f"{text}{held_out_right}, and {always[1]}. These set no constant of the model, but had been seen."


def judgement_tables(sweeps: Sequence[StageSweep]) -> list[Table]:
    """Judge the forecasts, list every miss, and where a third stage hurts; only the tables there is matter for."""
    found = [sweep for sweep in sweeps if sweep.forecast]
    missed = [sweep for sweep in found if not is_right(sweep)]
    makers = ((judgement_table, found), (misses_table, missed), (setbacks_table, setbacks(sweeps)))
    return [make(own) for make, own in makers if own]


def judgement_table(found: Sequence[StageSweep]) -> Table:
    """Judge recommendations and times: by shapes, of the steps as they are, and by case."""
    groups = {
        "development shapes": [sweep for sweep in found if not is_held_out(sweep)],
        "held-out shapes": [sweep for sweep in found if is_held_out(sweep)],
        "all": found,
        "the steps' default variants": [sweep for sweep in found if sweep.default_variant],
        **grouped(found, lambda sweep: ", ".join(_case(sweep)[:2])),
    }
    constant = constant_depth(found)
    grid = [(name, *_judged(group, constant)) for name, group in groups.items()]
    header = ("sweeps", "with a forecast", f"recommended within {CLOSE_PCT:g} % of the best")
    header += (f"always {constant} stages", "rank correlation in a sweep, median", "over all points")
    header += ("error of the time, median",)
    cubes = ", ".join(map(str, HELD_OUT_CUBES))
    note = f"A sweep: one step, variant, tile and shape. Held out: {cubes} cubed, and every shape that is no cube; "
    note += "they set no constant, but were seen before the model's form was final (harness/models/depth.py). Always: "
    note += (
        "the one stage count that is right most often, for comparison. Rank correlation (Spearman) of predicted and "
    )
    note += "measured times; over all points it is mostly the sizes' order."
    return Table("The depth model judged", header, tuple(grid), note)


def misses_table(missed: Sequence[StageSweep]) -> Table:
    """Make a row per sweep whose recommended stages lose more than ``CLOSE_PCT``, or were not measured."""
    header = ("step, variant", "tile", "size", "recommended", "GFLOPS", "best measured", "GFLOPS", "lost", "held out")
    grid = []
    for sweep in missed:
        best, recommended = sweep.best, sweep.forecast.recommended
        own = _speed(sweep, recommended) if recommended in sweep.times_ms else "not measured"
        held_out = "yes" if is_held_out(sweep) else "no"
        choices = (str(recommended), own, str(best), _speed(sweep, best))
        grid.append((*_case(sweep), *choices, percent(lost_pct(sweep, recommended), ".1f"), held_out))
    return Table("Recommendations that miss", header, tuple(grid), left=3)


def setbacks_table(found: Sequence[StageSweep]) -> Table:
    """Make a row per case where 3 stages are slower than 2, with the occupancy that goes with it."""
    header = ("step, variant", "tile", "size", "2 stages", "3 stages", "lost", "shared bytes", "blocks per SM")
    grid = []
    for sweep in found:
        lost = speed_lost_pct(sweep.times_ms[3], sweep.times_ms[2])
        used, costs = [sweep.resources(stages) for stages in (2, 3)], [NOT_MEASURED] * 3
        if None not in used:
            each = [(f"{u.smem_bytes:,}", str(u.blocks_per_sm), occupancy_text(u)) for u in used]
            costs = [" → ".join(pair) for pair in zip(*each)]
        grid.append((*_case(sweep), _speed(sweep, 2), _speed(sweep, 3), f"−{lost:.1f} %", *costs))
    note = "GFLOPS; shared memory per block, resident blocks and occupancy with 2 → 3 stages."
    return Table("Three stages slower than two", (*header, "occupancy"), tuple(grid), note, left=3)


def _is_right_with(sweep: StageSweep, stages: int) -> bool:
    lost = lost_pct(sweep, stages)
    return lost is not None and lost <= CLOSE_PCT


def _ranks(values: Sequence[float]) -> np.ndarray:
    """Rank values from 1; equal values share the mean of theirs."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[places.reshape(len(values))]


def _judged(group: Sequence[StageSweep], constant: int) -> tuple[str, ...]:
    if not group:
        return ("0", *(NOT_MEASURED,) * 5)
    rights, pairs = (sum(map(is_right, group)), sum(_is_right_with(s, constant) for s in group)), points(group)
    own = [found for sweep in group if (found := spearman(points([sweep]))) is not None]
    errors = [abs(100 * (predicted / measured - 1)) for predicted, measured in pairs]
    return (
        str(len(group)),
        *(f"{right} of {len(group)} ({right / len(group):.0%})" for right in rights),
        number(statistics.median(own) if own else None, ".2f"),
        number(spearman(pairs), ".2f"),
        percent(statistics.median(errors) if errors else None, ".1f"),
    )


def _case(sweep: StageSweep) -> tuple[str, str, str]:
    return (f"{sweep.step} {sweep.variant}", sweep.tile, sweep.size)


def _speed(sweep: StageSweep, stages: int) -> str:
    return number(gflops(sweep.shape, sweep.times_ms[stages]))
