"""The README's results: everything between its two markers comes from records, everything else stays."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tensorir_ladder.harness.records import Peer, Record, path_name, write_atomically
from tensorir_ladder.reports.cases import Shape, by_product, is_size, shape_label, steps_text
from tensorir_ladder.reports.cells import NOT_MEASURED, NOT_VERIFIED, Table, number
from tensorir_ladder.reports.judgement import summary
from tensorir_ladder.reports.paths import Paths, link
from tensorir_ladder.reports.plot import Plot, ladder_plots, stage_curve, timeline_plots
from tensorir_ladder.reports.selection import Results, Section, UsageError, section_key
from tensorir_ladder.reports.sweeps import has_sweeps, product_sweeps
from tensorir_ladder.reports.table import (
    CHOICE_TITLES,
    average_gain,
    cublas_gflops,
    is_stage_count,
    measured_on,
    peers_table,
    step_label,
    tiles_in_words,
)
from tensorir_ladder.reports.templating import Markdown, render

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
MAIN_LADDERS = ("float32 ieee", "float16 ieee")


def read_readme(path: Path) -> str:
    """Read the README, byte for byte; UsageError if there is none."""
    try:
        return path.read_bytes().decode()
    except FileNotFoundError as error:
        raise UsageError(f"no {path}; write one with {BEGIN} and {END} in it") from error


def render_readme(text: str, results: Results, paths: Paths) -> str:
    """Put new results between the README's markers; UsageError if it lacks them."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in tail:
        raise UsageError(f"{paths.readme} must have {BEGIN} and after it {END}, each once")
    return f"{head}{begin}\n{results_block(results, paths)}\n{end}{tail}"


def write_readme(results: Results, paths: Paths) -> list[Path]:
    """Rewrite the README's results in place, and draw its pictures; returns the files."""
    text = render_readme(read_readme(paths.readme), results, paths)
    return [write_atomically(paths.readme, text), *(plot.write(paths.plots) for plot in pictures(results))]


def pictures(results: Results) -> list[Plot]:
    """List the README's pictures: its main ladders beside cuBLAS, a curve over stages, one block's life."""
    ratios = [plot for plot in ladder_plots(results) if plot.kind == "ratio" and _is_main(plot.section)]
    return [*ratios, *filter(None, [stage_curve(results)]), *list(timeline_plots(results))[:1]]


def results_block(results: Results, paths: Paths) -> str:
    """Render what stands between the markers: the leaders, each ladder, stages, one block's life."""
    sections = [section for section in results.sections() if section.all_choices]
    shown = [section for section in sections if section.sizes()]
    ratios = {plot.section.slug: plot for plot in pictures(results) if plot.kind == "ratio"}
    lives = list(timeline_plots(results))
    text = render(
        "readme.md.j2",
        leaders=overview(shown) if shown else None,
        ladders=[_ladder(results, paths, section, ratios.get(section.slug)) for section in sections],
        stages=summary(product_sweeps(results)) or ("Stages were swept." if has_sweeps(results) else ""),
        curve=stage_curve(results),
        life=lives[0] if lives else None,
        timed=steps_text({plot.section.first.step for plot in lives}) if lives else "",
        file=lambda plot: link(paths.readme, paths.plots / plot.file_name),
    )
    return text or "Nothing measured yet."


def overview(sections: Sequence[Section]) -> Table:
    """Make a row per ladder, a column per size: the step that is fastest there, and its ratio to cuBLAS."""
    sizes = by_product({shape for section in sections for shape in section.sizes()})
    rows = [(section.title, *(_leader_cell(section, size) for size in sizes)) for section in sections]
    note = "The fastest step of each ladder and size, and its speed over that of the faster cuBLAS form (B as stored, "
    note += "B transposed) in the same rounds. **Bold**: faster than cuBLAS."
    return Table("Where cuBLAS is passed", ("ladder", *map(_size_header, sizes)), tuple(rows), Markdown(note))


def ladder(results: Results, paths: Paths, section: Section) -> Table:
    """Make a row per step with its idea; a column per size: GFLOPS, then ratios of the default and the fastest."""
    sizes, choices = section.sizes(), section.shown_choices
    lines = {choice: {step: section.line(step, choice, at=sizes) for step in section.steps} for choice in choices}
    rows = []
    for step in section.steps:
        own = [lines[choice][step] for choice in choices]
        cells = [_cell([line.get(size) for line in own]) for size in sizes]
        rows.append((_step_link(results, paths, step), *cells, average_gain(own[0].values(), len(sizes))))
    first = lines[choices[0]]
    rows.append(("cuBLAS", *(number(cublas_gflops(first.values(), size)) for size in sizes), ""))
    return Table(section.title, ("step", *map(_size_header, sizes), "gain"), tuple(rows), _ladder_note(lines))


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
        cells = [_ratios([line.get(shape) for line in own]) for own in lines.values()]
        cells += [_peer_ratio(section.peer(shape, name)) for name in peers]
        speed = number(cublas_gflops([line for own in lines.values() for line in own], shape))
        rows.append((_size_header(shape), *cells, speed))
    header = ("m × n × k", *(f"step {step}" for step in lines), *peers, "cuBLAS, GFLOPS")
    note = "Ratio to the faster cuBLAS form of the same rounds, "
    note += f"{_choice_titles(section.shown_choices)}; **bold** where it is faster than cuBLAS."
    return Table("Other shapes", header, tuple(rows), Markdown(note))


def _is_main(section: Section) -> bool:
    return section.layout == "nn" and section.arithmetic in MAIN_LADDERS


def _ladder(results: Results, paths: Paths, section: Section, picture: Plot | None) -> dict[str, Any]:
    """Gather a ladder's picture and tables, the machine they were measured on, and how far to trust them."""
    has_peers = any(is_size(shape) for shape in section.peer_shapes())
    return {
        "title": section.title,
        "main": _is_main(section),
        "picture": picture,
        "table": ladder(results, paths, section) if section.sizes() else None,
        "others": other_shapes(section),
        "peers": peers_table(section, brief=True) if has_peers else None,
        "machine": measured_on(section.records),
        "calibration": _calibration(results, section),
    }


def _leader_cell(section: Section, size: Shape) -> str:
    """Write ``**1.17** step 6``: the fastest step at a size."""
    found = [record for step in section.steps if (record := section.line(step, section.shown_choices[-1]).get(size))]
    passed = [record for record in found if record.verification.passed]
    if not passed:
        return NOT_VERIFIED if found else NOT_MEASURED
    leader = max(passed, key=lambda record: record.ratio_to_cublas)
    return Markdown("{} step {}").format(_ratio(leader.ratio_to_cublas), leader.step)


def _ladder_note(lines: dict[str, dict[int, dict[Shape, Record]]]) -> str:
    words = [tiles_in_words(own.values(), choice) for choice, own in lines.items()]
    first = CHOICE_TITLES[next(iter(lines))]
    note = f"GFLOPS, {first}; below it the ratio to the faster cuBLAS form of the same rounds, "
    note += f"{_choice_titles(lines)}, **bold** where it is faster than cuBLAS. "
    sentences = " ".join(sentence[0].upper() + sentence[1:] for sentence in words)
    return Markdown(note) + f"{sentences} Gain: mean speed gained over the step before, {first}."


def _choice_titles(choices: Iterable[str]) -> str:
    return " · ".join(CHOICE_TITLES[choice] for choice in choices)


def _step_link(results: Results, paths: Paths, step: int) -> str:
    """Write a step's number and short name, with a link to its file where it stands beside the README."""
    file = paths.readme.parent / "steps" / path_name(f"{results.step_name(step)}.py")
    label = step_label(results, step)
    return Markdown("[{}]({})").format(label, link(paths.readme, file)) if file.is_file() else label


def _size_header(shape: Shape) -> str:
    return f"{shape_label(shape)}³" if len(set(shape)) == 1 else shape_label(shape)


def _cell(records: list[Record | None]) -> str:
    """Write the GFLOPS of the first tile choice above the ratios of all of them."""
    ratios = _ratios(records)
    if ratios in (NOT_MEASURED, NOT_VERIFIED):
        return ratios
    return Markdown("{}<br>{}").format(f"{records[0].gflops:,.0f}" if records[0] else NOT_MEASURED, ratios)


def _ratios(records: list[Record | None]) -> str:
    """Write ``0.96 · **1.17**``: the ratios to cuBLAS of each tile choice."""
    if all(record is None for record in records):
        return NOT_MEASURED
    if any(record is not None and not record.verification.passed for record in records):
        return NOT_VERIFIED
    return Markdown(" · ").join(_ratio(record.ratio_to_cublas) if record else NOT_MEASURED for record in records)


def _ratio(value: float) -> str:
    """Write a ratio to cuBLAS, bold where cuBLAS is passed even after rounding."""
    text = f"{value:.2f}"
    return Markdown("**{}**").format(text) if float(text) > 1 else text


def _peer_ratio(found: tuple[Record, Peer] | None) -> str:
    if found is None:
        return NOT_MEASURED
    record, peer = found
    return _ratio(record.ratio_of(peer.timing)) if peer.timing else peer.status


def _calibration(results: Results, section: Section) -> str:
    """Compare cuBLAS with itself through the same path: how far to trust a ratio."""
    ratios = [record.ratio_to_cublas for record in results.calibrations if section_key(record) == section.key]
    if not ratios:
        return ""
    spread = f" ({min(ratios):.3f} to {max(ratios):.3f} over {len(ratios)} records)" if len(ratios) > 1 else ""
    return f"cuBLAS against itself through the same path: {statistics.median(ratios):.3f}{spread}."
