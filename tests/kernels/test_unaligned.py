"""Products whose rows begin anywhere: right at every edge, and nothing read or written beyond the matrices."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import tvm

from support.exact_products import NUMPY, drawn, expected, hold_caught
from tensorir_ladder.emulator import EmulatedProgram, KernelFault
from tensorir_ladder.kernels.codegen.host_code import launch_plan
from tensorir_ladder.kernels.codegen.lowering import Generated, generate
from tensorir_ladder.kernels.fused_epilogue import PLAIN, Epilogue
from tensorir_ladder.kernels.tiles import HopperTile
from tensorir_ladder.kernels.unaligned import Sharing, unaligned
from tensorir_ladder.kernels.wgmma import WarpgroupProduct
from tensorir_ladder.schedules.errors import IllegalTile, IllegalWorkload
from tensorir_ladder.schedules.workloads import Matmul

TARGET = tvm.target.Target({"kind": "cuda", "arch": "sm_90a"})
SMALL, WIDE = "64x64x128/1x1", "128x128x64/2x1"


@cache
def lowered(problem: Matmul, tile: str, finish: Epilogue = PLAIN) -> Generated:
    """A kernel's text and launch."""
    made = unaligned(problem, HopperTile.parse(tile), overlapped=True, finish=finish)
    return generate(tvm.IRModule({"main": made}), TARGET, "tirx")


def run(
    problem: Matmul, tile: str, seed: int = 0, text: str = "", begins: tuple[int, int, int] = (0, 0, 0)
) -> np.ndarray:
    """Multiply in the emulator, which watches the arrays' edges; of another text than the kernel's where given.

    Matrices begin so many elements into their memory, whose first ones must stay as they are.
    """
    found, names = lowered(problem, tile), ("A", "B", "C")
    a, b = drawn(problem, seed)
    c = np.full((problem.m, problem.n), np.nan, NUMPY[problem.out_dtype])
    placed = zip((a, b, c), begins)
    lain = [np.concatenate([np.full(first, 77, each.dtype), each.reshape(-1)]) for each, first in placed]
    text = text or found.cuda
    for name, first in zip(names, begins):
        assert not first or f"&({name}_ptr[0])" in text
        text = text.replace(f"&({name}_ptr[0])", f"&({name}_ptr[{first}])")
    EmulatedProgram("unaligned", text, (launch_plan(found),), names, operands=names[:2])(*lain, seed=seed)
    for given, memory, first in zip((a, b), lain, begins):
        np.testing.assert_array_equal(memory[first:], given.reshape(-1))
    assert (lain[2][: begins[2]] == 77).all()
    return lain[2][begins[2] :].reshape(c.shape)


SHAPES = [(1, 1, 1), (70, 99, 117), (65, 130, 64), (129, 66, 8), (3, 201, 71), (130, 7, 128), (64, 128, 33)]


@pytest.mark.emulator
@pytest.mark.parametrize("layout", ["nn", "nt"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_edge_is_right(shape: tuple[int, int, int], layout: str) -> None:
    problem = Matmul(*shape, "float16", layout)
    for seed in range(2):
        np.testing.assert_array_equal(run(problem, SMALL, seed), expected(problem, seed))


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("layout", "broken", "instead"),
    [
        ("nn", "& masks[word]", ""),
        ("nn", "ALONG_K || row < rows", "true"),
        ("nt", "& masks[word]", ""),
    ],
)
def test_what_lies_beyond_the_reduction_counts_for_nothing(layout: str, broken: str, instead: str) -> None:
    """Where it is infinite, too: in the row of A behind, or in B's first piece, which is loaded in place of others.

    Its 16 elements are shifted by up to 7.
    """
    problem = Matmul(66, 75, 61, "float16", layout)
    a, b = drawn(problem, 4)
    a[1, 0] = b[0, 7] = np.inf
    wide = (each.astype(np.float64) for each in (a, b if layout == "nn" else b.T))
    with np.errstate(invalid="ignore"):
        wanted = np.matmul(*wide)
    assert 0 < np.isnan(wanted).sum() < wanted.size / 4
    text = lowered(problem, SMALL).cuda
    assert broken in text
    assert (np.isnan(_finished(problem, text, a, b)) == np.isnan(wanted)).all()
    spoilt = _finished(problem, text.replace(broken, instead), a, b)
    assert (np.isnan(spoilt) != np.isnan(wanted)).any()


def _finished(problem: Matmul, text: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Multiply these operands in the emulator."""
    names, c = ("A", "B", "C"), np.full((problem.m, problem.n), np.nan, NUMPY[problem.out_dtype])
    plan = launch_plan(lowered(problem, SMALL))
    EmulatedProgram("unaligned", text, (plan,), names, operands=names[:2])(a, b, c, seed=1)
    return c


@pytest.mark.emulator
@pytest.mark.parametrize("begins", [(1, 0, 0), (0, 3, 0), (0, 0, 1), (5, 7, 3)])
def test_matrices_begin_at_any_element(begins: tuple[int, int, int]) -> None:
    for problem in (Matmul(66, 99, 70, "float16", "nn"), Matmul(66, 98, 70, "float16", "nt")):
        np.testing.assert_array_equal(run(problem, SMALL, 3, begins=begins), expected(problem, 3))


@pytest.mark.emulator
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("tile", [WIDE, "64x128x128/1x2", "128x64x128/2x1", "128x64x128/1x1", "64x64x256/1x1"])
def test_tiles_and_dtypes(tile: str, out_dtype: str) -> None:
    for n in (203, 131):  # of the second the last columns are those of a tile's first box alone
        problem = Matmul(150, n, 61, "bfloat16", "nn", out_dtype)
        np.testing.assert_array_equal(run(problem, tile), expected(problem))


@pytest.mark.emulator
def test_sums_are_finished() -> None:
    problem, finish = Matmul(50, 75, 30, "float16", "nn"), Epilogue(0.5, "float32", "relu")
    found = lowered(problem, SMALL, finish)
    names = ("A", "B", "C", "bias")
    program = EmulatedProgram("finished", found.cuda, (launch_plan(found),), names, operands=("A", "B", "bias"))
    a, b = drawn(problem, 5)
    bias = np.random.default_rng(6).integers(-9, 10, problem.n).astype(np.float32)
    c = np.full((problem.m, problem.n), np.nan, np.float16)
    program(a, b, c, bias, seed=1)
    sums = a.astype(np.float64) @ b.astype(np.float64)
    np.testing.assert_array_equal(c, np.maximum(0.5 * sums + bias, 0).astype(np.float16))


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("broken", "instead", "fault"),
    [
        ('"fence.proxy.async.shared::cta;"', '""', "missing proxy fence"),
        ("(unsigned)(place - least) <= (unsigned)room", "true", "out of bounds"),
        ("first + i < extent", "true", "out of bounds"),
        ("|| row + own >= rows", "", "out of bounds|stored twice"),
        ("skew % 2 * 16", "0", ""),
        ("skew & 4 ?", "skew & 8 ?", ""),
        ("at % 8 ^ own % 8", "at % 8", ""),
        ("lane / 4 ^ own % 8", "lane / 4", ""),
        ("(unsigned long long)to & 2u", "0u", "misaligned"),
        ("lane == 31 && left > 63", "false", ""),
        ("begins = at == 0", "begins = false", ""),
        ("at + 1 < left", "at < left", "stored twice|out of bounds"),
    ],
)
def test_what_is_broken_is_caught(broken: str, instead: str, fault: str) -> None:
    """A fault that the emulator names, or else a wrong product."""
    problem = Matmul(70, 99, 117, "float16", "nn")
    text = lowered(problem, SMALL).cuda
    hold_caught(lambda spoilt: run(problem, SMALL, text=spoilt), expected(problem), text, broken, instead, fault)


@pytest.mark.emulator
def test_boxes_beyond_the_last_column_are_not_stored() -> None:
    problem, tile = Matmul(70, 131, 33, "float16", "nn"), "64x128x64/1x2"
    text = lowered(problem, tile).cuda
    assert "if (left <= 0) return;" in text
    with pytest.raises(KernelFault, match=r"stored twice|out of bounds"):
        run(problem, tile, text=text.replace("if (left <= 0) return;", ""))


@pytest.mark.emulator
def test_a_barrier_that_is_missing_is_a_race() -> None:
    problem = Matmul(130, 99, 57, "float16", "nn")
    text = lowered(problem, WIDE).cuda
    for barrier in ("tvm_builtin_cuda_cta_sync();", "tvm_builtin_ptx_bar_sync_count_sync("):
        at = text.index(barrier, text.index("main_kernel"))
        end = text.index(";", at) + 1
        with pytest.raises(KernelFault, match=r"race|missing proxy fence"):
            run(problem, WIDE, text=text[:at] + text[end:])


@pytest.mark.parametrize(
    ("problem", "tile", "error", "said"),
    [
        (Matmul(64, 64, 129, "float16"), SMALL, IllegalTile, "k up to 128"),
        (Matmul(64, 64, 64, "float16"), "64x96x64/1x1", IllegalTile, "multiples of 64"),
        (Matmul(64, 64, 64, "float16"), "256x256x256/2x1", IllegalTile, "shared memory"),
        (Matmul(64, 64, 64, "float16"), "64x64x320/1x1", IllegalTile, "box|threads"),
        (Matmul(64, 64, 64, "float16"), "64x192x64/1x1", IllegalTile, "no number of threads"),
        (Matmul(64, 64, 64, "float16", "nn", "float64"), SMALL, IllegalWorkload, "float64"),
        (Matmul(64, 64, 64, "float32"), SMALL, IllegalTile, "float32"),
    ],
)
def test_what_it_does_not_do_is_refused(problem: Matmul, tile: str, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        unaligned(problem, HopperTile.parse(tile))


def test_threads_have_the_registers_of_an_instruction() -> None:
    """Of 256 columns it takes 154: 512 threads would have 128, and the compiler would refuse it."""
    tile = HopperTile.parse("128x256x64/2x1")
    sharing = Sharing.of(WarpgroupProduct.of(Matmul(300, 301, 60, "float16"), tile), tile)
    assert (sharing.threads, sharing.rounds) == (256, 2)


def test_a_residual_is_refused() -> None:
    with pytest.raises(IllegalWorkload, match="residual"):
        unaligned(Matmul(64, 64, 64, "float16"), HopperTile.parse(SMALL), finish=Epilogue(residual=True))
