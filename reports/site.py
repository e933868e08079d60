"""Every generated page of a set of reports, by file."""

from __future__ import annotations

from pathlib import Path

from tensorir_ladder.harness.records import write_atomically
from tensorir_ladder.reports.page import page_path, render_page
from tensorir_ladder.reports.paths import Paths
from tensorir_ladder.reports.selection import Results
from tensorir_ladder.reports.stage_page import has_sweeps, render_stage_page


def render_pages(results: Results, paths: Paths) -> dict[Path, str]:
    """A page per step; one on stages where stages were swept."""
    pages = {page_path(results, paths, step): render_page(results, paths, step) for step in results.steps()}
    return pages | ({paths.stages_page: render_stage_page(results, paths)} if has_sweeps(results) else {})


def write_pages(results: Results, paths: Paths) -> list[Path]:
    """Write every page; returns the files."""
    return [write_atomically(path, text) for path, text in render_pages(results, paths).items()]
