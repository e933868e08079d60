"""The emulator computes functions as a GPU does, with fast mathematics and without; it refuses others by name."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from tvm import s_tir, te, tirx
from tvm.target import Target

from tensorir_ladder.emulator import EmulatedProgram, LaunchPlan, PlainBuffer, UnknownText, WrongArray
from tensorir_ladder.emulator.compiler import DEVICE
from tensorir_ladder.emulator.execution import tvm_uses_fast_math
from tensorir_ladder.emulator.functions import KNOWN, MATHEMATICS, table
from tensorir_ladder.emulator.source import PREAMBLE_END
from tensorir_ladder.kernels.codegen.lowering import generate
from tensorir_ladder.lab.function_check import WrongFunction, check_function

pytestmark = pytest.mark.emulator
GPU = Target({"kind": "cuda", "arch": "sm_90a"})
SPECIAL = [
    0.0,
    -0.0,
    1,
    -1,
    2,
    -2,
    3,
    np.inf,
    -np.inf,
    np.nan,
    1e-40,
    2.0**-127,
    2.0**126,
    2.0**127,
    3e38,
    88,
    -88,
    1e6,
]
CTYPES = {"float16": "half", "bfloat16": "nv_bfloat16", "float32": "float", "float64": "double"}


def compute(expressions: list[str], x: np.ndarray, y: np.ndarray, fast_math: bool) -> dict[str, np.ndarray]:
    """Compute expressions of ``x`` and ``y`` in the emulator."""
    dtype = CTYPES[x.dtype.name]
    body = "".join(f"  O[at * {len(expressions)} + {i}] = {text};\n" for i, text in enumerate(expressions))
    kernel = f"""extern "C" __global__ void __launch_bounds__(32) probe({dtype}* X, {dtype}* Y, {dtype}* O) {{
  int at = ((int)blockIdx.x) * 32 + ((int)threadIdx.x);
  {dtype} x = X[at], y = Y[at];
{body}}}
"""
    given = [np.resize(a, -(-x.size // 32) * 32) for a in (x, y)]
    out = np.zeros((given[0].size, len(expressions)), x.dtype)
    launch = LaunchPlan("probe", tuple(map(PlainBuffer, "XYO")), (out.shape[0] // 32, 1, 1), (32, 1, 1))
    program = EmulatedProgram("probe", PREAMBLE_END + kernel, (launch,), ("X", "Y", "O"), operands=("X", "Y"))
    replace(program, fast_math=fast_math)(*given, out)
    return {text: out[: x.size, i] for i, text in enumerate(expressions)}


FLOAT32 = [
    *(
        "x + y",
        "x * y",
        "(x / y)",
        "powf(x, y)",
        "expf(x)",
        "exp2f(x)",
        "exp10f(x)",
        "logf(x)",
        "log2f(x)",
        "log10f(x)",
    ),
    *(
        "sinf(x)",
        "cosf(x)",
        "tanf(x)",
        "tanhf(x)",
        "sqrtf(x)",
        "rsqrtf(x)",
        "fabsf(x)",
        "max(x, y)",
        "__fdividef(x, y)",
    ),
]


def pairs() -> tuple[np.ndarray, np.ndarray]:
    """Special numbers with each other, and drawn ones."""
    random = np.random.default_rng(1)
    x, y = (a.ravel() for a in np.meshgrid(SPECIAL, SPECIAL))
    x = np.concatenate(
        [x, random.standard_normal(500) * 20, random.uniform(0.5, 2, 500), random.uniform(-314, 314, 500)]
    )
    return x.astype(np.float32), np.concatenate([y, random.uniform(-3, 3, 1500)]).astype(np.float32)


@pytest.fixture(scope="module")
def fast() -> dict[str, np.ndarray]:
    """Float32 under ``--use_fast_math``."""
    return compute(FLOAT32, *pairs(), fast_math=True)


@pytest.fixture(scope="module")
def precise() -> dict[str, np.ndarray]:
    """Float32 without it."""
    return compute(FLOAT32, *pairs(), fast_math=False)


def value(found: dict[str, np.ndarray], expression: str, x: float, y: float = 0) -> float:
    """The value of an expression of two special numbers."""
    return float(found[expression][SPECIAL.index(y) * len(SPECIAL) + SPECIAL.index(x)])


@pytest.mark.parametrize(
    ("expression", "x", "y", "with_fast_math", "without"),
    [
        ("powf(x, y)", -2, 2, np.nan, 4),
        ("powf(x, y)", -2, 3, np.nan, -8),
        ("powf(x, y)", 0, 0, np.nan, 1),
        ("powf(x, y)", np.inf, 0, np.nan, 1),
        ("powf(x, y)", 0, 2, 0, 0),
        ("powf(x, y)", 2, 3, 8, 8),
        ("(x / y)", 1, 2.0**126, 2.0**-126, 2.0**-126),
        ("(x / y)", 3e38, 2.0**127, 0, np.float32(3e38) / 2.0**127),
        ("(x / y)", np.inf, 2.0**127, np.nan, np.inf),
        ("(x / y)", 1, 1e-40, np.inf, np.inf),
        ("(x / y)", 1e-40, 1e-40, np.nan, 1),
        ("__fdividef(x, y)", 3e38, 2.0**127, 0, 0),
        ("x + y", 1e-40, 0, 0, np.float32(1e-40)),
        ("x * y", 2.0**-127, 2, 0, 2.0**-126),
        ("fabsf(x)", 1e-40, 0, 0, np.float32(1e-40)),
        ("max(x, y)", 1e-40, 0, 0, np.float32(1e-40)),
        ("max(x, y)", np.nan, 2, 2, 2),
        ("expf(x)", -88, 0, 0, np.exp(np.float32(-88))),
        ("tanhf(x)", 1e-40, 0, np.float32(1e-40), np.float32(1e-40)),
        ("sinf(x)", np.inf, 0, np.nan, np.nan),
        ("sinf(x)", 2.0**-127, 0, 0, 2.0**-127),
        ("rsqrtf(x)", 1e-40, 0, np.inf, 1e20),
        ("logf(x)", -1, 0, np.nan, np.nan),
        ("logf(x)", 1e-40, 0, -np.inf, np.log(np.float32(1e-40))),
    ],
)
def test_domains_are_those_of_an_h200(
    fast: dict, precise: dict, expression: str, x: float, y: float, with_fast_math: float, without: float
) -> None:
    """With --use_fast_math, and without: which values are NaN, infinite or zero is an H200's."""
    assert value(fast, expression, x, y) == pytest.approx(with_fast_math, rel=1e-5, abs=0, nan_ok=True)
    assert value(precise, expression, x, y) == pytest.approx(without, rel=1e-4, abs=0, nan_ok=True)


EXACT = {
    "expf(x)": np.exp, "exp2f(x)": np.exp2, "exp10f(x)": lambda x: 10**x, "logf(x)": np.log, "log2f(x)": np.log2,
    "log10f(x)": np.log10, "sinf(x)": np.sin, "cosf(x)": np.cos, "tanhf(x)": np.tanh, "sqrtf(x)": np.sqrt,
}  # fmt: skip


def allowed(expression: str, x: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """How far the CUDA programming guide and the PTX ISA let a GPU be off, with fast mathematics."""
    size, ulp, middle = np.abs(x), np.spacing(np.abs(exact).astype(np.float32)), (x >= 0.5) & (x <= 2)
    name = expression.partition("(")[0]
    steep = {"expf": 1.173, "exp10f": 2.97, "exp2f": 0}
    if name in steep:
        return (2 + np.floor(steep[name] * size)) * ulp
    if name in ("sinf", "cosf"):
        near = 2**-21.41 if name == "sinf" else 2**-21.19
        return np.select([size <= np.pi, size <= 2 * np.pi], [near, 2**-20.5], 2**-14.7)
    absolute = {"logf": 2**-21.41, "log2f": 2**-22, "log10f": 2**-24}
    if name in absolute:
        return np.where(middle, absolute[name], 3 * ulp)
    return 2**-11 * np.abs(exact) if name == "tanhf" else ulp


@pytest.mark.parametrize("expression", EXACT)
def test_errors_are_those_that_a_gpu_may_have(fast: dict, precise: dict, expression: str) -> None:
    x = pairs()[0].astype(np.float64)
    with np.errstate(all="ignore"):
        exact = EXACT[expression](x)
        normal = np.isfinite(exact) & (np.abs(exact) > 2.0**-126) & (np.abs(exact) < 3e38) & (np.abs(x) <= 100 * np.pi)
        normal &= np.abs(x) > 2.0**-126
        off = {
            which: np.abs(found[expression] - exact)[normal] for which, found in (("fast", fast), ("precise", precise))
        }
        limit = allowed(expression, x, exact)[normal]
    assert (off["fast"] <= limit).all()
    assert (off["precise"] <= 3 * np.spacing(np.abs(exact[normal]).astype(np.float32))).all()
    if expression in ("sinf(x)", "cosf(x)", "expf(x)", "tanhf(x)"):  # errors that are seen, as on a GPU
        assert off["fast"].max() > 8 * off["precise"].max()


def test_quotients_are_off_by_two_ulp_at_most(fast: dict, precise: dict) -> None:
    x, y = pairs()
    with np.errstate(all="ignore"):
        exact = x.astype(np.float64) / y
        normal = (
            (np.abs(y) >= 2.0**-126) & (np.abs(y) <= 2.0**126) & (np.abs(exact) > 2.0**-126) & (np.abs(exact) < 3e38)
        )
        off = np.abs(fast["(x / y)"] - exact)[normal] / np.spacing(np.abs(exact[normal]).astype(np.float32))
    assert 0.5 < off.max() <= 2
    np.testing.assert_array_equal(precise["(x / y)"][normal], exact[normal].astype(np.float32))


@pytest.mark.parametrize("fast_math", [True, False])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_subnormal_numbers_of_other_types_stay(dtype: str, fast_math: bool) -> None:
    """Every subnormal half, a normal float32; those of bfloat16 and float64, which float32's mode would flush."""
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    least = ml_dtypes.finfo(kind).smallest_subnormal
    x = (np.arange(1, 1024 if dtype == "float16" else 128) * np.float64(least)).astype(kind)
    y = np.full_like(x, 2)
    compared = ["x + x", "x * y", "(x / y)", "max(x, -x)", "(x < x + x) ? x : -x"]
    got = compute(compared, x, y, fast_math)
    exact = x.astype(np.float64)
    expected = [2 * exact, 2 * exact, exact / 2, exact, exact]
    for found, right in zip(got.values(), expected):
        np.testing.assert_array_equal(found.astype(np.float64), right.astype(kind).astype(np.float64))


def test_numbers_of_16_bits_call_what_cudas_headers_and_tvms_text_call() -> None:
    """``hpow`` and ``htan`` are float32's, ``hexp`` is not; bfloat16 has ``herf``, and subnormal results."""
    for dtype in (np.float16, ml_dtypes.bfloat16):
        x, y = np.array([-2, 2, 0.5, -88.5]).astype(dtype), np.full(4, 2).astype(dtype)
        names = ["hpow(x, y)", "herf(x)", "hexp(x)", "htanh(x)", "htan(x)"]
        fast, precise = (compute(names, x, y, fast_math) for fast_math in (True, False))
        assert np.isnan(fast["hpow(x, y)"][0])
        assert precise["hpow(x, y)"][0] == fast["hpow(x, y)"][1] == 4
        eps = float(ml_dtypes.finfo(dtype).eps)
        assert abs(float(fast["herf(x)"][2]) - 0.5204999) < eps
        np.testing.assert_allclose(
            fast["hexp(x)"].astype(np.float64), np.exp(x.astype(float)), rtol=eps, atol=6e-8 * (dtype == np.float16)
        )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_volatile_numbers_of_16_bits_are_stored_as_others_are(dtype: str) -> None:
    """As threads that sum up in shared memory store them: a variable, and a result."""
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    x, y = np.array([1.5, -2, 3]).astype(kind), np.array([0.25, 7, -1]).astype(kind)
    ctype = CTYPES[dtype]
    text = f"({{ volatile {ctype} kept[2]; kept[0] = x; kept[1] = ({ctype})(kept[0]) + y; ({ctype})(kept[1]); }})"
    np.testing.assert_array_equal(compute([text], x, y, True)[text], x + y)


def test_whole_numbers_of_different_width_are_compared_as_ints() -> None:
    x = np.array([-3.0, 5])
    texts = ["max(0, (signed char)x)", "min((short)x, 2)", "max((signed char)x, (signed char)4)"]
    found = compute(texts, x, x, True)
    np.testing.assert_array_equal([found[text] for text in texts], [[0, 5], [-3, 2], [4, 5]])


def test_tvms_environment_variable_turns_fast_mathematics_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TVM_CUDA_NVCC_NO_FAST_MATH", raising=False)
    assert tvm_uses_fast_math()
    monkeypatch.setenv("TVM_CUDA_NVCC_NO_FAST_MATH", "1")
    assert not EmulatedProgram("nothing", "", (), ()).fast_math


# What it knows


def test_the_docs_show_the_table() -> None:
    assert table() in (Path(__file__).parents[2] / "docs" / "method.md").read_text(encoding="utf-8")


def header_functions() -> set[str]:
    """Names that text may call: what the headers define outside of namespace emu, and their macros."""
    found: set[str] = set()
    for name in ("functions.h", "kernel.h", "types.h"):
        text = re.sub(r"^namespace \w+ \{.*?^\}  // namespace", "", (DEVICE / name).read_text(), flags=re.S | re.M)
        found |= set(re.findall(r"^(?:template <[^>]*> )?(?:EMU_INLINE|inline) [\w ]*?(\w+)\([^)]*\) ?\{", text, re.M))
        found |= set(re.findall(r"^EMU_(?:HALF|BFLOAT16|16_BITS)\((\w+),", text, re.M))
        found |= set(re.findall(r"^#define (\w+)(?:\(\))? (?:__\w+$|emu::)", text, re.M))
    return {name for name in found if not name.startswith("make_")}


def test_text_may_call_what_the_headers_define_and_nothing_else() -> None:
    assert header_functions() - {"printf"} <= KNOWN
    of_two = (
        "__fdividef __powf atan2 atan2f copysign copysignf fmaxf fminf fmod fmodf hpow hypot hypotf ldexp ldexpf max "
        "min nextafter nextafterf pow powf"
    )
    arguments = {"fmaf": 3, **dict.fromkeys(of_two.split(), 2)}
    names = [name for row in MATHEMATICS for name in row.names.split() if name != "/"]
    calls = {name: f"{name}({', '.join(['x'] * arguments.get(name, 1))})" for name in names}
    one = np.ones(1)
    of_16_bits = [name for name in names if name.startswith(("h", "__h")) and name not in ("hypot", "hypotf")]
    of_float64 = [name for row in MATHEMATICS if "float64" in row.fast.split(",")[0] for name in row.names.split()]
    of_float64 = [name for name in of_float64 if name not in of_16_bits]
    of_float32 = [name for name in names if name not in (*of_16_bits, *of_float64)]
    for dtype, called in (
        ("float16", of_16_bits),
        ("bfloat16", of_16_bits),
        ("float32", of_float32),
        ("float64", of_float64),
    ):
        x = one.astype(getattr(ml_dtypes, dtype, dtype))
        for fast_math in (True, False):
            got = compute([calls[name] for name in called], x, x, fast_math)
            assert not any(np.isnan(found.astype(np.float64)).any() for found in got.values())


def scheduled(dtype: str, body) -> tirx.PrimFunc:
    x = te.placeholder((64,), dtype, "X")
    y = te.compute((64,), lambda i: body(x[i]), "Y")
    return te.create_prim_func([x, y])


def on_gpu(function: tirx.PrimFunc) -> s_tir.Schedule:
    sch = s_tir.Schedule(function)
    (loop,) = sch.get_loops(sch.get_sblock("Y"))
    sch.bind(loop, "threadIdx.x")
    return sch


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_functions_that_nvcc_does_not_have_are_refused_by_name(dtype: str) -> None:
    """TVM writes ``hsinh``, which is nowhere defined: kernel, name and line, before any compiler is asked."""
    made = generate(on_gpu(scheduled(dtype, tirx.sinh)).mod, GPU, "s_tir")
    launch = LaunchPlan("main_kernel", (PlainBuffer("X"), PlainBuffer("Y")), (1, 1, 1), (64, 1, 1))
    program = EmulatedProgram("sinh", made.cuda, (launch,), ("X", "Y"))
    with pytest.raises(UnknownText, match=r"main_kernel calls hsinh.*in line \d+: Y_ptr.*docs/method\.md"):
        program(*np.zeros((2, 64), program._wanted["X"][0][0]))


def test_what_is_nan_on_a_gpu_is_wrong_in_the_check() -> None:
    before = scheduled("float32", lambda x: tirx.pow(x, tirx.const(3, "float32")))
    with pytest.raises(WrongFunction, match="is nan, must be"):
        check_function(before, on_gpu(before), GPU, runs=1)
    before = scheduled("bfloat16", tirx.erf)
    assert check_function(before, on_gpu(before), GPU, runs=1).worst <= 1


# Arrays of a call

COPY = f"""{PREAMBLE_END}
extern "C" __global__ void __launch_bounds__(8) copy(float* __restrict__ A, half* __restrict__ B) {{
  B[((int)threadIdx.x)] = ((half)A[((int)threadIdx.x)]);
}}
"""


def copy_program() -> EmulatedProgram:
    launch = LaunchPlan("copy", (PlainBuffer("A"), PlainBuffer("B")), (1, 1, 1), (8, 1, 1))
    return EmulatedProgram("copy", COPY, (launch,), ("A", "B"), operands=("A",))


READ_ONLY = np.zeros(8, np.float16)
READ_ONLY.setflags(write=False)


@pytest.mark.parametrize(
    ("arrays", "found"),
    [
        ((np.ones(8), np.zeros(8, np.float16)), r"A is float64 of shape \(8,\).*A of copy takes float32.*float32"),
        ((np.ones(8, np.int32), np.zeros(8, np.float16)), "A is int32.*takes float32"),
        ((np.ones(8, np.float32), np.zeros(8, ml_dtypes.bfloat16)), "B is bfloat16.*B of copy takes float16"),
        ((np.ones(8, np.float32),), "takes 2 arrays, A, B, and is given 1; give one for each"),
        ((np.ones(8, np.float32), np.zeros(8, np.float16), np.ones(1)), "is given 3"),
        (([1.0] * 8, np.zeros(8, np.float16)), "A is a list; give a numpy array"),
        ((np.ones(16, np.float32)[::2], np.zeros(8, np.float16)), r"A is float32.*strides \(8,\).*ascontiguousarray"),
        ((np.ones(8, np.float32), READ_ONLY), "B is float16.*read-only; give a copy"),
    ],
)
def test_arrays_that_a_kernel_cannot_take_are_refused(arrays: tuple, found: str) -> None:
    with pytest.raises(WrongArray, match=found):
        copy_program()(*arrays)


def test_operands_may_be_read_only_and_bits() -> None:
    bits = np.arange(8, dtype=np.float32).view(np.uint32)
    bits.setflags(write=False)
    out = np.zeros(8, np.uint16)
    copy_program()(bits, out)
    np.testing.assert_array_equal(out.view(np.float16), np.arange(8))
