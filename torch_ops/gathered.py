"""Run a product whose kernel cannot read its tensors in place: torch copies them first."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING

from tensorir_ladder.torch_ops.errors import PaddedCopy

if TYPE_CHECKING:
    import torch

    from tensorir_ladder.torch_ops.operands import Form
    from tensorir_ladder.torch_ops.product import CallProduct


class Gathered:
    """``product(a, b, out, bias)``, as :class:`.product.CallProduct`, by way of copies.

    ``copies`` give the forms of "a", "b" or "out" and of their copies. ``product`` multiplies the copies, and allocates
    the output if that is one of them.
    """

    def __init__(self, product: CallProduct, copies: Mapping[str, tuple[Form, Form]]) -> None:
        self._product, self._copies = product, copies
        warnings.warn(
            f"a product copies at each call what its kernel does not reach as it lies: {self._described()}; contiguous "
            "matrices are not copied, nor are, of 16 bits on Hopper, rows and matrices that begin equal distances "
            "apart, multiples of 16 bytes",
            PaddedCopy,
            stacklevel=4,  # the caller of matmul
        )

    def __call__(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, bias: torch.Tensor | None
    ) -> torch.Tensor:
        a, b = self._gathered("a", a), self._gathered("b", b)
        if out is None or "out" not in self._copies:
            return self._product(a, b, out, bias)
        out.copy_(self._product(a, b, None, bias))
        return out

    def _gathered(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return an operand, or its copy; of dimensions that it was expanded to, the copy has one element."""
        if name not in self._copies:
            return tensor
        given, copy = self._copies[name]
        made = tensor.new_empty_strided(copy.sizes, copy.strides)
        made.copy_(tensor.as_strided(copy.sizes, given.strides))
        return made

    @property
    def description(self) -> str:
        """Name the kernel, and what each call copies."""
        return f"{self._product.description}; copies {self._described()}"

    def _described(self) -> str:
        found = (f"{name} ({prod(copy.sizes) * copy.itemsize} bytes)" for name, (_, copy) in self._copies.items())
        return ", ".join(found)
