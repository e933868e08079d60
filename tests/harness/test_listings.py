"""A kernel's texts: machine code without what moves, the own part of a text, numbers left out."""

from __future__ import annotations

import difflib

import pytest

from support.cases import make_case
from tensorir_ladder.harness.build import lower
from tensorir_ladder.harness.cli import main
from tensorir_ladder.harness.listings import FORMS, NEED_COMPILER, comparable_text, instructions, without_numbers

HEAD = "\n\tcode for sm_90a\n\t.target\tsm_90a\n\n\t\tFunction : main_kernel\n"


def disassembled(*lines: str) -> str:
    """What cuobjdump prints of some instructions, with the padding behind them."""
    texts = [*lines, *["NOP"] * 3]
    shown = [
        f"        /*{16 * at:04x}*/   {text} ;   /* 0x00{at:014x} */\n    /* 0x0 */" for at, text in enumerate(texts)
    ]
    return HEAD + "\n".join(shown) + "\n\t\t..........\n"


def changed(before: str, after: str) -> list[str]:
    lines = difflib.ndiff(before.splitlines(), after.splitlines())
    return [line for line in lines if line[0] in "+-"]


def test_machine_code_has_labels_where_branches_go_and_neither_addresses_nor_padding() -> None:
    text = instructions(disassembled("S2R R0, SR_TID.X", "@P0 BRA 0x30", "NOP", "IADD3 R1, R1, 0x30, RZ", "BRA 0x10"))
    own = text[text.index("Function") :].splitlines()[1:]
    assert [line.strip() for line in own] == [
        "S2R R0, SR_TID.X",
        ".L0:",
        "@P0 BRA .L1",
        "NOP",
        ".L1:",
        "IADD3 R1, R1, 0x30, RZ",
        "BRA .L0",
    ]


def test_an_inserted_instruction_is_the_only_difference() -> None:
    lines = ["S2R R0, SR_TID.X", "@P0 BRA 0x20", "FFMA R2, R3, R4, R2", "EXIT"]
    moved = ["MOV R9, RZ", "S2R R0, SR_TID.X", "@P0 BRA 0x30", "FFMA R2, R3, R4, R2", "EXIT"]
    assert changed(instructions(disassembled(*lines)), instructions(disassembled(*moved))) == ["+     MOV R9, RZ"]


def test_functions_of_one_text_keep_their_own_labels() -> None:
    second = disassembled("EXIT", "BRA 0x10").removeprefix("\n\tcode for sm_90a\n\t.target\tsm_90a\n")
    text = instructions(disassembled("BRA 0x0") + second)
    assert [line.strip() for line in text.splitlines() if "L0" in line] == [".L0:", "BRA .L0"] * 2


@pytest.mark.parametrize(
    ("form", "before", "after"),
    [
        ("sass", "LEA R12, R3.reuse, UR4, 0x4", "LEA R7, R30, UR5, 0x4"),
        ("sass", "@!P0 BRA .L3", "@!P1 BRA .L12"),
        ("ptx", "mad.lo.s32 %r12, %r1, %r2, %r3;", "mad.lo.s32 %r2, %r11, %r21, %r31;"),
        ("ptx", "@%p2 bra $L__BB0_2;", "@%p1 bra $L__BB0_7;"),
        ("cuda", "int cse_v12 = (k_1_2 * 4);", "int cse_v3 = (k_1_1 * 4);"),
        ("lowered", "cse_v1: T.let[T.int32] = ax0_0_1 * 4", "cse_v22: T.let[T.int32] = ax0_0_3 * 4"),
    ],
)
def test_numbers_that_compilers_give_afresh_can_be_left_out(form: str, before: str, after: str) -> None:
    assert before != after
    assert without_numbers(before, form) == without_numbers(after, form)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("sass", "LDGSTS.E.BYPASS.128 [R+0x1800], desc[UR][R.64]"),
        ("sass", "S2UR UR, SR_CTAID.X"),
        ("ptx", "cp.async.cg.shared.global [%r], [%rd], 16;"),
        ("cuda", "  ptx_cp_async_legacy_cg_16_4_4(A_shared_ptr, (k_0 * 16), A_ptr, 0);"),
        ("cuda", "  tvm_builtin_ptx_cp_async_wait_group_async_wait_group_2();"),
        ("schedule", "    stage, order = [0, 0, stages - 1], [0, 1, 2]"),
    ],
)
def test_other_numbers_stay(form: str, text: str) -> None:
    assert without_numbers(text, form) == text


def test_a_text_is_cut_where_its_own_part_begins_and_nothing_is_lost() -> None:
    kernel = lower(make_case(5, (64, 64, 64), "async"))
    for form in FORMS:
        if form not in NEED_COMPILER:
            before, own = comparable_text(kernel, form)
            assert own.strip(), form
            if form == "cuda":
                assert before + own == kernel.cuda
                assert "__device__" in before
                assert own.startswith('extern "C" __global__')
            if form == "tir":
                assert own.lstrip().startswith("@T.prim_func")


def test_diff_leaves_numbers_out_where_asked(capsys: pytest.CaptureFixture[str]) -> None:
    counts = []
    for more in ([], ["--plain-names"]):
        assert main(["diff", "5:async", "5:writeback", "--size", "256", "--show", "cuda", *more]) == 0
        counts.append(sum(line[0] in "+-" for line in capsys.readouterr().out.splitlines() if line))
    assert 0 < counts[1] < counts[0]


@pytest.mark.compiler
def test_diff_of_machine_code_compares_instructions(capsys: pytest.CaptureFixture[str]) -> None:
    from tensorir_ladder.kernels.codegen.toolchain import find_tool

    if find_tool("cuobjdump") is None:
        pytest.skip("no cuobjdump")
    assert main(["diff", "4", "5:double_buffer", "--size", "256", "--show", "sass"]) == 0
    assert "no difference" in capsys.readouterr().out
