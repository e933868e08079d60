"""The steps' own files, coloured: what the table and the lessons link to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tensorir_ladder.reports.web.page import Page, highlight
from tensorir_ladder.reports.web.sources import SiteSources

STEPS = Path(__file__).resolve().parents[2] / "steps"


def pages(sources: SiteSources) -> Iterator[Page]:
    """Yield a page per step's file."""
    for step in sources.steps.values():
        text = (STEPS / f"{step.name}.py").read_text(encoding="utf-8")
        values = {"step": step, "code": highlight(text)}
        yield Page(f"source/{step.name}.html", f"steps/{step.name}.py", "source.html.j2", values, picks_gpu=False)
