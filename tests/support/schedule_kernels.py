"""Forms of the schedules' kernels off the squares, whole: what emulator and compute-sanitizer are asked about.

``PYTHONPATH=tests ladder sanitize --kernels support.schedule_kernels`` looks at them.
"""

from __future__ import annotations

from dataclasses import replace

from support.cases import STEPS, make_case
from tensorir_ladder.harness.build import lower
from tensorir_ladder.harness.emulation import emulated
from tensorir_ladder.lab.sanitizer.subjects import SanitizedKernel
from tensorir_ladder.schedules.cycles import Planned

BOXES, OWN_WARP = Planned(boxes=True), Planned(boxes=True, own_warp=True)
A_BY_BOXES = Planned(1, (True, False), boxes=True)
BOTH, B_FIRST = (True, True), Planned(1, (False, True))
# A step, its variant, a ragged product and its layout, tile, stages, and what is planned beside them.
FORMS = {
    "warps, the last k tile cut": (7, "fitted", (70, 132, 72), "nn", "64x128x32/32x64/8x8/1", 2, Planned()),
    "warps, cut, three stages": (7, "fitted", (70, 132, 84), "nn", "64x128x16/32x64/8x8/1", 3, Planned()),
    "warps, cut, slices in turn": (7, "fitted", (70, 68, 75), "nn", "64x64x32/32x64/8x8/2", 2, Planned()),
    "warps, cut, four slices in turn": (7, "fitted", (70, 68, 101), "nn", "64x64x32/32x64/8x8/4", 3, Planned()),
    "warps, cut, parts of a reduction": (7, "fitted", (40, 68, 266), "nn", "32x64x32/32x64/8x8/4", 2, Planned(3)),
    "warps, cut, parts without slices": (7, "fitted", (70, 132, 266), "nn", "64x128x16/32x64/8x8/1", 3, Planned(2)),
    "warps, cut, B turned": (7, "fitted", (70, 67, 75), "nt", "64x64x32/32x64/8x8/2", 2, Planned()),
    "warps, cut, copies in front": (7, "fitted", (70, 67, 75), "nn", "64x64x16/32x64/8x8/2", 2, Planned(1, BOTH)),
    "warps, one short k tile": (7, "fitted", (40, 67, 21), "nn", "32x64x32/32x64/8x8/4", 2, Planned()),
    "warps, eight slices": (7, "fitted", (20, 33, 150), "nn", "16x32x64/16x32/4x4/8", 3, Planned()),
    "warpgroups, ragged": (10, "fitted", (70, 104, 200), "nn", "64x80x64/1x1", 4, Planned()),
    "warpgroups, rows of B copied in front": (10, "fitted", (70, 99, 200), "nn", "64x80x64/1x1", 4, B_FIRST),
    "warpgroups, parts of a reduction": (10, "fitted", (130, 72, 520), "nt", "64x64x64/1x1", 4, Planned(3)),
    "warpgroups, copies in front": (10, "fitted", (150, 200, 328), "nn", "128x96x64/2x1", 3, Planned(1, BOTH)),
    "boxes": (10, "boxes", (150, 136, 264), "nn", "128x72x64/2x1", 4, BOXES),
    "boxes, a warp of their own": (10, "boxes", (150, 136, 264), "nt", "64x72x64/1x1", 6, OWN_WARP),
    "boxes, parts of a reduction": (10, "boxes", (70, 136, 520), "nn", "64x72x64/1x1", 4, OWN_WARP._replace(parts=3)),
    "boxes, shared by rows": (10, "boxes", (250, 136, 392), "nn", "64x72x64/1x1", 4, OWN_WARP._replace(cluster=(2, 1))),
    "boxes, shared by columns": (10, "boxes", (70, 264, 392), "nt", "64x72x64/1x1", 4, BOXES._replace(cluster=(1, 2))),
    "boxes, rows of A copied in front": (10, "boxes", (70, 104, 200), "nn", "64x72x64/1x1", 4, A_BY_BOXES),
    "boxes, operands exchanged": (10, "boxes", (40, 264, 392), "nn", "24x128x64swapped/1x2", 5, OWN_WARP),
    "boxes, operands exchanged, shared": (
        10,
        "boxes",
        (40, 264, 392),
        "nt",
        "24x64x64swapped/1x1",
        5,
        BOXES._replace(cluster=(2, 1)),
    ),
}


def subject_names() -> list[str]:
    """Name all of them."""
    return list(FORMS)


def subject(name: str) -> SanitizedKernel:
    """Make the kernel of one of these names, with those in front of it and behind it; KeyError for another."""
    number, variant, shape, layout, text, stages, planned = FORMS[name]
    tiles = {str(each.tile): each.tile for each in STEPS[number].tiles_of(variant).choices}
    case = replace(make_case(number, shape, variant, layout=layout, tile=tiles[text], stages=stages), planned=planned)
    return SanitizedKernel(name, emulated(lower(case)), case.problem, whole=True)
