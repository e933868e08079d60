"""The persistent matrix product by TMA in Triton's language. Importing this needs triton; see triton_tma."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def block_place(tile, blocks_down, blocks_across, band_height: tl.constexpr):
    """Row and column of a tile among the blocks of C, which are walked down bands ``band_height`` blocks high."""
    band = tile // (band_height * blocks_across)
    first_down = band * band_height
    height = min(blocks_down - first_down, band_height)
    place = tile - first_down * blocks_across
    return first_down + place % height, place // height


@triton.jit
def store_block(c, total, row, column, block_m: tl.constexpr, block_n: tl.constexpr, parts: tl.constexpr):
    """Round a block of sums and store it at an element of C: whole, or as two halves of the columns."""
    if parts == 1:
        c.store([row, column], total.to(c.dtype))
    else:
        halves = tl.permute(tl.reshape(total, (block_m, 2, block_n // 2)), (0, 2, 1))
        left, right = tl.split(halves)
        c.store([row, column], left.to(c.dtype))
        c.store([row, column + block_n // 2], right.to(c.dtype))


@triton.jit
def matmul(
    a,
    b,
    c,
    m,
    n,
    k,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    band_height: tl.constexpr,
    programs: tl.constexpr,
    transposed: tl.constexpr,
    parts: tl.constexpr,
    specialized: tl.constexpr,
):
    """``C[m, n] = A[m, k] · B``, tiles of C ``programs`` apart for each program.

    B is ``B[k, n]``, or ``B[n, k]ᵀ`` where ``transposed``. What lies outside an operand is read as 0 and never
    written, which TMA does by itself. Sums are float32. Operands are tensor descriptors, and the two loops become one
    (``flatten``), so that the next tile's loads begin beside a tile's end. Where loads go to warps of their own
    (``specialized``), Triton 3.6 cannot flatten for sm_90, and operands are pointers: it divides a tile's rows between
    two groups of warps, which the descriptors have to follow, and only those made in the kernel do.
    """
    if specialized:
        a = tl.make_tensor_descriptor(a, [m, k], [k, 1], [block_m, block_k])
        if transposed:
            b = tl.make_tensor_descriptor(b, [n, k], [k, 1], [block_n, block_k])
        else:
            b = tl.make_tensor_descriptor(b, [k, n], [n, 1], [block_k, block_n])
        c = tl.make_tensor_descriptor(c, [m, n], [n, 1], [block_m, block_n // parts])
    blocks_down, blocks_across = tl.cdiv(m, block_m), tl.cdiv(n, block_n)
    tiles = blocks_down * blocks_across
    # The tile that is stored is counted apart: the pipelined loop is ahead of it.
    stored = tl.program_id(0) - programs
    for tile in tl.range(tl.program_id(0), tiles, programs, flatten=not specialized, warp_specialize=specialized):
        down, across = block_place(tile, blocks_down, blocks_across, band_height)
        total = tl.zeros((block_m, block_n), dtype=tl.float32)
        for step in range(tl.cdiv(k, block_k)):
            a_block = a.load([down * block_m, step * block_k])
            if transposed:
                b_block = b.load([across * block_n, step * block_k]).T
            else:
                b_block = b.load([step * block_k, across * block_n])
            total = tl.dot(a_block, b_block, total)
        stored += programs
        down, across = block_place(stored, blocks_down, blocks_across, band_height)
        store_block(c, total, down * block_m, across * block_n, block_m, block_n, parts)
