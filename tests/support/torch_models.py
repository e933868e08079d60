"""PyTorch models by the pipeline: from torch to Relax, and how they run."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.ir.transform import PassContext
from tvm.target import Target

torch = pytest.importorskip("torch")
nn = torch.nn

from tensorir_ladder.harness.execution import gpu_machine  # noqa: E402 - torch's tests
from tensorir_ladder.harness.machines import GpuSpec  # noqa: E402 - torch's tests
from tensorir_ladder.harness.whole_models.building import LADDER, Watch  # noqa: E402 - torch's tests
from tensorir_ladder.harness.whole_models.execution import Emulated, on_the_cpu  # noqa: E402 - torch's tests
from tensorir_ladder.harness.whole_models.torch_models import REDUCED, Made, make  # noqa: E402 - torch's tests
from tensorir_ladder.relax import from_torch  # noqa: E402 - torch's tests
from tensorir_ladder.relax.rules.rule import is_scheduled  # noqa: E402 - torch's tests

# From torch to Relax


def imported(made: Made, dynamic: bool) -> tuple[tvm.IRModule, list[np.ndarray]]:
    """Return a model's Relax module and its weights, which ``main`` takes behind its inputs."""
    shapes = tuple(made.dynamic.values()) if dynamic and made.dynamic else None
    mod, weights = from_torch(made.module, made.inputs, shapes)
    return mod, [each.numpy() for each in weights]


# Running it


@dataclass(frozen=True)
class Errors:
    """How far an output is off: root mean square by the reference's, and the largest by its largest."""

    relative: float
    largest: float

    @classmethod
    def of(cls, output: Any, reference: Any) -> Errors:
        output, reference = torch.as_tensor(output).double().cpu(), reference.double().cpu()
        assert output.shape == reference.shape
        off = output - reference
        return cls(float(off.norm() / reference.norm()), float(off.abs().max() / reference.abs().max()))

    def within(self, other: Errors, factor: float) -> bool:
        """Tell if these are at most so many times others; NaN is not."""
        return self.relative <= factor * other.relative and self.largest <= factor * other.largest


def in_float32(module: nn.Module, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Run a model of float16 weights in float32, without TF32."""
    exact = copy.deepcopy(module).float()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    with torch.no_grad():
        return exact(*[each.float() if each.is_floating_point() else each for each in inputs])


def scheduled(mod: tvm.IRModule, target: Target) -> tuple[tvm.IRModule, tvm.IRModule]:
    """Return a module before rules see its functions, and as the pipeline makes it."""
    watch = Watch()
    with PassContext(instruments=[watch.instrument()]):
        made = relax.get_pipeline(LADDER, target=target)(mod)
    return watch.fused, made


class InEmulator:
    """A module as the pipeline makes it, by TVM's virtual machine with each kernel in the emulator."""

    def __init__(self, mod: tvm.IRModule, machine: GpuSpec) -> None:
        self.fused, self.scheduled = scheduled(mod, machine.target())
        names = [name.name_hint for name, function in self.scheduled.functions_items() if is_scheduled(function)]
        self.kernels = Emulated(self.fused, self.scheduled, machine)
        self.running = on_the_cpu(self.fused, names, "main")

    def __call__(self, inputs: Sequence[torch.Tensor], weights: Sequence[np.ndarray]) -> np.ndarray:
        given = [tvm.runtime.tensor(np.ascontiguousarray(each)) for each in (*map(np.asarray, inputs), *weights)]
        return self.running.instead(self.kernels, *given).numpy()


class OnGpu:
    """A module as the pipeline makes it, compiled by TVM and run by its virtual machine on the GPU."""

    def __init__(self, mod: tvm.IRModule, weights: Sequence[np.ndarray]) -> None:
        target = gpu_machine().target()  # TVM's own has an H200 as sm_90, without TMA and wgmma
        executable = tvm.compile(relax.get_pipeline(LADDER, target=target)(mod), target)
        self.run = relax.VirtualMachine(executable, tvm.cuda())["main"]
        self.weights = [tvm.runtime.tensor(each, tvm.cuda()) for each in weights]

    def __call__(self, inputs: Sequence[torch.Tensor]) -> np.ndarray:
        given = [tvm.runtime.tensor(np.ascontiguousarray(each.numpy()), tvm.cuda()) for each in inputs]
        return self.run(*given, *self.weights).numpy()


def run_alone(name: str, dynamic: bool) -> None:
    """Run a model of reduced size on the GPU, torch on the CPU alone."""
    made = make(name, REDUCED)
    mod, weights = imported(made, dynamic)
    run = OnGpu(mod, weights)
    for inputs in [made.inputs, *([made.others] if dynamic else [])]:
        assert np.isfinite(run(inputs)).all()
