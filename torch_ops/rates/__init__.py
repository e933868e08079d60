"""Measurements of each GPU, a file for each (``ARCH-GPU.json``, written by ``ladder microbench``).

This reads what the cost model takes; :mod:`harness.models.rate_files` reads all, with where it comes from.
"""

from __future__ import annotations

import functools
import json
from dataclasses import fields
from pathlib import Path

from tensorir_ladder.schedules.cost import CostRates

FOLDER = Path(__file__).parent


@functools.cache
def cost_rates(gpu: str | None = None) -> CostRates:
    """Return what the cost model takes from a GPU's file, or from the first file there is where it has none.

    Only the order of candidates depends on it. The numbers marked as set by hand or measured once stand in the files
    with their origin.
    """
    files = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.json"))]
    able = [file for file in files if all(field.name in file["quantities"] for field in fields(CostRates))]
    file = next((file for file in able if file["gpu"] == gpu), able[0])
    return CostRates(**{field.name: file["quantities"][field.name]["medians"][0] for field in fields(CostRates)})
