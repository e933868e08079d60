"""What all rules stand on: functions lowered ahead, ranges of an extent, and the tool that checks any function."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import tvm
from tvm import relax, te, tirx
from tvm.s_tir import Schedule

from support.functions import WrongFunction, check_function
from support.legalized import legalized
from tensorir_ladder.emulator import KernelFault
from tensorir_ladder.kernels.codegen.arithmetic import evaluate
from tensorir_ladder.kernels.codegen.host_code import read_host
from tensorir_ladder.kernels.codegen.launch_plan import UnsupportedLaunch
from tensorir_ladder.kernels.codegen.lowering import generate
from tensorir_ladder.relax.rules.elementwise import Elementwise
from tensorir_ladder.relax.rules.limits import limit_indices, limit_of
from tensorir_ladder.relax.rules.ranges import by_extent
from tensorir_ladder.relax.rules.rows import Rows
from tensorir_ladder.relax.rules.rule import NotTaken, Rule
from tensorir_ladder.schedules.pipeline.lowering import lower_ahead

TARGET = tvm.target.Target({"kind": "cuda", "arch": "sm_90a"})


SIZES = {"n": 33, "s": 0.75, "k": -3}


def two_kernels(dtype: str = "float32", reverse: bool = True) -> tirx.PrimFunc:
    """B[i, j] = A[n-1-i, j] · s + k through memory of its own."""
    n, s, k = tirx.Var("n", "int64"), tirx.Var("s", "float32"), tirx.Var("k", "int64")
    a = te.placeholder((n, 4), dtype, "A")
    scaled = te.compute((n, 4), lambda i, j: a[i, j].astype("float32") * s, "scaled")
    b = te.compute(
        (n, 4), lambda i, j: (scaled[n - 1 - i if reverse else i, j] + k.astype("float32")).astype(dtype), "B"
    )
    return te.create_prim_func([a, s, k, b])


def row_sums(dtype: str, sums: str, first: int = 0) -> tirx.PrimFunc:
    """B[i] = the sum of A[i, first:], in ``sums``, with 64 columns; m rows."""
    a = te.placeholder((tirx.Var("m", "int32"), 64), dtype, "A")
    k = te.reduce_axis((first, 64), "k")
    b = te.compute(a.shape[:1], lambda i: te.sum(a[i, k].astype(sums), [k]), "B")
    return te.create_prim_func([a, b])


def bound(function: tirx.PrimFunc, *names: str, threads: int = 32) -> tirx.PrimFunc:
    """Spread each block's outputs over blocks of threads."""
    sch = Schedule(function)
    for name in names:
        block = sch.get_sblock(name)
        spatial = [i for i in range(len(sch.get(block).iter_vars)) if sch.get(block).iter_vars[i].iter_type == 0]
        outer, inner = sch.split(sch.fuse(*sch.get_loops(block)[: len(spatial)]), [None, threads])
        sch.bind(outer, "blockIdx.x")
        sch.bind(inner, "threadIdx.x")
    return sch.mod["main"]


def copied(rows: str = "m", bound: bool = True, also: str = "pass") -> tirx.PrimFunc:
    """B[i] = A[i] for rows below ``rows``, and what else is asked for; on the CPU or by a kernel."""
    loops = ["T.thread_binding((m + 31) // 32, 'blockIdx.x')", "T.thread_binding(32, 'threadIdx.x')"]
    outer, inner = loops if bound else ("range((m + 31) // 32)", "range(32)")
    return tvm.script.from_source(f"""@T.prim_func(s_tir=True)
def main(a: T.handle, b: T.handle):
    m = T.int32()
    A = T.match_buffer(a, (m,), "float32")
    B = T.match_buffer(b, (m,), "float32")
    with T.sblock("root"):
        for block in {outer}:
            for thread in {inner}:
                with T.sblock("copy"):
                    i = T.axis.spatial(m, block * 32 + thread)
                    T.where(block * 32 + thread < {rows})
                    B[i] = A[i]
                    {also}
""")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_functions_with_numbers_workspaces_and_several_kernels_are_checked(dtype: str) -> None:
    before = two_kernels(dtype)
    done = check_function(before, bound(before, "scaled", "B"), TARGET, SIZES)
    assert len(done.kernels) == 2
    assert 0 <= done.worst < 1


def test_results_that_are_read_again_and_those_that_are_updated_are_checked() -> None:
    """The sums are a result of the first kernel; B is what it was, and more."""
    text = """@T.prim_func(s_tir=True)
def main(a: T.handle, s: T.handle, b: T.handle):
    m = T.int32()
    A = T.match_buffer(a, (m, 8), "float32")
    S = T.match_buffer(s, (m,), "float32")
    B = T.match_buffer(b, (m,), "float32")
    for i, j in T.grid(m, 8):
        with T.sblock("S"):
            vi, vj = T.axis.remap("SR", [i, j])
            with T.init():
                S[vi] = T.float32(0)
            S[vi] = S[vi] + A[vi, vj]
    for i in LOOP:
        with T.sblock("B"):
            vi = T.axis.spatial(m, i)
            B[vi] = B[vi] + S[vi] * T.float32(FACTOR)
"""

    def made(loop: str, factor: str) -> tirx.PrimFunc:
        return tvm.script.from_source(text.replace("LOOP", loop).replace("FACTOR", factor))

    before, by_blocks = made("range(m)", "2"), "T.thread_binding(m, 'blockIdx.x')"
    check_function(before, bound(made(by_blocks, "2"), "S"), TARGET, {"m": 40})
    with pytest.raises(WrongFunction, match="elements of B"):
        check_function(before, bound(made(by_blocks, "3"), "S"), TARGET, {"m": 40})


def test_another_function_is_told_from_it() -> None:
    with pytest.raises(WrongFunction, match="128 of 132 elements of B"):  # the middle row is where it was
        check_function(two_kernels(), bound(two_kernels(reverse=False), "scaled", "B"), TARGET, SIZES)


@pytest.mark.parametrize(
    ("dtype", "sums"),
    [("float16", "float16"), ("bfloat16", "float32"), ("float8_e4m3fn", "float32"), ("int8", "int32")],
)
def test_a_missing_summand_is_told_in_every_dtype(dtype: str, sums: str) -> None:
    before = row_sums(dtype, sums)
    check_function(before, bound(before, "B"), TARGET, {"m": 40}, sums="float16" if sums == "float16" else "float32")
    with pytest.raises(WrongFunction, match="elements of B"):
        check_function(before, bound(row_sums(dtype, sums, first=1), "B"), TARGET, {"m": 40})


def test_what_is_not_written_is_told() -> None:
    check_function(copied(bound=False), copied(), TARGET, {"m": 40})
    with pytest.raises(WrongFunction, match=r"1 of 40 elements of B.*\(39,\), is nan"):
        check_function(copied(bound=False), copied("m - 1"), TARGET, {"m": 40})


def test_a_changed_operand_is_told() -> None:
    with pytest.raises(KernelFault, match="operand written"):
        check_function(copied(bound=False), copied(also="A[i] = B[i] * 2"), TARGET, {"m": 40})


def test_kernels_are_those_of_the_sizes_at_hand() -> None:
    few, many = (lower_ahead(bound(row_sums("float32", "float32"), "B", threads=t), TARGET) for t in (32, 64))
    chosen = by_extent([(32, few), (None, many)])
    before = row_sums("float32", "float32")
    kernels = [check_function(before, chosen, TARGET, {"m": m}, runs=1).kernels for m in (0, 1, 32, 33)]
    assert kernels[0] == ()
    assert kernels[1] == kernels[2] != kernels[3]
    assert {len(names) for names in kernels[1:]} == {1}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_what_frameworks_compute_between_products_is_emulated(dtype: str) -> None:
    """In the dtype itself, as TVM's own operators do it, each result rounded to it."""
    a = te.placeholder((40,), dtype, "A")
    operators: dict[str, Callable[[tirx.Expr], tirx.Expr]] = {
        "tanh": tirx.tanh,
        "silu": lambda x: x * tirx.sigmoid(x),
        "rsqrt": lambda x: tirx.rsqrt(x * x + tirx.const(1, dtype)),
        "wave": lambda x: tirx.floor(tirx.sin(x)) - tirx.cos(x) / (tirx.exp(x) + tirx.const(1, dtype)),
    }

    def each(name: str) -> te.Tensor:
        return te.compute((40,), lambda i: operators[name](a[i]), name)

    parts = [each(name) for name in operators]
    before = te.create_prim_func([a, te.compute((40,), lambda i: sum((p[i] for p in parts[1:]), parts[0][i]), "B")])
    assert len(check_function(before, bound(before, *operators, "B"), TARGET).kernels) == 5


def scaled_rows(rows: tirx.Expr, columns: tirx.Expr, *more: tirx.Var, dtype: str = "float32") -> tirx.PrimFunc:
    """B[i, j] = A[i, j] · 2, or what ``more`` numbers it is added."""
    a = te.placeholder((rows, columns), dtype, "A")
    b = te.compute(a.shape, lambda i, j: sum((one.astype(dtype) for one in more), a[i, j] * tirx.const(2, dtype)), "B")
    return te.create_prim_func([a, *more, b])


def bodies(before: tirx.PrimFunc, *limits: int | None) -> list[tuple[int | None, tirx.PrimFunc]]:
    """Lower a function once for each range, by other numbers of threads."""
    return [(most, lower_ahead(bound(before, "B", threads=32 * (n + 1)), TARGET)) for n, most in enumerate(limits)]


def test_one_of_several_extents_chooses() -> None:
    rows, columns = tirx.Var("rows", "int32"), tirx.Var("columns", "int32")
    before = scaled_rows(rows, columns)
    with pytest.raises(NotTaken, match=r"got rows, columns, limit 1.*extent="):
        by_extent(bodies(before, 8, None))
    with pytest.raises(NotTaken, match="got rows, columns, and depth"):
        by_extent(bodies(before, 8, None), extent="depth")
    for chooser in ("rows", "columns"):
        chosen = by_extent(bodies(before, 8, None), extent=chooser)
        sizes = {"rows": 5, "columns": 5}
        few = check_function(before, chosen, TARGET, sizes, runs=1)
        many = check_function(before, chosen, TARGET, {**sizes, chooser: 9}, runs=1)
        assert few.kernels != many.kernels
        assert check_function(before, chosen, TARGET, {**sizes, chooser: 0}, runs=1).kernels == ()


def test_numbers_of_a_call_may_choose_and_stand_in_products_alone() -> None:
    """The extent of A is 4·n, and n, of 64 bits, a parameter: as Relax passes the variables of its shapes."""
    n, k = tirx.Var("n", "int64"), tirx.Var("k", "int64")
    before = scaled_rows(n * 4, 3, n, k)
    chosen = by_extent(bodies(before, 2, None))
    made = [check_function(before, chosen, TARGET, {"n": size, "k": -(2**31)}, runs=1) for size in (0, 2, 3)]
    assert [len(one.kernels) for one in made] == [0, 1, 1]
    assert made[1].kernels != made[2].kernels


def test_an_extent_that_no_result_has_launches_what_begins_the_sums() -> None:
    depth = tirx.Var("depth", "int32")
    a, k = te.placeholder((7, depth), "float32", "A"), te.reduce_axis((0, depth), "k")
    before = te.create_prim_func([a, te.compute((7,), lambda i: te.sum(a[i, k], [k]), "B")])
    chosen = by_extent(bodies(before, 4, None))
    host = generate(tvm.IRModule({"main": chosen}), TARGET, "s_tir").host
    assert [len(read_host(host, {"depth": size}).launches) for size in (0, 4, 5)] == [1, 1, 1]
    check_function(before, chosen, TARGET, {"depth": 5}, runs=1)


@pytest.mark.parametrize("limits", [(), (8,), (8, 8, None), (9, 8, None), (0, None), (-1, None), (None, None)], ids=str)
def test_ranges_that_do_not_rise_to_any_are_refused(limits: tuple[int | None, ...]) -> None:
    made = bodies(scaled_rows(tirx.Var("m", "int32"), 4), *limits)
    with pytest.raises(NotTaken, match="rise from 1 on"):
        by_extent(made)


def test_bodies_of_other_parameters_are_refused() -> None:
    m = tirx.Var("m", "int32")
    ((_, few),), ((_, wide),) = (bodies(scaled_rows(m, columns), None) for columns in (4, 5))
    with pytest.raises(NotTaken, match=r"float32\[m, 4\].* limit .*float32\[m, 5\]"):
        by_extent([(8, few), (None, wide)])


def test_indices_beyond_32_bits_are_refused_by_the_function_itself() -> None:
    before = scaled_rows(tirx.Var("m", "int32"), 4096)
    ((_, lowered),) = bodies(before, None)
    limited = limit_indices(lowered)
    check_function(before, limited, TARGET, {"m": 3}, runs=1)
    host = generate(tvm.IRModule({"main": limited}), TARGET, "s_tir").host
    most = 2**31 // 4096 - 4096 - 1
    assert len(read_host(host, {"m": most}).launches) == 1
    with pytest.raises(UnsupportedLaunch, match=f"A, padded to whole tiles, has {2**31} elements or more"):
        read_host(host, {"m": most + 1})
    ((_, wide),) = bodies(scaled_rows(tirx.Var("m", "int64"), 4096), None)
    assert limit_indices(wide).same_as(wide)


@pytest.mark.parametrize(("behind", "padding"), [((197, 4096), 21), ((32, 128), 4096), ((151552,), 4096), ((), 4096)])
def test_images_of_rows_are_rounded_up_by_whole_images(behind: tuple[int, ...], padding: int) -> None:
    """A block of a vision transformer has images of 197 rows; 4096 more images would never fit into 32 bits."""
    images = tirx.Var("images", "int32")
    limit = limit_of(te.create_prim_func([te.placeholder((images, *behind), "float16", "A")]).params[0])
    most = (2**31 - 1) // math.prod(behind) - padding
    assert [evaluate(limit.condition, {images: number}) for number in (most, most + 1)] == [True, False]


def test_a_host_function_is_read_as_far_as_its_numbers_are_known() -> None:
    host = generate(tvm.IRModule({"main": bound(two_kernels(), "scaled", "B")}), TARGET, "s_tir").host
    assert [launch.grid[0] for launch in read_host(host, SIZES).launches] == [5, 5]
    assert [buffer.shape for buffer in read_host(host, SIZES).kept] == [(132,)]
    with pytest.raises(UnsupportedLaunch, match="known only at run time"):
        read_host(host, {"s": 1.0, "k": 1})
    with pytest.raises(UnsupportedLaunch, match=r"no matrix .*got s"):
        read_host(host, {"n": 1, "k": 1})


def test_arithmetic_of_the_host_does_not_wrap() -> None:
    rows, last = tirx.Var("rows", "int32"), tirx.const(2**31 - 1, "int32")
    assert evaluate(rows * 2 // 3 - rows % 7, {rows: 100}) == 64
    assert evaluate(tirx.truncdiv(rows, 3) + tirx.truncmod(rows, 3), {rows: -100}) == -34
    assert evaluate(tirx.all(rows > 5, tirx.Var("unknown", "int32") > 1), {rows: 5}) == 0
    assert evaluate(tirx.all(rows > 5, tirx.Var("unknown", "int32") > 1), {rows: 6}) is None
    assert evaluate(tirx.if_then_else(rows > 5, rows << 2, last), {rows: 6}) == 24
    with pytest.raises(UnsupportedLaunch, match=f"got {2**32}, limit below {2**31}"):
        evaluate(rows * 2**16, {rows: 2**16})


def test_rows_and_columns_reach_the_last_element_that_32_bits_number() -> None:
    (softmax,) = legalized(relax.op.nn.softmax, (32, "m", "n"), dtype="float32")
    (added,) = legalized(lambda x: x + x, (32, "m", "n"), dtype="float32")

    def launches(rule: Rule, function: tirx.PrimFunc, m: int, n: int) -> int:
        mod = tvm.IRModule({"main": rule.take(function, TARGET).with_attr("global_symbol", "main")})
        return len(read_host(generate(mod, TARGET, "s_tir").host, {"m": m, "n": n}).launches)

    assert launches(Rows(), softmax, 8192, 8192) == 1
    for m, n in ((8193, 8192), (2**26, 1)):
        with pytest.raises(UnsupportedLaunch, match=f"has {2**31} elements or more"):
            launches(Rows(), softmax, m, n)
    assert launches(Elementwise(), added, 7935, 7936) == 1
    with pytest.raises(UnsupportedLaunch, match=f"has {2**31} elements or more"):
        launches(Elementwise(), added, 8192, 8192)
