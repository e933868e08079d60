"""Checks that the records deserve trust, and that the README and its pictures follow from them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from tensorir_ladder.harness.commands.values import UsageError
from tensorir_ladder.harness.records import (
    KINDS,
    Line,
    ModelRecord,
    Mutants,
    Record,
    ShapeRecord,
    StreamRecord,
    Timeline,
    Timing,
    TunedConfig,
    Verification,
    bad_lines,
    newest,
    read_places,
)
from tensorir_ladder.reports.cases import Shape, grouped, is_size, shape_label
from tensorir_ladder.reports.paths import Paths
from tensorir_ladder.reports.plot import peaks
from tensorir_ladder.reports.readme import pictures, read_document, render_document
from tensorir_ladder.reports.selection import Results, Section, load, section_key
from tensorir_ladder.reports.timelines import BOX, EMPTY_WAIT, EPILOGUE, FULL_WAIT, ROUNDING, spans

FEWEST_ROUNDS = 7
CALIBRATION_TOLERANCE = 0.01
CLOCK_SLACK_NS = 2000  # other warps may end after the thread that reads both clocks at the block's end


def findings(paths: Paths) -> list[str]:
    """Find everything wrong with the records, the README and its pictures, a line each.

    UsageError where all is well because there is nothing to check.
    """
    places = {kind: read_places(paths.results, kind) for kind in KINDS}
    records = newest(places[Record])
    first = first_steps(records.values())
    checks = {place: record_problems(record, first.get(section_key(record), 1)) for place, record in records.items()}
    others = {
        TunedConfig: tuned_problems,
        StreamRecord: stream_problems,
        ShapeRecord: shape_problems,
        Timeline: timeline_problems,
        Mutants: mutant_problems,
        ModelRecord: model_problems,
    }
    for kind, problems in others.items():
        checks |= {place: problems(record) for place, record in newest(places[kind]).items()}
    found = [
        problem for own in places.values() for place, record in own.items() for problem in misplaced(place, record)
    ]
    found += [f"{Path(place).name}: {what}" for place, problems in checks.items() for what in problems]
    found += [bad.removeprefix(f"{paths.results}{os.sep}") for bad in bad_lines(paths.results)]
    results = load(paths.results)
    found += [f"{section.title}: {gap}" for section in results.sections() for gap in ladder_gaps(section)]
    found += stale(results, paths)
    if not checks and not found:
        raise UsageError(f"no record in {paths.results}, so that nothing was checked; measure something: ladder run")
    return found


def misplaced(place: str, record: Line) -> Iterator[str]:
    """Find a record in another file than that of its GPU and kind."""
    file = Path(place.rpartition(":")[0])
    if file.name != record.file_name:
        yield f"{Path(place).name}: a record of {record.gpu_name}, whose file is {record.file_name}; move it there"


def first_steps(records: Iterable[Record]) -> dict[tuple[str, ...], int]:
    """Return the lowest step of each section: on a ladder that begins with it, nothing comes before."""
    groups = grouped((record for record in records if record.kind == "step"), section_key)
    return {section: min(record.step for record in own) for section, own in groups.items()}


def record_problems(record: Record, first_step: int = 1) -> Iterator[str]:
    """Find what makes one record no evidence; from the step after ``first_step`` on, the one before belongs to it."""
    yield from _method_problems(record)
    if record.kind == "calibration":
        if abs(record.ratio_to_cublas - 1) > CALIBRATION_TOLERANCE:
            yield f"cuBLAS against itself is {record.ratio_to_cublas:.3f}, not 1 ± {CALIBRATION_TOLERANCE}"
        return
    yield from _step_problems(record, first_step)


def tuned_problems(tuned: TunedConfig) -> Iterator[str]:
    """Find what makes a tuned configuration no evidence."""
    yield from _method_problems(tuned)
    for wrong in (candidate for candidate in tuned.candidates if candidate.status == "wrong"):
        yield f"the candidate {wrong.name} is wrong: {wrong.why}"


def shape_problems(record: ShapeRecord) -> Iterator[str]:
    """Find what makes the record of a drawn shape no evidence."""
    yield from _method_problems(record)
    if record.batch == 1:
        yield from _baseline_problems(record)
    yield from _check_problems(record.verification)


def stream_problems(record: StreamRecord) -> Iterator[str]:
    """Find what makes one memory-bound record no evidence."""
    yield from _method_problems(record)
    yield from _check_problems(record.verification, whole_numbers=False)


def timeline_problems(timeline: Timeline) -> Iterator[str]:
    """Find what makes one timeline no evidence."""
    yield from _method_problems(timeline)
    yield from _check_problems(timeline.verification)
    for track in timeline.tracks:
        if list(track.ns) != sorted(track.ns):
            yield f"{track.role}: {track.event} goes back in time"
        if track.ns[0] < 0 or max(track.ns) > timeline.duration_ns + CLOCK_SLACK_NS:
            yield f"{track.role}: {track.event} lies outside the block's {timeline.duration_ns:,.0f} ns"
    for role, (begin, end) in itertools.product(timeline.roles, (FULL_WAIT, EMPTY_WAIT, EPILOGUE, ROUNDING, BOX)):
        if any(span.end < span.begin for span in spans(timeline, role, (begin, end))):
            yield f"{role}: {end} comes before {begin}"


def mutant_problems(record: Mutants) -> Iterator[str]:
    """Find what makes a run of mutants no evidence that harmful changes are caught."""
    if record.dirty:
        yield f"run in a tree with uncommitted changes ({record.revision[:12]})"
    for mutant in record.harmful:
        yield f"lived, harmful: {record.subjects[mutant.subject]}, line {mutant.line}, {mutant.rule}: {mutant.after}"


def model_problems(record: ModelRecord) -> Iterator[str]:
    """Find what makes a model's record no evidence; a set of rules that fails is named in the table."""
    yield from _method_problems(record)
    for made in record.rules:
        if made.verification is not None:
            yield from _check_problems(made.verification, whole_numbers=False)


def ladder_gaps(section: Section) -> Iterator[str]:
    """Yield sizes at which a step was measured and a later one was not, of steps measured with the same tile choice."""
    for choice in section.choices:
        wanted: dict[Shape, None] = {}
        for step in section.steps:
            line = section.line(step, choice)
            missing = [shape_label(shape) for shape in wanted if shape not in line]
            if line and missing:
                yield f"step {step}, {choice} tile: not measured at {', '.join(missing)}"
            wanted |= dict.fromkeys(shape for shape in line if is_size(shape))


def stale(results: Results, paths: Paths) -> Iterator[str]:
    """Name documents and pictures that do not follow from the records, or are missing, or left over."""
    if not paths.documents:
        return
    for document in paths.documents:
        try:
            text = read_document(document)
            if render_document(text, document, results, paths) != text:
                yield f"{document.name}: results are stale; run ladder readme"
        except UsageError as error:
            yield str(error)
            return
    shown = pictures(results, paths)
    for plot in shown:
        if not plot.is_current(paths.plots):
            state = "stale" if (paths.plots / plot.file_name).exists() else "missing"
            yield f"{plot.file_name}: {state}; run ladder readme"
    for path in sorted({*paths.plots.glob("*.png")} - {paths.plots / plot.file_name for plot in shown}):
        yield f"{path.name}: left over, nothing shows it; delete it"


def _step_problems(record: Record, first_step: int) -> Iterator[str]:
    yield from _check_problems(record.verification)
    yield from _tile_problems(record)
    yield from _baseline_problems(record)
    for peer in record.peers:
        if (peer.status == "measured") != (peer.timing is not None) or not (peer.timing or peer.why):
            yield f"peer {peer.name} is {peer.status}, with{'' if peer.timing else 'out'} times, why: {peer.why!r}"
    # A step's variant in another arithmetic has the step before's default beside it only if that computes alike.
    if record.step > first_step and record.math == "ieee" and record.previous is None:
        yield "the step before was not measured in the same rounds"
    known = peaks().get(record.environment.gpu)
    peak = known and known["peak_gflops"].get(f"{record.dtype} {record.math}")
    if peak and record.gflops > peak:
        yield f"{record.gflops:,.0f} GFLOPS is above the GPU's peak of {peak:,.0f}"


def _baseline_problems(record: Record | ShapeRecord) -> Iterator[str]:
    if len({timing.label for timing in record.baseline}) < 2:
        yield "cuBLAS was measured in fewer than two forms"


def _tile_problems(record: Record) -> Iterator[str]:
    """Refuse a tile of another family than the step's, which the text alone does not tell."""
    from tensorir_ladder.steps.registry import find_steps  # needs TVM, which no other report does

    step = find_steps().get(record.step)
    try:
        if step is not None:
            is_gone = record.variant not in step.variant_names  # but records of it are kept
            (step.tiles if is_gone else step.tiles_of(record.variant)).kind.parse(record.tile)
    except ValueError as error:
        yield f"{record.step_name} takes no tile {record.tile}: {error}"


def _method_problems(
    record: Record | ShapeRecord | StreamRecord | TunedConfig | Timeline | ModelRecord,
) -> Iterator[str]:
    for timing in _timings(record):
        if len(timing.samples_ms) != record.method.rounds:
            yield f"{timing.label} has {len(timing.samples_ms)} samples in {record.method.rounds} rounds"
    if record.method.rounds < FEWEST_ROUNDS:
        yield f"{record.method.rounds} rounds; at least {FEWEST_ROUNDS} are needed"
    if record.environment.dirty:
        yield f"measured from a tree with uncommitted changes ({record.environment.revision[:12]})"


def _check_problems(check: Verification, whole_numbers: bool = True) -> Iterator[str]:
    """Refuse what failed, or is not exact on whole numbers, which only products and sums keep whole."""
    inexact = whole_numbers and not check.integers_exact
    if not check.passed or inexact or not check.max_error <= check.tolerance:
        yield f"not verified (passed {check.passed}, error {check.max_error:g} of {check.tolerance:g} tolerated)"


def _timings(record: Record | ShapeRecord | StreamRecord | TunedConfig | Timeline | ModelRecord) -> list[Timing]:
    """Return every contender's times in a record: its own, and those it was measured beside."""
    if isinstance(record, TunedConfig):
        found = list(record.confirmation)
    elif isinstance(record, Timeline):
        found = [record.plain, record.stamped]
    elif isinstance(record, StreamRecord):
        found = [record.timing, record.copy, record.torch]
    elif isinstance(record, ShapeRecord):
        found = [record.timing, *record.baseline]
    elif isinstance(record, ModelRecord):
        found = [timing for made in record.rules for timing in (made.timing, made.rest)]
        found += [peer.timing for peer in record.beside]
    else:
        found = [record.timing, *record.baseline, record.previous, *(peer.timing for peer in record.peers)]
    return [timing for timing in found if timing is not None]
