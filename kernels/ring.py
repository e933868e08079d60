"""A ring of stages in shared memory guarded by mbarriers: who may read a stage, who may fill it, how long one waits.

A stage holds one k tile of both operands; k tile t is in stage t modulo the number of stages.

An mbarrier counts a phase's arrivals and, for a *full* barrier, the bytes that TMA still has to bring; when both are
through, the phase is over and the next begins. A wait names the parity of the phase it waits for, so each role keeps
one bit that flips whenever its place in the ring wraps around. Source: PTX ISA, "Parallel synchronization: mbarrier".
"""

from __future__ import annotations

from tvm.ir import Expr, StringImm
from tvm.script import tirx as T
from tvm.tirx import Buffer

from tensorir_ladder.kernels.tiles import BARRIER_BYTES
from tensorir_ladder.schedules.errors import IllegalPipeline
from tensorir_ladder.schedules.pipeline.box_rings import (
    BOUNDED,
    BOUNDED_WAIT,
    MBARRIER_IS_THROUGH,
    MBARRIER_WAIT,
    SECONDS,
    WAIT,
)

_ARRIVE_AT = """
__forceinline__ __device__ void mbarrier_arrive_at(void* barrier, int rank) {
  unsigned int there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(there) : "r"((unsigned int)__cvta_generic_to_shared(barrier)), "r"(rank));
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" :: "r"(there) : "memory");
}
"""
_THERE = """
__forceinline__ __device__ unsigned int there_of(void* barrier, int rank, bool arrives) {
  unsigned int there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(there) : "r"((unsigned int)__cvta_generic_to_shared(barrier)), "r"(arrives ? rank : 0));
  return arrives ? there : 0u;
}
"""
_ARRIVE_THERE = """
__forceinline__ __device__ void arrive_there(unsigned int there, int stage) {
  if (there != 0u)
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" :: "r"(there + (unsigned int)stage * SIZEu) : "memory");
}
""".replace("SIZE", str(BARRIER_BYTES))


def check_stages(stages: int, fewest: int, most: int, counted: str = "stages of a TMA ring") -> None:
    """Raise IllegalPipeline for fewer or more stages than a kernel works with, or of what else is ``counted``."""
    if not fewest <= stages <= most:
        raise IllegalPipeline(counted, value=stages, limit=f"{fewest} to {most}", remedy="give another number of them")


@T.meta_class
class Barriers:
    """One mbarrier per stage of a ring, all completed by as many arrivals.

    ``bounded`` makes every wait end: after two seconds it prints block, thread, role, barrier and phase, and traps.
    Without it a wait has no such code.
    """

    def __init__(self, pool: T.SMEMPool, stages: int, bounded: bool = False) -> None:
        self.words: Buffer = pool.alloc((stages,), "uint64", align=BARRIER_BYTES)
        self.stages, self.bounded = stages, bounded

    def initialize(self, arrivals: int) -> None:
        """Emit the initialization of all, by the one thread that calls it; a fence and a barrier must follow.

        By a thread for each stage, blocks on their own began 0.2 us later (23 kernels on an H200).
        """
        for stage in range(self.stages):
            T.evaluate(T.ptx.mbarrier.init.shared.b64(self.at(stage), T.uint32(arrivals)))

    def at(self, stage: Expr) -> Expr:
        """Address a stage's barrier."""
        return self.words.ptr_to([stage])

    def expect(self, stage: Expr, size: int) -> None:
        """Emit one arrival that also announces ``size`` bytes of TMA's: the phase ends when all have come."""
        T.evaluate(T.ptx.mbarrier.arrive.expect_tx.shared.b64(self.at(stage), T.uint32(size)))

    def arrive(self, stage: Expr) -> None:
        """Emit one arrival."""
        T.evaluate(T.ptx.mbarrier.arrive.shared.b64(self.at(stage)))

    def arrive_at(self, stage: Expr, rank: Expr) -> None:
        """Emit one arrival at the same barrier of another block of the cluster."""
        T.evaluate(T.cuda.func_call("mbarrier_arrive_at", self.at(stage), rank, source_code=_ARRIVE_AT))

    def there(self, stage: Expr, rank: Expr, arrives: Expr) -> Expr:
        """Return where a stage's barrier is in another block of the cluster, or 0 for who does not arrive.

        No barrier is at 0: a block's shared memory begins with what the system keeps there.
        """
        return T.cuda.func_call("there_of", self.at(stage), rank, arrives, source_code=_THERE, return_type="uint32")

    def arrive_there(self, stage: Expr, there: Expr) -> None:
        """Emit one arrival at a stage's barrier where :meth:`there` says the first one is, if anywhere."""
        T.evaluate(T.cuda.func_call("arrive_there", there, stage, source_code=_ARRIVE_THERE))

    def wait(self, stage: Expr, phase: Expr, role: str) -> None:
        """Emit the wait for the end of the phase of parity ``phase``; ``role`` names who waits in a bounded wait."""
        name, limit, text = WAIT, (), MBARRIER_WAIT
        if self.bounded:
            name, limit, text = BOUNDED, (StringImm(role), stage, SECONDS), BOUNDED_WAIT
        T.evaluate(T.cuda.func_call(name, self.at(stage), phase, *limit, source_code=MBARRIER_IS_THROUGH + text))


@T.meta_class
class RingState:
    """One role's place in a ring: a stage, and the parity of the phase that it waits for there.

    A role that waits until stages are filled begins with phase 0; one that waits until they are empty with phase 1,
    which a fresh barrier counts as over.
    """

    def __init__(self, stages: int, phase: int) -> None:
        self.stages = stages
        self.slot = T.local_scalar("int32")  # the stage, by the name that it has in the CUDA text
        self.phase = T.local_scalar("int32")
        self._begin(phase)

    @property
    def stage(self) -> Expr:
        """The stage's index, from 0."""
        return self.slot

    @T.inline
    def _begin(self, phase):
        self.slot = 0
        self.phase = phase

    @T.inline
    def advance(self):
        """Emit the way to the next stage; the phase flips on wrap-around."""
        self.slot = self.slot + 1
        if self.slot == self.stages:
            self.slot = 0
            self.phase = self.phase ^ 1
