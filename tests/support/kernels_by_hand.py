"""Where TMA puts and wgmma reads elements, worked out by hand; a kernel that only waits."""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from tensorir_ladder.harness.build import compiled, executable, lower_schedule
from tensorir_ladder.harness.execution import GpuBackend
from tensorir_ladder.harness.machines import machine_for
from tensorir_ladder.kernels.codegen.toolchain import require_compiler
from tensorir_ladder.kernels.panels import TmaPanels
from tensorir_ladder.kernels.ring import Barriers, RingState

HOPPER = machine_for("sm_90a")


def elements(panels: TmaPanels) -> dict[tuple[int, int], int]:
    """The byte at which TMA puts each (extent, step) element of a tile: box after box, rows of 128 swizzled bytes."""
    found = {}
    for panel in range(panels.count):
        first, step = (panel * 64, 0) if panels.major == "n" else (0, panel * 64)
        for row in range(panels.rows):
            for inside in range(64):
                piece = inside // 8 ^ row % 8
                place = panel * panels.rows * 128 + row * 128 + piece * 16 + inside % 8 * 2
                found[(first + inside, row) if panels.major == "n" else (row, step + inside)] = place
    return found


def read_by_wgmma(panels: TmaPanels, start: int, rows: int) -> dict[tuple[int, int], int]:
    """The byte from which wgmma reads each (extent, step) element, by a descriptor that begins at ``start``."""
    stride, leading = panels.descriptor_bits >> 32 & 0x3FFF, panels.descriptor_bits >> 16 & 0x3FFF
    assert panels.descriptor_bits >> 62 == 1
    found = {}
    for extent in range(rows):
        for step in range(16):
            if panels.major == "n":
                linear = start + extent // 64 * leading * 16 + step // 8 * stride * 16 + step % 8 * 128
                linear += extent % 64 * 2
            else:
                linear = start + extent // 8 * stride * 16 + extent % 8 * 128 + step * 2
            found[extent, step] = linear ^ (linear >> 7 & 7) << 4
    return found


def waiting_kernel(bounded: bool, arrives: bool = True) -> tirx.PrimFunc:
    """One thread that arrives at three barriers in turn, eight times, and waits for each; or it never arrives."""

    @T.prim_func
    def main(A_ptr: T.handle):
        A = T.match_buffer(A_ptr, (32,), "int32")
        T.device_entry()
        T.cta_id([1])
        thread = T.thread_id([32])
        pool = T.SMEMPool()
        barriers = Barriers(pool, 3, bounded)
        pool.commit()
        state = RingState(3, 0)
        if thread == 0:
            barriers.initialize(1)
            for _i in T.serial(8):
                if arrives:
                    barriers.arrive(state.stage)
                barriers.wait(state.stage, state.phase, "tester")
                state.advance()
            A[0] = state.stage + 10 * state.phase

    return main


def run_waiting_kernel(bounded: bool, arrives: bool = True) -> int:
    """Run it; returns what it left in memory: its last stage, and ten times its phase."""
    torch = GpuBackend().torch
    found = torch.zeros(32, dtype=torch.int32, device="cuda")
    kernel = compiled(lower_schedule(waiting_kernel(bounded, arrives), HOPPER, "ring"), require_compiler())
    executable(kernel)["main"](found)
    torch.cuda.synchronize()
    return found[0].item()
