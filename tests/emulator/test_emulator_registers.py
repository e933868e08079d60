"""Registers that warpgroups exchange (setmaxnreg), counted as the hardware does: what nobody gives back never comes."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from support.cases import make_case
from tensorir_ladder.emulator import EmulatedProgram, KernelFault, LaunchPlan, PlainBuffer
from tensorir_ladder.emulator.source import PREAMBLE_END, launch_registers
from tensorir_ladder.harness.build import Kernel, compiled, lower
from tensorir_ladder.harness.emulation import EmulatorBackend, emulated
from tensorir_ladder.harness.verify import verify, verify_launch
from tensorir_ladder.kernels.codegen.toolchain import Compiler
from tensorir_ladder.kernels.tiles import RoleTile

pytestmark = pytest.mark.emulator
THREE_CONSUMERS = "192x128x64/3x1"
KERNELS = {12: "roles", 13: "stream"}


def kernel_text(bounds: str, *changes: str) -> str:
    """Write a kernel whose groups of 128 threads each change their registers, as "dec 40", or do not, as ""."""
    body = "\n".join(
        f'  if (threadIdx.x / 128 == {group}) {{ asm volatile("setmaxnreg.{how}.sync.aligned.u32 {count};"); }}'
        for group, change in enumerate(changes)
        if change
        for how, count in [change.split()]
    )
    kernel = f'extern "C" __global__ void __launch_bounds__({bounds}) groups(float* __restrict__ out) {{\n{body}'
    return f"{PREAMBLE_END}{kernel}\n  out[threadIdx.x] = 1;\n}}\n"


def run_groups(text: str, threads: int, seed: int = 0) -> bool:
    """Run it; tells whether every thread came to its end."""
    launch = LaunchPlan("groups", (PlainBuffer("out"),), (1, 1, 1), (threads, 1, 1))
    out = np.zeros(threads, np.float32)
    EmulatedProgram("groups", text, (launch,), ("out",))(out, seed=seed)
    return bool(out.all())


@pytest.mark.parametrize(
    ("bounds", "changes"),
    [
        ("384, 1", ("dec 40", "inc 232", "inc 232")),
        ("512, 1", ("dec 32", "inc 160", "inc 160", "inc 160")),
        ("512, 1", ("dec 40", "inc 152", "inc 152", "inc 152")),
        ("256, 1", ("dec 40", "inc 240")),
        ("256, 1", ("", "inc 240")),  # launched with as many: nothing is missing
        ("384, 1", ("dec 40", "inc 232", "")),
    ],
    ids=str,
)
def test_registers_that_are_given_back_are_taken(bounds: str, changes: tuple[str, ...]) -> None:
    for seed in range(4):
        assert run_groups(kernel_text(bounds, *changes), 128 * len(changes), seed)


@pytest.mark.parametrize(
    ("bounds", "changes", "kind", "said"),
    [
        (
            "512, 1",
            ("dec 40", "inc 160", "inc 160", "inc 160"),
            "deadlock",
            r"setmaxnreg\.inc \(160 registers a thread",
        ),
        ("384, 1", ("", "inc 232", "inc 232"), "deadlock", r"has 168, and lacks 2048 where the block's pool has 0"),
        ("384, 1", ("dec 48", "inc 232", "inc 232"), "deadlock", r"line \d+: .*setmaxnreg\.inc"),
        ("384, 1", ("dec 40", "dec 232", "inc 232"), "setmaxnreg", "dec to 232 registers of a warp that has 168"),
        ("384, 1", ("inc 40", "inc 232", "inc 232"), "setmaxnreg", "inc to 40 registers of a warp that has 168"),
        ("384, 1", ("dec 40", "inc 233", "inc 232"), "setmaxnreg", "no multiple of 8 from 24 to 256"),
        ("384, 1", ("dec 16", "inc 232", "inc 232"), "setmaxnreg", "no multiple of 8 from 24 to 256"),
        ("384", ("dec 40", "inc 232", "inc 232"), "setmaxnreg", "launch bounds name no number of blocks"),
    ],
    ids=str,
)
def test_registers_that_do_not_add_up_are_a_fault(bounds: str, changes: tuple[str, ...], kind: str, said: str) -> None:
    for seed in range(4):
        with pytest.raises(KernelFault, match=said) as fault:
            run_groups(kernel_text(bounds, *changes), 128 * len(changes), seed)
        assert fault.value.kind == kind


def test_a_group_exchanges_as_a_whole() -> None:
    text = kernel_text("256, 1", "dec 40", "inc 240").replace("threadIdx.x / 128 == 0", "threadIdx.x < 96")
    with pytest.raises(KernelFault, match=r"warps 0 and 3 of block .* end with 40 and 240 registers") as fault:
        run_groups(text, 256)
    assert fault.value.kind == "setmaxnreg"


@pytest.mark.sampled(3)
@pytest.mark.compiler
@pytest.mark.parametrize("number", [12, 13])
@pytest.mark.parametrize("tile", ["64x128x64/1x1", "128x256x64/2x1", THREE_CONSUMERS])
def test_the_compiler_launches_with_as_many(number: int, tile: str, compiler: Compiler) -> None:
    kernel = lower(make_case(number, (256, 256, 512), KERNELS[number], tile=RoleTile.parse(tile), stages=3))
    cubin = compiled(kernel, compiler).cubin
    assert cubin.registers == launch_registers(kernel.cuda, "main_kernel") == kernel.case.tile.registers
    assert cubin.spill_bytes == 0


# Steps 12 and 13 with three consumers: seen to hang an H200 with 160 registers each beside a producer's 40


def three_consumers(number: int) -> Kernel:
    """Lower the case that hung, of fewer columns."""
    return lower(
        make_case(number, (64, 264, 792), KERNELS[number], layout="nt", tile=RoleTile.parse(THREE_CONSUMERS), stages=4)
    )


@pytest.mark.parametrize("number", [12, 13])
def test_three_consumers_share_what_a_block_has(number: int) -> None:
    verify(three_consumers(number), EmulatorBackend())


@pytest.mark.parametrize(
    ("pattern", "replacement"),
    [(r"(setmaxnreg\.inc\.sync\.aligned\.u32) \d+", r"\1 160"), (r"\n *\w+setmaxnreg_dec\w+\(\);", "")],
    ids=["too many asked for", "none given back"],
)
@pytest.mark.parametrize("number", [12, 13])
def test_consumers_that_wait_for_registers_in_vain_are_found(number: int, pattern: str, replacement: str) -> None:
    kernel = three_consumers(number)
    cuda, found = re.subn(pattern, replacement, kernel.cuda)
    assert found == 1
    program = replace(emulated(kernel), cuda=cuda)
    with pytest.raises(KernelFault, match=r"waits at setmaxnreg\.inc") as fault:
        verify_launch(program, kernel.case.problem, EmulatorBackend(), "broken")
    assert fault.value.kind == "deadlock"
