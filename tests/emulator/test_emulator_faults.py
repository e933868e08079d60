"""Kernels broken on purpose, one change each, are found, and the fault is called by its name."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace

import numpy as np
import pytest

from support.broken_kernels import (
    BROKEN,
    BROKEN_CLUSTER,
    BROKEN_RING,
    COPY_WAIT,
    DEEP,
    SYNC,
    WRONG,
    broken_cluster,
    broken_ring,
    broken_step,
    kernel_of,
)
from support.ring_kernel import edited, ring_program, ring_text, run_ring
from tensorir_ladder.emulator import Deeds, EmulatedProgram, KernelFault
from tensorir_ladder.emulator.source import PREAMBLE_END
from tensorir_ladder.harness.build import Kernel
from tensorir_ladder.harness.emulation import EmulatorBackend, emulated
from tensorir_ladder.harness.execution import Backend
from tensorir_ladder.harness.verify import WrongResult, verify_launch
from tensorir_ladder.kernels.codegen.launch_plan import LaunchPlan, PlainBuffer

pytestmark = pytest.mark.emulator

SEEDS = range(6)


def check(program: EmulatedProgram, kernel: Kernel, backend: Backend) -> None:
    """Verify a program in place of its kernel."""
    seeds = iter(SEEDS)
    case = kernel.case
    verify_launch(lambda *arrays: program(*arrays, seed=next(seeds)), case.problem, backend, "broken", math=case.math)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_step_is_found(name: str) -> None:
    broken = BROKEN[name]
    program, kernel = broken_step(name)
    if broken.found == WRONG:
        with pytest.raises(WrongResult):
            check(program, kernel, EmulatorBackend())
        return
    with pytest.raises(KernelFault) as fault:
        check(program, kernel, EmulatorBackend())
    assert fault.value.kind == broken.found, str(fault.value)
    assert re.search(r"line \d+: \S", str(fault.value))


def test_a_fault_is_repeated_by_its_seed() -> None:
    kernel = kernel_of(2, None)
    program = replace(emulated(kernel), cuda=edited(kernel.cuda, SYNC, ""))
    problem, backend = kernel.case.problem, EmulatorBackend()
    arrays = [backend.normal(0, shape, "float32") for shape in ((33, 100), (100, 35), (33, 35))]
    texts = []
    for _ in range(2):
        with pytest.raises(KernelFault) as fault:
            program(*arrays, seed=7)
        assert fault.value.seed == 7
        texts.append(str(fault.value))
    assert texts[0] == texts[1]
    assert problem.shape == "33x35x100"
    assert re.search(
        r"nothing orders\n  a read by thread \(.*\) of block \(.*\) at line \d+: .*\n  after a write", texts[0]
    )
    assert texts[0].endswith("(seed 7 repeats it)")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", BROKEN_RING)
def test_a_broken_ring_is_found(name: str) -> None:
    expect(broken_ring(name), BROKEN_RING[name][2])


@pytest.mark.parametrize("name", BROKEN_CLUSTER)
def test_a_broken_cluster_is_found(name: str) -> None:
    expect(broken_cluster(name), BROKEN_CLUSTER[name][2])


def expect(program: EmulatedProgram, kind: str | None) -> None:
    """Expect a wrong output, or a fault of that kind (None: of any)."""
    error, found = found_in(program)
    if kind == WRONG:
        assert found is None
        assert error != 0
    else:
        assert found is not None
        assert kind in (None, found.kind), str(found)


def found_in(program: EmulatedProgram) -> tuple[float, KernelFault | None]:
    """Find the error of the first wrong output, or the first fault, of some seeds."""
    error = 0.0
    for seed in SEEDS:
        try:
            error = run_ring(program, DEEP, seed)
        except KernelFault as fault:
            return error, fault
        if error != 0:
            break
    return error, None


def test_a_deadlock_says_who_waits_for_what() -> None:
    _, fault = found_in(ring_program(DEEP, text=edited(ring_text(), r"uint phase = 1", "uint phase = 0")))
    text = str(fault)
    assert re.search(r"thread 128 of block \(\d, 0, 0\) waits at mbarrier\.try_wait \(parity 0 of mbarrier 0x\w+", text)
    assert re.search(r"128 threads, 0 to 127, each of block .* 1 of 1 arrivals and 0 bytes missing\) at line \d+", text)


def test_a_library_knows_its_own_bounds() -> None:
    # The program that loads it may have an _end of its own, and what lies between would not be seen.
    tool = shutil.which("nm")
    if tool is None:
        pytest.skip("no nm, which says what a library shares with others")
    symbols = subprocess.run([tool, "-D", emulated(kernel_of(2, None)).library], capture_output=True, text=True).stdout
    assert "emu_code" in symbols
    assert not re.search(r" _end$| __ehdr_start$", symbols, re.M)


def test_deeds_tell_what_threads_access_from_what_they_wait_for() -> None:
    kernel, backend = kernel_of(5, "async"), EmulatorBackend()
    program = emulated(kernel)
    arrays = [backend.normal(0, shape, "float32") for shape in ((33, 100), (100, 35), (33, 35))]

    def deeds_of(pattern: str, replacement: str) -> Deeds:
        (deeds,) = replace(program, cuda=edited(kernel.cuda, pattern, replacement))(*arrays, seed=1)
        return deeds

    (unchanged,) = program(*arrays, seed=1)
    assert program(*arrays, seed=2) == (unchanged,)  # in another order
    twice = deeds_of(COPY_WAIT, r"\g<0> \g<0>")
    assert twice.all != unchanged.all
    assert twice.accesses == unchanged.accesses
    other = deeds_of(r"ax1 < 4; \+\+ax1", "ax1 < 3; ++ax1")
    assert other.accesses != unchanged.accesses


BYTES = """extern "C" __global__ void __launch_bounds__(32) turned(signed char* A, signed char* B) {
  __shared__ alignas(64) signed char kept[32];
  kept[threadIdx.x] = A[threadIdx.x];
  __syncthreads();
  B[threadIdx.x] = kept[31 - (int)threadIdx.x];
}
"""


def test_threads_may_write_neighbouring_bytes_and_not_the_same() -> None:
    launch = LaunchPlan("turned", (PlainBuffer("A"), PlainBuffer("B")), (1, 1, 1), (32, 1, 1))
    a, b = np.arange(32, dtype=np.int8), np.full(32, -1, np.int8)
    EmulatedProgram("turned", PREAMBLE_END + BYTES, (launch,), ("A", "B"))(a, b)
    assert b.tolist() == a[::-1].tolist()
    for old, new in (("  __syncthreads();\n", ""), ("kept[threadIdx.x]", "kept[threadIdx.x / 2]")):
        with pytest.raises(KernelFault) as fault:
            EmulatedProgram("turned", PREAMBLE_END + BYTES.replace(old, new), (launch,), ("A", "B"))(a, b)
        assert fault.value.kind == "race"
