"""Functions that are wrong under --use_fast_math, with which TVM compiles, are written as others: powers, angles."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import ir, relax, te, tirx

from support.legalized import legalized
from support.relax_modules import made_of
from support.schedules_on_cpu import TARGET
from tensorir_ladder.relax.rules.fast_math import survive_fast_math

SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, -2.0, 3.0, -7.25, 60.0, -60.0, 1e-3, np.inf, -np.inf, np.nan]
EXPONENTS = (0, 1, 2, 3, 4, -1, -2, -3, -4, 0.5, 1.5, -0.5, -1.5, 2.5, 5, -7, 0.25, 2.3, -0.75)


def computed(function: tirx.PrimFunc, *arrays: np.ndarray) -> np.ndarray:
    """What a function makes of arrays on the CPU, once it is written for fast math."""
    written = survive_fast_math(function).with_attr("global_symbol", "main")
    out = tvm.runtime.tensor(np.full(arrays[0].shape, 42, arrays[0].dtype))
    tvm.compile(tvm.IRModule({"main": written}), "llvm")["main"](*map(tvm.runtime.tensor, arrays), out)
    return out.numpy()


def powers_in(text: str) -> list[str]:
    """The calls in CUDA that fast math makes exp2(y * log2(x)), or that call one such."""
    return re.findall(r"\b(?:powf|hpow)\(", text)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_powers_of_any_two_numbers_are_those_of_c(dtype: str) -> None:
    x, y = (part.ravel().astype(dtype) for part in np.meshgrid(SPECIAL, [*EXPONENTS, np.inf, -np.inf, np.nan]))
    (function,) = legalized(relax.op.power, x.shape, x.shape, dtype=dtype)
    with np.errstate(all="ignore"):
        wanted = np.power(x.astype("float64"), y.astype("float64")).astype(dtype)
    np.testing.assert_allclose(computed(function, x, y), wanted, rtol=np.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_powers_with_a_known_exponent_are_those_of_c(dtype: str) -> None:
    """But for roots of -0 and -inf, which are -0 and NaN, as PyTorch has them."""
    for exponent in EXPONENTS:
        x = np.array([one for one in SPECIAL if exponent % 1 == 0 or np.copysign(1, one) > 0 or -1e9 < one < 0], dtype)
        (function,) = legalized(lambda a, e=exponent: relax.op.power(a, relax.const(e, dtype)), x.shape, dtype=dtype)
        with np.errstate(all="ignore"):
            wanted = np.power(x.astype("float64"), float(np.dtype(dtype).type(exponent))).astype(dtype)
        np.testing.assert_allclose(computed(function, x), wanted, rtol=4 * np.finfo(dtype).eps, err_msg=str(exponent))
        calls: list[ir.Call] = []
        tvm_ffi.structural_walk(survive_fast_math(function).body, (ir.Call, calls.append))
        raised = [call for call in calls if call.op.name == "tirx.pow"]
        assert bool(raised) == (2 * exponent % 1 != 0 or abs(exponent) > 4)
        assert all(str(call.ty.dtype) == "float64" for call in raised)


def gelu(x: relax.Expr) -> relax.Expr:
    """GPT-2's form of gelu, by tanh of a third power."""
    dtype = str(x.ty.dtype) if hasattr(x, "ty") and x.ty is not None else "float16"
    one, half, root, part = (relax.const(number, dtype) for number in (1.0, 0.5, 0.7979, 0.0447))
    cubed = relax.op.power(x, relax.const(3.0, dtype))
    return x * half * (one + relax.op.tanh(root * (x + part * cubed)))


def gated(x: relax.Expr, s: relax.Expr, w: relax.Expr) -> relax.Expr:
    """What rules of ours leave and dlight takes: the image times a power of what a convolution gives."""
    return relax.op.multiply(x, relax.op.power(relax.op.nn.conv2d(s, w), relax.const(2.3, str(x.ty.dtype))))


MODULES: dict[str, tuple[dict[str, tuple], Callable[..., relax.Expr]]] = {
    # name: inputs, the function
    "rms norm": (
        {"x": (("seq", 64), "float32")},
        lambda x: x * relax.op.rsqrt(relax.op.mean(relax.op.power(x, relax.const(2.0)), axis=[-1], keepdims=True)),
    ),
    "behind a product": (
        {"x": ((16, 64), "float16"), "w": ((32, 64), "float16")},
        lambda x, w: gelu(relax.BlockBuilder.current().emit(relax.op.linear(x, w))),
    ),
    "by dlight": (
        {"x": ((2, 32, 5, 5), "float32"), "s": ((2, 8, 1, 1), "float32"), "w": ((32, 8, 1, 1), "float32")},
        gated,
    ),
    "of bfloat16": (
        {"x": (("seq", 64), "bfloat16"), "y": (("seq", 64), "bfloat16")},
        lambda x, y: relax.op.power(relax.op.power(x, relax.const(3.0, "bfloat16")), y),
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_no_power_in_the_pipelines_cuda_is_one_of_fast_math(name: str) -> None:
    mod = relax.get_pipeline("tensorir_ladder", target=TARGET)(made_of(*MODULES[name]))
    (device,) = tvm.compile(mod, TARGET).mod.imports[0].imports
    assert powers_in(device.inspect_source()) == []


@pytest.mark.parametrize("name", ["sin", "cos"])
def test_angles_are_within_a_turn_where_the_hardware_is_exact(name: str) -> None:
    angles = np.concatenate([np.arange(0, 400_000, 37.7), -np.arange(0, 4096, 1.3), [3.1415, 6.2832]]).astype("float32")
    a = te.placeholder(angles.shape, "float32", "a")
    whole = te.create_prim_func([a, te.compute(angles.shape, lambda i: getattr(tirx, name)(a[i]), "b")])
    function = survive_fast_math(whole)
    bare = function.with_body(tvm_ffi.structural_map(function.body, (ir.Call, lambda call: _bare(call, name))))
    within = computed(bare, angles).astype("float64")
    assert np.abs(within).max() < 3.15
    of = getattr(np, name)
    np.testing.assert_allclose(of(within), of(angles.astype("float64")), atol=5e-7)
    np.testing.assert_allclose(computed(whole, angles), of(angles.astype("float64")), atol=5e-7)


def _bare(call: ir.Call, name: str) -> ir.Expr:
    return call.args[0] if call.op.name == f"tirx.{name}" else call
