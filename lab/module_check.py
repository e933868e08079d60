"""Run a Relax module as a pipeline made it in the emulator, and compare it with TVM's own code on the CPU.

::

    made = relax.get_pipeline("tensorir_ladder", target=target)(before)
    check_module(before, made, target, [arrays])

All kernels of a call are one emulated program, so that a module costs one compilation. The reference is ``before`` by
LLVM, with every floating-point number in float64. Nothing in the module is named: any operators, any parameters.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import tvm
from tvm import ir, relax, tirx
from tvm.target import Target

from tensorir_ladder.emulator import EmulatedProgram
from tensorir_ladder.kernels.codegen.arithmetic import evaluate
from tensorir_ladder.kernels.codegen.host_code import read_host
from tensorir_ladder.kernels.codegen.launch_plan import LaunchPlan
from tensorir_ladder.kernels.codegen.lowering import Generated, generate
from tensorir_ladder.lab.function_check import (
    CPU,
    FAST_TANH,
    RESIDENT,
    WrongFunction,
    eps_of,
    is_float,
    numpy_of,
    poison,
    widened_text,
)
from tensorir_ladder.relax.rules.rule import is_scheduled
from tensorir_ladder.schedules.errors import IllegalSchedule

VIEW = "vm.builtin.reshape"
REFERENCE = re.compile(r'metadata\["ir\.GenericConst"\]\[(\d+)\]')
OWN_ERROR = 4.0  # by how much more than LLVM's code of the module's own dtypes the result may be off


class NoKernel(IllegalSchedule):
    """A function that a pipeline left without a kernel, or an operation of a module that launches none."""


def check_module(
    before: tvm.IRModule,
    after: tvm.IRModule,
    target: Target,
    calls: Sequence[Sequence[np.ndarray]],
    *,
    seed: int = 0,
    narrow: str = "float32",
) -> None:
    """Check that ``after`` computes what ``before`` does; raise WrongFunction, NoKernel, or the emulator's KernelFault.

    Both have one Relax function, ``main``; ``calls`` are arrays for its parameters. ``narrow`` is the dtype of fewest
    bits that floating-point numbers are rounded to. A number may be off by 2 eps of its dtype, of itself; by 16 eps of
    ``narrow``, of the output's root mean square; by as many of fast mathematics' ``tanh``, where there is one; and by
    four times what LLVM's code of the module as it is written is off at most. Other dtypes are compared exactly.
    """
    made = EmulatedModule(after, target)
    rounded = max(eps_of(narrow), FAST_TANH if "tanh" in made.made.cuda else 0.0)
    exact, own = _on_cpu(_widened(before)), _on_cpu(before)
    for arrays in calls:
        found = made(arrays, seed)
        expected = exact([array.astype(np.float64) if is_float(array.dtype) else array for array in arrays])
        for place, outputs in enumerate(zip(found, expected, own(arrays), strict=True)):
            _check(place, *outputs, rounded, seed)


def _on_cpu(mod: tvm.IRModule) -> Callable[[Sequence[np.ndarray]], list[np.ndarray]]:
    """Compile ``main`` by TVM's own pipeline for LLVM."""
    machine = relax.VirtualMachine(tvm.compile(mod, CPU), tvm.cpu())

    def run(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        found = machine["main"](*map(tvm.runtime.tensor, arrays))
        return [one.numpy() for one in ([found] if hasattr(found, "numpy") else found)]

    return run


class EmulatedModule:
    """A module whose functions are scheduled, as a function of arrays: ``main``, with all kernels in the emulator.

    Memory that a call makes is poisoned before: NaN, or whole numbers that ``seed`` draws.

    Raises
    ------
    NoKernel : for functions that are not scheduled; by a call, for a function that launches nothing, and for what is
        neither a call of a function nor a view.
    """

    def __init__(self, mod: tvm.IRModule, target: Target) -> None:
        self.main = mod["main"]
        self.functions = {name.name_hint: one for name, one in mod.functions_items() if isinstance(one, tirx.PrimFunc)}
        if unscheduled := [name for name, one in self.functions.items() if not is_scheduled(one)]:
            raise NoKernel("functions without a schedule", value=", ".join(unscheduled), remedy="schedule them")
        named = {name: one.with_attr("global_symbol", name) for name, one in self.functions.items()}
        self.made = generate(tvm.IRModule(named), target, "s_tir")

    def __call__(self, arrays: Sequence[np.ndarray], seed: int = 0) -> list[np.ndarray]:
        """Return the outputs."""
        call = _Call(self.functions, self.made, seed)
        for parameter, array in zip(self.main.params, arrays, strict=True):
            call.give(parameter, array)
        found = call.run(self.main.body)
        return [call.array(one) for one in (found if isinstance(found, tuple) else (found,))]


@dataclass(frozen=True)
class _Tensor:
    """Memory, by its name, in a shape."""

    memory: str
    shape: tuple[int, ...]


@dataclass
class _Call:
    """A call of a module: what its variables are, its memory, and what is launched."""

    functions: dict[str, tirx.PrimFunc]
    made: Generated
    seed: int
    values: dict[Any, Any] = field(default_factory=dict)
    sizes: dict[tirx.Var, int] = field(default_factory=dict)
    memory: dict[str, np.ndarray] = field(default_factory=dict)
    workspaces: dict[str, tuple[tuple[int, ...], np.dtype]] = field(default_factory=dict)
    operands: list[str] = field(default_factory=list)
    launches: list[LaunchPlan] = field(default_factory=list)

    def give(self, parameter: relax.Var, array: np.ndarray) -> None:
        """Set a parameter, and with it the symbolic extents of its shape."""
        name = f"operand{len(self.operands)}"
        self.operands.append(name)
        self.memory[name] = array
        self.values[parameter] = _Tensor(name, array.shape)
        for extent, size in zip(parameter.ty.shape, array.shape, strict=True):
            if isinstance(extent, tirx.Var):
                self.sizes[extent] = size

    def run(self, body: relax.SeqExpr) -> Any:
        """Do what a function's body does, and return its result: a tensor, or a tuple of them."""
        for binding in itertools.chain.from_iterable(block.bindings for block in body.blocks):
            self.values[binding.var] = self._value(binding.value)
        result = self._value(body.body)
        given = {name: array.copy() for name, array in self.memory.items()}
        names = (*given, *self.workspaces)
        program = EmulatedProgram(
            "main",
            self.made.cuda,
            tuple(self.launches),
            names,
            tuple(self.workspaces.values()),
            RESIDENT,
            tuple(self.operands),
        )
        program(*given.values(), seed=self.seed)
        self.memory = given
        return result

    def array(self, tensor: _Tensor) -> np.ndarray:
        """Return what a tensor holds."""
        return self.memory[tensor.memory].reshape(tensor.shape)

    def _value(self, expression: Any) -> Any:
        match expression:
            case relax.Tuple():
                return tuple(map(self._value, expression.fields))
            case relax.TupleGetItem():
                return self._value(expression.tuple_value)[expression.index]
            case relax.ShapeExpr():
                return tuple(map(self._number, expression.values))
            case ir.GenericConst():
                return self._constant(expression)
            case relax.Call() if expression.op == ir.Op.get("relax.call_tir"):
                return self._call(expression)
            case relax.Call() if expression.op == ir.Op.get("relax.call_pure_packed"):
                return self._view(expression)
            case relax.Var() if expression in self.values:
                return self.values[expression]
            case _ if isinstance(getattr(expression, "ty", None), ir.PrimType):
                return self._number(expression)
        raise NoKernel("a Relax expression that launches nothing", value=str(expression), remedy="legalize it")

    def _view(self, call: relax.Call) -> _Tensor:
        packed, tensor, shape = call.args
        if packed.global_symbol != VIEW:
            raise NoKernel("a packed function", value=packed.global_symbol, remedy="schedule a function instead")
        return _Tensor(self._value(tensor).memory, self._value(shape))

    def _constant(self, constant: ir.GenericConst) -> _Tensor:
        name, array = f"constant{len(self.memory)}", constant.value.numpy()
        self.memory[name] = array
        self.operands.append(name)
        return _Tensor(name, array.shape)

    def _call(self, call: relax.Call) -> Any:
        """Launch the kernels of a function, on memory of its own for its results."""
        name, function = call.args[0].name_hint, self.functions[call.args[0].name_hint]
        made = call.ty_args[0]
        types = list(made.fields) if hasattr(made, "fields") else [made]
        results = tuple(self._allocate(self._shape(one.shape), str(one.dtype)) for one in types)
        given = [*self._value(call.args[1]), *results]
        self._launch(name, dict(zip(function.params, given, strict=True)))
        return results if hasattr(made, "fields") else results[0]

    def _launch(self, name: str, given: dict[tirx.Var, Any]) -> None:
        sizes: dict[str, float] = {}
        renamed: dict[str, str] = {}
        for parameter, value in given.items():
            if not isinstance(value, _Tensor):
                sizes[str(parameter.name)] = value
                continue
            renamed[str(parameter.name)] = value.memory
            symbols = ((e, size) for e, size in zip(parameter.shape, value.shape) if isinstance(e, tirx.Var))
            sizes.update({str(extent.name): size for extent, size in symbols})
        run = read_host(tvm.IRModule({name: self.made.host[name]}), sizes)
        if not run.launches and all(math.prod(value.shape) for value in given.values() if isinstance(value, _Tensor)):
            raise NoKernel("a function that launches no kernel", value=name, remedy="schedule it")
        for buffer in run.kept:
            dtype = numpy_of(buffer.dtype)
            if is_float(dtype):  # whole numbers that kernels keep are flags to the emulator; these are not
                renamed[buffer.buffer] = f"workspace{len(self.workspaces)}"
                self.workspaces[renamed[buffer.buffer]] = (buffer.shape, dtype)
            else:
                renamed[buffer.buffer] = self._allocate(buffer.shape, buffer.dtype).memory
        self.launches += [_renamed(launch, renamed) for launch in run.launches]

    def _allocate(self, shape: tuple[int, ...], dtype: str) -> _Tensor:
        name = f"result{len(self.memory)}"
        self.memory[name] = poison(shape, numpy_of(dtype), self.seed)
        return _Tensor(name, shape)

    def _shape(self, shape: Any) -> tuple[int, ...]:
        return tuple(map(self._number, shape))

    def _number(self, expression: Any) -> int:
        found = evaluate(expression, self.sizes)
        if found is None:
            raise NoKernel("an extent that the arguments' shapes do not say", value=str(expression), remedy="give it")
        return int(found)


def _renamed(launch: LaunchPlan, names: dict[str, str]) -> LaunchPlan:
    parameters = (replace(p, buffer=names[p.buffer]) if hasattr(p, "buffer") else p for p in launch.parameters)
    return replace(launch, parameters=tuple(parameters))


def _check(place: int, got: np.ndarray, exact: np.ndarray, own: np.ndarray, rounded: float, seed: int) -> None:
    found, right = got.astype(np.float64), exact.astype(np.float64)
    if found.shape != right.shape:
        raise WrongFunction(f"output {place} is of shape {found.shape}, must be {right.shape}")
    error, limit = _error(found, right), np.zeros(right.shape)
    if is_float(got.dtype):
        finite = np.where(np.isfinite(right), right, 0.0)
        mean = math.sqrt(float(np.mean(np.square(finite)))) if right.size else 0.0
        off = _error(own.astype(np.float64), right)
        worst = float(np.max(off, where=np.isfinite(off), initial=0.0))
        limit = 2 * eps_of(got.dtype.name) * np.abs(finite) + 16 * rounded * mean + OWN_ERROR * worst
    wrong = ~(error <= limit)
    if wrong.any():
        places = [tuple(map(int, one)) for one in _places(wrong, error)]
        told = "; ".join(f"{one} is {got[one]}, must be {exact[one]}" for one in places)
        raise WrongFunction(
            f"{int(wrong.sum())} of {got.size} elements of output {place} are wrong (seed {seed}): {told}"
        )


def _places(wrong: np.ndarray, error: np.ndarray) -> Iterator[Any]:
    """Yield the first place that is wrong, and the worst."""
    yield np.argwhere(wrong)[0]
    yield np.unravel_index(int(np.argmax(np.where(wrong, np.nan_to_num(error, nan=np.inf), -1.0))), error.shape)


def _error(found: np.ndarray, right: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        same = (found == right) | (np.isnan(found) & np.isnan(right))
        return np.where(same, 0.0, np.abs(found - right))


def _widened(mod: tvm.IRModule) -> tvm.IRModule:
    """Return a module, legalized, with all floating-point numbers in float64, of which some operators are not."""
    with CPU:
        mod = relax.transform.LegalizeOps()(mod)
    constants: list[ir.GenericConst] = []

    def collect(node: Any) -> None:
        if isinstance(node, ir.GenericConst) and str(node.ty.dtype) == "bfloat16":
            constants.append(node)

    relax.analysis.post_order_visit(mod["main"], collect)
    # TVMScript writes out numbers of the dtypes that numpy has, and refers to others.
    numbers = [f'R.const({float(constant.value.numpy())!r}, "float64")' for constant in constants]
    text = REFERENCE.sub(lambda found: numbers[int(found[1])], mod.script())
    return tvm.script.from_source(widened_text(text))
