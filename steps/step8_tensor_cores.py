"""Step 8, tensor cores: a warp multiplies 16 × 8 × 16 with one instruction.

Before, each multiply-add was an instruction of one thread, with operands from shared memory. Now the 32 threads
of a warp hold 16 × 16 tiles of both operands in their registers, each thread its part (a *fragment*), and one
`mma.sync` multiplies them; `ldmatrix` brings four pieces of 8 rows of 16 bytes at once::

    for k_outer:
      A_shared = A[tile];  B_shared = B[tile]             # by all threads, then a barrier
      for k_step < block_k / 16:
        A_frag = ldmatrix(A_shared);  B_frag = ldmatrix(B_shared)
        for fragment_row, fragment_column:  C_frag += mma(A_frag, B_frag)

What changes: float16 and bfloat16 operands, summed in float32. Rows in shared memory are swizzled, so that the
8 rows of a piece lie in different banks. The write-back is still an ordinary loop over each thread's results.
Variants: default, and tf32 for float32 operands, which rounds each to 11 bits: another arithmetic, so it has to be
asked for.

What to expect: arithmetic is no longer what the kernel waits for. There is no pipeline here, on purpose: every
k tile now waits for its loads in the open. Without a GPU the schedule is verified before instructions replace its
innermost loops: the same tiles, copies and fragment layouts, as plain TensorIR.
"""

from __future__ import annotations

from tvm.s_tir import Schedule

from tensorir_ladder.schedules.isa import TF32
from tensorir_ladder.schedules.loops.vectorization import dtype_bytes
from tensorir_ladder.schedules.tensor_cores.mma import TensorizedContraction, tensorize_contraction, use_instruction
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.steps.config import TENSOR_CORE_TILES, StepConfig

VARIANTS = ("default", "tf32")
DTYPES = {"default": ("float16", "bfloat16"), "tf32": ("float32",)}
MATH = {"tf32": "tf32"}
TILES = TENSOR_CORE_TILES


def contraction(problem: Matmul, config: StepConfig) -> tuple[Schedule, TensorizedContraction]:
    """The schedule, all but the instructions."""
    sch = Schedule(problem.prim_func())
    scope = config.tile.shared_scope(dtype_bytes(problem.dtype))
    instruction = TF32 if config.variant == "tf32" else None
    return sch, tensorize_contraction(sch, sch.get_sblock("matmul"), config.tile, scope=scope, instruction=instruction)


def schedule_before_tensorization(problem: Matmul, config: StepConfig) -> Schedule:
    """What can be verified without a GPU: everything but the instructions, as TensorIR."""
    return contraction(problem, config)[0]


def schedule(problem: Matmul, config: StepConfig) -> Schedule:
    """The product on tensor cores, without a pipeline."""
    sch, tensorized = contraction(problem, config)
    use_instruction(sch, tensorized)
    return sch


if __name__ == "__main__":
    from tensorir_ladder.harness.cli import run_step

    run_step(__file__)
