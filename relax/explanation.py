"""Say which rule schedules each function of a module, how, and why the rules before it did not."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import ir, tirx
from tvm.target import Target

from tensorir_ladder.relax.pipelines import fuse_operators, rules_with
from tensorir_ladder.relax.rules.for_target import OfDlight, as_cuda, dlight_rules, dlight_target
from tensorir_ladder.relax.rules.rule import BY, HOW, Rule, in_a_line, is_scheduled
from tensorir_ladder.relax.rules.tensor_intrinsics import import_quickly
from tensorir_ladder.schedules.errors import IllegalSchedule

NOBODY, ALREADY = "none", "already scheduled"
FAILED = "failed, a defect of the rule"  # in the place of a reason


@dataclass(frozen=True)
class Row:
    """One function: the rule that takes it, how (engine, tile, ranges, where the rule tells), why others leave it."""

    function: str
    rule: str
    how: str
    left: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        reasons = (f"    {rule}: {reason}" for rule, reason in self.left)
        return "\n".join([f"{self.function}  {self.rule}{self.how and ': '}{self.how}", *reasons])


@dataclass(frozen=True)
class Explanation:
    """The functions of a module, by name; prints as a table."""

    rows: tuple[Row, ...]

    def __getitem__(self, function: str) -> Row:
        """Return the row of a function; KeyError names those there are."""
        found = {row.function: row for row in self.rows}
        if function not in found:
            raise KeyError(f"{function}: the functions are {', '.join(found)}")
        return found[function]

    def __str__(self) -> str:
        wide = max((len(row.function) for row in self.rows), default=0)
        deep = max((len(row.rule) for row in self.rows), default=0)
        lines = []
        for row in self.rows:
            lines.append(f"{row.function:{wide}}  {row.rule:{deep}}  {row.how}".rstrip())
            lines += (f"    {'' if reason.startswith(FAILED) else 'not '}{rule}: {reason}" for rule, reason in row.left)
        return "\n".join(lines)


def explain(mod: ir.IRModule, target: Target | str | dict[str, object], kernels: bool = True) -> Explanation:
    """Say what the pipeline "tensorir_ladder" does with each function of a module for ``target``; changes nothing.

    ``kernels`` is the pipeline's: whether explicit kernels are launched for attention and plain products.

    Operators of Relax are made functions and fused first, as the pipeline does. The rules are really tried, which
    takes as long as compiling with them.

    Raises
    ------
    IllegalSchedule : for a target that is no CUDA GPU with sm_80 or newer.
    """
    target = as_cuda(target)
    ours = rules_with(target, kernels)
    came = {name.name_hint for name in mod.functions}
    mod = fuse_operators(target, kernels)(mod)
    functions = {name.name_hint: function for name, function in mod.functions_items()}
    in_tir = {name: function for name, function in sorted(functions.items()) if isinstance(function, tirx.PrimFunc)}
    rows = (_row(name, function, name in came, target, ours) for name, function in in_tir.items())
    return Explanation(tuple(rows))


def _row(name: str, function: tirx.PrimFunc, came: bool, target: Target, ours: tuple[Rule, ...]) -> Row:
    if is_scheduled(function):
        by, how = (str(function.attrs.get(said, nothing)) for said, nothing in ((BY, ALREADY), (HOW, "")))
        return Row(name, ALREADY if came else by, how, ())
    left: list[tuple[str, str]] = []
    if function.attrs and "target" in function.attrs:
        target = function.attrs["target"]  # for which dlight asks
    for rule in (*ours, *dlight_rules()):
        is_theirs = isinstance(rule, OfDlight)
        try:
            with dlight_target(target) if is_theirs else target as named, import_quickly():
                taken = rule.take(function, named)
            return Row(name, rule.name, str(taken.attrs.get(HOW, "")), tuple(left))
        except IllegalSchedule as reason:
            left += [] if is_theirs else [(rule.name, str(reason))]
        except Exception as defect:  # noqa: BLE001 - the rule leaves the function then, and the next one is asked
            left.append((rule.name, f"{FAILED}: {in_a_line(defect)}"))
    return Row(name, NOBODY, "", tuple(left))
