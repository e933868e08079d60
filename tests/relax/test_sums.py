"""Functions before rules are asked: what a sum of one step, one that nobody reads, and one of 16 bits become."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import s_tir, te, tirx
from tvm.s_tir import Schedule

from tensorir_ladder.harness.machines import machine_for
from tensorir_ladder.lab.function_check import check_function
from tensorir_ladder.relax.rules.for_target import dlight_rules, dlight_target
from tensorir_ladder.relax.rules.sums import summed_in_float32, without_single_steps, without_unread

TARGET = machine_for("sm_90a").target()


def product(k: int | tirx.Var, dtype: str, after=lambda total: total, m: int = 5, n: int = 7) -> tirx.PrimFunc:
    """A product of m x k by k x n and what becomes of each sum."""
    a, b = te.placeholder((m, k), dtype, name="a"), te.placeholder((k, n), dtype, name="b")
    step = te.reduce_axis((0, k), name="k")
    c = te.compute((m, n), lambda i, j: te.sum(a[i, step] * b[step, j], axis=step), name="c")
    d = te.compute((m, n), lambda i, j: after(c[i, j]), name="d")
    return te.create_prim_func([a, b, d]).with_attr("global_symbol", "main")


def reductions(function: tirx.PrimFunc) -> list[s_tir.SBlock]:
    """Blocks that begin with something and go on with it."""
    found: list[s_tir.SBlock] = []
    tvm_ffi.structural_walk(function.body, (s_tir.SBlock, found.append))
    return [block for block in found if block.init is not None]


def on_cpu(function: tirx.PrimFunc, *arrays: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    out = tvm.runtime.tensor(np.full(shape, np.nan, str(function.params[-1].dtype)))
    tvm.compile(tvm.IRModule({"main": function}), "llvm")["main"](*map(tvm.runtime.tensor, arrays), out)
    return out.numpy()


@pytest.mark.parametrize(
    "after", [tirx.exp, lambda total: total * total, lambda total: total], ids=["exp", "square", "sum"]
)
def test_a_sum_of_one_step_is_none(after) -> None:
    function = product(1, "float32", after)
    plain = without_single_steps(function)
    assert reductions(function)
    assert not reductions(plain)
    a, b = (np.random.default_rng(0).standard_normal(shape).astype("float32") for shape in ((5, 1), (1, 7)))
    np.testing.assert_array_equal(on_cpu(plain, a, b, shape=(5, 7)), on_cpu(function, a, b, shape=(5, 7)))


@pytest.mark.parametrize("k", [0, 2, tirx.Var("k", "int32")], ids=str)
def test_a_sum_of_none_or_more_steps_stays(k: int | tirx.Var) -> None:
    function = product(k, "float32")
    assert without_single_steps(function).same_as(function)


def test_what_nothing_reads_goes_with_all_that_it_alone_reads() -> None:
    x = te.placeholder((6, 64), "float32", name="x")
    k = te.reduce_axis((0, 64), name="k")
    twice = te.compute((6, 64), lambda i, j: x[i, j] * 2, name="twice")
    total = te.compute((6,), lambda i: te.sum(twice[i, k], axis=k), name="total")
    mean = te.compute((6,), lambda i: total[i] / 64, name="mean")
    shown = te.compute((6,), lambda i: mean[i] * mean[i], name="shown")
    read = te.create_prim_func([x, shown])
    assert without_unread(read).same_as(read)

    def constant(store: tirx.BufferStore) -> tirx.BufferStore:
        return tirx.BufferStore(store.buffer, tirx.const(1, "float32"), store.indices) if is_shown(store) else store

    def is_shown(store: tirx.BufferStore) -> bool:
        return store.buffer.same_as(read.params[-1])

    unread = read.with_body(tvm_ffi.structural_map(read.body, (tirx.BufferStore, constant)))
    sch = Schedule(without_unread(unread))
    root = sch.get_sblock("root")
    assert [sch.get(block).name_hint for block in sch.get_child_blocks(root)] == ["shown"]
    assert not sch.get(root).alloc_buffers


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("after", [lambda total: total, lambda total: total * total], ids=["sum", "square"])
def test_sums_of_16_bits_are_rounded_once(dtype: str, after) -> None:
    function = product(300, dtype, after)
    wide = summed_in_float32(function)
    assert {str(block.body.buffer.dtype) for block in reductions(wide)} == {"float32"}
    numpy = np.dtype(getattr(ml_dtypes, dtype, dtype))
    a, b = (np.random.default_rng(1).standard_normal(shape).astype(numpy) for shape in ((5, 300), (300, 7)))
    total = (a.astype("float32") @ b.astype("float32")).astype(numpy)
    found = on_cpu(wide, a, b, shape=(5, 7)).astype("float32")
    np.testing.assert_allclose(found, after(total).astype("float32"), rtol=float(ml_dtypes.finfo(numpy).eps))


def test_a_sum_that_is_the_result_is_rounded_behind_it() -> None:
    x, k = te.placeholder((9, 257), "bfloat16", name="x"), te.reduce_axis((0, 257), name="k")
    function = te.create_prim_func([x, te.compute((9,), lambda i: te.max(x[i, k], axis=k), name="most")])
    given = np.random.default_rng(2).standard_normal((9, 257)).astype(ml_dtypes.bfloat16)
    found = on_cpu(summed_in_float32(function.with_attr("global_symbol", "main")), given, shape=(9,))
    np.testing.assert_array_equal(found, given.max(axis=1))


@pytest.mark.parametrize(
    "function",
    [
        product(1, "float32", lambda total: total * total),
        product(64, "bfloat16", tirx.exp, m=1),
        product(70, "bfloat16", lambda total: total * total, m=3, n=33),
    ],
    ids=["one step", "a vector", "tiles"],
)
def test_what_dlight_is_given_is_right(function: tirx.PrimFunc) -> None:
    """By the first of dlight's rules that takes the function."""
    for rule in dlight_rules():
        with dlight_target(TARGET):
            made = rule.apply(function, dlight_target(TARGET))
        if made is not None:
            check_function(function, made, TARGET)
            return
    pytest.fail("no rule takes it")
