"""Multiply torch tensors by the explicit kernels: ``from tensorir_ladder.torch_ops import matmul, describe``.

A call goes through these files, one after the other; all but the last two only the first time that tensors of some
sizes, strides and dtypes come:

- :mod:`.call`: :func:`matmul` and :func:`describe`; looks up the tensors' forms.
- :mod:`.operands`: checks how tensors lie in memory, and what must be copied so that TMA can read it.
- :mod:`.choice`: chooses the step, tile and stages, by cost or by what was measured (``tuned/``).
- :mod:`.product`: copies what must be copied, and launches on the tensors' addresses, in torch's current stream.
- :mod:`.launcher`: compiles and loads a kernel; keeps its launches by addresses and hands them to :mod:`.driver`.

What they refuse is said in :mod:`.errors`. Importing this needs TVM, but neither torch nor a GPU.
"""

from tensorir_ladder.torch_ops.call import describe, matmul

__all__ = ["describe", "matmul"]
