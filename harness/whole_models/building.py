"""Models built by a set of schedule rules, as a user of TVM builds them: stock, dlight's by another name, and ours."""

from __future__ import annotations

import contextlib
import hashlib
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, s_tir, tirx
from tvm.ir.transform import Pass, PassContext, Sequential
from tvm.relax.backend.cuda import pipeline as stock
from tvm.s_tir.dlight.base import ScheduleRule
from tvm.target import Target

from tensorir_ladder.harness.machines import GpuSpec
from tensorir_ladder.harness.peers.dlight import plain
from tensorir_ladder.harness.whole_models.definitions import Model
from tensorir_ladder.kernels.codegen.lowering import cuda_compiler
from tensorir_ladder.kernels.codegen.toolchain import Compiler, compile_cubin
from tensorir_ladder.relax.attention import NAME as ATTENTION
from tensorir_ladder.relax.rules.for_target import dlight_rules, dlight_target
from tensorir_ladder.relax.rules.rule import BY, HOW, Failure, failures_kept, is_scheduled
from tensorir_ladder.relax.rules.tensor_intrinsics import import_quickly
from tensorir_ladder.schedules.errors import IllegalWorkload

LADDER = "tensorir_ladder"
UNNAMED = "TVM's default"  # who schedules what no rule takes
LONGEST = 200  # characters of a rule's name and how it schedules
OURS = "ladder"  # what the names of our rules' functions begin with


@dataclass(frozen=True)
class Function:
    """One function of a built model: the rule that scheduled it, and whether it is a part of attention.

    That is one which reads or writes scores, or has them all to itself.
    """

    name: str
    rule: str
    attention: bool


@dataclass(frozen=True)
class BuiltModel:
    """A model made by a set of rules: TVM's executable, its functions by name, and its kernels' CUDA text.

    ``fused`` is the module before rules see it; ``scheduled`` has what the rules made of its functions.
    ``sums`` is float16 where a function that adds products up in it, as TVM writes them, was left to dlight, which does
    so; ours add in float32. ``failures`` are defects of our rules, whose functions others took.
    """

    model: Model
    rules: str
    arch: str
    sums: str
    executable: Any
    functions: Mapping[str, Function]
    cuda: str
    fused: tvm.IRModule
    scheduled: tvm.IRModule
    seconds: float
    failures: tuple[Failure, ...] = ()

    @property
    def source_sha256(self) -> str:
        """Digest of the CUDA text."""
        return hashlib.sha256(self.cuda.encode()).hexdigest()


@dataclass(frozen=True)
class RuleSet:
    """A way to schedule a model: what it does in words, the machine as it names it, and the passes."""

    name: str
    what: str
    machine: Callable[[GpuSpec], GpuSpec]
    passes: Callable[[Target, Watch], Pass]


class Watch:
    """Note a module's functions before and after rules schedule them, and which rule took which."""

    def __init__(self) -> None:
        self.before: dict[str, tirx.PrimFunc] = {}
        self.fused = tvm.IRModule()
        self.taken: dict[tirx.PrimFunc, str] = {}

    def listed(self, rules: Sequence[ScheduleRule]) -> list[ScheduleRule]:
        """Wrap rules so that they note what they take."""
        return [_Noting(rule, self.taken) for rule in rules]

    def functions(self, mod: tvm.IRModule) -> dict[str, tirx.PrimFunc]:
        """List a module's functions that are kernels, by name."""
        return {
            name.name_hint: function for name, function in mod.functions_items() if isinstance(function, tirx.PrimFunc)
        }

    def instrument(self) -> Any:
        """Make a pass instrument that keeps the functions that no rule has seen yet."""
        watch = self

        @tvm.instrument.pass_instrument
        class Instrument:
            def run_before_pass(self, mod: tvm.IRModule, info: Any) -> None:
                if info.name == "ApplyDefaultSchedule" and not watch.before:
                    watch.before, watch.fused = watch.functions(mod), tvm.IRModule(dict(mod.functions_items()))

        return Instrument()


class _Noting(ScheduleRule):
    def __init__(self, rule: ScheduleRule, taken: dict[tirx.PrimFunc, str]) -> None:
        self.rule, self.taken = rule, taken

    def apply(self, func: tirx.PrimFunc, target: Target, tunable: bool = False) -> Any:
        """See dlight."""
        made = self.rule.apply(func, target, tunable)
        if made is not None:
            self.taken[func] = f"dlight.gpu.{type(self.rule).__name__}"
        return made


def _stock_passes(target: Target, watch: Watch) -> Pass:
    """TVM's own pipeline for CUDA (``relax.get_default_pipeline``), with its rules noting what they take."""
    passes = stock.library_dispatch_passes(target) + stock.legalize_passes(target)
    scheduling = passes[-1]
    scheduling.rules[:] = watch.listed(scheduling.rules)
    return Sequential(passes + stock.dataflow_lower_passes(target) + stock.finalize_passes(target))


def _ladder_passes(target: Target, _watch: Watch) -> Pass:
    """Run what the README tells users to run before TVM's own pipeline, which finds nothing left to schedule."""
    import tensorir_ladder.relax  # noqa: F401 - registers the pipeline

    return Sequential([relax.get_pipeline(LADDER, target=target), relax.get_default_pipeline(target)])


RULES = {
    each.name: each
    for each in (
        RuleSet("stock", "TVM's default, the target as detected", lambda machine: machine, _stock_passes),
        RuleSet("dlight-sm90", "TVM's default, the target's name without its letter", plain, _stock_passes),
        RuleSet("ladder", 'relax.get_pipeline("tensorir_ladder")', lambda machine: machine, _ladder_passes),
    )
}


def rule_sets(names: Sequence[str]) -> list[RuleSet]:
    """Find sets of rules by name; IllegalWorkload for another's."""
    for name in names:
        if name not in RULES:
            raise IllegalWorkload(
                "unknown set of rules", value=repr(name), limit=" | ".join(RULES), remedy="choose among these"
            )
    return [RULES[name] for name in names]


def build(model: Model, value: int, rules: RuleSet, machine: GpuSpec, compiler: Compiler | None = None) -> BuiltModel:
    """Build a model for a machine by a set of rules; ``value`` is its extent where that is no symbol.

    With a ``compiler``, what TVM generates is compiled by it, in the build cache; it is the same text with a GPU at
    hand, where TVM asks for the cubin at once, and without, so that a run can be prepared elsewhere. Raises what TVM,
    the rules and the compiler raise.
    """
    started = time.monotonic()
    target, watch = rules.machine(machine).target(), Watch()
    kept: dict[str, tirx.PrimFunc] = {}

    @tvm.transform.module_pass(opt_level=0, name="WholeModel")
    def pipeline(mod: tvm.IRModule, _context: PassContext) -> tvm.IRModule:
        with target:
            mod = rules.passes(target, watch)(mod)
        kept.update(watch.functions(mod))
        return mod

    def deliver(source: str) -> bytes:
        if compiler is None:
            raise ValueError("TVM compiles where it sees a GPU; give a compiler")
        return compile_cubin(source, machine.arch, compiler).data

    module = model.exported(value)[0]
    instruments = [watch.instrument()]
    with import_quickly(), failures_kept() as failures, cuda_compiler(deliver), PassContext(instruments=instruments):
        executable = tvm.compile(module, target, relax_pipeline=pipeline)
    texts = cuda_texts(executable)
    for text in texts if compiler is not None else ():
        compile_cubin(text, machine.arch, compiler)
    kept = {name: function for name, function in kept.items() if name in watch.before}  # others are the host's
    failed = {failure.function: f" ({failure.rule} failed)" for failure in failures}
    functions = {
        name: _described(name, function, watch, target, model, failed.get(name, "")) for name, function in kept.items()
    }
    return BuiltModel(
        model,
        rules.name,
        rules.machine(machine).arch,
        _sums([watch.before[each.name] for each in functions.values() if not each.rule.startswith(OURS)]),
        executable,
        functions,
        "\n".join(texts),
        watch.fused,
        tvm.IRModule(dict(kept)),
        time.monotonic() - started,
        tuple(failures),
    )


def _described(name: str, function: tirx.PrimFunc, watch: Watch, target: Target, model: Model, failed: str) -> Function:
    before = watch.before[name]
    attention = str(before.attrs.get(BY, "")) == ATTENTION or _has_scores(before, model)
    return Function(name, _rule_of(before, function, watch, target) + failed, attention)


def _rule_of(before: tirx.PrimFunc, function: tirx.PrimFunc, watch: Watch, target: Target) -> str:
    """Name who scheduled a function: what our rules left is asked of dlight's once more."""
    if before in watch.taken:
        return watch.taken[before]
    if BY in function.attrs:
        how = str(function.attrs.get(HOW, ""))
        return f"{OURS}: {function.attrs[BY]}{how and f' ({how})'}"[:LONGEST]
    if not is_scheduled(function):
        return UNNAMED
    with dlight_target(target) as named, import_quickly():
        for rule in dlight_rules():
            made = rule.apply(before, named, False)
            if made is not None and tvm_ffi.structural_equal(made.mod["main"].body, function.body):
                return rule.name
    return UNNAMED


def _sums(functions: Iterable[tirx.PrimFunc]) -> str:
    """Return the narrowest dtype that functions add up in."""
    found: list[str] = []

    def look(block: s_tir.SBlock) -> None:
        if any(iterator.iter_type == tirx.IterVar.CommReduce for iterator in block.iter_vars):
            found.extend(str(region.source.dtype) for region in block.writes)

    for function in functions:
        tvm_ffi.structural_walk(function.body, (s_tir.SBlock, look))
    return "float16" if "float16" in found else "float32"


def _has_scores(function: tirx.PrimFunc, model: Model) -> bool:
    """Tell a function by a parameter whose last two extents are both the tokens'."""
    shapes = [parameter.shape for parameter in function.params if hasattr(parameter.ty, "shape")]
    return model.tokens is not None and any(
        len(shape) > 1 and all(_is(extent, model.tokens) for extent in shape[-2:]) for shape in shapes
    )


def _is(extent: Any, wanted: str | int) -> bool:
    if isinstance(extent, tirx.IntImm):
        return int(extent) == wanted
    return isinstance(extent, tirx.Var) and extent.name == wanted


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt for an exception that stands for one: TVM makes an empty error of it in its callbacks."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    interrupts: list[int] = []

    def interrupted(number: int, frame: FrameType | None) -> Any:
        interrupts.append(number)
        return before(number, frame)

    signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    except Exception as error:
        if interrupts:
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, before)


def cuda_texts(executable: Any) -> list[str]:
    """List the CUDA texts of an executable's kernels, one in a module."""
    return [module.inspect_source() for module in _imports(executable.mod) if module.kind == "cuda"]


def _imports(module: Any) -> Iterator[Any]:
    yield module
    for each in module.imports:
        yield from _imports(each)
