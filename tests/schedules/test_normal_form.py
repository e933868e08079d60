"""The normal form computes what the function computed, or says why it is left; compositions take it as it is."""

from __future__ import annotations

import numpy as np
import pytest

from support.tir_functions import FUNCTIONS, OTHERS, operands_of, run_on_llvm
from tensorir_ladder.schedules.rules.normal_form import product_of
from tensorir_ladder.schedules.rules.rule import NotTaken

CASES = [(name, sizes) for name, function in FUNCTIONS.items() for sizes in function.sizes]


@pytest.mark.parametrize(("name", "sizes"), CASES, ids=lambda value: str(value).replace(" ", ""))
@pytest.mark.parametrize("sums", ["float32"])
def test_computes_what_the_function_computed(name, sizes, sums):
    func = FUNCTIONS[name].make()
    operands = operands_of(func, sizes)
    expected = run_on_llvm(func, operands)
    product = product_of(func, sums=sums)
    output = run_on_llvm(product.sch.mod["main"], operands)
    for want, got in zip(expected, output):
        np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", OTHERS)
def test_is_left_with_the_reason(name):
    func = OTHERS[name].make()
    with pytest.raises(NotTaken, match=OTHERS[name].left):
        product_of(func)
