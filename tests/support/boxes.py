"""Step 10's kernels by boxes, with plans of a test's own."""

from __future__ import annotations

from support.cases import config
from tensorir_ladder.harness.build import Lowered, lower_schedule
from tensorir_ladder.harness.machines import machine_for
from tensorir_ladder.schedules.cost import BoxPlan
from tensorir_ladder.schedules.tiles import WarpgroupTile
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.steps import step10_wgmma

HOPPER = machine_for("sm_90a")
ALONE, BELOW, BESIDE = (1, 1), (2, 1), (1, 2)


def kernel_of(
    monkeypatch, problem: Matmul, tile: str, stages: int, cluster=ALONE, parts=1, copied=(False, False), variant="boxes"
) -> Lowered:
    """Step 10's kernel with a plan of its own instead of the cost model's."""
    monkeypatch.setattr(step10_wgmma, "box_plan_of", lambda *_: BoxPlan(copied, cluster))
    monkeypatch.setattr(step10_wgmma, "parts_of", lambda *_: parts)
    sch = step10_wgmma.schedule(problem, config(variant, WarpgroupTile.parse(tile), stages))
    lowered = lower_schedule(sch, HOPPER, f"{problem.shape} {tile} {cluster} {parts} {copied}")
    assert lowered.launch.get("clusterCtaIdx.x", 1) == cluster[0] * cluster[1]
    return lowered
