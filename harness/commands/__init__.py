"""The commands of ``python -m harness``, one module each, named as the command is.

Such a module offers ``TEXT``, what its help says; ``add_options(parser)``; and ``run(options, command)``, which
does the work, is given the command line to note in records, and returns an exit status. What several of them
share lies beside them: reading options (:mod:`.options`), kernels (:mod:`.kernels`), measuring
(:mod:`.measuring`) and printing (:mod:`.show`). What a machine has is always asked of the modules
:mod:`harness.execution` and :mod:`kernels.codegen.toolchain` by their names, so that a test replaces it in one place.
"""

WRONG, BAD_INPUT, NOT_VERIFIED = 1, 2, 3
