"""Time stamps and bounded waits of scheduled rings: what is left, where, and that nothing else changes."""

from __future__ import annotations

import re

import numpy as np
import pytest
from tvm.s_tir import Schedule

from support.boxes import HOPPER
from support.cases import make_case, small_case
from tensorir_ladder.harness.build import Kernel, lower, lower_schedule
from tensorir_ladder.harness.emulation import EmulatorBackend
from tensorir_ladder.harness.timeline import decode
from tensorir_ladder.schedules.errors import IllegalPipeline
from tensorir_ladder.schedules.loops import stay_resident
from tensorir_ladder.schedules.pipeline import bound_waits, leave_stamps
from tensorir_ladder.schedules.stamps import Stamps
from tensorir_ladder.schedules.tiles import WarpgroupTile

K_TILES, STAGES = 7, 3
STAMPS = Stamps(block=1, room=20)
TILE = WarpgroupTile.parse("128x64x64/2x1")


def ring(step: int, variant: str | None = None, stamps: Stamps | None = None) -> Kernel:
    """A step's kernel of four blocks."""
    return lower(make_case(step, (256, 128, 64 * K_TILES), variant, tile=TILE, stages=STAGES), stamps)


def moments(kernel, roles: tuple[str, ...]) -> dict[tuple[str, str], dict[int, float]]:
    """Run a stamped kernel in the emulator, check its product, and return when each role did what."""
    random = np.random.default_rng(5)
    a, b = (random.integers(-2, 3, shape).astype("float16") for shape in ((256, 64 * K_TILES), (64 * K_TILES, 128)))
    out, words = np.full((256, 128), np.nan, "float16"), np.zeros(STAMPS.words(len(roles)), "int64")
    EmulatorBackend().load(kernel)(a, b, out, words)
    assert np.array_equal(out, (a.astype("float32") @ b.astype("float32")).astype("float16"))
    life = decode(words.tolist(), roles, STAMPS.room, 1.0)
    return {(track.role, track.event): dict(track.moments) for track in life.tracks}


@pytest.mark.emulator
@pytest.mark.parametrize(("step", "loading", "group"), [(11, "loads", "warpgroup"), (12, "producer", "consumer")])
def test_each_role_stamps_what_it_does_in_order(step: int, loading: str, group: str) -> None:
    kernel = ring(step, stamps=STAMPS)
    groups = (f"{group} 0", f"{group} 1")
    assert kernel.roles == (loading, *groups)
    found, tiles = moments(kernel, kernel.roles), range(K_TILES)
    assert set(found[loading, "load issued"]) == set(tiles)
    assert set(found[loading, "empty wait begins"]) == set(range(STAGES, K_TILES))
    for group in groups:
        steps = "full wait begins", "full wait ends", "mma issued", "mma retired"
        for number in tiles:
            moment = [found[group, event][number] for event in steps]
            assert moment == sorted(moment)
            assert found[loading, "load issued"][number] < moment[1]
        last = found[group, "mma retired"][K_TILES - 1]
        assert last < found[group, "epilogue begins"][0] < found[group, "results stored"][0]
        for number in range(STAGES, K_TILES):  # a stage is filled again once it is left
            assert found[group, "mma retired"][number - STAGES] < found[loading, "empty wait ends"][number]


@pytest.mark.emulator
def test_blocks_that_stay_count_on() -> None:
    """One block of all four tiles: numbers go on from tile to tile."""
    case = make_case(12, (256, 128, 64 * K_TILES), tile=TILE, stages=STAGES)
    sch = case.step.maker(case.variant)(case.problem, case.config)
    blocks = [sch.get_loops(block)[0] for block in sch.get_child_blocks(sch.get_sblock("root"))]
    stay_resident(sch, blocks[0], 1)
    stamps = Stamps(0, 40)
    kernel = lower_schedule(leave_stamps(sch, stamps), HOPPER, "stays")
    words = np.zeros(stamps.words(len(kernel.roles)), "int64")
    a, b = np.ones((256, 64 * K_TILES), "float16"), np.ones((64 * K_TILES, 128), "float16")
    out = np.full((256, 128), np.nan, "float16")
    EmulatorBackend().load(kernel)(a, b, out, words)
    assert (out == 64 * K_TILES).all()
    life = decode(words.tolist(), kernel.roles, stamps.room, 1.0)
    found = {(track.role, track.event): dict(track.moments) for track in life.tracks}
    assert set(found["consumer 0", "mma retired"]) == set(range(4 * K_TILES))
    assert set(found["producer", "empty wait begins"]) == set(range(STAGES, 4 * K_TILES))


@pytest.mark.parametrize("step", [11, 12])
def test_without_stamps_the_text_has_no_trace_of_them(step: int) -> None:
    plain = ring(step)
    assert plain.roles == ()
    assert not re.search(r"stamp|calibrate|clock64", plain.cuda)


@pytest.mark.parametrize("step", [11, 12])
def test_bounded_waits_say_who_waits(step: int) -> None:
    text = ring(step, "bounded").body
    roles = re.findall(r'mbarrier_wait_bounded\(.*"(\w+)", (?:\d|\()', text)
    assert set(roles) == {"producer", "consumer"}
    assert "mbarrier_wait(" not in text


def test_other_pipelines_are_refused() -> None:
    case = small_case(9, (64, 64, 64), arch="sm_90a")
    sch: Schedule = case.step.maker(case.variant)(case.problem, case.config)
    with pytest.raises(IllegalPipeline, match="whose copies are by TMA"):
        leave_stamps(sch, STAMPS)
    loops = [loop for block in sch.get_child_blocks(sch.get_sblock("root")) for loop in sch.get_loops(block)]
    with pytest.raises(IllegalPipeline, match="whose copies are by TMA"):
        bound_waits(sch, loops[-1])
