"""What a trace names is known to TVM as soon as its group is imported."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import tvm
from tvm.s_tir import Schedule

from tensorir_ladder.schedules.pipeline import pipeline_loop
from tensorir_ladder.schedules.tensor_cores import tensorize_contraction, use_instruction
from tensorir_ladder.schedules.tiles import TensorCoreTile
from tensorir_ladder.schedules.workloads import Matmul

FRESH = """
import json, sys, tvm
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import Trace
import tensorir_ladder.schedules.tensor_cores
given = json.load(sys.stdin)
again = Schedule(tvm.ir.load_json(given["start"]))
Trace.apply_json_to_schedule(tvm.ir.load_json(given["trace"]), again)
tvm.ir.assert_structural_equal(again.mod, tvm.ir.load_json(given["done"]))
heavy = {"mma", "warpgroup"} & {name.rpartition(".")[2] for name in sys.modules if "tensorir_ladder" in name}
assert not heavy, heavy
"""


@pytest.mark.parametrize(("dtype", "layout", "scope"), [("float16", "nt", "shared.dyn"), ("bfloat16", "nn", "shared")])
def test_a_trace_with_tensor_cores_is_replayed_in_a_fresh_process(dtype: str, layout: str, scope: str) -> None:
    start = tvm.IRModule({"main": Matmul(64, 64, 128, dtype, layout).prim_func()})
    sch = Schedule(start)
    tile = TensorCoreTile(block=(32, 32, 32), warp=(16, 32))
    made = tensorize_contraction(sch, sch.get_sblock("matmul"), tile, scope=scope)
    pipeline_loop(sch, made.loops.k_outer, 2, True)
    use_instruction(sch, made.loops, made.loads, made.instruction)
    given = {"start": start, "trace": sch.trace.as_json(), "done": sch.mod}
    text = json.dumps({name: tvm.ir.save_json(value) for name, value in given.items()})
    done = subprocess.run([sys.executable, "-c", FRESH], input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
