"""The README's results: everything between its two markers comes from records, everything else stays."""

from __future__ import annotations

import statistics
from pathlib import Path

from harness.records import Record, write_atomically

from .page import page_path
from .paths import Paths, link
from .plot import ladder_plots, peaks
from .selection import Results, Section, Shape, shape_label
from .stage_page import TITLE, has_sweeps, summary
from .table import NOT_MEASURED, NOT_VERIFIED, Table, average_gain, cublas_cell, peers_table, span, tiles_in_words

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"


class ReadmeError(ValueError):
    """A README that cannot take results: it is missing, or its markers are."""


def read_readme(path: Path) -> str:
    """The README's text, byte for byte; ReadmeError if there is none."""
    try:
        return path.read_bytes().decode()
    except FileNotFoundError as error:
        raise ReadmeError(f"no {path}; write one with {BEGIN} and {END} in it") from error


def render_readme(text: str, results: Results, paths: Paths) -> str:
    """The README with new results between its markers; ReadmeError if it lacks them."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in tail:
        raise ReadmeError(f"{paths.readme} must have {BEGIN} and after it {END}, each once")
    return f"{head}{begin}\n{results_block(results, paths)}\n{end}{tail}"


def write_readme(results: Results, paths: Paths) -> Path:
    """Rewrite the README's results in place."""
    text = render_readme(read_readme(paths.readme), results, paths)
    return write_atomically(paths.readme, text)


def results_block(results: Results, paths: Paths) -> str:
    """What stands between the markers: per section a table, a plot, machine and calibration; then stages."""
    blocks = []
    for section in results.sections():
        if section.choices:
            blocks += [f"### {section.title}", ladder(results, paths, section).markdown()]
            blocks += [
                *_images(results, paths, section),
                _peers(section),
                _machine(section),
                _calibration(results, section),
            ]
    if has_sweeps(results):
        page = link(paths.readme, paths.stages_page)
        blocks.append(f"[{TITLE}]({page}): stage sweeps, and advice by workload. {summary(results)}".rstrip())
    return "\n\n".join(block for block in blocks if block) or "Nothing measured yet."


def ladder(results: Results, paths: Paths, section: Section) -> Table:
    """A row per step with its idea; a column per size: GFLOPS, then ratios with default and best tile."""
    shapes = section.shapes()
    lines = {choice: {step: section.line(step, choice) for step in section.steps} for choice in section.choices}
    rows = []
    for step in section.steps:
        own = [lines[choice][step] for choice in section.choices]
        cells = [_cell([line.get(shape) for line in own]) for shape in shapes]
        name = f"[{results.step_title(step)}]({link(paths.readme, page_path(results, paths, step))})"
        rows.append((name, *cells, average_gain(own[0].values(), len(shapes))))
    first = lines[section.choices[0]]
    rows.append(("cuBLAS", *(cublas_cell(first.values(), shape) for shape in shapes), ""))
    note = (
        f"GFLOPS with the {section.choices[0]} tile; below it the ratio to the faster cuBLAS form of the same rounds, "
    )
    note += f"{' · '.join(f'{choice} tile' for choice in section.choices)}. "
    words = [tiles_in_words(lines[choice].values(), choice) for choice in section.choices]
    note += " ".join(sentence[0].upper() + sentence[1:] for sentence in words)
    note += f" Gain: mean speed gained over the step before, {section.choices[0]} tile."
    return Table(section.title, ("step", *map(_size_header, shapes), "gain"), tuple(rows), note)


def _size_header(shape: Shape) -> str:
    return f"{shape_label(shape)}³" if len(set(shape)) == 1 else shape_label(shape)


def _cell(records: list[Record | None]) -> str:
    """GFLOPS of the first tile choice above the ratios of all of them."""
    if all(record is None for record in records):
        return NOT_MEASURED
    if any(record is not None and not record.verification.passed for record in records):
        return NOT_VERIFIED
    speed = f"{records[0].gflops:,.0f}" if records[0] else NOT_MEASURED
    ratios = [f"{record.ratio_to_cublas:.2f}" if record else NOT_MEASURED for record in records]
    return f"{speed}<br>{' · '.join(ratios)}"


def _images(results: Results, paths: Paths, section: Section) -> list[str]:
    files = {
        p.kind: link(paths.readme, paths.plots / p.file_name) for p in ladder_plots(results) if p.section == section
    }
    others = ", ".join(f"[{kind.replace('-', ' ')}]({path})" for kind, path in files.items() if kind != "gflops")
    origin = peaks().get(section.gpu, {}).get("origin")
    roof = f" The roofline's peak and bandwidth: {origin}." if origin else ""
    return [f"![GFLOPS per step and size, {section.title}]({files['gflops']})", f"More plots: {others}.{roof}"]


def _peers(section: Section) -> str:
    """Beside what a user might take instead; nothing where no peer was asked for."""
    return f"Beside peers:\n\n{peers_table(section, brief=True).markdown()}" if section.peer_shapes() else ""


def _machine(section: Section) -> str:
    places = [record.environment for record in section.records]
    days = sorted({place.recorded_at[:10] for place in places})
    return (
        f"{section.gpu}, driver {', '.join(sorted({place.driver for place in places}))}; SM clock "
        f"{span((p.before.sm_clock_mhz for p in places), 'MHz')} before and "
        f"{span((p.after.sm_clock_mhz for p in places), 'MHz')} after each measurement, power after it "
        f"{span((p.after.power_w for p in places), 'W')}; measured {' to '.join(dict.fromkeys((days[0], days[-1])))}, "
        f"revision {', '.join(sorted({place.revision[:12] for place in places}))}."
    )


def _calibration(results: Results, section: Section) -> str:
    """cuBLAS against itself through the same path: how far to trust a ratio."""
    ratios = [record.ratio_to_cublas for record in results.calibration(section)]
    if not ratios:
        return ""
    spread = f" ({min(ratios):.3f} to {max(ratios):.3f} over {len(ratios)} records)" if len(ratios) > 1 else ""
    return f"cuBLAS against itself through the same path: {statistics.median(ratios):.3f}{spread}."
