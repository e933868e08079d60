"""Compiling kernels' C++ text and the runtime into libraries by the host's C++ compiler, each text once."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from tensorir_ladder.emulator.errors import NoHostCompiler, UnknownText
from tensorir_ladder.kernels.codegen.build_cache import BuildCache

COMPILERS = ("g++", "clang++", "c++")
DEVICE = Path(__file__).parent / "device"
RUNTIME_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fno-semantic-interposition",
    "-U_FORTIFY_SOURCE",
    "-fno-strict-aliasing",
)
# Hooks of a race detector at every load and store; the detector's own runtime is not linked. By -Og kernels compile in
# half to two thirds of the time of -O1 and run as fast, for most of a run's time is the runtime's.
KERNEL_FLAGS = (
    "-std=c++17",
    "-Og",
    "-g1",
    "-fPIC",
    "-w",
    "-fno-strict-aliasing",
    "-fsanitize=thread,bounds",
    "-fno-sanitize-recover=bounds",
)
# Kernels that are given 8-bit numbers, and what makes device/races.h look at single bytes.
OF_BYTES = re.compile(r"__global__ [^;{]*\b(?:(?:un)?signed char|bool|u?int8_t|fp8_\w+|__nv_fp8\w+)\s*\*")
BYTEWISE = ("-DEMU_GRANULE=1",)
BUILDS = BuildCache("emulator")


def find_host_compiler() -> str | None:
    """Find the C++ compiler on PATH; None where there is none."""
    return next((path for name in COMPILERS if (path := shutil.which(name))), None)


def require_host_compiler() -> str:
    """Find the C++ compiler; NoHostCompiler says what to install."""
    found = find_host_compiler()
    if found is None:
        raise NoHostCompiler(
            f"the emulator needs a C++ compiler, and none of {', '.join(COMPILERS)} is on PATH; install g++"
        )
    return found


@functools.cache
def _version(compiler: str) -> str:
    try:
        return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise NoHostCompiler(f"{compiler} does not run ({error}); mend it or take it off PATH") from error


@functools.cache
def _device_digest() -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(DEVICE.iterdir()))).hexdigest()


def kernel_library(text: str, fast_math: bool) -> Path:
    """Build the shared library of a kernel's C++ text, or take it from the cache; :func:`load_library` loads it.

    With ``fast_math``, float32 is what nvcc makes of it under ``--use_fast_math`` (``device/functions.h``).
    """
    granule = _granule(text)
    flags, runtime = (*KERNEL_FLAGS, *granule, f"-DEMU_FAST_MATH={int(fast_math)}"), str(_runtime(granule))
    # Without the C++ library: to look through its names takes as long as to compile a small kernel.
    linked = ("-shared", "-nodefaultlibs")
    return _kept(".kernel.so", text, (*flags, *linked), runtime, "-lm", "-lgcc", header_flags=flags)


def load_library(library: Path, text: str) -> ctypes.CDLL:
    """Load the library of a kernel's text, behind its runtime, which the loader then knows by its name."""
    ctypes.CDLL(str(_runtime(_granule(text))))
    return ctypes.CDLL(str(library))


def _granule(text: str) -> tuple[str, ...]:
    return BYTEWISE if OF_BYTES.search(text) else ()


def _runtime(granule: tuple[str, ...]) -> Path:
    code = (DEVICE / "runtime.cpp").read_text(encoding="utf-8")
    made_of = (_version(require_host_compiler()), _device_digest(), *granule)
    name = f"tensorir-ladder-emulator-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]}.so"
    return _kept(".runtime.so", code, (*RUNTIME_FLAGS, *granule, "-shared", f"-Wl,-soname,{name}"))


def _kept(kind: str, text: str, flags: tuple[str, ...], *linked: str, header_flags: tuple[str, ...] = ()) -> Path:
    """Build ``text``, unless a build is kept under the digest of all that it depends on."""
    compiler = require_host_compiler()

    def build() -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            source, built = Path(folder) / "source.cpp", Path(folder) / f"built{kind}"
            source.write_text(text, encoding="utf-8")
            if header_flags:  # g++ takes what lies beside the text for kernel.h, already read; others read it again
                header = _kept(".kernel.h.gch", '#include "kernel.h"\n', (*header_flags, "-x", "c++-header"))
                (Path(folder) / "kernel.h.gch").symlink_to(header)
            _compile([compiler, *flags, f"-I{DEVICE}", str(source), *linked, "-o", str(built)])
            return built.read_bytes()

    return BUILDS.get([text, flags, _version(compiler), _device_digest()], kind, build).path


def _compile(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        first = next((line for line in result.stderr.splitlines() if "error" in line), result.stderr.strip()[:500])
        raise UnknownText(f"{command[0]} refused the kernel's text, which uses something new to the emulator: {first}")


def source_lines(library: Path, code: str, places: list[str]) -> dict[str, str]:
    """Find the line of ``code`` that the compiled code at each of ``places`` (hexadecimal) comes from: the outermost.

    Empty where there is no addr2line, which compilers come with.
    """
    tool = shutil.which("addr2line")
    if tool is None or not places:
        return {}
    lines, found = code.splitlines(), {}
    out = subprocess.run([tool, "-a", "-i", "-e", str(library), *places], capture_output=True, text=True).stdout
    for place, told in zip(places, re.split(r"^0x[0-9a-f]+\n", out, flags=re.M)[1:]):
        numbers = [int(number) for number in re.findall(r"kernel\.cu:(\d+)", told)]
        if numbers:
            found[place] = f"line {numbers[-1]}: {lines[numbers[-1] - 1].strip()[:160]}"
    return found
