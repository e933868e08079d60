"""The commands of ``ladder``, one module each, named as the command is; :mod:`harness.cli` has their table.

Such a module offers ``add_options(parser)``, and ``run(options, command)``, which does the work, is given the command
line to note in records, and returns an exit status. One may offer ``ahead(arguments)``, a context that is entered
before options are read, and whose value ``run`` is given as well. An exception of the project's own is printed as one
line. What several of them share lies beside them: reading options (:mod:`.options`), kernels (:mod:`.kernels`),
measuring (:mod:`.measuring`) and printing (:mod:`.show`). What a machine has is always asked of the modules
:mod:`harness.execution` and :mod:`kernels.codegen.toolchain` by their names, so that a test replaces it in one place.
"""

# Exit statuses, which :data:`harness.cli.STATUS` explains.
WRONG, BAD_INPUT, NOT_VERIFIED, DEFECT, DIFFERENT = 1, 2, 3, 4, 5
