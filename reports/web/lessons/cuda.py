"""A kernel's main loop to read: indices without casts and needless brackets, repetitions folded, notes at its parts."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tensorir_ladder.harness.build import Kernel

STRUCTURE, INDEX, COPY, WAIT, BARRIER, READ, MULTIPLY, OTHER = KINDS = (
    "structure",
    "index",
    "copy",
    "wait",
    "barrier",
    "read",
    "multiply",
    "other",
)
INTO_SHARED = r"^(?:\(\w+\) )?\w*(?:shared|shmem)\w*\["
INTO_LOCAL = r"^(?:\(\w+\) )?\w*local\w*\["
# What a line does, the first that matches, with what is said of it; "{}" is the pattern's own group.
MEANINGS = (
    (r"^(?:for|if|while|else|\}|\{|#pragma)", STRUCTURE, ""),
    (r"^(?:alignas\(\d+\) )?(?:int|uint\w*|float|bool|half\d*|uchar) \w+(?:\[\d+\])?(?: =|;)", INDEX, ""),
    (r"^keep_", OTHER, "no instruction: tells the compiler that the sums change behind its back"),
    (r"^tma_load", COPY, "one thread asks TMA for a whole box, which lands by itself"),
    (r"^tma_store", OTHER, "one thread asks TMA to store a box of results"),
    (r"arrive_expect_tx", COPY, "announces to the stage's mbarrier how many bytes will come"),
    (r"^cp_async_\d+\(", COPY, "starts a copy to shared memory and goes on at once"),
    (r"cp_async_commit_group", COPY, "closes a group: what was started since the last one is awaited together"),
    (r"^cp_async_wait_group_(\d+)", WAIT, "until all but {} of the groups of copies have landed"),
    (r"wgmma_wait_group_(\d+)|pipeline_retire_(\d+)", WAIT, "until all but {} of the wgmma groups are through"),
    (r"mbarrier_wait\(&full", WAIT, "until the stage's bytes are there"),
    (r"mbarrier_wait\(&empty", WAIT, "until nobody reads the stage any more"),
    (r"mbarrier_wait", WAIT, "until the barrier's phase is over"),
    (r"pipeline_arrived", OTHER, "no instruction: keeps the reads behind the wait"),
    (r"wgmma_fence|tcgen05_fence", OTHER, "no work: orders what follows behind what was waited for"),
    (r"^phase = phase \^ 1", OTHER, "the one phase bit flips: all stages' barriers are in their next phase"),
    (r"^\w+_phase = \w+_phase \^ 1", OTHER, "back at stage 0: the role's phase bit flips"),
    (r"wgmma_commit_group", MULTIPLY, "closes a group of multiplications, to be awaited later"),
    (r"tcgen05_commit", MULTIPLY, "has an mbarrier told when all of that is through"),
    (r"^wgmma_m64n(\d+)k64", MULTIPLY, "64 × {} × 64 by four warps, as four instructions; returns at once"),
    (r"^wgmma_m64n(\d+)k16", MULTIPLY, "64 × {} × 16 by four warps; returns at once"),
    (r"^tcgen05_mma", MULTIPLY, "one thread's instruction, for all 128 rows; sums in tensor memory; returns at once"),
    (r"^mbarrier_arrive", BARRIER, "says that this warp is through with the stage"),
    (r"^__syncthreads", BARRIER, "all threads of the block meet"),
    (r"^ldmatrix", READ, "a warp reads four 8 × 8 pieces of a fragment from shared memory"),
    (r"^mma_", MULTIPLY, "a warp multiplies 16 × 8 × 16"),
    (INTO_SHARED + r".*= (?:\(\w+\) )?\w+\[", COPY, "loads, waits for the value, and stores it to shared memory"),
    (r"pipeline_read_", READ, "reads operands from shared memory, by an address, so that TVM places no barrier for it"),
    (r"^\w*local(?:\[.*\])? = .* \* ", MULTIPLY, "multiply-adds of the thread's own outputs"),
    (INTO_LOCAL + r".*= .*(?:shared|shmem)", READ, "reads operands from shared memory"),
)
CASTS = r"u?int(?:8|16|32|64)?(?:_t)?|unsigned long long|unsigned int|void\*|bool|half\*|float\*"
RENAMED = (
    (r"\(\(int\)(threadIdx|blockIdx)\.(\w)\)", lambda found: found[1][0] + found[2]),
    (r"\(\(uint64_t\*\)\w+\)\[", "mbarrier["),
    (rf"\((?:{CASTS})\)(?=[\w(&-])", ""),
    (r"(\d)(?:ULL|u)\b", r"\1"),
    (r"tvm_builtin_cuda_cvta_generic_to_shared\(", "here("),
    (r"\(&\(", "(at("),
    (r"tvm_builtin_ptx_cp_async_bulk_tensor_g2s\w*\(", "tma_load("),
    (r"tvm_builtin_ptx_cp_async_bulk_tensor_s2g\w*\(", "tma_store("),
    (r"tvm_builtin_ptx_wgmma_\w*?(m64n\d+k16)\w*\(", r"wgmma_\1("),
    (r"\bwgmma_(m64n\d+k64)\w*\(", r"wgmma_\1("),
    (r"tvm_builtin_ptx_(tcgen05_mma|tcgen05_commit|tcgen05_fence|wgmma_fence|wgmma_commit_group)\w*\(", r"\1("),
    (r"tvm_builtin_ptx_(wgmma_wait_group|cp_async_wait_group)\w*?_(\d+)\(", r"\1_\2("),
    (r"tvm_builtin_ptx_(mbarrier_arrive_expect_tx|mbarrier_arrive|cp_async_commit_group)\w*\(", r"\1("),
    (r"ptx_cp_async_legacy_c[ag]_(\d+)\w*\(", r"cp_async_\1("),
    (r"tensor_core_load(?:_hidden)?(_transposed)?\(", r"ldmatrix\1("),
    (r"tensor_core_m(\d+)n(\d+)k(\d+)\w*\(", r"mma_m\1n\2k\3("),
    (r"tvm_builtin_cuda_cta_sync", "__syncthreads"),
    (r"tvm_builtin_elect_one_sync_op\(\) != 0", "elect_one()"),
    (r"tvm_builtin_(?:ptx_|cuda_)?", ""),
    (r"_ptr\b", ""),
    (r"0x0p\+0f/\*0\.000000e\+00\*/", "0"),
    (r"\b(ax\d(?:_\d)?(?:_ax\d)*_fused|ax\d|[ijk]_\d|k_tile)(?:_\d+)+\b", r"\1"),
)
UNNAMED = re.compile(r"\(?\b(?:k_0|ax5|turn|k_tile)\b(?: \+ \d+)?\)? % \d+|\(?\bax5\b(?: \+ \d+)?\)? & \d+")
SHORTEST = 3  # lines of a repetition, at least
ROLES = ("full", "empty", "done")  # mbarriers of a ring, one after the other in shared memory, a stage each


@dataclass(frozen=True)
class CudaLine:
    """A line to show: its text, what it does, and a note; ``repeats`` lines like it were left out behind it."""

    text: str
    kind: str
    note: str = ""
    repeats: int = 0


def main_loops(kernel: Kernel, most: int = 48) -> list[list[CudaLine]]:
    """Make the loops that matter readable, each in no more than ``most`` lines: the k loop, or that of each role."""
    waiting = [text for text in _innermost(kernel.body) if "mbarrier_wait" in text] if kernel.meets_at_mbarriers else []
    found = waiting or [kernel.loop_body]
    scalars = set(re.findall(r"\b(\w+?)(?:_ptr)?\[1\];", kernel.body))
    bases = [int(number) for number in re.findall(r"uint64_t\*\)\w+\)\[\(?(?:\w+\[0\] \+ )?(\d+)\)?\]", kernel.body)]
    base = min(bases, default=0)
    return [_readable_loop(_dedented(text), most, scalars, base, kernel.case.stages_built) for text in found]


def _readable_loop(text: str, most: int, scalars: set[str], base: int, stages: int) -> list[CudaLine]:
    named = {number: _barrier_name(number - base, stages) for number in range(base, base + stages * len(ROLES))}
    lines = [_line(line, scalars, named) for line in text.splitlines() if line.strip()]
    everything = "\n".join(line.text for line in lines)
    lines = [line for line in lines if not _unused(line, everything)]
    folded = _said_once(_without_repetition(_first_tile(list(_folded(lines)))))
    if len(folded) <= most:
        return folded
    return [*folded[:most], CudaLine(f"… {len(folded) - most} more parts", OTHER)]


def _innermost(body: str) -> Iterator[str]:
    """Yield the loops of a kernel that wait, without those around them."""
    lines = body.splitlines()
    for begin, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if not re.match(r"\s*(?:for|while) .*\{$", line):
            continue
        end = next(n for n in range(begin + 1, len(lines)) if lines[n].startswith(" " * indent + "}"))
        inside = "\n".join(lines[begin + 1 : end])
        if not any("mbarrier_wait" in other for other in _innermost(inside)):
            yield "\n".join(lines[begin : end + 1])


def _dedented(text: str) -> str:
    lines = text.splitlines()
    least = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    return "\n".join(line[least:] for line in lines)


def _barrier_name(place: int, stages: int) -> str:
    return f"{ROLES[place // stages]}[{place % stages}]"


def readable(text: str, scalars: set[str] = frozenset(), barriers: Mapping[int, str] | None = None) -> str:
    """Rewrite a line of generated CUDA without casts, needless brackets and lists of registers.

    ``scalars`` are arrays of one element, whose index is left out; ``barriers`` names mbarriers by their number.
    """
    indent, own = text[: len(text) - len(text.lstrip())], text.strip()
    for pattern, by in RENAMED:
        own = re.sub(pattern, by, own)
    own = re.sub(r"\b(\w+)\[0\](?:, \1\[\d+\])+, \1\[(\d+)\]", r"\1_0_to_\2", own)
    own = re.sub(r"\b(\w+)\[0\]", lambda found: found[1] if found[1] in scalars else found[0], own)
    own = _without_brackets(own)
    own = re.sub(r"\b(\w+)_0_to_(\d+)\b", r"\1[0 … \2]", own)
    for number, name in (barriers or {}).items():
        own = own.replace(f"mbarrier[{number}]", name)
        own = re.sub(rf"mbarrier\[(\w+) \+ {number}\]", lambda found, n=name: f"{n.split('[')[0]}[{found[1]}]", own)
    return indent + own


def _line(text: str, scalars: set[str], barriers: Mapping[int, str]) -> CudaLine:
    shown = readable(text, scalars, barriers)
    own = shown.strip()
    for pattern, kind, note in MEANINGS:
        if match := re.search(pattern, own):
            told = note.format(*(group for group in match.groups() if group is not None))
            stage = UNNAMED.search(own) if kind in (COPY, READ, MULTIPLY) else None
            return CudaLine(shown, kind, f"{told}; stage {stage[0]}" if stage else told)
    return CudaLine(shown, OTHER)


def _without_brackets(statement: str) -> str:
    """Let Python's own printer leave out the brackets that an expression does not need."""
    if match := re.match(r"(if|while) \((.*)\) (\{.*)$", statement):
        return f"{match[1]} ({_expression(match[2])}) {match[3]}"
    if statement.startswith(("for ", "}", "else", "alignas", "#", "//")):
        return statement
    typed = re.match(r"(?:const )?(?:int|uint\w*|float|bool|half\d*) (?=\w+ = )", statement)
    head, end = typed[0] if typed else "", ";" if statement.endswith(";") else ""
    sides = statement[len(head) : len(statement) - len(end)].split(" = ")
    return head + " = ".join(map(_expression, sides)) + end


def _expression(text: str) -> str:
    vectors = re.sub(r"\*\((\w+)\*\)\(", r"\1_at(", text.replace("&&", " and "))
    try:
        tree = _Pointers().visit(ast.parse(vectors, mode="eval"))
    except SyntaxError:  # what only C has
        return text
    return ast.unparse(tree).replace(" and ", " && ")


class _Pointers(ast.NodeTransformer):
    """Writes what stands for C's pointers: ``float4_at(A + i)`` as ``(float4) A[i]``, ``at(x)`` as ``&x``."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name == "here" and len(node.args) == 1:
            return node.args[0]
        if name == "at" and len(node.args) == 1:
            return ast.Name(f"&{ast.unparse(node.args[0])}")
        if re.fullmatch(r"cp_async_\d+", name) and len(node.args) == 4:
            to, at, source, place = map(ast.unparse, node.args)
            return ast.Name(f"{name}(&{to}[{at}], &{source}[{place}])")
        if name.endswith("_at") and isinstance(node.args[0], ast.BinOp):
            array, index = node.args[0].left, node.args[0].right
            return ast.Name(f"({name[:-3]}) {ast.unparse(array)}[{ast.unparse(index)}]")
        return node


def _unused(line: CudaLine, everything: str) -> bool:
    """Tell if a line only names an index that nothing reads: TVM leaves such behind."""
    name = re.match(r"\s*\w+ (cse_v\w+) = ", line.text)
    return bool(name) and len(re.findall(rf"\b{name[1]}\b", everything)) == 1


def _folded(lines: list[CudaLine]) -> Iterator[CudaLine]:
    """Show the first of neighbouring lines that do the same by the same name."""
    for (kind, _), group in groupby(lines, key=lambda line: (line.kind, _callee(line))):
        own = list(group)
        if kind == STRUCTURE:
            yield from own
        else:
            yield replace(own[0], repeats=len(own) - 1)


def _callee(line: CudaLine) -> str:
    found = re.match(r"\s*(?:\(\w+\) )?(\w*)", line.text)
    return found[1] if found and line.kind != INDEX else ""


def _first_tile(lines: list[CudaLine]) -> list[CudaLine]:
    """Keep of a ring's turn that is written out the first k tile, from one wait for a tile to the next."""
    waits = [place for place, line in enumerate(lines) if line.kind == WAIT]
    same = [place for place in waits if lines[place].note == lines[waits[0]].note]
    if "int turn" not in lines[0].text or len(same) < 2:
        return lines
    length = same[1] - same[0]
    told = CudaLine(f"  … as often as there are stages: {len(same)} k tiles in a turn", OTHER)
    behind = [line for line in lines[1 + len(same) * length : -1] if line.text.strip().startswith("phase")]
    return [*lines[: 1 + length], told, *behind, lines[-1]]


def _without_repetition(lines: list[CudaLine]) -> list[CudaLine]:
    """Keep a part with a multiplication once where it is written out several times with other constants."""
    while (shorter := _with_one_repetition_less(lines)) != lines:
        lines = shorter
    return lines


def _with_one_repetition_less(lines: list[CudaLine]) -> list[CudaLine]:
    shapes = [(line.kind, _callee(line)) for line in lines]
    for begin in range(len(lines)):
        for period in range(SHORTEST, (len(lines) - begin) // 2 + 1):
            part, times = shapes[begin : begin + period], 1
            while shapes[begin + times * period : begin + (times + 1) * period] == part:
                times += 1
            if times > 1 and MULTIPLY in {kind for kind, _ in part}:
                more = "once more" if times == 2 else f"{times - 1} times more"
                indent = lines[begin].text[: len(lines[begin].text) - len(lines[begin].text.lstrip())]
                told = CudaLine(f"{indent}… {more}, with the constants of the next stages or steps", OTHER)
                return [*lines[: begin + period], told, *lines[begin + times * period :]]
    return lines


def _said_once(lines: list[CudaLine]) -> list[CudaLine]:
    """Keep a note only where it stands for the first time."""
    said: set[str] = set()
    found = []
    for line in lines:
        found.append(replace(line, note="") if line.note in said else line)
        said.add(line.note)
    return found
