"""Sums of a part of the reduction: from a helper's registers through device memory and a ring's slots to the owner.

A helper's threads leave their sums in device memory, 16 bytes at a time, and its warpgroups raise a flag. The owner's
producer waits for the flag, and loads the sums into slots of its ring as it does operands, by bulk copies; its
consumers, with the same tile, have the same fragments, and add what the threads of their number left.
"""

from __future__ import annotations

from tvm.ir import Expr
from tvm.script import tirx as T
from tvm.tirx import Buffer

from .config import LANES
from .ring import RingState
from .roles import Consumer, SharedRing, release

VECTOR = 4  # floats
_HAND_OVER = """
__forceinline__ __device__ void hand_over(float* to, const float* sums) {
  __stcg((float4*)to, make_float4(sums[0], sums[1], sums[2], sums[3]));
}
"""
_RAISE_FLAG = """
__forceinline__ __device__ void raise_flag(int* flag) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" :: "l"(flag) : "memory");
}
"""
# Generic stores are read by the asynchronous proxy: a proxy fence on either side.
_PUBLISH = """
__forceinline__ __device__ void publish() {
  __threadfence();
  asm volatile("fence.proxy.async;" ::: "memory");
}
"""
_AWAIT_FLAG = """
__forceinline__ __device__ void await_flag(int* flag, int count) {
  int raised;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(raised) : "l"(flag) : "memory");
  } while (raised < count);
  asm volatile("st.relaxed.gpu.global.s32 [%0], 0;" :: "l"(flag) : "memory");
  asm volatile("fence.proxy.async;" ::: "memory");
}
"""
_BULK_LOAD = """
__forceinline__ __device__ void bulk_load(void* into, const float* from, int size, void* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :: "r"((unsigned int)__cvta_generic_to_shared(into)), "l"(from), "r"(size),
                  "r"((unsigned int)__cvta_generic_to_shared(barrier)) : "memory");
}
"""
_ADD = """
__forceinline__ __device__ void add_vector(float* sums, const void* from) {
  const float4 other = *(const float4*)from;
  sums[0] += other.x; sums[1] += other.y; sums[2] += other.z; sums[3] += other.w;
}
"""


@T.meta_class
class PartialSums:
    """Room in device memory for ``pieces`` of a block's sums, ``registers`` a thread of ``groups`` warpgroups, and
    their flags, which are 0 before and after a launch.
    """

    def __init__(self, memory: Buffer, flags: Buffer, registers: int, groups: int) -> None:
        self.memory, self.flags, self.registers, self.groups = memory, flags, registers, groups

    @staticmethod
    def floats(registers: int, groups: int) -> int:
        """Floats of one piece."""
        return registers * groups * LANES

    def vector(self, index: int, group: Expr, thread: Expr) -> Expr:
        """The place, in floats, of a thread's ``index``-th four sums: those of all threads beside each other."""
        return ((index * self.groups + group) * LANES + thread) * VECTOR

    @T.inline
    def hand_over(self, consumer, piece, thread):
        """Emit a helper's consumer warpgroup's part: each thread leaves its sums, then one says that they are there."""
        self._leave(consumer.sums, piece, consumer.number, thread)
        T.cuda.warpgroup_sync(consumer.here.warpgroup)
        if thread == 0:
            T.cuda.func_call("raise_flag", self.flags.ptr_to([piece]), source_code=_RAISE_FLAG)

    def _leave(self, sums: Buffer, piece: Expr, group: Expr, thread: Expr) -> None:
        first = piece * self.floats(self.registers, self.groups)
        for index in range(self.registers // VECTOR):
            to = self.memory.ptr_to([first + self.vector(index, group, thread)])
            T.evaluate(T.cuda.func_call("hand_over", to, T.address_of(sums[index * VECTOR]), source_code=_HAND_OVER))
        T.evaluate(T.cuda.func_call("publish", source_code=_PUBLISH))

    def portions(self, slot_bytes: int) -> list[tuple[int, int]]:
        """A piece as slots of the ring hold it: the first of a thread's vectors, and how many."""
        fit, vectors = slot_bytes // (self.groups * LANES * VECTOR * 4), self.registers // VECTOR
        return [(first, min(fit, vectors - first)) for first in range(0, vectors, fit)]

    def fetch(self, piece: Expr, shared: SharedRing, place: RingState) -> None:
        """Emit the owner's producer's part: wait until the piece is there, lower the flag, load it slot by slot."""
        flag = self.flags.ptr_to([piece])
        T.evaluate(T.cuda.func_call("await_flag", flag, self.groups, source_code=_AWAIT_FLAG))
        for first, count in self.portions(shared.slot_bytes):
            size = count * self.groups * LANES * VECTOR * 4
            shared.empty.wait(place.slot, place.phase, "producer of sums")
            shared.full.expect(place.slot, size)
            source = piece * self.floats(self.registers, self.groups) + self.vector(first, 0, 0)
            arguments = (shared.ring.ptr_to([place.slot * shared.slot_bytes]), self.memory.ptr_to([source]), size)
            barrier = shared.full.at(place.slot)
            T.evaluate(T.cuda.func_call("bulk_load", *arguments, barrier, source_code=_BULK_LOAD))
            place.advance()

    def add(self, consumer: Consumer, thread: Expr) -> None:
        """Emit an owner's consumer thread's part: add what a helper's thread of the same number left."""
        shared, place = consumer.shared, consumer.read
        for first, count in self.portions(shared.slot_bytes):
            shared.full.wait(place.slot, place.phase, "consumer of sums")
            for index in range(count):
                source = shared.ring.ptr_to(
                    [place.slot * shared.slot_bytes + self.vector(index, consumer.number, thread) * 4]
                )
                to = T.address_of(consumer.sums[(first + index) * VECTOR])
                T.evaluate(T.cuda.func_call("add_vector", to, source, source_code=_ADD))
            # All lanes have read before one says so. A barrier of the warp would do; but compute-sanitizer's racecheck
            # does not follow it, and would report the next load into the slot against these reads.
            T.evaluate(T.cuda.warpgroup_sync(consumer.here.warpgroup))
            release(shared.empty, place.slot, thread % 32, consumer.here.cluster)
            place.advance()
