"""The product as torch's operator: what autograd and torch's compiler make of it.

Without a GPU the operator runs a product of torch's own on the CPU, and what is shown is all around the kernel: shapes,
gradients, traces. The tests marked ``gpu`` run the kernels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tensorir_ladder.schedules.errors import IllegalWorkload
from tensorir_ladder.torch_ops import matmul
from tensorir_ladder.torch_ops.errors import UnsupportedGpu, WrongDtype, WrongShape
from tensorir_ladder.torch_ops.prepared import HOPPER

torch = pytest.importorskip("torch", reason="torch is not installed")
ACTIVATIONS = (None, "relu", "gelu", "silu")


def reference(a: Any, b: Any, bias: Any, activation: Any, alpha: float, out_dtype: Any, any_m: bool) -> Any:
    """The product by torch's operators, with sums in float32 or wider."""
    wide = torch.promote_types(a.dtype, torch.float32)
    sums = alpha * (a.to(wide) @ b.to(wide))
    if bias is not None:
        sums = sums + bias.to(wide)
    if activation:
        sums = getattr(torch.nn.functional, activation)(sums)
    return sums.to(out_dtype or a.dtype)


def fill(a: Any, b: Any, out: Any, *how: Any) -> None:
    """The product into a tensor."""
    out.copy_(reference(a, b, *how))


@pytest.fixture
def operators() -> Any:
    """The operators, with kernels of torch's own for tensors on the CPU."""
    from tensorir_ladder.torch_ops import custom_op

    with torch.library._scoped_library(custom_op.NAMESPACE, "IMPL") as library:
        library.impl("matmul", reference, "CPU")
        library.impl("matmul_out", fill, "CPU")
        yield custom_op


def normal(*sizes: int, dtype: str = "float16", learned: bool = False, device: str = "cpu") -> Any:
    """Normal values."""
    made = torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes)), dtype=torch.float64)
    made = made.to(device, getattr(torch, dtype))
    return made.requires_grad_() if learned else made


class Counted(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the calls of operators by name while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, called: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(called.overloadpacket)] += 1
        return called(*args, **(kwargs or {}))


# Gradients


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_gradients_and_theirs_are_right(operators: Any, activation: str | None, alpha: float) -> None:
    a, b, bias = (normal(*sizes, dtype="float64", learned=True) for sizes in ((3, 4), (5, 4), (5,)))
    for transposed in (True, False):
        b = b if transposed else normal(4, 5, dtype="float64", learned=True)

        def product(a: Any, b: Any, bias: Any, transposed: bool = transposed) -> Any:
            return matmul(a, b.T if transposed else b, bias=bias, activation=activation, alpha=alpha)

        assert torch.autograd.gradcheck(product, (a, b, bias))
        assert torch.autograd.gradgradcheck(product, (a, b, bias))


@pytest.mark.parametrize(
    "sizes",
    [
        ((2, 3, 4), (2, 4, 5)),
        ((2, 3, 4), (4, 5)),
        ((3, 4), (2, 4, 5)),
        ((2, 2, 3, 4), (2, 1, 4, 5)),
        ((2, 3, 4), (2, 1, 4, 5)),
    ],
    ids=str,
)
@pytest.mark.parametrize("turned", [False, True])
def test_gradients_of_a_batch_are_right(operators: Any, sizes: Any, turned: bool) -> None:
    a, b = (normal(*each, dtype="float64", learned=True) for each in sizes)

    def product(a: Any, b: Any) -> Any:
        return matmul(a, b.mT.contiguous().mT if turned else b, activation="silu", alpha=0.5)

    assert torch.autograd.gradcheck(product, (a, b))
    assert torch.autograd.gradgradcheck(product, (a, b))


def test_gradients_of_expanded_operands_are_right(operators: Any) -> None:
    a, b = normal(1, 3, 4, dtype="float64", learned=True), normal(4, 5, dtype="float64", learned=True)
    assert torch.autograd.gradcheck(lambda a, b: matmul(a.expand(2, 3, 4), b.expand(2, 4, 5)), (a, b))


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, False), (False, False, True)])
def test_only_what_is_wanted_is_computed(operators: Any, wanted: tuple[bool, ...]) -> None:
    sizes = ((8, 16), (16, 24), (24,))
    a, b, bias = (normal(*each, learned=learns) for each, learns in zip(sizes, wanted))
    with Counted() as counted:
        matmul(a, b, bias=bias).sum().backward()
    assert [each.grad is not None for each in (a, b, bias)] == list(wanted)
    assert counted.calls["tensorir_ladder.matmul"] == 1 + wanted[0]  # the gradient of a is a product of ours
    assert counted.calls["aten.mm"] == wanted[1]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("out_dtype", ["float16", "bfloat16", "float32"])
def test_gradients_have_their_tensors_dtypes(operators: Any, dtype: str, out_dtype: str) -> None:
    a, b = normal(8, 16, dtype=dtype, learned=True), normal(16, 24, dtype=dtype, learned=True)
    bias = normal(24, dtype="float32", learned=True)
    result = matmul(a, b, bias=bias, out_dtype=getattr(torch, out_dtype), alpha=2.0)
    upstream = normal(8, 24, dtype=out_dtype)
    result.backward(upstream)
    assert result.dtype == upstream.dtype
    wanted = 2 * upstream.double() @ b.double().T, 2 * a.double().T @ upstream.double(), upstream.double().sum(0)
    for tensor, right in zip((a, b, bias), wanted):
        assert tensor.grad.dtype == tensor.dtype
        torch.testing.assert_close(tensor.grad.double(), right, rtol=2**-7, atol=2**-5)


def test_a_gradient_lies_as_its_weight_does(operators: Any) -> None:
    weight = normal(24, 16, learned=True)
    matmul(normal(8, 16), weight.T).backward(normal(8, 24))
    assert weight.grad.is_contiguous()


def test_large_gradients_of_wide_results_do_not_overflow(operators: Any) -> None:
    a, b = torch.full((8, 8), 2.0**-10, dtype=torch.float16), torch.full((8, 8), 2.0**-10, dtype=torch.float16)
    a.requires_grad_()
    matmul(a, b, out_dtype=torch.float32).backward(torch.full((8, 8), 2.0**18))
    assert (a.grad == 2.0**11).all()


def test_without_gradients_nothing_is_recorded(operators: Any) -> None:
    weight = normal(8, 8, learned=True)
    with torch.no_grad(), pytest.raises(UnsupportedGpu):  # the plain call, which the CPU's kernel is not for
        matmul(normal(8, 8), weight)


def test_operands_at_any_address_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient that is a part of another begins where that does, here 2 bytes beyond an aligned address."""
    from tensorir_ladder.torch_ops import custom_op

    addresses = []

    def multiply(a: Any, b: Any, out: Any, *how: Any) -> Any:
        addresses.extend(each.data_ptr() % 16 for each in (a, b))
        return reference(a, b, *how)

    monkeypatch.setattr(custom_op, "multiply", multiply)
    a, b = normal(8, 64, learned=True), normal(64, 64)
    both = torch.cat([torch.zeros(1, dtype=torch.float16), matmul(a, b).flatten()])
    both.backward(torch.ones_like(both))
    assert addresses == [0] * 4
    torch.testing.assert_close(a.grad, torch.ones(8, 64).half() @ b.T, rtol=2**-8, atol=2**-5)


# Traces


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_torchs_own_checks_of_an_operator_pass(operators: Any, activation: str | None) -> None:
    plain = normal(8, 16), normal(16, 24), None, activation, 1.0, None, False
    a, b, bias = (normal(*sizes, learned=True) for sizes in ((8, 16), (24, 16), (24,)))
    for given in (plain, (a, b.T, bias, activation, 0.5, torch.float32, True)):
        torch.library.opcheck(operators.matmul, given)
    batch = normal(2, 8, 16, learned=True), normal(2, 16, 24), None, activation, 1.0, None, False
    for given in (batch, (batch[0], normal(16, 24), *batch[2:]), (normal(8, 16), normal(3, 2, 16, 24), *batch[2:])):
        torch.library.opcheck(operators.matmul, given)
    torch.library.opcheck(operators.matmul_out, (*plain[:2], normal(8, 24), *plain[2:]))


def test_layers_compile_whole_and_once_for_all_sizes(operators: Any) -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def layer(x: Any, weight: Any, bias: Any) -> Any:
        return matmul(x.sin(), weight.T, bias=bias, activation="gelu", alpha=0.5).cos()

    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    for rows in (3, 5, 8, 13):
        results = []
        for run in (layer, compiled):
            x, weight, bias = (normal(*sizes, learned=True) for sizes in ((rows, 8), (16, 8), (16,)))
            result = run(x, torch.nn.Parameter(weight) if rows == 5 else weight, bias)
            result.sum().backward()
            results.append((result, x.grad, bias.grad))
        for got, wanted in zip(*results):
            torch.testing.assert_close(got, wanted, rtol=2**-8, atol=2**-8)
        frames = counter.frame_count
    assert frames <= 3  # the first size, any size, and the parameter


def test_compiled_products_take_operands_as_they_lie() -> None:
    """Padded, sliced and transposed operands arrive with their strides; further distances compile nothing more."""
    from torch._dynamo.testing import CompileCounterWithBackend

    from tensorir_ladder.torch_ops import custom_op

    seen: dict[int, tuple[Any, Any]] = {}  # by the length of the reduction
    counter = CompileCounterWithBackend("inductor")

    def noting(a: Any, b: Any, *how: Any) -> Any:
        seen[a.shape[1]] = a.stride(), b.stride()
        return reference(a, b, *how)

    def layer(x: Any, weight: Any) -> Any:
        return matmul(x, weight), matmul(torch.relu(x)[:, :40], weight[:40])  # a slice of what torch computes

    given = [
        (normal(32, 64), normal(64, 48)),
        (normal(32, 128)[:, 64:], normal(48, 64).T),
        *((normal(32, 64 + padding)[:, :64], normal(64, 48 + padding)[:, :48]) for padding in (8, 16, 32)),
        *((normal(32, 64 + padding)[:, :64], normal(48, 64 + padding)[:, :64].T) for padding in (8, 16, 32)),
    ]
    compiled, frames = torch.compile(layer, backend=counter, fullgraph=True), []
    with torch.library._scoped_library(custom_op.NAMESPACE, "IMPL") as library:
        library.impl("matmul", noting, "CPU")
        for x, weight in given:
            seen.clear()
            for result, wanted in zip(compiled(x, weight), (x @ weight, torch.relu(x)[:, :40] @ weight[:40])):
                torch.testing.assert_close(result, wanted, rtol=2**-8, atol=2**-6)
            assert seen[64] == (x.stride(), weight.stride())
            assert seen[40] == (torch.relu(x)[:, :40].stride(), weight.stride())
            frames.append(counter.frame_count)
    assert frames[3] == frames[4]
    assert frames[6] == frames[7]


def test_a_compiled_product_into_a_tensor_writes_there(operators: Any) -> None:
    def layer(a: Any, b: Any, out: Any) -> Any:
        return matmul(a, b, out=out) + 1

    a, b, out = normal(8, 16), normal(16, 24), torch.full((8, 24), float("nan"), dtype=torch.float16)
    result = torch.compile(layer, backend="aot_eager", fullgraph=True)(a, b, out)
    assert (result == out + 1).all()
    assert (out == reference(a, b, None, None, 1.0, None, False)).all()


def test_an_exported_program_has_the_operator_and_any_rows(operators: Any) -> None:
    class Layer(torch.nn.Module):
        def forward(self, a: Any, b: Any) -> Any:
            return matmul(a, b)

    rows = torch.export.Dim("rows")
    program = torch.export.export(Layer(), (normal(8, 16), normal(16, 24)), dynamic_shapes=({0: rows}, None))
    assert "torch.ops.tensorir_ladder.matmul" in program.graph_module.code
    assert program.module()(normal(5, 16), normal(16, 24)).shape == (5, 24)


@pytest.mark.parametrize(
    ("sizes", "strides", "out_dtype"),
    [
        (((8, 16), (16, 24)), (24, 1), None),
        (((3, 8, 16), (3, 16, 24)), (192, 24, 1), "bfloat16"),
        (((3, 8, 16), (16, 24)), (192, 24, 1), None),
        (((3, 1, 8, 16), (16, 24)), (192, 192, 24, 1), None),
    ],
)
def test_fake_tensors_have_the_results_shape(sizes: Any, strides: tuple[int, ...], out_dtype: str | None) -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        a, b = (torch.empty(each, dtype=torch.float16, device="cuda") for each in sizes)
    dtype = getattr(torch, out_dtype) if out_dtype else None
    result = matmul(a, b, out_dtype=dtype)
    assert (result.shape, result.stride()) == ((*sizes[0][:-1], sizes[1][-1]), strides)
    assert (result.dtype, result.device.type) == (dtype or a.dtype, "cuda")


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        (WrongShape, lambda fake: matmul(fake(8), fake(8, 8))),
        (RuntimeError, lambda fake: matmul(fake(8, 16), fake(8, 8))),
        (RuntimeError, lambda fake: matmul(fake(2, 8, 8), fake(3, 8, 8))),
        (RuntimeError, lambda fake: matmul(fake(8, 8), fake(8, 8), bias=fake(9))),
        (WrongDtype, lambda fake: matmul(fake(8, 8), fake(8, 8).bfloat16())),
        (IllegalWorkload, lambda fake: matmul(fake(8, 8), fake(8, 8), activation="tanh")),
        (TypeError, lambda fake: matmul(fake(8, 8), fake(8, 8), alpha="1")),
    ],
)
def test_what_cannot_be_is_refused_while_it_is_traced(kind: type[Exception], call: Callable[[Any], Any]) -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode(), pytest.raises(kind):
        call(lambda *sizes: torch.empty(sizes, dtype=torch.float16, device="cuda"))


# What has no derivative


def test_gradients_of_a_product_into_a_tensor_are_refused(operators: Any) -> None:
    with pytest.raises(RuntimeError, match="with out records no gradients"):
        matmul(normal(8, 8, learned=True), normal(8, 8), out=normal(8, 8))


def test_forward_mode_is_refused(operators: Any) -> None:
    from torch.autograd import forward_ad

    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="no derivative in forward mode"):
        matmul(forward_ad.make_dual(normal(8, 8), normal(8, 8)), normal(8, 8))
    other = normal(8, 8)
    with pytest.raises(RuntimeError, match="no derivative in forward mode"):
        torch.func.jvp(lambda a: matmul(a, other), (normal(8, 8),), (normal(8, 8),))


# On the GPU


@pytest.fixture
def gpu() -> Any:
    """The operators, on an sm_90."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != HOPPER:
        pytest.skip("no sm_90")
    from tensorir_ladder.torch_ops import custom_op

    return custom_op


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::tensorir_ladder.torch_ops.errors.PaddedCopy")
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", [(256, 512, 320), (1, 264, 200), (33, 17, 50)])
def test_gradients_by_the_kernels_are_torchs(gpu: Any, shape: Any, dtype: str, activation: str | None) -> None:
    m, n, k = shape
    how = {"bias": None, "activation": activation, "alpha": 0.5, "out_dtype": None, "any_m": False}
    sums = []
    for product in (matmul, lambda a, b, **how: reference(a.float(), b.float(), **how | {"out_dtype": a.dtype})):
        x, weight = (normal(*sizes, dtype=dtype, device="cuda").requires_grad_() for sizes in ((m, k), (n, k)))
        bias = normal(n, dtype=dtype, device="cuda").requires_grad_()
        upstream = normal(m, n, dtype=dtype, device="cuda")
        product(x, weight.T, **how | {"bias": bias}).backward(upstream)
        sums.append([each.grad.double() for each in (x, weight, bias)])
    rounding = {"float16": 2**-10, "bfloat16": 2**-7}[dtype]
    for got, wanted in zip(*sums):
        assert float((got - wanted).abs().max()) <= 4 * rounding * float(wanted.abs().max())


@pytest.mark.gpu
def test_a_gradient_at_any_address_is_taken(gpu: Any) -> None:
    """The gradient of what was concatenated is a part of another, here 2 bytes beyond an aligned address."""
    a, b = normal(8, 64, device="cuda").requires_grad_(), normal(64, 64, device="cuda")
    both = torch.cat([torch.zeros(1, dtype=torch.float16, device="cuda"), matmul(a, b).flatten()])
    both.backward(torch.ones_like(both))
    torch.testing.assert_close(a.grad, torch.ones(8, 64, dtype=torch.float16, device="cuda") @ b.T, rtol=2**-8, atol=1)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_torchs_own_checks_pass_on_the_gpu(gpu: Any, activation: str | None) -> None:
    a, b, bias = (normal(*sizes, device="cuda").requires_grad_() for sizes in ((32, 64), (128, 64), (128,)))
    torch.library.opcheck(gpu.matmul, (a, b.T, bias, activation, 0.5, None, False))
    out = torch.empty(32, 128, dtype=torch.float16, device="cuda")
    torch.library.opcheck(gpu.matmul_out, (a.detach(), b.T.detach(), out, None, activation, 1.0, None, False))


@pytest.mark.gpu
def test_an_output_that_was_kept_for_backward_is_missed(gpu: Any) -> None:
    a, kept = normal(64, 64, device="cuda"), normal(64, 64, device="cuda")
    used = a.clone().requires_grad_() * kept
    matmul(a, a, out=kept)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        used.sum().backward()


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_trained_layer_compiles_whole(gpu: Any, mode: str) -> None:
    def layer(x: Any, up: Any, down: Any) -> Any:
        return x + matmul(matmul(torch.nn.functional.rms_norm(x, x.shape[-1:]), up.T, activation="silu"), down.T)

    compiled = torch.compile(layer, fullgraph=True, mode=mode)
    for rows in (64, 64, 40, 129):
        results = []
        for run in (layer, compiled):
            given = [normal(*s, device="cuda").requires_grad_() for s in ((rows, 256), (512, 256), (256, 512))]
            result = run(*given)
            result.float().square().mean().backward()
            results.append([result.detach().clone(), *(each.grad.clone() for each in given)])
        for got, wanted in zip(*results):
            torch.testing.assert_close(got, wanted, rtol=2**-6, atol=2**-6 * float(wanted.abs().max()))
