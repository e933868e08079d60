"""Call the CUDA driver, by ctypes: the few functions that load a kernel, encode tensor maps and launch.

Structures and enumerators are those of cuda.h (CUDA driver API, CUlaunchConfig, CUlaunchAttribute, CUtensorMap). Every
status but success is one :class:`DriverError`.
"""

# Not by cuda-bindings: a launch would cost as much (0.27 µs instead of 0.22 µs, both measured with a libcuda that does
# nothing), but its CUtensorMap lies at multiples of 16 bytes (13.5), where the driver demands 64. It also wants a
# Python of 3.11, and a release for the CUDA that torch was built with.

from __future__ import annotations

import ctypes
import functools
import threading
from typing import Any

from tensorir_ladder.kernels.codegen.launch_plan import LaunchPlan, TensorMap

LIBRARY = "libcuda.so.1"
TENSOR_MAP_BYTES, TENSOR_MAP_ALIGNMENT = 128, 128
TENSOR_MAP_DTYPES = {"float16": 6, "float32": 7, "bfloat16": 9}
MAX_DYNAMIC_SHARED_BYTES, ALLOW_LARGE_CLUSTERS = 8, 14  # CUfunction_attribute
CLUSTER_EXTENTS, OVERLAPS_PREVIOUS = 4, 6  # CUlaunchAttributeID
NAME_BYTES = 256
PORTABLE_CLUSTER = 8  # blocks of a cluster that every GPU with clusters can hold


class DriverError(RuntimeError):
    """A call of the CUDA driver that failed: ``call`` is its name, ``status`` the number it returned."""

    def __init__(self, call: str, status: int, meaning: str) -> None:
        super().__init__(f"{call} failed: {meaning} ({status})")
        self.call, self.status, self.meaning = call, status, meaning

    def __reduce__(self) -> tuple[type[DriverError], tuple[str, int, str]]:
        """Say how it is made again in another process."""
        return type(self), (self.call, self.status, self.meaning)


class NoDriver(RuntimeError):
    """There is no CUDA driver on this machine."""


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: a number and 64 bytes of value."""

    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_uint * 16))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("attribute_count", ctypes.c_uint),
    )


def launch_config(plan: LaunchPlan, stream: int) -> LaunchConfig:
    """Describe a plan's launch to the driver; ``stream`` is a CUstream's address."""
    attributes = []
    if plan.cluster_blocks > 1:
        attributes.append(LaunchAttribute(CLUSTER_EXTENTS, 0, plan.cluster))
    if plan.overlaps:
        attributes.append(LaunchAttribute(OVERLAPS_PREVIOUS, 0, (1,)))
    array = (LaunchAttribute * len(attributes))(*attributes)
    return LaunchConfig(plan.grid, plan.block, plan.shared_bytes, stream, array, len(attributes))


class _Entered(threading.local):
    """The devices whose contexts a thread has made its own."""

    def __init__(self) -> None:
        self.devices: set[int] = set()


class Driver:
    """The driver's functions, checked: those of ``library``, which is libcuda or offers the same functions.

    ``entered.devices`` are those whose contexts :meth:`enter` has made this thread's.
    """

    def __init__(self, library: Any) -> None:
        self.library = library
        self.call("cuInit", 0)
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self.entered = _Entered()

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function; DriverError names it and what its status means."""
        status = getattr(self.library, name)(*arguments)
        if status:
            raise self.error(name, status)

    def error(self, name: str, status: int) -> DriverError:
        """Make the error that a status of the function of that name is."""
        text = ctypes.c_char_p()
        known = self.library.cuGetErrorName(status, ctypes.byref(text)) == 0 and text.value
        return DriverError(name, status, known.decode() if known else "unknown error")

    def enter(self, device: int) -> None:
        """Make a device's primary context, which torch works in, this thread's, which may not have one yet."""
        if device in self.entered.devices:
            return
        if device not in self._contexts:
            context, number = ctypes.c_void_p(), ctypes.c_int()
            self.call("cuDeviceGet", ctypes.byref(number), device)
            self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
            self._contexts[device] = context
        self.call("cuCtxSetCurrent", self._contexts[device])
        self.entered.devices.add(device)

    def attribute(self, device: int, number: int) -> int:
        """Ask for a device's attribute, by its number among CUdevice_attribute."""
        value, handle = ctypes.c_int(), ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(handle), device)
        self.call("cuDeviceGetAttribute", ctypes.byref(value), number, handle)
        return value.value

    def name(self, device: int) -> str:
        """Ask for a device's name, as "NVIDIA H200"."""
        handle, text = ctypes.c_int(), ctypes.create_string_buffer(NAME_BYTES)
        self.call("cuDeviceGet", ctypes.byref(handle), device)
        self.call("cuDeviceGetName", text, NAME_BYTES, handle)
        return text.value.decode()

    def load(self, cubin: bytes, plan: LaunchPlan) -> ctypes.c_void_p:
        """Load a plan's kernel from a cubin into the thread's context; allow it the shared memory that it asks for.

        It stays loaded: a captured CUDA graph may launch it at any later time.
        """
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), cubin)
        self.call("cuModuleGetFunction", ctypes.byref(function), module, plan.kernel.encode())
        if plan.shared_bytes:
            self.call("cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED_BYTES, plan.shared_bytes)
        if plan.cluster_blocks > PORTABLE_CLUSTER:
            self.call("cuFuncSetAttribute", function, ALLOW_LARGE_CLUSTERS, 1)
        return function

    def capture(self, stream: int) -> int:
        """Number the capture of a CUDA graph that a stream takes part in, as no other in this process."""
        status, number = ctypes.c_int(), ctypes.c_uint64()
        found = (ctypes.byref(status), ctypes.byref(number), None, None, None)
        self.call("cuStreamGetCaptureInfo_v2", ctypes.c_void_p(stream), *found)
        return number.value

    def encode(self, tensor_map: TensorMap, address: int) -> ctypes.Array:
        """Encode a tensor map of the memory at ``address``: a CUtensorMap, 128 bytes, aligned to as many."""
        room = (ctypes.c_char * (TENSOR_MAP_BYTES + TENSOR_MAP_ALIGNMENT))()
        offset = -ctypes.addressof(room) % TENSOR_MAP_ALIGNMENT
        encoded = (ctypes.c_char * TENSOR_MAP_BYTES).from_buffer(room, offset)
        rank = len(tensor_map.sizes)
        self.call(
            "cuTensorMapEncodeTiled",
            ctypes.byref(encoded),
            TENSOR_MAP_DTYPES[tensor_map.dtype],
            rank,
            ctypes.c_void_p(address),
            (ctypes.c_uint64 * rank)(*tensor_map.sizes),
            (ctypes.c_uint64 * max(1, rank - 1))(*tensor_map.strides),
            (ctypes.c_uint32 * rank)(*tensor_map.box),
            (ctypes.c_uint32 * rank)(*[1] * rank),  # no elements left out
            0,  # not interleaved
            tensor_map.swizzle,
            tensor_map.l2_promotion,
            0,  # zeros beyond the edges
        )
        return encoded


@functools.cache
def cuda_driver() -> Driver:
    """Load this machine's driver; NoDriver says that there is none."""
    try:
        return Driver(ctypes.CDLL(LIBRARY))
    except OSError as error:
        raise NoDriver(f"no CUDA driver ({LIBRARY}): {error}; install NVIDIA's driver") from error
