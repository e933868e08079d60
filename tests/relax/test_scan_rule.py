"""Scans: cumulative sums and products along any axis, of any dtype and length; and the passes that lead to them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax, te, tirx, topi

from support.functions import check_function
from support.relax_modules import functions_of, made_of
from support.schedules_on_cpu import TARGET
from tensorir_ladder.kernels.codegen.lowering import generate
from tensorir_ladder.kernels.codegen.toolchain import Compiler, compile_cubin
from tensorir_ladder.relax import LegalizeScans, SimplifyShapes, fuse_operators
from tensorir_ladder.relax.rules import NotTaken, Scan
from tensorir_ladder.relax.rules.rule import BY, HOW, is_scheduled

CPU = tvm.target.Target({"kind": "llvm", "opt-level": 1})
OPERATORS = {"cumsum": relax.op.cumsum, "cumprod": relax.op.cumprod}


@dataclass(frozen=True)
class Case:
    """A scan of an input of this shape, where a name is a symbolic extent; its ``sizes``, each a call."""

    shape: tuple[int | str, ...]
    axis: int
    dtype: str
    operator: str = "cumsum"
    out: str | None = None
    exclusive: bool = False
    sizes: tuple[dict[str, int], ...] = ({},)

    def module(self) -> tvm.IRModule:
        """The operator in a module."""

        def body(x: relax.Expr) -> relax.Expr:
            return OPERATORS[self.operator](x, axis=self.axis, dtype=self.out, exclusive=self.exclusive)

        return made_of({"x": (self.shape, self.dtype)}, body)

    def function(self) -> tirx.PrimFunc:
        """What our passes make of it."""
        (function,) = functions_of(fuse_operators(TARGET)(self.module())).values()
        return function


LENGTHS = tuple({"n": n, "m": m} for n, m in ((3, 8), (2, 129), (0, 8), (2, 0), (2, 1), (1, 4104)))
CASES = {
    "int64": Case((2, 300), 1, "int64"),
    "prime_length": Case((3, 1031), -1, "float32", exclusive=True),
    "short_rows": Case((70, 5), 1, "int32", "cumprod"),
    "one_row_of_threads": Case((9, 33), 1, "uint32"),
    "rows_of_two_warps": Case((7, 256), 1, "int64", "cumprod"),
    "halves_in_float32": Case((2, 4100), 1, "float16"),
    "bfloat16": Case((2, 100), 1, "bfloat16", "cumprod", exclusive=True),
    "bytes_wrap": Case((2, 700), 1, "int8"),
    "wider_result": Case((3, 130), 1, "uint8", out="int64"),
    "counted_flags": Case((3, 200), 1, "bool", out="int64"),
    "any_flag": Case((3, 200), 1, "bool"),
    "all_flags": Case((3, 20), 1, "bool", "cumprod", exclusive=True),
    "float64": Case((3, 70), 0, "float64"),
    "columns": Case((2, 37, 64), 1, "float16"),
    "uneven_columns": Case((40, 45), 0, "int64", exclusive=True),
    "few_columns": Case((500, 3), 0, "float32"),
    "symbolic": Case(("n", "m"), 1, "int64", sizes=LENGTHS),
    "symbolic_columns": Case(("n", "m", 40), 1, "float16", exclusive=True, sizes=LENGTHS[:-1]),
    "symbolic_inner": Case((2, 9, "m"), 1, "float32", sizes=({"m": 40}, {"m": 3})),
    "one_symbol": Case(("n",), 0, "float32", sizes=({"n": 5000}, {"n": 31})),
}
QUICK = ("int64", "counted_flags")


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.emulator) for name in CASES]
)
def test_scans_compute_what_they_did(name: str) -> None:
    function = CASES[name].function()
    taken = Scan().take(function, TARGET)
    for sizes in CASES[name].sizes:
        launched = check_function(function, taken, TARGET, sizes, runs=2, slack=4).kernels
        assert len(launched) == (sizes.get("n") != 0)


@pytest.mark.sampled(8)
@pytest.mark.emulator
@pytest.mark.parametrize("seed", range(16))
def test_drawn_scans_compute_what_they_did(seed: int) -> None:
    random = np.random.default_rng(seed)
    shape = [int(random.choice([1, 2, 3, 8, 33, 40])) for _ in range(random.integers(1, 4))]
    axis = int(random.integers(len(shape)))
    most = 2**20 // math.prod(shape[:axis] + shape[axis + 1 :])  # steps of the reference, the square of the length
    shape[axis] = int(random.choice([n for n in (2, 5, 31, 64, 127, 256, 300, 1024) if n * n <= most]))
    sizes = {f"n{place}": extent for place, extent in enumerate(shape) if random.random() < 0.3}
    written = tuple(f"n{place}" if f"n{place}" in sizes else extent for place, extent in enumerate(shape))
    dtype = str(random.choice(["int8", "int16", "int32", "int64", "uint8", "float16", "bfloat16", "float32", "bool"]))
    operator = "cumsum" if "float" in dtype else str(random.choice(["cumsum", "cumprod"]))  # which overflows
    case = Case(written, axis, dtype, operator, None if dtype != "bool" else "int64", bool(random.random() < 0.3))
    function = case.function()
    check_function(function, Scan().take(function, TARGET), TARGET, sizes, runs=2, slack=4, seed=seed)


@pytest.mark.sampled(2)
@pytest.mark.emulator
@pytest.mark.parametrize(("shape", "axis"), [((2, 20003), 1), ((1, 256, 64), 1)])
def test_few_long_rows_are_scanned_by_many_blocks(shape: tuple[int, ...], axis: int) -> None:
    """The reference adds up by one thread: the legalized form would take its time."""
    taken = Scan().take(Case(shape, axis, "int64", exclusive=True).function(), TARGET)
    x = te.placeholder(shape, "int64", name="x")
    names = [str(parameter.name) for parameter in taken.params]
    plain = te.create_prim_func([x, topi.cumsum(x, axis=axis, exclusive=True)])
    assert len(check_function(_named(plain, names), taken, TARGET, runs=2).kernels) == 2


def _named(function: tirx.PrimFunc, names: list[str]) -> tirx.PrimFunc:
    """A function whose parameters have these names."""
    named = {parameter: tirx.Var(name, parameter.ty) for name, parameter in zip(names, function.params)}
    body = tvm_ffi.structural_map(function.body, (tirx.Var, lambda var: named.get(var, var)))
    return tirx.PrimFunc(list(named.values()), body, function.ret_type, function.attrs)


@pytest.mark.emulator
def test_what_is_computed_of_results_and_elements_is_part_of_the_kernel() -> None:
    """Places of tokens: cumsum(mask) - 1 where there is a token, else 1."""
    mask = te.placeholder((3, 77), "bool", name="mask")
    counted = te.compute((3, 77), lambda i, j: mask[i, j].astype("int64"), name="counted")
    total = running(counted)
    places = te.compute(
        (3, 77), lambda i, j: tirx.Select(mask[i, j], total[i, j] - 1, tirx.const(1, "int64")), name="y"
    )
    function = te.create_prim_func([mask, places])
    assert len(check_function(function, Scan().take(function, TARGET), TARGET).kernels) == 1


def running(
    x: te.Tensor,
    taken: Callable[[tirx.Var, tirx.Var], tvm.ir.Expr] = lambda k, j: k <= j,
    otherwise: int = 0,
) -> te.Tensor:
    """Sums of the elements of rows for which ``taken`` holds."""
    k = te.reduce_axis((0, x.shape[1]), name="k")
    left = tirx.const(otherwise, x.dtype)
    return te.compute(
        x.shape, lambda i, j: te.sum(tirx.if_then_else(taken(k, j), x[i, k], left), axis=k), name="running"
    )


def test_what_is_no_scan_is_left() -> None:
    x = te.placeholder((4, 8), "float32", name="x")
    for y in (running(x, lambda k, j: k >= j), running(x, lambda k, j: k <= j + 1), running(x, otherwise=1)):
        with pytest.raises(NotTaken, match="running"):
            Scan().take(te.create_prim_func([x, y]), TARGET)
    with pytest.raises(NotTaken, match="one scan"):
        Scan().take(te.create_prim_func([x, topi.tanh(x)]), TARGET)
    shifted = te.compute((4, 8), lambda i, j: running(x)[i, 7 - j], name="shifted")
    with pytest.raises(NotTaken, match="shifted"):
        Scan().take(te.create_prim_func([x, shifted]), TARGET)


def on_cpu(mod: tvm.IRModule, *arrays: np.ndarray) -> np.ndarray:
    """What a module computes on the CPU."""
    machine = relax.VirtualMachine(tvm.compile(mod, CPU), tvm.cpu())
    return machine[next(iter(functions_named(mod)))](*map(tvm.runtime.tensor, arrays)).numpy()


def functions_named(mod: tvm.IRModule) -> list[str]:
    """The Relax functions of a module."""
    return [name.name_hint for name, one in mod.functions_items() if isinstance(one, relax.Function)]


@pytest.mark.parametrize(
    ("axis", "dtype", "out"), [(0, "int32", "int64"), (-1, "int8", None), (None, "float32", None), (1, "bool", None)]
)
@pytest.mark.parametrize("exclusive", [False, True])
def test_legalized_scans_are_numpys(axis: int | None, dtype: str, out: str | None, exclusive: bool) -> None:
    drawn = np.random.default_rng(0).integers(-2, 3, (3, 5, 4)).astype(dtype)
    for operator in OPERATORS:
        body = lambda x, o=operator: OPERATORS[o](x, axis=axis, dtype=out, exclusive=exclusive)  # noqa: E731
        got = on_cpu(LegalizeScans()(made_of({"x": ((3, "n", 4), dtype)}, body)), drawn)
        wanted = getattr(np, operator)(drawn, axis=axis, dtype=out or dtype)
        if exclusive:
            along = 0 if axis is None else axis
            first = np.full_like(wanted.take([0], along), operator == "cumprod")
            wanted = np.concatenate([first, wanted.take(range(wanted.shape[along] - 1), along)], along)
        np.testing.assert_array_equal(got, wanted)


def test_a_scan_of_one_step_has_nothing_to_reduce() -> None:
    for exclusive, value in ((False, 7), (True, 0)):
        body = lambda x, e=exclusive: relax.op.cumsum(x, axis=1, exclusive=e)  # noqa: E731
        mod = LegalizeScans()(made_of({"x": ((3, 1), "int64")}, body))
        np.testing.assert_array_equal(on_cpu(mod, np.full((3, 1), 7)), np.full((3, 1), value))


def test_the_pipeline_takes_scans_before_tvm_does_and_leaves_it_sorts() -> None:
    def body(x: relax.Expr, p: relax.Expr, u: relax.Expr, i: relax.Expr) -> relax.Expr:
        drawn = relax.op.multinomial_from_uniform(p, u, i, dtype="int64")
        top = relax.op.topk(p, 3, axis=1)
        return relax.Tuple([relax.op.cumsum(x, axis=-1), relax.op.sort(p), relax.op.argsort(p), top, drawn])

    inputs = {"x": ((2, "n"), "int64"), "p": ((2, 64), "float32"), "u": ((2, 1), "float32"), "i": ((2, 1), "int64")}
    mod = relax.get_pipeline("tensorir_ladder", target=TARGET)(made_of(inputs, body))
    functions = functions_of(mod)
    assert all(map(is_scheduled, functions.values()))
    assert [name for name, one in functions.items() if one.attrs.get(BY) == "scan"] == ["cumsum"]
    assert {"argsort", "sort", "topk"} <= {name.strip("0123456789_") for name in functions}
    tvm.compile(mod, TARGET)


def test_operands_of_unknown_shape_are_scanned() -> None:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(dtype="int64", ndim=2))
    with builder.function("forward", [x]):
        with builder.dataflow():
            out = builder.emit_output(relax.op.cumsum(x, axis=1))
        builder.emit_func_output(out)
    mod = relax.get_pipeline("tensorir_ladder", target=TARGET)(builder.finalize())
    assert [str(one.attrs[BY]) for one in functions_of(mod).values()] == ["scan"]
    tvm.compile(mod, TARGET)


def packed(least: int | None = 2) -> tvm.IRModule:
    """What transformers asks of token numbers: how many breaks there are up to each (torch.diff, and a cumsum)."""

    def body(x: relax.Expr) -> relax.Expr:
        builder, (_, n) = relax.BlockBuilder.current(), x.ty.shape.values
        first = builder.emit(relax.op.strided_slice(x, [1], [0], [1], [1]))
        longer = builder.emit(relax.op.concat([relax.op.subtract(first, relax.const(1, "int64")), x], axis=-1))
        low = builder.emit(relax.op.strided_slice(longer, [-1], [0], [n], [1]))
        high = builder.emit(relax.op.strided_slice(longer, [-1], [1], [n + 1], [1]))
        breaks = relax.op.not_equal(builder.emit(relax.op.subtract(high, low)), relax.const(1, "int64"))
        return relax.op.cumsum(relax.op.astype(breaks, "int64"), axis=-1)

    mod = made_of({"x": ((1, "n"), "int64")}, body)
    bounds = {"tir_var_lower_bound": {"n": least}, "tir_var_upper_bound": {"n": 4096}}
    mod["forward"] = mod["forward"].with_attrs(bounds)
    return mod


def test_symbolic_slices_of_an_exported_model_are_compiled() -> None:
    numbers = np.array([[0, 1, 2, 0, 1, 0, 1, 2, 3]])
    got = on_cpu(LegalizeScans()(SimplifyShapes()(packed())), numbers)
    np.testing.assert_array_equal(got, [[0, 0, 0, 1, 1, 2, 2, 2, 2]])
    mod = relax.get_pipeline("tensorir_ladder", target=TARGET)(packed())
    assert any(one.attrs.get(BY) == "scan" for one in functions_of(mod).values())
    tvm.compile(mod, TARGET)


def test_a_call_outside_of_the_bounds_is_refused_where_it_matters() -> None:
    mod = LegalizeScans()(SimplifyShapes()(packed()))
    with pytest.raises((ValueError, RuntimeError)):
        on_cpu(mod, np.zeros((1, 0), "int64"))


@pytest.mark.compiler
@pytest.mark.parametrize("name", ["int64", "halves_in_float32", "symbolic", "columns"])
def test_nvcc_takes_it_without_spills(name: str, compiler: Compiler) -> None:
    taken = Scan().take(CASES[name].function(), TARGET)
    assert "threads" in str(taken.attrs[HOW])
    text = generate(tvm.IRModule({"main": taken.with_attr("global_symbol", "main")}), TARGET, "s_tir").cuda
    assert "__shfl_up_sync" in text or name == "columns"
    assert compile_cubin(text, "sm_90a", compiler).spill_bytes == 0
