"""Begin, before anything else, what takes longest to start: processes that import TVM, and servers' torch before it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pynvml

from tensorir_ladder.harness.fleet.processes import BuildSource, Process, missing_packages
from tensorir_ladder.harness.fleet.working import TORCH

if TYPE_CHECKING:
    from typing import Self

PLACES = ("gpu", "llvm")
SERVING = "tensorir_ladder.harness.fleet.serving"
# TVM asks torch for GPUs when it is imported, and who has asked the driver can fork no process that uses one: torch
# asks NVML then.
UNTOUCHED = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


class Parts:
    """Processes of a fleet on this host: a source of copies, and one for each of ``devices`` to serve it.

    ``place`` is "gpu", where a device is a value of CUDA_VISIBLE_DEVICES, or "llvm". They start with :meth:`start`, or
    when they are first asked; all end with the ``with`` block, or :meth:`close`.
    """

    def __init__(self, place: str, devices: Sequence[str] = ()) -> None:
        own = "CUDA_VISIBLE_DEVICES" if place == "gpu" else "LADDER_DEVICE"  # RPC's device 0 is its own GPU
        modules = (TORCH, SERVING) if place == "gpu" else (SERVING,)
        self.source = BuildSource()
        self.servers = {name: Process({own: name, **UNTOUCHED}, quiet=True, modules=modules) for name in devices}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> Self:
        """Start all of them, and wait for none."""
        for each in (*self.servers.values(), self.source):  # servers first: they have more to import
            each.start()
        return self

    def close(self) -> None:
        """End them all."""
        for each in (*self.servers.values(), self.source):
            each.close()


@contextmanager
def without_torch() -> Iterator[None]:
    """Have no torch in this process, unless it is there: TVM imports it, which takes seconds, and servers alone use it.

    It can be imported again after the ``with`` block, though not by a TVM that was imported inside.
    """
    absent = TORCH not in sys.modules
    if absent:
        sys.modules[TORCH] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if absent:
            del sys.modules[TORCH]


def likely_parts(place: str, count: int) -> Parts | None:
    """Return what a fleet on ``count`` devices of this host starts with, maybe 0; None where something lacks for it."""
    if place not in PLACES or missing_packages():
        return None
    try:
        return Parts(place, devices(place, count) if count else ())
    except ValueError:  # FleetError, by what it is a kind of
        return None


def devices(place: str, count: int | None) -> list[str]:
    """Name a device for each server of ``place``: GPUs as :func:`visible_gpus` has them, or CPUs, one if None."""
    return visible_gpus(count) if place == "gpu" else [f"cpu{number}" for number in range(count or 1)]


def visible_gpus(count: int | None = None) -> list[str]:
    """List the first ``count`` of this host's GPUs, all if None, as CUDA_VISIBLE_DEVICES names them; FleetError."""
    from tensorir_ladder.harness.fleet.errors import FleetError  # imports records, before which processes start

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        found = [str(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
    except pynvml.NVMLError as error:
        raise FleetError(f"no GPU here ({error}); run where there is one, or try --on llvm") from error
    if named is not None:
        found = [name.strip() for name in named.split(",") if name.strip()]
    if not found or (count or 0) > len(found):
        raise FleetError(f"--gpus {count}: this host has {len(found)}; give fewer, or a --tracker of several hosts")
    return found[:count]
