"""The emulator beside compute-sanitizer: kernels that are broken on purpose, and whole ones, looked at by both.

:mod:`.subjects` are the kernels; :mod:`.preparation` compiles them and asks the emulator, without a GPU, into a folder;
:mod:`.launch` is the process that runs one of them on the GPU; :mod:`.tools` runs it alone and under each tool, with a
time limit; :mod:`.judgement` says where the two agree, and what no tool can see; :mod:`.agreement` is the record.
"""
