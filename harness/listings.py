"""A kernel as text, in each of its forms: whole, or without what differs from kernel to kernel and says nothing."""

from __future__ import annotations

import inspect
import re
from itertools import takewhile

from tensorir_ladder.harness.build import Kernel, compiled
from tensorir_ladder.kernels.codegen import toolchain
from tensorir_ladder.kernels.codegen.toolchain import compile_ptx, disassemble

FORMS = {
    "schedule": "the schedule's source",
    "tir": "the scheduled TensorIR",
    "lowered": "the lowered TensorIR",
    "cuda": "the generated CUDA",
    "ptx": "the PTX",
    "sass": "the machine code",
}
LANGUAGES = {"schedule": "python", "tir": "python", "lowered": "python", "cuda": "cuda", "ptx": "ptx"}
NEED_COMPILER = ("ptx", "sass")
# The line with which a text's own part begins; what is before it is much the same in all kernels.
OWN_PART = {
    "tir": r"^\s*@T\.prim_func",
    "lowered": r"^\s*@T\.prim_func",
    "cuda": r'^extern "C" __global__ [^;{]*\{',
    "ptx": r"^\.visible \.entry",
    "sass": r"^\s*Function : ",
}
# What is numbered anew in every kernel: the first group stays. static/compare.js reads these patterns, too.
SUBEXPRESSIONS, COPIED_LOOPS = r"\b(cse_v)\d+\b", r"\b([a-z]+\d*_\d+)_\d+\b"
NUMBERED = {
    "tir": (COPIED_LOOPS,),
    "lowered": (SUBEXPRESSIONS, COPIED_LOOPS),
    "cuda": (SUBEXPRESSIONS, COPIED_LOOPS),
    "ptx": (r"(%[a-z]+<?)\d+\b", r"(\$L__BB\d+_)\d+"),
    "sass": (r"\b(U?[RP]|S?B)\d+\b", r"(\.L)\d+\b", r"()\.reuse\b"),
}
INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;?\s*/\* 0x[0-9a-f]+ \*/")
ENCODING = re.compile(r"\s*/\* 0x[0-9a-f]+ \*/\s*")
TARGET = re.compile(r"(?<=\s)0x[0-9a-f]+$")
BRANCH = re.compile(r"(?:@!?U?P\w+ )?(?:BRA|BSSY|CALL|JMP|WARPSYNC)\b")


def text_of(kernel: Kernel, form: str) -> str:
    """Return a kernel in one of FORMS, without what all kernels begin with.

    Raises NoCompiler for PTX and machine code where there is no CUDA compiler.
    """
    if form == "cuda":
        return "\n".join(kernel.text_of(name.name_hint) for name in kernel.device.functions)
    return whole_text(kernel, form)


def whole_text(kernel: Kernel, form: str) -> str:
    """Return a kernel in one of FORMS as TVM or the toolkit writes it; raises what :func:`text_of` does."""
    if form == "schedule":
        step = kernel.case.step
        return inspect.getsource(inspect.unwrap(kernel.case.form.schedule or step.maker(kernel.case.variant)))
    if form == "ptx":
        return compile_ptx(kernel.cuda, kernel.case.machine.arch, toolchain.require_compiler())
    if form == "sass":
        return disassemble(compiled(kernel, toolchain.require_compiler()).cubin)
    if form == "cuda":
        return kernel.cuda
    return str((kernel.mod["main"] if form == "tir" else kernel.device).script())


def comparable_text(kernel: Kernel, form: str) -> tuple[str, str]:
    """Return a kernel in one of FORMS in two parts: what it begins with like others, and its own.

    Machine code comes as instructions alone, with labels for addresses. Raises what :func:`text_of` does.
    """
    text = whole_text(kernel, form)
    return split_text(instructions(text) if form == "sass" else text, form)


def split_text(text: str, form: str) -> tuple[str, str]:
    """Cut a text in one of FORMS where its own part begins."""
    found = re.search(OWN_PART[form], text, re.M) if form in OWN_PART else None
    return (text[: found.start()], text[found.start() :]) if found else ("", text)


def without_numbers(text: str, form: str) -> str:
    """Leave the numbers out that are given anew in every kernel: to registers, labels, common subexpressions, loops."""
    for pattern in NUMBERED.get(form, ()):
        text = re.sub(pattern, r"\1", text)
    return text


def instructions(sass: str) -> str:
    """Return cuobjdump's text without addresses, encodings and padding; labels stand where branches go."""
    functions = re.split(r"(?m)^(?=\s*Function : )", sass)
    return "\n".join(_labelled(function) for function in functions).strip("\n") + "\n"


def _labelled(function: str) -> str:
    lines: list[tuple[int | None, str]] = []
    for line in function.splitlines():
        if found := INSTRUCTION.match(line):
            lines.append((int(found[1], 16), found[2]))
        elif line.strip(" \t.") and not ENCODING.fullmatch(line):
            lines.append((None, line.strip()))
    padding = list(takewhile(lambda line: line[1] == "NOP", reversed(lines)))
    lines = lines[: len(lines) - len(padding)]
    goals = {int(found[0], 16) for _, text in lines if BRANCH.match(text) and (found := TARGET.search(text))}
    known = sorted(goals & {address for address, _ in lines})
    labels = {address: f".L{number}" for number, address in enumerate(known)}
    made = []
    for address, text in lines:
        if address in labels:
            made.append(f"{labels[address]}:")
        if BRANCH.match(text):
            text = TARGET.sub(lambda found: labels.get(int(found[0], 16), found[0]), text)
        made.append(text if address is None else f"    {text}")
    return "\n".join(made)
