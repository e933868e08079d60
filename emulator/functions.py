"""CUDA functions that the emulator supports, and how exactly it models each: the table of docs/method.md.

``device/functions.h`` implements the mathematical functions, ``device/kernel.h`` and ``device/types.h`` the others. The
error bounds are those of the CUDA programming guide and the PTX ISA.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Functions:
    """A row of the table: functions, their model with and without ``--use_fast_math``, a GPU's error with it."""

    names: str
    fast: str
    precise: str
    error: str


SAME, NO_ERROR = "the same", "none"
FLOAT32, FLOAT64 = "the C library's float32 function", "the C library's float64 function"
MATHEMATICS = (
    Functions("exp2f", "2^x, rounded to float32", FLOAT32, "2 ulp"),
    Functions("expf __expf", "2^p, where p = x · log2 e is rounded to float32", FLOAT32, "2 + ⌊1.173 · abs(x)⌋ ulp"),
    Functions(
        "exp10f __exp10f", "2^p, where p = x · log2 10 is rounded to float32", FLOAT32, "2 + ⌊2.97 · abs(x)⌋ ulp"
    ),
    Functions(
        "log2f __log2f",
        "log2 x; between 1/2 and 2, rounded to a multiple of 2^-23",
        FLOAT32,
        "2^-22 between 1/2 and 2; elsewhere 2 ulp",
    ),
    Functions(
        "logf __logf log10f __log10f",
        "that of `log2f`, times log 2 or log10 2",
        FLOAT32,
        "2^-21.41 or 2^-24 between 1/2 and 2; elsewhere 3 ulp",
    ),
    Functions(
        "powf __powf",
        "2^p, where p = y · log2 x is rounded to float32: NaN for negative x, for 0^0 and for infinity^0",
        FLOAT32,
        "that of log2 and exp2 together: some abs(p) + 2 ulp, and y · 2^-22 between 1/2 and 2",
    ),
    Functions(
        "sinf __sinf cosf __cosf",
        "of x / 2π, truncated to float32 and to a multiple of 2^-25: 0 for small x, without precision for large x",
        FLOAT32,
        "2^-21.41 and 2^-21.19 up to π; 2^-20.5 up to 2π; 2^-14.7 up to 100π; no limit beyond",
    ),
    Functions("tanf __tanf", "`__fdividef(__sinf(x), __cosf(x))`", FLOAT32, "that of its operands"),
    Functions(
        "tanhf __tanhf",
        "tanh x, rounded to 16 bits; subnormals are not flushed (`tanh.approx`, since CUDA 13)",
        FLOAT32,
        "2^-11 relative; 2^-16.5 on an H200",
    ),
    Functions(
        "/ __fdividef",
        "x · (1 / y), both rounded to float32: 0 for abs(y) beyond 2^126, NaN if x is infinite, too",
        "IEEE division; `__fdividef` as on the left",
        "2 ulp for y from 2^-126 to 2^126",
    ),
    Functions("sqrtf rsqrtf", "C's `sqrtf`, and its reciprocal", SAME, "1 and 2 ulp"),
    Functions("copysignf ldexpf nearbyintf nextafterf rintf roundf truncf", FLOAT32, SAME, NO_ERROR),
    Functions("ceilf fabsf floorf fmaf fmaxf fminf fmodf", f"{FLOAT32}, flushed", FLOAT32, NO_ERROR),
    Functions(
        "acosf acoshf asinf asinhf atan2f atanf atanhf coshf erff hypotf log1pf sinhf",
        f"{FLOAT32}, flushed",
        FLOAT32,
        "4 ulp",
    ),
    Functions(
        "acos acosh asin asinh atan atan2 atanh cos cosh erf exp exp10 exp2 hypot log log10 log1p log2 pow rsqrt sin "
        "sinh sqrt tan tanh",
        FLOAT64,
        SAME,
        "2 ulp",
    ),
    Functions("ceil copysign fabs floor fmod ldexp nearbyint nextafter rint trunc", FLOAT64, SAME, NO_ERROR),
    Functions(
        "hexp hexp10 hexp2 hlog hlog10 hlog2 hrcp hrsqrt hsqrt",
        "half computed in float32, bfloat16 in float64; rounded once",
        SAME,
        "1 ulp",
    ),
    Functions(
        "hsin hcos",
        "half: the C library's function, rounded once; bfloat16: by `sinf`, `cosf`",
        SAME,
        "2 ulp; that of `sinf`",
    ),
    Functions("htan hatan herf hpow", "by `tanf`, `atanf`, `erff`, `powf`", SAME, "that of these"),
    Functions("htanh", "half: by `tanhf`; bfloat16: tanh x, rounded to 16 bits", SAME, "1 ulp"),
    Functions("hceil hfloor hrint htrunc __habs", "exact", SAME, NO_ERROR),
    Functions(
        "max min",
        "with a NaN: the other argument, for 16 bits `b`; float32 is flushed",
        "the same, not flushed",
        NO_ERROR,
    ),
)
OTHERS = (
    "__activemask __all_sync __any_sync __ballot_sync __bfloat162float __cvta_generic_to_shared __float2bfloat16 "
    "__float2bfloat16_rn __float2half __float2half_rn __funnelshift_r __half2float __ldcg __pack_half2 "
    "__pack_nv_bfloat162 __shfl_down_sync __shfl_sync __shfl_up_sync __shfl_xor_sync __stcg __syncthreads __syncwarp "
    "__threadfence __trap printf"
)
KNOWN = frozenset(" ".join([*(functions.names for functions in MATHEMATICS), OTHERS]).split())

_VECTORS = "bfloat16|char|double|float|half|int|longlong|nv_bfloat16|short|uchar|uint|ushort"
TYPE = re.compile(
    rf"(?:make_)?(?:{_VECTORS})[24]|__half|__nv_bfloat16|__nv_fp8x?[24]?_e\dm\d|fp8_e\d_t|u?int(?:8|16|32|64)?_t|size_t|"
    rf"{_VECTORS}|bool|long|signed|unsigned"
)
WORD = re.compile(
    r"__align__|__attribute__|alignas|alignof|catch|\w+_cast|decltype|for|if|noexcept|operator|return|sizeof|"
    r"static_assert|switch|template|while"
)
# Comments, strings and directives, which are blanked before calls are searched.
HIDDEN = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:[^"\\\n]|\\.)*"|^[ \t]*#[^\n]*|__launch_bounds__\([^)]*\)', re.S | re.M)
CALL = re.compile(r"(?<![\w.:>~])([A-Za-z_]\w*) ?\(")
MACRO = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)", re.M)
# Text before a name that makes it a declaration, not a call.
DECLARED = re.compile(r"(?<![\w.])(?!(?:return|else|case|do|throw)\b)(?:[A-Za-z_]\w*[*&]?|>|\* __restrict__)\s+$")


def unknown_calls(text: str) -> Iterator[tuple[int, str]]:
    """Yield (offset, name) of each call of a function that neither the text nor the emulator defines."""
    bare = HIDDEN.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), text)
    calls, defined = [], set(MACRO.findall(text))
    for match in CALL.finditer(bare):
        name = match.group(1)
        if DECLARED.search(bare, max(0, match.start() - 60), match.start()):
            defined.add(name)
        elif not (name in KNOWN or WORD.fullmatch(name) or TYPE.fullmatch(name)):
            calls.append((match.start(), name))
    return (call for call in calls if call[1] not in defined)


def table(rows: Iterable[Functions] = MATHEMATICS) -> str:
    """Write the functions as a table in Markdown."""
    lines = ["| functions | with `--use_fast_math` | without | a GPU's error with it |", "|:--|:--|:--|:--|"]
    for row in rows:
        names = ", ".join(f"`{name}`" for name in row.names.split())
        lines.append(f"| {names} | {row.fast} | {row.precise} | {row.error} |")
    return "\n".join(lines)
