"""Read what a measurement depends on: the GPU's clocks, power and name, versions, and the sources' revision."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pynvml
import tvm
import tvm_ffi

from tensorir_ladder.harness.execution import GpuBackend, NoGpu, device_properties, require_gpu
from tensorir_ladder.harness.records import GpuState
from tensorir_ladder.kernels.codegen.build_cache import digest_sources

ROOT = Path(__file__).resolve().parent.parent
MEASURING_SOURCES = ("harness/**/*.py", "schedules/**/*.py", "kernels/**/*.py", "steps/*.py")


class NoEnergyCounter(RuntimeError):
    """A GPU that does not count the energy that it draws, or does not tell."""


def gpu_state() -> GpuState:
    """Read clocks (MHz), power (W) and temperature (°C) of torch's current GPU."""
    gpu = _nvml_handle()
    return GpuState(
        float(pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM)),
        float(pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_MEM)),
        pynvml.nvmlDeviceGetPowerUsage(gpu) / 1e3,
        float(pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU)),
    )


def gpu_identity() -> dict[str, Any]:
    """Read what torch's current GPU is, its driver and power limit, under the names of a record's environment."""
    gpu, properties = _nvml_handle(), device_properties(require_gpu())
    return {
        "multiprocessors": properties.multi_processor_count,
        "gpu": pynvml.nvmlDeviceGetName(gpu),
        "gpu_uuid": pynvml.nvmlDeviceGetUUID(gpu),
        "driver": pynvml.nvmlSystemGetDriverVersion(),
        "power_limit_w": pynvml.nvmlDeviceGetPowerManagementLimit(gpu) / 1e3,
    }


def max_clocks() -> tuple[float | None, float | None]:
    """Read the highest SM clock (MHz) of torch's current GPU and what its memory moves then (GB/s); None if untold."""
    gpu, asked = _nvml_handle(), []
    for what in (
        lambda: pynvml.nvmlDeviceGetMaxClockInfo(gpu, pynvml.NVML_CLOCK_SM),
        lambda: pynvml.nvmlDeviceGetMaxClockInfo(gpu, pynvml.NVML_CLOCK_MEM),
        lambda: pynvml.nvmlDeviceGetMemoryBusWidth(gpu),
    ):
        try:
            asked.append(float(what()))
        except pynvml.NVMLError:  # of virtual GPUs, say; who asks is told
            asked.append(None)
    clock_mhz, memory_mhz, bus_bits = asked
    # Two transfers a clock.
    return clock_mhz, 2 * memory_mhz * bus_bits / 8e3 if memory_mhz and bus_bits else None


def energy_counter() -> Callable[[], float]:
    """Return what reads the joules that torch's current GPU has drawn since its driver was loaded.

    NoEnergyCounter where it does not tell.
    """
    gpu = _nvml_handle()

    def joules() -> float:
        try:
            return pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1e3
        except pynvml.NVMLError as error:
            name = pynvml.nvmlDeviceGetName(gpu)
            remedy = "leave out --energy, or take a whole GPU of Volta's generation or a later one"
            raise NoEnergyCounter(f"{name} does not tell the energy that it draws ({error}); {remedy}") from error

    joules()
    return joules


def _nvml_handle() -> Any:
    # By UUID: NVML counts all GPUs of the machine, torch those that CUDA_VISIBLE_DEVICES leaves, in its order.
    torch = require_gpu()
    uuid = str(device_properties(torch).uuid).removeprefix("GPU-")
    try:
        pynvml.nvmlInit()  # counts its calls; the library stays loaded until the process ends
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except pynvml.NVMLError as error:
        raise NoGpu(f"NVML, which gives clocks and power, does not know the GPU {uuid} ({error})") from error


def versions(backend: GpuBackend, compiler: str) -> dict[str, str]:
    """Name the version of everything that shapes a measurement."""
    return {
        "tvm": tvm.__version__,
        "tvm_ffi": tvm_ffi.__version__,
        "torch": str(backend.torch.__version__),  # a subclass of str, which JSON does not know
        "torch_cuda": str(backend.torch.version.cuda),
        "nvcc": compiler,
    }


def git_state(root: Path) -> tuple[str, bool]:
    """Return the revision a tree is at and whether it differs from it; ("unknown", True) outside git."""
    commands = (["git", "rev-parse", "HEAD"], ["git", "status", "--porcelain"])
    try:
        revision, status = (
            subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout for command in commands
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown", True
    # Results that this very run writes do not make the code dirty.
    changed = [line for line in status.splitlines() if "reports/results/" not in line]
    return revision.strip(), bool(changed)


def tree_state(revision: str | None) -> dict[str, Any]:
    """Fill a record's ``revision`` and ``dirty``: of a clean tree at the revision named, else as git has them."""
    found, dirty = (revision, False) if revision else git_state(ROOT)
    return {"revision": found, "dirty": dirty}


def host_cpu() -> str:
    """Name the processor; "unknown" where the system does not say."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def sources_digest(root: Path, patterns: Iterable[str] = MEASURING_SOURCES) -> str:
    """Digest the sources that shape a measurement, to tell trees apart where git is absent."""
    return digest_sources(root, patterns)
