"""Tables of text, and how values are written in their cells."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tensorir_ladder.harness.records import Resources
from tensorir_ladder.reports.templating import Markdown, clean

NOT_MEASURED = "–"
NOT_VERIFIED = "failed its check"
LONGEST_CELL = 300


@dataclass(frozen=True)
class Table:
    """A titled grid of text; the first ``left`` columns are text, the others numbers.

    What is to be Markdown in a cell or the note is :class:`reports.templating.Markdown`; all else is escaped.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    left: int = 1

    def markdown(self) -> Markdown:
        """Write the grid as a Markdown table, its note below; the title is left to the caller."""
        rule = Markdown("|".join(":--" if column < self.left else "--:" for column in range(len(self.header))))
        grid = (Markdown(" | ").join(map(_cell, row)) for row in (self.header, *self.rows))
        head, *lines = map(Markdown("| {} |").format, grid)
        text = Markdown("\n").join([head, Markdown("|{}|").format(rule), *lines])
        return Markdown("{}\n\n{}").format(text, self.note) if self.note else text


def _cell(text: str) -> str:
    return text if isinstance(text, Markdown) else clean(text, LONGEST_CELL)


def number(value: float | None, form: str = ",.0f") -> str:
    """Write a value in a format, or the sign that it was not measured."""
    return NOT_MEASURED if value is None else f"{value:{form}}"


def percent(value: float | None, form: str = "+.1f") -> str:
    """Write a gain with its sign, to a tenth of a percent; other percentages by their format."""
    return NOT_MEASURED if value is None else f"{value:{form}} %"


def occupancy_text(used: Resources | None) -> str:
    """Write ``38% (registers)``: a kernel's occupancy and what limits it."""
    return NOT_MEASURED if used is None else f"{used.occupancy:.0%} ({used.occupancy_limit})"


def span(values: Iterable[float], unit: str, digits: int = 0) -> str:
    """Write ``1965–1980 MHz``, or one value where all are equal."""
    found = sorted(values)
    low, high = f"{found[0]:,.{digits}f}", f"{found[-1]:,.{digits}f}"
    return f"{low} {unit}" if low == high else f"{low}–{high} {unit}"
