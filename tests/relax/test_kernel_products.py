"""Products of Relax modules as launches of explicit kernels: which, for which rows, right, linked and exported."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import relax, te, tirx
from tvm.relax.frontend import nn

import tensorir_ladder
from support.sass import uses_in_flight
from tensorir_ladder.emulator import EmulatedProgram
from tensorir_ladder.harness.execution import numpy_dtype
from tensorir_ladder.harness.machines import machine_for
from tensorir_ladder.kernels.codegen.host_code import read_host
from tensorir_ladder.kernels.codegen.launch_plan import LaunchPlan, PlainBuffer, TensorMap
from tensorir_ladder.kernels.codegen.lowering import Generated, brought, generate
from tensorir_ladder.kernels.codegen.toolchain import Compiler, Cubin, NoCompiler, compile_cubin, require_compiler
from tensorir_ladder.kernels.stream_k import PLANNED_ROWS, plans_by_rows
from tensorir_ladder.kernels.tiles import RoleTile
from tensorir_ladder.relax import kernel_products
from tensorir_ladder.relax.kernel_products import ProductMenu, TmaContraction, plain_product
from tensorir_ladder.relax.rules import NotTaken, narrowed
from tensorir_ladder.relax.rules.rule import HOW
from tensorir_ladder.schedules.cost import assumed_machine
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.torch_ops.menu import Menu
from tensorir_ladder.torch_ops.step_kernels import name_kernel

TARGET = tvm.target.Target({"kind": "cuda", "arch": "sm_90a"})
MACHINE = machine_for("sm_90a")
ROWS = (1, 7, 17, 64, 65, 100, 129, 512, 700)
slow = pytest.mark.emulator


def product(
    m: int | None, n: int, k: int, *, dtype: str = "float16", layout: str = "nt", residual: bool = False, out: str = ""
) -> tirx.PrimFunc:
    """``C = A · B``, sums of the result's dtype, as Relax writes it, maybe + R."""
    rows = te.var("rows") if m is None else m
    a = te.placeholder((rows, k), dtype, "A")
    b = te.placeholder((n, k) if layout == "nt" else (k, n), dtype, "B")
    step = te.reduce_axis((0, k), "k")

    def element(i: tirx.Var, j: tirx.Var) -> Any:
        return te.sum((a[i, step] * (b[j, step] if layout == "nt" else b[step, j])).astype(out or dtype), axis=step)

    c = te.compute((rows, n), element, "C")
    if not residual:
        return te.create_prim_func([a, b, c])
    r = te.placeholder((rows, n), dtype, "R")
    return te.create_prim_func([a, b, r, te.compute((rows, n), lambda i, j: r[i, j] + c[i, j], "D")])


def taken(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function as the rule makes it."""
    return TmaContraction().take(function, TARGET)


def lowered(function: tirx.PrimFunc) -> Generated:
    """The function's host code, and all kernels' text."""
    return generate(tvm.IRModule({"main": function.with_attr("global_symbol", "main")}), TARGET, "s_tir")


def launches(made: Generated, rows: int) -> list[LaunchPlan]:
    """The kernels' launches of a call with so many rows, less those that lower flags."""
    found = read_host(made.host, {"rows": rows}).launches
    return [each for each in found if each.kernel.startswith("tma_")]


# Which kernels


@pytest.fixture(scope="module")
def any_rows() -> tuple[tirx.PrimFunc, Generated]:
    """A product of any number of rows, and its code."""
    function = taken(product(None, 4096, 1024))
    return function, lowered(function)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("rows", ROWS)
def test_many_rows_are_launched_by_tensor_maps_of_the_rows_at_hand(
    rows: int, any_rows: tuple[tirx.PrimFunc, Generated]
) -> None:
    found = launches(any_rows[1], rows)
    assert len(found) == (rows > 16)
    for launch in found:
        maps = {each.buffer: each for each in launch.parameters if isinstance(each, TensorMap)}
        assert maps["A"].sizes == (1024, rows)
        assert maps["B"].sizes == (1024, 4096)
        assert maps["C"].sizes == (4096, rows)
        tiles = -(-rows // maps["A"].box[1]) * -(-4096 // maps["B"].box[1])
        assert launch.kernel.startswith("tma_12")
        assert launch.grid == (tiles, 1, 1)


def test_what_runs_which_rows_is_said(any_rows: tuple[tirx.PrimFunc, Generated]) -> None:
    few, some, *many, last = str(any_rows[0].attrs[HOW]).split("; ")
    assert few == "up to 8: decode"
    assert some.startswith("up to 16: wgmma")
    limits = [int(re.match(r"up to (\d+): TMA, step 1[23]", each)[1]) for each in many]
    assert limits == sorted(limits) != []
    assert many[1].split(": ")[1].startswith("TMA, step 12")
    assert last.startswith("TMA, step 13")
    tiles = {re.search(r"step \d+ \d+x\d+x\d+/\dx\d", each)[0] for each in (*many, last)}
    assert len(brought(tvm.IRModule({"main": any_rows[0]})).functions) == len(tiles)
    assert any_rows[0].script()  # TVM prints it


def numbers(launch: LaunchPlan) -> list[int]:
    """What a kernel is told: where the last wave is cut, for how many helpers, how many rows there are."""
    return [each for each in launch.parameters if isinstance(each, int)]


@slow
def test_a_long_reduction_of_few_tiles_is_cut_as_its_rows_ask() -> None:
    made = lowered(taken(product(None, 512, 8192)))
    told = set()
    for rows in (20, 200, 300):
        flags, launch = read_host(made.host, {"rows": rows}).launches
        assert launch.kernel.startswith("tma_13")
        assert launch.grid == (MACHINE.multiprocessors, 1, 1)
        assert [each.buffer for each in flags.parameters if isinstance(each, PlainBuffer)] == ["flags"]
        cut, helpers, given = numbers(launch)
        assert given == rows
        assert 0 < cut < 128
        told.add((launch.kernel, helpers, cut))
    assert len(told) == 3


@slow
def test_many_tiles_are_shared_out_among_blocks_that_stay() -> None:
    problem, machine, cut_any = Matmul(1, 6144, 2048, "float16", "nt"), assumed_machine(TARGET), 0
    made = lowered(taken(product(None, 6144, 2048)))
    for rows in (1500, 1900, 2048, 2049, 20_000):
        *flags, launch = read_host(made.host, {"rows": rows}).launches
        a, b = (next(each for each in launch.parameters if getattr(each, "buffer", "") == name) for name in "AB")
        assert launch.kernel.startswith("tma_13")
        assert launch.grid == (MACHINE.multiprocessors, 1, 1)
        cut, helpers, given = numbers(launch)
        tile = RoleTile.parse(f"{a.box[1]}x{b.box[1]}x64/{a.box[1] // 64}x1")
        plans = plans_by_rows(problem, tile, machine)
        wanted = plans[-(-rows // tile.block_m) - 1] if rows <= PLANNED_ROWS else None
        assert (helpers, cut) == ((wanted.helpers, wanted.cut) if wanted else (0, 0))
        assert given == rows
        assert len(flags) == (helpers > 0)  # a kernel in front lowers flags only where there are helpers
        cut_any += helpers > 0
    assert cut_any


def test_known_rows_have_one_launch_or_none() -> None:
    many, few = taken(product(300, 256, 128)), taken(product(16, 256, 128))
    assert str(many.attrs[HOW]).startswith("TMA, step 12")
    assert "TMA" not in str(few.attrs[HOW])
    (launch,) = launches(lowered(many), 300)
    assert launch.parameters[0].sizes == (128, 300)


OTHERS: dict[str, tuple[Callable[[], tirx.PrimFunc], str]] = {
    "operands of 32 bits": (lambda: product(300, 256, 128, dtype="float32"), "float32"),
    "results of 32 bits": (lambda: product(300, 256, 128, out="float32"), "float32"),
    "rows of results that TMA cannot step over": (lambda: product(300, 252, 128), "252"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_functions_are_left_to_schedules(name: str) -> None:
    make, reason = OTHERS[name]
    function = make()
    with pytest.raises(NotTaken, match=reason):
        plain_product(narrowed(function))
    assert not brought(tvm.IRModule({"main": taken(function)})).functions


def test_a_product_of_one_step_is_elementwise() -> None:
    function = product(300, 256, 1)
    with pytest.raises(NotTaken, match="0 such extents"):
        plain_product(narrowed(function))
    with pytest.raises(NotTaken, match=r"without a reduction|other than one reduction"):
        taken(function)


# Which step: blocks that leave after a tile, or stay


@pytest.mark.parametrize(
    ("shape", "how"),
    [
        ((100352, 64, 64), "step 13 192x64x64"),
        ((100352, 256, 64), "step 13 128x256x64"),
        ((100352, 64, 256), "step 13 192x64x64"),
        ((25088, 512, 128), "step 13 128x256x64"),
        ((100352, 128, 256), "step 13 192x128x64"),
        ((1568, 2048, 512), "step 12 128x256x64"),  # one wave of large tiles, not two of small ones
        ((1568, 512, 2048), "step 12"),
        ((2048, 6144, 4096), "step 13"),
        ((512, 6144, 4096), "step 12 128x192x64"),
        ((240, 104, 8120), "step 13"),  # 8 tiles, whose reductions are cut
        ((233, 4096, 14336), "step 12"),  # a wave of 128 tiles is as good as full
    ],
    ids=str,
)
def test_blocks_stay_where_a_gpu_was_seen_to_gain(shape: tuple[int, int, int], how: str) -> None:
    read = plain_product(narrowed(product(*shape)))
    assert how in str(ProductMenu(read, MACHINE.for_choices()).best(shape[0], None))


SHORT = {
    "any rows": (lambda: product(None, 4104, 72, residual=True), (700,)),
    "known rows": (lambda: product(9000, 1032, 64, layout="nn"), (9000,)),
}


@pytest.mark.sampled(2)
@slow
@pytest.mark.parametrize("case", SHORT)
def test_blocks_that_stay_are_right_for_short_reductions(case: str) -> None:
    written = SHORT[case][0]()
    function = taken(written)
    assert "TMA, step 13" in str(function.attrs[HOW])
    check_rows(written, function, SHORT[case][1])


# Rows that TMA cannot step over


def test_rows_are_copied_where_that_is_sooner_than_to_load_elements() -> None:
    short, long = taken(product(300, 256, 132)), taken(product(4096, 4096, 1001))
    assert not brought(tvm.IRModule({"main": short})).functions
    assert "rows of A, B copied to whole lines" in str(long.attrs[HOW])
    *_, launch = read_host(lowered(long).host, {}).launches
    maps = {each.buffer: each for each in launch.parameters}
    assert {name: each.sizes for name, each in maps.items()} == {
        "A_rows": (1024, 4096),
        "B_rows": (1024, 4096),
        "C": (4096, 4096),
    }


@slow
def test_few_rows_of_odd_length_stay_scheduled() -> None:
    few, *many = str(taken(product(None, 4096, 1001)).attrs[HOW]).split("; ")
    assert few == "up to 8: decode"
    assert "wgmma" in many[0]
    assert all("copied" in each for each in many if "TMA" in each)
    assert "TMA" in many[-1]


def test_matrices_whose_rows_end_in_an_axis_of_one_element_are_left() -> None:
    a, b, k = te.placeholder((300, 129, 1), "float16"), te.placeholder((256, 129), "float16"), te.reduce_axis((0, 129))
    c = te.compute((300, 256), lambda i, j: te.sum(a[i, k, 0] * b[j, k], axis=k))
    with pytest.raises(NotTaken, match="stored by rows"):
        plain_product(narrowed(te.create_prim_func([a, b, c])))


COPIED: dict[str, tuple[Callable[[], tirx.PrimFunc], str, tuple[int, ...]]] = {
    "odd steps and columns": (lambda: product(None, 263, 129), "A, B, C", (1, 17, 300, 700)),
    "odd columns": (
        lambda: product(None, 263, 136, layout="nn", residual=True, dtype="bfloat16"), "B, C, R", (9, 130)
    ),
    "odd steps, as stored": (lambda: product(None, 264, 133, layout="nn"), "A", (300,)),
    # TVM must not find that the copy of C may lie where that of B does
    "known rows": (lambda: product(200, 263, 133, layout="nn", residual=True), "A, B, C, R", (200,)),
}  # fmt: skip


@pytest.mark.sampled(4)
@slow
@pytest.mark.parametrize("case", COPIED)
def test_products_of_copied_rows_are_right(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_products, "ELEMENTS_PER_CYCLE", 1e-3)  # such small ones are scheduled otherwise
    make, copied, numbers = COPIED[case]
    written = make()
    function = taken(written)
    assert f"rows of {copied} copied" in str(function.attrs[HOW])
    check_rows(written, function, numbers)


# Right


def emulate(function: tirx.PrimFunc, rows: int, made: Generated, arrays: list[np.ndarray]) -> np.ndarray:
    """Run a call in the emulator; the last array is the result, poisoned."""
    arrays[-1][...] = np.nan
    run = read_host(made.host, {"rows": rows})
    kept = tuple((each.shape, numpy_dtype(each.dtype)) for each in run.kept)
    names = [str(parameter.name) for parameter in function.params]
    program = EmulatedProgram(
        "relax", made.cuda, run.launches, (*names, *(each.buffer for each in run.kept)), kept,
        MACHINE.multiprocessors, tuple(names[:-1]),
    )  # fmt: skip
    program(*arrays, seed=rows)
    return arrays[-1]


CASES: dict[str, tuple[Callable[[], tirx.PrimFunc], tuple[int, ...]]] = {
    "any rows": (lambda: product(None, 264, 1096), (1, 7, 17, 64, 100, 129, 300, 512, 700)),
    "residual": (lambda: product(None, 264, 1096, residual=True), (5, 100, 129, 300, 700)),
    "as stored": (lambda: product(None, 136, 264, layout="nn", dtype="bfloat16", residual=True), (9, 130, 600)),
    "known rows": (lambda: product(150, 264, 1096), (150,)),
}


@pytest.mark.sampled(4)
@slow
@pytest.mark.parametrize("case", CASES)
def test_results_are_those_of_the_function_for_any_rows(case: str) -> None:
    make, numbers = CASES[case]
    written = make()
    check_rows(written, taken(written), numbers)


def check_rows(written: tirx.PrimFunc, function: tirx.PrimFunc, numbers: tuple[int, ...]) -> None:
    """Compare a product, as the rule made it, with numpy's, for each number of rows."""
    made, random = lowered(function), np.random.default_rng(7)
    for rows in numbers:
        shapes = [tuple(rows if isinstance(e, tirx.Var) else int(e) for e in each.shape) for each in function.params]
        dtype = numpy_dtype(str(function.params[0].dtype))
        arrays = [random.integers(-3, 4, shape).astype(dtype) for shape in shapes]
        a, b = (each.astype(np.float32) for each in arrays[:2])
        want = (a @ (b.T if b.shape[0] == shapes[-1][1] else b)).astype(dtype)
        want = want + arrays[2] if len(arrays) > 3 else want
        np.testing.assert_array_equal(emulate(function, rows, made, arrays), want, err_msg=f"{rows} rows")


def finished(m: int | None, n: int, k: int, how: str, *, dtype: str = "float16", each: int = 0) -> tirx.PrimFunc:
    """A product whose sums are finished; of ``each`` rows in every one of a batch, where that is said."""
    rows = te.var("rows") if m is None else m
    outer = (rows, each) if each else (rows,)
    a, b, step = (
        te.placeholder((*outer, k), dtype, "A"),
        te.placeholder((n, k), dtype, "B"),
        te.reduce_axis((0, k), "k"),
    )
    c = te.compute((*outer, n), lambda *at: te.sum(a[(*at[:-1], step)] * b[at[-1], step], axis=step), "C")
    bias, scale = te.placeholder((n,), dtype, "bias"), te.placeholder((n,), dtype, "scale")
    more = te.placeholder((n,), dtype, "more")
    by_rows, matrix = te.placeholder(outer, dtype, "by_rows"), te.placeholder((*outer, n), dtype, "R")
    half = tirx.const(0.5, dtype)

    def gelu(x: tirx.Expr) -> tirx.Expr:
        return x * (half + te.erf((x * tirx.const(0.5**0.5, dtype)).astype("float32")).astype(dtype) * half)

    forms: dict[str, tuple[list[Any], Callable[..., tirx.Expr]]] = {
        "bias": ([bias], lambda *at: c[at] + bias[at[-1]]),
        "bias, gelu": ([bias], lambda *at: gelu(c[at] + bias[at[-1]])),
        "silu": ([], lambda *at: c[at] * tirx.sigmoid(c[at])),
        "relu": ([], lambda *at: tirx.max(c[at], tirx.const(0, dtype))),
        "bias, residual": ([bias, matrix], lambda *at: matrix[at] + (c[at] + bias[at[-1]])),
        "bias, residual, relu": (
            [bias, matrix],
            lambda *at: tirx.max(c[at] + bias[at[-1]] + matrix[at], tirx.const(0, dtype)),
        ),
        "bias, scale": ([bias, scale], lambda *at: (c[at] + bias[at[-1]]) * scale[at[-1]]),
        "bias, scale, residual": (
            [bias, matrix, scale],
            lambda *at: (c[at] + bias[at[-1]]) * scale[at[-1]] + matrix[at],
        ),
        "three vectors": ([scale, bias, more], lambda *at: c[at] * scale[at[-1]] + bias[at[-1]] * more[at[-1]]),
        "by rows": ([by_rows], lambda *at: c[at] + by_rows[at[:-1]]),
        "times a matrix": ([matrix], lambda *at: c[at] * matrix[at]),
    }
    given, element = forms[how]
    return te.create_prim_func([a, b, *given, te.compute((*outer, n), element, "D")])


FINISHED: dict[str, tuple[tuple[int | None, int, int], dict[str, Any], tuple[int, ...]]] = {
    "bias": ((None, 520, 264), {}, (17, 100, 700)),
    "bias, gelu": ((None, 264, 136), {}, (130,)),
    "silu": ((200, 264, 136), {"dtype": "bfloat16"}, (200,)),
    "relu": ((None, 264, 136), {"dtype": "bfloat16"}, (70, 300)),
    "bias, residual": ((None, 264, 136), {"each": 37}, (1, 2, 7)),
    "bias, scale": ((None, 136, 264), {"dtype": "bfloat16"}, (90,)),
    "bias, scale, residual": ((None, 264, 136), {}, (90, 300)),
    "bias, residual, relu": ((200, 264, 136), {"dtype": "bfloat16"}, (200,)),
}


@pytest.mark.sampled(3)
@slow
@pytest.mark.parametrize("how", FINISHED)
def test_sums_are_finished_as_is_written(how: str) -> None:
    shape, more, numbers = FINISHED[how]
    written = finished(*shape, how, **more)
    function = taken(written)
    assert "finished" in str(function.attrs[HOW])
    check_finished(function, how, numbers)


def check_finished(function: tirx.PrimFunc, how: str, numbers: tuple[int, ...]) -> None:
    """Compare what a function of finished sums makes in the emulator with NumPy."""
    made, random = lowered(function), np.random.default_rng(5)
    for rows in numbers:
        shapes = [tuple(rows if isinstance(e, tirx.Var) else int(e) for e in each.shape) for each in function.params]
        dtype = numpy_dtype(str(function.params[0].dtype))
        a, b, *given, result = (random.integers(-8, 9, shape).astype(dtype) / dtype.type(8) for shape in shapes)
        total = (a.astype(np.float32) @ b.astype(np.float32).T).astype(dtype)
        one, half = dtype.type(1), dtype.type(0.5)
        x = total + given[0] if given else total
        if "gelu" in how:
            erf = np.vectorize(math.erf)((x * dtype.type(0.5**0.5)).astype(np.float64))
            x = x * (half + erf.astype(dtype) * half)
        elif how == "silu":
            x = x / (one + np.exp(-x.astype(np.float64)))
        x = x * given[-1] if "scale" in how else x
        if "residual" in how:
            x = given[1] + x
        if "relu" in how:
            x = np.maximum(x, dtype.type(0))
        got = emulate(function, rows, made, [a, b, *given, result]).astype(np.float64)
        room = 4 * float(ml_dtypes.finfo(dtype).eps) if how in ("bias, gelu", "silu") else 0
        np.testing.assert_allclose(got, x.astype(np.float64), rtol=room, atol=room, err_msg=f"{rows} rows")


def prefer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the kernel of the menu chosen whose name begins so."""

    def times(menu: Menu, *_: Any, able: np.ndarray) -> np.ndarray:
        wanted = [name_kernel(each).startswith(name) for each in menu.kernels]
        return np.where(able & wanted, 1.0, np.inf)

    monkeypatch.setattr(Menu, "times", times)


OF_THE_MENU = ("exchanged 72x128x64/1x2/1", "upright 64x192x64/1x1/1x1", "step 13, 64x192x64/1x1, 6 stages")


@pytest.mark.sampled(3)
@slow
@pytest.mark.parametrize("how", FINISHED)
@pytest.mark.parametrize("name", OF_THE_MENU)
def test_kernels_of_the_menu_finish_sums_of_known_rows(name: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "residual" in how and name.startswith("exchanged"):
        pytest.skip("swapped operands add no residual")

    prefer(name, monkeypatch)
    function = taken(finished(200, 264, 192, how))
    assert f"step {13 if 'step 13' in name else 12}, {re.search(r'[0-9]+x[0-9x/]+', name)[0]}" in str(
        function.attrs[HOW]
    )
    check_finished(function, how, (200,))


def compiled(function: tirx.PrimFunc, compiler: Compiler) -> Cubin:
    """The kernel that a function launches."""
    kernels = brought(tvm.IRModule({"main": taken(function)}))
    text = tvm.get_global_func("target.build.cuda")(kernels, TARGET).inspect_source()
    return compile_cubin(text, "sm_90a", compiler)


@pytest.mark.compiler
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name", ["exchanged 160x128x64/1x2/1", "upright 64x128x64/1x1/1x1", "step 13, 64x192x64/1x1, 6"]
)
@pytest.mark.parametrize(("how", "k"), [("bias, gelu", 384), ("bias", 192), ("bias, residual", 384)])
def test_sums_are_read_when_wgmma_has_written_them(
    name: str,
    how: str,
    k: int,
    compiler: Compiler,
    sass: Callable[[Cubin], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop over few k tiles is unrolled, and ptxas has put conversions of sums before the last wait."""
    if "residual" in how and name.startswith("exchanged"):
        pytest.skip("swapped operands add no residual")
    prefer(name, monkeypatch)
    instructions = sass(compiled(finished(1568, 1536, k, how), compiler))
    assert "WARPGROUP.DEPBAR.LE gsb0, 0x1" in instructions  # products run while the next are issued
    assert uses_in_flight(instructions) == []


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("exchanged 144x256x64/1x2/1", "bias, gelu"),
        ("exchanged 144x256x64/1x2/1", "bias"),
        ("step 12, 128x256x64/2x1", "bias, gelu"),
    ],
)
def test_large_tiles_keep_sums_in_registers_and_wgmma_in_flight(
    name: str, how: str, compiler: Compiler, sass: Callable[[Cubin], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefer(name, monkeypatch)
    cubin = compiled(finished(1576, 3072, 768, how), compiler)
    assert cubin.spill_bytes == 0
    instructions = sass(cubin)
    assert "WARPGROUP.DEPBAR.LE gsb0, 0x1" in instructions
    assert uses_in_flight(instructions) == []


@pytest.mark.parametrize("how", ["three vectors", "by rows", "times a matrix"])
def test_sums_that_need_more_than_two_vectors_are_left_to_schedules(how: str) -> None:
    with pytest.raises(NotTaken, match="finished"):
        plain_product(narrowed(finished(300, 264, 136, how)))


def test_a_vector_shorter_than_copied_columns_is_left() -> None:
    with pytest.raises(NotTaken, match="of the vector"):
        plain_product(narrowed(finished(300, 263, 133, "bias")))


# As TVM links it


class Linear(nn.Module):
    """A layer whose product is of the module's only function."""

    def __init__(self) -> None:
        self.linear = nn.Linear(512, 256, bias=False, dtype="float16")

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        """Multiply."""
        return self.linear(x)


def exported() -> tvm.IRModule:
    """The layer for any number of rows."""
    return Linear().export_tvm(spec={"forward": {"x": nn.spec.Tensor(["rows", 512], "float16")}})[0]


@pytest.fixture(scope="module")
def executable() -> tvm.runtime.Executable:
    """The layer as a user of TVM compiles it."""
    return tvm.compile(relax.get_pipeline("tensorir_ladder", target=TARGET)(exported()), TARGET)


def texts_of(executable: tvm.runtime.Executable) -> list[str]:
    """The CUDA texts that the host's functions find kernels in."""
    return [each.inspect_source() for each in executable.mod.imports[0].imports]


@slow
def test_tvms_stock_pipeline_links_the_kernels(executable: tvm.runtime.Executable) -> None:
    texts = texts_of(executable)
    assert len(texts) > 2
    assert all("tma_1" in text for text in texts[1:])


@pytest.mark.sampled(2)
@slow
@pytest.mark.parametrize("kernels", [True, False])
def test_kernels_may_be_switched_off(kernels: bool) -> None:
    made = relax.get_pipeline("tensorir_ladder", target=TARGET, kernels=kernels)(exported())
    assert ("external_mods" in (made.attrs or {})) == kernels
    (said,) = tensorir_ladder.explain(exported(), TARGET, kernels=kernels).rows
    assert ("TMA, step 12" in said.how) == kernels


LOADS = """
import sys, tvm, tvm_ffi
found = []
def load(content):
    found.append(bytes(content))
    return tvm.target.codegen.build_module(tvm.IRModule(), tvm.target.Target("llvm"))
tvm_ffi.register_global_func("ffi.Module.load_from_bytes.cuda", load, override=True)
module = tvm.runtime.load_module(sys.argv[1])
assert module.imports, "nothing is linked"
print(len(found), sum(b"tma_1" in each for each in found))
"""


@slow
def test_an_exported_library_has_the_kernels_in_it(executable: tvm.runtime.Executable, tmp_path: Path) -> None:
    library = tmp_path / "layer.so"
    executable.export_library(str(library))
    # Where there is no driver TVM cannot load CUDA: what it would load is looked at.
    found = subprocess.run(
        [sys.executable, "-c", LOADS, str(library)], capture_output=True, text=True, check=True
    ).stdout.split()
    count = len(texts_of(executable))
    assert [int(each) for each in found] == [count, count - 1]


@slow
def test_the_kernels_compile(executable: tvm.runtime.Executable) -> None:
    try:
        compiler = require_compiler()
    except NoCompiler as missing:
        pytest.skip(f"nvcc: {missing}")
    for text in texts_of(executable):
        assert compile_cubin(text, "sm_90a", compiler).data


# On a GPU


class Product(nn.Module):
    """A product of weights that lie either way, and perhaps what is added: a bias, or a matrix like the result."""

    def __init__(self, n: int, k: int, layout: str, dtype: str, added: str) -> None:
        self.layout, self.added = layout, added
        self.weight = nn.Parameter((n, k) if layout == "nt" else (k, n), dtype=dtype)
        if added == "bias":
            self.bias = nn.Parameter((n,), dtype=dtype)

    def forward(self, x: nn.Tensor, residual: nn.Tensor) -> nn.Tensor:
        """Multiply, and add."""
        weight = nn.op.permute_dims(self.weight, [1, 0]) if self.layout == "nt" else self.weight
        made = nn.op.matmul(x, weight)
        return {"bias": lambda: made + self.bias, "residual": lambda: residual + made}.get(self.added, lambda: made)()


@dataclass(frozen=True)
class OnGpu:
    """A product to compile for a GPU, and steps whose kernels it has."""

    n: int
    k: int
    layout: str = "nt"
    dtype: str = "float16"
    added: str = ""
    rows: int | None = None
    steps: tuple[int, ...] = (12,)

    def compiled(self) -> tvm.runtime.Executable:
        """Compile it as a user of TVM does."""
        rows = "rows" if self.rows is None else self.rows
        x, residual = (nn.spec.Tensor([rows, columns], self.dtype) for columns in (self.k, self.n))
        layer = Product(self.n, self.k, self.layout, self.dtype, self.added)
        mod = layer.export_tvm(spec={"forward": {"x": x, "residual": residual}})[0]
        made = relax.get_pipeline("tensorir_ladder", target=TARGET)(mod)
        said = " ".join(str(f.attrs[HOW]) for f in made.functions.values() if f.attrs and HOW in f.attrs)
        assert all(f"TMA, step {step}" in said for step in self.steps if self.added != "bias")
        assert ("copied" in said) == bool(self.n % 8 or self.k % 8)
        return tvm.compile(made, TARGET)


ANY = (1, 8, 9, 16, 17, 31, 64, 65, 127, 128, 129, 200, 500, 512, 1000, 2048, 2049, 4097, 8191, 8192)
ON_GPU = {
    "plain": OnGpu(1032, 520),
    "bias": OnGpu(264, 520, added="bias"),
    "residual": OnGpu(1032, 520, added="residual"),
    "as stored": OnGpu(520, 264, layout="nn", dtype="bfloat16", added="residual"),
    "known rows": OnGpu(264, 1096, rows=150, added="residual"),
    "odd rows": OnGpu(1031, 2041, layout="nn", added="residual"),
    "odd steps": OnGpu(1032, 1001),
    "odd rows, known": OnGpu(1031, 2041, layout="nn", rows=1500),
    "step 13, a wave that is cut": OnGpu(512, 8192, added="residual", steps=(12, 13)),
    "step 13, many tiles": OnGpu(6144, 264, steps=(12, 13)),
    "step 13, short": OnGpu(256, 64, layout="nn", rows=100352, steps=(13,)),
}
CHECKS = """
def check(run, n, k, layout, dtype, added, numbers):
    import torch
    random, dtype = torch.Generator("cuda").manual_seed(7), getattr(torch, dtype)
    def drawn(*shape):  # whole numbers whose sums float16 and bfloat16 have exactly
        return torch.randint(-1, 2, shape, generator=random, device="cuda").to(dtype)
    weight, bias = drawn(n, k) if layout == "nt" else drawn(k, n), drawn(n)
    for rows in numbers:
        x, residual = drawn(rows, k), drawn(rows, n)
        want = x.float() @ (weight.T if layout == "nt" else weight).float()
        want = want.to(dtype) + (bias if added == "bias" else residual if added == "residual" else 0)
        for _ in range(2):  # flags and workspaces are used again
            made = torch.from_dlpack(run(x, residual, weight, *([bias] if added == "bias" else [])))
            assert torch.equal(made, want), (rows, (made != want).sum().item(), made.numel())
"""
CHECK_FRESH = """
import sys, torch, tvm
from tvm import relax
library, n, k, layout, dtype, added, *numbers = sys.argv[1:]
run = relax.VirtualMachine(tvm.runtime.load_module(library), tvm.cuda())["forward"]
check(run, int(n), int(k), layout, dtype, added, [int(rows) for rows in numbers])
assert not any(name.startswith("tensorir_ladder") for name in sys.modules)
"""


@pytest.mark.gpu
@pytest.mark.parametrize("case", ON_GPU)
def test_products_are_right_on_the_gpu(case: str, tmp_path: Path) -> None:
    """Here, and of the plain one and those of step 13 the exported library, in a process that knows nothing of it."""
    one = ON_GPU[case]
    executable = one.compiled()
    numbers = ANY if one.rows is None else (one.rows,)
    given = (one.n, one.k, one.layout, one.dtype, one.added)
    scope: dict[str, Any] = {}
    exec(CHECKS, scope)  # the text that the other process has
    scope["check"](relax.VirtualMachine(executable, tvm.cuda())["forward"], *given, numbers)
    if case in ("plain", "residual", "step 13, a wave that is cut"):
        library = tmp_path / "product.so"
        executable.export_library(str(library))
        command = [sys.executable, "-c", CHECKS + CHECK_FRESH, str(library), *map(str, (*given, *numbers))]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
