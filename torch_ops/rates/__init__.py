"""Measurements of each GPU, a file for each (``ARCH-GPU.json``, written by ``ladder microbench``).

This reads what the cost model takes; :mod:`harness.models.rate_files` reads all, with where it comes from.
"""

from __future__ import annotations

import functools
from dataclasses import fields
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from tensorir_ladder.schedules.cost import CostRates
from tensorir_ladder.torch_ops.errors import DamagedFile

FOLDER = Path(__file__).parent
REMEDY = "restore it from git, or install the package again"
Kind = TypeVar("Kind")
MODELLED = "NVIDIA H200"  # the GPU of which everything was measured that the cost model takes


class _Quantity(msgspec.Struct):
    medians: Annotated[tuple[Annotated[float, msgspec.Meta(gt=0)], ...], msgspec.Meta(min_length=1)]


class _Rates(msgspec.Struct):
    gpu: str
    quantities: dict[str, _Quantity]


@functools.cache
def cost_rates(gpu: str | None = None) -> CostRates:
    """Return what the cost model takes: of a GPU's own file what it has, and all else of ``MODELLED``'s.

    Only the order of candidates depends on it. The numbers marked as set by hand or measured once stand in the files
    with their origin.
    """
    files = [read(path, _Rates) for path in sorted(FOLDER.glob("*.json"))]
    quantities = {file.gpu: file.quantities for file in files}
    known = quantities.get(MODELLED, {}) | quantities.get(gpu, {})
    if missing := [field.name for field in fields(CostRates) if field.name not in known]:
        raise DamagedFile(f"{FOLDER} has no file of the {MODELLED} with {', '.join(missing)}; {REMEDY}")
    return CostRates(**{field.name: known[field.name].medians[0] for field in fields(CostRates)})


def read(path: Path, kind: type[Kind]) -> Kind:
    """Read a file of this package as a type; DamagedFile says what is wrong with it."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, ValueError, RecursionError) as error:  # msgspec's and Unicode's errors are ValueErrors
        raise DamagedFile(f"{path} is damaged ({error}); {REMEDY}") from error
