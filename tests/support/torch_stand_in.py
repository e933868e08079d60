"""Stand-ins for torch and the CUDA driver, so that the Python call is tested where there is neither.

The driver's keeps of a tensor map what it was encoded from, and a launch multiplies what its parameters describe, in
numpy, in the order and with the strides that they name; of activations it knows relu. It is no model of a kernel: of
what reaches one.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping
from math import prod
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

from tensorir_ladder.kernels.codegen.launch_plan import JOB_NUMBERS, LaunchPlan, PlainBuffer, RowCount, TensorMap
from tensorir_ladder.kernels.fused_epilogue import PLAIN, Epilogue
from tensorir_ladder.schedules.workloads import Matmul

DTYPES = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
    "int32": np.int32,
}
ENCODED_DTYPES = {6: "float16", 7: "float32", 9: "bfloat16"}
ALIGNMENT = 256


class Dtype(str):
    """A dtype, which prints as torch's do."""

    def __str__(self) -> str:
        return f"torch.{str.__str__(self)}"


class Tensor:
    """A tensor "on" GPU ``device``, or on the CPU (-1), over a numpy array."""

    __torch_dispatch__ = None  # none of its own

    def __init__(self, array: np.ndarray, dtype: str, device: int = 0, requires_grad: bool = False) -> None:
        self.array, self.dtype, self._device, self.requires_grad = (
            array,
            Dtype(str.__str__(dtype)),
            device,
            requires_grad,
        )

    @classmethod
    def empty(cls, shape: tuple[int, ...], dtype: str, device: int = 0, offset: int = 0) -> Tensor:
        """NaNs, or -1 for whole numbers, at an address ``offset`` bytes beyond an aligned one."""
        kind = np.dtype(DTYPES[dtype])
        room = np.empty(int(np.prod(shape)) * kind.itemsize + 2 * ALIGNMENT, np.uint8)
        begin = -room.ctypes.data % ALIGNMENT + offset
        array = room[begin : begin + int(np.prod(shape)) * kind.itemsize].view(kind).reshape(shape)
        array[...] = np.nan if kind.kind != "i" else -1
        return cls(array, dtype, device)

    @classmethod
    def integers(cls, seed: int, shape: tuple[int, ...], dtype: str, offset: int = 0) -> Tensor:
        """Whole numbers from -2 to 2."""
        made = cls.empty(shape, dtype, offset=offset)
        made.array[...] = np.random.default_rng(seed).integers(-2, 3, shape)
        return made

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def is_cuda(self) -> bool:
        return self._device >= 0

    @property
    def device(self) -> str:
        return f"cuda:{self._device}" if self.is_cuda else "cpu"

    @property
    def T(self) -> Tensor:
        return Tensor(self.array.T, self.dtype, self._device)

    @property
    def mT(self) -> Tensor:
        return Tensor(np.swapaxes(self.array, -2, -1), self.dtype, self._device)

    def get_device(self) -> int:
        return self._device

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def new_empty(self, shape: tuple[int, ...] | int, dtype: str | None = None) -> Tensor:
        return Tensor.empty(shape, str.__str__(dtype or self.dtype), self._device)

    def expand(self, shape: tuple[int, ...]) -> Tensor:
        return Tensor(np.broadcast_to(self.array, shape), self.dtype, self._device)

    def new_empty_strided(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
        extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides))
        return self.new_empty((extent,)).as_strided(shape, strides)

    def as_strided(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
        steps = tuple(stride * self.array.itemsize for stride in strides)
        return Tensor(np.lib.stride_tricks.as_strided(self.array, shape, steps), self.dtype, self._device)

    def new_zeros(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        made = self.new_empty(shape, dtype)
        made.array[...] = 0
        return made

    def copy_(self, other: Tensor) -> None:
        self.array[...] = other.array

    def __getitem__(self, index: Any) -> Tensor:
        return Tensor(self.array[index], self.dtype, self._device)


def torch_stand_in(gpus: int = 1) -> SimpleNamespace:
    """A module "torch" that sees so many GPUs; ``cuda.device``, ``stream`` and ``capturing`` may be set.

    ``written`` are the tensors of which autograd was told that they have changed.
    """
    written: list[Tensor] = []
    cuda = SimpleNamespace(device=0, stream=0, capturing=False)
    cuda.is_available = lambda: gpus > 0
    cuda.is_current_stream_capturing = lambda: cuda.capturing
    dtypes = {name: Dtype(name) for name in DTYPES}
    private = SimpleNamespace(
        _cuda_getDevice=lambda: cuda.device,
        _cuda_getCurrentRawStream=lambda _: cuda.stream,
        _cuda_isCurrentStreamCapturing=lambda: cuda.capturing,
        _increment_version=written.extend,
        _len_torch_dispatch_stack=lambda: 0,
    )

    def empty_like(tensor: Tensor) -> Tensor:
        """Contiguous memory."""
        return tensor.new_empty(tensor.shape)

    return SimpleNamespace(
        Tensor=Tensor,
        cuda=cuda,
        written=written,
        _C=private,
        empty_like=empty_like,
        is_grad_enabled=lambda: True,
        compiler=SimpleNamespace(is_compiling=lambda: False),
        autograd=SimpleNamespace(forward_ad=SimpleNamespace(_current_level=-1)),
        **dtypes,
    )


class Library:
    """Stands in for libcuda: notes calls, and multiplies. ``failing`` maps a function's name to its status.

    ``streams`` are those of launches, ``grids`` their blocks, ``flags`` the addresses of the flags in workspaces
    that these were given; ``capture`` numbers the capture that goes on.
    """

    def __init__(
        self,
        capability: tuple[int, int] = (9, 0),
        gpu: str = "NVIDIA H200",
        attributes: Mapping[int, int] | None = None,
    ) -> None:
        self.calls: list[tuple[str, tuple]] = []
        self.failing: dict[str, int] = {}
        self.streams: list[int] = []
        self.flags: list[int] = []
        self.grids: list[tuple[int, ...]] = []
        self.kernels: list[tuple[LaunchPlan, Matmul | None, Epilogue]] = []
        self.capture = 1
        self.gpu = gpu
        self._attributes = {75: capability[0], 76: capability[1], 1: 1024, 10: 32, 12: 65536, 97: 232448, 16: 132}
        self._attributes |= {13: 1_980_000, 36: 3_201_000, 37: 6144}  # clocks in kHz, and the bus in bits
        self._attributes |= attributes or {}
        self._maps: dict[int, tuple] = {}
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def function(*arguments: Any) -> int:
            """Note the call and do what is needed of it."""
            with self._lock:
                self.calls.append((name, arguments))
            if name in self.failing:
                return self.failing[name]
            getattr(self, f"_{name}", lambda *_: None)(*arguments)
            return 0

        return function

    def count(self, name: str) -> int:
        """Count the calls of a function."""
        return sum(called == name for called, _ in self.calls)

    def _cuGetErrorName(self, status: int, text: Any) -> None:
        text._obj.value = b"CUDA_ERROR_INVALID_VALUE" if status == 1 else b"CUDA_ERROR_UNKNOWN"

    def _cuDeviceGetAttribute(self, value: Any, number: int, _device: Any) -> None:
        value._obj.value = self._attributes[number]

    def _cuDeviceGetName(self, text: Any, _length: int, _device: Any) -> None:
        text.value = self.gpu.encode()

    def _cuStreamGetCaptureInfo_v2(self, _stream: Any, _status: Any, number: Any, *_optional: None) -> None:
        number._obj.value = self.capture

    def _cuTensorMapEncodeTiled(self, encoded: Any, dtype: int, rank: int, address: Any, *described: Any) -> None:
        assert ctypes.addressof(encoded._obj) % 64 == 0
        sizes, strides = (list(numbers) for numbers in described[:2])
        assert len(sizes) == rank == len(strides) + 1
        assert address.value % 16 == 0
        assert not any(stride % 16 for stride in strides)
        self._maps[ctypes.addressof(encoded._obj)] = (address.value, ENCODED_DTYPES[dtype], sizes[::-1], strides[::-1])

    def add(self, kernel: LaunchPlan, problem: Matmul | None, finish: Epilogue = PLAIN) -> bytes:
        """Take in the kernel for a problem, None for the one that copies rows; returns the "cubin" to load it from."""
        self.kernels.append((kernel, problem, finish))
        return str(len(self.kernels)).encode()

    def _cuModuleLoadData(self, module: Any, cubin: bytes) -> None:
        module._obj.value = int(cubin)

    def _cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> None:
        assert name.decode() == self.kernels[module.value - 1][0].kernel
        function._obj.value = module.value

    def _cuLaunchKernelEx(self, config: Any, function: Any, parameters: Any, _extra: Any) -> None:
        self.streams.append(config.contents.stream or 0)
        self.grids.append(tuple(config.contents.grid))
        plan, problem, finish = self.kernels[function.value - 1]
        if problem is None:
            _copy_rows(plan, parameters)
            return
        pairs = zip(plan.parameters, parameters)
        matrices = {
            each.buffer: self._matrix(each, value, problem.out_dtype, problem.dtype)
            for each, value in pairs
            if not isinstance(each, RowCount)
        }
        self._look_at_flags(matrices.pop("flags", None))
        a, b = (matrices[name].astype(np.float64) for name in "AB")
        b = b if problem.layout == "nn" else b.swapaxes(-1, -2)
        result = finish.alpha * (a @ b)
        if finish.bias:
            result = result + matrices["bias"].astype(np.float64)[0, : b.shape[-1]]
        matrices["C"][..., : b.shape[-1]] = np.maximum(result, 0) if finish.activation == "relu" else result

    def _look_at_flags(self, flags: np.ndarray | None) -> None:
        """Flags must be down before each launch."""
        if flags is not None:
            assert not flags.any()
            self.flags.append(flags.ctypes.data)

    def _matrix(self, parameter: TensorMap | PlainBuffer, value: int, dtype: str, operands: str) -> np.ndarray:
        """The matrix that a parameter describes; ``dtype`` is that of a plain output, ``operands`` of A and B."""
        if isinstance(parameter, TensorMap):
            address, dtype, shape, steps = self._maps[value]
        else:
            address, shape = ctypes.c_void_p.from_address(value).value, (1, *parameter.shape)
            shape = shape[-2:] if len(shape) < 4 else shape[1:]
            # TVM's host code calls bfloat16 uint16.
            dtype = {"C": dtype, "A": operands, "B": operands}.get(parameter.buffer, parameter.dtype)
            steps = [prod(shape[place:]) * parameter.itemsize for place in range(1, len(shape))]
        kind = np.dtype(DTYPES[dtype])
        extent = sum((size - 1) * step for size, step in zip(shape, steps)) + shape[-1] * kind.itemsize
        flat = np.frombuffer((ctypes.c_uint8 * extent).from_address(address), np.uint8)
        return np.ndarray(shape, kind, flat, strides=(*steps, kind.itemsize))


def _copy_rows(plan: LaunchPlan, parameters: Any) -> None:
    """Copy what the numbers of :class:`kernels.copied_rows.Job` say, row by row."""
    given = {}
    for each, value in zip(plan.parameters, parameters):
        kind = ctypes.c_uint32 if each.buffer.startswith(("rows", "width", "columns", "first")) else ctypes.c_int64
        given[each.buffer] = kind.from_address(value).value
    for job in range(2):
        rows, width, columns, source_step, target_step, extent = (given[f"{name}_{job}"] for name in JOB_NUMBERS)
        for row in range(rows):
            count = min(columns, extent - row * source_step)
            source, target = (
                given[f"{name}_{job}"] + 2 * row * step
                for name, step in (("source", source_step), ("target", target_step))
            )
            assert width >= columns
            ctypes.memmove(target, source, 2 * count)
