"""Preparing what needs no GPU: cubins, and what the emulator says, each kernel in a folder of its own."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path

from tensorir_ladder import emulator
from tensorir_ladder.emulator import EmulatorError
from tensorir_ladder.harness.records import RecordError, path_name, read_file
from tensorir_ladder.harness.workers import end_with_parent
from tensorir_ladder.kernels.codegen.toolchain import Compiler, compile_cubin
from tensorir_ladder.lab.gpu_program import GpuProgram
from tensorir_ladder.lab.sanitizer.subjects import Finding, SanitizedKernel, emulated_finding

ARCH = "sm_90a"
MANIFEST = "kernels.json"


class NotPrepared(RuntimeError):
    """A folder that holds no prepared kernels, or a module that names none."""


@dataclass(frozen=True)
class _Said:
    """The emulator's finding of a kernel, and what both were."""

    name: str
    of: str
    finding: Finding


@dataclass(frozen=True)
class Prepared:
    """The folder of one kernel."""

    folder: Path

    @cached_property
    def subject(self) -> SanitizedKernel:
        """The kernel and its data; NotPrepared where the folder holds none."""
        try:
            return SanitizedKernel.read(self.folder)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, EmulatorError) as error:
            raise NotPrepared(f"{self.folder} holds no prepared kernel ({error!r}); prepare it again") from error

    @cached_property
    def emulator(self) -> Finding:
        """The emulator's finding."""
        return self._said.finding

    @property
    def _said(self) -> _Said:
        return read_file(self.folder / "emulator.json", _Said, "prepare it again")

    @property
    def digest(self) -> str:
        """The cubin's SHA-256, by which what tools said is kept."""
        return hashlib.sha256(self._cubin.read_bytes()).hexdigest()

    @property
    def _cubin(self) -> Path:
        return self.folder / "kernel.cubin"

    def on_gpu(self) -> GpuProgram:
        """Make the kernel a function of the GPU."""
        return GpuProgram(self.subject.program, self._cubin.read_bytes())

    def is_of(self, subject: SanitizedKernel, cubin: bytes) -> bool:
        """Tell if all is there, of this kernel and this emulator."""
        if not self._cubin.exists() or self._cubin.read_bytes() != cubin:
            return False
        try:
            return self._said.of == digest_of(subject)
        except RecordError:
            return False  # it is missing, or was not written to its end

    def write(self, subject: SanitizedKernel, cubin: bytes) -> None:
        """Ask the emulator, and keep everything; what it says comes last, for what is interrupted is not done."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "emulator.json").unlink(missing_ok=True)
        subject.save(self.folder)
        self._cubin.write_bytes(cubin)
        said = _Said(subject.name, digest_of(subject), emulated_finding(subject))
        (self.folder / "emulator.json").write_text(json.dumps(asdict(said), indent=1) + "\n", encoding="utf-8")


def digest_of(subject: SanitizedKernel) -> str:
    """Digest a kernel and the emulator: what the emulator says depends on both."""
    return hashlib.sha256((subject.described + subject.program.cuda).encode() + _emulator_sources()).hexdigest()


@functools.cache
def _emulator_sources() -> bytes:
    folder = Path(emulator.__file__).parent
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.suffix in (".py", ".h", ".cpp"))


def folder_name(name: str) -> str:
    """Make a kernel's name a folder's."""
    return path_name(re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-"))


def prepare_one(source: str, name: str, folder: Path, compiler: Compiler) -> Prepared:
    """Prepare the kernel ``subject(name)`` of the module ``source``, unless it is."""
    subject = import_module(source).subject(name)
    cubin = compile_cubin(subject.program.cuda, ARCH, compiler).data
    prepared = Prepared(folder / folder_name(name))
    if not prepared.is_of(subject, cubin):
        prepared.write(subject, cubin)
    return Prepared(prepared.folder)


def subject_names(source: str) -> list[str]:
    """List the kernels that a module names; NotPrepared for a module that does not."""
    try:
        return import_module(source).subject_names()
    except (ModuleNotFoundError, AttributeError) as error:
        raise NotPrepared(f"{source} names no kernels ({error}); those of the tests need PYTHONPATH=tests") from error


def prepare(source: str, folder: Path, compiler: Compiler, jobs: int) -> Iterator[Prepared]:
    """Prepare all kernels that the module ``source`` names, so many at a time, in the order in which they are done."""
    names = subject_names(source)
    folder.mkdir(parents=True, exist_ok=True)
    # Processes of their own from the start: a copy of this one would have TVM's threads without their locks' owners.
    with ProcessPoolExecutor(jobs, get_context("spawn"), end_with_parent, (os.getpid(),)) as pool:
        tasks = [pool.submit(prepare_one, source, name, folder, compiler) for name in names]
        for task in as_completed(tasks):
            yield task.result()
    (folder / MANIFEST).write_text(json.dumps([folder_name(name) for name in names], indent=1) + "\n")


def prepared_kernels(folder: Path) -> list[Prepared]:
    """List the kernels of a folder that is prepared; NotPrepared for another."""
    if not (folder / MANIFEST).is_file():
        raise NotPrepared(f"{folder} holds no prepared kernels; prepare them: ladder sanitize --prepare")
    names = read_file(folder / MANIFEST, list[str], "prepare them again")
    return [Prepared(folder / path_name(name)) for name in names]
