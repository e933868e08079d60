"""Rules by which CUDA text is changed: patterns, and what their matches become. A match changed once is a mutant."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tensorir_ladder.emulator.source import PREAMBLE_END

DROPPED = ""
AROUND = 60  # characters of a line that tell where in it a change is
WGMMA_WAIT = 'asm volatile("wgmma.wait_group.sync.aligned {};" ::: "memory");'
# A name that nobody uses but its own declaration, which TVM leaves behind where it writes the expression out again.
DECLARATION = re.compile(r"^ *(?:u?int|uint64_t|bool) (\w+) = .*;$", re.M)


class Edit(NamedTuple):
    """Matches of ``pattern``, in lines where ``lines`` is found, become each of ``changes``.

    In a change ``\\1`` is a group of the match, and ``<1+2>`` the number in group 1 and two more.
    """

    pattern: str
    changes: tuple[str, ...] = (DROPPED,)
    lines: str = ""


@dataclass(frozen=True)
class MutationRule:
    """A kind of change: its name, a clause that says it, and the edits that make it."""

    name: str
    text: str
    edits: tuple[Edit, ...]


@dataclass(frozen=True)
class Change:
    """One mutant of a text: the characters from ``start`` to ``end`` become ``new``.

    ``line`` counts from 1 on; ``before`` and ``after`` are that line around the change.
    """

    rule: str
    start: int
    end: int
    new: str
    line: int
    before: str
    after: str

    def apply(self, text: str) -> str:
        """Make the mutant."""
        return text[: self.start] + self.new + text[self.end :]


def _call(names: str) -> str:
    return rf"\b(?:{names})\w*\([^;{{]*\);"


def _asm(opcodes: str) -> str:
    return rf'\basm(?: volatile)?\("(?:{opcodes})[^"]*"[^;]*;'


def _off_by(number: str, behind: str = "", step: int = 1) -> tuple[str, str]:
    return rf"\1<{number}+{step}>{behind}", rf"\1<{number}-{step}>{behind}"


_FURTHER = (r"\g<1>1 + ", r"\g<1>8 + ")  # an element; 16 bytes of halves, which stay aligned
RULES = (
    MutationRule(
        "barrier dropped",
        "a barrier of a block, a warpgroup or a cluster is left out",
        (
            Edit(_call("__syncthreads|tvm_builtin_cuda_(?:cta|warpgroup|cluster)_sync")),
            Edit(_asm(r"bar\.|barrier\.")),
        ),
    ),
    MutationRule(
        "barrier's threads or number",
        "a named barrier expects a warp more or less, or has the next number",
        (
            Edit(r"(bar\.sync %0, )(\d+)", _off_by("2", step=32)),
            Edit(r"(tvm_builtin_cuda_warpgroup_sync\()(.*)\);", (r"\g<1>1 + (\2));",)),
        ),
    ),
    MutationRule(
        "fence dropped",
        "a fence is left out",
        (Edit(_call("tvm_builtin_ptx_(?:fence|wgmma_fence)")), Edit(_asm(r"fence|wgmma\.fence"))),
    ),
    MutationRule(
        "wait dropped",
        "nobody waits for copies, stores, multiplications, an mbarrier, a flag or the kernel before",
        (
            Edit(_call(r"tvm_builtin_ptx_\w*wait|pipeline_retire|mbarrier_wait|await_flag")),
            Edit(_asm(r"[\w.]*wait_group|griddepcontrol\.wait")),
            Edit(r"while \(!\w+\([^;]*\)\) \{\}"),
        ),
    ),
    MutationRule(
        "wait count",
        "a wait leaves one group more under way",
        (
            Edit(
                r"\btvm_builtin_ptx_cp_async_wait_group\w*?_(\d)\(\);",
                ('asm volatile("cp.async.wait_group <1+1>;" ::: "memory");',),
            ),
            Edit(
                r"\btvm_builtin_ptx_cp_async_bulk_wait_group\w*?_(\d)\(\);",
                ('asm volatile("cp.async.bulk.wait_group.read <1+1>;" ::: "memory");',),
            ),
            Edit(r"\btvm_builtin_ptx_wgmma_wait_group\w*?_(\d)\(\);", (WGMMA_WAIT.format("<1+1>"),)),
            Edit(r"\bpipeline_retire_(\d)\(\);", (WGMMA_WAIT.format("<1+1>"),)),
            Edit(r"(wait_group[\w.]* )(\d)", (r"\1<2+1>",), lines="asm"),
        ),
    ),
    MutationRule(
        "commit dropped",
        "what was issued is not made a group",
        (Edit(_call(r"tvm_builtin_ptx_\w*commit_group")), Edit(_asm(r"[\w.]*commit_group"))),
    ),
    MutationRule(
        "arrival",
        "an arrival at an mbarrier, or the raising of a flag, is left out or done twice",
        (
            Edit(_call(r"tvm_builtin_ptx_mbarrier_arrive|arrive_(?:at|in)|raise_flag"), (DROPPED, r"\g<0> \g<0>")),
            Edit(_asm(r"mbarrier\.arrive|red\."), (DROPPED, r"\g<0> \g<0>")),
        ),
    ),
    MutationRule(
        "arrivals expected",
        "an mbarrier expects an arrival more or less, or is not initialised",
        (Edit(r"(tvm_builtin_ptx_mbarrier_init\w*\([^;{]*\(uint\))(\d+)\);", (*_off_by("2", ");"), DROPPED)),),
    ),
    MutationRule(
        "bytes expected",
        "an mbarrier expects a piece of 16 bytes more or less",
        (Edit(r"(arrive_expect_tx\w*\([^;{]*\(uint\))(\d+)\);", _off_by("2", ");", 16)),),
    ),
    MutationRule(
        "phase",
        "a phase begins as the other one, does not flip, or the other one is awaited",
        (
            Edit(r"(phase\w*\[0\] = )(\d);", (r"\g<1>1 ^ \2;",)),
            Edit(r"(phase\w*\[0\] \^ )1", (r"\g<1>0",)),
            Edit(r"(mbarrier_wait\w*\(.*, )(\w*phase\w*\[0\])", (r"\g<1>1 ^ \2",)),
            Edit(r'"r"\(parity\)', ('"r"(1 ^ parity)',)),
        ),
    ),
    MutationRule(
        "index of a stage",
        "the ring has a stage more or less, or a stage's index is one off",
        (
            Edit(r"(\w+ \+ )(\d+)(?=\) % \d+\))", _off_by("2")),
            Edit(r"(\((?:\w+|\(\w+ \+ \d+\)) % )(\d+)(?=\))", _off_by("2")),
            Edit(r"(slot\w*\[0\] (?:\+|\*|==) )(\d+)", _off_by("2")),
            Edit(r"(slot\w*\[0\] = )(\d+);", (r"\1<2+1>;",)),
            Edit(r"(last\w*\[0\] \+ )(\d+)", _off_by("2")),
            Edit(r"(\(uint64_t\*\)\w+\)\[)(\d+)(?=\])", _off_by("2")),
        ),
    ),
    MutationRule(
        "place in shared memory",
        "an address in shared memory is one element or 16 bytes further on",
        (
            Edit(
                r"\b((?!\w*local)\w*(?:shared|dyn_shmem)\w*_ptr(?:, | \+ |\[|\)\[|\) \+ ))(?=\(|\d)",
                _FURTHER,
                lines="^(?!.*__shared__)",
            ),
            Edit(r"(pool_buf_ptr\[)", (r"\g<1>16 + ", r"\g<1>128 + "), lines="^(?!.*__shared__)"),
        ),
    ),
    MutationRule(
        "swizzle",
        "a term of a swizzle is left out or one off",
        (
            Edit(r" \^ \(", (" ^ 0 * (", " ^ 1 ^ (")),
            Edit(
                r"(\b)(\d{19})(?=ull\b|ULL\b)",
                tuple(rf"<2{by}>" for by in (f"+{1 << 32}", f"+{1 << 16}", f"-{1 << 62}")),
            ),
            Edit(r"(\(uint64_t\)\(\(.* )(\d+)(?=\)\)\),)", _off_by("2"), lines="wgmma"),
        ),
    ),
    MutationRule(
        "coordinate",
        "a row, a column or an address in global memory is one off",
        (
            Edit(r"\b([AB]\w*_ptr(?:, | \+ |\[))(?=\()", _FURTHER),
            Edit(r"\b((?:matmul|round|C)_ptr(?: \+ |\[))(?=\()", _FURTHER),
            Edit(r'("r"\()(__coords[01])', (r"\g<1>1 + \2", r"\g<1>8 + \2"), lines="cp.async.bulk.tensor"),
            Edit(r"(\(&\([abc]_map\)\)\)\), )", (r"\g<1>8 + ",)),
            Edit(
                r"( \+ | - | \* | / | % | & | >> |, -?)(\d+)(?=\))",
                _off_by("2"),
                lines=r"^ *int (?:row|column|rmod|rdiv|group)\w* =",
            ),
            Edit(r"( \* )(\d+)(?=\))", _off_by("2"), lines=r"[AB]\w*_ptr|_map\)|(?:matmul|round|C)_ptr"),
            Edit(r"((?:row|column)\w*\[0\] = )", (r"\g<1>1 + ",)),
            Edit(r"((?:flags|sums)_ptr\[)(?=\()", (r"\g<1>1 + ",)),
        ),
    ),
    MutationRule(
        "predicate",
        "a condition is dropped or one off",
        (
            Edit(r"\b(if|while) \((?!1\))", (r"\1 (1 || ", r"\1 (0 && ")),
            Edit(r"( <=? | == | != )(\d+)(?=\))", _off_by("2")),
            Edit(r" && (?=\()", (" || ",)),
            Edit(r" (?:!=|==) \(uint\)0", (" == (uint)0", " != (uint)9")),
            Edit(r"(setp\.\w+\.u32 p, %\d, )(\d)", _off_by("2")),
            Edit(r"@!?p ", (DROPPED,), lines="cp.async"),
            Edit(r"\(bool\)([01])", (r"(bool)(1 ^ \1)",)),
        ),
    ),
    MutationRule(
        "extent",
        "a loop, or a number of tiles, has one more or less",
        (
            Edit(r"(; \w+ < )(\d+)(?=;)", _off_by("2"), lines="^(?!.*asm)"),
            Edit(r"(; \w+ < )(\(.*?\)|\w+\[0\])(?=;)", (r"\1 1 + \2", r"\1 \2 - 1")),
            Edit(r"(work_\w+\[0\] = .*?)(\d+)(?=\)|;|,)", _off_by("2")),
        ),
    ),
    MutationRule(
        "registers",
        "a warpgroup keeps its registers, or asks for 8 more or less",
        (
            Edit(_call("tvm_builtin_ptx_setmaxnreg")),
            Edit(r"(setmaxnreg[\w.]* )(\d+)", _off_by("2", step=8)),
        ),
    ),
    MutationRule(
        "flag's order",
        "a flag is raised without releasing, or seen without acquiring",
        (Edit(r"\b(red\.|st\.|ld\.)(?:release|acquire)", (r"\1relaxed",)),),
    ),
    MutationRule(
        "block of a cluster",
        "a block is left out of a multicast, or another's is meant, or loads out of its turn",
        (
            Edit(r"(\(ushort\)\()(\d+)(?= <<)", _off_by("2")),
            Edit(r"(\(ushort\)\(\d+ << )(?=\()", (r"\g<1>1 + ",)),
            Edit(r"(if \(\(k_tile\w* [&%] )(\d+)(?=\) ==)", (r"\1<2+1>",)),
            Edit(r'"h"\(__cta_mask\)', ('"h"((uint16_t)(1 & __cta_mask))', '"h"((uint16_t)(2 & __cta_mask))')),
            Edit(r"\(\(int\)tvm_builtin_cluster_ctaid_x\(\)\)", ("0", r"(1 ^ \g<0>)")),
        ),
    ),
)


def changes_of(text: str) -> Iterator[Change]:
    """List all mutants of CUDA text, by rule, from its preamble on; names that are declared only are left alone."""
    lines = _lines(text)
    for rule in RULES:
        for edit in rule.edits:
            for start, end, number in lines:
                line = text[start:end]
                if not re.search(edit.lines, line):
                    continue
                for match in re.finditer(edit.pattern, line):
                    for change in edit.changes:
                        new = _expanded(change, match)
                        if new == match.group():
                            continue
                        left, right = line[max(0, match.start() - AROUND) : match.start()], line[match.end() :][:AROUND]
                        texts = (left.lstrip() + middle + right for middle in (match.group(), new))
                        yield Change(rule.name, start + match.start(), start + match.end(), new, number, *texts)


def _expanded(change: str, match: re.Match[str]) -> str:
    """Put a match's groups, and numbers reckoned from them, into a change."""
    pieces = re.split(r"<(\d)([+-]\d+)>", change)
    for at in range(0, len(pieces), 3):
        pieces[at] = match.expand(pieces[at])
    for at in range(1, len(pieces), 3):
        pieces[at] = str(int(match.group(int(pieces[at]))) + int(pieces[at + 1]))
        pieces[at + 1] = ""
    return "".join(pieces)


def _lines(text: str) -> list[tuple[int, int, int]]:
    """List the lines that can be changed: where they begin and end, and their number."""
    unused = {name for name in DECLARATION.findall(text) if len(re.findall(rf"\b{name}\b", text)) == 1}
    found, start, first = [], 0, text.index(PREAMBLE_END) + len(PREAMBLE_END)
    for number, line in enumerate(text.split("\n"), 1):
        declared = DECLARATION.match(line)
        if start >= first and not (declared and declared.group(1) in unused):
            found.append((start, start + len(line), number))
        start += len(line) + 1
    return found
