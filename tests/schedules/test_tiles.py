"""Tiles: named fields in code, one text on the command line, and what is neither is refused."""

from __future__ import annotations

from dataclasses import fields

import pytest

from support.cases import SMALL_TILES, STEPS
from tensorir_ladder.kernels.blackwell import BlackwellTile
from tensorir_ladder.kernels.tiles import ClusterTile, HopperTile, RoleTile, SwappedTile
from tensorir_ladder.schedules.errors import IllegalTile
from tensorir_ladder.schedules.tiles import BlockTile, TensorCoreTile, ThreadTile, WarpgroupTile, WarpTile

NAMED: dict[str, BlockTile] = {
    "64x32x16/8x4": ThreadTile(block=(64, 32, 16), thread=(8, 4)),
    "128x64x16/32x64/8x16/2": WarpTile(block=(128, 64, 16), warp=(32, 64), thread=(8, 16), slices=2),
    "128x64x32/64x32": TensorCoreTile(block=(128, 64, 32), warp=(64, 32)),
    "256x128x64/4x1": WarpgroupTile(block=(256, 128, 64), warpgroups=(4, 1)),
    "128x256x64/2x1": HopperTile(block=(128, 256, 64), warpgroups=(2, 1)),
    "128x256x64/1x2": RoleTile(block=(128, 256, 64), warpgroups=(1, 2)),
    "16x128x64/1x2/4": SwappedTile(block=(16, 128, 64), warpgroups=(1, 2), parts=4),
    "64x72x64/1x1/4x2": ClusterTile(block=(64, 72, 64), warpgroups=(1, 1), cluster=(4, 2)),
    "72x64x64/1x1/1/2x4": SwappedTile(block=(72, 64, 64), warpgroups=(1, 1), parts=1, cluster=(2, 4)),
    "128x192x64": BlackwellTile(block=(128, 192, 64)),
}
FAMILIES = list(dict.fromkeys(type(tile) for tile in NAMED.values()))
each_family = pytest.mark.parametrize("family", FAMILIES)


def refused(make, *arguments, **fields_given) -> IllegalTile:
    """The refusal of what is no tile."""
    with pytest.raises(IllegalTile) as caught:
        make(*arguments, **fields_given)
    return caught.value


@pytest.mark.parametrize("step", STEPS.values(), ids=lambda step: step.name)
def test_the_text_of_every_tile_of_every_step_is_read_as_that_tile(step) -> None:
    tiles = step.tiles
    for tile in {tiles.default.tile, *tiles.best, *tiles.tuning, *(choice.tile for choice in tiles.choices)}:
        assert tiles.kind.parse(str(tile)) == tile
        assert type(tiles.kind.parse(f" {tile}\n")) is tiles.kind is type(tile)


def test_fields_are_named_and_stand_in_the_text_in_their_order() -> None:
    for text, tile in NAMED.items():
        assert str(tile) == text
        assert type(tile).parse(text) == tile
        assert (tile.block_m, tile.block_n, tile.block_k) == tile.block
        assert eval(repr(tile)) == tile  # a tile of this test
        assert hash(tile) == hash(type(tile).parse(text))
    assert {type(tile) for tile in STEPS[10].tiles.tuning} == {WarpgroupTile}
    assert WarpgroupTile.FORM == HopperTile.FORM == RoleTile.FORM, "the same text for steps 10 to 13"
    assert WarpTile(block=(16, 32, 16), warp=(16, 32), thread=(4, 4)).slices == 1


@each_family
def test_an_example_is_a_tile_of_its_form_and_sound(family: type[BlockTile]) -> None:
    tile = family.parse(family.EXAMPLE)
    assert str(tile) == family.EXAMPLE
    assert tile.misfits() == []
    assert family.FORM.count("/") + 1 == len(fields(family))


@each_family
def test_other_texts_are_refused_with_the_form(family: type[BlockTile]) -> None:
    good = family.EXAMPLE
    first = good.split("x")[0]
    others = [
        other.EXAMPLE
        for other in FAMILIES
        if other.FORM.count("/") != family.FORM.count("/")
        and not issubclass(other, family)
        and not (family is RoleTile and ClusterTile._match(other.EXAMPLE))  # a tile of warps reads as one of a cluster
    ]
    broken = [
        "",
        "x",
        good + ("/1/1" if family is RoleTile else "/1"),  # with one field more it is a SwappedTile
        good + "x1",
        "1/" + good,
        good.replace(first, "1.5", 1),
        good.replace(first, "-8", 1),
    ]
    broken += [
        good.replace(first, "1234567890" * 2, 1),
        good.replace("x", "X"),
        good.replace("x", "×"),
        good.replace("x", " x "),
    ]
    for text in [*others, *broken]:
        refusal = refused(family.parse, text)
        assert (refusal.value, refusal.limit) == (repr(text), family.FORM)
        assert family.EXAMPLE in refusal.remedy


def test_a_tile_of_warps_is_no_tile_of_roles() -> None:
    """Its text has as many numbers as a ClusterTile's: what they would mean is refused."""
    found = "; ".join(RoleTile.parse(WarpTile.EXAMPLE).misfits())
    assert "limit 3" in found
    assert "32 k steps" in found or "32 steps" in found


@each_family
def test_zero_is_below_1_as_text_too(family: type[BlockTile]) -> None:
    refusal = refused(family.parse, family.EXAMPLE.replace(family.EXAMPLE.split("x")[1], "0", 1))
    assert (refusal.value, refusal.limit) == (0, "at least 1")


@each_family
@pytest.mark.parametrize(
    "block",
    [(64, 64), (64, 64, 64, 1), 64, (64.0, 64, 64), ("64", 64, 64), (True, 64, 64), None, [64, 64, 64]],
    ids=str,
)
def test_other_fields_are_refused_with_the_form(family: type[BlockTile], block: object) -> None:
    others = {name: value for name, value in vars(family.parse(family.EXAMPLE)).items() if name != "block"}
    refusal = refused(family, block=block, **others)
    assert refusal.limit == family.FORM
    assert f"block={block!r}" in str(refusal.value)
    assert refusal.remedy


@pytest.mark.parametrize("size", [0, -4])
def test_extents_below_1_are_refused(size: int) -> None:
    for given in ({"block": (64, size, 16), "thread": (4, 4)}, {"block": (64, 64, 16), "thread": (4, size)}):
        refusal = refused(ThreadTile, **given)
        assert (refusal.value, refusal.limit) == (size, "at least 1")
    assert refused(WarpTile, block=(16, 32, 16), warp=(16, 32), thread=(4, 4), slices=size).value == size


def test_small_tiles_of_the_tests_are_sound() -> None:
    assert all(tile.misfits() == [] for tile in SMALL_TILES.values())
