"""Every function of whole Relax modules: taken by a rule and right in the emulator, or left with a reason."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import tirx

from support.dlight_functions import FUNCTIONS
from support.functions import check_function
from support.relax_modules import MODULES, SIZES, functions_of, numbered
from tensorir_ladder.harness.machines import machine_for
from tensorir_ladder.relax import fuse_operators
from tensorir_ladder.relax.rules import rules
from tensorir_ladder.relax.rules.rule import is_scheduled
from tensorir_ladder.schedules.errors import IllegalSchedule

TARGET = machine_for("sm_90a").target()
ROUNDED_ON_THE_WAY = {"layer_norm": 16.0}  # whose last product TVM rounds to float16, then adds what cancels it
# Of dlight's tests: a packed function; bits that are unpacked across the columns, for one row, or for no product.
LEFT = ("a_scan_of_tvms_own", "four_bits_along_columns", "four_bits_transposed", "three_bits_transposed")


def taken(function: tirx.PrimFunc) -> tirx.PrimFunc | None:
    """What the first rule that takes a function makes of it; any other exception than a refusal is a failure."""
    for rule in rules(TARGET):
        try:
            return rule.take(function, TARGET)
        except IllegalSchedule:
            continue
    return None


@pytest.mark.sampled(4)
@pytest.mark.emulator
@pytest.mark.parametrize("name", MODULES)
def test_what_rules_take_of_a_module_computes_what_it_did(name: str) -> None:
    checked = []
    for function_name, function in functions_of(fuse_operators(TARGET)(MODULES[name]())).items():
        before = numbered(function)
        after = None if is_scheduled(before) else taken(before)
        if after is not None:
            slack = ROUNDED_ON_THE_WAY.get(function_name, 1.0)
            check_function(before, after, TARGET, SIZES, arrays=indices_of(before), slack=slack)
            checked.append(function_name)
    assert checked


@pytest.mark.sampled(4)
@pytest.mark.emulator
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_that_dlight_is_tested_on_are_right_or_left(name: str) -> None:
    one = FUNCTIONS[name]
    before = one.make()
    after = taken(before)
    if name in LEFT:
        assert after is None
    else:
        check_function(before, after, TARGET, one.sizes, arrays=one.arrays)


def indices_of(function: tirx.PrimFunc) -> dict[str, np.ndarray]:
    """Draw indices below 50, which is what tables of the modules have, for each parameter of int32."""
    found = {}
    for parameter in function.params:
        if str(parameter.dtype) == "int32":
            shape = [SIZES[extent.name] if isinstance(extent, tirx.Var) else int(extent) for extent in parameter.shape]
            found[str(parameter.name)] = np.random.default_rng(0).integers(0, 50, shape)
    return found
