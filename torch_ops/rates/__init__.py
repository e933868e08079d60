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
MODELLED = "NVIDIA H200"  # the GPU of which everything was measured that the cost model takes


@functools.cache
def cost_rates(gpu: str | None = None) -> CostRates:
    """Return what the cost model takes: of a GPU's own file what it has, and all else of ``MODELLED``'s.

    Only the order of candidates depends on it. The numbers marked as set by hand or measured once stand in the files
    with their origin.
    """
    files = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.json"))]
    quantities = {file["gpu"]: file["quantities"] for file in files}
    known = quantities[MODELLED] | quantities.get(gpu, {})
    return CostRates(**{field.name: known[field.name]["medians"][0] for field in fields(CostRates)})
