"""The backend "tensorir_ladder" of ``torch.compile``: parts of a model's graph compiled by the pipeline.

::

    fast = torch.compile(model, backend="tensorir_ladder")     # with this package installed; no import
    y = fast(x)
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from tensorir_ladder.relax.compilation import compile as compile_module

LOG = logging.getLogger(__name__)
MOST_SHAPES = 8  # for which a part of a graph is compiled; more are left to torch


class LeftToTorch(UserWarning):
    """A part of a graph that torch computes itself, operator by operator, and why."""


def tensorir_ladder(graph: Any, _example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """Return what runs a part of a graph in torch's place; torch.compile calls this for each.

    The part is compiled at its first call, and again for other shapes, dtypes or weights, these being known by address
    and version; each time with a copy of the weights. What cannot be taken, training and inputs that are changed in
    place among it, is run by torch, and a warning (:class:`LeftToTorch`) says why.
    """
    return _Part(graph)


class _Part:
    """A part of a graph, compiled for each set of shapes that it was called with."""

    def __init__(self, graph: Any) -> None:
        self.graph = graph
        self.made: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def __call__(self, *inputs: Any) -> Any:
        import torch

        weights = [_is_weight(each) for each in inputs]
        key = (torch.is_grad_enabled(), *map(_known_by, inputs, weights))
        if key in self.made:
            return self.made[key](*inputs)
        run = self._compiled(inputs, weights)
        if len(self.made) < MOST_SHAPES:
            self.made[key] = run
        return run(*inputs)

    def _compiled(self, inputs: Sequence[Any], weights: Sequence[bool]) -> Callable[..., Any]:
        """Compile for some inputs; torch's own way, with a warning, where that fails."""
        import torch

        given = [place for place, each in enumerate(inputs) if isinstance(each, torch.Tensor) and not weights[place]]
        try:
            if torch.is_grad_enabled() and any(getattr(each, "requires_grad", False) for each in inputs):
                raise NotImplementedError("gradients are asked for; call it in torch.no_grad() or inference_mode()")
            if len(self.made) >= MOST_SHAPES:
                raise NotImplementedError(f"{MOST_SHAPES} sets of shapes or weights came before")
            if not given:
                raise NotImplementedError("no input is a tensor")
            module = _bound(self.graph, inputs, given)
            ready = compile_module(module, tuple(inputs[place] for place in given))
        except Exception as error:
            reason = next(iter(str(error).splitlines()), "")
            warnings.warn(f"left to torch: {type(error).__name__}: {reason}", LeftToTorch, stacklevel=2)
            LOG.debug("left to torch", exc_info=error)
            return self.graph

        kept = [each for each, is_weight in zip(inputs, weights) if is_weight]  # lest others take their addresses

        def run(*inputs: Any, _kept: Sequence[Any] = kept) -> Any:
            made = ready(*(inputs[place] for place in given))
            return made if isinstance(made, tuple) else (made,)

        return run


def _is_weight(each: Any) -> bool:
    """Tell parameters and buffers, which torch.compile gives to a graph like inputs."""
    import torch

    return isinstance(each, torch.nn.Parameter) or getattr(each, "_dynamo_static_input_type", None) is not None


def _known_by(each: Any, is_weight: bool) -> Any:
    """Return what a compiled part depends on of an input: of a weight which it is, of a tensor how it lies."""
    if is_weight:
        return each.data_ptr(), None if each.is_inference() else each._version
    return (each.shape, each.dtype, each.device) if hasattr(each, "shape") else each


def _bound(graph: Any, inputs: Sequence[Any], given: Sequence[int]) -> Any:
    """Return a graph as a module of some of its inputs, the others, weights and numbers, being what they are."""
    import torch

    class Bound(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.graph = graph
            self.numbers = {}
            for place, each in enumerate(inputs):
                if isinstance(each, torch.Tensor) and place not in given:
                    self.register_buffer(f"weight{place}", each.detach())
                elif place not in given:
                    self.numbers[place] = each

        def forward(self, *own: Any) -> Any:
            taken = dict(zip(given, own)) | self.numbers
            made = self.graph(
                *(taken[at] if at in taken else getattr(self, f"weight{at}") for at in range(len(inputs)))
            )
            if not all(isinstance(each, torch.Tensor) for each in made):
                raise NotImplementedError("it returns something else than tensors")
            return tuple(made)

    return Bound().eval()
