"""Whole models: small ones are right, rules are named and told from each other, records come back, tables follow."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.target import Target

from support.cases import Outcome
from support.fake_gpu import FakeGpu, interrupted, stop_at
from tensorir_ladder.harness import execution, race
from tensorir_ladder.harness.commands import model as command_module
from tensorir_ladder.harness.execution import LlvmBackend
from tensorir_ladder.harness.machines import machine_for
from tensorir_ladder.harness.race import Rounds
from tensorir_ladder.harness.records import (
    Environment,
    FunctionTimed,
    GpuState,
    Method,
    ModelRecord,
    Peer,
    RecordError,
    RulesTimed,
    Timing,
    Verification,
    bad_lines,
    load_models,
)
from tensorir_ladder.harness.verify import WrongResult, hold
from tensorir_ladder.harness.whole_models import building, eager, timing
from tensorir_ladder.harness.whole_models.building import RULES, BuiltModel, Function, build
from tensorir_ladder.harness.whole_models.checking import verify_model
from tensorir_ladder.harness.whole_models.definitions import FAMILIES, Family, Model, ResNetSize
from tensorir_ladder.harness.whole_models.execution import Call, Running, arrays, on_the_cpu
from tensorir_ladder.harness.whole_models.reference import draw_weights, expected
from tensorir_ladder.harness.whole_models.timing import sets_of
from tensorir_ladder.relax import explain, fuse_operators
from tensorir_ladder.relax.kernel_products import TmaContraction
from tensorir_ladder.relax.rules.contraction import Contraction
from tensorir_ladder.relax.rules.rule import Failure
from tensorir_ladder.reports.check import model_problems
from tensorir_ladder.reports.models import function_tables, model_tables

MACHINE = machine_for("sm_90a")
STATE = GpuState(1980.0, 3201.0, 200.0, 40.0)
Command = Callable[..., Outcome]
slow = pytest.mark.emulator  # seconds each


def small(name: str, place: int = 0) -> Model:
    """A small model of a family."""
    return FAMILIES[name].models(True)[place]


def drawn(model: Model, value: int) -> tuple[Any, dict[str, np.ndarray]]:
    """An input and weights."""
    weights = draw_weights(model.exported(value)[1], LlvmBackend(), 5)
    return LlvmBackend().normal(4, model.shape(value), "float16"), {n: w.astype("float16") for n, w in weights.items()}


@pytest.fixture(scope="module")
def llama() -> Running:
    """The small layer by LLVM, built once, for any length."""
    return on_the_cpu(small("llama-layer").exported(1)[0], ())


# What models give


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "family", ["mlp", "llama-linears", *(pytest.param(name, marks=slow) for name in ("vit-block", "resnet50"))]
)
def test_small_models_are_what_they_are_defined_as(family: str) -> None:
    for model in FAMILIES[family].models(True):
        (value,) = FAMILIES[family].small_values
        found = verify_model(model, value, RULES["stock"], MACHINE, LlvmBackend(), 7, emulated=False)
        assert 0 < found.max_error <= found.tolerance


def test_small_functions_are_what_they_are_defined_as() -> None:
    models = FAMILIES["functions"].models(True)
    assert len(models) >= 30
    for model in models:
        found = verify_model(model, 7, RULES["stock"], MACHINE, LlvmBackend(), 7, emulated=False)
        assert found.max_error <= found.tolerance > 0


def test_one_build_of_a_layer_is_right_at_all_lengths(llama: Running) -> None:
    for value in (1, 7, 9):
        x, weights = drawn(small("llama-layer"), value)
        trial = expected(small("llama-layer"), LlvmBackend(), x, weights, "float16")
        made = llama(*arrays(x, weights)).numpy().reshape(trial.reference.shape)
        assert (abs(made - trial.reference) <= trial.limit).all()


@pytest.mark.parametrize("spoilt", ["qkv.weight", "o.weight", "down.weight", "post_norm.weight", "cos"])
def test_a_wrong_part_of_a_model_is_found(spoilt: str, llama: Running) -> None:
    model = small("llama-layer")
    x, weights = drawn(model, 7)
    trial = expected(model, LlvmBackend(), x, weights, "float32")
    other = dict(weights)
    other[spoilt] = other[spoilt].copy()
    other[spoilt][-1 if spoilt != "cos" else 6] *= 0.5  # one row of a weight, one token's angles

    def run(*given: Any) -> None:
        given[-1][...] = llama(*arrays(x, other)).numpy().reshape(given[-1].shape)

    with pytest.raises(WrongResult):
        hold(run, trial, LlvmBackend())


def test_sums_of_float16_are_told_from_those_of_float32() -> None:
    model = small("llama-linears")
    x, weights = drawn(model, 7)
    backend = LlvmBackend()
    wide, narrow = (expected(model, backend, x, weights, sums) for sums in ("float32", "float16"))
    made = on_the_cpu(model.exported(7)[0], ())(*arrays(x, weights)).numpy()  # as TVM defines it, in float16
    assert (abs(made - narrow.reference) <= narrow.limit).all()
    assert not (abs(made - wide.reference) <= wide.limit).all()
    product = (x.astype("float32") @ weights["linear.weight"].astype("float32").T).astype("float16")
    assert (abs(product - wide.reference) <= wide.limit).all()


def test_torchs_forms_compute_the_same() -> None:
    torch = pytest.importorskip("torch")
    for family in FAMILIES.values():
        for model in family.models(True):
            (value,) = family.small_values
            x, weights = drawn(model, value)
            trial = expected(model, LlvmBackend(), x, weights, "float16")
            stored = eager.stored(model, {name: torch.from_numpy(weight) for name, weight in weights.items()})
            for name, form in eager.forms(torch, model).items():
                made = form(torch.from_numpy(x), stored).numpy().reshape(trial.reference.shape)
                assert (abs(made - trial.reference) <= trial.limit).all() == (name != "torch, rest")


def test_resnet50_has_its_53_convolutions() -> None:
    assert len(ResNetSize().convolutions) == 53
    assert len(FAMILIES["resnet50-convs"].models(False)) == 23
    assert round(FAMILIES["resnet50"].models(False)[0].flops(1) / 2e9, 2) == 4.09  # as is published of it


# How they are built


def test_every_function_has_its_rule_and_scores_are_attention() -> None:
    built = build(small("llama-layer"), 7, RULES["stock"], MACHINE)
    assert built.arch == "sm_90a"
    assert {function.rule for function in built.functions.values()} >= {"dlight.gpu.Matmul", "dlight.gpu.Reduction"}
    assert all(function.rule.startswith("dlight.gpu.") for function in built.functions.values())
    running = on_the_cpu(built.fused, list(built.functions))
    x, weights = drawn(small("llama-layer"), 7)
    calls = running.calls(*arrays(x, weights))
    scores = {call.name for call in calls if any(shape[-2:] == (7, 7) for shape in call.shapes)}
    assert scores == {call.name for call in calls if built.functions[call.name].attention}
    assert 3 <= len(scores) < len({call.name for call in calls})
    assert built.sums == "float16"
    assert "__global__" in built.cuda


def test_dlight_is_asked_by_a_name_it_can_read() -> None:
    assert {name: rules.machine(MACHINE).arch for name, rules in RULES.items()} == {
        "stock": "sm_90a",
        "dlight-sm90": "sm_90",
        "ladder": "sm_90a",
    }


@slow
def test_a_linear_layer_of_any_rows_has_a_body_for_few() -> None:
    built = build(small("llama-linears"), 7, RULES["ladder"], MACHINE)
    (function,) = built.functions.values()
    assert function.rule.startswith("ladder: contraction (up to 8: decode;")


@pytest.mark.sampled(2)
@slow
@pytest.mark.parametrize("family", ["llama-layer", "vit-block"])
def test_our_rule_takes_every_product_of_a_model_of_its_own_size(family: str) -> None:
    target = MACHINE.target()
    fused = fuse_operators(target)(FAMILIES[family].models(False)[0].exported(1)[0])
    products = {name.name_hint: function for name, function in fused.functions_items() if "matmul" in name.name_hint}
    assert len(products) == 6
    for product in products.values():
        Contraction().take(product, target)


@pytest.mark.sampled(4)
@slow
@pytest.mark.parametrize("family", ["llama-linears", "mlp", "llama-layer", "vit-block"])
def test_what_our_rules_make_is_right_in_the_emulator(family: str) -> None:
    for model in FAMILIES[family].models(True):
        found = verify_model(model, 7, RULES["ladder"], MACHINE, LlvmBackend(), 7, emulated=True)
        assert found.max_error <= found.tolerance


def test_calls_can_be_stood_in_for_and_their_errors_come_through() -> None:
    model = small("mlp")
    x, weights = drawn(model, 7)
    built = build(model, 7, RULES["stock"], MACHINE)
    running = on_the_cpu(built.fused, list(built.functions))
    seen: list[str] = []

    def broken(name: str, _arguments: Any) -> None:
        seen.append(name)
        raise WrongResult("by intent")

    with pytest.raises(WrongResult, match="by intent"):
        running.instead(broken, *arrays(x, weights))
    assert len(seen) == 1
    assert running(*arrays(x, weights)).shape == (7, 64)  # as before


def test_a_rule_that_fails_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: Any) -> Any:
        raise AttributeError("'PointerType' object has no attribute 'dtype'\nand a traceback of TVM's")

    monkeypatch.setattr(TmaContraction, "schedule", broken)
    built = build(small("llama-linears"), 7, RULES["ladder"], MACHINE)
    (function,) = built.functions.values()
    assert function.rule == "dlight.gpu.Matmul (contraction failed)"
    (failure,) = built.failures
    assert (failure.function, failure.rule) == (function.name, "contraction")
    assert failure.error == "AttributeError: 'PointerType' object has no attribute 'dtype'"
    (warned,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert str(failure) in warned.getMessage()
    row = explain(small("llama-linears").exported(7)[0], MACHINE.target())[function.name]
    assert dict(row.left)["contraction"] == f"failed, a defect of the rule: {failure.error}"


@pytest.fixture
def sigint() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt, also where who began the tests ignores it, as shells do in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("sigint")
def test_an_interruption_is_none_of_a_rules_failures() -> None:
    @building.interruptible()
    def build(interrupted: bool) -> None:
        if interrupted:
            with contextlib.suppress(KeyboardInterrupt):  # as TVM does where its callbacks are interrupted
                signal.raise_signal(signal.SIGINT)
        raise RuntimeError("no message")

    with pytest.raises(KeyboardInterrupt):
        build(interrupted=True)
    with pytest.raises(RuntimeError, match="no message"):
        build(interrupted=False)


# What is measured


def by_llvm(model: Model, value: int, rules: building.RuleSet, *_: Any) -> BuiltModel:
    """What the CPU can run in the place of what a GPU would."""
    names: dict[str, Function] = {}

    @tvm.transform.module_pass(opt_level=0, name="ByLlvm")
    def pipeline(mod: tvm.IRModule, _context: Any) -> tvm.IRModule:
        made = relax.get_pipeline("default")(mod)
        found = {name.name_hint for name, function in made.functions_items() if isinstance(function, tirx.PrimFunc)}
        names.update({name: Function(name, "dlight.gpu.Matmul", name == "matmul1") for name in found})
        return made

    module = model.exported(value)[0]
    executable = tvm.compile(module, Target("llvm"), relax_pipeline=pipeline)
    return BuiltModel(model, rules.name, "sm_90a", "float16", executable, names, "text", module, module, 1.5)


def torch_by_numpy(_torch: Any, _model: Model) -> dict[str, Any]:
    """The MLP."""

    def form(x: np.ndarray, w: dict[str, np.ndarray]) -> np.ndarray:
        wide = (x.astype("float32") @ w["up.weight"].astype("float32").T).astype("float16").astype("float32")
        wide = (wide / (1 + np.exp(-wide))).astype("float16").astype("float32")
        return (wide @ w["down.weight"].astype("float32").T).astype("float16")

    def broken(_x: Any, _w: Any) -> Any:
        raise RuntimeError("no kernel image")

    return {"torch": form, "torch.compile": broken}


@pytest.fixture
def on_numpy(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """A made-up GPU on which models run by LLVM, and races take given times; only the small MLP is a model there."""
    gpu.times |= {"stock": 8.0, "dlight-sm90": 4.0, "ladder": 0.5, "torch": 1.0}

    def take(course: Any, contenders: list[Any], plan: Any, beside: tuple[int, ...] = ()) -> Rounds:
        labels = [label for label, _ in contenders]
        gpu.before_race(labels)
        gpu.races.append(labels)
        for _, launch in contenders:
            launch(*course.sets[-1])
        timings = tuple(Timing(label, (gpu.time_of(label),) * plan.rounds) for label in labels)
        return Rounds(timings, Method(plan.rounds, 1, len(course.sets), "drawn", "cold", "graph", 1.0), STATE, STATE)

    def started(executable: Any, functions: Any, _device: Any) -> Running:
        return Running(executable, functions, tvm.cpu())

    properties = SimpleNamespace(L2_cache_size=30_000)
    backend = execution.GpuBackend

    def with_no_grad() -> Any:
        found = backend()
        found.torch.no_grad = contextlib.nullcontext
        return found

    monkeypatch.setattr(execution, "GpuBackend", with_no_grad)
    monkeypatch.setattr(race.Racecourse, "race", take)
    monkeypatch.setattr(race.Racecourse, "graph", lambda course, launch, _repeats=1: launch(*course.sets[0]))
    for module in (race, timing):
        monkeypatch.setattr(module, "device_properties", lambda _torch: properties)
        monkeypatch.setattr(module, "require_room", lambda *_: None)
    monkeypatch.setattr(timing, "release", lambda _torch: None)
    monkeypatch.setattr(timing, "Running", started)
    monkeypatch.setattr(eager, "forms", torch_by_numpy)
    monkeypatch.setattr(command_module, "build", by_llvm)
    alone = Family(lambda _small: FAMILIES_BEFORE["mlp"].models(True), "seq", (1, 5, 9), (7,))
    monkeypatch.setitem(FAMILIES, "mlp", alone)
    return gpu


FAMILIES_BEFORE = dict(FAMILIES)
MEASURE = ("model", "--model", "mlp", "--no-torch-compile", "--rules", "stock,ladder", "--seq")


def test_a_model_is_timed_beside_torch(on_numpy: FakeGpu, command: Command, tmp_path: Path) -> None:
    outcome = command(*MEASURE, "1-5", "--out", str(tmp_path))
    assert outcome.code == 0, outcome.err
    first, second = load_models(tmp_path)
    assert (first.value, second.value) == (1, 5)
    assert first.ratio("ladder", "stock") == (16.0, (16.0, 16.0))
    assert first.ratio("ladder", "torch")[0] == 2.0
    assert first.times("torch.compile") is None
    assert [peer.status for peer in first.beside] == ["measured", "failed"]
    assert "no kernel image" in first.beside[1].why
    own = first.of_rules("ladder")
    assert own.verification.max_error <= own.verification.tolerance
    assert {function.rule for function in own.functions} == {"dlight.gpu.Matmul"}
    assert {function.name for function in own.functions} >= {"matmul", "matmul1"}
    assert second.flops == 5 * first.flops
    assert on_numpy.races[0] == ["stock", "ladder", "torch"]
    assert ["stock", "ladder"] in on_numpy.races  # functions of one name, in the same rounds
    assert bad_lines(tmp_path) == []
    assert list(model_problems(replace(first, method=replace(first.method, rounds=15)))) == []
    assert first.notes == ()


def test_failures_of_rules_are_recorded(
    on_numpy: FakeGpu, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failure = Failure("matmul", "contraction", "AttributeError: no dtype")
    monkeypatch.setattr(command_module, "build", lambda *given: replace(by_llvm(*given), failures=(failure,)))
    outcome = command(*MEASURE, "5", "--out", str(tmp_path))
    assert outcome.code == 1
    assert f"mlp by ladder: {failure}" in outcome.err
    (record,) = load_models(tmp_path)
    assert record.notes == (f"stock: {failure}", f"ladder: {failure}")


def test_an_interrupted_run_goes_on(on_numpy: FakeGpu, command: Command, tmp_path: Path) -> None:
    on_numpy.before_race = lambda labels: second(labels) if "torch" in labels else None
    second = stop_at(2)
    assert interrupted(command, *MEASURE, "1,5", "--out", str(tmp_path)).code == 130
    assert [record.value for record in load_models(tmp_path)] == [1]
    outcome = command(*MEASURE, "1,5", "--out", str(tmp_path))
    assert "1 of 2 models are done" in outcome.out
    assert [record.value for record in load_models(tmp_path)] == [1, 5]
    assert len({record.environment.run for record in load_models(tmp_path)}) == 1


def test_wrong_rules_have_no_times_and_are_said(
    on_numpy: FakeGpu, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoilt(model: Model, value: int, rules: building.RuleSet, *more: Any) -> BuiltModel:
        if rules.name == "stock":
            raise RuntimeError("no schedule")
        return replace(by_llvm(model, value, rules, *more), sums="float32")  # of which float16's are far off

    class Halved(Running):
        def __call__(self, x: Any, *weights: Any) -> Any:
            return tvm.runtime.tensor(super().__call__(x, *weights).numpy() / 2)

    monkeypatch.setattr(command_module, "build", spoilt)
    monkeypatch.setattr(timing, "Running", lambda executable, names, _device: Halved(executable, names, tvm.cpu()))
    outcome = command(*MEASURE, "5", "--out", str(tmp_path))
    assert outcome.code == 1
    (record,) = load_models(tmp_path)
    assert [(made.name, made.status, made.timing) for made in record.rules] == [
        ("stock", "failed", None),
        ("ladder", "wrong", None),
    ]
    assert "no schedule" in record.rules[0].why
    assert record.times("torch") is not None


def test_operands_that_fill_the_cache_are_one_set() -> None:
    assert [sets_of(size, 100) for size in (1, 50, 100, 199, 200, 10**6)] == [64, 4, 2, 2, 1, 1]


def test_calls_keep_what_they_were_given() -> None:
    seen: list[Any] = []
    call = Call("f", lambda *given: seen.append(given), (np.zeros((2, 3)), np.zeros(4)))
    call()
    assert call.shapes == ((2, 3), (4,))
    assert seen[0][0].shape == (2, 3)


# Records and tables


def made_up(model: str = "llama-layer", value: int = 512, attention: bool = True) -> ModelRecord:
    """A record with times that say which is which."""
    times = {"stock": 32.0, "dlight-sm90": 8.0, "ladder": 2.0}
    checked = Verification(True, "gpu", (1,), 0.01, 0.02, integers_exact=False)

    def timed(label: str, ms: float) -> Timing:
        return Timing(label, (ms,) * 15)

    rules = tuple(
        RulesTimed(
            name,
            "sm_90a",
            "measured",
            "",
            "float16",
            1.0,
            "0" * 64,
            checked,
            timed(name, ms),
            timed(f"{name}, rest", ms / 2) if attention else None,
            (
                FunctionTimed("matmul", "dlight.gpu.Matmul", False, 1, timed(name, ms / 2)),
                FunctionTimed("softmax", "dlight.gpu.Reduction", True, 2, timed(name, ms / 8)),
            ),
        )
        for name, ms in times.items()
    )
    beside = {"torch": 1.9, "torch, rest": 0.95, "copy": 1.0}
    return ModelRecord(
        model=model,
        extent="seq",
        value=value,
        symbolic=True,
        dtype="float16",
        shape=(1, value, 4096),
        bytes_moved=10**9,
        flops=10**12,
        rules=rules,
        beside=tuple(Peer(name, "measured", "", "", timed(name, ms)) for name, ms in beside.items()),
        method=Method(15, 1, 1, "drawn", "cold", "graph", 250.0),
        environment=Environment(
            "NVIDIA Fake", "GPU-1", "1.0", 700.0, STATE, STATE, {}, "abc", False, "2026-11-22T10:00:00.000+00:00"
        ),
        command="ladder model",
    )


def test_records_come_back_whole_and_are_read_strictly(tmp_path: Path) -> None:
    record = made_up()
    record.save(tmp_path)
    assert load_models(tmp_path) == [record]
    assert [path.name for path in tmp_path.glob("*.jsonl")] == ["fake-models.jsonl"]
    without_times = replace(record.rules[0], timing=None)
    with pytest.raises(ValueError, match="measured, with times"):
        replace(record, rules=(without_times,))
    with pytest.raises(RecordError):
        ModelRecord.from_json(record.to_json().replace('"symbolic":true', '"symbolic":"yes"'))


def test_tables_say_how_rules_compare() -> None:
    layers = [made_up("linear-6144x4096", rows, attention=False) for rows in (1, 512)]
    models, linears = model_tables([made_up(), *layers])
    (row,) = models.rows
    assert row[0] == "llama-layer, seq 512"
    assert row[1] == "2.000"
    assert "**16.00**" in row[2]
    assert "**4.00**" in row[3]
    assert row[4].startswith("0.95")
    assert row[5] == "–"  # torch.compile was not measured
    assert row[6].startswith("0.95")
    assert row[7] == "33%"
    (line,) = linears.rows
    assert line[0] == "6144x4096"
    assert line[-1] == "0.50"
    assert linears.header[1:3] == ("1 row", "512 rows")
    (functions,) = model_tables([made_up("function-relu", 4096, attention=False)])
    assert functions.rows[0][:3] == ("relu", "4096", "2.000")
    assert "**4.00**" in functions.rows[0][3]
    assert "of 1 beside dlight slower than it: 0" in functions.note


def test_a_table_of_functions_compares_those_of_one_name() -> None:
    (table,) = function_tables([made_up()])
    ours = [row for row in table.rows if row[0] == "ladder"]
    assert [row[1] for row in ours] == ["matmul", "softmax"]
    assert [row[6] for row in ours] == ["66.7%", "33.3%"]
    assert [row[7] for row in ours] == ["16.00", "16.00"]


def test_failed_rules_are_named_in_the_table() -> None:
    failed = {"status": "failed", "why": "no schedule", "timing": None, "rest": None, "verification": None}
    record = made_up()
    record = replace(record, rules=(replace(record.rules[0], **failed, functions=()), *record.rules[1:]))
    (row,) = model_tables([record])[0].rows
    assert row[2] == "failed"


# The command


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU."""
    monkeypatch.setattr(execution, "gpu_present", lambda: False)


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_the_remedy_is_named(command: Command) -> None:
    outcome = command("model", "--model", "mlp")
    assert outcome.code == 2
    assert "--on emulator" in outcome.err


@pytest.mark.usefixtures("no_gpu")
def test_small_models_are_verified_on_the_cpu(command: Command) -> None:
    outcome = command("model", "--model", "mlp", "--on", "llvm", "--seq", "3")
    assert outcome.code == 0, outcome.err
    assert "mlp seq 3: worst error" in outcome.out


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model lenet", "--model 'lenet': one of llama-layer"),
        ("--model mlp --batch 3", "--batch: no extent of mlp; give --seq"),
        ("--model mlp --rules fast", "unknown set of rules (got 'fast'"),
        ("--model llama-layer --seq 20000", "got 20000, limit 1 to 64"),
        ("--model mlp --seq 2-3", "none of the usual 7 is in it"),
        ("--model mlp --seq x", "'x' is not a number"),
    ],
)
def test_bad_input_is_refused(arguments: str, message: str, command: Command) -> None:
    outcome = command("model", *arguments.split(), "--on", "llvm")
    assert outcome.code == 2
    (line,) = outcome.err.splitlines()
    assert message in line


@slow
@pytest.mark.compiler
@pytest.mark.usefixtures("no_gpu")
def test_models_are_compiled_ahead(command: Command) -> None:
    outcome = command("model", "--model", "llama-linears", "--small", "--rules", "stock", "--build-only")
    assert outcome.code == 0, outcome.err
    assert outcome.out.count("dlight.gpu.Matmul") == 2


@pytest.mark.gpu
@pytest.mark.compiler
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("resnet50-convs", "functions")])
def test_small_models_run_on_the_gpu(family: str, command: Command, tmp_path: Path) -> None:
    outcome = command("model", "--model", family, "--small", "--no-torch-compile", "--out", str(tmp_path))
    assert outcome.code == 0, outcome.err
    assert list(tmp_path.glob("*.jsonl")) == []  # small models are no evidence of speed
    assert "failed" not in outcome.out
