"""The site's first page: the ladder as one chart and one table, GPU and operands chosen at the top."""

from __future__ import annotations

from collections.abc import Iterator

from tensorir_ladder.reports.web.page import Page
from tensorir_ladder.reports.web.sources import Sources


def pages(sources: Sources) -> Iterator[Page]:
    """Yield the overview."""
    yield Page("index.html", "Overview", "overview.html.j2", {}, "Overview")
