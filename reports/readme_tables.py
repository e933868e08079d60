"""The README's tables of the ladder: ratios to cuBLAS lead, each with its interval; both speeds stand below."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from tensorir_ladder.harness.records import Peer, Record
from tensorir_ladder.reports.cases import Shape, by_product, grouped, shape_label
from tensorir_ladder.reports.cells import (
    NOT_MEASURED,
    NOT_VERIFIED,
    Table,
    bold_ratio,
    interval_text,
    own_and_cublas,
)
from tensorir_ladder.reports.selection import FASTEST, Section
from tensorir_ladder.reports.table import GAINS, GAINS_NOTE, gains, is_stage_count, runs_in_words, tiles_in_words
from tensorir_ladder.reports.templating import Markdown

BOLD_NOTE = Markdown("**Bold**: faster than cuBLAS, all of the 95 % interval above 1.")
RATIO_NOTE = Markdown(
    "Ratios: speed over that of the faster cuBLAS form (B as stored, B transposed) in the same rounds, the median of "
    "the rounds' ratios; small, its 95 % interval (sign test). {}"
).format(BOLD_NOTE)
BELOW = Markdown("<br>")
HEADLINE_SIDE = 4096
EARLY_NOTE = (
    "Launched early: blocks begin while the kernel before them still runs (programmatic dependent launch), which hides "
    "a launch's latency from launches in a chain. cuBLAS's beside them are not launched so."
)


def overview(sections: Sequence[Section]) -> Table:
    """Make a row per ladder, a column per size: the step that is fastest there, and its ratio to cuBLAS.

    What is launched early has a row of its own, below its ladder's.
    """
    sizes = by_product({shape for section in sections for shape in section.sizes()})
    rows = []
    for section in sections:
        rows.append((section.title, *(_leader_cell(section.leader(size)) for size in sizes)))
        early = [section.fastest_early(size) for size in sizes]
        rows += [(f"{section.title}, launched early", *map(_leader_cell, early))] if any(early) else []
    note = ["The fastest step of each ladder and size.", RATIO_NOTE, *[EARLY_NOTE] * (len(rows) > len(sections))]
    return Table("Where cuBLAS is passed", ("ladder", *map(size_header, sizes)), tuple(rows), Markdown(" ").join(note))


def headline(sections: Sequence[Sequence[Section]]) -> str:
    """Say in a sentence how fast the fastest steps are on the first GPU, at the largest size of the summary's."""
    parts = []
    for own in sections:
        size = max((size for size in own[0].sizes() if size[0] <= HEADLINE_SIDE), key=lambda size: size[0])
        leader = own[0].leader(size)
        parts.append(
            Markdown("**{}** of cuBLAS in {} (step {})").format(
                f"{leader.ratio_to_cublas:.2f}", own[0].dtype, leader.step
            )
        )
    return Markdown("On an {}, at {}: {}.").format(sections[0][0].gpu, size_header(size), Markdown(", ").join(parts))


def steps_in_short(
    sections: Sequence[Sequence[Section]], sizes: Sequence[Shape], label: Callable[[int], str], ideas: Mapping[int, str]
) -> Table:
    """Make a row per step: its idea, and its ratio to cuBLAS at a few sizes, all GPUs side by side."""
    rows = []
    for own in sections:
        for step in own[0].steps:
            lines = [section.line(step, "default", at=sizes) for section in own]
            cells = (_side_by_side([line.get(size) for line in lines]) for size in sizes)
            rows.append((label(step), ideas.get(step, ""), own[0].dtype, *cells))
    gpus = " · ".join(section.gpu for section in sections[0])
    note = Markdown("{}: speed over that of the faster cuBLAS form, default configuration. {}").format(gpus, BOLD_NOTE)
    return Table("The ladder", ("step", "idea", "operands", *map(size_header, sizes)), tuple(rows), note, left=3)


def ladder(section: Section, label: Callable[[int], str]) -> Table:
    """Make a row per step, a column per size: the default configuration's ratio, and both speeds; then the gains."""
    sizes = section.sizes()
    lines = {step: section.line(step, "default", at=sizes) for step in section.steps}
    rows = [
        (label(step), *(_cell(line.get(size)) for size in sizes), *gains(section, step, line))
        for step, line in lines.items()
        if line
    ]
    shown = [record for line in lines.values() for record in line.values()]
    tiles = tiles_in_words(lines.values(), "default")
    note = "Ratio to cuBLAS, its interval, and TFLOPS: ours / cuBLAS's in the same rounds. "
    note += f"Default {tiles} {GAINS_NOTE} "
    return Table(section.title, ("step", *map(size_header, sizes), *GAINS), tuple(rows), note + runs_in_words(shown))


def fastest(section: Section, label: Callable[[int], str]) -> Table | None:
    """Make a row per step that another configuration than its default makes faster somewhere; None without any."""
    sizes = section.sizes()
    lines = {label(step): section.line(step, FASTEST, at=sizes) for step in section.steps}
    lines = {name: line for name, line in lines.items() if any(r.tile_choice != "default" for r in line.values())}
    rows = [(name, *(_small_cell(line.get(size)) for size in sizes)) for name, line in lines.items()]
    note = "Of all that was measured, in any run, whatever tile, stages and variant; steps whose default is fastest "
    note += "everywhere are left out. Launched as cuBLAS is."
    header = ("step", *map(size_header, sizes))
    return Table("Fastest configuration of each step", header, tuple(rows), note) if rows else None


def other_shapes(section: Section) -> Table | None:
    """Make a row per shape that has no place on an axis of sizes, a column per step and peer; None without any."""
    shapes = section.other_shapes()
    if not shapes:
        return None
    peers = [name for name in section.peer_names() if not is_stage_count(name)]
    peers = [name for name in peers if any(section.peer(shape, name) for shape in shapes)]
    lines = {step: [section.line(step, choice) for choice in section.shown_choices] for step in section.steps}
    lines = {step: own for step, own in lines.items() if any(shape in line for line in own for shape in shapes)}
    rows = []
    for shape in shapes:
        cells = [_small_cells([line.get(shape) for line in own]) for own in lines.values()]
        cells += [_peer_cell(section.peer(shape, name)) for name in peers]
        leader = section.leader(shape)
        rows.append((size_header(shape), *cells, own_and_cublas(leader) if leader else NOT_MEASURED))
    header = ("m × n × k", *(f"step {step}" for step in lines), *peers, "fastest step / cuBLAS, TFLOPS")
    note = "Ratio to cuBLAS and its interval, default configuration; below it the fastest where that is another. Peers "
    note += "in rounds of their own with cuBLAS."
    return Table("Other shapes", header, tuple(rows), note)


def gpus_beside(sections: Sequence[Section], label: Callable[[int], str]) -> list[Table]:
    """Make a table per ladder that was measured on several GPUs: a row per step, ratios of all GPUs side by side."""
    ladders = grouped(sections, lambda section: section.key[1:])
    return [_gpus_table(own, label) for own in ladders.values() if len(own) > 1]


def size_header(shape: Shape) -> str:
    """Write ``1024³`` for a square product, ``MxNxK`` otherwise."""
    return f"{shape_label(shape)}³" if len(set(shape)) == 1 else shape_label(shape)


def _gpus_table(sections: Sequence[Section], label: Callable[[int], str]) -> Table:
    steps = sorted(set.intersection(*(set(section.steps) for section in sections)))
    sizes = by_product(set.intersection(*(set(section.sizes()) for section in sections)))
    lines = {step: [section.line(step, "default", at=sizes) for section in sections] for step in steps}
    rows = [
        (label(step), *(_side_by_side([line.get(size) for line in own]) for size in sizes))
        for step, own in lines.items()
    ]
    gpus = " · ".join(section.gpu for section in sections)
    runs = [runs_in_words([r for own in lines.values() for r in own[place].values()]) for place in range(len(sections))]
    ours = Markdown("{}: ratios to each GPU's own cuBLAS, default configuration; **bold** as above. ").format(gpus)
    note = ours + " ".join(f"{section.gpu}: {run[0].lower()}{run[1:]}" for section, run in zip(sections, runs))
    return Table(sections[0].title.partition(", ")[2], ("step", *map(size_header, sizes)), tuple(rows), note)


def _leader_cell(record: Record | None) -> str:
    """Write ``**1.17** step 6`` with the interval below it: the fastest record at a size."""
    if not _timed(record):
        return _ratio(record)
    return Markdown("{} step {}<br>{}").format(_ratio(record), record.step, interval_text(record.ratio_interval))


def _cell(record: Record | None) -> str:
    """Write ratio, interval, and both speeds, one below the other."""
    return BELOW.join([_small_cell(record), own_and_cublas(record)]) if _timed(record) else _ratio(record)


def _small_cell(record: Record | None) -> str:
    return BELOW.join([_ratio(record), interval_text(record.ratio_interval)]) if _timed(record) else _ratio(record)


def _small_cells(records: Iterable[Record | None]) -> str:
    """Write the cells of several choices, once where they chose the same record."""
    different = {record.key if record else None: record for record in records}
    return BELOW.join(map(_small_cell, different.values()))


def _side_by_side(records: Sequence[Record | None]) -> str:
    return Markdown(" · ").join(map(_ratio, records)) if any(records) else NOT_MEASURED


def _ratio(record: Record | None) -> str:
    if record is None or not record.verification.passed:
        return NOT_MEASURED if record is None else NOT_VERIFIED
    return bold_ratio(record.ratio_to_cublas, record.ratio_interval)


def _timed(record: Record | None) -> bool:
    return record is not None and record.verification.passed


def _peer_cell(found: tuple[Record, Peer] | None) -> str:
    if found is None:
        return NOT_MEASURED
    record, peer = found
    if peer.timing is None:
        return peer.status
    return bold_ratio(record.ratio_of(peer.timing), record.interval_of(peer.timing))
