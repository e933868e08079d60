"""What was measured of GPUs, a file for each: rates, times of kernels with what is fitted to them, tuned shapes.

- ``rates/`` (``ladder microbench``): read here as the cost model takes them; :mod:`harness.models.rate_files` reads
  all, with where it comes from.
- ``estimates/``: what the cost model takes of GPUs without such a file, by architecture, each number with its source.
- ``costs/`` (``ladder calibrate``): menus of the call's kernels (:mod:`torch_ops.menu`), and trees that correct the
  schedules' formulas.
- ``tuned/``: shapes for which we know the fastest kernel (:mod:`torch_ops.tuned_here`).
"""

from __future__ import annotations

import functools
import re
from dataclasses import fields
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from tensorir_ladder.schedules.cost import CLOCK_GHZ, CostRates
from tensorir_ladder.schedules.errors import DamagedFile
from tensorir_ladder.schedules.trees import Trees

RATES, COSTS, TUNED = (Path(__file__).parent / name for name in ("rates", "costs", "tuned"))
ESTIMATES = Path(__file__).parent / "estimates" / "families.json"
COPIED = 0.9  # of the memory's bandwidth that a copy reaches, as an H200's does
REMEDY = "restore it from git, or install the package again"
Kind = TypeVar("Kind")
MODELLED = "NVIDIA H200"  # the GPU of which everything was measured that the cost model takes


class _Quantity(msgspec.Struct):
    medians: Annotated[tuple[Annotated[float, msgspec.Meta(gt=0)], ...], msgspec.Meta(min_length=1)]


class _Rates(msgspec.Struct):
    gpu: str
    quantities: dict[str, _Quantity]


class _Family(msgspec.Struct):
    quantities: dict[str, _Quantity]


class _Estimates(msgspec.Struct):
    families: dict[str, _Family]


@functools.cache
def cost_rates(gpu: str | None = None, arch: str = "", memory_bytes_per_cycle: float = 0) -> CostRates:
    """Return what the cost model takes: of a GPU's own file, else estimates, and all else of ``MODELLED``'s file.

    Estimates are those of its architecture's family; its bandwidth is what its driver says, in bytes of a cycle of the
    multiprocessors, if that is not 0. Only the order of candidates depends on it. The numbers marked as set by hand or
    measured once stand in the files with their origin.
    """
    files = [read(path, _Rates) for path in sorted(RATES.glob("*.json"))]
    quantities = {file.gpu: file.quantities for file in files}
    estimates = estimated_rates(arch)
    if estimates and memory_bytes_per_cycle:
        estimates["copying_gb_s"] = _Quantity((COPIED * memory_bytes_per_cycle * CLOCK_GHZ,))
    known = quantities.get(MODELLED, {}) | estimates | quantities.get(gpu or MODELLED, {})
    if missing := [field.name for field in fields(CostRates) if field.name not in known]:
        raise DamagedFile(f"{RATES} has no file of the {MODELLED} with {', '.join(missing)}; {REMEDY}")
    return CostRates(**{field.name: known[field.name].medians[0] for field in fields(CostRates)})


def estimated_rates(arch: str) -> dict[str, _Quantity]:
    """Return the estimates of an architecture's family: the newest that is not newer; none for older ones."""
    families = read(ESTIMATES, _Estimates).families
    number = int(re.sub(r"\D", "", arch) or 0)
    fitting = [each for each in families if int(each.removeprefix("sm_")) <= number]
    return dict(families[fitting[-1]].quantities) if fitting else {}


class ScheduleTrees(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Trees that correct the model of schedules on a GPU (:mod:`schedules.cycles`), by families of tiles."""

    gpu: str
    origin: str
    warps: Trees
    warpgroups: Trees


@functools.cache
def schedule_corrections(gpu: str) -> tuple[Trees, Trees]:
    """Return the trees of a GPU's schedules, or those of ``MODELLED`` where it has none: of warps, of warpgroups."""
    path = schedules_path(gpu)
    if gpu != MODELLED and not path.exists():
        return schedule_corrections(MODELLED)
    trees = read(path, ScheduleTrees)
    return trees.warps, trees.warpgroups


def schedules_path(gpu: str) -> Path:
    """Return where the trees of a GPU's schedules lie."""
    return COSTS / f"{re.sub(r'[^a-z0-9]+', '-', gpu.lower())}-schedules.json"


def read(path: Path, kind: type[Kind]) -> Kind:
    """Read a file of this package as a type; DamagedFile says what is wrong with it."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, ValueError, RecursionError) as error:  # msgspec's and Unicode's errors are ValueErrors
        raise DamagedFile(f"{path} is damaged ({error}); {REMEDY}") from error
