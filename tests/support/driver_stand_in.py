"""A stand-in for the CUDA driver with the emulator behind it: what is launched on device memory is emulated there."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from tensorir_ladder.emulator import EmulatedProgram, PlainBuffer, TensorMap
from tensorir_ladder.torch_ops.driver import Driver


class EmulatedDriver:
    """libcuda's functions, of which the launch runs ``program`` on the arrays that its parameters name.

    ``failing`` maps a function's name to the status that it returns.
    """

    def __init__(self, program: EmulatedProgram) -> None:
        self.program = program
        self.failing: dict[str, int] = {}
        self.memory: dict[int, np.ndarray] = {}
        self.maps: dict[int, tuple] = {}

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def function(*arguments: Any) -> int:
            if name not in self.failing:
                getattr(self, f"_{name}", lambda *_: None)(*arguments)
            return self.failing.get(name, 0)

        return function

    def _cuMemAlloc_v2(self, address: Any, size: Any) -> None:
        room = np.zeros(size.value + 256, np.uint8)
        start = -room.ctypes.data % 256
        address._obj.value = room.ctypes.data + start
        self.memory[address._obj.value] = room[start : start + size.value]

    def _cuMemFree_v2(self, address: Any) -> None:
        del self.memory[address.value]

    def _cuMemcpyHtoD_v2(self, to: Any, source: Any, size: Any) -> None:
        ctypes.memmove(to.value, source.value, size.value)

    def _cuMemcpyDtoH_v2(self, to: Any, source: Any, size: Any) -> None:
        ctypes.memmove(to.value, source.value, size.value)

    def _cuTensorMapEncodeTiled(self, encoded: Any, dtype: int, rank: int, address: Any, *described: Any) -> None:
        sizes, strides, box, steps = (tuple(numbers) for numbers in described[:4])
        assert set(steps) == {1}
        self.maps[ctypes.addressof(encoded._obj)] = (
            address.value,
            dtype,
            sizes,
            strides[: rank - 1],
            box,
            described[5],
        )

    def _cuLaunchKernelEx(self, config: Any, _function: Any, parameters: Any, _extra: Any) -> None:
        (launch,) = self.program.launches
        assert (tuple(config._obj.grid), tuple(config._obj.block)) == (launch.grid, launch.block)
        assert config._obj.attribute_count == (launch.cluster_blocks > 1)
        arrays = {}
        for given, value in zip(launch.parameters, parameters):
            if isinstance(given, TensorMap):
                address, _, *layout = self.maps[value]
                arrays[given.buffer] = self.memory[address]
                assert tuple(layout) == (given.sizes, given.strides, given.box, given.swizzle)
            elif isinstance(given, PlainBuffer):
                arrays[given.buffer] = self.memory[ctypes.c_uint64.from_address(value).value]
            else:
                assert ctypes.c_int.from_address(value).value == given
        self.program(*(arrays[name] for name in self.program.names))


def emulated_driver(program: EmulatedProgram) -> Driver:
    """Make a driver on which that program can be launched."""
    return Driver(EmulatedDriver(program))
