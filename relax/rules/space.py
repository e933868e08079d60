"""Contractions on ordinary cores as a space for MetaSchedule: its search decides on tiles, stages and unrolling.

::

    model = TileCost()
    how = {"space": contraction_space(), "strategy": CheapestFirst(model), "cost_model": model}
    how |= {"builder": local_builder(), "runner": local_runner()}
    with import_quickly():  # relax.rules.tensor_intrinsics
        database = ms.tune_tir(mod, target, work_dir, max_trials_global=64, num_trials_per_iter=32, **how)
    function = ms.tir_integration.compile_tir(database, mod, target).mod["main"]
    kernel = tvm.compile(lower_ahead(function, target), target)  # as it was measured

The composition is :func:`schedules.recipes.stage_contraction`'s, with tiles that are random variables of the trace:
whoever changes a decision and replays the trace gets the other schedule. What follows from their values (how copies are
spread over threads, how wide accesses are, which statement runs in which pipeline stage) is worked out behind them, by
:class:`FinishContraction`: as a postprocessor it sees numbers, and what it does is in the trace, too. So a trace from a
database is replayed without any of this.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir.utils import derived_object
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.schedule import LoopRV, SBlockRV, Trace
from tvm.target import Target

from tensorir_ladder.relax.rules.rule import NotTaken
from tensorir_ladder.schedules.cost import Machine, assumed_machine, block_count, resident_blocks
from tensorir_ladder.schedules.errors import IllegalSchedule, IllegalTile
from tensorir_ladder.schedules.inspection import SHARED_SCOPES, is_constant, loop_extent
from tensorir_ladder.schedules.isa import WARP
from tensorir_ladder.schedules.loops.layout import contraction_loops, flatten_contraction, pad_to_tile
from tensorir_ladder.schedules.loops.tiling import TiledLoops, bind_batched_grid
from tensorir_ladder.schedules.loops.unrolling import unroll_loop
from tensorir_ladder.schedules.loops.vectorization import dtype_bytes, vectorize_write_back
from tensorir_ladder.schedules.memory.staging import (
    accumulate_in_registers,
    fetch_cooperatively,
    initialize_before,
    inline_data_movement,
    stage_in_shared,
)
from tensorir_ladder.schedules.pipeline.lowering import lower_ahead
from tensorir_ladder.schedules.pipeline.pipelining import pipeline_loop
from tensorir_ladder.schedules.tiles import Choice, ThreadTile
from tensorir_ladder.schedules.workloads import Matmul

LOG = logging.getLogger(__name__)
STAGES, UNROLL = "tensorir_ladder.stages", "tensorir_ladder.unroll"  # decisions, on the loop over k tiles until used
MOST_STAGES = 4
FEWEST_THREADS = 32  # of a block that is worth a trial
WHOLE = (64, 64, 16)  # extents are padded to multiples of these, so that tiles which divide them are many
BANKS, MULTIPLIERS = 32, 4  # of shared memory; warps whose multiply-adds a multiprocessor starts in a cycle
MOST_PER_THREAD, MOST_STEPS = 16, 64  # outputs of a thread along an axis, and steps of a k tile


def contraction_space() -> ms.space_generator.ScheduleFn:
    """Return the space of one sum of products on ordinary cores: MetaSchedule's ``space`` of a tuning."""
    return ms.space_generator.ScheduleFn(
        schedule_contraction,
        sch_rules=[],
        postprocs=[FinishContraction()],
        mutator_probs={ms.mutator.MutateTileSize(): 0.7, MutateChoice(): 0.3},
    )


def evolution(population: int = 128) -> ms.search_strategy.EvolutionarySearch:
    """Return MetaSchedule's evolution with a population that is finished in seconds: ``strategy`` of a tuning.

    Candidates are finished in Python, some 60 ms each, one after the other whatever ``num_tuning_cores`` is: the usual
    512 of a population, four generations long, are two minutes before each batch of trials. For other cost models than
    :class:`TileCost`, which ranks decisions before they are finished: :class:`CheapestFirst`.
    """
    return ms.search_strategy.EvolutionarySearch(
        population_size=population, init_min_unmeasured=population // 4, genetic_num_iters=3
    )


def schedule_contraction(sch: Schedule) -> Schedule:
    """Schedule a function's sum of products with tiles that are decisions of the trace, up to what needs their values.

    Raises
    ------
    IllegalSchedule : for functions without exactly one reduction, of extents known at run time only, and what
        :func:`schedules.loops.flatten_contraction` refuses.
    """
    block = _contraction(sch)
    flatten_contraction(sch, block)
    *batch, rows, columns, reduction = contraction_loops(sch, block)
    if pad_to_tile(sch, block, [1] * len(batch) + list(WHOLE)):
        *batch, rows, columns, reduction = sch.get_loops(block)
    cut = [sch.sample_perfect_tile(axis, 3, MOST_PER_THREAD) for axis in (rows, columns)]
    block_row, thread_row, register_row = sch.split(rows, cut[0])
    block_column, thread_column, register_column = sch.split(columns, cut[1])
    k_outer, k_inner = sch.split(reduction, sch.sample_perfect_tile(reduction, 2, MOST_STEPS))
    loops = TiledLoops(
        block_row, block_column, thread_row, thread_column, k_outer, k_inner, register_row, register_column
    )
    sch.reorder(*vars(loops).values())
    bind_batched_grid(sch, batch, [block_row, block_column])
    for loop, axis in ((thread_row, "threadIdx.y"), (thread_column, "threadIdx.x")):
        sch.bind(loop, axis)  # of as many as are decided on: their limits are checked then
    accumulate_in_registers(sch, block, thread_column)
    for operand in (0, 1):
        inline_data_movement(sch, stage_in_shared(sch, block, operand, k_outer, "shared.dyn"))
    initialize_before(sch, block, k_outer)
    chances = [1 / MOST_STAGES] * MOST_STAGES
    sch.annotate(k_outer, STAGES, sch.sample_categorical(list(range(1, MOST_STAGES + 1)), chances))
    sch.annotate(k_outer, UNROLL, sch.sample_categorical([0, 1], [0.5, 0.5]))
    return sch


def _contraction(sch: Schedule) -> SBlockRV:
    """Return a function's one reduction; NotTaken where there is another number, or an extent is not known."""
    blocks = sch.get_child_blocks(sch.get_sblock("root"))
    reducing = [block for block in blocks if any(_reduces(i) for i in sch.get(block).iter_vars)]
    if len(reducing) != 1:
        raise NotTaken(
            "the space is one sum of products",
            value=f"{len(reducing)} reductions",
            limit=1,
            remedy="split the function",
        )
    if not all(is_constant(iterator.dom.extent) for iterator in sch.get(reducing[0]).iter_vars):
        raise NotTaken("tiles divide extents that are constants", remedy="give the function constant shapes")
    return reducing[0]


def _reduces(iterator: tirx.IterVar) -> bool:
    return bool(iterator.iter_type == tirx.IterVar.CommReduce)


@derived_object
class MutateChoice(ms.mutator.PyMutator):
    """Decides anew on one of what is drawn from a list: stages and unrolling, which MutateTileSize leaves alone."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.random = random.Random(seed)

    def _initialize_with_tune_context(self, context: ms.TuneContext) -> None:
        self.random = random.Random(context.rand_state)

    def apply(self, trace: Trace, _seed: int = 0) -> Trace | None:
        """Return a trace with another decision; None for one without any."""
        drawn = [inst for inst in trace.insts if inst.kind.name == "SampleCategorical" and inst in trace.decisions]
        if not drawn:
            return None
        inst = self.random.choice(drawn)
        others = [i for i in range(len(inst.attrs[0])) if i != int(trace.decisions[inst])]
        return trace.with_decision(inst, self.random.choice(others), remove_postproc=True)

    def clone(self) -> MutateChoice:
        """Return another one, which draws on from here."""
        return MutateChoice(self.random.randrange(2**31))


@derived_object
class FinishContraction(ms.postproc.PyPostproc):
    """Spreads copies over threads, widens accesses, unrolls and pipelines, by what the trace has decided.

    A candidate that is beyond the target's limits, or that cannot be pipelined so, is none: the search draws another.
    """

    def __init__(self, target: Target | None = None) -> None:
        super().__init__()
        self.target = target

    def _initialize_with_tune_context(self, context: ms.TuneContext) -> None:
        self.target = context.target

    def apply(self, sch: Schedule) -> bool:
        """Finish a schedule; False where it is no candidate."""
        try:
            for k_outer in _marked_loops(sch):
                _finish(sch, k_outer, self.target)
        except IllegalSchedule as reason:
            LOG.debug("no candidate: %s", reason)
            return False
        return True

    def clone(self) -> FinishContraction:
        """Return another one for the same target."""
        return FinishContraction(self.target)


Decisions = tuple[list[list[int]], list[int]]  # parts of rows, columns and k; places in the lists drawn from


def decisions_of(trace: Trace) -> Decisions:
    """Return what a trace of this space decided: parts of rows, columns and k, and places in the lists drawn from."""
    drawn = [inst for inst in trace.insts if inst in trace.decisions]
    cuts = [[int(part) for part in trace.decisions[i]] for i in drawn if i.kind.name == "SamplePerfectTile"]
    return cuts, [int(trace.decisions[i]) for i in drawn if i.kind.name == "SampleCategorical"]


@derived_object
class TileCost(ms.cost_model.PyCostModel):
    """Ranks candidates of this space by what their tiles cost, corrected by what was measured: MetaSchedule's model.

    ::

        cost       = outputs of the busiest multiprocessor · (1 + cycles of reading / cycles of multiplying)
                     · (1 + 1 / warps + ALONE / blocks) · (1 + EDGE · (1 / block's rows + 1 / block's columns))
                     · (1 + 1 / k tile's depth + k tile's depth / k) · ONE_STAGE · ROLLED · instructions written out
        ln seconds ≈ ln cost + constant + a weight for each decision's value

    Before the first measurements the order is the cost's: what a warp reads from shared memory, lanes that meet in a
    bank one after the other; latencies, which the warps and blocks on a multiprocessor hide from each other; what the
    edges of a block load more; a barrier for each k tile; and the first k tile, for which all wait. The factors suit
    steps 5 and 6 as recorded on an H200. The weights (of the stages, the unrolling, the depth of a k tile, a thread's
    outputs along each axis, the threads) are those of least squares with a penalty on their size: a value that was
    measured once hardly counts. Needs neither xgboost nor torch.
    """

    PENALTY = 2.0  # as if each weight had been seen to be 0 this often
    ALONE = 0.25  # of its time that a block waits at barriers and for its results, if no other runs meanwhile
    EDGE = 3.0  # outputs along an edge of a block that cost as much as one more, for the operands it loads
    ONE_STAGE, ROLLED = 1.2, 1.1  # where copies are waited for; where the loop over a k tile is left to the compiler
    WRITTEN_OUT = 2**16  # multiply-adds of a thread's code that cost as much again, since warps wait for instructions

    def __init__(self, machine: Machine | None = None) -> None:
        super().__init__()
        self.machine = machine
        self.seen: list[tuple[dict[str, int], float]] = []  # values of the decisions, ln(measured / modelled)

    def load(self, path: str) -> None:
        """Refuse: what was measured is in the database."""
        raise NotImplementedError(
            f"TileCost has no file ({path}): tune with the database, and it sees what is measured"
        )

    def save(self, path: str) -> None:
        """Write nothing: what was measured is in the database."""

    def update(self, context: ms.TuneContext, candidates: Sequence[Any], results: Sequence[Any]) -> None:
        """Take in what candidates took; those that failed teach nothing."""
        for candidate, result in zip(candidates, results):
            if not result.run_secs:
                continue
            machine = self.machine or assumed_machine(context.target)
            values, cost = self._described(decisions_of(candidate.sch.trace), machine)
            seconds = float(np.median([float(run) for run in result.run_secs]))
            self.seen.append((values, math.log(seconds / cost)))

    def predict(self, context: ms.TuneContext, candidates: Sequence[Any]) -> np.ndarray:
        """Return a score for each candidate, higher for what should be faster: the cheapest one's cost over its own."""
        logs = self.logs([decisions_of(candidate.sch.trace) for candidate in candidates], context.target)
        return np.exp(logs.min() - logs) if len(logs) else logs

    def logs(self, decided: Sequence[Decisions], target: Target) -> np.ndarray:
        """Return ln of what decisions (:func:`decisions_of`) cost, corrected by what was measured."""
        machine = self.machine or assumed_machine(target)
        described = [self._described(decisions, machine) for decisions in decided]
        return np.array([math.log(cost) for _, cost in described]) + self._corrections([v for v, _ in described])

    def _described(self, decisions: Decisions, machine: Machine) -> tuple[dict[str, int], float]:
        (rows, columns, depth), (stages, unrolled) = decisions
        tile = ThreadTile((rows[1] * rows[2], columns[1] * columns[2], depth[1]), (rows[2], columns[2]))
        problem = Matmul(math.prod(rows), math.prod(columns), math.prod(depth))
        values = {"stages": stages, "unrolled": unrolled, "depth": depth[1], "threads": rows[1] * columns[1]}
        values |= {"thread rows": rows[2], "thread columns": columns[2]}
        reading = 1 + _reading(rows[1:], columns[1:], depth[1])
        k_tile = 1 + 1 / depth[1] + depth[1] / problem.k
        code = 1 + math.prod(tile.thread) * depth[1] * (stages + 1) / self.WRITTEN_OUT if unrolled else self.ROLLED
        waiting = self.ONE_STAGE if stages == 0 else 1.0
        busiest = -(-block_count(problem, tile) // machine.multiprocessors)
        together = min(busiest, resident_blocks(Choice(tile, stages + 1), machine, problem.itemsize))
        hiding = 1 + WARP / (together * tile.threads_per_block) + self.ALONE / together
        edges = 1 + self.EDGE * (1 / tile.block_m + 1 / tile.block_n)
        outputs = busiest * tile.block_m * tile.block_n
        return values, outputs * reading * hiding * edges * k_tile * code * waiting

    def _corrections(self, wanted: list[dict[str, int]]) -> np.ndarray:
        if not self.seen:
            return np.zeros(len(wanted))
        known = sorted({pair for values, _ in self.seen for pair in values.items()})
        table = np.array([[1.0, *_held(values, known)] for values, _ in self.seen])
        penalty = np.diag([0.0] + [self.PENALTY] * len(known))
        weights = np.linalg.solve(table.T @ table + penalty, table.T @ np.array([ratio for _, ratio in self.seen]))
        return np.array([[1.0, *_held(values, known)] for values in wanted]) @ weights


@derived_object
class CheapestFirst(ms.search_strategy.PySearchStrategy):
    """Draws decisions of this space by the thousand and finishes the cheapest: MetaSchedule's ``strategy`` of a tuning.

    ``model`` is the tuning's cost model, too: what a batch has taken corrects the next one's order. Decisions are
    ranked as numbers, some 20 µs each, and only those for a batch are finished as schedules, 60 ms each. A batch has no
    more than ``alike`` candidates of a block tile and thread tile, so that it teaches more.
    """

    def __init__(self, model: TileCost, drawn: int = 2**17, alike: int = 2) -> None:
        super().__init__()
        self.model, self.drawn, self.alike = model, drawn, alike

    def _initialize_with_tune_context(self, context: ms.TuneContext) -> None:
        self.mod, self.target = context.mod, context.target
        self.most_threads = int(self.target.attrs.get("max_threads_per_block", 1024))
        self.arguments = ms.arg_info.ArgInfo.from_entry_func(self.mod, False)
        self.itemsize = min(dtype_bytes(argument.dtype) for argument in self.arguments)
        self.postprocs = list(context.space_generator.postprocs)
        self.random = random.Random(context.rand_state)

    def pre_tuning(
        self,
        max_trials: int,
        num_trials_per_iter: int,
        design_spaces: list[Schedule],
        database: ms.Database | None = None,
        cost_model: ms.CostModel | None = None,
    ) -> None:
        """Start a search; refuse spaces of several designs, which are no :func:`contraction_space`."""
        (design,) = design_spaces
        self.trace, self.left, self.batch = design.trace, max_trials, num_trials_per_iter
        self.tried: set[str] = set()

    def post_tuning(self) -> None:
        """End the search: nothing is kept."""

    def generate_measure_candidates(self) -> list[ms.MeasureCandidate] | None:
        """Return the cheapest candidates that were not tried; None where trials or candidates are used up."""
        fitting = [one for one in self._drawn() if str(one) not in self.tried and self._fits(one)]
        made: list[ms.MeasureCandidate] = []
        of_tile: Counter[str] = Counter()
        for place in np.argsort(self.model.logs(fitting, self.target), kind="stable"):
            if len(made) == min(self.left, self.batch):
                break
            decisions = fitting[place]
            if of_tile[str(decisions[0])] < self.alike:
                self.tried.add(str(decisions))
                candidate = self._finished(decisions)
                of_tile[str(decisions[0])] += candidate is not None
                made += [candidate] if candidate is not None else []
        self.left -= len(made)
        return made or None

    def notify_runner_results(self, measure_candidates: list[ms.MeasureCandidate], results: list[Any]) -> None:
        """Do nothing: the cost model is told by the tuning."""

    def clone(self) -> CheapestFirst:
        """Return another one of the same model, which begins anew."""
        return CheapestFirst(self.model, self.drawn, self.alike)

    def _drawn(self) -> Iterable[Decisions]:
        """Return all that can be decided where that is no more than is drawn; or so many, each cut as likely."""
        cuts, _ = decisions_of(self.trace)
        limits = (MOST_PER_THREAD, MOST_PER_THREAD, MOST_STEPS)
        menus: list[Sequence[Any]] = [_cuts(math.prod(cut), len(cut), limit) for cut, limit in zip(cuts, limits)]
        menus += [tuple(range(MOST_STAGES)), (0, 1)]
        if math.prod(map(len, menus)) <= self.drawn:
            return (([*map(list, one[:3])], [*one[3:]]) for one in itertools.product(*menus))
        drawn = {tuple(map(self.random.choice, menus)) for _ in range(self.drawn)}
        return (([*map(list, one[:3])], [*one[3:]]) for one in sorted(drawn))

    def _fits(self, decisions: Decisions) -> bool:
        (rows, columns, depth), (stages, _) = decisions
        if not FEWEST_THREADS <= rows[1] * columns[1] <= self.most_threads:
            return False
        tile = ThreadTile((rows[1] * rows[2], columns[1] * columns[2], depth[1]), (rows[2], columns[2]))
        return not tile.violations(self.target, self.itemsize, stages + 1)

    def _finished(self, decisions: Decisions) -> ms.MeasureCandidate | None:
        """Return decisions as a schedule to be measured; None where that is no candidate."""
        trace = self.trace
        for inst, decision in zip([i for i in trace.insts if i in trace.decisions], [*decisions[0], *decisions[1]]):
            trace = trace.with_decision(inst, decision, remove_postproc=True)
        sch = Schedule(self.mod)
        trace.apply_to_schedule(sch, remove_postproc=True)
        sch.enter_postproc()
        if not all(postproc.apply(sch) for postproc in self.postprocs):
            return None
        return ms.MeasureCandidate(sch, self.arguments)


@functools.lru_cache(maxsize=64)
def _cuts(extent: int, parts: int, most: int) -> tuple[tuple[int, ...], ...]:
    """List the ways to cut an extent in parts that divide it, the innermost ``most`` at most."""
    if parts == 1:
        return ((extent,),) if extent <= most else ()
    firsts = (first for first in range(1, extent + 1) if extent % first == 0)
    return tuple((first, *rest) for first in firsts for rest in _cuts(extent // first, parts - 1, most))


def _reading(rows: Sequence[int], columns: Sequence[int], depth: int) -> float:
    """Return a warp's cycles of reading shared memory over those of multiplying.

    ``rows`` and ``columns`` are threads and a thread's outputs along them. A thread reads neighbours along k of its
    rows, and neighbours of its columns, up to 16 bytes at once.
    """
    across = min(columns[0], WARP)
    down = min(rows[0], WARP // across)
    return (
        rows[1] * _read_cycles(down, rows[1] * depth, math.gcd(depth, 4))
        + columns[1] * _read_cycles(across, columns[1], math.gcd(columns[1], 4))
    ) / (rows[1] * columns[1] / MULTIPLIERS)


def _read_cycles(lanes: int, stride: int, width: int) -> float:
    """Return a warp's cycles of reading for each word of a lane, of lanes ``stride`` words apart; ``width`` at once."""
    banks = BANKS // width
    return -(-lanes // (banks // math.gcd(stride // width, banks))) / width


def _held(values: dict[str, int], known: list[tuple[str, int]]) -> Iterator[float]:
    """Yield 1 for each known value that is among these, 0 for the others."""
    return (float(values[name] == value) for name, value in known)


def _marked_loops(sch: Schedule) -> list[LoopRV]:
    """List the loops over k tiles that have decisions to be carried out, each once."""
    found: list[LoopRV] = []
    for block in _blocks(sch):
        for loop in sch.get_loops(block):
            here = sch.get(loop)
            if STAGES in here.annotations and not any(sch.get(other).same_as(here) for other in found):
                found.append(loop)
    return found


def _blocks(sch: Schedule) -> list[SBlockRV]:
    return list(sch.get_child_blocks(sch.get_sblock("root")))


def _finish(sch: Schedule, k_outer: LoopRV, target: Target | None) -> None:
    annotations = sch.get(k_outer).annotations
    stages, unroll = int(annotations[STAGES]), bool(int(annotations[UNROLL]))
    sch.unannotate(k_outer, STAGES)
    sch.unannotate(k_outer, UNROLL)
    inside = [block for block in _blocks(sch) if _is_around(sch, k_outer, block)]
    copies = [block for block in inside if _writes(sch, block).scope() in SHARED_SCOPES]
    (update,) = (block for block in inside if _writes(sch, block).scope() == "local")
    (write_back,) = (block for block in sch.get_consumers(update) if not _is_around(sch, k_outer, block))
    *_, thread_row, thread_column, _, k_inner, register_row, register_column = sch.get_loops(update)
    threads = loop_extent(sch, thread_row), loop_extent(sch, thread_column)
    per_thread = loop_extent(sch, register_row), loop_extent(sch, register_column)
    tile = ThreadTile(
        block=(threads[0] * per_thread[0], threads[1] * per_thread[1], loop_extent(sch, k_inner)), thread=per_thread
    )
    stages = min(stages, loop_extent(sch, k_outer))
    if threads[0] * threads[1] < FEWEST_THREADS:
        raise IllegalTile("a block of few threads", value=threads, limit=FEWEST_THREADS, remedy="decide on more")
    if target is not None:
        tile.validate(target, dtype_bytes(sch.get(copies[0]).writes[0].source.dtype), stages)
    vectorize_write_back(sch, write_back, thread_column)
    for copy in copies:
        fetch_cooperatively(sch, copy, k_outer, threads, vectorize=True)
    if unroll:
        unroll_loop(sch, k_inner)
    if stages > 1:
        pipeline_loop(sch, k_outer, stages)


def _is_around(sch: Schedule, loop: LoopRV, block: SBlockRV) -> bool:
    """Return whether a loop is around a block."""
    return any(sch.get(other).same_as(sch.get(loop)) for other in sch.get_loops(block))


def _writes(sch: Schedule, block: SBlockRV) -> tirx.Var:
    """Return the buffer that a block writes."""
    return sch.get(block).writes[0].source


def record_of(mod: tvm.IRModule, made: Schedule, target: Target, seconds: float, database: ms.Database) -> None:
    """Commit a schedule that was found otherwise, by ``ladder tune`` say, to a database, with the time that it takes.

    ``made`` is a schedule of ``mod`` by primitives alone (a trace holds neither gates nor what retires a wgmma).
    Several databases are asked together by ``ms.database.OrderedUnionDatabase``.
    """
    arguments = ms.arg_info.ArgInfo.from_entry_func(mod, False)
    workload = database.commit_workload(mod)
    database.commit_tuning_record(ms.database.TuningRecord(made.trace, workload, [seconds], target, arguments))


BUILD, EXPORT = "tensorir_ladder.build_ahead", "tensorir_ladder.export_linked"


@derived_object
class _Builders(ms.builder.PyBuilder):
    """MetaSchedule's builder in processes, which start quickly and say how long each batch took."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        with _without_torch():
            self.local = ms.builder.LocalBuilder(f_build=BUILD, f_export=EXPORT, initializer=_known, **options)

    def build(self, build_inputs: list[Any]) -> list[Any]:
        """Build a batch."""
        begin = time.monotonic()
        with _without_torch():
            results = list(self.local.build(build_inputs))
        failed = [str(result.error_msg) for result in results if result.error_msg is not None]
        LOG.info("%d candidates built in %.1f s, %d failed", len(results), time.monotonic() - begin, len(failed))
        for message in failed[:1]:
            LOG.warning("a candidate was not built: %s", message)
        return results


@derived_object
class _Runner(ms.runner.PyRunner):
    """MetaSchedule's runner in a process, which starts quickly and says how long each batch took."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        with _without_torch():
            self.local = ms.runner.LocalRunner(**options)

    def run(self, runner_inputs: list[Any]) -> list[Any]:
        """Run a batch, one candidate after the other."""
        begin = time.monotonic()
        with _without_torch():
            futures = list(self.local.run(runner_inputs))
        errors = [result.error_msg for future in futures if (result := future.result()).error_msg is not None]
        LOG.info("%d candidates run in %.1f s, %d failed", len(futures), time.monotonic() - begin, len(errors))
        for message in errors[:1]:
            LOG.warning("a candidate did not run: %s", message)
        return futures


def local_builder(**options: Any) -> ms.builder.PyBuilder:
    """Return MetaSchedule's builder in processes beside this one, of which each lowers candidates ahead.

    Each also compiles and links its own, where there is a GPU: the runner, which is one process, only loads them. None
    imports torch, which starts a context on the GPU. ``options`` are those of ``ms.builder.LocalBuilder``, which needs
    cloudpickle and psutil. What a batch took is logged, at level info.
    """
    return _Builders(options)


def local_runner(**options: Any) -> ms.runner.PyRunner:
    """Return MetaSchedule's runner in a process beside this one, without torch; ``options`` are ``LocalRunner``'s."""
    return _Runner(options)


@contextlib.contextmanager
def _without_torch() -> Iterator[None]:
    """Have processes that start inside find no torch, which TVM imports where there is one: it takes seconds."""
    before = os.environ.get("PYTHONPATH")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "torch.py").write_text('raise ImportError("builders and runners of a search need no torch")')
        os.environ["PYTHONPATH"] = folder if not before else f"{folder}{os.pathsep}{before}"
        try:
            yield
        finally:
            if before is None:
                del os.environ["PYTHONPATH"]
            else:
                os.environ["PYTHONPATH"] = before


@tvm_ffi.register_global_func(BUILD, override=True)
def build_ahead(mod: tvm.IRModule, target: Target, _params: dict | None = None) -> tvm.runtime.Module:
    """Build a candidate with its copies asynchronous, by TVM's stock pipeline."""
    lowered = {name: lower_ahead(function, target) for name, function in mod.functions_items()}
    return tvm.tirx.build(tvm.IRModule(lowered), target=target)


@tvm_ffi.register_global_func(EXPORT, override=True)
def export_linked(mod: tvm.runtime.Module) -> str:
    """Write a candidate as a shared library into a folder of its own, which MetaSchedule removes; return its path."""
    path = Path(tempfile.mkdtemp()) / "candidate.so"
    mod.export_library(str(path))
    return str(path)


def _known() -> None:
    """Let a process beside this one know the functions of this module, which unpickling this has imported."""
