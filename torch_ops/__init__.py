"""Multiply torch tensors by the explicit kernels: ``from tensorir_ladder.torch_ops import matmul, describe``.

A call goes through these files, one after the other. Those in brackets take part only when tensors of some sizes,
strides and dtypes come for the first time:

- :mod:`.call`: :func:`matmul` and :func:`describe`; looks up the product that :mod:`.prepared` keeps for such forms.
- (:mod:`.operands`: checks how tensors lie in memory, and finds what must be copied so that TMA can read it.)
- (:mod:`.choice`: chooses a kernel, by what was measured for the shape or by the estimates of :mod:`.menu`, whose
  kernels :mod:`.step_kernels` names; :mod:`.short_reductions` and :mod:`.shifted` have two that are not of the menu.)
- :mod:`.product`: copies what must be copied, and launches on the tensors' addresses, in torch's current stream.
- :mod:`.launcher`: (compiles and loads a kernel;) keeps its launches by addresses, for :mod:`.driver`, the CUDA driver.

Where gradients are recorded or torch traces, :mod:`.custom_op` comes before: torch's operator, derivative and shapes.

What they refuse is said in :mod:`.errors`; what was measured of each GPU is in :mod:`gpus`.
Torch and a GPU are needed by calls alone; ``__init__.pyi`` lists the names, each of which is loaded when it is first
used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
