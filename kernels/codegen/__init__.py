"""From a module to a launch: CUDA text (:mod:`.lowering`), cubin (:mod:`.toolchain`), launch (:mod:`.launch_plan`).

:mod:`.build_cache` keeps what compilers make, :mod:`.host_code` reads a launch from the host function that TVM makes,
:mod:`.overlap` lets kernels begin before the one before them has ended. Whoever launches a kernel needs these:
:mod:`torch_ops`, which only runs one, and the harness, which verifies and measures all of them.
"""
