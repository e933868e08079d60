"""Time stamps of a scheduled TMA ring: when its roles wait, load, multiply and store, as a further output.

:mod:`kernels.stamps` does the same for explicit kernels. The roles are the thread that issues TMA loads ("loads", or
"producer" if a separate warp does), and each warpgroup that multiplies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import tvm_ffi
from tvm import ir, tirx
from tvm.backend.cuda.op import cuda_func_call
from tvm.s_tir import Schedule

from tensorir_ladder.schedules.errors import IllegalPipeline
from tensorir_ladder.schedules.inspection import PIPELINE_STAGE, thread_tag
from tensorir_ladder.schedules.isa import WARPGROUP
from tensorir_ladder.schedules.memory.tensor_maps import BOXES
from tensorir_ladder.schedules.passes import require_pipeline
from tensorir_ladder.schedules.pipeline.own_warp import OWN_WARP
from tensorir_ladder.schedules.stamps import ATTRIBUTE, CALIBRATE, EVENTS, HEADER, STAMP, Stamps

STAMPED = "stamped_block"  # attribute of a function: the block that is stamped, and room for how many numbers
_THREAD = "threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)"
_STAMP_OF_ROLE = f"""
__forceinline__ __device__ void stamp_of_role(
    void* words, int row, bool multiplies, int event, int number, int room, bool speaks) {{
  const int thread = {_THREAD}, role = multiplies ? 1 + thread / {WARPGROUP} : 0;
  stamp(words, role * row, event, number, room, speaks && (!multiplies || thread % {WARPGROUP} == 0));
}}
"""
_CALIBRATE_BY_FIRST = f"""
__forceinline__ __device__ void calibrate_by_first(void* pair, void* multiprocessor, bool speaks) {{
  calibrate(pair, multiprocessor, speaks && {_THREAD} == 0);
}}
"""


def leave_stamps(sch: Schedule, stamps: Stamps) -> Schedule:
    """Return a schedule of the same function that leaves time stamps of one block of a ring of boxes.

    ::

        before   main(A, B, C)
        after    main(A, B, C, stamps)          # int64, stamps.words(roles) of them, zeros before the call

    ``roles_of(function)`` names the roles (:mod:`schedules.stamps`): "loads", "warpgroup 0" and so on, or "producer",
    "consumer 0" where a warp brings boxes by itself. Call it when all else is scheduled; ``sch`` stays as it is.
    Nothing changes before the function is lowered, and then only by the stamps themselves.

    Raises
    ------
    IllegalPipeline : for a schedule without a pipelined loop whose copies are by TMA
        (:func:`schedules.memory.fetch_by_tma`).
    """
    function = sch.mod[sch.func_working_on]
    loops: list[tirx.For] = []
    tvm_ffi.structural_walk(function.body, (tirx.For, loops.append))
    pipelined = [loop for loop in loops if PIPELINE_STAGE in loop.annotations]
    if not pipelined or not any(BOXES in loop.annotations for loop in loops):
        raise IllegalPipeline(
            "time stamps are of a pipelined loop whose copies are by TMA",
            value=f"{len(pipelined)} pipelined loops",
            remedy="copy by fetch_by_tma and pipeline the loop first, or leave the stamps out",
        )
    extents = {thread_tag(loop): int(loop.extent) for loop in loops if thread_tag(loop).startswith("threadIdx")}
    own_warp = any(OWN_WARP in loop.annotations for loop in pipelined)
    loading, multiplying = ("producer", "consumer") if own_warp else ("loads", "warpgroup")
    groups = -(-math.prod(extents.values()) // WARPGROUP)
    roles = [loading, *(f"{multiplying} {number}" for number in range(groups))]
    words = tirx.decl_buffer((stamps.words(len(roles)),), "int64", "stamps", layout=None)
    made = tirx.PrimFunc([*function.params, words], function.body, function.ret_type, function.attrs)
    stamped = Schedule(made.with_attr(ATTRIBUTE, roles).with_attr(STAMPED, [stamps.block, stamps.room]))
    require_pipeline(stamped, "time stamps")
    return stamped


@dataclass(frozen=True)
class Marks:
    """The stamps of a kernel while it is lowered; lists of no statements where its function is not stamped."""

    words: tirx.Var | None
    is_block: ir.Expr
    room: int

    @classmethod
    def of(cls, function: tirx.PrimFunc, block: tirx.Var) -> Marks:
        """Read what :func:`leave_stamps` asked for; ``block`` is the kernel's blockIdx.x."""
        if STAMPED not in (function.attrs or {}):
            return cls(None, tirx.const(False, "bool"), 0)
        number, room = map(int, function.attrs[STAMPED])
        return cls(function.params[-1], block == number, room)

    def loading(self, event: str, number: ir.Expr) -> list[tirx.Stmt]:
        """Stamp an event of the thread that issues TMA loads, the only one that executes this."""
        return self._stamp(False, event, number, True)

    def group(self, event: str, number: ir.Expr, only: ir.Expr | bool = True) -> list[tirx.Stmt]:
        """Stamp an event of each warpgroup, where ``only`` holds."""
        return self._stamp(True, event, number, only)

    def clocks(self, end: str) -> list[tirx.Stmt]:
        """Read both clocks at the block's "begin" or "end"."""
        if self.words is None:
            return []
        places = [tirx.address_of(self.words[HEADER.index(name)]) for name in (f"{end} ns", "multiprocessor")]
        source = CALIBRATE + _CALIBRATE_BY_FIRST
        return [tirx.Evaluate(cuda_func_call("calibrate_by_first", *places, self.is_block, source_code=source))]

    def _stamp(self, multiplies: bool, event: str, number: ir.Expr, only: ir.Expr | bool) -> list[tirx.Stmt]:
        if self.words is None:
            return []
        place = EVENTS.index(event) * self.room, number, self.room, tirx.all(self.is_block, only)
        row, source = len(EVENTS) * self.room, STAMP + _STAMP_OF_ROLE
        words = tirx.address_of(self.words[len(HEADER)])
        return [tirx.Evaluate(cuda_func_call("stamp_of_role", words, row, multiplies, *place, source_code=source))]
