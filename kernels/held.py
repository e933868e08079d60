"""Values that a loop needs and that stay in registers: the compiler does not compute them again in each turn.

CUDA's compiler takes what it can compute again for cheaper than a register: a tile's row, with the division it takes,
and shared memory's own address, which in a cluster begins with the block's number. Beside an instruction of 64 columns,
which is through after 32 cycles, that was as long as the products. What goes through a shuffle, or through ``asm
volatile``, is not computed again; and what all lanes have from one is uniform, as descriptors and TMA's coordinates
have to be. Where the assembler knows that a value is uniform, no shuffle is left of it (nvcc 13.0).
"""

from __future__ import annotations

from tvm.ir import Expr
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.tirx import Var

_UNIFORM = """
__forceinline__ __device__ int uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }
"""
_ALONE = """
__forceinline__ __device__ int alone(int value) {
  asm volatile("" : "+r"(value));
  return value;
}
"""
_UNIFORM_DESCRIPTOR = """
__forceinline__ __device__ unsigned long long uniform_descriptor(unsigned long long descriptor) {
  const unsigned int low = __shfl_sync(0xffffffffu, (unsigned int)descriptor, 0);
  return (descriptor & 0xffffffff00000000ull) | low;
}
"""
_MOVED = """
__forceinline__ __device__ unsigned long long moved(unsigned long long descriptor, int units) {
  return (descriptor & 0xffffffff00000000ull) | (unsigned int)((unsigned int)descriptor + units);
}
"""


def named(name: str, variable: Var) -> Var:
    """Name a variable in the CUDA text."""
    IRBuilder.name(name, variable)
    return variable


def bound(name: str, value: Expr) -> Var:
    """Emit a variable of that value."""
    return named(name, T.Bind(value))


def held(name: str, value: Expr, is_held: bool = True) -> Expr:
    """Emit a whole number that the lanes of a warp have in common, to be held; where not ``is_held``, it is as it was.

    All lanes have to be there.
    """
    return _bound_call(name, "uniform", _UNIFORM, value) if is_held else value


def held_alone(name: str, value: Expr, is_held: bool = True) -> Expr:
    """Emit the same where a warp's other lanes are elsewhere: not known to be uniform."""
    return _bound_call(name, "alone", _ALONE, value) if is_held else value


def held_descriptor(name: str, descriptor: Expr) -> Var:
    """Emit a matrix descriptor that the lanes of a warp have in common, to be held."""
    return _bound_call(name, "uniform_descriptor", _UNIFORM_DESCRIPTOR, descriptor, "uint64")


def _bound_call(name: str, function: str, text: str, value: Expr, kind: str = "int32") -> Var:
    return bound(name, T.cuda.func_call(function, value, source_code=text, return_type=kind))


def moved(descriptor: Expr, units: Expr) -> Expr:
    """Return a descriptor with its address moved by so many units of 16 bytes, which remain in its lower half."""
    return T.cuda.func_call("moved", descriptor, units, source_code=_MOVED, return_type="uint64")
