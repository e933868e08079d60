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

A role of a persistent block is ``log.role(..., counts=True)``: its marks give numbers within one piece of the block's
work, and ``own.advance(k_tiles)`` goes on to the next.

A role of a persistent block is ``log.role(..., counts=True)``. Its marks give numbers within a piece of the block's
work, ``own.advance(k tiles)`` counts on behind each.

Without stamps each of these emits nothing: the CUDA text is that of a kernel that never heard of them. With them a
mark is one predicated store of the multiprocessor's clock, to a place that role, event and number give:
nothing is counted or kept in registers, but for pieces. A number is that of the k tile, counted on from one piece to
the next; in :data:`OF_PIECES` that of the piece among the block's, or of a box among all its results. What has no place
is dropped.

``%globaltimer`` counts nanoseconds, but may tick once a microsecond only, and is read at both ends of the block alone:
what passed on both clocks between them says how long a clock lasts. Source: PTX ISA, special registers. TVM has marks
of its own (tvm.backend.cuda.iket), which NVIDIA's profiler must patch into the loaded kernel; these need none.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx

EVENTS = (
    "load issued",  # all of a k tile's copies are asked for
    "full wait begins",  # for a slot's bytes
    "full wait ends",
    "mma issued",  # all of a k tile's instructions
    "mma retired",  # they are done, and known to be
    "empty wait begins",  # until nobody reads a slot any more, so that it can be filled again
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


@dataclass(frozen=True)
class Stamps:
    """What is stamped: one block, and room for so many numbers of each event."""

    block: int
    room: int = 256

    def words(self, roles: int) -> int:
        """64-bit words that the further output has: a header, then a row per role and event."""
        return len(HEADER) + roles * len(EVENTS) * self.room


def roles_of(function: tirx.PrimFunc) -> tuple[str, ...]:
    """The roles that a kernel stamps, in the order of their rows; none if it was written without stamps."""
    return tuple(map(str, function.attrs.get(ATTRIBUTE, ())))
