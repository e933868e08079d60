"""TMA loads, TMA stores and a producer warp on nests that are no plain matmul: right in the emulator."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tvm import te, tirx
from tvm.s_tir import Schedule

from support.boxes import ALONE, HOPPER
from tensorir_ladder.harness.build import lower_schedule
from tensorir_ladder.harness.emulation import EmulatorBackend
from tensorir_ladder.schedules.cycles import Planned
from tensorir_ladder.schedules.recipes import multiply_by_warpgroups
from tensorir_ladder.schedules.tiles import WarpgroupTile


def product(x: te.Tensor, y: te.Tensor, place: Callable[..., tuple], shape: tuple[int, ...], depth: int) -> te.Tensor:
    """Sums in float32 of x[i] * y[j] over k; ``place`` says i and j."""
    k = te.reduce_axis((0, depth), "k")

    def element(*at: tirx.Var) -> tirx.PrimExpr:
        i, j = place(*at, k)
        return te.sum(x[i].astype("float32") * y[j].astype("float32"), k)

    return te.compute(shape, element, "sums")


def scores() -> tirx.PrimFunc:
    """Queries times keys, for each head."""
    q, k = (te.placeholder((2, 136, 72), "float16", name) for name in "qk")
    return te.create_prim_func([q, k, product(q, k, lambda h, i, j, d: ((h, i, d), (h, j, d)), (2, 136, 136), 72)])


def pointwise() -> tirx.PrimFunc:
    """A convolution of one pixel, by weights that all images share."""
    x, w = te.placeholder((2, 100, 72), "float16", "x"), te.placeholder((136, 72), "float16", "w")
    return te.create_prim_func([x, w, product(x, w, lambda n, p, o, c: ((n, p, c), (o, c)), (2, 100, 136), 72)])


def experts() -> tirx.PrimFunc:
    """A product for each expert, with relu and a scale."""
    x, w = te.placeholder((2, 100, 200), "float16", "x"), te.placeholder((2, 200, 136), "float16", "w")
    sums = product(x, w, lambda e, i, j, k: ((e, i, k), (e, k, j)), (2, 100, 136), 200)
    zero, half = tirx.const(0, "float32"), tirx.const(0.5, "float32")
    made = te.compute((2, 100, 136), lambda *at: (te.max(sums(*at), zero) * half).astype("float16"), "made")
    return te.create_prim_func([x, w, made])


NESTS = {
    "scores": (scores, lambda q, k: q @ k.swapaxes(1, 2)),
    "pointwise": (pointwise, lambda x, w: x @ w.T),
    "experts": (experts, lambda x, w: np.maximum(x @ w, 0) / 2),
}


@pytest.mark.emulator
@pytest.mark.parametrize("own_warp", [False, True])
@pytest.mark.parametrize("name", NESTS)
def test_other_nests_are_right(name: str, own_warp: bool) -> None:
    function, expected = NESTS[name]
    sch = Schedule(function())
    tile = WarpgroupTile.parse("64x64x64/1x1")
    multiply_by_warpgroups(sch, sch.get_sblock("sums"), tile, 3, Planned(1, (False, False), True, ALONE, own_warp))
    kernel = lower_schedule(sch, HOPPER, name)
    assert "is_elected_to_store" in kernel.cuda
    random = np.random.default_rng(3)
    x, y, out = kernel.mod["main"].params
    given = [(random.integers(-4, 5, tuple(map(int, each.shape))) / 4).astype("float16") for each in (x, y)]
    found = np.full(tuple(map(int, out.shape)), np.nan, str(out.dtype))
    EmulatorBackend().load(kernel)(*given, found)
    assert np.array_equal(found, expected(*(each.astype("float32") for each in given)).astype(found.dtype))
