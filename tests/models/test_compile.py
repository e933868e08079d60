"""`tensorir_ladder.compile`, the backend of torch.compile, and models given to `ladder model --torch`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tvm
from tvm import relax
from tvm.target import Target

torch = pytest.importorskip("torch")
nn = torch.nn

import tensorir_ladder  # noqa: E402 - torch's tests
from tensorir_ladder.harness.whole_models import torch_models  # noqa: E402
from tensorir_ladder.relax import compilation, from_torch, torch_backend  # noqa: E402


class Perceptron(nn.Module):
    """Two linear layers, with something between that no operator of one tensor is."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Any) -> Any:
        return x + self.down(nn.functional.gelu(self.up(x)))


class TwoParts(Perceptron):
    """What torch.compile cuts in two: a branch on values."""

    def forward(self, x: Any) -> Any:
        y = super().forward(x)
        return self.down(self.up(y)) if float(y.sum()) > 1e9 else y * 2


class Counts(nn.Module):
    """What changes a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return x + self.calls


def near(one: Any, other: Any) -> bool:
    return torch.allclose(one.float(), other.float(), rtol=2e-3, atol=2e-3)


# Refusals


def test_what_is_on_no_gpu_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"inputs are on cpu.*\.cuda\(\)"):
        tensorir_ladder.compile(Perceptron().eval(), (torch.zeros(3, 64),))
    with pytest.raises(ValueError, match="no device"):
        tensorir_ladder.compile(Perceptron().eval(), ())


@pytest.mark.parametrize(
    ("module", "given", "error"),
    [(Counts().eval(), (torch.zeros(3),), "calls"), (Perceptron(), (torch.zeros(3, 64),), "eval")],
)
def test_modules_that_change_or_train_are_refused(module: Any, given: tuple[Any, ...], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        from_torch(module, given)


# The backend, with TVM's kernels on the CPU in the place of ours


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """The shapes that modules are compiled for."""
    shapes: list[tuple[int, ...]] = []

    def by_llvm(module: Any, args: tuple[Any, ...]) -> Callable[..., Any]:
        shapes.append(tuple(args[0].shape))
        mod, weights = from_torch(module, args)
        vm = relax.VirtualMachine(tvm.compile(mod, Target("llvm")), tvm.cpu())

        def run(*inputs: Any) -> Any:
            made = vm["main"](*(tvm.runtime.from_dlpack(each.detach().contiguous()) for each in inputs), *weights)
            return compilation._as_torch(made, torch)

        return run

    monkeypatch.setattr(torch_backend, "compile_module", by_llvm)
    torch._dynamo.reset()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", torch_backend.LeftToTorch)
        yield shapes


def test_a_model_is_compiled_once_for_each_shape(compiled: list[tuple[int, ...]]) -> None:
    model = Perceptron().eval()
    fast = torch.compile(model, backend=torch_backend.tensorir_ladder)
    for rows in (3, 5, 9, 3, 5):
        x = torch.randn(rows, 64)
        assert near(fast(x), model(x))
    assert {*compiled} == {(3, 64), (5, 64), (9, 64)}
    many = len(compiled)
    for rows in (9, 3, 5):
        fast(torch.randn(rows, 64))
    assert len(compiled) == many


def test_weights_that_change_are_seen(compiled: list[tuple[int, ...]]) -> None:
    model, x = Perceptron().eval(), torch.randn(3, 64)
    fast = torch.compile(model, backend=torch_backend.tensorir_ladder)
    before = fast(x)
    model.down.weight.mul_(3)
    assert near(fast(x), model(x))
    assert not near(fast(x), before)
    assert len(compiled) == 2


def test_a_graph_that_breaks_is_right(compiled: list[tuple[int, ...]]) -> None:
    model, x = TwoParts().eval(), torch.randn(3, 64)
    fast = torch.compile(model, backend=torch_backend.tensorir_ladder)
    assert near(fast(x), model(x))
    assert len(compiled) == 2


def test_training_is_left_to_torch_and_said(compiled: list[tuple[int, ...]]) -> None:
    model, x = Perceptron().eval(), torch.randn(3, 64)
    fast = torch.compile(model, backend=torch_backend.tensorir_ladder)
    with torch.enable_grad(), pytest.warns(torch_backend.LeftToTorch, match="gradients"):
        out = fast(x)
    assert out.requires_grad
    assert compiled == []


def test_torch_finds_the_backend_by_its_name() -> None:
    assert "tensorir_ladder" in torch._dynamo.list_backends()


# Models of users


def test_a_model_of_ones_own_is_loaded(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\n"
        "def made():\n    return torch.nn.Linear(4, 2), (torch.zeros(3, 4),)\n"
        "def wrong():\n    return torch.nn.Linear(4, 2)\n"
    )
    name, made = torch_models.load(f"{file}:made")
    assert (name, made.inputs[0].shape, made.module.training) == ("made", (3, 4), False)
    for text, said in ((f"{file}:other", "no function"), (f"{file}:wrong", "Linear"), ("other", "bert_base")):
        with pytest.raises(ValueError, match=said):
            torch_models.load(text)
    with pytest.raises(FileNotFoundError):
        torch_models.load(f"{tmp_path}/absent.py:made")


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_a_compiled_module_is_right_in_torchs_current_stream(cuda_graphs: bool) -> None:
    torch.manual_seed(0)
    model = Perceptron().eval().half().cuda()
    given = [torch.randn(100, 64, device="cuda").half() for _ in range(3)]
    fast = tensorir_ladder.compile(model, (given[0],), cuda_graphs=cuda_graphs)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(stream):
        outputs = [fast(x * 2) for x in given]
    stream.synchronize()
    with torch.no_grad():
        for x, out in zip(given, outputs):
            assert near(out, model(x * 2))
    with pytest.raises(ValueError, match="cuda:0"):
        fast(given[0].cpu())


@pytest.mark.gpu
def test_the_backend_is_right_on_a_gpu() -> None:
    torch._dynamo.reset()
    model = Perceptron().eval().half().cuda()
    fast = torch.compile(model, backend="tensorir_ladder")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", torch_backend.LeftToTorch)
        for rows in (32, 100, 32):
            x = torch.randn(rows, 64, device="cuda").half()
            assert near(fast(x), model(x))
