"""The rules for a target: ours, and dlight's for what these leave."""

from __future__ import annotations

import re

from tvm import tirx
from tvm.s_tir import dlight
from tvm.s_tir.dlight.base import ScheduleRule
from tvm.target import Target

from tensorir_ladder.relax.rules.computations import LEAVE, computations_of, same_number
from tensorir_ladder.relax.rules.contraction import Contraction
from tensorir_ladder.relax.rules.decode import Decode
from tensorir_ladder.relax.rules.depthwise import Depthwise
from tensorir_ladder.relax.rules.elementwise import Elementwise
from tensorir_ladder.relax.rules.rows import Rows
from tensorir_ladder.relax.rules.rule import NotTaken, Rule, prepared
from tensorir_ladder.relax.rules.scans import Scan
from tensorir_ladder.relax.rules.sums import summed_in_float32
from tensorir_ladder.relax.rules.vectors import product
from tensorir_ladder.schedules.cost import Machine
from tensorir_ladder.schedules.errors import IllegalSchedule
from tensorir_ladder.schedules.inspection import is_constant
from tensorir_ladder.schedules.isa import WARP

RULES: tuple[type[Rule], ...] = (Scan, Decode, Contraction, Depthwise, Rows, Elementwise)
OLDEST = 80  # cp.async and mma.sync of float16, bfloat16 and TF32


def rules(target: Target | str | dict[str, object], machine: Machine | None = None) -> tuple[Rule, ...]:
    """List our rules for a target in the order in which they are asked: the first that takes a function has it.

    ::

        with target:
            mod = dlight.ApplyDefaultSchedule(*rules(target))(mod)      # a module of functions
        ex = tvm.compile(mod, target)                                   # what they left is dlight's there

    ``machine`` is the GPU that products' tiles are chosen for, if more is known of it than the target's architecture.

    Raises
    ------
    IllegalSchedule : for a target that is no CUDA GPU with sm_80 or newer.
    """
    as_cuda(target)
    return tuple(Contraction(machine) if rule is Contraction else rule() for rule in RULES)


class OfDlight(Rule):
    """Guard one of dlight's rules as ours are: what it raises is logged, and the next rule takes the function.

    Its GEMV and Reduction are not asked for what they compute wrongly (``docs/tvm.md``): results that repeat what was
    reduced and, by Reduction, rows shorter than a warp.
    """

    def __init__(self, rule: ScheduleRule) -> None:
        self.rule, self.name = rule, f"dlight.gpu.{type(rule).__name__}"

    def take(self, func: tirx.PrimFunc, target: Target) -> tirx.PrimFunc:
        """Return a function as dlight schedules it; NotTaken where its rule does not."""
        func = summed_in_float32(prepared(func))
        if isinstance(self.rule, dlight.gpu.GEMV | dlight.gpu.Reduction):
            _check_reduction(func, WARP if isinstance(self.rule, dlight.gpu.Reduction) else 1)
        made = self.rule.apply(func, target, False)
        if made is None:
            raise NotTaken("dlight's rule is for other functions", remedy="leave it to the next rule")
        schedule = made[0] if isinstance(made, list) else made
        return schedule.mod[schedule.func_working_on]


def _check_reduction(func: tirx.PrimFunc, shortest: int) -> None:
    """Raise NotTaken for a function whose result repeats what it reduces, or that reduces less than ``shortest``."""
    computations = computations_of(func)
    result = product(computations[-1].buffer.shape)
    for reduction in (computation for computation in computations if computation.reduction):
        length = product([iterator.dom.extent for iterator in reduction.reduction])
        if not same_number(product(reduction.buffer.shape), result):
            raise NotTaken("a result that repeats what was reduced", block=reduction.name, remedy=LEAVE)
        if is_constant(length) and int(length) < shortest:
            limit = f"{shortest} elements or more"
            raise NotTaken("short rows", block=reduction.name, value=str(length), limit=limit, remedy=LEAVE)


def dlight_rules() -> tuple[OfDlight, ...]:
    """List dlight's rules, guarded, in the order of TVM's own CUDA pipeline."""
    gpu = dlight.gpu
    return tuple(map(OfDlight, (gpu.Matmul(), gpu.GEMV(), gpu.Reduction(), gpu.GeneralReduction(), gpu.Fallback())))


def dlight_target(target: Target) -> Target:
    """Return the target by a name that dlight understands: it takes "sm_90a" for a GPU without tensor cores."""
    described = dict(target.export())
    if "arch" in described:
        described["arch"] = re.sub(r"\D+$", "", str(described["arch"]))
    return Target(described)


def as_cuda(target: Target | str | dict[str, object]) -> Target:
    """Return a target, or what TVM makes one of; IllegalSchedule for one that is no CUDA GPU with sm_80 or newer."""
    if isinstance(target, (str, dict)):
        target = Target(target)
    named = target.kind.name if isinstance(target, Target) else str(target)
    if named == "cuda":
        named = str(target.attrs.get("arch", "cuda without an arch"))
        if (found := re.match(r"sm_(\d+)", named)) and int(found[1]) >= OLDEST:
            return target
    raise IllegalSchedule(
        "these rules are for CUDA GPUs",
        value=named,
        limit=f"sm_{OLDEST} or newer",
        remedy='name one, Target({"kind": "cuda", "arch": "sm_90a"}), or take dlight\'s rules',
    )
