"""The TensorIR ladder: a matrix product from a naive loop nest to past cuBLAS, one idea per step.

``schedules`` are the reusable schedule functions, ``kernels`` what schedules cannot express, ``steps`` the ladder made
of both; ``torch_ops`` multiplies torch tensors, ``emulator`` runs generated CUDA on the CPU, ``harness`` verifies and
measures, ``reports`` reads its records. For TVM's users: ``rules(target)`` and ``explain(mod, target)``; these two, and
nothing else here, load TVM.
"""

from importlib.metadata import version

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__version__ = version("tensorir-ladder")
