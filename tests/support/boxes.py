"""Step 10's kernels by boxes, with plans of a test's own."""

from __future__ import annotations

from dataclasses import replace

from support.cases import config
from tensorir_ladder.harness.build import Lowered, lower_schedule
from tensorir_ladder.harness.machines import machine_for
from tensorir_ladder.schedules.cycles import Planned
from tensorir_ladder.schedules.tiles import WarpgroupTile
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.steps import step10_wgmma

HOPPER = machine_for("sm_90a")
ALONE, BELOW, BESIDE = (1, 1), (2, 1), (1, 2)


def kernel_of(
    problem: Matmul,
    tile: str,
    stages: int,
    cluster: tuple[int, int] = ALONE,
    parts: int = 1,
    copied: tuple[bool, bool] = (False, False),
    variant: str = "boxes",
    own_warp: bool = True,
) -> Lowered:
    """Step 10's kernel with a plan of its own instead of the cost model's, but for a warp of its own where it may."""
    made, boxes = config(variant, WarpgroupTile.parse(tile), stages), variant == "boxes"
    own_warp = own_warp and boxes and made.tile.leaves_a_warp
    plans = step10_wgmma.STEP.variant(variant).plans
    planned = Planned(parts, copied, boxes, cluster, own_warp) if plans else None
    sch = step10_wgmma.schedule(problem, replace(made, planned=planned))
    lowered = lower_schedule(sch, HOPPER, f"{problem.shape} {tile} {cluster} {parts} {copied}")
    assert lowered.launch.get("clusterCtaIdx.x", 1) == cluster[0] * cluster[1]
    return lowered
