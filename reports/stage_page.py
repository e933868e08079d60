"""The page "How many stages?": stage sweeps, the depth model judged by them, and advice by workload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tensorir_ladder.reports.advice import BOUNDS, advice_table, copy_rate_sentence
from tensorir_ladder.reports.judgement import (
    Verdict,
    correlations_table,
    judgement_table,
    misses_table,
    setbacks,
    setbacks_sentence,
    setbacks_table,
    verdicts,
)
from tensorir_ladder.reports.page import GENERATED, how_measured
from tensorir_ladder.reports.paths import Paths, link
from tensorir_ladder.reports.plot import speed_kind, stage_plots
from tensorir_ladder.reports.selection import Results, Section
from tensorir_ladder.reports.sweep_tables import (
    overview_table,
    stream_table,
    streams_overview,
    tradeoff_table,
    variant_gains_table,
    variant_sentences,
)
from tensorir_ladder.reports.sweeps import (
    CLOSE_PCT,
    StageSweep,
    StreamSection,
    StreamSweep,
    by_case,
    stage_sweeps,
    stream_sweeps,
)
from tensorir_ladder.reports.table import Table, peers_table

TITLE = "How many stages?"


def has_sweeps(results: Results) -> bool:
    """Whether there is anything for the page to say."""
    return bool(stream_sweeps(results)) or any(stage_sweeps(section) for section in results.sections())


def render_stage_page(results: Results, paths: Paths) -> str:
    """The whole page."""
    swept = {section.title: (section, sweeps) for section in results.sections() if (sweeps := stage_sweeps(section))}
    streams = stream_sweeps(results)
    blocks = [f"# {TITLE}", GENERATED, _introduction()]
    for gpu in dict.fromkeys([*(section.gpu for section, _ in swept.values()), *(s.section.gpu for s in streams)]):
        blocks += _advice(gpu, [sweep for _, sweeps in swept.values() for sweep in sweeps], streams)
    for section, sweeps in swept.values():
        blocks += [f"## {section.title}", *_products(results, paths, section, sweeps)]
    for section in dict.fromkeys(sweep.section for sweep in streams):
        own = [sweep for sweep in streams if sweep.section == section]
        blocks += [f"## Memory-bound workloads: {section.title}", *_streams(results, paths, section, own)]
    return "\n\n".join(blocks) + "\n"


def summary(results: Results) -> str:
    """One sentence of the judgement for the README; empty without a forecast."""
    found = [verdict for section in results.sections() for verdict in verdicts(stage_sweeps(section))]
    if not found:
        return ""
    held_out = [verdict for verdict in found if verdict.held_out]
    text = (
        f"The depth model's recommendation is within {CLOSE_PCT:g} % of the best swept depth in {_right(found)} sweeps"
    )
    return text + (f", {_right(held_out)} of them on shapes held out." if held_out else ".")


def _introduction() -> str:
    return (
        "Stages are ring slots of each shared operand: with n of them, n − 1 tiles are on their way while one is "
        "computed on; 1 stage is no pipeline. Each further stage costs shared memory, and with it, at some point, "
        "resident blocks."
    )


def _advice(gpu: str, products: Sequence[StageSweep], streams: Sequence[StreamSweep]) -> list[str]:
    own = [sweep for sweep in products if sweep.section.gpu == gpu]
    table = advice_table(own, [sweep for sweep in streams if sweep.section.gpu == gpu])
    return [f"## {table.title}: {gpu}", table.markdown(), BOUNDS]


def _products(results: Results, paths: Paths, section: Section, sweeps: list[StageSweep]) -> list[str]:
    files = _images(results, paths, section)
    found = verdicts(sweeps)
    blocks = []
    for case, own in by_case(sweeps).items():
        blocks += [f"### Stages and speed: {case}", overview_table(own).markdown()]
        blocks.append(files[speed_kind(own[0])])
        costs = {sweep.size: tradeoff_table(sweep) for sweep in own}
        blocks.append(_folded(f"What each stage costs: {', '.join(costs)}", costs))
    blocks += ["### The depth model judged", *_judgement(found)]
    blocks += [files["stages-predicted"]] if "stages-predicted" in files else []
    hurt = setbacks_table(setbacks(sweeps))
    blocks += ["### Where a stage more hurts", setbacks_sentence(sweeps), *([hurt.markdown()] if hurt else [])]
    blocks += _variants(sweeps, files)
    blocks += ["### Beside peers", peers_table(section).markdown()] if section.peer_shapes() else []
    records = [record for sweep in sweeps for record in sweep.records]
    return [*blocks, "**How it was measured**", how_measured(records)]


def _judgement(found: list[Verdict]) -> list[str]:
    if not found:
        return ["No swept record carries a forecast."]
    misses = misses_table(found)
    missed = [f"**{misses.title}**", misses.markdown()] if misses else ["No recommendation misses."]
    return [judgement_table(found).markdown(), *missed, _folded("Every sweep", {"": correlations_table(found)})]


def _variants(sweeps: list[StageSweep], files: dict[str, str]) -> list[str]:
    table = variant_gains_table(sweeps)
    if table is None:
        return []
    sentences = "\n".join(f"- {sentence}" for sentence in variant_sentences(sweeps))
    images = [text for kind, text in files.items() if "-stages-variants-" in kind]
    return ["### What the variants gain", sentences, *images, _folded("Every pair", {"": table})]


def _streams(results: Results, paths: Paths, section: StreamSection, sweeps: list[StreamSweep]) -> list[str]:
    blocks = [streams_overview(sweeps).markdown(), copy_rate_sentence(sweeps)]
    blocks += _images(results, paths, section).values()
    for workload in dict.fromkeys(sweep.workload for sweep in sweeps):
        own = [sweep for sweep in sweeps if sweep.workload == workload]
        blocks.append(_folded(f"What each stage of {workload} costs", {s.size: stream_table(s) for s in own}))
    records = [record for sweep in sweeps for record in sweep.everything]
    return [*filter(None, blocks), "**How it was measured**", how_measured(records)]


def _images(results: Results, paths: Paths, section: Section | StreamSection) -> dict[str, str]:
    """The section's pictures as Markdown, by kind."""
    own = {plot.kind: paths.plots / plot.file_name for plot in stage_plots(results) if plot.section == section}
    words = {kind: f"{kind.replace('-', ' ')}, {section.title}" for kind in own}
    return {kind: f"![{words[kind]}]({link(paths.stages_page, file)})" for kind, file in own.items()}


def _folded(line: str, tables: Mapping[str, Table]) -> str:
    """Tables behind one line, each under its name where there are several."""
    named = {f"**{name}**\n\n" if len(tables) > 1 else "": table for name, table in tables.items()}
    text = "\n\n".join(name + table.markdown() for name, table in named.items())
    return f"<details><summary>{line}</summary>\n\n{text}\n\n</details>"


def _right(found: Sequence[Verdict]) -> str:
    return f"{sum(verdict.right for verdict in found)} of {len(found)}"
