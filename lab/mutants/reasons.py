"""Why mutants that live are harmless: by what is proved of them, or by reasons that somebody has found, one by one."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tensorir_ladder.lab.mutants.running import EQUAL, ORDERED, SAME, MutantOutcome
from tensorir_ladder.lab.mutants.subjects import SUBJECTS

DOES_THE_SAME = "every thread does the same as before, to the last bit of the output"
STILL_ORDERED = (
    "every thread accesses the same, and what is left orders all accesses that must be: vector clocks found no race"
)
# Rules that change no more than who waits for whom, which races tell; a fence's kinds and a count's drift they do not.
ORDER_ALONE = ("barrier dropped", "barrier's threads or number", "wait dropped", "wait count", "commit dropped")
NEVER_USED = (
    "what it reads or writes in other places is in range, not raced for, and never used: the output is the same to the "
    "last bit for all operands drawn, infinite ones too, and no address follows from operands"
)
# Rules that change which data go where, all of which the output tells.
DATA_ALONE = ("index of a stage", "place in shared memory", "swizzle", "coordinate", "predicate", "extent")


@dataclass(frozen=True)
class Reason:
    """Why a rule's change is harmless, where the text before and after it, joined by " -> ", is like ``pattern``.

    ``steps`` are those it was looked at in, ``variants`` too where not all are meant.
    """

    rule: str
    pattern: str
    text: str
    steps: tuple[int, ...]
    variants: tuple[str, ...] = ()

    def fits(self, outcome: MutantOutcome) -> bool:
        """Tell whether a mutant that lived is one of these."""
        subject = SUBJECTS[outcome.subject]
        return (
            outcome.rule == self.rule
            and subject.step in self.steps
            and (not self.variants or subject.variant in self.variants)
            and re.search(self.pattern, f"{outcome.before} -> {outcome.after}") is not None
        )


_ROLES = (12, 13)
REASONS = (
    Reason(
        "registers",
        r"setmaxnreg_inc\w*\(\); -> $",
        "consumers keep what they are launched with, which the CUDA compiler fits their code into: slower, and right",
        _ROLES,
    ),
    Reason(
        "registers",
        r"(inc|dec)\.sync\.aligned\.u32 (\d+);.* -> .*\1\.sync\.aligned\.u32 (?!\2;)",
        "the pool has what all ask for, and the CUDA compiler fits each role's code into what the role has",
        _ROLES,
    ),
    Reason(
        "registers",
        r"setmaxnreg_dec\w*\(\); -> $",
        "beside one group of consumers the block has registers for all, even if the producer gives none back",
        _ROLES,
    ),
    Reason(
        "block of a cluster",
        r"if \(\(k_tile & 1\) == .* -> if \(\(k_tile & 1\) == \(+1 \^ ",
        "each of two blocks loads in the other's turn: of every k tile one of them loads what both read",
        (12,),
    ),
    Reason(
        "fence dropped",
        r"wgmma_fence\w*\(\); -> $",
        "since the last wgmma.fence nothing but wgmma of the same shape has touched the sums, which needs none",
        (10, 11, 12, 13),
    ),
)


def reason_for(outcome: MutantOutcome) -> str:
    """Say why a mutant that lived is harmless; "" where nobody knows."""
    if outcome.found == SAME:
        return DOES_THE_SAME
    if outcome.found == ORDERED and outcome.rule in (*ORDER_ALONE, *DATA_ALONE):
        return STILL_ORDERED
    if outcome.found == EQUAL and outcome.rule in DATA_ALONE:
        return NEVER_USED
    return next((reason.text for reason in REASONS if reason.fits(outcome)), "")
