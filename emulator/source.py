"""Making generated CUDA text ready for a C++ compiler: CUDA's own syntax is replaced, line by line.

Lines keep their numbers, so that a place in the compiled code is a line of the CUDA text.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from tensorir_ladder.emulator.errors import UnknownText
from tensorir_ladder.emulator.ptx import translate_asm

PREAMBLE_END = "#define ushort unsigned short\n#endif\n"
KERNEL = re.compile(r'extern "C" __global__ void (?:__launch_bounds__\([^)]*\) )?(\w+)\(([^;{]*)\) (?=\{)')
KERNEL_END = "\n}\n"
BOUNDS = r'extern "C" __global__ void __launch_bounds__\((\d+), *(\d+)\) {name}\('
REGISTER_CHANGE = re.compile(r"setmaxnreg\.(?:inc|dec)\.sync\.aligned\.u32 (\d+)")
BLOCK_REGISTERS, REGISTER_STEP = 65536, 8
KERNEL_FILE = "kernel.cu"


@dataclass(frozen=True)
class Parameter:
    """A kernel's parameter: its C++ type and its name."""

    type: str
    name: str


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


def host_text(cuda: str, launched: Collection[str] | None = None) -> str:
    """Make C++ text of all kernels, or of those launched, each with a function ``launch_NAME(void** arguments)``.

    Raises UnknownText where the text does not begin as TVM's does, and what :func:`translate_asm` raises.
    """
    start = cuda.find(PREAMBLE_END)
    if start < 0:
        raise UnknownText("the CUDA text does not begin with TVM's preamble; the emulator runs what TVM generates")
    if launched is not None:
        cuda = _only(cuda, launched)
    start += len(PREAMBLE_END)
    text = "\n" * cuda[:start].count("\n") + translate_asm(cuda[start:])
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
