"""Rates files: all that was measured of one GPU, as data (``gpus/rates/ARCH-GPU.json``).

A file holds quantities; a quantity is one number, or several over something that was varied. Units are in the
quantities' names.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from tensorir_ladder.gpus import RATES
from tensorir_ladder.harness.records import RecordError, path_name, read_file, write_atomically

NEEDED = ("copy_gb_s", "dram_latency_ns", "fp32_gflops", "sm_clock_mhz")  # the least that predictions take
REMEDY = "restore it from git, or delete it and measure on that GPU: ladder microbench"


class BadRates(ValueError):
    """A rates file that cannot be used; the message names the file and the remedy."""


class Quantity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Medians over rounds, one per value of ``at`` (a single one, and no ``at``, where nothing was varied).

    ``over`` says what was varied, ``origin`` how the medians came about. ``samples`` holds each median's raw
    values; none for a number that was not measured by this project's program.
    """

    medians: tuple[Annotated[float, msgspec.Meta(gt=0)], ...]
    over: str
    at: tuple[float, ...]
    origin: Annotated[str, msgspec.Meta(min_length=1)]
    samples: tuple[tuple[float, ...], ...]
    revision: str
    recorded_at: str

    def __post_init__(self) -> None:
        if len(self.medians) != (len(self.at) or 1) or len(self.samples) not in (0, len(self.medians)):
            raise ValueError(f"{len(self.medians)} medians, {len(self.at)} at, {len(self.samples)} samples")

    @property
    def spread_pct(self) -> float:
        """The widest range of samples, in percent of its median; 0 where there are none."""
        pairs = zip(self.samples, self.medians)
        return max((100 * (max(values) - min(values)) / median for values, median in pairs), default=0.0)


class RatesFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One GPU's file. ``device`` is what its driver reports; ``environment`` the last run's command, GPU, versions."""

    arch: str
    gpu: str
    device: dict[str, int]
    quantities: dict[str, Quantity]
    environment: dict[str, Any]
    schema: Literal[1] = 1

    def save(self, folder: Path = RATES) -> Path:
        """Write it whole or not at all, over the file of the same GPU; ValidationError if it could not be read back."""
        text = msgspec.json.format(msgspec.json.encode(self), indent=1).decode() + "\n"
        msgspec.json.decode(text, type=RatesFile)
        return write_atomically(path_of(self.arch, self.gpu, folder), text)


@dataclass(frozen=True)
class Curve:
    """Values over something varied: both of one length, ``at`` rising."""

    at: tuple[float, ...]
    values: tuple[float, ...]


@dataclass(frozen=True)
class Rates:
    """Numbers that models take from a file. None: not measured on that GPU yet.

    ``fp32_gflops`` counts a multiply-add as two operations; ``copy_gb_s`` counts bytes read and bytes written.
    ``in_flight_gb_s`` is the rate of the whole GPU over the bytes that each multiprocessor keeps under way;
    ``cp_async_loaded_latency_ns`` the round trip, all multiprocessors asking, over the bytes each asks for;
    ``barrier_ns`` goes over threads per block. ``mma_*`` and ``wgmma_*`` are what the tensor cores do by that
    instruction alone, operands in registers or, for wgmma, in shared memory; wgmma is sm_90a's.
    """

    gpu: str
    sms: int
    sm_clock_mhz: float
    fp32_gflops: float
    copy_gb_s: float
    dram_latency_ns: float
    l2_bytes: int | None = None
    fp32_gflops_one_warp_per_scheduler: float | None = None
    read_gb_s: float | None = None
    l2_read_gb_s: float | None = None
    l2_latency_ns: float | None = None
    shared_latency_ns: float | None = None
    fma_latency_ns: float | None = None
    shared_bytes_per_clock: float | None = None
    cp_async_latency_ns: float | None = None
    mma_f16_gflops: float | None = None
    mma_tf32_gflops: float | None = None
    wgmma_f16_gflops: float | None = None
    launch_ns: float | None = None
    block_start_ns: float | None = None
    cp_async_loaded_latency_ns: Curve | None = None
    in_flight_gb_s: Curve | None = None
    barrier_ns: Curve | None = None


def path_of(arch: str, gpu: str, folder: Path = RATES) -> Path:
    """Return the path of a GPU's file."""
    return folder / path_name(f"{arch}-{re.sub(r'[^a-z0-9]+', '-', gpu.lower()).strip('-')}.json")


def read_rates_file(path: Path) -> RatesFile:
    """Read a file as written; BadRates names it, what is wrong and the remedy."""
    try:
        file = read_file(path, RatesFile, REMEDY)
        known = path.name == path_of(file.arch, file.gpu).name
    except RecordError as error:
        raise BadRates(str(error)) from error
    if not known:
        raise BadRates(f"{path} is of {file.gpu}, {file.arch}; {REMEDY}")
    return file


def rates_of(arch: str, gpu: str | None, folder: Path | None = None) -> Rates | None:
    """Look up a GPU's rates; None where none were measured, BadRates for a file that lacks what predictions need."""
    path = path_of(arch, gpu or "", folder or RATES)
    return _rates(path) if gpu and path.exists() else None


@functools.lru_cache
def _rates(path: Path) -> Rates:
    file = read_rates_file(path)
    missing = [name for name in NEEDED if name not in file.quantities]
    if missing or "sms" not in file.device:
        raise BadRates(f"{path} lacks {', '.join(missing or ['sms'])}; {REMEDY}")
    known = {field.name for field in dataclasses.fields(Rates)}
    values = {
        name: Curve(quantity.at, quantity.medians) if quantity.at else quantity.medians[0]
        for name, quantity in file.quantities.items()
        if name in known
    }
    return Rates(gpu=file.gpu, sms=file.device["sms"], l2_bytes=file.device.get("l2_bytes"), **values)


def measured_gpus(folder: Path | None = None) -> Iterator[RatesFile]:
    """Read every GPU's file, by name."""
    for path in sorted((folder or RATES).glob("*.json")):
        yield read_rates_file(path)
