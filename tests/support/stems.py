"""Convolutions of images with few channels, as frameworks write them."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import te, tirx


@dataclass(frozen=True)
class Stem:
    """A convolution of an image, channels last, with zeros around it, and a bias and a relu behind it."""

    batch: int | str = 2
    size: int = 15
    channels: int = 3
    filters: int = 40
    window: int = 7
    stride: int = 2
    dilation: int = 1
    dtype: str = "float16"
    relu: bool = False
    edge: int | None = None  # zeros around the image: half a window

    def function(self) -> tirx.PrimFunc:
        """Write it as frameworks do."""
        batch = tirx.Var(self.batch, "int32") if isinstance(self.batch, str) else self.batch
        reach, edge = self.dilation * (self.window - 1), self.window // 2 if self.edge is None else self.edge
        places = (self.size + 2 * edge - reach - 1) // self.stride + 1
        x = te.placeholder((batch, self.size, self.size, self.channels), self.dtype, "x")
        weight = te.placeholder((self.window, self.window, self.channels, self.filters), self.dtype, "weight")
        bias = te.placeholder((self.filters,), self.dtype, "bias")

        def padded(n: tirx.Var, h: tirx.Var, w: tirx.Var, c: tirx.Var) -> tirx.PrimExpr:
            inside = tirx.all(h >= edge, h < edge + self.size, w >= edge, w < edge + self.size)
            return tirx.if_then_else(inside, x[n, h - edge, w - edge, c], tirx.const(0, self.dtype))

        side = self.size + 2 * edge
        image = te.compute((batch, side, side, self.channels), padded, "padded")
        taps = [te.reduce_axis((0, extent)) for extent in (self.window, self.window, self.channels)]

        def summed(n: tirx.Var, h: tirx.Var, w: tirx.Var, o: tirx.Var) -> tirx.PrimExpr:
            row, column, channel = taps
            down, across = h * self.stride + row * self.dilation, w * self.stride + column * self.dilation
            return te.sum(image[n, down, across, channel] * weight[row, column, channel, o], axis=taps)

        made = te.compute((batch, places, places, self.filters), summed, "conv")
        if not self.relu:
            return te.create_prim_func([x, weight, made])
        zero = tirx.const(0, self.dtype)
        after = te.compute(made.shape, lambda *at: te.max(made(*at) + bias[at[-1]], zero), "relu")
        return te.create_prim_func([x, weight, bias, after])
