"""A rule for dlight, TVM's library of default schedules, made of the same schedule functions."""

from __future__ import annotations

from tvm import s_tir, tirx
from tvm.ir.transform import PassContext
from tvm.s_tir import Schedule
from tvm.s_tir.dlight.base import ScheduleRule
from tvm.target import Target

from tensorir_ladder.schedules.errors import IllegalSchedule
from tensorir_ladder.schedules.loops.layout import flatten_contraction
from tensorir_ladder.schedules.loops.unrolling import unroll_loop
from tensorir_ladder.schedules.loops.vectorization import dtype_bytes
from tensorir_ladder.schedules.pipeline.pipelining import pipeline_loop
from tensorir_ladder.schedules.recipes.contraction import stage_contraction
from tensorir_ladder.schedules.tiles import ThreadTile


class PipelinedContraction(ScheduleRule):
    """Schedules any function with one sum of products: tiled, staged in shared memory, pipelined, unrolled.

    ::

        with target, tvm.transform.PassContext(config={"tirx.use_async_copy": True}):
            mod = dlight.ApplyDefaultSchedule(PipelinedContraction())(mod)
            kernel = tvm.compile(mod, target)

    Under that pass configuration copies are cp.async; without it they go through registers, which needs
    none. Not applicable (``apply`` returns None, and the next rule has its turn) to functions with no
    contraction or several, with extents unknown at compile time, with an epilogue that re-reads the
    result, or beyond the target's limits; nor to ragged reductions that are no sums of products.
    """

    def __init__(self, tile: ThreadTile | None = None, stages: int = 3) -> None:
        self.tile, self.stages = tile or ThreadTile(block=(32, 64, 16), thread=(4, 4)), stages

    def apply(self, func: tirx.PrimFunc, target: Target, tunable: bool = False) -> Schedule | None:
        """Return the scheduled function, or None where the rule is not applicable; ``tunable`` changes nothing."""
        sch = Schedule(func)
        blocks = sch.get_child_blocks(sch.get_sblock("root"))
        reducing = [block for block in blocks if _reduces(sch.get(block))]
        if len(reducing) != 1 or not _is_static(func):
            return None
        (block,) = reducing
        itemsize = dtype_bytes(sch.get(block).reads[-1].source.dtype)
        try:
            self.tile.validate(target, itemsize, self.stages)
            flatten_contraction(sch, block)
            asynchronous = bool(PassContext.current().config.get("tirx.use_async_copy", False))
            scope = self.tile.shared_scope(itemsize, self.stages)
            staged = stage_contraction(
                sch, block, self.tile, vectorize=True, scope=scope, through_registers=not asynchronous
            )
            pipeline_loop(sch, staged.loops.k_outer, self.stages, async_copy="auto" if asynchronous else False)
            unroll_loop(sch, staged.loops.k_inner)
        except IllegalSchedule:
            return None
        return sch


def _reduces(block: s_tir.SBlock) -> bool:
    return any(iterator.iter_type == tirx.IterVar.CommReduce for iterator in block.iter_vars)


def _is_static(func: tirx.PrimFunc) -> bool:
    buffers = [parameter for parameter in func.params if hasattr(parameter.ty, "shape")]
    return all(isinstance(extent, tirx.IntImm) for buffer in buffers for extent in buffer.shape)
