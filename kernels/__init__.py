"""Explicit kernels in TIRx, for what schedules cannot express: TMA, mbarriers, warpgroups' roles.

A kernel is a function that returns a :class:`tvm.tirx.PrimFunc` (lowered with the pipeline "tirx"). Kernels are put
together from small building blocks: tiles and their limits (:mod:`.config`, :mod:`.blackwell`), operands as TMA writes
and instructions read them (:mod:`.panels`), Hopper's instruction (:mod:`.wgmma`), Blackwell's and its tensor memory
(:mod:`.tcgen05`), tensor maps and copies (:mod:`.tma`), rings of barriers (:mod:`.ring`), the order of blocks
(:mod:`.raster`), results to memory (:mod:`.epilogue`, :mod:`.boxes`), time stamps (:mod:`.stamps`). Kernels
are parsed on a call stack of their own, which is faster (:mod:`.short_stack`).

Building blocks are called inside a ``T.prim_func``, whose parser runs them: a plain function emits statements at its
place, its loops are written out; an ``@T.inline`` function is parsed there, its conditions become the kernel's.

:func:`matmul` is the way to use them on torch tensors (:mod:`.api`), and :func:`describe` says what it takes for them:
operands as they lie (:mod:`.operands`), which kernel takes them (:mod:`.heuristic`), what else is done to sums
(:mod:`.fused`), its way to a cubin (:mod:`.codegen`), what launching it takes (:mod:`.host_code`, :mod:`.launch_plan`,
:mod:`.workspaces`), and the launch (:mod:`.launcher`, :mod:`.driver`).
"""

from tensorir_ladder.torch_ops.matmul import describe, matmul

__all__ = ["describe", "matmul"]
