"""Find a CUDA compiler, and turn CUDA text into a cubin, PTX or SASS, once per content."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tensorir_ladder.kernels.codegen.build_cache import BuildCache

INSTALL_HINT = ".venv/bin/python -m pip install -e '.[cuda]'"
HOST_COMPILERS = ("g++", "c++")
FLAGS = ("-O3", "--use_fast_math", "--expt-relaxed-constexpr", "-w", "-Xptxas=-v,--register-usage-level=10")
CUBINS, FACTS_END = BuildCache("cubins"), b"\n"  # a line of what ptxas said, then the cubin


class NoCompiler(RuntimeError):
    """A CUDA compiler (or a tool of the toolkit) is demanded and there is none."""


class CompileError(RuntimeError):
    """The CUDA compiler refused the generated text."""


@dataclass(frozen=True)
class Compiler:
    """An nvcc and where it came from ("toolkit" or "pip wheels")."""

    nvcc: Path
    origin: str

    @functools.cached_property
    def version(self) -> str:
        """The release that ``nvcc --version`` names."""
        try:
            text = subprocess.run([self.nvcc, "--version"], capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError) as error:
            raise NoCompiler(f"{self.nvcc} does not run ({error}); mend it or take it off PATH") from error
        release = re.search(r"release ([\d.]+), V([\d.]+)", text)
        return release.group(2) if release else text.strip().splitlines()[-1]


@dataclass(frozen=True)
class Cubin:
    """A compiled kernel: its bytes, and what ptxas said of it."""

    data: bytes
    registers: int
    spill_bytes: int
    smem_bytes: int

    @property
    def sha256(self) -> str:
        """Digest of the bytes."""
        return hashlib.sha256(self.data).hexdigest()


def wheel_folders() -> list[Path]:
    """List the folders ``site-packages/nvidia/cuNN`` that CUDA's pip wheels install into, newest first."""
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(root) for root in (spec.submodule_search_locations or [])] if spec else []
    return sorted((folder for root in roots for folder in root.glob("cu[0-9]*")), reverse=True)


def find_compiler() -> Compiler | None:
    """Find the first usable nvcc of: PATH, $CUDA_HOME, $CUDA_PATH, the pip wheels; None where there is none."""
    try:
        return require_compiler()
    except NoCompiler:
        return None


def require_compiler() -> Compiler:
    """:func:`find_compiler`; NoCompiler says what is missing and the command that installs it."""
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    candidates = [(shutil.which("nvcc"), "toolkit"), *((f"{home}/bin/nvcc", "toolkit") for home in homes)]
    candidates += [(str(folder / "bin" / "nvcc"), "pip wheels") for folder in wheel_folders()]
    found = next(
        (Compiler(Path(path), origin) for path, origin in candidates if path and os.access(path, os.X_OK)), None
    )
    if found is None:
        raise NoCompiler(f"no CUDA compiler found (PATH, CUDA_HOME, CUDA_PATH, pip wheels); {INSTALL_HINT}")
    if not any(shutil.which(name) for name in HOST_COMPILERS):
        raise NoCompiler(f"{found.nvcc} needs a C++ compiler, and there is no g++ on PATH; install g++")
    return found


def compile_cubin(
    source: str, arch: str, compiler: Compiler, ptxas_options: tuple[str, ...] = (), kernel: str = ""
) -> Cubin:
    """Compile CUDA text for ``arch``; the same text, flags and compiler are compiled once and then cached.

    ``ptxas_options`` come after those that every kernel gets. Where the text has several kernels, ``kernel`` names the
    one whose registers are taken down. Raises CompileError with the compiler's first message.
    """
    own = tuple(f"-Xptxas={option}" for option in ptxas_options)

    def build() -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            log = run_nvcc(compiler, source, Path(folder), "kernel.cubin", "-cubin", *arch_flags(arch), *own)
            data = (Path(folder) / "kernel.cubin").read_bytes()
        return json.dumps(ptxas_facts(log, kernel)).encode() + FACTS_END + data

    kept = CUBINS.get([source, arch, (*FLAGS, *own), compiler.version, kernel], ".cubin", build)
    facts, _, data = kept.content.partition(FACTS_END)
    return Cubin(data, **json.loads(facts))


def compile_ptx(source: str, arch: str, compiler: Compiler) -> str:
    """Compile CUDA text to PTX for ``arch``."""
    with tempfile.TemporaryDirectory() as folder:
        run_nvcc(compiler, source, Path(folder), "kernel.ptx", "-ptx", f"-arch=compute_{arch.removeprefix('sm_')}")
        return (Path(folder) / "kernel.ptx").read_text(encoding="utf-8")


def find_tool(name: str) -> Path | None:
    """Find one of CUDA's programs: the toolkit's on PATH, else that of the pip wheels."""
    places = [shutil.which(name), *(str(folder / "bin" / name) for folder in wheel_folders())]
    return next((Path(place) for place in places if place and os.access(place, os.X_OK)), None)


def disassemble(cubin: Cubin) -> str:
    """Disassemble a cubin to SASS by the toolkit's or the wheels' cuobjdump; NoCompiler where it or nvdisasm lacks."""
    tool = find_tool("cuobjdump")
    if tool is None:
        raise NoCompiler(f"no cuobjdump found to disassemble with; {INSTALL_HINT}")
    # cuobjdump calls nvdisasm, which lies beside it.
    environment = {**os.environ, "PATH": f"{tool.parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    if not shutil.which("nvdisasm", path=environment["PATH"]):
        raise NoCompiler(f"no nvdisasm found, which {tool} disassembles with; {INSTALL_HINT}")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin.data)
        file.flush()
        result = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, env=environment)
    if result.returncode:
        raise CompileError(f"cuobjdump failed: {result.stderr.strip()}")
    return result.stdout


def arch_flags(arch: str) -> tuple[str, ...]:
    """nvcc's flags for a cubin of one architecture."""
    number = arch.removeprefix("sm_")
    return ("-gencode", f"arch=compute_{number},code=sm_{number}")


def run_nvcc(compiler: Compiler, source: str, folder: Path, output: str, *flags: str) -> str:
    """Compile ``source`` in ``folder``; returns what ptxas printed, CompileError with the first message."""
    (folder / "kernel.cu").write_text(source, encoding="utf-8")
    command = [compiler.nvcc, *FLAGS, *flags, folder / "kernel.cu", "-o", folder / output]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        lines = [line for line in (result.stderr + result.stdout).splitlines() if line.strip()]
        message = next((line for line in lines if "error" in line or "fatal" in line), lines[0] if lines else "")
        raise CompileError(f"{compiler.nvcc} ({compiler.origin}, {compiler.version}) failed: {message.strip()}")
    return result.stderr + result.stdout


def ptxas_facts(log: str, kernel: str = "") -> dict[str, int]:
    """Read registers, spilled bytes and static shared memory from ``ptxas -v``'s report of one kernel (the first)."""
    reports = re.split(r"(?=Compiling entry function ')", log)
    log = next((report for report in reports if report.startswith(f"Compiling entry function '{kernel}'")), log)
    found = {
        "registers": re.search(r"Used (\d+) registers", log),
        "spill_bytes": re.search(r"(\d+) bytes spill stores", log),
        "smem_bytes": re.search(r"(\d+) bytes smem", log),
    }
    return {name: int(match.group(1)) if match else 0 for name, match in found.items()}
