"""Models as PyTorch users have them, right as the Relax pipeline makes them: in the emulator, and on a GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec

import pytest
from tvm.ir.transform import Sequential

from support.torch_models import Errors, InEmulator, OnGpu, imported, in_float32, torch
from tensorir_ladder.harness.machines import machine_for
from tensorir_ladder.harness.whole_models.torch_models import MODELS, REAL, SMALL, make
from tensorir_ladder.relax.attention import attention_in
from tensorir_ladder.relax.passes import FoldConstants, SimplifyShapes, SinkReshapes

MACHINE = machine_for("sm_90a")
FACTOR = 2  # of the errors that torch makes in float16
STATIC = [(name, "") for name in MODELS]
DYNAMIC = [
    (name, "dynamic")
    for name in ("bert_base", "gpt2", "llama3_8b_layer", "qwen2_0_5b", "vit_b16", "whisper_tiny_encoder")
]
SANITIZER = "compute-sanitizer"
MISSING = [library for library in ("transformers", "timm", "torchvision") if find_spec(library) is None]

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"no {', '.join(MISSING)}: pip install -e '.[models]'")

Check = Callable[[str, object], None]


@pytest.mark.sampled(2)
@pytest.mark.emulator
@pytest.mark.parametrize(("name", "form"), [*STATIC, DYNAMIC[0], DYNAMIC[1], DYNAMIC[2]])
def test_small_models_are_right_in_the_emulator(name: str, form: str) -> None:
    made = make(name, SMALL)
    mod, weights = imported(made, "dynamic" in form)
    run = InEmulator(mod, MACHINE)
    for inputs in [made.inputs, *([made.others] if "dynamic" in form else [])]:
        reference = in_float32(made.module, inputs)
        allowed = Errors.of(made.module(*inputs), reference)
        found = Errors.of(run(inputs, weights), reference)
        assert found.within(allowed, FACTOR), (found, allowed)


@pytest.mark.parametrize("dynamic", [False, True], ids=["known", "dynamic"])
@pytest.mark.parametrize(
    ("name", "wanted"), [("mistral_7b_layer", [(9, None)]), ("gemma2_2b_layers", [(9, 50.0), (None, 50.0)])]
)
def test_windows_and_soft_caps_are_found(
    name: str, wanted: list[tuple[int | None, float | None]], dynamic: bool
) -> None:
    """At known lengths nothing is left of the mask."""
    mod, _ = imported(make(name, SMALL), dynamic)
    mod = Sequential([SimplifyShapes(), FoldConstants(), SinkReshapes()])(mod)
    found = [*attention_in(mod["main"], mod).values()]
    assert [(one.causal, one.from_end, one.window, one.soft_cap) for one in found] == [
        (True, False, *each) for each in wanted
    ]
    assert dynamic or not any(one.mask for one in found)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "form"), [*STATIC, *DYNAMIC])
def test_models_are_right_on_the_gpu(name: str, form: str, record_property: Check) -> None:
    made = make(name, REAL)
    mod, weights = imported(made, "dynamic" in form)
    run = OnGpu(mod, weights)
    made.module.cuda()
    for inputs in [made.inputs, *([made.others] if "dynamic" in form else [])]:
        given = [each.cuda() for each in inputs]
        reference = in_float32(made.module, given)
        with torch.no_grad():
            allowed = Errors.of(made.module(*given), reference)
        found = Errors.of(run(inputs), reference)
        record_property("ours, torch's", f"{found} {allowed}")
        assert found.within(allowed, FACTOR), (found, allowed)


@pytest.mark.gpu
@pytest.mark.skipif(shutil.which(SANITIZER) is None, reason=f"no {SANITIZER}")
@pytest.mark.parametrize(("name", "form"), [*STATIC, *DYNAMIC])
def test_models_keep_within_their_memory(name: str, form: str) -> None:
    """At reduced sizes; torch makes the model on the CPU, so that only our kernels are looked at."""
    program = f"from support.torch_models import run_alone; run_alone({name!r}, {'dynamic' in form})"
    found = subprocess.run(
        [SANITIZER, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-1000:]
    assert "ERROR SUMMARY: 0 errors" in found.stdout + found.stderr
