"""Rows that begin anywhere, shifted into place: right at every edge, nothing read or written beyond the matrices."""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import pytest
import tvm

from support.exact_products import NUMPY, drawn, expected, hold_caught
from tensorir_ladder.emulator import EmulatedProgram
from tensorir_ladder.kernels import tma
from tensorir_ladder.kernels.codegen.host_code import launch_plan
from tensorir_ladder.kernels.codegen.lowering import Generated, generate
from tensorir_ladder.kernels.fused_epilogue import PLAIN, Epilogue
from tensorir_ladder.kernels.shifting import SHIFTS, misfits, room_for, shared_bytes, shifting
from tensorir_ladder.kernels.tiles import ClusterTile
from tensorir_ladder.schedules.errors import IllegalPipeline, IllegalTile, IllegalWorkload
from tensorir_ladder.schedules.workloads import Matmul

TARGET = tvm.target.Target({"kind": "cuda", "arch": "sm_90a"})
SMALL, TALL, PARTS = "64x64x64/1x1/1x1", "128x64x64/2x1/1x1", "64x128x64/1x1/1x1/2"


def odd(problem: Matmul) -> str:
    """The operands whose rows TMA cannot step over where there are no gaps between them."""
    columns = zip("AB", (problem.k, problem.b_shape[1]))
    return "".join(name for name, each in columns if not tma.rows_fit(each, problem.dtype))


@cache
def lowered(
    problem: Matmul, tile: str, shifts: str = "", stages: int = 3, ahead: int = 2, finish: Epilogue = PLAIN
) -> Generated:
    """A kernel's text and launch; by default it shifts what TMA cannot step over."""
    given = ClusterTile.parse(tile), shifts or odd(problem), stages, ahead
    made = shifting(problem, *given, overlapped=True, finish=finish)
    return generate(tvm.IRModule({"main": made}), TARGET, "tirx")


def multiplied(
    problem: Matmul, found: Generated, a: np.ndarray, b: np.ndarray, *more: np.ndarray, text: str = "", seed: int = 0
) -> np.ndarray:
    """Multiply in the emulator, which watches the arrays' edges; of another text than the kernel's where given."""
    c = np.full((problem.m, problem.n), np.nan, NUMPY[problem.out_dtype])
    names, kept = ("A", "B", "C", *(["bias"] if more else [])), (a.copy(), b.copy())
    program = EmulatedProgram("shifting", text or found.cuda, (launch_plan(found),), names, operands=("A", "B"))
    program(a, b, c, *more, seed=seed)
    for given, before in zip((a, b), kept):
        np.testing.assert_array_equal(given, before)
    return c


def run(problem: Matmul, tile: str, seed: int = 0, text: str = "", **how: int) -> np.ndarray:
    """Multiply drawn operands."""
    return multiplied(problem, lowered(problem, tile, **how), *drawn(problem, seed), text=text, seed=seed)


SHAPES = [(1, 1, 1), (70, 100, 200), (65, 131, 264), (3, 67, 190), (130, 66, 127), (64, 128, 65), (9, 200, 257)]


@pytest.mark.sampled(3)
@pytest.mark.emulator
@pytest.mark.parametrize("layout", ["nn", "nt"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_edge_is_right(shape: tuple[int, int, int], layout: str) -> None:
    problem = Matmul(*shape, "float16", layout)
    if odd(problem):
        for seed in range(2):
            np.testing.assert_array_equal(run(problem, SMALL, seed), expected(problem, seed))


@pytest.mark.sampled(2)
@pytest.mark.emulator
@pytest.mark.parametrize("more", range(8))
def test_rows_of_every_length_modulo_16_bytes(more: int) -> None:
    """Both operands': the rows of a tile begin one to eight ways within 16 bytes."""
    problem = Matmul(67, 72 + more, 136 + more, "float16")
    np.testing.assert_array_equal(run(problem, SMALL, shifts="AB"), expected(problem))


@pytest.mark.sampled(3)
@pytest.mark.emulator
@pytest.mark.parametrize(
    "tile",
    [
        "64x128x64/1x1/1x1",
        TALL,
        "128x128x64/2x1/1x1",
        "192x64x64/3x1/1x1",
        "256x64x64/2x1/1x1",
        "64x256x64/1x1/1x1",
        "64x64x64/1x1/1x1/4",
        "128x64x64/2x1/1x1/3",
    ],
)
def test_every_tile_and_both_layouts(tile: str) -> None:
    for layout, shape in (("nn", (270, 301, 265)), ("nt", (270, 301, 263))):
        problem = Matmul(*shape, "float16", layout)
        np.testing.assert_array_equal(run(problem, tile, stages=2), expected(problem))


@pytest.mark.sampled(2)
@pytest.mark.emulator
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("tile", [SMALL, PARTS])
def test_results_of_every_dtype(tile: str, out_dtype: str) -> None:
    for n in (203, 136):  # rows that TMA cannot store, and that it can
        problem = Matmul(70, n, 157, "bfloat16", "nn", out_dtype)
        np.testing.assert_array_equal(run(problem, tile), expected(problem))


@pytest.mark.sampled(2)
@pytest.mark.emulator
@pytest.mark.parametrize(("stages", "ahead"), [(2, 2), (4, 2), (2, 4), (3, 8)])
def test_rings_of_every_length(stages: int, ahead: int) -> None:
    """Also of more k tiles ahead than there are."""
    for k in (66, 330):
        problem = Matmul(70, 99, k, "float16")
        np.testing.assert_array_equal(run(problem, SMALL, stages=stages, ahead=ahead), expected(problem))


@pytest.mark.sampled(2)
@pytest.mark.emulator
@pytest.mark.parametrize("first", [1, 3, 4, 6, 7])
def test_matrices_begin_at_any_element(first: int) -> None:
    """What lies before them in the same 16 bytes counts for nothing."""
    for problem in (Matmul(66, 99, 197, "float16"), Matmul(66, 98, 190, "float16", "nt"), Matmul(1, 3, 9, "float16")):
        found, (a, b) = lowered(problem, SMALL, "AB"), drawn(problem, first)
        text = found.cuda
        for name in "AB":
            assert f"&({name}_ptr[0])" in text
            text = text.replace(f"&({name}_ptr[0])", f"&({name}_ptr[{first}])")
        room = [np.concatenate([np.full(first, np.nan, np.float16), each.reshape(-1)]) for each in (a, b)]
        c = multiplied(problem, found, *room, text=text)
        np.testing.assert_array_equal(c, expected(problem, first))


@pytest.mark.emulator
def test_an_operand_in_longer_rows_is_loaded_by_tma() -> None:
    """As the call copies it: A's rows have 264 elements, of which the product has 259, and the map says so."""
    problem = Matmul(66, 130, 259, "float16")
    found = lowered(problem, SMALL, "B")
    a, b = drawn(problem, 3)
    longer = np.zeros((66, 264), np.float16)
    longer[:, :259] = a
    c = multiplied(problem, found, longer, b)
    np.testing.assert_array_equal(c, expected(problem, 3))


@pytest.mark.emulator
def test_sums_are_finished() -> None:
    problem, finish = Matmul(50, 75, 130, "float16"), Epilogue(0.5, "float32", "relu")
    a, b = drawn(problem, 5)
    bias = np.random.default_rng(6).integers(-9, 10, problem.n).astype(np.float32)
    sums = a.astype(np.float64) @ b.astype(np.float64)
    for tile in (SMALL, PARTS):
        c = multiplied(problem, lowered(problem, tile, finish=finish), a, b, bias)
        np.testing.assert_array_equal(c, np.maximum(0.5 * sums + bias, 0).astype(np.float16))


@pytest.mark.emulator
@pytest.mark.parametrize("layout", ["nn", "nt"])
def test_what_lies_beyond_the_reduction_counts_for_nothing(layout: str) -> None:
    """Where it is infinite, too: in the row behind."""
    problem = Matmul(66, 75, 189, "float16", layout)
    a, b = drawn(problem, 4)
    a[1, 0] = b[-1, -1] = np.inf
    wide = (each.astype(np.float64) for each in (a, b if layout == "nn" else b.T))
    with np.errstate(invalid="ignore"):
        wanted = np.matmul(*wide)
    assert 0 < np.isnan(wanted).sum() < wanted.size / 4
    found = lowered(problem, SMALL)
    assert (np.isnan(multiplied(problem, found, a, b)) == np.isnan(wanted)).all()
    masked = "true && left < 8"
    assert masked in found.cuda
    spoilt = multiplied(problem, found, a, b, text=found.cuda.replace(masked, "false"))
    assert (np.isnan(spoilt) != np.isnan(wanted)).any()


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("broken", "instead", "fault"),
    [
        ('"fence.proxy.async.shared::cta;"', '""', "missing proxy fence"),
        ("place + 16u <= end", "place < end", "out of bounds"),
        ("|| at >= end", "", "out of bounds"),
        ("make_uint4(0, 0, 0, 0)", "make_uint4(0x7fff7fff, 0, 0, 0)", ""),
        ("2 * word + 1 ?", "2 * word + 3 ?", ""),
        ("skew % 2 ?", "false ?", ""),
        ("at % 8 ^ warp", "at % 8", ""),
        ("cp.async.wait_group 1", "cp.async.wait_group 2", "race"),
    ],
)
def test_what_is_broken_is_caught(broken: str, instead: str, fault: str) -> None:
    """A fault that the emulator names, or else a wrong product."""
    problem = Matmul(70, 99, 197, "float16")
    text = lowered(problem, SMALL).cuda
    hold_caught(lambda spoilt: run(problem, SMALL, text=spoilt), expected(problem), text, broken, instead, fault)


@pytest.mark.parametrize(
    ("problem", "tile", "shifts", "more", "error", "said"),
    [
        (Matmul(64, 64, 65, "float16"), SMALL, "", {}, IllegalWorkload, "'A' | 'B' | 'AB'"),
        (Matmul(64, 64, 65, "float16"), SMALL, "C", {}, IllegalWorkload, "'C'"),
        (Matmul(64, 65, 64, "float16", "nn", "float64"), SMALL, "B", {}, IllegalWorkload, "float64"),
        (Matmul(64, 65, 64, "float32"), SMALL, "B", {}, IllegalTile, "float32"),
        (Matmul(64, 65, 64, "float16"), "64x64x64/1x1/2x1", "B", {}, IllegalTile, "2 blocks share loads"),
        (Matmul(64, 65, 64, "float16"), "64x192x64/1x1/1x1", "B", {}, IllegalTile, "equal share"),
        (Matmul(64, 65, 64, "float16"), "128x256x64/2x1/1x1", "B", {}, IllegalTile, "registers for one instruction"),
        (Matmul(64, 65, 64, "float16"), "256x128x64/2x1/1x1", "B", {"stages": 8}, IllegalTile, "shared memory"),
        (
            Matmul(64, 65, 64, "float16"),
            "256x128x64/2x1/1x1",
            "B",
            {"stages": 8},
            IllegalTile,
            "another tile, or fewer stages or k tiles ahead",
        ),
        (Matmul(7, 9, 129, "float16"), "64x72x64/1x1/1x1", "A", {}, IllegalTile, "last panel of 8 columns of a B"),
        (Matmul(7, 9, 129, "float16"), "64x32x64/1x1/1x1", "A", {}, IllegalTile, "last panel of 32 columns of a B"),
        (Matmul(64, 65, 64, "float16"), SMALL, "B", {"stages": 1}, IllegalPipeline, "stages of a TMA ring .got 1"),
        (Matmul(64, 65, 64, "float16"), SMALL, "B", {"ahead": 1}, IllegalPipeline, "k tiles on their way .got 1"),
        (Matmul(64, 65, 64, "float16"), SMALL, "B", {"ahead": 9}, IllegalPipeline, "k tiles on their way .got 9"),
        (Matmul(64, 65, 64, "float16"), PARTS, "B", {}, IllegalTile, "more parts"),
        (Matmul(64, 65, 2**22 - 1, "float16"), SMALL, "A", {}, IllegalWorkload, "elements"),
    ],
)
def test_what_it_does_not_do_is_refused(
    problem: Matmul, tile: str, shifts: str, more: dict[str, int], error: type[Exception], said: str
) -> None:
    given = {"stages": 2, "ahead": 2} | more
    with pytest.raises(error, match=said):
        shifting(problem, ClusterTile.parse(tile), shifts, **given)


def test_a_residual_is_refused() -> None:
    problem = Matmul(64, 65, 64, "float16")
    with pytest.raises(IllegalWorkload, match="residual"):
        shifting(problem, ClusterTile.parse(SMALL), "B", 2, 2, finish=Epilogue(residual=True))


def test_a_room_is_one_that_fits() -> None:
    problem = Matmul(300, 301, 333, "float16")
    for tile in (SMALL, "128x128x64/2x1/1x1", "256x128x64/2x1/1x1"):
        parsed = ClusterTile.parse(tile)
        for shifts in ("A", "B", "AB"):
            room = room_for(problem, parsed, shifts)
            assert room is None or not misfits(problem, parsed, shifts, *room)
    assert room_for(problem, ClusterTile.parse("128x256x64/2x1/1x1"), "B") is None


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("layout", "width", "shifts"),
    [("nt", 32, "A"), ("nt", 72, "A"), ("nt", 96, "AB"), ("nn", 32, "B"), ("nn", 72, "AB")],
)
def test_columns_that_are_no_whole_panels(layout: str, width: int, shifts: str) -> None:
    """TMA loads them where B's rows run along k; others are shifted."""
    problem = Matmul(70, 104, 136, "float16", layout)
    tile = f"64x{width}x64/1x1/1x1"
    np.testing.assert_array_equal(run(problem, tile, shifts=shifts, stages=2), expected(problem))


@pytest.mark.parametrize("layout", ["nn", "nt"])
@pytest.mark.parametrize("tile", [SMALL, "64x96x64/1x1/1x1", "128x96x64/2x1/1x1", PARTS, "128x128x64/2x1/1x1"])
def test_shared_memory_is_counted_as_it_is_taken(tile: str, layout: str) -> None:
    """Of B's rows along k more is counted than is taken where columns are no whole panels."""
    problem, parsed = Matmul(300, 301, 1333, "float16", layout), ClusterTile.parse(tile)
    for shifts, room in itertools.product(SHIFTS, ((2, 2), (2, 3), (3, 3))):
        if not misfits(problem, parsed, shifts, *room):
            taken = launch_plan(lowered(problem, tile, shifts, *room)).shared_bytes
            counted = shared_bytes(problem, parsed, shifts, *room)
            assert taken == counted or (taken < counted and layout == "nt" and parsed.block_n % 64 > 0)
