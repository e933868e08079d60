"""Products scheduled for mma.sync, and what a cubin says of a thread's stack."""

from __future__ import annotations

import re
import shutil
import subprocess

from tvm.s_tir import Schedule

from tensorir_ladder.schedules.pipeline import pipeline_loop, required_tir_pipeline
from tensorir_ladder.schedules.tensor_cores import TensorizedContraction, tensorize_contraction, use_instruction
from tensorir_ladder.schedules.tiles import TensorCoreTile

TILE = TensorCoreTile(block=(64, 64, 32), warp=(32, 32))


def stack_bytes(cubin: bytes) -> int | None:
    """A thread's stack frame, as the cubin states it; None where no cuobjdump is at hand."""
    tool = shutil.which("cuobjdump")
    if tool is None:
        return None
    listing = subprocess.run([tool, "-res-usage", "-"], input=cubin, capture_output=True, check=False).stdout.decode()
    found = re.search(r"STACK:(\d+)", listing)
    return int(found.group(1)) if found else None


def tensorize_pipelined(
    sch: Schedule, stages: int, name: str = "matmul", instruct: bool = True
) -> TensorizedContraction:
    """A contraction on tensor cores, with everything on."""
    contraction = tensorize_contraction(sch, sch.get_sblock(name), TILE, hide_reads=stages > 1)
    if stages > 1:
        pipeline_loop(sch, contraction.loops.k_step, 2, False)
        form = {"one_barrier": True, "unroll_ring": True, "fill_ahead": True}
        plan = pipeline_loop(sch, contraction.loops.k_outer, stages, True, **form)
        assert plan.tir_pipeline == required_tir_pipeline(sch.mod)
    if instruct:
        use_instruction(sch, contraction.loops, contraction.loads, contraction.instruction)
    return contraction
