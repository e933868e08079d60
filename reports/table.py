"""Records as rows: JSON for programs, tables for the terminal, Markdown for pages. Nothing is drawn here."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Collection, Iterable
from typing import Any

from tensorir_ladder.harness.records import Peer, Record, StreamRecord, Timeline, TunedConfig
from tensorir_ladder.reports.cases import Shape, by_product, grouped, shape_label, shape_of, steps_text
from tensorir_ladder.reports.cells import NOT_MEASURED, NOT_VERIFIED, Table, own_and_cublas, percent, span
from tensorir_ladder.reports.models import function_tables, model_tables
from tensorir_ladder.reports.selection import FASTEST, TUNED, Results, Section, shown_gain
from tensorir_ladder.reports.sweeps import unswept
from tensorir_ladder.reports.templating import Markdown

CHOICE_TITLES = {
    "default": "default tile",
    "best": "best tile",
    TUNED: "tuned",
    FASTEST: "fastest configuration",
}


CASE = ("step", "variant", "default_variant", "m", "n", "k", "layout", "dtype", "out_dtype", "math", "stages", "tile")
SPEED = ("time_ms", "gflops", "ratio_to_cublas", "ratio_interval", "improvement_over_previous_pct")


GAINS = ("gain, same tile", "gain, fastest")
GAINS_NOTE = (
    "Gain, same tile: mean speed gained over the step before with its tile, same rounds: the technique alone. Gain, "
    "fastest: each step's fastest configuration against that of the step before, by their ratios to cuBLAS."
)


def row(record: Record, place: str) -> dict[str, Any]:
    """Make one row of ``table --json`` of a record at a place; without speeds, peers' too, where its check failed."""
    used, passed, made = record.resources, record.verification.passed, record.environment
    peers = []
    for peer in record.peers:
        timing = peer.timing if passed else None
        speed = {
            "time_ms": timing.median_ms if timing else None,
            "ratio_to_cublas": record.ratio_of(timing) if timing else None,
        }
        peers.append({"name": peer.name, "status": peer.status, "why": peer.why, "config": peer.config, **speed})
    return {
        **{name: getattr(record, name) for name in (*CASE, "tile_choice", "launched_early")},
        **{name: getattr(made, name) for name in ("gpu", "gpu_uuid", "run")},
        **{name: getattr(record, name) if passed else None for name in SPEED},
        "verified": passed,
        "verified_on": record.verification.on,
        **{name: getattr(used, name) if used else None for name in ("registers", "smem_bytes", "occupancy")},
        "bound": record.bound,
        "peers": peers,
        **{name: getattr(made, name) for name in ("recorded_at", "revision", "dirty")},
        "record": place,
    }


def ladder_table(results: Results, section: Section, choice: str) -> Table:
    """Make a row per step (its default variant), a column per size: ratio to cuBLAS, the TFLOPS of both in brackets."""
    shapes = section.shapes((choice,))
    lines = {step: line for step in section.steps if (line := section.line(step, choice))}
    rows = [
        (
            step_label(results, step),
            *(speed_cell(line.get(shape)) for shape in shapes),
            *gains(section, step, line),
            average_ratio(line.values(), len(shapes)),
        )
        for step, line in lines.items()
    ]
    header = ("step", *map(shape_label, shapes), *GAINS, "average ratio")
    note = (
        "Ratio to the faster cuBLAS form of the same rounds (TFLOPS of both there); "
        f"{tiles_in_words(lines.values(), choice)} {GAINS_NOTE} Average ratio: geometric mean. "
        f"{runs_in_words([record for line in lines.values() for record in line.values()])}"
    )
    if any(record.environment.dirty for line in lines.values() for record in line.values()):
        note += " *: measured from a tree with uncommitted changes."
    return Table(f"{section.title}: {CHOICE_TITLES[choice]}", header, tuple(rows), note)


def variants_table(results: Results, section: Section, step: int, choice: str) -> Table:
    """Make a row per variant of a step: the ratio to cuBLAS, and the speed gained over the step before."""
    lines = {variant: section.line(step, choice, variant) for variant in section.variants(step)}
    shapes, predicted = by_product(set().union(*lines.values())), section.predicts(step)
    rows = []
    for variant, line in lines.items():
        name = variant + (" (default)" if any(record.default_variant for record in line.values()) else "")
        if line:
            cells = [gain_cell(section, line.get(shape), predicted) for shape in shapes]
            rows.append((name, *cells, average_gain(line.values(), len(shapes))))
    title = f"{section.title}: variants of {results.step_name(step)}, {CHOICE_TITLES[choice]}"
    note = "Ratio to cuBLAS, speed gained over the step before (same rounds)."
    if predicted:
        note += " In brackets the gain predicted for cp.async, in percent: N·(load + compute) against N·max(load, "
        note += (
            "compute). There, resident blocks hide each other's loads for nothing, so that a pipeline has nothing to "
        )
        note += "gain where a multiprocessor holds many of them. Behind it, where stages were swept, the depth model's "
        note += "gain over one stage, which counts what each block waits for all the same: barriers, the instructions "
        note += "of a copy, and the latency of shared memory."
    return Table(title, ("variant", *map(shape_label, shapes), "average gain"), tuple(rows), note)


def others_table(section: Section, records: Collection[Record]) -> Table:
    """Make a row per record that the ladder does not show: tiles given by hand, other stage counts."""
    header = ("step", "variant", "tile", "size", "stages", "ratio (TFLOPS / cuBLAS's)", "gain")
    rows = []
    for r in records:
        case = (str(r.step), r.variant, f"{r.tile} ({r.tile_choice})", shape_label(shape_of(r)), str(r.stages))
        rows.append((*case, speed_cell(r), percent(shown_gain(r))))
    return Table(f"{section.title}: other configurations", header, tuple(rows), left=4)


def peers_table(section: Section, brief: bool = False) -> Table:
    """Compare our fastest and each peer, in percent of cuBLAS, a column per shape; why a peer failed stands below.

    ``brief`` leaves out shapes that have no place on an axis of sizes, what a peer does at single stage counts,
    and our first pipelined step.
    """
    shapes = [s for s in section.peer_shapes() if s in section.sizes() or not brief]
    names = [name for name in section.peer_names() if not (brief and is_stage_count(name))]
    pipelined = None if brief else min((r.step for r in section.records if r.stages > 1), default=None)
    ours = {"our fastest": [section.leader(shape) for shape in shapes]}
    if pipelined is not None:
        fastest = [section.fastest(pipelined, shape) for shape in shapes]
        others = {} if fastest == ours["our fastest"] else ours
        ours = {f"our fastest step {pipelined}": fastest, **others}
    if any(early := [section.fastest_early(shape) for shape in shapes]):
        ours["our fastest, launched early"] = early
    rows = [(name, *map(own_cell, records)) for name, records in ours.items()]
    found = {name: [section.peer(shape, name) for shape in shapes] for name in names}
    rows += [(name, *map(peer_cell, pairs)) for name, pairs in found.items()]
    failed = [peer for pairs in found.values() for pair in pairs if pair for peer in pair[1:] if not peer.timing]
    reasons = dict.fromkeys(f"{peer.name} {peer.status}: {peer.why.rstrip('.')}." for peer in failed)
    note = "Percent of the faster cuBLAS form, each in rounds of its own with cuBLAS; ours: the ladder's fastest, "
    note += "launched as cuBLAS is unless it says otherwise."
    title = f"{section.title}: beside peers"
    return Table(title, ("", *map(shape_label, shapes)), tuple(rows), " ".join([note, *reasons]))


def is_stage_count(peer: str) -> bool:
    """Tell if a peer is Triton at one stage count, which only stage sweeps show."""
    return peer.startswith("triton-")


def tuned_table(title: str, tuned: Collection[TunedConfig]) -> Table:
    """Make a row per tuned configuration: what was chosen, by how much it leads, and out of how many."""
    header = ("step", "size", "configuration", "ratio (TFLOPS / cuBLAS's)", "over default")
    header += ("runner-up", "margin", "verdict", "seen")
    rows = [
        (
            str(config.step),
            shape_label(shape_of(config)),
            config.winner.name,
            speed_text(config),
            percent(config.gain_over_default_pct),
            config.runner_up.name if config.runner_up else NOT_MEASURED,
            _margin(config),
            config.verdict,
            f"{config.seen} of {config.legal}",
        )
        for config in tuned
    ]
    note = "Found by `ladder tune`; all numbers from its confirmation, a second, longer measurement on "
    note += "other operands. Margin: how much faster than the runner-up, the median of the rounds' ratios and its 95 % "
    note += "interval. Tie: the interval does not lie clear of what a kernel differs from itself; the cheaper of the "
    note += "two is taken. Seen: candidates built and checked, of those that are legal."
    return Table(title, header, tuple(rows), Markdown(note), left=3)


def all_tables(results: Results) -> list[Table]:
    """Make all that ``table`` prints: per section the ladder by tile choice, variants, the rest, peers; then models."""
    tables = []
    for section in results.sections():
        tables += [ladder_table(results, section, choice) for choice in section.all_choices]
        if tuned := results.tuned_in(section, section.steps):
            tables.append(tuned_table(f"{section.title}: tuned configurations", tuned))
        for step in section.steps:
            tables += [variants_table(results, section, step, choice) for choice in section.variant_choices(step)]
        others = [record for step in section.steps for record in unswept(section, step)]
        tables += [others_table(section, others)] if others else []
        tables += [peers_table(section)] if section.peer_shapes() else []
    return [*tables, *model_tables(results.models), *function_tables(results.models)]


def step_label(results: Results, step: int) -> str:
    """Write ``2 shared tiling``: a step's number and short name."""
    return f"{step} {short_name(results.step_name(step))}"


def short_name(step_name: str) -> str:
    """Write ``shared tiling`` from ``step2_shared_tiling``."""
    return re.sub(r"^step\d+_", "", step_name).replace("_", " ")


def speed_cell(record: Record | None) -> str:
    """Write ``0.64 (32.2 / 50.3)``: the ratio to cuBLAS and both speeds; never one that was not verified."""
    if record is None or not record.verification.passed:
        return NOT_MEASURED if record is None else NOT_VERIFIED
    return speed_text(record)


def speed_text(record: Record | TunedConfig) -> str:
    """Write the ratio to cuBLAS and both speeds, with a star where the tree was not clean."""
    return f"{record.ratio_to_cublas:.2f} ({own_and_cublas(record)}){'*' if record.environment.dirty else ''}"


def gain_cell(section: Section, record: Record | None, with_prediction: bool) -> str:
    """Write ``0.64, +21.5 % (+30; +42)``: ratio to cuBLAS, gain over the step before, and those of two models."""
    if record is None or not record.verification.passed:
        return speed_cell(record)
    # The prediction is for loads that run ahead: a variant without cp.async is not what it speaks of.
    overlaps = record.code is not None and record.code.cp_async > 0
    simple = record.predicted_gain_pct if with_prediction and overlaps else None
    models = [simple, section.forecast_gain(record)] if simple is not None else []
    predicted = "; ".join(f"{gain:+.0f}" for gain in models if gain is not None)
    suffix = f" ({predicted})" if models else ""
    return f"{record.ratio_to_cublas:.2f}, {percent(record.improvement_over_previous_pct)}{suffix}"


def own_cell(record: Record | None) -> str:
    """Write ``73 % (step 6, 64x64x16/4x4, 3 stages)``: percent of cuBLAS, and what reached it."""
    if record is None:
        return NOT_MEASURED
    stages = f", {record.stages} stages" if record.stages > 1 else ""
    dirty = "*" if record.environment.dirty else ""
    return f"{100 * record.ratio_to_cublas:.0f} %{dirty} (step {record.step}, {record.tile}{stages})"


def peer_cell(found: tuple[Record, Peer] | None) -> str:
    """Write ``61 % (64x64x16, 4 warps, 3 stages)``: percent of cuBLAS and the peer's configuration, or its status."""
    if found is None:
        return NOT_MEASURED
    record, peer = found
    return f"{100 * record.ratio_of(peer.timing):.0f} % ({peer.config})" if peer.timing else peer.status


def measured_on(records: Collection[Record | StreamRecord | Timeline]) -> str:
    """Name the machine of some records, its clocks and power, the days and the revisions."""
    places = [record.environment for record in records]
    days = sorted({place.recorded_at[:10] for place in places})
    gpus, drivers = (", ".join(sorted(set(names))) for names in ([p.gpu for p in places], [p.driver for p in places]))
    return (
        f"{gpus}, driver {drivers}; SM clock "
        f"{span((p.before.sm_clock_mhz for p in places), 'MHz')} before and "
        f"{span((p.after.sm_clock_mhz for p in places), 'MHz')} after each measurement, power after it "
        f"{span((p.after.power_w for p in places), 'W')}; measured {' to '.join(dict.fromkeys((days[0], days[-1])))}, "
        f"revision {', '.join(sorted({p.revision[:12] for p in places}))}."
    )


def runs_in_words(records: Collection[Record]) -> str:
    """Say whether absolute figures of some records compare: those of one run do, others only by their ratios."""
    places = [record.environment for record in records]
    runs = {(place.run, place.gpu_uuid) for place in places}
    if len(runs) == 1 and places[0].run:
        return f"One run, {places[0].run}, on {places[0].gpu_uuid}, {places[0].recorded_at[:10]}."
    gpus = len({place.gpu_uuid for place in places})
    where = "one GPU" if gpus == 1 else f"{gpus} GPUs of one name"
    return f"Measured in several runs, on {where}: only ratios compare from cell to cell."


def gains(section: Section, step: int, line: dict[Shape, Record]) -> tuple[str, str]:
    """Write a line's gains over the step before, as GAINS names them: with one tile, and fastest against fastest."""
    same = [shown_gain(record) for record in line.values() if record.previous_has_its_tile]
    fastest = [section.gain_fastest(step, shape) for shape in line]
    return tuple(_average([gain for gain in found if gain is not None], len(line)) for found in (same, fastest))


def average_gain(records: Collection[Record], expected: int) -> str:
    """Write the mean gain over the step before; says so where it is over fewer than the ``expected`` sizes."""
    return _average([gain for record in records if (gain := shown_gain(record)) is not None], expected)


def average_ratio(records: Collection[Record], expected: int) -> str:
    """Write the geometric mean of the ratio to cuBLAS, marked as :func:`average_gain` is."""
    ratios = [record.ratio_to_cublas for record in records if record.verification.passed]
    return f"{statistics.geometric_mean(ratios):.2f}" + _partial(ratios, expected) if ratios else NOT_MEASURED


def cublas_gflops(lines: Collection[dict[Shape, Record]], shape: Shape) -> float | None:
    """Compute cuBLAS's speed at a shape: the median over the records shown, each with its faster form."""
    times = [line[shape].fastest_baseline.median_ms for line in lines if shape in line]
    return gflops(shape, statistics.median(times)) if times else None


def gflops(shape: Shape, milliseconds: float) -> float:
    """Compute the rate of 2·m·n·k operations over a time, in 10⁹ per second."""
    return 2 * math.prod(shape) / (milliseconds * 1e6)


def tiles_in_words(lines: Collection[dict[Shape, Record]], choice: str) -> str:
    """Name the tiles that were used, as a sentence."""
    records = [record for line in lines for record in line.values()]
    if choice == "best":
        count = max((len({item["tile"] for item in record.candidates}) for record in records), default=0)
        return f"best tile: the fastest of {count} for each step and size." if count else "best tile of each size."
    if choice == TUNED:
        return "tile, stages and variant of each step and size as tuned; the step before with that tile if it takes it."
    if choice == FASTEST:
        return "fastest configuration: of all that was measured of a step and size, whatever tile, stages and variant."
    return f"tile {default_tiles(records)}."


def default_tiles(records: Iterable[Record]) -> str:
    """Write the default tiles with their steps, those with the same tiles together: ``32x64x16/4x4 (steps 1–6); …``.

    Of a step with several it says that they go by size.
    """
    by_step = grouped((record for record in records if record.tile_choice == "default"), lambda record: record.step)
    tiles = {step: tuple(dict.fromkeys(record.tile for record in own)) for step, own in by_step.items()}
    steps = {own: [step for step in tiles if tiles[step] == own] for own in tiles.values()}
    words = {own: ", ".join(own) + (" by size" if len(own) > 1 else "") for own in steps}
    named = [f"{words[own]} ({steps_text(steps[own])})" for own in sorted(steps, key=lambda own: min(steps[own]))]
    return words[next(iter(steps))] if len(named) == 1 else "; ".join(named)


def _average(found: list[float], expected: int) -> str:
    return percent(statistics.mean(found)) + _partial(found, expected) if found else NOT_MEASURED


def _margin(config: TunedConfig) -> str:
    """Write ``+1.20 % (+0.90 to +1.50)``: how much faster than the runner-up, and the interval."""
    if config.margin_pct is None:
        return NOT_MEASURED
    low, high = config.margin_interval_pct
    return f"{config.margin_pct:+.2f} % ({low:+.2f} to {high:+.2f})"


def _partial(found: list[float], expected: int) -> str:
    return "" if len(found) == expected else f" ({len(found)} of {expected} sizes)"
