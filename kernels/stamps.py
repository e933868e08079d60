"""Time stamps of one block: when each of its roles does what, left in memory beside the result.

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

A role of a persistent block is ``log.role(..., counts=True)``: its marks give numbers within one piece of the block's
work, and ``own.advance(k_tiles)`` goes on to the next.

Without stamps each of these emits nothing: the CUDA text is that of a kernel that never heard of them. With them a
mark is one store (:mod:`schedules.stamps`), and nothing is counted but pieces: a k tile's number goes on from one piece
to the next.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from tensorir_ladder.kernels.ring import Barriers, RingState
from tensorir_ladder.schedules.stamps import ATTRIBUTE, CALIBRATE, EVENTS, HEADER, OF_PIECES, STAMP, Stamps


@T.meta_class
class Behind:
    """The k tiles and pieces that a role of a persistent block has behind it."""

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
            T.evaluate(T.cuda.func_call("stamp", words, *place, room, speaks, source_code=STAMP))

    def wait(self, kind: str, barriers: Barriers, place: RingState, number: Expr, who: str) -> None:
        """Emit the wait for the stage at ``place`` to be "full" or "empty", between its two stamps."""
        self.mark(f"{kind} wait begins", number)
        barriers.wait(place.stage, place.phase, who)
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
        """Make the marks of a role, or of that ``offset`` roles behind it, by the one thread for which ``only`` holds.

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
            T.evaluate(T.cuda.func_call("calibrate", *places, self._in_block(block, only), source_code=CALIBRATE))

    def _in_block(self, block: Expr, only: Expr) -> Expr:
        return tirx.all(block == self.stamps.block, only)
