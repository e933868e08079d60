"""PTX and machine code that a compiler made once, in a file of the results folder: pages need no compiler then.

An entry counts for the CUDA text that it was compiled from, by its digest; of any other text there is none.
"""

from __future__ import annotations

import functools
import lzma
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from tensorir_ladder.harness.build import Kernel as Lowered
from tensorir_ladder.harness.build import compiled, lower
from tensorir_ladder.harness.listings import comparable_text
from tensorir_ladder.harness.records import RecordError, decode, write_atomically
from tensorir_ladder.harness.records.parts import Arch, Count, Title
from tensorir_ladder.kernels.codegen import toolchain
from tensorir_ladder.reports.web.listings import JOBS, ListedKernel, case_of
from tensorir_ladder.reports.web.packing import unpack_bytes

FILE = "machine-code.json.xz"
COMMAND = "ladder listings"
Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]


@dataclass(frozen=True)
class Compiled:
    """Hold what a compiler made of one CUDA text; ``ptx`` and ``sass`` are numbers of texts."""

    source_sha256: Digest
    cubin_sha256: Digest
    arch: Arch
    registers: Count
    spill_bytes: Count
    ptx: Count
    sass: Count


@dataclass(frozen=True)
class MachineCode:
    """All that one compiler made: entries, and the texts that they number."""

    compiler: Title
    kernels: tuple[Compiled, ...]
    texts: tuple[str, ...]
    schema: Literal[1] = 1

    def __post_init__(self) -> None:
        for kernel in self.kernels:
            for number in (kernel.ptx, kernel.sass):
                if number >= len(self.texts):
                    raise ValueError(f"no text {number}")

    @functools.cached_property
    def by_source(self) -> Mapping[str, Compiled]:
        """The entries by the digest of their CUDA text."""
        return {kernel.source_sha256: kernel for kernel in self.kernels}

    def of(self, source_sha256: str) -> dict[str, str]:
        """Return what was made of a CUDA text, by form; empty where that was not compiled."""
        entry = self.by_source.get(source_sha256)
        return {"ptx": self.texts[entry.ptx], "sass": self.texts[entry.sass]} if entry else {}


def read(folder: Path) -> MachineCode | None:
    """Read a results folder's file; None where it has none, RecordError where the file is not whole."""
    path = folder / FILE
    if not path.exists():
        return None
    remedy = f"restore it, or make it again with {COMMAND}"
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RecordError(f"cannot read {path} ({error.strerror}); {remedy}") from error
    return decode(unpack_bytes(data, str(path)), MachineCode, str(path), remedy)


def write(folder: Path, kernels: Iterable[ListedKernel]) -> tuple[Path, int]:
    """Compile kernels and write the file; return its path, and how many CUDA texts it has.

    Some two seconds a kernel. Raises NoCompiler where nvcc, cuobjdump or nvdisasm is missing, and what lowering a
    kernel raises.
    """
    compiler = toolchain.require_compiler()

    def compile_one(made: Lowered) -> tuple[Lowered, str, str]:
        whole = compiled(made, compiler)
        return whole, *("".join(comparable_text(made, form)) for form in ("ptx", "sass"))

    lowered = {made.source_sha256: made for made in (lower(case_of(kernel)) for kernel in kernels)}
    with ThreadPoolExecutor(JOBS) as pool:
        found = list(pool.map(compile_one, lowered.values()))
    numbers: dict[str, int] = {}
    entries = [
        Compiled(
            made.source_sha256,
            made.cubin.sha256,
            made.machine.arch,
            made.cubin.registers,
            made.cubin.spill_bytes,
            numbers.setdefault(ptx, len(numbers)),
            numbers.setdefault(sass, len(numbers)),
        )
        for made, ptx, sass in found
    ]
    code = MachineCode(f"nvcc {compiler.version}", tuple(entries), tuple(numbers))
    content = lzma.compress(msgspec.json.encode(asdict(code)), preset=9 | lzma.PRESET_EXTREME)
    return write_atomically(folder / FILE, content), len(entries)
