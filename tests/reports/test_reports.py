"""Reports: which records count, what they become, and what the checks refuse."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from support.reports_fixtures import (
    HALF,
    SIZES,
    calibration,
    environment,
    half,
    peer,
    peers,
    product,
    published,
    record,
    tuned,
    write_ladder,
    write_peers,
    write_tensor_cores,
)
from tensorir_ladder.harness.machines import MACHINES
from tensorir_ladder.harness.records import RESULTS, Counters, Record, Timing
from tensorir_ladder.reports import plot
from tensorir_ladder.reports.__main__ import main
from tensorir_ladder.reports.cases import natural, steps_text
from tensorir_ladder.reports.check import findings, record_problems, tuned_problems
from tensorir_ladder.reports.counters import counted_groups, counters_tables
from tensorir_ladder.reports.figures import intensity, step_look
from tensorir_ladder.reports.page import step_page
from tensorir_ladder.reports.paths import Paths
from tensorir_ladder.reports.plot import peaks, plots
from tensorir_ladder.reports.readme import BEGIN, END, pictures
from tensorir_ladder.reports.readme_tables import fastest, ladder, other_shapes, overview
from tensorir_ladder.reports.selection import load
from tensorir_ladder.reports.table import all_tables, ladder_table, variants_table

ROOT = Path(__file__).resolve().parents[2]
KEYS = [
    "step",
    "variant",
    "default_variant",
    "m",
    "n",
    "k",
    "layout",
    "dtype",
    "out_dtype",
    "math",
    "stages",
    "tile",
    "tile_choice",
    "launched_early",
    "gpu",
    "gpu_uuid",
    "run",
    "time_ms",
    "gflops",
    "ratio_to_cublas",
    "ratio_interval",
    "improvement_over_previous_pct",
    "verified",
    "verified_on",
    "registers",
    "smem_bytes",
    "occupancy",
    "bound",
    "peers",
    "recorded_at",
    "revision",
    "dirty",
    "record",
]
LATER = "2026-11-21T10:00:00.000+00:00"


def rows_of(folder: Path, capsys: pytest.CaptureFixture[str], *more: str) -> list[dict]:
    assert main(["table", "--json", "--results", str(folder), *more]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Paths:
    """A complete, current set of reports; tests that change it work on a copy."""
    folder = tmp_path_factory.mktemp("site")
    write_ladder(folder)
    readme = folder / "README.md"
    readme.write_bytes(f"# Title\r\n\r\nbefore\t{BEGIN}\nold\n{END} after\r\nend, no newline".encode())
    for command in ("page", "readme"):
        assert main([command, "--results", str(folder), "--readme", str(readme)]) == 0
    return Paths.of(folder, readme)


@pytest.fixture(scope="module")
def ladders(tmp_path_factory: pytest.TempPathFactory) -> Paths:
    """A complete, current set of reports on the float32 and the float16 ladder."""
    folder = tmp_path_factory.mktemp("ladders")
    write_ladder(folder, variants=False)
    write_tensor_cores(folder)
    return published(folder)


# Which records count


def test_the_newest_clean_record_of_a_key_counts(tmp_path, capsys):
    record(speed=20000).save(tmp_path)
    record(speed=25000, environment=environment(at=LATER)).save(tmp_path)
    record(speed=30000, environment=environment(at="2026-11-22T10:00:00.000+00:00", dirty=True)).save(tmp_path)
    (row,) = rows_of(tmp_path, capsys)
    assert row["gflops"] == pytest.approx(25000)
    assert row["dirty"] is False


def test_a_dirty_record_counts_only_where_no_clean_one_exists(tmp_path, capsys):
    record(environment=environment(dirty=True)).save(tmp_path)
    (row,) = rows_of(tmp_path, capsys)
    assert row["dirty"] is True
    assert main(["table", "--results", str(tmp_path)]) == 0
    assert "uncommitted" in capsys.readouterr().out


def test_the_usual_stage_count_stands_for_the_step_and_the_others_are_listed_apart(tmp_path):
    record(5).save(tmp_path)
    record(5, speed=40000, stages=2, default_stages=False, environment=environment(at=LATER)).save(tmp_path)
    (section,) = load(tmp_path).sections()
    assert section.pick(5, "default", (1024, 1024, 1024)).stages == 4
    assert [other.stages for other in section.others(5)] == [2]


# JSON


def test_json_rows_have_exactly_the_promised_keys_and_values(tmp_path, capsys):
    record(5).save(tmp_path)
    record(1).save(tmp_path)
    calibration().save(tmp_path)
    first, fifth = rows_of(tmp_path, capsys)
    assert list(first) == KEYS
    assert first["improvement_over_previous_pct"] is None
    assert fifth["gflops"] == pytest.approx(2 * 1024**3 / (fifth["time_ms"] * 1e6))
    assert fifth["ratio_to_cublas"] == pytest.approx(32200 / 34000)
    assert fifth["improvement_over_previous_pct"] == pytest.approx(100 * (32200 / 25400 - 1))
    assert (first["record"], fifth["record"]) == ("h200-steps.jsonl:2", "h200-steps.jsonl:1")


def test_json_can_be_limited_to_steps(tmp_path, capsys):
    for step in (1, 2, 5):
        record(step).save(tmp_path)
    assert [row["step"] for row in rows_of(tmp_path, capsys, "--step", "1-2")] == [1, 2]


def test_a_failed_check_never_shows_a_speed(tmp_path, capsys):
    bad = record(5)
    replace(bad, verification=replace(bad.verification, passed=False)).save(tmp_path)
    (row,) = rows_of(tmp_path, capsys)
    assert (row["verified"], row["time_ms"], row["gflops"], row["ratio_to_cublas"]) == (False, None, None, None)
    for form in ([], ["--markdown"]):
        assert main(["table", *form, "--results", str(tmp_path)]) == 0
        text = capsys.readouterr().out
        assert "failed its check" in text
        assert "32,200" not in text
    assert main(["plot", "--results", str(tmp_path)]) == 0


def test_peers_stand_beside_our_fastest_in_percent_of_cublas(tmp_path, capsys):
    write_peers(tmp_path)
    assert main(["table", "--markdown", "--results", str(tmp_path)]) == 0
    text = capsys.readouterr().out.split("beside peers", 1)[1]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    ours = ["95 % (step 5, 32x64x16/4x4, 4 stages)", "71 % (step 5, 32x64x16/4x4, 4 stages)"]
    fastest = ["99 % (step 6, 32x64x16/4x4, 4 stages)", "82 % (step 6, 32x64x16/4x4, 4 stages)"]
    assert cells[0] == ["", "1024", "2048"]
    assert cells[2:] == [
        ["our fastest step 5", *ours],
        ["our fastest", *fastest],
        ["triton", "80 % (64x64x16, 4 warps, 3 stages)", "80 % (64x64x16, 4 warps, 3 stages)"],
        ["dlight", "failed", "40 % (rule gpu.Matmul)"],
    ]
    assert "dlight failed: WrongResult: worst error 3." in text
    assert "tilelang" not in text  # nothing was learnt of what was not installed


def test_a_json_row_names_its_peers(tmp_path, capsys):
    write_peers(tmp_path)
    rows = {(row["step"], row["m"]): row["peers"] for row in rows_of(tmp_path, capsys)}
    assert rows[4, 1024] == []
    triton, _, tilelang = rows[6, 1024]
    assert triton["ratio_to_cublas"] == pytest.approx(0.8)
    assert (triton["status"], triton["config"]) == ("measured", "64x64x16, 4 warps, 3 stages")
    assert (tilelang["time_ms"], tilelang["why"]) == (None, "tilelang is not installed")


def test_the_newest_time_of_a_peer_counts_also_where_its_case_was_measured_again_without_it(tmp_path):
    write_peers(tmp_path)
    later = environment(at=LATER)
    replace(record(4), environment=later, peers=(peer("dlight", 1024, 0.3),)).save(tmp_path)
    record(6, environment=later).save(tmp_path)
    (section,) = load(tmp_path).sections()
    shape = (1024, 1024, 1024)
    assert section.peer(shape, "triton")[0].step in (5, 6)
    assert section.peer(shape, "dlight")[0].step == 4
    assert section.peer(shape, "tilus") is None
    assert section.peer(shape, "tilelang") is None  # was not installed


def test_our_fastest_beside_peers_is_the_ladders_and_not_only_what_was_timed_beside_them(tmp_path, capsys):
    write_peers(tmp_path)
    record(6, speed=45000, tile_choice="given", tile="128x64x32/8x4").save(tmp_path)
    assert main(["table", "--markdown", "--results", str(tmp_path)]) == 0
    text = capsys.readouterr().out.split("beside peers", 1)[1]
    assert "| our fastest | 132 % (step 6, 128x64x32/8x4, 4 stages) | 82 %" in text


def test_without_peers_nothing_is_said_of_them(tmp_path, capsys):
    for step in (4, 5):
        record(step).save(tmp_path)
    readme = tmp_path / "README.md"
    readme.write_text(f"{BEGIN}{END}")
    assert main(["table", "--results", str(tmp_path)]) == 0
    assert main(["readme", "--results", str(tmp_path), "--readme", str(readme)]) == 0
    assert "eside peers" not in capsys.readouterr().out + readme.read_text()


def test_the_readme_shows_peers_where_there_are_any(tmp_path):
    write_peers(tmp_path)
    readme = tmp_path / "README.md"
    readme.write_text(f"{BEGIN}{END}")
    assert main(["readme", "--results", str(tmp_path), "--readme", str(readme)]) == 0
    assert "| triton | 80 % (64x64x16, 4 warps, 3 stages) |" in readme.read_text()
    assert "tilelang" not in readme.read_text()


@pytest.mark.parametrize("text_of", [{"status": "failed"}, {"timing": None}, {"status": "missing", "timing": None}])
def test_a_peer_that_contradicts_itself_is_found(text_of):
    broken = replace(record(5), peers=(replace(peer("triton", 1024, 0.8), **text_of),))
    assert any("peer triton" in problem for problem in record_problems(broken))
    assert not any("peer" in problem for problem in record_problems(replace(record(5), peers=peers(1024))))


def test_a_peers_times_are_checked_like_all_others():
    timed = peer("triton", 1024, 0.8)
    short = replace(timed, timing=Timing("triton", timed.timing.samples_ms[:3]))
    assert "triton has 3 samples in 9 rounds" in list(record_problems(replace(record(5), peers=(short,))))


def test_a_tuned_configuration_has_a_table_of_its_own_and_one_row(tmp_path):
    write_ladder(tmp_path, variants=False)
    before = [table.title for table in all_tables(load(tmp_path))]
    tuned(5, 1024).save(tmp_path)
    tuned(4, 256, runner_up=None, margin_pct=None, margin_interval_pct=(), verdict="alone").save(tmp_path)
    for variant, at in (("async", environment()), ("sync", environment(at=LATER))):
        changes = {"variant": variant, "default_variant": variant == "async", "environment": at}
        record(5, 1024, tile_choice="tuned", stages=2, **changes).save(tmp_path)
    tables = {table.title: table for table in all_tables(load(tmp_path))}
    assert set(tables) - set(before) == {
        "NVIDIA H200, float32 (ieee), B[K,N]: tuned",
        "NVIDIA H200, float32 (ieee), B[K,N]: tuned configurations",
    }
    ladder = tables["NVIDIA H200, float32 (ieee), B[K,N]: tuned"]
    assert ladder.header[1:2] == ("1024",)
    assert [row[:2] for row in ladder.rows] == [("5 pipelining", "0.95 (32.2 / 34.0)")]
    (kept,) = [record for record in load(tmp_path).records if record.tile_choice == "tuned"]
    assert kept.variant == "sync"  # the newest counts, whatever variant was chosen
    first, second = tables["NVIDIA H200, float32 (ieee), B[K,N]: tuned configurations"].rows
    assert first[:3] == ("4", "256", "async 64x64x16/4x4, 2 stages")
    assert first[5:] == ("–", "–", "alone", "2 of 20")
    assert second[3:6] == ("0.95 (2.68 / 2.83)", "+25.0 %", "sync 128x64x32/8x4, 3 stages")
    assert second[6:] == ("+2.50 % (+2.10 to +2.90)", "confirmed", "2 of 20")


def test_a_page_shows_what_its_step_was_tuned_to(tmp_path):
    record(5, 1024).save(tmp_path)
    assert "Tuned" not in step_page(load(tmp_path), 5)
    tuned(5, 1024).save(tmp_path)
    tuned(4, 512).save(tmp_path)
    record(5, 1024, tile_choice="tuned").save(tmp_path)
    page = step_page(load(tmp_path), 5)
    assert "**Tuned configurations**" in page
    assert page.count("async 64x64x16/4x4, 2 stages") == 1
    assert "32x64x16/4x4 (tuned)" in page


@pytest.mark.parametrize(
    ("changes", "finding"),
    [
        ({"environment": environment(dirty=True)}, "uncommitted changes"),
        ({"method": replace(tuned().method, rounds=5)}, "5 rounds; at least"),
        (
            {"confirmation": (Timing("winner", (1.0,) * 8), *tuned().confirmation[1:])},
            "winner has 8 samples in 9 rounds",
        ),
        ({"candidates": (replace(tuned().winner, status="wrong", why="error 3"),)}, "is wrong: error 3"),
    ],
)
def test_a_tuned_configuration_that_is_no_evidence_is_found(changes, finding):
    assert list(tuned_problems(tuned())) == []
    assert any(finding in problem for problem in tuned_problems(tuned(**changes)))


# Tables


def test_gpus_never_share_a_table_a_plot_or_a_line(tmp_path):
    record(5).save(tmp_path)
    record(5, speed=10000, environment=environment("NVIDIA A100")).save(tmp_path)
    results = load(tmp_path)
    tables = all_tables(results)
    assert [("A100" in table.title, "H200" in table.title) for table in tables] == [(True, False), (False, True)]
    cells = [[cell for row in table.rows if row[0].startswith("5") for cell in row] for table in tables]
    assert "0.29 (10.0 / 34.0)" in cells[0]
    assert "0.95 (32.2 / 34.0)" in cells[1]
    files = [item.file_name for item in plots(results)]
    assert len(files) == len(set(files))
    assert all(item.section.gpu.split()[-1].lower() in item.file_name for item in plots(results))


def test_dtypes_and_layouts_are_apart_too(tmp_path):
    record(5).save(tmp_path)
    record(5, layout="nt").save(tmp_path)
    record(5, dtype="float16").save(tmp_path)
    sections = load(tmp_path).sections()
    assert len(sections) == len({section.slug for section in sections}) == 3


def test_the_average_column(tmp_path):
    for size in (256, 512, 1024):
        record(4, size).save(tmp_path)
        record(5, size).save(tmp_path)
    record(4, 2048).save(tmp_path)
    results = load(tmp_path)
    table = ladder_table(results, results.sections()[0], "default")
    fifth = next(row for row in table.rows if row[0].startswith("5"))
    mean = 100 * ((2630 / 1600 + 12050 / 7100 + 32200 / 25400) / 3 - 1)
    ratio = (2630 / 2800 * 12050 / 16000 * 32200 / 34000) ** (1 / 3)
    assert fifth[-4:] == ("–", f"{mean:+.1f} %", f"{mean:+.1f} %", f"{ratio:.2f} (3 of 4 sizes)")


def test_variants_start_with_the_default_and_count_naturally(site):
    results = load(site.results)
    names = [row[0] for row in variants_table(results, results.sections()[0], 6, "default").rows]
    assert names == ["full (default)", "none", "unroll4", "unroll8", "unroll16", "unroll32"]
    assert natural("unroll4") < natural("unroll16")


def test_a_prediction_stands_only_where_the_step_before_is_not_pipelined(tmp_path):
    record(4).save(tmp_path)
    record(5).save(tmp_path)
    record(6, predicted_gain_pct=30.0).save(tmp_path)
    results = load(tmp_path)
    tables = [variants_table(results, results.sections()[0], step, "default") for step in (5, 6)]
    assert ["(+30)" in table.rows[0][1] for table in tables] == [True, False]


def test_intensity_counts_each_operand_once():
    assert intensity(record(size=1024)) == pytest.approx(2 * 1024**3 / (3 * 1024**2 * 4))


# Files that cannot be used


@pytest.mark.parametrize("command", ["table", "plot", "page", "check"])
@pytest.mark.parametrize("text", ["[1, 2]", '{"name": "somebody else\'s"}', '{"schema": 1}'])
def test_a_foreign_line_is_named_and_the_others_go_on(tmp_path, capsys, caplog, command, text):
    place = record(1).save(tmp_path)
    with Path(place.rpartition(":")[0]).open("a") as file:
        file.write(text + "\n")
    assert main([command, "--results", str(tmp_path)]) == (5 if command == "check" else 0)
    out, err = capsys.readouterr()
    assert err == ""
    assert caplog.text.count("h200-steps.jsonl:2 is no Record") == 1
    assert ("h200-steps.jsonl:2 is no Record" in out) == (command == "check")


def test_a_torn_line_is_passed_over_said_and_found(tmp_path):
    record(1).save(tmp_path)
    with (tmp_path / "h200-steps.jsonl").open("a") as file:
        file.write('{"schema": 1, "kind": "st')
    command = [sys.executable, "-m", "tensorir_ladder.reports", "table", "--json", "--results", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, len(json.loads(done.stdout))) == (0, 1)
    (line,) = done.stderr.splitlines()
    assert f"{tmp_path}/h200-steps.jsonl:2" in line
    (finding,) = findings(Paths.of(tmp_path))
    assert finding.startswith("h200-steps.jsonl:2 is not whole JSON")


@pytest.mark.parametrize("samples", [[], [0.0] * 9, [-1.0] * 9, ["fast"] * 9, [None] * 9])
def test_times_that_are_none_are_left_out(tmp_path, capsys, samples):
    data = json.loads(record().to_json())
    data["timing"]["samples_ms"] = samples
    (tmp_path / "h200-steps.jsonl").write_text(json.dumps(data) + "\n")
    assert rows_of(tmp_path, capsys) == []
    assert main(["check", "--results", str(tmp_path)]) == 5
    assert "h200-steps.jsonl:1 is no Record" in capsys.readouterr().out


def test_the_process_itself_prints_one_line_where_there_is_nothing_else(tmp_path):
    (tmp_path / "half-steps.jsonl").write_text("{}")
    command = [sys.executable, "-m", "tensorir_ladder.reports", "table", "--json", "--results", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, json.loads(done.stdout)) == (0, [])
    (line,) = done.stderr.splitlines()
    assert "half-steps.jsonl:1" in line


def test_a_folder_without_records_is_an_error_but_empty_json(tmp_path, capsys):
    assert main(["table", "--results", str(tmp_path / "nowhere")]) == 2
    assert main(["table", "--results", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err
    assert rows_of(tmp_path, capsys) == []


def test_results_elsewhere_never_touch_the_committed_reports(tmp_path, capsys):
    paths = Paths.of(tmp_path)
    assert tmp_path in paths.pages.parents
    assert tmp_path in paths.plots.parents
    record().save(tmp_path)
    assert main(["readme", "--results", str(tmp_path)]) == 2
    assert "--readme" in capsys.readouterr().err


# Plots


def test_plots_are_deterministic_and_carry_their_records_digest(site, tmp_path):
    shown = pictures(load(site.results), site)
    assert [item.kind for item in shown] == ["ratio"]
    for item in shown:
        assert item.is_current(site.plots)
        assert item.write(tmp_path).read_bytes() == (site.plots / item.file_name).read_bytes()


def test_a_plot_of_other_records_is_stale(site, tmp_path):
    write_ladder(tmp_path, variants=False)
    record(5, speed=33000, environment=environment(at=LATER)).save(tmp_path)
    assert not any(item.is_current(site.plots) for item in plots(load(tmp_path)))


def test_every_known_gpu_has_a_peak_a_bandwidth_and_an_origin():
    for name, peak in plot.peaks().items():
        assert peak["bandwidth_gb_s"] > 0, name
        assert all(value > 0 for value in peak["peak_gflops"].values()), name
        assert peak["origin"], name


# Pages


def test_a_page_has_its_steps_idea_tables_and_pictures(site):
    text = (site.pages / "step5_pipelining.md").read_text()
    assert text.startswith("# Step 5, software pipelining")
    assert "diff steps/step4_vectorization.py steps/step5_pipelining.py" in text
    assert "0.95, +26.8 % (+30)" in text
    assert "![step5-variants, " in text


def test_a_page_of_a_step_that_is_not_ours_shows_its_records(tmp_path):
    record(5, step_name="step5_elsewhere").save(tmp_path)
    text = step_page(load(tmp_path), 5)
    assert text.startswith("# step5_elsewhere\n")
    assert "32,200" in text


def test_links_of_pages_and_readme_lead_to_files(site):
    for source in [*site.pages.glob("*.md"), site.documents[0]]:
        for target in [part.split(")")[0] for part in source.read_text().split("](")[1:]]:
            assert (source.parent / target).is_file(), f"{source.name} -> {target}"


# README


def test_the_readme_changes_between_its_markers_only(site):
    text = site.documents[0].read_bytes().decode()
    assert text.startswith(f"# Title\r\n\r\nbefore\t{BEGIN}\n")
    assert text.endswith(f"{END} after\r\nend, no newline")
    assert "\nold\n" not in text
    assert "| 0.95<br><sub>0.947–0.947</sub><br>32.2 / 34.0 |" in text
    assert "| **1.02**<br><sub>1.023–1.023</sub> |" in text  # the best tile's, in the table of the fastest
    assert "cuBLAS against itself through the same path: 1.002." in text
    assert "NVIDIA H200, driver 580.1" in text


@pytest.mark.parametrize("text", ["", BEGIN, END, f"{END}{BEGIN}", f"{BEGIN}{BEGIN}{END}", f"{BEGIN}{END}{END}"])
def test_a_readme_without_its_markers_is_refused_and_left_alone(tmp_path, capsys, text):
    record().save(tmp_path)
    readme = tmp_path / "README.md"
    readme.write_text(text)
    assert main(["readme", "--results", str(tmp_path), "--readme", str(readme)]) == 2
    assert "README.md must have" in capsys.readouterr().err
    assert readme.read_text() == text


def test_a_missing_readme_is_an_error(tmp_path, capsys):
    record().save(tmp_path)
    assert main(["readme", "--results", str(tmp_path), "--readme", str(tmp_path / "none.md")]) == 2
    assert "none.md" in capsys.readouterr().err


# Check


def test_a_complete_set_passes(site, capsys):
    assert findings(site) == []
    assert main(["check", "--results", str(site.results), "--readme", str(site.documents[0])]) == 0
    assert "cuBLAS against itself: 1.002" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "finding"),
    [
        ({"method": replace(record().method, rounds=5)}, "5 rounds; at least 7"),
        ({"method": replace(record().method, rounds=11)}, "9 samples in 11 rounds"),
        ({"environment": environment(dirty=True)}, "uncommitted"),
        ({"verification": replace(record().verification, passed=False)}, "not verified"),
        ({"verification": replace(record().verification, integers_exact=False)}, "not verified"),
        ({"verification": replace(record().verification, max_error=1.0)}, "not verified"),
        ({"verification": replace(record().verification, max_error=float("nan"))}, "not verified"),
        ({"baseline": record().baseline[:1]}, "fewer than two forms"),
        ({"previous": None}, "the step before"),
        ({"timing": Timing("step4", (0.001,) * 9)}, "above the GPU's peak"),
        ({"tile": "32x64x16"}, "takes no tile 32x64x16"),
    ],
)
def test_a_record_that_is_no_evidence_is_found(changes, finding):
    assert list(record_problems(record(4))) == []
    assert any(finding in problem for problem in record_problems(record(4, **changes)))


def test_nothing_to_check_is_not_fine(tmp_path, capsys):
    assert main(["check", "--results", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"no record in {tmp_path}" in err


@pytest.mark.parametrize("command", ["plot", "page"])
def test_nothing_to_draw_is_refused_with_the_folder_and_what_to_measure(command, tmp_path, capsys):
    assert main([command, "--results", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert str(tmp_path) in err
    assert "ladder run" in err
    assert not list(tmp_path.iterdir())


def test_a_record_of_a_gpu_that_its_file_does_not_name_is_found(tmp_path):
    place = record(1).save(tmp_path)
    assert findings(Paths.of(tmp_path)) == []
    other = record(1, environment=replace(environment(), gpu="NVIDIA H100"))
    other.save(tmp_path / "elsewhere")
    with open(place.rpartition(":")[0], "a") as file:
        file.write((tmp_path / "elsewhere" / other.file_name).read_text())
    (found,) = findings(Paths.of(tmp_path))
    assert found.startswith(f"{Path(place).name.partition(':')[0]}:2: ")
    assert "NVIDIA H100" in found
    assert other.file_name in found


@pytest.mark.parametrize("command", ["table", "stages", "plot", "check"])
def test_an_option_that_a_report_lacks_points_to_the_help_of_that_report(command, capsys):
    assert main([command, "--sizes-of", "5"]) == 2
    assert f"ladder {command} --help" in capsys.readouterr().err


def test_a_calibration_off_one_is_found():
    good = calibration()
    assert list(record_problems(good)) == []
    bad = replace(good, timing=Timing("cuBLAS", tuple(1.05 * t for t in good.timing.samples_ms)))
    assert any("cuBLAS against itself is 0.95" in problem for problem in record_problems(bad))


def test_a_gap_in_the_ladder_is_found(tmp_path):
    for size in SIZES[:2]:
        record(4, size).save(tmp_path)
    record(5, SIZES[0]).save(tmp_path)
    assert any("step 5, default tile: not measured at 512" in finding for finding in findings(Paths.of(tmp_path)))


def test_what_is_stale_missing_or_left_over_is_found(tmp_path):
    write_ladder(tmp_path, variants=False)
    readme = tmp_path / "README.md"
    readme.write_text(f"{BEGIN}\n{END}\n")
    arguments = ["--results", str(tmp_path), "--readme", str(readme)]
    assert main(["readme", *arguments]) == 0
    paths = Paths.of(tmp_path, readme)
    assert findings(paths) == []
    record(5, speed=33000, environment=environment(at=LATER)).save(tmp_path)
    (paths.plots / "h200-float32-nn-gone.png").write_text("no picture")
    text = "\n".join(findings(paths))
    for expected in ("README.md: results are stale", "nn-ratio.png: stale", "nn-gone.png: left over"):
        assert expected in text
    (paths.plots / "h200-float32-nn-ratio.png").unlink()
    assert any("nn-ratio.png: missing" in finding for finding in findings(paths))
    assert main(["check", *arguments]) == 5


def test_the_committed_results_pass_their_check():
    status = subprocess.run(["git", "status", "--porcelain", str(RESULTS)], cwd=RESULTS, capture_output=True, text=True)
    if status.stdout:
        pytest.skip("reports/results holds records that are not committed: regenerate the reports, or remove them")
    assert findings(Paths.of()) == []


def test_the_roofline_and_the_measured_rates_agree():
    for name, peak in peaks().items():
        machine = next(machine for machine in MACHINES.values() if machine.gpu == name)
        measured = round(machine.rates.fp32_gflops), round(machine.rates.copy_gb_s)
        written = peak["peak_gflops"]["float32 ieee"], peak["bandwidth_gb_s"]
        assert written == measured, f"write {measured} into reports/peaks.json for {name}, then plot, page and readme"


def counted(step: int, variant: str, barrier: float, shape: int = 512) -> Counters:
    """Hardware counters of one case, made up."""
    return Counters(
        **product(step, shape),
        variant=variant,
        tile="32x64x16/4x4",
        stages=3,
        gpu=environment().gpu,
        values={"time, ns": 2000.0, "stalled, warps per issue: barrier": barrier},
        revision="0" * 40,
        dirty=False,
        recorded_at="2026-11-21T12:00:00.000+00:00",
        command=f"python -m harness counters --step {step} --variant {variant}",
    )


def test_variants_counted_on_one_case_stand_in_one_group_behind_the_step_before(tmp_path):
    for step in (4, 5):
        record(step).save(tmp_path)
    default = load(tmp_path).default_variant(5)
    alone = counted(5, "alone", 3.0, shape=64)
    for made in (counted(5, "another", 0.5), counted(5, default, 1.0), counted(4, "default", 2.0), alone):
        made.save(tmp_path)
    results = load(tmp_path)
    (section,) = results.sections()
    (group,) = counted_groups(results, 5, section)  # nothing was counted of step 4 at 64
    assert [(c.step, c.variant) for c in group] == [(4, "default"), (5, default), (5, "another")]
    (table,) = counters_tables(results, 5, section)
    assert table.header == ("counter", "step 4", f"step 5 {default}", "change", "step 5 another", "change")
    assert table.rows[1] == ("stalled, warps per issue: barrier", "2.00", "1.00", "-50 %", "0.50", "-75 %")
    assert [[c.step for c in group] for group in counted_groups(results, 4, section)] == [[4]]  # its ladder's first
    (table,) = counters_tables(results, 4, section)
    assert table.header == ("counter", "step 4")
    assert table.rows[1] == ("stalled, warps per issue: barrier", "2.00")
    assert counted_groups(results, 5, replace(section, dtype="float16")) == []


def test_a_step_with_other_tiles_is_shown_beside_the_step_before_and_what_only_one_counted_beside_a_dash(tmp_path):
    for step in (4, 5):
        record(step).save(tmp_path)
    tensor = {"tensor pipe busy, %": 41.2, "instructions issued": 30.0, "issue slots busy, %": 60.0}
    tensor |= {"tensor pipe: warps' instructions (hmma)": 10.0, "shared memory: accesses by loads": 20.0}
    tensor |= {"shared memory: bank conflicts of loads": 5.0, "stalled, warps per issue: wait": 3.0}
    wider = replace(counted(5, "default", 1.0), tile="64x64x32/8x4")
    for made in (counted(4, "default", 2.0), replace(wider, values=wider.values | tensor)):
        made.save(tmp_path)
    results = load(tmp_path)
    (section,) = results.sections()
    (table,) = counters_tables(results, 5, section)  # the step before has no ceiling to be compared with
    assert table.title == "512, step 4 tile 32x64x16/4x4, step 5 tile 64x64x32/8x4"
    assert ("stalled, warps per issue: barrier", "2.00", "1.00", "-50 %") in table.rows
    assert ("tensor pipe busy, %", "–", "41.20", "–") in table.rows


# Ladders of several dtypes


def test_two_ladders_make_a_complete_set(ladders):
    assert findings(ladders) == []


def test_sections_go_as_the_ladder_does(ladders):
    found = [(section.arithmetic, section.steps) for section in load(ladders.results).sections()]
    assert found == [("float32 ieee", [1, 2, 3, 4, 5, 6]), ("float16 ieee", [8, 9, 10]), ("float32 tf32", [8, 9])]


def test_one_look_says_where_cublas_is_passed(ladders):
    table = overview(load(ladders.results).sections())
    assert table.header == ("ladder", "256³", "512³", "1024³", "2048³", "4096³")
    rows = {name: [cell.partition("<br>")[0] for cell in cells] for name, *cells in table.rows}
    half_precision = ["**1.14** step 9", "**1.04** step 9", "**1.02** step 10", "**1.05** step 10", "**1.07** step 10"]
    assert rows["NVIDIA H200, float16 (ieee), B[K,N]"] == half_precision
    assert rows["NVIDIA H200, float32 (tf32), B[K,N]"] == ["–", "–", "0.80 step 9", "–", "–"]


def beside_cublas(made: Record, ratios: list[float]) -> Record:
    """The record with other times: so much faster than the faster cuBLAS form, round by round."""
    cublas = tuple(replace(form, samples_ms=form.samples_ms[:1] * len(ratios)) for form in made.baseline)
    own = tuple(cublas[0].samples_ms[0] / ratio for ratio in ratios)
    return replace(made, timing=replace(made.timing, samples_ms=own), baseline=cublas, previous=None)


@pytest.mark.parametrize(
    ("ratios", "cell"),
    [
        # The second smallest and the second largest of nine rounds bound the median.
        ([0.9, 1.01, 1.02, 1.03, 1.04, 1.05, 1.06, 1.07, 2.0], "**1.04** step 10<br><sub>1.010–1.070</sub>"),
        ([0.9, 0.99, 1.02, 1.03, 1.04, 1.05, 1.06, 1.07, 1.08], "1.04 step 10<br><sub>0.990–1.070</sub>"),
        ([1.0] * 9, "1.00 step 10<br><sub>1.000–1.000</sub>"),
    ],
)
def test_bold_is_faster_than_cublas_with_all_of_its_interval(tmp_path, ratios, cell):
    beside_cublas(half(10, 1024), ratios).save(tmp_path)
    ((_, found),) = overview(load(tmp_path).sections()).rows
    assert found == cell


def test_ratios_are_paired_round_by_round(tmp_path):
    slow_rounds = (1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 1.0)  # the clock of every other round is half
    made = half(10, 1024)
    own, cublas = (replace(made.timing, samples_ms=tuple(share * t for t in slow_rounds)) for share in (0.9, 1.0))
    made = replace(made, timing=own, baseline=(cublas, replace(cublas, label="cuBLAS nt")))
    assert made.ratio_interval == pytest.approx((1 / 0.9, 1 / 0.9))


def test_what_is_launched_early_has_a_row_of_its_own_and_leads_nowhere(tmp_path):
    half(10, 1024, 1.05).save(tmp_path)
    half(10, 1024, 1.30, variant="early", default_variant=False, early_launch=True).save(tmp_path)
    (section,) = load(tmp_path).sections()
    plain, early = overview([section]).rows
    assert plain[0] == section.title
    assert plain[1].startswith("**1.05** step 10")
    assert early[0] == f"{section.title}, launched early"
    assert early[1].startswith("**1.30** step 10")
    assert section.fastest(10, (1024, 1024, 1024)).ratio_to_cublas == pytest.approx(1.05)
    assert not any("1.30" in cell for row in ladder(section, str).rows for cell in row)
    assert fastest(section, str) is None


def test_an_early_launch_is_known_of_records_that_do_not_say_so():
    old = half(10, 1024, step_name="step13_persistent", variant="overlapped")
    assert old.early_launch is None
    assert old.launched_early
    assert not replace(old, variant="stream").launched_early
    assert not replace(old, early_launch=False).launched_early


def write_run(folder: Path, run: str, day: int, share: float = 1.0, **changes: object) -> None:
    """Steps 8 and 9 at two sizes, measured by one command on a GPU of its own; ``share`` of their usual speed."""
    made_at = environment(at=f"2026-11-{day}T10:00:00.000+00:00", run=run, uuid=f"GPU-{run}")
    for step, size in itertools.product((8, 9), (1024, 2048)):
        half(step, size, share * HALF[step - 8][SIZES.index(size)], environment=made_at, **changes).save(folder)


def ratios_shown(folder: Path) -> dict[tuple[int, int], float]:
    (section,) = load(folder).sections()
    lines = {step: section.line(step, "default") for step in section.steps}
    return {(step, shape[0]): r.ratio_to_cublas for step, line in lines.items() for shape, r in line.items()}


def test_a_ladder_is_shown_as_the_newest_whole_run_measured_it(tmp_path):
    write_run(tmp_path, "first", 20)
    write_run(tmp_path, "second", 21, share=1.1)
    alone = environment(at="2026-11-22T10:00:00.000+00:00", run="third", uuid="GPU-third")
    half(9, 2048, 3.0, environment=alone).save(tmp_path)  # newer, of another run
    assert ratios_shown(tmp_path) == pytest.approx(
        {(8, 1024): 0.55, (8, 2048): 0.44, (9, 1024): 0.88, (9, 2048): 0.792}
    )
    (section,) = load(tmp_path).sections()
    assert section.ladder_run == "second"
    assert "One run, second, on GPU-second, 2026-11-21." in ladder(section, str).note
    assert section.leader((2048,) * 3).ratio_to_cublas == pytest.approx(0.792)


def test_without_a_whole_run_the_newest_records_count_and_the_table_says_so(tmp_path):
    write_run(tmp_path, "first", 20)
    half(10, 1024, environment=environment(at=LATER)).save(tmp_path)  # nobody measured step 10 in a run
    (section,) = load(tmp_path).sections()
    assert section.ladder_run == ""
    assert "Measured in several runs, on 2 GPUs of one name: only ratios compare" in ladder(section, str).note


@pytest.mark.parametrize("spoilt", ["dirty", "failed", "another GPU"])
def test_a_run_that_is_not_sound_is_not_whole(tmp_path, spoilt):
    write_run(tmp_path, "first", 20)
    write_run(tmp_path, "second", 21, share=1.1)
    changes = {
        "dirty": {"environment": environment(at=LATER, run="second", uuid="GPU-second", dirty=True)},
        "failed": {"verification": replace(record().verification, passed=False)},
        "another GPU": {"environment": environment(at=LATER, run="second", uuid="GPU-0")},
    }[spoilt]
    path = tmp_path / "h200-steps.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:-1], replace(Record.from_json(lines[-1]), **changes).to_json()]) + "\n")
    (section,) = load(tmp_path).sections()
    assert section.ladder_run == "first"
    assert ratios_shown(tmp_path)[9, 1024] == pytest.approx(0.8)


def test_cells_of_the_ladder_hold_both_speeds_of_one_round(tmp_path):
    half(10, 4096).save(tmp_path)
    (section,) = load(tmp_path).sections()
    ((_, cell, *_),) = ladder(section, str).rows
    assert cell == "**1.03**<br><sub>1.030–1.030</sub><br>53.0 / 51.5"


def test_gains_are_told_apart_by_what_they_compare(tmp_path):
    for step in (8, 9, 10):
        half(step, 1024).save(tmp_path)
    half(10, 1024, 1.20, tile_choice="given", tile="192x256x64/64x256").save(tmp_path)
    (section,) = load(tmp_path).sections()
    table = ladder(section, str)
    assert table.header[-2:] == ("gain, same tile", "gain, fastest")
    first, same, other = (row[-2:] for row in table.rows)
    assert first == ("–", "–")
    assert same == ("+50.0 %", "+60.0 %")  # as timed beside it; 0.80 over 0.50 of cuBLAS
    assert other == ("–", "+50.0 %")  # of another tile; 1.20 over 0.80


def test_gpus_stand_side_by_side_by_their_ratios(tmp_path):
    write_run(tmp_path, "here", 20)
    write_run(tmp_path, "there", 20, share=1.3)
    other = tmp_path / "h200-steps.jsonl"
    text = other.read_text().splitlines()
    there = [line.replace("NVIDIA H200", "NVIDIA H100 80GB HBM3") for line in text if '"there"' in line]
    other.write_text("\n".join([line for line in text if '"here"' in line]) + "\n")
    (tmp_path / "h100-80gb-hbm3-steps.jsonl").write_text("\n".join(there) + "\n")
    half(9, 1024, tile_choice="given", tile="128x128x32/32x32").save(tmp_path)  # more records of the H200
    readme = published(tmp_path).documents[0].read_text()
    beside = readme.split("### GPUs side by side")[1].split("###")[0]
    assert "| 9 async ring | 0.80 · **1.04** | 0.72 · 0.94 |" in beside
    assert "NVIDIA H200 · NVIDIA H100 80GB HBM3" in beside
    assert "NVIDIA H200: one run, here, on GPU-here" in beside
    assert readme.index("### NVIDIA H200, float16") < readme.index("<summary>NVIDIA H100 80GB HBM3, float16")
    assert sorted(path.name for path in (tmp_path / "plots").glob("*.png")) == ["h200-float16-nn-ratio.png"]


def test_the_fastest_configuration_is_of_any_choice_but_never_unverified(tmp_path):
    half(10, 4096).save(tmp_path)
    half(10, 4096, 1.10, tile_choice="given", tile="192x256x64/64x256").save(tmp_path)
    wrong = half(10, 4096, 1.30, tile_choice="tuned")
    replace(wrong, verification=replace(wrong.verification, passed=False)).save(tmp_path)
    (section,) = load(tmp_path).sections()
    assert section.shown_choices == ["default", "fastest"]
    assert section.fastest(10, (4096, 4096, 4096)).tile == "192x256x64/64x256"


def test_shapes_without_a_place_on_the_axis_stand_in_a_table_of_their_own(ladders):
    section = next(section for section in load(ladders.results).sections() if section.dtype == "float16")
    assert section.sizes() == [(size,) * 3 for size in SIZES]
    table = other_shapes(section)
    assert table.header == ("m × n × k", "step 8", "step 9", "step 10", "triton", "fastest step / cuBLAS, TFLOPS")
    assert [row[0] for row in table.rows] == ["4095³", "4096x4096x14336"]
    assert table.rows[0][3] == "**1.03**<br><sub>1.030–1.030</sub>"
    assert table.rows[0][-1] == "53.0 / 51.5"
    text = ladders.documents[0].read_text()
    assert text.count("**Other shapes**") == 1
    ladder = text.split("### NVIDIA H200, float16")[1].split("\n\n")[2].splitlines()
    assert ladder[0] == "| step | 256³ | 512³ | 1024³ | 2048³ | 4096³ | gain, same tile | gain, fastest |"
    assert len(ladder) == 5  # the head, its rule and three steps


def test_the_first_step_of_a_dtype_has_none_before_it_and_the_next_must(tmp_path):
    assert not [kind for kind in record_problems(half(8), first_step=8) if "step before" in kind]
    for made in (half(8), half(9, previous=None)):
        made.save(tmp_path)
    (finding,) = [finding for finding in findings(Paths.of(tmp_path)) if "the step before" in finding]
    assert "h200-steps.jsonl:2" in finding


def test_a_variant_of_another_arithmetic_stands_for_its_step(ladders):
    section = next(section for section in load(ladders.results).sections() if section.math == "tf32")
    assert section.pick(9, "default", (1024, 1024, 1024)).variant == "tf32"
    assert "<details><summary>NVIDIA H200, float32 (tf32), B[K,N]</summary>" in ladders.documents[0].read_text()


def test_an_earlier_step_may_leave_out_sizes_but_a_later_one_may_not(tmp_path):
    half(9, 1024).save(tmp_path)
    for size in (1024, 4096):
        half(10, size).save(tmp_path)
    assert not any("not measured at" in finding for finding in findings(Paths.of(tmp_path)))
    half(9, 512).save(tmp_path)
    assert any("step 10, default tile: not measured at 512" in finding for finding in findings(Paths.of(tmp_path)))


def test_every_step_keeps_its_colour_and_the_roofline_needs_a_peak(ladders, monkeypatch):
    known = {gpu: {**rates, "peak_gflops": {"float32 ieee": 1e5}} for gpu, rates in peaks().items()}
    monkeypatch.setattr("tensorir_ladder.reports.plot.peaks", lambda: known)
    kinds = {(item.section.arithmetic, item.kind) for item in plots(load(ladders.results))}
    assert ("float32 ieee", "roofline") in kinds
    assert ("float16 ieee", "roofline") not in kinds
    assert {("float16 ieee", "gflops"), ("float16 ieee", "ratio"), ("float16 ieee", "gain")} < kinds
    looks = [tuple(step_look(step).values()) for step in range(1, 8)]
    assert len(set(looks)) == 7


def test_every_axis_of_speeds_has_two_marks_in_sight():
    """Those of a roofline or of speeds alone, however narrow their range."""
    committed = load(RESULTS)
    drawn = [item for item in plots(committed) if item.kind in ("gflops", "roofline")]
    assert len(drawn) >= 6
    for item in drawn:
        for axes in item.draw().axes:
            low, high = axes.get_ylim()
            assert sum(low <= mark <= high for mark in axes.get_yticks()) >= 2, item.section.title


def test_bars_of_several_tiles_name_theirs(tmp_path):
    for step in (4, 5):
        for size in (512, 1024):
            record(step, size).save(tmp_path)
    for shape, tile in ((512, "32x64x16/4x4"), (1024, "64x64x32/8x4")):
        for step, variant in ((4, "default"), (5, "async")):
            replace(counted(step, variant, 1.0, shape=shape), tile=tile).save(tmp_path)
    (stalls,) = (item for item in plots(load(tmp_path)) if item.kind == "step5-stalls")
    labels = [label.get_text().rpartition(", ")[0] for label in stalls.draw().axes[0].get_yticklabels()]
    told = ["32x64x16/4x4", "32x64x16/4x4", "64x64x32/8x4", "64x64x32/8x4"]
    assert [label.rpartition("\n")[2] for label in labels] == told
    assert len(set(labels)) == 4


def drawn(folder, kind):
    (item,) = (item for item in plots(load(folder)) if item.kind == kind)
    return item.draw()


def caption(figure):
    return figure.legends[0].get_title().get_text().replace("\n", " ")


def test_captions_name_the_tiles_that_are_drawn_and_no_others(tmp_path):
    write_ladder(tmp_path)
    for size in SIZES:
        record(6, size, tile="128x128x8/8x8").save(tmp_path)
    assert "32x64x16/4x4 (steps 1–5); 128x128x8/8x8 (step 6)." in caption(drawn(tmp_path, "ratio"))
    assert "Default tile 32x64x16/4x4." in caption(drawn(tmp_path, "step5-variants"))
    assert "128x64x32/8x4" not in caption(drawn(tmp_path, "ratio"))  # the best tile, which is not named as a default


def test_variants_are_drawn_at_the_sizes_that_all_of_them_have(tmp_path):
    for size in SIZES:
        record(4, size).save(tmp_path)
        record(5, size).save(tmp_path)
    for size in (512, 1024):
        record(5, size, speed=9000, variant="sync", default_variant=False).save(tmp_path)
    figure = drawn(tmp_path, "step5-variants")
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["512", "1024"]
    assert len(figure.axes[0].patches) == 4


def test_gains_have_one_logarithmic_scale_and_every_mark_is_labelled(tmp_path):
    write_ladder(tmp_path)
    for kind in ("gain", "step5-variants"):
        for axes in drawn(tmp_path, kind).axes:
            assert axes.get_yscale() == "log"
            assert len(axes.yaxis.get_minorticklocs()) == 0
            assert len(axes.get_yticks()) >= 2
            places = zip(axes.get_yticks(), (label.get_text() for label in axes.get_yticklabels()))
            assert all(float(text) == pytest.approx(100 * (place - 1)) for place, text in places)


def test_no_marker_of_the_roofline_hides_another(tmp_path):
    write_ladder(tmp_path)
    axes = drawn(tmp_path, "roofline").axes[0]
    lines = [line for line in axes.get_lines() if line.get_linestyle() == "None"]
    filled = [line for line in lines if line.get_markerfacecolor() != "none"]
    places = [x for line in filled for x in line.get_xdata()]
    assert len(places) == len(set(places)) == 6 * len(SIZES)
    assert len(axes.xaxis.get_minorticklocs()) == 0


def test_an_idle_tensor_pipe_has_no_instructions_of_its_own(tmp_path):
    for step in (4, 5):
        record(step).save(tmp_path)
    pipe = {"tensor pipe busy, %": 0.0, "tensor pipe: warps' instructions (hmma)": 65536.0}
    for step, variant in ((4, "default"), (5, "async")):
        made = counted(step, variant, 1.0)
        replace(made, values=made.values | pipe).save(tmp_path)
    (table,) = counters_tables(load(tmp_path), 5, load(tmp_path).sections()[0])
    names = [row[0] for row in table.rows]
    assert "tensor pipe busy, %" in names
    assert not any("hmma" in name for name in names)


@pytest.mark.parametrize(
    ("steps", "text"), [([7], "step 7"), ([1, 2, 3], "steps 1–3"), ([3, 1], "steps 1, 3"), ([9, 8, 9], "steps 8–9")]
)
def test_steps_are_written_short(steps, text):
    assert steps_text(steps) == text
