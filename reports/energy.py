"""Energy: a table of the joules that a product takes, with watts and clocks, beside cuBLAS's faster form."""

from __future__ import annotations

from collections.abc import Iterable

from tensorir_ladder.harness.records import Record
from tensorir_ladder.reports.cells import Table
from tensorir_ladder.reports.templating import Markdown


def energy_table(records: Iterable[Record]) -> Table:
    """Make a row for each contender of each record: joules a product, clock and watts, and speed without pause."""
    header = ("GPU", "shape", "contender", "joules", "of cuBLAS's", "MHz", "W", "limit, W", "speed, of cuBLAS's")
    rows = []
    for record in records:
        for row in record.energy_rows:
            own = row["contender"] == record.timing.label
            rows.append(
                (
                    row["gpu"],
                    f"{row['shape']} {row['dtype']}" + (" nt" if row["layout"] == "nt" else ""),
                    f"step {record.step} {record.variant}, {record.tile}" if own else row["contender"],
                    f"{row['joules']:#.4g}",
                    f"{row['joules_to_cublas']:.3f}",
                    f"{row['sm_clock_mhz']:.0f}",
                    f"{row['watts']:.0f}",
                    f"{row['power_limit_w']:.0f}",
                    f"{row['speed_to_cublas']:.3f}",
                )
            )
    note = "Each launched without pause for a second at a time, in turns: joules of one "
    note += "product, by the GPU's own counter, and the SM clock. Joules and speed of cuBLAS's: of its form that is "
    note += "faster so."
    return Table("Energy and clock", header, tuple(rows), Markdown(note), left=3)
