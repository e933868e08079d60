"""The laboratory: is the emulator right, are the kernels, and how fast is the machine itself?

- :mod:`.traces`: layouts recorded on a GPU by small probes, element by element, which the emulator is held to
- :mod:`.sanitizer`: kernels broken on purpose, looked at by the emulator and by compute-sanitizer
- :mod:`.fuzzing`: steps, shapes and configurations drawn at random (:mod:`.drawn_tiles`: tiles of any size), each right
  or refused; in processes that may crash or hang (:mod:`.workers`)
- :mod:`.microbench`, ``probes.cu``: the rates and latencies of a GPU, which the models need
- :mod:`.gpu_program`: what the emulator runs, on the GPU through the driver alone

Each has a command: ``ladder traces``, ``sanitize``, ``fuzz``, ``microbench``.
"""
