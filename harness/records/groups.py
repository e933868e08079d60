"""Sum drawn shapes up: of each group, how fast it is beside cuBLAS on the whole, and where it is worst."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tensorir_ladder.harness.records.kinds import ShapeRecord


@dataclass(frozen=True)
class ShapeGroup:
    """Shapes of one group, drawn by one seed and measured on one GPU, the worst first."""

    records: tuple[ShapeRecord, ...]

    @property
    def ratios(self) -> list[float]:
        """Speeds relative to the faster form of cuBLAS, the lowest first."""
        return [record.ratio_to_cublas for record in self.records]

    @property
    def losers(self) -> list[ShapeRecord]:
        """Shapes that cuBLAS is faster at, the worst first."""
        return [record for record in self.records if record.ratio_to_cublas < 1]

    @property
    def summary(self) -> dict[str, Any]:
        """The group as one object: which it is, how many shapes, and their ratios to cuBLAS."""
        gpu, dtype, group, seed = self.records[0].family
        return {
            "gpu": gpu,
            "dtype": dtype,
            "group": group,
            "count": len(self.records),
            "seed": seed,
            "geomean": statistics.geometric_mean(self.ratios),
            "worst": self.ratios[0],
            "share_at_least_1": sum(ratio >= 1 for ratio in self.ratios) / len(self.records),
        }


def shape_groups(records: Iterable[ShapeRecord]) -> list[ShapeGroup]:
    """Put drawn shapes that belong together into groups, in the order of their families."""
    families: dict[tuple[Any, ...], list[ShapeRecord]] = {}
    for record in records:
        families.setdefault(record.family, []).append(record)
    worst_first = (sorted(families[family], key=lambda record: record.ratio_to_cublas) for family in sorted(families))
    return [ShapeGroup(tuple(own)) for own in worst_first]
