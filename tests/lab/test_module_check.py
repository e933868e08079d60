"""Whole Relax modules in the emulator: what is the same as on the CPU passes, and what is not is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.relax import op as R

from tensorir_ladder.harness.machines import machine_for
from tensorir_ladder.lab.function_check import WrongFunction
from tensorir_ladder.lab.module_check import EmulatedModule, NoKernel, check_module
from tensorir_ladder.relax.pipelines import pipeline

TARGET = machine_for("sm_90a").target()
ROWS = tirx.Var("n", "int64")


def module(compute: Callable[[relax.BlockBuilder, relax.Var], Any], dtype: str = "float32") -> tvm.IRModule:
    """A module of one parameter of n by 24."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((ROWS, 24), dtype))
    with builder.function("main", [x]):
        with builder.dataflow():
            result = builder.emit_output(compute(builder, x))
        builder.emit_func_output(result)
    return builder.get()


def rows(*counts: int, dtype: str = "float32") -> list[list[np.ndarray]]:
    """Arguments of several calls."""
    return [[np.random.default_rng(count).standard_normal((count, 24)).astype(dtype)] for count in counts]


def several(builder: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
    """Two results of three functions, of which one is a view and one has a constant of its own."""
    sums = builder.emit(R.sum(builder.emit(R.multiply(x, x)), [1]))
    turned = builder.emit(R.permute_dims(builder.emit(R.reshape(x, [2 * ROWS, 12]))))
    factors = relax.const(np.arange(2 * 12, dtype="float32").reshape(2, 12))
    return relax.Tuple([sums, builder.emit(R.matmul(factors, turned))])


@pytest.mark.emulator
def test_several_functions_views_constants_and_extents_of_run_time() -> None:
    mod = module(several)
    after = pipeline(TARGET, kernels=False)(mod)
    calls = rows(5, 1, 33)
    for (x,), (sums, product) in ((call, EmulatedModule(after, TARGET)(call)) for call in calls):
        np.testing.assert_allclose(sums, (x * x).sum(1), rtol=1e-5)
        factors = np.arange(24, dtype="float32").reshape(2, 12)
        np.testing.assert_allclose(product, factors @ x.reshape(-1, 12).T, rtol=1e-3, atol=1e-3)


@pytest.mark.emulator
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_another_result_is_found(dtype: str) -> None:
    import ml_dtypes  # noqa: F401 - numpy's name of bfloat16

    def plus(number: float) -> tvm.IRModule:
        return module(lambda builder, x: R.add(x, relax.const(number, dtype)), dtype)

    after = pipeline(TARGET, kernels=False)(plus(1.5))
    check_module(plus(1.5), after, TARGET, rows(7, dtype=dtype), narrow=dtype)
    with pytest.raises(WrongFunction, match="168 of 168"):
        check_module(plus(2.5), after, TARGET, rows(7, dtype=dtype), narrow=dtype)


def test_functions_without_a_kernel_are_named() -> None:
    legal = relax.transform.LegalizeOps()(module(lambda builder, x: R.exp(x)))
    with pytest.raises(NoKernel, match="exp"):
        EmulatedModule(legal, TARGET)
    (name,) = (name for name, one in legal.functions_items() if isinstance(one, tirx.PrimFunc))
    legal[name] = legal[name].with_body(tirx.Evaluate(0)).with_attr("tirx.is_scheduled", True)
    with pytest.raises(NoKernel, match="exp"):
        EmulatedModule(legal, TARGET)(*rows(7))


def test_operators_that_launch_nothing_are_named() -> None:
    mod = module(lambda builder, x: R.exp(x))
    with pytest.raises(NoKernel, match="exp"):
        EmulatedModule(mod, TARGET)(*rows(7))
