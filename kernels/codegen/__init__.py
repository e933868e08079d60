"""From a lowered module to a cubin: CUDA text (:mod:`.lowering`), and the compiler (:mod:`.toolchain`).

Both who launch a kernel need it: a Python call on tensors (:mod:`torch_ops.matmul`), which only runs one, and the
harness, which verifies and measures all of them. It imports TVM and nothing else of this project.
"""
