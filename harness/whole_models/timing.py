"""Take a model's times on a GPU: by each set of rules, torch and torch.compile, in the same rounds, and apart."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import tvm

from tensorir_ladder.harness.execution import GpuBackend, device_properties
from tensorir_ladder.harness.peers.entrant import reason, say
from tensorir_ladder.harness.race import Contender, Racecourse, RoundPlan, Rounds, require_room
from tensorir_ladder.harness.records import (
    FunctionTimed,
    ModelRecord,
    Peer,
    RulesTimed,
    Timing,
    Verification,
)
from tensorir_ladder.harness.session import Session
from tensorir_ladder.harness.verify import Trial, WrongResult, draw_seeds, hold
from tensorir_ladder.harness.whole_models import eager
from tensorir_ladder.harness.whole_models.arithmetic import DTYPE
from tensorir_ladder.harness.whole_models.building import BuiltModel, RuleSet, interruptible
from tensorir_ladder.harness.whole_models.definitions import Model
from tensorir_ladder.harness.whole_models.execution import Call, Running
from tensorir_ladder.harness.whole_models.reference import draw_weights, expected
from tensorir_ladder.relax.rules.rule import Failure

SUMMED_BY_TORCH = "float16"  # parts of its sums may be
FUNCTIONS = RoundPlan(rounds=7, warmup_ms=5.0, round_budget_ms=60.0, sample_ms=0.3)  # of one function by itself
BYTES = 2  # of a float16
PAGE = 4096  # bytes
COMPILED, COPY = "torch.compile", "copy"
CONFIGS = {COMPILED: "shapes as it chooses: those of the first size, then symbols"}


@dataclass
class Attempt:
    """A set of rules on one model: what it built, or why it did not; then how it ran."""

    rules: RuleSet
    built: BuiltModel | None
    why: str = ""
    status: str = "failed"
    running: Running | None = None
    verification: Verification | None = None
    calls: list[list[Call]] = field(default_factory=list)  # of each operand set

    def refuse(self, status: str, why: str) -> None:
        """Say why there are no times."""
        self.status, self.why, self.running, self.calls = status, why, None, []
        say(f"{self.rules.name}: {status}: {why}")

    @property
    def failures(self) -> tuple[Failure, ...]:
        """Defects of rules that building came upon, whose functions other rules took."""
        return self.built.failures if self.built else ()

    @property
    def rest(self) -> list[list[Call]]:
        """The calls that have nothing to do with attention's scores."""
        return [[call for call in calls if not self.built.functions[call.name].attention] for calls in self.calls]


@dataclass(frozen=True)
class ModelOperands:
    """One set: the input, the parameters in their order, these as torch wants them, and the set's number."""

    x: Any
    weights: tuple[Any, ...]
    stored: Mapping[str, Any]
    number: int


class ModelCourse(Racecourse):
    """A model's operands, in as many sets as it takes to find the L2 cold."""

    CAPTURE = "relaxed"  # TVM's virtual machine may allocate; what it allocates is its pool's and stays

    def __init__(self, model: Model, value: int, backend: GpuBackend, seed: int) -> None:
        shapes = model.exported(value)[1]
        self.shape = tuple(map(int, model.shape(value)))
        self.set_bytes = BYTES * (math.prod(self.shape) + sum(map(math.prod, shapes.values())))
        number = sets_of(self.set_bytes, device_properties(backend.torch).L2_cache_size)
        require_room(backend.torch, 3 * number * self.set_bytes)
        self.names = tuple(shapes)

        def drawn(number: int) -> ModelOperands:
            weights = draw_weights(shapes, backend, seed + number + 1000)
            stored = eager.stored(model, weights)
            if model.kind == "linear":
                # Half is read and half written, in whole pages: other sizes are copied at two thirds of the speed.
                floats = (-(-self.bytes_moved(value * model.size[0]) // (2 * PAGE)) * PAGE // 4,)
                stored[COPY] = tuple(backend.poisoned(floats, "float32", 0.0) for _ in range(2))
            return ModelOperands(
                backend.normal(seed + number, self.shape, DTYPE), tuple(weights.values()), stored, number
            )

        super().__init__(backend, [(drawn(each),) for each in range(number)], self.set_bytes)

    def bytes_moved(self, outputs: int) -> int:
        """Bytes of input, parameters and so many outputs, each once."""
        return self.set_bytes + BYTES * outputs


def sets_of(set_bytes: int, l2_bytes: int, most: int = 64) -> int:
    """Count the sets that together exceed the L2 twice over, one where that does so alone."""
    return max(1, min(most, -(-2 * l2_bytes // set_bytes)))


class TorchForms:
    """torch's forms of one model, kept over its extents: ``torch.compile`` compiles once and for symbols after that."""

    def __init__(self, torch: Any, model: Model, compiles: bool) -> None:
        self.torch, self.forms = torch, eager.forms(torch, model)
        if compiles and model.kind not in ("linear", "conv", "function"):
            self.forms[COMPILED] = torch.compile(self.forms["torch"])
        if model.kind == "linear":
            self.forms[COPY] = lambda _x, stored: stored[COPY][1].copy_(stored[COPY][0])

    def admitted(self, course: ModelCourse, trial: Trial) -> tuple[list[Contender], list[Peer]]:
        """Check each form as it will be timed; return those that can be, and of the others why not."""
        found: list[Contender] = []
        failed: list[Peer] = []
        for name, form in self.forms.items():

            def launch(operands: ModelOperands, form: Callable[..., Any] = form) -> Any:
                with self.torch.no_grad():
                    return form(operands.x, operands.stored)

            try:
                if name not in (COPY, "torch, rest"):
                    output = partial(_into, launch, course.sets[0][0])
                    hold(output, trial, course.backend)
                course.graph(launch)
                found.append((name, launch))
            except Exception as error:  # noqa: BLE001 - another project's code may raise anything; the record keeps it
                say(f"{name}: failed: {reason(error)}")
                failed.append(Peer(name, "failed", reason(error), "", None))
        return found, failed


def _into(launch: Callable[[ModelOperands], Any], operands: ModelOperands, *given: Any) -> None:
    # The trial's operands are the set's own.
    output = given[-1]
    output[...] = launch(operands).reshape(output.shape)


def measure_model(
    session: Session, model: Model, value: int, attempts: Sequence[Attempt], forms: TorchForms
) -> ModelRecord:
    """Check and time a model at one value of its extent; failures are named in the record."""
    torch, (seed,) = session.backend.torch, draw_seeds(session.seed, 1)
    for attempt in attempts:
        attempt.calls = []
    release(torch)
    course = ModelCourse(model, value, session.backend, seed)
    trials = {sums: _trial(course, model, sums) for sums in ("float16", "float32")}
    for attempt in attempts:
        _check(attempt, course, trials, seed)
    beside, failed = forms.admitted(course, trials[SUMMED_BY_TORCH])
    bytes_moved = course.bytes_moved(math.prod(trials[SUMMED_BY_TORCH].reference.shape))
    del trials
    torch.cuda.empty_cache()
    rounds, own, rest = _race_whole(session, course, attempts, beside, model)
    functions = _race_functions(course, attempts)
    peers = dict(zip([name for name, _ in beside], rounds.timings[len(rounds.timings) - len(beside) :]))
    return ModelRecord(
        model=model.name,
        extent=model.extent,
        value=value,
        symbolic=model.symbolic,
        dtype=DTYPE,
        shape=course.shape,
        bytes_moved=bytes_moved,
        flops=model.flops(value),
        rules=tuple(_timed(attempt, own, rest, functions) for attempt in attempts),
        beside=(*(Peer(name, "measured", "", CONFIGS.get(name, ""), each) for name, each in peers.items()), *failed),
        method=rounds.method,
        environment=session.environment(rounds),
        command=session.command,
        notes=tuple(f"{attempt.rules.name}: {each}" for attempt in attempts for each in attempt.failures),
    )


def _trial(course: ModelCourse, model: Model, sums: str) -> Trial:
    operands = course.sets[0][0]
    return expected(model, course.backend, operands.x, dict(zip(course.names, operands.weights)), sums)


def _check(attempt: Attempt, course: ModelCourse, trials: Mapping[str, Trial], seed: int) -> None:
    """Load and run what a set of rules built; its memory is full of NaN from a run on these when it counts."""
    if attempt.built is None:
        return
    try:
        with interruptible():
            _check_running(attempt, attempt.built, course, trials, seed)
    except WrongResult as wrong:
        attempt.refuse("wrong", f"{wrong} (--seed {seed} repeats it)"[:300])
    except Exception as error:  # noqa: BLE001 - a set of rules may fail in any way; the record says which did and how
        attempt.refuse("failed", reason(error))


def _check_running(
    attempt: Attempt, built: BuiltModel, course: ModelCourse, trials: Mapping[str, Trial], seed: int
) -> None:
    running = attempt.running or Running(built.executable, list(built.functions), tvm.cuda())
    attempt.status, attempt.why, attempt.running = "measured", "", running
    operands = course.sets[0][0]
    running(operands.x * math.nan, *operands.weights)

    def run(x: Any, *given: Any) -> None:
        output = given[-1]
        output[...] = course.backend.xp.from_dlpack(running(x, *given[:-1])).reshape(output.shape)

    error, limit = hold(run, trials[built.sums], course.backend)
    attempt.verification = Verification(True, "gpu", (seed,), error, limit, integers_exact=False)
    course.graph(partial(_run, running))
    attempt.calls = [
        [call.of(course.backend.xp) for call in running.calls(each.x, *each.weights)] for (each,) in course.sets
    ]


def _run(running: Running, operands: ModelOperands) -> None:
    running(operands.x, *operands.weights)


def _again(calls: list[list[Call]], operands: ModelOperands) -> None:
    for call in calls[operands.number]:
        call()


def _race_whole(
    session: Session, course: ModelCourse, attempts: Sequence[Attempt], beside: Sequence[Contender], model: Model
) -> tuple[Rounds, dict[str, Timing], dict[str, Timing]]:
    """Time whole models, and what of them is no attention, all in the same rounds; by the name of the rules."""
    at_work = [attempt for attempt in attempts if attempt.running]
    names = [attempt.rules.name for attempt in at_work]
    whole = [(attempt.rules.name, partial(_run, attempt.running)) for attempt in at_work]
    parts = [
        (f"{attempt.rules.name}, rest", partial(_again, attempt.rest))
        for attempt in at_work
        if model.tokens is not None
    ]
    contenders = [*whole, *parts, *beside]
    if not contenders:
        raise WrongResult(f"{model.name}: nothing to time: no set of rules is right, and torch does not run")
    torchs = tuple(place for place, (name, _) in enumerate(contenders) if name == "torch") if whole else ()
    rounds = course.race(contenders, session.plan, torchs)
    count = len(whole)
    return (
        rounds,
        dict(zip(names, rounds.timings[:count])),
        dict(zip(names, rounds.timings[count : count + len(parts)])),
    )


def _race_functions(course: ModelCourse, attempts: Sequence[Attempt]) -> dict[tuple[str, str, Any], Timing]:
    """Time each function by itself, those of one name and shape by all rules in the same rounds."""
    groups: dict[tuple[str, Any], list[tuple[str, Call]]] = {}
    for attempt in attempts:
        for call in attempt.calls[0] if attempt.calls else ():
            group = groups.setdefault((call.name, call.shapes), [])
            if attempt.rules.name not in [name for name, _ in group]:
                group.append((attempt.rules.name, call))
    found: dict[tuple[str, str, Any], Timing] = {}
    for (name, shapes), group in groups.items():
        timings = (
            _function_course(course, group[0][1])
            .race([(rules, call.function) for rules, call in group], FUNCTIONS)
            .timings
        )
        found |= {(rules, name, shapes): timing for (rules, _), timing in zip(group, timings)}
    return found


def _function_course(course: ModelCourse, call: Call) -> Racecourse:
    """Put what a call was given on the GPU in as many sets as it takes."""
    torch = course.torch
    nbytes = sum(getattr(each, "nbytes", 0) for each in call.arguments)
    number = sets_of(nbytes, device_properties(torch).L2_cache_size)
    require_room(torch, (number - 1) * nbytes)
    sets = [
        call.arguments,
        *(
            tuple(course.backend.copied(each) if hasattr(each, "nbytes") else each for each in call.arguments)
            for _ in range(number - 1)
        ),
    ]
    return Racecourse(course.backend, sets, nbytes)


def _timed(
    attempt: Attempt,
    own: Mapping[str, Timing],
    rest: Mapping[str, Timing],
    functions: Mapping[tuple[str, str, Any], Timing],
) -> RulesTimed:
    name, built = attempt.rules.name, attempt.built
    counted = Counter((call.name, call.shapes) for call in (attempt.calls[0] if attempt.calls else ()))
    return RulesTimed(
        name=name,
        arch=built.arch if built else "",
        status=attempt.status,
        why=attempt.why,
        sums=built.sums if built else "float32",
        build_s=round(built.seconds, 2) if built else 0.0,
        source_sha256=built.source_sha256 if built else "",
        verification=attempt.verification if attempt.running else None,
        timing=own.get(name),
        rest=rest.get(name),
        functions=tuple(
            FunctionTimed(
                called,
                built.functions[called].rule,
                built.functions[called].attention,
                calls,
                functions[name, called, shapes],
            )
            for (called, shapes), calls in counted.items()
        ),
    )


def release(torch: Any) -> None:
    """Give the GPU's memory back that earlier models hold."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    tvm.get_global_func("vm.builtin.memory_manager.clear")()
