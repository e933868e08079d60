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
from tensorir_ladder.schedules.loops import bind_grid, pad_to_tile, raster_blocks
from tensorir_ladder.schedules.tensor_cores import (
    accumulate_fragment,
    fitting_instruction,
    load_fragments,
    stage_in_swizzled,
    tile_to_warps,
    use_instruction,
    zero_fragment,
)
from tensorir_ladder.schedules.tiles import Choice, TensorCoreTile, TileSet
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.steps.step import HALVES, Config, Step, Variant, checked

ROWS_TOGETHER = 2048  # of the result, in blocks side by side: 132 blocks of 128 x 128 are about a square then


@checked
def schedule(problem: Matmul, config: Config, *, tensorize: bool = True) -> Schedule:
    """Multiply on tensor cores, without a pipeline; ``tensorize=False`` leaves the instructions' loops as they are."""
    sch = Schedule(problem.prim_func())
    block, tile = sch.get_sblock("matmul"), config.tile
    instruction = fitting_instruction(sch, block, TF32 if config.variant == "tf32" else None)
    scope = tile.shared_scope(problem.itemsize)
    pad_to_tile(sch, block, tile.block)
    rows, columns, reduction = sch.get_loops(block)
    loops = tile_to_warps(sch, rows, columns, reduction, tile, instruction)
    bind_grid(sch, raster_blocks(sch, loops.block_row, loops.block_column, max(1, ROWS_TOGETHER // tile.block_m)))
    accumulate_fragment(sch, block, loops, instruction)
    for operand in (0, 1):
        transposed = not instruction.transposes  # on the way to shared memory, since ldmatrix cannot
        stage_in_swizzled(sch, block, operand, loops.k_outer, tile.threads, scope, k_last=transposed)
    loads = [load_fragments(sch, block, operand, loops.k_step, instruction) for operand in (0, 1)]
    for loop in (loops.k_step, loops.fragment_row, loops.fragment_column):
        sch.unroll(loop)
    zero_fragment(sch, block, loops)
    if tensorize:
        use_instruction(sch, loops, loads, instruction)
    return sch


def schedule_for_cpu(problem: Matmul, config: Config) -> Schedule:
    """Make everything but the instructions, as TensorIR: what can be verified without a GPU."""
    return schedule(problem, config, tensorize=False)


# Warp tiles of 64x64 load least from shared memory for each instruction among those that leave room for a second set of
# fragments; those of 64x96 fit one set only. Small block tiles fill the GPU where outputs are few.
TILES = TileSet.of(
    Choice(TensorCoreTile(block=(128, 128, 64), warp=(64, 64)), stages=3),
    Choice(TensorCoreTile(block=(128, 64, 64), warp=(64, 32)), stages=4),
    Choice(TensorCoreTile(block=(64, 128, 64), warp=(32, 64)), stages=4),
    Choice(TensorCoreTile(block=(64, 64, 64), warp=(32, 32)), stages=4),
    more=(
        TensorCoreTile(block=(128, 128, 32), warp=(64, 64)),
        TensorCoreTile(block=(128, 256, 32), warp=(64, 64)),
        TensorCoreTile(block=(256, 128, 32), warp=(64, 64)),
        TensorCoreTile(block=(128, 64, 64), warp=(32, 32)),
    ),
)
STEP = Step(
    number=8,
    topic="tensor_cores",
    text=__doc__,
    schedule=schedule,
    schedule_for_cpu=schedule_for_cpu,
    tiles=TILES,
    stages=3,
    variants=(
        Variant("default", dtypes=HALVES),
        Variant("tf32", dtypes=("float32",), math="tf32"),
    ),
)


if __name__ == "__main__":
    from tensorir_ladder.harness.cli import run_step

    run_step(__file__)
