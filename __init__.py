"""The TensorIR ladder: a matrix product from a naive loop nest to past cuBLAS, one idea per step.

``schedules`` are the reusable schedule functions, ``kernels`` what schedules cannot express, ``steps`` the ladder made
of both; ``torch_ops`` multiplies torch tensors, ``emulator`` runs generated CUDA on the CPU, ``harness`` verifies and
measures, ``reports`` reads its records.
"""

from importlib.metadata import version

__version__ = version("tensorir-ladder")
