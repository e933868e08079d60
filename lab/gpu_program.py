"""CUDA text on the GPU through the driver alone: what the emulator runs, on the machine that it models."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tensorir_ladder.emulator import EmulatedProgram
from tensorir_ladder.kernels.codegen.launch_plan import LaunchPlan, PlainBuffer, TensorMap
from tensorir_ladder.torch_ops.driver import Driver, cuda_driver, launch_config


@dataclass(frozen=True)
class GpuProgram:
    """An emulated program's launches on GPU 0, of a cubin of its text.

    Each array lies in an allocation of its own, so that memcheck sees what runs past one.
    """

    described: EmulatedProgram
    cubin: bytes
    driver: Driver = field(default_factory=cuda_driver)

    def __call__(self, *arrays: np.ndarray) -> None:
        """Run on copies of the arrays, and write these back.

        Memory between kernels begins as zeros. Raises DriverError where the GPU stops a kernel, after which this
        process can launch no other.
        """
        self.driver.enter(0)
        kept = [np.zeros(shape, dtype) for shape, dtype in self.described.memory]
        addresses = [self._upload(array) for array in (*arrays, *kept)]
        bases = dict(zip(self.described.names, addresses))
        for launch in self.described.launches:
            self._launch(launch, bases)
        self.driver.call("cuCtxSynchronize")
        for array, address in zip(arrays, addresses):
            self.driver.call("cuMemcpyDtoH_v2", ctypes.c_void_p(array.ctypes.data), address, _size(array))
        for address in addresses:
            self.driver.call("cuMemFree_v2", address)

    def _upload(self, array: np.ndarray) -> ctypes.c_uint64:
        address = ctypes.c_uint64()
        self.driver.call("cuMemAlloc_v2", ctypes.byref(address), _size(array))
        self.driver.call("cuMemcpyHtoD_v2", address, ctypes.c_void_p(array.ctypes.data), _size(array))
        return address

    def _launch(self, launch: LaunchPlan, bases: Mapping[str, ctypes.c_uint64]) -> None:
        values = [self._value(given, bases) for given in launch.parameters]
        parameters = (ctypes.c_void_p * max(1, len(values)))(*map(ctypes.addressof, values))
        function = self.driver.load(self.cubin, launch)
        self.driver.call("cuLaunchKernelEx", ctypes.byref(launch_config(launch, 0)), function, parameters, None)

    def _value(self, given: TensorMap | PlainBuffer | int, bases: Mapping[str, ctypes.c_uint64]) -> Any:
        """Make what lies at a parameter's place: an address, a number, or an encoded tensor map."""
        if isinstance(given, TensorMap):
            return self.driver.encode(given, bases[given.buffer].value)
        return bases[given.buffer] if isinstance(given, PlainBuffer) else ctypes.c_int64(given)


def _size(array: np.ndarray) -> ctypes.c_size_t:
    return ctypes.c_size_t(array.nbytes)
