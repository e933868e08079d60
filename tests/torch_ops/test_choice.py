"""What the call chooses: what was measured first, then the best of the menu; and the menu's file."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import tvm

from support.cases import hopper
from support.roles import roles
from tensorir_ladder.kernels.codegen.host_code import launch_plan
from tensorir_ladder.kernels.codegen.lowering import generate
from tensorir_ladder.kernels.fused_epilogue import PLAIN
from tensorir_ladder.kernels.persistent import cluster_blocks
from tensorir_ladder.kernels.stream_k import plan_for
from tensorir_ladder.kernels.tiles import most_stages
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.torch_ops import menu as menu_files
from tensorir_ladder.torch_ops.choice import choose
from tensorir_ladder.torch_ops.errors import DamagedFile
from tensorir_ladder.torch_ops.menu import Fastest, Kernels, Menu, Sizes, microseconds, read_menu
from tensorir_ladder.torch_ops.operands import Form, arrange
from tensorir_ladder.torch_ops.prepared import choose_for
from tensorir_ladder.torch_ops.problem import Conditions, KernelChoice
from tensorir_ladder.torch_ops.step_kernels import (
    EXCHANGED,
    FLEXIBLE,
    UPRIGHT,
    blocks_at_once,
    name_kernel,
    parse_kernel,
    with_stages,
)

H200 = hopper(name="NVIDIA H200")
FILE = read_menu("NVIDIA H200")


def us_of(name: str, problem: Matmul, rows: tuple[int, int] | None = None) -> float:
    """The formula's microseconds by one kernel."""
    sizes = Sizes.of(problem, rows)
    return float(microseconds(Kernels.of([parse_kernel(name)], 132, sizes.nt), sizes, FILE.constants, 132)[0])


def test_what_was_measured_of_this_very_shape_decides() -> None:
    """Also for rows by the eight, which take the same kernel as long; not where rows have gaps."""
    problem, kernel = Matmul(1001, 1000, 1000, "float16"), FILE.kernels.index("upright 64x64x64/1x1/1x1")
    file = msgspec.structs.replace(FILE, fastest=(Fastest(1008, 1000, 1000, "nn", kernel, 3.0),))
    found = Menu(file, H200.target, 132, "NVIDIA H200").fastest(problem)
    assert found is not None
    assert (name_kernel(found[0]), found[1]) == ("upright 64x64x64/1x1/1x1", 3.0)
    assert Menu(file, H200.target, 132, "NVIDIA H100").fastest(problem) is None, "another GPU's"
    assert Menu(file, H200.target, 132, "NVIDIA H200").fastest(replace(problem, layout="nt")) is None


def test_every_measured_shape_takes_its_fastest_kernel() -> None:
    for shape in FILE.fastest[::200]:
        chosen = choose(Matmul(shape.m, shape.n, shape.k, "float16", shape.layout), H200, Conditions(dense=True))
        assert name_kernel(chosen) == FILE.kernels[shape.kernel]


def test_rows_with_gaps_are_chosen_for_by_estimates() -> None:
    shape = FILE.fastest[0]
    problem = Matmul(shape.m, shape.n, shape.k, "float16", shape.layout)
    menu = Menu(FILE, H200.target, 132, "NVIDIA H200")
    rows = (problem.k + 64, Sizes.of(problem).b_row + 64)
    chosen = choose(problem, H200, Conditions(rows=rows))
    times = menu.times(problem, rows=rows, able=~menu.streamed)
    able = (place for place in times.argsort() if menu.kernels[place].takes(problem, H200))
    assert name_kernel(chosen) == name_kernel(menu.kernels[next(able)])


def test_the_trees_put_the_first_of_the_formula_in_order() -> None:
    menu, problem = Menu(FILE, H200.target, 132), Matmul(1000, 1016, 1032, "float16")
    sizes = Sizes.of(problem)
    formula = microseconds(Kernels.of(menu.kernels, 132, False), sizes, FILE.constants, 132)
    times = menu.times(problem)
    first = formula.argsort()[: menu_files.CORRECTED]
    assert {*times.argsort()[: len(first) - 1].tolist()} <= {*first.tolist()}
    assert (times[first] != formula[first]).all()
    assert times.argsort()[:8].tolist() != formula.argsort()[:8].tolist()


def test_only_kernels_that_can_be_built_are_chosen() -> None:
    """A cut only where the plan has helpers, a cluster only where its blocks can share their B tile."""
    draw, seen = random.Random(0), set()
    for _ in range(200):
        m, n, k = (8 * round(math.exp(draw.uniform(0, math.log(1024)))) for _ in range(3))
        problem = Matmul(m, n, k, "float16", draw.choice(("nn", "nt")))
        chosen = choose(problem, H200)
        kernel = chosen.kernel
        seen.add((kernel.step, kernel.cuts, kernel.blocks, kernel is EXCHANGED, chosen.tile.shared_by > 1))
        assert not chosen.tile.misfits()
        assert not chosen.tile.violations(H200.target, 2, chosen.stages)
        if kernel.cuts:
            assert plan_for(problem, chosen.tile, H200, kernel.blocks).helpers
        if kernel.blocks > 1:
            assert cluster_blocks(problem, chosen.tile, True) == kernel.blocks
    assert len(seen) >= 6, "drawn shapes are taken by kernels of all kinds"


def test_every_name_of_a_file_is_read_and_written_back() -> None:
    for gpu in ("NVIDIA H200", "NVIDIA H100 80GB HBM3"):
        assert [name_kernel(parse_kernel(name)) for name in read_menu(gpu).kernels] == [*read_menu(gpu).kernels]
    assert {*FLEXIBLE} <= {*FILE.kernels[: FILE.menu]}


@pytest.mark.parametrize(
    "name",
    [
        "step 11, 128x128x64/2x1, 6 stages",
        "step 12, 128x128x64/2x1, 6 stages, launched early, whole tiles",
        "step 13, 128x128x64/2x1, 6 stages",
        "step 13, 128x128x64/2x1, 6 stages, launched early, whole tiles, clusters of 4",
        "exchanged 16x64x64",
        "rows 16x64x64/1x1/1",
        "upright 64x88x64/1x1/1x1/7, 3 stages",
        "",
    ],
)
def test_names_of_other_kernels_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"names no kernel|malformed tile"):
        parse_kernel(name)


def test_kernels_of_one_tile_have_the_stages_that_fit() -> None:
    """Fewer where a multiprocessor holds two blocks of exchanged operands."""
    choice = parse_kernel("exchanged 64x64x64/1x1/1")
    few, many = (with_stages(choice, Matmul(side, side, 4096, "float16"), 132) for side in (64, 4096))
    assert few.stages == most_stages(choice.tile, 8)
    assert many.stages == most_stages(choice.tile, 8, blocks=2) <= few.stages
    named = parse_kernel(FLEXIBLE[0])
    assert with_stages(named, Matmul(64, 64, 64, "float16"), 132) == named


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        ((40, 264, 520), "exchanged 16x64x64/1x1/1/2x4"),
        ((13, 72, 520), "exchanged 16x64x64/1x1/3"),
        ((70, 264, 520), "upright 64x88x64/1x1/1x1/5"),
    ],
    ids=str,
)
def test_blocks_are_counted_as_they_are_launched(shape: tuple[int, int, int], name: str) -> None:
    """Clusters are whole, also where the output ends within one."""
    kernels = Kernels.of([parse_kernel(name)], 132, nt=True)
    kernel = roles(12, shape, name.split()[1], layout="nt", stages=3)
    assert (kernels.tiles(*shape[:2]) * kernels.cluster).tolist() == [kernel.blocks]
    assert kernels.cluster.tolist() == [kernel.launch["clusterCtaIdx.x"]]


@pytest.mark.parametrize(("cluster", "blocks"), [(1, 132), (2, 132), (4, 120), (8, 120), (3, 111)])
def test_clusters_lie_within_groups_of_multiprocessors(cluster: int, blocks: int) -> None:
    assert blocks_at_once(cluster, 132) == blocks


WIDE = "step 13, 128x256x64/2x1, 4 stages, launched early, whole tiles"


def test_an_early_launch_saves_a_wait() -> None:
    problem = Matmul(1024, 2048, 4096, "float16")
    assert us_of("step 12, 128x256x64/2x1, 4 stages", problem) - us_of(WIDE, problem) == pytest.approx(
        FILE.constants.waits
    )


def test_ragged_rows_take_longer_and_rows_with_gaps_what_their_distances_do() -> None:
    name = "step 12, 128x128x64/2x1, 6 stages"
    ragged, whole = (us_of(name, Matmul(4096, n, 4096, "float16")) for n in (4088, 4096))
    assert ragged > whole
    short = Matmul(4096, 4096, 4088, "float16", "nt")
    assert us_of(name, short, (4096, 4096)) < us_of(name, short)


def test_a_width_of_no_whole_panels_costs_more_where_b_is_stored_by_rows() -> None:
    """As a cluster cannot share less than whole panels."""
    odd, even = (f"step 13, 128x{columns}x64/2x1, 4 stages, launched early, whole tiles" for columns in (216, 256))
    nn, nt = (
        us_of(odd, problem) / us_of(even, problem)
        for problem in (Matmul(4096, 4096, 4096, "float16", layout) for layout in ("nn", "nt"))
    )
    assert nn > nt
    pairs = "step 13, 64x64x64/1x1, 8 stages, launched early, whole tiles, clusters of 2"
    by_rows, transposed = (us_of(pairs, Matmul(4096, 4096, 4096, "float16", layout)) for layout in ("nn", "nt"))
    assert math.isinf(by_rows)
    assert math.isfinite(transposed)


def test_a_reduction_too_short_for_its_parts_is_not_priced() -> None:
    name = "exchanged 16x64x64/1x1/4"
    assert math.isinf(us_of(name, Matmul(16, 1024, 1016, "float16", "nt")))
    assert math.isfinite(us_of(name, Matmul(16, 1024, 1024, "float16", "nt")))


def test_a_long_reduction_of_few_tiles_goes_in_parts_with_its_operands_as_they_are() -> None:
    """88 columns are an instruction's as they are, and 128 of exchanged operands."""
    problem = Matmul(872, 88, 6704, "float16", "nt")
    taken = choose(problem, H200)
    assert taken.kernel is UPRIGHT
    assert taken.tile.parts > 4
    assert choose(problem, H200, Conditions(batch=2)).tile.parts > 1
    for whole in (Conditions(batch=16), Conditions(any_rows=True)):
        assert choose(problem, H200, whole).tile.parts == 1


@pytest.mark.parametrize(("shape", "layout"), [((872, 88, 6704), "nn"), ((16, 1024, 4096), "nt")], ids=str)
def test_outputs_with_gaps_between_rows_are_stored_in_place(shape: tuple[int, int, int], layout: str) -> None:
    """TMA steps over gaps; results of parts would be copied, which leave by plain addresses."""
    m, n, k = shape
    b = Form("b", (k, n), (n, 1) if layout == "nn" else (1, k), "float16")
    operands = arrange(Form("a", (m, k), (k, 1), "float16"), b, "float16")
    for row, in_parts in ((n, True), (2 * n, False)):
        out = Form("out", (m, n), (row, 1), "float16").rows()
        choice, problem, setting = choose_for(operands, PLAIN, False, H200, out)
        assert (choice.tile.parts > 1) == in_parts
        made = generate(tvm.IRModule({"main": choice.build(problem, setting)}), H200.target, "tirx")
        assert operands.output(launch_plan(made), out) is out


def test_few_rows_exchange_the_operands() -> None:
    """Weights fill the instruction's rows; where they are few, the reduction goes in parts."""
    few, fewer = (Matmul(16, n, 4096, "float16", "nt") for n in (14336, 1024))
    taken, split = choose(few, H200), choose(fewer, H200)
    assert taken.kernel is split.kernel is EXCHANGED
    assert taken.tile.block_m in (8, 16)
    assert taken.tile.parts == 1
    assert split.tile.parts > 1
    assert "launched early" in str(taken)
    batch = choose(fewer, H200, Conditions(batch=16))
    assert batch.kernel is EXCHANGED
    assert batch.tile.parts == 1, "a batch's tiles fill the GPU"
    assert str(choose(few, H200, Conditions(any_rows=True))) in FLEXIBLE


def test_kernels_are_chosen_by_the_rows_that_they_read() -> None:
    """Those of copies begin whole cache lines apart; those of operands that TMA reads lie where they are."""

    def matrix(name: str, rows: int, columns: int, apart: int = 0) -> Form:
        return Form(name, (rows, columns), (apart or columns, 1), "float16")

    copied = arrange(matrix("a", 100, 1001), matrix("b", 1001, 600), "float16")
    assert copied.steps == (1024, 600)
    sliced = arrange(matrix("a", 100, 1000, 1088), matrix("b", 1000, 600, 4096), "float16")
    assert sliced.steps == (1088, 4096)


def test_a_gpu_without_a_file_has_the_modelled_one_s_menu_and_not_its_measured_shapes() -> None:
    assert read_menu("NVIDIA Other").gpu == "NVIDIA H200"
    assert read_menu("NVIDIA H100 80GB HBM3").constants != FILE.constants, "an H100 was measured"
    other, shape = replace(H200, name="NVIDIA Other"), FILE.fastest[7]
    problem = Matmul(shape.m, shape.n, shape.k, "float16", shape.layout)
    assert isinstance(choose(problem, other), KernelChoice)
    for each in (Matmul(640, 480, 320, "float16"), Matmul(2048, 2048, 2048, "float16")):
        assert choose(each, other, Conditions(2)) == choose(each, H200, Conditions(2)), (
            "nothing was measured of batches"
        )


def test_what_was_chosen_is_not_thought_about_again(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Matmul(1208, 1336, 1464, "float16")
    chosen = choose(problem, H200)
    monkeypatch.setattr(Menu, "times", None)
    assert choose(problem, H200) is chosen


@pytest.mark.parametrize(
    "change",
    [
        {"constants": {"launch": -1.0}},
        {"menu": 0},
        {"menu": 10**6},
        {"fastest": [[8, 8, 8, "nn", 10**6, 1.0]]},
        {"fastest": [[8, 8, 8, "tn", 0, 1.0]]},
        {"fastest": [[8, 8, 8, "nn", 0, -1.0]]},
        {"trees": {"features": [], "asks": [0], "at": [0.0]}},
        {"more": 1},
    ],
    ids=str,
)
def test_a_damaged_menu_is_named(change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = json.loads(menu_files.path_of("NVIDIA H200").read_text())
    path = tmp_path / "nvidia-h200.json"
    path.write_text(json.dumps(whole | change))
    monkeypatch.setattr(menu_files, "COSTS", tmp_path)
    for gpu in ("NVIDIA H200", "NVIDIA Other"):
        with pytest.raises(DamagedFile, match=r"nvidia-h200\.json is damaged"):
            read_menu(gpu)
    path.unlink()
    with pytest.raises(DamagedFile, match=r"nvidia-h200\.json"):
        read_menu("NVIDIA H200")


def test_estimates_of_all_kernels_are_times() -> None:
    menu = Menu(FILE, H200.target, 132)
    for problem in (Matmul(8, 8, 8, "float16"), Matmul(4096, 4096, 4096, "float16", "nt")):
        times = menu.times(problem)
        assert (times[np.isfinite(times)] > 0).all()
        assert np.isfinite(times).sum() > 20


def test_tiles_of_all_products_of_a_batch_are_counted() -> None:
    """Stages, persistent blocks and the cut of a last wave are those of the batch, not those of one product."""
    menu, problem = Menu(FILE, H200.target, 132), Matmul(256, 256, 4096, "float16", "nt")
    one, many = (menu.times(problem, batch) for batch in (1, 64))
    assert (many[np.isfinite(many)] > np.nanmin(one)).all()
    exchanged = parse_kernel("exchanged 64x64x64/1x1/1")
    assert menu.built(exchanged, problem).stages > menu.built(exchanged, problem, 64).stages
    cut = parse_kernel("step 13, 128x256x64/2x1, 4 stages, launched early, last wave cut")
    assert [cut.takes(Matmul(1408, 1536, 8192, "float16"), H200, batch) for batch in (1, 2)] == [True, False]
    assert choose(Matmul(4096, 4096, 512, "float16"), H200, Conditions(batch=4)).kernel.stays
