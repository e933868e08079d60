"""Results in the README and in docs/results.md: what is between markers comes from records, all else stays."""

from __future__ import annotations

import ast
import re
import statistics
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tensorir_ladder.harness.commands.values import UsageError
from tensorir_ladder.harness.records import path_name, write_atomically
from tensorir_ladder.reports.cases import Shape, is_size, steps_text
from tensorir_ladder.reports.energy import energy_table
from tensorir_ladder.reports.judgement import summary
from tensorir_ladder.reports.models import model_tables, whole_models
from tensorir_ladder.reports.paths import Paths, link
from tensorir_ladder.reports.plot import Plot, climb_plot, ladder_plots, shape_plots, stage_curve, timeline_plots
from tensorir_ladder.reports.readme_tables import (
    fastest,
    gpus_beside,
    headline,
    ladder,
    other_shapes,
    overview,
    steps_in_short,
)
from tensorir_ladder.reports.selection import Results, Section, section_key
from tensorir_ladder.reports.shapes import latest, shapes_table
from tensorir_ladder.reports.sweeps import has_sweeps, product_sweeps
from tensorir_ladder.reports.table import measured_on, peers_table, step_label
from tensorir_ladder.reports.templating import Markdown, render

STEPS = Path(__file__).resolve().parents[1] / "steps"
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
SUMMARY_BEGIN, SUMMARY_END = "<!-- summary:begin -->", "<!-- summary:end -->"
MAIN_LADDERS = ("float32 ieee", "float16 ieee")
SUMMARY_SIDES = (1024, 4096)


def read_document(path: Path) -> str:
    """Read a document, byte for byte; UsageError if there is none, or it is no text."""
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is no text in UTF-8 ({error}); give a document") from error
    except FileNotFoundError as error:
        raise UsageError(f"no {path}; write one with {BEGIN} and {END} in it") from error


def render_document(text: str, document: Path, results: Results, paths: Paths) -> str:
    """Put new results between a document's markers; UsageError if it lacks them."""
    blocks = {(BEGIN, END): results_block, (SUMMARY_BEGIN, SUMMARY_END): summary_block}
    present = {markers: block for markers, block in blocks.items() if any(marker in text for marker in markers)}
    if not present:
        raise UsageError(f"{document} must have {BEGIN} and after it {END}, each once")
    for (begin, end), block in present.items():
        head, found, rest = text.partition(begin)
        _, ended, tail = rest.partition(end)
        if not found or not ended or begin in rest or end in tail:
            raise UsageError(f"{document} must have {begin} and after it {end}, each once")
        text = f"{head}{begin}\n{block(results, paths, document)}\n{end}{tail}"
    return text


def write_readme(results: Results, paths: Paths) -> list[Path]:
    """Rewrite the results of each document in place, and draw their pictures; returns the files."""
    texts = {path: render_document(read_document(path), path, results, paths) for path in paths.documents}
    written = [write_atomically(path, text) for path, text in texts.items()]
    return [*written, *(plot.write(paths.plots) for plot in pictures(results, paths))]


def pictures(results: Results, paths: Paths) -> list[Plot]:
    """List the documents' pictures: ladders by size, a curve over stages, one block's life; by step in a summary."""
    main = _main_gpu(results)
    ratios = [plot for plot in ladder_plots(results) if plot.kind == "ratio" and _is_main(plot.section, main)]
    summarized = any(SUMMARY_BEGIN in read_document(path) for path in paths.documents)
    climb = _climb(results) if summarized else None
    found = [climb, stage_curve(results), *list(timeline_plots(results))[:1]]
    return [*ratios, *filter(None, found), *_drawn_shapes(results)]


def _drawn_shapes(results: Results) -> list[Plot]:
    main = _main_gpu(results)
    return [plot for plot in shape_plots(results) if plot.section.group.records[0].environment.gpu == main]


def summary_block(results: Results, paths: Paths, document: Path) -> str:
    """Render the README's part: one sentence with numbers, one chart, and a line for each step."""
    sections = _main_sections(results)
    picture = _climb(results)
    if not sections or not picture:
        return "Nothing measured yet."
    return render(
        "summary.md.j2",
        headline=headline(sections),
        picture=picture,
        models=whole_models([record for record in results.models if record.environment.gpu == _main_gpu(results)]),
        table=steps_in_short(sections, _summary_sizes(sections), partial(_step_link, results, document), _ideas()),
        file=lambda plot: link(document, paths.plots / plot.file_name),
    )


def _main_sections(results: Results) -> list[list[Section]]:
    """List the main ladders, each as it was measured on every GPU that has all of them, the main GPU first."""
    main = _main_gpu(results)
    shown = [section for section in results.sections() if section.sizes()]
    gpus = sorted({section.gpu for section in shown}, key=lambda gpu: gpu != main)
    by_gpu = [[s for s in shown if _is_main(s, gpu)] for gpu in gpus]
    most = max(map(len, by_gpu), default=0)
    return [list(own) for own in zip(*(own for own in by_gpu if len(own) == most))]


def _summary_sizes(sections: list[list[Section]]) -> list[Shape]:
    common = set.intersection(*(set(section.sizes()) for own in sections for section in own))
    return [size for side in SUMMARY_SIDES if (size := (side, side, side)) in common]


def _climb(results: Results) -> Plot | None:
    """Return the chart of the main GPU's ladders; None where there is none, or no size of the summary."""
    sections = _main_sections(results)
    sizes = _summary_sizes(sections) if sections else []
    return climb_plot(results, [own[0] for own in sections], sizes) if sizes else None


def _ideas() -> dict[int, str]:
    """Read each step's idea from its file's first line, ``Step N, name: idea.``, without importing it."""
    found = {}
    for path in STEPS.glob("step[0-9]*_*.py"):
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        if match := re.match(r"Step (\d+), [^:]*: ([^\n]*?)\.?(?:\n|$)", text):
            found[int(match[1])] = match[2]
    return found


def results_block(results: Results, paths: Paths, document: Path) -> str:
    """Render what stands between the markers: the leaders, GPUs side by side, each ladder, stages, one block's life."""
    main = _main_gpu(results)
    sections = [section for section in results.sections() if section.all_choices]
    sections.sort(key=lambda section: section.gpu != main)
    label = partial(_step_link, results, document)
    shown = [section for section in sections if section.sizes()]
    ratios = {plot.section.slug: plot for plot in pictures(results, paths) if plot.kind == "ratio"}
    lives = list(timeline_plots(results))
    text = render(
        "readme.md.j2",
        leaders=overview(shown) if shown else None,
        gpus=gpus_beside(shown, label),
        models=model_tables(results.models),
        shapes=shapes_table(latest(results.shapes)) if results.shapes else None,
        drawn=_drawn_shapes(results),
        energy=energy_table(results.energy) if results.energy else None,
        ladders=[
            {"main": _is_main(section, main), "picture": ratios.get(section.slug), **_ladder(results, section, label)}
            for section in sections
        ],
        stages=summary(product_sweeps(results)) or ("Stages were swept." if has_sweeps(results) else ""),
        curve=stage_curve(results),
        life=lives[0] if lives else None,
        timed=steps_text({plot.section.first.step for plot in lives}) if lives else "",
        file=lambda plot: link(document, paths.plots / plot.file_name),
    )
    return text or "Nothing measured yet."


def _main_gpu(results: Results) -> str:
    """Name the GPU with the most records; ladders of others are folded."""
    counted = Counter(record.environment.gpu for record in results.records)
    return max(counted, key=lambda gpu: counted[gpu], default="")


def _is_main(section: Section, gpu: str) -> bool:
    return section.gpu == gpu and section.layout == "nn" and section.arithmetic in MAIN_LADDERS


def _step_link(results: Results, document: Path, step: int) -> str:
    """Write a step's number and short name, with a link to its file where the document lies in the project."""
    file, label = STEPS / path_name(f"{results.step_name(step)}.py"), step_label(results, step)
    own = file.is_file() and document.is_relative_to(STEPS.parent)
    return Markdown("[{}]({})").format(label, link(document, file)) if own else label


def _ladder(results: Results, section: Section, label: Callable[[int], str]) -> dict[str, Any]:
    """Gather a ladder's tables, the machine they were measured on, and how far to trust them."""
    has_peers = any(is_size(shape) for shape in section.peer_shapes())
    return {
        "title": section.title,
        "table": ladder(section, label) if section.sizes() else None,
        "fastest": fastest(section, label) if section.sizes() else None,
        "others": other_shapes(section),
        "peers": peers_table(section, brief=True) if has_peers else None,
        "machine": measured_on(section.records),
        "calibration": _calibration(results, section),
    }


def _calibration(results: Results, section: Section) -> str:
    """Compare cuBLAS with itself through the same path: how far to trust a ratio."""
    ratios = [record.ratio_to_cublas for record in results.calibrations if section_key(record) == section.key]
    if not ratios:
        return ""
    spread = f" ({min(ratios):.3f} to {max(ratios):.3f} over {len(ratios)} records)" if len(ratios) > 1 else ""
    return f"cuBLAS against itself through the same path: {statistics.median(ratios):.3f}{spread}."
