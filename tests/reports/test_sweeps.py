"""Reports of stage sweeps: what is grouped, who is best, how the model is judged, and what the page says."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from support.reports_fixtures import TILE, environment, record, stream, swept, timing, write_sweeps
from tensorir_ladder.harness.records import DepthForecast, Record, StreamRecord, bad_lines
from tensorir_ladder.reports.__main__ import main
from tensorir_ladder.reports.advice import advice_table, fastest_products, reasons, size_class
from tensorir_ladder.reports.check import findings, record_problems, stream_problems
from tensorir_ladder.reports.judgement import (
    is_held_out,
    is_right,
    judgement_table,
    judgement_tables,
    setbacks,
    setbacks_table,
    spearman,
)
from tensorir_ladder.reports.paths import Paths
from tensorir_ladder.reports.plot import ladder_plots, stage_plots
from tensorir_ladder.reports.readme import BEGIN, END
from tensorir_ladder.reports.selection import Results, load
from tensorir_ladder.reports.stage_figures import (
    prediction_figure,
    speed_figure,
    stage_variants_figure,
    streams_figure,
    triton_sweep,
)
from tensorir_ladder.reports.sweep_tables import tradeoff_table
from tensorir_ladder.reports.sweeps import (
    StageSweep,
    StreamSweep,
    fewest_within_tie,
    stage_sweeps,
    stream_sweeps,
    unswept,
)

RECTANGLE = (512, 2048, 1024)


def sweeps_of(*groups: list[Record]) -> list[StageSweep]:
    """The stage sweeps of made-up records of one section."""
    results = Results(tuple(record for group in groups for record in group))
    return [sweep for section in results.sections() for sweep in stage_sweeps(section)]


def streams_of(*records: StreamRecord) -> list[StreamSweep]:
    return stream_sweeps(Results(streams=records))


def as_variant(records: list[Record], name: str) -> list[Record]:
    kernels = [f"{name} with {item.stages}" for item in records]
    return [replace(r, variant=name, default_variant=False, cubin_sha256=k) for r, k in zip(records, kernels)]


def unverified(item: Record) -> Record:
    return replace(item, verification=replace(item.verification, passed=False))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Paths:
    """Two steps of the ladder and sweeps, with all that is generated from them; who changes it works on a copy."""
    folder = tmp_path_factory.mktemp("swept")
    for step in (4, 5):
        record(step).save(folder)
    write_sweeps(folder)
    readme = folder / "README.md"
    readme.write_text(f"{BEGIN}\n{END}\n")
    for command in ("page", "readme"):
        assert main([command, "--results", str(folder), "--readme", str(readme)]) == 0
    return Paths.of(folder, readme)


# What a sweep is


def test_records_are_grouped_by_step_variant_tile_and_shape():
    other_tile = [replace(item, tile="32x32x16/4x4") for item in swept()]
    found = sweeps_of(swept(), swept(RECTANGLE), other_tile, as_variant(swept(), "one_barrier"))
    assert [(sweep.variant, sweep.tile, sweep.size) for sweep in found] == [
        ("async", "32x32x16/4x4", "1024"),
        ("async", TILE, "512x2048x1024"),
        ("async", TILE, "1024"),
        ("one_barrier", TILE, "1024"),
    ]
    assert [item.stages for item in found[0].records] == [1, 2, 3, 4, 5, 6]


def test_one_stage_count_or_a_tile_that_was_not_given_is_no_sweep():
    assert sweeps_of(swept(counts=(3,))) == []
    assert sweeps_of([replace(item, tile_choice="default") for item in swept()]) == []


def test_gpus_and_dtypes_never_share_a_sweep():
    assert len(sweeps_of(swept(), swept(environment=environment("NVIDIA A100")), swept(dtype="float16"))) == 3


def test_a_record_that_failed_its_check_is_never_the_best():
    (sweep,) = sweeps_of([unverified(item) if item.stages == 4 else item for item in swept()])
    assert sweep.best == 5
    assert 4 not in sweep.times_ms
    cells = {row[0]: row for row in tradeoff_table(sweep).rows}
    assert cells["4"][1] == "failed its check"
    assert "30,000" not in str(tradeoff_table(sweep).rows)


def test_a_sweep_whose_checks_all_failed_is_left_out():
    assert sweeps_of([unverified(item) for item in swept()]) == []


@pytest.mark.parametrize(
    ("times", "fewest"),
    [({1: 1.0}, 1), ({1: 1.0, 2: 0.995}, 1), ({1: 1.02, 2: 1.0}, 2), ({3: 1.0, 2: 1.005, 1: 1.5}, 2)],
)
def test_the_fewest_stages_win_a_tie(times, fewest):
    assert fewest_within_tie(times) == fewest


def test_the_model_is_asked_only_where_it_answered():
    (sweep,) = sweeps_of(swept())
    assert sweep.predicted_ms(6) == pytest.approx(sweep.forecast.time_ms[5])
    assert sweep.predicted_ms(7) is None
    assert [sweep.latency_hidden(stages) for stages in (1, 2, 4, 6)] == pytest.approx([0, 1 / 3, 1, 1])
    (bare,) = sweeps_of(swept(depth=None))
    assert (bare.predicted_ms(2), bare.latency_hidden(2), judgement_tables([bare])) == (None, None, [])


def test_the_newest_forecast_counts():
    old, new = swept(recommended=2, counts=(1, 2)), swept(recommended=3, counts=(3, 4))
    new = [replace(item, environment=environment(at="2026-11-22T10:00:00.000+00:00")) for item in new]
    (sweep,) = sweeps_of(old, new)
    assert sweep.forecast.recommended == 3


def test_swept_records_are_not_listed_among_other_configurations():
    single = swept(counts=(3,), tile="16x32x32/2x2")
    (section,) = Results((*swept(), *single)).sections()
    assert [item.tile for item in unswept(section, 5)] == ["16x32x32/2x2"]


# Trade-offs


def test_the_tradeoff_table_says_what_a_stage_brings_and_costs():
    (sweep,) = sweeps_of(swept())
    rows = tradeoff_table(sweep).rows
    assert rows[1][1:] == (
        "24,000",
        "67%",
        "22,430",
        "16,384",
        "64",
        "7",
        "44% (registers)",
        "2",
        "33%",
        "+8,192 B, −6 points",
        "",
    )
    assert rows[3][-1] == "best, recommended"
    assert rows[5][-2] == "–"


def test_a_recommendation_that_misses_is_marked_with_what_it_loses():
    (sweep,) = sweeps_of(swept(recommended=2))
    assert tradeoff_table(sweep).rows[1][-1] == "recommended, NOT within 2 % of the best (−20.0 %)"
    (near,) = sweeps_of(swept(recommended=5))
    assert tradeoff_table(near).rows[4][-1] == "recommended, within 2 % of the best (−0.5 %)"


def test_what_is_missing_is_left_out_not_invented():
    (sweep,) = sweeps_of(swept(depth=None, resources=None, code=None))
    assert tradeoff_table(sweep).rows[0][3:] == ("–",) * 8 + ("",)
    assert "No forecast" in tradeoff_table(sweep).note
    (gap,) = sweeps_of(swept(counts=(1, 3, 4)))
    assert [row[-2] for row in tradeoff_table(gap).rows] == ["–", "+8,192 B, −6 points", "–"]


def test_the_note_says_how_far_the_yardstick_moved():
    made = swept()
    slower = replace(made[0], baseline=tuple(timing(t.label, 1.03 * t.median_ms) for t in made[0].baseline))
    (sweep,) = sweeps_of([slower, *made[1:]])
    assert "moving by 3.0 % between" in tradeoff_table(sweep).note


def test_tritons_own_sweep_is_read_from_the_peers():
    (sweep,) = sweeps_of(swept())
    assert list(triton_sweep(sweep)) == [1, 2, 3, 4, 5]
    (bare,) = sweeps_of(swept(peers=()))
    assert triton_sweep(bare) == {}


# The model judged


@pytest.mark.parametrize(
    ("shape", "held_out"),
    [((768,) * 3, True), ((1536,) * 3, True), ((3072,) * 3, True), ((1024,) * 3, False), (RECTANGLE, True)],
)
def test_which_shapes_are_held_out(shape, held_out):
    (sweep,) = sweeps_of(swept(shape))
    assert is_held_out(sweep) is held_out
    half = replace(sweep, section=replace(sweep.section, dtype="float16"))
    assert not is_held_out(half)  # the model of these saw all that was swept


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ([1, 2, 3], [10, 20, 30], 1.0),
        ([1, 2, 3], [3, 2, 1], -1.0),
        ([1, 2, 3, 4, 5], [5, 6, 7, 8, 7], 0.8207826816681233),  # scipy.stats.spearmanr's documented example
        ([1, 1, 2], [1, 2, 2], 0.5),
        ([1.0], [1.0], None),
        ([], [], None),
        ([1, 1], [1, 2], None),
    ],
)
def test_rank_correlation(left, right, expected):
    assert spearman(list(zip(left, right))) == (None if expected is None else pytest.approx(expected))


def test_recommendations_are_judged_apart_for_held_out_shapes():
    right, wrong = swept(), swept((768, 768, 768), recommended=2)
    unknown = swept(RECTANGLE, recommended=6, counts=(1, 2, 3))
    found = sweeps_of(right, wrong, unknown)
    assert {sweep.size: is_right(sweep) for sweep in found} == {
        "768": False,
        "512x2048x1024": False,
        "1024": True,
    }
    table = judgement_table(found)
    assert table.header[3] == "always 4 stages"
    assert {row[0]: row[1:4] for row in table.rows} == {
        "development shapes": ("1", "1 of 1 (100%)", "1 of 1 (100%)"),
        "held-out shapes": ("2", "0 of 2 (0%)", "1 of 2 (50%)"),  # 4 stages are right at 768, not measured beyond
        "all": ("3", "1 of 3 (33%)", "2 of 3 (67%)"),
        "the steps' default variants": ("3", "1 of 3 (33%)", "2 of 3 (67%)"),
        f"5 async, {TILE}": ("3", "1 of 3 (33%)", "2 of 3 (67%)"),
    }
    assert table.rows[0][4:] == ("1.00", "1.00", "10.0 %")
    without = sweeps_of(swept((512, 512, 512), depth=None))
    assert judgement_tables([*found, *without])[0].rows == judgement_table(found).rows
    missed = {row[2]: row[3:] for row in judgement_tables(found)[1].rows}
    assert missed["768"] == ("2", "24,000", "4", "30,000", "20.0 %", "yes")
    assert missed["512x2048x1024"] == ("6", "not measured", "3", "27,900", "–", "yes")
    assert len(judgement_tables([sweep for sweep in found if is_right(sweep)])) == 1


def test_a_loss_of_two_percent_is_right_and_more_is_not():
    def lost(share: float) -> bool:
        made = swept(counts=(1, 4))
        own = replace(made[0], timing=timing("own", made[1].timing.median_ms / share))
        (sweep,) = sweeps_of([replace(item, depth=swept(recommended=1)[0].depth) for item in (own, made[1])])
        return is_right(sweep)

    assert lost(0.981)
    assert not lost(0.979)


def test_three_stages_slower_than_two_are_found_with_their_occupancy():
    found = sweeps_of(swept(curve="compute"), swept((512, 512, 512)))
    (sweep,) = setbacks(found)
    assert sweep.size == "1024"
    assert setbacks_table([sweep]).rows[0][5:] == (
        "−4.0 %",
        "16,384 → 24,576",
        "7 → 6",
        "44% (registers) → 38% (registers)",
    )


def test_a_setback_without_resources_is_shown_too():
    bare = [replace(item, resources=None) for item in swept(curve="compute")]
    assert setbacks_table(setbacks(sweeps_of(bare))).rows[0][-1] == "–"
    assert setbacks(sweeps_of(swept(), swept((512, 512, 512), counts=(1, 2)))) == []


# Advice


def staged(shares: dict[int, float], **changes: object) -> list[StreamRecord]:
    return [stream(stages=stages, share=share, **changes) for stages, share in shares.items()]


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        (
            [*staged({1: 0.8, 3: 0.93}), stream(variant="direct", share=0.955)],
            ("no staging at all", "96 % of the copy's rate, is +2.7 %", "occupancy: 75 %"),
        ),
        ([*staged({1: 0.5, 3: 0.6}), stream(variant="direct", share=0.6)], ("no staging at all", "60 %", "+0.0 %")),
        ([*staged({1: 0.895, 3: 0.9}), stream(variant="direct", share=0.5)], ("no pipeline", "0.6 %", "8 blocks")),
        (staged({2: 0.8, 3: 0.9}), ("not known",)),
        (staged({1: 0.6, 3: 0.9}), ("stages pay, +50.0 %", "then traffic")),
        (staged({1: 0.2, 3: 0.3}, bound="latency"), ("stages pay, +50.0 %", "neither traffic nor arithmetic")),
        (staged({1: 0.2, 3: 0.3}, bound="compute"), ("stages pay, +50.0 %", "then arithmetic")),
        (staged({1: 0.2, 3: 0.3}, bound="unknown"), ("stages pay, +50.0 %",)),
    ],
)
def test_each_reason_follows_from_figures(records, expected):
    told = reasons(streams_of(*records))
    assert told.startswith(expected[0])
    assert all(words in told for words in expected)


def test_a_direct_form_that_failed_its_check_is_no_reason():
    direct = stream(variant="direct", share=0.99)
    direct = replace(direct, verification=replace(direct.verification, passed=False))
    (sweep,) = streams_of(*staged({1: 0.6, 3: 0.9}), direct)
    assert sweep.direct is None
    assert reasons([sweep]).startswith("stages pay")


def test_advice_is_a_row_per_workload_and_class_and_names_sizes_whose_reason_differs():
    products = sweeps_of(swept((256, 256, 256)), swept((512, 512, 512), "flat"), swept((4096, 4096, 4096), "compute"))
    table = advice_table([*products, *streams_of(*staged({1: 0.6, 3: 0.9}))])
    assert [row[:2] for row in table.rows] == [
        ("matmul, step 5", "small"),
        ("matmul, step 5", "large"),
        ("gelu", "large"),
    ]
    small = table.rows[0]
    assert small[3] == "4<br>1"
    assert small[4] == "+81.8 %<br>+0.0 %"
    assert small[7].startswith("256: stages pay, +81.8 %")
    assert "<br>512: no pipeline: 1 stage is within 0.4 %" in small[7]
    assert table.rows[1][7].startswith("stages pay, +16.3 %; then arithmetic at its peak")


def test_a_product_is_shown_at_its_fastest():
    slow, fast = swept(), as_variant(swept(top=31000), "one_barrier")
    (sweep,) = fastest_products(sweeps_of(slow, fast))
    assert sweep.variant == "one_barrier"


@pytest.mark.parametrize(
    ("sweep", "name"),
    [
        (sweeps_of(swept((512, 512, 512)))[0], "small"),
        (sweeps_of(swept((1536, 1536, 1536)))[0], "medium"),
        (sweeps_of(swept((2048, 2048, 2048)))[0], "large"),
        (streams_of(stream(mib=15))[0], "small"),
        (streams_of(stream(mib=64))[0], "medium"),
        (streams_of(stream(mib=256))[0], "large"),
    ],
)
def test_size_classes(sweep, name):
    assert size_class(sweep) == name


# Figures


def test_every_figure_draws_what_there_is_and_no_more():
    bare = sweeps_of(swept(depth=None, peers=()), swept(RECTANGLE, depth=None, peers=(), counts=(2, 3)))
    full = sweeps_of(swept(), as_variant(swept(top=31000), "one_barrier"), swept((768, 768, 768)))
    assert labels(speed_figure(bare)) == {"cuBLAS", "measured"}
    assert labels(speed_figure(full)) == {
        "cuBLAS",
        "measured",
        "model",
        "recommended by the model",
        "Triton by num_stages",
    }
    assert labels(stage_variants_figure(full)) == {"cuBLAS", "async", "one_barrier"}
    assert "1 stage" in labels(prediction_figure(full))
    held_out = sweeps_of(swept((768, 768, 768)))
    assert "6 stages" in labels(prediction_figure(held_out))
    streams = streams_of(stream(), stream(stages=2), stream(variant="direct"), stream("scale_shift"))
    assert labels(streams_figure(streams)) == {
        "copy of as many bytes",
        "torch's operator",
        "direct, nothing staged",
        "staged",
    }
    assert labels(streams_figure(streams_of(stream("scale_shift")))) == {"copy of as many bytes", "staged"}


def labels(figure) -> set[str]:
    assert all(axes.get_ylabel() or not axes.get_subplotspec().is_first_col() for axes in figure.axes)
    return {text.get_text() for legend in figure.legends for text in legend.get_texts()}


def test_every_panel_reaches_as_deep_as_the_deepest_series():
    figure = speed_figure(sweeps_of(swept(counts=(1, 2, 3)), swept(RECTANGLE, counts=(1, 2), peers=())))
    assert [axes.get_xlim() for axes in figure.axes] == [(0.6, 5.4), (0.6, 5.4)]  # Triton's five
    assert speed_figure(sweeps_of(swept(counts=(2, 3), peers=()))).axes[0].get_xlim() == (0.6, 3.4)


def test_a_single_round_has_no_spread_to_draw():
    single = [replace(item, timing=timing("own", 1.0, rounds=1)) for item in swept()]
    speed_figure(sweeps_of(single))


# Page, README, check


def test_the_page_holds_everything(site):
    text = (site.pages / "stages.md").read_text()
    for heading in (
        "# How many stages?",
        "## Which workload wants how many stages, and why: NVIDIA H200",
        "## NVIDIA H200, float32 (ieee), B[K,N]",
        "## Memory-bound workloads: NVIDIA H200, float32",
    ):
        assert f"\n{heading}\n" in f"\n{text}"
    images = [part.split(")")[0] for part in text.split("](")[1:] if ".png" in part.split(")")[0]]
    assert sorted(Path(image).name for image in images) == sorted(p.file_name for p in stage_plots(load(site.results)))
    assert all((site.pages / image).is_file() for image in images)


def test_step_pages_lead_to_the_page_and_the_readme_sums_it_up(site):
    assert "[how many stages?](stages.md)" in (site.pages / "step5_pipelining.md").read_text()
    assert "stages.md" not in (site.pages / "step4_vectorization.md").read_text()
    readme = site.documents[0].read_text()
    assert "in 8 of 8 sweeps; always 2 stages, the best of one count for all, in 4 of 8." in readme
    assert "On shapes held out: 4 of 4, and 2 of 4. These set no constant of the model, but had been seen." in readme
    assert readme.count("-stages-") == 1  # one curve stands for all
    assert f"-step5-stages-async-{TILE.replace('/', '_')}.png" in readme


def test_a_new_sweep_makes_the_readme_and_its_curve_stale(site, tmp_path):
    assert findings(site) == []
    folder = tmp_path / "copy"
    shutil.copytree(site.results, folder)
    paths = Paths.of(folder, folder / "README.md")
    for item in (*swept(recommended=6), stream(mib=512)):
        replace(item, environment=environment(at="2026-11-23T10:00:00.000+00:00")).save(folder)
    text = "\n".join(findings(paths))
    slug = TILE.replace("/", "_")
    assert f"step5-stages-async-{slug}.png: stale" in text
    assert "README.md: results are stale" in text
    assert "ratio.png" not in text, "a sweep must not make the ladder's pictures stale"
    figures = {plot.kind: plot.is_current(paths.figures) for plot in stage_plots(load(folder))}
    assert [kind for kind, current in figures.items() if current] == [f"step5-stages-one_barrier-{slug}"]


def test_without_sweeps_there_is_no_page_and_no_curve(tmp_path):
    record(4).save(tmp_path)
    readme = tmp_path / "README.md"
    readme.write_text(f"{BEGIN}\n{END}\n")
    for command in ("page", "readme", "check"):
        assert main([command, "--results", str(tmp_path), "--readme", str(readme)]) == 0
    assert not (Paths.of(tmp_path).pages / "stages.md").exists()
    assert "stages" not in readme.read_text()


@pytest.mark.parametrize("part", ["products", "streams", "without a forecast"])
def test_either_kind_alone_makes_a_page(tmp_path, part):
    made = {"products": swept(), "streams": [stream()], "without a forecast": swept(depth=None, peers=())}[part]
    for item in made:
        item.save(tmp_path)
    readme = tmp_path / "README.md"
    readme.write_text(f"{BEGIN}\n{END}\n")
    for command in ("page", "readme", "table") if part != "streams" else ("page", "readme"):
        more = [] if command == "table" else ["--readme", str(readme)]
        assert main([command, "--results", str(tmp_path), *more]) == 0
    text = (Paths.of(tmp_path).pages / "stages.md").read_text()
    assert ("The depth model's recommendation" in text) == (part == "products")
    assert ("Memory-bound" in text) == (part == "streams")
    assert "How many stages?" in readme.read_text()


def test_an_empty_folder_gives_nothing_and_says_so(tmp_path, capsys):
    assert main(["page", "--results", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err
    assert main(["sweep", "--json", "--results", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out) == []
    assert main(["sweep", "--results", str(tmp_path)]) == 2
    assert "no stage sweep" in capsys.readouterr().err
    assert not Paths.of(tmp_path).pages.exists()


# The command


def test_the_command_prints_tradeoffs_and_judgement(site, capsys):
    arguments = ["sweep", "--results", str(site.results), "--step", "5", "--tile", TILE, "--size", "1024,512x2048x1024"]
    assert main([*arguments, "--markdown"]) == 0
    text = capsys.readouterr().out
    assert text.count("### NVIDIA H200") == 4
    assert "### The depth model judged" in text
    assert "### Three stages slower than two" in text
    assert "4096" not in text
    assert main(arguments) == 0
    assert "recommended" in capsys.readouterr().out


def test_json_has_a_row_per_record(site, capsys):
    assert main(["sweep", "--results", str(site.results), "--size", "768", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 12
    best = next(row for row in rows if row["variant"] == "async" and row["best"])
    assert (best["stages"], best["recommended"], best["held_out"]) == (4, True, True)
    assert best["predicted_gflops"] == pytest.approx(15000 / 1.11)


@pytest.mark.parametrize(
    ("option", "known"), [(("--size", "1000"), "768"), (("--tile", "8x8x8/1x1"), TILE), (("--step", "x"), "1-6")]
)
def test_a_case_that_was_not_swept_is_refused_with_those_that_were(site, capsys, option, known):
    assert main(["sweep", "--results", str(site.results), *option]) == 2
    err = capsys.readouterr().err
    assert option[1] in err
    assert known in err


def test_a_tile_and_a_size_that_were_swept_apart_only_are_refused(tmp_path, capsys):
    for item in (*swept(), *swept((512, 512, 512), tile="32x64x16/4x4")):
        item.save(tmp_path)
    assert main(["sweep", "--results", str(tmp_path), "--tile", TILE, "--size", "512"]) == 2
    assert "that tile was swept at 1024" in capsys.readouterr().err


def test_tables_say_that_there_are_sweeps(tmp_path, capsys):
    for item in swept():
        item.save(tmp_path)
    assert main(["table", "--results", str(tmp_path)]) == 0
    assert "1 stage sweeps are not among these: ladder stages" in capsys.readouterr().out


# Files that cannot be used


@pytest.mark.sampled(3)
@pytest.mark.parametrize("command", ["sweep", "page", "plot", "check"])
@pytest.mark.parametrize("text", ["{}", '{"schema": 1}', "[]"])
def test_a_corrupt_stream_line_is_named(tmp_path, caplog, command, text):
    for item in swept():
        item.save(tmp_path)
    (tmp_path / "h200-streams.jsonl").write_text(text)
    assert main([command, "--results", str(tmp_path)]) == (5 if command == "check" else 0)
    assert caplog.text.count("h200-streams.jsonl:1") == 1


@pytest.mark.parametrize(
    ("forecast", "what"),
    [
        (DepthForecast((), (), (), 1, 1, 1), "$.depth.time_ms"),
        (DepthForecast((1.0, float("nan")), (0.5, 0.5), (0.0, 1.0), 1, 2, 1), "$.depth.time_ms"),
        (DepthForecast((1.0,), (0.5,), (1.0,), 0, 1, 1), "$.depth.fewest"),
        (DepthForecast((1.0,), (0.5,), (1.0,), 1, 1, 0), "$.depth.recommended"),
    ],
)
def test_a_forecast_that_is_none_is_left_out(tmp_path, forecast, what):
    (tmp_path / "h200-steps.jsonl").write_text("".join(f"{item.to_json()}\n" for item in swept(depth=forecast)))
    assert load(tmp_path).records == ()
    assert all(f"h200-steps.jsonl:{line} " in bad and what in bad for line, bad in enumerate(bad_lines(tmp_path), 1))
    assert len(bad_lines(tmp_path)) == 6


def test_times_of_streams_that_are_none_are_left_out(tmp_path):
    made = stream(copy=replace(timing("copy", 1.0), samples_ms=(0.0,) * 9))
    (tmp_path / "h200-streams.jsonl").write_text(made.to_json())
    assert load(tmp_path).streams == ()
    (bad,) = bad_lines(tmp_path)
    assert "$.copy.samples_ms" in bad


def test_a_stream_record_that_is_no_evidence_is_found():
    assert list(stream_problems(stream())) == []
    method = stream().method
    for changes, finding in (
        ({"method": replace(method, rounds=5)}, "5 rounds; at least 7"),
        ({"method": replace(method, rounds=11)}, "9 samples in 11 rounds"),
        ({"environment": environment(dirty=True)}, "uncommitted"),
        ({"verification": replace(stream().verification, passed=False)}, "not verified"),
    ):
        assert any(finding in problem for problem in stream_problems(stream(**changes))), finding


def test_a_peer_whose_status_and_time_disagree_is_found():
    measured, missing = swept()[0].peers[0], swept()[0].peers[-1]
    for peer in (replace(measured, timing=None), replace(missing, timing=measured.timing)):
        assert any(f"peer {peer.name}" in problem for problem in record_problems(record(5, peers=(peer,))))
    assert list(record_problems(record(5, peers=(measured, missing)))) == []


def test_sweeps_leave_the_ladders_pictures_alone(site):
    names = {item.file_name for item in ladder_plots(load(site.results))}
    assert not any("stages" in name for name in names)


def test_the_sweep_command_draws_what_it_prints(tmp_path, capsys):
    write_sweeps(tmp_path)
    assert main(["sweep", "--results", str(tmp_path), "--tile", TILE]) == 0
    names = capsys.readouterr().out.split("recommendation:\n", 1)[1].split()
    assert names
    assert all(Path(name).is_file() and "stages" in name for name in names)
