"""Making generated CUDA text ready for a C++ compiler: CUDA's own syntax is replaced, line by line.

Lines keep their numbers, so that a place in the compiled code is a line of the CUDA text.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from tensorir_ladder.emulator.errors import UnknownText
from tensorir_ladder.emulator.functions import unknown_calls
from tensorir_ladder.emulator.ptx import translate_asm

PREAMBLE_END = "#define ushort unsigned short\n#endif\n"
KERNEL = re.compile(r'extern "C" __global__ void (?:__launch_bounds__\([^)]*\) )?(\w+)\(([^;{]*)\) (?=\{)')
KERNEL_END = "\n}\n"
BOUNDS = r'extern "C" __global__ void __launch_bounds__\((\d+), *(\d+)\) {name}\('
REGISTER_CHANGE = re.compile(r"setmaxnreg\.(?:inc|dec)\.sync\.aligned\.u32 (\d+)")
BLOCK_REGISTERS, REGISTER_STEP = 65536, 8
KERNEL_FILE = "kernel.cu"
DIVISION = re.compile(r'("(?:[^"\\\n]|\\.)*")|(?<![/*])/(?![/*=]| *\d+\b(?!\.))')
# What numpy, or ml_dtypes, calls the numbers that a parameter points to.
DTYPES = {
    "bool": "bool",
    "char": "int8",
    "signed char": "int8",
    "uchar": "uint8",
    "unsigned char": "uint8",
    "short": "int16",
    "ushort": "uint16",
    "int": "int32",
    "uint": "uint32",
    "long long": "int64",
    "half": "float16",
    "__half": "float16",
    "nv_bfloat16": "bfloat16",
    "float": "float32",
    "double": "float64",
    "fp8_e4_t": "float8_e4m3fn",
    "__nv_fp8_e4m3": "float8_e4m3fn",
    "fp8_e5_t": "float8_e5m2",
    "__nv_fp8_e5m2": "float8_e5m2",
    **{f"{sign}int{bits}_t": f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
}


@dataclass(frozen=True)
class Parameter:
    """A kernel's parameter: its C++ type and its name."""

    type: str
    name: str

    @property
    def dtype(self) -> str | None:
        """What it points to, as numpy names it; None where that has no dtype, as ``void``."""
        return DTYPES.get(self.type.removesuffix("*").strip()) if self.type.endswith("*") else None


def parameters(cuda: str) -> dict[str, tuple[Parameter, ...]]:
    """List each kernel's parameters, by its name."""
    return {
        match.group(1): tuple(_parameter(text) for text in match.group(2).split(",") if text.strip())
        for match in KERNEL.finditer(cuda)
    }


def launch_registers(cuda: str, kernel: str) -> int:
    """Return how many registers a thread of a kernel that exchanges some (setmaxnreg) is launched with.

    As ptxas does it (CUDA 13.0): as many as the launch bounds leave each thread of their blocks, but no more than the
    text's largest setmaxnreg asks for. 0 where no bounds name a number of blocks: ptxas then ignores the instruction.
    """
    bounds, asked = re.search(BOUNDS.format(name=kernel), cuda), map(int, REGISTER_CHANGE.findall(cuda))
    if bounds is None:
        return 0
    threads, blocks = map(int, bounds.groups())
    fit = BLOCK_REGISTERS // (threads * blocks) // REGISTER_STEP * REGISTER_STEP
    return min(fit, max(asked, default=fit))


def has_doubles(cuda: str, kernel: str) -> bool:
    """Tell if a kernel's text names float64."""
    found = next(match for match in KERNEL.finditer(cuda) if match.group(1) == kernel)
    return re.search(r"\bdouble", cuda[found.start() : cuda.find(KERNEL_END, found.end())]) is not None


def host_text(cuda: str, launched: Collection[str] | None = None, fast_math: bool = True) -> str:
    """Make C++ text of all kernels, or of those launched, each with a function ``launch_NAME(void** arguments)``.

    With ``fast_math``, the runtime divides. Raises UnknownText where the text does not begin as TVM's does or calls a
    function that the emulator does not know, and what :func:`translate_asm` raises.
    """
    start = cuda.find(PREAMBLE_END)
    if start < 0:
        raise UnknownText("the CUDA text does not begin with TVM's preamble; the emulator runs what TVM generates")
    if launched is not None:
        cuda = _only(cuda, launched)
    start += len(PREAMBLE_END)
    text = "\n" * cuda[:start].count("\n") + translate_asm(cuda[start:])
    _check_calls(text)
    if fast_math:
        text = _divisions(text)
    for change in (_static_arrays, _dynamic_array, _poisoned_registers, _kernels_beginning):
        text = change(text)
    launches = "\n".join(_launch(name, found) for name, found in parameters(cuda).items())
    code = 'extern "C" const emu::Library emu_code = {&__ehdr_start, &_end};'
    return f'#include "kernel.h"\n#line 1 "{KERNEL_FILE}"\n{text}\n#line 1 "launches"\n{launches}\n{code}\n'


def _only(cuda: str, launched: Collection[str]) -> str:
    """Leave out other kernels, whose lines stay: a function of any number of rows has many, and a call uses few."""
    pieces, end = [], 0
    for match in KERNEL.finditer(cuda):
        close = cuda.find(KERNEL_END, match.end())
        if match.group(1) in launched or close < 0:
            continue
        pieces += [cuda[end : match.start()], "\n" * cuda.count("\n", match.start(), close + len(KERNEL_END))]
        end = close + len(KERNEL_END)
    return "".join([*pieces, cuda[end:]])


def _parameter(text: str) -> Parameter:
    words = re.sub(r"\b(?:const|__restrict__|__grid_constant__)\b", " ", text).replace("*", " * ").split()
    return Parameter(" ".join(words[:-1]), words[-1])


def _check_calls(text: str) -> None:
    """Raise UnknownText for the first call of a function that neither the text nor the emulator has."""
    for at, name in unknown_calls(text):
        number = text.count("\n", 0, at) + 1
        kernel = next((match.group(1) for match in reversed([*KERNEL.finditer(text, 0, at)])), "the text")
        raise UnknownText(
            f"{kernel} calls {name}, which the emulator does not know, in line {number}: "
            f"{text.splitlines()[number - 1].strip()[:160]}; use one of those in docs/method.md, or add it to "
            "emulator/functions.py and device/functions.h"
        )


def _divisions(text: str) -> str:
    """Let the runtime divide (``emu::over``), except by whole numbers, where it makes no difference."""
    return DIVISION.sub(lambda match: match.group(1) or "/ emu::over /", text)


def _static_arrays(text: str) -> str:
    count = 0

    def number(match: re.Match[str]) -> str:
        """Make the declaration a reference to the block's array of that number."""
        nonlocal count
        count += 1
        align, dtype, name, extent = match.groups()
        return f"{dtype} (&{name})[{extent}] = emu::shared<{dtype}, {extent}>({count - 1}, {align});"

    return re.sub(r"__shared__ alignas\((\d+)\) (\w+(?: \w+)?) (\w+)\[(\d+)\];", number, text)


def _dynamic_array(text: str) -> str:
    declaration = r"extern __shared__ __align__\(\d+\) (\w+) (\w+)\[\];"
    return re.sub(declaration, r"\1* \2 = (\1*)emu::dynamic_shared();", text)


def _poisoned_registers(text: str) -> str:
    """Fill a thread's arrays with ones, which are NaN in every floating-point type."""
    declaration = r"^( *)(alignas\(\d+\) \w+ (\w+)\[\d+\];)"
    return re.sub(declaration, r"\1\2 __builtin_memset(\3, 0xff, sizeof \3);", text, flags=re.M)


def _kernels_beginning(text: str) -> str:
    """Give each kernel its thread's indices, and its static arrays, which lie before the dynamic one."""
    indices = "const emu::Index threadIdx = emu::thread_index(), blockIdx = emu::block_index();"
    ends = [match.end() for match in KERNEL.finditer(text)]
    pieces = [text[: ends[0]]] if ends else [text]
    for start, end in zip(ends, [*ends[1:], len(text)]):
        arrays = re.findall(r"emu::shared<.*?\);", text[start:end])
        pieces.append(f"{{ {' '.join([indices, *arrays])}{text[start + 1 : end]}")
    return "".join(pieces)


def _launch(name: str, found: tuple[Parameter, ...]) -> str:
    arguments = ", ".join(
        f"({p.type})arguments[{i}]" if p.type.endswith("*") else f"*({p.type}*)arguments[{i}]"
        for i, p in enumerate(found)
    )
    uninstrumented = '__attribute__((no_sanitize("thread")))'
    return f'extern "C" {uninstrumented} void launch_{name}(void** arguments) {{ {name}({arguments}); }}'
