"""Measure steps: one case's way from request to record, beside cuBLAS, the step before and peers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import msgspec

from tensorir_ladder.harness import execution
from tensorir_ladder.harness.build import Case, Kernel
from tensorir_ladder.harness.energy import measure_energy
from tensorir_ladder.harness.models import depth
from tensorir_ladder.harness.models.time import bound, predict_tile
from tensorir_ladder.harness.peers import Entrant, PeerKind, admit, peer_versions
from tensorir_ladder.harness.race import Rounds
from tensorir_ladder.harness.records import Candidate, DepthForecast, Energy, Record
from tensorir_ladder.harness.roofline import product_roofline
from tensorir_ladder.harness.session import Session
from tensorir_ladder.harness.tuning import STAGE_SET, Search, TuningSpace
from tensorir_ladder.harness.verify import IEEE, PARTS, WrongResult, draw_seeds, verify_launch
from tensorir_ladder.schedules.tiles import ThreadTile
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.steps.registry import find_steps


@dataclass
class Measurer:
    """Measures cases of steps; keeps the tiles that it chose, the peers that it admitted and the model's forecasts.

    ``tune_stages`` lets a best tile bring its own stage count. ``peers`` are timed in the same rounds as each case.
    ``forecasts`` puts what the depth model predicts into each record, ``energy_turns`` what the cases, cuBLAS and the
    peers draw, in so many turns of a second each.
    """

    session: Session
    tune_stages: bool = True
    peers: tuple[PeerKind, ...] = ()
    forecasts: bool = False
    energy_turns: int = 0

    def __post_init__(self) -> None:
        self._best: dict[Case, tuple[Case, tuple[dict[str, Any], ...]]] = {}
        self._entrants: dict[Matmul, list[Entrant]] = {}
        self._forecasts: dict[Case, DepthForecast | None] = {}

    def measure(self, case: Case) -> Record:
        """Build, check and time one case beside cuBLAS, the step before and the peers; write nothing yet."""
        return self.measure_together([case])[0]

    def measure_together(self, cases: Sequence[Case]) -> list[Record]:
        """Measure cases of one problem in the same rounds, so that their times can be compared; one record each.

        cuBLAS, the steps before and the peers are timed once, for all records.
        """
        session, problem = self.session, cases[0].problem
        if problem not in self._entrants:
            self._entrants.clear()  # they hold operands of the problem before, which leave the GPU first
        cases = [self.best(case) if case.tile_choice == "best" else case for case in cases]
        checks = [session.verify(case) for case in cases]
        arena, entrants = session.arena(problem), self._admitted(cases[0])
        before = {case: self._previous(case) for case in cases}
        earlier = dict.fromkeys(case for case in before.values() if case is not None and case not in cases)
        contenders = [(str(case), session.load(case)[1]) for case in cases]
        contenders += arena.cublas(cases[0].math)
        ours_and_cublas = list(contenders)
        contenders += [(str(case), session.load(case)[1]) for case in earlier]
        contenders += [(entrant.name, entrant.run) for entrant in entrants if entrant.run]
        fastest_math = next((case for case in cases if case.math != IEEE), cases[0])  # whose peak is the highest
        beside = (len(cases), len(cases) + 1)
        names = {entrant.name for entrant in entrants}
        rounds = session.race(fastest_math, contenders, session.plan, peers=names, beside=beside)
        own, (nn, nt, *others) = rounds.timings[: len(cases)], rounds.timings[len(cases) :]
        times = dict(zip(cases, own)) | {case: others.pop(0) for case in earlier}
        held_to = session.roofline(fastest_math)
        peers = tuple(entrant.peer(others.pop(0) if entrant.run else None, held_to) for entrant in entrants)
        energy: tuple[Energy, ...] | msgspec.UnsetType = msgspec.UNSET
        if self.energy_turns:
            right = [(entrant.name, entrant.run) for entrant, peer in zip(entrants, peers) if peer.timing]
            energy = measure_energy(arena, [*ours_and_cublas, *right], self.energy_turns)
        return [
            self._record(
                case,
                session.load(case)[0],
                rounds,
                timing=times[case],
                baseline=(nn, nt),
                previous=times.get(before[case]),
                verification=checked,
                peers=peers,
                depth=self._forecast(case) if self.forecasts else None,
                energy=energy,
            )
            for case, checked in zip(cases, checks)
        ]

    def best(self, case: Case) -> Case:
        """Choose the best of the step's tiles by measuring, and of STAGE_SET unless a stage count was asked for.

        The search is :mod:`harness.tuning`'s, over this smaller space and without a confirmation, which the
        measurement that follows is. WrongResult where a candidate does not compute the product.
        """
        stages, tiles = case.step.stages if self.tune_stages else case.stages, case.step.tiles_of(case.variant).best
        unchosen = replace(case, tile=tiles[0], stages=stages, tile_choice="best")
        if unchosen not in self._best:
            several = STAGE_SET if self.tune_stages and case.step.pipelined else (stages,)
            search = Search(self.session, unchosen, TuningSpace(tiles, several, (case.variant,), stages))
            ranked, outcome = search.run(), search.outcome()
            if wrong := [candidate for candidate in outcome if candidate.status == "wrong"]:
                raise WrongResult(wrong[0].why)
            self._best[unchosen] = ranked[0], tuple(map(_candidate_row, outcome))
        return self._best[unchosen][0]

    def calibrate(self, problem: Matmul) -> Record:
        """Measure cuBLAS against itself through the same path; the ratio must be 1."""
        session = self.session
        arena = session.arena(problem)
        stored, _ = arena.cublas()
        checked = verify_launch(stored[1], problem, session.backend, stored[0], draw_seeds(session.seed), PARTS)
        contenders = [("cublas again", stored[1]), stored, (f"{stored[0]} once more", stored[1])]
        rounds = arena.race(contenders, session.plan)
        held_to = session.said(product_roofline(execution.gpu_machine(), problem, IEEE, arena.from_memory))
        for timing in rounds.timings:
            held_to.check(timing)
        own, first, second = rounds.timings
        return Record(
            kind="calibration",
            step=0,
            step_name="cublas",
            variant="cublas",
            default_variant=True,
            default_stages=True,
            **asdict(problem),
            math=IEEE,
            stages=1,
            tile="",
            tile_choice="given",
            timing=own,
            baseline=(first, second),
            previous=None,
            verification=checked,
            resources=None,
            code=None,
            bound="unknown",
            predicted_gain_pct=None,
            candidates=(),
            **session.provenance(None, rounds, peer_versions(self.peers)),
        )

    def _admitted(self, case: Case) -> list[Entrant]:
        arena = self.session.arena(case.problem)
        if case.problem not in self._entrants:
            admitted = [entrant for kind in self.peers for entrant in admit(kind, arena, case.machine)]
            self._entrants[case.problem] = admitted
        return self._entrants[case.problem]

    def _forecast(self, case: Case) -> DepthForecast | None:
        family = replace(case, stages=0)
        if family not in self._forecasts:
            try:
                self._forecasts[family] = depth.forecast(case, lambda other: self.session.kernel(other).resources)
            except depth.NoForecast:
                self._forecasts[family] = None
        return self._forecasts[family]

    def _previous(self, case: Case) -> Case | None:
        """Find the step before on the same problem, with its default variant, if that takes the problem.

        With the case's tile and stages where both steps have tiles of one family, else with its own default.
        """
        steps = find_steps()
        earlier = [number for number in steps if number < case.step.number]
        if not earlier:
            return None
        step = steps[max(earlier)]
        variant = step.default_variant(case.machine.has_cp_async)
        if not step.takes(variant, case.problem.dtype, case.machine.has_cp_async):
            return None
        before = Case.default(step, case.problem, case.machine)
        if case.tile_choice == "best":
            return self.best(replace(before, tile_choice="best"))
        chosen_for_it = case.tile_choice == "default" and step.tiles.choices
        same = step.tiles == case.step.tiles_of(case.variant) and not chosen_for_it
        stages = case.stages if step.pipelined else step.stages
        return replace(before, tile=case.tile, stages=stages, tile_choice=case.tile_choice) if same else before

    def _record(self, case: Case, kernel: Kernel, rounds: Rounds, **measured: Any) -> Record:
        prediction = predict_tile(kernel) if _adds_pipeline(case) else None
        usual = Case.default(case.step, case.problem, case.machine)
        return Record(
            kind="step",
            **case.named,
            default_stages=case.stages_built == replace(case, stages=usual.stages).stages_built,
            default_variant=case.usual,
            early_launch=kernel.launched_early,
            **asdict(case.problem),
            math=case.math,
            tile_choice=case.tile_choice,
            resources=kernel.resources,
            code=kernel.code,
            bound=bound(kernel, measured["timing"].median_ms),
            predicted_gain_pct=round(prediction.gain_pct, 1) if prediction else None,
            candidates=next((table for best, table in self._best.values() if best == case), ()),
            notes=kernel.warnings,
            **measured,
            **self.session.provenance(kernel, rounds, peer_versions(self.peers)),
        )


def _adds_pipeline(case: Case) -> bool:
    before = find_steps().get(case.step.number - 1)
    threads_own_tiles = isinstance(case.tile, ThreadTile)
    return case.stages_built > 1 and threads_own_tiles and before is not None and not before.pipelined


def _candidate_row(candidate: Candidate) -> dict[str, Any]:
    row = {"tile": candidate.tile, "stages": candidate.stages}
    timed = {"time_ms": candidate.times_ms[-1]} if candidate.times_ms else {"time_ms": None, "why": candidate.why}
    return row | timed
