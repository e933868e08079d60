"""Translating PTX inside ``asm`` statements to calls of the runtime, by a table of instructions.

An ``asm`` statement's text is split into PTX statements. Predicates (``@p``), declared registers and labels become
C++'s ``if``, variables and labels; an instruction becomes a call of what :data:`INSTRUCTIONS` names for its opcode, its
operands in their order: ``%n`` as the C++ expression that the statement gives for it, ``{...}`` as a list, ``[a]`` as
``a``, ``[a, {...}]`` as two, ``_`` as nothing. A new instruction is a line here, and a function of that name in
``device/``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from tensorir_ladder.emulator.errors import UnknownInstruction

SHARED = r"\.shared(?:::cta)?"
TMA = r"cp\.async\.bulk\.tensor\.(\d)d"
HINT = r"(?:\.L2::\w+)*"  # whose policy, behind the other operands, changes no result
# Opcodes, as patterns of the whole, and what is called; \1 is the pattern's first group.
INSTRUCTIONS = {
    rf"cp\.async\.c[ag]{SHARED}\.global{HINT}": "emu::cp_async",
    r"cp\.async\.commit_group": "emu::cp_async_commit",
    r"cp\.async\.wait_group": "emu::cp_async_wait",
    r"cp\.async\.wait_all": "emu::cp_async_wait_all",
    rf"cp\.async\.mbarrier\.arrive\.noinc{SHARED}\.b64": "emu::cp_async_arrive<true>",
    rf"cp\.async\.mbarrier\.arrive{SHARED}\.b64": "emu::cp_async_arrive<false>",
    rf"st{SHARED}(?:\.v[24])?\.[bu]32": "emu::st_shared<uint>",
    rf"st{SHARED}(?:\.v[24])?\.f32": "emu::st_shared<float>",
    rf"st{SHARED}(?:\.v2)?\.[bu]64": "emu::st_shared<uint64_t>",
    rf"ld{SHARED}(?:\.v[24])?\.[bu]32": "emu::ld_shared<uint>",
    rf"ld{SHARED}(?:\.v[24])?\.f32": "emu::ld_shared<float>",
    r"ld\.shared::cluster(?:\.v[24])?\.[bu]32": "emu::ld_shared<uint>",
    r"ld\.shared::cluster(?:\.v[24])?\.f32": "emu::ld_shared<float>",
    r"st\.shared::cluster(?:\.v[24])?\.[bu]32": "emu::st_shared<uint>",
    r"st\.shared::cluster(?:\.v[24])?\.f32": "emu::st_shared<float>",
    rf"ldmatrix\.sync\.aligned\.m8n8\.x[124]{SHARED}\.b16": "emu::ldmatrix<false>",
    rf"ldmatrix\.sync\.aligned\.m8n8\.x[124]\.trans{SHARED}\.b16": "emu::ldmatrix<true>",
    rf"stmatrix\.sync\.aligned\.m8n8\.x[124]{SHARED}\.b16": "emu::stmatrix<false>",
    rf"stmatrix\.sync\.aligned\.m8n8\.x[124]\.trans{SHARED}\.b16": "emu::stmatrix<true>",
    r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.f16\.f16\.f32": "emu::mma<emu::F16, 16>",
    r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.bf16\.bf16\.f32": "emu::mma<emu::BF16, 16>",
    r"mma\.sync\.aligned\.m16n8k8\.row\.col\.f32\.tf32\.tf32\.f32": "emu::mma<emu::TF32, 8>",
    r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.f16\.f16": r"emu::wgmma<emu::F16, \1>",
    r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.bf16\.bf16": r"emu::wgmma<emu::BF16, \1>",
    r"wgmma\.fence\.sync\.aligned": "emu::wgmma_fence",
    r"wgmma\.commit_group\.sync\.aligned": "emu::wgmma_commit",
    r"wgmma\.wait_group\.sync\.aligned": "emu::wgmma_wait",
    r"ex2\.approx\.f32": "emu::ex2<false>",
    r"ex2\.approx\.ftz\.f32": "emu::ex2<true>",
    r"tanh\.approx\.f32": "emu::tanh_approx",
    r"cvt\.rna\.tf32\.f32": "emu::cvt_rna_tf32",
    r"cvt\.rn\.f16x2\.f32": "emu::cvt_f16x2",
    r"cvt\.rn\.bf16x2\.f32": "emu::cvt_bf16x2",
    r"add\.rn\.f16x2": "emu::add_pairs<half>",
    r"add\.rn\.bf16x2": "emu::add_pairs<nv_bfloat16>",
    r"max\.NaN\.f16x2": "emu::max_pairs<half>",
    r"max\.NaN\.bf16x2": "emu::max_pairs<nv_bfloat16>",
    r"selp\.[bsuf](?:32|64)": "emu::selp",
    r"st\.global(?:\.v[24])?\.[bu]32": "emu::st_global<uint>",
    r"st\.global(?:\.v[24])?\.f32": "emu::st_global<float>",
    r"st\.global(?:\.v[24])?\.[bu]16": "emu::st_global<ushort>",
    r"st\.global(?:\.v2)?\.[bu]64": "emu::st_global<uint64_t>",
    r"red(?:\.relaxed)?(?:\.(?:gpu|sys))?\.global\.add\.f32": "emu::red_add_float",
    r"red\.release\.(?:gpu|sys)\.global\.add\.[us]32": "emu::red_add<true>",
    r"red\.relaxed\.(?:gpu|sys)\.global\.add\.[us]32": "emu::red_add<false>",
    r"st\.release\.(?:gpu|sys)\.global\.[bus]32": "emu::st_flag<true>",
    r"st\.relaxed\.(?:gpu|sys)\.global\.[bus]32": "emu::st_flag<false>",
    r"ld\.acquire\.(?:gpu|sys)\.global\.[bus]32": "emu::ld_flag<true>",
    r"ld\.relaxed\.(?:gpu|sys)\.global\.[bus]32": "emu::ld_flag<false>",
    r"mov\.[bsu](?:32|64)": "emu::mov",
    r"setp\.(\w\w)\.[bsu](?:32|64)": r"emu::setp_\1",
    r"setp\.(\w\w)\.and\.u32": r"emu::setp_\1_and",
    r"add\.s32": "emu::add",
    r"mad\.wide\.s32": "emu::mad_wide",
    r"fence\.proxy\.async(?:\.shared::c\w+|\.global)?": "emu::fence_proxy",
    r"fence\.mbarrier_init\.release\.cluster": "emu::fence_mbarrier_init",
    rf"mbarrier\.init{SHARED}\.b64": "emu::mbarrier_init",
    rf"mbarrier\.inval{SHARED}\.b64": "emu::mbarrier_invalidate",
    r"mbarrier\.arrive(?:\.release\.c\w+)?\.shared(?:::c\w+)?\.b64": "emu::mbarrier_arrive",
    r"mbarrier\.arrive\.expect_tx(?:\.release\.c\w+)?\.shared(?:::c\w+)?\.b64": "emu::mbarrier_arrive_expect",
    r"mbarrier\.expect_tx(?:\.relaxed\.c\w+)?\.shared(?:::c\w+)?\.b64": "emu::mbarrier_expect",
    rf"mbarrier\.try_wait\.parity(?:\.acquire\.c\w+)?{SHARED}\.b64": "emu::mbarrier_try_wait",
    rf"mbarrier\.test_wait\.parity(?:\.acquire\.c\w+)?{SHARED}\.b64": "emu::mbarrier_test_wait",
    r"mapa(?:\.shared::cluster)?\.u32": "emu::mapa",
    rf"{TMA}\.shared::c\w+\.global(?:\.tile)?\.mbarrier::complete_tx::bytes{HINT}": r"emu::tma_load<\1>",
    rf"{TMA}\.shared::cluster\.global(?:\.tile)?\.mbarrier::complete_tx::bytes\.multicast::cluster{HINT}": (
        r"emu::tma_load_multicast<\1>"
    ),
    rf"{TMA}\.global\.shared::cta(?:\.tile)?\.bulk_group": r"emu::tma_store<\1>",
    r"cp\.reduce\.async\.bulk\.tensor\.(\d)d\.global\.shared::cta\.add(?:\.tile)?\.bulk_group": (
        r"emu::tma_store<\1, true>"
    ),
    r"cp\.async\.bulk\.shared::c\w+\.global\.mbarrier::complete_tx::bytes": "emu::bulk_load",
    r"cp\.async\.bulk\.commit_group": "emu::bulk_commit",
    r"cp\.async\.bulk\.wait_group": "emu::bulk_wait<false>",
    r"cp\.async\.bulk\.wait_group\.read": "emu::bulk_wait<true>",
    r"prefetch(?:u)?\.[\w.:]+": "emu::nothing",
    r"griddepcontrol\.wait": "emu::wait_for_previous",
    r"griddepcontrol\.launch_dependents": "emu::nothing",
    r"setmaxnreg\.inc\.sync\.aligned\.u32": "emu::set_registers<true>",
    r"setmaxnreg\.dec\.sync\.aligned\.u32": "emu::set_registers<false>",
    r"elect\.sync": "emu::elect",
    r"(?:bar|barrier\.cta)\.sync(?:\.aligned)?": "emu::bar_sync",
    r"barrier\.sync(?:\.aligned)?": "emu::bar_sync",
    r"(?:bar|barrier)(?:\.cta)?\.arrive(?:\.aligned)?": "emu::bar_arrive",
    r"bar\.warp\.sync": "emu::sync_warp",
    r"barrier\.cluster\.arrive(?:\.release)?(?:\.aligned)?": "emu::cluster_arrive<true>",
    r"barrier\.cluster\.arrive\.relaxed(?:\.aligned)?": "emu::cluster_arrive<false>",
    r"barrier\.cluster\.wait(?:\.acquire)?(?:\.aligned)?": "emu::cluster_wait",
}
SPECIAL_REGISTERS = {
    "%cluster_ctarank": "emu::cluster_rank()",
    "%globaltimer": "emu::global_timer()",
    "%clock64": "emu::global_timer()",
    "%smid": "0",
    "%laneid": "emu::lane()",
}
REGISTER_TYPES = {"pred": "bool", "b32": "uint", "u32": "uint", "s32": "int", "b64": "uint64_t", "u64": "uint64_t"}
LITERAL = re.compile(r'"((?:[^"\\]|\\.)*)"')


@dataclass
class _Asm:
    """One statement: PTX, and the C++ expressions of its operands, outputs first."""

    text: str
    operands: list[str]
    outputs: int
    declared: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    lent: list[str] = field(default_factory=list)

    def operand(self, text: str) -> str:
        """Translate a PTX operand."""
        text = text.strip()
        if text.startswith("{"):
            items = _split(text[1:-1], ",")
            numbers = [int(item.strip()[1:]) for item in items if re.fullmatch(r"\s*%\d+\s*", item)]
            maker = "outs" if numbers and len(numbers) == len(items) and max(numbers) < self.outputs else "values"
            return f"emu::{maker}({', '.join(self.operand(item) for item in items)})"
        if text.startswith("["):
            return ", ".join(self.operand(part) for part in _split(text[1:-1], ","))
        if match := re.fullmatch(r"%(\d+)", text):
            return f"({self.operands[int(match.group(1))]})"
        if text in SPECIAL_REGISTERS:
            return SPECIAL_REGISTERS[text]
        return text.removeprefix("%")

    def instruction(self, text: str) -> str:
        """Translate a PTX instruction to a C++ statement."""
        opcode, rest = re.fullmatch(r"([^\s{\[]+)\s*(.*)", text, re.S).groups()  # TVM leaves no space before some lists
        if opcode.startswith("bra"):
            return f"goto {rest.strip()};"
        called = next((m.expand(name) for p, name in INSTRUCTIONS.items() if (m := re.fullmatch(p, opcode))), None)
        if called is None:
            raise UnknownInstruction(f"the emulator has no {opcode}; add it to INSTRUCTIONS in emulator/ptx.py")
        operands = [part.strip().rpartition("_|")[2] for part in _split(rest, ",")] if rest.strip() else []
        # In an accumulating instruction the same registers are written and read: written as d, read as c.
        arguments = [self.operand(part) for part in operands if part != "_"]
        if called.startswith("emu::mma<"):
            arguments[-1] = arguments[-1].replace("emu::outs", "emu::values")
        if called.startswith("emu::wgmma<") and operands[1].startswith("{"):
            self.lent += [self.operand(part).strip("()") for part in _split(operands[1][1:-1], ",")]
            arguments[1] = re.sub(r"^emu::\w+", "emu::lent", arguments[1])
        return f"{called}({', '.join(arguments)});"

    def statements(self) -> Iterator[str]:
        """Yield the C++ statements; declarations, labels and registers that wgmma reads are collected on the way."""
        for statement in _ptx_statements(self.text):
            label = re.fullmatch(r"(\w+):", statement)
            declaration = re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*)", statement)
            guard = re.fullmatch(r"@(!?)%?(\w+)\s+(.*)", statement)
            if label:
                self.labels.append(label.group(1))
                yield f"{statement};"
            elif declaration:
                names = [name.strip().removeprefix("%") for name in declaration.group(2).split(",")]
                self.declared.append(f"{REGISTER_TYPES[declaration.group(1)]} {' = 0, '.join(names)} = 0;")
            elif guard:
                yield f"if ({guard.group(1)}{guard.group(2)}) {self.instruction(guard.group(3))}"
            else:
                yield self.instruction(statement)

    def cpp(self) -> str:
        """Translate the whole to one C++ block."""
        body = " ".join(self.statements())
        labels = f"__label__ {', '.join(self.labels)}; " if self.labels else ""
        return f"{{ {labels}{' '.join(self.declared)} {body} }}"


def translate_asm(text: str) -> str:
    """Replace every ``asm`` statement of CUDA text by C++ that calls the runtime; lines stay where they are.

    Raises UnknownInstruction, which names the opcode.
    """
    pieces, end = [], 0
    for match in re.finditer(r"\b(?:__asm__|asm)\b\s*(?:__volatile__|volatile)?\s*\(", text):
        if match.start() < end:
            continue
        close = _closing(text, match.end() - 1)
        statement = text[match.end() : close]
        found = _parse(statement)
        pieces += [text[end : match.start()], found.cpp(), "\n" * statement.count("\n")]
        if found.lent:
            pieces = [_by_reference("".join(pieces[:-2]), found.lent), *pieces[-2:]]
        end = text.index(";", close) + 1
    return "".join([*pieces, text[end:]])


def _by_reference(text: str, names: list[str]) -> str:
    """Let the function in which a text ends take these registers as its caller's own: wgmma reads them later."""
    before, device, function = text.rpartition("__device__")
    taken, brace, body = function.partition("{")
    for name in names:
        taken = re.sub(rf"(?<=[(,])(\s*)(\w+) {re.escape(name)}(?=[,)])", rf"\1const \2& {name}", taken)
    return f"{before}{device}{taken}{brace}{body}"


def _parse(statement: str) -> _Asm:
    template, *sections = _split(statement, ":")
    ptx = "".join(LITERAL.findall(template)).encode().decode("unicode_escape").replace("%%", "%")
    found = [[_expression(part) for part in _split(section, ",") if part.strip()] for section in sections[:2]]
    outputs, inputs = (*found, [], [])[:2]
    return _Asm(ptx, [*outputs, *inputs], len(outputs))


def _expression(operand: str) -> str:
    """Take the C++ expression out of ``"r"(expression)``."""
    opening = operand.index("(", LITERAL.search(operand).end())
    return operand[opening + 1 : _closing(operand, opening)]


def _ptx_statements(text: str) -> Iterator[str]:
    """Split PTX into statements and labels, without the braces of scopes."""
    for line in re.split(r"[;\n]", re.sub(r"//[^\n]*", "", text)):
        statement = line.strip()
        while match := re.match(r"(?:\{(?!\s*%)|(\w+):(?!:))\s*", statement):
            if match.group(1):
                yield f"{match.group(1)}:"
            statement = statement[match.end() :]
        if statement.strip("} "):
            yield re.sub(r"\s+", " ", statement)


def _closing(text: str, opening: int) -> int:
    """Find where the parenthesis at ``opening`` is closed, strings left out."""
    depth, at = 0, opening
    while True:
        if text[at] == '"':
            at = LITERAL.match(text, at).end()
            continue
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if not depth:
            return at
        at += 1


def _split(text: str, separator: str) -> list[str]:
    """Split at separators outside strings, brackets and ``::``."""
    parts, depth, start, at = [], 0, 0, 0
    while at < len(text):
        if text[at] == '"':
            at = LITERAL.match(text, at).end()
            continue
        if text.startswith("::", at) and separator == ":" and depth:
            at += 2
            continue
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(text[at], 0)
        if text[at] == separator and not depth:
            parts.append(text[start:at])
            start = at + 1
        at += 1
    return [*parts, text[start:]]
