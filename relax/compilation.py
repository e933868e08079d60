"""Compile PyTorch modules by the pipeline: a call on torch's tensors, in torch's current stream, without copies.

::

    fast = tensorir_ladder.compile(model.eval(), (x,))         # on the GPU where x is
    y = fast(x)

The module is exported, imported (:func:`.importing.from_torch`) and scheduled; what depends on weights alone is
computed once, here; CUDA text is compiled by nvcc on all cores, and kept on disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
import tvm_ffi
from tvm import relax
from tvm.ir.transform import PassContext
from tvm.target import Target

from tensorir_ladder.kernels.codegen.lowering import compile_side_by_side
from tensorir_ladder.kernels.codegen.toolchain import require_compiler
from tensorir_ladder.relax.importing import from_torch
from tensorir_ladder.relax.pipelines import pipeline
from tensorir_ladder.relax.rules.tensor_intrinsics import import_quickly

ENTRY = "main"
PREPARE = "main_transform_params"  # what TVM's LiftTransformParams names the function of weights
ACCELERATED = (9, 10)  # compute capabilities with instructions of their own: sm_90a, sm_100a
ALIGNMENT = 64
CUDA_GRAPHS = {"relax.backend.use_cuda_graph": True}


def compile(
    module: Any, args: Sequence[Any], dynamic_shapes: Any = None, *, cuda_graphs: bool = True
) -> CompiledModule:
    """Compile a PyTorch module for the GPU that its inputs are on.

    ::

        before   y = model(x)                                        # torch's kernels, one for each operator
        after    y = tensorir_ladder.compile(model, (x,))(x)         # ours, fused

    Parameters
    ----------
    module : a ``torch.nn.Module`` in evaluation mode, on the GPU.
    args : example inputs on the GPU, a tuple of tensors.
    dynamic_shapes : extents that differ from call to call, as ``torch.export.export`` takes them.
    cuda_graphs : use a CUDA graph, one for each set of shapes, for all kernels but those that read an input of the call
        or write an output.

    The weights are copied: what becomes of the module's later changes nothing. A call takes tensors like ``args`` and
    returns a tensor where the module does, otherwise a tuple of the tensors that it returns. Inputs that lie with gaps,
    or at addresses that are no multiple of 64 bytes, are copied.

    Raises
    ------
    TypeError, ValueError : what :func:`from_torch` raises, and for inputs that are not all on one GPU.
    NoCompiler : without nvcc.
    IllegalSchedule : for a GPU older than sm_80, or a function that no rule makes a kernel of.
    And what ``torch.export`` and TVM's importer raise for a module that they do not take.
    """
    if not isinstance(args, (tuple, list)):
        raise TypeError(f"args is a {type(args).__name__}, not a tuple of inputs; write (x,) for a single one")
    devices = {str(getattr(each, "device", type(each).__name__)) for each in args}
    if len(devices) != 1 or not min(devices).startswith("cuda"):
        said = ", ".join(sorted(devices)) or "no device"
        raise ValueError(f"inputs are on {said}, not all on one GPU; call .cuda() on module and inputs")
    mod, weights = from_torch(module, args, dynamic_shapes)
    import torch

    index = args[0].device.index
    executable = build(mod, target_of(*torch.cuda.get_device_capability(index)), cuda_graphs=cuda_graphs)
    return CompiledModule(executable, weights, index)


def target_of(major: int, minor: int) -> Target:
    """Return TVM's target for a compute capability, with its own instructions where it has such."""
    return Target({"kind": "cuda", "arch": f"sm_{major}{minor}" + "a" * (major in ACCELERATED)})


def build(mod: tvm.IRModule, target: Target, *, cuda_graphs: bool = False) -> relax.VMExecutable:
    """Compile a Relax module by the pipeline, what depends on ``main``'s weights alone as a separate function.

    Weights are the parameters of ``main`` behind its first ``num_input``, an attribute that importers set.

    Raises
    ------
    NoCompiler : without nvcc.
    """
    return link(pipeline(target, prepare=True)(mod), target, cuda_graphs=cuda_graphs)


def link(scheduled: tvm.IRModule, target: Target, *, cuda_graphs: bool = False) -> relax.VMExecutable:
    """Compile what the pipeline has scheduled: CUDA texts side by side, on all cores, and kept in the build cache.

    Raises
    ------
    NoCompiler : without nvcc.
    """
    compiler, arch = require_compiler(), str(target.attrs["arch"])
    with PassContext(config=CUDA_GRAPHS if cuda_graphs else {}), import_quickly():
        return compile_side_by_side(lambda: tvm.compile(scheduled, target), arch, compiler)


class CompiledModule:
    """A module as it runs on a GPU: ``compiled(*inputs)`` launches its kernels and returns its outputs.

    Buffers between kernels are the same in each call: calls of one module belong into one stream at a time.
    """

    def __init__(self, executable: relax.VMExecutable, weights: Sequence[Any], gpu: int) -> None:
        device = tvm.cuda(gpu)
        self.gpu, self.machine = gpu, relax.VirtualMachine(executable, device)
        self._main = self.machine[ENTRY]
        import torch

        with torch.cuda.device(gpu), tvm_ffi.use_torch_stream():
            on_gpu = [tvm.runtime.tensor(each, device) for each in weights]
            prepares = PREPARE in executable.stats()
            self.weights = [*self.machine[PREPARE](on_gpu)] if prepares else on_gpu
        torch.cuda.synchronize(gpu)  # calls may come in any stream

    def __call__(self, *inputs: Any) -> Any:
        """Run in torch's current stream.

        Raises
        ------
        ValueError : for an input that is not on the GPU that this was compiled for.
        And what TVM raises for shapes or dtypes other than the module was compiled for.
        """
        import torch

        for number, each in enumerate(inputs):
            if each.device.type != "cuda" or each.device.index != self.gpu:
                raise ValueError(
                    f"input {number} is on {each.device}, not on cuda:{self.gpu}; call .to('cuda:{self.gpu}')"
                )
        given = [tvm.runtime.from_dlpack(_lying_well(each.detach())) for each in inputs]
        with torch.cuda.device(self.gpu), tvm_ffi.use_torch_stream():
            made = self._main(*given, *self.weights)
        return _as_torch(made, torch)


def _lying_well(tensor: Any) -> Any:
    """Return a tensor that TVM takes, without gaps and at an address of whole ALIGNMENT bytes: itself, or a copy."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()


def _as_torch(made: Any, torch: Any) -> Any:
    return torch.from_dlpack(made) if hasattr(made, "__dlpack__") else tuple(_as_torch(each, torch) for each in made)
