"""Kernels whose launches overlap: their blocks begin and end without fences, and their loops compute nothing twice."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import tvm

from support.broken_texts import hold_caught
from support.cases import hopper
from tensorir_ladder.kernels.codegen.lowering import Generated, generate
from tensorir_ladder.kernels.kernel_form import KernelForm
from tensorir_ladder.kernels.persistent import persistent
from tensorir_ladder.kernels.swapped import swapped
from tensorir_ladder.kernels.tiles import RoleTile
from tensorir_ladder.kernels.warp_specialized import warp_specialized
from tensorir_ladder.schedules.workloads import Matmul

FENCED = "tvm_builtin_cuda_cluster_sync();"  # ptxas makes a fence for the whole GPU of its release
ARRIVE = "tvm_builtin_ptx_barrier_cluster_arrive_cluster_arrive_relaxed_aligned();"
WAIT = "tvm_builtin_ptx_barrier_cluster_wait_cluster_wait_acquire_aligned();"
INITIALIZED = "tvm_builtin_ptx_fence_mbarrier_init_mbarrier_init_release_cluster();"
HINT = "L2__cache_hint"


def made(tile: str, problem: Matmul, stages: int = 3, kept: bool = False, overlapped: bool = True) -> Generated:
    """Lower step 12's kernel of a tile, or step 13's."""
    parsed, form = RoleTile.parse(tile), KernelForm(overlapped=overlapped)
    if kept:
        function = persistent(problem, parsed, stages, form, machine=hopper(8))
    else:
        function = (swapped if parsed.swapped else warp_specialized)(problem, parsed, stages, form)
    return generate(tvm.IRModule({"main": function}), hopper().target, "tirx")


def body(generated: Generated) -> str:
    """The kernel's own text, without the functions that it calls."""
    return generated.cuda[generated.cuda.rindex("__global__") :]


SHARED = {"64x72x64/1x1/2x2": False, "72x64x64/1x1/1/4x2": False, "64x72x64/1x1/2x1": True}


@pytest.mark.parametrize(("tile", "kept"), SHARED.items())
def test_clusters_begin_and_end_without_a_fence(tile: str, kept: bool) -> None:
    """Either role says that it has left before results are stored; steps keep what was measured."""
    problem = Matmul(300, 280, 520, "float16")
    text, step = body(made(tile, problem, kept=kept)), body(made(tile, problem, kept=kept, overlapped=False))
    assert (text.count(ARRIVE), text.count(WAIT), text.count(FENCED)) == (3, 2, 0)
    assert (step.count(ARRIVE), step.count(WAIT), step.count(FENCED)) == (0, 0, 2)
    consumers = text[text.index("wgmma_wait_group_wait_group_sync_aligned_0") :]
    assert consumers.index(ARRIVE) < consumers.index("fence_proxy_proxy_async_shared__cta")  # before results leave
    assert consumers.index("bulk_wait_group_read_0") < consumers.index(WAIT)


@pytest.mark.parametrize(
    ("tile", "begins"),
    [("64x72x64/1x1/1x1/3", 0), ("72x64x64/1x1/3", 0), ("64x72x64/1x1/2x1/3", 1), ("72x64x64/1x1/2/2x2", 1)],
)
def test_sums_of_parts_are_fenced_and_what_reads_them_is_not(tile: str, begins: int) -> None:
    """Of producers, and of consumers. Blocks that share loads also begin together; that they end they say no more."""
    text = body(made(tile, Matmul(200, 136, 520, "float16")))
    assert (text.count(FENCED), text.count(ARRIVE), text.count(WAIT)) == (2, 2 + begins, 2 + begins)


@pytest.mark.parametrize(
    ("tile", "shape", "kept", "once"),
    [
        ("64x72x64/1x1/1x1", (300, 72, 264), False, "a"),  # one column of tiles
        ("64x72x64/1x1/1x2", (300, 144, 264), False, "a"),  # one of clusters
        ("64x72x64/1x1/1x1", (300, 80, 264), False, ""),
        ("64x72x64/1x1/1x1", (64, 280, 264), False, "b"),
        ("64x72x64/1x1/1x1", (64, 72, 264), False, "ab"),
        ("24x64x64/1x1/1", (24, 280, 264), False, "b"),
        ("24x64x64/1x1/1", (25, 64, 264), False, "a"),
        ("24x64x64/1x1/3", (24, 280, 264), False, "b"),  # each part once
        ("64x72x64/1x1/2x1", (128, 280, 264), True, "b"),
        ("64x64x64/1x1", (300, 64, 264), True, "a"),
        ("64x64x64/1x1", (300, 65 * 8, 264), True, ""),
    ],
)
def test_what_is_read_once_leaves_the_cache_first(tile: str, shape: tuple[int, ...], kept: bool, once: str) -> None:
    problem = Matmul(*shape, "float16", "nt")
    text = body(made(tile, problem, kept=kept))
    loads = [line for line in text.splitlines() if "g2s" in line]
    for operand in "ab":
        hinted = [HINT in line for line in loads if f"(&({operand}_map))" in line]
        assert hinted
        assert set(hinted) == {operand in once}
    assert HINT not in made(tile, problem, kept=kept, overlapped=False).cuda


@pytest.mark.parametrize(
    ("tile", "kept"),
    [*SHARED.items(), ("64x72x64/1x1/1x1", False), ("64x72x64/1x1/2x2/2", False), ("64x72x64/1x1", True)],
)
def test_no_division_is_left_to_the_producers_loop(tile: str, kept: bool) -> None:
    """The raster's, by a height that is known at run time only; the compiler would repeat it for each load."""
    text = body(made(tile, Matmul(2000, 1000, 520, "float16"), kept=kept))
    loop = text[text.index("mbarrier_arrive_expect_tx") :]
    loop = loop[: loop.index("fill_slot_ptr[0] = (fill_slot_ptr[0] + 1)")]
    assert "held_row" in loop
    assert "held_column" in loop
    assert not re.search(r" [/%] ", loop)


# What the emulator finds where something is missing


DRAINED = re.compile(r"for \(int \w+ = 0; (\w+) < 2; \+\+\1\) \{")  # of three stages, the last is not said to be empty


def undrained(text: str) -> str:
    """Let producers end without what consumers of other blocks say."""
    assert len(DRAINED.findall(text)) == 1
    return DRAINED.sub("for (int none = 0; none < 0; ++none) {", text)


def without_last(what: str, text: str, put: str = ";") -> str:
    """Take the last of some statements out, or put another in its place."""
    return put.join(text.rsplit(what, 1))


# What is broken, in a reduction of so many steps, and what the emulator says. Of one k tile nothing is said to be read:
# only the cluster's barrier then tells that what a block loaded for others has arrived.
BROKEN: dict[str, tuple[Callable[[str], str], int, str]] = {
    "barriers are used before they are there": (lambda text: text.replace(INITIALIZED, ";"), 520, "race|initial"),
    "a block ends while others arrive there": (undrained, 520, "threads have all ended|unawaited"),
    "a block ends while it loads for others": (lambda text: without_last(WAIT, text), 64, "a load for another block"),
    "empty is said to the first block alone": (lambda text: text.replace("(arrives ? rank : 0)", "(0)"), 520, "race"),
    "a consumer does not say that it is done": (lambda text: without_last(ARRIVE, text), 520, "barrier"),
    "a consumer says twice that it is done": (lambda text: without_last(ARRIVE, text, ARRIVE * 2), 520, "barrier"),
    "descriptors are not moved": (
        lambda text: text.replace("descriptor + units", "descriptor"),
        520,
        "Mismatched|race",
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.emulator
@pytest.mark.parametrize("tile", ["64x72x64/1x1/2x2", "72x64x64/1x1/1/2x2"])
@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_caught(name: str, tile: str) -> None:
    change, k, fault = BROKEN[name]
    problem = Matmul(130, 144, k, "float16", "nt")
    hold_caught(made(tile, problem), change, problem, fault, right=9, orders=60)
