"""Kernels are parsed on a call stack of their own."""

from __future__ import annotations

import contextvars
import inspect
from types import ModuleType
from typing import Any

import pytest

from support.cases import make_case
from tensorir_ladder.kernels.short_stack import on_a_short_stack

SETTING = contextvars.ContextVar("SETTING", default="nobody's")


@on_a_short_stack
def depth(*, more: int = 0) -> tuple[int, str]:
    """Return the depth of the call stack, and the caller's setting."""
    if more < 0:
        raise ValueError(f"{more} is below 0")
    return len(inspect.stack(0)) + more, SETTING.get()


def test_the_callers_stack_is_left_behind() -> None:
    assert depth()[0] < 15 < len(inspect.stack(0))
    assert depth(more=100)[0] == depth()[0] + 100


def test_context_and_errors_are_the_callers() -> None:
    token = SETTING.set("the caller's")
    try:
        assert depth()[1] == "the caller's"
    finally:
        SETTING.reset(token)
    with pytest.raises(ValueError, match="-1 is below 0"):
        depth(more=-1)


def test_the_function_keeps_its_name_and_text() -> None:
    assert depth.__name__ == "depth"
    assert depth.__doc__ == depth.__wrapped__.__doc__


def test_inlined_functions_find_their_parser_without_the_sources_of_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[object] = []
    collect = inspect.getouterframes

    def watched(frame: object, context: int = 1) -> list[inspect.FrameInfo]:
        looked.append(inspect.currentframe().f_back.f_code.co_name)
        return collect(frame, context)

    monkeypatch.setattr(inspect, "getouterframes", watched)
    case = make_case(13, (128, 128, 192))
    case.step.maker(case.variant)(case.problem, case.config)
    assert looked
    assert "_find_parser_def" not in looked


def test_the_modules_of_all_frames_are_known_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    searched, find_module = set(), inspect.getmodule

    def watched(found: Any, file: str | None = None) -> ModuleType | None:
        if inspect.isframe(found) and file not in inspect.modulesbyfile:
            searched.add(file)
        return find_module(found, file)

    case = make_case(12, (128, 128, 192), "roles")
    monkeypatch.setattr(inspect, "getmodule", watched)
    case.step.maker(case.variant)(case.problem, case.config)
    assert not searched
