"""Time stamps of one block as words in device memory: which there are, where each is, and the instructions for them.

A stamp is one predicated store of the multiprocessor's clock, to a place that role, event and number give: nothing is
counted or kept in registers. A number is that of the k tile, in :data:`OF_PIECES` that of the piece among the block's,
or of a box among all its results. What has no place is dropped.

``%globaltimer`` counts nanoseconds, but may tick once a microsecond only, and is read at both ends of the block alone:
what passed on both clocks between them says how long a clock lasts. Source: PTX ISA, special registers. TVM has marks
of its own (tvm.backend.cuda.iket), which NVIDIA's profiler must patch into the loaded kernel; these need none.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx

EVENTS = (
    "load issued",  # all of a k tile's copies are asked for
    "full wait begins",  # for a stage's bytes
    "full wait ends",
    "mma issued",  # all of a k tile's instructions
    "mma retired",  # they are done, and known to be
    "empty wait begins",  # until nobody reads a stage any more, so that it can be filled again
    "empty wait ends",
    "piece begins",  # of what a persistent block has to do
    "epilogue begins",
    "sums free",  # for the next piece: the results are rounded, or stored straight from them
    "box begins",  # one of the boxes in which results leave
    "box stored",  # or TMA at least asked to
    "results stored",
)
OF_PIECES = EVENTS[EVENTS.index("piece begins") :]
HEADER = ("begin ns", "begin clock", "end ns", "end clock", "multiprocessor")
ATTRIBUTE = "stamped_roles"
# The clock is read whether or not it is stored: else the compiler keeps each stamp's last reading in registers.
STAMP = """
__forceinline__ __device__ void stamp(void* words, int role, int event, int number, int room, bool speaks) {
  asm volatile(
      "{\\n.reg .pred p;\\n.reg .u64 now, at;\\n.reg .s32 place;\\n"
      "setp.ne.s32 p, %5, 0;\\n"
      "setp.lt.and.u32 p, %3, %4, p;\\n"
      "add.s32 place, %1, %2;\\n"
      "add.s32 place, place, %3;\\n"
      "mad.wide.s32 at, place, 8, %0;\\n"
      "mov.u64 now, %%clock64;\\n"
      "@p st.global.u64 [at], now;\\n}"
      :: "l"(words), "r"(role), "r"(event), "r"(number), "r"(room), "r"((int)speaks) : "memory");
}
"""
CALIBRATE = """
__forceinline__ __device__ void calibrate(void* pair, void* multiprocessor, bool speaks) {
  if (speaks) {
    long long now, clock;
    unsigned int own;
    asm volatile("mov.u64 %0, %%globaltimer;\\nmov.u64 %1, %%clock64;" : "=l"(now), "=l"(clock) :: "memory");
    asm volatile("mov.u32 %0, %%smid;" : "=r"(own));
    ((long long*)pair)[0] = now;
    ((long long*)pair)[1] = clock;
    *(long long*)multiprocessor = own;
  }
}
"""


@dataclass(frozen=True)
class Stamps:
    """The block that is stamped, and room for so many numbers of each event."""

    block: int
    room: int = 256

    def words(self, roles: int) -> int:
        """Count the 64-bit words that the further output has: a header, then a row per role and event."""
        return len(HEADER) + roles * len(EVENTS) * self.room


def roles_of(function: tirx.PrimFunc) -> tuple[str, ...]:
    """List the roles that a kernel stamps, in the order of their rows; none if it was written without stamps."""
    return tuple(map(str, function.attrs.get(ATTRIBUTE, ())))
