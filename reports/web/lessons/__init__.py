"""Lessons: a page per step, in one order, from the step's own code, its kernel and the records."""

from __future__ import annotations

from collections.abc import Iterator

from tensorir_ladder.reports.web.lessons.facts import Facts, reference_gpu
from tensorir_ladder.reports.web.lessons.lesson import Lesson
from tensorir_ladder.reports.web.lessons.lives import trace_file
from tensorir_ladder.reports.web.page import File, Page
from tensorir_ladder.reports.web.sources import SiteSources

STYLES, SCRIPTS = ("static/lessons.css",), ("static/lessons.js",)


def pages(sources: SiteSources) -> Iterator[Page | File]:
    """Yield the list of lessons, a lesson per step that has a text, and each timeline as a trace for Perfetto."""
    facts = Facts(sources.results, reference_gpu(sources.results))
    lessons = [Lesson(sources, step, facts) for step in sources.steps.values() if has_text(step.number)]
    yield Page(
        "lessons/index.html",
        "Lessons",
        "lessons/index.html.j2",
        {"lessons": lessons, "f": facts},
        "Lessons",
        styles=STYLES,
        picks_gpu=False,
        description="A matrix product from a naive loop nest to past cuBLAS, one idea a lesson.",
    )
    steps = [lesson.step for lesson in lessons]
    for lesson in lessons:
        before, after = lesson.neighbours(steps)
        yield Page(
            f"lessons/step{lesson.number}.html",
            f"Step {lesson.number}: {lesson.short}",
            f"lessons/step{lesson.number}.html.j2",
            {"lesson": lesson, "f": facts, "before": before, "after": after},
            "Lessons",
            SCRIPTS,
            STYLES,
            description=f"{lesson.title}.",
        )
        for group in lesson.lives:
            yield from (trace_file(timeline) for timeline in group.timelines)


def has_text(number: int) -> bool:
    """Tell if a step has a lesson's text, reports/templates/web/lessons/stepN.html.j2."""
    from tensorir_ladder.reports.web.page import environment

    return f"lessons/step{number}.html.j2" in environment().list_templates()
