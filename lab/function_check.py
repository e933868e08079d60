"""Hold any scheduled function to what it was before: TVM's own code on the CPU against the emulated CUDA.

::

    check_function(before, after, target, sizes={"m": 33})

``before`` is run by LLVM, with every floating-point number in float64, so that it is the reference whatever it sums in;
``after`` goes through TVM's stock pipeline, as in ``tvm.compile(after, target)``, and its kernels through the emulator.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import tvm
import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.s_tir import Schedule
from tvm.target import Target

from tensorir_ladder.emulator import EmulatedProgram
from tensorir_ladder.emulator.compiler import require_host_compiler
from tensorir_ladder.kernels.codegen.arithmetic import evaluate
from tensorir_ladder.kernels.codegen.host_code import HostRun, read_host
from tensorir_ladder.kernels.codegen.lowering import Generated, generate

# Written out whole, a loop over numbers of 16 bits takes LLVM minutes.
CPU = tvm.target.Target({"kind": "llvm", "opt-level": 1})
RESIDENT = 132  # blocks that are alive together
FLOATS = re.compile(r"\b(?:bfloat16|float(?:16|32|8_\w+))\b")
# Bits that mean a number of one dtype mean another in the next, and what is not written out cannot be rewritten.
AS_WRITTEN = re.compile(r"\breinterpret\(|\bmetadata\[")
WHOLE_UNITS = 2.0**10  # whole numbers and such parts of them, as means and halves make
# Of CUDA's fast mathematics (docs/method.md): an error of float32 where arithmetic is exact, and of its tanh.
FAST_ULPS, FAST_TANH = 4, 2.0**-16
ARITHMETIC = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Div)
EXACT_CALLS = frozenset(
    ("abs", "ceil", "copysign", "fabs", "floor", "fmod", "if_then_else", "likely", "nearbyint", "round", "trunc")
)
LARGEST = {"int8": 127, "uint8": 255, "uint32": 2**32 - 1, "bool": 1}  # of drawn whole numbers; of others, 100


class WrongFunction(AssertionError):
    """A scheduled function that computes something else than it did before, leaves some out, or changes an operand."""


@dataclass(frozen=True)
class CheckedFunction:
    """Tell what was checked: kernels launched, by name and in order, and the largest error as a part of its limit."""

    kernels: tuple[str, ...]
    worst: float


def check_function(
    before: tirx.PrimFunc,
    after: tirx.PrimFunc | tvm.IRModule | Schedule,
    target: Target,
    sizes: Mapping[str, float] | None = None,
    *,
    arrays: Mapping[str, np.ndarray] | None = None,
    seed: int = 0,
    runs: int = 3,
    sums: str = "float32",
    slack: float = 1.0,
) -> CheckedFunction:
    """Check that ``after`` does what ``before`` does; raise WrongFunction, or the emulator's KernelFault.

    Without a C++ compiler it raises the emulator's NoHostCompiler.

    Parameters
    ----------
    before : a function without a schedule, of any parameters. Those it writes to are its outputs;
        those that it reads before are operands as well.
    after : what became of it: a function, scheduled or lowered, of the same parameters.
    sizes : values of its symbolic extents and scalar parameters, by name.
    arrays : operands that cannot be drawn, by name: indices, say. Others are drawn from ``seed``, of standard normal
        numbers in the first, third, ... of ``runs``, of whole numbers from -2 to 2 in the others. Each run has another
        order of threads, and copies that are done at once, as late as may be, or in between.
    sums : the dtype that ``after`` may add up in.
    slack : a factor for the limit, for functions that lose more.

    Outputs are poisoned before each run (NaN; of whole numbers, others in each run), operands compared byte by byte
    after it. A number may be off by ``slack`` times

    - 2 eps of the output's dtype, of itself, and its smallest number;
    - 4 eps of each dtype that ``before`` rounds to on the way, and (4 + 4 √length) eps of ``sums``, of the output's
      root mean square: what is added up, and cancels, is as large as that. ``length`` is of its longest reduction.

    Whole numbers must be the same. So must numbers of a run on whole ones, where ``before`` as it is written rounds
    none: every order of additions is exact then. Functions that look at the bits of numbers (``reinterpret``) are run
    as they are written.

    TVM compiles with ``--use_fast_math``, and so does the emulator. Two limits allow for that: where ``before`` divides
    by other numbers than powers of two, or calls a function such as ``exp``, a run on whole numbers may be off by 4 eps
    of float32, of a number and of the root mean square; and ``tanh`` counts as a rounding on the way, to 16 bits. There
    are no others: a power of a negative number is NaN, and wrong.
    """
    require_host_compiler()
    case = _Case(before, dict(sizes or {}), arrays or {}, sums, slack)
    made = _generated(_only_function(after), target)
    run = read_host(made.host, _named_sizes(_only_function(after), case))
    program = _program(made, run, case)
    worst = max(_compare(case, program, run, seed + number, number) for number in range(runs))
    return CheckedFunction(tuple(launch.kernel for launch in run.launches), worst)


# Of whole functions, which are compared again and again at other sizes.
@functools.lru_cache(maxsize=8)
def _generated(function: tirx.PrimFunc, target: Target) -> Generated:
    return generate(_module(function), target, "s_tir")


@functools.lru_cache(maxsize=8)
def _references(before: tirx.PrimFunc) -> list[tuple[tirx.PrimFunc, Any]]:
    """Compile a function for the CPU: as it is written and, where that can be, in float64."""
    wide = _widened(before)
    # LLVM's code generator has no numbers of 8 bits.
    as_written = [] if wide is not None and "float8" in before.script() else [before]
    functions = [*as_written, *([wide] if wide is not None else [])]
    return [(function, tvm.compile(_module(function), CPU)["main"]) for function in functions]


class _Case:
    """The function before, in numbers: its parameters' shapes, which it writes, and how it computes them."""

    def __init__(
        self,
        before: tirx.PrimFunc,
        sizes: dict[str, float],
        arrays: Mapping[str, np.ndarray],
        sums: str,
        slack: float,
    ) -> None:
        self.function, self.sizes, self.arrays, self.sums, self.slack = before, sizes, arrays, sums, slack
        self.values = {var: sizes[var.name] for var in symbols_of(before) if var.name in sizes}
        self.names = [str(parameter.name) for parameter in before.params]
        written = _written(before)
        self.buffers = {n: p for n, p in zip(self.names, before.params) if hasattr(p.ty, "shape")}
        self.outputs = [n for n, p in self.buffers.items() if any(p.same_as(buffer) for buffer in written)]
        updated = _updated(before)
        self.updated = [n for n in self.outputs if any(self.buffers[n].same_as(buffer) for buffer in updated)]
        self.references = _references(before)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a parameter's shape at these sizes."""
        found = [evaluate(extent, self.values) for extent in self.buffers[name].shape]
        if None in found:
            raise ValueError(f"{name} is of shape {list(self.buffers[name].shape)}; give its extents by sizes=")
        return tuple(int(extent) for extent in found)

    def dtype(self, name: str) -> np.dtype:
        """Return a parameter's dtype, as numpy knows it."""
        return numpy_of(str(self.buffers[name].dtype))

    def draw(self, seed: int, whole: bool) -> dict[str, np.ndarray]:
        """Draw all operands; outputs are poisoned."""
        random, drawn = np.random.default_rng(seed), {}
        for name in self.buffers:
            shape, dtype = self.shape(name), self.dtype(name)
            if name in self.arrays:
                drawn[name] = self.arrays[name].astype(dtype)
            elif name in self.outputs and name not in self.updated:
                drawn[name] = poison(shape, dtype, seed)
            elif is_float(dtype):
                numbers = random.integers(-2, 3, shape) if whole else random.standard_normal(shape)
                drawn[name] = numbers.astype(dtype)
            else:
                most = LARGEST.get(dtype.name, 100)
                drawn[name] = random.integers(-most - 1 if dtype.kind == "i" else 0, most + 1, shape).astype(dtype)
        return drawn

    def expected(self, given: Mapping[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
        """Run the function on the CPU, as it is written and, where that can be, in float64."""
        found = []
        for function, run in self.references:
            tensors: list[Any] = []
            for name, parameter in zip(self.names, function.params):
                if name in given:
                    tensors.append(tvm.runtime.tensor(given[name].astype(numpy_of(str(parameter.dtype)))))
                elif name in self.sizes:
                    tensors.append(self.sizes[name])
                else:
                    raise ValueError(f"{name} is a number; give it by sizes=")
            run(*tensors)
            made = dict(zip(self.names, tensors))
            found.append({name: made[name].numpy() for name in self.outputs})
        return found

    def limit(self, name: str, reference: np.ndarray) -> np.ndarray:
        """Return how far each element may be off."""
        size, mean = np.abs(reference), _root_mean_square(reference)
        between = max([0.0, *map(eps_of, self._rounded_to()), *([FAST_TANH] if self._calls("tanh") else [])])
        length = max(self._lengths(), default=1)
        common = 4 * between + (4 + 4 * math.sqrt(length)) * eps_of(self.sums)
        least = float(ml_dtypes.finfo(self.dtype(name)).smallest_subnormal)
        return self.slack * (2 * eps_of(self.dtype(name).name) * size + common * mean + least)

    def exact_limit(self, exact: np.ndarray) -> np.ndarray:
        """Return how far numbers that nothing rounds may be off: not at all, but for fast mathematics."""
        fast = FAST_ULPS * eps_of("float32") if self._is_approximate() else 0.0
        return fast * (np.abs(exact) + _root_mean_square(exact))

    def _is_approximate(self) -> bool:
        """Tell if the function calls what fast mathematics approximates, or divides by other than powers of two."""
        divisors = [divided.b for divided in _found(self.function, tirx.Div) if "float" in str(divided.ty.dtype)]
        values = [float(by.value) if isinstance(by, tirx.FloatImm) else 0.0 for by in divisors]
        return self._calls() or any(abs(math.frexp(value)[0]) != 0.5 for value in values)

    def _calls(self, name: str | None = None) -> bool:
        """Tell if the function calls the function of that name in a floating-point dtype, or any that is not exact."""
        calls = [
            str(call.op.name).rpartition(".")[2]
            for call in _found(self.function, ir.Call)
            if "float" in str(call.ty.dtype)
        ]
        return name in calls if name else not EXACT_CALLS.issuperset(calls)

    def keeps(self, exact: np.ndarray) -> bool:
        """Tell if numbers as large as these fit into what the function keeps on the way; LLVM rounds less than that."""
        return all((exact.astype(numpy_of(dtype)).astype(np.float64) == exact).all() for dtype in self._rounded_to())

    def _rounded_to(self) -> set[str]:
        """List the floating-point dtypes of what the function keeps on the way, and computes within an expression."""
        blocks = _found(self.function, s_tir.SBlock)
        kept = {str(buffer.dtype) for block in blocks for buffer in block.alloc_buffers}
        stores = [block.body for block in blocks if block.init is None and isinstance(block.body, tirx.BufferStore)]
        kept |= {str(part.ty.dtype) for store in stores for part in _within(store.value)}
        return {dtype for dtype in kept if "float" in dtype}

    def _lengths(self) -> list[int]:
        """List how many elements each block reduces to one."""
        found = []
        for block in _found(self.function, s_tir.SBlock):
            extents = [i.dom.extent for i in block.iter_vars if i.iter_type == tirx.IterVar.CommReduce]
            found.append(math.prod(int(evaluate(extent, self.values) or 1) for extent in extents))
        return found


def _compare(case: _Case, program: EmulatedProgram, run: HostRun, seed: int, number: int) -> float:
    """Run both on drawn data; return the largest error as a part of its limit."""
    given = case.draw(seed, whole=bool(number % 2))
    held = {name: array.copy() for name, array in given.items()}
    kept = [poison(buffer.shape, numpy_of(buffer.dtype), seed) for buffer in run.kept if not _is_memory(buffer)]
    program(*held.values(), *kept, seed=seed)
    for name in given:
        if name not in case.outputs and given[name].tobytes() != held[name].tobytes():
            raise WrongFunction(f"operand {name} is not what it was before the run (seed {seed})")
    *written, exact = case.expected(given)
    return max(
        (_check(case, name, held[name], exact[name], written, number, seed) for name in case.outputs), default=0.0
    )


def _check(
    case: _Case,
    name: str,
    got: np.ndarray,
    exact: np.ndarray,
    written: list[dict[str, np.ndarray]],
    number: int,
    seed: int,
) -> float:
    if not got.size:
        return 0.0
    if not is_float(case.dtype(name)):
        wrong, limit, error = got != exact, np.zeros(got.shape), np.abs(got.astype(np.float64) - exact)
    else:
        exact, found = exact.astype(np.float64), got.astype(np.float64)
        limit = case.limit(name, exact)
        if number % 2 and written and _is_exact(exact, written[0][name]) and case.keeps(exact):
            limit = case.exact_limit(exact)
        with np.errstate(invalid="ignore"):
            error = np.where(found == exact, 0.0, np.abs(found - exact))
            wrong = ~((error <= limit) | (np.isnan(found) & np.isnan(exact)))
    if wrong.any():
        place = tuple(map(int, np.argwhere(wrong)[0]))
        worst = tuple(
            map(
                int,
                np.unravel_index(int(np.argmax(np.where(wrong, np.nan_to_num(error, nan=np.inf), -1.0))), got.shape),
            )
        )
        raise WrongFunction(
            f"{int(wrong.sum())} of {got.size} elements of {name} are wrong at {case.sizes or got.shape} (seed "
            f"{seed}): the first, {place}, is {got[place]}, must be {exact[place]}; the worst, {worst}, is "
            f"{got[worst]}, must be {exact[worst]}, limit {limit[worst]:.3g}"
        )
    return float(np.max(np.where(limit > 0, error / np.where(limit > 0, limit, 1), 0.0)))


def _within(value: ir.Expr) -> list[ir.Expr]:
    """List the arithmetic that an expression goes on with: what it ends with is rounded as its own result is."""
    found: list[ir.Expr] = []
    tvm_ffi.structural_walk(value, (ARITHMETIC, found.append))
    while isinstance(value, tirx.Cast):
        value = value.value
    return [part for part in found if not part.same_as(value)]


def _root_mean_square(reference: np.ndarray) -> float:
    size = np.abs(reference)
    return math.sqrt(float(np.mean(np.square(size, where=np.isfinite(size), out=np.zeros_like(size)))))


def _is_exact(exact: np.ndarray, written: np.ndarray) -> bool:
    """Tell if a run rounded nothing: whole numbers, or such parts of them, and the same in narrow arithmetic."""
    units = exact * WHOLE_UNITS
    return bool(
        np.isfinite(units).all() and (units == np.rint(units)).all() and (written.astype(np.float64) == exact).all()
    )


def _program(made: Generated, run: HostRun, case: _Case) -> EmulatedProgram:
    # Whole numbers that kernels keep are flags to the emulator; these are not, and are given as outputs are.
    others = [buffer for buffer in run.kept if not _is_memory(buffer)]
    memory = [buffer for buffer in run.kept if _is_memory(buffer)]
    names = (*case.buffers, *(buffer.buffer for buffer in (*others, *memory)))
    kept = tuple((buffer.shape, numpy_of(buffer.dtype)) for buffer in memory)
    operands = tuple(name for name in case.buffers if name not in case.outputs)
    return EmulatedProgram("after", made.cuda, run.launches, names, kept, RESIDENT, operands)


def _is_memory(buffer: Any) -> bool:
    return "float" in buffer.dtype


def _module(function: tirx.PrimFunc | tvm.IRModule | Schedule) -> tvm.IRModule:
    return tvm.IRModule({"main": _only_function(function).with_attr("global_symbol", "main")})


def _only_function(made: tirx.PrimFunc | tvm.IRModule | Schedule) -> tirx.PrimFunc:
    if isinstance(made, tirx.PrimFunc):
        return made
    (function,) = (made.mod if isinstance(made, Schedule) else made).functions.values()
    return function


def _named_sizes(after: tirx.PrimFunc, case: _Case) -> dict[str, float]:
    """Name sizes as ``after`` does, whose extents and parameters may have other names: by the parameters' places."""
    assert len(after.params) == len(case.names), "other parameters than before"
    sizes: dict[str, float] = {}
    for name, parameter in zip(case.names, after.params):
        if name not in case.buffers:
            sizes[str(parameter.name)] = case.sizes[name]
            continue
        shape = case.shape(name)
        assert len(shape) == len(parameter.shape), f"{name} has another rank than before"
        for extent, value in zip(parameter.shape, shape):
            if isinstance(extent, tirx.Var):
                assert sizes.setdefault(extent.name, value) == value, f"two values of {extent.name}: {name} is {shape}"
            elif isinstance(extent, tirx.IntImm):
                assert int(extent) == value, f"{name} is of shape {parameter.shape} after, {shape} before"
    return {**{name: value for name, value in case.sizes.items() if name not in case.buffers}, **sizes}


def _widened(function: tirx.PrimFunc) -> tirx.PrimFunc | None:
    """Return the function with all floating-point numbers in float64; None where it looks at their bits."""
    text = function.with_attr("global_symbol", "main").script()
    if AS_WRITTEN.search(text):
        return None
    return tvm.script.from_source(widened_text(text))


def widened_text(text: str) -> str:
    """Return TVMScript with all floating-point numbers in float64."""
    # The dtype that is not written is float32.
    text = re.sub(r"sblock_alloc_buffer\((\((?:[^()]|\([^()]*\))*\))\)", r'sblock_alloc_buffer(\1, "float64")', text)
    return FLOATS.sub("float64", text)


def _found(function: tirx.PrimFunc, kind: type) -> list[Any]:
    nodes: list[Any] = []
    tvm_ffi.structural_walk(function.body, (kind, nodes.append))
    return nodes


def _written(function: tirx.PrimFunc) -> list[tirx.Var]:
    return [store.buffer for store in _found(function, tirx.BufferStore)]


def _updated(function: tirx.PrimFunc) -> list[tirx.Var]:
    """List what the function reads before it writes it: not sums, which begin by an init."""
    written: list[tirx.Var] = []
    found: list[tirx.Var] = []
    for block in _found(function, s_tir.SBlock):
        inner: list[s_tir.SBlock] = []
        tvm_ffi.structural_walk(block.body, (s_tir.SBlock, inner.append))
        if inner:
            continue
        stored = [region.source for region in block.writes]
        known = [*written, *(stored if block.init is not None else [])]
        loads: list[tvm.ir.TensorLoad] = []
        tvm_ffi.structural_walk(block.body, (tvm.ir.TensorLoad, loads.append))
        found += [load.source for load in loads if not any(load.source.same_as(buffer) for buffer in known)]
        written += stored
    return found


def symbols_of(function: tirx.PrimFunc) -> list[tirx.Var]:
    """List a function's parameters, and the variables of their extents."""
    found: list[tirx.Var] = list(function.params)
    for parameter in function.params:
        for extent in getattr(parameter, "shape", ()):
            tvm_ffi.structural_walk(extent, (tirx.Var, found.append))
    return found


def poison(shape: tuple[int, ...], dtype: np.dtype, seed: int) -> np.ndarray:
    """Fill memory with what no result may be: NaN, or whole numbers that ``seed`` draws."""
    if is_float(dtype):
        return np.full(shape, np.nan, dtype)
    return (
        np.random.default_rng(seed + 77).integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype).reshape(shape)
    )


def is_float(dtype: np.dtype) -> bool:
    """Tell if a dtype is of floating-point numbers, numpy's or another."""
    return "float" in dtype.name


def eps_of(dtype: str) -> float:
    """Return the distance from 1 to the next number of a floating-point dtype."""
    return float(ml_dtypes.finfo(numpy_of(dtype)).eps)


def numpy_of(dtype: str) -> np.dtype:
    """Return a dtype of TVM's as numpy knows it."""
    return np.dtype(getattr(ml_dtypes, dtype, dtype))
