"""The Relax pipeline "tensorir_ladder": whole modules by TVM's stock compilation, and each function of them."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax, te, tirx
from tvm.relax.frontend import nn
from tvm.s_tir import dlight

import tensorir_ladder
from support.functions import check_function
from support.relax_modules import MODULES, arrays_of, functions_of, made_of
from tensorir_ladder.harness.machines import machine_for
from tensorir_ladder.lab.module_check import EmulatedModule
from tensorir_ladder.relax import DequantizeInProduct, ReadTransposed, fuse_operators
from tensorir_ladder.relax.rules import Rule, dlight_target, failures_kept
from tensorir_ladder.relax.rules.for_target import OfDlight
from tensorir_ladder.relax.rules.ranges import symbolic_extents
from tensorir_ladder.relax.rules.rule import HOW, is_scheduled
from tensorir_ladder.schedules.errors import IllegalSchedule

TARGET = machine_for("sm_90a").target()
# Written out whole, a loop over numbers of 16 bits takes LLVM minutes.
CPU = tvm.target.Target({"kind": "llvm", "opt-level": 1})
QUICK = ("mlp", "quantised_linear")  # the others cost seconds each
every_module = pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.emulator) for name in MODULES]
)


def kernels(executable: tvm.runtime.Executable) -> set[str]:
    """The kernels in the CUDA texts of a compiled Relax module."""
    texts = [device.inspect_source() for device in executable.mod.imports[0].imports]
    return set(re.findall(r"__global__ void (?:__launch_bounds__\([\d, ]+\) )?(\w+)\(", "".join(texts)))


def outputs(mod: tvm.IRModule, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """What a Relax module computes on the CPU, by TVM's own pipeline."""
    machine = relax.VirtualMachine(tvm.compile(mod, CPU), tvm.cpu())
    found = machine["forward"](*map(tvm.runtime.tensor, arrays))
    return [one.numpy().astype(np.float64) for one in ([found] if hasattr(found, "numpy") else found)]


def same(ones: Sequence[np.ndarray], others: Sequence[np.ndarray], dtype: str) -> None:
    """Hold two lists of outputs to each other, but for a few roundings."""
    for one, other in zip(ones, others, strict=True):
        eps = {"float16": 2.0**-10, "bfloat16": 2.0**-7}.get(dtype, 2.0**-23)
        np.testing.assert_allclose(one, other, rtol=16 * eps, atol=4 * eps * max(1.0, np.abs(other).max()))


@pytest.mark.sampled(4)
@every_module
def test_what_comes_out_is_compiled_by_tvms_stock_pipeline(name: str) -> None:
    """Every function is in the CUDA text, or launches what is linked; scheduled ones come out as they went in."""
    mod = relax.get_pipeline("tensorir_ladder", target=TARGET)(MODULES[name]())
    scheduled = functions_of(mod)
    assert all(map(is_scheduled, scheduled.values())), [n for n, one in scheduled.items() if not is_scheduled(one)]
    found = kernels(tvm.compile(mod, TARGET))
    launching = {name for name, one in scheduled.items() if "TMA" in str((one.attrs or {}).get(HOW, ""))}
    missing = {one for one in scheduled if not any(kernel.startswith(f"{one}_kernel") for kernel in found)}
    assert missing <= launching
    assert not missing or mod.attrs["external_mods"]
    again = functions_of(relax.get_default_pipeline(TARGET)(mod))
    assert {one for one in scheduled if not tvm_ffi.structural_equal(again[one].body, scheduled[one].body)} == set()


@pytest.mark.sampled(3)
@every_module
def test_our_passes_over_relax_change_no_result(name: str) -> None:
    mod = MODULES[name]()
    arrays = arrays_of(mod)
    same(outputs(fuse_operators(CPU)(mod), arrays), outputs(mod, arrays), str(mod["forward"].params[0].ty.dtype))


@pytest.mark.sampled(3)
@every_module
def test_every_function_is_explained(name: str) -> None:
    mod = MODULES[name]()
    explained = tensorir_ladder.explain(mod, TARGET)
    assert {row.function for row in explained.rows} == set(functions_of(fuse_operators(TARGET)(mod)))
    ours = {rule.name for rule in tensorir_ladder.rules(TARGET)}
    for row in explained.rows:
        assert row.rule in ours or row.rule.startswith("dlight.gpu.") or row.rule == "already scheduled"
        asked = [rule for rule, reason in row.left if reason]
        assert row.rule == "already scheduled" or row.rule in ours or set(asked) == ours
        assert row.function in str(explained)
        assert explained[row.function] is row
    with pytest.raises(KeyError, match="no such function"):
        explained["no such function"]


def test_a_module_of_functions_alone_is_explained_and_compiled() -> None:
    mod = tvm.IRModule(functions_of(fuse_operators(TARGET)(MODULES["mlp"]())))
    assert {row.function for row in tensorir_ladder.explain(mod, TARGET).rows} == set(functions_of(mod))
    with TARGET:
        scheduled = dlight.ApplyDefaultSchedule(*tensorir_ladder.rules(TARGET), dlight.gpu.Fallback())(mod)
        by_pipeline = relax.get_pipeline("tensorir_ladder")(mod)
    for one in (scheduled, by_pipeline):
        assert set(functions_of(one)) == set(functions_of(mod))
        text = tvm.compile(_named(one), TARGET).mod.imports[0].inspect_source()
        assert all(f"{name}_kernel" in text for name in functions_of(mod))


def _named(mod: tvm.IRModule) -> tvm.IRModule:
    return tvm.IRModule({name: one.with_attr("global_symbol", name) for name, one in functions_of(mod).items()})


class Copies(Rule):
    """Takes any function: a thread to an element, by dlight's last rule, lowered ahead."""

    name = "copies"

    def schedule(self, func: tirx.PrimFunc, target: tvm.target.Target) -> tvm.s_tir.Schedule:
        """See :class:`Rule`."""
        return dlight.gpu.Fallback().apply(func, target, False)


@pytest.mark.parametrize("name", ["conv_net", pytest.param("vit_block", marks=pytest.mark.emulator)])
def test_functions_that_are_lowered_ahead_pass_tvms_pipeline_unharmed(name: str) -> None:
    """Which looks for reshapes in each, and fuses what it takes for elementwise."""
    mod = fuse_operators(TARGET)(MODULES[name]())
    with TARGET:
        taken = dlight.ApplyDefaultSchedule(Copies())(mod)
    left = {one for one, function in functions_of(taken).items() if not is_scheduled(function)}
    assert left == {one for one, function in functions_of(mod).items() if relax.analysis.has_reshape_pattern(function)}
    again = functions_of(relax.get_default_pipeline(TARGET)(taken))
    ours = {one: function for one, function in functions_of(taken).items() if one not in left}
    assert {one for one in ours if not tvm_ffi.structural_equal(again[one].body, ours[one].body)} == set()
    assert all(
        any(kernel.startswith(f"{one}_kernel") for kernel in kernels(tvm.compile(taken, TARGET))) for one in ours
    )


def gated(dtype: str = "float32") -> tvm.IRModule:
    """A squeeze-and-excitation block's end: an image times what a convolution of its mean gives for each channel."""
    return repeating((2, 32, 5, 5), 8, dtype)


def repeating(shape: tuple[int, ...], few: int, dtype: str) -> tvm.IRModule:
    """An image times sums of ``few`` products for each channel, in one function, which TVM's fusion makes of it."""
    batch, channels, *_ = shape
    mod = made_of(
        {"x": (shape, dtype), "s": ((batch, few, 1, 1), dtype), "w": ((channels, few, 1, 1), dtype)},
        lambda x, s, w: relax.op.multiply(x, relax.op.sigmoid(relax.op.nn.conv2d(s, w))),
    )
    r = relax.transform
    return tvm.ir.transform.Sequential([r.LegalizeOps(), r.AnnotateTIROpPattern(), r.FuseOps(), r.FuseTIR()])(mod)


def test_an_exception_in_dlight_leaves_the_function_to_its_next_rule(caplog: pytest.LogCaptureFixture) -> None:
    """Its Matmul refuses by an assertion what consumes a product and is larger."""
    with failures_kept() as failures:
        mod = relax.get_pipeline("tensorir_ladder", target=TARGET)(gated())
    ((name, function),) = functions_of(mod).items()
    (failure,) = failures
    assert (failure.function, failure.rule) == (name, "dlight.gpu.Matmul")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    row = tensorir_ladder.explain(gated(), TARGET)[name]
    assert row.rule == "dlight.gpu.Fallback"
    assert dict(row.left)["dlight.gpu.Matmul"].endswith(failure.error)
    ((_, before),) = functions_of(fuse_operators(TARGET)(gated())).items()
    assert check_function(before, function, TARGET).kernels


@pytest.mark.emulator
@pytest.mark.parametrize("channels", [(4, 5), (32, 64)])
def test_a_result_that_repeats_a_sum_is_right_by_dlight(channels: tuple[int, int]) -> None:
    """Its GEMV and Reduction store past what they allocate, or shuffle among threads that are not there."""
    few, many = channels
    mod = repeating((1, many, 3, 7), few, "float16")
    with failures_kept():
        ((_, function),) = functions_of(relax.get_pipeline("tensorir_ladder", target=TARGET)(mod)).items()
    ((_, before),) = functions_of(mod).items()
    assert check_function(before, function, TARGET).kernels


@pytest.mark.emulator
@pytest.mark.parametrize("shape", [(2, 4, 5, 24), ("n", 4, 5, 24)])
def test_sums_are_not_computed_anew_for_each_pixel(shape: tuple[int | str, ...]) -> None:
    """Squeeze and excitation: what repeats sums is a function of its own."""
    one = (shape[0], 1, 1)
    mod = made_of(
        {"x": (shape, "float16"), "s": ((*one, 8), "float16"), "w": ((1, 1, 8, 24), "float16")},
        lambda x, s, w: relax.op.nn.relu(relax.op.multiply(x, relax.op.sigmoid(_pointwise(s, w)))),
    )
    sums, apart = sorted(functions_of(fuse_operators(TARGET)(mod)))
    assert sums == "fused_conv2d_sigmoid"
    assert apart.startswith("fused_multiply")
    mod = tvm.IRModule({"main": mod["forward"].with_attr("global_symbol", "main")})
    random = np.random.default_rng(1)
    x, s, w = (random.standard_normal(one).astype("float16") for one in ((2, 4, 5, 24), (2, 1, 1, 8), (8, 24)))
    given = [x, s, w[None, None]]
    (found,) = EmulatedModule(relax.get_pipeline("tensorir_ladder", target=TARGET)(mod), TARGET)(given)
    sums = s.astype("float32") @ w.astype("float32")
    np.testing.assert_allclose(found, np.maximum(x / (1 + np.exp(-sums)), 0), rtol=5e-3, atol=5e-3)


def test_what_reads_sums_of_its_own_size_is_fused_with_these() -> None:
    """An embedding of time, added to a convolution's result."""
    shapes = {"x": ((2, 4, 5, 16), "float16"), "u": ((1, 1, 16, 24), "float16")}
    shapes |= {"s": ((2, 1, 1, 8), "float16"), "w": ((1, 1, 8, 24), "float16")}
    mod = made_of(shapes, lambda x, u, s, w: relax.op.add(_pointwise(x, u), _pointwise(s, w)))
    assert len(functions_of(fuse_operators(TARGET)(mod))) == 2


def _pointwise(x: relax.Expr, w: relax.Expr) -> relax.Expr:
    return relax.op.nn.conv2d(x, w, data_layout="NHWC", kernel_layout="HWIO")


@pytest.mark.emulator
def test_batch_norms_of_float16_round_once() -> None:
    """TVM's own legalization makes float32 of them, and refuses what comes behind."""
    vector, random = ((8,), "float16"), np.random.default_rng(3)
    shapes = {"x": ((2, 8, 5, 5), "float16")} | dict.fromkeys("gbmv", vector)

    def body(x: relax.Expr, *vectors: relax.Expr) -> relax.Expr:
        made = relax.op.nn.batch_norm(x, *vectors, axis=1, epsilon=1e-5, training=False)
        return relax.op.add(relax.TupleGetItem(made, 0), x)

    mod = tvm.IRModule({"main": made_of(shapes, body)["forward"].with_attr("global_symbol", "main")})
    given = [random.standard_normal(shape).astype(dtype) for shape, dtype in shapes.values()]
    given[-1] = np.abs(given[-1])
    (found,) = EmulatedModule(relax.get_pipeline("tensorir_ladder", target=TARGET)(mod), TARGET)(given)
    x, *vectors = (array.astype("float32") for array in given)
    g, b, m, v = (vector[:, None, None] for vector in vectors)
    normalized = (x - m) / np.sqrt(v + 1e-5) * g + b
    # One rounding, and that of the sum, which may be one of cancelled numbers.
    allowed = 2.0**-11 * (np.abs(normalized) + np.abs(normalized + x)) * 1.01
    assert (np.abs(found.astype("float32") - (normalized + x)) <= allowed).all()


class Damaging(dlight.gpu.Fallback):
    """Changes a schedule of the function, then fails."""

    def apply(self, func: tirx.PrimFunc, target: tvm.target.Target, _: bool) -> tvm.s_tir.Schedule:
        """See dlight."""
        super().apply(func, target, False)
        raise KeyError("by intent")


def test_a_rule_that_fails_hands_on_the_function_as_it_was() -> None:
    (function,) = functions_of(fuse_operators(TARGET)(gated())).values()
    text = function.script()
    with TARGET, failures_kept() as failures:
        assert OfDlight(Damaging()).apply(function, TARGET) is None
    assert [failure.rule for failure in failures] == ["dlight.gpu.Damaging"]
    assert function.script() == text


def pooled(dtype: str, shape: tuple[int | str, ...], *size: int, **layout: str) -> tvm.IRModule:
    """A mean over windows that divide images as evenly as they can."""
    of = getattr(relax.op.nn, f"adaptive_avg_pool{len(size)}d")
    return made_of({"x": (shape, dtype)}, lambda x: of(x, size, **layout))


POOLS = {
    "3x4 to 2x2": ("float32", (1, 8, 3, 4), 2, 2),
    "more than there are": ("float16", (2, 5, 3, 7), 7, 3),
    "channels last": ("float32", (1, 7, 8, 8), 3, 4),
    "a signal": ("float16", (2, 8, 13), 4),
    "a volume": ("float32", (1, 2, 3, 4, 5), 2, 3, 2),
}


@pytest.mark.emulator
@pytest.mark.parametrize("name", POOLS)
def test_means_of_windows_of_several_lengths_have_a_kernel(name: str) -> None:
    layout = {"layout": "NHWC"} if name == "channels last" else {}
    mod = pooled(*POOLS[name], **layout)
    ((_, taken),) = functions_of(relax.get_pipeline("tensorir_ladder", target=TARGET)(mod)).items()
    ((_, before),) = functions_of(relax.transform.LegalizeOps()(mod)).items()
    assert check_function(before, taken, TARGET, runs=2).kernels


def test_a_function_that_gets_no_kernel_is_refused_by_name() -> None:
    """Windows of an image of any height: as host code it would store to memory of the device."""
    mod = pooled("float32", (1, 8, "seq", 4), 2, 2)
    ((name, _),) = functions_of(fuse_operators(TARGET)(mod)).items()
    assert tensorir_ladder.explain(mod, TARGET)[name].rule == "none"
    with pytest.raises(Exception, match=rf"no rule .*{name}.*; write it"):
        relax.get_pipeline("tensorir_ladder", target=TARGET)(mod)


def test_without_a_target_or_for_no_gpu_of_ours_the_pipeline_says_so() -> None:
    mod = MODULES["mlp"]()
    with pytest.raises(ValueError, match="target="):
        relax.get_pipeline("tensorir_ladder")(mod)
    for other in ("llvm", {"kind": "cuda", "arch": "sm_75"}, {"kind": "rocm"}):
        target = tvm.target.Target(other)
        with pytest.raises(IllegalSchedule, match="sm_80"):
            relax.get_pipeline("tensorir_ladder", target=target)(mod)
        with pytest.raises(IllegalSchedule, match="sm_80"):
            tensorir_ladder.rules(target)
        with pytest.raises(IllegalSchedule, match="sm_80"):
            tensorir_ladder.explain(mod, target)


def test_dlight_is_asked_with_a_name_that_it_reads() -> None:
    """And nothing else of the target is another."""
    named = dlight_target(TARGET)
    assert {**TARGET.export(), "arch": "sm_90"} == dict(named.export())
    sm_80 = machine_for("sm_80").target()
    assert dlight_target(sm_80).export() == sm_80.export()


def test_importing_is_light_and_registers_the_pipeline_once() -> None:
    """The package without TVM; the Relax room adds one name to TVM's, again too, and replaces nothing."""
    program = """
import sys, tensorir_ladder
assert "tvm" not in sys.modules, "the package's own import loads TVM"
from tvm import relax
before = dict(relax.pipeline.PIPELINE_MAP)
assert "tensorir_ladder" not in before
import importlib, tensorir_ladder.relax as ours
importlib.reload(ours)
assert {**before, "tensorir_ladder": relax.pipeline.PIPELINE_MAP["tensorir_ladder"]} == relax.pipeline.PIPELINE_MAP
assert tensorir_ladder.rules is ours.rules.rules and tensorir_ladder.explain is ours.explain
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    importlib.reload(importlib.import_module("tensorir_ladder.relax"))


def turned(x: relax.Expr, axes: list[int] | None = None) -> relax.Expr:
    """The transpose of a tensor."""
    return relax.op.permute_dims(x, axes)


X, W = ((6, 32), "float32"), ((5, 32), "float32")
SWAPPED = [0, 2, 1]
PRODUCTS: dict[str, tuple[dict[str, tuple], Callable[..., relax.Expr], int]] = {
    # name: inputs, the function, transposes that remain
    "weights as nn.Linear keeps them": ({"x": X, "w": W}, lambda x, w: relax.op.matmul(x, turned(w)), 0),
    "its own transpose": ({"x": X}, lambda x: relax.op.matmul(x, turned(x)), 0),
    "both": ({"x": ((32, 6), "float32"), "w": W}, lambda x, w: relax.op.matmul(turned(x), turned(w)), 0),
    "the first": (
        {"x": ((32, 6), "float32"), "w": ((32, 5), "float32")},
        lambda x, w: relax.op.matmul(turned(x), w),
        0,
    ),
    "a transpose that is read elsewhere": (
        {"x": X, "w": W},
        lambda x, w: _read_twice(x, w),
        1,
    ),
    "one axis": ({"x": X, "w": ((32,), "float32")}, lambda x, w: relax.op.matmul(x, turned(w)), 1),
    "a vector": ({"x": ((32,), "float32"), "w": W}, lambda x, w: relax.op.matmul(x, turned(w)), 1),
    "axes counted from the end": (
        {"x": ((2, 6, 32), "float32"), "w": ((2, 5, 32), "float32")},
        lambda x, w: relax.op.matmul(x, turned(w, [0, -1, -2])),
        0,
    ),
    "fewer axes": (
        {"x": ((3, 1, 6, 32), "float32"), "w": ((2, 5, 32), "float32")},
        lambda x, w: relax.op.matmul(x, turned(w, SWAPPED)),
        0,
    ),
    "a batch of any size": (
        {"x": (("batch", 6, 32), "float32"), "w": (("batch", 5, 32), "float32")},
        lambda x, w: relax.op.matmul(x, turned(w, SWAPPED)),
        0,
    ),
    "one matrix for a batch": (
        {"x": ((3, 6, 32), "float32"), "w": ((1, 5, 32), "float32")},
        lambda x, w: relax.op.matmul(x, turned(w, SWAPPED)),
        0,
    ),
    "no sum of the last two axes": (
        {"x": ((2, 6, 5), "float32"), "w": ((5, 2, 4), "float32")},
        lambda x, w: relax.op.matmul(x, turned(w, [1, 0, 2])),
        1,
    ),
    "sums of another dtype": (
        {"x": ((6, 32), "float16"), "w": ((5, 32), "float16")},
        lambda x, w: relax.op.matmul(x, turned(w), out_dtype="float32"),
        0,
    ),
    "a sum of nothing": (
        {"x": ((6, 0), "float32"), "w": ((5, 0), "float32")},
        lambda x, w: relax.op.matmul(x, turned(w)),
        1,
    ),
}


def _read_twice(x: relax.Expr, w: relax.Expr) -> relax.Expr:
    transposed = relax.BlockBuilder.current().emit(turned(w))
    return relax.op.add(relax.op.matmul(x, transposed), relax.op.sum(transposed, axis=[0], keepdims=True))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_read_transposed_operands_where_they_lie(name: str) -> None:
    inputs, body, remaining = PRODUCTS[name]
    mod = made_of(inputs, body)
    changed = ReadTransposed()(mod)
    assert changed["forward"].script().count("permute_dims(") == remaining
    arrays = arrays_of(mod)
    same(outputs(changed, arrays), outputs(mod, arrays), "float32")


def test_one_symbolic_extent_stays_one() -> None:
    builder = relax.BlockBuilder()
    rows = tirx.Var("rows", "int64")
    x = relax.Var("x", relax.TensorType((rows, 64), "float16"))
    w = relax.Var("w", relax.TensorType((48, 64), "float16"))
    with builder.function("forward", [x, w]):
        builder.emit_func_output(builder.emit(relax.op.matmul(x, turned(w))))
    (product,) = functions_of(ReadTransposed()(builder.get())).values()
    assert len(symbolic_extents(product)) == 1


def test_functions_that_nothing_calls_stay() -> None:
    mod = MODULES["mlp"]()
    mod["spare"] = functions_of(fuse_operators(TARGET)(MODULES["conv_net"]()))["mean"]
    assert "spare" in functions_of(DequantizeInProduct()(ReadTransposed()(mod)))


CODES, SCALES = ((48, 64), "int8"), ((48, 1), "float16")


def wide(codes: relax.Expr, scales: relax.Expr) -> relax.Expr:
    """Weights of 16 bits from codes of 8."""
    return relax.op.multiply(relax.op.astype(codes, "float16"), scales)


DEQUANTIZED: dict[str, tuple[dict[str, tuple], Callable[..., relax.Expr], int]] = {
    # name: inputs, the function, how many functions there are
    "by a linear layer": (
        {"x": (("seq", 64), "float16"), "c": CODES, "s": SCALES},
        lambda x, c, s: relax.op.nn.relu(relax.op.linear(x, wide(c, s))),
        1,
    ),
    "both operands": (
        {"c": CODES, "s": SCALES, "d": CODES, "t": SCALES},
        lambda c, s, d, t: relax.op.matmul(wide(c, s), turned(wide(d, t))),
        1,
    ),
    "read twice": ({"x": (("seq", 64), "float16"), "c": CODES, "s": SCALES}, lambda x, c, s: _shared(x, c, s), 3),
    "rows of any number": (
        {"x": (("seq", 64), "int8"), "w": ((48, 64), "float16")},
        lambda x, w: relax.op.linear(relax.op.astype(x, "float16"), w),
        2,
    ),
    "no larger than it was": (
        {"x": (("seq", 64), "float16"), "c": ((48, 64), "int32")},
        lambda x, c: relax.op.linear(x, relax.op.astype(c, "float16")),
        2,
    ),
    "not a product": ({"c": CODES, "s": SCALES}, lambda c, s: relax.op.nn.softmax(wide(c, s)), 2),
}


def _shared(x: relax.Expr, codes: relax.Expr, scales: relax.Expr) -> relax.Expr:
    weights = relax.BlockBuilder.current().emit(wide(codes, scales))
    return relax.op.matmul(relax.op.linear(x, weights), weights)


@pytest.mark.parametrize("name", DEQUANTIZED)
def test_dequantised_weights_are_read_by_the_product(name: str) -> None:
    inputs, body, count = DEQUANTIZED[name]
    mod = made_of(inputs, body)
    changed = fuse_operators(CPU)(mod)
    assert len(functions_of(changed)) == count, list(functions_of(changed))
    arrays = arrays_of(mod)
    same(outputs(changed, arrays), outputs(mod, arrays), "float16")


def widened(x: relax.Expr) -> relax.Expr:
    """Numbers made wider element by element."""
    return relax.op.astype(x, "float32")


WIDENED: dict[str, tuple[dict[str, tuple], Callable[..., relax.Expr], list[str]]] = {
    # name: inputs, the function, the dtypes of what its functions give
    "softmax of scores": (
        {"x": ((2, "seq", 16), "float16"), "w": ((2, 16, 24), "float16")},
        lambda x, w: relax.op.astype(relax.op.nn.softmax(widened(relax.op.matmul(x, w))), "float16"),
        ["float16", "float16"],
    ),
    "a sum": ({"x": (("seq", 64), "float16")}, lambda x: relax.op.sum(widened(x), axis=[0]), ["float32"]),
    "read twice": ({"x": (("seq", 64), "float16")}, lambda x: _summed_twice(x), ["float32"] * 4),
    "by a product": (
        {"x": (("seq", 64), "float16"), "w": ((64, 48), "float32")},
        lambda x, w: relax.op.matmul(widened(x), w),
        ["float32", "float32"],
    ),
    "no wider": (
        {"x": (("seq", 64), "float16")},
        lambda x: relax.op.sum(relax.op.add(x, x), axis=[1]),
        ["float16"],  # as TVM fuses it
    ),
}


def _summed_twice(x: relax.Expr) -> relax.Expr:
    wider = relax.BlockBuilder.current().emit(widened(x))
    return relax.op.add(relax.op.sum(wider, axis=[0]), relax.op.max(wider, axis=[0]))


@pytest.mark.parametrize("name", WIDENED)
def test_rows_read_what_was_narrow_before(name: str) -> None:
    inputs, body, results = WIDENED[name]
    mod = made_of(inputs, body)
    changed = fuse_operators(CPU)(mod)
    assert [str(function.params[-1].dtype) for function in functions_of(changed).values()] == results
    arrays = arrays_of(mod)
    same(outputs(changed, arrays), outputs(mod, arrays), "float16")


class Attention(nn.Module):
    """The weights of causal attention: what a token takes of those before it."""

    def forward(self, q: nn.Tensor, k: nn.Tensor) -> nn.Tensor:
        """Multiply, scale and mask in float32, and take the softmax."""
        scores = nn.op.tensor_expr_op(self._masked, "masked", [nn.op.matmul(q, nn.op.permute_dims(k, [0, 2, 1]))])
        return nn.op.astype(nn.op.softmax(scores, axis=-1), "float16")

    @staticmethod
    def _masked(scores: te.Tensor) -> te.Tensor:
        def one(*at: tirx.Var) -> tirx.PrimExpr:
            value = scores(*at).astype("float32") * 0.125
            return tirx.if_then_else(at[-1] <= at[-2], value, tirx.const(-3e38, "float32"))

        return te.compute(scores.shape, one, name="masked")


@pytest.mark.gpu
def test_attention_of_any_length_is_right_on_the_gpu() -> None:
    import torch

    spec = {name: nn.spec.Tensor([2, "seq", 64], "float16") for name in ("q", "k")}
    mod, _ = Attention().export_tvm(spec={"forward": spec})
    executable = tvm.compile(relax.get_pipeline("tensorir_ladder", target=TARGET)(mod), TARGET)
    run = relax.VirtualMachine(executable, tvm.cuda())["forward"]
    random = torch.Generator("cuda").manual_seed(3)
    for seq in (1, 2, 7, 16, 17, 64, 100, 1000, 1024, 2047, 2048, 3000, 4096, 8192, 8200):
        q, k = (torch.randn(2, seq, 64, generator=random, device="cuda").half() for _ in range(2))
        scores = (q.float() @ k.float().mT).half().float() * 0.125
        wanted = torch.softmax(scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -3e38), -1)
        made = torch.from_dlpack(run(q, k)).float()
        # A score of float16, below 64, may be rounded to the other side: 2⁻⁵ times the scale.
        torch.testing.assert_close(made, wanted, rtol=1e-2, atol=1e-5, msg=lambda text, seq=seq: f"seq {seq}: {text}")
