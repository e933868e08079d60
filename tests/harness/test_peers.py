"""Peers: which there are, what happens to one that is missing or wrong, and the kernels of ours among them."""

from __future__ import annotations

import importlib.util
import itertools
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tvm import IRModule, tirx
from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms

from support.cases import ROOT, Outcome
from tensorir_ladder.harness.build import compile_module
from tensorir_ladder.harness.cublas import Arena
from tensorir_ladder.harness.execution import GpuBackend, LlvmBackend, gpu_machine
from tensorir_ladder.harness.machines import machine_for
from tensorir_ladder.harness.peers import (
    KINDS,
    Entrant,
    PeerFailed,
    PeerKind,
    PeerMissing,
    UnknownPeer,
    admit,
    dlight,
    find_peers,
    metaschedule,
    metaschedule_space,
    peer_versions,
    triton_tma,
)
from tensorir_ladder.harness.peers import triton as triton_peer
from tensorir_ladder.harness.peers.triton import STAGE_COUNTS, BlockConfig, Tuning, declared_configs, launch
from tensorir_ladder.kernels.codegen.toolchain import compile_cubin
from tensorir_ladder.schedules.inspection import loops_of
from tensorir_ladder.schedules.workloads import Matmul

MACHINE = machine_for("sm_90a")
PROBLEM = Matmul(33, 17, 50)


class BareArena:
    """Operands and a capture that can fail; numpy in the place of a GPU."""

    def __init__(self, problem: Matmul = PROBLEM, capture: Any = lambda run: None) -> None:
        self.problem, self.backend, self.graph = problem, LlvmBackend(), capture
        self.sets = [(None, None, None)]

    def product(self, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
        with np.errstate(invalid="ignore"):
            c[...] = self.backend.reference(self.problem, a, b).astype(c.dtype)


def kind(enter: Any, *peers: str) -> PeerKind:
    """A made-up kind of peers."""
    return PeerKind("made-up", "a fake", peers or ("made-up",), enter)


def raising(error: Exception) -> Any:
    """Something that fails when it is called."""

    def fail(*_arguments: Any) -> None:
        raise error

    return fail


# The registry


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ("none", []),
        ("all", ["triton", "triton_tma", "dlight"]),
        ("dlight, triton", ["triton", "dlight"]),
        ("none,dlight", ["dlight"]),
        ("triton,triton-stages", ["triton-stages"]),
        ("triton_tma,triton", ["triton", "triton_tma"]),
        ("metaschedule,dlight", ["dlight", "metaschedule"]),
        ("all,triton-stages", ["triton-stages", "triton_tma", "dlight"]),
    ],
)
def test_peers_are_found_by_name(names: str, found: list[str]) -> None:
    assert [kind.name for kind in find_peers(names)] == found


@pytest.mark.parametrize("names", ["cutlass", "triton,cutlass", "", "triton,"])
def test_an_unknown_peer_is_refused(names: str) -> None:
    known = "triton, triton-stages, triton_tma, dlight, metaschedule, metaschedule-space, call"
    with pytest.raises(UnknownPeer, match=f"there are {known}, or all, or none"):
        find_peers(names)


def test_no_peer_goes_by_two_names() -> None:
    names = [name for kind in find_peers("all,triton-stages") for name in kind.peers]
    assert len(names) == len(set(names))
    assert KINDS["triton-stages"].peers[1:3] == ("triton-1stage", "triton-2stages")


# Missing and failing


def test_a_right_peer_is_admitted_after_a_capture() -> None:
    captured = []
    arena = BareArena(capture=captured.append)
    (entrant,) = admit(kind(lambda a, _m: [Entrant("made-up", a.product, "8x8")]), arena, MACHINE)
    assert (entrant.status, entrant.config, entrant.run) == ("measured", "8x8", arena.product)
    assert captured == [arena.product]


@pytest.mark.parametrize(
    ("error", "status", "why"),
    [
        (PeerMissing("made-up is not installed"), "missing", "made-up is not installed"),
        (PeerFailed("takes no float32"), "failed", "takes no float32"),
        (KeyError("sm_90a"), "failed", "KeyError: 'sm_90a'"),
        (RuntimeError("\n first line\n second"), "failed", "RuntimeError: first line"),
        (RuntimeError("Traceback (most recent call last):\n  File 1\nno kernel"), "failed", "RuntimeError: no kernel"),
        (ValueError(), "failed", "ValueError: no message"),
    ],
)
def test_a_kind_that_cannot_enter_says_why_for_each_of_its_peers(error: Exception, status: str, why: str) -> None:
    entered = admit(kind(raising(error), "one", "two"), BareArena(), MACHINE)
    assert [(e.name, e.run, e.status, e.why) for e in entered] == [(n, None, status, why) for n in ("one", "two")]
    peer = entered[0].peer(None)
    assert (peer.name, peer.status, peer.why, peer.timing) == ("one", status, why, None)


@pytest.mark.parametrize(
    "spoil", [lambda c: c.fill(0), lambda c: c.fill(np.nan), lambda c: None], ids=["zero", "NaN", "unwritten"]
)
def test_a_wrong_peer_is_never_timed(spoil: Any) -> None:
    captured = []
    wrong = Entrant("made-up", lambda _a, _b, c: spoil(c), "8x8")
    (entrant,) = admit(kind(lambda _a, _m: [wrong]), BareArena(capture=captured.append), MACHINE)
    assert (entrant.run, entrant.status, captured) == (None, "failed", [])
    assert re.match(r"WrongResult: made-up on llvm, seed (\d+) \(--seed \1 repeats it\): worst error", entrant.why)


def test_a_peer_that_cannot_be_captured_is_out_and_the_others_stay() -> None:
    def capture(run: Any) -> None:
        if run is second:
            raise RuntimeError("operation not permitted when stream is capturing")

    arena = BareArena(capture=capture)
    second = lambda a, b, c: arena.product(a, b, c)  # noqa: E731
    both = kind(lambda _a, _m: [Entrant("one", arena.product), Entrant("two", second)], "one", "two")
    first, other = admit(both, arena, MACHINE)
    assert first.status == "measured"
    assert (other.status, other.why) == ("failed", "RuntimeError: operation not permitted when stream is capturing")


def test_an_interrupt_is_not_a_failed_peer() -> None:
    with pytest.raises(KeyboardInterrupt):
        admit(kind(raising(KeyboardInterrupt())), BareArena(), MACHINE)


def test_without_measuring_peers_are_named_as_not_timed(command: Callable[..., Outcome]) -> None:
    outcome = command("run", "--step", "1", "--size", "16", "--on", "llvm", "--peers", "triton,dlight")
    assert outcome.code == 0
    assert "peers (triton,dlight) are only timed beside a measured step; speed not measured" in outcome.out


def test_versions_of_what_is_installed_are_noted() -> None:
    kinds = [PeerKind(package, "", (), print, package) for package in ("numpy", "no-such-package", "")]
    assert peer_versions(kinds) == {"numpy": np.__version__}


# dlight


@pytest.mark.parametrize("shape", [(64, 64, 64), (33, 17, 50)], ids=str)
@pytest.mark.parametrize("layout", ["nn", "nt"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dlight_schedules_the_unscheduled_product(shape: tuple[int, int, int], dtype: str, layout: str) -> None:
    mod, rule = dlight.scheduled(Matmul(*shape, dtype, layout), MACHINE.target())
    assert rule == "Matmul"
    source = compile_module(mod, MACHINE, raising(AssertionError())).mod.imports[0].inspect_source()
    assert "blockIdx.x" in source
    assert "__shared__" in source


@pytest.mark.compiler
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dlights_kernel_compiles_as_ours_do(dtype: str, compiler) -> None:
    mod, _ = dlight.scheduled(Matmul(33, 17, 50, dtype), MACHINE.target())
    source = compile_module(mod, MACHINE, raising(AssertionError())).mod.imports[0].inspect_source()
    assert compile_cubin(source, MACHINE.arch, compiler).registers > 0


def test_what_no_rule_takes_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dlight, "rules", lambda: (dlight.dlight.gpu.GEMV(),))
    with pytest.raises(PeerFailed, match="none of dlight's rules takes 33x17x50 float32"):
        dlight.scheduled(PROBLEM, MACHINE.target())


class FormsArena(BareArena):
    """An arena whose races a form wins by its name."""

    def __init__(self, problem: Matmul, winner: str = "") -> None:
        super().__init__(problem)
        self.winner, self.races = winner, []

    def turned(self, b: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(b.T)

    def race(self, contenders: list[Any], _plan: Any) -> Any:
        self.races.append([name for name, _ in contenders])
        times = [1.0 if self.winner in name else 2.0 for name, _ in contenders]
        return SimpleNamespace(timings=tuple(SimpleNamespace(median_ms=time) for time in times))


@pytest.fixture
def dlights_targets(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What dlight's kernels are compiled for; they run in numpy.

    Its schedules on tensor cores, for which TVM reads its intrinsics for a minute here, are left untiled.
    """
    compiled = []
    usual = dlight.scheduled

    def schedule(problem: Matmul, target: Any) -> tuple[Any, str]:
        if problem.dtype == "float16" and target.attrs["arch"] == "sm_90":
            return IRModule({"main": problem.prim_func()}), "Matmul"
        return usual(problem, target)

    def compile_with(_mod: Any, machine: Any, _deliver: Any) -> dict[str, Any]:
        compiled.append(machine.arch)
        backend = LlvmBackend()

        def run(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
            layout = "nt" if b.shape == (16, 48) else "nn"
            c[...] = backend.reference(Matmul(32, 16, 48, str(a.dtype), layout), a, b).astype(c.dtype)

        return {"main": run}

    monkeypatch.setattr(dlight, "scheduled", schedule)
    monkeypatch.setattr(dlight, "compile_module", compile_with)
    monkeypatch.setattr(dlight, "require_compiler", lambda: None)
    return compiled


@pytest.mark.parametrize(("layout", "winner"), [("nn", "B[N,K]ᵀ"), ("nn", "B[K,N]"), ("nt", "B[K,N]")])
def test_dlight_enters_as_detected_and_by_the_plain_name(layout: str, winner: str, dlights_targets: list) -> None:
    arena = FormsArena(Matmul(32, 16, 48, "float16", layout), winner)
    usual, plain = admit(KINDS["dlight"], arena, MACHINE)
    assert [(e.name, e.status, e.why) for e in (usual, plain)] == [(n, "measured", "") for n in dlight.NAMES]
    assert usual.config == f"rule gpu.Matmul, target sm_90a, {dlight.STORED[layout]}"
    assert plain.config == f"rule gpu.Matmul, target sm_90, {winner}"
    assert len(arena.races) == 1
    assert set(dlights_targets) == {"sm_90a"}  # compiled as our own kernels are


@pytest.mark.emulator
def test_dlights_plain_target_has_tensor_cores_and_the_detected_none() -> None:
    targets = [machine.target() for machine in (MACHINE, dlight.plain(MACHINE))]
    found = [dlight.scheduled(Matmul(128, 96, 80, "float16", "nt"), target) for target in targets]
    assert [(rule, "wmma" in str(mod)) for mod, rule in found] == [("Matmul", False), ("Matmul", True)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dlight_enters_once_where_the_name_makes_no_difference(dtype: str, dlights_targets: list) -> None:
    arena = FormsArena(Matmul(32, 16, 48, dtype))
    found = KINDS["dlight"].enter(arena, MACHINE)
    assert [entrant.name for entrant in found] == ["dlight"]
    assert arena.races == []


def test_a_wrong_form_of_dlight_is_not_raced(dlights_targets: list) -> None:
    arena = FormsArena(Matmul(32, 16, 48, "float16"), "B[N,K]ᵀ")
    arena.turned = lambda b: np.zeros_like(b.T)
    _, plain = KINDS["dlight"].enter(arena, MACHINE)
    assert (plain.status, plain.config) == ("measured", "rule gpu.Matmul, target sm_90, B[K,N]")
    assert arena.races == []


# MetaSchedule


class FakeDatabase(list):
    """Trials by their times in seconds."""

    def get_all_tuning_records(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(run_secs=[seconds]) for seconds in self]


class FakeSearch:
    """Stands in for tune_tir and compile_tir: each call times so many trials, and has one that does not run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, timed: int) -> None:
        self.timed, self.seeds, self.now = timed, [], 0.0
        monkeypatch.setattr(metaschedule.ms, "tune_tir", self.tune)
        monkeypatch.setattr(metaschedule.ms.database, "MemoryDatabase", FakeDatabase)
        monkeypatch.setattr(metaschedule.ms.tir_integration, "compile_tir", lambda found, *_: min(found))
        monkeypatch.setattr(metaschedule.time, "perf_counter", lambda: self.now)

    def tune(self, _mod: Any, _target: Any, _folder: str, *, database: list, seed: int, **_options: Any) -> None:
        self.seeds.append(seed)
        database += [*[1.0 / seed] * self.timed, 1e10]
        self.now += 10.0


def test_a_search_goes_on_until_its_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeSearch(monkeypatch, timed=3)
    best, trials = metaschedule.search(PROBLEM, metaschedule.search_target(MACHINE), 25.0, runner="none")
    assert fake.seeds == [1, 2, 3]  # others each time; the batch that has begun is ended
    assert (best, trials) == (1 / 3, 9)


def test_a_search_that_finds_nothing_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeSearch(monkeypatch, timed=0)
    with pytest.raises(PeerFailed, match="none of MetaSchedule's trials of 33x17x50 float32"):
        metaschedule.search(PROBLEM, metaschedule.search_target(MACHINE), 5.0, runner="none")


def test_a_search_keeps_to_static_shared_memory() -> None:
    attributes = metaschedule.search_target(MACHINE).attrs
    assert int(attributes["max_shared_memory_per_block"]) == 48 * 1024
    assert int(attributes["max_threads_per_block"]) == MACHINE.threads_per_block


@derived_object
class NoBuilds(ms.builder.PyBuilder):
    """Builds nothing; each artifact has a folder of its own, which MetaSchedule removes."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def build(self, inputs: list[Any]) -> list[ms.builder.BuilderResult]:
        found = []
        for _ in inputs:
            path = Path(tempfile.mkdtemp(dir=self.folder), "none.so")
            path.touch()
            found.append(ms.builder.BuilderResult(str(path), None))
        return found


@derived_object
class MadeUpTimes(ms.runner.PyRunner):
    """Says that trials took so many seconds, in turn."""

    def __init__(self, seconds: Iterator[float]) -> None:
        super().__init__()
        self.seconds = seconds

    def run(self, inputs: list[Any]) -> list[Any]:
        class Future(ms.runner.PyRunnerFuture):
            def __init__(self, result: ms.runner.RunnerResult) -> None:
                super().__init__()
                self.result_ = result

            def done(self) -> bool:
                return True

            def result(self) -> ms.runner.RunnerResult:
                return self.result_

        made = derived_object(Future)
        return [made(ms.runner.RunnerResult([next(self.seconds)], None)) for _ in inputs]


def test_a_search_in_the_rules_space_returns_the_fastest_of_its_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metaschedule_space, "TRIALS", 16)
    monkeypatch.setattr(metaschedule_space, "AT_ONCE", 8)
    seconds = itertools.chain([2.0] * 5, [0.5], itertools.repeat(1.0))
    builder, runner = NoBuilds(tmp_path), MadeUpTimes(seconds)
    found, trials = metaschedule_space.search(Matmul(128, 128, 64), MACHINE, MACHINE.target(), builder, runner)
    assert trials == metaschedule_space.TRIALS
    threads = [int(loop.extent) for loop in loops_of(found.body) if loop.kind == tirx.ForKind.THREAD_BINDING]
    assert 32 <= math.prod(threads[-2:]) <= 1024


def test_the_rules_space_is_of_float32_alone() -> None:
    half = BareArena(Matmul(128, 128, 64, "float16"))
    (entrant,) = admit(metaschedule_space.KIND, half, MACHINE)
    assert (entrant.run, entrant.status) == (None, "missing")
    assert "float32" in entrant.why


# Triton


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_stage_count_is_declared_with_several_blocks(dtype: str) -> None:
    configs = declared_configs(dtype, every_stage=True)
    assert len(configs) == len(set(configs)) >= 20
    assert {config.stages for config in configs} == set(STAGE_COUNTS) == {1, 2, 3, 4, 5}
    for stages in STAGE_COUNTS:
        assert len({(c.block_m, c.block_n, c.block_k) for c in configs if c.stages == stages}) >= 5


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_tuned_over_a_short_list(dtype: str) -> None:
    configs = declared_configs(dtype)
    assert 12 <= len(configs) == len(set(configs)) <= 16
    assert {config.stages for config in configs} == {2, 3, 4, 5}
    assert {BlockConfig(128, 256, 64, 8, stages) for stages in (3, 4)} <= set(configs)
    smallest = min(config.block_m * config.block_n for config in configs)
    assert smallest <= 32 * 32  # small shapes need many programs
    ring_bytes = [2 * config.stages * config.block_k * (config.block_m + config.block_n) for config in configs]
    assert max(ring_bytes) <= MACHINE.smem_per_block_bytes


def test_float32_has_one_list() -> None:
    assert declared_configs("float32") == declared_configs("float32", every_stage=True)


def test_float64_is_refused() -> None:
    with pytest.raises(PeerFailed, match="which float64 does not allow"):
        declared_configs("float64")


def test_a_configuration_in_words() -> None:
    assert str(BlockConfig(64, 64, 16, 4, 3)) == "64x64x16, 4 warps, 3 stages"
    assert str(BlockConfig(64, 32, 16, 4, 1)) == "64x32x16, 4 warps, 1 stage"


@pytest.mark.parametrize(
    ("layout", "strides", "shape", "programs", "whole"),
    [("nn", (17, 1), (33, 17, 50), 4, False), ("nt", (1, 50), (33, 17, 50), 4, False), ("nn", (64, 1), None, 4, True)],
)
def test_a_launch_is_fixed(layout: str, strides: tuple, shape: tuple | None, programs: int, whole: bool) -> None:
    launches = []

    class Recorder:
        def __getitem__(self, grid: tuple[int]) -> Any:
            return lambda *arguments, **constants: launches.append((grid, arguments, constants))

    problem = Matmul(*(shape or (64, 64, 64)), layout=layout)
    config = BlockConfig(32, 32 if whole else 16, 16, 2, 4)
    launch(Recorder(), problem, config)("a", "b", "c")
    ((grid, arguments, constants),) = launches
    assert grid == (programs,)
    assert arguments == ("a", "b", "c", problem.m, problem.n, problem.k, problem.k, 1, *strides, problem.n, 1)
    assert (constants["whole"], constants["num_warps"], constants["num_stages"]) == (whole, 2, 4)


def test_tuning_chooses_over_all_and_for_each_stage_count() -> None:
    fast, slow, deep = BlockConfig(64, 64, 16, 4, 2), BlockConfig(32, 32, 32, 2, 2), BlockConfig(64, 64, 16, 4, 5)
    wide = BlockConfig(128, 256, 64, 8, 4)
    tuning = Tuning({slow: 3.0, fast: 1.0, deep: 2.0}, {wide: "needs 300000 bytes"}, 20)
    assert (tuning.best(), tuning.best(2), tuning.best(5), tuning.best(4)) == (fast, fast, deep, None)
    assert tuning.summary == (
        "fastest of 19 of 20 declared configurations; skipped: 128x256x64, 8 warps, 4 stages: needs 300000 bytes"
    )


def test_triton_enters_its_best_and_the_best_of_each_stage_count(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {BlockConfig(64, 64, 16, 4, stages): 1 + abs(stages - 3) for stages in (1, 2, 3, 4)}
    skipped = {BlockConfig(64, 64, 16, 4, 5): "needs 300000 bytes of shared memory, limit 232448"}
    monkeypatch.setattr(triton_peer, "load_kernel", lambda: None)
    monkeypatch.setattr(triton_peer, "tune", lambda *_arguments: Tuning(times, skipped, 5))
    (best,) = KINDS["triton"].enter(BareArena(), MACHINE)
    assert (best.name, best.config) == ("triton", "64x64x16, 4 warps, 3 stages")
    entered = KINDS["triton-stages"].enter(BareArena(), MACHINE)
    assert tuple(entrant.name for entrant in entered) == KINDS["triton-stages"].peers
    assert [entrant.config.split(",")[-1] for entrant in entered[:3]] == [" 3 stages", " 1 stage", " 2 stages"]
    assert (entered[-1].run, entered[-1].status) == (None, "failed")
    assert entered[-1].why == "no configuration of 5 stages ran: needs 300000 bytes of shared memory, limit 232448"


def test_without_triton_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in ("triton", "triton-stages", "triton_tma"):
        entered = admit(KINDS[name], BareArena(), MACHINE)
        assert [entrant.name for entrant in entered] == list(KINDS[name].peers)
        assert {entrant.status for entrant in entered} == {"missing"}
        assert "pip install triton" in entered[0].why


# Triton's persistent kernel


@pytest.mark.parametrize("layout", ["nn", "nt"])
@pytest.mark.parametrize("dtype", triton_tma.DTYPES)
def test_the_persistent_kernel_is_tuned_over_both_forms_and_small_tiles(dtype: str, layout: str) -> None:
    configs = triton_tma.declared_configs(Matmul(1000, 1000, 1000, dtype, layout), 132)
    assert 16 <= len(configs) == len(set(map(str, configs))) <= 32
    assert {config.stages for config in configs} <= set(STAGE_COUNTS)  # the finals are by these
    assert {(config.parts, config.specialized) for config in configs} == {(1, False), (2, False), (1, True)}
    assert min(config.block_m * config.block_n for config in configs) <= 64 * 64
    ring_bytes = [2 * config.stages * config.block_k * (config.block_m + config.block_n) for config in configs]
    assert max(ring_bytes) <= MACHINE.smem_per_block_bytes


@pytest.mark.parametrize(
    ("problem", "why"),
    [
        (Matmul(64, 64, 64), "multiplies float16 and bfloat16, not float32"),
        (Matmul(64, 64, 50, "float16"), "rows of A take 100 bytes; TMA takes multiples of 16: pad them"),
        (Matmul(64, 17, 64, "float16"), "rows of B take 34 bytes"),
        (Matmul(64, 17, 64, "bfloat16", "nt"), "rows of C take 34 bytes"),
        (Matmul(64, 10, 64, "bfloat16", "nt", "float32"), "rows of C take 40 bytes"),
    ],
    ids=str,
)
def test_what_tma_cannot_is_refused(problem: Matmul, why: str) -> None:
    with pytest.raises(PeerFailed, match=why):
        triton_tma.declared_configs(problem, 132)


@pytest.mark.parametrize(
    ("layout", "out_dtype", "row_elements"), [("nn", None, 24), ("nt", None, 24), ("nt", "float32", 20)]
)
def test_rows_of_16_bytes_are_taken(layout: str, out_dtype: str | None, row_elements: int) -> None:
    assert triton_tma.declared_configs(Matmul(3, row_elements, 40, "float16", layout, out_dtype), 132)


@pytest.mark.parametrize(("shape", "programs"), [((64, 64, 64), 4), ((320, 320, 64), 7)])
@pytest.mark.parametrize("layout", ["nn", "nt"])
def test_no_more_programs_than_tiles_take_turns(shape: tuple, programs: int, layout: str) -> None:
    config = triton_tma.TmaConfig(32, 32, 16, 4, 3, 1, True, 7)
    call = config.call(Matmul(*shape, "float16", layout), ("a", "b", "c"))
    assert (call.programs, call.constants["programs"]) == (programs, programs)
    assert call.arguments == ("a", "b", "c", *shape)  # pointers: the kernel makes the descriptors
    assert (call.constants["transposed"], call.constants["specialized"]) == (layout == "nt", True)
    assert str(config) == "32x32x16, 4 warps, 3 stages, warp specialized"


@pytest.mark.parametrize(("layout", "b_block"), [("nn", [16, 64]), ("nt", [64, 16])])
def test_operands_are_described_by_the_blocks_that_are_moved(
    layout: str, b_block: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    described = SimpleNamespace(TensorDescriptor=SimpleNamespace(from_tensor=lambda operand, block: (operand, block)))
    for name in ("triton", "triton.tools"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    monkeypatch.setitem(sys.modules, "triton.tools.tensor_descriptor", described)
    config = triton_tma.TmaConfig(32, 64, 16, 4, 3, 2, False, 7)
    call = config.call(Matmul(64, 64, 64, "float16", layout), ("a", "b", "c"))
    assert call.arguments == (("a", [32, 16]), ("b", b_block), ("c", [32, 32]), 64, 64, 64)
    assert str(config) == "32x64x16, 4 warps, 3 stages, stored in halves"


def test_the_persistent_kernel_enters_its_best(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = []

    def tune(_kernel: Any, _arena: Any, _machine: Any, configs: list) -> Tuning:
        tuned.extend(configs)
        return Tuning({configs[0]: 2.0, configs[-1]: 1.0}, {}, len(configs))

    monkeypatch.setattr(triton_tma, "load_tma_kernel", lambda: None)
    monkeypatch.setattr(triton_tma, "tune", tune)
    arena = BareArena(Matmul(64, 64, 64, "float16"))
    properties = SimpleNamespace(multi_processor_count=78)
    arena.backend.torch = SimpleNamespace(cuda=SimpleNamespace(get_device_properties=lambda _device: properties))
    (entrant,) = KINDS["triton_tma"].enter(arena, MACHINE)
    assert {config.most_programs for config in tuned} == {78}
    assert (entrant.name, entrant.config) == ("triton_tma", str(tuned[-1]))
    assert "declared configurations" in entrant.why


@pytest.fixture
def with_triton() -> None:
    """Skip where the kernel cannot even be loaded."""
    for package in ("triton", "torch"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"no {package}")


def check_triton(name: str, folder: Path, **environment: str) -> None:
    """Run one of tests/triton_checks.py in a process of its own."""
    command = [sys.executable, "-m", "tests.triton_checks", name]
    told = {**os.environ, "TRITON_CACHE_DIR": str(folder), **environment}
    result = subprocess.run(command, cwd=ROOT, env=told, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]


@pytest.mark.usefixtures("with_triton")
def test_tritons_kernel_is_right_in_its_interpreter(tmp_path: Path) -> None:
    if tuple(map(int, np.__version__.split(".")[:2])) >= (2, 4):
        pytest.skip(f"Triton 3.6's interpreter cannot loop with numpy {np.__version__}, only below 2.4")
    check_triton("interpreted", tmp_path, TRITON_INTERPRET="1")


@pytest.mark.usefixtures("with_triton")
def test_tritons_kernel_compiles_to_fma_and_asynchronous_copies(tmp_path: Path) -> None:
    check_triton("compiled", tmp_path)


@pytest.mark.usefixtures("with_triton")
def test_the_persistent_kernel_is_right_in_tritons_interpreter(tmp_path: Path) -> None:
    if tuple(map(int, np.__version__.split(".")[:2])) >= (2, 4):
        pytest.skip(f"Triton 3.6's interpreter cannot loop with numpy {np.__version__}, only below 2.4")
    check_triton("interpreted_tma", tmp_path, TRITON_INTERPRET="1")


@pytest.mark.usefixtures("with_triton")
def test_the_persistent_kernel_compiles_to_tma_and_wgmma(tmp_path: Path) -> None:
    check_triton("compiled_tma", tmp_path)


# On the GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("shape", "layout"), [((256, 256, 256), "nn"), ((100, 52, 36), "nt")], ids=str)
def test_peers_that_run_are_right_and_can_be_captured(shape: tuple[int, int, int], layout: str, dtype: str) -> None:
    arena = Arena(Matmul(*shape, dtype, layout), GpuBackend())
    for kind in find_peers("triton-stages,dlight"):
        for entrant in admit(kind, arena, gpu_machine()):
            assert entrant.status in ("measured", "missing"), entrant.why


@pytest.mark.gpu
@pytest.mark.usefixtures("with_triton")
@pytest.mark.parametrize("layout", ["nn", "nt"])
@pytest.mark.parametrize("dtype", triton_tma.DTYPES)
def test_every_persistent_configuration_is_right(dtype: str, layout: str) -> None:
    arena = Arena(Matmul(1000, 520, 1000, dtype, layout), GpuBackend())
    (entrant,) = admit(KINDS["triton_tma"], arena, gpu_machine())
    assert entrant.status == "measured", entrant.why
    assert "skipped" not in entrant.why
