"""What a lowered function launches, read from its host code: kernels, their arguments, grids and tensor maps."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import tvm
import tvm_ffi
from tvm import ir, tirx

from tensorir_ladder.emulator.errors import UnknownLaunch
from tensorir_ladder.schedules.loops.vectorization import dtype_bytes

AXES = ("x", "y", "z")
DYNAMIC_SHARED = "tirx.use_dyn_shared_memory"


@dataclass(frozen=True)
class TensorMap:
    """A tensor map's description: sizes innermost first, strides in bytes of all dimensions but the innermost.

    ``array`` is the function's parameter that it maps; ``swizzle`` is CUDA's number: 0 none, 1 to 3 of 32, 64 and 128
    bytes.
    """

    array: str
    dtype: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int

    def __post_init__(self) -> None:
        row = self.box[0] * dtype_bytes(self.dtype)
        found = [f"a stride of {stride} bytes, no multiple of 16" for stride in self.strides if stride % 16]
        found += [f"a box of {extent} elements, not 1 to 256" for extent in self.box if not 1 <= extent <= 256]
        found += [f"rows of a box of {row} bytes, no multiple of 16"] if row % 16 else []
        found += [f"rows of a box of {row} bytes, with a swizzle of {16 << self.swizzle}"] * (
            bool(self.swizzle) and row > 16 << self.swizzle
        )
        if found:
            raise UnknownLaunch(f"no tensor map of {self.array} can have {'; '.join(found)}")


@dataclass(frozen=True)
class Launch:
    """A kernel's launch: ``arguments`` are names of the function's parameters, tensor maps, or whole numbers."""

    kernel: str
    arguments: tuple[str | TensorMap | int, ...]
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: int
    dynamic_bytes: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return prod(self.block)


def read_launches(host: tvm.IRModule) -> list[Launch]:
    """The launches of the host module's one function, in their order.

    Raises UnknownLaunch for extents that are known at run time only.
    """
    launches: list[Launch] = []
    maps: dict[str, TensorMap] = {}

    def note(call: ir.Call) -> None:
        """Take down a launch, or a tensor map."""
        name = getattr(call.op, "name", "")
        if name == "tirx.tensormap_encode_tiled":
            maps[_name(call.args[0])] = _tensor_map(call)
        elif name == "tirx.call_ffi_kernel":
            launches.append(_launch(call, maps))

    for function in host.functions.values():
        tvm_ffi.structural_walk(function.body, (ir.Call, note))
    return launches


def _launch(call: ir.Call, maps: dict[str, TensorMap]) -> Launch:
    kernel, *values = call.args
    # Others, as of launches that overlap, are flags without a value; kernels run one after another here.
    axes = [name for name in map(str, call.attrs.launch_params) if "Idx." in name or name == DYNAMIC_SHARED]
    arguments, extents = values[: len(values) - len(axes)], values[len(values) - len(axes) :]
    extent = {axis: _number(value, f"{axis} of {kernel.value}") for axis, value in zip(axes, extents)}
    if extent.keys() & {"clusterCtaIdx.y", "clusterCtaIdx.z"}:
        raise UnknownLaunch(f"{kernel.value} has clusters along y or z; the emulator knows clusters along x")
    return Launch(
        str(kernel.value),
        tuple(_argument(value, maps) for value in arguments),
        *(tuple(extent.get(f"{kind}.{axis}", 1) for axis in AXES) for kind in ("blockIdx", "threadIdx")),
        cluster=extent.get("clusterCtaIdx.x", 1),
        dynamic_bytes=extent.get(DYNAMIC_SHARED, 0),
    )


def _tensor_map(call: ir.Call) -> TensorMap:
    attributes, (_, pointer, *values) = call.attrs, call.args
    if int(attributes.interleave) or int(attributes.oob_fill):
        raise UnknownLaunch("a tensor map is interleaved or fills with NaN; the emulator knows neither")
    numbers = [_number(value, "a tensor map's sizes") for value in values]
    rank = int(attributes.rank)
    sizes, strides, box, steps = (
        tuple(numbers[first:last])
        for first, last in ((0, rank), (rank, 2 * rank - 1), (2 * rank - 1, 3 * rank - 1), (3 * rank - 1, 4 * rank - 1))
    )
    if set(steps) != {1}:
        raise UnknownLaunch(f"a tensor map leaves elements out (steps {steps}); the emulator knows steps of 1")
    return TensorMap(_name(pointer), str(attributes.descriptor_dtype), sizes, strides, box, int(attributes.swizzle))


def _argument(value: ir.Expr, maps: dict[str, TensorMap]) -> str | TensorMap | int:
    if isinstance(value, tirx.IntImm):
        return int(value)
    name = _name(value)
    return maps.get(name, name)


def _name(value: ir.Expr) -> str:
    """The parameter that a pointer points at the beginning of, or the variable itself."""
    while isinstance(value, ir.Call):
        offset = value.args[1] if len(value.args) > 1 else 0
        if int(offset):
            raise UnknownLaunch(f"an argument points {offset} bytes into an array; the emulator knows whole arrays")
        value = value.args[0]
    return str(value.name)


def _number(value: ir.Expr, what: str) -> int:
    if not isinstance(value, tirx.IntImm):
        raise UnknownLaunch(f"{what} is known at run time only ({value}); the emulator runs fixed shapes")
    return int(value)


def map_words(described: TensorMap) -> list[int]:
    """The map as the runtime's structure has it behind the address: three numbers, then sizes, strides, boxes."""
    size, rank = dtype_bytes(described.dtype), len(described.sizes)
    padding = [1] * (5 - rank)
    strides = [size, *described.strides]
    return [size, rank, described.swizzle, *described.sizes, *padding, *strides, *padding, *described.box, *padding]
