"""Kernels that are broken on purpose, one change each, and how the emulator finds them.

Steps' kernels and the ring kernel (:mod:`support.ring_kernel`), as tables of what is replaced by what. With whole
kernels beside them they are what ``ladder sanitize`` looks at.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from support.cases import SMALL_TILES, STEPS, make_case, small_case
from support.ring_kernel import edited, ring_program, ring_text
from tensorir_ladder.emulator import EmulatedProgram
from tensorir_ladder.emulator.source import PREAMBLE_END
from tensorir_ladder.harness.build import Kernel, lower
from tensorir_ladder.harness.emulation import emulated
from tensorir_ladder.lab.sanitizer.subjects import SanitizedKernel
from tensorir_ladder.lab.traces.probe import PREAMBLE
from tensorir_ladder.schedules.workloads import Matmul

WRONG = "wrong result"
DEEP = (128, 64, 768)  # of the ring kernel: twelve k tiles, four times around
COPY_WAIT = r"tvm_builtin_ptx_cp_async_wait_group_async_wait_group_(\d)\(\);"
COMMIT = r"tvm_builtin_ptx_cp_async_commit_group_async_commit_group\(\);"
SYNC = r"__syncthreads\(\);"


class Broken(NamedTuple):
    """A step's kernel with the ``which``-th match of a pattern replaced, and how that is found."""

    step: int
    variant: str | None
    pattern: str
    replacement: str
    which: int
    found: str


def changed(match: re.Match[str], replacement: str) -> str:
    """Replace a match: "+1" is a wait that leaves one group more in flight, "off" a descriptor's other bits."""
    if replacement == "+1":
        return f'asm volatile("cp.async.wait_group {int(match.group(1)) + 1};");'
    if replacement == "off":
        name, bits = re.match(r"(d\w) = (\d+)ull", match.group()).groups()
        return f"{name} = {int(bits) + {'da': -(1 << 32), 'db': 1 << 62}[name]}ull"
    return match.expand(replacement)


BROKEN = {
    "step 2, no barrier before the reads": Broken(2, None, SYNC, "", 1, "race"),
    "step 2, no barrier before the next tile": Broken(2, None, SYNC, "", 0, "race"),
    "step 3, no barrier before the reads": Broken(3, None, SYNC, "", 1, "race"),
    "step 4, no barrier before the next tile": Broken(4, None, SYNC, "", 0, "race"),
    "step 4, the last k tile dropped": Broken(4, None, r"k_0 < 7;", "k_0 < 6;", 0, WRONG),
    "step 4, a vector beyond the tile": Broken(
        4, None, r"(float4\*\)\(A_pad_shared_ptr) \+", r"\1 + 128 +", 0, "out of bounds"
    ),
    "step 4, a vector from between": Broken(
        4, None, r"(float4\*\)\(A_pad_shared_ptr) \+", r"\1 + 1 +", 0, "misaligned"
    ),
    "step 4, a row too many": Broken(4, None, r"< 33\)", "< 99)", 0, "out of bounds"),
    "step 5, a wait left out": Broken(5, "async", COPY_WAIT, "", 0, "race"),
    "step 5, wait count + 1": Broken(5, "async", COPY_WAIT, "+1", 0, "race"),
    "step 5, the last wait count + 1": Broken(5, "async", COPY_WAIT, "+1", 2, "race"),
    "step 5, a commit left out": Broken(5, "async", COMMIT, "", 1, "race"),
    "step 5, no barrier before the next copies": Broken(5, "async", SYNC, "", 1, "race"),
    "step 5, one barrier, none": Broken(5, "one_barrier", SYNC, "", 0, "race"),
    "step 5, sync, no barrier": Broken(5, "sync", SYNC, "", 1, "race"),
    "step 5, the ring one stage short": Broken(5, "async", r"\(k_0 \+ 2\) % 3", "(k_0 + 2) % 2", 1, "race"),
    "step 5, registers stored before the barrier": Broken(5, "register_staged", SYNC, "", 0, "race"),
    "step 5, the mask of a row forgotten": Broken(5, "async", r"< 33\)", "< 99)", 0, "out of bounds"),
    "step 6, no barrier": Broken(6, "full", SYNC, "", 2, "race"),
    "step 7, no barrier": Broken(7, None, SYNC, "", 1, "race"),
    "step 7, a slice left out": Broken(7, None, r"^.*local_ptr\[\w+\] \+ \(\(float\*\)buf_dyn.*$", "", -1, WRONG),
    "step 7, a wait left out": Broken(7, None, COPY_WAIT, "", 1, "race"),
    "step 7, copies into the stage that is read": Broken(7, None, r"\(ax5_0 \+ 2\) % 3", "ax5_0 % 3", 1, "race"),
    "step 7, wait count + 1": Broken(7, None, COPY_WAIT, "+1", 0, "race"),
    "step 8, no barrier": Broken(8, None, SYNC, "", 1, "race"),
    "step 8, swizzle off by one": Broken(8, None, r"(tensor_core_load\(.*?)>> 1\)", r"\1>> 2)", 0, WRONG),
    "step 9, the last wait left out": Broken(9, "fragments", COPY_WAIT, "", -1, "race"),
    "step 9, wait count + 1": Broken(9, "shared", COPY_WAIT, "+1", 2, "race"),
    "step 9, no barrier": Broken(9, "fragments", SYNC, "", 2, "race"),
    "step 9, tf32, no barrier": Broken(9, "tf32", SYNC, "", 1, "race"),
    "step 10, no wait for the copies": Broken(10, "rows", COPY_WAIT, "", 2, "race"),
    "step 10, wait count + 1": Broken(10, "rows", COPY_WAIT, "+1", 3, "race"),
    "step 10, no barrier": Broken(10, "rows", SYNC, "", 2, "race"),
    "step 10, a multiplication not retired": Broken(10, "rows", r"pipeline_retire_\d\(\);", "", 0, "race"),
    "step 10, the last not retired": Broken(
        10, "rows", r"pipeline_retire_all_\d+\(.*?\);", "", -1, "register in flight"
    ),
    "step 10, no proxy fence": Broken(
        10, "rows", r'asm volatile\("fence\.proxy\.async.*?;" ::: "memory"\);', "", 0, "missing proxy fence"
    ),
    "step 10, no wgmma.fence": Broken(
        10, "rows", r'asm volatile\("wgmma\.fence.*?;" ::: "memory"\);', "", 0, "missing wgmma.fence"
    ),
    "step 10, a descriptor's stride off by one": Broken(10, "rows", r"da = \d+ull", "off", 0, WRONG),
    "step 10, the swizzle of another width": Broken(10, "rows", r"db = \d+ull", "off", 0, "race"),
}


@cache
def kernel_of(step: int, variant: str | None) -> Kernel:
    """Lower a step's kernel of many k tiles, and of ragged rows and columns."""
    depth = 200 if step > 7 else 100
    return lower(
        small_case(step, (64, 64, 512) if step == 10 else (33, 35, depth), variant, stages=4 if step == 10 else 3)
    )


def broken_step(name: str) -> tuple[EmulatedProgram, Kernel]:
    """Break the kernel of that name in BROKEN; also the whole one. AssertionError where it has no such place."""
    broken = BROKEN[name]
    kernel = kernel_of(broken.step, broken.variant)
    start = kernel.cuda.index("#define ushort unsigned short")
    matches = list(re.finditer(broken.pattern, kernel.cuda[start:], re.M))
    assert matches, f"{name}: the text has no such place"
    match = matches[broken.which]
    change = changed(match, broken.replacement)
    text = kernel.cuda[: start + match.start()] + change + kernel.cuda[start + match.end() :]
    return replace(emulated(kernel), cuda=text), kernel


# The warp-specialized kernel: what, replaced by what, how it is found.
BROKEN_RING = {
    "the producer begins in the wrong phase": (r"uint phase = 1", "uint phase = 0", "deadlock"),
    "the consumers begin in the wrong phase": (r"uint phase = 0", "uint phase = 1", "race"),
    "the phase never flips": (r"if \(s == 3 - 1\) phase \^= 1;", "", None),
    "an arrival too many is expected": (r"init\(empty \+ 8 \* s, 4", "init(empty + 8 * s, 1 + 4", "deadlock"),
    "an arrival too few is expected": (r"init\(empty \+ 8 \* s, 4", "init(empty + 8 * s, 3", None),
    "bytes too many are expected": (r"16384\);\n", "16400);\n", "deadlock"),
    "bytes too few are expected": (r"16384\);\n", "16368);\n", None),
    "the mbarriers are used before they are": (r'asm volatile\("barrier\.cluster\.\w+\.aligned;"\);', "", None),
    "no fence behind the mbarriers": (
        r'asm volatile\("fence\.mbarrier_init[^;]*;" ::: "memory"\);',
        "",
        "missing proxy fence",
    ),
    "no wgmma.fence": (r'asm volatile\("wgmma\.fence[^;]*;" ::: "memory"\);', "", "missing wgmma.fence"),
    "stages are given back while wgmma reads": (
        r"wgmma\.wait_group\.sync\.aligned 1",
        "wgmma.wait_group.sync.aligned 2",
        None,
    ),
    "the last wgmma is not awaited": (
        r'asm volatile\("wgmma\.wait_group\.sync\.aligned 0;" ::: "memory"\);',
        "",
        "register in flight",
    ),
    "no proxy fence before the store": (
        r'asm volatile\("fence\.proxy\.async\.shared::cta;" ::: "memory"\);',
        "",
        "missing proxy fence",
    ),
    "no barrier before the store": (r'asm volatile\("bar\.sync 1, 128;" ::: "memory"\);', "", "race"),
    "a barrier of too many threads": (r"bar\.sync 1, 128", "bar.sync 1, 160", "deadlock"),
    "the store is not awaited": (
        r'asm volatile\("cp\.async\.bulk\.wait_group\.read 0;" ::: "memory"\);',
        "",
        "unawaited",
    ),
    "swizzle of the output off by one": (r"at \^ row % 8", "at ^ (row + 1) % 8", WRONG),
    "the last k tile dropped": (r"k < tiles", "k < tiles - 1", None),
    "both drop the last k tile": (r"k < tiles", "k < tiles - 1", WRONG),
    "accumulators not zeroed": (r"k \+ step != 0", "1", WRONG),
    "a step of the descriptor off by one": (r"b \+ 2 \* step", "b + step", WRONG),
    "a box beyond shared memory": (
        r"out = start \+ 3 \* 16384 \+ 1024",
        "out = start + 3 * 16384 + 2048",
        "out of bounds",
    ),
    "lanes part before stmatrix": (r"for \(int piece", "if (threadIdx.x % 32) for (int piece", None),
}


def broken_ring(name: str) -> EmulatedProgram:
    """Break the ring kernel as BROKEN_RING says of that name, for a product of shape DEEP."""
    pattern, replacement, _ = BROKEN_RING[name]
    count = 2 if name == "both drop the last k tile" else 1
    return ring_program(DEEP, text=edited(ring_text(), pattern, replacement, count=count))


BROKEN_CLUSTER = {
    "a block is left out of the multicast": (r"\(1 << 2\) - 1", "1 << rank", "deadlock"),
    "stages are given back to one block only": (
        r"for \(int r = 0; r < 2; \+\+r\)",
        "for (int r = 0; r < 1; ++r)",
        "deadlock",
    ),
    "the other block's half is missing": (r"rank \* \(64 / 2\)", "0", WRONG),
    "a rank beyond the cluster": (r"% 3\), r\)", "% 3), r + 1)", "cluster"),
    "arrivals of its own block only": (r"init\(empty \+ 8 \* s, 4 \* 2\)", "init(empty + 8 * s, 4)", None),
}


def broken_cluster(name: str) -> EmulatedProgram:
    """Break the ring kernel as BROKEN_CLUSTER says of that name, in clusters of two blocks."""
    pattern, replacement, _ = BROKEN_CLUSTER[name]
    return ring_program(DEEP, 3, 2, edited(ring_text(3, 2), pattern, replacement))


RAGGED = (130, 72, 200)
WHOLE = [
    (number, variant)
    for number, step in STEPS.items()
    if 5 <= number <= 13
    for variant in (step.default_variant(), *(each.name for each in step.variants if each.debug))
]


def whole_step(number: int, variant: str) -> SanitizedKernel:
    """Take a step's kernel as it is, of a small ragged product."""
    step = STEPS[number]
    kind = step.tiles_of(variant).kind
    tile = kind.parse("64x64x64/1x1") if step.is_explicit(variant) else SMALL_TILES[kind]
    lowered = lower(make_case(number, RAGGED, variant, tile=tile))
    return SanitizedKernel(f"step {number}, {variant}, whole", emulated(lowered), lowered.case.problem, whole=True)


def subject_names() -> list[str]:
    """Name all broken kernels, and whole ones."""
    rings = [f"ring, {name}" for name in BROKEN_RING] + [f"cluster, {name}" for name in BROKEN_CLUSTER]
    whole = [f"step {number}, {variant}, whole" for number, variant in WHOLE]
    return [*BROKEN, *rings, *whole, "ring, whole", "cluster, whole"]


def subject(name: str) -> SanitizedKernel:
    """Make the kernel of one of these names; KeyError for another."""
    if name in BROKEN:
        program, kernel = broken_step(name)
        return SanitizedKernel(name, program, kernel.case.problem)
    kind, _, rest = name.partition(", ")
    if found := re.fullmatch(r"step (\d+), (\w+), whole", name):
        return whole_step(int(found.group(1)), found.group(2))
    if rest == "whole":
        program = ring_program(DEEP, 3, {"ring": 1, "cluster": 2}[kind])
    else:
        program = {"ring": broken_ring, "cluster": broken_cluster}[kind](rest)
    compilable = PREAMBLE + program.cuda.removeprefix(PREAMBLE_END)
    return SanitizedKernel(
        name, replace(program, cuda=compilable), Matmul(*DEEP, "float16", "nt"), whole=rest == "whole"
    )
