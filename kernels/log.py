"""Writing time stamps into a kernel: its log, and the marks of each of its roles; see :mod:`kernels.stamps`."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from tensorir_ladder.kernels.ring import Barriers, RingState
from tensorir_ladder.kernels.stamps import ATTRIBUTE, EVENTS, HEADER, OF_PIECES, Stamps

# The clock is read whether or not it is stored: else the compiler keeps each stamp's last reading in registers.
_STAMP = """
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


@T.meta_class
class Behind:
    """What a role of a persistent block has behind it: k tiles, and pieces."""

    def __init__(self) -> None:
        self.k_tiles = T.local_scalar("int32")
        self.pieces = T.local_scalar("int32")
        self._begin()

    @T.inline
    def _begin(self):
        self.k_tiles = 0
        self.pieces = 0

    @T.inline
    def advance(self, k_tiles):
        """Emit the step to the next piece."""
        self.k_tiles = self.k_tiles + k_tiles
        self.pieces = self.pieces + 1


@dataclass(frozen=True)
class Role:
    """One role's marks, by the thread for which ``speaks`` holds."""

    log: Log
    row: Expr
    speaks: Expr
    behind: Behind | None = None

    def mark(
        self, event: str, number: Expr = 0, together: bool = False, only: Expr = True, boxes: int | None = None
    ) -> None:
        """Emit the stamp of an event, where ``only`` holds; ``number`` may lead beyond the room, or below 0.

        ``together``: once all lanes of the warp are there, after what one of them did alone. ``boxes``: of a piece,
        where the number is a box's.
        """
        if self.log.stamps:
            if together:
                T.evaluate(T.cuda.warp_sync())
            if self.behind:
                number = number + (self.behind.pieces * (boxes or 1) if event in OF_PIECES else self.behind.k_tiles)
            room = self.log.stamps.room
            words, speaks = self.log.words.ptr_to([len(HEADER)]), tirx.all(self.speaks, only)
            place = (self.row * len(EVENTS) * room, EVENTS.index(event) * room, number)
            T.evaluate(T.cuda.func_call("stamp", words, *place, room, speaks, source_code=_STAMP))

    def wait(self, kind: str, slots: Barriers, place: RingState, number: Expr, who: str) -> None:
        """Emit the wait for the slot at ``place`` to be "full" or "empty", between its two stamps."""
        self.mark(f"{kind} wait begins", number)
        slots.wait(place.slot, place.phase, who)
        self.mark(f"{kind} wait ends", number)

    def advance(self, k_tiles: Expr) -> None:
        """Emit the counting of a piece of so many k tiles."""
        if self.behind:
            self.behind.advance(k_tiles)


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

    def role(self, name: str, block: Expr, offset: Expr = 0, only: Expr = True, counts: bool = False) -> Role:
        """The marks of a role, or of that ``offset`` roles behind it, made by the one thread for which ``only`` holds.

        Where one thread runs anyway, ``only`` is left out. ``counts``: pieces, see :meth:`Role.advance`.
        """
        stamped = self._in_block(block, only) if self.stamps else only
        behind = Behind() if self.stamps and counts else None
        return Role(self, self.roles.index(name) + offset, stamped, behind)

    def clocks(self, end: str, block: Expr, only: Expr, together: bool = False) -> None:
        """Emit the reading of both clocks at the block's "begin" or "end", by one thread, the same for both.

        ``together``: once the whole block is there.
        """
        if self.stamps:
            if together:
                T.evaluate(T.cuda.warp_sync())
                T.evaluate(T.cuda.cta_sync())
            names = (f"{end} ns", "multiprocessor")
            places = [self.words.ptr_to([HEADER.index(name)]) for name in names]
            T.evaluate(T.cuda.func_call("calibrate", *places, self._in_block(block, only), source_code=_CALIBRATE))

    def _in_block(self, block: Expr, only: Expr) -> Expr:
        return tirx.all(block == self.stamps.block, only)
