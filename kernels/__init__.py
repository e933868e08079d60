"""Explicit kernels in TIRx, for what schedules cannot express, and for products of torch tensors.

A kernel is a function that returns a :class:`tvm.tirx.PrimFunc`, which the pipeline "tirx" lowers. Each is one file,
whose docstring has the main loop in a few lines:

- :mod:`.tma_ring` (a variant of step 11): one thread loads by TMA into a ring, all warpgroups multiply by wgmma.
- :mod:`.warp_specialized` (step 12, ``roles``): a warpgroup that only loads, warpgroups that only multiply.
- :mod:`.swapped` (few rows): the same with operands exchanged, the reduction split over a cluster.
- :mod:`.persistent` (step 13): as many blocks as run at once, each with one output tile after the other.
- :mod:`.unaligned`: a short reduction at once, of rows that TMA cannot step over (:func:`torch_ops.matmul`).
- :mod:`.shifting`: such rows of a long reduction, by producer warps that shift them into place, a ring's k tile each.
- :mod:`.attention`: both products of attention and the softmax between them (Relax modules).
- :mod:`.tcgen05_ring` (step 14): :mod:`.tma_ring` on Blackwell, sums in tensor memory.

They are put together from public building blocks:

- tiles: :mod:`.tiles` (Hopper's, and every limit they must keep), :mod:`.blackwell`.
- loading: :mod:`.tma` (tensor maps, copies of boxes), :mod:`.ring` (mbarriers, a role's place in the ring),
  :mod:`.panels` (operands as TMA writes and instructions read them, descriptors).
- multiplying: :mod:`.wgmma` (Hopper), :mod:`.tcgen05` (Blackwell, its tensor memory).
- both: :mod:`.shifted_rows` (rows that begin anywhere, laid down as TMA would).
- beside the products: :mod:`.online_softmax` (of rows that come tile by tile).
- how a kernel is made besides: :mod:`.kernel_form`.
- who does what: :mod:`.roles` (producer and consumer warpgroups), :mod:`.raster` (the order of blocks),
  :mod:`.stream_k` (k tiles shared out among persistent blocks), :mod:`.partial_sums` (what these hand to each other),
  :mod:`.cluster_sums` (what the blocks of a cluster hand to each other), :mod:`.held` (what their loops keep in
  registers).
- results: :mod:`.fused_epilogue` (a factor, a bias, an activation), :mod:`.epilogue` (rounding and storing),
  :mod:`.boxes` (storing box by box, beside other work).
- around a kernel: :mod:`.stamps` (time stamps of its roles), :mod:`.short_stack` (parsing it faster), :mod:`.codegen`
  (its way to CUDA text, a cubin and a launch).

Building blocks are called inside a ``T.prim_func``, whose parser runs them: a plain function emits statements at its
place, its loops are written out; an ``@T.inline`` function is parsed there, its conditions become the kernel's.

Torch tensors are multiplied by :func:`torch_ops.matmul`.
"""
