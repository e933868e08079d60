"""What the rules make of functions that are seldom written: nothing to compute, one number, elements of few bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import tvm
from tvm import relax, te, tirx, topi
from tvm.s_tir import dlight

from support.functions import check_function
from tensorir_ladder.relax import explain
from tensorir_ladder.relax.rules import is_scheduled, product_of, rules
from tensorir_ladder.schedules.errors import IllegalSchedule

TARGET, AMPERE = (tvm.target.Target({"kind": "cuda", "arch": arch}) for arch in ("sm_90a", "sm_80"))


def taken(function: tirx.PrimFunc, target: tvm.target.Target = TARGET) -> tuple[str, tirx.PrimFunc | None]:
    """The first rule that takes a function, and what it makes of it; an exception that is no refusal is a failure."""
    for rule in rules(target):
        try:
            return rule.name, rule.take(function, target)
        except IllegalSchedule:
            continue
    return "", None


def product(
    m: int, n: int, k: int, dtype: str = "float16", sums: str = "float32", scaled: bool = False
) -> tirx.PrimFunc:
    """A[m, k] times B[n, k] transposed, and where it is ``scaled``, times one number in a buffer of no dimensions."""
    a, b = te.placeholder((m, k), dtype, "A"), te.placeholder((n, k), dtype, "B")
    scale, axis = te.placeholder((), "float32", "scale"), te.reduce_axis((0, k), "k")
    c = te.compute((m, n), lambda i, j: te.sum(a[i, axis].astype(sums) * b[j, axis].astype(sums), [axis]), "C")
    if not scaled:
        return te.create_prim_func([a, b, c])
    d = te.compute((m, n), lambda i, j: (c[i, j].astype("float32") * scale()).astype("float32"), "D")
    return te.create_prim_func([a, b, scale, d])


def of_one(shape: Sequence[int], operator: str, dtype: str = "float16") -> tirx.PrimFunc:
    a = te.placeholder(shape, dtype, "A")
    found = getattr(topi, operator, None) or getattr(topi.nn, operator)
    return te.create_prim_func([a, found(a, axis=-1) if operator in ("sum", "max", "softmax", "argmax") else found(a)])


EMPTY = {
    "product of no rows": product(0, 96, 64),
    "product of no columns": product(32, 0, 64),
    "elements": of_one((5, 0), "tanh"),
    "transposed": of_one((0, 40), "transpose"),
    "sums of no rows": of_one((0, 5), "sum"),
    "places of no rows": of_one((2, 0, 3), "argmax"),
    "softmax of no rows": of_one((0, 5), "softmax"),
    "softmax of nothing": of_one((5, 0), "softmax"),
}


@pytest.mark.parametrize("name", EMPTY)
def test_a_function_without_results_launches_nothing(name: str) -> None:
    with TARGET:
        made = dlight.ApplyDefaultSchedule(*rules(TARGET))(tvm.IRModule({"main": EMPTY[name]}))
    assert made["main"].attrs["tensorir_ladder.rule"] == "elementwise"
    assert not tvm.compile(made, TARGET).mod.imports


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("function", "value"),
    [(product(40, 48, 0), 0), (of_one((5, 0), "sum"), 0), (of_one((0,), "max"), -65504)],
    ids=["product", "sum", "maximum"],
)
def test_a_reduction_of_nothing_is_what_it_begins_with(function: tirx.PrimFunc, value: int) -> None:
    *operands, result = function.params
    given = [te.placeholder(p.shape, p.dtype, p.name) for p in operands]
    filled = te.compute(result.shape, lambda *_: tirx.const(value, result.dtype), result.name)
    assert taken(function)[1] is not None
    check_function(te.create_prim_func([*given, filled]), taken(function)[1], TARGET)


@pytest.mark.sampled(4)
@pytest.mark.emulator
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize(("dtype", "sums"), [("float16", "float32"), ("float32", "float32"), ("int8", "int32")])
@pytest.mark.parametrize("rows", [3, 40])
def test_a_product_is_scaled_by_a_buffer_of_no_dimensions(arch: str, dtype: str, sums: str, rows: int) -> None:
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    before = product(rows, 48, 64, dtype, sums, scaled=True)
    rule, after = taken(before, target)
    assert rule == ("decode" if rows < 8 else "contraction")
    check_function(before, after, target)


def test_results_that_are_rotated_are_left() -> None:
    """TVM's inverse of the index would have them where they were."""
    a, b, axis = te.placeholder((40, 64), "float16"), te.placeholder((64, 48), "float16"), te.reduce_axis((0, 64), "k")
    c = te.compute((40, 48), lambda i, j: te.sum(a[i, axis].astype("float32") * b[axis, j].astype("float32"), [axis]))

    def read(at: Callable[[tirx.Var], tirx.Expr]) -> tirx.PrimFunc:
        return te.create_prim_func([a, b, te.compute((40, 48), lambda i, j: c[39 - i, at(j)])])

    for rotated in (lambda j: (j + 3) % 48, lambda j: (j - 3) % 48, lambda j: j // 8 * 8 + (j + 3) % 8):
        with pytest.raises(IllegalSchedule, match="exactly one element"):
            product_of(read(rotated))
    assert product_of(read(lambda j: 47 - j))
    assert product_of(read(lambda j: j % 2 * 24 + j // 2))


@pytest.mark.emulator
@pytest.mark.parametrize("word", ["uint8", "int8"])
def test_weights_of_four_bits_in_bytes_along_the_reduction_are_compiled(word: str) -> None:
    """Their shift is one for a row of columns: of a vector of bytes TVM packs nothing but constants."""
    a, w = te.placeholder((64, 128), "float16", "A"), te.placeholder((64, 48), word, "W")
    axis = te.reduce_axis((0, 128), "k")

    def unpacked(k: tirx.Var, j: tirx.Var) -> tirx.Expr:
        code = (w[k // 2, j] >> (k % 2 * 4).astype(word)) & tirx.const(15, word)
        return code.astype("float16") - tirx.const(8, "float16")

    wide = te.compute((128, 48), unpacked, "wide")
    before = te.create_prim_func([a, w, te.compute((64, 48), lambda i, j: te.sum(a[i, axis] * wide[axis, j], [axis]))])
    rule, after = taken(before)
    assert rule == "contraction"
    check_function(before, after, TARGET)


def prepared(how: Callable[[te.Tensor, te.Tensor], te.Tensor], rows: int) -> tirx.PrimFunc:
    """What ``how`` makes of two matrices of one shape, times a third."""
    a, s, b = (te.placeholder(x, "float16", n) for x, n in (((rows, 64), "A"), ((rows, 64), "S"), ((64, 48), "B")))
    axis, made = te.reduce_axis((0, 64), "k"), how(a, s)
    c = te.compute((rows, 48), lambda i, j: te.sum(made[i, axis] * b[axis, j], [axis]), "C")
    return te.create_prim_func([a, s, b, c])


@pytest.mark.emulator
@pytest.mark.parametrize(("rows", "rule"), [(3, "decode"), (40, "contraction")])
def test_an_operand_is_computed_from_two_of_one_shape(rows: int, rule: str) -> None:
    before = prepared(topi.add, rows)
    by, after = taken(before)
    assert by == rule
    check_function(before, after, TARGET)


def test_blocks_declare_all_that_they_read() -> None:
    product = product_of(prepared(topi.add, 40))
    (first,) = [product.sch.get(block) for block in product.sch.get_producers(product.block)]
    assert [str(region.source.name) for region in first.reads] == ["A", "S"]


@pytest.mark.emulator
def test_a_cast_through_8_bit_floats_is_compiled() -> None:
    """Of vectors of more than four nvcc takes none."""
    before = prepared(lambda a, s: topi.cast(topi.cast(a, "float8_e4m3fn"), "float16"), 40)
    check_function(before, taken(before, AMPERE)[1], AMPERE)


@pytest.mark.emulator
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("operator", ["sum", "max", "argmax"])
def test_rows_of_8_bit_floats_are_reduced_in_float32(dtype: str, operator: str) -> None:
    """CUDA adds, compares and shuffles no numbers of 8 bits."""
    before = of_one((8, 40), operator, dtype)
    rule, after = taken(before)
    assert rule == "rows"
    check_function(before, after, TARGET)


@pytest.mark.emulator
def test_products_of_8_bit_floats_are_right() -> None:
    for before in (product(40, 48, 72, "float8_e4m3fn"), product(2, 48, 72, "float8_e5m2")):
        check_function(before, taken(before)[1], TARGET)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (of_one((40, 64), "relu", "float8_e4m3fn"), "arithmetic in 8-bit floats"),
        (product(40, 48, 64, "int4", "int32"), "no whole bytes"),
        (product(2, 48, 64, "int4", "int32"), "no whole bytes"),
    ],
    ids=["8-bit floats", "int4", "int4 of few rows"],
)
def test_what_cuda_cannot_compute_is_left_with_the_reason(function: tirx.PrimFunc, reason: str) -> None:
    """nvcc has no operators for the first; of the others TVM's CUDA takes eight numbers for one."""
    for rule in rules(TARGET):
        with pytest.raises(IllegalSchedule) as left:
            rule.take(function, TARGET)
    assert reason in str(left.value)


def scaled(**attributes: object) -> tvm.IRModule:
    a = te.placeholder((64,), "float32", "A")
    function = te.create_prim_func([a, te.compute((64,), lambda i: a[i] * 2.0, "B")])
    return tvm.IRModule({"scaled": function.with_attrs({"global_symbol": "scaled", **attributes})})


@pytest.mark.parametrize(
    "attributes",
    [{"target": tvm.target.Target("llvm")}, {"tirx.is_host_func": True}],
    ids=lambda given: next(iter(given)),
)
def test_functions_for_the_cpu_get_no_kernels_of_ours(attributes: dict[str, object]) -> None:
    mod = scaled(**attributes)
    assert not any(rule.apply(mod["scaled"], attributes.get("target", TARGET)) for rule in rules(TARGET))
    assert explain(mod, TARGET)["scaled"].rule not in {rule.name for rule in rules(TARGET)}


def test_the_pipeline_changes_no_module_and_keeps_what_else_is_in_it() -> None:
    mod = scaled().with_attr("external_mods", ["theirs"])
    before = mod.script()
    made = relax.get_pipeline("tensorir_ladder", target=TARGET)(mod)
    assert mod.script() == before
    assert is_scheduled(made["scaled"])
    assert list(made.attrs["external_mods"]) == ["theirs"]


def test_a_target_is_given_as_tvm_takes_it() -> None:
    for given in ("nvidia/nvidia-h100", {"kind": "cuda", "arch": "sm_90a"}):
        assert len(rules(given)) == len(rules(TARGET))
        assert explain(scaled(), given)["scaled"].rule == "elementwise"
        assert is_scheduled(relax.get_pipeline("tensorir_ladder", target=given)(scaled())["scaled"])
    for refused in ("llvm", None):
        with pytest.raises(IllegalSchedule, match=f"got {refused}"):
            rules(refused)


def test_a_transpose_whose_whole_tiles_no_index_counts_is_compiled_without_them() -> None:
    function = of_one((32767, 65536), "transpose")
    assert tvm.compile(
        tvm.IRModule({"main": taken(function)[1].with_attr("global_symbol", "main")}), TARGET
    ).mod.imports
