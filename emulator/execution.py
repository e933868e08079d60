"""Running kernels' CUDA text on the CPU: memory, launches, and faults with the line that made them."""

from __future__ import annotations

import ctypes
import os
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from tensorir_ladder.emulator.compiler import kernel_library, load_library, source_lines
from tensorir_ladder.emulator.errors import KernelFault, UnknownLaunch, WrongArray
from tensorir_ladder.emulator.source import has_doubles, host_text, launch_registers, parameters
from tensorir_ladder.kernels.codegen.launch_plan import LaunchPlan, PlainBuffer, Real, RowCount, TensorMap

OPERAND, KEPT = 0, -1  # arrays that are only read, and memory between kernels; of others, bytes of an element
COMPLETIONS = ("early", "late", "drawn")
ALIGNMENT, GAP = 256, 1 << 16
PLACE = re.compile(r"<code (0x[0-9a-f]+)>")


class _Map(ctypes.Structure):
    _fields_ = (
        ("base", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("element_bytes", "rank", "swizzle")),
        *((name, ctypes.c_int64 * 5) for name in ("sizes", "strides", "box")),
    )


class _Launch(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("arguments", ctypes.c_void_p),
        ("grid", ctypes.POINTER(ctypes.c_int)),
        ("block", ctypes.POINTER(ctypes.c_int)),
        *(
            (name, ctypes.c_int)
            for name in ("cluster", "completion", "spurious", "overlaps", "arrays", "resident", "registers", "flushes")
        ),
        ("dynamic_bytes", ctypes.c_int64),
        ("seed", ctypes.c_uint64),
        ("bases", ctypes.c_void_p),
        ("sizes", ctypes.c_void_p),
        ("uses", ctypes.c_void_p),
    )


class Deeds(NamedTuple):
    """Digest what a launch's threads did: ``all``, in the order of each; of that ``accesses`` and multiplications.

    Values are no part of it. With the same accesses and no race, what else was done made no difference.
    """

    all: int
    accesses: int


def tvm_uses_fast_math() -> bool:
    """Tell if TVM gives nvcc ``--use_fast_math``: it does, unless ``TVM_CUDA_NVCC_NO_FAST_MATH`` is set."""
    return not os.environ.get("TVM_CUDA_NVCC_NO_FAST_MATH")


@dataclass(frozen=True)
class EmulatedProgram:
    """CUDA text and what is launched of it, as a function of arrays on this machine.

    ``label`` names it in messages; ``cuda`` is the kernels' text, ``launches`` run one after another, ``names`` are
    those of the arrays of a call, in order; behind these stand ``memory``, shapes and dtypes of what the kernels keep
    between them, where races are looked for. ``resident`` blocks may be alive together. Arrays that no kernel may write
    to are named in ``operands``; in all others, an element is stored by one thread of a launch. ``fast_math`` says if
    float32 is as under nvcc's ``--use_fast_math``; the default is what TVM does, which the environment variable
    ``TVM_CUDA_NVCC_NO_FAST_MATH`` turns off.

    Raises
    ------
    UnknownLaunch : for clusters along y or z, and parameters that are not those of the kernel's text or a call.
    """

    label: str
    cuda: str
    launches: tuple[LaunchPlan, ...]
    names: tuple[str, ...]
    memory: tuple[tuple[tuple[int, ...], np.dtype], ...] = ()
    resident: int = 1
    operands: tuple[str, ...] = ()

    fast_math: bool = field(default_factory=tvm_uses_fast_math)

    def __post_init__(self) -> None:
        taken = parameters(self.cuda)
        if unknown := set(self.operands) - set(self._given):
            raise UnknownLaunch(f"operands {', '.join(unknown)} of {self.label}, not among {', '.join(self._given)}")
        for launch in self.launches:
            buffers = {given.buffer for given in launch.parameters if not isinstance(given, (int, Real))}
            if launch.cluster[1:] != (1, 1):
                raise UnknownLaunch(f"{launch.kernel} has clusters along y or z; the emulator knows clusters along x")
            if RowCount() in launch.parameters:
                raise UnknownLaunch(f"{launch.kernel} takes any number of rows; launch it with a number of them")
            if unknown := buffers - set(self.names):
                raise UnknownLaunch(f"{launch.kernel} is given {', '.join(unknown)}, not among {', '.join(self.names)}")
            if (count := len(taken.get(launch.kernel, ()))) != len(launch.parameters):
                raise UnknownLaunch(f"{launch.kernel} takes {count} parameters, and is given {len(launch.parameters)}")

    @property
    def _given(self) -> tuple[str, ...]:
        """Names of the arrays of a call."""
        return self.names[: len(self.names) - len(self.memory)]

    def _uses(self, memory: _Memory) -> Any:
        given = [OPERAND if name in self.operands else view.itemsize for name, view in zip(self._given, memory.views)]
        return (ctypes.c_int * len(self.names))(*given, *[KEPT] * len(self.memory))

    @cached_property
    def _text(self) -> str:
        return host_text(self.cuda, {launch.kernel for launch in self.launches}, self.fast_math)

    @cached_property
    def library(self) -> Path:
        """The compiled kernels."""
        return kernel_library(self._text, self.fast_math)

    @cached_property
    def _loaded(self) -> ctypes.CDLL:
        loaded = load_library(self.library, self._text)
        loaded.emu_launch.restype = ctypes.c_char_p
        loaded.emu_deeds.restype = loaded.emu_accesses.restype = ctypes.c_uint64
        return loaded

    def __call__(self, *arrays: np.ndarray, seed: int = 0) -> tuple[Deeds, ...]:
        """Run on copies of the arrays, and write these back.

        ``seed`` draws the order of threads, and when what runs beside them is done: at once, as late as it may be, or
        drawn (seeds modulo 3). Returns what each launch's threads did.

        Raises KernelFault, also for an access beyond an array, and WrongArray for an array that is missing, of another
        dtype than its kernels take, not contiguous, or read-only and no operand. Unsigned integers of a number's size
        are its bits.
        """
        self._check_arrays(arrays)
        memory = _Memory([*arrays, *(_kept(shape, dtype) for shape, dtype in self.memory)])
        deeds = tuple(self._run(launch, memory, seed, number) for number, launch in enumerate(self.launches))
        for name, array, copy in zip(self.names, arrays, memory.views):
            if name not in self.operands:
                np.copyto(array, copy)
        self._check_flags(memory, seed)
        return deeds

    def _check_arrays(self, arrays: tuple[np.ndarray, ...]) -> None:
        if len(arrays) != len(self._given):
            raise WrongArray(
                f"{self.label} takes {len(self._given)} arrays, {', '.join(self._given)}, and is given {len(arrays)}; "
                "give one for each name, in this order"
            )
        for name, array in zip(self._given, arrays):
            if not isinstance(array, np.ndarray):
                raise WrongArray(f"{self.label}: {name} is a {type(array).__name__}; give a numpy array")
            given = f"{self.label}: {name} is {array.dtype} of shape {array.shape}"
            for dtype, where in self._wanted[name]:
                if not _is_of(array.dtype, dtype):
                    raise WrongArray(f"{given}, and {where} takes {dtype}; give an array of {dtype}, or its bits")
            if not array.flags.c_contiguous:
                raise WrongArray(f"{given} with strides {array.strides}; give np.ascontiguousarray of it")
            if name not in self.operands and not array.flags.writeable:
                raise WrongArray(
                    f"{given} and read-only; give a copy, or name it in operands where no kernel stores to it"
                )

    @cached_property
    def _wanted(self) -> dict[str, list[tuple[np.dtype, str]]]:
        """For each array of a call, what the kernels take it for: a dtype, and where."""
        taken, wanted = parameters(self.cuda), {name: [] for name in self.names}
        for launch in self.launches:
            for given, parameter in zip(launch.parameters, taken[launch.kernel]):
                where = f"{parameter.name} of {launch.kernel}"
                if isinstance(given, TensorMap):
                    wanted[given.buffer].append((_numpy(given.dtype), where))
                elif isinstance(given, PlainBuffer) and parameter.dtype:
                    wanted[given.buffer].append((_numpy(parameter.dtype), where))
        return wanted

    def _check_flags(self, memory: _Memory, seed: int) -> None:
        """Raise for flags, the whole numbers that kernels keep, that are not zeros again for the next call."""
        for (_, dtype), view in zip(self.memory, memory.views[len(memory.views) - len(self.memory) :]):
            if np.issubdtype(dtype, np.integer) and view.any():
                places = np.flatnonzero(view)
                text = f"{places.size} of {view.size} are not zero after the call, the first of them number {places[0]}"
                raise KernelFault(self.label, "flag left raised", text, seed)

    def _run(self, launch: LaunchPlan, memory: _Memory, seed: int, number: int) -> Deeds:
        bases = dict(zip(self.names, memory.addresses, strict=True))
        values = [_value(given, bases) for given in launch.parameters]
        pointers = (ctypes.c_void_p * max(1, len(values)))(
            *(value if isinstance(value, int) else ctypes.addressof(value) for value in values)
        )
        uses = self._uses(memory)
        described = _Launch(
            ctypes.cast(self._loaded.emu_code, ctypes.c_void_p),
            ctypes.cast(self._loaded[f"launch_{launch.kernel}"], ctypes.c_void_p),
            ctypes.addressof(pointers),
            (ctypes.c_int * 3)(*launch.grid),
            (ctypes.c_int * 3)(*launch.block),
            launch.cluster_blocks,
            seed % len(COMPLETIONS),
            seed // len(COMPLETIONS) % 2,
            launch.overlaps,
            len(memory.addresses),
            self.resident,
            launch_registers(self.cuda, launch.kernel),
            self.fast_math and not has_doubles(self.cuda, launch.kernel),
            launch.shared_bytes,
            seed * 1000 + number,
            ctypes.addressof(memory.bases),
            ctypes.addressof(memory.sizes),
            ctypes.addressof(uses),
        )
        fault = self._loaded.emu_launch(ctypes.byref(described))
        if fault:
            raise self._explained(fault.decode(), seed)
        return Deeds(self._loaded.emu_deeds(), self._loaded.emu_accesses())

    def _explained(self, fault: str, seed: int) -> KernelFault:
        kind, text = fault.split("\n", 1)
        lines = source_lines(self.library, self.cuda, sorted(set(PLACE.findall(text))))
        return KernelFault(
            self.label, kind, PLACE.sub(lambda match: lines.get(match.group(1), match.group()), text), seed
        )


def _kept(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Make memory between kernels as it is before the first: numbers are poisoned, flags are down."""
    return np.zeros(shape, dtype) if np.issubdtype(dtype, np.integer) else np.full(shape, np.nan, dtype)


def _numpy(dtype: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, dtype, dtype))


def _is_of(given: np.dtype, wanted: np.dtype) -> bool:
    """Tell if an array holds numbers of a dtype, or their bits, as unsigned integers of any width do."""
    whole = given.itemsize == wanted.itemsize and given.kind in "iub" and wanted.kind in "iub"
    return given == wanted or whole or given.kind == "u"


class _Memory:
    """Device memory: copies of arrays, far from each other, so that what runs past one is in none."""

    def __init__(self, arrays: list[np.ndarray]) -> None:
        starts, end = [], GAP
        for array in arrays:
            starts.append(end)
            end = -(-(end + array.nbytes + GAP) // ALIGNMENT) * ALIGNMENT
        self._bytes = np.full(end + ALIGNMENT, 0xFF, np.uint8)
        start = -self._bytes.ctypes.data % ALIGNMENT
        self.views = [
            self._bytes[start + at : start + at + array.nbytes].view(array.dtype).reshape(array.shape)
            for at, array in zip(starts, arrays)
        ]
        for view, array in zip(self.views, arrays):
            np.copyto(view, array)
        self.addresses = [self._bytes.ctypes.data + start + at for at in starts]
        self.bases = (ctypes.c_void_p * len(arrays))(*self.addresses)
        self.sizes = (ctypes.c_int64 * len(arrays))(*(array.nbytes for array in arrays))


def _value(given: TensorMap | PlainBuffer | Real | int, bases: dict[str, int]) -> Any:
    """Make what a launch function finds at a parameter's place: an array's address, or a value in memory."""
    if isinstance(given, PlainBuffer):
        return bases[given.buffer]
    if isinstance(given, int):
        return ctypes.c_int64(given)
    if isinstance(given, Real):
        return ctypes.create_string_buffer(np.array(given.value, _numpy(given.dtype)).tobytes())
    size, padding, extents = given.itemsize, [1] * (5 - len(given.sizes)), ctypes.c_int64 * 5
    groups = (given.sizes, (size, *given.strides), given.box)
    return _Map(
        bases[given.buffer], size, len(given.sizes), given.swizzle, *(extents(*group, *padding) for group in groups)
    )
