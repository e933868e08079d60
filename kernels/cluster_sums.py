"""Sums of the parts of a reduction: from the registers of a cluster's blocks to those of its first.

Each block but the first leaves its sums in its own shared memory; the first reads them there, by distributed shared
memory, and adds them in the order of the parts. Source: PTX ISA, mapa, ld.shared::cluster, barrier.cluster.
"""

from __future__ import annotations

from tvm.ir import Expr
from tvm.script import tirx as T
from tvm.tirx import Buffer

from tensorir_ladder.kernels.partial_sums import VECTOR
from tensorir_ladder.kernels.tiles import ADDED_AT_ONCE
from tensorir_ladder.schedules.isa import VECTOR_BYTES, WARPGROUP

STRIDE = WARPGROUP * VECTOR_BYTES  # bytes from one of a thread's vectors to its next
_LEAVE = """
__forceinline__ __device__ void leave_for_the_first(void* to, const float* sums) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};"
               :: "r"((unsigned int)__cvta_generic_to_shared(to)), "f"(sums[0]), "f"(sums[1]), "f"(sums[2]),
                  "f"(sums[3]) : "memory");
}
"""
_ADD = """
__forceinline__ __device__ void {name}(float* sums, void* from) {{
  unsigned int own = (unsigned int)__cvta_generic_to_shared(from), there[{others}];
  float others[{others}][{floats}];
#pragma unroll
  for (int part = 0; part < {others}; ++part) {{
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there[part]) : "r"(own), "r"(part + 1));
#pragma unroll
    for (int i = 0; i < {floats}; i += 4)
      asm volatile("ld.shared::cluster.v4.f32 {{%0, %1, %2, %3}}, [%4];"
                   : "=f"(others[part][i]), "=f"(others[part][i + 1]), "=f"(others[part][i + 2]),
                     "=f"(others[part][i + 3])
                   : "r"(there[part] + i / 4 * {stride}) : "memory");
  }}
#pragma unroll
  for (int part = 0; part < {others}; ++part)
#pragma unroll
    for (int i = 0; i < {floats}; ++i) sums[i] += others[part][i];
}}
"""


@T.meta_class
class ClusterSums:
    """The cluster of a tile's ``parts``, which this block multiplies the ``part``-th of; ``registers`` sums a thread.

    With one part there is no cluster, and all of it emits nothing.
    """

    def __init__(self, parts: int, registers: int) -> None:
        self.parts, self.registers = parts, registers
        self.part = T.cta_id_in_cluster([parts]) if parts > 1 else 0

    @T.inline
    def meet(self):
        """Emit the wait of all the cluster's threads for each other; what they wrote before is there behind it."""
        if self.parts > 1:
            T.cuda.warp_sync()
            T.cuda.cluster_sync()

    @T.inline
    def leave(self, sums, memory, first, thread):
        """Emit, for a warpgroup of all blocks but the first, the writing of its sums from byte ``first`` of memory."""
        if self.parts > 1:
            if self.part != 0:
                self._leave(sums, memory, first, thread)

    def _leave(self, sums: Buffer, memory: Buffer, first: Expr, thread: Expr) -> None:
        for index in range(self.registers // VECTOR):
            to = self._at(memory, first, index, thread)
            T.evaluate(
                T.cuda.func_call("leave_for_the_first", to, T.address_of(sums[index * VECTOR]), source_code=_LEAVE)
            )

    def add(self, sums: Buffer, memory: Buffer, first: Expr, thread: Expr) -> None:
        """Emit, for a warpgroup of the first block, the addition of the others' sums to its own, in the parts' order.

        As many of a thread's vectors as fit :data:`kernels.tiles.ADDED_AT_ONCE` are on their way together.
        """
        others, vectors = self.parts - 1, self.registers // VECTOR
        at_once = max(1, ADDED_AT_ONCE // (VECTOR * others)) if others else vectors
        for index in range(0, vectors if others else 0, at_once):
            count = min(at_once, vectors - index)
            name = f"add_{count}_vectors_of_{others}_parts"
            text = _ADD.format(name=name, others=others, floats=count * VECTOR, stride=STRIDE)
            given = T.address_of(sums[index * VECTOR]), self._at(memory, first, index, thread)
            T.evaluate(T.cuda.func_call(name, *given, source_code=text))

    @staticmethod
    def _at(memory: Buffer, first: Expr, index: int, thread: Expr) -> Expr:
        """Address a thread's ``index``-th four sums: all threads' of a number lie beside each other."""
        return memory.ptr_to([first + index * STRIDE + thread * VECTOR_BYTES])
