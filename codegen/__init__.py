"""From a lowered module to a cubin: CUDA text (:mod:`.lowering`), and the compiler (:mod:`.toolchain`).

A folder of its own, because both may need it: the harness, which measures kernels, and a Python call on tensors
(:mod:`kernels.api`), which only runs them. It imports TVM and nothing of the other folders.
"""
