"""The README's results: everything between its two markers comes from records, everything else stays."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tensorir_ladder.harness.records import path_name, write_atomically
from tensorir_ladder.reports.cases import is_size, steps_text
from tensorir_ladder.reports.judgement import summary
from tensorir_ladder.reports.models import model_tables
from tensorir_ladder.reports.paths import Paths, link
from tensorir_ladder.reports.plot import Plot, ladder_plots, stage_curve, timeline_plots
from tensorir_ladder.reports.readme_tables import fastest, gpus_beside, ladder, other_shapes, overview
from tensorir_ladder.reports.selection import Results, Section, UsageError, section_key
from tensorir_ladder.reports.sweeps import has_sweeps, product_sweeps
from tensorir_ladder.reports.table import measured_on, peers_table, step_label
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
    main = _main_gpu(results)
    ratios = [plot for plot in ladder_plots(results) if plot.kind == "ratio" and _is_main(plot.section, main)]
    return [*ratios, *filter(None, [stage_curve(results)]), *list(timeline_plots(results))[:1]]


def results_block(results: Results, paths: Paths) -> str:
    """Render what stands between the markers: the leaders, GPUs side by side, each ladder, stages, one block's life."""
    main = _main_gpu(results)
    sections = [section for section in results.sections() if section.all_choices]
    sections.sort(key=lambda section: section.gpu != main)
    label = partial(_step_link, results, paths)
    shown = [section for section in sections if section.sizes()]
    ratios = {plot.section.slug: plot for plot in pictures(results) if plot.kind == "ratio"}
    lives = list(timeline_plots(results))
    text = render(
        "readme.md.j2",
        leaders=overview(shown) if shown else None,
        gpus=gpus_beside(shown, label),
        models=model_tables(results.models),
        ladders=[
            {"main": _is_main(section, main), "picture": ratios.get(section.slug), **_ladder(results, section, label)}
            for section in sections
        ],
        stages=summary(product_sweeps(results)) or ("Stages were swept." if has_sweeps(results) else ""),
        curve=stage_curve(results),
        life=lives[0] if lives else None,
        timed=steps_text({plot.section.first.step for plot in lives}) if lives else "",
        file=lambda plot: link(paths.readme, paths.plots / plot.file_name),
    )
    return text or "Nothing measured yet."


def _main_gpu(results: Results) -> str:
    """Name the GPU with the most records; ladders of others are folded."""
    counted = Counter(record.environment.gpu for record in results.records)
    return max(counted, key=lambda gpu: counted[gpu], default="")


def _is_main(section: Section, gpu: str) -> bool:
    return section.gpu == gpu and section.layout == "nn" and section.arithmetic in MAIN_LADDERS


def _step_link(results: Results, paths: Paths, step: int) -> str:
    """Write a step's number and short name, with a link to its file where it stands beside the README."""
    file = paths.readme.parent / "steps" / path_name(f"{results.step_name(step)}.py")
    label = step_label(results, step)
    return Markdown("[{}]({})").format(label, link(paths.readme, file)) if file.is_file() else label


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
