"""Time stamps of one block: what each of its roles does when, left in memory beside the result.

A kernel takes ``stamps: Stamps | None = None``, and names its roles once::

    log = Log(stamps, ("producer", "consumer 0", "consumer 1"))     # outside T.prim_func
    ...
    log.bind()                                                      # where parameters are matched: one more output
    T.device_entry()
    ...
    loads = T.meta_var(log.role("producer", block))                 # where one thread runs anyway
    own = T.meta_var(log.role("consumer 0", block, consumer, thread % LANES == 0))  # warpgroups that share one code
    log.clocks("begin", block, thread == 0)                         # first of all
    ...
    loads.mark("load issued", k_tile)
    own.mark("full wait begins", k_tile)
    ...
    own.mark("results stored", output_tile, together=True)          # one lane of a warp stored them
    log.clocks("end", block, thread == 0)                           # last of all

Without stamps each of these emits nothing: the CUDA text is that of a kernel that never heard of them. With them a
mark is one predicated store of the multiprocessor's clock, to a place that role, event and number give, so that
nothing is counted or kept in registers. A number is that of the k tile, counted on from one output tile to the next in
a persistent kernel; in events of an epilogue that of the block's output tile. What has no place is dropped.

``%globaltimer`` counts nanoseconds, but may tick once a microsecond only, and is read at both ends of the block alone:
what passed on both clocks between them says how long a clock lasts. Source: PTX ISA, special registers. TVM has marks
of its own (tvm.backend.cuda.iket), which NVIDIA's profiler must patch into the loaded kernel; these need none.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

EVENTS = (
    "load issued",  # all of a k tile's copies are asked for
    "full wait begins",  # for a slot's bytes
    "full wait ends",
    "mma issued",  # all of a k tile's instructions
    "mma retired",  # they are done, and known to be
    "empty wait begins",  # until nobody reads a slot any more, so that it can be filled again
    "empty wait ends",
    "epilogue begins",
    "results stored",
)
HEADER = ("begin ns", "begin clock", "end ns", "end clock", "multiprocessor")
ATTRIBUTE = "stamped_roles"

_STAMP = """
__forceinline__ __device__ void stamp(void* row, int number, int room, bool speaks) {
  const int stamped = speaks && (unsigned int)number < (unsigned int)room;
  asm volatile(
      "{\\n.reg .pred p;\\n.reg .u64 now;\\n"
      "setp.ne.s32 p, %1, 0;\\n"
      "@p mov.u64 now, %%clock64;\\n"
      "@p st.global.u64 [%0], now;\\n}"
      :: "l"((long long*)row + number), "r"(stamped) : "memory");
}
"""
_CALIBRATE = """
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
    """What is stamped: one block, and room for so many numbers of each event."""

    block: int
    room: int = 256

    def words(self, roles: int) -> int:
        """64-bit words that the further output has: a header, then a row per role and event."""
        return len(HEADER) + roles * len(EVENTS) * self.room


@dataclass(frozen=True)
class Role:
    """One role's marks, by the thread for which ``speaks`` holds."""

    log: Log
    row: Expr
    speaks: Expr

    def mark(self, event: str, number: Expr = 0, together: bool = False) -> None:
        """Emit the stamp of an event; ``number`` may be beyond the room, or negative for what never was.

        ``together``: once all lanes of the warp are there, after what one of them did alone.
        """
        if self.log.stamps:
            if together:
                T.evaluate(T.cuda.warp_sync())
            room = self.log.stamps.room
            place = len(HEADER) + (self.row * len(EVENTS) + EVENTS.index(event)) * room
            row = self.log.words.ptr_to([place])
            T.evaluate(T.cuda.func_call("stamp", row, number, room, self.speaks, source_code=_STAMP))


class Log:
    """The stamps of a kernel's roles while it is written; with ``stamps`` None all of it emits nothing."""

    def __init__(self, stamps: Stamps | None, roles: tuple[str, ...]) -> None:
        self.stamps, self.roles = stamps, roles

    def bind(self) -> None:
        """Emit the further output, behind the last parameter: int64, :meth:`Stamps.words` of them, zeros before."""
        if self.stamps:
            handle = T.arg("stamps_ptr", T.handle())
            self.words = T.match_buffer(handle, (self.stamps.words(len(self.roles)),), "int64")
            IRBuilder.name("stamps", self.words)
            T.func_attr({ATTRIBUTE: list(self.roles)})

    def role(self, name: str, block: Expr, offset: Expr = 0, only: Expr = True) -> Role:
        """The marks of a role, or of that ``offset`` roles behind it, made by the one thread for which ``only`` holds.

        Where one thread runs anyway, ``only`` is left out.
        """
        stamped = self._in_block(block, only) if self.stamps else only
        return Role(self, self.roles.index(name) + offset, stamped)

    def clocks(self, end: str, block: Expr, only: Expr) -> None:
        """Emit the reading of both clocks at the block's "begin" or "end", by one thread, the same for both."""
        if self.stamps:
            names = (f"{end} ns", "multiprocessor")
            places = [self.words.ptr_to([HEADER.index(name)]) for name in names]
            T.evaluate(T.cuda.func_call("calibrate", *places, self._in_block(block, only), source_code=_CALIBRATE))

    def _in_block(self, block: Expr, only: Expr) -> Expr:
        return tirx.all(block == self.stamps.block, only)


def roles_of(function: tirx.PrimFunc) -> tuple[str, ...]:
    """The roles that a kernel stamps, in the order of their rows; none if it was written without stamps."""
    return tuple(map(str, function.attrs.get(ATTRIBUTE, ())))
