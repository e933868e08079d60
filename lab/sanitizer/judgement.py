"""Judging if the emulator and compute-sanitizer agree, and naming what the tools cannot see."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tensorir_ladder.lab.sanitizer.subjects import WRONG, Finding
from tensorir_ladder.lab.sanitizer.tools import ALONE, CLEAN, FOUND, HANG, RIGHT, STOPPED, ToolRun
from tensorir_ladder.lab.sanitizer.tools import WRONG as WRONG_OUTPUT

AGREE, CANNOT_SEE, DISAGREE = "agree", "tool cannot see", "disagree"
# The tool that is for a kind of fault; of others the run alone shows it.
TOOL_OF = {
    "race": "racecheck",
    "out of bounds": "memcheck",
    "misaligned": "memcheck",
    "cluster": "memcheck",
    "divergence": "synccheck",
    "barrier": "synccheck",
}
SHOWN_ALONE = {WRONG: (WRONG_OUTPUT,), "deadlock": (HANG, STOPPED, WRONG_OUTPUT)}
# Why no tool sees a kind of fault, where what the emulator says of it has the pattern.
UNSEEN = (
    ("missing proxy fence", "", "no tool knows which accesses a proxy fence makes visible"),
    ("missing wgmma.fence", "", "no tool follows registers that wgmma uses"),
    ("register in flight", "", "no tool follows registers that wgmma uses"),
    ("unawaited", "", "no tool looks for copies still under way when a block ends"),
    ("mbarrier", "", "no tool counts an mbarrier's arrivals and bytes"),
    ("TMA|wgmma|setmaxnreg", "", "no tool knows this instruction's rules"),
    ("race", "of a wgmma", "racecheck does not see what wgmma reads"),
    ("race", "of a TMA load|of a bulk store", "racecheck does not see what TMA's tensor copies read and write"),
    ("race", "mbarrier .* is used before", "racecheck does not see an mbarrier's initialisation"),
    ("out of bounds", "shared memory", "memcheck knows a block's shared memory, not the arrays in it"),
)


def judge(finding: Finding, whole: bool, outcomes: Mapping[str, ToolRun]) -> tuple[str, str]:
    """Give a verdict, and why, on what the emulator and the tools say of one kernel."""
    if whole:
        return _judge_whole(finding, outcomes)
    if not finding.kind:
        return DISAGREE, "the emulator finds nothing in a broken kernel"
    alone = outcomes[ALONE]
    if finding.kind in SHOWN_ALONE:
        return _judge_alone(finding, alone)
    tool = TOOL_OF.get(finding.kind)
    if tool in outcomes and outcomes[tool].status == FOUND:
        return AGREE, f"{tool}: {outcomes[tool].summary}"
    hits = [f"{name}: {outcome.summary}" for name, outcome in outcomes.items() if outcome.status == FOUND]
    seen = "; ".join(hits) or f"alone on the GPU: {alone.status}"
    if reason := unseen(finding):
        return CANNOT_SEE, f"{reason} ({seen})"
    if alone.status == HANG:
        return CANNOT_SEE, f"the kernel hangs on the GPU, and {tool} reports when one ends"
    return DISAGREE, f"{tool} does not find it ({seen})"


def _judge_whole(finding: Finding, outcomes: Mapping[str, ToolRun]) -> tuple[str, str]:
    complaints = [f"emulator: {finding.kind}"] if finding.kind else []
    for tool, outcome in outcomes.items():
        if outcome.status not in (CLEAN, RIGHT):
            complaints.append(f"{tool}: {outcome.summary or outcome.first or outcome.status}")
    return (DISAGREE, "; ".join(complaints)) if complaints else (AGREE, "both find nothing")


def _judge_alone(finding: Finding, alone: ToolRun) -> tuple[str, str]:
    """Judge a deadlock or wrong output by the run without a tool. The GPU has one order of events of many."""
    if alone.status in SHOWN_ALONE[finding.kind]:
        return AGREE, f"alone on the GPU: {alone.status}"
    if finding.kind == "deadlock" and alone.status == RIGHT and not finding.always:
        return CANNOT_SEE, "the emulator comes to it in some orders of events, and the GPU's was another"
    return DISAGREE, f"alone on the GPU: {alone.status}"


def unseen(finding: Finding) -> str:
    """Say why no tool can see a fault; empty where one should."""
    of_kind = [(pattern, why) for kind, pattern, why in UNSEEN if re.fullmatch(kind, finding.kind)]
    return next((why for pattern, why in of_kind if re.search(pattern, finding.text)), "")
