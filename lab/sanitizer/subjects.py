"""A kernel that is looked at: a program, its data, a folder to keep it in, and what the emulator says of it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tensorir_ladder.emulator import EmulatedProgram, KernelFault, LaunchPlan, PlainBuffer, TensorMap
from tensorir_ladder.harness.execution import NumpyArrays, numpy_dtype
from tensorir_ladder.schedules.workloads import Matmul

SEEDS = range(6)
WRONG = "wrong result"
PARAMETERS = {kind.__name__: kind for kind in (TensorMap, PlainBuffer)}


@dataclass(frozen=True)
class Finding:
    """A kernel's fault: its kind, as the emulator names it, and how it says so; both empty for none.

    ``always`` says whether every order of threads that was tried comes to a fault.
    """

    kind: str = ""
    text: str = ""
    always: bool = False


@dataclass(frozen=True)
class SanitizedKernel:
    """A kernel of a product ``program(a, b, c)``; ``whole`` where nothing is broken in it."""

    name: str
    program: EmulatedProgram
    problem: Matmul
    whole: bool = False

    def arrays(self, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Make both operands, small whole numbers of which every sum is exact, and an output of NaN."""
        problem, made = self.problem, NumpyArrays()
        a = made.integers(seed, (problem.m, problem.k), problem.dtype)
        b = made.integers(seed + 1000, problem.b_shape, problem.dtype)
        return a, b, made.poisoned((problem.m, problem.n), problem.out_dtype)

    def product(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Compute what the output must be; to be called before the run, which may spoil the operands."""
        return NumpyArrays().reference(self.problem, a, b).astype(numpy_dtype(self.problem.out_dtype))

    @property
    def described(self) -> str:
        """All but the CUDA text, as JSON."""
        program = self.program
        launches = [
            {**vars(launch), "parameters": [_described(given) for given in launch.parameters]}
            for launch in program.launches
        ]
        memory = [(shape, dtype.name) for shape, dtype in program.memory]
        fields = {"label": program.label, "names": program.names, "resident": program.resident}
        fields |= {
            "operands": program.operands,
            "name": self.name,
            "whole": self.whole,
            "problem": asdict(self.problem),
        }
        return json.dumps(fields | {"memory": memory, "launches": launches}, indent=1) + "\n"

    def save(self, folder: Path) -> None:
        """Write the CUDA text and what else the kernel is."""
        (folder / "kernel.cu").write_text(self.program.cuda, encoding="utf-8")
        (folder / "subject.json").write_text(self.described, encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> SanitizedKernel:
        """Read what :meth:`save` wrote; for what it did not, the errors of who is asked to make a kernel of it."""
        fields = _tuples(json.loads((folder / "subject.json").read_text(encoding="utf-8")))
        launches = tuple(
            LaunchPlan(**{**launch, "parameters": tuple(map(_parameter, launch["parameters"]))})
            for launch in fields["launches"]
        )
        memory = tuple((shape, numpy_dtype(dtype)) for shape, dtype in fields["memory"])
        cuda = (folder / "kernel.cu").read_text(encoding="utf-8")
        kept = {name: fields[name] for name in ("label", "names", "resident", "operands")}
        program = EmulatedProgram(cuda=cuda, launches=launches, memory=memory, **kept)
        return cls(fields["name"], program, Matmul(**fields["problem"]), fields["whole"])


def _described(given: TensorMap | PlainBuffer | int) -> dict[str, Any] | int:
    return given if isinstance(given, int) else {type(given).__name__: vars(given)}


def _parameter(described: dict[str, Any] | int) -> TensorMap | PlainBuffer | int:
    if isinstance(described, int):
        return described
    ((kind, fields),) = described.items()
    return PARAMETERS[kind](**fields)


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _tuples(each) for name, each in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def emulated_finding(subject: SanitizedKernel) -> Finding:
    """Find the first fault, or the first wrong output, of some seeds."""
    found = [finding for seed in SEEDS if (finding := _of_seed(subject, seed))]
    return replace(found[0], always=len(found) == len(SEEDS)) if found else Finding()


def _of_seed(subject: SanitizedKernel, seed: int) -> Finding | None:
    arrays = subject.arrays(seed)
    product = subject.product(*arrays[:2])
    try:
        subject.program(*arrays, seed=seed)
    except KernelFault as fault:
        return Finding(fault.kind, str(fault))
    if wrong := int(np.sum(arrays[-1] != product)):
        return Finding(WRONG, f"{wrong} of {arrays[-1].size} elements (seed {seed} repeats it)")
    return None
