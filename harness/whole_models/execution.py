"""Built models at work: on the GPU, through LLVM on the CPU, or there with each kernel in the emulator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm import relax

from tensorir_ladder.harness.whole_models.definitions import ENTRY

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

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of what it was given."""
        return tuple(tuple(argument.shape) for argument in self.arguments)


class Running:
    """A built model on a device, as TVM's virtual machine runs it: ``running(x, *weights)`` returns the output."""

    def __init__(self, executable: Any, functions: Sequence[str], device: Any) -> None:
        self.machine, self.functions = relax.VirtualMachine(executable, device), frozenset(functions)
        self.run = self.machine[ENTRY]

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

        def replace(_function: Any, name: str, before: bool, _made: Any, *arguments: Any) -> int:
            if not before or name not in self.functions:
                return 0
            stand_in(name, arguments)
            return SKIP

        return self._watched(replace, x, *weights)

    def _watched(self, instrument: Callable[..., int], x: Any, *weights: Any) -> Any:
        self.machine.set_instrument(instrument)
        try:
            return self.run(x, *weights)
        finally:
            self.machine.set_instrument(_nothing)


def _nothing(*_arguments: Any) -> int:
    return 0


def on_the_cpu(mod: tvm.IRModule) -> Running:
    """Build a module of operators, or of functions without a schedule, by LLVM."""
    names = [name.name_hint for name in mod.get_global_vars()]
    seen: list[str] = []

    @tvm.transform.module_pass(opt_level=0, name="WholeModel")
    def pipeline(module: tvm.IRModule, _context: Any) -> tvm.IRModule:
        made = relax.get_pipeline("default")(module)
        seen.extend(name.name_hint for name in made.get_global_vars() if name.name_hint != ENTRY)
        return made

    executable = tvm.compile(mod, "llvm", relax_pipeline=pipeline)
    return Running(executable, [*names, *seen], tvm.cpu())


def arrays(x: np.ndarray, weights: Mapping[str, np.ndarray]) -> list[Any]:
    """Make TVM's tensors of a model's input and parameters."""
    return [tvm.runtime.tensor(np.ascontiguousarray(each)) for each in (x, *weights.values())]
