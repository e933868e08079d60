"""The contraction rule: right at every range's edge, by the engine that the target and the dtype call for."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import te, tirx
from tvm.target import Target

from support.functions import check_function
from tensorir_ladder.emulator import EmulatedProgram
from tensorir_ladder.harness.execution import numpy_dtype
from tensorir_ladder.kernels.codegen.host_code import read_host
from tensorir_ladder.kernels.codegen.lowering import generate
from tensorir_ladder.kernels.codegen.toolchain import Compiler, arch_flags, run_nvcc
from tensorir_ladder.relax.rules.contraction import RANGES, Contraction
from tensorir_ladder.relax.rules.normal_form import product_of
from tensorir_ladder.relax.rules.rule import HOW, NotTaken
from tensorir_ladder.schedules.cost import assumed_machine, contraction_cycles
from tensorir_ladder.schedules.tiles import Choice, WarpgroupTile
from tensorir_ladder.schedules.workloads import conv2d_nhwc

HOPPER, AMPERE, TURING = (Target({"kind": "cuda", "arch": arch}) for arch in ("sm_90a", "sm_80", "sm_75"))
Size = int | str  # an extent, or the name of one that only run time knows


def product(
    m: Size,
    n: Size,
    k: Size,
    dtype: str = "float16",
    *,
    batch: Size = 0,
    a_by_rows: bool = True,
    b_by_columns: bool = True,
    epilogue: bool = False,
) -> tirx.PrimFunc:
    """A (batched) product A·B or A·Bᵀ, summed in float32; with max(x + bias, 0) behind it."""
    known: dict[str, tirx.Var] = {}

    def extent(size: Size) -> tirx.Var | int:
        return known.setdefault(size, tirx.Var(size, "int32")) if isinstance(size, str) else size

    rows, columns, steps = extent(m), extent(n), extent(k)
    outer = [extent(batch)] if batch else []
    a = te.placeholder((*outer, *((rows, steps) if a_by_rows else (steps, rows))), dtype, name="A")
    b = te.placeholder((*outer, *((columns, steps) if b_by_columns else (steps, columns))), dtype, name="B")
    bias = te.placeholder((columns,), dtype, name="bias")
    step = te.reduce_axis((0, steps), "k")
    wide = "float32" if dtype in ("float16", "bfloat16") else dtype

    def summand(*index: tirx.Var) -> tvm.ir.Expr:
        *p, i, j = index
        left = a(*p, i, step) if a_by_rows else a(*p, step, i)
        right = b(*p, j, step) if b_by_columns else b(*p, step, j)
        return te.sum(left.astype(wide) * right.astype(wide), axis=step)

    sums = te.compute((*outer, rows, columns), summand, name="matmul")
    made = te.compute(sums.shape, lambda *index: sums(*index).astype(dtype), name="round")
    if not epilogue:
        return te.create_prim_func([a, b, made if wide != dtype else sums])
    biased = te.compute(sums.shape, lambda *index: made(*index) + bias[index[-1]], name="add")
    relu = te.compute(sums.shape, lambda *index: te.max(biased(*index), tirx.const(0, dtype)), name="relu")
    return te.create_prim_func([a, b, bias, relu])


def text_of(function: tirx.PrimFunc, target: Target) -> str:
    """The CUDA of a function that the rule took, by TVM's stock pipeline."""
    taken = Contraction().take(function, target)
    return tvm.compile(tvm.IRModule({"main": taken}), target).mod.imports[0].inspect_source()


def engines_in(text: str) -> set[str]:
    """Instructions of a CUDA text, by which its engine is told."""
    return {name for name in ("wgmma.mma_async", "mma.sync", "cp_async") if name in text}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("function", "target", "engine"),
    [
        (product("m", 96, 128), HOPPER, {"wgmma.mma_async", "cp_async"}),
        (product(70, 96, 128, "bfloat16", batch=2), HOPPER, {"wgmma.mma_async", "cp_async"}),
        (product("m", 96, 128), Target({"kind": "cuda", "arch": "sm_90"}), {"mma.sync", "cp_async"}),
        (product("m", 96, 128), AMPERE, {"mma.sync", "cp_async"}),
        (product(64, 96, 128, a_by_rows=False), HOPPER, {"mma.sync", "cp_async"}),
        (product("m", 96, "k"), AMPERE, {"mma.sync", "cp_async"}),
        (product("m", 96, 128, "float32"), HOPPER, {"cp_async"}),
        (product("m", 96, 128), TURING, set()),
        (product("m", "n", "k", "float32"), HOPPER, set()),
    ],
)
def test_the_engine_is_that_of_target_and_dtype(function: tirx.PrimFunc, target: Target, engine: set[str]) -> None:
    assert engines_in(text_of(function, target)) == engine


@pytest.mark.parametrize(("channels", "stride"), [(64, 1), (128, 1), (128, 2), (512, 2)])
def test_a_padded_image_is_copied_asynchronously(channels: int, stride: int) -> None:
    """Of more than 64 channels a tap is several k tiles, and of those a part may begin within one."""
    text = text_of(conv2d_nhwc(8, 14, 14, channels, 256, stride=stride, dtype="float16"), HOPPER)
    assert "cp_async_legacy_pred_cg_16" in text
    assert "condval" not in text


@pytest.mark.parametrize(
    "function", [product(8, 8, 64), product(1, 512, 512), product(512, 1, 512), product("m", 1, 64)]
)
def test_vectors_and_tiny_products_are_left(function: tirx.PrimFunc) -> None:
    with pytest.raises(NotTaken):
        Contraction().take(function, HOPPER)
    assert Contraction().apply(function, HOPPER) is None


def plans(function: tirx.PrimFunc, target: Target = HOPPER) -> dict[int | None, str]:
    """The first plan of each range of a function's rows."""
    return {most: str(able[0]) for most, able in Contraction().plans(product_of(function), target)}


def test_few_rows_get_bodies_of_their_own_and_neighbours_share_theirs() -> None:
    chosen = plans(product("m", 4096, 4096))
    ends = list(chosen)
    assert ends == [*sorted(end for end in ends if end), None]
    assert 3 <= len(set(chosen.values())) == len(chosen) <= len(RANGES)
    assert len(plans(product("m", 64, 64))) < len(chosen)


def test_few_rows_fill_the_gpu_by_narrow_tiles_or_by_parts() -> None:
    chosen = plans(product("m", 4096, 14336))
    assert "wgmma 64x32x" in chosen[16 if 16 in chosen else 64]
    assert "parts" in chosen[128]
    assert "128x256x64/2x1" in chosen[None]


def test_a_function_says_how_it_was_made() -> None:
    taken = Contraction().take(product("m", 64, 128), HOPPER)
    assert "wgmma 64x" in str(taken.attrs[HOW])


def test_rows_that_are_a_multiple_of_the_extent_are_counted_as_rows() -> None:
    """A range ends at 16 rows, which are 2 of ``m`` with 8 of them to each."""
    m, k = tirx.Var("m", "int32"), te.reduce_axis((0, 4096), "k")
    a, b = te.placeholder((m, 8, 4096), "float16", name="A"), te.placeholder((4096, 4096), "float16", name="B")
    wide = "float32"
    sums = te.compute(
        (m, 8, 4096), lambda p, i, j: te.sum(a[p, i, k].astype(wide) * b[j, k].astype(wide), axis=k), name="matmul"
    )
    chosen = plans(te.create_prim_func([a, b, sums]))
    assert set(chosen) <= {2, 8, 16, 64, None}
    assert len(chosen) > 1


def test_a_machine_is_for_its_own_target_and_a_target_is_a_gpu() -> None:
    function, machine = product(64, 64, 64), assumed_machine(AMPERE)
    with pytest.raises(NotTaken, match="sm_80"):
        Contraction(machine).take(function, HOPPER)
    with pytest.raises(NotTaken, match="llvm"):
        Contraction().take(function, Target("llvm"))
    assert Contraction(machine).plans(product_of(function), AMPERE)


def test_the_cost_of_few_rows_is_that_of_reading_the_weights() -> None:
    machine = assumed_machine(HOPPER)
    tiles = (WarpgroupTile(block=(64, n, 64), warpgroups=(1, 1)) for n in (32, 256))
    narrow, wide = (Choice(tile, stages) for tile, stages in zip(tiles, (8, 5)))
    sizes = (16, 4096, 4096)
    assert contraction_cycles(narrow, sizes, machine) < contraction_cycles(wide, sizes, machine) / 2
    # Cut in eight, the wide tiles fill the GPU, too.
    assert contraction_cycles(wide, sizes, machine, parts=8) < contraction_cycles(wide, sizes, machine) / 2


def weights_of_int8() -> tirx.PrimFunc:
    """A product with weights that are scaled on their way."""
    m, k = tirx.Var("m", "int32"), te.reduce_axis((0, 128), "k")
    a, scale = te.placeholder((m, 128), "float16", name="A"), te.placeholder((72,), "float16", name="S")
    weights = te.placeholder((72, 128), "int8", name="W")
    scaled = te.compute((72, 128), lambda j, s: weights[j, s].astype("float16") * scale[j], name="scaled")
    wide = "float32"
    sums = te.compute(
        (m, 72), lambda i, j: te.sum(a[i, k].astype(wide) * scaled[j, k].astype(wide), axis=k), name="matmul"
    )
    return te.create_prim_func([a, weights, scale, te.compute((m, 72), lambda i, j: sums[i, j].astype("float16"))])


def masked_scores(shifted: bool = False) -> tirx.PrimFunc:
    """A batch of products whose results beyond the diagonal are a constant; or zero but for a bias, which is read."""
    m, k = tirx.Var("m", "int32"), te.reduce_axis((0, 128), "k")
    a, b = (te.placeholder(shape, "float16", name=name) for name, shape in (("A", (2, m, 128)), ("B", (2, 128, m))))
    bias, wide = te.placeholder((m,), "float32", name="bias"), "float32"
    sums = te.compute(
        (2, m, m), lambda h, i, j: te.sum(a[h, i, k].astype(wide) * b[h, k, j].astype(wide), axis=k), name="matmul"
    )

    def masked(h: tirx.Var, i: tirx.Var, j: tirx.Var) -> tirx.PrimExpr:
        inside = sums[h, i, j] * 0.125
        if not shifted:
            return tirx.if_then_else(j <= i, inside, tirx.const(-3e38, wide))
        return inside + tirx.if_then_else(j <= i, bias[j], tirx.const(0, wide))

    return te.create_prim_func([a, b, *([bias] if shifted else []), te.compute(sums.shape, masked, name="masked")])


@functools.cache
def text_of_masked_scores(shifted: bool) -> str:
    return text_of(masked_scores(shifted), HOPPER)


@pytest.mark.parametrize(("shifted", "width"), [(False, 2), (True, 1)])
def test_a_mask_of_registers_and_constants_keeps_vectors(shifted: bool, width: int) -> None:
    """What reads memory under a condition stays behind it, element by element."""
    kernel = [k for k in text_of_masked_scores(shifted).split("__global__") if "wgmma_m64n128k64_" in k][-1]
    assert [kernel.count("(float2*)(masked_ptr"), kernel.count("float condval")] == ([32, 0] if width == 2 else [0, 32])


def test_a_single_k_tile_is_no_pipeline() -> None:
    """One multiplication for each 64 rows, of what one barrier has brought together; a second k tile would be zeros."""
    text = text_of(product(512, 256, 64), HOPPER)
    kernel = text.split("__global__")[-1]
    assert kernel.count("wgmma_m64n") == 1
    assert "wait_group" not in kernel


def test_a_block_finds_its_place_without_signs() -> None:
    """Of two numbers of tiles that only run time knows, and a batch: one division, of numbers that are not negative."""
    text = text_of_masked_scores(False)
    assert "blockIdx.y" in text
    assert "rmod" not in text


def test_a_short_product_is_cut_in_tiles_that_share_a_multiprocessor() -> None:
    """Of 64 steps, and of results of 4 bytes; where reductions are long, tiles stay as wide as fits."""
    machine = assumed_machine(HOPPER)
    wide, square = (
        Choice(WarpgroupTile(block=(128, n, 64), warpgroups=(2, 1)), stages) for n, stages in ((256, 4), (128, 3))
    )

    def cycles(choice: Choice, sizes: tuple[int, int, int], result_bytes: int) -> float:
        return contraction_cycles(choice, sizes, machine, result_bytes=result_bytes)

    for sizes, result_bytes in (((100352, 256, 64), 2), ((65536, 2048, 128), 4)):
        assert cycles(square, sizes, result_bytes) < cycles(wide, sizes, result_bytes)
    assert cycles(wide, (4096, 4096, 4096), 2) < cycles(square, (4096, 4096, 4096), 2)
    assert cycles(wide, (4096, 4096, 64), 2) < cycles(wide, (4096, 4096, 64), 4)


def rows(*counts: int, **others: int) -> list[dict[str, int]]:
    """Sizes of calls with so many rows each."""
    return [{"m": count, **others} for count in counts]


RIGHT = {
    "any rows": (product("m", 96, 192), HOPPER, rows(0, 1, 16, 17, 64, 65, 130)),
    "B by rows": (product("m", 128, 192, b_by_columns=False), HOPPER, rows(1, 17, 130)),
    "bfloat16, an epilogue": (product("m", 72, 136, "bfloat16", epilogue=True), HOPPER, rows(17, 70)),
    "an odd reduction": (product("m", 72, 131), HOPPER, rows(1, 65)),
    "odd columns": (product("m", 71, 128), HOPPER, rows(1, 65)),
    "a batch": (product(70, 72, 136, batch=3), HOPPER, [{}]),
    "a batch of any rows": (product("m", 72, 136, batch=3), HOPPER, rows(1, 65)),
    "queries and keys": (product("m", "n", 128, batch=2), HOPPER, [*rows(5, n=77), *rows(65, 0, n=8)]),
    "one k tile": (product("m", 96, 64), HOPPER, rows(0, 5, 130)),
    "one k tile, ragged": (product(70, 136, 40, epilogue=True), HOPPER, [{}]),
    "one k tile of an image": (conv2d_nhwc(2, 9, 9, 64, 128, kernel=1, padding=0, dtype="float16"), HOPPER, [{}]),
    "masked scores": (masked_scores(), HOPPER, rows(0, 5, 64, 130)),
    "masked scores, a bias": (masked_scores(True), HOPPER, rows(70)),
    "values": (product("m", 64, "k", batch=2, b_by_columns=False), HOPPER, [*rows(33, k=77), *rows(5, k=592)]),
    "values, many rows": (
        product("m", 128, "k", batch=8, b_by_columns=False),
        HOPPER,
        [*rows(130, k=77), *rows(9, k=592)],
    ),
    "values, by mma": (product("m", 64, "k", batch=2, b_by_columns=False), AMPERE, [*rows(9, k=3), *rows(5, k=80)]),
    "weights of int8, many rows": (weights_of_int8(), HOPPER, rows(20, 130)),
    "an image": (conv2d_nhwc(2, 14, 14, 32, 128, dtype="float16"), HOPPER, [{}]),
    "an image, in parts": (conv2d_nhwc(1, 7, 7, 256, 64, dtype="float16"), HOPPER, [{}]),
    "an image, taps of two k tiles": (conv2d_nhwc(1, 9, 9, 128, 64, stride=2, dtype="float16"), HOPPER, [{}]),
    "int8": (product(50, 40, 36, "int8"), HOPPER, [{}]),
    "A by columns": (product(100, 72, 136, a_by_rows=False), HOPPER, [{}]),
    "any rows, A by columns": (product("m", 72, 136, a_by_rows=False), HOPPER, rows(33)),
    "a split reduction": (product("m", 256, 2048, epilogue=True), HOPPER, rows(1, 17)),
    "mma": (product("m", 96, 192), AMPERE, rows(0, 1, 16, 17, 64, 65)),
    "mma of a split reduction": (product("m", 64, 1024), AMPERE, rows(17)),
    "float32": (product(100, 51, 37, "float32"), HOPPER, [{}]),
    "float32, any rows, an epilogue": (product("m", 72, 80, "float32", epilogue=True), HOPPER, rows(1, 65)),
    "float32, any extents": (product("m", "n", "k", "float32", batch="b"), HOPPER, rows(5, n=77, k=33, b=2)),
    "float64": (product(50, 40, 30, "float64"), HOPPER, [{}]),
    "int32": (product(50, 40, 30, "int32"), HOPPER, [{}]),
    "16 bits on ordinary cores": (product("m", 72, 40), TURING, rows(33)),
}


def test_float32_tiles_of_rows_along_k_are_turned_on_their_way() -> None:
    """Element by element, as the first operand's tiles are not; those across k already are copied as before."""
    widths = []
    for by_columns in (True, False):
        text = text_of(product("m", 128, 512, "float32", b_by_columns=by_columns), HOPPER)
        widths.append(set(re.findall(r"cp_async_legacy_(?:pred_)?c[ag]_(\d+)_", text)))
    assert widths == [{"4", "16"}, {"16"}]


@pytest.mark.sampled(4)
@pytest.mark.emulator
@pytest.mark.parametrize(("function", "target", "sizes"), RIGHT.values(), ids=RIGHT)
def test_it_is_right(function: tirx.PrimFunc, target: Target, sizes: list[dict[str, int]]) -> None:
    taken, wide = Contraction().take(function, target), str(function.params[0].dtype) == "float64"
    for each in sizes:
        check_function(function, taken, target, sizes=each, sums="float64" if wide else "float32", runs=2)


@pytest.mark.sampled(3)
@pytest.mark.emulator  # as slow
@pytest.mark.compiler
@pytest.mark.parametrize(
    ("function", "target"),
    [
        (product("m", 128, 256, batch=2), HOPPER),
        (masked_scores(), HOPPER),
        (product(128, 512, 256), AMPERE),
        (product("m", 64, "k"), AMPERE),
        (product(64, 64, 128, "float32"), AMPERE),
    ],
)
def test_nvcc_takes_its_text(function: tirx.PrimFunc, target: Target, compiler: Compiler, tmp_path: Path) -> None:
    arch = str(target.attrs["arch"])
    log = run_nvcc(compiler, text_of(function, target), tmp_path, "kernel.cubin", "-cubin", *arch_flags(arch))
    spilled = re.findall(r"(\d+) bytes spill stores", log)
    assert spilled
    assert set(spilled) == {"0"}


FILLED_FIRST = {  # functions whose warpgroups have two k tiles or more, whatever tile is chosen; their sizes
    "as many tiles as stages": (product(136, 256, 192), {}),
    "ragged, two tiles": (product(70, 200, 136), {}),
    "ragged, many": (product(100, 264, 1160, "bfloat16", b_by_columns=False), {}),
    "parts": (product(64, 128, 2048, epilogue=True), {}),
    "a batch": (product(70, 72, 264, batch=3), {}),
    "any rows": (product("m", 96, 712, epilogue=True), {"m": 77}),
    "any reduction": (product(70, 72, "k"), {"k": 1160}),
    "any reduction, by rows": (product(70, 128, "k", b_by_columns=False), {"k": 1163}),
    "an image": (conv2d_nhwc(1, 9, 9, 64, 64, dtype="float16"), {}),
    "weights of int8": (weights_of_int8(), {"m": 130}),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.emulator) if "m" in FILLED_FIRST[name][1] else name for name in FILLED_FIRST],
)
def test_warpgroups_request_all_tiles_of_a_rings_start_before_they_wait(name: str) -> None:
    kernels = text_of(FILLED_FIRST[name][0], HOPPER).split('extern "C" __global__')[1:]
    rings = [kernel.split("for (int turn")[0] for kernel in kernels if " wgmma_m" in kernel]
    assert rings
    for start in rings:
        assert not re.search(r"ptx_cp_async_legacy_pred_c[ag]_\d+_\d+_\d+\(", start)  # all fill with zeros themselves
        found = re.findall(r"(commit|wait)_group_async_\w+_group(?:_(\d+))?\(", start)
        events = [action for action, _ in found]
        requested = events.index("wait")
        assert requested >= 2
        waits = [(place, int(left)) for place, (action, left) in enumerate(found) if action == "wait"]
        for tile, (place, left) in enumerate(waits):
            assert left == events[:place].count("commit") - 1 - tile  # its own tile has landed, later ones have not


@pytest.mark.sampled(3)
@pytest.mark.emulator
@pytest.mark.parametrize("name", FILLED_FIRST)
def test_rings_filled_first_change_no_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, sizes = FILLED_FIRST[name]
    first = emulated_output(function, sizes)
    monkeypatch.setattr("tensorir_ladder.relax.rules.contraction.fill_before_waiting", lambda *_: None)
    usual = emulated_output(function, sizes)
    assert np.isfinite(first.astype(np.float32)).all()
    assert first.tobytes() == usual.tobytes()


def emulated_output(function: tirx.PrimFunc, sizes: dict[str, int]) -> np.ndarray:
    """What the rule's kernels write on this machine; the last parameter is the output."""
    made = generate(tvm.IRModule({"main": Contraction().take(function, HOPPER)}), HOPPER, "s_tir")
    run, draw = read_host(made.host, sizes), np.random.default_rng(3)
    arrays = {}
    for parameter in function.params:
        shape = [sizes[extent.name] if isinstance(extent, tirx.Var) else int(extent) for extent in parameter.shape]
        arrays[parameter.name] = (2 * draw.standard_normal(shape)).astype(numpy_dtype(str(parameter.dtype)))
    *operands, output = arrays
    arrays[output][...] = np.nan
    memory = tuple((kept.shape, numpy_dtype(kept.dtype)) for kept in run.kept)
    names = (*arrays, *(kept.buffer for kept in run.kept))
    EmulatedProgram("rule", made.cuda, run.launches, names, memory, 132, tuple(operands))(*arrays.values(), seed=1)
    return arrays[output]
