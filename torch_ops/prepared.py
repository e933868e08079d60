"""Prepare the product of tensors of some sizes, strides and dtypes: checked, chosen, built and loaded once for all."""

from __future__ import annotations

import functools
import numbers
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tvm.target import Target

from tensorir_ladder.gpus import cost_rates
from tensorir_ladder.kernels.codegen.launch_plan import MatrixRows
from tensorir_ladder.kernels.codegen.toolchain import require_compiler
from tensorir_ladder.kernels.epilogue import can_store_by_tma
from tensorir_ladder.kernels.fused_epilogue import Epilogue
from tensorir_ladder.kernels.tiles import ROLE_CHOICES
from tensorir_ladder.schedules.cost import Machine
from tensorir_ladder.schedules.isa import WGMMA_ARCH
from tensorir_ladder.schedules.loops.vectorization import dtype_bytes
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.torch_ops.batches import Batches
from tensorir_ladder.torch_ops.choice import AnyChoice, choose, of_any_rows
from tensorir_ladder.torch_ops.copies import Copying
from tensorir_ladder.torch_ops.driver import cuda_driver
from tensorir_ladder.torch_ops.errors import FirstCallInCapture, NoTorch, UnsupportedGpu, WrongDevice, WrongDtype
from tensorir_ladder.torch_ops.few_rows import Streamed
from tensorir_ladder.torch_ops.gathered import Gathered
from tensorir_ladder.torch_ops.kept import Chosen, build_kernel
from tensorir_ladder.torch_ops.launcher import LoadedKernel, load_kernel
from tensorir_ladder.torch_ops.operands import Form, Operands, check_bias, is_dense
from tensorir_ladder.torch_ops.problem import Conditions, Setting, UnpaddedOperands
from tensorir_ladder.torch_ops.product import CallProduct
from tensorir_ladder.torch_ops.scheduled import is_scheduled, schedule_for
from tensorir_ladder.torch_ops.shifted import Shifting, shifts_rows
from tensorir_ladder.torch_ops.short_reductions import Unaligned, more_microseconds, reads_as_they_lie

if TYPE_CHECKING:
    import torch

Key = tuple[Any, ...]  # a tensor's sizes, strides, dtype and GPU

CACHED_PRODUCTS = 4096  # forms of operands whose checks are kept; their kernels are kept for good
OLDEST, HOPPER = (8, 0), (9, 0)
# Numbers of CUdevice_attribute: compute capability, multiprocessors, clocks of these and of memory, width of the bus,
# and the limits of a target by their names.
CAPABILITY, MULTIPROCESSORS, CLOCKS = (75, 76), 16, (13, 36, 37)
LIMITS = {
    "max_threads_per_block": 1,
    "thread_warp_size": 10,
    "registers_per_block": 12,
    "max_shared_memory_per_block": 97,
}


def multiply(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str | None,
    alpha: float,
    out_dtype: torch.dtype | None,
    any_m: bool,
) -> torch.Tensor:
    """Do the work of :func:`matmul` and nothing else: what torch's operator runs, which recorded and traced before."""
    return prepared_for(a, b, out, bias, activation, alpha, out_dtype, any_m)(a, b, out, bias)


def prepared_for(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str | None,
    alpha: float,
    out_dtype: torch.dtype | None,
    any_m: bool,
) -> CallProduct | Gathered:
    """Return the product of such tensors, prepared: what :func:`prepared` makes of their forms."""
    left, right, result, added = (
        None if each is None else (each.shape, each.stride(), each.dtype, each.get_device())
        for each in (a, b, out, bias)
    )
    return prepared(left, right, result, out_dtype, added, activation, alpha, any_m)


@functools.lru_cache(CACHED_PRODUCTS)
def prepared(
    a: Key,
    b: Key,
    out: Key | None,
    out_dtype: torch.dtype | None,
    bias: Key | None,
    activation: str | None,
    alpha: float,
    any_m: bool,
) -> CallProduct | Gathered:
    """Make the product of tensors of such forms, ready to run: all but their addresses is checked here.

    Each call checks these, and that the GPU is the current one.
    """
    given = {name: key for name, key in (("a", a), ("b", b), ("out", out), ("bias", bias)) if key}
    device = _device_of(given)
    dtype = out_dtype or (out or a)[2]
    if out and out[2] != dtype:
        raise WrongDtype("out has another dtype than out_dtype", value=out[2], limit=dtype, remedy="give one of both")
    forms = {name: Form(name, tuple(key[0]), tuple(key[1]), _name(key[2])) for name, key in given.items()}
    check_factor(alpha)
    machine = gpu_machine(device)
    scheduled = is_scheduled(forms["a"].dtype, machine)
    batches = Batches.of(forms["a"], forms["b"], forms.get("out"), _name(dtype), dense=scheduled)
    if copies := batches.copies:
        keys = {name: (copy.sizes, copy.strides, *given[name][2:]) for name, (_, copy) in copies.items()}
        lain = [keys.get("a", a), keys.get("b", b), None if "out" in keys else out]
        return Gathered(prepared(*lain, dtype, bias, activation, alpha, any_m), copies)
    operands, result = batches.arranged()
    if scheduled:
        operands = replace(operands, problem=operands.exact)
    if bias:
        check_bias(forms["bias"], operands)
    finish = Epilogue(float(alpha), forms["bias"].dtype if bias else "", activation or "")
    choice, problem, setting = choose_for(operands, finish, any_m, machine, result)
    kernel = _loaded(choice, problem, setting, device)
    free = choice.at_any_element(problem) if isinstance(choice, Unaligned | Shifting) else ""
    copying = functools.partial(_loaded, Copying(), None, Setting(machine), device)
    return CallProduct(kernel, operands, result, dtype, copying, free)


def choose_for(
    operands: Operands, finish: Epilogue, any_m: bool, machine: Machine, out: MatrixRows | None = None
) -> tuple[AnyChoice, Matmul, Setting]:
    """Choose a kernel for operands, and say for which product and in which setting it is made.

    ``out``: how its output lies; contiguous where that is not said.
    """
    if is_scheduled(operands.problem.dtype, machine):
        return schedule_for(operands, finish, any_m, machine)
    problem, batch, broadcast = operands.problem, operands.batch, operands.broadcast
    unpadded, result = None, out or operands.contiguous
    if not any_m and (reads_as_they_lie(operands, result) or shifts_rows(operands, result)):
        unpadded = UnpaddedOperands(operands.exact, more_microseconds(operands), operands.unreadable)
    # What is refused of many rows is refused of few: results that do not leave by TMA.
    dense = operands.are_dense(out) and (not any_m or can_store_by_tma(problem, ROLE_CHOICES[0].tile))
    narrows = operands.narrows(out) and not any_m
    gaps = out is not None and not is_dense(out, dtype_bytes(problem.out_dtype))
    choice = choose(problem, machine, Conditions(batch, any_m, dense, gaps, operands.steps, unpadded))
    if isinstance(choice, Unaligned | Shifting):
        return choice, operands.exact, Setting(machine, finish=finish, batch=batch, broadcast=broadcast)
    if isinstance(choice, Streamed):
        return choice, problem, Setting(machine, finish=finish)
    columns = operands.columns if narrows else 0
    setting = Setting(machine, operands.straddles, finish, batch, any_m, columns, broadcast)
    return choice, of_any_rows(problem, choice.tile) if any_m else problem, setting


@functools.cache
def _loaded(choice: Chosen, problem: Matmul | None, setting: Setting, device: int) -> LoadedKernel:
    """Load a choice's kernel for a problem, or one for all."""
    if import_torch().cuda.is_current_stream_capturing():
        first = "copy of rows"
        if problem is not None:
            first = f"product {problem.shape} of {problem.dtype} (layout {problem.layout})"
        raise FirstCallInCapture(
            f"the first {first} loads a kernel, which cannot be captured in a CUDA graph; call it once before"
        )
    compiled = build_kernel(choice, problem, setting, require_compiler())
    arch = setting.machine.target.attrs["arch"]
    label = str(choice) if arch == WGMMA_ARCH else f"{choice}, not measured on {arch}"
    return load_kernel(compiled, cuda_driver(), device, label)


@functools.cache
def gpu_machine(device: int) -> Machine:
    """Ask the driver for a GPU's limits, multiprocessors and name; UnsupportedGpu for any older than an sm_80.

    Rates are those of its own file, or else estimated of its architecture and of what the driver knows of its memory.
    """
    driver = cuda_driver()
    ask = functools.partial(driver.attribute, device)
    major, minor = map(ask, CAPABILITY)
    if (major, minor) < OLDEST:
        raise UnsupportedGpu(
            "the kernels are made of instructions that this GPU lacks: cp.async, mma.sync, or Hopper's",
            value=f"sm_{major}{minor}",
            limit="sm_80 or newer",
            remedy="call torch.matmul",
        )
    arch = WGMMA_ARCH if (major, minor) == HOPPER else f"sm_{major}{minor}"
    clock_khz, memory_khz, bus_bits = map(ask, CLOCKS)
    memory_bytes_per_cycle = 2 * memory_khz * bus_bits / 8 / clock_khz  # two transfers a cycle
    target = Target({"kind": "cuda", "arch": arch, **{name: ask(number) for name, number in LIMITS.items()}})
    name = driver.name(device)
    return Machine(target, ask(MULTIPROCESSORS), cost_rates(name, arch, memory_bytes_per_cycle), name=name)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def import_torch() -> ModuleType:
    """Import torch; raises NoTorch."""
    try:
        import torch
    except ImportError as error:
        what = "the product is one of torch's tensors, and torch is not installed"
        raise NoTorch(f"{what}; .venv/bin/python -m pip install -e '.[gpu]'") from error
    return torch


def check_tensors(**given: object) -> None:
    """Raise TypeError for the first argument that is no tensor; one that is None was not given."""
    torch = import_torch()
    for name, tensor in given.items():
        if not isinstance(tensor, torch.Tensor) and (tensor is not None or name in ("a", "b")):
            raise TypeError(f"{name} is a {type(tensor).__name__}; give a torch tensor")


def check_factor(alpha: object) -> None:
    """Raise TypeError for what is no number."""
    if not isinstance(alpha, numbers.Real):
        raise TypeError(f"alpha is a {type(alpha).__name__}; give a number, which is written into the kernel")


def _device_of(given: dict[str, Key]) -> int:
    """Return the current GPU's number, on which all tensors are; raises WrongDevice, UnsupportedGpu."""
    torch = import_torch()
    for name, (_, _, _, device) in given.items():
        if device < 0:
            if not torch.cuda.is_available():
                raise UnsupportedGpu("there is no GPU that torch sees", remedy="run where there is an sm_80 or newer")
            raise WrongDevice(f"{name} is not on a GPU", value="cpu", limit="cuda", remedy="call .cuda() on it")
        if device != (current := torch._C._cuda_getDevice()):
            raise WrongDevice.of_another_gpu(name, device, current)
    return device
