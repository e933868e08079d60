"""``model``: whole models by several sets of schedule rules, timed beside torch; or small ones verified on the CPU."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from tensorir_ladder.emulator.compiler import require_host_compiler
from tensorir_ladder.harness import execution
from tensorir_ladder.harness.commands import WRONG
from tensorir_ladder.harness.commands.kernels import PLACES
from tensorir_ladder.harness.commands.measuring import open_session, unfinished
from tensorir_ladder.harness.commands.options import add_machine_options, add_revision, machine_of, runs_on_gpu
from tensorir_ladder.harness.commands.printing import console, new_table, progress
from tensorir_ladder.harness.commands.values import UsageError, numbers
from tensorir_ladder.harness.execution import LlvmBackend, NoGpu
from tensorir_ladder.harness.machines import GpuSpec
from tensorir_ladder.harness.peers.entrant import reason, say
from tensorir_ladder.harness.records import ModelRecord, check_writable
from tensorir_ladder.harness.session import CaseJournal, Session
from tensorir_ladder.harness.verify import WrongResult, draw_seeds
from tensorir_ladder.harness.whole_models.building import (
    LADDER,
    RULES,
    BuiltModel,
    RuleSet,
    build,
    interruptible,
    rule_sets,
)
from tensorir_ladder.harness.whole_models.checking import verify_model
from tensorir_ladder.harness.whole_models.definitions import FAMILIES, Family, Model
from tensorir_ladder.harness.whole_models.timing import Attempt, TorchForms, measure_model
from tensorir_ladder.kernels.codegen import toolchain
from tensorir_ladder.kernels.codegen.toolchain import Compiler

EXTENTS = ("seq", "batch", "rows")


@dataclass(frozen=True)
class Asked:
    """A model at one value of its extent."""

    model: Model
    value: int

    def __str__(self) -> str:
        return f"{self.model.name} {self.model.extent} {self.value}"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add models, the values of their free extents, and sets of rules."""
    names = ",".join(FAMILIES)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", help=f"models: a list of {names}")
    text = "your own: FILE.py:FUNCTION, which returns a module and its inputs; or one of ours, such as bert_base"
    which.add_argument(
        "--torch", metavar="MODELS", help=f"PyTorch models, a list. {text}; others are named where unknown"
    )
    parser.add_argument(
        "--max-autotune", action="store_true", help="of --torch: beside torch.compile's max-autotune, too"
    )
    text = "of --torch: compare with each backend of torch's scaled_dot_product_attention, too"
    parser.add_argument("--sdpa", action="store_true", help=text)
    of_a_range = "a range names the usual ones in it"
    parser.add_argument(
        "--seq", help=f"tokens of llama-layer, mlp and our PyTorch models: 1,512 | 1-8192, {of_a_range} (usual ones)"
    )
    parser.add_argument(
        "--batch", help=f"batches of vit-block, resnet50, resnet50-convs and our PyTorch models ({_usual('batch')})"
    )
    parser.add_argument("--rows", help=f"rows of llama-linears and functions ({_usual('rows')})")
    what = "; ".join(f"{each.name}: {each.what}" for each in RULES.values())
    parser.add_argument("--rules", default=",".join(RULES), help=f"sets of schedule rules: a list (all). {what}")
    parser.add_argument("--no-torch-compile", action="store_true", help="leave torch.compile out, which takes a while")
    parser.add_argument("--small", action="store_true", help="small models, as are verified without a GPU")
    text = "build and compile into the build cache, for a later run, and name each function's rule; needs no GPU"
    parser.add_argument("--build-only", action="store_true", help=text)
    add_machine_options(parser)
    add_revision(parser)
    parser.add_argument("--out", type=Path, help="folder for records")


def run(options: argparse.Namespace, command: str) -> int:
    """Time each model at each value, all sets of rules and torch in the same rounds; or verify small ones."""
    rules = rule_sets(options.rules.split(","))
    if options.torch:
        return _measure_torch(options.torch.split(","), [rule.name for rule in rules], options, command)
    names = options.model.split(",")
    if unknown := [name for name in names if name not in FAMILIES]:
        raise UsageError(f"--model {unknown[0]!r}: one of {', '.join(FAMILIES)}")
    if options.build_only:
        asked = _asked(names, options, options.small)
        return _build(asked, rules, machine_of(options), toolchain.require_compiler())
    on_gpu = runs_on_gpu(options)
    if not on_gpu and options.on == "auto":
        raise NoGpu(
            f"{execution.why_none() or 'no GPU'}: models are timed on one; --on emulator and --on llvm verify small "
            "ones, --build-only compiles for a GPU elsewhere"
        )
    asked = _asked(names, options, options.small or not on_gpu)
    if not on_gpu:
        return _verify(asked, rules, options)
    records = _measure(asked, rules, options, command)
    _print_records(records)
    wrong = any(made.status == "wrong" for record in records for made in record.rules)
    return WRONG if wrong or any(record.notes for record in records) else 0


def _measure_torch(names: Sequence[str], rules: Sequence[str], options: argparse.Namespace, command: str) -> int:
    """Check and time PyTorch models as they come, beside torch and, of ``rules``, TVM's own."""
    session = open_session(options, command)
    from tensorir_ladder.harness.whole_models import torch_models, torch_race  # which need torch

    if options.rows or any(":" in name and (options.seq or options.batch) for name in names):
        raise UsageError("--seq and --batch are of our PyTorch models, --rows of none; a FILE.py:FUNCTION has its own")
    usual = torch_models.REAL
    sizes = [
        replace(usual, tokens=tokens, batch=batch)
        for tokens in numbers(options.seq or str(usual.tokens), "--seq")
        for batch in numbers(options.batch or str(usual.batch), "--batch")
    ]
    beside = [*rules, *([] if options.no_torch_compile else [torch_race.COMPILED])]
    beside += [torch_race.TUNED] if options.max_autotune else []
    beside += torch_race.SDPA if options.sdpa else []
    records = []
    for text, size in product(names, sizes):
        try:
            name, made = torch_models.load(text, size)
        except (ValueError, OSError) as error:
            raise UsageError(f"--torch {text!r}: {error}") from error
        say(f"{name}: made; forms are built")
        records.append(torch_race.measure(session, name, made, beside))
        records[-1].save(session.out)
        print(torch_race.summary(records[-1]), flush=True)
    _print_records(records)
    return (
        WRONG if any(made.status != "measured" for each in records for made in each.rules if made.name == LADDER) else 0
    )


def _usual(extent: str) -> str:
    found = {family.values for family in FAMILIES.values() if family.extent == extent}
    return " or ".join(",".join(map(str, values)) for values in sorted(found))


def _asked(names: Sequence[str], options: argparse.Namespace, small: bool) -> list[Asked]:
    """List the models that the options name, at each value; UsageError for extents that none of them has."""
    families = [FAMILIES[name] for name in names]
    own = {family.extent for family in families}
    for extent in EXTENTS:
        if getattr(options, extent) is not None and extent not in own:
            raise UsageError(f"--{extent}: no extent of {', '.join(names)}; give --{' or --'.join(sorted(own))}")
    found = [
        Asked(model, value)
        for family in families
        for model in family.models(small)
        for value in _values(family, getattr(options, family.extent), small)
    ]
    for each in found:
        each.model.check(each.value)
    return found


def _values(family: Family, text: str | None, small: bool) -> list[int]:
    usual = family.small_values if small else family.values
    if text is None:
        return list(usual)
    found: list[int] = []
    for part in text.split(","):
        if match := re.fullmatch(r"(\d{1,9})-(\d{1,9})", part.strip()):
            named = [value for value in usual if int(match[1]) <= value <= int(match[2])]
            if not named:
                raise UsageError(f"--{family.extent} {part}: none of the usual {', '.join(map(str, usual))} is in it")
            found += named
        else:
            found += numbers(part, f"--{family.extent}")
    return list(dict.fromkeys(found))


def _built(each: Asked, rules: RuleSet, machine: GpuSpec, compiler: Compiler | None) -> Attempt:
    """Build a model by a set of rules, and say how long that took; its failure is kept, too."""
    try:
        with interruptible():
            built = build(each.model, each.value, rules, machine, compiler)
    except Exception as error:  # noqa: BLE001 - a set of rules may fail in any way; the record says which did and how
        attempt = Attempt(rules, None)
        attempt.refuse("failed", reason(error))
        return attempt
    say(f"{each.model.name} by {rules.name}: built in {built.seconds:.1f} s")
    for failure in built.failures:
        say(f"{each.model.name} by {rules.name}: {failure}; a defect, others took the function")
    return Attempt(rules, built)


def _built_once(asked: Sequence[Asked]) -> list[list[Asked]]:
    """Group values that one build takes."""
    groups: dict[tuple[str, int], list[Asked]] = {}
    for each in asked:
        groups.setdefault((each.model.name, 0 if each.model.symbolic else each.value), []).append(each)
    return list(groups.values())


def _build(asked: Sequence[Asked], rules: Sequence[RuleSet], machine: GpuSpec, compiler: Compiler) -> int:
    failed = False
    for first, *_ in _built_once(asked):
        for one in rules:
            attempt = _built(first, one, machine, compiler)
            if attempt.built:
                _print_functions(attempt.built)
            failed = failed or attempt.built is None or bool(attempt.failures)
    return WRONG if failed else 0


def _print_functions(built: BuiltModel) -> None:
    for function in built.functions.values():
        print(f"  {function.name:40} {function.rule}{' (attention)' if function.attention else ''}", flush=True)


def _measure(
    asked: Sequence[Asked], rules: Sequence[RuleSet], options: argparse.Namespace, command: str
) -> list[ModelRecord]:
    session, machine = open_session(options, command), machine_of(options)
    records: list[ModelRecord] = []
    with CaseJournal(session, "model", asked) as journal, progress() as bar:
        session.run = journal.run
        waiting = unfinished(asked, journal.has, "models")
        task = bar.add_task("measuring", total=len(waiting))
        for group in _built_once(waiting):
            for each, record in _measured(group, rules, session, machine, not options.no_torch_compile):
                if not options.small:
                    record.save(session.out)
                    journal.add(each)
                records.append(record)
                print(f"{each}: {_line(record)}", flush=True)
                bar.advance(task)
        journal.finish()
    return records


def _measured(
    group: Sequence[Asked], rules: Sequence[RuleSet], session: Session, machine: GpuSpec, compiles: bool
) -> Iterator[tuple[Asked, ModelRecord]]:
    model = group[0].model
    attempts = [_built(group[0], one, machine, session.compiler) for one in rules]
    forms = TorchForms(session.backend.torch, model, compiles)
    for each in group:
        yield each, measure_model(session, model, each.value, attempts, forms)


def _verify(asked: Sequence[Asked], rules: Sequence[RuleSet], options: argparse.Namespace) -> int:
    """Check small models on the CPU: as defined, or each function as the rules made it, in the emulator."""
    if options.out:
        check_writable(options.out)
        print(f"no record will be written to {options.out}: nothing is measured")
    emulated, backend = options.on == "emulator", LlvmBackend()
    if emulated:
        require_host_compiler()
    (seed,) = draw_seeds(options.seed, 1)
    wrong = 0
    for each in asked:
        for one in rules if emulated else rules[:1]:
            where = f"{each} by {one.name}" if emulated else str(each)
            try:
                found = verify_model(
                    each.model, each.value, one, machine_of(options), backend, seed, emulated, options.emulator_seed
                )
            except WrongResult as error:
                print(f"{where}, seed {seed} (--seed {seed} repeats it): wrong: {error}", flush=True)
                wrong += 1
                continue
            print(
                f"{where}: worst error {found.max_error:.2g}, tolerance {found.tolerance:.2g}; {found.kernels}",
                flush=True,
            )
    print(f"verified {PLACES[options.on]}; speed not measured: --on {options.on}")
    return WRONG if wrong else 0


def _line(record: ModelRecord) -> str:
    """Write every contender's time in a line."""
    times = [(made.name, made.timing, made.status) for made in record.rules]
    times += [(peer.name, peer.timing, peer.status) for peer in record.beside]
    return ", ".join(f"{name} {timing.median_ms:.4f} ms" if timing else f"{name} {why}" for name, timing, why in times)


def _print_records(records: Sequence[ModelRecord]) -> None:
    for record in records:
        title = f"{record.model}, {record.extent} {record.value}: its functions, each called by itself"
        texts = ("rules", "function", "rule", "part")
        table = new_table(title, ("rules", "function", "rule", "part", "calls", "ms a call", "share"), texts=texts)
        for made in record.rules:
            total = sum(function.share_ms for function in made.functions)
            for function in sorted(made.functions, key=lambda each: -each.share_ms):
                part = "attention" if function.attention else ""
                cells = (made.name, function.name, function.rule, part, str(function.calls))
                table.add_row(*cells, f"{function.timing.median_ms:.4f}", f"{function.share_ms / total:.1%}")
        console().print(table)
