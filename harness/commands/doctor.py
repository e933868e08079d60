"""``doctor``: tell what this machine has, and what is missing for what."""

from __future__ import annotations

import argparse
import platform
import re
from importlib.metadata import PackageNotFoundError, requires, version
from typing import NamedTuple

from rich.markup import escape

from tensorir_ladder import emulator
from tensorir_ladder.harness import execution
from tensorir_ladder.harness.cli import as_typed
from tensorir_ladder.harness.commands import BAD_INPUT
from tensorir_ladder.harness.commands.printing import console, new_table
from tensorir_ladder.harness.models.rate_files import rates_of
from tensorir_ladder.kernels.codegen import toolchain
from tensorir_ladder.kernels.codegen.build_cache import cache_folder

OWN = "tensorir-ladder"
PINNED = re.compile(r"([\w-]+)==([\w.]+)$")


class Diagnosis(NamedTuple):
    """A part of this machine: what was found of it, what it is for, and the remedy where it is missing."""

    part: str
    found: str
    needed_for: str
    remedy: str = ""


def add_options(_parser: argparse.ArgumentParser) -> None:
    """Add nothing: it takes no options."""


def run(_options: argparse.Namespace, _command: str) -> int:
    """Print what was found; exit status 2 where what every command needs is not as it must be."""
    base, wheels, toolkit = _pinned(), toolchain.INSTALL_HINT, "install NVIDIA's CUDA toolkit"
    programs = [
        _program("cuobjdump", "--show sass", wheels),
        _program("nvdisasm", "--show sass", wheels),
        _program("ncu", "counters", toolkit),
        _program("compute-sanitizer", "sanitize", toolkit),
    ]
    findings = [*base, _host_compiler(), _compiler(), *programs, _torch(), _gpu(), _cache()]
    headings = ("part", "found", "needed for", "remedy")
    table = new_table("This machine", headings, texts=headings)
    for finding in findings:
        table.add_row(*map(escape, finding))
    console().print(table)
    return BAD_INPUT if any(finding.remedy for finding in base) else 0


def _pinned() -> list[Diagnosis]:
    """Compare Python and the packages that are pinned with what is installed."""
    found = [Diagnosis("Python", f"{platform.python_version()}, {platform.machine()}", "everything")]
    for name, pin in (match.groups() for match in map(PINNED.match, requires(OWN) or []) if match):
        try:
            installed = version(name)
        except PackageNotFoundError:
            installed = "nothing"
        remedy = "" if installed == pin else f".venv/bin/python -m pip install {name}=={pin}"
        found.append(Diagnosis(name, installed, f"everything, in {pin}", remedy))
    return found


def _host_compiler() -> Diagnosis:
    path = emulator.find_host_compiler()
    return Diagnosis("C++ compiler", path or "none", "the emulator: --on emulator", "" if path else "install g++")


def _compiler() -> Diagnosis:
    compiler, needed = toolchain.find_compiler(), "compile, depth, registers and occupancy; every GPU run"
    if compiler is None:
        return Diagnosis("CUDA compiler", "none", needed, toolchain.INSTALL_HINT)
    try:
        return Diagnosis("CUDA compiler", f"nvcc {compiler.version} ({compiler.origin})", needed)
    except toolchain.NoCompiler as broken:
        return Diagnosis("CUDA compiler", str(compiler.nvcc), needed, str(broken))


def _program(name: str, needed: str, remedy: str) -> Diagnosis:
    place = toolchain.find_tool(name)
    wheels = place and any(place.is_relative_to(folder) for folder in toolchain.wheel_folders())
    return Diagnosis(name, "in pip wheels" if wheels else str(place or "none"), needed, "" if place else remedy)


def _torch() -> Diagnosis:
    try:
        found = version("torch")
    except PackageNotFoundError:
        remedy = ".venv/bin/python -m pip install -e '.[gpu]'"
        return Diagnosis("torch", "none", "every GPU run; kernels.matmul", remedy)
    return Diagnosis("torch", found, "every GPU run; kernels.matmul")


def _gpu() -> Diagnosis:
    needed = "run's speeds, sweep, tune, counters, timeline"
    if why := execution.why_none():
        return Diagnosis("GPU", "none that torch can use", needed, why.partition(";")[2].strip())
    machine = execution.gpu_machine()
    measured = rates_of(machine.arch, machine.gpu) is not None
    found = f"{machine.gpu}, {machine.arch}, {machine.multiprocessors} multiprocessors"
    return Diagnosis("GPU", found, needed, "" if measured else as_typed("no rates for predictions: ladder microbench"))


def _cache() -> Diagnosis:
    try:
        return Diagnosis("build cache", str(cache_folder()), "not building twice")
    except RuntimeError as homeless:
        return Diagnosis("build cache", "none", "not building twice", f"{homeless}; set XDG_CACHE_HOME")
