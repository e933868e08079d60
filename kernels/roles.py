"""Warpgroups with roles: one loads, the others multiply, each with the registers that its role needs."""

from __future__ import annotations

from tvm.ir import Expr
from tvm.script import tirx as T

from .config import CONSUMER_REGISTERS, PRODUCER_REGISTERS
from .ring import Barriers

WARPS = 4  # of a warpgroup
OVERLAPS = "overlaps_launches"  # a function's attribute: its kernel waits by itself for the one before it


def give_up_registers() -> None:
    """Emit, for the producer warpgroup: registers beyond 40 a thread go back to the block's pool."""
    T.evaluate(T.ptx["setmaxnreg.dec.sync.aligned.u32"](PRODUCER_REGISTERS))


def take_registers(consumers: int) -> None:
    """Emit, for each of so many consumer warpgroups: wait until the pool has the registers that it may have."""
    T.evaluate(T.ptx["setmaxnreg.inc.sync.aligned.u32"](CONSUMER_REGISTERS[consumers]))


@T.inline
def release(empty: Barriers, slot: Expr, lane: Expr, blocks: int):
    """Emit a consumer warp's word that it has read a slot: one arrival in each of the blocks that fill it."""
    if blocks > 1:
        if lane < blocks:
            empty.arrive_at(slot, lane)
    elif lane == 0:
        empty.arrive(slot)


@T.inline
def begin_together(blocks: int):
    """Emit what must lie between the initialization of barriers and their use, in a cluster of so many blocks."""
    if blocks > 1:
        T.ptx.fence.mbarrier_init.release.cluster()
        T.cuda.cluster_sync()
    else:
        T.ptx.fence.proxy.async_.shared__cta()
        T.cuda.cta_sync()


@T.inline
def end_together(blocks: int):
    """Emit the wait for the cluster's other blocks, which may still write to this one's memory or arrive there."""
    if blocks > 1:
        T.cuda.warp_sync()
        T.cuda.cluster_sync()
