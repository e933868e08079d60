"""The page on whole models: our schedules as rules for TVM, beside stock TVM, dlight and torch; and their functions."""

from __future__ import annotations

from collections.abc import Iterator

from tensorir_ladder.harness.records import ModelRecord
from tensorir_ladder.reports.cases import grouped, slug
from tensorir_ladder.reports.models import function_tables, model_tables
from tensorir_ladder.reports.web.page import Page
from tensorir_ladder.reports.web.sources import SiteSources


def pages(sources: SiteSources) -> Iterator[Page]:
    """Yield the page, which says so where no model was measured."""
    by_gpu = grouped(sources.results.models, lambda record: slug(record.environment.gpu))
    values = {
        "unmeasured": {gpu: name for gpu, name in sources.gpus.items() if gpu not in by_gpu},
        "tables": {gpu: model_tables(own) for gpu, own in by_gpu.items()},
        "functions": {gpu: _functions(own) for gpu, own in by_gpu.items()},
        "cases": {_case(record): _title(record) for record in sources.results.models},
        "commands": {gpu: list(dict.fromkeys(record.command for record in own)) for gpu, own in by_gpu.items()},
    }
    about = "Whole models by these schedules as rules for TVM, beside stock TVM, dlight and torch"
    yield Page("models.html", "Models", "models.html.j2", values, "Models", description=about)


def _functions(records: list[ModelRecord]) -> list[tuple[str, object]]:
    """Make the table of each case's functions, with the case's name among the page's choices."""
    return [(_case(record), table) for record in records for table in function_tables([record])]


def _case(record: ModelRecord) -> str:
    return slug(record.model, record.case)


def _title(record: ModelRecord) -> str:
    return f"{record.model}, {record.case}"
