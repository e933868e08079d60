"""Bad input: one error line that names the value, a non-zero exit, no traceback, nothing that looks like a result."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from support.cases import ROOT, Outcome
from support.command_lines import command_lines
from support.reports_fixtures import record
from tensorir_ladder.harness import cli
from tensorir_ladder.harness.commands import bandwidth, bench, build, calibrate, kernels, measuring, model, rebuild
from tensorir_ladder.harness.fleet import hosting, search
from tensorir_ladder.harness.records import RecordError
from tensorir_ladder.kernels.codegen import toolchain
from tensorir_ladder.lab.commands import drawing, fuzz, mutants, nests, rules, sanitize
from tensorir_ladder.reports import plot
from tensorir_ladder.reports.web import build as site
from tensorir_ladder.reports.web import machine_code
from tensorir_ladder.reports.web.page import File
from tensorir_ladder.schedules.errors import IllegalSchedule

Command = Callable[..., Outcome]

WRITERS = {
    *("run", "sweep", "compile", "bandwidth", "bench", "model", "counters", "timeline", "tune", "calibrate"),
    *("fuzz", "nests", "rules", "mutants", "traces", "sanitize", "microbench"),
}
REFUSED = [
    # sizes and shapes
    ("--size 0", "0"),
    ("--size -5", "-5"),
    ("--size 256,0", "0"),
    ("--size 5.5", "'5.5'"),
    ("--size big", "'big'"),
    ("--size 64,", "'64,'"),
    ("--size 512-256", "'512-256'"),
    ("--shape 0x1x1", "got 0"),
    ("--shape=-1x2x3", "got -1"),
    ("--shape 16x-2x3", "got -2"),
    ("--shape 16x16", "'16x16'"),
    ("--shape 16x16x16x16", "'16x16x16x16'"),
    ("--shape 16*16*16", "'16*16*16'"),
    ("--shape 16x16x16,", "''"),
    ("--shape 1x1xbig", "'1x1xbig'"),
    ("--shape 16x16x16 --size 16", "--size and --shape"),
    # too large for 32-bit indices: m·n, m·k, n·k
    ("--shape 65536x32768x1", "2147483648"),
    ("--shape 65536x1x32768", "2147483648"),
    ("--shape 1x65536x32768", "2147483648"),
    ("--size 99999999999999999999", str((10**20 - 1) ** 2)),
    # tiles
    ("--tile 64x64", "'64x64'"),
    ("--tile large", "'large'"),
    ("--tile all", "'all'"),
    ("--tile 0x64x16/4x4", "0"),
    ("--tile 64x64x16/0x4", "0"),
    ("--tile 64x64x16/1x1", "4096 threads"),
    ("--tile 256x256x8/16x16", "registers"),
    ("--tile 1024x1024x64/32x32", "shared memory"),
    ("--tile 64x64x16/5x4", "64x64x16/5x4"),
    ("--tile 64x64x16/4x7", "64x64x16/4x7"),
    # stages
    ("--stages 0", "0"),
    ("--stages -1", "-1"),
    ("--stages x", "'x'"),
    ("--stages 2.5", "'2.5'"),
    ("--stages 2,4", "2,4"),
    ("--stages 64 --size 2048", "64 stage"),
    ("--step 10 --stages 2", "step10_wgmma[rows]", "got 2", "at least 3", "more stages"),
    ("--step 10 --variant awaited --stages 1", "step10_wgmma[awaited]", "got 1", "at least 2"),
    # what is another step's or variant's
    ("--step 7 --tile 64x64x16/4x4", "step7_warp_tiling", "'64x64x16/4x4'", "MxNxK/WMxWN/TMxTN/S"),
    ("--step 5 --tile 128x128x32/32x64/8x8/1", "step5_pipelining", "128x128x32/32x64/8x8/1"),
    ("--step 8-9 --tile 64x64x16/4x4", "4 rows per warp", "16"),
    ("--step 10 --tile 64x64x16/4x4", "16 rows per warpgroup", "64"),
    ("--step 1-7 --tile 64x64x16/4x4", "step7_warp_tiling", "'64x64x16/4x4'"),
    ("--step 7 --dtype float16", "step7_warp_tiling[serpentine]", "float32", "not float16"),
    ("--step 7-8 --dtype float32", "not float32", "--variant tf32"),
    ("--step 9 --dtype float32", "step9_async_ring[fragments]", "float16 or bfloat16", "not float32", "--variant tf32"),
    ("--step 8 --dtype float32", "not float32", "--variant tf32"),
    ("--step 8 --variant tf32 --dtype float16", "[tf32]", "float32", "not float16", "--variant default"),
    ("--step 10 --dtype float64", "step10_wgmma[rows]", "float16 or bfloat16", "not float64"),
    ("--step 10 --arch sm_80", "sm_80", "wgmma"),
    ("--step 8 --arch sm_75", "sm_75", "mma"),
    ("--step 7 --arch sm_75", "cp.async", "sm_75"),
    # names
    ("--dtype float8", "'float8'"),
    ("--dtype int32", "'int32'"),
    ("--out-dtype double", "'double'"),
    ("--layout tn", "'tn'"),
    ("--variant turbo", "'turbo'"),
    ("--variant full", "'full'"),
    ("--arch sm_10", "'sm_10'"),
    ("--arch sm_70", "'sm_70'"),
    ("--arch hopper", "'hopper'"),
    ("--arch sm_75 --variant async", "sm_75"),
    ("--step 0", "'0'"),
    ("--step 99", "99"),
    ("--step 5,99", "99"),
    ("--step five", "'five'"),
    ("--step 6-5", "'6-5'"),
    ("--step 4 --variant sync", "'sync'"),
    ("--on moon", "'moon'"),
    ("--show assembly", "'assembly'"),
    # what is not here
    ("--on gpu", "torch"),
]


def check_refused(outcome: Outcome, *named: str) -> None:
    """Expect one error line on stderr that names the value, its limit and the remedy, exit 2, nothing on stdout."""
    assert outcome.code == 2
    errors = [line for line in outcome.err.splitlines() if line.startswith("error: ") or ": error: " in line]
    assert len(errors) == 1, outcome.err
    assert all(word in errors[0] for word in named), errors[0]
    assert "Traceback" not in outcome.err
    assert outcome.out == ""


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same refusals everywhere: no GPU is seen, and nothing may be verified or measured."""
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(kernels, "verify", never)
    monkeypatch.setattr(measuring, "Session", never)


def never(*_arguments: object, **_named: object) -> None:
    """Stands in for what must not happen."""
    raise AssertionError("ran although the input is bad")


@pytest.mark.parametrize("options", REFUSED, ids=lambda options: options[0])
def test_run_refuses(options: tuple[str, ...], command: Command) -> None:
    given, *named = options
    step = () if "--step" in given else ("--step", "5")
    check_refused(command("run", *step, *given.split()), *named)


@pytest.mark.parametrize("verb", ["verify", "compile"])
@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("--size 0", "0"),
        ("--stages 0", "0"),
        ("--dtype float8", "'float8'"),
        ("--variant turbo", "'turbo'"),
        ("--arch sm_10", "'sm_10'"),
        ("--tile 64x64x16/1x1", "4096 threads"),
    ],
)
def test_other_commands_refuse_alike(verb: str, options: str, named: str, command: Command) -> None:
    if verb == "compile" and toolchain.find_compiler() is None:
        pytest.skip("no CUDA compiler")
    check_refused(command(verb, "--step", "5", *options.split()), named)


SELECTING = {"step": "99", "size": "0", "shape": "0x1x1", "budget": "nan", "stages": "0", "tile": "64x"}


def selecting() -> list[tuple[str, str]]:
    """Every command that measures or looks at kernels, with every option that it has of those that select cases."""
    commands = [name for name in cli.COMMANDS if name not in cli.GROUPS["reports"]]
    options = {name: {a.dest for a in cli.parser_of(name)._actions if a.option_strings} for name in commands}
    return [(name, option) for name, own in options.items() for option in SELECTING if option in own]


@pytest.mark.parametrize(("verb", "option"), selecting(), ids=lambda part: part)
@pytest.mark.usefixtures("no_compiler")
def test_options_are_refused_before_the_machine_is_asked_for(verb: str, option: str, command: Command) -> None:
    """A machine without GPU, torch and compilers: what is said is what is wrong with the option."""
    kernels_named, value = {"show": ["5"], "explain": ["5"], "diff": ["4", "5"]}.get(verb, []), SELECTING[option]
    outcome = command(verb, *kernels_named, f"--{option}", value)
    check_refused(outcome)
    assert value in outcome.err or (option in ("size", "shape", "stages") and "0" in outcome.err)
    for missing in ("torch", "compiler", "GPU"):
        assert missing not in outcome.err


@pytest.mark.parametrize("verb", [name for name in cli.COMMANDS if name not in cli.GROUPS["reports"]])
def test_a_place_that_is_offered_for_output_is_used_or_refused(verb: str, command: Command) -> None:
    """What writes nothing offers no --out: it would be accepted and ignored."""
    offers = any("--out" in action.option_strings for action in cli.parser_of(verb)._actions)
    assert offers == (verb in WRITERS)


@pytest.mark.parametrize("options", ["--shape -1x2x3", "--size -5,3"])
def test_a_value_with_a_dash_in_front_is_named(options: str, command: Command) -> None:
    outcome = command("run", "--step", "5", *options.split())
    assert outcome.code == 2
    assert options.split()[1] in outcome.err or "got -" in outcome.err


def test_no_command_speaks_of_none(command: Command) -> None:
    outcome = command("run", "--step", "5", "--size", "512-256")
    assert "None" not in outcome.err


@pytest.mark.parametrize("arguments", [[], ["fly"], ["run", "--speed", "9"], ["run", "now"]])
def test_unknown_commands_and_options_name_the_help(arguments: list[str], command: Command) -> None:
    outcome = command(*arguments)
    check_refused(outcome, *arguments[-1:], "--help")
    assert len(outcome.err.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["verify", "--size", "9" * 4301],
        ["verify", "--shape", f"1x{'9' * 5000}x1"],
        ["verify", "--step", "9" * 4301],
        ["verify", "--stages", "9" * 4301],
        ["verify", "--size", "9" * 4000],
        ["verify", "--size", ",".join(["1-9999"] * 50)],
        ["table", "--step", "9" * 4301],
        ["table", "--step", "1-999999999999"],
        ["bandwidth", "--mb", "9" * 4301],
        ["fuzz", "--jobs", "9" * 4301],
        ["fuzz", "--limit-s", "nan"],
        ["fuzz", "--seed", "-1"],
        ["verify", "--out", ""],
        ["verify", "--out="],
        ["verify", "--tile", "a\0b"],
        ["verify", "--tile=--"],
    ],
    ids=lambda arguments: " ".join(arguments)[:30],
)
def test_values_that_nobody_means(arguments: list[str], command: Command, tmp_path: Path) -> None:
    if arguments[0] == "table":
        (tmp_path / "results").mkdir()
        arguments = [*arguments, "--results", str(tmp_path / "results")]
    outcome = command(*arguments)
    check_refused(outcome)
    (line,) = outcome.err.splitlines()
    assert len(line) < 1100


def test_drawn_command_lines_end_with_a_documented_status(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_arguments: object, **_named: object) -> None:
        raise IllegalSchedule("not done in this test", remedy="none")

    for module, name in (
        (kernels, "lower"),
        (bandwidth, "lower_workload"),
        (fuzz, "each_in_a_process"),
        (drawing, "each_in_a_process"),
        (nests, "draw"),
        (rules, "draw"),
        (model, "_built"),
        (model, "verify_model"),
        (bench, "build_ahead"),
        (build, "build_ahead"),
        (calibrate, "build_ahead"),
        (calibrate, "_fit_all"),
        (machine_code, "lower"),
        (mutants, "plan"),
        (rebuild, "ProcessPoolExecutor"),
        (sanitize, "prepare"),
        (hosting, "Host"),
        (search, "FleetSearch"),
    ):
        monkeypatch.setattr(module, name, stop)
    monkeypatch.setattr(site, "contents", lambda _sources: [File("index.html", "")])
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "places"):
        (tmp_path / name).mkdir()
    (tmp_path / "README.md").touch()
    for line in command_lines(200, seed=7, folder=tmp_path / "places"):
        if line[0] in cli.GROUPS["reports"] or line[0] == "rebuild":  # which would read and write the project's own
            line[1:1] = ["--results", str(tmp_path / "empty")]
        if line[0] == "readme":
            line[1:1] = ["--readme", str(tmp_path / "README.md")]
        outcome = command(*line)
        assert outcome.code in (0, 2, 3, 5), (line, outcome.err)
        if "--debug" not in line:
            assert "Traceback" not in outcome.err, line
            assert len(outcome.err.splitlines()) <= 3, line


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"[1]",
        b"[" * 5000,
        b'{"a GPU": 1e400}',
        b'{"a GPU": {"peak_gflops": {"float32 ieee": "fast"}, "bandwidth_gb_s": 1, "origin": ""}}',
        b'{"a GPU": {"peak_gflops": {"float32 ieee": 0}, "bandwidth_gb_s": 1, "origin": ""}}',
        b'{"a GPU": {"peak_gflops": {}}}',
    ],
)
def test_damaged_peaks_are_named(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "peaks.json").write_bytes(content)
    monkeypatch.setattr(plot, "PEAKS", tmp_path / "peaks.json")
    with pytest.raises(RecordError, match=r"peaks\.json"):
        plot.peaks()


def test_a_bad_shape_after_good_ones_stops_before_anything_runs(command: Command) -> None:
    check_refused(command("run", "--step", "5", "--shape", "16x16x16,32x32x32,16x0x16"), "got 0")


@pytest.mark.parametrize("verb", ["run", "verify"])
def test_a_gpu_that_is_demanded_and_absent(verb: str, command: Command) -> None:
    outcome = command(verb, "--step", "5", "--on", "gpu", "--size", "64")
    check_refused(outcome, "no torch")
    assert "pip install" in outcome.err


def test_a_sweep_needs_a_gpu(command: Command) -> None:
    check_refused(command("sweep", "--step", "5", "--size", "64"), "no GPU")


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("missing.jsonl:1", None, "cannot read"),
        ("truncated.jsonl:1", lambda: record().to_json()[:200], "truncated.jsonl:1 is not whole"),
        ("empty.jsonl:1", lambda: "", "has no line 1"),
        ("short.jsonl:2", lambda: record().to_json(), "has no line 2"),
        ("foreign.jsonl:1", lambda: '{"name": "something else"}', "is no Record"),
        ("list.jsonl:1", lambda: "[1, 2, 3]", "is no Record"),
        ("newer.jsonl:1", lambda: record().to_json().replace('"schema":1', '"schema":2'), "$.schema"),
        ("lacking.jsonl:1", lambda: '{"schema": 1, "kind": "step"}', "is no Record"),
        ("binary.jsonl:1", lambda: b"\xff\xfe\x00\x80", "binary.jsonl:1 is not whole"),
        ("whole.jsonl", lambda: record().to_json(), "give FILE.jsonl:LINE"),
        ("whole.jsonl:one", lambda: record().to_json(), "give FILE.jsonl:LINE"),
    ],
)
def test_again_refuses_what_is_no_record(
    name: str, content: Callable[[], str | bytes] | None, named: str, command: Command, tmp_path: Path
) -> None:
    path = tmp_path / name.partition(":")[0]
    if content:
        made = content()
        path.write_bytes(made if isinstance(made, bytes) else made.encode())
    outcome = command("run", "--again", str(tmp_path / name))
    check_refused(outcome, named)
    assert path.name in outcome.err


def test_again_refuses_a_folder_and_does_without_a_gpu(command: Command, tmp_path: Path) -> None:
    check_refused(command("run", "--again", str(tmp_path)), str(tmp_path))


def test_again_names_a_step_that_is_gone(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorir_ladder.harness.commands.run.open_session", lambda *_: None)
    place = replace(record(), step=42).save(tmp_path)
    check_refused(command("run", "--again", place), "step 42")


@pytest.mark.compiler
def test_a_folder_that_cannot_take_listings(command: Command, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    arguments = ["compile", "--step", "1", "--size", "16", "--show", "tir", "--out"]
    outcome = command(*arguments, str(tmp_path / "file"))
    assert outcome.code == 2
    (line,) = outcome.err.splitlines()
    assert line.startswith("error: ")
    assert str(tmp_path / "file") in line
    assert "wrote" not in outcome.out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["steps/step5_pipelining.py", "--stages", "0"], "--stages 0"),
        (["-m", "harness", "run", "--again", "nowhere.jsonl:1"], "nowhere.jsonl"),
    ],
)
def test_a_process_ends_with_one_line_and_no_traceback(arguments: list[str], named: str) -> None:
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
    check_refused(Outcome(result.returncode, result.stdout, result.stderr), named)
    assert len(result.stderr.splitlines()) == 1
