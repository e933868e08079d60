"""The matrix product in Triton's language. Importing this needs triton; :mod:`harness.peers.triton` uses it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def matmul(
    a_start,
    b_start,
    c_start,
    m,
    n,
    k,
    a_row,
    a_column,
    b_row,
    b_column,
    c_row,
    c_column,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    band_height: tl.constexpr,
    whole: tl.constexpr,
):
    """``C[m, n] = A[m, k] · B[k, n]``, one block of C per program; the six steps are strides in elements.

    Float32 is multiplied as float32 (no TF32); half precision multiplies exactly; both are summed in
    float32 and rounded once to the dtype of C. ``whole`` promises that the blocks divide m, n and k:
    then nothing is masked. No pipeline is written here: Triton makes one of the loop, ``num_stages`` deep.
    """
    # Programs that run at the same time walk down bands of C, ``band_height`` blocks high, so that they
    # read the same blocks of A and B while these are in the L2 cache.
    blocks_down, blocks_across = tl.cdiv(m, block_m), tl.cdiv(n, block_n)
    number = tl.program_id(0)
    band = number // (band_height * blocks_across)
    first_down = band * band_height
    height = min(blocks_down - first_down, band_height)
    place = number - first_down * blocks_across
    rows = (first_down + place % height) * block_m + tl.arange(0, block_m)
    columns = (place // height) * block_n + tl.arange(0, block_n)
    depth = tl.arange(0, block_k)

    a_block = a_start + rows[:, None] * a_row + depth[None, :] * a_column
    b_block = b_start + depth[:, None] * b_row + columns[None, :] * b_column
    total = tl.zeros((block_m, block_n), dtype=tl.float32)
    for done in range(0, k, block_k):
        if whole:
            a = tl.load(a_block)
            b = tl.load(b_block)
        else:
            a = tl.load(a_block, mask=(rows[:, None] < m) & (depth[None, :] < k - done), other=0.0)
            b = tl.load(b_block, mask=(depth[:, None] < k - done) & (columns[None, :] < n), other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
        a_block += block_k * a_column
        b_block += block_k * b_row

    c_block = c_start + rows[:, None] * c_row + columns[None, :] * c_column
    result = total.to(c_start.dtype.element_ty)
    if whole:
        tl.store(c_block, result)
    else:
        tl.store(c_block, result, mask=(rows[:, None] < m) & (columns[None, :] < n))
