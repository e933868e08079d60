"""Forms of the call's kernels that no step has by default, whole: what emulator and compute-sanitizer are asked about.

``PYTHONPATH=tests ladder sanitize --kernels support.call_kernels`` looks at them.
"""

from __future__ import annotations

import tvm
from tvm import tirx

from support.cases import hopper
from tensorir_ladder.emulator import EmulatedProgram
from tensorir_ladder.kernels.codegen.host_code import launch_plan
from tensorir_ladder.kernels.codegen.lowering import generate
from tensorir_ladder.kernels.kernel_form import KernelForm
from tensorir_ladder.kernels.persistent import persistent
from tensorir_ladder.kernels.shifting import room_for, shifting
from tensorir_ladder.kernels.swapped import swapped
from tensorir_ladder.kernels.tiles import ClusterTile, HopperTile, RoleTile
from tensorir_ladder.kernels.unaligned import unaligned
from tensorir_ladder.kernels.warp_specialized import warp_specialized
from tensorir_ladder.lab.sanitizer.subjects import SanitizedKernel
from tensorir_ladder.schedules.workloads import Matmul

# A step, its variant, a ragged product and its layout, tile, stages, and multiprocessors where blocks stay on few.
FORMS = {
    "exchanged operands": (12, "roles", (13, 264, 520), "nt", "16x128x64/1x2/1", 3, 0),
    "exchanged operands, parts added up in a cluster": (12, "roles", (13, 136, 520), "nn", "16x64x64/1x1/3", 3, 0),
    "exchanged operands, loads shared both ways": (12, "roles", (40, 264, 520), "nt", "16x64x64/1x1/1/2x2", 4, 0),
    "exchanged operands, loads shared by rows": (12, "roles", (40, 264, 392), "nn", "16x128x64/1x2/1/1x4", 3, 0),
    "exchanged operands, k tiles of two panels": (12, "roles", (40, 136, 520), "nt", "72x64x128/1x1/1/4x1", 3, 0),
    "exchanged operands, three warpgroups": (12, "roles", (150, 200, 392), "nn", "144x192x64/1x3/1/1x2", 3, 0),
    "exchanged operands, rows that TMA cannot step over": (12, "roles", (21, 131, 264), "nt", "24x64x64/1x1/1", 3, 0),
    "exchanged operands, parts whose blocks share loads": (
        12,
        "roles",
        (40, 264, 520),
        "nt",
        "16x64x64/1x1/2/2x2",
        3,
        0,
    ),
    "a panel in part": (12, "roles", (70, 104, 264), "nn", "64x40x64/1x1", 3, 0),
    "a panel and a part": (12, "roles", (70, 216, 264), "nt", "64x80x64/1x1", 3, 0),
    "exchanged operands, loads of eight blocks": (12, "roles", (280, 136, 520), "nt", "72x64x64/1x1/1/4x2", 3, 0),
    "upright, parts added up in a cluster": (12, "roles", (70, 136, 520), "nn", "64x72x64/1x1/1x1/3", 3, 0),
    "upright, parts of blocks that share": (12, "roles", (150, 136, 520), "nn", "64x72x64/1x1/2x1/3", 3, 0),
    "upright, results in the ring's memory": (12, "roles", (250, 296, 520), "nn", "192x136x64/3x1/2x1", 4, 0),
    "upright, rows stored from the ring's memory": (12, "roles", (250, 331, 392), "nt", "192x160x64/3x1/1x2", 5, 0),
    "upright, loads shared both ways": (12, "roles", (250, 216, 264), "nn", "64x72x64/1x1/2x2", 3, 0),
    "upright, shares of a panel in part": (12, "roles", (300, 184, 264), "nn", "64x120x64/1x1/4x1", 3, 0),
    "upright, k tiles of two panels": (12, "roles", (300, 104, 520), "nn", "64x72x128/1x1/4x1", 3, 0),
    "blocks that stay, helpers' sums": (13, "stream", (180, 200, 1032), "nt", "64x88x64/1x1", 3, 5),
    "blocks that stay, whole tiles": (13, "whole", (180, 440, 392), "nn", "64x104x64/1x1", 3, 2),
    "two boxes that share columns, rows stored one by one": (12, "roles", (70, 131, 264), "nt", "64x80x64/1x1", 3, 0),
    "blocks that stay, results that leave at once": (13, "whole", (390, 360, 392), "nn", "192x176x64/3x1", 4, 2),
    "blocks that stay, cut, results at once": (13, "stream", (390, 360, 392), "nt", "192x176x64/3x1", 4, 3),
    "blocks that stay, rows stored one by one": (13, "whole", (180, 331, 392), "nt", "64x104x64/1x1", 3, 2),
    "long rows stored in pieces": (12, "roles", (70, 331, 264), "nt", "64x256x64/1x1", 3, 0),
    "blocks that stay, long rows stored in pieces": (13, "whole", (250, 331, 392), "nt", "128x136x64/2x1", 3, 2),
    "exchanged operands, rows of warpgroups side by side": (12, "roles", (40, 331, 264), "nt", "24x192x64/1x3/1", 3, 0),
    "blocks that stay, in pairs": (13, "multicast", (250, 440, 264), "nn", "64x104x64/1x1", 3, 4),
    "blocks that stay, loads shared by rows": (13, "stream", (250, 200, 392), "nt", "64x64x64/1x1/2x1", 3, 4),
    "blocks that stay, loads shared by columns": (13, "stream", (250, 200, 392), "nn", "64x64x64/1x1/1x2", 3, 4),
}
# Of rows that begin anywhere, which no step's kernel reads: a ragged product, its layout and a tile.
SHORT = {
    "rows as they lie": ((70, 99, 117), "nn", "64x64x128/1x1"),
    "rows as they lie, two warpgroups": ((150, 131, 61), "nt", "128x128x64/2x1"),
}
# And of a long reduction: tile, and the operands that are shifted.
SHIFTED = {
    "rows of both shifted": ((70, 99, 197), "nn", "64x64x64/1x1/1x1", "AB"),
    "rows of B shifted, parts added up in a cluster": ((150, 131, 328), "nn", "128x128x64/2x1/1x1/3", "B"),
    "rows of B along k shifted": ((70, 136, 197), "nt", "64x64x64/1x1/1x1/2", "AB"),
    "rows of A shifted, three warpgroups": ((250, 136, 261), "nn", "192x64x64/3x1/1x1", "A"),
}


def subject_names() -> list[str]:
    """Name all of them."""
    return [*FORMS, *SHORT, *SHIFTED]


def subject(name: str) -> SanitizedKernel:
    """Make the kernel of one of these names, as the call launches it; KeyError for another."""
    if name in SHORT:
        shape, layout, tile = SHORT[name]
        problem = Matmul(*shape, "float16", layout)
        return _whole(name, problem, unaligned(problem, HopperTile.parse(tile), overlapped=True))
    if name in SHIFTED:
        shape, layout, text, shifts = SHIFTED[name]
        problem, tile = Matmul(*shape, "float16", layout), ClusterTile.parse(text)
        return _whole(name, problem, shifting(problem, tile, shifts, *room_for(problem, tile, shifts), overlapped=True))
    number, variant, shape, layout, text, stages, multiprocessors = FORMS[name]
    problem, tile, early = Matmul(*shape, "float16", layout), RoleTile.parse(text), KernelForm(overlapped=True)
    if number == 12:
        return _whole(name, problem, (swapped if tile.swapped else warp_specialized)(problem, tile, stages, early))
    more = {"blocks": 2 if variant == "multicast" else 1, "stream_k": variant == "stream"}
    return _whole(name, problem, persistent(problem, tile, stages, early, machine=hopper(multiprocessors), **more))


def _whole(name: str, problem: Matmul, function: tirx.PrimFunc) -> SanitizedKernel:
    generated, names = generate(tvm.IRModule({"main": function}), hopper().target, "tirx"), ("A", "B", "C")
    program = EmulatedProgram(name, generated.cuda, (launch_plan(generated),), names, operands=names[:2])
    return SanitizedKernel(name, program, problem, whole=True)
