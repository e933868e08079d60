"""Hopper's warpgroup instruction as data, and the tensor intrinsics made from it.

One ``wgmma.mma_async`` multiplies 64 rows by n columns, 16 steps deep. The four warps of a warpgroup issue it
together; it reads both operands from shared memory through 64-bit descriptors, adds to accumulators in registers, and
runs on while the warps go on. Sources: PTX ISA 8.x, "Asynchronous warpgroup level matrix instructions" (register
fragments, matrix descriptor, strides, 128-byte swizzle).

Operands lie in shared memory as *panels*, ``[contiguous / 64][other][64]`` 16-bit elements: rows of 128 bytes, whose
eight 16-byte pieces are permuted by the row's number modulo 8 (:mod:`schedules.memory.swizzling`, the instruction's
128-byte swizzle). The contiguous dimension is k for A and for a B stored [n, k] ("K-major"), and n for a B stored
[k, n] ("MN-major", which the instruction transposes on its way, for 16-bit types); the last panel of such a B may have
more columns than the instruction.

Operands may be *swapped*: the instruction's 64 rows are then columns of the product, and its columns rows, by eights:
C transposed = B transposed * A transposed, element by element the same sums.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import ir, tirx
from tvm.s_tir import TensorIntrin
from tvm.script import tirx as T

from tensorir_ladder.schedules.errors import IllegalTile
from tensorir_ladder.schedules.isa import (
    ADDRESS_MASK,
    PANEL,
    PTX_TYPES,
    STEP,
    WARPGROUP,
    WGMMA_ROWS,
    Panels,
    wgmma_misfits,
    wgmma_place,
)
from tensorir_ladder.schedules.tensor_cores.fragments import FRAGMENT

LANES = WARPGROUP


@dataclass(frozen=True)
class Wgmma:
    """A warpgroup's multiplication of one k tile: ``rows`` × ``columns`` outputs, ``steps`` deep.

    ``dtype`` is the operands' ("float16" or "bfloat16"); sums are float32. ``b_major`` is "k" for a B stored [n, k],
    "n" for one stored [k, n]. ``a_rows`` and ``b_rows`` are the rows of one panel in shared memory, all warpgroups'
    together. Instructions are 64 × ``columns`` × 16. ``swapped``: they multiply B by A, ``rows`` are columns of the
    product, ``columns`` its rows. ``fenced``: threads have put the operands where they are, which it is told to see;
    TMA's it sees without, and a fence waits some ten cycles in each k tile.

    Raises
    ------
    IllegalTile : on construction, for what the instruction has no form for, and for fewer columns of a B stored [k, n]
        than a panel has.
    """

    rows: int
    columns: int
    steps: int
    dtype: str
    b_major: str
    a_rows: int
    b_rows: int
    swapped: bool = False
    fenced: bool = True

    def __post_init__(self) -> None:
        found = wgmma_misfits(self.rows, self.columns, self.steps)
        if self.dtype not in PTX_TYPES:
            found.append(f"operands of {self.dtype}, where the instruction here takes {' and '.join(PTX_TYPES)}")
        if found:
            raise IllegalTile("no wgmma does this: " + "; ".join(found), remedy="choose another tile, dtype or layout")
        # TVM would lay such rows side by side, where the instruction reads rows of 128 bytes.
        if self.b_major == "n" and not self.swapped and self.columns < PANEL:
            raise IllegalTile(
                "instructions of few columns need a B that is stored transposed, [n, k]",
                value=f"{self.columns} columns of a B stored [k, n]",
                limit=f"{PANEL} columns or more",
                remedy="choose a tile whose warpgroups have more columns, or store B transposed (layout nt)",
            )

    @property
    def registers(self) -> int:
        """Accumulators of one thread."""
        return self.rows * self.columns // LANES

    @property
    def name(self) -> str:
        """Name of its intrinsics and of its CUDA function."""
        shape = f"m{self.rows}n{self.columns}k{self.steps}"
        form = ("_swapped" if self.swapped else "") + ("" if self.fenced else "_unfenced")
        return f"wgmma_{shape}_{PTX_TYPES[self.dtype]}_{self.b_major}_{self.a_rows}_{self.b_rows}{form}"

    def fragment(self, row: tirx.PrimExpr | int, column: tirx.PrimExpr | int) -> tuple:
        """Return the (lane, register) that accumulates a warpgroup's output; see :func:`schedules.isa.wgmma_place`."""
        return wgmma_place(*((column, row) if self.swapped else (row, column)), self.columns)

    @property
    def outputs(self) -> tuple[int, int]:
        """Rows and columns of the product that a warpgroup accumulates."""
        return (self.columns, self.rows) if self.swapped else (self.rows, self.columns)

    @property
    def operands(self) -> dict[str, Panels]:
        """A's and B's panels in shared memory, those of all warpgroups together."""
        columns = self.outputs[1]
        b = Panels(self.b_rows, self.steps, "k") if self.b_major == "k" else Panels(columns, self.b_rows, "n")
        return {"a": Panels(self.a_rows, self.steps, "k"), "b": b}

    @property
    def run_lengths(self) -> tuple[int, int]:
        """Elements of A's and of B's stored rows that one instruction reads side by side: steps, or B's columns."""
        return PANEL, self.columns if self.b_major == "n" and not self.swapped else PANEL

    def panel_shape(self, operand: str) -> tuple[int, int, int]:
        """Return panels, rows and elements of one warpgroup's part of operand "A" or "B"."""
        rows, columns = self.outputs
        if operand == "A":
            return self.steps // PANEL, rows, PANEL
        if self.b_major == "k":
            return self.steps // PANEL, columns, PANEL
        return -(-columns // PANEL), self.steps, PANEL

    def source(self) -> str:
        """Return the CUDA text of the function that issues a k tile's instructions and commits them as one group.

        ``fence.proxy.async`` makes what other threads' cp.async has put into shared memory visible to the
        instruction: it stands between the barrier and the instruction, on the way from every copy to it. What TMA
        brings is by the proxy that the instruction reads by, so that its mbarrier is all that it takes.
        ``wgmma.fence`` orders the accumulators' earlier uses before it. What zeroes them must stand before that, too,
        which the compiler is told by :func:`keep_in_registers`.
        """
        lines = [
            f"__forceinline__ __device__ void {self.name}(void* accumulators, const void* a, const void* b) {{",
            "  float* c = (float*)accumulators;",
            *(
                f"  unsigned long long d{name} = {panels.descriptor_bits}ull"
                f" | (((unsigned int)__cvta_generic_to_shared({name}) & 0x{ADDRESS_MASK:X}) >> 4);"
                for name, panels in self.operands.items()
            ),
            keep_in_registers(self.registers),
            *(['  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");'] if self.fenced else []),
            '  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");',
        ]
        for step in range(self.steps // STEP):
            lines += [self._instruction(step, tile) for tile in range(self.rows // WGMMA_ROWS)]
        return "\n".join([*lines, '  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");', "}\n"])

    def _instruction(self, step: int, tile: int) -> str:
        """Return one instruction's text: step ``step`` along k, rows 64·tile on."""
        count = self.columns // 2
        registers = ", ".join(f"%{i}" for i in range(count))
        outputs = ", ".join(f'"+f"(c[{tile * count + i}])' for i in range(count))
        of_rows, of_columns = reversed("ab") if self.swapped else "ab"
        panels, dtype = self.operands, PTX_TYPES[self.dtype]
        first = panels[of_rows].step_offset(step) + panels[of_rows].extent_offset(tile * WGMMA_ROWS) >> 4
        second = panels[of_columns].step_offset(step) >> 4
        transposed = ", ".join(str(int(panels[operand].major == "n")) for operand in (of_rows, of_columns))
        return (
            f'  asm volatile("wgmma.mma_async.sync.aligned.m64n{self.columns}k16.f32.{dtype}.{dtype} {{{registers}}}, '
            f'%{count}, %{count + 1}, 1, 1, 1, {transposed};" : {outputs}'
            f' : "l"(d{of_rows} + {first}), "l"(d{of_columns} + {second}));'
        )

    def register(self) -> str:
        """Make the intrinsic known to TVM; returns its name, for ``sch.tensorize``.

        ::

            description   C[lane(i, j), register(i, j)] += A[k / 64, i, k % 64] * B[...]    for i, j, k
            replaced by   for lane < 128, bound to threadIdx.x:  wgmma_...(&C[lane, 0], &A[0, 0, 0], &B[0, 0, 0])

        Addresses of elements, because the software pipeline gives these the number of the ring's stage.
        """
        description, replacement = self._description(), self._replacement()
        TensorIntrin.register(self.name, description, replacement, override=True)
        return self.name

    def _description(self) -> tirx.PrimFunc:
        steps, dtype, registers = self.steps, self.dtype, self.registers
        pa, ra, ea = self.panel_shape("A")
        pb, rb, eb = self.panel_shape("B")
        k_major = self.b_major == "k"
        fragment = self.fragment

        def other(k: tirx.Var, j: tirx.Var) -> tuple[ir.Expr, ir.Expr, ir.Expr]:
            contiguous, row = (k, j) if k_major else (j, k)
            return contiguous // PANEL, row, contiguous % PANEL

        def product(row: tirx.Var, column: tirx.Var) -> tuple[tirx.Var, tirx.Var]:
            return (column, row) if self.swapped else (row, column)

        @T.prim_func(s_tir=True)
        def _description(a: T.handle, b: T.handle, c: T.handle) -> None:
            A = T.match_buffer(a, (pa, ra, ea), dtype, align=16, offset_factor=1, scope="shared.dyn")
            B = T.match_buffer(b, (pb, rb, eb), dtype, align=16, offset_factor=1, scope="shared.dyn")
            C = T.match_buffer(c, (LANES, registers), "float32", align=4, offset_factor=1, scope=FRAGMENT)
            with T.sblock("root"):
                T.reads(C[0:LANES, 0:registers], A[0:pa, 0:ra, 0:ea], B[0:pb, 0:rb, 0:eb])
                T.writes(C[0:LANES, 0:registers])
                for row, column, k in T.grid(self.rows, self.columns, steps):
                    with T.sblock("multiply"):
                        vi = T.axis.spatial(self.outputs[0], product(row, column)[0])
                        vj = T.axis.spatial(self.outputs[1], product(row, column)[1])
                        vk = T.axis.reduce(steps, k)
                        C[fragment(vi, vj)[0], fragment(vi, vj)[1]] = C[
                            fragment(vi, vj)[0], fragment(vi, vj)[1]
                        ] + T.Cast("float32", A[vk // PANEL, vi, vk % PANEL]) * T.Cast(
                            "float32", B[other(vk, vj)[0], other(vk, vj)[1], other(vk, vj)[2]]
                        )

        return _description

    def _replacement(self) -> tirx.PrimFunc:
        name, source, dtype, registers = self.name, self.source(), self.dtype, self.registers
        pa, ra, ea = self.panel_shape("A")
        pb, rb, eb = self.panel_shape("B")

        @T.prim_func(s_tir=True)
        def _replacement(a: T.handle, b: T.handle, c: T.handle) -> None:
            a0, a1, b0, b1 = T.int32(), T.int32(), T.int32(), T.int32()
            A = T.match_buffer(
                a, (pa, ra, ea), dtype, align=16, offset_factor=1, scope="shared.dyn", strides=[a0, a1, 1]
            )
            B = T.match_buffer(
                b, (pb, rb, eb), dtype, align=16, offset_factor=1, scope="shared.dyn", strides=[b0, b1, 1]
            )
            C = T.match_buffer(c, (LANES, registers), "float32", align=4, offset_factor=1, scope=FRAGMENT)
            with T.sblock("root"):
                T.reads(C[0:LANES, 0:registers], A[0:pa, 0:ra, 0:ea], B[0:pb, 0:rb, 0:eb])
                T.writes(C[0:LANES, 0:registers])
                for lane in T.thread_binding(0, LANES, "threadIdx.x"):
                    T.evaluate(
                        T.cuda.func_call(
                            name,
                            T.address_of(C[lane, 0]),
                            T.address_of(A[0, 0, 0]),
                            T.address_of(B[0, 0, 0]),
                            source_code=source,
                        )
                    )

        return _replacement


def keep_in_registers(count: int) -> str:
    """Return the CUDA text that makes each of ``count`` accumulators ``c[i]`` an operand of an empty instruction.

    The compiler then moves no use of them across that place; it knows nothing of instructions that run on.
    """
    return f'#pragma unroll\n  for (int i = 0; i < {count}; ++i) asm volatile("" : "+f"(c[i]) :: "memory");'
