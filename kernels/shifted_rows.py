"""Matrices whose rows TMA cannot step over, on their way to panels: copied as they lie, then shifted into place.

Rows of 4095 elements begin anywhere within 16 bytes. A warp copies the aligned pieces of 16 bytes in which its rows of
a k tile lie to shared memory (``cp.async``), several k tiles ahead; once they are there, it reads each two that are
neighbours, and lays the 16 bytes that begin within the first down in a panel, where wgmma reads them.

::

    matrix      ....abcd efghijkl mnop....      a row of the tile, from a on
    copied     |....abcd|efghijkl|mnop....|     aligned pieces, one more than the row has
    laid down  |abcdefgh|ijklmnop|

Eight rows further on a row begins as far within its first piece, whatever its length. So a warp has every eighth row,
and shifts all of them by as much: an even number of elements by taking other registers, which costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm.ir import Expr
from tvm.script import tirx as T
from tvm.tirx import Buffer

from tensorir_ladder.kernels.panels import TmaPanels
from tensorir_ladder.schedules.errors import IllegalWorkload
from tensorir_ladder.schedules.isa import PANEL, VECTOR_BYTES, WARP, WIDEST

PIECE = 8  # elements of 16 bits in the 16 bytes that are copied, and laid down, at once
WARPS = 8  # that share a k tile's rows: a row and the eighth behind it begin as far within 16 bytes
MOST_ELEMENTS = 2**31  # of a matrix with two tiles' rows beyond its last: places in bytes are whole numbers of 32 bits

# Nothing is read beside the matrix: what lies behind it is zero, and of a piece that begins before or ends behind it
# elements are read one by one. (cp.async takes how many bytes to read; compute-sanitizer counts sixteen.) Places are in
# bytes, from the multiple of 16 bytes before the matrix on.
_REQUEST = """
__forceinline__ __device__ void {name}_piece(
    void* to, const char* from, unsigned int place, unsigned int before, unsigned int end) {{
  if (place >= before && place + 16u <= end) {{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::
                 "r"((unsigned int)__cvta_generic_to_shared(to)), "l"(from + place) : "memory");
    return;
  }}
  if (place >= end) {{
    *(uint4*)to = make_uint4(0, 0, 0, 0);
    return;
  }}
  for (unsigned int at = place; at < place + 16u; at += 2)
    *(unsigned short*)((char*)to + at - place) = at < before || at >= end ? 0 : *(const unsigned short*)(from + at);
}}
__forceinline__ __device__ void {name}(
    const void* matrix, void* into, int warp, int lane, int first_row, int first_column) {{
  const unsigned int before = (unsigned int)(unsigned long long)matrix & 15u, end = 2u * {rows} * {columns} + before;
  const unsigned int corner = 2u * (first_row * {columns}u + first_column), row = lane / {width};
  const char* from = (const char*)matrix - before;
  char* to = (char*)into + warp * ({own_rows} * {pitch});
  const unsigned int at = lane % {width} * 16u, to_first = row * {pitch} + at, to_last = lane * {pitch} + {width} * 16u;
  const unsigned int first = corner + (2u * (warp + 8u * row) * {columns} + before & ~15u) + at;
  const unsigned int last = corner + (2u * (warp + 8u * lane) * {columns} + before & ~15u) + {width} * 16u;
  if (corner + 2ull * {all_rows} * {columns} + before <= end && (corner || !before)) {{
#pragma unroll
    for (int i = 0; i < {count}; ++i)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::
                   "r"((unsigned int)__cvta_generic_to_shared(to + to_first + i * ({together} * {pitch}))),
                   "l"(from + first + i * (16u * {together} * {columns})) : "memory");
    if (lane < {own_rows})
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::
                   "r"((unsigned int)__cvta_generic_to_shared(to + to_last)), "l"(from + last) : "memory");
  }} else {{
#pragma unroll
    for (int i = 0; i < {count}; ++i)
      {name}_piece(to + to_first + i * ({together} * {pitch}), from, first + i * (16u * {together} * {columns}), before,
                   end);
    if (lane < {own_rows}) {name}_piece(to + to_last, from, last, before, end);
  }}
}}
"""
# Elements beyond the reduction are zero, where rows run along it.
_LAY = """
__forceinline__ __device__ void {name}_by(const char* from, char* to, int left, const int skew) {{
  uint4 low[{count}], high[{count}];
#pragma unroll
  for (int i = 0; i < {count}; ++i) {{
    low[i] = *(const uint4*)(from + i * ({together} * {pitch}));
    high[i] = *(const uint4*)(from + i * ({together} * {pitch}) + 16);
  }}
#pragma unroll
  for (int i = 0; i < {count}; ++i) {{
    const unsigned int words[8] = {{
        low[i].x, low[i].y, low[i].z, low[i].w, high[i].x, high[i].y, high[i].z, high[i].w}};
    unsigned int shifted[4];
#pragma unroll
    for (int word = 0; word < 4; ++word)
      shifted[word] = skew % 2 ? __funnelshift_r(words[skew / 2 + word], words[skew / 2 + word + 1], 16)
                               : words[skew / 2 + word];
    if ({along_k} && left < 8) {{
#pragma unroll
      for (int word = 0; word < 4; ++word)
        shifted[word] &= left > 2 * word + 1 ? 0xffffffffu : left == 2 * word + 1 ? 0xffffu : 0u;
    }}
    *(uint4*)(to + i * ({together} * 1024)) = make_uint4(shifted[0], shifted[1], shifted[2], shifted[3]);
  }}
}}
__forceinline__ __device__ void {name}(
    const void* matrix, const void* copied, void* into, int warp, int lane, int first_column) {{
  const int row = lane / {width}, at = lane % {width}, left = {columns} - first_column - at * 8;
  const char* from = (const char*)copied + (warp * {own_rows} + row) * {pitch} + at * 16;
  char* to = (char*)into + at / 8 * {panel_bytes} + (warp + 8 * row) * 128 + ((at % 8 ^ warp) << 4);
  const int skew = ((int)(unsigned long long)matrix / 2 + warp * {columns}) & 7;
{cases}}}
"""
_CASE = "  if (skew == {skew}) {name}_by(from, to, left, {skew});\n"


@dataclass(frozen=True)
class ShiftedRows:
    """One operand's k tile of rows as they lie, in a matrix of ``shape`` without gaps that begins at any element."""

    panels: TmaPanels
    shape: tuple[int, int]

    @property
    def width(self) -> int:
        """Pieces of a row in the panels."""
        return (self.panels.depth if self.panels.major == "k" else self.panels.count * PANEL) // PIECE

    @property
    def bytes(self) -> int:
        """Shared memory of a k tile's copied pieces: of each row one more than it has."""
        return self.panels.rows * self._pitch

    @property
    def fits(self) -> bool:
        """True where a warp's lanes have as many pieces each, and a row's are at most theirs."""
        return WARP % self.width == 0 and self.panels.rows % (WARPS * (WARP // self.width)) == 0

    @staticmethod
    def counts(shape: tuple[int, int]) -> bool:
        """Tell whether a matrix has no more elements than are counted."""
        return _counted(shape) <= MOST_ELEMENTS

    def check(self) -> None:
        """Raise IllegalWorkload for a matrix of more elements than are counted."""
        if not self.counts(self.shape):
            raise IllegalWorkload(
                "a matrix of more elements than are counted, with 512 rows beyond its last",
                value=_counted(self.shape),
                limit=MOST_ELEMENTS,
                remedy="multiply it in parts, or pad its rows",
            )

    def request(self, matrix: Buffer, into: Expr, warp: Expr, lane: Expr, first: Expr, step: Expr) -> None:
        """Emit a lane's copies of its warp's rows of the k tile that begins at ``first`` and ``step``."""
        rows, columns = self.shape
        name = f"request_{self._name}_of_{rows}"
        # Rows, from the tile's corner on, within which all its pieces end: the last row's reach into rows behind it.
        beyond = self.panels.rows - 1 + -(-(self.width + 1) * PIECE // columns)
        text = _REQUEST.format(name=name, rows=rows, all_rows=beyond, **self._sizes)
        given = (matrix.ptr_to([0, 0]), into, warp, lane, *self._corner(first, step))
        T.evaluate(T.cuda.func_call(name, *given, source_code=text))

    def lay(self, matrix: Buffer, copied: Expr, into: Expr, warp: Expr, lane: Expr, first: Expr, step: Expr) -> None:
        """Emit a lane's part of laying its warp's rows down in the panels ``into``, once they are there."""
        name = f"lay_{self._name}"
        cases = "".join(_CASE.format(name=name, skew=skew) for skew in range(PIECE))
        along_k = str(self.panels.major == "k").lower()
        more = {"panel_bytes": self.panels.panel_bytes, "along_k": along_k}
        text = _LAY.format(name=name, cases=cases, **more, **self._sizes)
        _, column = self._corner(first, step)
        given = (matrix.ptr_to([0, 0]), copied, into, warp, lane, column)
        T.evaluate(T.cuda.func_call(name, *given, source_code=text))

    @property
    def _pitch(self) -> int:
        return (self.width + 1) * VECTOR_BYTES

    @property
    def _name(self) -> str:
        return f"{self.panels.rows}x{self.width}_along_{self.panels.major}_of_{self.shape[1]}"

    @property
    def _sizes(self) -> dict[str, int]:
        """Return what both texts say: a warp's rows, those that its lanes have pieces of at once, and how often."""
        own, together = self.panels.rows // WARPS, WARP // self.width
        return {
            "columns": self.shape[1],
            "width": self.width,
            "pitch": self._pitch,
            "own_rows": own,
            "together": together,
            "count": own // together,
        }

    def _corner(self, first: Expr, step: Expr) -> tuple[Expr, Expr]:
        """Return row and column, in the matrix as stored, of the tile that begins at ``first`` and ``step``."""
        return (first, step) if self.panels.major == "k" else (step, first)


def _counted(shape: tuple[int, int]) -> int:
    """Return the elements of a matrix with as many rows beyond its last as no place of a tile's lies behind."""
    return (shape[0] + 2 * WIDEST) * shape[1]
