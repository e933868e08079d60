"""The picture of drawn shapes, as the records of this repository fill it: what is named can be read."""

from __future__ import annotations

import itertools

import pytest
from matplotlib.transforms import Bbox

from tensorir_ladder.harness.environment import ROOT
from tensorir_ladder.harness.records import ShapeGroup, load_shapes, shape_groups
from tensorir_ladder.reports.shapes import ShapeSection, latest, shapes_figure

GROUPS = latest(shape_groups(load_shapes(ROOT / "reports" / "results")))
SEPARATE = 6  # pixels, about a letter: names closer side by side read as one


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: ShapeSection(group).title)
def test_names_stand_apart_and_within_the_axes(group: ShapeGroup) -> None:
    """Of random8 two names once stood so close that they read as one shape of five numbers."""
    figure = shapes_figure(ShapeSection(group))
    (axes,) = figure.axes
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in axes.texts]
    assert bool(boxes) == bool(group.losers)
    for box in boxes:
        assert axes.bbox.x0 + SEPARATE < box.x0 < box.x1 < axes.bbox.x1 - SEPARATE
        assert axes.bbox.y0 < box.y0
    for one, other in itertools.combinations(boxes, 2):
        assert not Bbox.from_extents(one.x0 - SEPARATE, one.y0, one.x1 + SEPARATE, one.y1).overlaps(other)
