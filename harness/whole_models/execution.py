"""Built models at work: on the GPU, through LLVM on the CPU, or there with each kernel in the emulator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.target import Target

from tensorir_ladder.emulator import EmulatedProgram
from tensorir_ladder.harness.execution import numpy_dtype
from tensorir_ladder.harness.machines import GpuSpec
from tensorir_ladder.harness.whole_models.definitions import ENTRY
from tensorir_ladder.kernels.codegen.host_code import read_host
from tensorir_ladder.kernels.codegen.lowering import Generated, generate
from tensorir_ladder.relax.rules.rule import OPAQUE

SKIP = 1  # what an instrument of TVM's virtual machine returns to have a call left out


@dataclass(frozen=True)
class Call:
    """One call of a function by a model: its name, and the function with what it was given."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]

    def __call__(self) -> None:
        """Call it again."""
        self.function(*self.arguments)

    def of(self, xp: Any) -> Call:
        """Give it arrays of ``xp`` in the same memory: by torch's, TVM knows the stream."""
        given = (xp.from_dlpack(each) if hasattr(each, "__dlpack__") else each for each in self.arguments)
        return Call(self.name, self.function, tuple(given))

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of what it was given; of a number, none."""
        return tuple(tuple(getattr(argument, "shape", ())) for argument in self.arguments)


class Running:
    """A built model on a device, as TVM's virtual machine runs it: ``running(x, *weights)`` returns the output."""

    def __init__(self, executable: Any, functions: Sequence[str], device: Any, entry: str = ENTRY) -> None:
        self.machine, self.functions = relax.VirtualMachine(executable, device), frozenset(functions)
        self.run = self.machine[entry]

    def __call__(self, x: Any, *weights: Any) -> Any:
        return self.run(x, *weights)

    def calls(self, x: Any, *weights: Any) -> list[Call]:
        """Run once, and list the calls of the model's functions in their order, with what they were given."""
        found: list[Call] = []

        def note(function: Any, name: str, before: bool, _made: Any, *arguments: Any) -> int:
            if before and name in self.functions:
                found.append(Call(name, function, arguments))
            return 0

        self._watched(note, x, *weights)
        return found

    def instead(self, stand_in: Callable[[str, Sequence[Any]], None], x: Any, *weights: Any) -> Any:
        """Run with ``stand_in(name, arguments)`` in the place of each function; return the output."""

        failures: list[Exception] = []  # which would lose their types on the way through TVM

        def stand(_function: Any, name: str, before: bool, _made: Any, *arguments: Any) -> int:
            if not before or name not in self.functions:
                return 0
            try:
                if not failures:
                    stand_in(name, arguments)
            except Exception as error:  # noqa: BLE001 - raised again below
                failures.append(error)
            return SKIP

        output = self._watched(stand, x, *weights)
        if failures:
            raise failures[0]
        return output

    def _watched(self, instrument: Callable[..., int], x: Any, *weights: Any) -> Any:
        self.machine.set_instrument(instrument)
        try:
            return self.run(x, *weights)
        finally:
            self.machine.set_instrument(_nothing)


def _nothing(*_arguments: Any) -> int:
    return 0


def on_the_cpu(mod: tvm.IRModule, functions: Sequence[str], entry: str = ENTRY) -> Running:
    """Build a module of operators, or of fused functions, by LLVM; ``functions`` do nothing, and wait for a stand-in.

    Some of these could not be built: TVM's operators for a GPU bind threads.
    """
    mod = mod.clone()
    for name in functions:
        empty = mod[name].with_body(tirx.Evaluate(tirx.const(0, "int32")))
        mod[name] = empty.with_attr("op_pattern", OPAQUE)
    return Running(tvm.compile(mod, Target("llvm")), functions, tvm.cpu(), entry)


def arrays(x: np.ndarray, weights: Mapping[str, np.ndarray]) -> list[Any]:
    """Make TVM's tensors of a model's input and parameters."""
    return [tvm.runtime.tensor(np.ascontiguousarray(each)) for each in (x, *weights.values())]


class Emulated:
    """The kernels of a scheduled module in the emulator: ``emulated(name, arguments)`` runs one function's.

    ``fused`` is the module before rules see it. Arguments are TVM's tensors; outputs are poisoned before the run.
    Raises KernelFault; UnsupportedLaunch
    for a function whose host code cannot be read.
    """

    def __init__(self, fused: tvm.IRModule, scheduled: tvm.IRModule, machine: GpuSpec, seed: int = 0) -> None:
        self.fused, self.scheduled, self.machine, self.seed = fused, scheduled, machine, seed
        self.launched = 0
        self._generated: dict[str, tuple[tirx.PrimFunc, Generated]] = {}

    def __call__(self, name: str, arguments: Sequence[Any]) -> None:
        function, made = self._lowered(name)
        given = dict(zip((str(parameter.name) for parameter in function.params), arguments))
        arrays = {each: value.numpy() for each, value in given.items() if hasattr(value, "numpy")}
        sizes = {each: value for each, value in given.items() if each not in arrays}
        outputs = [each for each in self._outputs(name, list(given)) if each in arrays]
        for each in outputs:
            arrays[each] = _poisoned(arrays[each])
        run = read_host(made.host, {**sizes, **_extents(function, given)})
        kept = tuple((buffer.shape, numpy_dtype(buffer.dtype)) for buffer in run.kept)
        operands = tuple(each for each in arrays if each not in outputs)
        names = (*arrays, *(buffer.buffer for buffer in run.kept))
        resident = self.machine.multiprocessors
        program = EmulatedProgram(name, made.cuda, run.launches, names, kept, resident, operands)
        program(*arrays.values(), seed=self.seed + self.launched)
        self.launched += len(run.launches)
        for each in outputs:
            given[each].copyfrom(arrays[each])

    def _lowered(self, name: str) -> tuple[tirx.PrimFunc, Generated]:
        if name not in self._generated:
            function = _distinct(self.scheduled[name])
            module = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
            self._generated[name] = function, generate(module, self.machine.target(), "s_tir")
        return self._generated[name]

    def _outputs(self, name: str, names: Sequence[str]) -> list[str]:
        """List the parameters that a function writes to: the last, where it is a kernel's launch."""
        function, written = self.fused[name], []
        tvm_ffi.structural_walk(function.body, (tirx.BufferStore, lambda store: written.append(store.buffer)))
        found = [
            own
            for own, parameter in zip(names, function.params)
            if any(parameter.same_as(buffer) for buffer in written)
        ]
        return found or [names[-1]]


def _poisoned(array: np.ndarray) -> np.ndarray:
    """Make an array like one, of NaN or, of whole numbers, of all bits: what a kernel leaves out shows."""
    return np.frombuffer(b"\xff" * array.nbytes, array.dtype).reshape(array.shape).copy()


def _distinct(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Give each buffer a name of its own; what shapes are made of keeps its name."""
    renamed = {
        each: tirx.Var(f"{each.name}_{place}", each.ty) if hasattr(each.ty, "shape") else each
        for place, each in enumerate(function.params)
    }
    body = tvm_ffi.structural_map(function.body, (tirx.Var, lambda var: renamed.get(var, var)))
    return tirx.PrimFunc(list(renamed.values()), body, function.ret_type, attrs=function.attrs)


def _extents(function: tirx.PrimFunc, given: Mapping[str, Any]) -> dict[str, int]:
    return {
        extent.name: size
        for parameter, value in zip(function.params, given.values())
        if hasattr(value, "shape")
        for extent, size in zip(parameter.shape, value.shape)
        if isinstance(extent, tirx.Var)
    }
