"""Sharing work out among workers: every k tile of every tile once, by the kernel's own arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.cases import hopper
from tensorir_ladder.kernels.stream_k import StreamKPlan, plan_for, plan_stream_k
from tensorir_ladder.kernels.tiles import RoleTile
from tensorir_ladder.schedules.cost import stream_k_cycles
from tensorir_ladder.schedules.workloads import Matmul

BLOCK = (128, 256, 64)
H200 = 132  # multiprocessors
RATES = hopper().rates


@dataclass(frozen=True)
class Piece:
    """The k tiles that a worker multiplies at once."""

    tile: int
    first: int
    count: int


def pieces(plan: StreamKPlan, worker: int) -> list[Piece]:
    """A worker's pieces, as :class:`kernels.stream_k.Pieces` emits them."""
    found = []
    if worker < plan.helpers:
        begin, end = plan.begin(worker), plan.begin(worker + 1)
        while end > begin:
            owned = (end - 1) // plan.cut
            first = max(begin - owned * plan.cut, 0)
            found.append(Piece(plan.first_owned + owned, first, end - owned * plan.cut - first))
            end -= found[-1].count
    found += [Piece(tile, 0, plan.k_tiles) for tile in range(worker, plan.first_owned, plan.workers)]
    if not plan.helpers and plan.first_owned + worker < plan.tiles:
        found.append(Piece(plan.first_owned + worker, 0, plan.k_tiles))
    elif worker >= plan.helpers > 0 and plan.first_owned + worker - plan.helpers < plan.tiles:
        found.append(Piece(plan.first_owned + worker - plan.helpers, plan.cut, plan.k_tiles - plan.cut))
    return found


def helpers_of(plan: StreamKPlan, owned: int) -> list[int]:
    """The helpers that an owner hears, as the kernel's loop finds them."""
    found, helper = [], plan.first_helper(owned)
    while plan.begin(helper) < (owned + 1) * plan.cut:
        found.append(helper)
        helper += 1
    return found


def check(plan: StreamKPlan) -> None:
    """Each k tile is multiplied once; owners hear exactly who helped them; nobody shares a place for sums."""
    multiplied: dict[int, list[tuple[int, int]]] = {}
    helped: dict[int, list[int]] = {}
    places: list[int] = []
    for worker in range(plan.workers):
        for piece in pieces(plan, worker):
            assert piece.count >= min(plan.shortest, plan.k_tiles)
            multiplied.setdefault(piece.tile, []).append((piece.first, piece.first + piece.count))
            if piece.tile >= plan.first_owned and worker < plan.helpers:
                helped.setdefault(piece.tile - plan.first_owned, []).append(worker)
                places.append(plan.piece(worker, piece.tile - plan.first_owned))
    assert sorted(multiplied) == list(range(plan.tiles))
    for parts in map(sorted, multiplied.values()):  # each begins where the one before ended
        assert [*(first for first, _ in parts), plan.k_tiles] == [0, *(end for _, end in parts)]
    assert len(set(places)) == len(places)
    assert all(0 <= place < plan.pieces for place in places)
    for owned in range(plan.owned if plan.helpers else 0):
        assert helpers_of(plan, owned) == sorted(helped[owned])


@settings(max_examples=400, deadline=None)
@given(
    tiles=st.integers(1, 700),
    k_tiles=st.integers(1, 300),
    workers=st.sampled_from([1, 2, 16, 66, 114, H200]),
    shortest=st.sampled_from([1, 2, 4]),
    block=st.sampled_from([(128, 256, 64), (128, 128, 64), (64, 64, 64)]),
)
def test_every_k_tile_is_multiplied_once(
    tiles: int, k_tiles: int, workers: int, shortest: int, block: tuple[int, int, int]
) -> None:
    plan = plan_stream_k(tiles, k_tiles, block, workers, min(shortest, k_tiles), RATES)
    check(plan)
    whole = plan_stream_k(tiles, k_tiles, block, workers, min(shortest, k_tiles), RATES, cuts=False)
    assert stream_k_cycles(plan, block, RATES) <= stream_k_cycles(whole, block, RATES)
    assert whole.helpers == 0


@settings(max_examples=400, deadline=None)
@given(owned=st.integers(1, 100), spare=st.integers(1, 100), cut=st.integers(4, 120), rest=st.integers(4, 40))
def test_any_even_cut_is_shared_out_once(owned: int, spare: int, cut: int, rest: int) -> None:
    helpers = min(spare, owned)
    check(StreamKPlan(owned, cut + rest, owned + helpers, 4, helpers, cut))


def test_a_last_wave_is_cut_where_that_pays() -> None:
    tile = RoleTile.parse("128x256x64/2x1")
    cut = plan_for(Matmul(8192, 8192, 8192, "float16"), tile, hopper(H200))
    assert (cut.waves, cut.owned, cut.helpers) == (15, 68, 64)
    assert 50 < cut.cut < 66
    few = plan_for(Matmul(1024, 1024, 14336, "float16"), RoleTile.parse("128x128x64/2x1"), hopper(H200))
    assert (few.waves, few.owned, few.helpers, few.cut) == (0, 64, 64, 112)
    # 16 helpers would have to hand over the sums of 116 tiles: that takes longer than it saves.
    assert plan_for(Matmul(4096, 4096, 4096, "float16"), tile, hopper(H200)).helpers == 0
    assert plan_for(Matmul(1024, 1024, 1024, "float16"), RoleTile.parse("64x128x64/1x1"), hopper(H200)).helpers == 0


@pytest.mark.parametrize("blocks", [1, 2])
def test_clusters_are_workers(blocks: int) -> None:
    plan = plan_for(Matmul(4096, 4096, 4096, "float16"), RoleTile.parse("128x256x64/2x1"), hopper(H200), blocks)
    assert (plan.tiles, plan.workers) == (512 // blocks, H200 // blocks)


@settings(max_examples=200, deadline=None)
@given(
    tiles=st.integers(1, 2000),
    k_tiles=st.integers(1, 200),
    block=st.sampled_from([(64, 64, 64), (128, 128, 64), BLOCK]),
    workers=st.integers(2, 140),
    shortest=st.sampled_from([1, 2, 4]),
    slow=st.sampled_from([1, 8]),
)
def test_the_cut_is_the_first_of_the_cheapest(
    tiles: int, k_tiles: int, block: tuple[int, int, int], workers: int, shortest: int, slow: int
) -> None:
    rates = replace(RATES, hand_over_bytes_per_cycle=RATES.hand_over_bytes_per_cycle / slow)
    plan = plan_stream_k(tiles, k_tiles, block, workers, shortest, rates)
    if 0 < plan.helpers < plan.owned:  # else a tile is cut into even parts
        cuts = [replace(plan, cut=cut) for cut in range(shortest, k_tiles - shortest + 1)]
        assert plan == min(cuts, key=lambda other: stream_k_cycles(other, block, rates))
