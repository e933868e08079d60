"""The emulator runs every step, and does what each instruction's manual says."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import ml_dtypes
import numpy as np
import pytest

from support.cases import EVERY_VARIANT, SCHEDULED_VARIANTS, STEPS, Outcome, make_case, small_case
from support.emulated_text import bfloat16_bits, place_operand, run_text, words
from support.ring_kernel import ring_program, run_ring
from tensorir_ladder.emulator import (
    EmulatedProgram,
    KernelFault,
    LaunchPlan,
    NoHostCompiler,
    PlainBuffer,
    TensorMap,
    UnknownInstruction,
    UnknownLaunch,
    UnknownText,
    compiler,
    find_host_compiler,
)
from tensorir_ladder.emulator.ptx import INSTRUCTIONS, translate_asm
from tensorir_ladder.emulator.source import PREAMBLE_END, host_text
from tensorir_ladder.harness.build import lower
from tensorir_ladder.harness.emulation import EmulatorBackend
from tensorir_ladder.harness.verify import verify
from tensorir_ladder.kernels.codegen.launch_plan import Real, RowCount, UnsupportedLaunch

pytestmark = pytest.mark.emulator
RAGGED = (45, 75, 90)
LAYOUTS = ("nn", "nt")
CALL = "__forceinline__ __device__"


# Every step


@pytest.mark.parametrize(("number", "variant"), SCHEDULED_VARIANTS)
def test_every_variant_is_right_with_one_to_five_stages(
    number: int, variant: str, request: pytest.FixtureRequest
) -> None:
    """In one layout, or with ``--every-case`` in both, the shortest ring and one longer than the k tiles, or all."""
    step, form = STEPS[number], STEPS[number].variant(variant)
    every_case = request.config.getoption("every_case")
    few = sorted({form.fewest_stages, 4})
    for layout in LAYOUTS if every_case else (LAYOUTS[(number + len(variant)) % 2],):
        rings = range(form.fewest_stages, 6) if every_case and layout == "nn" else few
        for stages in rings if step.pipelined and form.pipelined else (1,):
            kernel = lower(small_case(number, RAGGED, variant, layout=layout, stages=stages))
            assert verify(kernel, EmulatorBackend(10 * stages)).on == "emulator"


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("number", "variant", "dtype"),
    [
        (number, variant, dtype)
        for number, variant in SCHEDULED_VARIANTS
        for dtype in STEPS[number].variant(variant).dtypes[1:]
    ],
)
def test_every_dtype_is_right(number: int, variant: str, dtype: str) -> None:
    verify(lower(small_case(number, (33, 40, 70), variant, dtype=dtype, layout="nt", stages=3)), EmulatorBackend())


EXPLICIT_VARIANTS = [both for both in EVERY_VARIANT if both not in SCHEDULED_VARIANTS]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("number", "variant"), [both for both in EXPLICIT_VARIANTS if "emulator" in STEPS[both[0]].verified_on(both[1])]
)
def test_explicit_kernels_are_right(number: int, variant: str) -> None:
    for layout, dtype, shape in (("nn", "float16", (130, 72, 200)), ("nt", "bfloat16", (70, 264, 136))):
        verify(lower(make_case(number, shape, variant, layout=layout, dtype=dtype)), EmulatorBackend())


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("number", "shape"),
    [
        (number, shape)
        for number, shape in product(
            sorted({number for number, _ in SCHEDULED_VARIANTS}), [(1, 1, 1), (1, 129, 7), (64, 64, 64), (130, 66, 129)]
        )
    ],
    ids=str,
)
def test_whole_and_tiny_shapes_are_right(number: int, shape: tuple[int, int, int]) -> None:
    verify(lower(small_case(number, shape)), EmulatorBackend(5))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("stages", "cluster"), list(product((2, 3, 4), (1, 2))))
def test_the_ring_is_right(stages: int, cluster: int) -> None:
    for shape in ((128, 64, 320), (256, 128, 64), (70, 72, 200)):
        program = ring_program(shape, stages, cluster)
        assert [run_ring(program, shape, seed) for seed in range(6)] == [0] * 6


# Alone

ALONE = """
import sys
import numpy as np
from tensorir_ladder.emulator import EmulatedProgram, LaunchPlan, PlainBuffer
launch = LaunchPlan("scale", (PlainBuffer("A"), PlainBuffer("B"), 3), grid=(4, 1, 1), block=(32, 1, 1))
program = EmulatedProgram("scale", sys.argv[1], (launch,), names=("A", "B"))
a, b = np.arange(128, dtype=np.float32), np.empty(128, np.float32)
program(a, b, seed=0)
assert (b == 3 * a).all()
rooms = {name.split(".")[1] for name in sys.modules if name.startswith("tensorir_ladder.")}
assert not rooms & {"harness", "steps", "reports", "torch_ops"}, rooms
assert "tvm" not in sys.modules
"""
SCALE = f"""{PREAMBLE_END}
extern "C" __global__ void __launch_bounds__(32) scale(float* __restrict__ A, float* __restrict__ B, int by) {{
  int at = ((int)blockIdx.x) * 32 + ((int)threadIdx.x);
  B[at] = A[at] * by;
}}
"""


def test_it_runs_without_steps_harness_and_tvm() -> None:
    done = subprocess.run([sys.executable, "-c", ALONE, SCALE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


A, B = PlainBuffer("A"), PlainBuffer("B")


def test_only_what_is_launched_is_compiled_and_keeps_its_lines() -> None:
    unknown = SCALE.removeprefix(PREAMBLE_END).replace(" scale(", " other(").replace("A[at] * by", "surf2Dread(1)")
    scale = SCALE.removeprefix(PREAMBLE_END)
    for text in (PREAMBLE_END + unknown + scale, PREAMBLE_END + scale + unknown):
        launch = LaunchPlan("scale", (PlainBuffer("A"), PlainBuffer("B"), 3), (1, 1, 1), (32, 1, 1))
        program = EmulatedProgram("scale", text, (launch,), ("A", "B"), operands=("A",))
        a, b = np.arange(32, dtype=np.float32), np.empty(32, np.float32)
        program(a, b)
        assert (b == 3 * a).all()
        whole, part = host_text(text.replace("surf2Dread(1)", "1")).split("\n"), host_text(text, {"scale"}).split("\n")
        (line,) = (number for number, each in enumerate(whole) if "A[at] * by" in each)
        assert part[line] == whole[line]
        assert not any("surf2Dread" in each for each in part)
    with pytest.raises(UnknownText, match="surf2Dread"):
        EmulatedProgram("other", text, (replace(launch, kernel="other"),), ("A", "B"))(a, b)


ROUND = """extern "C" __global__ void __launch_bounds__(32) narrow(float* A, {type}* B, float by) {{
  int at = ((int)blockIdx.x) * 32 + ((int)threadIdx.x);
  B[at] = ({type})(A[at] * by);
  A[at] = (float)B[at];
}}
"""


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "kind"), [("float8_e4m3fn", "e4m3"), ("float8_e5m2", "e5m2")])
def test_numbers_of_eight_bits_are_rounded_to_the_nearest(name: str, kind: str) -> None:
    """Ties to even, subnormal ones too; beyond the largest number they are that, as CUDA's own."""
    dtype = np.dtype(getattr(ml_dtypes, name))
    every = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    between = np.sort(every[np.isfinite(every)])
    a = np.concatenate([every, (between[1:] + between[:-1]) / 2, between * np.float32(1.01), [1e9, -1e9]])
    a = np.concatenate([a, np.zeros(-a.size % 32)]).astype(np.float32)
    largest = np.float32(ml_dtypes.finfo(dtype).max)
    expected = np.clip(a, -largest, largest).astype(dtype)
    launch = LaunchPlan("narrow", (A, B, Real(0.5, "float32")), (a.size // 32, 1, 1), (32, 1, 1))
    text = PREAMBLE_END + ROUND.format(type=f"__nv_fp8_{kind}")
    back, got = 2 * a, np.zeros(a.size, np.uint8)
    EmulatedProgram("narrow", text, (launch,), ("A", "B"))(back, got)
    np.testing.assert_array_equal(got.view(dtype).astype(np.float32), expected.astype(np.float32))
    np.testing.assert_array_equal(back, expected.astype(np.float32))


@pytest.mark.parametrize(
    ("launch", "said"),
    [
        (LaunchPlan("scale", (A, B, 3), (4, 1, 1), (32, 1, 1), (1, 2, 1)), "clusters along y or z"),
        (LaunchPlan("scale", (A, B, RowCount()), (4, 1, 1), (32, 1, 1)), "any number of rows"),
        (LaunchPlan("scale", (A, PlainBuffer("D"), 3), (4, 1, 1), (32, 1, 1)), "given D, not among A, B"),
        (LaunchPlan("scale", (A, B), (4, 1, 1), (32, 1, 1)), "takes 3 parameters, and is given 2"),
        (LaunchPlan("other", (A, B, 3), (4, 1, 1), (32, 1, 1)), "other takes 0 parameters"),
    ],
    ids=["clusters", "rows", "names", "parameters", "kernel"],
)
def test_launches_that_it_cannot_run_are_refused(launch: LaunchPlan, said: str) -> None:
    with pytest.raises(UnknownLaunch, match=said):
        EmulatedProgram("scale", SCALE, (launch,), ("A", "B"))


# The command line


def test_a_command_says_that_the_emulator_verified(command: Callable[..., Outcome]) -> None:
    outcome = command("verify", "--step", "2,9", "--shape", "33x20x40", "--on", "emulator")
    assert outcome.code == 0
    assert outcome.out.splitlines().count("verified on the CPU (generated CUDA through the emulator)") == 2


def test_memory_bound_workloads_are_verified_by_the_emulator(command: Callable[..., Outcome]) -> None:
    outcome = command("bandwidth", "--workload", "softmax,gelu", "--stages", "3", "--on", "emulator", "--verify")
    assert outcome.code == 0
    assert "verified on the CPU (generated CUDA through the emulator) at" in outcome.out


def test_a_fault_is_one_error_and_exit_1(command: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_self: EmulatedProgram, *_arrays: np.ndarray, seed: int) -> None:
        raise KernelFault("step", "race", "both", seed)

    monkeypatch.setattr(EmulatedProgram, "__call__", fails)
    arguments = ("--step", "4", "--size", "8", "--on", "emulator", "--emulator-seed", "4")
    outcome = command("verify", *arguments)
    assert (outcome.code, outcome.out) == (1, "")
    assert re.fullmatch(r"error: step on emulator, race: both\s.*seed 4.*\n", outcome.err)


def test_without_a_compiler_it_says_what_to_install(
    command: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler.shutil, "which", lambda _name: None)
    assert find_host_compiler() is None
    outcome = command("verify", "--step", "4", "--size", "8", "--on", "emulator")
    assert outcome.code == 2
    assert re.fullmatch(r"error: .*none of g\+\+, clang\+\+, c\+\+ is on PATH; install g\+\+\n", outcome.err)
    with pytest.raises(NoHostCompiler):
        compiler.require_host_compiler()


# Instructions: one thread's or one warp's text, and what comes out


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix_and_stmatrix(count: int, transposed: bool) -> None:
    matrices = np.arange(64 * count, dtype=np.uint16).reshape(count, 8, 8)
    trans = ".trans" if transposed else ""
    numbers = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"=r"(r[{i}])' for i in range(count))
    load = f"""
  __shared__ alignas(64) uint tile[128];
  for (int i = 0; i < {count}; ++i) tile[threadIdx.x + 32 * i] = in0[threadIdx.x + 32 * i];
  __syncwarp();
  uint r[4], at = (uint)__cvta_generic_to_shared(tile) + threadIdx.x % {8 * count} * 16;
  asm volatile("ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{numbers}}}, [%{count}];"
    : {outputs} : "r"(at));
"""
    got = run_text(
        load + f"for (int i = 0; i < {count}; ++i) out[threadIdx.x * {count} + i] = r[i];", words(32 * count), matrices
    )
    # Lane l holds elements 2 (l % 4) and the next of row l / 4.
    expected = (matrices.transpose(0, 2, 1) if transposed else matrices).reshape(count, 32, 2)
    np.testing.assert_array_equal(got.view(np.uint16).reshape(32, count, 2), expected.transpose(1, 0, 2))
    inputs = ", ".join(f'"r"(r[{i}])' for i in range(count))
    shifted = ", ".join(f"%{i + 1}" for i in range(count))
    store = f"""{load}
  __shared__ alignas(64) uint back[128];
  at = (uint)__cvta_generic_to_shared(back) + threadIdx.x % {8 * count} * 16;
  asm volatile("stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%0], {{{shifted}}};" :: "r"(at), {inputs});
  __syncwarp();
  for (int i = 0; i < {count}; ++i) out[threadIdx.x + 32 * i] = back[threadIdx.x + 32 * i];
"""
    np.testing.assert_array_equal(run_text(store, words(32 * count), matrices), matrices.reshape(-1).view(np.uint32))


@pytest.mark.parametrize(
    ("shape", "dtype"), [("m16n8k16", "f16"), ("m16n8k16", "bf16"), ("m16n8k8", "tf32")], ids=["f16", "bf16", "tf32"]
)
def test_mma(shape: str, dtype: str) -> None:
    depth = int(shape[5:].split("k")[1])
    generator = np.random.default_rng(0)
    a, b = generator.integers(-3, 4, (16, depth)), generator.integers(-3, 4, (8, depth))
    c = generator.integers(-3, 4, (16, 8)).astype(np.float32)
    packed = 32 * depth // 256  # operand elements in a register: 2, or 1 of TF32
    lanes = np.arange(32)
    encode = {"f16": np.float16, "bf16": bfloat16_bits, "tf32": np.float32}[dtype]

    def fragment(matrix: np.ndarray, places: list[tuple[int, int]]) -> np.ndarray:
        """Each lane's registers: of row l / 4 and k from (l % 4) · packed on, moved by the places' rows and steps."""
        rows = [
            [matrix[lanes // 4 + row, lanes % 4 * packed + step + e] for e in range(packed)] for row, step in places
        ]
        return np.ascontiguousarray(encode(np.array(rows).transpose(2, 0, 1)))

    half = depth // 2
    registers_a = fragment(a, [(0, 0), (8, 0), (0, half), (8, half)])
    registers_b = fragment(b, [(0, 0), (0, half)])
    body = f"""
  float c[4];
  for (int i = 0; i < 4; ++i) c[i] = ((float*)in2)[(threadIdx.x / 4 + i / 2 * 8) * 8 + threadIdx.x % 4 * 2 + i % 2];
  const uint *a = in0 + threadIdx.x * 4, *b = in1 + threadIdx.x * 2;
  asm volatile("mma.sync.aligned.{shape}.row.col.f32.{dtype}.{dtype}.f32 "
    "{{%0, %1, %2, %3}}, {{%4, %5, %6, %7}}, {{%8, %9}}, "
    "{{%0, %1, %2, %3}};" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
    : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  for (int i = 0; i < 4; ++i) ((float*)out)[(threadIdx.x / 4 + i / 2 * 8) * 8 + threadIdx.x % 4 * 2 + i % 2] = c[i];
"""
    got = run_text(body, words(128), registers_a, registers_b, c).view(np.float32).reshape(16, 8)
    np.testing.assert_array_equal(got, c + a @ b.T)


def test_conversions_round_as_the_hardware_does() -> None:
    halves = np.array([1.0, 1 + 2**-11, 1 + 3 * 2**-11, 65504, 65520, 2**-24, 2**-25, 3 * 2**-25, -0.1], np.float32)
    body = """
  const float* x = (const float*)in0;
  for (int i = 0; i < 9; ++i) asm volatile("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out[i]) : "f"(x[i]), "f"(-1.0f));
  asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out[9]) : "f"(x[1]), "f"(3.0f));
  out[10] = in0[1];
  asm volatile("cvt.rna.tf32.f32 %0, %0;" : "+r"(out[10]));
"""
    with np.errstate(over="ignore"):
        expected = halves.astype(np.float16).view(np.uint16)
    got = run_text(body, words(11), halves, threads=1)
    np.testing.assert_array_equal(got[:9] >> 16, expected)
    assert set(got[:9] & 0xFFFF) == {0xBC00}
    assert [got[9], got[10]] == [0x3F804040, np.float32(1 + 2**-10).view(np.uint32)]


def test_powers_of_two_and_maxima() -> None:
    """With ftz, as exp2f, a subnormal number is 0; beside NaN the other number is the larger, and the smaller."""
    given = np.array([0, 1, -1, 0.5, -126, -127, 128, -np.inf, np.inf, np.nan, 2**-140], np.float32)
    body = """
  const float* x = (const float*)in0;
  float* y = (float*)out;
  for (int i = 0; i < 11; ++i) {
    asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y[i]) : "f"(x[i]));
    asm volatile("ex2.approx.f32 %0, %1;" : "=f"(y[11 + i]) : "f"(x[i]));
    y[22 + i] = max(x[i], 0.25f);
    y[33 + i] = fmaxf(0.25f, x[i]);
    y[44 + i] = min(x[i], 0.25f);
    y[55 + i] = exp2f(x[i]);
  }
"""
    got = run_text(body, words(66), given, threads=1).view(np.float32).reshape(6, 11)
    with np.errstate(over="ignore"):
        powers = np.exp2(given)
    flushed = np.where(powers < np.finfo(np.float32).tiny, 0, powers)
    for row, expected in ((0, flushed), (1, powers), (5, flushed)):
        np.testing.assert_allclose(got[row], expected, rtol=2**-22)
    given[-1] = 0
    for row, larger in ((2, np.fmax), (3, np.fmax), (4, np.fmin)):
        np.testing.assert_array_equal(got[row], larger(given, np.float32(0.25)))


@pytest.mark.parametrize("swizzle", [0, 1, 2, 3])
@pytest.mark.parametrize("major", ["k", "mn"])
def test_wgmma_reads_operands_as_its_descriptors_say(major: str, swizzle: int) -> None:
    columns, width = 32, 16 << swizzle
    generator = np.random.default_rng(1)
    a, b = (generator.integers(-3, 4, (size, 16)).astype(np.float16) for size in (64, columns))
    memory = np.zeros(16384, np.uint8)
    bits = [place_operand(matrix, memory, 1024 * 8 * i, width, major) for i, matrix in enumerate((a, b))]
    registers = ", ".join(f"%{i}" for i in range(16))
    outputs = ", ".join(f'"+f"(c[{i}])' for i in range(16))
    mode = {0: 0, 1: 3, 2: 2, 3: 1}[swizzle]
    a_bits, b_bits = (
        f"(base >> 4) + {64 * 8 * i} + {(mode << 62) + (stride << 32) + (lead << 16)}ull"
        for i, (lead, stride) in enumerate(bits)
    )
    transposed = int(major == "mn")
    body = f"""
  extern __shared__ __align__(64) uchar pool[];
  alignas(64) float c[16];
  for (int i = 0; i < 32; ++i) ((uint*)pool)[threadIdx.x + 128 * i] = in0[threadIdx.x + 128 * i];
  for (int i = 0; i < 16; ++i) c[i] = 0;
  asm volatile("fence.proxy.async.shared::cta;");
  __syncthreads();
  unsigned long long base = __cvta_generic_to_shared(pool), a = {a_bits}, b = {b_bits};
  asm volatile("wgmma.fence.sync.aligned;");
  asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
    "{{{registers}}}, %16, %17, 1, 1, 1, {transposed}, {transposed};"
    : {outputs} : "l"(a), "l"(b));
  asm volatile("wgmma.commit_group.sync.aligned;");
  asm volatile("wgmma.wait_group.sync.aligned 0;");
  for (int i = 0; i < 16; ++i) {{
    int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + i / 2 % 2 * 8;
    ((float*)out)[row * 32 + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2] = c[i];
  }}
"""
    got = run_text(body, words(64 * 32), memory, threads=128, dynamic=16384).view(np.float32).reshape(64, 32)
    np.testing.assert_array_equal(got, a.astype(np.float32) @ b.T.astype(np.float32))


def test_shuffles_votes_and_election() -> None:
    helpers = f"""
{CALL} uint elect() {{
  uint chosen = 0;
  asm volatile("{{\\n.reg .pred %%px;\\nelect.sync _|%%px, %1;\\n"
               "@%%px mov.s32 %0, 1;\\n}}\\n" : "+r"(chosen) : "r"(0xFFFFFFFF));
  return chosen;
}}
"""
    body = """
  uint l = threadIdx.x;
  out[l] = __shfl_sync(0xffffffffu, l * 10, 3, 8);
  out[32 + l] = __shfl_xor_sync(0xffffffffu, l, 5);
  out[64 + l] = __shfl_down_sync(0xffffffffu, l, 2, 16);
  out[96 + l] = __ballot_sync(0xffffffffu, l % 3 == 0);
  out[128 + l] = __any_sync(0xffffffffu, l == 7) + 2 * __all_sync(0xffffffffu, l < 32);
  out[128 + l] += 4 * __all_sync(0xffffffffu, l < 31);
  out[160 + l] = elect();
  ((float*)out)[192 + l] = __shfl_xor_sync(0xffffffffu, l + 0.5f, 2);
"""
    leaders = set()
    for seed in range(8):
        got = run_text(body, words(224), helpers=helpers, seed=seed).reshape(7, 32)
        lane = np.arange(32)
        np.testing.assert_array_equal(got[0], (lane // 8 * 8 + 3) * 10)
        np.testing.assert_array_equal(got[1], lane ^ 5)
        np.testing.assert_array_equal(got[6].view(np.float32), (lane ^ 2) + 0.5)
        np.testing.assert_array_equal(got[2], np.where(lane % 16 + 2 < 16, lane + 2, lane))
        assert set(got[3]) == {sum(1 << int(one) for one in lane if one % 3 == 0)}
        assert set(got[4]) == {3}
        assert got[5].sum() == 1
        leaders.add(int(got[5].argmax()))
    assert len(leaders) > 1  # which lane is the machine's to choose


def test_a_bounded_wait_gives_up() -> None:
    helpers = f"""
{CALL} ull_t now() {{
  ull_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}}
{CALL} void put(uint* to, uint value) {{
  asm volatile("st.global.b32 [%0], %1;" :: "l"(to + threadIdx.x), "r"(value) : "memory");
}}
"""
    body = """
  ull_t end = now() + 5;
  uint late = 0;
  while (!late) asm volatile("{\\n.reg .pred p;\\nsetp.gt.u64 p, %1, %2;\\nselp.u32 %0, 1, 0, p;\\n}" : "=r"(late)
    : "l"(now()), "l"(end));
  put(out, late);
  if (in0[0]) __trap();
"""
    helpers = "typedef unsigned long long ull_t;\n" + helpers
    assert run_text(body, words(32), words(1), helpers=helpers).all()
    with pytest.raises(KernelFault, match=r"trap: the kernel gives up, by thread .* at line \d+: .*__trap"):
        run_text(body, words(32), words(1) + 1, helpers=helpers)


def test_named_barriers_meet_the_warps_they_count() -> None:
    body = """
  __shared__ alignas(64) uint box[64];
  if (threadIdx.x < 64) {
    box[threadIdx.x] = threadIdx.x + 1;
    asm volatile("bar.arrive 3, 128;");
  } else {
    asm volatile("bar.sync 3, 128;");
    out[threadIdx.x - 64] = box[127 - threadIdx.x];
  }
"""
    for seed in range(6):
        got = run_text(body, words(64), threads=128, seed=seed)
        np.testing.assert_array_equal(got, np.arange(64, 0, -1))


def test_blocks_of_a_cluster_read_each_others_shared_memory() -> None:
    body = """
  __shared__ alignas(64) uint box[32];
  uint rank, there, word;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  box[threadIdx.x] = rank * 100 + threadIdx.x;
  asm volatile("barrier.cluster.arrive.release.aligned;");
  asm volatile("barrier.cluster.wait.acquire.aligned;");
  uint here = (uint)__cvta_generic_to_shared(box + threadIdx.x);
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank ^ 1));
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(word) : "r"(there));
  out[rank * 32 + threadIdx.x] = word;
  asm volatile("barrier.cluster.arrive.aligned;");
  asm volatile("barrier.cluster.wait.aligned;");
"""
    got = run_text(body, words(64), cluster=2)
    np.testing.assert_array_equal(got, np.concatenate([100 + np.arange(32), np.arange(32)]))


def test_cp_async_fills_with_zeros_and_counts_on_mbarriers() -> None:
    body = """
  __shared__ alignas(64) uint tile[128];
  __shared__ alignas(8) uint64_t bar[1];
  uint to = (uint)__cvta_generic_to_shared(tile + 4 * threadIdx.x), b = (uint)__cvta_generic_to_shared(bar);
  if (threadIdx.x == 0) asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(b), "r"(32));
  __syncthreads();
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(to), "l"(in0 + 4 * threadIdx.x),
    "r"(threadIdx.x % 2 ? 8 : 16));
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" :: "r"(b));
  asm volatile("{\\n.reg .pred p;\\nAGAIN:\\nmbarrier.test_wait.parity.shared.b64 p, [%0], 0;\\n"
    "@!p bra AGAIN;\\n}" :: "r"(b));
  for (int i = 0; i < 4; ++i) out[4 * threadIdx.x + i] = tile[127 - 4 * threadIdx.x - i];
"""
    data = np.arange(1, 129, dtype=np.uint32)
    expected = data.reshape(32, 4).copy()
    expected[1::2, 2:] = 0
    for seed in range(6):
        np.testing.assert_array_equal(run_text(body, words(128), data, seed=seed), expected.reshape(-1)[::-1])


def test_tma_adds_and_clips() -> None:
    helpers = f"""
{CALL} void add(const void* map, int x, int y, uint from) {{
  asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%0, {{%1, %2}}], [%3];"
               :: "l"(map), "r"(x), "r"(y), "r"(from) : "memory");
}}
"""
    kernel = """extern "C" __global__ void probe(const __grid_constant__ CUtensorMap map) {
  extern __shared__ __align__(64) uchar pool[];
  for (int i = 0; i < 16; ++i) ((float*)pool)[i] = i;
  asm volatile("fence.proxy.async;");
  add(&map, 4, 1, (uint)__cvta_generic_to_shared(pool));
  asm volatile("cp.async.bulk.commit_group;");
  asm volatile("cp.async.bulk.wait_group 0;");
}
"""
    mapped = TensorMap("out", "float32", (7, 2), (32,), (8, 2))
    launch = LaunchPlan("probe", (mapped,), (1, 1, 1), (1, 1, 1), shared_bytes=1024)
    out = np.ones((2, 8), np.float32)
    EmulatedProgram("probe", PREAMBLE_END + helpers + kernel, (launch,), ("out",))(out)
    np.testing.assert_array_equal(out, [[1] * 8, [1, 1, 1, 1, 1, 2, 3, 1]])


@pytest.mark.parametrize(("place", "found"), [("2, 0", "no multiple of 16 bytes"), ("-4, 0", "before the tensor")])
def test_tma_refuses_places_that_hardware_does(place: str, found: str) -> None:
    kernel = f"""extern "C" __global__ void probe(const __grid_constant__ CUtensorMap map) {{
  extern __shared__ __align__(64) uchar pool[];
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {{%1, %2}}], [%3];"
               :: "l"(&map), "r"({place.split(",")[0]}), "r"(0), "r"((uint)__cvta_generic_to_shared(pool)) : "memory");
}}
"""
    mapped = TensorMap("out", "float32", (8, 2), (32,), (8, 2))
    launch = LaunchPlan("probe", (mapped,), (1, 1, 1), (1, 1, 1), shared_bytes=1024)
    with pytest.raises(KernelFault, match=found):
        EmulatedProgram("probe", PREAMBLE_END + kernel, (launch,), ("out",))(np.ones((2, 8), np.float32))


EXAMPLES = {
    "cp.async.ca.shared.global.L2::128B [%0], [%1], 4;": "emu::cp_async((a), (b), 4);",
    "st.shared.v2.u32 [%0], {%1, %1};": "emu::st_shared<uint>((a), emu::values((b), (b)));",
    "@p bra.uni DONE;": "if (p) goto DONE;",
    "setp.eq.u32 p, %1, 1;": "emu::setp_eq(p, (b), 1);",
}


@pytest.mark.parametrize("ptx", EXAMPLES)
def test_ptx_becomes_calls(ptx: str) -> None:
    assert EXAMPLES[ptx] in translate_asm(f'asm volatile("{ptx}" :: "r"(a), "l"(b) : "memory");')


def test_what_it_does_not_know_is_refused_by_name() -> None:
    with pytest.raises(UnknownInstruction, match=r"no tcgen05\.mma; add it to INSTRUCTIONS in emulator/ptx\.py"):
        translate_asm('asm volatile("tcgen05.mma [%0];" :: "r"(a));')
    with pytest.raises(UnknownText, match="does not begin with TVM's preamble"):
        host_text("__global__ void kernel() {}")
    with pytest.raises(UnknownText, match=r"probe calls surf2Dread.*in line 4: out\[0\] = surf2Dread"):
        run_text("out[0] = surf2Dread(1);", words(1))
    with pytest.raises(UnknownText, match=r"refused the kernel's text.*surface"):
        run_text("out[0] = surface;", words(1))
    with pytest.raises(UnsupportedLaunch, match=r"a stride of 140 bytes.*a box of 512 elements.*swizzle of 128"):
        TensorMap("C", "float16", (70, 70), (140,), (80, 512), 3)
    assert all(name.startswith("emu::") for name in INSTRUCTIONS.values())
