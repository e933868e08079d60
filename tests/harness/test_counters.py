"""Hardware counters: what is asked of ncu, what is read from it, and what is said when it does not work."""

from __future__ import annotations

import csv
import io
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from support.cases import Outcome, make_case
from tensorir_ladder.harness import cli, counters, execution
from tensorir_ladder.harness.counters import CEILING, METRICS, MORE_METRICS, NoProfiler, count, offered_metrics
from tensorir_ladder.harness.machines import machine_for
from tensorir_ladder.harness.records import Counters, bad_lines, load_counters

CASE = make_case(5, (64, 64, 128), "async", layout="nt", stages=3)
ALL = METRICS | MORE_METRICS
VALUES = {metric: str(1.5 + index) for index, metric in enumerate(ALL.values())}
GMMA = "sm__inst_executed_pipe_tensor_op_gmma.sum"


def page(values: dict[str, str], rows: int = 1) -> str:
    """The output of ``ncu --csv --page raw``: its own lines, names, units, one row per launch."""
    names = ["ID", "Kernel Name", *values]
    table = [names, ["", "", *("unit" for _ in values)], *([["0", "main_kernel", *values.values()]] * rows)]
    text = io.StringIO()
    csv.writer(text, quoting=csv.QUOTE_ALL).writerows(table)
    return "==PROF== Connected to process 7\nverified on the GPU\n==PROF== Disconnected\n" + text.getvalue()


def listed(metrics: dict[str, str]) -> str:
    """The output of ``ncu --query-metrics``: its own lines, then a metric without its suffix in each."""
    names = sorted({metric.split(".")[0] for metric in metrics.values()})
    lines = [f"{name}   Counter    inst    # of some" for name in names]
    return "\n".join(["Device NVIDIA Fake (gh100)", "-----", "Metric Name  Metric Type  Metric Unit", "", *lines])


class FakeNcu:
    """Stands in for the profiler: what it prints and lists, and how it was called."""

    def __init__(self, output: str) -> None:
        self.result = SimpleNamespace(returncode=0, stdout=output, stderr="")
        self.listed = SimpleNamespace(returncode=0, stdout=listed(ALL), stderr="")
        self.calls: list[list[str]] = []
        self.queries = 0

    def __call__(self, arguments: list[str], **_options: object) -> SimpleNamespace:
        if "--query-metrics" in arguments:
            self.queries += 1
            return self.listed
        self.calls.append(arguments)
        return self.result


@pytest.fixture
def ncu(monkeypatch: pytest.MonkeyPatch) -> FakeNcu:
    """A machine with an ncu that counts."""
    offered_metrics.cache_clear()
    fake = FakeNcu(page(VALUES))
    monkeypatch.setattr(counters, "shutil", SimpleNamespace(which=lambda name: f"/opt/{name}"))
    monkeypatch.setattr(counters, "subprocess", SimpleNamespace(run=fake))
    return fake


def test_every_counter_is_read_by_name(ncu: FakeNcu) -> None:
    assert count(CASE) == {name: 1.5 + index for index, name in enumerate(ALL)}


def test_numbers_with_separators_are_read(ncu: FakeNcu) -> None:
    ncu.result.stdout = page(VALUES | {"smsp__inst_issued.sum": "1,234,567"})
    assert count(CASE)["instructions issued"] == 1234567.0


def test_columns_are_found_by_name_whatever_their_order(ncu: FakeNcu) -> None:
    ncu.result.stdout = page(dict(reversed(VALUES.items())) | {"something__else.sum": "9"})
    assert count(CASE) == {name: 1.5 + index for index, name in enumerate(ALL)}


def test_the_second_launch_of_the_very_case_is_profiled_with_free_clocks(ncu: FakeNcu) -> None:
    count(CASE)
    ((ncu_path, *arguments),) = ncu.calls
    assert ncu_path == "/opt/ncu"
    at = arguments.index(sys.executable)
    options, program = arguments[:at], arguments[at:]
    named = dict(pairwise(options))
    assert named["--clock-control"] == "none"
    assert (named["--kernel-name"], named["--launch-skip"], named["--launch-count"]) == ("main_kernel", "1", "1")
    assert (named["--page"], named["--print-units"]) == ("raw", "base")
    assert "--csv" in options
    assert named["--metrics"].split(",") == list(ALL.values())
    assert program[1:4] == ["-m", "tensorir_ladder.harness", "verify"]
    asked = dict(zip(program[4::2], program[5::2]))
    assert asked == {
        "--on": "gpu",
        "--step": "5",
        "--variant": "async",
        "--tile": str(CASE.tile),
        "--stages": "3",
        "--shape": "64x64x128",
        "--dtype": "float32",
        "--layout": "nt",
    }


def test_what_is_run_parses_as_a_command(ncu: FakeNcu) -> None:
    count(CASE)
    (arguments,) = ncu.calls
    options = cli.parse(arguments[arguments.index("tensorir_ladder.harness") + 1 :])
    assert (options.command, options.on) == ("verify", "gpu")


def test_a_missing_ncu_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoProfiler, match=r"no ncu \(Nsight Compute\) on PATH"):
        count(CASE)


@pytest.mark.parametrize(
    ("code", "out", "err", "says"),
    [
        (1, "", "==ERROR== ERR_NVGPUCTRPERM - no permission\n", "ERR_NVGPUCTRPERM"),
        (1, page(VALUES), "", "ncu did not profile"),
        (0, "==WARNING== No kernels were profiled.\n", "", "No kernels were profiled"),
        (0, page(VALUES, rows=0), "", "ncu did not profile"),
        (2, "", "", "no output"),
    ],
    ids=["no permission", "failed after counting", "no kernels", "no rows", "silent"],
)
def test_an_ncu_that_fails_is_quoted(ncu: FakeNcu, code: int, out: str, err: str, says: str) -> None:
    ncu.result = SimpleNamespace(returncode=code, stdout=out, stderr=err)
    with pytest.raises(NoProfiler, match=says) as caught:
        count(CASE)
    assert str(CASE) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("absent", ["dram__bytes_read.sum", "gpu__time_duration.sum"])
@pytest.mark.parametrize("empty", [True, False])
def test_a_missing_metric_is_named(ncu: FakeNcu, absent: str, empty: bool) -> None:
    kept = {metric: value for metric, value in VALUES.items() if metric != absent}
    ncu.result.stdout = page(kept | ({absent: ""} if empty else {}))
    with pytest.raises(NoProfiler, match=absent) as caught:
        count(CASE)
    assert len([metric for metric in METRICS.values() if metric in str(caught.value)]) == 1


def test_what_this_ncu_does_not_list_is_not_asked_for(ncu: FakeNcu) -> None:
    ncu.listed.stdout = listed({name: metric for name, metric in ALL.items() if metric != GMMA})
    for _ in range(2):
        counted = count(CASE)
    asked = ncu.calls[0][ncu.calls[0].index("--metrics") + 1].split(",")
    assert set(ALL.values()) - set(asked) == {GMMA}
    assert set(ALL) - set(counted) == {"tensor pipe: warps' instructions (gmma)"}
    assert ncu.queries == 1


@pytest.mark.parametrize("value", ["", "n/a"])
def test_what_is_listed_and_not_counted_is_left_out_and_said(
    ncu: FakeNcu, value: str, capsys: pytest.CaptureFixture
) -> None:
    ncu.result.stdout = page(VALUES | {GMMA: value})
    assert set(ALL) - set(count(CASE)) == {"tensor pipe: warps' instructions (gmma)"}
    assert capsys.readouterr().err == f"left out: ncu gives {GMMA} as {value!r}, which is no number\n"


@pytest.mark.parametrize(("code", "out", "says"), [(1, "no permission\n", "no permission"), (0, "", "no output")])
def test_an_ncu_that_lists_nothing_is_quoted(ncu: FakeNcu, code: int, out: str, says: str) -> None:
    ncu.listed = SimpleNamespace(returncode=code, stdout=out, stderr="")
    with pytest.raises(NoProfiler, match=f"ncu --query-metrics lists nothing: {says}"):
        count(CASE)


@pytest.mark.parametrize("value", ["n/a", "(!) n/a"])
def test_a_metric_that_is_no_number_is_named(ncu: FakeNcu, value: str) -> None:
    ncu.result.stdout = page(VALUES | {"dram__bytes_read.sum": value})
    with pytest.raises(NoProfiler, match="dram__bytes_read"):
        count(CASE)


# The command


def test_counters_need_a_gpu(command: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    outcome = command("counters", "--step", "5", "--size", "64")
    assert (outcome.code, outcome.out) == (2, "")
    (line,) = outcome.err.splitlines()
    assert line.startswith("error: no torch")


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a made-up GPU and a clean tree."""

    def made_up(options: object, _command: str) -> SimpleNamespace:
        return SimpleNamespace(identity={"gpu": "NVIDIA Fake"}, revision="abc123", dirty=False, out=Path(options.out))

    monkeypatch.setattr(execution, "require_gpu", lambda: None)
    monkeypatch.setattr(execution, "gpu_present", lambda: True)
    monkeypatch.setattr(execution, "gpu_arch", lambda: "sm_90a")
    monkeypatch.setattr(execution, "gpu_machine", lambda: machine_for("sm_90a"))
    monkeypatch.setattr("tensorir_ladder.harness.commands.counters.open_session", made_up)


@pytest.mark.usefixtures("on_gpu")
def test_counters_are_kept_as_records(command: Callable[..., Outcome], ncu: FakeNcu, tmp_path: Path) -> None:
    arguments = ("--step", "4,5", "--variant", "default", "--size", "64", "--stages", "9", "--out", str(tmp_path))
    for _ in range(2):  # the newest counts
        outcome = command("counters", *arguments)
        assert outcome.code == 0, outcome.err
    four, five = load_counters(tmp_path)
    assert (four.step, four.stages, five.step, five.stages) == (4, 1, 5, 4)
    assert (five.gpu, five.revision, five.dirty) == ("NVIDIA Fake", "abc123", False)
    assert five.values.pop(CEILING) == machine_for("sm_90a").rates.fp32_gflops
    assert five.values == {name: 1.5 + index for index, name in enumerate(ALL)}
    assert five.command.startswith("ladder counters")
    assert Counters.from_json(five.to_json()) == five
    assert "left out" not in outcome.err
    assert outcome.out.count("wrote") == 2


@pytest.mark.usefixtures("on_gpu")
def test_a_ceiling_is_kept_and_what_ncu_lacks_is_said(
    command: Callable[..., Outcome], ncu: FakeNcu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ncu.listed.stdout = listed({name: metric for name, metric in ALL.items() if metric != GMMA})
    ncu.result.stdout = page({metric: value for metric, value in VALUES.items() if metric != GMMA})
    arguments = ("--variant", "default", "--dtype", "float16", "--size", "128", "--out", str(tmp_path))
    outcome = command("counters", "--step", "8-10", *arguments)
    assert outcome.code == 0, outcome.err
    assert outcome.err == f"left out, since this ncu does not list them: {GMMA}\n"
    eight, nine, ten = load_counters(tmp_path)
    rates = machine_for("sm_90a").rates
    assert eight.values[CEILING] == nine.values[CEILING] == rates.mma_f16_gflops
    assert ten.values[CEILING] == rates.wgmma_f16_gflops


@pytest.mark.usefixtures("on_gpu")
def test_a_machine_without_ncu_is_refused(
    command: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counters, "shutil", SimpleNamespace(which=lambda name: None))
    outcome = command("counters", "--step", "5", "--size", "64", "--out", str(tmp_path))
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err == "error: no ncu (Nsight Compute) on PATH; it comes with the CUDA toolkit\n"
    assert not list(tmp_path.rglob("*.jsonl"))


@pytest.mark.parametrize("text", ["{}", '{"schema": 1}', "5"])
def test_what_is_no_set_of_counters_is_named_and_left_out(text: str, tmp_path: Path) -> None:
    (tmp_path / "some-counters.jsonl").write_text(text)
    assert load_counters(tmp_path) == []
    (bad,) = bad_lines(tmp_path)
    assert "some-counters.jsonl:1 is no Counters" in bad


def test_the_profiler_module_runs_nothing_when_imported() -> None:
    assert counters.subprocess is subprocess
