"""Sums of a part of the reduction: from a helper's registers through device memory to the owner's.

A helper's threads leave their sums in device memory, 16 bytes at a time, and each of its warpgroups raises a flag of
its own. The owner's warpgroup of the same number waits for that flag and lowers it; having the same fragments, its
threads add what the threads of their number left. Source: PTX ISA, "Memory consistency model" (release and acquire).
"""

from __future__ import annotations

from tvm.ir import Expr
from tvm.script import tirx as T
from tvm.tirx import Buffer

from tensorir_ladder.schedules.isa import WARPGROUP
from tensorir_ladder.schedules.pipeline.box_rings import SECONDS

VECTOR = 4  # floats
AT_ONCE = 4  # vectors that a thread has on their way
_LEAVE = """
__forceinline__ __device__ void leave_sums(float* to, const float* sums) {
  __stcg((float4*)to, make_float4(sums[0], sums[1], sums[2], sums[3]));
}
"""
_RAISE_FLAG = """
__forceinline__ __device__ void raise_flag(int* flag) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" :: "l"(flag) : "memory");
}
"""
_FLAG = """
__forceinline__ __device__ bool flag_is_lowered(int* flag) {
  int raised;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(raised) : "l"(flag) : "memory");
  if (raised == 0) return false;
  asm volatile("st.relaxed.gpu.global.s32 [%0], 0;" :: "l"(flag) : "memory");
  return true;
}
"""
_AWAIT_FLAG = """
__forceinline__ __device__ void await_flag(int* flag) {
  while (!flag_is_lowered(flag)) {}
}
"""
_AWAIT_FLAG_BOUNDED = """
__forceinline__ __device__ void await_flag_bounded(int* flag, int piece, int group, int seconds) {
  unsigned long long begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  while (!flag_is_lowered(flag)) {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    if (now - begin > seconds * 1000000000ull) {
      printf("block %d: thread %d as owner waited %d s for piece %d, warpgroup %d\\n", (int)blockIdx.x,
             (int)threadIdx.x, seconds, piece, group);
      __trap();
    }
  }
}
"""
_ADD = """
__forceinline__ __device__ void {name}(float* sums, const float* from) {{
  float4 others[{count}];
#pragma unroll
  for (int i = 0; i < {count}; ++i) others[i] = __ldcg((const float4*)(from + i * {stride}));
#pragma unroll
  for (int i = 0; i < {count}; ++i) {{
    sums[4 * i] += others[i].x; sums[4 * i + 1] += others[i].y;
    sums[4 * i + 2] += others[i].z; sums[4 * i + 3] += others[i].w;
  }}
}}
"""


@T.meta_class
class PartialSums:
    """Room in device memory for ``pieces`` of a block's sums, ``registers`` a thread of ``groups`` warpgroups, and
    a flag for each of these, which is 0 before and after a launch.

    With ``among_others`` kernels of other tiles may stand in the same text: the names of functions tell them apart.
    """

    def __init__(self, memory: Buffer, flags: Buffer, registers: int, groups: int, among_others: bool = False) -> None:
        self.memory, self.flags, self.registers, self.groups = memory, flags, registers, groups
        self.among_others = among_others

    @staticmethod
    def floats(registers: int, groups: int) -> int:
        """Count the floats of one piece."""
        return registers * groups * WARPGROUP

    @property
    def stride(self) -> int:
        """Floats from one of a thread's vectors to its next: all threads' vectors of a number lie beside each other."""
        return self.groups * WARPGROUP * VECTOR

    def at(self, piece: Expr, index: int, group: Expr, thread: Expr) -> Expr:
        """Address a thread's ``index``-th four sums of a piece."""
        first = piece * self.floats(self.registers, self.groups) + (group * WARPGROUP + thread) * VECTOR
        return self.memory.ptr_to([first + index * self.stride])

    @T.inline
    def hand_over(self, consumer, piece, thread):
        """Emit a helper's consumer warpgroup's part: each thread leaves its sums, then one says that they are there.

        What all left before the barrier is released with the one flag.
        """
        self._leave(consumer.sums, piece, consumer.number, thread)
        T.cuda.warpgroup_sync(consumer.here.warpgroup)
        if thread == 0:
            flag = T.meta_var(self.flags.ptr_to([piece * self.groups + consumer.number]))
            T.cuda.func_call("raise_flag", flag, source_code=_RAISE_FLAG)

    @T.inline
    def add(self, consumer, piece, thread):
        """Emit an owner's consumer warpgroup's part: add what a helper's warpgroup of the same number left."""
        if thread == 0:
            self._await(piece, consumer.number, consumer.shared.full.bounded)
        T.cuda.warpgroup_sync(consumer.here.warpgroup)
        self._add(consumer.sums, piece, consumer.number, thread)

    def _leave(self, sums: Buffer, piece: Expr, group: Expr, thread: Expr) -> None:
        for index in range(self.registers // VECTOR):
            to = self.at(piece, index, group, thread)
            T.evaluate(T.cuda.func_call("leave_sums", to, T.address_of(sums[index * VECTOR]), source_code=_LEAVE))

    def _await(self, piece: Expr, group: Expr, bounded: bool) -> None:
        name, limit, text = "await_flag", (), _AWAIT_FLAG
        if bounded:
            name, limit, text = "await_flag_bounded", (piece, group, SECONDS), _AWAIT_FLAG_BOUNDED
        flag = self.flags.ptr_to([piece * self.groups + group])
        T.evaluate(T.cuda.func_call(name, flag, *limit, source_code=_FLAG + text))

    def _add(self, sums: Buffer, piece: Expr, group: Expr, thread: Expr) -> None:
        vectors = self.registers // VECTOR
        for first in range(0, vectors, AT_ONCE):
            count = min(AT_ONCE, vectors - first)
            name = f"add_{count}_vectors" + (f"_{self.stride}_apart" if self.among_others else "")
            text = _ADD.format(name=name, count=count, stride=self.stride)
            arguments = (T.address_of(sums[first * VECTOR]), self.at(piece, first, group, thread))
            T.evaluate(T.cuda.func_call(name, *arguments, source_code=text))
