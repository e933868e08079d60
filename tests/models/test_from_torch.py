"""What `from_torch` makes of PyTorch modules, run by TVM's own kernels on the CPU."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.target import Target

from tensorir_ladder.relax import from_torch

torch = pytest.importorskip("torch")
nn, functional = torch.nn, torch.nn.functional


class Attends(nn.Module):
    """Attention with options."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: Any, k: Any, v: Any, mask: Any = None) -> Any:
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, **self.options)


class AnyNegative(nn.Module):
    """Whether any element is below 0, and whether any is not 0."""

    def forward(self, x: Any) -> Any:
        return torch.logical_or(torch.any(x < 0), torch.any(x))


def run(mod: tvm.IRModule, inputs: list[Any], weights: list[Any]) -> np.ndarray:
    """Compile a module for the CPU and run it."""
    vm = relax.VirtualMachine(tvm.compile(mod, Target("llvm")), tvm.cpu())
    return vm["main"](*(tvm.runtime.tensor(each.numpy()) for each in inputs), *weights).numpy()


def check(module: nn.Module, inputs: list[Any], others: list[Any] | None = None, **options: Any) -> tvm.IRModule:
    """Import a module and compare what it computes with torch, also for other inputs."""
    mod, weights = from_torch(module.eval(), tuple(inputs), **options)
    for given in (inputs, others or inputs):
        with torch.no_grad():
            expected = module(*given).numpy()
        np.testing.assert_allclose(run(mod, given, weights), expected, rtol=2e-5, atol=2e-5)
    return mod


def draw(*shape: int) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


QUERIES, KEYS = (2, 6, 9, 8), (2, 6, 11, 8)
MASK = torch.arange(9)[:, None] + 2 >= torch.arange(11)[None]


@pytest.mark.parametrize(
    ("options", "heads", "mask"),
    [
        ({}, 6, None),
        ({}, 6, MASK),
        ({}, 6, MASK.float()),
        ({"scale": 0.3}, 6, MASK),
        ({"is_causal": True}, 6, None),
        ({"enable_gqa": True}, 2, None),
        ({"enable_gqa": True, "scale": 1.5}, 3, MASK),
    ],
    ids=["plain", "mask of bools", "mask to add", "scale", "causal", "grouped", "grouped, scale, mask"],
)
def test_attention_is_what_torch_computes(options: dict[str, Any], heads: int, mask: Any) -> None:
    few = (2, heads, 11, 8)
    inputs = [draw(*QUERIES), draw(*few), draw(*few), *([] if mask is None else [mask])]
    mod = check(Attends(**options), inputs)
    assert "R.nn.attention" in mod.script()


@pytest.mark.parametrize("axes", [2, 3])
@pytest.mark.parametrize("mask", [None, MASK, MASK.float()], ids=["plain", "bools", "to add"])
def test_attention_of_fewer_axes_is_what_torch_computes(axes: int, mask: Any) -> None:
    inputs = [draw(*[2][: axes - 2], *shape[2:]) for shape in (QUERIES, KEYS, KEYS)]
    check(Attends(), [*inputs, *([] if mask is None else [mask])])


class CountsTrue(nn.Module):
    """How many elements so far are above 0."""

    def forward(self, x: Any) -> Any:
        return torch.cumsum(x > 0, dim=-1)


def test_running_sums_of_bools_are_numbers() -> None:
    check(CountsTrue(), [draw(3, 40)])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("module", "shape"),
    [(nn.Linear(24, 16), (5, 24)), (nn.Conv2d(3, 8, 3), (2, 3, 9, 9)), (nn.ConvTranspose1d(4, 6, 3), (2, 4, 7))],
    ids=lambda each: type(each).__name__,
)
def test_products_of_16_bits_with_a_bias_keep_their_dtype(
    module: nn.Module, shape: tuple[int, ...], dtype: Any
) -> None:
    mod, weights = from_torch(module.eval().to(dtype), (draw(*shape).to(dtype),))
    name = str(dtype).removeprefix("torch.")
    assert mod["main"].ret_ty.dtype == name
    assert {str(each.dtype) for each in weights} == {name}


def test_any_is_over_all_elements() -> None:
    for x in (draw(3, 4), draw(3, 4).abs(), torch.zeros(3, 4)):
        mod, weights = from_torch(AnyNegative().eval(), (x,))
        assert bool(run(mod, [x], weights)) == bool(AnyNegative()(x))


def test_symbolic_extents_take_other_inputs() -> None:
    module = nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.LayerNorm(20), nn.Linear(20, 3))
    shapes = ({0: torch.export.Dim("rows", min=1, max=512)},)
    check(module, [draw(4, 12)], [draw(9, 12)], dynamic_shapes=shapes)


def test_weights_follow_the_inputs() -> None:
    module = nn.Linear(6, 4).eval()
    mod, weights = from_torch(module, (draw(2, 6),))
    assert len(mod["main"].params) == 1 + len(weights) == 3
    assert {each.shape for each in weights} == {(4, 6), (4,)}


def test_what_cannot_be_imported_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Linear(6, 4)
    with pytest.raises(ValueError, match=r"training mode; call module\.eval\(\) first"):
        from_torch(module, (draw(2, 6),))
    with pytest.raises(TypeError, match=r"args is a Tensor, not a tuple of inputs; write \(x,\)"):
        from_torch(module.eval(), draw(2, 6))
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ModuleNotFoundError, match="from_torch needs torch: pip install torch"):
        from_torch(module, (draw,))
